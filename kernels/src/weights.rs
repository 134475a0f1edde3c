//! Weights in the order in which a matrix product reads them, made once from the matrices of a file.
//!
//! Outputs go in panels of 32. Within a panel the weights of one input lie together, `[panel][input][32]`, so a panel is one
//! stream through memory, and a vector of weights serves 16 outputs. Panels are filled up with zeros.

use crate::{
    cpu::Cpu,
    disjoint::Disjoint,
    dtype::{Dtype, Element, with_element},
    matrix::Matrix,
    memory::Memory,
    simd::LANES,
    tile::PANEL,
};
use std::ops::Range;

/// One layer's weights and biases: `inputs` numbers to `outputs` numbers.
pub struct Weights {
    memory: Memory<u8>,
    dtype: Dtype,
    inputs: usize,
    outputs: usize,
    /// For each panel.
    bias: Vec<[f32; PANEL]>,
    /// Panels hold 16 gates and the 16 numbers that they multiply, for 16 outputs.
    gated: bool,
}

impl Weights {
    /// `weight` is `[outputs, inputs]`, `bias` is `[outputs]`; without it, zeros.
    pub fn new(cpu: &Cpu, weight: Matrix<'_>, bias: Option<&[f32]>) -> Self {
        Self::pack(cpu, &[(weight, bias)])
    }

    /// For [`Output::SiluMul`](crate::matmul::Output::SiluMul): `gate` and `up` are of one shape.
    pub fn gated(cpu: &Cpu, gate: (Matrix<'_>, Option<&[f32]>), up: (Matrix<'_>, Option<&[f32]>)) -> Self {
        let shape = |(m, _): &(Matrix<'_>, _)| (m.rows(), m.cols(), m.dtype());
        assert_eq!(shape(&gate), shape(&up), "gate and up have one shape");
        Self::pack(cpu, &[gate, up])
    }

    /// Panels that take turns of `PANEL / parts.len()` outputs from each part.
    fn pack(cpu: &Cpu, parts: &[(Matrix<'_>, Option<&[f32]>)]) -> Self {
        let first = parts[0].0;
        let (outputs, inputs, dtype) = (first.rows(), first.cols(), first.dtype());
        assert!(outputs > 0 && inputs > 0, "empty weights");
        assert!(parts.iter().all(|(_, bias)| bias.is_none_or(|bias| bias.len() == outputs)), "bias is [outputs]");
        let turn = PANEL / parts.len();
        let panels = outputs.div_ceil(turn);
        let panel_bytes = inputs * PANEL * dtype.bytes();
        let mut memory = Memory::new(panels * panel_bytes);
        let bytes = Disjoint::new(memory.as_mut_slice());
        // Where number `i` of a panel comes from.
        let source = |panel: usize, i: usize| {
            let (weight, bias) = parts[i / turn];
            let output = panel * turn + i % turn;
            (output < outputs).then(|| (weight.row(output), bias.map_or(0.0, |bias| bias[output])))
        };
        cpu.for_each(panels, |panel| {
            // SAFETY: panels do not overlap.
            let to = unsafe { bytes.part(panel * panel_bytes..(panel + 1) * panel_bytes) };
            let rows = (0..PANEL).map(|i| source(panel, i).map(|(row, _)| row));
            with_element!(dtype, E => fill_panel::<E>(to, rows));
        });
        let bias = (0..panels).map(|panel| std::array::from_fn(|i| source(panel, i).map_or(0.0, |(_, bias)| bias))).collect();
        Self { memory, dtype, inputs, outputs, bias, gated: parts.len() > 1 }
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// What one pass over the weights reads.
    pub fn as_bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn is_gated(&self) -> bool {
        self.gated
    }

    pub(crate) fn panels(&self) -> usize {
        self.bias.len()
    }

    pub(crate) fn bias(&self, panel: usize) -> &[f32; PANEL] {
        &self.bias[panel]
    }

    /// The outputs of panel `panel`.
    pub(crate) fn outputs_of(&self, panel: usize) -> Range<usize> {
        let width = if self.gated { LANES } else { PANEL };
        panel * width..((panel + 1) * width).min(self.outputs)
    }

    /// The weights of panel `panel` for some inputs.
    #[inline(always)]
    pub(crate) fn panel<E: Element>(&self, panel: usize, inputs: Range<usize>) -> &[E::Pair] {
        &E::pairs(self.memory.as_slice())[panel * self.inputs..][inputs]
    }
}

/// Interleaves the rows of 32 outputs; a missing one stays zero.
fn fill_panel<'a, E: Element>(panel: &mut [u8], rows: impl Iterator<Item = Option<&'a [u8]>>) {
    for (i, row) in rows.enumerate() {
        let place = E::place_in_pair(i) * E::BYTES;
        let Some(row) = row else { continue };
        for (pair, number) in panel.chunks_exact_mut(PANEL * E::BYTES).zip(row.chunks_exact(E::BYTES)) {
            pair[place..place + E::BYTES].copy_from_slice(number);
        }
    }
}
