//! Authentication: the sender of a request, and whether it is admitted. A layer around all client routes: no handler runs without it, since
//! handlers get their gateway from [`Client`], which only this layer can provide.

use super::server::Peer;
use crate::{
    base::shares::Party,
    http::messages::error::MessagesError,
    metrics,
    requests::error::ApiError,
    rollout::routed::Routed,
    serving::gateway::Gateway,
    tenants::Caller,
    traces::{Trace, names},
};
use axum::{
    extract::{FromRequestParts, MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{fmt::Display, net::IpAddr, sync::Arc, time::Duration};
use tidemill_tenancy::quota::Level;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const TRACEPARENT: &str = "traceparent";
/// The part of a request's path that its trace keeps, so that a queue of traces is also bounded in bytes.
const PATH_CHARS_MAX: usize = 256;

/// The gateway, bound to the sender of the request.
#[derive(Debug)]
pub struct Client(pub Arc<Gateway>);

impl FromRequestParts<Arc<Gateway>> for Client {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        let caller = parts.extensions.get::<Arc<Caller>>();
        let caller = caller.ok_or_else(|| ApiError::internal("the sender was not authenticated: please report this as a bug"))?;
        Ok(Self(gateway.for_caller(Arc::clone(caller))))
    }
}

/// Layer around all client routes: authenticates the sender, and adds the request's id and the rest of the sender's quota to the response.
pub async fn authenticate(State(gateway): State<Arc<Gateway>>, mut request: Request, next: Next) -> Response {
    let messages = speaks_anthropic(&request);
    let trace = begin_trace(&gateway, &request);
    let relayed = gateway.regions().and_then(|regions| regions.relayed_sender(request.uri().path(), request.headers()));
    let identified = match relayed {
        Some(sender) => sender.and_then(|principal| gateway.tenants().identify_relayed(principal)),
        None => {
            let credential = credential(request.headers()).map(str::to_owned);
            gateway.tenants().identify(address(&request), credential.as_deref()).await
        }
    };
    let caller = match identified {
        Ok(principal) => {
            let caller = Caller::new(principal).from_region(region(&gateway, request.headers())).in_trace(trace.clone());
            let caller = caller.at_address(address(&request));
            trace.iter().for_each(|trace| name_sender(trace, &caller));
            Arc::new(caller)
        }
        Err(error) => {
            metrics::count_request(error.outcome());
            return traced(trace.as_deref(), refusal(error, messages));
        }
    };
    if caller.principal.is_some() {
        // Handlers have no use for them.
        [header::AUTHORIZATION, API_KEY].into_iter().for_each(|name| drop(request.headers_mut().remove(name)));
    }
    let _place = match gateway.admit_request(&caller) {
        Ok(place) => place,
        Err(error) => return traced(trace.as_deref(), refusal(error, messages)),
    };
    request.extensions_mut().insert(Arc::clone(&caller));
    let mut response = next.run(request).await;
    tell(response.headers_mut(), &caller);
    traced(trace.as_deref(), response)
}

/// Starts a request's trace, if traces are recorded.
fn begin_trace(gateway: &Gateway, request: &Request) -> Option<Arc<Trace>> {
    let traces = gateway.traces()?;
    let (method, headers) = (request.method(), request.headers());
    // Ids in a path would make every trace's name different.
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let traceparent = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
    let trace = traces.begin(format!("{method} {route}"), traceparent);
    // Until its sender is known, and if it never is.
    address(request).into_iter().for_each(|address| trace.belongs_to(Party::of_address(address)));
    trace.set(names::METHOD, method.as_str());
    let path: String = request.uri().path().chars().take(PATH_CHARS_MAX).collect();
    trace.set(names::PATH, &*path);
    Some(trace)
}

fn address(request: &Request) -> Option<IpAddr> {
    request.extensions().get::<Peer>().map(|Peer(address)| *address)
}

fn name_sender(trace: &Trace, caller: &Caller) {
    trace.belongs_to(caller.party());
    trace.set(names::REQUEST_ID, &*caller.id);
    caller.tenant().into_iter().for_each(|tenant| trace.set(names::TENANT, tenant));
}

/// Adds a response's status to the request's trace. A client's fault is not an error of this server.
fn traced(trace: Option<&Trace>, response: Response) -> Response {
    let Some(trace) = trace else { return response };
    let status = response.status();
    trace.set(names::STATUS, u32::from(status.as_u16()));
    if status.is_server_error() {
        trace.set(names::ERROR, status.as_str());
        trace.fail(status.canonical_reason().unwrap_or_default());
    }
    response
}

/// Layer around all that is done for a generating request: one that fails before it took its quota counts as a request. Otherwise the work
/// until then would be free.
pub async fn charge(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Arc<Caller>>().cloned();
    let response = next.run(request).await;
    // A refusal for want of room did no work.
    let has_failed = response.status().is_client_error() && response.status() != StatusCode::TOO_MANY_REQUESTS;
    if let Some(caller) = caller.filter(|caller| has_failed && caller.standing().is_none()) {
        let _ = gateway.tenants().count(&caller).await;
    }
    response
}

/// Layer around the generating endpoints, inside the replay of answers: refuses early what could not pass anyway.
pub async fn admit(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let messages = speaks_anthropic(&request);
    let caller = request.extensions().get::<Arc<Caller>>().cloned();
    if request.method() == Method::POST
        && let Some(caller) = &caller
        && let Err(error) = gateway.tenants().peek(caller)
    {
        metrics::count_request(error.outcome());
        return refusal(error, messages);
    }
    let mut response = next.run(request).await;
    if let Some(routed) = caller.as_ref().and_then(|caller| caller.routed()) {
        let status = response.status();
        let lacks_workers = status == StatusCode::SERVICE_UNAVAILABLE && gateway.rollouts().is_young();
        if status.is_server_error() && !lacks_workers {
            routed.failed();
        }
        tell_route(&mut response, routed);
    }
    response
}

/// Layer around routes that need no model: each request counts as one in its tenant's quota.
pub async fn count(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let messages = speaks_anthropic(&request);
    let Some(caller) = request.extensions().get::<Arc<Caller>>() else {
        return refusal(ApiError::internal("the sender was not authenticated: please report this as a bug"), messages);
    };
    match gateway.tenants().count(caller).await {
        Ok(_counted) => next.run(request).await,
        Err(error) => refusal(error, messages),
    }
}

/// Adds the headers with the answering model, and the reason for it. Inside the replay of answers, so that a repeat has the same.
fn tell_route(response: &mut Response, routed: &Routed) {
    for (name, value) in [("x-tidemill-model", &routed.told.model), ("x-tidemill-route", &routed.told.why)] {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().insert(name, value);
        }
    }
}

