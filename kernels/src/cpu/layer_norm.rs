//! Norm with the mean subtracted (Ba et al., 2016).
//!
//! Sums go lane by lane in ascending order, then in the fixed tree: first the sum of the numbers, then that of the squared distances from
//! their mean.

use crate::cpu::{
    Cpu,
    elementwise::share_rows,
    gemm::float::activations::{FloatActivations, SharedActivations},
    simd::{Kernel, LANES, Simd},
};
use std::ops::Range;

/// The parameters of a norm over rows of `weight.len()` numbers.
#[derive(Clone, Copy)]
pub struct LayerNorm<'a> {
    pub weight: &'a [f32],
    /// The bias; zeros if `None`.
    pub bias: Option<&'a [f32]>,
    pub epsilon: f32,
}

/// `x = weight * (x - mean(x)) / sqrt(variance(x) + epsilon) + bias` for every row.
pub fn layer_norm(cpu: &Cpu, x: &mut [f32], norm: LayerNorm<'_>) {
    norm.check();
    share_rows(cpu, x, norm.weight.len(), |_, x| cpu.isa().dispatch(InPlace { x, norm }));
}

/// As [`layer_norm`], packed as activations.
pub fn layer_norm_into(cpu: &Cpu, x: &[f32], norm: LayerNorm<'_>, y: &mut FloatActivations) {
    norm.check();
    let width = norm.weight.len();
    assert!(x.len().is_multiple_of(width), "whole rows of {width}");
    y.resize(cpu, x.len() / width, width);
    let y = y.shared();
    let per_task = cpu.rows_per_task(width).div_ceil(cpu.isa().tile_rows());
    cpu.for_each(y.tiling.tiles.div_ceil(per_task), |task| {
        for index in task * per_task..((task + 1) * per_task).min(y.tiling.tiles) {
            cpu.isa().dispatch(Into { x, norm, y: &y, rows: y.tiling.tile(index) });
        }
    });
}

impl LayerNorm<'_> {
    fn check(&self) {
        assert!(!self.weight.is_empty() && self.bias.is_none_or(|bias| bias.len() == self.weight.len()), "a weight and a bias per number");
    }

    /// Numbers `start..start + 16` of a normed row, fewer at its end.
    #[inline(always)]
    fn vector<S: Simd>(&self, simd: S, x: &[f32], start: usize, (mean, scale): (f32, f32)) -> S::V {
        let distance = simd.sub(filled_up(simd, x, start, mean), simd.splat(mean));
        let y = simd.mul(filled_up(simd, self.weight, start, 0.0), simd.mul(distance, simd.splat(scale)));
        match self.bias {
            Some(bias) => simd.add(y, filled_up(simd, bias, start, 0.0)),
            None => y,
        }
    }

    /// The mean of a row, and `1 / sqrt(variance + epsilon)`.
    #[inline(always)]
    fn mean_and_scale<S: Simd>(&self, simd: S, x: &[f32]) -> (f32, f32) {
        let (mut sums, mut squares) = (simd.zero(), simd.zero());
        for start in (0..x.len()).step_by(LANES) {
            sums = simd.add(sums, filled_up(simd, x, start, 0.0));
        }
        let mean = simd.sum(sums) / x.len() as f32;
        for start in (0..x.len()).step_by(LANES) {
            let distance = simd.sub(filled_up(simd, x, start, mean), simd.splat(mean));
            squares = simd.fma(distance, distance, squares);
        }
        (mean, 1.0 / (simd.sum(squares) / x.len() as f32 + self.epsilon).sqrt())
    }
}

/// Numbers `start..start + 16` of `x`, with `filling` after its end.
#[inline(always)]
fn filled_up<S: Simd>(simd: S, x: &[f32], start: usize, filling: f32) -> S::V {
    match x[start..].first_chunk() {
        Some(whole) => simd.load(whole),
        None => {
            let mut lanes = [filling; LANES];
            lanes[..x.len() - start].copy_from_slice(&x[start..]);
            simd.load(&lanes)
        }
    }
}

struct InPlace<'a> {
    x: &'a mut [f32],
    norm: LayerNorm<'a>,
}

impl Kernel for InPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in self.x.chunks_exact_mut(self.norm.weight.len()) {
            let of_row = self.norm.mean_and_scale(simd, row);
            for start in (0..row.len()).step_by(LANES) {
                let y = self.norm.vector(simd, row, start, of_row);
                let end = row.len().min(start + LANES);
                simd.store_part(y, &mut row[start..end], false);
            }
        }
    }
}

/// The rows of one tile.
struct Into<'a> {
    x: &'a [f32],
    norm: LayerNorm<'a>,
    y: &'a SharedActivations<'a>,
    rows: Range<usize>,
}

impl Kernel for Into<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.norm.weight.len();
        for row in self.rows.clone() {
            let x = &self.x[row * width..(row + 1) * width];
            let of_row = self.norm.mean_and_scale(simd, x);
            for start in (0..width).step_by(LANES) {
                let y = simd.to_array(self.norm.vector(simd, x, start, of_row));
                // SAFETY: tasks have disjoint rows.
                unsafe { self.y.put(simd, &self.rows, row, start, &y[..LANES.min(width - start)]) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{close, cpus, numbers};

    #[test]
    fn matches_the_reference_with_the_same_bits_everywhere() {
        for width in [1, 15, 16, 24, 2050] {
            let (x, weight, bias) = (numbers(width * 67, 1), numbers(width, 2), numbers(width, 3));
            // Far from zero, so that the mean matters.
            let x: Vec<f32> = x.into_iter().map(|x| x + 3.0).collect();
            for bias in [None, Some(&bias[..])] {
                let norm = LayerNorm { weight: &weight, bias, epsilon: 1e-5 };
                let mut first: Option<Vec<f32>> = None;
                for cpu in cpus() {
                    let mut y = x.clone();
                    layer_norm(&cpu, &mut y, norm);
                    let mut tiles = FloatActivations::default();
                    layer_norm_into(&cpu, &x, norm, &mut tiles);
                    assert_eq!(tiles.to_rows(), y, "the same bits in tiles, on {}", cpu.isa());
                    assert_eq!(*first.get_or_insert_with(|| y.clone()), y, "{} numbers on {}", width, cpu.isa());
                }
                for (x, y) in x.chunks(width).zip(first.expect("a CPU").chunks(width)) {
                    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
                    let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / width as f64;
                    let expected = x.iter().enumerate().map(|(i, &x)| {
                        f64::from(weight[i]) * (f64::from(x) - mean) / (variance + 1e-5).sqrt()
                            + bias.map_or(0.0, |bias| f64::from(bias[i]))
                    });
                    close(y, expected, 3e-6);
                }
            }
        }
    }
}
