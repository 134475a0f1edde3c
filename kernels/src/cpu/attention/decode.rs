//! The queries of one row over K and V as stored (split-KV decode).

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use super::{
    BLOCK_LINES, Call, SPLIT, Scores, State, Task, Tiling, Weights,
    prefetch::{Prefetch, Stretch},
    softmax::{EXP_PRODUCTS, Scales, weigh},
    split_kv::SplitKv,
    within,
};
use crate::{
    cpu::{
        Cpu,
        gemm::{
            micro_kernel::with_tile_rows,
            panel::{PANEL, PanelFormat, steps},
        },
        isa::Bf16Products,
        kv::element::{Bf16AsF32, KvElement, KvPanelFormat, inputs, with_kv_element},
        simd::{Kernel, LANES, Simd},
    },
    kv::{BLOCK_POSITIONS, Part},
};
use std::{cell::RefCell, marker::PhantomData, ops::Range};

/// A thread's buffers, kept from task to task.
#[derive(Default)]
struct Scratch {
    /// The words of all queries, in tiles; in AMX's order, their numbers.
    q: Vec<u32>,
    /// The scale of each query.
    q_scales: Vec<f32>,
    states: Vec<f32>,
    /// The scales of one KV head's K and V.
    scales: Scales,
    /// The scores of one tile.
    scores: Vec<Scores>,
    weights: Vec<Weights>,
    /// The weighted sums of one tile and split: `[query][vector of V]`.
    values: Vec<[f32; LANES]>,
    /// The address of the first cache line that the last task prefetched.
    prefetched: usize,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Computes the task's splits and finishes its queries, or leaves their states in `partial`, to be merged. `next` is the following task.
pub(super) fn run(cpu: &Cpu, call: &Call<'_>, task: &Task, next: Option<&Task>, partial: Option<&mut [f32]>) {
    with_kv_element!(call.kv.layout().dtype, E => run_with::<E>(cpu, call, task, next, partial));
}

fn run_with<E: KvElement>(cpu: &Cpu, call: &Call<'_>, task: &Task, next: Option<&Task>, partial: Option<&mut [f32]>) {
    if const { E::PanelFormat::IS_BF16 } && cpu.isa().bf16_products() == Bf16Products::Blocks {
        run_as::<E, true>(cpu, call, task, next, partial);
    } else {
        run_as::<E, false>(cpu, call, task, next, partial);
    }
}

fn run_as<E: KvElement, const IN_BLOCKS: bool>(cpu: &Cpu, call: &Call<'_>, task: &Task, next: Option<&Task>, partial: Option<&mut [f32]>) {
    SCRATCH.with_borrow_mut(|scratch| {
        let head_dim = call.kv.layout().head_dim;
        let factors = if IN_BLOCKS { head_dim } else { head_dim / inputs::<E>() };
        // Pairs: with half as many queries as the registers hold sums for, four vectors of K or V are multiplied at a
        // time instead of two, so V of 64 dimensions is read once. Other numbers are widened for each tile of queries,
        // so they take full tiles; AMX's order has more sums, and this was not tried for it.
        let tile_rows = if IN_BLOCKS || inputs::<E>() == 1 { cpu.isa().tile_rows() } else { cpu.isa().tile_rows().div_ceil(2) };
        let queries = Tiling::new(call.group, factors, tile_rows);
        let all = task.kv_heads.len() * queries.rows;
        scratch.q.resize(all * queries.cols, 0);
        scratch.q_scales.resize(all, 0.0);
        scratch.states.resize(all * State::len(head_dim), 0.0);
        scratch.scores.resize(cpu.isa().tile_rows(), [0.0; SPLIT]);
        scratch.weights.resize(cpu.isa().tile_rows(), [0; _]);
        scratch.values.resize(cpu.isa().tile_rows() * head_dim.div_ceil(LANES), [0.0; LANES]);
        let run = DecodeKernel::<E, IN_BLOCKS> { call, task, next, queries, scratch, partial, element: PhantomData };
        if IN_BLOCKS {
            cpu.isa().dispatch(run);
        } else {
            cpu.isa().dispatch_panel::<E::PanelFormat, _>(run);
        }
    });
}

/// Merges the states of all splits, `[split][query]`, and finishes the queries.
pub(super) fn merge(cpu: &Cpu, call: &Call<'_>, task: &Task, states: &mut [f32]) {
    cpu.isa().dispatch(Merge { call, task, states });
}

struct Merge<'a> {
    call: &'a Call<'a>,
    task: &'a Task,
    states: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let state_len = State::len(self.call.kv.layout().head_dim);
        let states_len = self.call.heads * state_len;
        let (first, others) = self.states.split_at_mut(states_len);
        let queries = self.task.kv_heads.len() * self.call.group;
        for (query, state) in first.chunks_exact_mut(state_len).take(queries).enumerate() {
            let mut state = State::resume(state);
            for split in others.chunks_exact_mut(states_len) {
                state.merge_state(simd, &State::resume(&mut split[query * state_len..(query + 1) * state_len]));
            }
            self.call.finish(simd, self.task, query, state);
        }
    }
}

