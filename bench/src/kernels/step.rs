//! Whole steps of a model of Llama-3.1-8B's shape with random weights: a decode step as one recorded graph, a prefill of one prompt.
//! What counts is what must move or be multiplied at least, over the device's limits.

use super::{
    does_not_fit,
    gpu::Gpu,
    limits::Limits,
    report::{Report, Speed},
    speed::{HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, QKV, Sequences, VOCAB, attention_flop},
};
use cudarc::driver::{CudaSlice, CudaStream};
use std::rc::Rc;
use tidemill_kernels::cuda::{
    Bf16, CudaError, Gemm, Kernels,
    attention::{DecodeScratch, Queries, Tile, prefill_tiles},
    elementwise::{Norm, Rope, RowPlaces},
    gemm::{Factors, Product},
    graph::{StepGraphs, StepShape},
    sampling::SampleRequest,
};

const LAYERS: usize = 32;
const REPETITIONS: usize = 20;

pub fn all(gpu: &mut Gpu, limits: &Limits, report: &mut Report) -> anyhow::Result<()> {
    let weights = match Weights::new(gpu).map_err(anyhow::Error::from) {
        Err(error) if does_not_fit(&error) => {
            report.skipped.push(format!("whole steps: {error}"));
            return Ok(());
        }
        other => other?,
    };
    for (batch, context) in [(1, 4096), (16, 4096), (64, 4096), (256, 2048)] {
        match decode(gpu, limits, &weights, batch, context).map_err(anyhow::Error::from) {
            Ok(speed) => report.speeds.push(speed),
            Err(error) if does_not_fit(&error) => report.skipped.push(format!("decode step, {batch} × {context}: {error}")),
            Err(error) => return Err(error),
        }
    }
    report.speeds.push(prefill(gpu, limits, &weights, 8192)?);
    Ok(())
}

struct Layer {
    qkv: CudaSlice<Bf16>,
    output: CudaSlice<Bf16>,
    gate_up: CudaSlice<Bf16>,
    down: CudaSlice<Bf16>,
}

struct Weights {
    layers: Vec<Layer>,
    embedding: CudaSlice<Bf16>,
    head: CudaSlice<Bf16>,
    /// The same for all: norms are small.
    norm: CudaSlice<f32>,
}

impl Weights {
    fn new(gpu: &mut Gpu) -> Result<Self, CudaError> {
        // Of a size that keeps activations from growing.
        let mut matrix = |inner: usize, columns: usize| gpu.random(inner * columns, 1.0 / (inner as f32).sqrt());
        let layers = (0..LAYERS)
            .map(|_| {
                Ok(Layer {
                    qkv: matrix(HIDDEN, QKV)?,
                    output: matrix(HEADS * HEAD_DIM, HIDDEN)?,
                    gate_up: matrix(HIDDEN, 2 * INTERMEDIATE)?,
                    down: matrix(INTERMEDIATE, HIDDEN)?,
                })
            })
            .collect::<Result<_, CudaError>>()?;
        let (embedding, head) = (matrix(HIDDEN, VOCAB)?, matrix(HIDDEN, VOCAB)?);
        let norm = gpu.upload(&vec![1.0f32; HIDDEN])?;
        Ok(Self { layers, embedding, head, norm })
    }

    /// Numbers of a layer's matrices, and of the head.
    fn counts() -> (usize, usize) {
        (HIDDEN * (QKV + HEADS * HEAD_DIM + 3 * INTERMEDIATE), HIDDEN * VOCAB)
    }
}

/// Which attention.
enum Attend {
    Decode { scratch: DecodeScratch, positions_max: usize },
    Prefill { tiles: CudaSlice<Tile> },
}

/// A batch, and what its rows become on the way.
struct Batch {
    rows: usize,
    kernels: Rc<Kernels>,
    sequences: Sequences,
    attend: Attend,
    tokens: CudaSlice<u32>,
    row_sequences: CudaSlice<u32>,
    positions: CudaSlice<u32>,
    angles: CudaSlice<f32>,
    /// The rows that are followed to logits.
    logit_rows: CudaSlice<u32>,
    requests: CudaSlice<SampleRequest>,
    residual: CudaSlice<f32>,
    normed: CudaSlice<Bf16>,
    qkv: CudaSlice<Bf16>,
    attended: CudaSlice<Bf16>,
    delta: CudaSlice<Bf16>,
    gate_up: CudaSlice<Bf16>,
    activated: CudaSlice<Bf16>,
    logits: CudaSlice<f32>,
    sampled: CudaSlice<u32>,
}

