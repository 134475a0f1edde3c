//! A checkpoint's tensors on the device: bf16, with projections that share their input merged into one matrix.

use super::shape::DeviceShape;
use crate::{
    checkpoint::WeightMatrix,
    tensors::{LayerTensors, Linear, Tensors},
};
use cudarc::driver::CudaSlice;
use tidemill_kernels::{
    Dtype,
    cuda::{Bf16, CudaError, Device, upload::Uploads},
    dtype::{decode, encode},
};

/// `[outputs, inputs]`
pub(super) struct DeviceLinear {
    pub(super) weight: CudaSlice<Bf16>,
    pub(super) inputs: usize,
    pub(super) bias: Option<CudaSlice<Bf16>>,
}

pub(super) struct DeviceLayer {
    pub(super) attention_norm: CudaSlice<f32>,
    /// `[heads + 2 kv_heads, head_dim, hidden]`
    pub(super) qkv: DeviceLinear,
    pub(super) output: DeviceLinear,
    pub(super) qk_norm: Option<(CudaSlice<f32>, CudaSlice<f32>)>,
    pub(super) mlp_norm: CudaSlice<f32>,
    /// `[2, intermediate, hidden]`
    pub(super) gate_up: DeviceLinear,
    pub(super) down: DeviceLinear,
}

pub(super) struct DeviceWeights {
    /// `[vocab, hidden]`
    pub(super) embedding: CudaSlice<Bf16>,
    pub(super) layers: Vec<DeviceLayer>,
    pub(super) final_norm: CudaSlice<f32>,
    /// `None`: the embedding.
    head: Option<CudaSlice<Bf16>>,
}

impl DeviceWeights {
    pub(super) fn head(&self) -> &CudaSlice<Bf16> {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// `progress` gets (bytes on the device, bytes in all).
    pub(super) fn load(
        device: &Device,
        tensors: &Tensors,
        tied: bool,
        shape: DeviceShape,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, CudaError> {
        let rows_of_layer = 2 * shape.hidden * (shape.qkv() + shape.q() + 3 * shape.intermediate);
        let rows_of_ends = 2 * shape.vocab * shape.hidden * if tied { 1 } else { 2 };
        let total = (shape.layers * rows_of_layer + rows_of_ends) as u64;
        let mut loader = Loader { uploads: Uploads::new(device)?, device, shape, done: 0, total, progress };
        let embedding = loader.plain(&tensors.embedding)?;
        let layers = tensors.layers.iter().map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?;
        let head = if tied { None } else { Some(loader.plain(&tensors.head.weight)?) };
        device.synchronize()?;
        Ok(Self { embedding, layers, final_norm: device.upload(&tensors.final_norm)?, head })
    }
}

struct Loader<'a> {
    uploads: Uploads<'a>,
    device: &'a Device,
    shape: DeviceShape,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

/// Source of one row's numbers.
struct RowSource<'a> {
    matrix: &'a WeightMatrix,
    row: usize,
}

impl Loader<'_> {
    fn layer(&mut self, layer: &LayerTensors) -> Result<DeviceLayer, CudaError> {
        let shape = self.shape;
        let LayerTensors { q, k, v, output, gate, up, down, .. } = layer;
        let qk_norm = layer.qk_norm.as_ref().map(|(q, k)| Ok::<_, CudaError>((self.head_norm(q)?, self.head_norm(k)?))).transpose()?;
        Ok(DeviceLayer {
            attention_norm: self.device.upload(&layer.attention_norm)?,
            qkv: self.qkv([q, k, v])?,
            output: DeviceLinear {
                weight: self.matrix(
                    shape.hidden,
                    shape.q(),
                    |row| Some(RowSource { matrix: &output.weight, row }),
                    Columns::ByHead(shape),
                )?,
                inputs: shape.q(),
                bias: self.bias(shape.hidden, |i| Some((output, i)))?,
            },
            qk_norm,
            mlp_norm: self.device.upload(&layer.mlp_norm)?,
            gate_up: self.gate_up([gate, up])?,
            down: DeviceLinear {
                weight: self.matrix(
                    shape.hidden,
                    shape.intermediate,
                    |row| Some(RowSource { matrix: &down.weight, row }),
                    Columns::InFront,
                )?,
                inputs: shape.intermediate,
                bias: self.bias(shape.hidden, |i| Some((down, i)))?,
            },
        })
    }

