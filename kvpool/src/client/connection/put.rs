//! One put: slots are reserved, written and committed.

use super::{Call, Inner, PoolError};
use crate::transport::{Access, Filled, Landing, STALL_MAX, Slots, quic, shares};
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
    pool::{Direction, FromPool, Lineage, Reservation, Room, SlotRef, ToPool, Transport, Written},
};
use tokio::{
    runtime::Handle,
    task::{JoinSet, yield_now},
    time::{timeout, timeout_at},
};

/// The outcome of a put's blocks; the counts add up to all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutReport {
    pub written: usize,
    /// Blocks that were held already, or were being written by another client.
    pub held: usize,
    /// Blocks for which there was no room, or which were written too late.
    pub refused: usize,
}

/// Slots reserved for blocks of one chain. Several threads may [`write`](Self::write) different blocks at once; no block is found before
/// [`commit`](Self::commit). If this is dropped before that, it returns its slots.
#[derive(Debug)]
pub struct ReservedSlots {
    inner: Arc<Inner>,
    call: Call,
    asked: Instant,
    /// The deadline after which the slots may be reused for other blocks.
    until: Instant,
    blocks: Mutex<Blocks>,
    /// The outcome of the keys for which no slot was reserved.
    report: PutReport,
    /// The slots to return when this is dropped.
    owed: Vec<SlotRef>,
}

/// Reserved blocks, by state.
#[derive(Debug, Default)]
struct Blocks {
    /// Slots that are not written yet, by place among the keys.
    wanted: BTreeMap<usize, SlotRef>,
    written: Vec<Written>,
    /// Blocks on their way into their slots.
    landing: Vec<(Written, Landing)>,
    to_send: Vec<(SlotRef, Bytes)>,
    /// The slots' transport, if any block was written directly.
    wrote: Option<Arc<dyn Slots>>,
}

/// The most tasks that write a batch.
const WRITERS_MAX: usize = 4;
/// The fewest bytes per task: waking a thread costs as much as copying some 100 KiB.
const WRITER_BYTES_MIN: usize = 4 << 20;

