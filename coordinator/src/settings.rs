//! The coordinator's knobs, each stated once: flags and TOML keys are one struct, checked into [`Settings`].

pub mod audit;
mod bounds;
pub mod classes;
pub mod context;
pub mod feedback;
pub mod models;
pub mod pii;
pub mod routing;
pub mod safety;
pub mod semantic;
pub mod server_tools;
pub mod tenants;

use audit::AuditFlags;
use bounds::{bytes, positive, within};
use classes::ClassFlags;
use context::{ContextFlags, MemoryFlags};
use feedback::FeedbackFlags;
use models::{ModelFlag, ModelSettings, check_models, one_or_several, parse_aliases};
use pii::PiiFlags;
use routing::{RouteFlags, RouterFlags};
use safety::{SafetyFlags, parse_safety};
use semantic::SemanticFlags;
use serde::{Deserialize, Serialize};
use server_tools::ServerToolsFlags;
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};
use tenants::{JwtFlags, KeptIn, SheddingFlags, SinkFlags, TierFlags};
use tidemill_cluster::{
    ClusterSettings,
    admission::AdmissionPolicy,
    class::Classes,
    probes::ProbeSettings,
    schedule::{Policy, PolicyName},
};
use tidemill_gateway::{
    base::{memories, origins::Origins},
    batch::file::Room,
    batches,
    cache::{replay, response_cache},
    context::Strategy,
    features::{feedback::FeedbackSettings, summarizer},
    http::server::Limits as Connections,
    routing::Router,
    safety::{Safety, audit::AuditSettings, moderator, pii::Pii},
    serving::gateway::settings::SemanticSettings,
    store::{self, postgres::Address},
};
use tidemill_net::{
    config::{ConfigError, invalid, parse_bytes, required},
    uplink::HEARTBEAT_DEAD,
};
use tidemill_registry::command::NAME_BYTES_MAX;
use tidemill_tenancy::{
    journal, jwt,
    limits::Share,
    shedding::Watermarks,
    sink,
    tier::Tiers,
    usage::price::{Price, Prices},
};

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
    /// Opens the front door to everybody, also at an address that other machines reach, until there is a key [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub open: Option<bool>,
    /// Lets `admin` be an address that other machines reach. Anybody who reaches it can make keys [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub admin_public: Option<bool>,
    /// File with tenants and keys; coordinators of one host may share it [default: the registry, where there are several coordinators; else
    /// tenants.sqlite in `data`; without `data`, tenants and keys end with the process]
    #[arg(long, value_name = "FILE")]
    pub tenants: Option<PathBuf>,
    /// This coordinator's part of all quotas where there are several, such as 0/2 and 1/2 [default: 0/1]
    #[arg(long, value_name = "I/N")]
    pub quota_share: Option<String>,
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
    /// An endpoint that usage events are posted to: a section of the file [default: none]
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_sink: Option<SinkFlags>,
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
    /// Days after which responses and conversations are deleted that nothing was added to [default: 30]
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
    /// Days after which files, and batches that have ended, are deleted [default: 30]
    #[arg(long, value_name = "DAYS")]
    pub batch_days: Option<u64>,
    /// Most requests of all batches that run at a time [default: 16]
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
    /// Days for which the audit log in `data` keeps blocks by safety checks and appeals against them; 0: no log. Or a section of the file
    /// [default: 0]
    #[arg(long, value_name = "DAYS")]
    pub audit: Option<AuditFlags>,
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
    /// Ends the process when its standard input ends; and `beat` appears on standard output each second while the event loop turns
    /// [default: false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub exit_with_parent: Option<bool>,
}