/// The kernel of a task. `IN_BLOCKS`: whether it adds products in AMX's order (see [`Bf16Products::Blocks`]).
struct DecodeKernel<'a, E, const IN_BLOCKS: bool> {
    call: &'a Call<'a>,
    task: &'a Task,
    next: Option<&'a Task>,
    /// The tiling of one KV head's queries.
    queries: Tiling,
    scratch: &'a mut Scratch,
    /// The destination of states that are to be merged.
    partial: Option<&'a mut [f32]>,
    element: PhantomData<E>,
}

impl<E: KvElement, const IN_BLOCKS: bool> Kernel for DecodeKernel<'_, E, IN_BLOCKS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let state_len = State::len(self.call.kv.layout().head_dim);
        self.states().chunks_exact_mut(state_len).for_each(|state| _ = State::clear(state));
        for nth in 0..self.task.kv_heads.len() {
            for index in 0..self.queries.tiles {
                let tile = self.tile_of(nth, index);
                let Scratch { q, q_scales, .. } = &mut *self.scratch;
                let q = &mut q[self.queries.numbers(&tile)];
                if IN_BLOCKS {
                    self.call.pack_queries::<S, Bf16AsF32>(simd, self.task, &tile, q, q_scales);
                } else {
                    self.call.pack_queries::<S, E::PanelFormat>(simd, self.task, &tile, q, q_scales);
                }
            }
        }
        let (call, task) = (self.call, self.task);
        let visible = call.visible_to(task, 0);
        let mut stretch = Some(Stretch::first_of(call, task));
        if let Some(first) =
            stretch.as_ref().map(|first| Prefetch::of(call, first, 1)).filter(|first| first.first() != self.scratch.prefetched)
        {
            first.issue_all(simd);
        }
        while let Some(this) = stretch {
            stretch = this.next_in(call, task);
            let after = stretch.clone().or_else(|| self.next.map(|next| Stretch::first_of(call, next)));
            let mut prefetch = after.map_or(Prefetch::nothing(), |after| Prefetch::of(call, &after, self.products(&this)));
            self.scratch.prefetched = prefetch.first();
            for (split, kv_head) in this.splits.flat_map(|split| this.kv_heads.clone().map(move |kv_head| (split, kv_head))) {
                self.read_scales(simd, split, &visible, kv_head);
                for index in 0..self.queries.tiles {
                    let tile = self.tile_of(kv_head - task.kv_heads.start, index);
                    with_tile_rows!(S, tile.len(), T => self.tile::<S, T>(simd, split, &visible, kv_head, &tile, &mut prefetch));
                }
            }
        }
        if self.partial.is_none() {
            for (query, state) in self.scratch.states.chunks_exact_mut(state_len).enumerate() {
                call.finish(simd, task, query, State::resume(state));
            }
        }
    }
}

