//! `tidemill-bench sim`: simulated clusters. The world is `tidemill-sim`; this module has files, parallel runs, and their report.

pub mod calibrate;
pub mod html;
pub mod memory;
pub mod plot;
pub mod report;
pub mod scenario;
pub mod summary;
pub mod timing;

use crate::{record, replay::trace};
use anyhow::{Context, ensure};
use rayon::prelude::*;
use report::{Found, Report, Row};
use scenario::{Cell, Scenario, Search};
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};
use summary::Summary;
use tidemill_sim::{
    outcome::{Answer, End},
    settings::Settings,
    workload::{self, Ask, TraceRequest},
    world::{Run, Unwatched, World},
};
use timing::{DecisionCost, Timing};

/// Simulate a cluster in virtual time: the production schedulers on modelled GPUs and networks.
///
/// A scenario file describes the simulation; `bench/scenarios` has some. The same file and seed give the same events.
#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    pub scenario: PathBuf,
    /// Directory of the traces that scenarios name.
    #[arg(long, default_value = ".")]
    pub traces: PathBuf,
    /// Change a key of the scenario: `cluster.instances=32`. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Seed of the first run of each cell; further runs use the next seeds.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Simulations at a time; 0: one per core.
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// Send the same requests to the live cluster at this URL, simulate its engines by their own step costs, and compare.
    #[arg(long, value_name = "URL", conflicts_with = "html")]
    pub calibrate: Option<String>,
    /// Write all figures to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Write a report with plots to this file, which needs no other files.
    #[arg(long)]
    pub html: Option<PathBuf>,
}

