//! The cost of the client itself, so that its limits are not taken for the server's: its CPU time, and the delay of its timers, which is
//! about the delay with which it sees a token.

use super::percentiles::{Latencies, Percentiles};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// CPU seconds per second.
    pub cores: f64,
    /// The number of threads that it may use.
    pub threads: u32,
    /// The delay of its timers, whose grain is a millisecond.
    pub delay_ms: Option<Percentiles>,
    /// The reason why its figures should not be trusted, if there is one.
    pub bottleneck: Option<String>,
}

/// A meter that measures while it lives.
pub struct Meter {
    started: Instant,
    cpu: Duration,
    ticks: JoinHandle<()>,
    delays: std::sync::Arc<std::sync::Mutex<Latencies>>,
}

const TICK: Duration = Duration::from_millis(5);
/// The share of its threads' time beyond which requests queue for the client.
const BUSY: f64 = 0.85;
/// The delays below which the timers' grain dominates.
const GRAIN_MS: f64 = 3.0;
/// The share of a latency that the client may add to it.
const ADDED: f64 = 0.05;

impl Meter {
    /// Starts a meter on the runtime that sends the requests.
    pub fn start() -> Meter {
        let delays = std::sync::Arc::<std::sync::Mutex<Latencies>>::default();
        let recorded = delays.clone();
        let ticks = tokio::spawn(async move {
            loop {
                let due = Instant::now() + TICK;
                sleep(TICK).await;
                recorded.lock().expect("nobody panics with the lock").record(due.elapsed());
            }
        });
        Meter { started: Instant::now(), cpu: cpu_time(), ticks, delays }
    }

    /// Evaluates the measurement. `send_lag`, `ttft` and `tpot` are those of the requests.
    pub fn finish(&self, threads: u32, send_lag: Option<&Percentiles>, ttft: Option<&Percentiles>, tpot: Option<&Percentiles>) -> Overhead {
        let cores = (cpu_time() - self.cpu).as_secs_f64() / self.started.elapsed().as_secs_f64().max(1e-9);
        let delay_ms = self.delays.lock().expect("nobody panics with the lock").percentiles();
        let adds = |delay: f64, to: Option<&Percentiles>| to.is_some_and(|to| delay > GRAIN_MS && delay > ADDED * to.p50);
        let delay = delay_ms.as_ref().map_or(0.0, |delay| delay.p99);
        let lag = send_lag.map_or(0.0, |lag| lag.p99);
        let bottleneck = if cores > BUSY * f64::from(threads) {
            Some(format!("it used {cores:.2} cores of {threads}: give it more --threads, or send less"))
        } else if adds(lag, ttft) {
            Some(format!("1 % of the requests were sent {lag:.1} ms late or more: too much for these TTFTs"))
        } else if adds(delay, tpot) {
            Some(format!("1 % of its timers fired {delay:.1} ms late or more: too much for these TPOTs; the machine is busy"))
        } else {
            None
        };
        Overhead { cores, threads, delay_ms, bottleneck }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.ticks.abort();
    }
}

/// The CPU time of this process.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