impl<E: KvElement, const IN_BLOCKS: bool> DecodeKernel<'_, E, IN_BLOCKS> {
    fn states(&mut self) -> &mut [f32] {
        self.partial.as_deref_mut().unwrap_or(&mut self.scratch.states)
    }

    /// Reads the scales of a KV head's visible positions in a split, if they have scales.
    #[inline(always)]
    fn read_scales<S: Simd>(&mut self, simd: S, split: usize, visible: &Range<usize>, kv_head: usize) {
        if const { E::PanelFormat::HAS_SCALES } {
            let stored = SplitKv::new(self.call, self.task.span, split, kv_head);
            let visible = within(split, visible);
            for block in visible.start / BLOCK_POSITIONS..visible.end.div_ceil(BLOCK_POSITIONS) {
                for part in [Part::K, Part::V] {
                    self.scratch.scales.set(simd, block, part, stored.scales(block, part));
                }
            }
        }
    }

    /// Tile `index` of the queries of the task's `nth` KV head. Queries are numbered head by head.
    fn tile_of(&self, nth: usize, index: usize) -> Range<usize> {
        let (tile, first) = (self.queries.tile(index), nth * self.queries.rows);
        first + tile.start..first + tile.end
    }

    /// Products of vectors in a stretch, or work that takes as long.
    fn products(&self, stretch: &Stretch) -> usize {
        let numbers = self.call.kv.layout().numbers(self.call.layer, Part::K, stretch.kv_heads.start);
        let block = 2 * numbers.len() / size_of::<E::Words>() + EXP_PRODUCTS as usize;
        stretch.kv_heads.len() * self.queries.rows * stretch.blocks().len() * block
    }

    /// One tile of one KV head's queries over one split.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(
        &mut self,
        simd: S,
        split: usize,
        visible: &Range<usize>,
        kv_head: usize,
        queries: &Range<usize>,
        prefetch: &mut Prefetch<'_>,
    ) {
        let head_dim = self.call.kv.layout().head_dim;
        let (vectors, state_len) = (head_dim.div_ceil(LANES), State::len(head_dim));
        let visible = within(split, visible);
        let panels = visible.start / PANEL..visible.end.div_ceil(PANEL);
        let stored = SplitKv::new(self.call, self.task.span, split, kv_head);
        let Scratch { q, q_scales, scales, scores, weights, values, .. } = &mut *self.scratch;
        let (q, _) = q[self.queries.numbers(queries)].as_chunks::<T>();
        let scores = scores.first_chunk_mut::<T>().expect("scores of the whole tile");
        let weights = weights.first_chunk_mut::<T>().expect("weights of the whole tile");
        simd.call(ScoreSplit::<E, T, IN_BLOCKS> { stored, q, panels: panels.clone(), scores, prefetch, element: PhantomData });
        let mut normalizers = [None; T];
        for i in 0..T {
            let (scores, weights, scales) = (&mut scores[i], &mut weights[i], (q_scales[queries.start + i], &*scales, self.call.cap));
            normalizers[i] = if IN_BLOCKS {
                weigh::<S, Bf16AsF32>(simd, scores, weights, &panels, &visible, scales, prefetch)
            } else {
                weigh::<S, E::PanelFormat>(simd, scores, weights, &panels, &visible, scales, prefetch)
            };
        }
        let lines = visible.start / inputs::<E>()..visible.end.div_ceil(inputs::<E>());
        simd.call(SumSplit::<E, T, IN_BLOCKS> { stored, head_dim, lines, weights, sums: values, prefetch, element: PhantomData });
        let states = self.partial.as_deref_mut().unwrap_or(&mut self.scratch.states);
        for i in 0..T {
            if let Some(normalizer) = normalizers[i] {
                let query = queries.start + i;
                let mut state = State::resume(&mut states[query * state_len..(query + 1) * state_len]);
                let merge = state.merge(simd, normalizer);
                state.add::<S, E::PanelFormat>(simd, merge, 0, &self.scratch.values[i * vectors..(i + 1) * vectors]);
            }
        }
    }
}

/// Scores of a tile of queries for the positions of some panels of a split.
struct ScoreSplit<'a, 'k, E, const T: usize, const IN_BLOCKS: bool> {
    stored: SplitKv<'a>,
    q: &'a [[u32; T]],
    panels: Range<usize>,
    scores: &'a mut [Scores; T],
    prefetch: &'a mut Prefetch<'k>,
    element: PhantomData<E>,
}

impl<E: KvElement, const T: usize, const IN_BLOCKS: bool> Kernel for ScoreSplit<'_, '_, E, T, IN_BLOCKS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let end = self.panels.end * BLOCKS;
        let mut block = self.panels.start * BLOCKS;
        while const { fits::<S>(T, chains::<IN_BLOCKS>() * 4) } && block + 4 <= end {
            self.blocks::<S, 4>(simd, block);
            block += 4;
        }
        while const { fits::<S>(T, chains::<IN_BLOCKS>() * 2) } && block + 2 <= end {
            self.blocks::<S, 2>(simd, block);
            block += 2;
        }
        while block < end {
            self.blocks::<S, 1>(simd, block);
            block += 1;
        }
    }
}

