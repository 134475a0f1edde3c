//! The threads that read and write the disk, so that nothing else waits for it.
//!
//! ```text
//!   directory ── Store, Load, Erase ──► queues ──► threads: copy, check, read or write ──► directory: stored, loaded
//! ```
//!
//! Loads go first, because readers wait for them. A thread takes its share of the waiting jobs, reads or writes neighbouring slots
//! together, and answers for its whole share at once, so that many small blocks cost about as much as a large one. The directory bounds the
//! queues: each load has a DRAM slot, and stores are limited.

use super::slab::{self, Geometry, Slab, SlabError};
use crate::{
    arena::Arena,
    client::counters::Lane,
    core::{
        directory::{Directory, DiskBlock, DiskFault, Loaded},
        validate::checksum,
    },
    node::store::Store,
};
use memmap2::MmapMut;
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    io,
    iter::from_fn,
    mem::discriminant,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use tidemill_proto::{message, pool::SlotRef};

/// One of the directory's actions for the disk.
#[derive(Clone, Copy, Debug)]
pub(in crate::node) enum DiskJob {
    Store { disk: u32, from: SlotRef, block: DiskBlock },
    Load { disk: u32, to: SlotRef, checksum: u64, until: Duration },
    Erase { disk: u32 },
}

/// The jobs that wait for the disk's threads, and the disk's counters.
#[derive(Debug)]
pub(in crate::node) struct NvmeThreads {
    disk: Arc<Slab>,
    geometry: Geometry,
    queues: Mutex<Queues>,
    waiting: Condvar,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Queues {
    loads: VecDeque<DiskJob>,
    others: VecDeque<DiskJob>,
    closed: bool,
}

/// The disk's counters since the process started.
#[derive(Debug, Default)]
struct Counters {
    stored: Lane,
    loaded: Lane,
    corrupt: AtomicU64,
    errors: AtomicU64,
    given_up: AtomicU64,
}

/// The number of concurrent reads and writes: enough to keep an NVMe disk busy.
const THREADS: usize = 8;
/// The most bytes that a thread takes at once, unless one block is larger.
const BATCH_BYTES: usize = 512 << 10;

impl NvmeThreads {
    pub(in crate::node) fn new(disk: Arc<Slab>, geometry: Geometry) -> Self {
        Self { disk, geometry, queues: Mutex::default(), waiting: Condvar::new(), counters: Counters::default() }
    }

    pub(in crate::node) fn slots(&self) -> u32 {
        self.geometry.slots
    }

    /// Informs the directory of the blocks that an earlier run left on the disk.
    pub(in crate::node) fn recover(&self, directory: &mut Directory) {
        let useless = directory.recover(self.disk.records());
        self.push(useless.into_iter().map(|disk| DiskJob::Erase { disk }));
        let blocks = directory.disk_usage().map_or(0, |usage| usage.cached);
        tracing::info!(blocks, slots = self.slots(), "disk ready");
    }

    /// Queues jobs without waiting. After the disk is closed, jobs are dropped.
    pub(in crate::node) fn push(&self, jobs: impl IntoIterator<Item = DiskJob>) {
        let queues = &mut *self.queues.lock();
        if queues.closed {
            return;
        }
        for job in jobs {
            match job {
                DiskJob::Load { .. } => queues.loads.push_back(job),
                DiskJob::Store { .. } | DiskJob::Erase { .. } => queues.others.push_back(job),
            }
        }
        self.waiting.notify_all();
    }

    /// Reads a slot's block on the caller's thread, apart from the queues. `None` if its bytes do not have this checksum.
    pub(in crate::node) fn copy(&self, disk: u32, block_bytes: usize, expected: u64) -> Option<Vec<u8>> {
        let mut buffer = slab::buffer(self.geometry.stride).ok()?;
        self.disk.read(self.geometry.offset(disk), &mut buffer).ok()?;
        let bytes = &buffer[..block_bytes];
        (checksum(bytes) == expected).then(|| bytes.to_vec())
    }

