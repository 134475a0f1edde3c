//! Activations, packed in the order in which a product reads them.
//!
//! Neighbouring rows form tiles, as many rows as the registers hold sums for. A tile keeps the numbers of one column
//! together, `[tile][column][row of the tile]`, so its kernel walks through memory in one stream. For bf16 weights,
//! numbers are rounded to bf16 and two columns share a word, `[tile][two columns][row of the tile]`, padded with zeros.
//! Tiles are of nearly equal size: 13 rows are 7 and 6, not 12 and 1.
//!
//! If products are added in blocks ([`Bf16Products::Blocks`]), rows for bf16 weights are stored one after the other, `[row][two columns]`,
//! padded with zeros to whole blocks, as AMX loads its tiles row by row.

use crate::cpu::gemm::tiling::Tiling;
use crate::{
    cpu::{
        Cpu, bf16,
        isa::Bf16Products,
        memory::Memory,
        simd::{LANES, Simd, portable::Portable},
        threads::disjoint::Disjoint,
    },
    dtype::Dtype,
};
use std::ops::Range;

/// Packed rows, whose memory is reused. The default is for f32 and f16 weights.
#[derive(Default)]
pub struct FloatActivations {
    /// The tiling, in words.
    pub(crate) tiling: Tiling,
    cols: usize,
    /// Whether a word holds two numbers rounded to bf16, instead of one in f32.
    paired: bool,
    /// Whether rows are stored one after the other.
    by_row: bool,
    /// Whether each row is a tile of its own.
    apart: bool,
    words: Memory<u32>,
}

impl FloatActivations {
    /// Activations for numbers in f32 that are not multiplied, but read row by row.
    pub fn rows_apart() -> Self {
        Self { apart: true, ..Self::default() }
    }

    /// Activations for weights of this type: rounded to bf16 for bf16 weights, in f32 for others.
    pub fn for_weights(dtype: Dtype) -> Self {
        Self { paired: dtype == Dtype::Bf16, ..Self::default() }
    }

    pub(crate) fn are_for(&self, weights: Dtype) -> bool {
        self.paired == (weights == Dtype::Bf16)
    }

    pub fn rows(&self) -> usize {
        self.tiling.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Makes room for `[rows, cols]`, whose contents are undefined until written.
    pub fn resize(&mut self, cpu: &Cpu, rows: usize, cols: usize) {
        self.by_row = self.paired && cpu.isa().bf16_products() == Bf16Products::Blocks;
        let (words, tile_rows) = match (self.paired, self.by_row) {
            (false, _) => (cols, if self.apart { 1 } else { cpu.isa().tile_rows() }),
            (true, false) => (cols.div_ceil(2), cpu.isa().tile_rows()),
            (true, true) => (cols.div_ceil(2 * BLOCK_WORDS) * BLOCK_WORDS, 2 * BLOCK_ROWS),
        };
        (self.cols, self.tiling) = (cols, Tiling::new(rows, words, tile_rows));
        let room = if self.by_row { (rows + BLOCK_ROWS - 1) * words } else { rows * words };
        if self.words.as_slice().len() < room {
            self.words = Memory::new(room);
        }
    }

    /// Whether rows are stored one after the other.
    pub(crate) fn are_by_row(&self) -> bool {
        self.by_row
    }

    /// Words from word `word` of row `row` on, if rows are stored one after the other. Padding follows the last row, so that every row
    /// begins a whole block of [`BLOCK_ROWS`].
    pub(crate) fn words_from(&self, row: usize, word: usize) -> &[u32] {
        assert!(self.by_row);
        &self.words.as_slice()[row * self.tiling.cols + word..]
    }

    /// Words `words` of each row of the tile of `rows`.
    #[inline(always)]
    pub(crate) fn words(&self, rows: &Range<usize>, words: Range<usize>) -> &[u32] {
        let tile = &self.words.as_slice()[self.tiling.numbers(rows)];
        &tile[words.start * rows.len()..words.end * rows.len()]
    }

    /// A view for tasks that write different numbers.
    pub(crate) fn shared(&mut self) -> SharedActivations<'_> {
        let Self { tiling, cols, paired, by_row, .. } = *self;
        SharedActivations { tiling, cols, paired, by_row, words: Disjoint::new(self.words.as_mut_slice()) }
    }

    /// Packs `x`, `[rows, cols]`.
    pub fn copy_from(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows of {cols}");
        self.resize(cpu, x.len() / cols, cols);
        let tiles = self.shared();
        cpu.for_each(tiles.tiling.tiles, |index| {
            let rows = tiles.tiling.tile(index);
            for row in rows.clone() {
                // SAFETY: each task has the rows of one tile.
                unsafe { tiles.put(Portable, &rows, row, 0, &x[row * cols..(row + 1) * cols]) };
            }
        });
    }

    /// Appends columns `cols` of every row to `to`, if rows are [apart](Self::rows_apart).
    pub fn append_columns(&self, cols: Range<usize>, to: &mut Vec<f32>) {
        assert!(self.apart && !self.paired, "each row is a tile of its own, in f32");
        for row in 0..self.rows() {
            to.extend(self.words(&(row..row + 1), cols.clone()).iter().map(|word| f32::from_bits(*word)));
        }
    }

