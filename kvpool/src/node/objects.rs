//! The object tier of a node: packs of blocks in a bucket, or in a shared directory, that any number of nodes write and read.
//!
//! - `bucket`: requests to the server, each within a deadline and the bounds, and their outcome
//! - `fetch`: reads of blocks that readers wait for
//! - `keep`: the content of the bucket, and writes to it
//!
//! All of it runs on dedicated threads: a server or file system that hangs delays nothing else, including the node's end.

pub(super) mod bucket;
mod fetch;
mod keep;
#[cfg(test)]
mod tests;

use super::store::Store;
use crate::{
    core::objects::{
        catalog::PackedBlock,
        pack::{Kind, Secret},
    },
    settings,
};
use bucket::Bucket;
use keep::Keeper;
use parking_lot::Mutex;
use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};
use tidemill_proto::{
    message::{self, Blocks},
    pool::SlotRef,
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc::{self, UnboundedSender},
};

/// One of the directory's actions for the bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct FetchJob {
    pub(super) block: PackedBlock,
    pub(super) to: SlotRef,
    pub(super) until: Duration,
}

pub(super) struct ObjectTier {
    bucket: Arc<Bucket>,
    settings: settings::Objects,
    kind: Kind,
    secret: Secret,
    /// The queue of fetches, which the directory bounds: each job has a DRAM slot.
    jobs: UnboundedSender<Vec<FetchJob>>,
    runtime: Mutex<Option<Runtime>>,
    keeper: tokio::sync::Mutex<Keeper>,
}

/// The number of async threads, which spend most of their time hashing blocks.
const THREADS: usize = 2;
/// The most threads that read and write a directory. If the directory hangs, only they hang.
const BLOCKING_MAX: usize = 64;

impl ObjectTier {
    /// Makes a tier for blocks of this kind. Sends no request yet.
    pub(super) fn prepare(settings: settings::Objects, kind: Kind) -> io::Result<Unstarted> {
        let bucket = Bucket::open(&settings, kind)?;
        Self::with_bucket(settings, kind, bucket)
    }

    fn with_bucket(settings: settings::Objects, kind: Kind, bucket: Bucket) -> io::Result<Unstarted> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_MAX)
            .thread_name("objects")
            .enable_all()
            .build()?;
        let (jobs, queue) = mpsc::unbounded_channel();
        let tier = Arc::new(Self {
            bucket: Arc::new(bucket),
            secret: Secret::of(settings.secret.as_deref()),
            settings,
            kind,
            jobs,
            runtime: Mutex::new(Some(runtime)),
            keeper: tokio::sync::Mutex::default(),
        });
        Ok(Unstarted { tier, queue })
    }

    /// The number of uses from which on a block is worth writing.
    pub(super) fn uses_min(&self) -> u32 {
        self.settings.uses_min
    }

    /// The time from requesting a block to giving up on it.
    pub(super) fn deadline(&self) -> Duration {
        self.settings.deadline
    }

    /// Queues jobs without waiting. After the tier is closed, jobs are dropped: their reservations expire.
    pub(super) fn push(&self, jobs: Vec<FetchJob>) {
        let _ = self.jobs.send(jobs);
    }

    /// Writes all blocks that are worth it, as far as the bounds allow.
    pub(super) async fn flush(self: Arc<Self>, store: Arc<Store>) {
        self.keeper.lock().await.write_all(&self, &store).await;
    }

    /// Ends all tasks without waiting for them.
    pub(super) fn close(&self) {
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }

    pub(super) fn counters(&self) -> message::Objects {
        self.bucket.counters()
    }

    /// The tier's blocks, as shown to users: those that are there, and an estimate of how many more fit.
    pub(super) fn blocks(&self, store: &Store) -> Blocks {
        let (cached, bytes) =
            store.apply(|directory, _| directory.catalog().map_or((0, 0), |catalog| (catalog.keys().len() as u64, catalog.bytes())));
        let bytes_per_block = self.kind.block_bytes;
        let free = self.settings.capacity_bytes.saturating_sub(bytes) / bytes_per_block;
        Blocks { total: cached + free, free, cached, used: 0, bytes_per_block }
    }
}

impl std::fmt::Debug for ObjectTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectTier").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// A tier whose store does not exist yet.
#[derive(Debug)]
pub(super) struct Unstarted {
    pub(super) tier: Arc<ObjectTier>,
    queue: mpsc::UnboundedReceiver<Vec<FetchJob>>,
}

impl Unstarted {
    /// Starts to serve `store`, until the store is dropped or the tier is closed.
    pub(super) fn start(self, store: &Arc<Store>) {
        let Self { tier, queue } = self;
        let runtime = tier.runtime.lock();
        let Some(runtime) = &*runtime else { return };
        runtime.spawn(fetch::run(Arc::downgrade(&tier), Arc::downgrade(store), queue));
        runtime.spawn(keep::run(Arc::downgrade(&tier), Arc::downgrade(store)));
    }
}

/// The tier and the store, while both are alive.
fn alive(tier: &Weak<ObjectTier>, store: &Weak<Store>) -> Option<(Arc<ObjectTier>, Arc<Store>)> {
    tier.upgrade().zip(store.upgrade())
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        self.close();
    }
}
