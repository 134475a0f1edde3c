//! The number of drafted tokens in a step: as many as increase the tokens per second.
//!
//! A step takes `a + b · rows`, learnt from completed steps. Of all sequences, the drafted token that is likeliest to count comes first. It
//! pays off if its probability divided by `b` exceeds the step's yield without it, tokens over time. So a batch that makes good use of the
//! machine leaves no room for drafts of middling probability, and a single sequence drafts any token with some.

use std::time::Duration;

/// The share of the newest step in the moving averages.
const WEIGHT: f64 = 0.03;
/// An outlier (a paused process) counts as no more than this many times the expected time.
const SURPRISE_MAX: f64 = 2.0;
/// The prior for the share of a one-row step that one more row takes, used until steps of different sizes are known.
const ROW_SHARE: f64 = 0.08;
/// The weight of the prior: a variance of rows that counts as much.
const BELIEF: f64 = 0.1;
/// The factor by which a draft's promise must exceed its cost, as probabilities are only estimates.
const MARGIN: f64 = 1.1;

/// The time of a step that only decodes, by its rows: a line through moving averages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowCost {
    steps: u64,
    rows: f64,
    ms: f64,
    /// Moments around the averages.
    rows_rows: f64,
    rows_ms: f64,
}

impl RowCost {
    /// Learns from a step that had no prompts.
    pub(crate) fn observe(&mut self, rows: usize, took: Duration) {
        let (rows, ms) = (rows as f64, took.as_secs_f64() * 1e3);
        if self.steps == 0 {
            *self = Self { steps: 1, rows, ms, ..Self::default() };
            return;
        }
        self.steps += 1;
        let ms = ms.min(SURPRISE_MAX * self.step_ms(rows));
        // The first steps have equal weights.
        let weight = WEIGHT.max(1.0 / self.steps as f64);
        let (row, time) = (rows - self.rows, ms - self.ms);
        self.rows += weight * row;
        self.ms += weight * time;
        self.rows_rows = (1.0 - weight) * (self.rows_rows + weight * row * row);
        self.rows_ms = (1.0 - weight) * (self.rows_ms + weight * row * time);
    }

    /// Milliseconds of one more row.
    pub(crate) fn row_ms(&self) -> f64 {
        let one = self.ms / (1.0 + ROW_SHARE * (self.rows - 1.0).max(0.0));
        let believed = ROW_SHARE * one;
        ((self.rows_ms + BELIEF * believed) / (self.rows_rows + BELIEF)).max(0.0)
    }

    /// Milliseconds of a step; zero until anything is known.
    pub(crate) fn step_ms(&self, rows: f64) -> f64 {
        (self.ms + self.row_ms() * (rows - self.rows)).max(self.ms / 4.0)
    }
}

/// A step's room for drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// The most rows with drafted tokens.
    pub(crate) drafts: usize,
    /// The most time of the step.
    pub(crate) ms: f64,
    /// The number of drafted tokens of each sequence that are taken whether they pay off or not, if as many are proposed.
    pub(crate) least: usize,
}

/// The drafts of a step: their number for each sequence, and the expected result.
#[derive(Debug)]
pub(crate) struct Given {
    pub(crate) drafts: Vec<usize>,
    pub(crate) tokens: f64,
    pub(crate) ms: f64,
}

/// Whether `gain` more tokens are worth `cost` more milliseconds, if a step brings `tokens` in `ms`.
pub(crate) fn pays(gain: f64, cost: f64, tokens: f64, ms: f64) -> bool {
    gain * ms > MARGIN * tokens * cost
}

