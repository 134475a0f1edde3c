//! A batch through the layers on the device: K and V into the paged memory, logits of the requested rows.

use super::{
    experts::ExpertLayers,
    shape::DeviceShape,
    weights::{DeviceDense, DeviceLinear, DeviceMlp, DeviceWeight, DeviceWeights},
};
use crate::{config::ModelConfig, rope::Rope};
use cudarc::driver::{CudaSlice, CudaStream, CudaView};
use std::{collections::HashSet, sync::Arc};
use tidemill_kernels::cuda::{
    Bf16, CudaError, Device, DeviceKv, Gemm, Kernels,
    attention::{self, DecodeScratch, Queries, Tile},
    elementwise::{self, Norm, RowPlaces},
    experts::ExpertInput,
    gemm::{Operands, Output, Scales, product_rows},
};

/// The weights, the kernels, and buffers for intermediate results.
pub(super) struct Layers {
    pub(super) stream: Arc<CudaStream>,
    pub(super) kernels: Kernels,
    pub(super) shape: DeviceShape,
    gemm: Gemm,
    weights: DeviceWeights,
    windows: Vec<Option<usize>>,
    norm_epsilon: f32,
    /// `[positions, head_dim / 2]`
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
    buffers: Buffers,
    /// If some layers are of experts.
    experts: Option<ExpertLayers>,
}

/// Intermediate results, `[rows_max, width]`, with room for the rows that products add. What these hold is of earlier batches,
/// and concerns no other row.
struct Buffers {
    residual: CudaSlice<f32>,
    normed: CudaSlice<Bf16>,
    qkv: CudaSlice<Bf16>,
    attended: CudaSlice<Bf16>,
    delta: CudaSlice<Bf16>,
    gate_up: CudaSlice<Bf16>,
    activated: CudaSlice<Bf16>,
    /// If there are weights in FP8.
    fp8: Option<Fp8Rows>,
}

/// A product's activations in FP8, `[rows_max, width]` of the widest, and the scales of its rows.
struct Fp8Rows {
    numbers: CudaSlice<u8>,
    scales: CudaSlice<f32>,
}

impl Fp8Rows {
    fn new(device: &Device, shape: DeviceShape, inner: usize, rows_max: usize) -> Result<Self, CudaError> {
        let width = shape.hidden.max(shape.q()).max(inner);
        Ok(Self { numbers: device.alloc(rows_max * width)?, scales: device.alloc(rows_max)? })
    }
}

/// A batch of rows and their places.
pub(super) struct Batch<'a> {
    pub(super) tokens: CudaView<'a, u32>,
    pub(super) positions: CudaView<'a, u32>,
    /// Row of the tables.
    pub(super) sequences: CudaView<'a, u32>,
    /// `[sequences, table_stride]`
    pub(super) tables: CudaView<'a, u32>,
    pub(super) table_stride: usize,
    pub(super) attend: Attend<'a>,
}

/// The attention kernel to use.
pub(super) enum Attend<'a> {
    /// One row of each sequence, each seeing at most `positions_max` positions.
    Decode {
        scratch: &'a mut DecodeScratch,
        positions_max: usize,
    },
    Prefill {
        tiles: CudaView<'a, Tile>,
    },
}

impl Layers {
    /// Room for batches of up to `rows_max` rows.
    pub(super) fn new(
        device: &Device,
        config: &ModelConfig,
        shape: DeviceShape,
        weights: DeviceWeights,
        kernels: Kernels,
        gemm: Gemm,
        rows_max: usize,
    ) -> Result<Self, CudaError> {
        let (cos, sin) = angles(config, shape);
        let rows_max = product_rows(rows_max);
        // No memory can be of no size.
        let inner = weights.dense_width().max(1);
        let buffers = Buffers {
            residual: device.alloc(rows_max * shape.hidden)?,
            normed: device.alloc(rows_max * shape.hidden)?,
            qkv: device.alloc(rows_max * shape.qkv())?,
            attended: device.alloc(rows_max * shape.q())?,
            delta: device.alloc(rows_max * shape.hidden)?,
            gate_up: device.alloc(rows_max * 2 * inner)?,
            activated: device.alloc(rows_max * inner)?,
            fp8: if weights.has_fp8() { Some(Fp8Rows::new(device, shape, inner, rows_max)?) } else { None },
        };
        let experts = config.experts.as_ref().map(|experts| ExpertLayers::new(device, experts, shape, &weights, rows_max)).transpose()?;
        Ok(Self {
            stream: device.stream().clone(),
            kernels,
            gemm,
            weights,
            windows: config.windows.clone(),
            norm_epsilon: config.norm_epsilon,
            cos: device.upload(&cos)?,
            sin: device.upload(&sin)?,
            shape,
            buffers,
            experts,
        })
    }

    /// Whether some weights are in FP8.
    pub(super) fn has_fp8(&self) -> bool {
        self.weights.has_fp8()
    }

