//! Stored numbers, loaded as vectors of 16 lanes.

use crate::cpu::simd::{LANES, Simd};

/// A [`Dtype`] as a type.
pub(crate) trait Element: Copy + Send + Sync {
    const BYTES: usize;
    /// The bytes of 16 numbers.
    type Chunk: AsMut<[u8]> + Copy + Send + Sync;
    const ZEROS: Self::Chunk;
    /// Whole chunks, and the bytes of the numbers after them.
    fn chunks(bytes: &[u8]) -> (&[Self::Chunk], &[u8]);
    fn load<S: Simd>(simd: S, chunk: &Self::Chunk) -> S::V;

    /// Fewer than 16 numbers, padded with zeros.
    #[inline(always)]
    fn load_part<S: Simd>(simd: S, bytes: &[u8]) -> S::V {
        let mut chunk = Self::ZEROS;
        chunk.as_mut()[..bytes.len()].copy_from_slice(bytes);
        Self::load(simd, &chunk)
    }
}

macro_rules! element {
    ($name:ident, $bytes:literal, $load:ident) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Element for $name {
            const BYTES: usize = $bytes;
            type Chunk = [u8; $bytes * LANES];
            const ZEROS: Self::Chunk = [0; $bytes * LANES];

            #[inline(always)]
            fn chunks(bytes: &[u8]) -> (&[Self::Chunk], &[u8]) {
                bytes.as_chunks()
            }

            #[inline(always)]
            fn load<S: Simd>(simd: S, chunk: &Self::Chunk) -> S::V {
                simd.$load(chunk)
            }
        }
    };
}

element!(F32, 4, load_f32_bytes);
element!(F16, 2, load_f16_bytes);
element!(Bf16, 2, load_bf16_bytes);

/// `$body`, with `$element` bound to the type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::Dtype::F32 => {
                type $element = $crate::cpu::element::F32;
                $body
            }
            $crate::dtype::Dtype::F16 => {
                type $element = $crate::cpu::element::F16;
                $body
            }
            $crate::dtype::Dtype::Bf16 => {
                type $element = $crate::cpu::element::Bf16;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// Fewer than 16 f32, padded with zeros.
#[inline(always)]
pub(crate) fn load_part<S: Simd>(simd: S, x: &[f32]) -> S::V {
    let mut lanes = [0.0; LANES];
    lanes[..x.len()].copy_from_slice(x);
    simd.load(&lanes)
}

/// The first 16 numbers of `x`, padded with zeros where it has fewer.
#[inline(always)]
pub(crate) fn load_up_to<S: Simd>(simd: S, x: &[f32]) -> S::V {
    match x.first_chunk() {
        Some(whole) => simd.load(whole),
        None => load_part(simd, x),
    }
}

/// Stores as many of `v`'s first lanes as `to` has room for.
#[inline(always)]
pub(crate) fn store_part<S: Simd>(simd: S, v: S::V, to: &mut [f32]) {
    let lanes = simd.to_array(v);
    to.copy_from_slice(&lanes[..to.len()]);
}
