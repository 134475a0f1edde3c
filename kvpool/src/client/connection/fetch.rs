//! One get: blocks are leased or received, read, and validated.

use super::{ANSWER_MAX, Call, Inner, calls::StreamedBlock};
use crate::{
    arena::Arena,
    client::{
        counters::Copier,
        request::{Arrival, Source, blocks_within},
    },
    core::validate::{Copied, Invalid, validate},
    transport::{Access, Broken, Slots, quic::Received},
};
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_proto::{
    block::BlockKey,
    ids::RequestId,
    pool::{Direction, Found, FromPool, KEYS_MAX, LeaseId, Tier, ToPool, Transport},
};
use tokio::{sync::mpsc, time::timeout_at};

/// The results of a get, one per key, as they arrive. Dropping it cancels the rest.
#[derive(Debug)]
pub struct Fetch {
    results: mpsc::Receiver<Outcome>,
}

/// A place in the get's keys, and the block or the reason why there is none.
type Outcome = (usize, Result<FetchedBlock, Miss>);

/// The reason why a block could not be fetched. The remedy is always the same: compute it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Miss {
    /// The block is not in the pool, or did not arrive before the deadline.
    Absent,
    /// The block's slot was reused before it was read.
    Stale,
    /// The block's bytes differ from those that were published.
    Corrupt,
    /// The node could not be reached, or the transfer broke off.
    Unreachable,
}

/// A block that can be read: its slot is kept until it is read or dropped. Its lease has a deadline; a block that is read after it may be a
/// miss, but is never wrong.
#[derive(Debug)]
pub struct FetchedBlock {
    /// The request for which the block was computed.
    pub origin: RequestId,
    pub tier: Tier,
    inner: Arc<Inner>,
    found: Found,
    bytes: UnreadBytes,
    /// The time spent so far on getting the bytes here.
    took: Duration,
}

/// A private, validated copy of a block.
#[derive(Debug)]
pub struct Block {
    pub bytes: Vec<u8>,
    pub origin: RequestId,
    pub tier: Tier,
    pub transport: Transport,
}

#[derive(Debug)]
enum UnreadBytes {
    Leased { slots: Arc<dyn Slots>, _lease: Arc<Lease> },
    Received(Received),
}

/// The most blocks that were fetched and not taken.
const RESULTS_MAX: usize = 32;
/// The most bytes of blocks that were fetched and not taken.
const RESULTS_BYTES_MAX: usize = 8 << 20;

impl FetchedBlock {
    /// The transport that brings, or has brought, the block's bytes.
    pub fn transport(&self) -> Transport {
        match &self.bytes {
            UnreadBytes::Leased { slots, .. } => slots.transport(),
            UnreadBytes::Received(_) => Transport::Quic,
        }
    }

    /// The block's origin and source, which admission records.
    pub fn arrival(&self) -> Arrival {
        let source = match self.tier {
            _ if !self.transport().same_host() => Source::Remote,
            Tier::Dram => Source::Dram,
            Tier::Nvme => Source::Nvme,
            Tier::Object => Source::Object,
        };
        Arrival { origin: self.origin, source }
    }

    /// Copies the block to `to`, which must have exactly its length, and validates the copy. After a miss, the content of `to` is
    /// meaningless.
    pub fn read_into(&self, to: &mut [u8]) -> Result<(), Miss> {
        let started = Instant::now();
        let Ok(copied) = self.bytes.copy_to(self.found.at.slot, to) else {
            self.inner.counters.miss(Miss::Unreachable, 1);
            return Err(Miss::Unreachable);
        };
        self.judge(copied, Copier::Host, started)
    }

    /// The block's address for the device of this client's [`Ways`](super::Ways), which may copy from it as long as this lives. `None` if
    /// the block is not in memory that the device has pinned. The copy must be [validated](Self::validate_device_copy).
    pub fn device_address(&self) -> Option<u64> {
        self.mapped()?.device_address(self.found.at.slot)
    }