impl ReservedSlots {
    /// Requests slots from the node.
    pub(super) async fn reserve(inner: &Arc<Inner>, room: Room, lineage: Lineage, keys: Vec<BlockKey>) -> Result<Self, PoolError> {
        let (asked, count) = (Instant::now(), keys.len());
        let mut call = inner.begin(2 + quic::STREAMS_PER_BATCH)?;
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

    /// Writes a block: straight into its slot if this process can access it, else to memory, from where it is sent. Has no effect on a
    /// block that is not wanted, or after the deadline.
    pub fn write(&self, place: usize, bytes: &[u8]) -> Result<(), PoolError> {
        self.write_from(place, bytes, Bytes::copy_from_slice)
    }

    /// Like [`write`](Self::write), for bytes that can be sent without a copy.
    fn write_owned(&self, place: usize, bytes: Bytes) -> Result<(), PoolError> {
        self.write_from(place, &bytes, |_| bytes.clone())
    }

    fn write_from(&self, place: usize, bytes: &[u8], own: impl FnOnce(&[u8]) -> Bytes) -> Result<(), PoolError> {
        self.inner.check_size(bytes)?;
        if Instant::now() >= self.until {
            return Ok(());
        }
        let Some(at) = self.blocks.lock().wanted.remove(&place) else { return Ok(()) };
        let way = self.inner.path.now();
        let filled = if let Access::Slots(slots) = way { slots.write(at.slot, bytes).ok().map(|filled| (slots, filled)) } else { None };
        let mut blocks = self.blocks.lock();
        let Some((slots, Filled { checksum, landing })) = filled else {
            blocks.to_send.push((at, own(bytes)));
            return Ok(());
        };
        let written = Written { at, checksum };
        match landing {
            Some(landing) => blocks.landing.push((written, landing)),
            None => blocks.written.push(written),
        }
        blocks.wrote.get_or_insert_with(|| Arc::clone(slots));
        Ok(())
    }

    /// Writes all blocks of a batch, with several threads where that pays. Copies run on async threads, one block at a time with a yield
    /// between: 2 MiB take 0.2 ms, less than handing them to a thread that may block.
    pub(super) async fn write_all(self: &Arc<Self>, blocks: Vec<Bytes>) -> Result<(), PoolError> {
        let bytes: usize = blocks.iter().map(Bytes::len).sum();
        let way = self.inner.path.now().clone();
        let writers = if matches!(way, Access::Slots(_)) { (bytes / WRITER_BYTES_MIN).clamp(1, WRITERS_MAX) } else { 1 };
        let mut shares = shares(blocks.into_iter().enumerate().collect(), writers).into_iter().map(|share| {
            let (reserved, way) = (Arc::clone(self), way.clone());
            async move {
                for (place, bytes) in share {
                    if let Access::Slots(slots) = &way {
                        // If there is no room in time, the write fails.
                        let _ = timeout(STALL_MAX, slots.room()).await;
                    }
                    reserved.write_owned(place, bytes)?;
                    yield_now().await;
                }
                Ok(())
            }
        });
        // The first share runs on this thread, which is awake.
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

    /// Publishes the written blocks, and returns the other slots.
    pub async fn commit(mut self) -> Result<PutReport, PoolError> {
        let count = self.owed.len();
        self.land().await;
        let Blocks { wanted, written, to_send, wrote, .. } = mem::take(self.blocks.get_mut());
        let (inner, id) = (Arc::clone(&self.inner), self.call.id());
        let streamed = to_send.len();
        let delivered = written.len() + streamed;
        if !written.is_empty() {
            inner.send(ToPool::PutEnd { call: id, blocks: written }).await?;
        }
        if streamed > 0 {
            let sent = quic::send_put(&inner.connection, id, to_send, self.until).await;
            sent.map_err(|error| inner.unreachable(&error.to_string()))?;
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
        // Streamed blocks may be among the refused ones; one put rarely both streams and writes directly.
        let streamed = streamed.min(self.report.written);
        let quic = (Transport::Quic, streamed);
        for (transport, blocks) in [(wrote.map_or(Transport::Quic, |slots| slots.transport()), self.report.written - streamed), quic] {
            if blocks > 0 {
                inner.counters.moved(transport, Direction::Put, blocks * inner.block_bytes, self.asked.elapsed());
            }
        }
        Ok(self.report)
    }

    /// Waits until all blocks that are on their way have arrived, until their deadline. Those that cannot arrive are sent by stream.
    async fn land(&mut self) {
        let blocks = self.blocks.get_mut();
        if let Some(slots) = &blocks.wrote {
            slots.flush();
        }
        // They are awaited one after the other, since each ends in any case, and all at about the same time.
        while let Some((written, Landing(landing))) = blocks.landing.last_mut() {
            match timeout_at(self.until.into(), landing).await {
                Ok(Ok(())) => blocks.written.push(*written),
                Ok(Err(bytes)) => blocks.to_send.push((written.at, bytes)),
                // The node fences these.
                Err(_) => self.owed.retain(|at| *at != written.at),
            }
            blocks.landing.pop();
        }
    }
}

impl Drop for ReservedSlots {
    fn drop(&mut self) {
        let mut blocks = mem::take(&mut self.owed);
        // Slots that are still being written are not returned; the node takes them at its deadline, and fences them.
        let landing = mem::take(&mut self.blocks.get_mut().landing);
        blocks.retain(|at| landing.iter().all(|(written, _)| written.at != *at));
        if let (Some((first, _)), Ok(runtime)) = (landing.first(), Handle::try_current()) {
            tracing::debug!(slot = first.at.slot, blocks = landing.len(), "a put is given up while blocks are on their way");
            runtime.spawn(revoke_landed(Arc::clone(&self.inner), landing, self.until));
        }
        if !blocks.is_empty() {
            // If the queue is full, the node's deadline has the same effect, later.
            let _ = self.inner.outgoing.try_send(ToPool::PutRevoke { blocks });
        }
    }
}

/// Returns the slots of an abandoned put, once nothing writes them any more.
async fn revoke_landed(inner: Arc<Inner>, landing: Vec<(Written, Landing)>, until: Instant) {
    let mut blocks = Vec::new();
    for (Written { at, .. }, Landing(landing)) in landing {
        if timeout_at(until.into(), landing).await.is_ok() {
            blocks.push(at);
        }
    }
    let _ = inner.outgoing.try_send(ToPool::PutRevoke { blocks });
}
