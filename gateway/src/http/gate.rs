//! The gate of the operators' port, where operators sign in: who asks, whether they may, and a record of each change. A layer around all of
//! the port's routes; without the section `[operators]` it is not there.

use super::roles::{self, Needed, Row};
use crate::{
    base::stamp::unix_seconds,
    metrics,
    operators::{self, Operators, SignedIn, Way},
    requests::{error::ApiError, parse},
    safety::audit::{Audit, AuditError},
    serving::gateway::Gateway,
};
use axum::{
    body::Body,
    extract::{MatchedPath, Request, State},
    http::{StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use tidemill_tenancy::operators::{Role, visible};

/// The maximum size of a change's body.
const BODY_BYTES_MAX: usize = 64 << 10;
/// The time in which it must arrive.
const BODY_MAX: Duration = Duration::from_secs(60);
/// The part of a change's address, and of its body, that is recorded.
const ASKED_BYTES_MAX: usize = 2048;

pub(super) async fn layer(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let Some(operators) = gateway.operators().cloned() else {
        return ApiError::internal("operators sign in nowhere here: please report this as a bug").into_response();
    };
    let (mut head, body) = request.into_parts();
    let path = head.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let Some(row) = roles::row(&head.method, path) else {
        metrics::count_operator_request("no_row");
        let message = "No role may use this: it is not in the table of roles. Please report this as a bug.";
        return ApiError::new(StatusCode::FORBIDDEN, message).with_code("role_required").into_response();
    };
    let Needed::Role(role) = row.needed else { return next.run(Request::from_parts(head, body)).await };
    let signed_in = match admit(&operators, &head, role).await {
        Ok(signed_in) => signed_in,
        Err(refusal) => return refuse(&gateway, &operators, &head, row, *refusal).await,
    };
    metrics::count_operator_request("allowed");
    // Handlers have no use for them.
    head.headers.remove(header::AUTHORIZATION);
    head.headers.remove(header::COOKIE);
    let request = Request::from_parts(head, body);
    match row.is_recorded {
        true => record(gateway, &operators, &signed_in, request, next).await,
        false => bounded(next.run(request).await, signed_in.operator.until),
    }
}

/// Ends a stream of events when the credential of its reader does.
fn bounded(response: Response, until: u64) -> Response {
    let is_stream = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream");
    if !is_stream {
        return response;
    }
    let left = Duration::from_secs(until.saturating_sub(unix_seconds()));
    // A credential without an end bounds nothing.
    let end = async move { tokio::time::timeout(left, std::future::pending::<()>()).await };
    response.map(|body| Body::from_stream(body.into_data_stream().take_until(Box::pin(end))))
}

/// The reason why a request is refused, and its sender if that is known.
struct Refusal {
    error: ApiError,
    outcome: &'static str,
    signed_in: Option<SignedIn>,
}

async fn admit(operators: &Operators, head: &Parts, needed: Role) -> Result<SignedIn, Box<Refusal>> {
    let signed_in = match operators.identify(&head.headers).await {
        Ok(Some(signed_in)) => signed_in,
        Ok(None) => {
            let sign_in = operators.browsers().map(|browsers| browsers.flow.url());
            return Err(Box::new(Refusal { error: operators::no_credential(sign_in), outcome: "no_credential", signed_in: None }));
        }
        Err(error) => {
            let outcome = if error.status() == StatusCode::UNAUTHORIZED { "token" } else { "provider" };
            return Err(Box::new(Refusal { error, outcome, signed_in: None }));
        }
    };
    let refusal = |error, outcome| Box::new(Refusal { error, outcome, signed_in: Some(signed_in.clone()) });
    // A cookie goes along with requests that another site's page made the browser send (CSRF); a token goes only with its holder's own.
    if let (Way::Session, false, Some(browsers)) = (signed_in.by, head.method.is_safe(), operators.browsers()) {
        browsers.check_origin(&head.headers).map_err(|error| refusal(error, "origin"))?;
    }
    if !signed_in.operator.may(needed) {
        let error = operators::role_needed(&did(head), needed, &signed_in.operator, operators.role_claim());
        return Err(refusal(error, "role"));
    }
    Ok(signed_in)
}

/// Refuses a request. A change that was refused is recorded, also where nothing is known of its sender.
async fn refuse(gateway: &Gateway, operators: &Operators, head: &Parts, row: &Row, refusal: Refusal) -> Response {
    let Refusal { error, outcome, signed_in } = refusal;
    metrics::count_operator_request(outcome);
    if row.is_recorded
        && let Some(audit) = gateway.audit().filter(|_| operators.notes_refusal(unix_seconds()))
    {
        let who = signed_in.map(|signed_in| operators.written(&signed_in));
        let event = json!({
            "kind": "operator", "who": who, "did": did(head), "verdict": "refused", "status": error.status().as_u16(), "why": outcome,
        });
        if let Err(failed) = audit.note(event).await {
            tracing::error!(error = %failed, "a refused change is not in the audit log");
        }
    }
    error.into_response()
}

/// Records a change before it is made, and its outcome. What cannot be recorded is not made.
async fn record(gateway: Arc<Gateway>, operators: &Operators, signed_in: &SignedIn, request: Request, next: Next) -> Response {
    let Some(audit) = gateway.audit() else {
        return ApiError::internal("there is no audit log, and changes must be in it: please report this as a bug").into_response();
    };
    let (head, body) = request.into_parts();
    let body = match tokio::time::timeout(BODY_MAX, parse::read(body, BODY_BYTES_MAX)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => return error.into_response(),
        Err(_) => return ApiError::too_slow(BODY_MAX).into_response(),
    };
    let asked = (!body.is_empty()).then(|| asked(audit, &body));
    let (id, did) = (format!("{:016x}", rand::random::<u64>()), did(&head));
    let request = Request::from_parts(head, Body::from(body));
    let who = operators.written(signed_in);
    let event = json!({"kind": "operator", "id": id, "who": who, "did": did, "asked": asked, "verdict": "allowed"});
    if let Err(error) = audit.note(event).await {
        metrics::count_operator_request("audit");
        return not_recorded(error).into_response();
    }
    tracing::info!(who = signed_in.operator.shown(), subject = signed_in.operator.subject, did, "an operator changes something");
    // A change goes on to its end, and into the log, also when its sender does not wait for it.
    let worker = Arc::clone(&gateway);
    let made = tokio::spawn(async move {
        let response = next.run(request).await;
        let event = json!({"kind": "operator-end", "id": id, "status": response.status().as_u16()});
        if let Some(audit) = worker.audit()
            && let Err(error) = audit.note(event).await
        {
            tracing::error!(%error, id, "the outcome of an operator's change is not in the audit log");
        }
        response
    });
    made.await.unwrap_or_else(|_| ApiError::internal("the change broke off: please report this as a bug").into_response())
}

fn not_recorded(error: AuditError) -> ApiError {
    let message = format!("Nothing was changed, since it could not be recorded: {error}.");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("not_recorded").retry_after(5)
}

/// The method and the path of a request, for people.
fn did(head: &Parts) -> String {
    let uri = head.uri.path_and_query().map_or("", |uri| uri.as_str());
    format!("{} {}", head.method, visible(uri, ASKED_BYTES_MAX))
}

/// A change's body for the audit log, without what identifies people.
fn asked(audit: &Audit, body: &[u8]) -> Value {
    let mut text = audit.masked(&String::from_utf8_lossy(body));
    text.truncate(text.floor_char_boundary(ASKED_BYTES_MAX));
    text.into()
}
