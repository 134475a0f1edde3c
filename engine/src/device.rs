//! The HBM tier: the contents of a worker's device blocks. It deals in block numbers; the executor has the bytes.
//!
//! A device block goes through these states:
//!
//! ```text
//!   1 free ──allocate──► 2 private ──publish──► 3 shared ──last release──► 4 cached
//!      ▲                    │                      ▲                         │   │
//!      ├──── last release ──┘                      └───── match_prefix ──────┘   │
//!      └───────────────────────── evicted by allocate ───────────────────────────┘
//! ```
//!
//! 1. **free**: not referenced, contents meaningless
//! 2. **private**: referenced, being filled, not findable
//! 3. **shared**: referenced, full and immutable, findable by its key
//! 4. **cached**: findable by its key, not referenced, evictable

use crate::announcing::Changes;
use std::collections::{HashMap, hash_map::Entry};
use tidemill_kvpool::core::eviction::{EvictionPolicy, Use, lru::Lru};
use tidemill_proto::{block::BlockKey, message::Blocks};

/// Device blocks `0..n` of one worker. The caller returns each reference that it gets with [`release`](Self::release).
#[derive(Debug)]
pub struct DeviceBlocks {
    blocks: Vec<Block>,
    by_key: HashMap<BlockKey, u32>,
    free: Vec<u32>,
    cached: Lru,
    cached_count: usize,
    /// Number of the next release.
    releases: u64,
    /// The blocks that became findable, and those that no longer are.
    changes: Changes,
}

#[derive(Clone, Debug, Default)]
struct Block {
    refs: u32,
    /// Set while `by_key` points here.
    key: Option<BlockKey>,
}

impl DeviceBlocks {
    /// `n` free blocks.
    pub fn new(n: u32) -> Self {
        Self {
            blocks: vec![Block::default(); n as usize],
            by_key: HashMap::new(),
            // Low numbers are handed out first.
            free: (0..n).rev().collect(),
            cached: Lru::new(n),
            cached_count: 0,
            releases: 0,
            changes: Changes::default(),
        }
    }

    /// The blocks of the longest leading run of `keys` on the device. Takes a reference to each.
    pub fn match_prefix(&mut self, keys: &[BlockKey]) -> Vec<u32> {
        let matched: Vec<u32> = keys.iter().map_while(|key| self.by_key.get(key).copied()).collect();
        for &block in &matched {
            let refs = &mut self.blocks[block as usize].refs;
            *refs += 1;
            if *refs == 1 {
                self.cached.pin(block);
                self.cached_count -= 1;
            }
        }
        matched
    }

    /// The number of leading blocks of `keys` that can be used with a state of `parts` blocks: up to the last one whose complete state is
    /// on the device.
    pub fn usable_prefix(&self, keys: &[BlockKey], parts: usize) -> usize {
        let run = keys.iter().take_while(|key| self.by_key.contains_key(key)).count();
        let has_state = |end: &usize| keys[end - 1].state_parts(parts).all(|part| self.by_key.contains_key(&part));
        (1..=run).rev().find(has_state).unwrap_or(0)
    }

    /// Allocates `n` private blocks with one reference each. Evicts the least recently used cached blocks as needed. If there are too few,
    /// returns `None` and changes nothing.
    pub fn allocate(&mut self, n: usize) -> Option<Vec<u32>> {
        if n > self.free_blocks() {
            return None;
        }
        while self.free.len() < n {
            let block = self.cached.evict().expect("free_blocks counted it");
            let key = self.blocks[block as usize].key.take().expect("a cached block has a key");
            self.by_key.remove(&key);
            self.changes.evicted(key);
            self.cached_count -= 1;
            self.free.push(block);
        }
        let taken = self.free.split_off(self.free.len() - n);
        for &block in &taken {
            self.blocks[block as usize].refs = 1;
        }
        Some(taken.into_iter().rev().collect())
    }

