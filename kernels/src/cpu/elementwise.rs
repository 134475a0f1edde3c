//! Operations with little work per number: norm, rotary embedding, SiLU. Threads share the rows when there are enough.

use crate::cpu::{
    Cpu,
    element::{load_part, store_part},
    exp::exp,
    gemm::float::activations::{FloatActivations, SharedActivations},
    simd::{Kernel, LANES, Simd},
    threads::disjoint::Disjoint,
};
use std::ops::Range;

/// `x = weight * x / sqrt(mean(x²) + epsilon)` for every row of `weight.len()` numbers (Zhang & Sennrich, 2019).
pub fn rms_norm(cpu: &Cpu, x: &mut [f32], weight: &[f32], epsilon: f32) {
    share_rows(cpu, x, weight.len(), |_, x| cpu.isa().dispatch(RmsNorm { x, weight, epsilon }));
}

/// `y = weight * x / sqrt(mean(x²) + epsilon)` for every row of `weight.len()` numbers, packed as activations.
pub fn rms_norm_into(cpu: &Cpu, x: &[f32], weight: &[f32], epsilon: f32, y: &mut FloatActivations) {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width), "whole rows of {width}");
    y.resize(cpu, x.len() / width, width);
    let y = y.shared();
    let per_task = cpu.rows_per_task(width).div_ceil(cpu.isa().tile_rows());
    cpu.for_each(y.tiling.tiles.div_ceil(per_task), |task| {
        for index in task * per_task..((task + 1) * per_task).min(y.tiling.tiles) {
            cpu.isa().dispatch(RmsNormInto { x, weight, epsilon, y: &y, rows: y.tiling.tile(index) });
        }
    });
}

/// Rotates pairs of each head's numbers: `(x[i], x[i + d/2])` by the angle with cosine `cos[i]` and sine `sin[i]` of
/// that row (Su et al., 2021, in the half-split order of Hugging Face checkpoints). `x` is `[rows, heads, head_dim]`;
/// `cos` and `sin` are `[rows, head_dim / 2]`.
pub fn rotate(cpu: &Cpu, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    let half = head_dim / 2;
    assert!(half > 0 && head_dim.is_multiple_of(2), "head_dim is even");
    assert!(cos.len() == sin.len() && cos.len().is_multiple_of(half), "cos and sin are [rows, head_dim / 2]");
    let rows = cos.len() / half;
    if rows == 0 {
        return;
    }
    assert!(x.len().is_multiple_of(rows * head_dim), "x is [rows, heads, head_dim]");
    share_rows(cpu, x, x.len() / rows, |rows, x| {
        let angles = rows.start * half..rows.end * half;
        cpu.isa().dispatch(Rotate { x, rows: rows.len(), cos: &cos[angles.clone()], sin: &sin[angles] });
    });
}

/// Calls `task(rows, their numbers)` for all rows of `x`, in parallel if that pays.
fn share_rows(cpu: &Cpu, x: &mut [f32], width: usize, task: impl Fn(Range<usize>, &mut [f32]) + Sync + Send) {
    assert!(width > 0 && x.len().is_multiple_of(width), "whole rows of {width}");
    let rows = x.len() / width;
    let per_task = cpu.rows_per_task(width);
    if rows <= per_task {
        return task(0..rows, x);
    }
    let x = Disjoint::new(x);
    cpu.for_each(rows.div_ceil(per_task), |i| {
        let rows = i * per_task..((i + 1) * per_task).min(rows);
        // SAFETY: tasks have disjoint rows.
        let part = unsafe { x.part(rows.start * width..rows.end * width) };
        task(rows, part);
    });
}

struct RmsNorm<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.weight.len();
        let (weights, weights_rest) = self.weight.as_chunks::<LANES>();
        for row in self.x.chunks_exact_mut(width) {
            let scale = simd.splat(rms_scale(simd, row, self.epsilon));
            let (chunks, rest) = row.as_chunks_mut::<LANES>();
            for (x, weight) in chunks.iter_mut().zip(weights) {
                simd.store(simd.mul(simd.load(weight), simd.mul(simd.load(x), scale)), x);
            }
            if !rest.is_empty() {
                let y = simd.mul(load_part(simd, weights_rest), simd.mul(load_part(simd, rest), scale));
                store_part(simd, y, rest);
            }
        }
    }
}

