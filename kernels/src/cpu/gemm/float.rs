//! Products with f32, f16 and bf16 weights.
//!
//! Each number of the result starts from its bias and adds one product after the other, inputs ascending. For bf16 weights, activations are
//! also rounded to bf16, and inputs come in pairs, the odd one first (see `panel`), or in blocks of 32 (`amx`). So the way that rows,
//! inputs and outputs are cut for caches and threads changes no bit.
//!
//! Sums below 2^-126, the smallest normal number, are the one exception: `vdpbf16ps` flushes them to zero, fused
//! multiply-adds do not. A result that is itself about as small, or a chain that starts with products that are, may
//! differ between instruction sets by that much.
//!
//! A task is a block of rows times a group of panels. It goes over the inputs in pieces: a piece of a panel stays in
//! the first-level cache while all tiles of the block use it; the block's piece of activations and the task's sums stay
//! in the second. Few rows (decode) are one tile: then a panel streams through from end to end, once.

pub(crate) mod activations;
mod weights;

pub use activations::FloatActivations;
pub use weights::FloatWeights;

use crate::cpu::{
    Cpu,
    activation::Activation,
    element::with_element,
    gemm::{
        Output, Product, locate,
        micro_kernel::{PackedRows, Start, multiply_tile, with_tile_rows},
        panel::{BLOCK_INPUTS, PANEL, WeightFormat},
        prefetch::WeightPrefetch,
        scratch::with_sums,
    },
    simd::{Kernel, LANES, Simd},
    threads::disjoint::Disjoint,
};
use activations::{BLOCK_ROWS, SharedActivations};
use std::{marker::PhantomData, ops::Range};

/// `y = x wᵀ + bias` for each of the products. `x` is packed [for weights](FloatActivations::for_weights) of this type.
pub fn matmul<const N: usize>(cpu: &Cpu, x: &FloatActivations, products: [Product<'_, FloatWeights, FloatActivations>; N]) {
    let rows = x.rows();
    let products = products.map(|Product { weights, output }| {
        assert_eq!(x.cols(), weights.inputs(), "x is [rows, inputs]");
        assert!(x.are_for(weights.dtype()), "x is for {:?} weights", weights.dtype());
        let activates = matches!(output, Output::Activated(..) | Output::ActivatedNumbers(..));
        assert!(!weights.columns().is_gated || activates, "gated weights are for activations");
        let len = rows * weights.outputs();
        let output = match output {
            Output::Set(y) => (y.len() == len).then(|| SharedOutput::Set(Disjoint::new(y))),
            Output::Add(y) => (y.len() == len).then(|| SharedOutput::Add(Disjoint::new(y))),
            Output::ActivatedNumbers(activation, y) => {
                (y.len() == len).then(|| SharedOutput::ActivatedNumbers(activation, Disjoint::new(y)))
            }
            Output::Activated(activation, y) => {
                y.resize(cpu, rows, weights.outputs());
                Some(SharedOutput::Activated(activation, y.shared()))
            }
        };
        SharedProduct { weights, output: output.expect("y is [rows, outputs]") }
    });
    if rows == 0 {
        return;
    }
    let panels: usize = products.iter().map(|product| product.weights.panels()).sum();
    let plan = Plan::new(x, panels, cpu.threads());
    let groups = |product: &SharedProduct<'_>| product.weights.panels().div_ceil(plan.group_panels);
    cpu.for_each(products.iter().map(groups).sum::<usize>() * plan.blocks, |index| {
        // All blocks of rows take turns with one group of panels while it is in the shared cache.
        let (product, group) = locate(&products, groups, index / plan.blocks);
        let block = index % plan.blocks;
        let share = |group| group * product.weights.panels() / groups(product);
        let panels = share(group)..share(group + 1);
        let tiles = block * x.tiling.tiles / plan.blocks..(block + 1) * x.tiling.tiles / plan.blocks;
        let rows = x.tiling.tile(tiles.start).start..x.tiling.tile(tiles.end - 1).end;
        let sums_rows = if x.are_by_row() { rows.len().next_multiple_of(BLOCK_ROWS) } else { rows.len() };
        with_sums(sums_rows * panels.len(), |sums| {
            with_element!(product.weights.dtype(), E => {
                cpu.isa().dispatch_panel::<E, _>(Task::<E> { x, product, panels, tiles, rows, step: plan.step, sums, sums_rows, element: PhantomData });
            });
        });
    });
}

/// The division of the work into tasks.
struct Plan {
    /// Blocks of rows.
    blocks: usize,
    /// The largest number of panels per task; groups are of nearly equal size.
    group_panels: usize,
    /// The inputs of a piece; the last piece may have a few less.
    step: usize,
}

impl Plan {
    fn new(x: &FloatActivations, panels: usize, threads: usize) -> Self {
        let (rows, inputs) = (x.rows(), x.cols());
        let blocks = rows.div_ceil(ROWS_PER_TASK);
        let group_panels = if threads == 1 || rows * inputs * panels * PANEL < WORK_MIN_TO_SHARE {
            GROUP_PANELS
        } else {
            (panels * blocks).div_ceil(TASKS_PER_THREAD * threads).min(GROUP_PANELS)
        };
        let pieces = if x.tiling.tiles == 1 { 1 } else { inputs.div_ceil(STEP_INPUTS) };
        let step = inputs.div_ceil(pieces).next_multiple_of(BLOCK_INPUTS);
        Self { blocks, group_panels, step }
    }
}

/// Multiply-adds below which waking other threads does not pay off: some microseconds.
const WORK_MIN_TO_SHARE: usize = 1 << 17;
/// Tasks per thread, enough for others to take over the share of a thread that is delayed.
const TASKS_PER_THREAD: usize = 4;
/// The rows of a task. A group's piece of weights, at most 16 × 768 × 64 bytes (bf16), a task's activations, 96 × 768 × 2, and its sums, 96
/// × 16 × 128, about fill a second-level cache of 1 MiB. Pieces of 384 to 1,024 inputs are equally fast, as long as they are even: a piece
/// of 64 after one of 512 is not.
const ROWS_PER_TASK: usize = 96;
const GROUP_PANELS: usize = 16;
const STEP_INPUTS: usize = 768;

struct SharedProduct<'a> {
    weights: &'a FloatWeights,
    output: SharedOutput<'a>,
}

