//! Activations of feed-forward layers, and the soft cap of scores and logits, on 16 lanes: the same bits on every instruction set.

use crate::cpu::{
    exp::exp,
    simd::{Kernel, LANES, Simd},
};

/// The function between the two projections of a feed-forward layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// `x Φ(x)`, with the normal distribution's Φ (Hendrycks & Gimpel, 2016).
    Gelu,
    /// The same with their approximation of Φ by tanh.
    GeluTanh,
    /// `x sigmoid(alpha x)` of a gate of at most `limit`, multiplied by one more than a number within ±`limit` (GPT-OSS).
    Clamped { alpha: f32, limit: f32 },
}

impl Activation {
    #[inline(always)]
    pub(crate) fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        match self {
            Self::Silu => simd.mul(x, sigmoid(simd, x)),
            Self::Gelu | Self::GeluTanh | Self::Clamped { .. } => {
                let mut numbers = simd.to_array(x);
                simd.call(Apart { activation: self, numbers: &mut numbers });
                simd.load(&numbers)
            }
        }
    }

    /// The activated gate times the number that it gates.
    #[inline(always)]
    pub(crate) fn gate<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        let factor = match self {
            Self::Silu | Self::Gelu | Self::GeluTanh => up,
            Self::Clamped { limit, .. } => {
                let (low, high) = (simd.splat(-limit), simd.splat(limit));
                let up = at_most(simd, up, high);
                simd.add(simd.select_less(up, low, low, up), simd.splat(1.0))
            }
        };
        simd.mul(self.apply(simd, gate), factor)
    }
}

/// The activation as a function of its own, so that products do not contain many copies of it.
struct Apart<'a> {
    activation: Activation,
    numbers: &'a mut [f32; LANES],
}

impl Kernel for Apart<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let x = simd.load(self.numbers);
        let y = match self.activation {
            Activation::Silu => simd.mul(x, sigmoid(simd, x)),
            Activation::Gelu => gelu(simd, x),
            Activation::GeluTanh => gelu_tanh(simd, x),
            Activation::Clamped { alpha, limit } => {
                let x = at_most(simd, x, simd.splat(limit));
                simd.mul(x, sigmoid(simd, simd.mul(x, simd.splat(alpha))))
            }
        };
        simd.store(y, self.numbers);
    }
}

/// The smaller of `x` and `limit`; `x` if it is NaN.
#[inline(always)]
fn at_most<S: Simd>(simd: S, x: S::V, limit: S::V) -> S::V {
    simd.select_less(limit, x, limit, x)
}

/// `x (1 + tanh u) / 2`, which is `x sigmoid(2u)`.
#[inline(always)]
fn gelu_tanh<S: Simd>(simd: S, x: S::V) -> S::V {
    let cube = simd.mul(simd.mul(x, x), x);
    let u = simd.fma(cube, simd.splat(TANH_CUBE), x);
    simd.mul(x, sigmoid(simd, simd.mul(u, simd.splat(TANH_SCALE))))
}

/// The factors in gelu's approximation: `2 sqrt(2 / π)`, and that of the cube inside.
const TANH_SCALE: f32 = 1.595_769_2;
const TANH_CUBE: f32 = 0.044_715;

#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::V) -> S::V {
    let one = simd.splat(1.0);
    simd.div(one, simd.add(one, exp(simd, simd.sub(simd.zero(), x))))
}

/// `2 atanh(z) / z` as a polynomial in `z²` on `0 <= z <= 1/3`, highest power first: the series' terms up to `z^14`, whose rest is `2e-9`.
const ATANH_COEFFICIENTS: [f32; 8] = [2.0 / 15.0, 2.0 / 13.0, 2.0 / 11.0, 2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0, 2.0];

/// `ln(1 + e^x)`, which is `max(x, 0) + ln(1 + t)` with `t = e^-|x|`, and `ln(1 + t) = 2 atanh(t / (2 + t))`.
#[inline(always)]
pub(crate) fn softplus<S: Simd>(simd: S, x: S::V) -> S::V {
    let size = simd.max(x, simd.sub(simd.zero(), x));
    let t = exp(simd, simd.sub(simd.zero(), size));
    let z = simd.div(t, simd.add(t, simd.splat(2.0)));
    let square = simd.mul(z, z);
    let mut p = simd.splat(ATANH_COEFFICIENTS[0]);
    for c in &ATANH_COEFFICIENTS[1..] {
        p = simd.fma(p, square, simd.splat(*c));
    }
    // `max` returns its second operand if either is NaN.
    simd.fma(p, z, simd.max(simd.zero(), x))
}

