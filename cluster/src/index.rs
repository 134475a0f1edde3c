//! Which nodes hold a block: a copy of the pool nodes' own directories, fed by their numbered events.
//!
//! Soft state. It may undercount and lag; nothing here decides correctness, since a decode worker computes any block that it
//! does not find.

pub mod frequency;

use std::collections::{BTreeMap, HashMap};
use tidemill_proto::{block::BlockKey, ids::Epoch, message::PoolEvent, pool::Tier};

/// Blocks remembered per node (about 100 bytes each). More are left out: an undercount.
const BLOCKS_MAX: usize = 1 << 24;

/// A node's copy of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    pub node: Epoch,
    pub tier: Tier,
}

#[derive(Debug, Default)]
pub struct PrefixIndex {
    nodes: BTreeMap<Epoch, Node>,
    /// Never empty; each node once.
    holders: HashMap<BlockKey, Vec<Holder>>,
}

#[derive(Debug, Default)]
struct Node {
    blocks: usize,
    /// Number of the next event; unknown until the first arrives.
    next: Option<u64>,
}

/// Events are missing. The node has to describe itself from empty again, so its link must be closed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("events {expected}..{from} of the pool node are missing: it must register again")]
pub struct Gap {
    pub expected: u64,
    pub from: u64,
}

impl PrefixIndex {
    pub fn add_node(&mut self, node: Epoch) {
        self.nodes.insert(node, Node::default());
    }

    pub fn remove_node(&mut self, node: Epoch) {
        self.clear(node);
        self.nodes.remove(&node);
    }

    /// Applies `events`, of which the first has number `from`. Events of an unknown node are ignored.
    pub fn apply(&mut self, node: Epoch, from: u64, events: &[PoolEvent]) -> Result<(), Gap> {
        let Some(state) = self.nodes.get_mut(&node) else { return Ok(()) };
        if let Some(expected) = state.next.filter(|&next| next != from) {
            state.next = None;
            self.clear(node);
            return Err(Gap { expected, from });
        }
        state.next = Some(from.wrapping_add(events.len() as u64));
        for event in events {
            match *event {
                PoolEvent::Stored { key, tier } | PoolEvent::Moved { key, tier } => self.store(key, Holder { node, tier }),
                PoolEvent::Evicted(key) => self.evict(key, node),
                PoolEvent::Cleared => self.clear(node),
            }
        }
        Ok(())
    }

    /// The holders of each leading block of `keys`, up to the first block without any.
    pub fn leading(&self, keys: &[BlockKey]) -> Vec<&[Holder]> {
        keys.iter().map_while(|key| self.holders.get(key).map(Vec::as_slice)).collect()
    }

    /// Blocks known of a node.
    pub fn len(&self, node: Epoch) -> usize {
        self.nodes.get(&node).map_or(0, |node| node.blocks)
    }

    pub fn nodes(&self) -> impl Iterator<Item = Epoch> {
        self.nodes.keys().copied()
    }

    fn store(&mut self, key: BlockKey, holder: Holder) {
        let Some(state) = self.nodes.get_mut(&holder.node) else { return };
        let holders = self.holders.entry(key).or_default();
        if let Some(known) = holders.iter_mut().find(|known| known.node == holder.node) {
            known.tier = holder.tier;
        } else if state.blocks < BLOCKS_MAX {
            state.blocks += 1;
            holders.push(holder);
        } else if holders.is_empty() {
            self.holders.remove(&key);
        }
    }

    fn evict(&mut self, key: BlockKey, node: Epoch) {
        let (Some(state), Some(holders)) = (self.nodes.get_mut(&node), self.holders.get_mut(&key)) else { return };
        let Some(at) = holders.iter().position(|holder| holder.node == node) else { return };
        holders.swap_remove(at);
        state.blocks -= 1;
        if holders.is_empty() {
            self.holders.remove(&key);
        }
    }

    /// Forgets a node's blocks. Goes through all blocks: nodes come and go rarely, and lookups should not pay for it.
    fn clear(&mut self, node: Epoch) {
        let Some(state) = self.nodes.get_mut(&node) else { return };
        if std::mem::take(&mut state.blocks) > 0 {
            self.holders.retain(|_, holders| {
                holders.retain(|holder| holder.node != node);
                !holders.is_empty()
            });
        }
    }

    /// Panics if the books do not balance. Tests call it after every step.
    pub fn check_integrity(&self) {
        let mut counted: BTreeMap<Epoch, usize> = self.nodes.keys().map(|node| (*node, 0)).collect();
        for holders in self.holders.values() {
            assert!(!holders.is_empty(), "a block that nobody holds is listed");
            for holder in holders {
                *counted.get_mut(&holder.node).expect("only known nodes hold blocks") += 1;
                assert_eq!(holders.iter().filter(|other| other.node == holder.node).count(), 1, "each node once");
            }
        }
        assert!(self.nodes.iter().all(|(node, state)| counted[node] == state.blocks), "blocks are miscounted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Epoch = Epoch(1);
    const OTHER: Epoch = Epoch(2);

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn stored(n: u8, tier: Tier) -> PoolEvent {
        PoolEvent::Stored { key: key(n), tier }
    }

    fn index() -> PrefixIndex {
        let mut index = PrefixIndex::default();
        index.add_node(NODE);
        index.add_node(OTHER);
        index
    }

    #[test]
    fn a_run_goes_on_as_long_as_anyone_holds_the_next_block() {
        let mut index = index();
        index.apply(NODE, 7, &[stored(0, Tier::Dram), stored(1, Tier::Nvme), stored(3, Tier::Dram)]).unwrap();
        index.apply(OTHER, 0, &[stored(1, Tier::Dram)]).unwrap();
        index.check_integrity();
        let holder = |node, tier| Holder { node, tier };
        let keys = [key(0), key(1), key(2), key(3)];
        let expected = [vec![holder(NODE, Tier::Dram)], vec![holder(NODE, Tier::Nvme), holder(OTHER, Tier::Dram)]];
        assert_eq!(index.leading(&keys), expected);
        index.apply(NODE, 10, &[PoolEvent::Moved { key: key(1), tier: Tier::Dram }, PoolEvent::Evicted(key(0))]).unwrap();
        index.check_integrity();
        assert!(index.leading(&keys).is_empty());
        assert_eq!(index.leading(&keys[1..])[0][0], holder(NODE, Tier::Dram));
    }

    #[test]
    fn a_gap_forgets_the_node_until_it_registers_again() {
        let mut index = index();
        index.apply(NODE, 0, &[stored(0, Tier::Dram)]).unwrap();
        index.apply(OTHER, 0, &[stored(0, Tier::Dram)]).unwrap();
        assert_eq!(index.apply(NODE, 2, &[stored(1, Tier::Dram)]), Err(Gap { expected: 1, from: 2 }));
        assert_eq!((index.len(NODE), index.len(OTHER)), (0, 1));
        index.remove_node(OTHER);
        index.check_integrity();
        assert!(index.leading(&[key(0)]).is_empty());
    }

    #[test]
    fn cleared_voids_what_was_said() {
        let mut index = index();
        index.apply(NODE, 0, &[stored(0, Tier::Dram), PoolEvent::Cleared, stored(1, Tier::Dram), stored(1, Tier::Nvme)]).unwrap();
        index.check_integrity();
        assert_eq!((index.leading(&[key(0)]).len(), index.leading(&[key(1)]).len(), index.len(NODE)), (0, 1, 1));
    }
}
