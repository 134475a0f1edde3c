//! What a pool node holds: keys to slots, and who may touch which slot. No bytes, no clock, no socket: calls come in with
//! the time, results and [`Action`]s go out.
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
//! (The node itself is the writer of a block that comes from disk: see `tiers`.)
//!
//! 1. **free**: nobody's, content meaningless
//! 2. **reserved**: one writer may write it until a deadline; its key is in flight and found by nobody. The slot got a
//!    new generation when it was reserved, so who still reads what was there before can tell.
//! 3. **published**: full, immutable, found by its key; leased by readers or else a candidate for eviction
//! 4. **quarantined**: found by nobody and given to nobody, because a writer that was cut off may still be writing
//!
//! Every wait, lease and reservation has a deadline, so whatever a dead peer held is free again within
//! [`Limits::reclaim_max`].

mod disk_slots;
mod dram_slots;
mod events;
mod hottest;
mod integrity;
mod leases;
mod shares;
mod tiers;
mod timers;
mod waits;

pub use disk_slots::{DiskBlock, DiskUsage};
pub use events::Events;
pub use hottest::{Held, Place};
pub use tiers::{DiskFault, Loaded};

use crate::core::eviction::{EvictionPolicy, Use};
use disk_slots::DiskSlots;
use events::EventLog;
use leases::Leases;
use shares::Shares;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::Duration,
};
use tidemill_proto::{
    block::BlockKey,
    message::PoolEvent,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, Room, SlotRef, Tier, Via, Written},
};
use timers::{TimerId, Timers};
use waits::{Asked, Waits};

/// One client's connection. Never used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ClientId(pub u64);

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From `put_start` to `put_end`.
    pub put_deadline: Duration,
    /// From handing out blocks to the end of the reader's claim on them.
    pub lease: Duration,
}

impl Limits {
    /// How long after its deadline a reserved slot is kept from others: a writer that looked at the clock just before
    /// the deadline has finished its copy by then.
    pub const QUARANTINE: Duration = Duration::from_millis(500);

    /// From asking the disk for a block to having it. A reader that would not wait otherwise waits this long.
    pub const LOAD: Duration = Duration::from_secs(5);

    /// How long `match_prefix` keeps what it found: enough for the get that follows at once.
    pub const MATCH_LEASE: Duration = Duration::from_secs(1);

    /// Nothing that a dead or silent peer held stays longer than this.
    pub fn reclaim_max(&self) -> Duration {
        (self.put_deadline.max(Self::LOAD) + Self::QUARANTINE).max(self.lease).max(Self::MATCH_LEASE)
    }
}

/// What the shell is to do, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Hand these published blocks to a reader. They are leased to it.
    Found { client: ClientId, call: CallId, via: Via, lease: LeaseId, blocks: Vec<Found> },
    /// Tell a reader that these blocks of its get will not come.
    Missed { client: ClientId, call: CallId, indexes: Vec<u32> },
    /// Copy a block to disk, if the slot still holds it after the copy, and answer with [`Directory::stored`], in every case.
    Store { disk: u32, from: SlotRef, block: DiskBlock },
    /// Fill a slot from disk, and answer with [`Directory::loaded`], in every case: well only if what was filled in has this
    /// checksum. Not a byte is written to the slot when it is `until` already.
    Load { disk: u32, to: SlotRef, checksum: u64, until: Duration },
    /// What this disk slot holds is of no use, after a restart either.
    Erase { disk: u32 },
    /// The disk is not to be used any more, nor answered for.
    GiveUpDisk,
}

/// Slots by state; they add up to all slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub free: usize,
    pub reserved: usize,
    /// Published and not leased.
    pub cached: usize,
    pub leased: usize,
    pub quarantined: usize,
}

