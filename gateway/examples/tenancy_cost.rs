//! The cost of tenants: CPU time per request of authentication, quota and metering, including the log's thread and the kernel's work. Each
//! request is identified by its key, checked early, reserved, settled, and awaited until its event is written, as in the gateway.
//!
//! `cargo run --release -p tidemill-gateway --example tenancy_cost [requests]`

use std::{fs, sync::Arc, time::Duration};
use tidemill_gateway::{
    metrics::{RequestOutcome, usage::Usage},
    tenants::{Caller, MeterSettings, TenantSettings, Tenants, metered::QuotaRequest},
};
use tidemill_tenancy::{
    journal,
    keeper::memory::Memory,
    key::Secret,
    limits::{Limits, Overrides, Share},
    records::{Change, Key, Tenant},
    tier::Tiers,
    usage::price::{Price, Prices},
};

/// The number of keys, each of a tenant of its own.
const KEYS: u64 = 1000;
/// The number of concurrent requests.
const IN_FLIGHT: usize = 64;

#[tokio::main]
async fn main() {
    let requests: u64 = std::env::args().nth(1).map_or(200_000, |count| count.parse().expect("a number of requests"));
    let dir = std::env::temp_dir().join(format!("tenancy-cost-{}", std::process::id()));
    let mut tiers = Tiers::default();
    let mut paid = (**tiers.get("paid").expect("there is this tier")).clone();
    // Limits that are counted but never reached.
    paid.limits = Limits {
        requests_per_minute: Some(1 << 40),
        tokens_per_minute: Some(1 << 50),
        tokens_per_day: Some(1 << 60),
        concurrent: Some(1 << 20),
        ..Limits::default()
    };
    tiers.put(paid);
    let settings = TenantSettings {
        keeper: Arc::new(Memory::default()),
        jwt: None,
        tiers,
        share: Share::WHOLE,
        quota_server: None,
        prices: Prices([("model".into(), Price { prompt: 1.0, cached: 0.1, output: 5.0 })].into()),
        closed: true,
        pins: None,
        shedding: None,
        meter: Some(MeterSettings {
            dir: dir.clone(),
            log: journal::Settings { sync_every: Duration::from_millis(100), segment_bytes: 64 << 20 },
            sink: None,
        }),
        request_timeout: Duration::from_secs(600),
    };
    let tenants = Arc::new(Tenants::open(settings).expect("the log can be opened"));
    let secrets: Vec<String> = (0..KEYS).map(|n| add_key(&tenants, n)).collect();

    let one = |n: u64| {
        let (tenants, secret) = (Arc::clone(&tenants), secrets[(n % KEYS) as usize].clone());
        async move {
            let caller = Caller::new(tenants.identify(None, Some(&secret)).await.expect("the key is valid"));
            tenants.peek(&caller).expect("there is room");
            let wanted = QuotaRequest {
                arrived: std::time::Instant::now(),
                model: "model",
                class: "standard",
                prompt_tokens: 500,
                answer_tokens: 200,
            };
            let mut metered = tenants.reserve(&caller, wanted).await.expect("there is room");
            let usage = Usage { prompt_tokens: 500, completion_tokens: 100, total_tokens: 600, ..Usage::default() };
            metered.settle(RequestOutcome::Ok, &usage, Some(Duration::from_millis(50))).await;
        }
    };
    let (began, cpu) = (std::time::Instant::now(), cpu_time());
    let mut running = tokio::task::JoinSet::new();
    for n in 0..requests {
        if running.len() == IN_FLIGHT {
            running.join_next().await;
        }
        running.spawn(one(n));
    }
    while running.join_next().await.is_some() {}
    let (elapsed, cpu) = (began.elapsed(), cpu_time() - cpu);
    drop(tenants);
    println!(
        "{requests} requests: {:.4} ms CPU each, {:.4} ms between two",
        cpu.as_secs_f64() * 1e3 / requests as f64,
        elapsed.as_secs_f64() * 1e3 / requests as f64
    );
    fs::remove_dir_all(dir).expect("the log can be removed");
}

fn add_key(tenants: &Tenants, n: u64) -> String {
    let mut random = [0; 32];
    random[..8].copy_from_slice(&n.to_be_bytes().map(|byte| byte.rotate_left(3) ^ 0x5a));
    random[..8].rotate_left(3);
    let secret = Secret::new(random);
    let tenant = Tenant {
        id: format!("tenant-{n}"),
        tier: "paid".into(),
        limits: Overrides::default(),
        semantic_cache: false,
        erased: 0,
        erasures: Vec::new(),
        created: 0,
    };
    tenants.change(Change::Tenant(tenant)).expect("memory keeps it");
    let key = Key {
        id: secret.prefix().into(),
        digest: secret.digest(),
        tenant: format!("tenant-{n}"),
        user: None,
        name: None,
        limits: Overrides::default(),
        created: 0,
        expires: None,
        revoked: None,
    };
    tenants.change(Change::Key(key)).expect("memory keeps it");
    secret.reveal().to_owned()
}

/// The CPU time of all threads of this process, in user space and in the kernel.
fn cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("the name is in brackets").1.split_whitespace().collect();
    let ticks: u64 = [fields[11], fields[12]].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum();
    // A tick is a hundredth of a second on all common Linux systems.
    Duration::from_millis(ticks * 10)
}
