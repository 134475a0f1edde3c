//! Moving blocks between DRAM and disk. Clients write and read blocks in DRAM; the disk keeps those that would have to leave.
//!
//! - **Demotion** runs in the background, before DRAM is full. A slot is *clean* if the disk has a copy, so that it can be reused at once;
//!   the copy stays on disk as long as the slot is clean. When fewer than [`Watermarks::low`] slots are free or clean, blocks that the
//!   policy gives up are copied until there are [`Watermarks::high`]. They stay readable, and the policy ranks them again if they are read
//!   meanwhile.
//! - **Promotion** happens on reading: the node reserves a slot for itself, fills it, and publishes it to all waiting readers.
//! - **The disk may fail** at any time. From its first failure on, the node continues without it.

use super::{
    Action, ClientId, Directory, Handovers, Limits, Published, Rank, State,
    disk_slots::{DiskBlock, DiskSlots},
    objects::OBJECTS,
};
use crate::core::eviction::{EvictionPolicy, Use};
use std::time::Duration;
use tidemill_proto::{
    block::BlockKey,
    pool::{Room, SlotRef, Tier},
};

/// The node itself as a writer of slots. No client has this number.
pub(super) const NODE: ClientId = ClientId(0);

/// The reason why a read or write of the disk failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DiskFault {
    /// The source holds wrong bytes: the disk in a load, DRAM in a store.
    #[error("the bytes differ from what was published")]
    Corrupt,
    /// The operation began too late: the slot holds another block.
    #[error("it came too late")]
    Late,
    /// The disk itself failed.
    #[error("the disk failed")]
    Io,
}

/// The outcome of an [`Action::Load`].
#[derive(Clone, Copy, Debug)]
pub struct Loaded {
    pub disk: u32,
    /// The slot that was to be filled. On success, it holds the block's bytes, checked.
    pub to: SlotRef,
    pub outcome: Result<(), DiskFault>,
}

/// The number of slots that should be free or clean.
struct Watermarks {
    /// Demotion begins below this number.
    low: usize,
    /// Demotion continues up to this number.
    high: usize,
}

impl Watermarks {
    /// The watermarks for this many slots: no more than the disk has copies for.
    fn of(slots: usize, disk: usize) -> Self {
        let high = (slots / 4).max(1).min(disk);
        Self { low: (slots / 8).max(1).min(high), high }
    }
}

impl Directory {
    /// Adds a disk with this many free slots. `policy` must be for the same number.
    pub fn with_disk(mut self, slots: u32, policy: Box<dyn EvictionPolicy>) -> Self {
        self.disk = Some(DiskSlots::new(slots, policy));
        self
    }

    /// Takes the blocks that an earlier run of this node left in disk slots. Call it before any operation. Returns the slots of blocks that
    /// are of no use.
    pub fn recover(&mut self, blocks: impl IntoIterator<Item = (u32, DiskBlock)>) -> Vec<u32> {
        let mut useless = Vec::new();
        let Some(tier) = &mut self.disk else { return useless };
        let mut blocks: Vec<_> = blocks.into_iter().collect();
        // A part of a state is known as such by the part before it.
        blocks.sort_by_key(|(_, block)| block.lineage.position);
        for (disk, block) in blocks {
            let follows = |parent: BlockKey| parent.state_part(0) == block.key || tier.is_state(&parent);
            let state = block.lineage.parent.is_some_and(follows);
            let used = Use { at: 0, place: block.lineage.position, tail: false, state };
            if tier.recover(disk, block, used) {
                self.events.stored(block.key, Tier::Nvme);
            } else {
                useless.push(disk);
            }
        }
        tier.recovered();
        useless
    }

