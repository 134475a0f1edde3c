//! The pace at which places become free: the mean time between two sequences that end.

use std::time::Duration;

/// The share of a new interval that enters the moving average.
const WEIGHT: f64 = 0.1;

#[derive(Clone, Debug, Default)]
pub struct Pace {
    last: Option<Duration>,
    interval_ms: Option<f64>,
}

impl Pace {
    /// Notes the end of a sequence.
    pub(crate) fn observe(&mut self, now: Duration) {
        if let Some(last) = self.last.replace(now) {
            let interval_ms = now.saturating_sub(last).as_secs_f64() * 1e3;
            self.interval_ms = Some(self.interval_ms.map_or(interval_ms, |mean| mean + WEIGHT * (interval_ms - mean)));
        }
    }

    /// The expected time until this many places have become free; `None` before two sequences have ended.
    pub fn wait_ms(&self, places: usize) -> Option<f64> {
        self.interval_ms.map(|interval| interval * places as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_grows_with_the_place_and_follows_the_pace() {
        let mut pace = Pace::default();
        assert_eq!(pace.wait_ms(3), None);
        (0..5).for_each(|second| pace.observe(Duration::from_secs(second)));
        assert_eq!(pace.wait_ms(3), Some(3000.0));
        (0..100).for_each(|tenth| pace.observe(Duration::from_millis(4000 + 100 * tenth)));
        assert!((290.0..310.0).contains(&pace.wait_ms(3).unwrap()), "{pace:?}");
    }
}
