//! `tidemill-bench kernels`: the speed of each kernel, and of each phase of whole models, relative to the machine's limits.
//!
//! Measures the CPU, or an NVIDIA GPU ([`cuda`]). On a GPU it first checks operations against references, because such a machine may have a
//! driver and no Rust to run the kernels' own tests with.
//!
//! The machine's ceilings are measured first, in the same run and with the same threads; memory again beside each row, which is compared
//! with the best of these readings. Everything is repeated and the best result is kept, as other load can only slow it down. Operands
//! stream from memory as a model's layers do, so no cache flatters a decode step.

pub mod ceilings;
pub mod collectives;
pub mod cuda;
pub mod journal;
pub mod limits;
pub mod ops;
pub mod phases;
mod ranks;
pub mod report;

use crate::record;
use anyhow::ensure;
use ceilings::Reading;
use cuda::gpu::Gpu;
use indicatif::{ProgressBar, ProgressStyle};
use journal::Journal;
use limits::{Ceilings, Work};
use report::{Report, Row};
use std::{path::PathBuf, time::Instant};
use tidemill_kernels::{Cpu, Isa};

/// Measure kernels and whole models against this machine's ceilings.
#[derive(Clone, Debug, clap::Args)]
pub struct KernelsArgs {
    /// Device to measure; `auto` is a working GPU if there is one, else the CPU.
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// Write the results to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Only rows whose "name shape" contains this text; ceilings are always measured.
    #[arg(long)]
    pub only: Option<String>,
    /// Less work, two layers, the smallest model only: to check that it works, not how fast it is.
    #[arg(long)]
    pub quick: bool,
    /// CPU: time spent on each row, whose best run counts; at least three runs. Use more if the machine has other load.
    #[arg(long, default_value_t = 0.4, conflicts_with = "quick")]
    pub seconds: f64,
    /// CPU: threads that compute (default: all cores).
    #[arg(long)]
    pub threads: Option<usize>,
    /// CPU: instruction set, avx512bf16, avx512, avx2, neon or portable (default: the best available).
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Keep the models with random weights here for the next run (default: create new ones, and remove them at the end).
    #[arg(long)]
    pub models: Option<PathBuf>,
    /// CPU: measure the phases of this Hugging Face directory, and no models with random weights. Only a decode step of one sequence has a
    /// limit: the bytes that it reads, over the bandwidth.
    #[arg(long, conflicts_with_all = ["quick", "models"])]
    pub checkpoint: Option<PathBuf>,
    /// CPU: arithmetic of the projections of `--checkpoint`.
    #[arg(long, default_value = "none", value_parser = ["none", "int8", "int4", "dequantize"])]
    pub quantize: String,
    /// CPU: measure `--checkpoint` whole and on so many tensor-parallel ranks, by turns.
    #[arg(long, requires = "checkpoint")]
    pub ranks: Option<usize>,
    /// GPU: seed of the checks' random inputs (default: a fresh one, which is printed).
    #[arg(long)]
    pub seed: Option<u64>,
    /// GPU: a folder of tiny checkpoints with references, checked as whole models (model/tests/fixtures).
    #[arg(long)]
    pub checkpoints: Option<PathBuf>,
    /// GPU: run only these checks, and measure nothing.
    #[arg(long, value_enum)]
    pub checks_only: Option<CheckKind>,
    /// GPU: only measure, check nothing.
    #[arg(long, conflicts_with = "checks_only")]
    pub no_checks: bool,
    /// GPU: measure only these rows, and check nothing.
    #[arg(long, value_enum, conflicts_with = "checks_only")]
    pub measure_only: Option<RowKind>,
    /// GPU: append each check and row to this file as a line of JSON when it ends, so that a later crash loses none.
    #[arg(long)]
    pub json_lines: Option<PathBuf>,
    /// Compile the kernels that the checks and the rows need for this GPU architecture into `--cache`, and exit. Needs NVRTC but no GPU.
    #[arg(long, value_enum, conflicts_with_all = ["checks_only", "no_checks"])]
    pub compile_only: Option<cuda::compile::Target>,
    /// GPU: keep compiled kernels here.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("tidemill-kernels"))]
    pub cache: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum DeviceKind {
    Auto,
    Cpu,
    /// The first device in CUDA_VISIBLE_DEVICES.
    Cuda,
}

/// A kind of check on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum CheckKind {
    /// One small case of every kernel.
    Tiny,
    /// Each operation against references: all of the next five.
    Ops,
    /// Embedding, norms, SwiGLU, FP8 rounding, rotary embedding.
    Rows,
    /// Matrix products.
    Products,
    Attention,
    /// Copies of KV blocks, and steps recorded as graphs.
    Blocks,
    /// Penalties, masks and draws.
    Sampling,
    /// The models in `--checkpoints`.
    Models,
}

