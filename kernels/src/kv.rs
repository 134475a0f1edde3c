//! The paged memory for K and V, and writing into it.

use crate::{
    cpu::Cpu,
    dtype::{Dtype, Element, load_part, with_element},
    memory::Memory,
    simd::{Kernel, LANES, Simd},
};
use std::ops::Range;

/// Positions in a block: one vector of attention scores.
pub const BLOCK_POSITIONS: usize = LANES;

/// What a block holds: `[layer][K, V][kv head]`, and of each head K as `[head_dim][16 positions]`, so that a vector holds 16
/// positions and their scores need no sums across lanes, and V as `[16 positions][head_dim]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayout {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: Dtype,
}

/// Which of the two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    K,
    V,
}

impl KvLayout {
    pub fn block_bytes(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_bytes()
    }

    /// Bytes of one head's 16 positions.
    fn head_bytes(&self) -> usize {
        BLOCK_POSITIONS * self.head_dim * self.dtype.bytes()
    }

    /// Where in a block the 16 positions of a head are.
    pub(crate) fn head(&self, layer: usize, part: Part, head: usize) -> Range<usize> {
        assert!(layer < self.layers && head < self.kv_heads);
        let index = (2 * layer + part as usize) * self.kv_heads + head;
        index * self.head_bytes()..(index + 1) * self.head_bytes()
    }
}

/// Consecutive positions of one sequence, and the blocks that hold the sequence from position 0 on.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Block of positions 0..16, of 16..32, …; at least up to the span's end.
    pub blocks: &'a [u32],
    /// Position of the first row.
    pub start: usize,
    pub rows: usize,
}

impl Span<'_> {
    fn assert_covered(&self) {
        assert!(self.blocks.len() * BLOCK_POSITIONS >= self.start + self.rows, "the block table ends before the span");
    }
}

/// A fixed number of blocks. Pages of it cost nothing until they are touched.
pub struct KvMemory {
    layout: KvLayout,
    blocks: usize,
    memory: Memory<u8>,
}

impl KvMemory {
    pub fn new(layout: KvLayout, blocks: usize) -> Self {
        Self { layout, blocks, memory: Memory::new(layout.block_bytes() * blocks) }
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The bytes of block `id`, for copying it out.
    pub fn block(&self, id: u32) -> &[u8] {
        &self.memory.as_slice()[self.range(id)]
    }

    /// The bytes of block `id`, for copying it in.
    pub fn block_mut(&mut self, id: u32) -> &mut [u8] {
        let range = self.range(id);
        &mut self.memory.as_mut_slice()[range]
    }

    fn range(&self, id: u32) -> Range<usize> {
        assert!((id as usize) < self.blocks, "block {id} is not one of {}", self.blocks);
        let size = self.layout.block_bytes();
        id as usize * size..(id as usize + 1) * size
    }
}

/// Stores `k` and `v`, each `[rows of all spans, kv_heads, head_dim]`, at the spans' positions of `layer`.
/// No two spans may hold the same position of the same block.
pub fn write(cpu: &Cpu, kv: &mut KvMemory, layer: usize, spans: &[Span<'_>], k: &[f32], v: &[f32]) {
    let layout = kv.layout;
    let width = layout.kv_heads * layout.head_dim;
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    assert!(k.len() == rows * width && v.len() == rows * width, "k and v are [rows, kv_heads, head_dim]");
    let mut row = 0;
    for span in spans {
        span.assert_covered();
        for position in span.start..span.start + span.rows {
            let block = kv.block_mut(span.blocks[position / BLOCK_POSITIONS]);
            for (part, from) in [(Part::K, k), (Part::V, v)] {
                let from = &from[row * width..(row + 1) * width];
                cpu.isa().dispatch(Store { layout, layer, part, slot: position % BLOCK_POSITIONS, from, block });
            }
            row += 1;
        }
    }
}

/// One position's K or V of all heads.
struct Store<'a> {
    layout: KvLayout,
    layer: usize,
    part: Part,
    slot: usize,
    from: &'a [f32],
    block: &'a mut [u8],
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.layout.head_dim;
        for (head, from) in self.from.chunks_exact(width).enumerate() {
            let positions = &mut self.block[self.layout.head(self.layer, self.part, head)];
            with_element!(self.layout.dtype, E => match self.part {
                Part::K => store_across::<S, E>(simd, from, positions, self.slot),
                Part::V => store_along::<S, E>(simd, from, &mut positions[self.slot * width * E::BYTES..][..width * E::BYTES]),
            });
        }
    }
}

