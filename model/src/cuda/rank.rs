//! One device's part of a batch through the layers: its heads, and its columns of every product. Between two of these phases the devices
//! gather what each has computed (`layers`), so that each has all rows of the residual stream, and norms them by itself.

use super::{
    experts::ExpertLayers,
    shape::{DeviceShape, RankShape},
    weights::{DeviceDense, DeviceLayer, DeviceLinear, DeviceMlp, DeviceNorm, DeviceWeight, DeviceWeights},
};
use crate::{config::ModelConfig, family::QkNorm, rope::Rope};
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits};
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
pub(super) struct Rank {
    pub(super) stream: Arc<CudaStream>,
    pub(super) kernels: Kernels,
    shape: RankShape,
    gemm: Gemm,
    weights: DeviceWeights,
    config: Arc<ModelConfig>,
    /// The rotations, indexed by `config.rope_of`.
    angles: Vec<Angles>,
    /// Factors of queries by their positions, if they grow.
    growth: Option<CudaSlice<f32>>,
    pub(super) buffers: Buffers,
    /// The layers of experts, if there are any.
    pub(super) experts: Option<ExpertLayers>,
}

/// Cosines and sines, `[positions, head_dim / 2]` each.
struct Angles {
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
}

/// A matrix, `[rows_max, width]`, of which each device computes some columns.
pub(super) struct Spread<T> {
    /// The device's columns.
    pub(super) own: CudaSlice<T>,
    /// All columns, gathered; `None` if the device's are all.
    pub(super) all: Option<CudaSlice<T>>,
}

impl<T: DeviceRepr + ValidAsZeroBits> Spread<T> {
    fn new(device: &Device, numbers: usize, ranks: usize) -> Result<Self, CudaError> {
        let all = if ranks > 1 { Some(device.alloc(numbers)?) } else { None };
        Ok(Self { own: device.alloc(numbers / ranks)?, all })
    }

    fn gathered(&self) -> &CudaSlice<T> {
        self.all.as_ref().unwrap_or(&self.own)
    }
}

/// Intermediate results, `[rows_max, width]`, with room for the rows that products add. These additional rows hold results of earlier
/// batches, and affect no other row.
pub(super) struct Buffers {
    pub(super) residual: CudaSlice<f32>,
    normed: CudaSlice<Bf16>,
    qkv: CudaSlice<Bf16>,
    pub(super) attended: Spread<Bf16>,
    pub(super) delta: Spread<Bf16>,
    /// The output of the feed-forward layer, if it runs in parallel with the attention.
    pub(super) beside: Option<Spread<Bf16>>,
    /// The factors of norms over all heads, `[rows_max, 2]`, if there are such norms.
    qk_scales: Option<CudaSlice<f32>>,
    gate_up: CudaSlice<Bf16>,
    pub(super) activated: Spread<Bf16>,
    /// The activations in FP8, if there are weights in FP8.
    fp8: Option<Fp8Rows>,
    /// The logits of the device's part of the vocabulary; `None` if that is all of it.
    pub(super) logits: Option<CudaSlice<f32>>,
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

/// The most rows of a batch, and of those whose logits are computed at once.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) rows: usize,
    pub(super) logits: usize,
}

