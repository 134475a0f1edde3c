//! `/v1/embeddings`: one vector of length 1 for a text. An encoder's is the one that it was trained for, pooled as its directory specifies.
//! A decoder's is the hidden state of the text's last token, after the model's final norm: good for models that were trained this way
//! (last-token pooling), and of varying use for other chat models.

use super::{access::Client, openai::Prompt, written};
use crate::{
    metrics::{self, RequestOutcome, usage::Usage},
    requests::{
        computing::checkpoint,
        error::ApiError,
        fields::{self, row::Door},
        parse::JsonBody,
    },
    serving::{
        embedded::{collect, unit},
        gateway::{Gateway, start::EmbeddedText},
    },
    traces::names::Operation,
};
use axum::{
    body::{Body, Bytes},
    response::Response,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use tidemill_proto::{message::ModelKind, tokens::Tokens};

/// The maximum number of texts in one request, as in OpenAI's API.
pub(super) const INPUTS_MAX: usize = 2048;

#[derive(Debug, Deserialize)]
pub(super) struct Fields {
    #[serde(default)]
    model: Option<String>,
    input: Prompt,
    #[serde(default)]
    encoding_format: Option<String>,
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
}

/// A parsed request.
struct Parsed {
    /// The gateway, bound to the requested model.
    gateway: Arc<Gateway>,
    inputs: Vec<EmbeddedText>,
    is_base64: bool,
    /// The number of dimensions to keep of an embedding; `None` for all.
    dimensions: Option<usize>,
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
    let Parsed { gateway, inputs, is_base64, dimensions } = gateway.compute_body(body.weight(), move || understand(&worker, &body)).await?;
    let (rows, tokens) = run(&gateway, "input", Operation::Embeddings, &inputs).await?;
    let worker = Arc::clone(&gateway);
    gateway.compute(move || Ok(listed(&worker, rows, dimensions, is_base64, tokens))).await
}

/// Computes the row of each text, and counts the tokens of all.
pub(super) async fn run(
    gateway: &Arc<Gateway>,
    param: &str,
    operation: Operation,
    texts: &[EmbeddedText],
) -> Result<(Vec<Vec<f32>>, u64), ApiError> {
    let (submission, mut metered, traced) = gateway.start_embeddings(param, operation, texts).await?;
    let tokens = texts.iter().map(|text| text.tokens.len() as u64).sum();
    let usage = Usage { prompt_tokens: tokens, total_tokens: tokens, ..Usage::default() };
    let collected = collect(submission, texts.len()).await;
    let outcome = collected.as_ref().map_or_else(ApiError::outcome, |_| RequestOutcome::Ok);
    traced.iter().for_each(|traced| traced.end_reading(outcome, &usage));
    metered.settle(outcome, &usage, None).await;
    Ok((collected?, tokens))
}

fn listed(gateway: &Gateway, rows: Vec<Vec<f32>>, dimensions: Option<usize>, is_base64: bool, tokens: u64) -> Bytes {
    let value = |embedding: Vec<f32>| match is_base64 {
        true => STANDARD.encode(embedding.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>()).into(),
        false => json!(embedding),
    };
    let cut = |mut row: Vec<f32>| {
        row.truncate(dimensions.unwrap_or(usize::MAX));
        unit(row)
    };
    let data =
        rows.into_iter().enumerate().map(|(index, row)| json!({"object": "embedding", "index": index, "embedding": value(cut(row))}));
    let listed = json!({
        "object": "list", "data": data.collect::<Vec<_>>(), "model": gateway.model_name(),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    listed.to_string().into()
}

pub(super) fn read(body: &[u8]) -> Result<Fields, ApiError> {
    let body = JsonBody::parse(body)?;
    fields::check(Door::Embeddings, body.fields())?;
    body.into()
}

fn understand(gateway: &Gateway, body: &[u8]) -> Result<Parsed, ApiError> {
    let fields = read(body)?;
    let gateway = gateway.select(fields.model.as_deref())?;
    let identity = &gateway.text().config.identity;
    if identity.kind == ModelKind::Classifier {
        let message = format!("`{}` is a classifier: use /v1/rerank or /v1/classify", gateway.model_name());
        return Err(ApiError::invalid("model", message));
    }
    let hidden = identity.hidden_size as usize;
    if fields.dimensions.is_some_and(|dimensions| !(1..=hidden).contains(&dimensions)) {
        return Err(ApiError::invalid("dimensions", format!("`dimensions` must be 1 to {hidden}, this model's")));
    }
    let is_base64 = match fields.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("`encoding_format` is `{other}`: it must be `float` or `base64`");
            return Err(ApiError::invalid("encoding_format", message));
        }
    };
    let most = truncation(&gateway, fields.truncate_prompt_tokens)?;
    let encode = |text: &String| encode(&gateway, text, most);
    let inputs: Vec<EmbeddedText> = match fields.input {
        Prompt::Text(text) => vec![encode(&text)?],
        Prompt::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Prompt::Tokens(tokens) => vec![Tokens::from(tokens).into()],
        Prompt::TokenLists(lists) => lists.into_iter().map(|tokens| Tokens::from(tokens).into()).collect(),
    };
    if inputs.is_empty() || inputs.len() > INPUTS_MAX {
        return Err(ApiError::invalid("input", format!("`input` must hold 1 to {INPUTS_MAX} texts")));
    }
    Ok(Parsed { gateway, inputs, is_base64, dimensions: fields.dimensions })
}

/// The maximum number of tokens of a text, if its sender wants it truncated: vLLM's `truncate_prompt_tokens`, with -1 for the model's
/// limit.
pub(super) fn truncation(gateway: &Gateway, wished: Option<i64>) -> Result<Option<usize>, ApiError> {
    let context = i64::from(gateway.context_tokens_max());
    match wished {
        None => Ok(None),
        Some(-1) => Ok(Some(context as usize)),
        Some(tokens) if (1..=context).contains(&tokens) => Ok(Some(tokens as usize)),
        Some(_) => {
            let message = format!("`truncate_prompt_tokens` must be -1, or 1 to {context}");
            Err(ApiError::invalid("truncate_prompt_tokens", message))
        }
    }
}

/// Tokenizes a text of `input`, cut to `most` tokens.
pub(super) fn encode(gateway: &Gateway, text: &str, most: Option<usize>) -> Result<EmbeddedText, ApiError> {
    gateway.check_text_length("input", text)?;
    checkpoint()?;
    let tokens = gateway.text().tokenizer.encode_cut(text, most).map_err(|error| ApiError::invalid("input", error.to_string()))?;
    Ok(Tokens::from(tokens).into())
}
