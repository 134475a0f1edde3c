//! Endpoints for operators and probes: `/ready`, `/metrics`, `/cluster`.

use crate::{base::registry::RegistryView, cache::replay::Counts, metrics, requests::error::ApiError, serving::gateway::Gateway};
use axum::{
    Json,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
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

/// Layer: passes requests while no key is needed on the clients' port, and refuses all afterwards.
pub async fn while_open(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    match gateway.tenants().check_known() {
        Err(error) => error.into_response(),
        Ok(()) if gateway.tenants().is_open() => next.run(request).await,
        Ok(()) => ApiError::no_route(request.method().as_str(), request.uri().path()).into_response(),
    }
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
