//! The cascade over an answer as it arrives. Text is released as soon as it can no longer be part of a violation: the possible start of a
//! pattern's match is held back, and text that looks harmful to the classifier as long as its sentence may turn out otherwise.

use crate::{
    category::{Finding, Stage, Thresholds},
    guard::Guard,
    judge::Doubt,
    normal::Normal,
    passages::Passages,
    patterns::{Begins, PATTERN_BYTES_MAX, places},
};
use std::sync::Arc;

/// The length of the released text that an excerpt contains.
const EXCERPT_BYTES: usize = 320;

/// One text on its way to a client.
#[derive(Debug)]
pub struct Stream {
    guard: Arc<Guard>,
    thresholds: Thresholds,
    /// The text that is not released yet.
    held: String,
    /// The same text in normal form.
    normal: Normal,
    /// The end of the text that the patterns have passed, in normal form.
    before: Vec<u8>,
    stopped: bool,
    /// The next stage for text that the patterns have passed, if there is a classifier.
    passages: Option<Box<Passages>>,
}

/// The text that is released to the client, and the violation that ended the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Released {
    pub text: String,
    pub violation: Option<Finding>,
    /// The rest waits for the model's answer to [`Stream::doubt`]: no text may be added until that is settled.
    pub doubted: bool,
}

impl Stream {
    pub fn new(guard: Arc<Guard>, thresholds: Thresholds) -> Self {
        Self::of(guard, thresholds, false)
    }

    /// A stream whose doubts a model settles.
    pub fn with_doubts(guard: Arc<Guard>, thresholds: Thresholds) -> Self {
        Self::of(guard, thresholds, true)
    }

    fn of(guard: Arc<Guard>, thresholds: Thresholds, asks: bool) -> Self {
        let passages = guard.classifier.is_some().then(|| Box::new(Passages::new(Arc::clone(&guard), thresholds, asks)));
        Self { guard, thresholds, held: String::new(), normal: Normal::default(), before: Vec::new(), stopped: false, passages }
    }

    /// Adds text. After a violation, no text is released any more.
    pub fn push(&mut self, text: &str) -> Released {
        self.add(text, false)
    }

    /// Ends the text, and releases the rest.
    pub fn finish(&mut self) -> Released {
        self.add("", true)
    }

    /// The question to the model, if a part was `doubted`.
    pub fn doubt(&self) -> Option<&Doubt> {
        self.passages.as_ref()?.doubt()
    }

    /// Settles the doubt with the model's finding; `None` if the part is harmless.
    pub fn settle(&mut self, found: Option<Finding>) -> Released {
        let released = self.passages.as_mut().map(|passages| passages.settle(found)).unwrap_or_default();
        self.stopped |= released.violation.is_some();
        released
    }

    /// The end of the released text (in normal form if there is no classifier), and the text held back.
    pub fn excerpt(&self) -> String {
        let before =
            self.passages.as_ref().map_or_else(|| String::from_utf8_lossy(&self.before).into_owned(), |passages| passages.excerpt());
        before + &self.held
    }

    /// The number of bytes held back.
    pub fn held_bytes(&self) -> usize {
        self.held.len() + self.passages.as_ref().map_or(0, |passages| passages.held_bytes())
    }

    fn add(&mut self, text: &str, ended: bool) -> Released {
        if self.stopped || (text.is_empty() && !ended) {
            return Released::default();
        }
        self.normal.push(text, self.held.len(), self.before.last().copied());
        self.held += text;
        let bytes = self.normal.bytes();
        let behind = self.before.last().copied();
        // Up to this place, text can be released.
        let (mut free, mut listed) = (bytes.len(), None);
        for place in places(bytes, behind) {
            match self.guard.patterns.begins(bytes, place, behind, ended) {
                Begins::Match(category) if 1.0 >= self.thresholds.of(category).score() => {
                    listed = Some(Finding { category, stage: Stage::Patterns, score: 1.0 });
                    free = free.min(place);
                    break;
                }
                Begins::Perhaps => free = free.min(place),
                Begins::Match(_) | Begins::Nothing => {}
            }
        }
        let end = if free == bytes.len() && listed.is_none() { self.held.len() } else { self.normal.origin(free, self.held.len()) };
        let released = self.held[..end].to_owned();
        self.before.extend_from_slice(&bytes[..free]);
        self.before.drain(..self.before.len().saturating_sub(EXCERPT_BYTES));
        self.held.drain(..end);
        self.normal.forget_before(end);
        self.stopped = listed.is_some();
        debug_assert!(self.normal.bytes().len() <= PATTERN_BYTES_MAX + text.len(), "no pattern is longer");
        let Some(passages) = &mut self.passages else { return Released { text: released, violation: listed, doubted: false } };
        let read = passages.add(&released, listed, ended);
        self.stopped |= read.violation.is_some();
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        category::{Category, Threshold},
        patterns::Patterns,
    };
    use proptest::prelude::*;

