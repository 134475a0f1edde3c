//! `tidemill up`: a whole cluster on one machine, as real processes connected over loopback.

mod rolling;
mod scaling;

use crate::{
    demo_model, gguf,
    processes::{Process, Tended, say},
    wanted::{self, Wanted},
};
use anyhow::{Context, bail};
use futures_util::future::join_all;
use rolling::Rolling;
use scaling::{Fleet, Ranges};
use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tidemill_net::{
    cores::Cores,
    identity::issue,
    model_dir::{self, Download, Hub},
    process,
};
use tidemill_proto::message::ModelKind;
use tokio::task::spawn_blocking;

#[derive(Clone, Debug, clap::Args)]
pub struct UpArgs {
    /// Model: a Hugging Face directory, a GGUF file, or a hub id such as org/name. For several models, several times: each gets as many
    /// workers as the other options say, and all of them share the pool nodes [default: a small built-in model that explains Tidemill]
    #[arg(long)]
    model: Vec<String>,
    /// Name of the model in the API; as often as --model, in the same order [default: the directory's, the file's or the hub's]
    #[arg(long)]
    served_model_name: Vec<String>,
    /// Prefill workers of each model; with 0, decode workers compute prompts themselves
    #[arg(long, default_value_t = 1)]
    prefill: usize,
    /// Decode workers of each model
    #[arg(long, default_value_t = 1)]
    decode: usize,
    /// Starts and ends workers as they are needed: prefill=1..4,decode=1..4 for one to four of each role and model. More, such as
    /// cooldown_s=60, is the coordinator's setting autoscale. --prefill and --decode say how many there are at the start
    #[arg(long, value_name = "ROLE=RANGE,…")]
    autoscale: Option<String>,
    /// KV pool nodes, which all models share
    #[arg(long, default_value_t = 1)]
    kvpool: usize,
    /// Coordinators; the second one's front door takes the next port, and so on
    #[arg(long, default_value_t = 1)]
    coordinator: usize,
    /// Address of the front door
    #[arg(long, default_value = "127.0.0.1:8000", overrides_with = "http")]
    http: SocketAddr,
    /// Address of the operators' port (tenants and keys, the registry, rollouts, /metrics, /cluster); the second coordinator's is the next
    /// port, and so on [default: none, /metrics and /cluster are at the front door]
    #[arg(long)]
    admin: Option<SocketAddr>,
    /// Open the front door to requests without a key, also at an address that other machines reach, until there is a key
    #[arg(long)]
    open: bool,
    /// File with settings of the coordinators that have no flag here, such as tiers, prices, an identity provider
    #[arg(long, value_name = "FILE")]
    coordinator_config: Option<PathBuf>,
    /// Directory for certificates, models, tenants and their usage, stored responses and the registry [default: a temporary one, removed at
    /// the end]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Engine of prefill and decode workers: model; or echo, which reads no weights, and whose tokens are a hash of the ids, to
    /// measure everything around a model
    #[arg(long, default_value = "model", value_parser = ["model", "echo"])]
    engine: String,
    /// Time of each step of an echo, in milliseconds [default: 0]
    #[arg(long)]
    step_ms: Option<f64>,
    /// Time of each prompt token in a step of an echo, in milliseconds [default: 0]
    #[arg(long)]
    prompt_token_ms: Option<f64>,
    /// Time of each sequence that decodes in a step of an echo, in milliseconds [default: 0]
    #[arg(long)]
    row_ms: Option<f64>,
    /// Size of an echo's KV block, in bytes [default: 4096]
    #[arg(long)]
    block_bytes: Option<usize>,
    /// Other names that clients may ask for, such as gpt-5=tidemill-demo
    #[arg(long, value_name = "NAME=MODEL,…")]
    aliases: Option<String>,
    /// Device that models run on
    #[arg(long, default_value = "auto", value_parser = ["auto", "cpu", "cuda"])]
    device: String,
    /// Cores of prefill and decode workers: shared by all, or split, so that each worker has its own
    #[arg(long, default_value = "shared", value_parser = ["shared", "split"])]
    cores: String,
    /// Threads of each prefill and decode worker [default: its even share of the cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Device memory of each prefill and decode worker for KV blocks [default: 1GiB on a CPU, an equal share of a GPU]
    #[arg(long)]
    kv_memory: Option<String>,
    /// Arithmetic of projections: none (as weights are stored: bf16 in bf16, 4 bits with activations in 8, others in f32), int8 (weights
    /// and activations in 8-bit integers), int4 (weights in 4 bits) or dequantize (weights in 4 bits as numbers of 16)
    #[arg(long, default_value = "none", value_parser = ["none", "int8", "int4", "dequantize"])]
    quantize: String,
    /// Format of K and V: bf16, f16, f32, or int8 (with a scale per position and head)
    #[arg(long, default_value = "bf16", value_parser = ["bf16", "f16", "f32", "int8"])]
    kv_dtype: String,
    /// Weights of the models where they want more of the KV pool nodes than there is, such as small=1,large=3 [default: all alike]
    #[arg(long, value_name = "NAME=WEIGHT,…")]
    pool_shares: Option<String>,
    /// Percent of the KV pool nodes' DRAM that each model keeps whatever the others need, such as small=10,large=30 [default: a quarter of
    /// its share]
    #[arg(long, value_name = "NAME=PERCENT,…")]
    pool_floors: Option<String>,
    /// DRAM of each KV pool node
    #[arg(long, default_value = "2GiB")]
    pool_memory: String,
    /// Time that a reader has to read blocks leased from a pool node, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pool_lease_ms: u64,
    /// Time that a writer has to publish slots reserved at a pool node, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pool_put_deadline_ms: u64,
    /// Disk of each KV pool node, under `--data`, for blocks that leave its DRAM; 0: none
    #[arg(long, default_value = "0")]
    pool_nvme: String,
    /// Object storage that the KV pool nodes share, for blocks that are used again: s3://BUCKET/PREFIX or file:///DIRECTORY [default: none]
    #[arg(long)]
    pool_objects: Option<String>,
    /// URL of an S3 server that is not AWS's [default: AWS's of the region]
    #[arg(long)]
    pool_objects_endpoint: Option<String>,
    /// Uses from which on a block is written there; to be computed is the first
    #[arg(long, default_value_t = 2)]
    pool_objects_uses: u32,
    /// Hosts that this machine plays: the first process of each role is on the first host, and so on. Blocks go through shared memory
    /// within a host and over QUIC between hosts
    #[arg(long, default_value_t = 1)]
    hosts: usize,
    /// Transport of blocks: auto (shared memory within a host), shm, rdma or quic
    #[arg(long, default_value = "auto")]
    transport: String,
    /// RDMA devices of the workers: all, none, or names with commas between them
    #[arg(long, default_value = "all")]
    rdma_devices: String,
    /// RDMA devices of the pool nodes [default: those of the workers]
    #[arg(long)]
    pool_rdma_devices: Option<String>,
    /// Most tokens that a worker computes in one step [default: 256 on a CPU, 8192 on a GPU]
    #[arg(long)]
    step_tokens: Option<usize>,
    /// Blocks of a sequence from one kept state to the next, for models with recurrent layers [default: 32, or so many that states take at
    /// most a fifth of the blocks]
    #[arg(long)]
    state_every: Option<usize>,
    /// Longest uncached suffix of a prompt, in tokens, that the decode worker computes itself; 0 sends every full block to a prefill worker
    /// [default: by predicted time]
    #[arg(long)]
    local_tail_tokens: Option<u32>,
    /// Check prompts and answers for harm
    #[arg(long)]
    safety: bool,
    /// Seconds between two rounds of probes, which find engines that compute wrongly; 0: no probes
    #[arg(long, value_name = "S", default_value_t = 0)]
    probe_every_s: u64,
    /// Days for which the audit log under --data keeps blocks by safety checks and appeals against them; 0: no log [default: 0]
    #[arg(long, value_name = "DAYS")]
    audit: Option<u64>,
    /// Take users' feedback on answers (POST /v1/feedback)
    #[arg(long)]
    feedback: bool,
    /// Size of the response cache: answers of greedy and seeded requests, given again to equal requests; 0: no such cache
    #[arg(long, default_value = "0")]
    response_cache: String,
    /// Most restarts of a crashed process within five minutes; 0: none
    #[arg(long, default_value_t = 5, overrides_with = "restarts")]
    restarts: u32,
    /// Rule by which sequences are placed: goodput, least_ttft, random, load_balancing, local_cache, global_cache, colocated or
    /// disaggregated [default: goodput]
    #[arg(long)]
    policy: Option<String>,
    /// Sequences that a decode worker runs at once
    #[arg(long, default_value_t = 64)]
    sequences_max: usize,
    /// Source of draft tokens, which a decode worker verifies several at once: ngram, draft (the model of --draft-model) or off
    /// [default: off]
    #[arg(long)]
    speculation: Option<String>,
    /// Most tokens that a decode worker guesses for a sequence in one step [default: 12]
    #[arg(long)]
    draft_tokens_max: Option<usize>,
    /// Tokens that a decode worker guesses for a sequence in each step whether they pay or not [default: 0]
    #[arg(long)]
    draft_tokens_min: Option<usize>,
    /// Small model that guesses, for --speculation draft: as --model, and of the same vocabulary; as often as --model, in the same order
    #[arg(long)]
    draft_model: Vec<String>,
    /// Arithmetic of draft models' projections: none, int8, int4 or dequantize [default: none]
    #[arg(long)]
    draft_quantize: Option<String>,
    /// Memory of each decode worker for the draft model's own KV blocks [default: 256MiB]
    #[arg(long)]
    draft_kv_memory: Option<String>,
    /// Most rows of a step in which a decode worker guesses tokens [default: 16]
    #[arg(long)]
    draft_rows_max: Option<usize>,
    /// Log filter of all processes
    #[arg(long, default_value = "info")]
    log: String,
    /// Format of the processes' log lines: text, or json with an object a line
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    log_format: String,
    /// Most seconds until all processes are ready
    #[arg(long, default_value_t = 600)]
    ready_s: u64,
}