/// Everything checked, defaults filled in.
#[derive(Debug)]
pub struct Settings {
    pub name: String,
    pub http: SocketAddr,
    pub admin: Option<SocketAddr>,
    pub listen: SocketAddr,
    pub pki: PathBuf,
    /// The other coordinators.
    pub peers: BTreeMap<String, SocketAddr>,
    /// At least one, each with another name.
    pub models: Vec<ModelSettings>,
    /// Other names of models.
    pub aliases: BTreeMap<String, String>,
    /// Until there is a key, everybody who can reach `http` may ask. Otherwise, only whoever is on this machine.
    pub open: bool,
    /// `None`: plain HTTP.
    pub tls: Option<TlsFiles>,
    pub tenants: KeptIn,
    pub share: Share,
    pub tiers: Tiers,
    pub prices: Prices,
    pub jwt: Option<jwt::Settings>,
    pub shedding: Option<Watermarks>,
    pub usage: journal::Settings,
    /// `None`: usage events stay here.
    pub usage_sink: Option<sink::Settings>,
    /// Where responses, conversations and the registry are stored; `None`: in memory.
    pub data: Option<PathBuf>,
    /// Where responses and conversations are stored instead.
    pub database: Option<Address>,
    pub store: store::Limits,
    /// Lets texts of clients become special tokens.
    pub clients_marks: bool,
    pub max_tokens_must_fit: bool,
    /// Most calls of an answer that must call tools.
    pub forced_calls_max: u32,
    /// Of clients' files and batches.
    pub batches: batches::Limits,
    /// The program that judges grammars: this one.
    pub grammar_helper: PathBuf,
    /// `None`: everything may be asked and answered.
    pub safety: Option<Safety>,
    /// Its last stage; `None`: what the classifier is not sure of may be asked.
    pub judge: Option<moderator::Settings>,
    pub pii: Option<Pii>,
    /// Of stored conversations, where chats do not say.
    pub context: Strategy,
    pub summaries: summarizer::Settings,
    /// `None`: nothing is remembered of users.
    pub memories: Option<memories::Limits>,
    /// `None`: blocks are not recorded.
    pub audit: Option<AuditSettings>,
    /// `None`: none is taken.
    pub feedback: Option<FeedbackSettings>,
    /// `None`: no tools run here.
    pub server_tools: Option<tidemill_gateway::features::server_tools::Settings>,
    /// `None`: the model that is asked for answers.
    pub router: Option<Router>,
    /// Of answers kept for repeated requests.
    pub replay: replay::Limits,
    pub response_cache: Option<response_cache::Limits>,
    /// Of answers to similar questions.
    pub semantic_cache: Option<SemanticSettings>,
    pub cluster: ClusterSettings,
    pub request_timeout: Duration,
    pub body_bytes_max: usize,
    pub bodies_bytes_max: u64,
    pub connections: Connections,
    pub hosts: Vec<String>,
    pub cors: Origins,
    /// The time at the end in which requests are still taken, although `/ready` says no.
    pub drain_announce: Duration,
    pub drain: Duration,
    pub log: String,
    pub exit_with_parent: bool,
}

/// The front door's certificate chain and key, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Less than a group of events, and every group would have a file of its own.
const USAGE_SEGMENT_BYTES_MIN: &str = "1MiB";

/// A copy takes the place of another block, so it should more likely than not be read again. On the Mooncake conversation
/// trace, split at random over two hosts, that holds from the third read over the network on (57 % of copies are read again;
/// 30 % after the first read, 44 % after the second). It saves 23 % of such reads; copying at the first read saves 46 %, with
/// eight times the copies.
const REPLICATE_AFTER: u8 = 3;

/// More than a process may have open files.
const CONNECTIONS_MAX: usize = 1 << 20;

/// Less than a long turn.
const CONVERSATION_BYTES_MIN: &str = "1MiB";
/// Less than this, and one long conversation would push all others out.
const STORE_BYTES_MIN: &str = "16MiB";

/// More would fill the queue that live requests wait in.
const BATCH_CONCURRENCY_MAX: usize = 1024;
/// Of one answer.
const FORCED_CALLS_MAX: u32 = 1024;

/// A hundred years.
const STORE_DAYS_MAX: u64 = 36_500;
/// A week.
const PROBE_EVERY_S_MAX: u64 = 7 * 24 * 3600;

/// Coordinators of one cluster: what agrees must be few.
const COORDINATORS_MAX: usize = 5;

/// `a=1.2.3.4:5,…` as a map.
fn parse_peers(text: &str) -> Result<BTreeMap<String, SocketAddr>, String> {
    let pair = |pair: &str| {
        let (name, addr) = pair.split_once('=').ok_or_else(|| format!("`{pair}` is not NAME=ADDR"))?;
        let addr = addr.trim().parse().map_err(|error| format!("`{addr}`: {error}"))?;
        Ok((name.trim().to_owned(), addr))
    };
    text.split(',').map(pair).collect()
}

