//! The directory of the disk: keys to disk slots. It decides nothing about DRAM; [`tiers`](super::tiers) moves blocks between the two.
//!
//! ```text
//!            reserve            stored                evicted by reserve, forgotten
//!   1 free ──────────► 2 storing ──────► 3 held ─────────────────────────────────────► (1, or 2 for another block)
//!      ▲                  │                 ▲ │ load_start, keep
//!      │                  │ abandon         │ └──────► (pinned until load_end, keep no more) ───┐
//!      └── store ended ── 4 abandoned       └──────────────────────────────────────────────────┘
//! ```
//!
//! A block that is being stored is also in DRAM, unchanged. If it leaves DRAM, the store is abandoned.

use super::shares::Shares;
use crate::core::eviction::{EvictionPolicy, Use};
use std::collections::{HashMap, HashSet};
use tidemill_proto::{
    block::BlockKey,
    pool::{Lineage, SlotRef},
};

/// A block that is on disk or on its way there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskBlock {
    pub key: BlockKey,
    pub checksum: u64,
    pub lineage: Lineage,
}

/// Disk slots by state; they add up to all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    pub free: usize,
    /// Slots that are held and not being read.
    pub cached: usize,
    /// Slots that are being written or read.
    pub busy: usize,
}

pub(super) struct DiskSlots {
    slots: Vec<State>,
    /// Blocks that are held or being stored.
    by_key: HashMap<BlockKey, u32>,
    free: Vec<u32>,
    policy: Box<dyn EvictionPolicy>,
    shares: Shares,
    /// Slots being written, including abandoned ones.
    storing: usize,
    /// Blocks being read.
    loading: usize,
    /// Reads and writes that have ended.
    ended: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    Storing {
        block: DiskBlock,
        used: Use,
        from: SlotRef,
    },
    Abandoned,
    /// `kept`: the block makes its DRAM slot clean, which it would not be without this copy.
    Held {
        block: DiskBlock,
        used: Use,
        loading: bool,
        kept: bool,
    },
}

