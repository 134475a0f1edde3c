//! The queries of one row, over K and V as they are stored.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use super::{
    Call, SPLIT, SPLIT_BLOCKS, Scores, State, Task, Tiling,
    softmax::{Normalizer, weigh},
};
use crate::{
    cpu::Cpu,
    dtype::{Element, with_element},
    kv::{BLOCK_POSITIONS, Part},
    simd::{Kernel, LANES, Simd},
    tile::{PANEL, with_tile_rows},
};
use std::{cell::RefCell, marker::PhantomData, ops::Range};

/// Buffers of one thread, kept from task to task.
#[derive(Default)]
struct Scratch {
    /// All queries, in tiles.
    q: Vec<f32>,
    states: Vec<f32>,
    /// Of one tile.
    scores: Vec<Scores>,
    /// Of one tile and split: `[query][vector of V]`.
    values: Vec<[f32; LANES]>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Computes the task's splits and finishes its queries; or leaves their states in `partial`, to be merged.
pub(super) fn run(cpu: &Cpu, call: &Call<'_>, task: &Task, partial: Option<&mut [f32]>) {
    SCRATCH.with_borrow_mut(|scratch| {
        let head_dim = call.kv.layout().head_dim;
        let queries = Tiling::new(call.group, head_dim, cpu.isa().tile_rows());
        let Scratch { q, states, scores, values } = scratch;
        q.resize(queries.rows * head_dim, 0.0);
        states.resize(queries.rows * State::len(head_dim), 0.0);
        scores.resize(cpu.isa().tile_rows(), [0.0; SPLIT]);
        values.resize(cpu.isa().tile_rows() * head_dim.div_ceil(LANES), [0.0; LANES]);
        let finish = partial.is_none();
        let states = partial.unwrap_or(states);
        cpu.isa().dispatch(Run { call, task, queries, q, states, scores, values, finish });
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
        let (first, others) = self.states.split_at_mut(self.call.group * state_len);
        for (query, state) in first.chunks_exact_mut(state_len).enumerate() {
            let mut state = State::resume(state);
            for split in others.chunks_exact_mut(self.call.group * state_len) {
                let split = State::resume(&mut split[query * state_len..(query + 1) * state_len]);
                let factors = state.merge(simd, split.normalizer());
                state.add(simd, factors, 0, split.values());
            }
            self.call.finish(simd, self.task, query, &state);
        }
    }
}

struct Run<'a> {
    call: &'a Call<'a>,
    task: &'a Task,
    queries: Tiling,
    q: &'a mut [f32],
    states: &'a mut [f32],
    scores: &'a mut [Scores],
    values: &'a mut [[f32; LANES]],
    finish: bool,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let state_len = State::len(self.queries.cols);
        let visible = self.call.visible_to(self.task, 0);
        let splits = self.task.splits.clone().unwrap_or(self.call.splits(&visible));
        self.states.chunks_exact_mut(state_len).for_each(|state| _ = State::clear(state));
        for index in 0..self.queries.tiles {
            let tile = self.queries.tile(index);
            let q = self.queries.numbers(&tile);
            self.call.pack_queries(self.task, &tile, &mut self.q[q]);
            for split in splits.clone() {
                with_tile_rows!(S, tile.len(), T => {
                    with_element!(self.call.kv.layout().dtype, E => self.tile::<S, E, T>(simd, split, &visible, &tile));
                });
            }
        }
        if self.finish {
            for query in 0..self.queries.rows {
                let state = State::resume(&mut self.states[query * state_len..(query + 1) * state_len]);
                self.call.finish(simd, self.task, query, &state);
            }
        }
    }
}

impl Run<'_> {
    /// A tile of queries over one split.
    #[inline(always)]
    fn tile<S: Simd, E: Element, const T: usize>(&mut self, simd: S, split: usize, visible: &Range<usize>, queries: &Range<usize>) {
        let state_len = State::len(self.queries.cols);
        let start = split * SPLIT;
        let visible = visible.start.max(start) - start..visible.end.min(start + SPLIT) - start;
        let panels = visible.start / PANEL..visible.end.div_ceil(PANEL);
        let (q, _) = self.q[self.queries.numbers(queries)].as_chunks::<T>();
        let paged = Paged { call: self.call, task: self.task, first: split * SPLIT_BLOCKS };
        let scores = self.scores.first_chunk_mut::<T>().expect("scores of the whole tile");
        simd.call(ScoreSplit::<E, T> { paged, q, panels: panels.clone(), scores, element: PhantomData });
        let mut normalizers = [None::<Normalizer>; T];
        for i in 0..T {
            normalizers[i] = weigh(simd, &mut scores[i], &panels, &visible);
        }
        let vectors = self.queries.cols.div_ceil(LANES);
        simd.call(SumSplit::<E, T> { paged, visible, weights: scores, sums: self.values, element: PhantomData });
        for i in 0..T {
            if let Some(normalizer) = normalizers[i] {
                let query = queries.start + i;
                let mut state = State::resume(&mut self.states[query * state_len..(query + 1) * state_len]);
                let factors = state.merge(simd, normalizer);
                state.add(simd, factors, 0, &self.values[i * vectors..(i + 1) * vectors]);
            }
        }
    }
}

/// The blocks of a sequence, from the first of a split on, and one head in them.
#[derive(Clone, Copy)]
struct Paged<'a> {
    call: &'a Call<'a>,
    task: &'a Task,
    first: usize,
}

