//! The whole cluster in virtual time: one queue of events, and the processes that handle them.
//!
//! - [`World`]: builds the processes and delivers events
//! - `engine`: a prefill or decode worker; `client`: its way to pool nodes
//! - `pool`: a pool node
//! - `io`: time, messages and bytes on links
//!
//! ```text
//!   asks ──► Cluster ⇄ engines (prefill, decode) ⇄ pool nodes ──► Cluster        every arrow takes its time on a link
//! ```

mod client;
mod engine;
mod io;
mod pool;
#[cfg(test)]
mod tests;

use crate::{
    flows::Deadline,
    hardware::{Device, Gpu, Roofline, Shape, Speed},
    outcome::{Answer, End, LoadPoint},
    random::mix,
    settings::{Class, ClusterShape, InvalidSetting, Settings},
    workload::{self, Ask},
};
use client::PoolClient;
use engine::{Engine, Worker};
use io::Io;
use pool::PoolNode;
use std::{collections::HashMap, time::Duration};
use tidemill_cluster::{
    Action, Cluster, ClusterSettings, NewRequest, Outcome, RequestEvent,
    admission::AdmissionPolicy,
    class::ClassId,
    schedule::{Policy, UnknownPolicy},
};
use tidemill_kvpool::core::{
    directory::{Directory, Limits},
    eviction,
};
use tidemill_proto::{
    block::LayoutFingerprint,
    ids::{Epoch, RequestId},
    message::{EngineInfo, Host, ModelIdentity, Register, RoleInfo, ToWorker, WorkerEvent},
    pool::{CallId, Found, FromPool, LeaseId, ToPool, Written},
    sampling::{Sampling, StopRule},
};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct WorkerIndex(pub(crate) usize);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct PoolIndex(pub(crate) usize);

/// What happens at one moment.
#[derive(Debug)]
pub(crate) enum Event {
    /// A client sends its request.
    Arrive(usize),
    ToCoordinator {
        from: Epoch,
        event: Box<WorkerEvent>,
    },
    ToWorker {
        worker: WorkerIndex,
        message: Box<ToWorker>,
    },
    ToPool {
        worker: WorkerIndex,
        pool: PoolIndex,
        message: Box<ToPool>,
    },
    FromPool {
        worker: WorkerIndex,
        pool: PoolIndex,
        message: Box<FromPool>,
    },
    TransferDue(Deadline),
    StepDone {
        worker: WorkerIndex,
    },
    Heartbeat(WorkerIndex),
    PoolHeartbeat(PoolIndex),
    PoolTick(PoolIndex),
    /// Time passes in the coordinator.
    Tick,
    Sample,
}

/// Blocks on their way between a worker and a pool node.
#[derive(Debug)]
pub(crate) enum Transfer {
    Get { pool: PoolIndex, worker: WorkerIndex, call: CallId, lease: LeaseId, blocks: Vec<Found>, started: Duration },
    Put { pool: PoolIndex, worker: WorkerIndex, call: CallId, written: Vec<Written> },
}

impl Transfer {
    fn ends(&self) -> (WorkerIndex, PoolIndex) {
        match *self {
            Transfer::Get { worker, pool, .. } | Transfer::Put { worker, pool, .. } => (worker, pool),
        }
    }
}

/// A call of the coordinator, for those who time them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Call {
    /// A new request, with the decision where it goes if there is room.
    Submit,
    WorkerEvent,
    Tick,
}

/// Is told when the coordinator computes. What it does with that changes nothing in the world.
pub trait Watch {
    fn begins(&mut self, _: Call) {}
    fn ended(&mut self, _: Call) {}
}

/// Times nothing.
pub struct Unwatched;

impl Watch for Unwatched {}

/// What a run shows.
#[derive(Clone, Debug)]
pub struct Run {
    /// By request, in order of arrival.
    pub answers: Vec<Answer>,
    pub load: Vec<LoadPoint>,
    pub virtual_time: Duration,
    pub events: u64,
    /// Of all events and their times: equal for equal runs.
    pub digest: u64,
    pub network_bytes: f64,
    /// Links that the coordinator closed. None should be: nothing fails here.
    pub closed: u64,
    /// Prefill jobs that failed.
    pub warnings: u64,
}

