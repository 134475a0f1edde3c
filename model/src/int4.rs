//! A projection's weight in 4 bits, as AWQ, GPTQ and compressed-tensors publish it.

use crate::{
    checkpoint::{Checkpoint, Mapped},
    error::ModelError,
    quantization::int4::{Int4Scheme, Packing},
};
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};
use tidemill_kernels::{
    Cpu, Dtype,
    cpu::gemm::groupwise::{Bits, GROUP, GroupwiseMatrix, GroupwiseRow},
    dtype::encode,
};

/// `[outputs, inputs]`: a number is `scale * (integer - zero)`, with a scale and a zero for each group of inputs.
pub(crate) struct Int4Matrix {
    words: Mapped,
    zeros: Option<Mapped>,
    /// Scales in the file's order: by group and output, or by output and group.
    scales: Arc<[f32]>,
    /// The type in which the file has the scales.
    dtype: Dtype,
    packing: Packing,
    /// The number of outputs in the file, some of which may be unused.
    outputs: usize,
    inputs: usize,
    /// The number of inputs per group.
    group: usize,
    /// The group of each input, if groups are not consecutive (GPTQ's `desc_act`).
    groups_of_inputs: Option<Arc<[u32]>>,
    used: Range<usize>,
    unpacked: OnceLock<Int4Rows>,
}

