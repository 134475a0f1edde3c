//! A linear model of one engine step, learnt from the steps that workers report.
//!
//! A step's time is close to linear in four sums (weights are read once, each token costs its matrix products, each pair
//! of positions costs attention): `ms = c · (1, prompt tokens, prompt context, decode rows, decode context)`. Mooncake's
//! Conductor and vLLM's profiler fit the same shape offline; here recursive least squares with forgetting does it online.
//! Uncertainty never grows beyond the prior: long runs of similar steps say little about some terms, whose variance would
//! otherwise grow without bound.

use super::speculation::Speculation;
use serde::{Deserialize, Serialize};
use tidemill_proto::message::StepSample;

const TERMS: usize = 5;
/// Brings the terms of a typical step near 1, so that one prior variance fits all coefficients.
const SCALE: [f64; TERMS] = [1.0, 1e-3, 1e-6, 1e-1, 1e-4];
/// Prior cost of each scaled term in ms: a mid-size model on a few CPU cores.
const START: [f64; TERMS] = [5.0, 1000.0, 50.0, 5.0, 5.0];
/// The least start value of a machine's term, as a share of the start values above.
const START_LEAST: f64 = 1e-3;
/// Variance of the start values, in units of their squares.
const START_VARIANCE: f64 = 1.0;
/// The weight of a sample relative to the next one. About the last 200 steps count.
const FORGET: f64 = 0.995;
/// The largest error that counts, as a share of the prediction, so that an outlier (a page fault, a paused process) does little harm.
const SURPRISE_MAX: f64 = 0.5;

/// A model of the time of one engine's steps, or of the steps of all engines of a role.
#[derive(Clone, Debug)]
pub struct StepCost {
    coefficients: [f64; TERMS],
    /// The belief before the first step. Uncertainty never exceeds that of the prior around these values.
    start: [f64; TERMS],
    /// The inverse of the coefficients' covariance. Never less than at the start.
    information: [[f64; TERMS]; TERMS],
    speculation: Speculation,
}

/// Milliseconds of a step, linear in its sums: the learnt coefficients in a form to publish.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCoefficients {
    pub step_ms: f64,
    pub prefill_token_ms: f64,
    pub prefill_context_ms: f64,
    pub decode_row_ms: f64,
    pub decode_context_ms: f64,
}

impl StepCoefficients {
    pub fn predict_ms(&self, step: &StepSample) -> f64 {
        self.step_ms
            + self.prefill_token_ms * f64::from(step.prefill_tokens)
            + self.prefill_context_ms * step.prefill_context as f64
            + self.decode_row_ms * f64::from(step.decode_rows)
            + self.decode_context_ms * step.decode_context as f64
    }
}

impl Default for StepCost {
    fn default() -> Self {
        Self::believing(START)
    }
}

impl StepCost {
    fn believing(start: [f64; TERMS]) -> Self {
        let information = std::array::from_fn(|i| std::array::from_fn(|j| if i == j { information_of(start[i]) } else { 0.0 }));
        Self { coefficients: start, start, information, speculation: Speculation::default() }
    }

    /// A machine that is taken to be like `others` until its own steps show a difference.
    pub fn like(others: &Self) -> Self {
        // A term that costs nothing on the others may have a cost on this machine.
        let start = std::array::from_fn(|i| others.coefficients[i].max(START_LEAST * START[i]));
        Self { speculation: others.speculation, ..Self::believing(start) }
    }