/// The other coordinators than `name`.
fn check_peers(mut peers: BTreeMap<String, SocketAddr>, name: &str, stored: bool) -> Result<BTreeMap<String, SocketAddr>, ConfigError> {
    peers.remove(name);
    if peers.len() >= COORDINATORS_MAX {
        return Err(invalid("peers", peers.len() + 1, format!("a cluster has at most {COORDINATORS_MAX} coordinators, best 1, 3 or 5")));
    }
    if let Some(name) = peers.keys().chain([&name.to_owned()]).find(|name| !(1..=NAME_BYTES_MAX).contains(&name.len())) {
        return Err(invalid("peers", name, format!("a name has 1 to {NAME_BYTES_MAX} bytes")));
    }
    if !peers.is_empty() && !stored {
        return Err(invalid("peers", peers.len(), "a coordinator among several must keep the registry: say where with --data"));
    }
    Ok(peers)
}

impl Flags {
    pub fn check(self) -> Result<Settings, ConfigError> {
        let models = check_models(self.model, self.served_model_name)?;
        let body_bytes_max = bytes("body_bytes_max", self.body_bytes_max, "32MiB", "1")?;
        let bodies = self.bodies_bytes_max.unwrap_or_else(|| "256MiB".into());
        let bodies_bytes_max = parse_bytes(&bodies).map_err(|reason| invalid("bodies_bytes_max", &bodies, reason))?;
        if bodies_bytes_max < body_bytes_max {
            return Err(invalid("bodies_bytes_max", &bodies, "it must be at least body_bytes_max, which is one body's"));
        }
        let aliases = self.aliases.unwrap_or_default();
        if let Some((name, model)) =
            aliases.iter().find(|(name, model)| name.is_empty() || models.iter().all(|served| served.name != **model))
        {
            let served = models.iter().map(|served| format!("`{}`", served.name)).collect::<Vec<_>>().join(", ");
            return Err(invalid("aliases", format!("{name}={model}"), format!("must name a served model: {served}")));
        }
        // The address itself may hold a password.
        let database = self
            .store
            .map(|address| address.parse::<Address>().map_err(|reason| invalid("store", "(the address)", reason.to_string())))
            .transpose()?;
        let kept = self.data.is_some() || database.is_some();
        let connections_max = within("connections_max", self.connections_max.unwrap_or(4096), 1..=CONNECTIONS_MAX)?;
        let per_address = self.connections_per_address_max;
        if let Some(each) = per_address.filter(|each| !(1..=connections_max).contains(each)) {
            return Err(invalid("connections_per_address_max", each, "it must be at least 1, and at most connections_max"));
        }
        let seconds = |key, value: Option<u64>, default| positive(key, value.unwrap_or(default)).map(Duration::from_secs);
        let policy_name = self.policy.as_deref().map_or(Ok(PolicyName::default()), str::parse);
        let policy = Policy {
            name: policy_name.map_err(|unknown| invalid("policy", self.policy.as_deref().unwrap_or_default(), unknown.to_string()))?,
            local_tail_tokens: self.local_tail_tokens,
            decode_sequences_max: match self.decode_sequences_max {
                Some(0) => return Err(invalid("decode_sequences_max", 0, "must be at least 1")),
                limit => limit,
            },
            replicate_after: Some(self.replicate_after.unwrap_or(REPLICATE_AFTER)).filter(|&reads| reads > 0),
        };
        let classes = if self.class.is_empty() {
            let limit = |key, value: Option<u64>, default| positive(key, value.unwrap_or(default)).map(|ms| ms as f64);
            Classes::defaults(limit("slo_ttft_ms", self.slo_ttft_ms, 2000)?, limit("slo_tpot_ms", self.slo_tpot_ms, 100)?)
        } else {
            let classes = self.class.into_iter().map(ClassFlags::check).collect::<Result<Vec<_>, _>>()?;
            Classes::new(classes).map_err(|error| invalid("class", "[[class]]", error.to_string()))?
        };
        let tiers = tenants::tiers(self.tier, &classes)?;
        let router = routing::router(self.router, self.route, &models, &aliases, &tiers)?;
        let share = self.quota_share.as_deref().map_or(Ok(Share::WHOLE), str::parse);
        let share = share.map_err(|reason: &str| invalid("quota_share", self.quota_share.as_deref().unwrap_or_default(), reason))?;
        let tls = match (self.tls_cert, self.tls_key) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
            (Some(cert), None) => return Err(invalid("tls_cert", cert.display(), "needs tls_key, the file with its private key")),
            (None, Some(key)) => return Err(invalid("tls_key", key.display(), "needs tls_cert, the file with its certificate chain")),
        };
        let http = self.http.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8000)));
        if let Some(admin) = self.admin.filter(|admin| !admin.ip().is_loopback() && self.admin_public != Some(true)) {
            let reason = "others can reach this address, and whoever reaches it can make keys: use 127.0.0.1, or say admin_public";
            return Err(invalid("admin", admin, reason));
        }
        let name = self.name.unwrap_or_else(|| "coordinator-0".into());
        if let Some(sink) = self.usage_sink.as_ref().filter(|_| self.data.is_none()) {
            return Err(invalid("usage_sink.url", &sink.url, "events come from the usage log, which needs a place: say where with --data"));
        }
        let peers = check_peers(self.peers.unwrap_or_default(), &name, self.data.is_some())?;
        let earlier = self.data.as_ref().map(|data| data.join("tenants.sqlite"));
        let (context, summaries) = self.context.unwrap_or_default().check(&models, &aliases)?;
        let (safety, judge) = self.safety.map_or(Ok((None, None)), |safety| safety.check(&models))?;
        let semantic_cache = self.semantic_cache.map_or(Ok(None), |semantic| semantic.check(&models, &aliases))?;
        let (pii, finder) = self.pii.unwrap_or_default().check()?;
        let audit = self.audit.unwrap_or_default().check(self.data.as_deref(), &finder)?;
        let feedback = self.feedback.map_or(Ok(None), |feedback| feedback.check(self.data.as_deref(), &finder))?;
        Ok(Settings {
            context,
            summaries,
            memories: self.memory.map_or(Ok(None), MemoryFlags::check)?,
            tenants: match (self.tenants, earlier) {
                (Some(file), _) => KeptIn::File(file),
                (None, Some(earlier)) if !peers.is_empty() => KeptIn::Registry { earlier },
                (None, Some(file)) => KeptIn::File(file),
                (None, None) => KeptIn::Memory,
            },
            peers,
            usage_sink: self.usage_sink.map(|sink| sink.check(&name)).transpose()?,
            name,
            http,
            open: self.open == Some(true),
            tls,
            share,
            prices: tenants::prices(self.price)?,
            jwt: self.jwt.map(|jwt| jwt.check(&tiers)).transpose()?,
            shedding: self.shedding.unwrap_or_default().check(&classes)?,
            tiers,
            usage: journal::Settings {
                sync_every: Duration::from_millis(self.usage_sync_ms.unwrap_or(100)),
                segment_bytes: bytes("usage_segment_bytes", self.usage_segment_bytes, "64MiB", USAGE_SEGMENT_BYTES_MIN)?,
                segment_age: None,
            },
            admin: self.admin,
            listen: self.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0))),
            pki: required(None, "pki", self.pki)?,
            models,
            aliases,
            data: self.data,
            database,
            store: store::Limits {
                age: Duration::from_secs(within("store_days", self.store_days.unwrap_or(30), 1..=STORE_DAYS_MAX)? * 24 * 3600),
                bytes: bytes("store_bytes_max", self.store_bytes_max, if kept { "1GiB" } else { "64MiB" }, STORE_BYTES_MIN)?,
                history_bytes: bytes("conversation_bytes_max", self.conversation_bytes_max, "32MiB", CONVERSATION_BYTES_MIN)?,
            },
            clients_marks: self.clients_marks.unwrap_or(false),
            max_tokens_must_fit: self.max_tokens_must_fit.unwrap_or(false),
            forced_calls_max: within(
                "forced_calls_max",
                self.forced_calls_max.unwrap_or(tidemill_gateway::text::FORCED_CALLS_MAX),
                1..=FORCED_CALLS_MAX,
            )?,
            batches: batches::Limits {
                file_bytes: bytes("batch_file_bytes_max", self.batch_file_bytes_max, "200MiB", "1")?,
                lines: positive("batch_requests_max", self.batch_requests_max.unwrap_or(50_000))?,
                room: Room {
                    files: positive("batch_files_max", self.batch_files_max.unwrap_or(500))?,
                    bytes: bytes("batch_bytes_max", self.batch_bytes_max, "4GiB", "1")?,
                },
                age: Duration::from_secs(within("batch_days", self.batch_days.unwrap_or(30), 1..=STORE_DAYS_MAX)? * 24 * 3600),
                at_once: within("batch_concurrency", self.batch_concurrency.unwrap_or(16), 1..=BATCH_CONCURRENCY_MAX)?,
                line_bytes: body_bytes_max as usize,
            },
            // The same program, even if another has been put in its place since.
            grammar_helper: "/proc/self/exe".into(),
            router,
            safety,
            judge,
            pii,
            audit,
            feedback,
            server_tools: self.server_tools.map(ServerToolsFlags::check).transpose()?,
            replay: replay::Limits {
                bytes: bytes("replay_bytes_max", self.replay_bytes_max, "64MiB", "0")?,
                recordings: positive("replay_answers_max", self.replay_answers_max.unwrap_or(4096))?,
                keep: seconds("replay_keep_s", self.replay_keep_s, 600)?,
                grace: Duration::from_secs(self.replay_grace_s.unwrap_or(30)),
            },
            semantic_cache,
            response_cache: {
                let keep = seconds("response_cache_keep_s", self.response_cache_keep_s, 3600)?;
                let bytes = bytes("response_cache_bytes_max", self.response_cache_bytes_max, "0", "0")?;
                (bytes > 0).then_some(response_cache::Limits { bytes, keep })
            },
            cluster: ClusterSettings {
                id_base: u64::from(rand::random::<u32>()) << 32,
                admission: AdmissionPolicy { queue_max: positive("queue_max", self.queue_max.unwrap_or(1024))? },
                policy,
                classes,
                queue_wait_max: seconds("queue_wait_s", self.queue_wait_s, 60)?,
                heartbeat_dead: HEARTBEAT_DEAD,
                probes: match self.probe_every_s.unwrap_or(0) {
                    0 => None,
                    every_s => Some(ProbeSettings {
                        every: Duration::from_secs(within("probe_every_s", every_s, 1..=PROBE_EVERY_S_MAX)?),
                        tolerance: match self.probe_tolerance.unwrap_or(0.0) {
                            tolerance @ 0.0..=10.0 => tolerance,
                            wrong => return Err(invalid("probe_tolerance", wrong, "must be from 0 to 10")),
                        },
                    }),
                },
            },
            request_timeout: seconds("request_timeout_s", self.request_timeout_s, 600)?,
            body_bytes_max: body_bytes_max as usize,
            bodies_bytes_max,
            connections: Connections { connections: connections_max, per_address },
            hosts: self.hosts.unwrap_or_default(),
            cors: {
                let origins = self.cors_origins.unwrap_or_default();
                Origins::parse(&origins).map_err(|problem| invalid("cors_origins", origins.join(","), problem))?
            },
            drain_announce: Duration::from_secs(self.drain_announce_s.unwrap_or(0)),
            drain: Duration::from_secs(self.drain_s.unwrap_or(30)),
            log: self.log.unwrap_or_else(|| "info".into()),
            exit_with_parent: self.exit_with_parent.unwrap_or(false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn flags() -> Flags {
        Flags { model: vec!["/models/tiny".into()], pki: Some("/pki".into()), served_model_name: vec!["tiny".into()], ..Flags::default() }
    }

    #[test]
    fn defaults_are_filled_in() {
        let settings = flags().check().unwrap();
        assert_eq!((settings.http.port(), settings.body_bytes_max), (8000, 32 << 20));
        assert_eq!(settings.cluster.id_base & 0xffff_ffff, 0);
    }

    #[test]
    fn peers_are_the_others_and_need_a_disk() {
        let peers = || parse_peers("coordinator-0=10.0.0.1:4000, b=10.0.0.2:4000").ok();
        let settings = Flags { peers: peers(), data: Some("/data".into()), ..flags() }.check().unwrap();
        assert_eq!(settings.peers.into_iter().collect::<Vec<_>>(), [("b".to_owned(), "10.0.0.2:4000".parse().unwrap())]);
        assert!(Flags { peers: peers(), ..flags() }.check().unwrap_err().to_string().contains("--data"));
        let many = (0..7).map(|n| (n.to_string(), "10.0.0.2:4000".parse().unwrap())).collect();
        assert!(Flags { peers: Some(many), data: Some("/data".into()), ..flags() }.check().is_err());
        assert!(parse_peers("b").unwrap_err().contains("NAME=ADDR"));
        assert!(parse_peers("b=host").unwrap_err().contains("`host`"));
    }

    #[test]
    fn usage_goes_somewhere_from_a_disk_and_encrypted() {
        let of = |file: &str, data: bool| {
            let usage_sink = toml::from_str::<Flags>(&format!("[usage_sink]\n{file}")).unwrap().usage_sink;
            let checked = Flags { usage_sink, data: data.then(|| "/data".into()), ..flags() }.check();
            checked.map(|settings| settings.usage_sink.map(|sink| sink.source)).map_err(|error| error.to_string())
        };
        assert_eq!(of("url = 'https://books.example/usage'", true), Ok(Some("coordinator-0".into())));
        for (file, data, words) in [("url = 'https://books.example/'", false, "--data"), ("url = 'http://books.example/'", true, "https")] {
            let error = of(file, data).unwrap_err();
            assert!(error.contains("usage_sink") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn an_error_names_its_key() {
        for (flags, key) in [
            (Flags { model: Vec::new(), ..flags() }, "--model"),
            (Flags { pki: None, ..flags() }, "--pki"),
            (Flags { body_bytes_max: Some("8MB".into()), ..flags() }, "body_bytes_max"),
            (Flags { queue_max: Some(0), ..flags() }, "queue_max"),
            (Flags { policy: Some("best".into()), ..flags() }, "`policy` = best"),
            (Flags { connections_max: Some(usize::MAX), ..flags() }, "connections_max"),
            (Flags { connections_per_address_max: Some(0), ..flags() }, "connections_per_address_max"),
            (Flags { bodies_bytes_max: Some("1MiB".into()), ..flags() }, "bodies_bytes_max"),
            (Flags { served_model_name: Vec::new(), ..flags() }, "`model` = /models/tiny"),
            (Flags { request_timeout_s: Some(0), ..flags() }, "request_timeout_s"),
            (Flags { aliases: parse_aliases("gpt-5=big").ok(), ..flags() }, "`aliases` = gpt-5=big"),
            (Flags { store_days: Some(u64::MAX), ..flags() }, "store_days"),
            (Flags { replay_bytes_max: Some("64MB".into()), ..flags() }, "replay_bytes_max"),
            (Flags { response_cache_bytes_max: Some("64MB".into()), ..flags() }, "response_cache_bytes_max"),
            (Flags { response_cache_keep_s: Some(0), ..flags() }, "response_cache_keep_s"),
            (Flags { replay_answers_max: Some(0), ..flags() }, "replay_answers_max"),
            (Flags { replay_keep_s: Some(0), ..flags() }, "replay_keep_s"),
            (Flags { store_bytes_max: Some("1MiB".into()), ..flags() }, "store_bytes_max"),
            (Flags { conversation_bytes_max: Some("1kiB".into()), ..flags() }, "conversation_bytes_max"),
            (Flags { conversation_bytes_max: Some("1023KiB".into()), ..flags() }, "conversation_bytes_max"),
            (Flags { store: Some("postgres://me@localhost/x?sslmode=perhaps".into()), ..flags() }, "sslmode"),
            (Flags { admin: Some(([0, 0, 0, 0], 9100).into()), ..flags() }, "admin_public"),
            (Flags { tls_cert: Some("cert.pem".into()), ..flags() }, "tls_key"),
            (Flags { quota_share: Some("2/2".into()), ..flags() }, "quota_share"),
            (Flags { batch_bytes_max: Some("0".into()), ..flags() }, "batch_bytes_max"),
            (Flags { batch_concurrency: Some(0), ..flags() }, "batch_concurrency"),
            (Flags { batch_days: Some(0), ..flags() }, "batch_days"),
            (Flags { probe_every_s: Some(u64::MAX), ..flags() }, "probe_every_s"),
            (Flags { audit: "30".parse().ok(), ..flags() }, "--data"),
            (Flags { audit: "40000".parse().ok(), data: Some("/data".into()), ..flags() }, "audit.days"),
            (Flags { probe_every_s: Some(9), probe_tolerance: Some(f32::NAN), ..flags() }, "probe_tolerance"),
            (Flags { usage_segment_bytes: Some("1KiB".into()), ..flags() }, "usage_segment_bytes"),
        ] {
            let error = flags.check().unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }
}
