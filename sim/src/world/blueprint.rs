//! The making of processes, at the start and after every restart.

use super::{
    CoordinatorIndex, HEARTBEAT_DEAD, LAYOUT, PoolIndex, StageIndex, WorkerIndex,
    bytes::Memory,
    client::PoolClient,
    coordinator::Coordinator,
    disk::Disk,
    engine::{Engine, Parts, Worker},
    group::{self, Group, StageNode},
    io::{self, Io},
    neighbour::{self, Neighbour},
    oracle::{self, Oracle},
    pool::{PoolNode, PoolShape},
    process::Process,
    uplink::Uplink,
};
use crate::{
    hardware::{Device, Gpu, Roofline, Speed},
    random::{Random, mix},
    settings::{Class, ClusterShape, InvalidSetting, Settings, Speculation},
    shape::Shape,
};
use std::time::Duration;
use tidemill_cluster::{
    Cluster, ClusterSettings,
    admission::AdmissionPolicy,
    schedule::{Policy, UnknownPolicy},
};
use tidemill_kvpool::core::{
    directory::{Directory, Limits},
    eviction,
};
use tidemill_proto::{
    message::{EngineInfo, Host, ModelIdentity, Register, RoleInfo},
    stage::Stage,
};

pub(crate) struct Blueprint {
    pub(crate) settings: Settings,
    pub(crate) cluster: ClusterSettings,
    pub(crate) identity: ModelIdentity,
    pub(crate) shape: Shape,
    pub(crate) eviction: eviction::Policy,
    pub(crate) pool: PoolShape,
    pub(crate) limits: Limits,
    pub(crate) waiting_max: usize,
    pub(crate) disk_slots: u32,
    /// Whether pool nodes keep another model's blocks, too.
    pub(crate) neighbour: bool,
    pub(crate) workers: Vec<WorkerPlan>,
    /// The later stages of each worker; workers beyond have none.
    pub(crate) stages: Vec<Vec<StageIndex>>,
    pub(crate) timeout: Duration,
    pub(crate) ttft_limit_ms: f64,
    pub(crate) tpot_limit_ms: f64,
}

pub(crate) struct WorkerPlan {
    pub(crate) host: usize,
    pub(crate) device: Device,
    pub(crate) device_blocks: u32,
    pub(crate) decodes: bool,
    pub(crate) gpus: u32,
}

/// The default number of sequences that may wait at a decode worker.
pub(crate) const WAITING_MAX: usize = 1024;
/// The default total number of jobs at a prefill worker.
const PREFILL_JOBS_MAX: usize = 1024;

impl Blueprint {
    pub(crate) fn new(
        settings: &Settings,
        seed: u64,
        disk_slots: u32,
        (limits, waiting_max): (Limits, usize),
    ) -> Result<Self, InvalidSetting> {
        let (shape, cluster, policy) = (settings.shape()?, &settings.cluster, &settings.policy);
        cluster.speculation.as_ref().map_or(Ok(()), Speculation::check)?;
        let eviction = cluster
            .eviction
            .parse()
            .map_err(|unknown: eviction::UnknownPolicy| InvalidSetting::new("cluster.eviction", unknown.to_string()))?;
        let limit = |of: fn(&Class) -> Option<f64>| settings.workload.classes.iter().filter_map(of).fold(f64::INFINITY, f64::min);
        Ok(Self {
            cluster: ClusterSettings {
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
                probes: None,
                autoscale: cluster.autoscale()?,
            },
            identity: ModelIdentity { vocab_size: shape.vocab, ..ModelIdentity::default() },
            eviction,
            pool: PoolShape {
                slots: (cluster.pool_gib_per_host * f64::from(1 << 30) / shape.block_bytes() as f64) as u32,
                block_bytes: shape.block_bytes(),
                put_deadline: limits.put_deadline,
            },
            limits,
            waiting_max,
            disk_slots,
            neighbour: false,
            workers: workers(settings, shape, seed)?,
            stages: Vec::new(),
            timeout: Duration::from_secs_f64(policy.request_timeout_s),
            ttft_limit_ms: limit(|class| class.ttft_ms),
            tpot_limit_ms: limit(|class| class.tpot_ms),
            shape,
            settings: settings.clone(),
        })
    }

