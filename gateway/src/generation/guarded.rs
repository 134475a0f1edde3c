//! An answer under safety checks: no part of a violation reaches the client, as text, reasoning, a call's arguments, or in the form of
//! token ids or log-probabilities. If a moderator is asked about an uncertain finding, the answer stops there until its verdict: further
//! pieces wait, at most as many as the choice may have tokens.

use crate::generation::piece::{CallDelta, Finish, FinishReason, Inspect, Logprob, Piece, StopReason, Unchecked, Violation};
use std::{collections::VecDeque, ops::ControlFlow, sync::Arc};
use tidemill_proto::block::Token;
use tidemill_safety::{
    category::{Finding, Stage, Thresholds},
    guard::Guard,
    judge::Doubt,
    stream::{Released, Stream},
};

/// The rules for answers.
#[derive(Clone, Debug)]
pub struct Guarded {
    pub guard: Arc<Guard>,
    pub thresholds: Thresholds,
    /// Whether uncertain findings are moderated.
    pub asks: bool,
}

/// A moderator's verdict on an uncertain finding.
#[derive(Clone, Debug, PartialEq)]
pub enum ModerationVerdict {
    Harmless,
    Harmful(Finding),
    /// The check could not be made, and the text must not be shown.
    Unchecked(Unchecked),
}

