//! Latencies to percentiles: exactly, or from a histogram whose memory does not grow with the number of samples.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Percentiles in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p99_9: f64,
    pub max: f64,
}

/// One kind of latency, to three digits (a percentile is off by a thousandth at most), from a microsecond to a day.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

const DAY_US: u64 = 86_400_000_000;
const DIGITS: u8 = 3;
/// The steps of a plotted distribution: a plot shows no more.
const CDF_STEPS: u32 = 200;

impl Percentiles {
    /// Exact percentiles, interpolated between neighbours; `None` without samples.
    pub fn of(values: impl Iterator<Item = Duration>) -> Option<Percentiles> {
        let mut sorted: Vec<f64> = values.map(|value| value.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let at = |quantile: f64| {
            let rank = quantile * (sorted.len() - 1) as f64;
            let (below, above) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
            below + (above - below) * rank.fract()
        };
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Some(Percentiles { mean, p50: at(0.5), p90: at(0.9), p95: at(0.95), p99: at(0.99), p99_9: at(0.999), max })
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, DAY_US, DIGITS).expect("the bounds are in order"))
    }
}

impl Latencies {
    pub fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(DAY_US).max(1));
    }

    /// The percentiles; `None` without samples.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let at = |quantile: f64| self.0.value_at_quantile(quantile) as f64 / 1e3;
        (!self.0.is_empty()).then(|| Percentiles {
            mean: self.0.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p99_9: at(0.999),
            max: self.0.max() as f64 / 1e3,
        })
    }

    /// The cumulative distribution: milliseconds, and the share of samples that are at most as long.
    pub fn cdf(&self) -> Vec<(f64, f64)> {
        let steps = if self.0.is_empty() { 0 } else { CDF_STEPS };
        let at = |step: u32| {
            let share = f64::from(step) / f64::from(CDF_STEPS);
            (self.0.value_at_quantile(share) as f64 / 1e3, share)
        };
        let mut points: Vec<(f64, f64)> = (1..=steps).map(at).collect();
        points.dedup_by(|next, before| (next.0 == before.0).then(|| before.1 = next.1).is_some());
        points
    }
}

impl FromIterator<Duration> for Latencies {
    fn from_iter<I: IntoIterator<Item = Duration>>(latencies: I) -> Self {
        let mut all = Self::default();
        latencies.into_iter().for_each(|latency| all.record(latency));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_like_numpys() {
        // numpy.percentile(range(1, 12), [50, 90, 99]) == [6, 10, 10.9]
        let percentiles = Percentiles::of((1..=11).rev().map(Duration::from_millis)).unwrap();
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(percentiles.p50, 6.0) && close(percentiles.p90, 10.0) && close(percentiles.p99, 10.9), "{percentiles:?}");
        assert!(close(percentiles.mean, 6.0) && close(percentiles.max, 11.0));
        assert_eq!(Percentiles::of(std::iter::empty()), None);
        assert_eq!(Percentiles::of([Duration::from_secs(1)].into_iter()).unwrap().p99, 1000.0);
    }

    #[test]
    fn a_histograms_percentiles_are_off_by_a_thousandth_at_most() {
        let samples = || (1..=100_000).map(|n: u64| Duration::from_micros(n * n / 50 + 7));
        let (exact, ours) = (Percentiles::of(samples()).unwrap(), samples().collect::<Latencies>().percentiles().unwrap());
        for (exact, ours) in
            [(exact.mean, ours.mean), (exact.p50, ours.p50), (exact.p90, ours.p90), (exact.p99_9, ours.p99_9), (exact.max, ours.max)]
        {
            assert!((ours / exact - 1.0).abs() < 1.5e-3, "{exact} {ours}");
        }
        assert_eq!(Latencies::default().percentiles(), None);
    }

    #[test]
    fn a_distribution_rises_to_one() {
        let cdf: Vec<_> = [5, 5, 5, 9].map(Duration::from_millis).into_iter().collect::<Latencies>().cdf();
        assert_eq!((cdf.len(), cdf[0].1, cdf[1].1), (2, 0.75, 1.0));
        assert!((cdf[1].0 - 9.0).abs() < 0.01);
        assert!(Latencies::default().cdf().is_empty());
        let far: Latencies = [Duration::MAX].into_iter().collect();
        assert!(far.percentiles().unwrap().max >= 86_400_000.0 * 0.99);
    }
}
