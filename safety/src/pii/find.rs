//! Findings in a text. A finding stands by itself: a part of a longer word, number, path or identifier is not one.
//!
//! Look-alikes are recognized by checksums and ranges of numbers (see `numbers`), by the characters beside them (`#4111…` and `v1.2.3.4`
//! are an order and a version), and by their grouping. Some numbers satisfy everything by chance: one in ten of those with 16 digits that
//! start like a card's.

use super::{Kind, numbers};
use crate::normal::is_word;
use std::collections::HashMap;

/// A finding in a text, from byte `start` to before `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    pub kind: Kind,
    pub start: usize,
    pub end: usize,
}

/// The kinds of data and names to find. Built once.
#[derive(Clone, Debug)]
pub struct Finder {
    kinds: Vec<Kind>,
    /// The names by their first word, in lower case: all words of each, the longest names first.
    names: HashMap<String, Vec<Vec<String>>>,
    /// The maximum number of words in a name.
    words_max: usize,
    name_bytes_max: usize,
}

/// A function that returns the length of a finding at the start of a text, if there is one.
type Reader = fn(&[u8]) -> Option<usize>;

/// The maximum number of names in a list, and the maximum length of one.
const NAMES_MAX: usize = 100_000;
const NAME_BYTES_MAX: usize = 128;
/// The maximum length of an email address.
const EMAIL_BYTES_MAX: usize = 254;
/// The maximum length of a number in groups.
const NUMBER_BYTES_MAX: usize = 48;
/// The length of the text before a finding that affects it.
pub(super) const BEFORE_BYTES: usize = 24;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    #[error("more than {NAMES_MAX} names")]
    TooMany,
    #[error("line {line}: a name has words of letters, 3 to {NAME_BYTES_MAX} bytes in all; not `{name}`")]
    NotAName { line: usize, name: String },
}

impl Finder {
    pub fn new(kinds: &[Kind]) -> Self {
        Self { kinds: kinds.to_vec(), names: HashMap::new(), words_max: 0, name_bytes_max: 0 }
    }

    /// Also finds the names of a list with one name per line; `#` starts a comment.
    pub fn with_names(mut self, list: &str) -> Result<Self, NamesError> {
        let lines = (1..).zip(list.lines().map(|line| line.split('#').next().unwrap_or_default().trim()));
        for (count, (line, name)) in lines.filter(|(_, name)| !name.is_empty()).enumerate() {
            if count == NAMES_MAX {
                return Err(NamesError::TooMany);
            }
            let words: Vec<String> = name.split_whitespace().map(str::to_lowercase).collect();
            let spelt = |word: &String| word.chars().all(|c| c.is_alphabetic() || matches!(c, '\'' | '’' | '-'));
            let lettered = |word: &String| word.starts_with(char::is_alphabetic);
            if !(3..=NAME_BYTES_MAX).contains(&name.len()) || !words.iter().all(|word| spelt(word) && lettered(word)) {
                return Err(NamesError::NotAName { line, name: name.into() });
            }
            self.words_max = self.words_max.max(words.len());
            self.name_bytes_max = self.name_bytes_max.max(2 * name.len());
            self.names.entry(words[0].clone()).or_default().push(words);
        }
        self.names.values_mut().for_each(|names| names.sort_by_key(|words| std::cmp::Reverse(words.len())));
        Ok(self)
    }

    /// All findings of a whole text, in order; none overlap.
    pub fn find(&self, text: &str) -> Vec<Found> {
        self.find_after("", text, true).0
    }

    /// Finds in a text after `before`. Also returns the byte up to which further text cannot change the findings. With `ended`, no text
    /// follows.
    pub(super) fn find_after(&self, before: &str, text: &str, ended: bool) -> (Vec<Found>, usize) {
        let whole = [before, text].concat();
        let offset = before.len();
        let mut found: Vec<Found> = Vec::new();
        let mut at = offset;
        while let Some(c) = whole[at..].chars().next() {
            match self.find_at(&whole, at, offset) {
                Some(Found { kind, start, end }) if start >= found.last().map_or(offset, |last: &Found| last.end + offset) => {
                    found.push(Found { kind, start: start - offset, end: end - offset });
                    at = end;
                }
                _ => at += c.len_utf8(),
            }
        }
        let mut free = if ended { text.len() } else { self.undecided(text) };
        if let Some(cut) = found.iter().find(|found| found.start < free && free < found.end) {
            free = cut.start;
        }
        (found, free)
    }

