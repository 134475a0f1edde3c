//! Calls in an answer. Text that turns out not to be a call stays text, to the last character; white space beside calls is dropped. In an
//! answer that was cut, an incomplete call is dropped as well.
//!
//! ```text
//!            mark                    first character              last character
//!   Text ───────────► Opening ───────────────────────► Reading ───────────────────► After ───► Text
//!     ▲                  └───────────── refused ──────────┘                           │
//!     └───── text ───────────────────────────┘                    another ◄───────────┘
//! ```

use super::{
    super::{marker::MarkerWatch, reasoning::is_begun},
    Calls,
};
use crate::text::{
    events::Events,
    tools::format::{Names, Reader, Step},
};
use std::sync::Arc;

/// The maximum white space before a call's first character, or between two calls: more does not belong to a format.
const SPACE_MAX: usize = 256;

#[derive(Debug)]
pub(in super::super) struct Frame {
    calls: Calls,
    watch: MarkerWatch,
    state: State,
    /// Whether the answer so far is only white space.
    first: bool,
    /// Whether a call came last, apart from white space.
    called: bool,
    /// White space that may turn out to be beside a call.
    space: String,
}

#[derive(Debug)]
enum State {
    Text,
    /// After a mark. `raw` has the characters that are text if this is not a call.
    Opening {
        raw: String,
        row: Row,
    },
    Reading {
        raw: String,
        row: Row,
        reader: Box<dyn Reader>,
    },
    /// After a call. `held` has characters that may still belong to the format.
    After {
        held: String,
        row: Row,
        end: usize,
        separated: bool,
    },
}

/// The start of consecutive calls.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// Whether they started with `[`.
    list: bool,
    /// Whether they started without a mark: then only known names are calls.
    bare: bool,
}

impl Frame {
    pub(in super::super) fn new(calls: Calls) -> Self {
        let watch = MarkerWatch::new(calls.format.begins.iter().chain(calls.format.opens).copied());
        Self { calls, watch, state: State::Text, first: true, called: false, space: String::new() }
    }

