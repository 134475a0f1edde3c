//! For operators and probes: `/ready`, `/metrics`, `/cluster`.

use super::errors::ApiError;
use crate::{gateway::Gateway, metrics, registry::RegistryView, replay::Counts};
use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use std::sync::Arc;
use tidemill_cluster::ClusterView;

#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    cluster: ClusterView,
    replays: Counts,
    registry: RegistryView,
}

pub async fn ready(State(gateway): State<Arc<Gateway>>) -> Result<StatusCode, ApiError> {
    gateway.check_ready().map(|()| StatusCode::OK)
}

pub async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::render(&gateway.view(), &gateway.registry().view())).into_response()
}

pub async fn cluster(State(gateway): State<Arc<Gateway>>) -> Response {
    Json(Shown { cluster: gateway.view(), replays: gateway.replays().counts(), registry: gateway.registry().view() }).into_response()
}