    pub(crate) fn coordinator(&self, index: CoordinatorIndex, id_base: u64) -> Coordinator {
        let settings = ClusterSettings { id_base, ..self.cluster.clone() };
        Coordinator::new(index, Cluster::new(settings, self.identity.clone()), id_base)
    }

    pub(crate) fn pool_node(&self, io: &mut Io, index: PoolIndex, coordinators: usize, disk: Option<Disk>) -> PoolNode {
        let slots = self.pool.slots;
        let mut directory = Directory::new(slots, self.limits, self.eviction.build(slots));
        if let Some(disk) = &disk {
            directory = directory.with_disk(disk.slots(), self.eviction.build(disk.slots()));
        }
        let register = register(format!("kvpool-{}", index.0), index.0, RoleInfo::Kvpool { addr: io::address(index) });
        let uplink = Uplink::new(Process::Pool(index), register, coordinators);
        let neighbour = self.neighbour.then(|| {
            let seed = io.faulty.as_mut().map_or(0, |faulty| faulty.random.draw());
            Neighbour::new(Random::new(seed), self.limits.lease)
        });
        let layouts = neighbour::layouts(slots, directory, neighbour.as_ref().map(|_| (&self.limits, self.eviction)));
        PoolNode::new(io, index, (layouts, neighbour), self.pool, uplink, coordinators, disk)
    }

    pub(crate) fn worker(&self, io: &Io, index: WorkerIndex, coordinators: usize) -> Box<dyn Worker> {
        let WorkerPlan { host, ref device, device_blocks, decodes, .. } = self.workers[index.0];
        let (cluster, shape) = (&self.settings.cluster, self.shape);
        let (vocab, block_bytes) = (shape.vocab, shape.block_bytes());
        // As in the roles' settings.
        let work_max = if decodes { 4 * cluster.sequences_max } else { PREFILL_JOBS_MAX };
        let info = EngineInfo {
            model: self.identity.clone(),
            layout: LAYOUT,
            block_bytes,
            device_blocks,
            state_blocks: 0,
            context_tokens: shape.context_tokens,
            work_max: work_max as u32,
        };
        let (name, role) = if decodes { ("decode", RoleInfo::Decode(info)) } else { ("prefill", RoleInfo::Prefill(info)) };
        let register = register(format!("{name}-{}", index.0), host, role);
        let uplink = Uplink::new(Process::Worker(index), register, coordinators);
        let client = PoolClient::new(index, LAYOUT, block_bytes, cluster.putting_max);
        let memory = if io.faulty.is_some() { Memory::new(device_blocks as usize) } else { Memory::default() };
        let device = device.clone();
        let stages = self.stages.get(index.0).filter(|stages| !stages.is_empty());
        let group = stages.map(|stages| Group::new(Process::Worker(index), stages, LAYOUT, device_blocks));
        if decodes {
            let limits = tidemill_decode::limits::Limits {
                sequences_max: cluster.sequences_max,
                waiting_max: self.waiting_max,
                step_tokens: cluster.decode_step_tokens,
                context_tokens: shape.context_tokens as usize,
                vocab: vocab as usize,
                reads_whole: false,
            };
            let jobs_max = limits.sequences_max + limits.waiting_max;
            let speculation = cluster.speculation.as_ref();
            let drafts = speculation.map(|settings| oracle::speculation(settings, vocab, limits.context_tokens, device_blocks));
            let oracle = speculation.map(|settings| Oracle::new(*settings, vocab, mix(index.0 as u64)));
            let role = tidemill_decode::scheduler::Scheduler::new(LAYOUT, device_blocks, limits).with_speculation(drafts);
            Box::new(Engine::new(Parts { index, role, device, memory, oracle, group, client, uplink, vocab, block_bytes, jobs_max }))
        } else {
            let limits = tidemill_prefill::scheduler::Limits {
                admitted_max: cluster.admitted_max,
                jobs_max: PREFILL_JOBS_MAX,
                step_tokens: cluster.prefill_step_tokens,
                putting_max: cluster.putting_max,
                vocab: vocab as usize,
            };
            let jobs_max = limits.jobs_max;
            let role = tidemill_prefill::scheduler::Scheduler::new(LAYOUT, device_blocks, limits);
            Box::new(Engine::new(Parts { index, role, device, memory, oracle: None, group, client, uplink, vocab, block_bytes, jobs_max }))
        }
    }

