//! Prefill and decode of a whole model with random weights: a decode step as one recorded graph, a prefill of one
//! prompt.

use super::{Sizes, gpu::Gpu, ops::Sequences};
use crate::{
    kernels::{
        Bench,
        limits::{Weights as Arithmetic, batch},
        ops::numbers,
        phases::Phase,
        report::Row,
    },
    model::shapes::Shape,
};
use cudarc::driver::{CudaSlice, CudaStream};
use std::rc::Rc;
use tidemill_kernels::cuda::{
    Bf16, CudaError, Gemm, Kernels,
    attention::{DecodeScratch, Queries, Tile, prefill_tiles},
    elementwise::{Norm, Rope, RowPlaces},
    gemm::{Operands, Output},
    graph::{StepGraphs, StepShape},
    sampling::SampleRequest,
};

const ARITHMETIC: Arithmetic = Arithmetic::Bf16;

const PHASES: [Phase; 5] = [
    Phase::Decode { sequences: 1, context: 4095 },
    Phase::Decode { sequences: 16, context: 4095 },
    Phase::Decode { sequences: 64, context: 4095 },
    Phase::Decode { sequences: 256, context: 2047 },
    Phase::Prefill { tokens: 8192 },
];

pub(super) fn measure(bench: &mut Bench<Gpu>, label: &str, shape: &Shape) -> anyhow::Result<()> {
    let wanted: Vec<Phase> = PHASES.into_iter().filter(|phase| bench.wants(phase.name(), &phase.shape(label, ARITHMETIC))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let sizes = Sizes::of(shape);
    let weights = match Weights::new(&bench.machine, sizes) {
        Err(error) => return bench.keep("prefill and decode", label, Err(error)),
        Ok(weights) => weights,
    };
    for phase in wanted {
        bench.begins(phase.name(), &phase.shape(label, ARITHMETIC));
        let gpu = &mut bench.machine;
        let seconds = match phase {
            Phase::Prefill { tokens } => prefill_seconds(gpu, &weights, tokens),
            Phase::Decode { sequences, context } => decode_seconds(gpu, &weights, sequences, context),
        };
        let (tokens, limit) = (phase.tokens() as f64, bench.ceilings.seconds(&batch(shape, ARITHMETIC, &phase.rows())));
        let row =
            seconds.map(|seconds| Row::new(phase.name(), phase.shape(label, ARITHMETIC), tokens / seconds, tokens / limit, "tokens/s"));
        bench.keep(phase.name(), &phase.shape(label, ARITHMETIC), row)?;
    }
    Ok(())
}

struct Layer {
    qkv: CudaSlice<Bf16>,
    output: CudaSlice<Bf16>,
    gate_up: CudaSlice<Bf16>,
    down: CudaSlice<Bf16>,
}

struct Weights {
    sizes: Sizes,
    layers: Vec<Layer>,
    embedding: CudaSlice<Bf16>,
    head: CudaSlice<Bf16>,
    /// The weight of all norms, which are small.
    norm: CudaSlice<f32>,
}

impl Weights {
    fn new(gpu: &Gpu, sizes: Sizes) -> Result<Self, CudaError> {
        let Sizes { vocab, hidden, intermediate, .. } = sizes;
        // Scaled to keep activations from growing.
        let matrix = |inner: usize, columns: usize| gpu.random(inner * columns, 1.0 / (inner as f32).sqrt());
        let layer = || {
            Ok(Layer {
                qkv: matrix(hidden, sizes.qkv())?,
                output: matrix(sizes.q(), hidden)?,
                gate_up: matrix(hidden, 2 * intermediate)?,
                down: matrix(intermediate, hidden)?,
            })
        };
        Ok(Self {
            sizes,
            layers: (0..sizes.layers).map(|_| layer()).collect::<Result<_, CudaError>>()?,
            embedding: matrix(hidden, vocab)?,
            head: matrix(hidden, vocab)?,
            norm: gpu.upload(&vec![1.0f32; hidden])?,
        })
    }
}

/// The attention kernel to use.
enum Attend {
    Decode { scratch: DecodeScratch, positions_max: usize },
    Prefill { tiles: CudaSlice<Tile> },
}

/// A batch, and the buffers for its intermediate results.
struct Batch {
    rows: usize,
    kernels: Rc<Kernels>,
    sequences: Sequences,
    attend: Attend,
    tokens: CudaSlice<u32>,
    row_sequences: CudaSlice<u32>,
    positions: CudaSlice<u32>,
    angles: CudaSlice<f32>,
    /// The sampling; `None` if only K and V are wanted.
    sampling: Option<Sampling>,
    residual: CudaSlice<f32>,
    normed: CudaSlice<Bf16>,
    qkv: CudaSlice<Bf16>,
    attended: CudaSlice<Bf16>,
    delta: CudaSlice<Bf16>,
    gate_up: CudaSlice<Bf16>,
    activated: CudaSlice<Bf16>,
}

/// The logits of each row, and a token drawn from them.
struct Sampling {
    rows: CudaSlice<u32>,
    requests: CudaSlice<SampleRequest>,
    logits: CudaSlice<f32>,
    tokens: CudaSlice<u32>,
}

impl Sampling {
    fn new(gpu: &Gpu, rows: usize, vocab: usize) -> Result<Self, CudaError> {
        let greedy = |index| SampleRequest { seed: 1, index, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 };
        Ok(Self {
            rows: gpu.upload(&(0..rows as u32).collect::<Vec<_>>())?,
            requests: gpu.upload(&(0..rows as u64).map(greedy).collect::<Vec<_>>())?,
            logits: gpu.device.alloc(rows * vocab)?,
            tokens: gpu.device.alloc(rows)?,
        })
    }
}

impl Batch {
    /// Creates a batch with one row per position; `of_sequence` gives its sequence.
    fn new(
        gpu: &mut Gpu,
        sizes: Sizes,
        sequences: Sequences,
        attend: Attend,
        positions: &[u32],
        of_sequence: &[u32],
    ) -> Result<Self, CudaError> {
        let rows = positions.len();
        let context = *positions.iter().max().expect("rows") as usize + 1;
        let sampling = matches!(attend, Attend::Decode { .. }).then(|| Sampling::new(gpu, rows, sizes.vocab)).transpose()?;
        let kernels = gpu.kernels(sizes.head_dim)?;
        let device = &gpu.device;
        Ok(Self {
            rows,
            kernels,
            sequences,
            attend,
            sampling,
            tokens: gpu.upload(&(0..rows as u32).map(|i| i * 17 % sizes.vocab as u32).collect::<Vec<_>>())?,
            row_sequences: gpu.upload(of_sequence)?,
            positions: gpu.upload(positions)?,
            angles: gpu.upload(&numbers(context * sizes.head_dim / 2))?,
            residual: device.alloc(rows * sizes.hidden)?,
            normed: device.alloc(rows * sizes.hidden)?,
            qkv: device.alloc(rows * sizes.qkv())?,
            attended: device.alloc(rows * sizes.q())?,
            delta: device.alloc(rows * sizes.hidden)?,
            gate_up: device.alloc(rows * 2 * sizes.intermediate)?,
            activated: device.alloc(rows * sizes.intermediate)?,
        })
    }

    fn run(&mut self, stream: &CudaStream, gemm: &mut Gemm, weights: &Weights) -> Result<(), CudaError> {
        let kernels = self.kernels.clone();
        let Sizes { vocab, hidden, intermediate, .. } = weights.sizes;
        kernels.embedding(stream, &mut self.residual.as_view_mut(), &weights.embedding.as_view(), &self.tokens.as_view(), hidden, 1.0)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.norm(stream, weights, index > 0)?;
            multiply(gemm, stream, &mut self.qkv, &self.normed, &layer.qkv, hidden)?;
            let kv_only = self.sampling.is_none() && index + 1 == weights.layers.len();
            self.attention(stream, &weights.sizes, index, kv_only)?;
            if kv_only {
                return Ok(());
            }
            multiply(gemm, stream, &mut self.delta, &self.attended, &layer.output, weights.sizes.q())?;
            self.norm(stream, weights, true)?;
            multiply(gemm, stream, &mut self.gate_up, &self.normed, &layer.gate_up, hidden)?;
            kernels.swiglu(stream, &mut self.activated.as_view_mut(), &self.gate_up.as_view(), intermediate)?;
            multiply(gemm, stream, &mut self.delta, &self.activated, &layer.down, intermediate)?;
        }
        let Some(sampling) = &mut self.sampling else { return Ok(()) };
        let (delta, rows) = (self.delta.as_view(), sampling.rows.as_view());
        let norm = Norm { delta: Some(&delta), weight: &weights.norm.as_view(), epsilon: 1e-5, rows: Some(&rows) };
        kernels.rms_norm(stream, &mut self.normed.as_view_mut(), &mut self.residual.as_view_mut(), &norm)?;
        let operands = Operands::Bf16 { x: &self.normed.as_view(), weight: &weights.head.as_view() };
        gemm.multiply(stream, Output::F32(&mut sampling.logits.as_view_mut()), operands, None, hidden)?;
        kernels.sample(stream, &mut sampling.tokens.as_view_mut(), &sampling.logits.as_view(), &sampling.requests.as_view(), vocab)
    }

    fn norm(&mut self, stream: &CudaStream, weights: &Weights, delta: bool) -> Result<(), CudaError> {
        let view = self.delta.as_view();
        let norm = Norm { delta: delta.then_some(&view), weight: &weights.norm.as_view(), epsilon: 1e-5, rows: None };
        self.kernels.rms_norm(stream, &mut self.normed.as_view_mut(), &mut self.residual.as_view_mut(), &norm)
    }

    /// Runs the attention. `kv_only`: a prefill without logits needs only K and V of the last layer.
    fn attention(&mut self, stream: &CudaStream, sizes: &Sizes, layer: usize, kv_only: bool) -> Result<(), CudaError> {
        let tables = self.sequences.tables.as_view();
        let mut paged = self.sequences.kv.layer(layer, &tables, self.sequences.table_stride);
        let (positions, angles) = (self.positions.as_view(), self.angles.as_view());
        let places = RowPlaces { sequences: &self.row_sequences.as_view(), positions: &positions };
        let rope = Rope { angles: Some((&angles, &angles)), ..Rope::default() };
        self.kernels.rope_kv_write(stream, &mut self.qkv.as_view_mut(), sizes.heads, &mut paged, &places, &rope)?;
        if kv_only {
            return Ok(());
        }
        let q = self.qkv.as_view();
        let queries = Queries::plain(&q, sizes.qkv(), sizes.heads, sizes.head_dim);
        let mut out = self.attended.as_view_mut();
        match &mut self.attend {
            Attend::Decode { scratch, positions_max } => {
                self.kernels.attention_decode(stream, &mut out, &queries, &paged, &positions, *positions_max, scratch)
            }
            Attend::Prefill { tiles } => self.kernels.attention_prefill(stream, &mut out, &queries, &paged, &tiles.as_view(), self.rows),
        }
    }
}

