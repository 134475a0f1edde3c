//! What a node that leaves hands over first.

use super::{Directory, Published, State};
use std::cmp::Reverse;
use tidemill_proto::{
    block::BlockKey,
    pool::{Found, Lineage, Tier},
};

/// A block in DRAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    pub key: BlockKey,
    pub lineage: Lineage,
    /// Where it is now. Nothing keeps it there: whoever copies it validates the copy.
    pub found: Found,
}

impl Directory {
    /// Every block in DRAM, the most recently used chains first and each from its beginning, since a block is of no use
    /// without those before it.
    pub fn hottest(&self) -> Vec<Held> {
        let held = self.slots.iter().zip(0..).filter_map(|(slot, number)| match slot.state {
            State::Published(Published { key, lineage, used, .. }) => {
                Some((used, Held { key, lineage, found: self.found(0, number, Tier::Dram) }))
            }
            _ => None,
        });
        let mut held: Vec<_> = held.collect();
        held.sort_by_key(|(used, held)| (Reverse(used.at), used.place, held.lineage.position));
        held.into_iter().map(|(_, held)| held).collect()
    }
}
