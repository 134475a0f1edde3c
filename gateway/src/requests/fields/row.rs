//! The parts of a row of the table of fields.

/// The endpoints whose bodies the table describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    Chat,
    Completions,
    Responses,
    Messages,
    Embeddings,
    Rerank,
    Score,
    Classify,
}

/// The endpoints that generate text.
pub const GENERATING: &[Door] = &[Door::Chat, Door::Completions, Door::Responses, Door::Messages];

impl Door {
    pub const ALL: [Self; 8] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Messages, Self::Embeddings, Self::Rerank, Self::Score, Self::Classify];

    /// The name in the documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Classify => "classify",
        }
    }
}

/// The fate of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Read,
    /// Another name of a field or value, in Markdown.
    As(&'static str),
    /// Not accepted, besides the values in `unless` (with spaces between them), which say what is so anyway.
    Refused {
        unless: &'static str,
        instead: &'static str,
    },
    /// Passed over, for this reason.
    Harmless(&'static str),
}

#[derive(Debug)]
pub struct Row {
    pub name: &'static str,
    /// The API whose documentation has it first.
    pub of: &'static str,
    pub doors: &'static [Door],
    pub fate: Fate,
}

pub(super) const fn read(name: &'static str, of: &'static str, doors: &'static [Door]) -> Row {
    Row { name, of, doors, fate: Fate::Read }
}

pub(super) const fn same(name: &'static str, of: &'static str, doors: &'static [Door], other: &'static str) -> Row {
    Row { name, of, doors, fate: Fate::As(other) }
}

pub(super) const fn refused(
    name: &'static str,
    of: &'static str,
    doors: &'static [Door],
    unless: &'static str,
    instead: &'static str,
) -> Row {
    Row { name, of, doors, fate: Fate::Refused { unless, instead } }
}

pub(super) const fn harmless(name: &'static str, of: &'static str, doors: &'static [Door], why: &'static str) -> Row {
    Row { name, of, doors, fate: Fate::Harmless(why) }
}
