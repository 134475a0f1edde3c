//! The drain of a node that is told to end: it hands its blocks over.
//!
//! ```text
//!   SIGTERM ─► Leaving ─► coordinators: no new blocks for this node
//!              Peers   ◄─ one of them: who may take over, and how much
//!              offer   ─► peers: hottest blocks first, from memory and from disk, as many as fit their free slots and as fast as
//!                         their disks make room; peers evict nothing for them
//!              end        when no client reads or writes here any more, or at the deadline
//! ```
//!
//! Meanwhile, blocks that are worth it are written to object storage, if there is one. Until the end the node serves as before. Blocks that
//! it could not hand over are misses; those on its disk are served again after a restart.

use super::{Node, store::Store};
use crate::{
    client::{PoolRouter, TransportChoice},
    core::{
        directory::{Held, Place},
        validate::validate,
    },
};
use std::{collections::BTreeMap, future::pending, sync::Arc, time::Duration};
use tidemill_net::link::Endpoint;
use tidemill_proto::{block::BlockKey, message::Peer, pool::BlockFormat};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout_at},
};

/// The time within which a living coordinator names the nodes that may take over.
const PEERS_MAX: Duration = Duration::from_secs(1);
/// The number of blocks handed over in one call.
const BATCH: usize = 32;
/// The pause between two checks whether the node is still in use.
const IN_USE_PAUSE: Duration = Duration::from_millis(20);
/// The pause between two offers of blocks that a peer had no room for.
const OFFER_PAUSE: Duration = Duration::from_millis(10);
/// The time without any accepted block after which offers to a peer end.
const NO_ROOM_MAX: Duration = Duration::from_secs(2);

/// The state of a drain, created when the node starts.
#[derive(Debug)]
pub(super) struct Drain {
    node: Arc<Node>,
    endpoint: Endpoint,
    /// The longest duration of the drain.
    limit: Duration,
    begun: Option<Instant>,
    /// The tasks that hand blocks over, by model.
    moving: BTreeMap<usize, JoinHandle<()>>,
    /// The tasks that write blocks to object storage, if they are worth it.
    flushing: Vec<JoinHandle<()>>,
}

