//! Cross-origin requests of web pages whose origins an operator has allowed: browsers' preflights, and the response headers that a page may
//! read.

use crate::base::origins::Origins;
use axum::http::{HeaderName, Method};
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// The time after which a browser asks again.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);
/// Response headers that a page may read besides the default ones.
const SHOWN: [&str; 15] = [
    "x-request-id",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-queue-position",
    "x-queue-estimate-ms",
    "x-idempotency",
    "x-tidemill-model",
    "x-tidemill-region",
    "x-tidemill-route",
    "x-tidemill-not-stored",
];

/// Returns the layer that answers browsers, if any origin is allowed. Keys travel in headers that pages set, so browsers' own credentials
/// are not requested.
pub(super) fn layer(origins: &Origins) -> Option<CorsLayer> {
    let allowed = match origins {
        Origins::None => return None,
        Origins::These(origins) => AllowOrigin::list(origins.iter().cloned()),
        Origins::All => AllowOrigin::any(),
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(SHOWN.map(HeaderName::from_static))
        .allow_private_network(true)
        .max_age(REMEMBERED_FOR);
    Some(layer)
}
