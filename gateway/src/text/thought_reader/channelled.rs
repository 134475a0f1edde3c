//! Thoughts in messages of the channel `analysis`, of which an answer may have several. Once a limit is reached, the message ends, and the
//! next one has another channel.

use super::tagged::BEFORE;
use crate::text::{
    harmony::{CALL, CHANNEL, END, MESSAGE, RETURN, START, THOUGHTS},
    tokenizer::Tokenizer,
};
use tidemill_proto::{
    block::Token,
    thought::{ReaderState, ThoughtReader},
};

/// The channels of messages that are no thoughts: text, and calls.
const OTHERS: [&str; 2] = ["final", "commentary"];

/// A place between two tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Outside messages, or in a header without a channel so far.
    Header,
    /// In the name of a channel that equals the first characters of that of thoughts.
    Name(usize),
    /// In the rest of the header of a thought.
    ThoughtHeader,
    /// In the rest of another header.
    OtherHeader,
    Thought,
    Body,
}

/// The marks' tokens.
struct Marks {
    start: Token,
    channel: Token,
    message: Token,
    ends: [Token; 3],
}

/// Makes the table. `None` if a mark is not a token.
pub(super) fn reader(tokenizer: &Tokenizer) -> Option<ThoughtReader> {
    let id = |mark: &str| tokenizer.unspoken_id_of(mark);
    let end = id(END)?;
    let marks = Marks { start: id(START)?, channel: id(CHANNEL)?, message: id(MESSAGE)?, ends: [end, id(CALL)?, id(RETURN)?] };
    let first = |channel: &str| tokenizer.encode(channel, false).ok()?.first().copied();
    let others = OTHERS.into_iter().map(first).collect::<Option<Vec<_>>>()?;
    let names = (0..=THOUGHTS.len()).map(Place::Name);
    let rest = [Place::ThoughtHeader, Place::OtherHeader, Place::Thought, Place::Body];
    let places: Vec<Place> = [Place::Header].into_iter().chain(names).chain(rest).collect();
    let number = |place| places.iter().position(|known| *known == place).expect("all places are listed") as u8;
    debug_assert_eq!(number(Place::Header), BEFORE);
    let texts: Vec<(Token, String)> = (0..tokenizer.ids()).map(|id| (id, text(tokenizer, id))).collect();
    let state = |from: &Place| {
        let otherwise = from.otherwise();
        let after = |(token, text): &(Token, String)| (*token, marks.after(*from, *token).unwrap_or_else(|| from.after(text)));
        ReaderState {
            is_thought: *from == Place::Thought,
            otherwise: number(otherwise),
            steps: texts.iter().map(after).filter(|(_, to)| *to != otherwise).map(|(token, to)| (token, number(to))).collect(),
            ending: match from {
                Place::Thought => vec![end],
                Place::Name(0) => others.clone(),
                _ => Vec::new(),
            },
        }
    };
    Some(ThoughtReader { states: places.iter().map(state).collect() })
}

/// The text of a token that is no mark; special ones have none.
fn text(tokenizer: &Tokenizer, id: Token) -> String {
    match tokenizer.special_id_of(&tokenizer.piece(id)) {
        Some(_) => String::new(),
        None => String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned(),
    }
}

impl Place {
    /// The place after text that is no part of a channel's name of thoughts.
    fn otherwise(self) -> Self {
        if matches!(self, Self::Name(_)) { Self::OtherHeader } else { self }
    }

    fn after(self, text: &str) -> Self {
        text.chars().fold(self, |place, c| match place {
            Self::Name(known) if THOUGHTS[known..].starts_with(c) => Self::Name(known + 1),
            Self::Name(known) if known == THOUGHTS.len() && (c.is_whitespace() || c == '<') => Self::ThoughtHeader,
            Self::Name(_) => Self::OtherHeader,
            other => other,
        })
    }
}

impl Marks {
    /// The place after a mark; `None` if the token is none.
    fn after(&self, from: Place, token: Token) -> Option<Place> {
        let in_message = matches!(from, Place::Thought | Place::Body);
        let is_thoughts = from == Place::ThoughtHeader || from == Place::Name(THOUGHTS.len());
        match token {
            token if token == self.channel && (in_message || from == Place::Header) => Some(Place::Name(0)),
            token if token == self.message && !in_message => Some(if is_thoughts { Place::Thought } else { Place::Body }),
            token if token == self.start || self.ends.contains(&token) => Some(match from {
                _ if in_message => Place::Header,
                _ if is_thoughts => Place::ThoughtHeader,
                from => from.otherwise(),
            }),
            _ => None,
        }
    }
}
