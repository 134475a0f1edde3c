//! Rows of activations, quantized, in the order in which the product reads them.

use super::{dot::DotUnit, quantize::quantize};
use crate::{cpu::Cpu, disjoint::Disjoint};
use std::ops::Range;

/// Quantized rows `[rows, cols]`; the memory is kept from use to use.
///
/// Rows go in tiles of a few neighbours, of nearly equal size, as many as there are registers for. Within a tile the same four
/// columns of its rows lie together, `[tile][four columns][row of the tile][column]`.
#[derive(Default)]
pub struct Int8Rows {
    unit: DotUnit,
    rows: usize,
    cols: usize,
    tiles: usize,
    quads: Vec<[i8; 4]>,
    scales: Vec<f32>,
    /// What each row's sums begin with.
    offsets: Vec<i32>,
}

impl Int8Rows {
    /// Quantizes `x`, `[rows, cols]`.
    pub fn quantize(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        self.quantize_for(DotUnit::of(cpu.isa()), cpu, x, cols);
    }

    pub(super) fn quantize_for(&mut self, unit: DotUnit, cpu: &Cpu, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows of {cols}");
        (self.unit, self.rows, self.cols) = (unit, x.len() / cols, cols);
        self.tiles = self.rows.div_ceil(unit.tile_rows());
        self.quads.resize(self.rows * cols.div_ceil(4), [0; 4]);
        self.scales.resize(self.rows, 0.0);
        self.offsets.resize(self.rows, 0);
        let mut quads = std::mem::take(&mut self.quads);
        let (mut scales, mut offsets) = (std::mem::take(&mut self.scales), std::mem::take(&mut self.offsets));
        {
            let (quads, scales, offsets) = (Disjoint::new(&mut quads), Disjoint::new(&mut scales), Disjoint::new(&mut offsets));
            let tiles_per_task = cpu.rows_per_task(cols).div_ceil(unit.tile_rows()).min(self.tiles.max(1));
            cpu.for_each(self.tiles.div_ceil(tiles_per_task), |task| {
                for tile in task * tiles_per_task..((task + 1) * tiles_per_task).min(self.tiles) {
                    let rows = self.tile(tile);
                    // SAFETY: tiles do not overlap.
                    let (quads, scales, offsets) =
                        unsafe { (quads.part(self.range(&rows)), scales.part(rows.clone()), offsets.part(rows.clone())) };
                    for (i, row) in rows.clone().enumerate() {
                        let mut sum = 0;
                        scales[i] = quantize(cpu.isa(), &x[row * cols..(row + 1) * cols], |quad, q| {
                            quads[quad * rows.len() + i] = q;
                            sum += q.iter().map(|q| i32::from(*q)).sum::<i32>();
                        });
                        offsets[i] = -128 * sum;
                    }
                }
            });
        }
        (self.quads, self.scales, self.offsets) = (quads, scales, offsets);
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// What they are laid out for.
    pub(super) fn unit(&self) -> DotUnit {
        self.unit
    }

    pub(super) fn tiles(&self) -> usize {
        self.tiles
    }

    /// The rows of a tile.
    #[inline(always)]
    pub(super) fn tile(&self, index: usize) -> Range<usize> {
        let start = |index| index * self.rows / self.tiles;
        start(index)..start(index + 1)
    }

    /// The tile of `rows`.
    #[inline(always)]
    pub(super) fn quads(&self, rows: &Range<usize>) -> &[[i8; 4]] {
        &self.quads[self.range(rows)]
    }

    #[inline(always)]
    fn range(&self, rows: &Range<usize>) -> Range<usize> {
        let quads = self.cols.div_ceil(4);
        rows.start * quads..rows.end * quads
    }

    #[inline(always)]
    pub(super) fn scale(&self, row: usize) -> f32 {
        self.scales[row]
    }

    /// -128 times the row's sum, for weights that are 128 too large.
    #[inline(always)]
    pub(super) fn offset(&self, row: usize) -> i32 {
        self.offsets[row]
    }
}