/// A kind of row on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum RowKind {
    /// Single operations at a model's shapes.
    Ops,
    /// Prefill and decode steps of a whole model.
    Phases,
}

/// The exit status if `--device cuda` finds no GPU, which is no failure of the kernels.
pub const NO_DEVICE: i32 = 3;

/// Prints the tables, and fails if a check did.
pub fn run(args: &KernelsArgs) -> anyhow::Result<()> {
    if let Some(target) = args.compile_only {
        return cuda::compile::compile(target, &args.cache);
    }
    let report = match open_gpu(args)? {
        Some(gpu) => cuda::measure(gpu, args)?,
        None => measure_cpu(args)?,
    };
    print!("{}", report.text());
    record::write(args.json.as_ref(), "kernels", &report.rows())?;
    report.verdict()
}

/// Opens the GPU, if it is to be measured.
fn open_gpu(args: &KernelsArgs) -> anyhow::Result<Option<Gpu>> {
    if args.device == DeviceKind::Cpu {
        return Ok(None);
    }
    match (Gpu::open(&args.cache, args.seed.unwrap_or_else(rand::random), args.quick), args.device) {
        (Ok(gpu), _) => Ok(Some(gpu)),
        (Err(error), DeviceKind::Auto) => {
            eprintln!("measuring the CPU, for there is no GPU to measure: {error}");
            Ok(None)
        }
        (Err(error), _) if error.is_absence() => {
            eprintln!("no GPU to measure: {error}");
            std::process::exit(NO_DEVICE);
        }
        (Err(error), _) => Err(error.into()),
    }
}

fn measure_cpu(args: &KernelsArgs) -> anyhow::Result<Report> {
    let threads = args.threads.unwrap_or(std::thread::available_parallelism().map_or(1, usize::from));
    ensure!((1..=1024).contains(&threads), "--threads {threads} must be from 1 to 1024");
    ensure!(args.seconds > 0.0 && args.seconds <= SECONDS_MAX, "--seconds {} must be above 0, and at most {SECONDS_MAX}", args.seconds);
    let mut bench = Bench::new(Cpu::new(args.isa, threads)?, args)?;
    match (&args.checkpoint, args.ranks) {
        (Some(dir), Some(ranks)) => ranks::measure_checkpoint(&mut bench, dir, &args.quantize, ranks)?,
        (Some(dir), None) => phases::measure_checkpoint(&mut bench, dir, &args.quantize)?,
        (None, _) => {
            ops::measure(&mut bench);
            collectives::measure(&mut bench)?;
            phases::measure(&mut bench, args.models.as_deref())?;
        }
    }
    let device = format!("CPU, {}, {}", bench.machine.cpu.isa(), threads_text(threads));
    Ok(Report { device, rows: bench.rows, left_out: bench.left_out, checks: None })
}

/// A CPU, and the memory reading beside its rows.
struct Host {
    cpu: Cpu,
    reading: Reading,
}

/// The machine, its ceilings, the selection of rows, and the results so far.
struct Bench<Machine = Host> {
    machine: Machine,
    ceilings: Ceilings,
    only: Option<String>,
    quick: bool,
    /// The least time spent on each row.
    seconds: f64,
    rows: Vec<Row>,
    /// Rows that this machine cannot have, with the reasons.
    left_out: Vec<String>,
    /// Shows the current measurement. Draws only when that changes, and never during a measurement.
    progress: ProgressBar,
    /// The journal to which rows are written as they end.
    journal: Journal,
}

impl<Machine> Bench<Machine> {
    fn begins(&self, name: &str, shape: &str) {
        self.progress.set_position(self.rows.len() as u64);
        self.progress.set_message(format!("{name} {shape}"));
    }

    fn wants(&self, name: &str, shape: &str) -> bool {
        self.only.as_ref().is_none_or(|only| format!("{name} {shape}").contains(only))
    }
}

