//! Tools that run on the server, for a model that calls them, if a client asks for it: a calculator, a clock, an operator's HTTP endpoints,
//! and tools of MCP servers. Their outputs go back to the model; see `serving/rounds.rs`.
//!
//! A model writes the arguments, so they must not determine where a request goes: URLs are the operator's, their hosts must be on the
//! operator's list, and no redirect is followed.

pub mod calculator;
pub mod endpoint;
pub mod mcp;
pub mod permission;

use super::metrics;
use crate::text::tool::Tool;
use endpoint::{Endpoint, EndpointSettings};
use futures_util::future::{BoxFuture, FutureExt, join_all};
use mcp::{BETWEEN, McpServer, McpSettings};
use permission::{Asker, Permission};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};
use tidemill_tenancy::web::TargetError;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::sync::watch;

pub const CALCULATOR: &str = "calculator";
pub const CLOCK: &str = "clock";

#[derive(Clone, Debug)]
pub struct Settings {
    /// The offered ones of [`CALCULATOR`] and [`CLOCK`].
    pub built_in: Vec<String>,
    pub endpoints: Vec<EndpointSettings>,
    /// The MCP servers. Other tools' names do not start like one of theirs.
    pub mcp: Vec<McpSettings>,
    /// The maximum number of rounds for one response. The last round has no tools, so that the model answers.
    pub rounds_max: u32,
}

#[derive(Debug)]
pub struct ServerTools {
    tools: BTreeMap<String, ServerTool>,
    /// The tools by their names.
    mcp: BTreeMap<String, Arc<McpServer>>,
    pub rounds_max: u32,
    /// Notified when connections have to end.
    ended: watch::Sender<bool>,
}

#[derive(Debug)]
struct ServerTool {
    shown: Tool,
    runs: Runs,
    permission: Permission,
}

#[derive(Debug)]
enum Runs {
    Calculator,
    Clock,
    Endpoint(Arc<Endpoint>),
}

/// The reason why a requested tool is not offered.
#[derive(Debug, thiserror::Error)]
pub enum NotOffered {
    #[error("this server has no tool `{name}` for you: you may use {there}")]
    Unknown { name: String, there: String },
    #[error("the tools of `{0}` are not there yet: its MCP server has not answered. Please try again later.")]
    NotYet(String),
}

impl ServerTools {
    pub fn new(settings: Settings) -> Result<Self, TargetError> {
        let mut tools = BTreeMap::new();
        for name in settings.built_in {
            let tool = if name == CLOCK { clock() } else { calculator() };
            tools.insert(name, tool);
        }
        for endpoint in settings.endpoints {
            let (shown, permission) = (endpoint.shown.clone(), endpoint.permission.clone());
            let runs = Runs::Endpoint(Arc::new(Endpoint::new(endpoint)?));
            tools.insert(shown.name.clone(), ServerTool { shown, runs, permission });
        }
        let mcp = settings.mcp.into_iter().map(|server| Ok((server.name.clone(), Arc::new(McpServer::new(server)?))));
        Ok(Self { tools, mcp: mcp.collect::<Result<_, _>>()?, rounds_max: settings.rounds_max, ended: watch::Sender::new(false) })
    }