/// Integers, scales and zeros by output.
struct Int4Rows {
    /// `[output][inputs / 2]`, the even input in the low half.
    integers: Vec<u8>,
    /// `[output][group]`
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

/// The tensor names of a packing: the integers, zeros and scales.
fn names(packing: Packing) -> [&'static str; 3] {
    match packing {
        Packing::Awq | Packing::Gptq { .. } => ["qweight", "qzeros", "scales"],
        Packing::CompressedTensors { .. } => ["weight_packed", "weight_zero_point", "weight_scale"],
    }
}

/// The zero of formats that store none: the middle.
const MIDDLE: u8 = 8;
/// Integers in a word.
const PER_WORD: usize = 8;
/// The position of each of eight outputs in AWQ's words.
const AWQ_PLACES: [usize; PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

impl Int4Matrix {
    /// Whether a module has a weight in 4 bits.
    pub(crate) fn is_there(checkpoint: &Checkpoint, scheme: &Int4Scheme, module: &str) -> bool {
        checkpoint.has(&format!("{module}.{}", names(scheme.packing)[0]))
    }

    /// Takes a module's weight and its accompanying tensors.
    pub(crate) fn take(
        checkpoint: &mut Checkpoint,
        scheme: &Int4Scheme,
        module: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Self, ModelError> {
        let [integers, zeros, scales] = names(scheme.packing).map(|name| format!("{module}.{name}"));
        let group = scheme.group.unwrap_or(inputs).min(inputs);
        let groups = inputs.div_ceil(group);
        let whole_words = |what: &str, count: usize| match count.is_multiple_of(PER_WORD) {
            true => Ok(count / PER_WORD),
            false => {
                Err(checkpoint.problem_of(&integers, format!("{count} {what} do not fill words of eight: convert the checkpoint again")))
            }
        };
        let (words_shape, zeros_shape, scales_shape) = match scheme.packing {
            Packing::Awq => {
                let words = whole_words("outputs", outputs)?;
                (vec![inputs, words], Some(vec![groups, words]), vec![groups, outputs])
            }
            Packing::Gptq { .. } => {
                let words = whole_words("outputs", outputs)?;
                (vec![whole_words("inputs", inputs)?, outputs], Some(vec![groups, words]), vec![groups, outputs])
            }
            Packing::CompressedTensors { has_zeros } => {
                let zeros = has_zeros.then(|| vec![outputs.div_ceil(PER_WORD), groups]);
                (vec![outputs, inputs.div_ceil(PER_WORD)], zeros, vec![outputs, groups])
            }
        };
        let words = checkpoint.integers(&integers, words_shape)?;
        let zeros = zeros_shape.map(|shape| checkpoint.integers(&zeros, shape)).transpose()?;
        let (scales, dtype) = checkpoint.numbers(&scales, &[scales_shape])?;
        let groups_of_inputs = order_of(checkpoint, scheme.packing, module, inputs, group)?;
        Ok(Self {
            words,
            zeros,
            scales: scales.into(),
            dtype,
            packing: scheme.packing,
            outputs,
            inputs,
            group,
            groups_of_inputs: groups_of_inputs.map(Arc::from),
            used: 0..outputs,
            unpacked: OnceLock::new(),
        })
    }

    /// A part of its rows.
    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Self {
        Self {
            words: self.words.clone(),
            zeros: self.zeros.clone(),
            scales: self.scales.clone(),
            groups_of_inputs: self.groups_of_inputs.clone(),
            used: self.used.start + rows.start..self.used.start + rows.end,
            unpacked: OnceLock::new(),
            ..*self
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.used.len()
    }

    pub(crate) fn cols(&self) -> usize {
        self.inputs
    }

    /// The type of its numbers when they are dequantized: that of the scales, as is usual, but at most 16 bits.
    pub(crate) fn dtype(&self) -> Dtype {
        match self.dtype {
            Dtype::F16 => Dtype::F16,
            Dtype::Bf16 | Dtype::F32 => Dtype::Bf16,
        }
    }

    /// Whether products can take it as it is: its groups are consecutive and made of the activations' groups, and its scales have 16 bits.
    pub(crate) fn can_stay(&self) -> bool {
        let fits = self.group == self.inputs || self.group.is_multiple_of(GROUP);
        fits && self.groups_of_inputs.is_none() && self.dtype != Dtype::F32
    }

    fn groups(&self) -> usize {
        self.inputs.div_ceil(self.group)
    }

    fn row_bytes(&self) -> usize {
        self.inputs.div_ceil(2)
    }

    /// Reorders the integers, on all threads of `cpu`. Otherwise the first use does so on one thread.
    pub(crate) fn unpack(&self, cpu: &Cpu) {
        self.unpacked_by(|parts| cpu.for_each_mut(parts, |(first, part)| self.unpack_rows(*first, part)));
    }

    fn unpacked(&self) -> &Int4Rows {
        self.unpacked_by(|parts| parts.iter_mut().for_each(|(first, part)| self.unpack_rows(*first, part)))
    }

    /// The rows in order. `unpack` fills slices of their integers, each of which begins at the given row.
    fn unpacked_by(&self, unpack: impl FnOnce(&mut [(usize, &mut [u8])])) -> &Int4Rows {
        self.unpacked.get_or_init(|| {
            let mut integers = vec![0; self.rows() * self.row_bytes()];
            let parts = integers.chunks_mut(UNPACKED_TOGETHER * self.row_bytes()).enumerate();
            unpack(&mut parts.map(|(index, part)| (index * UNPACKED_TOGETHER, part)).collect::<Vec<_>>());
            self.with_scales(integers)
        })
    }

    fn with_scales(&self, integers: Vec<u8>) -> Int4Rows {
        let groups = self.groups();
        let places = || self.used.clone().flat_map(|output| (0..groups).map(move |group| (output, group)));
        let scale = |(output, group)| match self.packing {
            Packing::Awq | Packing::Gptq { .. } => self.scales[group * self.outputs + output],
            Packing::CompressedTensors { .. } => self.scales[output * groups + group],
        };
        Int4Rows {
            integers,
            scales: places().map(scale).collect(),
            zeros: places().map(|(output, group)| self.zero(output, group)).collect(),
        }
    }

    /// Unpacks the integers of the used rows from `first` on, as many as `to` has room for. If inputs come first, words are read in the
    /// order of the file.
    fn unpack_rows(&self, first: usize, to: &mut [u8]) {
        let row_bytes = self.row_bytes();
        let outputs = self.used.start + first..self.used.start + first + to.len() / row_bytes;
        for input in 0..self.inputs {
            for (i, output) in outputs.clone().enumerate() {
                let (word, place) = match self.packing {
                    Packing::Awq => (input * (self.outputs / PER_WORD) + output / PER_WORD, AWQ_PLACES[output % PER_WORD]),
                    Packing::Gptq { .. } => (input / PER_WORD * self.outputs + output, input % PER_WORD),
                    Packing::CompressedTensors { .. } => (output * self.inputs.div_ceil(PER_WORD) + input / PER_WORD, input % PER_WORD),
                };
                to[i * row_bytes + input / 2] |= integer(word_of(&self.words, word), place) << (4 * (input % 2));
            }
        }
    }

    fn zero(&self, output: usize, group: usize) -> u8 {
        let Some(zeros) = &self.zeros else { return MIDDLE };
        match self.packing {
            Packing::Awq => integer(word_of(zeros, group * (self.outputs / PER_WORD) + output / PER_WORD), AWQ_PLACES[output % PER_WORD]),
            Packing::Gptq { is_less_one } => {
                let word = word_of(zeros, group * (self.outputs / PER_WORD) + output / PER_WORD);
                // Whole words were decremented by as much: a zero of 0 has borrowed from its neighbour.
                let word = if is_less_one { word.wrapping_add(0x1111_1111) } else { word };
                integer(word, output % PER_WORD)
            }
            Packing::CompressedTensors { .. } => integer(word_of(zeros, output / PER_WORD * self.groups() + group), output % PER_WORD),
        }
    }

    /// A row's numbers, rounded to its [`dtype`](Self::dtype).
    pub(crate) fn row_bytes_of(&self, row: usize) -> Vec<u8> {
        let (rows, groups) = (self.unpacked(), self.groups());
        let number = |input: usize| {
            let group = self.groups_of_inputs.as_ref().map_or(input / self.group, |groups| groups[input] as usize);
            let integer = rows.integers[row * self.row_bytes() + input / 2] >> (4 * (input % 2)) & 0xf;
            rows.scales[row * groups + group] * (f32::from(integer) - f32::from(rows.zeros[row * groups + group]))
        };
        encode(self.dtype(), &(0..self.inputs).map(number).collect::<Vec<_>>())
    }

    /// All numbers, rounded to [`dtype`](Self::dtype).
    pub(crate) fn dequantized(&self, cpu: &Cpu) -> Vec<u8> {
        self.unpack(cpu);
        let row_bytes = self.inputs * self.dtype().bytes();
        let mut numbers = vec![0; self.rows() * row_bytes];
        let mut rows: Vec<_> = numbers.chunks_exact_mut(row_bytes).enumerate().collect();
        cpu.for_each_mut(&mut rows, |(row, to)| to.copy_from_slice(&self.row_bytes_of(*row)));
        numbers
    }
}

/// Rows whose words share cache lines if outputs are packed.
const UNPACKED_TOGETHER: usize = 128;

fn word_of(words: &Mapped, index: usize) -> u32 {
    u32::from_le_bytes(words.get().as_chunks().0[index])
}

fn integer(word: u32, place: usize) -> u8 {
    (word >> (4 * place) & 0xf) as u8
}

/// The group of each input, if groups are not consecutive.
fn order_of(
    checkpoint: &mut Checkpoint,
    packing: Packing,
    module: &str,
    inputs: usize,
    group: usize,
) -> Result<Option<Vec<u32>>, ModelError> {
    let name = match packing {
        Packing::Awq => return Ok(None),
        Packing::Gptq { .. } => format!("{module}.g_idx"),
        Packing::CompressedTensors { .. } => format!("{module}.weight_g_idx"),
    };
    if !checkpoint.has(&name) {
        return Ok(None);
    }
    let indices = checkpoint.integers(&name, vec![inputs])?;
    let groups: Vec<u32> = indices.get().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    if let Some((input, index)) = groups.iter().enumerate().find(|(_, index)| **index as usize >= inputs.div_ceil(group)) {
        let problem = format!("input {input} is said to be in group {}, which is not there: convert the checkpoint again", *index as i32);
        return Err(checkpoint.problem_of(&name, problem));
    }
    let is_consecutive = groups.iter().enumerate().all(|(input, index)| *index as usize == input / group);
    Ok((!is_consecutive).then_some(groups))
}

impl GroupwiseMatrix for Int4Matrix {
    fn outputs(&self) -> usize {
        self.rows()
    }

    fn inputs(&self) -> usize {
        self.inputs
    }

    fn bits(&self) -> Bits {
        Bits::Four
    }

    fn group(&self) -> usize {
        self.group
    }

    fn scale_dtype(&self) -> Dtype {
        self.dtype
    }

    fn read(&self, output: usize, row: &mut GroupwiseRow) {
        let (rows, groups) = (self.unpacked(), self.groups());
        let bytes = &rows.integers[output * self.row_bytes()..][..self.row_bytes()];
        for (pair, byte) in row.integers.chunks_mut(2).zip(bytes) {
            pair.iter_mut().zip([byte & 0xf, byte >> 4]).for_each(|(integer, half)| *integer = half);
        }
        row.scales.copy_from_slice(&rows.scales[output * groups..][..groups]);
        row.zeros.copy_from_slice(&rows.zeros[output * groups..][..groups]);
    }
}
