//! Many queries over K and V, which are packed into panels once for all of them.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use super::{
    BLOCK_LINES, Call, SPLIT, SPLIT_BLOCKS, State, Task, Tiling, Weights,
    prefetch::Prefetch,
    softmax::{Merge, PanelRow, Scales, Weighted, weigh},
    within,
};
use crate::{
    cpu::{
        Cpu,
        element::{Bf16, F32},
        gemm::{
            float::activations::BLOCK_ROWS,
            micro_kernel::{PackedRows, Start, multiply_tile, with_tile_rows},
            panel::PANEL,
            prefetch::WeightPrefetch,
        },
        isa::Bf16Products,
        kv::element::{Int16Pairs, KvElement, KvLine, KvPanelFormat, inputs, with_kv_element},
        simd::{Kernel, LANES, Simd},
    },
    dtype::Dtype,
    kv::{BLOCK_POSITIONS, KvStorage, Part},
};
use std::{cell::RefCell, marker::PhantomData, ops::Range};

/// A thread's buffers, kept from task to task.
#[derive(Default)]
struct Scratch {
    /// K of one split: `[panel of positions][head_dim / inputs]`.
    k: Vec<KvLine>,
    /// V of one split: `[panel of dimensions][position / inputs]`.
    v: Vec<KvLine>,
    /// The scales of one split.
    scales: Scales,
    /// The words of all queries, in tiles.
    q: Vec<u32>,
    q_scales: Vec<f32>,
    /// The states of all queries.
    states: Vec<f32>,
    /// The scores of one tile: `[panel][query]`.
    scores: Vec<[f32; PANEL]>,
    weights: Vec<Weights>,
    /// The merges of one tile; `None` for a query that sees no position of the split.
    merges: Vec<Option<Merge>>,
    /// The weighted sums of one tile and panel of V.
    sums: Vec<[f32; PANEL]>,
}

/// Bytes of a word, which is one number in f32, or a pair.
const WORD: usize = size_of::<u32>();

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

pub(super) fn run(cpu: &Cpu, call: &Call<'_>, task: &Task) {
    match call.kv.layout().dtype {
        KvStorage::Float(Dtype::F32 | Dtype::F16) => run_with::<F32>(cpu, call, task),
        KvStorage::Float(Dtype::Bf16) => run_with::<Bf16>(cpu, call, task),
        KvStorage::Int8 => run_with::<Int16Pairs>(cpu, call, task),
    }
}

fn run_with<P: KvPanelFormat>(cpu: &Cpu, call: &Call<'_>, task: &Task) {
    SCRATCH.with_borrow_mut(|scratch| {
        let (head_dim, value_dim) = (call.kv.layout().head_dim, call.kv.layout().value_dim());
        let in_blocks = P::IS_BF16 && cpu.isa().bf16_products() == Bf16Products::Blocks;
        // For AMX, queries lie one after the other, padded with zeros to whole blocks like panels of K.
        let (words, tile_rows) = match in_blocks {
            true => ((head_dim / P::INPUTS).next_multiple_of(BLOCK_LINES), 2 * BLOCK_ROWS),
            false => (head_dim / P::INPUTS, cpu.isa().tile_rows()),
        };
        let queries = Tiling::new(task.rows.len() * call.group, words, tile_rows);
        scratch.k.resize(SPLIT / PANEL * queries.cols, [0; _]);
        scratch.v.resize(value_dim.div_ceil(PANEL) * SPLIT / P::INPUTS, [0; _]);
        scratch.q.resize((queries.rows + if in_blocks { tile_rows } else { 0 }) * queries.cols, 0);
        scratch.states.resize(queries.rows * State::len(value_dim), 0.0);
        scratch.q_scales.resize(queries.rows, 0.0);
        scratch.scores.resize(SPLIT / PANEL * tile_rows, [0.0; _]);
        scratch.weights.resize(tile_rows, [0; _]);
        scratch.sums.resize(tile_rows, [0.0; _]);
        cpu.isa().dispatch_panel::<P, _>(PrefillKernel::<P> { call, task, queries, in_blocks, scratch, lines: PhantomData });
    });
}

