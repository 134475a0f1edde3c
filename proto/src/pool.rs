//! Messages between a KV pool node and its clients.
//!
//! A client opens one control stream, sends [`ToPool::Hello`] and is welcomed or refused. Then it numbers its calls; answers come in any
//! order and carry the call's number. Block bytes take one of two ways ([`Via`]), never the control stream:
//!
//! ```text
//! Via::Slots    the client reads and writes the node's arena itself (shared memory, RDMA)
//!     put   PutStart ──► PutStarted(slots)   write slots   PutEnd(checksums) ──► PutEnded
//!     get   Get ──► Found(slots, lease)      read slots    Release
//!
//! Via::Streams  bytes follow a header on one-way streams, several at a time (QUIC)
//!     put   PutStart ──► PutStarted(slots)   (PutData, bytes)… ──► PutEnded, one per stream
//!     get   Get ──► (GetData, bytes, generation)…
//! ```
//!
//! RDMA needs *rails* first: connections between a device of the client and one of the node. The client may ask for them, or for more,
//! at any time; either end may close them at any time, and streams work meanwhile.
//!
//! ```text
//!     OpenRails(ends) ──► RailsOpened(ends, keys)        CloseRail ──► (client: it failed)   ◄── RailsClosed (node: fenced)
//! ```
//!
//! Every operation is batched and idempotent by key. Everything that a client reserved or leased is released when its connection
//! ends, and at a deadline in any case.

use crate::{
    block::{BlockKey, LayoutFingerprint, Shard, Tenant},
    ids::RequestId,
};
use serde::{Deserialize, Serialize};

/// Most keys or blocks in one message: enough for a context of a million tokens.
pub const KEYS_MAX: usize = 1 << 16;

/// Largest block.
pub const BLOCK_BYTES_MAX: u64 = 256 << 20;

/// Most rails of one client.
pub const RAILS_MAX: usize = 16;

/// One call of one client. Numbers are never reused on the same connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct CallId(pub u64);

/// A lease, which keeps the blocks of one answer in place until it is released or expires.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

/// A slot at one point in time: its generation changes whenever its contents may change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct SlotRef {
    pub slot: u32,
    pub generation: u64,
}

/// The transport that carries block bytes between a client and a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    Shm,
    Rdma,
    Quic,
}

impl Transport {
    /// All transports, the cheapest first.
    pub const ALL: [Transport; 3] = [Transport::Shm, Transport::Rdma, Transport::Quic];

    pub const fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Rdma => "rdma",
            Transport::Quic => "quic",
        }
    }

    /// Whether the transport works only between processes of one host.
    pub const fn same_host(self) -> bool {
        matches!(self, Transport::Shm)
    }
}

/// The direction in which blocks move, as a client sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    Put,
    Get,
}

impl Direction {
    pub const ALL: [Direction; 2] = [Direction::Put, Direction::Get];

    pub const fn name(self) -> &'static str {
        match self {
            Direction::Put => "put",
            Direction::Get => "get",
        }
    }
}

/// The way in which a client gets block bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Via {
    Slots,
    Streams,
}

/// The tier in which a pool node holds a block; the faster one if both do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Tier {
    Dram,
    Nvme,
    /// Object storage that nodes share.
    Object,
}

/// The origin of a put's blocks: the request they are computed for, and their place in their chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lineage {
    /// The request they are computed for.
    pub origin: RequestId,
    pub tenant: Tenant,
    /// The block before the first one of the put; `None` at the start of the chain.
    pub parent: Option<BlockKey>,
    /// The number of blocks of the chain before the first one of the put.
    pub position: u32,
}

impl Lineage {
    /// The lineage of each of `keys`, which follow one another starting at this place.
    pub fn of_each(self, keys: &[BlockKey]) -> impl Iterator<Item = Self> {
        let parents = [self.parent].into_iter().chain(keys.iter().copied().map(Some));
        (self.position..).zip(parents).take(keys.len()).map(move |(position, parent)| Self { parent, position, ..self })
    }
}

/// The format of a client's blocks. A connection is for one shard: its keys name that shard's part of each block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlockFormat {
    pub layout: LayoutFingerprint,
    pub shard: Shard,
    /// The size of the shard's part of a block.
    pub block_bytes: u64,
}

impl BlockFormat {
    /// The format for a model that is not split into shards.
    pub fn whole(layout: LayoutFingerprint, block_bytes: u64) -> Self {
        Self { layout, shard: Shard::WHOLE, block_bytes }
    }
}

impl BlockFormat {
    /// The hello of a client that serves the model of this name.
    pub fn of_model(self, model: Option<String>) -> Hello {
        Hello { blocks: self, model }
    }
}

/// A client's introduction.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    pub blocks: BlockFormat,
    /// The name of the model whose blocks these are, if the client knows it. A node that keeps blocks of several models must be told.
    pub model: Option<String>,
}

