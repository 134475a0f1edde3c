//! Routes as data, and as operations of OpenAPI.

use super::schema::{EXTENSION, Field, Kind};
use serde_json::{Map, Value, json};

/// The form of a body.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    Nothing,
    Json(Kind),
    /// JSON that may be left out.
    MaybeJson(Kind),
    Form(Kind),
    /// JSON, or with `stream` server-sent events, each with one of these.
    JsonOrEvents(Kind, Kind),
    Events(Kind),
    /// Text of this media type.
    Text(&'static str),
    /// Bytes of this media type.
    Bytes(&'static str),
}

/// A route with one of its methods.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    pub(super) method: &'static str,
    /// The path as the router has it.
    pub(super) path: &'static str,
    id: &'static str,
    tag: &'static str,
    says: &'static str,
    pub(super) query: &'static [Field],
    headers: &'static [Field],
    pub(super) body: Content,
    pub(super) answer: Content,
    /// The object of its errors.
    error: &'static str,
    is_ours: bool,
}

/// The answer of a route, under the name that generated clients give their function.
pub(super) const fn route(method: &'static str, path: &'static str, id: &'static str, tag: &'static str, says: &'static str) -> Operation {
    Operation {
        method,
        path,
        id,
        tag,
        says,
        query: &[],
        headers: &[],
        body: Content::Nothing,
        answer: Content::Nothing,
        error: "Error",
        is_ours: false,
    }
}

impl Operation {
    pub(super) const fn query(self, query: &'static [Field]) -> Self {
        Self { query, ..self }
    }

    pub(super) const fn headers(self, headers: &'static [Field]) -> Self {
        Self { headers, ..self }
    }

    pub(super) const fn takes(self, body: Content) -> Self {
        Self { body, ..self }
    }

    pub(super) const fn gives(self, answer: Content) -> Self {
        Self { answer, ..self }
    }

    pub(super) const fn fails_with(self, error: &'static str) -> Self {
        Self { error, ..self }
    }

    /// Marks a route that neither OpenAI nor Anthropic has.
    pub(super) const fn ours(self) -> Self {
        Self { is_ours: true, ..self }
    }

    /// The path as OpenAPI writes it: without the mark of a parameter that may have slashes.
    pub(super) fn open_path(&self) -> String {
        self.path.replace("{*", "{")
    }

    /// Writes the operation. `needs` are the schemes of which a caller needs one; none if anybody may call it.
    pub(super) fn written(&self, needs: &[&str]) -> Value {
        let in_path = self
            .path
            .split('{')
            .skip(1)
            .filter_map(|rest| rest.split('}').next())
            .map(|name| json!({"name": name.trim_start_matches('*'), "in": "path", "required": true, "schema": {"type": "string"}}));
        let in_head = |place: &'static str, fields: &'static [Field]| {
            fields.iter().map(move |field| {
                let schema = field.kind.schema();
                let mut parameter =
                    json!({"name": field.name, "in": place, "required": field.is_needed, "description": field.says, "schema": schema});
                mark(&mut parameter, field.is_ours);
                parameter
            })
        };
        let parameters: Vec<_> = in_path.chain(in_head("query", self.query)).chain(in_head("header", self.headers)).collect();
        let security: Vec<_> = needs.iter().map(|scheme| json!({*scheme: []})).collect();
        let mut good = json!({"description": "The answer."});
        if let Some(content) = self.answer.written() {
            good["content"] = content;
        }
        let error = json!({
            "description": "The reason of a failure.",
            "content": {"application/json": {"schema": Kind::Named(self.error).schema()}},
        });
        let mut operation = json!({
            "operationId": self.id, "tags": [self.tag], "summary": self.says, "security": security,
            "responses": {"200": good, "default": error},
        });
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(content) = self.body.written() {
            operation["requestBody"] = json!({"required": !matches!(self.body, Content::MaybeJson(_)), "content": content});
        }
        mark(&mut operation, self.is_ours);
        operation
    }

    /// Calls `take` with each object's name that the operation mentions.
    pub(super) fn names(&self, take: &mut impl FnMut(&'static str)) {
        for content in [self.body, self.answer] {
            match content {
                Content::Nothing | Content::Text(_) | Content::Bytes(_) => {}
                Content::Json(kind) | Content::MaybeJson(kind) | Content::Form(kind) | Content::Events(kind) => kind.names(take),
                Content::JsonOrEvents(whole, event) => {
                    whole.names(take);
                    event.names(take);
                }
            }
        }
        take(self.error);
    }
}

impl Content {
    fn written(self) -> Option<Value> {
        const EVENTS: &str = "text/event-stream";
        // OpenAPI 3.1 has no form for a stream's events: a client reads a text, and the extension says more.
        let events = |event: Kind| json!({"schema": {"type": "string"}, "x-tidemill-event": event.schema()});
        let json = |kind: Kind| json!({"schema": kind.schema()});
        let content: Map<String, Value> = match self {
            Self::Nothing => return None,
            Self::Json(kind) | Self::MaybeJson(kind) => [("application/json".to_owned(), json(kind))].into_iter().collect(),
            Self::Form(kind) => [("multipart/form-data".to_owned(), json(kind))].into_iter().collect(),
            Self::Events(event) => [(EVENTS.to_owned(), events(event))].into_iter().collect(),
            Self::JsonOrEvents(whole, event) => {
                [("application/json".to_owned(), json(whole)), (EVENTS.to_owned(), events(event))].into_iter().collect()
            }
            Self::Text(media) => [(media.to_owned(), json(Kind::Text))].into_iter().collect(),
            Self::Bytes(media) => [(media.to_owned(), json(Kind::File))].into_iter().collect(),
        };
        Some(content.into())
    }
}

fn mark(value: &mut Value, is_ours: bool) {
    if is_ours {
        value[EXTENSION] = true.into();
    }
}
