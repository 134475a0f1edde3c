//! A small model of the same vocabulary guesses the large one's draws: repeatedly the most likely token, one step of it for all sequences
//! that draft.
//!
//! ```text
//!   wishes ──► round: rows that catch up, a chunk each ──┐   ┌──► guesses of each sequence ──► the step verifies those that pay
//!              rows that draft ──► step of the draft model ──┤
//!                     ▲──────── those for which one more pays ┘
//! ```
//!
//! The model has blocks of its own (`places`). A row's first step takes all tokens that the sequence got since the last round, so a wrong
//! guess is overwritten and needs no other care. A prompt is caught up within a share of the steps' time, once that promises to pay off.
//!
//! **It never costs much.** Another step of the draft model is made only if the tokens that it promises are worth its time and that of
//! their rows, by measured times and measured shares of right guesses. Where it does not pay off, it is tried again on a small allowance,
//! as answers and loads change. Source of the rule: Leviathan et al. (2023), section 3.4, with learnt costs, and chances from the draft
//! model's own probabilities.

use super::{
    Guess,
    confidence::Confidence,
    places::Places,
    rows::{RowCost, pays},
};
use std::time::Duration;
use tidemill_engine::job::{JobId, ScheduledChunk};
use tidemill_proto::{
    block::{BLOCK_TOKENS, Token},
    sampling::Sampling,
    step::{DRAFT_TOKENS_MAX, Draw, History, Segment, SegmentResult, StateBlocks, Wanted},
};

/// Bounds of a draft model and its memory.
#[derive(Clone, Copy, Debug)]
pub struct DraftBounds {
    pub blocks: u32,
    /// The number of tokens in its vocabulary: that of the large model, apart from tokens that neither uses.
    pub vocab: usize,
    pub context_tokens: usize,
    /// The most tokens of one step.
    pub step_tokens: usize,
}

/// A sequence that may draft.
#[derive(Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) job: JobId,
    pub(crate) tokens: &'a [Token],
    /// The most tokens to guess.
    pub(crate) most: usize,
    /// Tokens that must not be guessed.
    pub(crate) ends: &'a [Token],
    pub(crate) confidence: Confidence,
    /// The number of tokens that the answer has, and of those that it may still get.
    pub(crate) generated: usize,
    pub(crate) left: usize,
}

/// The large model's next step, without these guesses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Target {
    pub(crate) cost: RowCost,
    /// The number of decoding sequences.
    pub(crate) sequences: usize,
    /// The expected number of tokens from the step, and its time.
    pub(crate) tokens: f64,
    pub(crate) ms: f64,
    /// The bound on the time of round and step together.
    pub(crate) limit_ms: f64,
    /// The number of the step's rows for guesses.
    pub(crate) rows: usize,
    /// The number of guesses of each sequence that are made whether they pay off or not.
    pub(crate) least: usize,
}

impl Target {
    /// The time that the limit leaves for sequences other than the one that gains by a guess.
    fn left_ms(&self) -> f64 {
        if self.sequences == 1 { f64::INFINITY } else { self.limit_ms - self.ms }
    }
}

#[derive(Debug)]
pub struct DraftModel {
    bounds: DraftBounds,
    /// The number of tokens in the large model's vocabulary.
    vocab: usize,
    places: Places,
    /// The cost of the draft model's steps.
    cost: RowCost,
    /// The time per token of catching up; 0 until it is known.
    token_ms: f64,
    confidence: Confidence,
    /// The time allowance for guesses that do not promise to pay off.
    credit_ms: f64,
    rounds: u64,
    round: Option<Round>,
    /// The time of the last round.
    round_ms: f64,
    sampling: Sampling,
    history: History,
}

#[derive(Debug)]
struct Round {
    target: Target,
    rows: Vec<Row>,
    depth: usize,
    /// The time at which the step in progress began.
    since: Duration,
    ms: f64,
}

/// A sequence in a round.
#[derive(Debug)]
struct Row {
    job: JobId,
    /// Its tokens in the next step, from position `start` on; empty if it is done.
    feed: Vec<Token>,
    start: usize,
    catches_up: bool,
    guesses: Vec<Guess>,
    most: usize,
    ends: Vec<Token>,
    confidence: Confidence,
    /// The probability that all guesses so far are right.
    reach: f64,
}

