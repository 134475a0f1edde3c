//! Online softmax: from scores to weights, and merging splits.

use super::{SPLIT, SPLIT_BLOCKS, prefetch::Prefetch};
use crate::{
    cpu::{
        activation::SoftCap,
        element::F32,
        exp::exp2,
        gemm::{int8::quantize, micro_kernel::Broadcast, panel::PANEL, prefetch::CACHE_LINE},
        kv::element::KvPanelFormat,
        simd::{LANES, Simd},
    },
    kv::Part,
};
use std::ops::Range;

/// A query's scores for a split's positions.
pub(super) type Scores = [f32; SPLIT];

/// A query's weights for a split's positions, as words that multiply V: words of one position each, or of two, which leaves the second half
/// undefined.
pub(super) type Weights = [u32; WEIGHTS_WORDS];

/// One cache line more than the split, as the rows of a tile would otherwise compete for the same few sets of the first-level cache.
pub(super) const WEIGHTS_WORDS: usize = SPLIT + CACHE_LINE / size_of::<u32>();

/// A tile of queries' weights, to multiply V's lines from `first` on.
#[derive(Clone, Copy)]
pub(super) struct Weighted<'a, const T: usize> {
    pub(super) weights: &'a [Weights; T],
    pub(super) first: usize,
    pub(super) len: usize,
}

impl<const T: usize> Broadcast<T> for Weighted<'_, T> {
    #[inline(always)]
    fn len(self) -> usize {
        self.len
    }

    #[inline(always)]
    fn at(self, l: usize, i: usize) -> u32 {
        self.weights[i][self.first + l]
    }
}

/// The scales of a split's K and V, if they have any: `[block][position]`.
#[derive(Default)]
pub(super) struct Scales {
    k: [[f32; LANES]; SPLIT_BLOCKS],
    v: [[f32; LANES]; SPLIT_BLOCKS],
}

impl Scales {
    /// Sets the scales of block `block` of the split.
    #[inline(always)]
    pub(super) fn set<S: Simd>(&mut self, simd: S, block: usize, part: Part, scales: &[u8; 4 * LANES]) {
        let all = if part == Part::K { &mut self.k } else { &mut self.v };
        simd.store(simd.load_f32_bytes(scales), &mut all[block]);
    }
}

/// A query's softmax over one split.
#[derive(Clone, Copy)]
pub(super) struct Normalizer {
    /// The largest score.
    pub(super) max: f32,
    /// Sum of the powers of 2 relative to `max`.
    pub(super) sum: f32,
    /// The factor of sums of V that were weighted with integers.
    pub(super) unit: f32,
}

/// The number of each lane.
const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// A query's sums of products with a split's positions; later its scores.
pub(super) trait ScoreRow {
    /// A panel of positions, one vector after the other.
    fn panel(&mut self, panel: usize) -> &mut [[f32; LANES]; PANEL / LANES];
}

impl ScoreRow for Scores {
    #[inline(always)]
    fn panel(&mut self, panel: usize) -> &mut [[f32; LANES]; PANEL / LANES] {
        self.as_chunks_mut().0[panel * PANEL / LANES..].first_chunk_mut().expect("a panel of the split")
    }
}

/// Row `row` of each panel of scores.
pub(super) struct PanelRow<'a> {
    /// `[panel][rows]`
    pub(super) panels: &'a mut [[f32; PANEL]],
    pub(super) rows: usize,
    pub(super) row: usize,
}

impl ScoreRow for PanelRow<'_> {
    #[inline(always)]
    fn panel(&mut self, panel: usize) -> &mut [[f32; LANES]; PANEL / LANES] {
        self.panels[panel * self.rows + self.row].as_chunks_mut().0.first_chunk_mut().expect("a whole panel")
    }
}

/// Products that take as long as weighing a vector of scores.
pub(super) const EXP_PRODUCTS: u32 = 20;

