//! The file's tensors as those of a Hugging Face directory: renamed, reordered, split into experts or merged.

use crate::{
    GgufError,
    blocks::BlockType,
    config::Config,
    family::Place,
    file::{Gguf, Tensor},
};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use std::collections::BTreeMap;

/// The fewest numbers that one thread expands at a time, in whole rows.
const NUMBERS_AT_A_TIME: usize = 1 << 16;
/// Numbers that share a scale in MXFP4, and the bytes of their bits.
const GROUP: usize = 32;
const GROUP_BYTES: usize = GROUP / 2;

/// One tensor, expanded when it is written.
pub(crate) struct Weight<'a> {
    shape: Vec<usize>,
    dtype: Dtype,
    content: Content<'a>,
}

enum Content<'a> {
    Rows(Rows<'a>),
    /// A projection of all experts.
    Experts {
        outputs: Outputs<'a>,
        form: Form,
    },
}

/// Rows of one tensor.
struct Rows<'a> {
    bytes: &'a [u8],
    kind: BlockType,
    columns: usize,
    order: Order,
    /// The number subtracted from each number.
    minus: f32,
}

#[derive(Clone, Copy)]
enum Order {
    AsStored,
    /// Rows of each head alternate between its halves in the file: the first half comes first, then the second.
    Alternating {
        head_dim: usize,
    },
}

/// The rows of each expert's outputs: those of the first tensor, or of all tensors alternating.
struct Outputs<'a> {
    tensors: Vec<&'a [u8]>,
    kind: BlockType,
    experts: usize,
    /// The rows of each tensor for one expert.
    rows: usize,
    columns: usize,
}

/// The form in which experts' outputs are written.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// Numbers, `[experts, outputs]`.
    Biases,
    /// Numbers, inputs first.
    InputsFirst,
    /// MXFP4's bits: neighbours share a byte, the first of them in its lower half. In the file, a byte's numbers are half a group apart.
    Bits,
    /// MXFP4's scales.
    Scales,
}

/// All tensors by their Hugging Face names.
pub(crate) fn all<'a>(file: &'a Gguf, config: &Config) -> Result<Vec<(String, Weight<'a>)>, GgufError> {
    let family = config.family;
    let mut named = Vec::new();
    // The tensors of each module's gate, up and down projections, by module and whether they are biases.
    let mut stacks: BTreeMap<(String, bool), [Option<&Tensor>; 3]> = BTreeMap::new();
    for tensor in file.tensors() {
        if is_setting(&tensor.name) || is_drafting(&tensor.name, config.layers) {
            continue;
        }
        let problem = |problem: String| GgufError::Tensor { path: file.path().to_owned(), tensor: tensor.name.clone(), problem };
        let place = family
            .place(&tensor.name)
            .ok_or_else(|| problem(format!("the architecture {} has no such tensor here, so it would be left out", family.name)))?;
        let is_vector = tensor.shape.len() == 1 || tensor.name.ends_with(".bias");
        if is_vector && !tensor.kind.is_plain() {
            return Err(problem(format!("it is a vector in blocks of {:?}, where plain numbers are expected", tensor.kind)));
        }
        let dimensions = |expected: std::ops::RangeInclusive<usize>| match tensor.shape.len() {
            n if expected.contains(&n) => Ok(()),
            n => Err(problem(format!("it has {n} dimensions, where {} to {} are expected", expected.start(), expected.end()))),
        };
        match place {
            Place::One(name) => {
                dimensions(1..=2)?;
                let order = order(&name, tensor, config).map_err(problem)?;
                let minus = if family.norms_plus_one && name.ends_with("norm.weight") { 1.0 } else { 0.0 };
                // A shared expert's gate, a vector in the file, is a matrix of one row in the directory.
                let shape =
                    if name.ends_with("shared_expert_gate.weight") { vec![1, tensor.shape.iter().product()] } else { tensor.shape.clone() };
                named.push((name, Weight::of_rows(file.bytes(tensor), tensor.kind, shape, order, minus)));
            }
            Place::EachExpert { module, projection } => {
                dimensions(3..=3)?;
                let bytes = file.bytes(tensor);
                let experts = bytes.chunks_exact(bytes.len() / tensor.shape[0]);
                named.extend(experts.enumerate().map(|(expert, bytes)| {
                    let weight = Weight::of_rows(bytes, tensor.kind, tensor.shape[1..].to_vec(), Order::AsStored, 0.0);
                    (format!("{module}.{expert}.{projection}.weight"), weight)
                }));
            }
            Place::AllExperts { module, projection, is_bias } => {
                let expected = if is_bias { 2 } else { 3 };
                dimensions(expected..=expected)?;
                stacks.entry((module, is_bias)).or_default()[projection as usize] = Some(tensor);
            }
        }
    }
    for ((module, is_bias), [gate, up, down]) in stacks {
        let all = |tensors: &[Option<&'a Tensor>], name: &str| match tensors.iter().copied().collect::<Option<Vec<_>>>() {
            Some(tensors) => experts(file, &tensors, &format!("{module}.{name}"), is_bias),
            None => Err(file.malformed(format!("{module} lacks one of the gate, up and down projections"))),
        };
        named.extend(all(&[gate, up], "gate_up_proj")?);
        named.extend(all(&[down], "down_proj")?);
    }
    Ok(named)
}

