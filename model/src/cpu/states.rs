//! The states of a batch's chunks, which layers keep that have no keys and values: read from blocks before the batch and written after it.
//! And where each chunk's rows are, since such layers go through them in order.

use super::{band::Band, forward::Chunk};
use std::ops::Range;
use tidemill_kernels::cpu::kv::KvMemory;

/// `[chunks, numbers of a state]`; a state is `[layers, their numbers]`.
pub(super) struct States {
    numbers: usize,
    data: Vec<f32>,
}

impl States {
    /// Of sequences that begin with a chunk, zeros; of others what their blocks hold.
    ///
    /// # Panics
    /// If a chunk names no state, or too few blocks.
    pub(super) fn load(chunks: &[Chunk<'_>], numbers: usize, kv: &KvMemory) -> Self {
        let mut data = Vec::with_capacity(chunks.len() * numbers);
        let block_numbers = (kv.layout().block_bytes() / size_of::<f32>()).max(1);
        for chunk in chunks.iter().filter(|_| numbers > 0) {
            assert_eq!(chunk.state.from.is_none(), chunk.start == 0, "a state is zeros before the first token, and nowhere else");
            assert!(chunk.state.to.len() * block_numbers >= numbers, "a state goes to blocks of its size");
            let end = data.len() + numbers;
            for block in chunk.state.from.unwrap_or_default() {
                let bytes = kv.block(*block).as_chunks().0;
                data.extend(bytes.iter().take(end - data.len()).map(|bytes| f32::from_le_bytes(*bytes)));
            }
            assert!(chunk.state.from.is_none() || data.len() == end, "a state comes from blocks of its size");
            data.resize(end, 0.0);
        }
        Self { numbers, data }
    }

    /// Writes each chunk's state to its blocks; what the last one has beyond it becomes zeros.
    pub(super) fn store(&self, chunks: &[Chunk<'_>], kv: &mut KvMemory) {
        if self.numbers == 0 {
            return;
        }
        for (chunk, state) in chunks.iter().zip(self.data.chunks_exact(self.numbers)) {
            let mut rest = state.iter();
            for block in chunk.state.to {
                for bytes in kv.block_mut(*block).as_chunks_mut().0 {
                    *bytes = rest.next().map_or([0; 4], |number| number.to_le_bytes());
                }
            }
        }
    }

    /// The part `of` a chunk's state that one layer keeps.
    pub(super) fn get(&self, chunk: usize, of: &Range<usize>) -> &[f32] {
        &self.data[chunk * self.numbers..][of.clone()]
    }

    pub(super) fn get_mut(&mut self, chunk: usize, of: &Range<usize>) -> &mut [f32] {
        &mut self.data[chunk * self.numbers..][of.clone()]
    }
}

/// Consecutive rows of a chunk in one band.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) chunk: usize,
    pub(super) band: usize,
    /// The first of them in the band, and in the chunk.
    pub(super) first: usize,
    pub(super) start: usize,
    pub(super) rows: usize,
}

impl Piece {
    /// The rows' places in the chunk.
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.rows
    }
}

/// Where the rows of a batch's chunks are, in order.
pub(super) struct Pieces(Vec<Piece>);

impl Pieces {
    pub(super) fn new(chunks: &[Chunk<'_>], bands: &[Band<'_>]) -> Self {
        let (mut pieces, mut chunk, mut start) = (Vec::new(), 0, 0);
        for (band, rows) in bands.iter().enumerate() {
            let mut first = 0;
            for span in &rows.spans {
                pieces.push(Piece { chunk, band, first, start, rows: span.rows });
                (first, start) = (first + span.rows, start + span.rows);
                if start == chunks[chunk].tokens.len() {
                    (chunk, start) = (chunk + 1, 0);
                }
            }
        }
        Self(pieces)
    }

    pub(super) fn of_band(&self, band: usize) -> &[Piece] {
        let end = |band| self.0.partition_point(|piece| piece.band < band);
        &self.0[end(band)..end(band + 1)]
    }

    pub(super) fn of_chunk(&self, chunk: usize) -> &[Piece] {
        let end = |chunk| self.0.partition_point(|piece| piece.chunk < chunk);
        &self.0[end(chunk)..end(chunk + 1)]
    }

    /// Number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.0.last().map_or(0, |piece| piece.chunk + 1)
    }

    /// The band of a chunk's row, and its place there.
    pub(super) fn find(&self, chunk: usize, row: usize) -> (usize, usize) {
        let pieces = self.of_chunk(chunk);
        let piece = &pieces[pieces.partition_point(|piece| piece.range().end <= row)];
        (piece.band, piece.first + row - piece.start)
    }
}
