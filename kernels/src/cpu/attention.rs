//! Attention over paged K and V.
//!
//! **The arithmetic.** A score is a chain of fused multiply-adds over the head's dimensions, with the query scaled by
//! `log2(e) / sqrt(head_dim)`, or another factor, and capped softly where a model does. Positions are cut into splits at
//! multiples of 256, counted from the sequence's beginning. In a split: the maximum of the visible scores, the powers
//! of 2 relative to it, their sum lane by lane and then in the fixed tree, and for each output a chain over the visible
//! positions. Splits are merged in ascending order, each side scaled to the larger maximum (online softmax: Dao, 2023,
//! section 3.1). All of this depends on the query's own position alone: not on how a prompt was cut into chunks, nor on
//! the kernel that computes it.
//!
//! K and V in bf16 are multiplied like bf16 weights (`gemm::panel`): queries and powers are rounded to bf16, and chains
//! take pairs of dimensions and pairs of positions 2i and 2i + 1, or blocks of 32 dimensions and 32 positions
//! (`gemm::amx`). Powers are summed before rounding.
//!
//! K and V in 8 bits are multiplied as integers with 16-bit integers: queries, each scaled so that its largest number is 32,767, and powers
//! times the scales of V at their positions, scaled likewise for the largest number of the split. So both lose less than in bf16, and
//! integer sums are exact. Sums are converted and scaled at the end. K and V are stored transformed (`hadamard`): queries are also
//! transformed, and the result is transformed back.
//!
//! A head's sink joins its softmax like the score of one more position, whose V is zero: once, after all splits, and so in the same place
//! regardless of the cut.
//!
//! In a latent layout all query heads share one K, whose first numbers are V. A single row then has as many queries as many rows have
//! elsewhere, so `prefill` also computes single rows, and takes V from the K that it has packed.
//!
//! - `prefill`: many queries. A split's K and V are packed into panels once, and tiles of queries go over them as in a
//!   matrix product
//! - `decode`: the queries of one row. K and V are read once, as stored, at the speed of memory; splits of a long
//!   sequence may go to different threads and are merged afterwards
//! - `latent`: the groups of query heads that share a latent
//! - `softmax`: from scores to weights, and merging splits; `split_kv`: one head's stored K and V; `prefetch`: bringing
//!   them

mod decode;
mod latent;
mod prefetch;
mod prefill;
mod softmax;
mod split_kv;

use crate::{
    cpu::{
        Cpu,
        element::load_part,
        gemm::{
            float::activations::{FloatActivations, SharedActivations},
            int8::quantize,
            tiling::Tiling,
        },
        hadamard,
        kv::{
            INT8_HEAD_DIM_MAX, KvMemory, Span,
            element::{INT8_HEAD_VECTORS, KvPanelFormat},
        },
        memory::Memory,
        simd::{LANES, Simd},
        threads::disjoint::Disjoint,
    },
    kv::{BLOCK_POSITIONS, KvStorage},
};
use softmax::{Scores, State, Weights};
use std::ops::Range;

/// The parameters of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    pub layer: usize,
    /// Query heads; equal groups of them share a KV head.
    pub heads: usize,
    /// A row at position `p` attends to positions `0..=p`, or to the last `window` of them.
    pub window: Option<usize>,
    /// The factor of scores; `1 / sqrt(head_dim)` if `None`.
    pub scale: Option<f32>,
    /// Scaled scores become `cap tanh(score / cap)`.
    pub cap: Option<f32>,
    /// The logit of each query head that joins the softmax's sum, neither scaled nor capped.
    pub sinks: Option<&'a [f32]>,
    /// Whether a row also attends to the later rows of its span; with a window, to fewer than `window` in either direction.
    pub is_bidirectional: bool,
}

impl Attention<'_> {
    /// Causal attention without window, cap or sinks, with scores scaled by `1 / sqrt(head_dim)`.
    pub fn plain(layer: usize, heads: usize) -> Self {
        Self { layer, heads, window: None, scale: None, cap: None, sinks: None, is_bidirectional: false }
    }
}

/// Buffers kept from call to call, so that a call allocates nothing.
#[derive(Default)]
pub struct AttentionBuffers {
    tasks: Vec<Task>,
    /// The first task of each query whose splits are separate tasks.
    merges: Vec<usize>,
    partial: Memory<f32>,
}

