//! A batch through the layers on the device: K and V into the paged memory, logits of the requested rows.

use super::{
    experts::ExpertLayers,
    shape::DeviceShape,
    weights::{DeviceDense, DeviceLayer, DeviceLinear, DeviceMlp, DeviceNorm, DeviceWeight, DeviceWeights},
};
use crate::{config::ModelConfig, family::QkNorm, rope::Rope};
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};
use std::{collections::HashSet, sync::Arc};
use tidemill_kernels::{
    cpu::activation,
    cuda::{
        Bf16, CudaError, Device, DeviceKv, Gemm, Kernels,
        attention::{self, DecodeScratch, Queries, Tile},
        elementwise::{self, Activation, AddAndNorm, Added, HeadNorms, Norm, NormWeights, NormedOver, RowPlaces},
        experts::ExpertInput,
        gemm::{Operands, Output, Scales, product_rows},
    },
};

/// The weights, the kernels, and buffers for intermediate results.
pub(super) struct Layers {
    pub(super) stream: Arc<CudaStream>,
    pub(super) kernels: Kernels,
    pub(super) shape: DeviceShape,
    gemm: Gemm,
    weights: DeviceWeights,
    config: ModelConfig,
    /// The rotations, indexed by `config.rope_of`.
    angles: Vec<Angles>,
    /// Factors of queries by their positions, if they grow.
    growth: Option<CudaSlice<f32>>,
    buffers: Buffers,
    /// The layers of experts, if there are any.
    experts: Option<ExpertLayers>,
}

/// Cosines and sines, `[positions, head_dim / 2]` each.
struct Angles {
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
}

