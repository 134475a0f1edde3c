//! Processes: their states and their clocks.

use super::{CoordinatorIndex, Event, PoolIndex, StageIndex, WorkerIndex};
use std::{collections::VecDeque, fmt, time::Duration};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Process {
    Coordinator(CoordinatorIndex),
    Worker(WorkerIndex),
    Pool(PoolIndex),
    /// A later stage of a worker.
    Stage(StageIndex),
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Process::Coordinator(index) => write!(f, "coordinator-{}", index.0),
            Process::Worker(index) => write!(f, "worker-{}", index.0),
            Process::Pool(index) => write!(f, "pool-{}", index.0),
            Process::Stage(index) => write!(f, "stage-{}", index.0),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Running,
    /// The process is stopped, as by SIGSTOP, and its events wait.
    Paused,
    Down,
}

/// The state of a process. Each restart is a new incarnation under the same name.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) incarnation: u32,
    pub(crate) state: State,
    pub(crate) clock: Clock,
    /// Events that arrived while the process was paused.
    pub(crate) deferred: VecDeque<Event>,
}

/// A monotonic clock that may be too fast, too slow, and jump forward.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    since: Duration,
    read: Duration,
    /// The rate error, in parts per million; positive if the clock is too fast.
    ppm: i32,
}

impl Default for Life {
    fn default() -> Self {
        Self { incarnation: 0, state: State::Running, clock: Clock::default(), deferred: VecDeque::new() }
    }
}

impl Clock {
    pub(crate) fn at(&self, now: Duration) -> Duration {
        let passed = now - self.since;
        let drift = passed.mul_f64(f64::from(self.ppm.unsigned_abs()) / 1e6);
        if self.ppm < 0 { self.read + passed - drift } else { self.read + passed + drift }
    }

    /// Restarts the clock at 0, as that of a new process.
    pub(crate) fn restart(&mut self, now: Duration) {
        (self.since, self.read) = (now, Duration::ZERO);
    }

    pub(crate) fn change(&mut self, now: Duration, ppm: i32, jump: Duration) {
        *self = Self { since: now, read: self.at(now) + jump, ppm };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_drifts_and_jumps_and_never_goes_back() {
        let s = Duration::from_secs;
        let mut clock = Clock::default();
        assert_eq!(clock.at(s(5)), s(5));
        clock.change(s(10), 100_000, Duration::ZERO);
        assert_eq!(clock.at(s(20)), s(21));
        clock.change(s(20), -500_000, s(9));
        assert_eq!((clock.at(s(20)), clock.at(s(24))), (s(30), s(32)));
    }
}