impl Drain {
    pub(super) fn new(node: Arc<Node>, endpoint: Endpoint, limit: Duration) -> Self {
        Self { node, endpoint, limit, begun: None, moving: BTreeMap::new(), flushing: Vec::new() }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    pub(super) fn begin(&mut self) {
        self.begun = Some(Instant::now());
        let stores = (0..self.node.models.len()).filter_map(|model| self.node.store(model));
        let flushing = stores.filter_map(|store| {
            let objects = Arc::clone(store.objects()?);
            Some(tokio::spawn(objects.flush(store)))
        });
        self.flushing = flushing.collect();
    }

    /// Takes a coordinator's answer. Only the first one for each model counts.
    pub(super) fn peers(&mut self, model: usize, peers: Vec<Peer>) {
        if self.begun.is_some() && !self.moving.contains_key(&model) {
            self.moving.insert(model, tokio::spawn(hand_over(Arc::clone(&self.node), model, self.endpoint.clone(), peers)));
        }
    }

    /// Resolves when a drain that has begun is over.
    pub(super) async fn over(&mut self) {
        let Some(begun) = self.begun else { return pending().await };
        let deadline = begun + self.limit;
        if self.moving.len() < self.node.models.len() {
            sleep_until(deadline.min(begun + PEERS_MAX)).await;
        }
        for moving in self.moving.values_mut() {
            if !moving.is_finished() && timeout_at(deadline, &mut *moving).await.is_err() {
                tracing::warn!("not everything was handed over within {:?}", self.limit);
                moving.abort();
            }
        }
        for flushing in &mut self.flushing {
            if !flushing.is_finished() && timeout_at(deadline, &mut *flushing).await.is_err() {
                tracing::warn!("not everything was written to object storage within {:?}", self.limit);
                flushing.abort();
            }
        }
    }
}

async fn hand_over(node: Arc<Node>, model: usize, endpoint: Endpoint, peers: Vec<Peer>) {
    let Some(store) = node.store(model) else { return };
    let held = store.apply(|directory, _| directory.hottest());
    // Blocks keep their names, which include the shard here, so the connection must not rename them as for a shard.
    let blocks = BlockFormat::whole(store.layout(), store.arena().block_bytes() as u64);
    let pools = PoolRouter::new(endpoint, blocks.of_model(node.models[model].name.clone()), TransportChoice::Auto.into());
    let (mut moved, mut next) = (0, 0);
    for peer in peers {
        let (mut room, mut took) = (peer.free_blocks, Instant::now());
        while room > 0 && next < held.len() && took.elapsed() < NO_ROOM_MAX {
            let run = chain(&held[next..], BATCH.min(room as usize));
            let batch = held[next..next + run].to_vec();
            let (lineage, source) = (batch[0].lineage, Arc::clone(&store));
            let copies = spawn_blocking(move || copies(&source, &batch)).await.expect("copying does not panic and is not aborted");
            let report = match pools.offer(peer.node, lineage, copies).await {
                Ok(report) => report,
                Err(error) => {
                    tracing::warn!(%error, "a peer takes nothing over");
                    break;
                }
            };
            // Blocks that the peer already had take no room.
            room = room.saturating_sub(report.written as u64);
            if report.written > 0 || report.refused == 0 {
                took = Instant::now();
            }
            if report.refused == 0 {
                moved += report.written + report.held;
                next += run;
            } else {
                sleep(OFFER_PAUSE).await;
            }
        }
    }
    tracing::info!(moved, held = held.len(), "this node's blocks were handed over to other nodes");
    while in_use(&store) {
        sleep(IN_USE_PAUSE).await;
    }
}

/// The number of leading blocks, at most `max`, that follow each other in one chain and were computed for one request.
fn chain(held: &[Held], max: usize) -> usize {
    let follows = |pair: &&[Held]| {
        let (before, after) = (&pair[0], &pair[1]);
        after.lineage.parent == Some(before.key)
            && (after.lineage.origin, after.lineage.tenant) == (before.lineage.origin, before.lineage.tenant)
    };
    1 + held.windows(2).take(max - 1).take_while(follows).count()
}

/// Copies of the leading blocks, up to the first that is gone.
fn copies(store: &Store, held: &[Held]) -> Vec<(BlockKey, Vec<u8>)> {
    let arena = store.arena();
    let copy = |place| match place {
        Place::Dram(found) => {
            let (bytes, copied) = arena.read_block(found.at.slot);
            validate(copied, &found).ok().map(|()| bytes)
        }
        Place::Disk { slot, checksum } => store.disk()?.copy(slot, arena.block_bytes(), checksum),
    };
    held.iter().map_while(|held| Some((held.key, copy(held.place)?))).collect()
}

fn in_use(store: &Store) -> bool {
    let usage = store.apply(|directory, _| directory.usage());
    usage.leased + usage.reserved > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::{block::Tenant, ids::RequestId, pool::Lineage};

    #[test]
    fn blocks_go_together_as_long_as_they_follow_each_other() {
        let key = |n: u8| BlockKey([n; 16]);
        let held = |origin, parent: Option<u8>, n| {
            let lineage = Lineage { origin: RequestId(origin), tenant: Tenant(0), parent: parent.map(key), position: 0 };
            Held { key: key(n), lineage, place: Place::Disk { slot: 0, checksum: 0 } }
        };
        let chains = [held(1, None, 1), held(1, Some(1), 2), held(1, Some(2), 3), held(2, Some(3), 4), held(2, None, 9)];
        assert_eq!([chain(&chains, 9), chain(&chains, 2), chain(&chains[3..], 9), chain(&chains[4..], 9)], [3, 2, 1, 1]);
    }
}
