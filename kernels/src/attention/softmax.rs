//! From scores to weights, and from the results of splits to that of all.

use super::{SPLIT, prefetch::Prefetch};
use crate::{
    exp::exp,
    simd::{LANES, Simd},
    tile::{Factors, PANEL},
};
use std::ops::Range;

/// Scores of a query with a split's positions, then their weights.
pub(super) type Scores = [f32; SPLIT];

/// Weights of a tile of queries as words, as factors of V's lines from `first` on.
#[derive(Clone, Copy)]
pub(super) struct Weighted<'a, const T: usize> {
    pub(super) weights: &'a [Scores; T],
    pub(super) first: usize,
    pub(super) len: usize,
}

impl<const T: usize> Factors<T> for Weighted<'_, T> {
    #[inline(always)]
    fn len(self) -> usize {
        self.len
    }

    #[inline(always)]
    fn at(self, l: usize, i: usize) -> u32 {
        self.weights[i][self.first + l].to_bits()
    }
}

/// Maximum of a split's scores, and sum of the exponentials relative to it.
#[derive(Clone, Copy)]
pub(super) struct Normalizer {
    pub(super) max: f32,
    pub(super) sum: f32,
}

/// The number of each lane.
const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// A query's scores with a split's positions, [`LANES`] at a time, and the weights that become of them.
pub(super) trait Row {
    fn scores(&mut self, vector: usize) -> &mut [f32; LANES];

    fn set_weights<S: Simd>(&mut self, simd: S, vector: usize, weights: S::V);
}

impl Row for Scores {
    #[inline(always)]
    fn scores(&mut self, vector: usize) -> &mut [f32; LANES] {
        &mut self.as_chunks_mut().0[vector]
    }

    #[inline(always)]
    fn set_weights<S: Simd>(&mut self, simd: S, vector: usize, weights: S::V) {
        simd.store(weights, self.scores(vector));
    }
}

/// Row `row` of each panel of scores, as tiles write them, and its weights in pairs, as tiles read them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) struct TileRow<'a> {
    /// `[panel][rows]`
    pub(super) scores: &'a mut [[f32; PANEL]],
    pub(super) rows: usize,
    pub(super) row: usize,
    pub(super) weights: &'a mut [u32; SPLIT / 2],
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
impl Row for TileRow<'_> {
    #[inline(always)]
    fn scores(&mut self, vector: usize) -> &mut [f32; LANES] {
        let per_panel = PANEL / LANES;
        &mut self.scores[vector / per_panel * self.rows + self.row].as_chunks_mut().0[vector % per_panel]
    }

    #[inline(always)]
    fn set_weights<S: Simd>(&mut self, simd: S, vector: usize, weights: S::V) {
        self.weights.as_chunks_mut().0[vector] = simd.to_bf16_pairs(weights);
    }
}

/// Products that take as long as weighing a vector of scores.
pub(super) const EXP_PRODUCTS: u32 = 28;

/// Turns the scores of panels `panels` into weights: exponentials for the split's positions `visible`, 0 for others.
/// `None`: none is visible (and all weights are 0).
#[inline(always)]
pub(super) fn weigh<S: Simd>(
    simd: S,
    row: &mut impl Row,
    panels: &Range<usize>,
    visible: &Range<usize>,
    prefetch: &mut Prefetch<'_>,
) -> Option<Normalizer> {
    let vectors = panels.start * PANEL / LANES..panels.end * PANEL / LANES;
    if visible.is_empty() {
        for vector in vectors {
            row.set_weights(simd, vector, simd.zero());
        }
        return None;
    }
    let hidden = simd.splat(f32::NEG_INFINITY);
    let mut largest = hidden;
    for vector in vectors.clone() {
        let (first, scores) = (vector * LANES, row.scores(vector));
        if first < visible.start || first + LANES > visible.end {
            let position = simd.add(simd.load(&LANE), simd.splat(first as f32));
            let below_end = simd.select_less(position, simd.splat(visible.end as f32), simd.load(scores), hidden);
            simd.store(simd.select_less(position, simd.splat(visible.start as f32), hidden, below_end), scores);
        }
        largest = simd.max(simd.load(scores), largest);
    }
    let max = simd.max_lane(largest);
    let mut sum = simd.zero();
    for vector in vectors {
        prefetch.ask(simd, EXP_PRODUCTS);
        let weights = exp(simd, simd.sub(simd.load(row.scores(vector)), simd.splat(max)));
        sum = simd.add(sum, weights);
        row.set_weights(simd, vector, weights);
    }
    Some(Normalizer { max, sum: simd.sum(sum) })
}

