//! An MCP server's tools, over streamable HTTP: each is offered as `SERVER__TOOL`.
//!
//! The protocol is handled by the official client, `rmcp`, with its versions, sessions and streams. The requests are our own (`http.rs`),
//! with the rules of an operator's endpoint: the host is listed, no redirect is followed, time and bytes are bounded.
//!
//! A server is contacted when this process starts, and repeatedly after that: one that is down does not hold up the start, and its tools
//! are there once it answers. Its last known tools are still offered while it does not answer; calls then return an error.

mod http;
mod sessions;

use super::{endpoint::THREAD_LEFT, permission::Permission};
use crate::{features::metrics, text::tool::Tool};
use http::{Failure, Http};
use parking_lot::RwLock;
use rmcp::{
    ClientHandler, ClientLifecycleMode, ClientServiceExt, Peer, RoleClient, ServiceError,
    model::{
        CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, ContentBlock, Implementation, PaginatedRequestParams,
        ProtocolVersion, ResourceContents,
    },
    service::{ClientInitializeError, NotificationContext, RunningService},
    transport::{
        DynamicTransportError,
        streamable_http_client::{StreamableHttpClientTransport, StreamableHttpClientTransportConfig, StreamableHttpError},
    },
};
use serde_json::Value;
use sessions::Sessions;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_tenancy::web::{Target, TargetError};
use tokio::{
    sync::{Notify, watch},
    time::{sleep, timeout},
};

/// The separator between a server's name and a tool's. No server's name contains it.
pub const BETWEEN: &str = "__";
/// The maximum length of a tool's name, as for OpenAI's function names.
const NAME_BYTES_MAX: usize = 64;
/// The maximum number of tools of one server. Further ones are not offered.
const TOOLS_MAX: usize = 256;
/// The maximum number of pages in one list of tools.
const PAGES_MAX: usize = 16;
/// The maximum size of a call's output, as the model sees it. More is cut.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// The maximum number of concurrent requests to one server.
const AT_ONCE: usize = 32;
/// The time between two listings of a server's tools, if it does not report changes.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// The least time between two listings.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// The pause after a failure, doubled each time up to `LOOK_EVERY`.
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// The number of consecutive failures after which the connection is reopened.
const FAILURES_MAX: u32 = 2;
/// The time limit for telling a server that its session has ended.
const GOODBYE_MAX: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct McpSettings {
    pub name: String,
    pub target: Target,
    /// File with a token that is sent as `Authorization: Bearer`; read before each request.
    pub token: Option<PathBuf>,
    /// The time limit of a call, and of each step of discovery.
    pub timeout: Duration,
    /// The tools that are offered, by the server's names; `None` for all.
    pub allowed: Option<Vec<String>>,
    /// Whether calls must follow the tools' schemas.
    pub strict: bool,
    pub permission: Permission,
}

#[derive(Debug)]
pub struct McpServer {
    name: String,
    url: String,
    timeout: Duration,
    allowed: Option<Vec<String>>,
    strict: bool,
    permission: Permission,
    http: Http,
    /// The connected server; `None` before it has answered.
    known: RwLock<Option<Arc<Known>>>,
    /// The connections by which tenants' calls go.
    sessions: Sessions<Connection>,
    /// Notified when there is a reason to list the tools now.
    look: Arc<Notify>,
}

/// The state of a connected server.
#[derive(Debug)]
struct Known {
    peer: Peer<RoleClient>,
    tools: Tools,
}

/// The tools, by the names under which they are offered.
type Tools = BTreeMap<String, McpTool>;

#[derive(Clone, Debug, PartialEq)]
struct McpTool {
    shown: Tool,
    /// The server's own name for the tool.
    name: String,
}

/// The receiver of a server's notifications.
#[derive(Debug)]
struct Listener {
    look: Arc<Notify>,
}

impl ClientHandler for Listener {
    fn get_info(&self) -> ClientConfig {
        // No capabilities: a server cannot send requests to our models or users.
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("tidemill", env!("CARGO_PKG_VERSION")))
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.look.notify_one();
    }
}

type Connection = RunningService<RoleClient, Listener>;

impl McpServer {
    /// The callers that may use its tools.
    pub fn permission(&self) -> &Permission {
        &self.permission
    }

    pub fn new(settings: McpSettings) -> Result<Self, TargetError> {
        let client = settings.target.client_without_redirects(settings.timeout + THREAD_LEFT)?;
        Ok(Self {
            name: settings.name,
            url: settings.target.url,
            timeout: settings.timeout,
            allowed: settings.allowed,
            permission: settings.permission,
            strict: settings.strict,
            http: Http::new(client, settings.token, AT_ONCE),
            known: RwLock::new(None),
            sessions: Sessions::default(),
            look: Arc::default(),
        })
    }

