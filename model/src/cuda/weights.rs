//! A checkpoint's tensors on the device: bf16 or FP8, with projections that share their input merged into one matrix.

use super::{
    experts::DeviceExperts,
    shape::{DeviceShape, RankShape},
};
use crate::{
    checkpoint::WeightMatrix,
    config::ModelConfig,
    family::QkNorm,
    norm::Norm,
    quantization::{Inputs, ScalePer},
    tensors::{DenseTensors, InputTensors, LayerTensors, Linear, MlpTensors, Tensors},
    weight::{Fp8Matrix, Weight},
};
use cudarc::driver::{CudaSlice, CudaView};
use std::ops::Range;
use tidemill_kernels::{
    Dtype,
    cuda::{Bf16, CudaError, Device, gemm::Fp8Rows, upload::Uploads},
    dtype::{decode, encode},
};

/// `[outputs, inputs]`
pub(super) struct DeviceLinear {
    pub(super) weight: DeviceWeight,
    pub(super) inputs: usize,
    pub(super) bias: Option<CudaSlice<Bf16>>,
}

impl DeviceLinear {
    pub(super) fn outputs(&self) -> usize {
        let numbers = match &self.weight {
            DeviceWeight::Bf16(weight) => weight.len(),
            DeviceWeight::Fp8 { numbers, .. } => numbers.len(),
        };
        numbers / self.inputs
    }

    pub(super) fn is_fp8(&self) -> bool {
        matches!(self.weight, DeviceWeight::Fp8 { .. })
    }
}

pub(super) enum DeviceWeight {
    Bf16(CudaSlice<Bf16>),
    Fp8 {
        numbers: CudaSlice<u8>,
        /// One scale per output.
        scales: CudaSlice<f32>,
        products: Fp8Products,
    },
}

/// Products of FP8 weights with activations that are quantized row by row.
#[derive(Clone, Copy)]
pub(super) struct Fp8Products {
    /// The bound to which activations are clipped.
    pub(super) largest_max: Option<f32>,
    /// Whether a bias can be added.
    pub(super) with_bias: bool,
}

impl Fp8Products {
    /// The FP8 products of a model. `None` if its FP8 weights are dequantized to bf16: because their scales are by block, their activations
    /// are not meant to be in FP8, or the device has no such products.
    pub(super) fn of(config: &ModelConfig, shape: DeviceShape, device_has: &Fp8Rows) -> Option<Self> {
        let scheme = config.quantization.as_ref()?.fp8()?;
        let largest_max = match scheme.inputs {
            Inputs::Unquantized => return None,
            Inputs::Dynamic { largest_max } => largest_max,
            Inputs::Static => None,
        };
        let by_block = matches!(scheme.scale_per, ScalePer::Block { .. });
        // All other rows of factors are as wide as all heads, or padded to a multiple of 16.
        let fit = !by_block && device_has.multiply(false) && shape.hidden.is_multiple_of(16);
        fit.then_some(Self { largest_max, with_bias: device_has.multiply(true) })
    }
}

/// A norm of the residual stream: vectors of `hidden` numbers.
pub(super) struct DeviceNorm {
    pub(super) weight: CudaSlice<f32>,
    pub(super) bias: Option<CudaSlice<f32>>,
    /// Whether the mean is subtracted.
    pub(super) is_centered: bool,
}

pub(super) struct DeviceLayer {
    pub(super) attention_norm: Option<DeviceNorm>,
    /// `[heads + 2 kv_heads, head_dim, hidden]`, with the device's heads.
    pub(super) qkv: DeviceLinear,
    /// `[hidden, heads * head_dim]`, with the device's outputs.
    pub(super) output: DeviceLinear,
    pub(super) qk_norm: Option<(CudaSlice<f32>, CudaSlice<f32>)>,
    /// The logit of each query head that joins the softmax's sum, times log2(e).
    pub(super) sinks: Option<CudaSlice<f32>>,
    /// The weight of the norm over the attention's output before it is added to the residual stream.
    pub(super) after_attention: Option<CudaSlice<f32>>,
    pub(super) mlp_norm: Option<DeviceNorm>,
    pub(super) mlp: DeviceMlp,
    /// The weight of the norm over the feed-forward layer's output, likewise.
    pub(super) after_mlp: Option<CudaSlice<f32>>,
}

