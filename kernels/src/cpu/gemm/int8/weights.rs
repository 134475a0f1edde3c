//! Quantized weights in the order in which the product reads them, made once from the matrices of a file.
//!
//! Outputs go in panels of 32. Within a panel the weights of four inputs lie together, `[panel][four inputs][32 outputs][input]`, so a
//! panel is one stream through memory, and a cache line of weights serves 16 outputs. It ends with zeros where inputs are not whole blocks
//! of 64, as AMX takes them.

use super::{INPUTS_MAX, quantize::quantize};
use crate::{
    cpu::{Cpu, memory::Memory, simd::LANES, threads::disjoint::Disjoint},
    dtype::decode,
    matrix::Matrix,
};
use std::ops::Range;

/// Four inputs of 16 outputs. Each weight has 128 added, so that it is not negative, as multiplication wants it.
pub(super) type Line = [[u8; 4]; LANES];

const LINE_BYTES: usize = size_of::<Line>();
/// Lines of the same inputs in a panel.
pub(super) const PANEL_LINES: usize = 2;
const PANEL: usize = PANEL_LINES * LANES;
/// Fours of inputs that AMX takes at once.
pub(super) const BLOCK_QUADS: usize = 16;
/// Makes a signed integer 128 larger, and unsigned.
const SIGN: i8 = i8::MIN;

/// One layer's quantized weights, and biases: `inputs` numbers to `outputs` numbers.
pub struct Int8Weights {
    memory: Memory<u8>,
    /// Of inputs, in a panel.
    quads: usize,
    inputs: usize,
    outputs: usize,
    /// Of each output of a panel; 0 for those that are not there.
    scales: Vec<[[f32; LANES]; PANEL_LINES]>,
    bias: Vec<[[f32; LANES]; PANEL_LINES]>,
    /// A panel's first line is of gates, its second of the numbers that they multiply, for 16 outputs.
    gated: bool,
}

impl Int8Weights {
    /// `weight` is `[outputs, inputs]`, of at most [`INPUTS_MAX`] inputs; `bias` is `[outputs]`, without it zeros.
    pub fn new(cpu: &Cpu, weight: Matrix<'_>, bias: Option<&[f32]>) -> Self {
        Self::pack(cpu, &[(weight, bias)])
    }

    /// For [`Int8Output::SiluMul`](super::Int8Output::SiluMul): `gate` and `up` are of one shape.
    pub fn gated(cpu: &Cpu, gate: (Matrix<'_>, Option<&[f32]>), up: (Matrix<'_>, Option<&[f32]>)) -> Self {
        let shape = |(m, _): &(Matrix<'_>, _)| (m.rows(), m.cols());
        assert_eq!(shape(&gate), shape(&up), "gate and up have one shape");
        Self::pack(cpu, &[gate, up])
    }

    /// Panels that take turns of `PANEL / parts.len()` outputs from each part.
    fn pack(cpu: &Cpu, parts: &[(Matrix<'_>, Option<&[f32]>)]) -> Self {
        let (outputs, inputs) = (parts[0].0.rows(), parts[0].0.cols());
        assert!(outputs > 0 && (1..=INPUTS_MAX).contains(&inputs), "weights for 1 to {INPUTS_MAX} inputs");
        assert!(parts.iter().all(|(_, bias)| bias.is_none_or(|bias| bias.len() == outputs)), "bias is [outputs]");
        let turn = PANEL / parts.len();
        let panels = outputs.div_ceil(turn);
        let quads = inputs.div_ceil(4).next_multiple_of(BLOCK_QUADS);
        let panel_bytes = quads * PANEL_LINES * LINE_BYTES;
        let mut memory = cpu.memory(panels * panel_bytes);
        let (mut scales, mut bias) = (vec![[[0.0; LANES]; PANEL_LINES]; panels], vec![[[0.0; LANES]; PANEL_LINES]; panels]);
        {
            let (bytes, scales, biases) = (Disjoint::new(memory.as_mut_slice()), Disjoint::new(&mut scales), Disjoint::new(&mut bias));
            cpu.for_each(panels, |panel| {
                // SAFETY: each task has the parts of one panel.
                let (bytes, scales, biases) = unsafe {
                    let bytes = bytes.part(panel * panel_bytes..(panel + 1) * panel_bytes);
                    (bytes, scales.part(panel..panel + 1), biases.part(panel..panel + 1))
                };
                let mut integers = vec![[0; 4]; inputs.div_ceil(4)];
                for i in 0..PANEL {
                    let (weight, bias) = parts[i / turn];
                    let output = panel * turn + i % turn;
                    if output >= outputs {
                        continue;
                    }
                    let row = decode(weight.dtype(), weight.row(output));
                    scales[0][i / LANES][i % LANES] = quantize(cpu.isa(), &row, &mut integers, 1).scale;
                    biases[0][i / LANES][i % LANES] = bias.map_or(0.0, |bias| bias[output]);
                    let places = bytes.as_chunks_mut::<4>().0.iter_mut().skip(i).step_by(PANEL);
                    for (place, quad) in places.zip(&integers) {
                        *place = quad.map(|q| (q ^ SIGN) as u8);
                    }
                }
            });
        }
        Self { memory, quads, inputs, outputs, scales, bias, gated: parts.len() > 1 }
    }

    #[inline(always)]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// What one pass over the weights reads, scales and biases aside.
    pub fn as_bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }

    #[inline(always)]
    pub(super) fn is_gated(&self) -> bool {
        self.gated
    }

    #[inline(always)]
    pub(super) fn panels(&self) -> usize {
        self.scales.len()
    }

    /// The lines of panel `panel`, for each four inputs.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> &[[Line; PANEL_LINES]] {
        let (weights, _) = self.memory.as_slice().as_chunks::<4>();
        &weights.as_chunks::<LANES>().0.as_chunks().0[panel * self.quads..(panel + 1) * self.quads]
    }

    /// The same of some panels, one panel after the other, as bytes.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    pub(super) fn lines(&self, panels: Range<usize>) -> &[[u8; PANEL_LINES * LINE_BYTES]] {
        &self.memory.as_slice().as_chunks().0[panels.start * self.quads..panels.end * self.quads]
    }

    #[inline(always)]
    pub(super) fn scales(&self, panel: usize) -> &[[f32; LANES]; PANEL_LINES] {
        &self.scales[panel]
    }

    #[inline(always)]
    pub(super) fn bias(&self, panel: usize) -> &[[f32; LANES]; PANEL_LINES] {
        &self.bias[panel]
    }

    /// The outputs that begin at lane 0 of a line; with gates, both lines are of the same.
    #[inline(always)]
    pub(super) fn outputs_of(&self, panel: usize, line: usize) -> Range<usize> {
        let group = if self.gated { panel } else { panel * PANEL_LINES + line };
        (group * LANES).min(self.outputs)..((group + 1) * LANES).min(self.outputs)
    }
}
