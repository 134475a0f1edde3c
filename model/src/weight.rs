//! A projection's weight: numbers as stored in the file; FP8 with scales, dequantized when it is used; or 4 bits.

use crate::{
    checkpoint::{Checkpoint, Mapped, WeightMatrix},
    error::ModelError,
    int4::Int4Matrix,
    mxfp4::Mxfp4Matrix,
    quantization::{Inputs, ScalePer, Scheme, Unquantized},
    stacked::TransposedMatrix,
};
use std::{borrow::Cow, ops::Range};
use tidemill_kernels::{
    Cpu, Dtype, Matrix,
    dtype::{E4M3_MAX, decode, e4m3_to_bf16, encode},
};

/// `[outputs, inputs]`, still in the mapped file.
pub(crate) enum Weight {
    Plain(WeightMatrix),
    Fp8(Fp8Matrix),
    Int4(Box<Int4Matrix>),
    /// One expert's part of a [`stack`](crate::stacked) whose matrices have their inputs first.
    Transposed(TransposedMatrix),
    /// One expert's part of a [`stack`](crate::stacked) in MXFP4.
    Mxfp4(Mxfp4Matrix),
}

/// e4m3 numbers, and a scale for each block of them.
pub(crate) struct Fp8Matrix {
    bytes: Mapped,
    rows: usize,
    cols: usize,
    /// Rows and columns of a block; the last blocks of the matrix may be cut off.
    block: (usize, usize),
    /// `[blocks down, blocks across]`
    scales: Vec<f32>,
}

/// Numbers in a type that the CPU's products take.
pub(crate) struct Floats<'a> {
    pub(crate) bytes: Cow<'a, [u8]>,
    pub(crate) dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl<'a> Floats<'a> {
    pub(crate) fn view(&self) -> Matrix<'_> {
        Matrix::new(&self.bytes, self.dtype, self.rows, self.cols)
    }

    /// The numbers with stored row `stored(row)` in the place of each `row` of `rows`.
    pub(crate) fn reordered(self, rows: usize, stored: impl Fn(usize) -> usize) -> Self {
        let size = self.cols * self.dtype.bytes();
        let bytes = (0..rows).flat_map(|row| &self.bytes[stored(row) * size..][..size]).copied().collect();
        Self { bytes: Cow::Owned(bytes), rows, ..self }
    }

    /// The transposed numbers.
    pub(crate) fn transposed(self) -> Self {
        let (size, row_bytes) = (self.dtype.bytes(), self.cols * self.dtype.bytes());
        let mut bytes = Vec::with_capacity(self.rows * row_bytes);
        for col in 0..self.cols {
            self.bytes.chunks_exact(row_bytes).for_each(|row| bytes.extend_from_slice(&row[col * size..(col + 1) * size]));
        }
        Self { bytes: Cow::Owned(bytes), rows: self.cols, cols: self.rows, ..self }
    }

    /// The rows of several matrices of the same width, in f32.
    pub(crate) fn together(parts: Vec<Floats<'_>>) -> Floats<'static> {
        let cols = parts.first().map_or(0, |part| part.cols);
        assert!(parts.iter().all(|part| part.cols == cols), "as many columns");
        let rows = parts.iter().map(|part| part.rows).sum();
        let numbers: Vec<f32> = parts.iter().flat_map(|part| decode(part.dtype, &part.bytes)).collect();
        Floats { bytes: Cow::Owned(encode(Dtype::F32, &numbers)), dtype: Dtype::F32, rows, cols }
    }

    /// The same numbers in a different type.
    pub(crate) fn stored(self, dtype: Dtype, bytes: Vec<u8>) -> Self {
        Self { bytes: Cow::Owned(bytes), dtype, ..self }
    }
}

/// The storage of projections according to the checkpoint.
pub(crate) struct Storage<'a> {
    scheme: Option<&'a Scheme>,
    unquantized: Option<Unquantized>,
}

impl<'a> Storage<'a> {
    pub(crate) fn new(scheme: Option<&'a Scheme>) -> Self {
        Self { scheme, unquantized: scheme.map(Scheme::unquantized) }
    }

    /// Refuses a weight in MXFP4 if the configuration contradicts it.
    pub(crate) fn check_mxfp4(&self, checkpoint: &Checkpoint, module: &str, tensor: &str) -> Result<(), ModelError> {
        if !self.scheme.is_some_and(Scheme::is_mxfp4) {
            let problem = "it is in MXFP4, but config.json has no quantization_config with quant_method mxfp4: take config.json from where \
                           the weights are from";
            return Err(checkpoint.problem_of(tensor, problem.into()));
        }
        match self.is_listed(module) {
            true => Err(ModelError::ListedInt4 { module: module.to_owned() }),
            false => Ok(()),
        }
    }

    /// Whether the file lists a module as not quantized.
    fn is_listed(&self, module: &str) -> bool {
        self.unquantized.as_ref().is_some_and(|list| list.contains(module))
    }