/// `x Φ(x)`. The small tail is computed separately, so that it keeps its relative precision.
#[inline(always)]
fn gelu<S: Simd>(simd: S, x: S::V) -> S::V {
    let size = simd.max(x, simd.sub(simd.zero(), x));
    let tail = simd.mul(simd.mul(size, simd.splat(0.5)), erfc(simd, simd.mul(size, simd.splat(std::f32::consts::FRAC_1_SQRT_2))));
    simd.select_less(x, simd.zero(), simd.sub(simd.zero(), tail), simd.sub(x, tail))
}

/// `erfc(z) exp(z²) / t` as a polynomial in `t = 1 / (1 + z/2)`, highest power first: interpolated at 400 Chebyshev nodes of
/// `0 <= z <= 10`, within `2e-7` of the true value.
const ERFC_COEFFICIENTS: [f32; 10] = [
    1.741_728_2e-2,
    -1.497_589_7e-1,
    4.877_500_1e-1,
    -7.434_302e-1,
    4.778_470_4e-1,
    -1.261_377_7e-1,
    2.342_408e-1,
    2.369_822_8e-1,
    2.830_328_6e-1,
    2.820_566_7e-1,
];

/// `1 - erf(z)` for `z >= 0`.
#[inline(always)]
fn erfc<S: Simd>(simd: S, z: S::V) -> S::V {
    let one = simd.splat(1.0);
    let t = simd.div(one, simd.fma(z, simd.splat(0.5), one));
    let mut p = simd.splat(ERFC_COEFFICIENTS[0]);
    for c in &ERFC_COEFFICIENTS[1..] {
        p = simd.fma(p, t, simd.splat(*c));
    }
    simd.mul(simd.mul(p, t), exp(simd, simd.mul(simd.sub(simd.zero(), z), z)))
}

/// `(tanh(x) - x) / x³` as a polynomial in `x²` on `|x| < 0.625`, highest power first (Cephes, `tanhf`).
const TANH_COEFFICIENTS: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
const TANH_SMALL: f32 = 0.625;

#[inline(always)]
fn tanh<S: Simd>(simd: S, x: S::V) -> S::V {
    let size = simd.max(x, simd.sub(simd.zero(), x));
    let square = simd.mul(x, x);
    let mut p = simd.splat(TANH_COEFFICIENTS[0]);
    for c in &TANH_COEFFICIENTS[1..] {
        p = simd.fma(p, square, simd.splat(*c));
    }
    let small = simd.fma(simd.mul(square, size), p, size);
    let (one, two) = (simd.splat(1.0), simd.splat(2.0));
    let large = simd.sub(one, simd.div(two, simd.add(exp(simd, simd.mul(size, two)), one)));
    let size = simd.select_less(size, simd.splat(TANH_SMALL), small, large);
    simd.select_less(x, simd.zero(), simd.sub(simd.zero(), size), size)
}

/// `cap tanh(x / cap)`: within ±`cap`.
#[inline(always)]
pub(crate) fn soft_cap<S: Simd>(simd: S, x: S::V, cap: f32) -> S::V {
    simd.mul(tanh(simd, simd.div(x, simd.splat(cap))), simd.splat(cap))
}

/// The soft cap of 16 numbers, as a function of its own.
pub(crate) struct SoftCap<'a> {
    pub(crate) numbers: &'a mut [f32; LANES],
    pub(crate) cap: f32,
}

