//! Attention over paged K and V.
//!
//! For each query the blocks of its sequence pass by in absolute order, 16 positions at a time, with a running maximum and
//! sum (online softmax: Milakov & Gimelshein, 2018). Which blocks there are, and which of their positions count, depends on
//! the query's own position alone, so its bits do not depend on how the prompt was cut into chunks.
//!
//! Queries that read the same K and V (neighbouring rows, and the heads of one group) go together, four at a time, so that
//! each block is loaded and widened once for the four of them.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use crate::{
    cpu::Cpu,
    disjoint::Disjoint,
    dtype::{Element, with_element},
    exp::exp,
    kv::{BLOCK_POSITIONS, KvMemory, Part, Span},
    simd::{Kernel, LANES, Simd},
};
use std::{array::from_fn, ops::Range};

/// Which attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub layer: usize,
    /// Query heads; they share the KV heads in equal groups.
    pub heads: usize,
    /// A row at position `p` attends to positions `0..=p`, or to the last `window` of them.
    pub window: Option<usize>,
}

/// `out = softmax(q Kᵀ / sqrt(head_dim)) V` for each query head of each row of the spans, whose K and V (and those of all
/// positions before) are already in `kv`. `q` and `out` are `[rows of all spans, heads, head_dim]`.
pub fn attention(cpu: &Cpu, kv: &KvMemory, what: Attention, spans: &[Span<'_>], q: &[f32], out: &mut [f32]) {
    let Attention { layer, heads, window } = what;
    let layout = kv.layout();
    let width = heads * layout.head_dim;
    assert!(heads > 0 && heads.is_multiple_of(layout.kv_heads), "query heads in equal groups");
    assert!(window != Some(0), "a window holds at least the row itself");
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    assert!(q.len() == rows * width && out.len() == rows * width, "q and out are [rows, heads, head_dim]");

    let group = heads / layout.kv_heads;
    let rows_per_task = (QUERIES_PER_TASK / group).max(1);
    let mut tasks = Vec::new();
    let mut first = 0;
    for span in spans {
        assert!(span.blocks.len() * BLOCK_POSITIONS >= span.start + span.rows, "the block table ends before the span");
        for start in (0..span.rows).step_by(rows_per_task) {
            let rows = start..(start + rows_per_task).min(span.rows);
            tasks.extend((0..layout.kv_heads).map(|kv_head| Task { span, first, rows: rows.clone(), kv_head }));
        }
        first += span.rows;
    }
    let call = Call { kv, layer, q, heads, group, window, out: &Disjoint::new(out) };
    let scratch = || Scratch::new(layout.head_dim);
    let positions: usize = spans.iter().map(|span| span.rows * (span.start + span.rows)).sum();
    if positions * width < NUMBERS_MIN_TO_SHARE {
        let mut scratch = scratch();
        return tasks.into_iter().for_each(|task| cpu.isa().dispatch(Run { call: &call, task, scratch: &mut scratch }));
    }
    cpu.for_each(tasks.len(), |i| {
        cpu.isa().dispatch(Run { call: &call, task: tasks[i].clone(), scratch: &mut scratch() });
    });
}

/// Queries of one task: enough to reuse K and V while they are near, few enough to keep all threads busy.
const QUERIES_PER_TASK: usize = 32;
/// Numbers of K below which other threads are not worth waking.
const NUMBERS_MIN_TO_SHARE: usize = 1 << 16;
/// Queries that pass over a block together.
const TILE: usize = 4;

/// What all tasks share.
struct Call<'a> {
    kv: &'a KvMemory,
    layer: usize,
    q: &'a [f32],
    heads: usize,
    /// Query heads per KV head.
    group: usize,
    window: Option<usize>,
    out: &'a Disjoint<'a, f32>,
}

/// Some rows of a span, and the query heads of one KV head.
#[derive(Clone)]
struct Task<'a> {
    span: &'a Span<'a>,
    /// The span's first row in `q` and `out`.
    first: usize,
    /// Of the span.
    rows: Range<usize>,
    kv_head: usize,
}

/// Buffers of one thread: `[TILE][head_dim, rounded up to whole vectors]`.
struct Scratch {
    /// Scaled queries, zeros after `head_dim`.
    q: Vec<[f32; LANES]>,
    /// Weighted sums of V so far.
    sums: Vec<[f32; LANES]>,
}

impl Scratch {
    fn new(head_dim: usize) -> Self {
        let vectors = TILE * head_dim.div_ceil(LANES);
        Self { q: vec![[0.0; LANES]; vectors], sums: vec![[0.0; LANES]; vectors] }
    }
}

