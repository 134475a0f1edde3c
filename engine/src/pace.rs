//! The time of steps here, learnt from completed ones: the number of prompt tokens that fit into the available time, and the time of a
//! prompt.
//!
//! `ms = plain(rows) + tokens · per token + context · per position`: a step that only decodes has its plain time, by the number of rows;
//! prompt tokens add their matrix products and their attention to the positions before them.

use crate::job::ScheduledChunk;
use std::time::Duration;

/// The share of the newest step in the moving averages.
const WEIGHT: f64 = 0.1;
/// An outlier (a paused process) counts as no more than this many times the expected time.
const SURPRISE_MAX: f64 = 3.0;
/// The number of classes of row counts, by power of two.
const BUCKETS: usize = 24;

/// The work of a step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StepWork {
    /// The number of sequences that decode one token.
    pub rows: usize,
    /// The number of prompt tokens.
    pub tokens: usize,
    /// The sum of these tokens' positions.
    pub context: f64,
}

impl StepWork {
    /// Adds another chunk of a prompt.
    pub fn add(&mut self, chunk: &ScheduledChunk) {
        self.tokens += chunk.len;
        self.context += chunk.len as f64 * (chunk.start as f64 + chunk.len as f64 / 2.0);
    }
}

#[derive(Clone, Debug, Default)]
pub struct Pace {
    /// The time of steps without prompt tokens, by rows.
    plain_ms: [Option<f64>; BUCKETS],
    /// Moving sums of the times that prompt tokens added: least squares through the origin in (tokens, context).
    tokens_tokens: f64,
    tokens_context: f64,
    context_context: f64,
    tokens_ms: f64,
    context_ms: f64,
}

impl Pace {
    /// Learns from a step.
    pub fn observe(&mut self, work: &StepWork, took: Duration) {
        let expected = self.step_ms(work);
        let ms = took.as_secs_f64() * 1e3;
        let ms = expected.map_or(ms, |expected| ms.min(SURPRISE_MAX * expected.max(0.1)));
        if work.tokens == 0 {
            let plain = self.plain_ms[bucket(work.rows)].get_or_insert(ms);
            *plain += WEIGHT * (ms - *plain);
            return;
        }
        let added = (ms - self.plain_ms(work.rows).unwrap_or(0.0)).max(0.0);
        let tokens = work.tokens as f64;
        // Errors are relative, as the longest steps would drown the others.
        let weight = 1.0 / tokens;
        for (sum, new) in [
            (&mut self.tokens_tokens, tokens * tokens),
            (&mut self.tokens_context, tokens * work.context),
            (&mut self.context_context, work.context * work.context),
            (&mut self.tokens_ms, tokens * added),
            (&mut self.context_ms, work.context * added),
        ] {
            *sum = (1.0 - WEIGHT) * *sum + WEIGHT * weight * new;
        }
    }

    /// The time of a prompt's tokens from position `start` on. Zero until anything is known.
    pub fn prompt(&self, start: usize, tokens: usize) -> Duration {
        let (per_token, per_position) = self.per_token().unwrap_or_default();
        let (start, tokens) = (start as f64, tokens as f64);
        Duration::try_from_secs_f64((per_token + per_position * (start + tokens / 2.0)) * tokens / 1e3).unwrap_or(Duration::MAX)
    }

    /// Milliseconds of each of a prompt's next tokens, from position `start` on; `None` until anything is known.
    pub fn token_ms(&self, start: usize) -> Option<f64> {
        let (per_token, per_position) = self.per_token()?;
        Some(per_token + per_position * start as f64)
    }

    /// Milliseconds of a step that only decodes: of this many rows, or of the nearest number that was observed.
    pub fn plain_ms(&self, rows: usize) -> Option<f64> {
        if rows == 0 {
            return Some(0.0);
        }
        let at = bucket(rows);
        let nearest = (0..BUCKETS).filter(|bucket| self.plain_ms[*bucket].is_some()).min_by_key(|bucket| bucket.abs_diff(at));
        nearest.and_then(|bucket| self.plain_ms[bucket])
    }