/// Whether a tensor is part of the settings.
fn is_setting(name: &str) -> bool {
    matches!(name, "rope_freqs.weight" | "rope_factors_long.weight" | "rope_factors_short.weight")
}

/// Whether a tensor belongs to a layer after the last.
fn is_drafting(name: &str, layers: u64) -> bool {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).and_then(|(layer, _)| layer.parse::<u64>().ok());
    layer.is_some_and(|layer| layer >= layers)
}

fn order(name: &str, tensor: &Tensor, config: &Config) -> Result<Order, String> {
    let heads = match name.rsplit('.').nth(1) {
        Some("q_proj") if config.family.interleaved => config.heads,
        Some("k_proj") if config.family.interleaved => config.kv_heads,
        _ => return Ok(Order::AsStored),
    };
    let (all, heads) = (tensor.shape[0], heads as usize);
    if !all.is_multiple_of(2 * heads) {
        return Err(format!("its {all} rows are not of {heads} heads"));
    }
    Ok(Order::Alternating { head_dim: all / heads })
}

/// The tensors of one projection of all experts, whose outputs alternate between `tensors`.
fn experts<'a>(file: &'a Gguf, tensors: &[&'a Tensor], name: &str, is_bias: bool) -> Result<Vec<(String, Weight<'a>)>, GgufError> {
    let first = tensors[0];
    if let Some(other) = tensors.iter().find(|other| other.shape != first.shape || other.kind != first.kind) {
        let problem = format!("it is {:?} of {:?}, where {} is {:?} of {:?}", other.shape, other.kind, first.name, first.shape, first.kind);
        return Err(GgufError::Tensor { path: file.path().to_owned(), tensor: other.name.clone(), problem });
    }
    let columns = if is_bias { 1 } else { first.shape[2] };
    let (experts, rows, kind) = (first.shape[0], first.shape[1], first.kind);
    let outputs = || Outputs { tensors: tensors.iter().map(|tensor| file.bytes(tensor)).collect(), kind, experts, rows, columns };
    let all = rows * tensors.len();
    let weight =
        |shape: &[usize], dtype, form| Weight { shape: shape.to_vec(), dtype, content: Content::Experts { outputs: outputs(), form } };
    Ok(match (is_bias, kind) {
        (true, _) => vec![(format!("{name}_bias"), weight(&[experts, all], Dtype::F32, Form::Biases))],
        (false, BlockType::MXFP4) => {
            let groups = columns / GROUP;
            vec![
                (format!("{name}_blocks"), weight(&[experts, all, groups, GROUP_BYTES], Dtype::U8, Form::Bits)),
                (format!("{name}_scales"), weight(&[experts, all, groups], Dtype::U8, Form::Scales)),
            ]
        }
        (false, _) => vec![(name.to_owned(), weight(&[experts, columns, all], Dtype::BF16, Form::InputsFirst))],
    })
}

impl<'a> Weight<'a> {
    fn of_rows(bytes: &'a [u8], kind: BlockType, shape: Vec<usize>, order: Order, minus: f32) -> Self {
        let dtype = match kind {
            BlockType::F32 => Dtype::F32,
            BlockType::F16 => Dtype::F16,
            _ => Dtype::BF16,
        };
        // A vector of heads' biases has rows of one number.
        let columns = match order {
            Order::Alternating { .. } if shape.len() == 1 => 1,
            _ => *shape.last().expect("one dimension at least"),
        };
        Self { shape, dtype, content: Content::Rows(Rows { bytes, kind, columns, order, minus }) }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * number_bytes(self.dtype)
    }

    pub(crate) fn expanded(&self) -> Vec<u8> {
        let mut to = vec![0; self.data_len()];
        match &self.content {
            Content::Rows(rows) => rows.expand(self.dtype, &mut to),
            Content::Experts { outputs, form } => {
                let expert_bytes = to.len() / outputs.experts;
                to.par_chunks_mut(expert_bytes).enumerate().for_each(|(expert, to)| outputs.write(expert, *form, self.dtype, to));
            }
        }
        to
    }
}

