//! `tidemill-bench kernels`: how close each kernel, and each phase of whole models, comes to what this machine can do.
//!
//! The machine's ceilings are measured first, in the same run and with the same threads. Everything is repeated and the best
//! is kept: what else the machine does can only make it slower. Operands stream from memory as the layers of a model do,
//! so no cache makes a decode step look better than it is.

pub mod ceilings;
pub mod limits;
pub mod ops;
pub mod phases;
pub mod report;

use anyhow::{Context, ensure};
use limits::{Ceilings, Work};
use report::Row;
use std::{fs, path::PathBuf, time::Instant};
use tidemill_kernels::{Cpu, Isa};

/// Measure kernels and whole models against this machine's ceilings.
#[derive(Clone, Debug, clap::Args)]
pub struct KernelsArgs {
    /// Write the rows here too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Only rows whose "name shape" holds this text; ceilings are always measured.
    #[arg(long)]
    pub only: Option<String>,
    /// Threads that compute (default: all cores).
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set: avx512bf16, avx512, avx2 or portable (default: the best there is).
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Where the models with random weights are kept for the next run (default: made anew, and removed at the end).
    #[arg(long)]
    pub models: Option<PathBuf>,
    /// Less work, two layers, the smallest model alone: to see that it works, not how fast it is.
    #[arg(long)]
    pub quick: bool,
}

pub fn run(args: &KernelsArgs) -> anyhow::Result<()> {
    let threads = args.threads.unwrap_or(std::thread::available_parallelism().map_or(1, usize::from));
    ensure!((1..=1024).contains(&threads), "--threads {threads} must be from 1 to 1024");
    let mut bench = Bench::new(Cpu::new(args.isa, threads)?, args);
    ops::measure(&mut bench);
    phases::measure(&mut bench, args.models.as_deref())?;
    print!("{}", report::table(&bench.rows));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&bench.rows)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Ceilings, what is wanted, and the rows so far.
struct Bench {
    cpu: Cpu,
    ceilings: Ceilings,
    only: Option<String>,
    quick: bool,
    rows: Vec<Row>,
}

impl Bench {
    fn new(cpu: Cpu, args: &KernelsArgs) -> Self {
        let shrink = if args.quick { 1000 } else { 1 };
        let mut rows = Vec::new();
        let mut ceilings = ceilings::measure(1, shrink);
        rows.extend(ceiling_rows(1, &ceilings));
        if cpu.threads() > 1 {
            ceilings = ceilings::measure(cpu.threads(), shrink);
            rows.extend(ceiling_rows(cpu.threads(), &ceilings));
        }
        Self { cpu, ceilings, only: args.only.clone(), quick: args.quick, rows }
    }

    fn wants(&self, name: &str, shape: &str) -> bool {
        self.only.as_ref().is_none_or(|only| format!("{name} {shape}").contains(only))
    }

    /// A row in the unit of whatever bounds `work`, if it is wanted: `prepare` makes what runs and is done `times` over in each run.
    fn row<R: FnMut(&Cpu)>(&mut self, name: &str, shape: String, work: Work, times: usize, prepare: impl FnOnce(&Cpu) -> R) {
        if !self.wants(name, &shape) {
            return;
        }
        let mut run = prepare(&self.cpu);
        let seconds = best_seconds(self.quick, || run(&self.cpu)) / times as f64;
        let (amount, unit) = match () {
            () if self.ceilings.is_memory_bound(&work) => (work.bytes, "GB/s"),
            () if work.int8_ops > 0.0 => (work.int8_ops + work.f32_flops, "GOP/s"),
            () => (work.f32_flops, "GFLOP/s"),
        };
        self.rows.push(Row::new(name, shape, amount / 1e9 / seconds, amount / 1e9 / self.ceilings.seconds(&work), unit));
    }
}

fn ceiling_rows(threads: usize, ceilings: &Ceilings) -> [Row; 3] {
    let shape = || format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
    [
        Row::ceiling("ceiling f32 multiply-add", shape(), ceilings.f32_flops / 1e9, "GFLOP/s"),
        Row::ceiling("ceiling int8 multiply-add", shape(), ceilings.int8_ops / 1e9, "GOP/s"),
        Row::ceiling("ceiling memory read", shape(), ceilings.bytes / 1e9, "GB/s"),
    ]
}

/// The fastest of several runs of `work`.
fn best_seconds(quick: bool, mut work: impl FnMut()) -> f64 {
    let (runs_min, seconds) = if quick { (1, 0.0) } else { (RUNS_MIN, SECONDS) };
    let started = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < runs_min || started.elapsed().as_secs_f64() < seconds {
        let run = Instant::now();
        work();
        best = best.min(run.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

const RUNS_MIN: usize = 3;
/// Spent on each row, if that is more than the least number of runs takes.
const SECONDS: f64 = 0.4;