    fn step_ms(&self, work: &StepWork) -> Option<f64> {
        let plain = self.plain_ms(work.rows);
        if work.tokens == 0 {
            return plain;
        }
        let (per_token, per_position) = self.per_token()?;
        Some(plain.unwrap_or(0.0) + per_token * work.tokens as f64 + per_position * work.context)
    }

    /// Milliseconds of a token, and of a position before it.
    fn per_token(&self) -> Option<(f64, f64)> {
        if self.tokens_tokens <= 0.0 {
            return None;
        }
        let alone = self.tokens_ms / self.tokens_tokens;
        let determinant = self.tokens_tokens * self.context_context - self.tokens_context * self.tokens_context;
        // Chunks that are all alike do not separate the two.
        if determinant <= 1e-6 * self.tokens_tokens * self.context_context {
            return Some((alone, 0.0));
        }
        let per_token = (self.context_context * self.tokens_ms - self.tokens_context * self.context_ms) / determinant;
        let per_position = (self.tokens_tokens * self.context_ms - self.tokens_context * self.tokens_ms) / determinant;
        // A negative cost is noise: the other one then explains the whole time.
        Some(match (per_token > 0.0, per_position > 0.0) {
            (true, true) => (per_token, per_position),
            (false, true) => (0.0, self.context_ms / self.context_context),
            _ => (alone, 0.0),
        })
    }

    /// Panics if a learnt time is invalid. For tests.
    pub fn check_integrity(&self) {
        let sums = [self.tokens_tokens, self.tokens_context, self.context_context, self.tokens_ms, self.context_ms];
        assert!(sums.iter().chain(self.plain_ms.iter().flatten()).all(|sum| sum.is_finite() && *sum >= 0.0), "{self:?}");
        if let Some((per_token, per_position)) = self.per_token() {
            assert!(per_token >= 0.0 && per_position >= 0.0, "{self:?}");
        }
    }
}

fn bucket(rows: usize) -> usize {
    (rows.next_power_of_two().trailing_zeros() as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::JobId;

    fn work(rows: usize, start: usize, len: usize) -> StepWork {
        let mut work = StepWork { rows, ..StepWork::default() };
        if len > 0 {
            work.add(&ScheduledChunk { job: JobId(0), start, len });
        }
        work
    }

    /// The time of steps on a machine with exactly these costs.
    fn took(work: &StepWork) -> Duration {
        let plain = if work.rows == 0 { 0.0 } else { 5.0 + work.rows as f64 };
        Duration::from_secs_f64((plain + 0.5 * work.tokens as f64 + 1e-4 * work.context) / 1e3)
    }

    #[test]
    fn a_machine_is_learnt_from_its_steps() {
        let mut pace = Pace::default();
        assert_eq!((pace.token_ms(0), pace.plain_ms(3), pace.prompt(0, 100)), (None, None, Duration::ZERO));
        for i in 0..200 {
            for work in [work(4, 0, 0), work(4, i % 7 * 300, 16 + i % 5 * 48), work(0, i % 3 * 500, 128)] {
                pace.observe(&work, took(&work));
                pace.check_integrity();
            }
        }
        assert!((pace.plain_ms(4).unwrap() - 9.0).abs() < 0.1);
        assert!((pace.token_ms(1000).unwrap() - 0.6).abs() < 0.03, "{:?}", pace.token_ms(1000));
        let truth = took(&work(0, 0, 2000)).as_secs_f64();
        assert!((pace.prompt(0, 2000).as_secs_f64() / truth - 1.0).abs() < 0.05, "{:?} for {truth}", pace.prompt(0, 2000));
    }

    #[test]
    fn one_outlier_does_not_spoil_it() {
        let mut pace = Pace::default();
        for i in 0..100 {
            let work = work(2, i % 7 * 100, 64);
            pace.observe(&work, took(&work));
        }
        let before = pace.token_ms(300).unwrap();
        pace.observe(&work(2, 0, 64), Duration::from_secs(60));
        assert!(pace.token_ms(300).unwrap() < 1.5 * before);
        pace.check_integrity();
    }
}
