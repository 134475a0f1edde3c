//! A worker's connection to one pool node.
//!
//! ```text
//!   PoolClient ──calls──► control stream ──► node           one round trip per batch
//!       │   ▲                                  │
//!       │   └── replies, by call number ◄──────┘
//!       └── block bytes, by the cheapest way both ends have ([`transport`](crate::transport))
//! ```
//!
//! The connection is made once. When it breaks, every call under way and after answers `Unreachable` at once, and the
//! owner makes a new one. Every call ends: the node answers by a deadline, and the client waits little longer.

mod calls;
mod fetch;

pub use fetch::Fetch;

use crate::{
    admission::{Arrival, Source},
    client::TransferCounters,
    transport::{DataPath, Delivery, Transport, quic::STREAMS_PER_BATCH, shm::SharedArena},
};
use bytes::Bytes;
use calls::{Call, Calls};
use parking_lot::Mutex;
use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_net::link::{CONNECT_MAX, Connection, Endpoint, LinkError};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint},
    frame::Preamble,
    ids::RequestId,
    pool::{FromPool, KEYS_MAX, Lineage, Reservation, Room, SlotRef, Tier, ToPool},
};
use tokio::{sync::mpsc, time::timeout};

/// Which transport a client may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransportChoice {
    /// Shared memory where the node's arena can be mapped, else QUIC.
    Auto,
    Quic,
}

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("pool node {addr} is out of reach: {reason}")]
    Unreachable { addr: SocketAddr, reason: String },
    #[error("pool node {addr} refuses this worker: {reason}")]
    Refused { addr: SocketAddr, reason: String },
    #[error("a block of {bytes} bytes was to be put, where blocks have {expected}")]
    BlockSize { bytes: usize, expected: usize },
    #[error("{blocks} blocks were to be put at once, at most {KEYS_MAX} can be")]
    TooMany { blocks: usize },
}

/// What became of the blocks of a put; adds up to all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutReport {
    pub written: usize,
    /// Held already, or being written by another.
    pub held: usize,
    /// No room, or written too late.
    pub refused: usize,
}

/// A block that was fetched.
#[derive(Debug)]
pub struct Block {
    /// A private copy, validated.
    pub bytes: Vec<u8>,
    /// The request that it was computed for.
    pub origin: RequestId,
    pub tier: Tier,
    pub transport: Transport,
}

impl Block {
    /// What admission keeps of it.
    pub fn arrival(&self) -> Arrival {
        let source = match (self.transport, self.tier) {
            (Transport::Shm, Tier::Dram) => Source::Dram,
            (Transport::Shm, Tier::Nvme) => Source::Nvme,
            (Transport::Quic, _) => Source::Remote,
        };
        Arrival { origin: self.origin, source }
    }
}

/// Why a block could not be fetched. All have one answer: compute it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Miss {
    /// Not there, and not there before the deadline.
    Absent,
    /// Its slot was reused while it was read.
    Stale,
    /// Its bytes differ from what was published.
    Corrupt,
    /// The node could not be reached, or the transfer broke off.
    Unreachable,
}

/// Clones share the connection, which ends with the last of them and of their fetches.
#[derive(Clone, Debug)]
pub struct PoolClient(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    addr: SocketAddr,
    block_bytes: usize,
    slots: u32,
    connection: Connection,
    path: DataPath,
    calls: Arc<Calls>,
    outgoing: mpsc::Sender<ToPool>,
    counters: Arc<TransferCounters>,
}

/// Calls on their way to the node.
const OUTGOING_MAX: usize = 1024;
/// A node that does not answer what it could answer at once is gone.
const ANSWER_MAX: Duration = Duration::from_secs(10);

