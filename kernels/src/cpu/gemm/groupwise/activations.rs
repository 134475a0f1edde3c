//! Activations, rounded to 8 bits in groups of 32.

use super::{GROUP, GROUP_QUADS};
use crate::{
    cpu::{
        Cpu,
        gemm::{
            epilogue::Exact,
            float::activations::FloatActivations,
            int8::quantize::{ROUND, Source, scale_and_inverse},
            sources::{Norms, Rows, Sources},
            tiling::Tiling,
        },
        memory::Memory,
        simd::{Kernel, LANES, Simd},
        threads::disjoint::Disjoint,
    },
    dtype::Dtype,
};

/// Rounded rows `[rows, cols]`, one after the other, padded with zeros to whole groups. The memory is reused.
#[derive(Default)]
pub struct GroupwiseActivations {
    rows: usize,
    cols: usize,
    quads: Memory<GroupQuads>,
    groups: Vec<Group>,
    /// The numbers before they are rounded.
    pub(super) exact: Vec<f32>,
}

impl Exact for GroupwiseActivations {
    fn exact(&mut self) -> &mut Vec<f32> {
        &mut self.exact
    }
}

/// The integers of a group.
pub(super) type GroupQuads = [[i8; 4]; GROUP_QUADS];

/// A group's scale and sum.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct Group {
    /// The factor of the integers; 0 if all numbers are negligible (below 1e-30).
    pub(super) scale: f32,
    /// Sum of the integers.
    pub(super) sum: i32,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Row<'a> {
    pub(super) quads: &'a [GroupQuads],
    pub(super) groups: &'a [Group],
}

impl GroupwiseActivations {
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rounds `x`, `[rows, cols]`.
    pub fn copy_from(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows of {cols}");
        self.fill(cpu, x.len() / cols, cols, Rows { x, cols });
    }

    /// Rounds the rows of `x`, which must not be rounded to bf16.
    pub fn copy_from_tiles(&mut self, cpu: &Cpu, x: &FloatActivations) {
        assert!(x.are_for(Dtype::F32), "rows are rounded once");
        self.fill(cpu, x.rows(), x.cols(), x);
    }

    /// Rounds `weight * x / sqrt(mean(x²) + epsilon)` for every row of `weight.len()` numbers.
    pub fn rms_norm_from(&mut self, cpu: &Cpu, x: &[f32], weight: &[f32], epsilon: f32) {
        assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "whole rows of {}", weight.len());
        self.fill(cpu, x.len() / weight.len(), weight.len(), Norms { x, weight, epsilon });
    }

    /// Rounds the numbers in `exact`.
    pub(super) fn copy_from_exact(&mut self, cpu: &Cpu, cols: usize) {
        let exact = std::mem::take(&mut self.exact);
        self.copy_from(cpu, &exact, cols);
        self.exact = exact;
    }

    fn fill(&mut self, cpu: &Cpu, rows: usize, cols: usize, sources: impl Sources) {
        (self.rows, self.cols) = (rows, cols);
        let groups = cols.div_ceil(GROUP);
        if self.quads.as_slice().len() < rows * groups {
            self.quads = Memory::new(rows * groups);
        }
        self.groups.resize(rows * groups, Group::default());
        let (quads, to) = (Disjoint::new(self.quads.as_mut_slice()), Disjoint::new(&mut self.groups));
        let per_task = cpu.rows_per_task(cols).min(rows.max(1));
        cpu.for_each(rows.div_ceil(per_task), |task| {
            for row in task * per_task..((task + 1) * per_task).min(rows) {
                let range = row * groups..(row + 1) * groups;
                // SAFETY: rows do not overlap.
                let (quads, groups) = unsafe { (quads.part(range.clone()), to.part(range)) };
                cpu.isa().dispatch(FillRow { sources, row, quads, groups });
            }
        });
    }

    #[inline(always)]
    pub(super) fn tiling(&self, tile_rows_max: usize) -> Tiling {
        Tiling::new(self.rows, self.cols, tile_rows_max)
    }

    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> Row<'_> {
        let groups = self.cols.div_ceil(GROUP);
        let range = row * groups..(row + 1) * groups;
        Row { quads: &self.quads.as_slice()[range.clone()], groups: &self.groups[range] }
    }
}

struct FillRow<'a, F> {
    sources: F,
    row: usize,
    quads: &'a mut [GroupQuads],
    groups: &'a mut [Group],
}

impl<F: Sources> Kernel for FillRow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let source = self.sources.row(simd, self.row);
        for (index, (quads, group)) in self.quads.iter_mut().zip(self.groups).enumerate() {
            *group = round_group(simd, source, index, quads);
        }
    }
}

/// Vectors of a group.
const VECTORS: usize = GROUP / LANES;

#[inline(always)]
fn round_group<S: Simd>(simd: S, row: impl Source, index: usize, quads: &mut GroupQuads) -> Group {
    let (mut x, mut largest) = ([simd.zero(); VECTORS], simd.zero());
    for (i, x) in x.iter_mut().enumerate() {
        let vector = VECTORS * index + i;
        if vector * LANES < row.len() {
            *x = row.vector(simd, vector);
        }
        largest = simd.max(simd.max(*x, simd.sub(simd.zero(), *x)), largest);
    }
    let (scale, inverse) = scale_and_inverse::<{ i8::MAX as i16 }>(simd.max_lane(largest));
    let mut sums = simd.zero();
    for (i, x) in x.into_iter().enumerate() {
        let rounded = simd.fma(x, simd.splat(inverse), simd.splat(ROUND));
        sums = simd.add(sums, simd.sub(rounded, simd.splat(ROUND)));
        let integers = simd.to_array(rounded).map(|x| x.to_bits() as i8);
        quads[i * LANES / 4..][..LANES / 4].copy_from_slice(integers.as_chunks().0);
    }
    Group { scale, sum: simd.sum(sums) as i32 }
}
