//! The blocks worth writing to the bucket, and their order.
//!
//! A block is worth its uses times its bytes. One that was computed and never used again saves no work later, and most are like that, so a
//! block becomes *wanted* with its `uses_min`th use. Chains are written by worth, each from its beginning: a block is useless without those
//! before it, so it is wanted only if the block before it is in the bucket, on its way there, or also wanted.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    mem,
};
use tidemill_proto::{block::BlockKey, pool::Lineage};

#[derive(Debug)]
pub struct Wanted {
    uses_min: u32,
    /// Recent uses of blocks that are not wanted yet.
    recent: HashMap<BlockKey, u32>,
    /// Uses in the period before `recent`. A block that is in neither has been forgotten.
    earlier: HashMap<BlockKey, u32>,
    waiting: HashMap<BlockKey, Waiting>,
    /// The blocks taken last, which are being written: a long prompt's next blocks come meanwhile.
    taken: HashSet<BlockKey>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    lineage: Lineage,
    /// The first waiting block of its chain, by which blocks are grouped.
    root: BlockKey,
    uses: u32,
}

/// A block to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    pub key: BlockKey,
    pub lineage: Lineage,
}

/// The most blocks in each of the two periods of counted uses. They take about 10 MB.
const COUNTED_MAX: usize = 1 << 17;
/// The most blocks that wait to be written.
pub const WAITING_MAX: usize = 1 << 16;

impl Wanted {
    /// An empty set. `uses_min` is at least 1; the computation of a block is its first use.
    pub fn new(uses_min: u32) -> Self {
        Self { uses_min, recent: HashMap::new(), earlier: HashMap::new(), waiting: HashMap::new(), taken: HashSet::new() }
    }

    /// Counts a use of a block that is not in the bucket. `written`: whether a block is in the bucket.
    pub fn used(&mut self, key: BlockKey, lineage: Lineage, written: impl Fn(&BlockKey) -> bool) {
        if let Some(waiting) = self.waiting.get_mut(&key) {
            waiting.uses += 1;
            return;
        }
        let uses = self.count(key);
        if uses < self.uses_min || self.waiting.len() >= WAITING_MAX {
            return;
        }
        let root = match lineage.parent {
            Some(parent) => match self.waiting.get(&parent) {
                Some(before) => before.root,
                None if self.taken.contains(&parent) || written(&parent) => key,
                None => return,
            },
            None => key,
        };
        self.recent.remove(&key);
        self.waiting.insert(key, Waiting { lineage, root, uses });
    }

    fn count(&mut self, key: BlockKey) -> u32 {
        if self.recent.len() >= COUNTED_MAX {
            self.earlier = mem::take(&mut self.recent);
        }
        let before = self.earlier.remove(&key).unwrap_or(0);
        let uses = self.recent.entry(key).or_insert(0);
        *uses += before + 1;
        *uses
    }

    /// The number of blocks that wait to be written.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The sum of the waiting blocks' uses.
    pub fn worth(&self) -> u64 {
        self.waiting.values().map(|waiting| u64::from(waiting.uses)).sum()
    }