    fn guard() -> Arc<Guard> {
        Arc::new(Guard { patterns: Patterns::new(&["[dangerous]\npipe bomb\nre: a .{0,9} trap"]).unwrap(), classifier: None })
    }

    fn stream() -> Stream {
        Stream::new(guard(), Thresholds::OUTPUT)
    }

    #[test]
    fn only_what_may_become_a_match_is_held_back() {
        let mut stream = stream();
        let mut push = |text: &str| stream.push(text).text;
        assert_eq!(push("Hello "), "Hello ");
        assert_eq!([push("the pi"), push("pe"), push("r plays")], ["the ", "", "piper plays"]);
        assert_eq!([push(" a Pipe"), push(" bom"), push("bast.")], [" ", "", "a Pipe bombast."]);
        assert_eq!(stream.held_bytes(), 0);
    }

    #[test]
    fn nothing_of_a_violation_and_nothing_after_it_is_released() {
        let mut stream = stream();
        let pieces = ["This is a P", "ipe\u{200b} ", " B", "o", "mb", ", see"].map(|piece| stream.push(piece));
        let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        // `a … trap` could also begin at the article.
        assert_eq!(text, "This is a ");
        let found = pieces.iter().find_map(|piece| piece.violation).unwrap();
        assert_eq!((found.category, found.stage), (Category::Dangerous, Stage::Patterns));
        assert_eq!([stream.push("more"), stream.finish()], [Released::default(), Released::default()]);
    }

    #[test]
    fn a_match_may_end_with_the_text_and_a_category_may_be_allowed() {
        let mut at_end = stream();
        assert_eq!((at_end.push("pipe bomb").text.as_str(), at_end.finish().violation.is_some()), ("", true));
        let mut thresholds = Thresholds::OUTPUT;
        thresholds.set(Category::Dangerous, Threshold::Off);
        let mut allowed = Stream::new(guard(), thresholds);
        let text = allowed.push("pipe bomb!").text + &allowed.finish().text;
        assert_eq!(text, "pipe bomb!");
    }

    proptest! {
        /// The pieces of a text do not affect the released text: all of it, or the part before the first violation.
        #[test]
        fn pieces_do_not_matter(words in prop::collection::vec(0usize..9, 0..12), cuts in prop::collection::vec(1usize..7, 0..40)) {
            let list = ["pipe", "bomb", " ", "a ", "é", " trap", "日", "pip", "e bomb "];
            let text: String = words.into_iter().map(|word| list[word]).collect();
            let characters: Vec<char> = text.chars().collect();
            let (mut cut, mut rest) = (stream(), &characters[..]);
            let (mut released, mut violation) = (String::new(), None);
            let mut cuts = cuts.into_iter().cycle();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
                let out = cut.push(&piece.iter().collect::<String>());
                released += &out.text;
                violation = violation.or(out.violation);
                rest = after;
            }
            let out = cut.finish();
            released += &out.text;
            violation = violation.or(out.violation);

            let whole = guard().check(&text, &Thresholds::OUTPUT);
            prop_assert_eq!(violation.is_some(), whole.is_some(), "{:?}", text);
            prop_assert!(text.starts_with(&released));
            prop_assert!(whole.is_some() || released == text);
            prop_assert!(guard().check(&released, &Thresholds::OUTPUT).is_none(), "{:?} of {:?}", released, text);
        }
    }
}
