//! What the node's disk could have been instead: RocksDB with the blocks in its blob files (BlobDB), used the way the NVMe tier
//! would use it. Not in the pool: `docs/benchmarks.md` has both side by side.
//!
//! The log is off, since blocks in it would be written twice, and compression is, since KV does not compress. As many blocks
//! stay as a disk of that size holds: for each new one the oldest is deleted, and garbage collection gives back its space.

use super::{
    clocks::Clocks,
    nvme::{Plan, raw::THREADS},
    report::{Rate, Row},
};
use anyhow::{Context, ensure};
use rocksdb::{DB, DBCompressionType, Options, WriteOptions};
use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};

/// Blocks of half the disk, put over it when it is full; and got.
pub fn measure(dir: &Path, plan: Plan, repetitions: u32) -> anyhow::Result<[Row; 2]> {
    let db = DB::open(&options(), dir)?;
    let held = (plan.disk_bytes / 2 / plan.block_bytes) as u64;
    let mut next = 0;
    let mut puts = Vec::new();
    for _ in 0..=repetitions {
        puts.push(put(&db, plan.block_bytes, next..next + held, held)?);
        next += held;
    }
    let gets: Vec<_> = (0..repetitions).map(|_| get(&db, plan.block_bytes, next - held..next)).collect::<Result<_, _>>()?;
    drop(db);
    std::fs::remove_dir_all(dir)?;
    let row =
        |op, rates: &[Rate]| Row { op, bytes: plan.block_bytes, threads: Some(THREADS), tier: Some("nvme"), ..Row::new(Rate::best(rates)) };
    Ok([row("blobdb put", &puts[1..]), row("blobdb get", &gets)])
}

fn options() -> Options {
    let mut options = Options::default();
    options.create_if_missing(true);
    options.set_enable_blob_files(true);
    options.set_min_blob_size(0);
    options.set_blob_file_size(256 << 20);
    options.set_blob_compression_type(DBCompressionType::None);
    options.set_enable_blob_gc(true);
    options.set_use_direct_reads(true);
    options.set_use_direct_io_for_flush_and_compaction(true);
    options.set_write_buffer_size(128 << 20);
    options.set_max_write_buffer_number(4);
    options.set_max_background_jobs(4);
    options
}

/// Puts blocks, from several threads, deletes those that came `held` earlier, and has all of it on disk at the end.
fn put(db: &DB, block_bytes: usize, blocks: std::ops::Range<u64>, held: u64) -> anyhow::Result<Rate> {
    let mut without_log = WriteOptions::default();
    without_log.disable_wal(true);
    let bytes = block_bytes * (blocks.end - blocks.start) as usize;
    timed(bytes, || {
        each(blocks.clone(), |block| {
            let mut value = vec![block as u8; block_bytes];
            value[..8].copy_from_slice(&block.to_le_bytes());
            db.put_opt(block.to_be_bytes(), value, &without_log)?;
            if let Some(oldest) = block.checked_sub(held) {
                db.delete_opt(oldest.to_be_bytes(), &without_log)?;
            }
            Ok(())
        })?;
        Ok(db.flush()?)
    })
}

fn get(db: &DB, block_bytes: usize, blocks: std::ops::Range<u64>) -> anyhow::Result<Rate> {
    let bytes = block_bytes * (blocks.end - blocks.start) as usize;
    timed(bytes, || {
        each(blocks.clone(), |block| {
            let value = db.get_pinned(block.to_be_bytes())?.context("a block is gone")?;
            ensure!(value.len() == block_bytes && value[..8] == block.to_le_bytes(), "another block came back");
            Ok(())
        })
    })
}

fn timed(bytes: usize, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Rate> {
    let clocks = Clocks::new(&[])?;
    let started = clocks.now()?;
    work()?;
    Ok(Rate::new(clocks.now()? - started, bytes))
}

/// Does it to each, in about their order, on [`THREADS`] threads.
fn each(range: std::ops::Range<u64>, what: impl Fn(u64) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
    let next = AtomicU64::new(range.start);
    thread::scope(|scope| {
        let work = || loop {
            let n = next.fetch_add(1, Relaxed);
            if n >= range.end {
                return Ok(());
            }
            what(n)?;
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("reading and writing do not panic"))
    })
}
