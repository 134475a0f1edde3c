//! The number of workers that a load needs to keep the classes' limits. Pure functions, monotonic in the load.

use crate::cost::StepCost;

/// The highest utilisation of prefill workers.
const BUSY_MAX: f64 = 0.85;
/// The longest mean wait for a prefill worker, as a share of the tightest TTFT limit. Waits are about exponential, so 99 of 100 are below
/// 4.6 times their mean.
const WAIT_SHARE: f64 = 0.2;
/// The time in which a queue is to be worked off, in addition to new prompts.
const WORK_OFF_MS: f64 = 30_000.0;
/// The longest decode step, as a share of the tightest TPOT limit.
const STEP_SHARE: f64 = 0.8;
/// The longest decode step where a sequence alone exceeds that share, so that no number of workers helps: this multiple of its time alone.
const CROWDED: f64 = 1.5;
/// The largest share of decode workers' time for prompts.
const PROMPTS_MAX: f64 = 0.7;
/// The largest share of decode workers' device blocks in use.
const USED_MAX: f64 = 0.8;
/// The largest share of the sequences that decode workers take.
const ROWS_SHARE: f64 = 0.9;
/// The weight of a new job in the moments of jobs' times. A single long prompt should not double the second one.
const JOB_WEIGHT: f64 = 0.005;

/// The first and second moment of prefill jobs' predicted times.
#[derive(Clone, Copy, Debug, Default)]
pub struct Jobs {
    mean_ms: f64,
    mean_square: f64,
    count: u64,
}

impl Jobs {
    pub fn observe(&mut self, ms: f64) {
        if !(ms.is_finite() && ms > 0.0) {
            return;
        }
        self.count += 1;
        // The first ones count alike.
        let weight = JOB_WEIGHT.max(1.0 / self.count as f64);
        self.mean_ms += weight * (ms - self.mean_ms);
        self.mean_square += weight * (ms * ms - self.mean_square);
    }

