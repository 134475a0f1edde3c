//! One rail's client end: a queue pair, and the work posted to it.
//!
//! WRITEs are posted in batches with one completion for all; a batch is posted when it is large or long enough, or flushed. A READ of a
//! block and one of its slot's generation are posted together and have one completion. A reliable connection answers READs in order. Should
//! a device nevertheless fetch the second one's bytes first, the checksum reveals a slot that is reused in between. (A fence between the
//! two would cost a round trip, and the kernel's software device at times never wakes from one.) The work in progress is bounded by the
//! places of the staging memory, which every request needs.

use super::{
    client::Nic,
    completions::{Done, Outcome},
    staging::{BUFFERS_MAX, PADS, Place},
    verbs::{Local, Operation, QueuePair, VerbsError, Work},
};
use crate::{client::TransferCounters, transport::Broken};
use parking_lot::Mutex;
use std::{
    sync::{Arc, mpsc::sync_channel},
    time::Duration,
};
use tidemill_proto::pool::{RailEnd, RailOpened, ToPool};
use tokio::sync::{mpsc, oneshot};

#[derive(Debug)]
pub(super) struct Rail {
    nic: Arc<Nic>,
    /// The queue pair and its work; `None` once the rail is closed.
    open: Mutex<Option<Open>>,
    /// The number of the node's queue pair.
    pair: u32,
    control: mpsc::WeakSender<ToPool>,
    counters: Arc<TransferCounters>,
}

#[derive(Debug)]
struct Open {
    pair: QueuePair,
    opened: RailOpened,
    batch: Batch,
}

/// WRITEs that are not posted yet.
#[derive(Debug, Default)]
struct Batch {
    work: Vec<Work>,
    waiting: Vec<(oneshot::Sender<Outcome>, Arc<Place>)>,
    bytes: usize,
}

/// A rail of which only this end exists.
#[derive(Debug)]
pub(super) struct HalfOpen {
    nic: Arc<Nic>,
    pair: QueuePair,
    port: super::verbs::Port,
    psn: u32,
}

/// A range of the node's arena, as an offset and a length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// The capacity of a queue pair: every buffer, or two requests for each block being read.
pub(super) const REQUESTS: u32 = (BUFFERS_MAX + 2 * PADS) as u32;
/// The number of blocks with which a batch is posted.
const BATCH: usize = 16;
/// The number of bytes with which a batch is posted: larger ones gain nothing.
const BATCH_BYTES: usize = 256 << 10;
/// The longest time for a READ, longer than any retries take: a device that has not answered by then never will.
const READ_MAX: Duration = Duration::from_secs(15);

impl HalfOpen {
    pub(super) fn new(nic: &Arc<Nic>) -> Result<Self, VerbsError> {
        let port = nic.device.port()?;
        let pair = QueuePair::new(Arc::clone(&nic.device.domain), Arc::clone(&nic.device.queue), REQUESTS)?;
        Ok(Self { nic: Arc::clone(nic), pair, port, psn: rand::random() })
    }

    pub(super) fn end(&self) -> RailEnd {
        self.nic.device.end(&self.port, self.pair.number(), self.psn)
    }

    /// Connects this end with the node's end.
    pub(super) fn open(
        self,
        opened: RailOpened,
        control: mpsc::WeakSender<ToPool>,
        counters: &Arc<TransferCounters>,
    ) -> Result<Arc<Rail>, VerbsError> {
        self.pair.connect(&self.port, &self.nic.device.limits, self.psn, &opened.end, None)?;
        let open = Open { pair: self.pair, opened, batch: Batch::default() };
        counters.rail_opened();
        let counters = Arc::clone(counters);
        Ok(Arc::new(Rail { nic: self.nic, open: Mutex::new(Some(open)), pair: opened.end.pair, control, counters }))
    }
}

impl Rail {
    pub(super) fn nic(&self) -> &Nic {
        &self.nic
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.lock().is_some()
    }

