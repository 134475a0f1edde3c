//! The 16 lanes as an array: the definition that the other implementations must match.

use super::{Kernel, LANES, Simd};
use crate::cpu::bf16;
use half::f16;
use std::array::from_fn;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn half_words(x: &[u8; 32], to_f32: impl Fn(u16) -> f32) -> V {
    let (pairs, _) = x.as_chunks::<2>();
    from_fn(|i| to_f32(u16::from_le_bytes(pairs[i])))
}

#[inline(always)]
fn to_half_words(v: V, to: &mut [u8; 32], from_f32: impl Fn(f32) -> u16) {
    let (pairs, _) = to.as_chunks_mut::<2>();
    for (pair, x) in pairs.iter_mut().zip(v) {
        *pair = from_f32(x).to_le_bytes();
    }
}

/// Packs two integers, the first in the low half.
#[inline(always)]
fn i16_pair([low, high]: [i16; 2]) -> f32 {
    f32::from_bits(u32::from(low as u16) | u32::from(high as u16) << 16)
}

impl Simd for Portable {
    type V = V;

    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 1;

    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        *x
    }

    #[inline(always)]
    fn store(self, v: V, to: &mut [f32; LANES]) {
        *to = v;
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> V {
        let (words, _) = x.as_chunks::<4>();
        from_fn(|i| f32::from_le_bytes(words[i]))
    }

    #[inline(always)]
    fn load_f16_bytes(self, x: &[u8; 32]) -> V {
        half_words(x, |bits| f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn load_bf16_bytes(self, x: &[u8; 32]) -> V {
        half_words(x, |bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_bf16_even(self, x: &[u8; 64]) -> V {
        let (words, _) = x.as_chunks::<4>();
        from_fn(|i| f32::from_bits(u32::from_le_bytes(words[i]) << 16))
    }

    #[inline(always)]
    fn load_bf16_odd(self, x: &[u8; 64]) -> V {
        let (words, _) = x.as_chunks::<4>();
        from_fn(|i| f32::from_bits(u32::from_le_bytes(words[i]) & 0xffff_0000))
    }

    #[inline(always)]
    fn load_i8_pairs(self, pairs: &[u8; 32]) -> V {
        let (pairs, _) = pairs.as_chunks();
        from_fn(|i| i16_pair(pairs[i].map(|x: u8| (x as i8).into())))
    }

    #[inline(always)]
    fn to_i16_pairs(self, v: V) -> [u32; LANES / 2] {
        from_fn(|i| i16_pair([v[2 * i], v[2 * i + 1]].map(|x| x.round_ties_even() as i16)).to_bits())
    }

    #[inline(always)]
    fn add_i16_products(self, a: V, b: V, sum: V) -> V {
        let halves = |pair: f32| [pair.to_bits() as i16, (pair.to_bits() >> 16) as i16].map(i32::from);
        from_fn(|i| {
            let ([a0, a1], [b0, b1]) = (halves(a[i]), halves(b[i]));
            f32::from_bits((sum[i].to_bits() as i32).wrapping_add(a0 * b0).wrapping_add(a1 * b1) as u32)
        })
    }

    #[inline(always)]
    fn i32_to_f32(self, integers: V) -> V {
        integers.map(|integer| integer.to_bits() as i32 as f32)
    }

    #[inline(always)]
    fn store_f32_bytes(self, v: V, to: &mut [u8; 64]) {
        let (words, _) = to.as_chunks_mut::<4>();
        for (word, x) in words.iter_mut().zip(v) {
            *word = x.to_le_bytes();
        }
    }

    #[inline(always)]
    fn store_f16_bytes(self, v: V, to: &mut [u8; 32]) {
        to_half_words(v, to, |x| f16::from_f32(x).to_bits());
    }

    #[inline(always)]
    fn to_bf16_pairs(self, v: V) -> [u32; LANES / 2] {
        from_fn(|i| bf16::pair(v[2 * i], v[2 * i + 1]))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn select_less(self, x: V, limit: V, a: V, b: V) -> V {
        from_fn(|i| if x[i] < limit[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn exp2_of_shifted(self, v: V) -> V {
        v.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(0x3f80_0000)))
    }

    #[inline(always)]
    fn swap_lanes<const STRIDE: usize>(self, v: V) -> V {
        from_fn(|i| v[i ^ STRIDE])
    }

    #[inline(always)]
    fn max_lane(self, v: V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        let v: [f32; 8] = from_fn(|i| v[i] + v[i + 8]);
        let v: [f32; 4] = from_fn(|i| v[i] + v[i + 4]);
        (v[0] + v[2]) + (v[1] + v[3])
    }
}
