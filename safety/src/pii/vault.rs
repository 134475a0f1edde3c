//! Placeholders for the findings of one request, `[EMAIL_1]`, and their restoration. Equal findings have equal placeholders in all texts of
//! a request; and as they are numbered in order, the next turn of a conversation has the same ones, so that its prompt starts with the same
//! text.

use super::{Kind, find::Finder, redact::replaced};
use std::collections::{HashMap, HashSet};

#[derive(Clone, Debug, Default)]
pub struct Vault {
    /// The findings by placeholder.
    values: HashMap<String, String>,
    placeholders: HashMap<(Kind, String), String>,
    /// Clients' texts that look like placeholders, and stay unchanged.
    taken: HashSet<String>,
    numbers: HashMap<Kind, usize>,
}

/// The maximum length of a placeholder: `[EMAIL_`, up to seven digits, `]`.
const PLACEHOLDER_BYTES_MAX: usize = 16;

impl Vault {
    /// Notes a text of the request before any is redacted: texts in it that look like placeholders will not be used as such.
    pub fn see(&mut self, text: &str) {
        for (at, _) in text.match_indices('[') {
            let end = text[at..].bytes().take(PLACEHOLDER_BYTES_MAX).position(|byte| byte == b']');
            if let Some(end) = end {
                self.taken.insert(text[at..=at + end].to_owned());
            }
        }
    }

    /// The text with placeholders for its findings.
    pub fn redact(&mut self, finder: &Finder, text: &str) -> String {
        let found = finder.find(text);
        let parts: Vec<_> =
            found.iter().map(|found| (found.start, found.end, self.placeholder(found.kind, &text[found.start..found.end]))).collect();
        replaced(text, &parts)
    }

    fn placeholder(&mut self, kind: Kind, value: &str) -> String {
        if let Some(known) = self.placeholders.get(&(kind, value.to_owned())) {
            return known.clone();
        }
        let number = self.numbers.entry(kind).or_default();
        let fresh = loop {
            *number += 1;
            let next = format!("[{}_{number}]", kind.label());
            if !self.taken.contains(&next) {
                break next;
            }
        };
        self.values.insert(fresh.clone(), value.to_owned());
        self.placeholders.insert((kind, value.to_owned()), fresh.clone());
        fresh
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The number of different findings of each kind.
    pub fn counts(&self) -> impl Iterator<Item = (Kind, usize)> {
        Kind::ALL.into_iter().map(|kind| (kind, self.placeholders.keys().filter(|(of, _)| *of == kind).count())).filter(|(_, n)| *n > 0)
    }

    /// Restores the findings of a whole text.
    pub fn restored(&self, text: &str) -> String {
        let mut held = text.to_owned();
        self.put_back(&mut held, true)
    }

    /// Takes from `held` the text that can be released, with findings in place of placeholders. An incomplete placeholder stays.
    fn put_back(&self, held: &mut String, ended: bool) -> String {
        let (mut out, mut at) = (String::with_capacity(held.len()), 0);
        while let Some(open) = held[at..].find('[').map(|open| at + open) {
            out += &held[at..open];
            at = open;
            let rest = &held[open..];
            let close = rest.bytes().take(PLACEHOLDER_BYTES_MAX).position(|byte| byte == b']');
            match close {
                Some(close) if self.values.contains_key(&rest[..=close]) => {
                    out += &self.values[&rest[..=close]];
                    at = open + close + 1;
                }
                // It may still become a placeholder.
                None if !ended && self.values.keys().any(|placeholder| placeholder.starts_with(rest)) => break,
                _ => {
                    out.push('[');
                    at = open + 1;
                }
            }
        }
        if !held[at..].starts_with('[') {
            out += &held[at..];
            at = held.len();
        }
        held.drain(..at);
        out
    }
}

/// One text on its way to a client, with its findings put back.
#[derive(Debug, Default)]
pub struct Restorer {
    held: String,
}

impl Restorer {
    /// Adds text. Returns the text that is released.
    pub fn push(&mut self, vault: &Vault, text: &str) -> String {
        self.held += text;
        vault.put_back(&mut self.held, false)
    }

    /// Ends the text, and releases the rest.
    pub fn finish(&mut self, vault: &Vault) -> String {
        vault.put_back(&mut self.held, true)
    }

    /// The number of bytes held back.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }
}
