//! The body of `POST /v1/responses`, read as far as possible without the store.

use crate::{
    dialog::{ToolChoice, thinking::ReasoningWish},
    http::tool_choice,
    requests::{
        custom,
        error::ApiError,
        fields::{self, row::Door},
        items::{self, ITEMS_MAX, ItemContent, Sent},
        options::{Options, TOP_LOGPROBS_MAX},
        parse::{JsonBody, in_range},
        structured, thinking,
    },
    serving::{
        gateway::{Gateway, route::RouteRequest},
        rounds,
    },
    text::tool::Tool,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Instant,
};

/// The value of `include` that requests log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// OpenAI's limits on `metadata`.
const METADATA_MAX: usize = 16;
const METADATA_KEY_MAX: usize = 64;
const METADATA_VALUE_MAX: usize = 512;

/// A response to be made.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) options: Options,
    pub(super) instructions: Option<String>,
    pub(super) input: Vec<Sent>,
    pub(super) before: Before,
    pub(super) store: bool,
    pub(super) tools: Vec<Tool>,
    /// Names of the tools that are called with text.
    pub(super) custom: HashSet<String>,
    /// Names of the tools that run on the server.
    pub(super) server_tools: Vec<String>,
    pub(super) tool_choice: ToolChoice,
    pub(super) parallel: bool,
    pub(super) reasoning: ReasoningWish,
    /// The fields that the response repeats from its request.
    pub(super) echo: Map<String, Value>,
}

/// The history that the input continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Before {
    Nothing,
    Response(String),
    Conversation(String),
}

/// The stored data that a request names.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) before: Before,
    /// Ids of items among its input.
    pub(super) items: Vec<String>,
}

impl Named {
    pub(super) fn is_any(&self) -> bool {
        self.before != Before::Nothing || !self.items.is_empty()
    }
}

