//! The arrival times of requests. The whole schedule is fixed before the first request is sent, so a slow server meets the same arrivals as
//! a fast one: an open loop (Schroeder, Wierman, Harchol-Balter, "Open Versus Closed: A Cautionary Tale", NSDI 2006).

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use std::{f64::consts::TAU, str::FromStr, time::Duration};

/// The rate at which requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    AllAtOnce,
    PerSecond(f64),
}

/// The pattern of arrivals, whose mean rate is the [`Rate`].
#[derive(Clone, Debug, PartialEq, Serialize, clap::Args)]
pub struct Pattern {
    /// Pattern of arrivals.
    #[arg(long, value_enum, default_value_t = Process::Poisson)]
    pub arrivals: Process,
    /// Burst: requests per burst; bursts are a Poisson process.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub burst: u32,
    /// Diurnal: seconds between two peaks.
    #[arg(long, default_value_t = 60.0, value_parser = positive)]
    pub period_s: f64,
    /// Diurnal: deviation of the rate from its mean at the peak, as a share of the mean.
    #[arg(long, default_value_t = 0.8, value_parser = share)]
    pub swing: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Process {
    /// Exponentially distributed gaps: many independent users.
    Poisson,
    /// Equal gaps.
    Constant,
    /// Several requests at once.
    Burst,
    /// Poisson, with a rate that follows a sine.
    Diurnal,
}

impl Default for Pattern {
    fn default() -> Self {
        Self { arrivals: Process::Poisson, burst: 10, period_s: 60.0, swing: 0.8 }
    }
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

pub fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0).ok_or_else(|| "must be a number above 0".into())
}

pub fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value| (0.0..=1.0).contains(value)).ok_or_else(|| "must be a share, from 0 to 1".into())
}

/// Times from the start of the measurement, ascending. The same seed gives the same pattern at every rate, only faster or slower (except
/// for the period of a diurnal one).
pub fn schedule(pattern: &Pattern, rate: Rate, requests: usize, seed: u64) -> Vec<Duration> {
    let Rate::PerSecond(rate) = rate else {
        return vec![Duration::ZERO; requests];
    };
    let mut rng = StdRng::seed_from_u64(seed);
    // `random` is below 1, so the logarithm is finite.
    let mut gap = || -(1.0 - rng.random::<f64>()).ln();
    // Times are in units of the mean gap.
    let mut at = 0.0;
    let arrivals = (0..requests).map(|number| {
        at += match pattern.arrivals {
            Process::Poisson | Process::Diurnal => gap(),
            Process::Constant => f64::from(u8::from(number > 0)),
            Process::Burst if number % pattern.burst as usize == 0 => gap() * f64::from(pattern.burst),
            Process::Burst => 0.0,
        };
        let at_s = if pattern.arrivals == Process::Diurnal { pattern.when(at / rate) } else { at / rate };
        Duration::try_from_secs_f64(at_s).unwrap_or(Duration::MAX)
    });
    arrivals.collect()
}

impl Pattern {
    /// The time at which as many requests are due as at the mean rate after `mean_s`: the rate is mean × (1 + swing × sin), and its
    /// integral is inverted by bisection.
    fn when(&self, mean_s: f64) -> f64 {
        let ahead = |at_s: f64| self.swing * self.period_s / TAU * (1.0 - (TAU * at_s / self.period_s).cos());
        let (mut low, mut high) = ((mean_s - self.swing * self.period_s).max(0.0), mean_s);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if middle + ahead(middle) < mean_s { low = middle } else { high = middle }
        }
        high
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(arrivals: Process) -> Pattern {
        Pattern { arrivals, ..Pattern::default() }
    }

    fn poisson(rate: Rate, requests: usize, seed: u64) -> Vec<Duration> {
        schedule(&pattern(Process::Poisson), rate, requests, seed)
    }

    #[test]
    fn gaps_are_exponential_with_the_rates_mean() {
        let arrivals = poisson(Rate::PerSecond(4.0), 40_000, 7);
        assert!(arrivals.is_sorted());
        let gaps: Vec<f64> = arrivals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        let above_mean = gaps.iter().filter(|gap| **gap > mean).count() as f64 / gaps.len() as f64;
        // An exponential distribution's deviation equals its mean, and 1/e of it lies above.
        assert!((mean - 0.25).abs() < 0.005, "{mean}");
        assert!((variance.sqrt() - mean).abs() < 0.01, "{variance}");
        assert!((above_mean - (-1.0f64).exp()).abs() < 0.01, "{above_mean}");
    }

    #[test]
    fn every_pattern_keeps_its_mean_rate() {
        for arrivals in [Process::Poisson, Process::Constant, Process::Burst, Process::Diurnal] {
            let times = schedule(&pattern(arrivals), Rate::PerSecond(50.0), 30_000, 3);
            assert!(times.is_sorted(), "{arrivals:?}");
            let last_s = times.last().unwrap().as_secs_f64();
            assert!((last_s / 600.0 - 1.0).abs() < 0.03, "{arrivals:?}: {last_s}");
        }
    }

    #[test]
    fn bursts_come_together_and_days_have_peaks() {
        let times = schedule(&pattern(Process::Burst), Rate::PerSecond(5.0), 100, 3);
        assert!(times.chunks(10).all(|burst| burst.iter().all(|at| *at == burst[0])) && times[9] < times[10]);
        let constant = schedule(&pattern(Process::Constant), Rate::PerSecond(4.0), 3, 3);
        assert_eq!(constant, [0, 250, 500].map(Duration::from_millis));
        // The first half of a sine is above the mean, by 2/π × swing.
        let times = schedule(&pattern(Process::Diurnal), Rate::PerSecond(100.0), 6000, 3);
        let first_half = times.iter().filter(|at| at.as_secs_f64() < 30.0).count() as f64;
        assert!((first_half / 3000.0 - (1.0 + 0.8 * 2.0 / std::f64::consts::PI)).abs() < 0.06, "{first_half}");
    }

    #[test]
    fn a_seed_fixes_the_pattern_at_every_rate() {
        let slow = poisson(Rate::PerSecond(1.0), 50, 1);
        assert_eq!(slow, poisson(Rate::PerSecond(1.0), 50, 1));
        assert_ne!(slow, poisson(Rate::PerSecond(1.0), 50, 2));
        let fast = poisson(Rate::PerSecond(4.0), 50, 1);
        assert!(slow.iter().zip(&fast).all(|(slow, fast)| (slow.as_secs_f64() - 4.0 * fast.as_secs_f64()).abs() < 1e-6));
        assert_eq!(poisson(Rate::AllAtOnce, 3, 1), [Duration::ZERO; 3]);
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
