//! Ratings from comparisons in pairs, on Elo's scale: a model with 400 points more wins ten times as often. They are the likeliest ratings
//! (Bradley and Terry 1952, by Hunter's iteration 2004), so the order of the games does not matter, as it would with Elo's own steps.

/// One comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Game {
    pub first: usize,
    pub second: usize,
    /// The first one's score: 1, 0, or between.
    pub score: f64,
}

/// The rating of an average model.
const MEAN: f64 = 1000.0;
/// The draws against an average model that each model is given: without them, a model that always wins would be infinitely good.
const PRIOR_DRAWS: f64 = 1.0;
const ROUNDS: usize = 1000;

/// The ratings of `models` models.
pub fn ratings(models: usize, games: &[Game]) -> Vec<f64> {
    let mut strengths = vec![1.0_f64; models];
    let mut won = vec![PRIOR_DRAWS / 2.0; models];
    for game in games {
        won[game.first] += game.score;
        won[game.second] += 1.0 - game.score;
    }
    for _ in 0..ROUNDS {
        let mut expected: Vec<f64> = strengths.iter().map(|strength| PRIOR_DRAWS / (strength + 1.0)).collect();
        for game in games {
            let share = 1.0 / (strengths[game.first] + strengths[game.second]);
            expected[game.first] += share;
            expected[game.second] += share;
        }
        for ((strength, won), expected) in strengths.iter_mut().zip(&won).zip(&expected) {
            *strength = won / expected;
        }
        // Strengths that depend on the few draws alone would take long to converge.
        let scale = (strengths.iter().map(|strength| strength.ln()).sum::<f64>() / models as f64).exp();
        strengths.iter_mut().for_each(|strength| *strength /= scale);
    }
    strengths.iter().map(|strength| MEAN + 400.0 * strength.log10()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn game(first: usize, second: usize, score: f64) -> Game {
        Game { first, second, score }
    }

    #[test]
    fn who_wins_ten_times_as_often_has_400_more() {
        let games: Vec<_> = (0..1100).map(|n| game(0, 1, f64::from(u8::from(n % 11 != 0)))).collect();
        let ratings = ratings(2, &games);
        assert!((ratings[0] - ratings[1] - 400.0).abs() < 10.0, "{ratings:?}");
        assert!((ratings[0] + ratings[1] - 2.0 * MEAN).abs() < 1.0, "{ratings:?}");
    }

    #[test]
    fn who_never_plays_is_average_and_who_always_wins_is_finite() {
        let ratings = ratings(3, &[game(0, 1, 1.0), game(0, 1, 1.0)]);
        assert!((ratings[2] - MEAN).abs() < 1e-6);
        assert!(ratings[0] > MEAN && ratings[0] < MEAN + 400.0 && ratings[1] < MEAN, "{ratings:?}");
    }

    proptest! {
        #[test]
        fn the_order_of_games_does_not_matter(scores in prop::collection::vec((0_usize..3, 0_usize..3, 0.0..=1.0_f64), 1..40)) {
            let games: Vec<_> = scores.into_iter().filter(|(a, b, _)| a != b).map(|(a, b, score)| game(a, b, score)).collect();
            let mut turned = games.clone();
            turned.reverse();
            for (one, other) in ratings(3, &games).into_iter().zip(ratings(3, &turned)) {
                prop_assert!((one - other).abs() < 1e-6 && one.is_finite());
            }
        }
    }
}
