//! QUIC: both ends of the one-way streams that carry block bytes.
//!
//! ```text
//!   client ──►  (PutData frame, block bytes)…                     the node writes into the slot as bytes arrive
//!   node   ──►  (GetData frame, block bytes, generation u64)…     from private copies of the slot's parts
//! ```
//!
//! A batch is spread over up to [`STREAMS_PER_BATCH`] streams. A stream that ends inside a block was abandoned by its sender, which is no
//! error; a frame that does not decode means a broken peer.

use crate::{
    arena::{Arena, ArenaError, hashed_copy::copy_slice_hashed},
    core::validate::{Copied, checksum},
    transport::{Access, Offer, STALL_MAX, shares},
};
use bytes::Bytes;
use quinn::{RecvStream, SendStream};
use std::{hash::Hasher, time::Instant};
use tidemill_net::link::{Connection, LinkError};
use tidemill_proto::{
    frame::{self, FrameError, HEADER_BYTES, Preamble},
    pool::{CallId, Found, GetData, PutData, SlotRef, Written},
};
use tokio::{
    task::JoinSet,
    time::{timeout, timeout_at},
};
use twox_hash::XxHash3_64;

/// The number of streams of a batch: enough that flow control of one stream does not delay the whole batch.
pub(crate) const STREAMS_PER_BATCH: usize = 4;

/// The reason why a stream of blocks ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// The other end finished, reset or stopped it, or the connection is gone.
    #[error("the peer ended the stream of blocks early")]
    GivenUp,
    #[error("no byte moved within the deadline")]
    Stalled,
    #[error(transparent)]
    Malformed(#[from] FrameError),
}

/// Client: makes blocks move over the connection that carries the calls.
pub(super) fn open(_: &Offer<'_>) -> Result<Access, ArenaError> {
    Ok(Access::Streams)
}

/// Client: a block's bytes as they arrived, not validated.
#[derive(Debug)]
pub(crate) struct Received {
    /// The parts of the block, in order.
    chunks: Vec<Bytes>,
    generation_after: u64,
}

impl Received {
    /// Copies the block to `to`, which must have exactly its length.
    pub(crate) fn copy_to(&self, to: &mut [u8]) -> Copied {
        let mut hasher = XxHash3_64::new();
        let mut rest = to;
        for chunk in &self.chunks {
            let (part, after) = rest.split_at_mut(chunk.len());
            copy_slice_hashed(chunk, part, &mut hasher);
            rest = after;
        }
        assert!(rest.is_empty(), "a whole block was received");
        Copied { checksum: hasher.finish(), generation_after: self.generation_after }
    }
}

/// Client: sends the blocks of a put. Returns when everything is handed to QUIC; the node answers each stream once it has all of it. If
/// this is cancelled or not done by `until`, the node sees streams that end inside a block, and ends the reservations of these slots.
pub(crate) async fn send_put(
    connection: &Connection,
    call: CallId,
    blocks: Vec<(SlotRef, Bytes)>,
    until: Instant,
) -> Result<(), LinkError> {
    let mut streams = JoinSet::new();
    for share in shares(blocks, STREAMS_PER_BATCH) {
        let connection = connection.clone();
        streams.spawn(timeout_at(until.into(), async move {
            let broken = |error: quinn::WriteError| LinkError::Broken { peer: connection.peer(), reason: error.to_string() };
            let mut stream = connection.open_uni(Preamble::PoolData).await?;
            for (at, bytes) in share {
                let header = PutData { call, block: Written { at, checksum: checksum(&bytes) } };
                let header = frame::encode(&header).expect("a header fits a frame");
                stream.write_all(&header).await.map_err(broken)?;
                stream.write_chunk(bytes).await.map_err(broken)?;
            }
            // This fails only on a stream that the peer stopped, which its answer reports.
            let _ = stream.finish();
            Ok::<(), LinkError>(())
        }));
    }
    let late = || LinkError::Broken { peer: connection.peer(), reason: "blocks did not go out before their deadline".into() };
    while let Some(sent) = streams.join_next().await {
        sent.expect("sending does not panic and is not aborted").map_err(|_| late())??;
    }
    Ok(())
}

/// Both: checks that a stream that the peer opened carries blocks.
pub(crate) async fn check_preamble(connection: &Connection, stream: &mut RecvStream) -> Result<(), StreamError> {
    let checked = timeout(STALL_MAX, connection.check_preamble(stream, Preamble::PoolData)).await;
    checked.map_err(|_| StreamError::Stalled)?.map_err(|error| match error {
        LinkError::Frame { source, .. } => StreamError::Malformed(source),
        _ => StreamError::GivenUp,
    })
}

