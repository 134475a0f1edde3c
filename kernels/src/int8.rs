//! Activations times weights in 8-bit integers.
//!
//! Weights are quantized once, each output's with a scale of its own, activations as they come, each row with a scale of its own;
//! both symmetrically:
//!
//! ```text
//! scale = max |x| / 127        q = round(x * (127 / max |x|)), ties to even
//! y     = f32(Σ q_x q_w) * scale_w * scale_x        from left to right
//! ```
//!
//! The sum is of integers and exact, so no order of it, tiling or instruction set changes a bit, and a row depends on nothing but itself.
//!
//! - [`Int8Weights`]: quantized, in the order in which the product reads them
//! - [`Int8Rows`]: quantized rows of activations; `quantize`: one row
//! - [`matmul`]: the product; `dot`: sums of products for 16 outputs at a time, per instruction set

mod dot;
mod quantize;
mod rows;
mod weights;

pub use rows::Int8Rows;
pub use weights::Int8Weights;

use crate::{cpu::Cpu, disjoint::Disjoint, simd::LANES};
use dot::{Dot, DotKernel};
use std::{array::from_fn, ops::Range};
use weights::PANEL_LINES;

/// The longest sum of products that cannot overflow 32 bits.
pub const INPUTS_MAX: usize = i32::MAX as usize / (127 * 127);

/// `y = x wᵀ`: `x` is `[m, w.inputs]`, `y` is `[m, w.outputs]`.
pub fn matmul(cpu: &Cpu, x: &Int8Rows, w: &Int8Weights, y: &mut [f32]) {
    assert_eq!(x.cols(), w.inputs(), "x is [m, inputs]");
    assert_eq!(y.len(), x.rows() * w.outputs(), "y is [m, outputs]");
    let y = Disjoint::new(y);
    let panels_per_task = panels_per_task(x.rows(), w, cpu.threads());
    cpu.for_each(w.panels().div_ceil(panels_per_task), |task| {
        let panels = task * panels_per_task..((task + 1) * panels_per_task).min(w.panels());
        x.unit().dispatch(Task { x, w, y: &y, panels });
    });
}

/// Enough for a thread to be worth asking, few enough that threads which are held up leave their share to the others.
fn panels_per_task(rows: usize, w: &Int8Weights, threads: usize) -> usize {
    let products = w.inputs() * rows * PANEL_LINES * LANES;
    let worth = PRODUCTS_PER_TASK / products.max(1);
    w.panels().div_ceil(TASKS_PER_THREAD * threads).max(worth).max(1)
}

/// Some microseconds.
const PRODUCTS_PER_TASK: usize = 1 << 18;
const TASKS_PER_THREAD: usize = 16;

/// All rows of some panels. A panel stays in the second cache while the tiles of rows pass by.
struct Task<'a> {
    x: &'a Int8Rows,
    w: &'a Int8Weights,
    y: &'a Disjoint<'a, f32>,
    panels: Range<usize>,
}

impl DotKernel for Task<'_> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        for panel in self.panels.clone() {
            for tile in 0..self.x.tiles() {
                match self.x.tile(tile).len() {
                    1 => self.rows::<D, 1>(dot, panel, tile),
                    2 => self.rows::<D, 2>(dot, panel, tile),
                    3 => self.rows::<D, 3>(dot, panel, tile),
                    4 => self.rows::<D, 4>(dot, panel, tile),
                    5 if D::ROWS >= 5 => self.rows::<D, 5>(dot, panel, tile),
                    6 if D::ROWS >= 6 => self.rows::<D, 6>(dot, panel, tile),
                    7 if D::ROWS >= 7 => self.rows::<D, 7>(dot, panel, tile),
                    8 if D::ROWS >= 8 => self.rows::<D, 8>(dot, panel, tile),
                    9 if D::ROWS >= 9 => self.rows::<D, 9>(dot, panel, tile),
                    10 if D::ROWS >= 10 => self.rows::<D, 10>(dot, panel, tile),
                    11 if D::ROWS >= 11 => self.rows::<D, 11>(dot, panel, tile),
                    12 if D::ROWS >= 12 => self.rows::<D, 12>(dot, panel, tile),
                    rows => unreachable!("a tile of {rows} rows"),
                }
            }
        }
    }
}