impl DiskSlots {
    pub(super) fn new(slots: u32, policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            slots: vec![State::Free; slots as usize],
            by_key: HashMap::new(),
            free: (0..slots).rev().collect(),
            policy,
            shares: Shares::new(slots as usize, 100),
            storing: 0,
            loading: 0,
            ended: 0,
        }
    }

    /// Limits each tenant to this percentage of the slots. Call it before any operation.
    pub(super) fn limit_tenants(&mut self, percent: u8) {
        self.shares = Shares::new(self.slots.len(), percent);
    }

    /// Takes a block that was on disk before this node started. Returns `false` if the slot is in use, the key is held already or its
    /// tenant has its full share.
    pub(super) fn recover(&mut self, disk: u32, block: DiskBlock, used: Use) -> bool {
        let free = matches!(self.slots.get(disk as usize), Some(State::Free));
        if !free || self.by_key.contains_key(&block.key) || self.shares.is_full(block.lineage.tenant) {
            return false;
        }
        self.shares.gain(block.lineage.tenant);
        self.hold(disk, block, used);
        true
    }

    /// Ends recovery. Call it after the last [`recover`](Self::recover).
    pub(super) fn recovered(&mut self) {
        let is_free = |disk: &u32| matches!(self.slots[*disk as usize], State::Free);
        self.free = (0..self.slots.len() as u32).rev().filter(is_free).collect();
    }

    /// The slot of a block that can be read.
    pub(super) fn held(&self, key: &BlockKey) -> Option<u32> {
        let &disk = self.by_key.get(key)?;
        matches!(self.slots[disk as usize], State::Held { .. }).then_some(disk)
    }

    pub(super) fn block(&self, disk: u32) -> DiskBlock {
        match self.slots[disk as usize] {
            State::Held { block, .. } | State::Storing { block, .. } => block,
            State::Free | State::Abandoned => unreachable!("disk slot {disk} holds nothing"),
        }
    }

    /// Whether the block is held or being stored, and is part of a state.
    pub(super) fn is_state(&self, key: &BlockKey) -> bool {
        let slot = self.by_key.get(key).map(|&disk| self.slots[disk as usize]);
        matches!(slot, Some(State::Held { used, .. } | State::Storing { used, .. }) if used.state)
    }

    /// Whether the block is held or being stored.
    pub(super) fn knows(&self, key: &BlockKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Reserves a slot for a block that is in DRAM; also returns the key that had to leave. `None` if all slots are being read or written.
    pub(super) fn reserve(&mut self, block: DiskBlock, used: Use, from: SlotRef) -> Option<(u32, Option<BlockKey>)> {
        let tenant = block.lineage.tenant;
        let (disk, evicted) = if self.shares.is_full(tenant) {
            let disk = self.shares.oldest(tenant)?;
            self.policy.remove(disk);
            (disk, Some(self.leave(disk)))
        } else if let Some(disk) = self.free.pop() {
            (disk, None)
        } else {
            let disk = self.policy.evict()?;
            (disk, Some(self.leave(disk)))
        };
        self.shares.gain(tenant);
        self.slots[disk as usize] = State::Storing { block, used, from };
        self.by_key.insert(block.key, disk);
        self.storing += 1;
        Some((disk, evicted))
    }

    /// Abandons the store of a block whose DRAM copy is gone, since the bytes being written are of no use.
    pub(super) fn abandon(&mut self, key: &BlockKey) {
        if let Some(&disk) = self.by_key.get(key)
            && matches!(self.slots[disk as usize], State::Storing { .. })
        {
            self.by_key.remove(key);
            self.shares.lose(self.block(disk).lineage.tenant);
            self.slots[disk as usize] = State::Abandoned;
        }
    }

    /// Ends a write. Returns the DRAM slot it was copied from, unless the store was abandoned.
    pub(super) fn store_ended(&mut self, disk: u32, written: bool) -> Option<SlotRef> {
        self.storing -= 1;
        self.ended += 1;
        match self.slots[disk as usize] {
            State::Storing { block, used, from } => {
                self.by_key.remove(&block.key);
                if written {
                    self.hold(disk, block, used);
                } else {
                    self.shares.lose(block.lineage.tenant);
                    self.set_free(disk);
                }
                Some(from)
            }
            State::Abandoned => {
                self.set_free(disk);
                None
            }
            State::Free | State::Held { .. } => unreachable!("disk slot {disk} is not being written"),
        }
    }

    /// Keeps the slot's content while it is being read.
    pub(super) fn load_start(&mut self, disk: u32) {
        self.loading += 1;
        self.pin(disk, |loading, _| assert!(!std::mem::replace(loading, true), "disk slot {disk} is being read already"));
    }

    pub(super) fn load_ended(&mut self, disk: u32) {
        self.loading -= 1;
        self.pin(disk, |loading, _| assert!(std::mem::replace(loading, false), "disk slot {disk} is not being read"));
    }

    /// Marks whether the block makes a DRAM slot clean. If so, it stays: replacing it by a copy of another block would gain nothing.
    pub(super) fn keep(&mut self, key: &BlockKey, keep: bool) {
        let disk = self.held(key).expect("what makes a slot clean is held");
        self.pin(disk, |_, kept| assert_ne!(std::mem::replace(kept, keep), keep, "disk slot {disk} is kept once"));
    }

    /// Changes the reasons why a block cannot leave.
    fn pin(&mut self, disk: u32, change: impl FnOnce(&mut bool, &mut bool)) {
        let State::Held { block, used, loading, kept } = &mut self.slots[disk as usize] else {
            unreachable!("only what is held is pinned")
        };
        let was_idle = !*loading && !*kept;
        change(loading, kept);
        let (is_idle, tenant, used) = (!*loading && !*kept, block.lineage.tenant, *used);
        if was_idle != is_idle {
            self.shares.set_idle(tenant, disk, used, is_idle);
            if is_idle { self.policy.unpin(disk, used) } else { self.policy.pin(disk) }
        }
    }

    /// The number of reads and writes that have ended. While this stands still, the disk hangs.
    pub(super) fn ended(&self) -> u64 {
        self.ended
    }

    /// Counts a read that was answered.
    pub(super) fn answered(&mut self) {
        self.ended += 1;
    }

    /// Records a use of the block, in either tier.
    pub(super) fn touch(&mut self, key: &BlockKey, now: Use) {
        let Some(&disk) = self.by_key.get(key) else { return };
        match &mut self.slots[disk as usize] {
            State::Held { block, used, loading, kept } if now.at > used.at => {
                let now = now.of_block(block.lineage.position, used.state);
                let before = std::mem::replace(used, now);
                if !*loading && !*kept {
                    self.shares.set_idle(block.lineage.tenant, disk, before, false);
                    self.shares.set_idle(block.lineage.tenant, disk, now, true);
                    self.policy.pin(disk);
                    self.policy.unpin(disk, now);
                }
            }
            State::Storing { block, used, .. } if now.at > used.at => *used = now.of_block(block.lineage.position, used.state),
            _ => {}
        }
    }

    /// Forgets a block that is held and not being read.
    pub(super) fn forget(&mut self, disk: u32) {
        self.policy.remove(disk);
        self.leave(disk);
        self.set_free(disk);
    }

    /// Removes this slot's block, which the policy has already let go, so that it is not found any more.
    fn leave(&mut self, disk: u32) -> BlockKey {
        let State::Held { block, used, .. } = self.slots[disk as usize] else { unreachable!("only what is held can leave") };
        self.shares.set_idle(block.lineage.tenant, disk, used, false);
        self.shares.lose(block.lineage.tenant);
        self.by_key.remove(&block.key);
        block.key
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Whether another store may begin.
    pub(super) fn takes_stores(&self) -> bool {
        self.storing < STORES_MAX
    }

    pub(super) fn storing(&self) -> usize {
        self.storing
    }

    pub(super) fn loading(&self) -> usize {
        self.loading
    }

    /// Blocks that can be read.
    pub(super) fn blocks(&self) -> impl Iterator<Item = DiskBlock> {
        self.held_slots().map(|(_, block, _)| block)
    }

    /// Blocks that can be read, with their slots and last uses.
    pub(super) fn held_slots(&self) -> impl Iterator<Item = (u32, DiskBlock, Use)> {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(disk, slot)| if let State::Held { block, used, .. } = slot { Some((disk, *block, *used)) } else { None })
    }

    pub(super) fn usage(&self) -> DiskUsage {
        let busy = self.storing + self.loading;
        DiskUsage { free: self.free.len(), cached: self.slots.len() - self.free.len() - busy, busy }
    }

    fn hold(&mut self, disk: u32, block: DiskBlock, used: Use) {
        self.slots[disk as usize] = State::Held { block, used, loading: false, kept: false };
        self.by_key.insert(block.key, disk);
        self.shares.set_idle(block.lineage.tenant, disk, used, true);
        self.policy.insert(disk, &block.key, used);
    }

    fn set_free(&mut self, disk: u32) {
        self.slots[disk as usize] = State::Free;
        self.free.push(disk);
    }

    /// Panics if the books do not balance. `in_dram`: whether a DRAM slot holds this block.
    pub(super) fn check_integrity(&self, in_dram: impl Fn(SlotRef, &BlockKey) -> bool) {
        let free: HashSet<u32> = self.free.iter().copied().collect();
        assert_eq!(free.len(), self.free.len(), "a disk slot is free twice");
        let (mut storing, mut loads, mut keys) = (0, 0, 0);
        for (disk, state) in (0u32..).zip(&self.slots) {
            assert_eq!(matches!(state, State::Free), free.contains(&disk), "disk slot {disk} is free and in use");
            let candidate = matches!(state, State::Held { loading: false, kept: false, .. });
            assert_eq!(self.policy.is_candidate(disk), candidate, "disk slot {disk} may leave exactly if it is held and not pinned");
            match state {
                State::Free => {}
                State::Abandoned => storing += 1,
                State::Storing { block, from, .. } => {
                    assert!(in_dram(*from, &block.key), "disk slot {disk} is stored from a slot that holds something else");
                    assert_eq!(self.by_key.get(&block.key), Some(&disk), "the key of disk slot {disk} leads elsewhere");
                    storing += 1;
                    keys += 1;
                }
                State::Held { block, loading, .. } => {
                    assert_eq!(self.by_key.get(&block.key), Some(&disk), "the key of disk slot {disk} leads elsewhere");
                    loads += usize::from(*loading);
                    keys += 1;
                }
            }
        }
        self.shares.check_integrity((0..).zip(&self.slots).filter_map(|(disk, state)| match *state {
            State::Held { block, used, loading, kept } => Some((block.lineage.tenant, disk, used, !loading && !kept)),
            State::Storing { block, used, .. } => Some((block.lineage.tenant, disk, used, false)),
            State::Free | State::Abandoned => None,
        }));
        assert_eq!((storing, loads), (self.storing, self.loading), "reads and writes are miscounted");
        assert_eq!(keys, self.by_key.len(), "a key leads to no disk slot");
        assert!(self.storing <= STORES_MAX, "too many stores");
    }
}

/// The most writes in progress: enough to keep any disk busy, even with small blocks.
const STORES_MAX: usize = 1024;