    /// Ends an [`Action::Store`].
    pub fn stored(&mut self, disk: u32, outcome: Result<(), DiskFault>, now: Duration) {
        self.tick(now);
        let Some(tier) = &mut self.disk else { return };
        let from = tier.store_ended(disk, outcome.is_ok());
        if let Some(at) = from {
            let State::Published(published) = &mut self.slots[at.slot as usize].state else {
                unreachable!("what is being stored stays published, or the store is abandoned");
            };
            if matches!(published.rank, Rank::Leaving) {
                let (key, used) = (published.key, published.used);
                if outcome.is_ok() {
                    self.set_clean(at.slot);
                } else {
                    self.rerank(at.slot, &key, used);
                }
            }
        }
        match outcome {
            Ok(()) | Err(DiskFault::Late) => {}
            Err(DiskFault::Corrupt) => {
                if let Some(at) = from {
                    self.forget(at, now);
                }
            }
            Err(DiskFault::Io) => self.disk_failed(),
        }
        self.demote();
    }

    /// Ends [`Action::Load`]s. A reader that waits for several of the blocks gets them together. Returns the number of blocks that were
    /// taken.
    pub fn loaded(&mut self, loads: &[Loaded], now: Duration) -> usize {
        self.tick(now);
        let mut taken = 0;
        let mut found = Handovers::new();
        for &Loaded { disk, to, outcome } in loads {
            let Some(tier) = &mut self.disk else { break };
            tier.answered();
            let Some(reserved) = self.take_reservation(NODE, to) else { continue };
            tier_of(&mut self.disk).load_ended(disk);
            match outcome {
                Ok(()) => {
                    let DiskBlock { key, checksum, lineage } = tier_of(&mut self.disk).block(disk);
                    let published = Published { key, checksum, lineage, used: reserved.used, leases: 0, rank: Rank::Policy };
                    self.events.moved(key, Tier::Dram);
                    self.publish(to.slot, published, Tier::Nvme, &mut found);
                    taken += 1;
                }
                Err(fault) => {
                    if fault == DiskFault::Corrupt {
                        tier_of(&mut self.disk).forget(disk);
                        self.leaves(reserved.key);
                        self.actions.push_back(Action::Erase { disk });
                    }
                    self.by_key.remove(&reserved.key);
                    self.shares.lose(reserved.lineage.tenant);
                    self.set_free(to.slot);
                    self.miss_waiters(reserved.key);
                    if fault == DiskFault::Io {
                        self.disk_failed();
                    }
                }
            }
        }
        self.hand_over_all(found, now);
        taken
    }

    /// Stops using a disk that has failed. Blocks that only it held are gone.
    pub fn disk_failed(&mut self) {
        let Some(tier) = self.disk.take() else { return };
        let loading: Vec<u32> = self.reserved.get(&NODE).into_iter().flatten().copied().collect();
        for slot in loading {
            // The shell may be filling it.
            self.cut_off(slot);
        }
        for DiskBlock { key, .. } in tier.blocks() {
            if self.published(&key).is_none() {
                self.leaves(key);
            }
        }
        for slot in 0..self.slots.len() as u32 {
            if let State::Published(Published { key, used, rank: Rank::Leaving | Rank::Clean(_), .. }) = self.slots[slot as usize].state {
                self.rerank(slot, &key, used);
            }
        }
        self.clean.clear();
        self.actions.push_back(Action::GiveUpDisk);
    }

    /// Whether there is a disk that has not failed.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// The block's disk slot, if it can be read from there.
    pub(super) fn on_disk(&self, key: &BlockKey) -> Option<u32> {
        self.disk.as_ref()?.held(key)
    }

    /// Whether the block's bytes are being read from disk or from the bucket.
    pub(super) fn is_loading(&self, key: &BlockKey) -> bool {
        let slot = self.by_key.get(key).map(|&slot| &self.slots[slot as usize].state);
        matches!(slot, Some(State::Reserved(reserved)) if [NODE, OBJECTS].contains(&reserved.writer))
    }

