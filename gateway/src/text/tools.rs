//! The notations of calls: one format per family, detected in the chat template's text.
//!
//! - [`format`](mod@format): a notation of calls, as data, and its reader
//! - `frame`: the start and end of calls in an answer, and text that only resembles a call
//! - `json_call`, `named_call`, `xml_call`, `python_call`: the notation of a single call
//! - [`grammar`]: grammars that force calls; `arguments`: the arguments in them where they are no JSON object
//! - `hermes`, `llama_json`, `pythonic`, `qwen_coder`, `mistral`, `plain`: the formats, as data

mod arguments;
pub mod format;
pub(super) mod frame;
pub mod grammar;
mod hermes;
mod json;
mod json_call;
mod llama_json;
mod mistral;
mod named_call;
mod plain;
mod python_call;
mod pythonic;
mod qwen_coder;
#[cfg(test)]
mod tests;
mod xml_call;

use super::template::ChatTemplate;
use crate::text::tool::Tool;
use format::{Call, ToolFormat};
use std::sync::Arc;
use tidemill_grammar::schema::outline::Arguments;

/// All formats that templates teach. The first one whose signs appear in a template is its format.
const FORMATS: [&ToolFormat; 6] =
    [&qwen_coder::FORMAT, &hermes::FORMAT, &mistral::NAMED, &mistral::LIST, &pythonic::FORMAT, &llama_json::FORMAT];

impl ToolFormat {
    /// Returns the format that this template teaches.
    pub fn of(template: &ChatTemplate) -> Option<&'static Self> {
        let taught = |format: &&Self| format.signs.iter().any(|signs| signs.iter().all(|sign| template.mentions(sign)));
        // Templates with these have a different notation inside the same marks (GLM's).
        FORMATS.into_iter().find(taught).filter(|_| !template.mentions("<arg_key>"))
    }

    /// Returns the format for models that have none of their own but must call.
    pub fn plain() -> &'static Self {
        &plain::FORMAT
    }
}

/// A request's tools, and the model's notation of calls.
#[derive(Clone, Debug)]
pub struct Calls {
    pub format: &'static ToolFormat,
    pub tools: Arc<[Tool]>,
    /// The arguments of each tool, where the notation does not tell strings from other values; else empty.
    pub(super) arguments: Arc<[Arguments]>,
    /// Whether more than one call is allowed.
    pub parallel: bool,
    /// The maximum number of calls in an answer that must consist of calls; `None` if it may be text, with any number.
    pub forced_most: Option<u32>,
}

impl Calls {
    pub fn new(format: &'static ToolFormat, tools: &[Tool], parallel: bool, forced_most: Option<u32>) -> Self {
        let arguments = |tool: &Tool| tool.parameters.as_ref().map(Arguments::of).unwrap_or_default();
        let arguments = match format.script.call {
            Call::Tags { .. } => tools.iter().map(arguments).collect(),
            Call::Around { .. } | Call::Python => Arc::default(),
        };
        Self { format, tools: tools.into(), arguments, parallel, forced_most }
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> {
        let ToolFormat { begins, opens, ends, inner, .. } = self.format;
        [begins, opens, ends, inner].into_iter().flat_map(|marks| marks.iter().copied())
    }
}
