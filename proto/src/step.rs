//! One step of an engine: segments of sequences in, tokens and scores out.
//!
//! A scheduler plans steps and a model computes them. Both use these types, so a scheduler needs no model.

use crate::{
    block::Token,
    sampling::{Sampling, TokenLogprob},
};
use std::{collections::HashMap, fmt};

/// The maximum number of tokens drafted for a sequence in one step.
pub const DRAFT_TOKENS_MAX: usize = 32;

/// Consecutive tokens of one sequence, and the results wanted besides their K and V. `blocks` already holds all positions before them. No
/// two segments of a step may write the same block.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    pub tokens: &'a [Token],
    /// Position of the first token.
    pub start: usize,
    /// Block table: covers `0..start + tokens.len()`.
    pub blocks: &'a [u32],
    pub state: StateBlocks<'a>,
    pub wanted: Wanted<'a>,
}

/// The blocks of a sequence's state, for layers that keep a state instead of keys and values. Empty for a model without such layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StateBlocks<'a> {
    /// The state after the tokens before the segment, or `None` at the start of the sequence, where the state is zeros. Other segments may
    /// read these blocks as well.
    pub from: Option<&'a [u32]>,
    /// The destination of the state after the segment: the sequence's own blocks, which may be the same as `from`.
    pub to: &'a [u32],
}

#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    Nothing,
    /// The token that follows the last one.
    Token(Draw<'a>),
    /// The token that follows the first token of the segment, which is the last one of the sequence. The others are drafted: the token that
    /// follows each of them is also wanted, as long as all tokens drawn before it in this step equal the drafted ones. The draw describes
    /// the first of these tokens; its bans hold for all.
    Verified(Draw<'a>),
    /// The log-probability of each of `targets` after its predecessor, and the `top` likeliest tokens there.
    Scores {
        targets: &'a [Token],
        top: u32,
        token: Option<Draw<'a>>,
    },
    /// The prompt's embedding: a decoder's hidden state of the last token after the final norm, or an encoder's row for the whole text.
    Embedding {
        /// The position of the second text's first token, which matters only to an encoder; the number of tokens if there is one text.
        second_text: usize,
    },
}

/// The sampler's input for a sequence's next token.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub sampling: &'a Sampling,
    pub history: &'a History,
    /// Index of the token among those drawn.
    pub index: u64,
    /// Tokens that are drawn only if no other token is allowed.
    pub banned: &'a [Token],
    /// The tokens that the grammar allows; `None` without a grammar.
    pub allowed: Option<&'a dyn Allowed>,
}

/// The tokens that a grammar allows next. They may still be unknown when a step begins.
pub trait Allowed: fmt::Debug + Sync {
    /// Waits for the tokens, as long as a step may be delayed by them.
    fn wait(&self) -> Result<&Mask, Withheld<'_>>;

    /// Waits for the tokens that are allowed after `drawn`, which were drawn in the same step. Callers ask for each proper prefix of
    /// `drawn` first.
    fn wait_after(&self, drawn: &[Token]) -> Result<&Mask, Withheld<'_>> {
        if drawn.is_empty() { self.wait() } else { Err(Withheld::Failed("its grammar is followed one token in a step here")) }
    }
}

/// The reason why the tokens that a grammar allows cannot be had in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Withheld<'a> {
    /// They are not known in time: another step must draw the token. All calls in one step agree.
    Late,
    /// The grammar failed, which ends the sequence.
    Failed(&'a str),
}

/// A set of tokens: a bit for each entry of a row of logits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u32>,
    width: usize,
}

/// The tokens that occurred in a sequence, in its prompt or generated. Penalties read it.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The number of times a token was generated; 0 for a token that occurs only in the prompt.
    generated: HashMap<Token, u32>,
}

/// The outcome of one segment.
#[derive(Debug, Default)]
pub struct SegmentResult {
    /// Log-probability of each target.
    pub scores: Vec<TokenLogprob>,
    /// The tokens that follow the segment, in order: more than one only if drafted tokens were confirmed.
    pub drawn: Vec<(Token, Option<TokenLogprob>)>,
    /// The reason why a wanted token could not be drawn: its grammar failed.
    pub fault: Option<String>,
    /// Whether a wanted token could not be drawn yet, as the tokens that its grammar allows came too late. Its row is to be computed again.
    pub is_late: bool,
    /// The prompt's embedding; `None` if not wanted, or if the backend does not provide it.
    pub embedding: Option<Vec<f32>>,
}

