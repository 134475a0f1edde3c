//! Sampling: from a row of logits to a token.
//!
//! The order is vLLM's: bias, penalties, bans, the grammar's mask; then temperature, min_p, top_k, top_p; then one draw. The token depends
//! on the row, the sequence's history, the mask and (seed, index) alone. Equal logits are ordered by token id. Log-probabilities are those
//! of the raw row, before all of this.

use crate::{penalties::penalize, rng};
use std::cmp::Ordering;
use tidemill_kernels::cpu::vocab;
use tidemill_proto::{
    block::Token,
    sampling::{Sampling, TokenLogprob},
    step::{History, Mask},
};

/// Temperatures below this are greedy: the quotient would overflow long before the draw could differ.
const TEMPERATURE_MIN: f32 = 1e-5;

/// Logits whose exponentials are summed together.
const GROUP: usize = 512;

/// Buffers of one sampling thread.
#[derive(Default)]
pub struct SamplerScratch {
    raw: Vec<f32>,
    weights: Vec<f32>,
    groups: Vec<f32>,
    candidates: Vec<Token>,
}

impl SamplerScratch {
    pub fn new() -> Self {
        Self::default()
    }
}

/// Draws generated token number `index` of a sequence from its row of raw `logits`, which it overwrites. Never draws a
/// token that is not `allowed`, nor one in `banned` unless no other is allowed. NaN counts as impossible.
pub fn sample(
    logits: &mut [f32],
    sampling: &Sampling,
    history: &History,
    index: u64,
    banned: &[Token],
    allowed: Option<&Mask>,
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
        penalize(history, logits, sampling);
    }
    let is_banned = |token: &Token| banned.contains(token);
    // If a grammar allows only banned tokens, it takes precedence over the ban.
    if !allowed.is_some_and(|allowed| allowed.tokens().all(|token| is_banned(&token))) {
        for token in banned {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    if let Some(allowed) = allowed {
        forbid_others(logits, allowed);
    }
    let token = match (vocab::argmax(logits), allowed) {
        // All allowed tokens are impossible for the model, so the first one is taken.
        (None | Some((_, f32::NEG_INFINITY)), Some(allowed)) => {
            allowed.tokens().find(|token| !is_banned(token)).or(allowed.tokens().next()).unwrap_or(0)
        }
        (None, None) => 0,
        (Some((best, max)), _) if sampling.temperature < TEMPERATURE_MIN || !max.is_finite() => best as Token,
        (Some((_, max)), _) => draw(logits, max, sampling, rng::uniform(sampling.seed, index), scratch),
    };
    (token, sampling.logprobs.map(|top| token_logprob(&scratch.raw, token, top)))
}

/// Makes every token impossible that is not allowed.
fn forbid_others(logits: &mut [f32], allowed: &Mask) {
    const NONE: u32 = 0;
    for (logits, &word) in logits.chunks_mut(32).zip(allowed.words()) {
        match word {
            u32::MAX => {}
            NONE => logits.fill(f32::NEG_INFINITY),
            _ => {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Log-probability of `token` under the softmax of raw `logits`, and the `top` likeliest tokens with theirs, for `top`
/// up to some tens. Minus infinity for impossible tokens and NaN.
pub fn token_logprob(logits: &[f32], token: Token, top: u32) -> TokenLogprob {
    let max = vocab::argmax(logits).map_or(0.0, |(_, max)| max);
    let mut weights = [0.0; GROUP];
    let sum: f64 = logits.chunks(GROUP).map(|x| f64::from(vocab::exp_shifted(x, max, 1.0, &mut weights[..x.len()]))).sum();
    let logprob = |token: Token| {
        let logprob = (f64::from(logits[token as usize]) - f64::from(max) - sum.ln()) as f32;
        if logprob.is_nan() { f32::NEG_INFINITY } else { logprob }
    };

    let mut likeliest: Vec<Token> = Vec::new();
    let room = (top as usize).min(logits.len());
    for (id, logit) in logits.iter().enumerate() {
        // Ids ascend, so an equal logit comes after those already there.
        let after = |other: &Token| logits[*other as usize] >= *logit;
        if logit.is_nan() || room == 0 || likeliest.len() == room && after(&likeliest[room - 1]) {
            continue;
        }
        likeliest.truncate(room - 1);
        likeliest.insert(likeliest.partition_point(after), id as Token);
    }
    TokenLogprob { logprob: logprob(token), top: likeliest.into_iter().map(|id| (id, logprob(id))).collect() }
}

/// Selects the token for `uniform` in [0, 1). `max` is the largest logit, and finite.
fn draw(logits: &[f32], max: f32, sampling: &Sampling, uniform: f64, scratch: &mut SamplerScratch) -> Token {
    let SamplerScratch { weights, groups, candidates, .. } = scratch;
    weights.resize(logits.len(), 0.0);
    groups.clear();
    for (x, y) in logits.chunks(GROUP).zip(weights.chunks_mut(GROUP)) {
        groups.push(vocab::exp_shifted(x, max, 1.0 / sampling.temperature, y));
    }
    let top_k = sampling.top_k as usize;
    let cut_by_rank = top_k > 0 && top_k < logits.len();
    if !cut_by_rank && sampling.top_p >= 1.0 && sampling.min_p <= 0.0 {
        let group = pick(groups.iter().copied(), uniform);
        let start = group.index * GROUP;
        let end = (start + GROUP).min(logits.len());
        return (start + pick(weights[start..end].iter().copied(), group.rest).index) as Token;
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

/// The index of an element, and the place within it of the number that selected it, in [0, 1).
struct Picked {
    index: usize,
    rest: f64,
}

/// Divides [0, 1) in proportion to `weights`, at least one of which is positive, and finds the part that holds
/// `uniform`.
fn pick(weights: impl Iterator<Item = f32> + Clone, uniform: f64) -> Picked {
    let mut left = uniform * weights.clone().map(f64::from).sum::<f64>();
    let mut picked = Picked { index: 0, rest: 0.0 };
    for (index, weight) in weights.enumerate() {
        let weight = f64::from(weight);
        if weight > 0.0 {
            // Rounding may leave a remainder, in which case the last possible element is picked.
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

/// Keeps the smallest set of likeliest candidates with at least `top_p` of all candidates' weight, and at least one.
fn keep_nucleus(candidates: &mut Vec<Token>, top_p: f32, logits: &[f32], weights: &[f32]) {
    let weight = |id: &Token| f64::from(weights[*id as usize]);
    let enough = f64::from(top_p) * candidates.iter().map(weight).sum::<f64>();
    // A nucleus is usually small, so no more is sorted than needed.
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

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: f32 = 0.0;

    fn draws(logits: &[f32], sampling: &Sampling, count: u64) -> Vec<Token> {
        let mut scratch = SamplerScratch::new();
        let draw = |index| sample(&mut logits.to_vec(), sampling, &History::default(), index, &[], None, &mut scratch).0;
        (0..count).map(draw).collect()
    }

    /// The tokens that are ever drawn.
    fn support(logits: &[f32], sampling: &Sampling) -> Vec<Token> {
        let mut tokens = draws(logits, sampling, 2000);
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    /// Logits of these probabilities.
    fn ln(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_the_largest() {
        let sampling = Sampling { temperature: GREEDY, ..Sampling::default() };
        assert_eq!(draws(&[1.0, 3.0, 3.0, 2.0], &sampling, 2), [1, 1]);
        assert_eq!(draws(&[f32::NAN, -1.0, f32::NAN], &sampling, 1), [1]);
        assert_eq!(draws(&[f32::NAN; 3], &sampling, 1), [0]);
        assert_eq!(draws(&[0.0, f32::INFINITY], &Sampling::default(), 1), [1]);
    }

    #[test]
    fn draws_follow_the_distribution() {
        // Chi-squared with 4 degrees of freedom: 23.5 is exceeded once in 10,000 seeds. Tokens lie in different groups.
        let probabilities = [0.4, 0.3, 0.15, 0.1, 0.05];
        let ids = [3, 511, 512, 1300, 1999];
        let mut logits = vec![f32::NEG_INFINITY; 2000];
        ids.iter().zip(ln(&probabilities)).for_each(|(id, logit)| logits[*id] = logit + 7.0);
        let count = 20_000u64;
        for (sampling, expected) in [
            (Sampling::default(), probabilities),
            (Sampling { top_p: 0.9999, ..Sampling::default() }, probabilities),
            (Sampling { temperature: 0.5, ..Sampling::default() }, probabilities.map(|p| p * p / 0.285)),
        ] {
            for seed in [1, 2] {
                let tokens = draws(&logits, &Sampling { seed, ..sampling.clone() }, count);
                let chi_squared: f32 = ids
                    .iter()
                    .zip(expected)
                    .map(|(id, p)| {
                        let seen = tokens.iter().filter(|token| **token as usize == *id).count() as f32;
                        (seen - p * count as f32).powi(2) / (p * count as f32)
                    })
                    .sum();
                assert!(chi_squared < 23.5, "{sampling:?}, seed {seed}: {chi_squared}");
            }
        }
    }

    #[test]
    fn filters_cut_where_they_say() {
        let logits = ln(&[0.1, 0.4, 0.1, 0.25, 0.15]);
        let neutral = Sampling::default();
        assert_eq!(support(&logits, &neutral), [0, 1, 2, 3, 4]);
        assert_eq!(support(&logits, &Sampling { top_k: 2, ..neutral.clone() }), [1, 3]);
        assert_eq!(support(&logits, &Sampling { top_k: 4, ..neutral.clone() }), [0, 1, 3, 4], "the lower id of equals stays");
        assert_eq!(support(&logits, &Sampling { top_k: 9, ..neutral.clone() }), [0, 1, 2, 3, 4]);
        assert_eq!(support(&logits, &Sampling { top_p: 0.39, ..neutral.clone() }), [1]);
        assert_eq!(support(&logits, &Sampling { top_p: 0.41, ..neutral.clone() }), [1, 3]);
        assert_eq!(support(&logits, &Sampling { top_p: 0.0, ..neutral.clone() }), [1]);
        assert_eq!(support(&logits, &Sampling { min_p: 0.3, ..neutral.clone() }), [1, 3, 4]);
        assert_eq!(support(&logits, &Sampling { min_p: 1.0, ..neutral.clone() }), [1]);
        // top_k leaves 0.4 and 0.25, and 0.4 is more than half of these.
        assert_eq!(support(&logits, &Sampling { top_k: 2, top_p: 0.5, ..neutral.clone() }), [1]);
        assert_eq!(support(&logits, &Sampling { temperature: 1e-6, ..neutral }), [1]);
    }

    #[test]
    fn a_flat_nucleus_needs_more_than_one_round_of_sorting() {
        let tokens = support(&[0.0; 1000], &Sampling { top_p: 0.1, ..Sampling::default() });
        assert!(tokens.iter().all(|token| *token < 101), "equal logits count in order of id");
        assert!(tokens.len() > 95);
    }

    #[test]
    fn a_draw_depends_on_seed_and_index_alone() {
        let logits: Vec<f32> = (0..700).map(|i| (i as f32 * 0.7).sin()).collect();
        for sampling in [Sampling { seed: 9, ..Sampling::default() }, Sampling { seed: 9, top_p: 0.8, top_k: 300, ..Sampling::default() }] {
            let once = draws(&logits, &sampling, 50);
            assert_eq!(once, draws(&logits, &sampling, 50));
            assert_ne!(once, draws(&logits, &Sampling { seed: 10, ..sampling.clone() }, 50));
            let mut scratch = SamplerScratch::new();
            let later = sample(&mut logits.clone(), &sampling, &History::default(), 37, &[], None, &mut scratch).0;
            assert_eq!(later, once[37]);
        }
    }

    #[test]
    fn bias_and_bans_apply_and_log_probabilities_are_those_of_the_raw_row() {
        let logits = ln(&[0.5, 0.25, 0.125, 0.125]);
        let sampling = Sampling { temperature: GREEDY, logit_bias: vec![(2, 5.0), (900, 1.0)], logprobs: Some(3), ..Sampling::default() };
        let mut scratch = SamplerScratch::new();
        let (token, logprob) = sample(&mut logits.clone(), &sampling, &History::default(), 0, &[0, 900], None, &mut scratch);
        let logprob = logprob.unwrap();
        assert_eq!(token, 2);
        assert!((logprob.logprob - 0.125f32.ln()).abs() < 1e-6);
        assert_eq!(logprob.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(logprob.top.iter().zip([0.5f32, 0.25, 0.125]).all(|((_, l), p)| (l - p.ln()).abs() < 1e-6));
        let (token, _) = sample(&mut logits.clone(), &sampling, &History::default(), 0, &[2], None, &mut scratch);
        assert_eq!(token, 0, "a ban is stronger than a bias");
        let (token, _) = sample(&mut logits.clone(), &sampling, &History::default(), 0, &[0, 1, 2, 3], None, &mut scratch);
        assert_eq!(token, 0, "something is drawn even if everything is banned");
    }

    #[test]
    fn only_what_the_mask_allows_is_drawn() {
        let mut mask = Mask::none(70);
        [3, 40, 69].into_iter().for_each(|token| mask.allow(token));
        let mut scratch = SamplerScratch::new();
        let logits: Vec<f32> = (0..70).map(|i| -(i as f32) / 100.0).collect();
        let mut draw = |logits: &[f32], sampling: &Sampling, index, banned: &[Token]| {
            sample(&mut logits.to_vec(), sampling, &History::default(), index, banned, Some(&mask), &mut scratch)
        };
        let greedy = Sampling { temperature: GREEDY, logprobs: Some(2), ..Sampling::default() };
        let (token, logprob) = draw(&logits, &greedy, 0, &[]);
        let logprob = logprob.unwrap();
        assert_eq!((token, logprob.top.iter().map(|(id, _)| *id).collect::<Vec<_>>()), (3, vec![0, 1]), "log-probabilities of the raw row");
        let mut drawn: Vec<Token> =
            (0..500).map(|i| draw(&logits, &Sampling { top_p: 0.99999, ..Sampling::default() }, i, &[]).0).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn, [3, 40, 69]);
        let biased = Sampling { logit_bias: vec![(69, 100.0), (5, 100.0)], ..greedy.clone() };
        assert_eq!(draw(&logits, &biased, 0, &[]).0, 69, "a bias moves within the mask");
        assert_eq!(draw(&logits, &greedy, 0, &[3, 7]).0, 40, "a ban holds");
        assert_eq!(draw(&logits, &greedy, 0, &[3, 40, 69]).0, 3, "but the mask is stronger");
        for nonsense in [f32::NAN, f32::NEG_INFINITY] {
            assert_eq!(draw(&[nonsense; 70], &greedy, 0, &[3]).0, 40);
        }
    }

    #[test]
    fn penalties_change_what_is_drawn() {
        let mut history = History::new(&[0]);
        history.push(1);
        let greedy = Sampling { temperature: GREEDY, ..Sampling::default() };
        let mut scratch = SamplerScratch::new();
        let mut token = |sampling: Sampling| sample(&mut [3.0, 2.9, 2.0], &sampling, &history, 1, &[], None, &mut scratch).0;
        assert_eq!(token(greedy.clone()), 0);
        assert_eq!(token(Sampling { repetition_penalty: 2.0, ..greedy.clone() }), 2);
        assert_eq!(token(Sampling { presence_penalty: -0.2, ..greedy }), 1);
    }

    #[test]
    fn the_likeliest_are_in_order_and_nan_is_left_out() {
        let logprob = token_logprob(&[1.0, f32::NAN, 2.0, 2.0, 0.0], 1, 10);
        assert_eq!(logprob.logprob, f32::NEG_INFINITY);
        assert_eq!(logprob.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 3, 0, 4]);
        let total: f32 = logprob.top.iter().map(|(_, l)| l.exp()).sum();
        assert!((total - 1.0).abs() < 1e-5);
        assert!(token_logprob(&[1.0, 2.0], 0, 0).top.is_empty());
    }
}
