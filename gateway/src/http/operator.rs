//! Endpoints for operators and probes: `/ready`, `/metrics`, `/cluster`, `/reset_prefix_cache`.

use super::parameters::{ModelQuery, Query};
use crate::{
    base::registry::RegistryView,
    cache::replay::Counts,
    metrics,
    requests::error::ApiError,
    serving::gateway::{Gateway, probed::ProbedModel},
};
use axum::{
    Json,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
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

/// `GET /ready/generate`: 200 when every model has just computed a token.
pub async fn generates(State(gateway): State<Arc<Gateway>>) -> Result<Json<Value>, ApiError> {
    gateway.check_ready()?;
    let models = gateway.probe_models().await;
    let failed = models.iter().filter_map(|ProbedModel { name, answered }| Some(format!("`{name}`: {}", answered.as_ref().err()?)));
    let failed: Vec<String> = failed.collect();
    if !failed.is_empty() {
        return Err(ApiError::not_generating(&failed.join("; ")));
    }
    let shown =
        |ProbedModel { name, answered }: ProbedModel| json!({"model": name, "took_ms": answered.unwrap_or_default().as_secs_f64() * 1e3});
    Ok(Json(json!({"models": models.into_iter().map(shown).collect::<Vec<_>>()})))
}

/// `POST /reset_prefix_cache`: no cached block or answer of a model is found any more; of all models, if none is named.
pub async fn reset_prefix_cache(
    State(gateway): State<Arc<Gateway>>,
    Query(ModelQuery { model }): Query<ModelQuery>,
) -> Result<Json<Value>, ApiError> {
    let models = match model {
        Some(model) => vec![(*gateway.select(Some(&model))?).clone()],
        None => gateway.models().collect(),
    };
    for model in &models {
        model.reset_cache().await?;
    }
    Ok(Json(json!({"models": models.iter().map(Gateway::model_name).collect::<Vec<_>>()})))
}

pub async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::render(&gateway.view(), &gateway.registry().view())).into_response()
}

pub async fn cluster(State(gateway): State<Arc<Gateway>>) -> Response {
    Json(Shown { cluster: gateway.view(), replays: gateway.replays().counts(), registry: gateway.registry().view() }).into_response()
}
