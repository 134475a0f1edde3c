//! Bodies as values, and the ranges of fields: each error names the field.

use crate::{base::json, requests::error::ApiError, text::config};
use axum::{
    body::{Body, to_bytes},
    http::{HeaderMap, header},
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, MapAccess, Visitor},
};
use serde_json::{Map, Value, de::SliceRead};
use std::{error::Error, fmt, ops::RangeBounds};

/// A request's body, parsed once. Each reader takes the fields that it knows, and ignores the others.
#[derive(Debug)]
pub struct JsonBody(Value);

impl JsonBody {
    /// Parses a body, which must be a JSON object that has no field twice.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        json(bytes)
    }

    /// Returns all fields unchanged.
    pub fn fields(&self) -> &Map<String, Value> {
        self.0.as_object().expect("a body is read as an object")
    }

    /// Reads the fields of `T` from a body that has other readers as well.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, ApiError> {
        serde_path_to_error::deserialize(&self.0).map_err(refused)
    }

    /// Reads the fields of `T`, without copies.
    pub fn into<T: DeserializeOwned>(self) -> Result<T, ApiError> {
        serde_path_to_error::deserialize(self.0).map_err(refused)
    }
}

impl<'de> Deserialize<'de> for JsonBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Map<String, Value>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut body: A) -> Result<Self::Value, A::Error> {
                let mut fields = Map::new();
                while let Some((name, value)) = body.next_entry::<String, Value>()? {
                    if fields.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
                    }
                    fields.insert(name, value);
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Reader).map(|fields| Self(Value::Object(fields)))
    }
}

/// Reads a body of at most `limit` bytes.
pub async fn read(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    match to_bytes(body, limit).await {
        Ok(bytes) => Ok(bytes.into()),
        Err(error) if error.source().is_some_and(|source| source.to_string().contains("length limit")) => Err(ApiError::too_large(limit)),
        Err(error) => Err(ApiError::malformed(format!("the request body broke off: {error}"))),
    }
}

/// Refuses a body that is declared as anything but JSON. Without a declaration it is accepted.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(content_type) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let content_type = String::from_utf8_lossy(content_type.as_bytes());
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match kind.strip_prefix("application/") {
        Some(kind) if kind == "json" || kind.ends_with("+json") => Ok(()),
        _ => Err(ApiError::not_json(&content_type)),
    }
}

/// Reads a body as `T`, ignoring fields that `T` does not have.
pub fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // UTF-8 is required even in fields that are ignored.
    std::str::from_utf8(bytes)
        .map_err(|error| ApiError::malformed(format!("the request body is not valid JSON: it is not UTF-8: {error}")))?;
    json::note_parse(bytes);
    let bytes = json::unmarked(bytes);
    // Serde would also read a struct from a list of its fields.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::malformed("the request body must be a JSON object"));
    }
    let refused = match whole(serde_json::Deserializer::from_slice(bytes)) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    match json::mended(bytes) {
        Some(mended) => whole(json::deep(&mended)),
        None => Err(refused),
    }
}

fn whole<'a, T: DeserializeOwned>(mut json: serde_json::Deserializer<SliceRead<'a>>) -> Result<T, ApiError> {
    let value = serde_path_to_error::deserialize(&mut json).map_err(refused)?;
    json.end().map_err(|error| ApiError::malformed(format!("the request body is not valid JSON: {error}")))?;
    Ok(value)
}

fn refused(error: serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let path = error.path().to_string();
    let inner = error.into_inner();
    let missing = inner.to_string().strip_prefix("missing field `").and_then(|rest| Some(rest.split_once('`')?.0.to_owned()));
    match missing {
        _ if inner.to_string().starts_with("recursion limit") => {
            ApiError::malformed(format!("the request body is nested deeper than {} levels", json::DEPTH_MAX))
        }
        _ if inner.is_syntax() || inner.is_eof() => ApiError::malformed(format!("the request body is not valid JSON: {inner}")),
        Some(field) if path == "." => ApiError::invalid(field, inner.to_string()),
        _ if path == "." => ApiError::malformed(inner.to_string()),
        _ => ApiError::invalid(path.clone(), format!("`{path}`: {inner}")),
    }
}

/// Refuses a value outside its range. NaN is in none.
pub fn in_range<T: PartialOrd + std::fmt::Display>(param: &str, value: T, range: impl RangeBounds<T>) -> Result<T, ApiError> {
    config::in_range(param, value, range).map_err(|problem| ApiError::invalid(param, problem))
}

