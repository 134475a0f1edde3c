//! `/v1/rerank`, `/v2/rerank` and `/rerank`: documents ordered by their relevance to a query, judged by a cross-encoder, in the shapes of
//! Jina's and Cohere's APIs, and in that of Hugging Face's TEI where the documents are `texts`.
//!
//! The model reads each document together with the query. A document that is too long for its context is cut at its end.

use super::{
    access::Client,
    embeddings,
    pairs::{self, Cut},
    written,
};
use crate::{
    base::stamp::new_id,
    metrics::{self, RequestOutcome},
    requests::{
        error::ApiError,
        fields::{self, row::Door},
        parse::JsonBody,
    },
    serving::gateway::{Gateway, start::EmbeddedText},
    traces::names::Operation,
};
use axum::{body::Body, response::Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub(super) struct Fields {
    #[serde(default)]
    model: Option<String>,
    query: String,
    #[serde(default)]
    documents: Option<Vec<Document>>,
    /// TEI's documents.
    #[serde(default)]
    texts: Option<Vec<Document>>,
    #[serde(default)]
    top_n: Option<usize>,
    #[serde(default)]
    return_documents: Option<bool>,
    /// TEI's name of `return_documents`.
    #[serde(default)]
    return_text: Option<bool>,
    /// Whether scores are the model's own numbers.
    #[serde(default)]
    raw_scores: Option<bool>,
    #[serde(default)]
    max_tokens_per_doc: Option<usize>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
    /// Whether a document that is too long is cut: otherwise it is refused.
    #[serde(default)]
    truncate: Option<bool>,
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

/// The shape of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Jina's, which is also Cohere's first.
    Jina,
    /// Cohere's second.
    Cohere,
    /// A list of scores.
    Tei,
}

/// The wish of a request, besides its texts.
#[derive(Clone, Copy, Debug)]
struct Wish {
    shape: Shape,
    top: usize,
    returns_documents: bool,
    is_raw: bool,
}

/// A parsed request.
struct Query {
    /// The gateway, bound to the requested model.
    gateway: Arc<Gateway>,
    documents: Vec<Document>,
    pairs: Vec<EmbeddedText>,
    wish: Wish,
}

/// `POST /v1/rerank` and `POST /rerank`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    answered(&gateway, body, Shape::Jina).await
}

/// `POST /v2/rerank`.
pub async fn create_second(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    answered(&gateway, body, Shape::Cohere).await
}

async fn answered(gateway: &Arc<Gateway>, body: Body, shape: Shape) -> Result<Response, ApiError> {
    let answered = rerank(gateway, body, shape).await.inspect_err(|error| metrics::count_request(error.outcome()))?;
    metrics::count_request(RequestOutcome::Ok);
    Ok(answered)
}

async fn rerank(gateway: &Arc<Gateway>, body: Body, shape: Shape) -> Result<Response, ApiError> {
    let body = gateway.read(body).await?;
    let bytes = body.weight();
    let worker = Arc::clone(gateway);
    let Query { gateway, documents, pairs, wish } = gateway.compute_body(bytes, move || understand(&worker, &body, shape)).await?;
    let (rows, tokens) = embeddings::run(&gateway, "documents", Operation::Rerank, &pairs).await?;
    let worker = Arc::clone(&gateway);
    written::write(&gateway, bytes, move || {
        let scores: Vec<_> = rows.iter().map(|row| pairs::score(row, wish.is_raw)).collect();
        Ok(wish.shape.answer(worker.model_name(), wish.results(&scores, &documents), tokens))
    })
    .await
}

pub(super) fn read(body: &[u8]) -> Result<Fields, ApiError> {
    let body = JsonBody::parse(body)?;
    fields::check(Door::Rerank, body.fields())?;
    body.into()
}

