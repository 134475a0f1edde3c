//! The layout of a panel's lines, and their multiplication.
//!
//! f32 and f16: a line has one input, and is widened to f32 and multiplied. bf16: a line has two inputs, and so has a word of activations,
//! which are also bf16: the odd input's product is added first, then the even one's, each by a fused multiply-add in f32. An instruction
//! that adds both in this order may do so at once (see [`Simd::BF16_STEPS`]).

use crate::cpu::{
    bf16::flush,
    element::{Bf16, Element, F16, F32},
    simd::{LANES, Simd},
};

/// Columns of a panel: two vectors.
pub(crate) const PANEL: usize = PANEL_LINES * LANES;
pub(crate) const PANEL_LINES: usize = 2;

/// The storage and multiplication of a panel of 32 outputs, two vectors.
pub(crate) trait PanelFormat {
    type Line: Send + Sync;
    /// Inputs of a line.
    const INPUTS: usize = 1;
    /// Whether a step multiplies pairs of 16 bits, for which some processors have instructions.
    const MULTIPLIES_PAIRS: bool = false;
    /// Whether the operands are pairs of bf16, multiplied in [`Simd::BF16_STEPS`] steps.
    const IS_BF16: bool = false;

    /// The right operand of step `STEP`: outputs 0 to 15, or 16 to 31.
    fn load<S: Simd, const STEP: usize>(simd: S, line: &Self::Line, half: usize) -> S::V;

    /// The left operand of step `STEP`: a word of activations in all lanes.
    #[inline(always)]
    fn splat<S: Simd, const STEP: usize>(simd: S, word: u32) -> S::V {
        simd.splat(f32::from_bits(word))
    }

    /// `sum + weights * x`.
    #[inline(always)]
    fn add<S: Simd>(simd: S, weights: S::V, x: S::V, sum: S::V) -> S::V {
        simd.fma(weights, x, sum)
    }
}

/// The number of steps that multiply a line.
pub(crate) const fn steps<S: Simd, L: PanelFormat>() -> usize {
    if L::IS_BF16 { S::BF16_STEPS } else { 1 }
}

/// A panel of stored weights.
pub(crate) trait WeightFormat: Element + PanelFormat {
    const LINE_BYTES: usize = Self::INPUTS * PANEL * Self::BYTES;

    fn lines(bytes: &[u8]) -> &[Self::Line];

    /// The number of lines of a panel with this many inputs.
    fn panel_lines(inputs: usize) -> usize {
        inputs.div_ceil(Self::INPUTS)
    }

    /// Packs one output's weights into a panel.
    fn pack(weights: &[u8], output: usize, panel: &mut [u8]) {
        let group = Self::INPUTS * Self::BYTES;
        for (line, numbers) in panel.chunks_exact_mut(Self::LINE_BYTES).zip(weights.chunks(group)) {
            line[output * group..][..numbers.len()].copy_from_slice(numbers);
        }
    }
}

macro_rules! widened_when_read {
    ($element:ty, $bytes:literal) => {
        impl PanelFormat for $element {
            type Line = [u8; PANEL * $bytes];

            #[inline(always)]
            fn load<S: Simd, const STEP: usize>(simd: S, line: &Self::Line, half: usize) -> S::V {
                <$element as Element>::load(simd, &line.as_chunks::<{ LANES * $bytes }>().0[half])
            }
        }

        impl WeightFormat for $element {
            #[inline(always)]
            fn lines(bytes: &[u8]) -> &[Self::Line] {
                bytes.as_chunks().0
            }
        }
    };
}

widened_when_read!(F32, 4);
widened_when_read!(F16, 2);

/// Inputs of a block of bf16 weights.
pub(crate) const BLOCK_INPUTS: usize = 32;

impl PanelFormat for Bf16 {
    type Line = [u8; 2 * PANEL * 2];
    const INPUTS: usize = 2;
    const MULTIPLIES_PAIRS: bool = true;
    const IS_BF16: bool = true;

    #[inline(always)]
    fn load<S: Simd, const STEP: usize>(simd: S, line: &Self::Line, half: usize) -> S::V {
        simd.load_bf16_pairs::<STEP>(&line.as_chunks().0[half])
    }

    #[inline(always)]
    fn splat<S: Simd, const STEP: usize>(simd: S, word: u32) -> S::V {
        simd.splat_bf16_pair::<STEP>(word)
    }

    #[inline(always)]
    fn add<S: Simd>(simd: S, weights: S::V, x: S::V, sum: S::V) -> S::V {
        simd.add_bf16_products(weights, x, sum)
    }
}

impl WeightFormat for Bf16 {
    #[inline(always)]
    fn lines(bytes: &[u8]) -> &[Self::Line] {
        bytes.as_chunks().0
    }

    fn panel_lines(inputs: usize) -> usize {
        inputs.div_ceil(BLOCK_INPUTS) * BLOCK_INPUTS / 2
    }

    fn pack(weights: &[u8], output: usize, panel: &mut [u8]) {
        for (line, numbers) in panel.as_chunks_mut::<{ 4 * PANEL }>().0.iter_mut().zip(weights.chunks(4)) {
            for (to, number) in line[4 * output..].as_chunks_mut::<2>().0.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *to = (flush(u16::from_le_bytes(*number).into()) as u16).to_le_bytes();
            }
        }
    }
}
