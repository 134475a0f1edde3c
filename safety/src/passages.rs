//! The classifier over a text that arrives piece by piece. A passage that looks harmful is held back to the end of its sentence, of the
//! text, or of its room: "how to kill a" may continue with "process". If it still looks harmful then, it is a violation. With a moderation
//! model, a passage is also held back if the classifier is unsure; then a question about it is put to the model, and the text waits for the
//! answer. A text is read character by character, so that the pieces affect neither the released text nor the questions.
//!
//! ```text
//!    released                             │ held back: the passage         │ comes later
//!   ──────────────────────────────────────┼────────────────────────────────┼────────────
//!    … The tree is old and must stay. The │ zorb is vile and must go.      │ The river …
//!   └────────── context, for the model ───┘                                └─ a new window begins here:
//!                                                                             what was found harmless raises no doubt again
//! ```
//!
//! An opinion changes as text arrives: within a word it does not count, and a doubtful passage may be harmless by the end of its sentence.
//! Then it is released without a question.

use crate::{
    category::{Category, Finding, Thresholds},
    classifier::{Classifier, Growing, Scores, WINDOW_BYTES, is_of_word, take_worse},
    guard::{Guard, worst},
    judge::{BEFORE_BYTES, Doubt, PART_BYTES_MAX, is_doubtful, suspicions},
    normal::{Normal, of_char},
    stream::Released,
};
use std::sync::Arc;

/// The maximum length of a passage in normal form.
const PASSAGE_BYTES_MAX: usize = 768;
/// The maximum length of a passage in its original form, invisible characters included.
const PASSAGE_RAW_BYTES_MAX: usize = 4096;
/// The length of a word after which its end is no longer waited for, as in scripts without spaces.
const WORD_BYTES_MAX: usize = 64;
/// The length of released text that is kept before the oldest part is dropped.
const KEPT_BYTES_MAX: usize = 4 * BEFORE_BYTES;

#[derive(Debug)]
pub(crate) struct Passages {
    guard: Arc<Guard>,
    thresholds: Thresholds,
    /// Whether a model is asked when the classifier is unsure.
    asks: bool,
    /// Text that is not released yet. It has been read up to `read`, and may be released up to `free`.
    held: String,
    free: usize,
    read: usize,
    /// The end of the released text.
    before: String,
    /// The end of the normal form of the text read so far.
    normal: Vec<u8>,
    /// The number of its bytes that are held back.
    unsure: usize,
    /// The number of its bytes that belong to the current word.
    word: usize,
    windows: Windows,
    opinion: Opinion,
    /// The opinion about the held text when its last word ended. Unless it was harmless, that text is a passage.
    passage: Opinion,
    /// The sentence mark that ends the text read so far, apart from quotes or brackets after it.
    mark: Option<char>,
    /// The question about the passage. Until it is settled no more text is read.
    doubt: Option<Doubt>,
    /// Whether the text ends after `held`.
    ended: bool,
    /// The violation that ends the text after `held`.
    violation: Option<Finding>,
    stopped: bool,
}

/// The classifier's opinion about the text read so far.
#[derive(Clone, Copy, Debug)]
enum Opinion {
    Harmless,
    Unsure(Scores),
    Sure(Finding),
}

impl Passages {
    /// `asks` tells whether a model is asked when the classifier is unsure.
    pub(crate) fn new(guard: Arc<Guard>, thresholds: Thresholds, asks: bool) -> Self {
        Self {
            guard,
            thresholds,
            asks,
            held: String::new(),
            free: 0,
            read: 0,
            before: String::new(),
            normal: Vec::new(),
            unsure: 0,
            word: 0,
            windows: Windows::new(),
            opinion: Opinion::Harmless,
            passage: Opinion::Harmless,
            mark: None,
            doubt: None,
            ended: false,
            violation: None,
            stopped: false,
        }
    }

    /// Adds text, followed by a violation or the end if there is one.
    pub(crate) fn add(&mut self, text: &str, violation: Option<Finding>, ended: bool) -> Released {
        debug_assert!(self.doubt.is_none(), "nothing is added to what is not settled");
        if self.stopped {
            return Released::default();
        }
        self.held += text;
        self.violation = violation;
        self.ended = ended;
        self.go_on()
    }