    /// Validates the device's copy from [`device_address`](Self::device_address), which began at `started`. Call it when the copy has
    /// ended, and do not use the copy before.
    pub fn validate_device_copy(&self, started: Instant) -> Result<(), Miss> {
        let arena = self.mapped().expect("a device copies what is mapped");
        self.judge(arena.read_by_device(self.found.at.slot), Copier::Device, started)
    }

    fn mapped(&self) -> Option<&Arena> {
        match &self.bytes {
            UnreadBytes::Leased { slots, .. } => slots.mapped(),
            UnreadBytes::Received(_) => None,
        }
    }

    fn judge(&self, copied: Copied, by: Copier, started: Instant) -> Result<(), Miss> {
        let counters = &self.inner.counters;
        match validate(copied, &self.found) {
            Ok(()) => {
                let bytes = self.inner.block_bytes;
                counters.moved(self.transport(), Direction::Get, bytes, self.took + started.elapsed());
                counters.fetched(by, bytes);
                Ok(())
            }
            Err(invalid) => {
                let miss = match invalid {
                    Invalid::Stale => Miss::Stale,
                    Invalid::Corrupt => {
                        // Otherwise the node would continue to offer the block, and it could not be put again.
                        let _ = self.inner.outgoing.try_send(ToPool::Suspect { block: self.found.at });
                        Miss::Corrupt
                    }
                };
                counters.miss(miss, 1);
                Err(miss)
            }
        }
    }

    /// Copies the block into newly allocated memory.
    pub fn read(&self) -> Result<Block, Miss> {
        let mut bytes = vec![0; self.inner.block_bytes];
        self.read_into(&mut bytes)?;
        Ok(Block { bytes, origin: self.origin, tier: self.tier, transport: self.transport() })
    }
}

impl UnreadBytes {
    fn copy_to(&self, slot: u32, to: &mut [u8]) -> Result<Copied, Broken> {
        match self {
            UnreadBytes::Leased { slots, .. } => slots.read(slot, to),
            UnreadBytes::Received(received) => Ok(received.copy_to(to)),
        }
    }
}

impl Fetch {
    pub(super) fn start(inner: Arc<Inner>, keys: Vec<BlockKey>, wait: Duration) -> Self {
        let (results_in, results) = mpsc::channel(blocks_within(RESULTS_BYTES_MAX, inner.block_bytes, RESULTS_MAX));
        tokio::spawn(run(inner, keys, wait, results_in));
        Self { results }
    }

    /// The next result, or `None` after there was one for each key.
    pub async fn next(&mut self) -> Option<(usize, Result<FetchedBlock, Miss>)> {
        self.results.recv().await
    }
}

async fn run(inner: Arc<Inner>, mut keys: Vec<BlockKey>, wait: Duration, results: mpsc::Sender<Outcome>) {
    let asked = keys.len();
    keys.truncate(KEYS_MAX);
    let call = inner.calls.begin(keys.len().max(1));
    let id = call.as_ref().map(Call::id);
    let mut answers = Answers { inner: Arc::clone(&inner), results: results.clone(), open: (0..keys.len()).collect() };
    let transfer = async {
        if let Some(call) = call.filter(|_| !keys.is_empty()) {
            // An error leaves keys unanswered, which are reported as misses.
            let _ = answers.transfer(call, keys, wait).await;
        }
        for index in std::mem::take(&mut answers.open) {
            answers.miss(index, Miss::Unreachable).await;
        }
        for index in KEYS_MAX..asked {
            answers.miss(index, Miss::Absent).await;
        }
    };
    tokio::select! {
        () = transfer => {}
        () = results.closed() => {
            // If the queue is full, the node ends the wait by itself, later.
            if let Some(call) = id {
                let _ = inner.outgoing.try_send(ToPool::CancelGet { call });
            }
        }
    }
}

