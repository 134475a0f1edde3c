//! The settings of tools that run on the server: `[server_tools]`.

use super::bounds::within;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{path::PathBuf, time::Duration};
use tidemill_gateway::{
    features::server_tools::{
        CALCULATOR, CLOCK, Settings,
        endpoint::EndpointSettings,
        mcp::{BETWEEN, McpSettings},
        permission::Permission,
    },
    text::tool::Tool,
};
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::{records::check_name, web::Target};

const ROUNDS: u32 = 8;
const ROUNDS_MAX: u32 = 64;
const TIMEOUT_MS: u64 = 5_000;
const TIMEOUT_MS_MAX: u64 = 120_000;
const TOOLS_MAX: usize = 256;
const SERVERS_MAX: usize = 32;
/// The maximum length of a server's name, which leaves room for a tool's.
const SERVER_NAME_BYTES_MAX: usize = 32;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerToolsFlags {
    /// Built-in tools that are there: `calculator`, `clock` [default: both]
    pub built_in: Option<Vec<String>>,
    /// Hosts that tools may be at, as `host` or `host:port` [default: none]
    pub hosts: Vec<String>,
    /// Most times that the model is asked for one response; the last time without tools [default: 8]
    pub rounds_max: Option<u32>,
    /// HTTP endpoints: `[[server_tools.tool]]` sections, at most 256 [default: none]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool: Vec<ToolFlags>,
    /// MCP servers: `[[server_tools.mcp]]` sections, at most 32 [default: none]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mcp: Vec<McpFlags>,
}

/// An HTTP endpoint, to which arguments are posted as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolFlags {
    /// Name that the model calls
    pub name: String,
    /// Purpose of the tool, as the model reads it
    pub description: String,
    /// Address that arguments are posted to as JSON; its host must be in `hosts`
    pub url: String,
    /// JSON schema of the arguments: an object
    pub parameters: Value,
    /// Whether calls are made to keep to the schema [default: true]
    pub strict: Option<bool>,
    /// Milliseconds of silence after which a call has failed [default: 5000]
    pub timeout_ms: Option<u64>,
    /// File with a token that is sent as `Authorization: Bearer`; read before each request [default: none]
    pub token: Option<PathBuf>,
    /// PEM file with the authorities that the URL's certificate may come from [default: those that browsers trust]
    pub ca: Option<PathBuf>,
    /// Tiers whose tenants may use it [default: with `tenants` none, else all but the one that is shed first]
    pub tiers: Option<Vec<String>>,
    /// Tenants that may use it, of any tier [default: none]
    pub tenants: Option<Vec<String>>,
}

/// An MCP server, over streamable HTTP.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpFlags {
    /// Name of the server: its tools are offered as `NAME__TOOL`
    pub name: String,
    /// Address of the server; its host must be in `hosts`
    pub url: String,
    /// Tools of the server that are offered, by the server's names [default: all]
    pub allowed: Option<Vec<String>>,
    /// Whether calls are made to keep to the tools' schemas [default: false]
    pub strict: Option<bool>,
    /// Milliseconds for a call, and for each step of connecting [default: 5000]
    pub timeout_ms: Option<u64>,
    /// File with a token that is sent as `Authorization: Bearer`; read before each request [default: none]
    pub token: Option<PathBuf>,
    /// PEM file with the authorities that the URL's certificate may come from [default: those that browsers trust]
    pub ca: Option<PathBuf>,
    /// Tiers whose tenants may use it [default: with `tenants` none, else all but the one that is shed first]
    pub tiers: Option<Vec<String>>,
    /// Tenants that may use it, of any tier [default: none]
    pub tenants: Option<Vec<String>>,
}

impl ServerToolsFlags {
    pub(super) fn check(self) -> Result<Settings, ConfigError> {
        let built_in = self.built_in.unwrap_or_else(|| [CALCULATOR, CLOCK].map(str::to_owned).into());
        if let Some(other) = built_in.iter().find(|name| ![CALCULATOR, CLOCK].contains(&name.as_str())) {
            return Err(invalid("server_tools.built_in", other, format!("there are `{CALCULATOR}` and `{CLOCK}`")));
        }
        let rounds_max = within("server_tools.rounds_max", self.rounds_max.unwrap_or(ROUNDS), 2..=ROUNDS_MAX)?;
        if self.tool.len() > TOOLS_MAX {
            return Err(invalid("server_tools.tool", self.tool.len(), format!("there may be {TOOLS_MAX} tools at most")));
        }
        let mut endpoints: Vec<EndpointSettings> = Vec::new();
        for tool in self.tool {
            if built_in.contains(&tool.name) || endpoints.iter().any(|other| other.shown.name == tool.name) {
                return Err(invalid("server_tools.tool.name", &tool.name, "there are two tools of this name"));
            }
            endpoints.push(tool.check(&self.hosts)?);
        }
        if self.mcp.len() > SERVERS_MAX {
            return Err(invalid("server_tools.mcp", self.mcp.len(), format!("there may be {SERVERS_MAX} servers at most")));
        }
        let mut mcp: Vec<McpSettings> = Vec::new();
        for server in self.mcp {
            if mcp.iter().any(|other| other.name == server.name) {
                return Err(invalid("server_tools.mcp.name", &server.name, "there are two servers of this name"));
            }
            let tools = format!("{}{BETWEEN}", server.name);
            let mut names = built_in.iter().chain(endpoints.iter().map(|endpoint| &endpoint.shown.name));
            if let Some(tool) = names.find(|name| **name == server.name || name.starts_with(&tools)) {
                let problem = format!("the tool `{tool}` could be taken for it, or for one of its tools: give one of them another name");
                return Err(invalid("server_tools.mcp.name", &server.name, problem));
            }
            mcp.push(server.check(&self.hosts)?);
        }
        Ok(Settings { built_in, endpoints, mcp, rounds_max })
    }
}

