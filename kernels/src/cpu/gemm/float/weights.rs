//! Float weights, packed once from the matrices of a file.
//!
//! Outputs go in panels of 32. A panel keeps the weights of one input together, `[panel][input][32]`, or of two inputs
//! for bf16, `[panel][two inputs][32][2]`: a panel is one stream through memory, and a vector of weights serves 16
//! outputs. Zeros fill up the last panel, and bf16 panels to whole blocks of 32 inputs. Denormal bf16 weights become
//! zeros.

use crate::{
    cpu::{
        Cpu,
        element::with_element,
        gemm::{
            packing::{Columns, Linear},
            panel::{PANEL, WeightFormat},
        },
        memory::Memory,
        threads::disjoint::Disjoint,
    },
    dtype::Dtype,
    matrix::Matrix,
};
use std::ops::Range;

/// One layer's packed weights and biases.
pub struct FloatWeights {
    memory: Memory<u8>,
    dtype: Dtype,
    columns: Columns,
    /// `[panel]`
    bias: Vec<[f32; PANEL]>,
}

impl FloatWeights {
    /// Packs `weight`, `[outputs, inputs]`, and `bias`, `[outputs]`, or zeros without it.
    pub fn new(cpu: &Cpu, weight: Matrix<'_>, bias: Option<&[f32]>) -> Self {
        Self::pack(cpu, &[(weight, bias)])
    }

    /// Packs gated weights for [`Output::Activated`](crate::cpu::gemm::Output::Activated): `gate` and `up` have one shape and one type.
    pub fn gated(cpu: &Cpu, gate: (Matrix<'_>, Option<&[f32]>), up: (Matrix<'_>, Option<&[f32]>)) -> Self {
        assert_eq!(gate.0.dtype(), up.0.dtype(), "gate and up have one type");
        Self::pack(cpu, &[gate, up])
    }

    fn pack(cpu: &Cpu, layers: &[Linear<'_>]) -> Self {
        let (columns, dtype) = (Columns::of(layers), layers[0].0.dtype());
        let panel_bytes = with_element!(dtype, E => E::panel_lines(columns.inputs) * E::LINE_BYTES);
        let mut memory = cpu.memory(columns.panels() * panel_bytes);
        let bytes = Disjoint::new(memory.as_mut_slice());
        cpu.for_each(columns.panels(), |panel| {
            // SAFETY: panels do not overlap.
            let to = unsafe { bytes.part(panel * panel_bytes..(panel + 1) * panel_bytes) };
            for column in 0..PANEL {
                if let Some((layer, output)) = columns.source(panel, column) {
                    with_element!(dtype, E => E::pack(layers[layer].0.row(output), column, to));
                }
            }
        });
        Self { memory, dtype, columns, bias: columns.biases(layers) }
    }

    pub fn inputs(&self) -> usize {
        self.columns.inputs
    }

    #[inline(always)]
    pub fn outputs(&self) -> usize {
        self.columns.outputs
    }

    /// The bytes that one pass over the weights reads.
    pub fn as_bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    #[inline(always)]
    pub(crate) fn columns(&self) -> &Columns {
        &self.columns
    }

    pub(crate) fn panels(&self) -> usize {
        self.bias.len()
    }

    #[inline(always)]
    pub(crate) fn bias(&self, panel: usize) -> &[f32; PANEL] {
        &self.bias[panel]
    }

    /// Some lines of panel `panel`.
    #[inline(always)]
    pub(crate) fn panel<E: WeightFormat>(&self, panel: usize, lines: Range<usize>) -> &[E::Line] {
        &self.lines::<E>(panel..panel + 1)[lines]
    }

    /// All lines of some panels, one panel after the other.
    #[inline(always)]
    pub(crate) fn lines<E: WeightFormat>(&self, panels: Range<usize>) -> &[E::Line] {
        let each = E::panel_lines(self.columns.inputs);
        &E::lines(self.memory.as_slice())[panels.start * each..panels.end * each]
    }
}
