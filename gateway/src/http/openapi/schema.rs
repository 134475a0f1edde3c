//! Values' forms as data, and as schemas of OpenAPI 3.1 (JSON Schema 2020-12).

use serde_json::{Map, Value, json};

/// The mark of routes and fields that neither OpenAI's nor Anthropic's API has.
pub(super) const EXTENSION: &str = "x-tidemill-extension";

const NONE: &[&str] = &[];

/// The form of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Any,
    Text,
    Integer,
    Number,
    Bool,
    Null,
    /// The bytes of a file in a form.
    File,
    /// One of these words.
    Words(&'static [&'static str]),
    List(&'static Kind),
    /// An object with any keys, whose values have one form.
    Map(&'static Kind),
    /// An [`Object`], by its name.
    Named(&'static str),
    Either(&'static [Kind]),
}

/// A field of an object, or a parameter of a route.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) says: &'static str,
    pub(super) is_needed: bool,
    /// Whether `null` in a request is the same as nothing.
    pub(super) takes_null: bool,
    pub(super) is_ours: bool,
}

/// A field that may be missing; in a request, it may be `null` as well.
pub(super) const fn field(name: &'static str, kind: Kind, says: &'static str) -> Field {
    Field { name, kind, says, is_needed: false, takes_null: true, is_ours: false }
}

impl Field {
    /// Marks a field that a request must have, or that an answer always has.
    pub(super) const fn needed(self) -> Self {
        Self { is_needed: true, takes_null: false, ..self }
    }

    /// Marks a field that may be missing, but not `null`.
    pub(super) const fn not_null(self) -> Self {
        Self { takes_null: false, ..self }
    }

    /// Marks an extension.
    pub(super) const fn ours(self) -> Self {
        Self { is_ours: true, ..self }
    }

    pub(super) fn schema(&self, may_be_null: bool) -> Value {
        let mut schema = if may_be_null && self.takes_null { self.kind.or_null() } else { self.kind.schema() };
        schema["description"] = self.says.into();
        if self.is_ours {
            schema[EXTENSION] = true.into();
        }
        schema
    }
}

/// Fields that an object has, perhaps together with other objects.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Own(&'static [Field]),
    /// Fields of several APIs: `standard` names those that are no extensions of this one, `without` those that it ignores.
    Shared {
        fields: &'static [Field],
        standard: &'static [&'static str],
        without: &'static [&'static str],
    },
}

/// An object of the document.
#[derive(Clone, Copy, Debug)]
pub(super) struct Object {
    pub(super) name: &'static str,
    pub(super) says: &'static str,
    /// Whether clients send it.
    pub(super) is_sent: bool,
    pub(super) parts: &'static [Part],
}

/// An object of requests.
pub(super) const fn sent(name: &'static str, says: &'static str, parts: &'static [Part]) -> Object {
    Object { name, says, is_sent: true, parts }
}

/// An object of answers.
pub(super) const fn answered(name: &'static str, says: &'static str, parts: &'static [Part]) -> Object {
    Object { name, says, is_sent: false, parts }
}

impl Object {
    /// Lists the fields, each with its mark in this object.
    pub(super) fn fields(&self) -> impl Iterator<Item = Field> {
        self.parts.iter().flat_map(|part| {
            let (fields, standard, without) = match *part {
                Part::Own(fields) => (fields, None, NONE),
                Part::Shared { fields, standard, without } => (fields, Some(standard), without),
            };
            fields.iter().filter(|field| !without.contains(&field.name)).map(move |field| {
                let is_ours = standard.map_or(field.is_ours, |standard| !standard.contains(&field.name));
                Field { is_ours, ..*field }
            })
        })
    }

    /// Names the fields that its API ignores, although the common reader takes them.
    #[cfg(test)]
    pub(super) fn ignored(&self) -> impl Iterator<Item = &'static str> {
        self.parts
            .iter()
            .flat_map(|part| match *part {
                Part::Own(_) => NONE,
                Part::Shared { without, .. } => without,
            })
            .copied()
    }

    pub(super) fn schema(&self) -> Value {
        let properties: Map<String, Value> = self.fields().map(|field| (field.name.to_owned(), field.schema(self.is_sent))).collect();
        let needed: Vec<_> = self.fields().filter(|field| field.is_needed).map(|field| field.name).collect();
        let mut schema = json!({"type": "object", "description": self.says, "properties": properties});
        if !needed.is_empty() {
            schema["required"] = json!(needed);
        }
        schema
    }
}

impl Kind {
    pub(super) fn schema(self) -> Value {
        match self {
            Self::Any => json!({}),
            Self::Text => json!({"type": "string"}),
            Self::Integer => json!({"type": "integer"}),
            Self::Number => json!({"type": "number"}),
            Self::Bool => json!({"type": "boolean"}),
            Self::Null => json!({"type": "null"}),
            Self::File => json!({"type": "string", "format": "binary"}),
            Self::Words(words) => json!({"type": "string", "enum": words}),
            Self::List(of) => json!({"type": "array", "items": of.schema()}),
            Self::Map(of) => json!({"type": "object", "additionalProperties": of.schema()}),
            Self::Named(name) => json!({"$ref": format!("#/components/schemas/{name}")}),
            Self::Either(kinds) => json!({"anyOf": kinds.iter().map(|kind| kind.schema()).collect::<Vec<_>>()}),
        }
    }

    fn or_null(self) -> Value {
        match self {
            Self::Any => self.schema(),
            Self::Either(kinds) => json!({"anyOf": kinds.iter().chain([&Self::Null]).map(|kind| kind.schema()).collect::<Vec<_>>()}),
            other => json!({"anyOf": [other.schema(), Self::Null.schema()]}),
        }
    }

    /// Calls `take` with each object's name in this form.
    pub(super) fn names(self, take: &mut impl FnMut(&'static str)) {
        match self {
            Self::Named(name) => take(name),
            Self::List(of) | Self::Map(of) => of.names(take),
            Self::Either(kinds) => kinds.iter().for_each(|kind| kind.names(take)),
            _ => {}
        }
    }
}
