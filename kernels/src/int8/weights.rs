//! Quantized weights in the order in which the product reads them, made once from a matrix of a file.

use super::{INPUTS_MAX, quantize::quantize};
use crate::{cpu::Cpu, disjoint::Disjoint, dtype::decode, matmul::Matrix, simd::LANES};
use std::ops::Range;

/// Four inputs of 16 outputs, `[output][input]`, each weight plus 128: a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line(pub(super) [u8; LINE_BYTES]);

pub(super) const LINE_BYTES: usize = 4 * LANES;
/// Lines of 32 outputs: two registers of sums for each row.
pub(super) const PANEL_LINES: usize = 2;
/// A weight of 0.
const ZERO: u8 = 128;

/// Weights `[outputs, inputs]` in panels of 32 outputs (the last one of 16, if that is enough), `[panel][four inputs][16 outputs][…]`:
/// a panel is one stream through memory.
pub struct Int8Weights {
    lines: Vec<Line>,
    /// For each line of a panel. Outputs that do not exist have 0.
    scales: Vec<[f32; LANES]>,
    inputs: usize,
    outputs: usize,
}

/// One panel's weights.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) all: &'a [Line],
    /// How many of them belong to the same four inputs.
    pub(super) per_input: usize,
}

impl<'a> Panel<'a> {
    /// Where the share `index` of `count` of the next panel begins, and how many bytes to go on with each four inputs.
    #[inline(always)]
    pub(super) fn next(&self, index: usize, count: usize) -> (*const Line, usize) {
        let stride = (self.per_input * LINE_BYTES).div_ceil(count);
        let inputs = self.all.len() / self.per_input;
        (self.all.as_ptr_range().end.wrapping_byte_add(index * inputs * stride), stride)
    }
}

impl Int8Weights {
    /// Quantizes `w`, `[outputs, inputs]`, of at most [`INPUTS_MAX`] inputs.
    pub fn quantize(cpu: &Cpu, w: Matrix<'_>) -> Self {
        let (outputs, inputs) = (w.rows(), w.cols());
        assert!(outputs > 0 && (1..=INPUTS_MAX).contains(&inputs), "weights for 1 to {INPUTS_MAX} inputs");
        let groups = outputs.div_ceil(LANES);
        let mut lines = vec![Line([ZERO; LINE_BYTES]); groups * inputs.div_ceil(4)];
        let mut scales = vec![[0.0; LANES]; groups];
        let weights = Self { lines: Vec::new(), scales: Vec::new(), inputs, outputs };
        {
            let (lines, scales) = (Disjoint::new(&mut lines), Disjoint::new(&mut scales));
            cpu.for_each(weights.panels_of(groups), |panel| {
                let range = weights.lines_of(groups, panel);
                // SAFETY: panels do not overlap.
                let (lines, scales) = unsafe { (lines.part(weights.range(groups, panel)), scales.part(range.clone())) };
                for output in range.start * LANES..(range.end * LANES).min(outputs) {
                    let (line, lane) = (output / LANES - range.start, output % LANES);
                    let row = decode(w.dtype(), w.row(output));
                    scales[line][lane] = quantize(cpu.isa(), &row, |quad, q| {
                        let to = &mut lines[quad * range.len() + line].0[4 * lane..4 * lane + 4];
                        to.copy_from_slice(&q.map(|q| q.wrapping_add(ZERO as i8) as u8));
                    });
                }
            });
        }
        Self { lines, scales, ..weights }
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Bytes that one pass over the weights reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.lines[..]) + size_of_val(&self.scales[..])
    }

    pub(super) fn panels(&self) -> usize {
        self.panels_of(self.scales.len())
    }

    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> Panel<'_> {
        let groups = self.scales.len();
        Panel { all: &self.lines[self.range(groups, panel)], per_input: self.lines_of(groups, panel).len() }
    }

    #[inline(always)]
    pub(super) fn scales(&self, panel: usize, line: usize) -> &[f32; LANES] {
        &self.scales[panel * PANEL_LINES + line]
    }

    /// Which outputs a line of a panel has.
    #[inline(always)]
    pub(super) fn outputs_of(&self, panel: usize, line: usize) -> Range<usize> {
        let start = (panel * PANEL_LINES + line) * LANES;
        start..(start + LANES).min(self.outputs)
    }

    fn panels_of(&self, groups: usize) -> usize {
        groups.div_ceil(PANEL_LINES)
    }

    /// Which groups of 16 outputs a panel has.
    #[inline(always)]
    fn lines_of(&self, groups: usize, panel: usize) -> Range<usize> {
        panel * PANEL_LINES..((panel + 1) * PANEL_LINES).min(groups)
    }

    /// Where a panel's lines are.
    #[inline(always)]
    fn range(&self, groups: usize, panel: usize) -> Range<usize> {
        let lines = self.lines_of(groups, panel);
        let quads = self.inputs.div_ceil(4);
        lines.start * quads..lines.end * quads
    }
}
