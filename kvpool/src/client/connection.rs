//! A connection to one pool node.
//!
//! ```text
//!   PoolClient ──calls──► control stream ──► node           one round trip per batch
//!       │   ▲                                  │
//!       │   └── replies, by call number ◄──────┘
//!       └── block bytes, by the cheapest transport that works ([`transport`](crate::transport))
//! ```
//!
//! Both directions have two phases, so that bytes need no intermediate memory: a put *reserves* slots, the caller writes them, and it
//! *commits*; a get *leases* blocks, the caller reads them, and each copy is *validated*.
//!
//! A connection is made once. When it breaks, all current and later calls return `Unreachable` at once, and the owner makes a new
//! connection. Every call ends: the node answers by a deadline, and the client waits only a little longer.

mod calls;
mod fetch;
mod put;
mod rails;

pub use fetch::{Block, Fetch, FetchedBlock, Miss};
pub use put::{PutReport, ReservedSlots};

use crate::{
    arena::pin::Pin,
    client::TransferCounters,
    transport::{DataPath, Offer, rdma::Nics},
};
use bytes::Bytes;
use calls::{Call, Calls};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tidemill_net::{
    identity::PeerRole,
    link::{CONNECT_MAX, Connection, Endpoint, LinkError},
};
use tidemill_proto::{
    block::BlockKey,
    frame::Preamble,
    pool::{FromPool, Hello, KEYS_MAX, Lineage, Room, ToPool, Transport},
};
use tokio::{sync::mpsc, time::timeout};

/// The transports that a client may use; it uses the cheapest of them that works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransportChoice {
    /// Shared memory where the node's arena can be mapped, else RDMA where both ends have a device, else QUIC.
    Auto,
    /// Shared memory, else QUIC.
    Shm,
    /// RDMA, else QUIC.
    Rdma,
    Quic,
}

impl TransportChoice {
    pub const ALL: [TransportChoice; 4] = [Self::Auto, Self::Shm, Self::Rdma, Self::Quic];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
            Self::Quic => "quic",
        }
    }

    /// The choice that applies between hosts.
    pub const fn far(self) -> Self {
        match self {
            Self::Auto | Self::Rdma => Self::Rdma,
            Self::Shm | Self::Quic => Self::Quic,
        }
    }

    fn allows(self, transport: Transport) -> bool {
        match transport {
            Transport::Shm => matches!(self, Self::Auto | Self::Shm),
            Transport::Rdma => matches!(self, Self::Auto | Self::Rdma),
            Transport::Quic => true,
        }
    }
}

/// A choice of transport, and the devices that take part.
#[derive(Clone, Debug)]
pub struct Ways {
    pub choice: TransportChoice,
    /// The devices for RDMA, if any.
    pub nics: Option<Arc<Nics>>,
    /// The device that copies blocks from shared memory by itself, if any.
    pub device: Option<Arc<dyn Pin>>,
}

