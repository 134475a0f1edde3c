//! The block that was used least often since it came leaves first; among equals the least recently used one, and among equally old ones the
//! later one of a chain.

use super::{EvictionPolicy, Use};
use std::{cmp::Reverse, collections::BTreeSet};
use tidemill_proto::block::BlockKey;

/// The candidates in the order in which they leave. Every operation is O(log n).
#[derive(Debug)]
pub struct Lfu {
    queue: BTreeSet<Rank>,
    /// The entries by slot; `None` for empty slots.
    entries: Vec<Option<Entry>>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The number of operations that used the block.
    uses: u64,
    last: Use,
    pinned: bool,
}

/// The order of candidates: (uses, operation, place in its chain, slot).
type Rank = (u64, u64, Reverse<u32>, u32);

impl Entry {
    fn rank(&self, slot: u32) -> Rank {
        (self.uses, self.last.at, Reverse(self.last.place), slot)
    }
}

impl Lfu {
    /// A policy for slots `0..slots`, none of which is a candidate.
    pub fn new(slots: u32) -> Self {
        Self { queue: BTreeSet::new(), entries: vec![None; slots as usize] }
    }

    fn entry(&mut self, slot: u32) -> &mut Entry {
        self.entries[slot as usize].as_mut().unwrap_or_else(|| panic!("slot {slot} holds nothing"))
    }
}

impl EvictionPolicy for Lfu {
    fn insert(&mut self, slot: u32, _key: &BlockKey, used: Use) {
        let entry = Entry { uses: 1, last: used, pinned: false };
        let earlier = self.entries[slot as usize].replace(entry);
        assert!(earlier.is_none_or(|earlier| earlier.pinned), "slot {slot} is a candidate already");
        self.queue.insert(entry.rank(slot));
    }

    fn pin(&mut self, slot: u32) {
        let entry = self.entry(slot);
        assert!(!entry.pinned, "slot {slot} is no candidate");
        entry.pinned = true;
        let rank = entry.rank(slot);
        self.queue.remove(&rank);
    }

    fn unpin(&mut self, slot: u32, used: Use) {
        let entry = self.entry(slot);
        assert!(entry.pinned, "slot {slot} is a candidate already");
        entry.uses += u64::from(used.at > entry.last.at);
        (entry.last, entry.pinned) = (used, false);
        let rank = entry.rank(slot);
        self.queue.insert(rank);
    }

    fn evict(&mut self) -> Option<u32> {
        let (.., slot) = self.queue.pop_first()?;
        self.entries[slot as usize] = None;
        Some(slot)
    }

    fn remove(&mut self, slot: u32) {
        self.pin(slot);
        self.entries[slot as usize] = None;
    }

    fn is_candidate(&self, slot: u32) -> bool {
        self.entries[slot as usize].is_some_and(|entry| !entry.pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BlockKey = BlockKey([0; 16]);

    #[test]
    fn the_least_often_used_leaves_first_and_of_equals_the_oldest_chain_end() {
        let mut lfu = Lfu::new(4);
        for (slot, used) in (0..).zip(Use::of_chain(1, 3)) {
            lfu.insert(slot, &KEY, used);
        }
        lfu.insert(3, &KEY, Use::in_chain(2, 0, 1));
        for at in [1, 3] {
            lfu.pin(2);
            lfu.unpin(2, Use::in_chain(at, 0, 1));
        }
        let order: Vec<u32> = std::iter::from_fn(|| lfu.evict()).collect();
        assert_eq!(order, [1, 0, 3, 2], "slot 2 was used by two operations, the others by one");
    }
}
