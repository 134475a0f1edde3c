//! The steps of a slot's life, each with all the books that it changes.

use super::{Action, ClientId, Directory, Due, Limits, Published, Reserved, Slot, State, leases::Lease};
use crate::eviction::Use;
use std::time::Duration;
use tidemill_proto::{
    block::BlockKey,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, SlotRef, Tier, Via},
};

impl Directory {
    pub(super) fn published(&self, key: &BlockKey) -> Option<SlotRef> {
        let &slot = self.by_key.get(key)?;
        let Slot { generation, state } = &self.slots[slot as usize];
        matches!(state, State::Published(_)).then_some(SlotRef { slot, generation: *generation })
    }

    pub(super) fn published_at(&self, at: SlotRef) -> Option<Published> {
        match self.slots.get(at.slot as usize)? {
            Slot { generation, state: State::Published(published) } if *generation == at.generation => Some(*published),
            _ => None,
        }
    }

    pub(super) fn found(&self, index: u32, slot: u32) -> Found {
        let Slot { generation, state: State::Published(published) } = &self.slots[slot as usize] else {
            unreachable!("only published slots are found");
        };
        let at = SlotRef { slot, generation: *generation };
        Found { index, at, checksum: published.checksum, origin: published.lineage.origin, tier: Tier::Dram }
    }

    pub(super) fn reserve(&mut self, client: ClientId, lineage: Lineage, key: BlockKey, used: Use, now: Duration) -> Reservation {
        if let Some(&slot) = self.by_key.get(&key) {
            let held = matches!(self.slots[slot as usize].state, State::Published(_));
            return if held { Reservation::Held } else { Reservation::InFlight };
        }
        let Some(slot) = self.free.pop().or_else(|| self.evict()) else { return Reservation::Full };
        self.usage.free -= 1;
        self.usage.reserved += 1;
        let timer = self.timers.add(now + self.limits.put_deadline, Due::Reservation(slot));
        let entry = &mut self.slots[slot as usize];
        entry.generation += 1;
        entry.state = State::Reserved(Reserved { key, writer: client, lineage, used, timer, receiving: false });
        let generation = entry.generation;
        self.by_key.insert(key, slot);
        self.reserved.entry(client).or_default().insert(slot);
        Reservation::Write(SlotRef { slot, generation })
    }

    /// A slot that the policy gives up, counted as free.
    pub(super) fn evict(&mut self) -> Option<u32> {
        let slot = self.policy.evict()?;
        let State::Published(Published { key, .. }) = self.slots[slot as usize].state else {
            unreachable!("only published slots are candidates");
        };
        self.by_key.remove(&key);
        self.events.evicted(key);
        self.usage.cached -= 1;
        self.usage.free += 1;
        Some(slot)
    }

    pub(super) fn reservation(&mut self, client: ClientId, at: SlotRef) -> Option<&mut Reserved> {
        match self.slots.get_mut(at.slot as usize)? {
            Slot { generation, state: State::Reserved(reserved) } if *generation == at.generation && reserved.writer == client => {
                Some(reserved)
            }
            _ => None,
        }
    }

    /// Ends a reservation of this client; the caller decides what becomes of slot and key.
    pub(super) fn take_reservation(&mut self, client: ClientId, at: SlotRef) -> Option<Reserved> {
        let reserved = *self.reservation(client, at)?;
        self.timers.cancel(reserved.timer);
        self.usage.reserved -= 1;
        let slots = self.reserved.get_mut(&client).expect("a reservation is listed under its writer");
        slots.remove(&at.slot);
        if slots.is_empty() {
            self.reserved.remove(&client);
        }
        Some(reserved)
    }

    /// Ends a reservation whose writer may still be writing.
    pub(super) fn cut_off(&mut self, slot: u32) {
        let State::Reserved(reserved) = self.slots[slot as usize].state else {
            unreachable!("a reservation and its timer end together");
        };
        self.timers.cancel(reserved.timer);
        if let Some(slots) = self.reserved.get_mut(&reserved.writer) {
            slots.remove(&slot);
            if slots.is_empty() {
                self.reserved.remove(&reserved.writer);
            }
        }
        self.usage.reserved -= 1;
        self.by_key.remove(&reserved.key);
        self.quarantine(slot, reserved.timer.at() + Limits::QUARANTINE);
    }

    pub(super) fn quarantine(&mut self, slot: u32, until: Duration) {
        self.slots[slot as usize].state = State::Quarantined;
        self.usage.quarantined += 1;
        self.timers.add(until, Due::Quarantine(slot));
    }

    pub(super) fn set_free(&mut self, slot: u32) {
        self.slots[slot as usize].state = State::Free;
        self.usage.free += 1;
        self.free.push(slot);
    }

    pub(super) fn hand_over(&mut self, client: ClientId, call: CallId, via: Via, blocks: Vec<(Found, Use)>, now: Duration) {
        if blocks.is_empty() {
            return;
        }
        let Some(lease) = self.leases.next_id(client, blocks.len()) else {
            return self.miss(client, call, blocks.iter().map(|(block, _)| block.index).collect());
        };
        self.grant(client, lease, blocks.iter().map(|&(block, used)| (block.at, used)).collect(), now + self.limits.lease);
        let blocks = blocks.into_iter().map(|(block, _)| block).collect();
        self.actions.push_back(Action::Found { client, call, via, lease, blocks });
    }

    pub(super) fn miss(&mut self, client: ClientId, call: CallId, indexes: Vec<u32>) {
        if !indexes.is_empty() {
            self.actions.push_back(Action::Missed { client, call, indexes });
        }
    }

    pub(super) fn grant(&mut self, client: ClientId, id: LeaseId, blocks: Vec<(SlotRef, Use)>, until: Duration) {
        blocks.iter().for_each(|(at, _)| self.pin(at.slot));
        let timer = self.timers.add(until, Due::Lease(client, id));
        self.leases.add(client, id, Lease { blocks, timer });
    }

    pub(super) fn unlease(&mut self, blocks: &[(SlotRef, Use)]) {
        for &(at, used) in blocks {
            if self.published_at(at).is_some() {
                self.unpin(at.slot, used);
            }
        }
    }

    pub(super) fn pin(&mut self, slot: u32) {
        let State::Published(published) = &mut self.slots[slot as usize].state else { unreachable!("only published slots are pinned") };
        published.leases += 1;
        if published.leases == 1 {
            self.usage.cached -= 1;
            self.usage.leased += 1;
            self.policy.pin(slot);
        }
    }

    pub(super) fn unpin(&mut self, slot: u32, used: Use) {
        let State::Published(published) = &mut self.slots[slot as usize].state else { unreachable!("only published slots are pinned") };
        published.leases -= 1;
        if used.at > published.used.at {
            published.used = used;
        }
        if published.leases == 0 {
            self.usage.leased -= 1;
            self.usage.cached += 1;
            self.policy.unpin(slot, published.used);
        }
    }
}