pub struct World {
    io: Io,
    cluster: Cluster,
    workers: Vec<Box<dyn Worker>>,
    pools: Vec<PoolNode>,
    by_epoch: HashMap<Epoch, WorkerIndex>,
    asks: Vec<Ask>,
    /// The request of each ask that was taken.
    taken: HashMap<RequestId, usize>,
    answers: Vec<Answer>,
    open: usize,
    load: Vec<LoadPoint>,
    vocab: u32,
    timeout: Duration,
    ttft_limit_ms: f64,
    tpot_limit_ms: f64,
    events: u64,
    digest: u64,
    closed: u64,
    warnings: u64,
}

/// As production's.
const TICK: Duration = Duration::from_millis(50);
const POOL_TICK: Duration = Duration::from_millis(100);
const HEARTBEAT: Duration = Duration::from_secs(1);
const HEARTBEAT_DEAD: Duration = Duration::from_secs(5);
const POOL_LIMITS: Limits = Limits { put_deadline: Duration::from_secs(10), lease: Duration::from_secs(10) };
/// Time for everybody to register before the first request comes.
const START: Duration = Duration::from_secs(2);
const SAMPLE: Duration = Duration::from_secs(1);
/// Any will do: all engines have the same.
const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);

impl World {
    /// A cluster that is up, and clients that will send `asks`.
    pub fn new(settings: &Settings, asks: Vec<Ask>, seed: u64) -> Result<Self, InvalidSetting> {
        let shape = settings.shape()?;
        let identity = ModelIdentity { vocab_size: shape.vocab, ..ModelIdentity::default() };
        let policy = &settings.policy;
        let cluster = Cluster::new(
            ClusterSettings {
                id_base: 0,
                admission: AdmissionPolicy { queue_max: policy.queue_max },
                policy: Policy {
                    name: policy.name.parse().map_err(|unknown: UnknownPolicy| InvalidSetting::new("policy.name", unknown.to_string()))?,
                    local_tail_tokens: policy.local_tail_tokens,
                    decode_sequences_max: policy.decode_sequences_max,
                    replicate_after: Some(policy.replicate_after).filter(|reads| *reads > 0),
                },
                classes: settings.workload.cluster_classes()?,
                queue_wait_max: Duration::from_secs_f64(policy.queue_wait_s),
                heartbeat_dead: HEARTBEAT_DEAD,
            },
            identity.clone(),
        );
        let limit = |of: fn(&Class) -> Option<f64>| settings.workload.classes.iter().filter_map(of).fold(f64::INFINITY, f64::min);
        let mut world = Self {
            io: Io::new(&settings.network),
            cluster,
            workers: Vec::new(),
            pools: Vec::new(),
            by_epoch: HashMap::new(),
            open: asks.len(),
            answers: asks.iter().map(Answer::of).collect(),
            asks,
            taken: HashMap::new(),
            load: Vec::new(),
            vocab: shape.vocab,
            timeout: Duration::from_secs_f64(policy.request_timeout_s),
            ttft_limit_ms: limit(|class| class.ttft_ms),
            tpot_limit_ms: limit(|class| class.tpot_ms),
            events: 0,
            digest: 0,
            closed: 0,
            warnings: 0,
        };
        world.start(settings, shape, &identity, seed)?;
        Ok(world)
    }

    /// Runs until every request has ended.
    pub fn run(mut self, watch: &mut dyn Watch) -> Run {
        while self.open > 0 && self.step(watch) {}
        self.finish()
    }

    /// The next event. `false`: there is none.
    pub fn step(&mut self, watch: &mut dyn Watch) -> bool {
        let Some((at, event)) = self.io.queue.pop() else { return false };
        self.io.now = at;
        self.events += 1;
        self.digest = mix(self.digest ^ mix(at.as_nanos() as u64) ^ event.fingerprint());
        self.handle(event, watch);
        true
    }

    /// What has happened so far.
    pub fn finish(self) -> Run {
        Run {
            answers: self.answers,
            load: self.load,
            virtual_time: self.io.now,
            events: self.events,
            digest: self.digest,
            network_bytes: self.io.network_bytes(),
            closed: self.closed,
            warnings: self.warnings,
        }
    }

