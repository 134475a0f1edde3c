//! Put and get, timed.
//!
//! Only the calls are on the clocks. Blocks are made, and compared with what was put, outside of them; the client's own
//! validation of every block is part of a get.

use super::{
    clocks::{Clocks, Spent},
    report::{Rate, Row},
};
use anyhow::{Context, anyhow, ensure};
use std::time::Duration;
use tidemill_kvpool::client::{PoolClient, Transport};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    pool::Lineage,
};

/// Blocks are none of one chain; a node takes them as they come.
pub(super) const LINEAGE: Lineage = Lineage { origin: RequestId(0), tenant: Tenant(0), parent: None, position: 0 };

/// What is moved.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub block_bytes: usize,
    /// Blocks per call.
    pub batch: usize,
    /// Blocks per repetition.
    pub blocks: usize,
    pub repetitions: u32,
}

/// Two rows. The first pass, in which memory is touched for the first time on both sides, is not among the repetitions.
pub async fn measure(client: PoolClient, clocks: Clocks, plan: Plan) -> anyhow::Result<[Row; 2]> {
    let mut content = Content::new(plan.block_bytes);
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
            fetch(&client, keys.clone(), |_, _| Ok(())).await?;
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

/// As rows have it; datagrams where there are any.
pub(super) fn transport_name(client: &PoolClient) -> (&'static str, Option<u16>) {
    match client.transport() {
        Transport::Shm => ("shm", None),
        Transport::Quic => ("quic", Some(client.datagram_bytes())),
    }
}

/// Fetches blocks, handing each to `take`, and lets go of it.
pub(super) async fn fetch(
    client: &PoolClient,
    keys: Vec<BlockKey>,
    take: impl Fn(usize, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut fetch = client.get(keys, Duration::ZERO);
    while let Some((index, result)) = fetch.next().await {
        let block = result.map_err(|miss| anyhow!("block {index} is a miss: {miss:?}"))?;
        take(index, &block.bytes)?;
    }
    Ok(())
}

async fn verify(client: &PoolClient, keys: Vec<BlockKey>, expected: &[(BlockKey, Vec<u8>)]) -> anyhow::Result<()> {
    let compare = |index: usize, bytes: &[u8]| {
        let (_, put) = expected.get(index).context("a block nobody asked for")?;
        ensure!(bytes == put, "block {index} came back with other bytes");
        Ok(())
    };
    fetch(client, keys, compare).await
}

/// Blocks that differ from each other, no two with the same key.
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
