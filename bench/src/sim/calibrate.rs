//! `tidemill-bench sim --calibrate URL`: the accuracy of the simulator. The same requests go to a live cluster and to a simulated one.
//!
//! The live cluster serves the first cell's requests once without being measured, so that its coordinator has learnt its engines' steps.
//! Then, for each cell: the engines' step costs are read from `/cluster` and become the simulated engines'; the live cluster serves the
//! cell's requests; the simulator serves the same; and the medians are compared. So no figure was fitted to its own prediction.

use super::{Bench, scenario::Cell, summary};
use crate::load::{
    percentiles::Percentiles,
    timeline::{Answer, Timeline},
};
use anyhow::{Context, bail, ensure};
use futures_util::{StreamExt, future::try_join_all};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{fmt, time::Duration};
use tidemill_deploy::client::Client;
use tidemill_proto::message::Role;
use tidemill_sim::{
    hardware::StepCoefficients,
    settings::{ClusterShape, Settings},
    workload::Ask,
    world::{Unwatched, World},
};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

/// The results of all cells, live and simulated.
#[derive(Debug, Serialize)]
pub struct Calibration {
    pub rows: Vec<Compared>,
}

/// The comparison of one class of one cell.
#[derive(Debug, Serialize)]
pub struct Compared {
    pub workload: String,
    pub class: String,
    pub requests: usize,
    pub ttft_ms: Pair,
    pub tpot_ms: Option<Pair>,
    /// The costs of the simulated engines' steps.
    pub prefill: Option<StepCoefficients>,
    pub decode: StepCoefficients,
}

/// Medians, live and simulated.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pair {
    pub live: f64,
    pub simulated: f64,
}

impl Pair {
    fn of(live: impl Iterator<Item = Duration>, simulated: impl Iterator<Item = Duration>) -> Option<Self> {
        Some(Self { live: Percentiles::of(live)?.p50, simulated: Percentiles::of(simulated)?.p50 })
    }

    /// The error of the simulator, relative to the truth.
    fn error(self) -> f64 {
        self.simulated / self.live - 1.0
    }
}

/// The engines in the response of `/cluster`.
#[derive(Debug, Deserialize)]
struct ClusterView {
    members: Vec<Member>,
}

#[derive(Debug, Deserialize)]
struct Member {
    role: Role,
    step_cost: Option<StepCoefficients>,
}

/// The step costs of the live engines.
struct Engines {
    prefill: Option<StepCoefficients>,
    decode: StepCoefficients,
}

pub(super) async fn run(bench: &Bench<'_>, url: &str) -> anyhow::Result<Calibration> {
    let live = Live::connect(url).await?;
    let cells = bench.scenario.cells()?;
    let first = cells.first().context("the scenario has no cell")?;
    eprintln!("warming up");
    live.serve(&requests(bench, first, bench.seed)?.1).await?;
    let mut rows = Vec::new();
    for (cell, seed) in cells.iter().zip(bench.seed + 1..) {
        eprintln!("{}", cell.name());
        let (mut settings, asks) = requests(bench, cell, seed)?;
        sleep(REPORTED).await;
        let engines = live.engines(&settings.cluster).await?;
        let answers = live.serve(&asks).await?;
        (settings.cluster.measured_prefill, settings.cluster.measured_decode) = (engines.prefill, Some(engines.decode));
        let simulated = World::new(&settings, asks.iter().map(|(ask, _)| ask.clone()).collect(), seed)?.run(&mut Unwatched);
        let counted = summary::warmup(answers.len(), &settings.workload)..;
        let classes = settings.workload.cluster_classes()?;
        for ((_, class), place) in classes.iter().zip(0..) {
            let live = answers[counted.clone()].iter().zip(&asks[counted.clone()]);
            let live: Vec<&Answer> = live.filter(|(_, (ask, _))| ask.class == place).map(|(answer, _)| answer).collect();
            let simulated: Vec<_> = simulated.answers[counted.clone()].iter().filter(|answer| answer.class == place).collect();
            let millis = |ms: Option<f64>| ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
            let ttft = Pair::of(live.iter().map(|answer| answer.ttft), simulated.iter().filter_map(|answer| millis(answer.ttft_ms())));
            let Some(ttft_ms) = ttft else { continue };
            let tpot_ms =
                Pair::of(live.iter().filter_map(|answer| answer.tpot()), simulated.iter().filter_map(|answer| millis(answer.tpot_ms())));
            let (workload, class) = (cell.name(), class.name.clone());
            rows.push(Compared {
                workload,
                class,
                requests: live.len(),
                ttft_ms,
                tpot_ms,
                prefill: engines.prefill,
                decode: engines.decode,
            });
        }
    }
    Ok(Calibration { rows })
}

