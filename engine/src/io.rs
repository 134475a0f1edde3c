//! The connections of an engine's thread: coordinators, pool nodes, its own inbox, the report of the next heartbeat.
//!
//! ```text
//!                       ┌── links ◄──► coordinators
//!   engine ──[ Io ]─────┼── matches, fetches ◄── pool nodes
//!      ▲                └── puts ──► pool nodes
//!      └── bounded inbox ◄── all of it
//! ```

use crate::{
    drive::{self, Driven, EngineEnded},
    engine::Event,
    flags::EngineSettings,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_kvpool::client::{FetchId, Nics, Part, Pin, PoolRouter, TransportChoice, Ways, request::blocks_within};
use tidemill_model::ExecutorError;
use tidemill_net::{
    link::{Endpoint, LinkError},
    uplink::{LinkEvent, Uplink},
    worker::WorkerSettings,
};
use tidemill_proto::{
    block::BLOCK_TOKENS,
    ids::LinkId,
    message::{EngineInfo, Report, RoleInfo, WorkerEvent},
    pool::BlockFormat,
};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    task::AbortHandle,
};

/// The most events that wait for the engine: blocks, and messages of coordinators.
const INBOX_MAX: usize = 256;
/// The most bytes of the blocks in one queue of a worker.
const QUEUE_BYTES_MAX: usize = 64 << 20;

/// The most bytes of the blocks that a device has in flight to the pool while it computes: pinned memory, which counts against the
/// machine's, and more than can leave a device within a step.
const DEVICE_PUTTING_BYTES_MAX: usize = 1 << 30;

/// The capacity of a worker's queue in blocks: at most `blocks_max`, and limited in bytes.
pub(crate) fn queue_blocks(info: &EngineInfo, blocks_max: usize) -> usize {
    blocks_within(QUEUE_BYTES_MAX, info.block_bytes as usize, blocks_max)
}

/// The number of blocks that a device which computes prompts has in flight to the pool: those of one step leave while the next one's are
/// computed. With fewer, it would alternate between computing and publishing. At least as many as in `queue_blocks`.
pub(crate) fn device_putting_blocks(info: &EngineInfo, step_tokens: usize, blocks_max: usize) -> usize {
    let of_two_steps = 2 * step_tokens.div_ceil(BLOCK_TOKENS);
    blocks_within(DEVICE_PUTTING_BYTES_MAX, info.block_bytes as usize, of_two_steps.max(blocks_max))
}

/// The engine's side.
#[derive(Debug)]
pub(crate) struct Io {
    pub(crate) pools: PoolRouter,
    /// The engine's own inbox, for tasks that answer to it.
    pub(crate) inbox: mpsc::Sender<Event>,
    pub(crate) runtime: Handle,
    uplink: Arc<Uplink>,
    report: Arc<Mutex<Report>>,
    fetches: HashMap<FetchId, AbortHandle>,
    started: Instant,
}

/// The process's side.
#[derive(Debug)]
pub(crate) struct Links {
    endpoint: Endpoint,
    uplink: Arc<Uplink>,
    events: mpsc::Receiver<(LinkId, LinkEvent)>,
    inbox: mpsc::Sender<Event>,
}

/// Connects to the coordinators. `device` pins shared memory, so that the device copies blocks by itself. Returns both sides, and the
/// engine's inbox. Must be called inside a tokio runtime.
pub(crate) fn start(
    worker: &WorkerSettings,
    engine: &EngineSettings,
    info: &EngineInfo,
    role: RoleInfo,
    device: Option<Arc<dyn Pin>>,
) -> Result<(Io, Links, mpsc::Receiver<Event>), LinkError> {
    let endpoint = Endpoint::bind_client(worker.bind, &worker.identity)?;
    let hello = BlockFormat::whole(info.layout, info.block_bytes).of_model(worker.model_name.clone());
    let pools = PoolRouter::new(endpoint.clone(), hello, ways(engine, device));
    let report = Arc::new(Mutex::new(Report::default()));
    let reports = (worker.heartbeat, pools.reporter(Arc::clone(&report)));
    let (uplink, link_events) = Uplink::start(&endpoint, &worker.coordinators, worker.register(role), reports);
    let uplink = Arc::new(uplink);
    let (inbox, events) = mpsc::channel(queue_blocks(info, INBOX_MAX));
    let links = Links { endpoint, uplink: Arc::clone(&uplink), events: link_events, inbox: inbox.clone() };
    let (runtime, fetches) = (Handle::current(), HashMap::new());
    Ok((Io { pools, inbox, runtime, uplink, report, fetches, started: Instant::now() }, links, events))
}