pub fn at_most(param: &str, length: usize, max: usize) -> Result<(), ApiError> {
    if length <= max {
        Ok(())
    } else {
        Err(ApiError::invalid(param, format!("`{param}` has a length of {length}, at most {max} is allowed")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        http::openai::{ChatRequest, CompletionRequest, Prompt},
        requests::generate::GenerateRequest,
    };

    /// Returns the error, which names the same field whether the body is read as `T` at once or parsed first.
    fn error<T: DeserializeOwned + fmt::Debug>(body: &str) -> Value {
        let at_once = json::<T>(body.as_bytes()).unwrap_err().body()["error"].clone();
        let parsed = JsonBody::parse(body.as_bytes()).and_then(JsonBody::into::<T>).unwrap_err().body()["error"].clone();
        assert_eq!(at_once["param"], parsed["param"]);
        parsed
    }

    #[test]
    fn a_wrong_type_names_its_field() {
        assert_eq!(error::<GenerateRequest>(r#"{"temperature": "hot"}"#)["param"], "temperature");
        assert_eq!(error::<GenerateRequest>(r#"{"stream_options": {"include_usage": 3}}"#)["param"], "stream_options.include_usage");
        assert_eq!(error::<GenerateRequest>(r#"{"n": -1}"#)["param"], "n");
        assert_eq!(error::<ChatRequest>("{}")["param"], "messages");
        assert_eq!(error::<ChatRequest>(r#"{"messages": [{"role": "user", "content": 3}]}"#)["param"], "messages[0].content");
        assert_eq!(error::<CompletionRequest>(r#"{"prompt": {"a": 1}}"#)["param"], "prompt");
        for syntax in ["", "{", "{}x", "{\"n\": 1} {}", "\u{1}"] {
            assert!(error::<GenerateRequest>(syntax)["message"].as_str().unwrap().contains("not valid JSON"), "{syntax}");
        }
    }

    #[test]
    fn a_body_says_that_it_is_json_or_nothing() {
        let check = |content_type: Option<&'static str>| {
            let headers = content_type.map(|content_type| (header::CONTENT_TYPE, content_type.parse().unwrap())).into_iter().collect();
            check_content_type(&headers).map_err(|error| error.status().as_u16())
        };
        for json in [None, Some("application/json"), Some("Application/JSON; charset=utf-8"), Some("application/vnd.api+json")] {
            assert_eq!(check(json), Ok(()), "{json:?}");
        }
        for other in ["text/plain", "application/x-www-form-urlencoded", "application/jsonl", "", "multipart/form-data; boundary=x"] {
            assert_eq!(check(Some(other)), Err(415), "{other}");
        }
    }

    #[test]
    fn a_body_is_an_object_that_has_no_field_twice() {
        let refused = |body: &str| JsonBody::parse(body.as_bytes()).unwrap_err().message().to_owned();
        for other in ["3", "null", "\"{}\"", "[]"] {
            assert!(refused(other).contains("a JSON object"), "{other}");
        }
        assert!(refused(r#"{"n": 1, "n": 2}"#).contains("duplicate field `n`"));
        let body = JsonBody::parse(br#"{"\u006e": 1, "model": "tiny"}"#).unwrap();
        assert_eq!((body.fields().len(), body.read::<GenerateRequest>().unwrap().n), (2, Some(1)));
    }

    #[test]
    fn bytes_that_are_no_utf8_are_refused_wherever_they_are() {
        let body = b"{\"messages\": [], \"metadata\": {\"x\": \"\xff\"}}";
        assert!(json::<ChatRequest>(body).unwrap_err().body()["error"]["message"].as_str().unwrap().contains("UTF-8"));
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let prompt = |body: &str| json::<CompletionRequest>(format!("{{\"prompt\": {body}}}").as_bytes()).unwrap().prompt;
        assert!(matches!(prompt("\"a\""), Prompt::Text(_)));
        assert!(matches!(prompt("[1, 2]"), Prompt::Tokens(t) if t == [1, 2]));
        assert!(matches!(prompt("[\"a\", \"b\"]"), Prompt::Texts(_)));
        assert!(matches!(prompt("[[1], [2]]"), Prompt::TokenLists(_)));
    }

    #[test]
    fn ranges_say_what_is_allowed() {
        assert_eq!(in_range("top_p", 1.0, config::TOP_P), Ok(1.0));
        let error = in_range("top_p", 0.0, config::TOP_P).unwrap_err();
        assert_eq!(error.body()["error"]["message"], "`top_p` is 0: it must be more than 0 and at most 1");
        assert!(in_range("temperature", f32::NAN, 0.0..=2.0).is_err());
    }
}
