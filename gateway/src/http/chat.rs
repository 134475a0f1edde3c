//! `/v1/chat/completions`.

use super::{
    answer::Delta,
    context::{self, ContextUsage, Fitted},
    conversations::turn::Turn,
    endpoint::{Call, Endpoint, json_logprob},
    errors::ApiError,
    openai::{
        ArgumentsField, CallPart, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest, ChatResponse,
        ChatToken, ChatTokenLogprob, ChatTool, ChatToolCall, Content, ContentPart, FunctionPart, Message, ServerToolCall, Thought,
        ToolChoiceField, Usage,
    },
    parse::{Options, TOP_LOGPROBS_MAX, in_range},
    rounds::{self, Rounds, rounded::Ran},
    stored::Stored,
};
use crate::{
    context::Strategy,
    dialog::{self, Dialog, ReasoningWish, Tool, ToolCall, ToolChoice},
    gateway::Gateway,
    generation::{CallDelta, Finish, Logprob},
    text::tokenizer::printable,
};
use minijinja::{Value, value::ValueKind};
use std::collections::BTreeMap;
use tidemill_proto::block::Token;

/// Of messages. `function` is OpenAI's older name of `tool`.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
/// Of `reasoning_effort`.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

#[derive(Debug)]
pub struct Chat {
    /// `None`: nothing is stored.
    turn: Option<Turn>,
    context: Option<ContextUsage>,
    /// `None`: no tools run here for it.
    rounds: Option<Rounds>,
}

impl Chat {
    fn usage(&self, mut usage: Usage) -> Usage {
        if let Some(tidemill) = &mut usage.tidemill {
            tidemill.context.clone_from(&self.context);
        }
        usage
    }
}

impl Endpoint for Chat {
    type Body = ChatRequest;
    type Whole = ChatResponse;
    type Chunk = ChatChunk;
    const PATH: &'static str = "/v1/chat/completions";
    const ID_PREFIX: &'static str = "chatcmpl";
    const PROMPT: &'static str = "messages";
    const CONVERSES: bool = true;

