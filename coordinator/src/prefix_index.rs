//! Which blocks each pool node says it holds: a copy of the nodes' own directories, fed by their numbered events.
//!
//! Soft state. It may undercount and be late; a block that turns out to be missing is a miss that the decode worker
//! answers by computing, so nothing here decides correctness.

use std::collections::{BTreeMap, HashSet};
use tidemill_proto::{block::BlockKey, ids::Epoch, message::PoolEvent};

/// Keys remembered per node (16 bytes each, and the set's overhead). Further ones are left out: an undercount.
const KEYS_MAX: usize = 1 << 24;

#[derive(Debug, Default)]
pub struct PrefixIndex {
    nodes: BTreeMap<Epoch, Node>,
}

#[derive(Debug, Default)]
struct Node {
    keys: HashSet<BlockKey>,
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
        self.nodes.remove(&node);
    }

    /// Applies `events`, of which the first has number `from`. Events of an unknown node are ignored.
    pub fn apply(&mut self, node: Epoch, from: u64, events: &[PoolEvent]) -> Result<(), Gap> {
        let Some(state) = self.nodes.get_mut(&node) else { return Ok(()) };
        if let Some(expected) = state.next.filter(|&next| next != from) {
            *state = Node::default();
            return Err(Gap { expected, from });
        }
        state.next = Some(from.wrapping_add(events.len() as u64));
        for event in events {
            match event {
                PoolEvent::Stored { key, .. } if state.keys.len() < KEYS_MAX => {
                    state.keys.insert(*key);
                }
                PoolEvent::Stored { .. } | PoolEvent::Moved { .. } => {}
                PoolEvent::Evicted(key) => {
                    state.keys.remove(key);
                }
                PoolEvent::Cleared => state.keys.clear(),
            }
        }
        Ok(())
    }

    /// How many leading `keys` the node holds.
    pub fn leading(&self, node: Epoch, keys: &[BlockKey]) -> usize {
        self.nodes.get(&node).map_or(0, |node| keys.iter().take_while(|key| node.keys.contains(key)).count())
    }

    /// Keys known of a node.
    pub fn len(&self, node: Epoch) -> usize {
        self.nodes.get(&node).map_or(0, |node| node.keys.len())
    }

    pub fn nodes(&self) -> impl Iterator<Item = Epoch> {
        self.nodes.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::pool::Tier;

    const NODE: Epoch = Epoch(1);

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn stored(n: u8) -> PoolEvent {
        PoolEvent::Stored { key: key(n), tier: Tier::Dram }
    }

    fn index() -> PrefixIndex {
        let mut index = PrefixIndex::default();
        index.add_node(NODE);
        index
    }

    #[test]
    fn only_an_unbroken_run_from_the_first_block_counts() {
        let mut index = index();
        index.apply(NODE, 7, &[stored(0), stored(1), stored(3)]).unwrap();
        let keys = [key(0), key(1), key(2), key(3)];
        assert_eq!(index.leading(NODE, &keys), 2);
        assert_eq!(index.leading(NODE, &keys[1..]), 1);
        index.apply(NODE, 10, &[PoolEvent::Evicted(key(0))]).unwrap();
        assert_eq!(index.leading(NODE, &keys), 0);
        assert_eq!(index.leading(Epoch(2), &keys), 0, "an unknown node holds nothing");
    }

    #[test]
    fn a_gap_forgets_the_node_until_it_registers_again() {
        let mut index = index();
        index.apply(NODE, 0, &[stored(0)]).unwrap();
        assert_eq!(index.apply(NODE, 2, &[stored(1)]), Err(Gap { expected: 1, from: 2 }));
        assert_eq!(index.len(NODE), 0);
    }

    #[test]
    fn cleared_voids_what_was_said() {
        let mut index = index();
        index.apply(NODE, 0, &[stored(0), PoolEvent::Cleared, stored(1)]).unwrap();
        assert_eq!((index.leading(NODE, &[key(0)]), index.leading(NODE, &[key(1)])), (0, 1));
    }
}