impl Rank {
    /// Allocates room for batches.
    pub(super) fn new(
        device: &Device,
        config: &Arc<ModelConfig>,
        shape: RankShape,
        weights: DeviceWeights,
        kernels: Kernels,
        gemm: Gemm,
        room: Room,
    ) -> Result<Self, CudaError> {
        let RankShape { whole, own, ranks, .. } = shape;
        let angles = ropes(config).map(|rope| Angles::new(device, &rope, whole, config.context_tokens)).collect::<Result<_, _>>()?;
        let growth = config.query_growth.map(|growth| (0..config.context_tokens).map(|position| growth.factor(position)).collect());
        let norms_all_heads = config.qk_norm && config.family.qk_norm == QkNorm::All;
        let rows_max = product_rows(room.rows);
        // Allocations of no bytes fail.
        let inner = weights.dense_width().max(16 * ranks);
        let spread = |width: usize| Spread::new(device, rows_max * width, ranks);
        let buffers = Buffers {
            residual: device.alloc(rows_max * whole.hidden)?,
            normed: device.alloc(rows_max * whole.hidden)?,
            qkv: device.alloc(rows_max * own.qkv())?,
            attended: spread(whole.q())?,
            delta: spread(whole.hidden)?,
            beside: config.family.is_parallel.then(|| spread(whole.hidden)).transpose()?,
            qk_scales: norms_all_heads.then(|| device.alloc(rows_max * 2)).transpose()?,
            gate_up: device.alloc(rows_max * 2 * inner / ranks)?,
            activated: spread(inner)?,
            fp8: if weights.has_fp8() { Some(Fp8Rows::new(device, whole, inner, rows_max)?) } else { None },
            logits: (ranks > 1).then(|| device.alloc(room.logits * shape.vocab().len())).transpose()?,
        };
        let experts = config.experts.as_ref().map(|experts| ExpertLayers::new(device, experts, shape, &weights, rows_max)).transpose()?;
        Ok(Self {
            stream: device.stream().clone(),
            kernels,
            gemm,
            weights,
            config: Arc::clone(config),
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

    /// The width of the layer's activated numbers, of all devices together; `None` if there are experts alone.
    pub(super) fn inner(&self, index: usize) -> Option<usize> {
        self.weights.layers[index].dense().map(|dense| dense.down.inputs)
    }

    /// Whether the layer has experts.
    pub(super) fn has_experts(&self, index: usize) -> bool {
        matches!(self.weights.layers[index].mlp, DeviceMlp::Experts(_))
    }

    /// Sets the residual stream to the tokens' embeddings, which the first device has.
    pub(super) fn embed(&mut self, tokens: &CudaView<'_, u32>) -> Result<(), CudaError> {
        let Self { stream, kernels, weights, buffers: b, shape, .. } = self;
        let hidden = shape.whole.hidden;
        let table = weights.embedding.as_ref().expect("the first device has the embedding").as_view();
        let mut residual = b.residual.slice_mut(..tokens.len() * hidden);
        kernels.embedding(stream, &mut residual, &table, tokens, hidden, weights.embedding_factor)
    }

    /// Adds the output of the layer before, norms, writes K and V, and attends with the device's heads. With `kv_only`, only K and V are
    /// wanted.
    pub(super) fn attend(&mut self, index: usize, batch: &mut Batch<'_>, kv: &mut DeviceKv, kv_only: bool) -> Result<(), CudaError> {
        let rows = batch.tokens.len();
        let Self { stream, kernels, gemm, weights, buffers: b, shape, config, angles, growth, .. } = self;
        let RankShape { whole, own, .. } = *shape;
        let (hidden, layer) = (whole.hidden, &weights.layers[index]);
        let norms = Norms { stream, kernels, config };
        let mut residual = b.residual.slice_mut(..rows * hidden);
        let before = index.checked_sub(1).map(|before| &weights.layers[before]);
        let (delta, beside) = (b.delta.gathered(), b.beside.as_ref().map(Spread::gathered));
        let added = before.map(|before| norms.of_layer(delta, beside, before, rows * hidden));
        norms.add(&mut b.normed.slice_mut(..rows * hidden), &mut residual, added, layer.attention_norm.as_ref(), None)?;
        Products { gemm, kernels, stream, config, fp8: &mut b.fp8, rows }.multiply(&mut b.qkv, &b.normed, &layer.qkv)?;
        let mut qkv = b.qkv.slice_mut(..rows * own.qkv());

        let mut paged = kv.layer(index, &batch.tables, batch.table_stride);
        let places = RowPlaces { sequences: &batch.sequences, positions: &batch.positions };
        let mut scales = b.qk_scales.as_mut().map(|scales| scales.slice_mut(..2 * rows));
        if let Some(scales) = &mut scales {
            let (heads, kv_heads, used) = (own.heads, own.kv_heads, own.head_dim_used);
            kernels.qk_scales(stream, scales, &qkv.as_view(), heads, kv_heads, used, config.norm_epsilon)?;
        }
        let scales = scales.as_ref().map(CudaViewMut::as_view);
        let over = match &scales {
            Some(scales) => NormedOver::Heads(scales),
            None => NormedOver::Head { epsilon: config.norm_epsilon * own.head_dim_used as f32 / own.head_dim as f32 },
        };
        let head_norms = layer.qk_norm.as_ref().map(|(queries, keys)| (queries.as_view(), keys.as_view()));
        let of_layer = config.rope_of(index).map(|rope| (angles[rope].cos.as_view(), angles[rope].sin.as_view()));
        let growth = growth.as_ref().map(CudaSlice::as_view);
        let turn = elementwise::Rope {
            angles: of_layer.as_ref().map(|(cos, sin)| (cos, sin)),
            norms: head_norms.as_ref().map(|(queries, keys)| HeadNorms { queries, keys, over }),
            growth: growth.as_ref(),
        };
        kernels.rope_kv_write(stream, &mut qkv, own.heads, &mut paged, &places, &turn)?;
        if kv_only {
            return Ok(());
        }
        let sinks = layer.sinks.as_ref().map(CudaSlice::as_view);
        let queries = Queries {
            q: &qkv.as_view(),
            stride: own.qkv(),
            heads: own.heads,
            scale: config.score_factor.unwrap_or(attention::scale(own.head_dim_used)),
            window: config.windows[index],
            cap: config.score_cap,
            sinks: sinks.as_ref(),
        };
        let mut attended = b.attended.own.slice_mut(..rows * own.q());
        match &mut batch.attend {
            Attend::Decode { scratch, positions_max } => {
                kernels.attention_decode(stream, &mut attended, &queries, &paged, &batch.positions, *positions_max, scratch)
            }
            Attend::Prefill { tiles } => kernels.attention_prefill(stream, &mut attended, &queries, &paged, tiles, rows),
        }
    }

    /// Projects what all heads have attended to the device's columns of the residual stream.
    pub(super) fn project(&mut self, index: usize, rows: usize) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, config, .. } = self;
        let mut products = Products { gemm, kernels, stream, config, fp8: &mut b.fp8, rows };
        products.multiply(&mut b.delta.own, b.attended.gathered(), &weights.layers[index].output)
    }

    /// Adds the attention's output, norms, and computes the device's part of the activated numbers, of the experts too.
    pub(super) fn widen(&mut self, index: usize, batch: &Batch<'_>) -> Result<(), CudaError> {
        let rows = batch.tokens.len();
        let Self { stream, kernels, gemm, weights, buffers: b, shape, config, experts, .. } = self;
        let (hidden, layer) = (shape.whole.hidden, &weights.layers[index]);
        let mut residual = b.residual.slice_mut(..rows * hidden);
        if b.beside.is_none() {
            let norms = Norms { stream, kernels, config };
            let added = norms.of_part(b.delta.gathered(), layer.after_attention.as_ref(), rows * hidden);
            norms.add(&mut b.normed.slice_mut(..rows * hidden), &mut residual, Some(added), layer.mlp_norm.as_ref(), None)?;
        }
        if let Some(dense) = layer.dense() {
            let mut products = Products { gemm, kernels, stream, config, fp8: &mut b.fp8, rows };
            products.activate(&mut b.activated.own, &b.normed, &mut b.gate_up, dense, dense.down.inputs / shape.ranks)?;
        }
        if let DeviceMlp::Experts(of_layer) = &layer.mlp {
            let norm = layer.mlp_norm.as_ref().expect("models with experts behind no norm are refused");
            let input = ExpertInput {
                residual: &residual.as_view(),
                norm: &norm.weight.as_view(),
                epsilon: config.norm_epsilon,
                normed: &b.normed.slice(..rows * hidden),
                positions: &batch.positions,
            };
            experts.as_mut().expect("there are layers of experts").widen(stream, &input, of_layer)?;
        }
        Ok(())
    }

    /// Computes the device's columns of the feed-forward layer's output from all activated numbers.
    pub(super) fn narrow(&mut self, index: usize, rows: usize) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, shape, config, experts, .. } = self;
        let mut products = Products { gemm, kernels, stream, config, fp8: &mut b.fp8, rows };
        match &weights.layers[index].mlp {
            DeviceMlp::Dense(dense) => {
                let out = &mut b.beside.as_mut().unwrap_or(&mut b.delta).own;
                products.multiply(out, b.activated.gathered(), &dense.down)
            }
            DeviceMlp::Experts(of_layer) => {
                let experts = experts.as_mut().expect("there are layers of experts");
                if let Some((shared, out)) = of_layer.shared.as_ref().zip(experts.shared_out.as_mut()) {
                    products.multiply(out, b.activated.gathered(), &shared.down)?;
                }
                let mut out = b.delta.own.slice_mut(..rows * shape.hidden().len());
                experts.narrow(stream, &mut out, rows, of_layer)
            }
        }
    }

    /// Runs each kind of product of a batch once for every number of rows up to `rows_max`, so that no request waits while an algorithm is
    /// chosen and its code loaded.
    pub(super) fn warm_products(&mut self, rows_max: usize) -> Result<(), CudaError> {
        let Self { stream, kernels, gemm, weights, buffers: b, config, .. } = self;
        let mut seen = HashSet::new();
        let mut warm = |linear: &DeviceLinear, y: &mut CudaSlice<Bf16>, x: &CudaSlice<Bf16>| {
            if !seen.insert((linear.outputs(), linear.inputs, linear.is_fp8(), linear.bias.is_some())) {
                return Ok(());
            }
            let mut rows = 1;
            while rows <= product_rows(rows_max) {
                Products { gemm, kernels, stream, config, fp8: &mut b.fp8, rows }.multiply(y, x, linear)?;
                rows = product_rows(rows + 1);
            }
            Ok::<_, CudaError>(())
        };
        for layer in &weights.layers {
            warm(&layer.qkv, &mut b.qkv, &b.normed)?;
            warm(&layer.output, &mut b.delta.own, b.attended.gathered())?;
            if let Some(dense) = layer.dense() {
                warm(&dense.gate_up, &mut b.gate_up, &b.normed)?;
                warm(&dense.down, &mut b.delta.own, b.activated.gathered())?;
            }
        }
        Ok(())
    }

    /// Chooses algorithms for logits of every number of rows up to `rows_max`, with `logits` as in [`logits`](Self::logits).
    pub(super) fn warm_logits(&mut self, rows_max: usize, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        let mut rows = 1;
        while rows <= rows_max {
            self.multiply_by_head(rows, logits)?;
            rows = product_rows(rows + 1);
        }
        Ok(())
    }

    fn multiply_by_head(&mut self, rows: usize, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        let Self { stream, gemm, weights, buffers: b, shape, .. } = self;
        let hidden = shape.whole.hidden;
        let operands = Operands::Bf16 { x: &b.normed.slice(..rows * hidden), weight: &weights.head(shape.vocab().len() * hidden) };
        let mut out = b.logits.as_mut().unwrap_or(logits).slice_mut(..rows * shape.vocab().len());
        gemm.multiply(stream, Output::F32(&mut out), operands, None, hidden)
    }

    /// Saves the choices for the next process on such a device.
    pub(super) fn keep_choices(&mut self) {
        self.gemm.keep_choices();
    }

    /// Computes the logits of the `wanted` rows of the batch that was just run, `[wanted, vocab]`, of the device's part of the vocabulary:
    /// into a buffer of its own, or `logits` if it has all. Further rows are overwritten. Each row may be wanted once.
    pub(super) fn logits(&mut self, rows: usize, wanted: &CudaView<'_, u32>, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        let Self { stream, kernels, weights, buffers: b, shape, config, .. } = self;
        let hidden = shape.whole.hidden;
        let norms = Norms { stream, kernels, config };
        let last = weights.layers.last().expect("a model has layers");
        let (delta, beside) = (b.delta.gathered(), b.beside.as_ref().map(Spread::gathered));
        let added = norms.of_layer(delta, beside, last, rows * hidden);
        let mut normed = b.normed.slice_mut(..wanted.len() * hidden);
        let mut residual = b.residual.slice_mut(..rows * hidden);
        norms.add(&mut normed, &mut residual, Some(added), Some(&weights.final_norm), Some(wanted))?;
        self.multiply_by_head(product_rows(wanted.len()), logits)?;
        let Self { stream, kernels, buffers: b, shape, config, .. } = self;
        match config.logit_cap {
            Some(cap) => {
                let mut out = b.logits.as_mut().unwrap_or(logits).slice_mut(..wanted.len() * shape.vocab().len());
                kernels.cap_logits(stream, &mut out, cap)
            }
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
    config: &'a ModelConfig,
    fp8: &'a mut Option<Fp8Rows>,
    /// The number of rows of the batch.
    rows: usize,
}

impl Products<'_> {
    /// `y = f(gate x) * up x`, or `f(up x)` without a gate: `width` numbers for each row.
    fn activate(
        &mut self,
        y: &mut CudaSlice<Bf16>,
        x: &CudaSlice<Bf16>,
        gate_up: &mut CudaSlice<Bf16>,
        dense: &DeviceDense,
        width: usize,
    ) -> Result<(), CudaError> {
        self.multiply(gate_up, x, &dense.gate_up)?;
        let on_gate_up = gate_up.slice(..self.rows * dense.gate_up.outputs());
        let mut y = y.slice_mut(..self.rows * width);
        self.kernels.activate(self.stream, &mut y, &on_gate_up, width, function(self.config.activation), dense.is_gated)
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
