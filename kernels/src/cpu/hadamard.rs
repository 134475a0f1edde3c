//! The Walsh-Hadamard transform, which spreads an outlier over its whole block before numbers are rounded to 8 bits.
//!
//! A block of `2^n` numbers is multiplied by the matrix `H` of +1 and -1 with `H Hᵀ = 2^n I`. An inner product stays the
//! same if both sides are transformed and one is divided by `2^n`, which is exact. Rounding to integers with a scale per
//! row costs less afterwards: a single large number no longer makes all others small (QuaRot: Ashkboos et al., 2024;
//! QuIP#: Tseng et al., 2024).
//!
//! Each of the `n` steps adds and subtracts pairs of numbers, with the distances 1, 2, 4, … within a pair: every
//! instruction set rounds alike.

use crate::cpu::{
    element::load_part,
    simd::{Kernel, LANES, Simd},
};

/// Largest block.
const BLOCK_MAX: usize = 128;

/// Vectors of the largest block.
const VECTORS_MAX: usize = BLOCK_MAX / LANES;

/// The block of rows of `len` numbers: the largest power of two that divides `len`, but at most [`BLOCK_MAX`].
#[inline(always)]
pub(crate) fn block_of(len: usize) -> usize {
    (1 << len.trailing_zeros().min(usize::BITS - 1)).min(BLOCK_MAX)
}

/// Transforms each block of a row of `len` numbers. The lanes after its end are zeros, and stay so.
#[inline(always)]
pub(crate) fn transform<S: Simd>(simd: S, len: usize, row: &mut [[f32; LANES]]) {
    simd.call(Transform { block: block_of(len), row });
}

struct Transform<'a> {
    block: usize,
    row: &'a mut [[f32; LANES]],
}

impl Kernel for Transform<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.block / LANES {
            0 => blocks::<S, 1>(simd, self.block, self.row),
            1 => blocks::<S, 1>(simd, LANES, self.row),
            2 => blocks::<S, 2>(simd, LANES, self.row),
            4 => blocks::<S, 4>(simd, LANES, self.row),
            _ => blocks::<S, VECTORS_MAX>(simd, LANES, self.row),
        }
    }
}

/// [`transform`]s a copy of `row` in `room`.
#[inline(always)]
pub(crate) fn transformed<'a, S: Simd>(simd: S, row: &[f32], room: &'a mut [[f32; LANES]]) -> &'a [f32] {
    let copy = &mut room[..row.len().div_ceil(LANES)];
    for (x, to) in row.chunks(LANES).zip(&mut *copy) {
        simd.store(load_part(simd, x), to);
    }
    transform(simd, row.len(), copy);
    &copy.as_flattened()[..row.len()]
}

/// Blocks of `N` vectors, or of `lanes` lanes within a vector.
#[inline(always)]
fn blocks<S: Simd, const N: usize>(simd: S, lanes: usize, row: &mut [[f32; LANES]]) {
    for block in row.as_chunks_mut::<N>().0 {
        let mut v = [simd.zero(); N];
        for i in 0..N {
            v[i] = within_vector(simd, lanes, simd.load(&block[i]));
        }
        let mut distance = 1;
        while distance < N {
            for i in 0..N {
                if i & distance == 0 {
                    (v[i], v[i + distance]) = (simd.add(v[i], v[i + distance]), simd.sub(v[i], v[i + distance]));
                }
            }
            distance *= 2;
        }
        for i in 0..N {
            simd.store(v[i], &mut block[i]);
        }
    }
}

/// The steps that pair lanes, with distances below `lanes`.
#[inline(always)]
fn within_vector<S: Simd>(simd: S, lanes: usize, mut v: S::V) -> S::V {
    if lanes > 1 {
        v = step::<S, 1>(simd, v);
    }
    if lanes > 2 {
        v = step::<S, 2>(simd, v);
    }
    if lanes > 4 {
        v = step::<S, 4>(simd, v);
    }
    if lanes > 8 {
        v = step::<S, 8>(simd, v);
    }
    v
}

/// Sums in the first lane of each pair, differences in the second.
#[inline(always)]
fn step<S: Simd, const STRIDE: usize>(simd: S, v: S::V) -> S::V {
    // A product with ±1 is exact, so this rounds once, as an addition does.
    simd.fma(v, simd.load(const { &signs(STRIDE) }), simd.swap_lanes::<STRIDE>(v))
}

/// -1 in the second lane of each pair.
const fn signs(stride: usize) -> [f32; LANES] {
    let (mut signs, mut lane) = ([1.0; LANES], 0);
    while lane < LANES {
        if lane & stride != 0 {
            signs[lane] = -1.0;
        }
        lane += 1;
    }
    signs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{
        isa::Isa,
        testing::{close, numbers},
    };

    struct OfRow<'a>(&'a [f32]);

    impl Kernel for OfRow<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<f32> {
            let mut row = vec![[0.0; LANES]; self.0.len().div_ceil(LANES)];
            row.as_flattened_mut()[..self.0.len()].copy_from_slice(self.0);
            transform(simd, self.0.len(), &mut row);
            assert!(row.as_flattened()[self.0.len()..].iter().all(|x| *x == 0.0));
            row.as_flattened()[..self.0.len()].to_vec()
        }
    }

    #[test]
    fn every_instruction_set_multiplies_each_block_by_the_matrix() {
        for len in [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 64, 80, 96, 128, 192, 256, 896] {
            let (x, block) = (numbers(len, len as u64), block_of(len));
            assert!(len.is_multiple_of(block) && (block == BLOCK_MAX || !len.is_multiple_of(2 * block)));
            let sign = |row: usize, column: usize| if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let number = |i: usize| -> f64 {
                let first = i / block * block;
                (0..block).map(|j| sign(i - first, j) * f64::from(x[first + j])).sum()
            };
            let mut results = Isa::testable().map(|isa| isa.dispatch(OfRow(&x)));
            let first = results.next().expect("portable code at least");
            close(&first, (0..len).map(number), 1e-5);
            assert!(results.all(|result| result == first), "the same bits everywhere: {len}");
        }
    }

    #[test]
    fn an_inner_product_stays_and_an_outlier_is_spread() {
        let (mut x, y) = (numbers(128, 1), numbers(128, 2));
        x[5] = 100.0;
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        let largest = |x: &[f32]| x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let (hx, hy) = (Isa::best().dispatch(OfRow(&x)), Isa::best().dispatch(OfRow(&y)));
        assert!((dot(&hx, &hy) / 128.0 - dot(&x, &y)).abs() < 1e-4);
        assert!(largest(&hx) / 128f32.sqrt() < 0.15 * largest(&x));
    }
}
