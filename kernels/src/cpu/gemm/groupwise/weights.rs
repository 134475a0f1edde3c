//! Weights in 4 or 8 bits, packed once.
//!
//! Outputs go in panels of 32. A panel is one stream through memory, `[panel][group of 32 inputs][step][32 outputs]`: a step
//! is four inputs in 8 bits each, or eight in 4, of which the first four lie in the low halves of the bytes. Scales, and
//! zeros where they differ, are beside it, `[panel][group of the weights][32 outputs]`.

use super::{GROUP, Lines, STEPS_OF_4_BITS, STEPS_OF_8_BITS, Zeros};
use crate::{
    cpu::{
        Cpu,
        gemm::{
            packing::Columns,
            panel::{PANEL, PANEL_LINES},
        },
        memory::Memory,
        simd::LANES,
        threads::disjoint::Disjoint,
    },
    dtype::{Dtype, decode, encode},
    matrix::Matrix,
};
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of a weight.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bits {
    Four,
    Eight,
}

impl Bits {
    fn steps(self) -> usize {
        match self {
            Bits::Four => STEPS_OF_4_BITS,
            Bits::Eight => STEPS_OF_8_BITS,
        }
    }
}

/// A matrix `[outputs, inputs]` of unsigned integers: a number is `scale * (integer - zero)`.
pub trait GroupwiseMatrix: Sync {
    fn outputs(&self) -> usize;
    fn inputs(&self) -> usize;
    fn bits(&self) -> Bits;
    /// Consecutive inputs that share a scale and a zero: a multiple of [`GROUP`], or at least all inputs. The last group may be cut off.
    fn group(&self) -> usize;
    /// F16 or Bf16, either of which holds all scales.
    fn scale_dtype(&self) -> Dtype;
    /// Whether the integers are the 4 bits of numbers in e2m1, whose zero is [`E2M1_ZERO`](super::E2M1_ZERO), with halved scales in bf16: a
    /// number is `2 * scale * e2m1`.
    fn is_e2m1(&self) -> bool {
        false
    }
    /// Reads one output's weights into `row`, which already has the right lengths.
    fn read(&self, output: usize, row: &mut GroupwiseRow);
}

/// One output's weights.
#[derive(Default)]
pub struct GroupwiseRow {
    /// `[inputs]`
    pub integers: Vec<u8>,
    /// `[groups]`
    pub scales: Vec<f32>,
    /// `[groups]`
    pub zeros: Vec<u8>,
}

impl GroupwiseRow {
    pub fn of(matrix: &dyn GroupwiseMatrix) -> Self {
        let groups = matrix.inputs().div_ceil(matrix.group());
        Self { integers: vec![0; matrix.inputs()], scales: vec![0.0; groups], zeros: vec![0; groups] }
    }
}

/// One layer's packed weights and its biases.
pub struct GroupwiseWeights {
    memory: Memory<u8>,
    columns: Columns,
    bits: Bits,
    is_e2m1: bool,
    scale_dtype: Dtype,
    /// Groups of the activations per group of the weights.
    group: usize,
    /// Groups of the weights.
    groups: usize,
    /// `[panel][group]`; zeros beyond the last output.
    scales: Vec<[[u8; 2]; PANEL]>,
    /// The zeros in bf16, in the scales' order; empty if all are the same.
    zeros: Vec<[[u8; 2]; PANEL]>,
    zero: i32,
    /// `[panel]`
    bias: Vec<[f32; PANEL]>,
}

/// A matrix, and biases `[outputs]` or none.
type Linear<'a> = (&'a dyn GroupwiseMatrix, Option<&'a [f32]>);

impl GroupwiseWeights {
    pub fn new(cpu: &Cpu, weight: &dyn GroupwiseMatrix, bias: Option<&[f32]>) -> Self {
        Self::pack(cpu, &[(weight, bias)])
    }

    /// Packs gated weights for [`Output::Activated`](crate::cpu::gemm::Output::Activated): `gate` and `up` are of one form.
    pub fn gated(cpu: &Cpu, gate: Linear<'_>, up: Linear<'_>) -> Self {
        Self::pack(cpu, &[gate, up])
    }