    fn start(&mut self, settings: &Settings, shape: Shape, identity: &ModelIdentity, seed: u64) -> Result<(), InvalidSetting> {
        let cluster = &settings.cluster;
        let (prefill, decode) = cluster.split()?;
        let gpu = ClusterShape::gpu(&cluster.gpu)?;
        let mut groups = vec![(prefill, decode, gpu, cluster.gpus_per_instance)];
        for others in &cluster.others {
            groups.push((others.prefill, others.decode, ClusterShape::gpu(&others.gpu)?, others.gpus_per_instance));
        }
        let instances: u32 = groups.iter().map(|(prefill, decode, ..)| prefill + decode).sum();
        let hosts = instances.div_ceil(cluster.instances_per_host.max(1)) as usize;
        self.start_pools(cluster, shape, hosts)?;
        let mut number = 0;
        for (prefill, decode, gpu, gpus) in groups {
            for decodes in std::iter::repeat_n(false, prefill as usize).chain(std::iter::repeat_n(true, decode as usize)) {
                let device = device(settings, shape, gpu, gpus, decodes, mix(seed).wrapping_add(number as u64));
                let blocks = cluster.device_blocks.map_or_else(|| device_blocks(cluster, shape, gpu, gpus), Ok)?;
                let bus = settings.network.bus_gb_per_s * 1e9 * f64::from(gpus);
                self.start_engine(cluster, shape, identity, (number % hosts, bus), (device, blocks), decodes)?;
                number += 1;
            }
        }
        for (number, ask) in self.asks.iter().enumerate() {
            self.io.queue.push(START + ask.at, Event::Arrive(number));
        }
        for answer in &mut self.answers {
            answer.at += START;
        }
        self.io.queue.push(TICK, Event::Tick);
        self.io.queue.push(START, Event::Sample);
        self.perform();
        Ok(())
    }

    fn start_pools(&mut self, cluster: &ClusterShape, shape: Shape, hosts: usize) -> Result<(), InvalidSetting> {
        let policy: eviction::Policy = cluster
            .eviction
            .parse()
            .map_err(|unknown: eviction::UnknownPolicy| InvalidSetting::new("cluster.eviction", unknown.to_string()))?;
        let slots = (cluster.pool_gib_per_host * f64::from(1 << 30) / shape.block_bytes() as f64) as u32;
        for _ in 0..hosts {
            let index = self.io.add_host();
            let role = RoleInfo::Kvpool { addr: io::address(index) };
            let epoch = self.register(format!("kvpool-{}", index.0), index.0, role)?;
            let directory = Directory::new(slots, POOL_LIMITS, policy.build(slots));
            self.pools.push(PoolNode::new(index, epoch, directory, slots, shape.block_bytes(), POOL_LIMITS.put_deadline));
            self.io.queue.push(Duration::ZERO, Event::PoolHeartbeat(index));
            self.io.queue.push(POOL_TICK, Event::PoolTick(index));
        }
        Ok(())
    }

    fn start_engine(
        &mut self,
        cluster: &ClusterShape,
        shape: Shape,
        model: &ModelIdentity,
        (host, bus): (usize, f64),
        (device, device_blocks): (Device, u32),
        decodes: bool,
    ) -> Result<(), InvalidSetting> {
        let index = self.io.add_worker(host, bus);
        // As the roles' settings have it.
        let work_max = if decodes { 4 * cluster.sequences_max } else { PREFILL_JOBS_MAX };
        let info = EngineInfo {
            model: model.clone(),
            layout: LAYOUT,
            block_bytes: shape.block_bytes(),
            device_blocks,
            context_tokens: shape.context_tokens,
            work_max: work_max as u32,
        };
        let (name, role) = if decodes { ("decode", RoleInfo::Decode(info)) } else { ("prefill", RoleInfo::Prefill(info)) };
        let epoch = self.register(format!("{name}-{}", index.0), host, role)?;
        let client = PoolClient::new(index, shape.block_bytes(), cluster.putting_max);
        let worker: Box<dyn Worker> = if decodes {
            let limits = tidemill_decode::limits::Limits {
                sequences_max: cluster.sequences_max,
                waiting_max: 1024,
                step_tokens: cluster.decode_step_tokens,
                context_tokens: shape.context_tokens as usize,
                vocab: shape.vocab as usize,
            };
            let role = tidemill_decode::scheduler::Scheduler::new(LAYOUT, device_blocks, limits);
            Box::new(Engine::new(index, epoch, role, device, client, shape.vocab, shape.block_bytes()))
        } else {
            let limits = tidemill_prefill::scheduler::Limits {
                admitted_max: cluster.admitted_max,
                jobs_max: PREFILL_JOBS_MAX,
                step_tokens: cluster.prefill_step_tokens,
                putting_max: cluster.putting_max,
                vocab: shape.vocab as usize,
            };
            let role = tidemill_prefill::scheduler::Scheduler::new(LAYOUT, device_blocks, limits);
            Box::new(Engine::new(index, epoch, role, device, client, shape.vocab, shape.block_bytes()))
        };
        self.workers.push(worker);
        self.by_epoch.insert(epoch, index);
        // Heartbeats of many workers do not come at once.
        self.io.queue.push(HEARTBEAT.mul_f64((index.0 as f64 * 0.618) % 1.0), Event::Heartbeat(index));
        Ok(())
    }

