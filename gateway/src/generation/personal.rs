//! An answer without personal data, except that of its own request, which replaces its placeholders: in text, reasoning, and calls'
//! arguments.

use crate::generation::piece::{CallDelta, Finish, Inspect, Logprob, Piece};
use std::{ops::ControlFlow, sync::Arc};
use tidemill_proto::block::Token;
use tidemill_safety::pii::{
    Kind,
    find::Finder,
    redact::Stream,
    vault::{Restorer, Vault},
};

/// The treatment of personal data in answers.
#[derive(Clone, Debug, Default)]
pub struct Personal {
    /// Finds personal data to be removed, if that is wanted.
    pub finder: Option<Arc<Finder>>,
    /// The request's own data to be restored, if there is any.
    pub vault: Option<Arc<Vault>>,
    /// Called with the kind of each finding that was removed.
    pub count: Option<fn(Kind)>,
}

impl Personal {
    /// Creates the inspector of one choice; `None` if there is nothing to do.
    pub fn inspector(&self) -> Option<Inspector> {
        (self.finder.is_some() || self.vault.is_some()).then(|| Inspector {
            text: self.part(),
            reasoning: self.part(),
            arguments: self.part(),
            personal: self.clone(),
            call: None,
            tokens: Vec::new(),
            logprobs: Vec::new(),
        })
    }

    fn part(&self) -> Part {
        Part { stream: self.finder.clone().map(Stream::new), vault: self.vault.clone(), restorer: Restorer::default(), found: false }
    }
}

/// One of an answer's texts, with its state.
#[derive(Debug)]
struct Part {
    stream: Option<Stream>,
    vault: Option<Arc<Vault>>,
    restorer: Restorer,
    /// Whether text was removed that the token ids would still reveal.
    found: bool,
}

impl Part {
    fn push(&mut self, text: &str, count: Option<fn(Kind)>) -> String {
        self.pass(text, false, count)
    }

    fn finish(&mut self, count: Option<fn(Kind)>) -> String {
        self.pass("", true, count)
    }

    fn pass(&mut self, text: &str, ends: bool, count: Option<fn(Kind)>) -> String {
        let mut text = text.to_owned();
        if let Some(stream) = &mut self.stream {
            text = stream.push(&text);
            if ends {
                text += &stream.finish();
            }
            for kind in stream.take_found() {
                self.found = true;
                count.into_iter().for_each(|count| count(kind));
            }
        }
        match &self.vault {
            Some(vault) if ends => self.restorer.push(vault, &text) + &self.restorer.finish(vault),
            Some(vault) => self.restorer.push(vault, &text),
            None => text,
        }
    }

    /// Counts the bytes that are held back until more text decides about them.
    fn held_bytes(&self) -> usize {
        self.stream.as_ref().map_or(0, Stream::held_bytes)
    }
}

#[derive(Debug)]
pub struct Inspector {
    personal: Personal,
    text: Part,
    reasoning: Part,
    /// The arguments of the current call.
    arguments: Part,
    /// The call's index.
    call: Option<u32>,
    /// Tokens and log-probabilities, held back as long as any of their text is.
    tokens: Vec<Token>,
    logprobs: Vec<Logprob>,
}

