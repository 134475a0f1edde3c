//! Errors in the form of Anthropic's API.

use crate::requests::error::ApiError;
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// A failure in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`.
#[derive(Debug)]
pub struct MessagesError(ApiError);

pub(super) fn body(error: &ApiError) -> Value {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    let mut body = json!({"type": "error", "error": {"type": kind, "message": error.message()}});
    if let Some(id) = error.appeal_id() {
        body["error"]["appeal_id"] = id.into();
    }
    body
}

impl From<ApiError> for MessagesError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for MessagesError {
    fn into_response(self) -> Response {
        let mut response = (self.0.status(), Json(body(&self.0))).into_response();
        if let Some(seconds) = self.0.retry_after_s() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(ms) = self.0.retry_after_ms() {
            response.headers_mut().insert("retry-after-ms", HeaderValue::from(ms));
        }
        // Clients' libraries repeat a 429 by themselves, unless they are told that it is useless.
        if self.0.is_over_budget() {
            response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response
    }
}
