//! The projections of all experts of a layer in one tensor each, as GPT-OSS is published.
//!
//! ```text
//! gate_up_proj          [experts, hidden, 2 width]         outputs of the gate, alternating with those that it gates
//! gate_up_proj_bias     [experts, 2 width]
//! down_proj             [experts, width, hidden]
//! down_proj_bias        [experts, hidden]
//! ```
//!
//! In MXFP4 each of the matrices has its outputs first, and is two tensors ([`mxfp4`](crate::mxfp4)):
//!
//! ```text
//! gate_up_proj_blocks   [experts, 2 width, hidden / 32, 16]
//! gate_up_proj_scales   [experts, 2 width, hidden / 32]
//! ```

use crate::{
    checkpoint::{Checkpoint, Mapped},
    error::ModelError,
    mxfp4::{BLOCK_BYTES, GROUP, Mxfp4Matrix},
    tensors::{Linear, RowOrder},
    weight::{Storage, Weight},
};
use std::ops::Range;
use tidemill_kernels::{Cpu, Dtype};

/// One projection of all experts.
pub(crate) struct Stack {
    name: String,
    matrices: Matrices,
    /// `[experts, outputs]`
    biases: Vec<f32>,
    inputs: usize,
    outputs: usize,
}

enum Matrices {
    /// `[experts, inputs, outputs]`
    Plain { numbers: Mapped, dtype: Dtype },
    /// `[experts, outputs, groups]`
    Mxfp4 { blocks: Mapped, scales: Mapped },
}

impl Stack {
    /// Takes the projection `part` of all experts in `module`.
    pub(crate) fn take(
        checkpoint: &mut Checkpoint,
        storage: &Storage<'_>,
        module: &str,
        part: &str,
        [experts, inputs, outputs]: [usize; 3],
    ) -> Result<Self, ModelError> {
        let plain = format!("{module}.{part}");
        let [blocks, scales, biases] = ["blocks", "scales", "bias"].map(|end| format!("{plain}_{end}"));
        let is_mxfp4 = checkpoint.has(&blocks);
        let matrices = if is_mxfp4 {
            storage.check_mxfp4(checkpoint, module, &blocks)?;
            if !inputs.is_multiple_of(GROUP) {
                let problem = format!("{inputs} inputs do not fill groups of {GROUP}: convert the checkpoint again");
                return Err(checkpoint.problem_of(&blocks, problem));
            }
            let groups = inputs / GROUP;
            Matrices::Mxfp4 {
                blocks: checkpoint.bytes(&blocks, vec![experts, outputs, groups, BLOCK_BYTES])?,
                scales: checkpoint.exponents(&scales, vec![experts, outputs, groups])?,
            }
        } else {
            let (numbers, dtype) = checkpoint.floats(&plain, vec![experts, inputs, outputs])?;
            Matrices::Plain { numbers, dtype }
        };
        let biases = checkpoint.scales(&biases, &[vec![experts, outputs]])?;
        Ok(Self { name: if is_mxfp4 { blocks } else { plain }, matrices, biases, inputs, outputs })
    }

    /// Some outputs of one expert's projection.
    pub(crate) fn linear(&self, expert: usize, outputs: Outputs) -> Linear {
        let part = |tensor: &Mapped, bytes: usize| tensor.part(expert * bytes..(expert + 1) * bytes);
        let numbers = self.outputs * self.inputs;
        let weight = match &self.matrices {
            Matrices::Plain { numbers: all, dtype } => Weight::Transposed(TransposedMatrix {
                bytes: part(all, numbers * dtype.bytes()),
                dtype: *dtype,
                inputs: self.inputs,
                stored: self.outputs,
                outputs,
            }),
            Matrices::Mxfp4 { blocks, scales } => {
                let (blocks, scales) = (part(blocks, numbers / 2), part(scales, numbers / GROUP));
                Weight::Mxfp4(Mxfp4Matrix { blocks, scales, inputs: self.inputs, outputs })
            }
        };
        let bias = outputs.stored().map(|output| self.biases[expert * self.outputs + output]).collect();
        Linear { name: self.name.clone(), weight, bias: Some(bias), order: RowOrder::AsStored }
    }
}