/// Turns the scores of panels `panels` into weights: powers of 2 at the split's `visible` positions, 0 elsewhere. `None` if no position is
/// visible (then all weights are 0). `q_scale` and `scales` are used if `L` has scales. `cap` is that of scores, as in
/// [`Attention`](super::Attention).
#[inline(always)]
pub(super) fn weigh<S: Simd, L: KvPanelFormat>(
    simd: S,
    row: &mut impl ScoreRow,
    weights: &mut Weights,
    panels: &Range<usize>,
    visible: &Range<usize>,
    (q_scale, scales, cap): (f32, &Scales, Option<f32>),
    prefetch: &mut Prefetch<'_>,
) -> Option<Normalizer> {
    let words = const { LANES / L::INPUTS };
    let per_panel = const { PANEL / LANES };
    if visible.is_empty() {
        weights[panels.start * per_panel * words..panels.end * per_panel * words].fill(0);
        return None;
    }
    let hidden = simd.splat(f32::NEG_INFINITY);
    let mut largest = hidden;
    for panel in panels.clone() {
        for (nth, scores) in row.panel(panel).iter_mut().enumerate() {
            let vector = panel * per_panel + nth;
            let is_cut = is_cut(vector, visible);
            let mut score = L::numbers(simd, simd.load(scores));
            if const { L::HAS_SCALES } {
                score = simd.mul(simd.mul(score, simd.load(&scales.k[vector])), simd.splat(q_scale));
            }
            if let Some(cap) = cap {
                simd.store(score, scores);
                simd.call(SoftCap { numbers: scores, cap });
                score = simd.load(scores);
            }
            if is_cut {
                score = only_visible(simd, vector, visible, score, hidden);
            }
            if is_cut || L::HAS_SCALES {
                simd.store(score, scores);
            }
            largest = simd.max(score, largest);
        }
    }
    let max = simd.max_lane(largest);
    let (mut sum, mut largest) = (simd.zero(), simd.zero());
    for panel in panels.clone() {
        for (nth, scores) in row.panel(panel).iter_mut().enumerate() {
            let vector = panel * per_panel + nth;
            prefetch.issue(simd, EXP_PRODUCTS);
            let mut power = exp2(simd, simd.sub(simd.load(scores), simd.splat(max)));
            sum = simd.add(sum, power);
            if const { L::HAS_SCALES } {
                power = simd.mul(power, simd.load(&scales.v[vector]));
                if is_cut(vector, visible) {
                    // The scales of hidden positions are arbitrary.
                    power = only_visible(simd, vector, visible, power, simd.zero());
                }
                largest = simd.max(power, largest);
                simd.store(power, scores);
            } else {
                L::put_words(simd, power, &mut weights[vector * words..][..words]);
            }
        }
    }
    let mut unit = 1.0;
    if const { L::HAS_SCALES } {
        let (scale, inverse) = quantize::scale_and_inverse::<{ i16::MAX }>(simd.max_lane(largest));
        for panel in panels.clone() {
            for (nth, powers) in row.panel(panel).iter().enumerate() {
                let integers = simd.mul(simd.load(powers), simd.splat(inverse));
                L::put_words(simd, integers, &mut weights[(panel * per_panel + nth) * words..][..words]);
            }
        }
        unit = scale;
    }
    Some(Normalizer { max, sum: simd.sum(sum), unit })
}

/// Whether some positions of the vector are hidden.
#[inline(always)]
fn is_cut(vector: usize, visible: &Range<usize>) -> bool {
    let first = vector * LANES;
    first < visible.start || first + LANES > visible.end
}

/// Lanes of visible positions from `numbers`, others from `hidden`.
#[inline(always)]
fn only_visible<S: Simd>(simd: S, vector: usize, visible: &Range<usize>, numbers: S::V, hidden: S::V) -> S::V {
    let position = simd.add(simd.load(&LANE), simd.splat((vector * LANES) as f32));
    let below_end = simd.select_less(position, simd.splat(visible.end as f32), numbers, hidden);
    simd.select_less(position, simd.splat(visible.start as f32), hidden, below_end)
}

