//! The text of every token, as a splitter of thoughts gets it.

use crate::text::tokenizer::Tokenizer;
use tidemill_proto::block::Token;

/// Texts by token. Special tokens have none, except marks.
#[derive(Debug)]
pub(super) struct Spelled(Vec<String>);

impl Spelled {
    pub(super) fn new(tokenizer: &Tokenizer, marks: &[&str]) -> Self {
        let text = |id: Token| {
            let piece = tokenizer.piece(id);
            match marks.contains(&piece.as_str()) {
                true => piece,
                false if tokenizer.special_id_of(&piece).is_some() => String::new(),
                // A part of a character is neither white space nor part of a mark.
                false => String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned(),
            }
        };
        Self((0..tokenizer.ids()).map(text).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Token, &str)> {
        (0..).zip(self.0.iter().map(String::as_str))
    }

    pub(super) fn of(&self, token: Token) -> &str {
        self.0.get(token as usize).map_or("", String::as_str)
    }
}