/// An [`Output`] that several tasks write.
enum SharedOutput<'a> {
    Set(Disjoint<'a, f32>),
    Add(Disjoint<'a, f32>),
    Activated(Activation, SharedActivations<'a>),
    ActivatedNumbers(Activation, Disjoint<'a, f32>),
}

/// The product of some panels and a block of rows.
struct Task<'a, E> {
    x: &'a FloatActivations,
    product: &'a SharedProduct<'a>,
    panels: Range<usize>,
    tiles: Range<usize>,
    /// Rows of the tiles.
    rows: Range<usize>,
    step: usize,
    /// `[panel][sums_rows]`; the task's rows come first.
    sums: &'a mut [[f32; PANEL]],
    sums_rows: usize,
    element: PhantomData<E>,
}

impl<E: WeightFormat> Kernel for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        for (i, panel) in self.panels.clone().enumerate() {
            self.sums[i * self.sums_rows..(i + 1) * self.sums_rows].fill(*self.product.weights.bias(panel));
        }
        if self.x.are_by_row() {
            self.multiply_blocks(simd)
        } else {
            self.multiply(simd)
        }
        for row in self.rows.clone() {
            if row + ROWS_AHEAD < self.rows.end {
                self.prefetch_outputs(simd, row + ROWS_AHEAD);
            }
            self.finish(simd, row);
        }
    }
}

