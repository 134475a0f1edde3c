//! The pool node as a process: it serves clients, keeps deadlines and informs coordinators.
//!
//! ```text
//!   clients ──► [session]s ──► [store]: directory + arena ──► [announce] ──► coordinators
//!                  ▲                 │  ▲
//!                  └──── answers ─────┘  └──► [nvme]: the disk's threads, [objects]: the bucket's
//! ```

mod drain;
pub mod nvme;
mod objects;
mod rails;
mod session;
mod store;
mod streams;

use crate::{
    arena::{Arena, ArenaError},
    core::{
        announce::Announcer,
        directory::{Directory, DiskUsage, Limits},
        eviction::Policy,
        objects::pack::Kind,
    },
    settings::{self, Settings},
    transport::rdma::DeviceNames,
};
use drain::Drain;
use nvme::{Nvme, NvmeThreads, slab::Manifest};
use objects::{ObjectTier, Unstarted};
use parking_lot::Mutex;
use session::Session;
use std::{
    mem,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};
use store::Store;
use tidemill_net::{
    identity::PeerRole,
    link::{Endpoint, LinkError},
    uplink::{LinkEvent, Uplink},
};
use tidemill_proto::{
    block::{LayoutFingerprint, Shard},
    message::{self, Blocks, Counters, Report, RoleInfo, TierBlocks, ToWorker, WorkerEvent},
    pool::{BLOCK_BYTES_MAX, BlockFormat, Direction, Transport},
};
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

/// The most connections at once. Further ones are refused.
const CLIENTS_MAX: usize = 1024;
/// The longest delay with which a deadline is noticed.
const TICK: Duration = Duration::from_millis(20);

/// The state that all tasks of a node share.
#[derive(Debug)]
struct Node {
    dram_bytes: u64,
    prefault: bool,
    /// Whether a disk is configured, even if it could not be opened.
    wants_nvme: bool,
    nvme: Option<Nvme>,
    objects: Option<settings::Objects>,
    limits: Limits,
    policy: Policy,
    tenant_share: u8,
    rdma: DeviceNames,
    store: Mutex<Option<OpenStore>>,
    /// The layout of its clients' blocks, set by the first client.
    layout: OnceLock<LayoutFingerprint>,
    /// Notified when there are events to announce.
    changed: Arc<Notify>,
    traffic: Traffic,
}

/// The store. It is created for the first client, which states the size of a block, or earlier for blocks found on disk.
#[derive(Debug)]
struct OpenStore {
    store: Arc<Store>,
    /// The manifest of blocks that were found on disk, until the first client that uses the same layout.
    recovered: Option<Manifest>,
}

/// Bytes that the node itself moved, which happens only over QUIC.
#[derive(Debug, Default)]
struct Traffic {
    put_bytes: AtomicU64,
    get_bytes: AtomicU64,
}

