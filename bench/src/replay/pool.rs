//! Runs a trace through the pool's directory as a cluster does: decode gets the whole prompt and waits, prefill puts the missing blocks,
//! decode reads and releases. No time passes and no bytes move.

use super::trace::Request;
use std::time::Duration;
use tidemill_kvpool::core::{
    directory::{Action, ClientId, Directory, Limits},
    eviction::Policy,
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, Room, Via, Written},
};

/// A pool node's directory and its only clients.
pub struct ReplayedPool {
    directory: Directory,
    requests: u64,
}

pub(super) const PREFILL: ClientId = ClientId(1);
pub(super) const DECODE: ClientId = ClientId(2);
pub(super) const NOW: Duration = Duration::ZERO;
/// Arbitrary limits: no time passes, so nothing is ever late.
pub(super) const LIMITS: Limits = Limits { put_deadline: Duration::from_secs(1), lease: Duration::from_secs(1) };
pub(super) const WAIT: Duration = Duration::from_secs(1);

impl ReplayedPool {
    pub fn new(slots: u32, policy: Policy) -> Self {
        Self { directory: Directory::new(slots, LIMITS, policy.build(slots)), requests: 0 }
    }

    /// The number of leading blocks of the prompt that are present. Afterwards, all that fit are present.
    pub fn serve(&mut self, request: &Request) -> usize {
        self.requests += 1;
        let call = CallId(self.requests);
        let keys: Vec<BlockKey> = request.blocks.iter().map(|&id| key(id)).collect();
        self.directory.get(DECODE, call, &keys, WAIT, Via::Slots, NOW);
        let (mut leases, mut missing) = (Vec::new(), vec![true; keys.len()]);
        self.read(&mut leases, |block| missing[block.index as usize] = false);
        let leading = missing.iter().take_while(|missing| !**missing).count();

        let lineage = Lineage {
            origin: RequestId(self.requests),
            tenant: Tenant(0),
            parent: leading.checked_sub(1).map(|last| keys[last]),
            position: leading as u32,
        };
        let answers = self.directory.put_start(PREFILL, lineage, Room::Made, &keys[leading..], NOW);
        let written: Vec<Written> = answers.into_iter().filter_map(reserved).collect();
        self.directory.put_end(PREFILL, &written, NOW);
        self.read(&mut leases, |_| ());

        // If the prompt is larger than the pool, the rest never arrives.
        self.directory.cancel_get(DECODE, call);
        leases.into_iter().for_each(|lease| self.directory.release(DECODE, lease));
        self.directory.take_events();
        leading
    }

    /// Takes the blocks handed over to decode.
    fn read(&mut self, leases: &mut Vec<LeaseId>, mut each: impl FnMut(&Found)) {
        while let Some(action) = self.directory.poll_action() {
            if let Action::Found { lease, blocks, .. } = action {
                leases.push(lease);
                blocks.iter().for_each(&mut each);
            }
        }
    }
}

pub(super) fn reserved(answer: Reservation) -> Option<Written> {
    match answer {
        Reservation::Write(at) => Some(Written { at, checksum: 0 }),
        Reservation::Held | Reservation::InFlight | Reservation::Full => None,
    }
}

/// The key of a trace's id: like keys, ids identify a block and all blocks before it.
fn key(id: u64) -> BlockKey {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&id.to_le_bytes());
    BlockKey(key)
}
