//! Linear attention by a gated delta rule (Qwen3-Next, Qwen3.5). The queries, keys and values of all heads, made from the normed input, go
//! through a causal convolution of each channel and then, row by row, through a matrix for each value head (`tidemill_kernels`'
//! `delta_rule` states the order). The results are normed by head and gated. The state is the last inputs of the convolution, and the
//! matrices.
//!
//! Rates and decays affect all later rows, so the products that they are made from are in f32 regardless of the model's arithmetic.

use super::{
    band::Band,
    conv_inputs::ConvInputs,
    projection::{Arithmetic, Projection},
    states::{Piece, Pieces, States},
};
use crate::{
    error::ModelError,
    norm::Norm,
    tensors::{DeltaTensors, Linear},
};
use std::ops::Range;
use tidemill_kernels::{
    Cpu,
    cpu::{
        delta_rule::{self, DeltaChunk, DeltaHeads, DeltaRows},
        elementwise::{self, Gate},
        vocab::exp_shifted,
    },
};

pub(crate) struct DeltaRule {
    pub(super) heads: DeltaHeads,
    /// The projection to the convolution's inputs.
    pub(super) mixed: Projection,
    /// The projection to the gates of the outputs.
    pub(super) gates: Projection,
    /// The projection to the inputs of rates and decays, `[2, value heads]`; in f32.
    pub(super) rates: Projection,
    /// `[taps, channels]`, the oldest input's tap first.
    taps: Vec<f32>,
    /// The factor of each value head: the logarithm of a decay is the factor times `softplus(x + bias)`.
    factors: Vec<f32>,
    biases: Vec<f32>,
    norm: Norm,
}

impl DeltaRule {
    pub(super) fn pack(tensors: &DeltaTensors, heads: DeltaHeads, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let DeltaTensors { projections: [mixed, gates], rates, taps, speeds, biases, norm } = tensors;
        let mut factors = vec![0.0; speeds.len()];
        exp_shifted(speeds, 0.0, 1.0, &mut factors);
        factors.iter_mut().for_each(|speed| *speed = -*speed);
        Ok(Self {
            heads,
            mixed: mixed.pack(cpu, arithmetic)?,
            gates: gates.pack(cpu, arithmetic)?,
            rates: Linear::pack_together(rates, cpu)?,
            taps: taps.clone(),
            factors,
            biases: biases.clone(),
            norm: norm.clone(),
        })
    }

    /// Bytes that one pass over the weights reads.
    pub(super) fn bytes(&self) -> usize {
        self.mixed.bytes() + self.gates.bytes() + self.rates.bytes()
    }

    /// Computes each row's output into its band's `v`, from the convolution's inputs in `k`, the inputs of rates and decays in `gates`, and
    /// the part `of` each chunk's state, which is advanced to the end of the chunk.
    pub(super) fn advance(&self, cpu: &Cpu, bands: &mut [Band<'_>], pieces: &Pieces, states: &mut States, of: &Range<usize>) {
        let [inputs, matrices] = self.parts(of);
        let last = self.mix(cpu, bands, pieces, states, inputs.clone());
        for (chunk, last) in last.iter().enumerate() {
            states.get_mut(chunk, &inputs).copy_from_slice(last);
        }
        let mut chunks: Vec<DeltaChunk<'_>> = states.parts_mut(&matrices).map(|state| DeltaChunk { state, pieces: Vec::new() }).collect();
        for (index, Band { v, gates, mixed, .. }) in bands.iter_mut().enumerate() {
            delta_rule::rates_and_decays(cpu, &self.factors, &self.biases, gates);
            v.resize(mixed.len() / self.heads.channels() * self.heads.outputs(), 0.0);
            let mut rest = &mut v[..];
            for &Piece { chunk, first, rows, .. } in pieces.of_band(index) {
                let (outputs, after) = rest.split_at_mut(rows * self.heads.outputs());
                rest = after;
                let part = |numbers: usize| first * numbers..(first + rows) * numbers;
                let (mixed, rates) = (&mixed[part(self.heads.channels())], &gates[part(2 * self.heads.value_heads)]);
                chunks[chunk].pieces.push(DeltaRows { mixed, rates, outputs });
            }
        }
        delta_rule::advance(cpu, self.heads, &mut chunks);
    }

    /// Fills each band's `mixed`, and returns the inputs that each chunk leaves for the next.
    fn mix(&self, cpu: &Cpu, bands: &mut [Band<'_>], pieces: &Pieces, states: &States, of: Range<usize>) -> Vec<Vec<f32>> {
        let channels = self.heads.channels();
        let mut mixed: Vec<(usize, Vec<f32>)> = bands.iter_mut().map(|band| std::mem::take(&mut band.mixed)).enumerate().collect();
        let inputs = ConvInputs { bands, pieces, states, of, width: channels };
        cpu.for_each_mut(&mut mixed, |(band, mixed)| {
            mixed.resize(inputs.bands[*band].k.len(), 0.0);
            for &Piece { chunk, first, start, rows, .. } in pieces.of_band(*band) {
                let rows = &mut mixed[first * channels..(first + rows) * channels];
                delta_rule::mix(cpu, self.heads, &self.taps, |row, tap| inputs.get(chunk, start + row + tap), rows);
            }
        });
        let last = inputs.last();
        for (band, mixed) in mixed {
            bands[band].mixed = mixed;
        }
        last
    }

    /// Norms and gates the rows' outputs.
    pub(super) fn finish(&self, cpu: &Cpu, outputs: &mut [f32], gates: &[f32]) {
        self.norm.apply(cpu, outputs);
        elementwise::gate(cpu, outputs, gates, Gate::Silu);
    }

    /// The parts of a layer's state: the convolution's inputs, and the matrices.
    fn parts(&self, of: &Range<usize>) -> [Range<usize>; 2] {
        let border = of.end - self.heads.state_numbers();
        [of.start..border, border..of.end]
    }
}
