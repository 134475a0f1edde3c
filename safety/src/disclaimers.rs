//! Disclaimers appended to answers about medicine, law and similar subjects: once, at the end.

use crate::{
    normal::Normal,
    patterns::{Begins, PatternError, Patterns, places},
};
use std::sync::Arc;

#[derive(Debug)]
pub struct Disclaimer {
    pub name: String,
    /// Patterns of the answers that need the disclaimer. One match is enough.
    pub patterns: Patterns<()>,
    pub text: String,
}

impl Disclaimer {
    /// `patterns` are lines of a pattern list, without categories.
    pub fn new(name: String, patterns: &[String], text: String) -> Result<Self, PatternError> {
        Ok(Self { name, patterns: Patterns::plain(patterns)?, text })
    }
}

/// The text of one answer as it arrives. It keeps only the part that may be the start of a match.
#[derive(Debug)]
pub struct Reading {
    /// Disclaimers that are not due yet, and those that are.
    open: Vec<Watch>,
    due: Vec<usize>,
    all: Arc<[Disclaimer]>,
}

#[derive(Debug)]
struct Watch {
    place: usize,
    normal: Normal,
    /// The length of the text that `normal` represents.
    bytes: usize,
    /// The byte before `normal`, in normal form.
    before: Option<u8>,
}

impl Reading {
    pub fn new(all: Arc<[Disclaimer]>) -> Self {
        let open = (0..all.len()).map(|place| Watch { place, normal: Normal::default(), bytes: 0, before: None }).collect();
        Self { open, due: Vec::new(), all }
    }

    /// Adds text of the answer.
    pub fn push(&mut self, text: &str) {
        self.read(text, false);
    }

    /// Ends the answer. Returns the disclaimers that are due, in the operator's order.
    pub fn finish(&mut self) -> Vec<&Disclaimer> {
        self.read("", true);
        self.open.clear();
        self.due.sort_unstable();
        self.due.iter().map(|place| &self.all[*place]).collect()
    }

    fn read(&mut self, text: &str, ended: bool) {
        let Self { open, due, all } = self;
        open.retain_mut(|watch| {
            let is_due = watch.read(&all[watch.place].patterns, text, ended);
            due.extend(is_due.then_some(watch.place));
            !is_due
        });
    }
}

impl Watch {
    /// Whether there is a match.
    fn read(&mut self, patterns: &Patterns<()>, text: &str, ended: bool) -> bool {
        self.normal.push(text, self.bytes, self.before);
        self.bytes += text.len();
        let bytes = self.normal.bytes();
        let mut keep = bytes.len();
        for place in places(bytes, self.before) {
            match patterns.begins(bytes, place, self.before, ended) {
                Begins::Match(()) => return true,
                Begins::Perhaps => keep = keep.min(place),
                Begins::Nothing => {}
            }
        }
        // Characters are not split.
        let end = self.normal.origin(keep, self.bytes);
        let last = (0..bytes.len()).rev().find(|byte| self.normal.origin(*byte, self.bytes) < end);
        self.before = last.map(|byte| bytes[byte]).or(self.before);
        self.normal.forget_before(end);
        self.bytes -= end;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> Arc<[Disclaimer]> {
        let of = |name: &str, patterns: &[&str]| {
            let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            Disclaimer::new(name.into(), &patterns, format!("Not {name}.")).unwrap()
        };
        [of("medical", &["side effects", r"re: \d{1,4} ?mg"]), of("legal", &["side effects", "sue"])].into()
    }

    fn due(pieces: &[&str]) -> Vec<String> {
        let mut reading = Reading::new(all());
        pieces.iter().for_each(|piece| reading.push(piece));
        reading.finish().into_iter().map(|disclaimer| disclaimer.name.clone()).collect()
    }

    #[test]
    fn each_is_due_once_however_the_answer_is_cut() {
        assert_eq!(due(&["Take 20", "0", " m", "g."]), ["medical"]);
        assert_eq!(due(&["You may SUE, and sue again"]), ["legal"]);
        assert_eq!(due(&["S\u{ed}de", " ", " effects, then s", "ue"]), ["medical", "legal"]);
        for harmless in [&["a tissue", " "][..], &["su", "ede"], &["200 m"], &[]] {
            assert_eq!(due(harmless), [""; 0]);
        }
    }

    #[test]
    fn a_wrong_pattern_is_named_by_its_line() {
        let patterns = ["fine".to_owned(), "re: a.*b".into()];
        assert!(Disclaimer::new("x".into(), &patterns, "y".into()).unwrap_err().to_string().contains("line 2"));
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(text in "[ sue12mg\u{200b}\u{e9}]{0,24}", cut in any::<prop::sample::Index>()) {
            let at = text.floor_char_boundary(cut.index(text.len() + 1));
            let whole: Vec<String> = all().iter().filter(|one| one.patterns.find(Normal::of(&text).bytes()).is_some()).map(|one| one.name.clone()).collect();
            prop_assert_eq!(due(&[&text[..at], &text[at..]]), whole);
        }
    }
}
