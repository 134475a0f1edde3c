//! Types for the storage and multiplication of K and V.

use crate::cpu::{
    element::{Bf16, F16, F32},
    gemm::{
        int8::quantize,
        panel::{PANEL, PanelFormat},
    },
    simd::{LANES, Simd},
};

/// A [`KvStorage`](super::KvStorage) as a type.
pub(crate) trait KvElement {
    /// Bytes of a number.
    const BYTES: usize;
    /// The format in which it is multiplied: number by number, or pair by pair.
    type PanelFormat: KvPanelFormat;
    /// 16 words in memory: numbers, or pairs that one instruction multiplies.
    type Words;

    /// Whole vectors of words, and the bytes of the words after them.
    fn words(bytes: &[u8]) -> (&[Self::Words], &[u8]);
    /// Fewer than 16 words, padded with zeros.
    fn part_of_words(bytes: &[u8]) -> Self::Words;
    /// The words in the panel's format.
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V;

    /// The operand of step `STEP`.
    #[inline(always)]
    fn load_words<S: Simd, const STEP: usize>(simd: S, words: &Self::Words) -> S::V {
        Self::widen(simd, words)
    }

    /// Stores `numbers`, which may not fill all bytes.
    fn put<S: Simd>(simd: S, numbers: S::V, to: &mut NumberBytes);
}

/// Room for 16 numbers.
pub(crate) type NumberBytes = [u8; 4 * LANES];

/// 32 numbers as f32, or 32 pairs of bf16 or of integers.
pub(crate) type KvLine = [u8; 4 * PANEL];

/// The multiplication of panels of K and V with queries and with weights.
pub(crate) trait KvPanelFormat: PanelFormat<Line = KvLine> {
    /// Whether products are of integers, whose operands have scales; those of K and V are in their blocks.
    const HAS_SCALES: bool = false;

    /// Stores 16 numbers, times the inverse of their scale if they have one, as words of one number or two.
    fn put_words<S: Simd>(simd: S, numbers: S::V, to: &mut [u32]);

    /// The sums of products as f32, not scaled yet.
    #[inline(always)]
    fn numbers<S: Simd>(_: S, sums: S::V) -> S::V {
        sums
    }
}

impl KvPanelFormat for F32 {
    #[inline(always)]
    fn put_words<S: Simd>(simd: S, numbers: S::V, to: &mut [u32]) {
        to.copy_from_slice(&simd.to_array(numbers).map(f32::to_bits));
    }
}

/// bf16 numbers that are multiplied one by one, in f32.
#[derive(Clone, Copy)]
pub(crate) struct Bf16AsF32;

impl PanelFormat for Bf16AsF32 {
    type Line = KvLine;

    #[inline(always)]
    fn load<S: Simd, const STEP: usize>(simd: S, line: &KvLine, half: usize) -> S::V {
        <F32 as PanelFormat>::load::<S, STEP>(simd, line, half)
    }
}

impl KvPanelFormat for Bf16AsF32 {
    #[inline(always)]
    fn put_words<S: Simd>(simd: S, numbers: S::V, to: &mut [u32]) {
        F32::put_words(simd, simd.round_to_bf16(numbers), to);
    }
}

impl KvPanelFormat for Bf16 {
    #[inline(always)]
    fn put_words<S: Simd>(simd: S, numbers: S::V, to: &mut [u32]) {
        to.copy_from_slice(&simd.to_bf16_pairs(numbers));
    }
}

/// Pairs of 16-bit integers, whose products are added in 32 bits: exactly, in any order. K and V are within ±127, so
/// queries of up to [`INT8_HEAD_DIM_MAX`] numbers, and a split's weights, may use all 16 bits.
#[derive(Clone, Copy)]
pub(crate) struct Int16Pairs;

/// Largest head size whose products with K in 8 bits fit 32 bits.
pub const INT8_HEAD_DIM_MAX: usize = (i32::MAX / (i8::MAX as i32 * i16::MAX as i32)) as usize;
/// Vectors of a head of the largest size.
pub(crate) const INT8_HEAD_VECTORS: usize = INT8_HEAD_DIM_MAX.div_ceil(LANES);

impl PanelFormat for Int16Pairs {
    type Line = KvLine;
    const INPUTS: usize = 2;
    const MULTIPLIES_PAIRS: bool = true;

    #[inline(always)]
    fn load<S: Simd, const STEP: usize>(simd: S, line: &KvLine, half: usize) -> S::V {
        simd.load_f32_bytes(&line.as_chunks().0[half])
    }