    fn register(&mut self, name: String, host: usize, role: RoleInfo) -> Result<Epoch, InvalidSetting> {
        let register = Register { name, host: Host(format!("host-{host}")), pid: 1, model: None, role };
        self.cluster.register(self.io.now, register).map_err(|refusal| InvalidSetting::new("cluster", refusal.to_string()))
    }

    fn handle(&mut self, event: Event, watch: &mut dyn Watch) {
        let now = self.io.now;
        match event {
            Event::Arrive(number) => self.arrive(number, watch),
            Event::ToCoordinator { from, event } => {
                watch.begins(Call::WorkerEvent);
                self.cluster.worker_event(now, from, *event);
                watch.ended(Call::WorkerEvent);
                self.perform();
            }
            Event::Tick => {
                watch.begins(Call::Tick);
                self.cluster.tick(now);
                watch.ended(Call::Tick);
                self.perform();
                self.io.after(TICK, Event::Tick);
            }
            Event::ToWorker { worker, message } => self.workers[worker.0].receive(&mut self.io, message),
            Event::ToPool { worker, pool, message } => self.pools[pool.0].handle(&mut self.io, worker, *message),
            Event::FromPool { worker, pool, message } => self.workers[worker.0].pool_answered(&mut self.io, pool, *message),
            Event::TransferDue(deadline) => match self.io.transferred(deadline) {
                Some(Transfer::Get { pool, worker, call, lease, blocks, started }) => {
                    let valid = self.pools[pool.0].read(&mut self.io, worker, lease, &blocks);
                    self.workers[worker.0].received(&mut self.io, pool, call, &blocks, &valid, started);
                }
                Some(Transfer::Put { pool, worker, call, written }) => self.pools[pool.0].written(&mut self.io, worker, call, &written),
                None => {}
            },
            Event::StepDone { worker } => self.workers[worker.0].stepped(&mut self.io),
            Event::Heartbeat(index) => {
                let worker = &mut self.workers[index.0];
                let report = WorkerEvent::Heartbeat(Box::new(worker.report()));
                self.io.tell_coordinator(worker.epoch(), report);
                self.io.after(HEARTBEAT, Event::Heartbeat(index));
            }
            Event::PoolHeartbeat(index) => {
                let pool = &self.pools[index.0];
                self.io.tell_coordinator(pool.epoch, WorkerEvent::Heartbeat(Box::new(pool.report())));
                self.io.after(HEARTBEAT, Event::PoolHeartbeat(index));
            }
            Event::PoolTick(index) => {
                self.pools[index.0].tick(&mut self.io);
                self.io.after(POOL_TICK, Event::PoolTick(index));
            }
            Event::Sample => {
                self.sample();
                self.io.after(SAMPLE, Event::Sample);
            }
        }
    }

    fn arrive(&mut self, number: usize, watch: &mut dyn Watch) {
        let ask = &self.asks[number];
        let request = NewRequest {
            prompt: ask.prompt(self.vocab),
            salt: Vec::new(),
            class: ClassId(ask.class as u8),
            sampling: Sampling { seed: number as u64, ..Sampling::default() },
            stop: StopRule { max_tokens: ask.output_tokens, ..StopRule::default() },
            choices: 1,
            constraint: None,
            prompt_logprobs: None,
            embeds: false,
            timeout: self.timeout,
        };
        watch.begins(Call::Submit);
        let submitted = self.cluster.submit(self.io.now, request);
        watch.ended(Call::Submit);
        match submitted {
            Ok(id) => drop(self.taken.insert(id, number)),
            Err(rejection) => self.end(number, End::Rejected(rejection.to_string())),
        }
        self.perform();
    }

