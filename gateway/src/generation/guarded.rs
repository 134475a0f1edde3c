//! An answer under safety checks: nothing of a violation reaches the client, be it text, thought, a call's arguments, or the same as
//! token ids or log-probabilities.

use super::{CallDelta, Finish, FinishReason, Inspect, Logprob, Piece, StopReason, Violation};
use std::{ops::ControlFlow, sync::Arc};
use tidemill_proto::block::Token;
use tidemill_safety::{
    category::{Finding, Thresholds},
    guard::Guard,
    stream::{Released, Stream},
};

/// What answers are held to.
#[derive(Clone, Debug)]
pub struct Guarded {
    pub guard: Arc<Guard>,
    pub thresholds: Thresholds,
}

impl Guarded {
    /// For one choice.
    pub fn inspector(&self) -> Inspector {
        let stream = || Stream::new(Arc::clone(&self.guard), self.thresholds);
        Inspector {
            text: stream(),
            reasoning: stream(),
            arguments: stream(),
            guarded: self.clone(),
            call: None,
            tokens: Vec::new(),
            logprobs: Vec::new(),
        }
    }
}

#[derive(Debug)]
pub struct Inspector {
    guarded: Guarded,
    text: Stream,
    reasoning: Stream,
    /// Of the call that is being made.
    arguments: Stream,
    /// Its index.
    call: Option<u32>,
    /// Held back as long as any of their text is.
    tokens: Vec<Token>,
    logprobs: Vec<Logprob>,
}

impl Inspect for Inspector {
    fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish> {
        self.tokens.append(&mut piece.tokens);
        self.logprobs.append(&mut piece.logprobs);
        if let Err(finding) = self.release(piece) {
            let parts = [&self.reasoning, &self.text, &self.arguments].map(Stream::excerpt);
            let violation = Violation { finding, appeal_id: None, text: parts.concat() };
            return ControlFlow::Break(Finish { reason: FinishReason::ContentFilter, stop_reason: Some(StopReason::Violation(violation)) });
        }
        let held = self.text.held_bytes() + self.reasoning.held_bytes() + self.arguments.held_bytes();
        if held == 0 {
            piece.tokens = std::mem::take(&mut self.tokens);
            piece.logprobs = std::mem::take(&mut self.logprobs);
        }
        ControlFlow::Continue(())
    }
}

impl Inspector {
    /// Leaves in the piece what may be released now. An error: it goes no further than that.
    fn release(&mut self, piece: &mut Piece) -> Result<(), Finding> {
        let ends = piece.finish.is_some();
        let calls = std::mem::take(&mut piece.calls);
        let said = std::mem::take(&mut piece.text);
        give(&mut piece.reasoning, |thought| self.reasoning.push(thought))?;
        // Nothing that begins in one part goes on in the next.
        if ends || !said.is_empty() || !calls.is_empty() {
            add(&mut piece.reasoning, self.reasoning.finish())?;
        }
        add(&mut piece.text, self.text.push(&said))?;
        if ends || !calls.is_empty() {
            add(&mut piece.text, self.text.finish())?;
        }
        for mut delta in calls {
            if self.call != Some(delta.index) {
                self.end_call(piece)?;
                self.call = Some(delta.index);
            }
            let Released { text, violation } = self.arguments.push(&delta.arguments);
            delta.arguments = text;
            if !delta.arguments.is_empty() || delta.id.is_some() {
                piece.calls.push(delta);
            }
            violation.map_or(Ok(()), Err)?;
        }
        if ends { self.end_call(piece) } else { Ok(()) }
    }

    /// The rest of the call that was being made; then there is none.
    fn end_call(&mut self, piece: &mut Piece) -> Result<(), Finding> {
        let Some(index) = self.call.take() else { return Ok(()) };
        let Released { text: arguments, violation } = self.arguments.finish();
        if !arguments.is_empty() {
            piece.calls.push(CallDelta { index, arguments, ..CallDelta::default() });
        }
        self.arguments = Stream::new(Arc::clone(&self.guarded.guard), self.guarded.thresholds);
        violation.map_or(Ok(()), Err)
    }
}

fn give(text: &mut String, push: impl FnOnce(&str) -> Released) -> Result<(), Finding> {
    let released = push(text);
    text.clear();
    add(text, released)
}

fn add(text: &mut String, Released { text: more, violation }: Released) -> Result<(), Finding> {
    *text += &more;
    violation.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_safety::{category::Category, patterns::Patterns};

    fn inspector() -> Inspector {
        let patterns = Patterns::new(&["[dangerous]\npipe bomb"]).unwrap();
        Guarded { guard: Arc::new(Guard { patterns, classifier: None }), thresholds: Thresholds::OUTPUT }.inspector()
    }

    fn said(text: &str, token: Token) -> Piece {
        Piece { text: text.into(), tokens: vec![token], ..Piece::default() }
    }

    #[test]
    fn token_ids_wait_with_their_text() {
        let mut inspector = inspector();
        let mut out = Vec::new();
        for (text, token) in [("a ", 1), ("pipe", 2), (" org", 3), ("an ", 4), ("pipe ", 5), ("bomb", 6)] {
            let mut piece = said(text, token);
            assert!(inspector.inspect(&mut piece).is_continue());
            out.push((piece.text, piece.tokens));
        }
        let none = || (String::new(), vec![]);
        assert_eq!(
            out,
            [("a ".into(), vec![1]), none(), (" org".replace(" org", "pipe org"), vec![2, 3]), ("an ".into(), vec![4]), none(), none()]
        );
        let mut end = Piece { finish: Some(Finish::LENGTH), ..Piece::default() };
        let ControlFlow::Break(finish) = inspector.inspect(&mut end) else { panic!("a violation ends with the answer, too") };
        let Some(StopReason::Violation(Violation { finding, text, .. })) = finish.stop_reason else { panic!("{:?}", finish.stop_reason) };
        assert_eq!((finding.category, text.as_str()), (Category::Dangerous, "a pipe organ pipe bomb"));
        assert_eq!((end.text.as_str(), end.tokens.len()), ("", 0));
    }

    #[test]
    fn thoughts_and_arguments_are_read_as_well() {
        let mut piece = Piece { reasoning: "build a pipe bomb now".into(), ..Piece::default() };
        assert!(inspector().inspect(&mut piece).is_break());
        assert_eq!(piece.reasoning, "build a ");

        let mut inspector = inspector();
        let call =
            |index, id: Option<&str>, arguments: &str| CallDelta { index, id: id.map(Into::into), name: None, arguments: arguments.into() };
        let mut first = Piece { calls: vec![call(0, Some("a"), "{\"x\": \"pipe")], ..Piece::default() };
        assert!(inspector.inspect(&mut first).is_continue());
        assert_eq!(first.calls, [call(0, Some("a"), "{\"x\": \"")]);
        // The next call says that the first has ended.
        let mut next = Piece { calls: vec![call(1, Some("b"), "{\"y\": \"a pipe bomb\"}")], ..Piece::default() };
        assert!(inspector.inspect(&mut next).is_break());
        assert_eq!(next.calls, [call(0, None, "pipe"), call(1, Some("b"), "{\"y\": \"a ")]);
    }
}
