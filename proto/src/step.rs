//! One step of an engine: segments of sequences in, tokens and scores out.
//!
//! A scheduler plans steps and a model computes them. Both use these types, so a scheduler needs no model.

use crate::{
    block::Token,
    sampling::{Sampling, TokenLogprob},
};
use std::collections::HashMap;

/// Consecutive tokens of one sequence, and the results wanted besides their K and V. `blocks` already holds all positions before them. No
/// two segments of a step may write the same block.
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
    /// The log-probability of each of `targets` after its predecessor, and the `top` likeliest tokens there.
    Scores {
        targets: &'a [Token],
        top: u32,
        token: Option<Draw<'a>>,
    },
}

/// The sampler's input for a sequence's next token.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub sampling: &'a Sampling,
    pub history: &'a History,
    /// Index of the token among those drawn.
    pub index: u64,
    pub banned: &'a [Token],
}

/// The tokens that occurred in a sequence, in its prompt and generated. Penalties read it.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Times generated; 0 for a token of the prompt alone.
    generated: HashMap<Token, u32>,
}

/// The outcome of one segment.
#[derive(Debug, Default)]
pub struct SegmentResult {
    /// Log-probability of each target.
    pub scores: Vec<TokenLogprob>,
    pub drawn: Option<(Token, Option<TokenLogprob>)>,
}

impl Segment<'_> {
    /// Rows of logits that the segment needs.
    pub fn logit_rows(&self) -> usize {
        match self.wanted {
            Wanted::Nothing => 0,
            Wanted::Token(_) => 1,
            Wanted::Scores { .. } => self.tokens.len(),
        }
    }
}

impl Draw<'_> {
    /// Whether the draw depends on the logits, temperature, cuts and seed alone.
    pub fn is_plain(&self) -> bool {
        let Sampling { logit_bias, logprobs, .. } = self.sampling;
        logit_bias.is_empty() && logprobs.is_none() && !self.sampling.penalizes() && self.banned.is_empty()
    }
}

impl History {
    pub fn new(prompt: &[Token]) -> Self {
        Self { generated: prompt.iter().map(|token| (*token, 0)).collect() }
    }

    /// Counts a generated token.
    pub fn push(&mut self, token: Token) {
        *self.generated.entry(token).or_insert(0) += 1;
    }

    /// Each token that occurred, and how often it was generated: 0 for a token of the prompt alone.
    pub fn tokens(&self) -> impl Iterator<Item = (Token, u32)> {
        self.generated.iter().map(|(&token, &generated)| (token, generated))
    }
}