struct Run<'a> {
    call: &'a Call<'a>,
    task: Task<'a>,
    scratch: &'a mut Scratch,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        with_element!(self.call.kv.layout().dtype, E => self.run_on::<S, E>(simd))
    }
}

impl Run<'_> {
    #[inline(always)]
    fn run_on<S: Simd, E: Element>(mut self, simd: S) {
        let queries = self.task.rows.len() * self.call.group;
        let mut query = 0;
        while query + TILE <= queries {
            self.tile::<S, E, TILE>(simd, query);
            query += TILE;
        }
        while query < queries {
            self.tile::<S, E, 1>(simd, query);
            query += 1;
        }
    }

    /// Position, and start in `q` and `out`, of a query of this task. Queries are numbered row by row, then head by head.
    #[inline(always)]
    fn query(&self, index: usize) -> (usize, usize) {
        let (call, task) = (self.call, &self.task);
        let row = task.rows.start + index / call.group;
        let head = task.kv_head * call.group + index % call.group;
        (task.span.start + row, ((task.first + row) * call.heads + head) * call.kv.layout().head_dim)
    }

    /// `N` queries from `query` on, over all blocks that any of them reads.
    #[inline(always)]
    fn tile<S: Simd, E: Element, const N: usize>(&mut self, simd: S, query: usize) {
        let call = self.call;
        let layout = call.kv.layout();
        let head_dim = layout.head_dim;
        let vectors = head_dim.div_ceil(LANES);
        let queries: [(usize, usize); N] = from_fn(|i| self.query(query + i));
        let visible: [Range<usize>; N] = queries.map(|(position, _)| match call.window {
            Some(window) => (position + 1).saturating_sub(window)..position + 1,
            None => 0..position + 1,
        });
        let scale = 1.0 / (head_dim as f32).sqrt();
        for i in 0..N {
            let q = &call.q[queries[i].1..queries[i].1 + head_dim];
            for (vector, q) in self.scratch.q[i * vectors..(i + 1) * vectors].iter_mut().zip(q.chunks(LANES)) {
                *vector = [0.0; LANES];
                vector[..q.len()].copy_from_slice(q);
                simd.store(simd.mul(simd.load(vector), simd.splat(scale)), vector);
            }
        }
        let sums = &mut self.scratch.sums[..N * vectors];
        sums.fill([0.0; LANES]);
        let mut states = [State { max: f32::NEG_INFINITY, sum: 0.0 }; N];

        // Positions grow from query to query, so the first sees furthest back and the last furthest on.
        let blocks = visible[0].start / BLOCK_POSITIONS..visible[N - 1].end.div_ceil(BLOCK_POSITIONS);
        for block in blocks {
            let bytes = call.kv.block(self.task.span.blocks[block]);
            let base = block * BLOCK_POSITIONS;
            let slots: [Range<usize>; N] = from_fn(|i| {
                let clip = |position: usize| position.clamp(base, base + BLOCK_POSITIONS) - base;
                clip(visible[i].start)..clip(visible[i].end)
            });
            let k = &bytes[layout.head(call.layer, Part::K, self.task.kv_head)];
            let v = &bytes[layout.head(call.layer, Part::V, self.task.kv_head)];
            let scores = scores::<S, E, N>(simd, &self.scratch.q, k, head_dim);
            let mut weights = [[0.0; LANES]; N];
            for i in 0..N {
                if !slots[i].is_empty() {
                    let Some(factor) = states[i].absorb(simd, scores[i], &slots[i], &mut weights[i]) else { continue };
                    for sums in &mut sums[i * vectors..(i + 1) * vectors] {
                        simd.store(simd.mul(simd.load(sums), simd.splat(factor)), sums);
                    }
                }
            }
            if slots.iter().all(|slots| slots.len() == BLOCK_POSITIONS) {
                add_values::<S, E, N>(simd, &weights, 0..BLOCK_POSITIONS, v, head_dim, sums);
            } else {
                for i in 0..N {
                    let sums = &mut sums[i * vectors..(i + 1) * vectors];
                    add_values::<S, E, 1>(simd, &[weights[i]], slots[i].clone(), v, head_dim, sums);
                }
            }
        }

        for i in 0..N {
            // SAFETY: tasks have disjoint (row, head) pairs, and this is the only part alive within the task.
            let out = unsafe { call.out.part(queries[i].1..queries[i].1 + head_dim) };
            let total = simd.splat(states[i].sum);
            for (out, sums) in out.chunks_mut(LANES).zip(&sums[i * vectors..(i + 1) * vectors]) {
                let result = simd.to_array(simd.div(simd.load(sums), total));
                out.copy_from_slice(&result[..out.len()]);
            }
        }
    }
}

