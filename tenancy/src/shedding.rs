//! Load shedding: how many tiers are turned away. A pure machine, fed with measurements.
//!
//! It takes the next step only after the load has exceeded a limit for a while since the last step, and steps back only after the load has
//! stayed well below: in between it keeps its step, so that it does not flap.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watermarks {
    /// The share of the decode workers' KV blocks in use.
    pub kv_used: f64,
    /// The 95th percentile of TTFT.
    pub ttft_p95: Duration,
}

/// The current load; `None` where there is no measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub kv_used: Option<f64>,
    pub ttft_p95: Option<Duration>,
}

/// The step of shedding: tiers are turned away whose `shed` is at most this, and not 0.
pub type Step = u8;

/// The number of steps in which tiers are shed.
pub const STEPS: Step = 2;
/// The time over a limit before the next step.
const UP_AFTER: Duration = Duration::from_secs(2);
/// The time below all limits before a step back.
const DOWN_AFTER: Duration = Duration::from_secs(5);
/// The part of a limit below which the load counts as below.
const BELOW: f64 = 0.85;

#[derive(Debug)]
pub struct Shedding {
    watermarks: Watermarks,
    step: Step,
    over_since: Option<Duration>,
    below_since: Option<Duration>,
}

impl Shedding {
    pub fn new(watermarks: Watermarks) -> Self {
        Self { watermarks, step: 0, over_since: None, below_since: None }
    }

    /// Takes a measurement at `now`. Returns the step.
    pub fn observe(&mut self, now: Duration, load: Load) -> Step {
        let part = [
            load.kv_used.map(|used| used / self.watermarks.kv_used),
            load.ttft_p95.map(|ttft| ttft.as_secs_f64() / self.watermarks.ttft_p95.as_secs_f64()),
        ];
        let part = part.into_iter().flatten().fold(0.0, f64::max);
        let since = |holds: bool, since: Option<Duration>| holds.then(|| since.unwrap_or(now));
        self.over_since = since(part >= 1.0, self.over_since);
        self.below_since = since(part < BELOW, self.below_since);
        let lasted = |since: Option<Duration>, least: Duration| since.is_some_and(|since| now.saturating_sub(since) >= least);
        if lasted(self.over_since, UP_AFTER) && self.step < STEPS {
            self.step += 1;
            self.over_since = Some(now);
        } else if lasted(self.below_since, DOWN_AFTER) && self.step > 0 {
            self.step -= 1;
            self.below_since = Some(now);
        }
        self.step
    }

    /// The least time until a tier is admitted again.
    pub fn wait(step: Step, shed: u8) -> Duration {
        DOWN_AFTER * u32::from(step.saturating_sub(shed) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observe(shedding: &mut Shedding, at: u64, kv_used: f64) -> Step {
        shedding.observe(Duration::from_secs(at), Load { kv_used: Some(kv_used), ttft_p95: None })
    }

    fn shedding() -> Shedding {
        Shedding::new(Watermarks { kv_used: 0.9, ttft_p95: Duration::from_millis(800) })
    }

    #[test]
    fn it_goes_up_and_down_by_steps_and_not_at_once() {
        let mut shedding = shedding();
        let steps: Vec<_> = (0..8).map(|at| observe(&mut shedding, at, 0.95)).collect();
        assert_eq!(steps, [0, 0, 1, 1, 2, 2, 2, 2]);
        let steps: Vec<_> = (8..20).map(|at| observe(&mut shedding, at, 0.5)).collect();
        assert_eq!(steps, [2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0]);
    }

    #[test]
    fn between_the_marks_it_stays() {
        let mut shedding = shedding();
        assert_eq!((0..3).map(|at| observe(&mut shedding, at, 0.95)).last(), Some(1));
        assert!((3..100).all(|at| observe(&mut shedding, at, 0.8) == 1));
        // A load that oscillates around the limit does not exceed it for long.
        assert!((100..200).all(|at| observe(&mut shedding, at, if at % 2 == 0 { 0.91 } else { 0.89 }) == 1));
    }

    #[test]
    fn either_measure_is_enough_and_none_is_calm() {
        let mut shedding = shedding();
        let slow = Load { kv_used: Some(0.1), ttft_p95: Some(Duration::from_millis(801)) };
        assert_eq!([0, 1, 2].map(|at| shedding.observe(Duration::from_secs(at), slow)), [0, 0, 1]);
        let steps: Vec<_> = (3..10).map(|at| shedding.observe(Duration::from_secs(at), Load::default())).collect();
        assert_eq!(steps.last(), Some(&0));
    }
}