/// Distributes drafted tokens among the decoding sequences. `chances` has, for each sequence, the probability that each proposed token is
/// drawn if those before it are.
pub(crate) fn give_out(chances: &[Vec<f64>], room: Room, cost: &RowCost) -> Given {
    let row_ms = cost.row_ms();
    let mut given = Given { drafts: vec![0; chances.len()], tokens: chances.len() as f64, ms: cost.step_ms(chances.len() as f64) };
    // A longer step that brings more tokens keeps limits per token, except for a sequence that gets only one token from it.
    let is_limited = chances.iter().any(Vec::is_empty);
    // The probability that the next drafted token of each sequence counts.
    let mut next: Vec<f64> = chances.iter().map(|chances| chances.first().copied().unwrap_or(0.0)).collect();
    for _ in 0..room.drafts {
        let owed = |i: &usize| given.drafts[*i] < room.least && next[*i] > 0.0;
        let owed = (0..next.len()).find(owed);
        let Some(best) = owed.or_else(|| (0..next.len()).max_by(|&a, &b| next[a].total_cmp(&next[b]))) else { break };
        let pays = next[best] > 0.0 && pays(next[best], row_ms, given.tokens, given.ms) && !(is_limited && given.ms + row_ms > room.ms);
        if !pays && owed.is_none() {
            break;
        }
        given.tokens += next[best];
        given.ms += row_ms;
        given.drafts[best] += 1;
        next[best] *= chances[best].get(given.drafts[best]).copied().unwrap_or(0.0);
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { drafts: 64, ms: 1e9, least: 0 };

    fn give_out(chances: &[Vec<f64>], room: Room, cost: &RowCost) -> Vec<usize> {
        super::give_out(chances, room, cost).drafts
    }

    /// The cost of a machine whose steps take this long.
    fn cost(base: f64, row: f64) -> RowCost {
        let mut cost = RowCost::default();
        for i in 0..300 {
            let rows = 1 + i % 5;
            cost.observe(rows, Duration::from_secs_f64((base + row * rows as f64) / 1e3));
        }
        cost
    }

    #[test]
    fn rows_are_learnt_and_a_belief_comes_back_when_nothing_is_seen_of_them() {
        let mut cost = cost(20.0, 2.0);
        assert!((cost.row_ms() - 2.0).abs() < 0.2 && (cost.step_ms(8.0) - 36.0).abs() < 1.5, "{cost:?}");
        cost.observe(1, Duration::from_secs(60));
        assert!(cost.row_ms() < 3.0, "one outlier is no reason: {cost:?}");
        for _ in 0..500 {
            cost.observe(1, Duration::from_millis(10));
        }
        assert!((cost.row_ms() - 0.8).abs() < 0.1, "{cost:?}");
    }

    #[test]
    fn drafts_are_as_long_as_they_pay() {
        let likely = [vec![0.9; 16]];
        assert_eq!(give_out(&likely, ROOM, &cost(30.0, 0.5)), [16]);
        let some = give_out(&likely, ROOM, &cost(20.0, 2.0))[0];
        assert!((3..14).contains(&some), "{some}");
        assert_eq!(give_out(&likely, ROOM, &cost(0.0, 10.0)), [0], "rows are not cheaper than steps");
        assert_eq!(give_out(&[vec![0.05; 16]], ROOM, &cost(20.0, 2.0)), [0], "hardly any would count");
        assert_eq!(give_out(&likely, Room { drafts: 2, ..ROOM }, &cost(30.0, 0.5)), [2]);
        let beside_another = [vec![0.9; 16], vec![]];
        assert_eq!(give_out(&beside_another, Room { ms: 32.7, ..ROOM }, &cost(30.0, 0.5)), [3, 0], "31 ms, and three more rows");
        assert_eq!(give_out(&likely, Room { ms: 1.0, ..ROOM }, &cost(30.0, 0.5)), [16], "the tokens come sooner, not later");
        assert_eq!(give_out(&[vec![0.05; 16], vec![]], Room { least: 3, ..ROOM }, &cost(20.0, 2.0)), [3, 0], "they are asked for");
    }

    #[test]
    fn a_batch_drafts_what_is_likeliest_and_less_the_fuller_it_is() {
        let cost = cost(20.0, 1.0);
        let drafts = give_out(&[vec![0.3; 8], vec![0.95; 8], vec![]], ROOM, &cost);
        assert!(drafts[1] > drafts[0] && drafts[2] == 0, "{drafts:?}");
        let total = |rows: usize| give_out(&vec![vec![0.6; 8]; rows], ROOM, &cost).iter().sum::<usize>() as f64 / rows as f64;
        assert!(total(1) > total(8) && total(8) > total(64), "{} {} {}", total(1), total(8), total(64));
        assert!(give_out(&[], ROOM, &cost).is_empty());
    }
}
