//! Activations times weights, and row look-up, from weights as they are stored.

#![allow(clippy::needless_range_loop, reason = "tiles are indexed by numbers known at compile time")]

use crate::{
    cpu::Cpu,
    disjoint::Disjoint,
    dtype::{Dtype, Element, load_part, store_part, with_element},
    simd::{Kernel, LANES, Simd},
};
use std::{array::from_fn, ops::Range};

/// A borrowed row-major matrix `[rows, cols]`, in the bytes of a file as like as not. Needs no alignment.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a> {
    pub fn new(bytes: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> Self {
        assert_eq!(bytes.len(), rows * cols * dtype.bytes(), "matrix bytes");
        Self { bytes, dtype, rows, cols }
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [u8] {
        let width = self.cols * self.dtype.bytes();
        &self.bytes[i * width..(i + 1) * width]
    }
}

/// `y = x wᵀ`: `x` is `[m, w.cols]`, `y` is `[m, w.rows]`.
///
/// Each number of `y` is a dot product of two rows: 16 partial sums in ascending order, then the fixed tree. A 4 × 4 tile of
/// them is computed at once in registers: four rows of `x` stay in the nearest cache while the task's weights pass by.
pub fn matmul(cpu: &Cpu, x: &[f32], w: Matrix<'_>, y: &mut [f32]) {
    let (n, k) = (w.rows, w.cols);
    assert!(n > 0 && k > 0, "empty weights");
    let m = y.len() / n;
    assert_eq!(y.len(), m * n, "whole rows of y");
    assert_eq!(x.len(), m * k, "x is [m, k]");
    if m == 0 {
        return;
    }
    let columns = columns_per_task(m, n, k * w.dtype.bytes(), cpu.threads());
    let y = Disjoint::new(y);
    cpu.for_each(n.div_ceil(columns), |task| {
        let columns = task * columns..((task + 1) * columns).min(n);
        cpu.isa().dispatch(Task { x, w, y: &y, m, columns });
    });
}

/// Weight rows of one task: few enough to stay in the second cache while the rows of `x` change, and to keep all threads
/// busy, yet enough to be worth a thread.
fn columns_per_task(m: usize, n: usize, row_bytes: usize, threads: usize) -> usize {
    if threads == 1 {
        return (CACHE_BYTES / row_bytes).next_multiple_of(TILE).clamp(TILE, n.next_multiple_of(TILE));
    }
    let cached = CACHE_BYTES / row_bytes;
    let balanced = n.div_ceil(4 * threads);
    let worth = (WEIGHT_BYTES_PER_TASK / (row_bytes * m.min(TASK_ROWS_MAX))).max(1);
    cached.min(balanced).max(worth).next_multiple_of(TILE).min(n.next_multiple_of(TILE))
}

const TILE: usize = 4;
/// A good part of a core's second cache.
const CACHE_BYTES: usize = 256 << 10;
/// Weights times rows of `x` that make a task: some 10 µs.
const WEIGHT_BYTES_PER_TASK: usize = 128 << 10;
const TASK_ROWS_MAX: usize = 64;

/// `columns` of `y`, all rows.
struct Task<'a> {
    x: &'a [f32],
    w: Matrix<'a>,
    y: &'a Disjoint<'a>,
    m: usize,
    columns: Range<usize>,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        with_element!(self.w.dtype, E => self.run_on::<S, E>(simd))
    }
}

impl Task<'_> {
    #[inline(always)]
    fn run_on<S: Simd, E: Element>(&self, simd: S) {
        if S::WIDE_TILES {
            let rows = self.all_rows::<S, E, 4, 4>(simd, 0);
            match self.m - rows {
                0 => {}
                1 => _ = self.all_rows::<S, E, 1, 4>(simd, rows),
                2 => _ = self.all_rows::<S, E, 2, 4>(simd, rows),
                _ => _ = self.all_rows::<S, E, 3, 4>(simd, rows),
            }
        } else {
            let rows = self.all_rows::<S, E, 2, 2>(simd, 0);
            self.all_rows::<S, E, 1, 2>(simd, rows);
        }
    }

    /// As many tiles of `M` rows as there are from `row` on; the first row not done.
    #[inline(always)]
    fn all_rows<S: Simd, E: Element, const M: usize, const N: usize>(&self, simd: S, mut row: usize) -> usize {
        while row + M <= self.m {
            let mut column = self.columns.start;
            while column + N <= self.columns.end {
                self.tile::<S, E, M, N>(simd, row, column);
                column += N;
            }
            while column < self.columns.end {
                self.tile::<S, E, M, 1>(simd, row, column);
                column += 1;
            }
            row += M;
        }
        row
    }

    /// `y[row..row + M, column..column + N]`.
    #[inline(always)]
    fn tile<S: Simd, E: Element, const M: usize, const N: usize>(&self, simd: S, row: usize, column: usize) {
        let (n, k) = (self.w.rows, self.w.cols);
        let steps = k / LANES;
        let x_rows: [&[f32]; M] = from_fn(|i| &self.x[(row + i) * k..(row + i + 1) * k]);
        let w_rows: [&[u8]; N] = from_fn(|j| self.w.row(column + j));
        let xs: [&[[f32; LANES]]; M] = from_fn(|i| &x_rows[i].as_chunks().0[..steps]);
        let ws: [&[E::Chunk]; N] = from_fn(|j| &E::chunks(w_rows[j]).0[..steps]);
        let mut sums = [[simd.zero(); N]; M];
        for step in 0..steps {
            let mut w = [simd.zero(); N];
            for j in 0..N {
                w[j] = E::load(simd, &ws[j][step]);
            }
            for i in 0..M {
                let x = simd.load(&xs[i][step]);
                for j in 0..N {
                    sums[i][j] = simd.fma(x, w[j], sums[i][j]);
                }
            }
        }
        if k > steps * LANES {
            for i in 0..M {
                let x = load_part(simd, &x_rows[i][steps * LANES..]);
                for j in 0..N {
                    sums[i][j] = simd.fma(x, E::load_part(simd, &w_rows[j][steps * LANES * E::BYTES..]), sums[i][j]);
                }
            }
        }
        let mut results = [0.0; LANES];
        if M * N > 4 {
            let mut flat = [simd.zero(); LANES];
            for i in 0..M {
                flat[i * N..(i + 1) * N].copy_from_slice(&sums[i]);
            }
            simd.store(simd.sum16(&flat), &mut results);
        } else {
            for i in 0..M {
                for j in 0..N {
                    results[i * N + j] = simd.sum(sums[i][j]);
                }
            }
        }
        for i in 0..M {
            let start = (row + i) * n + column;
            // SAFETY: tasks have disjoint columns, and within a task this is the only part alive.
            unsafe { self.y.part(start..start + N) }.copy_from_slice(&results[i * N..(i + 1) * N]);
        }
    }
}