    /// The tools as the model sees them; `None` before the server has answered.
    pub fn tools(&self) -> Option<Vec<Tool>> {
        self.known().map(|known| known.tools.values().map(|tool| tool.shown.clone()).collect())
    }

    fn known(&self) -> Option<Arc<Known>> {
        self.known.read().clone()
    }

    /// Calls a tool by the name under which it is offered, in the tenant's own session: a server may remember things by session, and each
    /// tenant finds only its own. Returns its output, or a description of the error.
    pub async fn call(self: Arc<Self>, tenant: Option<String>, tool: String, arguments: Value) -> Result<String, String> {
        let known = self.known().ok_or("its server has not answered yet")?;
        let tool = known.tools.get(&tool).ok_or("its server does not have it any more")?;
        let Value::Object(arguments) = arguments else { return Err("the arguments must be an object".into()) };
        let params = CallToolRequestParams::new(tool.name.clone()).with_arguments(arguments);
        let called = async {
            let peer = match tenant {
                Some(tenant) => self.session(tenant).await?,
                None => known.peer.clone(),
            };
            let called = peer.call_tool(params).await;
            if called.is_err() && peer.is_transport_closed() {
                self.look.notify_one();
            }
            told(called.map_err(|error| of_service(&error))?)
        };
        timeout(self.timeout, called).await.unwrap_or_else(|_| Err(format!("no answer within {:?}", self.timeout)))
    }

    async fn session(&self, tenant: String) -> Result<Peer<RoleClient>, String> {
        let session = self.sessions.of(tenant, Instant::now());
        // The first calls of a tenant wait for one handshake.
        let mut connection = session.lock().await;
        let connection = match &mut *connection {
            Some(connection) if !connection.is_transport_closed() => connection,
            none => none.insert(self.connect().await?),
        };
        Ok(connection.peer().clone())
    }

    /// Keeps a connection and the list of tools, until `ended`.
    pub async fn tend(&self, mut ended: watch::Receiver<bool>) {
        let (mut connection, mut failures) = (None, 0);
        loop {
            let looked = tokio::select! {
                looked = self.look_at(&mut connection) => looked,
                _ = ended.wait_for(|ended| *ended) => break,
            };
            metrics::show_mcp_server(&self.name, looked.is_ok());
            self.sessions.expire(Instant::now());
            match looked {
                Ok(known) => {
                    failures = 0;
                    self.learn(known);
                }
                Err(problem) => {
                    failures += 1;
                    tracing::warn!(server = self.name, problem, failures, "could not list the tools of an MCP server");
                    if failures >= FAILURES_MAX {
                        connection = None;
                    }
                }
            }
            let woken = async {
                sleep(LOOK_PAUSE).await;
                self.look.notified().await;
            };
            tokio::select! {
                () = sleep(pause(failures)) => {}
                () = woken => {}
                _ = ended.wait_for(|ended| *ended) => break,
            }
        }
        if let Some(mut connection) = connection {
            // Ends its session.
            let _ = connection.close_with_timeout(GOODBYE_MAX).await;
        }
    }

    async fn look_at(&self, connection: &mut Option<Connection>) -> Result<Known, String> {
        let late = |_| format!("no answer within {:?}", self.timeout);
        let connection = match connection {
            Some(connection) if !connection.is_transport_closed() => connection,
            _ => connection.insert(timeout(self.timeout, self.connect()).await.map_err(late)??),
        };
        let tools = timeout(self.timeout, self.listed(connection)).await.map_err(late)??;
        Ok(Known { peer: connection.peer().clone(), tools })
    }

