//! How long things take: a linear model of one engine step, learnt from the steps that workers report.
//!
//! A step's time is close to linear in four sums (weights are read once, each token costs its matrix products, each pair
//! of positions costs attention): `ms = c · (1, prompt tokens, prompt context, decode rows, decode context)`. Mooncake's
//! Conductor and vLLM's profiler fit the same shape offline; here recursive least squares with forgetting does it online.
//! Uncertainty never grows beyond the prior: long runs of similar steps say little about some terms, whose variance would
//! otherwise grow without bound.

use tidemill_proto::message::{Moved, StepSample, Transfer};

const TERMS: usize = 5;
/// Brings the terms of a typical step near 1, so that one prior variance fits all coefficients.
const SCALE: [f64; TERMS] = [1.0, 1e-3, 1e-6, 1e-1, 1e-4];
/// Prior cost of each scaled term in ms: a mid-size model on a few CPU cores.
const START: [f64; TERMS] = [5.0, 1000.0, 50.0, 5.0, 5.0];
/// Variance of the start values, in units of their squares.
const START_VARIANCE: f64 = 1.0;
/// Weight of a sample after the next one. About the last 200 steps count.
const FORGET: f64 = 0.995;
/// One outlier (a page fault, a paused process) counts as an error of no more than this share of the prediction.
const SURPRISE_MAX: f64 = 0.5;
/// Share of a new rate that enters the moving average of transfer rates.
const RATE_WEIGHT: f64 = 0.2;

/// Time of one engine's steps. One model per role: prefill and decode workers may be different machines.
#[derive(Clone, Debug)]
pub struct StepCost {
    coefficients: [f64; TERMS],
    /// Inverse of their covariance. Never less than at the start.
    information: [[f64; TERMS]; TERMS],
}

impl Default for StepCost {
    fn default() -> Self {
        let information = std::array::from_fn(|i| std::array::from_fn(|j| if i == j { start_information(i) } else { 0.0 }));
        Self { coefficients: START, information }
    }
}

impl StepCost {
    /// Learns from one measured step. Impossible durations are ignored.
    pub fn observe(&mut self, sample: &StepSample) {
        let ms = f64::from(sample.ms);
        if !(ms.is_finite() && ms >= 0.0) {
            return;
        }
        let terms = scaled(
            f64::from(sample.prefill_tokens),
            sample.prefill_context as f64,
            f64::from(sample.decode_rows),
            sample.decode_context as f64,
        );
        let predicted = self.predict(&terms);
        let surprise_max = (SURPRISE_MAX * predicted).max(0.1);
        let error = (ms - dot(&self.coefficients, &terms)).clamp(-surprise_max, surprise_max);

        // Measurement noise grows with the step: relative errors count, or long prefills would drown short steps.
        let noise = (0.1 * predicted).max(0.1).powi(2);
        let mut information = self.information;
        for (i, row) in information.iter_mut().enumerate() {
            for (j, cell) in row.iter_mut().enumerate() {
                *cell = FORGET * *cell + terms[i] * terms[j] / noise;
            }
            row[i] += (1.0 - FORGET) * start_information(i);
        }
        // A sample so large that rounding loses the others is no step of an engine.
        let Some(gain) = solve(&information, &terms) else { return };
        self.information = information;
        self.coefficients.iter_mut().zip(gain).for_each(|(coefficient, gain)| *coefficient += gain * error / noise);
    }

    /// Milliseconds to compute `new` prompt tokens after `cached` ones, alone.
    pub fn prefill_ms(&self, new: u64, cached: u64) -> f64 {
        let (new, cached) = (new as f64, cached as f64);
        self.predict(&scaled(new, new * cached + new * new / 2.0, 0.0, 0.0))
    }

    /// Milliseconds of a decode step over `rows` sequences whose lengths add up to `context`.
    pub fn step_ms(&self, rows: u64, context: u64) -> f64 {
        self.predict(&scaled(0.0, 0.0, rows as f64, context as f64))
    }

    /// Negative coefficients come from noise, and count as zero.
    fn predict(&self, terms: &[f64; TERMS]) -> f64 {
        self.coefficients.iter().zip(terms).map(|(c, t)| c.max(0.0) * t).sum()
    }

    /// Panics if it has learnt something that is no number, or knows less than at the start. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert!(self.coefficients.iter().all(|c| c.is_finite()), "{:?}", self.coefficients);
        for (i, row) in self.information.iter().enumerate() {
            assert!(row.iter().all(|cell| cell.is_finite()), "{row:?}");
            assert!(row[i] >= start_information(i) * (1.0 - 1e-9), "term {i} is less certain than its prior");
        }
    }
}