fn understand(gateway: &Gateway, body: &[u8], shape: Shape) -> Result<Query, ApiError> {
    let fields = read(body)?;
    let gateway = pairs::ranker(gateway, fields.model.as_deref())?;
    let (param, shape, documents) = match (fields.documents, fields.texts) {
        (Some(_), Some(_)) => return Err(ApiError::invalid("texts", "`documents` and `texts` are both given: they are the same")),
        (None, Some(texts)) => ("texts", Shape::Tei, texts),
        (Some(documents), None) => ("documents", shape, documents),
        (None, None) => return Err(ApiError::invalid("documents", "`documents` is missing: the texts to be ranked")),
    };
    if documents.is_empty() || documents.len() > embeddings::INPUTS_MAX {
        return Err(ApiError::invalid(param, format!("`{param}` must hold 1 to {} texts", embeddings::INPUTS_MAX)));
    }
    for (name, number) in [("top_n", fields.top_n), ("max_tokens_per_doc", fields.max_tokens_per_doc)] {
        if number == Some(0) {
            return Err(ApiError::invalid(name, format!("`{name}` must be at least 1")));
        }
    }
    let cut = Cut {
        second: fields.max_tokens_per_doc.unwrap_or(usize::MAX),
        is_refused: fields.truncate == Some(false),
        ..Cut::of(&gateway, fields.truncate_prompt_tokens)?
    };
    // Checked once for all documents, and before any of them: it is part of each pair.
    let first = pairs::first(&gateway, "query", &fields.query, cut)?;
    let pair = |document: &Document| pairs::pair(&gateway, param, &first, document.text(), cut);
    let pairs = documents.iter().map(pair).collect::<Result<_, _>>()?;
    let wish = Wish {
        shape,
        top: fields.top_n.unwrap_or(documents.len()),
        returns_documents: fields.return_documents.or(fields.return_text).unwrap_or(shape == Shape::Jina),
        is_raw: fields.raw_scores.unwrap_or(false),
    };
    Ok(Query { gateway, documents, pairs, wish })
}

impl Wish {
    /// Lists the best documents, the best first. Equal ones stay in their original order.
    fn results(self, scores: &[f64], documents: &[Document]) -> Vec<Value> {
        let mut order: Vec<_> = scores.iter().copied().enumerate().collect();
        order.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let result = |(index, score): (usize, f64)| {
            let text = documents[index].text();
            match (self.shape, self.returns_documents) {
                (Shape::Tei, false) => json!({"index": index, "score": score}),
                (Shape::Tei, true) => json!({"index": index, "score": score, "text": text}),
                (_, false) => json!({"index": index, "relevance_score": score}),
                (_, true) => json!({"index": index, "relevance_score": score, "document": {"text": text}}),
            }
        };
        order.into_iter().take(self.top).map(result).collect()
    }
}

impl Shape {
    fn answer(self, model: &str, results: Vec<Value>, tokens: u64) -> Value {
        match self {
            Self::Jina => json!({
                "id": new_id("rerank"), "model": model, "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }),
            Self::Cohere => json!({
                "id": new_id("rerank"), "results": results,
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}},
            }),
            Self::Tei => json!(results),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(shape: Shape) -> Wish {
        Wish { shape, top: 2, returns_documents: false, is_raw: false }
    }

    #[test]
    fn each_client_gets_the_shape_that_it_reads() {
        let documents = ["a", "b", "c"].map(|text| Document::Text(text.into()));
        let results = |wish: Wish| wish.results(&[0.25, 0.75, 0.75], &documents);
        assert_eq!(results(wish(Shape::Tei)), [json!({"index": 1, "score": 0.75}), json!({"index": 2, "score": 0.75})]);
        let whole = Wish { returns_documents: true, top: 1, ..wish(Shape::Tei) };
        assert_eq!(results(whole), [json!({"index": 1, "score": 0.75, "text": "b"})]);
        assert_eq!(results(wish(Shape::Cohere))[0], json!({"index": 1, "relevance_score": 0.75}));
        let whole = Wish { returns_documents: true, ..wish(Shape::Jina) };
        assert_eq!(results(whole)[0], json!({"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}));

        let answer = Shape::Cohere.answer("m", results(wish(Shape::Cohere)), 7);
        assert!(answer["id"].is_string() && answer["meta"]["api_version"]["version"] == "2" && answer["results"][1]["index"] == 2);
        assert_eq!(Shape::Jina.answer("m", Vec::new(), 7)["usage"]["total_tokens"], 7);
        assert!(Shape::Tei.answer("m", results(wish(Shape::Tei)), 7).is_array());
    }

    #[test]
    fn documents_come_under_either_name() {
        let fields = |body: Value| read(body.to_string().as_bytes());
        assert_eq!(fields(json!({"query": "q", "documents": ["a", {"text": "b"}]})).unwrap().documents.unwrap()[1].text(), "b");
        let tei = fields(json!({"query": "q", "texts": ["a"], "raw_scores": true, "return_text": true, "truncate": false})).unwrap();
        assert!(tei.documents.is_none() && tei.texts.is_some() && tei.truncate == Some(false));
        let error = fields(json!({"query": "q", "documents": [], "rank_fields": ["title"]})).err().unwrap();
        assert!(error.message().starts_with("`rank_fields`"), "{error:?}");
    }
}