/// Runs a pool node until `shutdown`, and then until it has handed over its blocks.
pub async fn run(settings: Settings, shutdown: impl Future<Output = ()>) -> Result<(), LinkError> {
    let Settings { worker, advertise, dram_bytes, prefault, nvme, objects, policy, tenant_share, rdma, limits, drain } = settings;
    let endpoint = Endpoint::bind(worker.bind, &worker.identity)?;
    let addr = advertise.unwrap_or_else(|| endpoint.local_addr());
    tracing::info!(%addr, dram_bytes, %policy, reclaim_ms = limits.reclaim_max().as_millis() as u64, "pool node listens");
    let node = Arc::new(Node {
        dram_bytes,
        prefault,
        wants_nvme: nvme.is_some(),
        nvme: nvme.and_then(Nvme::open),
        objects,
        limits,
        policy,
        tenant_share,
        rdma,
        store: Mutex::default(),
        layout: OnceLock::new(),
        changed: Arc::default(),
        traffic: Traffic::default(),
    });
    node.recover();

    let register = worker.register(RoleInfo::Kvpool { addr });
    let reporting = Arc::clone(&node);
    let (uplink, mut links) = Uplink::start(&endpoint, &worker.coordinators, register, Arc::new(move || reporting.report()));
    let mut announcer = Announcer::new(worker.coordinators.len());
    let mut sessions = Sessions { tasks: JoinSet::new(), permits: Arc::new(Semaphore::new(CLIENTS_MAX)), next: 0 };
    let mut drain = Drain::new(Arc::clone(&node), endpoint.clone(), drain);
    let mut room_is_known = false;
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
            () = node.changed.notified() => {
                let store = node.store();
                if store.is_some() && !mem::replace(&mut room_is_known, true) {
                    // Coordinators should know the free room before the next heartbeat.
                    uplink.broadcast(&WorkerEvent::Heartbeat(Box::new(node.report())));
                }
                announce(&mut announcer, store.as_deref(), &uplink);
            }
            Some((link, event)) = links.recv() => match event {
                LinkEvent::Up => {
                    announcer.up(link);
                    announce(&mut announcer, node.store().as_deref(), &uplink);
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

/// Brings every coordinator up to date.
fn announce(announcer: &mut Announcer, store: Option<&Store>, uplink: &Uplink) {
    let announcement = match store {
        Some(store) => store.announce(announcer),
        None => announcer.announce(None),
    };
    if announcement.repeats {
        tracing::warn!("events were lost: telling everything again");
    }
    for (link, event) in announcement.messages {
        if !uplink.send(link, event) {
            // The uplink ends a link whose queue is full, and reports it.
            announcer.down(link);
        }
    }
}

/// The tasks that serve clients. Dropping this ends them.
struct Sessions {
    tasks: JoinSet<()>,
    permits: Arc<Semaphore>,
    next: u64,
}

impl Sessions {
    async fn accept(&mut self, endpoint: &Endpoint, node: &Arc<Node>) {
        let mut listener = endpoint.listen();
        while let Some(connection) = listener.accept().await {
            // Engines, and other nodes while they drain.
            if let Err(error) = connection.expect(&[PeerRole::Prefill, PeerRole::Decode, PeerRole::Kvpool]) {
                tracing::warn!(%error, "refused");
                continue;
            }
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

/// The reason why a client is refused, as the text that it is sent.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("blocks have {has} bytes at this node, not {wants}: give each model its own pool nodes")]
    BlockBytes { has: usize, wants: u64 },
    #[error("blocks of {wants} bytes are not between 1 and {BLOCK_BYTES_MAX}")]
    Absurd { wants: u64 },
    #[error("there is no shard {index} of {count}", index = .0.index, count = .0.count)]
    NoSuchShard(Shard),
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl Node {
    fn store(&self) -> Option<Arc<Store>> {
        self.store.lock().as_ref().map(|open| Arc::clone(&open.store))
    }

    /// Offers the blocks on disk before the first client comes, since they most likely belong to the same model.
    fn recover(&self) {
        let Some(manifest) = self.nvme.as_ref().and_then(|nvme| nvme.manifest()) else { return };
        match self.create_store(manifest) {
            Ok(store) => *self.store.lock() = Some(OpenStore { store, recovered: Some(manifest) }),
            Err(error) => tracing::warn!(%error, "what is on disk cannot be offered"),
        }
    }

    /// The store, created for `block_bytes` if this is the first client. If the blocks on disk have another format, the disk is wiped.
    fn store_for(&self, BlockFormat { layout, shard, block_bytes }: BlockFormat) -> Result<Arc<Store>, Refusal> {
        if !shard.is_valid() {
            return Err(Refusal::NoSuchShard(shard));
        }
        if !(1..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(Refusal::Absurd { wants: block_bytes });
        }
        let wanted = Manifest::new(block_bytes, layout);
        let mut open = self.store.lock();
        if let Some(OpenStore { store, .. }) = open.take_if(|open| open.recovered.is_some_and(|manifest| manifest != wanted)) {
            tracing::warn!("what is on disk was left for another model: the disk is wiped");
            store.disk().iter().for_each(|disk| disk.close());
            store.objects().iter().for_each(|objects| objects.close());
        }
        let open = match &mut *open {
            Some(open) => open,
            None => open.insert(OpenStore { store: self.create_store(wanted)?, recovered: None }),
        };
        let has = open.store.arena().block_bytes();
        if has as u64 != block_bytes {
            return Err(Refusal::BlockBytes { has, wants: block_bytes });
        }
        open.recovered = None;
        Ok(Arc::clone(&open.store))
    }

    fn create_store(&self, manifest: Manifest) -> Result<Arc<Store>, ArenaError> {
        let Manifest { block_bytes, layout, .. } = manifest;
        let arena = Arena::create(self.dram_bytes, block_bytes, rand::random())?;
        let slots = arena.slots();
        tracing::info!(slots, block_bytes, "arena created");
        let mut directory = Directory::new(slots, self.limits, self.policy.build(slots));
        let io = self.nvme.as_ref().and_then(|nvme| nvme.prepare(manifest)).map(Arc::new);
        if let Some(io) = &io {
            directory = directory.with_disk(io.slots(), self.policy.build(io.slots()));
        }
        directory = directory.with_tenant_share(self.tenant_share);
        if let Some(io) = &io {
            io.recover(&mut directory);
        }
        let bucket = self.bucket(Kind { layout, block_bytes });
        let tier = bucket.as_ref().map(|bucket| Arc::clone(&bucket.tier));
        if let Some(tier) = &tier {
            directory = directory.with_objects(tier.uses_min(), tier.deadline());
        }
        let store = Store::new(arena, directory, io.clone(), tier, self.rdma.clone(), Arc::clone(&self.changed));
        if let Some(bucket) = bucket {
            bucket.start(&store);
        }
        if let Some(io) = &io
            && let Err(error) = NvmeThreads::start(&store, io)
        {
            tracing::error!(%error, "the disk's threads do not start");
            store.apply(|directory, _| directory.disk_failed());
        }
        if self.prefault {
            let store = Arc::clone(&store);
            thread::spawn(move || match store.arena().prefault() {
                Ok(()) => tracing::info!("arena prefaulted"),
                Err(error) => tracing::warn!(%error, "the arena's memory is taken as blocks arrive"),
            });
        }
        self.changed.notify_one();
        Ok(store)
    }

    /// The bucket, or `None` if none is configured or it cannot be used. A node without one still works, but loses blocks sooner.
    fn bucket(&self, kind: Kind) -> Option<Unstarted> {
        let settings = self.objects.clone()?;
        ObjectTier::prepare(settings, kind).inspect_err(|error| tracing::error!(%error, "this node goes on without object storage")).ok()
    }

    fn report(&self) -> Report {
        let mut counters = Counters::default();
        counters.transfer[(Transport::Quic, Direction::Put)].bytes = self.traffic.put_bytes.load(Relaxed);
        counters.transfer[(Transport::Quic, Direction::Get)].bytes = self.traffic.get_bytes.load(Relaxed);
        let mut blocks = TierBlocks::default();
        if let Some(store) = self.store() {
            let (usage, disk) = store.apply(|directory, _| (directory.usage(), directory.disk_usage()));
            let bytes_per_block = store.arena().block_bytes() as u64;
            blocks.dram = Blocks {
                total: u64::from(store.arena().slots()),
                free: usage.free as u64,
                cached: usage.cached as u64,
                used: (usage.reserved + usage.leased + usage.quarantined) as u64,
                bytes_per_block,
            };
            if let Some(DiskUsage { free, cached, busy }) = disk {
                let [free, cached, used] = [free, cached, busy].map(|n| n as u64);
                blocks.nvme = Blocks { total: free + cached + used, free, cached, used, bytes_per_block };
            }
            let missing = message::Disk { given_up: u64::from(self.wants_nvme), ..Default::default() };
            counters.rails.fenced = store.fenced.load(Relaxed);
            counters.disk = store.disk().map_or(missing, NvmeThreads::counters);
            if let Some(objects) = store.objects() {
                counters.objects = objects.counters();
                blocks.object = objects.blocks(&store);
            }
        }
        Report { blocks, counters, ..Report::default() }
    }
}
