//! The tokens of an answer's text, among those of its thoughts, calls, marks and end. A token counts with the first of its characters that
//! a client gets: only then is it known to be text. A token without characters of its own, one of several that are a character together,
//! counts with the next.

use super::piece::Logprob;
use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(super) struct Said {
    /// The number of characters of the model's output so far.
    heard: usize,
    /// The number of them that were told apart.
    decided: usize,
    /// The number of characters of text so far.
    text: usize,
    /// The number of characters of text that were sent.
    sent: usize,
    /// Tokens without characters, which belong to the next.
    unfinished: Vec<Logprob>,
    /// Tokens with characters that were not told apart yet.
    undecided: VecDeque<Heard>,
    /// Tokens of text that was not sent yet.
    unsent: VecDeque<Heard>,
}

/// Tokens that are a character or more together.
#[derive(Debug)]
struct Heard {
    logprobs: Vec<Logprob>,
    /// The number of characters of output up to their last.
    end: usize,
    /// The number of characters of text before their first one that is text; `None` if none is so far.
    place: Option<usize>,
}

impl Said {
    /// Takes a token, if there was one, and the number of characters that are complete with it.
    pub(super) fn hear(&mut self, logprob: Option<Logprob>, characters: usize) {
        self.unfinished.extend(logprob);
        self.heard += characters;
        if characters > 0 {
            let logprobs = std::mem::take(&mut self.unfinished);
            self.undecided.push_back(Heard { logprobs, end: self.heard, place: None });
        }
    }

    /// Notes that all but the last `held` of the first `reached` characters are told apart, and that the first `text` of those that were
    /// not before are text.
    pub(super) fn decide(&mut self, text: usize, reached: usize, held: usize) {
        let text_end = self.decided + text;
        let mut begin = self.decided;
        for heard in &mut self.undecided {
            if begin >= text_end {
                break;
            }
            heard.place.get_or_insert(self.text + (begin - self.decided));
            begin = heard.end.max(begin);
        }
        self.text += text;
        self.decided = reached.saturating_sub(held).max(text_end);
        while let Some(heard) = self.undecided.pop_front_if(|heard| heard.end <= self.decided) {
            self.unsent.extend(heard.place.is_some().then_some(heard));
        }
    }

    /// The number of characters that were heard.
    pub(super) fn heard(&self) -> usize {
        self.heard
    }

    /// Takes the tokens of the next `characters` of text that are sent.
    pub(super) fn send(&mut self, characters: usize) -> Vec<Logprob> {
        self.sent += characters;
        let mut sent = Vec::new();
        while let Some(heard) = self.unsent.pop_front_if(|heard| heard.place.is_some_and(|place| place < self.sent)) {
            sent.extend(heard.logprobs);
        }
        // A token may be text at its beginning, and hold a mark's beginning after that.
        for heard in &mut self.undecided {
            if heard.place.is_some_and(|place| place < self.sent) {
                sent.append(&mut heard.logprobs);
            }
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::sampling::TokenLogprob;

    fn token(token: u32) -> Option<Logprob> {
        Some(Logprob { token, logprob: TokenLogprob { logprob: -1.0, top: Vec::new() }, offset: 0 })
    }

    fn ids(sent: Vec<Logprob>) -> Vec<u32> {
        sent.into_iter().map(|logprob| logprob.token).collect()
    }

    #[test]
    fn what_is_held_back_counts_when_it_is_sent_and_a_mark_never() {
        let mut said = Said::default();
        said.hear(token(1), 2);
        said.decide(2, 2, 0);
        assert_eq!(ids(said.send(1)), [1]);
        // The beginning of a mark, which it was not.
        said.hear(token(2), 1);
        said.decide(0, 3, 1);
        assert_eq!(ids(said.send(1)), [0_u32; 0]);
        said.hear(token(3), 1);
        said.decide(2, 4, 0);
        assert_eq!(ids(said.send(2)), [2, 3]);
        // A mark, and text after it.
        said.hear(token(4), 3);
        said.decide(0, 7, 0);
        said.hear(token(5), 1);
        said.decide(1, 8, 0);
        assert_eq!(ids(said.send(1)), [5]);
    }

    #[test]
    fn tokens_that_are_a_character_together_count_together() {
        let mut said = Said::default();
        said.hear(token(1), 0);
        said.hear(token(2), 0);
        assert_eq!(ids(said.send(0)), [0_u32; 0]);
        said.hear(token(3), 1);
        said.decide(1, 1, 0);
        assert_eq!(ids(said.send(1)), [1, 2, 3]);
    }

    #[test]
    fn a_token_that_begins_as_text_counts_once() {
        let mut said = Said::default();
        said.hear(token(1), 3);
        said.decide(2, 3, 1);
        assert_eq!(ids(said.send(2)), [1]);
        said.decide(1, 3, 0);
        assert_eq!(ids(said.send(1)), [0_u32; 0]);
    }
}
