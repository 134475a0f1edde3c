//! `tidemill-bench load`: requests at a given rate, or from a number of users, and their latencies. Sessions and arrivals are fixed up
//! front ([`workload`], [`arrivals`]); [`drive`] sends them; [`summary`] summarizes their outcomes.

pub mod arrivals;
pub mod chats;
pub mod drive;
pub mod kind;
pub mod length;
pub mod overhead;
pub mod percentiles;
pub mod progress;
pub mod summary;
pub mod target;
pub mod timeline;
pub mod trace;
pub mod workload;

use crate::record;
use anyhow::{Context, ensure};
use arrivals::{Pattern, Rate};
use drive::{Driver, Sample};
use futures_util::future::try_join_all;
use kind::Kind;
use overhead::{Meter, Overhead};
use progress::Progress;
use serde::Serialize;
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};
use summary::{Slo, Summary};
use target::{RequestArgs, Target};
use tokio::{sync::Semaphore, time::Instant};
use workload::{PromptKind, Session, Workload, WorkloadArgs};

/// Send requests to any OpenAI-compatible server and measure the answers' latencies.
///
/// With --rate, arrivals do not wait for the server (open loop), and every latency counts from when the request was due. With --users,
/// each user waits for an answer before it asks again (closed loop). One short request before the measurement checks that the server
/// accepts such requests at all.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct LoadArgs {
    /// The server's URL, up to and including /v1.
    #[arg(long, default_value = "http://127.0.0.1:8000/v1")]
    pub url: String,
    #[command(flatten)]
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Requests per second; 0 or `inf` sends all at once.
    #[arg(long, required_unless_present_any = ["kind", "users"], conflicts_with = "kind")]
    pub rate: Option<Rate>,
    /// Users of a closed loop, instead of a rate.
    #[arg(long, conflicts_with_all = ["rate", "kind"], value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub users: Option<u32>,
    /// Seconds for which requests of a mixed workload arrive.
    #[arg(long, default_value_t = 60, requires = "kind", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    #[arg(long, default_value_t = 100, conflicts_with = "kind", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// Seed that repeats a run's prompts and arrivals. By default each run draws its own, as a server with a prefix cache has seen the last
    /// run's.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Threads of this program. One sends thousands of requests at a time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Write settings and results to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The traffic, apart from its rate, and its limits.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Traffic {
    #[command(flatten)]
    #[serde(flatten)]
    pub request: RequestArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub pattern: Pattern,
    /// A mixed workload: one of its kinds as `name:rate:input-len:output-len`, with `:service-tier` if it has one. Give it once for each
    /// kind; each has its own arrivals and results.
    #[arg(long, conflicts_with_all = ["input_len", "output_len", "lengths_from", "chats", "trace"])]
    pub kind: Vec<Kind>,
    /// Seconds at the beginning whose requests are sent, but not counted.
    #[arg(long, default_value_t = 0.0, value_parser = seconds)]
    pub warmup_s: f64,
    /// At most this many requests at a time; further ones wait, and their wait is measured.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency_max: Option<u32>,
    /// Limit of the time to the first token of a good request, in milliseconds
    #[arg(long)]
    pub slo_ttft_ms: Option<u64>,
    /// Limit of the mean time per later token of a good request, in milliseconds.
    #[arg(long)]
    pub slo_tpot_ms: Option<u64>,
    /// Limit of the mean of a request's longest tenth of gaps, in milliseconds, which replaces that of TPOT in the effective request
    /// capacity.
    #[arg(long)]
    pub slo_tbt_ms: Option<u64>,
}

/// The number of requests, and their rate.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    Rate {
        rate: Rate,
        requests: u32,
    },
    Users {
        users: u32,
        requests: u32,
    },
    /// Each kind of a mixed workload at a multiple of its rate.
    Kinds {
        times: f64,
        seconds: f64,
    },
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value| (0.0..=86_400.0).contains(value)).ok_or_else(|| "must be seconds, from 0 to 86400".into())
}

