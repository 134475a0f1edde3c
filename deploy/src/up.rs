//! `tidemill up`: a whole cluster on one machine, as real processes connected over loopback.
//!
//! - here: the command's flags, and what of them each process is given
//! - `degrees`: tensor-parallel ranks and pipeline stages by role; `models`: the models' directories and names; `fleet`: the processes, once
//!   they run

mod degrees;
mod fleet;
mod models;
mod rolling;
mod scaling;

use crate::{
    operators,
    processes::{Process, say},
};
use anyhow::{Context, bail};
use degrees::Degrees;
use fleet::{Cluster, Door, certified};
use models::{is_encoder, resolve_drafts, resolve_models};
use scaling::{Fleet, Ranges};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};
use tidemill_net::{cores::Cores, identity::issue, process};

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
    /// Tensor-parallel ranks that each prefill and decode worker splits its model over, such as 2, or prefill=4,decode=2; each rank needs a
    /// thread. On a CPU only [default: 1]
    #[arg(long, value_name = "N")]
    tensor_parallel: Option<Degrees>,
    /// Stages that each prefill and decode worker splits its model's layers over, such as 2, or prefill=2,decode=3; each is a process. On a CPU
    /// only [default: 1]
    #[arg(long, value_name = "N")]
    pipeline: Option<Degrees>,
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
    /// Milliseconds between two reports of a worker [default: 1000]. For tests, which wait for reports: hence it is not in the help
    #[arg(long, hide = true)]
    heartbeat_ms: Option<u64>,
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
    let mut cluster = Cluster::new(operators::look_token(args.coordinator_config.as_deref())?);
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

impl Cluster {
    /// Starts every process and waits until requests will succeed.
    async fn start(&mut self, args: &UpArgs, ranges: Ranges, data: &Path) -> anyhow::Result<()> {
        let models = resolve_models(args, data).await?;
        let drafts = resolve_drafts(args, data).await?;
        let Ranges { prefill: (prefill, prefill_most), decode: (decode, decode_most) } = ranges;
        let stages = args.pipeline.unwrap_or(Degrees { prefill: 1, decode: 1 });
        let shares = compute_shares(args, models.len() * (prefill_most * stages.prefill + decode_most * stages.decode))?;
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

        let heartbeat = args.heartbeat_ms.map(|ms| ("--heartbeat-ms", ms.to_string()));
        let links: Vec<_> = [("--coordinators", quic.join(","))].into_iter().chain(heartbeat).collect();
        self.start_pool(args, &models, &common(&links), data)?;
        let (prefill_shares, decode_shares) = shares.split_at(models.len() * prefill_most * stages.prefill);
        for (place, (name, dir)) in models.iter().enumerate() {
            let of_model = |extra: &[(&str, String)]| common(&[&links[..], &[("--model-name", name.clone())], extra].concat());
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
            let ranks = |of_role: fn(Degrees) -> usize| {
                args.tensor_parallel.map(of_role).into_iter().flat_map(|ranks| ["--tensor-parallel".to_owned(), ranks.to_string()])
            };
            let fleet = |role, stages: usize, flags: &[String], shares: &[Vec<String>], places: std::ops::Range<usize>| Fleet {
                model: name.clone(),
                role,
                stages,
                flags: flags.to_vec(),
                first: places.start,
                shares: shares[places.start * stages..places.end * stages].to_vec(),
                rests_until: None,
            };
            if has_kv {
                let prefill_flags: Vec<String> = engine.iter().cloned().chain(ranks(|degrees| degrees.prefill)).collect();
                let places = numbered(prefill_most);
                self.start_fleet(fleet("prefill", stages.prefill, &prefill_flags, prefill_shares, places), prefill, args, data)?;
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
            let decode_flags: Vec<String> = engine.into_iter().chain(given).chain(ranks(|degrees| degrees.decode)).collect();
            let places = numbered(decode_most);
            self.start_fleet(fleet("decode", stages.decode, &decode_flags, decode_shares, places), decode, args, data)?;
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

/// The address of the `n`th coordinator: the `n`th port after the first one's, unless any port will do.
fn nth(mut addr: SocketAddr, n: usize, flag: &str) -> anyhow::Result<SocketAddr> {
    if addr.port() != 0 {
        let port = u16::try_from(n).ok().and_then(|n| addr.port().checked_add(n));
        addr.set_port(port.with_context(|| format!("there are not {} ports from {} on for {flag}", n + 1, addr.port()))?);
    }
    Ok(addr)
}

/// `count` free addresses on loopback for the links to coordinators or to stages. Their ports are free for both UDP and TCP, since links use
/// both.
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

/// Flags for cores and threads of each model's prefill workers, then of each model's decode workers; each stage of a worker counts.
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
