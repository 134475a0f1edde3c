//! A template as it comes, what it is given, and how it fails.

use crate::text::config::ModelConfig;
use minijinja::Value;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The most bytes of a prompt: more than those of the longest context.
pub const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// A template as its model's author has written it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TemplateText {
    pub(super) source: String,
    /// The special tokens that it may use, by the names of their variables.
    pub(super) specials: Vec<(String, String)>,
}

impl TemplateText {
    pub(super) fn new(source: String, config: &ModelConfig) -> Self {
        let specials = [
            ("bos_token", &config.bos_token),
            ("eos_token", &config.eos_token),
            ("unk_token", &config.unk_token),
            ("pad_token", &config.pad_token),
        ];
        let specials = specials.into_iter().filter_map(|(name, token)| Some((name.to_owned(), token.clone()?))).collect();
        Self { source, specials }
    }
}

/// The input of a template.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ChatInput {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    pub add_generation_prompt: bool,
    /// More variables: the request's `chat_template_kwargs`.
    pub kwargs: BTreeMap<String, Value>,
}

/// An error of a template: it does not compile, refuses these messages, or is not rendered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum TemplateError {
    #[error("chat template: {0}")]
    Refused(String),
    #[error("chat template: rendering these messages takes too long")]
    TooLong,
    /// It has reached a limit of its process, or its prompt has.
    #[error(
        "chat template: rendering these messages takes too much time or memory, or makes too long a prompt; if shorter ones do, too, the model's template is broken"
    )]
    TooMuch,
    /// Nothing is known about the template, and the same may be asked again.
    #[error("chat template: it cannot be rendered at the moment ({0})")]
    Unavailable(String),
}

impl TemplateError {
    /// Whether the error is about the messages' form, rather than their number or the process.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }
}
