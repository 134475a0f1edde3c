//! Activations, quantized and packed in the order in which the product reads them.

use super::{
    quantize::{Quantized, Source, quantize_on},
    weights::BLOCK_QUADS,
};
use crate::{
    cpu::{
        Cpu,
        gemm::{
            dot::DotUnit,
            epilogue::Exact,
            float::activations::{BLOCK_ROWS, FloatActivations},
            sources::{Norms, Rows, Sources},
            tiling::Tiling,
        },
        memory::Memory,
        simd::{Kernel, LANES, Simd},
        threads::disjoint::Disjoint,
    },
    dtype::Dtype,
};
use std::{cell::RefCell, ops::Range};

/// Quantized rows `[rows, cols]`, whose memory is reused.
///
/// Rows form tiles, as in [`FloatActivations`]. A tile keeps the same four columns of its rows together, `[tile][four columns][row of the
/// tile][column]`. For AMX, rows are stored one after the other, padded with zeros to whole blocks of 64.
#[derive(Default)]
pub struct Int8Activations {
    unit: DotUnit,
    cols: usize,
    /// The tiling, in groups of four columns.
    tiling: Tiling,
    quads: Memory<[i8; 4]>,
    quantized: Vec<Quantized>,
    /// The numbers before they are quantized.
    pub(super) exact: Vec<f32>,
}

impl Exact for Int8Activations {
    fn exact(&mut self) -> &mut Vec<f32> {
        &mut self.exact
    }
}

impl Int8Activations {
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.tiling.rows
    }

    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Quantizes `x`, `[rows, cols]`.
    pub fn copy_from(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        self.copy_for(DotUnit::of(cpu.isa()), cpu, x, cols);
    }

    /// Packs for any available unit, regardless of the instruction set of `cpu`.
    pub(super) fn copy_for(&mut self, unit: DotUnit, cpu: &Cpu, x: &[f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows of {cols}");
        self.fill(unit, cpu, x.len() / cols, cols, Rows { x, cols });
    }

    /// Quantizes the rows of `x`, which must not be rounded to bf16.
    pub fn copy_from_tiles(&mut self, cpu: &Cpu, x: &FloatActivations) {
        assert!(x.are_for(Dtype::F32), "rows are rounded once");
        self.fill(DotUnit::of(cpu.isa()), cpu, x.rows(), x.cols(), x);
    }

    /// Quantizes `weight * x / sqrt(mean(x²) + epsilon)` for every row of `weight.len()` numbers.
    pub fn rms_norm_from(&mut self, cpu: &Cpu, x: &[f32], weight: &[f32], epsilon: f32) {
        assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "whole rows of {}", weight.len());
        self.fill(DotUnit::of(cpu.isa()), cpu, x.len() / weight.len(), weight.len(), Norms { x, weight, epsilon });
    }

    /// Quantizes the numbers in `exact`.
    pub(super) fn copy_from_exact(&mut self, cpu: &Cpu, cols: usize) {
        let exact = std::mem::take(&mut self.exact);
        self.copy_from(cpu, &exact, cols);
        self.exact = exact;
    }

    fn fill(&mut self, unit: DotUnit, cpu: &Cpu, rows: usize, cols: usize, sources: impl Sources) {
        let (quads, more_rows) = match unit {
            // Every row begins a whole tile that can be loaded.
            DotUnit::Amx | DotUnit::EmulatedAmx => (cols.div_ceil(4).next_multiple_of(BLOCK_QUADS), BLOCK_ROWS - 1),
            _ => (cols.div_ceil(4), 0),
        };
        let tiling = Tiling::new(rows, quads, unit.tile_rows());
        (self.unit, self.cols, self.tiling) = (unit, cols, tiling);
        let room = (rows + more_rows) * quads;
        if self.quads.as_slice().len() < room {
            self.quads = Memory::new(room);
        }
        self.quantized.resize(rows, Quantized::default());
        let (quads, quantized) = (Disjoint::new(self.quads.as_mut_slice()), Disjoint::new(&mut self.quantized));
        let per_task = cpu.rows_per_task(cols).div_ceil(unit.tile_rows()).min(tiling.tiles.max(1));
        cpu.for_each(tiling.tiles.div_ceil(per_task), |task| {
            for index in task * per_task..((task + 1) * per_task).min(tiling.tiles) {
                let rows = tiling.tile(index);
                // SAFETY: tiles do not overlap.
                let (quads, quantized) = unsafe { (quads.part(tiling.numbers(&rows)), quantized.part(rows.clone())) };
                TRANSFORMED.with_borrow_mut(|transformed| {
                    transformed.resize(cols.div_ceil(LANES), [0.0; LANES]);
                    cpu.isa().dispatch(FillTile { sources, rows, transformed, quads, quantized });
                });
            }
        });
    }

    /// The unit that rows are packed for.
    #[inline(always)]
    pub(super) fn unit(&self) -> DotUnit {
        self.unit
    }

    #[inline(always)]
    pub(super) fn tiling(&self) -> &Tiling {
        &self.tiling
    }

    /// The tile of `rows`.
    #[inline(always)]
    pub(super) fn quads(&self, rows: &Range<usize>) -> &[[i8; 4]] {
        &self.quads.as_slice()[self.tiling.numbers(rows)]
    }

    /// The quads from row `row` on, if rows are stored one after the other. Padding follows the last row.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    pub(super) fn quads_from(&self, row: usize) -> &[[i8; 4]] {
        assert!(self.unit.has_tiles());
        &self.quads.as_slice()[row * self.tiling.cols..]
    }

    #[inline(always)]
    pub(super) fn quantized(&self, row: usize) -> Quantized {
        self.quantized[row]
    }
}

thread_local! {
    /// A row before it is rounded, kept from task to task.
    static TRANSFORMED: RefCell<Vec<[f32; LANES]>> = const { RefCell::new(Vec::new()) };
}

struct FillTile<'a, F> {
    sources: F,
    rows: Range<usize>,
    transformed: &'a mut [[f32; LANES]],
    quads: &'a mut [[i8; 4]],
    quantized: &'a mut [Quantized],
}

impl<F: Sources> Kernel for FillTile<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (i, row) in self.rows.clone().enumerate() {
            let source = self.sources.row(simd, row);
            // Only a tile of one row has more room than that.
            let after = source.len().div_ceil(4) * self.rows.len();
            self.quads[after..].fill([0; 4]);
            self.quantized[i] = quantize_on(simd, source, self.transformed, &mut self.quads[i..], self.rows.len());
        }
    }
}
