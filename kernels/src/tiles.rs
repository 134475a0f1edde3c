//! Rows of activations, in the order in which a matrix product reads them.
//!
//! Rows go in tiles of a few neighbours, as many as the registers hold sums for. Within a tile the numbers of one column lie
//! together, `[tile][column][row of the tile]`, so a tile's kernel walks through memory in one stream. Tiles are of nearly
//! equal size: 13 rows are 7 and 6, not 12 and 1.

use crate::{cpu::Cpu, disjoint::Disjoint, memory::Memory};
use std::ops::Range;

/// Where rows lie in tiles.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Tiling {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// How many tiles.
    pub(crate) tiles: usize,
}

impl Tiling {
    pub(crate) fn new(rows: usize, cols: usize, tile_rows_max: usize) -> Self {
        Self { rows, cols, tiles: rows.div_ceil(tile_rows_max) }
    }

    /// The rows of tile `index`.
    #[inline(always)]
    pub(crate) fn tile(&self, index: usize) -> Range<usize> {
        let start = |index| index * self.rows / self.tiles;
        start(index)..start(index + 1)
    }

    /// The rows of the tile that `row` is in.
    #[inline(always)]
    pub(crate) fn tile_of(&self, row: usize) -> Range<usize> {
        self.tile(((row + 1) * self.tiles - 1) / self.rows)
    }

    /// Where the tile of `rows` is in memory.
    #[inline(always)]
    pub(crate) fn numbers(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.cols..rows.end * self.cols
    }
}

/// Rows in tiles; the memory is kept from use to use.
#[derive(Default)]
pub struct Tiles {
    pub(crate) tiling: Tiling,
    data: Memory<f32>,
}

impl Tiles {
    pub fn rows(&self) -> usize {
        self.tiling.rows
    }

    pub fn cols(&self) -> usize {
        self.tiling.cols
    }

    /// Makes room for `[rows, cols]`, which have no meaning before they are written.
    pub fn resize(&mut self, cpu: &Cpu, rows: usize, cols: usize) {
        self.tiling = Tiling::new(rows, cols, cpu.isa().tile_rows());
        if self.data.as_slice().len() < rows * cols {
            self.data = Memory::new(rows * cols);
        }
    }

    /// Columns `cols` of the tile of `rows`.
    #[inline(always)]
    pub(crate) fn columns(&self, rows: &Range<usize>, cols: Range<usize>) -> &[f32] {
        let tile = &self.data.as_slice()[self.tiling.numbers(rows)];
        &tile[cols.start * rows.len()..cols.end * rows.len()]
    }

    /// For tasks that write different numbers.
    pub(crate) fn shared(&mut self) -> SharedTiles<'_> {
        SharedTiles { tiling: self.tiling, data: Disjoint::new(self.data.as_mut_slice()) }
    }

    /// `x`, which is `[rows, cols]`.
    pub fn copy_from(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows of {cols}");
        self.resize(cpu, x.len() / cols, cols);
        let tiles = self.shared();
        cpu.for_each(tiles.tiling.tiles, |index| {
            let rows = tiles.tiling.tile(index);
            for row in rows.clone() {
                // SAFETY: each task has the rows of one tile.
                unsafe { tiles.put(&rows, row, 0, &x[row * cols..(row + 1) * cols]) };
            }
        });
    }

    /// The rows, one after the other.
    #[cfg(test)]
    pub(crate) fn to_rows(&self) -> Vec<f32> {
        let number = |row: usize, col: usize| {
            let rows = self.tiling.tile_of(row);
            self.columns(&rows, col..col + 1)[row - rows.start]
        };
        (0..self.rows()).flat_map(|row| (0..self.cols()).map(move |col| number(row, col))).collect()
    }
}

/// [`Tiles`] being written by several tasks.
pub(crate) struct SharedTiles<'a> {
    pub(crate) tiling: Tiling,
    data: Disjoint<'a, f32>,
}

impl SharedTiles<'_> {
    /// Writes `values` into row `row`, which is in the tile of `tile`, from column `col` on.
    ///
    /// # Safety
    /// No two tasks may write the same columns of a row.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, tile: &Range<usize>, row: usize, col: usize, values: &[f32]) {
        assert!(tile.contains(&row) && col + values.len() <= self.tiling.cols);
        let start = self.tiling.numbers(tile).start + col * tile.len() + (row - tile.start);
        for (i, value) in values.iter().enumerate() {
            // SAFETY: within the tile by the assertion above; written by this task only, as the caller promises.
            unsafe { self.data.write(start + i * tile.len(), *value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_of_nearly_equal_size_and_every_row_is_in_its_tile() {
        for rows in 1..200 {
            for most in [1, 2, 6, 12] {
                let tiling = Tiling::new(rows, 3, most);
                let sizes: Vec<usize> = (0..tiling.tiles).map(|i| tiling.tile(i).len()).collect();
                assert!(sizes.iter().sum::<usize>() == rows && sizes.iter().all(|n| (1..=most).contains(n)));
                assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
                assert!((0..rows).all(|row| tiling.tile_of(row).contains(&row)));
            }
        }
    }

    #[test]
    fn columns_of_a_tile_lie_together() {
        let cpu = Cpu::new(Some(crate::Isa::Portable), 1).unwrap();
        let x: Vec<f32> = (0..35).map(|i| i as f32).collect();
        let mut tiles = Tiles::default();
        tiles.copy_from(&cpu, &x, 5);
        assert_eq!((tiles.rows(), tiles.cols()), (7, 5));
        assert_eq!(tiles.to_rows(), x);
        for index in 0..tiles.tiling.tiles {
            let rows = tiles.tiling.tile(index);
            let expected: Vec<f32> = (1..4).flat_map(|col| rows.clone().map(move |row| (row * 5 + col) as f32)).collect();
            assert_eq!(tiles.columns(&rows, 1..4), expected);
        }
    }
}
