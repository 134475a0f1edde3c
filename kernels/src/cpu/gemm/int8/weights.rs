//! 8-bit weights, quantized and packed once from the matrices of a file.
//!
//! Outputs go in panels of 32. A panel keeps the weights of four inputs together, `[panel][four inputs][32 outputs][input]`: a panel is one
//! stream through memory, and a cache line of weights serves 16 outputs. Each weight is stored plus 128, without a sign. Inputs are padded
//! with zeros to whole blocks of 64, as AMX takes them.

use super::{INPUTS_MAX, quantize::quantize};
use crate::{
    cpu::{
        Cpu,
        gemm::{
            dot::Line,
            packing::{Columns, Linear},
            panel::{PANEL, PANEL_LINES},
        },
        hadamard::block_of,
        memory::Memory,
        simd::LANES,
        threads::disjoint::Disjoint,
    },
    dtype::decode,
    matrix::Matrix,
};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::ops::Range;

const LINE_BYTES: usize = size_of::<Line>();
/// Groups of four inputs that AMX takes at once.
pub(super) const BLOCK_QUADS: usize = 16;
/// The bit of a signed integer that, when flipped, adds 128.
const SIGN: i8 = i8::MIN;

/// One layer's quantized and packed weights, and its biases.
pub struct Int8Weights {
    memory: Memory<u8>,
    columns: Columns,
    /// Groups of four inputs in a panel.
    quads: usize,
    /// `[panel]`; zeros beyond the last output.
    scales: Vec<[f32; PANEL]>,
    bias: Vec<[f32; PANEL]>,
}

impl Int8Weights {
    /// Packs `weight`, `[outputs, inputs]`, of at most [`INPUTS_MAX`] inputs, and `bias`, `[outputs]`, or zeros without it.
    pub fn new(cpu: &Cpu, weight: Matrix<'_>, bias: Option<&[f32]>) -> Self {
        Self::pack(cpu, &[(weight, bias)])
    }

    /// Packs gated weights for [`Output::Activated`](crate::cpu::gemm::Output::Activated): `gate` and `up` have one shape.
    pub fn gated(cpu: &Cpu, gate: (Matrix<'_>, Option<&[f32]>), up: (Matrix<'_>, Option<&[f32]>)) -> Self {
        Self::pack(cpu, &[gate, up])
    }

    fn pack(cpu: &Cpu, layers: &[Linear<'_>]) -> Self {
        let columns = Columns::of(layers);
        let (inputs, panels) = (columns.inputs, columns.panels());
        assert!(inputs <= INPUTS_MAX, "weights for 1 to {INPUTS_MAX} inputs");
        let quads = inputs.div_ceil(4).next_multiple_of(BLOCK_QUADS);
        let panel_bytes = quads * PANEL_LINES * LINE_BYTES;
        let mut memory = cpu.memory(panels * panel_bytes);
        let mut scales = vec![[0.0; PANEL]; panels];
        {
            let (bytes, scales) = (Disjoint::new(memory.as_mut_slice()), Disjoint::new(&mut scales));
            cpu.for_each(panels, |panel| {
                // SAFETY: each task has one panel's parts.
                let (bytes, scales) =
                    unsafe { (bytes.part(panel * panel_bytes..(panel + 1) * panel_bytes), scales.part(panel..panel + 1)) };
                let mut integers = vec![[0; 4]; inputs.div_ceil(4)];
                for (column, scale) in scales[0].iter_mut().enumerate() {
                    let Some((layer, output)) = columns.source(panel, column) else { continue };
                    let weight = layers[layer].0;
                    let row = decode(weight.dtype(), weight.row(output));
                    *scale = quantize(cpu.isa(), &row, &mut integers, 1).scale / block_of(inputs) as f32;
                    let places = bytes.as_chunks_mut::<4>().0.iter_mut().skip(column).step_by(PANEL);
                    for (place, quad) in places.zip(&integers) {
                        *place = quad.map(|q| (q ^ SIGN) as u8);
                    }
                }
            });
        }
        Self { memory, columns, quads, scales, bias: columns.biases(layers) }
    }

    #[inline(always)]
    pub fn inputs(&self) -> usize {
        self.columns.inputs
    }

    #[inline(always)]
    pub fn outputs(&self) -> usize {
        self.columns.outputs
    }

    /// The bytes that one pass over the weights reads, scales and biases aside.
    pub fn as_bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }

    #[inline(always)]
    pub(super) fn columns(&self) -> &Columns {
        &self.columns
    }

    #[inline(always)]
    pub(super) fn panels(&self) -> usize {
        self.scales.len()
    }

    /// The lines of panel `panel`, per group of four inputs.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> &[[Line; PANEL_LINES]] {
        let (weights, _) = self.memory.as_slice().as_chunks::<4>();
        &weights.as_chunks::<LANES>().0.as_chunks().0[panel * self.quads..(panel + 1) * self.quads]
    }

    /// The lines of some panels, one panel after the other, as bytes.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[inline(always)]
    pub(super) fn lines(&self, panels: Range<usize>) -> &[[u8; PANEL_LINES * LINE_BYTES]] {
        &self.memory.as_slice().as_chunks().0[panels.start * self.quads..panels.end * self.quads]
    }

    #[inline(always)]
    pub(super) fn scales(&self, panel: usize) -> &[f32; PANEL] {
        &self.scales[panel]
    }

    #[inline(always)]
    pub(super) fn bias(&self, panel: usize) -> &[f32; PANEL] {
        &self.bias[panel]
    }
}
