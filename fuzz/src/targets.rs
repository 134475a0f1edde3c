//! All targets.
//!
//! - [`frames`]: messages of peers, as bytes; [`members`]: well-formed messages without sense, to running processes; [`registry`]: messages
//!   between coordinators, and their disks
//! - [`endpoints`]: requests of clients and of operators, to a coordinator with a worker behind it; [`forms`]: forms in any pieces
//! - [`regions`], [`provider`]: answers of another region, and of an identity provider, by the server in [`answers`]
//! - [`grammars`]: schemas, expressions and grammars, through the helper that judges them
//! - [`templates`], [`bombs`], [`tokenizers`], [`checkpoints`], [`gguf`]: a model's files; [`settings`]: files of operators; [`disk`]: files in data
//!   directories
//!
//! [`tree`] is the source of seeds: this repository's own fixtures.

mod answers;
mod bombs;
mod checkpoints;
mod disk;
mod endpoints;
mod forms;
mod frames;
mod gguf;
mod grammars;
mod members;
mod provider;
mod regions;
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
    &forms::FORMS,
    &regions::REGIONS,
    &provider::PROVIDER,
    &grammars::SCHEMAS,
    &grammars::EXPRESSIONS,
    &grammars::GRAMMARS,
    &templates::TEMPLATES,
    &bombs::BOMBS,
    &tokenizers::TOKENIZERS,
    &checkpoints::CHECKPOINTS,
    &gguf::GGUF,
    &settings::SETTINGS,
    &disk::DISK,
];