    /// Closes the rail; its work in progress fails. When this returns, the device accesses no more memory for it.
    pub(super) fn close(&self, reason: &str) {
        let waiting = {
            let mut open = self.open.lock();
            let Some(Open { pair, batch, .. }) = open.take() else { return };
            drop(pair);
            batch.waiting
        };
        tracing::info!(device = self.nic.device.name(), pair = self.pair, reason, "rail closed");
        // Sent before the failure is reported, so that the node has closed its end when the same slots are written another way. If the
        // queue is full, the node's end lasts until a fence or the connection's end: it could still receive only the same bytes.
        if let Some(control) = self.control.upgrade() {
            let _ = control.try_send(ToPool::CloseRail { pair: self.pair });
        }
        self.counters.rail_lost();
        waiting.into_iter().for_each(|(task, _)| _ = task.send(Err(Broken)));
        self.nic.pending.fail(self);
    }

    /// Starts to write a buffer into a slot. The receiver resolves when the bytes are there.
    pub(super) fn write(self: &Arc<Self>, buffer: &Arc<Place>, to: Remote) -> Result<oneshot::Receiver<Outcome>, Broken> {
        let (done, answer) = oneshot::channel();
        let mut open = self.open.lock();
        let Some(Open { opened, batch, .. }) = &mut *open else { return Err(Broken) };
        batch.work.push(Work {
            id: 0,
            operation: Operation::Write,
            local: buffer.local(self.nic.index, to.bytes),
            remote_addr: opened.arena_at + to.at as u64,
            remote_key: opened.write_key,
            signalled: false,
        });
        batch.bytes += to.bytes;
        batch.waiting.push((done, Arc::clone(buffer)));
        let full = batch.work.len() >= BATCH || batch.bytes >= BATCH_BYTES;
        let posted = if full { self.post_batch(open.as_mut().expect("just seen")) } else { Ok(()) };
        drop(open);
        posted.map_err(|error| self.close(&error.to_string())).map(|()| answer).map_err(|()| Broken)
    }

    /// Posts the WRITEs that `write` has collected.
    pub(super) fn flush(self: &Arc<Self>) {
        let posted = self.open.lock().as_mut().map_or(Ok(()), |open| self.post_batch(open));
        if let Err(error) = posted {
            self.close(&error.to_string());
        }
    }

    fn post_batch(self: &Arc<Self>, open: &mut Open) -> Result<(), VerbsError> {
        let Batch { mut work, waiting, .. } = std::mem::take(&mut open.batch);
        let Some(last) = work.last_mut() else { return Ok(()) };
        last.signalled = true;
        let id = self.nic.pending.add(self, Done::Tasks(waiting));
        work.iter_mut().for_each(|work| work.id = id);
        // SAFETY: the entry that was just added holds the buffers, which no code changes, until a completion or close().
        unsafe { open.pair.post(&work) }
    }

    /// Reads bytes of the arena to registered memory, then, if requested, others to a pad. Blocks the thread until they are there.
    ///
    /// # Safety
    ///
    /// The local memory is valid, and owned by the caller, until this returns.
    pub(super) unsafe fn read(self: &Arc<Self>, (to, from): (Local, Remote), then: Option<(&Place, Remote)>) -> Outcome {
        let (done, answer) = sync_channel(1);
        let posted = {
            let open = self.open.lock();
            let Some(Open { pair, opened, .. }) = &*open else { return Err(Broken) };
            let id = self.nic.pending.add(self, Done::Thread(done));
            let work = |local, from: Remote, signalled| Work {
                id,
                operation: Operation::Read,
                local,
                remote_addr: opened.arena_at + from.at as u64,
                remote_key: opened.read_key,
                signalled,
            };
            let mut reads = vec![work(to, from, then.is_none())];
            reads.extend(then.map(|(pad, from)| work(pad.local(self.nic.index, from.bytes), from, true)));
            // SAFETY: this returns only after a completion, or after close().
            unsafe { pair.post(&reads) }
        };
        if let Err(error) = posted {
            self.close(&error.to_string());
        }
        answer.recv_timeout(READ_MAX).unwrap_or_else(|_| {
            self.close("the device does not answer");
            Err(Broken)
        })
    }
}