/// The rows of one tile.
struct RmsNormInto<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    y: &'a SharedActivations<'a>,
    rows: Range<usize>,
}

impl Kernel for RmsNormInto<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.weight.len();
        for row in self.rows.clone() {
            let x = &self.x[row * width..(row + 1) * width];
            let scale = simd.splat(rms_scale(simd, x, self.epsilon));
            let ((chunks, rest), (weights, weights_rest)) = (x.as_chunks::<LANES>(), self.weight.as_chunks::<LANES>());
            for (i, (x, weight)) in chunks.iter().zip(weights).enumerate() {
                let y = simd.mul(simd.load(weight), simd.mul(simd.load(x), scale));
                // SAFETY: tasks have disjoint rows.
                unsafe { self.y.put(simd, &self.rows, row, i * LANES, &simd.to_array(y)) };
            }
            if !rest.is_empty() {
                let y = simd.mul(load_part(simd, weights_rest), simd.mul(load_part(simd, rest), scale));
                // SAFETY: as above.
                unsafe { self.y.put(simd, &self.rows, row, width - rest.len(), &simd.to_array(y)[..rest.len()]) };
            }
        }
    }
}

/// `1 / sqrt(mean(x²) + epsilon)`.
#[inline(always)]
pub(crate) fn rms_scale<S: Simd>(simd: S, x: &[f32], epsilon: f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut squares = simd.zero();
    for x in chunks {
        let x = simd.load(x);
        squares = simd.fma(x, x, squares);
    }
    let rest = load_part(simd, rest);
    squares = simd.fma(rest, rest, squares);
    1.0 / (simd.sum(squares) / x.len() as f32 + epsilon).sqrt()
}

struct Rotate<'a> {
    x: &'a mut [f32],
    rows: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let half = self.cos.len() / self.rows;
        let angles = self.cos.chunks_exact(half).zip(self.sin.chunks_exact(half));
        for (row, (cos, sin)) in self.x.chunks_exact_mut(self.x.len() / self.rows).zip(angles) {
            let (cos, cos_rest) = cos.as_chunks::<LANES>();
            let (sin, sin_rest) = sin.as_chunks::<LANES>();
            for head in row.chunks_exact_mut(2 * half) {
                let (a, b) = head.split_at_mut(half);
                let (a, a_rest) = a.as_chunks_mut::<LANES>();
                let (b, b_rest) = b.as_chunks_mut::<LANES>();
                for i in 0..cos.len() {
                    let (new_a, new_b) = turn(simd, simd.load(&a[i]), simd.load(&b[i]), simd.load(&cos[i]), simd.load(&sin[i]));
                    simd.store(new_a, &mut a[i]);
                    simd.store(new_b, &mut b[i]);
                }
                if !a_rest.is_empty() {
                    let (a, b) = (load_part(simd, a_rest), load_part(simd, b_rest));
                    let (new_a, new_b) = turn(simd, a, b, load_part(simd, cos_rest), load_part(simd, sin_rest));
                    store_part(simd, new_a, a_rest);
                    store_part(simd, new_b, b_rest);
                }
            }
        }
    }
}

/// The pair (a, b), rotated by the angle.
#[inline(always)]
fn turn<S: Simd>(simd: S, a: S::V, b: S::V, cos: S::V, sin: S::V) -> (S::V, S::V) {
    (simd.sub(simd.mul(a, cos), simd.mul(b, sin)), simd.fma(b, cos, simd.mul(a, sin)))
}

