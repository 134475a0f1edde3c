//! The inputs of a causal convolution over a batch's chunks: those kept in each chunk's state, followed by those of its rows.

use super::{
    band::Band,
    states::{Pieces, States},
};
use std::ops::Range;

/// The inputs of each chunk, counted from the oldest one in its state. The inputs of rows are in their bands' `k`.
pub(super) struct ConvInputs<'a> {
    pub(super) bands: &'a [Band<'a>],
    pub(super) pieces: &'a Pieces,
    pub(super) states: &'a States,
    /// The part of a chunk's state that holds its `past` inputs, oldest first.
    pub(super) of: Range<usize>,
    /// Numbers per input.
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

    /// The last inputs of each chunk, for its next state.
    pub(super) fn last(&self) -> Vec<Vec<f32>> {
        let of_chunk = |chunk: usize| {
            let rows: usize = self.pieces.of_chunk(chunk).iter().map(|piece| piece.rows).sum();
            (rows..rows + self.past()).flat_map(|n| self.get(chunk, n)).copied().collect()
        };
        (0..self.pieces.chunks()).map(of_chunk).collect()
    }

    /// The number of inputs in a state.
    fn past(&self) -> usize {
        self.of.len() / self.width
    }
}
