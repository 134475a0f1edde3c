//! Writes an automaton as an expression: its states are eliminated one by one, and the paths through each become edges (Kleene).

use super::automaton::{Alphabet, Dfa};
use std::{collections::BTreeMap, fmt::Write};

/// The most states of an automaton that is printed: each may multiply the length of the expression.
const STATES_MAX: usize = 64;
/// The most bytes of a printed expression.
const BYTES_MAX: usize = 8192;

/// Returns a pattern for whole texts of `language`, or `None` if it would be too long.
pub(super) fn pattern(language: &Dfa, alphabet: &Alphabet) -> Option<String> {
    let states = language.next.len();
    if states > STATES_MAX {
        return None;
    }
    // Two more states follow: one before the first, and one after all that accept.
    let (start, end) = (states, states + 1);
    let mut edges: BTreeMap<(usize, usize), Part> = BTreeMap::new();
    edges.insert((start, 0), Part::empty());
    for (state, row) in language.next.iter().enumerate() {
        if language.accepts[state] {
            edges.insert((state, end), Part::empty());
        }
        let mut classes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        row.iter().enumerate().for_each(|(class, &to)| classes.entry(to).or_default().push(class));
        for (to, classes) in classes {
            edges.insert((state, to), class(&alphabet.ranges(&classes)));
        }
    }
    let mut left: Vec<usize> = (0..states).collect();
    while !left.is_empty() {
        let cost = |state: usize| {
            let length = |sides: &mut dyn Iterator<Item = (&(usize, usize), &Part)>| {
                sides.fold((0, 0), |(count, bytes), (_, part)| (count + 1, bytes + part.text.len()))
            };
            let (ins, in_bytes) = length(&mut edges.iter().filter(|((a, b), _)| *b == state && *a != state));
            let (outs, out_bytes) = length(&mut edges.iter().filter(|((a, b), _)| *a == state && *b != state));
            let own = edges.get(&(state, state)).map_or(0, |part| part.text.len());
            in_bytes * outs + out_bytes * ins + own * ins * outs
        };
        let cheapest = (0..left.len()).min_by_key(|&i| (cost(left[i]), left[i])).expect("one is left");
        let state = left.swap_remove(cheapest);
        let own = edges.remove(&(state, state)).map_or_else(Part::empty, Part::repeated);
        let ins: Vec<(usize, Part)> =
            edges.iter().filter(|((_, to), _)| *to == state).map(|((from, _), part)| (*from, part.clone())).collect();
        let outs: Vec<(usize, Part)> =
            edges.iter().filter(|((from, _), _)| *from == state).map(|((_, to), part)| (*to, part.clone())).collect();
        edges.retain(|(from, to), _| *from != state && *to != state);
        for (from, before) in &ins {
            for (to, after) in &outs {
                let through = before.clone().then(&own).then(after);
                let edge = match edges.remove(&(*from, *to)) {
                    Some(edge) => edge.or(through),
                    None => through,
                };
                if edge.text.len() > BYTES_MAX {
                    return None;
                }
                edges.insert((*from, *to), edge);
            }
        }
    }
    Some(match edges.remove(&(start, end)) {
        Some(whole) => format!("^(?:{})$", whole.written(Level::Or)),
        // A class without any character.
        None => r"^[^\x{0}-\x{10FFFF}]$".into(),
    })
}

/// The precedence of a text's outermost operator.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Or,
    Sequence,
    Repeated,
    Atom,
}

/// An expression, and whether it also matches the empty text.
#[derive(Clone)]
struct Part {
    text: String,
    level: Level,
    is_optional: bool,
}

impl Part {
    fn empty() -> Self {
        Self { text: String::new(), level: Level::Atom, is_optional: true }
    }

    /// Returns the expression's text, in a group unless its precedence is at least `level`.
    fn written(&self, level: Level) -> String {
        if self.text.is_empty() {
            return String::new();
        }
        let (text, own) = match self.is_optional {
            true if self.level == Level::Atom => (format!("{}?", self.text), Level::Repeated),
            true => (format!("(?:{})?", self.text), Level::Repeated),
            false => (self.text.clone(), self.level),
        };
        if own >= level { text } else { format!("(?:{text})") }
    }

    fn or(self, other: Self) -> Self {
        let is_optional = self.is_optional || other.is_optional;
        if self.text.is_empty() || self.text == other.text {
            return Self { is_optional, ..other };
        }
        if other.text.is_empty() {
            return Self { is_optional, ..self };
        }
        Self { text: format!("{}|{}", self.text, other.text), level: Level::Or, is_optional }
    }

    fn then(self, other: &Self) -> Self {
        if self.text.is_empty() {
            return other.clone();
        }
        if other.text.is_empty() {
            return self;
        }
        let text = self.written(Level::Sequence) + &other.written(Level::Sequence);
        Self { text, level: Level::Sequence, is_optional: false }
    }

    fn repeated(self) -> Self {
        if self.text.is_empty() {
            return self;
        }
        let text = Self { is_optional: false, ..self }.written(Level::Atom) + "*";
        Self { text, level: Level::Repeated, is_optional: false }
    }
}

/// Returns the class of the characters in `ranges`, whose ends are exclusive.
fn class(ranges: &[(u32, u32)]) -> Part {
    let mut text = String::from("[");
    for &(start, end) in ranges {
        let character = |code: u32, text: &mut String| {
            let _ = match char::from_u32(code).filter(char::is_ascii_alphanumeric) {
                Some(plain) => write!(text, "{plain}"),
                None => write!(text, "\\x{{{code:X}}}"),
            };
        };
        character(start, &mut text);
        if end - start > 1 {
            text.push('-');
            character(end - 1, &mut text);
        }
    }
    text.push(']');
    Part { text, level: Level::Atom, is_optional: false }
}