impl<E: KvElement, const T: usize, const IN_BLOCKS: bool> ScoreSplit<'_, '_, E, T, IN_BLOCKS> {
    /// `N` blocks from `block` on.
    #[inline(always)]
    fn blocks<S: Simd, const N: usize>(&mut self, simd: S, block: usize) {
        let lines = self.q.len() / factors::<IN_BLOCKS>();
        let mut keys: [&[E::Words]; N] = [&[]; N];
        for j in 0..N {
            keys[j] = &E::words(self.stored.numbers(block + j, Part::K)).0[..lines];
        }
        let mut sums = Sums::<S, T, N, IN_BLOCKS>::zero(simd);
        let mut prefetch = self.prefetch.clone();
        for (line, q) in self.q.chunks_exact(const { factors::<IN_BLOCKS>() }).enumerate() {
            prefetch.issue(simd, (T * N) as u32);
            let k = std::array::from_fn(|j| &keys[j][line]);
            sums.add::<E>(simd, &k, [&q[0], &q[q.len() - 1]], line);
        }
        *self.prefetch = prefetch;
        let acc = sums.total(simd, lines);
        for i in 0..T {
            let (vectors, _) = self.scores[i].as_chunks_mut::<LANES>();
            for j in 0..N {
                simd.store(acc[i][j], &mut vectors[block + j]);
            }
        }
    }
}

/// Sums of `N` vectors for each of `T` queries; lines are added one after the other.
struct Sums<S: Simd, const T: usize, const N: usize, const IN_BLOCKS: bool> {
    sums: [[S::V; N]; T],
    /// The chains of even and of odd numbers in the current block.
    even: [[S::V; N]; T],
    odd: [[S::V; N]; T],
}

impl<S: Simd, const T: usize, const N: usize, const IN_BLOCKS: bool> Sums<S, T, N, IN_BLOCKS> {
    #[inline(always)]
    fn zero(simd: S) -> Self {
        let zero = [[simd.zero(); N]; T];
        Self { sums: zero, even: zero, odd: zero }
    }

    /// Adds line `line`: vectors of words times one word of each query, given twice; in AMX's order, times the even and the odd number of
    /// each query. These are stored as full 32-bit words, so that a load broadcasts them without a further instruction.
    #[inline(always)]
    fn add<E: KvElement>(&mut self, simd: S, words: &[&E::Words; N], [even, odd]: [&[u32; T]; 2], line: usize) {
        if IN_BLOCKS {
            assert!(S::BF16_STEPS == 2, "pairs are taken apart as they are loaded");
            multiply::<S, E, Bf16AsF32, T, N, 0>(simd, words, odd, &mut self.odd);
            multiply::<S, E, Bf16AsF32, T, N, 1>(simd, words, even, &mut self.even);
            if (line + 1).is_multiple_of(BLOCK_LINES) {
                self.end_block(simd);
            }
            return;
        }
        multiply::<S, E, E::PanelFormat, T, N, 0>(simd, words, even, &mut self.sums);
        if const { steps::<S, E::PanelFormat>() == 2 } {
            multiply::<S, E, E::PanelFormat, T, N, 1>(simd, words, even, &mut self.sums);
        }
    }

    #[inline(always)]
    fn end_block(&mut self, simd: S) {
        for i in 0..T {
            for j in 0..N {
                self.sums[i][j] = simd.add(self.sums[i][j], simd.add(self.even[i][j], self.odd[i][j]));
                (self.even[i][j], self.odd[i][j]) = (simd.zero(), simd.zero());
            }
        }
    }

    /// The sums, once all lines before `end` have been added.
    #[inline(always)]
    fn total(mut self, simd: S, end: usize) -> [[S::V; N]; T] {
        if IN_BLOCKS && !end.is_multiple_of(BLOCK_LINES) {
            self.end_block(simd);
        }
        self.sums
    }
}

/// The number of words per query that multiply a line: one; in AMX's order two, the even number of a pair and the odd one.
const fn factors<const IN_BLOCKS: bool>() -> usize {
    if IN_BLOCKS { 2 } else { 1 }
}

/// Open chains per sum.
const fn chains<const IN_BLOCKS: bool>() -> usize {
    if IN_BLOCKS { 2 } else { 1 }
}

/// Step `STEP` of `N` vectors of words times one word of each query, in format `L`.
#[inline(always)]
fn multiply<S: Simd, E: KvElement, L: PanelFormat, const T: usize, const N: usize, const STEP: usize>(
    simd: S,
    words: &[&E::Words; N],
    by: &[u32; T],
    acc: &mut [[S::V; N]; T],
) {
    let mut vectors = [simd.zero(); N];
    for j in 0..N {
        vectors[j] = E::load_words::<S, STEP>(simd, words[j]);
    }
    for i in 0..T {
        let by = L::splat::<S, STEP>(simd, by[i]);
        for j in 0..N {
            acc[i][j] = L::add(simd, vectors[j], by, acc[i][j]);
        }
    }
}

