//! Leases: the slots that each client may be reading, and their deadlines.

use super::{ClientId, timers::TimerId};
use crate::core::eviction::Use;
use std::collections::{BTreeMap, HashMap};
use tidemill_proto::pool::{LeaseId, SlotRef};

/// Leases of all clients. A lease names slots with their generations, so ending it does not affect a slot that has been reused.
#[derive(Debug)]
pub(super) struct Leases {
    clients: HashMap<ClientId, ClientLeases>,
    next: u64,
}

#[derive(Debug, Default)]
struct ClientLeases {
    leases: BTreeMap<LeaseId, Lease>,
    /// The number of leased blocks, over all leases.
    blocks: usize,
}

#[derive(Debug)]
pub(super) struct Lease {
    pub(super) blocks: Vec<(SlotRef, Use)>,
    pub(super) timer: TimerId,
}

/// The most blocks that one client may lease, so that a client that releases nothing does not make this grow without bound.
pub(super) const LEASED_MAX: usize = 1 << 18;

impl Leases {
    pub(super) fn new() -> Self {
        Self { clients: HashMap::new(), next: 0 }
    }

    /// The id of a new lease on this many blocks; `None` if the client would have too many.
    pub(super) fn next_id(&mut self, client: ClientId, blocks: usize) -> Option<LeaseId> {
        let leased = self.clients.get(&client).map_or(0, |client| client.blocks);
        if leased + blocks > LEASED_MAX {
            return None;
        }
        self.next += 1;
        Some(LeaseId(self.next))
    }

    pub(super) fn add(&mut self, client: ClientId, id: LeaseId, lease: Lease) {
        let client = self.clients.entry(client).or_default();
        client.blocks += lease.blocks.len();
        client.leases.insert(id, lease);
    }

    /// Ends a lease. `None` if it has ended, or is another client's.
    pub(super) fn end(&mut self, client: ClientId, id: LeaseId) -> Option<Lease> {
        let leases = self.clients.get_mut(&client)?;
        let lease = leases.leases.remove(&id)?;
        leases.blocks -= lease.blocks.len();
        if leases.leases.is_empty() {
            self.clients.remove(&client);
        }
        Some(lease)
    }

    /// Ends all leases of a client.
    pub(super) fn end_client(&mut self, client: ClientId) -> impl Iterator<Item = Lease> + use<> {
        self.clients.remove(&client).unwrap_or_default().leases.into_values()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ClientId, LeaseId, &Lease)> {
        self.clients.iter().flat_map(|(&client, leases)| leases.leases.iter().map(move |(&id, lease)| (client, id, lease)))
    }

    pub(super) fn check_integrity(&self) {
        for client in self.clients.values() {
            assert!(!client.leases.is_empty(), "a client without leases is listed");
            assert_eq!(
                client.blocks,
                client.leases.values().map(|lease| lease.blocks.len()).sum::<usize>(),
                "leased blocks are miscounted"
            );
            assert!(client.blocks <= LEASED_MAX, "a client leases too many blocks");
        }
    }
}