    /// The unpacked rows: `[rows, cols]`.
    pub fn to_rows(&self) -> Vec<f32> {
        let word = |row: usize, word: usize| {
            if self.by_row {
                return self.words_from(row, word)[0];
            }
            let rows = self.tiling.tile_of(row);
            self.words(&rows, word..word + 1)[row - rows.start]
        };
        let number = |row: usize, col: usize| {
            f32::from_bits(match (self.paired, col % 2) {
                (false, _) => word(row, col),
                (true, 0) => word(row, col / 2) << 16,
                (true, _) => word(row, col / 2) & 0xffff_0000,
            })
        };
        (0..self.rows()).flat_map(|row| (0..self.cols()).map(move |col| number(row, col))).collect()
    }
}

/// Rows of a block that AMX loads at once.
pub(crate) const BLOCK_ROWS: usize = 16;
/// Words of each row of a block.
const BLOCK_WORDS: usize = 16;

/// [`FloatActivations`] that several tasks write.
pub(crate) struct SharedActivations<'a> {
    /// The tiling, in words.
    pub(crate) tiling: Tiling,
    cols: usize,
    paired: bool,
    by_row: bool,
    words: Disjoint<'a, u32>,
}

impl SharedActivations<'_> {
    /// Writes `values` into row `row` of tile `tile` from column `col` on. The range begins at an even column and ends before an even one
    /// or at the last.
    ///
    /// # Safety
    /// No two tasks may write the same columns of a row.
    #[inline(always)]
    pub(crate) unsafe fn put<S: Simd>(&self, simd: S, tile: &Range<usize>, row: usize, col: usize, values: &[f32]) {
        let end = col + values.len();
        assert!(tile.contains(&row) && end <= self.cols);
        let (start, step) = match self.by_row {
            true => (row * self.tiling.cols, 1),
            false => (self.tiling.numbers(tile).start + (row - tile.start), tile.len()),
        };
        // SAFETY: within the tile by the assertion above; no other task writes it, as the caller promises.
        let write = |word: usize, bits: u32| unsafe { self.words.write(start + word * step, bits) };
        // SAFETY: as above; words lie one after the other, and this is the only part alive.
        let part = |words: Range<usize>| unsafe { self.words.part(start + words.start..start + words.end) };
        if !self.paired {
            match step {
                1 => part(col..end).iter_mut().zip(values).for_each(|(word, value)| *word = value.to_bits()),
                _ => values.iter().enumerate().for_each(|(i, value)| write(col + i, value.to_bits())),
            }
            return;
        }
        assert!(col.is_multiple_of(2) && (end.is_multiple_of(2) || end == self.cols), "no other task writes half of a word");
        let (vectors, rest) = values.as_chunks::<LANES>();
        for (i, vector) in vectors.iter().enumerate() {
            let (first, pairs) = ((col + i * LANES) / 2, simd.to_bf16_pairs(simd.load(vector)));
            match step {
                1 => part(first..first + pairs.len()).copy_from_slice(&pairs),
                _ => pairs.into_iter().enumerate().for_each(|(j, pair)| write(first + j, pair)),
            }
        }
        for (i, pair) in rest.chunks(2).enumerate() {
            write((end - rest.len()) / 2 + i, bf16::pair(pair[0], pair.get(1).copied().unwrap_or(0.0)));
        }
        if self.by_row && end == self.cols {
            (end.div_ceil(2)..self.tiling.cols).for_each(|word| write(word, 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_tile_lie_together() {
        let cpu = Cpu::new(Some(crate::Isa::Portable), 1).unwrap();
        let x: Vec<f32> = (0..35).map(|i| i as f32).collect();
        let mut tiles = FloatActivations::default();
        tiles.copy_from(&cpu, &x, 5);
        assert_eq!((tiles.rows(), tiles.cols()), (7, 5));
        assert_eq!(tiles.to_rows(), x);
        for index in 0..tiles.tiling.tiles {
            let rows = tiles.tiling.tile(index);
            let expected: Vec<u32> = (1..4).flat_map(|col| rows.clone().map(move |row| ((row * 5 + col) as f32).to_bits())).collect();
            assert_eq!(tiles.words(&rows, 1..4), expected);
        }
    }

    #[test]
    fn for_bf16_weights_two_columns_share_a_word_and_the_last_has_a_zero_beside_it() {
        let cpu = Cpu::new(Some(crate::Isa::Portable), 1).unwrap();
        let mut tiles = FloatActivations::for_weights(Dtype::Bf16);
        // Reused memory is not zeroed.
        tiles.copy_from(&cpu, &[7.0; 9 * 40], 40);
        for cols in [1, 2, 5, 16, 33, 40] {
            let x: Vec<f32> = (0..9 * cols).map(|i| i as f32 * 0.37).collect();
            tiles.copy_from(&cpu, &x, cols);
            assert_eq!((tiles.rows(), tiles.cols()), (9, cols));
            assert_eq!(tiles.to_rows(), x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect::<Vec<_>>());
            for index in 0..tiles.tiling.tiles {
                let rows = tiles.tiling.tile(index);
                let words = cols.div_ceil(2);
                for (row, word) in rows.clone().zip(tiles.words(&rows, words - 1..words)) {
                    let last = &x[row * cols + 2 * (words - 1)..(row + 1) * cols];
                    assert_eq!(*word, bf16::pair(last[0], last.get(1).copied().unwrap_or(0.0)));
                }
            }
        }
    }
}
