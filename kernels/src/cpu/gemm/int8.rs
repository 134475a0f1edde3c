//! Products in 8-bit integers.
//!
//! Weights are quantized once, with a scale per output; activations on the fly, with a scale per row. Both are first
//! transformed along their inputs, in blocks of `2^n` (`hadamard`), and quantized symmetrically:
//!
//! ```text
//! t     = H x                  scale = max |t| / 127        q = round(t * (127 / max |t|)), ties to even
//! y     = f32(Σ q_x q_w) * (scale_w / 2^n) * scale_x + bias        from left to right
//! ```
//!
//! The integer sum is exact: no order, tiling or instruction set changes a bit, and a row depends on itself alone.
//!
//! - [`Int8Weights`], [`Int8Activations`]: quantized and packed; `quantize`: one row
//! - [`matmul`]: the product

mod activations;
pub(crate) mod quantize;
mod weights;

pub use activations::Int8Activations;
pub use weights::Int8Weights;

use crate::cpu::{
    Cpu,
    gemm::{
        Output, Product,
        dot::{Dot, DotKernel},
        epilogue::{Epilogue, PanelOutputs},
        locate,
        micro_kernel::with_tile_rows,
        panel::PANEL_LINES,
        prefetch::WeightPrefetch,
    },
    simd::{LANES, Simd},
};
use std::{array::from_fn, ops::Range};

/// The largest number of inputs whose sum of products fits 32 bits.
pub const INPUTS_MAX: usize = i32::MAX as usize / (127 * 127);

/// `y = x wᵀ + bias` for each of the products.
pub fn matmul<const N: usize>(cpu: &Cpu, x: &Int8Activations, mut products: [Product<'_, Int8Weights, Int8Activations>; N]) {
    let shared = products.each_mut().map(|product| SharedProduct::new(x, product));
    let panels = shared.iter().map(|product| product.weights.panels()).sum::<usize>();
    let per_task = panels_per_task(x, panels, cpu.threads());
    let tasks = |product: &SharedProduct<'_>| product.weights.panels().div_ceil(per_task);
    cpu.for_each(shared.iter().map(tasks).sum(), |index| {
        let (product, index) = locate(&shared, tasks, index);
        let panels = index * per_task..((index + 1) * per_task).min(product.weights.panels());
        x.unit().dispatch(Task { x, product, panels });
    });
    for Product { weights, output } in products {
        if let Output::Activated(_, y) = output {
            y.copy_from_exact(cpu, weights.outputs());
        }
    }
}

/// The panels per task: enough to make waking a thread worthwhile, few enough for others to take over the share of a thread that is
/// delayed.
fn panels_per_task(x: &Int8Activations, panels: usize, threads: usize) -> usize {
    let products = x.rows() * x.cols() * PANEL_LINES * LANES;
    let worth = PRODUCTS_PER_TASK / products.max(1);
    // Tiles compute faster than memory delivers: with more panels per task, more panels share each read of `x`.
    let tasks = if x.unit().has_tiles() { TASKS_PER_THREAD / 4 } else { TASKS_PER_THREAD };
    let panels = panels.div_ceil(tasks * threads).max(worth).max(1);
    if x.rows() == 1 { panels.next_multiple_of(ROW_PANELS) } else { panels }
}

/// Products per task: some microseconds.
const PRODUCTS_PER_TASK: usize = 1 << 18;
const TASKS_PER_THREAD: usize = 16;
/// Panels that a single row multiplies at a time.
const ROW_PANELS: usize = 4;

/// A product that several tasks write.
struct SharedProduct<'a> {
    weights: &'a Int8Weights,
    epilogue: Epilogue<'a>,
}

impl<'a> SharedProduct<'a> {
    fn new(x: &Int8Activations, product: &'a mut Product<'_, Int8Weights, Int8Activations>) -> Self {
        let weights = product.weights;
        assert_eq!(x.cols(), weights.inputs(), "x is [rows, inputs]");
        Self { weights, epilogue: Epilogue::new(x.rows(), weights.columns(), &mut product.output) }
    }
}

