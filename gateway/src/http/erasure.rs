//! Erasure, for operators: orders to erase a tenant's or a user's data, and what is left of it.

use super::admin;
use crate::{
    base::{owner::Erasing, stamp::unix_seconds},
    requests::error::ApiError,
    serving::gateway::Gateway,
    tenants::erasures::OrderError,
};
use axum::{Json, body::Body, extract::State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tidemill_tenancy::records::Erasure;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    tenant: String,
    /// Without one, the whole tenant.
    #[serde(default)]
    user: Option<String>,
    /// Whether data is only counted.
    #[serde(default)]
    check: bool,
}

/// `POST /admin/erasures`: erases at this coordinator, and orders all others to do the same; or counts what is left.
pub async fn erase(State(gateway): State<Arc<Gateway>>, body: Body) -> Result<Json<Value>, ApiError> {
    let Wanted { tenant, user, check } = admin::read(body).await?;
    let whose = admin::whose(tenant, user)?;
    let left = async |gateway: &Gateway| gateway.erase(&whose, Erasing::Count, true).await.map_err(unfinished);
    if check {
        let left = left(&gateway).await?;
        return Ok(Json(json!({"tenant": whose.tenant, "user": whose.user, "left": left, "total_left": left.total()})));
    }
    let _one = gateway.one_erasure().await;
    let (of, by) = (whose.clone(), gateway.coordinator());
    let Json(ordered) = admin::change(&gateway, move |tenants| {
        let ordered = tenants.order_erasure(&of, by, unix_seconds()).map_err(|error| match error {
            OrderError::Full(message) => ApiError::conflict(message),
            OrderError::Keep(error) => admin::not_kept(error),
        })?;
        Ok(json!(ordered))
    })
    .await?;
    let ordered: Erasure = serde_json::from_value(ordered).map_err(|error| ApiError::internal(error.to_string()))?;
    let erased = gateway.erase(&whose, Erasing::Remove, true).await.map_err(unfinished)?;
    let left = left(&gateway).await?;
    let audited = gateway.note_erasure(&whose, &ordered, erased).await.is_some();
    tracing::info!(tenant = whose.tenant, erasure = ordered.id, ?erased, left = left.total(), "data was erased on an operator's order");
    Ok(Json(json!({
        "id": ordered.id, "tenant": whose.tenant, "user": whose.user, "erased": erased, "left": left, "total_left": left.total(),
        "settles_in_s": gateway.erasure_settles().as_secs(), "audited": audited,
    })))
}

/// `GET /admin/erasures`: the orders that are known here.
pub async fn list(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let orders = gateway
        .tenants()
        .erasures()
        .into_iter()
        .map(|(whose, Erasure { id, user, at, by })| json!({"id": id, "tenant": whose.tenant, "user": user, "at": at, "by": by}));
    Json(json!({"erasures": orders.collect::<Vec<_>>()}))
}

fn unfinished(problem: String) -> ApiError {
    ApiError::internal(format!("not everything could be looked at; where it was ordered, the removal goes on by itself: {problem}"))
}
