//! Any shape has the same bits on every instruction set, with any number of threads, in any cut. And some shapes have the same bits on
//! every architecture.
//!
//! Every test run tries a few dozen random shapes of each kernel, `make fuzz` any number of them. A failing shape is shrunk to the smallest
//! that fails, and kept in `kernels/proptest-regressions/`, from which it is tried first from then on.

use crate::{
    BLOCK_POSITIONS, Bf16Products, Cpu, Dtype, KvLayout, KvStorage, Matrix,
    cpu::{
        activation::Activation,
        attention::{Attention, AttentionBuffers, attention},
        elementwise,
        gemm::{
            Output, Product,
            float::{FloatActivations, FloatWeights, matmul},
            int8::{self, Int8Activations, Int8Weights},
        },
        kv::{self, KvMemory, KvRows, Span},
        layer_norm::{LayerNorm, layer_norm},
        testing::{cpus, numbers, order},
    },
    dtype::encode,
};
use proptest::prelude::*;
use std::{collections::HashMap, ops::Range};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const KV_DTYPES: [KvStorage; 4] =
    [KvStorage::Float(Dtype::F32), KvStorage::Float(Dtype::F16), KvStorage::Float(Dtype::Bf16), KvStorage::Int8];

/// The number of cases in `PROPTEST_CASES`, or a few by default.
pub(crate) fn config() -> ProptestConfig {
    let config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_some() { config } else { ProptestConfig { cases: 60, ..config } }
}

/// Asserts that `run(cpu, rows)` gives the same bits for all rows at once and for `at_once` of them at a time, on all
/// machines that add products of these numbers, in bf16 or not, in the same order. `width`: numbers in a row of the
/// result.
fn assert_same_bits(
    rows: usize,
    at_once: usize,
    width: usize,
    in_bf16: bool,
    mut run: impl FnMut(&Cpu, Range<usize>) -> Vec<f32>,
) -> Result<(), TestCaseError> {
    let mut first = HashMap::new();
    for cpu in cpus() {
        let whole = run(&cpu, 0..rows);
        prop_assert!(whole.len() == rows * width && whole.iter().all(|x| x.is_finite()));
        let parts = (0..rows).step_by(at_once).flat_map(|start| run(&cpu, start..(start + at_once).min(rows)));
        prop_assert!(parts.eq(whole.iter().copied()), "{at_once} rows at once on {} with {} threads", cpu.isa(), cpu.threads());
        let order = order(cpu.isa(), in_bf16);
        let first = first.entry(order).or_insert_with(|| whole.clone());
        prop_assert!(*first == whole, "{} with {} threads", cpu.isa(), cpu.threads());
    }
    Ok(())
}

fn product(cpu: &Cpu, dtype: Dtype, (rows, outputs, inputs): (Range<usize>, usize, usize), weights: &[u8], x: &[f32]) -> Vec<f32> {
    let weights = FloatWeights::new(cpu, Matrix::new(weights, dtype, outputs, inputs), None);
    let (mut tiles, mut y) = (FloatActivations::for_weights(dtype), vec![f32::NAN; rows.len() * outputs]);
    tiles.copy_from(cpu, &x[rows.start * inputs..rows.end * inputs], inputs);
    matmul(cpu, &tiles, [Product { weights: &weights, output: Output::Set(&mut y) }]);
    y
}

fn int8_product(cpu: &Cpu, dtype: Dtype, (rows, outputs, inputs): (Range<usize>, usize, usize), weights: &[u8], x: &[f32]) -> Vec<f32> {
    let weights = Int8Weights::new(cpu, Matrix::new(weights, dtype, outputs, inputs), None);
    let (mut quantized, mut y) = (Int8Activations::default(), vec![f32::NAN; rows.len() * outputs]);
    quantized.copy_from(cpu, &x[rows.start * inputs..rows.end * inputs], inputs);
    int8::matmul(cpu, &quantized, [Product { weights: &weights, output: Output::Set(&mut y) }]);
    y
}

