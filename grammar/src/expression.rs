//! Expressions of JSON Schema (ECMA-262) in the form that the compiler accepts: look-around is rewritten without it, and complements and
//! intersections become ordinary expressions.
//!
//! The compiler has no look-around. A look-ahead constrains the rest of the text, so it is an intersection of languages, and a negative one
//! a difference: `parse` finds them, [`automaton`] computes the language, and `print` writes it as an expression again. A pattern that
//! begins with look-aheads becomes several patterns that all hold, which the compiler intersects itself, at a lower cost.
//!
//! Automata can be exponentially larger than their expressions, so all work is paid from the [`Work`] of one document.

mod automaton;
mod parse;
mod print;

use automaton::{Alphabet, Dfa};
use llguidance::regex_to_lark;
use parse::Node;
use regex_syntax::hir::Hir;
use std::collections::HashMap;

/// The most bytes of an expression that is rewritten.
const EXPRESSION_BYTES_MAX: usize = 4096;
/// The most transitions computed for one document, which take about a quarter of a second.
const WORK_MAX: usize = 1 << 19;
/// The most repetitions of a part with look-around, which are written out one by one.
const UNROLLED_MAX: u32 = 4;

/// The transitions that may still be computed for a document.
#[derive(Debug)]
pub(crate) struct Work {
    left: usize,
}

impl Default for Work {
    fn default() -> Self {
        Self { left: WORK_MAX }
    }
}

impl Work {
    pub(crate) fn of(transitions: usize) -> Self {
        Self { left: transitions }
    }

    /// Takes `transitions` from the rest, or returns `None` if less is left.
    pub(crate) fn pay(&mut self, transitions: usize) -> Option<()> {
        let left = self.left.checked_sub(transitions);
        self.left = left.unwrap_or(0);
        left.map(|_| ())
    }
}

/// Whether an expression has look-around, which the compiler would refuse.
pub(crate) fn looks_around(pattern: &str) -> bool {
    ["(?=", "(?!", "(?<=", "(?<!"].iter().any(|mark| pattern.contains(mark))
}

/// Returns patterns without look-around that all hold exactly where `pattern` does, or `None` if it takes too much work, looks behind, or
/// looks around in a part that repeats without bound.
pub(crate) fn without_look_around(pattern: &str, work: &mut Work) -> Option<Vec<String>> {
    let root = parse::parse(pattern).filter(|_| pattern.len() <= EXPRESSION_BYTES_MAX)?;
    let Node::Concat(parts) = &root else { return Some(vec![rewritten(&root, work)?]) };
    let leading = parts.iter().skip(1).take_while(|part| matches!(part, Node::Ahead { .. })).count();
    let (Some(Node::Start), true) = (parts.first(), leading > 0) else { return Some(vec![rewritten(&root, work)?]) };
    let mut patterns = Vec::new();
    for part in &parts[1..=leading] {
        let Node::Ahead { inner, negative, text, .. } = part else { unreachable!("they were counted") };
        patterns.push(match *negative || inner.looks_around() {
            true => rewritten(&Node::Concat(vec![Node::Start, part.clone()]), work)?,
            false => format!("^(?:{})", &pattern[text.clone()]),
        });
    }
    let rest = Node::Concat(std::iter::once(Node::Start).chain(parts[leading + 1..].iter().cloned()).collect());
    let Some(Node::Ahead { end, .. }) = parts.get(leading) else { unreachable!("they were counted") };
    patterns.push(match rest.looks_around() {
        true => rewritten(&rest, work)?,
        false => format!("^{}", &pattern[*end..]),
    });
    Some(patterns)
}

/// Returns a pattern that holds where none of `patterns` does, or `None` if it takes too much work.
pub(crate) fn none_of(patterns: &[String], work: &mut Work) -> Option<String> {
    let nodes = parsed(patterns)?;
    let mut languages = Languages::of(nodes.iter(), work)?;
    let mut all = languages.any();
    for node in &nodes {
        let other = languages.searched(node)?.not();
        all = languages.both(&all, &other)?;
    }
    print::pattern(&all, &languages.alphabet)
}

/// Returns a pattern that holds where all of `patterns` do, or `None` if it takes too much work.
pub(crate) fn all_of(patterns: &[String], work: &mut Work) -> Option<String> {
    let nodes = parsed(patterns)?;
    let mut languages = Languages::of(nodes.iter(), work)?;
    let mut all = languages.any();
    for node in &nodes {
        let other = languages.searched(node)?;
        all = languages.both(&all, &other)?;
    }
    print::pattern(&all, &languages.alphabet)
}