/// `gate * sigmoid(gate) * up`.
#[inline(always)]
pub(crate) fn silu_mul_vector<S: Simd>(simd: S, gate: S::V, up: S::V) -> S::V {
    let one = simd.splat(1.0);
    let sigmoid = simd.div(one, simd.add(one, exp(simd, simd.sub(simd.zero(), gate))));
    simd.mul(simd.mul(gate, sigmoid), up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{
        isa::Isa,
        testing::{close, cpus, numbers},
    };

    const WIDTHS: [usize; 5] = [1, 15, 16, 24, 2050];

    /// Runs `op` on a copy of `x` on every instruction set, asserts equal bits, and returns the result.
    fn everywhere(x: &[f32], op: impl Fn(&Cpu, &mut [f32])) -> Vec<f32> {
        let results: Vec<Vec<f32>> = cpus()
            .iter()
            .map(|cpu| {
                let mut y = x.to_vec();
                op(cpu, &mut y);
                y
            })
            .collect();
        assert!(results.iter().all(|y| *y == results[0]));
        results[0].clone()
    }

    #[test]
    fn rms_norm_matches_the_reference() {
        for width in WIDTHS {
            let (x, weight) = (numbers(width * 67, 1), numbers(width, 2));
            let y = everywhere(&x, |cpu, x| rms_norm(cpu, x, &weight, 1e-5));
            for (x, y) in x.chunks(width).zip(y.chunks(width)) {
                let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / width as f64;
                let expected = x.iter().zip(&weight).map(|(&x, &w)| f64::from(w) * f64::from(x) / (mean + 1e-5).sqrt());
                close(y, expected, 1e-6);
            }
            for cpu in cpus() {
                let mut tiles = FloatActivations::default();
                rms_norm_into(&cpu, &x, &weight, 1e-5, &mut tiles);
                assert_eq!(tiles.to_rows(), y, "the same bits in tiles, on {}", cpu.isa());
            }
        }
    }

    #[test]
    fn rotate_matches_the_reference() {
        for (rows, heads, head_dim) in [(1, 1, 2), (3, 2, 24), (5, 3, 64), (700, 2, 80)] {
            let x = numbers(rows * heads * head_dim, 3);
            let half = head_dim / 2;
            let angles = numbers(rows * half, 4);
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let y = everywhere(&x, |cpu, x| rotate(cpu, x, head_dim, &cos, &sin));
            let expected = (0..x.len()).map(|i| {
                let (row, d) = (i / (heads * head_dim), i % head_dim);
                let angle = row * half + d % half;
                let (cos, sin) = (f64::from(cos[angle]), f64::from(sin[angle]));
                if d < half {
                    f64::from(x[i]) * cos - f64::from(x[i + half]) * sin
                } else {
                    f64::from(x[i]) * cos + f64::from(x[i - half]) * sin
                }
            });
            close(&y, expected, 1e-6);
        }
    }

    struct SiluMul([f32; LANES], [f32; LANES]);

    impl Kernel for SiluMul {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            simd.to_array(silu_mul_vector(simd, simd.load(&self.0), simd.load(&self.1)))
        }
    }

    #[test]
    fn silu_mul_matches_the_reference() {
        let everywhere = |gate: [f32; LANES], up: [f32; LANES]| {
            let y = Isa::Portable.dispatch(SiluMul(gate, up));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert_eq!(isa.dispatch(SiluMul(gate, up)), y, "{isa}");
            }
            y
        };
        for seed in 0..200 {
            let gate: [f32; LANES] = numbers(LANES, seed).try_into().unwrap();
            let (gate, up) = (gate.map(|x| x * 30.0), numbers(LANES, seed + 1000).try_into().unwrap());
            let expected = gate.iter().zip(&up).map(|(&g, &u)| f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u));
            close(&everywhere(gate, up), expected, 1e-5);
        }
        let mut gate = [0.0; LANES];
        gate[..4].copy_from_slice(&[-1e30, 1e30, -100.0, 100.0]);
        let extremes = everywhere(gate, [1.0; LANES]);
        assert!(extremes[0].abs() < 1e-6 && extremes[1] == 1e30 && extremes[2].abs() < 1e-30 && extremes[3] == 100.0);
    }
}