/// The JSON file's result: figures at the top level, with the settings beside them.
#[derive(Serialize)]
struct Report<'a> {
    settings: &'a LoadArgs,
    client: &'a Overhead,
    #[serde(flatten)]
    results: Results<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Results<'a> {
    One(&'a Summary),
    /// The results of each kind, by name.
    Kinds {
        kinds: BTreeMap<&'a str, &'a Summary>,
    },
}

/// One stream of requests, and its pace.
pub struct Stream {
    pub target: Target,
    pub sessions: Vec<Session>,
    pub pace: Pace,
    pub concurrency_max: Option<u32>,
}

pub enum Pace {
    /// The time at which each session begins.
    Open(Vec<Duration>),
    /// The number of concurrent users.
    Closed(u32),
}

/// A runtime for the client, with exactly this number of threads.
pub fn runtime(threads: u32) -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(threads as usize).enable_all().build()?)
}

/// Measures, prints a table, writes the JSON file. Returns an error if no request was answered at all.
pub async fn run(mut args: LoadArgs) -> anyhow::Result<()> {
    args.traffic.check()?;
    // The seed is short enough to type again.
    let seed = *args.seed.get_or_insert_with(|| rand::random::<u32>().into());
    let target = Target::new(&args.url, &args.traffic.request).await?;
    args.traffic.request.model = Some(target.model().to_owned());
    target.probe(&args.traffic.workload, seed).await?;
    let requests = args.requests;
    let amount = match args.users {
        _ if !args.traffic.kind.is_empty() => Amount::Kinds { times: 1.0, seconds: args.seconds.into() },
        Some(users) => Amount::Users { users, requests },
        None => Amount::Rate { rate: args.rate.unwrap_or(Rate::AllAtOnce), requests },
    };
    let slo = args.traffic.slo();
    let measured = measure(args.traffic.streams(&target, amount, seed)?, slo, args.threads).await?;

    let warmup = Duration::from_secs_f64(args.traffic.warmup_s);
    let summaries: Vec<_> = measured.samples.iter().map(|(samples, took)| Summary::new(samples, *took, warmup, slo)).collect();
    println!("{} at {}, seed {seed}", target.model(), args.url);
    let kinds = &args.traffic.kind;
    let results = if kinds.is_empty() {
        println!("\n{}", summaries[0]);
        Results::One(&summaries[0])
    } else {
        kinds.iter().zip(&summaries).for_each(|(kind, summary)| println!("\n{kind}\n\n{summary}"));
        Results::Kinds { kinds: kinds.iter().map(|kind| kind.name.as_str()).zip(&summaries).collect() }
    };
    let Overhead { cores, threads, delay_ms, bottleneck } = &measured.overhead;
    let late = delay_ms.as_ref().map_or(0.0, |delay| delay.p99);
    println!("this client used {cores:.2} cores of {threads}; 99 % of its timers fired at most {late:.1} ms late");
    if let Some(bottleneck) = bottleneck {
        eprintln!("warning: this client was a bottleneck: {bottleneck}");
    }
    record::write(args.json.as_ref(), "load", &Report { settings: &args, client: &measured.overhead, results })?;
    ensure!(summaries.iter().any(|summary| summary.completed > 0), "no request was answered");
    Ok(())
}

/// The outcomes of all streams, each with the time from the start to its last outcome.
pub struct Measured {
    pub samples: Vec<(Vec<Sample>, Duration)>,
    pub overhead: Overhead,
}