/// Runs until Ctrl-C or SIGTERM, then drains. SIGHUP restarts process after process.
pub async fn up(args: UpArgs) -> anyhow::Result<()> {
    if args.coordinator == 0 || args.decode == 0 {
        bail!("a cluster needs at least one coordinator and one decode worker");
    }
    if args.hosts == 0 {
        bail!("--hosts must be at least 1");
    }
    let ranges = ranges(&args)?;
    let scratch = tempfile::tempdir().context("cannot make a temporary directory")?;
    let data = args.data.clone().unwrap_or_else(|| scratch.path().to_owned());
    let mut cluster = Cluster::default();
    let signalled = process::terminated();
    tokio::pin!(signalled);
    let outcome = tokio::select! {
        started = cluster.start(&args, ranges, &data) => match started {
            Ok(()) => {
                tokio::select! {
                    () = &mut signalled => Ok(()),
                    reason = cluster.supervise(&args, &data) => Err(anyhow::anyhow!(reason)),
                }
            }
            Err(error) => Err(error),
        },
        () = &mut signalled => Ok(()),
    };
    say("draining");
    let clean = cluster.stop().await;
    outcome?;
    if !clean {
        bail!("not every process ended well");
    }
    Ok(())
}

/// The share of a GPU's memory for all workers together.
const GPU_SHARE: f32 = 0.9;

