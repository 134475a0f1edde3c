//! The tier behind memory and disk: packs in a bucket that nodes share. A node treats the blocks in its catalog like those on its disk: it
//! announces them to coordinators, and reads a block into DRAM when a client gets it.
//!
//! The difference is that nothing here is reserved: blocks come by use ([`Wanted`]) and are lost when a pack leaves, and every failure is a
//! miss for the readers that wait. A fetch has a deadline, at which its readers are told that they will not get the block.

use super::{Action, ClientId, Directory, Handovers, Place, Published, Rank, State};
use crate::core::{
    eviction::Use,
    objects::{
        catalog::{Catalog, PackId, PackedBlock},
        pack::Record,
        wanted::{Choice, Wanted},
    },
};
use std::{collections::HashSet, time::Duration};
use tidemill_proto::{
    block::BlockKey,
    pool::{Lineage, Room, SlotRef, Tier},
};

/// The node itself as a writer of blocks that it fetches from a bucket. No client has this number.
pub(super) const OBJECTS: ClientId = ClientId(u64::MAX);

/// A directory's knowledge of its bucket.
#[derive(Debug)]
pub(super) struct Objects {
    catalog: Catalog,
    wanted: Wanted,
    /// The time from requesting a block to giving up on it.
    deadline: Duration,
}

/// The reason why a block did not come from a bucket. All of these are misses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FetchFault {
    #[error("the bytes differ from what was packed")]
    Corrupt,
    #[error("it was not to be had in time, or within the bounds")]
    Missed,
}

/// The outcome of an [`Action::Fetch`].
#[derive(Clone, Copy, Debug)]
pub struct Fetched {
    pub block: PackedBlock,
    /// The slot that was to be filled. On success, it holds the block's bytes, checked.
    pub to: SlotRef,
    pub outcome: Result<(), FetchFault>,
}

/// A block that is to be written to the bucket, and its location. Nothing keeps it there, so a copy of it must be validated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ToPack {
    pub key: BlockKey,
    pub lineage: Lineage,
    pub place: Place,
}

impl Directory {
    /// Adds a bucket whose content is not known yet. Blocks are worth writing from their `uses_min`th use on.
    pub fn with_objects(mut self, uses_min: u32, deadline: Duration) -> Self {
        self.objects = Some(Objects { catalog: Catalog::default(), wanted: Wanted::new(uses_min), deadline });
        self
    }

    /// The content of the bucket, as far as this node knows.
    pub fn catalog(&self) -> Option<&Catalog> {
        self.objects.as_ref().map(|objects| &objects.catalog)
    }

    /// The number of blocks that wait to be written to the bucket, and the sum of their uses.
    pub fn wanted(&self) -> (usize, u64) {
        self.objects.as_ref().map_or((0, 0), |objects| (objects.wanted.waiting(), objects.wanted.worth()))
    }

    /// Adds a pack that is in the bucket. Without records it is of no use, and only its bytes count.
    pub fn pack_added(&mut self, name: String, bytes: u64, written_s: u64, records: Vec<Record>) {
        let Some(objects) = &mut self.objects else { return };
        for key in objects.catalog.add(name, bytes, written_s, records) {
            if !self.in_memory_or_on_disk(&key) {
                self.events.stored(key, Tier::Object);
            }
        }
    }

    /// Removes a pack that has left the bucket, or is about to.
    pub fn pack_gone(&mut self, pack: PackId) {
        let Some(objects) = &mut self.objects else { return };
        for key in objects.catalog.remove(pack) {
            if !self.in_memory_or_on_disk(&key) {
                self.events.evicted(key);
            }
        }
    }

    /// Records that these packs were read.
    pub fn packs_read(&mut self, packs: impl IntoIterator<Item = PackId>, now_s: u64) {
        let Some(objects) = &mut self.objects else { return };
        packs.into_iter().for_each(|pack| objects.catalog.touch(pack, now_s));
    }

    /// The blocks to write to the bucket next, at most `blocks_max`. Those that have left memory and disk meanwhile are given up.
    pub fn take_wanted(&mut self, blocks_max: usize) -> Vec<ToPack> {
        let Some(Objects { catalog, wanted, .. }) = &mut self.objects else { return Vec::new() };
        let choices = wanted.take(blocks_max, |key| catalog.holds(key));
        let mut there: HashSet<BlockKey> = HashSet::new();
        let mut blocks = Vec::new();
        for Choice { key, lineage } in choices {
            let follows = lineage.parent.is_none_or(|parent| there.contains(&parent) || self.in_objects(&parent));
            if follows && let Some(place) = self.place(&key) {
                there.insert(key);
                blocks.push(ToPack { key, lineage, place });
            }
        }
        blocks
    }

