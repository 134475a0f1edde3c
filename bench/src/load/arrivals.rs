//! When each request is due. The whole schedule is fixed before the first request is sent, so a slow server meets the
//! same arrivals as a fast one: an open loop (Schroeder, Wierman, Harchol-Balter, "Open Versus Closed: A Cautionary
//! Tale", NSDI 2006).

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use std::{str::FromStr, time::Duration};

/// How fast requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    AllAtOnce,
    PerSecond(f64),
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        match text.parse::<f64>() {
            Ok(rate) if rate == 0.0 || rate == f64::INFINITY => Ok(Rate::AllAtOnce),
            Ok(rate) if rate > 0.0 => Ok(Rate::PerSecond(rate)),
            _ => Err("a rate is requests per second, such as 2.5; 0 or `inf` sends all at once".into()),
        }
    }
}

/// Times from the start of the measurement, ascending: a Poisson process, that is, exponentially distributed gaps.
pub fn schedule(rate: Rate, requests: usize, seed: u64) -> Vec<Duration> {
    let Rate::PerSecond(rate) = rate else {
        return vec![Duration::ZERO; requests];
    };
    let mut rng = StdRng::seed_from_u64(seed);
    let mut at_s = 0.0;
    let arrivals = (0..requests).map(|_| {
        // `random` is below 1, so the logarithm is finite.
        at_s -= (1.0 - rng.random::<f64>()).ln() / rate;
        Duration::try_from_secs_f64(at_s).unwrap_or(Duration::MAX)
    });
    arrivals.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_exponential_with_the_rates_mean() {
        let arrivals = schedule(Rate::PerSecond(4.0), 40_000, 7);
        assert!(arrivals.is_sorted());
        let gaps: Vec<f64> = arrivals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        let above_mean = gaps.iter().filter(|gap| **gap > mean).count() as f64 / gaps.len() as f64;
        // An exponential's deviation equals its mean, and 1/e of it lies above.
        assert!((mean - 0.25).abs() < 0.005, "{mean}");
        assert!((variance.sqrt() - mean).abs() < 0.01, "{variance}");
        assert!((above_mean - (-1.0f64).exp()).abs() < 0.01, "{above_mean}");
    }

    #[test]
    fn a_seed_fixes_the_schedule() {
        let rate = Rate::PerSecond(1.0);
        assert_eq!(schedule(rate, 50, 1), schedule(rate, 50, 1));
        assert_ne!(schedule(rate, 50, 1), schedule(rate, 50, 2));
        assert_eq!(schedule(Rate::AllAtOnce, 3, 1), [Duration::ZERO; 3]);
    }

    #[test]
    fn rates_are_checked() {
        for (text, rate) in [("0", Rate::AllAtOnce), ("inf", Rate::AllAtOnce), ("0.5", Rate::PerSecond(0.5))] {
            assert_eq!(text.parse(), Ok(rate), "{text}");
        }
        for wrong in ["", "-1", "-inf", "NaN", "fast"] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
    }
}
