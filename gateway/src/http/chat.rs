//! `/v1/chat/completions`.

use super::{
    FrontDoor,
    answer::{Answer, Delta, Finish, Logprob},
    errors::ApiError,
    openai::{
        ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest, ChatResponse, ChatToken,
        ChatTokenLogprob, Content, GenerateRequest, Message, Usage,
    },
    parse::{self, Options, TOP_LOGPROBS_MAX, in_range},
    sse,
};
use crate::text::{
    TextModel,
    tokenizer::{Tokenizer, printable},
};
use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use minijinja::{Value, value::ValueKind};
use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};
use tidemill_proto::block::Token;

pub async fn chat(State(front): State<Arc<FrontDoor>>, body: Body) -> Result<Response, ApiError> {
    let (answer, call) = front.counted(start(&front, body)).await?;
    call.respond(answer).await
}

/// One request, understood.
struct Call {
    id: String,
    created: u64,
    model: String,
    options: Options,
    prompt: Vec<Token>,
    tokenizer: Arc<Tokenizer>,
}

async fn start(front: &Arc<FrontDoor>, body: Body) -> Result<(Answer, Call), ApiError> {
    let arrived = Instant::now();
    let body = front.read(body).await?;
    let worker = Arc::clone(front);
    let (mut options, prompt) = front.compute(move || understand(&worker, arrived, &body)).await?;
    let context = front.context_tokens()?;
    let room = context.saturating_sub(prompt.len() as u32);
    let max_tokens = options.max_tokens.unwrap_or(room.max(1));
    let answer = front.start("messages", vec![prompt.clone()], &mut options, max_tokens, None)?;
    let (id, model, tokenizer) = (front.draw_id("chatcmpl"), front.model_name().to_owned(), Arc::clone(&front.text().tokenizer));
    Ok((answer, Call { id, created: super::unix_seconds(), model, options, prompt, tokenizer }))
}

/// Parses, renders and tokenizes.
fn understand(front: &FrontDoor, arrived: Instant, body: &[u8]) -> Result<(Options, Vec<Token>), ApiError> {
    let request: GenerateRequest = parse::json(body)?;
    front.check_model(request.model.as_deref())?;
    let chat: ChatRequest = parse::json(body)?;
    let mut options = Options::check(arrived, request, front.text())?;
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
    let prompt = render(front.text(), chat.messages, chat.add_generation_prompt.unwrap_or(true), chat.chat_template_kwargs)?;
    front.check_text_length("messages", &prompt)?;
    // The template has written BOS where the model wants it.
    let tokens = front.text().tokenizer.encode(&prompt, false).map_err(|e| ApiError::invalid("messages", e.to_string()))?;
    Ok((options, tokens))
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
        // An assistant's turn may be empty; anybody else said something.
        None if message.role == "assistant" => Value::from(()),
        None => return Err(ApiError::invalid(param(), format!("a message of role `{}` needs `content`", message.role))),
        Some(Content::Text(text)) => Value::from(text),
        Some(Content::Parts(parts)) => {
            let text = |part: super::openai::ContentPart| match (part.r#type.as_str(), part.text) {
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

impl Call {
    async fn respond(self, mut answer: Answer) -> Result<Response, ApiError> {
        if self.options.stream {
            answer.settle().await?;
            let continuous_usage = self.options.continuous_usage;
            return Ok(sse::respond(answer, self, continuous_usage));
        }
        let mut choices: Vec<_> = (0..answer.choices() as u32).map(|index| self.empty_choice(index)).collect();
        while let Some(delta) = answer.next().await? {
            let choice = &mut choices[delta.index as usize];
            choice.message.content += &delta.text;
            if let Some(logprobs) = &mut choice.logprobs {
                logprobs.content.extend(self.logprobs(&delta.logprobs));
            }
            if let Some(tokens) = &mut choice.token_ids {
                tokens.extend(&delta.tokens);
            }
            if let Some(Finish { reason, stop_reason }) = delta.finish {
                (choice.finish_reason, choice.stop_reason) = (reason, stop_reason);
            }
        }
        let usage = answer.usage().clone();
        let prompt_token_ids = self.options.return_token_ids.then_some(self.prompt);
        let Self { id, created, model, .. } = self;
        Ok(Json(ChatResponse { id, object: "chat.completion", created, model, choices, usage, prompt_token_ids }).into_response())
    }

    fn empty_choice(&self, index: u32) -> ChatChoice {
        ChatChoice {
            index,
            message: ChatMessage { role: "assistant", content: String::new(), refusal: None },
            logprobs: self.options.sampling.logprobs.map(|_| ChatLogprobs::default()),
            finish_reason: "length",
            stop_reason: None,
            token_ids: self.options.return_token_ids.then(Vec::new),
        }
    }

    fn logprobs(&self, logprobs: &[Logprob]) -> impl Iterator<Item = ChatTokenLogprob> {
        logprobs.iter().map(|Logprob { token, logprob, .. }| ChatTokenLogprob {
            token: self.token(*token, logprob.logprob),
            top_logprobs: logprob.top.iter().map(|(token, logprob)| self.token(*token, *logprob)).collect(),
        })
    }

    fn token(&self, token: Token, logprob: f32) -> ChatToken {
        let bytes = self.tokenizer.token_bytes(token);
        ChatToken { token: printable(&bytes), logprob: super::json_logprob(logprob), bytes }
    }

    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
        ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage: self.options.include_usage.then_some(usage),
            prompt_token_ids: None,
        }
    }
}

impl sse::Format for Call {
    type Chunk = ChatChunk;

    fn opening(&mut self, choices: usize) -> Vec<ChatChunk> {
        let open = |index| {
            let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()) };
            let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None };
            let prompt_token_ids = self.options.return_token_ids.then(|| self.prompt.clone());
            ChatChunk { prompt_token_ids, ..self.chunk(vec![choice], None) }
        };
        (0..choices as u32).map(open).collect()
    }

    fn delta(&mut self, delta: Delta, usage: Option<Usage>) -> Option<ChatChunk> {
        let logprobs = (!delta.logprobs.is_empty()).then(|| ChatLogprobs { content: self.logprobs(&delta.logprobs).collect() });
        let (finish_reason, stop_reason) = delta.finish.map_or((None, None), |finish| (Some(finish.reason), finish.stop_reason));
        let choice = ChatChunkChoice {
            index: delta.index,
            delta: ChatDelta { role: None, content: (finish_reason.is_none() || !delta.text.is_empty()).then_some(delta.text) },
            logprobs,
            finish_reason,
            stop_reason,
            token_ids: self.options.return_token_ids.then_some(delta.tokens),
        };
        Some(self.chunk(vec![choice], usage))
    }

    fn closing(&mut self, usage: Usage) -> Option<ChatChunk> {
        self.options.include_usage.then(|| self.chunk(Vec::new(), Some(usage)))
    }
}
