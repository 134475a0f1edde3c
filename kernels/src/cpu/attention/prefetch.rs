//! Prefetching the K and V that single rows read next.

use super::{Call, SPLIT, Task};
use crate::{
    cpu::{gemm::prefetch::CACHE_LINE, simd::Simd},
    kv::{BLOCK_POSITIONS, Part},
};
use std::ops::Range;

/// The unit of prefetching: K and V of some neighbouring heads in one split of the positions that a row attends to, or in the last two
/// splits.
#[derive(Clone)]
pub(super) struct Stretch {
    span: usize,
    /// The positions that the row attends to.
    visible: Range<usize>,
    pub(super) splits: Range<usize>,
    pub(super) kv_heads: Range<usize>,
}

/// Bytes of K and V in a stretch. Two stretches fit the second-level cache. Heads are adjacent in memory, where continuing is faster than
/// starting elsewhere.
const STRETCH_BYTES: usize = 192 << 10;

impl Stretch {
    /// The first stretch of `task`, which has a single row.
    #[inline(always)]
    pub(super) fn first_of(call: &Call<'_>, task: &Task) -> Self {
        Self::from(call, task, call.splits_of(task).start, task.kv_heads.start)
    }

    /// The next stretch in `task`.
    #[inline(always)]
    pub(super) fn next_in(&self, call: &Call<'_>, task: &Task) -> Option<Self> {
        if self.kv_heads.end < task.kv_heads.end {
            return Some(Self::from(call, task, self.splits.start, self.kv_heads.end));
        }
        (self.splits.end < call.splits_of(task).end).then(|| Self::from(call, task, self.splits.end, task.kv_heads.start))
    }

    #[inline(always)]
    fn from(call: &Call<'_>, task: &Task, split: usize, kv_head: usize) -> Self {
        let visible = call.visible_to(task, 0);
        let last = call.splits_of(task).end - 1;
        // Each is prefetched while the previous one is computed, so they should be about equal.
        let with_last = split + 1 == last && visible.end - last * SPLIT < SPLIT / 2;
        let one = Self { span: task.span, visible, splits: split..split + 1 + usize::from(with_last), kv_heads: kv_head..kv_head + 1 };
        let bytes = 2 * one.blocks().len() * call.kv.layout().numbers(call.layer, Part::K, kv_head).len();
        let end = task.kv_heads.end.min(kv_head + (STRETCH_BYTES / bytes).max(1));
        Self { kv_heads: kv_head..end, ..one }
    }

    /// The sequence's blocks with positions that the row attends to.
    #[inline(always)]
    pub(super) fn blocks(&self) -> Range<usize> {
        let (start, end) = (self.visible.start.max(self.splits.start * SPLIT), self.visible.end.min(self.splits.end * SPLIT));
        start / BLOCK_POSITIONS..end.div_ceil(BLOCK_POSITIONS)
    }
}

/// Prefetches the cache lines of a [`Stretch`] in memory order, spread evenly over the work on the previous one: a core that prefetches
/// many lines at once stalls its other loads, and memory idles while it prefetches none. Loops work on a clone, whose numbers stay in
/// registers.
#[derive(Clone)]
pub(super) struct Prefetch<'a> {
    /// All blocks, and the size of each.
    bytes: &'a [u8],
    block_bytes: usize,
    /// The offsets in a block at which the heads' K and V begin, and the number of lines of each.
    starts: [usize; 2],
    lines_of_each: usize,
    /// The blocks whose V is left, and whether V comes next.
    blocks: &'a [u32],
    in_v: bool,
    /// The next line, and the number of lines left from there on.
    next: *const u8,
    lines: usize,
    /// Lines that are due, and those that become due with each product of vectors, both in parts of [`ONE`].
    due: u32,
    per_product: u32,
}

const ONE: u32 = 1 << 16;
/// At most four lines per product, as a stretch may be much longer than the one that is computed meanwhile.
const MOST_PER_PRODUCT: usize = 4 * ONE as usize;

impl<'a> Prefetch<'a> {
    pub(super) const fn nothing() -> Self {
        Self {
            bytes: &[],
            block_bytes: 0,
            starts: [0; 2],
            lines_of_each: 0,
            blocks: &[],
            in_v: true,
            next: std::ptr::null(),
            lines: 0,
            due: 0,
            per_product: 0,
        }
    }

    /// Prefetches `stretch` over `products` products of vectors.
    #[inline(always)]
    pub(super) fn of(call: &Call<'a>, stretch: &Stretch, products: usize) -> Self {
        let layout = call.kv.layout();
        let [k, v] = [Part::K, Part::V].map(|part| {
            let [first, last] = [stretch.kv_heads.start, stretch.kv_heads.end - 1];
            layout.scales(call.layer, part, first).start..layout.numbers(call.layer, part, last).end
        });
        let blocks = &call.spans[stretch.span].blocks[stretch.blocks()];
        let lines_of_each = k.len().div_ceil(CACHE_LINE);
        let lines = 2 * blocks.len() * lines_of_each;
        let per_product = (lines * ONE as usize).div_ceil(products).min(MOST_PER_PRODUCT);
        let mut prefetch = Self {
            bytes: call.kv.bytes(),
            block_bytes: layout.block_bytes(),
            starts: [k.start, v.start],
            lines_of_each,
            blocks,
            per_product: per_product as u32,
            ..Self::nothing()
        };
        prefetch.go_on();
        prefetch
    }