    /// Whether [`gated`](Self::gated) takes the two.
    pub fn are_of_one_form(a: &dyn GroupwiseMatrix, b: &dyn GroupwiseMatrix) -> bool {
        let form = |m: &dyn GroupwiseMatrix| (m.outputs(), m.inputs(), m.bits(), m.is_e2m1(), m.group(), m.scale_dtype());
        form(a) == form(b)
    }

    fn pack(cpu: &Cpu, layers: &[Linear<'_>]) -> Self {
        let first = layers[0].0;
        assert!(layers.iter().all(|layer| Self::are_of_one_form(first, layer.0)), "gate and up are of one form");
        let shapes: Vec<_> = layers.iter().map(|(matrix, bias)| ((matrix.outputs(), matrix.inputs()), *bias)).collect();
        let columns = Columns::of_shapes(&shapes);
        let (inputs, panels, steps) = (columns.inputs, columns.panels(), first.bits().steps());
        let groups = inputs.div_ceil(first.group());
        assert!(!first.is_e2m1() || (first.bits(), first.scale_dtype()) == (Bits::Four, Dtype::Bf16), "e2m1 in 4 bits with scales in bf16");
        assert!(groups == 1 || first.group().is_multiple_of(GROUP), "groups of whole groups of the activations");
        let panel_bytes = inputs.div_ceil(GROUP) * steps * size_of::<Lines>();
        let mut memory = cpu.memory(panels * panel_bytes);
        let (mut scales, mut zeros) = (vec![[[0; 2]; PANEL]; panels * groups], vec![[[0; 2]; PANEL]; panels * groups]);
        let mut row = GroupwiseRow::of(first);
        first.read(0, &mut row);
        let (zero, has_one_zero) = (row.zeros[0], AtomicBool::new(true));
        {
            let (bytes, scales, zeros) = (Disjoint::new(memory.as_mut_slice()), Disjoint::new(&mut scales), Disjoint::new(&mut zeros));
            cpu.for_each(panels, |panel| {
                let range = panel * groups..(panel + 1) * groups;
                // SAFETY: each task has one panel's parts.
                let (bytes, scales, zeros) =
                    unsafe { (bytes.part(panel * panel_bytes..(panel + 1) * panel_bytes), scales.part(range.clone()), zeros.part(range)) };
                let mut row = GroupwiseRow::of(first);
                for column in 0..PANEL {
                    let Some((layer, output)) = columns.source(panel, column) else { continue };
                    layers[layer].0.read(output, &mut row);
                    place(first.bits(), column, &row.integers, bytes);
                    for (group, (scale, row_zero)) in row.scales.iter().zip(&row.zeros).enumerate() {
                        scales[group][column] = bytes_of(first.scale_dtype(), *scale);
                        zeros[group][column] = bytes_of(Dtype::Bf16, f32::from(*row_zero));
                    }
                    if row.zeros.iter().any(|other| *other != zero) {
                        has_one_zero.store(false, Ordering::Relaxed);
                    }
                }
            });
        }
        if has_one_zero.into_inner() {
            zeros = Vec::new();
        }
        Self {
            memory,
            bits: first.bits(),
            is_e2m1: first.is_e2m1(),
            scale_dtype: first.scale_dtype(),
            group: first.group().div_ceil(GROUP),
            groups,
            scales,
            zeros,
            zero: zero.into(),
            bias: columns.biases_of(&layers.iter().map(|(_, bias)| *bias).collect::<Vec<_>>()),
            columns,
        }
    }

    #[inline(always)]
    pub fn inputs(&self) -> usize {
        self.columns.inputs
    }

    #[inline(always)]
    pub fn outputs(&self) -> usize {
        self.columns.outputs
    }

    /// Bytes that one pass over the weights reads, with their scales and zeros.
    pub fn bytes(&self) -> usize {
        self.memory.as_slice().len() + size_of_val(&self.scales[..]) + size_of_val(&self.zeros[..])
    }

    #[inline(always)]
    pub(super) fn bits(&self) -> Bits {
        self.bits
    }

    #[inline(always)]
    pub(super) fn is_e2m1(&self) -> bool {
        self.is_e2m1
    }

    #[inline(always)]
    pub(super) fn scale_dtype(&self) -> Dtype {
        self.scale_dtype
    }

    #[inline(always)]
    pub(super) fn columns(&self) -> &Columns {
        &self.columns
    }

    #[inline(always)]
    pub(super) fn panels(&self) -> usize {
        self.bias.len()
    }

    /// A panel's steps, by groups of 32 inputs.
    #[inline(always)]
    pub(super) fn panel<const STEPS: usize>(&self, panel: usize) -> &[[Lines; STEPS]] {
        let groups = self.columns.inputs.div_ceil(GROUP);
        let lines = self.memory.as_slice().as_chunks::<4>().0.as_chunks::<LANES>().0;
        &lines.as_chunks::<PANEL_LINES>().0.as_chunks().0[panel * groups..(panel + 1) * groups]
    }

    /// The scales for one group of 32 inputs.
    #[inline(always)]
    pub(super) fn scales(&self, panel: usize, group: usize) -> &[[u8; 2]; PANEL] {
        &self.scales[panel * self.groups + group / self.group]
    }

    #[inline(always)]
    pub(super) fn zeros(&self, panel: usize, group: usize) -> Zeros<'_> {
        match self.zeros.get(panel * self.groups + group / self.group) {
            Some(zeros) => Zeros::Each(zeros),
            None => Zeros::Same(self.zero),
        }
    }