    /// The predicted queueing time of a job at this many workers, whose total utilisation is `busy`. The approximation for M/G/n of
    /// Sakasegawa (1977), "An approximation formula L_q = αρ^β/(1−ρ)": exact for one worker.
    fn wait_ms(&self, busy: f64, workers: u32) -> f64 {
        let (n, utilisation) = (f64::from(workers), busy / f64::from(workers));
        if self.mean_ms == 0.0 || busy <= 0.0 {
            return 0.0;
        }
        if utilisation >= 1.0 {
            return f64::INFINITY;
        }
        let residual_ms = self.mean_square / (2.0 * self.mean_ms);
        residual_ms * utilisation.powf((2.0 * (n + 1.0)).sqrt() - 1.0) / (n * (1.0 - utilisation))
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillLoad {
    /// The workers' time that prompts take per unit of time, wherever they are computed: the number of workers that would be busy all the
    /// time.
    pub busy: f64,
    /// The predicted time of the prompts behind those that are being computed.
    pub queued_ms: f64,
}

/// The fewest prefill workers that keep prompts' waits within the limits; at most `ceiling`.
pub fn prefill_needed(load: PrefillLoad, jobs: &Jobs, ttft_ms: f64, ceiling: u32) -> u32 {
    let busy = load.busy + load.queued_ms / WORK_OFF_MS;
    if busy < IDLE {
        return 0;
    }
    let suffices = |workers: &u32| busy <= BUSY_MAX * f64::from(*workers) && jobs.wait_ms(busy, *workers) <= WAIT_SHARE * ttft_ms;
    (1..ceiling).find(suffices).unwrap_or(ceiling)
}

/// The load below which nothing is needed, since it is only the remainder of a moving average.
const IDLE: f64 = 0.001;

/// The load of all decode workers together.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeLoad {
    /// The number of sequences that decode.
    pub rows: f64,
    /// The sum of these sequences' lengths.
    pub context: f64,
    /// The number of device blocks in use.
    pub used: f64,
    /// The workers' time that prompts take per unit of time.
    pub prompts: f64,
    /// The number of sequences without a place, or kept waiting by their worker.
    pub unserved: f64,
    /// The number of workers that carry this load now.
    pub workers: u32,
}

#[derive(Clone, Copy, Debug)]
pub struct DecodeLimits {
    pub tpot_ms: f64,
    /// The number of device blocks of one worker.
    pub blocks: f64,
    /// The number of sequences that one worker takes.
    pub work_max: f64,
}

/// The fewest decode workers that have room and keep the pace; at least one, at most `ceiling`.
pub fn decode_needed(load: DecodeLoad, limits: DecodeLimits, cost: &StepCost, ceiling: u32) -> u32 {
    let rows = load.rows + load.unserved;
    // Sequences without a place are taken to be as long as the others.
    let context = if load.rows > 0.0 { load.context * rows / load.rows } else { load.context };
    let alone_ms = cost.token_ms(1, (context / rows.max(1.0)) as u64);
    let pace_ms = (STEP_SHARE * limits.tpot_ms).max(CROWDED * alone_ms);
    let keeps_pace = |n: f64| {
        let prompts = load.prompts / n;
        prompts <= PROMPTS_MAX && token_ms(cost, rows / n, context / n) <= pace_ms * (1.0 - prompts)
    };
    let has_room = |n: f64| {
        (limits.blocks <= 0.0 || load.used <= USED_MAX * n * limits.blocks)
            && (limits.work_max <= 0.0 || rows <= ROWS_SHARE * n * limits.work_max)
    };
    // The limiting resource of a worker is not always known: where sequences wait, it holds as many as it can. Less than one on average has
    // waited for a moment.
    let waiting = f64::from(load.workers) * rows / load.rows.max(1.0);
    let fewest = if load.unserved >= 1.0 { (waiting.ceil() as u32).clamp(1, ceiling.max(1)) } else { 1 };
    (fewest..ceiling).find(|&workers| keeps_pace(workers.into()) && has_room(workers.into())).unwrap_or(ceiling)
}

/// The time per token over a mean number of sequences.
fn token_ms(cost: &StepCost, rows: f64, context: f64) -> f64 {
    cost.token_ms(rows.ceil() as u64, context as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidemill_proto::message::StepSample;

    fn jobs(ms: &[f64]) -> Jobs {
        let mut jobs = Jobs::default();
        ms.iter().for_each(|ms| jobs.observe(*ms));
        jobs
    }

    /// The cost of steps of 10 ms, and 1 ms for each row.
    fn cost() -> StepCost {
        let mut cost = StepCost::default();
        for step in 0..2000 {
            let rows = 1 + step % 64;
            cost.observe(&StepSample { decode_rows: rows, sequences: rows, drawn: rows, ms: 10.0 + rows as f32, ..StepSample::default() });
        }
        cost
    }

    const LIMITS: DecodeLimits = DecodeLimits { tpot_ms: 50.0, blocks: 1000.0, work_max: 200.0 };

    #[test]
    fn one_worker_waits_as_long_as_pollaczek_and_khinchine_say() {
        // Equal jobs wait half as long as exponential ones.
        let wait_ms = jobs(&[100.0]).wait_ms(0.8, 1);
        assert!((wait_ms - 200.0).abs() < 1e-9, "{wait_ms}");
        assert!(jobs(&[100.0]).wait_ms(1.0, 1).is_infinite());
        assert!(jobs(&[100.0]).wait_ms(1.6, 2) < 200.0, "two of them together wait less");
    }

    #[test]
    fn prefill_workers_by_load_by_wait_and_by_queue() {
        let needed = |busy, queued_ms, ttft_ms| prefill_needed(PrefillLoad { busy, queued_ms }, &jobs(&[1000.0]), ttft_ms, 32);
        assert_eq!(needed(0.0, 0.0, 1000.0), 0);
        assert_eq!(needed(0.1, 0.0, 1000.0), 1);
        assert_eq!(needed(8.0, 0.0, 1e6), 10, "0.85 of ten");
        assert!(needed(8.0, 0.0, 500.0) > 10, "a tight limit leaves less of them busy");
        assert_eq!(needed(8.0, 60_000.0, 1e6), 12, "a minute of work is to be worked off in half of one");
        assert_eq!(needed(1e9, 0.0, 1e6), 32);
    }

    #[test]
    fn decode_workers_by_pace_by_room_and_by_who_waits() {
        let needed = |load| decode_needed(load, LIMITS, &cost(), 32);
        assert_eq!(needed(DecodeLoad::default()), 1);
        // A step of 40 ms has 30 rows.
        assert!((5..=6).contains(&needed(DecodeLoad { rows: 150.0, ..DecodeLoad::default() })));
        assert_eq!(needed(DecodeLoad { rows: 10.0, used: 2400.0, ..DecodeLoad::default() }), 3, "0.8 of three");
        let waiting = DecodeLoad { rows: 16.0, unserved: 16.0, workers: 2, ..DecodeLoad::default() };
        assert_eq!(needed(waiting), 4, "two that are full and as many again that wait");
        let moment = DecodeLoad { rows: 1.0, unserved: 0.9, workers: 4, ..DecodeLoad::default() };
        assert_eq!(needed(moment), 1, "what waits for a moment needs no other worker");
        assert!(needed(DecodeLoad { rows: 60.0, prompts: 1.0, ..DecodeLoad::default() }) > 2, "prompts take time");
        let hopeless = DecodeLimits { tpot_ms: 1.0, ..LIMITS };
        let one = DecodeLoad { rows: 2.0, ..DecodeLoad::default() };
        assert_eq!(decode_needed(one, hopeless, &cost(), 32), 1, "what no number keeps needs no number");
    }

    proptest! {
        #[test]
        fn more_load_never_needs_fewer(
            busy in 0.0..40.0_f64, queued in 0.0..1e6_f64, rows in 0.0..2000.0_f64, used in 0.0..1e5_f64, prompts in 0.0..20.0_f64,
            unserved in 0.0..50.0_f64, more in 1.0..2.0_f64, times in prop::collection::vec(1.0..5000.0_f64, 1..20),
        ) {
            let (jobs, cost) = (jobs(&times), cost());
            let prefill = |by: f64| prefill_needed(PrefillLoad { busy: by * busy, queued_ms: by * queued }, &jobs, 2000.0, 64);
            prop_assert!(prefill(more) >= prefill(1.0));
            let decode = |rows, used, prompts, unserved| {
                let load = DecodeLoad { rows, context: 100.0 * rows, used, prompts, unserved, workers: 4 };
                decode_needed(load, LIMITS, &cost, 64)
            };
            let now = decode(rows, used, prompts, unserved);
            prop_assert!(decode(rows, more * used, prompts, unserved) >= now);
            prop_assert!(decode(rows, used, more * prompts, unserved) >= now);
            prop_assert!(decode(rows, used, prompts, unserved + more) >= now);
            prop_assert!(decode(more * rows, used, prompts, 0.0) >= decode(rows, used, prompts, 0.0));
        }
    }
}
