//! The order in which a leaving node hands over its blocks.

use super::{
    Directory, Published, State,
    disk_slots::{DiskBlock, DiskSlots},
};
use std::cmp::Reverse;
use tidemill_proto::{
    block::BlockKey,
    pool::{Found, Lineage, Tier},
};

/// A block that is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    pub key: BlockKey,
    pub lineage: Lineage,
    pub place: Place,
}

/// The location of a block. Nothing keeps it there, so a copy of it must be validated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    Dram(Found),
    Disk { slot: u32, checksum: u64 },
}

impl Directory {
    /// Every block in either tier: the most recently used chains first, each from its beginning, since a block is useless without
    /// those before it.
    pub fn hottest(&self) -> Vec<Held> {
        let in_dram = self.slots.iter().zip(0..).filter_map(|(slot, number)| match slot.state {
            State::Published(Published { key, lineage, used, .. }) => {
                Some((used, Held { key, lineage, place: Place::Dram(self.found(0, number, Tier::Dram)) }))
            }
            _ => None,
        });
        let on_disk = self.disk.iter().flat_map(DiskSlots::held_slots).filter(|(_, block, _)| self.published(&block.key).is_none());
        let on_disk = on_disk
            .map(|(slot, DiskBlock { key, checksum, lineage }, used)| (used, Held { key, lineage, place: Place::Disk { slot, checksum } }));
        let mut held: Vec<_> = in_dram.chain(on_disk).collect();
        held.sort_by_key(|(used, held)| (Reverse(used.at), used.place, held.lineage.position));
        held.into_iter().map(|(_, held)| held).collect()
    }
}
