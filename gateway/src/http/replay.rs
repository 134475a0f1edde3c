//! Requests with an `Idempotency-Key`: a repeat joins the answer in progress, or finds the finished one, instead of computing it twice; and
//! a stream that broke off resumes after its `Last-Event-ID`. A layer around the generating endpoints: their answers are recorded as they
//! leave them ([`crate::serving::replays`]), and every client, including the first, listens to the recording.
//!
//! A request without a key passes unchanged.

use crate::{
    base::json,
    cache::replay::{Digest, Lookup},
    http::{
        messages::error::MessagesError,
        parameters::{Path, Query},
    },
    metrics,
    requests::error::ApiError,
    serving::{
        gateway::Gateway,
        replays::{Listener, digest, tenant_digest},
    },
    tenants::Caller,
};
use axum::{
    Extension,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, Uri, header::AUTHORIZATION},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

pub(super) const KEY: &str = "idempotency-key";
const LAST_EVENT_ID: &str = "last-event-id";
/// The header with the outcome of a request that has a key.
const STATUS: &str = "x-idempotency";
/// The maximum length of a key, as in Stripe's API.
const KEY_BYTES_MAX: usize = 255;

/// Layer around the generating endpoints.
pub async fn layer(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let messages = path.starts_with("/v1/messages");
    let answered = match *request.method() {
        Method::POST if request.headers().contains_key(KEY) => repeated(&gateway, request, next).await,
        Method::POST if request.headers().contains_key(LAST_EVENT_ID) => {
            let message = "`Last-Event-ID` needs the `Idempotency-Key` of the request whose stream is to go on";
            Err(ApiError::malformed(message))
        }
        Method::GET if wants_stream(request.uri()) => {
            let id = path.rsplit('/').next().unwrap_or_default().to_owned();
            let scope = scope(caller(&request).as_deref(), request.headers());
            listen_by_id(&gateway, &scope, request.headers(), request.uri(), &id).await
        }
        _ => return next.run(request).await,
    };
    answered.unwrap_or_else(|error| {
        metrics::count_request(error.outcome());
        if messages { MessagesError::from(error).into_response() } else { error.into_response() }
    })
}

