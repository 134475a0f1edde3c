//! Products of weights in 4 or 8 bits with activations in 8 bits, both with a scale for each group of inputs.
//!
//! This is the form in which weights are published (AWQ, GPTQ, compressed-tensors): unsigned integers, of which each
//! group of 32, 64, 128, … consecutive inputs of an output has a scale and a zero, the integer that means 0. Activations are
//! rounded on the fly in groups of 32, so an outlier costs only its neighbours some precision.
//!
//! Numbers of MXFP4 are integers too, once they are doubled: four bits look up an integer from 0 to 24, whose zero is 12.
//!
//! ```text
//! x     = scale_x q_x                  scale_x = max |x| / 127 of a group of 32      q_x = round(x / scale_x), ties to even
//! w     = scale_w (q_w - zero)
//! y     = fma(scale_w * scale_x, f32(Σ q_x q_w - zero Σ q_x), y)     for each group of 32, ascending, from 0; then + bias
//! ```
//!
//! A group's sum is an exact integer and its parts are added in one order: no tiling or instruction set changes a bit, and a
//! row depends on itself alone.
//!
//! - [`GroupwiseWeights`], [`GroupwiseActivations`]: packed operands; [`GroupwiseMatrix`]: the source of weights
//! - [`matmul`]: the product

mod activations;
mod weights;

pub use activations::GroupwiseActivations;
pub use weights::{Bits, GroupwiseMatrix, GroupwiseRow, GroupwiseWeights, Rounded};

use crate::{
    cpu::{
        Cpu,
        element::{Bf16, Element, F16},
        gemm::{
            Output, Product,
            dot::{Dot, DotKernel, DotUnit, Line},
            epilogue::Epilogue,
            locate,
            micro_kernel::with_tile_rows,
            panel::PANEL_LINES,
            prefetch::WeightPrefetch,
        },
        simd::{LANES, Simd},
    },
    dtype::Dtype,
};
use std::{array::from_fn, marker::PhantomData, ops::Range};

/// Inputs that share a scale of the activations. Weights' groups are made of these.
pub const GROUP: usize = 32;
/// Groups of four inputs in a [`GROUP`].
const GROUP_QUADS: usize = GROUP / 4;

/// `y = x wᵀ + bias` for each of the products.
pub fn matmul<const N: usize>(cpu: &Cpu, x: &GroupwiseActivations, products: [Product<'_, GroupwiseWeights, GroupwiseActivations>; N]) {
    matmul_on(DotUnit::of(cpu.isa()), cpu, x, products);
}

fn matmul_on<const N: usize>(
    unit: DotUnit,
    cpu: &Cpu,
    x: &GroupwiseActivations,
    mut products: [Product<'_, GroupwiseWeights, GroupwiseActivations>; N],
) {
    let shared = products.each_mut().map(|product| SharedProduct::new(x, product));
    let panels = shared.iter().map(|product| product.weights.panels()).sum::<usize>();
    let per_task = panels_per_task(x, panels, cpu.threads());
    let tasks = |product: &SharedProduct<'_>| product.weights.panels().div_ceil(per_task);
    cpu.for_each(shared.iter().map(tasks).sum(), |index| {
        let (product, index) = locate(&shared, tasks, index);
        let panels = index * per_task..((index + 1) * per_task).min(product.weights.panels());
        unit.dispatch(Task { x, product, panels });
    });
    for Product { weights, output } in products {
        if let Output::Activated(_, y) = output {
            y.copy_from_exact(cpu, weights.outputs());
        }
    }
}

/// The panels per task: enough to make waking a thread worthwhile, few enough for others to take over the share of a thread that is
/// delayed.
fn panels_per_task(x: &GroupwiseActivations, panels: usize, threads: usize) -> usize {
    let products = x.rows() * x.cols() * PANEL_LINES * LANES;
    panels.div_ceil(TASKS_PER_THREAD * threads).max(PRODUCTS_PER_TASK / products.max(1)).max(1)
}

/// Products per task: some microseconds.
const PRODUCTS_PER_TASK: usize = 1 << 18;
const TASKS_PER_THREAD: usize = 16;

/// A product that several tasks write.
struct SharedProduct<'a> {
    weights: &'a GroupwiseWeights,
    epilogue: Epilogue<'a>,
}

impl<'a> SharedProduct<'a> {
    fn new(x: &GroupwiseActivations, product: &'a mut Product<'_, GroupwiseWeights, GroupwiseActivations>) -> Self {
        let weights = product.weights;
        assert_eq!(x.cols(), weights.inputs(), "x is [rows, inputs]");
        Self { weights, epilogue: Epilogue::new(x.rows(), weights.columns(), &mut product.output) }
    }
}

/// The product of all rows and some panels. A panel stays in the second-level cache while the tiles of rows pass by.
struct Task<'a> {
    x: &'a GroupwiseActivations,
    product: &'a SharedProduct<'a>,
    panels: Range<usize>,
}

