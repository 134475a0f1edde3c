//! The pool node as a process: listens for clients, keeps deadlines, tells coordinators.
//!
//! ```text
//!   clients ──► [session]s ──► [store]: directory + arena ──► [announce] ──► coordinators
//!                  ▲                 │
//!                  └── what to tell ─┘
//! ```

mod announce;
mod drain;
mod session;
mod store;
mod streams;

use crate::{
    arena::{Arena, ArenaError},
    directory::{Directory, Limits},
    eviction::Policy,
    settings::Settings,
};
use announce::Announcer;
use drain::Drain;
use parking_lot::Mutex;
use session::Session;
use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use store::Store;
use tidemill_proto::{
    block::LayoutFingerprint,
    link::{Endpoint, LinkError},
    message::{Blocks, Counters, Report, RoleInfo, TierBlocks, ToWorker, WorkerEvent},
    pool::BLOCK_BYTES_MAX,
    uplink::{LinkEvent, Uplink},
};
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

/// Connections at once. More are closed as they come.
const CLIENTS_MAX: usize = 1024;
/// How late a deadline may be noticed.
const TICK: Duration = Duration::from_millis(20);

/// What all tasks of a node share.
#[derive(Debug)]
struct Node {
    dram_bytes: u64,
    limits: Limits,
    policy: Policy,
    /// Made for the first client, who says how large a block is.
    store: Mutex<Option<Arc<Store>>>,
    /// What its clients store; the first one says it.
    layout: OnceLock<LayoutFingerprint>,
    /// Set when there are events to announce.
    changed: Arc<Notify>,
    traffic: Traffic,
}

/// Bytes that the node itself moved, over QUIC.
#[derive(Debug, Default)]
struct Traffic {
    put_bytes: AtomicU64,
    get_bytes: AtomicU64,
}

/// Runs a pool node until `shutdown`, and then until it has handed over what it holds.
pub async fn run(settings: Settings, shutdown: impl Future<Output = ()>) -> Result<(), LinkError> {
    let Settings { worker, advertise, dram_bytes, policy, limits, drain } = settings;
    let endpoint = Endpoint::bind(worker.bind, &worker.identity)?;
    let addr = advertise.unwrap_or_else(|| endpoint.local_addr());
    tracing::info!(%addr, dram_bytes, %policy, reclaim_ms = limits.reclaim_max().as_millis() as u64, "pool node listens");
    let node = Arc::new(Node {
        dram_bytes,
        limits,
        policy,
        store: Mutex::default(),
        layout: OnceLock::new(),
        changed: Arc::default(),
        traffic: Traffic::default(),
    });

    let register = worker.register(RoleInfo::Kvpool { addr });
    let reporting = Arc::clone(&node);
    let (uplink, mut links) = Uplink::start(&endpoint, &worker.coordinators, register, Arc::new(move || reporting.report()));
    let mut announcer = Announcer::new(worker.coordinators.len());
    let mut sessions = Sessions { tasks: JoinSet::new(), permits: Arc::new(Semaphore::new(CLIENTS_MAX)), next: 0 };
    let mut drain = Drain::new(Arc::clone(&node), endpoint.clone(), drain);
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);

    tokio::pin!(shutdown);
    let accepting = tokio::spawn({
        let (endpoint, node) = (endpoint.clone(), Arc::clone(&node));
        async move { sessions.accept(&endpoint, &node).await }
    });
    loop {
        tokio::select! {
            () = &mut shutdown, if !drain.has_begun() => {
                tracing::info!("pool node leaves");
                uplink.broadcast(&WorkerEvent::Leaving);
                drain.begin();
            }
            () = drain.over() => break,
            _ = tick.tick() => {
                if let Some(store) = node.store() {
                    store.apply(|directory, now| directory.tick(now));
                }
            }
            () = node.changed.notified() => announcer.announce(node.store().as_deref(), &uplink),
            Some((link, event)) = links.recv() => match event {
                LinkEvent::Up => {
                    announcer.up(link);
                    announcer.announce(node.store().as_deref(), &uplink);
                }
                LinkEvent::Down => announcer.down(link),
                LinkEvent::Message(message) => match *message {
                    ToWorker::Peers(peers) => drain.peers(peers),
                    message => tracing::warn!(?message, "a pool node has no use for this message"),
                },
            },
        }
    }
    tracing::info!("pool node ends");
    accepting.abort();
    uplink.close().await;
    endpoint.close().await;
    Ok(())
}

/// Clients being served. They end with this.
struct Sessions {
    tasks: JoinSet<()>,
    permits: Arc<Semaphore>,
    next: u64,
}

impl Sessions {
    async fn accept(&mut self, endpoint: &Endpoint, node: &Arc<Node>) {
        let mut listener = endpoint.listen();
        while let Some(connection) = listener.accept().await {
            while self.tasks.try_join_next().is_some() {}
            let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
                tracing::warn!(client = %connection.peer(), "refused: {CLIENTS_MAX} clients are connected");
                connection.close("too many clients");
                continue;
            };
            self.next += 1;
            let session = Session::new(Arc::clone(node), connection, self.next);
            self.tasks.spawn(async move {
                session.run().await;
                drop(permit);
            });
        }
    }
}

/// Why a client is not served; the text goes to it.
#[derive(Debug, thiserror::Error)]
enum Unwelcome {
    #[error("blocks have {has} bytes at this node, not {wants}: give each model its own pool nodes")]
    BlockBytes { has: usize, wants: u64 },
    #[error("blocks of {wants} bytes are not between 1 and {BLOCK_BYTES_MAX}")]
    Absurd { wants: u64 },
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl Node {
    fn store(&self) -> Option<Arc<Store>> {
        self.store.lock().clone()
    }

    /// The store, carved into slots for `block_bytes` if this is the first client.
    fn store_for(&self, block_bytes: u64) -> Result<Arc<Store>, Unwelcome> {
        if !(1..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(Unwelcome::Absurd { wants: block_bytes });
        }
        let mut store = self.store.lock();
        match &*store {
            Some(store) if store.arena().block_bytes() as u64 == block_bytes => Ok(Arc::clone(store)),
            Some(store) => Err(Unwelcome::BlockBytes { has: store.arena().block_bytes(), wants: block_bytes }),
            None => {
                let arena = Arena::create(self.dram_bytes, block_bytes, rand::random())?;
                let slots = arena.slots();
                tracing::info!(slots, block_bytes, "arena carved");
                let directory = Directory::new(slots, self.limits, self.policy.build(slots));
                Ok(Arc::clone(store.insert(Arc::new(Store::new(arena, directory, Arc::clone(&self.changed))))))
            }
        }
    }

    fn report(&self) -> Report {
        let mut counters = Counters::default();
        counters.transfer.quic_put.bytes = self.traffic.put_bytes.load(Relaxed);
        counters.transfer.quic_get.bytes = self.traffic.get_bytes.load(Relaxed);
        let dram = self.store().map_or(Blocks::default(), |store| {
            let usage = store.apply(|directory, _| directory.usage());
            Blocks {
                total: u64::from(store.arena().slots()),
                free: usage.free as u64,
                cached: usage.cached as u64,
                used: (usage.reserved + usage.leased + usage.quarantined) as u64,
                bytes_per_block: store.arena().block_bytes() as u64,
            }
        });
        Report { blocks: TierBlocks { dram, ..TierBlocks::default() }, counters, ..Report::default() }
    }
}