    fn qkv(&mut self, parts: [&Linear; 3]) -> Result<DeviceLinear, CudaError> {
        let shape = self.shape;
        let places: Vec<Option<usize>> = (0..shape.head_dim).map(|at| (0..shape.head_dim_used).find(|&i| shape.place(i) == at)).collect();
        let source = |row: usize| {
            let (head, number) = (row / shape.head_dim, places[row % shape.head_dim]?);
            let (part, head) = match head.checked_sub(shape.heads) {
                None => (0, head),
                Some(head) => (1 + head / shape.kv_heads, head % shape.kv_heads),
            };
            Some((parts[part], head * shape.head_dim_used + number))
        };
        let weight_row = |row| source(row).map(|(part, row)| RowSource { matrix: &part.weight, row });
        Ok(DeviceLinear {
            weight: self.matrix(shape.qkv(), shape.hidden, weight_row, Columns::InFront)?,
            inputs: shape.hidden,
            bias: self.bias(shape.qkv(), source)?,
        })
    }

    fn gate_up(&mut self, parts: [&Linear; 2]) -> Result<DeviceLinear, CudaError> {
        let DeviceShape { intermediate, hidden, .. } = self.shape;
        let source = |row: usize| {
            let (part, row) = (parts[row / intermediate], row % intermediate);
            (row < part.weight.view().rows()).then_some((part, row))
        };
        let weight_row = |row| source(row).map(|(part, row)| RowSource { matrix: &part.weight, row });
        Ok(DeviceLinear {
            weight: self.matrix(2 * intermediate, hidden, weight_row, Columns::InFront)?,
            inputs: hidden,
            bias: self.bias(2 * intermediate, source)?,
        })
    }

    /// As in the file.
    fn plain(&mut self, matrix: &WeightMatrix) -> Result<CudaSlice<Bf16>, CudaError> {
        let (rows, columns) = (matrix.view().rows(), matrix.view().cols());
        self.matrix(rows, columns, |row| Some(RowSource { matrix, row }), Columns::InFront)
    }

    /// Rows from `source`; zeros where it gives none.
    fn matrix<'w>(
        &mut self,
        rows: usize,
        columns: usize,
        source: impl Fn(usize) -> Option<RowSource<'w>>,
        placed: Columns,
    ) -> Result<CudaSlice<Bf16>, CudaError> {
        let matrix = self.uploads.matrix(rows, columns, |row, to| match source(row) {
            None => to.fill(0),
            Some(RowSource { matrix, row }) => placed.copy(matrix, row, to),
        })?;
        self.done += 2 * (rows * columns) as u64;
        (self.progress)(self.done, self.total);
        Ok(matrix)
    }

    /// `None` if no part has a bias.
    fn bias<'w>(&self, rows: usize, source: impl Fn(usize) -> Option<(&'w Linear, usize)>) -> Result<Option<CudaSlice<Bf16>>, CudaError> {
        let numbers: Option<Vec<f32>> =
            (0..rows).map(|row| source(row).map_or(Some(0.0), |(part, row)| Some(part.bias.as_ref()?[row]))).collect();
        numbers.map(|numbers| self.device.upload(&bf16s(Dtype::F32, &encode(Dtype::F32, &numbers)))).transpose()
    }

    /// The kernel averages over a whole padded head, of which `head_dim_used` numbers are not zero: the weight makes up
    /// for it, and `epsilon` is scaled likewise.
    fn head_norm(&self, weight: &[f32]) -> Result<CudaSlice<f32>, CudaError> {
        let DeviceShape { head_dim, head_dim_used, .. } = self.shape;
        let factor = (head_dim_used as f32 / head_dim as f32).sqrt();
        let mut placed = vec![0.0; head_dim];
        for (i, x) in weight.iter().enumerate() {
            placed[self.shape.place(i)] = factor * x;
        }
        self.device.upload(&placed)
    }
}

/// Where a row's numbers go; zeros elsewhere.
#[derive(Clone, Copy)]
enum Columns {
    InFront,
    /// Each head at its padded place.
    ByHead(DeviceShape),
}

impl Columns {
    fn copy(self, matrix: &WeightMatrix, row: usize, to: &mut [Bf16]) {
        let view = matrix.view();
        let row_bytes = view.cols() * view.dtype().bytes();
        let bytes = &matrix.bytes()[row * row_bytes..(row + 1) * row_bytes];
        match self {
            Self::InFront => {
                let (front, rest) = to.split_at_mut(view.cols());
                write_bf16s(view.dtype(), bytes, front);
                rest.fill(0);
            }
            Self::ByHead(shape) => {
                to.fill(0);
                let (half, half_bytes) = (shape.head_dim_used / 2, shape.head_dim_used / 2 * view.dtype().bytes());
                for (i, bytes) in bytes.chunks_exact(half_bytes).enumerate() {
                    write_bf16s(view.dtype(), bytes, &mut to[i * shape.head_dim / 2..][..half]);
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
