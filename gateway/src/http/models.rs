//! `/v1/models`.

use super::{
    access::Client,
    openai::{Model, ModelCard, ModelList, TruncationPolicy},
    parameters::{Path, Query},
};
use crate::{
    requests::{error::ApiError, parse::in_range},
    serving::gateway::Gateway,
};
use axum::Json;
use serde::Deserialize;
use std::ops::Range;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// The maximum number of models on one page, as in Anthropic's API.
const PAGE_MAX: usize = 1000;

/// Codex starts its prompt with these words; its tools need no further description.
const BASE_INSTRUCTIONS: &str =
    "You are a coding agent. You work in the user's directory with the tools that you are given. Keep answers short.";

/// The wish for a page. Without one, the list has all models, as in OpenAI's API.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PageQuery {
    limit: Option<usize>,
    after_id: Option<String>,
    before_id: Option<String>,
}

/// `GET /v1/models`.
pub async fn list(Client(gateway): Client, Query(query): Query<PageQuery>) -> Result<Json<ModelList>, ApiError> {
    // A name of the routing rules has the shortest context of the models behind it.
    let routed = gateway.routed_names().into_iter().filter_map(|(name, models)| Some((shortest(models)?, name)));
    let names: Vec<_> = gateway.models().flat_map(names).chain(routed).collect();
    let ids: Vec<_> = names.iter().map(|(_, name)| name.as_str()).collect();
    let (range, has_more) = page(&ids, &query)?;
    let id = |name: Option<&&str>| name.map(|name| (*name).to_owned());
    let (first_id, last_id) = (id(ids[range.clone()].first()), id(ids[range.clone()].last()));
    let shown = &names[range];
    Ok(Json(ModelList {
        object: "list",
        data: shown.iter().map(|(gateway, name)| model(gateway, name)).collect(),
        models: shown.iter().map(|(gateway, name)| card(gateway, name)).collect(),
        first_id,
        last_id,
        has_more,
    }))
}

/// Selects a page of ids, and whether there are more in its direction.
fn page(ids: &[&str], PageQuery { limit, after_id, before_id }: &PageQuery) -> Result<(Range<usize>, bool), ApiError> {
    let limit = limit.map_or(Ok(ids.len()), |limit| in_range("limit", limit, 1..=PAGE_MAX))?;
    let place = |param: &str, id: &str| {
        let unknown = || ApiError::invalid(param, format!("`{param}`: there is no model `{}` in this list", id.escape_debug()));
        ids.iter().position(|listed| *listed == id).ok_or_else(unknown)
    };
    match (after_id, before_id) {
        (Some(_), Some(_)) => Err(ApiError::invalid("before_id", "`after_id` and `before_id` are both given: a page has one direction")),
        (None, Some(id)) => {
            let end = place("before_id", id)?;
            let begin = end.saturating_sub(limit);
            Ok((begin..end, begin > 0))
        }
        (after, None) => {
            let begin = after.as_deref().map_or(Ok(0), |id| place("after_id", id).map(|place| place + 1))?;
            let end = begin.saturating_add(limit).min(ids.len());
            Ok((begin..end, end < ids.len()))
        }
    }
}

/// `GET /v1/models/{id}`.
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
        r#type: "model",
        display_name: name.to_owned(),
        created_at: time(gateway.created()),
        owned_by: "tidemill",
        root: gateway.model_name().to_owned(),
        max_model_len: gateway.context_tokens_max(),
    }
}

fn time(unix_s: u64) -> String {
    let time = i64::try_from(unix_s).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    time.unwrap_or(OffsetDateTime::UNIX_EPOCH).format(&Rfc3339).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_go_on_in_both_directions() {
        let ids = ["a", "b", "c", "d"];
        let owned = |id: Option<&str>| id.map(str::to_owned);
        let query = |limit, after, before| PageQuery { limit, after_id: owned(after), before_id: owned(before) };
        let page = |limit, after, before| {
            page(&ids, &query(limit, after, before)).map(|(range, more)| (ids[range].concat(), more)).map_err(|error| error.body())
        };
        let is = |ids: &str, more| Ok((ids.to_owned(), more));
        assert_eq!(page(None, None, None), is("abcd", false));
        assert_eq!(page(Some(2), None, None), is("ab", true));
        assert_eq!(page(Some(2), Some("b"), None), is("cd", false));
        assert_eq!(page(Some(1000), Some("d"), None), is("", false));
        assert_eq!(page(Some(2), None, Some("d")), is("bc", true));
        assert_eq!(page(Some(2), None, Some("c")), is("ab", false));
        for (limit, after, before, param) in [
            (Some(0), None, None, "limit"),
            (Some(1001), None, None, "limit"),
            (None, Some("x"), None, "after_id"),
            (None, Some("a"), Some("b"), "before_id"),
        ] {
            assert_eq!(page(limit, after, before).unwrap_err()["error"]["param"], param);
        }
    }

    #[test]
    fn times_are_written_as_anthropics_clients_read_them() {
        assert_eq!(time(1_700_000_000), "2023-11-14T22:13:20Z");
    }
}