/// How long everything takes that the scheduler plans.
#[derive(Clone, Debug)]
pub struct CostModel {
    pub prefill: StepCost,
    pub decode: StepCost,
    /// Moving a block from or to a pool node on the same host,
    pub near_bytes_per_ms: f64,
    /// and over the network.
    pub far_bytes_per_ms: f64,
    /// Cost of a hand-over besides its bytes: two control messages and a pool round trip at each end.
    pub handover_ms: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { prefill: StepCost::default(), decode: StepCost::default(), near_bytes_per_ms: 1e6, far_bytes_per_ms: 5e5, handover_ms: 4.0 }
    }
}

impl CostModel {
    /// Milliseconds to fetch these blocks. One reader fetches both kinds at the same time.
    pub fn transfer_ms(&self, near_blocks: u64, far_blocks: u64, block_bytes: u64) -> f64 {
        let bytes = |blocks: u64| blocks as f64 * block_bytes as f64;
        bytes(near_blocks) / self.near_bytes_per_ms + bytes(far_blocks) / self.far_bytes_per_ms
    }

    /// Learns the transfer rates from two successive reports of one worker.
    pub fn observe_transfer(&mut self, before: &Transfer, after: &Transfer) {
        for (rate, near) in [(&mut self.near_bytes_per_ms, true), (&mut self.far_bytes_per_ms, false)] {
            let lanes = before.lanes().zip(after.lanes()).filter(|((transport, ..), _)| transport.same_host() == near);
            learn(rate, &lanes.map(|((.., before), (.., after))| (before, after)).collect::<Vec<_>>());
        }
    }

    /// Panics if a prediction would be no duration. Tests call it after every step.
    pub fn check_integrity(&self) {
        self.prefill.check_integrity();
        self.decode.check_integrity();
        assert!([self.near_bytes_per_ms, self.far_bytes_per_ms].iter().all(|rate| rate.is_finite() && *rate > 0.0), "{self:?}");
    }
}

fn learn(bytes_per_ms: &mut f64, lanes: &[(&Moved, &Moved)]) {
    let bytes: f64 = lanes.iter().map(|(before, after)| after.bytes.saturating_sub(before.bytes) as f64).sum();
    let ms: f64 = lanes.iter().map(|(before, after)| (after.seconds - before.seconds) * 1e3).sum();
    // Less than a megabyte or a tenth of a millisecond says more about the clock than about the link.
    if bytes >= 1e6 && ms > 0.1 && ms.is_finite() {
        *bytes_per_ms += RATE_WEIGHT * (bytes / ms - *bytes_per_ms);
    }
}

fn start_information(term: usize) -> f64 {
    1.0 / (START[term] * START[term] * START_VARIANCE)
}

/// Solves `matrix x = right` for a symmetric positive definite matrix, by Cholesky's method. `None`: rounding made it indefinite.
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
    use tidemill_proto::pool::{Direction, Transport};

    /// A machine whose steps cost exactly this.
    fn machine(prefill_tokens: u32, cached: u64, decode_rows: u32, decode_context: u64) -> StepSample {
        let new = u64::from(prefill_tokens);
        let prefill_context = new * cached + new * new / 2;
        let ms = 2.0
            + 0.05 * f64::from(prefill_tokens)
            + 1e-5 * prefill_context as f64
            + 0.2 * f64::from(decode_rows)
            + 1e-4 * decode_context as f64;
        StepSample { prefill_tokens, prefill_context, decode_rows, decode_context, ms: ms as f32 }
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
    fn near_and_far_rates_are_learnt_apart() {
        let moved = |bytes, seconds| Moved { bytes, transfers: 1, seconds, ..Moved::default() };
        let mut cost = CostModel::default();
        for _ in 0..50 {
            let mut after = Transfer::default();
            after[(Transport::Shm, Direction::Get)] = moved(4 << 20, 1e-3);
            after[(Transport::Quic, Direction::Put)] = moved(4 << 20, 8e-3);
            cost.observe_transfer(&Transfer::default(), &after);
        }
        let ratio = cost.transfer_ms(0, 10, 1 << 20) / cost.transfer_ms(10, 0, 1 << 20);
        assert!((7.5..8.5).contains(&ratio), "{ratio}");
    }

    proptest! {
        #[test]
        fn predictions_stay_finite_whatever_is_reported(samples in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u32>(), any::<u64>(), any::<f32>()), 0..100)) {
            let mut cost = StepCost::default();
            for (prefill_tokens, prefill_context, decode_rows, decode_context, ms) in samples {
                cost.observe(&StepSample { prefill_tokens, prefill_context, decode_rows, decode_context, ms });
                cost.check_integrity();
            }
            for ms in [cost.prefill_ms(1000, 1000), cost.step_ms(10, 1000)] {
                prop_assert!(ms.is_finite() && ms >= 0.0, "{ms}");
            }
        }
    }
}
