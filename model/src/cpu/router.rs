//! The choice of experts for the rows of a layer.
//!
//! **The arithmetic.** A row's logits become scores: `softmax` over all of them, `sigmoid` of each, or the logits themselves. The experts
//! with the largest scores are chosen, the lower number among equals. If a model has corrections, they are added to the scores for the
//! choice alone. If it has groups, the experts come from the groups with the largest sums of their two best (corrected) scores, the better
//! one first, or with the best score; and from the lower group among equals. A chosen expert's weight is its score, or its share of the
//! chosen experts' sum, which is taken in the order of their choice, times the model's factor. If scores are the logits, the weights are a
//! `softmax` over the chosen ones, in the order of their choice.

use crate::{
    config::{ExpertConfig, ExpertGroups},
    family::{GroupRank, Scores},
};
use tidemill_kernels::cpu::vocab::exp_shifted;

pub(super) struct Router {
    /// The number of experts per row.
    chosen: usize,
    scores: Scores,
    /// The correction of each expert's score, for the choice alone.
    correction: Option<Vec<f32>>,
    groups: Option<ExpertGroups>,
    /// Whether the weights of a row are scaled to sum to 1.
    is_normalized: bool,
    factor: f32,
}

#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) expert: usize,
    pub(super) weight: f32,
}

/// Buffers that a router reuses from row to row.
#[derive(Default)]
pub(super) struct RouterScratch {
    /// The scores by expert; those of a softmax before they are divided by their sum.
    scores: Vec<f32>,
    /// The scores that decide the choice; `None` for an expert that cannot be chosen.
    ranks: Vec<Option<f32>>,
    /// The scores that decide the choice of groups, likewise.
    group_ranks: Vec<Option<f32>>,
}

impl Router {
    pub(super) fn new(config: &ExpertConfig, correction: Option<Vec<f32>>) -> Self {
        let ExpertConfig { chosen, scores, groups, is_normalized, factor, .. } = *config;
        Self { chosen, scores, correction, groups, is_normalized, factor: factor.unwrap_or(1.0) }
    }

    /// The number of experts per row.
    pub(super) fn chosen(&self) -> usize {
        self.chosen
    }

    /// Appends the choices of a row with these logits, one per expert.
    pub(super) fn choose(&self, logits: &[f32], scratch: &mut RouterScratch, choices: &mut Vec<Choice>) {
        let RouterScratch { scores, ranks, group_ranks } = scratch;
        scores.resize(logits.len(), 0.0);
        let total = self.score(logits, scores);
        ranks.clear();
        match &self.correction {
            Some(correction) => ranks.extend(scores.iter().zip(correction).map(|(score, correction)| Some(score / total + correction))),
            None => ranks.extend(scores.iter().copied().map(Some)),
        }
        if let Some(groups) = self.groups {
            keep_best_groups(groups, ranks, group_ranks);
        }
        let first = choices.len();
        for _ in 0..self.chosen {
            let expert = take_best(ranks).expect("no more are chosen than there are");
            choices.push(Choice { expert, weight: scores[expert] / total });
        }
        let choices = &mut choices[first..];
        if self.scores == Scores::ChosenSoftmax {
            weigh_chosen(choices, scores);
        }
        if self.is_normalized {
            // Scores that are all 0 stay 0.
            let sum = choices.iter().map(|choice| choice.weight).sum::<f32>().max(f32::MIN_POSITIVE);
            choices.iter_mut().for_each(|choice| choice.weight /= sum);
        }
        choices.iter_mut().for_each(|choice| choice.weight *= self.factor);
    }

    /// Computes the scores and returns their divisor.
    fn score(&self, logits: &[f32], scores: &mut [f32]) -> f32 {
        match self.scores {
            Scores::Softmax => {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                exp_shifted(logits, largest, 1.0, scores)
            }
            Scores::Sigmoid => {
                sigmoid(logits, scores);
                1.0
            }
            Scores::ChosenSoftmax => {
                scores.copy_from_slice(logits);
                1.0
            }
        }
    }
}

/// Replaces the weights of choices, which are their logits, by the softmax over them. `scratch` has room for as many.
fn weigh_chosen(choices: &mut [Choice], scratch: &mut Vec<f32>) {
    let logits: &mut Vec<f32> = scratch;
    logits.clear();
    logits.extend(choices.iter().map(|choice| choice.weight));
    logits.extend_from_within(..);
    let (logits, powers) = logits.split_at_mut(choices.len());
    // The first choice has the largest logit.
    let total = exp_shifted(logits, logits[0], 1.0, powers);
    choices.iter_mut().zip(powers).for_each(|(choice, power)| choice.weight = *power / total);
}

