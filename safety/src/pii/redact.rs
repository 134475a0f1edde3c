//! Findings replaced by their kinds, `[EMAIL]`: in a whole text, or in one that still arrives. In the latter, only the part that may become
//! a finding is held back.

use super::{
    Kind,
    find::{BEFORE_BYTES, Finder},
};
use std::sync::Arc;

/// The text with its findings masked.
pub fn masked(finder: &Finder, text: &str) -> String {
    replaced(text, &finder.find(text).iter().map(|found| (found.start, found.end, mask(found.kind))).collect::<Vec<_>>())
}

fn mask(kind: Kind) -> String {
    format!("[{}]", kind.label())
}

/// The text with the given parts replaced. Parts are in order, each with its start, end and replacement.
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
    /// The end of the released text, before replacement.
    before: String,
    /// The text that is not released yet.
    held: String,
    /// Kinds replaced since the last call of [`Stream::take_found`].
    found: Vec<Kind>,
}

impl Stream {
    pub fn new(finder: Arc<Finder>) -> Self {
        Self { finder, before: String::new(), held: String::new(), found: Vec::new() }
    }

    /// Adds text. Returns the text that is released.
    pub fn push(&mut self, text: &str) -> String {
        self.held += text;
        if text.is_empty() { String::new() } else { self.release(false) }
    }

    /// Ends the text, and releases the rest.
    pub fn finish(&mut self) -> String {
        self.release(true)
    }

    /// The number of bytes held back.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Returns the kinds that were replaced since the last call.
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