fn multiply(
    gemm: &mut Gemm,
    stream: &CudaStream,
    y: &mut CudaSlice<Bf16>,
    x: &CudaSlice<Bf16>,
    weight: &CudaSlice<Bf16>,
    inner: usize,
) -> Result<(), CudaError> {
    let operands = Operands::Bf16 { x: &x.as_view(), weight: &weight.as_view() };
    gemm.multiply(stream, Output::Bf16(&mut y.as_view_mut()), operands, None, inner)
}

/// The time of one token for each of `rows` sequences, after `context` others.
fn decode_seconds(gpu: &mut Gpu, weights: &Weights, rows: usize, context: usize) -> Result<f64, CudaError> {
    let sizes = weights.sizes;
    let shape = StepShape::holding(rows, context + 1);
    let sequences = Sequences::new(gpu, &sizes, sizes.layers, rows, context + 1)?;
    let scratch = DecodeScratch::new(&gpu.device, rows, sizes.heads, sizes.head_dim, shape.positions)?;
    let attend = Attend::Decode { scratch, positions_max: shape.positions };
    let ids: Vec<u32> = (0..rows as u32).collect();
    let mut batch = Batch::new(gpu, sizes, sequences, attend, &vec![context as u32; rows], &ids)?;
    let stream = gpu.stream.clone();
    // The step runs once unrecorded, so that algorithms are chosen and their memory is allocated before recording.
    batch.run(&stream, &mut gpu.gemm, weights)?;
    gpu.device.synchronize()?;
    let mut graphs = StepGraphs::new(stream);
    graphs.record::<CudaError>(shape, |stream| batch.run(stream, &mut gpu.gemm, weights))?;
    gpu.eager_seconds(|_, _| graphs.launch(shape))
}

/// The time of a whole prompt at once, without logits.
fn prefill_seconds(gpu: &mut Gpu, weights: &Weights, rows: usize) -> Result<f64, CudaError> {
    let sizes = weights.sizes;
    let sequences = Sequences::new(gpu, &sizes, sizes.layers, 1, rows)?;
    let tiles = gpu.upload(&prefill_tiles(sizes.head_dim, &[Tile { sequence: 0, row: 0, position: 0, rows: rows as u32 }]))?;
    let positions: Vec<u32> = (0..rows as u32).collect();
    let mut batch = Batch::new(gpu, sizes, sequences, Attend::Prefill { tiles }, &positions, &vec![0; rows])?;
    gpu.eager_seconds(|gpu, _| {
        let stream = gpu.stream.clone();
        batch.run(&stream, &mut gpu.gemm, weights)
    })
}