/// One sequence, whose rows from `start` on are computed.
struct Sequence {
    layout: KvLayout,
    heads: usize,
    window: Option<usize>,
    scale: Option<f32>,
    cap: Option<f32>,
    sinks: Option<Vec<f32>>,
    positions: usize,
    start: usize,
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
}

impl Sequence {
    /// Only the last 20 rows are computed, so that long sequences stay cheap on portable code.
    fn new(layout: KvLayout, group: usize, window: Option<usize>, positions: usize, seed: u64) -> Self {
        let (heads, start) = (layout.kv_heads * group, positions.saturating_sub(20));
        let [k, v] = [2, 3].map(|i| numbers(positions * layout.kv_heads * layout.head_dim, seed ^ i));
        let q = numbers((positions - start) * heads * layout.head_dim, seed);
        Self { layout, heads, window, scale: None, cap: None, sinks: None, positions, start, k, v, q }
    }

    fn width(&self) -> usize {
        self.heads * self.layout.head_dim
    }

    /// Computes the attention of `rows`, which count from `start`.
    fn attention(&self, cpu: &Cpu, rows: Range<usize>) -> Vec<f32> {
        let blocks = self.positions.div_ceil(BLOCK_POSITIONS);
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let mut kv = KvMemory::new(self.layout, blocks);
        // The contents of an unwritten position must not matter.
        (0..blocks as u32).for_each(|id| kv.block_mut(id).fill(0xff));
        let spans = &[Span { blocks: &table, start: 0, rows: self.positions }];
        kv::write(cpu, &mut kv, 0, [KvRows { spans, k: &self.k, v: &self.v }].into_iter());
        let (mut out, mut buffers) = (FloatActivations::default(), AttentionBuffers::default());
        let spans = [Span { blocks: &table, start: self.start + rows.start, rows: rows.len() }];
        let q = &self.q[rows.start * self.width()..rows.end * self.width()];
        let (window, scale, cap, sinks) = (self.window, self.scale, self.cap, self.sinks.as_deref());
        let what = Attention { window, scale, cap, sinks, ..Attention::plain(0, self.heads) };
        attention(cpu, &kv, what, &spans, q, &mut out, &mut buffers);
        out.to_rows()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn products(
        (rows, outputs, inputs) in (1usize..120, 1usize..150, 1usize..1200),
        (dtype, at_once, seed) in (0usize..3, 1usize..20, any::<u64>()),
    ) {
        let dtype = DTYPES[dtype];
        let (bytes, x) = (encode(dtype, &numbers(outputs * inputs, seed)), numbers(rows * inputs, seed ^ 1));
        assert_same_bits(rows, at_once, outputs, dtype == Dtype::Bf16, |cpu, rows| product(cpu, dtype, (rows, outputs, inputs), &bytes, &x))?;
    }

    #[test]
    fn int8_products(
        (rows, outputs, inputs) in (1usize..120, 1usize..150, 1usize..1200),
        (dtype, at_once, seed) in (0usize..3, 1usize..20, any::<u64>()),
    ) {
        let dtype = DTYPES[dtype];
        let (bytes, x) = (encode(dtype, &numbers(outputs * inputs, seed)), numbers(rows * inputs, seed ^ 1));
        assert_same_bits(rows, at_once, outputs, false, |cpu, rows| int8_product(cpu, dtype, (rows, outputs, inputs), &bytes, &x))?;
    }

    #[test]
    fn activated_products(
        (rows, outputs, inputs) in (1usize..120, 1usize..150, 1usize..300),
        (dtype, activation, gated, at_once, seed) in (0usize..3, 0usize..4, any::<bool>(), 1usize..20, any::<u64>()),
    ) {
        const ACTIVATIONS: [Activation; 4] =
            [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Clamped { alpha: 1.702, limit: 0.5 }];
        let (dtype, activation) = (DTYPES[dtype], ACTIVATIONS[activation]);
        let [gate, up] = [0, 2].map(|i| encode(dtype, &numbers(outputs * inputs, seed ^ i)));
        let x = numbers(rows * inputs, seed ^ 1);
        assert_same_bits(rows, at_once, outputs, dtype == Dtype::Bf16, |cpu, rows| {
            let [gate, up] = [&gate, &up].map(|bytes| Matrix::new(bytes, dtype, outputs, inputs));
            let weights = if gated { FloatWeights::gated(cpu, (gate, None), (up, None)) } else { FloatWeights::new(cpu, gate, None) };
            let (mut tiles, mut y) = (FloatActivations::for_weights(dtype), FloatActivations::default());
            tiles.copy_from(cpu, &x[rows.start * inputs..rows.end * inputs], inputs);
            matmul(cpu, &tiles, [Product { weights: &weights, output: Output::Activated(activation, &mut y) }]);
            y.to_rows()
        })?;
    }

    #[test]
    fn layer_norms((rows, width, has_bias, at_once, seed) in (1usize..120, 1usize..600, any::<bool>(), 1usize..20, any::<u64>())) {
        let [x, weight, bias] = [rows * width, width, width].map(|len| numbers(len, seed ^ len as u64));
        let norm = LayerNorm { weight: &weight, bias: has_bias.then_some(&bias), epsilon: 1e-5 };
        assert_same_bits(rows, at_once, width, false, |cpu, rows| {
            let mut x = x[rows.start * width..rows.end * width].to_vec();
            layer_norm(cpu, &mut x, norm);
            x
        })?;
    }

    #[test]
    fn attentions(
        (positions, kv_heads, group, pairs) in (1usize..600, 1usize..3, 1usize..15, 1usize..40),
        (dtype, window, at_once, seed) in (0usize..4, proptest::option::of(1usize..400), 1usize..20, any::<u64>()),
        (scale, cap, has_sinks) in (proptest::option::of(0.01f32..2.0), proptest::option::of(0.1f32..50.0), any::<bool>()),
    ) {
        let layout = KvLayout { layers: 1, kv_heads, head_dim: 2 * pairs, dtype: KV_DTYPES[dtype], latent: None };
        let sinks = has_sinks.then(|| numbers(kv_heads * group, seed ^ 4));
        let sequence = Sequence { scale, cap, sinks, ..Sequence::new(layout, group, window, positions, seed) };
        let rows = positions - sequence.start;
        assert_same_bits(rows, at_once, sequence.width(), layout.dtype == KvStorage::Float(Dtype::Bf16), |cpu, rows| sequence.attention(cpu, rows))?;
    }
}

/// A change of these bits changes the contents of KV blocks: `ARITHMETIC_VERSION` in `tidemill-model` must then also change.
#[test]
fn some_shapes_have_these_bits_on_every_architecture() {
    let (rows, outputs, inputs) = (33, 70, 300);
    let x = numbers(rows * inputs, 1);
    for cpu in cpus() {
        let mut hasher = blake3::Hasher::new();
        let mut take = |numbers: Vec<f32>| numbers.iter().for_each(|x| _ = hasher.update(&x.to_le_bytes()));
        for dtype in DTYPES {
            let weights = encode(dtype, &numbers(outputs * inputs, 2));
            take(product(&cpu, dtype, (0..rows, outputs, inputs), &weights, &x));
            take(int8_product(&cpu, dtype, (0..rows, outputs, inputs), &weights, &x));
        }
        for dtype in KV_DTYPES {
            let sequence = Sequence::new(KvLayout { layers: 1, kv_heads: 2, head_dim: 48, dtype, latent: None }, 3, Some(400), 530, 3);
            take(sequence.attention(&cpu, 0..20));
        }
        let mut normed = x.clone();
        elementwise::rms_norm(&cpu, &mut normed, &numbers(inputs, 4), 1e-5);
        take(normed);
        let bits = match cpu.isa().bf16_products() {
            Bf16Products::Chain => "080a8c0cb31d14e0",
            Bf16Products::Blocks => "e75040fb90b70c04",
        };
        assert_eq!(hasher.finalize().to_hex()[..16], *bits, "{} with {} threads", cpu.isa(), cpu.threads());
    }
}