/// Intermediate results, `[rows_max, width]`, with room for the rows that products add. These additional rows hold results of earlier
/// batches, and affect no other row.
struct Buffers {
    residual: CudaSlice<f32>,
    normed: CudaSlice<Bf16>,
    qkv: CudaSlice<Bf16>,
    attended: CudaSlice<Bf16>,
    delta: CudaSlice<Bf16>,
    /// The output of the feed-forward layer, if it runs in parallel with the attention.
    beside: Option<CudaSlice<Bf16>>,
    /// The factors of norms over all heads, `[rows_max, 2]`, if there are such norms.
    qk_scales: Option<CudaSlice<f32>>,
    gate_up: CudaSlice<Bf16>,
    activated: CudaSlice<Bf16>,
    /// The activations in FP8, if there are weights in FP8.
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
    /// The index of each row's block table.
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
    /// Allocates room for batches of up to `rows_max` rows.
    pub(super) fn new(
        device: &Device,
        config: &ModelConfig,
        shape: DeviceShape,
        weights: DeviceWeights,
        kernels: Kernels,
        gemm: Gemm,
        rows_max: usize,
    ) -> Result<Self, CudaError> {
        let angles = ropes(config).map(|rope| Angles::new(device, &rope, shape, config.context_tokens)).collect::<Result<_, _>>()?;
        let growth = config.query_growth.map(|growth| (0..config.context_tokens).map(|position| growth.factor(position)).collect());
        let norms_all_heads = config.qk_norm && config.family.qk_norm == QkNorm::All;
        let rows_max = product_rows(rows_max);
        // Allocations of no bytes fail.
        let inner = weights.dense_width().max(1);
        let buffers = Buffers {
            residual: device.alloc(rows_max * shape.hidden)?,
            normed: device.alloc(rows_max * shape.hidden)?,
            qkv: device.alloc(rows_max * shape.qkv())?,
            attended: device.alloc(rows_max * shape.q())?,
            delta: device.alloc(rows_max * shape.hidden)?,
            beside: config.family.is_parallel.then(|| device.alloc(rows_max * shape.hidden)).transpose()?,
            qk_scales: norms_all_heads.then(|| device.alloc(rows_max * 2)).transpose()?,
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
            config: config.clone(),
            angles,
            growth: growth.map(|growth: Vec<f32>| device.upload(&growth)).transpose()?,
            shape,
            buffers,
            experts,
        })
    }

    /// Whether some weights are in FP8.
    pub(super) fn has_fp8(&self) -> bool {
        self.weights.has_fp8()
    }

    /// Launches the batch through all layers. With `kv_only`, only K and V are wanted, so the last layer stops there.
    pub(super) fn run(&mut self, batch: &mut Batch<'_>, kv: &mut DeviceKv, kv_only: bool) -> Result<(), CudaError> {
        let rows = batch.tokens.len();
        let Self { stream, kernels, gemm, weights, buffers: b, shape, config, angles, growth, experts } = self;
        let hidden = shape.hidden;
        let norms = Norms { stream, kernels, config };
        let activation = function(config.activation);
        let mut products = Products { gemm, kernels, stream, activation, fp8: &mut b.fp8, rows };
        let mut residual = b.residual.slice_mut(..rows * hidden);
        let tokens = &batch.tokens;
        kernels.embedding(stream, &mut residual, &weights.embedding.as_view(), tokens, hidden, weights.embedding_factor)?;
        let mut before: Option<&DeviceLayer> = None;
        for (index, layer) in weights.layers.iter().enumerate() {
            let added = before.map(|before| norms.of_layer(&b.delta, b.beside.as_ref(), before, rows * hidden));
            let mut normed = b.normed.slice_mut(..rows * hidden);
            norms.add(&mut normed, &mut residual, added, layer.attention_norm.as_ref(), None)?;
            products.multiply(&mut b.qkv, &b.normed, &layer.qkv)?;
            let mut qkv = b.qkv.slice_mut(..rows * shape.qkv());

            let mut paged = kv.layer(index, &batch.tables, batch.table_stride);
            let places = RowPlaces { sequences: &batch.sequences, positions: &batch.positions };
            let mut scales = b.qk_scales.as_mut().map(|scales| scales.slice_mut(..2 * rows));
            if let Some(scales) = &mut scales {
                let (heads, kv_heads, used) = (shape.heads, shape.kv_heads, shape.head_dim_used);
                kernels.qk_scales(stream, scales, &qkv.as_view(), heads, kv_heads, used, config.norm_epsilon)?;
            }
            let scales = scales.as_ref().map(CudaViewMut::as_view);
            let over = match &scales {
                Some(scales) => NormedOver::Heads(scales),
                None => NormedOver::Head { epsilon: config.norm_epsilon * shape.head_dim_used as f32 / shape.head_dim as f32 },
            };
            let weights = layer.qk_norm.as_ref().map(|(queries, keys)| (queries.as_view(), keys.as_view()));
            let of_layer = config.rope_of(index).map(|rope| (angles[rope].cos.as_view(), angles[rope].sin.as_view()));
            let growth = growth.as_ref().map(CudaSlice::as_view);
            let turn = elementwise::Rope {
                angles: of_layer.as_ref().map(|(cos, sin)| (cos, sin)),
                norms: weights.as_ref().map(|(queries, keys)| HeadNorms { queries, keys, over }),
                growth: growth.as_ref(),
            };
            kernels.rope_kv_write(stream, &mut qkv, shape.heads, &mut paged, &places, &turn)?;
            if kv_only && index + 1 == shape.layers {
                return Ok(());
            }
            let sinks = layer.sinks.as_ref().map(CudaSlice::as_view);
            let queries = Queries {
                q: &qkv.as_view(),
                stride: shape.qkv(),
                heads: shape.heads,
                scale: config.score_factor.unwrap_or(attention::scale(shape.head_dim_used)),
                window: config.windows[index],
                cap: config.score_cap,
                sinks: sinks.as_ref(),
            };
            let mut attended = b.attended.slice_mut(..rows * shape.q());
            match &mut batch.attend {
                Attend::Decode { scratch, positions_max } => {
                    kernels.attention_decode(stream, &mut attended, &queries, &paged, &batch.positions, *positions_max, scratch)?;
                }
                Attend::Prefill { tiles } => kernels.attention_prefill(stream, &mut attended, &queries, &paged, tiles, rows)?,
            }
            products.multiply(&mut b.delta, &b.attended, &layer.output)?;

            if b.beside.is_none() {
                let added = norms.of_part(&b.delta, layer.after_attention.as_ref(), rows * hidden);
                let mut normed = b.normed.slice_mut(..rows * hidden);
                norms.add(&mut normed, &mut residual, Some(added), layer.mlp_norm.as_ref(), None)?;
            }
            match &layer.mlp {
                DeviceMlp::Dense(dense) => {
                    let out = b.beside.as_mut().unwrap_or(&mut b.delta);
                    products.feed_forward(out, &b.normed, &mut b.gate_up, &mut b.activated, dense)?;
                }
                DeviceMlp::Experts(of_layer) => {
                    let experts = experts.as_mut().expect("there are layers of experts");
                    if let Some((shared, out)) = of_layer.shared.as_ref().zip(experts.shared_out.as_mut()) {
                        products.feed_forward(out, &b.normed, &mut b.gate_up, &mut b.activated, shared)?;
                    }
                    let norm = layer.mlp_norm.as_ref().expect("models with experts behind no norm are refused");
                    let input = ExpertInput {
                        residual: &residual.as_view(),
                        norm: &norm.weight.as_view(),
                        epsilon: config.norm_epsilon,
                        normed: &b.normed.slice(..rows * hidden),
                        positions: &batch.positions,
                    };
                    experts.run(stream, &mut b.delta.slice_mut(..rows * hidden), &input, of_layer)?;
                }
            }
            before = Some(layer);
        }
        Ok(())
    }

    /// Runs each kind of product of a batch once for every number of rows up to `rows_max`, so that no request waits while an algorithm is
    /// chosen and its code loaded.
    pub(super) fn warm_products(&mut self, rows_max: usize) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, config, .. } = self;
        let activation = function(config.activation);
        let mut seen = HashSet::new();
        let mut warm = |linear: &DeviceLinear, y: &mut CudaSlice<Bf16>, x: &CudaSlice<Bf16>| {
            if !seen.insert((linear.outputs(), linear.inputs, linear.is_fp8(), linear.bias.is_some())) {
                return Ok(());
            }
            let mut rows = 1;
            while rows <= product_rows(rows_max) {
                Products { gemm, kernels, stream, activation, fp8: &mut b.fp8, rows }.multiply(y, x, linear)?;
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

    /// Chooses algorithms for logits of every number of rows that `logits` has room for.
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

    /// Saves the choices for the next process on such a device.
    pub(super) fn keep_choices(&mut self) {
        self.gemm.keep_choices();
    }

    /// Computes the logits of the `wanted` rows of the batch that was just [`run`](Self::run), `[wanted, vocab]`; further rows of `logits`
    /// are overwritten. Each row may be wanted once.
    pub(super) fn logits(&mut self, rows: usize, wanted: &CudaView<'_, u32>, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, shape, config, .. } = self;
        let (hidden, computed) = (shape.hidden, product_rows(wanted.len()));
        let norms = Norms { stream, kernels, config };
        let last = weights.layers.last().expect("a model has layers");
        let added = norms.of_layer(&b.delta, b.beside.as_ref(), last, rows * hidden);
        let mut normed = b.normed.slice_mut(..wanted.len() * hidden);
        let mut residual = b.residual.slice_mut(..rows * hidden);
        norms.add(&mut normed, &mut residual, Some(added), Some(&weights.final_norm), Some(wanted))?;
        let operands = Operands::Bf16 { x: &b.normed.slice(..computed * hidden), weight: &weights.head().as_view() };
        gemm.multiply(stream, Output::F32(&mut logits.slice_mut(..computed * shape.vocab)), operands, None, hidden)?;
        match config.logit_cap {
            Some(cap) => kernels.cap_logits(stream, &mut logits.slice_mut(..wanted.len() * shape.vocab), cap),
            None => Ok(()),
        }
    }
}

/// The residual stream between a model's parts: adds the output of one part and norms the sum for the next.
struct Norms<'a> {
    stream: &'a CudaStream,
    kernels: &'a Kernels,
    config: &'a ModelConfig,
}