    fn understand(
        gateway: &Gateway,
        mut chat: ChatRequest,
        Stored { before, facts }: Stored,
        options: &mut Options,
    ) -> Result<(Self, Vec<Vec<Token>>), ApiError> {
        if chat.functions.as_ref().is_some_and(|functions| !functions.is_empty()) {
            return Err(ApiError::unsupported("functions"));
        }
        if options.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "`max_tokens` is 0: an answer has at least one token"));
        }
        let top_logprobs = in_range("top_logprobs", chat.top_logprobs.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)?;
        options.sampling.logprobs = chat.logprobs.unwrap_or(false).then_some(top_logprobs);
        if top_logprobs > 0 && options.sampling.logprobs.is_none() {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`"));
        }
        if chat.conversation.is_some() != before.is_some() {
            return Err(ApiError::invalid("conversation", "`conversation` must be written without escapes"));
        }
        if (chat.memory == Some(true)) != facts.is_some() {
            return Err(ApiError::invalid("memory", "`memory` must be written without escapes"));
        }
        let named = chat.server_tools.take().unwrap_or_default();
        let tools = rounds::offered(gateway, &named)?;
        for (field, excluded) in [
            ("conversation", chat.conversation.is_some()),
            ("n", options.choices > 1),
            ("add_generation_prompt", chat.add_generation_prompt == Some(false)),
        ] {
            if excluded && !tools.is_empty() {
                return Err(ApiError::invalid(
                    field,
                    format!("`{field}`: tools that run at the server are for one answer that nothing else is part of"),
                ));
            }
        }
        let names = tools.iter().map(|tool| tool.name.clone()).collect();
        options.similar_will_do = chat.semantic_cache != Some(false)
            && before.is_none()
            && tools.is_empty()
            && facts.is_none()
            && options.repeatable
            && options.choices == 1
            && options.sampling.logprobs.is_none();
        let usual = if before.is_some() { gateway.context() } else { Strategy::None };
        let context = context::wanted(chat.context, usual, before.is_some())?;
        let (mut dialog, mut turn, history) = match before {
            None => (dialog(chat)?, None, None),
            Some(_) if options.choices > 1 => return Err(ApiError::invalid("n", "a conversation goes on with one answer: `n` must be 1")),
            Some(_) if chat.add_generation_prompt == Some(false) => {
                return Err(ApiError::invalid("add_generation_prompt", "a conversation goes on with an answer of its own"));
            }
            Some(before) => {
                let (dialog, turn, history) = before.enter(gateway, dialog(chat)?, context.retrieve > 0)?;
                (dialog, Some(turn), history)
            }
        };
        dialog.tools.extend(tools);
        let fitted = context::fit(gateway, Self::PROMPT, dialog, history, facts.as_ref(), context, options)?;
        let Fitted { dialog, usage: context, outlook } = fitted;
        if let Some(turn) = &mut turn {
            turn.look_ahead(outlook);
        }
        let rounds = Rounds::new(gateway, Self::PROMPT, names, &dialog, options);
        let prompt = gateway.prompt(Self::PROMPT, &dialog, options)?;
        Ok((Self { turn, context, rounds }, vec![prompt]))
    }

    fn rounds(&mut self) -> Option<Rounds> {
        self.rounds.take()
    }

    fn turn(&mut self) -> Option<&mut Turn> {
        self.turn.as_mut()
    }

    fn max_tokens_default(room: u32) -> u32 {
        room
    }

    fn whole(&mut self, call: &Call, choices: Vec<Delta>, usage: Usage) -> ChatResponse {
        let choice = |Delta { index, piece, ran, .. }: Delta| {
            let Finish { reason, stop_reason } = piece.finish.unwrap_or(Finish::LENGTH);
            ChatChoice {
                index,
                message: ChatMessage {
                    role: "assistant",
                    content: (!piece.text.is_empty() || piece.calls.is_empty()).then_some(piece.text),
                    refusal: None,
                    thought: thought(piece.reasoning),
                    tool_calls: piece.calls.into_iter().map(|call| CallPart { index: None, ..call_part(call) }).collect(),
                    server_tool_calls: ran.into_iter().map(server_call).collect(),
                },
                logprobs: call.options.sampling.logprobs.map(|_| logprobs(call, &piece.logprobs)),
                finish_reason: reason,
                stop_reason,
                token_ids: call.options.return_token_ids.then_some(piece.tokens),
            }
        };
        ChatResponse {
            id: call.id.clone(),
            object: "chat.completion",
            created: call.created,
            model: call.model.clone(),
            choices: choices.into_iter().map(choice).collect(),
            usage: self.usage(usage),
            service_tier: call.options.service_tier.clone(),
            prompt_token_ids: call.options.return_token_ids.then(|| call.prompt(0).clone()),
            conversation: self.turn.as_ref().map(Turn::told),
        }
    }

    fn opening(&mut self, call: &Call, index: u32) -> Option<ChatChunk> {
        let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()), ..ChatDelta::default() };
        let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None };
        let prompt_token_ids = call.options.return_token_ids.then(|| call.prompt(index).clone());
        Some(ChatChunk { prompt_token_ids, ..chunk(call, vec![choice], None) })
    }

    fn chunk(&mut self, call: &Call, Delta { index, piece, ran, .. }: Delta, usage: Option<Usage>) -> ChatChunk {
        let (finish_reason, stop_reason) = piece.finish.map_or((None, None), |finish| (Some(finish.reason), finish.stop_reason));
        let silent = finish_reason.is_none() && piece.reasoning.is_empty() && piece.calls.is_empty() && ran.is_empty();
        let delta = ChatDelta {
            role: None,
            content: (silent || !piece.text.is_empty()).then_some(piece.text),
            thought: thought(piece.reasoning),
            tool_calls: piece.calls.into_iter().map(call_part).collect(),
            server_tool_calls: ran.into_iter().map(server_call).collect(),
        };
        let choice = ChatChunkChoice {
            index,
            delta,
            logprobs: (!piece.logprobs.is_empty()).then(|| logprobs(call, &piece.logprobs)),
            finish_reason,
            stop_reason,
            token_ids: call.options.return_token_ids.then_some(piece.tokens),
        };
        let conversation = self.turn.as_ref().filter(|_| choice.finish_reason.is_some()).map(Turn::told);
        ChatChunk { conversation, ..chunk(call, vec![choice], usage.map(|usage| self.usage(usage))) }
    }

    fn closing(&mut self, call: &Call, usage: Usage) -> ChatChunk {
        chunk(call, Vec::new(), Some(self.usage(usage)))
    }
}

/// The body in words that no protocol owns.
pub(super) fn dialog(chat: ChatRequest) -> Result<Dialog, ApiError> {
    if chat.messages.is_empty() && chat.conversation.is_none() {
        return Err(ApiError::invalid("messages", "`messages` is empty: at least one message is needed"));
    }
    if chat.chat_template_kwargs.as_ref().is_some_and(|kwargs| !matches!(kwargs.kind(), ValueKind::Map | ValueKind::None)) {
        return Err(ApiError::invalid("chat_template_kwargs", "`chat_template_kwargs` must be an object"));
    }
    if let Some(effort) = chat.reasoning_effort.as_deref().filter(|effort| !EFFORTS.contains(effort)) {
        let message = format!("`reasoning_effort` is `{effort}`: it must be one of `{}`", EFFORTS.join("`, `"));
        return Err(ApiError::invalid("reasoning_effort", message));
    }
    Ok(Dialog {
        messages: chat.messages.into_iter().enumerate().map(|(i, sent)| message(i, sent)).collect::<Result<_, _>>()?,
        tools: chat.tools.unwrap_or_default().into_iter().enumerate().map(|(i, sent)| tool(i, sent)).collect::<Result<_, _>>()?,
        tool_choice: tool_choice(chat.tool_choice)?,
        parallel: chat.parallel_tool_calls.unwrap_or(true),
        reasoning: ReasoningWish { effort: chat.reasoning_effort, enable_thinking: None },
        template_kwargs: chat.chat_template_kwargs.map(template_kwargs).unwrap_or_default(),
        continues: !chat.add_generation_prompt.unwrap_or(true),
    })
}

fn message(index: usize, sent: Message) -> Result<dialog::Message, ApiError> {
    let param = || format!("messages[{index}].content");
    if !ROLES.contains(&sent.role.as_str()) {
        let message = format!("`{}` is not a role: it must be one of `{}`", sent.role, ROLES.join("`, `"));
        return Err(ApiError::invalid(format!("messages[{index}].role"), message));
    }
    if sent.role == "tool" && sent.tool_call_id.as_deref().is_none_or(str::is_empty) {
        let message = "a message of role `tool` needs `tool_call_id`: the id of the call that it answers";
        return Err(ApiError::invalid(format!("messages[{index}].tool_call_id"), message));
    }
    let content = match sent.content {
        // Only an assistant's turn may be empty.
        None if sent.role == "assistant" => None,
        None => return Err(ApiError::invalid(param(), format!("a message of role `{}` needs `content`", sent.role))),
        Some(Content::Text(text)) => Some(text),
        Some(Content::Parts(parts)) => Some(joined(parts, &param())?),
    };
    Ok(dialog::Message {
        role: sent.role,
        content,
        reasoning: sent.reasoning.or(sent.reasoning_content),
        tool_calls: sent.tool_calls.unwrap_or_default().into_iter().map(past_call).collect(),
        tool_call_id: sent.tool_call_id,
        name: sent.name,
        others: sent.others,
    })
}

/// Templates expect text: parts are joined by line breaks, as vLLM does.
fn joined(parts: Vec<ContentPart>, param: &str) -> Result<String, ApiError> {
    let text = |part: ContentPart| match (part.r#type.as_str(), part.text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(ApiError::invalid(param, "a content part of type `text` needs `text`")),
        ("image_url" | "input_image" | "image", _) => Err(ApiError::no_images(param)),
        (other, _) => Err(ApiError::invalid(param, format!("content parts of type `{other}` are not supported: this model reads text"))),
    };
    Ok(parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn past_call(call: ChatToolCall) -> ToolCall {
    let (id, name) = (call.id.unwrap_or_default(), call.function.name);
    match call.function.arguments {
        Some(ArgumentsField::Object(arguments)) => ToolCall { id, name, arguments: arguments.into() },
        Some(ArgumentsField::Text(text)) => ToolCall::new(id, name, &text),
        None => ToolCall::new(id, name, ""),
    }
}

fn tool(index: usize, sent: ChatTool) -> Result<Tool, ApiError> {
    let function = match (sent.r#type.as_str(), sent.function) {
        ("function", Some(function)) => function,
        ("function", None) => {
            return Err(ApiError::invalid(format!("tools[{index}].function"), "a tool of type `function` needs `function`"));
        }
        (other, _) => {
            return Err(ApiError::invalid(
                format!("tools[{index}].type"),
                format!("`{other}` is not supported: tools are of type `function`"),
            ));
        }
    };
    Ok(Tool {
        name: function.name,
        description: function.description,
        parameters: function.parameters,
        strict: function.strict.unwrap_or(false),
    })
}

fn tool_choice(sent: Option<ToolChoiceField>) -> Result<ToolChoice, ApiError> {
    match sent {
        None => Ok(ToolChoice::Auto),
        Some(ToolChoiceField::Named { function }) => Ok(ToolChoice::Named(function.name)),
        Some(ToolChoiceField::Mode(mode)) => match mode.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            other => {
                let message =
                    format!("`tool_choice` is `{other}`: it must be `none`, `auto`, `required`, or an object that names a function");
                Err(ApiError::invalid("tool_choice", message))
            }
        },
    }
}

fn template_kwargs(kwargs: Value) -> BTreeMap<String, Value> {
    let names = kwargs.try_iter().into_iter().flatten();
    names.filter_map(|name| Some((name.as_str()?.to_owned(), kwargs.get_item(&name).ok()?))).collect()
}

fn thought(reasoning: String) -> Option<Thought> {
    (!reasoning.is_empty()).then(|| Thought { reasoning: reasoning.clone(), reasoning_content: reasoning })
}

/// As a stream's part.
fn call_part(call: CallDelta) -> CallPart {
    CallPart {
        index: Some(call.index),
        r#type: call.id.is_some().then_some("function"),
        id: call.id,
        function: FunctionPart { name: call.name, arguments: call.arguments },
    }
}

fn server_call(Ran { id, name, arguments, output }: Ran) -> ServerToolCall {
    ServerToolCall { id, r#type: "function", function: FunctionPart { name: Some(name), arguments }, output }
}

fn chunk(call: &Call, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
    ChatChunk {
        id: call.id.clone(),
        object: "chat.completion.chunk",
        created: call.created,
        model: call.model.clone(),
        choices,
        usage: call.options.include_usage.then_some(usage),
        prompt_token_ids: None,
        service_tier: call.options.service_tier.clone(),
        conversation: None,
    }
}

fn logprobs(call: &Call, logprobs: &[Logprob]) -> ChatLogprobs {
    let token = |token: Token, logprob: f32| {
        let bytes = call.tokenizer.token_bytes(token);
        ChatToken { token: printable(&bytes), logprob: json_logprob(logprob), bytes }
    };
    let content = logprobs.iter().map(|Logprob { token: drawn, logprob, .. }| ChatTokenLogprob {
        token: token(*drawn, logprob.logprob),
        top_logprobs: logprob.top.iter().map(|(id, logprob)| token(*id, *logprob)).collect(),
    });
    ChatLogprobs { content: content.collect() }
}