/// `y = 1 / (1 + e^-x)`. NaN counts as positive.
pub(super) fn sigmoid(x: &[f32], y: &mut [f32]) {
    exp_shifted(x, 0.0, -1.0, y);
    y.iter_mut().for_each(|power| *power = 1.0 / (1.0 + *power));
}

/// Excludes the experts outside the best groups from the choice.
fn keep_best_groups(groups: ExpertGroups, ranks: &mut [Option<f32>], group_ranks: &mut Vec<Option<f32>>) {
    let size = ranks.len() / groups.count;
    group_ranks.clear();
    let rank = match groups.rank {
        GroupRank::TwoBest => sum_of_two_best,
        GroupRank::Best => best,
    };
    group_ranks.extend(ranks.chunks_exact(size).map(rank));
    for _ in 0..groups.chosen {
        take_best(group_ranks);
    }
    for (rank, experts) in group_ranks.iter().zip(ranks.chunks_exact_mut(size)) {
        if rank.is_some() {
            experts.fill(None);
        }
    }
}

fn best(ranks: &[Option<f32>]) -> Option<f32> {
    Some(ranks.iter().flatten().copied().fold(f32::NEG_INFINITY, f32::max))
}

fn sum_of_two_best(ranks: &[Option<f32>]) -> Option<f32> {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &rank in ranks.iter().flatten() {
        if rank > best {
            (best, second) = (rank, best);
        } else if rank > second {
            second = rank;
        }
    }
    Some(best + second)
}