    /// Address of the first line, if there is one.
    pub(super) fn first(&self) -> usize {
        self.next.addr()
    }

    /// Prefetches the lines due after `products` more products of vectors.
    #[inline(always)]
    pub(super) fn issue<S: Simd>(&mut self, simd: S, products: u32) {
        self.due += products * self.per_product;
        while self.due >= ONE {
            self.due -= ONE;
            simd.prefetch(self.next);
            self.next = self.next.wrapping_add(CACHE_LINE);
            self.lines -= 1;
            if self.lines == 0 {
                self.go_on();
            }
        }
    }

    /// Prefetches all lines that are left.
    #[inline(always)]
    pub(super) fn issue_all<S: Simd>(mut self, simd: S) {
        while self.per_product > 0 {
            self.issue(simd, 1);
        }
    }

    /// Continues from K to V, from V to K of the next block, or to the end.
    #[inline(always)]
    fn go_on(&mut self) {
        self.in_v = !self.in_v;
        match self.blocks {
            [block, rest @ ..] => {
                let start = *block as usize * self.block_bytes + self.starts[usize::from(self.in_v)];
                (self.next, self.lines) = (self.bytes.as_ptr().wrapping_add(start), self.lines_of_each);
                if self.in_v {
                    self.blocks = rest;
                }
            }
            [] => (self.due, self.per_product) = (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Cpu, Dtype, Isa, KvLayout, KvStorage,
        cpu::{
            gemm::float::FloatActivations,
            kv::{KvMemory, Span},
            simd::portable::Portable,
        },
    };

    /// All lines that are left, in order.
    fn lines(mut prefetch: Prefetch<'_>) -> Vec<usize> {
        let mut lines = Vec::new();
        while prefetch.per_product > 0 {
            lines.push(prefetch.next.addr());
            prefetch.due = ONE;
            prefetch.issue(Portable, 0);
        }
        lines
    }

    #[test]
    fn stretches_hold_each_split_of_each_head_once_and_all_their_lines_are_asked_for() {
        let cpu = Cpu::new(Some(Isa::Portable), 1).unwrap();
        for (positions, kv_heads, head_dim, dtype, window) in [
            (1usize, 1usize, 2, KvStorage::Float(Dtype::F32), None),
            (544, 3, 64, KvStorage::Float(Dtype::Bf16), None),
            (1000, 8, 64, KvStorage::Int8, None),
            (600, 2, 128, KvStorage::Float(Dtype::F16), Some(300)),
            (300, 5, 6, KvStorage::Int8, Some(20)),
        ] {
            let layout = KvLayout { layers: 2, kv_heads, head_dim, dtype, latent: None };
            let table: Vec<u32> = (0..positions.div_ceil(BLOCK_POSITIONS) as u32).rev().collect();
            let kv = KvMemory::new(layout, table.len());
            let mut out = FloatActivations::default();
            out.resize(&cpu, 1, kv_heads * head_dim);
            let spans = [Span { blocks: &table, start: positions - 1, rows: 1 }];
            let call = Call {
                kv: &kv,
                layer: 1,
                spans: &spans,
                q: &[],
                heads: kv_heads,
                kv_heads,
                group: 1,
                window,
                scale: 1.0,
                cap: None,
                sinks: None,
                is_bidirectional: false,
                out: &out.shared(),
            };
            let task = Task { span: 0, first: 0, rows: 0..1, kv_heads: 0..kv_heads, splits: None };
            let (mut pieces, mut asked) = (Vec::new(), Vec::new());
            let mut next = Some(Stretch::first_of(&call, &task));
            while let Some(stretch) = next {
                let heads = stretch.kv_heads.clone();
                pieces.extend(stretch.splits.clone().flat_map(|split| heads.clone().map(move |head| (split, head))));
                let all = lines(Prefetch::of(&call, &stretch, 1));
                assert_eq!(all[0], Prefetch::of(&call, &stretch, 1).first());
                for products in [all.len() / 3 + 1, 10 * all.len()] {
                    let mut prefetch = Prefetch::of(&call, &stretch, products);
                    (0..products / 2).for_each(|_| prefetch.issue(Portable, 1));
                    let left = lines(prefetch.clone()).len();
                    assert!(left.abs_diff(all.len() / 2) <= 4, "{left} of {} lines are left half way", all.len());
                    (products / 2..products).for_each(|_| prefetch.issue(Portable, 1));
                    assert!(lines(prefetch).is_empty());
                }
                asked.extend(all);
                next = stretch.next_in(&call, &task);
            }
            let first = window.map_or(0, |window| positions.saturating_sub(window));
            let splits = first / SPLIT..positions.div_ceil(SPLIT);
            pieces.sort();
            assert_eq!(pieces, splits.flat_map(|split| (0..kv_heads).map(move |head| (split, head))).collect::<Vec<_>>());
            let mut expected = Vec::new();
            for &block in &table[first / BLOCK_POSITIONS..] {
                let block = kv.block(block);
                let layer = layout.scales(1, Part::K, 0).start..layout.numbers(1, Part::V, kv_heads - 1).end;
                expected.extend(layer.step_by(CACHE_LINE).map(|at| block[at..].as_ptr().addr()));
            }
            asked.sort();
            expected.sort();
            assert_eq!(asked, expected, "{layout:?}");
        }
    }
}
