//! K and V of one head in one split of a row's sequence, as they are stored.

use super::{Call, SPLIT_BLOCKS, Task};
use crate::{kv::Part, simd::LANES};

/// What does not change from block to block is worked out once.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    /// All blocks, and the size of each.
    bytes: &'a [u8],
    block_bytes: usize,
    /// Those of the sequence, and which is the split's first.
    table: &'a [u32],
    first: usize,
    /// Where in a block the numbers of K and V begin, and how many bytes there are.
    k: usize,
    v: usize,
    len: usize,
    /// What is read next: K of the next head, or of the first one in the next split.
    next_first: usize,
    next_k: usize,
}

impl<'a> Stored<'a> {
    #[inline(always)]
    pub(super) fn new(call: &Call<'a>, task: &Task, split: usize, kv_head: usize) -> Self {
        let layout = call.kv.layout();
        let numbers = |part, kv_head| layout.numbers(call.layer, part, kv_head);
        let first = split * SPLIT_BLOCKS;
        let (next_first, next_head) = match kv_head + 1 < task.kv_heads.end {
            true => (first, kv_head + 1),
            false => (first + SPLIT_BLOCKS, task.kv_heads.start),
        };
        Self {
            bytes: call.kv.bytes(),
            block_bytes: layout.block_bytes(),
            table: call.spans[task.span].blocks,
            first,
            k: numbers(Part::K, kv_head).start,
            v: numbers(Part::V, kv_head).start,
            len: numbers(Part::K, kv_head).len(),
            next_first,
            next_k: numbers(Part::K, next_head).start,
        }
    }

    /// What to ask memory for while block `block` of `part` is read: a block a little later in the order in which they are
    /// read, which is K, then V (each to block `end`) of one head after the other, of one split after the other.
    #[inline(always)]
    pub(super) fn ahead(&self, block: usize, part: Part, end: usize) -> *const u8 {
        let later = block + BLOCKS_AHEAD;
        let start = match (later < end, part) {
            (true, part) => self.start(self.first + later, self.numbers_in_block(part)),
            (false, Part::K) => self.start(self.first + later - end, self.v),
            (false, Part::V) => self.start(self.next_first + later - end, self.next_k),
        };
        self.bytes.as_ptr().wrapping_add(start)
    }

    /// The numbers of the head's K or V in block `block` of the split, or in the sequence's last block.
    #[inline(always)]
    pub(super) fn numbers(&self, block: usize, part: Part) -> &'a [u8] {
        &self.bytes[self.start(self.first + block, self.numbers_in_block(part))..][..self.len]
    }

    /// Their positions' scales, which are in front of them where they have some.
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

    /// Where a block of the sequence, or its last one, has byte `byte`.
    #[inline(always)]
    fn start(&self, block: usize, byte: usize) -> usize {
        self.table[block.min(self.table.len() - 1)] as usize * self.block_bytes + byte
    }
}

/// How far ahead K and V are asked for: blocks lie anywhere in memory, and no processor guesses where.
const BLOCKS_AHEAD: usize = 8;