/// Makes of the weights of panels `panels` what multiplies V in bf16: number `i` holds the bits of the pair of weights `2i` and `2i + 1`,
/// and means nothing as f32.
#[inline(always)]
pub(super) fn pair_up<S: Simd>(simd: S, weights: &mut Scores, panels: &Range<usize>) {
    for vector in panels.start * PANEL / LANES..panels.end * PANEL / LANES {
        let pairs = simd.to_bf16_pairs(simd.load(&weights.as_chunks::<LANES>().0[vector]));
        // Never beyond what has been read.
        weights.as_chunks_mut::<{ LANES / 2 }>().0[vector] = pairs.map(f32::from_bits);
    }
}

/// Rounds the weights of panels `panels` to bf16, which stay numbers.
#[inline(always)]
pub(super) fn round<S: Simd>(simd: S, weights: &mut Scores, panels: &Range<usize>) {
    for weights in &mut weights.as_chunks_mut().0[panels.start * PANEL / LANES..panels.end * PANEL / LANES] {
        simd.store(simd.round_to_bf16(simd.load(weights)), weights);
    }
}

/// Multiplies the scores or weights of a tile of queries for the positions of block `block` of the split with these positions' scales.
#[inline(always)]
pub(super) fn scale<S: Simd>(simd: S, scores: &mut [Scores], block: usize, scales: S::V) {
    for scores in scores {
        let scores = &mut scores.as_chunks_mut().0[block];
        simd.store(simd.mul(simd.load(scores), scales), scores);
    }
}

/// What is known of a query after some splits: maximum and sum, and the sums of V weighted relative to that maximum.
pub(super) struct State<'a> {
    numbers: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Numbers of a state.
    pub(super) fn len(head_dim: usize) -> usize {
        LANES + head_dim.next_multiple_of(PANEL)
    }

    /// Nothing is known yet.
    pub(super) fn clear(numbers: &'a mut [f32]) -> Self {
        numbers.fill(0.0);
        numbers[0] = f32::NEG_INFINITY;
        Self { numbers }
    }

    pub(super) fn resume(numbers: &'a mut [f32]) -> Self {
        Self { numbers }
    }

    pub(super) fn normalizer(&self) -> Normalizer {
        Normalizer { max: self.numbers[0], sum: self.numbers[1] }
    }

    /// The weighted sums of V.
    pub(super) fn values(&self) -> &[[f32; LANES]] {
        self.numbers[LANES..].as_chunks().0
    }

    /// Takes in the next split: first its maximum and sum. The factors are for [`add`](Self::add).
    #[inline(always)]
    pub(super) fn merge<S: Simd>(&mut self, simd: S, split: Normalizer) -> (S::V, S::V) {
        let ours = self.normalizer();
        // Relative to the larger maximum: the other side's factor is e^0.
        let one = simd.splat(1.0);
        let (max, keep, take) = match split.max > ours.max {
            true => (split.max, exp(simd, simd.splat(ours.max - split.max)), one),
            false => (ours.max, one, exp(simd, simd.splat(split.max - ours.max))),
        };
        let sum = simd.fma(simd.splat(split.sum), take, simd.mul(simd.splat(ours.sum), keep));
        (self.numbers[0], self.numbers[1]) = (max, simd.to_array(sum)[0]);
        (keep, take)
    }

    /// Then its weighted sums, from vector `first` on.
    #[inline(always)]
    pub(super) fn add<S: Simd>(&mut self, simd: S, (keep, take): (S::V, S::V), first: usize, values: &[[f32; LANES]]) {
        let (ours, _) = self.numbers[LANES..].as_chunks_mut::<LANES>();
        for (ours, value) in ours[first..first + values.len()].iter_mut().zip(values) {
            simd.store(simd.fma(simd.load(value), take, simd.mul(simd.load(ours), keep)), ours);
        }
    }

    /// Vector `i` of the result.
    #[inline(always)]
    pub(super) fn result<S: Simd>(&self, simd: S, i: usize) -> S::V {
        let value = simd.div(simd.load(&self.values()[i]), simd.splat(self.numbers[1]));
        // Positions with weight 0 may have left a sum of zero with either sign: adding 0 makes it one.
        simd.add(value, simd.zero())
    }
}