    /// Learns from one measured step. Impossible durations are ignored.
    pub fn observe(&mut self, sample: &StepSample) {
        let ms = f64::from(sample.ms);
        if !(ms.is_finite() && ms >= 0.0) {
            return;
        }
        self.speculation.observe(sample);
        let terms = scaled(
            f64::from(sample.prefill_tokens),
            sample.prefill_context as f64,
            f64::from(sample.decode_rows),
            sample.decode_context as f64,
        );
        let predicted = self.predict(&terms);
        let surprise_max = (SURPRISE_MAX * predicted).max(0.1);
        let error = (ms - dot(&self.coefficients, &terms)).clamp(-surprise_max, surprise_max);

        // Measurement noise grows with the step's time: relative errors count, or long prefills would drown out short steps.
        let noise = (0.1 * predicted).max(0.1).powi(2);
        let mut information = self.information;
        for (i, row) in information.iter_mut().enumerate() {
            for (j, cell) in row.iter_mut().enumerate() {
                *cell = FORGET * *cell + terms[i] * terms[j] / noise;
            }
            row[i] += (1.0 - FORGET) * information_of(self.start[i]);
        }
        // A sample so large that rounding loses the others is no step of an engine.
        let Some(gain) = solve(&information, &terms) else { return };
        self.information = information;
        self.coefficients.iter_mut().zip(gain).for_each(|(coefficient, gain)| *coefficient += gain * error / noise);
    }

    /// Milliseconds of a step like this one.
    pub fn predict_step(&self, step: &StepSample) -> f64 {
        let StepSample { prefill_tokens, prefill_context, decode_rows, decode_context, .. } = *step;
        self.predict(&scaled(prefill_tokens.into(), prefill_context as f64, decode_rows.into(), decode_context as f64))
    }

    /// The part of a measured step that its prompts took: all of it, if nothing decoded beside them.
    pub fn prompts_ms(&self, step: &StepSample) -> f64 {
        let ms = f64::from(step.ms);
        if step.prefill_tokens == 0 || !(ms.is_finite() && ms > 0.0) {
            return 0.0;
        }
        let alone = if step.decode_rows == 0 { 0.0 } else { self.plain_ms(step.decode_rows.into(), step.decode_context) };
        (ms - alone).clamp(0.0, ms)
    }

    /// Milliseconds to compute `new` prompt tokens after `cached` ones, with no other work in the steps.
    pub fn prefill_ms(&self, new: u64, cached: u64) -> f64 {
        let (new, cached) = (new as f64, cached as f64);
        self.predict(&scaled(new, new * cached + new * new / 2.0, 0.0, 0.0))
    }

    /// Milliseconds of a decode step over `rows` rows whose contexts add up to `context`, none of them drafted.
    pub fn plain_ms(&self, rows: u64, context: u64) -> f64 {
        self.predict(&scaled(0.0, 0.0, rows as f64, context as f64))
    }

    /// Milliseconds of a decode step over `sequences` sequences whose lengths add up to `context`, with as many drafted rows and as much
    /// time of the draft model as the measured steps had.
    pub fn step_ms(&self, sequences: u64, context: u64) -> f64 {
        let mean = self.speculation.of(sequences);
        self.predict(&scaled(0.0, 0.0, sequences as f64 * mean.rows, context as f64 * mean.rows)) + mean.drafting_ms
    }

    /// Milliseconds per token of each of these sequences: those of such a step, divided by the tokens that it draws for a sequence.
    pub fn token_ms(&self, sequences: u64, context: u64) -> f64 {
        self.step_ms(sequences, context) / self.speculation.of(sequences).tokens
    }

    /// Negative coefficients come from noise, and count as zero.
    fn predict(&self, terms: &[f64; TERMS]) -> f64 {
        self.coefficients.iter().zip(terms).map(|(c, t)| c.max(0.0) * t).sum()
    }

    /// The coefficients used for predictions.
    pub fn coefficients(&self) -> StepCoefficients {
        let [step_ms, prefill_token_ms, prefill_context_ms, decode_row_ms, decode_context_ms] =
            std::array::from_fn(|i| self.coefficients[i].max(0.0) * SCALE[i]);
        StepCoefficients { step_ms, prefill_token_ms, prefill_context_ms, decode_row_ms, decode_context_ms }
    }

    /// Panics if a coefficient is not finite, or less certain than at the start. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert!(self.coefficients.iter().all(|c| c.is_finite()), "{:?}", self.coefficients);
        self.speculation.check_integrity();
        for (i, row) in self.information.iter().enumerate() {
            assert!(row.iter().all(|cell| cell.is_finite()), "{row:?}");
            assert!(row[i] >= information_of(self.start[i]) * (1.0 - 1e-9), "term {i} is less certain than its prior");
        }
    }
}

