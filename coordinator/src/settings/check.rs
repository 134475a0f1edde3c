//! From flags to settings: defaults are filled in, and an error names its key.

use super::{
    Flags, Settings, TlsFiles,
    bounds::{bytes, positive, within},
    classes::ClassFlags,
    context::{ContextSettings, MemoryFlags},
    models::check_models,
    peers::check_peers,
    quota_server::QuotaServerFlags,
    retention::DAYS_MAX,
    routing,
    semantic::SemanticCache,
    server_tools::ServerToolsFlags,
    tenants::{self, KeptIn},
    thinking::check_thought_budgets,
};
use std::{net::SocketAddr, time::Duration};
use tidemill_cluster::{
    ClusterSettings,
    admission::AdmissionPolicy,
    class::Classes,
    probes::ProbeSettings,
    schedule::{Policy, PolicyName},
};
use tidemill_gateway::{
    base::origins::Origins,
    batch::file::Room,
    batches,
    cache::{replay, response_cache},
    http::server::Limits as Connections,
    serving::gateway::settings::RequestSettings,
    store::{self, postgres::Address},
};
use tidemill_net::{
    config::{ConfigError, invalid, parse_bytes, required},
    process::Logging,
    uplink::HEARTBEAT_DEAD,
};
use tidemill_tenancy::{journal, limits::Share};

/// The least size of a file of the usage log. With less, every group of events would have a file of its own.
const USAGE_SEGMENT_BYTES_MIN: &str = "1MiB";

/// The default of `replicate_after`. A copy takes the place of another block, so it should more likely than not be read again. On the
/// Mooncake conversation trace, split at random over two hosts, that holds from the third read over the network on (57 % of copies are
/// read again; 30 % after the first read, 44 % after the second). It saves 23 % of such reads; copying at the first read saves 46 %, with
/// eight times the copies.
const REPLICATE_AFTER: u8 = 3;

/// The most connections: more than a process may have open files.
const CONNECTIONS_MAX: usize = 1 << 20;

/// The longest time that a connection may be idle: a day.
const IDLE_TIMEOUT_S_MAX: u64 = 24 * 3600;

/// The least room for a conversation. A long turn takes more.
const CONVERSATION_BYTES_MIN: &str = "1MiB";
/// The least room for all conversations. With less, one long conversation would push all others out.
const STORE_BYTES_MIN: &str = "16MiB";

/// The maximum number of concurrent requests of batches. More would fill the queue in which live requests wait.
const BATCH_CONCURRENCY_MAX: usize = 1024;
/// The maximum number of calls that one answer may be forced to make.
const FORCED_CALLS_MAX: u32 = 1024;