/// One number for each of the `[head_dim][16 positions]`.
#[inline(always)]
fn store_across<S: Simd, E: Element>(simd: S, from: &[f32], positions: &mut [u8], slot: usize) {
    for (from, to) in from.chunks(LANES).zip(positions.chunks_mut(LANES * BLOCK_POSITIONS * E::BYTES)) {
        let mut rounded = E::ZEROS;
        E::store(simd, load_part(simd, from), &mut rounded);
        let numbers = rounded.as_ref().chunks_exact(E::BYTES);
        for (number, to) in numbers.zip(to.chunks_exact_mut(BLOCK_POSITIONS * E::BYTES)) {
            to[slot * E::BYTES..(slot + 1) * E::BYTES].copy_from_slice(number);
        }
    }
}

#[inline(always)]
fn store_along<S: Simd, E: Element>(simd: S, from: &[f32], to: &mut [u8]) {
    let (to, to_rest) = E::chunks_mut(to);
    let (from, from_rest) = from.as_chunks::<LANES>();
    for (from, to) in from.iter().zip(to) {
        E::store(simd, simd.load(from), to);
    }
    if !to_rest.is_empty() {
        E::store_part(simd, load_part(simd, from_rest), to_rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        dtype::{decode, encode},
        testing::{cpus, numbers},
    };

    #[test]
    fn blocks_are_apart_aligned_and_zero() {
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 20, dtype: Dtype::Bf16 };
        assert_eq!(layout.block_bytes(), 2 * 2 * 3 * 16 * 20 * 2);
        let mut kv = KvMemory::new(layout, 5);
        assert!(kv.block(0).as_ptr().addr().is_multiple_of(64));
        for id in 0..5 {
            assert!(kv.block(id).iter().all(|b| *b == 0));
            kv.block_mut(id).fill(id as u8 + 1);
        }
        for id in 0..5 {
            assert!(kv.block(id).iter().all(|b| *b == id as u8 + 1));
        }
    }

    #[test]
    fn a_written_row_lands_at_its_position_rounded_to_nearest() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for head_dim in [8, 16, 40] {
                let layout = KvLayout { layers: 3, kv_heads: 2, head_dim, dtype };
                let width = 2 * head_dim;
                let (k, v) = (numbers(20 * width, 1), numbers(20 * width, 2));
                for cpu in cpus() {
                    let mut kv = KvMemory::new(layout, 4);
                    let spans = [Span { blocks: &[3, 1], start: 13, rows: 18 }, Span { blocks: &[2], start: 0, rows: 2 }];
                    write(&cpu, &mut kv, 1, &spans, &k, &v);
                    let positions = (13..31).map(|p| ([3, 1][p / 16], p % 16)).chain([(2, 0), (2, 1)]);
                    for (row, (block, slot)) in positions.enumerate() {
                        for (part, from) in [(Part::K, &k), (Part::V, &v)] {
                            for head in 0..2 {
                                let stored = decode(dtype, &kv.block(block)[layout.head(1, part, head)]);
                                let from = &from[row * width + head * head_dim..][..head_dim];
                                let stored: Vec<f32> = match part {
                                    Part::K => stored.chunks(16).map(|positions| positions[slot]).collect(),
                                    Part::V => stored[slot * head_dim..][..head_dim].to_vec(),
                                };
                                assert_eq!(stored, decode(dtype, &encode(dtype, from)));
                            }
                        }
                    }
                    let other = decode(dtype, &kv.block(3)[layout.head(0, Part::K, 0)]);
                    assert!(other.iter().all(|x| *x == 0.0), "other layers are untouched");
                    assert!(kv.block(0).iter().all(|b| *b == 0), "other blocks are untouched");
                }
            }
        }
    }
}