pub fn run(args: &SimArgs) -> anyhow::Result<()> {
    let text = fs::read_to_string(&args.scenario).with_context(|| format!("cannot read {}", args.scenario.display()))?;
    let scenario = Scenario::parse(&text, &args.sets).with_context(|| args.scenario.display().to_string())?;
    let bench = Bench { traces: Traces::new(&args.traces), seed: args.seed, scenario: &scenario };
    if let Some(url) = &args.calibrate {
        let calibration = tokio::runtime::Runtime::new()?.block_on(calibrate::run(&bench, url))?;
        print!("{calibration}");
        return record::write(args.json.as_ref(), "sim", &calibration);
    }
    let started = Instant::now();
    // Timed decisions should have the machine's cache to themselves.
    let threads = if scenario.head.time_decisions { 1 } else { args.threads };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let rows = pool.install(|| scenario.cells()?.into_par_iter().map(|cell| bench.row(&cell)).collect::<anyhow::Result<Vec<Row>>>())?;
    let report = Report { head: scenario.head.clone(), rows, wall_s: started.elapsed().as_secs_f64() };
    println!("{}", report.text());
    record::write(args.json.as_ref(), "sim", &report.json())?;
    if let Some(path) = &args.html {
        fs::write(path, html::page(&report)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

struct Bench<'a> {
    traces: Traces,
    seed: u64,
    scenario: &'a Scenario,
}

/// Runs of one cell.
struct Runs {
    summary: Summary,
    runs: Vec<Run>,
    decisions: Option<DecisionCost>,
}

impl Bench<'_> {
    fn row(&self, cell: &Cell) -> anyhow::Result<Row> {
        let (found, settings) = match &self.scenario.head.search {
            Some(search) => {
                let found = self.search(cell, search)?;
                let settings = cell.settings(Some((&search.key, found.value.max(search_low(search, cell)?))))?;
                (Some(found), settings)
            }
            None => (None, cell.settings(None)?),
        };
        let Runs { summary, mut runs, decisions } = self.simulate(&settings)?;
        let ttft = summary.ttft_ms.as_ref().map_or("no answer".into(), |ttft| format!("mean TTFT {:.2} s", ttft.mean / 1e3));
        eprintln!("{}: {ttft}, goodput {:.1} %, {:.0} events/s", cell.name(), 100.0 * summary.goodput_ratio, summary.events_per_s);
        Ok(Row {
            variant: cell.variant.clone(),
            at: cell.at.clone(),
            x: cell.x,
            settings,
            summary,
            found,
            decisions,
            run: runs.swap_remove(0),
        })
    }

    /// Simulates every seed of one setting.
    fn simulate(&self, settings: &Settings) -> anyhow::Result<Runs> {
        let mut timing = Timing::default();
        let mut runs = Vec::new();
        for seed in self.seeds() {
            let world = self.world(settings, seed)?;
            let started = timing::cpu_time();
            let run = if self.scenario.head.time_decisions { world.run(&mut timing) } else { world.run(&mut Unwatched) };
            runs.push((run, timing::cpu_time() - started));
        }
        let summary = Summary::new(&runs, &settings.workload);
        let decisions = self.scenario.head.time_decisions.then(|| timing.cost());
        Ok(Runs { summary, runs: runs.into_iter().map(|(run, _)| run).collect(), decisions })
    }

    /// Whether enough requests are good, over all seeds. Ends as soon as too many are bad for that.
    fn is_good(&self, settings: &Settings, ratio: f64) -> anyhow::Result<bool> {
        let mut bad_before = 0;
        for seed in self.seeds() {
            let mut world = self.world(settings, seed)?;
            let first = summary::warmup(world.answers().len(), &settings.workload);
            let counted = (world.answers().len() - first) * self.seeds().count();
            let bad_max = ((1.0 - ratio) * counted as f64) as usize;
            loop {
                let more = (0..EVENTS_BETWEEN_LOOKS).all(|_| world.open() > 0 && world.step(&mut Unwatched));
                let bad = bad_before + world.answers()[first..].iter().filter(|answer| is_bad(answer, world.now(), settings)).count();
                if bad > bad_max {
                    return Ok(false);
                }
                if !more {
                    bad_before = bad;
                    break;
                }
            }
        }
        Ok(true)
    }

    fn seeds(&self) -> std::ops::Range<u64> {
        self.seed..self.seed + self.scenario.head.seeds.unwrap_or(1).max(1)
    }

    fn world(&self, settings: &Settings, seed: u64) -> anyhow::Result<World> {
        Ok(World::new(settings, self.asks(settings, seed)?, seed)?)
    }

    fn asks(&self, settings: &Settings, seed: u64) -> anyhow::Result<Vec<Ask>> {
        let trace = settings.workload.trace.as_deref().map(|name| self.traces.read(name)).transpose()?;
        let asks = workload::draw(&settings.workload, trace.as_deref().map(Vec::as_slice), seed)?;
        ensure!(!asks.is_empty(), "the workload has no requests");
        Ok(asks)
    }

    /// The highest value at which enough requests are good, by bisection; 0 if even the lowest is too high.
    fn search(&self, cell: &Cell, search: &Search) -> anyhow::Result<Found> {
        let good = |value: f64| self.is_good(&cell.settings(Some((&search.key, value)))?, search.ratio);
        let scale = search_scale(search, cell)?;
        let (mut low, mut high) = (search.low * scale, search.high * scale);
        ensure!(0.0 < low && low < high, "`search`: `low` must be above 0 and below `high`");
        if !good(low)? {
            return Ok(Found { key: search.key.clone(), value: 0.0, next: low });
        }
        let mut doublings = 0;
        while good(high)? {
            ensure!(doublings < DOUBLINGS_MAX, "`search`: at {high} enough requests are still good: raise `high`, or send more requests");
            (low, high, doublings) = (high, 2.0 * high, doublings + 1);
        }
        for _ in 0..search.steps {
            let middle = (low * high).sqrt();
            if good(middle)? { low = middle } else { high = middle }
        }
        Ok(Found { key: search.key.clone(), value: low, next: high })
    }
}

const DOUBLINGS_MAX: usize = 4;
const EVENTS_BETWEEN_LOOKS: usize = 20_000;

/// Whether a request can no longer become good, during a run.
fn is_bad(answer: &Answer, now: Duration, settings: &Settings) -> bool {
    let waited_ms = answer.ttft_ms().unwrap_or_else(|| now.saturating_sub(answer.at).as_secs_f64() * 1e3);
    match settings.workload.classes.get(answer.class) {
        Some(class) if answer.end == End::Open => class.ttft_ms.is_some_and(|limit| waited_ms > limit),
        Some(class) => !answer.is_good(class),
        None => !matches!(answer.end, End::Open | End::Complete),
    }
}

fn search_scale(search: &Search, cell: &Cell) -> anyhow::Result<f64> {
    Ok(if search.per_instance { f64::from(cell.settings(None)?.cluster.instances) } else { 1.0 })
}

fn search_low(search: &Search, cell: &Cell) -> anyhow::Result<f64> {
    Ok(search.low * search_scale(search, cell)?)
}

/// Trace files, each read once.
struct Traces {
    dir: PathBuf,
    read: Mutex<HashMap<String, std::sync::Arc<Vec<TraceRequest>>>>,
}

impl Traces {
    fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), read: Mutex::default() }
    }

    fn read(&self, name: &str) -> anyhow::Result<std::sync::Arc<Vec<TraceRequest>>> {
        let mut read = self.read.lock().expect("nobody panics with the lock");
        if let Some(trace) = read.get(name) {
            return Ok(std::sync::Arc::clone(trace));
        }
        let requests =
            trace::read(&self.dir.join(name)).context("scenarios name their traces by file name: say where they are with --traces")?;
        let of = |request: trace::Request| {
            let (at, output) =
                request.timestamp.zip(request.output_tokens).context("the trace has no `timestamp` or no `output_length`")?;
            Ok(TraceRequest {
                at: Duration::from_millis(at),
                input_tokens: request.input_tokens as u32,
                output_tokens: output.max(1) as u32,
                ids: request.blocks,
            })
        };
        let requests = requests.into_iter().map(of).collect::<anyhow::Result<Vec<_>>>()?;
        let trace = std::sync::Arc::new(requests);
        read.insert(name.to_owned(), std::sync::Arc::clone(&trace));
        Ok(trace)
    }
}