impl Norms<'_> {
    /// The output of a part of a layer, with the weight of the norm over it.
    fn of_part<'a>(&self, delta: &'a CudaSlice<Bf16>, norm: Option<&'a CudaSlice<f32>>, numbers: usize) -> Added<'a> {
        let factor = self.config.residual_factor.unwrap_or(1.0);
        Added { delta: delta.slice(..numbers), beside: None, norm: norm.map(CudaSlice::as_view), factor }
    }

    /// The output that is left to add at a layer's end.
    fn of_layer<'a>(
        &self,
        delta: &'a CudaSlice<Bf16>,
        beside: Option<&'a CudaSlice<Bf16>>,
        layer: &'a DeviceLayer,
        numbers: usize,
    ) -> Added<'a> {
        let beside = beside.map(|beside| beside.slice(..numbers));
        Added { beside, ..self.of_part(delta, layer.after_mlp.as_ref(), numbers) }
    }

    /// Adds to the residual stream, and norms the `wanted` rows, or all. Without a norm, they are only rounded.
    fn add(
        &self,
        normed: &mut CudaViewMut<'_, Bf16>,
        residual: &mut CudaViewMut<'_, f32>,
        added: Option<Added<'_>>,
        norm: Option<&DeviceNorm>,
        wanted: Option<&CudaView<'_, u32>>,
    ) -> Result<(), CudaError> {
        let Self { stream, kernels, config } = *self;
        let epsilon = config.norm_epsilon;
        let is_plain = added.as_ref().is_none_or(|added| added.beside.is_none() && added.norm.is_none() && added.factor == 1.0);
        match norm {
            Some(DeviceNorm { weight, bias: None, is_centered: false }) if is_plain => {
                let delta = added.as_ref().map(|added| &added.delta);
                kernels.rms_norm(stream, normed, residual, &Norm { delta, weight: &weight.as_view(), epsilon, rows: wanted })
            }
            _ => {
                let norm = norm.map(|DeviceNorm { weight, bias, is_centered }| NormWeights {
                    weight: weight.as_view(),
                    bias: bias.as_ref().map(CudaSlice::as_view),
                    is_centered: *is_centered,
                });
                let operands = AddAndNorm { added: added.as_ref(), norm: norm.as_ref(), width: config.hidden, epsilon, rows: wanted };
                kernels.norm(stream, normed, residual, &operands)
            }
        }
    }
}

