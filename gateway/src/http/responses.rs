//! `/v1/responses`: OpenAI's API of items. A response is created from what came before (stored, by an id) and what is new; its
//! answer comes as items, at once or as events; and it is stored, unless the client wants otherwise.
//!
//! - `request`: the body, understood; `items`: items as turns of a dialog; `output`: an answer's pieces as items and events
//! - `rounds`: the calls of an answer that run here; `run`: a response from its start to its last event; `running`: those that can be cancelled

pub(crate) mod output;
pub(super) mod request;
mod rounds;
mod run;

use super::{
    access::Client,
    pages::{PageWish, page_wanted, parsed},
    written,
};
use crate::{
    metrics,
    requests::{error::ApiError, parse::JsonBody},
    serving::gateway::Gateway,
    store::{Part, Record},
};
use axum::{
    Json,
    body::Body,
    extract::Path,
    response::{IntoResponse, Response, Sse, sse::Event},
};
use futures_util::stream;
use run::Run;
use serde_json::{Value, json};
use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Instant};

/// `POST /v1/responses`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Response, ApiError> {
    // A request that runs is counted by its answer.
    let started = start(&gateway, body).await.inspect_err(|error| metrics::count_request(error.outcome()));
    let (mut run, streams) = started?;
    if !streams {
        let gateway = Arc::clone(run.gateway());
        let response = run.whole().await?;
        return written::write(&gateway, 0, move || Ok(response)).await;
    }
    run.settle().await?;
    let events = stream::unfold((run, VecDeque::new()), |(mut run, mut ready)| async move {
        while ready.is_empty() {
            ready.extend(run.next().await?);
        }
        let event: Value = ready.pop_front()?;
        let named = Event::default().event(event["type"].as_str().unwrap_or_default()).data(event.to_string());
        Some((Ok::<_, Infallible>(named), (run, ready)))
    });
    Ok(Sse::new(events).keep_alive(super::sse::keep_alive()).into_response())
}

async fn start(gateway: &Arc<Gateway>, body: Body) -> Result<(Run, bool), ApiError> {
    let arrived = Instant::now();
    let body = gateway.read(body).await?;
    let worker = Arc::clone(gateway);
    let understood = gateway.compute_body(body.len(), move || {
        let parsed = JsonBody::parse(&body)?;
        let asked = worker.asked(parsed.fields());
        Ok((request::understand(&worker, arrived, parsed)?, asked))
    });
    let ((gateway, request), asked) = understood.await?;
    let streams = request.options.stream;
    Ok((Run::start(&gateway, request, asked).await?, streams))
}

/// `GET /v1/responses/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Result<Response, ApiError> {
    if let Some(running) = gateway.running().get(&gateway.owner(), &id) {
        return written::write(&gateway, 0, move || Ok(running)).await;
    }
    let record = stored(&gateway, &id).await?;
    written::write(&gateway, bytes(&record), move || whole(&record)).await
}

/// `DELETE /v1/responses/{id}`. Items that other histories name stay with them.
pub async fn delete(Client(gateway): Client, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    check_id(&id)?;
    gateway.store().delete(&gateway.owner(), &id).await.map_err(|error| ApiError::of_store("response_id", error))?;
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

/// `POST /v1/responses/{id}/cancel`: ends one that is being streamed.
pub async fn cancel(Client(gateway): Client, Path(id): Path<String>) -> Result<Response, ApiError> {
    if let Some(cancelled) = gateway.running().cancel(&gateway.owner(), &id) {
        return written::write(&gateway, 0, move || Ok(cancelled)).await;
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

/// `GET /v1/responses/{id}/input_items`: all that the response was an answer to, what came before included.
pub async fn input_items(Client(gateway): Client, Path(id): Path<String>, query: PageWish) -> Result<Response, ApiError> {
    check_id(&id)?;
    let page = page_wanted(query)?;
    let page =
        gateway.store().page(&gateway.owner(), &id, Part::Input, page).await.map_err(|error| ApiError::of_store("response_id", error))?;
    written::items(&gateway, page).await
}

async fn stored(gateway: &Gateway, id: &str) -> Result<Record, ApiError> {
    check_id(id)?;
    gateway.store().load(&gateway.owner(), id, Part::Output).await.map_err(|error| ApiError::of_store("response_id", error))
}

fn bytes(record: &Record) -> usize {
    record.body.len() + record.items.iter().map(|item| item.body.len()).sum::<usize>()
}

/// A stored response with its output.
fn whole(Record { id, body, items, .. }: &Record) -> Result<Value, ApiError> {
    let mut response = parsed(id, body)?;
    response["output"] = items.iter().map(|item| parsed(&item.id, &item.body)).collect::<Result<_, _>>()?;
    Ok(response)
}

fn check_id(id: &str) -> Result<(), ApiError> {
    if id.starts_with("resp_") { Ok(()) } else { Err(ApiError::not_found("response_id", format!("`{id}` is not a response's id"))) }
}
