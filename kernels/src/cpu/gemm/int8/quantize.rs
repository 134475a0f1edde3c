//! Quantizing one row of f32 to 8-bit integers and a scale.

use crate::cpu::{
    element::load_part,
    hadamard,
    isa::Isa,
    simd::{Kernel, LANES, Simd},
};

/// A row whose numbers can be read 16 at a time, repeatedly.
pub(crate) trait Source: Copy {
    fn len(&self) -> usize;
    /// Numbers `16 i` to `16 i + 15`, zeros after the last.
    fn vector<S: Simd>(&self, simd: S, i: usize) -> S::V;
}

impl Source for &[f32] {
    fn len(&self) -> usize {
        <[f32]>::len(self)
    }

    #[inline(always)]
    fn vector<S: Simd>(&self, simd: S, i: usize) -> S::V {
        let (chunks, rest) = self.as_chunks::<LANES>();
        match chunks.get(i) {
            Some(chunk) => simd.load(chunk),
            None => load_part(simd, rest),
        }
    }
}

/// A quantized row's scale and sum.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct Quantized {
    /// The factor of the integers; 0 if all numbers are negligible (below 1e-30).
    pub(super) scale: f32,
    /// Sum of the integers.
    pub(super) sum: i32,
}

/// Transforms the row ([`hadamard`]) and writes groups of four integers to every `stride`th place of `to`, padded with
/// zeros.
pub(super) fn quantize(isa: Isa, row: &[f32], to: &mut [[i8; 4]], stride: usize) -> Quantized {
    let mut transformed = vec![[0.0; LANES]; row.len().div_ceil(LANES)];
    isa.dispatch(Quantize { row, transformed: &mut transformed, to, stride })
}

struct Quantize<'a> {
    row: &'a [f32],
    transformed: &'a mut [[f32; LANES]],
    to: &'a mut [[i8; 4]],
    stride: usize,
}

impl Kernel for Quantize<'_> {
    type Output = Quantized;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Quantized {
        quantize_on(simd, self.row, self.transformed, self.to, self.stride)
    }
}

/// [`quantize`], inside a kernel. `transformed` has room for the row's vectors.
#[inline(always)]
pub(super) fn quantize_on<S: Simd>(
    simd: S,
    row: impl Source,
    transformed: &mut [[f32; LANES]],
    to: &mut [[i8; 4]],
    stride: usize,
) -> Quantized {
    let transformed = &mut transformed[..row.len().div_ceil(LANES)];
    for (i, to) in transformed.iter_mut().enumerate() {
        simd.store(row.vector(simd, i), to);
    }
    hadamard::transform(simd, row.len(), transformed);
    let row = &transformed.as_flattened()[..row.len()];
    let (scale, inverse) = scale_of(simd, row);
    let mut sums = simd.zero();
    for i in 0..row.len().div_ceil(LANES) {
        let rounded = simd.fma(row.vector(simd, i), simd.splat(inverse), simd.splat(ROUND));
        // This is exact: the sum is far below 2^24 in every lane.
        sums = simd.add(sums, simd.sub(rounded, simd.splat(ROUND)));
        let integers = simd.to_array(rounded).map(|x| x.to_bits() as i8);
        let quads: &[[i8; 4]; QUADS] = integers.as_chunks().0.as_array().expect("four of four");
        let first = i * QUADS * stride;
        match to.get_mut(first..first + (QUADS - 1) * stride + 1) {
            Some(places) if stride == 1 => places.copy_from_slice(quads),
            Some(places) => quads.iter().enumerate().for_each(|(j, quad)| places[j * stride] = *quad),
            None => to[first..].iter_mut().step_by(stride).zip(quads).for_each(|(place, quad)| *place = *quad),
        }
    }
    Quantized { scale, sum: simd.to_array(sums).into_iter().map(|sum| sum as i32).sum() }
}

/// Groups of four integers in a vector.
const QUADS: usize = LANES / 4;

/// The scale of a row's integers, and its inverse.
#[inline(always)]
pub(crate) fn scale_of<S: Simd>(simd: S, row: impl Source) -> (f32, f32) {
    let mut largest = simd.zero();
    for i in 0..row.len().div_ceil(LANES) {
        let x = row.vector(simd, i);
        largest = simd.max(simd.max(x, simd.sub(simd.zero(), x)), largest);
    }
    scale_and_inverse::<{ i8::MAX as i16 }>(simd.max_lane(largest))
}

/// The scale that turns integers up to `MAX` into numbers up to `largest`, and its inverse.
#[inline(always)]
pub(crate) fn scale_and_inverse<const MAX: i16>(largest: f32) -> (f32, f32) {
    let integer = f32::from(MAX);
    if largest < NEGLIGIBLE { (0.0, 0.0) } else { (largest / integer, integer / largest) }
}

/// The bound above which the largest integer divided by the largest number is finite.
const NEGLIGIBLE: f32 = 1e-30;
/// 1.5 × 2^23: adding it rounds a small number to an integer (ties to even), in the low bits of the sum.
pub(crate) const ROUND: f32 = 12_582_912.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{numbers, transformed};

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::testable()
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_of_255_steps_alike_everywhere() {
        for len in [1, 3, 4, 15, 16, 17, 50, 576] {
            let x: Vec<f32> = numbers(len, len as u64).iter().map(|x| 3.0 * x).collect();
            let t = transformed(&x);
            let largest = t.iter().fold(0.0f32, |a, t| a.max(t.abs()));
            for isa in isas() {
                let mut to = vec![[i8::MIN; 4]; 3 * len.div_ceil(4)];
                let Quantized { scale, sum } = quantize(isa, &x, &mut to, 3);
                let q: Vec<i8> = to.iter().copied().step_by(3).flatten().collect();
                assert_eq!(scale, largest / 127.0);
                assert_eq!(sum, q.iter().map(|q| i32::from(*q)).sum());
                for (i, q) in q.iter().enumerate() {
                    let exact = t.get(i).map_or(0.0, |t| f64::from(*t) * f64::from(127.0 / largest));
                    assert_eq!(f64::from(*q), exact.round_ties_even(), "{i} of {len} on {isa}");
                }
                assert!(q.iter().any(|q| q.abs() == 127));
                assert!(to.iter().enumerate().all(|(i, quad)| i % 3 == 0 || *quad == [i8::MIN; 4]), "other places are untouched");
            }
        }
    }

    #[test]
    fn rows_of_nothing_are_zeros() {
        for isa in isas() {
            for (x, quads) in [(&[0.0; 20][..], 5), (&[-1e-40, 1e-35], 1), (&[], 0)] {
                let mut to = vec![[1; 4]; quads];
                assert_eq!(quantize(isa, x, &mut to, 1), Quantized::default());
                assert_eq!(to, vec![[0; 4]; quads]);
            }
        }
    }
}
