//! Rounding to bf16, to nearest, ties to even.
//!
//! Denormals are flushed to zeros of the same sign before rounding, in activations as in weights: `vdpbf16ps` reads
//! them as zeros, fused multiply-adds do not, and all instruction sets must multiply the same numbers.

/// The bits of `x` as a bf16. Denormals become zeros, NaN stays NaN: all as `vcvtneps2bf16` does it.
#[inline(always)]
pub(crate) fn round(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    match x {
        _ if x.is_nan() => (bits >> 16) | QUIET,
        _ if bits >> 16 & EXPONENT == 0 => bits >> 16 & SIGN,
        _ => nearest,
    }
}

/// The bits of a bf16, or of a zero if it is denormal.
#[inline(always)]
pub(crate) fn flush(bits: u32) -> u32 {
    if bits & EXPONENT == 0 { bits & SIGN } else { bits }
}

/// A lane of two numbers, the first in its low half.
#[inline(always)]
pub(crate) fn pair(first: f32, second: f32) -> u32 {
    round(first) | round(second) << 16
}

const SIGN: u32 = 0x8000;
const EXPONENT: u32 = 0x7f80;
/// Keeps NaN apart from infinity when the low bits are cut off.
const QUIET: u32 = 0x0040;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{
        isa::Isa,
        simd::{Kernel, LANES, Simd},
        testing::numbers,
    };
    use half::bf16;

    #[test]
    fn rounds_to_the_nearest_once_denormal_numbers_are_zeros() {
        let scales = (-120..120).map(|e| 2f32.powi(e));
        for x in scales.flat_map(|scale| numbers(100, 5).into_iter().map(move |x| x * scale)).filter(|x| x.abs() > 2e-38) {
            assert_eq!(round(x), u32::from(bf16::from_f32(x).to_bits()), "{x}");
        }
        for (x, bits) in [
            (0.0, 0),
            (-0.0, 0x8000),
            (1e-39, 0),
            (-1e-39, 0x8000),
            (f32::MIN_POSITIVE, 0x0080),
            // Denormal; rounding up would make it normal.
            (f32::from_bits(0x007f_ffff), 0),
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
        ] {
            assert_eq!(round(x), bits, "{x:e}");
        }
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0x7f80_0001)] {
            assert!(bf16::from_bits(round(nan) as u16).is_nan());
        }
        assert_eq!(pair(1.0, -2.0), 0xc000_3f80);
    }

    struct Pairs([f32; LANES]);

    impl Kernel for Pairs {
        type Output = [u32; LANES / 2];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [u32; LANES / 2] {
            simd.to_bf16_pairs(simd.load(&self.0))
        }
    }

    #[test]
    fn vectors_are_rounded_alike_on_every_instruction_set() {
        // Numbers of every size and sign and with every kind of low bits, NaN and infinities among them.
        let lanes = |i: u32| std::array::from_fn(|lane| f32::from_bits((i * LANES as u32 + lane as u32).wrapping_mul(0x0002_aaab)));
        for vector in (0..6000).map(lanes) {
            let expected: [u32; LANES / 2] = std::array::from_fn(|i| pair(vector[2 * i], vector[2 * i + 1]));
            for isa in Isa::testable() {
                assert_eq!(isa.dispatch(Pairs(vector)), expected, "{vector:?} on {isa}");
                assert_eq!(isa.dispatch_pairs(Pairs(vector)), expected, "{vector:?} on {isa}");
            }
        }
    }
}
