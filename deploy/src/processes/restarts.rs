//! Restart policy of a crashed process: exponential backoff, and an upper limit on restarts. Time is an argument.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Crashes longer ago than this are forgiven.
pub(super) const WINDOW: Duration = Duration::from_secs(300);
/// The wait before the first restart; it doubles with each crash, up to [`LONGEST`].
const FIRST: Duration = Duration::from_millis(200);
/// The longest wait before a restart.
const LONGEST: Duration = Duration::from_secs(10);

/// One process's crashes.
#[derive(Debug)]
pub(super) struct Restarts {
    /// The most restarts within the window.
    max: u32,
    recent: VecDeque<Instant>,
}

impl Restarts {
    pub(super) fn new(max: u32) -> Self {
        Self { max, recent: VecDeque::new() }
    }

    /// Records a crash and returns the wait before the restart, or `None` if the process keeps failing.
    pub(super) fn crashed(&mut self, now: Instant) -> Option<Duration> {
        while self.recent.front().is_some_and(|crash| now.duration_since(*crash) > WINDOW) {
            self.recent.pop_front();
        }
        let before = self.recent.len() as u32;
        if before >= self.max {
            return None;
        }
        self.recent.push_back(now);
        Some(FIRST.saturating_mul(1 << before.min(16)).min(LONGEST))
    }

    /// The number of crashes within the window, as of the last one.
    pub(super) fn count(&self) -> usize {
        self.recent.len()
    }

    pub(super) fn max(&self) -> u32 {
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_end_and_are_forgiven() {
        let (start, mut restarts) = (Instant::now(), Restarts::new(8));
        let waits: Vec<_> = (0..9).map(|crash| restarts.crashed(start + Duration::from_secs(crash)).map(|wait| wait.as_millis())).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000].map(Some).into_iter().chain([None]).collect::<Vec<_>>());
        assert_eq!(restarts.crashed(start + WINDOW + Duration::from_millis(4_500)), Some(Duration::from_millis(1600)), "three count still");
        assert_eq!(Restarts::new(0).crashed(start), None);
    }
}