/// The zero of numbers in e2m1.
pub const E2M1_ZERO: u8 = 12;
/// Twice each number in e2m1 plus [`E2M1_ZERO`], by its bits.
const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Steps through the weights of a group: a line has eight inputs in 4 bits, four in 8.
const STEPS_OF_4_BITS: usize = GROUP / 8;
const STEPS_OF_8_BITS: usize = GROUP / 4;

impl DotKernel for Task<'_> {
    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        let weights = self.product.weights;
        match (weights.bits(), weights.scale_dtype()) {
            (Bits::Four, _) if weights.is_e2m1() => self.panels::<D, Bf16, STEPS_OF_4_BITS, true>(dot),
            (Bits::Four, Dtype::F16) => self.panels::<D, F16, STEPS_OF_4_BITS, false>(dot),
            (Bits::Four, _) => self.panels::<D, Bf16, STEPS_OF_4_BITS, false>(dot),
            (Bits::Eight, Dtype::F16) => self.panels::<D, F16, STEPS_OF_8_BITS, false>(dot),
            (Bits::Eight, _) => self.panels::<D, Bf16, STEPS_OF_8_BITS, false>(dot),
        }
    }
}

/// The rows of a tile, by unit.
struct Tile<D>(PhantomData<D>);

impl<D: Dot> Tile<D> {
    const TILE_ROWS: usize = D::GROUPWISE_ROWS;
}

