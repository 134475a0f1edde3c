//! One step of an engine: segments of sequences in; tokens and scores out.

use crate::{
    forward::{Chunk, LogitRows},
    penalties::History,
    sampler::{SamplerScratch, sample, token_logprob},
};
use tidemill_proto::{
    block::Token,
    sampling::{Sampling, TokenLogprob},
};

/// Consecutive tokens of one sequence, and what is wanted of them besides their K and V. All positions before them are in `blocks`
/// already. No two segments of a step may write the same block.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    pub tokens: &'a [Token],
    /// Position of the first token.
    pub start: usize,
    /// Block table: covers `0..start + tokens.len()`.
    pub blocks: &'a [u32],
    pub wanted: Wanted<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    Nothing,
    /// The token that follows the last one.
    Token(Draw<'a>),
    /// How likely each of `targets`, the tokens known to follow, was after its predecessor, and what the `top` likeliest were.
    Scores {
        targets: &'a [Token],
        top: u32,
        token: Option<Draw<'a>>,
    },
}

/// What the sampler needs to draw a sequence's next token.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub sampling: &'a Sampling,
    pub history: &'a History,
    /// Number of the token among those drawn.
    pub index: u64,
    pub banned: &'a [Token],
}

impl Draw<'_> {
    /// Whether temperature, cuts and the seed are all there is to it.
    pub(crate) fn is_plain(&self) -> bool {
        let Sampling { logit_bias, logprobs, .. } = self.sampling;
        logit_bias.is_empty() && logprobs.is_none() && !self.sampling.penalizes() && self.banned.is_empty()
    }
}

/// What a segment brought forth.
#[derive(Debug, Default)]
pub struct SegmentResult {
    /// Log-probability of each target.
    pub scores: Vec<TokenLogprob>,
    pub drawn: Option<(Token, Option<TokenLogprob>)>,
}

impl<'a> Segment<'a> {
    pub(crate) fn chunk(&self) -> Chunk<'a> {
        let logits = match self.wanted {
            Wanted::Nothing => LogitRows::None,
            Wanted::Token(_) => LogitRows::Last,
            Wanted::Scores { .. } => LogitRows::All,
        };
        Chunk { tokens: self.tokens, start: self.start, blocks: self.blocks, logits }
    }

    /// How many rows of logits that takes.
    pub(crate) fn logit_rows(&self) -> usize {
        match self.wanted {
            Wanted::Nothing => 0,
            Wanted::Token(_) => 1,
            Wanted::Scores { .. } => self.tokens.len(),
        }
    }

    /// Takes in the `i`th of these rows, in ascending order; it is changed on the way.
    pub(crate) fn take_logits(&self, i: usize, row: &mut [f32], scratch: &mut SamplerScratch, result: &mut SegmentResult) {
        let draw = match self.wanted {
            Wanted::Nothing => None,
            Wanted::Token(draw) => Some(draw),
            Wanted::Scores { targets, top, token } => {
                result.scores.extend(targets.get(i).map(|&target| token_logprob(row, target, top)));
                token
            }
        };
        if let Some(Draw { sampling, history, index, banned }) = draw.filter(|_| i + 1 == self.logit_rows()) {
            result.drawn = Some(sample(row, sampling, history, index, banned, scratch));
        }
    }
}