/// Scales, biases and places of a panel's outputs.
struct Panel<V> {
    scales: [V; PANEL_LINES],
    bias: [V; PANEL_LINES],
    outputs: PanelOutputs,
}

impl<V: Copy> Panel<V> {
    #[inline(always)]
    fn of<S: Simd<V = V>>(simd: S, product: &SharedProduct<'_>, panel: usize) -> Self {
        let weights = product.weights;
        let (scales, bias) = (weights.scales(panel).as_chunks().0, weights.bias(panel).as_chunks().0);
        let outputs = product.epilogue.outputs(panel);
        let mut this = Self { scales: [simd.zero(); PANEL_LINES], bias: [simd.zero(); PANEL_LINES], outputs };
        for line in 0..PANEL_LINES {
            (this.scales[line], this.bias[line]) = (simd.load(&scales[line]), simd.load(&bias[line]));
        }
        this
    }
}

/// The product of all rows and some panels. A panel stays in the second-level cache while the tiles of rows pass by.
struct Task<'a> {
    x: &'a Int8Activations,
    product: &'a SharedProduct<'a>,
    panels: Range<usize>,
}

impl DotKernel for Task<'_> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        if self.x.unit().has_tiles() && self.x.rows() > 1 {
            return self.multiply_blocks(dot.simd());
        }
        let mut panel = self.panels.start;
        while panel < self.panels.end {
            // With one row, the core waits for memory, which delivers several panels faster than one (see `amx::OneRow`).
            if D::LINES == PANEL_LINES && self.x.rows() == 1 && panel + ROW_PANELS <= self.panels.end {
                self.row::<D>(dot, panel);
                panel += ROW_PANELS;
                continue;
            }
            for index in 0..self.x.tiling().tiles {
                let rows = self.x.tiling().tile(index).len();
                with_tile_rows!(D, rows, T => self.tile::<D, T>(dot, panel, index));
            }
            panel += 1;
        }
    }
}

