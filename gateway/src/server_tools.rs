//! Tools that run here, for a model that calls them, where a client asks for it: a calculator, a clock, and an operator's HTTP endpoints.
//! What they return goes back to the model; see `http/responses/rounds.rs`.
//!
//! A model writes the arguments, so nothing in them chooses where a request goes: an endpoint's URL is the operator's, its host must be
//! on the operator's list, and no redirect is followed.

pub mod calculator;
pub mod endpoint;

use crate::dialog::Tool;
use endpoint::{Endpoint, EndpointSettings};
use futures_util::future::{BoxFuture, FutureExt};
use metrics::{counter, histogram};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc, time::Instant};
use tidemill_tenancy::web::TargetError;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

pub const CALCULATOR: &str = "calculator";
pub const CLOCK: &str = "clock";

#[derive(Clone, Debug)]
pub struct Settings {
    /// Of [`CALCULATOR`] and [`CLOCK`].
    pub built_in: Vec<String>,
    pub endpoints: Vec<EndpointSettings>,
    /// Times that the model is asked for one response: the last time without tools, so that it answers.
    pub rounds_max: u32,
}

#[derive(Debug)]
pub struct ServerTools {
    tools: BTreeMap<String, ServerTool>,
    pub rounds_max: u32,
}

#[derive(Debug)]
struct ServerTool {
    shown: Tool,
    runs: Runs,
}

#[derive(Debug)]
enum Runs {
    Calculator,
    Clock,
    Endpoint(Arc<Endpoint>),
}

/// A tool that no client named.
#[derive(Debug, thiserror::Error)]
#[error("this server has no tool `{name}`: it has {there}")]
pub struct UnknownTool {
    name: String,
    there: String,
}

impl ServerTools {
    pub fn new(settings: Settings) -> Result<Self, TargetError> {
        let mut tools = BTreeMap::new();
        for name in settings.built_in {
            let tool = if name == CLOCK { clock() } else { calculator() };
            tools.insert(name, tool);
        }
        for endpoint in settings.endpoints {
            let shown = endpoint.shown.clone();
            tools.insert(shown.name.clone(), ServerTool { shown, runs: Runs::Endpoint(Arc::new(Endpoint::new(endpoint)?)) });
        }
        Ok(Self { tools, rounds_max: settings.rounds_max })
    }

    /// Those that a client names, as the model sees them.
    pub fn offered(&self, names: &[String]) -> Result<Vec<Tool>, UnknownTool> {
        let named = |name: &String| {
            let there = || self.tools.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            self.tools.get(name).map(|tool| tool.shown.clone()).ok_or_else(|| UnknownTool { name: name.clone(), there: there() })
        };
        names.iter().map(named).collect()
    }

    /// What a call returns, also what went wrong: the model is told. Within the tool's time.
    pub fn call(&self, name: &str, arguments: Value) -> BoxFuture<'static, String> {
        let Some(tool) = self.tools.get(name) else { return async { "error: there is no such tool".into() }.boxed() };
        let (name, began) = (name.to_owned(), Instant::now());
        let returned = match &tool.runs {
            Runs::Calculator => std::future::ready(calculated(&arguments)).boxed(),
            Runs::Clock => std::future::ready(Ok(now(OffsetDateTime::now_utc()))).boxed(),
            Runs::Endpoint(endpoint) => Arc::clone(endpoint).call(arguments).boxed(),
        };
        async move {
            let returned = returned.await;
            let outcome = if returned.is_ok() { "ok" } else { "failed" };
            counter!("tidemill_server_tool_calls_total", "tool" => name.clone(), "outcome" => outcome).increment(1);
            histogram!("tidemill_server_tool_seconds").record(began.elapsed());
            returned.unwrap_or_else(|problem| {
                tracing::warn!(tool = name, problem, "a tool's call failed");
                format!("error: {problem}")
            })
        }
        .boxed()
    }
}

fn calculator() -> ServerTool {
    let parameters = json!({
        "type": "object",
        "properties": {"expression": {"type": "string", "maxLength": 200, "description": "such as (2 + 3.5) * 4 ** 2 / 7"}},
        "required": ["expression"],
        "additionalProperties": false,
    });
    let shown = Tool {
        name: CALCULATOR.into(),
        description: Some("Evaluates arithmetic: numbers, + - * / // % **, and parentheses.".into()),
        parameters: Some(parameters),
        strict: true,
    };
    ServerTool { shown, runs: Runs::Calculator }
}

fn clock() -> ServerTool {
    let shown = Tool {
        name: CLOCK.into(),
        description: Some("Tells date, weekday and time now, in UTC.".into()),
        parameters: Some(json!({"type": "object", "properties": {}, "additionalProperties": false})),
        strict: true,
    };
    ServerTool { shown, runs: Runs::Clock }
}

fn calculated(arguments: &Value) -> Result<String, String> {
    let expression = arguments["expression"].as_str().ok_or("`expression` must be a text")?;
    calculator::evaluate(expression).map_err(|error| error.to_string())
}

fn now(now: OffsetDateTime) -> String {
    let second = now.replace_nanosecond(0).unwrap_or(now);
    format!("{}, {}", second.format(&Rfc3339).unwrap_or_default(), second.weekday())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built_in() -> ServerTools {
        let built_in = [CALCULATOR, CLOCK].map(str::to_owned).into();
        ServerTools::new(Settings { built_in, endpoints: Vec::new(), rounds_max: 8 }).unwrap()
    }

    #[test]
    fn a_client_gets_those_that_it_names() {
        let tools = built_in();
        let offered = tools.offered(&[CLOCK.into()]).unwrap();
        assert_eq!((offered.len(), offered[0].name.as_str()), (1, CLOCK));
        let error = tools.offered(&["shell".into()]).unwrap_err().to_string();
        assert_eq!(error, "this server has no tool `shell`: it has `calculator`, `clock`");
    }

    #[test]
    fn the_model_is_told_what_came_of_a_call() {
        let call = |name: &str, arguments: Value| built_in().call(name, arguments).now_or_never().unwrap();
        assert_eq!(call(CALCULATOR, json!({"expression": "6 * 7"})), "42");
        assert!(call(CALCULATOR, json!({"expression": "6 *"})).starts_with("error: "));
        assert_eq!(call(CALCULATOR, json!({})), "error: `expression` must be a text");
        assert_eq!(call("shell", json!({})), "error: there is no such tool");
        assert_eq!(now(OffsetDateTime::UNIX_EPOCH), "1970-01-01T00:00:00Z, Thursday");
    }
}
