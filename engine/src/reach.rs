//! What every worker with device memory reaches from its engine's thread: coordinators, pool nodes, its own inbox.
//!
//! ```text
//!                         ┌── links ◄──► coordinators
//!   engine ──[ Reach ]────┼── fetches ◄── pool nodes
//!      ▲                  └── whatever else the role does with the pool
//!      └── bounded inbox ◄── all of it
//! ```

use crate::{
    drive::{self, EngineEnded},
    flags::EngineSettings,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_kvpool::{
    admission::{FetchId, Part, blocks_within},
    client::{Block, Miss},
    clients::PoolClients,
};
use tidemill_net::{
    link::{Endpoint, LinkError},
    uplink::{LinkEvent, Uplink},
    worker::WorkerSettings,
};
use tidemill_proto::{
    ids::LinkId,
    message::{EngineInfo, Report, RoleInfo, WorkerEvent},
};
use tokio::{runtime::Handle, sync::mpsc, task::AbortHandle};

/// What arrived and the engine has not taken yet: blocks, and messages of coordinators.
const INBOX_MAX: usize = 256;
/// Bytes of the blocks in one queue of a worker.
const QUEUE_BYTES_MAX: usize = 64 << 20;

/// How many blocks one queue of a worker holds: at most `blocks_max`, and not too many bytes.
pub fn queue_blocks(info: &EngineInfo, blocks_max: usize) -> usize {
    blocks_within(QUEUE_BYTES_MAX, info.block_bytes as usize, blocks_max)
}

/// Owned by the engine of a role whose inputs are `I`.
#[derive(Debug)]
pub struct Reach<I> {
    pub pools: PoolClients,
    /// The engine's own, for tasks that answer to it.
    pub inbox: mpsc::Sender<I>,
    pub runtime: Handle,
    uplink: Arc<Uplink>,
    report: Arc<Mutex<Report>>,
    fetches: HashMap<FetchId, AbortHandle>,
    started: Instant,
}

/// The process's end of the same.
#[derive(Debug)]
pub struct Links<I> {
    endpoint: Endpoint,
    uplink: Arc<Uplink>,
    events: mpsc::Receiver<(LinkId, LinkEvent)>,
    inbox: mpsc::Sender<I>,
}

/// An engine's reach, the process's end of it, and the engine's inbox.
pub type Started<I> = (Reach<I>, Links<I>, mpsc::Receiver<I>);

/// Links up with the coordinators. Must be called inside a tokio runtime.
pub fn start<I: Send + 'static>(
    worker: &WorkerSettings,
    engine: &EngineSettings,
    info: &EngineInfo,
    role: RoleInfo,
) -> Result<Started<I>, LinkError> {
    let endpoint = Endpoint::bind_client(worker.bind, &worker.identity)?;
    let pools = PoolClients::new(endpoint.clone(), info.layout, info.block_bytes as usize, engine.force_quic);
    let report = Arc::new(Mutex::new(Report::default()));
    let (uplink, events) = Uplink::start(&endpoint, &worker.coordinators, worker.register(role), pools.reporter(Arc::clone(&report)));
    let uplink = Arc::new(uplink);
    let (inbox, inputs) = mpsc::channel(queue_blocks(info, INBOX_MAX));
    let links = Links { endpoint, uplink: Arc::clone(&uplink), events, inbox: inbox.clone() };
    let (runtime, fetches) = (Handle::current(), HashMap::new());
    Ok((Reach { pools, inbox, runtime, uplink, report, fetches, started: Instant::now() }, links, inputs))
}

impl<I: Send + 'static> Reach<I> {
    /// Since the worker started.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn send(&self, link: LinkId, event: WorkerEvent) {
        // A coordinator whose queue is full loses its link, which the engine hears of.
        self.uplink.send(link, event);
    }

    /// Fetches blocks into the inbox, one input per result.
    pub fn fetch(&mut self, fetch: FetchId, parts: Vec<Part>, wrap: fn(FetchId, usize, Result<Block, Miss>) -> I) {
        self.fetches.retain(|_, task| !task.is_finished());
        let task = self.pools.clone().fetch(parts, self.inbox.clone(), move |index, result| wrap(fetch, index, result));
        self.fetches.insert(fetch, self.runtime.spawn(task).abort_handle());
    }

    pub fn cancel_fetch(&mut self, fetch: FetchId) {
        if let Some(task) = self.fetches.remove(&fetch) {
            task.abort();
        }
    }

    /// Says that this worker leaves: it gets nothing new.
    pub fn leave(&self) {
        self.uplink.broadcast(&WorkerEvent::Leaving);
    }

    /// Changes what the next heartbeat reports.
    pub fn report(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.report.lock());
    }
}

impl<I: Send + 'static> Links<I> {
    /// Feeds an engine's inbox until `shutdown`; then says that this worker leaves, and has the engine, which `drain` tells
    /// to, hand its work back.
    pub async fn drive<E>(
        &mut self,
        engine: E,
        inputs: mpsc::Receiver<I>,
        wrap: fn(LinkId, LinkEvent) -> I,
        drain: I,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), EngineEnded>
    where
        E: drive::Engine<Input = I> + Send + 'static,
    {
        let mut thread = tokio::task::spawn_blocking(move || drive::drive(engine, inputs));
        drive::pump(&mut self.events, &self.inbox, wrap, &mut thread, shutdown).await?;
        tracing::info!("draining: work goes back to its coordinators");
        self.uplink.broadcast(&WorkerEvent::Leaving);
        let _ = self.inbox.send(drain).await;
        drive::joined(thread.await)
    }

    /// Sends what is still to be said to coordinators (bounded), and closes all connections.
    pub async fn close(mut self) {
        if let Some(uplink) = Arc::into_inner(self.uplink) {
            // Messages that cross the good-bye are dropped, but taken.
            tokio::join!(uplink.close(), async { while self.events.recv().await.is_some() {} });
        }
        self.endpoint.close().await;
    }
}
