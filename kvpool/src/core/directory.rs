//! The directory of a pool node: keys to slots, and the access to each slot. No bytes, no clock, no socket: calls bring the time, results
//! and [`Action`]s go out.
//!
//! A slot's life:
//!
//! ```text
//!        put_start           put_end              evicted by put_start
//! 1 free ────────► 2 reserved ────────► 3 published ──────────────────► (2 reserved, for another key)
//!     ▲                │  │                  │
//!     ├── put_revoke ──┘  │ deadline,        │ forget while leased
//!     │                   │ client gone      │
//!     └──── time is up ─── 4 quarantined ◄───┘        (3 published ── forget ──► 1 free, when not leased)
//! ```
//!
//! (A block that is loaded from disk is written by the node itself: see `tiers`.)
//!
//! 1. **free**: its content means nothing
//! 2. **reserved**: one writer may fill it until a deadline. Its key is in flight, and not found. Reserving gives the slot a new
//!    generation, which tells readers of its earlier content that it is gone.
//! 3. **published**: full, immutable, found by its key; leased to readers, or a candidate for eviction
//! 4. **quarantined**: neither found nor reused, because a writer that was cut off may still be writing; for a fixed time if the writer is
//!    on this host or behind the node; until the shell has fenced it if it writes from another host (RDMA)
//!
//! A directory of several layouts' memory does not have all of its slots at any time: see `divided`.
//!
//! Every wait, lease and reservation has a deadline, so everything that a dead peer held is free again within
//! [`Limits::reclaim_max`].

mod disk_slots;
mod divided;
mod dram_slots;
mod events;
mod hottest;
mod integrity;
mod leases;
mod objects;
mod shares;
mod tiers;
mod timers;
mod waits;

pub use disk_slots::{DiskBlock, DiskUsage};
pub use events::Events;
pub use hottest::{Held, Place};
pub use objects::{FetchFault, Fetched, ToPack};
pub use tiers::{DiskFault, Loaded};

use crate::core::{
    eviction::{EvictionPolicy, Use},
    objects::catalog::PackedBlock,
};
use disk_slots::DiskSlots;
use events::EventLog;
use leases::Leases;
use objects::{OBJECTS, Objects};
use shares::Shares;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    time::Duration,
};
use tidemill_proto::{
    block::BlockKey,
    message::PoolEvent,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, Room, SlotRef, Tier, Via, Written},
};
use tiers::NODE;
use timers::{TimerId, Timers};
use waits::{Asked, Waits};

/// The identity of one client's connection. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ClientId(pub u64);

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time from `put_start` to `put_end`.
    pub put_deadline: Duration,
    /// The time from handing blocks to a reader to the end of its claim on them.
    pub lease: Duration,
}

impl Limits {
    /// The time for which a reserved slot is withheld after its deadline: a writer that checked the clock just before the deadline has
    /// finished its copy by then.
    pub const QUARANTINE: Duration = Duration::from_millis(500);

    /// The time in which the disk must deliver a block. Even a reader that wants no wait waits this long.
    pub const LOAD: Duration = Duration::from_secs(5);

    /// The time for which `match_prefix` keeps the blocks it found: enough for the get that follows.
    pub const MATCH_LEASE: Duration = Duration::from_secs(1);

    /// The longest time for which a dead or silent peer can hold anything.
    pub fn reclaim_max(&self) -> Duration {
        (self.put_deadline.max(Self::LOAD) + Self::QUARANTINE).max(self.lease).max(Self::MATCH_LEASE)
    }
}

/// An instruction to the shell. Instructions are carried out in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Hand these published blocks to a reader. They are leased to it.
    Found { client: ClientId, call: CallId, via: Via, lease: LeaseId, blocks: Vec<Found> },
    /// Tell a reader that it will not get these blocks.
    Missed { client: ClientId, call: CallId, indexes: Vec<u32> },
    /// Copy a block to disk, if the slot still holds it after the copy. Always answer with [`Directory::stored`].
    Store { disk: u32, from: SlotRef, block: DiskBlock },
    /// Fill a slot from disk. Always answer with [`Directory::loaded`]: with success only if the bytes have this checksum. From
    /// `until` on, no byte may be written to the slot.
    Load { disk: u32, to: SlotRef, checksum: u64, until: Duration },
    /// Fill a slot from the bucket. Always answer with [`Directory::fetched`]: with success only if the bytes are those of the block's
    /// record. From `until` on, no byte may be written to the slot.
    Fetch { block: PackedBlock, to: SlotRef, until: Duration },
    /// Forget this disk slot's content, also after a restart.
    Erase { disk: u32 },
    /// Stop using the disk. No more answers are expected for it.
    GiveUpDisk,
    /// Make sure that this client writes no more bytes from another host. Always answer with [`Directory::fenced`].
    Fence { client: ClientId },
}

