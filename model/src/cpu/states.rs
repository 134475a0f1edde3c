//! The states of a batch's chunks, kept by layers without keys and values: read from blocks before the batch and written after it. The
//! module also locates each chunk's rows, as such layers process them in order.

use super::{band::Band, forward::Chunk};
use std::ops::Range;
use tidemill_kernels::{Cpu, cpu::kv::KvMemory};

/// `[chunks, numbers of a state]`; a state is `[layers, numbers of a layer]`.
pub(super) struct States {
    numbers: usize,
    data: Vec<f32>,
}

impl States {
    /// Loads the states of `chunks`: zeros for a chunk that begins its sequence, the contents of its blocks for others. `memory`, left by
    /// earlier states, is reused.
    ///
    /// # Panics
    /// If a chunk names no state, or too few blocks.
    pub(super) fn load(cpu: &Cpu, chunks: &[Chunk<'_>], numbers: usize, kv: &KvMemory, memory: Vec<f32>) -> Self {
        let mut data = memory;
        if numbers == 0 {
            return Self { numbers, data };
        }
        data.resize(chunks.len() * numbers, 0.0);
        let block_numbers = block_numbers(kv);
        let blocks = numbers.div_ceil(block_numbers);
        let mut parts: Vec<(Option<u32>, &mut [f32])> = Vec::with_capacity(chunks.len() * blocks);
        for (chunk, state) in chunks.iter().zip(data.chunks_exact_mut(numbers)) {
            assert_eq!(chunk.state.from.is_none(), chunk.start == 0, "a state is zeros before the first token, and nowhere else");
            assert!(chunk.state.to.len() >= blocks, "a state goes to blocks of its size");
            assert!(chunk.state.from.is_none_or(|from| from.len() >= blocks), "a state comes from blocks of its size");
            let from = (0..blocks).map(|nth| chunk.state.from.map(|from| from[nth]));
            parts.extend(from.zip(state.chunks_mut(block_numbers)));
        }
        cpu.for_each_mut(&mut parts, |(block, part)| match block {
            None => part.fill(0.0),
            Some(block) => {
                let numbers = kv.block(*block).as_chunks().0;
                part.iter_mut().zip(numbers).for_each(|(number, bytes)| *number = f32::from_le_bytes(*bytes));
            }
        });
        Self { numbers, data }
    }

    /// Writes each chunk's state to its blocks, padded with zeros in the last one. Returns the memory.
    ///
    /// # Panics
    /// If two chunks name the same block.
    pub(super) fn store(self, cpu: &Cpu, chunks: &[Chunk<'_>], kv: &mut KvMemory) -> Vec<f32> {
        if self.numbers == 0 {
            return self.data;
        }
        let block_numbers = block_numbers(kv);
        let ids: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.state.to).copied().collect();
        let mut blocks = kv.blocks_mut(&ids).into_iter();
        let mut parts: Vec<(&[f32], &mut [u8])> = Vec::with_capacity(ids.len());
        for (chunk, state) in chunks.iter().zip(self.data.chunks_exact(self.numbers)) {
            let from = (0..chunk.state.to.len()).map(|nth| state.get(nth * block_numbers..).unwrap_or_default());
            parts.extend(from.zip(&mut blocks));
        }
        cpu.for_each_mut(&mut parts, |(from, block)| {
            let numbers = block.as_chunks_mut().0;
            let (state, rest) = numbers.split_at_mut(from.len().min(numbers.len()));
            state.iter_mut().zip(*from).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
            rest.fill([0; 4]);
        });
        self.data
    }

    /// The part `of` a chunk's state that one layer keeps.
    pub(super) fn get(&self, chunk: usize, of: &Range<usize>) -> &[f32] {
        &self.data[chunk * self.numbers..][of.clone()]
    }

    /// The part `of` each chunk's state.
    pub(super) fn parts_mut(&mut self, of: &Range<usize>) -> impl Iterator<Item = &mut [f32]> {
        self.data.chunks_exact_mut(self.numbers).map(|state| &mut state[of.clone()])
    }

    pub(super) fn get_mut(&mut self, chunk: usize, of: &Range<usize>) -> &mut [f32] {
        &mut self.data[chunk * self.numbers..][of.clone()]
    }
}

/// Numbers of a state that a block holds.
fn block_numbers(kv: &KvMemory) -> usize {
    (kv.layout().block_bytes() / size_of::<f32>()).max(1)
}

/// Consecutive rows of a chunk in one band.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) chunk: usize,
    pub(super) band: usize,
    /// The row's index in the band, and in the chunk.
    pub(super) first: usize,
    pub(super) start: usize,
    pub(super) rows: usize,
}

impl Piece {
    /// The indices of the rows in the chunk.
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.rows
    }
}

/// The places of all rows of a batch's chunks, in order.
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

    /// The band of a chunk's row, and the row's index there.
    pub(super) fn find(&self, chunk: usize, row: usize) -> (usize, usize) {
        let pieces = self.of_chunk(chunk);
        let piece = &pieces[pieces.partition_point(|piece| piece.range().end <= row)];
        (piece.band, piece.first + row - piece.start)
    }
}
