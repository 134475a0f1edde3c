//! A notation of calls, as data, and the reader of a single call.

use crate::text::{events::Events, tool::Tool};
use std::{convert, fmt, sync::Arc};
use tidemill_grammar::schema::outline::{Arguments, Outline};

/// A notation of calls, as data. The notation of a single call is left to its reader.
#[derive(Debug)]
pub struct ToolFormat {
    pub name: &'static str,
    /// A template teaches this format if it contains every text of one of these lists.
    pub(super) signs: &'static [&'static [&'static str]],
    /// Marks before a call, anywhere in the answer.
    pub(super) begins: &'static [&'static str],
    /// Marks that are part of the call themselves.
    pub(super) opens: &'static [&'static str],
    /// The first character of a call without a mark, which may form the whole answer. Then its name must be known.
    pub(super) bare: Option<char>,
    /// Whether `[` opens a list of calls.
    pub(super) lists: bool,
    /// Marks after the last call, in this order, each optional. `]` of a list comes before them.
    pub(super) ends: &'static [&'static str],
    /// Separators between calls of a list, or of a sequence without marks.
    pub(super) separators: &'static [char],
    /// Marks inside a call.
    pub(super) inner: &'static [&'static str],
    /// Whether a further call may start with this character, without a mark of its own.
    pub(super) again: fn(char) -> bool,
    /// Creates the reader of a call that starts with this character.
    pub(super) reader: fn(char, &Names) -> Box<dyn Reader>,
    pub(super) script: Script,
}

/// The model's own notation, as a grammar forces it.
#[derive(Debug)]
pub(super) struct Script {
    /// The text before the first call, between two calls, and after the last.
    pub(super) begin: &'static str,
    pub(super) join: &'static str,
    pub(super) end: &'static str,
    pub(super) call: Call,
}

#[derive(Debug)]
pub(super) enum Call {
    /// Text before the name, between it and the arguments' JSON, and after these.
    Around { before: &'static str, between: &'static str, after: &'static str },
    /// `f(a=1)`.
    Python,
    /// `<function=f>…</function>` between these texts.
    Tags { before: &'static str, after: &'static str },
}

/// The names that a call may have.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) tools: Arc<[Tool]>,
    /// The arguments of each tool, where the notation does not tell strings from other values.
    pub(super) arguments: Arc<[Arguments]>,
    /// Whether a call with an unknown name is text. After a mark, which shows that a call is meant, the client gets the wrong name.
    pub(super) known_only: bool,
}

impl Names {
    pub(super) fn allow(&self, name: &str) -> bool {
        !name.is_empty() && (!self.known_only || self.tools.iter().any(|tool| tool.name == name))
    }

    /// The values of a tool's parameter.
    pub(super) fn values(&self, tool: &str, parameter: &str) -> &Outline {
        let tool = self.tools.iter().position(|known| known.name == tool);
        let parameter = tool.and_then(|tool| self.arguments.get(tool)?.parameter(parameter));
        parameter.map_or(&Outline::ANY, |parameter| &parameter.values)
    }
}

/// Reads a call, one character at a time. It emits the call's name once the text can no longer turn out to be anything else.
pub(super) trait Reader: fmt::Debug + Send {
    fn step(&mut self, c: char, events: &mut Events) -> Step;
    /// Whether the name was emitted.
    fn said(&self) -> bool;
    /// Ends the text.
    fn finish(&mut self, _events: &mut Events) {}
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The call ended with this character.
    Done,
    /// This character, and these before it, do not belong to the call. If its name was emitted, the call ended before them.
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