fn information_of(start: f64) -> f64 {
    1.0 / (start * start * START_VARIANCE)
}

/// Solves `matrix x = right` for a symmetric positive definite matrix, by Cholesky's method. Returns `None` if rounding made it indefinite.
fn solve(matrix: &[[f64; TERMS]; TERMS], right: &[f64; TERMS]) -> Option<[f64; TERMS]> {
    let mut lower = [[0.0; TERMS]; TERMS];
    let mut x = [0.0; TERMS];
    for i in 0..TERMS {
        for j in 0..=i {
            let rest = matrix[i][j] - dot(&lower[i], &lower[j]);
            lower[i][j] = if i == j { rest.sqrt() } else { rest / lower[j][j] };
        }
        x[i] = (right[i] - dot(&lower[i], &x)) / lower[i][i];
    }
    for i in (0..TERMS).rev() {
        let below: f64 = (i + 1..TERMS).map(|j| lower[j][i] * x[j]).sum();
        x[i] = (x[i] - below) / lower[i][i];
    }
    x.iter().all(|x| x.is_finite()).then_some(x)
}

fn scaled(prefill_tokens: f64, prefill_context: f64, decode_rows: f64, decode_context: f64) -> [f64; TERMS] {
    [SCALE[0], prefill_tokens * SCALE[1], prefill_context * SCALE[2], decode_rows * SCALE[3], decode_context * SCALE[4]]
}