    fn place(&self, key: &BlockKey) -> Option<Place> {
        if let Some(at) = self.published(key) {
            return Some(Place::Dram(self.found(0, at.slot, Tier::Dram)));
        }
        let (slot, disk) = (self.on_disk(key)?, self.disk.as_ref()?);
        Some(Place::Disk { slot, checksum: disk.block(slot).checksum })
    }

    /// Ends [`Action::Fetch`]es. A reader that waits for several of the blocks gets them together. Returns the number of blocks that were
    /// taken.
    pub fn fetched(&mut self, fetches: &[Fetched], now: Duration) -> usize {
        self.tick(now);
        let mut taken = 0;
        let mut found = Handovers::new();
        for &Fetched { block, to, outcome } in fetches {
            let Some(reserved) = self.take_reservation(OBJECTS, to) else { continue };
            let Record { key, checksum, lineage, .. } = block.record;
            match outcome {
                Ok(()) => {
                    self.arrives(key);
                    let published = Published { key, checksum, lineage, used: reserved.used, leases: 0, rank: Rank::Policy };
                    self.publish(to.slot, published, Tier::Object, &mut found);
                    taken += 1;
                }
                Err(fault) => {
                    self.by_key.remove(&key);
                    self.shares.lose(reserved.lineage.tenant);
                    self.set_free(to.slot);
                    if let (FetchFault::Corrupt, Some(objects)) = (fault, &mut self.objects)
                        && objects.catalog.forget(&key, block.pack)
                    {
                        self.events.evicted(key);
                    }
                    self.miss_waiters(key);
                }
            }
        }
        self.hand_over_all(found, now);
        self.demote();
        taken
    }

    pub(super) fn in_objects(&self, key: &BlockKey) -> bool {
        self.objects.as_ref().is_some_and(|objects| objects.catalog.holds(key))
    }

    /// Blocks that are in the bucket only.
    pub(super) fn only_in_objects(&self) -> impl Iterator<Item = BlockKey> {
        let keys = self.objects.iter().flat_map(|objects| objects.catalog.keys());
        keys.filter(|key| !self.in_memory_or_on_disk(key)).copied()
    }

    fn in_memory_or_on_disk(&self, key: &BlockKey) -> bool {
        self.published(key).is_some() || self.on_disk(key).is_some()
    }

    /// Begins to fetch a block into DRAM. Returns `false` if it is not in the bucket, it is being written already, or there is no slot for
    /// it.
    pub(super) fn fetch(&mut self, key: &BlockKey, used: Use, now: Duration) -> bool {
        let Some(objects) = &self.objects else { return false };
        let Some(block) = objects.catalog.find(key).filter(|_| !self.by_key.contains_key(key)) else { return false };
        let until = now + objects.deadline;
        let lineage = block.record.lineage;
        let Some(slot) = self.take_slot(lineage.tenant, Room::Made) else { return false };
        let to = self.reserve_slot(slot, OBJECTS, *key, lineage, used, until);
        self.actions.push_back(Action::Fetch { block, to, until });
        true
    }

    /// Counts a use of a block that was computed or found. Uses of blocks in the bucket need not be counted.
    pub(super) fn count_use(&mut self, key: &BlockKey) {
        if self.objects.is_none() {
            return;
        }
        let in_dram = self.published(key).map(|at| match self.slots[at.slot as usize].state {
            State::Published(Published { lineage, .. }) => lineage,
            _ => unreachable!("it is published"),
        });
        let on_disk = || self.on_disk(key).and_then(|slot| Some(self.disk.as_ref()?.block(slot).lineage));
        let Some(lineage) = in_dram.or_else(on_disk) else { return };
        let Some(Objects { catalog, wanted, .. }) = &mut self.objects else { return };
        if !catalog.holds(key) {
            wanted.used(*key, lineage, |parent| catalog.holds(parent));
        }
    }

    /// Announces a block in DRAM that was neither there nor on disk.
    pub(super) fn arrives(&mut self, key: BlockKey) {
        if self.in_objects(&key) { self.events.moved(key, Tier::Dram) } else { self.events.stored(key, Tier::Dram) }
    }

    /// Announces that a block is neither in DRAM nor on disk any more.
    pub(super) fn leaves(&mut self, key: BlockKey) {
        if self.in_objects(&key) { self.events.moved(key, Tier::Object) } else { self.events.evicted(key) }
    }
}
