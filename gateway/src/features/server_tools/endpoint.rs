//! An operator's endpoint as a tool: arguments are posted as JSON, and the response is text for the model.

use super::permission::Permission;
use crate::text::tool::Tool;
use serde_json::Value;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tidemill_tenancy::web::{Client, Target, TargetError, read_token};
use tokio::sync::Semaphore;

/// The maximum size of a response. Longer ones are cut.
const ANSWER_BYTES_MAX: u64 = 64 << 10;
/// The maximum number of concurrent calls to one endpoint.
const AT_ONCE: usize = 32;
/// The extra time of a call's thread after the call is given up. The connection's deadline is later than the call's by this much, so that
/// the model is always told of the call's deadline.
pub(super) const THREAD_LEFT: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct EndpointSettings {
    /// The tool's name, description and parameters.
    pub shown: Tool,
    pub target: Target,
    /// File with a token that is sent as `Authorization: Bearer`; read before each request.
    pub token: Option<PathBuf>,
    /// The time limit of a call, including the wait for its turn.
    pub timeout: Duration,
    pub permission: Permission,
}

#[derive(Debug)]
pub struct Endpoint {
    client: Client,
    token: Option<PathBuf>,
    timeout: Duration,
    permits: Arc<Semaphore>,
}

impl Endpoint {
    pub fn new(settings: EndpointSettings) -> Result<Self, TargetError> {
        Ok(Self {
            client: settings.target.client_without_redirects(settings.timeout + THREAD_LEFT)?,
            token: settings.token,
            timeout: settings.timeout,
            permits: Arc::new(Semaphore::new(AT_ONCE)),
        })
    }

    /// Calls the endpoint. Returns the response, or a description of the error.
    pub async fn call(self: Arc<Self>, arguments: Value) -> Result<String, String> {
        let timeout = self.timeout;
        let called = async {
            let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|error| error.to_string())?;
            let endpoint = Arc::clone(&self);
            // The thread keeps its permit even after its caller has left.
            let posted = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                endpoint.post(&arguments)
            });
            posted.await.unwrap_or_else(|_| Err("the call broke".into()))
        };
        tokio::time::timeout(timeout, called).await.unwrap_or_else(|_| Err(format!("no answer within {timeout:?}")))
    }

    fn post(&self, arguments: &Value) -> Result<String, String> {
        let token = self.token.as_deref().map(read_token).transpose().map_err(|error| format!("its token cannot be read: {error}"))?;
        let (status, text) = self.client.post_json(token.as_deref(), &arguments.to_string(), ANSWER_BYTES_MAX)?;
        if (200..300).contains(&status) { Ok(text) } else { Err(format!("it answered with status {status}: {text}")) }
    }
}
