//! Another model's blocks in the same pool nodes: a second layout with its own random clients, which takes memory from the studied one and
//! gives it back. Only the places of its blocks are simulated.
//!
//! Checked with every block that it writes: its slot is no longer one of the studied layout, no lease of that one covers it, and the studied
//! layout keeps its floor.

use super::{bytes::Block, io::Io, network::ConnId};
use crate::{faults::mutation::Mutation, random::Random};
use std::{collections::BTreeMap, time::Duration};
use tidemill_kvpool::core::{
    directory::{ClientId, Directory, Limits},
    division::{Division, LayoutNumber, Share},
    eviction::Policy,
    layouts::Layouts,
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, Room, Via, Written},
};

/// The layout of the studied model.
pub(crate) const STUDIED: LayoutNumber = LayoutNumber(1);
/// The layout of the neighbour.
const OTHER: LayoutNumber = LayoutNumber(2);
/// Slots of the studied layout that a block of the neighbour covers.
const STRIDE: u64 = 3;
/// Slots of the studied layout in an extent.
const EXTENT: u64 = 4;
/// The interval at which the neighbour does something.
pub(crate) const EVERY: Duration = Duration::from_millis(40);

pub(crate) struct Neighbour {
    random: Random,
    client: u64,
    calls: u64,
    /// The studied layout's leases: their end, and their slots.
    leases: BTreeMap<(ConnId, LeaseId), (Duration, Vec<u32>)>,
    lease: Duration,
}

/// All layouts of a node, of which the studied one may use all of the memory that the other does not have.
pub(crate) fn layouts(slots: u32, studied: Directory, neighbour: Option<(&Limits, Policy)>) -> Layouts {
    let mut layouts = Layouts::new(Division::new(u64::from(slots), EXTENT));
    layouts.add(STUDIED, 1, slots, Share { weight: 1, floor_percent: 25 }, studied);
    layouts.set_in_use(STUDIED, true);
    if let Some((limits, policy)) = neighbour {
        let slots = slots / STRIDE as u32;
        layouts.add(OTHER, STRIDE, slots, Share { weight: 1, floor_percent: 10 }, Directory::new(slots, *limits, policy.build(slots)));
    }
    layouts
}

impl Neighbour {
    pub(crate) fn new(random: Random, lease: Duration) -> Self {
        Self { random, client: 1, calls: 0, leases: BTreeMap::new(), lease }
    }

    pub(crate) fn leased(&mut self, io: &Io, conn: ConnId, lease: LeaseId, blocks: &[Found]) {
        self.leases.insert((conn, lease), (io.here + self.lease, blocks.iter().map(|found| found.at.slot).collect()));
    }

    pub(crate) fn released(&mut self, conn: ConnId, lease: LeaseId) {
        self.leases.remove(&(conn, lease));
    }

    pub(crate) fn client_gone(&mut self, conn: ConnId) {
        self.leases.retain(|(of, _), _| *of != conn);
    }

    /// One random thing: clients come and go, put blocks and read them.
    pub(crate) fn act(&mut self, io: &mut Io, arena: usize, layouts: &mut Layouts) {
        self.leases.retain(|_, (until, _)| io.here < *until);
        layouts.directory(OTHER).tick(io.here);
        match self.random.between(0, 9) {
            0 if self.random.unit() < 0.2 => {
                layouts.set_in_use(OTHER, false);
                layouts.directory(OTHER).client_gone(ClientId(self.client), io.here);
                self.client += 1;
            }
            0..=6 => self.put(io, arena, layouts),
            _ => {
                let keys = self.keys();
                self.calls += 1;
                layouts.directory(OTHER).get(ClientId(self.client), CallId(self.calls), &keys, Duration::ZERO, Via::Slots, io.here);
            }
        }
        // Its readers read at once, and return most leases late or never.
        while layouts.directory(OTHER).poll_action().is_some() {}
        layouts.directory(OTHER).take_events();
        if self.random.unit() < 0.1 {
            layouts.directory(OTHER).client_gone(ClientId(self.client), io.here);
            self.client += 1;
        }
    }

    fn put(&mut self, io: &mut Io, arena: usize, layouts: &mut Layouts) {
        layouts.set_in_use(OTHER, true);
        let keys = self.keys();
        let wanted = layouts.directory(OTHER).to_write(&keys);
        self.make_room(io, arena, layouts, wanted);
        let lineage = Lineage { origin: RequestId(self.client), tenant: Tenant(9), parent: None, position: 0 };
        let client = ClientId(self.client);
        let answers = layouts.directory(OTHER).put_start(client, lineage, Room::Made, &keys, io.here);
        for answer in answers {
            let Reservation::Write(at) = answer else { continue };
            let stray = u32::from(io.has(Mutation::StrayBlock) && self.random.unit() < 0.1);
            let first = (at.slot + stray) * STRIDE as u32;
            for slot in first..first + STRIDE as u32 {
                self.write(io, arena, layouts, slot);
            }
            if self.random.unit() < 0.9 {
                layouts.directory(OTHER).put_end(client, &[Written { at, checksum: 0 }], io.here);
            }
        }
    }

    fn make_room(&mut self, io: &mut Io, arena: usize, layouts: &mut Layouts, wanted: usize) {
        let owned = |layouts: &Layouts| layouts.division().owned(STUDIED);
        let (before, floor) = (owned(layouts), layouts.division().floor(STUDIED));
        if io.has(Mutation::UndercutFloor) {
            layouts.set_in_use(STUDIED, false);
        }
        if io.has(Mutation::TakeLeased) {
            for &(conn, lease) in self.leases.keys() {
                layouts.directory(STUDIED).release(super::pool::client_of(conn), lease);
            }
        }
        let withdrawn = layouts.make_room(OTHER, wanted, io.here);
        layouts.set_in_use(STUDIED, true);
        for at in withdrawn.iter().filter(|withdrawn| withdrawn.layout == STUDIED).flat_map(|withdrawn| &withdrawn.slots) {
            io.arena(arena).set_generation(at.slot, at.generation);
        }
        let after = owned(layouts);
        if after < before.min(floor) {
            io.violated(|| format!("the studied layout has {after} extents left, below its floor of {floor}"));
        }
    }

    /// Overwrites a slot of the studied layout, which must not be one any more.
    fn write(&mut self, io: &mut Io, arena: usize, layouts: &Layouts, slot: u32) {
        if layouts.may_use(STUDIED, slot) {
            io.violated(|| format!("another layout's block is in slot {slot}, and is found there"));
        }
        if self.leases.values().any(|(until, slots)| io.here < *until && slots.contains(&slot)) {
            io.violated(|| format!("slot {slot} is another layout's, while a reader has a lease on it"));
        }
        let bytes: Block = [self.random.draw(); _];
        io.arena(arena).write(slot, Some(bytes));
    }

    fn keys(&mut self) -> Vec<BlockKey> {
        let chain = self.random.between(0, 9) as u8;
        (0..self.random.between(1, 5) as u8).map(|block| BlockKey([0x80 | chain << 3 | block; 16])).collect()
    }
}