/// The keys that have no answer yet, and the channel for answers.
struct Answers {
    inner: Arc<Inner>,
    results: mpsc::Sender<Outcome>,
    open: BTreeSet<usize>,
}

/// The error of a node that is gone, silent or breaks the protocol.
struct Gone;

impl Answers {
    /// Sends the request, and passes on results until all keys are answered.
    async fn transfer(&mut self, mut call: Call, keys: Vec<BlockKey>, wait: Duration) -> Result<(), Gone> {
        let wait_ms = wait.as_millis().try_into().unwrap_or(u64::MAX);
        let asked = Instant::now();
        let way = self.inner.path.now().clone();
        let get = ToPool::Get { call: call.id(), keys, wait_ms, via: way.via() };
        self.inner.send(get).await.map_err(|_| Gone)?;
        while !self.open.is_empty() {
            // Silence is expected until the wait is over; after that, only briefly between two answers.
            let patience = Instant::now().max(asked.checked_add(wait).ok_or(Gone)?) + ANSWER_MAX;
            tokio::select! {
                reply = timeout_at(patience.into(), call.replies.recv()) => match reply.ok().flatten().ok_or(Gone)? {
                    FromPool::Found { lease, blocks, .. } => self.leased(&way, lease, blocks).await?,
                    FromPool::Missed { indexes, .. } => {
                        for index in indexes {
                            let index = self.take(index)?;
                            self.miss(index, Miss::Absent).await;
                        }
                    }
                    _ => return Err(self.nonsense()),
                },
                Some(StreamedBlock { found, received, took }) = call.blocks.recv() => {
                    self.found(found, UnreadBytes::Received(received), took).await?;
                }
            }
        }
        Ok(())
    }

    /// Takes blocks that this process reads from their slots. The lease ends when the last of them is read.
    async fn leased(&mut self, way: &Access, lease: LeaseId, blocks: Vec<Found>) -> Result<(), Gone> {
        let lease = Arc::new(Lease { inner: Arc::clone(&self.inner), lease });
        let Access::Slots(slots) = way else { return Err(self.nonsense()) };
        for found in blocks {
            let bytes = UnreadBytes::Leased { slots: Arc::clone(slots), _lease: Arc::clone(&lease) };
            self.found(found, bytes, Duration::ZERO).await?;
        }
        Ok(())
    }

    async fn found(&mut self, found: Found, bytes: UnreadBytes, took: Duration) -> Result<(), Gone> {
        let index = self.take(found.index)?;
        if found.at.slot >= self.inner.slots {
            return Err(self.nonsense());
        }
        let Found { origin, tier, .. } = found;
        self.send(index, Ok(FetchedBlock { origin, tier, inner: Arc::clone(&self.inner), found, bytes, took })).await;
        Ok(())
    }

    /// Takes a key that the node answers, each only once.
    fn take(&mut self, index: u32) -> Result<usize, Gone> {
        let index = index as usize;
        if self.open.remove(&index) { Ok(index) } else { Err(self.nonsense()) }
    }

    async fn miss(&self, index: usize, miss: Miss) {
        self.inner.counters.miss(miss, 1);
        self.send(index, Err(miss)).await;
    }

    async fn send(&self, index: usize, result: Result<FetchedBlock, Miss>) {
        // If the receiver is gone, run() is about to end this task.
        let _ = self.results.send((index, result)).await;
    }

    fn nonsense(&self) -> Gone {
        let _ = self.inner.nonsense();
        Gone
    }
}

/// A lease, released when the last of its blocks is read or dropped.
#[derive(Debug)]
struct Lease {
    inner: Arc<Inner>,
    lease: LeaseId,
}

impl Drop for Lease {
    fn drop(&mut self) {
        // If the queue is full, the lease expires by itself.
        let _ = self.inner.outgoing.try_send(ToPool::Release { lease: self.lease });
    }
}