pub(super) enum DeviceMlp {
    Dense(Box<DeviceDense>),
    Experts(Box<DeviceExperts>),
}

/// A feed-forward layer, or an expert that all rows go through: the device's outputs of both projections.
pub(super) struct DeviceDense {
    /// `[2, width, hidden]`, or `[width, hidden]` without gates.
    pub(super) gate_up: DeviceLinear,
    pub(super) is_gated: bool,
    pub(super) down: DeviceLinear,
}

impl DeviceLayer {
    /// The feed-forward layer that all rows go through; a layer of experts may also have one.
    pub(super) fn dense(&self) -> Option<&DeviceDense> {
        match &self.mlp {
            DeviceMlp::Dense(dense) => Some(dense),
            DeviceMlp::Experts(experts) => experts.shared.as_ref(),
        }
    }
}

pub(super) struct DeviceWeights {
    /// `[vocab, hidden]`, on the first device.
    pub(super) embedding: Option<CudaSlice<Bf16>>,
    /// The embedding's factor, rounded to its type as in transformers.
    pub(super) embedding_factor: f32,
    pub(super) layers: Vec<DeviceLayer>,
    /// The final norm, with the logits' factor in its weight.
    pub(super) final_norm: DeviceNorm,
    /// The head's rows of the device's part of the vocabulary; `None` if they are the first of the embedding.
    head: Option<CudaSlice<Bf16>>,
}

impl DeviceWeights {
    /// The head's `numbers` of the device.
    pub(super) fn head(&self, numbers: usize) -> CudaView<'_, Bf16> {
        self.head.as_ref().or(self.embedding.as_ref()).expect("a device has a head").slice(..numbers)
    }

    /// Whether some weights are in FP8.
    pub(super) fn has_fp8(&self) -> bool {
        let dense = self.layers.iter().filter_map(DeviceLayer::dense).flat_map(|dense| [&dense.gate_up, &dense.down]);
        self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output]).chain(dense).any(DeviceLinear::is_fp8)
    }

    /// The width of the widest feed-forward layer that all rows go through; 0 if there are experts alone.
    pub(super) fn dense_width(&self) -> usize {
        self.layers.iter().filter_map(DeviceLayer::dense).map(|dense| dense.down.inputs).max().unwrap_or(0)
    }

    /// Loads the device's part of the weights. `progress` gets (bytes on the device, bytes of its part).
    pub(super) fn load(
        device: &Device,
        tensors: &Tensors,
        config: &ModelConfig,
        shape: RankShape,
        fp8: Option<Fp8Products>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, CudaError> {
        let fp8 = fp8.map(|products| Ok::<_, CudaError>((products, Uploads::new(device)?))).transpose()?;
        let mut loader = Loader { uploads: Uploads::new(device)?, fp8, device, shape, done: 0, total: 0, progress };
        let (is_first, shares_head) = (shape.rank == 0, config.tied && shape.rank == 0);
        let ends = [is_first.then_some(shape.whole.vocab), (!shares_head).then_some(shape.vocab().len())];
        let bytes_of_ends = 2 * ends.into_iter().flatten().sum::<usize>() * shape.whole.hidden;
        loader.total = (bytes_of_ends + tensors.layers.iter().map(|layer| loader.layer_bytes(layer)).sum::<usize>()) as u64;
        let embedding = is_first.then(|| loader.embedding(&tensors.embedding)).transpose()?;
        let layers = tensors.layers.iter().map(|layer| loader.layer(layer, config)).collect::<Result<_, _>>()?;
        let head = (!shares_head).then(|| loader.head(tensors, config.tied)).transpose()?;
        device.synchronize()?;
        let dtype = tensors.embedding.view().dtype();
        let embedding_factor = config.embedding_factor.map_or(1.0, |factor| decode(dtype, &encode(dtype, &[factor]))[0]);
        let final_norm = device_norm(device, &tensors.final_norm, config.logit_factor.unwrap_or(1.0))?;
        Ok(Self { embedding, embedding_factor, layers, final_norm, head })
    }
}