    /// Makes a full, referenced block findable. If `key` already finds another block, that one stays: both hold the same bytes, and this
    /// one becomes free with its last release.
    pub fn publish(&mut self, block: u32, key: BlockKey) {
        let entry = &mut self.blocks[block as usize];
        assert!(entry.refs > 0, "block {block} is published by someone who does not hold it");
        assert!(entry.key.is_none_or(|old| old == key), "block {block} is published under a second key");
        if let Entry::Vacant(vacant) = self.by_key.entry(key) {
            vacant.insert(block);
            entry.key = Some(key);
            self.changes.stored(key);
        }
    }

    /// The blocks that became findable, and those that no longer are, since the last call.
    pub(crate) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    /// Keys of all findable blocks. Chains are mostly in order, as their blocks were handed out in order.
    pub fn findable(&self) -> impl Iterator<Item = BlockKey> {
        self.blocks.iter().filter_map(|block| block.key)
    }

    /// Releases one reference to each of `blocks`, which are in chain order: eviction starts at the end of the chain.
    pub fn release(&mut self, blocks: &[u32]) {
        self.releases += 1;
        for (&block, used) in blocks.iter().zip(Use::of_chain(self.releases, blocks.len())) {
            let entry = &mut self.blocks[block as usize];
            entry.refs = entry.refs.checked_sub(1).unwrap_or_else(|| panic!("block {block} is released more often than referenced"));
            match entry.key {
                _ if entry.refs > 0 => {}
                Some(key) => {
                    self.cached.insert(block, &key, used);
                    self.cached_count += 1;
                }
                None => self.free.push(block),
            }
        }
    }

    /// The number of all blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that [`allocate`](Self::allocate) can hand out: free ones and cached ones.
    pub fn free_blocks(&self) -> usize {
        self.free.len() + self.cached_count
    }

    /// Findable blocks without a reference.
    pub fn cached(&self) -> usize {
        self.cached_count
    }

    /// Blocks with a reference.
    pub fn used(&self) -> usize {
        self.total() - self.free_blocks()
    }

    /// Blocks by state, as a worker reports them.
    pub fn report(&self, bytes_per_block: u64) -> Blocks {
        let (total, cached, used) = (self.total() as u64, self.cached() as u64, self.used() as u64);
        Blocks { total, free: total - cached - used, cached, used, bytes_per_block }
    }

    /// References to a block.
    pub fn references(&self, block: u32) -> u32 {
        self.blocks[block as usize].refs
    }

