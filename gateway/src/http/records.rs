//! `/registry`: the coordinators' agreed records. Only on the operators' port, since they affect all clients.

use super::{
    admin,
    parameters::{Path, Query},
};
use crate::{
    base::registry::{ChangeError, RecordView},
    requests::error::ApiError,
    serving::gateway::Gateway,
};
use axum::{Json, body::Body, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    kind: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    expected: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Put {
    value: Value,
    /// The revision to be replaced; 0 if the record must not exist.
    expected: Option<u64>,
}

#[derive(Serialize)]
pub struct Records {
    records: Vec<RecordView>,
}

pub async fn list(State(gateway): State<Arc<Gateway>>, Query(Kind { kind }): Query<Kind>) -> Json<Records> {
    Json(Records { records: gateway.registry().records(kind.as_deref(), None) })
}

pub async fn get(State(gateway): State<Arc<Gateway>>, Path((kind, key)): Path<(String, String)>) -> Result<Json<RecordView>, ApiError> {
    let mut found = gateway.registry().records(Some(&kind), Some(&key));
    found.pop().map(Json).ok_or_else(|| ApiError::not_found("key", format!("There is no record `{kind}/{key}`.")))
}

pub async fn put(
    State(gateway): State<Arc<Gateway>>,
    Path((kind, key)): Path<(String, String)>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let Put { value, expected } = admin::read(body).await?;
    let revision = gateway.registry().put(kind, key, value, expected).await.map_err(refused)?;
    Ok(Json(json!({ "revision": revision })))
}

pub async fn delete(
    State(gateway): State<Arc<Gateway>>,
    Path((kind, key)): Path<(String, String)>,
    Query(Expected { expected }): Query<Expected>,
) -> Result<Json<Value>, ApiError> {
    gateway.registry().delete(kind, key, expected).await.map_err(refused)?;
    Ok(Json(json!({ "deleted": true })))
}

pub async fn remove_coordinator(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    gateway.registry().remove_coordinator(name).await.map_err(refused)?;
    Ok(Json(json!({ "removed": true })))
}

pub(super) fn refused(error: ChangeError) -> ApiError {
    let message = format!("It was not changed: {error}.");
    match error {
        ChangeError::Invalid(_) => ApiError::malformed(message),
        ChangeError::NotFound(_) => ApiError::not_found("key", message),
        ChangeError::Conflict(_) => ApiError::conflict(message),
        ChangeError::NotNow(_) => ApiError::not_now(message),
    }
}
