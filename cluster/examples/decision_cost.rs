//! The cost of a decision as the cluster grows: the time of `submit`, hashing and bookkeeping included, while requests come and go.
//!
//! `cargo run --release -p tidemill-cluster --example decision_cost [POLICY]…`

use std::{
    hint::black_box,
    time::{Duration, Instant},
};
use tidemill_cluster::{
    Action, Cluster, ClusterSettings, NewRequest, RequestEvent,
    admission::AdmissionPolicy,
    class::{ClassId, Classes},
    schedule::{Policy, PolicyName},
};
use tidemill_proto::{
    block::{Chain, LayoutFingerprint},
    ids::{Epoch, SequenceId},
    message::{
        EngineInfo, Finish, Host, ModelIdentity, PoolEvent, PrefillOutcome, Provenance, Register, RoleInfo, SequenceToken, ToWorker,
        WorkerEvent,
    },
    pool::Tier,
    sampling::{Sampling, StopRule},
};

const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);
/// The length of a prompt; its first half is shared with an eighth of the others.
const TOKENS: u32 = 2048;
const PREFIXES: u32 = 8;
const DECISIONS: usize = 4000;
/// The mean number of running sequences per decode worker.
const RUNNING: usize = 4;

fn main() {
    let named: Vec<PolicyName> = std::env::args().skip(1).map(|name| name.parse().expect("a policy's name")).collect();
    let policies = if named.is_empty() { vec![PolicyName::Goodput, PolicyName::LeastTtft, PolicyName::GlobalCache] } else { named };
    let prompts: Vec<_> = (0..1000).map(prompt).collect();
    let hashed = prompts.iter().map(|prompt| {
        let started = Instant::now();
        black_box(Chain::new(&LAYOUT, b"", prompt));
        started.elapsed()
    });
    let mut hashed: Vec<Duration> = hashed.collect();
    hashed.sort_unstable();
    println!("hashing a prompt of {TOKENS} tokens: median {:.1} µs, part of each figure", hashed[500].as_secs_f64() * 1e6);
    println!("{:>15} {:>8} {:>10} {:>10} {:>10}", "policy", "workers", "median µs", "p90 µs", "p99 µs");
    for policy in policies {
        for workers in [16, 64, 256, 1000] {
            let mut times = measure(policy, workers);
            times.sort_unstable();
            let at = |part: f64| times[(part * (times.len() - 1) as f64) as usize].as_secs_f64() * 1e6;
            println!("{:>15} {workers:>8} {:>10.1} {:>10.1} {:>10.1}", policy.name(), at(0.5), at(0.9), at(0.99));
        }
    }
}

fn prompt(n: u32) -> Vec<u32> {
    let shared = n % PREFIXES;
    (0..TOKENS).map(|i| if i < TOKENS / 2 { shared * TOKENS + i } else { n * 7919 + i }).collect()
}

/// Half the workers prefill and half decode, with eight workers and a pool node per host.
fn measure(name: PolicyName, workers: usize) -> Vec<Duration> {
    let settings = ClusterSettings {
        id_base: 0,
        admission: AdmissionPolicy { queue_max: 1024 },
        policy: Policy { name, ..Policy::default() },
        classes: Classes::default(),
        queue_wait_max: Duration::from_secs(60),
        heartbeat_dead: Duration::from_secs(5),
        probes: None,
        autoscale: None,
    };
    let (mut cluster, mut now) = (Cluster::new(settings, ModelIdentity::default()), Duration::from_secs(1));
    let engine = EngineInfo {
        model: ModelIdentity::default(),
        layout: LAYOUT,
        block_bytes: 1 << 20,
        device_blocks: 20_000,
        state_blocks: 0,
        context_tokens: 1 << 17,
        work_max: 64,
    };
    for n in 0..workers {
        let host = Host(format!("host-{}", n / 8));
        let mut join =
            |role| cluster.register(now, Register { name: format!("w{n}"), host: host.clone(), pid: 1, model: None, role }).expect("room");
        if n.is_multiple_of(8) {
            let pool = join(RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 1).into() });
            let chain = Chain::new(&LAYOUT, b"", &prompt(n as u32 / 8 % PREFIXES)[..TOKENS as usize / 2]);
            let events = chain.keys().iter().map(|&key| PoolEvent::Stored { key, tier: Tier::Dram }).collect();
            cluster.worker_event(now, pool, WorkerEvent::PoolEvents { from: 0, events });
        }
        let mut join =
            |role| cluster.register(now, Register { name: format!("w{n}"), host: host.clone(), pid: 1, model: None, role }).expect("room");
        join(if n % 2 == 0 { RoleInfo::Prefill(engine.clone()) } else { RoleInfo::Decode(engine.clone()) });
    }
    let (mut running, mut times) = (Vec::new(), Vec::new());
    for n in 0..(RUNNING * workers + DECISIONS) {
        now += Duration::from_millis(1);
        let new = NewRequest {
            prompt: prompt(n as u32).into(),
            salt: Vec::new(),
            class: ClassId((n % 3) as u8),
            sampling: Sampling::default(),
            stop: StopRule { max_tokens: 512, ..StopRule::default() },
            choices: 1,
            constraint: None,
            thought: None,
            prompt_logprobs: None,
            embeds: None,
            timeout: Duration::from_secs(600),
        };
        let started = Instant::now();
        cluster.submit(now, new).expect("room");
        times.push(started.elapsed());
        take(&mut cluster, now, &mut running);
        if running.len() > RUNNING * workers {
            let (worker, sequence) = running.swap_remove(n * 31 % running.len());
            let event = WorkerEvent::Finished { sequence, reason: Finish::Length, provenance: Provenance::default() };
            cluster.worker_event(now, worker, event);
            take(&mut cluster, now, &mut running);
        }
    }
    times.split_off(RUNNING * workers)
}

/// Workers finish each prefill job at once, and draw a first token.
fn take(cluster: &mut Cluster, now: Duration, running: &mut Vec<(Epoch, SequenceId)>) {
    while let Some(action) = cluster.poll_action() {
        match action {
            Action::Send { worker, message: ToWorker::Decode(job) } => {
                running.push((worker, job.sequence));
                let token = SequenceToken { sequence: job.sequence, index: 0, token: 1, logprob: None };
                cluster.worker_event(now, worker, WorkerEvent::Tokens(vec![token]));
            }
            Action::Send { worker, message: ToWorker::Prefill(job) } => {
                let outcome = PrefillOutcome::Done { cached_tokens: 0, computed_tokens: TOKENS / 2, queue_ms: 0.0, compute_ms: 1.0 };
                cluster.worker_event(now, worker, WorkerEvent::Prefilled { request: job.request, outcome });
            }
            Action::Client { event: RequestEvent::Finished { .. } | RequestEvent::Token { .. }, .. } => {}
            other => panic!("{other:?}"),
        }
    }
}
