//! The route for a path. Clients are given base URLs with a slash too many, the prefix of a different provider, or `/v1` twice; each of
//! these still maps to exactly one route.

use axum::http::{Uri, uri::PathAndQuery};
use std::borrow::Cow;

/// A prefix in other providers' base URLs.
const PREFIX: &str = "/openai";
/// The beginnings of the paths that clients request, for [`suggestion`]. Longer ones come before their own beginnings.
const ENDPOINTS: [&str; 18] = [
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages/count_tokens",
    "/messages",
    "/embeddings",
    "/rerank",
    "/score",
    "/classify",
    "/models",
    "/conversations",
    "/memories",
    "/files",
    "/batches",
    "/moderations",
    "/appeals",
    "/feedback",
    "/v1",
];

/// Normalizes a request's path to that of its route.
pub(super) fn straighten(uri: &mut Uri) {
    let Cow::Owned(path) = meant(uri.path()) else { return };
    let path = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let mut parts = uri.clone().into_parts();
    // Only bytes of a path were removed, so it still is one.
    if let Ok(path) = path.parse::<PathAndQuery>() {
        parts.path_and_query = Some(path);
        if let Ok(straight) = Uri::from_parts(parts) {
            *uri = straight;
        }
    }
}

fn meant(path: &str) -> Cow<'_, str> {
    let is_straight =
        path == "/" || !(path.contains("//") || path.ends_with('/') || path.starts_with(PREFIX) || path.starts_with("/v1/v1"));
    // The console's page is in a directory.
    if is_straight || path == "/console/" {
        return Cow::Borrowed(path);
    }
    let mut segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    if segments.first() == Some(&&PREFIX[1..]) {
        segments.remove(0);
    }
    while let ["v1", "v1", ..] = segments[..] {
        segments.remove(0);
    }
    let straight = format!("/{}", segments.join("/"));
    if straight == path { Cow::Borrowed(path) } else { Cow::Owned(straight) }
}

/// Finds the path that a client may have meant by one without a route.
pub(super) fn suggestion(path: &str) -> Option<String> {
    let endpoint = ENDPOINTS.iter().find(|endpoint| path.ends_with(**endpoint) || path.contains(&format!("{endpoint}/")))?;
    Some(if *endpoint == "/v1" { "/v1/chat/completions".to_owned() } else { format!("/v1{endpoint}") }).filter(|meant| meant != path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn straight(uri: &str) -> String {
        let mut uri: Uri = uri.parse().unwrap();
        straighten(&mut uri);
        uri.to_string()
    }

    #[test]
    fn paths_that_users_paste_mean_the_route() {
        for (pasted, meant) in [
            ("/v1/chat/completions/", "/v1/chat/completions"),
            ("//v1/chat/completions", "/v1/chat/completions"),
            ("/v1//chat/completions?a=/b//", "/v1/chat/completions?a=/b//"),
            ("/openai/v1/models", "/v1/models"),
            ("/v1/v1/v1/models/", "/v1/models"),
            ("/openai//v1/v1/responses/resp_1?stream=true", "/v1/responses/resp_1?stream=true"),
            ("http://host:1/v1/models/", "http://host:1/v1/models"),
        ] {
            assert_eq!(straight(pasted), meant);
        }
        for straight_already in
            ["/", "/v1/models", "/console/", "/console", "/v1/models/openai/gpt", "/v1/models/a%2F%2Fb", "/openaiv1", "*"]
        {
            assert_eq!(straight(straight_already), straight_already);
        }
    }

    #[test]
    fn a_path_that_is_no_route_may_look_like_one() {
        for (path, meant) in [
            ("/chat/completions", Some("/v1/chat/completions")),
            ("/v1/chat/completions/chat/completions", Some("/v1/chat/completions")),
            ("/api/v1/messages/count_tokens", Some("/v1/messages/count_tokens")),
            ("/v2/models/tiny", Some("/v1/models")),
            ("/v1", Some("/v1/chat/completions")),
            ("/v1/chat/completions", None),
            ("/favicon.ico", None),
        ] {
            assert_eq!(suggestion(path).as_deref(), meant, "{path}");
        }
    }
}
