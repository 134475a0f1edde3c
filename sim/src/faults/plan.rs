//! The scenario of a seed: a cluster small enough for everything in it to be short, its clients, and the faults with their times.

use super::{QUIET, RECOVERED};
use crate::{
    hardware::StepCoefficients,
    random::Random,
    settings::{ClusterShape, NetworkSettings, PolicySettings, Settings, WorkloadSettings},
    shape::Shape,
    workload::Ask,
    world::{CoordinatorIndex, PoolIndex, Process, StageIndex, WorkerIndex, disk::Health, reader::Manners},
};
use std::{collections::BTreeSet, time::Duration};
use tidemill_kvpool::core::directory::Limits;

pub(crate) struct Plan {
    pub(crate) settings: Settings,
    pub(crate) coordinators: usize,
    pub(crate) disk_slots: u32,
    /// Whether pool nodes keep another model's blocks, too.
    pub(crate) neighbour: bool,
    pub(crate) limits: Limits,
    /// The number of later stages of each worker.
    pub(crate) stages: Vec<usize>,
    /// The most sequences that wait at a decode worker.
    pub(crate) waiting_max: usize,
    pub(crate) asks: Vec<Ask>,
    pub(crate) manners: Vec<Manners>,
    /// Requests that come after all faults are repaired.
    pub(crate) probes: BTreeSet<usize>,
    /// The faults and repairs, by time.
    pub(crate) troubles: Vec<Trouble>,
    /// The initial rate errors of clocks, in parts per million.
    pub(crate) clocks: Vec<(Process, i32)>,
}

/// A fault or a repair.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) at: Duration,
    pub(crate) change: Change,
}

#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// A crash; `silently` if the host fails along with the process.
    Crash {
        process: Process,
        silently: bool,
    },
    Restart {
        process: Process,
    },
    Pause {
        process: Process,
    },
    Resume {
        process: Process,
    },
    Drain {
        process: Process,
    },
    Cut(Cut),
    Heal(Cut),
    /// The end of one of the process's connections, or of all to coordinators.
    Break {
        process: Process,
        control: bool,
    },
    Clock {
        process: Process,
        ppm: i32,
        jump: Duration,
    },
    FlipSlot {
        pool: PoolIndex,
    },
    FlipDisk {
        pool: PoolIndex,
    },
    Disk {
        pool: PoolIndex,
        health: Health,
    },
    /// A worker repeats messages of an earlier link.
    Confuse {
        process: Process,
    },
}

/// A broken path, on which no message from one process reaches the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) from: Process,
    pub(crate) to: Process,
}

const MODEL: &str = "smollm-135m";
/// The time from which requests arrive.
const WARM: Duration = Duration::from_secs(2);
/// The share of worlds in which no worker has stages.
const WITHOUT_STAGES: f64 = 0.6;
/// The largest rate error of a clock, in parts per million. Real ones are a thousand times smaller.
const PPM_MAX: u32 = 10_000;

impl Plan {
    pub(crate) fn draw(seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let coordinators = pick(random, &[1, 2, 2, 3]);
        let (prefill, decode) = (random.between(0, 2), random.between(1, 3));
        let cluster = cluster(random, prefill, decode);
        let hosts = (prefill + decode).div_ceil(cluster.instances_per_host) as usize;
        let mut processes: Vec<Process> = (0..coordinators).map(|n| Process::Coordinator(CoordinatorIndex(n))).collect();
        processes.extend((0..(prefill + decode) as usize).map(|n| Process::Worker(WorkerIndex(n))));
        processes.extend((0..hosts).map(|n| Process::Pool(PoolIndex(n))));
        let stages = stages(seed, (prefill + decode) as usize);
        processes.extend((0..stages.iter().sum()).map(|n| Process::Stage(StageIndex(n))));
        let moments: Vec<Duration> = (0..random.between(2, 6)).map(|_| (QUIET - WARM).mul_f64(random.unit())).collect();
        let (asks, manners, probes) = clients(random, &cluster, coordinators, &moments);
        let seconds = pick(random, &[2, 4, 10]);
        let limit = Duration::from_secs(seconds);
        let network = NetworkSettings {
            nic_gb_per_s: pick(random, &[0.02, 0.1, 1.0]),
            bus_gb_per_s: pick(random, &[0.02, 0.1, 1.0]),
            latency_us: pick(random, &[50.0, 500.0, 5000.0]),
            local_latency_us: 20.0,
        };
        // A step crosses the network between stages several times, and the longest answers must end in time.
        let latency_max = if stages.iter().any(|later| *later > 0) { 500.0 } else { f64::INFINITY };
        let network = NetworkSettings { latency_us: network.latency_us.min(latency_max), ..network };
        let policy = PolicySettings {
            name: pick(random, &["goodput", "goodput", "least_ttft", "disaggregated", "random"]).into(),
            queue_max: pick(random, &[4, 64]),
            queue_wait_s: pick(random, &[3.0, 30.0]),
            request_timeout_s: f64::from(random.between(3, 60)),
            ..PolicySettings::default()
        };
        Self {
            coordinators,
            disk_slots: pick(random, &[0, 0, 32, 128]),
            neighbour: Random::new(seed ^ 0x9e1b).unit() < 0.5,
            limits: Limits { put_deadline: limit, lease: limit },
            stages,
            waiting_max: pick(random, &[2, 4, 1024]),
            asks,
            manners,
            probes,
            troubles: troubles(random, &processes, hosts, &moments),
            clocks: processes.iter().map(|&process| (process, ppm(random))).collect(),
            settings: Settings { model: MODEL.into(), cluster, network, policy, workload: WorkloadSettings::default() },
        }
    }

