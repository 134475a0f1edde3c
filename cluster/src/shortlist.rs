//! The few workers worth comparing, found without looking at all of them: ordered sets, updated as loads change.
//!
//! - **Decode**: the workers with the least time before a new sequence's first step, full ones left out
//! - **Prefill**: the fastest of the idle workers; of the others, those that would be done first with one more prompt
//! - Workers on the host of a pool node with blocks of the prompt
//!
//! Orders are by each worker's own cost model, so that of two idle machines the faster one comes first.

use std::collections::{BTreeSet, HashMap};
use tidemill_proto::{ids::Epoch, message::Host};

/// The number of workers from each order on a shortlist, and of those near the prompt's blocks.
pub(crate) const BEST_MAX: usize = 8;
/// The number of pool nodes that a new block may go to, if none is near.
const STRANGERS_MAX: usize = 4;

/// The position of a worker in the orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Ordered by the time before a first step, in µs.
    Decode(u64),
    /// Ordered by the time for one more prompt, in µs.
    IdlePrefill(u64),
    /// Ordered by the time at which one more prompt would be done, in µs.
    BusyPrefill(u64),
    Pool,
    /// Takes no work now.
    Out,
}

#[derive(Debug, Default)]
pub(crate) struct Shortlist {
    decode: BTreeSet<(u64, Epoch)>,
    idle_prefill: BTreeSet<(u64, Epoch)>,
    busy_prefill: BTreeSet<(u64, Epoch)>,
    /// Pool nodes, in order of epochs.
    pools: Vec<Epoch>,
    standings: HashMap<Epoch, Standing>,
    hosts: HashMap<Host, BTreeSet<Epoch>>,
}

impl Shortlist {
    pub(crate) fn join(&mut self, worker: Epoch, host: &Host) {
        self.hosts.entry(host.clone()).or_default().insert(worker);
        self.standings.insert(worker, Standing::Out);
    }

    pub(crate) fn leave(&mut self, worker: Epoch, host: &Host) {
        self.stand(worker, Standing::Out);
        self.standings.remove(&worker);
        if let Some(members) = self.hosts.get_mut(host) {
            members.remove(&worker);
            if members.is_empty() {
                self.hosts.remove(host);
            }
        }
    }

    /// Updates a member's standing.
    pub(crate) fn stand(&mut self, worker: Epoch, standing: Standing) {
        let Some(known) = self.standings.get_mut(&worker) else { return };
        let before = std::mem::replace(known, standing);
        if before == standing {
            return;
        }
        if let Some((order, key)) = self.order(before) {
            order.remove(&(key, worker));
        }
        if let Some((order, key)) = self.order(standing) {
            order.insert((key, worker));
        }
        match (before, standing) {
            (Standing::Pool, _) => self.pools.retain(|pool| *pool != worker),
            (_, Standing::Pool) => {
                let at = self.pools.partition_point(|pool| *pool < worker);
                self.pools.insert(at, worker);
            }
            _ => {}
        }
    }

    fn order(&mut self, standing: Standing) -> Option<(&mut BTreeSet<(u64, Epoch)>, u64)> {
        match standing {
            Standing::Decode(key) => Some((&mut self.decode, key)),
            Standing::IdlePrefill(key) => Some((&mut self.idle_prefill, key)),
            Standing::BusyPrefill(key) => Some((&mut self.busy_prefill, key)),
            Standing::Pool | Standing::Out => None,
        }
    }

    /// Decode workers that may have room, the least busy first.
    pub(crate) fn decode(&self) -> impl Iterator<Item = Epoch> {
        self.decode.iter().map(|(_, worker)| *worker)
    }

    /// Idle prefill workers and busy ones, each with the best first.
    pub(crate) fn prefill(&self) -> [impl Iterator<Item = Epoch>; 2] {
        [&self.idle_prefill, &self.busy_prefill].map(|order| order.iter().map(|(_, worker)| *worker))
    }

    /// Some pool nodes that accept blocks; the choice depends on the seed.
    pub(crate) fn strangers(&self, seed: u64) -> impl Iterator<Item = Epoch> {
        let pools = self.pools.len();
        let first = if pools == 0 { 0 } else { (seed % pools as u64) as usize };
        (0..pools.min(STRANGERS_MAX)).map(move |n| self.pools[(first + n) % pools])
    }

    /// All members on a host.
    pub(crate) fn on_host(&self, host: &Host) -> impl Iterator<Item = Epoch> {
        self.hosts.get(host).into_iter().flatten().copied()
    }

    /// Panics if the orders and the standings differ. Tests call it after every step.
    pub(crate) fn check_integrity(&self, members: impl Iterator<Item = Epoch>) {
        let mut ordered = [0; 4];
        for member in members {
            let count = match self.standings.get(&member) {
                Some(Standing::Decode(key)) => self.decode.contains(&(*key, member)).then_some(0),
                Some(Standing::IdlePrefill(key)) => self.idle_prefill.contains(&(*key, member)).then_some(1),
                Some(Standing::BusyPrefill(key)) => self.busy_prefill.contains(&(*key, member)).then_some(2),
                Some(Standing::Pool) => self.pools.contains(&member).then_some(3),
                Some(Standing::Out) => continue,
                None => panic!("member {member} has no standing"),
            };
            ordered[count.unwrap_or_else(|| panic!("member {member} is not where it stands"))] += 1;
        }
        assert_eq!(
            ordered,
            [self.decode.len(), self.idle_prefill.len(), self.busy_prefill.len(), self.pools.len()],
            "strangers in an order"
        );
        assert_eq!(self.standings.len(), self.hosts.values().map(BTreeSet::len).sum::<usize>(), "members by host");
        assert!(self.pools.is_sorted());
    }
}