impl PoolClient {
    /// Connects, and maps the node's arena if that is possible and allowed. `block_bytes` must be what all other clients of
    /// the node use.
    pub async fn connect(
        endpoint: &Endpoint,
        addr: SocketAddr,
        layout: LayoutFingerprint,
        block_bytes: usize,
        choice: TransportChoice,
        counters: Arc<TransferCounters>,
    ) -> Result<Self, PoolError> {
        let unreachable = |error: LinkError| PoolError::Unreachable { addr, reason: error.to_string() };
        let connection = endpoint.connect(addr).await.map_err(unreachable)?;
        let (mut sender, mut receiver) = connection.open::<ToPool, FromPool>(Preamble::Pool).await.map_err(unreachable)?;
        sender.send(&ToPool::Hello { layout, block_bytes: block_bytes as u64 }).await.map_err(unreachable)?;
        let silent = |_| PoolError::Unreachable { addr, reason: "no answer to hello".into() };
        let arena = match timeout(CONNECT_MAX, receiver.recv()).await.map_err(silent)?.map_err(unreachable)? {
            Some(FromPool::Welcome { arena }) => arena,
            Some(FromPool::Refused { reason }) => return Err(PoolError::Refused { addr, reason }),
            _ => return Err(PoolError::Unreachable { addr, reason: "no answer to hello".into() }),
        };
        if arena.block_bytes != block_bytes as u64 {
            let reason = format!("its slots hold {} bytes, our blocks have {block_bytes}", arena.block_bytes);
            return Err(PoolError::Refused { addr, reason });
        }
        let path = match choice {
            TransportChoice::Quic => DataPath::Quic,
            TransportChoice::Auto => SharedArena::open(&arena).map(|arena| DataPath::Shm(Arc::new(arena))).unwrap_or_else(|error| {
                tracing::info!(%addr, %error, "blocks go over QUIC");
                DataPath::Quic
            }),
        };
        let (outgoing, queue) = mpsc::channel(OUTGOING_MAX);
        let calls = Arc::new(Calls::new(outgoing.downgrade()));
        tokio::spawn(calls::pump(connection.clone(), sender, receiver, queue, Arc::clone(&calls), block_bytes));
        Ok(Self(Arc::new(Inner { addr, block_bytes, slots: arena.slots, connection, path, calls, outgoing, counters })))
    }

    /// Whether calls have a chance.
    pub fn is_open(&self) -> bool {
        self.0.calls.is_open()
    }

    pub fn transport(&self) -> Transport {
        self.0.path.transport()
    }

    /// UDP payload of the datagrams that go to the node now.
    pub fn datagram_bytes(&self) -> u16 {
        self.0.connection.datagram_bytes()
    }

    /// Publishes full blocks that follow each other in one chain. Blocks already held or in flight are not written twice.
    pub async fn put(&self, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        self.put_into(Room::Made, lineage, blocks).await
    }

    /// As [`put`](Self::put), where no block leaves the node for these. What is refused now may find room when the node's disk has
    /// copies of more.
    pub async fn offer(&self, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        self.put_into(Room::Spare, lineage, blocks).await
    }

    async fn put_into(&self, room: Room, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        let inner = &self.0;
        let blocks: Vec<(BlockKey, Bytes)> = blocks.into_iter().map(|(key, bytes)| (key, bytes.into())).collect();
        if let Some((_, wrong)) = blocks.iter().find(|(_, bytes)| bytes.len() != inner.block_bytes) {
            return Err(PoolError::BlockSize { bytes: wrong.len(), expected: inner.block_bytes });
        }
        if blocks.len() > KEYS_MAX {
            return Err(PoolError::TooMany { blocks: blocks.len() });
        }
        if blocks.is_empty() {
            return Ok(PutReport::default());
        }
        let mut call = inner.begin(1 + STREAMS_PER_BATCH)?;
        let asked = Instant::now();
        let keys = blocks.iter().map(|(key, _)| *key).collect();
        inner.send(ToPool::PutStart { call: call.id(), lineage, room, keys }).await?;
        let FromPool::PutStarted { deadline_ms, answers, .. } = inner.answer(&mut call).await? else { return Err(inner.nonsense()) };
        if answers.len() != blocks.len() {
            return Err(inner.nonsense());
        }

        let mut report = PutReport::default();
        let mut to_write = Vec::new();
        for (answer, (_, bytes)) in answers.into_iter().zip(blocks) {
            match answer {
                Reservation::Write(at) => to_write.push((at, bytes)),
                Reservation::Held | Reservation::InFlight => report.held += 1,
                Reservation::Full => report.refused += 1,
            }
        }
        if to_write.iter().any(|(at, _)| at.slot >= inner.slots) {
            return Err(inner.nonsense());
        }
        let count = to_write.len();
        if count > 0 {
            let until = asked.checked_add(Duration::from_millis(deadline_ms)).ok_or_else(|| inner.nonsense())?;
            let slots = Mutex::new(to_write.iter().map(|(at, _)| *at).collect());
            let reserved = Arc::new(Reserved { inner: Arc::clone(inner), slots });
            report.written = inner.deliver(&mut call, to_write, until, &reserved).await?;
            report.refused += count - report.written;
            inner.counters.put(inner.path.transport(), report.written * inner.block_bytes, asked.elapsed());
        }
        Ok(report)
    }

