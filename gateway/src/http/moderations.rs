//! `/v1/moderations`: the safety checks' verdict on a text.

use super::access::Client;
use crate::{
    requests::{computing::checkpoint, error::ApiError, parse},
    serving::gateway::Gateway,
};
use axum::{Json, body::Body};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tidemill_safety::category::Category;

/// The maximum number of texts in one request.
const TEXTS_MAX: usize = 256;

#[derive(Debug, Deserialize)]
struct Moderation {
    input: Input,
    /// The side (input or output) whose thresholds apply; an addition to OpenAI's API.
    #[serde(default)]
    side: Side,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Side {
    #[default]
    Input,
    Output,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, a list of texts, or a list of parts with `type` and `text`")]
enum Input {
    Text(String),
    Texts(Vec<String>),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    r#type: String,
    #[serde(default)]
    text: Option<String>,
}

/// OpenAI's names of our categories; those without one keep ours.
fn name(category: Category) -> &'static str {
    match category {
        Category::Dangerous => "illicit",
        Category::SelfHarm => "self-harm",
        Category::Csam => "sexual/minors",
        other => other.name(),
    }
}

/// `POST /v1/moderations`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Json<Value>, ApiError> {
    let body = gateway.read(body).await?;
    let worker = Arc::clone(&gateway);
    gateway.compute_body(body.weight(), move || moderated(&worker, &body)).await.map(Json)
}

fn moderated(gateway: &Gateway, body: &[u8]) -> Result<Value, ApiError> {
    let Moderation { input, side } = parse::json(body)?;
    let off = || ApiError::malformed("safety checks are switched off at this server: `tidemill up --safety` switches them on");
    let safety = gateway.safety().ok_or_else(off)?;
    let texts = match input {
        Input::Text(text) => vec![text],
        Input::Texts(texts) => texts,
        Input::Parts(parts) => vec![parts.into_iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?.join("\n")],
    };
    if texts.is_empty() || texts.len() > TEXTS_MAX {
        return Err(ApiError::invalid("input", format!("`input` must hold 1 to {TEXTS_MAX} texts")));
    }
    let thresholds = match side {
        Side::Input => &safety.input,
        Side::Output => &safety.output,
    };
    let results = texts.iter().map(|text| {
        checkpoint()?;
        let scores = safety.guard.scores(text);
        let over = |category: Category| scores[category as usize] >= thresholds.of(category).score();
        let of_each = |value: &dyn Fn(Category) -> Value| -> Map<String, Value> {
            Category::ALL.into_iter().map(|category| (name(category).to_owned(), value(category))).collect()
        };
        Ok(json!({
            "flagged": Category::ALL.into_iter().any(over),
            "categories": of_each(&|category| over(category).into()),
            "category_scores": of_each(&|category| scores[category as usize].into()),
        }))
    });
    let results: Vec<Value> = results.collect::<Result<_, ApiError>>()?;
    Ok(json!({"id": format!("modr-{:032x}", rand::random::<u128>()), "model": "tidemill-safety", "results": results}))
}

fn part((i, Part { r#type, text }): (usize, Part)) -> Result<String, ApiError> {
    match (&*r#type, text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(ApiError::invalid(format!("input[{i}].text"), "a part of type `text` needs its `text`")),
        _ => Err(ApiError::no_images(&format!("input[{i}]"))),
    }
}