pub(super) struct Loader<'a> {
    uploads: Uploads<'a, Bf16>,
    /// The products and uploads in FP8, if weights may stay in it.
    fp8: Option<(Fp8Products, Uploads<'a, u8>)>,
    pub(super) device: &'a Device,
    pub(super) shape: RankShape,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Loader<'_> {
    fn layer(&mut self, layer: &LayerTensors, config: &ModelConfig) -> Result<DeviceLayer, CudaError> {
        let (shape, device) = (self.shape, self.device);
        let (LayerTensors { output, .. }, [q, k, v]) = (layer, heads_of(layer));
        let whole = shape.whole;
        let over_all = config.family.qk_norm == QkNorm::All;
        let head_norm = |norm: &Norm| if over_all { self.norm_of_heads(&norm.weight) } else { self.head_norm(&norm.weight) };
        let qk_norm = layer.qk_norm.as_ref().map(|(q, k)| Ok::<_, CudaError>((head_norm(q)?, head_norm(k)?))).transpose()?;
        let norm = |norm: &Option<Norm>| norm.as_ref().map(|norm| device_norm(device, norm, 1.0)).transpose();
        let after = |norm: &Option<Norm>| norm.as_ref().map(|norm| device.upload(&norm.weight)).transpose();
        let in_powers = |sinks: &Vec<f32>| sinks[shape.heads()].iter().map(|sink| sink * std::f32::consts::LOG2_E).collect::<Vec<_>>();
        Ok(DeviceLayer {
            attention_norm: norm(&layer.attention_norm)?,
            qkv: self.qkv([q, k, v])?,
            output: self.linear(&[output], shape.hidden().len(), whole.q(), Columns::ByHead(whole), |row| {
                Some((output, shape.hidden().start + row))
            })?,
            qk_norm,
            sinks: layer.sinks.as_ref().map(|sinks| device.upload(&in_powers(sinks))).transpose()?,
            after_attention: after(&layer.after_attention)?,
            mlp_norm: norm(&layer.mlp_norm)?,
            mlp: match &layer.mlp {
                MlpTensors::Dense(dense) => DeviceMlp::Dense(Box::new(self.dense(Projections::of(dense))?)),
                MlpTensors::Experts(experts) => DeviceMlp::Experts(Box::new(self.experts(experts)?)),
            },
            after_mlp: after(&layer.after_mlp)?,
        })
    }

    pub(super) fn dense(&mut self, projections: Projections<'_>) -> Result<DeviceDense, CudaError> {
        let (width, Projections { inputs, down }) = (projections.width(self.shape.ranks), projections);
        let hidden = self.shape.hidden();
        Ok(DeviceDense {
            gate_up: self.gate_up(&inputs, self.shape.inner(width))?,
            is_gated: inputs.len() == 2,
            down: self.linear(&[down], hidden.len(), width, Columns::InFront, |row| Some((down, hidden.start + row)))?,
        })
    }

    pub(super) fn dense_bytes(&self, projections: &Projections<'_>) -> usize {
        let Projections { inputs, down } = projections;
        let numbers = projections.width(self.shape.ranks) / self.shape.ranks * self.shape.whole.hidden;
        self.bytes_of(inputs, inputs.len() * numbers) + self.bytes_of(&[down], numbers)
    }

    fn bytes_of(&self, parts: &[&Linear], numbers: usize) -> usize {
        if self.stays_fp8(parts) { numbers } else { 2 * numbers }
    }

    fn layer_bytes(&self, layer: &LayerTensors) -> usize {
        let RankShape { whole, own, .. } = self.shape;
        let (LayerTensors { output, .. }, [q, k, v]) = (layer, heads_of(layer));
        let mlp = match &layer.mlp {
            MlpTensors::Dense(dense) => self.dense_bytes(&Projections::of(dense)),
            MlpTensors::Experts(experts) => self.expert_bytes(experts),
        };
        self.bytes_of(&[q, k, v], own.qkv() * whole.hidden) + self.bytes_of(&[output], own.q() * whole.hidden) + mlp
    }

    /// Whether a matrix of these parts is in FP8 on the device: it is if all of them are, and the device can add their bias.
    fn stays_fp8(&self, parts: &[&Linear]) -> bool {
        let Some((products, _)) = &self.fp8 else { return false };
        parts.iter().all(|part| matches!(part.weight, Weight::Fp8(_)) && (products.with_bias || part.bias.is_none()))
    }

    fn qkv(&mut self, parts: [&Linear; 3]) -> Result<DeviceLinear, CudaError> {
        let (rank, own) = (self.shape, self.shape.own);
        let places: Vec<Option<usize>> = (0..own.head_dim).map(|at| (0..own.head_dim_used).find(|&i| own.place(i) == at)).collect();
        let source = |row: usize| {
            let (head, number) = (row / own.head_dim, places[row % own.head_dim]?);
            let (part, head) = match head.checked_sub(own.heads) {
                None => (0, rank.heads().start + head),
                Some(head) => (1 + head / own.kv_heads, rank.kv_heads().start + head % own.kv_heads),
            };
            Some((parts[part], head * own.head_dim_used + number))
        };
        self.linear(&parts, own.qkv(), own.hidden, Columns::InFront, source)
    }

    /// The rows `own` of each part.
    fn gate_up(&mut self, parts: &[&Linear], own: Range<usize>) -> Result<DeviceLinear, CudaError> {
        let source = |row: usize| {
            let (part, row) = (parts[row / own.len()], own.start + row % own.len());
            (row < part.weight.rows()).then_some((part, row))
        };
        self.linear(parts, parts.len() * own.len(), self.shape.whole.hidden, Columns::InFront, source)
    }

    /// A matrix with rows from `source`, in the order in which these parts are used; zeros for rows that it does not give.
    fn linear<'w>(
        &mut self,
        parts: &[&'w Linear],
        rows: usize,
        columns: usize,
        placed: Columns,
        source: impl Fn(usize) -> Option<(&'w Linear, usize)> + Sync,
    ) -> Result<DeviceLinear, CudaError> {
        let weight = if self.stays_fp8(parts) {
            let row_source = |row| match source(row) {
                Some((Linear { weight: Weight::Fp8(matrix), order, .. }, row)) => Some((matrix, order.stored(row))),
                _ => None,
            };
            self.fp8_matrix(rows, columns, placed, row_source)?
        } else {
            DeviceWeight::Bf16(self.matrix(rows, columns, |row, to| match source(row) {
                None => to.fill(0),
                Some((part, row)) => placed.write_weight(&part.weight, part.order.stored(row), to),
            })?)
        };
        Ok(DeviceLinear { weight, inputs: columns, bias: self.bias(rows, source)? })
    }

    fn embedding(&mut self, matrix: &WeightMatrix) -> Result<CudaSlice<Bf16>, CudaError> {
        let (rows, columns) = (matrix.view().rows(), matrix.view().cols());
        self.matrix(rows, columns, |row, to| Columns::InFront.write_plain(matrix, row, to))
    }

    fn head(&mut self, tensors: &Tensors, is_tied: bool) -> Result<CudaSlice<Bf16>, CudaError> {
        let (vocab, hidden) = (self.shape.vocab(), self.shape.whole.hidden);
        self.matrix(vocab.len(), hidden, |row, to| match (vocab.start + row, is_tied) {
            (row, true) => Columns::InFront.write_plain(&tensors.embedding, row, to),
            (row, false) => Columns::InFront.write_weight(&tensors.head.weight, row, to),
        })
    }

    pub(super) fn matrix(
        &mut self,
        rows: usize,
        columns: usize,
        write: impl Fn(usize, &mut [Bf16]) + Sync,
    ) -> Result<CudaSlice<Bf16>, CudaError> {
        let matrix = self.uploads.matrix(rows, columns, write)?;
        self.progress(2 * rows * columns);
        Ok(matrix)
    }

    fn fp8_matrix<'w>(
        &mut self,
        rows: usize,
        columns: usize,
        placed: Columns,
        source: impl Fn(usize) -> Option<(&'w Fp8Matrix, usize)> + Sync,
    ) -> Result<DeviceWeight, CudaError> {
        let (products, uploads) = self.fp8.as_mut().expect("asked for where weights may stay in FP8");
        let products = *products;
        let numbers = uploads.matrix(rows, columns, |row, to| match source(row) {
            None => to.fill(0),
            Some((matrix, row)) => {
                let bytes = matrix.row_bytes(row);
                placed.write(bytes.len(), to, |range, to| to.copy_from_slice(&bytes[range]));
            }
        })?;
        // The scale of rows of zeros is arbitrary.
        let scales: Vec<f32> = (0..rows).map(|row| source(row).map_or(1.0, |(matrix, row)| matrix.row_scale(row))).collect();
        self.progress(rows * columns);
        Ok(DeviceWeight::Fp8 { numbers, scales: self.device.upload(&scales)?, products })
    }

    fn progress(&mut self, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(self.done, self.total);
    }

    /// The bias of these rows; `None` if no part has one.
    fn bias<'w>(&self, rows: usize, source: impl Fn(usize) -> Option<(&'w Linear, usize)>) -> Result<Option<CudaSlice<Bf16>>, CudaError> {
        let numbers: Option<Vec<f32>> =
            (0..rows).map(|row| source(row).map_or(Some(0.0), |(part, row)| Some(part.bias.as_ref()?[row]))).collect();
        numbers.map(|numbers| self.device.upload(&bf16s(Dtype::F32, &encode(Dtype::F32, &numbers)))).transpose()
    }

    /// The kernel averages over a whole padded head, of which `head_dim_used` numbers are not zero: the weight compensates for it, and
    /// `epsilon` is scaled likewise.
    fn head_norm(&self, weight: &[f32]) -> Result<CudaSlice<f32>, CudaError> {
        let DeviceShape { head_dim, head_dim_used, .. } = self.shape.whole;
        let factor = (head_dim_used as f32 / head_dim as f32).sqrt();
        let mut placed = vec![0.0; head_dim];
        for (i, x) in weight.iter().enumerate() {
            placed[self.shape.whole.place(i)] = factor * x;
        }
        self.device.upload(&placed)
    }

    /// The weights of a norm over all heads together, each at its padded place. Padding does not count in its mean.
    fn norm_of_heads(&self, weight: &[f32]) -> Result<CudaSlice<f32>, CudaError> {
        let DeviceShape { head_dim, head_dim_used, .. } = self.shape.whole;
        let mut placed = vec![0.0; weight.len() / head_dim_used * head_dim];
        for (weight, placed) in weight.chunks_exact(head_dim_used).zip(placed.chunks_exact_mut(head_dim)) {
            weight.iter().enumerate().for_each(|(i, x)| placed[self.shape.whole.place(i)] = *x);
        }
        self.device.upload(&placed)
    }
}

