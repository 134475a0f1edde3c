//! Numbers of K and V in memory, and what they stand for.

use crate::{
    dtype::{Bf16, Element, F16, F32, load_part},
    int8::quantize,
    simd::{LANES, Simd},
};

/// A [`KvDtype`](super::KvDtype) as a type.
pub(crate) trait KvElement: Element {
    /// Whether what is loaded is to be multiplied with the scale of its position.
    const IS_SCALED: bool = false;
}

impl KvElement for F32 {}
impl KvElement for F16 {}
impl KvElement for Bf16 {}

/// 8-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Int8;

impl KvElement for Int8 {
    const IS_SCALED: bool = true;
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
