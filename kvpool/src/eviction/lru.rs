//! Least recently used, as a doubly linked list threaded through an array: every operation is O(1).

use super::EvictionPolicy;
use tidemill_proto::block::BlockKey;

/// The candidates from oldest to newest use.
#[derive(Debug)]
pub struct Lru {
    /// One per slot, and the list's sentinel at the end: `next` of the sentinel is the oldest.
    nodes: Vec<Node>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    prev: u32,
    next: u32,
}

/// `next` of a slot that is not in the list.
const OUTSIDE: u32 = u32::MAX;

impl Lru {
    /// For slots `0..slots`, none of them a candidate.
    pub fn new(slots: u32) -> Self {
        assert!(slots < OUTSIDE, "slot numbers need one value to spare");
        let mut nodes = vec![Node { prev: OUTSIDE, next: OUTSIDE }; slots as usize + 1];
        nodes[slots as usize] = Node { prev: slots, next: slots };
        Self { nodes }
    }

    fn sentinel(&self) -> u32 {
        self.nodes.len() as u32 - 1
    }

    fn push_newest(&mut self, slot: u32) {
        assert!(!self.is_candidate(slot), "slot {slot} is a candidate already");
        let sentinel = self.sentinel();
        let newest = self.nodes[sentinel as usize].prev;
        self.nodes[slot as usize] = Node { prev: newest, next: sentinel };
        self.nodes[newest as usize].next = slot;
        self.nodes[sentinel as usize].prev = slot;
    }

    fn unlink(&mut self, slot: u32) {
        assert!(self.is_candidate(slot), "slot {slot} is no candidate");
        let Node { prev, next } = self.nodes[slot as usize];
        self.nodes[prev as usize].next = next;
        self.nodes[next as usize].prev = prev;
        self.nodes[slot as usize] = Node { prev: OUTSIDE, next: OUTSIDE };
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, slot: u32, _key: &BlockKey) {
        self.push_newest(slot);
    }

    fn pin(&mut self, slot: u32) {
        self.unlink(slot);
    }

    fn unpin(&mut self, slot: u32) {
        self.push_newest(slot);
    }

    fn evict(&mut self) -> Option<u32> {
        let oldest = self.nodes[self.sentinel() as usize].next;
        if oldest == self.sentinel() {
            return None;
        }
        self.unlink(oldest);
        Some(oldest)
    }

    fn remove(&mut self, slot: u32) {
        self.unlink(slot);
    }

    fn is_candidate(&self, slot: u32) -> bool {
        slot < self.sentinel() && self.nodes[slot as usize].next != OUTSIDE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BlockKey = BlockKey([0; 16]);

    fn drain(lru: &mut Lru) -> Vec<u32> {
        std::iter::from_fn(|| lru.evict()).collect()
    }

    #[test]
    fn the_oldest_use_leaves_first() {
        let mut lru = Lru::new(4);
        for slot in [2, 0, 3, 1] {
            lru.insert(slot, &KEY);
        }
        lru.pin(0);
        lru.unpin(0);
        assert_eq!(drain(&mut lru), [2, 3, 1, 0]);
        assert_eq!(lru.evict(), None);
    }

    #[test]
    fn what_is_pinned_or_removed_never_leaves() {
        let mut lru = Lru::new(3);
        for slot in 0..3 {
            lru.insert(slot, &KEY);
        }
        lru.pin(1);
        lru.remove(0);
        assert_eq!(drain(&mut lru), [2]);
        lru.unpin(1);
        assert_eq!(drain(&mut lru), [1]);
    }

    #[test]
    #[should_panic(expected = "candidate already")]
    fn inserting_twice_is_a_bug() {
        let mut lru = Lru::new(1);
        lru.insert(0, &KEY);
        lru.insert(0, &KEY);
    }
}
