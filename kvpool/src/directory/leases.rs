//! Who may be reading which slots, and until when.

use super::{ClientId, timers::TimerId};
use std::collections::{BTreeMap, HashMap};
use tidemill_proto::pool::{LeaseId, SlotRef};

/// Leases of all clients. A lease names slots with their generation: where a slot has moved on, ending the lease
/// changes nothing there.
#[derive(Debug)]
pub(super) struct Leases {
    clients: HashMap<ClientId, BTreeMap<LeaseId, Lease>>,
    next: u64,
}

#[derive(Debug)]
pub(super) struct Lease {
    pub(super) blocks: Vec<SlotRef>,
    pub(super) timer: TimerId,
}

/// Leases that one client may have: more than it can have calls under way.
const LEASES_MAX: usize = 1 << 16;

impl Leases {
    pub(super) fn new() -> Self {
        Self { clients: HashMap::new(), next: 0 }
    }

    /// The id of a new lease; `None` when the client has too many.
    pub(super) fn reserve_id(&mut self, client: ClientId) -> Option<LeaseId> {
        let full = self.clients.get(&client).is_some_and(|leases| leases.len() >= LEASES_MAX);
        self.next += u64::from(!full);
        (!full).then_some(LeaseId(self.next))
    }

    pub(super) fn add(&mut self, client: ClientId, id: LeaseId, lease: Lease) {
        self.clients.entry(client).or_default().insert(id, lease);
    }

    /// `None`: it ended before, or it is another client's.
    pub(super) fn end(&mut self, client: ClientId, id: LeaseId) -> Option<Lease> {
        let leases = self.clients.get_mut(&client)?;
        let lease = leases.remove(&id);
        if leases.is_empty() {
            self.clients.remove(&client);
        }
        lease
    }

    /// Ends all leases of a client.
    pub(super) fn end_client(&mut self, client: ClientId) -> impl Iterator<Item = Lease> + use<> {
        self.clients.remove(&client).unwrap_or_default().into_values()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ClientId, LeaseId, &Lease)> {
        self.clients.iter().flat_map(|(&client, leases)| leases.iter().map(move |(&id, lease)| (client, id, lease)))
    }
}
