//! Users' feedback on answers: clients give it, operators read it.

use super::{access::Client, parameters::Query};
use crate::{
    base::{json, stamp::unix_seconds},
    features::feedback::{Answered, Feedback, Opinion, Rating},
    requests::{error::ApiError, parse},
    rollout::votes::Voter,
    serving::gateway::Gateway,
    store::{Item, Part},
};
use axum::{Json, body::Body, extract::State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// The maximum length of a comment.
const COMMENT_BYTES_MAX: usize = 4096;
/// The maximum length of a user's name.
const USER_BYTES_MAX: usize = 256;
/// The maximum number of opinions in one answer.
const LISTED_MAX: usize = 1000;
const LISTED: usize = 100;

#[derive(Debug, Deserialize)]
struct Given {
    response_id: String,
    rating: Option<Rating>,
    #[serde(default)]
    regenerate: bool,
    comment: Option<String>,
    /// A name for display, if several users share a key. Each answer has one opinion of its owner, under any name.
    user: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    rating: Option<Rating>,
    response_id: Option<String>,
    limit: Option<usize>,
}

/// `POST /v1/feedback`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Json<Value>, ApiError> {
    let Given { response_id, rating, regenerate, comment, user } = gateway.read_json(body).await?;
    if rating.is_none() && !regenerate && comment.is_none() {
        return Err(ApiError::invalid("rating", "say at least one of `rating` (`up` or `down`), `regenerate` and `comment`"));
    }
    let too_long = |name, text: Option<&String>, most| match text {
        Some(text) if text.len() > most => Err(ApiError::invalid(name, format!("`{name}` must have at most {most} bytes"))),
        _ => Ok(()),
    };
    too_long("comment", comment.as_ref(), COMMENT_BYTES_MAX)?;
    too_long("user", user.as_ref(), USER_BYTES_MAX)?;
    let answered = match feedback(&gateway)?.find(&gateway.owner(), &response_id) {
        Some(answered) => answered,
        None => stored(&gateway, &response_id).await?,
    };
    let opinion = Opinion { user: user.unwrap_or_else(|| gateway.owner().0), rating, regenerate, comment };
    let worker = Arc::clone(&gateway);
    let kept = gateway.compute(move || {
        let replaced = feedback(&worker)?.keep(unix_seconds(), &response_id, &answered, &opinion).map_err(failed)?;
        // A rollout counts the first rating of an answer.
        if let (Some(rating), false) = (opinion.rating, replaced)
            && worker.counts_in_rollouts()
        {
            let (up, down) = (u64::from(rating == Rating::Up), u64::from(rating == Rating::Down));
            worker.rollouts().vote(&answered.model, Voter::Tenant(worker.tenant()), up, down);
        }
        Ok(json!({"object": "feedback", "response_id": response_id, "rating": opinion.rating, "replaced": replaced}))
    });
    kept.await.map(Json)
}

/// `GET /admin/feedback`.
pub async fn list(State(gateway): State<Arc<Gateway>>, Query(wanted): Query<ListQuery>) -> Result<Json<Value>, ApiError> {
    let ListQuery { rating, response_id, limit } = wanted;
    let limit = parse::in_range("limit", limit.unwrap_or(LISTED), 1..=LISTED_MAX)?;
    let worker = Arc::clone(&gateway);
    let listed = gateway.compute(move || feedback(&worker)?.list(rating, response_id.as_deref(), limit).map_err(failed));
    Ok(Json(json!({"feedback": listed.await?})))
}

/// Finds a stored response, which can be rated for as long as it is stored.
async fn stored(gateway: &Arc<Gateway>, id: &str) -> Result<Answered, ApiError> {
    let missing = || {
        ApiError::not_found(
            "response_id",
            format!("`{id}` is not the id of an answer that this server remembers: it is too old, or not yours"),
        )
    };
    if !id.starts_with("resp_") {
        return Err(missing());
    }
    let (owner, store) = (gateway.owner(), gateway.store());
    let input = store.load(&owner, id, Part::Input).await.map_err(|_| missing())?;
    let output = store.load(&owner, id, Part::Output).await.map_err(|_| missing())?;
    let bytes = input.items.iter().chain(&output.items).map(|item| item.body.len()).sum();
    let answered = move || {
        let body: Value = json::from_slice(output.body.as_bytes()).unwrap_or_default();
        let item = |item: &Item| json::from_slice::<Value>(item.body.as_bytes()).unwrap_or_default();
        let message = |item: Value| item["role"].is_string().then(|| json!({"role": item["role"], "content": said(&item)}));
        Ok(Answered {
            owner,
            model: body["model"].as_str().unwrap_or_default().to_owned(),
            question: input.items.iter().map(item).filter_map(message).collect(),
            answer: output.items.iter().map(|output| said(&item(output))).collect(),
        })
    };
    gateway.compute_body(bytes, answered).await
}

/// Returns a stored message's text.
fn said(item: &Value) -> String {
    match &item["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

fn feedback(gateway: &Gateway) -> Result<&Feedback, ApiError> {
    gateway.feedback().map(AsRef::as_ref).ok_or_else(|| ApiError::malformed("this server takes no feedback: --feedback switches it on"))
}

fn failed(error: rusqlite::Error) -> ApiError {
    tracing::error!(%error, "could not store feedback");
    ApiError::internal(format!("could not store feedback: {error}"))
}
