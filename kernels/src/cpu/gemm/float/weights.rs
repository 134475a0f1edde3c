//! Weights in the order in which a matrix product reads them, made once from the matrices of a file.
//!
//! Outputs go in panels of 32. Within a panel the weights of one input lie together, `[panel][input][32]`, or, of bf16, those of two,
//! `[panel][two inputs][32][2]`: so a panel is one stream through memory, and a vector of weights serves 16 outputs. Panels are
//! filled up with zeros, to whole blocks of 32 inputs where weights are bf16. bf16 weights that are denormal become zeros.

use crate::{
    cpu::{
        Cpu,
        element::with_element,
        gemm::panel::{PANEL, StoredLines},
        memory::Memory,
        simd::LANES,
        threads::disjoint::Disjoint,
    },
    dtype::Dtype,
    matrix::Matrix,
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

    /// For [`Output::SiluMul`](crate::cpu::gemm::float::Output::SiluMul): `gate` and `up` are of one shape.
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
        let panel_bytes = with_element!(dtype, E => E::panel_lines(inputs) * E::LINE_BYTES);
        let mut memory = cpu.memory(panels * panel_bytes);
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
            for (i, (row, _)) in (0..PANEL).filter_map(|i| Some((i, source(panel, i)?))) {
                with_element!(dtype, E => E::pack(row, i, to));
            }
        });
        let bias = (0..panels).map(|panel| std::array::from_fn(|i| source(panel, i).map_or(0.0, |(_, bias)| bias))).collect();
        Self { memory, dtype, inputs, outputs, bias, gated: parts.len() > 1 }
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
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

    #[inline(always)]
    pub(crate) fn bias(&self, panel: usize) -> &[f32; PANEL] {
        &self.bias[panel]
    }

    /// The outputs of panel `panel`.
    #[inline(always)]
    pub(crate) fn outputs_of(&self, panel: usize) -> Range<usize> {
        let width = if self.gated { LANES } else { PANEL };
        panel * width..((panel + 1) * width).min(self.outputs)
    }

    /// Some lines of panel `panel`.
    #[inline(always)]
    pub(crate) fn panel<E: StoredLines>(&self, panel: usize, lines: Range<usize>) -> &[E::Line] {
        &self.lines::<E>(panel..panel + 1)[lines]
    }

    /// All lines of some panels, one panel after the other.
    #[inline(always)]
    pub(crate) fn lines<E: StoredLines>(&self, panels: Range<usize>) -> &[E::Line] {
        let each = E::panel_lines(self.inputs);
        &E::lines(self.memory.as_slice())[panels.start * each..panels.end * each]
    }
}