    /// Keeps connections to MCP servers until [`Self::end`].
    pub async fn tend(&self) {
        join_all(self.mcp.values().map(|server| server.tend(self.ended.subscribe()))).await;
        // Without servers, this waits for the end.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Ends [`Self::tend`].
    pub fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Returns the tools that a client names, each once, as the model sees them; an MCP server's name stands for all its tools. For a client,
    /// tools that it may not use do not exist.
    pub fn offered(&self, asker: &Asker<'_>, names: &[String]) -> Result<Vec<Tool>, NotOffered> {
        let (mut offered, mut asked, mut there) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for name in names.iter().filter(|name| asked.insert(*name)) {
            offered.extend(self.named(asker, name)?.into_iter().filter(|tool| there.insert(tool.name.clone())));
        }
        Ok(offered)
    }

    fn named(&self, asker: &Asker<'_>, name: &str) -> Result<Vec<Tool>, NotOffered> {
        if let Some(tool) = self.tools.get(name).filter(|tool| tool.permission.allows(asker)) {
            return Ok(vec![tool.shown.clone()]);
        }
        let Some((server, mcp)) = self.server(name).filter(|(_, mcp)| mcp.permission().allows(asker)) else {
            let tools = self.tools.iter().filter(|(_, tool)| tool.permission.allows(asker)).map(|(name, _)| name);
            let servers = self.mcp.iter().filter(|(_, mcp)| mcp.permission().allows(asker)).map(|(name, _)| name);
            let names: Vec<_> = tools.chain(servers).map(|name| format!("`{name}`")).collect();
            return Err(NotOffered::Unknown { name: name.to_owned(), there: names.join(", ") });
        };
        let tools = mcp.tools().ok_or_else(|| NotOffered::NotYet(server.to_owned()))?;
        if name == server {
            return Ok(tools);
        }
        match tools.iter().find(|tool| tool.name == name) {
            Some(tool) => Ok(vec![tool.clone()]),
            None => {
                let names: Vec<_> = tools.iter().map(|tool| format!("`{}`", tool.name)).collect();
                Err(NotOffered::Unknown { name: name.to_owned(), there: format!("of `{server}` {}", names.join(", ")) })
            }
        }
    }

    /// Returns the MCP server of a name that is its own or a tool's.
    fn server<'a>(&self, name: &'a str) -> Option<(&'a str, &Arc<McpServer>)> {
        let server = name.split_once(BETWEEN).map_or(name, |(server, _)| server);
        self.mcp.get(server).map(|mcp| (server, mcp))
    }

    /// Calls a tool for a tenant. Returns its output, or a description of the error, for the model. Takes at most the tool's time limit.
    pub fn call(&self, tenant: Option<&str>, name: &str, arguments: Value) -> BoxFuture<'static, String> {
        let returned = match (self.tools.get(name).map(|tool| &tool.runs), self.server(name)) {
            (Some(Runs::Calculator), _) => std::future::ready(calculated(&arguments)).boxed(),
            (Some(Runs::Clock), _) => std::future::ready(Ok(now(OffsetDateTime::now_utc()))).boxed(),
            (Some(Runs::Endpoint(endpoint)), _) => Arc::clone(endpoint).call(arguments).boxed(),
            (None, Some((_, server))) => Arc::clone(server).call(tenant.map(str::to_owned), name.to_owned(), arguments).boxed(),
            (None, None) => return async { "error: there is no such tool".into() }.boxed(),
        };
        let (name, began) = (name.to_owned(), Instant::now());
        async move {
            let returned = returned.await;
            let outcome = if returned.is_ok() { "ok" } else { "failed" };
            metrics::note_tool_call(&name, outcome, began.elapsed());
            returned.unwrap_or_else(|problem| {
                // The message may quote a tool or a client, whose text does not belong in a log.
                tracing::warn!(tool = name, said_bytes = problem.len(), "a tool's call failed; its error goes to the model only");
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
    ServerTool { shown, runs: Runs::Calculator, permission: Permission::Everyone }
}

fn clock() -> ServerTool {
    let shown = Tool {
        name: CLOCK.into(),
        description: Some("Tells date, weekday and time now, in UTC.".into()),
        parameters: Some(json!({"type": "object", "properties": {}, "additionalProperties": false})),
        strict: true,
    };
    ServerTool { shown, runs: Runs::Clock, permission: Permission::Everyone }
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
        ServerTools::new(Settings { built_in, endpoints: Vec::new(), mcp: Vec::new(), rounds_max: 8 }).unwrap()
    }

    #[test]
    fn a_client_gets_those_that_it_names() {
        let tools = built_in();
        let offered = tools.offered(&Asker::default(), &[CLOCK.into(), CLOCK.into()]).unwrap();
        assert_eq!((offered.len(), offered[0].name.as_str()), (1, CLOCK));
        let error = tools.offered(&Asker::default(), &["shell".into()]).unwrap_err().to_string();
        assert_eq!(error, "this server has no tool `shell` for you: you may use `calculator`, `clock`");
    }

    #[test]
    fn the_model_is_told_what_came_of_a_call() {
        let call = |name: &str, arguments: Value| built_in().call(None, name, arguments).now_or_never().unwrap();
        assert_eq!(call(CALCULATOR, json!({"expression": "6 * 7"})), "42");
        assert!(call(CALCULATOR, json!({"expression": "6 *"})).starts_with("error: "));
        assert_eq!(call(CALCULATOR, json!({})), "error: `expression` must be a text");
        assert_eq!(call("shell", json!({})), "error: there is no such tool");
        assert_eq!(now(OffsetDateTime::UNIX_EPOCH), "1970-01-01T00:00:00Z, Thursday");
    }
}