/// `GET /v1/chat/completions/{id}` and the like: a recorded answer, by its id.
pub async fn by_id(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Arc<Caller>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, ApiError> {
    listen_by_id(&gateway, &scope(Some(&caller), &headers), &headers, &uri, &id).await
}

async fn repeated(gateway: &Arc<Gateway>, request: Request, next: Next) -> Result<Response, ApiError> {
    let caller = caller(&request);
    let (parts, body) = request.into_parts();
    let scope = scope(caller.as_deref(), &parts.headers);
    let name = key_of(&parts.headers)?;
    let tenant = tenant_digest(caller.as_deref().and_then(Caller::tenant));
    let key = digest(&[&scope, parts.uri.path().as_bytes(), name.as_bytes()]);
    let replays = gateway.replays();
    // Without quota, only a repeat is worth reading.
    if let Some(caller) = caller.as_ref().filter(|_| !replays.repeats(&key)) {
        gateway.tenants().peek(caller)?;
    }
    let sender = caller.map_or_else(|| Arc::clone(gateway), |caller| gateway.for_caller(caller));
    let body = sender.read(body).await?;
    let goes_on = parts.headers.contains_key(LAST_EVENT_ID);
    let looked_at = sender.compute_body(body.weight(), move || {
        let (said, same) = (digest(&[&body]), goes_on && comes_out_the_same(&body));
        Ok((body, said, same))
    });
    let (body, said, comes_out_the_same) = looked_at.await?;
    let stream = Stream::of(&key, &said);
    let after = parts.headers.get(LAST_EVENT_ID).map(|id| stream.after(id)).transpose()?;
    // A stream that is not recorded here can resume only if the same answer can be computed again.
    if after.is_some() && !replays.has(&key) && !(comes_out_the_same && gateway.routes_repeatably()) {
        return Err(ApiError::not_resumable(
            "the events of this stream are not kept here any more, and the request is neither greedy nor seeded (with one choice), so that \
             computing it again would not continue it: repeat it without `Last-Event-ID`",
        ));
    }
    let (asked, signal) = replays.ask(tenant, key, said, after);
    let mut request = Request::from_parts(parts, Body::from(body.into_bytes()));
    let (seat, status) = match asked {
        Lookup::OtherBody => {
            return Err(ApiError::other_body(format!(
                "the `Idempotency-Key` `{name}` was used with another body: a new request needs a new key"
            )));
        }
        Lookup::NoRoom if after.is_some() => return Err(ApiError::no_room_to_replay()),
        Lookup::NoRoom => {
            metrics::count_replay("not-kept");
            let mut response = next.run(request).await;
            response.headers_mut().insert(STATUS, HeaderValue::from_static("not-kept"));
            return Ok(response);
        }
        Lookup::Begun(seat) => {
            request.headers_mut().remove(LAST_EVENT_ID);
            replays.record(seat.recording, &signal, stream.name, scope, request, next);
            (seat, if after.is_some() { "recomputed" } else { "started" })
        }
        Lookup::Joined { seat, ended, .. } => (
            seat,
            match (after, ended) {
                (Some(_), _) => "resumed",
                (None, true) => "replayed",
                (None, false) => "joined",
            },
        ),
    };
    metrics::count_replay(status);
    Ok(told(Listener::new(replays, seat, signal).respond().await, status))
}

async fn listen_by_id(gateway: &Gateway, scope: &Digest, headers: &HeaderMap, uri: &Uri, id: &str) -> Result<Response, ApiError> {
    let Query(query) = Query::<StreamQuery>::of(uri)?;
    let after = match (query.starting_after, headers.get(LAST_EVENT_ID)) {
        (Some(after), _) => Some(after),
        (None, Some(id)) => Some(number_of(id)?),
        (None, None) => None,
    };
    let replays = gateway.replays();
    let found = replays.find(&digest(&[scope, id.as_bytes()]), after);
    let Some((seat, signal)) = found else {
        let message = format!("the stream of `{id}` is not kept: streams are, for a while, when their requests have an `Idempotency-Key`");
        return Err(ApiError::not_found("id", message));
    };
    let status = if after.is_some() { "resumed" } else { "replayed" };
    metrics::count_replay(status);
    Ok(told(Listener::new(replays, seat, signal).respond().await, status))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamQuery {
    stream: bool,
    starting_after: Option<u64>,
}

fn wants_stream(uri: &Uri) -> bool {
    // An unreadable query is refused where it is used.
    uri.query().is_some_and(|query| query.contains("stream=")) && Query::<StreamQuery>::of(uri).map_or(true, |Query(query)| query.stream)
}

fn told(mut response: Response, status: &'static str) -> Response {
    response.headers_mut().insert(STATUS, HeaderValue::from_static(status));
    response
}

fn key_of(headers: &HeaderMap) -> Result<String, ApiError> {
    let key = headers.get(KEY).and_then(|key| key.to_str().ok()).unwrap_or_default();
    if key.is_empty() || key.len() > KEY_BYTES_MAX {
        return Err(ApiError::malformed(format!("`Idempotency-Key` must have 1 to {KEY_BYTES_MAX} ASCII characters")));
    }
    Ok(key.to_owned())
}

/// The scope of recordings: only requests of one owner share one. While no key is needed, those with the same credentials.
fn scope(caller: Option<&Caller>, headers: &HeaderMap) -> Digest {
    if let Some(caller) = caller.filter(|caller| caller.tenant().is_some()) {
        return digest(&[b"owner", caller.owner().0.as_bytes()]);
    }
    let credential = |name: &str| headers.get(name).map_or(&[][..], HeaderValue::as_bytes);
    digest(&[credential(AUTHORIZATION.as_str()), credential("x-api-key")])
}

fn caller(request: &Request) -> Option<Arc<Caller>> {
    request.extensions().get().cloned()
}

/// The prefix of the ids of a stream's events: the same at every coordinator, since it is derived from the request.
struct Stream {
    name: String,
}

impl Stream {
    fn of(key: &Digest, body: &Digest) -> Self {
        Self { name: blake3::Hash::from(digest(&[key, body])).to_hex()[..16].to_owned() }
    }

    /// The number of an event of this stream.
    fn after(&self, id: &HeaderValue) -> Result<u64, ApiError> {
        let ours = id.to_str().ok().and_then(|id| id.rsplit_once(':')).is_some_and(|(name, _)| name == self.name);
        if ours { number_of(id) } else { Err(ApiError::malformed("`Last-Event-ID` is not the id of an event of this request's stream")) }
    }
}

fn number_of(id: &HeaderValue) -> Result<u64, ApiError> {
    let number = id.to_str().ok().and_then(|id| id.rsplit_once(':')).and_then(|(_, number)| number.parse().ok());
    number.ok_or_else(|| ApiError::malformed("`Last-Event-ID` is not an event's id as its stream said it: NAME:NUMBER"))
}

/// Whether a request is deterministic, including its events' numbers: the order of several choices may differ.
fn comes_out_the_same(body: &[u8]) -> bool {
    let Ok(body) = json::from_slice::<Value>(body) else { return false };
    let greedy = body["temperature"].as_f64() == Some(0.0);
    let one_choice = body["n"].as_u64().is_none_or(|n| n == 1);
    let one_prompt = body["prompt"].as_array().is_none_or(|prompts| prompts.len() == 1 || prompts.iter().all(Value::is_u64));
    (greedy || (body["seed"].is_i64() || body["seed"].is_u64())) && one_choice && one_prompt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_out_the_same() {
        for (body, same) in [
            (r#"{"temperature": 0}"#, true),
            (r#"{"seed": 7}"#, true),
            (r#"{"temperature": 0.0, "n": 1, "prompt": [1, 2, 3]}"#, true),
            (r#"{"temperature": 0, "prompt": "text"}"#, true),
            (r#"{"temperature": 0, "n": 2}"#, false),
            (r#"{"temperature": 0, "prompt": ["a", "b"]}"#, false),
            (r#"{"temperature": 1}"#, false),
            (r#"{"seed": null}"#, false),
            ("{}", false),
            ("[", false),
        ] {
            assert_eq!(comes_out_the_same(body.as_bytes()), same, "{body}");
        }
    }

    #[test]
    fn an_event_belongs_to_its_stream() {
        let stream = Stream::of(&[1; 32], &[2; 32]);
        let after = |id: &str| stream.after(&HeaderValue::from_str(id).unwrap()).ok();
        assert_eq!(after(&format!("{}:12", stream.name)), Some(12));
        for other in ["12", "x:12", &format!("{}:x", stream.name), &format!("{}:-1", stream.name)] {
            assert_eq!(after(other), None, "{other}");
        }
    }
}