/// Running maximum of the scores, and sum of the exponentials relative to it.
#[derive(Clone, Copy)]
struct State {
    max: f32,
    sum: f32,
}

impl State {
    /// Takes in the scores of one block's visible `slots`. `weights` becomes their exponentials, 0 elsewhere. The answer is the
    /// factor for everything summed before, if that changes.
    #[inline(always)]
    fn absorb<S: Simd>(&mut self, simd: S, scores: S::V, slots: &Range<usize>, weights: &mut [f32; LANES]) -> Option<f32> {
        let hidden = simd.splat(f32::NEG_INFINITY);
        let slot = simd.load(&SLOTS);
        let below_end = simd.select_less(slot, simd.splat(slots.end as f32), scores, hidden);
        let visible = simd.select_less(slot, simd.splat(slots.start as f32), hidden, below_end);
        let largest = simd.max_lane(visible);
        let mut factor = None;
        if largest > self.max {
            let scale = simd.to_array(exp(simd, simd.splat(self.max - largest)))[0];
            self.max = largest;
            self.sum *= scale;
            factor = Some(scale);
        }
        let exponentials = exp(simd, simd.sub(visible, simd.splat(self.max)));
        self.sum += simd.sum(exponentials);
        simd.store(exponentials, weights);
        factor
    }
}

/// The number of each lane.
const SLOTS: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Scores of `N` queries with a block's 16 positions.
#[inline(always)]
fn scores<S: Simd, E: Element, const N: usize>(simd: S, q: &[[f32; LANES]], k: &[u8], head_dim: usize) -> [S::V; N] {
    let vectors = head_dim.div_ceil(LANES);
    let whole = head_dim / LANES;
    let queries: [&[[f32; LANES]]; N] = from_fn(|i| &q[i * vectors..(i + 1) * vectors]);
    let mut dots = [[simd.zero(); BLOCK_POSITIONS]; N];
    // Four positions at a time keep 4 N sums in registers.
    for quad in 0..BLOCK_POSITIONS / 4 {
        let keys: [(&[E::Chunk], &[u8]); 4] = from_fn(|t| {
            let position = 4 * quad + t;
            E::chunks(&k[position * head_dim * E::BYTES..(position + 1) * head_dim * E::BYTES])
        });
        let mut sums = [[simd.zero(); 4]; N];
        for step in 0..vectors {
            for t in 0..4 {
                let key = if step < whole { E::load(simd, &keys[t].0[step]) } else { E::load_part(simd, keys[t].1) };
                for i in 0..N {
                    sums[i][t] = simd.fma(simd.load(&queries[i][step]), key, sums[i][t]);
                }
            }
        }
        for i in 0..N {
            dots[i][4 * quad..4 * quad + 4].copy_from_slice(&sums[i]);
        }
    }
    let mut scores = [simd.zero(); N];
    for i in 0..N {
        scores[i] = simd.sum16(&dots[i]);
    }
    scores
}

