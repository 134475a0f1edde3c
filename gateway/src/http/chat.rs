//! `/v1/chat/completions`.

use super::{
    context::{self, Fitted, Recalled},
    conversations::turn::Turn,
    endpoint::{Call, Endpoint},
    openai::{
        CallPart, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatFinish, ChatFunctionCall, ChatLogprobs, ChatMessage, ChatRequest,
        ChatResponse, ChatToken, ChatTokenLogprob, ChatTool, ChatToolCall, Content, ContentPart, CustomPart, FunctionDefinition,
        FunctionPart, Message, ServerToolCall, Thought, TypedPart,
    },
    stored::Stored,
    tool_choice,
};
use crate::{
    context::Strategy,
    dialog::{self, Dialog, ToolCall, thinking::ReasoningWish},
    generation::piece::{CallDelta, Finish, FinishReason, Logprob},
    http::logprob::json_logprob,
    metrics::usage::{ContextUsage, Usage},
    requests::{
        custom::{self, InputReader},
        error::ApiError,
        fields::row::Door,
        options::{Options, TOP_LOGPROBS_MAX},
        parse::in_range,
        thinking,
    },
    serving::{
        answer::{Delta, Ran},
        gateway::Gateway,
        rounds::{self, Rounds},
    },
    text::{tokenizer::printable, tool::Tool},
    traces::names::Operation,
};
use minijinja::{Value, value::ValueKind};
use std::collections::{BTreeMap, HashMap, HashSet};
use tidemill_proto::block::Token;

/// Roles of messages. `function` is OpenAI's older name for `tool`.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

#[derive(Debug)]
pub struct Chat {
    /// The turn of a stored conversation; `None` if nothing is stored.
    turn: Option<Turn>,
    context: Option<ContextUsage>,
    /// Further rounds; `None` if no tools run on the server for this answer.
    rounds: Option<Rounds>,
    calls: Calls,
}

/// The form in which the client receives calls.
#[derive(Debug, Default)]
struct Calls {
    /// Whether calls use the older fields: one call, without an id.
    older: bool,
    /// Names of custom tools.
    custom: HashSet<String>,
    /// Calls of custom tools that a stream has started, by choice and index.
    reading: HashMap<(u32, u32), InputReader>,
}

impl Calls {
    fn of(chat: &ChatRequest) -> Self {
        let custom = chat.tools.iter().flatten().filter_map(|tool| tool.custom.as_ref()?["name"].as_str().map(str::to_owned));
        let given = |count: Option<usize>| count.is_some_and(|count| count > 0);
        let older = given(chat.functions.as_ref().map(Vec::len)) && !given(chat.tools.as_ref().map(Vec::len));
        Self { older, custom: custom.collect(), reading: HashMap::new() }
    }