    /// The question that must be settled before text is read on.
    pub(crate) fn doubt(&self) -> Option<&Doubt> {
        self.doubt.as_ref()
    }

    /// Settles the question about the passage. Text after it may raise new doubts.
    pub(crate) fn settle(&mut self, found: Option<Finding>) -> Released {
        let doubt = self.doubt.take();
        debug_assert!(doubt.is_some(), "only doubts are settled");
        if found.is_some() {
            self.stopped = true;
            return Released { violation: found, ..Released::default() };
        }
        // The model is more reliable: the text that it has read no longer counts for a doubt or a finding.
        self.windows = Windows::new();
        self.opinion = Opinion::Harmless;
        (self.free, self.unsure, self.mark) = (self.read, 0, None);
        self.go_on()
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// The end of the released text, and the held text read so far.
    pub(crate) fn excerpt(&self) -> String {
        let text = [&self.before, &self.held[..self.read]].concat();
        text[text.ceil_char_boundary(text.len().saturating_sub(PART_BYTES_MAX))..].to_owned()
    }

    fn go_on(&mut self) -> Released {
        let violation = self.read_on();
        self.stopped = violation.is_some();
        let text = self.held[..self.free].to_owned();
        self.held.drain(..self.free);
        self.read -= self.free;
        self.free = 0;
        self.before += &text;
        if self.before.len() > KEPT_BYTES_MAX {
            self.before.drain(..self.before.ceil_char_boundary(self.before.len() - BEFORE_BYTES));
        }
        let kept = BEFORE_BYTES + self.unsure;
        if self.normal.len() > kept + KEPT_BYTES_MAX {
            self.normal.drain(..self.normal.len() - kept);
        }
        Released { text, violation, doubted: self.doubt.is_some() }
    }

    /// Reads up to a question, a finding, or the end.
    fn read_on(&mut self) -> Option<Finding> {
        let mut next = Vec::new();
        while let Some(c) = self.held[self.read..].chars().next() {
            next.clear();
            of_char(c, self.normal.last().copied(), |byte| next.push(byte));
            let word_ends = next.first().is_some_and(|byte| !is_of_word(*byte)) || self.word >= WORD_BYTES_MAX;
            if word_ends {
                self.confirm();
            }
            match self.passage {
                Opinion::Sure(found) if self.is_over(c) => return Some(found),
                Opinion::Unsure(scores) if self.is_over(c) => {
                    self.ask(&scores);
                    return None;
                }
                _ => self.take(c, &next),
            }
        }
        if !self.ended && self.violation.is_none() {
            return None;
        }
        self.confirm();
        match (self.passage, self.violation) {
            (Opinion::Sure(found), _) | (_, Some(found)) => Some(found),
            (Opinion::Unsure(scores), None) => {
                self.ask(&scores);
                None
            }
            (Opinion::Harmless, None) => None,
        }
    }

    /// At the end of a word, the classifier's opinion counts.
    fn confirm(&mut self) {
        self.passage = self.opinion;
        if let Opinion::Harmless = self.opinion {
            (self.free, self.unsure) = (self.read, 0);
        }
    }

    /// Whether the passage ends before `c`.
    fn is_over(&self, c: char) -> bool {
        let sentence_ends = self.mark.is_some_and(|mark| !mark.is_ascii() || c.is_whitespace());
        sentence_ends || c == '\n' || self.unsure >= PASSAGE_BYTES_MAX || self.read - self.free >= PASSAGE_RAW_BYTES_MAX
    }

    fn take(&mut self, c: char, normal: &[u8]) {
        self.read += c.len_utf8();
        self.mark = match c {
            '.' | '!' | '?' | '。' | '！' | '？' => Some(c),
            '"' | '\'' | ')' | ']' | '”' | '’' | '»' | '*' => self.mark,
            _ => None,
        };
        if let Some(last) = normal.last() {
            self.normal.extend_from_slice(normal);
            self.unsure += normal.len();
            self.word = if is_of_word(*last) { self.word + normal.len() } else { 0 };
            if let Some(classifier) = &self.guard.classifier {
                self.windows.grow(classifier, normal);
                self.opinion = self.windows.opinion(classifier, &self.thresholds, self.asks);
            }
        }
        if let (Opinion::Harmless, Opinion::Harmless) = (self.passage, self.opinion) {
            (self.free, self.unsure) = (self.read, 0);
        }
    }

    fn ask(&mut self, scores: &Scores) {
        self.doubt = Some(Doubt { text: self.in_context(), suspicions: suspicions(scores, &self.thresholds) });
        self.passage = Opinion::Harmless;
    }

    /// The passage with the text before it. A text hidden between many invisible characters is read without them.
    fn in_context(&self) -> String {
        let released = [&self.before, &self.held[..self.free]].concat();
        let from = released.ceil_char_boundary(released.len().saturating_sub(BEFORE_BYTES));
        let text = [&released[from..], &self.held[self.free..self.read]].concat();
        let normal = &self.normal[self.normal.len().saturating_sub(BEFORE_BYTES + self.unsure)..];
        let has_all = Normal::of(&text).bytes().len() >= normal.len().min(WINDOW_BYTES + self.unsure);
        if has_all && text.len() <= PART_BYTES_MAX { text } else { String::from_utf8_lossy(normal).into_owned() }
    }
}

/// Parts of the text as the classifier reads them, each of which overlaps half of the last one.
#[derive(Debug)]
struct Windows {
    /// At most one window that is judged and one that has just started.
    open: Vec<Window>,
    /// The worst scores of full windows that were not plainly harmless: further text cannot make those harmless.
    full: Option<Scores>,
}

#[derive(Debug)]
struct Window {
    text: Growing,
    /// Whether it starts at the beginning of a text or after a passage: then it counts even if it is short. A window that happens to start
    /// within a sentence does not.
    begins: bool,
}

impl Windows {
    /// The windows of a text at its start, or after a passage without a finding.
    fn new() -> Self {
        Self { open: vec![Window { text: Growing::default(), begins: true }], full: None }
    }