    /// Takes the weight of a module, with the scales that it needs.
    pub(crate) fn take(&self, checkpoint: &mut Checkpoint, module: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        let tensor = format!("{module}.weight");
        let is_listed = self.is_listed(module);
        if let Some(scheme) = self.scheme.and_then(Scheme::int4)
            && Int4Matrix::is_there(checkpoint, scheme, module)
        {
            let matrix = Int4Matrix::take(checkpoint, scheme, module, rows, cols)?;
            return match is_listed {
                true => Err(ModelError::ListedInt4 { module: module.to_owned() }),
                false => Ok(Weight::Int4(Box::new(matrix))),
            };
        }
        if !checkpoint.is_fp8(&tensor)? {
            let matrix = checkpoint.matrix(&tensor, rows, cols)?;
            if let Some(scale) = SCALE_NAMES.map(|name| format!("{module}.{name}")).into_iter().find(|name| checkpoint.has(name)) {
                return Err(checkpoint.problem_of(&tensor, format!("it is not stored as F8_E4M3, but has scales ({scale}): {CONVERT}")));
            }
            return Ok(Weight::Plain(matrix));
        }
        let Some(scheme) = self.scheme.and_then(Scheme::fp8) else {
            let problem = "it is stored as F8_E4M3, but config.json has no quantization_config that says how it is scaled: take \
                           config.json from where the weights are from";
            return Err(checkpoint.problem_of(&tensor, problem.into()));
        };
        if is_listed {
            let problem = format!("it is stored as F8_E4M3, but quantization_config lists {module} as not quantized: {CONVERT}");
            return Err(checkpoint.problem_of(&tensor, problem));
        }
        let zero_point = format!("{module}.weight_zero_point");
        if checkpoint.has(&zero_point) {
            return Err(checkpoint.problem_of(&zero_point, "weights with zero points are not supported: use a symmetric scheme".into()));
        }
        let bytes = checkpoint.fp8_matrix(&tensor, rows, cols)?;
        let scales = scales(checkpoint, &format!("{module}.{}", scheme.scale_name), &scheme.scale_per.shapes(rows, cols))?;
        if scheme.inputs == Inputs::Static {
            // The scale is only checked: where activations are in FP8, each row has a scale of its own, which is more precise.
            self::scales(checkpoint, &format!("{module}.input_scale"), &ScalePer::Tensor.shapes(rows, cols))?;
        }
        Ok(Weight::Fp8(Fp8Matrix { bytes, rows, cols, block: scheme.scale_per.block(rows, cols), scales }))
    }
}

const SCALE_NAMES: [&str; 2] = ["weight_scale", "weight_scale_inv"];
const CONVERT: &str = "the two contradict each other, so convert the checkpoint again";

/// Takes scales, and checks that each is usable.
fn scales(checkpoint: &mut Checkpoint, name: &str, shapes: &[Vec<usize>]) -> Result<Vec<f32>, ModelError> {
    let scales = checkpoint.scales(name, shapes)?;
    let is_usable = |scale: f32| scale > 0.0 && (scale * 2.0 * E4M3_MAX).is_finite();
    match scales.iter().enumerate().find(|(_, scale)| !is_usable(**scale)) {
        Some((i, scale)) => {
            let problem = format!("scale {i} is {scale}, where a positive number is needed: download or convert the checkpoint again");
            Err(checkpoint.problem_of(name, problem))
        }
        None => Ok(scales),
    }
}

impl Weight {
    /// A part of its rows. The error completes "tensor …: …".
    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Result<Self, String> {
        match self {
            Self::Plain(matrix) => Ok(Self::Plain(matrix.rows_of(rows))),
            Self::Fp8(matrix) => matrix.rows_of(rows).map(Self::Fp8),
            Self::Int4(matrix) => Ok(Self::Int4(Box::new(matrix.rows_of(rows)))),
            Self::Transposed(matrix) => Ok(Self::Transposed(matrix.rows_of(rows))),
            Self::Mxfp4(matrix) => Ok(Self::Mxfp4(matrix.rows_of(rows))),
        }
    }

    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Plain(matrix) => matrix.view().rows(),
            Self::Fp8(matrix) => matrix.rows,
            Self::Int4(matrix) => matrix.rows(),
            Self::Transposed(matrix) => matrix.rows(),
            Self::Mxfp4(matrix) => matrix.rows(),
        }
    }

    pub(crate) fn cols(&self) -> usize {
        match self {
            Self::Plain(matrix) => matrix.view().cols(),
            Self::Fp8(matrix) => matrix.cols,
            Self::Int4(matrix) => matrix.cols(),
            Self::Transposed(matrix) => matrix.cols(),
            Self::Mxfp4(matrix) => matrix.cols(),
        }
    }

    /// The type of its [`floats`](Self::floats).
    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            Self::Plain(matrix) => matrix.view().dtype(),
            Self::Fp8(_) | Self::Mxfp4(_) => Dtype::Bf16,
            Self::Int4(matrix) => matrix.dtype(),
            Self::Transposed(matrix) => matrix.dtype(),
        }
    }

    /// The numbers, dequantized.
    pub(crate) fn floats(&self, cpu: &Cpu) -> Floats<'_> {
        let bytes = match self {
            Self::Plain(matrix) => Cow::Borrowed(matrix.bytes()),
            Self::Fp8(matrix) => Cow::Owned(matrix.to_bf16(cpu)),
            Self::Int4(matrix) => Cow::Owned(matrix.dequantized(cpu)),
            Self::Transposed(matrix) => Cow::Owned(matrix.by_output(cpu)),
            Self::Mxfp4(matrix) => Cow::Owned(matrix.dequantized(cpu)),
        };
        Floats { bytes, dtype: self.dtype(), rows: self.rows(), cols: self.cols() }
    }
}

