//! The process around the engine: load the model, link up, publish blocks, end cleanly.

use crate::{
    engine::{Engine, Input, Publication},
    scheduler::{Limits, Scheduler},
    settings::Settings,
};
use std::{mem, time::Duration};
use tidemill_engine::{
    load::{LoadedEngine, load_engine},
    reach,
};
use tidemill_kvpool::clients::PoolClients;
use tidemill_model::BlockBytes;
use tidemill_net::process;
use tidemill_proto::{
    block::BlockKey,
    message::{PoolNode, RoleInfo},
    pool::Lineage,
};
use tokio::{sync::mpsc, time::timeout};

/// Blocks on their way into the pool.
const PUBLISHING_MAX: usize = 256;
/// At the end, blocks on their way into the pool get this long.
const PUBLISHING_LAST: Duration = Duration::from_secs(2);
/// Blocks put in one call.
const PUBLISH_BATCH: usize = 32;

/// Runs a decode worker until it is told to end.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    process::init_logging(&settings.worker.log);
    process::keep_freed_memory();
    let shutdown = settings.worker.shutdown();
    let LoadedEngine { runner, info, step_tokens } = load_engine(&settings.engine, settings.sequences_max, settings.work_max())?;
    let (reach, mut links, inputs) = reach::start(&settings.worker, &settings.engine, &info, RoleInfo::Decode(info.clone()))?;
    let (publisher, publications) = mpsc::channel(reach::queue_blocks(&info, PUBLISHING_MAX));
    let publishing = tokio::spawn(publish(reach.pools.clone(), publications));
    let limits = Limits {
        sequences_max: settings.sequences_max,
        waiting_max: settings.waiting_max,
        step_tokens,
        context_tokens: info.context_tokens as usize,
    };
    let scheduler = Scheduler::new(info.layout, info.device_blocks, limits);
    let engine = Engine { scheduler, runner, reach, publisher };
    let outcome = links.drive(engine, inputs, Input::Link, Input::Drain, shutdown).await;
    // Best effort, here too: what is not in the pool by now is computed again by whoever needs it.
    let _ = timeout(PUBLISHING_LAST, publishing).await;
    links.close().await;
    Ok(outcome?)
}

/// Puts blocks into the pool as they come, until the engine ends. A block that cannot be put is computed again by whoever needs it.
async fn publish(pools: PoolClients, mut publications: mpsc::Receiver<Publication>) {
    let mut batch = Vec::new();
    while publications.recv_many(&mut batch, PUBLISH_BATCH).await > 0 {
        for (node, lineage, blocks) in runs(arrived(mem::take(&mut batch)).await) {
            if let Err(error) = pools.put(node, lineage, blocks).await {
                tracing::debug!(%error, "blocks not published");
            }
        }
    }
}

/// A block whose bytes are here.
struct Copied {
    node: PoolNode,
    lineage: Lineage,
    key: BlockKey,
    bytes: Vec<u8>,
}

/// Waits for the bytes that a device copies. A block that it fails to copy is not published: the engine learns of it with its next step.
async fn arrived(publications: Vec<Publication>) -> Vec<Copied> {
    let is_pending = |publication: &Publication| matches!(publication.bytes, BlockBytes::Pending(_));
    let wait = |publications: Vec<Publication>| {
        let copied = publications.into_iter().flat_map(|Publication { node, lineage, key, bytes }| {
            let blocks = bytes.wait().unwrap_or_default();
            blocks.into_iter().map(move |bytes| Copied { node, lineage, key, bytes })
        });
        copied.collect()
    };
    if publications.iter().any(is_pending) {
        return tokio::task::spawn_blocking(move || wait(publications)).await.unwrap_or_default();
    }
    wait(publications)
}

/// Consecutive blocks of one chain.
type Run = (PoolNode, Lineage, Vec<(BlockKey, Vec<u8>)>);

/// Sorts blocks into runs that can be put at once: those of several sequences come mixed.
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
            Copied { node, lineage, key: key(n), bytes: vec![n] }
        };
        let mixed = [block(None, 1), block(Some(9), 10), block(Some(1), 2), block(Some(10), 11), block(Some(3), 4)];
        let runs = runs(mixed.into());
        let keys: Vec<Vec<_>> = runs.iter().map(|(_, _, blocks)| blocks.iter().map(|(key, _)| key.0[0]).collect()).collect();
        assert_eq!(keys, [vec![1, 2], vec![10, 11], vec![4]]);
    }
}