/// The kernels' name for the activation of feed-forward layers.
fn function(activation: activation::Activation) -> Activation {
    match activation {
        activation::Activation::Silu => Activation::Silu,
        activation::Activation::Gelu => Activation::Gelu,
        activation::Activation::GeluTanh => Activation::GeluTanh,
        activation::Activation::Clamped { .. } => unreachable!("models that the kernels do not compute are refused"),
    }
}

/// The context that the products of a batch share.
struct Products<'a> {
    gemm: &'a mut Gemm,
    kernels: &'a Kernels,
    stream: &'a CudaStream,
    /// The activation of feed-forward layers.
    activation: Activation,
    fp8: &'a mut Option<Fp8Rows>,
    /// The number of rows of the batch.
    rows: usize,
}

impl Products<'_> {
    /// `y = down (f(gate x) * up x)`, or `down f(up x)` without a gate.
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
        let on_gate_up = gate_up.slice(..rows * dense.gate_up.outputs());
        let mut on_activated = activated.slice_mut(..rows * inner);
        self.kernels.activate(self.stream, &mut on_activated, &on_gate_up, inner, self.activation, dense.is_gated)?;
        self.multiply(y, activated, &dense.down)
    }

    /// Computes `y = x weightᵀ + bias` for the rows of the batch, and for a few more.
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

/// The rotations of a model, in the order of `ModelConfig::rope_of`.
fn ropes(config: &ModelConfig) -> impl Iterator<Item = Rope> {
    [Some(&config.rope), config.windowed_rope.as_ref()].into_iter().flatten().map(|rope| Rope::new(rope, config.head_dim))
}

impl Angles {
    /// Computes the angles of every position. Numbers that do not rotate, and padding, have angles of zero.
    fn new(device: &Device, rope: &Rope, shape: DeviceShape, positions: usize) -> Result<Self, CudaError> {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            rope.push(position, &mut cos, &mut sin);
            let filled_up = (position + 1) * shape.head_dim / 2;
            cos.resize(filled_up, 1.0);
            sin.resize(filled_up, 0.0);
        }
        Ok(Self { cos: device.upload(&cos)?, sin: device.upload(&sin)? })
    }
}