/// Returns an expression that matches `text` alone.
pub(crate) fn literal(text: &str) -> String {
    format!("^{}$", regex_syntax::escape(text))
}

fn parsed(patterns: &[String]) -> Option<Vec<Node>> {
    let length: usize = patterns.iter().map(String::len).sum();
    if length > EXPRESSION_BYTES_MAX {
        return None;
    }
    patterns.iter().map(|pattern| parse::parse(pattern)).collect()
}

fn rewritten(root: &Node, work: &mut Work) -> Option<String> {
    let mut languages = Languages::of(std::iter::once(root), work)?;
    let language = languages.searched(root)?;
    print::pattern(&language, &languages.alphabet)
}

/// The place in a text where a part of an expression begins to match.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    Start,
    Later,
    Unknown,
}

/// Languages of expressions over one alphabet.
struct Languages<'w> {
    alphabet: Alphabet,
    plain: HashMap<String, Hir>,
    work: &'w mut Work,
}

impl<'w> Languages<'w> {
    fn of<'n>(nodes: impl Iterator<Item = &'n Node>, work: &'w mut Work) -> Option<Self> {
        let mut texts = Vec::new();
        nodes.for_each(|node| node.plain(&mut texts));
        let mut plain = HashMap::new();
        for text in texts {
            // This is how the compiler reads patterns.
            plain.insert(text.to_owned(), regex_syntax::parse(&regex_to_lark(text, "dw")).ok()?);
        }
        let alphabet = Alphabet::of(plain.values(), work)?;
        Some(Self { alphabet, plain, work })
    }

    fn any(&self) -> Dfa {
        Dfa::any(self.alphabet.classes())
    }

    fn both(&mut self, a: &Dfa, b: &Dfa) -> Option<Dfa> {
        Dfa::combined(a, b, |a, b| a && b, self.work)
    }

    fn either(&mut self, a: &Dfa, b: &Dfa) -> Option<Dfa> {
        Dfa::combined(a, b, |a, b| a || b, self.work)
    }

    /// Returns the language of all texts in which `root` matches somewhere.
    fn searched(&mut self, root: &Node) -> Option<Dfa> {
        let any = self.any();
        let first = self.followed(root, &any, Position::Start)?;
        let later = self.followed(root, &any, Position::Later)?;
        let later = later.after_something(self.work)?;
        self.either(&first, &later)
    }

    /// Returns the language of all texts that begin with a match of `node` and continue with a text of `rest`.
    fn followed(&mut self, node: &Node, rest: &Dfa, at: Position) -> Option<Dfa> {
        match node {
            Node::Plain(text) => rest.after(&self.plain[text], &self.alphabet, self.work),
            Node::Concat(parts) => {
                let mut positions = vec![at];
                for part in parts {
                    let before = *positions.last().expect("there is one before each");
                    positions.push(match part.least() {
                        _ if before == Position::Later || part.is_empty() => before,
                        0 => Position::Unknown,
                        _ => Position::Later,
                    });
                }
                let mut language = rest.clone();
                for (part, &at) in parts.iter().zip(&positions).rev() {
                    language = self.followed(part, &language, at)?;
                }
                Some(language)
            }
            Node::Or(options) => {
                let mut language = Dfa::none(self.alphabet.classes());
                for option in options {
                    let other = self.followed(option, rest, at)?;
                    language = self.either(&language, &other)?;
                }
                Some(language)
            }
            Node::Repeat { inner, least, most } => {
                let most = most.filter(|most| *most <= UNROLLED_MAX && least <= most)?;
                // Later repetitions begin where the earlier ones have ended.
                let at = if most > 1 && at == Position::Start { Position::Unknown } else { at };
                let mut language = rest.clone();
                for turn in (0..most).rev() {
                    let with = self.followed(inner, &language, at)?;
                    language = if turn < *least { with } else { self.either(&with, rest)? };
                }
                Some(language)
            }
            Node::Ahead { inner, negative, .. } => {
                let any = self.any();
                let ahead = self.followed(inner, &any, at)?;
                self.both(rest, &if *negative { ahead.not() } else { ahead })
            }
            Node::Start => match at {
                Position::Start => Some(rest.clone()),
                Position::Later => Some(Dfa::none(self.alphabet.classes())),
                Position::Unknown => None,
            },
            Node::End => self.both(rest, &Dfa::empty_text(self.alphabet.classes())),
        }
    }
}

#[cfg(test)]
mod tests;
