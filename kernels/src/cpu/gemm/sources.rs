//! Rows that are about to be quantized: as they are, in tiles, or normed.

use super::{float::activations::FloatActivations, int8::quantize::Source};
use crate::cpu::{
    elementwise::rms_scale,
    simd::{LANES, Simd},
};

/// Rows that are computed as they are read.
pub(super) trait Sources: Copy + Send + Sync {
    fn row<S: Simd>(&self, simd: S, row: usize) -> impl Source;
}

#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) x: &'a [f32],
    pub(super) cols: usize,
}

impl Sources for Rows<'_> {
    #[inline(always)]
    fn row<S: Simd>(&self, _: S, row: usize) -> impl Source {
        &self.x[row * self.cols..(row + 1) * self.cols]
    }
}

impl Sources for &FloatActivations {
    #[inline(always)]
    fn row<S: Simd>(&self, _: S, row: usize) -> impl Source {
        let rows = self.tiling.tile_of(row);
        TileRow { tile: self.words(&rows, 0..self.cols()), rows: rows.len(), index: row - rows.start }
    }
}

/// A row of a tile.
#[derive(Clone, Copy)]
struct TileRow<'a> {
    tile: &'a [u32],
    rows: usize,
    index: usize,
}

impl Source for TileRow<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.tile.len() / self.rows
    }

    #[inline(always)]
    fn vector<S: Simd>(&self, simd: S, i: usize) -> S::V {
        let mut lanes = [0.0; LANES];
        if self.rows == 1
            && let Some(words) = self.tile.as_chunks::<LANES>().0.get(i)
        {
            return simd.load(&words.map(f32::from_bits));
        }
        for (lane, column) in lanes.iter_mut().zip(self.tile.chunks_exact(self.rows).skip(i * LANES)) {
            *lane = f32::from_bits(column[self.index]);
        }
        simd.load(&lanes)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Norms<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) epsilon: f32,
}

impl Sources for Norms<'_> {
    #[inline(always)]
    fn row<S: Simd>(&self, simd: S, row: usize) -> impl Source {
        let width = self.weight.len();
        let x = &self.x[row * width..(row + 1) * width];
        Norm { x, weight: self.weight, scale: rms_scale(simd, x, self.epsilon) }
    }
}

/// `weight * (x * scale)`.
#[derive(Clone, Copy)]
struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    scale: f32,
}

impl Source for Norm<'_> {
    fn len(&self) -> usize {
        self.x.len()
    }

    #[inline(always)]
    fn vector<S: Simd>(&self, simd: S, i: usize) -> S::V {
        simd.mul(self.weight.vector(simd, i), simd.mul(self.x.vector(simd, i), simd.splat(self.scale)))
    }
}