    /// Stops using the disk: the directory expects no more answers.
    pub(in crate::node) fn give_up(&self) {
        self.close();
        self.counters.given_up.store(1, Relaxed);
        tracing::error!("the disk failed: this node goes on without NVMe until it is restarted");
    }

    /// Ends the threads after their current jobs.
    pub(in crate::node) fn close(&self) {
        *self.queues.lock() = Queues { closed: true, ..Queues::default() };
        self.waiting.notify_all();
    }

    pub(in crate::node) fn counters(&self) -> message::Disk {
        let Counters { stored, loaded, corrupt, errors, given_up } = &self.counters;
        let [corrupt, errors, given_up] = [corrupt, errors, given_up].map(|counter| counter.load(Relaxed));
        message::Disk { stored: stored.snapshot(), loaded: loaded.snapshot(), corrupt, errors, given_up }
    }

    /// Starts the threads that serve `store`, until it is closed.
    pub(in crate::node) fn start(store: &Arc<Store>, io: &Arc<Self>) -> io::Result<()> {
        for n in 0..THREADS {
            let buffer = slab::buffer(io.batch_max() * io.geometry.stride)?;
            let worker = Worker { store: Arc::clone(store), io: Arc::clone(io), buffer };
            thread::Builder::new().name(format!("disk-{n}")).spawn(move || worker.run())?;
        }
        Ok(())
    }

    /// The most jobs in a batch.
    fn batch_max(&self) -> usize {
        (BATCH_BYTES / self.geometry.stride).max(1)
    }

    /// A share of the waiting jobs, all of one kind and in the order of their slots. Waits for a job; `None` when the disk is closed.
    fn take(&self) -> Option<Vec<DiskJob>> {
        let mut queues = self.queues.lock();
        loop {
            let Queues { loads, others, closed } = &mut *queues;
            if *closed {
                return None;
            }
            let queue = if loads.is_empty() { others } else { loads };
            if let Some(first) = queue.pop_front() {
                let share = (queue.len() / THREADS).min(self.batch_max() - 1);
                let mut batch = vec![first];
                batch.extend(from_fn(|| queue.pop_front_if(|job| discriminant(job) == discriminant(&first))).take(share));
                batch.sort_unstable_by_key(DiskJob::disk);
                return Some(batch);
            }
            self.waiting.wait(&mut queues);
        }
    }

    /// Calls `io` for each run of neighbouring slots of a batch, with its offset and its part of the buffer. Stops at the first error,
    /// since that ends the disk.
    fn each_run(
        &self,
        batch: &[DiskJob],
        mut buffer: &mut [u8],
        io: impl Fn(&Slab, u64, &mut [u8]) -> Result<(), SlabError>,
    ) -> Result<(), SlabError> {
        for run in batch.chunk_by(|job, next| next.disk() == job.disk() + 1) {
            let (bytes, rest) = buffer.split_at_mut(run.len() * self.geometry.stride);
            io(&self.disk, self.geometry.offset(run[0].disk()), bytes)?;
            buffer = rest;
        }
        Ok(())
    }
}

impl DiskJob {
    fn disk(&self) -> u32 {
        match *self {
            DiskJob::Store { disk, .. } | DiskJob::Load { disk, .. } | DiskJob::Erase { disk } => disk,
        }
    }
}

struct Worker {
    store: Arc<Store>,
    io: Arc<NvmeThreads>,
    buffer: MmapMut,
}

impl Worker {
    fn run(mut self) {
        while let Some(batch) = self.io.take() {
            match batch[0] {
                DiskJob::Store { .. } => self.save(&batch),
                DiskJob::Load { .. } => self.load(&batch),
                DiskJob::Erase { .. } => {
                    for job in &batch {
                        if let Err(error) = self.io.disk.erase(job.disk()) {
                            // After a restart, the block will be found to be corrupt again.
                            tracing::warn!(%error, "a broken block's record stays on disk");
                        }
                    }
                }
            }
        }
    }

