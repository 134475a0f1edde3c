//! Each kernel at the shapes of real models.

use super::{
    Bench,
    limits::{self, Work},
};
use crate::model::shapes::{self, Shape};
use tidemill_kernels::{
    BLOCK_POSITIONS, Cpu, Dtype, KvLayout, KvStorage, Matrix,
    cpu::{
        attention::{Attention, AttentionBuffers, attention},
        elementwise,
        gemm::{
            Output, Product,
            float::{FloatActivations, FloatWeights, matmul},
            groupwise::{self, Bits, GroupwiseActivations, GroupwiseWeights, Rounded},
            int8::{self, Int8Activations, Int8Weights},
        },
        kv::{KvMemory, Span},
        vocab,
    },
    dtype,
};

/// The bytes over which operands are spread, so that every run reads them from memory.
const COLD_BYTES: usize = 256 << 20;
/// The longest time of a run at the limit, even if that leaves few copies.
const RUN_SECONDS: f64 = 0.3;

/// A shape with experts, of which only whole phases are measured: the speed of its kernels depends on the choice of experts.
pub const WITH_EXPERTS: (&str, &str) = ("qwen3-moe-1b", "qwen3-moe-1b");

/// The short names of the measured shapes.
pub const MODELS: [(&str, &str); 3] = [("135m", "smollm-135m"), ("500m", "qwen2-0.5b"), ("1b", "llama-3.2-1b")];

pub(super) fn measure(bench: &mut Bench) {
    let models = if bench.quick { &MODELS[..1] } else { &MODELS[..] };
    for (label, name) in models {
        let shape = shapes::by_name(name).expect("the shapes are in the table");
        matmuls(bench, label, shape);
        attentions(bench, label, shape);
        small(bench, label, shape);
    }
    latent_attentions(bench);
}

/// The number of copies of an operand of `bytes` that each run works through.
fn copies(bench: &Bench, bytes: usize, work: &Work) -> usize {
    let cold = if bench.quick { 1 } else { COLD_BYTES.div_ceil(bytes) };
    cold.min((RUN_SECONDS / bench.ceilings.seconds(work)) as usize).max(1)
}

/// `y = x wᵀ` for each kind of matrix, with the numbers of rows of decode steps and prefill chunks.
fn matmuls(bench: &mut Bench, label: &str, shape: &Shape) {
    let [vocab, hidden, intermediate, heads, kv_heads, head_dim] =
        [shape.vocab, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim].map(|n| n as usize);
    let matrices = [
        ("q", heads * head_dim, hidden),
        ("kv", 2 * kv_heads * head_dim, hidden),
        ("gate", intermediate, hidden),
        ("down", hidden, intermediate),
        ("head", vocab, hidden),
    ];
    for (matrix, n, k) in matrices {
        for m in [1, 8, 16, 32, 512] {
            // Prefill has no head.
            if matrix == "head" && m == 512 {
                continue;
            }
            let shape = format!("{label} {matrix} m={m} n={n} k={k}");
            let x = || numbers(m * k);
            let stored = || dtype::encode(Dtype::Bf16, &numbers(n * k));

            let work = limits::Weights::Bf16.applied((n * k) as f64, m);
            let count = copies(bench, 2 * n * k, &work);
            bench.row("matmul bf16", shape.clone(), work, count, |cpu| {
                let stored = stored();
                let copies: Vec<_> = (0..count).map(|_| FloatWeights::new(cpu, Matrix::new(&stored, Dtype::Bf16, n, k), None)).collect();
                let (mut tiles, mut y) = (FloatActivations::for_weights(Dtype::Bf16), vec![0.0; m * n]);
                tiles.copy_from(cpu, &x(), k);
                move |cpu: &Cpu| {
                    for weights in &copies {
                        matmul(cpu, &tiles, [Product { weights, output: Output::Set(&mut y) }]);
                    }
                }
            });

            let work = limits::Weights::Int8.applied((n * k) as f64, m);
            let count = copies(bench, n * k, &work);
            bench.row("matmul int8", shape.clone(), work, count, |cpu| {
                let stored = stored();
                let copies: Vec<_> = (0..count).map(|_| Int8Weights::new(cpu, Matrix::new(&stored, Dtype::Bf16, n, k), None)).collect();
                let (mut rows, mut y) = (Int8Activations::default(), vec![0.0; m * n]);
                let x = x();
                move |cpu: &Cpu| {
                    // Every matrix has its own activations, as in a model.
                    for weights in &copies {
                        rows.copy_from(cpu, &x, k);
                        int8::matmul(cpu, &rows, [Product { weights, output: Output::Set(&mut y) }]);
                    }
                }
            });

            let work = limits::Weights::Int4.applied((n * k) as f64, m);
            let count = copies(bench, n * k / 2, &work);
            bench.row("matmul int4", shape, work, count, |cpu| {
                let stored = stored();
                let rounded = Rounded { matrix: Matrix::new(&stored, Dtype::Bf16, n, k), bits: Bits::Four };
                let copies: Vec<_> = (0..count).map(|_| GroupwiseWeights::new(cpu, &rounded, None)).collect();
                let (mut rows, mut y) = (GroupwiseActivations::default(), vec![0.0; m * n]);
                let x = x();
                move |cpu: &Cpu| {
                    for weights in &copies {
                        rows.copy_from(cpu, &x, k);
                        groupwise::matmul(cpu, &rows, [Product { weights, output: Output::Set(&mut y) }]);
                    }
                }
            });
        }
    }
}

