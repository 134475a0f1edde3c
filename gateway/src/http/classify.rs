//! `/v1/classify`: the scores of a classifier's labels for a text, in vLLM's shape.

use super::{access::Client, embeddings, written};
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
use tidemill_proto::message::ModelKind;

#[derive(Debug, Deserialize)]
pub(super) struct Fields {
    #[serde(default)]
    model: Option<String>,
    input: Input,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum Input {
    Text(String),
    Texts(Vec<String>),
}

/// `POST /v1/classify`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    let answered = classify(&gateway, body).await.inspect_err(|error| metrics::count_request(error.outcome()))?;
    metrics::count_request(RequestOutcome::Ok);
    Ok(answered)
}

async fn classify(gateway: &Arc<Gateway>, body: Body) -> Result<Response, ApiError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(gateway);
    let (gateway, texts) = gateway.compute_body(body.weight(), move || understand(&worker, &body)).await?;
    let (rows, tokens) = embeddings::run(&gateway, "input", Operation::Classify, &texts).await?;
    let worker = Arc::clone(&gateway);
    let bytes = rows.iter().map(Vec::len).sum::<usize>() * size_of::<f64>();
    let list = move || {
        let data: Vec<Value> = rows.iter().enumerate().map(|(index, row)| classified(&worker, index, row)).collect();
        Ok(json!({
            "id": new_id("classify"), "object": "list", "created": unix_seconds(), "model": worker.model_name(), "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }))
    };
    written::write(&gateway, bytes, list).await
}

pub(super) fn read(body: &[u8]) -> Result<Fields, ApiError> {
    let body = JsonBody::parse(body)?;
    fields::check(Door::Classify, body.fields())?;
    body.into()
}

fn understand(gateway: &Gateway, body: &[u8]) -> Result<(Arc<Gateway>, Vec<EmbeddedText>), ApiError> {
    let fields = read(body)?;
    let gateway = classifier(gateway, fields.model.as_deref())?;
    let most = embeddings::truncation(&gateway, fields.truncate_prompt_tokens)?;
    let texts = match fields.input {
        Input::Text(text) => vec![text],
        Input::Texts(texts) => texts,
    };
    if texts.is_empty() || texts.len() > embeddings::INPUTS_MAX {
        return Err(ApiError::invalid("input", format!("`input` must hold 1 to {} texts", embeddings::INPUTS_MAX)));
    }
    let encoded = texts.iter().map(|text| embeddings::encode(&gateway, text, most)).collect::<Result<_, _>>()?;
    Ok((gateway, encoded))
}

/// Selects the classifier of this name.
pub(super) fn classifier(gateway: &Gateway, name: Option<&str>) -> Result<Arc<Gateway>, ApiError> {
    let gateway = gateway.select(name)?;
    match gateway.text().config.identity.kind {
        ModelKind::Classifier => Ok(gateway),
        ModelKind::Encoder | ModelKind::Decoder => {
            let message = format!("`{}` is no classifier: its architecture must end in ForSequenceClassification", gateway.model_name());
            Err(ApiError::invalid("model", message))
        }
    }
}

fn classified(gateway: &Gateway, index: usize, logits: &[f32]) -> Value {
    let probabilities = match logits {
        [one] => vec![sigmoid(*one)],
        _ => softmax(logits),
    };
    let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    let label = best.and_then(|best| gateway.text().config.labels.get(best));
    json!({"index": index, "label": label, "probs": probabilities, "num_classes": logits.len()})
}

pub(super) fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(logit)).exp())
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|logit| f64::from(logit - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_and_stay_finite() {
        let close = |found: &[f64], expected: &[f64]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close(&softmax(&[0.0, 0.0, 0.0, 0.0]), &[0.25; 4]));
        assert!(close(&softmax(&[1000.0, -1000.0]), &[1.0, 0.0]));
        assert!(close(&[sigmoid(0.0), sigmoid(1000.0), sigmoid(-1000.0)], &[0.5, 1.0, 0.0]));
    }
}
