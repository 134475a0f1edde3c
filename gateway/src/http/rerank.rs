//! `/v1/rerank`: documents ordered by their relevance to a query, judged by a cross-encoder, in the shape of Jina's and Cohere's APIs.
//!
//! The model reads each document together with the query. A document that is too long for its context is truncated at its end.

use super::{
    access::Client,
    classify::{classifier, sigmoid},
    embeddings, written,
};
use crate::{
    base::stamp::new_id,
    metrics::{self, RequestOutcome},
    requests::{computing::checkpoint, error::ApiError, parse},
    serving::gateway::{Gateway, start::EmbeddedText},
    traces::names::Operation,
};
use axum::{body::Body, response::Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tidemill_proto::tokens::Tokens;

#[derive(Debug, Deserialize)]
struct Fields {
    #[serde(default)]
    model: Option<String>,
    query: String,
    documents: Vec<Document>,
    #[serde(default)]
    top_n: Option<usize>,
    #[serde(default)]
    return_documents: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, or an object with a `text`")]
enum Document {
    Text(String),
    Object { text: String },
}

impl Document {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Object { text } => text,
        }
    }
}

/// A parsed request.
struct Query {
    /// The gateway, bound to the requested model.
    gateway: Arc<Gateway>,
    documents: Vec<Document>,
    pairs: Vec<EmbeddedText>,
    top: usize,
    returns_documents: bool,
}

/// `POST /v1/rerank`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    let answered = rerank(&gateway, body).await.inspect_err(|error| metrics::count_request(error.outcome()))?;
    metrics::count_request(RequestOutcome::Ok);
    Ok(answered)
}

async fn rerank(gateway: &Arc<Gateway>, body: Body) -> Result<Response, ApiError> {
    let body = gateway.read(body).await?;
    let bytes = body.weight();
    let worker = Arc::clone(gateway);
    let Query { gateway, documents, pairs, top, returns_documents } =
        gateway.compute_body(bytes, move || understand(&worker, &body)).await?;
    let (rows, tokens) = embeddings::run(&gateway, "documents", Operation::Rerank, &pairs).await?;
    let worker = Arc::clone(&gateway);
    let list = move || {
        let mut order: Vec<(usize, f32)> = rows.iter().map(|row| row.first().copied().unwrap_or(f32::NEG_INFINITY)).enumerate().collect();
        // Equal ones stay in their original order.
        order.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let result = |(index, logit): (usize, f32)| {
            let mut result = json!({"index": index, "relevance_score": sigmoid(logit)});
            if returns_documents {
                result["document"] = json!({"text": documents[index].text()});
            }
            result
        };
        let results: Vec<Value> = order.into_iter().take(top).map(result).collect();
        Ok(json!({
            "id": new_id("rerank"), "model": worker.model_name(), "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }))
    };
    written::write(&gateway, bytes, list).await
}

fn understand(gateway: &Gateway, body: &[u8]) -> Result<Query, ApiError> {
    let Fields { model, query, documents, top_n, return_documents } = parse::json(body)?;
    let gateway = classifier(gateway, model.as_deref())?;
    let labels = gateway.text().config.labels.len();
    if labels != 1 {
        let message = format!("`{}` has {labels} labels, where a model that ranks has one: use /v1/classify", gateway.model_name());
        return Err(ApiError::invalid("model", message));
    }
    if documents.is_empty() || documents.len() > embeddings::INPUTS_MAX {
        return Err(ApiError::invalid("documents", format!("`documents` must hold 1 to {} texts", embeddings::INPUTS_MAX)));
    }
    if top_n == Some(0) {
        return Err(ApiError::invalid("top_n", "`top_n` must be at least 1"));
    }
    gateway.check_text_length("query", &query)?;
    let most = gateway.context_tokens_max() as usize;
    // Checked once for all documents, and before any of them: it is part of each pair.
    let first = gateway.text().tokenizer.encode_first(&query).map_err(|error| ApiError::invalid("query", error.to_string()))?;
    if first.len() >= most {
        return Err(ApiError::context_length("query", most as u32, first.len() as u64, 0));
    }
    let pair = |document: &Document| {
        gateway.check_text_length("documents", document.text())?;
        checkpoint()?;
        let encoded = gateway.text().tokenizer.encode_pair(&first, document.text(), most);
        let (tokens, second) = encoded.map_err(|error| ApiError::invalid("documents", error.to_string()))?;
        Ok(EmbeddedText { tokens: Tokens::from(tokens), second_text: second as u32 })
    };
    let pairs = documents.iter().map(pair).collect::<Result<_, ApiError>>()?;
    let top = top_n.unwrap_or(documents.len());
    Ok(Query { gateway, documents, pairs, top, returns_documents: return_documents.unwrap_or(true) })
}