impl Batch {
    /// One row for each of `positions`; `of_sequence` tells whose it is.
    fn new(
        gpu: &mut Gpu,
        sequences: Sequences,
        attend: Attend,
        positions: &[u32],
        of_sequence: &[u32],
        logit_rows: &[u32],
    ) -> Result<Self, CudaError> {
        let (rows, logits) = (positions.len(), logit_rows.len());
        let context = *positions.iter().max().expect("rows") as usize + 1;
        let angles = gpu.f32s(context * HEAD_DIM / 2, 1.0);
        let requests: Vec<SampleRequest> =
            (0..logits as u64).map(|index| SampleRequest { seed: 1, index, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 }).collect();
        let device = &gpu.device;
        Ok(Self {
            rows,
            sequences,
            attend,
            tokens: gpu.upload(&(0..rows as u32).map(|i| i * 17 % VOCAB as u32).collect::<Vec<_>>())?,
            row_sequences: gpu.upload(of_sequence)?,
            positions: gpu.upload(positions)?,
            angles: gpu.upload(&angles)?,
            logit_rows: gpu.upload(logit_rows)?,
            requests: gpu.upload(&requests)?,
            residual: device.alloc(rows * HIDDEN)?,
            normed: device.alloc(rows * HIDDEN)?,
            qkv: device.alloc(rows * QKV)?,
            attended: device.alloc(rows * HEADS * HEAD_DIM)?,
            delta: device.alloc(rows * HIDDEN)?,
            gate_up: device.alloc(rows * 2 * INTERMEDIATE)?,
            activated: device.alloc(rows * INTERMEDIATE)?,
            logits: device.alloc(logits * VOCAB)?,
            sampled: device.alloc(logits)?,
            kernels: gpu.kernels(HEAD_DIM)?,
        })
    }

