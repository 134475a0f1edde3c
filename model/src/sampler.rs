//! A row of logits to a token.
//!
//! In vLLM's order: bias, penalties, bans; then temperature, min_p, top_k, top_p; then one draw. What comes out depends on the
//! row, the sequence's history and (seed, index) alone. Equal logits count in order of token id.

use crate::{penalties::History, rng};
use std::cmp::Ordering;
use tidemill_kernels::{Isa, vocab};
use tidemill_proto::{
    block::Token,
    sampling::{Sampling, TokenLogprob},
};

/// Temperatures below this are greedy: the quotient would overflow long before the draw could differ.
const TEMPERATURE_MIN: f32 = 1e-5;

/// Logits whose exponentials are added up as one.
const SEGMENT: usize = 512;

/// Buffers of one sampling thread.
#[derive(Default)]
pub struct SamplerScratch {
    raw: Vec<f32>,
    weights: Vec<f32>,
    segments: Vec<f32>,
    candidates: Vec<Token>,
}

impl SamplerScratch {
    pub fn new() -> Self {
        Self::default()
    }
}

/// Draws generated token number `index` of a sequence from its row of raw `logits`, which are changed on the way. Tokens in
/// `banned` are never drawn unless nothing else is left. NaN counts as impossible.
pub fn sample(
    logits: &mut [f32],
    sampling: &Sampling,
    history: &History,
    index: u64,
    banned: &[Token],
    scratch: &mut SamplerScratch,
) -> (Token, Option<TokenLogprob>) {
    if sampling.logprobs.is_some() {
        scratch.raw.clear();
        scratch.raw.extend_from_slice(logits);
    }
    for (token, bias) in &sampling.logit_bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    if sampling.penalizes() {
        history.penalize(logits, sampling);
    }
    for token in banned {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let token = match vocab::argmax(Isa::best(), logits) {
        None => 0,
        Some((best, max)) if sampling.temperature < TEMPERATURE_MIN || !max.is_finite() => best as Token,
        Some((_, max)) => draw(logits, max, sampling, rng::uniform(sampling.seed, index), scratch),
    };
    (token, sampling.logprobs.map(|top| token_logprob(&scratch.raw, token, top)))
}

/// Log-probability of `token` under the softmax of raw `logits`, and the `top` likeliest tokens with theirs. Meant for a `top`
/// of some tens. Minus infinity for what is impossible or not a number.
pub fn token_logprob(logits: &[f32], token: Token, top: u32) -> TokenLogprob {
    let isa = Isa::best();
    let max = vocab::argmax(isa, logits).map_or(0.0, |(_, max)| max);
    let mut weights = [0.0; SEGMENT];
    let sum: f64 = logits.chunks(SEGMENT).map(|x| f64::from(vocab::exp_shifted(isa, x, max, 1.0, &mut weights[..x.len()]))).sum();
    let logprob = |token: Token| {
        let logprob = (f64::from(logits[token as usize]) - f64::from(max) - sum.ln()) as f32;
        if logprob.is_nan() { f32::NEG_INFINITY } else { logprob }
    };

    let mut likeliest: Vec<Token> = Vec::new();
    let room = (top as usize).min(logits.len());
    for (id, logit) in logits.iter().enumerate() {
        // Ids ascend, so an equal logit comes after those that are there.
        let after = |other: &Token| logits[*other as usize] >= *logit;
        if logit.is_nan() || room == 0 || likeliest.len() == room && after(&likeliest[room - 1]) {
            continue;
        }
        likeliest.truncate(room - 1);
        likeliest.insert(likeliest.partition_point(after), id as Token);
    }
    TokenLogprob { logprob: logprob(token), top: likeliest.into_iter().map(|id| (id, logprob(id))).collect() }
}

/// The token that `uniform` in [0, 1) falls on. `max` is the largest logit, and finite.
fn draw(logits: &[f32], max: f32, sampling: &Sampling, uniform: f64, scratch: &mut SamplerScratch) -> Token {
    let SamplerScratch { weights, segments, candidates, .. } = scratch;
    weights.resize(logits.len(), 0.0);
    segments.clear();
    for (x, y) in logits.chunks(SEGMENT).zip(weights.chunks_mut(SEGMENT)) {
        segments.push(vocab::exp_shifted(Isa::best(), x, max, 1.0 / sampling.temperature, y));
    }
    let top_k = sampling.top_k as usize;
    let cut_by_rank = top_k > 0 && top_k < logits.len();
    if !cut_by_rank && sampling.top_p >= 1.0 && sampling.min_p <= 0.0 {
        let segment = pick(segments.iter().copied(), uniform);
        let start = segment.index * SEGMENT;
        let end = (start + SEGMENT).min(logits.len());
        return (start + pick(weights[start..end].iter().copied(), segment.rest).index) as Token;
    }

    candidates.clear();
    // The likeliest token has weight 1.
    candidates.extend((0..logits.len() as Token).filter(|id| weights[*id as usize] > 0.0 && weights[*id as usize] >= sampling.min_p));
    if cut_by_rank {
        sort_likeliest(candidates, top_k, logits);
        candidates.truncate(top_k);
    }
    if sampling.top_p < 1.0 {
        keep_nucleus(candidates, sampling.top_p, logits, weights);
    }
    candidates[pick(candidates.iter().map(|id| weights[*id as usize]), uniform).index]
}

/// An element, and where in it the number fell, in [0, 1).
struct Picked {
    index: usize,
    rest: f64,
}

/// Divides [0, 1) in proportion to `weights`, of which one is positive, and finds the part that `uniform` falls into.
fn pick(weights: impl Iterator<Item = f32> + Clone, uniform: f64) -> Picked {
    let mut left = uniform * weights.clone().map(f64::from).sum::<f64>();
    let mut picked = Picked { index: 0, rest: 0.0 };
    for (index, weight) in weights.enumerate() {
        let weight = f64::from(weight);
        if weight > 0.0 {
            // Rounding may leave a last crumb: then it is the last possible element.
            picked = Picked { index, rest: (left / weight).clamp(0.0, ALMOST_ONE) };
            if left < weight {
                break;
            }
        }
        left -= weight;
    }
    picked
}

/// The largest f64 below 1.
const ALMOST_ONE: f64 = 1.0 - f64::EPSILON / 2.0;

/// Moves the `count` likeliest candidates to the front, in order.
fn sort_likeliest(candidates: &mut [Token], count: usize, logits: &[f32]) {
    let order = |a: &Token, b: &Token| match logits[*b as usize].total_cmp(&logits[*a as usize]) {
        Ordering::Equal => a.cmp(b),
        unequal => unequal,
    };
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, order);
    }
    let count = count.min(candidates.len());
    candidates[..count].sort_unstable_by(order);
}

/// Keeps the smallest set of likeliest candidates with at least `top_p` of the candidates' weight. One always stays.
fn keep_nucleus(candidates: &mut Vec<Token>, top_p: f32, logits: &[f32], weights: &[f32]) {
    let weight = |id: &Token| f64::from(weights[*id as usize]);
    let enough = f64::from(top_p) * candidates.iter().map(weight).sum::<f64>();
    // A nucleus is mostly small: sort no more than it takes.
    let mut sorted = 64;
    loop {
        sorted = sorted.min(candidates.len());
        sort_likeliest(candidates, sorted, logits);
        let mut sum = 0.0;
        let reached = candidates[..sorted].iter().position(|id| {
            sum += weight(id);
            sum >= enough
        });
        if let Some(last) = reached {
            return candidates.truncate(last + 1);
        }
        if sorted == candidates.len() {
            return;
        }
        sorted *= 8;
    }
}
