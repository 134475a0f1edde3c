//! Exponentials on 16 lanes, the same bits on every instruction set; no libm.

use crate::cpu::simd::Simd;

/// The bound below which the result is 0 (the true value is below `2^-126`).
const MIN: f32 = -87.336_54;
/// The largest input; larger ones give the result of this one (`1.7e38`).
const MAX: f32 = 88.02;
/// `1.5 * 2^23`: adding it rounds to an integer and leaves that integer in the low bits of the mantissa.
const SHIFT: f32 = 12_582_912.0;
/// ln 2 in two parts, the first so short that `n * LN2_HIGH` is exact.
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

/// The bound at and below which `2^x` is 0: its exponent is out of range for normal numbers.
const EXP2_MIN: f32 = -127.0;
/// `(2^f - 1) / f` on `|f| <= 1/2`, highest power first: the polynomial with the least maximum error relative to `2^f`,
/// `1e-7`.
#[expect(clippy::approx_constant, reason = "the last is near ln 2, but not that")]
const EXP2_COEFFICIENTS: [f32; 5] = [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 2.402_224_2e-1, 6.931_47e-1];

/// `2^x` for `x <= 0`, within 3 ulp where the result is at least `2^-125`, and not above the true value by more
/// elsewhere; `2^0` is 1. NaN gives NaN.
///
/// For attention, which needs it for every score. It takes two thirds of the operations of [`exp`]: no reduction by ln 2, and the smallest
/// results become 0 without a select.
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
    use crate::cpu::{
        isa::Isa,
        simd::{Kernel, LANES},
    };

    /// Powers of 2, or of e.
    struct Powers {
        of_two: bool,
        x: [f32; LANES],
    }

    impl Kernel for Powers {
        type Output = [u32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [u32; LANES] {
            let x = simd.load(&self.x);
            simd.to_array(if self.of_two { exp2(simd, x) } else { exp(simd, x) }).map(f32::to_bits)
        }
    }

    /// Asserts that all instruction sets give the same bits.
    fn powers(of_two: bool, x: [f32; LANES]) -> [f32; LANES] {
        let bits = Isa::Portable.dispatch(Powers { of_two, x });
        for isa in Isa::testable() {
            assert_eq!(isa.dispatch(Powers { of_two, x }), bits, "{isa}");
        }
        bits.map(f32::from_bits)
    }

    /// `(x, y)` for `x` from `from` to `to` in steps of 0.01.
    fn many(of_two: bool, from: f32, to: f32) -> impl Iterator<Item = (f32, f32)> {
        let starts = (0..).map(move |i| from + i as f32 * 0.16).take_while(move |x| *x <= to - 0.15);
        starts.flat_map(move |start| {
            let x = std::array::from_fn(|i| start + i as f32 * 0.01);
            x.into_iter().zip(powers(of_two, x))
        })
    }

    #[test]
    fn powers_of_two_are_close_to_the_true_ones() {
        for (x, y) in many(true, -130.0, 0.0) {
            let truth = f64::from(x).exp2();
            let error = (f64::from(y) - truth).abs();
            assert!(error <= 2.5e-7 * truth || error < 2f64.powi(-126) && x < -126.0, "2^{x} = {y}, not {truth}");
        }
    }

    #[test]
    fn powers_of_e_are_close_to_the_true_ones() {
        for (x, y) in many(false, MIN, MAX) {
            let truth = f64::from(x).exp();
            assert!((f64::from(y) - truth).abs() <= 2.5e-7 * truth, "exp({x}) = {y}, not {truth}");
        }
    }

    #[test]
    fn edges() {
        let mut x = [0.0; LANES];
        x[..5].copy_from_slice(&[f32::NEG_INFINITY, -127.0, -1e30, -0.0, f32::NAN]);
        let y = powers(true, x);
        assert!(y[..4] == [0.0, 0.0, 0.0, 1.0] && y[4].is_nan() && y[5] == 1.0, "{y:?}");

        x[..6].copy_from_slice(&[f32::NEG_INFINITY, -88.0, 0.0, f32::INFINITY, f32::NAN, -0.0]);
        let y = powers(false, x);
        assert!(y[..3] == [0.0, 0.0, 1.0] && y[3] > 1e38 && y[3].is_finite() && y[4].is_nan() && y[5] == 1.0, "{y:?}");
    }
}
