//! Puts device blocks into the pool: at best effort through a bounded queue, or each put with its outcome.
//!
//! Either way the engine reads a block's bytes when the scheduler says so, and the copies travel while it computes on.

use bytes::Bytes;
use std::mem;
use tidemill_kvpool::client::PoolRouter;
use tidemill_model::{BlockBytes, ExecutorError, Runner};
use tidemill_proto::{block::BlockKey, message::PoolNode, pool::Lineage};
use tokio::{sync::mpsc, task::JoinHandle};

/// The most blocks in one call to the pool.
const BATCH: usize = 32;

/// The engine's side.
#[derive(Debug)]
pub(crate) struct Publisher {
    pools: PoolRouter,
    queue: mpsc::Sender<Publication>,
}

/// A block in flight to the pool.
struct Publication {
    node: PoolNode,
    lineage: Lineage,
    key: BlockKey,
    bytes: BlockBytes,
}

impl Publisher {
    /// Starts a task with a queue of `blocks_max` blocks at best effort. The task ends when the publisher is dropped and the queue is
    /// empty. Must be called inside a tokio runtime.
    pub(crate) fn start(pools: PoolRouter, blocks_max: usize) -> (Self, JoinHandle<()>) {
        let (queue, publications) = mpsc::channel(blocks_max);
        let task = tokio::spawn(publish(pools.clone(), publications));
        (Self { pools, queue }, task)
    }

    /// Puts blocks as far as the queue has room. Publishing serves later requests: if the pool does not keep up, the speed of this one
    /// takes precedence.
    pub(crate) fn offer(
        &self,
        runner: &mut Runner,
        node: PoolNode,
        first: Lineage,
        blocks: &[(BlockKey, u32)],
    ) -> Result<(), ExecutorError> {
        let keys: Vec<BlockKey> = blocks.iter().map(|(key, _)| *key).collect();
        for (&(key, block), lineage) in blocks.iter().zip(first.of_each(&keys)) {
            let Ok(place) = self.queue.try_reserve() else { break };
            place.send(Publication { node, lineage, key, bytes: runner.read_blocks(&[block])? });
        }
        Ok(())
    }

    /// Puts blocks and reports the outcome. A block for which the node has no room is an error.
    pub(crate) fn put(
        &self,
        runner: &mut Runner,
        node: PoolNode,
        lineage: Lineage,
        blocks: &[(BlockKey, u32)],
    ) -> Result<impl Future<Output = Result<(), String>> + Send + 'static, ExecutorError> {
        let (keys, ids): (Vec<_>, Vec<_>) = blocks.iter().copied().unzip();
        let (pools, bytes) = (self.pools.clone(), runner.read_blocks(&ids)?);
        Ok(async move {
            let blocks = keys.into_iter().zip(copied(bytes).await?).collect();
            let report = pools.put(node, lineage, blocks).await.map_err(|error| error.to_string())?;
            match report.refused {
                0 => Ok(()),
                refused => Err(format!("pool node {} has no room for {refused} blocks", node.addr)),
            }
        })
    }
}

/// Waits for the bytes that a device copies.
async fn copied(bytes: BlockBytes) -> Result<Vec<Bytes>, String> {
    match bytes {
        BlockBytes::Ready(blocks) => Ok(blocks.into_iter().map(Bytes::from).collect()),
        pending => {
            let waited = tokio::task::spawn_blocking(move || pending.wait()).await;
            let blocks = waited.map_err(|panic| panic.to_string())?.map_err(|error| error.to_string())?;
            Ok(blocks.into_iter().map(Bytes::from_owner).collect())
        }
    }
}

/// Puts blocks into the pool as they come. A block that cannot be put is computed again when it is needed.
async fn publish(pools: PoolRouter, mut publications: mpsc::Receiver<Publication>) {
    let mut batch = Vec::new();
    while publications.recv_many(&mut batch, BATCH).await > 0 {
        for (node, lineage, blocks) in runs(all_copied(mem::take(&mut batch)).await) {
            if let Err(error) = pools.put(node, lineage, blocks).await {
                tracing::debug!(%error, "blocks not published");
            }
        }
    }
}

/// A block whose bytes have arrived.
struct Copied {
    node: PoolNode,
    lineage: Lineage,
    key: BlockKey,
    bytes: Bytes,
}

/// Waits for the bytes that a device copies. Skips a block that it fails to copy: the engine notices that with its next step.
async fn all_copied(publications: Vec<Publication>) -> Vec<Copied> {
    let is_pending = |publication: &Publication| matches!(publication.bytes, BlockBytes::Pending(_));
    let wait = |publications: Vec<Publication>| {
        let copied = publications.into_iter().flat_map(|Publication { node, lineage, key, bytes }| {
            let blocks = bytes.wait().unwrap_or_default();
            blocks.into_iter().map(move |bytes| Copied { node, lineage, key, bytes: Bytes::from_owner(bytes) })
        });
        copied.collect()
    };
    if publications.iter().any(is_pending) {
        return tokio::task::spawn_blocking(move || wait(publications)).await.unwrap_or_default();
    }
    wait(publications)
}

/// Consecutive blocks of one chain.
type Run = (PoolNode, Lineage, Vec<(BlockKey, Bytes)>);

/// Sorts blocks into runs that can be put at once, as those of several sequences come mixed.
fn runs(blocks: Vec<Copied>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for Copied { node, lineage, key, bytes } in blocks {
        let follows = |(at, first, blocks): &&mut Run| {
            let last = blocks.last().map(|(key, _)| *key);
            (*at, first.origin, first.tenant, last) == (node, lineage.origin, lineage.tenant, lineage.parent)
        };
        match runs.iter_mut().find(follows) {
            Some((.., blocks)) => blocks.push((key, bytes)),
            None => runs.push((node, lineage, vec![(key, bytes)])),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::{block::Tenant, ids::RequestId};

    #[test]
    fn blocks_of_several_sequences_become_one_run_each() {
        let node = PoolNode { addr: ([127, 0, 0, 1], 1).into(), near: true };
        let key = |n: u8| BlockKey([n; 16]);
        let block = |parent: Option<u8>, n: u8| {
            let lineage = Lineage { origin: RequestId(1), tenant: Tenant(0), parent: parent.map(key), position: 0 };
            Copied { node, lineage, key: key(n), bytes: vec![n].into() }
        };
        let mixed = [block(None, 1), block(Some(9), 10), block(Some(1), 2), block(Some(10), 11), block(Some(3), 4)];
        let runs = runs(mixed.into());
        let keys: Vec<Vec<_>> = runs.iter().map(|(_, _, blocks)| blocks.iter().map(|(key, _)| key.0[0]).collect()).collect();
        assert_eq!(keys, [vec![1, 2], vec![10, 11], vec![4]]);
    }
}