impl Inspect for Inspector {
    fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish> {
        let count = self.personal.count;
        let ends = piece.finish.is_some();
        let calls = std::mem::take(&mut piece.calls);
        let said = std::mem::take(&mut piece.text);
        self.tokens.append(&mut piece.tokens);
        self.logprobs.append(&mut piece.logprobs);
        piece.reasoning = self.reasoning.push(&piece.reasoning, count);
        // Text that starts in one part does not continue in the next.
        if ends || !said.is_empty() || !calls.is_empty() {
            piece.reasoning += &self.reasoning.finish(count);
        }
        piece.text = self.text.push(&said, count);
        if ends || !calls.is_empty() {
            piece.text += &self.text.finish(count);
        }
        for mut delta in calls {
            if self.call != Some(delta.index) {
                self.end_call(piece);
                self.call = Some(delta.index);
            }
            delta.arguments = self.arguments.push(&delta.arguments, count);
            if !delta.arguments.is_empty() || delta.id.is_some() {
                piece.calls.push(delta);
            }
        }
        if ends {
            self.end_call(piece);
        }
        let parts = || [&self.text, &self.reasoning, &self.arguments];
        if parts().iter().any(|part| part.found) {
            for part in [&mut self.text, &mut self.reasoning, &mut self.arguments] {
                part.found = false;
            }
            self.tokens.clear();
            self.logprobs.clear();
        } else if parts().iter().all(|part| part.held_bytes() == 0) {
            piece.tokens = std::mem::take(&mut self.tokens);
            piece.logprobs = std::mem::take(&mut self.logprobs);
        }
        ControlFlow::Continue(())
    }
}

impl Inspector {
    /// Ends the current call, and releases the rest of its arguments.
    fn end_call(&mut self, piece: &mut Piece) {
        let Some(index) = self.call.take() else { return };
        let arguments = self.arguments.finish(self.personal.count);
        if !arguments.is_empty() {
            piece.calls.push(CallDelta { index, arguments, ..CallDelta::default() });
        }
        let found = self.arguments.found;
        self.arguments = Part { found, ..self.personal.part() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(inspector: &mut Inspector, pieces: Vec<Piece>) -> Piece {
        let mut whole = Piece::default();
        for mut piece in pieces {
            assert!(inspector.inspect(&mut piece).is_continue());
            whole.append(piece);
        }
        whole
    }

    fn said(text: &str, token: Token) -> Piece {
        Piece { text: text.into(), tokens: vec![token], ..Piece::default() }
    }

    fn end() -> Piece {
        Piece { finish: Some(Finish::LENGTH), ..Piece::default() }
    }

    #[test]
    fn what_is_taken_out_of_the_text_is_not_in_the_tokens() {
        let finder = Some(Arc::new(Finder::new(&Kind::ALL)));
        let mut inspector = Personal { finder, ..Personal::default() }.inspector().unwrap();
        let pieces = vec![said("Write ", 1), said("to a", 2), said("@b.or", 3), said("g now", 4), said(". ", 5), said("Bye", 6), end()];
        let whole = all(&mut inspector, pieces);
        assert_eq!((whole.text.as_str(), whole.tokens), ("Write to [EMAIL] now. Bye", vec![1, 5, 6]));
        assert!(whole.finish.is_some());
    }

    #[test]
    fn placeholders_go_back_in_text_thought_and_arguments_however_they_are_cut() {
        let mut vault = Vault::default();
        assert_eq!(vault.redact(&Finder::new(&Kind::ALL), "I am a@b.org"), "I am [EMAIL_1]");
        let mut inspector = Personal { vault: Some(Arc::new(vault)), ..Personal::default() }.inspector().unwrap();
        let call =
            |arguments: &str, id: Option<&str>| CallDelta { id: id.map(Into::into), arguments: arguments.into(), ..CallDelta::default() };
        let pieces = vec![
            Piece { reasoning: "It is [EM".into(), ..Piece::default() },
            Piece { reasoning: "AIL_1].".into(), ..Piece::default() },
            said("Dear [EMAIL", 1),
            said("_1], [EMAIL_2] [", 2),
            Piece { calls: vec![call("{\"to\":\"[EMA", Some("x"))], ..Piece::default() },
            Piece { calls: vec![call("IL_1]\"}", None)], ..Piece::default() },
            end(),
        ];
        let whole = all(&mut inspector, pieces);
        assert_eq!((whole.reasoning.as_str(), whole.text.as_str()), ("It is a@b.org.", "Dear a@b.org, [EMAIL_2] ["));
        assert_eq!((whole.calls[0].arguments.as_str(), whole.tokens), ("{\"to\":\"a@b.org\"}", vec![1, 2]));
    }
}