impl Task<'_> {
    /// `M` rows of a panel.
    #[inline(always)]
    fn rows<D: Dot, const M: usize>(&self, dot: D, panel: usize, tile: usize) {
        let lines = self.w.panel(panel);
        if lines.per_input == PANEL_LINES && D::ROWS > 4 {
            self.tile::<D, M, PANEL_LINES>(dot, panel, 0, tile);
        } else {
            for line in 0..lines.per_input {
                self.tile::<D, M, 1>(dot, panel, line, tile);
            }
        }
    }

    /// `M` rows, `N` lines of a panel from `first` on.
    #[inline(always)]
    fn tile<D: Dot, const M: usize, const N: usize>(&self, dot: D, panel: usize, first: usize, tile: usize) {
        let (rows, lines) = (self.x.tile(tile), self.w.panel(panel));
        let x: &[[[i8; 4]; M]] = self.x.quads(&rows).as_chunks().0;
        // Weights are 128 too large, so sums begin with what makes up for it.
        let mut sums: [[D::Sums; N]; M] = from_fn(|i| [dot.splat(self.x.offset(rows.start + i)); N]);
        // While the tiles pass by, each fetches its share of the next panel: all of its lines by the time it is needed.
        let (mut ahead, stride) = lines.next(tile, self.x.tiles());
        for (x, lines) in x.iter().zip(lines.all.chunks_exact(lines.per_input)) {
            dot.prefetch(ahead);
            ahead = ahead.wrapping_byte_add(stride);
            let mut weights = [dot.load(&lines[first]); N];
            for j in 1..N {
                weights[j] = dot.load(&lines[first + j]);
            }
            for i in 0..M {
                for j in 0..N {
                    sums[i][j] = dot.add_products(sums[i][j], weights[j], x[i]);
                }
            }
        }
        for i in 0..M {
            let row = rows.start + i;
            for j in 0..N {
                let outputs = self.w.outputs_of(panel, first + j);
                let scaled = dot.scaled(sums[i][j], self.w.scales(panel, first + j), self.x.scale(row));
                let start = row * self.w.outputs() + outputs.start;
                // SAFETY: tasks have disjoint outputs, and within a task this is the only part alive.
                let y = unsafe { self.y.part(start..start + outputs.len()) };
                match <&mut [f32; LANES]>::try_from(&mut *y) {
                    Ok(y) => *y = scaled,
                    Err(_) => y.copy_from_slice(&scaled[..outputs.len()]),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::Isa,
        dtype::{Dtype, decode, encode},
        matmul::Matrix,
        testing::{cpus, numbers},
    };
    use dot::DotUnit;
    use proptest::prelude::*;

    /// [`matmul`] on a unit that the machine has, whatever the instruction set of `cpu`.
    fn product(unit: DotUnit, cpu: &Cpu, x: &[f32], w: &Int8Weights) -> Vec<f32> {
        let mut rows = Int8Rows::default();
        rows.quantize_for(unit, cpu, x, w.inputs());
        let mut y = vec![f32::NAN; rows.rows() * w.outputs()];
        matmul(cpu, &rows, w, &mut y);
        y
    }

    fn units() -> impl Iterator<Item = DotUnit> {
        DotUnit::ALL.into_iter().filter(|unit| unit.is_available())
    }

    /// The definition, with sums of 64 bits.
    fn reference(x: &[f32], w: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
        let quantized = |row: &[f32]| {
            let largest = row.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            if largest < 1e-30 {
                return (vec![0; row.len()], 0.0);
            }
            let inverse = f64::from(127.0 / largest);
            (row.iter().map(|x| (f64::from(*x) * inverse).round_ties_even() as i64).collect::<Vec<_>>(), largest / 127.0)
        };
        let x: Vec<_> = x.chunks(k).map(quantized).collect();
        let w: Vec<_> = w.chunks(k).map(quantized).collect();
        let number = |(i, j): (usize, usize)| {
            let sum: i64 = x[i].0.iter().zip(&w[j].0).map(|(a, b)| a * b).sum();
            i32::try_from(sum).unwrap() as f32 * w[j].1 * x[i].1
        };
        (0..m * n).map(|i| number((i / n, i % n))).collect()
    }

    /// On every unit, alone and with threads, the product has exactly the bits of the definition.
    fn check(shape @ (m, n, k): (usize, usize, usize), dtype: Dtype, seed: u64) {
        let x: Vec<f32> = numbers(m * k, seed).iter().map(|x| 5.0 * x).collect();
        let bytes = encode(dtype, &numbers(n * k, seed + 1));
        let expected = reference(&x, &decode(dtype, &bytes), shape);
        for cpu in cpus() {
            let w = Int8Weights::quantize(&cpu, Matrix::new(&bytes, dtype, n, k));
            for unit in units() {
                assert_eq!(product(unit, &cpu, &x, &w), expected, "{shape:?} {dtype:?} on {unit:?}");
            }
        }
    }

    #[test]
    fn the_product_is_its_definition_on_every_unit() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for shape in [(1, 1, 1), (1, 64, 64), (3, 17, 5), (12, 33, 16), (13, 48, 100), (25, 70, 172), (40, 96, 31)] {
                check(shape, dtype, 7);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_shape_is_its_definition(m in 1usize..40, n in 1usize..80, k in 1usize..150, seed in 0u64..1000) {
            check((m, n, k), Dtype::Bf16, seed);
        }
    }

    #[test]
    fn the_largest_sums_do_not_overflow() {
        let k = INPUTS_MAX;
        for sign in [1.0, -1.0] {
            let (x, bytes) = (vec![sign; k], encode(Dtype::F32, &vec![1.0; k]));
            let cpu = Cpu::new(None, 1).unwrap();
            let w = Int8Weights::quantize(&cpu, Matrix::new(&bytes, Dtype::F32, 1, k));
            for unit in units() {
                assert_eq!(product(unit, &cpu, &x, &w), reference(&x, &vec![1.0; k], (1, 1, k)), "{unit:?}");
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch() {
        let (m, n, k) = (37, 130, 99);
        let x = numbers(m * k, 3);
        let bytes = encode(Dtype::Bf16, &numbers(n * k, 4));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let cpu = Cpu::new(Some(isa), 2).unwrap();
            let w = Int8Weights::quantize(&cpu, Matrix::new(&bytes, Dtype::Bf16, n, k));
            let together = product(DotUnit::of(isa), &cpu, &x, &w);
            for rows in [1, 5, 36] {
                let cut = x.chunks(rows * k).flat_map(|x| product(DotUnit::of(isa), &cpu, x, &w)).collect::<Vec<_>>();
                assert_eq!(cut, together, "{rows} rows at a time on {isa}");
            }
        }
    }

    #[test]
    fn rows_and_outputs_of_zeros_are_zeros() {
        let (n, k) = (20, 24);
        let mut weights = numbers(n * k, 1);
        weights[3 * k..4 * k].fill(0.0);
        let bytes = encode(Dtype::F32, &weights);
        let x = [numbers(k, 2), vec![0.0; k]].concat();
        let cpu = Cpu::new(None, 1).unwrap();
        let w = Int8Weights::quantize(&cpu, Matrix::new(&bytes, Dtype::F32, n, k));
        let y = product(DotUnit::of(cpu.isa()), &cpu, &x, &w);
        assert!(y[..n].iter().enumerate().all(|(j, y)| (*y == 0.0) == (j == 3)));
        assert!(y[n..].iter().all(|y| *y == 0.0));
    }

    #[test]
    fn no_rows_are_no_work() {
        let cpu = Cpu::new(None, 2).unwrap();
        let bytes = encode(Dtype::F32, &numbers(12, 1));
        let w = Int8Weights::quantize(&cpu, Matrix::new(&bytes, Dtype::F32, 3, 4));
        assert!(product(DotUnit::of(cpu.isa()), &cpu, &[], &w).is_empty());
    }
}
