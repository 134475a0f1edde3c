//! The coordinator's settings, each stated once: flags and TOML keys are one struct, which `check` turns into [`Settings`].

pub mod audit;
pub mod autoscale;
mod bounds;
mod check;
pub mod classes;
pub mod context;
mod encoder;
pub mod feedback;
pub mod kafka;
pub mod models;
pub mod operators;
mod peers;
pub mod pii;
pub mod quota_server;
pub mod regions;
pub mod retention;
pub mod routing;
pub mod safety;
pub mod semantic;
pub mod server_tools;
pub mod tenants;
mod thinking;
pub mod traces;

use audit::AuditFlags;
use autoscale::AutoscaleFlags;
use classes::ClassFlags;
use context::{ContextFlags, MemoryFlags};
use feedback::FeedbackFlags;
use kafka::{KafkaFlags, KafkaSettings};
use models::{ModelFlag, ModelSettings, one_or_several, parse_aliases};
use operators::OperatorsFlags;
use peers::parse_peers;
use pii::PiiFlags;
use quota_server::QuotaServerFlags;
use regions::RegionsFlags;
use retention::RetentionFlags;
use routing::{RouteFlags, RouterFlags};
use safety::{SafetyFlags, parse_safety};
use semantic::{SemanticCache, SemanticFlags};
use serde::{Deserialize, Serialize};
use server_tools::ServerToolsFlags;
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};
use tenants::{JwtFlags, KeptIn, SheddingFlags, SinkFlags, TierFlags};
use thinking::parse_thought_budgets;
use tidemill_cluster::ClusterSettings;
use tidemill_gateway::{
    batches,
    features::feedback::FeedbackSettings,
    http::server::Limits as Connections,
    operators::OperatorSettings,
    safety::{Safety, audit::AuditSettings, moderator},
    serving::{gateway::settings::RequestSettings, regions::RegionSettings},
    store::{self, postgres::Address},
};
use tidemill_net::process::{LogFormat, Logging};
use tidemill_tenancy::{
    journal, jwt,
    limits::Share,
    shared,
    shedding::Watermarks,
    sink::http,
    tier::Tiers,
    usage::price::{Price, Prices},
};
use traces::{TracesFlags, TracesSettings};

