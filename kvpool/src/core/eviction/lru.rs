//! The least recently used block leaves first; of equally old ones, the later one of a chain.

use super::{EvictionPolicy, Use};
use std::{cmp::Reverse, collections::BTreeSet};
use tidemill_proto::block::BlockKey;

/// The candidates in the order in which they leave. Every operation is O(log n).
#[derive(Debug)]
pub struct Lru {
    queue: BTreeSet<Rank>,
    /// The ranks by slot; `None` for slots that are not candidates.
    ranks: Vec<Option<Rank>>,
}

/// The order of candidates: (operation, place in its chain, slot).
type Rank = (u64, Reverse<u32>, u32);

impl Lru {
    /// A policy for slots `0..slots`, none of which is a candidate.
    pub fn new(slots: u32) -> Self {
        Self { queue: BTreeSet::new(), ranks: vec![None; slots as usize] }
    }

    fn add(&mut self, slot: u32, Use { at, place, .. }: Use) {
        let rank = (at, Reverse(place), slot);
        let earlier = self.ranks[slot as usize].replace(rank);
        assert!(earlier.is_none(), "slot {slot} is a candidate already");
        self.queue.insert(rank);
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, slot: u32, _key: &BlockKey, used: Use) {
        self.add(slot, used);
    }

    fn pin(&mut self, slot: u32) {
        self.remove(slot);
    }

    fn unpin(&mut self, slot: u32, used: Use) {
        self.add(slot, used);
    }

    fn evict(&mut self) -> Option<u32> {
        let (.., slot) = self.queue.pop_first()?;
        self.ranks[slot as usize] = None;
        Some(slot)
    }

    fn remove(&mut self, slot: u32) {
        let rank = self.ranks[slot as usize].take();
        self.queue.remove(&rank.unwrap_or_else(|| panic!("slot {slot} is no candidate")));
    }

    fn is_candidate(&self, slot: u32) -> bool {
        self.ranks[slot as usize].is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BlockKey = BlockKey([0; 16]);

    fn drain(lru: &mut Lru) -> Vec<u32> {
        std::iter::from_fn(|| lru.evict()).collect()
    }

    fn at(at: u64) -> Use {
        Use::in_chain(at, 0, 1)
    }

    #[test]
    fn the_oldest_use_leaves_first() {
        let mut lru = Lru::new(4);
        for (time, slot) in (0..).zip([2, 0, 3, 1]) {
            lru.insert(slot, &KEY, at(time));
        }
        lru.pin(0);
        lru.unpin(0, at(9));
        assert_eq!(drain(&mut lru), [2, 3, 1, 0]);
        assert_eq!(lru.evict(), None);
    }

    #[test]
    fn an_equally_old_chain_leaves_from_its_end_in_whatever_order_it_came() {
        let mut lru = Lru::new(5);
        lru.insert(4, &KEY, at(1));
        for place in [2, 0, 3, 1] {
            lru.insert(place, &KEY, Use::in_chain(0, place, 4));
        }
        assert_eq!(drain(&mut lru), [3, 2, 1, 0, 4]);
    }

    #[test]
    fn what_is_pinned_or_removed_never_leaves() {
        let mut lru = Lru::new(3);
        for slot in 0..3 {
            lru.insert(slot, &KEY, at(0));
        }
        lru.pin(1);
        lru.remove(0);
        assert_eq!(drain(&mut lru), [2]);
        lru.unpin(1, at(1));
        assert_eq!(drain(&mut lru), [1]);
    }

    #[test]
    #[should_panic(expected = "candidate already")]
    fn inserting_twice_is_a_bug() {
        let mut lru = Lru::new(1);
        lru.insert(0, &KEY, at(0));
        lru.insert(0, &KEY, at(0));
    }
}