impl From<BlockFormat> for Hello {
    fn from(blocks: BlockFormat) -> Self {
        blocks.of_model(None)
    }
}

/// A message from client to node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToPool {
    /// The first message.
    Hello(Hello),
    /// Reserve a slot for each key that is neither held nor in flight. The keys follow one another in one chain.
    PutStart {
        call: CallId,
        lineage: Lineage,
        room: Room,
        keys: Vec<BlockKey>,
    },
    /// These slots have been written (`Via::Slots`).
    PutEnd {
        call: CallId,
        blocks: Vec<Written>,
    },
    /// These slots will not be written, and no write to them is under way.
    PutRevoke {
        blocks: Vec<SlotRef>,
    },
    /// Count the leading `keys` that are held. Blocks in DRAM stay for a short while, so that a get can follow.
    Match {
        call: CallId,
        keys: Vec<BlockKey>,
    },
    /// Hand over these blocks, waiting up to `wait_ms` for those that are missing, whether reserved or not. Blocks on NVMe may take a
    /// little longer.
    Get {
        call: CallId,
        keys: Vec<BlockKey>,
        wait_ms: u64,
        via: Via,
    },
    /// Stop waiting. No answer follows.
    CancelGet {
        call: CallId,
    },
    Release {
        lease: LeaseId,
    },
    /// Open a rail to each of these ends, at most [`RAILS_MAX`] in all.
    OpenRails {
        call: CallId,
        ends: Vec<RailEnd>,
    },
    /// The rail to this queue pair of the node has failed, and no transfer is under way over it.
    CloseRail {
        pair: u32,
    },
    /// The slot's bytes did not match their checksum: check them, and drop the block if they are wrong.
    Suspect {
        block: SlotRef,
    },
}

/// A message from node to client.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromPool {
    Welcome {
        arena: ArenaInfo,
    },
    /// The reason says what to change. The connection ends.
    Refused {
        reason: String,
    },
    /// One answer per key. Reserved slots must be written within `deadline_ms`.
    PutStarted {
        call: CallId,
        deadline_ms: u64,
        answers: Vec<Reservation>,
    },
    /// The outcome for blocks whose bytes were delivered. Over all answers, the counts add up to the number of those blocks.
    PutEnded {
        call: CallId,
        published: u32,
        refused: u32,
    },
    Matched {
        call: CallId,
        blocks: u32,
    },
    /// Some of the blocks of a get, under one lease (`Via::Slots`).
    Found {
        call: CallId,
        lease: LeaseId,
        blocks: Vec<Found>,
    },
    /// One answer per end; `None` where no rail can be opened.
    RailsOpened {
        call: CallId,
        rails: Vec<Option<RailOpened>>,
    },
    /// All rails of this client were closed: it was late to fill a slot, which had to be protected from it.
    RailsClosed,
    /// These blocks of a get are absent, and did not arrive before its deadline.
    Missed {
        call: CallId,
        indexes: Vec<u32>,
    },
}

/// One end of an RDMA connection: the address of its device's port and queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RailEnd {
    pub gid: [u8; 16],
    /// The local identifier (LID) of the port; 0 on Ethernet.
    pub lid: u16,
    /// The MTU in the encoding of verbs: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Number of the queue pair.
    pub pair: u32,
    /// Number of the first packet from this end.
    pub psn: u32,
    /// RDMA READs that this end answers concurrently, and those that it may have outstanding.
    pub reads_in: u8,
    pub reads_out: u8,
}

/// The node's end of a rail, with the keys that give access to its arena (laid out as in shared memory).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RailOpened {
    pub end: RailEnd,
    pub arena_at: u64,
    /// The remote key for reading anywhere in the arena.
    pub read_key: u32,
    /// The remote key for writing slots.
    pub write_key: u32,
}

/// The way in which a process on the same host maps the node's arena: through `/proc/<pid>/fd/<fd>`, with `nonce` in the first page as
/// proof. All layouts share the arena: slots of one layout follow each other from its beginning, and a slot is the layout's own only from
/// its reservation to the end of its last lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ArenaInfo {
    pub pid: u32,
    pub fd: i32,
    pub nonce: [u8; 16],
    /// The size of the arena without its header.
    pub capacity_bytes: u64,
    /// The size of this client's blocks.
    pub block_bytes: u64,
}

/// The alignment of slots: a cache line, which also suits the widest vector stores.
pub const SLOT_ALIGN: u64 = 64;

/// The smallest distance from one slot to the next. Each so many bytes of the arena have one place for a generation, so that no two slots
/// of a layout share one.
pub const SLOT_BYTES_MIN: u64 = 1024;

