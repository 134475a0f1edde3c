//! Findings replaced by their kinds, `[EMAIL]`: in a whole text, or in one that still comes. Of that, what may become a finding is held
//! back, and nothing else.

use super::{
    Kind,
    find::{BEFORE_BYTES, Finder},
};
use std::sync::Arc;

/// The text without its findings.
pub fn masked(finder: &Finder, text: &str) -> String {
    replaced(text, &finder.find(text).iter().map(|found| (found.start, found.end, mask(found.kind))).collect::<Vec<_>>())
}

fn mask(kind: Kind) -> String {
    format!("[{}]", kind.label())
}

/// The text with other words from each start to each end, which are in order.
pub(super) fn replaced(text: &str, parts: &[(usize, usize, String)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    for (start, end, instead) in parts {
        out += &text[at..*start];
        out += instead;
        at = *end;
    }
    out + &text[at..]
}

/// One text on its way to a client.
#[derive(Debug)]
pub struct Stream {
    finder: Arc<Finder>,
    /// The end of what was released, as it was before.
    before: String,
    /// Not released yet.
    held: String,
    /// Replaced since somebody asked.
    found: Vec<Kind>,
}

impl Stream {
    pub fn new(finder: Arc<Finder>) -> Self {
        Self { finder, before: String::new(), held: String::new(), found: Vec::new() }
    }

    /// More text; returns what may go on.
    pub fn push(&mut self, text: &str) -> String {
        self.held += text;
        if text.is_empty() { String::new() } else { self.release(false) }
    }

    /// The text ends.
    pub fn finish(&mut self) -> String {
        self.release(true)
    }

    /// Bytes that wait.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// What was replaced since this was asked last.
    pub fn take_found(&mut self) -> Vec<Kind> {
        std::mem::take(&mut self.found)
    }

    fn release(&mut self, ended: bool) -> String {
        let (found, free) = self.finder.find_after(&self.before, &self.held, ended);
        let decided = || found.iter().filter(|found| found.end <= free);
        let parts: Vec<_> = decided().map(|found| (found.start, found.end, mask(found.kind))).collect();
        self.found.extend(decided().map(|found| found.kind));
        let out = replaced(&self.held[..free], &parts);
        self.before += &self.held[..free];
        self.held.drain(..free);
        let forgotten = self.before.ceil_char_boundary(self.before.len().saturating_sub(BEFORE_BYTES));
        self.before.drain(..forgotten);
        out
    }
}