impl<'a> Paged<'a> {
    /// The bytes of the head's K or V in block `block` of the split, or in the sequence's last block.
    #[inline(always)]
    fn bytes(&self, block: usize, part: Part) -> &'a [u8] {
        let blocks = self.call.spans[self.task.span].blocks;
        let bytes = self.call.kv.block(blocks[(self.first + block).min(blocks.len() - 1)]);
        &bytes[self.call.kv.layout().head(self.call.layer, part, self.task.kv_head)]
    }
}

/// Scores of a tile of queries with the positions of some panels of a split.
struct ScoreSplit<'a, E, const T: usize> {
    paged: Paged<'a>,
    q: &'a [[f32; T]],
    panels: Range<usize>,
    scores: &'a mut [Scores; T],
    element: PhantomData<E>,
}

impl<E: Element, const T: usize> Kernel for ScoreSplit<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        for block in (self.panels.start * BLOCKS..self.panels.end * BLOCKS).step_by(S::TILE_VECTORS) {
            if const { S::TILE_VECTORS == 2 } {
                self.blocks::<S, 2>(simd, block);
            } else {
                self.blocks::<S, 1>(simd, block);
            }
        }
    }
}

impl<E: Element, const T: usize> ScoreSplit<'_, E, T> {
    /// `N` blocks from `block` on.
    #[inline(always)]
    fn blocks<S: Simd, const N: usize>(&mut self, simd: S, block: usize) {
        let mut keys: [&[E::Chunk]; N] = [&[]; N];
        let mut ahead = [std::ptr::null::<u8>(); N];
        for j in 0..N {
            keys[j] = &E::chunks(self.paged.bytes(block + j, Part::K)).0[..self.q.len()];
            ahead[j] = self.paged.bytes(block + j + BLOCKS_AHEAD, Part::K).as_ptr();
        }
        let mut acc = [[simd.zero(); N]; T];
        for (d, q) in self.q.iter().enumerate() {
            let mut k = [simd.zero(); N];
            for j in 0..N {
                k[j] = E::load(simd, &keys[j][d]);
                simd.prefetch(ahead[j].wrapping_add(d * size_of::<E::Chunk>()));
            }
            for i in 0..T {
                let q = simd.splat(q[i]);
                for j in 0..N {
                    acc[i][j] = simd.fma(q, k[j], acc[i][j]);
                }
            }
        }
        for i in 0..T {
            let (vectors, _) = self.scores[i].as_chunks_mut::<LANES>();
            for j in 0..N {
                simd.store(acc[i][j], &mut vectors[block + j]);
            }
        }
    }
}

/// Sums of V over a split's `visible` positions, weighted for a tile of queries.
struct SumSplit<'a, E, const T: usize> {
    paged: Paged<'a>,
    visible: Range<usize>,
    weights: &'a [Scores; T],
    /// `[query][vector]`.
    sums: &'a mut [[f32; LANES]],
    element: PhantomData<E>,
}

impl<E: Element, const T: usize> Kernel for SumSplit<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let vectors = self.paged.call.kv.layout().head_dim.div_ceil(LANES);
        let mut vector = 0;
        while const { S::TILE_VECTORS == 2 } && vector + 2 <= vectors {
            self.vectors::<S, 2>(simd, vector);
            vector += 2;
        }
        while vector < vectors {
            self.vectors::<S, 1>(simd, vector);
            vector += 1;
        }
    }
}

impl<E: Element, const T: usize> SumSplit<'_, E, T> {
    /// `N` vectors from `first` on.
    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&mut self, simd: S, first: usize) {
        let head_dim = self.paged.call.kv.layout().head_dim;
        let (row_bytes, vectors) = (head_dim * E::BYTES, head_dim.div_ceil(LANES));
        let mut acc = [[simd.zero(); N]; T];
        for block in self.visible.start / BLOCK_POSITIONS..self.visible.end.div_ceil(BLOCK_POSITIONS) {
            let base = block * BLOCK_POSITIONS;
            let bytes = self.paged.bytes(block, Part::V);
            let ahead = self.paged.bytes(block + BLOCKS_AHEAD, Part::V).as_ptr();
            for position in self.visible.start.max(base)..self.visible.end.min(base + BLOCK_POSITIONS) {
                let row = (position - base) * row_bytes;
                let (whole, rest) = E::chunks(&bytes[row..row + row_bytes]);
                simd.prefetch(ahead.wrapping_add(row + first * size_of::<E::Chunk>()));
                let mut v = [simd.zero(); N];
                for j in 0..N {
                    v[j] = match whole.get(first + j) {
                        Some(chunk) => E::load(simd, chunk),
                        None => E::load_part(simd, rest),
                    };
                }
                for i in 0..T {
                    let weight = simd.splat(self.weights[i][position]);
                    for j in 0..N {
                        acc[i][j] = simd.fma(weight, v[j], acc[i][j]);
                    }
                }
            }
        }
        for i in 0..T {
            for j in 0..N {
                simd.store(acc[i][j], &mut self.sums[i * vectors + first + j]);
            }
        }
    }
}

/// How far ahead K and V are asked for: blocks lie anywhere in memory, and no processor guesses where.
const BLOCKS_AHEAD: usize = 4;

/// Blocks of a panel.
const BLOCKS: usize = PANEL / BLOCK_POSITIONS;