/// DRAM slots by state; they add up to all that the directory has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramUsage {
    pub free: usize,
    pub reserved: usize,
    /// Slots that are published and not leased.
    pub cached: usize,
    pub leased: usize,
    pub quarantined: usize,
}

/// The directory of one arena, and of its disk and bucket if there are any.
pub struct Directory {
    limits: Limits,
    slots: Vec<Slot>,
    /// Reserved and published slots by key.
    by_key: HashMap<BlockKey, u32>,
    free: Vec<u32>,
    policy: Box<dyn EvictionPolicy>,
    disk: Option<DiskSlots>,
    objects: Option<Objects>,
    shares: Shares,
    /// Slots that the policy gave up and that have a copy on disk, in the order in which they leave.
    clean: BTreeMap<u64, u32>,
    /// Number of the last slot that became clean.
    cleaned: u64,
    reserved: HashMap<ClientId, BTreeSet<u32>>,
    /// Clients that write from another host, at their own pace.
    remote: HashSet<ClientId>,
    /// Quarantined slots of clients that are being fenced.
    unfenced: HashMap<ClientId, Vec<u32>>,
    leases: Leases,
    waits: Waits,
    timers: Timers<Due>,
    events: EventLog,
    actions: VecDeque<Action>,
    usage: DramUsage,
    /// The number of slots that it has.
    present: usize,
    /// The distance from one generation of a slot to the next.
    generations: u64,
    /// Number of the last operation that used blocks: microseconds of its time, or more if several came at once, so that uses can be
    /// compared between directories.
    operation: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u64,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The slot is another layout's.
    Absent,
    Free,
    Reserved(Reserved),
    Published(Published),
    Quarantined,
}

#[derive(Clone, Copy, Debug)]
struct Reserved {
    key: BlockKey,
    writer: ClientId,
    lineage: Lineage,
    used: Use,
    timer: TimerId,
    /// Whether the node itself is writing for the client.
    receiving: bool,
    /// The number of disk reads and writes that had ended when a block was requested from disk.
    disk_ended: u64,
}

#[derive(Clone, Copy, Debug)]
struct Published {
    key: BlockKey,
    checksum: u64,
    lineage: Lineage,
    used: Use,
    leases: u32,
    rank: Rank,
}

/// The rule by which a published block leaves DRAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rank {
    /// The policy decides: the block is one of its candidates unless it is leased.
    Policy,
    /// The policy gave it up, and it is being copied to disk.
    Leaving,
    /// It has a copy on disk and leaves before all blocks that have none, in the order of this number.
    Clean(u64),
}

/// Blocks to hand over, by reader and call.
type Handovers = BTreeMap<(ClientId, CallId), (Via, Vec<(Found, Use)>)>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Due {
    Reservation(u32),
    Quarantine(u32),
    Lease(ClientId, LeaseId),
    Get(ClientId, CallId),
}

