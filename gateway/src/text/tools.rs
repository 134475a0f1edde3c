//! How models write calls: one format per family, told from the chat template's own text.
//!
//! - `frame`: where calls begin and end in an answer; what becomes of those that are none
//! - `json_call`, `named_call`, `xml_call`, `python_call`: one call's own notation
//! - [`grammar`]: grammars that force calls
//! - `hermes`, `llama_json`, `pythonic`, `qwen_coder`, `mistral`, `plain`: the formats, as data

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

use super::{output::Events, template::ChatTemplate};
use crate::dialog::Tool;
use std::{fmt, sync::Arc};

/// A way to write calls. Data; the notation of a single call is its reader's.
#[derive(Debug)]
pub struct ToolFormat {
    pub name: &'static str,
    /// A template teaches this format if it contains every text of one of these lists.
    signs: &'static [&'static [&'static str]],
    /// Marks before a call, anywhere in the answer.
    begins: &'static [&'static str],
    /// Marks that are a call's own beginning.
    opens: &'static [&'static str],
    /// A call without a mark may begin the whole answer, with this character. Then it must be of a known name.
    bare: Option<char>,
    /// `[` opens a list of calls.
    lists: bool,
    /// Follow the last call, in this order, each perhaps missing. `]` of a list comes before them.
    ends: &'static [&'static str],
    /// Stand between calls of a list, or of a row without marks.
    separators: &'static [char],
    /// Marks inside a call.
    inner: &'static [&'static str],
    /// Whether another call may begin so, without a mark of its own.
    again: fn(char) -> bool,
    /// For a call that begins with this character.
    reader: fn(char, &Names) -> Box<dyn Reader>,
    script: Script,
}

/// How the model itself writes calls, as a grammar forces them.
#[derive(Debug)]
struct Script {
    /// Before the first call, between two, after the last.
    begin: &'static str,
    join: &'static str,
    end: &'static str,
    call: Call,
}

#[derive(Debug)]
enum Call {
    /// Text before the name, between it and the arguments' JSON, after them.
    Around { before: &'static str, between: &'static str, after: &'static str },
    /// `f(a=1)`.
    Python,
    /// `<function=f>…</function>` between these.
    Tags { before: &'static str, after: &'static str },
}

/// In this order: the first whose signs a template shows.
const FORMATS: [&ToolFormat; 6] =
    [&qwen_coder::FORMAT, &hermes::FORMAT, &mistral::NAMED, &mistral::LIST, &pythonic::FORMAT, &llama_json::FORMAT];

impl ToolFormat {
    /// The format that this template teaches.
    pub fn of(template: &ChatTemplate) -> Option<&'static Self> {
        let taught = |format: &&Self| format.signs.iter().any(|signs| signs.iter().all(|sign| template.mentions(sign)));
        // Templates with these have another notation inside the same marks (GLM's).
        FORMATS.into_iter().find(taught).filter(|_| !template.mentions("<arg_key>"))
    }

    /// Where a model has no format of its own, and must call all the same.
    pub fn plain() -> &'static Self {
        &plain::FORMAT
    }
}

/// A request's calls, and how the model writes them.
#[derive(Clone, Debug)]
pub struct Calls {
    pub format: &'static ToolFormat,
    pub tools: Arc<[Tool]>,
    /// More than one call counts.
    pub parallel: bool,
    /// The answer is nothing but calls, and so many at most; `None`: it may be text, and as many as the model likes.
    pub forced_most: Option<u32>,
}

impl Calls {
    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> {
        let ToolFormat { begins, opens, ends, inner, .. } = self.format;
        [begins, opens, ends, inner].into_iter().flat_map(|marks| marks.iter().copied())
    }
}

/// What a call may be named.
#[derive(Clone, Debug)]
struct Names {
    tools: Arc<[Tool]>,
    /// Another name makes a text of it. Where a mark shows that a call is meant, its client learns of a wrong name.
    known_only: bool,
}

impl Names {
    fn allow(&self, name: &str) -> bool {
        !name.is_empty() && (!self.known_only || self.tools.iter().any(|tool| tool.name == name))
    }

    /// The schema of a tool's parameter, if it says anything.
    fn parameter(&self, tool: &str, parameter: &str) -> Option<&serde_json::Value> {
        let tool = self.tools.iter().find(|known| known.name == tool)?;
        tool.parameters.as_ref()?.get("properties")?.get(parameter)
    }
}

/// Reads one call, one character at a time. It says the call's name when nothing can make a text of it any more.
trait Reader: fmt::Debug + Send {
    fn step(&mut self, c: char, events: &mut Events) -> Step;
    /// Whether the name was said.
    fn said(&self) -> bool;
    /// No more text comes.
    fn finish(&mut self, _events: &mut Events) {}
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    More,
    /// The call ended with this character.
    Done,
    /// This character, and these before it, are not the call's. If its name was said, the call ended before them.
    Refused(String),
}

impl Step {
    fn refused() -> Self {
        Self::Refused(String::new())
    }
}