    /// Launches the batch through all layers. `kv_only`: only K and V are wanted, so the last layer stops there.
    pub(super) fn run(&mut self, batch: &mut Batch<'_>, kv: &mut DeviceKv, kv_only: bool) -> Result<(), CudaError> {
        let rows = batch.tokens.len();
        let Self { stream, kernels, gemm, weights, buffers: b, shape, experts, .. } = self;
        let (hidden, epsilon) = (shape.hidden, self.norm_epsilon);
        let mut residual = b.residual.slice_mut(..rows * hidden);
        let mut products = Products { gemm, kernels, stream, fp8: &mut b.fp8, rows };
        kernels.embedding(stream, &mut residual, &weights.embedding.as_view(), &batch.tokens, hidden)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            let before = (index > 0).then(|| b.delta.slice(..rows * hidden));
            let norm = Norm { delta: before.as_ref(), weight: &layer.attention_norm.as_view(), epsilon, rows: None };
            kernels.rms_norm(stream, &mut b.normed.slice_mut(..rows * hidden), &mut residual, &norm)?;
            products.multiply(&mut b.qkv, &b.normed, &layer.qkv)?;
            let mut qkv = b.qkv.slice_mut(..rows * shape.qkv());

            let mut paged = kv.layer(index, &batch.tables, batch.table_stride);
            let places = RowPlaces { sequences: &batch.sequences, positions: &batch.positions };
            let norms = layer.qk_norm.as_ref().map(|(q, k)| (q.as_view(), k.as_view()));
            let turn = elementwise::Rope {
                cos: &self.cos.as_view(),
                sin: &self.sin.as_view(),
                norms: norms.as_ref().map(|(q, k)| (q, k)),
                epsilon: self.norm_epsilon * shape.head_dim_used as f32 / shape.head_dim as f32,
            };
            kernels.rope_kv_write(stream, &mut qkv, shape.heads, &mut paged, &places, &turn)?;
            if kv_only && index + 1 == shape.layers {
                return Ok(());
            }
            let scale = attention::scale(shape.head_dim_used);
            let queries = Queries { q: &qkv.as_view(), stride: shape.qkv(), heads: shape.heads, scale, window: self.windows[index] };
            let mut attended = b.attended.slice_mut(..rows * shape.q());
            match &mut batch.attend {
                Attend::Decode { scratch, positions_max } => {
                    kernels.attention_decode(stream, &mut attended, &queries, &paged, &batch.positions, *positions_max, scratch)?;
                }
                Attend::Prefill { tiles } => kernels.attention_prefill(stream, &mut attended, &queries, &paged, tiles, rows)?,
            }
            products.multiply(&mut b.delta, &b.attended, &layer.output)?;

            let delta = b.delta.slice(..rows * hidden);
            let norm = Norm { delta: Some(&delta), weight: &layer.mlp_norm.as_view(), epsilon, rows: None };
            kernels.rms_norm(stream, &mut b.normed.slice_mut(..rows * hidden), &mut residual, &norm)?;
            match &layer.mlp {
                DeviceMlp::Dense(dense) => products.feed_forward(&mut b.delta, &b.normed, &mut b.gate_up, &mut b.activated, dense)?,
                DeviceMlp::Experts(of_layer) => {
                    let experts = experts.as_mut().expect("there are layers of experts");
                    if let Some((shared, out)) = of_layer.shared.as_ref().zip(experts.shared_out.as_mut()) {
                        products.feed_forward(out, &b.normed, &mut b.gate_up, &mut b.activated, shared)?;
                    }
                    let input = ExpertInput {
                        residual: &residual.as_view(),
                        norm: &layer.mlp_norm.as_view(),
                        epsilon,
                        normed: &b.normed.slice(..rows * hidden),
                        positions: &batch.positions,
                    };
                    experts.run(stream, &mut b.delta.slice_mut(..rows * hidden), &input, of_layer)?;
                }
            }
        }
        Ok(())
    }

    /// Runs each kind of product of a batch once for every number of rows up to `rows_max`, so that no request waits while an algorithm is
    /// chosen and its code loaded.
    pub(super) fn warm_products(&mut self, rows_max: usize) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, .. } = self;
        let mut seen = HashSet::new();
        let mut warm = |linear: &DeviceLinear, y: &mut CudaSlice<Bf16>, x: &CudaSlice<Bf16>| {
            if !seen.insert((linear.outputs(), linear.inputs, linear.is_fp8(), linear.bias.is_some())) {
                return Ok(());
            }
            let mut rows = 1;
            while rows <= product_rows(rows_max) {
                Products { gemm, kernels, stream, fp8: &mut b.fp8, rows }.multiply(y, x, linear)?;
                rows = product_rows(rows + 1);
            }
            Ok::<_, CudaError>(())
        };
        for layer in &weights.layers {
            warm(&layer.qkv, &mut b.qkv, &b.normed)?;
            warm(&layer.output, &mut b.delta, &b.attended)?;
            if let Some(dense) = layer.dense() {
                warm(&dense.gate_up, &mut b.gate_up, &b.normed)?;
                warm(&dense.down, &mut b.delta, &b.activated)?;
            }
        }
        Ok(())
    }

    /// Chooses algorithms for logits of every number of rows up to as many as `logits` has.
    pub(super) fn warm_logits(&mut self, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        let Self { stream, gemm, weights, buffers: b, shape, .. } = self;
        let (hidden, vocab) = (shape.hidden, shape.vocab);
        let mut rows = 1;
        while rows * vocab <= logits.len() {
            let operands = Operands::Bf16 { x: &b.normed.slice(..rows * hidden), weight: &weights.head().as_view() };
            gemm.multiply(stream, Output::F32(&mut logits.slice_mut(..rows * vocab)), operands, None, hidden)?;
            rows = product_rows(rows + 1);
        }
        Ok(())
    }

    /// For the next process on such a device.
    pub(super) fn keep_choices(&mut self) {
        self.gemm.keep_choices();
    }

    /// Logits of the `wanted` rows of the batch that was just [`run`](Self::run), `[wanted, vocab]`; more rows of them are
    /// overwritten. Each row may be wanted once.
    pub(super) fn logits(&mut self, rows: usize, wanted: &CudaView<'_, u32>, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, shape, norm_epsilon, .. } = self;
        let (hidden, computed) = (shape.hidden, product_rows(wanted.len()));
        let delta = b.delta.slice(..rows * hidden);
        let weight = weights.final_norm.as_view();
        let norm = Norm { delta: Some(&delta), weight: &weight, epsilon: *norm_epsilon, rows: Some(wanted) };
        let mut normed = b.normed.slice_mut(..wanted.len() * hidden);
        kernels.rms_norm(stream, &mut normed, &mut b.residual.slice_mut(..rows * hidden), &norm)?;
        let operands = Operands::Bf16 { x: &b.normed.slice(..computed * hidden), weight: &weights.head().as_view() };
        gemm.multiply(stream, Output::F32(&mut logits.slice_mut(..computed * shape.vocab)), operands, None, hidden)
    }
}

