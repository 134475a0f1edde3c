//! The inner loop of everything that multiplies: a tile of rows times a panel of 32 columns, with all sums in registers.
//!
//! **The one order.** A number of the result is a chain of fused multiply-adds over ascending k, from whatever its sum was
//! before. Lanes lie along the columns, so no lane ever meets another, and neither the width of the tile nor where the chain is
//! interrupted (its sum stored and loaded again) changes a bit.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use crate::{
    dtype::Element,
    simd::{LANES, Simd},
};

/// Columns of a panel: two vectors.
pub(crate) const PANEL: usize = 2 * LANES;

/// `sums[i][j] += x[l][i] * w[l][j]` for ascending `l`: `x` is `[k][T]`, `w` is `[k][PANEL]`.
#[inline(always)]
pub(crate) fn tile<S: Simd, E: Element, const T: usize>(simd: S, x: &[f32], w: &[E::Pair], sums: &mut [[f32; PANEL]], ahead: Ahead) {
    let (x, sums) = (x.as_chunks::<T>().0, sums.first_chunk_mut::<T>().expect("sums of the whole tile"));
    assert_eq!(x.len(), w.len(), "one row of the panel for each column of x");
    if S::TILE_VECTORS == 2 {
        vectors::<S, E, T, 2>(simd, x, w, sums, 0, ahead);
    } else {
        vectors::<S, E, T, 1>(simd, x, w, sums, 0, ahead);
        vectors::<S, E, T, 1>(simd, x, w, sums, 1, ahead);
    }
}

/// `N` of the panel's vectors, from `first` on.
#[inline(always)]
fn vectors<S: Simd, E: Element, const T: usize, const N: usize>(
    simd: S,
    x: &[[f32; T]],
    w: &[E::Pair],
    sums: &mut [[f32; PANEL]; T],
    first: usize,
    mut ahead: Ahead,
) {
    let mut acc = [[simd.zero(); N]; T];
    for i in 0..T {
        for j in 0..N {
            acc[i][j] = simd.load(&sums[i].as_chunks().0[first + j]);
        }
    }
    for (x, w) in x.iter().zip(w) {
        simd.prefetch(ahead.next);
        ahead.next = ahead.next.wrapping_add(ahead.step);
        let mut vectors = [simd.zero(); N];
        for j in 0..N {
            vectors[j] = E::load_half(simd, w, first + j);
        }
        for i in 0..T {
            let x = simd.splat(x[i]);
            for j in 0..N {
                acc[i][j] = simd.fma(x, vectors[j], acc[i][j]);
            }
        }
    }
    for i in 0..T {
        for j in 0..N {
            simd.store(acc[i][j], &mut sums[i].as_chunks_mut().0[first + j]);
        }
    }
}

/// Weights to ask memory for while a tile is computed.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    next: *const u8,
    /// Bytes further for each row of the panel.
    step: usize,
}

impl Ahead {
    /// For a panel that streams through once: what comes a little later.
    #[inline(always)]
    pub(crate) fn within<P>(panel: &[P]) -> Self {
        Self { next: panel.as_ptr().cast::<u8>().wrapping_add(STREAM_AHEAD_BYTES), step: size_of::<P>() }
    }

    /// For a panel of `len` rows that stays in the cache for several tiles: tile `nth` of them asks for its share of the next.
    #[inline(always)]
    pub(crate) fn share_of<P>(next: &[P], len: usize, nth: usize, tiles: usize) -> Self {
        let start = len * size_of::<P>() * nth / tiles;
        Self { next: next.as_ptr().cast::<u8>().wrapping_add(start), step: size_of::<P>() / tiles }
    }
}

/// Measured: 2 KiB are too little for a memory that answers after 100 ns, and 16 KiB no better.
const STREAM_AHEAD_BYTES: usize = 8192;

/// `$body` with `$T` a constant equal to `$rows`, which is at most `$most`.
macro_rules! with_tile_rows {
    ($rows:expr, $most:expr, $T:ident => $body:expr) => {
        $crate::tile::with_tile_rows!(@ $rows, $most, $T => $body; 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    (@ $rows:expr, $most:expr, $T:ident => $body:expr; $($n:literal)*) => {
        match $rows {
            $($n if $n <= $most => {
                const $T: usize = $n;
                $body
            })*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(crate) use with_tile_rows;
