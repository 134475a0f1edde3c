//! Stored K and V of one head in one split of a row's sequence.

use super::{Call, SPLIT_BLOCKS};
use crate::{cpu::simd::LANES, kv::Part};

/// Offsets that do not change from block to block.
#[derive(Clone, Copy)]
pub(super) struct SplitKv<'a> {
    /// All blocks, and the size of each.
    bytes: &'a [u8],
    block_bytes: usize,
    /// The sequence's blocks, and the split's first among them.
    table: &'a [u32],
    first: usize,
    /// The offsets in a block at which the numbers of K and V begin, and their length in bytes.
    k: usize,
    v: usize,
    len: usize,
}

impl<'a> SplitKv<'a> {
    #[inline(always)]
    pub(super) fn new(call: &Call<'a>, span: usize, split: usize, kv_head: usize) -> Self {
        let layout = call.kv.layout();
        let numbers = |part| layout.numbers(call.layer, part, kv_head);
        Self {
            bytes: call.kv.bytes(),
            block_bytes: layout.block_bytes(),
            table: call.spans[span].blocks,
            first: split * SPLIT_BLOCKS,
            k: numbers(Part::K).start,
            v: numbers(Part::V).start,
            len: numbers(Part::K).len(),
        }
    }

    /// The numbers of the head's K or V in block `block` of the split, or in the sequence's last block.
    #[inline(always)]
    pub(super) fn numbers(&self, block: usize, part: Part) -> &'a [u8] {
        &self.bytes[self.start(self.first + block, self.numbers_in_block(part))..][..self.len]
    }

    /// The scales of these positions, which precede the numbers if there are any.
    #[inline(always)]
    pub(super) fn scales(&self, block: usize, part: Part) -> &'a [u8; 4 * LANES] {
        let numbers = self.start(self.first + block, self.numbers_in_block(part));
        self.bytes[..numbers].last_chunk().expect("numbers with scales in front of them")
    }

    #[inline(always)]
    fn numbers_in_block(&self, part: Part) -> usize {
        match part {
            Part::K => self.k,
            Part::V => self.v,
        }
    }

    /// Offset of byte `byte` in a block of the sequence, or in its last block.
    #[inline(always)]
    fn start(&self, block: usize, byte: usize) -> usize {
        self.table[block.min(self.table.len() - 1)] as usize * self.block_bytes + byte
    }
}