    #[inline(always)]
    fn add<S: Simd>(simd: S, a: S::V, b: S::V, sum: S::V) -> S::V {
        simd.add_i16_products(a, b, sum)
    }
}

impl KvPanelFormat for Int16Pairs {
    const HAS_SCALES: bool = true;

    #[inline(always)]
    fn put_words<S: Simd>(simd: S, numbers: S::V, to: &mut [u32]) {
        to.copy_from_slice(&simd.to_i16_pairs(numbers));
    }

    #[inline(always)]
    fn numbers<S: Simd>(simd: S, sums: S::V) -> S::V {
        simd.i32_to_f32(sums)
    }
}

/// The count of numbers in a word of `E`.
pub(crate) const fn inputs<E: KvElement>() -> usize {
    <E::PanelFormat as PanelFormat>::INPUTS
}

/// The items of [`KvElement`] for words of `$bytes` bytes.
macro_rules! words_of_bytes {
    ($bytes:literal) => {
        type Words = [u8; $bytes * LANES];

        #[inline(always)]
        fn words(bytes: &[u8]) -> (&[Self::Words], &[u8]) {
            bytes.as_chunks()
        }

        #[inline(always)]
        fn part_of_words(bytes: &[u8]) -> Self::Words {
            let mut words = [0; _];
            words[..bytes.len()].copy_from_slice(bytes);
            words
        }
    };
}

impl KvElement for F32 {
    const BYTES: usize = 4;
    type PanelFormat = F32;
    words_of_bytes!(4);

    #[inline(always)]
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V {
        simd.load_f32_bytes(words)
    }

    #[inline(always)]
    fn put<S: Simd>(simd: S, numbers: S::V, to: &mut NumberBytes) {
        simd.store_f32_bytes(numbers, to);
    }
}

impl KvElement for F16 {
    const BYTES: usize = 2;
    type PanelFormat = F32;
    words_of_bytes!(2);

    #[inline(always)]
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V {
        simd.load_f16_bytes(words)
    }

    #[inline(always)]
    fn put<S: Simd>(simd: S, numbers: S::V, to: &mut NumberBytes) {
        simd.store_f16_bytes(numbers, to.first_chunk_mut().expect("half of the bytes"));
    }
}

impl KvElement for Bf16 {
    const BYTES: usize = 2;
    type PanelFormat = Bf16;
    words_of_bytes!(4);

    #[inline(always)]
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V {
        simd.load_f32_bytes(words)
    }

    #[inline(always)]
    fn load_words<S: Simd, const STEP: usize>(simd: S, words: &Self::Words) -> S::V {
        simd.load_bf16_pairs::<STEP>(words)
    }

    #[inline(always)]
    fn put<S: Simd>(simd: S, numbers: S::V, to: &mut NumberBytes) {
        for (to, pair) in to.as_chunks_mut().0.iter_mut().zip(simd.to_bf16_pairs(numbers)) {
            *to = pair.to_le_bytes();
        }
    }
}

/// 8-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Int8;

impl KvElement for Int8 {
    const BYTES: usize = 1;
    type PanelFormat = Int16Pairs;
    words_of_bytes!(2);

    #[inline(always)]
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V {
        simd.load_i8_pairs(words)
    }

    /// Rounds to nearest, ties to even. Numbers are within ±127.
    #[inline(always)]
    fn put<S: Simd>(simd: S, numbers: S::V, to: &mut NumberBytes) {
        let rounded = simd.to_array(simd.add(numbers, simd.splat(quantize::ROUND)));
        to.iter_mut().zip(rounded).for_each(|(to, x)| *to = x.to_bits() as u8);
    }
}

/// `$body` with `$element` bound to the type of `$dtype`.
macro_rules! with_kv_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::kv::KvStorage::Float($crate::dtype::Dtype::F32) => {
                type $element = $crate::cpu::element::F32;
                $body
            }
            $crate::kv::KvStorage::Float($crate::dtype::Dtype::F16) => {
                type $element = $crate::cpu::element::F16;
                $body
            }
            $crate::kv::KvStorage::Float($crate::dtype::Dtype::Bf16) => {
                type $element = $crate::cpu::element::Bf16;
                $body
            }
            $crate::kv::KvStorage::Int8 => {
                type $element = $crate::cpu::kv::element::Int8;
                $body
            }
        }
    };
}
pub(crate) use with_kv_element;