    /// Blocks of the leading run of `keys` that the node holds right now. They stay for about a second, so that a get finds them.
    pub async fn match_prefix(&self, keys: &[BlockKey]) -> Result<usize, PoolError> {
        let keys = &keys[..keys.len().min(KEYS_MAX)];
        if keys.is_empty() {
            return Ok(0);
        }
        let mut call = self.0.begin(1)?;
        self.0.send(ToPool::Match { call: call.id(), keys: keys.to_vec() }).await?;
        match self.0.answer(&mut call).await? {
            FromPool::Matched { blocks, .. } if blocks as usize <= keys.len() => Ok(blocks as usize),
            _ => Err(self.0.nonsense()),
        }
    }

    /// Asks for blocks, waiting for each at most `wait`. Results come as blocks do, in any order, one per key. Dropping the
    /// [`Fetch`] cancels it. Must be called inside a tokio runtime.
    pub fn get(&self, keys: Vec<BlockKey>, wait: Duration) -> Fetch {
        Fetch::start(Arc::clone(&self.0), keys, wait)
    }
}

impl Inner {
    fn begin(&self, replies: usize) -> Result<Call, PoolError> {
        self.calls.begin(replies).ok_or_else(|| self.unreachable("the connection is closed"))
    }

    async fn send(&self, message: ToPool) -> Result<(), PoolError> {
        match timeout(ANSWER_MAX, self.outgoing.send(message)).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(self.unreachable("it does not take any more calls")),
        }
    }

    async fn answer(&self, call: &mut Call) -> Result<FromPool, PoolError> {
        match timeout(ANSWER_MAX, call.replies.recv()).await {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(self.unreachable("the connection broke")),
            Err(_) => Err(self.unreachable("no answer within the deadline")),
        }
    }

    /// Writes blocks and has them published; returns how many were.
    async fn deliver(
        &self,
        call: &mut Call,
        blocks: Vec<(SlotRef, Bytes)>,
        until: Instant,
        reserved: &Arc<Reserved>,
    ) -> Result<usize, PoolError> {
        let mut delivered = blocks.len();
        let mut late = Vec::new();
        let delivery = self.path.write(&self.connection, call.id(), blocks, until, Arc::clone(reserved)).await;
        if let Delivery::InSlots(blocks) = delivery.map_err(|error| self.unreachable(&error.to_string()))? {
            delivered = blocks.len();
            let in_time: HashSet<u32> = blocks.iter().map(|block| block.at.slot).collect();
            late = reserved.slots.lock().iter().filter(|at| !in_time.contains(&at.slot)).copied().collect();
            self.send(ToPool::PutEnd { call: call.id(), blocks }).await?;
        }
        let (mut written, mut answered) = (0, 0);
        while answered < delivered {
            let FromPool::PutEnded { published, refused, .. } = self.answer(call).await? else { return Err(self.nonsense()) };
            written += published as usize;
            answered += published as usize + refused as usize;
        }
        if answered > delivered {
            return Err(self.nonsense());
        }
        *reserved.slots.lock() = late;
        Ok(written)
    }

    fn unreachable(&self, reason: &str) -> PoolError {
        PoolError::Unreachable { addr: self.addr, reason: reason.to_owned() }
    }

    /// The node said what no node says: neither it nor this connection can be used.
    fn nonsense(&self) -> PoolError {
        self.connection.close("answer makes no sense");
        self.unreachable("its answer makes no sense")
    }
}

/// Slots reserved and not ended: given up when the put does not come to its end, and nobody writes them any more.
struct Reserved {
    inner: Arc<Inner>,
    slots: Mutex<Vec<SlotRef>>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let slots = std::mem::take(self.slots.get_mut());
        if !slots.is_empty() {
            // Where the queue is full, the node's deadline does the same, later.
            let _ = self.inner.outgoing.try_send(ToPool::PutRevoke { blocks: slots });
        }
    }
}