    fn perform(&mut self) {
        while let Some(action) = self.cluster.poll_action() {
            match action {
                Action::Send { worker, message } => {
                    if let Some(&index) = self.by_epoch.get(&worker) {
                        self.io.tell_worker(index, message);
                    }
                }
                Action::Client { request, event } => self.client(request, event),
                Action::Close { .. } => self.closed += 1,
                Action::Warn(_) => self.warnings += 1,
            }
        }
    }

    /// A client hears of its request.
    fn client(&mut self, request: RequestId, event: RequestEvent) {
        let Some(&number) = self.taken.get(&request) else { return };
        let (now, answer) = (self.io.now, &mut self.answers[number]);
        match event {
            RequestEvent::Token { token, .. } => {
                assert_eq!(
                    token,
                    workload::token(number as u64, answer.tokens, self.vocab),
                    "request {number} gets its own tokens, in order"
                );
                answer.tokens += 1;
                answer.first_token.get_or_insert(now);
                answer.gap_max = answer.last_token.map_or(Duration::ZERO, |last| answer.gap_max.max(now - last));
                answer.last_token = Some(now);
            }
            RequestEvent::Finished { outcome, usage, .. } => {
                answer.predicted_ttft_ms = usage.predicted_ttft_ms;
                answer.sources = usage.provenance.tokens;
                answer.prefilled_elsewhere = usage.prefill_worker.is_some();
                answer.rescues = usage.rescues;
                self.taken.remove(&request);
                let end = match outcome {
                    Outcome::Stop(_) | Outcome::Length => End::Complete,
                    Outcome::Failed(failure) => End::Failed(failure.to_string()),
                };
                self.end(number, end);
            }
            RequestEvent::PromptLogprobs(_) | RequestEvent::Embedding(_) | RequestEvent::Sources(_) | RequestEvent::Waiting { .. } => {}
        }
    }

    fn end(&mut self, number: usize, end: End) {
        let answer = &mut self.answers[number];
        assert_eq!(answer.end, End::Open, "request {number} ends once");
        (answer.end, answer.ended) = (end, self.io.now);
        self.open -= 1;
    }

    fn sample(&mut self) {
        let loads: Vec<_> = self.workers.iter().map(|worker| worker.load()).collect();
        let mean = |decodes: bool, of: &dyn Fn(&engine::WorkerLoad) -> f64| {
            let values: Vec<f64> = loads.iter().filter(|load| load.decodes == decodes).map(of).collect();
            if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
        };
        let has_prefill = loads.iter().any(|load| !load.decodes);
        self.load.push(LoadPoint {
            s: (self.io.now - START).as_secs_f64(),
            waiting: self
                .taken
                .len()
                .saturating_sub(loads.iter().filter(|load| load.decodes).map(|load| load.load.waiting + load.load.running).sum())
                as u32,
            prefill_tokens: mean(!has_prefill, &|load| load.load.tokens_queued as f64),
            prefill_load: mean(!has_prefill, &|load| load.queue_ms / self.ttft_limit_ms),
            decode_sequences: mean(true, &|load| (load.load.waiting + load.load.running) as f64),
            decode_load: mean(true, &|load| load.last_step_ms / self.tpot_limit_ms),
            decode_blocks: mean(true, &|load| load.blocks.used as f64 / load.blocks.total.max(1) as f64),
        });
    }

    /// Panics if any process' books do not balance. Tests call it.
    pub fn check_integrity(&self) {
        self.cluster.check_integrity();
        self.workers.iter().for_each(|worker| worker.check());
        self.pools.iter().for_each(|pool| pool.directory.check_integrity());
    }