/// The kernel of a task. `P` is the format that K and V are packed into.
struct PrefillKernel<'a, P> {
    call: &'a Call<'a>,
    task: &'a Task,
    queries: Tiling,
    /// Whether it runs on AMX, in its order.
    in_blocks: bool,
    scratch: &'a mut Scratch,
    lines: PhantomData<P>,
}

impl<P: KvPanelFormat> Kernel for PrefillKernel<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let state_len = State::len(self.call.kv.layout().value_dim());
        for index in 0..self.queries.tiles {
            let tile = self.queries.tile(index);
            let Scratch { q, q_scales, .. } = &mut *self.scratch;
            let q = &mut q[self.queries.numbers(&tile)];
            if self.in_blocks {
                q.fill(0);
                for (query, words) in tile.zip(q.chunks_exact_mut(self.queries.cols)) {
                    self.call.pack_queries::<S, P>(simd, self.task, &(query..query + 1), words, q_scales);
                }
            } else {
                self.call.pack_queries::<S, P>(simd, self.task, &tile, q, q_scales);
            }
        }
        self.scratch.states.chunks_exact_mut(state_len).for_each(|state| _ = State::clear(state));
        let visible = self.visible_to_any(&(0..self.queries.rows));
        for split in self.call.splits(&visible) {
            with_kv_element!(self.call.kv.layout().dtype, E => self.widen::<S, E>(simd, split, &visible));
            for index in 0..self.queries.tiles {
                let tile = self.queries.tile(index);
                if self.in_blocks {
                    self.tile_in_blocks(simd, split, &tile);
                } else {
                    with_tile_rows!(S, tile.len(), T => self.tile::<S, T>(simd, split, &tile));
                }
            }
        }
        for query in 0..self.queries.rows {
            let state = State::resume(&mut self.scratch.states[query * state_len..(query + 1) * state_len]);
            self.call.finish(simd, self.task, query, state);
        }
    }
}

