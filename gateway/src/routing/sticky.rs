//! A user's place, and the choice among several models that follows from it. No state: every coordinator gets the same result, also after a
//! restart.

use std::sync::Arc;

/// The name of a model that is served.
pub type Model = Arc<str>;

/// A user's place from 0 to 1, which is always the same. A different `salt` gives a different place.
pub fn place(salt: &str, user: &str) -> f64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(salt.len() as u64).to_le_bytes()).update(salt.as_bytes()).update(user.as_bytes());
    let bytes: [u8; 8] = hasher.finalize().as_bytes()[..8].try_into().expect("a digest has 32 bytes");
    // 53 bits, the precision of the number; never 0.
    ((u64::from_le_bytes(bytes) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
}

/// Models with their shares of users, by weighted rendezvous hashing (Schindelhauer and Schomaker, SPAA 2005): changing one model's weight
/// only moves users to or from that model. With two models, moving 5 % moves exactly those.
#[derive(Clone, Debug, PartialEq)]
pub struct Split(Vec<(Model, f64)>);

impl Split {
    /// Creates a split; `None` if it is empty, or a weight is not a positive number.
    pub fn new(weights: Vec<(Model, f64)>) -> Option<Self> {
        let sound = weights.iter().all(|(_, weight)| weight.is_finite() && *weight > 0.0);
        (sound && !weights.is_empty()).then_some(Self(weights))
    }

    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.0.iter().map(|(model, _)| model)
    }

    pub fn pick(&self, salt: &str, user: &str) -> &Model {
        // The first arrival of independent Poisson processes with these rates.
        let arrival = |(model, weight): &(Model, f64)| -place(&format!("{salt}\n{model}"), user).ln() / weight;
        let first = self.0.iter().min_by(|a, b| arrival(a).total_cmp(&arrival(b)));
        &first.expect("a split has a model").0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const USERS: usize = 4000;

    fn split(weights: &[f64]) -> Split {
        Split::new(weights.iter().enumerate().map(|(n, weight)| (format!("m{n}").into(), *weight)).collect()).unwrap()
    }

    fn picks(split: &Split, salt: &str) -> Vec<Model> {
        (0..USERS).map(|user| split.pick(salt, &format!("user-{user}")).clone()).collect()
    }

    #[test]
    fn wrong_weights_are_refused() {
        for weights in [vec![], vec![0.0], vec![1.0, -1.0], vec![f64::NAN], vec![f64::INFINITY]] {
            assert_eq!(Split::new(weights.into_iter().map(|weight| ("m".into(), weight)).collect()), None);
        }
    }

    #[test]
    fn places_are_spread_evenly() {
        let mut counts = [0_usize; 10];
        (0..10_000).for_each(|user| counts[(place("salt", &user.to_string()) * 10.0) as usize] += 1);
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// With two models, moving a share moves that share of users, all of them the same way.
        #[test]
        fn moving_five_percent_moves_five_percent(at in 1_u32..95, moved in 1_u32..5, salt in "[a-z]{1,6}") {
            let (from, to) = (f64::from(at), f64::from(at + moved));
            let (before, after) = (picks(&split(&[100.0 - from, from]), &salt), picks(&split(&[100.0 - to, to]), &salt));
            let changed: Vec<_> = before.iter().zip(&after).filter(|(before, after)| before != after).collect();
            prop_assert!(changed.iter().all(|(before, after)| &***before == "m0" && &***after == "m1"));
            let share = changed.len() as f64 / USERS as f64;
            let sigma = (f64::from(moved) / 100.0 / USERS as f64).sqrt();
            prop_assert!((share - f64::from(moved) / 100.0).abs() < 5.0 * sigma, "{share} moved instead of {moved} %");
        }

        /// With any number of models, a weight that grows only brings users to its model, and a new model takes them from all.
        #[test]
        fn a_weight_moves_users_of_its_own_model_only(mut weights in prop::collection::vec(1.0_f64..100.0, 2..6), grown in 1.1_f64..3.0, which in 0_usize..6) {
            let which = which % weights.len();
            let before = picks(&split(&weights), "salt");
            weights[which] *= grown;
            let after = picks(&split(&weights), "salt");
            let changed = before.iter().zip(&after).filter(|(before, after)| before != after);
            for (_, after) in changed {
                prop_assert_eq!(&**after, format!("m{which}"));
            }
            let share = after.iter().filter(|model| ***model == *format!("m{which}")).count() as f64 / USERS as f64;
            let wanted = weights[which] / weights.iter().sum::<f64>();
            prop_assert!((share - wanted).abs() < 5.0 * (wanted * (1.0 - wanted) / USERS as f64).sqrt() + 1e-9, "{} of {}", share, wanted);
        }
    }
}
