//! `/v1/embeddings`: the hidden state of a text's last token, after the model's final norm, at length 1. That is what a decoder knows of
//! a text when it has read it to its end. Models trained for embeddings this way (last-token pooling) give good ones; any other chat
//! model gives what it has.

use super::{access::Client, openai::Prompt, written};
use crate::{
    metrics::{self, RequestOutcome, usage::Usage},
    requests::{computing::checkpoint, error::ApiError, parse},
    serving::{embedded::collect, gateway::Gateway},
};
use axum::{
    body::{Body, Bytes},
    response::Response,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use tidemill_proto::tokens::Tokens;

/// Texts of one request, as OpenAI allows.
const INPUTS_MAX: usize = 2048;

#[derive(Debug, Deserialize)]
struct Fields {
    #[serde(default)]
    model: Option<String>,
    input: Prompt,
    #[serde(default)]
    encoding_format: Option<String>,
    #[serde(default)]
    dimensions: Option<u32>,
}

/// A request, understood.
struct Wanted {
    /// Of the model that is asked for.
    gateway: Arc<Gateway>,
    inputs: Vec<Tokens>,
    /// Not as numbers.
    base64: bool,
}

/// `POST /v1/embeddings`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    let embedded = embed(&gateway, body).await.inspect_err(|error| metrics::count_request(error.outcome()))?;
    metrics::count_request(RequestOutcome::Ok);
    Ok(written::json(embedded))
}

async fn embed(gateway: &Arc<Gateway>, body: Body) -> Result<Bytes, ApiError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(gateway);
    let Wanted { gateway, inputs, base64 } = gateway.compute_body(body.len(), move || understand(&worker, &body)).await?;
    let (submission, mut metered) = gateway.start_embeddings("input", &inputs)?;
    let tokens = inputs.iter().map(|input| input.len() as u64).sum();
    let usage = Usage { prompt_tokens: tokens, total_tokens: tokens, ..Usage::default() };
    let collected = collect(submission, inputs.len()).await;
    let outcome = collected.as_ref().map_or_else(ApiError::outcome, |_| RequestOutcome::Ok);
    metered.settle(outcome, &usage, None).await;
    let embeddings = collected?;
    let worker = Arc::clone(&gateway);
    gateway.compute(move || Ok(listed(&worker, &embeddings, base64, tokens))).await
}

fn listed(gateway: &Gateway, embeddings: &[Vec<f32>], base64: bool, tokens: u64) -> Bytes {
    let value = |embedding: &[f32]| match base64 {
        true => STANDARD.encode(embedding.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>()).into(),
        false => json!(embedding),
    };
    let data = embeddings
        .iter()
        .enumerate()
        .map(|(index, embedding)| json!({"object": "embedding", "index": index, "embedding": value(embedding)}));
    let listed = json!({
        "object": "list", "data": data.collect::<Vec<_>>(), "model": gateway.model_name(),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    listed.to_string().into()
}

fn understand(gateway: &Gateway, body: &[u8]) -> Result<Wanted, ApiError> {
    let fields: Fields = parse::json(body)?;
    let gateway = gateway.select(fields.model.as_deref())?;
    let hidden = gateway.text().config.identity.hidden_size;
    if fields.dimensions.is_some_and(|dimensions| dimensions != hidden) {
        return Err(ApiError::invalid("dimensions", format!("`dimensions` must be {hidden}, this model's, or be left out")));
    }
    let base64 = match fields.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("`encoding_format` is `{other}`: it must be `float` or `base64`");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let encode = |text: &String| {
        gateway.check_text_length("input", text)?;
        checkpoint()?;
        gateway.text().tokenizer.encode(text, true).map(Tokens::from).map_err(|error| ApiError::invalid("input", error.to_string()))
    };
    let inputs: Vec<Tokens> = match fields.input {
        Prompt::Text(text) => vec![encode(&text)?],
        Prompt::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Prompt::Tokens(tokens) => vec![tokens.into()],
        Prompt::TokenLists(lists) => lists.into_iter().map(Tokens::from).collect(),
    };
    if inputs.is_empty() || inputs.len() > INPUTS_MAX {
        return Err(ApiError::invalid("input", format!("`input` must hold 1 to {INPUTS_MAX} texts")));
    }
    Ok(Wanted { gateway, inputs, base64 })
}
