//! Votes on one model's answers, by tenant: if several vote, none decides by itself.
//!
//! The rule: if more than one tenant has voted on either model of a rollout, then at most as many votes of one tenant on a model count as
//! all others have cast on it together, in that tenant's proportion. So no tenant has more than half. Operators are not a tenant: their
//! votes count in full. A tenant that is the only voter decides.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The maximum number of tenants that are counted separately. All others count as one: it has at most half, like every tenant.
const TENANTS_MAX: usize = 32;

/// The source of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voter<'a> {
    Operator,
    /// `None` if no key is needed: all clients are then one tenant.
    Tenant(Option<&'a str>),
}

/// Thumbs up, and thumbs down.
type Thumbs = [u64; 2];

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Votes {
    operators: Thumbs,
    /// Tenants' votes, by the digests of their names.
    tenants: BTreeMap<u64, Thumbs>,
    more_tenants: Thumbs,
}

impl Votes {
    pub fn add(&mut self, voter: Voter<'_>, up: u64, down: u64) {
        match voter {
            Voter::Operator => add(&mut self.operators, [up, down]),
            Voter::Tenant(name) => self.add_tenant(digest(name.unwrap_or_default()), [up, down]),
        }
    }

    pub fn merge(&mut self, other: &Self) {
        add(&mut self.operators, other.operators);
        other.tenants.iter().for_each(|(&tenant, &thumbs)| self.add_tenant(tenant, thumbs));
        add(&mut self.more_tenants, other.more_tenants);
    }

    fn add_tenant(&mut self, tenant: u64, thumbs: Thumbs) {
        let is_full = self.tenants.len() >= TENANTS_MAX;
        match self.tenants.get_mut(&tenant) {
            Some(known) => add(known, thumbs),
            None if is_full => add(&mut self.more_tenants, thumbs),
            None => drop(self.tenants.insert(tenant, thumbs)),
        }
    }

    /// The thumbs up and down that count, given the votes on the rollout's other model.
    pub fn counted(&self, on_the_other: &Self) -> (u64, u64) {
        let all = self.all();
        let most = self.tenants.values().chain([&self.more_tenants]).max_by_key(|thumbs| sum(**thumbs)).copied().unwrap_or_default();
        let others = sum(all) - sum(most);
        if sum(most) <= others || self.is_alone(on_the_other) {
            return (all[0], all[1]);
        }
        let part = |n: u64| u64::try_from(u128::from(n) * u128::from(others) / u128::from(sum(most))).unwrap_or(n);
        (all[0] - most[0] + part(most[0]), all[1] - most[1] + part(most[1]))
    }

    /// Whether all votes on both models are one tenant's.
    fn is_alone(&self, other: &Self) -> bool {
        let plain = |votes: &Self| sum(votes.operators) == 0 && sum(votes.more_tenants) == 0;
        let mut tenants = self.tenants.keys().chain(other.tenants.keys());
        let first = tenants.next();
        plain(self) && plain(other) && tenants.all(|tenant| Some(tenant) == first)
    }

    fn all(&self) -> Thumbs {
        self.tenants.values().chain([&self.operators, &self.more_tenants]).fold(Thumbs::default(), |mut all, thumbs| {
            add(&mut all, *thumbs);
            all
        })
    }
}

/// Adds votes, up to half of the numeric range, so that sums of two fit.
fn add(to: &mut Thumbs, thumbs: Thumbs) {
    to.iter_mut().zip(thumbs).for_each(|(to, more)| *to = to.saturating_add(more).min(u64::MAX / 2));
}

fn sum([up, down]: Thumbs) -> u64 {
    up + down
}

fn digest(name: &str) -> u64 {
    u64::from_le_bytes(*blake3::hash(name.as_bytes()).as_bytes().first_chunk().expect("a digest has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn votes(given: &[(&str, u64, u64)]) -> Votes {
        let mut votes = Votes::default();
        for &(name, up, down) in given {
            votes.add(if name == "operators" { Voter::Operator } else { Voter::Tenant(Some(name)) }, up, down);
        }
        votes
    }

    #[test]
    fn a_tenant_has_at_most_half_where_others_vote() {
        let none = Votes::default();
        assert_eq!(votes(&[("a", 0, 100), ("b", 3, 1)]).counted(&none), (3, 5), "4 of 100");
        assert_eq!(votes(&[("a", 60, 40), ("b", 10, 0)]).counted(&none), (16, 4), "in its proportion");
        assert_eq!(votes(&[("a", 5, 5), ("b", 6, 0), ("c", 0, 6)]).counted(&none), (11, 11), "none has more than half");
        assert_eq!(votes(&[("a", 0, 100)]).counted(&none), (0, 100), "there is nobody else to ask");
        assert_eq!(votes(&[("a", 0, 100)]).counted(&votes(&[("a", 40, 0)])), (0, 100));
        assert_eq!(votes(&[("a", 0, 100)]).counted(&votes(&[("a", 40, 0), ("b", 1, 0)])), (0, 0), "others vote, and not for this");
        assert_eq!(votes(&[("operators", 0, 100)]).counted(&none), (0, 100));
        assert_eq!(votes(&[("operators", 50, 0), ("a", 0, 100)]).counted(&none), (50, 50));
        assert_eq!(votes(&[]).counted(&none), (0, 0));
    }

    #[test]
    fn tenants_beyond_those_that_are_told_apart_have_half_together() {
        let names: Vec<String> = (0..TENANTS_MAX + 50).map(|n| n.to_string()).collect();
        let mut many = Votes::default();
        names[..TENANTS_MAX].iter().for_each(|name| many.add(Voter::Tenant(Some(name)), 1, 0));
        names[TENANTS_MAX..].iter().for_each(|name| many.add(Voter::Tenant(Some(name)), 0, 1));
        assert_eq!(many.counted(&Votes::default()), (TENANTS_MAX as u64, TENANTS_MAX as u64));
        assert!(serde_json::to_vec(&many).unwrap().len() < 1200, "it is told to others");
        assert_eq!(serde_json::from_slice::<Votes>(&serde_json::to_vec(&many).unwrap()).unwrap(), many);
    }

    proptest! {
        #[test]
        fn coordinators_together_count_what_one_would_have(given in prop::collection::vec((0..5u8, 0..9u64, 0..9u64), 0..40)) {
            let (mut parts, mut whole) = ([Votes::default(), Votes::default()], Votes::default());
            for (number, (tenant, up, down)) in given.iter().enumerate() {
                let name = tenant.to_string();
                parts[number % 2].add(Voter::Tenant(Some(&name)), *up, *down);
                whole.add(Voter::Tenant(Some(&name)), *up, *down);
            }
            let [mut sum, other] = parts;
            sum.merge(&other);
            prop_assert_eq!(sum.counted(&Votes::default()), whole.counted(&Votes::default()));
            prop_assert_eq!(sum, whole);
        }

        #[test]
        fn no_number_is_too_large(given in prop::collection::vec((0..3u8, any::<u64>(), any::<u64>()), 0..6)) {
            let mut votes = Votes::default();
            for (tenant, up, down) in given {
                votes.add(Voter::Tenant(Some(&tenant.to_string())), up, down);
            }
            votes.merge(&votes.clone());
            let _ = votes.counted(&votes);
        }
    }
}