/// The cluster's front door and scheduler.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flags {
    /// Name of this coordinator in logs, in `/cluster` and among its peers [default: coordinator-0]
    #[arg(long)]
    pub name: Option<String>,
    /// Address (TCP) of the front door, where clients send requests; port 0 picks one [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR")]
    pub http: Option<SocketAddr>,
    /// Address (TCP) of the operators' port: tenants and keys, the registry, rollouts, `/metrics`, `/cluster` and `/cluster/events`, which
    /// the front door then does not serve; `/health`, `/ready` and `/console` are at both. Loopback only, unless `admin_public`; port 0
    /// picks one [default: none, metrics and `/cluster` are at the front door]
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<SocketAddr>,
    /// Opens the front door to all callers, also at an address that other machines reach, until there is a key [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub open: Option<bool>,
    /// Lets `admin` be an address that other machines reach. Without `[operators]` every caller that reaches it can make keys [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub admin_public: Option<bool>,
    /// File with tenants and keys; coordinators of one host may share it [default: the registry, where there are several coordinators; else
    /// tenants.sqlite in `data`; without `data`, tenants and keys end with the process]
    #[arg(long, value_name = "FILE")]
    pub tenants: Option<PathBuf>,
    /// This coordinator's part of all quotas where there are several, such as 0/2 and 1/2; with a `[quota_server]`, while that fails
    /// [default: 0/1]
    #[arg(long, value_name = "I/N")]
    pub quota_share: Option<String>,
    /// A Redis or Valkey server on which coordinators share quotas: a section of the file [default: none, each has its share]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota_server: Option<QuotaServerFlags>,
    /// Milliseconds between two syncs of the usage log: a machine that loses power may lose this much of it. 0 syncs before each answer's
    /// end [default: 100]
    #[arg(long, value_name = "MS")]
    pub usage_sync_ms: Option<u64>,
    /// Size of one file of the usage log [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub usage_segment_bytes: Option<String>,
    /// PEM file with the front door's certificate chain: the front door then speaks HTTPS. Read again on SIGHUP [default: none, plain HTTP]
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key [default: none]
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Tiers of tenants: `[tier.NAME]` sections of the file [default: free, paid and premium]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tier: BTreeMap<String, TierFlags>,
    /// Prices of a million tokens: `[price.MODEL]` sections of the file [default: none, models are free]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub price: BTreeMap<String, Price>,
    /// An identity provider whose tokens are accepted: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jwt: Option<JwtFlags>,
    /// Operators who sign in at `admin`, with roles: a section of the file [default: none, reaching `admin` is enough]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operators: Option<OperatorsFlags>,
    /// An endpoint that usage events are posted to: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_sink: Option<SinkFlags>,
    /// Kafka topics that events are sent to: a section of the file; for programs that were built with the feature `kafka` [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kafka: Option<KafkaFlags>,
    /// Marks of load from which tiers are turned away: a section of the file [default: the section's defaults]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shedding: Option<SheddingFlags>,
    /// Address (UDP, and TCP beside it) that workers and other coordinators connect to: set it where there is more than one machine. Port 0
    /// picks one [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Directory with ca.pem, node.pem and node.key [default: none, required]
    #[arg(long, value_name = "DIR")]
    pub pki: Option<PathBuf>,
    /// Directory of a model, of which only configuration, tokenizer and chat template are read. For several models: the flag several times,
    /// or `[[model]]` sections of the file, with `dir` and `name` [default: none, required]
    #[arg(long, value_name = "DIR")]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_several")]
    pub model: Vec<ModelFlag>,
    /// Each model's name in the API, in the models' order [default: the directories' names]
    #[arg(long, value_name = "NAME")]
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_several")]
    pub served_model_name: Vec<String>,
    /// Other names that clients may ask for, such as gpt-5=tidemill-demo,o3=tidemill-demo; in the file a section: `"gpt-5" =
    /// "tidemill-demo"` [default: none]
    #[arg(long, value_name = "NAME=MODEL,…", value_parser = parse_aliases)]
    pub aliases: Option<BTreeMap<String, String>>,
    /// All coordinators of the cluster by name, with their `listen` addresses, such as c1=10.77.0.1:7100,c2=10.77.0.2:7100: the same list
    /// for each, which may name itself; in the file a section. Needs `data` [default: none, this one is alone]
    #[arg(long, value_name = "NAME=ADDR,…", value_parser = parse_peers)]
    pub peers: Option<BTreeMap<String, SocketAddr>>,
    /// Directory of this coordinator alone for stored responses, conversations, files and batches, tenants and their usage, and its copy of
    /// the registry [default: none, they end with the process]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// PostgreSQL database for stored responses and conversations, such as postgres:///tidemill?host=/run/postgresql, instead of a file in
    /// `data`. A password belongs into the file: every user of the machine sees flags [default: none]
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Days after which responses and conversations are deleted that nothing was added to; `[retention]` has other kinds, and each kind's
    /// own days [default: 30]
    #[arg(long, value_name = "DAYS")]
    pub store_days: Option<u64>,
    /// Size of all stored responses and conversations, such as 1GiB: over this, the oldest are deleted, of a tenant that has more than its
    /// share [default: 1GiB; 64MiB without `data` and `store`]
    #[arg(long, value_name = "SIZE")]
    pub store_bytes_max: Option<String>,
    /// Size of one conversation's items, or of all that a response answers: over this, nothing can be added [default: 32MiB]
    #[arg(long, value_name = "SIZE")]
    pub conversation_bytes_max: Option<String>,
    /// Lets what clients write in messages become special tokens, such as the end of a turn: for clients that are trusted [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub clients_marks: Option<bool>,
    /// Refuses a `max_tokens` that does not fit after the prompt, with the number that would; otherwise it becomes what fits [default:
    /// false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub max_tokens_must_fit: Option<bool>,
    /// Most tokens of thought for an effort that a client asks for, where the chat template has no word for efforts, such as
    /// low=1024,high=16384; in the file a section: `low = 1024` [default: minimal=512,low=1024,medium=8192,high=24576]
    #[arg(long, value_name = "EFFORT=TOKENS,…", value_parser = parse_thought_budgets)]
    pub thought_budgets: Option<BTreeMap<String, u32>>,
    /// Most calls of one answer that must call tools (`tool_choice: "required"`); `parallel_tool_calls: false` makes it one [default: 8]
    #[arg(long, value_name = "N")]
    pub forced_calls_max: Option<u32>,
    /// Size of all answers that are kept for requests repeated with their Idempotency-Key: over this, the oldest go; 0 keeps none [default:
    /// 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub replay_bytes_max: Option<String>,
    /// Most answers kept for such repeats, those in the making included [default: 4096]
    #[arg(long, value_name = "N")]
    pub replay_answers_max: Option<usize>,
    /// Seconds for which such an answer is kept after its end [default: 600]
    #[arg(long, value_name = "S")]
    pub replay_keep_s: Option<u64>,
    /// Seconds for which a request with an Idempotency-Key goes on without its client, which may come back [default: 30]
    #[arg(long, value_name = "S")]
    pub replay_grace_s: Option<u64>,
    /// Size of the response cache, in memory: answers of greedy and seeded requests, given again to equal requests; the least recently used
    /// goes first. 0: no such cache [default: 0]
    #[arg(long, value_name = "SIZE")]
    pub response_cache_bytes_max: Option<String>,
    /// Seconds for which the response cache gives an answer again [default: 3600]
    #[arg(long, value_name = "S")]
    pub response_cache_keep_s: Option<u64>,
    /// Largest file of a batch's requests [default: 200MiB]
    #[arg(long, value_name = "SIZE")]
    pub batch_file_bytes_max: Option<String>,
    /// Most requests of one batch [default: 50000]
    #[arg(long, value_name = "N")]
    pub batch_requests_max: Option<usize>,
    /// Most files of one tenant, batches' answers among them [default: 500]
    #[arg(long, value_name = "N")]
    pub batch_files_max: Option<usize>,
    /// Size of all files of one tenant: over this, it stores no more until it deletes some [default: 4GiB]
    #[arg(long, value_name = "SIZE")]
    pub batch_bytes_max: Option<String>,
    /// Size of all files of all tenants [default: 64GiB]
    #[arg(long, value_name = "SIZE")]
    pub batch_total_bytes_max: Option<String>,
    /// Free space of the data directory's disk below which no more files of clients are written [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub batch_disk_reserve: Option<String>,
    /// Days after which files, and batches that have ended, are deleted; `[retention]` has days for each of them [default: 30]
    #[arg(long, value_name = "DAYS")]
    pub batch_days: Option<u64>,
    /// Ages at which what is stored is deleted, by its kind: a section of the file [default: the section's defaults]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention: Option<RetentionFlags>,
    /// Most requests of all batches that run at a time [default: 32]
    #[arg(long, value_name = "N")]
    pub batch_concurrency: Option<usize>,
    /// Longest uncached suffix of a prompt, in tokens, that the decode worker computes itself; 0 sends every full block to a prefill worker
    /// [default: by predicted time]
    #[arg(long, value_name = "TOKENS")]
    pub local_tail_tokens: Option<u32>,
    /// Rule by which sequences are placed: goodput; or, as baselines to compare with, least_ttft, random, load_balancing, local_cache,
    /// global_cache, colocated or disaggregated [default: goodput]
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// Most sequences that wait for a place. In a full queue a higher priority displaces the lowest, and a tenant displaces the newest of
    /// one that has more waiting; a request that is displaced, or displaces none, gets 429 [default: 1024]
    #[arg(long, value_name = "N")]
    pub queue_max: Option<usize>,
    /// Longest wait for a place, in seconds; then 503 [default: 60]
    #[arg(long, value_name = "S")]
    pub queue_wait_s: Option<u64>,
    /// Most sequences at one decode worker at a time [default: as many as it asks for]
    #[arg(long, value_name = "N")]
    pub decode_sequences_max: Option<u32>,
    /// Reads of a block over the network after which the reader's host gets a copy; 0 makes no copies [default: 3]
    #[arg(long, value_name = "N")]
    pub replicate_after: Option<u8>,
    /// Longest life of a request, in seconds; then 504 [default: 600]
    #[arg(long, value_name = "S")]
    pub request_timeout_s: Option<u64>,
    /// Largest body of a request, such as 8MiB; a larger one gets 413, and so does one of more than 2,097,152 JSON values [default: 32MiB]
    #[arg(long, value_name = "SIZE")]
    pub body_bytes_max: Option<String>,
    /// Longest time until a request's body has arrived, and longest silence in an upload, which must also come at 16 KiB/s after a third of
    /// this, in seconds; then 408 [default: 60]
    #[arg(long, value_name = "S")]
    pub body_timeout_s: Option<u64>,
    /// Most connections of clients at a time. When all are taken, the oldest with a half-sent head gives way, then the longest idle;
    /// further clients wait to be accepted. The process needs as many open files [default: 4096]
    #[arg(long, value_name = "N")]
    pub connections_max: Option<usize>,
    /// Size of all bodies that are on their way or being read, counted from their heads on. A client may have a quarter of it, then 429;
    /// 503 when all is taken [default: 256MiB]
    #[arg(long, value_name = "SIZE")]
    pub bodies_bytes_max: Option<String>,
    /// Most connections of one address at a time: its own half-sent heads and idle connections give way, and if all are busy it gets 429.
    /// Behind a proxy, the same as `connections_max` [default: a quarter of `connections_max`]
    #[arg(long, value_name = "N")]
    pub connections_per_address_max: Option<usize>,
    /// Longest time that a connection of a client may be idle between two requests, in seconds. It should be more than a proxy before this
    /// keeps its own, or requests get lost in between [default: 130]
    #[arg(long, value_name = "S")]
    pub idle_timeout_s: Option<u64>,
    /// Names that `admin`, and the front door while it is open, may be asked for by, besides addresses and `localhost` [default: none]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub hosts: Option<Vec<String>>,
    /// Origins of web pages that may use the front door, such as `https://chat.example`; `*` for all, with a warning in the log [default:
    /// none but its own]
    #[arg(long, value_name = "ORIGIN,…", value_delimiter = ',')]
    pub cors_origins: Option<Vec<String>>,
    /// Time to first token, in milliseconds, that the class `standard` promises where there is no `[[class]]` [default: 2000]
    #[arg(long, value_name = "MS")]
    pub slo_ttft_ms: Option<u64>,
    /// Time per further token, in milliseconds, that the class `standard` promises where there is no `[[class]]` [default: 100]
    #[arg(long, value_name = "MS")]
    pub slo_tpot_ms: Option<u64>,
    /// Service classes, at most 16: `[[class]]` sections of the file [default: standard, interactive and batch]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub class: Vec<ClassFlags>,
    /// Checks of prompts and answers for harm; a section of the file says how [default: off]
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on", value_parser = parse_safety)]
    pub safety: Option<SafetyFlags>,
    /// Seconds between two rounds of probes, which find engines that compute wrongly; 0: no probes [default: 0]
    #[arg(long, value_name = "S")]
    pub probe_every_s: Option<u64>,
    /// Difference, in nats, that log-probabilities of probes may have: more than 0 where devices do not compute alike, bit by bit [default:
    /// 0]
    #[arg(long, value_name = "NATS")]
    pub probe_tolerance: Option<f32>,
    /// Says how many workers each model wants, such as prefill=1..4,decode=1..4 for one to four of each role; with warm, window_s,
    /// start_s and cooldown_s, or as a section of the file [default: none, no number is wanted]
    #[arg(long, value_name = "ROLE=RANGE,…")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<AutoscaleFlags>,
    /// Days for which the audit log in `data` keeps blocks by safety checks, appeals against them, and operators' changes; 0: no log. Or a
    /// section of the file [default: 0]
    #[arg(long, value_name = "DAYS")]
    pub audit: Option<AuditFlags>,
    /// Collector that takes traces of requests as OTLP over HTTP, such as http://127.0.0.1:4318; a section of the file says more [default:
    /// none, nothing is traced]
    #[arg(long, value_name = "URL")]
    pub traces: Option<TracesFlags>,
    /// Takes users' feedback on answers; a section of the file says how [default: off]
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on")]
    pub feedback: Option<FeedbackFlags>,
    /// Data that identifies people, hidden from models and taken out of answers: a section of the file [default: off]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pii: Option<PiiFlags>,
    /// Long conversations fitted into the model's window: a section of the file [default: the section's defaults]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<ContextFlags>,
    /// Facts about users remembered from one conversation to the next: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryFlags>,
    /// Answers to similar questions, for tenants that opted in: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub semantic_cache: Option<SemanticFlags>,
    /// Tools that the coordinator runs for models: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_tools: Option<ServerToolsFlags>,
    /// This cluster as one of several regions: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions: Option<RegionsFlags>,
    /// Settings that all routing rules share: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router: Option<RouterFlags>,
    /// Routing rules, which choose the model that answers: `[[route]]` sections of the file, from top to bottom [default: none]
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub route: Vec<RouteFlags>,
    /// Seconds at the end in which requests are still taken while `/ready` answers 503, so that load balancers notice in time [default: 0]
    #[arg(long, value_name = "S")]
    pub drain_announce_s: Option<u64>,
    /// Seconds that running requests then have to finish [default: 30]
    #[arg(long, value_name = "S")]
    pub drain_s: Option<u64>,
    /// Log filter: error, warn, info, debug, or directives such as info,tidemill_net=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Format of log lines: text, or json with an object a line [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Ends the process when its standard input ends; and `beat` appears on standard output each second while the event loop turns
    /// [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub exit_with_parent: Option<bool>,
}

