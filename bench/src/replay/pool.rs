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
        let mut turn = Turn::new(self.requests, request, NOW);
        let leading = turn.get(&mut self.directory);
        turn.put(&mut self.directory);
        leading
    }
}

/// One request's way through a directory.
pub(super) struct Turn {
    number: u64,
    keys: Vec<BlockKey>,
    now: Duration,
    leading: usize,
    leases: Vec<LeaseId>,
}

impl Turn {
    pub(super) fn new(number: u64, request: &Request, now: Duration) -> Self {
        Self { number, keys: request.blocks.iter().map(|&id| key(id)).collect(), now, leading: 0, leases: Vec::new() }
    }

    /// Decode gets all blocks. Returns the number of leading ones that are present.
    pub(super) fn get(&mut self, directory: &mut Directory) -> usize {
        directory.get(DECODE, CallId(self.number), &self.keys, WAIT, Via::Slots, self.now);
        let mut missing = vec![true; self.keys.len()];
        self.read(directory, |block| missing[block.index as usize] = false);
        self.leading = missing.iter().take_while(|missing| !**missing).count();
        self.leading
    }

    /// The keys of the blocks to compute.
    pub(super) fn missing(&self) -> &[BlockKey] {
        &self.keys[self.leading..]
    }

    /// Prefill puts the missing blocks, and decode reads them and releases all.
    pub(super) fn put(&mut self, directory: &mut Directory) {
        let lineage = Lineage {
            origin: RequestId(self.number),
            tenant: Tenant(0),
            parent: self.leading.checked_sub(1).map(|last| self.keys[last]),
            position: self.leading as u32,
        };
        let answers = directory.put_start(PREFILL, lineage, Room::Made, self.missing(), self.now);
        let written: Vec<Written> = answers.into_iter().filter_map(reserved).collect();
        directory.put_end(PREFILL, &written, self.now);
        self.read(directory, |_| ());
        // If the prompt is larger than the pool, the rest never arrives.
        directory.cancel_get(DECODE, CallId(self.number));
        self.leases.drain(..).for_each(|lease| directory.release(DECODE, lease));
        directory.take_events();
    }

    /// Takes the blocks handed over to decode.
    fn read(&mut self, directory: &mut Directory, mut each: impl FnMut(&Found)) {
        while let Some(action) = directory.poll_action() {
            if let Action::Found { lease, blocks, .. } = action {
                self.leases.push(lease);
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
