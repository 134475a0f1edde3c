//! Helpers for the kernels' tests.

use crate::{
    cpu::{
        Cpu,
        activation::Activation,
        hadamard,
        isa::{Bf16Products, Isa},
        kv::KvMemory,
        simd::{Kernel, LANES, Simd, portable::Portable},
    },
    dtype::{self, Dtype},
    kv::{BLOCK_POSITIONS, KvStorage, Part},
};

/// Each available instruction set, with one thread and with three.
pub(crate) fn cpus() -> Vec<Cpu> {
    let isas = Isa::testable();
    isas.flat_map(|isa| [1, 3].map(|threads| Cpu::new(Some(isa), threads).unwrap())).collect()
}

/// The order in which products are added, in bf16 or not: all instruction sets of one order give the same bits.
pub(crate) fn order(isa: Isa, in_bf16: bool) -> Bf16Products {
    if in_bf16 { isa.bf16_products() } else { Bf16Products::Chain }
}

/// Numbers in [-1, 1), the same for the same seed (xorshift).
pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Asserts that each number is within `tolerance` of the expected one, relative to it or to 1.
pub(crate) fn close(got: &[f32], expected: impl Iterator<Item = f64>, tolerance: f64) {
    let mut count = 0;
    for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(got) - expected).abs() <= tolerance * expected.abs().max(1.0), "[{i}] {got} is not {expected}");
        count += 1;
    }
    assert_eq!(count, got.len());
}

/// `activation(x)`.
pub(crate) fn activated_number(cpu: &Cpu, activation: Activation, x: f32) -> f32 {
    struct Activate(Activation, f32);
    impl Kernel for Activate {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> f32 {
            simd.to_array(self.0.apply(simd, simd.splat(self.1)))[0]
        }
    }
    cpu.isa().dispatch(Activate(activation, x))
}

/// `up` gated by `activation(gate)`.
pub(crate) fn gated_number(cpu: &Cpu, activation: Activation, gate: f32, up: f32) -> f32 {
    struct Gate(Activation, f32, f32);
    impl Kernel for Gate {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> f32 {
            simd.to_array(self.0.gate(simd, simd.splat(self.1), simd.splat(self.2)))[0]
        }
    }
    cpu.isa().dispatch(Gate(activation, gate, up))
}

/// An activation that treats gates differently from the numbers that they gate.
pub(crate) const CLAMPED: Activation = Activation::Clamped { alpha: 1.702, limit: 0.5 };

/// `row` as 8-bit products take it, by the definition of [`hadamard`] on the portable instruction set.
pub(crate) fn transformed(row: &[f32]) -> Vec<f32> {
    hadamard::transformed(Portable, row, &mut vec![[0.0; LANES]; row.len().div_ceil(LANES)]).to_vec()
}

/// The numbers that a head's K or V in a block represents, transformed if they are in 8 bits: `[position][dimension]`.
pub(crate) fn stored(kv: &KvMemory, block: u32, layer: usize, part: Part, head: usize) -> Vec<Vec<f64>> {
    let (layout, bytes) = (kv.layout(), kv.block(block));
    let numbers = &bytes[layout.numbers(layer, part, head)];
    let numbers: Vec<f32> = match layout.dtype {
        KvStorage::Float(Dtype::F32) => dtype::decode(Dtype::F32, numbers),
        KvStorage::Float(Dtype::F16) => dtype::decode(Dtype::F16, numbers),
        KvStorage::Float(Dtype::Bf16) => dtype::decode(Dtype::Bf16, numbers),
        KvStorage::Int8 => numbers.iter().map(|x| f32::from(*x as i8)).collect(),
    };
    let mut scales = dtype::decode(Dtype::F32, &bytes[layout.scales(layer, part, head)]);
    scales.resize(BLOCK_POSITIONS, 1.0);
    let place = |position: usize, i: usize| match (part, layout.dtype) {
        (Part::K, KvStorage::Float(Dtype::Bf16) | KvStorage::Int8) => i / 2 * 2 * BLOCK_POSITIONS + 2 * position + i % 2,
        (Part::V, KvStorage::Float(Dtype::Bf16) | KvStorage::Int8) => position / 2 * 2 * layout.head_dim + 2 * i + position % 2,
        (Part::K, _) => i * BLOCK_POSITIONS + position,
        (Part::V, _) => position * layout.head_dim + i,
    };
    let number = |position: usize, i: usize| f64::from(numbers[place(position, i)]) * f64::from(scales[position]);
    (0..BLOCK_POSITIONS).map(|position| (0..layout.head_dim).map(|i| number(position, i)).collect()).collect()
}