/// The checked settings, with all defaults filled in.
#[derive(Debug)]
pub struct Settings {
    pub name: String,
    pub http: SocketAddr,
    pub admin: Option<SocketAddr>,
    pub listen: SocketAddr,
    pub pki: PathBuf,
    /// The other coordinators.
    pub peers: BTreeMap<String, SocketAddr>,
    /// The served models: at least one, with distinct names.
    pub models: Vec<ModelSettings>,
    /// Aliases, each with its model.
    pub aliases: BTreeMap<String, String>,
    /// Whether `http` may be an address that other machines reach while there is no key.
    pub open: bool,
    /// The TLS files; `None` for plain HTTP.
    pub tls: Option<TlsFiles>,
    pub tenants: KeptIn,
    pub share: Share,
    /// The server on which all coordinators share quotas, if there is one.
    pub quota_server: Option<shared::Settings>,
    pub tiers: Tiers,
    pub prices: Prices,
    pub jwt: Option<jwt::Settings>,
    /// The sign-in of operators; without it, reaching `admin` is enough.
    pub operators: Option<OperatorSettings>,
    /// This region and others, if this cluster is one of several.
    pub regions: Option<RegionSettings>,
    pub shedding: Option<Watermarks>,
    pub usage: journal::Settings,
    /// The endpoint for usage events, if any.
    pub usage_sink: Option<http::Settings>,
    /// The Kafka topics for events, if any.
    pub kafka: Option<KafkaSettings>,
    /// The directory of responses, conversations and the registry; without it they are kept in memory.
    pub data: Option<PathBuf>,
    /// The database of responses and conversations, instead of the directory.
    pub database: Option<Address>,
    pub store: store::Limits,
    /// Whether clients' texts may become special tokens.
    pub clients_marks: bool,
    /// The maximum number of calls in an answer that must call tools.
    pub forced_calls_max: u32,
    /// Bounds of clients' files and batches.
    pub batches: batches::Limits,
    /// The program that this one starts as its helpers, for grammars and templates: itself.
    pub helper: PathBuf,
    /// The safety checks; `None` if prompts and answers are not checked.
    pub safety: Option<Safety>,
    /// The moderation model; without it, texts of which the classifier is unsure pass.
    pub judge: Option<moderator::Settings>,
    /// The audit log of blocks, if there is one.
    pub audit: Option<AuditSettings>,
    /// The recording of traces, if it is on.
    pub traces: Option<TracesSettings>,
    /// The recording of feedback, if it is on.
    pub feedback: Option<FeedbackSettings>,
    /// The tools that run on the server, if any.
    pub server_tools: Option<tidemill_gateway::features::server_tools::Settings>,
    /// Answers that are kept for similar questions. It takes its place in `requests` once the models are known.
    pub semantic_cache: SemanticCache,
    pub cluster: ClusterSettings,
    pub requests: RequestSettings,
    pub connections: Connections,
    /// The time before shutdown in which requests are still accepted although `/ready` fails.
    pub drain_announce: Duration,
    pub drain: Duration,
    pub log: Logging,
    pub exit_with_parent: bool,
}

/// The files of the gateway's certificate chain and key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[cfg(test)]
mod tests;
