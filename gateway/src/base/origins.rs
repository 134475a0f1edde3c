//! The origins whose web pages may use the API.

use axum::http::{HeaderValue, Uri};

/// The origins whose pages may use the gateway.
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

    pub fn allow(&self, origin: &HeaderValue) -> bool {
        match self {
            Self::None => false,
            Self::These(origins) => origins.contains(origin),
            Self::All => true,
        }
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