/// The factors of a query's sums and of those of the next split, before they are added.
#[derive(Clone, Copy)]
pub(super) struct Merge {
    keep: f32,
    take: f32,
    /// The unit of the next split's [`Normalizer`].
    unit: f32,
}

/// A query's state after some splits: maximum and sum, and the sums of V weighted relative to that maximum.
pub(super) struct State<'a> {
    numbers: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Numbers in a state.
    pub(super) fn len(head_dim: usize) -> usize {
        LANES + head_dim.next_multiple_of(PANEL)
    }

    /// The state before the first split.
    pub(super) fn clear(numbers: &'a mut [f32]) -> Self {
        numbers.fill(0.0);
        numbers[0] = f32::NEG_INFINITY;
        Self { numbers }
    }

    pub(super) fn resume(numbers: &'a mut [f32]) -> Self {
        Self { numbers }
    }

    /// Merges the state of the same query's next splits.
    #[inline(always)]
    pub(super) fn merge_state<S: Simd>(&mut self, simd: S, next: &State<'_>) {
        let weights = self.merge(simd, Normalizer { max: next.numbers[0], sum: next.numbers[1], unit: 1.0 });
        self.add::<S, F32>(simd, weights, 0, next.values());
    }

    /// The weighted sums of V.
    fn values(&self) -> &[[f32; LANES]] {
        self.numbers[LANES..].as_chunks().0
    }

    /// Merges the next split's maximum and sum; the result is for [`add`](Self::add).
    #[inline(always)]
    pub(super) fn merge<S: Simd>(&mut self, simd: S, split: Normalizer) -> Merge {
        let (max, sum) = (self.numbers[0], self.numbers[1]);
        // Both sides are relative to the larger maximum, so one side's factor is 2^0.
        let is_larger = split.max > max;
        let factor = simd.to_array(exp2(simd, simd.splat(if is_larger { max - split.max } else { split.max - max })))[0];
        let (larger, keep, take) = if is_larger { (split.max, factor, 1.0) } else { (max, 1.0, factor) };
        (self.numbers[0], self.numbers[1]) = (larger, split.sum.mul_add(take, sum * keep));
        Merge { keep, take, unit: split.unit }
    }

    /// Merges a score without a value.
    #[inline(always)]
    pub(super) fn merge_sink<S: Simd>(&mut self, simd: S, score: f32) {
        let Merge { keep, .. } = self.merge(simd, Normalizer { max: score, sum: 1.0, unit: 1.0 });
        for values in self.numbers[LANES..].as_chunks_mut::<LANES>().0 {
            simd.store(simd.mul(simd.load(values), simd.splat(keep)), values);
        }
    }

    /// Adds the split's weighted sums, from vector `first` on, in `L`'s format.
    #[inline(always)]
    pub(super) fn add<S: Simd, L: KvPanelFormat>(
        &mut self,
        simd: S,
        Merge { keep, take, unit }: Merge,
        first: usize,
        sums: &[[f32; LANES]],
    ) {
        let (keep, take, unit) = (simd.splat(keep), simd.splat(take), simd.splat(unit));
        let (ours, _) = self.numbers[LANES..].as_chunks_mut::<LANES>();
        for (ours, sums) in ours[first..first + sums.len()].iter_mut().zip(sums) {
            let mut value = L::numbers(simd, simd.load(sums));
            if const { L::HAS_SCALES } {
                // The product is rounded separately, so that a split's sums are the same whether merged now or later.
                value = simd.mul(value, unit);
            }
            simd.store(simd.fma(value, take, simd.mul(simd.load(ours), keep)), ours);
        }
    }

    /// Vector `i` of the result.
    #[inline(always)]
    pub(super) fn result<S: Simd>(&self, simd: S, i: usize) -> S::V {
        let value = simd.div(simd.load(&self.values()[i]), simd.splat(self.numbers[1]));
        // Positions with weight 0 may leave a zero sum with either sign: adding 0 makes it positive.
        simd.add(value, simd.zero())
    }
}