/// The distance from one slot of a layout to the next; `None` if it overflows.
pub fn slot_stride(block_bytes: u64) -> Option<u64> {
    Some(block_bytes.checked_next_multiple_of(SLOT_ALIGN)?.max(SLOT_BYTES_MIN))
}

impl ArenaInfo {
    /// The number of the layout's slots, if all of the arena is its own.
    pub fn slots(&self) -> u32 {
        slot_stride(self.block_bytes).map_or(0, |stride| (self.capacity_bytes / stride).min(u64::from(u32::MAX - 1)) as u32)
    }
}

/// The blocks that may be evicted from memory to make room for a put.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Room {
    /// Any block, in the order of the eviction policy, whether it is also on disk or not.
    Made,
    /// Only blocks that are also on disk. For puts that no request waits for and that are worth no more than the blocks in memory.
    Spare,
}

/// The outcome for one key of a `PutStart`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Reservation {
    Write(SlotRef),
    Held,
    InFlight,
    /// No slot is free, and [`Room`] allows none to be freed now.
    Full,
}

/// A written slot, and XXH3-64 of the bytes as the writer had them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Written {
    pub at: SlotRef,
    pub checksum: u64,
}

/// A published block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Found {
    /// The block's position among the get's keys.
    pub index: u32,
    pub at: SlotRef,
    pub checksum: u64,
    /// The request the block was computed for.
    pub origin: RequestId,
    /// The tier that held the block when the get arrived. Its bytes are in the slot in either case.
    pub tier: Tier,
}

/// A header before a block's bytes on a stream from client to node. All blocks of a stream belong to one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PutData {
    pub call: CallId,
    pub block: Written,
}

/// A header before a block's bytes on a stream from node to client. After the bytes, the slot's generation follows again (little-endian
/// `u64`), as it was when the node had read them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GetData {
    pub call: CallId,
    pub block: Found,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{decode, encode};
    use proptest::prelude::*;

    const LINEAGE: Lineage = Lineage { origin: RequestId(1), tenant: Tenant(2), parent: Some(BlockKey([6; 16])), position: 3 };
    const AT: SlotRef = SlotRef { slot: 3, generation: 1 << 40 };
    const END: RailEnd = RailEnd { gid: [7; 16], lid: 3, mtu: 5, pair: 1 << 23, psn: 9, reads_in: 16, reads_out: 1 };

    #[test]
    fn messages_survive_the_wire() {
        let call = CallId(9);
        let found = Found { index: 2, at: AT, checksum: u64::MAX, origin: RequestId(5), tier: Tier::Nvme };
        for message in [
            ToPool::Hello(BlockFormat::whole(LayoutFingerprint([1; 16]), 2 << 20).of_model(Some("m".into()))),
            ToPool::PutStart { call, lineage: LINEAGE, room: Room::Spare, keys: vec![BlockKey([7; 16]); 3] },
            ToPool::PutEnd { call, blocks: vec![Written { at: AT, checksum: 8 }] },
            ToPool::Get { call, keys: vec![BlockKey([0xff; 16])], wait_ms: u64::MAX, via: Via::Streams },
            ToPool::OpenRails { call, ends: vec![END; RAILS_MAX] },
        ] {
            assert_eq!(decode::<ToPool>(&encode(&message).unwrap()[4..]), Ok(message));
        }
        for message in [
            FromPool::PutStarted { call, deadline_ms: 1, answers: vec![Reservation::Write(AT), Reservation::Full] },
            FromPool::Found { call, lease: LeaseId(4), blocks: vec![found; 2] },
            FromPool::Missed { call, indexes: vec![0, 70_000] },
            FromPool::RailsOpened { call, rails: vec![None, Some(RailOpened { end: END, arena_at: 1 << 47, read_key: 1, write_key: 2 })] },
        ] {
            assert_eq!(decode::<FromPool>(&encode(&message).unwrap()[4..]), Ok(message));
        }
    }

    #[test]
    fn the_largest_messages_fit_a_frame() {
        let found = Found {
            index: u32::MAX,
            at: SlotRef { slot: u32::MAX, generation: u64::MAX },
            checksum: u64::MAX,
            origin: RequestId(u64::MAX),
            tier: Tier::Dram,
        };
        let call = CallId(u64::MAX);
        assert!(encode(&FromPool::Found { call, lease: LeaseId(u64::MAX), blocks: vec![found; KEYS_MAX] }).is_ok());
        assert!(encode(&ToPool::PutStart { call, lineage: LINEAGE, room: Room::Made, keys: vec![BlockKey([0xff; 16]); KEYS_MAX] }).is_ok());
    }

    proptest! {
        #[test]
        fn garbage_is_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (decode::<ToPool>(&bytes), decode::<FromPool>(&bytes), decode::<PutData>(&bytes), decode::<GetData>(&bytes));
        }
    }
}
