//! Layers of experts at the shape of Qwen3-30B-A3B (huggingface.co/Qwen/Qwen3-30B-A3B): decode steps, which read the weights of the
//! chosen experts, and a prefill.

use super::gpu::Gpu;
use crate::kernels::{Bench, limits::Work, report::Row};
use cudarc::driver::CudaSlice;
use std::collections::HashSet;
use tidemill_kernels::cuda::{
    Bf16, CudaError,
    experts::{ExpertActivation, ExpertInput, ExpertKernels, ExpertScores, ExpertScratch, ExpertSizes, ExpertWeights, RoutingRule},
};

const SIZES: ExpertSizes = ExpertSizes { experts: 128, chosen: 8, hidden: 2048, inner: 768, ranks: 1, router_outputs: 128 };
/// The sizes for `--quick`.
const QUICK_SIZES: ExpertSizes = ExpertSizes { experts: 16, chosen: 2, hidden: 512, inner: 128, ranks: 1, router_outputs: 16 };
const RULE: RoutingRule = RoutingRule { scores: ExpertScores::Softmax, groups: None, is_normalized: true, factor: 1.0 };
/// The rows of decode steps, and of a prefill.
const ROWS: [usize; 4] = [1, 16, 64, 8192];
/// The number of routings that take turns, as a single one would leave its chosen experts in the cache.
const ROUTINGS: usize = 8;

pub(super) fn measure(bench: &mut Bench<Gpu>) -> anyhow::Result<()> {
    let (label, sizes, rows) = if bench.quick { ("quick", QUICK_SIZES, &ROWS[..2]) } else { ("30b-a3b", SIZES, &ROWS[..]) };
    for &rows in rows {
        let shape = format!("{label} {rows} × {} of {} × {} × {}", sizes.chosen, sizes.experts, sizes.hidden, sizes.inner);
        let parts = [("experts multiply bf16", Part::Products), ("experts layer bf16", Part::All)];
        let wanted: Vec<_> = parts.into_iter().filter(|(name, _)| bench.wants(name, &shape)).collect();
        if wanted.is_empty() {
            continue;
        }
        let mut layer = match Layer::new(&mut bench.machine, sizes, rows) {
            Ok(layer) => layer,
            Err(error) => {
                bench.keep("experts", &shape, Err(error))?;
                continue;
            }
        };
        for (name, part) in wanted {
            bench.begins(name, &shape);
            let ceilings = bench.ceilings;
            let row = layer.seconds(&mut bench.machine, part);
            let row = row.map(|seconds| Row::of_work(name, shape.clone(), seconds, &layer.work, &ceilings));
            bench.keep(name, &shape, row)?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// The products of rows that are already routed.
    Products,
    /// The router, the products and the sum.
    All,
}

/// A layer with random weights, and rows that it has routed.
struct Layer {
    kernels: ExpertKernels,
    router: CudaSlice<f32>,
    gate_up: CudaSlice<Bf16>,
    down: CudaSlice<Bf16>,
    norm: CudaSlice<f32>,
    normed: CudaSlice<Bf16>,
    positions: CudaSlice<u32>,
    out: CudaSlice<Bf16>,
    /// Residual streams, with the buffers of their results.
    routed: Vec<(CudaSlice<f32>, ExpertScratch)>,
    /// The products of a routing: the weights of each expert that some row chose are read once.
    work: Work,
}

impl Layer {
    fn new(gpu: &mut Gpu, sizes: ExpertSizes, rows: usize) -> Result<Self, CudaError> {
        let ExpertSizes { experts, chosen, hidden, inner, .. } = sizes;
        let router = gpu.f32s(experts * hidden, 0.1);
        let mut layer = Self {
            kernels: ExpertKernels::load(&gpu.device)?,
            router: gpu.upload(&router)?,
            gate_up: gpu.random(experts * 2 * inner * hidden, 0.1)?,
            down: gpu.random(experts * hidden * inner, 0.1)?,
            norm: gpu.upload(&vec![1.0f32; hidden])?,
            normed: gpu.random(rows * hidden, 1.0)?,
            positions: gpu.upload(&(0..rows as u32).collect::<Vec<_>>())?,
            out: gpu.device.alloc(rows * hidden)?,
            routed: Vec::new(),
            work: Work::default(),
        };
        let routings = if rows * chosen > experts * ROUTINGS { 1 } else { ROUTINGS };
        let mut distinct = 0;
        for _ in 0..routings {
            let residual = gpu.f32s(rows * hidden, 1.0);
            layer.routed.push((gpu.upload(&residual)?, ExpertScratch::new(&gpu.device, sizes, rows)?));
            layer.run(gpu, layer.routed.len() - 1, Part::All)?;
            let chosen = gpu.download(layer.routed[layer.routed.len() - 1].1.choices().1)?;
            distinct += chosen.into_iter().collect::<HashSet<_>>().len();
        }
        let numbers_of_expert = (3 * inner * hidden) as f64;
        layer.work = Work {
            bf16_flops: 2.0 * numbers_of_expert * (rows * chosen) as f64,
            bytes: 2.0 * numbers_of_expert * distinct as f64 / routings as f64,
            ..Work::default()
        };
        Ok(layer)
    }

    fn seconds(&mut self, gpu: &mut Gpu, part: Part) -> Result<f64, CudaError> {
        gpu.seconds(|gpu, i| self.run(gpu, i % self.routed.len(), part))
    }

    fn run(&mut self, gpu: &Gpu, routing: usize, part: Part) -> Result<(), CudaError> {
        let Self { kernels, router, gate_up, down, norm, normed, positions, out, routed, .. } = self;
        let (residual, scratch) = &mut routed[routing];
        let input = ExpertInput {
            residual: &residual.as_view(),
            norm: &norm.as_view(),
            epsilon: 1e-6,
            normed: &normed.as_view(),
            positions: &positions.as_view(),
        };
        let weights = ExpertWeights {
            router: &router.as_view(),
            correction: None,
            gate_up: &gate_up.as_view(),
            gate_up_bias: None,
            down: &down.as_view(),
            down_bias: None,
        };
        let (stream, activation) = (&gpu.stream, ExpertActivation::Silu);
        match part {
            Part::Products => kernels.multiply(stream, &normed.as_view(), positions.len(), &weights, activation, scratch),
            Part::All => kernels.apply(stream, &mut out.as_view_mut(), &input, &RULE, &weights, activation, None, scratch),
        }
    }
}