fn number_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

fn encode(dtype: Dtype, number: f32, to: &mut [u8]) {
    match dtype {
        Dtype::F32 => to.copy_from_slice(&number.to_le_bytes()),
        Dtype::F16 => to.copy_from_slice(&f16::from_f32(number).to_le_bytes()),
        _ => to.copy_from_slice(&bf16::from_f32(number).to_le_bytes()),
    }
}

impl Rows<'_> {
    /// The row of the file that belongs at `row`.
    fn source(&self, row: usize) -> usize {
        match self.order {
            Order::AsStored => row,
            Order::Alternating { head_dim } => {
                let (head, at) = (row / head_dim, row % head_dim);
                head * head_dim + 2 * (at % (head_dim / 2)) + at / (head_dim / 2)
            }
        }
    }

    fn expand(&self, dtype: Dtype, to: &mut [u8]) {
        let (columns, number_bytes, kind) = (self.columns, number_bytes(dtype), self.kind);
        let row_bytes = columns / kind.numbers() * kind.bytes();
        let rows = (NUMBERS_AT_A_TIME / columns.max(1)).max(1);
        to.par_chunks_mut(rows * columns * number_bytes).enumerate().for_each(|(piece, to)| {
            let mut numbers = vec![0.0; columns];
            for (i, to) in to.chunks_exact_mut(columns * number_bytes).enumerate() {
                let from = &self.bytes[self.source(piece * rows + i) * row_bytes..][..row_bytes];
                if kind.is_plain() && self.minus == 0.0 {
                    to.copy_from_slice(from);
                    continue;
                }
                kind.expand(from, &mut numbers);
                for (number, to) in numbers.iter().zip(to.chunks_exact_mut(number_bytes)) {
                    encode(dtype, number - self.minus, to);
                }
            }
        });
    }
}

impl Outputs<'_> {
    fn outputs(&self) -> usize {
        self.rows * self.tensors.len()
    }

    /// The bytes of an expert's output.
    fn row(&self, expert: usize, output: usize) -> &[u8] {
        let row_bytes = self.columns / self.kind.numbers() * self.kind.bytes();
        let (tensor, row) = (self.tensors[output % self.tensors.len()], output / self.tensors.len());
        &tensor[(expert * self.rows + row) * row_bytes..][..row_bytes]
    }

    fn write(&self, expert: usize, form: Form, dtype: Dtype, to: &mut [u8]) {
        let (outputs, number_bytes) = (self.outputs(), number_bytes(dtype));
        let mut numbers = vec![0.0; self.columns];
        for output in 0..outputs {
            let row = self.row(expert, output);
            match form {
                Form::Biases | Form::InputsFirst => {
                    self.kind.expand(row, &mut numbers);
                    for (input, number) in numbers.iter().enumerate() {
                        encode(dtype, *number, &mut to[(input * outputs + output) * number_bytes..][..number_bytes]);
                    }
                }
                Form::Bits => {
                    let to = &mut to[output * self.columns / 2..][..self.columns / 2];
                    let groups = row.chunks_exact(1 + GROUP_BYTES).map(|group| &group[1..]);
                    groups.zip(to.chunks_exact_mut(GROUP_BYTES)).for_each(|(from, to)| pair_neighbours(from, to));
                }
                Form::Scales => {
                    let groups = self.columns / GROUP;
                    let scales = row.chunks_exact(1 + GROUP_BYTES).map(|group| group[0]);
                    to[output * groups..][..groups].iter_mut().zip(scales).for_each(|(to, scale)| *to = scale);
                }
            }
        }
    }
}

/// Converts a group of numbers, whose byte `i` has the `i`-th number and the one half a group later, to bytes of two neighbours.
fn pair_neighbours(from: &[u8], to: &mut [u8]) {
    let number = |i: usize| if i < GROUP / 2 { from[i] & 15 } else { from[i - GROUP / 2] >> 4 };
    for (i, to) in to.iter_mut().enumerate() {
        *to = number(2 * i) | number(2 * i + 1) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_stored_by_neighbours() {
        let mut from = [0; 16];
        // The number at each place is its index modulo 16.
        (0..16).for_each(|i| from[i] = (i as u8) | (i as u8) << 4);
        let mut to = [0; 16];
        pair_neighbours(&from, &mut to);
        let expected: Vec<u8> = [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe].repeat(2);
        assert_eq!(to[..], expected[..]);
    }
}