impl<E: WeightFormat> Task<'_, E> {
    /// Multiplies on AMX, for which rows are stored one after the other.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    fn multiply_blocks<S: Simd>(&mut self, simd: S) {
        use crate::cpu::{
            element::Bf16,
            gemm::{
                amx::{Amx, Bf16Pairs, Piece, Stream, TILE},
                panel::PanelFormat,
            },
        };
        let (lines, step) = (Bf16::panel_lines(self.x.cols()), self.step.div_ceil(Bf16::INPUTS).next_multiple_of(TILE));
        if self.rows.len() == 1 {
            let mut panel = self.panels.start;
            while panel < self.panels.end {
                panel += match self.panels.end - panel {
                    4.. => self.multiply_row::<S, 4>(simd, panel),
                    2.. => self.multiply_row::<S, 2>(simd, panel),
                    _ => self.multiply_row::<S, 1>(simd, panel),
                };
            }
            return;
        }
        // SAFETY: rows lie this way only for an instruction set with tiles, which was found available.
        let unit = unsafe { Amx::new(self.rows.len()) };
        if self.rows.len() <= 2 * TILE {
            let following = self.product.weights.lines::<Bf16>(self.panels.start..self.product.weights.panels());
            for (nth, line, weights) in Stream::of(simd, following, lines, self.panels.len()) {
                let sums = &mut self.sums[nth * self.sums_rows..(nth + 1) * self.sums_rows];
                unit.multiply::<Bf16Pairs>(self.x.words_from(self.rows.start, line), self.x.tiling.cols, weights, sums, Start::Sums);
            }
            return;
        }
        for start in (0..lines).step_by(step) {
            let x = self.x.words_from(self.rows.start, start);
            for (panel, sums) in self.panels.clone().zip(self.sums.chunks_exact_mut(self.sums_rows)) {
                let weights = self.product.weights.panel::<Bf16>(panel, start..(start + step).min(lines));
                unit.multiply::<Bf16Pairs>(x, self.x.tiling.cols, Piece::of_many_rows(weights), sums, Start::Sums);
            }
        }
    }

    /// Multiplies the only row by `P` panels, from `first` on; returns `P`.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    fn multiply_row<S: Simd, const P: usize>(&mut self, simd: S, first: usize) -> usize {
        use crate::cpu::{element::Bf16, gemm::amx::OneRow};
        use std::array::from_fn;
        let lines = Bf16::panel_lines(self.x.cols());
        let x = &self.x.words_from(self.rows.start, 0)[..lines];
        let weights = from_fn(|p| self.product.weights.panel::<Bf16>(first + p, 0..lines));
        let mut sums = self.sums[(first - self.panels.start) * self.sums_rows..].chunks_exact_mut(self.sums_rows);
        let sums = from_fn(|_| &mut sums.next().expect("sums of each panel")[0]);
        simd.call(OneRow::<P> { x, weights, sums });
        P
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    fn multiply_blocks<S: Simd>(&mut self, _: S) {
        unreachable!("there is no AMX")
    }

    #[inline(always)]
    fn multiply<S: Simd>(&mut self, simd: S) {
        let (lines, step, first) = (self.x.cols().div_ceil(E::INPUTS), self.step.div_ceil(E::INPUTS), self.panels.start);
        let (all, panel_lines) = (self.product.weights.lines::<E>(self.panels.clone()).as_ptr(), E::panel_lines(self.x.cols()));
        for start in (0..lines).step_by(step) {
            let piece = start..(start + step).min(lines);
            for panel in self.panels.clone() {
                let weights = self.product.weights.panel::<E>(panel, piece.clone());
                let (next_panel, next_line) = match (panel + 1 < self.panels.end, piece.end < lines) {
                    (true, _) => (panel + 1, start),
                    (false, true) => (first, piece.end),
                    // With few rows, the thread's next task usually begins there.
                    (false, false) => (panel + 1, 0),
                };
                let next = all.wrapping_add((next_panel - first) * panel_lines + next_line);
                for (nth, index) in self.tiles.clone().enumerate() {
                    let rows = self.x.tiling.tile(index);
                    let x = self.x.words(&rows, piece.clone());
                    let sums = (panel - first) * self.sums_rows + rows.start - self.rows.start;
                    let sums = &mut self.sums[sums..sums + rows.len()];
                    let ahead = match self.tiles.len() {
                        // One row computes so little that its loads run ahead by themselves, and hardware prefetching with them.
                        1 if rows.len() == 1 => WeightPrefetch::NONE,
                        1 => WeightPrefetch::within(weights),
                        tiles => WeightPrefetch::share_of(next, weights.len(), nth, tiles),
                    };
                    with_tile_rows!(S, rows.len(), T => multiply_tile::<S, E, T>(simd, PackedRows::<T>(x.as_chunks().0), weights, sums, Start::Sums, ahead));
                }
            }
        }
    }

    /// Prefetches the outputs of a row.
    #[inline(always)]
    fn prefetch_outputs<S: Simd>(&self, simd: S, row: usize) {
        if let SharedOutput::Set(y) | SharedOutput::Add(y) = &self.product.output {
            let weights = self.product.weights;
            let columns = weights.columns().outputs_of(self.panels.start).start..weights.columns().outputs_of(self.panels.end - 1).end;
            for column in columns.step_by(LANES) {
                simd.prefetch_to_write(y.address(row * weights.outputs() + column));
            }
        }
    }

    /// Stores the sums of one row: its outputs of all panels are adjacent.
    #[inline(always)]
    fn finish<S: Simd>(&self, simd: S, row: usize) {
        let weights = self.product.weights;
        let of_row = self.sums.chunks_exact(self.sums_rows).map(|sums| sums[row - self.rows.start].as_chunks::<LANES>().0);
        let panels = self.panels.clone().map(|panel| weights.columns().outputs_of(panel)).zip(of_row);
        match &self.product.output {
            SharedOutput::Set(y) | SharedOutput::Add(y) => {
                let (start, add) = (row * weights.outputs(), matches!(self.product.output, SharedOutput::Add(_)));
                for (columns, halves) in panels {
                    // SAFETY: no two tasks have the same rows and columns, and this is the only part alive within this
                    // task.
                    let y = unsafe { y.part(start + columns.start..start + columns.end) };
                    for (y, half) in y.chunks_mut(LANES).zip(halves) {
                        simd.store_part(simd.load(half), y, add);
                    }
                }
            }
            SharedOutput::ActivatedNumbers(activation, y) => {
                let start = row * weights.outputs();
                for (columns, halves) in panels {
                    // SAFETY: as above.
                    let y = unsafe { y.part(start + columns.start..start + columns.end) };
                    if weights.columns().is_gated {
                        simd.store_part(activation.gate(simd, simd.load(&halves[0]), simd.load(&halves[1])), y, false);
                        continue;
                    }
                    for (y, half) in y.chunks_mut(LANES).zip(halves) {
                        simd.store_part(activation.apply(simd, simd.load(half)), y, false);
                    }
                }
            }
            SharedOutput::Activated(activation, y) if weights.columns().is_gated => {
                let tile = y.tiling.tile_of(row);
                for (columns, halves) in panels {
                    let product = simd.to_array(activation.gate(simd, simd.load(&halves[0]), simd.load(&halves[1])));
                    // SAFETY: no two tasks have the same rows and columns.
                    unsafe { y.put(simd, &tile, row, columns.start, &product[..columns.len()]) };
                }
            }
            SharedOutput::Activated(activation, y) => {
                let tile = y.tiling.tile_of(row);
                for (columns, halves) in panels {
                    for (start, half) in columns.clone().step_by(LANES).zip(halves) {
                        let activated = simd.to_array(activation.apply(simd, simd.load(half)));
                        // SAFETY: as above.
                        unsafe { y.put(simd, &tile, row, start, &activated[..LANES.min(columns.end - start)]) };
                    }
                }
            }
        }
    }
}

