//! A signal's moving average, and its extrapolation.

use std::time::Duration;

/// Two exponential averages of one signal. The slower one lags further behind a signal that rises steadily, and their difference measures
/// the slope.
#[derive(Clone, Debug)]
pub struct Trend {
    window_s: f64,
    /// The time to extrapolate.
    ahead_s: f64,
    fast: f64,
    slow: f64,
    started: bool,
}

/// The time constant of the slower average, in those of the faster one.
const SLOWER: f64 = 3.0;

impl Trend {
    pub fn new(window: Duration, ahead: Duration) -> Self {
        Self { window_s: window.as_secs_f64(), ahead_s: ahead.as_secs_f64(), fast: 0.0, slow: 0.0, started: false }
    }

    /// Takes the signal's mean over the time that has passed. Returns the value to plan for: the average, plus the expected gain of a
    /// rising signal. A falling signal is not extrapolated.
    pub fn observe(&mut self, passed: Duration, value: f64) -> f64 {
        if !self.started {
            (self.fast, self.slow, self.started) = (value, value, true);
        }
        let weight = |window_s: f64| 1.0 - (-passed.as_secs_f64() / window_s).exp();
        self.fast += weight(self.window_s) * (value - self.fast);
        self.slow += weight(SLOWER * self.window_s) * (value - self.slow);
        // Behind a steady rise, each average lags by its own time constant.
        let per_s = (self.fast - self.slow) / ((SLOWER - 1.0) * self.window_s);
        self.fast + per_s.max(0.0) * (self.window_s + self.ahead_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(5);

    fn trend() -> Trend {
        Trend::new(Duration::from_secs(30), Duration::from_secs(60))
    }

    #[test]
    fn what_stays_is_itself_and_what_rises_is_where_it_will_be() {
        let mut still = trend();
        assert!((0..50).all(|_| (still.observe(EVERY, 3.0) - 3.0).abs() < 1e-9));
        let (mut rising, mut planned) = (trend(), 0.0);
        for look in 0..200 {
            planned = rising.observe(EVERY, f64::from(look));
        }
        // An extrapolation by 60 s is twelve looks ahead.
        assert!((planned - 211.0).abs() < 3.0, "{planned}");
    }

    #[test]
    fn what_falls_is_not_taken_to_fall_on() {
        let mut falling = trend();
        for look in 0..200 {
            let value = f64::from(200 - look);
            let planned = falling.observe(EVERY, value);
            assert!(planned >= value, "{planned} for {value}");
        }
    }
}
