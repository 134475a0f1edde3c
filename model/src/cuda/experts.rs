//! Layers of experts on the device. The matrices of all experts of a layer are one, in which the outputs of gates alternate with those that
//! they gate, so that one thread has both. The router's numbers stay f32, and so does the gate of a shared expert, which is the router's
//! last output.

use super::{
    shape::RankShape,
    weights::{Columns, DeviceDense, DeviceMlp, DeviceWeights, Loader, Projections, REFUSED, padded},
};
use crate::{
    config::ExpertConfig,
    family::Scores,
    tensors::{ExpertTensors, Linear, SharedTensors},
    weight::Weight,
};
use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut};
use tidemill_kernels::{
    cuda::{
        Bf16, CudaError, Device,
        experts::{
            CHOSEN_MAX, EXPERTS_MAX, ExpertActivation, ExpertInput, ExpertKernels, ExpertScores, ExpertScratch, ExpertSizes, ExpertWeights,
            RoutingRule,
        },
    },
    dtype::decode,
};

pub(super) struct DeviceExperts {
    /// `[experts, hidden]`, and one more row for the gate of the shared expert.
    router: CudaSlice<f32>,
    correction: Option<CudaSlice<f32>>,
    /// `[experts, inner, 2, hidden]`, with the device's part of `inner`.
    gate_up: CudaSlice<Bf16>,
    /// `[experts, hidden, inner]`, with the device's part of `hidden`.
    down: CudaSlice<Bf16>,
    pub(super) shared: Option<DeviceDense>,
}

/// Whether the kernels support the routing of this layer.
pub(super) fn can_choose(config: &ExpertConfig) -> bool {
    config.count <= EXPERTS_MAX && config.chosen <= CHOSEN_MAX && config.groups.is_none_or(|groups| groups.count <= CHOSEN_MAX)
}

/// The kernels of all layers of experts, and buffers for intermediate results.
pub(super) struct ExpertLayers {
    kernels: ExpertKernels,
    rule: RoutingRule,
    scratch: ExpertScratch,
    /// The outputs of the shared expert, `[rows_max, hidden]`, the device's part.
    pub(super) shared_out: Option<CudaSlice<Bf16>>,
}

impl ExpertLayers {
    /// Allocates room for batches of up to `rows_max` rows.
    pub(super) fn new(
        device: &Device,
        config: &ExpertConfig,
        shape: RankShape,
        weights: &DeviceWeights,
        rows_max: usize,
    ) -> Result<Self, CudaError> {
        let of_layers = || {
            weights.layers.iter().filter_map(|layer| match &layer.mlp {
                DeviceMlp::Experts(experts) => Some(experts),
                DeviceMlp::Dense(_) => None,
            })
        };
        let sizes = ExpertSizes {
            experts: config.count,
            chosen: config.chosen,
            hidden: shape.whole.hidden,
            inner: padded(config.intermediate, shape.ranks),
            ranks: shape.ranks,
            router_outputs: of_layers().next().map_or(config.count, |experts| experts.router.len() / shape.whole.hidden),
        };
        let has_shared = of_layers().any(|experts| experts.shared.is_some());
        Ok(Self {
            kernels: ExpertKernels::load(device)?,
            rule: RoutingRule {
                scores: match config.scores {
                    Scores::Softmax => ExpertScores::Softmax,
                    Scores::Sigmoid => ExpertScores::Sigmoid,
                    Scores::ChosenSoftmax => ExpertScores::ChosenSoftmax,
                },
                groups: config.groups.map(|groups| (groups.count, groups.chosen)),
                is_normalized: config.is_normalized,
                factor: config.factor.unwrap_or(1.0),
            },
            scratch: ExpertScratch::new(device, sizes, rows_max)?,
            shared_out: if has_shared { Some(device.alloc(rows_max * shape.hidden().len())?) } else { None },
        })
    }

    /// Entries of a row: one for each of its experts.
    pub(super) fn chosen(&self) -> usize {
        self.scratch.chosen()
    }

    /// The device's part of the activated numbers of `rows` rows, and the place for all of them if there are several devices.
    pub(super) fn activated(&mut self, rows: usize) -> (&CudaSlice<Bf16>, Option<CudaViewMut<'_, Bf16>>) {
        self.scratch.activated(rows)
    }

    /// Chooses the rows' experts, and computes the device's part of their activated numbers.
    pub(super) fn widen(&mut self, stream: &CudaStream, input: &ExpertInput<'_>, layer: &DeviceExperts) -> Result<(), CudaError> {
        let Self { kernels, rule, scratch, .. } = self;
        let rows = input.positions.len();
        layer.with_weights(|weights| {
            kernels.choose(stream, input, rule, weights, scratch)?;
            kernels.gate_up(stream, input.normed, rows, weights, ExpertActivation::Silu, scratch)
        })
    }