/// A cell's requests, each with its `service_tier`. No two seeds have a prompt in common, since a live cluster remembers them.
fn requests(bench: &Bench<'_>, cell: &Cell, seed: u64) -> anyhow::Result<(Settings, Vec<(Ask, String)>)> {
    let settings = cell.settings(None)?;
    let classes = settings.workload.cluster_classes()?;
    let tiers: Vec<String> = classes.iter().map(|(_, class)| class.service_tier.clone()).collect();
    let mut asks = bench.asks(&settings, seed)?;
    for ask in &mut asks {
        ask.ids.iter_mut().for_each(|id| *id ^= seed.rotate_left(32));
    }
    Ok((settings, asks.into_iter().map(|ask| (ask.class, ask)).map(|(class, ask)| (ask, tiers[class].clone())).collect()))
}

/// The live cluster.
struct Live {
    client: Client,
    model: String,
}

impl Live {
    async fn connect(url: &str) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1");
        let client = Client::new(&format!("{base}/v1"))?;
        let model = client.models().await?.into_iter().next().context("the cluster serves no model")?;
        Ok(Self { client, model })
    }

    /// The engines' step costs. Their number must be that of the simulated ones.
    async fn engines(&self, shape: &ClusterShape) -> anyhow::Result<Engines> {
        let view: ClusterView = self.client.cluster().await?;
        let costs = |role: Role| view.members.iter().filter(move |member| member.role == role).map(|member| member.step_cost);
        let (prefill, decode) = (costs(Role::Prefill).count(), costs(Role::Decode).count());
        let wanted = shape.split()?;
        ensure!(
            (prefill as u32, decode as u32) == wanted,
            "the live cluster has {prefill} prefill and {decode} decode workers, the scenario {} and {}",
            wanted.0,
            wanted.1
        );
        let mean = |role: Role| mean(&costs(role).flatten().collect::<Vec<_>>());
        let Some(decode) = mean(Role::Decode) else {
            bail!("no decode worker has reported a step: does the first cell's workload reach them?")
        };
        Ok(Engines { prefill: mean(Role::Prefill), decode })
    }

    /// Sends every request when it is due, and waits for all answers.
    async fn serve(&self, asks: &[(Ask, String)]) -> anyhow::Result<Vec<Answer>> {
        let start = Instant::now() + LEAD;
        let last = asks.iter().map(|(ask, _)| ask.at).max().unwrap_or_default();
        let serve = |(ask, tier): &(Ask, String)| {
            let body = json!({
                "model": self.model,
                "prompt": ask.prompt(VOCAB),
                "max_tokens": ask.output_tokens,
                "temperature": 0,
                "ignore_eos": true,
                "stream": true,
                "stream_options": {"include_usage": true},
                "service_tier": tier,
            });
            let due = start + ask.at;
            async move {
                sleep_until(due).await;
                self.answer(&body, due).await
            }
        };
        timeout_at(start + last + ANSWERS, try_join_all(asks.iter().map(serve)))
            .await
            .context("the live cluster is too slow for this load")?
    }

    async fn answer(&self, body: &serde_json::Value, due: Instant) -> anyhow::Result<Answer> {
        let mut stream = Box::pin(self.client.stream("/completions", body).await?);
        let (mut timeline, mut usage) = (Timeline::default(), None);
        while let Some(chunk) = stream.next().await {
            let chunk = chunk?;
            if chunk.is_token {
                timeline.token(due.elapsed());
            }
            usage = chunk.usage.or(usage);
        }
        let counts = usage.map(|usage| (usage.prompt_tokens, usage.cached_tokens(), usage.completion_tokens));
        timeline.finish(counts).context("an answer without a token")
    }
}

fn mean(costs: &[StepCoefficients]) -> Option<StepCoefficients> {
    let of = |term: fn(&StepCoefficients) -> f64| costs.iter().map(term).sum::<f64>() / costs.len() as f64;
    (!costs.is_empty()).then(|| StepCoefficients {
        step_ms: of(|cost| cost.step_ms),
        prefill_token_ms: of(|cost| cost.prefill_token_ms),
        prefill_context_ms: of(|cost| cost.prefill_context_ms),
        decode_row_ms: of(|cost| cost.decode_row_ms),
        decode_context_ms: of(|cost| cost.decode_context_ms),
    })
}

/// The time within which workers report their steps, which they do every second.
const REPORTED: Duration = Duration::from_secs(2);
/// Token ids below this are in every vocabulary.
const VOCAB: u32 = 256;
/// The time to set all tasks up before the first request is due.
const LEAD: Duration = Duration::from_millis(50);
/// The time for the answers after the last request.
const ANSWERS: Duration = Duration::from_secs(600);

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:24} {:12} {:>8} {:>30} {:>30}",
            "workload", "class", "requests", "TTFT ms: live, simulated", "TPOT ms: live, simulated"
        )?;
        let pair = |pair: Pair| format!("{:.1} {:.1} {:+.0} %", pair.live, pair.simulated, 100.0 * pair.error());
        for row in &self.rows {
            let tpot = row.tpot_ms.map_or("–".into(), pair);
            writeln!(f, "{:24} {:12} {:>8} {:>30} {:>30}", row.workload, row.class, row.requests, pair(row.ttft_ms), tpot)?;
        }
        Ok(())
    }
}
