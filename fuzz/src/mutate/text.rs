//! Text: its words, numbers and brackets dropped, swapped, repeated, nested, and words of its language inserted.

use crate::dice::Dice;

const BYTES_MAX: usize = 200_000;
const NESTED_MAX: usize = 5_000;

/// Mutates a text. `words`: words with a meaning to its reader.
pub(crate) fn mutate(dice: &mut Dice, text: &str, words: &[&str]) -> String {
    let mut pieces: Vec<String> = pieces(text);
    for _ in 0..dice.few(10) {
        once(dice, &mut pieces, words);
    }
    let mut text = pieces.concat();
    let end = (0..=BYTES_MAX.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.truncate(end);
    text
}

/// Splits a text into runs of letters, of digits, of white space, and single other characters.
fn pieces(text: &str) -> Vec<String> {
    let kind = |c: char| match c {
        c if c.is_alphabetic() || c == '_' => 0,
        c if c.is_numeric() => 1,
        c if c.is_whitespace() => 2,
        _ => 3,
    };
    let mut pieces: Vec<String> = Vec::new();
    let mut last = 3;
    for c in text.chars() {
        match pieces.last_mut() {
            Some(piece) if kind(c) == last && last != 3 => piece.push(c),
            _ => pieces.push(c.into()),
        }
        last = kind(c);
    }
    pieces
}

fn once(dice: &mut Dice, pieces: &mut Vec<String>, words: &[&str]) {
    let length = pieces.len();
    let at = dice.below(length + 1);
    let run = (dice.below(8) + 1).min(length - at);
    match dice.below(11) {
        0 => drop(pieces.drain(at..at + run)),
        1 => {
            let copy = pieces[at..at + run].to_vec();
            let to = dice.below(length + 1);
            pieces.splice(to..to, copy);
        }
        2 => {
            let times = if dice.one_in(6) { dice.below(3000) } else { dice.below(30) };
            let copy = pieces[at..at + run].concat();
            let times = times.min(BYTES_MAX / copy.len().max(1));
            pieces.insert(at, copy.repeat(times));
        }
        3 if length > 1 => pieces.swap(at.min(length - 1), dice.below(length)),
        4 => {
            let (open, close) = *dice.pick(&[("(", ")"), ("[", "]"), ("{", "}"), ("\"", "\""), ("{{", "}}"), ("(?:", ")*"), ("(", ")?")]);
            let depth = if dice.one_in(6) { dice.below(NESTED_MAX) } else { dice.few(12) };
            pieces.insert(at + run, close.repeat(depth));
            pieces.insert(at, open.repeat(depth));
        }
        5 => pieces.insert(at, dice.odd_text()),
        6 if at < length && pieces[at].chars().all(char::is_numeric) => pieces[at] = dice.integer().to_string(),
        7 => pieces.insert(at, dice.integer().to_string()),
        8 => pieces.truncate(at),
        _ if !words.is_empty() => {
            let word = (*dice.pick(words)).to_owned();
            if at < length && dice.one_in(2) { pieces[at] = word } else { pieces.insert(at, word) }
        }
        _ => pieces.insert(at, dice.odd_text()),
    }
}