#[derive(Debug, Default)]
struct Cluster {
    coordinators: Vec<Process>,
    workers: Vec<Process>,
    /// The number of models that share each pool node.
    models_per_node: usize,
    /// The addresses of each coordinator.
    doors: Vec<Door>,
    /// Engines, by model and role.
    fleets: Vec<Fleet>,
    /// Names of workers that were told to end for good.
    leaving: BTreeSet<String>,
}

/// The addresses of a coordinator's HTTP ports.
#[derive(Debug)]
struct Door {
    http: String,
    /// The operators' port, which shows the cluster; without one, `http` does.
    admin: Option<String>,
}

impl Cluster {
    /// Starts every process and waits until requests will succeed.
    async fn start(&mut self, args: &UpArgs, ranges: Ranges, data: &Path) -> anyhow::Result<()> {
        let models = resolve_models(args, data).await?;
        let drafts = resolve_drafts(args, data).await?;
        let Ranges { prefill: (prefill, prefill_most), decode: (decode, decode_most) } = ranges;
        let shares = compute_shares(args, models.len() * (prefill_most + decode_most))?;
        let pki = data.join("pki");
        if !pki.join("ca.pem").is_file() {
            issue::create_ca(&pki)?;
        }
        // Each process gets its own certificate, a new one with each start.
        let certified = |role_and_name: String| certified(data, &role_and_name);
        let common = |extra: &[(&str, String)]| -> Vec<String> {
            let shared = [("--log", args.log.clone()), ("--log-format", args.log_format.clone())];
            shared.iter().chain(extra).flat_map(|(flag, value)| [(*flag).to_owned(), value.clone()]).collect()
        };

        let mut doors = Vec::new();
        let mut quic = Vec::new();
        let links = free_addresses(args.coordinator)?;
        let peers: Vec<_> = links.iter().enumerate().map(|(n, addr)| format!("coordinator-{n}={addr}")).collect();
        for (n, link) in links.iter().enumerate() {
            let http = nth(args.http, n, "--http")?;
            let stored = data.join(format!("coordinator-{n}")).display().to_string();
            let mut flags = common(&[
                ("--http", http.to_string()),
                ("--data", stored),
                ("--listen", link.to_string()),
                ("--peers", peers.join(",")),
                ("--quota-share", format!("{n}/{}", args.coordinator)),
            ]);
            flags.extend(certified(format!("coordinator/coordinator-{n}"))?);
            if let Some(admin) = args.admin {
                flags.extend(["--admin".to_owned(), nth(admin, n, "--admin")?.to_string()]);
            }
            flags.extend(args.open.then(|| "--open".to_owned()));
            flags.extend(args.coordinator_config.iter().flat_map(|file| ["--config".to_owned(), file.display().to_string()]));
            for (name, dir) in &models {
                flags.extend(["--model".to_owned(), dir.display().to_string(), "--served-model-name".to_owned(), name.clone()]);
            }
            flags.extend(args.aliases.iter().flat_map(|aliases| ["--aliases".to_owned(), aliases.clone()]));
            flags.extend(["--response-cache-bytes-max".to_owned(), args.response_cache.clone()]);
            flags.extend(args.feedback.then(|| "--feedback=on".to_owned()));
            flags.extend(args.audit.iter().flat_map(|days| ["--audit".to_owned(), days.to_string()]));
            flags.extend(["--probe-every-s".to_owned(), args.probe_every_s.to_string()]);
            flags.extend(args.safety.then(|| "--safety=on".to_owned()));
            flags.extend(args.autoscale.iter().flat_map(|ranges| ["--autoscale".to_owned(), ranges.clone()]));
            flags.extend(args.policy.iter().flat_map(|policy| ["--policy".to_owned(), policy.clone()]));
            flags.extend(args.local_tail_tokens.iter().flat_map(|tokens| ["--local-tail-tokens".to_owned(), tokens.to_string()]));
            let mut process = Process::start("tidemill-coordinator", &format!("coordinator-{n}"), &flags)?.restarted(args.restarts);
            let line = process.line(Duration::from_secs(30)).await;
            self.coordinators.push(process);
            let line = line?;
            if line.starts_with("listening https://") {
                bail!(
                    "`tidemill up` speaks plain HTTP: for TLS at the front door, start the roles' programs themselves (docs/guides/tls.md)"
                );
            }
            let (http, rest) = line
                .strip_prefix("listening http://")
                .and_then(|rest| rest.split_once(" quic://"))
                .with_context(|| format!("coordinator-{n} printed `{line}`"))?;
            let (links, admin) = rest.split_once(" admin http://").map_or((rest, None), |(links, admin)| (links, Some(admin)));
            // A restarted coordinator must listen at the same addresses, since clients and operators know those.
            if let Some(process) = self.coordinators.last_mut() {
                for (flag, addr) in [("--http", Some(http)), ("--admin", admin)] {
                    let place = process.args.iter().position(|given| given == flag).map(|flag| flag + 1);
                    place.zip(addr).into_iter().for_each(|(place, addr)| process.args[place] = addr.to_owned());
                }
            }
            doors.push(Door { http: http.to_owned(), admin: admin.map(str::to_owned) });
            quic.push(links.to_owned());
        }

        let coordinators = ("--coordinators", quic.join(","));
        self.start_pool(args, &models, &common(std::slice::from_ref(&coordinators)), data)?;
        let (prefill_shares, decode_shares) = shares.split_at(models.len() * prefill_most);
        for (place, (name, dir)) in models.iter().enumerate() {
            let of_model = |extra: &[(&str, String)]| common(&[&[coordinators.clone(), ("--model-name", name.clone())], extra].concat());
            // Numbers continue from one model to the next.
            let numbered = |each: usize| place * each..(place + 1) * each;
            // An encoder has no KV to hand over or to keep.
            let has_kv = !is_encoder(dir)?;
            let engine = of_model(&[
                ("--model", dir.display().to_string()),
                ("--engine", args.engine.clone()),
                ("--device", args.device.clone()),
                // All workers share one GPU, if there is one.
                ("--device-share", (GPU_SHARE / shares.len() as f32).to_string()),
                ("--quantize", args.quantize.clone()),
                ("--kv-dtype", args.kv_dtype.clone()),
                ("--transport", args.transport.clone()),
                ("--rdma-devices", args.rdma_devices.clone()),
            ]);
            let if_given = [
                ("--kv-memory", args.kv_memory.clone()),
                ("--step-tokens", args.step_tokens.map(|tokens| tokens.to_string())),
                ("--state-every", args.state_every.map(|blocks| blocks.to_string())),
                ("--step-ms", args.step_ms.map(|ms| ms.to_string())),
                ("--prompt-token-ms", args.prompt_token_ms.map(|ms| ms.to_string())),
                ("--row-ms", args.row_ms.map(|ms| ms.to_string())),
                ("--block-bytes", args.block_bytes.map(|bytes| bytes.to_string())),
            ];
            let given = if_given.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value?])).flatten();
            let engine: Vec<String> = engine.into_iter().chain(given).collect();
            let fleet = |role, flags: &[String], shares: &[Vec<String>], places: std::ops::Range<usize>| Fleet {
                model: name.clone(),
                role,
                flags: flags.to_vec(),
                first: places.start,
                shares: shares[places].to_vec(),
                rests_until: None,
            };
            if has_kv {
                self.start_fleet(fleet("prefill", &engine, prefill_shares, numbered(prefill_most)), prefill, args, data)?;
            }
            let if_given = [
                ("--sequences-max", Some(args.sequences_max.to_string())),
                ("--speculation", args.speculation.clone()),
                ("--draft-tokens-max", args.draft_tokens_max.map(|tokens| tokens.to_string())),
                ("--draft-tokens-min", args.draft_tokens_min.map(|tokens| tokens.to_string())),
                ("--draft-model", drafts.get(place).map(|dir| dir.display().to_string())),
                ("--draft-quantize", args.draft_quantize.clone()),
                ("--draft-kv-memory", args.draft_kv_memory.clone()),
                ("--draft-rows-max", args.draft_rows_max.map(|rows| rows.to_string())),
            ];
            let given = if_given.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value?])).flatten();
            let decode_flags: Vec<String> = engine.into_iter().chain(given).collect();
            self.start_fleet(fleet("decode", &decode_flags, decode_shares, numbered(decode_most)), decode, args, data)?;
        }
        // All must be ready before the first line is printed, since its reader may connect to any of them.
        for door in &doors {
            self.wait_ready(door, Duration::from_secs(args.ready_s)).await?;
        }
        for door in &doors {
            say(&format!("the console is at http://{}/console", door.http));
            if let Some(admin) = &door.admin {
                say(&format!("operators' port http://{admin}"));
            }
            println!("ready http://{}/v1", door.http);
        }
        self.doors = doors;
        Ok(())
    }

    /// Starts the pool nodes, which all models with KV share.
    fn start_pool(&mut self, args: &UpArgs, models: &[(String, PathBuf)], common: &[String], data: &Path) -> anyhow::Result<()> {
        let mut names = Vec::new();
        for (name, dir) in models {
            if !is_encoder(dir)? {
                names.push(name.as_str());
            }
        }
        let Some(kept) = kept_models(args, &names)? else { return Ok(()) };
        self.models_per_node = names.len();
        for n in 0..args.kvpool {
            let mut flags = vec![
                ("--dram", args.pool_memory.clone()),
                ("--nvme-capacity", args.pool_nvme.clone()),
                ("--data", data.join(format!("kvpool-{n}")).display().to_string()),
                ("--lease-ms", args.pool_lease_ms.to_string()),
                ("--put-deadline-ms", args.pool_put_deadline_ms.to_string()),
                ("--rdma-devices", args.pool_rdma_devices.as_ref().unwrap_or(&args.rdma_devices).clone()),
            ];
            if let Some(url) = &args.pool_objects {
                flags.extend([("--object-store", url.clone()), ("--object-uses", args.pool_objects_uses.to_string())]);
                flags.extend(args.pool_objects_endpoint.clone().map(|endpoint| ("--object-endpoint", endpoint)));
            }
            let flags = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
            let flags: Vec<String> = common.iter().cloned().chain(kept.clone()).chain(flags).collect();
            self.start_worker("kvpool", n, args, &[&flags[..], &certified(data, &format!("kvpool/kvpool-{n}"))?].concat())?;
        }
        Ok(())
    }

    /// The number of members that the coordinators should know: a pool node is one for each of its models.
    fn members(&self) -> usize {
        let of = |worker: &Process| if worker.name.starts_with("kvpool-") { self.models_per_node } else { 1 };
        self.workers.iter().map(of).sum()
    }

    /// Starts the first workers of a role and model.
    fn start_fleet(&mut self, fleet: Fleet, workers: usize, args: &UpArgs, data: &Path) -> anyhow::Result<()> {
        for number in fleet.numbers().take(workers) {
            self.start_engine(&fleet, number, args, data)?;
        }
        self.fleets.push(fleet);
        Ok(())
    }

    fn start_engine(&mut self, fleet: &Fleet, number: usize, args: &UpArgs, data: &Path) -> anyhow::Result<()> {
        let own = certified(data, &format!("{}/{}", fleet.role, fleet.name(number)))?;
        self.start_worker(fleet.role, number, args, &[&fleet.flags[..], &fleet.shares[number - fleet.first], &own].concat())
    }

    /// Starts the `n`th worker of a role. Workers are assigned to the hosts in turn.
    fn start_worker(&mut self, role: &str, n: usize, args: &UpArgs, flags: &[String]) -> anyhow::Result<()> {
        let host = if args.hosts > 1 { vec!["--host".to_owned(), format!("host-{}", n % args.hosts)] } else { Vec::new() };
        let (program, name) = (format!("tidemill-{role}"), format!("{role}-{n}"));
        self.workers.push(Process::start(&program, &name, &[flags, &host].concat())?.restarted(args.restarts));
        Ok(())
    }

    /// Waits until the coordinator behind `door` knows every worker.
    async fn wait_ready(&mut self, door: &Door, within: Duration) -> anyhow::Result<()> {
        let client = cluster_client()?;
        let deadline = Instant::now() + within;
        loop {
            if let Some(reason) = self.ended_process() {
                bail!(reason);
            }
            if known(&client, door).await.is_some_and(|known| known.is_all(self.members())) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("not every process was ready within {within:?} (see the log above; --ready-s waits longer)");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Restarts crashed processes, and after each SIGHUP all processes in turn; with `--autoscale`, starts and ends workers. Resolves with
    /// the reason when the cluster can no longer serve. The loss of one worker is only reported.
    async fn supervise(&mut self, args: &UpArgs, data: &Path) -> String {
        let restart = Duration::from_secs(args.ready_s);
        let mut hangups = process::hangups();
        let mut rolling = Rolling::default();
        let wanted = match (args.autoscale.is_some(), cluster_client()) {
            (false, _) => None,
            (true, Ok(client)) => Some(wanted::watch(client, self.doors.iter().map(Door::cluster_url).collect(), LOOK_EVERY, say)),
            (true, Err(error)) => return format!("the coordinators cannot be asked how many workers they want: {error}"),
        };
        loop {
            tokio::select! {
                () = tokio::time::sleep(TEND_EVERY) => {}
                Some(()) = hangups.recv() => {
                    say("restarting every process, one after the other");
                    // Pool nodes go first: once they are back, so are their blocks on disk.
                    let workers = self.workers.iter().chain(&self.coordinators);
                    rolling.begin(workers.map(|process| process.name.clone()));
                }
            }
            let now = Instant::now();
            for coordinator in &mut self.coordinators {
                if let Tended::Ended(how) = coordinator.tend(now) {
                    return how;
                }
            }
            self.tend_workers(now);
            if self.workers.is_empty() {
                return "no worker is left".into();
            }
            self.roll(&mut rolling, now, restart).await;
            // No scaling during a rolling restart: a worker that restarts would count as missing.
            if let Some(wanted) = wanted.as_ref().filter(|_| rolling.turn().is_none()) {
                let wanted = wanted.borrow().clone();
                self.scale(now, &wanted, args, data);
            }
        }
    }

    fn tend_workers(&mut self, now: Instant) {
        let Self { workers, leaving, fleets, .. } = self;
        workers.retain_mut(|worker| match worker.tend(now) {
            Tended::Alive => true,
            Tended::Ended(_) if leaving.remove(&worker.name) => {
                say(&format!("{} was not needed any more and has ended", worker.name));
                false
            }
            Tended::Ended(how) => {
                say(&format!("{how}; the cluster goes on without it"));
                let of_it = fleets.iter_mut().find(|fleet| fleet.numbers().any(|number| fleet.name(number) == worker.name));
                of_it.into_iter().for_each(|fleet| fleet.rests_until = Some(now + scaling::REST));
                false
            }
        });
    }

    /// Starts workers that are wanted but missing, and drains and ends those that are not wanted.
    fn scale(&mut self, now: Instant, wanted: &Wanted, args: &UpArgs, data: &Path) {
        let mut fleets = std::mem::take(&mut self.fleets);
        for fleet in &mut fleets {
            let Some(count) = wanted.of(&fleet.model, fleet.role) else { continue };
            let there = fleet.numbers().filter(|&number| self.workers.iter().any(|worker| worker.name == fleet.name(number)));
            let (leaving, running): (Vec<usize>, Vec<usize>) = there.partition(|&number| self.leaving.contains(&fleet.name(number)));
            let scaling::Change { start, dismiss } = fleet.change(now, count, &running, &leaving);
            for number in dismiss {
                let name = fleet.name(number);
                say(&format!("{count} {} workers are enough: {name} drains and ends", fleet.role));
                self.workers.iter_mut().filter(|worker| worker.name == name).for_each(|worker| worker.dismiss(now));
                self.leaving.insert(name);
            }
            for number in start {
                say(&format!("{count} {} workers are needed: {} starts", fleet.role, fleet.name(number)));
                if let Err(error) = self.start_engine(fleet, number, args, data) {
                    say(&format!("{} cannot start: {error:#}", fleet.name(number)));
                    fleet.rests_until = Some(now + scaling::REST);
                    break;
                }
            }
        }
        self.fleets = fleets;
    }

    /// Advances a rolling restart: checks whether the process being restarted is back, and restarts the next one.
    async fn roll(&mut self, rolling: &mut Rolling, now: Instant, within: Duration) {
        if let Some(turn) = rolling.turn().cloned()
            && self.is_back(&turn).await
            && rolling.done()
        {
            say("every process was restarted");
        }
        if let Some(name) = rolling.overdue(now, within) {
            say(&format!("{name} did not come back within {within:?}: the others are not restarted"));
        }
        if let Some(name) = rolling.next() {
            let process = self.workers.iter_mut().chain(&mut self.coordinators).find(|process| process.name == name);
            // A process that has ended in the meantime needs no restart.
            if let Some(pid) = process.and_then(Process::recall) {
                rolling.started(name, pid, now);
            }
        }
    }

    /// A worker is back when every coordinator has registered its new process; a coordinator, when it knows every worker.
    async fn is_back(&self, turn: &rolling::Turn) -> bool {
        let Ok(client) = cluster_client() else { return false };
        let running = |process: &Process| process.name == turn.name && process.id().is_some_and(|pid| pid != turn.old_pid);
        let of_worker = self.workers.iter().find(|process| running(process)).and_then(Process::id);
        if of_worker.is_none() && !self.coordinators.iter().any(running) {
            return false;
        }
        for door in &self.doors {
            let known = known(&client, door).await;
            let knows = known.is_some_and(|known| match of_worker {
                Some(pid) => known.has(pid),
                None => known.is_all(self.members()),
            });
            if !knows {
                return false;
            }
        }
        true
    }

    fn ended_process(&mut self) -> Option<String> {
        first_ended(&mut self.coordinators).or_else(|| first_ended(&mut self.workers))
    }

    /// Coordinators drain first, while their workers can still finish running requests. Returns whether every process ended well.
    async fn stop(self) -> bool {
        let mut clean = true;
        for (processes, within) in [(self.coordinators, COORDINATOR_END), (self.workers, WORKER_END)] {
            processes.iter().for_each(Process::terminate);
            let ends = join_all(processes.into_iter().map(|process| process.wait(within))).await;
            clean &= ends.into_iter().all(|well| well);
        }
        clean
    }
}

impl Door {
    fn cluster_url(&self) -> String {
        format!("http://{}/cluster", self.admin.as_ref().unwrap_or(&self.http))
    }
}

/// The fewest and the most engines of each model: `--autoscale`'s ranges, with `--prefill` and `--decode` as the first numbers; without it,
/// just these.
fn ranges(args: &UpArgs) -> anyhow::Result<Ranges> {
    let Some(autoscale) = &args.autoscale else {
        return Ok(Ranges { prefill: (args.prefill, args.prefill), decode: (args.decode, args.decode) });
    };
    let Ranges { prefill, decode } =
        scaling::parse_ranges(autoscale).map_err(|reason| anyhow::anyhow!("--autoscale {autoscale}: {reason}"))?;
    let first = |given: usize, (floor, ceiling): (usize, usize)| (given.clamp(floor, ceiling), ceiling);
    Ok(Ranges { prefill: first(args.prefill, prefill), decode: first(args.decode, decode) })
}

/// Each process gets a certificate of its own, a new one with each start.
fn certified(data: &Path, role_and_name: &str) -> anyhow::Result<[String; 2]> {
    let (dir, _) = issue::issue(&data.join("pki"), role_and_name, issue::DAYS)?;
    Ok(["--pki".to_owned(), dir.display().to_string()])
}

/// The address of the `n`th coordinator: the `n`th port after the first one's, unless any port will do.
fn nth(mut addr: SocketAddr, n: usize, flag: &str) -> anyhow::Result<SocketAddr> {
    if addr.port() != 0 {
        let port = u16::try_from(n).ok().and_then(|n| addr.port().checked_add(n));
        addr.set_port(port.with_context(|| format!("there are not {} ports from {} on for {flag}", n + 1, addr.port()))?);
    }
    Ok(addr)
}

/// `count` free addresses on loopback for the links between coordinators. Their ports are free for both UDP and TCP, since links use both.
fn free_addresses(count: usize) -> anyhow::Result<Vec<SocketAddr>> {
    let mut held = Vec::new();
    while held.len() < count {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").context("no port is free")?;
        let addr = udp.local_addr()?;
        if let Ok(tcp) = std::net::TcpListener::bind(addr) {
            held.push((addr, udp, tcp));
        }
    }
    Ok(held.into_iter().map(|(addr, ..)| addr).collect())
}

/// The flags that tell a pool node whose blocks it keeps; `None` if no model has any.
fn kept_models(args: &UpArgs, names: &[&str]) -> anyhow::Result<Option<Vec<String>>> {
    if let [] | [_] = names {
        if let Some(flag) = args.pool_shares.as_ref().map(|_| "--pool-shares").or(args.pool_floors.as_ref().map(|_| "--pool-floors")) {
            bail!("{flag} divides the KV pool nodes among several models, and here is one: leave it out");
        }
        return Ok(names.first().map(|name| vec!["--model-name".to_owned(), (*name).to_owned()]));
    }
    let shares: Vec<&str> = args.pool_shares.iter().flat_map(|shares| shares.split(',')).map(str::trim).collect();
    let of = |name: &str| shares.iter().find(|share| share.rsplit_once('=').is_some_and(|(named, _)| named == name));
    if let Some(unknown) = shares.iter().find(|share| !names.iter().any(|name| of(name) == Some(share))) {
        bail!("--pool-shares: `{unknown}` is not of the form NAME=WEIGHT, or names none of {}, or one twice", names.join(", "));
    }
    let models = names.iter().map(|name| of(name).map_or(*name, |share| *share)).collect::<Vec<_>>().join(",");
    let floors = args.pool_floors.iter().flat_map(|floors| ["--floors".to_owned(), floors.clone()]);
    Ok(Some(["--models".to_owned(), models].into_iter().chain(floors).collect()))
}

/// Whether a directory's model is an encoder, which generates no tokens.
fn is_encoder(dir: &Path) -> anyhow::Result<bool> {
    #[derive(serde::Deserialize)]
    struct Config {
        #[serde(default)]
        architectures: Vec<String>,
    }
    let path = dir.join("config.json");
    // The workers report what is wrong with the directory.
    let Ok(bytes) = std::fs::read(&path) else { return Ok(false) };
    let config: Config = serde_json::from_slice(&bytes).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(config.architectures.first().is_some_and(|name| ModelKind::of_architecture(name) != ModelKind::Decoder))
}

/// Flags for cores and threads of each model's prefill workers, then of each model's decode workers.
fn compute_shares(args: &UpArgs, workers: usize) -> anyhow::Result<Vec<Vec<String>>> {
    let threads = |threads: usize| ["--threads".to_owned(), threads.to_string()];
    if args.cores == "split" {
        let all = Cores::of_process()?;
        let parts = all.split(workers).with_context(|| {
            format!("--cores split needs a core for each of {workers} prefill and decode workers, and there are only the cores {all}: start fewer")
        })?;
        let share = |cores: Cores| ["--cores".to_owned(), cores.to_string()].into_iter().chain(args.threads.into_iter().flat_map(threads));
        return Ok(parts.into_iter().map(|cores| share(cores).collect()).collect());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(vec![threads(args.threads.unwrap_or((cores / workers).max(1))).to_vec(); workers])
}

/// A client without a proxy: front doors are on this machine.
fn cluster_client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build()
}

/// The workers that a coordinator knows.
enum Known {
    /// The workers' process ids.
    Members(Vec<u32>),
    /// The coordinator is ready but does not show the cluster: its front door is closed, and it has no operators' port.
    Hidden,
}

impl Known {
    fn is_all(&self, workers: usize) -> bool {
        match self {
            Self::Members(pids) => pids.len() >= workers,
            Self::Hidden => true,
        }
    }

    fn has(&self, pid: u32) -> bool {
        match self {
            Self::Members(pids) => pids.contains(&pid),
            Self::Hidden => true,
        }
    }
}

/// The workers that a coordinator reports, if it answers.
async fn known(client: &reqwest::Client, door: &Door) -> Option<Known> {
    #[derive(serde::Deserialize)]
    struct Answer {
        members: Vec<Member>,
    }
    #[derive(serde::Deserialize)]
    struct Member {
        pid: u32,
    }
    let at = door.admin.as_ref().unwrap_or(&door.http);
    let answer = client.get(door.cluster_url()).send().await.ok()?;
    if answer.status() == reqwest::StatusCode::NOT_FOUND && door.admin.is_none() {
        let ready = client.get(format!("http://{at}/ready")).send().await.ok()?;
        return ready.status().is_success().then_some(Known::Hidden);
    }
    let answer: Answer = answer.json().await.ok()?;
    Some(Known::Members(answer.members.into_iter().map(|member| member.pid).collect()))
}

/// The interval between looks at the number of workers that is wanted.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The interval between checks of all processes.
const TEND_EVERY: Duration = Duration::from_millis(100);
/// A coordinator gives running requests 30 s to finish and then needs a moment to end.
const COORDINATOR_END: Duration = Duration::from_secs(40);
/// Workers have nothing left to finish once the coordinators have ended.
const WORKER_END: Duration = Duration::from_secs(10);

fn first_ended(processes: &mut [Process]) -> Option<String> {
    processes.iter_mut().find_map(|p| p.ended().map(|status| format!("{} ended: {status}", p.name)))
}

/// The names by which clients know the models, and the models' directories.
async fn resolve_models(args: &UpArgs, data: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    if args.model.is_empty() {
        let dir = data.join("demo-model");
        demo_model::unpack(&dir).with_context(|| format!("cannot write {}", dir.display()))?;
        let [name] = &named(args, vec!["tidemill-demo".to_owned()])?[..] else { bail!("the built-in model has one name") };
        return Ok(vec![(name.clone(), dir)]);
    }
    let (mut names, mut dirs) = (Vec::new(), Vec::new());
    for model in &args.model {
        let dir = resolve_model(model, data).await?;
        names.push(match Path::new(model) {
            file if gguf::is_one(model) => gguf::name(file),
            path if path.is_dir() => directory_name(&dir),
            _ => model.clone(),
        });
        dirs.push(dir);
    }
    Ok(named(args, names)?.into_iter().zip(dirs).collect())
}

/// The directories of the draft models.
async fn resolve_drafts(args: &UpArgs, data: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let (drafts, models) = (args.draft_model.len(), args.model.len().max(1));
    if drafts > 0 && drafts != models {
        bail!("--draft-model is given {drafts} times for {models} models: give each model one, in the order of --model");
    }
    let mut dirs = Vec::new();
    for model in &args.draft_model {
        dirs.push(resolve_model(model, data).await?);
    }
    Ok(dirs)
}

/// The directory of a model, which is given as a directory, as a GGUF file or by its name at the hub.
async fn resolve_model(model: &str, data: &Path) -> anyhow::Result<PathBuf> {
    let kept = data.join("models");
    if gguf::is_one(model) {
        let file = PathBuf::from(model);
        return spawn_blocking(move || gguf::resolve(&file, &kept)).await.context("unpacking a GGUF file")?;
    }
    let progress = |d: &Download| {
        eprint!("\rtidemill: fetching {} ({} of {}), {} of {} MiB  ", d.file, d.index + 1, d.count, d.bytes >> 20, d.bytes_total >> 20);
    };
    Ok(model_dir::resolve(model, &Hub::from_env(kept), progress).await?)
}

/// The names given with `--served-model-name`, or else `names`.
fn named(args: &UpArgs, names: Vec<String>) -> anyhow::Result<Vec<String>> {
    match args.served_model_name.len() {
        0 => Ok(names),
        given if given == names.len() => Ok(args.served_model_name.clone()),
        given => {
            bail!("--served-model-name is given {given} times for {} models: give each model a name, in the order of --model", names.len())
        }
    }
}

fn directory_name(dir: &Path) -> String {
    let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    absolute.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}