/// The directory of one arena, and of one disk where there is one.
pub struct Directory {
    limits: Limits,
    slots: Vec<Slot>,
    /// Reserved and published slots.
    by_key: HashMap<BlockKey, u32>,
    free: Vec<u32>,
    policy: Box<dyn EvictionPolicy>,
    disk: Option<DiskSlots>,
    shares: Shares,
    /// Slots whose blocks the policy gave up and the disk has, in the order in which they leave.
    clean: BTreeMap<u64, u32>,
    /// Number of the last slot that became clean.
    cleaned: u64,
    reserved: HashMap<ClientId, BTreeSet<u32>>,
    leases: Leases,
    waits: Waits,
    timers: Timers<Due>,
    events: EventLog,
    actions: VecDeque<Action>,
    usage: Usage,
    /// Number of the last operation that used blocks.
    operation: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u64,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
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
    /// The node itself is writing, on the client's behalf.
    receiving: bool,
    /// For a block that comes from disk: how many of the disk's reads and writes had ended when it was asked for.
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

/// What says when a published block leaves DRAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rank {
    /// The policy, to which it is a candidate unless it is leased.
    Policy,
    /// The policy gave it up; it is being copied to disk.
    Leaving,
    /// It has a copy on disk and leaves in this order, before all others.
    Clean(u64),
}

/// What a reader is handed at once.
type Handovers = BTreeMap<(ClientId, CallId), (Via, Vec<(Found, Use)>)>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Due {
    Reservation(u32),
    Quarantine(u32),
    Lease(ClientId, LeaseId),
    Get(ClientId, CallId),
}

