//! `/console`: the page in `gateway/console/`, built into the binary. It only runs its own scripts and only talks to its own origin,
//! whatever a model or a worker makes it display.

use super::parameters::Path;
use crate::requests::error::ApiError;
use axum::{
    http::{HeaderName, Method, Uri, header},
    response::{IntoResponse, Redirect, Response},
};

const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

const INDEX: Asset = Asset { name: "index.html", kind: HTML, text: include_str!("../../console/index.html") };

macro_rules! assets {
    ($($name:literal: $kind:ident,)*) => {
        &[$(Asset { name: $name, kind: $kind, text: include_str!(concat!("../../console/", $name)) }),*]
    };
}

const ASSETS: &[Asset] = assets! {
    "account.js": SCRIPT,
    "answer.js": SCRIPT,
    "api.js": SCRIPT,
    "app.js": SCRIPT,
    "chat.js": SCRIPT,
    "cluster.js": SCRIPT,
    "dom.js": SCRIPT,
    "feed.js": SCRIPT,
    "format.js": SCRIPT,
    "history.js": SCRIPT,
    "icon.svg": SVG,
    "markdown.js": SCRIPT,
    "message.js": SCRIPT,
    "path.js": SCRIPT,
    "picture.js": SCRIPT,
    "spark.js": SCRIPT,
    "sse.js": SCRIPT,
    "store.js": SCRIPT,
    "style.css": CSS,
    "theme.js": SCRIPT,
};

struct Asset {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
}

pub async fn page() -> Response {
    INDEX.respond()
}

/// The page's own addresses are relative, so they would not resolve below a trailing slash.
pub async fn page_with_slash() -> Redirect {
    Redirect::permanent("/console")
}

pub async fn asset(Path(name): Path<String>, method: Method, uri: Uri) -> Result<Response, ApiError> {
    let asset = ASSETS.iter().find(|asset| asset.name == name);
    asset.map(Asset::respond).ok_or_else(|| ApiError::no_route(method.as_str(), uri.path()))
}

impl Asset {
    fn respond(&self) -> Response {
        let headers: [(HeaderName, &str); 5] = [
            (header::CONTENT_TYPE, self.kind),
            // After an update, an old script must not meet a new page.
            (header::CACHE_CONTROL, "no-cache"),
            (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
        ];
        (headers, self.text).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, fs};

    #[test]
    fn all_that_the_page_is_made_of_is_served_and_small() {
        let files = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/console")).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        // These are only for the type checker.
        let files: BTreeSet<_> = files.filter(|file| !["tsconfig.json", "types.d.ts"].contains(&file.as_str())).collect();
        let served = ASSETS.iter().chain([&INDEX]).map(|asset| asset.name.to_owned()).collect();
        assert_eq!(files, served);
        let bytes: usize = ASSETS.iter().chain([&INDEX]).map(|asset| asset.text.len()).sum();
        assert!(bytes < 200_000, "{bytes} bytes");
    }
}
