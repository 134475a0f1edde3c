//! Matrices in MXFP4 (OCP Microscaling Formats, 2023): numbers of 4 bits (e2m1), 32 of which share a power of two (e8m0).
//!
//! A byte holds two numbers, the even input's in the low half. Products take them as they are. Dequantizing them to bf16 needs no rounding,
//! as it has room for two bits of mantissa and all exponents.

use crate::{checkpoint::Mapped, stacked::Outputs};
use std::{ops::Range, sync::LazyLock};
use tidemill_kernels::{
    Cpu, Dtype,
    cpu::gemm::groupwise::{Bits, E2M1_ZERO, GroupwiseMatrix, GroupwiseRow},
    dtype::encode,
};

/// Inputs that share a scale.
pub(crate) const GROUP: usize = 32;
/// Bytes of a group's numbers.
pub(crate) const BLOCK_BYTES: usize = GROUP / 2;
/// The largest scale whose every number is finite, `6 * 2^125`.
pub(crate) const EXPONENT_MAX: u8 = 252;
/// The stored byte of a scale of 1.
const EXPONENT_BIAS: i32 = 127;

/// Twice the size of each number, by its lower three bits; the highest one is the sign.
const TWICE: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];

/// A matrix `[outputs, inputs]`, of which some outputs are used.
pub(crate) struct Mxfp4Matrix {
    /// `[stored outputs, groups, BLOCK_BYTES]`
    pub(crate) blocks: Mapped,
    /// `[stored outputs, groups]`
    pub(crate) scales: Mapped,
    pub(crate) inputs: usize,
    pub(crate) outputs: Outputs,
}

impl Mxfp4Matrix {
    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Self {
        let (blocks, scales) = (self.blocks.clone(), self.scales.clone());
        Self { blocks, scales, inputs: self.inputs, outputs: self.outputs.part(rows) }
    }

    pub(crate) fn rows(&self) -> usize {
        self.outputs.count
    }

    pub(crate) fn cols(&self) -> usize {
        self.inputs
    }

    /// The groups of an output: the scale and the numbers of each.
    fn groups(&self, output: usize) -> impl Iterator<Item = (u8, &[u8; BLOCK_BYTES])> {
        let (stored, groups) = (self.outputs.at(output), self.inputs / GROUP);
        let blocks = self.blocks.get().as_chunks().0[stored * groups..][..groups].iter();
        self.scales.get()[stored * groups..][..groups].iter().copied().zip(blocks)
    }

    /// All numbers in bf16.
    pub(crate) fn dequantized(&self, cpu: &Cpu) -> Vec<u8> {
        let row_bytes = self.inputs * Dtype::Bf16.bytes();
        let mut numbers = vec![0; self.rows() * row_bytes];
        let mut rows: Vec<_> = numbers.chunks_exact_mut(row_bytes).enumerate().collect();
        cpu.for_each_mut(&mut rows, |(row, to)| {
            let pairs = to.as_chunks_mut().0.chunks_exact_mut(BLOCK_BYTES);
            for ((scale, block), pairs) in self.groups(*row).zip(pairs) {
                let numbers = &NUMBERS[usize::from(scale)];
                for (byte, [a, b, c, d]) in block.iter().zip(pairs) {
                    ([*a, *b], [*c, *d]) = (numbers[usize::from(byte & 0xf)], numbers[usize::from(byte >> 4)]);
                }
            }
        });
        numbers
    }
}

impl GroupwiseMatrix for Mxfp4Matrix {
    fn outputs(&self) -> usize {
        self.rows()
    }

    fn inputs(&self) -> usize {
        self.inputs
    }

    fn bits(&self) -> Bits {
        Bits::Four
    }

    fn group(&self) -> usize {
        GROUP
    }

    fn scale_dtype(&self) -> Dtype {
        Dtype::Bf16
    }

    fn is_e2m1(&self) -> bool {
        true
    }