/// A choice without devices: no RDMA, whatever the choice is, and the host copies blocks.
impl From<TransportChoice> for Ways {
    fn from(choice: TransportChoice) -> Self {
        Self { choice, nics: None, device: None }
    }
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

/// A connection to a pool node. Clones share it; it ends with the last of the clones, of their fetches and of their blocks.
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

/// The most messages that wait to be sent to the node.
const OUTGOING_MAX: usize = 1024;
/// The longest time for an answer that needs no waiting at the node; then the node counts as gone.
const ANSWER_MAX: Duration = Duration::from_secs(10);

impl PoolClient {
    /// Connects, and opens the cheapest transport that works and is allowed.
    pub async fn connect(
        endpoint: &Endpoint,
        addr: SocketAddr,
        hello: impl Into<Hello>,
        ways: impl Into<Ways>,
        counters: Arc<TransferCounters>,
    ) -> Result<Self, PoolError> {
        let Ways { choice, nics, device } = ways.into();
        let hello = hello.into();
        let blocks = hello.blocks;
        let unreachable = |error: LinkError| PoolError::Unreachable { addr, reason: error.to_string() };
        let connection = endpoint.connect(addr).await.map_err(unreachable)?;
        connection.expect(&[PeerRole::Kvpool]).map_err(unreachable)?;
        let (mut sender, mut receiver) = connection.open::<ToPool, FromPool>(Preamble::Pool).await.map_err(unreachable)?;
        sender.send(&ToPool::Hello(hello)).await.map_err(unreachable)?;
        let silent = |_| PoolError::Unreachable { addr, reason: "no answer to hello".into() };
        let arena = match timeout(CONNECT_MAX, receiver.recv()).await.map_err(silent)?.map_err(unreachable)? {
            Some(FromPool::Welcome { arena }) => arena,
            Some(FromPool::Refused { reason }) => return Err(PoolError::Refused { addr, reason }),
            _ => return Err(PoolError::Unreachable { addr, reason: "no answer to hello".into() }),
        };
        if arena.block_bytes != blocks.block_bytes {
            let reason = format!("its slots hold {} bytes, our blocks have {}", arena.block_bytes, blocks.block_bytes);
            return Err(PoolError::Refused { addr, reason });
        }
        let block_bytes = blocks.block_bytes as usize;
        let no_way = || PoolError::Unreachable { addr, reason: "no transport works".into() };
        let (outgoing, queue) = mpsc::channel(OUTGOING_MAX);
        let offer =
            Offer { arena: &arena, nics: nics.as_ref(), device: device.as_ref(), control: outgoing.downgrade(), counters: &counters };
        let path = DataPath::open(addr, &offer, |transport| choice.allows(transport)).ok_or_else(no_way)?;
        let calls = Arc::new(Calls::new(outgoing.downgrade()));
        let rails = path.rails().cloned();
        tokio::spawn(calls::pump(connection.clone(), sender, receiver, queue, Arc::clone(&calls), rails.clone(), block_bytes));
        let inner = Arc::new(Inner { addr, block_bytes, slots: arena.slots(), connection, path, calls, outgoing, counters });
        if let Some(rails) = rails {
            rails::keep_open(&inner, rails).await;
        }
        Ok(Self(inner))
    }

    /// Whether the connection is still open.
    pub fn is_open(&self) -> bool {
        self.0.calls.is_open()
    }

    /// The transport that carries blocks now.
    pub fn transport(&self) -> Transport {
        self.0.path.now().transport()
    }

    /// The UDP payload, in bytes, of datagrams now sent to the node.
    pub fn datagram_bytes(&self) -> u16 {
        self.0.connection.datagram_bytes()
    }

    /// Reserves slots for blocks that follow each other in one chain, to be written and committed by the caller. Blocks that are already
    /// held or in flight are not written twice.
    pub async fn reserve(&self, room: Room, lineage: Lineage, keys: Vec<BlockKey>) -> Result<ReservedSlots, PoolError> {
        if keys.len() > KEYS_MAX {
            return Err(PoolError::TooMany { blocks: keys.len() });
        }
        ReservedSlots::reserve(&self.0, room, lineage, keys).await
    }

    /// Reserves slots, writes blocks and commits them in one call.
    pub async fn put(&self, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        self.put_into(Room::Made, lineage, blocks).await
    }

    /// Like [`put`](Self::put), but evicts no blocks to make room. Blocks that are refused now may find room when the disk has copies of
    /// more of the node's blocks.
    pub async fn offer(&self, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        self.put_into(Room::Spare, lineage, blocks).await
    }

    async fn put_into(&self, room: Room, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        let (keys, blocks): (Vec<_>, Vec<Bytes>) = blocks.into_iter().map(|(key, bytes)| (key, bytes.into())).unzip();
        blocks.iter().try_for_each(|bytes| self.0.check_size(bytes))?;
        if blocks.is_empty() {
            return Ok(PutReport::default());
        }
        let reserved = Arc::new(self.reserve(room, lineage, keys).await?);
        reserved.write_all(blocks).await?;
        Arc::into_inner(reserved).expect("all writers have ended").commit().await
    }

    /// The number of leading `keys` that the node holds now. It keeps these blocks for about a second, so that a get finds them.
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

    /// Requests blocks, and waits for each up to `wait`. Results come in any order, one per key. Dropping the [`Fetch`] cancels it. Call it
    /// inside a tokio runtime.
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

    fn check_size(&self, bytes: &[u8]) -> Result<(), PoolError> {
        let (bytes, expected) = (bytes.len(), self.block_bytes);
        if bytes == expected { Ok(()) } else { Err(PoolError::BlockSize { bytes, expected }) }
    }

    fn unreachable(&self, reason: &str) -> PoolError {
        PoolError::Unreachable { addr: self.addr, reason: reason.to_owned() }
    }

    /// Closes the connection to a node that broke the protocol.
    fn nonsense(&self) -> PoolError {
        self.connection.close("answer makes no sense");
        self.unreachable("its answer makes no sense")
    }
}
