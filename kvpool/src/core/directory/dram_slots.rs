//! The transitions of a DRAM slot, each with all the books that it changes.

use super::{
    Action, ClientId, Directory, Due, Handovers, Limits, Published, Rank, Reserved, Slot, State,
    leases::Lease,
    objects::OBJECTS,
    tiers::NODE,
    waits::{Asked, Get, Woken},
};
use crate::core::eviction::Use;
use std::{collections::BTreeMap, time::Duration};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    pool::{CallId, Found, LeaseId, Lineage, Reservation, Room, SlotRef, Tier, Via},
};

impl Slot {
    /// The slot's generation and block. Only for published slots.
    pub(super) fn published(&mut self) -> (u64, &mut Published) {
        match &mut self.state {
            State::Published(published) => (self.generation, published),
            other => unreachable!("only published slots are candidates, pinned or copied: {other:?}"),
        }
    }
}

impl Directory {
    pub(super) fn published(&self, key: &BlockKey) -> Option<SlotRef> {
        let &slot = self.by_key.get(key)?;
        let Slot { generation, state } = &self.slots[slot as usize];
        matches!(state, State::Published(_)).then_some(SlotRef { slot, generation: *generation })
    }

    /// The number of the operation that brings these blocks: that of the block before them, if it came for the same request. A prompt is
    /// one use of its chain however many puts it takes, so that the chain leaves from its end.
    pub(super) fn operation_of(&mut self, lineage: &Lineage) -> u64 {
        self.operation += 1;
        match lineage.parent.and_then(|parent| self.use_of(&parent)) {
            Some((before, used)) if before.origin == lineage.origin && used.at > 0 => used.at,
            _ => self.operation,
        }
    }

    /// Whether a block of this lineage is part of a state: the first part is named after the block before it, and the others follow a
    /// part.
    pub(super) fn is_of_state(&self, lineage: &Lineage, key: &BlockKey) -> bool {
        let Some(parent) = lineage.parent else { return false };
        parent.state_part(0) == *key || self.use_of(&parent).is_some_and(|(_, used)| used.state)
    }

    /// Records that a state follows the block, which therefore ends no chain: without it, the state would be worth nothing.
    pub(super) fn has_state_after(&mut self, key: &BlockKey) {
        let Some(&slot) = self.by_key.get(key) else { return };
        match &mut self.slots[slot as usize].state {
            State::Reserved(reserved) => reserved.used.tail = false,
            State::Published(published) if published.used.tail => {
                published.used.tail = false;
                let used = published.used;
                self.pin(slot);
                self.unpin(slot, used);
            }
            _ => {}
        }
    }

    /// The lineage and last use of a block that is reserved or published.
    pub(super) fn use_of(&self, key: &BlockKey) -> Option<(Lineage, Use)> {
        match self.slots[*self.by_key.get(key)? as usize].state {
            State::Reserved(Reserved { lineage, used, .. }) | State::Published(Published { lineage, used, .. }) => Some((lineage, used)),
            State::Absent | State::Free | State::Quarantined => None,
        }
    }

    pub(super) fn published_at(&self, at: SlotRef) -> Option<Published> {
        match self.slots.get(at.slot as usize)? {
            Slot { generation, state: State::Published(published) } if *generation == at.generation => Some(*published),
            _ => None,
        }
    }

    pub(super) fn found(&self, index: u32, slot: u32, tier: Tier) -> Found {
        let Slot { generation, state: State::Published(published) } = &self.slots[slot as usize] else {
            unreachable!("only published slots are found");
        };
        let at = SlotRef { slot, generation: *generation };
        Found { index, at, checksum: published.checksum, origin: published.lineage.origin, tier }
    }

