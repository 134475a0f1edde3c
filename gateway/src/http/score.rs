//! `/v1/score` and `/score`: how well two texts belong together, judged by a cross-encoder, in vLLM's shape. One text is compared with one or
//! several, or as many with as many.

use super::{
    access::Client,
    embeddings,
    pairs::{self, Cut},
    written,
};
use crate::{
    base::stamp::{new_id, unix_seconds},
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
    #[serde(default)]
    text_1: Option<Texts>,
    #[serde(default)]
    text_2: Option<Texts>,
    /// The newer name of `text_1`.
    #[serde(default)]
    queries: Option<Texts>,
    /// The newer name of `text_2`.
    #[serde(default)]
    documents: Option<Texts>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    fn list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// The texts of one side, and the field that had them.
type Side = (&'static str, Vec<String>);

/// `POST /v1/score` and `POST /score`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    let answered = scored(&gateway, body).await.inspect_err(|error| metrics::count_request(error.outcome()))?;
    metrics::count_request(RequestOutcome::Ok);
    Ok(answered)
}

async fn scored(gateway: &Arc<Gateway>, body: Body) -> Result<Response, ApiError> {
    let body = gateway.read(body).await?;
    let bytes = body.weight();
    let worker = Arc::clone(gateway);
    let (gateway, pairs) = gateway.compute_body(bytes, move || understand(&worker, &body)).await?;
    let (rows, tokens) = embeddings::run(&gateway, "text_2", Operation::Rerank, &pairs).await?;
    let worker = Arc::clone(&gateway);
    written::write(&gateway, bytes, move || {
        let score = |(index, row): (usize, &Vec<f32>)| json!({"index": index, "object": "score", "score": pairs::score(row, false)});
        let data: Vec<Value> = rows.iter().enumerate().map(score).collect();
        Ok(json!({
            "id": new_id("score"), "object": "list", "created": unix_seconds(), "model": worker.model_name(), "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }))
    })
    .await
}

pub(super) fn read(body: &[u8]) -> Result<Fields, ApiError> {
    let body = JsonBody::parse(body)?;
    fields::check(Door::Score, body.fields())?;
    body.into()
}

fn understand(gateway: &Gateway, body: &[u8]) -> Result<(Arc<Gateway>, Vec<EmbeddedText>), ApiError> {
    let fields = read(body)?;
    let gateway = pairs::ranker(gateway, fields.model.as_deref())?;
    let cut = Cut::of(&gateway, fields.truncate_prompt_tokens)?;
    let first = side(("text_1", fields.text_1), ("queries", fields.queries))?;
    let second = side(("text_2", fields.text_2), ("documents", fields.documents))?;
    check_counts(&first, &second)?;
    let ((first_param, firsts), (param, seconds)) = (first, second);
    let firsts = firsts.iter().map(|text| pairs::first(&gateway, first_param, text, cut)).collect::<Result<Vec<_>, _>>()?;
    let pair = |(second, first): (&String, _)| pairs::pair(&gateway, param, first, second, cut);
    let pairs = seconds.iter().zip(firsts.iter().cycle()).map(pair).collect::<Result<_, _>>()?;
    Ok((gateway, pairs))
}

/// Returns the texts of a side, which has two names.
fn side((name, texts): (&'static str, Option<Texts>), (other, others): (&'static str, Option<Texts>)) -> Result<Side, ApiError> {
    match (texts, others) {
        (Some(texts), None) => Ok((name, texts.list())),
        (None, Some(texts)) => Ok((other, texts.list())),
        (Some(_), Some(_)) => Err(ApiError::invalid(other, format!("`{name}` and `{other}` are both given: they are the same"))),
        (None, None) => Err(ApiError::invalid(name, format!("`{name}` is missing: a text or a list of texts"))),
    }
}

fn check_counts((first, firsts): &Side, (second, seconds): &Side) -> Result<(), ApiError> {
    if seconds.is_empty() || seconds.len() > embeddings::INPUTS_MAX {
        return Err(ApiError::invalid(*second, format!("`{second}` must hold 1 to {} texts", embeddings::INPUTS_MAX)));
    }
    if firsts.len() != 1 && firsts.len() != seconds.len() {
        let message = format!(
            "`{first}` has {} texts and `{second}` has {}: it must hold one text, or as many as the other",
            firsts.len(),
            seconds.len()
        );
        return Err(ApiError::invalid(*first, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_text_is_compared_with_each_or_as_many_with_as_many() {
        let texts = |count: usize| vec!["a".to_owned(); count];
        let check = |firsts, seconds| check_counts(&("text_1", texts(firsts)), &("text_2", texts(seconds))).map_err(|error| error.body());
        for (firsts, seconds) in [(1, 1), (1, 3), (3, 3)] {
            assert_eq!(check(firsts, seconds), Ok(()));
        }
        for (firsts, seconds, param) in [(2, 3, "text_1"), (0, 1, "text_1"), (1, 0, "text_2"), (1, embeddings::INPUTS_MAX + 1, "text_2")] {
            assert_eq!(check(firsts, seconds).unwrap_err()["error"]["param"], param, "{firsts} {seconds}");
        }
    }

    #[test]
    fn a_side_has_two_names_of_which_one_is_given() {
        let one = || Some(Texts::One("a".into()));
        assert_eq!(side(("text_1", one()), ("queries", None)).unwrap(), ("text_1", vec!["a".into()]));
        assert_eq!(side(("text_1", None), ("queries", Some(Texts::Many(vec!["b".into()])))).unwrap(), ("queries", vec!["b".into()]));
        assert!(side(("text_1", one()), ("queries", one())).unwrap_err().message().contains("both"));
        assert!(side(("text_1", None), ("queries", None)).unwrap_err().message().starts_with("`text_1` is missing"));
    }
}