    /// Writes a call's part for a stream. Calls of custom tools have text as arguments.
    fn part(&mut self, choice: u32, call: CallDelta) -> CallPart {
        let CallDelta { index, id, name, arguments } = call;
        if name.as_ref().is_some_and(|name| self.custom.contains(name)) {
            self.reading.insert((choice, index), InputReader::default());
        }
        let r#type = id.is_some().then_some(if self.reading.contains_key(&(choice, index)) { "custom" } else { "function" });
        match self.reading.get_mut(&(choice, index)) {
            Some(reader) => {
                let custom = Some(CustomPart { name, input: reader.push(&arguments) });
                CallPart { index: Some(index), id, r#type, function: None, custom }
            }
            None => CallPart { index: Some(index), id, r#type, function: Some(FunctionPart { name, arguments }), custom: None },
        }
    }

    /// Writes calls in the fields that the client knows.
    fn told(&mut self, choice: u32, calls: Vec<CallDelta>) -> (Vec<CallPart>, Option<FunctionPart>) {
        let mut parts: Vec<_> = calls.into_iter().map(|call| self.part(choice, call)).collect();
        match self.older {
            true => (Vec::new(), parts.drain(..).next().and_then(|part| part.function)),
            false => (parts, None),
        }
    }

    fn finish(&self, reason: FinishReason) -> ChatFinish {
        match reason {
            FinishReason::ToolCalls if self.older => ChatFinish::Older("function_call"),
            reason => ChatFinish::Usual(reason),
        }
    }
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
    const DOOR: Door = Door::Chat;
    const OPERATION: Operation = Operation::Chat;
    const ID_PREFIX: &'static str = "chatcmpl";
    const PROMPT: &'static str = "messages";
    const CONVERSES: bool = true;

    fn understand(
        gateway: &Gateway,
        mut chat: ChatRequest,
        Stored { before, facts, unread }: Stored,
        options: &mut Options,
    ) -> Result<(Self, Vec<Vec<Token>>), ApiError> {
        let calls = Calls::of(&chat);
        if options.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "`max_tokens` is 0: an answer has at least one token"));
        }
        let top_logprobs = in_range("top_logprobs", chat.top_logprobs.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)?;
        options.sampling.logprobs = chat.logprobs.unwrap_or(false).then_some(top_logprobs);
        options.rules.logprobs_of_text = options.sampling.logprobs.is_some();
        if top_logprobs > 0 && options.sampling.logprobs.is_none() {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`"));
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
        let recalled = Recalled { history, facts: facts.as_ref(), unread };
        let fitted = context::fit(gateway, Self::PROMPT, dialog, recalled, context, options)?;
        let Fitted { dialog, measured, usage: context, outlook } = fitted;
        if let Some(turn) = &mut turn {
            turn.look_ahead(outlook);
        }
        let rounds = Rounds::new(gateway, Self::PROMPT, names, &dialog, options);
        let prompt = gateway.prompt(Self::PROMPT, &dialog, measured, options)?;
        Ok((Self { turn, context, rounds, calls }, vec![prompt]))
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
        let calls = &mut self.calls;
        let choice = |Delta { index, piece, ran, .. }: Delta| {
            let is_silent = piece.text.is_empty() && !piece.calls.is_empty();
            let (mut tool_calls, function_call) = calls.told(index, piece.calls);
            tool_calls.iter_mut().for_each(|part| part.index = None);
            let Finish { reason, stop_reason } = piece.finish.unwrap_or(Finish::LENGTH);
            ChatChoice {
                index,
                message: ChatMessage {
                    role: "assistant",
                    content: (!is_silent).then_some(piece.text),
                    refusal: None,
                    thought: thought(piece.reasoning),
                    tool_calls,
                    function_call,
                    server_tool_calls: ran.into_iter().map(server_call).collect(),
                },
                logprobs: call.options.sampling.logprobs.map(|_| logprobs(call, &piece.logprobs)),
                finish_reason: calls.finish(reason),
                stop_reason,
                token_ids: call.options.return_token_ids.then_some(piece.tokens),
            }
        };
        let choices = choices.into_iter().map(choice).collect();
        ChatResponse {
            id: call.id.clone(),
            object: "chat.completion",
            created: call.created,
            model: call.model.clone(),
            choices,
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
        let (finish_reason, stop_reason) =
            piece.finish.map_or((None, None), |finish| (Some(self.calls.finish(finish.reason)), finish.stop_reason));
        let silent = finish_reason.is_none() && piece.reasoning.is_empty() && piece.calls.is_empty() && ran.is_empty();
        let (tool_calls, function_call) = self.calls.told(index, piece.calls);
        let delta = ChatDelta {
            role: None,
            content: (silent || !piece.text.is_empty()).then_some(piece.text),
            thought: thought(piece.reasoning),
            tool_calls,
            function_call,
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

/// Translates the body into the dialog that all protocols share.
pub(super) fn dialog(chat: ChatRequest) -> Result<Dialog, ApiError> {
    if chat.messages.is_empty() && chat.conversation.is_none() {
        return Err(ApiError::invalid("messages", "`messages` is empty: at least one message is needed"));
    }
    if chat.chat_template_kwargs.as_ref().is_some_and(|kwargs| !matches!(kwargs.kind(), ValueKind::Map | ValueKind::None)) {
        return Err(ApiError::invalid("chat_template_kwargs", "`chat_template_kwargs` must be an object"));
    }
    let reasoning = ReasoningWish {
        effort: thinking::effort("reasoning_effort", chat.reasoning_effort.clone())?,
        budget: thinking::token_budget(chat.thinking_token_budget)?,
        ..ReasoningWish::default()
    };
    let older = Calls::of(&chat).older;
    if let (false, Some(choice)) = (older, &chat.function_call)
        && choice != "auto"
        && (choice != "none" || chat.tools.as_ref().is_some_and(|tools| !tools.is_empty()))
    {
        let message = "`function_call` belongs to `functions`: with `tools`, send `tool_choice`";
        return Err(ApiError::invalid("function_call", message));
    }
    let tools = match older {
        true => chat.functions.unwrap_or_default().into_iter().map(function).collect(),
        false => chat.tools.unwrap_or_default().into_iter().enumerate().map(|(i, sent)| tool(i, sent)).collect::<Result<_, _>>()?,
    };
    let choice = if older { chat.function_call.or(chat.tool_choice) } else { chat.tool_choice };
    let (tools, tool_choice) = tool_choice::understand(tools, choice.as_ref())?;
    let mut older_calls = HashMap::new();
    let messages = chat.messages.into_iter().enumerate().map(|(i, sent)| message(i, sent, &mut older_calls));
    Ok(Dialog {
        messages: messages.collect::<Result<_, _>>()?,
        tools,
        tool_choice,
        parallel: chat.parallel_tool_calls.unwrap_or(true) && !older,
        reasoning,
        template_kwargs: chat.chat_template_kwargs.map(template_kwargs).unwrap_or_default(),
        continues: !chat.add_generation_prompt.unwrap_or(true),
    })
}

/// Reads a message. `older_calls` has the ids of the last calls in the older field, which has none, by function name.
fn message(index: usize, sent: Message, older_calls: &mut HashMap<String, String>) -> Result<dialog::Message, ApiError> {
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
        None if sent.role == "assistant" => sent.refusal,
        // A tool may return nothing; any other message has content.
        None if matches!(sent.role.as_str(), "tool" | "function") => Some(String::new()),
        None => return Err(ApiError::invalid(param(), format!("a message of role `{}` needs `content`", sent.role))),
        Some(Content::Text(text)) => Some(text),
        Some(Content::Parts(parts)) => Some(joined(parts, &param())?),
        Some(Content::Part(part)) => Some(joined(vec![ContentPart::Typed(part)], &param())?),
    };
    let calls = sent.tool_calls.unwrap_or_default().into_iter();
    let mut tool_calls = calls.map(|call| past_call(index, call)).collect::<Result<Vec<_>, _>>()?;
    if let (true, Some(call)) = (tool_calls.is_empty(), sent.function_call) {
        let id = format!("call_{index}_{}", call.name);
        older_calls.insert(call.name.clone(), id.clone());
        tool_calls.push(past_function(id, call));
    }
    let (role, tool_call_id) = match sent.role.as_str() {
        "function" => {
            let answered = sent.name.as_ref().and_then(|name| older_calls.get(name).cloned());
            ("tool".to_owned(), sent.tool_call_id.or(answered).or(sent.name.clone()))
        }
        _ => (sent.role, sent.tool_call_id),
    };
    Ok(dialog::Message {
        role,
        content,
        reasoning: sent.reasoning.or(sent.reasoning_content),
        tool_calls,
        tool_call_id,
        name: sent.name,
        others: sent.others,
    })
}

/// Joins a content's parts by line breaks, as vLLM does: templates expect text.
fn joined(parts: Vec<ContentPart>, param: &str) -> Result<String, ApiError> {
    let typed = |TypedPart { r#type, text, refusal }| match (r#type.as_str(), text.or(refusal)) {
        // The others are names in the Responses API.
        ("text" | "input_text" | "output_text" | "refusal", Some(text)) => Ok(text),
        (known @ ("text" | "input_text" | "output_text" | "refusal"), None) => {
            Err(ApiError::invalid(param, format!("a content part of type `{known}` needs its text")))
        }
        ("image_url" | "input_image" | "image", _) => Err(ApiError::no_images(param)),
        (other, _) => Err(ApiError::invalid(param, format!("content parts of type `{other}` are not supported: this model reads text"))),
    };
    let text = |part| match part {
        ContentPart::Text(text) => Ok(text),
        ContentPart::Typed(part) => typed(part),
    };
    Ok(parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn past_call(index: usize, call: ChatToolCall) -> Result<ToolCall, ApiError> {
    let id = call.id.unwrap_or_default();
    match (call.function, call.custom) {
        (Some(function), _) => Ok(past_function(id, function)),
        (None, Some(custom)) => Ok(ToolCall { id, name: custom.name, arguments: custom::arguments(custom.input) }),
        (None, None) => {
            let param = format!("messages[{index}].tool_calls");
            Err(ApiError::invalid(param.clone(), format!("`{param}`: a call needs `function` (or `custom`)")))
        }
    }
}

fn past_function(id: String, ChatFunctionCall { name, arguments }: ChatFunctionCall) -> ToolCall {
    match arguments {
        None | Some(serde_json::Value::Null) => ToolCall::new(id, name, ""),
        Some(serde_json::Value::String(text)) => ToolCall::new(id, name, &text),
        Some(arguments) => ToolCall { id, name, arguments },
    }
}

fn tool(index: usize, sent: ChatTool) -> Result<Tool, ApiError> {
    match (sent.r#type.as_str(), sent.function, sent.custom) {
        ("function", Some(sent), _) => Ok(function(sent)),
        ("function", None, _) => Err(ApiError::invalid(format!("tools[{index}].function"), "a tool of type `function` needs `function`")),
        ("custom", _, Some(sent)) => custom::tool(&format!("tools[{index}].custom"), &sent),
        ("custom", _, None) => Err(ApiError::invalid(format!("tools[{index}].custom"), "a tool of type `custom` needs `custom`")),
        (other, ..) => Err(ApiError::invalid(
            format!("tools[{index}].type"),
            format!("`{other}` is not supported: tools are of type `function` or `custom`"),
        )),
    }
}

fn function(sent: FunctionDefinition) -> Tool {
    let FunctionDefinition { name, description, parameters, strict } = sent;
    Tool { name, description, parameters, strict: strict.unwrap_or(false) }
}

fn template_kwargs(kwargs: Value) -> BTreeMap<String, Value> {
    let names = kwargs.try_iter().into_iter().flatten();
    names.filter_map(|name| Some((name.as_str()?.to_owned(), kwargs.get_item(&name).ok()?))).collect()
}

fn thought(reasoning: String) -> Option<Thought> {
    (!reasoning.is_empty()).then(|| Thought { reasoning: reasoning.clone(), reasoning_content: reasoning })
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