/// What products of a batch need.
struct Products<'a> {
    gemm: &'a mut Gemm,
    kernels: &'a Kernels,
    stream: &'a CudaStream,
    fp8: &'a mut Option<Fp8Rows>,
    /// Of the batch.
    rows: usize,
}

impl Products<'_> {
    /// `y = down (silu(gate x) * up x)`
    fn feed_forward(
        &mut self,
        y: &mut CudaSlice<Bf16>,
        x: &CudaSlice<Bf16>,
        gate_up: &mut CudaSlice<Bf16>,
        activated: &mut CudaSlice<Bf16>,
        dense: &DeviceDense,
    ) -> Result<(), CudaError> {
        let (rows, inner) = (self.rows, dense.down.inputs);
        self.multiply(gate_up, x, &dense.gate_up)?;
        let on_gate_up = gate_up.slice(..rows * 2 * inner);
        self.kernels.swiglu(self.stream, &mut activated.slice_mut(..rows * inner), &on_gate_up, inner)?;
        self.multiply(y, activated, &dense.down)
    }

    /// `y = x weightᵀ + bias` of the first rows, and of a few more.
    fn multiply(&mut self, y: &mut CudaSlice<Bf16>, x: &CudaSlice<Bf16>, linear: &DeviceLinear) -> Result<(), CudaError> {
        let rows = product_rows(self.rows);
        let x = x.slice(..rows * linear.inputs);
        let mut y = y.slice_mut(..rows * linear.outputs());
        let bias = linear.bias.as_ref().map(CudaSlice::as_view);
        let mut multiply = |operands| self.gemm.multiply(self.stream, Output::Bf16(&mut y), operands, bias.as_ref(), linear.inputs);
        match &linear.weight {
            DeviceWeight::Bf16(weight) => multiply(Operands::Bf16 { x: &x, weight: &weight.as_view() }),
            DeviceWeight::Fp8 { numbers, scales, products } => {
                let quantized = self.fp8.as_mut().expect("there are weights in FP8");
                let mut on_x = quantized.numbers.slice_mut(..x.len());
                let mut x_scales = quantized.scales.slice_mut(..rows);
                self.kernels.quantize_fp8_rows(self.stream, &mut on_x, &mut x_scales, &x, products.largest_max)?;
                let scales = Scales::Rows { x: &x_scales.as_view(), weight: &scales.as_view() };
                multiply(Operands::Fp8 { x: &on_x.as_view(), weight: &numbers.as_view(), scales })
            }
        }
    }
}

/// Cosines and sines of every position's angles, each `[positions, head_dim / 2]`; padding is not rotated.
fn angles(config: &ModelConfig, shape: DeviceShape) -> (Vec<f32>, Vec<f32>) {
    let rope = Rope::new(&config.rope, config.head_dim);
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for position in 0..config.context_tokens {
        rope.push(position, &mut cos, &mut sin);
        let filled_up = (position + 1) * shape.head_dim / 2;
        cos.resize(filled_up, 1.0);
        sin.resize(filled_up, 0.0);
    }
    (cos, sin)
}