/// A chunk of prefill at the end of a context, and a decode step of several sequences. The copies are layers.
fn attentions(bench: &mut Bench, label: &str, shape: &Shape) {
    let [heads, kv_heads, head_dim] = [shape.heads, shape.kv_heads, shape.head_dim].map(|n| n as usize);
    let loads = [("prefill", 1, 512), ("decode", 1, 1), ("decode", 8, 1), ("decode", 32, 1)];
    for ((phase, sequences, rows), (kv, dtype)) in loads.into_iter().flat_map(|load| KV_DTYPES.map(|dtype| (load, dtype))) {
        for context in [512usize, 2048, 4096] {
            let layer = KvLayout { layers: 1, kv_heads, head_dim, dtype, latent: None };
            let blocks = context.div_ceil(BLOCK_POSITIONS);
            let attended: usize = (context - rows + 1..=context).sum();
            let bytes = sequences * blocks * layer.block_bytes();
            let (operations, bytes_read) = ((sequences * attended * heads * head_dim * 4) as f64, bytes as f64);
            let work = if dtype == KvStorage::Int8 {
                // The limit is that of 8 bits: the kernel multiplies them with 16 bits, at half the rate, to keep precision.
                Work { int8_ops: operations, bytes: bytes_read, ..Work::default() }
            } else {
                Work { bf16_flops: operations, bytes: bytes_read, ..Work::default() }
            };
            let layers = copies(bench, bytes, &work);
            let name = format!("attention {phase} {kv}");
            bench.row(&name, format!("{label} {sequences} × {rows} of {context}"), work, layers, |_| {
                attend(KvLayout { layers, ..layer }, heads, sequences, rows, context)
            });
        }
    }
}

/// Attention over DeepSeek-V3's latents, of which each position has 576 numbers for 128 heads: some rows of a prompt at the end of a
/// context, and decode steps. So many heads share each number that products are the limit, not memory.
fn latent_attentions(bench: &mut Bench) {
    const HEADS: usize = 128;
    let layer = KvLayout { layers: 1, kv_heads: 1, head_dim: 576, dtype: KvStorage::Float(Dtype::Bf16), latent: Some(512) };
    let contexts: &[usize] = if bench.quick { &[512] } else { &[512, 4096] };
    for ((phase, sequences, rows), &context) in [("prefill", 1, 64), ("decode", 1, 1), ("decode", 8, 1)]
        .into_iter()
        .flat_map(|load| contexts.iter().map(move |context| (load, context)))
    {
        let blocks = context.div_ceil(BLOCK_POSITIONS);
        let attended: usize = (context - rows + 1..=context).sum();
        let bytes = sequences * blocks * layer.block_bytes();
        let operations = sequences * attended * HEADS * 2 * (layer.head_dim + layer.value_dim());
        let work = Work { bf16_flops: operations as f64, bytes: bytes as f64, ..Work::default() };
        let layers = copies(bench, bytes, &work);
        bench.row(&format!("attention {phase} latent bf16"), format!("v3 {sequences} × {rows} of {context}"), work, layers, |_| {
            attend(KvLayout { layers, ..layer }, HEADS, sequences, rows, context)
        });
    }
}