    /// The start of the end that may still become a finding: the last word, words of numbers before it, and words that may belong to a
    /// name.
    fn undecided(&self, text: &str) -> usize {
        let last_word = |end: usize| text[..end].rfind(char::is_whitespace).map_or(0, |at| at + char_len(text, at));
        let mut start = last_word(text.len());
        let oldest = |bytes: usize| text.floor_char_boundary(text.len().saturating_sub(bytes));
        start = start.max(oldest(EMAIL_BYTES_MAX + BEFORE_BYTES));
        let mut numbers = start;
        while numbers > oldest(NUMBER_BYTES_MAX) {
            let end = text[..numbers].trim_end_matches(' ').len();
            if end + 1 != numbers {
                break;
            }
            let word = last_word(end);
            // The first group may follow a bracket, for example.
            let other = text[word..end].bytes().rposition(|byte| !is_numeral(byte));
            let numeral = other.map_or(word, |other| word + other + 1);
            if numeral == end {
                break;
            }
            numbers = numeral;
            if other.is_some() {
                break;
            }
        }
        // A name may have started before the last word.
        let (mut names, mut word) = (start, start);
        for _ in 1..self.words_max {
            let end = text[..word].trim_end_matches(' ').len();
            word = last_word(end);
            // It may start after a bracket, for example.
            let said = text[word..end].to_lowercase();
            let said = said.trim_end_matches(|c: char| !c.is_alphanumeric());
            let behind = said.char_indices().filter(|(_, c)| !c.is_alphanumeric()).map(|(at, c)| at + c.len_utf8());
            if std::iter::once(0).chain(behind).any(|at| self.names.contains_key(&said[at..])) {
                names = word;
            }
        }
        numbers.min(names.max(oldest(self.name_bytes_max)))
    }

    fn find_at(&self, text: &str, at: usize, least: usize) -> Option<Found> {
        let bytes = text.as_bytes();
        let found = |kind, length: usize| Found { kind, start: at, end: at + length };
        if bytes[at] == b'@' {
            let (start, end) = email(bytes, at, least).filter(|_| self.kinds.contains(&Kind::Email))?;
            return Some(Found { kind: Kind::Email, start, end });
        }
        if !begins(text, at) {
            return None;
        }
        let rest = &bytes[at..];
        if rest[0].is_ascii_hexdigit() || matches!(rest[0], b'+' | b'(' | b':') || rest[0].is_ascii_uppercase() {
            let of_kinds: [(Kind, Reader); 5] = [
                (Kind::Card, numbers::card),
                (Kind::Iban, numbers::iban),
                (Kind::Ssn, numbers::ssn),
                (Kind::Ip, numbers::ip),
                (Kind::Phone, numbers::phone),
            ];
            for (kind, find) in of_kinds.into_iter().filter(|(kind, _)| self.kinds.contains(kind)) {
                if let Some(length) = find(rest)
                    && ends(bytes, at + length)
                    && !(kind == Kind::Ip && is_version(&text[..at]))
                    && !(matches!(kind, Kind::Phone | Kind::Ssn) && rest[0] != b'+' && goes_on(bytes, at))
                {
                    return Some(found(kind, length));
                }
            }
        }
        self.name(text, at).map(|length| found(Kind::Name, length))
    }

    /// The length of the longest name of the list that begins here.
    fn name(&self, text: &str, at: usize) -> Option<usize> {
        if self.names.is_empty() || !text[at..].starts_with(char::is_alphabetic) {
            return None;
        }
        let mut words = words(&text[at..]).take(self.words_max);
        let first = words.next()?;
        let names = self.names.get(&first.0.to_lowercase())?;
        let said: Vec<(String, usize)> = std::iter::once(first).chain(words).map(|(word, end)| (word.to_lowercase(), end)).collect();
        let matches = |name: &&Vec<String>| name.len() <= said.len() && name.iter().zip(&said).all(|(word, (said, _))| word == said);
        names.iter().find(matches).map(|name| said[name.len() - 1].1)
    }
}