impl Directory {
    /// All of `0..slots` free. `policy` must be for as many slots.
    pub fn new(slots: u32, limits: Limits, policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            limits,
            slots: (0..slots).map(|_| Slot { generation: 0, state: State::Free }).collect(),
            by_key: HashMap::new(),
            free: (0..slots).rev().collect(),
            policy,
            disk: None,
            shares: Shares::new(slots as usize, 100),
            clean: BTreeMap::new(),
            cleaned: 0,
            reserved: HashMap::new(),
            leases: Leases::new(),
            waits: Waits::default(),
            timers: Timers::new(),
            events: EventLog::new(),
            actions: VecDeque::new(),
            usage: Usage { free: slots as usize, ..Usage::default() },
            operation: 0,
        }
    }

    /// Lets no tenant have more than so many percent of the slots of a tier. Before anything else.
    pub fn with_tenant_share(mut self, percent: u8) -> Self {
        self.shares = Shares::new(self.slots.len(), percent);
        if let Some(disk) = &mut self.disk {
            disk.limit_tenants(percent);
        }
        self
    }

    /// Blocks of the leading run of `keys` that are held. Those in DRAM stay for [`Limits::MATCH_LEASE`].
    pub fn match_prefix(&mut self, client: ClientId, keys: &[BlockKey], now: Duration) -> usize {
        self.tick(now);
        self.operation += 1;
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

    /// Reserves a slot for each of `keys`, which follow each other in a chain from `lineage` on, that is neither held nor
    /// in flight. Slots come from eviction when none is free, as far as `room` says; where it is made, the keys' own blocks
    /// count as just used.
    pub fn put_start(&mut self, client: ClientId, lineage: Lineage, room: Room, keys: &[BlockKey], now: Duration) -> Vec<Reservation> {
        self.tick(now);
        self.operation += 1;
        let at = self.operation_of(&lineage);
        let chain: Vec<(BlockKey, Use)> = keys.iter().copied().zip(Use::of_chain(at, keys.len())).collect();
        // Where no room is made, what leaves memory is on disk: pinned, the blocks that an offer brought would keep out the rest of it.
        let kept = if room == Room::Made { &chain[..] } else { &[] };
        let held: Vec<(u32, Use)> = kept.iter().filter_map(|(key, used)| Some((self.published(key)?.slot, *used))).collect();
        held.iter().for_each(|&(slot, _)| self.pin(slot));
        let blocks = chain.iter().zip(lineage.of_each(keys));
        let answers = blocks.map(|(&(key, used), lineage)| self.reserve(client, lineage, room, key, used, now)).collect();
        held.iter().for_each(|&(slot, used)| self.unpin(slot, used));
        self.demote();
        answers
    }

    /// Publishes written slots and hands them to whoever waits for them. A slot that is not (or no longer) reserved by
    /// this client under this generation is refused: its writer is late. Returns how many were published.
    pub fn put_end(&mut self, client: ClientId, blocks: &[Written], now: Duration) -> usize {
        self.tick(now);
        let mut published = 0;
        let mut found = Handovers::new();
        for written in blocks {
            let Some(reserved) = self.take_reservation(client, written.at) else { continue };
            published += 1;
            let Reserved { key, lineage, used, .. } = reserved;
            self.events.stored(key, Tier::Dram);
            let block = Published { key, checksum: written.checksum, lineage, used, leases: 0, rank: Rank::Policy };
            self.publish(written.at.slot, block, Tier::Dram, &mut found);
        }
        self.hand_over_all(found, now);
        self.demote();
        published
    }

    /// Cancels reservations of slots that their client is not writing. Where the node itself is writing, the end of that
    /// ends the reservation.
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

    /// The node starts to write a slot on behalf of the client that reserved it, and stops at the returned deadline at
    /// the latest. `None`: not reserved by it (any more), or being written already.
    pub fn receive_start(&mut self, client: ClientId, at: SlotRef, now: Duration) -> Option<Duration> {
        self.tick(now);
        let reserved = self.reservation(client, at).filter(|reserved| !reserved.receiving)?;
        reserved.receiving = true;
        Some(reserved.timer.at())
    }

    /// The node stopped writing a slot without success; its reservation ends.
    pub fn receive_failed(&mut self, client: ClientId, at: SlotRef, now: Duration) {
        if let Some(reserved) = self.reservation(client, at) {
            reserved.receiving = false;
        }
        self.put_revoke(client, &[at], now);
    }

    /// Hands over the blocks of `keys` that are published, now, and the others when they are, if that is within `wait`.
    /// Whether anyone reserved them yet makes no difference. Blocks on disk are read into DRAM, which may take as long as
    /// [`Limits::LOAD`] whatever `wait` says. A number that names an unfinished get replaces it.
    pub fn get(&mut self, client: ClientId, call: CallId, keys: &[BlockKey], wait: Duration, via: Via, now: Duration) {
        self.tick(now);
        self.cancel_get(client, call);
        self.operation += 1;
        let operation = self.operation;
        let (mut found, mut absent) = (Vec::new(), BTreeMap::new());
        for (&key, used) in keys.iter().zip(Use::of_chain(operation, keys.len())) {
            match self.published(&key) {
                Some(at) => found.push((self.found(used.place, at.slot, Tier::Dram), used)),
                None => drop(absent.insert(used.place, key)),
            }
        }
        // Leased first, so that making room for what comes from disk does not push it out.
        self.hand_over(client, call, via, found, now);
        if absent.len() > self.waits.room(client) {
            return self.miss(client, call, absent.into_keys().collect());
        }
        let (mut waiting, mut missed) = (BTreeMap::new(), Vec::new());
        for (index, key) in absent {
            let coming = match self.on_disk(&key) {
                Some(disk) => self.is_loading(&key) || self.load(disk, Use::in_chain(operation, index, keys.len()), now),
                None => !wait.is_zero(),
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

    /// Ends a get's waits without an answer.
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

    /// Forgets a block whose bytes turned out to be wrong. Nobody finds it from now on; its slot is given to others when
    /// no lease on it can be left.
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

    /// A client's connection ended: its waits and leases end, and its reservations are out of use until nobody can be
    /// writing there.
    pub fn client_gone(&mut self, client: ClientId, now: Duration) {
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

    /// Ends what is due at `now`. Every operation does this first, so calling it late changes no answer.
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

    /// The next thing to do for a reader. Take all after each call.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// What came and went since the last call.
    pub fn take_events(&mut self) -> Events {
        self.events.take()
    }

    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Everything that is held, as events from empty.
    pub fn snapshot(&self) -> impl Iterator<Item = PoolEvent> {
        let in_dram = self.slots.iter().filter_map(|slot| match slot.state {
            State::Published(Published { key, .. }) => Some(PoolEvent::Stored { key, tier: Tier::Dram }),
            _ => None,
        });
        let on_disk = self.disk.iter().flat_map(DiskSlots::blocks).filter(|block| self.published(&block.key).is_none());
        in_dram.chain(on_disk.map(|block| PoolEvent::Stored { key: block.key, tier: Tier::Nvme }))
    }

    /// What a published block's bytes must hash to. `None`: it is no longer there.
    pub fn checksum(&self, at: SlotRef) -> Option<u64> {
        self.published_at(at).map(|published| published.checksum)
    }

    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// `None`: there is no disk (any more).
    pub fn disk_usage(&self) -> Option<DiskUsage> {
        self.disk.as_ref().map(DiskSlots::usage)
    }
}

#[cfg(test)]
mod tests;
