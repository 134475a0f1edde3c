//! Rows cut into tiles of nearly equal size.

use std::ops::Range;

/// The layout of rows in tiles.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Tiling {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Number of tiles.
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

    /// The rows of the tile that holds `row`.
    #[inline(always)]
    pub(crate) fn tile_of(&self, row: usize) -> Range<usize> {
        self.tile(((row + 1) * self.tiles - 1) / self.rows)
    }

    /// The range of the tile of `rows` in memory.
    #[inline(always)]
    pub(crate) fn numbers(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.cols..rows.end * self.cols
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
}
