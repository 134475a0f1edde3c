//! The cost model: `step`, the time of an engine's steps, learnt per worker; `speculation`, the rows and tokens of steps; transfer rates; and
//! [`error`], how wrong predictions are.
//!
//! A worker's model starts as that of its role, which learns from all workers of the role, and continues with its own steps. So within a
//! second of work, the model tells an H100 from an L40S beside it.

pub mod error;
mod speculation;
mod step;

pub use error::Errors;
pub use step::{StepCoefficients, StepCost};

use crate::class::{CLASSES_MAX, ClassId};
use std::collections::HashMap;
use tidemill_proto::{
    ids::Epoch,
    message::{Moved, Role, StepSample, Transfer},
};

/// Share of a new rate that enters the moving average of transfer rates.
const RATE_WEIGHT: f64 = 0.2;
/// The assumed length of an answer before the first one has ended, and the share of a new one that enters the moving average.
const OUTPUT_TOKENS: f64 = 128.0;
const OUTPUT_WEIGHT: f64 = 0.01;

/// A model of the times that the scheduler needs.
#[derive(Clone, Debug)]
pub struct CostModel {
    /// The step costs of a role's workers taken together: the starting point for a new worker.
    prefill: StepCost,
    decode: StepCost,
    workers: HashMap<Epoch, WorkerCost>,
    /// Errors of predicted times to first token, by class, since they are smaller for requests that go first than for those that are
    /// overtaken.
    ttft: [Errors; CLASSES_MAX],
    /// Errors of predicted mean times per further token.
    pub tpot: Errors,
    /// The mean length of an answer.
    output_tokens: f64,
    /// The rate of moving a block from or to a pool node on the same host.
    pub near_bytes_per_ms: f64,
    /// The rate of moving a block over the network.
    pub far_bytes_per_ms: f64,
    /// The cost of a hand-over besides its bytes: two control messages, and a pool round trip at each end.
    pub handover_ms: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            prefill: StepCost::default(),
            decode: StepCost::default(),
            workers: HashMap::new(),
            ttft: Default::default(),
            tpot: Errors::default(),
            output_tokens: OUTPUT_TOKENS,
            near_bytes_per_ms: 1e6,
            far_bytes_per_ms: 5e5,
            handover_ms: 4.0,
        }
    }
}

/// The costs and errors of one worker.
#[derive(Clone, Debug)]
struct WorkerCost {
    steps: StepCost,
    errors: Errors,
}

impl CostModel {
    /// The step costs of a worker, or those of its role before its own first step.
    pub fn steps(&self, worker: Epoch, role: Role) -> &StepCost {
        self.workers.get(&worker).map_or_else(|| self.of_role(role), |cost| &cost.steps)
    }

    pub fn of_role(&self, role: Role) -> &StepCost {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode | Role::Kvpool => &self.decode,
        }
    }

    /// The errors of the predictions of a worker's steps.
    pub fn step_errors(&self, worker: Epoch) -> Option<&Errors> {
        self.workers.get(&worker).map(|cost| &cost.errors)
    }

    /// Learns from a worker's measured steps, for that worker and for those that will join its role.
    pub fn observe_steps(&mut self, worker: Epoch, role: Role, steps: &[StepSample]) {
        let together = match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Kvpool => return,
        };
        let new = || WorkerCost { steps: StepCost::like(together), errors: Errors::default() };
        let own = if steps.is_empty() { return } else { self.workers.entry(worker).or_insert_with(new) };
        for step in steps {
            own.errors.observe(own.steps.predict_step(step), f64::from(step.ms));
            own.steps.observe(step);
            together.observe(step);
        }
    }

    /// The errors of predicted times to first token.
    pub fn ttft(&self, class: ClassId) -> &Errors {
        self.ttft.get(usize::from(class.0)).unwrap_or(&self.ttft[0])
    }

    pub fn observe_ttft(&mut self, class: ClassId, predicted_ms: f64, actual_ms: f64) {
        if let Some(errors) = self.ttft.get_mut(usize::from(class.0)) {
            errors.observe(predicted_ms, actual_ms);
        }
    }

    /// Learns from the length of an answer that ended by itself.
    pub fn observe_output(&mut self, tokens: u32) {
        self.output_tokens += OUTPUT_WEIGHT * (f64::from(tokens) - self.output_tokens);
    }

    /// The mean length of an answer; at least 1.
    pub fn output_tokens(&self) -> f64 {
        self.output_tokens.max(1.0)
    }

    /// Workers that have reported steps.
    pub fn workers(&self) -> impl Iterator<Item = Epoch> {
        self.workers.keys().copied()
    }

    pub fn forget(&mut self, worker: Epoch) {
        self.workers.remove(&worker);
    }

    /// Milliseconds to fetch these blocks. One reader fetches near and far blocks concurrently.
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

    /// Panics if a prediction would not be a duration. Tests call it after every step.
    pub fn check_integrity(&self) {
        self.prefill.check_integrity();
        self.decode.check_integrity();
        self.workers.values().for_each(|worker| worker.steps.check_integrity());
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

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::pool::{Direction, Transport};

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

    #[test]
    fn each_worker_is_known_for_what_it_is() {
        let (fast, slow, new) = (Epoch(1), Epoch(2), Epoch(3));
        let mut cost = CostModel::default();
        let step = |rows: u32, ms| StepSample {
            decode_rows: rows,
            decode_context: 100,
            sequences: rows,
            drawn: rows,
            ms,
            ..StepSample::default()
        };
        for i in 0..200 {
            let rows = 1 + i % 8;
            cost.observe_steps(fast, Role::Decode, &[step(rows, 1.0 + rows as f32)]);
            cost.observe_steps(slow, Role::Decode, &[step(rows, 3.0 + 3.0 * rows as f32)]);
        }
        cost.check_integrity();
        let ms = |worker| cost.steps(worker, Role::Decode).step_ms(4, 100);
        assert!((4.5..5.5).contains(&ms(fast)) && (13.5..16.5).contains(&ms(slow)), "{} {}", ms(fast), ms(slow));
        assert!((ms(fast)..ms(slow)).contains(&ms(new)), "who has said nothing is like the others: {}", ms(new));
        let share = cost.step_errors(fast).unwrap().quantile(0.5).unwrap();
        assert!(share < 0.1 && cost.step_errors(new).is_none(), "{share}");
        cost.forget(fast);
        assert!(cost.step_errors(fast).is_none());
    }
}
