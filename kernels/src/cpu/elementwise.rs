//! Operations with little work per number: norm, rotary embedding, scaled sums. Threads share the rows when there are enough.

use crate::cpu::{
    Cpu,
    activation::{Activation, sigmoid, soft_cap},
    element::{load_part, load_up_to, store_part},
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

/// Rotates pairs of each head's numbers: `(x[i], x[i + r/2])` for `i < r/2` by the angle with cosine `cos[i]` and sine `sin[i]` of that
/// row (Su et al., 2021, in the half-split order of Hugging Face checkpoints); the numbers from `r` on stay as they are. `x` is
/// `[rows, heads, head_dim]`; `cos` and `sin` are `[rows, r / 2]` with `r <= head_dim`.
pub fn rotate(cpu: &Cpu, x: &mut [f32], rows: usize, head_dim: usize, cos: &[f32], sin: &[f32]) {
    if rows == 0 {
        return;
    }
    assert!(cos.len() == sin.len() && cos.len().is_multiple_of(rows), "cos and sin are [rows, pairs]");
    let pairs = cos.len() / rows;
    assert!(pairs > 0 && 2 * pairs <= head_dim, "at most head_dim / 2 pairs");
    assert!(x.len().is_multiple_of(rows * head_dim), "x is [rows, heads, head_dim]");
    share_rows(cpu, x, x.len() / rows, |rows, x| {
        let angles = rows.start * pairs..rows.end * pairs;
        cpu.isa().dispatch(Rotate { x, rows: rows.len(), head_dim, cos: &cos[angles.clone()], sin: &sin[angles] });
    });
}

/// `x += factor * y`
pub fn add_scaled(cpu: &Cpu, x: &mut [f32], y: &[f32], factor: f32) {
    assert_eq!(x.len(), y.len(), "as many numbers");
    share_pieces(cpu, x, |range, x| cpu.isa().dispatch(AddScaled { x, y: &y[range], factor }));
}

/// `x *= factor`, and then, with a cap, `x = cap tanh(x / cap)`.
pub fn scale_and_cap(cpu: &Cpu, x: &mut [f32], factor: f32, cap: Option<f32>) {
    share_pieces(cpu, x, |_, x| cpu.isa().dispatch(ScaleAndCap { x, factor, cap }));
}

/// The function that turns a gate into the factor of the number that it gates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gate {
    Sigmoid,
    Silu,
}

/// `x = x f(gates)`, number by number.
pub fn gate(cpu: &Cpu, x: &mut [f32], gates: &[f32], function: Gate) {
    assert_eq!(x.len(), gates.len(), "as many gates as numbers");
    share_pieces(cpu, x, |range, x| cpu.isa().dispatch(Gated { x, gates: &gates[range], function }));
}

/// Calls `task` with pieces of `x` and their ranges, in parallel if that pays off.
fn share_pieces(cpu: &Cpu, x: &mut [f32], task: impl Fn(Range<usize>, &mut [f32]) + Sync + Send) {
    let (len, per_task) = (x.len(), cpu.rows_per_task(LANES) * LANES);
    if len <= per_task {
        return task(0..len, x);
    }
    let x = Disjoint::new(x);
    cpu.for_each(len.div_ceil(per_task), |i| {
        let range = i * per_task..((i + 1) * per_task).min(len);
        // SAFETY: tasks have disjoint ranges.
        let part = unsafe { x.part(range.clone()) };
        task(range, part);
    });
}

/// Calls `task` with pieces of whole rows of `x` and their row numbers, in parallel if that pays off.
pub(crate) fn share_rows(cpu: &Cpu, x: &mut [f32], width: usize, task: impl Fn(Range<usize>, &mut [f32]) + Sync + Send) {
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
    head_dim: usize,
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
            for head in row.chunks_exact_mut(self.head_dim) {
                let (a, b) = head[..2 * half].split_at_mut(half);
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

struct AddScaled<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
    factor: f32,
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let factor = simd.splat(self.factor);
        let ((x, x_rest), (y, y_rest)) = (self.x.as_chunks_mut::<LANES>(), self.y.as_chunks::<LANES>());
        for (x, y) in x.iter_mut().zip(y) {
            simd.store(simd.fma(simd.load(y), factor, simd.load(x)), x);
        }
        if !x_rest.is_empty() {
            let sum = simd.fma(load_part(simd, y_rest), factor, load_part(simd, x_rest));
            store_part(simd, sum, x_rest);
        }
    }
}