    /// Whether nobody computes, moves or holds anything for a request. Tests ask when all requests have ended.
    pub fn is_idle(&self) -> bool {
        let pool_is_idle = |pool: &PoolNode| {
            let usage = pool.directory.usage();
            (usage.reserved, usage.leased, usage.quarantined) == (0, 0, 0)
        };
        self.open == 0 && self.io.is_quiet() && self.workers.iter().all(|worker| worker.is_idle()) && self.pools.iter().all(pool_is_idle)
    }

    pub fn now(&self) -> Duration {
        self.io.now
    }

    /// What is known of each request by now.
    pub fn answers(&self) -> &[Answer] {
        &self.answers
    }

    /// Requests that have not ended.
    pub fn open(&self) -> usize {
        self.open
    }
}

/// Jobs altogether at a prefill worker, by default.
const PREFILL_JOBS_MAX: usize = 1024;

fn device(settings: &Settings, shape: Shape, gpu: Gpu, gpus: u32, decodes: bool, seed: u64) -> Device {
    let cluster = &settings.cluster;
    let measured = if decodes { cluster.measured_decode } else { cluster.measured_prefill };
    let roofline = || {
        Speed::Roofline(Roofline {
            shape,
            flops_per_s: gpu.tera_flops * 1e12 * f64::from(gpus) * cluster.flops_efficiency,
            bytes_per_s: gpu.memory_gb_per_s * 1e9 * f64::from(gpus) * cluster.memory_efficiency,
            overhead: Duration::from_secs_f64(cluster.overhead_ms / 1e3),
        })
    };
    Device::new(measured.map_or_else(roofline, Speed::Measured), cluster.noise, seed)
}

/// Blocks in what the weights leave of an instance's memory.
fn device_blocks(cluster: &ClusterShape, shape: Shape, gpu: Gpu, gpus: u32) -> Result<u32, InvalidSetting> {
    let memory = gpu.memory_gib * f64::from(gpus) * f64::from(1 << 30) * cluster.memory_share;
    let blocks = (memory - shape.weight_bytes()) / shape.block_bytes() as f64;
    if blocks >= 1.0 {
        Ok(blocks as u32)
    } else {
        Err(InvalidSetting::new("cluster.gpus_per_instance", format!("{} does not fit {gpus} GPUs of kind {}", shape.name, gpu.name)))
    }
}

impl Answer {
    fn of(ask: &Ask) -> Self {
        Self {
            class: ask.class,
            at: ask.at,
            input_tokens: ask.input_tokens,
            first_token: None,
            last_token: None,
            tokens: 0,
            gap_max: Duration::ZERO,
            end: End::Open,
            ended: Duration::ZERO,
            predicted_ttft_ms: None,
            sources: Default::default(),
            prefilled_elsewhere: false,
            rescues: 0,
        }
    }
}

impl Event {
    /// Enough of it to tell two runs apart.
    fn fingerprint(&self) -> u64 {
        let of = |kind: u64, a: usize, b: u64| mix(kind ^ (a as u64) << 8 ^ b << 32);
        match self {
            Event::Arrive(number) => of(1, *number, 0),
            Event::ToCoordinator { from, event } => match &**event {
                WorkerEvent::Tokens(tokens) => tokens.iter().fold(from.0, |digest, token| mix(digest ^ u64::from(token.token))),
                WorkerEvent::PoolEvents { from: first, events } => of(3, events.len(), *first),
                _ => of(4, 0, from.0),
            },
            Event::ToWorker { worker, message } => match &**message {
                ToWorker::Prefill(job) => of(5, worker.0, job.request.0 ^ u64::from(job.blocks) << 16),
                ToWorker::Decode(job) => of(6, worker.0, job.sequence.0 ^ u64::from(job.expected_blocks) << 16),
                _ => of(7, worker.0, 0),
            },
            Event::ToPool { worker, pool, .. } => of(8, worker.0, pool.0 as u64),
            Event::FromPool { worker, pool, .. } => of(9, worker.0, pool.0 as u64),
            Event::TransferDue(deadline) => of(10, 0, u64::from(deadline.version)),
            Event::StepDone { worker } => of(11, worker.0, 0),
            Event::Heartbeat(WorkerIndex(index)) => of(12, *index, 0),
            Event::PoolHeartbeat(PoolIndex(index)) => of(13, *index, 0),
            Event::PoolTick(PoolIndex(index)) => of(14, *index, 0),
            Event::Tick => 15,
            Event::Sample => 16,
        }
    }
}
