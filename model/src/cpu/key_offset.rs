//! The constant that is subtracted from every key before it is rounded to 8 bits.
//!
//! In Qwen2, most of a key is its projection's bias, up to a hundred times as large as the rest, in the pairs that rotate slowest: 8 bits
//! for the whole key leave few for what distinguishes positions. A constant that is subtracted from all keys of a head lowers all scores of
//! a query by the same amount, which softmax ignores, so nothing has to be added back. (KIVI: Liu et al., 2024, gives each channel of K an
//! offset that is computed from the tokens; this one is computed from weights alone, so that a key still depends on nothing but its own
//! context.)
//!
//! The constant is the mean of the rotated bias over many positions: nearly the whole bias in slow pairs, nothing in fast ones.

use crate::rope::Rope;

/// Positions that the mean is taken over.
const POSITIONS: usize = 1 << 15;

/// The mean rotations of a model's ropes.
pub(crate) struct KeyOffsets {
    head_dim: usize,
    /// Cosines and sines of the pairs that rotate.
    ropes: Vec<(Vec<f32>, Vec<f32>)>,
}

impl KeyOffsets {
    pub(crate) fn new(ropes: &[Rope], head_dim: usize) -> Self {
        Self { head_dim, ropes: ropes.iter().map(|rope| rope.mean(POSITIONS)).collect() }
    }

    /// The offset of a layer's heads, from the key projection's bias, both `[kv_heads, head_dim]`, and the index of the layer's rope.
    pub(crate) fn of(&self, bias: &[f32], rope: Option<usize>) -> Vec<f32> {
        let mut offset = bias.to_vec();
        let Some((cos, sin)) = rope.map(|rope| &self.ropes[rope]) else { return offset };
        for head in offset.chunks_exact_mut(self.head_dim) {
            let (a, b) = head[..2 * cos.len()].split_at_mut(cos.len());
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
        offset
    }
}

/// Subtracts `offset` from each row of `keys`, on one thread: the work is small beside any product.
pub(crate) fn subtract(keys: &mut [f32], offset: &[f32]) {
    for keys in keys.chunks_exact_mut(offset.len()) {
        keys.iter_mut().zip(offset).for_each(|(key, offset)| *key -= offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::{RopeConfig, RopeScaling};

    #[test]
    fn slow_pairs_keep_their_bias_and_fast_ones_nothing_of_it() {
        let rope = |part| Rope::new(&RopeConfig { theta: 1e9, scaling: RopeScaling::None, part }, 8);
        // Two heads of four pairs: `x[i]` with `x[i + 4]`.
        let bias = [8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 6.0];
        let offsets = KeyOffsets::new(&[rope(None), rope(Some(0.5))], 8);
        let offset = offsets.of(&bias, Some(0));
        let pair = |head: usize, i: usize| (offset[8 * head + i], offset[8 * head + i + 4]);
        let is_near = |(a, b): (f32, f32), (c, d): (f32, f32)| (a - c).abs() < 0.1 && (b - d).abs() < 0.1;
        assert!(is_near(pair(0, 0), (0.0, 0.0)), "a turn in six positions: {:?}", pair(0, 0));
        assert!(is_near(pair(0, 3), (8.0, 4.0)), "a 200th of a turn in all: {:?}", pair(0, 3));
        assert!(is_near(pair(1, 3), (-2.0, 6.0)), "{:?}", pair(1, 3));
        assert_eq!(offsets.of(&bias, Some(1))[4..8], bias[4..8], "of half a head that rotates, the other half does not");
        assert_eq!(offsets.of(&bias, None), bias);
    }
}