impl Kernel for SoftCap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        simd.store(soft_cap(simd, simd.load(self.numbers), self.cap), self.numbers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{
        isa::Isa,
        testing::{close, numbers},
    };

    #[derive(Clone, Copy)]
    enum Function {
        Apply(Activation),
        /// The gating of these numbers.
        Gate(Activation, [f32; LANES]),
        Cap(f32),
        Softplus,
    }

    struct Run(Function, [f32; LANES]);

    impl Kernel for Run {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            let x = simd.load(&self.1);
            simd.to_array(match self.0 {
                Function::Apply(activation) => activation.apply(simd, x),
                Function::Gate(activation, up) => activation.gate(simd, x, simd.load(&up)),
                Function::Cap(cap) => soft_cap(simd, x, cap),
                Function::Softplus => softplus(simd, x),
            })
        }
    }

    /// Asserts that all instruction sets give the same bits.
    fn everywhere(function: Function, x: [f32; LANES]) -> [f32; LANES] {
        let y = Isa::Portable.dispatch(Run(function, x));
        for isa in Isa::testable() {
            assert_eq!(isa.dispatch(Run(function, x)).map(f32::to_bits), y.map(f32::to_bits), "{isa}");
        }
        y
    }

    /// Numbers within ±10, tiny ones among them.
    fn samples() -> impl Iterator<Item = [f32; LANES]> {
        (0..200).map(|seed| {
            let scale = if seed % 4 == 0 { 1e-3 } else { 10.0 };
            std::array::from_fn(|i| scale * numbers(LANES, seed)[i])
        })
    }

    /// Φ by its series, which converges well within ±10.
    fn normal_distribution(x: f64) -> f64 {
        let (mut sum, mut term, mut n) = (x, x, 1.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 2.0;
            term *= x * x / n;
            sum += term;
        }
        0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
    }

    #[test]
    fn activations_match_the_reference() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for x in samples() {
            let exact = x.map(f64::from);
            close(&everywhere(Function::Apply(Activation::Silu), x), exact.iter().map(|&x| x * sigmoid(x)), 1e-6);
            close(&everywhere(Function::Apply(Activation::Gelu), x), exact.iter().map(|&x| x * normal_distribution(x)), 1e-6);
            let tanh = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
            close(&everywhere(Function::Apply(Activation::GeluTanh), x), exact.iter().map(|&x| tanh(x)), 1e-6);
        }
    }

    #[test]
    fn a_clamped_gate_and_what_it_gates_stay_within_the_limit() {
        for (alpha, limit) in [(1.702, 7.0), (1.0, 0.5), (3.0, 100.0)] {
            for (gate, up) in samples().zip(samples().skip(7)) {
                let expected = gate.iter().zip(&up).map(|(&gate, &up)| {
                    let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                    let (gate, up) = (f64::from(gate).min(limit), f64::from(up).clamp(-limit, limit));
                    (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
                });
                close(&everywhere(Function::Gate(Activation::Clamped { alpha, limit }, up), gate), expected, 1e-6);
            }
        }
        let gate = [9.0, 9.0, -100.0, 1.0, 1.0, f32::NAN, 1.0, f32::INFINITY, 0., 0., 0., 0., 0., 0., 0., 0.];
        let up = [9.0, -9.0, 9.0, f32::INFINITY, f32::NEG_INFINITY, 1.0, f32::NAN, -1.0, 0., 0., 0., 0., 0., 0., 0., 0.];
        let y = everywhere(Function::Gate(Activation::Clamped { alpha: 1.0, limit: 2.0 }, up), gate);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        for (y, expected) in y.into_iter().zip([6.0 * sigmoid(2.0), -2.0 * sigmoid(2.0), 0.0, 3.0 * sigmoid(1.0), -sigmoid(1.0)]) {
            assert!((y - expected).abs() < 1e-6, "{y} is not {expected}");
        }
        assert!(y[5].is_nan() && y[6].is_nan() && y[7] == 0.0, "{y:?}");
    }

    #[test]
    fn usual_gates_multiply() {
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            for (gate, up) in samples().zip(samples().skip(3)) {
                let activated = everywhere(Function::Apply(activation), gate);
                let product: [f32; LANES] = std::array::from_fn(|i| activated[i] * up[i]);
                assert_eq!(everywhere(Function::Gate(activation, up), gate), product);
            }
        }
    }

    #[test]
    fn a_cap_is_near_the_identity_for_small_numbers_and_never_exceeded() {
        for cap in [0.5, 30.0, 50.0] {
            for x in samples() {
                let y = everywhere(Function::Cap(cap), x);
                for (x, y) in x.into_iter().zip(y) {
                    let truth = f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh();
                    assert!((f64::from(y) - truth).abs() <= 4e-7 * truth.abs(), "{cap} tanh({x} / {cap}) is {truth}, not {y}");
                }
            }
        }
    }

    #[test]
    fn softplus_keeps_its_precision_where_it_is_small() {
        for x in samples().map(|x| x.map(|x| 3.0 * x)) {
            for (x, y) in x.into_iter().zip(everywhere(Function::Softplus, x)) {
                let truth = f64::from(x).exp().ln_1p();
                assert!((f64::from(y) - truth).abs() <= 5e-7 * truth, "softplus({x}) is {truth}, not {y}");
            }
        }
        let mut x = [0.0; LANES];
        x[..5].copy_from_slice(&[f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, f32::NAN]);
        let y = everywhere(Function::Softplus, x);
        assert_eq!(y[..4], [f32::INFINITY, 0.0, 1e30, 0.0]);
        assert!(y[4].is_nan());
    }

    #[test]
    fn edges() {
        let mut x = [0.0; LANES];
        x[..6].copy_from_slice(&[-1e30, 1e30, -100.0, 100.0, f32::NEG_INFINITY, f32::INFINITY]);
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            let y = everywhere(Function::Apply(activation), x);
            assert!(y[0].abs() < 1e-6 && y[1] == 1e30 && y[2].abs() < 1e-30 && y[3] == 100.0 && y[6] == 0.0, "{activation:?}: {y:?}");
        }
        assert_eq!(everywhere(Function::Cap(30.0), x)[..7], [-30.0, 30.0, -29.923_74, 29.923_74, -30.0, 30.0, 0.0]);
    }
}