/// The number of tokens beyond which a row catches up: the time of such a step says nothing about one that drafts.
const FEED_MAX: usize = 4;
/// The number of missing tokens beyond which a sequence first catches up, without drafting.
const LAG_MAX: usize = 2 * DRAFT_TOKENS_MAX;
/// The share of a step's time for catching up, and the most tokens of it.
const CATCH_UP_SHARE: f64 = 0.5;
const CATCH_UP_TOKENS_MAX: usize = 256;
/// The tokens of the first chunk, while its time is not known.
const CATCH_UP_TOKENS_FIRST: usize = 4 * BLOCK_TOKENS;
/// An answer is expected to continue for as many tokens as it has, plus this many.
const TOKENS_EXPECTED: usize = 16;
/// The share of the time for trying guesses that do not promise to pay off, and the most that is saved of it.
const CREDIT_SHARE: f64 = 0.01;
const CREDIT_MS_MAX: f64 = 1000.0;
/// The share of the newest chunk in the time per token of catching up.
const WEIGHT: f64 = 0.2;

impl DraftModel {
    pub(crate) fn new(bounds: DraftBounds, vocab: usize) -> Self {
        Self {
            bounds,
            vocab,
            places: Places::new(bounds.blocks),
            cost: RowCost::default(),
            token_ms: 0.0,
            confidence: Confidence::default(),
            credit_ms: 0.0,
            rounds: 0,
            round: None,
            round_ms: 0.0,
            sampling: Sampling { temperature: 0.0, logprobs: Some(0), ..Sampling::default() },
            history: History::default(),
        }
    }

    /// The initial confidence of a new sequence.
    pub(crate) fn confidence(&self) -> Confidence {
        self.confidence
    }

    pub(crate) fn note(&mut self, class: usize, drawn: bool) {
        self.confidence.note(class, drawn);
    }

    /// Adds to the allowance for a step of the large model that took this long.
    pub(crate) fn earn(&mut self, ms: f64) {
        self.credit_ms = (self.credit_ms + CREDIT_SHARE * ms).min(CREDIT_MS_MAX);
    }

    /// Notes that the sequence ended, or lost its blocks.
    pub(crate) fn leave(&mut self, job: JobId) {
        self.places.leave(job);
    }

    pub(crate) fn is_at_work(&self) -> bool {
        self.round.is_some()
    }

    /// The time of the last round.
    pub(crate) fn round_ms(&self) -> f64 {
        self.round_ms
    }

