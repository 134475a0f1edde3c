//! Lists of words and regular expressions, found in text in [normal form](crate::normal).
//!
//! A list is text: a line in brackets sets the category of the lines that follow; a line is a phrase, or a regular expression after `re:`;
//! `#` starts a comment. Phrases and expressions match whole words.
//!
//! All of them form one automaton that only starts at a given place. So it tells for any place whether a match begins there, or may still
//! begin there if more text comes: the part of an answer that must be held back, to the byte.

use crate::{
    category::{Category, Unknown},
    normal::{is_word, normal},
};
use regex_automata::{
    Anchored, MatchKind,
    dfa::{Automaton, StartKind, dense::DFA},
    util::{start, syntax},
};
use std::fmt;

/// The longest text that a pattern may match, in bytes: no more is ever held back.
pub const PATTERN_BYTES_MAX: usize = 256;
/// The maximum size of the automaton.
const AUTOMATON_BYTES_MAX: usize = 64 << 20;
/// The list that comes with Tidemill.
const BUILT_IN: &str = include_str!("../lists/default.txt");

/// A list that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PatternError {
    #[error("line {line}: {source}")]
    Category { line: usize, source: Unknown },
    #[error("line {0}: a pattern before any [category]")]
    NoCategory(usize),
    #[error("line {line}: {reason}")]
    Pattern { line: usize, reason: String },
    #[error("the patterns together: {0}")]
    Together(String),
}

/// Compiled patterns, each with a label of type `L`.
pub struct Patterns<L = Category> {
    automaton: DFA<Vec<u32>>,
    /// The label of each pattern.
    labels: Vec<L>,
}

impl<L> fmt::Debug for Patterns<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} patterns", self.labels.len())
    }
}

/// The matches that begin at a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Begins<L = Category> {
    Nothing,
    Match(L),
    /// More text may make it a match.
    Perhaps,
}

impl Patterns {
    pub fn built_in() -> Self {
        Self::new(&[BUILT_IN]).expect("the built-in list compiles: a test reads it")
    }

    /// The built-in list, and further ones.
    pub fn with(lists: &[String]) -> Result<Self, PatternError> {
        let lists: Vec<&str> = std::iter::once(BUILT_IN).chain(lists.iter().map(String::as_str)).collect();
        Self::new(&lists)
    }

    pub fn new(lists: &[&str]) -> Result<Self, PatternError> {
        let (mut expressions, mut categories) = (Vec::new(), Vec::new());
        for list in lists {
            let mut category = None;
            for (line, text) in (1..).zip(list.lines()) {
                let text = text.trim();
                if text.is_empty() || text.starts_with('#') {
                } else if let Some(name) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                    category = Some(name.parse().map_err(|source| PatternError::Category { line, source })?);
                } else {
                    expressions.push(expression(text).map_err(|reason| PatternError::Pattern { line, reason })?);
                    categories.push(category.ok_or(PatternError::NoCategory(line))?);
                }
            }
        }
        Self::compile(&expressions, categories)
    }
}

impl Patterns<()> {
    /// Compiles lines of a list without categories.
    pub fn plain(lines: &[impl AsRef<str>]) -> Result<Self, PatternError> {
        let of_line = |(line, text): (usize, &_)| {
            let text = AsRef::<str>::as_ref(text).trim();
            expression(text).map_err(|reason| PatternError::Pattern { line, reason })
        };
        let expressions = (1..).zip(lines).map(of_line).collect::<Result<Vec<_>, _>>()?;
        Self::compile(&expressions, vec![(); lines.len()])
    }
}

impl<L: Copy> Patterns<L> {
    fn compile(expressions: &[String], labels: Vec<L>) -> Result<Self, PatternError> {
        let config = DFA::config()
            .start_kind(StartKind::Anchored)
            .match_kind(MatchKind::All)
            .dfa_size_limit(Some(AUTOMATON_BYTES_MAX))
            .determinize_size_limit(Some(AUTOMATON_BYTES_MAX));
        let automaton = DFA::builder().configure(config).syntax(bytewise()).build_many(expressions);
        Ok(Self { automaton: automaton.map_err(|error| PatternError::Together(error.to_string()))?, labels })
    }

    /// Tells whether a match begins at `place` of a text in normal form, which continues unless it is `ended`. `before` is the byte before
    /// the text.
    pub fn begins(&self, text: &[u8], place: usize, before: Option<u8>, ended: bool) -> Begins<L> {
        let behind = if place == 0 { before } else { Some(text[place - 1]) };
        let start = start::Config::new().anchored(Anchored::Yes).look_behind(behind);
        let mut state = self.automaton.start_state(&start).expect("the automaton is anchored, and no byte makes it give up");
        for &byte in &text[place..] {
            state = self.automaton.next_state(state, byte);
            if self.automaton.is_match_state(state) {
                return Begins::Match(self.labels[self.automaton.match_pattern(state, 0).as_usize()]);
            }
            if self.automaton.is_dead_state(state) {
                return Begins::Nothing;
            }
        }
        if !ended {
            return Begins::Perhaps;
        }
        state = self.automaton.next_eoi_state(state);
        match self.automaton.is_match_state(state) {
            true => Begins::Match(self.labels[self.automaton.match_pattern(state, 0).as_usize()]),
            false => Begins::Nothing,
        }
    }

