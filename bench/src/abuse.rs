//! `tidemill-bench abuse`: one client of the lowest tier attacks a live cluster, in one way after the other, while a premium tenant chats
//! and other tenants have stored data.
//!
//! - [`attacks`]: the table of attacks
//! - [`attacker`]: the client that attacks, and the answers that it gets
//! - [`cluster`]: the cluster under attack: processes, links, memory, metrics
//! - [`premium`]: the tenant that chats, and its times to the first token
//! - [`keepsakes`]: the data that other tenants have stored, read back and compared
//! - [`outcome`]: the outcome of each attack, and whether it is good enough
//!
//! ```text
//!   premium, 127.0.0.1 ──► front door ◄── attacker, 127.0.0.2 and up, a thread of low priority
//!                              ▲
//!   keepsakes of others ───────┘ before the first attack, and after each
//! ```

pub mod attacker;
pub mod attacks;
pub mod cluster;
pub mod keepsakes;
pub mod outcome;
pub mod premium;

use crate::record;
use anyhow::{Context, bail, ensure};
use attacker::{Attacker, Keys};
use attacks::{ALL, Attack};
use cluster::{Cluster, Watch};
use keepsakes::Keepsakes;
use outcome::{Limits, Outcome, Report};
use premium::{Chats, Premium};
use serde::Serialize;
use std::{path::PathBuf, sync::PoisonError, thread, time::Duration};
use tidemill_net::process;
use tokio::{
    runtime::Builder,
    sync::oneshot,
    time::{Instant, sleep, sleep_until, timeout_at},
};

/// Attack a cluster with a key of the lowest tier, and see the effects on other tenants.
///
/// Starts a cluster of its own (`tidemill up`, beside this binary) and ends it. The exit status says whether every attack kept within the
/// targets: a p99 of the premium tenant's time to first token of at most 1.25 times that without attacks and 50 ms more, at most 512 MiB
/// more memory, no link lost, no process ended, no data of others lost, and every refusal of a kind that the attack deserves.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct AbuseArgs {
    /// Directory of the model [default: the built-in one]
    #[arg(long, conflicts_with = "echo")]
    pub model: Option<PathBuf>,
    /// Use engines that compute nothing, with steps of 10 ms, so that only the front door is measured
    #[arg(long)]
    pub echo: bool,
    /// Seconds that each attack lasts, and for which the premium tenant is measured before it
    #[arg(long, default_value_t = 20.0, value_parser = seconds)]
    pub seconds: f64,
    /// Chats of the premium tenant per second
    #[arg(long, default_value_t = 5.0, value_parser = rate)]
    pub rate: f64,
    /// Only attacks whose names contain one of these
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Give the attacker's key no quota, so that each attack reaches the code behind it
    #[arg(long)]
    pub unmetered: bool,
    /// Run each attack for a second, and judge no times: for tests
    #[arg(long)]
    pub short: bool,
    /// List the attacks, and exit.
    #[arg(long)]
    pub list: bool,
    /// Write the result to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (1.0..=3600.0).contains(s)).ok_or_else(|| "must be seconds, from 1 to 3600".into())
}

fn rate(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|rate| (0.1..=1000.0).contains(rate)).ok_or_else(|| "must be from 0.1 to 1000".into())
}

/// The time for answers to requests that still run when an attack's time is over.
const GRACE: Duration = Duration::from_secs(10);
/// The time within which the cluster must be rid of an attack.
const REST_MAX: Duration = Duration::from_secs(20);
/// The time between the end of an attack and the next measurement.
const SETTLE: Duration = Duration::from_secs(2);
/// The duration of an attack of `--short`, and its grace.
const SHORT: Duration = Duration::from_secs(1);
const SHORT_GRACE: Duration = Duration::from_secs(5);
const SHORT_KEYS: usize = 50;

pub async fn run(args: AbuseArgs) -> anyhow::Result<()> {
    let chosen: Vec<&Attack> = ALL.iter().filter(|attack| is_chosen(attack, &args.only)).collect();
    if args.list {
        chosen.iter().for_each(|attack| println!("{:24} {}", attack.name, attack.what));
        return Ok(());
    }
    ensure!(!chosen.is_empty(), "--only: there is no such attack; --list shows all");
    attacker::allow_files()?;
    let mut cluster = Cluster::start(&args).await?;
    let attacked = attack_all(&args, &mut cluster, &chosen).await;
    let ended_well = cluster.stop().await;
    let (alone, memory, outcomes) = attacked?;
    let limits = Limits::new(&alone.answered, args.short);
    let Memory { peak_mib, extra_mib } = memory;
    let alone_failed = alone.failed;
    let report = Report { settings: &args, alone: limits.alone.as_ref(), alone_failed, peak_mib, extra_mib, attacks: outcomes };
    println!("{report}");
    record::write(args.json.as_ref(), "abuse", &report)?;
    ensure!(ended_well, "the cluster did not end in good order");
    match report.failures(&limits) {
        failures if failures.is_empty() => Ok(()),
        failures => bail!("not every target was kept:\n{}", failures.join("\n")),
    }
}