/// Opens the RDMA devices, if they may be used.
fn ways(engine: &EngineSettings, device: Option<Arc<dyn Pin>>) -> Ways {
    let choice = engine.transport;
    let may = matches!(choice, TransportChoice::Auto | TransportChoice::Rdma);
    Ways { choice, nics: may.then(|| Nics::open(&engine.rdma_devices)), device }
}

impl Io {
    /// The time since the worker started.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn send(&self, link: LinkId, event: WorkerEvent) {
        // A coordinator whose queue is full loses its link, of which the engine is notified.
        self.uplink.send(link, event);
    }

    /// Performs a task that answers to the inbox.
    pub(crate) fn answer(&self, task: impl Future<Output = Event> + Send + 'static) {
        let inbox = self.inbox.clone();
        self.runtime.spawn(async move {
            // A closed inbox means that the engine has ended.
            let _ = inbox.send(task.await).await;
        });
    }

    /// Tells the engine when a stage of its model is lost.
    pub(crate) fn await_loss(&self, lost: oneshot::Receiver<ExecutorError>) {
        let inbox = self.inbox.clone();
        self.runtime.spawn(async move {
            if let Ok(error) = lost.await {
                // A closed inbox means that the engine has ended.
                let _ = inbox.send(Event::Lost(error)).await;
            }
        });
    }

    /// Fetches blocks into the inbox, one event per result.
    pub(crate) fn fetch(&mut self, fetch: FetchId, parts: Vec<Part>) {
        self.fetches.retain(|_, task| !task.is_finished());
        let event = move |index, result| Event::Fetched { fetch, index, result };
        let task = self.pools.clone().fetch(parts, self.inbox.clone(), event);
        self.fetches.insert(fetch, self.runtime.spawn(task).abort_handle());
    }

    pub(crate) fn cancel_fetch(&mut self, fetch: FetchId) {
        if let Some(task) = self.fetches.remove(&fetch) {
            task.abort();
        }
    }

    /// Tells all coordinators to assign nothing new to this worker.
    pub(crate) fn leave(&self) {
        self.uplink.broadcast(&WorkerEvent::Leaving);
    }

    /// Changes the report of the next heartbeat.
    pub(crate) fn report(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.report.lock());
    }
}

impl Links {
    /// Runs an engine on a thread of its own and feeds its inbox until `shutdown`. Then tells the coordinators that this worker leaves, and
    /// the engine to hand its jobs back.
    pub(crate) async fn drive(
        &mut self,
        engine: impl Driven<Event = Event> + Send + 'static,
        events: mpsc::Receiver<Event>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), EngineEnded> {
        let mut thread = tokio::task::spawn_blocking(move || drive::drive(engine, events));
        drive::pump(&mut self.events, &self.inbox, &mut thread, shutdown).await?;
        tracing::info!("draining: work goes back to its coordinators");
        self.uplink.broadcast(&WorkerEvent::Leaving);
        let _ = self.inbox.send(Event::Drain).await;
        drive::joined(thread.await)
    }

    /// Sends the messages still queued for coordinators (bounded), and closes all connections.
    pub(crate) async fn close(mut self) {
        if let Some(uplink) = Arc::into_inner(self.uplink) {
            // Messages that arrive during the good-bye are received and dropped.
            tokio::join!(uplink.close(), async { while self.events.recv().await.is_some() {} });
        }
        self.endpoint.close().await;
    }
}