    fn grow(&mut self, classifier: &Classifier, bytes: &[u8]) {
        if self.open.last().is_none_or(|newest| newest.text.bytes >= WINDOW_BYTES / 2) {
            self.open.push(Window { text: Growing::default(), begins: false });
        }
        for full in self.open.extract_if(.., |window| window.text.bytes >= WINDOW_BYTES) {
            if let Some(scores) = classifier.score_so_far(&full.text) {
                take_worse(self.full.get_or_insert([0.0; Category::ALL.len()]), &scores);
            }
        }
        for window in &mut self.open {
            bytes.iter().for_each(|byte| classifier.grow(&mut window.text, *byte));
        }
    }

    /// `asks` tells whether a model can be asked in case of doubt.
    fn opinion(&self, classifier: &Classifier, thresholds: &Thresholds, asks: bool) -> Opinion {
        let mut worst_scores = self.full;
        for window in self.open.iter().filter(|window| window.begins || window.text.bytes >= WINDOW_BYTES / 2) {
            if let Some(scores) = classifier.score_so_far(&window.text) {
                take_worse(worst_scores.get_or_insert([0.0; Category::ALL.len()]), &scores);
            }
        }
        let Some(scores) = worst_scores else { return Opinion::Harmless };
        match worst(&scores, thresholds) {
            Some(found) => Opinion::Sure(found),
            None if asks && is_doubtful(&scores, thresholds) => Opinion::Unsure(scores),
            None => Opinion::Harmless,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        category::{Stage, Threshold},
        patterns::Patterns,
        stream::Stream,
    };
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// A guard for made-up words: one `zorb` is doubtful, several are certain.
    static GUARD: LazyLock<Arc<Guard>> = LazyLock::new(|| {
        let nouns = ["tree", "stone", "river", "house"];
        let kinds = ["is old and must stay", "is vile and must go"];
        let harmless = nouns.iter().flat_map(|noun| kinds.map(|kind| (format!("the {noun} {kind}"), None)));
        let kinds = ["is vile and must go", "is base and should leave"];
        let hate = ["the", "a", "every"]
            .into_iter()
            .flat_map(|article| kinds.map(|kind| (format!("{article} zorb {kind}"), Some(Category::Hate))));
        let examples: Vec<_> = hate.chain(harmless).collect();
        let classifier = Classifier::train(examples.iter().map(|(text, label)| (text.as_str(), *label)));
        Arc::new(Guard { patterns: Patterns::new(&["[dangerous]\npipe bomb"]).unwrap(), classifier: Some(classifier) })
    });

    const HARMLESS: &str = "The tree is old and must stay. A river! Every stone, 3.14 and more?\nThe house is vile and must go. ";
    const DOUBTFUL: &str = "A zorb.";
    const CERTAIN: &str = "The zorb zorb zorb zorb";

    fn thresholds() -> Thresholds {
        let mut thresholds = Thresholds::OUTPUT;
        thresholds.set(Category::Hate, Threshold::High);
        thresholds
    }

    fn stream() -> Stream {
        Stream::with_doubts(Arc::clone(&GUARD), thresholds())
    }

    /// The outcome for a text.
    #[derive(Debug, Default, PartialEq)]
    struct Heard {
        released: String,
        asked: Vec<(String, Vec<Category>)>,
        violation: Option<Category>,
    }

    /// Feeds the pieces to a stream whose model answers by `is_harmful`.
    fn told<'a>(stream: &mut Stream, pieces: impl IntoIterator<Item = &'a str>, is_harmful: impl Fn(&str) -> bool) -> Heard {
        let mut heard = Heard::default();
        for piece in pieces.into_iter().map(Some).chain([None]) {
            let mut out = match piece {
                Some(piece) => stream.push(piece),
                None => stream.finish(),
            };
            loop {
                heard.released += &out.text;
                heard.violation = heard.violation.or(out.violation.map(|found| found.category));
                assert_eq!(out.doubted, stream.doubt().is_some());
                let Some(doubt) = stream.doubt() else { break };
                assert!(out.violation.is_none() && doubt.text.len() <= PART_BYTES_MAX && !doubt.suspicions.is_empty());
                heard.asked.push((doubt.text.clone(), doubt.categories().collect()));
                let category = doubt.suspicions[0].category;
                let found = is_harmful(&doubt.text).then_some(Finding { category, stage: Stage::Model, score: 1.0 });
                out = stream.settle(found);
            }
        }
        if heard.violation.is_none() {
            assert_eq!(stream.held_bytes(), 0, "at the end nothing waits");
        }
        heard
    }

