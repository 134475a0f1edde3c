//! A streaming client of any OpenAI-compatible endpoint: one POST, then server-sent events parsed into [`Chunk`]s.
//!
//! `http://` only: Tidemill's front door speaks plain HTTP. On the internet, put a TLS proxy in front of it.

use eventsource_stream::Eventsource;
use futures_util::{Stream, StreamExt};
use reqwest::header::{AUTHORIZATION, HeaderValue};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use std::{collections::BTreeMap, time::Duration};
use tokio::time::timeout;

/// One base URL, such as `http://127.0.0.1:8000/v1`, and the connections to it.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    key: Option<HeaderValue>,
}

/// The reason that a request has no answer, or only part of one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("`{0}` is not an http:// URL such as http://127.0.0.1:8000/v1")]
    Url(String),
    #[error("the API key is not one line of ASCII characters")]
    Key,
    #[error("no answer from {base}: {reason}")]
    Unreachable { base: String, reason: String },
    /// The server refused the request, with or without OpenAI's error object.
    #[error("the server refused with status {status}: {message}")]
    Status { status: u16, message: String },
    #[error("the answer broke off: {0}")]
    Broken(String),
    #[error("the server's answer is not what OpenAI's API defines: {0}")]
    Malformed(String),
    #[error("the server gave up on an answer that it had begun: {0}")]
    Failed(String),
}

impl ClientError {
    /// A short name to count errors by.
    pub fn kind(&self) -> String {
        match self {
            ClientError::Url(_) => "url".into(),
            ClientError::Key => "key".into(),
            ClientError::Unreachable { .. } => "unreachable".into(),
            ClientError::Status { status, .. } => format!("http_{status}"),
            ClientError::Broken(_) => "broken_stream".into(),
            ClientError::Malformed(_) => "malformed".into(),
            ClientError::Failed(_) => "failed_midway".into(),
        }
    }
}

/// One event of a stream of `/v1/completions` or `/v1/chat/completions`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    pub text: String,
    /// Whether the event carries at least one token, even if that token completes no character yet.
    pub is_token: bool,
    pub finish_reason: Option<String>,
    /// Token counts, in a separate last event, if the request set `stream_options.include_usage`.
    pub usage: Option<Usage>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: u64,
    #[serde(default)]
    pub completion_tokens: u64,
    pub prompt_tokens_details: Option<PromptTokensDetails>,
    /// The sources of the prompt's KV (Tidemill only).
    pub tidemill: Option<Provenance>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Provenance {
    /// Prompt tokens by source (`hbm`, `dram`, `nvme`, `remote`, `computed`, …).
    #[serde(default)]
    pub tokens: BTreeMap<String, u64>,
}

impl Usage {
    /// The number of prompt tokens that were cached; 0 if the server does not report it.
    pub fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens).unwrap_or(0)
    }
}

impl Client {
    /// A client of the server at `base`, which ends in `/v1`, with or without a slash.
    pub fn new(base: &str) -> Result<Client, ClientError> {
        let base = base.trim_end_matches('/').to_owned();
        if !base.starts_with("http://") || reqwest::Url::parse(&base).is_err() {
            return Err(ClientError::Url(base));
        }
        // No proxy: the bench measures the server itself, and a cluster's addresses are private.
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(usize::MAX)
            .tcp_nodelay(true)
            .no_proxy()
            .build()
            .map_err(|e| ClientError::Url(format!("{base}: {e}")))?;
        Ok(Client { http, base, key: None })
    }

    /// The client, with an API key that it sends with each request.
    pub fn with_key(mut self, key: Option<&str>) -> Result<Client, ClientError> {
        self.key = match key {
            None => None,
            Some(key) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).map_err(|_| ClientError::Key)?;
                // Hides the key when a request is formatted.
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(self)
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    /// Names of the models that the server serves.
    pub async fn models(&self) -> Result<Vec<String>, ClientError> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
        }
        let request = self.http.get(format!("{}/models", self.base)).timeout(MODELS_TIMEOUT);
        let response = self.accepted(request).await?;
        let models: Models = response.json().await.map_err(|e| ClientError::Malformed(in_full(&e)))?;
        Ok(models.data.into_iter().map(|model| model.id).collect())
    }

    /// The state of the cluster, which a Tidemill coordinator shows at `/cluster`, beside `/v1`.
    pub async fn cluster<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        let url = format!("{}/cluster", self.base.trim_end_matches("/v1"));
        let response = self.accepted(self.http.get(url).timeout(MODELS_TIMEOUT)).await?;
        response.json().await.map_err(|e| ClientError::Malformed(in_full(&e)))
    }

    /// Posts `body` (which asks for a stream) to `path`, such as `/completions`. The stream ends after the server's `[DONE]` or with its
    /// first error; dropping it closes the connection, which tells the server to stop. It has no deadline.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<impl Stream<Item = Result<Chunk, ClientError>> + use<>, ClientError> {
        let response = self.accepted(self.http.post(format!("{}{path}", self.base)).json(body)).await?;
        let events = Box::pin(response.bytes_stream().eventsource());
        Ok(futures_util::stream::unfold(Some(events), |events| async move {
            let mut events = events?;
            let chunk = match events.next().await {
                None => Err(ClientError::Broken("the connection was closed before `[DONE]`".into())),
                Some(Err(e)) => Err(ClientError::Broken(in_full(&e))),
                Some(Ok(event)) if event.data.trim() == "[DONE]" => return None,
                Some(Ok(event)) => parse_chunk(&event.data),
            };
            let rest = chunk.is_ok().then_some(events);
            Some((chunk, rest))
        }))
    }

    async fn accepted(&self, mut request: reqwest::RequestBuilder) -> Result<reqwest::Response, ClientError> {
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key.clone());
        }
        let unreachable = |e: reqwest::Error| ClientError::Unreachable { base: self.base.clone(), reason: in_full(&e.without_url()) };
        let mut response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        // Refusals are short: of a longer body, the rest is not read.
        let mut body = Vec::new();
        while let Ok(Ok(Some(bytes))) = timeout(REFUSAL_TIMEOUT, response.chunk()).await {
            body.extend_from_slice(&bytes);
            if body.len() > REFUSAL_BYTES_MAX {
                break;
            }
        }
        Err(ClientError::Status { status: status.as_u16(), message: error_message(&String::from_utf8_lossy(&body)) })
    }
}

