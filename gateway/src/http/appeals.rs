//! Appeals against blocks: clients file them, operators review and decide them.

use super::{
    access::Client,
    admin,
    parameters::{Path, Query},
};
use crate::{
    requests::error::ApiError,
    safety::audit::{Audit, AuditError},
    serving::gateway::Gateway,
};
use axum::{Json, body::Body, extract::State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tidemill_safety::appeals::{self, Decision, Refused};

/// The maximum length of a reason, or of an operator's note.
const TEXT_BYTES_MAX: usize = 4096;

#[derive(Debug, Deserialize)]
struct Appeal {
    appeal_id: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Decided {
    /// The decision: `upheld` or `overturned`.
    decision: Decision,
    #[serde(default)]
    note: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// The state of the appeals to list; all if it is missing.
    state: Option<appeals::State>,
}

/// `POST /v1/appeals`.
pub async fn create(Client(gateway): Client, body: Body) -> Result<Json<Value>, ApiError> {
    let Appeal { appeal_id, reason } = gateway.read_json(body).await?;
    check_text("reason", &reason)?;
    audit(&gateway)?.appeal(gateway.tenant(), &appeal_id, &reason).await.map_err(|error| refused("appeal_id", error))?;
    Ok(Json(json!({"id": appeal_id, "object": "appeal", "status": "open"})))
}

/// `GET /admin/appeals`.
pub async fn list(State(gateway): State<Arc<Gateway>>, Query(ListQuery { state }): Query<ListQuery>) -> Result<Json<Value>, ApiError> {
    let audit = audit(&gateway)?;
    let end = audit.end();
    Ok(Json(json!({"appeals": audit.list(state), "audit": {"records": end.seq, "head": end.head.to_hex().as_str()}})))
}

/// `POST /admin/appeals/{id}`.
pub async fn decide(State(gateway): State<Arc<Gateway>>, Path(id): Path<String>, body: Body) -> Result<Json<Value>, ApiError> {
    let Decided { decision, note } = admin::read(body).await?;
    check_text("note", &note)?;
    let case = audit(&gateway)?.decide(&id, decision, &note).await.map_err(|error| refused("id", error))?;
    Ok(Json(json!(case)))
}

fn audit(gateway: &Gateway) -> Result<&Audit, ApiError> {
    gateway.audit().ok_or_else(|| ApiError::malformed("there are no appeals at this server: --audit switches them on"))
}

fn check_text(param: &str, text: &str) -> Result<(), ApiError> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(ApiError::invalid(param, format!("`{param}` must have at most {TEXT_BYTES_MAX} bytes")));
    }
    Ok(())
}

fn refused(param: &str, error: AuditError) -> ApiError {
    let message = error.to_string();
    match error {
        AuditError::Refused(Refused::Unknown) => ApiError::not_found(param, message),
        AuditError::Refused(Refused::Appealed | Refused::NotOpen) => ApiError::conflict(message),
        AuditError::NotWritten => ApiError::internal(message),
    }
}