    pub(super) fn reserve(
        &mut self,
        client: ClientId,
        lineage: Lineage,
        room: Room,
        key: BlockKey,
        used: Use,
        now: Duration,
    ) -> Reservation {
        if let Some(&slot) = self.by_key.get(&key) {
            let held = matches!(self.slots[slot as usize].state, State::Published(_));
            return if held { Reservation::Held } else { Reservation::InFlight };
        }
        if self.on_disk(&key).is_some() {
            self.touch_disk(&key, used);
            return Reservation::Held;
        }
        let Some(slot) = self.take_slot(lineage.tenant, room) else { return Reservation::Full };
        Reservation::Write(self.reserve_slot(slot, client, key, lineage, used, now + self.limits.put_deadline))
    }

    /// Reserves a slot that [`take_slot`](Self::take_slot) returned.
    pub(super) fn reserve_slot(
        &mut self,
        slot: u32,
        writer: ClientId,
        key: BlockKey,
        lineage: Lineage,
        used: Use,
        until: Duration,
    ) -> SlotRef {
        self.usage.reserved += 1;
        self.shares.gain(lineage.tenant);
        let timer = self.timers.add(until, Due::Reservation(slot));
        let disk_ended = self.disk.as_ref().map_or(0, |disk| disk.ended());
        let entry = &mut self.slots[slot as usize];
        entry.generation += self.generations;
        entry.state = State::Reserved(Reserved { key, writer, lineage, used, timer, receiving: false, disk_ended });
        let generation = entry.generation;
        self.by_key.insert(key, slot);
        self.reserved.entry(writer).or_default().insert(slot);
        SlotRef { slot, generation }
    }

    /// A slot for a new block, counted in no state: a free one, or one whose block is also on disk, or, if room may be made, one that the
    /// policy gives up. A tenant with its full share only gets slots of its own.
    pub(super) fn take_slot(&mut self, tenant: Tenant, room: Room) -> Option<u32> {
        let made = room == Room::Made;
        let slot = if self.shares.is_full(tenant) {
            let slot = self.shares.oldest(tenant).filter(|_| made)?;
            self.unrank(slot);
            slot
        } else if let Some(slot) = self.free.pop() {
            self.usage.free -= 1;
            return Some(slot);
        } else if let Some((_, slot)) = self.clean.pop_first() {
            slot
        } else if made {
            self.policy.evict()?
        } else {
            return None;
        };
        self.usage.cached -= 1;
        self.leave_dram(slot);
        Some(slot)
    }

    /// Removes the slot's block, which leaves now, from the list that ranks it.
    pub(super) fn unrank(&mut self, slot: u32) {
        match self.slots[slot as usize].published().1.rank {
            Rank::Policy => self.policy.remove(slot),
            Rank::Leaving => {}
            Rank::Clean(number) => drop(self.clean.remove(&number)),
        }
    }

    /// Removes the slot's block from DRAM, so that it is not found there any more.
    pub(super) fn leave_dram(&mut self, slot: u32) {
        let Published { key, lineage, used, rank, .. } = *self.slots[slot as usize].published().1;
        self.shares.set_idle(lineage.tenant, slot, used, false);
        self.shares.lose(lineage.tenant);
        self.by_key.remove(&key);
        if let Some(disk) = &mut self.disk {
            disk.abandon(&key);
            if matches!(rank, Rank::Clean(_)) {
                disk.keep(&key, false);
            }
        }
        if self.on_disk(&key).is_some() {
            self.events.moved(key, Tier::Nvme);
        } else {
            self.leaves(key);
        }
    }

    /// Publishes the block that fills a slot, and adds its waiting readers to `found`.
    pub(super) fn publish(&mut self, slot: u32, mut block: Published, from: Tier, found: &mut Handovers) {
        let woken = self.waits.wake(block.key);
        // A reader requests a whole chain at once, however many puts it takes.
        let used = woken.last().map_or(block.used, |woken| woken.used);
        block.used = used.of_block(block.lineage.position, block.used.state);
        self.shares.set_idle(block.lineage.tenant, slot, block.used, true);
        self.slots[slot as usize].state = State::Published(block);
        self.usage.cached += 1;
        self.policy.insert(slot, &block.key, block.used);
        for Woken { waiter, via, used, done } in woken {
            if let Some(timer) = done {
                self.timers.cancel(timer);
            }
            let (_, blocks) = found.entry((waiter.client, waiter.call)).or_insert((via, Vec::new()));
            blocks.push((self.found(waiter.index, slot, from), used));
        }
    }