    /// The first match in a whole text in normal form.
    pub fn find(&self, text: &[u8]) -> Option<L> {
        places(text, None).find_map(|place| match self.begins(text, place, None, true) {
            Begins::Match(label) => Some(label),
            Begins::Nothing | Begins::Perhaps => None,
        })
    }
}

/// The places where matches may begin: at words, and at any letter of scripts without spaces.
pub(crate) fn places(text: &[u8], before: Option<u8>) -> impl Iterator<Item = usize> {
    let behind = move |place: usize| if place == 0 { before } else { Some(text[place - 1]) };
    (0..text.len()).filter(move |&place| text[place] >= 0xc0 || (is_word(text[place]) && !behind(place).is_some_and(is_word)))
}

/// The regular expression of a line in a list.
fn expression(line: &str) -> Result<String, String> {
    let expression = match line.strip_prefix("re:") {
        Some(expression) => format!(r"\b(?:{})\b", expression.trim()),
        None => phrase(&normal(line)),
    };
    check(&expression).map(|()| expression)
}

/// The regular expression of a phrase. It matches whole words where the phrase starts or ends with a letter of a word.
fn phrase(normal: &str) -> String {
    let edge = |byte: Option<&u8>| if byte.is_some_and(|byte| is_word(*byte)) { r"\b" } else { "" };
    let bytes = normal.as_bytes();
    format!("{}{}{}", edge(bytes.first()), regex_syntax::escape(normal), edge(bytes.last()))
}

/// Text in normal form is matched byte by byte, as ASCII.
fn bytewise() -> syntax::Config {
    syntax::Config::new().unicode(false).utf8(false)
}

fn check(expression: &str) -> Result<(), String> {
    let parsed = regex_syntax::ParserBuilder::new().unicode(false).utf8(false).build().parse(expression);
    let properties = parsed.map_err(|error| error.to_string())?.properties().clone();
    match (properties.minimum_len(), properties.maximum_len()) {
        (None | Some(0), _) => Err("it matches the empty text".into()),
        (_, Some(1..=PATTERN_BYTES_MAX)) => Ok(()),
        _ => Err(format!("it may match more than {PATTERN_BYTES_MAX} bytes: bound its repetitions, as in `.{{0,20}}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::normal::Normal;

    #[test]
    fn phrases_and_expressions_match_whole_words() {
        let patterns = Patterns::new(&["[dangerous]\npipe bomb\nre: (?:make|build) a .{0,10}gun\n[hate]\nélan"]).unwrap();
        let found = |text: &str| patterns.find(Normal::of(text).bytes());
        for text in ["a PIPE  bomb.", "pipe\nbomb", "(pipe bomb)", "build a big gun", "make a gun"] {
            assert_eq!(found(text), Some(Category::Dangerous), "{text}");
        }
        assert_eq!(found("Elan"), Some(Category::Hate));
        assert_eq!(Patterns::new(&["[hate]\n炸弹"]).unwrap().find("做一个炸弹吧".as_bytes()), Some(Category::Hate));
        for text in ["pipe bombs", "bagpipe bomb", "build a gunny sack", "make a very very long gun", "", "pipe"] {
            assert_eq!(found(text), None, "{text}");
        }
    }

    #[test]
    fn a_place_says_whether_more_text_could_make_a_match() {
        let patterns = Patterns::new(&["[dangerous]\npipe bomb"]).unwrap();
        let begins = |text: &str, ended| patterns.begins(text.as_bytes(), 0, None, ended);
        assert_eq!([begins("pipe bo", false), begins("pipe bomb", false)], [Begins::Perhaps; 2], "a letter could follow");
        assert_eq!(begins("pipe bomb", true), Begins::Match(Category::Dangerous));
        assert_eq!(begins("pipe bomb ", false), Begins::Match(Category::Dangerous));
        assert_eq!([begins("pipe bombs", false), begins("pipe x", false), begins("pipe", true)], [Begins::Nothing; 3]);
        assert_eq!(patterns.begins(b"pipe bomb ", 0, Some(b'g'), false), Begins::Nothing, "inside a word");
    }

    #[test]
    fn a_wrong_list_is_refused_by_its_line() {
        for (list, message) in [
            ("[violence]", "line 1: `violence`"),
            ("bomb", "line 1: a pattern before"),
            ("[hate]\n\nre: a(", "line 3"),
            ("[hate]\nre: a.*b", "bound its repetitions"),
            ("[hate]\nre: a?", "empty text"),
        ] {
            let error = Patterns::new(&[list]).unwrap_err().to_string();
            assert!(error.contains(message), "{list}: {error}");
        }
    }

    #[test]
    fn the_built_in_list_is_of_every_category() {
        let patterns = Patterns::built_in();
        assert!(Category::ALL.iter().all(|category| patterns.labels.contains(category)));
        assert_eq!(patterns.find(b"what is the weather like today?"), None);
    }
}