/// A norm whose results are multiplied by `factor`.
fn device_norm(device: &Device, norm: &Norm, factor: f32) -> Result<DeviceNorm, CudaError> {
    let upload = |numbers: &[f32]| device.upload(&numbers.iter().map(|x| factor * x).collect::<Vec<_>>());
    let centered = norm.centered();
    let bias = centered.and_then(|norm| norm.bias).map(upload).transpose()?;
    Ok(DeviceNorm { weight: upload(&norm.weight)?, bias, is_centered: centered.is_some() })
}

/// The query, key and value projections.
fn heads_of(layer: &LayerTensors) -> &[Linear; 3] {
    match &layer.inputs {
        InputTensors::Heads(heads) => heads,
        InputTensors::Latent(_) | InputTensors::ShortConv(_) | InputTensors::DeltaRule(_) => panic!("{REFUSED}"),
    }
}

/// The projections of a feed-forward layer.
pub(super) struct Projections<'a> {
    /// The gate, if there is one, and up.
    inputs: Vec<&'a Linear>,
    down: &'a Linear,
}

impl<'a> Projections<'a> {
    fn of(DenseTensors { gate, up, down }: &'a DenseTensors) -> Self {
        Self { inputs: gate.iter().chain([up]).collect(), down }
    }

    pub(super) fn gated([gate, up, down]: &'a [Linear; 3]) -> Self {
        Self { inputs: vec![gate, up], down }
    }

