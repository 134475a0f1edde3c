//! The parts of an answer, as every protocol reads them.

use crate::generation::piece::Piece;
use tidemill_proto::sampling::TokenLogprob;

/// A call that ran on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    pub id: String,
    pub name: String,
    /// The arguments, as JSON text.
    pub arguments: String,
    pub output: String,
}

/// The increment of one choice, with at most one call's part.
#[derive(Debug, Default)]
pub struct Delta {
    pub index: u32,
    pub piece: Piece,
    /// Log-probabilities of the prompt's tokens, once, before the first token.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprob>>>,
    /// Calls that ran on the server.
    pub ran: Vec<Ran>,
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.piece.is_empty() && self.prompt_logprobs.is_none() && self.ran.is_empty()
    }

    pub fn append(&mut self, next: Self) {
        self.piece.append(next.piece);
        self.prompt_logprobs = next.prompt_logprobs.or(self.prompt_logprobs.take());
        self.ran.extend(next.ran);
    }
}

/// The last known place of a request that waits in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    pub position: u32,
    pub estimate_ms: Option<u64>,
}

/// An event of an answer.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are deltas: a box for each would cost more than the room")]
pub enum News {
    Delta(Delta),
    Waiting(Waiting),
}
