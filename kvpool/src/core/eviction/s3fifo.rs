//! S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: *FIFO queues are all you need for cache eviction*, SOSP '23, §4.1).
//!
//! ```text
//!               first time                 used at most once
//!   insert ──────────────────► small (10%) ──────────────────► out, remembered as ghost
//!      │                         │ used more than once
//!      │ ghost                   ▼
//!      └──────────────────────► main ──► out unless used since, in which case it goes round once more
//! ```
//!
//! A pinned block leaves its queue and returns to the same position. The paper queues objects; this queues operations, and the
//! blocks of one operation leave from the end of the chain.

use super::{EvictionPolicy, Use, ghosts::Ghosts};
use std::{cmp::Reverse, collections::BTreeSet};
use tidemill_proto::block::BlockKey;

/// The S3-FIFO policy. Every operation is O(log n); an eviction also pays O(log n) for each use before it that moved a block.
#[derive(Debug)]
pub struct S3Fifo {
    small: BTreeSet<Rank>,
    main: BTreeSet<Rank>,
    /// The entries by slot; `None` for empty slots.
    entries: Vec<Option<Entry>>,
    /// Blocks that left through the small queue.
    ghosts: Ghosts<()>,
    small_max: usize,
    /// Number of the latest operation.
    latest: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: BlockKey,
    queue: Queue,
    /// The operation that moved it to its queue, and its place in that operation's chain.
    entered: (u64, Reverse<u32>),
    last: Use,
    /// Uses since it entered its queue, up to [`USES_MAX`].
    uses: u8,
    pinned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Queue {
    Small,
    Main,
}

/// The order within a queue: (operation that queued it, place in its chain, slot).
type Rank = (u64, Reverse<u32>, u32);

const USES_MAX: u8 = 3;

impl Entry {
    fn rank(&self, slot: u32) -> Rank {
        (self.entered.0, self.entered.1, slot)
    }
}

impl S3Fifo {
    /// A policy for slots `0..slots`, none of which is a candidate.
    pub fn new(slots: u32) -> Self {
        let slots = slots as usize;
        let small_max = slots / 10;
        Self {
            small: BTreeSet::new(),
            main: BTreeSet::new(),
            entries: vec![None; slots],
            ghosts: Ghosts::new(slots - small_max),
            small_max,
            latest: 0,
        }
    }

    fn entry(&mut self, slot: u32) -> &mut Entry {
        self.entries[slot as usize].as_mut().unwrap_or_else(|| panic!("slot {slot} holds nothing"))
    }

    fn queue(&mut self, queue: Queue) -> &mut BTreeSet<Rank> {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// Puts a block at the young end of the main queue.
    fn enter_main(&mut self, slot: u32, uses: u8) {
        let latest = self.latest;
        let entry = self.entry(slot);
        (entry.queue, entry.uses, entry.entered.0) = (Queue::Main, uses, latest);
        let rank = entry.rank(slot);
        self.main.insert(rank);
    }

    fn forget(&mut self, slot: u32) -> Entry {
        self.entries[slot as usize].take().expect("queues list slots that hold something")
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, slot: u32, key: &BlockKey, used: Use) {
        self.latest = self.latest.max(used.at);
        let queue = if self.ghosts.take(key).is_some() { Queue::Main } else { Queue::Small };
        let entry = Entry { key: *key, queue, entered: (self.latest, Reverse(used.place)), last: used, uses: 0, pinned: false };
        let earlier = self.entries[slot as usize].replace(entry);
        assert!(earlier.is_none_or(|earlier| earlier.pinned), "slot {slot} is a candidate already");
        self.queue(queue).insert(entry.rank(slot));
    }

    fn pin(&mut self, slot: u32) {
        let entry = self.entry(slot);
        assert!(!entry.pinned, "slot {slot} is no candidate");
        entry.pinned = true;
        let (queue, rank) = (entry.queue, entry.rank(slot));
        self.queue(queue).remove(&rank);
    }

    fn unpin(&mut self, slot: u32, used: Use) {
        self.latest = self.latest.max(used.at);
        let entry = self.entry(slot);
        assert!(entry.pinned, "slot {slot} is a candidate already");
        if used.at > entry.last.at {
            entry.uses = USES_MAX.min(entry.uses + 1);
        }
        (entry.last, entry.pinned) = (used, false);
        let (queue, rank) = (entry.queue, entry.rank(slot));
        self.queue(queue).insert(rank);
    }

    fn evict(&mut self) -> Option<u32> {
        loop {
            if self.small.len() > self.small_max || self.main.is_empty() {
                let (.., slot) = self.small.pop_first()?;
                if self.entry(slot).uses > 1 {
                    self.enter_main(slot, 0);
                    continue;
                }
                let entry = self.forget(slot);
                self.ghosts.add(entry.key, ());
                return Some(slot);
            }
            let (.., slot) = self.main.pop_first()?;
            match self.entry(slot).uses {
                0 => {
                    self.forget(slot);
                    return Some(slot);
                }
                uses => self.enter_main(slot, uses - 1),
            }
        }
    }

    fn remove(&mut self, slot: u32) {
        self.pin(slot);
        self.forget(slot);
    }

    fn resize(&mut self, slots: u32) {
        let slots = slots as usize;
        self.small_max = slots / 10;
        self.ghosts.set_max(slots - self.small_max);
    }

    fn is_candidate(&self, slot: u32) -> bool {
        self.entries[slot as usize].is_some_and(|entry| !entry.pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn insert(policy: &mut S3Fifo, slot: u32, at: u64) {
        policy.insert(slot, &key(slot as u8), Use::in_chain(at, 0, 1));
    }

    fn reuse(policy: &mut S3Fifo, slot: u32, at: u64) {
        policy.pin(slot);
        policy.unpin(slot, Use::in_chain(at, 0, 1));
    }

    #[test]
    fn what_is_used_once_passes_through_and_what_is_used_more_stays() {
        let mut policy = S3Fifo::new(10);
        (0..4).for_each(|slot| insert(&mut policy, slot, 1 + u64::from(slot)));
        for at in [5, 6] {
            reuse(&mut policy, 0, at);
        }
        reuse(&mut policy, 1, 7);
        assert_eq!(policy.evict(), Some(1), "one use more is not enough to enter the main queue");
        assert_eq!(policy.evict(), Some(2));
        assert_eq!(policy.evict(), Some(0), "the small queue has no more than its share: the main queue's turn");
        assert_eq!((policy.evict(), policy.evict()), (Some(3), None));
    }

    #[test]
    fn a_ghost_enters_the_main_queue_and_goes_round_when_used() {
        let mut policy = S3Fifo::new(10);
        insert(&mut policy, 0, 1);
        assert_eq!(policy.evict(), Some(0));
        insert(&mut policy, 0, 2);
        insert(&mut policy, 1, 3);
        insert(&mut policy, 2, 4);
        reuse(&mut policy, 0, 5);
        assert_eq!(policy.evict(), Some(1), "the small queue is over its share");
        assert_eq!(policy.evict(), Some(0), "the only one in the main queue goes round and leaves");
        assert_eq!(policy.evict(), Some(2));
    }
}