/// Positions in a split.
pub(crate) const SPLIT: usize = 256;
const SPLIT_BLOCKS: usize = SPLIT / BLOCK_POSITIONS;
/// Pairs in a block of products, for AMX's order.
const BLOCK_LINES: usize = 16;

/// `out = softmax(scale q Kᵀ) V` for each query head of each row of the spans. `kv` already holds their K and V and those of all positions
/// before. `q` is `[rows of all spans, heads, head_dim]`, and so is `out`, packed; in a latent layout, `out` has as many numbers for each
/// head as V.
pub fn attention(
    cpu: &Cpu,
    kv: &KvMemory,
    what: Attention<'_>,
    spans: &[Span<'_>],
    q: &[f32],
    out: &mut FloatActivations,
    buffers: &mut AttentionBuffers,
) {
    let Attention { layer, heads, window, scale, cap, sinks, is_bidirectional } = what;
    let layout = kv.layout();
    let width = heads * layout.head_dim;
    assert!(heads > 0 && heads.is_multiple_of(layout.kv_heads), "query heads in equal groups");
    assert!(
        layout.latent.is_none_or(|latent| layout.kv_heads == 1
            && layout.dtype != KvStorage::Int8
            && latent <= layout.head_dim
            && latent.is_multiple_of(2)),
        "a latent is one head's numbers, in whole pairs"
    );
    assert!(layout.dtype != KvStorage::Int8 || layout.head_dim <= INT8_HEAD_DIM_MAX, "sums of integers have room in 32 bits");
    assert!(window != Some(0), "a window holds at least the row itself");
    assert!(cap.is_none_or(|cap| cap > 0.0), "a cap leaves room");
    assert!(sinks.is_none_or(|sinks| sinks.len() == heads), "a sink for each query head");
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    assert!(q.len() == rows * width, "q is [rows, heads, head_dim]");
    out.resize(cpu, rows, heads * layout.value_dim());

    let kv_heads = if layout.latent.is_some() { latent::head_groups(heads, rows, cpu.threads()) } else { layout.kv_heads };
    let group = heads / kv_heads;
    let (scale, cap) = (score_scale(layout.head_dim, scale), cap.map(|cap| cap * std::f32::consts::LOG2_E));
    let call = Call { kv, layer, spans, q, heads, kv_heads, group, window, scale, cap, sinks, is_bidirectional, out: &out.shared() };
    let AttentionBuffers { tasks, merges, partial } = buffers;
    let positions: usize = spans.iter().map(|span| span.rows * (span.start + span.rows)).sum();
    let is_small = positions * width < NUMBERS_MIN_TO_SHARE;
    call.plan(if is_small { 1 } else { cpu.threads() }, tasks, merges);
    // There is room for all heads, even if a task has few.
    let states_len = heads * State::len(layout.value_dim());
    let partials = tasks.iter().filter(|task| task.splits.is_some()).count() * states_len;
    if partial.as_slice().len() < partials {
        *partial = Memory::new(partials);
    }
    let states = Disjoint::new(partial.as_mut_slice());
    let run = |index: usize| {
        let task = &tasks[index];
        let next = cpu.after(index, tasks.len()).map(|next| &tasks[next]).filter(|next| next.rows.len() == 1);
        match &task.splits {
            // SAFETY: tasks with splits come first, and each has its own part.
            Some(_) => decode::run(cpu, &call, task, next, Some(unsafe { states.part(part(index, states_len)) })),
            None if call.is_single(task.rows.len()) => decode::run(cpu, &call, task, next, None),
            None => prefill::run(cpu, &call, task),
        }
    };
    if is_small {
        return (0..tasks.len()).for_each(run);
    }
    cpu.for_each(tasks.len(), run);
    cpu.for_each(merges.len(), |index| {
        let first = merges[index];
        let same = tasks[first..].iter().take_while(|task| task.is_split_of(&tasks[first])).count();
        // SAFETY: the tasks that wrote these parts are done, and each merge has parts of its own.
        let states = unsafe { states.part(part(first, states_len).start..part(first + same - 1, states_len).end) };
        decode::merge(cpu, &call, &tasks[first], states);
    });
}

/// The part of `positions` in split `split`, counted from the split's start.
fn within(split: usize, positions: &Range<usize>) -> Range<usize> {
    let clip = |position: usize| position.clamp(split * SPLIT, (split + 1) * SPLIT) - split * SPLIT;
    clip(positions.start)..clip(positions.end)
}

/// The scale of the integers that represent a query times `scale`, and its inverse. The scale is NaN if a number is not finite, which
/// integers cannot express.
#[inline(always)]
fn scale_of_query<S: Simd>(simd: S, q: &[f32], scale: S::V) -> (f32, f32) {
    let (mut largest, mut zeros) = (simd.zero(), simd.zero());
    for q in q.chunks(LANES) {
        let x = simd.mul(load_part(simd, q), scale);
        largest = simd.max(simd.max(x, simd.sub(simd.zero(), x)), largest);
        zeros = simd.fma(x, simd.zero(), zeros);
    }
    let (scale, inverse) = quantize::scale_and_inverse::<{ i16::MAX }>(simd.max_lane(largest));
    (scale + simd.sum(zeros), inverse)
}

/// The factor of scores for powers of 2, where softmax has powers of e.
fn score_scale(head_dim: usize, scale: Option<f32>) -> f32 {
    match scale {
        Some(scale) => std::f32::consts::LOG2_E * scale,
        None => std::f32::consts::LOG2_E / (head_dim as f32).sqrt(),
    }
}

fn part(index: usize, len: usize) -> Range<usize> {
    index * len..(index + 1) * len
}

/// Queries per task: enough to make packing K and V cheap in comparison, few enough to keep all threads busy.
const QUERIES_PER_TASK: usize = 192;
/// The number of tasks per thread below which single rows are split.
const TASKS_PER_THREAD: usize = 4;
/// Numbers of K below which waking other threads does not pay.
const NUMBERS_MIN_TO_SHARE: usize = 1 << 16;

/// The arguments that all tasks share.
struct Call<'a> {
    kv: &'a KvMemory,
    layer: usize,
    spans: &'a [Span<'a>],
    q: &'a [f32],
    heads: usize,
    /// KV heads; in a latent layout, groups of query heads, which all read the only one.
    kv_heads: usize,
    /// Query heads per KV head.
    group: usize,
    window: Option<usize>,
    /// The factor of queries, for powers of 2.
    scale: f32,
    /// The soft cap of scaled scores.
    cap: Option<f32>,
    /// Each query head's sink.
    sinks: Option<&'a [f32]>,
    is_bidirectional: bool,
    out: &'a SharedActivations<'a>,
}