    pub(in super::super) fn step(&mut self, c: char, events: &mut Events) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.text(c, events),
            State::Opening { raw, row } => self.opening(c, raw, row, events),
            State::Reading { raw, row, reader } => self.reading(c, raw, row, reader, events),
            State::After { held, row, end, separated } => self.after(c, held, row, end, separated, events),
        }
    }

    /// Counts the characters that are held back and may be text.
    pub(in super::super) fn held(&self) -> usize {
        match &self.state {
            State::Text => self.space.chars().count() + self.watch.held(),
            State::Reading { reader, .. } if reader.said() => 0,
            State::Opening { raw, .. } | State::Reading { raw, .. } => raw.chars().count(),
            State::After { held, .. } => held.chars().count(),
        }
    }

    pub(in super::super) fn finish(&mut self, cut: bool, events: &mut Events) {
        // If the answer must consist of calls, the rest belongs to none.
        let forced = self.calls.forced_most.is_some();
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => {
                let held = self.watch.finish();
                if forced || cut && is_begun(&held) {
                    return;
                }
                if !(self.called && held.is_empty()) {
                    events.text(&std::mem::take(&mut self.space));
                }
                events.text(&held);
            }
            State::Reading { mut reader, .. } if reader.said() => reader.finish(events),
            State::Opening { raw, row } | State::Reading { raw, row, .. } => {
                // Without a mark, the JSON may be meant for the client.
                let begun = !row.bare || raw.contains("\"name\"");
                if !(forced || cut && begun) {
                    events.text(&raw);
                }
            }
            State::After { .. } if forced || cut => {}
            State::After { held, .. } if held.trim().is_empty() => {}
            State::After { held, .. } => events.text(&held),
        }
    }

    fn text(&mut self, c: char, events: &mut Events) {
        // The beginning of a possible mark counts as the first character.
        if self.first && !self.watch.is_holding() && Some(c) == self.calls.format.bare {
            let raw = std::mem::take(&mut self.space);
            self.first = false;
            return self.opening(c, raw, Row { list: false, bare: true }, events);
        }
        let Self { watch, first, called, space, .. } = self;
        let mark = watch.step(c, |c| {
            space.push(c);
            if !c.is_whitespace() {
                (*first, *called) = (false, false);
                events.text(space);
                space.clear();
            }
        });
        let Some(mark) = mark else { return };
        self.first = false;
        let raw = std::mem::take(&mut self.space);
        if self.calls.format.opens.contains(&mark) {
            self.state = State::Opening { raw, row: Row::default() };
            mark.chars().for_each(|c| self.step(c, events));
        } else {
            self.state = State::Opening { raw: raw + mark, row: Row::default() };
        }
    }

    fn opening(&mut self, c: char, mut raw: String, row: Row, events: &mut Events) {
        if c.is_whitespace() && raw.len() < SPACE_MAX {
            raw.push(c);
            self.state = State::Opening { raw, row };
        } else if c == '[' && self.calls.format.lists && !row.list {
            raw.push(c);
            self.state = State::Opening { raw, row: Row { list: true, ..row } };
        } else {
            let (tools, arguments) = (Arc::clone(&self.calls.tools), Arc::clone(&self.calls.arguments));
            let reader = (self.calls.format.reader)(c, &Names { tools, arguments, known_only: row.bare });
            self.reading(c, raw, row, reader, events);
        }
    }

    fn reading(&mut self, c: char, mut raw: String, row: Row, mut reader: Box<dyn Reader>, events: &mut Events) {
        let step = reader.step(c, events);
        // Once its name is emitted it is a call, whatever follows.
        self.called = reader.said();
        let after = State::After { held: String::new(), row, end: 0, separated: false };
        match step {
            Step::More => {
                if reader.said() {
                    raw.clear();
                } else {
                    raw.push(c);
                }
                self.state = State::Reading { raw, row, reader };
            }
            Step::Done => self.state = after,
            Step::Refused(before) if reader.said() => {
                self.state = after;
                before.chars().chain([c]).for_each(|c| self.step(c, events));
            }
            Step::Refused(_) => {
                events.text(&raw);
                self.step(c, events);
            }
        }
    }

    fn after(&mut self, c: char, mut held: String, row: Row, end: usize, separated: bool, events: &mut Events) {
        let format = self.calls.format;
        let end_mark = |end: usize| match (row.list, end) {
            (true, 0) => Some("]"),
            (list, end) => format.ends.get(end - usize::from(list)).copied(),
        };
        let partial = held.trim_start_matches(|c: char| c.is_whitespace() || format.separators.contains(&c)).to_owned();
        if partial.is_empty() {
            if c.is_whitespace() && held.len() < SPACE_MAX {
                held.push(c);
                self.state = State::After { held, row, end, separated };
                return;
            }
            if end == 0 && !separated && format.separators.contains(&c) {
                held.push(c);
                self.state = State::After { held, row, end, separated: true };
                return;
            }
            if end == 0 && (separated || !row.list) && (format.again)(c) {
                return self.opening(c, held, row, events);
            }
        }
        let candidate = partial + c.encode_utf8(&mut [0; 4]);
        let ends = (end..).map_while(|end| Some((end, end_mark(end)?)));
        match ends.into_iter().find(|(_, mark)| mark.starts_with(&candidate)) {
            Some((end, mark)) if mark == candidate => {
                self.state = match end_mark(end + 1) {
                    Some(_) => State::After { held: String::new(), row, end: end + 1, separated: false },
                    None => State::Text,
                }
            }
            Some(_) => {
                held.push(c);
                self.state = State::After { held, row, end, separated };
            }
            None => {
                held.chars().for_each(|c| self.text(c, events));
                self.step(c, events);
            }
        }
    }
}