impl Task<'_> {
    #[inline(always)]
    fn panels<D: Dot, E: Element, const STEPS: usize, const IS_E2M1: bool>(&self, dot: D) {
        let tiling = self.x.tiling(D::GROUPWISE_ROWS);
        for panel in self.panels.clone() {
            for index in 0..tiling.tiles {
                let rows = tiling.tile(index);
                let ahead = match tiling.tiles {
                    1 => WeightPrefetch::within(self.product.weights.panel::<STEPS>(panel).as_flattened()),
                    tiles => {
                        let lines = self.product.weights.panel::<STEPS>(panel).as_flattened();
                        WeightPrefetch::share_of(lines.as_ptr_range().end, lines.len(), index, tiles)
                    }
                };
                with_tile_rows!(Tile<D>, rows.len(), T => self.tile::<D, E, T, STEPS, IS_E2M1>(dot, panel, rows, ahead));
            }
        }
    }

    /// Multiplies a tile of `T` rows by a panel.
    #[inline(always)]
    fn tile<D: Dot, E: Element, const T: usize, const STEPS: usize, const IS_E2M1: bool>(
        &self,
        dot: D,
        panel: usize,
        rows: Range<usize>,
        ahead: WeightPrefetch,
    ) {
        let (simd, epilogue) = (dot.simd(), &self.product.epilogue);
        epilogue.prefetch(simd, panel, rows.clone());
        let mut numbers = [[simd.zero(); PANEL_LINES]; T];
        if const { D::LINES == PANEL_LINES } {
            self.lines::<D, E, T, PANEL_LINES, STEPS, IS_E2M1>(dot, panel, 0, rows.start, &mut numbers, ahead);
        } else {
            for line in 0..PANEL_LINES {
                let ahead = if line == 0 { ahead } else { WeightPrefetch::NONE };
                self.lines::<D, E, T, 1, STEPS, IS_E2M1>(dot, panel, line, rows.start, &mut numbers, ahead);
            }
        }
        let (outputs, bias) = (epilogue.outputs(panel), self.product.weights.bias(panel).as_chunks().0);
        for (row, mut y) in rows.zip(numbers) {
            for line in 0..PANEL_LINES {
                y[line] = simd.add(y[line], simd.load(&bias[line]));
            }
            epilogue.put(simd, row, &outputs, y);
        }
    }

    /// Sets `numbers[i][first..first + N]` to the products of row `start + i` with `N` lines of the panel.
    #[inline(always)]
    fn lines<D: Dot, E: Element, const T: usize, const N: usize, const STEPS: usize, const IS_E2M1: bool>(
        &self,
        dot: D,
        panel: usize,
        first: usize,
        start: usize,
        numbers: &mut [[<D::Simd as Simd>::V; PANEL_LINES]; T],
        mut ahead: WeightPrefetch,
    ) {
        let (simd, weights) = (dot.simd(), self.product.weights);
        let rows: [_; T] = from_fn(|i| self.x.row(start + i));
        let mut y = [[simd.zero(); N]; T];
        for (group, steps) in weights.panel::<STEPS>(panel).iter().enumerate() {
            let (scales, zeros) = (weights.scales(panel, group), weights.zeros(panel, group));
            let x: [_; T] = from_fn(|i| &rows[i].quads[group]);
            let mut sums = [[dot.splat(0); N]; T];
            if let Zeros::Same(zero) = zeros {
                for i in 0..T {
                    sums[i] = [dot.splat(-zero * rows[i].groups[group].sum); N];
                }
            }
            for (step, lines) in steps.iter().enumerate() {
                ahead.issue(simd);
                for j in 0..N {
                    if const { STEPS == STEPS_OF_4_BITS } {
                        let [mut low, mut high] = dot.nibbles(&lines[first + j]);
                        if const { IS_E2M1 } {
                            (low, high) = (dot.look_up(low, &E2M1), dot.look_up(high, &E2M1));
                        }
                        for i in 0..T {
                            sums[i][j] = dot.add_products(sums[i][j], low, x[i][2 * step]);
                            sums[i][j] = dot.add_products(sums[i][j], high, x[i][2 * step + 1]);
                        }
                    } else {
                        let line = dot.load(&lines[first + j]);
                        for i in 0..T {
                            sums[i][j] = dot.add_products(sums[i][j], line, x[i][step]);
                        }
                    }
                }
            }
            for j in 0..N {
                let scale = load_16_bits::<E, _>(simd, scales, first + j);
                let zero = match zeros {
                    Zeros::Same(_) => simd.zero(),
                    Zeros::Each(zeros) => load_16_bits::<Bf16, _>(simd, zeros, first + j),
                };
                for i in 0..T {
                    let quantized = rows[i].groups[group];
                    let mut sum = dot.to_f32(sums[i][j]);
                    if let Zeros::Each(_) = zeros {
                        // This is exact: all three are integers below 2^24.
                        sum = simd.fma(zero, simd.splat(-(quantized.sum as f32)), sum);
                    }
                    y[i][j] = simd.fma(simd.mul(scale, simd.splat(quantized.scale)), sum, y[i][j]);
                }
            }
        }
        for i in 0..T {
            for j in 0..N {
                numbers[i][first + j] = y[i][j];
            }
        }
    }
}

/// The zeros of a panel's outputs in one group.
#[derive(Clone, Copy)]
enum Zeros<'a> {
    Same(i32),
    /// Zeros of each output, in bf16, which holds integers up to 256.
    Each(&'a [[u8; 2]; PANEL_LINES * LANES]),
}

/// The numbers of one line, in 16 bits each.
#[inline(always)]
fn load_16_bits<E: Element, S: Simd>(simd: S, numbers: &[[u8; 2]; PANEL_LINES * LANES], line: usize) -> S::V {
    let (chunks, _) = E::chunks(numbers.as_flattened());
    E::load(simd, &chunks[line])
}