impl<P: KvPanelFormat> PrefillKernel<'_, P> {
    /// The positions that any of the queries attends to.
    #[inline(always)]
    fn visible_to_any(&self, queries: &Range<usize>) -> Range<usize> {
        // Positions grow from query to query, so the first sees furthest back and the last furthest on.
        self.call.visible_to(self.task, queries.start).start..self.call.visible_to(self.task, queries.end - 1).end
    }

    /// Packs K and V of the split's `visible` positions into panels, unscaled.
    #[inline(always)]
    fn widen<S: Simd, E: KvElement>(&mut self, simd: S, split: usize, visible: &Range<usize>) {
        let (call, task) = (self.call, self.task);
        let (layout, words, head) = (call.kv.layout(), self.queries.cols, call.stored_head(task.kv_heads.start));
        let visible = within(split, visible);
        let blocks = visible.start / BLOCK_POSITIONS..visible.end.div_ceil(BLOCK_POSITIONS);
        if self.in_blocks {
            self.fill_up(&blocks);
        }
        for block in blocks {
            let bytes = call.kv.block(call.spans[task.span].blocks[split * SPLIT_BLOCKS + block]);
            if const { E::PanelFormat::HAS_SCALES } {
                for part in [Part::K, Part::V] {
                    let (scales, _) = bytes[layout.scales(call.layer, part, head)].as_chunks();
                    self.scratch.scales.set(simd, block, part, &scales[0]);
                }
            }
            let first = block * BLOCK_POSITIONS;
            let panel = &mut self.scratch.k[first / PANEL * words..][..words];
            let (k, _) = E::words(&bytes[layout.numbers(call.layer, Part::K, head)]);
            for (to, k) in panel.iter_mut().zip(k) {
                simd.store_f32_bytes(E::widen(simd, k), &mut to.as_chunks_mut().0[first % PANEL / LANES]);
            }
            if layout.latent.is_some() {
                self.values_from_keys::<E>(first, visible.end);
                continue;
            }
            let v = &bytes[layout.numbers(call.layer, Part::V, head)];
            for (i, v) in v.chunks_exact(layout.head_dim * E::BYTES * inputs::<E>()).enumerate() {
                let line = first / inputs::<E>() + i;
                let (whole, rest) = E::words(v);
                let is_written = line * inputs::<E>() < visible.end;
                for vector in 0..layout.head_dim.div_ceil(LANES) {
                    let value = match whole.get(vector) {
                        _ if !is_written => simd.zero(),
                        Some(words) => E::widen(simd, words),
                        None => E::widen(simd, &E::part_of_words(rest)),
                    };
                    let to = &mut self.scratch.v[vector * LANES / PANEL * (SPLIT / inputs::<E>()) + line];
                    simd.store_f32_bytes(value, &mut to.as_chunks_mut().0[vector % (PANEL / LANES)]);
                }
            }
        }
    }

    /// Packs V of the block at position `first` of the split from its packed K. Positions from `end` on become zeros, as nothing may be
    /// written there yet.
    #[inline(always)]
    fn values_from_keys<E: KvElement>(&mut self, first: usize, end: usize) {
        let (words, value_dim) = (self.queries.cols, self.call.kv.layout().value_dim());
        let Scratch { k, v, .. } = &mut *self.scratch;
        let keys = &k[first / PANEL * words..][..value_dim / inputs::<E>()];
        let written = end.saturating_sub(first);
        for (word, key) in keys.iter().enumerate() {
            let (key, _) = key[first % PANEL * WORD..].as_chunks::<WORD>();
            let at = |position: usize| if position < written { u32::from_le_bytes(key[position]) } else { 0 };
            let mut put = |line: usize, dim: usize, bits: u32| {
                let line = &mut v[dim / PANEL * (SPLIT / inputs::<E>()) + first / inputs::<E>() + line];
                line.as_chunks_mut::<WORD>().0[dim % PANEL] = bits.to_le_bytes();
            };
            for line in 0..BLOCK_POSITIONS / inputs::<E>() {
                if const { inputs::<E>() == 1 } {
                    put(line, word, at(line));
                    continue;
                }
                // Pairs of dimensions become pairs of positions.
                let (even, odd) = (at(2 * line), at(2 * line + 1));
                put(line, 2 * word, even & 0xffff | odd << 16);
                put(line, 2 * word + 1, even >> 16 | odd & 0xffff_0000);
            }
        }
    }

    /// Sets zeros around the split's blocks of K and V, up to whole blocks of products: dimensions after the last, and positions whose
    /// weight is 0 but which must be numbers.
    #[inline(always)]
    fn fill_up(&mut self, blocks: &Range<usize>) {
        let (words, lines, half) = (self.call.kv.layout().head_dim / P::INPUTS, SPLIT / P::INPUTS, BLOCK_POSITIONS / P::INPUTS);
        let panels = blocks.start * BLOCK_POSITIONS / PANEL..(blocks.end * BLOCK_POSITIONS).div_ceil(PANEL);
        for panel in self.scratch.k.chunks_exact_mut(self.queries.cols).take(panels.end).skip(panels.start) {
            panel[words..].fill([0; _]);
        }
        for panel in self.scratch.v.chunks_exact_mut(lines) {
            panel[panels.start * BLOCK_LINES..blocks.start * half].fill([0; _]);
            panel[blocks.end * half..panels.end * BLOCK_LINES].fill([0; _]);
        }
    }

    /// Computes a tile of queries over one split.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, simd: S, split: usize, queries: &Range<usize>) {
        let (words, value_dim) = (self.queries.cols, self.call.kv.layout().value_dim());
        let visible = within(split, &self.visible_to_any(queries));
        if visible.is_empty() {
            return;
        }
        let panels = visible.start / PANEL..visible.end.div_ceil(PANEL);
        let Scratch { k, q, scores, .. } = &mut *self.scratch;
        let q = PackedRows::<T>(q[self.queries.numbers(queries)].as_chunks().0);
        for panel in panels.clone() {
            let (k, scores) = (&k[panel * words..(panel + 1) * words], &mut scores[panel * T..(panel + 1) * T]);
            multiply_tile::<S, P, T>(simd, q, k, scores, Start::Zero, WeightPrefetch::NONE);
        }
        self.weigh(simd, split, queries, &panels, T);
        let lines = visible.start / P::INPUTS..visible.end.div_ceil(P::INPUTS);
        for panel in 0..value_dim.div_ceil(PANEL) {
            let Scratch { v, weights, sums, .. } = &mut *self.scratch;
            let weights = weights.first_chunk().expect("weights of the whole tile");
            let weights = Weighted::<T> { weights, first: lines.start, len: lines.len() };
            let v = &v[panel * (SPLIT / P::INPUTS)..][lines.clone()];
            multiply_tile::<S, P, T>(simd, weights, v, sums, Start::Zero, WeightPrefetch::NONE);
            self.add(simd, queries, panel);
        }
    }

    /// Computes the same on AMX.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    fn tile_in_blocks<S: Simd>(&mut self, simd: S, split: usize, queries: &Range<usize>) {
        use super::softmax::WEIGHTS_WORDS;
        use crate::cpu::gemm::amx::{Amx, Bf16Pairs, Piece};
        let words = self.queries.cols;
        let visible = within(split, &self.visible_to_any(queries));
        if visible.is_empty() {
            return;
        }
        let rows = queries.len().next_multiple_of(BLOCK_ROWS);
        let panels = visible.start / PANEL..visible.end.div_ceil(PANEL);
        let Scratch { k, q, scores, .. } = &mut *self.scratch;
        // SAFETY: `in_blocks` is set only where AMX was found available.
        let unit = unsafe { Amx::new(queries.len()) };
        for panel in panels.clone() {
            let k = Piece::in_caches(&k[panel * words..(panel + 1) * words]);
            let scores = &mut scores[panel * rows..(panel + 1) * rows];
            unit.multiply::<Bf16Pairs>(&q[queries.start * words..], words, k, scores, Start::Zero);
        }
        self.weigh(simd, split, queries, &panels, rows);
        let lines = panels.start * BLOCK_LINES..panels.end * BLOCK_LINES;
        for panel in 0..self.call.kv.layout().value_dim().div_ceil(PANEL) {
            let Scratch { v, weights, sums, .. } = &mut *self.scratch;
            let v = Piece::in_caches(&v[panel * (SPLIT / P::INPUTS)..][lines.clone()]);
            unit.multiply::<Bf16Pairs>(&weights.as_flattened()[lines.start..], WEIGHTS_WORDS, v, &mut sums[..rows], Start::Zero);
            self.add(simd, queries, panel);
        }
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    fn tile_in_blocks<S: Simd>(&mut self, _: S, _: usize, _: &Range<usize>) {
        unreachable!("there is no AMX")
    }

    /// Turns a tile's scores, in panels of `rows`, into weights, and merges the split's maximum and sum into the
    /// queries' states.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, simd: S, split: usize, queries: &Range<usize>, panels: &Range<usize>, rows: usize) {
        let state_len = State::len(self.call.kv.layout().value_dim());
        let Scratch { scores, weights, scales, q_scales, states, merges, .. } = &mut *self.scratch;
        merges.clear();
        for (row, query) in queries.clone().enumerate() {
            let seen = within(split, &self.call.visible_to(self.task, query));
            let mut scores = PanelRow { panels: scores, rows, row };
            let scales = (q_scales[query], &*scales, self.call.cap);
            let normalizer = weigh::<S, P>(simd, &mut scores, &mut weights[row], panels, &seen, scales, &mut Prefetch::nothing());
            let Some(normalizer) = normalizer else {
                merges.push(None);
                continue;
            };
            let state = &mut states[query * state_len..(query + 1) * state_len];
            merges.push(Some(State::resume(state).merge(simd, normalizer)));
        }
    }

    /// Adds a panel of a tile's weighted sums to the queries' states.
    #[inline(always)]
    fn add<S: Simd>(&mut self, simd: S, queries: &Range<usize>, panel: usize) {
        let state_len = State::len(self.call.kv.layout().value_dim());
        let Scratch { states, merges, sums, .. } = &mut *self.scratch;
        for ((query, merge), sums) in queries.clone().zip(merges).zip(sums) {
            if let Some(merge) = merge {
                let state = &mut states[query * state_len..(query + 1) * state_len];
                State::resume(state).add::<S, P>(simd, *merge, panel * PANEL / LANES, sums.as_chunks().0);
            }
        }
    }
}