impl Bench {
    fn new(cpu: Cpu, args: &KernelsArgs) -> anyhow::Result<Self> {
        let progress = progress();
        progress.set_message("ceilings");
        let shrink = if args.quick { 1000 } else { 1 };
        let mut rows = Vec::new();
        let (mut ceilings, mut reading) = ceilings::measure(1, shrink)?;
        rows.extend(ceiling_rows(1, &ceilings));
        if cpu.threads() > 1 {
            (ceilings, reading) = ceilings::measure(cpu.threads(), shrink)?;
            rows.extend(ceiling_rows(cpu.threads(), &ceilings));
        }
        let seconds = if args.quick { 0.0 } else { args.seconds };
        Ok(Self {
            machine: Host { cpu, reading },
            ceilings,
            only: args.only.clone(),
            quick: args.quick,
            seconds,
            rows,
            left_out: Vec::new(),
            progress,
            journal: Journal::silent(),
        })
    }

    /// Adds a row in the unit of the resource that bounds `work`, if it is wanted. `prepare` creates the measured function; each run calls
    /// it `times` times.
    fn row<R: FnMut(&Cpu)>(&mut self, name: &str, shape: String, work: Work, times: usize, prepare: impl FnOnce(&Cpu) -> R) {
        if !self.wants(name, &shape) {
            return;
        }
        self.begins(name, &shape);
        let Host { cpu, reading } = &self.machine;
        let mut run = prepare(cpu);
        let (seconds, bytes) = best_seconds(self.seconds, reading, || run(cpu));
        self.rows.push(Row::of_work(name, shape, seconds / times as f64, &work, &Ceilings { bytes, ..self.ceilings }));
    }

    /// Adds a row of layers per second that move `bytes` each, if it is wanted. Each run of the function that `prepare` creates is of
    /// `layers` layers.
    fn layers<R: FnMut(&Cpu)>(&mut self, name: &str, shape: String, bytes: usize, layers: usize, prepare: impl FnOnce(&Cpu) -> R) {
        if !self.wants(name, &shape) {
            return;
        }
        self.begins(name, &shape);
        let Host { cpu, reading } = &self.machine;
        let mut run = prepare(cpu);
        let (seconds, bandwidth) = best_seconds(self.seconds, reading, || run(cpu));
        self.rows.push(Row::new(name, shape, layers as f64 / seconds, bandwidth / bytes as f64, "layers/s"));
    }
}

fn progress() -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed} {pos} rows, {msg}").expect("a valid template");
    ProgressBar::no_length().with_style(style)
}

fn threads_text(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

fn ceiling_rows(threads: usize, ceilings: &Ceilings) -> [Row; 4] {
    let shape = || threads_text(threads);
    [
        Row::without_limit("ceiling f32 multiply-add", shape(), ceilings.f32_flops / 1e9, "GFLOP/s"),
        Row::without_limit("ceiling bf16 multiply-add", shape(), ceilings.bf16_flops / 1e9, "GFLOP/s"),
        Row::without_limit("ceiling int8 multiply-add", shape(), ceilings.int8_ops / 1e9, "GOP/s"),
        Row::without_limit("ceiling memory read", shape(), ceilings.bytes / 1e9, "GB/s"),
    ]
}

/// The fastest of several runs of `work`, which take about `seconds` in all (if that is 0: a single run, to check that it works), and the
/// highest memory bandwidth read before, between and after them.
fn best_seconds(seconds: f64, reading: &Reading, mut work: impl FnMut()) -> (f64, f64) {
    let runs_min = if seconds > 0.0 { RUNS_MIN } else { 1 };
    let (mut best, mut bytes) = (f64::INFINITY, reading.bytes_per_second());
    let (mut runs, mut spent, mut since_read) = (0, 0.0, 0.0);
    while runs < runs_min || spent < seconds {
        let run = Instant::now();
        work();
        let run = run.elapsed().as_secs_f64();
        (best, runs, spent, since_read) = (best.min(run), runs + 1, spent + run, since_read + run);
        if since_read >= READ_EVERY_SECONDS {
            (bytes, since_read) = (reading.bytes_per_second().max(bytes), 0.0);
        }
    }
    (best, reading.bytes_per_second().max(bytes))
}

const RUNS_MIN: usize = 3;
/// The interval of readings, a few times as long as one takes.
const READ_EVERY_SECONDS: f64 = 0.05;
const SECONDS_MAX: f64 = 3600.0;