fn is_chosen(attack: &Attack, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|part| attack.name.contains(part.as_str()))
}

/// The coordinator's memory over the whole run.
struct Memory {
    peak_mib: f64,
    extra_mib: f64,
}

async fn attack_all(args: &AbuseArgs, cluster: &mut Cluster, chosen: &[&'static Attack]) -> anyhow::Result<(Chats, Memory, Vec<Outcome>)> {
    let keepsakes = Keepsakes::make(cluster).await.context("what other tenants store")?;
    let paying = cluster.key("premium", "premium").await?.secret;
    let premium = Premium::new(cluster.url(), &cluster.model, &paying, args.rate)?;
    let (mut alone, mut outcomes) = (Chats::default(), Vec::new());
    // This loads the models' pages and opens connections.
    premium.chat_for(Duration::from_secs(2)).await?;
    let began = cluster.coordinator_mib()?;
    let mut peak_mib = began;
    let lasts = if args.short { SHORT } else { Duration::from_secs_f64(args.seconds) };
    for (n, attack) in chosen.iter().enumerate() {
        if !args.short {
            alone.add_all(premium.chat_for(lasts).await?);
        }
        eprintln!("{:3} of {}  {:24} {}", n + 1, chosen.len(), attack.name, attack.what);
        let outcome = one(args, cluster, &keepsakes, (&premium, &paying), attack, lasts).await;
        let outcome = outcome.with_context(|| format!("during `{}`: {}", attack.name, cluster.last_words()))?;
        // Times are judged in the end, when all are known.
        outcome.failures(&Limits::new(&[], true)).iter().for_each(|failure| eprintln!("           {failure}"));
        peak_mib = peak_mib.max(outcome.watched.peak_mib);
        outcomes.push(outcome);
    }
    Ok((alone, Memory { peak_mib, extra_mib: peak_mib - began }, outcomes))
}

/// Runs an attack on a thread that gets the cores' time that the cluster and the premium tenant leave, as if it were on another machine.
/// Requests that still run when the grace is over are aborted.
async fn attack_apart(attack: &'static Attack, attacker: Attacker, until: Instant, short: bool) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build().context("cannot start the attacker's thread")?;
    let (told, ended) = oneshot::channel();
    thread::Builder::new().name("attacker".into()).spawn(move || {
        // If times are not judged, the preparations of an attack must not take very long beside other work.
        if !short {
            process::give_way();
        }
        let grace = if short { SHORT_GRACE } else { GRACE };
        let _ = runtime.block_on(async { timeout_at(until + grace, (attack.run)(attacker)).await });
        // Names may be looked up on other threads, which are not waited for.
        runtime.shutdown_background();
        let _ = told.send(());
    })?;
    ended.await.context("the attack broke")
}

async fn one(
    args: &AbuseArgs,
    cluster: &mut Cluster,
    keepsakes: &Keepsakes,
    (premium, paying): (&Premium, &str),
    attack: &'static Attack,
    lasts: Duration,
) -> anyhow::Result<Outcome> {
    let key = cluster.key(&format!("free-{}", attack.name), "free").await?;
    let more = cluster.keys(attack.name, "free", if args.short { attack.keys.min(SHORT_KEYS) } else { attack.keys }).await?;
    let keys = Keys { own: key.secret.clone(), more: more.iter().map(|key| key.secret.clone()).collect(), paying: paying.to_owned() };
    let kept = keepsakes.keep_answer(attack.name).await?;
    let before = Watch::start(cluster).await?;
    let until = Instant::now() + lasts;
    let attacker = Attacker::new(cluster, keys, keepsakes.ids(), kept.clone(), attack.deserves, until)?;
    let seen = attacker.seen();
    let chats = premium.chat_while(async {
        let ended = attack_apart(attack, attacker, until, args.short).await;
        // An attack that has done its work ends early.
        sleep_until(until).await;
        ended
    });
    let (chats, ended) = chats.await?;
    ended?;
    let mut watched = before.end(cluster).await;
    for key in [&key].into_iter().chain(&more) {
        if let Err(error) = cluster.revoke(key).await {
            watched.alarms.push(format!("{error:#}"));
        }
    }
    let left_running = cluster.rest(REST_MAX).await;
    let lost = keepsakes.compare(cluster, &kept).await;
    if !args.short {
        sleep(SETTLE).await;
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(Outcome::new(attack, &chats, watched, seen, lost, left_running))
}
