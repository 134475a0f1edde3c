//! The last times to first tokens, and their 95th percentile.

use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// The age from which a time no longer describes the present.
const WINDOW: Duration = Duration::from_secs(10);
/// The maximum number of times that are kept.
const KEPT_MAX: usize = 2048;
/// The minimum number of times for a percentile: one slow request is not an overload.
const KEPT_MIN: usize = 20;

#[derive(Debug, Default)]
pub(super) struct RecentTtfts(Mutex<VecDeque<(Instant, Duration)>>);

impl RecentTtfts {
    pub(super) fn push(&self, now: Instant, ttft: Duration) {
        let mut kept = self.0.lock();
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back((now, ttft));
    }

    pub(super) fn p95(&self, now: Instant) -> Option<Duration> {
        let mut kept = self.0.lock();
        while kept.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > WINDOW) {
            kept.pop_front();
        }
        if kept.len() < KEPT_MIN {
            return None;
        }
        let mut times: Vec<_> = kept.iter().map(|(_, ttft)| *ttft).collect();
        drop(kept);
        let place = times.len() * 95 / 100;
        Some(*times.select_nth_unstable(place).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_ones_and_few_ones_say_nothing() {
        let (recent, now) = (RecentTtfts::default(), Instant::now());
        (1..=19).for_each(|ms| recent.push(now, Duration::from_millis(ms)));
        assert_eq!(recent.p95(now), None);
        (20..=100).for_each(|ms| recent.push(now, Duration::from_millis(ms)));
        assert_eq!(recent.p95(now), Some(Duration::from_millis(96)));
        assert_eq!(recent.p95(now + WINDOW + Duration::from_millis(1)), None);
    }
}
