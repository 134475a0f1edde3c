//! `/v1/models`.

use super::{
    errors::ApiError,
    openai::{Model, ModelList},
};
use crate::gateway::Gateway;
use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use std::sync::Arc;

pub async fn list(State(gateway): State<Arc<Gateway>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![model(&gateway)] })
}

pub async fn one(State(gateway): State<Arc<Gateway>>, id: Result<Path<String>, PathRejection>) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::malformed(rejection.body_text()))?;
    gateway.check_model(Some(&id))?;
    Ok(Json(model(&gateway)))
}

fn model(gateway: &Gateway) -> Model {
    Model {
        id: gateway.model_name().to_owned(),
        object: "model",
        created: gateway.created(),
        owned_by: "tidemill",
        root: gateway.model_name().to_owned(),
        max_model_len: gateway.context_tokens_max(),
    }
}
