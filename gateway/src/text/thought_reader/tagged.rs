//! Thoughts between two marks at the beginning of an answer. A mark may be one token, or text in any tokens.

use super::spelled::Spelled;
use crate::text::tokenizer::Tokenizer;
use tidemill_proto::{
    block::Token,
    thought::{ReaderState, ThoughtReader},
};

/// The state of a reader before an answer.
pub(super) const BEFORE: u8 = 0;
/// The state in which a thought has begun.
pub(super) const OPEN: u8 = 1;

/// A place between two characters. A part of a mark is text that may become the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Only white space and this part of a mark so far.
    Before(&'static str),
    /// In the thought, after this part of its end.
    Thought(&'static str),
    Answer,
}

#[derive(Clone, Copy, Debug)]
struct Marks {
    begin: &'static str,
    end: &'static str,
}

/// The tokens in which a model ends a thought: the mark's own token, or the tokenizer's choice. `None` if there are none.
pub(super) fn closing(end: &str, tokenizer: &Tokenizer) -> Option<Vec<Token>> {
    let spelled = || tokenizer.encode(end, false).ok().filter(|tokens| !tokens.is_empty());
    tokenizer.unspoken_id_of(end).map(|id| vec![id]).or_else(spelled)
}

/// Makes the table. `None` if the tokens of `closing` do not spell the end.
pub(super) fn reader(begin: &'static str, end: &'static str, closing: &[Token], spelled: &Spelled) -> Option<ThoughtReader> {
    let marks = Marks { begin, end };
    let mut places = vec![Place::Before(""), Place::Thought(""), Place::Answer];
    let mut states = Vec::new();
    while let Some(&from) = places.get(states.len()) {
        let mut number = |place| {
            let known = places.iter().position(|known| *known == place);
            let number = known.unwrap_or_else(|| {
                places.push(place);
                places.len() - 1
            });
            u8::try_from(number).expect("marks have fewer parts")
        };
        let otherwise = from.otherwise();
        let differing = spelled.iter().map(|(token, text)| (token, marks.after(from, text))).filter(|(_, to)| *to != otherwise);
        states.push(ReaderState {
            is_thought: matches!(from, Place::Thought(_)),
            steps: differing.map(|(token, to)| (token, number(to))).collect(),
            otherwise: number(otherwise),
            ending: Vec::new(),
        });
    }
    let mut at = Place::Thought("");
    for (place, state) in places.iter().zip(&mut states) {
        if matches!(place, Place::Thought(_)) {
            state.ending = vec![*closing.first()?];
        }
    }
    // A model that has begun to close goes on.
    for &token in closing {
        let state = places.iter().position(|place| *place == at)?;
        if at == Place::Answer {
            return None;
        }
        states[state].ending = vec![token];
        at = marks.after(at, spelled.of(token));
    }
    (at == Place::Answer).then_some(ThoughtReader { states })
}

impl Place {
    /// The place after a token that has nothing to do with marks.
    fn otherwise(self) -> Self {
        match self {
            Self::Before(_) | Self::Answer => Self::Answer,
            Self::Thought(_) => Self::Thought(""),
        }
    }
}

impl Marks {
    fn after(&self, from: Place, text: &str) -> Place {
        if text.is_empty() {
            return if from == Place::Before("") { from } else { from.otherwise() };
        }
        if let Place::Thought(part) = from {
            let goes_on = !part.is_empty() && text.starts_with(&self.end[part.len()..=part.len()]);
            if !goes_on && !text.contains(&self.end[..1]) {
                return Place::Thought("");
            }
        }
        let mut at = from;
        for c in text.chars() {
            at = self.step(at, c);
            if at == Place::Answer {
                break;
            }
        }
        at
    }

    fn step(&self, from: Place, c: char) -> Place {
        match from {
            Place::Answer => Place::Answer,
            Place::Before("") if c.is_whitespace() => from,
            Place::Before(part) => {
                let text = format!("{part}{c}");
                let grown = |mark: &'static str| mark.starts_with(&text).then(|| &mark[..text.len()]);
                match grown(self.begin).or(grown(self.end)) {
                    Some(whole) if whole == self.begin => Place::Thought(""),
                    Some(whole) if whole == self.end => Place::Answer,
                    Some(part) => Place::Before(part),
                    None => Place::Answer,
                }
            }
            Place::Thought(part) => {
                let text = format!("{part}{c}");
                let mut rests = text.char_indices().map(|(at, _)| &text[at..]);
                let held = rests.find(|rest| self.end.starts_with(rest)).map_or(0, str::len);
                if held == self.end.len() { Place::Answer } else { Place::Thought(&self.end[..held]) }
            }
        }
    }
}