    /// Panics if the counts are inconsistent. Tests call it after every step.
    pub fn check_integrity(&self) {
        let mut free = vec![false; self.total()];
        for &block in &self.free {
            assert!(!std::mem::replace(&mut free[block as usize], true), "block {block} is free twice");
        }
        let mut cached = 0;
        for (block, entry) in self.blocks.iter().enumerate() {
            let found = entry.key.is_some_and(|key| self.by_key.get(&key) == Some(&(block as u32)));
            assert_eq!(entry.key.is_some(), found, "block {block}: key and index disagree");
            assert_eq!(free[block], entry.refs == 0 && !found, "block {block}: free exactly if neither referenced nor found");
            let evictable = entry.refs == 0 && found;
            assert_eq!(self.cached.is_candidate(block as u32), evictable, "block {block}: evictable exactly if cached");
            cached += usize::from(evictable);
        }
        assert_eq!(cached, self.cached_count, "cached blocks are miscounted");
        assert_eq!(self.by_key.len(), self.blocks.iter().filter(|b| b.key.is_some()).count(), "a key points to no block");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn keys(range: std::ops::Range<u8>) -> Vec<BlockKey> {
        range.map(key).collect()
    }

    /// Fills a chain of `n` blocks and releases it.
    fn cache_chain(device: &mut DeviceBlocks, range: std::ops::Range<u8>) {
        let blocks = device.allocate(range.len()).unwrap();
        for (&block, key) in blocks.iter().zip(keys(range)) {
            device.publish(block, key);
        }
        device.release(&blocks);
        device.check_integrity();
    }

    #[test]
    fn a_released_chain_is_found_again() {
        let mut device = DeviceBlocks::new(4);
        cache_chain(&mut device, 0..3);
        assert_eq!((device.free_blocks(), device.cached(), device.used()), (4, 3, 0));
        let matched = device.match_prefix(&keys(0..4));
        assert_eq!(matched, [0, 1, 2]);
        assert_eq!((device.free_blocks(), device.cached(), device.used()), (1, 0, 3));
        device.check_integrity();
    }

    #[test]
    fn allocation_is_all_or_nothing_and_evicts_the_end_of_a_chain_first() {
        let mut device = DeviceBlocks::new(4);
        cache_chain(&mut device, 0..4);
        assert_eq!(device.allocate(5), None);
        assert_eq!(device.cached(), 4);
        let taken = device.allocate(2).unwrap();
        assert_eq!(device.match_prefix(&keys(0..4)), [0, 1], "the last two blocks of the chain made room");
        assert_eq!(device.allocate(1), None, "nothing referenced is ever evicted");
        device.release(&taken);
        device.check_integrity();
    }

    #[test]
    fn the_same_content_twice_is_cached_once() {
        let mut device = DeviceBlocks::new(2);
        let blocks = device.allocate(2).unwrap();
        device.publish(blocks[0], key(7));
        device.publish(blocks[1], key(7));
        device.release(&blocks);
        assert_eq!((device.cached(), device.free_blocks()), (1, 2));
        assert_eq!(device.match_prefix(&[key(7)]), [blocks[0]]);
        device.check_integrity();
    }

    #[test]
    #[should_panic(expected = "released more often")]
    fn releasing_twice_is_a_bug() {
        let mut device = DeviceBlocks::new(1);
        let blocks = device.allocate(1).unwrap();
        device.release(&blocks);
        device.release(&blocks);
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// Admit a sequence whose chain starts at this key and has this many blocks.
        Admit(u8, usize),
        Finish(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![(0u8..6, 0usize..7).prop_map(|(first, n)| Op::Admit(first, n)), any::<prop::sample::Index>().prop_map(Op::Finish)]
    }

    proptest! {
        /// Sequences come and go; two live ones never share a block under different keys, and nothing leaks.
        #[test]
        fn the_books_balance(ops in prop::collection::vec(op(), 1..200)) {
            let mut device = DeviceBlocks::new(12);
            let mut live: Vec<Vec<(BlockKey, u32)>> = Vec::new();
            for op in ops {
                match op {
                    Op::Admit(first, n) => {
                        let wanted = keys(first * 10..first * 10 + n as u8);
                        let mut blocks = device.match_prefix(&wanted);
                        match device.allocate(n - blocks.len()) {
                            None => device.release(&blocks),
                            Some(fresh) => {
                                blocks.extend(fresh);
                                for (&block, &key) in blocks.iter().zip(&wanted) {
                                    device.publish(block, key);
                                }
                                live.push(wanted.into_iter().zip(blocks).collect());
                            }
                        }
                    }
                    Op::Finish(index) if !live.is_empty() => {
                        let done = live.swap_remove(index.index(live.len()));
                        device.release(&done.iter().map(|&(_, block)| block).collect::<Vec<_>>());
                    }
                    Op::Finish(_) => {}
                }
                device.check_integrity();
                let mut owner = HashMap::new();
                for &(key, block) in live.iter().flatten() {
                    prop_assert_eq!(*owner.entry(block).or_insert(key), key);
                }
            }
            for done in live {
                device.release(&done.iter().map(|&(_, block)| block).collect::<Vec<_>>());
            }
            device.check_integrity();
            prop_assert_eq!(device.free_blocks(), 12);
        }
    }
}
