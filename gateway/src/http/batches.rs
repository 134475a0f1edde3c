//! `/v1/batches`: files of requests that are answered within a day.

use super::{
    access::Client,
    files::{ListQuery, check_age, listed, page},
    parameters::{Path, Query},
    responses::request,
};
use crate::{
    batch::{
        input::ENDPOINTS,
        life::{Batch, NewBatch, WINDOW},
    },
    batches::BatchError,
    requests::error::ApiError,
};
use axum::{Json, body::Body};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

const PAGE_MAX: usize = 100;
const PAGE_DEFAULT: usize = 20;

type Answered = Result<Json<Value>, ApiError>;

#[derive(Debug, Deserialize)]
struct Fields {
    input_file_id: String,
    endpoint: String,
    completion_window: String,
    #[serde(default)]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(default)]
    output_expires_after: Option<ExpiresAfter>,
}

#[derive(Debug, Deserialize)]
struct ExpiresAfter {
    #[serde(default)]
    anchor: Option<String>,
    seconds: u64,
}

/// `POST /v1/batches`.
pub async fn create(Client(gateway): Client, body: Body) -> Answered {
    let batches = gateway.batches()?;
    let Fields { input_file_id, endpoint, completion_window, metadata, output_expires_after } = gateway.read_json(body).await?;
    if !ENDPOINTS.contains(&endpoint.as_str()) {
        let message = format!("`endpoint` is `{}`: it must be one of {}", endpoint.escape_debug(), ENDPOINTS.join(", "));
        return Err(ApiError::invalid("endpoint", message));
    }
    if completion_window != WINDOW {
        return Err(ApiError::invalid("completion_window", format!("`completion_window` must be `{WINDOW}`")));
    }
    let output_age_s = output_expires_after.map(|wish| check_age(wish.anchor.as_deref(), Some(wish.seconds))).transpose()?.flatten();
    let wanted = NewBatch { endpoint, input_file: input_file_id, metadata: request::metadata(metadata)?, output_age_s };
    let batch = batches.create(gateway.sender(), wanted).await.map_err(|error| ApiError::of_batches("input_file_id", error))?;
    Ok(Json(batch.view()))
}

/// `GET /v1/batches`.
pub async fn list(Client(gateway): Client, Query(query): Query<ListQuery>) -> Answered {
    let batches = gateway.batches()?.list(&gateway.owner().0, &page(&query, PAGE_DEFAULT, PAGE_MAX)?);
    Ok(Json(listed(batches.map_err(|error| ApiError::of_batches("after", error))?, Batch::view)))
}

/// `GET /v1/batches/{id}`.
pub async fn retrieve(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    gateway.batches()?.batch(&gateway.owner().0, &id).map(|batch| Json(batch.view())).map_err(of_batch)
}

/// `POST /v1/batches/{id}/cancel`.
pub async fn cancel(Client(gateway): Client, Path(id): Path<String>) -> Answered {
    let cancelled = gateway.batches()?.cancel(&gateway.owner().0, &id).await;
    cancelled.map(|batch| Json(batch.view())).map_err(of_batch)
}

fn of_batch(error: BatchError) -> ApiError {
    ApiError::of_batches("batch_id", error)
}