/// Sends all streams from the same moment on. `threads` are those of the runtime.
pub async fn measure(streams: Vec<Stream>, slo: Slo, threads: u32) -> anyhow::Result<Measured> {
    let requests = streams.iter().flat_map(|stream| &stream.sessions).map(|session| session.turns.len() as u64).sum();
    let progress = Arc::new(Progress::new(requests));
    let telling = progress.tell();
    let meter = Meter::start();
    let start = Instant::now() + LEAD;
    let send = |stream: Stream| {
        let slots = stream.concurrency_max.map_or(Semaphore::MAX_PERMITS, |max| max as usize);
        let slots = Arc::new(Semaphore::new(slots.min(Semaphore::MAX_PERMITS)));
        let driver = Driver { target: stream.target, start, slots, slo, progress: progress.clone() };
        async move {
            let samples = match stream.pace {
                Pace::Open(arrivals) => driver.open(stream.sessions, arrivals).await?,
                Pace::Closed(users) => driver.closed(stream.sessions, users).await?,
            };
            anyhow::Ok((samples, start.elapsed()))
        }
    };
    // This does not run on the thread that waits for it, so that the whole client runs on `threads`.
    let samples =
        tokio::spawn(try_join_all(streams.into_iter().map(send).collect::<Vec<_>>())).await.context("a stream's task broke")??;
    drop(telling);
    let all = || samples.iter().flat_map(|(samples, _)| samples);
    let percentiles = |latencies: percentiles::Latencies| latencies.percentiles();
    let lag = percentiles(all().map(|sample| sample.lag).collect());
    let answers = || all().filter_map(|sample| sample.outcome.as_ref().ok());
    let ttft = percentiles(answers().map(|answer| answer.ttft).collect());
    let tpot = percentiles(answers().filter_map(|answer| answer.tpot()).collect());
    let overhead = meter.finish(threads, lag.as_ref(), ttft.as_ref(), tpot.as_ref());
    Ok(Measured { samples, overhead })
}

impl Traffic {
    /// Checks conditions that clap cannot express, and sets values that follow from other settings.
    pub fn check(&mut self) -> anyhow::Result<()> {
        if self.request.chat {
            self.workload.prompt = PromptKind::Text;
        }
        ensure!(self.workload.turns == 1 || self.request.chat, "--turns: chats of several turns need --chat");
        Ok(())
    }

    pub fn slo(&self) -> Slo {
        let millis = |ms: Option<u64>| ms.map(Duration::from_millis);
        Slo { ttft: millis(self.slo_ttft_ms), tpot: millis(self.slo_tpot_ms), tbt: millis(self.slo_tbt_ms) }
    }

    /// One stream, or one for each kind.
    pub fn streams(&self, target: &Target, amount: Amount, seed: u64) -> anyhow::Result<Vec<Stream>> {
        let open = |rate, requests: u32, seed| Pace::Open(arrivals::schedule(&self.pattern, rate, requests as usize, seed));
        let alone = |pace, requests| Ok(vec![self.stream(&self.workload, target.clone(), pace, requests, seed)?]);
        let (times, seconds) = match amount {
            Amount::Rate { rate, requests } => return alone(open(rate, requests, seed), requests),
            Amount::Users { users, requests } => return alone(Pace::Closed(users), requests),
            Amount::Kinds { times, seconds } => (times, seconds),
        };
        let of_kind = |(kind, seed): (&Kind, u64)| {
            let (input_len, output_len) = (kind.input.clone(), kind.output.clone());
            let workload = WorkloadArgs { input_len, output_len, ..self.workload.clone() };
            let rate = kind.rate * times;
            let requests = ((rate * seconds).round() as u32).max(1);
            let target = target.with_tier(kind.service_tier.as_deref());
            self.stream(&workload, target, open(Rate::PerSecond(rate), requests, seed), requests, seed)
        };
        // Each kind has a different seed, or their prompts would begin alike.
        self.kind.iter().zip(seed..).map(of_kind).collect()
    }

    fn stream(&self, workload: &WorkloadArgs, target: Target, pace: Pace, requests: u32, seed: u64) -> anyhow::Result<Stream> {
        let sessions = Workload::new(workload)?.draw(requests as usize, seed);
        Ok(Stream { target, sessions, pace, concurrency_max: self.concurrency_max })
    }
}

/// The time to set all tasks up before the first request is due.
const LEAD: Duration = Duration::from_millis(50);
