//! One row of f32 to 8-bit integers and a scale.

use crate::{
    cpu::Isa,
    dtype::load_part,
    simd::{Kernel, LANES, Simd},
};

/// Calls `put` with each four consecutive integers and their number, the last ones filled up with zeros; returns the scale.
/// A row without a number worth speaking of (below 1e-30) is all zeros with scale 0.
pub(super) fn quantize(isa: Isa, x: &[f32], put: impl FnMut(usize, [i8; 4])) -> f32 {
    isa.dispatch(Quantize { x, put })
}

struct Quantize<'a, P> {
    x: &'a [f32],
    put: P,
}

impl<P: FnMut(usize, [i8; 4])> Kernel for Quantize<'_, P> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> f32 {
        let (chunks, rest) = self.x.as_chunks::<LANES>();
        let rest_vector = load_part(simd, rest);
        let mut largest = magnitude(simd, rest_vector);
        for x in chunks {
            largest = simd.max(magnitude(simd, simd.load(x)), largest);
        }
        let largest = simd.max_lane(largest);
        let (scale, inverse) = if largest < NEGLIGIBLE { (0.0, 0.0) } else { (largest / QUANTIZED_MAX, QUANTIZED_MAX / largest) };
        for (i, x) in chunks.iter().enumerate() {
            for (j, quad) in integers(simd, simd.load(x), inverse).into_iter().enumerate() {
                (self.put)(i * LANES / 4 + j, quad);
            }
        }
        let quads = integers(simd, rest_vector, inverse);
        for (j, quad) in quads.into_iter().take(rest.len().div_ceil(4)).enumerate() {
            (self.put)(chunks.len() * LANES / 4 + j, quad);
        }
        scale
    }
}

const QUANTIZED_MAX: f32 = 127.0;
/// Above it, 127 over the largest number is finite.
const NEGLIGIBLE: f32 = 1e-30;
/// 1.5 × 2^23: a small number added to it is rounded to an integer (ties to even), which is in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

#[inline(always)]
fn magnitude<S: Simd>(simd: S, x: S::V) -> S::V {
    simd.max(simd.sub(simd.zero(), x), x)
}

/// `round(x * inverse)`, four by four.
#[inline(always)]
fn integers<S: Simd>(simd: S, x: S::V, inverse: f32) -> [[i8; 4]; LANES / 4] {
    let rounded = simd.to_array(simd.fma(x, simd.splat(inverse), simd.splat(ROUND)));
    let mut quads = [[0; 4]; LANES / 4];
    for (i, rounded) in rounded.into_iter().enumerate() {
        quads[i / 4][i % 4] = rounded.to_bits() as i8;
    }
    quads
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    fn quantized(isa: Isa, x: &[f32]) -> (Vec<i8>, f32) {
        let mut all = vec![[i8::MIN; 4]; x.len().div_ceil(4)];
        let scale = quantize(isa, x, |quad, q| all[quad] = q);
        (all.concat(), scale)
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_of_255_steps_alike_everywhere() {
        for len in [1, 3, 4, 15, 16, 17, 50, 576] {
            let x: Vec<f32> = numbers(len, len as u64).iter().map(|x| 3.0 * x).collect();
            let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let (q, scale) = quantized(isa, &x);
                assert_eq!(scale, largest / 127.0);
                for (i, q) in q.iter().enumerate() {
                    let exact = x.get(i).map_or(0.0, |x| f64::from(*x) * f64::from(127.0 / largest));
                    assert_eq!(f64::from(*q), exact.round_ties_even(), "{i} of {len} on {isa}");
                }
                assert!(q.iter().any(|q| q.abs() == 127));
            }
        }
    }

    #[test]
    fn rows_of_nothing_are_zeros() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            assert_eq!(quantized(isa, &[0.0; 20]), (vec![0; 20], 0.0));
            assert_eq!(quantized(isa, &[-1e-40, 1e-35]), (vec![0; 4], 0.0));
            assert_eq!(quantized(isa, &[]), (vec![], 0.0));
        }
    }
}
