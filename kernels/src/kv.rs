//! The paged memory for K and V, and writing into it.

use crate::{
    cpu::Cpu,
    dtype::{Dtype, Element, load_part, with_element},
    simd::{Kernel, LANES, Simd},
};
use std::ops::Range;

/// Positions in a block: one vector of attention scores.
pub const BLOCK_POSITIONS: usize = LANES;

/// What a block holds: `[layer][K, V][kv head][16 positions][head_dim]`, contiguous.
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
    /// The blocks start at `aligned`, on a cache line.
    bytes: Vec<u8>,
    aligned: usize,
}

const CACHE_LINE: usize = 64;

impl KvMemory {
    pub fn new(layout: KvLayout, blocks: usize) -> Self {
        // Allocators hand out large zeroed memory as fresh pages of the operating system, untouched. They do not for
        // alignments above their own, hence the slack in front.
        let bytes = vec![0u8; layout.block_bytes() * blocks + CACHE_LINE];
        let address = bytes.as_ptr().addr();
        let aligned = address.next_multiple_of(CACHE_LINE) - address;
        Self { layout, blocks, bytes, aligned }
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
        &self.bytes[self.range(id)]
    }

    /// The bytes of block `id`, for copying it in.
    pub fn block_mut(&mut self, id: u32) -> &mut [u8] {
        let range = self.range(id);
        &mut self.bytes[range]
    }

    fn range(&self, id: u32) -> Range<usize> {
        assert!((id as usize) < self.blocks, "block {id} is not one of {}", self.blocks);
        let size = self.layout.block_bytes();
        let start = self.aligned + id as usize * size;
        start..start + size
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
            with_element!(self.layout.dtype, E => {
                let (to, to_rest) = E::chunks_mut(&mut positions[self.slot * width * E::BYTES..(self.slot + 1) * width * E::BYTES]);
                let (from, from_rest) = from.as_chunks::<LANES>();
                for (from, to) in from.iter().zip(to) {
                    E::store(simd, simd.load(from), to);
                }
                if !to_rest.is_empty() {
                    E::store_part(simd, load_part(simd, from_rest), to_rest);
                }
            });
        }
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
        assert!(kv.block(0).as_ptr().addr().is_multiple_of(CACHE_LINE));
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
                                assert_eq!(stored[slot * head_dim..][..head_dim], decode(dtype, &encode(dtype, from)));
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