    /// The blocks to write next: the chains with the highest worth, each from its beginning. They no longer wait. The blocks taken before
    /// have been written, or given up.
    pub fn take(&mut self, blocks_max: usize, written: impl Fn(&BlockKey) -> bool) -> Vec<Choice> {
        let mut worth: HashMap<BlockKey, u64> = HashMap::new();
        for waiting in self.waiting.values() {
            *worth.entry(waiting.root).or_default() += u64::from(waiting.uses);
        }
        let mut order: Vec<(BlockKey, Waiting)> = self.waiting.iter().map(|(key, waiting)| (*key, *waiting)).collect();
        order.sort_unstable_by_key(|(key, waiting)| (Reverse(worth[&waiting.root]), waiting.root.0, waiting.lineage.position, key.0));
        self.taken.clear();
        let mut choices = Vec::new();
        for (key, Waiting { lineage, .. }) in order {
            if choices.len() == blocks_max {
                break;
            }
            self.waiting.remove(&key);
            // The block before it may have been given up since.
            if !written(&key) && lineage.parent.is_none_or(|parent| self.taken.contains(&parent) || written(&parent)) {
                self.taken.insert(key);
                choices.push(Choice { key, lineage });
            }
        }
        choices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidemill_proto::{block::Tenant, ids::RequestId};

    /// Block `n` of the chain `chain`.
    fn block(chain: u8, n: u8) -> (BlockKey, Lineage) {
        let key = |n: u8| BlockKey([chain, n, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let parent = n.checked_sub(1).map(key);
        (key(n), Lineage { origin: RequestId(1), tenant: Tenant(1), parent, position: n.into() })
    }

    fn use_chain(wanted: &mut Wanted, chain: u8, blocks: u8) {
        for (key, lineage) in (0..blocks).map(|n| block(chain, n)) {
            wanted.used(key, lineage, |_| false);
        }
    }

    fn names(choices: &[Choice]) -> Vec<(u8, u8)> {
        choices.iter().map(|choice| (choice.key.0[0], choice.key.0[1])).collect()
    }

    #[test]
    fn what_is_used_again_is_wanted_and_chains_that_are_worth_most_go_first() {
        let mut wanted = Wanted::new(2);
        use_chain(&mut wanted, 0, 4);
        use_chain(&mut wanted, 1, 3);
        use_chain(&mut wanted, 2, 9);
        assert_eq!(wanted.waiting(), 0, "computed once");
        use_chain(&mut wanted, 0, 2);
        for _ in 0..5 {
            use_chain(&mut wanted, 1, 3);
        }
        assert_eq!((wanted.waiting(), wanted.worth()), (5, 2 * 2 + 3 * 6));
        assert_eq!(names(&wanted.take(4, |_| false)), [(1, 0), (1, 1), (1, 2), (0, 0)]);
        assert_eq!(names(&wanted.take(4, |key| *key == block(0, 0).0)), [(0, 1)]);
        assert_eq!(wanted.waiting(), 0);
    }

    #[test]
    fn a_block_without_the_one_before_it_is_not_wanted() {
        let mut wanted = Wanted::new(1);
        let (key, lineage) = block(0, 3);
        wanted.used(key, lineage, |_| false);
        assert_eq!(wanted.waiting(), 0);
        wanted.used(key, lineage, |parent| *parent == block(0, 2).0);
        assert_eq!(wanted.waiting(), 1);
        assert_eq!(wanted.take(9, |_| false), [], "the one before it has left the bucket");
    }

    #[test]
    fn a_block_is_wanted_while_the_one_before_it_is_being_written() {
        let mut wanted = Wanted::new(1);
        use_chain(&mut wanted, 0, 2);
        assert_eq!(names(&wanted.take(9, |_| false)), [(0, 0), (0, 1)]);
        let ((key, lineage), (next, of_next)) = (block(0, 2), block(0, 3));
        wanted.used(key, lineage, |_| false);
        wanted.used(next, of_next, |_| false);
        assert_eq!(names(&wanted.take(9, |key| key.0[1] < 2)), [(0, 2), (0, 3)]);
        assert_eq!(wanted.take(9, |_| false), []);
    }

    proptest! {
        #[test]
        fn a_chain_is_written_from_its_beginning_and_whole(
            uses in prop::collection::vec((0u8..3, 1u8..6), 1..60), batch in 1usize..5, slow in 0usize..3, fails in 0usize..8
        ) {
            let mut wanted = Wanted::new(2);
            let mut there: HashSet<BlockKey> = HashSet::new();
            let mut writing: Vec<Choice> = Vec::new();
            let mut counts: HashMap<(u8, u8), u32> = HashMap::new();
            for (step, (chain, blocks)) in uses.into_iter().enumerate() {
                for n in 0..blocks {
                    let (key, lineage) = block(chain, n);
                    *counts.entry((chain, n)).or_default() += 1;
                    if !there.contains(&key) {
                        wanted.used(key, lineage, |key| there.contains(key));
                    }
                    // A write ends in the middle of a chain, and the next one begins.
                    if (step + usize::from(n)) % (slow + 1) == 0 {
                        if fails == 0 || step % 8 != fails {
                            there.extend(writing.iter().map(|choice| choice.key));
                        }
                        writing = wanted.take(batch, |key| there.contains(key));
                        for choice in &writing {
                            let before = |parent| there.contains(&parent) || writing.iter().any(|other| other.key == parent);
                            prop_assert!(choice.lineage.parent.is_none_or(before) && !there.contains(&choice.key));
                        }
                    }
                }
            }
            while fails == 0 && (!writing.is_empty() || wanted.waiting() > 0) {
                there.extend(writing.drain(..).map(|choice| choice.key));
                writing = wanted.take(batch, |key| there.contains(key));
            }
            for ((chain, n), count) in counts {
                prop_assert!(fails > 0 || count < 2 || there.contains(&block(chain, n).0), "block {n} of chain {chain}");
            }
        }
    }
}