    fn run(&mut self, stream: &CudaStream, gemm: &mut Gemm, weights: &Weights) -> Result<(), CudaError> {
        let kernels = self.kernels.clone();
        kernels.embedding(stream, &mut self.residual.as_view_mut(), &weights.embedding.as_view(), &self.tokens.as_view(), HIDDEN)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.norm(stream, weights, index > 0)?;
            multiply(gemm, stream, &mut self.qkv, &self.normed, &layer.qkv, HIDDEN)?;
            self.attention(stream, &kernels, index)?;
            multiply(gemm, stream, &mut self.delta, &self.attended, &layer.output, HEADS * HEAD_DIM)?;
            self.norm(stream, weights, true)?;
            multiply(gemm, stream, &mut self.gate_up, &self.normed, &layer.gate_up, HIDDEN)?;
            kernels.swiglu(stream, &mut self.activated.as_view_mut(), &self.gate_up.as_view(), INTERMEDIATE)?;
            multiply(gemm, stream, &mut self.delta, &self.activated, &layer.down, INTERMEDIATE)?;
        }
        let logits = self.logit_rows.len();
        let (delta, rows) = (self.delta.as_view(), self.logit_rows.as_view());
        let norm = Norm { delta: Some(&delta), weight: &weights.norm.as_view(), epsilon: 1e-5, rows: Some(&rows) };
        kernels.rms_norm(stream, &mut self.normed.slice_mut(..logits * HIDDEN), &mut self.residual.as_view_mut(), &norm)?;
        let factors = Factors::Bf16 { x: &self.normed.slice(..logits * HIDDEN), weight: &weights.head.as_view() };
        gemm.multiply(stream, Product::F32(&mut self.logits.as_view_mut()), factors, None, HIDDEN)?;
        kernels.sample(stream, &mut self.sampled.as_view_mut(), &self.logits.as_view(), &self.requests.as_view(), VOCAB)
    }

    fn norm(&mut self, stream: &CudaStream, weights: &Weights, delta: bool) -> Result<(), CudaError> {
        let view = self.delta.as_view();
        let norm = Norm { delta: delta.then_some(&view), weight: &weights.norm.as_view(), epsilon: 1e-5, rows: None };
        self.kernels.rms_norm(stream, &mut self.normed.as_view_mut(), &mut self.residual.as_view_mut(), &norm)
    }

    fn attention(&mut self, stream: &CudaStream, kernels: &Kernels, layer: usize) -> Result<(), CudaError> {
        let tables = self.sequences.tables.as_view();
        let mut paged = self.sequences.kv.layer(layer, &tables, self.sequences.table_stride);
        let (positions, angles) = (self.positions.as_view(), self.angles.as_view());
        let places = RowPlaces { sequences: &self.row_sequences.as_view(), positions: &positions };
        let rope = Rope { cos: &angles, sin: &angles, norms: None, epsilon: 0.0 };
        kernels.rope_kv_write(stream, &mut self.qkv.as_view_mut(), HEADS, &mut paged, &places, &rope)?;
        let queries = Queries { q: &self.qkv.as_view(), stride: QKV, heads: HEADS, window: None };
        let mut out = self.attended.as_view_mut();
        match &mut self.attend {
            Attend::Decode { scratch, positions_max } => {
                kernels.attention_decode(stream, &mut out, &queries, &paged, &positions, *positions_max, scratch)
            }
            Attend::Prefill { tiles } => kernels.attention_prefill(stream, &mut out, &queries, &paged, &tiles.as_view(), self.rows),
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
    let factors = Factors::Bf16 { x: &x.as_view(), weight: &weight.as_view() };
    gemm.multiply(stream, Product::Bf16(&mut y.as_view_mut()), factors, None, inner)
}

fn decode(gpu: &mut Gpu, limits: &Limits, weights: &Weights, rows: usize, context: usize) -> Result<Speed, CudaError> {
    let shape = StepShape::holding(rows, context);
    let sequences = Sequences::new(gpu, LAYERS, rows, context)?;
    let scratch = DecodeScratch::new(&gpu.device, rows, HEADS, HEAD_DIM, shape.positions)?;
    let attend = Attend::Decode { scratch, positions_max: shape.positions };
    let ids: Vec<u32> = (0..rows as u32).collect();
    let mut batch = Batch::new(gpu, sequences, attend, &vec![context as u32 - 1; rows], &ids, &ids)?;
    let stream = gpu.stream.clone();
    // Once as it is: algorithms are chosen, and memory that they need is taken, before anything is recorded.
    batch.run(&stream, &mut gpu.gemm, weights)?;
    gpu.device.synchronize()?;
    let mut graphs = StepGraphs::new(stream);
    graphs.record::<CudaError>(shape, |stream| batch.run(stream, &mut gpu.gemm, weights))?;
    let ms = gpu.time(REPETITIONS, |_, _| graphs.launch(shape))?;

    let (of_layer, of_head) = Weights::counts();
    let (numbers, positions) = (LAYERS * of_layer + of_head, rows * context);
    let bytes = 2 * (numbers + LAYERS * positions * 2 * KV_HEADS * HEAD_DIM);
    let flop = 2.0 * (rows * numbers) as f64 + 4.0 * (LAYERS * positions * HEADS * HEAD_DIM) as f64;
    let of_limit = limits.bound_s(flop, bytes as f64) / ms * 1e3;
    Ok(Speed { op: "decode step", case: format!("{rows} × {context}"), ms, rate: rows as f64 / ms * 1e3, unit: "tokens/s", of_limit })
}

fn prefill(gpu: &mut Gpu, limits: &Limits, weights: &Weights, rows: usize) -> Result<Speed, CudaError> {
    let sequences = Sequences::new(gpu, LAYERS, 1, rows)?;
    let tiles = gpu.upload(&prefill_tiles(HEAD_DIM, &[Tile { sequence: 0, row: 0, position: 0, rows: rows as u32 }]))?;
    let positions: Vec<u32> = (0..rows as u32).collect();
    let mut batch = Batch::new(gpu, sequences, Attend::Prefill { tiles }, &positions, &vec![0; rows], &[rows as u32 - 1])?;
    let ms = gpu.time(5, |gpu, _| {
        let stream = gpu.stream.clone();
        batch.run(&stream, &mut gpu.gemm, weights)
    })?;
    let (of_layer, of_head) = Weights::counts();
    let flop = 2.0 * (rows * LAYERS * of_layer + of_head) as f64 + LAYERS as f64 * attention_flop(0, rows);
    let of_limit = flop / ms * 1e3 / limits.multiply_flop_per_s;
    Ok(Speed { op: "prefill", case: format!("{rows} tokens"), ms, rate: rows as f64 / ms * 1e3, unit: "tokens/s", of_limit })
}