/// The number of rows by which the prefetching of outputs is ahead.
const ROWS_AHEAD: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            isa::{Bf16Products, Isa},
            testing::{CLAMPED, cpus, gated_number, numbers, order},
        },
        dtype::{Dtype, decode, encode},
        matrix::Matrix,
    };
    use std::collections::HashMap;

    fn tiles(cpu: &Cpu, dtype: Dtype, x: &[f32], cols: usize) -> FloatActivations {
        let mut tiles = FloatActivations::for_weights(dtype);
        tiles.copy_from(cpu, x, cols);
        tiles
    }

    /// `x`, rounded as for weights of type `dtype`.
    fn rounded(dtype: Dtype, x: &[f32]) -> Vec<f32> {
        if dtype == Dtype::Bf16 { decode(dtype, &encode(dtype, x)) } else { x.to_vec() }
    }

    /// `[m, k]` times `[n, k]`, plus bias, in f64; and the sum of the absolute terms.
    fn reference(x: &[f32], w: &[f32], bias: &[f32], k: usize) -> Vec<(f64, f64)> {
        let dot = |x: &[f32], w: &[f32], bias: f32| {
            let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            terms.fold((f64::from(bias), f64::from(bias).abs()), |(sum, size), t| (sum + t, size + t.abs()))
        };
        x.chunks(k).flat_map(|x| w.chunks(k).zip(bias).map(move |(w, &bias)| dot(x, w, bias))).collect()
    }

    fn assert_close(got: &[f32], reference: &[(f64, f64)]) {
        assert_eq!(got.len(), reference.len());
        for (&got, (sum, size)) in got.iter().zip(reference) {
            assert!((f64::from(got) - sum).abs() <= 2e-6 * size, "{got} is not {sum}");
        }
    }

    const SHAPES: [(usize, usize, usize); 8] =
        [(1, 1, 1), (1, 7, 15), (2, 5, 16), (3, 33, 17), (13, 64, 64), (5, 70, 100), (17, 70, 1172), (230, 300, 31)];

    #[test]
    fn matches_the_f64_reference_on_odd_sizes_with_the_same_bits_everywhere() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for (m, n, k) in SHAPES {
                let (x, bias) = (numbers(m * k, 1), numbers(n, 3));
                let bytes = encode(dtype, &numbers(n * k, 2));
                let expected = reference(&rounded(dtype, &x), &decode(dtype, &bytes), &bias, k);
                let mut first: HashMap<Bf16Products, Vec<f32>> = HashMap::new();
                for cpu in cpus() {
                    let weights = FloatWeights::new(&cpu, Matrix::new(&bytes, dtype, n, k), Some(&bias));
                    let x = tiles(&cpu, dtype, &x, k);
                    let (mut y, mut added) = (vec![f32::NAN; m * n], vec![2.0; m * n]);
                    matmul(
                        &cpu,
                        &x,
                        [
                            Product { weights: &weights, output: Output::Set(&mut y) },
                            Product { weights: &weights, output: Output::Add(&mut added) },
                        ],
                    );
                    assert_close(&y, &expected);
                    assert!(added.iter().zip(&y).all(|(added, y)| *added == 2.0 + y));
                    let first = first.entry(order(cpu.isa(), dtype == Dtype::Bf16)).or_insert_with(|| y.clone());
                    assert_eq!(*first, y, "{dtype:?} {m}x{n}x{k} on {} with {} threads", cpu.isa(), cpu.threads());
                }
            }
        }
    }

    #[test]
    fn activations_are_of_the_outputs_and_multiply_the_gated_ones() {
        for (m, n, k) in SHAPES {
            let (x, bias) = (numbers(m * k, 1), numbers(n, 4));
            let (gate, up) = (encode(Dtype::Bf16, &numbers(n * k, 2)), encode(Dtype::Bf16, &numbers(n * k, 3)));
            let exact = rounded(Dtype::Bf16, &x);
            let gates = reference(&exact, &decode(Dtype::Bf16, &gate), &bias, k);
            let ups = reference(&exact, &decode(Dtype::Bf16, &up), &vec![0.0; n], k);
            let expected: Vec<f64> = gates.iter().zip(&ups).map(|((g, _), (u, _))| g / (1.0 + (-g).exp()) * u).collect();
            let mut first: HashMap<Bf16Products, Vec<f32>> = HashMap::new();
            for cpu in cpus() {
                let matrix = |bytes| Matrix::new(bytes, Dtype::Bf16, n, k);
                let weights = FloatWeights::gated(&cpu, (matrix(&gate), Some(&bias)), (matrix(&up), None));
                let ungated = FloatWeights::new(&cpu, matrix(&gate), Some(&bias));
                let (mut y, mut of_gate) = (FloatActivations::default(), FloatActivations::default());
                let x = tiles(&cpu, Dtype::Bf16, &x, k);
                matmul(&cpu, &x, [Product { weights: &weights, output: Output::Activated(Activation::Silu, &mut y) }]);
                matmul(&cpu, &x, [Product { weights: &ungated, output: Output::Activated(Activation::Silu, &mut of_gate) }]);
                for (weights, packed) in [(&weights, &y), (&ungated, &of_gate)] {
                    let mut numbers = vec![0.0; m * n];
                    matmul(&cpu, &x, [Product { weights, output: Output::ActivatedNumbers(Activation::Silu, &mut numbers) }]);
                    assert_eq!(numbers, packed.to_rows(), "the same numbers, packed or not");
                }
                let silu = gates.iter().map(|(g, _)| g / (1.0 + (-g).exp()));
                for (got, (expected, (_, size))) in of_gate.to_rows().iter().zip(silu.zip(&gates)) {
                    assert!((f64::from(*got) - expected).abs() <= 1e-5 * (1.0 + size), "{got} is not {expected}");
                }
                let rows = y.to_rows();
                for (got, (expected, size)) in rows.iter().zip(expected.iter().zip(&ups)) {
                    assert!((f64::from(*got) - expected).abs() <= 1e-4 * (1.0 + size.1), "{got} is not {expected}");
                }
                let first = first.entry(order(cpu.isa(), true)).or_insert_with(|| rows.clone());
                assert_eq!(*first, rows, "{m}x{n}x{k} on {} with {} threads", cpu.isa(), cpu.threads());
            }
        }
    }

    #[test]
    fn a_clamped_gate_has_the_bits_that_its_two_products_alone_lead_to() {
        for (m, n, k) in SHAPES {
            let (x, bias) = (numbers(m * k, 1), [numbers(n, 4), numbers(n, 5)]);
            let bytes = [2, 3].map(|seed| encode(Dtype::F32, &numbers(n * k, seed)));
            for cpu in cpus() {
                let [gate, up] = [0, 1].map(|i| (Matrix::new(&bytes[i], Dtype::F32, n, k), Some(&bias[i][..])));
                let x = tiles(&cpu, Dtype::F32, &x, k);
                let [gates, ups] = [gate, up].map(|(weights, bias)| {
                    let (weights, mut y) = (FloatWeights::new(&cpu, weights, bias), vec![0.0; m * n]);
                    matmul(&cpu, &x, [Product { weights: &weights, output: Output::Set(&mut y) }]);
                    y
                });
                let (weights, mut y) = (FloatWeights::gated(&cpu, gate, up), FloatActivations::for_weights(Dtype::F32));
                matmul(&cpu, &x, [Product { weights: &weights, output: Output::Activated(CLAMPED, &mut y) }]);
                let expected: Vec<f32> = gates.iter().zip(&ups).map(|(gate, up)| gated_number(&cpu, CLAMPED, *gate, *up)).collect();
                assert_eq!(y.to_rows(), expected, "{m}x{n}x{k} on {} with {} threads", cpu.isa(), cpu.threads());
            }
        }
    }

    /// Compares with the stated arithmetic, number by number.
    #[test]
    fn products_of_bf16_are_chains_in_twos_the_odd_one_first_or_blocks_of_32() {
        let (m, n) = (3, 35);
        for k in [1, 2, 7, 33, 600] {
            let (x, w, bias) = (rounded(Dtype::Bf16, &numbers(m * k, 5)), numbers(n * k, 6), numbers(n, 7));
            let bytes = encode(Dtype::Bf16, &w);
            let w = decode(Dtype::Bf16, &bytes);
            let chain = |x: &[f32], w: &[f32], bias: f32| {
                let pairs = x.chunks(2).zip(w.chunks(2));
                pairs.fold(bias, |sum, (x, w)| x.iter().zip(w).rev().fold(sum, |sum, (x, w)| x.mul_add(*w, sum)))
            };
            let blocks = |x: &[f32], w: &[f32], bias: f32| {
                let even_and_odd = |pairs: (&[f32], &[f32])| {
                    [0, 1].map(|i| pairs.0.iter().zip(pairs.1).skip(i).step_by(2).fold(0.0f32, |sum, (x, w)| x.mul_add(*w, sum)))
                };
                x.chunks(32).zip(w.chunks(32)).map(even_and_odd).fold(bias, |sum, [even, odd]| sum + (even + odd))
            };
            for cpu in cpus() {
                let sum = |x: &[f32], w: &[f32], bias| match cpu.isa().bf16_products() {
                    Bf16Products::Chain => chain(x, w, bias),
                    Bf16Products::Blocks => blocks(x, w, bias),
                };
                let expected: Vec<f32> = x.chunks(k).flat_map(|x| w.chunks(k).zip(&bias).map(|(w, &bias)| sum(x, w, bias))).collect();
                let weights = FloatWeights::new(&cpu, Matrix::new(&bytes, Dtype::Bf16, n, k), Some(&bias));
                let mut y = vec![0.0; m * n];
                matmul(&cpu, &tiles(&cpu, Dtype::Bf16, &x, k), [Product { weights: &weights, output: Output::Set(&mut y) }]);
                assert!(y == expected, "{k} inputs on {}", cpu.isa());
            }
        }
    }

    #[test]
    fn denormal_bf16_are_zeros_on_every_instruction_set() {
        // If they were not flushed, 2^-130 times 2^100 would count.
        let (tiny, large) = (2f32.powi(-130), 2f32.powi(100));
        let (x, w) = ([tiny, large, 0.5, tiny, 1.0], [large, tiny, 2.0, large, 0.25]);
        let bytes = encode(Dtype::Bf16, &w);
        assert!(decode(Dtype::Bf16, &bytes) == w, "they can be stored");
        for cpu in cpus() {
            let weights = FloatWeights::new(&cpu, Matrix::new(&bytes, Dtype::Bf16, 1, w.len()), None);
            let mut y = [f32::NAN];
            matmul(&cpu, &tiles(&cpu, Dtype::Bf16, &x, w.len()), [Product { weights: &weights, output: Output::Set(&mut y) }]);
            assert_eq!(y, [1.25], "{}", cpu.isa());
        }
    }

    #[test]
    #[should_panic(expected = "x is for Bf16 weights")]
    fn bf16_weights_refuse_activations_that_are_not_rounded() {
        let cpu = Cpu::new(None, 1).unwrap();
        let weights = FloatWeights::new(&cpu, Matrix::new(&[0; 2], Dtype::Bf16, 1, 1), None);
        matmul(&cpu, &tiles(&cpu, Dtype::F32, &[1.0], 1), [Product { weights: &weights, output: Output::Set(&mut [0.0]) }]);
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch() {
        let (m, n, k) = (137, 1030, 599);
        let x = numbers(m * k, 3);
        let bytes = encode(Dtype::Bf16, &numbers(n * k, 4));
        for isa in Isa::testable() {
            let cpu = Cpu::new(Some(isa), 2).unwrap();
            let weights = FloatWeights::new(&cpu, Matrix::new(&bytes, Dtype::Bf16, n, k), None);
            let product = |x: &[f32]| {
                let mut y = vec![0.0; x.len() / k * n];
                matmul(&cpu, &tiles(&cpu, Dtype::Bf16, x, k), [Product { weights: &weights, output: Output::Set(&mut y) }]);
                y
            };
            let together = product(&x);
            for (row, expected) in x.chunks(k).zip(together.chunks(n)).step_by(9) {
                assert_eq!(product(row), expected);
            }
        }
    }
}
