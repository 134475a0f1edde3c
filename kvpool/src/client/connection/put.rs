//! One put: slots are reserved, written and committed.

use super::{Call, Inner, PoolError};
use crate::transport::{Access, quic, shares};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_proto::{
    block::BlockKey,
    pool::{Direction, FromPool, Lineage, Reservation, Room, SlotRef, ToPool, Written},
};
use tokio::task::{JoinSet, yield_now};

/// What became of the blocks of a put; adds up to all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutReport {
    pub written: usize,
    /// Held already, or being written by another.
    pub held: usize,
    /// No room, or written too late.
    pub refused: usize,
}

/// Slots reserved for blocks of one chain. Several threads may [`write`](Self::write) different blocks at once; nothing is found
/// by anyone before [`commit`](Self::commit). Dropped before that, it gives its slots back.
#[derive(Debug)]
pub struct ReservedSlots {
    inner: Arc<Inner>,
    call: Call,
    asked: Instant,
    /// After this, the slots may be another's.
    until: Instant,
    blocks: Mutex<Blocks>,
    /// Of the keys for which no slot was reserved.
    report: PutReport,
    /// To be given back when this is dropped.
    owed: Vec<SlotRef>,
}

/// Reserved blocks, by what was done with them.
#[derive(Debug, Default)]
struct Blocks {
    /// By place among the keys.
    wanted: BTreeMap<usize, SlotRef>,
    written: Vec<Written>,
    to_send: Vec<(SlotRef, Bytes)>,
}

/// A batch is written by several tasks, at most this many,
const WRITERS_MAX: usize = 4;
/// each with at least this many bytes: waking a thread costs as much as copying some 100 KiB.
const WRITER_BYTES_MIN: usize = 4 << 20;

impl ReservedSlots {
    /// Asks the node for slots.
    pub(super) async fn reserve(inner: &Arc<Inner>, room: Room, lineage: Lineage, keys: Vec<BlockKey>) -> Result<Self, PoolError> {
        let (asked, count) = (Instant::now(), keys.len());
        let mut call = inner.begin(1 + quic::STREAMS_PER_BATCH)?;
        inner.send(ToPool::PutStart { call: call.id(), lineage, room, keys }).await?;
        let FromPool::PutStarted { deadline_ms, answers, .. } = inner.answer(&mut call).await? else { return Err(inner.nonsense()) };
        let mut report = PutReport::default();
        let mut wanted = BTreeMap::new();
        for (place, answer) in answers.iter().enumerate() {
            match answer {
                Reservation::Write(at) => drop(wanted.insert(place, *at)),
                Reservation::Held | Reservation::InFlight => report.held += 1,
                Reservation::Full => report.refused += 1,
            }
        }
        let until = asked.checked_add(Duration::from_millis(deadline_ms));
        let (Some(until), true) = (until, answers.len() == count && wanted.values().all(|at| at.slot < inner.slots)) else {
            return Err(inner.nonsense());
        };
        let owed = wanted.values().copied().collect();
        let blocks = Mutex::new(Blocks { wanted, ..Blocks::default() });
        Ok(Self { inner: Arc::clone(inner), call, asked, until, blocks, report, owed })
    }

    /// The blocks to write, by their places among the keys.
    pub fn wanted(&self) -> Vec<usize> {
        self.blocks.lock().wanted.keys().copied().collect()
    }

    /// Writes a block: straight into its slot where this process reaches it, else to memory, from where it is sent. Without effect
    /// on a block that is not wanted, and after the deadline.
    pub fn write(&self, place: usize, bytes: &[u8]) -> Result<(), PoolError> {
        self.write_from(place, bytes, Bytes::copy_from_slice)
    }

    /// The same for bytes that can be sent as they are.
    fn write_owned(&self, place: usize, bytes: Bytes) -> Result<(), PoolError> {
        self.write_from(place, &bytes, |_| bytes.clone())
    }

    fn write_from(&self, place: usize, bytes: &[u8], own: impl FnOnce(&[u8]) -> Bytes) -> Result<(), PoolError> {
        self.inner.check_size(bytes)?;
        if Instant::now() >= self.until {
            return Ok(());
        }
        let Some(at) = self.blocks.lock().wanted.remove(&place) else { return Ok(()) };
        match &self.inner.path.access {
            Access::Slots(slots) => {
                let checksum = slots.write(at.slot, bytes);
                self.blocks.lock().written.push(Written { at, checksum });
            }
            Access::Streams(_) => self.blocks.lock().to_send.push((at, own(bytes))),
        }
        Ok(())
    }

    /// Writes all blocks of a batch, by several threads where that pays. Copies run on async threads, one block at a time with a
    /// yield between: 2 MiB take 0.2 ms, less than handing them to a thread that may block.
    pub(super) async fn write_all(self: &Arc<Self>, blocks: Vec<Bytes>) -> Result<(), PoolError> {
        let bytes: usize = blocks.iter().map(Bytes::len).sum();
        let writers = if matches!(self.inner.path.access, Access::Slots(_)) { (bytes / WRITER_BYTES_MIN).clamp(1, WRITERS_MAX) } else { 1 };
        let mut shares = shares(blocks.into_iter().enumerate().collect(), writers).into_iter().map(|share| {
            let reserved = Arc::clone(self);
            async move {
                for (place, bytes) in share {
                    reserved.write_owned(place, bytes)?;
                    yield_now().await;
                }
                Ok(())
            }
        });
        // The first share on this thread, which is awake.
        let first = shares.next();
        let mut others: JoinSet<_> = shares.collect();
        if let Some(first) = first {
            first.await?;
        }
        while let Some(written) = others.join_next().await {
            written.expect("writing does not panic and is not aborted")?;
        }
        Ok(())
    }

    /// Publishes what was written, and gives the other slots back.
    pub async fn commit(mut self) -> Result<PutReport, PoolError> {
        let Blocks { wanted, written, to_send } = mem::take(self.blocks.get_mut());
        let (inner, id) = (Arc::clone(&self.inner), self.call.id());
        let count = self.owed.len();
        let delivered = written.len() + to_send.len();
        if delivered > 0 {
            match &inner.path.access {
                Access::Slots(_) => inner.send(ToPool::PutEnd { call: id, blocks: written }).await?,
                Access::Streams(connection) => {
                    let sent = quic::send_put(connection, id, to_send, self.until).await;
                    sent.map_err(|error| inner.unreachable(&error.to_string()))?;
                }
            }
        }
        let mut answered = 0;
        while answered < delivered {
            let FromPool::PutEnded { published, refused, .. } = inner.answer(&mut self.call).await? else { return Err(inner.nonsense()) };
            self.report.written += published as usize;
            answered += published as usize + refused as usize;
        }
        if answered > delivered {
            return Err(inner.nonsense());
        }
        self.owed = wanted.into_values().collect();
        self.report.refused += count - self.report.written;
        if count > 0 {
            let bytes = self.report.written * inner.block_bytes;
            inner.counters.moved(inner.path.transport, Direction::Put, bytes, self.asked.elapsed());
        }
        Ok(self.report)
    }
}

impl Drop for ReservedSlots {
    fn drop(&mut self) {
        let blocks = mem::take(&mut self.owed);
        if !blocks.is_empty() {
            // If the queue is full, the node's deadline does the same, later.
            let _ = self.inner.outgoing.try_send(ToPool::PutRevoke { blocks });
        }
    }
}
