//! A directory's part in the [division](crate::core::division) of memory among layouts: slots come and go. A slot that is lost is absent
//! until it is gained again; it gets a new generation, which tells late readers of its block that this is gone.

use super::{Directory, Published, Slot, State};
use crate::core::division::LayoutNumber;
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};
use tidemill_proto::{block::BlockKey, pool::SlotRef};

/// The number of layouts that a node can have, one after another.
const LAYOUT_NUMBERS: u64 = 1 << u16::BITS;

/// The most slots among which the oldest is sought.
const LOOKED_AT: usize = 1 << 14;

impl Directory {
    /// Makes this the directory of one of a node's layouts: it has no slots yet, and its generations are no other layout's. Call it before
    /// any operation.
    pub(in crate::core) fn divided(mut self, number: LayoutNumber) -> Self {
        for slot in &mut self.slots {
            *slot = Slot { generation: u64::from(number.0), state: State::Absent };
        }
        self.generations = LAYOUT_NUMBERS;
        self.free.clear();
        self.usage.free = 0;
        self.set_present(0);
        self
    }

    pub(in crate::core) fn has_slot(&self, slot: u32) -> bool {
        !matches!(self.slots[slot as usize].state, State::Absent)
    }

    /// Whether this slot can be lost now: it is not leased, being written or withheld from a late writer.
    pub(in crate::core) fn can_lose(&self, slot: u32) -> bool {
        self.last_use(slot).is_some()
    }

    /// The number of the operation that last used the slot's block, and 0 if it holds none. `None` if the slot cannot be lost now.
    pub(in crate::core) fn last_use(&self, slot: u32) -> Option<u64> {
        match self.slots[slot as usize].state {
            State::Absent | State::Free => Some(0),
            State::Published(Published { used, leases: 0, .. }) => Some(used.at),
            State::Published(_) | State::Reserved(_) | State::Quarantined => None,
        }
    }

    /// The number of the operation that used a block longest ago, among all blocks that could leave, or a sample of them.
    pub(in crate::core) fn oldest_use(&self) -> Option<u64> {
        let step = (self.slots.len() / LOOKED_AT).max(1);
        let held = self.slots.iter().step_by(step).filter_map(|slot| match slot.state {
            State::Published(Published { used, leases: 0, .. }) => Some(used.at),
            _ => None,
        });
        held.min()
    }

    /// Gains those of these slots that it does not have.
    pub(in crate::core) fn gain_slots(&mut self, slots: impl IntoIterator<Item = u32, IntoIter: DoubleEndedIterator>) {
        let before = self.free.len();
        // The first of them is the next to be used.
        for slot in slots.into_iter().rev() {
            let state = &mut self.slots[slot as usize].state;
            if matches!(state, State::Absent) {
                *state = State::Free;
                self.free.push(slot);
            }
        }
        let gained = self.free.len() - before;
        self.usage.free += gained;
        self.set_present(self.present + gained);
    }

    /// Loses these slots, all of which can be lost, with their blocks. Returns those that it had, with their new generations.
    pub(in crate::core) fn lose_slots(&mut self, slots: Range<u32>) -> Vec<SlotRef> {
        let mut lost = Vec::new();
        for slot in slots {
            match self.slots[slot as usize].state {
                State::Absent => continue,
                State::Free => self.usage.free -= 1,
                State::Published(Published { leases: 0, .. }) => {
                    self.unrank(slot);
                    self.usage.cached -= 1;
                    self.leave_dram(slot);
                }
                state => unreachable!("slot {slot} is in use and cannot be lost: {state:?}"),
            }
            let entry = &mut self.slots[slot as usize];
            entry.generation += self.generations;
            entry.state = State::Absent;
            lost.push(SlotRef { slot, generation: entry.generation });
        }
        self.free.retain(|&slot| matches!(self.slots[slot as usize].state, State::Free));
        self.set_present(self.present - lost.len());
        lost
    }

    /// Ends a directory, all slots of which can be lost. Returns those that it had, with their new generations.
    pub(in crate::core) fn end(self) -> Vec<SlotRef> {
        let had = (0..).zip(&self.slots).filter(|(_, slot)| !matches!(slot.state, State::Absent));
        had.map(|(slot, Slot { generation, .. })| SlotRef { slot, generation: generation + self.generations }).collect()
    }

    fn set_present(&mut self, slots: usize) {
        self.present = slots;
        self.shares.set_slots(slots);
        self.policy.resize(slots as u32);
    }

    /// The number of these keys for which a put needs a slot.
    pub fn to_write(&self, keys: &[BlockKey]) -> usize {
        keys.iter().filter(|key| !self.by_key.contains_key(key) && self.on_disk(key).is_none()).count()
    }

    /// The number of these keys for which a get needs a slot: those on disk or in the bucket only.
    pub fn to_load(&self, keys: &[BlockKey]) -> usize {
        if self.disk.is_none() && self.objects.is_none() {
            return 0;
        }
        keys.iter().filter(|key| !self.by_key.contains_key(key) && (self.on_disk(key).is_some() || self.in_objects(key))).count()
    }

    /// Panics unless the slots that it has are counted.
    pub(super) fn check_present(&self, leasing: &HashMap<SlotRef, u32>) {
        let present = self.slots.iter().filter(|slot| !matches!(slot.state, State::Absent)).count();
        assert_eq!(present, self.present, "slots are miscounted");
        let absent = |at: &&SlotRef| matches!(self.slots[at.slot as usize], Slot { generation, state: State::Absent } if generation == at.generation);
        let leased: HashSet<&SlotRef> = leasing.keys().filter(absent).collect();
        assert!(leased.is_empty(), "a slot was lost while it was leased: {leased:?}");
    }
}
