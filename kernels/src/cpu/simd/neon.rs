//! The 16 lanes as four 128-bit registers of aarch64: lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
//!
//! NEON with fused multiply-add is part of every aarch64 target, so nothing has to be detected or tested. Half-precision floats go through
//! [`Portable`], as weights and KV are rarely stored in them.

use super::{Kernel, LANES, Simd, portable::Portable};
use std::{arch::aarch64::*, array::from_fn};

#[derive(Clone, Copy)]
pub(crate) struct Neon;

type V = [float32x4_t; REGISTERS];

const REGISTERS: usize = 4;

/// An expression of intrinsics.
macro_rules! intrinsics {
    ($($body:tt)*) => {
        // SAFETY: every aarch64 target has NEON, and pointers come from references to arrays of the full width.
        unsafe { $($body)* }
    };
}

#[inline(always)]
fn load_bytes(x: &[u8; 16]) -> uint8x16_t {
    intrinsics!(vld1q_u8(x.as_ptr()))
}

#[inline(always)]
fn store_bytes(v: uint8x16_t, to: &mut [u8; 16]) {
    intrinsics!(vst1q_u8(to.as_mut_ptr(), v))
}

/// The bits of 16 lanes.
#[inline(always)]
fn load_words(x: &[u8; 64]) -> [uint32x4_t; REGISTERS] {
    intrinsics! {
        let (quarters, _) = x.as_chunks();
        from_fn(|i| vreinterpretq_u32_u8(load_bytes(&quarters[i])))
    }
}

impl Simd for Neon {
    type V = V;

    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        intrinsics!([vdupq_n_f32(x); REGISTERS])
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        intrinsics! {
            let (quarters, _) = x.as_chunks::<4>();
            from_fn(|i| vld1q_f32(quarters[i].as_ptr()))
        }
    }

    #[inline(always)]
    fn store(self, v: V, to: &mut [f32; LANES]) {
        intrinsics! {
            for (v, to) in v.into_iter().zip(to.as_chunks_mut::<4>().0) {
                vst1q_f32(to.as_mut_ptr(), v)
            }
        }
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> V {
        intrinsics!(load_words(x).map(|bits| vreinterpretq_f32_u32(bits)))
    }

    #[inline(always)]
    fn load_f16_bytes(self, x: &[u8; 32]) -> V {
        self.load(&Portable.load_f16_bytes(x))
    }

    #[inline(always)]
    fn load_bf16_bytes(self, x: &[u8; 32]) -> V {
        intrinsics! {
            let (halves, _) = x.as_chunks();
            let [low, high] = from_fn(|i| vreinterpretq_u16_u8(load_bytes(&halves[i])));
            let bits = [
                vshll_n_u16::<16>(vget_low_u16(low)),
                vshll_high_n_u16::<16>(low),
                vshll_n_u16::<16>(vget_low_u16(high)),
                vshll_high_n_u16::<16>(high),
            ];
            bits.map(|bits| vreinterpretq_f32_u32(bits))
        }
    }

    #[inline(always)]
    fn load_bf16_even(self, x: &[u8; 64]) -> V {
        intrinsics!(load_words(x).map(|pairs| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))))
    }

    #[inline(always)]
    fn load_bf16_odd(self, x: &[u8; 64]) -> V {
        intrinsics!(load_words(x).map(|pairs| vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff_0000)))))
    }

    #[inline(always)]
    fn load_i8_pairs(self, pairs: &[u8; 32]) -> V {
        intrinsics! {
            let (halves, _) = pairs.as_chunks();
            let [a, b]: [int8x16_t; 2] = from_fn(|i| vreinterpretq_s8_u8(load_bytes(&halves[i])));
            let wide = [vmovl_s8(vget_low_s8(a)), vmovl_high_s8(a), vmovl_s8(vget_low_s8(b)), vmovl_high_s8(b)];
            wide.map(|pairs| vreinterpretq_f32_s16(pairs))
        }
    }

    #[inline(always)]
    fn to_i16_pairs(self, v: V) -> [u32; LANES / 2] {
        let mut pairs = [0; LANES / 2];
        intrinsics! {
            let rounded = v.map(|v| vcvtnq_s32_f32(v));
            for (to, i) in pairs.as_chunks_mut::<4>().0.iter_mut().zip([0, 2]) {
                let integers = vcombine_s16(vmovn_s32(rounded[i]), vmovn_s32(rounded[i + 1]));
                vst1q_u32(to.as_mut_ptr(), vreinterpretq_u32_s16(integers))
            }
        }
        pairs
    }

    #[inline(always)]
    fn add_i16_products(self, a: V, b: V, sum: V) -> V {
        intrinsics! {
            from_fn(|i| {
                let (a, b, sum) = (vreinterpretq_s16_f32(a[i]), vreinterpretq_s16_f32(b[i]), vreinterpretq_s32_f32(sum[i]));
                let products = vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
                vreinterpretq_f32_s32(vaddq_s32(sum, products))
            })
        }
    }

    #[inline(always)]
    fn i32_to_f32(self, integers: V) -> V {
        intrinsics!(integers.map(|integers| vcvtq_f32_s32(vreinterpretq_s32_f32(integers))))
    }

    #[inline(always)]
    fn store_f32_bytes(self, v: V, to: &mut [u8; 64]) {
        intrinsics! {
            for (v, to) in v.into_iter().zip(to.as_chunks_mut().0) {
                store_bytes(vreinterpretq_u8_f32(v), to);
            }
        }
    }

    #[inline(always)]
    fn store_f16_bytes(self, v: V, to: &mut [u8; 32]) {
        Portable.store_f16_bytes(self.to_array(v), to);
    }

    #[inline(always)]
    fn to_bf16_pairs(self, v: V) -> [u32; LANES / 2] {
        Portable.to_bf16_pairs(self.to_array(v))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        intrinsics!(from_fn(|i| vaddq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        intrinsics!(from_fn(|i| vsubq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        intrinsics!(from_fn(|i| vmulq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        intrinsics!(from_fn(|i| vdivq_f32(a[i], b[i])))
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        intrinsics!(from_fn(|i| vfmaq_f32(c[i], a[i], b[i])))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        intrinsics! {
            // NEON's own maximum gives NaN if either is NaN.
            from_fn(|i| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
        }
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        intrinsics!(from_fn(|i| vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i])))
    }

    #[inline(always)]
    fn select_less(self, x: V, limit: V, a: V, b: V) -> V {
        intrinsics!(from_fn(|i| vbslq_f32(vcltq_f32(x[i], limit[i]), a[i], b[i])))
    }

    #[inline(always)]
    fn exp2_of_shifted(self, v: V) -> V {
        intrinsics!(v.map(|v| vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(v)), vdupq_n_u32(0x3f80_0000)))))
    }

    #[inline(always)]
    fn swap_lanes<const STRIDE: usize>(self, v: V) -> V {
        intrinsics! {
            match STRIDE {
                1 => v.map(|v| vrev64q_f32(v)),
                2 => v.map(|v| vextq_f32::<2>(v, v)),
                4 => [v[1], v[0], v[3], v[2]],
                _ => [v[2], v[3], v[0], v[1]],
            }
        }
    }

    #[inline(always)]
    fn max_lane(self, v: V) -> f32 {
        intrinsics!(vmaxvq_f32(vmaxq_f32(vmaxq_f32(v[0], v[2]), vmaxq_f32(v[1], v[3]))))
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        intrinsics! {
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            vaddv_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)))
        }
    }
}
