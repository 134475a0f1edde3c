//! The inputs of a causal convolution over a batch's chunks: the last ones before each chunk, which its state has, and then its rows'.

use super::{
    band::Band,
    states::{Pieces, States},
};
use std::ops::Range;

/// Inputs in a chunk's order, counted from the oldest that its state has. Rows' inputs are in their bands' `k`.
pub(super) struct ConvInputs<'a> {
    pub(super) bands: &'a [Band<'a>],
    pub(super) pieces: &'a Pieces,
    pub(super) states: &'a States,
    /// The part of a chunk's state that holds its `past` inputs, oldest first.
    pub(super) of: Range<usize>,
    /// Numbers of an input.
    pub(super) width: usize,
}

impl ConvInputs<'_> {
    /// Input `n` of a chunk.
    pub(super) fn get(&self, chunk: usize, n: usize) -> &[f32] {
        let width = self.width;
        match n.checked_sub(self.past()) {
            None => &self.states.get(chunk, &self.of)[n * width..(n + 1) * width],
            Some(row) => {
                let (band, row) = self.pieces.find(chunk, row);
                &self.bands[band].k[row * width..(row + 1) * width]
            }
        }
    }

    /// The last inputs of each chunk, as its state will have them.
    pub(super) fn last(&self) -> Vec<Vec<f32>> {
        let of_chunk = |chunk: usize| {
            let rows: usize = self.pieces.of_chunk(chunk).iter().map(|piece| piece.rows).sum();
            (rows..rows + self.past()).flat_map(|n| self.get(chunk, n)).copied().collect()
        };
        (0..self.pieces.chunks()).map(of_chunk).collect()
    }

    /// How many inputs a state has.
    fn past(&self) -> usize {
        self.of.len() / self.width
    }
}
