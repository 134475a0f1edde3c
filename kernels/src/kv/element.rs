//! Numbers of K and V in memory, and what they stand for.

use crate::{
    dtype::{Bf16, Element, F16, F32, load_part},
    int8::quantize,
    lines::{Lines, StoredLines},
    simd::{LANES, Simd},
    tile::PANEL,
};

/// A [`KvDtype`](super::KvDtype) as a type.
pub(crate) trait KvElement: Element {
    /// Whether what is loaded is to be multiplied with the scale of its position.
    const IS_SCALED: bool = false;
    /// How it is multiplied: number by number in f32, or pair by pair.
    type Lines: StoredLines<Line = KvLine>;
    /// 16 words in memory: numbers, or pairs of numbers that are multiplied in one go.
    type Words;

    /// Whole vectors of words, and the bytes of the words after them.
    fn words(bytes: &[u8]) -> (&[Self::Words], &[u8]);
    /// Fewer than 16 words, and zeros after them.
    fn part_of_words(bytes: &[u8]) -> Self::Words;
    /// What step `STEP` multiplies.
    fn load_words<S: Simd, const STEP: usize>(simd: S, words: &Self::Words) -> S::V;
    /// The words as half a line has them.
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V;
}

/// 32 numbers as f32, or 32 pairs of bf16.
pub(crate) type KvLine = [u8; 4 * PANEL];

/// Numbers of a word of `E`.
pub(crate) const fn inputs<E: KvElement>() -> usize {
    <E::Lines as Lines>::INPUTS
}

/// The items of [`KvElement`] for numbers that are multiplied in f32.
macro_rules! multiplied_in_f32 {
    () => {
        type Lines = F32;
        type Words = Self::Chunk;

        #[inline(always)]
        fn words(bytes: &[u8]) -> (&[Self::Words], &[u8]) {
            Self::chunks(bytes)
        }

        #[inline(always)]
        fn part_of_words(bytes: &[u8]) -> Self::Words {
            let mut words = Self::ZEROS;
            words[..bytes.len()].copy_from_slice(bytes);
            words
        }

        #[inline(always)]
        fn load_words<S: Simd, const STEP: usize>(simd: S, words: &Self::Words) -> S::V {
            <Self as Element>::load(simd, words)
        }

        #[inline(always)]
        fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V {
            <Self as Element>::load(simd, words)
        }
    };
}

impl KvElement for F32 {
    multiplied_in_f32!();
}

impl KvElement for F16 {
    multiplied_in_f32!();
}

impl KvElement for Bf16 {
    type Lines = Bf16;
    type Words = [u8; 4 * LANES];

    #[inline(always)]
    fn words(bytes: &[u8]) -> (&[Self::Words], &[u8]) {
        bytes.as_chunks()
    }

    #[inline(always)]
    fn part_of_words(bytes: &[u8]) -> Self::Words {
        let mut words = [0; 4 * LANES];
        words[..bytes.len()].copy_from_slice(bytes);
        words
    }

    #[inline(always)]
    fn load_words<S: Simd, const STEP: usize>(simd: S, words: &Self::Words) -> S::V {
        simd.load_bf16_pairs::<STEP>(words)
    }

    #[inline(always)]
    fn widen<S: Simd>(simd: S, words: &Self::Words) -> S::V {
        simd.load_f32_bytes(words)
    }
}

/// 8-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Int8;

impl KvElement for Int8 {
    const IS_SCALED: bool = true;
    multiplied_in_f32!();
}

impl Element for Int8 {
    const BYTES: usize = 1;
    type Chunk = [u8; LANES];
    const ZEROS: [u8; LANES] = [0; LANES];

    #[inline(always)]
    fn chunks(bytes: &[u8]) -> (&[Self::Chunk], &[u8]) {
        bytes.as_chunks()
    }

    #[inline(always)]
    fn chunks_mut(bytes: &mut [u8]) -> (&mut [Self::Chunk], &mut [u8]) {
        bytes.as_chunks_mut()
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, chunk: &Self::Chunk) -> S::V {
        simd.load_i8_bytes(chunk)
    }

    /// Rounds to nearest, ties to even, what is within ±127.
    #[inline(always)]
    fn store<S: Simd>(simd: S, v: S::V, to: &mut Self::Chunk) {
        let rounded = simd.to_array(simd.add(v, simd.splat(quantize::ROUND)));
        *to = rounded.map(|x| x.to_bits() as u8);
    }
}

/// Scale of a head's numbers, and its inverse.
#[inline(always)]
pub(super) fn scale_of<S: Simd>(simd: S, numbers: &[f32]) -> (f32, f32) {
    let mut largest = simd.zero();
    for numbers in numbers.chunks(LANES) {
        let x = load_part(simd, numbers);
        largest = simd.max(simd.max(x, simd.sub(simd.zero(), x)), largest);
    }
    quantize::scale_and_inverse(simd.max_lane(largest))
}

/// `$body` with `$element` bound to the type of `$dtype`.
macro_rules! with_kv_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::kv::KvDtype::F32 => {
                type $element = $crate::dtype::F32;
                $body
            }
            $crate::kv::KvDtype::F16 => {
                type $element = $crate::dtype::F16;
                $body
            }
            $crate::kv::KvDtype::Bf16 => {
                type $element = $crate::dtype::Bf16;
                $body
            }
            $crate::kv::KvDtype::Int8 => {
                type $element = $crate::kv::element::Int8;
                $body
            }
        }
    };
}
pub(crate) use with_kv_element;
