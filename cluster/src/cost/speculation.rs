//! The rows and tokens of a worker's decode steps, and its draft model's time: with speculation, a step has more than one row for a
//! sequence, and draws more than one token. All depend on the number of sequences, since a worker guesses less the more of them it has, and
//! on the answers.

use tidemill_proto::message::StepSample;

/// The number of classes of steps: 1 sequence, 2 to 3, 4 to 7 and so on.
const CLASSES: usize = 10;
/// The share of the newest step in the moving averages.
const WEIGHT: f64 = 0.02;

/// Means of the measured steps of one engine, or of all engines of a role, by the number of their sequences.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Speculation([Mean; CLASSES]);

/// The mean step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Mean {
    /// The rows and the tokens of each sequence: 1 without speculation.
    pub(super) rows: f64,
    pub(super) tokens: f64,
    /// The draft model's time before the step.
    pub(super) drafting_ms: f64,
}

impl Default for Speculation {
    /// No speculation, until there are steps that say otherwise.
    fn default() -> Self {
        Self([Mean { rows: 1.0, tokens: 1.0, drafting_ms: 0.0 }; CLASSES])
    }
}

impl Speculation {
    /// Learns from one measured step. Impossible numbers are ignored.
    pub(super) fn observe(&mut self, step: &StepSample) {
        let StepSample { sequences, decode_rows, drawn, drafting_ms, .. } = *step;
        let is_time = drafting_ms.is_finite() && drafting_ms >= 0.0;
        if sequences == 0 || decode_rows < sequences || drawn > decode_rows || !is_time {
            return;
        }
        let mean = &mut self.0[class(sequences.into())];
        mean.rows += WEIGHT * (f64::from(decode_rows) / f64::from(sequences) - mean.rows);
        // A sequence that ends in a step may draw fewer tokens than it has rows, but a step is never predicted to yield less than one.
        mean.tokens += WEIGHT * ((f64::from(drawn) / f64::from(sequences)).max(1.0) - mean.tokens);
        mean.drafting_ms += WEIGHT * (f64::from(drafting_ms) - mean.drafting_ms);
    }

    pub(super) fn of(&self, sequences: u64) -> Mean {
        self.0[class(sequences)]
    }

    pub(super) fn check_integrity(&self) {
        let is_sound = |mean: &Mean| (1.0..=mean.rows + 1e-9).contains(&mean.tokens) && mean.drafting_ms >= 0.0;
        assert!(self.0.iter().all(is_sound), "{self:?}");
    }
}

fn class(sequences: u64) -> usize {
    (sequences.max(1).ilog2() as usize).min(CLASSES - 1)
}