    fn save(&mut self, batch: &[DiskJob]) {
        let (arena, Geometry { stride, .. }) = (self.store.arena(), self.io.geometry);
        let started = Instant::now();
        let mut outcomes: Vec<_> =
            batch.iter().zip(self.buffer.chunks_exact_mut(stride)).map(|(job, bytes)| copy(arena, job, bytes)).collect();
        // Slots of a run whose copy failed are written too: they are not recorded, so their blocks are never found.
        let written = self.io.each_run(batch, &mut self.buffer, |disk, offset, bytes| disk.write(offset, bytes));
        let recorded = written.and_then(|()| {
            let good = batch.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok());
            self.io
                .disk
                .record(good.filter_map(|(job, _)| if let DiskJob::Store { disk, block, .. } = *job { Some((disk, block)) } else { None }))
        });
        if let Err(error) = recorded {
            self.failed(&error);
            outcomes.fill(Err(DiskFault::Io));
        }
        let good = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        self.io.counters.stored.moved(good * arena.block_bytes(), started.elapsed());
        self.store.apply(|directory, now| {
            batch.iter().zip(outcomes).for_each(|(job, outcome)| directory.stored(job.disk(), outcome, now));
        });
    }

    fn load(&mut self, batch: &[DiskJob]) {
        let (arena, Geometry { stride, .. }) = (self.store.arena(), self.io.geometry);
        let started = Instant::now();
        let read = self.io.each_run(batch, &mut self.buffer, |disk, offset, bytes| disk.read(offset, bytes));
        if let Err(error) = &read {
            self.failed(error);
        }
        let now = self.store.now();
        let blocks = batch.iter().zip(self.buffer.chunks_exact(stride));
        let loads: Vec<Loaded> = blocks
            .filter_map(|(job, bytes)| {
                let DiskJob::Load { disk, to, .. } = *job else { return None };
                let outcome = if read.is_ok() { fill(arena, job, &bytes[..arena.block_bytes()], now) } else { Err(DiskFault::Io) };
                Some(Loaded { disk, to, outcome })
            })
            .collect();
        let ended_as = |outcome| loads.iter().filter(|loaded| loaded.outcome == outcome).count();
        let (good, corrupt) = (ended_as(Ok(())), ended_as(Err(DiskFault::Corrupt)));
        if corrupt > 0 {
            tracing::error!(corrupt, "blocks on disk are not what was written: forgotten");
            self.io.counters.corrupt.fetch_add(corrupt as u64, Relaxed);
        }
        self.io.counters.loaded.moved(good * arena.block_bytes(), started.elapsed());
        self.store.apply(|directory, now| directory.loaded(&loads, now));
    }

    fn failed(&self, error: &SlabError) {
        tracing::error!(%error, "disk");
        self.io.counters.errors.fetch_add(1, Relaxed);
    }
}

/// Copies a block to be stored on disk, and checks it.
fn copy(arena: &Arena, job: &DiskJob, bytes: &mut [u8]) -> Result<(), DiskFault> {
    let DiskJob::Store { from, block, .. } = job else { return Err(DiskFault::Late) };
    let copied = arena.read_into(from.slot, &mut bytes[..arena.block_bytes()]);
    if copied.generation_after != from.generation {
        return Err(DiskFault::Late);
    }
    if copied.checksum == block.checksum { Ok(()) } else { Err(DiskFault::Corrupt) }
}

/// Fills a slot with a block from disk and checks it. Until the slot is published, only this thread may write it.
fn fill(arena: &Arena, job: &DiskJob, bytes: &[u8], now: Duration) -> Result<(), DiskFault> {
    let &DiskJob::Load { to, checksum: expected, until, .. } = job else { return Err(DiskFault::Late) };
    if now >= until {
        return Err(DiskFault::Late);
    }
    if arena.write_block(to.slot, bytes) == expected { Ok(()) } else { Err(DiskFault::Corrupt) }
}