    #[inline(always)]
    pub(super) fn bias(&self, panel: usize) -> &[f32; PANEL] {
        &self.bias[panel]
    }
}

/// Stores an output's weights at their places in a panel that is still zeros.
fn place(bits: Bits, column: usize, integers: &[u8], panel: &mut [u8]) {
    let mut places = panel.as_chunks_mut::<4>().0.iter_mut().skip(column).step_by(PANEL);
    match bits {
        Bits::Eight => {
            for (quad, place) in integers.chunks(4).zip(places) {
                place[..quad.len()].copy_from_slice(quad);
            }
        }
        Bits::Four => {
            for eight in integers.chunks(8) {
                let place = places.next().expect("a place for each eight inputs");
                let (low, high) = eight.split_at(eight.len().min(4));
                place.iter_mut().zip(low).for_each(|(byte, low)| *byte |= low & 0xf);
                place.iter_mut().zip(high).for_each(|(byte, high)| *byte |= high << 4);
            }
        }
    }
}

fn bytes_of(dtype: Dtype, number: f32) -> [u8; 2] {
    encode(dtype, &[number]).try_into().expect("a type of 16 bits")
}

/// Numbers that are rounded as they are packed: in 4 bits from -8 to 7, in 8 bits from -127 to 127, in groups of 32.
pub struct Rounded<'a> {
    pub matrix: Matrix<'a>,
    pub bits: Bits,
}

impl GroupwiseMatrix for Rounded<'_> {
    fn outputs(&self) -> usize {
        self.matrix.rows()
    }

    fn inputs(&self) -> usize {
        self.matrix.cols()
    }

    fn bits(&self) -> Bits {
        self.bits
    }

    fn group(&self) -> usize {
        GROUP
    }

    fn scale_dtype(&self) -> Dtype {
        Dtype::Bf16
    }

    fn read(&self, output: usize, row: &mut GroupwiseRow) {
        let numbers = decode(self.matrix.dtype(), self.matrix.row(output));
        let (least, most, zero) = match self.bits {
            Bits::Four => (-8.0, 7.0, 8),
            Bits::Eight => (-127.0, 127.0, 128),
        };
        row.zeros.fill(zero);
        for ((numbers, integers), scale) in numbers.chunks(GROUP).zip(row.integers.chunks_mut(GROUP)).zip(&mut row.scales) {
            let extreme = numbers.iter().copied().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a });
            // In 4 bits, the number farthest from 0 becomes -8, regardless of its sign, as there is one more step on that side.
            let ideal = if self.bits == Bits::Four { extreme / least } else { extreme.abs() / most };
            *scale = decode(Dtype::Bf16, &bytes_of(Dtype::Bf16, ideal))[0];
            let inverse = if scale.abs() < 1e-30 { 0.0 } else { 1.0 / *scale };
            for (number, integer) in numbers.iter().zip(integers) {
                *integer = ((number * inverse).round_ties_even().clamp(least, most) as i32 + i32::from(zero)) as u8;
            }
        }
    }
}