impl Guarded {
    /// Makes the inspector of one choice.
    pub fn inspector(&self) -> Inspector {
        Inspector {
            text: self.stream(),
            reasoning: self.stream(),
            arguments: self.stream(),
            guarded: self.clone(),
            call: None,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    fn stream(&self) -> Stream {
        let stream = if self.asks { Stream::with_doubts } else { Stream::new };
        stream(Arc::clone(&self.guard), self.thresholds)
    }
}

#[derive(Debug)]
pub struct Inspector {
    guarded: Guarded,
    text: Stream,
    reasoning: Stream,
    /// The arguments of the current call.
    arguments: Stream,
    /// The call's index.
    call: Option<u32>,
    /// Tokens and log-probabilities, held back as long as any of their text is.
    tokens: Vec<Token>,
    logprobs: Vec<Logprob>,
    /// Pieces after an uncertain finding: the rest of its own, possibly empty, and those that came since. Empty if there is no finding.
    waiting: VecDeque<Piece>,
}

/// The reason why a piece is not released.
#[derive(Debug)]
enum Halt {
    Violation(Finding),
    Doubt,
}

impl Inspect for Inspector {
    fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish> {
        let mut given = std::mem::take(piece);
        // They are already counted in the usage.
        piece.reasoning_tokens = std::mem::take(&mut given.reasoning_tokens);
        if !self.waiting.is_empty() {
            self.waiting.push_back(given);
            return ControlFlow::Continue(());
        }
        self.pass(given, piece)
    }
}

impl Inspector {
    /// The uncertain finding that must be moderated before the answer continues.
    pub fn doubt(&self) -> Option<&Doubt> {
        if self.waiting.is_empty() {
            // Also for an answer that has ended with its finding.
            return None;
        }
        [&self.reasoning, &self.text, &self.arguments].into_iter().find_map(Stream::doubt)
    }

    /// Applies the verdict. Returns the pieces that it releases, up to the next finding.
    pub fn settle(&mut self, ruling: ModerationVerdict) -> Vec<Piece> {
        let mut piece = Piece::default();
        let finding = match ruling {
            ModerationVerdict::Harmless => None,
            ModerationVerdict::Harmful(finding) => Some(finding),
            ModerationVerdict::Unchecked(unchecked) => {
                self.waiting.clear();
                piece.finish = Some(filtered(StopReason::Unchecked(unchecked)));
                return vec![piece];
            }
        };
        let doubted = self.doubt().map(|doubt| doubt.text.clone()).unwrap_or_default();
        match self.settle_part(finding, &mut piece) {
            Ok(()) => {}
            Err(Halt::Doubt) => return vec![piece],
            Err(Halt::Violation(finding)) => {
                self.waiting.clear();
                let text = if finding.stage == Stage::Model { doubted } else { self.excerpt() };
                piece.finish = Some(filtered(StopReason::Violation(Violation { finding, appeal_id: None, text })));
                return vec![piece];
            }
        }
        let mut pieces = Vec::new();
        while self.doubt().is_none()
            && let Some(given) = self.waiting.pop_front()
        {
            if let ControlFlow::Break(finish) = self.pass(given, &mut piece) {
                self.waiting.clear();
                piece.finish = Some(finish);
            }
            pieces.push(std::mem::take(&mut piece));
        }
        pieces
    }

    /// Ends the check of the part of the answer (reasoning or text) that waits for a verdict: releases it into `piece`, or halts the answer if the
    /// finding is harmful.
    fn settle_part(&mut self, finding: Option<Finding>, piece: &mut Piece) -> Result<(), Halt> {
        if self.reasoning.doubt().is_some() {
            return add(&mut piece.reasoning, self.reasoning.settle(finding));
        }
        if self.text.doubt().is_some() {
            return add(&mut piece.text, self.text.settle(finding));
        }
        self.add_arguments(|arguments| arguments.settle(finding), piece)
    }

    /// Moves the part of `given` that may be released now into `piece`.
    fn pass(&mut self, mut given: Piece, piece: &mut Piece) -> ControlFlow<Finish> {
        self.tokens.append(&mut given.tokens);
        self.logprobs.append(&mut given.logprobs);
        match self.release(&mut given, piece) {
            Ok(()) => piece.finish = given.finish,
            Err(Halt::Doubt) => {
                self.waiting.push_front(given);
                return ControlFlow::Continue(());
            }
            Err(Halt::Violation(finding)) => {
                let violation = Violation { finding, appeal_id: None, text: self.excerpt() };
                return ControlFlow::Break(filtered(StopReason::Violation(violation)));
            }
        }
        let held = self.text.held_bytes() + self.reasoning.held_bytes() + self.arguments.held_bytes();
        if held == 0 {
            piece.tokens = std::mem::take(&mut self.tokens);
            piece.logprobs = std::mem::take(&mut self.logprobs);
        }
        ControlFlow::Continue(())
    }

    /// Takes from `given` the part that may be released now, and holds the rest back. On an error the answer ends there, and the rest of
    /// `given` is not examined.
    fn release(&mut self, given: &mut Piece, piece: &mut Piece) -> Result<(), Halt> {
        let ends = given.finish.is_some();
        add(&mut piece.reasoning, self.reasoning.push(&std::mem::take(&mut given.reasoning)))?;
        // Text that starts in one part does not continue in the next.
        if ends || !given.text.is_empty() || !given.calls.is_empty() {
            add(&mut piece.reasoning, self.reasoning.finish())?;
        }
        add(&mut piece.text, self.text.push(&std::mem::take(&mut given.text)))?;
        if ends || !given.calls.is_empty() {
            add(&mut piece.text, self.text.finish())?;
        }
        while let Some(next) = given.calls.first() {
            let index = next.index;
            if self.call != Some(index) {
                self.end_call(piece)?;
                self.call = Some(index);
            }
            let mut delta = given.calls.remove(0);
            let Released { text, violation, doubted } = self.arguments.push(&delta.arguments);
            delta.arguments = text;
            if !delta.arguments.is_empty() || delta.id.is_some() {
                piece.calls.push(delta);
            }
            halted(violation, doubted)?;
        }
        if ends { self.end_call(piece) } else { Ok(()) }
    }

    /// Ends the current call, and releases the rest of its arguments.
    fn end_call(&mut self, piece: &mut Piece) -> Result<(), Halt> {
        self.add_arguments(Stream::finish, piece)?;
        if self.call.take().is_some() {
            self.arguments = self.guarded.stream();
        }
        Ok(())
    }

    /// Releases arguments of the current call.
    fn add_arguments(&mut self, more: impl FnOnce(&mut Stream) -> Released, piece: &mut Piece) -> Result<(), Halt> {
        let Some(index) = self.call else { return Ok(()) };
        let Released { text: arguments, violation, doubted } = more(&mut self.arguments);
        if !arguments.is_empty() {
            piece.calls.push(CallDelta { index, arguments, ..CallDelta::default() });
        }
        halted(violation, doubted)
    }

    /// Returns the text around the violation, for reviewers.
    fn excerpt(&self) -> String {
        [&self.reasoning, &self.text, &self.arguments].map(Stream::excerpt).concat()
    }
}

fn filtered(stop_reason: StopReason) -> Finish {
    Finish { reason: FinishReason::ContentFilter, stop_reason: Some(stop_reason) }
}

fn add(text: &mut String, Released { text: more, violation, doubted }: Released) -> Result<(), Halt> {
    if text.is_empty() {
        *text = more;
    } else {
        *text += &more;
    }
    halted(violation, doubted)
}

fn halted(violation: Option<Finding>, doubted: bool) -> Result<(), Halt> {
    match violation {
        Some(finding) => Err(Halt::Violation(finding)),
        None if doubted => Err(Halt::Doubt),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;
    use tidemill_safety::{
        category::{Category, Threshold},
        classifier::Classifier,
        patterns::Patterns,
    };

    /// A guard for made-up words: a `zorb` is uncertain.
    static GUARD: LazyLock<Arc<Guard>> = LazyLock::new(|| {
        let kinds = ["is old and must stay", "is vile and must go"];
        let harmless =
            ["tree", "stone", "river", "house"].into_iter().flat_map(|noun| kinds.map(|kind| (format!("the {noun} {kind}"), None)));
        let kinds = ["is vile and must go", "is base and should leave"];
        let hate = ["the", "a", "every"]
            .into_iter()
            .flat_map(|article| kinds.map(|kind| (format!("{article} zorb {kind}"), Some(Category::Hate))));
        let examples: Vec<_> = hate.chain(harmless).collect();
        let classifier = Classifier::train(examples.iter().map(|(text, label)| (text.as_str(), *label)));
        Arc::new(Guard { patterns: Patterns::new(&["[dangerous]\npipe bomb"]).unwrap(), classifier: Some(classifier) })
    });

    fn asking() -> Inspector {
        let mut thresholds = Thresholds::OUTPUT;
        thresholds.set(Category::Hate, Threshold::High);
        Guarded { guard: Arc::clone(&GUARD), thresholds, asks: true }.inspector()
    }

    fn harmful() -> ModerationVerdict {
        ModerationVerdict::Harmful(Finding { category: Category::Hate, stage: Stage::Model, score: 1.0 })
    }

    fn call(index: u32, id: Option<&str>, arguments: &str) -> CallDelta {
        CallDelta { index, id: id.map(Into::into), name: None, arguments: arguments.into() }
    }

    fn inspector() -> Inspector {
        let patterns = Patterns::new(&["[dangerous]\npipe bomb"]).unwrap();
        Guarded { guard: Arc::new(Guard { patterns, classifier: None }), thresholds: Thresholds::OUTPUT, asks: false }.inspector()
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
        let mut first = Piece { calls: vec![call(0, Some("a"), "{\"x\": \"pipe")], ..Piece::default() };
        assert!(inspector.inspect(&mut first).is_continue());
        assert_eq!(first.calls, [call(0, Some("a"), "{\"x\": \"")]);
        // The next call shows that the first has ended.
        let mut next = Piece { calls: vec![call(1, Some("b"), "{\"y\": \"a pipe bomb\"}")], ..Piece::default() };
        assert!(inspector.inspect(&mut next).is_break());
        assert_eq!(next.calls, [call(0, None, "pipe"), call(1, Some("b"), "{\"y\": \"a ")]);
    }

    #[test]
    fn behind_a_doubt_everything_waits_and_comes_in_order() {
        let mut inspector = asking();
        let mut out = Vec::new();
        for (text, token) in [("A ", 1), ("zorb", 2), (" (", 3), ("a).", 4), (" Now", 5), (" tea.", 6)] {
            let mut piece = said(text, token);
            assert!(inspector.inspect(&mut piece).is_continue());
            out.push((piece.text, piece.tokens, inspector.doubt().is_some()));
        }
        let waits = |is_doubted| (String::new(), vec![], is_doubted);
        let released = |text: &str, tokens| (text.to_owned(), tokens, false);
        assert_eq!(out, [released("A ", vec![1]), released("zor", vec![]), waits(false), waits(false), waits(true), waits(true)]);
        let mut end = Piece { finish: Some(Finish::LENGTH), ..Piece::default() };
        assert!(inspector.inspect(&mut end).is_continue() && end == Piece::default(), "the end waits, too");

        assert_eq!(inspector.doubt().unwrap().text, "A zorb (a).");
        let pieces = inspector.settle(ModerationVerdict::Harmless);
        let texts: Vec<_> = pieces.iter().map(|piece| (piece.text.as_str(), &piece.tokens[..])).collect();
        assert_eq!(texts, [("b (a). Now", &[2, 3, 4, 5][..]), (" tea.", &[6]), ("", &[])]);
        assert_eq!(pieces[2].finish, Some(Finish::LENGTH));
    }

    #[test]
    fn a_harmful_or_unchecked_passage_ends_the_answer_without_it() {
        let unchecked = Unchecked::new("nobody is there");
        for (ruling, reason) in [
            (
                harmful(),
                StopReason::Violation(Violation {
                    finding: Finding { category: Category::Hate, stage: Stage::Model, score: 1.0 },
                    appeal_id: None,
                    text: "A zorb.".into(),
                }),
            ),
            (ModerationVerdict::Unchecked(unchecked.clone()), StopReason::Unchecked(unchecked)),
        ] {
            let mut inspector = asking();
            assert!(inspector.inspect(&mut said("A zorb.", 1)).is_continue() && inspector.inspect(&mut said(" Tea", 2)).is_continue());
            assert!(inspector.inspect(&mut said(" and more.", 3)).is_continue());
            assert_eq!(inspector.settle(ruling), [Piece { finish: Some(filtered(reason)), ..Piece::default() }]);
            assert!(inspector.doubt().is_none(), "there is nothing left to ask");
        }
    }

    #[test]
    fn a_part_that_ends_in_doubt_is_settled_before_the_next_begins() {
        let mut inspector = asking();
        let mut piece = Piece { reasoning: "A zorb".into(), ..Piece::default() };
        assert!(inspector.inspect(&mut piece).is_continue() && inspector.doubt().is_none());
        // Text, a call with an uncertain finding, and a further call.
        let calls = vec![call(0, Some("x"), "{\"a\":\"the zorb"), call(1, Some("y"), "{}")];
        let mut piece = Piece { text: "Tea".into(), calls, finish: Some(Finish::LENGTH), ..Piece::default() };
        assert!(inspector.inspect(&mut piece).is_continue());
        assert_eq!((piece.text.as_str(), inspector.doubt().unwrap().text.as_str()), ("", "A zorb"));
        let [piece] = &inspector.settle(ModerationVerdict::Harmless)[..] else { panic!("one piece waited") };
        assert_eq!((piece.reasoning.as_str(), piece.text.as_str()), ("b", "Tea"));
        let [CallDelta { id: Some(_), arguments, .. }] = &piece.calls[..] else { panic!("{:?}", piece.calls) };
        let rest = "{\"a\":\"the zorb".strip_prefix(arguments.as_str()).unwrap();
        assert!(!rest.is_empty() && inspector.doubt().unwrap().text.ends_with("the zorb"));
        let [piece] = &inspector.settle(ModerationVerdict::Harmless)[..] else { panic!("the rest of it") };
        assert_eq!((&piece.calls[..], &piece.finish), (&[call(0, None, rest), call(1, Some("y"), "{}")][..], &Some(Finish::LENGTH)));
    }

    /// The total outcome of pieces if each ruling comes `late` pieces after its question.
    fn heard(pieces: &[Piece], rulings: &[ModerationVerdict], late: usize) -> (Piece, Vec<String>) {
        let (mut inspector, mut whole, mut asked, mut waited) = (asking(), Piece::default(), Vec::new(), 0);
        for piece in pieces.iter().cloned().map(Some).chain(std::iter::repeat(None)) {
            if let Some(mut piece) = piece {
                if let ControlFlow::Break(finish) = inspector.inspect(&mut piece) {
                    piece.finish = Some(finish);
                }
                whole.append(piece);
            }
            while whole.finish.is_none()
                && let Some(doubt) = inspector.doubt()
            {
                waited += 1;
                if waited <= late {
                    break;
                }
                waited = 0;
                asked.push(doubt.text.clone());
                inspector.settle(rulings[asked.len() % rulings.len()].clone()).into_iter().for_each(|piece| {
                    assert!(whole.finish.is_none(), "nothing follows the end");
                    whole.append(piece);
                });
            }
            if whole.finish.is_some() {
                break;
            }
        }
        (whole, asked)
    }

    proptest! {
        /// The time of a ruling makes no difference.
        #[test]
        fn a_late_ruling_changes_nothing(
            mut steps in prop::collection::vec((0usize..3, 0usize..8), 1..40),
            rulings in prop::collection::vec(0usize..8, 1..6),
            late in 0usize..9,
        ) {
            let words = ["zorb", " a tree.", "The ", " house\n", ". ", "A zorb (a). ", "pipe ", "!"];
            let rulings: Vec<_> = rulings.into_iter().map(|ruling| if ruling == 7 { harmful() } else { ModerationVerdict::Harmless }).collect();
            let mut pieces: Vec<Piece> = Vec::new();
            // First reasoning, then text, then calls.
            steps.sort_by_key(|(kind, _)| *kind);
            for (token, (kind, word)) in steps.into_iter().enumerate() {
                let (word, mut piece) = (words[word], Piece { tokens: vec![token as Token], ..Piece::default() });
                match kind {
                    0 => piece.reasoning = word.into(),
                    1 => piece.text = word.into(),
                    _ => piece.calls = vec![call(token as u32 / 4, Some("x").filter(|_| token % 4 == 0), word)],
                }
                pieces.push(piece);
            }
            pieces.push(Piece { finish: Some(Finish::LENGTH), ..Piece::default() });
            let (at_once, asked) = heard(&pieces, &rulings, 0);
            prop_assert!(at_once.finish.is_some());
            let tokens: Vec<Token> = pieces.iter().flat_map(|piece| piece.tokens.clone()).collect();
            prop_assert!(at_once.finish != Some(Finish::LENGTH) || at_once.tokens == tokens, "nothing is lost");
            prop_assert_eq!((at_once, asked), heard(&pieces, &rulings, late));
        }
    }
}
