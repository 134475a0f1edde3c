//! An [`ApiError`] as a response, and errors that only endpoints return: for paths, the store, files and batches.

use super::paths;
use crate::{
    batch::file::NoRoom,
    batches::BatchError,
    requests::{computing::refusal, error::ApiError},
    store::StoreError,
};
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(ms) = self.retry_after_ms() {
            response.headers_mut().insert("retry-after-ms", HeaderValue::from(ms));
        }
        // Clients' libraries repeat a 429 by themselves, unless they are told that it is useless.
        if self.is_over_budget() {
            response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response
    }
}

impl ApiError {
    /// Converts the store's error. `param` is the field that names the missing object.
    pub fn of_store(param: &str, error: StoreError) -> Self {
        let message = error.to_string();
        match error {
            StoreError::NotFound(_) => Self::not_found(param, message),
            StoreError::TooLong { .. } => Self::invalid(param, message),
            StoreError::TooLarge { .. } => Self::invalid(param, message).with_code("conversation_too_large"),
            StoreError::Full => Self::new(StatusCode::INSUFFICIENT_STORAGE, message).with_code("no_room_to_store"),
            StoreError::Changed(_) => Self::conflict(message),
            StoreError::OverContext { tokens, max } => Self::context_length(param, max.try_into().unwrap_or(u32::MAX), tokens, 0),
            StoreError::OverShare(refused) => refusal("stored", refused),
            StoreError::Busy | StoreError::Larger(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, message).retry_after(1),
            StoreError::Failed(_) => {
                tracing::error!(%error, "the store of responses failed");
                Self::internal(message)
            }
        }
    }

    /// Converts the batches' error. `param` is the field that names the missing object.
    pub fn of_batches(param: &str, error: BatchError) -> Self {
        let message = error.to_string();
        match error {
            BatchError::NotFound(_) => Self::not_found(param, message),
            BatchError::Purpose { .. } | BatchError::Over(..) => Self::invalid(param, message),
            BatchError::TooLarge(_) => Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("file_too_large"),
            BatchError::NoRoom(NoRoom::Total { .. } | NoRoom::Disk { .. }) => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, message).with_code("no_room_for_files")
            }
            BatchError::NoRoom(_) => Self::new(StatusCode::BAD_REQUEST, message).with_code("no_room_for_files"),
            BatchError::InUse { .. } => Self::conflict(message),
            BatchError::TooMany => Self::new(StatusCode::BAD_REQUEST, message).with_code("too_many_batches"),
            BatchError::Disk(_) => {
                tracing::error!(%error, "batch storage failed");
                Self::internal(message)
            }
        }
    }

    pub fn no_route(method: &str, path: &str) -> Self {
        let advice = paths::suggestion(path)
            .map_or_else(String::new, |meant| format!(" Did you mean {meant}? The base URL for clients ends in `/v1`."));
        Self::new(StatusCode::NOT_FOUND, format!("Unknown request URL: {method} {path}.{advice}"))
    }
}