/// `sums[i] += weights[i][t] * V[t]` for the block's positions `slots`, in ascending order.
#[inline(always)]
fn add_values<S: Simd, E: Element, const N: usize>(
    simd: S,
    weights: &[[f32; LANES]; N],
    slots: Range<usize>,
    v: &[u8],
    head_dim: usize,
    sums: &mut [[f32; LANES]],
) {
    let vectors = head_dim.div_ceil(LANES);
    let whole = head_dim / LANES;
    for step in 0..vectors {
        let mut acc = [simd.zero(); N];
        for i in 0..N {
            acc[i] = simd.load(&sums[i * vectors + step]);
        }
        for t in slots.clone() {
            let (chunks, rest) = E::chunks(&v[t * head_dim * E::BYTES..(t + 1) * head_dim * E::BYTES]);
            let value = if step < whole { E::load(simd, &chunks[step]) } else { E::load_part(simd, rest) };
            for i in 0..N {
                acc[i] = simd.fma(simd.splat(weights[i][t]), value, acc[i]);
            }
        }
        for i in 0..N {
            simd.store(acc[i], &mut sums[i * vectors + step]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        dtype::{Dtype, decode},
        kv::{KvLayout, write},
        testing::{close, cpus, numbers},
    };

    /// One sequence of `positions`, whose K and V are in blocks of a shuffled table.
    struct Fixture {
        layout: KvLayout,
        heads: usize,
        positions: usize,
        table: Vec<u32>,
        kv: KvMemory,
        q: Vec<f32>,
    }

    fn fixture(cpu: &Cpu, positions: usize, kv_heads: usize, group: usize, head_dim: usize, dtype: Dtype) -> Fixture {
        let layout = KvLayout { layers: 2, kv_heads, head_dim, dtype };
        let blocks = positions.div_ceil(BLOCK_POSITIONS);
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let mut kv = KvMemory::new(layout, blocks);
        // What an unwritten position holds must not matter.
        (0..blocks as u32).for_each(|id| kv.block_mut(id).fill(0xff));
        let width = kv_heads * head_dim;
        let span = Span { blocks: &table, start: 0, rows: positions };
        let sharpen = |x: Vec<f32>| x.into_iter().map(|x| 3.0 * x).collect::<Vec<_>>();
        write(cpu, &mut kv, 1, &[span], &sharpen(numbers(positions * width, 1)), &numbers(positions * width, 2));
        let q = sharpen(numbers(positions * width * group, 3));
        Fixture { layout, heads: kv_heads * group, positions, table, kv, q }
    }

    impl Fixture {
        fn run(&self, cpu: &Cpu, rows: Range<usize>, window: Option<usize>) -> Vec<f32> {
            let width = self.heads * self.layout.head_dim;
            let mut out = vec![f32::NAN; rows.len() * width];
            let span = Span { blocks: &self.table, start: rows.start, rows: rows.len() };
            let q = &self.q[rows.start * width..rows.end * width];
            attention(cpu, &self.kv, Attention { layer: 1, heads: self.heads, window }, &[span], q, &mut out);
            out
        }

        fn reference(&self, window: Option<usize>) -> Vec<f64> {
            let (d, group) = (self.layout.head_dim, self.heads / self.layout.kv_heads);
            let stored = |part, head: usize, position: usize| {
                let block = self.kv.block(self.table[position / 16]);
                let all = decode(self.layout.dtype, &block[self.layout.head(1, part, head)]);
                all[position % 16 * d..][..d].iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
            };
            let mut out = Vec::new();
            for row in 0..self.positions {
                for head in 0..self.heads {
                    let q = &self.q[(row * self.heads + head) * d..][..d];
                    let first = window.map_or(0, |w| (row + 1).saturating_sub(w));
                    let scores: Vec<f64> = (first..=row)
                        .map(|p| {
                            stored(Part::K, head / group, p).iter().zip(q).map(|(k, &q)| k * f64::from(q)).sum::<f64>() / (d as f64).sqrt()
                        })
                        .collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    let mut sums = vec![0.0; d];
                    for (p, score) in (first..=row).zip(&scores) {
                        for (sum, v) in sums.iter_mut().zip(stored(Part::V, head / group, p)) {
                            *sum += (score - max).exp() / total * v;
                        }
                    }
                    out.extend(sums);
                }
            }
            out
        }
    }

    #[test]
    fn matches_the_f64_reference_with_the_same_bits_everywhere() {
        for (positions, kv_heads, group, head_dim, dtype, window) in [
            (1, 1, 1, 8, Dtype::F32, None),
            (37, 2, 3, 24, Dtype::F32, None),
            (50, 1, 7, 16, Dtype::F16, None),
            (49, 2, 4, 64, Dtype::Bf16, None),
            (70, 2, 2, 32, Dtype::F32, Some(24)),
            (40, 1, 1, 80, Dtype::Bf16, Some(1)),
        ] {
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let fixture = fixture(&cpu, positions, kv_heads, group, head_dim, dtype);
                let out = fixture.run(&cpu, 0..positions, window);
                let first = first.get_or_insert_with(|| {
                    close(&out, fixture.reference(window).into_iter(), 3e-6);
                    out.clone()
                });
                assert_eq!(*first, out, "{} with {} threads", cpu.isa(), cpu.threads());
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_chunk_or_batch() {
        for window in [None, Some(24)] {
            for cpu in cpus() {
                let fixture = fixture(&cpu, 75, 2, 3, 24, Dtype::Bf16);
                let whole = fixture.run(&cpu, 0..75, window);
                for size in [1, 7, 16, 33] {
                    let parts: Vec<f32> = (0..75).step_by(size).flat_map(|s| fixture.run(&cpu, s..(s + size).min(75), window)).collect();
                    assert_eq!(parts, whole, "chunks of {size}");
                }
                let spans = [40..75, 3..4, 0..40].map(|r| Span { blocks: &fixture.table, start: r.start, rows: r.len() });
                let width = fixture.heads * 24;
                let rows = |x: &[f32]| [&x[40 * width..], &x[3 * width..4 * width], &x[..40 * width]].concat();
                let mut out = vec![0.0; rows(&whole).len()];
                let what = Attention { layer: 1, heads: fixture.heads, window };
                attention(&cpu, &fixture.kv, what, &spans, &rows(&fixture.q), &mut out);
                assert_eq!(out, rows(&whole), "several spans at once");
            }
        }
    }
}