struct ScaleAndCap<'a> {
    x: &'a mut [f32],
    factor: f32,
    cap: Option<f32>,
}

impl Kernel for ScaleAndCap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let factor = simd.splat(self.factor);
        for numbers in self.x.chunks_mut(LANES) {
            let mut x = simd.mul(load_part(simd, numbers), factor);
            if let Some(cap) = self.cap {
                x = soft_cap(simd, x, cap);
            }
            store_part(simd, x, numbers);
        }
    }
}

struct Gated<'a> {
    x: &'a mut [f32],
    gates: &'a [f32],
    function: Gate,
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (x, gates) in self.x.chunks_mut(LANES).zip(self.gates.chunks(LANES)) {
            let gates = load_up_to(simd, gates);
            let factor = match self.function {
                Gate::Sigmoid => sigmoid(simd, gates),
                Gate::Silu => Activation::Silu.apply(simd, gates),
            };
            let product = simd.mul(load_up_to(simd, x), factor);
            simd.store_part(product, x, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{close, cpus, numbers};

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
        for (rows, heads, head_dim, rotated) in
            [(1, 1, 2, 2), (3, 2, 24, 24), (5, 3, 64, 64), (700, 2, 80, 80), (7, 2, 24, 18), (300, 3, 64, 16), (3, 1, 80, 40)]
        {
            let x = numbers(rows * heads * head_dim, 3);
            let half = rotated / 2;
            let angles = numbers(rows * half, 4);
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let y = everywhere(&x, |cpu, x| rotate(cpu, x, rows, head_dim, &cos, &sin));
            let expected = (0..x.len()).map(|i| {
                let (row, d) = (i / (heads * head_dim), i % head_dim);
                let angle = row * half + d % half;
                let (cos, sin) = (f64::from(cos[angle]), f64::from(sin[angle]));
                if d < half {
                    f64::from(x[i]) * cos - f64::from(x[i + half]) * sin
                } else if d < rotated {
                    f64::from(x[i]) * cos + f64::from(x[i - half]) * sin
                } else {
                    f64::from(x[i])
                }
            });
            close(&y, expected, 1e-6);
        }
    }

    #[test]
    fn scaled_sums_match_the_reference() {
        for len in [1, 16, 37, 70_000] {
            let (x, y) = (numbers(len, 1), numbers(len, 2));
            let sums = everywhere(&x, |cpu, x| add_scaled(cpu, x, &y, 0.22));
            close(&sums, x.iter().zip(&y).map(|(&x, &y)| f64::from(x) + f64::from(0.22f32) * f64::from(y)), 1e-7);
            assert!(everywhere(&x, |cpu, x| add_scaled(cpu, x, &y, 1.0)).iter().zip(x.iter().zip(&y)).all(|(sum, (x, y))| *sum == x + y));
            let scaled = everywhere(&x, |cpu, x| scale_and_cap(cpu, x, 12.5, None));
            assert!(scaled.iter().zip(&x).all(|(scaled, x)| *scaled == x * 12.5));
            let capped = everywhere(&x, |cpu, x| scale_and_cap(cpu, x, 12.5, Some(5.0)));
            close(&capped, scaled.iter().map(|&x| 5.0 * (f64::from(x) / 5.0).tanh()), 1e-6);
        }
    }
    #[test]
    fn gates_match_the_reference() {
        for len in [1, 16, 37, 70_000] {
            let (x, gates) = (numbers(len, 1), numbers(len, 2));
            let sigmoid = |gate: f32| 1.0 / (1.0 + (-f64::from(gate)).exp());
            let expected = x.iter().zip(&gates);
            let by_sigmoid = everywhere(&x, |cpu, x| gate(cpu, x, &gates, Gate::Sigmoid));
            close(&by_sigmoid, expected.clone().map(|(&x, &gate)| f64::from(x) * sigmoid(gate)), 1e-6);
            let by_silu = everywhere(&x, |cpu, x| gate(cpu, x, &gates, Gate::Silu));
            close(&by_silu, expected.map(|(&x, &gate)| f64::from(x) * f64::from(gate) * sigmoid(gate)), 1e-6);
        }
    }
}
