//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM.

use super::{
    access::Client,
    chat,
    openai::ChatRequest,
    parameters::{ModelQuery, Query},
    written,
};
use crate::{
    requests::{
        computing::checkpoint,
        error::ApiError,
        parse::{self, JsonBody},
    },
    serving::gateway::Gateway,
};
use axum::{
    body::{Body, Bytes},
    response::Response,
};
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::json;
use std::sync::Arc;
use tidemill_proto::block::Token;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<IgnoredAny>,
    /// Whether special tokens are added: by default for a prompt; a chat's template writes them itself.
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

#[derive(Debug, Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<Token>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Tokens {
    #[serde(default)]
    model: Option<String>,
    tokens: Vec<Token>,
}

/// `GET /tokenizer_info`: the settings of a model's tokenizer, as its author wrote them, with its chat template.
pub async fn info(Client(gateway): Client, Query(ModelQuery { model }): Query<ModelQuery>) -> Result<Response, ApiError> {
    let gateway = gateway.select(model.as_deref())?;
    // All answers share the one copy that is kept.
    Ok(written::json(Bytes::from_owner(Arc::clone(&gateway.text().config.tokenizer_info))))
}

/// `POST /tokenize`: a prompt, or a chat.
pub async fn tokenize(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(&gateway);
    let bytes = body.weight();
    written::write(&gateway, bytes, move || tokenized(&worker, JsonBody::parse(&body)?)).await
}

fn tokenized(gateway: &Gateway, body: JsonBody) -> Result<Tokenized, ApiError> {
    let fields: Fields = body.read()?;
    let gateway = gateway.select(fields.model.as_deref())?;
    let tokenizer = &gateway.text().tokenizer;
    let encode = |text: &str, special| {
        gateway.check_text_length("prompt", text)?;
        checkpoint()?;
        tokenizer.encode(text, special).map_err(|error| ApiError::invalid("prompt", error.to_string()))
    };
    let tokens = match (fields.prompt, fields.messages) {
        (Some(prompt), None) => encode(&prompt, fields.add_special_tokens.unwrap_or(true))?,
        (None, Some(_)) => {
            let chat: ChatRequest = body.into()?;
            if fields.add_special_tokens.unwrap_or(false) {
                let message = "`add_special_tokens` is for prompts: a chat's template writes them itself";
                return Err(ApiError::invalid("add_special_tokens", message));
            }
            gateway.prompt_only("messages", &chat::dialog(chat)?)?
        }
        _ => return Err(ApiError::malformed("either `prompt` or `messages` is needed")),
    };
    let pieces = || tokens.iter().map(|&token| tokenizer.piece(token)).collect();
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: gateway.context_tokens_max(),
        token_strs: fields.return_token_strs.unwrap_or(false).then(pieces),
        tokens,
    })
}

/// `POST /detokenize`.
pub async fn detokenize(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(&gateway);
    let bytes = body.weight();
    let detokenized = move || {
        let Tokens { model, tokens } = parse::json(&body)?;
        let worker = worker.select(model.as_deref())?;
        let context = worker.context_tokens_max();
        if tokens.len() as u64 > u64::from(context) {
            return Err(ApiError::context_length("tokens", context, tokens.len() as u64, 0));
        }
        let vocab_size = worker.text().config.identity.vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token >= vocab_size) {
            let message = format!("`tokens`: {token} is not a token id of this model ({vocab_size} tokens)");
            return Err(ApiError::invalid("tokens", message));
        }
        Ok(json!({"prompt": worker.text().tokenizer.decode(&tokens, false)}))
    };
    written::write(&gateway, bytes, detokenized).await
}
