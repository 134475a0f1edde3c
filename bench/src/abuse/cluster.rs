//! The cluster under attack: `tidemill up` with keys, and its state as seen from outside.

use super::AbuseArgs;
use crate::chaos::fault::{children, lives, signal};
use anyhow::{Context, bail, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    net::SocketAddr,
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

const READY: Duration = Duration::from_secs(120);
const STOP: Duration = Duration::from_secs(60);
/// The time within which an operator's request is answered.
const OPERATOR: Duration = Duration::from_secs(20);
/// The number of keys that are made at a time.
const KEYS_AT_ONCE: usize = 16;
/// The lines of the cluster's log that are kept.
const LINES_MAX: usize = 200;
/// The interval at which the memory of the coordinator's children is measured.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Settings with stores small enough for an attack of seconds to fill.
const SETTINGS: &str = r#"
store_bytes_max = "64MiB"
replay_bytes_max = "16MiB"
batch_bytes_max = "256MiB"
[feedback]
bytes_max = "16MiB"
[memory]
[semantic_cache]
model = "attacked"
bytes_max = "8MiB"
"#;
/// The name of the only model.
const MODEL: &str = "attacked";
/// An identity provider that can be reached, and says nothing.
fn trust(provider: SocketAddr) -> String {
    format!(
        "[jwt]\nissuer = \"https://id.example\"\naudience = [\"attacked\"]\nalgorithms = [\"ES256\"]\n\
         jwks_url = \"http://{provider}/keys\"\n"
    )
}
/// A tier without quotas, whose class stays the lowest.
const UNMETERED: &str = r#"
[tier.free]
requests_per_minute = "none"
tokens_per_minute = "none"
"#;

pub struct Cluster {
    child: Child,
    pid: u32,
    url: String,
    admin: String,
    pub model: String,
    http: reqwest::Client,
    log: Arc<Mutex<Log>>,
    provider: JoinHandle<()>,
    _settings: TempDir,
}

/// The log lines of the cluster's processes.
#[derive(Default)]
struct Log {
    last: VecDeque<String>,
    /// Panics, errors, and ends of processes.
    alarms: Vec<String>,
}

/// A key, as issued to its tenant.
#[derive(Debug, Deserialize)]
pub struct Key {
    pub id: String,
    #[serde(rename = "key")]
    pub secret: String,
}

impl Cluster {
    pub async fn start(args: &AbuseArgs) -> anyhow::Result<Self> {
        let binary = std::env::current_exe()?.with_file_name("tidemill");
        ensure!(binary.is_file(), "{} is missing: build the whole workspace (`cargo build --release`)", binary.display());
        let dir = tempfile::tempdir()?;
        let settings = dir.path().join("coordinator.toml");
        let silent = TcpListener::bind("127.0.0.1:0").await?;
        let trust = trust(silent.local_addr()?);
        let provider = tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((asked, _)) = silent.accept().await {
                held.push(asked);
            }
        });
        fs::write(&settings, [SETTINGS, &trust, if args.unmetered { UNMETERED } else { "" }].concat())?;
        let mut command = Command::new(binary);
        command.args(["up", "--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--device", "cpu", "--log", "warn"]);
        command.args(["--served-model-name", MODEL]);
        command.args(["--pool-memory", "256MiB", "--kv-memory", "256MiB", "--response-cache", "16MiB", "--coordinator-config"]);
        command.arg(&settings);
        if args.echo {
            command.args(["--engine", "echo", "--step-ms", "10"]);
        }
        if let Some(model) = &args.model {
            command.arg("--model").arg(model);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
        let pid = child.id().context("`tidemill up` ended at once")?;
        let mut said = BufReader::new(child.stderr.take().context("stderr is piped")?).lines();
        let (told, admin) = oneshot::channel();
        let log = Arc::new(Mutex::new(Log::default()));
        let writes = Arc::clone(&log);
        tokio::spawn(async move {
            let mut told = Some(told);
            while let Ok(Some(line)) = said.next_line().await {
                if let Some(admin) = line.strip_prefix("tidemill: operators' port ")
                    && let Some(told) = told.take()
                {
                    let _ = told.send(admin.to_owned());
                }
                lock(&writes).add(line);
            }
        });
        let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let ready = timeout(READY, lines.next_line()).await.context("`tidemill up` is not ready")??;
        let ready = ready.with_context(|| format!("`tidemill up` ended before it was ready: {}", lock(&log).said()))?;
        let url = ready.strip_prefix("ready ").and_then(|url| url.strip_suffix("/v1")).context("`tidemill up` says where it is")?;
        let admin = timeout(READY, admin).await.context("`tidemill up` did not say its operators' port")??;
        let http = reqwest::Client::builder().no_proxy().timeout(OPERATOR).build()?;
        Ok(Self { child, pid, url: url.to_owned(), admin, model: MODEL.to_owned(), http, log, provider, _settings: dir })
    }

    /// The front door, such as `http://127.0.0.1:40123`.
    pub fn url(&self) -> &str {
        &self.url
    }

    pub async fn key(&self, tenant: &str, tier: &str) -> anyhow::Result<Key> {
        let made = self.http.post(format!("{}/admin/keys", self.admin)).json(&json!({"tenant": tenant, "tier": tier})).send().await?;
        ensure!(made.status().is_success(), "no key for {tenant}: {}", made.text().await?);
        Ok(made.json().await?)
    }

    /// Makes a key for each of this many tenants.
    pub async fn keys(&self, tenants: &str, tier: &str, count: usize) -> anyhow::Result<Vec<Key>> {
        let tenants: Vec<_> = (0..count).map(|n| format!("{tier}-{tenants}-{n}")).collect();
        let made = stream::iter(&tenants).map(|tenant| self.key(tenant, tier)).buffered(KEYS_AT_ONCE);
        made.try_collect().await
    }

    /// Revokes a key, with which the tenant's batches end.
    pub async fn revoke(&self, key: &Key) -> anyhow::Result<()> {
        let revoked = self.http.delete(format!("{}/admin/keys/{}", self.admin, key.id)).send().await?;
        ensure!(revoked.status().is_success(), "the key is not revoked: {}", revoked.text().await?);
        Ok(())
    }

    /// The response of an operator's request to `path`.
    pub async fn operator(&self, path: &str) -> anyhow::Result<String> {
        Ok(self.http.get(format!("{}{path}", self.admin)).send().await?.error_for_status()?.text().await?)
    }

    pub async fn change_tenant(&self, tenant: &str, change: &Value) -> anyhow::Result<()> {
        let changed = self.http.put(format!("{}/admin/tenants/{tenant}", self.admin)).json(change).send().await?;
        ensure!(changed.status().is_success(), "tenant {tenant} is not changed: {}", changed.text().await?);
        Ok(())
    }

    /// Waits until no request runs. Returns the ones that still run, if any.
    pub async fn rest(&self, within: Duration) -> Option<String> {
        let deadline = Instant::now() + within;
        loop {
            let busy = match self.operator("/cluster").await.map(|view| serde_json::from_str::<Value>(&view)) {
                Ok(Ok(view)) if view["requests"] == 0 => return None,
                Ok(Ok(view)) => format!("{} requests", view["requests"]),
                Ok(Err(error)) => error.to_string(),
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > deadline {
                return Some(busy);
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// The workers' links, each named by its worker and its number since registration.
    async fn links(&self) -> anyhow::Result<BTreeSet<String>> {
        let view: Value = serde_json::from_str(&self.operator("/cluster").await?)?;
        let members = view["members"].as_array().context("`/cluster` lists no members")?;
        Ok(members.iter().map(|member| format!("{} {}", member["name"], member["epoch"])).collect())
    }

    fn processes(&self) -> BTreeMap<u32, String> {
        children(self.pid).into_iter().collect()
    }

    fn coordinator(&self) -> anyhow::Result<u32> {
        let coordinator = self.processes().into_iter().find(|(_, program)| program == "tidemill-coordinator");
        Ok(coordinator.context("there is no coordinator")?.0)
    }

    pub fn coordinator_mib(&self) -> anyhow::Result<f64> {
        resident_mib(self.coordinator()?, "VmRSS")
    }

    async fn metrics(&self) -> anyhow::Result<Metrics> {
        Ok(Metrics::parse(&self.operator("/metrics").await?))
    }

    /// The last lines of its log.
    pub fn last_words(&self) -> String {
        lock(&self.log).said()
    }

    /// Ends the cluster as an operator does. Returns `false` if something did not end well.
    pub async fn stop(mut self) -> bool {
        self.provider.abort();
        let pids: Vec<u32> = self.processes().into_keys().collect();
        signal(self.pid, Signal::SIGTERM);
        let ended = timeout(STOP, self.child.wait()).await;
        ended.is_ok_and(|ended| ended.is_ok_and(|status| status.success())) && !pids.into_iter().any(lives)
    }
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Log {
    fn add(&mut self, line: String) {
        let is_alarm = ["panicked", " ERROR ", "is killed", "starting it again"].iter().any(|sign| line.contains(sign));
        if is_alarm && self.alarms.len() < LINES_MAX {
            self.alarms.push(line.clone());
        }
        if self.last.len() == LINES_MAX {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }

    fn said(&self) -> String {
        self.last.iter().rev().take(20).rev().cloned().collect::<Vec<_>>().join("\n")
    }
}

/// The cluster from the beginning of an attack to its end.
pub struct Watch {
    links: BTreeSet<String>,
    processes: BTreeMap<u32, String>,
    coordinator: u32,
    mib: f64,
    metrics: Metrics,
    alarms: usize,
    helpers: JoinHandle<f64>,
    over: oneshot::Sender<()>,
}

/// The observations of the cluster during an attack.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Watched {
    /// The peak of the coordinator's memory, and its increase during the attack.
    pub peak_mib: f64,
    pub extra_mib: f64,
    /// The peak memory of the grammar helper's processes.
    pub helpers_mib: f64,
    pub links_lost: Vec<String>,
    pub processes_ended: Vec<String>,
    /// An upper bound of the longest delay of an event loop's task, in seconds, by loop.
    pub delay_s: BTreeMap<String, f64>,
    /// The counters of refusals that increased, with the increase.
    pub refusals: BTreeMap<String, f64>,
    /// Panics and errors in the log.
    pub alarms: Vec<String>,
}

impl Watch {
    pub async fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let coordinator = cluster.coordinator()?;
        let metrics = cluster.metrics().await?;
        // The peak is measured from now on.
        fs::write(format!("/proc/{coordinator}/clear_refs"), "5").context("cannot reset the coordinator's peak of memory")?;
        let (over, mut is_over) = oneshot::channel();
        let helpers = tokio::spawn(async move {
            let mut peak: f64 = 0.0;
            while timeout(LOOK_EVERY, &mut is_over).await.is_err() {
                let all = descendants(coordinator).into_iter().filter_map(|pid| resident_mib(pid, "RssAnon").ok());
                peak = peak.max(all.sum());
            }
            peak
        });
        Ok(Self {
            links: cluster.links().await?,
            processes: cluster.processes(),
            coordinator,
            mib: resident_mib(coordinator, "VmRSS")?,
            metrics,
            alarms: lock(&cluster.log).alarms.len(),
            helpers,
            over,
        })
    }

    pub async fn end(self, cluster: &Cluster) -> Watched {
        let _ = self.over.send(());
        let processes = cluster.processes();
        let gone = self.processes.iter().filter(|(pid, _)| !processes.contains_key(pid));
        let mut watched = Watched {
            processes_ended: gone.map(|(pid, program)| format!("{program} {pid}")).collect(),
            helpers_mib: self.helpers.await.unwrap_or_default(),
            ..Watched::default()
        };
        if let Ok(peak) = resident_mib(self.coordinator, "VmHWM") {
            (watched.peak_mib, watched.extra_mib) = (peak, peak - self.mib);
        }
        let mut alarms: Vec<_> = lock(&cluster.log).alarms.iter().skip(self.alarms).cloned().collect();
        match cluster.links().await {
            Ok(links) => watched.links_lost = self.links.difference(&links).cloned().collect(),
            Err(error) => alarms.push(format!("`/cluster` does not answer: {error:#}")),
        }
        match cluster.metrics().await {
            Ok(metrics) => {
                for name in ["front_door", "links"] {
                    watched.delay_s.insert(name.to_owned(), metrics.longest_delay_since(&self.metrics, name));
                }
                watched.refusals = metrics.refusals_since(&self.metrics);
            }
            Err(error) => alarms.push(format!("`/metrics` does not answer: {error:#}")),
        }
        Watched { alarms, ..watched }
    }
}

/// The processes that a process started, directly or indirectly.
fn descendants(of: u32) -> Vec<u32> {
    let mut all: Vec<u32> = children(of).into_iter().map(|(pid, _)| pid).collect();
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        all.extend(children(*pid).into_iter().map(|(pid, _)| pid));
        next += 1;
    }
    all
}

/// A field of `/proc/PID/status`, in MiB.
fn resident_mib(pid: u32, field: &str) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).with_context(|| format!("process {pid} has ended"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib: f64 = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no such field")?.parse()?;
    Ok(kib / 1024.0)
}

/// Samples by name and labels, as written.
#[derive(Debug, Default)]
struct Metrics(BTreeMap<String, f64>);

/// The counters of refusals.
const REFUSALS: [&str; 6] = [
    "tidemill_share_refusals_total",
    "tidemill_quota_refusals_total",
    "tidemill_connections_closed_total",
    "tidemill_shed_total",
    "tidemill_grammar_verdicts_total",
    "tidemill_evicted_total",
];

impl Metrics {
    fn parse(text: &str) -> Self {
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    fn since(&self, before: &Self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0) - before.0.get(name).copied().unwrap_or(0.0)
    }

    fn refusals_since(&self, before: &Self) -> BTreeMap<String, f64> {
        let names = self.0.keys().filter(|name| REFUSALS.iter().any(|refusal| name.starts_with(refusal)));
        let more = names.map(|name| (name.trim_start_matches("tidemill_").to_owned(), self.since(before, name)));
        more.filter(|(_, more)| *more > 0.0).collect()
    }

    /// The bound of the last bucket that grew.
    fn longest_delay_since(&self, before: &Self, event_loop: &str) -> f64 {
        let prefix = format!("tidemill_event_loop_delay_seconds_bucket{{loop=\"{event_loop}\",le=\"");
        let bound = |name: &str| name.strip_prefix(&prefix)?.strip_suffix("\"}")?.parse::<f64>().ok();
        let mut buckets: Vec<(f64, f64)> = self.0.keys().filter_map(|name| Some((bound(name)?, self.since(before, name)))).collect();
        buckets.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let all = buckets.last().map_or(0.0, |(_, count)| *count);
        // Buckets are cumulative.
        buckets.iter().find(|(_, count)| *count >= all && all > 0.0).map_or(0.0, |(bound, _)| *bound)
    }
}

/// Waits for `what`, with a deadline.
pub async fn wait_for<T, F: Future<Output = anyhow::Result<Option<T>>>>(
    what: &str,
    within: Duration,
    look: impl Fn() -> F,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = look().await? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {within:?}");
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_say_what_came_since() {
        let name = "tidemill_event_loop_delay_seconds_bucket{loop=\"links\",le=";
        let before = Metrics::parse(&format!("{name}\"0.001\"}} 5\n{name}\"0.01\"}} 5\n{name}\"+Inf\"}} 5\n"));
        let after = Metrics::parse(&format!(
            "# HELP x y\n{name}\"0.001\"}} 7\n{name}\"0.01\"}} 8\n{name}\"+Inf\"}} 8\ntidemill_shed_total{{tier=\"free\"}} 3\n"
        ));
        assert_eq!(after.longest_delay_since(&before, "links"), 0.01);
        assert_eq!(after.longest_delay_since(&after, "links"), 0.0);
        assert_eq!(after.refusals_since(&before), BTreeMap::from([("shed_total{tier=\"free\"}".to_owned(), 3.0)]));
    }

    #[test]
    fn a_process_has_memory_and_a_gone_one_has_none() {
        let own = std::process::id();
        assert!(resident_mib(own, "VmRSS").unwrap() > 1.0);
        assert!(resident_mib(u32::MAX, "VmRSS").is_err());
    }

    #[test]
    fn a_log_keeps_alarms() {
        let mut log = Log::default();
        (0..300).for_each(|n| log.add(format!("{n}")));
        log.add("thread 'x' panicked at y".into());
        assert_eq!((log.last.len(), log.alarms.len()), (LINES_MAX, 1));
        assert!(log.said().ends_with("panicked at y"));
    }
}