/// Consecutive outputs of a stored matrix, or every `step`-th of them.
#[derive(Clone, Copy)]
pub(crate) struct Outputs {
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

impl Outputs {
    /// The index of output `output` in the stored matrix.
    pub(crate) fn at(self, output: usize) -> usize {
        self.first + output * self.step
    }

    pub(crate) fn stored(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |output| self.at(output))
    }

    pub(crate) fn part(self, range: Range<usize>) -> Self {
        Self { first: self.at(range.start), count: range.len(), ..self }
    }
}

/// Some outputs of a matrix `[inputs, stored]`.
pub(crate) struct TransposedMatrix {
    bytes: Mapped,
    dtype: Dtype,
    inputs: usize,
    stored: usize,
    outputs: Outputs,
}

impl TransposedMatrix {
    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Self {
        Self { bytes: self.bytes.clone(), outputs: self.outputs.part(rows), ..*self }
    }

    pub(crate) fn rows(&self) -> usize {
        self.outputs.count
    }

    pub(crate) fn cols(&self) -> usize {
        self.inputs
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The numbers as `[outputs, inputs]`.
    pub(crate) fn by_output(&self, cpu: &Cpu) -> Vec<u8> {
        let (size, row_bytes) = (self.dtype.bytes(), self.inputs * self.dtype.bytes());
        let mut numbers = vec![0; self.rows() * row_bytes];
        let parts = numbers.chunks_mut(TRANSPOSED_TOGETHER * row_bytes).enumerate();
        cpu.for_each_mut(&mut parts.collect::<Vec<_>>(), |(index, part)| {
            for (input, stored) in self.bytes.get().chunks_exact(self.stored * size).enumerate() {
                for (i, row) in part.chunks_exact_mut(row_bytes).enumerate() {
                    let output = self.outputs.at(*index * TRANSPOSED_TOGETHER + i);
                    row[input * size..][..size].copy_from_slice(&stored[output * size..][..size]);
                }
            }
        });
        numbers
    }
}

/// Outputs that share a few cache lines.
const TRANSPOSED_TOGETHER: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantization::Scheme;
    use safetensors::{Dtype as FileDtype, tensor::TensorView};
    use serde_json::json;
    use tidemill_kernels::dtype::{decode, encode};

    #[test]
    fn inputs_that_do_not_fill_groups_are_refused() {
        let (dir, blocks) = (tempfile::tempdir().unwrap(), [0; 2 * 3 * BLOCK_BYTES]);
        let tensor = TensorView::new(FileDtype::U8, vec![2, 3, 1, BLOCK_BYTES], &blocks).unwrap();
        let file = safetensors::serialize([("experts.down_proj_blocks", tensor)], None).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        let scheme = Scheme::parse(Some(&json!({"quant_method": "mxfp4"}))).unwrap();
        let storage = Storage::new(scheme.as_ref());
        let take = |inputs| {
            let mut checkpoint = Checkpoint::open(dir.path()).unwrap();
            Stack::take(&mut checkpoint, &storage, "experts", "down_proj", [2, inputs, 3]).err().expect("it is refused").to_string()
        };
        let error = take(40);
        assert!(error.contains("experts.down_proj_blocks") && error.contains("40 inputs"), "{error}");
        assert!(take(32).contains("experts.down_proj_scales"), "the next tensor is missing");
    }

    #[test]
    fn outputs_of_a_transposed_matrix_become_rows() {
        let cpu = Cpu::new(None, 2).unwrap();
        let (inputs, stored) = (3, 300);
        let numbers: Vec<f32> = (0..inputs * stored).map(|i| i as f32).collect();
        let matrix =
            |outputs| TransposedMatrix { bytes: Mapped::of(&encode(Dtype::F32, &numbers)), dtype: Dtype::F32, inputs, stored, outputs };
        let rows = |matrix: &TransposedMatrix| decode(Dtype::F32, &matrix.by_output(&cpu));
        let odd = matrix(Outputs { first: 1, step: 2, count: 150 });
        let expected: Vec<f32> = (0..150).flat_map(|i| [0, 300, 600].map(|row| (row + 2 * i + 1) as f32)).collect();
        assert_eq!(rows(&odd), expected);
        assert_eq!(rows(&odd.rows_of(70..73)), expected[210..219]);
        assert_eq!(rows(&matrix(Outputs { first: 298, step: 1, count: 2 })), [298.0, 598.0, 898.0, 299.0, 599.0, 899.0]);
    }
}
