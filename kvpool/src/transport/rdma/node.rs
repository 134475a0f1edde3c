//! The node's side: its registered arena, and the other ends of its clients' rails.
//!
//! **Fences.** A client gets keys that work on its own rail only (memory windows of type 2): one for reading the arena, one for writing
//! slots. Closing its rails frees the windows, which invalidates the keys, and destroys the queue pairs, which ends the connection itself:
//! packets that are still on their way, or retransmitted later, have no effect. Both happen before a slot that a late or vanished client
//! had reserved is reused.
//!
//! On a device without such windows, the keys are those of the registration, the same for all clients; then only destroying the queue pairs
//! protects slots.

use super::{
    DeviceNames,
    devices::{Device, open_all},
    verbs::{Access, QueuePair, Region, VerbsError, Window},
};
use crate::arena::Memory;
use parking_lot::Mutex;
use std::sync::Arc;
use tidemill_proto::pool::{RAILS_MAX, RailEnd, RailOpened};

/// The node's devices, with the arena registered on each.
#[derive(Debug)]
pub(crate) struct ArenaNics {
    nics: Vec<ArenaNic>,
}

#[derive(Debug)]
struct ArenaNic {
    regions: Regions,
    /// A lock for binding windows one at a time, since bindings share the device's completions.
    binding: Mutex<()>,
    device: Device,
    memory: Arc<Memory>,
}

#[derive(Debug)]
enum Regions {
    /// One registration, on which clients get windows.
    Windows(Arc<Region>),
    /// Two registrations, whose keys clients get.
    Whole { read: Region, write: Region },
}

/// The capacity for completions of bindings, and of work that is flushed when a rail closes.
const COMPLETIONS: u32 = 64;
/// The capacity for requests: a rail's end here posts only the bindings of its windows.
const REQUESTS: u32 = 4;

impl ArenaNics {
    /// Registers the arena with the devices, which allocates all of its memory: some 0.2 s per GiB.
    pub(crate) fn open(names: &DeviceNames, memory: &Arc<Memory>) -> Self {
        let open = |name: &str| {
            let device = Device::open(name, COMPLETIONS)?;
            let (start, file_bytes) = memory.mapping();
            let register = |at, access| {
                // SAFETY: the arena outlives the region, as each owner of one also owns the other; no code holds references into slots,
                // which are all that peers write.
                unsafe { Region::register(Arc::clone(&device.domain), start.add(at), file_bytes - at, access) }
            };
            let regions = if device.limits.windows {
                Regions::Windows(Arc::new(register(0, Access::LOCAL.and(Access::WINDOWS))?))
            } else {
                tracing::warn!(device = name, "it has no memory windows: its keys are the same for all clients");
                let (read, write) = (Access::REMOTE_READ, Access::LOCAL.and(Access::REMOTE_WRITE));
                Regions::Whole { read: register(0, read)?, write: register(memory.slots_at(), write)? }
            };
            tracing::info!(device = name, bytes = file_bytes, "arena registered");
            Ok(ArenaNic { regions, binding: Mutex::default(), device, memory: Arc::clone(memory) })
        };
        Self { nics: open_all(names, open) }
    }

    /// The device for a client's end: on its network, as far as addresses show, and with the fewest of this client's rails.
    fn nearest(&self, end: &RailEnd, taken: &[usize]) -> Option<usize> {
        let up = (0..self.nics.len()).filter_map(|nic| {
            let port = self.nics[nic].device.port().ok()?;
            ((port.lid == 0) == (end.lid == 0)).then_some((nic, port.gid))
        });
        let rank = |(nic, gid): &(usize, [u8; 16])| {
            let differ = u128::from_be_bytes(*gid) ^ u128::from_be_bytes(end.gid);
            (differ.leading_zeros(), usize::MAX - taken.iter().filter(|taken| *taken == nic).count())
        };
        up.max_by_key(rank).map(|(nic, _)| nic)
    }
}

/// One client's rails.
#[derive(Debug, Default)]
pub(crate) struct ClientRails {
    rails: Vec<NodeRail>,
}

/// The node's end of a rail. Its fields are dropped in order.
#[derive(Debug)]
struct NodeRail {
    _windows: Vec<Window>,
    pair: QueuePair,
    nic: usize,
    /// The arena, which stays registered as long as the windows exist.
    _memory: Arc<Memory>,
}

impl ClientRails {
    /// Opens a rail to each of these ends, up to the limit. Takes a while: call it on a thread that may block.
    pub(crate) fn open(&mut self, nics: &ArenaNics, ends: &[RailEnd]) -> Vec<Option<RailOpened>> {
        let open = |end: &RailEnd| {
            let taken: Vec<usize> = self.rails.iter().map(|rail| rail.nic).collect();
            let nic = nics.nearest(end, &taken).filter(|_| self.rails.len() < RAILS_MAX)?;
            match NodeRail::open(&nics.nics[nic], nic, end) {
                Ok((rail, opened)) => {
                    self.rails.push(rail);
                    Some(opened)
                }
                Err(error) => {
                    tracing::warn!(%error, "no rail");
                    None
                }
            }
        };
        ends.iter().map(open).collect()
    }

    pub(crate) fn close(&mut self, pair: u32) {
        self.rails.retain(|rail| rail.pair.number() != pair);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rails.is_empty()
    }

    /// Closes all rails. When this returns, no request of the client accesses the arena any more.
    pub(crate) fn close_all(&mut self) {
        self.rails.clear();
    }
}

impl NodeRail {
    fn open(nic: &ArenaNic, index: usize, peer: &RailEnd) -> Result<(Self, RailOpened), VerbsError> {
        let ArenaNic { regions, binding, device, memory } = nic;
        let (port, psn) = (device.port()?, rand::random());
        let pair = QueuePair::new(Arc::clone(&device.domain), Arc::clone(&device.queue), REQUESTS)?;
        let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
        pair.connect(&port, &device.limits, psn, peer, Some(read.and(write)))?;
        let (windows, read_key, write_key) = match regions {
            Regions::Windows(region) => {
                let _one_at_a_time = binding.lock();
                let (slots_at, (_, bytes)) = (memory.slots_at(), memory.mapping());
                let reading = pair.grant(region, region.addr(), bytes, read)?;
                let writing = pair.grant(region, region.addr() + slots_at, bytes - slots_at, write)?;
                let keys = (reading.remote_key(), writing.remote_key());
                (vec![reading, writing], keys.0, keys.1)
            }
            Regions::Whole { read, write } => (vec![], read.remote_key(), write.remote_key()),
        };
        let end = device.end(&port, pair.number(), psn);
        let arena_at = memory.mapping().0 as u64;
        Ok((Self { _windows: windows, pair, nic: index, _memory: Arc::clone(memory) }, RailOpened { end, arena_at, read_key, write_key }))
    }
}
