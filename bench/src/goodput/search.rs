//! The search for the highest rate, as a pure machine: the next rate to try, and the result. And the statistics of results.

use serde::{Deserialize, Serialize};

/// A bisection of the rate's logarithm.
#[derive(Clone, Copy, Debug)]
pub struct Bisection {
    low: f64,
    high: f64,
    low_passed: bool,
    high_failed: bool,
}

impl Bisection {
    pub fn new(low: f64, high: f64) -> Bisection {
        Bisection { low, high, low_passed: false, high_failed: false }
    }

    pub fn next(&self) -> f64 {
        (self.low * self.high).sqrt()
    }

    /// Records the result of [`Bisection::next`].
    pub fn tried(&mut self, is_good: bool) {
        let rate = self.next();
        if is_good {
            (self.low, self.low_passed) = (rate, true);
        } else {
            (self.high, self.high_failed) = (rate, true);
        }
    }

    pub fn found(&self) -> Found {
        Found { rate: self.next(), passed: self.low_passed.then_some(self.low), failed: self.high_failed.then_some(self.high) }
    }
}

/// One search's result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// The middle of the remaining range.
    pub rate: f64,
    /// The highest rate that was good enough; `null` if none was, so the truth may be below the rates tried.
    pub passed: Option<f64>,
    /// The lowest rate that was not good enough; `null` if all were, so the truth may be above.
    pub failed: Option<f64>,
}

/// A mean and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

/// Student's t, 97.5 %, by degrees of freedom.
const T: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
/// The normal distribution's 97.5 %.
const Z: f64 = 1.96;

impl Estimate {
    /// The estimate from repeated searches. The interval is Student's, and at least the range that the searches left open.
    pub fn of(found: &[Found]) -> Option<Estimate> {
        let n = found.len() as f64;
        let mean = found.iter().map(|found| found.rate).sum::<f64>() / n;
        let open = |found: &Found| (found.failed.unwrap_or(found.rate) - found.passed.unwrap_or(0.0)).max(0.0) / 2.0;
        let resolution = found.iter().map(open).sum::<f64>() / n;
        let spread = match found.len() {
            0 => return None,
            1 => 0.0,
            _ => {
                let variance = found.iter().map(|found| (found.rate - mean).powi(2)).sum::<f64>() / (n - 1.0);
                T.get(found.len() - 2).copied().unwrap_or(Z) * (variance / n).sqrt()
            }
        };
        let half = spread.max(resolution);
        Some(Estimate { mean, low: (mean - half).max(0.0), high: mean + half })
    }
}

/// Wilson's interval of a share, 95 %.
pub fn wilson(good: u64, all: u64) -> (f64, f64) {
    if all == 0 {
        return (0.0, 1.0);
    }
    let (n, share) = (all as f64, good as f64 / all as f64);
    let middle = (share + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt() / (1.0 + Z * Z / n);
    ((middle - half).max(0.0), (middle + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_limit_is_found() {
        let mut bisection = Bisection::new(0.5, 32.0);
        for _ in 0..10 {
            let is_good = bisection.next() <= 5.3;
            bisection.tried(is_good);
        }
        let Found { rate, passed, failed } = bisection.found();
        assert!((rate / 5.3 - 1.0).abs() < 0.005 && passed <= Some(5.3) && failed > Some(5.3), "{rate}");
        let mut bisection = Bisection::new(1.0, 4.0);
        bisection.tried(true);
        bisection.tried(true);
        assert_eq!(bisection.found().failed, None, "all that was tried was good: the limit is elsewhere");
    }

    #[test]
    fn intervals_are_the_textbooks() {
        let found = |rate: f64| Found { rate, passed: Some(rate - 0.1), failed: Some(rate + 0.1) };
        // The mean is 5, the deviation 1, and the interval 4.303 / √3.
        let estimate = Estimate::of(&[found(4.0), found(5.0), found(6.0)]).unwrap();
        assert!((estimate.high - 5.0 - 2.4843).abs() < 1e-3, "{estimate:?}");
        // Three equal results are no better than the searches' resolution.
        let estimate = Estimate::of(&[found(4.0), found(4.0), found(4.0)]).unwrap();
        assert!((estimate.high - 4.1).abs() < 1e-9 && (estimate.low - 3.9).abs() < 1e-9);
        assert_eq!(Estimate::of(&[]), None);
        // Wilson for 45 of 50: 0.786 to 0.957.
        let (low, high) = wilson(45, 50);
        assert!((low - 0.7864).abs() < 1e-3 && (high - 0.9565).abs() < 1e-3, "{low} {high}");
        assert_eq!(wilson(0, 0), (0.0, 1.0));
    }
}