    /// A description in one line.
    pub(crate) fn describe(&self) -> String {
        let (cluster, policy) = (&self.settings.cluster, &self.settings.policy);
        format!(
            "{} coordinators; workers: {:?} of {} prefill, {} a host, with later stages {:?}, with {:?} blocks; {:.0} slots and {} disk slots a node{}; policy {}, queue {} for {} s; {} requests",
            self.coordinators,
            cluster.prefill,
            cluster.instances,
            cluster.instances_per_host,
            self.stages,
            cluster.device_blocks,
            cluster.pool_gib_per_host * f64::from(1 << 30) / block_bytes(),
            self.disk_slots,
            if self.neighbour { ", which keeps another model's blocks, too" } else { "" },
            policy.name,
            policy.queue_max,
            policy.queue_wait_s,
            self.asks.len()
        )
    }
}

/// The number of later stages of each worker: none in most worlds.
fn stages(seed: u64, workers: usize) -> Vec<usize> {
    let random = &mut Random::new(seed ^ 0x57a9);
    if random.unit() < WITHOUT_STAGES { vec![0; workers] } else { (0..workers).map(|_| pick(random, &[0, 1, 2])).collect() }
}

fn block_bytes() -> f64 {
    Shape::find(MODEL).expect("it is one of the shapes").block_bytes() as f64
}

fn cluster(random: &mut Random, prefill: u32, decode: u32) -> ClusterShape {
    let slots = pick(random, &[8, 24, 64, 200]);
    let measured = StepCoefficients {
        step_ms: pick(random, &[2.0, 8.0, 20.0]),
        prefill_token_ms: pick(random, &[0.02, 0.2]),
        prefill_context_ms: 0.0,
        decode_row_ms: 0.2,
        decode_context_ms: 0.0,
    };
    ClusterShape {
        instances: prefill + decode,
        prefill: Some(prefill),
        instances_per_host: random.between(1, 3),
        noise: 0.1,
        pool_gib_per_host: (f64::from(slots) + 0.5) * block_bytes() / f64::from(1 << 30),
        eviction: pick(random, &["hit-density", "lru", "s3fifo"]).into(),
        prefill_step_tokens: pick(random, &[64, 512]),
        decode_step_tokens: pick(random, &[32, 256]),
        sequences_max: pick(random, &[3, 16]),
        admitted_max: pick(random, &[1, 4]),
        putting_max: pick(random, &[4, 64]),
        measured_prefill: Some(measured),
        measured_decode: Some(measured),
        device_blocks: Some(random.between(36, 120)),
        ..ClusterShape::default()
    }
}

fn clients(
    random: &mut Random,
    cluster: &ClusterShape,
    coordinators: usize,
    moments: &[Duration],
) -> (Vec<Ask>, Vec<Manners>, BTreeSet<usize>) {
    // A decode worker can hold the longest sequence, with room to spare.
    let tokens_max = cluster.device_blocks.map_or(0, |blocks| (blocks - 4) * 16);
    // Requests in progress when all faults are repaired must not take longer than the remaining time: an answer has 400 tokens, or 60.
    let step_ms = cluster.measured_decode.map_or(0.0, |measured| measured.step_ms);
    let longest = if step_ms < 3.0 {
        400
    } else if step_ms < 10.0 {
        200
    } else {
        60
    };
    let (mut asks, mut manners) = (Vec::new(), Vec::new());
    let requests = random.between(10, 40);
    for _ in 0..requests {
        // Most requests come shortly before a fault.
        let before = Duration::from_secs_f64(random.exponential(2.0));
        let anytime = (QUIET - WARM).mul_f64(random.unit());
        let at = if random.unit() < 0.7 { pick(random, moments).saturating_sub(before) } else { anytime };
        let leaves = (random.unit() < 0.2).then(|| Duration::from_secs_f64(random.exponential(1.0)));
        asks.push(ask(random, at, (tokens_max, longest), leaves.is_some()));
        manners.push(Manners {
            coordinator: random.between(0, coordinators as u32 - 1) as usize,
            choices: pick(random, &[1, 1, 1, 2]),
            attempts: 3,
            leaves,
            reads_every: (random.unit() < 0.1).then(|| Duration::from_millis(u64::from(random.between(1, 200)))),
            timeout: (random.unit() < 0.3).then(|| Duration::from_secs(u64::from(random.between(1, 10)))),
        });
    }
    let first_probe = asks.len();
    for number in 0..4 * coordinators {
        let at = RECOVERED - WARM + Duration::from_secs_f64(0.1 + 2.0 * random.unit());
        let leaves = (number % 4 == 3).then(|| Duration::from_secs_f64(0.5 + random.unit()));
        let mut probe = ask(random, at, (tokens_max, longest), leaves.is_some());
        if leaves.is_none() {
            probe.output_tokens = probe.output_tokens.min(20);
        }
        asks.push(probe);
        manners.push(Manners { coordinator: number % coordinators, leaves, timeout: Some(Duration::from_secs(60)), ..Manners::default() });
    }
    (asks, manners, (first_probe..first_probe + 4 * coordinators).collect())
}

