//! A way to write calls, as data, and what reads a single call.

use crate::text::{events::Events, tool::Tool};
use std::{convert, fmt, sync::Arc};

/// A way to write calls. Data; the notation of a single call is its reader's.
#[derive(Debug)]
pub struct ToolFormat {
    pub name: &'static str,
    /// A template teaches this format if it contains every text of one of these lists.
    pub(super) signs: &'static [&'static [&'static str]],
    /// Marks before a call, anywhere in the answer.
    pub(super) begins: &'static [&'static str],
    /// Marks that are a call's own beginning.
    pub(super) opens: &'static [&'static str],
    /// A call without a mark may begin the whole answer, with this character. Then it must be of a known name.
    pub(super) bare: Option<char>,
    /// `[` opens a list of calls.
    pub(super) lists: bool,
    /// Follow the last call, in this order, each perhaps missing. `]` of a list comes before them.
    pub(super) ends: &'static [&'static str],
    /// Stand between calls of a list, or of a row without marks.
    pub(super) separators: &'static [char],
    /// Marks inside a call.
    pub(super) inner: &'static [&'static str],
    /// Whether another call may begin so, without a mark of its own.
    pub(super) again: fn(char) -> bool,
    /// For a call that begins with this character.
    pub(super) reader: fn(char, &Names) -> Box<dyn Reader>,
    pub(super) script: Script,
}

/// How the model itself writes calls, as a grammar forces them.
#[derive(Debug)]
pub(super) struct Script {
    /// Before the first call, between two, after the last.
    pub(super) begin: &'static str,
    pub(super) join: &'static str,
    pub(super) end: &'static str,
    pub(super) call: Call,
}

#[derive(Debug)]
pub(super) enum Call {
    /// Text before the name, between it and the arguments' JSON, after them.
    Around { before: &'static str, between: &'static str, after: &'static str },
    /// `f(a=1)`.
    Python,
    /// `<function=f>…</function>` between these.
    Tags { before: &'static str, after: &'static str },
}

/// The names that a call may have.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) tools: Arc<[Tool]>,
    /// Another name makes a text of it. Where a mark shows that a call is meant, its client learns of a wrong name.
    pub(super) known_only: bool,
}

impl Names {
    pub(super) fn allow(&self, name: &str) -> bool {
        !name.is_empty() && (!self.known_only || self.tools.iter().any(|tool| tool.name == name))
    }

    /// The schema of a tool's parameter, if it says anything.
    pub(super) fn parameter(&self, tool: &str, parameter: &str) -> Option<&serde_json::Value> {
        let tool = self.tools.iter().find(|known| known.name == tool)?;
        tool.parameters.as_ref()?.get("properties")?.get(parameter)
    }
}

/// Reads one call, one character at a time. It says the call's name when nothing can make a text of it any more.
pub(super) trait Reader: fmt::Debug + Send {
    fn step(&mut self, c: char, events: &mut Events) -> Step;
    /// Whether the name was said.
    fn said(&self) -> bool;
    /// No more text comes.
    fn finish(&mut self, _events: &mut Events) {}
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The call ended with this character.
    Done,
    /// This character, and these before it, are not the call's. If its name was said, the call ended before them.
    Refused(String),
}

impl Step {
    /// Enters the next state, if there is one.
    pub(super) fn into<S>(state: &mut S, next: Result<S, Self>) -> Self {
        next.map_or_else(convert::identity, |next| {
            *state = next;
            Self::More
        })
    }

    pub(super) fn refused() -> Self {
        Self::Refused(String::new())
    }
}