/// The longest time between two rounds of probes: a week.
const PROBE_EVERY_S_MAX: u64 = 7 * 24 * 3600;

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
        // The address itself may contain a password.
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
        let (router, examples) = routing::router(self.router, self.route, &models, &aliases, &tiers)?;
        let region_header = router.as_ref().and_then(|router| router.region_header.as_deref());
        let regions = self.regions.map(|regions| regions.check(region_header)).transpose()?;
        if self.open == Some(true) && regions.as_ref().is_some_and(|regions| !regions.pins.regions.is_empty()) {
            return Err(invalid("open", true, "regions.pins are about tenants, and callers without a key have none"));
        }
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
            let reason = "others can reach this address and could make keys: use 127.0.0.1, or say admin_public";
            return Err(invalid("admin", admin, reason));
        }
        let name = self.name.unwrap_or_else(|| "coordinator-0".into());
        if let Some(sink) = self.usage_sink.as_ref().filter(|_| self.data.is_none()) {
            return Err(invalid("usage_sink.url", &sink.url, "events come from the usage log, which needs a place: say where with --data"));
        }
        let kafka = self.kafka.map(|kafka| kafka.check(&name, self.data.is_some())).transpose()?;
        let peers = check_peers(self.peers.unwrap_or_default(), &name, self.data.is_some())?;
        let earlier = self.data.as_ref().map(|data| data.join("tenants.sqlite"));
        let ContextSettings { strategy: context, summaries, recall } = self.context.unwrap_or_default().check(&models, &aliases)?;
        let (safety, judge) = self.safety.map_or(Ok((None, None)), |safety| safety.check(&models))?;
        let semantic_cache = self.semantic_cache.map_or(Ok(SemanticCache::Off), |semantic| semantic.check(&models, &aliases))?;
        let store_days = within("store_days", self.store_days.unwrap_or(30), 1..=DAYS_MAX)?;
        let batch_days = within("batch_days", self.batch_days.unwrap_or(30), 1..=DAYS_MAX)?;
        let retention = self.retention.unwrap_or_default().check(store_days, batch_days)?;
        let (pii, finder) = self.pii.unwrap_or_default().check()?;
        let audit = self.audit.unwrap_or_default().check(self.data.as_deref(), &finder)?;
        let feedback = self.feedback.map_or(Ok(None), |feedback| feedback.check(self.data.as_deref(), &finder))?;
        let jwt = self.jwt.map(|jwt| jwt.check(&tiers)).transpose()?;
        let hosts = self.hosts.unwrap_or_default();
        if let Some(operators) = &self.operators {
            let reason = match (self.admin, &audit) {
                (None, _) => "operators sign in at a port of their own: say which with --admin",
                (_, None) => "what operators change is recorded: say for how many days with --audit",
                _ => "",
            };
            if !reason.is_empty() {
                return Err(invalid("operators.issuer", &operators.issuer, reason));
            }
        }
        let operators = self.operators.map(|operators| operators.check(&hosts, jwt.as_ref())).transpose()?;
        if let Some(kafka) = &kafka {
            kafka.check_logs(audit.is_some(), feedback.is_some())?;
        }
        let queue_wait_max = seconds("queue_wait_s", self.queue_wait_s, 60)?;
        Ok(Settings {
            tenants: match (self.tenants, earlier) {
                (Some(file), _) => KeptIn::File(file),
                (None, Some(earlier)) if !peers.is_empty() => KeptIn::Registry { earlier },
                (None, Some(file)) => KeptIn::File(file),
                (None, None) => KeptIn::Memory,
            },
            peers,
            traces: self.traces.map(|traces| traces.check(&name)).transpose()?,
            usage_sink: self.usage_sink.map(|sink| sink.check(&name)).transpose()?,
            kafka,
            name,
            http,
            open: self.open == Some(true),
            tls,
            share,
            quota_server: self.quota_server.map(QuotaServerFlags::check).transpose()?,
            prices: tenants::prices(self.price)?,
            jwt,
            operators,
            regions,
            shedding: self.shedding.unwrap_or_default().check(&classes)?,
            tiers,
            usage: journal::Settings {
                sync_every: Duration::from_millis(self.usage_sync_ms.unwrap_or(100)),
                segment_bytes: bytes("usage_segment_bytes", self.usage_segment_bytes, "64MiB", USAGE_SEGMENT_BYTES_MIN)?,
            },
            admin: self.admin,
            listen: self.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0))),
            pki: required(None, "pki", self.pki)?,
            models,
            aliases,
            data: self.data,
            database,
            store: store::Limits {
                bytes: bytes("store_bytes_max", self.store_bytes_max, if kept { "1GiB" } else { "64MiB" }, STORE_BYTES_MIN)?,
                history_bytes: bytes("conversation_bytes_max", self.conversation_bytes_max, "32MiB", CONVERSATION_BYTES_MIN)?,
            },
            clients_marks: self.clients_marks.unwrap_or(false),
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
                total_bytes: bytes("batch_total_bytes_max", self.batch_total_bytes_max, "64GiB", "1")?,
                reserve_bytes: bytes("batch_disk_reserve", self.batch_disk_reserve, "1GiB", "0")?,
                files_age: retention.files,
                batches_age: retention.batches,
                at_once: within("batch_concurrency", self.batch_concurrency.unwrap_or(32), 1..=BATCH_CONCURRENCY_MAX)?,
                line_bytes: body_bytes_max as usize,
            },
            // The same program, even if its file has been replaced since.
            helper: "/proc/self/exe".into(),
            safety,
            judge,
            audit,
            feedback,
            server_tools: self.server_tools.map(ServerToolsFlags::check).transpose()?,
            semantic_cache,
            cluster: ClusterSettings {
                id_base: u64::from(rand::random::<u32>()) << 32,
                admission: AdmissionPolicy { queue_max: positive("queue_max", self.queue_max.unwrap_or(1024))? },
                policy,
                classes,
                queue_wait_max,
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
                autoscale: self.autoscale.map(|autoscale| autoscale.check(queue_wait_max)).transpose()?,
            },
            requests: RequestSettings {
                context,
                summaries,
                recall,
                router,
                examples,
                pii,
                semantic_cache: None,
                ages: retention.ages,
                memories: self.memory.map_or(Ok(None), MemoryFlags::check)?,
                max_tokens_must_fit: self.max_tokens_must_fit.unwrap_or(false),
                thought_budgets: check_thought_budgets(self.thought_budgets)?,
                replay: replay::Limits {
                    bytes: bytes("replay_bytes_max", self.replay_bytes_max, "64MiB", "0")?,
                    recordings: positive("replay_answers_max", self.replay_answers_max.unwrap_or(4096))?,
                    keep: seconds("replay_keep_s", self.replay_keep_s, 600)?,
                    grace: Duration::from_secs(self.replay_grace_s.unwrap_or(30)),
                },
                response_cache: {
                    let keep = seconds("response_cache_keep_s", self.response_cache_keep_s, 3600)?;
                    let bytes = bytes("response_cache_bytes_max", self.response_cache_bytes_max, "0", "0")?;
                    (bytes > 0).then_some(response_cache::Limits { bytes, keep })
                },
                request_timeout: seconds("request_timeout_s", self.request_timeout_s, 600)?,
                body_bytes_max: body_bytes_max as usize,
                bodies_bytes_max,
                body_timeout: seconds("body_timeout_s", self.body_timeout_s, 60)?,
                hosts,
                cors: {
                    let origins = self.cors_origins.unwrap_or_default();
                    Origins::parse(&origins).map_err(|problem| invalid("cors_origins", origins.join(","), problem))?
                },
            },
            connections: Connections {
                connections: connections_max,
                per_address,
                idle_max: Duration::from_secs(within("idle_timeout_s", self.idle_timeout_s.unwrap_or(130), 1..=IDLE_TIMEOUT_S_MAX)?),
            },
            drain_announce: Duration::from_secs(self.drain_announce_s.unwrap_or(0)),
            drain: Duration::from_secs(self.drain_s.unwrap_or(30)),
            log: Logging::new(self.log, self.log_format),
            exit_with_parent: self.exit_with_parent.unwrap_or(false),
        })
    }
}
