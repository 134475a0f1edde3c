//! The NVMe tier, timed: blocks that move from memory to disk, and blocks that are read back from it, beside the raw disk's speed.
//!
//! Blocks are put as fast as the raw disk writes; blocks that the node could not write to disk before it needed their slots are lost, and
//! do not count. The count is the node's own report of stored bytes. Gets ask for blocks that are on disk only. Both run two batches at a
//! time, like two jobs of a worker: with one after the other, the disk would wait while the last blocks of each are copied and checked.
//!
//! A disk's speed may change from one minute to the next, and a virtual one's does. So raw disk, puts and gets take turns. Raw reads use
//! the node's own file in the node's pattern: half of it, anywhere, in no order.

pub mod raw;

use super::{
    clocks::{Clocks, Spent},
    node::{DiskTold, PoolNode},
    report::{Rate, Row},
    transfer::{Content, LINEAGE, Readers, transport_name},
};
use anyhow::{Context, ensure};
use bytes::Bytes;
use raw::{Access, RawFile, THREADS};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tidemill_kvpool::client::PoolClient;
use tidemill_proto::{block::BlockKey, pool::Tier};
use tokio::{task::spawn_blocking, time::sleep};

/// The plan of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub block_bytes: usize,
    /// Blocks per call.
    pub batch: usize,
    pub dram_bytes: usize,
    /// Bytes of disk, several times those of memory.
    pub disk_bytes: usize,
    /// The duration of each run of puts.
    pub putting: Duration,
    pub rounds: u32,
}

/// The number of different blocks that are put under different keys.
const CONTENTS: usize = 64;
/// The time after which a node's work is in a heartbeat.
const TOLD: Duration = Duration::from_millis(1500);

/// Rows of the raw disk, and of each of the clients of `node`, whose disk is in `data`.
pub async fn measure(node: &PoolNode, clients: &[PoolClient], data: &Path, plan: Plan) -> anyhow::Result<Vec<Row>> {
    let mut putter = Putter { content: Content::new(plan.block_bytes), contents: Vec::new(), put: 0 };
    putter.contents = putter.content.draw(CONTENTS).into_iter().map(|(_, bytes)| Bytes::from(bytes)).collect();
    let blocks = (plan.disk_bytes / plan.block_bytes) as u64;
    let scratch = data.join("raw");
    let written = spawn_blocking(move || RawFile::create(&scratch, plan.block_bytes, blocks / 2)).await??;
    let read = RawFile::open_half(&data.join("slab"), plan.block_bytes, blocks)?;

    let mut rows = Vec::new();
    let mut rounds = Rounds::new(clients.len());
    let mut offered = pass(&written, Access::Write).await?.gb_per_s * 1e9;
    // This runs until the whole file has been written once.
    putter.put_until(node, &clients[0], plan, offered, |told| told.stored_bytes > plan.disk_bytes as u64).await?;
    for _ in 0..plan.rounds {
        let raw = pass(&written, Access::Write).await?;
        offered = offered.max(raw.gb_per_s * 1e9);
        rounds.raw.push(raw);
        for (client, rates) in clients.iter().zip(&mut rounds.pool) {
            rates.push(putter.put(node, client, plan, offered).await?);
        }
    }
    rows.extend(rounds.rows("disk write", "put", clients, plan));

    let mut rounds = Rounds::new(clients.len());
    settle(node, &clients[0], plan).await?;
    for _ in 0..plan.rounds {
        rounds.raw.push(pass(&read, Access::Read).await?);
        for (client, rates) in clients.iter().zip(&mut rounds.pool) {
            rates.push(get(node, client, plan).await?);
        }
    }
    rows.extend(rounds.rows("disk read", "get", clients, plan));
    Ok(rows)
}

async fn pass(raw: &RawFile, access: Access) -> anyhow::Result<Rate> {
    let raw = raw.clone();
    spawn_blocking(move || raw.pass(access)).await?
}

/// Rates of the raw disk and of each client.
struct Rounds {
    raw: Vec<Rate>,
    pool: Vec<Vec<Rate>>,
}

impl Rounds {
    fn new(clients: usize) -> Self {
        Self { raw: Vec::new(), pool: vec![Vec::new(); clients] }
    }

    fn rows(&self, raw_op: &'static str, op: &'static str, clients: &[PoolClient], plan: Plan) -> Vec<Row> {
        let Plan { block_bytes: bytes, batch, .. } = plan;
        let raw = Row { op: raw_op, bytes, threads: Some(THREADS), tier: Some("nvme"), ..Row::new(Rate::best(&self.raw)) };
        let pool = clients.iter().zip(&self.pool).map(|(client, rates)| {
            let (transport, datagram_bytes) = transport_name(client);
            Row { op, bytes, batch, transport: Some(transport), tier: Some("nvme"), datagram_bytes, ..Row::new(Rate::best(rates)) }
        });
        [raw].into_iter().chain(pool).collect()
    }
}