    /// Sets `out`, the device's part, to the weighted outputs of the layer's experts for the rows, with those of the shared expert in
    /// `shared_out`.
    pub(super) fn narrow(
        &mut self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        rows: usize,
        layer: &DeviceExperts,
    ) -> Result<(), CudaError> {
        let Self { kernels, scratch, shared_out, .. } = self;
        let shared = layer.shared.as_ref().and(shared_out.as_ref()).map(|shared| shared.slice(..out.len()));
        layer.with_weights(|weights| kernels.down(stream, rows, weights, scratch))?;
        kernels.combine(stream, out, rows, shared.as_ref(), scratch)
    }
}

impl DeviceExperts {
    fn with_weights<T>(&self, multiply: impl FnOnce(&ExpertWeights<'_>) -> T) -> T {
        let correction = self.correction.as_ref().map(CudaSlice::as_view);
        multiply(&ExpertWeights {
            router: &self.router.as_view(),
            correction: correction.as_ref(),
            gate_up: &self.gate_up.as_view(),
            gate_up_bias: None,
            down: &self.down.as_view(),
            down_bias: None,
        })
    }
}

impl Loader<'_> {
    pub(super) fn experts(&mut self, tensors: &ExpertTensors) -> Result<DeviceExperts, CudaError> {
        let ExpertTensors { router, correction, experts, shared } = tensors;
        let mut numbers = f32s(router);
        if let Some(SharedTensors { gate: Some(gate), .. }) = shared {
            numbers.extend(f32s(gate));
        }
        let padded = inner_of(experts, self.shape.ranks);
        let (hidden, inner) = (self.shape.hidden(), self.shape.inner(padded));
        let write = |linear: &Linear, row: usize, to: &mut [Bf16]| match row < linear.weight.rows() {
            true => Columns::InFront.write_weight(&linear.weight, row, to),
            false => to.fill(0),
        };
        let gate_up = self.matrix(experts.len() * 2 * inner.len(), self.shape.whole.hidden, |row, to| {
            let (expert, row) = (&experts[row / (2 * inner.len())], row % (2 * inner.len()));
            write(&expert[row % 2], inner.start + row / 2, to);
        })?;
        let down = self.matrix(experts.len() * hidden.len(), padded, |row, to| {
            write(&experts[row / hidden.len()][2], hidden.start + row % hidden.len(), to);
        })?;
        Ok(DeviceExperts {
            router: self.device.upload(&numbers)?,
            correction: correction.as_ref().map(|correction| self.device.upload(correction)).transpose()?,
            gate_up,
            down,
            shared: shared.as_ref().map(|shared| self.dense(Projections::gated(&shared.projections))).transpose()?,
        })
    }

    /// Bytes of the matrices, which [`experts`](Self::experts) reports as progress.
    pub(super) fn expert_bytes(&self, tensors: &ExpertTensors) -> usize {
        let ranks = self.shape.ranks;
        let numbers = tensors.experts.len() * 3 * inner_of(&tensors.experts, ranks) / ranks * self.shape.whole.hidden;
        2 * numbers + tensors.shared.as_ref().map_or(0, |shared| self.dense_bytes(&Projections::gated(&shared.projections)))
    }
}

/// The width of the experts, padded.
fn inner_of(experts: &[[Linear; 3]], ranks: usize) -> usize {
    experts.first().map_or(0, |[_, up, _]| padded(up.weight.rows(), ranks))
}

/// The numbers of a matrix, row by row.
fn f32s(linear: &Linear) -> Vec<f32> {
    let (rows, columns) = (linear.weight.rows(), linear.weight.cols());
    match &linear.weight {
        Weight::Plain(matrix) => {
            let dtype = matrix.view().dtype();
            decode(dtype, &matrix.bytes()[..rows * columns * dtype.bytes()])
        }
        Weight::Fp8(matrix) => {
            let mut numbers = vec![0.0; rows * columns];
            for (row, to) in numbers.chunks_mut(columns).enumerate() {
                matrix.write_row(row, to, |bits| f32::from_bits(u32::from(bits) << 16));
            }
            numbers
        }
        Weight::Int4(matrix) => (0..rows).flat_map(|row| decode(matrix.dtype(), &matrix.row_bytes_of(row))).collect(),
        Weight::Transposed(_) | Weight::Mxfp4(_) => panic!("{REFUSED}"),
    }
}