impl Request {
    pub(super) fn named(&self) -> Named {
        let id = |sent: &Sent| if let ItemContent::Reference(id) = &sent.said { Some(id.clone()) } else { None };
        Named { before: self.before.clone(), items: self.input.iter().filter_map(id).collect() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Body {
    input: Option<Input>,
    instructions: Option<String>,
    previous_response_id: Option<String>,
    conversation: Option<ConversationField>,
    store: Option<bool>,
    max_output_tokens: Option<u32>,
    tools: Option<Vec<Value>>,
    server_tools: Option<Vec<String>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<ReasoningField>,
    thinking_token_budget: Option<i64>,
    text: Option<TextField>,
    metadata: Option<BTreeMap<String, String>>,
    top_logprobs: Option<u32>,
    include: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Value>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a conversation's id, or an object with it")]
enum ConversationField {
    Id(String),
    Object { id: String },
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ReasoningField {
    effort: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TextField {
    format: Option<Value>,
}

/// Reads a body. Returns the gateway of the requested model, and the request.
pub(super) fn understand(gateway: &Gateway, arrived: Instant, body: JsonBody) -> Result<(Arc<Gateway>, Request), ApiError> {
    let mut request = fields::generating(Door::Responses, &body)?;
    let gateway = gateway.route(RouteRequest {
        path: Some("/v1/responses"),
        model: request.model.as_deref(),
        service_tier: request.service_tier.as_deref(),
        body: body.fields(),
    })?;
    let body: Body = body.into()?;
    let top_logprobs = in_range("top_logprobs", body.top_logprobs.unwrap_or(0), 0..=TOP_LOGPROBS_MAX)?;
    let wants_logprobs = top_logprobs > 0 || body.include.iter().flatten().any(|name| name == LOGPROBS);
    let metadata = metadata(body.metadata)?;
    // A response is one answer; its length has a field of its own.
    request.n = None;
    request.best_of = None;
    request.max_tokens = body.max_output_tokens;
    request.max_completion_tokens = None;
    let format = body.text.and_then(|text| text.format).unwrap_or_else(|| json!({"type": "text"}));
    let asked = {
        let mut hearing = gateway.hearing();
        let judge = &mut |schema: &Value, terms| hearing.schema(schema, terms);
        let asked = structured::flat_format("text.format", "text.format.schema", &format)?;
        structured::grammar_beside(&mut request, asked, judge)?
    };
    let mut options = gateway.options(arrived, request)?;
    options.sampling.logprobs = wants_logprobs.then_some(top_logprobs);
    options.rules.logprobs_of_text = wants_logprobs;
    if let Some(asked) = asked {
        options.constrain(asked, gateway.text());
    }
    let before = match (body.previous_response_id, body.conversation) {
        (None, None) => Before::Nothing,
        (Some(id), None) => Before::Response(id),
        (None, Some(ConversationField::Id(id) | ConversationField::Object { id })) => Before::Conversation(id),
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("previous_response_id", "`previous_response_id` and `conversation` exclude each other"));
        }
    };
    let input = input(body.input, &before)?;
    let (mut tools, repeated_tools) = tools(body.tools.unwrap_or_default())?;
    let is_custom = |tool: &&Value| tool["type"] == "custom";
    let custom = repeated_tools.iter().filter(is_custom).filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect();
    let named = body.server_tools.unwrap_or_default();
    let here = rounds::offered(&gateway, &named)?;
    let server_tools = here.iter().map(|tool| tool.name.clone()).collect();
    tools.extend(here);
    let (tools, tool_choice) = tool_choice::understand(tools, body.tool_choice.as_ref())?;
    let chosen = tool_choice::repeated(&tools, body.tool_choice.as_ref());
    let parallel = body.parallel_tool_calls.unwrap_or(true);
    let effort = thinking::effort("reasoning.effort", body.reasoning.and_then(|reasoning| reasoning.effort))?;
    let budget = thinking::token_budget(body.thinking_token_budget)?;
    let store = body.store.unwrap_or(true);
    let echo = json!({
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": metadata,
        "parallel_tool_calls": parallel,
        "previous_response_id": match &before { Before::Response(id) => Some(id), _ => None },
        "conversation": match &before { Before::Conversation(id) => json!({"id": id}), _ => Value::Null },
        "reasoning": {"effort": effort, "summary": null},
        "store": store,
        "temperature": options.sampling.temperature,
        "text": {"format": format},
        "tool_choice": chosen,
        "tools": repeated_tools,
        "top_logprobs": top_logprobs,
        "top_p": options.sampling.top_p,
        "truncation": "disabled",
    });
    let Value::Object(mut echo) = echo else { unreachable!("it is written as an object") };
    if !named.is_empty() {
        echo.insert("server_tools".into(), json!(named));
    }
    let request = Request {
        options,
        instructions: body.instructions,
        input,
        before,
        store,
        tools,
        custom,
        server_tools,
        tool_choice,
        parallel,
        reasoning: ReasoningWish { effort, budget, ..ReasoningWish::default() },
        echo,
    };
    Ok((gateway, request))
}

/// Reads a body as far as that depends on no model.
#[cfg(test)]
pub(in crate::http) fn read(body: JsonBody) -> Result<(), ApiError> {
    let body: Body = body.into()?;
    tool_choice::understand(tools(body.tools.unwrap_or_default())?.0, body.tool_choice.as_ref()).map(drop)
}

fn input(input: Option<Input>, before: &Before) -> Result<Vec<Sent>, ApiError> {
    let items = match input {
        None => Vec::new(),
        Some(Input::Text(text)) => vec![json!({"type": "message", "role": "user", "content": text})],
        Some(Input::Items(items)) => items,
    };
    if items.is_empty() && *before == Before::Nothing {
        return Err(ApiError::invalid("input", "`input` is empty: at least one item is needed"));
    }
    sent(items, "input")
}

/// Reads the items of a body's list.
pub(crate) fn sent(items: Vec<Value>, param: &str) -> Result<Vec<Sent>, ApiError> {
    if items.len() > ITEMS_MAX {
        return Err(ApiError::invalid(param, format!("`{param}` has {} items, at most {ITEMS_MAX} are allowed", items.len())));
    }
    items.into_iter().enumerate().map(|(place, item)| items::understand(&format!("{param}[{place}]"), item)).collect()
}

pub(crate) fn metadata(metadata: Option<BTreeMap<String, String>>) -> Result<BTreeMap<String, String>, ApiError> {
    let metadata = metadata.unwrap_or_default();
    let fits = |(key, value): (&String, &String)| key.chars().count() <= METADATA_KEY_MAX && value.chars().count() <= METADATA_VALUE_MAX;
    if metadata.len() > METADATA_MAX || !metadata.iter().all(fits) {
        let message = format!(
            "`metadata` may have {METADATA_MAX} entries, with keys of {METADATA_KEY_MAX} and values of {METADATA_VALUE_MAX} characters"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(metadata)
}

/// Selects the functions and custom tools among `tools`, as read and as sent. Tools that a host would have to run are skipped: agents offer
/// them to every server.
fn tools(tools: Vec<Value>) -> Result<(Vec<Tool>, Vec<Value>), ApiError> {
    let functions = tools.into_iter().enumerate().filter(|(_, tool)| tool["type"] == "function" || tool["type"] == "custom");
    let function = |(place, mut tool): (usize, Value)| {
        let param = format!("tools[{place}]");
        if tool["type"] == "custom" {
            return Ok((custom::tool(&param, &tool)?, tool));
        }
        let name = tool["name"].as_str().map(str::to_owned);
        let name = name.ok_or_else(|| ApiError::invalid(format!("{param}.name"), format!("`{param}` needs `name`")))?;
        let parameters = match tool.get("parameters") {
            None | Some(Value::Null) => None,
            Some(Value::Object(schema)) => Some(Value::Object(schema.clone())),
            Some(_) => return Err(ApiError::invalid(format!("{param}.parameters"), format!("`{param}.parameters` must be an object"))),
        };
        let strict = tool["strict"].as_bool().unwrap_or(false);
        tool["strict"] = strict.into();
        Ok((Tool { name, description: tool["description"].as_str().map(str::to_owned), parameters, strict }, tool))
    };
    Ok(functions.map(function).collect::<Result<Vec<_>, _>>()?.into_iter().unzip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Value {
        json!({"type": "function", "name": name, "parameters": {"type": "object"}})
    }

    #[test]
    fn functions_are_taken_and_other_tools_skipped() {
        let (understood, repeated) =
            tools(vec![json!({"type": "web_search"}), named("f"), json!({"type": "custom", "name": "c"})]).unwrap();
        let names: Vec<_> = understood.iter().map(|tool| (tool.name.as_str(), tool.strict)).collect();
        assert_eq!(names, [("f", false), ("c", false)]);
        assert_eq!(repeated[0], json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": false}));
        for wrong in [json!({"type": "function"}), json!({"type": "function", "name": "f", "parameters": "none"})] {
            assert!(tools(vec![wrong]).unwrap_err().message().contains("tools[0]"));
        }
    }
}
