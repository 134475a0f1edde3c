//! The grammar that the text of a sequence must follow. The gateway compiles it before it admits a request; the decode worker compiles it
//! again and samples only tokens that the grammar allows.

use crate::block::Token;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A grammar in one of llguidance's three notations. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grammar {
    /// JSON text that conforms to this schema.
    JsonSchema(#[serde(with = "shared")] Arc<str>),
    /// Text that this regular expression matches as a whole.
    Regex(#[serde(with = "shared")] Arc<str>),
    /// llguidance's dialect of Lark: `%json {…}` embeds a schema, `<|name|>` and `<[id]>` are special tokens.
    Lark(#[serde(with = "shared")] Arc<str>),
}

impl Grammar {
    pub fn text(&self) -> &str {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text,
        }
    }
}

/// A grammar, and the tokens that end a sequence under it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constraint {
    pub grammar: Grammar,
    /// The model's end-of-sequence ids: allowed where the text may end, and the only tokens allowed where it must. All of them are stop
    /// tokens of the sequence, even if the client wants end-of-sequence ignored.
    pub end_tokens: Vec<Token>,
    /// Whether the client wants end-of-sequence ignored: these tokens are then sampled only where the grammar allows no other token.
    pub ends_late: bool,
}

/// Serializes the grammar as a plain string.
mod shared {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::sync::Arc;

    pub(super) fn serialize<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Arc::from)
    }
}