    /// Begins a round for these sequences.
    pub(crate) fn begin(&mut self, wishes: &[Wish<'_>], target: Target) {
        self.rounds += 1;
        let mut room = self.bounds.step_tokens;
        let mut catch_up = self.catch_up_tokens(&target).min(room);
        let gain_ms = self.gain_ms(&target);
        let mut rows = Vec::new();
        for wish in wishes {
            let row = self.row(wish, gain_ms, target.least > 0, catch_up.min(room));
            if let Some(row) = row.filter(|row| row.feed.len() <= room) {
                room -= row.feed.len();
                catch_up -= if row.catches_up { row.feed.len() } else { 0 };
                rows.push(row);
            }
        }
        (self.round, self.round_ms) = (Some(Round { target, rows, depth: 0, since: Duration::ZERO, ms: 0.0 }), 0.0);
    }

    /// The round's computation for a sequence; `None` if there is none.
    fn row(&mut self, wish: &Wish<'_>, gain_ms: f64, at_any_price: bool, catch_up: usize) -> Option<Row> {
        let Wish { job, tokens, most, .. } = *wish;
        let most = most.min(self.bounds.context_tokens.saturating_sub(tokens.len()));
        let held = self.places.held(job, tokens);
        let lag = tokens.len() - held;
        let catches_up = lag > LAG_MAX.min(self.bounds.step_tokens);
        let cost = if lag > FEED_MAX { lag as f64 * self.token_ms } else { 0.0 };
        let promised = gain_ms * wish.left.min(wish.generated + TOKENS_EXPECTED) as f64;
        let is_worth_it = at_any_price || cost <= promised || cost <= self.credit_ms;
        let is_known = tokens[held..].iter().all(|&token| (token as usize) < self.bounds.vocab);
        if most == 0 || !is_worth_it || !is_known || catches_up && catch_up == 0 {
            return None;
        }
        let place = self.places.take(job, tokens, tokens.len() + most, self.rounds)?;
        let start = place.tokens.len();
        let feed = &tokens[start..];
        // As much of the feed, in whole blocks, as there is time for.
        let feed = if catches_up { &feed[..feed.len().min(catch_up).min(lag - 1)] } else { feed };
        if catches_up && cost > promised && !at_any_price {
            self.credit_ms -= feed.len() as f64 * self.token_ms;
        }
        let (ends, confidence) = (wish.ends.to_vec(), wish.confidence);
        Some(Row { job, feed: feed.to_vec(), start, catches_up, guesses: Vec::new(), most, ends, confidence, reach: 1.0 })
    }

    /// The number of tokens that may be caught up beside the large model's next step.
    fn catch_up_tokens(&self, target: &Target) -> usize {
        let ms = (CATCH_UP_SHARE * target.ms).min(target.left_ms());
        if target.least > 0 {
            return CATCH_UP_TOKENS_MAX;
        }
        if self.token_ms == 0.0 {
            return CATCH_UP_TOKENS_FIRST;
        }
        ((ms / self.token_ms).max(0.0) as usize).min(CATCH_UP_TOKENS_MAX) / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// The time that drafts save per token of a sequence, if guesses are as good as they have been.
    fn gain_ms(&self, target: &Target) -> f64 {
        let (all, share) = (target.sequences as f64, self.confidence.next());
        let (mut tokens, mut ms, mut reach) = (all, target.cost.step_ms(all), 1.0);
        let (plain_ms, step_ms) = (ms, self.cost.step_ms(all) + all * target.cost.row_ms());
        for _ in 0..DRAFT_TOKENS_MAX {
            reach *= share;
            if !pays(all * reach, step_ms, tokens, ms) {
                break;
            }
            (tokens, ms) = (tokens + all * reach, ms + step_ms);
        }
        (plain_ms - ms * all / tokens.max(1.0)).max(0.0)
    }

    /// The round's next step; empty if the round is over.
    pub(crate) fn next(&mut self, now: Duration) -> Vec<ScheduledChunk> {
        let Some(mut round) = self.round.take() else { return Vec::new() };
        self.choose(&mut round);
        round.since = now;
        let chunk = |row: &Row| ScheduledChunk { job: row.job, start: row.start, len: row.feed.len() };
        let chunks = round.rows.iter().filter(|row| !row.feed.is_empty()).map(chunk).collect();
        self.round = Some(round);
        chunks
    }

    /// Drops rows for which the next step does not pay off.
    fn choose(&mut self, round: &mut Round) {
        let target = round.target;
        let (row_ms, own_row_ms) = (target.cost.row_ms(), self.cost.row_ms());
        let (tokens, ms) = expected(round);
        let guesses: usize = round.rows.iter().map(|row| row.guesses.len()).sum();
        let drafts = |row: &&mut Row| !row.feed.is_empty() && !row.catches_up;
        let mut room = target.rows.saturating_sub(guesses);
        let forced = round.depth < target.least;
        let mut dropped = Vec::new();
        let (mut gain, mut rows, mut count) = (0.0, 0, 0);
        for row in round.rows.iter_mut().filter(drafts) {
            let next = row.reach * row.confidence.next();
            if room == 0 || !forced && !pays(next, row_ms + own_row_ms * row.feed.len().min(FEED_MAX) as f64, tokens, ms) {
                dropped.push((row.job, std::mem::take(&mut row.feed)));
                continue;
            }
            room -= 1;
            (gain, rows, count) = (gain + next, rows + row.feed.len().min(FEED_MAX), count + 1);
        }
        let cost = self.cost.step_ms(rows as f64) + f64::from(count) * row_ms;
        // As in `give_out`, the limit is that of sequences that draft nothing.
        let is_late = ms + cost > target.limit_ms && round.rows.iter().filter(|row| !row.catches_up).count() < target.sequences;
        if count > 0 && !forced && (is_late || !pays(gain, cost, tokens, ms)) {
            let all = round.rows.iter_mut().filter(drafts);
            dropped.extend(all.map(|row| (row.job, std::mem::take(&mut row.feed))));
            count = 0;
        }
        if round.depth == 0 && count == 0 && target.rows > 0 {
            self.try_one(round, dropped);
        }
    }

    /// Makes one of the sequences for which drafting does not seem to pay off draft a token nevertheless, if the allowance covers its time.
    fn try_one(&mut self, round: &mut Round, mut dropped: Vec<(JobId, Vec<Token>)>) {
        let Some(index) = (self.rounds as usize).checked_rem(dropped.len()) else { return };
        let (job, feed) = dropped.swap_remove(index);
        let cost = self.cost.step_ms(feed.len().min(FEED_MAX) as f64) + round.target.cost.row_ms();
        if cost > self.credit_ms || cost > round.target.left_ms() {
            return;
        }
        self.credit_ms -= cost;
        for row in round.rows.iter_mut().filter(|row| row.job == job) {
            (row.feed, row.most) = (feed.clone(), 1);
        }
    }

    /// A chunk of the round's step, in the executor's form.
    pub(crate) fn segment(&self, chunk: &ScheduledChunk) -> Segment<'_> {
        let row = self.round.iter().flat_map(|round| &round.rows).find(|row| row.job == chunk.job).expect("a row of the round");
        let place = self.places.get(row.job).expect("a row has a place");
        let draw = Draw { sampling: &self.sampling, history: &self.history, index: 0, banned: &[], allowed: None };
        let wanted = if row.catches_up { Wanted::Nothing } else { Wanted::Token(draw) };
        Segment { tokens: &row.feed, start: row.start, blocks: &place.blocks, state: StateBlocks::default(), wanted }
    }

    /// Applies the results of the round's step.
    pub(crate) fn stepped(&mut self, results: Vec<SegmentResult>, now: Duration) {
        let Some(mut round) = self.round.take() else { return };
        let ms = now.saturating_sub(round.since).as_secs_f64() * 1e3;
        let (mut caught_up, mut rows) = (0, 0);
        for (row, result) in round.rows.iter_mut().filter(|row| !row.feed.is_empty()).zip(results) {
            match row.feed.len() {
                len if row.catches_up => caught_up += len,
                len if len > FEED_MAX => (caught_up, rows) = (caught_up + len - 1, rows + 1),
                len => rows += len,
            }
            let place = self.places.get_mut(row.job).expect("a row has a place");
            place.tokens.extend_from_slice(&row.feed);
            row.take_in(&result, self.vocab.min(self.bounds.vocab));
        }
        self.learn(caught_up, rows, ms);
        round.depth += 1;
        round.ms += ms;
        self.round_ms += ms;
        self.round = Some(round);
    }

    fn learn(&mut self, caught_up: usize, rows: usize, ms: f64) {
        if caught_up == 0 {
            return self.cost.observe(rows, Duration::from_secs_f64(ms / 1e3));
        }
        let of_rows = if rows > 0 { self.cost.step_ms(rows as f64) } else { 0.0 };
        let token_ms = (ms - of_rows).max(0.0) / caught_up as f64;
        self.token_ms = if self.token_ms > 0.0 { self.token_ms + WEIGHT * (token_ms - self.token_ms) } else { token_ms };
    }

    /// Ends the round, and returns the guesses of each sequence.
    pub(crate) fn end(&mut self) -> Vec<(JobId, Vec<Guess>)> {
        let rows = self.round.take().into_iter().flat_map(|round| round.rows);
        rows.filter(|row| !row.guesses.is_empty()).map(|row| (row.job, row.guesses)).collect()
    }

    /// Checks the invariants. For tests.
    pub(crate) fn check_integrity(&self, lives: impl Fn(JobId) -> bool) {
        self.places.check_integrity(lives);
        assert!(self.credit_ms <= CREDIT_MS_MAX);
    }
}

/// The expected tokens and time of the large model's step with the guesses of a round, including the round's own time.
fn expected(round: &Round) -> (f64, f64) {
    let Target { cost, tokens, ms, .. } = round.target;
    let guesses = round.rows.iter().map(|row| row.guesses.len()).sum::<usize>() as f64;
    let gain: f64 = round.rows.iter().map(Row::promise).sum();
    (tokens + gain, ms + round.ms + guesses * cost.row_ms())
}

impl Row {
    /// The number of tokens that its guesses are expected to bring.
    fn promise(&self) -> f64 {
        let chances = self.guesses.iter().scan(1.0, |reach, guess| {
            *reach *= self.confidence.of(guess.class);
            Some(*reach)
        });
        chances.sum()
    }

    /// Applies the result of its step. Guesses have ids below `vocab`.
    fn take_in(&mut self, result: &SegmentResult, vocab: usize) {
        self.start += self.feed.len();
        self.feed.clear();
        let Some((token, logprob)) = result.drawn.first().filter(|_| !self.catches_up) else { return };
        if self.ends.contains(token) || *token as usize >= vocab {
            return;
        }
        let class = Confidence::class(logprob.as_ref().map_or(0.0, |logprob| logprob.logprob));
        self.guesses.push(Guess { token: *token, class });
        self.reach *= self.confidence.of(class);
        if self.guesses.len() < self.most {
            self.feed.push(*token);
        }
    }
}