/// Returns the region in a request's header, if rules depend on one.
fn region(gateway: &Gateway, headers: &HeaderMap) -> Option<String> {
    headers.get(gateway.region_header()?)?.to_str().ok().map(str::to_owned)
}

pub(super) fn speaks_anthropic(request: &Request) -> bool {
    request.uri().path().starts_with("/v1/messages")
}

pub(super) fn refusal(error: ApiError, messages: bool) -> Response {
    if messages { MessagesError::from(error).into_response() } else { error.into_response() }
}

/// Finds the credential: OpenAI's clients send a bearer token, Anthropic's a header of their own.
fn credential(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, credential) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(credential.trim())
    });
    bearer.or_else(|| headers.get(API_KEY)?.to_str().ok())
}

fn tell(headers: &mut HeaderMap, caller: &Caller) {
    let mut put = |name: &'static str, value: &dyn Display| {
        if let Ok(value) = HeaderValue::from_str(&value.to_string()) {
            headers.insert(name, value);
        }
    };
    put("x-request-id", &caller.id);
    let Some(standing) = caller.standing() else { return };
    if let Some(warning) = caller.budget_warning() {
        put("x-tidemill-budget", &warning);
    }
    let mut level = |level: &Option<Level>, [limit, remaining, reset]: [&'static str; 3]| {
        if let Some(level) = level {
            put(limit, &level.limit);
            put(remaining, &level.remaining);
            put(reset, &as_duration(level.reset));
        }
    };
    level(&standing.requests, ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"]);
    level(&standing.tokens, ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"]);
}

/// Writes a time as OpenAI does: `350ms`, `1.5s`, `6m0s`.
fn as_duration(time: Duration) -> String {
    let ms = time.as_nanos().div_ceil(1_000_000);
    match ms {
        0 => "0s".into(),
        1..1000 => format!("{ms}ms"),
        1000..60_000 => format!("{}s", ms as f64 / 1e3),
        _ => format!("{}m{}s", ms / 60_000, ms % 60_000 / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_comes_in_either_header() {
        let of = |name: &'static str, value: &str| {
            let headers: HeaderMap = [(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())].into_iter().collect();
            credential(&headers).map(str::to_owned)
        };
        assert_eq!(of("authorization", "Bearer tm_1").as_deref(), Some("tm_1"));
        assert_eq!(of("authorization", "bearer  tm_1 ").as_deref(), Some("tm_1"));
        assert_eq!(of("x-api-key", "tm_1").as_deref(), Some("tm_1"));
        assert_eq!(of("authorization", "Basic dXNlcg=="), None);
        assert_eq!(of("authorization", "tm_1"), None);
    }

    #[test]
    fn times_are_written_as_clients_read_them() {
        for (ms, text) in [(0, "0s"), (350, "350ms"), (1500, "1.5s"), (2000, "2s"), (360_000, "6m0s"), (61_500, "1m1s")] {
            assert_eq!(as_duration(Duration::from_millis(ms)), text);
        }
    }
}
