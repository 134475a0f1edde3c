//! The parts of a request's address as endpoints take them. They stand in for axum's extractors of the same names, which refuse in plain text
//! where every error of this API is JSON; `gateway/clippy.toml` keeps the others out.

#![expect(clippy::disallowed_types, reason = "the only place that takes axum's")]

use crate::requests::error::ApiError;
use axum::{
    extract::{self, FromRequestParts},
    http::{Uri, request::Parts},
};
use serde::{Deserialize, de::DeserializeOwned};

/// The captured parts of a request's path.
#[derive(Clone, Copy, Debug)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let extract::Path(path) = extract::Path::from_request_parts(parts, state).await.map_err(|rejection| {
            let reason = rejection.body_text();
            if rejection.status().is_server_error() {
                ApiError::internal(format!("a route does not fit its endpoint: {reason}"))
            } else {
                ApiError::malformed(reason)
            }
        })?;
        Ok(Self(path))
    }
}

/// A request's query, after the `?`.
#[derive(Clone, Copy, Debug)]
pub struct Query<T>(pub T);

/// The query of routes that are about one model.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelQuery {
    pub model: Option<String>,
}

impl<T: DeserializeOwned> Query<T> {
    pub fn of(uri: &Uri) -> Result<Self, ApiError> {
        let extract::Query(query) = extract::Query::try_from_uri(uri).map_err(|rejection| ApiError::malformed(rejection.body_text()))?;
        Ok(Self(query))
    }
}

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        Self::of(&parts.uri)
    }
}
