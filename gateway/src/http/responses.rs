//! `/v1/responses`: OpenAI's API of items. A response is created from a stored history (named by an id) and new items; its answer comes as
//! items, whole or as events; and it is stored, unless the client opts out.
//!
//! - `request`: the parsed body; `items`: items as turns of a dialog; `output`: an answer's pieces as items and events
//! - `run`: a response from its start to its last event

pub(crate) mod output;
pub(super) mod request;
mod run;

use super::{
    access::Client,
    pages::{PageQuery, page_wanted, parsed},
    parameters::{Path, Query},
    protocol::{self, Begun},
    written,
};
use crate::{
    requests::{body::Kept, error::ApiError, parse::JsonBody},
    serving::gateway::Gateway,
    store::{Part, Record, access::Loaded},
};
use axum::{Json, body::Body, response::Response};
use run::{Run, Stored, others};
use serde_json::{Value, json};
use std::{sync::Arc, time::Instant};

/// `POST /v1/responses`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    protocol::respond(start(&gateway, body)).await
}

async fn start(gateway: &Arc<Gateway>, body: Body) -> Result<Begun<Run>, ApiError> {
    let arrived = Instant::now();
    let (gateway, body) = gateway.weighed(gateway.read(body).await?).await?;
    let worker = Arc::clone(&gateway);
    let understood = gateway.compute_body(body.weight(), move || {
        let parsed = JsonBody::parse(&body)?;
        let asked = worker.asked(parsed.fields());
        let (gateway, request) = request::understand(&worker, arrived, parsed)?;
        let named = request.named();
        let waits = named.is_any();
        Ok((gateway, named, Kept::new(body, request, waits), asked))
    });
    let (gateway, named, request, asked) = understood.await?;
    let worker = Arc::clone(&gateway);
    let again = move |body: &[u8]| Ok(request::understand(&worker, arrived, JsonBody::parse(body)?)?.1);
    let stored = Stored::look_up(&gateway, named).await?;
    Run::start(&gateway, request, again, stored, asked).await
}

/// `GET /v1/responses/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Result<Response, ApiError> {
    if let Some(running) = gateway.running().get(&gateway.owner(), &id) {
        return Ok(written::json(running.with(&others("in_progress", &[], None))));
    }
    let record = stored(&gateway, &id).await?;
    written::write(&gateway, bytes(&record), move || whole(&record)).await
}

/// `DELETE /v1/responses/{id}`. Items that other histories name are kept.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    check_id(&id)?;
    gateway.store().delete(&gateway.owner(), &id).await.map_err(|error| ApiError::of_store("response_id", error))?;
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

/// `POST /v1/responses/{id}/cancel`: ends one that is being streamed.
pub async fn cancel(Client(gateway): Client, Path(id): Path<String>) -> Result<Response, ApiError> {
    if let Some(cancelled) = gateway.running().cancel(&gateway.owner(), &id) {
        return Ok(written::json(cancelled.with(&others("cancelled", &[], None))));
    }
    let record = stored(&gateway, &id).await?;
    let answer = move || {
        let response = whole(&record)?;
        match response["status"].as_str() {
            Some("cancelled") => Ok(response),
            status => {
                let message = format!("`{id}` is {}: only a response that is being generated can be cancelled", status.unwrap_or("over"));
                Err(ApiError::invalid("response_id", message))
            }
        }
    };
    written::write(&gateway, 0, answer).await
}

/// `GET /v1/responses/{id}/input_items`: all items that the response answers, including those of its history.
pub async fn input_items(Client(gateway): Client, Path(id): Path<String>, Query(query): Query<PageQuery>) -> Result<Response, ApiError> {
    check_id(&id)?;
    let page = page_wanted(query)?;
    let page =
        gateway.store().page(&gateway.owner(), &id, Part::Input, page).await.map_err(|error| ApiError::of_store("response_id", error))?;
    written::items(&gateway, page).await
}

async fn stored(gateway: &Gateway, id: &str) -> Result<Loaded<Record>, ApiError> {
    check_id(id)?;
    gateway.store().load(&gateway.owner(), id, Part::Output).await.map_err(|error| ApiError::of_store("response_id", error))
}

fn bytes(record: &Record) -> usize {
    record.body.len() + record.items.iter().map(|item| item.body.len()).sum::<usize>()
}

/// Returns a stored response with its output.
fn whole(Record { id, body, items, .. }: &Record) -> Result<Value, ApiError> {
    let mut response = parsed(id, body)?;
    response["output"] = items.iter().map(|item| parsed(&item.id, &item.body)).collect::<Result<_, _>>()?;
    Ok(response)
}

fn check_id(id: &str) -> Result<(), ApiError> {
    if id.starts_with("resp_") { Ok(()) } else { Err(ApiError::not_found("response_id", format!("`{id}` is not a response's id"))) }
}
