//! `/v1/models`.

use super::{
    access::Client,
    openai::{Model, ModelCard, ModelList, TruncationPolicy},
    parameters::Path,
};
use crate::{requests::error::ApiError, serving::gateway::Gateway};
use axum::Json;

/// Codex starts its prompt with these words; its tools need no further description.
const BASE_INSTRUCTIONS: &str =
    "You are a coding agent. You work in the user's directory with the tools that you are given. Keep answers short.";

pub async fn list(Client(gateway): Client) -> Json<ModelList> {
    // A name of the routing rules has the shortest context of the models behind it.
    let routed = gateway.routed_names().into_iter().filter_map(|(name, models)| Some((shortest(models)?, name)));
    let names: Vec<_> = gateway.models().flat_map(names).chain(routed).collect();
    Json(ModelList {
        object: "list",
        data: names.iter().map(|(gateway, name)| model(gateway, name)).collect(),
        models: names.iter().map(|(gateway, name)| card(gateway, name)).collect(),
    })
}

pub async fn one(Client(gateway): Client, Path(id): Path<String>) -> Result<Json<Model>, ApiError> {
    let routed = gateway.routed_names().into_iter().find(|(name, _)| *name == id).and_then(|(_, models)| shortest(models));
    match routed {
        Some(gateway) => Ok(Json(model(&gateway, &id))),
        None => Ok(Json(model(&*gateway.select(Some(&id))?, &id))),
    }
}

fn shortest(models: Vec<Gateway>) -> Option<Gateway> {
    models.into_iter().min_by_key(Gateway::context_tokens_max)
}

/// Lists a model's name, then its aliases.
fn names(gateway: Gateway) -> Vec<(Gateway, String)> {
    let aliases = gateway.aliases();
    let others = aliases.iter().filter(|(_, model)| *model == gateway.model_name()).map(|(name, _)| name.clone());
    let names: Vec<String> = std::iter::once(gateway.model_name().to_owned()).chain(others).collect();
    names.into_iter().map(|name| (gateway.clone(), name)).collect()
}

fn model(gateway: &Gateway, name: &str) -> Model {
    Model {
        id: name.to_owned(),
        object: "model",
        created: gateway.created(),
        owned_by: "tidemill",
        root: gateway.model_name().to_owned(),
        max_model_len: gateway.context_tokens_max(),
    }
}

fn card(gateway: &Gateway, name: &str) -> ModelCard {
    ModelCard {
        slug: name.to_owned(),
        display_name: name.to_owned(),
        description: format!("{} at Tidemill", gateway.model_name()),
        supported_reasoning_levels: [],
        shell_type: "shell_command",
        visibility: "list",
        supported_in_api: true,
        priority: 0,
        upgrade: None,
        base_instructions: BASE_INSTRUCTIONS,
        supports_reasoning_summaries: false,
        support_verbosity: false,
        default_verbosity: None,
        apply_patch_tool_type: None,
        truncation_policy: TruncationPolicy { mode: "bytes", limit: 10_000 },
        supports_parallel_tool_calls: true,
        context_window: gateway.context_tokens_max(),
        experimental_supported_tools: [],
        input_modalities: ["text"],
    }
}
