//! Fetches of blocks that readers wait for: neighbouring blocks of one pack come in one read. Every failure is a miss, at once or at the
//! deadline.

use super::{FetchJob, ObjectTier, alive, bucket::Failure};
use crate::{
    arena::Arena,
    core::{
        directory::{FetchFault, Fetched},
        objects::pack,
    },
    node::store::Store,
};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{
    sync::{Semaphore, mpsc::UnboundedReceiver},
    task::spawn_blocking,
    time::timeout,
};

/// The most reads at once.
const READS_MAX: usize = 32;
/// The most bytes of a read, unless one block is larger: several are in progress at once, and the blocks of each can be used when it ends.
const READ_BYTES: u64 = 4 << 20;

/// The margin by which a read ends before its slots are taken from it: otherwise these would be quarantined for a while.
const MARGIN: Duration = Duration::from_millis(20);

/// Serves jobs until the queue is closed.
pub(super) async fn run(tier: Weak<ObjectTier>, store: Weak<Store>, mut queue: UnboundedReceiver<Vec<FetchJob>>) {
    let permits = Arc::new(Semaphore::new(READS_MAX));
    while let Some(mut jobs) = queue.recv().await {
        let Some((tier, store)) = alive(&tier, &store) else { return };
        for run in runs(&mut jobs, tier.kind.block_bytes) {
            let (tier, store, permits) = (Arc::clone(&tier), Arc::clone(&store), Arc::clone(&permits));
            tokio::spawn(async move {
                let fetched = fetch(&tier, &store, run, &permits).await;
                store.apply(|directory, now| directory.fetched(&fetched, now));
            });
        }
    }
}

/// Splits jobs into reads.
fn runs(jobs: &mut [FetchJob], block_bytes: u64) -> Vec<Vec<FetchJob>> {
    jobs.sort_unstable_by_key(|job| (job.block.pack, job.block.number));
    let blocks_max = (READ_BYTES / block_bytes).max(1) as usize;
    let neighbours = |job: &FetchJob, next: &FetchJob| job.block.pack == next.block.pack && next.block.number == job.block.number + 1;
    jobs.chunk_by(neighbours).flat_map(|run| run.chunks(blocks_max)).map(<[FetchJob]>::to_vec).collect()
}

async fn fetch(tier: &ObjectTier, store: &Arc<Store>, run: Vec<FetchJob>, permits: &Semaphore) -> Vec<Fetched> {
    let missed = |run: &[FetchJob]| run.iter().map(|job| answer(job, Err(FetchFault::Missed))).collect();
    // Jobs that were pushed together have one deadline.
    let (first, last) = (run[0].block, run[run.len() - 1].block);
    let left = || run[0].until.saturating_sub(store.now() + MARGIN);
    let Some(name) = store.apply(|directory, _| directory.catalog()?.name(first.pack).map(str::to_owned)) else { return missed(&run) };
    let Ok(Ok(_permit)) = timeout(left(), permits.acquire()).await else { return missed(&run) };
    let block_bytes = tier.kind.block_bytes;
    let range = pack::block_range(first.number, block_bytes).start..pack::block_range(last.number, block_bytes).end;
    let read = tier.bucket.read(&name, range, left().max(Duration::from_millis(1))).await;
    match read {
        Ok(bytes) => {
            let filling = Arc::clone(store);
            let jobs = run.clone();
            let Ok(fetched) = spawn_blocking(move || fill(&filling, &jobs, &bytes)).await else { return missed(&run) };
            let corrupt = fetched.iter().filter(|fetched| fetched.outcome == Err(FetchFault::Corrupt)).count();
            if corrupt > 0 {
                tracing::error!(corrupt, pack = name, "blocks in object storage are not what was written: forgotten");
                tier.bucket.found_corrupt(corrupt);
            }
            fetched
        }
        Err(failure) => {
            if let Failure::Gone = failure {
                store.apply(|directory, _| directory.pack_gone(first.pack));
            }
            tracing::debug!(%failure, pack = name, "not fetched");
            missed(&run)
        }
    }
}

/// Checks blocks and copies them to their slots.
fn fill(store: &Store, run: &[FetchJob], bytes: &[u8]) -> Vec<Fetched> {
    let arena = store.arena();
    let blocks = run.iter().zip(bytes.chunks_exact(arena.block_bytes()));
    blocks.map(|(job, bytes)| answer(job, fill_one(store, arena, job, bytes))).collect()
}

fn fill_one(store: &Store, arena: &Arena, job: &FetchJob, bytes: &[u8]) -> Result<(), FetchFault> {
    let record = &job.block.record;
    if !pack::matches(record, bytes) {
        return Err(FetchFault::Corrupt);
    }
    // Until the slot is published, only this task may write it.
    if store.now() >= job.until || arena.write_block(job.to.slot, bytes) != record.checksum {
        return Err(FetchFault::Missed);
    }
    Ok(())
}

fn answer(job: &FetchJob, outcome: Result<(), FetchFault>) -> Fetched {
    Fetched { block: job.block, to: job.to, outcome }
}