    /// The width of the activated numbers, padded.
    fn width(&self, ranks: usize) -> usize {
        padded(self.inputs[0].weight.rows(), ranks)
    }
}

/// The width of a feed-forward layer, padded so that each device has a multiple of 16.
pub(super) fn padded(width: usize, ranks: usize) -> usize {
    width.next_multiple_of(16 * ranks)
}

pub(super) const REFUSED: &str = "models that the kernels do not compute are refused";

/// The columns that a row's numbers go to; the others are zeros.
#[derive(Clone, Copy)]
pub(super) enum Columns {
    InFront,
    /// Each head at its padded place.
    ByHead(DeviceShape),
}

impl Columns {
    pub(super) fn write_weight(self, weight: &Weight, row: usize, to: &mut [Bf16]) {
        match weight {
            Weight::Plain(matrix) => self.write_plain(matrix, row, to),
            Weight::Fp8(matrix) => {
                let mut numbers: Vec<Bf16> = vec![0; weight.cols()];
                matrix.write_row(row, &mut numbers, |bits| bits);
                self.write(numbers.len(), to, |range, to| to.copy_from_slice(&numbers[range]));
            }
            Weight::Int4(matrix) => self.write_numbers(matrix.dtype(), &matrix.row_bytes_of(row), to),
            // Only experts have such weights.
            Weight::Transposed(_) | Weight::Mxfp4(_) => panic!("{REFUSED}"),
        }
    }