impl Task<'_> {
    /// Multiplies on AMX.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    fn multiply_blocks<S: Simd>(&self, simd: S) {
        use crate::cpu::gemm::{
            amx::{Amx, Int8Fours, Piece, Stream, TILE},
            micro_kernel::Start,
        };
        /// Bytes of the panels multiplied at a time: their weights stay in a second-level cache of 2 MiB while rows pass by. A block of
        /// rows stores neighbouring panels' numbers right after each other, before their cache lines and pages are evicted.
        const GROUP_BYTES: usize = 1 << 20;
        const ROWS_AT_A_TIME: usize = 64;
        let (rows, quads) = (self.x.rows(), self.x.tiling().cols);
        // SAFETY: rows are laid out for tiles only where tiles are available.
        let unit = unsafe { Amx::new(rows) };
        let mut sums = [[0; PANEL_LINES * LANES]; ROWS_AT_A_TIME];
        if rows <= 2 * TILE {
            let sums = &mut sums[..rows.next_multiple_of(TILE)];
            let following = self.product.weights.lines(self.panels.start..self.product.weights.panels());
            for (nth, first, weights) in Stream::of(simd, following, quads, self.panels.len()) {
                let end = first + weights.len();
                let start = if first == 0 { Start::Zero } else { Start::Sums };
                unit.multiply::<Int8Fours>(&self.x.quads_from(0)[first..], quads, weights, sums, start);
                if end == quads {
                    self.finish_sums(simd, self.panels.start + nth, 0..rows, sums);
                }
            }
            return;
        }
        let group = (GROUP_BYTES / (quads * size_of::<[i32; PANEL_LINES * LANES]>())).max(1);
        for panels in (self.panels.start..self.panels.end).step_by(group).map(|start| start..(start + group).min(self.panels.end)) {
            for first in (0..rows).step_by(ROWS_AT_A_TIME) {
                let rows = first..(first + ROWS_AT_A_TIME).min(rows);
                for panel in panels.clone() {
                    let weights = Piece::of_many_rows(self.product.weights.lines(panel..panel + 1));
                    let sums = &mut sums[..rows.len().next_multiple_of(TILE)];
                    self.product.epilogue.prefetch(simd, panel, rows.clone());
                    unit.multiply::<Int8Fours>(self.x.quads_from(first), quads, weights, sums, Start::Zero);
                    self.finish_sums(simd, panel, rows.clone(), sums);
                }
            }
        }
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    fn multiply_blocks<S: Simd>(&self, _: S) {
        unreachable!("there is no AMX")
    }

    /// Stores the sums of `rows`, which started from zero.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    fn finish_sums<S: Simd>(&self, simd: S, panel: usize, rows: Range<usize>, sums: &[[i32; PANEL_LINES * LANES]]) {
        let panel = Panel::of(simd, self.product, panel);
        // Loops are used instead of closures, as only inlined code is compiled for the instruction set.
        for (sums, row) in sums.iter().zip(rows) {
            let (start, mut numbers) = (self.start(row), [simd.zero(); PANEL_LINES]);
            for (line, sums) in sums.as_chunks::<LANES>().0.iter().enumerate() {
                let mut lanes = [0.0; LANES];
                for (lane, sum) in lanes.iter_mut().zip(sums) {
                    *lane = sum.wrapping_add(start) as f32;
                }
                numbers[line] = simd.load(&lanes);
            }
            self.finish(simd, &panel, row, numbers);
        }
    }

    /// The initial value of a row's sums, which compensates for the 128 added to stored weights.
    #[inline(always)]
    fn start(&self, row: usize) -> i32 {
        -128 * self.x.quantized(row).sum
    }

    /// Scales a row's sums of one panel, adds the bias, and stores the results.
    #[inline(always)]
    fn finish<S: Simd>(&self, simd: S, panel: &Panel<S::V>, row: usize, mut y: [S::V; PANEL_LINES]) {
        let scale = simd.splat(self.x.quantized(row).scale);
        for (line, y) in y.iter_mut().enumerate() {
            *y = simd.add(simd.mul(simd.mul(*y, panel.scales[line]), scale), panel.bias[line]);
        }
        self.product.epilogue.put(simd, row, &panel.outputs, y);
    }

    /// Multiplies the only row by [`ROW_PANELS`] panels, from `first` on.
    #[inline(always)]
    fn row<D: Dot>(&self, dot: D, first: usize) {
        let simd = dot.simd();
        let x = self.x.quads(&(0..1));
        let mut sums = [[dot.splat(self.start(0)); PANEL_LINES]; ROW_PANELS];
        let mut panels = [self.product.weights.panel(first); ROW_PANELS];
        let mut ahead = [WeightPrefetch::within(panels[0]); ROW_PANELS];
        for p in 0..ROW_PANELS {
            panels[p] = &self.product.weights.panel(first + p)[..x.len()];
            ahead[p] = WeightPrefetch::within(panels[p]);
        }
        for (quad, &x) in x.iter().enumerate() {
            for p in 0..ROW_PANELS {
                ahead[p].issue(simd);
                for line in 0..PANEL_LINES {
                    sums[p][line] = dot.add_products(sums[p][line], dot.load(&panels[p][quad][line]), x);
                }
            }
        }
        for (panel, sums) in (first..).zip(sums) {
            let mut numbers = [simd.zero(); PANEL_LINES];
            for line in 0..PANEL_LINES {
                numbers[line] = dot.to_f32(sums[line]);
            }
            self.finish(simd, &Panel::of(simd, self.product, panel), 0, numbers);
        }
    }

    /// Multiplies a tile of `T` rows by a panel.
    #[inline(always)]
    fn tile<D: Dot, const T: usize>(&self, dot: D, panel: usize, index: usize) {
        let simd = dot.simd();
        let rows = self.x.tiling().tile(index);
        self.product.epilogue.prefetch(simd, panel, rows.clone());
        let mut sums = [[simd.zero(); PANEL_LINES]; T];
        if D::LINES == PANEL_LINES {
            self.lines::<D, T, PANEL_LINES>(dot, panel, 0, index, &mut sums);
        } else {
            for line in 0..PANEL_LINES {
                self.lines::<D, T, 1>(dot, panel, line, index, &mut sums);
            }
        }
        let panel = Panel::of(simd, self.product, panel);
        for (row, sums) in rows.zip(sums) {
            self.finish(simd, &panel, row, sums);
        }
    }

    /// Sets `numbers[i][first..first + N]` to the sums of `N` lines of the panel.
    #[inline(always)]
    fn lines<D: Dot, const T: usize, const N: usize>(
        &self,
        dot: D,
        panel: usize,
        first: usize,
        index: usize,
        numbers: &mut [[<D::Simd as Simd>::V; PANEL_LINES]; T],
    ) {
        let rows = self.x.tiling().tile(index);
        let lines = self.product.weights.panel(panel);
        // The next panel follows in memory.
        let mut ahead = match self.x.tiling().tiles {
            1 => WeightPrefetch::within(lines),
            tiles => WeightPrefetch::share_of(lines.as_ptr_range().end, lines.len(), index, tiles),
        };
        let mut sums: [[D::Sums; N]; T] = from_fn(|i| [dot.splat(self.start(rows.start + i)); N]);
        for (x, lines) in self.x.quads(&rows).as_chunks::<T>().0.iter().zip(lines) {
            ahead.issue(dot.simd());
            let mut line = [dot.load(&lines[first]); N];
            for j in 1..N {
                line[j] = dot.load(&lines[first + j]);
            }
            for i in 0..T {
                for j in 0..N {
                    sums[i][j] = dot.add_products(sums[i][j], line[j], x[i]);
                }
            }
        }
        for i in 0..T {
            for j in 0..N {
                numbers[i][first + j] = dot.to_f32(sums[i][j]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            activation::Activation,
            elementwise::rms_norm,
            gemm::{dot::DotUnit, float::activations::FloatActivations},
            hadamard::block_of,
            isa::Isa,
            testing::{CLAMPED, activated_number, cpus, gated_number, numbers, transformed},
        },
        dtype::{Dtype, decode, encode},
        matrix::Matrix,
    };
    use proptest::prelude::*;

    /// [`matmul`] on any available unit, regardless of the instruction set of `cpu`.
    fn product(unit: DotUnit, cpu: &Cpu, x: &[f32], w: &Int8Weights) -> Vec<f32> {
        let mut rows = Int8Activations::default();
        rows.copy_for(unit, cpu, x, w.inputs());
        let mut y = vec![f32::NAN; rows.rows() * w.outputs()];
        matmul(cpu, &rows, [Product { weights: w, output: Output::Set(&mut y) }]);
        y
    }

    fn units() -> impl Iterator<Item = DotUnit> {
        DotUnit::ALL.into_iter().filter(|unit| unit.is_available())
    }

    /// The product by definition, with 64-bit sums.
    fn reference(x: &[f32], w: &[f32], bias: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
        let quantized = |row: &[f32]| {
            let row = transformed(row);
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
            i32::try_from(sum).unwrap() as f32 * (w[j].1 / block_of(k) as f32) * x[i].1 + bias[j]
        };
        (0..m * n).map(|i| number((i / n, i % n))).collect()
    }

    /// Asserts that the product has exactly the bits of the definition on every unit, with one and several threads.
    fn check(shape @ (m, n, k): (usize, usize, usize), dtype: Dtype, seed: u64) {
        let x: Vec<f32> = numbers(m * k, seed).iter().map(|x| 5.0 * x).collect();
        let bytes = encode(dtype, &numbers(n * k, seed + 1));
        let bias = numbers(n, seed + 2);
        let expected = reference(&x, &decode(dtype, &bytes), &bias, shape);
        for cpu in cpus() {
            let w = Int8Weights::new(&cpu, Matrix::new(&bytes, dtype, n, k), Some(&bias));
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
    fn several_products_are_added_or_gated() {
        for (m, n, k) in [(1, 1, 1), (3, 40, 9), (14, 64, 70)] {
            let x = numbers(m * k, 1);
            let (a, b) = (encode(Dtype::Bf16, &numbers(n * k, 2)), encode(Dtype::F32, &numbers(n * k, 3)));
            let bias = numbers(n, 4);
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                let (a, b) = (Matrix::new(&a, Dtype::Bf16, n, k), Matrix::new(&b, Dtype::F32, n, k));
                let gates = Int8Weights::new(&cpu, a, Some(&bias));
                let ups = Int8Weights::new(&cpu, b, None);
                let gated = Int8Weights::gated(&cpu, (a, Some(&bias)), (b, None));
                let mut rows = Int8Activations::default();
                rows.copy_from(&cpu, &x, k);
                let (mut gate, mut up, mut added) = (vec![0.0; m * n], vec![0.0; m * n], vec![2.0; m * n]);
                let [mut activated, mut clamped, mut ungated] = std::array::from_fn(|_| Int8Activations::default());
                let mut unpacked = vec![0.0; m * n];
                let products = [
                    Product { weights: &gates, output: Output::Set(&mut gate) },
                    Product { weights: &ups, output: Output::Set(&mut up) },
                    Product { weights: &ups, output: Output::Add(&mut added) },
                    Product { weights: &gated, output: Output::Activated(Activation::Silu, &mut activated) },
                    Product { weights: &gated, output: Output::Activated(CLAMPED, &mut clamped) },
                    Product { weights: &ups, output: Output::Activated(Activation::GeluTanh, &mut ungated) },
                    Product { weights: &gated, output: Output::ActivatedNumbers(Activation::Silu, &mut unpacked) },
                ];
                matmul(&cpu, &rows, products);
                assert_eq!(unpacked, activated.exact, "the same numbers, packed or not");
                assert!(added.iter().zip(&up).all(|(added, up)| *added == 2.0 + up));
                let activate = |activation, x| activated_number(&cpu, activation, x);
                let of_both = || gate.iter().zip(&up).zip(&clamped.exact);
                assert!(of_both().all(|((&gate, &up), y)| *y == gated_number(&cpu, CLAMPED, gate, up)), "clamped");
                let gate: Vec<f32> = gate.iter().zip(&up).map(|(&gate, &up)| activate(Activation::Silu, gate) * up).collect();
                assert_eq!(activated.exact, gate, "the same bits as one by one");
                assert!(ungated.exact.iter().zip(&up).all(|(ungated, &up)| *ungated == activate(Activation::GeluTanh, up)));
                let mut expected = Int8Activations::default();
                expected.copy_from(&cpu, &gate, n);
                assert_same(&activated, &expected);
                assert_eq!(*first.get_or_insert_with(|| gate.clone()), gate, "{m}x{n}x{k} on {} with {}", cpu.isa(), cpu.threads());
            }
        }
    }

    #[test]
    fn rows_in_tiles_are_quantized_like_any() {
        for (rows, cols) in [(1, 1), (5, 33), (14, 64)] {
            let x = numbers(rows * cols, 1);
            for cpu in cpus() {
                let mut from_rows = Int8Activations::default();
                from_rows.copy_from(&cpu, &x, cols);
                for mut tiles in [FloatActivations::default(), FloatActivations::rows_apart()] {
                    let mut from_tiles = Int8Activations::default();
                    tiles.copy_from(&cpu, &x, cols);
                    from_tiles.copy_from_tiles(&cpu, &tiles);
                    assert_same(&from_tiles, &from_rows);
                }
            }
        }
    }

    #[track_caller]
    fn assert_same(a: &Int8Activations, b: &Int8Activations) {
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()));
        for row in 0..a.rows() {
            assert_eq!(a.quantized(row), b.quantized(row));
        }
        for tile in 0..a.tiling().tiles {
            let rows = a.tiling().tile(tile);
            assert_eq!(a.quads(&rows), b.quads(&rows));
        }
    }

    #[test]
    fn norms_are_quantized_as_if_they_had_been_stored() {
        for width in [7, 16, 100] {
            let (x, weight) = (numbers(5 * width, 1), numbers(width, 2));
            for cpu in cpus() {
                let mut normed = x.clone();
                rms_norm(&cpu, &mut normed, &weight, 1e-5);
                let (mut fused, mut stored) = (Int8Activations::default(), Int8Activations::default());
                fused.rms_norm_from(&cpu, &x, &weight, 1e-5);
                stored.copy_from(&cpu, &normed, width);
                assert_same(&fused, &stored);
            }
        }
    }

    #[test]
    fn an_outlier_leaves_bits_for_the_numbers_beside_it() {
        let (n, k) = (64, 256);
        let (mut x, w) = (numbers(k, 1), numbers(n * k, 2));
        let product_of = |x: &[f32], j: usize| x.iter().zip(&w[j * k..]).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        let others = (0..n).map(|j| product_of(&x, j).powi(2)).sum::<f64>();
        x[5] = 60.0;
        let cpu = Cpu::new(None, 1).unwrap();
        let bytes = encode(Dtype::F32, &w);
        let y = product(DotUnit::of(cpu.isa()), &cpu, &x, &Int8Weights::new(&cpu, Matrix::new(&bytes, Dtype::F32, n, k), None));
        let error = y.iter().enumerate().map(|(j, y)| (f64::from(*y) - product_of(&x, j)).powi(2)).sum::<f64>();
        // Without the transform, a step of `x` is 60 / 127, nearly as large as the other numbers: 0.24.
        assert!((error / others).sqrt() < 0.1, "{}", (error / others).sqrt());
    }

    #[test]
    fn the_largest_sums_do_not_overflow() {
        let k = INPUTS_MAX;
        for sign in [1.0, -1.0] {
            // The rows are all ones after the transform.
            let ones: Vec<f32> = (0..k).map(|i| if i % block_of(k) == 0 { 1.0 } else { 0.0 }).collect();
            let x: Vec<f32> = ones.iter().map(|one| sign * one).collect();
            let bytes = encode(Dtype::F32, &ones);
            let cpu = Cpu::new(None, 1).unwrap();
            let w = Int8Weights::new(&cpu, Matrix::new(&bytes, Dtype::F32, 1, k), None);
            for unit in units() {
                assert_eq!(product(unit, &cpu, &x, &w), reference(&x, &ones, &[0.0], (1, 1, k)), "{unit:?}");
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch() {
        let (m, n, k) = (37, 130, 99);
        let x = numbers(m * k, 3);
        let bytes = encode(Dtype::Bf16, &numbers(n * k, 4));
        for isa in Isa::testable() {
            let cpu = Cpu::new(Some(isa), 2).unwrap();
            let w = Int8Weights::new(&cpu, Matrix::new(&bytes, Dtype::Bf16, n, k), None);
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
        let w = Int8Weights::new(&cpu, Matrix::new(&bytes, Dtype::F32, n, k), None);
        let y = product(DotUnit::of(cpu.isa()), &cpu, &x, &w);
        assert!(y[..n].iter().enumerate().all(|(j, y)| (*y == 0.0) == (j == 3)));
        assert!(y[n..].iter().all(|y| *y == 0.0));
    }

    #[test]
    fn no_rows_are_no_work() {
        let cpu = Cpu::new(None, 2).unwrap();
        let bytes = encode(Dtype::F32, &numbers(12, 1));
        let w = Int8Weights::new(&cpu, Matrix::new(&bytes, Dtype::F32, 3, 4), None);
        assert!(product(DotUnit::of(cpu.isa()), &cpu, &[], &w).is_empty());
    }
}
