//! The HTTP transport to an MCP server: the protocol is `rmcp`'s, the requests are ours. So they only go to the operator's URL, in bounded
//! time, with the operator's authorities and token, and responses are bounded.
//!
//! A server gets no stream of its own (a GET without a preceding request): it would hold a thread indefinitely. A stream that breaks off is
//! resumed.

use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{ACCEPT, CONTENT_TYPE},
};
use bytes::Bytes;
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use rmcp::{
    model::{ClientJsonRpcMessage, ClientRequest, ErrorData, JsonRpcMessage, RequestId, ServerJsonRpcMessage},
    transport::streamable_http_client::{SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse},
};
use sse_stream::{Sse, SseStream};
use std::{
    collections::HashMap,
    io::{self, Read},
    path::PathBuf,
    sync::Arc,
};
use tidemill_tenancy::web::{Answer, Client, read_token};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

const SESSION: &str = "mcp-session-id";
const LAST_EVENT: &str = "last-event-id";
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
/// The maximum size of one answer, with all its events, and with images that are left out later. Longer ones are an error.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// The maximum size of an error answer.
const PROBLEM_BYTES_MAX: u64 = 1 << 10;
const CHUNK_BYTES: usize = 16 << 10;
/// The maximum number of unread chunks of a stream.
const CHUNKS_WAITING: usize = 4;

#[derive(Clone, Debug)]
pub(crate) struct Http(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Client,
    token: Option<PathBuf>,
    /// One permit per thread that waits for this server.
    permits: Arc<Semaphore>,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct HttpError(String);

pub(crate) type Failure = StreamableHttpError<HttpError>;

fn failed(problem: impl ToString) -> Failure {
    StreamableHttpError::Client(HttpError(problem.to_string()))
}

/// An answer's head, and the permit of the thread that reads the rest.
struct Answered {
    answer: Answer,
    permit: OwnedSemaphorePermit,
}

impl Http {
    pub(crate) fn new(client: Client, token: Option<PathBuf>, at_once: usize) -> Self {
        Self(Arc::new(Inner { client, token, permits: Arc::new(Semaphore::new(at_once)) }))
    }

    async fn send(
        &self,
        method: Method,
        session: Option<Arc<str>>,
        headers: HashMap<HeaderName, HeaderValue>,
        body: Option<String>,
    ) -> Result<Answered, Failure> {
        let mut headers: HeaderMap = headers.into_iter().collect();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        if body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(JSON));
        }
        if let Some(session) = session {
            headers.insert(SESSION, HeaderValue::from_str(&session).map_err(failed)?);
        }
        let permit = Arc::clone(&self.0.permits).acquire_owned().await.map_err(failed)?;
        let inner = Arc::clone(&self.0);
        // The thread keeps its permit even after its caller has left.
        blocking(move || {
            let token = inner.token.as_deref().map(read_token).transpose();
            let token = token.map_err(|error| failed(format!("its token cannot be read: {error}")))?;
            let answer = inner.client.send(method, token.as_deref(), headers, body.as_deref().map(str::as_bytes)).map_err(failed)?;
            Ok(Answered { answer, permit })
        })
        .await
    }
}

impl Answered {
    fn is(&self, kind: &str) -> bool {
        let given = self.answer.header(CONTENT_TYPE.as_str()).unwrap_or_default();
        given.split(';').next().is_some_and(|given| given.trim().eq_ignore_ascii_case(kind))
    }

    async fn json(self) -> Result<ServerJsonRpcMessage, Failure> {
        let Self { answer, permit } = self;
        let bytes = blocking(move || {
            let _permit = permit;
            let mut bytes = Vec::new();
            Bounded::new(answer.into_reader()).read_to_end(&mut bytes)?;
            Ok(bytes)
        })
        .await?;
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// The events of a stream, as they come.
    fn events(self) -> BoxStream<'static, Result<Sse, SseError>> {
        let Self { answer, permit } = self;
        let (sender, receiver) = mpsc::channel(CHUNKS_WAITING);
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            pass_on(Bounded::new(answer.into_reader()), &sender);
        });
        let chunks = stream::unfold(receiver, |mut receiver| async { receiver.recv().await.map(|chunk| (chunk, receiver)) });
        SseStream::from_bytes_stream(chunks.boxed()).boxed()
    }

    /// The beginning of an error answer.
    async fn beginning(self) -> String {
        let text = blocking(move || {
            let Self { answer, permit: _permit } = self;
            let mut bytes = Vec::new();
            answer.into_reader().take(PROBLEM_BYTES_MAX).read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
        });
        text.await.unwrap_or_default()
    }

    async fn problem(self) -> Failure {
        let status = self.answer.status();
        failed(format!("it answered with status {status}: {}", self.beginning().await))
    }

    /// The server's own error, if it sent one.
    async fn refusal(self, id: RequestId) -> ServerJsonRpcMessage {
        let text = self.beginning().await;
        let error = match serde_json::from_str(&text) {
            Ok(ServerJsonRpcMessage::Error(error)) => error.error,
            _ => ErrorData::invalid_request(text, None),
        };
        ServerJsonRpcMessage::error(error, Some(id))
    }
}