    pub(super) fn reservation(&mut self, client: ClientId, at: SlotRef) -> Option<&mut Reserved> {
        match self.slots.get_mut(at.slot as usize)? {
            Slot { generation, state: State::Reserved(reserved) } if *generation == at.generation && reserved.writer == client => {
                Some(reserved)
            }
            _ => None,
        }
    }

    /// Ends a reservation of this client; the caller decides the fate of its slot and key.
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
        self.shares.lose(reserved.lineage.tenant);
        if self.remote.contains(&reserved.writer) {
            self.quarantine_until_fenced(slot, reserved.writer);
        } else {
            self.quarantine(slot, reserved.timer.at() + Limits::QUARANTINE);
        }
        if reserved.writer == NODE {
            self.load_cut_off(reserved.key, reserved.disk_ended);
        }
        if reserved.writer == OBJECTS {
            self.miss_waiters(reserved.key);
        }
    }

    pub(super) fn quarantine(&mut self, slot: u32, until: Duration) {
        self.slots[slot as usize].state = State::Quarantined;
        self.usage.quarantined += 1;
        self.timers.add(until, Due::Quarantine(slot));
    }

    fn quarantine_until_fenced(&mut self, slot: u32, writer: ClientId) {
        self.slots[slot as usize].state = State::Quarantined;
        self.usage.quarantined += 1;
        let slots = self.unfenced.entry(writer).or_default();
        if slots.is_empty() {
            self.actions.push_back(Action::Fence { client: writer });
        }
        slots.push(slot);
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

    pub(super) fn hand_over_all(&mut self, found: Handovers, now: Duration) {
        for ((client, call), (via, blocks)) in found {
            self.hand_over(client, call, via, blocks, now);
        }
    }

    /// Makes a get wait until its deadline, and a little longer for blocks that are being read from disk or from the bucket.
    pub(super) fn await_blocks(
        &mut self,
        client: ClientId,
        call: CallId,
        asked: Asked,
        mut waiting: BTreeMap<u32, BlockKey>,
        now: Duration,
    ) {
        let mut until = asked.until;
        if until <= now {
            let late: Vec<u32> = waiting.extract_if(.., |_, key| !self.is_loading(key)).map(|(index, _)| index).collect();
            self.miss(client, call, late);
            until = now + Limits::LOAD;
        }
        if !waiting.is_empty() {
            let timer = self.timers.add(until, Due::Get(client, call));
            self.waits.add(client, call, Get { asked, timer, waiting });
        }
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
        let Published { key, lineage, used, leases, rank, .. } = *self.slots[slot as usize].published().1;
        if leases == 0 {
            self.shares.set_idle(lineage.tenant, slot, used, false);
            if rank != Rank::Policy {
                self.rerank(slot, &key, used);
            }
            self.usage.cached -= 1;
            self.usage.leased += 1;
            self.policy.pin(slot);
        }
        self.slots[slot as usize].published().1.leases += 1;
    }

    pub(super) fn unpin(&mut self, slot: u32, used: Use) {
        let published = self.slots[slot as usize].published().1;
        published.leases -= 1;
        if used.at > published.used.at {
            published.used = used.of_block(published.lineage.position, published.used.state);
        }
        let Published { key, lineage, used, leases, .. } = *published;
        if leases == 0 {
            self.shares.set_idle(lineage.tenant, slot, used, true);
            self.usage.leased -= 1;
            self.usage.cached += 1;
            self.policy.unpin(slot, used);
            self.touch_disk(&key, used);
        }
    }

    pub(super) fn touch_disk(&mut self, key: &BlockKey, used: Use) {
        if let Some(disk) = &mut self.disk {
            disk.touch(key, used);
        }
    }
}