/// Takes out the largest rank, the first among equals, and returns its index.
fn take_best(ranks: &mut [Option<f32>]) -> Option<usize> {
    let there = ranks.iter().enumerate().filter_map(|(index, rank)| Some((index, (*rank)?)));
    let (index, _) = there.reduce(|best, other| if other.1 > best.1 { other } else { best })?;
    ranks[index] = None;
    Some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(chosen: usize) -> Router {
        Router { chosen, scores: Scores::Softmax, correction: None, groups: None, is_normalized: false, factor: 1.0 }
    }

    fn choices(router: &Router, logits: &[f32]) -> Vec<(usize, f32)> {
        let mut choices = Vec::new();
        router.choose(logits, &mut RouterScratch::default(), &mut choices);
        choices.into_iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    fn experts(router: &Router, logits: &[f32]) -> Vec<usize> {
        choices(router, logits).into_iter().map(|(expert, _)| expert).collect()
    }

    #[test]
    fn the_likeliest_are_chosen_and_the_lower_among_equals() {
        let logits = [0.0f32, 1.0, -1.0, 1.0, 1.0];
        let chosen = choices(&router(2), &logits);
        assert_eq!(chosen.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [1, 3]);
        let total: f32 = logits.iter().map(|x| x.exp()).sum();
        assert!(chosen.iter().all(|(_, weight)| (weight - 1f32.exp() / total).abs() < 1e-6));
        let normalized = choices(&Router { is_normalized: true, ..router(2) }, &[3.0, 1.0, -1.0]);
        assert!((normalized[0].1 + normalized[1].1 - 1.0).abs() < 1e-6 && normalized[0].0 == 0);
    }

    #[test]
    fn a_correction_chooses_but_does_not_weigh() {
        let router = Router { scores: Scores::Sigmoid, correction: Some(vec![0.0, 0.0, 1.0]), factor: 2.0, ..router(2) };
        assert_eq!(choices(&router, &[0.0, 0.0, 0.0]), [(2, 1.0), (0, 1.0)]);
    }

    #[test]
    fn weights_may_be_the_softmax_over_the_chosen_logits_alone() {
        let router = Router { scores: Scores::ChosenSoftmax, factor: 2.0, ..router(3) };
        // In a softmax over all experts, the smaller ones would be 0, and the lower number would be chosen.
        for offset in [0.0, 1000.0] {
            let chosen = choices(&router, &[-200.0, 1.0, -110.0, 3.0, -120.0].map(|logit| logit + offset));
            let total = 1.0 + (-2f32).exp();
            for ((expert, weight), expected) in chosen.into_iter().zip([(3, 2.0 / total), (1, 2.0 * (-2f32).exp() / total), (2, 0.0)]) {
                assert!(expert == expected.0 && (weight - expected.1).abs() < 1e-6, "{expert} has {weight}, not {expected:?}");
            }
        }
        assert_eq!(choices(&router, &[0.0, f32::NAN, 1.0]).len(), 3);
    }

    #[test]
    fn among_equal_groups_the_lower_are_chosen() {
        let of_rank = |rank| Router { groups: Some(ExpertGroups { count: 3, chosen: 2, rank }), ..router(3) };
        let [sums, bests] = [GroupRank::TwoBest, GroupRank::Best].map(of_rank);
        assert!([&sums, &bests].iter().all(|router| experts(router, &[0.0; 6]) == [0, 1, 2]));
        // The best single expert does not make its group the best one where two count.
        let logits = [5.0, -9.0, 4.9, 4.8, 4.9, 4.8];
        assert_eq!(experts(&sums, &logits), [2, 4, 3]);
        assert_eq!(experts(&bests, &logits), [0, 2, 3]);
    }

    /// The numbers are those of transformers' `DeepseekV3TopkRouter` with these settings, which returns a row's experts in no particular
    /// order.
    #[test]
    fn choices_and_weights_are_those_of_deepseek_v3() {
        let router = Router {
            chosen: 4,
            scores: Scores::Sigmoid,
            correction: Some(vec![0.24, 0.05, 0.03, -0.18, 0.01, -0.41, 0.1, 0.3, -0.43, 0.29, 0.16, 0.37]),
            groups: Some(ExpertGroups { count: 4, chosen: 2, rank: GroupRank::TwoBest }),
            is_normalized: true,
            factor: 2.5,
        };
        let rows = [
            (
                [0.61, 0.92, 1.14, -0.05, -0.52, 0.74, -0.12, -2.71, 0.73, 0.31, 0.51, 2.03],
                [(0, 0.565_114), (2, 0.660_825), (9, 0.503_142), (11, 0.770_92)],
            ),
            (
                [0.56, 0.02, 1.16, -0.16, -1.79, 1.54, 0.11, -0.28, -2.27, 1.37, 0.38, -1.04],
                [(0, 0.570_495), (2, 0.682_433), (9, 0.714_745), (10, 0.532_328)],
            ),
            (
                [0.84, -0.37, -1.62, 0.89, 1.09, -0.52, -0.79, -1.03, 0.93, 2.86, -2.37, 0.76],
                [(0, 0.638_639), (1, 0.373_548), (9, 0.864_819), (11, 0.622_993)],
            ),
            (
                [0.3, -0.31, -0.62, 1.03, 0.94, 1.72, -0.18, 0.94, -2.93, -1.83, -0.5, -0.64],
                [(0, 0.661_258), (1, 0.487_06), (6, 0.523_904), (7, 0.827_778)],
            ),
        ];
        for (logits, expected) in rows {
            let mut chosen = choices(&router, &logits);
            chosen.sort_by_key(|(expert, _)| *expert);
            for ((expert, weight), (expected_expert, expected_weight)) in chosen.into_iter().zip(expected) {
                assert!(
                    expert == expected_expert && (weight - expected_weight).abs() < 2e-6,
                    "{expert} has {weight}, not {expected_weight}"
                );
            }
        }
    }

    #[test]
    fn logits_that_are_no_numbers_choose_something() {
        let sigmoids = Router {
            scores: Scores::Sigmoid,
            correction: Some(vec![f32::NAN, f32::NEG_INFINITY, 0.0, f32::INFINITY]),
            groups: Some(ExpertGroups { count: 2, chosen: 1, rank: GroupRank::TwoBest }),
            ..router(2)
        };
        for router in [Router { is_normalized: true, ..router(2) }, Router { is_normalized: true, ..sigmoids }] {
            assert_eq!(choices(&router, &[f32::NAN; 4]).len(), 2);
            assert_eq!(choices(&router, &[f32::INFINITY, 0.0, f32::NEG_INFINITY, 0.0]).len(), 2);
        }
    }

    #[test]
    fn scores_of_zero_stay_zero() {
        let router = Router { scores: Scores::Sigmoid, is_normalized: true, ..router(2) };
        assert!(choices(&router, &[-200.0; 3]).iter().all(|(_, weight)| weight.is_finite()));
    }
}
