//! `/v1/chat/completions`.

use super::{
    answer::Delta,
    endpoint::{Call, Endpoint, json_logprob},
    errors::ApiError,
    openai::{
        ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest, ChatResponse, ChatToken,
        ChatTokenLogprob, Content, ContentPart, Message, Usage,
    },
    parse::{Options, TOP_LOGPROBS_MAX, in_range},
};
use crate::{
    gateway::Gateway,
    generation::{Finish, Logprob},
    text::{TextModel, tokenizer::printable},
};
use minijinja::{Value, value::ValueKind};
use std::time::SystemTime;
use tidemill_proto::block::Token;

#[derive(Debug)]
pub struct Chat;

impl Endpoint for Chat {
    type Body = ChatRequest;
    type Whole = ChatResponse;
    type Chunk = ChatChunk;
    const ID_PREFIX: &'static str = "chatcmpl";
    const PROMPT: &'static str = "messages";

    fn understand(gateway: &Gateway, chat: ChatRequest, options: &mut Options) -> Result<(Self, Vec<Vec<Token>>), ApiError> {
        if chat.tools.is_some_and(|tools| !tools.is_empty()) {
            return Err(ApiError::unsupported("tools"));
        }
        if chat.functions.is_some_and(|functions| !functions.is_empty()) {
            return Err(ApiError::unsupported("functions"));
        }
        if chat.response_format.is_some_and(|format| format.r#type != "text") {
            return Err(ApiError::unsupported("response_format"));
        }
        let top_logprobs = in_range("top_logprobs", chat.top_logprobs.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)?;
        options.sampling.logprobs = chat.logprobs.unwrap_or(false).then_some(top_logprobs);
        if top_logprobs > 0 && options.sampling.logprobs.is_none() {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`"));
        }
        if chat.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` is empty: at least one message is needed"));
        }
        if chat.chat_template_kwargs.as_ref().is_some_and(|kwargs| !matches!(kwargs.kind(), ValueKind::Map | ValueKind::None)) {
            return Err(ApiError::invalid("chat_template_kwargs", "`chat_template_kwargs` must be an object"));
        }
        let prompt = render(gateway.text(), chat.messages, chat.add_generation_prompt.unwrap_or(true), chat.chat_template_kwargs)?;
        gateway.check_text_length("messages", &prompt)?;
        // The template has written BOS where the model wants it.
        let tokens = gateway.text().tokenizer.encode(&prompt, false).map_err(|e| ApiError::invalid("messages", e.to_string()))?;
        Ok((Self, vec![tokens]))
    }

    fn max_tokens_default(room: u32) -> u32 {
        room
    }

    fn whole(&mut self, call: &Call, choices: Vec<Delta>, usage: Usage) -> ChatResponse {
        let choice = |Delta { index, piece, .. }: Delta| {
            let Finish { reason, stop_reason } = piece.finish.unwrap_or(Finish::LENGTH);
            ChatChoice {
                index,
                message: ChatMessage { role: "assistant", content: piece.text, refusal: None },
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
            usage,
            service_tier: call.options.service_tier.clone(),
            prompt_token_ids: call.options.return_token_ids.then(|| call.prompt(0).clone()),
        }
    }

    fn opening(&mut self, call: &Call, index: u32) -> Option<ChatChunk> {
        let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()) };
        let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None };
        let prompt_token_ids = call.options.return_token_ids.then(|| call.prompt(index).clone());
        Some(ChatChunk { prompt_token_ids, ..chunk(call, vec![choice], None) })
    }

    fn chunk(&mut self, call: &Call, Delta { index, piece, .. }: Delta, usage: Option<Usage>) -> ChatChunk {
        let (finish_reason, stop_reason) = piece.finish.map_or((None, None), |finish| (Some(finish.reason), finish.stop_reason));
        let choice = ChatChunkChoice {
            index,
            delta: ChatDelta { role: None, content: (finish_reason.is_none() || !piece.text.is_empty()).then_some(piece.text) },
            logprobs: (!piece.logprobs.is_empty()).then(|| logprobs(call, &piece.logprobs)),
            finish_reason,
            stop_reason,
            token_ids: call.options.return_token_ids.then_some(piece.tokens),
        };
        chunk(call, vec![choice], usage)
    }

    fn closing(&mut self, call: &Call, usage: Usage) -> ChatChunk {
        chunk(call, Vec::new(), Some(usage))
    }
}

fn render(model: &TextModel, messages: Vec<Message>, add_generation_prompt: bool, extra: Option<Value>) -> Result<String, ApiError> {
    let template = model.template.as_ref().ok_or_else(|| {
        ApiError::invalid("messages", "this model has no chat template (it is a base model, perhaps): use /v1/completions")
    })?;
    let messages = messages.into_iter().enumerate().map(|(i, message)| template_value(i, message)).collect::<Result<Vec<_>, _>>()?;
    let rendered = template.render(&messages, add_generation_prompt, extra, SystemTime::now());
    rendered.map_err(|e| ApiError::invalid("messages", e.to_string()))
}

/// Templates expect text: parts are joined by line breaks, as vLLM does.
fn template_value(index: usize, message: Message) -> Result<Value, ApiError> {
    let param = || format!("messages[{index}].content");
    let content = match message.content {
        // Only an assistant's turn may be empty.
        None if message.role == "assistant" => Value::from(()),
        None => return Err(ApiError::invalid(param(), format!("a message of role `{}` needs `content`", message.role))),
        Some(Content::Text(text)) => Value::from(text),
        Some(Content::Parts(parts)) => {
            let text = |part: ContentPart| match (part.r#type.as_str(), part.text) {
                ("text", Some(text)) => Ok(text),
                ("text", None) => Err(ApiError::invalid(param(), "a content part of type `text` needs `text`")),
                (other, _) => {
                    Err(ApiError::invalid(param(), format!("content parts of type `{other}` are not supported: this model reads text")))
                }
            };
            Value::from(parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
    };
    let fields = [("role".to_owned(), Value::from(message.role)), ("content".to_owned(), content)];
    Ok(Value::from_pairs(fields.into_iter().chain(message.others)))
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