/// Parses one event's data. Servers send an error object in place of a chunk when an answer fails midway.
fn parse_chunk(data: &str) -> Result<Chunk, ClientError> {
    #[derive(Deserialize)]
    struct Wire {
        #[serde(default)]
        choices: Vec<Choice>,
        usage: Option<Usage>,
        error: Option<Value>,
    }
    #[derive(Deserialize)]
    struct Choice {
        text: Option<String>,
        delta: Option<Delta>,
        finish_reason: Option<String>,
    }
    #[derive(Deserialize)]
    struct Delta {
        role: Option<String>,
        content: Option<String>,
    }
    let wire: Wire = serde_json::from_str(data).map_err(|e| ClientError::Malformed(format!("{e} in {}", excerpt(data))))?;
    if wire.error.is_some() {
        return Err(ClientError::Failed(error_message(data)));
    }
    let mut chunk = Chunk { usage: wire.usage, ..Chunk::default() };
    for choice in wire.choices {
        let announces_role = choice.delta.as_ref().is_some_and(|delta| delta.role.is_some());
        let text = choice.text.or(choice.delta.and_then(|delta| delta.content)).unwrap_or_default();
        // A token may have no text (half a character). The role and a bare finish are not tokens.
        chunk.is_token |= !text.is_empty() || (!announces_role && choice.finish_reason.is_none());
        chunk.text.push_str(&text);
        chunk.finish_reason = choice.finish_reason.or(chunk.finish_reason);
    }
    Ok(chunk)
}

/// The message of OpenAI's error object, or the start of any other body.
fn error_message(body: &str) -> String {
    let value: Value = serde_json::from_str(body).unwrap_or(Value::Null);
    match value["error"]["message"].as_str().or(value["message"].as_str()).or(value["error"].as_str()) {
        Some(message) => message.to_owned(),
        None => excerpt(body),
    }
}

fn excerpt(text: &str) -> String {
    text.chars().take(EXCERPT_CHARS).collect()
}

/// An error with its causes, which reqwest's own `Display` leaves out.
fn in_full(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(5);
const REFUSAL_BYTES_MAX: usize = 64 << 10;
const EXCERPT_CHARS: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_endpoints_chunks_are_read() {
        let chunk = parse_chunk(r#"{"choices":[{"index":0,"text":" tide","finish_reason":null}]}"#).unwrap();
        assert_eq!((chunk.text.as_str(), chunk.is_token, chunk.finish_reason), (" tide", true, None));
        let chunk = parse_chunk(r#"{"choices":[{"index":0,"delta":{"content":"mill"},"finish_reason":"stop"}]}"#).unwrap();
        assert_eq!((chunk.text.as_str(), chunk.is_token, chunk.finish_reason.as_deref()), ("mill", true, Some("stop")));
    }

    #[test]
    fn role_finish_and_usage_are_no_tokens_but_half_a_character_is() {
        let role = r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
        let finish = r#"{"choices":[{"delta":{},"finish_reason":"length"}],"usage":null}"#;
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":33,"completion_tokens":2,"total_tokens":35,
            "prompt_tokens_details":{"cached_tokens":32},"tidemill":{"tokens":{"dram":32,"computed":1},"queue_ms":0.5}}}"#;
        for data in [role, finish, usage] {
            assert!(!parse_chunk(data).unwrap().is_token, "{data}");
        }
        assert!(parse_chunk(r#"{"choices":[{"text":"","finish_reason":null}]}"#).unwrap().is_token);
        let usage = parse_chunk(usage).unwrap().usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (33, 2, 32));
        assert_eq!(usage.tidemill.unwrap().tokens["dram"], 32);
    }

    #[test]
    fn errors_say_what_the_server_said() {
        assert_eq!(error_message(r#"{"error":{"message":"no such model","type":"x"}}"#), "no such model");
        assert_eq!(error_message("Bad Gateway"), "Bad Gateway");
        let failed = parse_chunk(r#"{"error":{"message":"no worker is left"}}"#).unwrap_err();
        assert_eq!((failed.kind().as_str(), failed.to_string().contains("no worker is left")), ("failed_midway", true));
        assert_eq!(parse_chunk("{").unwrap_err().kind(), "malformed");
    }

    #[test]
    fn only_http_urls_are_taken() {
        for wrong in ["", "127.0.0.1:8000", "https://example.org/v1", "http://"] {
            assert!(matches!(Client::new(wrong), Err(ClientError::Url(_))), "{wrong}");
        }
        assert_eq!(Client::new("http://127.0.0.1:8000/v1/").unwrap().base(), "http://127.0.0.1:8000/v1");
    }
}
