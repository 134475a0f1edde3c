//! What the text of a sequence must follow. The front door has compiled the grammar before it admits a request; the decode worker
//! compiles it again and lets only tokens be drawn that keep to it.

use crate::block::Token;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A grammar in one of llguidance's three notations. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grammar {
    /// JSON text that this schema describes.
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
    /// The model's end-of-sequence ids: they may be drawn where the grammar may end, and only these are left where it must. All of them
    /// are stop tokens of the sequence, even if the client wants them ignored.
    pub end_tokens: Vec<Token>,
    /// The client wants them ignored: they are drawn only where the grammar leaves nothing else.
    pub ends_late: bool,
}

/// On the wire it is a string and nothing else.
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
