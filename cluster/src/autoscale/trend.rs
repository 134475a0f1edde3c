//! A signal's moving average, its noise, and its extrapolation.

use std::time::Duration;

/// Two exponential averages of one signal. The slower one lags further behind a signal that rises steadily, and their difference measures
/// the slope. Only the part of it counts that the signal's noise does not explain.
#[derive(Clone, Debug)]
pub struct Trend {
    window_s: f64,
    horizon: Horizon,
    fast: f64,
    slow: f64,
    /// The mean square of the signal's deviations from its average.
    variance: f64,
    started: bool,
}

/// The times to extrapolate.
#[derive(Clone, Copy, Debug)]
pub struct Horizon {
    /// Until a worker that is started now serves.
    pub start: Duration,
    /// Until a worker that is given up now may be replaced.
    pub replace: Duration,
}

/// The values of a signal to plan for.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Outlook {
    /// The value expected when a worker that is started now serves.
    pub soon: f64,
    /// The value that is hardly exceeded before a worker that is given up now may be replaced.
    pub most: f64,
}

/// The time constant of the slower average, in those of the faster one.
const SLOWER: f64 = 3.0;
/// The time constant of the variance, in those of the faster average.
const STEADIER: f64 = 6.0;
/// The variance of a sum of looks, in those of independent ones: neighbouring looks see the same requests.
const CORRELATED: f64 = 2.0;
/// The standard deviations that a slope has to exceed, and that the largest value lies above the average.
const DEVIATIONS: f64 = 1.5;

impl Trend {
    pub fn new(window: Duration, horizon: Horizon) -> Self {
        Self { window_s: window.as_secs_f64(), horizon, fast: 0.0, slow: 0.0, variance: 0.0, started: false }
    }

    /// Takes the signal's mean over the time that has passed. A rising signal is expected to rise on; a falling one is not expected to
    /// fall on.
    pub fn observe(&mut self, passed: Duration, value: f64) -> Outlook {
        if !self.started {
            (self.fast, self.slow, self.started) = (value, value, true);
        }
        let passed_s = passed.as_secs_f64();
        let weight = |window_s: f64| 1.0 - (-passed_s / window_s).exp();
        let deviation = value - self.fast;
        self.variance += weight(STEADIER * self.window_s) * (deviation * deviation - self.variance);
        self.fast += weight(self.window_s) * deviation;
        self.slow += weight(SLOWER * self.window_s) * (value - self.slow);
        // The variance of an exponential average, and that of the difference of two whose time constants are in proportion 1 to 3.
        let of_fast = CORRELATED * self.variance * passed_s / (2.0 * self.window_s);
        let of_difference = of_fast / 3.0;
        let rise = (self.fast - self.slow - DEVIATIONS * of_difference.sqrt()).max(0.0);
        // Behind a steady rise, each average lags by its own time constant.
        let per_s = rise / ((SLOWER - 1.0) * self.window_s);
        let after = |time: Duration| self.fast + per_s * (self.window_s + time.as_secs_f64());
        Outlook { soon: after(self.horizon.start), most: after(self.horizon.replace) + DEVIATIONS * of_fast.sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(5);

    fn trend() -> Trend {
        Trend::new(Duration::from_secs(30), Horizon { start: Duration::from_secs(60), replace: Duration::from_secs(180) })
    }

    #[test]
    fn what_stays_is_itself_and_what_rises_is_where_it_will_be() {
        let mut still = trend();
        assert!((0..50).map(|_| still.observe(EVERY, 3.0)).all(|outlook| outlook == Outlook { soon: 3.0, most: 3.0 }));
        let (mut rising, mut planned) = (trend(), Outlook::default());
        for look in 0..300 {
            planned = rising.observe(EVERY, f64::from(look));
        }
        // An extrapolation by 60 s is twelve looks ahead, less the part that might be noise.
        assert!((306.0..312.0).contains(&planned.soon), "{planned:?}");
        assert!((325.0..340.0).contains(&planned.most), "{planned:?}");
    }

    #[test]
    fn what_falls_is_not_taken_to_fall_on() {
        let mut falling = trend();
        for look in 0..200 {
            let value = f64::from(200 - look);
            let planned = falling.observe(EVERY, value);
            assert!(planned.soon >= value && planned.most >= planned.soon, "{planned:?} for {value}");
        }
    }

    #[test]
    fn noise_is_no_rise() {
        let (mut noisy, mut rises) = (trend(), 0);
        // A signal around 10 with a period of seven looks that no window divides.
        for look in 0..700_u32 {
            let value = 10.0 + [3.0, -1.0, 2.0, -4.0, 1.0, -3.0, 2.0][look as usize % 7];
            let Outlook { soon, most } = noisy.observe(EVERY, value);
            rises += u32::from(soon > noisy.fast);
            assert!(look < 100 || most > 10.0 && soon < 11.5, "{soon} {most}");
        }
        assert!(rises < 70, "{rises}");
    }
}