/// Sums of V over a split's positions, `lines` of them, weighted for a tile of queries.
struct SumSplit<'a, 'k, E, const T: usize, const IN_BLOCKS: bool> {
    stored: SplitKv<'a>,
    head_dim: usize,
    lines: Range<usize>,
    weights: &'a [Weights; T],
    /// `[query][vector]`
    sums: &'a mut [[f32; LANES]],
    prefetch: &'a mut Prefetch<'k>,
    element: PhantomData<E>,
}

impl<E: KvElement, const T: usize, const IN_BLOCKS: bool> Kernel for SumSplit<'_, '_, E, T, IN_BLOCKS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let head_dim = self.head_dim;
        let whole = head_dim / LANES;
        let mut vector = 0;
        while const { fits::<S>(T, chains::<IN_BLOCKS>() * 8) } && vector + 8 <= whole {
            self.vectors::<S, 8, true>(simd, vector);
            vector += 8;
        }
        while const { fits::<S>(T, chains::<IN_BLOCKS>() * 4) } && vector + 4 <= whole {
            self.vectors::<S, 4, true>(simd, vector);
            vector += 4;
        }
        while const { fits::<S>(T, chains::<IN_BLOCKS>() * 2) } && vector + 2 <= whole {
            self.vectors::<S, 2, true>(simd, vector);
            vector += 2;
        }
        while vector < whole {
            self.vectors::<S, 1, true>(simd, vector);
            vector += 1;
        }
        if !head_dim.is_multiple_of(LANES) {
            self.vectors::<S, 1, false>(simd, whole);
        }
    }
}

impl<E: KvElement, const T: usize, const IN_BLOCKS: bool> SumSplit<'_, '_, E, T, IN_BLOCKS> {
    /// Computes `N` vectors from `first` on: whole ones, or the rest of the last one. Nothing in the loop depends on a sum's index, which
    /// would make the compiler keep sums in memory.
    #[inline(always)]
    fn vectors<S: Simd, const N: usize, const WHOLE: bool>(&mut self, simd: S, first: usize) {
        let head_dim = self.head_dim;
        let (line_bytes, vectors) = (head_dim * E::BYTES * inputs::<E>(), head_dim.div_ceil(LANES));
        let block_lines = BLOCK_POSITIONS / inputs::<E>();
        let mut sums = Sums::<S, T, N, IN_BLOCKS>::zero(simd);
        let mut prefetch = self.prefetch.clone();
        for block in self.lines.start / block_lines..self.lines.end.div_ceil(block_lines) {
            let base = block * block_lines;
            let lines = self.lines.start.max(base)..self.lines.end.min(base + block_lines);
            let skipped = lines.start - base;
            let rows = self.stored.numbers(block, Part::V).chunks_exact(line_bytes).skip(skipped);
            for (row, line) in rows.zip(lines) {
                prefetch.issue(simd, (T * N) as u32);
                let factor = line * factors::<IN_BLOCKS>() % SPLIT;
                let even = std::array::from_fn(|i| self.weights[i][factor]);
                let odd = std::array::from_fn(|i| self.weights[i][factor + factors::<IN_BLOCKS>() - 1]);
                let (whole, rest) = E::words(row);
                let part;
                let words: [&E::Words; N] = if WHOLE {
                    whole[first..].first_chunk::<N>().expect("whole vectors").each_ref()
                } else {
                    part = E::part_of_words(rest);
                    [&part; N]
                };
                sums.add::<E>(simd, &words, [&even, &odd], line);
            }
        }
        *self.prefetch = prefetch;
        let acc = sums.total(simd, self.lines.end);
        for i in 0..T {
            for j in 0..N {
                simd.store(acc[i][j], &mut self.sums[i * vectors + first + j]);
            }
        }
    }
}

/// Whether the registers hold sums of this many rows and vectors.
const fn fits<S: Simd>(rows: usize, vectors: usize) -> bool {
    rows * vectors <= S::TILE_ROWS * S::TILE_VECTORS
}

/// Blocks in a panel.
const BLOCKS: usize = PANEL / BLOCK_POSITIONS;
