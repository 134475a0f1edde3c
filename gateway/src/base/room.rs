//! Fair shares of a room that tenants fill together.
//!
//! A tenant's share is the room divided by the number of tenants that have anything in it. A tenant may also use room that others leave
//! free; but when the room is full, a tenant that wants more than its share makes room by itself, and one that wants less takes it from the
//! tenant that has most. So no tenant loses any of its share to others, and a flood displaces only itself.

use std::{collections::HashMap, hash::Hash};

/// The amount that each tenant holds, in the unit of the room.
#[derive(Clone, Debug)]
pub struct Shares<T> {
    held: HashMap<T, u64>,
    total: u64,
}

impl<T> Default for Shares<T> {
    fn default() -> Self {
        Self { held: HashMap::new(), total: 0 }
    }
}

impl<T: Clone + Eq + Hash + Ord> Shares<T> {
    pub fn add(&mut self, tenant: &T, amount: u64) {
        if amount > 0 {
            *self.held.entry(tenant.clone()).or_default() += amount;
            self.total += amount;
        }
    }

    /// Takes an amount from a tenant. Panics if it holds less.
    pub fn take(&mut self, tenant: &T, amount: u64) {
        if amount > 0 {
            let held = self.held.get_mut(tenant).expect("only what was added is taken");
            *held -= amount;
            self.total -= amount;
            if *held == 0 {
                self.held.remove(tenant);
            }
        }
    }

    pub fn held(&self, tenant: &T) -> u64 {
        self.held.get(tenant).copied().unwrap_or(0)
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// A tenant's part of a room of this size, once `newcomer` is in it.
    pub fn share(&self, room: u64, newcomer: &T) -> u64 {
        let others = self.held.len() as u64 - u64::from(self.held.contains_key(newcomer));
        room / (others + 1)
    }

    /// The tenants that may lose data so that `newcomer` gets `more`, first those that should: the newcomer itself if it would have more
    /// than its share, else those that have more than theirs.
    pub fn losers(&self, room: u64, newcomer: &T, more: u64) -> Vec<T> {
        let share = self.share(room, newcomer);
        if self.held(newcomer) + more > share {
            return vec![newcomer.clone()];
        }
        let mut over: Vec<_> = self.held.iter().filter(|(_, held)| **held > share).collect();
        over.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        over.into_iter().map(|(tenant, _)| tenant.clone()).collect()
    }

    #[cfg(test)]
    pub(crate) fn check_integrity(&self) {
        assert_eq!(self.total, self.held.values().sum::<u64>());
        assert!(self.held.values().all(|held| *held > 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn whoever_has_more_than_its_share_makes_room_by_itself() {
        let mut shares = Shares::default();
        shares.add(&"free", 90);
        assert_eq!(shares.losers(100, &"free", 20), ["free"], "alone it may have everything, and no more");
        shares.add(&"paid", 10);
        assert_eq!(shares.losers(100, &"paid", 20), ["free"], "what was borrowed is given back");
        assert_eq!(shares.losers(100, &"paid", 50), ["paid"]);
        shares.take(&"free", 50);
        assert_eq!(shares.losers(100, &"free", 20), ["free"]);
        assert_eq!(shares.share(100, &"third"), 33);
        assert_eq!(shares.losers(100, &"third", 30), ["free"]);
        shares.take(&"paid", 10);
        assert_eq!(shares.held(&"paid"), 0);
        shares.check_integrity();
    }

    proptest! {
        /// A room that evicts by these rules: regardless of others, a tenant that stays within a share of all of them loses nothing.
        #[test]
        fn a_tenant_within_its_share_loses_nothing(mine in prop::collection::vec(1u64..5, 0..5), theirs in prop::collection::vec((0usize..4, 1u64..60), 1..200)) {
            const ROOM: u64 = 100;
            let mut shares: Shares<usize> = Shares::default();
            let mut kept: HashMap<usize, VecDeque<u64>> = HashMap::new();
            let mut put = |tenant: usize, size: u64| {
                'more: while shares.total() + size > ROOM {
                    for loser in shares.losers(ROOM, &tenant, size) {
                        if let Some(oldest) = kept.get_mut(&loser).and_then(VecDeque::pop_front) {
                            shares.take(&loser, oldest);
                            continue 'more;
                        }
                    }
                    return shares.clone();
                }
                shares.add(&tenant, size);
                kept.entry(tenant).or_default().push_back(size);
                shares.check_integrity();
                shares.clone()
            };
            // With at most five tenants, a share is never less than 20, and this tenant has less.
            let mut has = 0;
            for size in mine {
                has += size;
                prop_assert_eq!(put(9, size).held(&9), has);
            }
            for (tenant, size) in theirs {
                let after = put(tenant, size);
                prop_assert_eq!(after.held(&9), has);
                prop_assert!(after.total() <= ROOM);
            }
        }
    }
}
