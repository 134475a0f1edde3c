//! The micro-kernel of products and attention: a tile of rows times a panel of 32 columns, all sums in registers.
//!
//! **One order.** A number of the result is a chain of fused multiply-adds over ascending lines of the panel, starting
//! from its previous sum; a bf16 line has two inputs, of which the odd one comes first (`panel`). Lanes lie along the
//! columns, so no two lanes ever meet: neither the width of the tile nor interrupting the chain (its sum stored and
//! loaded again) changes a bit.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use crate::cpu::{
    gemm::{
        panel::{PANEL, PanelFormat, steps},
        prefetch::WeightPrefetch,
    },
    simd::{Kernel, Simd},
};

/// The left operand: numbers that are broadcast to multiply 32 columns, one line of the panel after the other.
pub(crate) trait Broadcast<const T: usize>: Copy {
    /// The number of lines of the panel.
    fn len(self) -> usize;
    /// The left operand of line `l` of the panel for row `i` of the tile: the bits of an f32, or of two 16-bit numbers.
    fn at(self, l: usize, i: usize) -> u32;
}

/// `[line][T]`: a packed tile of activations or of queries.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows<'a, const T: usize>(pub(crate) &'a [[u32; T]]);

impl<const T: usize> Broadcast<T> for PackedRows<'_, T> {
    #[inline(always)]
    fn len(self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn at(self, l: usize, i: usize) -> u32 {
        self.0[l][i]
    }
}

/// The initial values of sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Zero,
    /// Their previous values.
    Sums,
}

/// `sums[i][j] += x.at(l, i) * w[l][j]` for ascending `l`, or `=`. `w` is `[line][PANEL]`, `sums` is `[T][PANEL]`.
#[inline(always)]
pub(crate) fn multiply_tile<S: Simd, P: PanelFormat, const T: usize>(
    simd: S,
    x: impl Broadcast<T>,
    w: &[P::Line],
    sums: &mut [[f32; PANEL]],
    start: Start,
    ahead: WeightPrefetch,
) {
    assert_eq!(x.len(), w.len(), "one line of the panel for each word of a row of x");
    simd.call(MicroKernel::<_, P, T> { x, w, sums: sums.first_chunk_mut().expect("sums of the whole tile"), start, ahead });
}

struct MicroKernel<'a, X, P: PanelFormat, const T: usize> {
    x: X,
    w: &'a [P::Line],
    sums: &'a mut [[f32; PANEL]; T],
    start: Start,
    ahead: WeightPrefetch,
}

impl<X: Broadcast<T>, P: PanelFormat, const T: usize> Kernel for MicroKernel<'_, X, P, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        if const { S::TILE_VECTORS == 2 } {
            self.vectors::<S, 2>(simd, 0);
        } else {
            self.vectors::<S, 1>(simd, 0);
            self.vectors::<S, 1>(simd, 1);
        }
    }
}

impl<X: Broadcast<T>, P: PanelFormat, const T: usize> MicroKernel<'_, X, P, T> {
    /// Computes `N` of the panel's vectors, from `first` on.
    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&mut self, simd: S, first: usize) {
        let Self { x, w, ref mut sums, start, mut ahead } = *self;
        let mut acc = [[simd.zero(); N]; T];
        if start == Start::Sums {
            for i in 0..T {
                for j in 0..N {
                    acc[i][j] = simd.load(&sums[i].as_chunks().0[first + j]);
                }
            }
        }
        for l in 0..w.len().min(x.len()) {
            ahead.issue(simd);
            step::<S, P, T, N, 0>(simd, x, l, &w[l], &mut acc, first);
            if const { steps::<S, P>() == 2 } {
                step::<S, P, T, N, 1>(simd, x, l, &w[l], &mut acc, first);
            }
        }
        for i in 0..T {
            for j in 0..N {
                simd.store(acc[i][j], &mut sums[i].as_chunks_mut().0[first + j]);
            }
        }
    }
}

/// Computes step `STEP` of line `l`.
#[inline(always)]
fn step<S: Simd, P: PanelFormat, const T: usize, const N: usize, const STEP: usize>(
    simd: S,
    x: impl Broadcast<T>,
    l: usize,
    line: &P::Line,
    acc: &mut [[S::V; N]; T],
    first: usize,
) {
    let mut vectors = [simd.zero(); N];
    for j in 0..N {
        vectors[j] = P::load::<S, STEP>(simd, line, first + j);
    }
    for i in 0..T {
        let x = P::splat::<S, STEP>(simd, x.at(l, i));
        for j in 0..N {
            acc[i][j] = P::add(simd, vectors[j], x, acc[i][j]);
        }
    }
}

/// `$body`, with `$T` a constant equal to `$rows`, which is at most the instruction set's `TILE_ROWS`.
macro_rules! with_tile_rows {
    ($S:ty, $rows:expr, $T:ident => $body:expr) => {
        $crate::cpu::gemm::micro_kernel::with_tile_rows!(@ $S, $rows, $T => $body; 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    (@ $S:ty, $rows:expr, $T:ident => $body:expr; $($n:literal)*) => {
        match $rows {
            $($n => if const { $n <= <$S>::TILE_ROWS } {
                const $T: usize = $n;
                $body
            },)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(crate) use with_tile_rows;
