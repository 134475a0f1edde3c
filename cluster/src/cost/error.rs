//! The error of predictions: the distribution of `actual / predicted`, so that a plan can be judged by its chances.
//!
//! Times are off by factors, and more often too long than too short. So the logarithm of that ratio is taken as normally distributed, with
//! a mean and a variance learnt with forgetting. The last errors are also kept as they are, for operators.

/// Errors kept for [`Errors::quantile`].
const KEPT_MAX: usize = 128;
/// The start values count as this many observations.
const START_COUNT: f64 = 20.0;
/// The number of observations that together outweigh all earlier ones.
const MEMORY: f64 = 200.0;
const START_DEVIATION: f64 = 0.25;
/// The least deviation: even a model that has been right so far may be somewhat off.
const DEVIATION_MIN: f64 = 0.05;
/// The largest error of one observation, as a logarithm: a paused process teaches nothing.
const SURPRISE_MAX: f64 = 1.5;

#[derive(Clone, Debug)]
pub struct Errors {
    /// The mean of the logarithm of `actual / predicted`.
    mean: f64,
    variance: f64,
    count: f64,
    /// The last values of `|predicted - actual| / actual`, in a ring.
    kept: Vec<f32>,
    next: usize,
}

impl Default for Errors {
    fn default() -> Self {
        Self { mean: 0.0, variance: START_DEVIATION * START_DEVIATION, count: START_COUNT, kept: Vec::new(), next: 0 }
    }
}

impl Errors {
    /// Learns from one prediction and its outcome. Impossible durations are ignored.
    pub fn observe(&mut self, predicted_ms: f64, actual_ms: f64) {
        if !(predicted_ms.is_finite() && actual_ms.is_finite() && predicted_ms > 0.0 && actual_ms > 0.0) {
            return;
        }
        let ratio = (actual_ms / predicted_ms).ln().clamp(-SURPRISE_MAX, SURPRISE_MAX);
        self.count = (self.count + 1.0).min(MEMORY);
        let (gain, off) = (1.0 / self.count, ratio - self.mean);
        self.mean += gain * off;
        self.variance = (1.0 - gain) * (self.variance + gain * off * off);
        let error = ((predicted_ms - actual_ms).abs() / actual_ms) as f32;
        if self.kept.len() < KEPT_MAX {
            self.kept.push(error);
        } else {
            self.kept[self.next] = error;
        }
        self.next = (self.next + 1) % KEPT_MAX;
    }

    /// The probability that work with a predicted time of `predicted_ms` takes at most `limit_ms`.
    pub fn chance(&self, predicted_ms: f64, limit_ms: f64) -> f64 {
        if limit_ms <= 0.0 {
            return 0.0;
        }
        if predicted_ms <= 0.0 {
            return 1.0;
        }
        // Approximates the normal distribution by a logistic one, with an error of at most 0.01.
        let deviations = ((limit_ms / predicted_ms).ln() - self.mean) / self.variance.sqrt().max(DEVIATION_MIN);
        1.0 / (1.0 + (-1.702 * deviations).exp())
    }

    /// The quantile of `|predicted - actual| / actual` over the last predictions; `None` before the first.
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let mut sorted = self.kept.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        Some(sorted[(part * last as f64).round() as usize].into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_follow_what_was_wrong_before() {
        let mut errors = Errors::default();
        let chance = |errors: &Errors, limit| errors.chance(100.0, limit);
        assert!((chance(&errors, 100.0) - 0.5).abs() < 1e-9, "as likely late as early");
        assert!(chance(&errors, 200.0) > 0.98 && chance(&errors, 50.0) < 0.02);
        // Everything takes twice as long as predicted, give or take a tenth.
        for i in 0..600 {
            errors.observe(100.0, 180.0 + f64::from(i % 5) * 10.0);
        }
        assert!(chance(&errors, 150.0) < 0.02 && chance(&errors, 260.0) > 0.98, "{errors:?}");
        let half = errors.quantile(0.5).unwrap();
        assert!((0.45..0.55).contains(&half), "{half}");
        assert!(errors.quantile(0.9).unwrap() >= half);
    }

    #[test]
    fn nothing_that_is_observed_makes_a_chance_other_than_one() {
        let mut errors = Errors::default();
        let odd = [0.0, -1.0, 1e-300, 1e300, f64::NAN, f64::INFINITY, 5.0];
        for predicted in odd {
            for actual in odd {
                errors.observe(predicted, actual);
                let chance = errors.chance(if predicted > 0.0 { predicted } else { 0.0 }, 10.0);
                assert!((0.0..=1.0).contains(&chance), "{predicted} {actual}: {chance}");
            }
        }
        assert_eq!((errors.chance(5.0, 0.0), errors.chance(0.0, 5.0)), (0.0, 1.0));
    }
}