fn dot(a: &[f64; TERMS], b: &[f64; TERMS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A machine whose steps cost exactly this.
    fn machine(prefill_tokens: u32, cached: u64, decode_rows: u32, decode_context: u64) -> StepSample {
        let new = u64::from(prefill_tokens);
        let prefill_context = new * cached + new * new / 2;
        let ms = 2.0
            + 0.05 * f64::from(prefill_tokens)
            + 1e-5 * prefill_context as f64
            + 0.2 * f64::from(decode_rows)
            + 1e-4 * decode_context as f64;
        let (sequences, drawn) = (decode_rows, decode_rows);
        StepSample { prefill_tokens, prefill_context, decode_rows, decode_context, sequences, drawn, ms: ms as f32, drafting_ms: 0.0 }
    }

    #[test]
    fn learns_a_machine_from_its_steps() {
        let mut cost = StepCost::default();
        for i in 0..400u32 {
            let rows = i % 17;
            cost.observe(&machine(
                if i % 3 == 0 { 16 * (i % 32) } else { 0 },
                u64::from(i % 5) * 200,
                rows,
                u64::from(rows) * u64::from(i % 900),
            ));
        }
        for (new, cached) in [(64, 0), (512, 0), (256, 1000)] {
            let truth = f64::from(machine(new, cached, 0, 0).ms);
            let guess = cost.prefill_ms(new.into(), cached);
            assert!((guess / truth - 1.0).abs() < 0.1, "{new} after {cached}: {guess} for {truth}");
        }
        let step = machine(300, 70, 5, 4000);
        assert!((cost.coefficients().predict_ms(&step) / cost.predict_step(&step) - 1.0).abs() < 1e-9, "coefficients say the same");
        let truth = f64::from(machine(0, 0, 12, 6000).ms);
        assert!((cost.step_ms(12, 6000) / truth - 1.0).abs() < 0.1, "{} for {truth}", cost.step_ms(12, 6000));
    }

    #[test]
    fn steps_that_are_much_alike_do_not_make_it_forget_how_to_predict_others() {
        let mut cost = StepCost::default();
        for i in 0..20_000u32 {
            // A decode worker: rows and their context go together, and prompts are mostly a last block of 16 tokens.
            let rows = 1 + i / 64 % 3;
            let tail = match (i % 64, i < 200) {
                (0..2, true) => 256,
                (0, false) => 16,
                _ => 0,
            };
            cost.observe(&machine(tail, 496, rows, u64::from(rows * (512 + i % 64))));
            let (truth, guess) = (f64::from(machine(512, 0, 0, 0).ms), cost.prefill_ms(512, 0));
            assert!(i < 400 || (0.5..2.0).contains(&(guess / truth)), "step {i}: {guess} for {truth}");
        }
    }

    #[test]
    fn one_outlier_does_not_spoil_it() {
        let mut cost = StepCost::default();
        for i in 0..200u32 {
            cost.observe(&machine(0, 0, 1 + i % 8, 500));
        }
        let before = cost.step_ms(4, 500);
        cost.observe(&StepSample { ms: 60_000.0, ..machine(0, 0, 4, 500) });
        for i in 0..50u32 {
            cost.observe(&machine(0, 0, 1 + i % 8, 500));
        }
        assert!((cost.step_ms(4, 500) / before - 1.0).abs() < 0.2, "{before} became {}", cost.step_ms(4, 500));
    }

    #[test]
    fn a_new_worker_is_like_the_others_until_its_own_steps_say_otherwise() {
        let mut role = StepCost::default();
        for i in 0..400u32 {
            role.observe(&machine(16 * (i % 32), 0, i % 9, u64::from(i % 9) * 300));
        }
        let mut own = StepCost::like(&role);
        own.check_integrity();
        assert!((own.prefill_ms(512, 0) / role.prefill_ms(512, 0) - 1.0).abs() < 0.05);
        for i in 0..100u32 {
            let sample = machine(16 * (i % 32), 0, i % 9, u64::from(i % 9) * 300);
            own.observe(&StepSample { ms: 4.0 * sample.ms, ..sample });
            own.check_integrity();
        }
        let ratio = own.prefill_ms(512, 0) / role.prefill_ms(512, 0);
        assert!((3.5..4.5).contains(&ratio), "four times as slow: {ratio}");
    }

    #[test]
    fn speculation_is_as_good_as_it_was_at_as_many_sequences() {
        let mut cost = StepCost::default();
        for i in 0..2000u32 {
            // One or three sequences with three guesses each, two of them right; ten without.
            let (sequences, guesses) = [(1, 3), (3, 3), (10, 0)][i as usize % 3];
            let rows = sequences * (1 + guesses);
            let drafting_ms = guesses as f32 / 2.0;
            cost.observe(&StepSample {
                sequences,
                drawn: sequences + sequences * guesses / 3 * 2,
                drafting_ms,
                ..machine(0, 0, rows, 500)
            });
            cost.check_integrity();
        }
        let plain = |rows| f64::from(machine(0, 0, rows, 500).ms);
        for (sequences, expected) in [(1, (plain(4) + 1.5) / 3.0), (3, (plain(12) + 1.5) / 3.0), (10, plain(10)), (40, plain(40))] {
            // The context of the drafted rows counts, too.
            let found = cost.token_ms(sequences, 500 / if sequences < 4 { 4 } else { 1 });
            assert!((found / expected - 1.0).abs() < 0.1, "{sequences}: {found} for {expected}");
        }
        assert_eq!(StepCost::like(&cost).speculation, cost.speculation);
    }

    proptest! {
        #[test]
        fn predictions_stay_finite_whatever_is_reported(samples in prop::collection::vec((any::<(u32, u64)>(), any::<(u32, u64)>(), any::<(u32, u32)>(), any::<(f32, f32)>()), 0..100)) {
            let mut cost = StepCost::default();
            for ((prefill_tokens, prefill_context), (decode_rows, decode_context), (sequences, drawn), (ms, drafting_ms)) in samples {
                cost.observe(&StepSample { prefill_tokens, prefill_context, decode_rows, decode_context, sequences, drawn, ms, drafting_ms });
                cost.check_integrity();
            }
            for ms in [cost.prefill_ms(1000, 1000), cost.step_ms(10, 1000), cost.token_ms(10, 1000)] {
                prop_assert!(ms.is_finite() && ms >= 0.0, "{ms}");
            }
        }
    }
}