    /// The process of a later stage, which has as much room as its head.
    pub(crate) fn stage(&self, index: StageIndex) -> StageNode {
        let owner = self.stages.iter().enumerate().find_map(|(worker, stages)| {
            let place = stages.iter().position(|stage| *stage == index)?;
            Some((worker, Stage { index: place as u32 + 1, count: stages.len() as u32 + 1 }))
        });
        let (worker, stage) = owner.expect("stages are numbered by worker");
        StageNode::new(index, group::hello(stage, LAYOUT), self.workers[worker].device_blocks)
    }

    /// The bandwidth between a worker's devices and its host, in bytes per second.
    pub(crate) fn bus(&self, worker: usize) -> f64 {
        self.settings.network.bus_gb_per_s * 1e9 * f64::from(self.workers[worker].gpus)
    }
}

/// Numbers for so many later stages of each worker.
pub(crate) fn numbered(stages: &[usize]) -> Vec<Vec<StageIndex>> {
    let mut next = (0..).map(StageIndex);
    stages.iter().map(|count| next.by_ref().take(*count).collect()).collect()
}

/// All engines, assigned to the hosts in turn.
fn workers(settings: &Settings, shape: Shape, seed: u64) -> Result<Vec<WorkerPlan>, InvalidSetting> {
    let cluster = &settings.cluster;
    let (prefill, decode) = cluster.split()?;
    let mut groups = vec![(prefill, decode, ClusterShape::gpu(&cluster.gpu)?, cluster.gpus_per_instance)];
    for others in &cluster.others {
        groups.push((others.prefill, others.decode, ClusterShape::gpu(&others.gpu)?, others.gpus_per_instance));
    }
    let instances: u32 = groups.iter().map(|(prefill, decode, ..)| prefill + decode).sum();
    let hosts = instances.div_ceil(cluster.instances_per_host.max(1)) as usize;
    let mut workers = Vec::new();
    for (prefill, decode, gpu, gpus) in groups {
        for decodes in std::iter::repeat_n(false, prefill as usize).chain(std::iter::repeat_n(true, decode as usize)) {
            let number = workers.len();
            let device = device(settings, shape, gpu, gpus, decodes, mix(seed).wrapping_add(number as u64));
            let device_blocks = cluster.device_blocks.map_or_else(|| device_blocks(cluster, shape, gpu, gpus), Ok)?;
            workers.push(WorkerPlan { host: number % hosts, device, device_blocks, decodes, gpus });
        }
    }
    Ok(workers)
}

fn register(name: String, host: usize, role: RoleInfo) -> Register {
    Register { name, host: Host(format!("host-{host}")), pid: 1, model: None, role }
}

pub(crate) fn device(settings: &Settings, shape: Shape, gpu: Gpu, gpus: u32, decodes: bool, seed: u64) -> Device {
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

/// The number of blocks that fit the memory that the weights leave of an instance.
fn device_blocks(cluster: &ClusterShape, shape: Shape, gpu: Gpu, gpus: u32) -> Result<u32, InvalidSetting> {
    let memory = gpu.memory_gib * f64::from(gpus) * f64::from(1 << 30) * cluster.memory_share;
    let blocks = (memory - shape.weight_bytes()) / shape.block_bytes() as f64;
    if blocks >= 1.0 {
        Ok(blocks as u32)
    } else {
        Err(InvalidSetting::new("cluster.gpus_per_instance", format!("{} does not fit {gpus} GPUs of kind {}", shape.name, gpu.name)))
    }
}