    async fn connect(&self) -> Result<Connection, String> {
        let config = StreamableHttpClientTransportConfig::with_uri(self.url.as_str()).max_concurrent_requests(AT_ONCE);
        let transport = StreamableHttpClientTransport::with_client(self.http.clone(), config);
        // The latest version; a server that does not know its handshake is asked in the way of the older versions.
        let lifecycle = ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::LATEST],
            legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
        };
        let listener = Listener { look: Arc::clone(&self.look) };
        let connection = listener.serve_with_lifecycle(transport, lifecycle).await.map_err(|error| of_beginning(&error))?;
        match connection.peer_info().map(|info| info.protocol_version.clone()) {
            Some(version) if !ProtocolVersion::KNOWN_VERSIONS.contains(&version) => {
                Err(format!("it speaks version `{version}` of MCP, which is not known here"))
            }
            _ => Ok(connection),
        }
    }

    async fn listed(&self, peer: &Peer<RoleClient>) -> Result<Tools, String> {
        let (mut listed, mut cursor) = (Vec::new(), None);
        for _ in 0..PAGES_MAX {
            let page = peer.list_tools(Some(PaginatedRequestParams::default().with_cursor(cursor))).await.map_err(|e| of_service(&e))?;
            listed.extend(page.tools.into_iter().map(|tool| McpTool {
                shown: Tool {
                    name: format!("{}{BETWEEN}{}", self.name, plain(&tool.name)),
                    description: tool.description.map(Into::into),
                    parameters: Some(Value::Object((*tool.input_schema).clone())),
                    strict: self.strict,
                },
                name: tool.name.into(),
            }));
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        Ok(self.offered(listed))
    }

    /// Selects the tools that the operator allows and whose names are distinct.
    fn offered(&self, listed: Vec<McpTool>) -> Tools {
        let is_allowed = |tool: &McpTool| self.allowed.as_ref().is_none_or(|allowed| allowed.contains(&tool.name));
        let mut tools = Tools::new();
        for tool in listed.into_iter().filter(is_allowed) {
            let name = &tool.shown.name;
            if name.len() > NAME_BYTES_MAX || tools.contains_key(name) || tools.len() == TOOLS_MAX {
                tracing::warn!(
                    server = self.name,
                    tool = tool.name,
                    "tool not offered: its name is too long or not unique, or the server has too many"
                );
                continue;
            }
            tools.insert(name.clone(), tool);
        }
        tools
    }

    fn learn(&self, known: Known) {
        let mut known_before = self.known.write();
        if known_before.as_ref().is_none_or(|before| before.tools != known.tools) {
            let names: Vec<_> = known.tools.keys().map(String::as_str).collect();
            tracing::info!(server = self.name, tools = names.join(" "), "tools of an MCP server");
        }
        *known_before = Some(Arc::new(known));
    }
}

/// The time before a server is asked again.
fn pause(failures: u32) -> Duration {
    match failures.checked_sub(1) {
        None => LOOK_EVERY,
        Some(doubled) => RETRY_FIRST.saturating_mul(2_u32.saturating_pow(doubled)).min(LOOK_EVERY),
    }
}

/// Replaces characters that function names may not have.
fn plain(name: &str) -> String {
    name.chars().map(|letter| if letter.is_ascii_alphanumeric() || "-_".contains(letter) { letter } else { '_' }).collect()
}

/// Writes a call's result for the model: its output, or the error that the tool reports.
fn told(result: CallToolResult) -> Result<String, String> {
    let mut parts: Vec<String> = result.content.into_iter().map(part).collect();
    if parts.is_empty() {
        parts.extend(result.structured_content.map(|value| value.to_string()));
    }
    let mut text = parts.join("\n");
    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
    if result.is_error == Some(true) { Err(text) } else { Ok(text) }
}

fn part(content: ContentBlock) -> String {
    let left_out = |what: &str, kind: Option<&str>| format!("[{what} was left out: {}]", kind.unwrap_or("of no known type"));
    match content {
        ContentBlock::Text(text) => text.text,
        ContentBlock::Image(image) => left_out("an image", Some(&image.mime_type)),
        ContentBlock::Audio(audio) => left_out("audio", Some(&audio.mime_type)),
        ContentBlock::Resource(embedded) => match embedded.resource {
            ResourceContents::TextResourceContents { text, .. } => text,
            ResourceContents::BlobResourceContents { mime_type, .. } => left_out("a file", mime_type.as_deref()),
            _ => left_out("a file", None),
        },
        ContentBlock::ResourceLink(link) => format!("[{}: {}]", link.name, link.uri),
        _ => left_out("something", None),
    }
}

fn of_service(error: &ServiceError) -> String {
    match error {
        ServiceError::McpError(error) => error.message.to_string(),
        ServiceError::TransportSend(error) => of_transport(error),
        ServiceError::TransportClosed => "the connection to its server is lost".into(),
        other => other.to_string(),
    }
}

fn of_beginning(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::TransportError { error, .. } => of_transport(error),
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => of_beginning(fallback),
        ClientInitializeError::JsonRpcError(error) => error.message.to_string(),
        other => other.to_string(),
    }
}

/// Returns the error without the layers around it.
fn of_transport(error: &DynamicTransportError) -> String {
    match error.error.downcast_ref::<Failure>() {
        Some(StreamableHttpError::Client(error)) => error.to_string(),
        Some(error) => error.to_string(),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