/// A random request. Prompts share prefixes, so that blocks are shared. If `endless`, the answer is as long as possible.
fn ask(random: &mut Random, at: Duration, (tokens_max, longest): (u32, u32), endless: bool) -> Ask {
    let input_tokens = if random.unit() < 0.2 { random.between(1, 20) } else { random.between(17, tokens_max / 2) };
    let (room, most) = (tokens_max - input_tokens, pick(random, &[60, longest]));
    let output_tokens = if endless { room } else { random.between(1, most.min(room)) };
    let topic = u64::from(random.between(0, 5));
    let ids = (0..input_tokens.div_ceil(crate::workload::ID_TOKENS)).map(|place| topic * 100 + u64::from(place)).collect();
    Ask { at, input_tokens, output_tokens, ids, class: 0 }
}

fn troubles(random: &mut Random, processes: &[Process], pools: usize, moments: &[Duration]) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    // Sometimes there are few faults, so that the effect of each shows on its own.
    let count = if random.unit() < 0.3 { random.between(0, 2) } else { random.between(3, 16) };
    for _ in 0..count {
        let after = Duration::from_secs_f64(random.exponential(5.0));
        let at = (WARM + pick(random, moments) + after).min(QUIET);
        trouble(random, processes, pools, at, &mut troubles);
    }
    for &process in processes {
        troubles.push(Trouble { at: QUIET, change: Change::Resume { process } });
        troubles.push(Trouble { at: QUIET, change: Change::Restart { process } });
    }
    // Processes that were still draining at that time have ended a second later.
    for &process in processes {
        troubles.push(Trouble { at: QUIET + Duration::from_secs(1), change: Change::Restart { process } });
    }
    for pool in (0..pools).map(PoolIndex) {
        troubles.push(Trouble { at: QUIET, change: Change::Disk { pool, health: Health::Good } });
    }
    troubles.sort_by_key(|trouble| trouble.at);
    troubles
}

fn trouble(random: &mut Random, processes: &[Process], pools: usize, at: Duration, troubles: &mut Vec<Trouble>) {
    let process = pick(random, processes);
    let until = (at + Duration::from_secs_f64(random.exponential(0.5).min(12.0))).min(QUIET);
    let pool = PoolIndex(random.between(0, pools as u32 - 1) as usize);
    let mut push = |at, change| troubles.push(Trouble { at, change });
    match random.between(0, 99) {
        0..24 => {
            push(at, Change::Crash { process, silently: random.unit() < 0.3 });
            push(until, Change::Restart { process });
        }
        24..44 => {
            push(at, Change::Pause { process });
            push(until, Change::Resume { process });
        }
        44..60 => {
            let other = pick(random, processes);
            if other == process {
                return;
            }
            let one_way = random.unit() < 0.5;
            let cuts = [Cut { from: process, to: other }, Cut { from: other, to: process }];
            for cut in cuts.into_iter().take(if one_way { 1 } else { 2 }) {
                push(at, Change::Cut(cut));
                push(until, Change::Heal(cut));
            }
        }
        60..66 => {
            push(at, Change::Drain { process });
            push(until.max(at + Duration::from_secs(1)), Change::Restart { process });
        }
        66..74 => push(at, Change::Break { process, control: false }),
        74..80 => {
            let jump = Duration::from_secs_f64(random.exponential(0.3).min(60.0));
            push(at, Change::Clock { process, ppm: ppm(random), jump });
        }
        80..87 => push(at, Change::FlipSlot { pool }),
        87..89 => push(at, Change::FlipDisk { pool }),
        89..94 => {
            let slow = Health::Slow(Duration::from_millis(u64::from(random.between(20, 7000))));
            push(at, Change::Disk { pool, health: pick(random, &[slow, slow, Health::Full, Health::Broken]) });
            push(until, Change::Disk { pool, health: Health::Good });
        }
        _ => {
            push(at, Change::Break { process, control: true });
            push(at + Duration::from_millis(800), Change::Confuse { process });
        }
    }
}

fn ppm(random: &mut Random) -> i32 {
    random.between(0, 2 * PPM_MAX) as i32 - PPM_MAX as i32
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.between(0, from.len() as u32 - 1) as usize]
}
