//! The cost of the coordinator's decisions in real time and memory. The simulation does not depend on it.

use super::memory;
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::{collections::BTreeMap, time::Duration};
use tidemill_sim::world::{Call, Watch};

/// Times every call of the coordinator.
#[derive(Debug, Default)]
pub struct Timing {
    begun: Option<(Duration, u64)>,
    calls: BTreeMap<Call, Vec<Duration>>,
    submit_bytes: Vec<u64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct DecisionCost {
    pub decisions: usize,
    /// The time of accepting a request and deciding its route.
    pub submit_us_p50: f64,
    pub submit_us_p99: f64,
    pub submit_us_mean: f64,
    /// The mean CPU time in which the scheduler handles a worker's event, including decisions that the event makes possible.
    pub event_us_mean: f64,
    pub tick_us_mean: f64,
    /// The bytes that a decision allocates, most of them for its duration.
    pub submit_bytes_p50: u64,
    /// The coordinator's whole time, divided by the requests.
    pub request_us: f64,
}

/// The CPU time of this thread so far: other processes on the machine do not count.
pub fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

impl Watch for Timing {
    fn begins(&mut self, _: Call) {
        self.begun = Some((cpu_time(), memory::allocated()));
    }

    fn ended(&mut self, call: Call) {
        let Some((begun, bytes)) = self.begun.take() else { return };
        let took = cpu_time() - begun;
        if call == Call::Submit {
            self.submit_bytes.push(memory::allocated() - bytes);
        }
        self.calls.entry(call).or_default().push(took);
    }
}

impl Timing {
    pub fn cost(mut self) -> DecisionCost {
        let mut of = |call: Call| {
            let mut times: Vec<f64> = self.calls.remove(&call).unwrap_or_default().iter().map(|took| took.as_secs_f64() * 1e6).collect();
            times.sort_by(f64::total_cmp);
            times
        };
        let (submit, events, ticks) = (of(Call::Submit), of(Call::WorkerEvent), of(Call::Tick));
        let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len().max(1) as f64;
        let at = |times: &[f64], share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or_default();
        self.submit_bytes.sort_unstable();
        let all: f64 = [&submit, &events, &ticks].iter().map(|times| times.iter().sum::<f64>()).sum();
        DecisionCost {
            decisions: submit.len(),
            submit_us_p50: at(&submit, 0.5),
            submit_us_p99: at(&submit, 0.99),
            submit_us_mean: mean(&submit),
            event_us_mean: mean(&events),
            tick_us_mean: mean(&ticks),
            submit_bytes_p50: self.submit_bytes.get(self.submit_bytes.len() / 2).copied().unwrap_or_default(),
            request_us: all / submit.len().max(1) as f64,
        }
    }
}
