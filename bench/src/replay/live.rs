//! Replays a trace against a live server in an open loop: every request at its time, whatever the server does.

use super::{
    ReplayArgs,
    trace::{self, Request},
};
use crate::{
    load::{
        self, Pace, Stream,
        arrivals::positive,
        overhead::Overhead,
        summary::{Group, Slo, Summary, group},
        target::{RequestArgs, Target},
        trace::cached_shares,
        workload::{PromptKind, Workload, WorkloadArgs},
    },
    record,
};
use anyhow::{Context, ensure};
use serde::Serialize;
use std::time::Duration;

/// Options for a replay against a live server.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct LiveArgs {
    /// The server's URL, up to and including /v1.
    #[arg(long, required_unless_present = "cache_only", conflicts_with = "cache_only")]
    pub url: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    pub request: RequestArgs,
    /// Speed of the replay, relative to the recording.
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub time_scale: f64,
    /// Factor on the lengths of prompts and answers.
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub length_scale: f64,
    /// Requests to skip at the start of the trace.
    #[arg(long, default_value_t = 0)]
    pub skip: usize,
    /// Most requests to send; all by default.
    #[arg(long)]
    pub requests: Option<usize>,
    /// Token ids, or words for servers that take only text.
    #[arg(long, value_enum, default_value_t = PromptKind::Tokens)]
    pub prompt: PromptKind,
    /// Token ids are drawn below this; the default fits every vocabulary.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..))]
    pub vocab: u32,
    /// Seed of the prompts: a different one gives prompts that the server has not seen. Random by default.
    #[arg(long)]
    pub seed: Option<u64>,
    /// TTFT limit for goodput.
    #[arg(long)]
    pub slo_ttft_ms: Option<u64>,
    /// TPOT limit for goodput.
    #[arg(long)]
    pub slo_tpot_ms: Option<u64>,
    /// Threads of this program.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
}

#[derive(Serialize)]
struct Report<'a> {
    settings: &'a ReplayArgs,
    live: &'a LiveArgs,
    client: &'a Overhead,
    /// The share of prompt tokens that an unlimited cache would find.
    cacheable: f64,
    /// TTFT of requests, grouped by that share.
    by_cacheable: Vec<Group>,
    #[serde(flatten)]
    summary: &'a Summary,
}

pub async fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let mut live = args.live.clone();
    let url = live.url.clone().context("give a live server's --url, or --cache-only")?;
    let requests: Vec<Request> = trace::read(&args.trace)?.into_iter().skip(live.skip).take(live.requests.unwrap_or(usize::MAX)).collect();
    ensure!(!requests.is_empty(), "--skip leaves no request of {}", args.trace.display());
    let seed = *live.seed.get_or_insert_with(|| rand::random::<u32>().into());
    let prompt = if live.request.chat { PromptKind::Text } else { live.prompt };
    let workload = WorkloadArgs { trace_scale: live.length_scale, prompt, vocab: live.vocab, ..WorkloadArgs::default() };
    let target = Target::new(&url, &live.request).await?;
    target.probe(&workload, seed).await?;

    let first = requests.iter().find_map(|request| request.timestamp).unwrap_or(0);
    let due = |request: &Request| {
        let at_ms = request.timestamp.context("the trace has no `timestamp`: its times are not known")?.saturating_sub(first);
        anyhow::Ok(Duration::from_millis(at_ms).div_f64(live.time_scale))
    };
    let arrivals = requests.iter().map(due).collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(arrivals.is_sorted(), "the trace's requests are not in order of their times");
    let drawn = Workload::new(&workload)?;
    let sessions = requests.iter().map(|request| drawn.of_trace(request, seed)).collect();
    let millis = |ms: Option<u64>| ms.map(Duration::from_millis);
    let slo = Slo { ttft: millis(live.slo_ttft_ms), tpot: millis(live.slo_tpot_ms), tbt: None };
    let stream = Stream { target: target.clone(), sessions, pace: Pace::Open(arrivals), concurrency_max: None };
    let measured = load::measure(vec![stream], slo, live.threads).await?;

    let (samples, took) = &measured.samples[0];
    let summary = Summary::new(samples, *took, Duration::ZERO, slo);
    let shares = cached_shares(&requests);
    let tokens = |of: &dyn Fn(usize) -> f64| (0..requests.len()).map(|n| of(n) * requests[n].input_tokens as f64).sum::<f64>();
    let cacheable = tokens(&|n| shares[n]) / tokens(&|_| 1.0);
    let of_quarter = |quarter: usize| {
        let is_in = |session: usize| ((4.0 * shares[session]) as usize).min(3) == quarter;
        let answers = samples.iter().filter(|sample| is_in(sample.session)).filter_map(|sample| sample.outcome.as_ref().ok());
        group(format!("{} to {} % known", 25 * quarter, 25 * (quarter + 1)), answers)
    };
    let by_cacheable: Vec<Group> = (0..4).map(of_quarter).filter(|group| group.completed > 0).collect();
    println!("{} at {url}: {} requests of {}, seed {seed}\n\n{summary}", target.model(), requests.len(), args.trace.display());
    println!("an unlimited cache would find {:.1} % of the prompts; TTFT p50 and p90 by that share of a request", 100.0 * cacheable);
    for Group { name, completed, ttft_ms } in &by_cacheable {
        let (p50, p90) = ttft_ms.as_ref().map_or((0.0, 0.0), |ttft| (ttft.p50, ttft.p90));
        println!("{name:<24} {completed:>8} requests {p50:>10.1} {p90:>10.1} ms");
    }
    if let Some(bottleneck) = &measured.overhead.bottleneck {
        eprintln!("warning: this client was a bottleneck: {bottleneck}");
    }
    let report = Report { settings: args, live: &live, client: &measured.overhead, cacheable, by_cacheable, summary: &summary };
    record::write(args.json.as_ref(), "replay", &report)?;
    ensure!(summary.completed > 0, "no request was answered");
    Ok(())
}