    fn characters(text: &str) -> impl Iterator<Item = &str> {
        text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()])
    }

    #[test]
    fn the_words_are_as_the_tests_need_them() {
        let found = |text: &str| GUARD.examine(text, &thresholds());
        assert_eq!([found(DOUBTFUL), found(HARMLESS)], [(None, true), (None, false)]);
        assert!(found(CERTAIN).0.is_some());
    }

    #[test]
    fn what_is_unremarkable_does_not_wait() {
        let mut stream = stream();
        for word in HARMLESS.repeat(9).split_inclusive(' ') {
            assert_eq!(stream.push(word).text, word);
            assert_eq!(stream.held_bytes(), 0);
        }
    }

    #[test]
    fn a_passage_waits_to_the_end_of_its_sentence_and_is_asked_about_once() {
        let mut stream = stream();
        let pieces = ["A ", "zorb", " (", "a", ").", " The"].map(|piece| (stream.push(piece), stream.doubt().is_some()));
        let released = pieces.each_ref().map(|(out, _)| out.text.as_str());
        assert_eq!(released, ["A ", "zor", "", "", "", ""], "up to where it becomes doubtful");
        assert_eq!(pieces.map(|(_, is_doubted)| is_doubted), [false, false, false, false, false, true]);
        let doubt = stream.doubt().unwrap();
        assert_eq!((doubt.text.as_str(), doubt.categories().collect::<Vec<_>>()), ("A zorb (a).", vec![Category::Hate]));
        assert_eq!(stream.settle(None).text, "b (a). The");
        assert_eq!(stream.held_bytes(), 0);

        // While the window slides over it there is no further question.
        let heard = told(&mut stream, characters(&HARMLESS.repeat(9)), |_| panic!("what was harmless is harmless"));
        assert_eq!(heard.released, HARMLESS.repeat(9));
    }

    #[test]
    fn what_is_doubtful_no_longer_goes_out_unasked() {
        let mut stream = stream();
        let released = ["A zorb", " (a", " house)", " and", " tea."].map(|piece| stream.push(piece).text);
        assert!(released[0].len() < "A zorb".len() && released[1].is_empty(), "{released:?}");
        assert!(released.concat() == "A zorb (a house) and tea." && stream.doubt().is_none());
    }

    #[test]
    fn the_next_sentence_may_raise_another_question() {
        let text = [DOUBTFUL, DOUBTFUL, HARMLESS].join(" ");
        let heard = told(&mut stream(), characters(&text), |_| false);
        let asked: Vec<_> = heard.asked.iter().map(|(asked, _)| asked.as_str()).collect();
        assert_eq!(asked, [DOUBTFUL, &*[DOUBTFUL; 2].join(" ")], "with what is before it");
        assert_eq!(heard.released, text);
    }

    #[test]
    fn nothing_of_a_harmful_passage_is_released_and_nothing_after_it() {
        let text = format!("{DOUBTFUL} {HARMLESS}");
        let mut stream = stream();
        let heard = told(&mut stream, [text.as_str()], |_| true);
        assert_eq!((heard.violation, heard.asked.len()), (Some(Category::Hate), 1));
        assert_eq!(heard.released, "A zor");
        assert_eq!([stream.push("more"), stream.finish()], [Released::default(), Released::default()]);
        assert_eq!(stream.excerpt(), DOUBTFUL);
    }

    #[test]
    fn a_finding_needs_no_model() {
        let heard = told(&mut stream(), characters(CERTAIN), |_| panic!("it is certain"));
        assert_eq!((heard.violation, heard.released.as_str()), (Some(Category::Hate), "The zor"));
        let heard = told(&mut stream(), [format!("{DOUBTFUL} A pipe bomb.").as_str()], |_| false);
        assert_eq!((heard.violation, heard.released), (Some(Category::Dangerous), format!("{DOUBTFUL} A ")));
        assert_eq!(heard.asked.len(), 1);
    }

    #[test]
    fn a_passage_without_an_end_is_cut_and_one_that_hides_is_read() {
        // Longer than a window, whose scores must not be lost when it is full.
        let endless = format!("a zorb{}", " -".repeat(2000));
        let heard = told(&mut stream(), [endless.as_str()], |_| false);
        assert_eq!(heard.asked.len(), 1, "nothing after it is doubtful");
        assert!((PASSAGE_BYTES_MAX..=PASSAGE_BYTES_MAX + 8).contains(&heard.asked[0].0.len()), "{heard:?}");

        let hidden: String = DOUBTFUL.chars().flat_map(|c| std::iter::once(c).chain(std::iter::repeat_n('\u{200b}', 900))).collect();
        let heard = told(&mut stream(), [hidden.as_str()], |_| false);
        assert_eq!((heard.released, heard.asked[0].0.as_str()), (hidden, "a zorb."));
    }

    proptest! {
        /// The pieces of a text affect neither the questions about it nor its released part.
        #[test]
        fn pieces_do_not_matter(
            words in prop::collection::vec(0usize..18, 0..120),
            cuts in prop::collection::vec(1usize..9, 1..40),
            harmful in prop::option::of(2usize..9),
        ) {
            let list = [
                "zorb", " zorb ", "vile ", " tree", "the ", " is old", " and must stay", ". ", ".", "!\n", "é", "日本。", "pipe ", " a", "\u{200b}",
                " The river is old. ", "zorbzorbzorbzorbzorb", " pipe bomb, ",
            ];
            let text: String = words.into_iter().map(|word| list[word]).collect();
            let is_harmful = |text: &str| harmful.is_some_and(|rest| text.len() % 9 == rest);
            let whole = told(&mut stream(), [text.as_str()], is_harmful);
            let characters: Vec<&str> = characters(&text).collect();
            let (mut rest, mut pieces, mut sizes) = (&characters[..], Vec::new(), cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(sizes.next().unwrap_or(1).min(rest.len()));
                pieces.push(piece.concat());
                rest = after;
            }
            let cut = told(&mut stream(), pieces.iter().map(String::as_str), is_harmful);
            prop_assert_eq!(&cut, &whole, "{:?}", text);
            prop_assert!(text.starts_with(&whole.released));
            prop_assert!(whole.violation.is_some() || whole.released == text);
        }
    }
}
