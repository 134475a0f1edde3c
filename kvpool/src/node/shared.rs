//! The parts that all layouts of a node share: the memory, its division, and the lock under which all directories are. The lock is held for one
//! operation at a time, never across a copy, a hash or an await.

use super::store::{Outbox, Store};
use crate::{
    arena::{Arena, Memory},
    core::{
        directory::{ClientId, Directory},
        division::{Division, LayoutNumber, Share},
        layouts::{Layouts, Withdrawn},
    },
    transport::rdma::{DeviceNames, node::ArenaNics},
};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use tidemill_proto::pool::{SLOT_BYTES_MIN, slot_stride};
use tokio::sync::Notify;

pub(super) struct Shared {
    memory: Arc<Memory>,
    /// The devices that can access the memory, opened for the first client that can use them.
    nics: OnceLock<ArenaNics>,
    devices: DeviceNames,
    started: Instant,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) layouts: Layouts,
    pub(super) outboxes: HashMap<ClientId, Outbox>,
    parts: BTreeMap<LayoutNumber, Part>,
    /// Layouts whose store is gone, and which are removed as soon as nothing of them is in use.
    gone: Vec<LayoutNumber>,
    latest: u16,
}

/// A layout's part in an operation of another one.
struct Part {
    arena: Arc<Arena>,
    /// Notified when there are events to announce.
    changed: Arc<Notify>,
    clients: usize,
}

/// The number of extents that a node's memory is divided into, if they are not too large.
const EXTENTS: u64 = 64;
/// The largest extent: what a layout takes at a time from another.
const EXTENT_BYTES_MAX: u64 = 64 << 20;

/// The size of an extent of this much memory. No two extents have a place for a generation in common.
fn extent_bytes(capacity_bytes: u64) -> u64 {
    (capacity_bytes / EXTENTS).clamp(1, EXTENT_BYTES_MAX).next_multiple_of(SLOT_BYTES_MIN)
}

impl Shared {
    pub(super) fn new(memory: Arc<Memory>, devices: DeviceNames) -> Arc<Self> {
        let capacity_bytes = memory.capacity_bytes();
        let division = Division::new(capacity_bytes, extent_bytes(capacity_bytes));
        let state =
            State { layouts: Layouts::new(division), outboxes: HashMap::new(), parts: BTreeMap::new(), gone: Vec::new(), latest: 0 };
        Arc::new(Self { memory, nics: OnceLock::new(), devices, started: Instant::now(), state: Mutex::new(state) })
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The devices that can access the memory. The first call takes a while, since it registers all of it.
    pub(super) fn nics(&self) -> &ArenaNics {
        self.nics.get_or_init(|| ArenaNics::open(&self.devices, &self.memory))
    }

    /// The current time of all directories.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The clock's time for a time of the directories.
    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.started + at
    }

    /// Adds a layout. `None` if this node has had as many as there are numbers.
    pub(super) fn add(&self, arena: Arc<Arena>, directory: Directory, share: Share, changed: Arc<Notify>) -> Option<LayoutNumber> {
        let state = &mut *self.state.lock();
        state.latest = state.latest.checked_add(1)?;
        let number = LayoutNumber(state.latest);
        let stride = slot_stride(arena.block_bytes() as u64).expect("it has an arena");
        state.layouts.add(number, stride, arena.slots(), share, directory);
        state.parts.insert(number, Part { arena, changed, clients: 0 });
        Some(number)
    }

    /// Removes a layout once nothing of it is in use, for its store is gone.
    pub(super) fn gone(&self, number: LayoutNumber) {
        self.state.lock().gone.push(number);
    }

    /// Ends what is due of layouts whose store is gone.
    pub(super) fn tick(&self) {
        let State { layouts, gone, parts, .. } = &mut *self.state.lock();
        gone.retain(|&number| {
            let directory = layouts.directory(number);
            directory.tick(self.now());
            while directory.poll_action().is_some() {}
            let Some(withdrawn) = layouts.remove(number) else { return true };
            if let Some(part) = parts.remove(&number) {
                part.withdraw(&withdrawn);
            }
            false
        });
    }
}

impl Part {
    /// Tells the late readers of slots that these are gone.
    fn withdraw(&self, withdrawn: &Withdrawn) {
        withdrawn.slots.iter().for_each(|at| self.arena.set_generation(at.slot, at.generation));
    }
}

impl State {
    /// Takes memory for a layout from others, and tells the late readers of those that it is gone.
    pub(super) fn make_room(&mut self, number: LayoutNumber, wanted: usize, now: Duration) {
        for withdrawn in self.layouts.make_room(number, wanted, now) {
            let part = &self.parts[&withdrawn.layout];
            part.withdraw(&withdrawn);
            part.changed.notify_one();
            tracing::debug!(to = number.0, from = withdrawn.layout.0, slots = withdrawn.slots.len(), "memory changes hands");
        }
    }

    /// Counts the clients of a layout. Its claims to memory hold while it has any.
    pub(super) fn count_client(&mut self, number: LayoutNumber, joins: bool, now: Duration) {
        let part = self.parts.get_mut(&number).expect("a layout has its part until its store is gone");
        part.clients = if joins { part.clients + 1 } else { part.clients - 1 };
        self.layouts.set_in_use(number, part.clients > 0);
        self.make_room(number, 0, now);
    }
}

impl Store {
    /// Whether the layout has clients.
    pub(super) fn is_in_use(&self) -> bool {
        self.shared().state.lock().layouts.division().is_in_use(self.number())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("memory", &self.memory).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_some_mib_and_end_where_places_for_generations_do() {
        assert_eq!(extent_bytes(1 << 30), 16 << 20);
        assert_eq!(extent_bytes(1 << 40), 64 << 20);
        assert!([1, 5000, 400_000, 1_000_000_007].map(extent_bytes).iter().all(|bytes| bytes.is_multiple_of(SLOT_BYTES_MIN) && *bytes > 0));
    }
}