/// Attention in each layer of `layout`, for the last `rows` of `context` positions of some sequences.
fn attend(layout: KvLayout, heads: usize, sequences: usize, rows: usize, context: usize) -> impl FnMut(&Cpu) {
    let blocks = context.div_ceil(BLOCK_POSITIONS);
    let mut kv = KvMemory::new(layout, sequences * blocks);
    (0..(sequences * blocks) as u32).for_each(|id| kv.block_mut(id).fill(SOME_NUMBER));
    let tables: Vec<Vec<u32>> = (0..sequences).map(|s| (s * blocks..(s + 1) * blocks).map(|id| id as u32).collect()).collect();
    let q = numbers(sequences * rows * heads * layout.head_dim);
    let (mut out, mut buffers) = (FloatActivations::default(), AttentionBuffers::default());
    move |cpu: &Cpu| {
        let spans: Vec<_> = tables.iter().map(|blocks| Span { blocks, start: context - rows, rows }).collect();
        for layer in 0..layout.layers {
            attention(cpu, &kv, Attention::plain(layer, heads), &spans, &q, &mut out, &mut buffers);
        }
    }
}

/// The types of K and V that are measured.
const KV_DTYPES: [(&str, KvStorage); 2] = [("bf16", KvStorage::Float(Dtype::Bf16)), ("int8", KvStorage::Int8)];

/// Kernels with little work per number, which are limited by reading their operands. The activation is part of a product.
fn small(bench: &mut Bench, label: &str, shape: &Shape) {
    let [vocab, hidden, heads, head_dim] = [shape.vocab, shape.hidden, shape.heads, shape.head_dim].map(|n| n as usize);
    let rows = |width: usize| if bench.quick { 1 } else { COLD_BYTES / 4 / width };
    let read = |numbers: usize| Work { bytes: (4 * numbers) as f64, ..Work::default() };
    let (norm_rows, rope_rows, vocab_rows) = (rows(hidden), rows(heads * head_dim), rows(2 * vocab));

    bench.row("norm", format!("{label} {norm_rows} × {hidden}"), read(norm_rows * hidden), 1, |_| {
        let (mut x, weight) = (numbers(norm_rows * hidden), vec![1.0; hidden]);
        move |cpu: &Cpu| elementwise::rms_norm(cpu, &mut x, &weight, 1e-5)
    });
    let angles = head_dim / 2;
    bench.row("rope", format!("{label} {rope_rows} × {heads} × {head_dim}"), read(rope_rows * (heads + 1) * head_dim), 1, |_| {
        let (mut x, cos, sin) = (numbers(rope_rows * heads * head_dim), numbers(rope_rows * angles), numbers(rope_rows * angles));
        move |cpu: &Cpu| elementwise::rotate(cpu, &mut x, rope_rows, head_dim, &cos, &sin)
    });
    // A sampler runs on one thread, so several rows make sure that they come from memory.
    bench.row("sampling argmax", format!("{label} {vocab_rows} × {vocab}"), read(vocab_rows * vocab), 1, |_| {
        let logits = numbers(vocab_rows * vocab);
        move |_: &Cpu| logits.chunks_exact(vocab).for_each(|row| _ = std::hint::black_box(vocab::argmax(row)))
    });
    bench.row("sampling exp", format!("{label} {vocab_rows} × {vocab}"), read(2 * vocab_rows * vocab), 1, |_| {
        let (logits, mut weights) = (numbers(vocab_rows * vocab), vec![0.0; vocab_rows * vocab]);
        move |_: &Cpu| {
            for (logits, weights) in logits.chunks_exact(vocab).zip(weights.chunks_exact_mut(vocab)) {
                std::hint::black_box(vocab::exp_shifted(logits, 1.0, 1.0, weights));
            }
        }
    });
}

/// A byte that is small in bf16 and f32, 0.0115, and 60 as an integer, and no special case for the arithmetic.
pub(super) const SOME_NUMBER: u8 = 0x3c;

/// Numbers in [-1, 1) that repeat only after a long time.
pub(super) fn numbers(count: usize) -> Vec<f32> {
    (0..count as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1u32 << 23) as f32 - 1.0).collect()
}
