//! Exponential functions on 16 lanes, the same bits everywhere: neither libm nor a vendor's.

use crate::simd::Simd;

/// Below this the result is 0 (the true one is below `2^-126`).
const MIN: f32 = -87.336_54;
/// Above this the result is that of this (`1.7e38`).
const MAX: f32 = 88.02;
/// `1.5 * 2^23`: adding it rounds to an integer and leaves that integer in the low mantissa bits.
const SHIFT: f32 = 12_582_912.0;
/// ln 2 in two parts, the first with so few bits that `n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// `(e^r - 1 - r) / r²` on `|r| <= ln 2 / 2`, highest power first (Cephes, `expf`).
const COEFFICIENTS: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// `e^x`, within 2 ulp for `MIN <= x <= MAX`. NaN gives NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::V) -> S::V {
    let (min, max, shift) = (simd.splat(MIN), simd.splat(MAX), simd.splat(SHIFT));
    let clamped = simd.min(max, simd.max(min, x));
    // x = n ln 2 + r.
    let shifted = simd.fma(clamped, simd.splat(std::f32::consts::LOG2_E), shift);
    let n = simd.sub(shifted, shift);
    let r = simd.fma(n, simd.splat(-LN2_LOW), simd.fma(n, simd.splat(-LN2_HIGH), clamped));
    let mut p = simd.splat(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        p = simd.fma(p, r, simd.splat(*c));
    }
    let e_r = simd.add(simd.fma(simd.mul(r, r), p, r), simd.splat(1.0));
    simd.select_less(x, min, simd.zero(), simd.mul(e_r, simd.exp2_of_shifted(shifted)))
}

/// From here on down `2^x` is 0: its exponent is none of a normal number.
const EXP2_MIN: f32 = -127.0;
/// `(2^f - 1) / f` on `|f| <= 1/2`, highest power first: the polynomial whose largest error relative to `2^f` is the least, `1e-7`.
#[expect(clippy::approx_constant, reason = "the last is near ln 2, but not that")]
const EXP2_COEFFICIENTS: [f32; 5] = [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 2.402_224_2e-1, 6.931_47e-1];

/// `2^x` for `x <= 0`, within 3 ulp where that is at least `2^-125`, and not above it by more elsewhere; `2^0` is 1. NaN gives NaN.
///
/// For attention, which takes it of each score: two thirds of the operations of [`exp`], since nothing has to be taken apart that is
/// no multiple of a power of two, and the least results become 0 without being chosen.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::V) -> S::V {
    let (min, shift) = (simd.splat(EXP2_MIN), simd.splat(SHIFT));
    let clamped = simd.max(min, x);
    // x = n + f.
    let shifted = simd.add(clamped, shift);
    let f = simd.sub(clamped, simd.sub(shifted, shift));
    let mut p = simd.splat(EXP2_COEFFICIENTS[0]);
    for c in &EXP2_COEFFICIENTS[1..] {
        p = simd.fma(p, f, simd.splat(*c));
    }
    simd.mul(simd.fma(p, f, simd.splat(1.0)), simd.exp2_of_shifted(shifted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::Isa,
        simd::{Kernel, LANES},
    };

    struct Exp2([f32; LANES]);

    impl Kernel for Exp2 {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            simd.to_array(exp2(simd, simd.load(&self.0)))
        }
    }

    #[test]
    fn powers_of_two_are_close_to_the_true_ones_and_the_same_bits_everywhere() {
        let mut x = -130.0;
        while x <= -0.15 {
            let lanes: [f32; LANES] = std::array::from_fn(|i| x + i as f32 * 0.01);
            let reference = Isa::Portable.dispatch(Exp2(lanes));
            for (x, y) in lanes.iter().zip(reference) {
                let truth = f64::from(*x).exp2();
                let error = (f64::from(y) - truth).abs();
                assert!(error <= 2.5e-7 * truth || error < 2f64.powi(-126) && *x < -126.0, "2^{x} = {y}, not {truth}");
            }
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert_eq!(isa.dispatch(Exp2(lanes)).map(f32::to_bits), reference.map(f32::to_bits), "{isa}");
            }
            x += 0.16;
        }
        let mut lanes = [0.0; LANES];
        lanes[..5].copy_from_slice(&[f32::NEG_INFINITY, -127.0, -1e30, -0.0, f32::NAN]);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let y = isa.dispatch(Exp2(lanes));
            assert_eq!(y[..4], [0.0, 0.0, 0.0, 1.0], "{isa}");
            assert!(y[4].is_nan() && y[5] == 1.0, "{isa}");
        }
    }

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            simd.to_array(exp(simd, simd.load(&self.0)))
        }
    }

    #[test]
    fn close_to_the_true_value_and_the_same_bits_everywhere() {
        let mut x = MIN;
        while x < MAX - 0.2 {
            let lanes: [f32; LANES] = std::array::from_fn(|i| x + i as f32 * 0.01);
            let reference = Isa::Portable.dispatch(Exp(lanes));
            for (x, y) in lanes.iter().zip(reference) {
                let truth = f64::from(*x).exp();
                assert!((f64::from(y) - truth).abs() <= 2.5e-7 * truth, "exp({x}) = {y}, not {truth}");
            }
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert_eq!(isa.dispatch(Exp(lanes)).map(f32::to_bits), reference.map(f32::to_bits), "{isa}");
            }
            x += 0.16;
        }
    }

    #[test]
    fn edges() {
        let mut lanes = [0.0; LANES];
        lanes[..6].copy_from_slice(&[f32::NEG_INFINITY, -88.0, 0.0, f32::INFINITY, f32::NAN, -0.0]);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let y = isa.dispatch(Exp(lanes));
            assert_eq!(y[..3], [0.0, 0.0, 1.0], "{isa}");
            assert!(y[3] > 1e38 && y[3].is_finite() && y[4].is_nan() && y[5] == 1.0, "{isa}");
        }
    }
}