/// Words of letters with one space between them, and the end of each. The last one is not followed by a letter.
fn words(text: &str) -> impl Iterator<Item = (&str, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = &text[at..];
        let rest = if at == 0 { rest } else { rest.strip_prefix(' ')? };
        let start = text.len() - rest.len();
        let letters = rest.find(|c: char| !(c.is_alphanumeric() || matches!(c, '\'' | '’' | '-' | '.' | '_'))).unwrap_or(rest.len());
        // A sentence ends with a dot, and `'s` does not belong to a name.
        let word = rest[..letters].trim_end_matches(['.', '-', '\'', '’']);
        let word = word.strip_suffix("'s").or_else(|| word.strip_suffix("’s")).unwrap_or(word);
        if word.is_empty() || start + letters == at {
            return None;
        }
        // A stripped ending ends the name.
        let end = start + word.len();
        at = if word.len() == letters { end } else { text.len() };
        Some((word, end))
    })
}

/// Whether a finding may begin here.
fn begins(text: &str, at: usize) -> bool {
    let mut before = text[..at].chars().rev();
    let Some(last) = before.next() else { return true };
    let continues = |c: char| c.is_alphanumeric() || c == '_';
    match last {
        c if continues(c) => false,
        // An order, a path, a part of an identifier, a decimal.
        '#' | '/' | '\\' | '=' | '@' | '$' | '€' | '£' => false,
        '-' | '.' | ':' | '+' | ',' => !before.next().is_some_and(continues),
        _ => true,
    }
}

/// Whether a finding may end before this byte.
fn ends(text: &[u8], at: usize) -> bool {
    match (text.get(at), text.get(at + 1)) {
        (Some(byte), _) if is_word(*byte) || *byte >= 0x80 => false,
        (Some(b'-' | b'.' | b'/' | b':' | b','), Some(next)) if is_word(*next) => false,
        (Some(b'%' | b'@'), _) => false,
        _ => true,
    }
}

/// Whether a digit and a space precede: the groups of a longer number.
fn goes_on(text: &[u8], at: usize) -> bool {
    matches!(text[..at], [.., digit, b' '] if digit.is_ascii_digit())
}

fn is_version(before: &str) -> bool {
    let word = before.trim_end_matches([' ', ':', '=', '"']).rsplit(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    ["version", "versions", "ver", "release", "build", "firmware", "v"].iter().any(|known| word.eq_ignore_ascii_case(known))
}

/// The start and end of the address around this `@`.
fn email(text: &[u8], at: usize, least: usize) -> Option<(usize, usize)> {
    let is_local = |byte: &u8| byte.is_ascii_alphanumeric() || b"._%+-".contains(byte);
    let local = text[least..at].iter().rev().take(64).take_while(|byte| is_local(byte)).count();
    // A sentence or a list may end right before it.
    let start = at - local + text[at - local..at].iter().take_while(|byte| !byte.is_ascii_alphanumeric() && **byte != b'_').count();
    let mut end = at + 1;
    end += text[end..].iter().take(190).take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-')).count();
    while end > at + 1 && !text[end - 1].is_ascii_alphanumeric() {
        end -= 1;
    }
    let name = str::from_utf8(&text[start..at]).ok()?;
    let domain = str::from_utf8(&text[at + 1..end]).ok()?;
    let (_, top) = domain.rsplit_once('.')?;
    let labels = domain.split('.').all(|label| !label.is_empty() && label.len() <= 63 && !label.starts_with('-') && !label.ends_with('-'));
    let is_top = (2..=24).contains(&top.len()) && top.bytes().all(|byte| byte.is_ascii_alphabetic());
    // `icon@2x.png`, `git@host.org:owner/name`
    let is_file = ["png", "jpg", "jpeg", "gif", "svg", "webp", "js", "ts", "css"].contains(&top.to_ascii_lowercase().as_str());
    let is_remote = text.get(end) == Some(&b':') && text.get(end + 1).is_some_and(|byte| is_word(*byte));
    let name = !name.is_empty() && !name.ends_with('.') && !name.contains("..");
    (name && labels && is_top && !is_file && !is_remote && !matches!(text.get(end), Some(b'@' | b'_'))).then_some((start, end))
}

fn is_numeral(byte: u8) -> bool {
    byte.is_ascii_digit() || byte.is_ascii_uppercase() || b"+()-./".contains(&byte)
}

fn char_len(text: &str, at: usize) -> usize {
    text[at..].chars().next().map_or(0, char::len_utf8)
}
