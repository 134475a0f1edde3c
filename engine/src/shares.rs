//! Fairness between groups, by tokens served: virtual token counters (Sheng et al., OSDI 2024), with weights.
//!
//! A group that gets ahead of the others yields to them until they have caught up. A group that comes (back) starts level with the others:
//! no group saves up turns while it asks for nothing. Priorities are separate: a group's share is one of its own priority.

use std::collections::{BTreeMap, BTreeSet};
use tidemill_proto::urgency::Urgency;

/// The tokens, at a weight of 1, by which a group may be ahead before it yields. Within that, limits alone decide.
const AHEAD_MAX: f64 = 1024.0;

/// A group at one priority.
pub type Share = (u8, u64);

#[derive(Clone, Debug, Default)]
pub struct Shares {
    groups: BTreeMap<Share, Served>,
}

#[derive(Clone, Debug, Default)]
struct Served {
    /// Tokens served, by weight.
    tokens: f64,
    /// The number of jobs present.
    jobs: usize,
}

pub fn share(urgency: &Urgency) -> Share {
    (urgency.priority, urgency.group)
}

impl Shares {
    /// Notes that a job came.
    pub fn enter(&mut self, urgency: &Urgency) {
        let level = self.level(urgency.priority);
        let served = self.groups.entry(share(urgency)).or_default();
        if served.jobs == 0 {
            served.tokens = served.tokens.max(level.unwrap_or(0.0));
        }
        served.jobs += 1;
    }

    /// Notes that a job is gone.
    pub fn leave(&mut self, urgency: &Urgency) {
        let served = self.groups.get_mut(&share(urgency)).expect("it came before");
        served.jobs -= 1;
        // A departing group's lead over the others is remembered only while they are present.
        let levels: BTreeMap<u8, f64> = self.groups.keys().filter_map(|(priority, _)| Some((*priority, self.level(*priority)?))).collect();
        self.groups.retain(|(priority, _), served| served.jobs > 0 || levels.get(priority).is_some_and(|level| served.tokens > *level));
    }

    /// Notes that a job's tokens were computed.
    pub fn serve(&mut self, urgency: &Urgency, tokens: usize) {
        if let Some(served) = self.groups.get_mut(&share(urgency)) {
            served.tokens += tokens as f64 / f64::from(urgency.weight);
        }
    }

    /// The groups that yield.
    pub fn over(&self) -> BTreeSet<Share> {
        let mut levels: BTreeMap<u8, f64> = BTreeMap::new();
        for ((priority, _), served) in self.groups.iter().filter(|(_, served)| served.jobs > 0) {
            let level = levels.entry(*priority).or_insert(f64::INFINITY);
            *level = level.min(served.tokens);
        }
        let over =
            |((priority, _), served): &(&Share, &Served)| levels.get(priority).is_some_and(|level| served.tokens > level + AHEAD_MAX);
        self.groups.iter().filter(over).map(|(share, _)| *share).collect()
    }

    /// The least that a present group of this priority was served.
    fn level(&self, priority: u8) -> Option<f64> {
        let present = self.groups.range((priority, 0)..=(priority, u64::MAX)).filter(|(_, served)| served.jobs > 0);
        present.map(|(_, served)| served.tokens).min_by(f64::total_cmp)
    }

    /// Panics unless exactly these jobs are present. For tests.
    pub fn check_integrity<'a>(&self, jobs: impl IntoIterator<Item = &'a Urgency>) {
        let mut counts: BTreeMap<Share, usize> = BTreeMap::new();
        for urgency in jobs {
            *counts.entry(share(urgency)).or_default() += 1;
        }
        for (share, served) in &self.groups {
            assert_eq!(served.jobs, counts.remove(share).unwrap_or(0), "jobs of group {share:?}");
            assert!(served.tokens.is_finite());
        }
        assert!(counts.is_empty(), "jobs of unknown groups: {counts:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(group: u64, weight: f32) -> Urgency {
        Urgency { group, weight, ..Urgency::default() }
    }

    #[test]
    fn a_group_far_ahead_yields_until_the_others_have_caught_up() {
        let (mut shares, flood, other) = (Shares::default(), of(1, 1.0), of(2, 1.0));
        shares.enter(&flood);
        shares.serve(&flood, 100_000);
        assert!(shares.over().is_empty(), "it is alone");
        shares.enter(&other);
        shares.serve(&flood, 1000);
        assert!(shares.over().is_empty(), "the newcomer starts level");
        shares.serve(&flood, 100);
        assert_eq!(shares.over(), BTreeSet::from([share(&flood)]));
        shares.serve(&other, 100);
        assert!(shares.over().is_empty());
        shares.check_integrity([&flood, &other]);
    }

    #[test]
    fn weights_divide_and_priorities_are_apart() {
        let (mut shares, heavy, light) = (Shares::default(), of(1, 4.0), of(2, 1.0));
        let above = Urgency { priority: 3, ..of(3, 1.0) };
        for urgency in [&heavy, &light, &above] {
            shares.enter(urgency);
            shares.serve(urgency, 4000);
        }
        assert_eq!(shares.over(), BTreeSet::from([share(&light)]), "a quarter of the weight, a quarter of the share");
    }

    #[test]
    fn leaving_for_a_moment_does_not_wipe_out_what_a_group_has_had() {
        let (mut shares, flood, other) = (Shares::default(), of(1, 1.0), of(2, 1.0));
        shares.enter(&flood);
        shares.enter(&other);
        shares.serve(&flood, 5000);
        shares.leave(&flood);
        shares.enter(&flood);
        assert_eq!(shares.over(), BTreeSet::from([share(&flood)]));
        shares.leave(&flood);
        shares.leave(&other);
        assert!(shares.groups.is_empty(), "with nobody to compare with, nothing is kept");
    }
}
