//! Gated short convolutions (LFM2), with three projections of the normed input: one gates another before a causal convolution of each
//! channel, the third gates its output. The state is the last inputs of the convolution.

use super::{
    band::Band,
    conv_inputs::ConvInputs,
    projection::{Arithmetic, Projection},
    states::{Piece, Pieces, States},
};
use crate::{error::ModelError, tensors::ConvTensors};
use std::ops::Range;
use tidemill_kernels::{Cpu, cpu::convolution::convolve_row};

pub(crate) struct ShortConv {
    /// The projections to the convolution's gate, its output's gate and its input.
    pub(super) projections: [Projection; 3],
    /// `[taps, channels]`, the oldest input's tap first.
    taps: Vec<f32>,
    bias: Option<Vec<f32>>,
    channels: usize,
}

impl ShortConv {
    pub(super) fn pack(tensors: &ConvTensors, channels: usize, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let ConvTensors { projections: [gate, after, input], taps, bias } = tensors;
        let projections = [gate.pack(cpu, arithmetic)?, after.pack(cpu, arithmetic)?, input.pack(cpu, arithmetic)?];
        Ok(Self { projections, taps: taps.clone(), bias: bias.clone(), channels })
    }

    pub(super) fn channels(&self) -> usize {
        self.channels
    }

    pub(super) fn bytes(&self) -> usize {
        self.projections.iter().map(Projection::bytes).sum()
    }

    /// Computes the convolution's outputs into each band's `v`, from its inputs in `k` and the part `of` each chunk's state, which is
    /// advanced to the end of the chunk: the last inputs, the oldest first.
    pub(super) fn advance(&self, cpu: &Cpu, bands: &mut [Band<'_>], pieces: &Pieces, states: &mut States, of: &Range<usize>) {
        let width = self.channels;
        let mut outputs: Vec<(usize, Vec<f32>)> = bands.iter_mut().map(|band| std::mem::take(&mut band.v)).enumerate().collect();
        let inputs = ConvInputs { bands, pieces, states, of: of.clone(), width };
        let taps = self.taps.len() / width;
        cpu.for_each_mut(&mut outputs, |(band, outputs)| {
            outputs.resize(inputs.bands[*band].k.len(), 0.0);
            let mut of_row: Vec<&[f32]> = Vec::with_capacity(taps);
            for Piece { chunk, first, start, rows, .. } in pieces.of_band(*band) {
                for row in 0..*rows {
                    of_row.clear();
                    of_row.extend((0..taps).map(|tap| inputs.get(*chunk, start + row + tap)));
                    let to = (first + row) * width;
                    convolve_row(cpu, &of_row, &self.taps, self.bias.as_deref(), None, &mut outputs[to..to + width]);
                }
            }
        });
        for (chunk, last) in inputs.last().iter().enumerate() {
            states.get_mut(chunk, of).copy_from_slice(last);
        }
        for (band, outputs) in outputs {
            bands[band].v = outputs;
        }
    }
}