/// Some rows of a span with the query heads of one KV head, or a single row with the query heads of several.
struct Task {
    span: usize,
    /// The span's first row in `q` and `out`.
    first: usize,
    /// The rows within the span.
    rows: Range<usize>,
    kv_heads: Range<usize>,
    /// The splits of a task that computes only some of them; its results are merged with those of other tasks.
    splits: Option<Range<usize>>,
}

impl Task {
    fn is_split_of(&self, other: &Task) -> bool {
        self.splits.is_some() && (self.span, self.kv_heads.start) == (other.span, other.kv_heads.start)
    }
}

impl Call<'_> {
    /// Cuts the work into tasks, the longest first, so that threads finish at about the same time.
    fn plan(&self, threads: usize, tasks: &mut Vec<Task>, merges: &mut Vec<usize>) {
        tasks.clear();
        merges.clear();
        let kv_heads = self.kv_heads;
        let single_rows = || self.spans.iter().filter(|span| self.is_single(span.rows));
        let split = threads > 1 && single_rows().count() * kv_heads < TASKS_PER_THREAD * threads;
        let splits = |span: &Span<'_>| self.splits(&self.visible(span, span.start));
        let pieces = single_rows().map(|span| if split { splits(span).len() } else { 1 }).sum::<usize>() * kv_heads;
        // Heads are neighbours in memory, and the hardware prefetches from one head into the next: the more heads per
        // task the better, as long as there are enough tasks.
        let heads_per_task = if threads == 1 { kv_heads } else { (pieces / (TASKS_PER_THREAD * threads)).clamp(1, kv_heads) };
        let head_groups = || (0..kv_heads).step_by(heads_per_task).map(|head| head..(head + heads_per_task).min(kv_heads));
        let firsts = |spans: &[Span<'_>]| spans.iter().map(|span| span.rows).sum::<usize>();
        if split {
            for (index, span) in self.spans.iter().enumerate().filter(|(_, span)| self.is_single(span.rows)) {
                let splits = splits(span);
                if splits.len() > 1 {
                    let first = firsts(&self.spans[..index]);
                    for kv_heads in head_groups() {
                        merges.push(tasks.len());
                        let task =
                            |split| Task { span: index, first, rows: 0..1, kv_heads: kv_heads.clone(), splits: Some(split..split + 1) };
                        tasks.extend(splits.clone().map(task));
                    }
                }
            }
        }
        let rows_per_task = (QUERIES_PER_TASK / self.group).max(1);
        let mut first = 0;
        for (index, span) in self.spans.iter().enumerate() {
            assert!(span.blocks.len() * BLOCK_POSITIONS >= span.start + span.rows, "the block table ends before the span");
            let task = |rows: Range<usize>, kv_heads| Task { span: index, first, rows, kv_heads, splits: None };
            if self.is_single(span.rows) {
                let is_split = split && splits(span).len() > 1;
                tasks.extend(head_groups().filter(|_| !is_split).map(|kv_heads| task(0..1, kv_heads)));
                first += 1;
                continue;
            }
            for start in (0..span.rows).step_by(rows_per_task).rev() {
                let rows = start..(start + rows_per_task).min(span.rows);
                tasks.extend((0..kv_heads).map(|kv_head| task(rows.clone(), kv_head..kv_head + 1)));
            }
            first += span.rows;
        }
    }

    /// Whether a span of this many rows goes to [`decode`].
    fn is_single(&self, rows: usize) -> bool {
        rows == 1 && self.kv.layout().latent.is_none()
    }

    /// The stored head that a KV head's queries read.
    #[inline(always)]
    fn stored_head(&self, kv_head: usize) -> usize {
        if self.kv.layout().latent.is_some() { 0 } else { kv_head }
    }

    /// Positions that a row of `span` at `position` attends to.
    #[inline(always)]
    fn visible(&self, span: &Span<'_>, position: usize) -> Range<usize> {
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let end = match self.is_bidirectional {
            true => self.window.map_or(usize::MAX, |window| position.saturating_add(window)).min(span.start + span.rows),
            false => position + 1,
        };
        start..end
    }

    /// The splits that hold `positions`.
    #[inline(always)]
    fn splits(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start / SPLIT..positions.end.div_ceil(SPLIT)
    }

    /// The splits that a single row's task computes.
    #[inline(always)]
    fn splits_of(&self, task: &Task) -> Range<usize> {
        task.splits.clone().unwrap_or(self.splits(&self.visible_to(task, 0)))
    }

    /// Row (of all spans) and query head of a task's query `index`. Queries are numbered row by row, then head by head.
    #[inline(always)]
    fn query(&self, task: &Task, index: usize) -> (usize, usize) {
        let heads = task.kv_heads.len() * self.group;
        (task.first + task.rows.start + index / heads, task.kv_heads.start * self.group + index % heads)
    }

    /// The positions that a task's query `index` attends to.
    #[inline(always)]
    fn visible_to(&self, task: &Task, index: usize) -> Range<usize> {
        let span = &self.spans[task.span];
        self.visible(span, span.start + task.rows.start + index / (task.kv_heads.len() * self.group))
    }

    /// Packs a tile of queries as words that multiply `L`: `[head_dim / inputs][queries of the tile]`. For integers,
    /// also sets their scales, which then scale the scores.
    #[inline(always)]
    fn pack_queries<S: Simd, L: KvPanelFormat>(
        &self,
        simd: S,
        task: &Task,
        queries: &Range<usize>,
        packed: &mut [u32],
        scales: &mut [f32],
    ) {
        let head_dim = self.kv.layout().head_dim;
        let words_per_vector = const { LANES / L::INPUTS };
        let scale = simd.splat(self.scale);
        for (i, index) in queries.clone().enumerate() {
            let (row, head) = self.query(task, index);
            let mut q = &self.q[(row * self.heads + head) * head_dim..][..head_dim];
            let (mut transformed, mut inverse) = ([[0.0; LANES]; INT8_HEAD_VECTORS], 1.0);
            if const { L::HAS_SCALES } {
                q = hadamard::transformed(simd, q, &mut transformed);
                (scales[index], inverse) = scale_of_query(simd, q, scale);
            }
            for (q, packed) in q.chunks(LANES).zip(packed.chunks_mut(words_per_vector * queries.len())) {
                let mut words = [0; LANES];
                let words = &mut words[..words_per_vector];
                L::put_words(simd, simd.mul(simd.mul(load_part(simd, q), scale), simd.splat(inverse)), words);
                packed.chunks_exact_mut(queries.len()).zip(words).for_each(|(to, word)| to[i] = *word);
            }
        }
    }

    /// Writes the result of a task's query `index`, from its state after all splits.
    #[inline(always)]
    fn finish<S: Simd>(&self, simd: S, task: &Task, index: usize, mut state: State<'_>) {
        let (row, head) = self.query(task, index);
        if let Some(sinks) = self.sinks {
            state.merge_sink(simd, sinks[head] * std::f32::consts::LOG2_E);
        }
        let head_dim = self.kv.layout().value_dim();
        let tile = self.out.tiling.tile_of(row);
        if self.kv.layout().dtype == KvStorage::Int8 {
            let mut room = [[0.0; LANES]; INT8_HEAD_VECTORS];
            let result = &mut room[..head_dim.div_ceil(LANES)];
            for (i, result) in result.iter_mut().enumerate() {
                simd.store(state.result(simd, i), result);
            }
            hadamard::transform(simd, head_dim, result);
            for (i, numbers) in result.as_flattened()[..head_dim].chunks(LANES).enumerate() {
                // SAFETY: tasks have disjoint (row, head) pairs.
                unsafe { self.out.put(simd, &tile, row, head * head_dim + i * LANES, numbers) };
            }
            return;
        }
        for start in (0..head_dim).step_by(LANES) {
            let result = simd.to_array(state.result(simd, start / LANES));
            let numbers = &result[..(head_dim - start).min(LANES)];
            // SAFETY: as above.
            unsafe { self.out.put(simd, &tile, row, head * head_dim + start, numbers) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            isa::Bf16Products,
            kv::{KvRows, write},
            testing::{close, cpus, numbers, order, stored, transformed},
        },
        dtype::{Dtype, decode, encode},
        kv::{KvLayout, Part},
    };
    use std::collections::HashMap;

    /// One sequence of `positions`, whose K and V lie in blocks of a reversed table.
    struct Fixture {
        layout: KvLayout,
        heads: usize,
        positions: usize,
        table: Vec<u32>,
        kv: KvMemory,
        q: Vec<f32>,
    }

    fn fixture(cpu: &Cpu, positions: usize, kv_heads: usize, group: usize, head_dim: usize, dtype: KvStorage) -> Fixture {
        let layout = KvLayout { layers: 2, kv_heads, head_dim, dtype, latent: None };
        let blocks = positions.div_ceil(BLOCK_POSITIONS);
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let mut kv = KvMemory::new(layout, blocks);
        // The contents of an unwritten position must not matter.
        (0..blocks as u32).for_each(|id| kv.block_mut(id).fill(0xff));
        let width = kv_heads * head_dim;
        let span = Span { blocks: &table, start: 0, rows: positions };
        let sharpen = |x: Vec<f32>| x.into_iter().map(|x| 3.0 * x).collect::<Vec<_>>();
        let (k, v) = (sharpen(numbers(positions * width, 1)), numbers(positions * width, 2));
        write(cpu, &mut kv, 1, [KvRows { spans: &[span], k: &k, v: &v }].into_iter());
        let q = sharpen(numbers(positions * width * group, 3));
        Fixture { layout, heads: kv_heads * group, positions, table, kv, q }
    }

    impl Fixture {
        fn run(&self, cpu: &Cpu, rows: Range<usize>, window: Option<usize>) -> Vec<f32> {
            self.run_as(cpu, rows, Attention { window, ..Attention::plain(1, self.heads) })
        }

        fn run_as(&self, cpu: &Cpu, rows: Range<usize>, what: Attention<'_>) -> Vec<f32> {
            let width = self.heads * self.layout.head_dim;
            let mut out = FloatActivations::default();
            let span = Span { blocks: &self.table, start: rows.start, rows: rows.len() };
            let q = &self.q[rows.start * width..rows.end * width];
            attention(cpu, &self.kv, what, &[span], q, &mut out, &mut AttentionBuffers::default());
            out.to_rows()
        }

        fn reference(&self, Attention { window, scale, cap, sinks, is_bidirectional, .. }: Attention<'_>) -> Vec<f64> {
            let (d, group) = (self.layout.head_dim, self.heads / self.layout.kv_heads);
            let of_head = |part, head: usize| -> Vec<Vec<f64>> {
                self.table.iter().flat_map(|&id| stored(&self.kv, id, 1, part, head)).take(self.positions).collect()
            };
            let all = |part| (0..self.layout.kv_heads).map(|head| of_head(part, head)).collect::<Vec<_>>();
            let (keys, values) = (all(Part::K), all(Part::V));
            let mut out = Vec::new();
            for row in 0..self.positions {
                for head in 0..self.heads {
                    let scale = score_scale(d, scale);
                    let q: Vec<f32> = self.q[(row * self.heads + head) * d..][..d].iter().map(|q| q * scale).collect();
                    let q = match self.layout.dtype {
                        KvStorage::Float(Dtype::Bf16) => decode(Dtype::Bf16, &encode(Dtype::Bf16, &q)),
                        KvStorage::Int8 => in_16_bits(transformed(&q)),
                        _ => q,
                    };
                    let first = window.map_or(0, |w| (row + 1).saturating_sub(w));
                    let product = |p: usize| keys[head / group][p].iter().zip(&q).map(|(k, &q)| k * f64::from(q)).sum::<f64>();
                    let cap = cap.map(|cap| f64::from(cap) * std::f64::consts::LOG2_E);
                    let capped = |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh());
                    let last = match is_bidirectional {
                        true => window.map_or(usize::MAX, |w| row + w - 1).min(self.positions - 1),
                        false => row,
                    };
                    let scores: Vec<f64> = (first..=last).map(|p| capped(product(p))).collect();
                    let sink = sinks.map(|sinks| f64::from(sinks[head]) * std::f64::consts::LOG2_E);
                    let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp2()).sum();
                    let mut sums = vec![0.0; d];
                    for (p, score) in (first..=last).zip(&scores) {
                        for (sum, v) in sums.iter_mut().zip(&values[head / group][p]) {
                            *sum += (score - max).exp2() / total * v;
                        }
                    }
                    if self.layout.dtype == KvStorage::Int8 {
                        sums = transformed(&sums.iter().map(|sum| *sum as f32).collect::<Vec<_>>()).into_iter().map(f64::from).collect();
                    }
                    out.extend(sums);
                }
            }
            out
        }
    }

    /// The queries, rounded to the integers that represent them.
    fn in_16_bits(q: Vec<f32>) -> Vec<f32> {
        let largest = q.iter().fold(0.0f32, |largest, q| largest.max(q.abs()));
        q.into_iter().map(|q| (q * (32767.0 / largest)).round_ties_even() * (largest / 32767.0)).collect()
    }

    #[test]
    fn matches_the_f64_reference_with_the_same_bits_everywhere() {
        for (positions, kv_heads, group, head_dim, dtype, window, (scale, cap)) in [
            (1, 1, 1, 8, KvStorage::Float(Dtype::F32), None, (None, None)),
            (37, 2, 3, 24, KvStorage::Float(Dtype::F32), None, (Some(0.05), None)),
            (50, 1, 7, 16, KvStorage::Float(Dtype::F16), None, (None, None)),
            (49, 2, 4, 64, KvStorage::Float(Dtype::Bf16), None, (None, Some(2.0))),
            (70, 2, 2, 32, KvStorage::Float(Dtype::F32), Some(24), (Some(0.3), Some(1.5))),
            (40, 1, 1, 80, KvStorage::Float(Dtype::Bf16), Some(1), (None, None)),
            (600, 1, 3, 40, KvStorage::Float(Dtype::Bf16), None, (None, Some(4.0))),
            (530, 2, 16, 16, KvStorage::Float(Dtype::F16), Some(300), (None, Some(0.7))),
            (37, 2, 3, 24, KvStorage::Int8, None, (None, None)),
            (620, 1, 5, 80, KvStorage::Int8, None, (Some(0.1), Some(3.0))),
            (540, 2, 13, 6, KvStorage::Int8, Some(270), (None, None)),
        ] {
            let mut first: HashMap<Bf16Products, Vec<f32>> = HashMap::new();
            for cpu in cpus() {
                let fixture = fixture(&cpu, positions, kv_heads, group, head_dim, dtype);
                let what = Attention { window, scale, cap, ..Attention::plain(1, fixture.heads) };
                let out = fixture.run_as(&cpu, 0..positions, what);
                let first = first.entry(order(cpu.isa(), dtype == KvStorage::Float(Dtype::Bf16))).or_insert_with(|| {
                    // V is within ±1. Weights in bf16 are off by up to 2^-9 each; those in 16 bits by up to 2^-16 of
                    // the largest, and a split has 256.
                    let tolerance = match dtype {
                        KvStorage::Float(Dtype::Bf16) => 2f64.powi(-9),
                        KvStorage::Int8 => 2f64.powi(-12),
                        _ => 3e-6,
                    };
                    close(&out, fixture.reference(what).into_iter(), tolerance);
                    out.clone()
                });
                assert_eq!(*first, out, "{} with {} threads", cpu.isa(), cpu.threads());
            }
        }
    }

    #[test]
    fn rows_that_see_both_ways_match_the_f64_reference_with_the_same_bits_everywhere() {
        for (positions, kv_heads, group, head_dim, dtype, window) in [
            (1, 2, 1, 8, Dtype::F32, None),
            (37, 2, 1, 24, Dtype::F32, None),
            (600, 2, 1, 32, Dtype::F32, None),
            (530, 1, 3, 16, Dtype::F32, Some(13)),
            (700, 1, 2, 64, Dtype::F16, Some(300)),
            (300, 1, 1, 48, Dtype::F32, Some(1)),
        ] {
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let fixture = fixture(&cpu, positions, kv_heads, group, head_dim, KvStorage::Float(dtype));
                let what = Attention { window, is_bidirectional: true, ..Attention::plain(1, fixture.heads) };
                let out = fixture.run_as(&cpu, 0..positions, what);
                let first = first.get_or_insert_with(|| {
                    close(&out, fixture.reference(what).into_iter(), 3e-6);
                    out.clone()
                });
                assert_eq!(*first, out, "{} with {} threads", cpu.isa(), cpu.threads());
            }
        }
    }

    #[test]
    fn a_row_alone_is_the_same_bits_as_among_many_however_long_its_sequence() {
        for (positions, group, head_dim, dtype, window) in [
            (700, 3, 24, KvStorage::Float(Dtype::Bf16), None),
            (530, 13, 64, KvStorage::Float(Dtype::F32), None),
            (800, 1, 48, KvStorage::Float(Dtype::F16), Some(290)),
            (530, 13, 64, KvStorage::Int8, None),
            (800, 1, 42, KvStorage::Int8, Some(290)),
        ] {
            for cpu in cpus() {
                let fixture = fixture(&cpu, positions, 1, group, head_dim, dtype);
                let whole = fixture.run(&cpu, 0..positions, window);
                let width = group * head_dim;
                for row in (0..positions).step_by(53).chain([255, 256, 257, 511, 512, positions - 1]) {
                    let alone = fixture.run(&cpu, row..row + 1, window);
                    assert_eq!(alone, whole[row * width..(row + 1) * width], "row {row} on {}", cpu.isa());
                }
            }
        }
    }

    /// Sinks far above, among and far below the scores, for `heads` heads.
    fn sinks(heads: usize) -> Vec<f32> {
        const KINDS: [f32; 6] = [0.0, 12.0, -3.0, 1e30, -1e30, 1.5];
        (0..heads).map(|head| KINDS[head % KINDS.len()]).collect()
    }

    #[test]
    fn sinks_take_their_share_of_the_softmax_with_the_same_bits_everywhere() {
        for (positions, kv_heads, group, head_dim, dtype, window, cap) in [
            (1, 2, 3, 8, KvStorage::Float(Dtype::F32), None, None),
            (37, 2, 3, 24, KvStorage::Float(Dtype::F16), None, Some(2.0)),
            (70, 2, 5, 32, KvStorage::Float(Dtype::F32), Some(24), None),
            (600, 1, 8, 40, KvStorage::Float(Dtype::Bf16), None, None),
            (530, 2, 4, 64, KvStorage::Float(Dtype::Bf16), Some(300), None),
            (620, 1, 6, 80, KvStorage::Int8, Some(280), None),
            (540, 2, 3, 6, KvStorage::Int8, None, Some(3.0)),
        ] {
            let sinks = sinks(kv_heads * group);
            let mut first: HashMap<Bf16Products, Vec<f32>> = HashMap::new();
            for cpu in cpus() {
                let fixture = fixture(&cpu, positions, kv_heads, group, head_dim, dtype);
                let what = Attention { window, cap, sinks: Some(&sinks), ..Attention::plain(1, fixture.heads) };
                let whole = fixture.run_as(&cpu, 0..positions, what);
                let first = first.entry(order(cpu.isa(), dtype == KvStorage::Float(Dtype::Bf16))).or_insert_with(|| {
                    let tolerance = match dtype {
                        KvStorage::Float(Dtype::Bf16) => 2f64.powi(-9),
                        KvStorage::Int8 => 2f64.powi(-12),
                        _ => 3e-6,
                    };
                    close(&whole, fixture.reference(what).into_iter(), tolerance);
                    whole.clone()
                });
                assert_eq!(*first, whole, "{} with {} threads", cpu.isa(), cpu.threads());
                // If a row is alone, its splits may go to different threads.
                let width = fixture.heads * head_dim;
                for row in (0..positions).step_by(71).chain([positions - 1]) {
                    let alone = fixture.run_as(&cpu, row..row + 1, what);
                    assert_eq!(alone, whole[row * width..(row + 1) * width], "row {row} on {}", cpu.isa());
                }
                let parts = (0..positions).step_by(33).flat_map(|s| fixture.run_as(&cpu, s..(s + 33).min(positions), what));
                assert_eq!(parts.collect::<Vec<_>>(), whole, "in chunks on {}", cpu.isa());
            }
        }
    }

    #[test]
    fn a_sink_that_counts_for_nothing_changes_no_bit() {
        let cpu = Cpu::new(None, 2).unwrap();
        let fixture = fixture(&cpu, 300, 2, 3, 24, KvStorage::Float(Dtype::Bf16));
        let plain = Attention::plain(1, fixture.heads);
        let with_sinks = Attention { sinks: Some(&[-1e30; 6]), ..plain };
        assert_eq!(fixture.run_as(&cpu, 0..300, with_sinks), fixture.run_as(&cpu, 0..300, plain));
    }

    #[test]
    fn a_row_does_not_depend_on_its_chunk_or_batch() {
        for (dtype, window) in
            [KvStorage::Float(Dtype::Bf16), KvStorage::Int8].into_iter().flat_map(|dtype| [(dtype, None), (dtype, Some(24))])
        {
            for cpu in cpus() {
                let fixture = fixture(&cpu, 75, 2, 3, 24, dtype);
                let whole = fixture.run(&cpu, 0..75, window);
                for size in [1, 7, 16, 33] {
                    let parts: Vec<f32> = (0..75).step_by(size).flat_map(|s| fixture.run(&cpu, s..(s + size).min(75), window)).collect();
                    assert_eq!(parts, whole, "chunks of {size}");
                }
                let spans = [40..75, 3..4, 0..40].map(|r| Span { blocks: &fixture.table, start: r.start, rows: r.len() });
                let width = fixture.heads * 24;
                let rows = |x: &[f32]| [&x[40 * width..], &x[3 * width..4 * width], &x[..40 * width]].concat();
                let mut out = FloatActivations::default();
                let what = Attention { window, ..Attention::plain(1, fixture.heads) };
                attention(&cpu, &fixture.kv, what, &spans, &rows(&fixture.q), &mut out, &mut AttentionBuffers::default());
                assert_eq!(out.to_rows(), rows(&whole), "several spans at once");
            }
        }
    }
}
