//! Put and get, timed.
//!
//! Only the calls are timed. Blocks are created, and compared with the original ones, outside of the timed region; the client's own
//! validation of every block is part of a get.

use super::{
    clocks::{Clocks, Spent},
    report::{Rate, Row},
};
use anyhow::{Context, anyhow, ensure};
use std::{sync::Arc, time::Duration};
use tidemill_kvpool::client::{Nics, PoolClient, Registration, Transport};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    pool::Lineage,
};
use tokio::{sync::Mutex, task::JoinSet};

/// The lineage of blocks, which belong to no chain; a node does not check it.
pub(super) const LINEAGE: Lineage = Lineage { origin: RequestId(0), tenant: Tenant(0), parent: None, position: 0 };

/// The plan of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub block_bytes: usize,
    /// Blocks per call.
    pub batch: usize,
    /// Blocks per repetition.
    pub blocks: usize,
    pub repetitions: u32,
}

/// Measures put and get. The first pass, in which both sides touch memory for the first time, does not count as a repetition.
pub async fn measure(client: PoolClient, nics: Option<Arc<Nics>>, clocks: Clocks, plan: Plan) -> anyhow::Result<[Row; 2]> {
    let mut content = Content::new(plan.block_bytes);
    let mut readers = Readers::new(plan.block_bytes, plan.batch);
    let _registered = nics.map(|nics| readers.register(&nics)).transpose()?;
    let mut passes = Vec::new();
    for _ in 0..=plan.repetitions {
        let (mut put, mut get) = (Spent::default(), Spent::default());
        let mut left = plan.blocks;
        while left > 0 {
            let count = left.min(plan.batch);
            let blocks = content.draw(count);
            let keys: Vec<_> = blocks.iter().map(|(key, _)| *key).collect();
            let expected = blocks.clone();
            let started = clocks.now()?;
            let report = client.put(LINEAGE, blocks).await?;
            put += clocks.now()? - started;
            ensure!(report.written == count, "of {count} blocks {} were written", report.written);
            let started = clocks.now()?;
            readers.fetch(&client, keys.clone()).await?;
            get += clocks.now()? - started;
            verify(&client, keys, &expected).await?;
            left -= count;
        }
        let bytes = plan.blocks * plan.block_bytes;
        passes.push((Rate::new(put, bytes), Rate::new(get, bytes)));
    }
    let (transport, datagram_bytes) = transport_name(&client);
    let row = |op: &'static str, rates: Vec<Rate>| {
        let (first, rest) = rates.split_first().expect("there is a first pass");
        Row {
            op,
            bytes: plan.block_bytes,
            batch: plan.batch,
            transport: Some(transport),
            tier: Some("dram"),
            datagram_bytes,
            first_gb_per_s: Some(first.gb_per_s),
            ..Row::new(Rate::best(rest))
        }
    };
    let (puts, gets) = passes.into_iter().unzip();
    Ok([row("put", puts), row("get", gets)])
}

/// The transport's name in rows, and the size of datagrams if there are any.
pub(super) fn transport_name(client: &PoolClient) -> (&'static str, Option<u16>) {
    let transport = client.transport();
    (transport.name(), (transport == Transport::Quic).then(|| client.datagram_bytes()))
}

/// Readers that copy fetched blocks to memory that they already have, like an engine.
pub(super) struct Readers {
    places: Vec<Vec<u8>>,
}

/// The most tasks that read one batch.
const READERS_MAX: usize = 4;
/// The fewest bytes of each task.
const READER_BYTES_MIN: usize = 4 << 20;

impl Readers {
    /// Creates readers for batches of `blocks`.
    pub(super) fn new(block_bytes: usize, blocks: usize) -> Self {
        let readers = (blocks * block_bytes / READER_BYTES_MIN).clamp(1, READERS_MAX);
        Self { places: vec![vec![0; block_bytes]; readers] }
    }

    /// Registers their memory with the RDMA devices, like an engine. It does not move: fetches pass it around.
    fn register(&mut self, nics: &Arc<Nics>) -> anyhow::Result<Vec<Registration>> {
        Ok(self.places.iter_mut().map(|place| nics.register(place)).collect::<Result<_, _>>()?)
    }

    /// Fetches blocks and reads them all.
    pub(super) async fn fetch(&mut self, client: &PoolClient, keys: Vec<BlockKey>) -> anyhow::Result<()> {
        let fetch = Arc::new(Mutex::new(client.get(keys, Duration::ZERO)));
        let mut reading: JoinSet<anyhow::Result<Vec<u8>>> = JoinSet::new();
        for mut place in self.places.drain(..) {
            let fetch = Arc::clone(&fetch);
            reading.spawn(async move {
                loop {
                    let next = fetch.lock().await.next().await;
                    let Some((index, block)) = next else { return Ok(place) };
                    let read = block.and_then(|block| block.read_into(&mut place));
                    read.map_err(|miss| anyhow!("block {index} is a miss: {miss:?}"))?;
                }
            });
        }
        while let Some(place) = reading.join_next().await {
            self.places.push(place??);
        }
        Ok(())
    }
}

async fn verify(client: &PoolClient, keys: Vec<BlockKey>, expected: &[(BlockKey, Vec<u8>)]) -> anyhow::Result<()> {
    let mut fetch = client.get(keys, Duration::ZERO);
    while let Some((index, block)) = fetch.next().await {
        let block = block.and_then(|block| block.read()).map_err(|miss| anyhow!("block {index} is a miss: {miss:?}"))?;
        let (_, put) = expected.get(index).context("a block nobody asked for")?;
        ensure!(block.bytes == *put, "block {index} came back with other bytes");
    }
    Ok(())
}

/// A source of blocks that differ from each other, no two with the same key.
pub(super) struct Content {
    block_bytes: usize,
    next: u64,
}

impl Content {
    pub(super) fn new(block_bytes: usize) -> Self {
        Self { block_bytes, next: 0 }
    }

    /// A key that was not drawn before.
    pub(super) fn key(&mut self) -> BlockKey {
        self.next += 1;
        let mut key = [0; 16];
        key[..8].copy_from_slice(&self.next.to_le_bytes());
        BlockKey(key)
    }

    pub(super) fn draw(&mut self, count: usize) -> Vec<(BlockKey, Vec<u8>)> {
        let mut block = || {
            let key = self.key();
            let mut bytes = vec![0; self.block_bytes];
            for (n, word) in bytes.chunks_exact_mut(size_of::<u64>()).enumerate() {
                word.copy_from_slice(&(n as u64 ^ self.next).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
            }
            (key, bytes)
        };
        (0..count).map(|_| block()).collect()
    }
}
