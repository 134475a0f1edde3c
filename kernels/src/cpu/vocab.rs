//! A sampler's operations on one long row of logits. They run on the calling thread, on the best instruction set: all
//! give the same bits.

use crate::cpu::{
    element::{load_part, store_part},
    exp::exp,
    isa::Isa,
    simd::{Kernel, LANES, Simd},
};

/// Index and value of the largest number, the first among equals. NaN is skipped; `None` if there is no number.
pub fn argmax(x: &[f32]) -> Option<(usize, f32)> {
    argmax_on(Isa::best(), x)
}

fn argmax_on(isa: Isa, x: &[f32]) -> Option<(usize, f32)> {
    let largest = isa.dispatch(Max(x));
    let index = x.iter().position(|&x| x == largest)?;
    Some((index, largest))
}

/// `y[i] = e^((x[i] - shift) * scale)`; returns their sum. NaN counts as zero.
pub fn exp_shifted(x: &[f32], shift: f32, scale: f32, y: &mut [f32]) -> f32 {
    exp_shifted_on(Isa::best(), x, shift, scale, y)
}

fn exp_shifted_on(isa: Isa, x: &[f32], shift: f32, scale: f32, y: &mut [f32]) -> f32 {
    assert_eq!(x.len(), y.len(), "x and y have one shape");
    isa.dispatch(ExpShifted { x, shift, scale, y })
}

struct Max<'a>(&'a [f32]);

impl Kernel for Max<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let mut largest = simd.splat(f32::NEG_INFINITY);
        for x in chunks {
            // `max` returns the second operand if either is NaN.
            largest = simd.max(simd.load(x), largest);
        }
        rest.iter().copied().fold(simd.max_lane(largest), f32::max)
    }
}

struct ExpShifted<'a> {
    x: &'a [f32],
    shift: f32,
    scale: f32,
    y: &'a mut [f32],
}

impl Kernel for ExpShifted<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (xs, xs_rest) = self.x.as_chunks::<LANES>();
        let (ys, ys_rest) = self.y.as_chunks_mut::<LANES>();
        let mut sum = simd.zero();
        for (x, y) in xs.iter().zip(ys) {
            let e = weight(simd, simd.load(x), self.shift, self.scale);
            sum = simd.add(sum, e);
            simd.store(e, y);
        }
        if !ys_rest.is_empty() {
            store_part(simd, weight(simd, load_part(simd, xs_rest), self.shift, self.scale), ys_rest);
        }
        let mut rest = [0.0; LANES];
        rest[..ys_rest.len()].copy_from_slice(ys_rest);
        simd.sum(simd.add(sum, simd.load(&rest)))
    }
}

/// `e^((x - shift) * scale)`. It is never negative, so the maximum replaces only NaN.
#[inline(always)]
fn weight<S: Simd>(simd: S, x: S::V, shift: f32, scale: f32) -> S::V {
    let e = exp(simd, simd.mul(simd.sub(x, simd.splat(shift)), simd.splat(scale)));
    simd.max(e, simd.zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{close, numbers};

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::testable()
    }

    #[test]
    fn argmax_takes_the_first_of_equals_and_passes_over_nan() {
        for isa in isas() {
            let mut x = numbers(1003, 1);
            (x[3], x[500], x[700], x[1002]) = (f32::NAN, 5.0, 5.0, 5.0);
            assert_eq!(argmax_on(isa, &x), Some((500, 5.0)));
            x[1001] = 6.0;
            assert_eq!(argmax_on(isa, &x), Some((1001, 6.0)));
            assert_eq!(argmax_on(isa, &[f32::NAN; 40]), None);
            assert_eq!(argmax_on(isa, &[f32::NEG_INFINITY; 40]), Some((0, f32::NEG_INFINITY)));
            assert_eq!(argmax_on(isa, &[]), None);
        }
    }

    #[test]
    fn exponentials_and_their_sum() {
        for n in [0, 1, 15, 16, 1003] {
            let x: Vec<f32> = numbers(n, 2).iter().map(|x| x * 10.0).collect();
            let mut results = Vec::new();
            for isa in isas() {
                let mut y = vec![0.0; n];
                let sum = exp_shifted_on(isa, &x, 10.0, 0.5, &mut y);
                close(&y, x.iter().map(|&x| ((f64::from(x) - 10.0) * 0.5).exp()), 1e-6);
                close(&[sum], std::iter::once(y.iter().map(|&y| f64::from(y)).sum()), 1e-5);
                results.push((y, sum));
            }
            assert!(results.iter().all(|r| *r == results[0]));
        }
        let mut y = [1.0; 3];
        assert_eq!(exp_shifted(&[f32::NAN, 0.0, f32::NEG_INFINITY], 0.0, 1.0, &mut y), 1.0);
        assert_eq!(y, [0.0, 1.0, 0.0]);
    }
}