impl Fp8Matrix {
    fn rows_of(&self, rows: Range<usize>) -> Result<Self, String> {
        let is_one_block = self.block.0 >= self.rows;
        if !is_one_block && !rows.start.is_multiple_of(self.block.0) {
            let problem = "a block of scales spans two of the parts that the matrix is cut into";
            return Err(format!("{problem} (rows from {} in blocks of {}): use an unquantized checkpoint", rows.start, self.block.0));
        }
        let across = self.cols.div_ceil(self.block.1);
        let blocks = match is_one_block {
            true => 0..1,
            false => rows.start / self.block.0..rows.end.div_ceil(self.block.0),
        };
        Ok(Self {
            bytes: self.bytes.part(rows.start * self.cols..rows.end * self.cols),
            rows: rows.len(),
            cols: self.cols,
            block: self.block,
            scales: self.scales[blocks.start * across..blocks.end * across].to_vec(),
        })
    }

    /// Each number times its scale, rounded to bf16.
    fn to_bf16(&self, cpu: &Cpu) -> Vec<u8> {
        let row_bytes = 2 * self.cols;
        let mut numbers = vec![0; self.rows * row_bytes];
        let mut rows: Vec<(usize, &mut [u8])> = numbers.chunks_exact_mut(row_bytes).enumerate().collect();
        cpu.for_each_mut(&mut rows, |(row, to)| self.write_row(*row, to.as_chunks_mut().0, u16::to_le_bytes));
        numbers
    }

    /// Writes a row's numbers: `store` converts the bits of each in bf16.
    pub(crate) fn write_row<T>(&self, row: usize, to: &mut [T], store: impl Fn(u16) -> T) {
        let across = self.cols.div_ceil(self.block.1);
        let scales = &self.scales[row / self.block.0 * across..][..across];
        for ((bytes, to), &scale) in self.row_bytes(row).chunks(self.block.1).zip(to.chunks_mut(self.block.1)).zip(scales) {
            for (&byte, to) in bytes.iter().zip(to) {
                *to = store(e4m3_to_bf16(byte, scale));
            }
        }
    }

    /// The scale of a row, if a block spans all columns.
    pub(crate) fn row_scale(&self, row: usize) -> f32 {
        assert_eq!(self.block.1, self.cols, "one scale for a row");
        self.scales[row / self.block.0]
    }

    pub(crate) fn row_bytes(&self, row: usize) -> &[u8] {
        &self.bytes.get()[row * self.cols..][..self.cols]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix `[rows, cols]` of ones in blocks of 2 × 4, each with a different scale.
    fn matrix(rows: usize, cols: usize) -> Fp8Matrix {
        let scales = (1..=rows.div_ceil(2) * cols.div_ceil(4)).map(|i| i as f32).collect();
        Fp8Matrix { bytes: Mapped::of(&vec![0x38; rows * cols]), rows, cols, block: (2, 4), scales }
    }

    #[test]
    fn rows_of_a_matrix_keep_their_scales() {
        let cpu = Cpu::new(None, 1).unwrap();
        let bytes = |matrix: &Fp8Matrix| matrix.to_bf16(&cpu);
        let all = matrix(7, 6);
        let lower = all.rows_of(4..7).unwrap();
        assert_eq!(bytes(&lower), bytes(&all)[4 * 12..]);
        assert!(all.rows_of(3..7).err().unwrap().contains("rows from 3 in blocks of 2"));
        let one_scale = Fp8Matrix { block: (7, 6), scales: vec![3.0], ..matrix(7, 6) };
        assert_eq!(bytes(&one_scale.rows_of(3..5).unwrap()), bytes(&one_scale)[3 * 12..5 * 12]);
    }

    #[test]
    fn blocks_may_be_cut_off_at_the_end_of_a_matrix() {
        let numbers = |rows, cols| {
            let bytes = matrix(rows, cols).to_bf16(&Cpu::new(None, 2).unwrap());
            tidemill_kernels::dtype::decode(Dtype::Bf16, &bytes)
        };
        let (a, b) = ([1.0, 1.0, 1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0, 4.0, 4.0]);
        assert_eq!(numbers(5, 6), [a, a, b, b, [5.0, 5.0, 5.0, 5.0, 6.0, 6.0]].concat());
        assert_eq!(numbers(1, 3), [1.0; 3]);
    }
}