/// Puts blocks with new keys.
struct Putter {
    content: Content,
    contents: Vec<Bytes>,
    put: usize,
}

impl Putter {
    async fn put_batches(&mut self, client: &PoolClient, plan: Plan) -> anyhow::Result<()> {
        let [one, another] = [(); 2].map(|()| self.batch(plan));
        let (one, another) = tokio::try_join!(client.put(LINEAGE, one), client.put(LINEAGE, another))?;
        self.put += one.written + another.written;
        Ok(())
    }

    fn batch(&mut self, plan: Plan) -> Vec<(BlockKey, Bytes)> {
        (0..plan.batch).map(|n| (self.content.key(), self.contents[(self.put + n) % CONTENTS].clone())).collect()
    }

    /// Puts `offered` bytes per second until the node's report satisfies the condition.
    async fn put_until(
        &mut self,
        node: &PoolNode,
        client: &PoolClient,
        plan: Plan,
        offered: f64,
        mut enough: impl FnMut(DiskTold) -> bool,
    ) -> anyhow::Result<()> {
        let (started, put_before) = (Instant::now(), self.put);
        while !enough(node.told()) {
            ensure!(started.elapsed() < plan.putting * 10, "the disk takes far less than it should");
            self.put_batches(client, plan).await?;
            let due = started + Duration::from_secs_f64(((self.put - put_before) * plan.block_bytes) as f64 / offered);
            sleep(due.saturating_duration_since(Instant::now())).await;
        }
        Ok(())
    }

    /// The rate of the disk between two reports of the node, the first of which comes after the disk has been busy for a while.
    async fn put(&mut self, node: &PoolNode, client: &PoolClient, plan: Plan, offered: f64) -> anyhow::Result<Rate> {
        let clocks = node.clocks()?;
        let (started, before) = (Instant::now(), node.told());
        let mut reports: Vec<(DiskTold, Spent)> = Vec::new();
        let mut failed = Ok(());
        let enough = |told: DiskTold| {
            let busy = told.stored_bytes > before.stored_bytes + plan.dram_bytes as u64 / 2;
            if busy && reports.last().is_none_or(|(last, _)| last.at != told.at) {
                match clocks.now() {
                    Ok(now) => reports.push((told, now)),
                    Err(error) => failed = Err(error),
                }
            }
            failed.is_err() || (started.elapsed() > plan.putting && reports.len() > 1)
        };
        self.put_until(node, client, plan, offered, enough).await?;
        failed?;
        let ((from, earlier), (to, later)) = reports.first().zip(reports.last()).context("the disk took nothing")?;
        let bytes = (to.stored_bytes - from.stored_bytes) as usize;
        let cpu_s_per_gb = (*later - *earlier).cpu_s_per_gb(bytes);
        Ok(Rate { gb_per_s: bytes as f64 / 1e9 / (to.at - from.at).as_secs_f64(), cpu_s_per_gb })
    }
}

/// Waits until memory holds only copies: blocks that are not on disk would evict others from the disk while they are being read.
async fn settle(node: &PoolNode, client: &PoolClient, plan: Plan) -> anyhow::Result<()> {
    sleep(TOLD).await;
    for keys in node.keys(Tier::Nvme).chunks(plan.batch) {
        let mut fetch = client.get(keys.to_vec(), Duration::ZERO);
        while fetch.next().await.is_some() {}
    }
    Ok(())
}

async fn get(node: &PoolNode, client: &PoolClient, plan: Plan) -> anyhow::Result<Rate> {
    sleep(TOLD).await;
    // The keys come in a hash map's order.
    let mut on_disk: Vec<BlockKey> = node.keys(Tier::Nvme);
    ensure!(on_disk.len() * plan.block_bytes > plan.dram_bytes, "only {} blocks are on disk", on_disk.len());
    on_disk.truncate(plan.disk_bytes / 2 / plan.block_bytes);
    let clocks: Clocks = node.clocks()?;
    let loaded = node.told().loaded_bytes;
    let started = clocks.now()?;
    let every_other = async |first: usize| -> anyhow::Result<()> {
        let mut readers = Readers::new(plan.block_bytes, plan.batch);
        for keys in on_disk.chunks(plan.batch).skip(first).step_by(2) {
            readers.fetch(client, keys.to_vec()).await?;
        }
        Ok(())
    };
    tokio::try_join!(every_other(0), every_other(1))?;
    let spent = clocks.now()? - started;
    sleep(TOLD).await;
    let (bytes, loaded) = (on_disk.len() * plan.block_bytes, (node.told().loaded_bytes - loaded) as usize);
    ensure!(loaded * 10 >= bytes * 9, "of {bytes} bytes only {loaded} came from disk");
    Ok(Rate::new(spent, bytes))
}
