//! Any shape: the same bits on every instruction set, with any number of threads, in any cut.

use proptest::prelude::*;
use tidemill_kernels::{
    BLOCK_POSITIONS, Cpu, Dtype, Isa, KvLayout, KvMemory, Matrix, Span, Tiles, Weights,
    attention::{Attention, AttentionBuffers, attention},
    dtype::encode,
    kv,
    matmul::{Output, Product, matmul},
};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn cpus() -> Vec<Cpu> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    isas.flat_map(|isa| [1, 2].map(|threads| Cpu::new(Some(isa), threads).unwrap())).collect()
}

/// Numbers within ±1, the same for the same seed.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// `x wᵀ` row-major, of rows given `at_once` at a time.
fn product(cpu: &Cpu, dtype: Dtype, weights: &Weights, x: &[f32], at_once: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for x in x.chunks(at_once * weights.inputs()) {
        let mut tiles = Tiles::for_weights(dtype);
        tiles.copy_from(cpu, x, weights.inputs());
        let mut y = vec![f32::NAN; x.len() / weights.inputs() * weights.outputs()];
        matmul(cpu, &tiles, [Product { weights, to: Output::Set(&mut y) }]);
        all.extend(y);
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn products(
        (rows, outputs, inputs) in (1usize..120, 1usize..150, 1usize..1200),
        (dtype, at_once, seed) in (0usize..3, 1usize..20, any::<u64>()),
    ) {
        let bytes = encode(DTYPES[dtype], &numbers(outputs * inputs, seed));
        let x = numbers(rows * inputs, seed ^ 1);
        let mut first = None;
        for cpu in cpus() {
            let weights = Weights::new(&cpu, Matrix::new(&bytes, DTYPES[dtype], outputs, inputs), None);
            let whole = product(&cpu, DTYPES[dtype], &weights, &x, rows);
            prop_assert!(product(&cpu, DTYPES[dtype], &weights, &x, at_once) == whole, "{at_once} rows at once on {}", cpu.isa());
            let first = first.get_or_insert_with(|| whole.clone());
            prop_assert!(*first == whole, "{} with {} threads", cpu.isa(), cpu.threads());
        }
    }

    #[test]
    fn attentions(
        (positions, kv_heads, group, pairs) in (1usize..600, 1usize..3, 1usize..15, 1usize..40),
        (dtype, window, cut, seed) in (0usize..3, proptest::option::of(1usize..400), 0usize..600, any::<u64>()),
    ) {
        let layout = KvLayout { layers: 1, kv_heads, head_dim: 2 * pairs, dtype: DTYPES[dtype] };
        let blocks = positions.div_ceil(BLOCK_POSITIONS);
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let heads = kv_heads * group;
        let width = heads * layout.head_dim;
        let [k, v] = [2, 3].map(|i| numbers(positions * kv_heads * layout.head_dim, seed ^ i));
        // Only the last rows are asked for, so that long sequences stay cheap on portable code.
        let start = positions - positions.min(20);
        let q = numbers((positions - start) * width, seed);
        let cut = start + cut % (positions - start);
        let mut first = None;
        for cpu in cpus() {
            let mut kv = KvMemory::new(layout, blocks);
            (0..blocks as u32).for_each(|id| kv.block_mut(id).fill(0xff));
            kv::write(&cpu, &mut kv, 0, &[Span { blocks: &table, start: 0, rows: positions }], &k, &v);
            let run = |rows: std::ops::Range<usize>| {
                let (mut out, mut buffers) = (Tiles::for_weights(DTYPES[dtype]), AttentionBuffers::default());
                let spans = [Span { blocks: &table, start: rows.start, rows: rows.len() }];
                let q = &q[(rows.start - start) * width..(rows.end - start) * width];
                attention(&cpu, &kv, Attention { layer: 0, heads, window }, &spans, q, &mut out, &mut buffers);
                out.to_rows()
            };
            let whole = run(start..positions);
            prop_assert!(whole.iter().all(|x| x.is_finite()));
            let parts = [if cut > start { run(start..cut) } else { Vec::new() }, run(cut..positions)].concat();
            prop_assert!(parts == whole, "cut at {cut} on {}", cpu.isa());
            let alone = run(cut..cut + 1);
            prop_assert!(alone == whole[(cut - start) * width..(cut + 1 - start) * width], "row {cut} alone on {}", cpu.isa());
            let first = first.get_or_insert_with(|| whole.clone());
            prop_assert!(*first == whole, "{} with {} threads", cpu.isa(), cpu.threads());
        }
    }
}