/// Four inputs of a panel in 8 bits, or eight in 4.
type Lines = [Line; PANEL_LINES];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            activation::Activation,
            elementwise::rms_norm,
            gemm::float::activations::FloatActivations,
            isa::Isa,
            testing::{CLAMPED, activated_number, cpus, gated_number, numbers},
        },
        dtype::{decode, encode},
        matrix::Matrix,
    };
    use proptest::prelude::*;

    /// Arbitrary integers, scales and zeros, drawn from a seed.
    #[derive(Clone, Copy)]
    struct Drawn {
        outputs: usize,
        inputs: usize,
        bits: Bits,
        is_e2m1: bool,
        group: usize,
        scale_dtype: Dtype,
        has_one_zero: bool,
        seed: u64,
    }

    impl GroupwiseMatrix for Drawn {
        fn outputs(&self) -> usize {
            self.outputs
        }

        fn inputs(&self) -> usize {
            self.inputs
        }

        fn bits(&self) -> Bits {
            self.bits
        }

        fn group(&self) -> usize {
            self.group
        }

        fn scale_dtype(&self) -> Dtype {
            self.scale_dtype
        }

        fn is_e2m1(&self) -> bool {
            self.is_e2m1
        }

        fn read(&self, output: usize, row: &mut GroupwiseRow) {
            let most = if self.bits == Bits::Four { 15.0 } else { 255.0 };
            let seed = self.seed + 1000 * output as u64;
            let integer = |x: &f32| ((x + 1.0) / 2.0 * (most + 1.0)).floor().min(most) as u8;
            row.integers = numbers(self.inputs, seed).iter().map(integer).collect();
            let groups = row.scales.len();
            row.scales = decode(self.scale_dtype, &encode(self.scale_dtype, &numbers(groups, seed + 1)));
            row.zeros = numbers(groups, seed + 2).iter().map(|x| if self.has_one_zero { 7 } else { integer(x) }).collect();
            if self.is_e2m1 {
                row.zeros.fill(E2M1_ZERO);
            }
        }
    }

    /// [`matmul`] on any available unit, regardless of the instruction set of `cpu`.
    fn product(unit: DotUnit, cpu: &Cpu, x: &[f32], w: &GroupwiseWeights) -> Vec<f32> {
        let mut rows = GroupwiseActivations::default();
        rows.copy_from(cpu, x, w.inputs());
        let mut y = vec![f32::NAN; rows.rows() * w.outputs()];
        matmul_on(unit, cpu, &rows, [Product { weights: w, output: Output::Set(&mut y) }]);
        y
    }

    fn units() -> impl Iterator<Item = DotUnit> {
        DotUnit::ALL.into_iter().filter(|unit| unit.is_available())
    }

    /// The product by definition.
    fn reference(x: &[f32], w: &dyn GroupwiseMatrix, bias: &[f32]) -> Vec<f32> {
        let mut row = GroupwiseRow::of(w);
        let rows = x.chunks(w.inputs());
        let mut y = vec![0.0; rows.len() * w.outputs()];
        for output in 0..w.outputs() {
            w.read(output, &mut row);
            if w.is_e2m1() {
                row.integers.iter_mut().for_each(|bits| *bits = E2M1[usize::from(*bits)]);
            }
            for (i, x) in rows.clone().enumerate() {
                let mut sum = 0.0f32;
                for (group, x) in x.chunks(GROUP).enumerate() {
                    let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                    let (scale, inverse) = if largest < 1e-30 { (0.0, 0.0) } else { (largest / 127.0, f64::from(127.0 / largest)) };
                    let of_weights = group * GROUP / w.group();
                    let zero = i64::from(row.zeros[of_weights]);
                    let products = x.iter().zip(&row.integers[group * GROUP..]);
                    let exact: i64 =
                        products.map(|(x, q)| (f64::from(*x) * inverse).round_ties_even() as i64 * (i64::from(*q) - zero)).sum();
                    sum = (row.scales[of_weights] * scale).mul_add(exact as f32, sum);
                }
                y[i * w.outputs() + output] = sum + bias[output];
            }
        }
        y
    }

    /// Asserts that the product has exactly the bits of the definition on every unit, with one and several threads.
    fn check(rows: usize, matrix: Drawn) {
        let x: Vec<f32> = numbers(rows * matrix.inputs, matrix.seed + 5).iter().map(|x| 5.0 * x).collect();
        let bias = numbers(matrix.outputs, matrix.seed + 6);
        let expected = reference(&x, &matrix, &bias);
        for cpu in cpus() {
            let w = GroupwiseWeights::new(&cpu, &matrix, Some(&bias));
            for unit in units() {
                let (outputs, inputs) = (matrix.outputs, matrix.inputs);
                assert_eq!(product(unit, &cpu, &x, &w), expected, "{rows} x {outputs} x {inputs} on {unit:?}");
            }
        }
    }

    const DRAWN: Drawn = Drawn {
        outputs: 40,
        inputs: 96,
        bits: Bits::Four,
        is_e2m1: false,
        group: 32,
        scale_dtype: Dtype::F16,
        has_one_zero: false,
        seed: 3,
    };
    const OF_E2M1: Drawn = Drawn { is_e2m1: true, scale_dtype: Dtype::Bf16, ..DRAWN };

    #[test]
    fn the_product_is_its_definition_on_every_unit() {
        for (rows, outputs, inputs) in [(1, 1, 1), (1, 64, 64), (3, 17, 5), (12, 33, 16), (13, 48, 100), (7, 70, 256)] {
            for bits in [Bits::Four, Bits::Eight] {
                for (group, scale_dtype, has_one_zero) in [(32, Dtype::F16, true), (64, Dtype::Bf16, false), (1 << 20, Dtype::F16, false)] {
                    check(rows, Drawn { outputs, inputs, bits, group, scale_dtype, has_one_zero, seed: 7, ..DRAWN });
                }
            }
            [32, 64, 1 << 20].into_iter().for_each(|group| check(rows, Drawn { outputs, inputs, group, seed: 7, ..OF_E2M1 }));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn any_shape_is_its_definition(rows in 1usize..20, outputs in 1usize..80, inputs in 1usize..150, seed in 0u64..1000) {
            let bits = if seed % 2 == 0 { Bits::Four } else { Bits::Eight };
            check(rows, Drawn { outputs, inputs, bits, has_one_zero: seed % 3 == 0, seed, ..DRAWN });
            check(rows, Drawn { outputs, inputs, seed, ..OF_E2M1 });
        }
    }

    #[test]
    fn integers_of_e2m1_are_twice_its_numbers() {
        let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
        assert_eq!(E2M1.map(|integer| (f32::from(integer) - f32::from(E2M1_ZERO)) / 2.0), numbers);
    }

    #[test]
    fn several_products_are_added_or_gated() {
        let (rows, inputs, outputs) = (14, DRAWN.inputs, DRAWN.outputs);
        let x = numbers(rows * inputs, 1);
        let (gate, up) = (Drawn { seed: 21, ..DRAWN }, Drawn { seed: 22, has_one_zero: true, ..DRAWN });
        let bias = numbers(outputs, 4);
        for cpu in cpus() {
            let gates = GroupwiseWeights::new(&cpu, &gate, Some(&bias));
            let ups = GroupwiseWeights::new(&cpu, &up, None);
            let gated = GroupwiseWeights::gated(&cpu, (&gate, Some(&bias)), (&up, None));
            let mut packed = GroupwiseActivations::default();
            packed.copy_from(&cpu, &x, inputs);
            let (mut a, mut b, mut added) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs], vec![2.0; rows * outputs]);
            let (mut activated, mut clamped) = (GroupwiseActivations::default(), GroupwiseActivations::default());
            let mut unpacked = vec![0.0; rows * outputs];
            let products = [
                Product { weights: &gates, output: Output::Set(&mut a) },
                Product { weights: &ups, output: Output::Set(&mut b) },
                Product { weights: &ups, output: Output::Add(&mut added) },
                Product { weights: &gated, output: Output::Activated(Activation::Silu, &mut activated) },
                Product { weights: &gated, output: Output::Activated(CLAMPED, &mut clamped) },
                Product { weights: &gated, output: Output::ActivatedNumbers(Activation::Silu, &mut unpacked) },
            ];
            matmul(&cpu, &packed, products);
            assert_eq!(unpacked, activated.exact, "the same numbers, packed or not");
            assert!(added.iter().zip(&b).all(|(added, b)| *added == 2.0 + b));
            let product: Vec<f32> = a.iter().zip(&b).map(|(a, b)| activated_number(&cpu, Activation::Silu, *a) * b).collect();
            assert_eq!(activated.exact, product, "the same bits as one by one");
            let of_both: Vec<f32> = a.iter().zip(&b).map(|(a, b)| gated_number(&cpu, CLAMPED, *a, *b)).collect();
            assert_eq!(clamped.exact, of_both, "clamped");
            let mut expected = GroupwiseActivations::default();
            expected.copy_from(&cpu, &product, outputs);
            assert_same(&activated, &expected);
        }
    }

    #[test]
    fn rows_in_tiles_and_norms_are_rounded_like_any() {
        for (rows, cols) in [(1, 1), (5, 33), (14, 64), (3, 80)] {
            let (x, weight) = (numbers(rows * cols, 1), numbers(cols, 2));
            for cpu in cpus() {
                let (mut plain, mut tiled) = (GroupwiseActivations::default(), GroupwiseActivations::default());
                plain.copy_from(&cpu, &x, cols);
                for mut tiles in [FloatActivations::default(), FloatActivations::rows_apart()] {
                    tiles.copy_from(&cpu, &x, cols);
                    tiled.copy_from_tiles(&cpu, &tiles);
                    assert_same(&tiled, &plain);
                }
                let mut normed = x.clone();
                rms_norm(&cpu, &mut normed, &weight, 1e-5);
                plain.copy_from(&cpu, &normed, cols);
                tiled.rms_norm_from(&cpu, &x, &weight, 1e-5);
                assert_same(&tiled, &plain);
            }
        }
    }

    #[track_caller]
    fn assert_same(a: &GroupwiseActivations, b: &GroupwiseActivations) {
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()));
        (0..a.rows()).for_each(|row| assert_eq!(a.row(row), b.row(row)));
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch() {
        for matrix in [DRAWN, OF_E2M1].map(|matrix| Drawn { outputs: 130, inputs: 99, ..matrix }) {
            let x = numbers(37 * matrix.inputs, 3);
            for isa in Isa::testable() {
                let cpu = Cpu::new(Some(isa), 2).unwrap();
                let w = GroupwiseWeights::new(&cpu, &matrix, None);
                let together = product(DotUnit::of(isa), &cpu, &x, &w);
                for rows in [1, 5, 36] {
                    let cut = x.chunks(rows * matrix.inputs).flat_map(|x| product(DotUnit::of(isa), &cpu, x, &w)).collect::<Vec<_>>();
                    assert_eq!(cut, together, "{rows} rows at a time on {isa}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_integer_of_their_group() {
        let x: Vec<f32> = numbers(3 * 80, 9);
        let bytes = encode(Dtype::F32, &x);
        for (bits, steps) in [(Bits::Four, 15.0), (Bits::Eight, 254.0)] {
            let rounded = Rounded { matrix: Matrix::new(&bytes, Dtype::F32, 3, 80), bits };
            let mut row = GroupwiseRow::of(&rounded);
            for (output, x) in x.chunks(80).enumerate() {
                rounded.read(output, &mut row);
                for (i, x) in x.iter().enumerate() {
                    let (scale, zero) = (row.scales[i / GROUP], f32::from(row.zeros[i / GROUP]));
                    let error = (scale * (f32::from(row.integers[i]) - zero) - x).abs();
                    // The bound is half a step, or a whole one where 8 steps are on one side and 7 on the other; scales are rounded to
                    // bf16.
                    let most = scale.abs() * if bits == Bits::Four { 1.05 } else { 1.0 };
                    assert!(error <= most && scale.abs() <= 2.05 / steps, "{x}: {error} at {scale}");
                }
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_no_rows_are_no_trouble() {
        let cpu = Cpu::new(None, 2).unwrap();
        let w = GroupwiseWeights::new(&cpu, &DRAWN, None);
        assert!(product(DotUnit::of(cpu.isa()), &cpu, &[0.0; DRAWN.inputs], &w).iter().all(|y| *y == 0.0));
        assert!(product(DotUnit::of(cpu.isa()), &cpu, &[], &w).is_empty());
        let zeros = encode(Dtype::F32, &[0.0; 64]);
        let w = GroupwiseWeights::new(&cpu, &Rounded { matrix: Matrix::new(&zeros, Dtype::F32, 1, 64), bits: Bits::Four }, None);
        assert_eq!(product(DotUnit::of(cpu.isa()), &cpu, &numbers(64, 1), &w), [0.0]);
    }
}