impl SegmentResult {
    /// Notes that a wanted token was not drawn.
    pub fn withhold(&mut self, reason: Withheld<'_>) {
        match reason {
            Withheld::Late => self.is_late = true,
            Withheld::Failed(reason) => self.fault = Some(reason.to_owned()),
        }
    }
}

impl<'a> StateBlocks<'a> {
    /// The state of a sequence that keeps it in the same blocks from the first token on, for a segment that starts at position `start`.
    pub fn in_place(start: usize, blocks: &'a [u32]) -> Self {
        Self { from: (start > 0).then_some(blocks), to: blocks }
    }
}

impl Segment<'_> {
    /// The number of rows of logits that the segment needs.
    pub fn logit_rows(&self) -> usize {
        match self.wanted {
            Wanted::Nothing => 0,
            // A hidden state comes from a row that is computed up to its logits.
            Wanted::Token(_) | Wanted::Embedding { .. } => 1,
            Wanted::Verified(_) | Wanted::Scores { .. } => self.tokens.len(),
        }
    }
}

impl<'a> Wanted<'a> {
    /// The token to be drawn, if one is wanted.
    pub fn draw_mut(&mut self) -> Option<&mut Draw<'a>> {
        match self {
            Self::Token(draw) | Self::Verified(draw) => Some(draw),
            Self::Scores { token, .. } => token.as_mut(),
            Self::Nothing | Self::Embedding { .. } => None,
        }
    }
}

impl Draw<'_> {
    /// Whether the draw depends only on the logits, temperature, cut-offs and seed.
    pub fn is_plain(&self) -> bool {
        let Sampling { logit_bias, logprobs, .. } = self.sampling;
        logit_bias.is_empty() && logprobs.is_none() && !self.sampling.penalizes() && self.banned.is_empty() && self.allowed.is_none()
    }
}

impl Mask {
    /// The empty set, for `width` logits.
    pub fn none(width: usize) -> Self {
        Self { words: vec![0; width.div_ceil(32)], width }
    }

    /// The set of those of `width` tokens whose bit is set in `words`, from the lowest bit of each word on. Excess words and bits are
    /// ignored.
    pub fn new(words: &[u32], width: usize) -> Self {
        let mut mask = Self::none(width);
        let words = &words[..words.len().min(mask.words.len())];
        mask.words[..words.len()].copy_from_slice(words);
        if !width.is_multiple_of(32)
            && let Some(last) = mask.words.last_mut()
        {
            *last &= (1 << (width % 32)) - 1;
        }
        mask
    }

    /// Adds a token, unless its id is out of range.
    pub fn allow(&mut self, token: Token) {
        if (token as usize) < self.width {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    pub fn allows(&self, token: Token) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The tokens of both sets.
    #[must_use]
    pub fn both(&self, other: &Self) -> Self {
        let words = self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect::<Vec<_>>();
        Self::new(&words, self.width)
    }

    pub fn allows_any(&self) -> bool {
        self.words.iter().any(|&word| word != 0)
    }

    /// The bits of the set, from the lowest bit of each word on.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The tokens of the set, in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = Token> {
        let bits = |word: u32| (0..32).filter(move |bit| word >> bit & 1 == 1);
        self.words.iter().enumerate().flat_map(move |(i, &word)| bits(word).map(move |bit| 32 * i as Token + bit))
    }
}

/// Stands for a missing grammar of a constrained sequence: no token is sampled, rather than any.
#[derive(Clone, Copy, Debug)]
pub struct Unknown;

impl Allowed for Unknown {
    fn wait(&self) -> Result<&Mask, Withheld<'_>> {
        Err(Withheld::Failed("its grammar is not known here"))
    }
}

/// A set that is known from the start.
impl Allowed for Mask {
    fn wait(&self) -> Result<&Mask, Withheld<'_>> {
        Ok(self)
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

    /// Returns the history with these tokens generated as well.
    #[must_use]
    pub fn followed_by(&self, tokens: &[Token]) -> Self {
        let mut longer = self.clone();
        tokens.iter().for_each(|&token| longer.push(token));
        longer
    }

    /// Each token that occurred, with the number of times it was generated: 0 if it occurs only in the prompt.
    pub fn tokens(&self) -> impl Iterator<Item = (Token, u32)> {
        self.generated.iter().map(|(&token, &generated)| (token, generated))
    }
}
