//! The parts of an answer, and its end.

use serde::Serialize;
use std::{fmt, ops::ControlFlow};
use tidemill_proto::{block::Token, sampling::TokenLogprob};
use tidemill_safety::category::Finding;

/// The increment of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The answer's text.
    pub text: String,
    /// The reasoning before it.
    pub reasoning: String,
    /// Parts of calls, in order: a call's first part has its id and name.
    pub calls: Vec<CallDelta>,
    /// The number of reasoning tokens.
    pub reasoning_tokens: u64,
    pub tokens: Vec<Token>,
    pub logprobs: Vec<Logprob>,
    /// The end of the choice, in its last piece.
    pub finish: Option<Finish>,
}

/// A part of a call as it grows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// The call's index among the choice's calls.
    pub index: u32,
    /// The call's id, only in its first part, as is the name.
    pub id: Option<String>,
    pub name: Option<String>,
    /// The next characters of the arguments' JSON text.
    pub arguments: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    pub token: Token,
    pub logprob: TokenLogprob,
    /// The number of characters of generated text before this token.
    pub offset: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    pub reason: FinishReason,
    pub stop_reason: Option<StopReason>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    /// The model waits for the outputs of its calls.
    ToolCalls,
    /// The text that follows must not be shown.
    ContentFilter,
}

/// The cause of a choice's end, other than the model's end of sequence: vLLM's extension.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(Token),
    Text(String),
    /// The finding that ended the answer ([`FinishReason::ContentFilter`]).
    Violation(Violation),
    /// The failed safety check that ended the answer ([`FinishReason::ContentFilter`]).
    Unchecked(Unchecked),
}

/// The safety check of the following text failed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unchecked {
    pub code: &'static str,
    pub message: String,
}

impl Unchecked {
    pub const CODE: &'static str = "safety_check_unavailable";

    pub fn new(why: &str) -> Self {
        Self { code: Self::CODE, message: format!("The safety check of what comes next could not be made: {why}. Please try again later.") }
    }
}

/// A finding that must not be shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Violation {
    #[serde(flatten)]
    pub finding: Finding,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub appeal_id: Option<String>,
    /// The answer from the violation on, for reviewers.
    #[serde(skip)]
    pub text: String,
}

/// The end of a choice's tokens in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    StopToken(Token),
    Length,
}

impl Finish {
    pub const LENGTH: Self = Self { reason: FinishReason::Length, stop_reason: None };
}

impl Piece {
    /// Whether the piece carries nothing for a client.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Appends the next piece. All pieces together are the whole answer: then one delta per call.
    pub fn append(&mut self, next: Self) {
        self.text += &next.text;
        self.reasoning += &next.reasoning;
        self.reasoning_tokens += next.reasoning_tokens;
        for delta in next.calls {
            match self.calls.last_mut().filter(|call| call.index == delta.index) {
                Some(call) => call.arguments += &delta.arguments,
                None => self.calls.push(delta),
            }
        }
        self.tokens.extend(next.tokens);
        self.logprobs.extend(next.logprobs);
        self.finish = next.finish.or(self.finish.take());
    }
}

impl Piece {
    /// Splits the piece into pieces with at most one call's part each, as clients expect of a stream: first the text, then a call's name,
    /// then its arguments.
    pub fn parts(mut self) -> impl Iterator<Item = Self> {
        let calls = std::mem::take(&mut self.calls);
        let finish = self.finish.take();
        let silent = self.text.is_empty() && self.reasoning.is_empty();
        let mut parts: Vec<Self> = calls.into_iter().map(|call| Self { calls: vec![call], ..Self::default() }).collect();
        if !silent || parts.is_empty() {
            parts.insert(0, self);
        } else {
            let Self { tokens, logprobs, reasoning_tokens, .. } = self;
            parts[0] = Self { tokens, logprobs, reasoning_tokens, calls: std::mem::take(&mut parts[0].calls), ..Self::default() };
        }
        let last = parts.len() - 1;
        parts[last].finish = finish;
        parts.into_iter()
    }
}

/// An inspection, which sees every piece before the client does, may change it, and may end the choice.
pub trait Inspect: fmt::Debug + Send {
    fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish>;
}