/// `y[i] = table[ids[i]]`: `y` is `[ids.len(), table.cols]`. Every id must be a row of the table.
pub fn lookup(cpu: &Cpu, table: Matrix<'_>, ids: &[u32], y: &mut [f32]) {
    assert_eq!(y.len(), ids.len() * table.cols, "y is [ids, cols]");
    for (&id, row) in ids.iter().zip(y.chunks_exact_mut(table.cols)) {
        assert!((id as usize) < table.rows, "id {id} is not one of {} rows", table.rows);
        cpu.isa().dispatch(Widen { from: table.row(id as usize), dtype: table.dtype, to: row });
    }
}

/// Stored numbers to f32.
struct Widen<'a> {
    from: &'a [u8],
    dtype: Dtype,
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        with_element!(self.dtype, E => {
            let (from, from_rest) = E::chunks(self.from);
            let (to, to_rest) = self.to.as_chunks_mut();
            for (from, to) in from.iter().zip(to) {
                simd.store(E::load(simd, from), to);
            }
            if !to_rest.is_empty() {
                store_part(simd, E::load_part(simd, from_rest), to_rest);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::Isa,
        dtype::{decode, encode},
        testing::{cpus, numbers},
    };

    #[test]
    fn matches_the_f64_reference_on_odd_sizes_with_the_same_bits_everywhere() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for (m, n, k) in [(1, 1, 1), (1, 7, 15), (2, 5, 16), (3, 9, 17), (4, 4, 64), (5, 33, 100), (9, 6, 31), (17, 70, 172)] {
                let x = numbers(m * k, 1);
                let weights = encode(dtype, &numbers(n * k, 2));
                let exact = decode(dtype, &weights);
                let w = Matrix::new(&weights, dtype, n, k);
                let mut first: Option<Vec<f32>> = None;
                for cpu in cpus() {
                    let mut y = vec![f32::NAN; m * n];
                    matmul(&cpu, &x, w, &mut y);
                    for i in 0..m {
                        for j in 0..n {
                            let terms = (0..k).map(|l| f64::from(x[i * k + l]) * f64::from(exact[j * k + l]));
                            let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                            let got = f64::from(y[i * n + j]);
                            assert!((got - sum).abs() <= 1e-6 * size, "{dtype:?} {m}x{n}x{k}: {got} is not {sum}");
                        }
                    }
                    let first = first.get_or_insert_with(|| y.clone());
                    assert_eq!(*first, y, "{dtype:?} {m}x{n}x{k} on {} with {} threads", cpu.isa(), cpu.threads());
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch() {
        let (m, n, k) = (37, 1030, 99);
        let x = numbers(m * k, 3);
        let weights = encode(Dtype::Bf16, &numbers(n * k, 4));
        let w = Matrix::new(&weights, Dtype::Bf16, n, k);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let cpu = Cpu::new(Some(isa), 2).unwrap();
            let mut together = vec![0.0; m * n];
            matmul(&cpu, &x, w, &mut together);
            for (row, expected) in x.chunks(k).zip(together.chunks(n)) {
                let mut alone = vec![0.0; n];
                matmul(&cpu, row, w, &mut alone);
                assert_eq!(alone, expected);
            }
        }
    }

    #[test]
    fn tasks_cover_all_columns_and_are_worth_a_thread() {
        for (m, n, row_bytes, threads) in [(1, 64, 128, 8), (512, 2048, 4096, 2), (1, 128256, 4096, 64), (16, 10, 65536, 4), (1, 1, 4, 1)] {
            let columns = columns_per_task(m, n, row_bytes, threads);
            assert!(columns >= 1 && columns.is_multiple_of(TILE));
        }
        assert!(columns_per_task(1, 64, 128, 8) >= 64, "tiny work stays on one thread");
        assert!(columns_per_task(1, 128256, 4096, 64) * 4096 <= CACHE_BYTES, "large work fits the cache");
    }

    #[test]
    fn lookup_widens_rows() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let bytes = encode(dtype, &numbers(5 * 19, 7));
            let exact = decode(dtype, &bytes);
            for cpu in cpus() {
                let mut y = vec![0.0; 3 * 19];
                lookup(&cpu, Matrix::new(&bytes, dtype, 5, 19), &[4, 0, 4], &mut y);
                assert_eq!(y, [&exact[76..], &exact[..19], &exact[76..]].concat());
            }
        }
    }
}
