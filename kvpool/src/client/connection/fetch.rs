//! One get under way.

use super::{ANSWER_MAX, Block, Inner, Miss, calls::Call};
use crate::{
    admission::blocks_within,
    core::validate::{Invalid, validate},
    transport::{DataPath, shm::SharedArena},
};
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_proto::{
    block::BlockKey,
    pool::{Found, FromPool, KEYS_MAX, LeaseId, ToPool},
};
use tokio::{sync::mpsc, time::timeout_at};

/// Results of a get, one per key, as they come. Dropping it cancels what is left.
#[derive(Debug)]
pub struct Fetch {
    results: mpsc::Receiver<Outcome>,
}

/// Place in the get's keys, and the block or why there is none.
type Outcome = (usize, Result<Block, Miss>);

/// Blocks that were fetched and not taken,
const RESULTS_MAX: usize = 32;
/// and their bytes.
const RESULTS_BYTES_MAX: usize = 8 << 20;

impl Fetch {
    pub(super) fn start(inner: Arc<Inner>, keys: Vec<BlockKey>, wait: Duration) -> Self {
        let (results_in, results) = mpsc::channel(blocks_within(RESULTS_BYTES_MAX, inner.block_bytes, RESULTS_MAX));
        tokio::spawn(run(inner, keys, wait, results_in));
        Self { results }
    }

    /// The next result; `None` after one for each key.
    pub async fn next(&mut self) -> Option<(usize, Result<Block, Miss>)> {
        self.results.recv().await
    }
}

async fn run(inner: Arc<Inner>, mut keys: Vec<BlockKey>, wait: Duration, results: mpsc::Sender<Outcome>) {
    let asked = keys.len();
    keys.truncate(KEYS_MAX);
    let call = inner.calls.begin(keys.len().max(1));
    let id = call.as_ref().map(Call::id);
    let results = Results { inner, sender: results };
    let inner = Arc::clone(&results.inner);
    let mut answers = Answers { results: results.clone(), open: (0..keys.len()).collect() };
    let transfer = async {
        if let Some(call) = call.filter(|_| !keys.is_empty()) {
            // An error leaves keys open, and says nothing that the miss does not.
            let _ = transfer(&inner, call, keys, wait, &mut answers).await;
        }
        for index in std::mem::take(&mut answers.open) {
            results.send(index, Err(Miss::Unreachable)).await;
        }
        for index in KEYS_MAX..asked {
            results.send(index, Err(Miss::Absent)).await;
        }
    };
    tokio::select! {
        () = transfer => {}
        () = results.sender.closed() => {
            // The node ends the wait by itself, later, where the queue is full.
            if let Some(call) = id {
                let _ = inner.outgoing.try_send(ToPool::CancelGet { call });
            }
        }
    }
}

/// Asks, and passes on what comes until all keys are answered. `Err`: the node is gone, silent or makes no sense.
async fn transfer(inner: &Inner, mut call: Call, keys: Vec<BlockKey>, wait: Duration, answers: &mut Answers) -> Result<(), Gone> {
    let wait_ms = wait.as_millis().try_into().unwrap_or(u64::MAX);
    let asked = Instant::now();
    inner.send(ToPool::Get { call: call.id(), keys, wait_ms, via: inner.path.via() }).await.map_err(|_| Gone)?;
    while !answers.open.is_empty() {
        // Until the wait is over, silence is what was asked for; after that, only between two answers and not for long.
        let patience = Instant::now().max(asked.checked_add(wait).ok_or(Gone)?) + ANSWER_MAX;
        tokio::select! {
            reply = timeout_at(patience.into(), call.replies.recv()) => match reply.ok().flatten().ok_or(Gone)? {
                FromPool::Found { lease, blocks, .. } => answers.found(lease, blocks).await?,
                FromPool::Missed { indexes, .. } => {
                    for index in indexes {
                        let index = answers.take(index)?;
                        answers.results.send(index, Err(Miss::Absent)).await;
                    }
                }
                _ => return Err(answers.nonsense()),
            },
            Some(block) = call.blocks.recv() => {
                answers.take(block.found.index)?;
                let result = validate(block.copied, &block.found).map(|()| block.bytes);
                answers.results.finish(&block.found, result, block.took).await;
            }
        }
    }
    Ok(())
}

/// Keys without an answer, and where answers go.
struct Answers {
    results: Results,
    open: BTreeSet<usize>,
}

struct Gone;

impl Answers {
    /// The node answers this key; each only once.
    fn take(&mut self, index: u32) -> Result<usize, Gone> {
        let index = index as usize;
        if self.open.remove(&index) { Ok(index) } else { Err(self.nonsense()) }
    }

    /// Copies leased blocks.
    async fn found(&mut self, lease: LeaseId, blocks: Vec<Found>) -> Result<(), Gone> {
        let inner = &self.results.inner;
        let lease = Arc::new(Lease { inner: Arc::clone(inner), lease });
        let DataPath::Shm(arena) = &inner.path else { return Err(self.nonsense()) };
        let indexes: BTreeSet<_> = blocks.iter().map(|found| found.index as usize).collect();
        let once = indexes.len() == blocks.len() && indexes.is_subset(&self.open);
        if !once || blocks.iter().any(|found| found.at.slot >= inner.slots) {
            return Err(self.nonsense());
        }
        self.open.retain(|index| !indexes.contains(index));
        let copy = |arena: Arc<SharedArena>, share: Vec<Found>| {
            let (results, lease) = (self.results.clone(), Arc::clone(&lease));
            async move {
                let _lease = lease;
                for found in share {
                    let started = Instant::now();
                    let result = arena.read(&found);
                    results.finish(&found, result, started.elapsed()).await;
                    tokio::task::yield_now().await;
                }
            }
        };
        arena.copy_shared(blocks, copy).await;
        Ok(())
    }

    fn nonsense(&self) -> Gone {
        let _ = self.results.inner.nonsense();
        Gone
    }
}

/// Where answers go.
#[derive(Clone)]
struct Results {
    inner: Arc<Inner>,
    sender: mpsc::Sender<Outcome>,
}

impl Results {
    async fn finish(&self, found: &Found, result: Result<Vec<u8>, Invalid>, took: Duration) {
        let transport = self.inner.path.transport();
        let result = match result {
            Ok(bytes) => {
                self.inner.counters.got(transport, bytes.len(), took);
                Ok(Block { bytes, origin: found.origin, tier: found.tier, transport })
            }
            Err(Invalid::Stale) => Err(Miss::Stale),
            Err(Invalid::Corrupt) => {
                // Else the node would go on to offer it, and nobody could put it again.
                let _ = self.inner.outgoing.try_send(ToPool::Suspect { block: found.at });
                Err(Miss::Corrupt)
            }
        };
        self.send(found.index as usize, result).await;
    }

    async fn send(&self, index: usize, result: Result<Block, Miss>) {
        if let Err(miss) = result {
            self.inner.counters.miss(miss, 1);
        }
        // Nobody listens any more: run() is about to end this task.
        let _ = self.sender.send((index, result)).await;
    }
}

/// Given back when the copies are made, or not made.
struct Lease {
    inner: Arc<Inner>,
    lease: LeaseId,
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Where the queue is full, the lease expires by itself.
        let _ = self.inner.outgoing.try_send(ToPool::Release { lease: self.lease });
    }
}
