//! Processes: which of them run, and what each takes for the time.

use super::{CoordinatorIndex, Event, PoolIndex, WorkerIndex};
use std::{collections::VecDeque, fmt, time::Duration};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Process {
    Coordinator(CoordinatorIndex),
    Worker(WorkerIndex),
    Pool(PoolIndex),
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Process::Coordinator(index) => write!(f, "coordinator-{}", index.0),
            Process::Worker(index) => write!(f, "worker-{}", index.0),
            Process::Pool(index) => write!(f, "pool-{}", index.0),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Running,
    /// It computes nothing, and what comes for it waits (SIGSTOP).
    Paused,
    Down,
}

/// One process: after a restart it is another, with the same name.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) incarnation: u32,
    pub(crate) state: State,
    pub(crate) clock: Clock,
    /// What came while it was paused.
    pub(crate) deferred: VecDeque<Event>,
}

/// A monotonic clock that may be too fast, too slow, and jump forward.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    since: Duration,
    read: Duration,
    /// Too fast by this many parts in a million.
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

    /// It begins at 0 again, as that of a new process.
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
