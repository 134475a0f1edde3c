//! `/console/sign-in`, `/console/callback`, `/console/sign-out`, `/console/who`: operators with a browser. Where a sign-in ends is no
//! parameter: always at the console.

use super::{parameters::Query, server::Peer};
use crate::{
    base::stamp::unix_seconds,
    metrics,
    operators::{self, Browsers, Cookie, Operators, SignedIn, Way},
    requests::error::ApiError,
    serving::gateway::Gateway,
};
use axum::{
    Extension, Json,
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{AppendHeaders, IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tidemill_tenancy::{
    operators::{Operator, Role},
    sign_in::Failed,
};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Returned {
    code: Option<String>,
    state: Option<String>,
    error: Option<String>,
}

/// `GET /console/sign-in`: sends the browser to the identity provider.
pub async fn begin(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    let operators = operators_of(&gateway)?;
    let browsers = browsers_of(operators)?;
    let document = operators.document().await?;
    let begun = browsers.flow.begin(&document, rand::random(), unix_seconds()).map_err(failed)?;
    redirect(&begun.location, [browsers.begun(&begun.cookie, begun.lasts_s)])
}

/// `GET /console/callback`: the browser comes back from the identity provider.
pub async fn callback(
    State(gateway): State<Arc<Gateway>>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    Query(returned): Query<Returned>,
) -> Result<Response, ApiError> {
    let operators = operators_of(&gateway)?;
    let browsers = browsers_of(operators)?;
    let Returned { code, state, error } = returned;
    // First of all: a sign-in that did not begin here has no effect, and causes no request.
    let cookie = browsers.sent(&headers, Cookie::SignIn).unwrap_or_default().to_owned();
    browsers.flow.check(&cookie, state.as_deref().unwrap_or_default(), unix_seconds()).map_err(failed)?;
    if let Some(error) = error {
        let is_code = error.len() <= 64 && error.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        return Err(failed(Failed::Refused(if is_code { error } else { "it says why in no known form".into() })));
    }
    let code = code.ok_or_else(|| failed(Failed::Refused("it sent no code".into())))?;
    let document = operators.document().await?;
    let place = browsers.redeeming(peer.map(|Extension(Peer(address))| address)).await.ok_or_else(|| {
        let message = "Too many operators sign in at this moment: begin again in a few seconds.";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).retry_after(5)
    })?;
    let flow = Arc::clone(&browsers.flow);
    let redeemed = tokio::task::spawn_blocking(move || {
        let redeemed = flow.redeem(&document, &cookie, &code);
        drop(place);
        redeemed
    });
    let broken = |_| ApiError::internal("the sign-in broke off: please report this as a bug");
    let redeemed = redeemed.await.map_err(broken)?.map_err(failed)?;
    let operator = operators.verify_sign_in(browsers, &redeemed.id_token, &redeemed.nonce).await?;
    let cookie = begin_session(&gateway, operators, browsers, operator).await?;
    // The earlier cookie has done its work.
    redirect("/console#cluster", [cookie, browsers.begun("", 0)])
}

/// Begins a session for an operator who has a role, and records it. Returns its cookie.
async fn begin_session(gateway: &Gateway, operators: &Operators, browsers: &Browsers, operator: Operator) -> Result<HeaderValue, ApiError> {
    let signed_in = SignedIn { operator: Arc::new(operator.clone()), by: Way::Session };
    let is_allowed = operator.may(Role::Look);
    metrics::count_operator_request(if is_allowed { "signed_in" } else { "role" });
    if is_allowed || operators.notes_refusal(unix_seconds()) {
        note(gateway, operators, &signed_in, if is_allowed { "sign-in" } else { "sign-in-refused" }).await?;
    }
    if !is_allowed {
        return Err(operators::role_needed("This port", Role::Look, &operator, operators.role_claim()));
    }
    tracing::info!(who = operator.shown(), subject = operator.subject, "an operator signed in");
    Ok(browsers.begin(operator))
}

/// `POST /console/sign-out`: ends the session here. The provider's own goes on.
pub async fn end(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let operators = operators_of(&gateway)?;
    let browsers = browsers_of(operators)?;
    browsers.check_origin(&headers)?;
    let (ended, removed) = browsers.end(&headers);
    if let Some(operator) = ended {
        note(&gateway, operators, &SignedIn { operator, by: Way::Session }, "sign-out").await?;
    }
    Ok((AppendHeaders([(header::SET_COOKIE, removed)]), Json(json!({"signed_out": true}))).into_response())
}

/// `GET /console/who`: the sender of this request, and whether browsers can sign in.
pub async fn who(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let operators = operators_of(&gateway)?;
    let signed_in = operators.identify(&headers).await?;
    let shown = |SignedIn { operator, by }: SignedIn| {
        let until = (by == Way::Session).then_some(operator.until);
        json!({
            "shown": operator.shown(), "subject": operator.subject, "name": operator.name, "email": operator.email,
            "role": operator.role.map(Role::name), "until": until,
        })
    };
    let who = json!({"operator": signed_in.map(shown), "sign_in": operators.browsers().is_some()});
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(who)).into_response())
}

/// `GET /console/who` on a port where operators do not sign in. It looks at no token: the clients' port must not tell which are good.
pub async fn no_sign_in() -> Json<Value> {
    Json(json!({"operator": null, "sign_in": false}))
}

async fn note(gateway: &Gateway, operators: &Operators, signed_in: &SignedIn, kind: &str) -> Result<(), ApiError> {
    let event = json!({"kind": kind, "who": operators.written(signed_in)});
    let missing = || ApiError::internal("there is no audit log, and sign-ins must be in it: please report this as a bug");
    let noted = gateway.audit().ok_or_else(missing)?.note(event).await;
    noted.map_err(|error| {
        let message = format!("Nobody can sign in or out, since it could not be recorded: {error}.");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("not_recorded").retry_after(5)
    })
}

fn operators_of(gateway: &Gateway) -> Result<&Arc<Operators>, ApiError> {
    gateway.operators().ok_or_else(|| ApiError::internal("operators sign in nowhere here: please report this as a bug"))
}

fn browsers_of(operators: &Operators) -> Result<&Browsers, ApiError> {
    let message = "Browsers cannot sign in here: `operators.url` in the coordinator's file says at which address they would.";
    operators.browsers().ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, message))
}

fn failed(error: Failed) -> ApiError {
    let status = match &error {
        Failed::NotBegun => StatusCode::BAD_REQUEST,
        Failed::Refused(_) => StatusCode::UNAUTHORIZED,
        Failed::NoEndpoints | Failed::Endpoint(_) | Failed::Unreachable(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    ApiError::new(status, format!("You are not signed in: {error}.")).with_code("sign_in_failed")
}

/// Sends the browser elsewhere. The address that it leaves may have a code.
fn redirect<const N: usize>(location: &str, cookies: [HeaderValue; N]) -> Result<Response, ApiError> {
    let location =
        HeaderValue::from_str(location).map_err(|_| ApiError::internal("an address is no header: please report this as a bug"))?;
    let headers = [
        (header::LOCATION, location),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    let cookies = AppendHeaders(cookies.map(|cookie| (header::SET_COOKIE, cookie)));
    Ok((StatusCode::SEE_OTHER, headers, cookies).into_response())
}