    /// Begins to read a block into DRAM. Returns `false` if there is no slot for it.
    pub(super) fn load(&mut self, disk: u32, used: Use, now: Duration) -> bool {
        let DiskBlock { key, checksum, lineage } = tier_of(&mut self.disk).block(disk);
        // The block is kept first, so that making room does not push it off the disk.
        tier_of(&mut self.disk).load_start(disk);
        let Some(slot) = self.take_slot(lineage.tenant, Room::Made) else {
            tier_of(&mut self.disk).load_ended(disk);
            return false;
        };
        let used = Use { state: tier_of(&mut self.disk).is_state(&key), ..used };
        let until = now + Limits::LOAD;
        let to = self.reserve_slot(slot, NODE, key, lineage, used, until);
        self.actions.push_back(Action::Load { disk, to, checksum, until });
        true
    }

    /// Gives up on a read that took too long; the caller cuts its slot off.
    pub(super) fn load_cut_off(&mut self, key: BlockKey, ended_then: u64) {
        self.miss_waiters(key);
        let Some(tier) = &mut self.disk else { return };
        let disk = tier.held(&key).expect("what is read stays held");
        tier.load_ended(disk);
        if tier.ended() == ended_then {
            // The disk has completed nothing since the read began.
            self.disk_failed();
        }
    }

    /// If DRAM has too little room, starts copying blocks that should leave it to disk.
    pub(super) fn demote(&mut self) {
        let Some(tier) = &self.disk else { return };
        let Watermarks { low, high } = Watermarks::of(self.slots(), tier.slots());
        let storing = tier.storing();
        if self.ready() + storing >= if storing == 0 { low } else { high } {
            return;
        }
        while let Some(tier) = &self.disk
            && tier.takes_stores()
            && self.ready() + tier.storing() < high
            && let Some(slot) = self.policy.evict()
        {
            let (generation, published) = self.slots[slot as usize].published();
            let Published { key, checksum, lineage, used, .. } = *published;
            published.rank = Rank::Leaving;
            let tier = tier_of(&mut self.disk);
            if tier.held(&key).is_some() {
                self.set_clean(slot);
                continue;
            }
            if tier.knows(&key) {
                // The block is being copied already.
                continue;
            }
            let from = SlotRef { slot, generation };
            let block = DiskBlock { key, checksum, lineage };
            let Some((disk, evicted)) = tier.reserve(block, used, from) else {
                self.rerank(slot, &key, used);
                return;
            };
            if let Some(evicted) = evicted {
                // Either the block was on disk only, or DRAM also holds it and keeps it.
                if self.published(&evicted).is_none() {
                    self.leaves(evicted);
                }
            }
            self.actions.push_back(Action::Store { disk, from, block });
        }
    }

    /// The number of slots that can be reused without loss.
    fn ready(&self) -> usize {
        self.free.len() + self.clean.len()
    }

    /// Marks a block that has a copy on disk: it leaves next, after those that became clean before it.
    fn set_clean(&mut self, slot: u32) {
        self.cleaned += 1;
        self.clean.insert(self.cleaned, slot);
        let published = self.slots[slot as usize].published().1;
        published.rank = Rank::Clean(self.cleaned);
        tier_of(&mut self.disk).keep(&published.key, true);
    }

    /// Returns a block that the policy had given up to the policy.
    pub(super) fn rerank(&mut self, slot: u32, key: &BlockKey, used: Use) {
        let published = self.slots[slot as usize].published().1;
        if let Rank::Clean(number) = std::mem::replace(&mut published.rank, Rank::Policy) {
            self.clean.remove(&number);
            self.disk.iter_mut().for_each(|disk| disk.keep(key, false));
        }
        self.policy.insert(slot, key, used);
    }

    /// Reports a miss to all readers that wait for the block: it was held, so no writer is about to bring it.
    pub(super) fn miss_waiters(&mut self, key: BlockKey) {
        for woken in self.waits.wake(key) {
            if let Some(timer) = woken.done {
                self.timers.cancel(timer);
            }
            self.miss(woken.waiter.client, woken.waiter.call, vec![woken.waiter.index]);
        }
    }
}

fn tier_of(disk: &mut Option<DiskSlots>) -> &mut DiskSlots {
    disk.as_mut().expect("the caller looked")
}
