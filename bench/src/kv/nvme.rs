//! The NVMe tier, timed: blocks that leave memory for the disk, and blocks that come back from it, beside what the raw disk does.
//!
//! Blocks are put as fast as the raw disk writes; those that the node did not get onto its disk before it needed their slots
//! are lost, and do not count. What counts is what the node says it stored. Gets ask for blocks that are on disk only.

use super::{
    clocks::Clocks,
    node::{DiskTold, PoolNode},
    report::{Rate, Row},
    transfer::{Content, LINEAGE, fetch, transport_name},
};
use anyhow::{Context, ensure};
use nix::fcntl::OFlag;
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};
use tidemill_kvpool::{client::PoolClient, disk};
use tidemill_proto::{block::BlockKey, pool::Tier};
use tokio::time::sleep;

/// What is moved.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub block_bytes: usize,
    /// Blocks per call.
    pub batch: usize,
    pub dram_bytes: usize,
    /// Several times what memory holds.
    pub disk_bytes: usize,
    /// For how long blocks are put.
    pub putting: Duration,
}

/// Reads or writes at once: as many as the pool node has.
pub(super) const THREADS: usize = 8;
/// Different blocks that are put under different keys.
const CONTENTS: usize = 64;

/// Rows of what the disk does by itself: each of eight threads writes, or reads, the next block of a file that exists, past
/// the page cache.
pub fn raw(dir: &Path, plan: Plan, repetitions: u32) -> anyhow::Result<[Row; 2]> {
    let path = dir.join("raw");
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).custom_flags(OFlag::O_DIRECT.bits()).open(&path);
    let file = file.with_context(|| format!("{} cannot be opened with O_DIRECT", path.display()))?;
    let blocks = (plan.disk_bytes / 2 / plan.block_bytes) as u64;
    let pass = |write| pass(&file, plan.block_bytes, blocks, write);
    pass(true)?;
    let mut rows = Vec::new();
    for (op, write) in [("disk write", true), ("disk read", false)] {
        let rates: Vec<_> = (0..repetitions).map(|_| pass(write)).collect::<Result<_, _>>()?;
        rows.push(Row { op, bytes: plan.block_bytes, threads: Some(THREADS), tier: Some("nvme"), ..Row::new(Rate::best(&rates)) });
    }
    std::fs::remove_file(&path)?;
    rows.try_into().map_err(|_| anyhow::anyhow!("there are two"))
}

fn pass(file: &File, block_bytes: usize, blocks: u64, write: bool) -> anyhow::Result<Rate> {
    let next = AtomicU64::new(0);
    let clocks = Clocks::new(&[])?;
    let started = clocks.now()?;
    thread::scope(|scope| {
        let work = || -> anyhow::Result<()> {
            let mut buffer = disk::buffer(block_bytes)?;
            loop {
                let block = next.fetch_add(1, Relaxed);
                if block >= blocks {
                    return Ok(());
                }
                let offset = block * block_bytes as u64;
                if write {
                    buffer[..8].copy_from_slice(&block.to_le_bytes());
                    file.write_all_at(&buffer, offset)?;
                } else {
                    file.read_exact_at(&mut buffer, offset)?;
                    ensure!(buffer[..8] == block.to_le_bytes(), "the disk gave back another block");
                }
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("reading and writing do not panic"))
    })?;
    Ok(Rate::new(clocks.now()? - started, block_bytes * blocks as usize))
}

/// Two rows. `offered`: bytes per second that are put.
pub async fn measure(node: &PoolNode, client: PoolClient, plan: Plan, offered: f64) -> anyhow::Result<[Row; 2]> {
    let put = put(node, &client, plan, offered).await?;
    let get = get(node, &client, plan).await?;
    let (transport, datagram_bytes) = transport_name(&client);
    let row = |op, rate| Row {
        op,
        bytes: plan.block_bytes,
        batch: plan.batch,
        transport: Some(transport),
        tier: Some("nvme"),
        datagram_bytes,
        ..Row::new(rate)
    };
    Ok([row("put", put), row("get", get)])
}

async fn put(node: &PoolNode, client: &PoolClient, plan: Plan, offered: f64) -> anyhow::Result<Rate> {
    let mut content = Content::new(plan.block_bytes);
    let contents = content.draw(CONTENTS);
    let clocks = node.clocks()?;
    let started = Instant::now();
    let (mut put, mut first, mut last) = (0, None, None);
    while started.elapsed() < plan.putting {
        let blocks = (0..plan.batch).map(|n| (content.key(), contents[(put + n) % CONTENTS].1.clone())).collect();
        put += client.put(LINEAGE, blocks).await?.written;
        let due = started + Duration::from_secs_f64((put * plan.block_bytes) as f64 / offered);
        sleep(due.saturating_duration_since(Instant::now())).await;
        // Between two reports, when the disk has been busy for a while.
        let told = node.told();
        if told.stored_bytes > plan.dram_bytes as u64 && last.is_none_or(|(before, _): (DiskTold, _)| before.at != told.at) {
            last = Some((told, clocks.now()?));
            first = first.or(last);
        }
    }
    let ((from, before), (to, after)) = first.zip(last).context("the disk took less than what memory holds")?;
    let bytes = (to.stored_bytes - from.stored_bytes) as usize;
    ensure!(bytes > 0, "the disk took nothing between two reports: put for longer");
    let cpu_s_per_gb = (after - before).cpu_s_per_gb(bytes);
    Ok(Rate { gb_per_s: bytes as f64 / 1e9 / (to.at - from.at).as_secs_f64(), cpu_s_per_gb })
}

async fn get(node: &PoolNode, client: &PoolClient, plan: Plan) -> anyhow::Result<Rate> {
    // Until memory holds copies only: what is there and not on disk would push blocks off the disk while they are being read.
    for keys in node.keys(Tier::Nvme).chunks(plan.batch) {
        let mut fetch = client.get(keys.to_vec(), Duration::ZERO);
        while fetch.next().await.is_some() {}
    }
    sleep(Duration::from_millis(1500)).await;
    let on_disk: Vec<BlockKey> = node.keys(Tier::Nvme);
    ensure!(on_disk.len() * plan.block_bytes > plan.dram_bytes, "only {} blocks are on disk", on_disk.len());
    let clocks = node.clocks()?;
    let loaded = node.told().loaded_bytes;
    let started = clocks.now()?;
    for keys in on_disk.chunks(plan.batch) {
        fetch(client, keys.to_vec(), |_, _| Ok(())).await?;
    }
    let spent = clocks.now()? - started;
    sleep(Duration::from_millis(1500)).await;
    let (bytes, loaded) = (on_disk.len() * plan.block_bytes, (node.told().loaded_bytes - loaded) as usize);
    ensure!(loaded * 10 >= bytes * 9, "of {bytes} bytes only {loaded} came from disk");
    Ok(Rate::new(spent, bytes))
}
