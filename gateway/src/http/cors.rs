//! Web pages of other origins, where an operator has named them: what a browser asks before it sends a page's request, and what it wants to
//! read in an answer before it shows that to the page.

use axum::http::{HeaderName, HeaderValue, Method, Uri};
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// A browser asks again after this time.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);
/// The headers that a page may read, besides those that it always may.
const SHOWN: [&str; 14] = [
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
    "x-tidemill-route",
    "x-tidemill-not-stored",
];

/// The origins whose pages may use the front door.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    #[default]
    None,
    These(Vec<HeaderValue>),
    All,
}

impl Origins {
    /// Reads origins such as `https://chat.example`, or `*` for all.
    pub fn parse(origins: &[String]) -> Result<Self, String> {
        if origins.iter().any(|origin| origin == "*") {
            return if origins.len() == 1 {
                Ok(Self::All)
            } else {
                Err("`*` allows every origin: nothing else can stand beside it".into())
            };
        }
        let read = |origin: &String| {
            let wrong = || format!("`{origin}` is not an origin: it is written as a browser sends it, such as https://chat.example:8443");
            let uri: Uri = origin.parse().map_err(|_| wrong())?;
            let is_origin = uri.scheme().is_some() && uri.authority().is_some() && !origin.ends_with('/') && uri.path() == "/";
            if is_origin && uri.query().is_none() {
                HeaderValue::from_str(&origin.to_ascii_lowercase()).map_err(|_| wrong())
            } else {
                Err(wrong())
            }
        };
        let origins = origins.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        Ok(if origins.is_empty() { Self::None } else { Self::These(origins) })
    }

    pub(super) fn allow(&self, origin: &HeaderValue) -> bool {
        match self {
            Self::None => false,
            Self::These(origins) => origins.contains(origin),
            Self::All => true,
        }
    }

    /// Returns the layer that answers browsers, if any origin is allowed. Keys travel in headers that pages set, so no credentials of the
    /// browser's own are asked for.
    pub(super) fn layer(&self) -> Option<CorsLayer> {
        let allowed = match self {
            Self::None => return None,
            Self::These(origins) => AllowOrigin::list(origins.iter().cloned()),
            Self::All => AllowOrigin::any(),
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_written_as_browsers_send_them() {
        let parse = |origins: &[&str]| Origins::parse(&origins.iter().map(|origin| (*origin).to_owned()).collect::<Vec<_>>());
        assert_eq!(parse(&[]), Ok(Origins::None));
        assert_eq!(parse(&["*"]), Ok(Origins::All));
        let these = parse(&["https://Chat.example", "http://127.0.0.1:3000"]).unwrap();
        assert!(these.allow(&HeaderValue::from_static("https://chat.example")) && !these.allow(&HeaderValue::from_static("null")));
        for wrong in ["chat.example", "https://chat.example/", "https://chat.example/a", "", "null", "https://a b"] {
            assert!(parse(&[wrong]).is_err(), "{wrong}");
        }
        assert!(parse(&["*", "https://chat.example"]).is_err());
    }
}