impl Directory {
    /// A directory whose slots `0..slots` are free. `policy` must be for the same number of slots.
    pub fn new(slots: u32, limits: Limits, policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            limits,
            slots: (0..slots).map(|_| Slot { generation: 0, state: State::Free }).collect(),
            by_key: HashMap::new(),
            free: (0..slots).rev().collect(),
            policy,
            disk: None,
            objects: None,
            shares: Shares::new(slots as usize, 100),
            clean: BTreeMap::new(),
            cleaned: 0,
            reserved: HashMap::new(),
            remote: HashSet::new(),
            unfenced: HashMap::new(),
            leases: Leases::new(),
            waits: Waits::default(),
            timers: Timers::new(),
            events: EventLog::new(),
            actions: VecDeque::new(),
            usage: DramUsage { free: slots as usize, ..DramUsage::default() },
            present: slots as usize,
            generations: 1,
            operation: 0,
        }
    }

    /// Limits each tenant to this percentage of a tier's slots. Call it before any operation.
    pub fn with_tenant_share(mut self, percent: u8) -> Self {
        self.shares = Shares::new(self.slots.len(), percent);
        if let Some(disk) = &mut self.disk {
            disk.limit_tenants(percent);
        }
        self
    }

    /// The number of leading `keys` that are held in memory or on disk; reading from a bucket is the caller's decision. Those in DRAM stay
    /// for [`Limits::MATCH_LEASE`].
    pub fn match_prefix(&mut self, client: ClientId, keys: &[BlockKey], now: Duration) -> usize {
        self.tick(now);
        self.next_operation(now);
        let run = keys.iter().take_while(|key| self.published(key).is_some() || self.on_disk(key).is_some()).count();
        let used = Use::of_chain(self.operation, keys.len());
        let in_dram: Vec<_> = keys[..run].iter().zip(used).filter_map(|(key, used)| Some((self.published(key)?, used))).collect();
        if !in_dram.is_empty()
            && let Some(lease) = self.leases.next_id(client, in_dram.len())
        {
            self.grant(client, lease, in_dram, now + Limits::MATCH_LEASE);
        }
        run
    }

    /// Reserves a slot for each of `keys` that is neither held nor in flight. The keys follow each other in one chain from `lineage`
    /// on. If no slot is free, `room` says what may be evicted; with [`Room::Made`], the keys' own blocks count as just used.
    pub fn put_start(&mut self, client: ClientId, lineage: Lineage, room: Room, keys: &[BlockKey], now: Duration) -> Vec<Reservation> {
        self.tick(now);
        self.next_operation(now);
        let at = self.operation_of(&lineage);
        let state = keys.first().is_some_and(|first| self.is_of_state(&lineage, first));
        if let Some(parent) = lineage.parent.filter(|_| state) {
            self.has_state_after(&parent);
        }
        let uses = Use::of_chain(at, keys.len()).map(|used| Use { state, tail: used.tail && !state, ..used });
        let chain: Vec<(BlockKey, Use)> = keys.iter().copied().zip(uses).collect();
        // With spare room only, blocks that leave memory are on disk. Pinning an offer's own blocks would leave too few slots for its other
        // blocks.
        let kept = if room == Room::Made { &chain[..] } else { &[] };
        let held: Vec<(u32, Use)> = kept.iter().filter_map(|(key, used)| Some((self.published(key)?.slot, *used))).collect();
        held.iter().for_each(|&(slot, _)| self.pin(slot));
        let blocks = chain.iter().zip(lineage.of_each(keys));
        let answers = blocks.map(|(&(key, used), lineage)| self.reserve(client, lineage, room, key, used, now)).collect();
        held.iter().for_each(|&(slot, used)| self.unpin(slot, used));
        self.demote();
        answers
    }

    /// Publishes written slots and hands them to waiting readers. A slot that this client has not reserved under this generation, or no
    /// longer, is refused, since its writer is late. Returns the number of published slots.
    pub fn put_end(&mut self, client: ClientId, blocks: &[Written], now: Duration) -> usize {
        self.tick(now);
        let mut published = 0;
        let mut found = Handovers::new();
        for written in blocks {
            let Some(reserved) = self.take_reservation(client, written.at) else { continue };
            published += 1;
            let Reserved { key, lineage, used, .. } = reserved;
            self.arrives(key);
            let block = Published { key, checksum: written.checksum, lineage, used, leases: 0, rank: Rank::Policy };
            self.publish(written.at.slot, block, Tier::Dram, &mut found);
            self.count_use(&key);
        }
        self.hand_over_all(found, now);
        self.demote();
        published
    }

    /// Cancels reservations of slots that their client is not writing. If the node itself is writing one, its reservation ends with the
    /// write.
    pub fn put_revoke(&mut self, client: ClientId, blocks: &[SlotRef], now: Duration) {
        self.tick(now);
        for &at in blocks {
            if self.reservation(client, at).is_some_and(|reserved| !reserved.receiving)
                && let Some(reserved) = self.take_reservation(client, at)
            {
                self.by_key.remove(&reserved.key);
                self.shares.lose(reserved.lineage.tenant);
                self.set_free(at.slot);
            }
        }
    }

    /// Starts the node's own write to a slot for the client that reserved it, and returns the deadline at which it must stop. `None` if the
    /// client has no such reservation, or the slot is being written already.
    pub fn receive_start(&mut self, client: ClientId, at: SlotRef, now: Duration) -> Option<Duration> {
        self.tick(now);
        let reserved = self.reservation(client, at).filter(|reserved| !reserved.receiving)?;
        reserved.receiving = true;
        Some(reserved.timer.at())
    }

    /// Ends the reservation of a slot that the node failed to write. A client with rails may have begun to write it remotely before it sent
    /// the bytes another way: such a slot waits for a fence.
    pub fn receive_failed(&mut self, client: ClientId, at: SlotRef, now: Duration) {
        self.tick(now);
        let Some(reserved) = self.reservation(client, at) else { return };
        reserved.receiving = false;
        if self.remote.contains(&client) {
            self.cut_off(at.slot);
        } else {
            self.put_revoke(client, &[at], now);
        }
    }

    /// Hands over the published blocks of `keys` now, and the others as they are published within `wait`, reserved yet or not. Blocks on
    /// disk or in the bucket are read into DRAM, which may take up to [`Limits::LOAD`] regardless of `wait`. A call number that names an
    /// unfinished get replaces it.
    pub fn get(&mut self, client: ClientId, call: CallId, keys: &[BlockKey], wait: Duration, via: Via, now: Duration) {
        self.tick(now);
        self.cancel_get(client, call);
        self.next_operation(now);
        let operation = self.operation;
        let (mut found, mut absent) = (Vec::new(), BTreeMap::new());
        for (&key, used) in keys.iter().zip(Use::of_chain(operation, keys.len())) {
            self.count_use(&key);
            match self.published(&key) {
                Some(at) => found.push((self.found(used.place, at.slot, Tier::Dram), used)),
                None => drop(absent.insert(used.place, key)),
            }
        }
        // Lease these first, so that making room for blocks from disk does not push them out.
        self.hand_over(client, call, via, found, now);
        if absent.len() > self.waits.room(client) {
            return self.miss(client, call, absent.into_keys().collect());
        }
        let (mut waiting, mut missed) = (BTreeMap::new(), Vec::new());
        for (index, key) in absent {
            let coming = match self.on_disk(&key) {
                Some(disk) => self.is_loading(&key) || self.load(disk, Use::in_chain(operation, index, keys.len()), now),
                None => self.is_loading(&key) || self.fetch(&key, Use::in_chain(operation, index, keys.len()), now) || !wait.is_zero(),
            };
            if coming {
                waiting.insert(index, key);
            } else {
                missed.push(index);
            }
        }
        self.miss(client, call, missed);
        self.await_blocks(client, call, Asked { via, operation, blocks: keys.len(), until: now + wait }, waiting, now);
        self.demote();
    }

    /// Stops a get's waiting, without an answer.
    pub fn cancel_get(&mut self, client: ClientId, call: CallId) {
        if let Some(get) = self.waits.end(client, call) {
            self.timers.cancel(get.timer);
        }
    }

    /// Ends a lease. Ending it twice, or after it expired, changes nothing.
    pub fn release(&mut self, client: ClientId, lease: LeaseId) {
        if let Some(lease) = self.leases.end(client, lease) {
            self.timers.cancel(lease.timer);
            self.unlease(&lease.blocks);
        }
    }

    /// Forgets a block whose bytes are wrong. It is not found any more, and its slot is reused once no lease on it can be left.
    pub fn forget(&mut self, at: SlotRef, now: Duration) {
        self.tick(now);
        let Some(Published { leases, .. }) = self.published_at(at) else { return };
        if leases > 0 {
            self.usage.leased -= 1;
            self.leave_dram(at.slot);
            self.quarantine(at.slot, now + self.limits.lease.max(Limits::MATCH_LEASE));
        } else {
            self.unrank(at.slot);
            self.usage.cached -= 1;
            self.leave_dram(at.slot);
            self.set_free(at.slot);
        }
    }

    /// Marks a client that may write slots from another host, so that no clock bounds when its bytes arrive.
    pub fn writes_remotely(&mut self, client: ClientId) {
        self.remote.insert(client);
    }

    /// Ends a fence: no byte of this client arrives from another host any more, unless [`writes_remotely`](Self::writes_remotely) is called
    /// again.
    pub fn fenced(&mut self, client: ClientId, now: Duration) {
        self.remote.remove(&client);
        for slot in self.unfenced.remove(&client).unwrap_or_default() {
            self.usage.quarantined -= 1;
            self.set_free(slot);
        }
        self.tick(now);
    }

    /// Ends the waits and leases of a client whose connection ended and which is fenced, and quarantines its reserved slots until it can no
    /// longer be writing them.
    pub fn client_gone(&mut self, client: ClientId, now: Duration) {
        self.remote.remove(&client);
        self.tick(now);
        for get in self.waits.end_client(client) {
            self.timers.cancel(get.timer);
        }
        for lease in self.leases.end_client(client) {
            self.timers.cancel(lease.timer);
            self.unlease(&lease.blocks);
        }
        for slot in self.reserved.remove(&client).unwrap_or_default() {
            self.cut_off(slot);
        }
    }

    /// Ends everything that is due at `now`. Every operation does this first, so a late call changes no answer.
    pub fn tick(&mut self, now: Duration) {
        while let Some(due) = self.timers.pop(now) {
            match due {
                Due::Reservation(slot) => self.cut_off(slot),
                Due::Quarantine(slot) => {
                    self.usage.quarantined -= 1;
                    self.set_free(slot);
                }
                Due::Lease(client, lease) => {
                    let lease = self.leases.end(client, lease).expect("a lease and its timer end together");
                    self.unlease(&lease.blocks);
                }
                Due::Get(client, call) => {
                    let get = self.waits.end(client, call).expect("a get and its timer end together");
                    self.await_blocks(client, call, get.asked, get.waiting, now);
                }
            }
        }
        self.demote();
    }

    /// Numbers a new operation.
    fn next_operation(&mut self, now: Duration) {
        self.operation = (self.operation + 1).max(now.as_micros() as u64);
    }

    /// The next action. Take all of them after each call.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The blocks that came and went since the last call.
    pub fn take_events(&mut self) -> Events {
        self.events.take()
    }

    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// All blocks that are held, as the events that would lead there from an empty directory.
    pub fn snapshot(&self) -> impl Iterator<Item = PoolEvent> {
        let in_dram = self.slots.iter().filter_map(|slot| match slot.state {
            State::Published(Published { key, .. }) => Some(PoolEvent::Stored { key, tier: Tier::Dram }),
            _ => None,
        });
        let on_disk = self.disk.iter().flat_map(DiskSlots::blocks).filter(|block| self.published(&block.key).is_none());
        let on_disk = on_disk.map(|block| PoolEvent::Stored { key: block.key, tier: Tier::Nvme });
        in_dram.chain(on_disk).chain(self.only_in_objects().map(|key| PoolEvent::Stored { key, tier: Tier::Object }))
    }

    /// The checksum of a published block's bytes, or `None` if it is no longer there.
    pub fn checksum(&self, at: SlotRef) -> Option<u64> {
        self.published_at(at).map(|published| published.checksum)
    }

    /// Clients that hold a slot or a lease, or wait for something.
    pub fn clients(&self) -> impl Iterator<Item = ClientId> {
        let reserving = self.reserved.keys().copied().filter(|client| ![NODE, OBJECTS].contains(client));
        let (leasing, waiting) = (self.leases.iter().map(|(client, ..)| client), self.waits.iter().map(|(client, ..)| client));
        reserving.chain(leasing).chain(waiting)
    }

    /// The number of slots that it has: all states of [`usage`](Self::usage) together.
    pub fn slots(&self) -> usize {
        self.present
    }

    pub fn usage(&self) -> DramUsage {
        self.usage
    }

    /// The usage of the disk, or `None` if there is no disk (any more).
    pub fn disk_usage(&self) -> Option<DiskUsage> {
        self.disk.as_ref().map(DiskSlots::usage)
    }
}

#[cfg(test)]
mod tests;
