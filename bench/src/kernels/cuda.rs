//! The GPU's half of `tidemill-bench kernels`: checks of the CUDA operations, then measurements at a large model's shapes, beside the GPU's
//! ceilings. `bench/gpu-check` runs it on a machine with a driver and no Rust.

pub mod ceilings;
pub mod compile;
mod experts;
pub mod gpu;
pub mod ops;
pub mod phases;

use super::{
    Bench, CheckKind, KernelsArgs, RowKind,
    journal::Journal,
    progress,
    report::{Report, Row},
};
use crate::model::shapes::{self, Shape};
use gpu::Gpu;
use std::fmt;
use tidemill_kernels::{
    Dtype, KvLayout, KvStorage,
    cuda::{
        CudaError,
        checks::{self, Checks, Extent},
    },
};
use tidemill_model::cuda::checks as model_checks;

/// The short name and shape of the measured model, which is large enough to keep a device busy.
const MODEL: (&str, &str) = ("8b", "llama-3.1-8b");
/// The same for `--quick`.
const QUICK_MODEL: (&str, &str) = ("1b", "llama-3.2-1b");

pub(super) fn measure(mut gpu: Gpu, args: &KernelsArgs) -> anyhow::Result<Report> {
    let checks = (!args.no_checks && args.measure_only.is_none()).then(|| checks(&mut gpu, args)).transpose()?;
    let properties = gpu.device.properties();
    let device = format!("{}, {}, {} multiprocessors", properties.name, properties.arch, properties.multiprocessors);
    if args.checks_only.is_some() {
        return Ok(Report { device, rows: Vec::new(), left_out: Vec::new(), checks });
    }
    let (ceilings, bus) = ceilings::measure(&mut gpu)?;
    let mut journal = Journal::open(args.json_lines.as_deref())?;
    let ceiling_rows = ceilings::rows(&ceilings, &bus);
    ceiling_rows.iter().for_each(|row| journal.row(row));
    let mut bench = Bench {
        machine: gpu,
        ceilings,
        only: args.only.clone(),
        quick: args.quick,
        seconds: args.seconds,
        rows: ceiling_rows.into(),
        left_out: Vec::new(),
        progress: progress(),
        journal,
    };
    let (label, name) = if args.quick { QUICK_MODEL } else { MODEL };
    let mut shape = shapes::by_name(name).expect("the shapes are in the table").clone();
    if args.quick {
        shape.layers = 2;
    }
    let wants = |kind| args.measure_only.is_none_or(|only| only == kind);
    if wants(RowKind::Ops) {
        ops::measure(&mut bench, label, &Sizes::of(&shape), &bus)?;
        experts::measure(&mut bench)?;
    }
    if wants(RowKind::Phases) {
        phases::measure(&mut bench, label, &shape, args.models.as_deref(), &args.cache)?;
    }
    Ok(Report { device, rows: bench.rows, left_out: bench.left_out, checks })
}

/// Runs the checks that `args` ask for, with whole models if a folder of them is named. An error that leaves the device unusable ends the
/// checks, and is one of the results.
fn checks(gpu: &mut Gpu, args: &KernelsArgs) -> anyhow::Result<Checks> {
    let mut journal = Journal::open(args.json_lines.as_deref())?;
    let mut checks = Checks::told_to(gpu.seed, move |check| journal.check(check));
    if let Err(error) = operations(gpu, args.checks_only, &mut checks) {
        eprintln!("the device cannot be used any more: {error}");
        return Ok(checks);
    }
    let wants_models = matches!(args.checks_only, None | Some(CheckKind::Models));
    if let Some(folder) = args.checkpoints.as_ref().filter(|_| wants_models) {
        model_checks::models(folder, &args.cache, &mut checks)?;
    }
    Ok(checks)
}

fn operations(gpu: &mut Gpu, only: Option<CheckKind>, checks: &mut Checks) -> Result<(), CudaError> {
    let extent = if only == Some(CheckKind::Tiny) { Extent::First } else { Extent::All };
    let wants = |kind| only.is_none_or(|only| only == kind || matches!(only, CheckKind::Ops | CheckKind::Tiny));
    if wants(CheckKind::Rows) {
        checks::rows::all(gpu, checks, extent)?;
    }
    if wants(CheckKind::Attention) {
        checks::attention::all(gpu, checks, extent)?;
    }
    if wants(CheckKind::Products) {
        checks::products::all(gpu, checks, extent)?;
        checks::experts::all(gpu, checks, extent)?;
    }
    if wants(CheckKind::Blocks) {
        checks::blocks::all(gpu, checks)?;
    }
    if wants(CheckKind::Sampling) {
        model_checks::sampling(gpu, checks, extent)?;
    }
    Ok(())
}

impl Bench<Gpu> {
    /// Keeps a row, or notes the reason why there is none. Only an error that leaves the device unusable ends the run.
    fn keep(&mut self, name: &str, shape: &str, row: Result<Row, CudaError>) -> anyhow::Result<()> {
        match row {
            Ok(row) => {
                self.journal.row(&row);
                self.rows.push(row);
            }
            Err(error) => {
                self.leave_out(name, shape, &error);
                if !self.machine.device.is_usable() {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    fn leave_out(&mut self, name: &str, shape: &str, reason: &dyn fmt::Display) {
        eprintln!("measuring {name} {shape} failed: {reason}");
        self.left_out.push(format!("{name} {shape}: {reason}"));
    }
}

/// A model's dimensions.
#[derive(Clone, Copy)]
struct Sizes {
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn of(shape: &Shape) -> Self {
        let [vocab, hidden, intermediate, layers, heads, kv_heads, head_dim] =
            [shape.vocab, shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.head_dim].map(|n| n as usize);
        Self { vocab, hidden, intermediate, layers, heads, kv_heads, head_dim }
    }

    /// The count of numbers in a row of Q.
    fn q(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The count of numbers in a row of Q, K and V.
    fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn kv_layout(&self, layers: usize) -> KvLayout {
        KvLayout { layers, kv_heads: self.kv_heads, head_dim: self.head_dim, dtype: KvStorage::Float(Dtype::Bf16), latent: None }
    }
}