/// Node: the next block's header, or `None` at the end of the stream.
pub(crate) async fn receive_put_header(stream: &mut RecvStream) -> Result<Option<PutData>, StreamError> {
    timeout(STALL_MAX, read_frame(stream)).await.map_err(|_| StreamError::Stalled)?
}

/// Node: writes a block's bytes into its slot as they arrive; returns their checksum. Stops at `until`, since the slot may be reused after
/// that.
pub(crate) async fn receive_into(stream: &mut RecvStream, arena: &Arena, slot: u32, until: Instant) -> Result<u64, StreamError> {
    let mut hasher = XxHash3_64::new();
    let mut offset = 0;
    while offset < arena.block_bytes() {
        let chunk = timeout_at(until.into(), stream.read_chunk(arena.block_bytes() - offset, true)).await;
        let chunk = chunk.map_err(|_| StreamError::Stalled)?.ok().flatten().ok_or(StreamError::GivenUp)?;
        arena.write(slot, offset, &chunk.bytes, &mut hasher);
        offset += chunk.bytes.len();
    }
    Ok(hasher.finish())
}

/// Node: discards the bytes of a block that is not wanted.
pub(crate) async fn skip_block(stream: &mut RecvStream, block_bytes: usize) -> Result<(), StreamError> {
    read_block(stream, block_bytes, |_| {}).await
}

/// Node: sends one block of a get.
pub(crate) async fn send_block(stream: &mut SendStream, call: CallId, block: Found, arena: &Arena) -> Result<(), StreamError> {
    let header = frame::encode(&GetData { call, block }).expect("a header fits a frame");
    let slot = block.at.slot;
    let sent = async {
        stream.write_all(&header).await?;
        // Blocks are sent in parts: bytes are encrypted right after they are copied, and copies keep the stream's pace.
        for offset in (0..arena.block_bytes()).step_by(PART_BYTES) {
            let part = arena.read(slot, offset, PART_BYTES.min(arena.block_bytes() - offset));
            stream.write_chunk(Bytes::from(part)).await?;
        }
        stream.write_all(&arena.generation_after(slot).to_le_bytes()).await
    };
    timeout(STALL_MAX, sent).await.map_err(|_| StreamError::Stalled)?.map_err(|_| StreamError::GivenUp)
}

/// Client: the next block of a stream, or `None` at the end of the stream.
pub(crate) async fn receive_get(stream: &mut RecvStream, block_bytes: usize) -> Result<Option<(GetData, Received)>, StreamError> {
    let header = timeout(STALL_MAX, read_frame::<GetData>(stream)).await.map_err(|_| StreamError::Stalled)??;
    let Some(header) = header else { return Ok(None) };
    let mut chunks = Vec::new();
    read_block(stream, block_bytes, |chunk| chunks.push(chunk)).await?;
    let mut generation_after = [0; size_of::<u64>()];
    let read = timeout(STALL_MAX, stream.read_exact(&mut generation_after)).await;
    read.map_err(|_| StreamError::Stalled)?.map_err(|_| StreamError::GivenUp)?;
    Ok(Some((header, Received { chunks, generation_after: u64::from_le_bytes(generation_after) })))
}

async fn read_block(stream: &mut RecvStream, block_bytes: usize, mut take: impl FnMut(Bytes)) -> Result<(), StreamError> {
    let mut left = block_bytes;
    while left > 0 {
        let chunk = timeout(STALL_MAX, stream.read_chunk(left, true)).await;
        let chunk = chunk.map_err(|_| StreamError::Stalled)?.ok().flatten().ok_or(StreamError::GivenUp)?;
        left -= chunk.bytes.len();
        take(chunk.bytes);
    }
    Ok(())
}

async fn read_frame<M: serde::de::DeserializeOwned>(stream: &mut RecvStream) -> Result<Option<M>, StreamError> {
    let mut header = [0; HEADER_BYTES];
    match stream.read_exact(&mut header).await {
        Ok(()) => {}
        Err(quinn::ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(_) => return Err(StreamError::GivenUp),
    }
    let bytes = frame::payload_bytes(header)?;
    if bytes > HEADER_FRAME_MAX {
        return Err(FrameError::TooLarge { bytes }.into());
    }
    let mut payload = vec![0; bytes];
    stream.read_exact(&mut payload).await.map_err(|_| StreamError::GivenUp)?;
    Ok(Some(frame::decode(&payload)?))
}

/// The number of bytes that the node copies out of a slot at a time: they stay in the cache until they are encrypted.
const PART_BYTES: usize = 256 << 10;

/// The largest header in front of a block, so that a stream of garbage costs next to nothing.
const HEADER_FRAME_MAX: usize = 256;
