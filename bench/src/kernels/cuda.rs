//! The GPU's half of `tidemill-bench kernels`: checks of the CUDA operations, then measurements at a large model's
//! shapes beside the GPU's ceilings. `bench/gpu-check` runs it on a machine with a driver and no Rust.

pub mod ceilings;
pub mod gpu;
pub mod ops;
pub mod phases;

use super::{
    Bench, CheckKind, KernelsArgs, progress,
    report::{Report, Row},
};
use crate::model::shapes::{self, Shape};
use gpu::Gpu;
use tidemill_kernels::{
    Dtype, KvLayout, KvStorage,
    cuda::{
        CudaError,
        checks::{self, Checks},
    },
};
use tidemill_model::cuda::checks as model_checks;

/// Short name and shape of the measured model, large enough to keep a device busy; then those that `--quick` takes.
const MODEL: (&str, &str) = ("8b", "llama-3.1-8b");
const QUICK_MODEL: (&str, &str) = ("1b", "llama-3.2-1b");

pub(super) fn measure(mut gpu: Gpu, args: &KernelsArgs) -> anyhow::Result<Report> {
    let checks = (!args.no_checks).then(|| checks(&mut gpu, args)).transpose()?;
    let properties = gpu.device.properties();
    let device = format!("{}, {}, {} multiprocessors", properties.name, properties.arch, properties.multiprocessors);
    if args.checks_only.is_some() {
        return Ok(Report { device, rows: Vec::new(), left_out: Vec::new(), checks });
    }
    let (ceilings, bus) = ceilings::measure(&mut gpu)?;
    let mut bench = Bench {
        machine: gpu,
        ceilings,
        only: args.only.clone(),
        quick: args.quick,
        seconds: args.seconds,
        rows: ceilings::rows(&ceilings, &bus).into(),
        left_out: Vec::new(),
        progress: progress(),
    };
    let (label, name) = if args.quick { QUICK_MODEL } else { MODEL };
    let mut shape = shapes::by_name(name).expect("the shapes are in the table").clone();
    if args.quick {
        shape.layers = 2;
    }
    ops::measure(&mut bench, label, &Sizes::of(&shape), &bus)?;
    phases::measure(&mut bench, label, &shape)?;
    Ok(Report { device, rows: bench.rows, left_out: bench.left_out, checks })
}

/// Runs the checks that `args` ask for; whole models if it names a folder of them.
fn checks(gpu: &mut Gpu, args: &KernelsArgs) -> anyhow::Result<Checks> {
    let wants = |kind| args.checks_only.is_none_or(|only| only == kind);
    let mut checks = Checks::new(gpu.seed);
    if wants(CheckKind::Ops) {
        checks::operations(gpu, &mut checks)?;
        model_checks::sampling(gpu, &mut checks)?;
    }
    if let Some(folder) = args.checkpoints.as_ref().filter(|_| wants(CheckKind::Models)) {
        model_checks::models(folder, &args.cache, &mut checks)?;
    }
    Ok(checks)
}

impl Bench<Gpu> {
    /// Keeps a row, or notes that the device's memory is too small for it. Other errors end the run.
    fn keep(&mut self, name: &str, shape: &str, row: Result<Row, CudaError>) -> anyhow::Result<()> {
        match row {
            Ok(row) => self.rows.push(row),
            Err(error @ CudaError::OutOfMemory { .. }) => {
                self.left_out.push(format!("{name} {shape}: {error}"));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
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

    /// Numbers of a row of Q.
    fn q(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of a row of Q, K and V.
    fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn kv_layout(&self, layers: usize) -> KvLayout {
        KvLayout { layers, kv_heads: self.kv_heads, head_dim: self.head_dim, dtype: KvStorage::Float(Dtype::Bf16) }
    }
}
