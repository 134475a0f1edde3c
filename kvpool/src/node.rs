//! The pool node as a process: it serves clients, keeps deadlines and informs coordinators.
//!
//! ```text
//!   clients ──► [session]s ──► [store] of the client's layout ──► [member] of the model's workers ──► coordinators
//!                  ▲                 │  ▲           │
//!                  └──── answers ─────┘  │           └──► [shared]: all directories, and the memory
//!                                        └──► [nvme]: the disk's threads, [objects]: the bucket's
//! ```
//!
//! A node keeps the blocks of one model or of several. Each model sees the node as a worker of its own, with its own blocks, events and
//! figures; all of them have one memory. A model's disk is its own.

mod drain;
mod member;
pub mod nvme;
mod objects;
mod rails;
mod session;
mod shared;
mod store;
mod streams;

use crate::{
    arena::{ArenaError, Memory},
    core::{
        directory::{Directory, DiskUsage, Limits},
        division::Share,
        eviction::Policy,
        objects::pack::Kind,
    },
    settings::{self, ModelShare, Settings},
};
use drain::Drain;
use member::{Member, Phase};
use nvme::{Nvme, NvmeThreads, slab::Manifest};
use objects::{ObjectTier, Unstarted};
use parking_lot::Mutex;
use session::Session;
use shared::Shared;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};
use store::{Store, Tiers};
use tidemill_net::{
    identity::PeerRole,
    link::{Endpoint, LinkError},
};
use tidemill_proto::{
    block::Shard,
    message::{self, Blocks, Counters, Report, RoleInfo, TierBlocks},
    pool::{BLOCK_BYTES_MAX, BlockFormat, Direction, Hello, Transport},
};
use tokio::{
    sync::{Notify, Semaphore, mpsc, watch},
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

/// The most connections at once. Further ones are refused.
const CLIENTS_MAX: usize = 1024;
/// The most layouts at once. Further ones are refused unless one has no clients.
const LAYOUTS_MAX: usize = 16;
/// The longest delay with which a deadline is noticed.
const TICK: Duration = Duration::from_millis(20);

/// The state that all tasks of a node share.
#[derive(Debug)]
struct Node {
    shared: Arc<Shared>,
    /// The models whose blocks it keeps: at least one.
    models: Vec<Model>,
    prefault: AtomicBool,
    limits: Limits,
    policy: Policy,
    tenant_share: u8,
    /// The stores of all layouts. The last one of a model is the one that its coordinators know.
    stores: Mutex<Vec<OpenStore>>,
}

/// A model whose blocks the node keeps.
#[derive(Debug)]
struct Model {
    name: Option<String>,
    share: Share,
    /// Whether a disk is configured, even if it could not be opened.
    wants_nvme: bool,
    nvme: Option<Nvme>,
    objects: Option<settings::Objects>,
    /// Notified when there are events to announce.
    changed: Arc<Notify>,
}

/// A layout's store. It is created for the first client, which states the size of a block, or earlier for blocks found on disk.
#[derive(Debug)]
struct OpenStore {
    model: usize,
    store: Arc<Store>,
}

/// The reason why a node cannot run.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

/// Runs a pool node until `shutdown`, and then until it has handed over its blocks.
pub async fn run(settings: Settings, shutdown: impl Future<Output = ()>) -> Result<(), NodeError> {
    let Settings { worker, advertise, dram_bytes, prefault, nvme, objects, policy, tenant_share, rdma, limits, drain, models } = settings;
    let endpoint = Endpoint::bind(worker.bind, &worker.identity)?;
    let addr = advertise.unwrap_or_else(|| endpoint.local_addr());
    tracing::info!(%addr, dram_bytes, %policy, models = models.len(), reclaim_ms = limits.reclaim_max().as_millis() as u64, "pool node listens");
    let shared = Shared::new(Memory::create(dram_bytes, rand::random())?, rdma);
    let weights: u32 = models.iter().map(|model| model.share.weight).sum();
    let model = |ModelShare { name, share }: &ModelShare| Model {
        name: name.clone(),
        share: *share,
        wants_nvme: nvme.is_some(),
        nvme: nvme.as_ref().and_then(|nvme| Nvme::open(nvme.part_of(name.as_deref().filter(|_| models.len() > 1), share.weight, weights))),
        objects: objects.as_ref().map(|objects| objects.part(models.len() as u32)),
        changed: Arc::default(),
    };
    let models: Vec<Model> = models.iter().map(model).collect();
    let prefault = AtomicBool::new(prefault);
    let node = Arc::new(Node { shared, models, prefault, limits, policy, tenant_share, stores: Mutex::default() });
    node.recover();

    let (phase, _) = watch::channel(Phase::Serving);
    let (peers_in, mut peers) = mpsc::channel(node.models.len());
    let mut members = JoinSet::new();
    for number in 0..node.models.len() {
        let member = Member::start(&node, number, &endpoint, &worker, RoleInfo::Kvpool { addr });
        members.spawn(member.run(phase.subscribe(), peers_in.clone()));
    }
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
                phase.send_replace(Phase::Leaving);
                drain.begin();
            }
            () = drain.over() => break,
            _ = tick.tick() => node.tick(),
            Some((model, told)) = peers.recv() => drain.peers(model, told),
        }
    }
    tracing::info!("pool node ends");
    accepting.abort();
    phase.send_replace(Phase::Ended);
    while members.join_next().await.is_some() {}
    endpoint.close().await;
    Ok(())
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
    #[error("it keeps blocks of {kept}, not of `{name}`: name that one in the pool node's `models`, or give it pool nodes of its own")]
    NotKept { name: String, kept: String },
    #[error("it keeps blocks of several models, {kept}: say with --model-name which of them this worker serves")]
    Unnamed { kept: String },
    #[error("it keeps blocks of {LAYOUTS_MAX} layouts, and all of them have clients: give some of them pool nodes of their own")]
    Layouts,
    #[error("blocks of {wants} bytes are not between 1 and {BLOCK_BYTES_MAX}")]
    Absurd { wants: u64 },
    #[error("there is no shard {index} of {count}", index = .0.index, count = .0.count)]
    NoSuchShard(Shard),
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl Node {
    /// The store that a model's coordinators know.
    fn store(&self, model: usize) -> Option<Arc<Store>> {
        self.stores.lock().iter().rfind(|open| open.model == model).map(|open| Arc::clone(&open.store))
    }

    fn tick(&self) {
        let stores: Vec<Arc<Store>> = self.stores.lock().iter().map(|open| Arc::clone(&open.store)).collect();
        stores.iter().for_each(|store| store.tick());
        self.shared.tick();
    }

    /// Offers the blocks on disk before the first client comes, since they most likely belong to the same model.
    fn recover(&self) {
        for (number, model) in self.models.iter().enumerate() {
            let Some(manifest) = model.nvme.as_ref().and_then(|nvme| nvme.manifest()) else { continue };
            match self.create_store(number, manifest, true) {
                Ok(store) => self.stores.lock().push(OpenStore { model: number, store }),
                Err(error) => tracing::warn!(%error, "what is on disk cannot be offered"),
            }
        }
    }

    /// The model of a client.
    fn model_of(&self, hello: &Hello) -> Result<usize, Refusal> {
        let kept =
            || self.models.iter().map(|model| format!("`{}`", model.name.as_deref().unwrap_or_default())).collect::<Vec<_>>().join(", ");
        match (&hello.model, &self.models[..]) {
            (_, [Model { name: None, .. }]) | (None, [_]) => Ok(0),
            (None, _) => Err(Refusal::Unnamed { kept: kept() }),
            (Some(name), models) => {
                let place = models.iter().position(|model| model.name.as_ref() == Some(name));
                place.ok_or_else(|| Refusal::NotKept { name: name.clone(), kept: kept() })
            }
        }
    }

    /// The store of a client's layout, created if this is its first client. If the blocks on the model's disk are of another layout, which
    /// no client uses, the disk is wiped.
    fn store_for(&self, hello: &Hello) -> Result<Arc<Store>, Refusal> {
        let BlockFormat { layout, shard, block_bytes } = hello.blocks;
        if !shard.is_valid() {
            return Err(Refusal::NoSuchShard(shard));
        }
        if !(1..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(Refusal::Absurd { wants: block_bytes });
        }
        let model = self.model_of(hello)?;
        let stores = &mut *self.stores.lock();
        let of_model = |open: &OpenStore| open.model == model;
        let is_it =
            |open: &OpenStore| of_model(open) && open.store.layout() == layout && open.store.arena().block_bytes() as u64 == block_bytes;
        if let Some(place) = stores.iter().position(is_it) {
            if !stores.iter().any(|open| of_model(open) && open.store.is_in_use()) {
                // The layouts that came after this one are not used any more.
                let open = stores.remove(place);
                stores.push(open);
                self.models[model].changed.notify_one();
            }
            return Ok(Arc::clone(&stores.iter().find(|open| is_it(open)).expect("it is there").store));
        }
        // Blocks of an earlier layout of the model are of no use.
        stores.retain(|open| !of_model(open) || !self.dismiss(open));
        if stores.len() >= LAYOUTS_MAX {
            let place = stores.iter().position(|open| self.dismiss(open)).ok_or(Refusal::Layouts)?;
            stores.remove(place);
        }
        let has_disk = !stores.iter().any(of_model);
        if !has_disk && self.models[model].nvme.is_some() {
            tracing::warn!(%layout, "the model's disk is another layout's, which has clients: this one goes on without it");
        }
        let store = self.create_store(model, Manifest::new(block_bytes, layout), has_disk)?;
        stores.push(OpenStore { model, store: Arc::clone(&store) });
        Ok(store)
    }

    /// Ends the store of a layout that has no clients, so that others can have its memory. Returns `false` if it has some.
    fn dismiss(&self, open: &OpenStore) -> bool {
        let store = &open.store;
        if store.is_in_use() {
            return false;
        }
        tracing::info!(layout = %store.layout(), "no client uses this layout any more: its blocks are forgotten");
        store.close();
        true
    }

    fn create_store(&self, number: usize, manifest: Manifest, has_disk: bool) -> Result<Arc<Store>, Refusal> {
        let Manifest { block_bytes, layout, .. } = manifest;
        let model = &self.models[number];
        let arena = self.shared.memory().arena(block_bytes)?;
        let slots = arena.slots();
        tracing::info!(slots, block_bytes, model = model.name, "arena created");
        let mut directory = Directory::new(slots, self.limits, self.policy.build(slots));
        let nvme = model.nvme.as_ref().filter(|_| has_disk);
        if nvme.and_then(Nvme::manifest).is_some_and(|left| left != manifest) {
            tracing::warn!("what is on disk was left for another layout: the disk is wiped");
        }
        let io = nvme.and_then(|nvme| nvme.prepare(manifest)).map(Arc::new);
        if let Some(io) = &io {
            directory = directory.with_disk(io.slots(), self.policy.build(io.slots()));
        }
        directory = directory.with_tenant_share(self.tenant_share);
        if let Some(io) = &io {
            io.recover(&mut directory);
        }
        let bucket = model.bucket(Kind { layout, block_bytes });
        let tier = bucket.as_ref().map(|bucket| Arc::clone(&bucket.tier));
        if let Some(tier) = &tier {
            directory = directory.with_objects(tier.uses_min(), tier.deadline());
        }
        let tiers = Tiers { disk: io.clone(), objects: tier };
        let store = Store::new(&self.shared, (layout, model.share), arena, directory, tiers, Arc::clone(&model.changed));
        let store = store.ok_or(Refusal::Layouts)?;
        if let Some(bucket) = bucket {
            bucket.start(&store);
        }
        if let Some(io) = &io
            && let Err(error) = NvmeThreads::start(&store, io)
        {
            tracing::error!(%error, "the disk's threads do not start");
            store.apply(|directory, _| directory.disk_failed());
        }
        if self.prefault.swap(false, Relaxed) {
            let memory = Arc::clone(self.shared.memory());
            thread::spawn(move || match memory.prefault() {
                Ok(()) => tracing::info!("arena prefaulted"),
                Err(error) => tracing::warn!(%error, "the arena's memory is taken as blocks arrive"),
            });
        }
        model.changed.notify_one();
        Ok(store)
    }

    /// The node's figures as a worker of this model.
    fn report(&self, number: usize) -> Report {
        let model = &self.models[number];
        let mut counters = Counters::default();
        let mut blocks = TierBlocks::default();
        if let Some(store) = self.store(number) {
            counters.transfer[(Transport::Quic, Direction::Put)].bytes = store.traffic.put_bytes.load(Relaxed);
            counters.transfer[(Transport::Quic, Direction::Get)].bytes = store.traffic.get_bytes.load(Relaxed);
            let (slots, usage, disk) = store.apply(|directory, _| (directory.slots(), directory.usage(), directory.disk_usage()));
            let bytes_per_block = store.arena().block_bytes() as u64;
            blocks.dram = Blocks {
                total: slots as u64,
                free: usage.free as u64,
                cached: usage.cached as u64,
                used: (usage.reserved + usage.leased + usage.quarantined) as u64,
                bytes_per_block,
            };
            if let Some(DiskUsage { free, cached, busy }) = disk {
                let [free, cached, used] = [free, cached, busy].map(|n| n as u64);
                blocks.nvme = Blocks { total: free + cached + used, free, cached, used, bytes_per_block };
            }
            let missing = message::Disk { given_up: u64::from(model.wants_nvme), ..Default::default() };
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

impl Model {
    /// The bucket, or `None` if none is configured or it cannot be used. A node without one still works, but loses blocks sooner.
    fn bucket(&self, kind: Kind) -> Option<Unstarted> {
        let settings = self.objects.clone()?;
        ObjectTier::prepare(settings, kind).inspect_err(|error| tracing::error!(%error, "this node goes on without object storage")).ok()
    }
}
