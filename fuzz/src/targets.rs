//! Everything that is fuzzed.
//!
//! - [`frames`]: messages of peers, as bytes; [`members`]: well-formed messages that make no sense, to processes that run; [`registry`]: what
//!   coordinators tell each other, and what they find on disk
//! - [`endpoints`]: requests of clients and of operators, to a coordinator with a worker behind it
//! - [`grammars`]: schemas, expressions and grammars, through the helper that judges them
//! - [`templates`], [`tokenizers`], [`checkpoints`], [`gguf`]: a model's files; [`settings`]: files of operators; [`disk`]: what is found in data
//!   directories
//!
//! [`tree`] is where seeds come from: this repository's own fixtures.

mod checkpoints;
mod disk;
mod endpoints;
mod frames;
mod gguf;
mod grammars;
mod members;
mod registry;
mod settings;
mod templates;
mod tokenizers;
mod tree;

use crate::target::Target;

pub(crate) const ALL: &[&Target] = &[
    &frames::FRAMES,
    &registry::REGISTRY,
    &members::MEMBERS,
    &endpoints::ENDPOINTS,
    &endpoints::OPERATORS,
    &grammars::SCHEMAS,
    &grammars::EXPRESSIONS,
    &grammars::GRAMMARS,
    &templates::TEMPLATES,
    &tokenizers::TOKENIZERS,
    &checkpoints::CHECKPOINTS,
    &gguf::GGUF,
    &settings::SETTINGS,
    &disk::DISK,
];