impl ToolFlags {
    fn check(self, hosts: &[String]) -> Result<EndpointSettings, ConfigError> {
        check_name("tool", &self.name).map_err(|problem| invalid("server_tools.tool.name", &self.name, problem))?;
        let target = target("server_tools.tool.url", self.url, self.ca, hosts)?;
        if !self.parameters.is_object() {
            return Err(invalid("server_tools.tool.parameters", &self.parameters, "must be a JSON schema: a table"));
        }
        let timeout = timeout("server_tools.tool.timeout_ms", self.timeout_ms)?;
        let shown = Tool {
            name: self.name,
            description: Some(self.description),
            parameters: Some(self.parameters),
            strict: self.strict.unwrap_or(true),
        };
        let permission = Permission::of(self.tiers, self.tenants);
        Ok(EndpointSettings { shown, target, token: self.token, timeout, permission })
    }
}

impl McpFlags {
    fn check(self, hosts: &[String]) -> Result<McpSettings, ConfigError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let is_name = (1..=SERVER_NAME_BYTES_MAX).contains(&self.name.len()) && self.name.bytes().all(plain);
        if !is_name || self.name.contains(BETWEEN) || self.name.ends_with('_') {
            let problem = format!(
                "must be 1 to {SERVER_NAME_BYTES_MAX} letters, digits, `-` or `_`, without `{BETWEEN}`, and not end in `_`: tools get names \
                 such as `files{BETWEEN}read`"
            );
            return Err(invalid("server_tools.mcp.name", &self.name, problem));
        }
        Ok(McpSettings {
            target: target("server_tools.mcp.url", self.url, self.ca, hosts)?,
            timeout: timeout("server_tools.mcp.timeout_ms", self.timeout_ms)?,
            name: self.name,
            token: self.token,
            allowed: self.allowed,
            strict: self.strict.unwrap_or(false),
            permission: Permission::of(self.tiers, self.tenants),
        })
    }
}

/// Checks that a URL is valid and its host is listed.
fn target(key: &'static str, url: String, ca: Option<PathBuf>, hosts: &[String]) -> Result<Target, ConfigError> {
    let target = Target { url, ca };
    target.check().map_err(|error| invalid(key, &target.url, error.to_string()))?;
    let host = target.host().unwrap_or_default();
    if hosts.iter().any(|listed| *listed == host || host.rsplit_once(':').is_some_and(|(name, _)| listed == name)) {
        return Ok(target);
    }
    let problem = format!("no request goes to a host that is not listed: add `{host}` to server_tools.hosts");
    Err(invalid(key, &target.url, problem))
}

fn timeout(key: &'static str, ms: Option<u64>) -> Result<Duration, ConfigError> {
    within(key, ms.unwrap_or(TIMEOUT_MS), 1..=TIMEOUT_MS_MAX).map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<Settings, String> {
        let flags: ServerToolsFlags = toml::from_str(text).map_err(|error| error.to_string())?;
        flags.check().map_err(|error| error.to_string())
    }

    const TOOL: &str = "[[tool]]\nname = 'weather'\ndescription = 'x'\nurl = 'http://127.0.0.1:9/w'\n[tool.parameters]\ntype = 'object'\n";

    const MCP: &str = "[[mcp]]\nname = 'files'\nurl = 'http://127.0.0.1:9/mcp'\n";

    #[test]
    fn no_request_goes_to_a_host_that_is_not_listed() {
        for hosts in ["", "hosts = ['127.0.0.2']\n", "hosts = ['127.0.0.1:8']\n"] {
            for there in [TOOL, MCP] {
                assert!(checked(&format!("{hosts}{there}")).unwrap_err().contains("not listed"), "{hosts}");
            }
        }
        for hosts in ["hosts = ['127.0.0.1:9']\n", "hosts = ['127.0.0.1']\n"] {
            let settings = checked(&format!("{hosts}{TOOL}{MCP}")).unwrap();
            assert_eq!((settings.mcp[0].name.as_str(), settings.mcp[0].strict), ("files", false));
            assert_eq!((settings.endpoints.len(), settings.built_in.len(), settings.rounds_max), (1, 2, ROUNDS));
            assert!(settings.endpoints[0].shown.strict);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let hosts = "hosts = ['127.0.0.1']\n";
        for (text, words) in [
            ("built_in = ['shell']", "clock"),
            ("rounds_max = 1", "from 2"),
            (&format!("{hosts}{TOOL}{TOOL}"), "two tools"),
            (&format!("{hosts}{}", TOOL.replace("weather", "clock")), "two tools"),
            (&format!("{hosts}{}", TOOL.replace("127.0.0.1:9", "tools.example")), "https"),
            (&format!("{hosts}{}", TOOL.replace("weather", "a b")), "tool"),
            (&format!("{hosts}{MCP}{MCP}"), "two servers"),
            (&format!("{hosts}{}", MCP.replace("files", "clock")), "could be taken"),
            (&format!("{hosts}{}{MCP}", TOOL.replace("weather", "files__read")), "could be taken"),
            (&format!("{hosts}{}", MCP.replace("files", "my__files")), "without `__`"),
            (&format!("{hosts}{}", MCP.replace("files", "files_")), "not end in"),
            (&format!("{hosts}{}", MCP.replace("files", "my.files")), "letters"),
            (&format!("{hosts}{MCP}timeout_ms = 0"), "from 1"),
        ] {
            let error = checked(text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
