//! The decision whether a run is good enough.

use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gate {
    /// The least score, from 0 to 1.
    pub score: f64,
    /// The most that may be lost against a baseline, on the cases that both have.
    pub drop: f64,
}

impl Default for Gate {
    fn default() -> Self {
        Self { score: 0.85, drop: 0.02 }
    }
}

/// Scores by case.
pub type Scores = BTreeMap<String, f64>;

/// The reason why a run does not pass.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Failed {
    #[error("the score is {score:.3}, and must be at least {least:.3}")]
    Score { score: f64, least: f64 },
    #[error("on the {cases} cases that the baseline has, too, the score fell from {before:.3} to {after:.3}: by more than {most:.3}")]
    Drop { cases: usize, before: f64, after: f64, most: f64 },
    #[error("there is no case")]
    Nothing,
}

impl Gate {
    pub fn check(&self, scores: &Scores, baseline: Option<&Scores>) -> Vec<Failed> {
        let Some(score) = mean(scores.values().copied()) else { return vec![Failed::Nothing] };
        let mut failed = Vec::new();
        if score < self.score {
            failed.push(Failed::Score { score, least: self.score });
        }
        let both: Vec<(f64, f64)> = scores.iter().filter_map(|(id, after)| Some((*baseline?.get(id)?, *after))).collect();
        if let (Some(before), Some(after)) = (mean(both.iter().map(|pair| pair.0)), mean(both.iter().map(|pair| pair.1)))
            && before - after > self.drop
        {
            failed.push(Failed::Drop { cases: both.len(), before, after, most: self.drop });
        }
        failed
    }
}

/// The mean of the values; `None` if there are none.
pub fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0_u32, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / f64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(scores: &[(&str, f64)]) -> Scores {
        scores.iter().map(|(id, score)| ((*id).to_owned(), *score)).collect()
    }

    #[test]
    fn a_run_passes_or_says_why_not() {
        let gate = Gate::default();
        assert_eq!(gate.check(&scores(&[("a", 0.9), ("b", 0.8)]), None), []);
        assert_eq!(gate.check(&scores(&[("a", 0.5)]), None), [Failed::Score { score: 0.5, least: 0.85 }]);
        assert_eq!(gate.check(&scores(&[]), None), [Failed::Nothing]);
    }

    #[test]
    fn only_cases_of_both_are_compared() {
        let gate = Gate { score: 0.0, drop: 0.02 };
        let run = scores(&[("a", 0.9), ("new", 0.0)]);
        assert_eq!(gate.check(&run, Some(&scores(&[("a", 0.91), ("old", 1.0)]))), []);
        let fell = gate.check(&run, Some(&scores(&[("a", 1.0)])));
        assert!(matches!(fell[..], [Failed::Drop { cases: 1, .. }]), "{fell:?}");
        assert_eq!(gate.check(&run, Some(&scores(&[("other", 1.0)]))), []);
    }
}