    fn write_plain(self, matrix: &WeightMatrix, row: usize, to: &mut [Bf16]) {
        let view = matrix.view();
        let size = view.dtype().bytes();
        self.write_numbers(view.dtype(), &matrix.bytes()[row * view.cols() * size..][..view.cols() * size], to);
    }

    fn write_numbers(self, dtype: Dtype, bytes: &[u8], to: &mut [Bf16]) {
        let size = dtype.bytes();
        self.write(bytes.len() / size, to, |range, to| write_bf16s(dtype, &bytes[range.start * size..range.end * size], to));
    }

    /// Calls `write(range, to)` to write each range of a row's `columns` numbers.
    fn write<T: Copy + Default>(self, columns: usize, to: &mut [T], write: impl Fn(Range<usize>, &mut [T])) {
        match self {
            Self::InFront => {
                let (front, rest) = to.split_at_mut(columns);
                write(0..columns, front);
                rest.fill(T::default());
            }
            Self::ByHead(shape) => {
                to.fill(T::default());
                for head in 0..columns / shape.head_dim_used {
                    let (from, to) = (head * shape.head_dim_used, &mut to[head * shape.head_dim..]);
                    for (run, at) in shape.runs().into_iter().filter(|(run, _)| !run.is_empty()) {
                        write(from + run.start..from + run.end, &mut to[at..][..run.len()]);
                    }
                }
            }
        }
    }
}

/// Stored numbers, rounded to bf16.
fn bf16s(dtype: Dtype, bytes: &[u8]) -> Vec<Bf16> {
    let mut to = vec![0; bytes.len() / dtype.bytes()];
    write_bf16s(dtype, bytes, &mut to);
    to
}

fn write_bf16s(dtype: Dtype, bytes: &[u8], to: &mut [Bf16]) {
    let copy = |bytes: &[u8], to: &mut [Bf16]| {
        for (&bytes, to) in bytes.as_chunks().0.iter().zip(to) {
            *to = Bf16::from_le_bytes(bytes);
        }
    };
    match dtype {
        Dtype::Bf16 => copy(bytes, to),
        Dtype::F32 | Dtype::F16 => copy(&encode(Dtype::Bf16, &decode(dtype, bytes)), to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_numbers_are_rounded_to_bf16() {
        let numbers = [1.0, -2.5, 3.140_625, 1.0 + 1.0 / 256.0];
        let expected = bf16s(Dtype::Bf16, &encode(Dtype::Bf16, &numbers));
        assert_eq!(expected[0], 0x3f80);
        assert_eq!(bf16s(Dtype::F32, &encode(Dtype::F32, &numbers)), expected);
        assert_eq!(bf16s(Dtype::F16, &encode(Dtype::F16, &numbers)), expected);
    }
}
