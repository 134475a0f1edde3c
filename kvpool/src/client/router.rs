//! A worker's connections to all pool nodes: one per node, made when it is first needed and again after it broke.

use super::{FetchedBlock, Miss, Part, PoolClient, PoolError, PutReport, Registration, TransferCounters, Ways};
use bytes::Bytes;
use futures_util::future::join_all;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_net::{link::Endpoint, uplink::Reporter};
use tidemill_proto::{
    block::BlockKey,
    message::{PoolNode, Report},
    pool::{Hello, Lineage},
};
use tokio::{sync::mpsc, time::timeout};

/// Connections to all pool nodes. Clones share them.
#[derive(Clone, Debug)]
pub struct PoolRouter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    endpoint: Endpoint,
    hello: Hello,
    ways: Ways,
    counters: Arc<TransferCounters>,
    /// The nodes, each with its own lock, so that a node that does not answer delays only its own callers.
    nodes: Mutex<HashMap<PoolNode, Arc<tokio::sync::Mutex<Node>>>>,
}

#[derive(Debug, Default)]
enum Node {
    #[default]
    Unknown,
    Connected(PoolClient),
    /// The last attempt to connect failed. All callers that waited for it share its result, until the next attempt.
    Failed {
        since: Instant,
        reason: String,
    },
}

/// The longest time for connecting to a node.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The shortest time between two attempts to connect to a node.
const RETRY: Duration = Duration::from_secs(1);

impl PoolRouter {
    /// A router without connections. `ways` are used for nodes on this host; for others, as far as they work between hosts.
    pub fn new(endpoint: Endpoint, hello: impl Into<Hello>, ways: Ways) -> Self {
        let counters = Arc::new(TransferCounters::default());
        Self(Arc::new(Inner { endpoint, hello: hello.into(), ways, counters, nodes: Mutex::default() }))
    }

    /// Registers memory into which blocks will be read with the RDMA devices, if there are any. Without registration they arrive with an
    /// extra copy.
    pub fn register(&self, memory: &mut [u8]) -> Option<Registration> {
        let nics = self.0.ways.nics.as_ref().filter(|nics| !nics.is_empty())?;
        let bytes = memory.len();
        nics.register(memory).inspect_err(|error| tracing::warn!(%error, bytes, "blocks are copied after they have come by RDMA")).ok()
    }

    /// Fetches all parts at once and delivers one result per key as they arrive, with its place among the keys of all parts. For a node
    /// that cannot be reached, each key is a miss.
    pub async fn fetch<T: Send>(
        self,
        parts: Vec<Part>,
        deliver: mpsc::Sender<T>,
        wrap: impl Fn(usize, Result<FetchedBlock, Miss>) -> T + Send + Sync,
    ) {
        let mut first = 0;
        let (deliver, wrap) = (&deliver, &wrap);
        let fetches = parts.into_iter().map(|part| {
            let place = first;
            first += part.keys.len();
            self.fetch_part(part, deliver, move |index, result| wrap(place + index, result))
        });
        join_all(fetches.collect::<Vec<_>>()).await;
    }

    async fn fetch_part<T: Send>(
        &self,
        part: Part,
        deliver: &mpsc::Sender<T>,
        wrap: impl Fn(usize, Result<FetchedBlock, Miss>) -> T + Send,
    ) {
        let Part { node, keys, wait } = part;
        let count = keys.len();
        match self.client(node).await {
            Ok(client) => {
                let mut fetch = client.get(keys, wait);
                while let Some((index, result)) = fetch.next().await {
                    if deliver.send(wrap(index, result)).await.is_err() {
                        return;
                    }
                }
            }
            Err(_) => {
                self.0.counters.miss(Miss::Unreachable, count as u64);
                for index in 0..count {
                    if deliver.send(wrap(index, Err(Miss::Unreachable))).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Publishes full blocks that follow each other in one chain, at one node.
    pub async fn put(&self, node: PoolNode, lineage: Lineage, blocks: Vec<(BlockKey, impl Into<Bytes>)>) -> Result<PutReport, PoolError> {
        self.client(node).await?.put(lineage, blocks).await
    }

    /// Like [`put`](Self::put), but evicts no blocks to make room.
    pub async fn offer(&self, node: PoolNode, lineage: Lineage, blocks: Vec<(BlockKey, Vec<u8>)>) -> Result<PutReport, PoolError> {
        self.client(node).await?.offer(lineage, blocks).await
    }

    /// The number of leading `keys` that a node holds.
    pub async fn match_prefix(&self, node: PoolNode, keys: &[BlockKey]) -> Result<usize, PoolError> {
        self.client(node).await?.match_prefix(keys).await
    }

    /// The source of heartbeats' reports: the engine's `latest`, with the transfer counters. Each step is reported once.
    pub fn reporter(&self, latest: Arc<Mutex<Report>>) -> Reporter {
        let pools = self.clone();
        Arc::new(move || {
            let mut latest = latest.lock();
            let steps = std::mem::take(&mut latest.steps);
            let mut report = Report { steps, ..latest.clone() };
            (report.counters.transfer, report.counters.misses) = pools.0.counters.snapshot();
            report.counters.rails = pools.0.counters.rails();
            report.counters.fetched = pools.0.counters.fetched_bytes();
            report
        })
    }

    async fn client(&self, at: PoolNode) -> Result<PoolClient, PoolError> {
        let addr = at.addr;
        let node = Arc::clone(self.0.nodes.lock().entry(at).or_default());
        let mut node = node.lock().await;
        match &*node {
            Node::Connected(client) if client.is_open() => return Ok(client.clone()),
            Node::Failed { since, reason } if since.elapsed() < RETRY => {
                return Err(PoolError::Unreachable { addr, reason: reason.clone() });
            }
            _ => {}
        }
        let Inner { endpoint, hello, ways, counters, .. } = &*self.0;
        let choice = if at.near { ways.choice } else { ways.choice.far() };
        let ways = Ways { choice, ..ways.clone() };
        let connecting = PoolClient::connect(endpoint, addr, hello.clone(), ways, Arc::clone(counters));
        let late = || PoolError::Unreachable { addr, reason: format!("no connection within {CONNECT_MAX:?}") };
        match timeout(CONNECT_MAX, connecting).await.unwrap_or_else(|_| Err(late())) {
            Ok(client) => {
                tracing::info!(%addr, near = at.near, transport = ?client.transport(), "pool node connected");
                *node = Node::Connected(client.clone());
                Ok(client)
            }
            Err(error) => {
                tracing::warn!(%addr, %error, "pool node is out of reach");
                *node = Node::Failed { since: Instant::now(), reason: error.to_string() };
                Err(error)
            }
        }
    }
}
