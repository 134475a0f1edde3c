//! The limit on a sequence's thought, kept to the token.
//!
//! The gateway knows the marks between which a model thinks, and spells them in tokens: a [`ThoughtReader`] is a table that reads generated
//! tokens one by one, so that a decode worker needs neither the template nor the tokenizer. The number of tokens of thought is a pure
//! function of the limit and the tokens so far. A worker that takes a sequence over ends its thought at the same token.
//!
//! ```text
//!   tokens ──► state, state, …          a token between two states of thought is thought
//!                 │
//!                 └── once `tokens_max` are thought: only the state's `ending` tokens may be drawn, if it has any
//! ```
//!
//! No token is written into a sequence: the model draws the end of its thought, as the only token that it may.

use crate::block::Token;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The limit on the thought of one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ThoughtLimit {
    pub tokens_max: u32,
    /// The state before the first generated token.
    pub start: u8,
    #[serde(with = "shared")]
    pub reader: Arc<ThoughtReader>,
}

/// A table by which generated tokens are read. A state's number is its place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ThoughtReader {
    pub states: Vec<ReaderState>,
}

/// A state between two tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReaderState {
    /// Whether the text so far ends within a thought.
    pub is_thought: bool,
    /// The state after a token that `steps` does not list.
    pub otherwise: u8,
    /// The states after other tokens, in ascending order of the tokens.
    pub steps: Vec<(Token, u8)>,
    /// The tokens of which one must be drawn here once the limit is reached; empty if any token may follow.
    pub ending: Vec<Token>,
}

/// The place of a sequence in its thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThoughtProgress {
    state: u8,
    /// The number of tokens of thought so far.
    pub tokens: u32,
}

impl ThoughtReader {
    fn is_sound(&self) -> bool {
        let exists = |state: u8| usize::from(state) < self.states.len();
        self.states.iter().all(|state| {
            exists(state.otherwise) && state.steps.iter().all(|&(_, next)| exists(next)) && state.steps.is_sorted_by(|a, b| a.0 < b.0)
        })
    }

    fn next(&self, state: u8, token: Token) -> u8 {
        let from = &self.states[usize::from(state)];
        from.steps.binary_search_by_key(&token, |&(token, _)| token).map_or(from.otherwise, |at| from.steps[at].1)
    }
}

impl ThoughtLimit {
    /// Whether all its states exist. Every other method needs that.
    pub fn is_sound(&self) -> bool {
        usize::from(self.start) < self.reader.states.len() && self.reader.is_sound()
    }

    /// The place after these generated tokens.
    pub fn after(&self, generated: &[Token]) -> ThoughtProgress {
        let begin = ThoughtProgress { state: self.start, tokens: 0 };
        generated.iter().fold(begin, |progress, &token| self.step(progress, token))
    }

    /// The place after one more token.
    #[must_use]
    pub fn step(&self, from: ThoughtProgress, token: Token) -> ThoughtProgress {
        let state = self.reader.next(from.state, token);
        let is_thought = |state: u8| self.reader.states[usize::from(state)].is_thought;
        let counts = is_thought(from.state) && is_thought(state);
        ThoughtProgress { state, tokens: from.tokens.saturating_add(counts.into()) }
    }

    /// The tokens of which one must be drawn next; empty if any token may follow.
    pub fn required(&self, at: ThoughtProgress) -> &[Token] {
        if at.tokens < self.tokens_max { &[] } else { &self.reader.states[usize::from(at.state)].ending }
    }
}

/// Serializes the reader as if it were not shared.
mod shared {
    use super::ThoughtReader;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub(super) fn serialize<S: Serializer>(reader: &Arc<ThoughtReader>, serializer: S) -> Result<S::Ok, S::Error> {
        reader.as_ref().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<ThoughtReader>, D::Error> {
        ThoughtReader::deserialize(deserializer).map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Token = 7;
    const END: Token = 8;

    /// A thought between two marks, at the beginning of an answer.
    fn limit(tokens_max: u32, start: u8) -> ThoughtLimit {
        let before = ReaderState { otherwise: 2, steps: vec![(BEGIN, 1)], ..ReaderState::default() };
        let thought = ReaderState { is_thought: true, otherwise: 1, steps: vec![(END, 2)], ending: vec![END] };
        let answer = ReaderState { otherwise: 2, ..ReaderState::default() };
        ThoughtLimit { tokens_max, start, reader: Arc::new(ThoughtReader { states: vec![before, thought, answer] }) }
    }

    #[test]
    fn marks_are_no_thought_and_only_the_end_may_follow_its_last_token() {
        let limit = limit(2, 0);
        let required = |tokens: &[Token]| (limit.after(tokens).tokens, limit.required(limit.after(tokens)).to_vec());
        assert_eq!(required(&[BEGIN]), (0, vec![]));
        assert_eq!(required(&[BEGIN, 1]), (1, vec![]));
        assert_eq!(required(&[BEGIN, 1, 2]), (2, vec![END]));
        assert_eq!(required(&[BEGIN, 1, 2, END, 3]), (2, vec![]));
        assert_eq!(required(&[1, BEGIN, 1, 2, 3]), (0, vec![]), "an answer that begins without a thought has none");
    }

    #[test]
    fn no_thought_at_all_ends_where_it_begins() {
        let limit = limit(0, 1);
        assert_eq!(limit.required(limit.after(&[])), [END]);
        assert_eq!(limit.required(limit.after(&[END])), [] as [Token; 0]);
    }

    #[test]
    fn a_table_that_leads_nowhere_is_not_sound() {
        assert!(limit(1, 0).is_sound());
        assert!(!limit(1, 3).is_sound());
        for broken in [
            ReaderState { otherwise: 9, ..ReaderState::default() },
            ReaderState { steps: vec![(1, 9)], ..ReaderState::default() },
            ReaderState { steps: vec![(2, 0), (1, 0)], ..ReaderState::default() },
        ] {
            let reader = Arc::new(ThoughtReader { states: vec![broken] });
            assert!(!ThoughtLimit { tokens_max: 1, start: 0, reader }.is_sound());
        }
    }
}