    fn read(&self, output: usize, row: &mut GroupwiseRow) {
        row.zeros.fill(E2M1_ZERO);
        for (((exponent, block), to), scale) in self.groups(output).zip(row.integers.chunks_exact_mut(GROUP)).zip(&mut row.scales) {
            *scale = half_of(exponent) as f32;
            for (pair, byte) in to.as_chunks_mut().0.iter_mut().zip(block) {
                *pair = [byte & 0xf, byte >> 4];
            }
        }
    }
}

/// Half of the power of two that a scale stands for.
fn half_of(scale: u8) -> f64 {
    2f64.powi(i32::from(scale) - EXPONENT_BIAS - 1)
}

/// Each number in bf16, by its scale and its bits.
static NUMBERS: LazyLock<Vec<[[u8; 2]; 16]>> = LazyLock::new(|| {
    let numbers = |scale: u8| {
        std::array::from_fn(|bits| {
            let size = f64::from(TWICE[bits % 8]) * half_of(scale);
            encode(Dtype::Bf16, &[if bits < 8 { size } else { -size } as f32]).try_into().expect("bf16 has two bytes")
        })
    };
    (0..=u8::MAX).map(numbers).collect()
});

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_kernels::dtype::decode;

    /// The values of the format's definition, in its order.
    const VALUES: [f64; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

    #[test]
    fn every_number_at_every_scale_is_exact() {
        // Each output has one scale and, in two groups, all numbers once in low halves and once in high ones.
        let block: Vec<u8> = (0..16u8).map(|bits| bits | (15 - bits) << 4).collect();
        let stored = usize::from(EXPONENT_MAX) + 1;
        let matrix = Mxfp4Matrix {
            blocks: Mapped::of(&block.repeat(2 * stored)),
            scales: Mapped::of(&(0..=EXPONENT_MAX).flat_map(|scale| [scale; 2]).collect::<Vec<_>>()),
            inputs: 2 * GROUP,
            outputs: Outputs { first: 0, step: 1, count: stored },
        };
        let numbers = decode(Dtype::Bf16, &matrix.dequantized(&Cpu::new(None, 2).unwrap()));
        let mut as_it_is = GroupwiseRow::of(&matrix);
        for (scale, row) in numbers.chunks(2 * GROUP).enumerate() {
            matrix.read(scale, &mut as_it_is);
            assert!(as_it_is.zeros == [E2M1_ZERO; 2] && as_it_is.scales.iter().all(|half| f64::from(*half) == half_of(scale as u8)));
            for (i, number) in row.iter().enumerate() {
                let bits = if i % 2 == 0 { i % 32 / 2 } else { 15 - i % 32 / 2 };
                let expected = VALUES[bits] * 2f64.powi(scale as i32 - 127);
                assert_eq!(f64::from(*number).to_bits(), expected.to_bits(), "{bits} at {scale}");
                assert_eq!(usize::from(as_it_is.integers[i]), bits);
            }
        }
    }

    #[test]
    fn outputs_that_are_used_have_their_own_numbers_and_scales() {
        let matrix = Mxfp4Matrix {
            blocks: Mapped::of(&(0..6).flat_map(|output| [output | output << 4; BLOCK_BYTES]).collect::<Vec<u8>>()),
            scales: Mapped::of(&[127, 128, 129, 130, 131, 132]),
            inputs: GROUP,
            outputs: Outputs { first: 1, step: 2, count: 3 },
        };
        let firsts = |matrix: &Mxfp4Matrix| {
            let numbers = decode(Dtype::Bf16, &matrix.dequantized(&Cpu::new(None, 1).unwrap()));
            numbers.chunks(GROUP).map(|row| row[0]).collect::<Vec<_>>()
        };
        assert_eq!(firsts(&matrix), [0.5 * 2.0, 1.5 * 8.0, 3.0 * 32.0]);
        assert_eq!(firsts(&matrix.rows_of(1..3)), [1.5 * 8.0, 3.0 * 32.0]);
    }
}