/// Runs work on a thread other than the event loop's.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await?
}

/// Passes chunks on until the receiver is dropped.
fn pass_on(mut reader: impl Read, sender: &mpsc::Sender<io::Result<Bytes>>) {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let read = match reader.read(&mut chunk) {
            Ok(0) => return,
            Ok(bytes) => Ok(Bytes::copy_from_slice(&chunk[..bytes])),
            Err(error) => Err(error),
        };
        let is_last = read.is_err();
        if sender.blocking_send(read).is_err() || is_last {
            return;
        }
    }
}

/// A reader that fails at the limit, instead of cutting: half a message is useless.
struct Bounded<R> {
    reader: R,
    left: usize,
}

impl<R> Bounded<R> {
    fn new(reader: R) -> Self {
        Self { reader, left: ANSWER_BYTES_MAX }
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.reader.read(buffer)?;
        let too_long = || io::Error::other(format!("its answer has more than {ANSWER_BYTES_MAX} bytes"));
        self.left = self.left.checked_sub(bytes).ok_or_else(too_long)?;
        Ok(bytes)
    }
}

impl StreamableHttpClient for Http {
    type Error = HttpError;

    // The URL and the token are the operator's; `rmcp` does not determine them.
    async fn post_message(
        &self,
        _: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, Failure> {
        let (body, has_session) = (serde_json::to_string(&message)?, session.is_some());
        let answered = self.send(Method::POST, session, headers, Some(body)).await?;
        let JsonRpcMessage::Request(request) = message else {
            return match answered.answer.status() {
                200..300 => Ok(StreamableHttpPostResponse::Accepted),
                _ => Err(answered.problem().await),
            };
        };
        match answered.answer.status() {
            200..300 => {}
            404 if has_session => return Err(StreamableHttpError::SessionExpired),
            401 | 403 => return Err(answered.problem().await),
            // A server that is too old for this question refuses it in one of many ways, and is then asked in the older way.
            400..500 if matches!(request.request, ClientRequest::DiscoverRequest(_)) => {
                return Ok(StreamableHttpPostResponse::Json(answered.refusal(request.id).await, None));
            }
            _ => return Err(answered.problem().await),
        }
        let session = answered.answer.header(SESSION).map(str::to_owned);
        if answered.is(EVENTS) {
            Ok(StreamableHttpPostResponse::Sse(answered.events(), session))
        } else if answered.is(JSON) {
            Ok(StreamableHttpPostResponse::Json(answered.json().await?, session))
        } else {
            Err(StreamableHttpError::UnexpectedContentType(answered.answer.header(CONTENT_TYPE.as_str()).map(str::to_owned)))
        }
    }

    async fn delete_session(
        &self,
        _: Arc<str>,
        session: Arc<str>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), Failure> {
        self.send(Method::DELETE, Some(session), headers, None).await.map(drop)
    }

    async fn get_stream(
        &self,
        _: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        _: Option<String>,
        mut headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Failure> {
        let last_event = last_event.ok_or(StreamableHttpError::ServerDoesNotSupportSse)?;
        headers.insert(HeaderName::from_static(LAST_EVENT), HeaderValue::from_str(&last_event).map_err(failed)?);
        let answered = self.send(Method::GET, session, headers, None).await?;
        match answered.answer.status() {
            200..300 if answered.is(EVENTS) => Ok(answered.events()),
            405 => Err(StreamableHttpError::ServerDoesNotSupportSse),
            _ => Err(answered.problem().await),
        }
    }
}
