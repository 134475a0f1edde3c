//! Packed weights and activations of projections, in the arithmetic that the model was loaded with.

use crate::{
    error::ModelError,
    norm::Norm,
    tensors::{Linear, RowOrder, Tensors},
    weight::{Floats, Weight},
};
use tidemill_kernels::{
    Cpu, Dtype,
    cpu::{
        elementwise,
        gemm::{
            Product,
            float::{self, FloatActivations, FloatWeights},
            groupwise::{self, Bits, GroupwiseActivations, GroupwiseMatrix, GroupwiseRow, GroupwiseWeights, Rounded},
            int8::{self, INPUTS_MAX, Int8Activations, Int8Weights},
        },
        layer_norm::layer_norm_into,
    },
    dtype::{decode, encode},
};

/// An override of the arithmetic that the stored weights imply.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Quantization {
    /// Weights with a scale per output and activations with a scale per row, both in 8-bit integers, after a Hadamard transform that
    /// spreads outliers. The embedding table is left as it is, even if the head shares it.
    Int8,
    /// Weights with a scale per group of 32 inputs in 4-bit integers, those of the head in 8-bit integers; activations in groups of 8 bits.
    Int4,
    /// No quantization: 4-bit weights are dequantized to 16 bits.
    Dequantize,
}

impl Quantization {
    pub const ALL: [Self; 3] = [Self::Int8, Self::Int4, Self::Dequantize];

    /// The name of the setting.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Dequantize => "dequantize",
        }
    }

    /// The quantization of this name; `Some(None)` for `none`, which keeps the arithmetic of the stored weights.
    pub fn of_name(name: &str) -> Option<Option<Self>> {
        match name {
            "none" => Some(None),
            _ => Self::ALL.into_iter().find(|quantization| quantization.name() == name).map(Some),
        }
    }
}

/// The arithmetic of a model's projections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arithmetic {
    /// In f32. Weights keep their type, but bf16 is widened.
    F32,
    /// Weights and activations in bf16, sums in f32.
    Bf16,
    Int8,
    /// Weights in 4 bits as stored, activations in groups of 8 bits. Weights of more bits are rounded to these.
    Groupwise(Bits),
}

impl Arithmetic {
    /// Weights in 4 bits.
    pub(crate) const INT4: Self = Self::Groupwise(Bits::Four);

    /// The arithmetic of a checkpoint: 4 bits if products can take its weights; bf16 if all matrices are bf16 or dequantized to it, as the
    /// other matrices of a mixed checkpoint would lose precision; else f32.
    pub(crate) fn of(tensors: &Tensors, quantize: Option<Quantization>) -> Self {
        match quantize {
            Some(Quantization::Int8) => Self::Int8,
            Some(Quantization::Int4) => Self::INT4,
            None if tensors.can_stay_in_4_bits() => Self::Groupwise(Bits::Eight),
            _ if tensors.matrices_are_bf16() => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// The head's arithmetic: rounding the head costs more accuracy than rounding any other matrix.
    pub(crate) fn of_head(self) -> Self {
        match self {
            Self::Groupwise(_) => Self::Groupwise(Bits::Eight),
            other => other,
        }
    }
}

/// Packed weights.
pub(crate) enum Projection {
    Float(FloatWeights),
    Int8(Int8Weights),
    Groupwise(Box<GroupwiseWeights>),
}

impl Projection {
    /// Bytes that one pass over the weights reads.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Float(weights) => weights.as_bytes().len(),
            Self::Int8(weights) => weights.as_bytes().len(),
            Self::Groupwise(weights) => weights.bytes(),
        }
    }

    fn float(&self) -> &FloatWeights {
        let Self::Float(weights) = self else { panic!("{ONE_ARITHMETIC}") };
        weights
    }

    fn int8(&self) -> &Int8Weights {
        let Self::Int8(weights) = self else { panic!("{ONE_ARITHMETIC}") };
        weights
    }

    fn groupwise(&self) -> &GroupwiseWeights {
        let Self::Groupwise(weights) = self else { panic!("{ONE_ARITHMETIC}") };
        weights
    }
}

impl Linear {
    pub(crate) fn pack(&self, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Projection, ModelError> {
        let bias = self.bias.as_deref();
        if let Arithmetic::Groupwise(bits) = arithmetic {
            let packed = self.in_groups(cpu, bits, |weight| GroupwiseWeights::new(cpu, weight, bias));
            return Ok(Projection::Groupwise(Box::new(packed)));
        }
        let weight = self.numbers(cpu, arithmetic)?;
        Ok(match arithmetic {
            Arithmetic::Int8 => Projection::Int8(Int8Weights::new(cpu, weight.view(), bias)),
            _ => Projection::Float(FloatWeights::new(cpu, weight.view(), bias)),
        })
    }

    /// Packs projections without biases as one, in f32, with their outputs one after the other.
    pub(crate) fn pack_together(parts: &[Linear], cpu: &Cpu) -> Result<Projection, ModelError> {
        let all = parts.iter().map(|part| part.numbers(cpu, Arithmetic::F32)).collect::<Result<Vec<_>, _>>()?;
        Ok(Projection::Float(FloatWeights::new(cpu, Floats::together(all).view(), None)))
    }

    /// Packs the transposed matrix: `[inputs, outputs]` of the one in the file.
    pub(crate) fn pack_transposed(&self, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Projection, ModelError> {
        let weight = self.numbers(cpu, arithmetic)?.transposed();
        Ok(match arithmetic {
            Arithmetic::F32 | Arithmetic::Bf16 => Projection::Float(FloatWeights::new(cpu, weight.view(), None)),
            Arithmetic::Int8 => Projection::Int8(Int8Weights::new(cpu, weight.view(), None)),
            // Groups lie along the other dimension now, so 4-bit numbers would be rounded again; 8 bits cost little beside that.
            Arithmetic::Groupwise(_) => {
                Projection::Groupwise(Box::new(GroupwiseWeights::new(cpu, &Rounded { matrix: weight.view(), bits: Bits::Eight }, None)))
            }
        })
    }

    /// Packs `self` as the gate of `up`.
    pub(crate) fn pack_gated(&self, up: &Linear, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Projection, ModelError> {
        let mixed = || ModelError::MixedDtypes { tensor: self.name.clone(), other: up.name.clone() };
        let biases = (self.bias.as_deref(), up.bias.as_deref());
        if let Arithmetic::Groupwise(bits) = arithmetic {
            let packed = self.in_groups(cpu, bits, |gate| {
                up.in_groups(cpu, bits, |up| {
                    let are_alike = GroupwiseWeights::are_of_one_form(gate, up);
                    are_alike.then(|| GroupwiseWeights::gated(cpu, (gate, biases.0), (up, biases.1)))
                })
            });
            return packed.map(|packed| Projection::Groupwise(Box::new(packed))).ok_or_else(mixed);
        }
        let (gate, up) = (self.numbers(cpu, arithmetic)?, up.numbers(cpu, arithmetic)?);
        if arithmetic != Arithmetic::Int8 && gate.dtype != up.dtype {
            return Err(mixed());
        }
        let (gate, up) = ((gate.view(), biases.0), (up.view(), biases.1));
        Ok(match arithmetic {
            Arithmetic::Int8 => Projection::Int8(Int8Weights::gated(cpu, gate, up)),
            _ => Projection::Float(FloatWeights::gated(cpu, gate, up)),
        })
    }

    /// Calls `pack` with the weight in groups: as it is if it has 4 bits, else rounded to `bits`.
    fn in_groups<T>(&self, cpu: &Cpu, bits: Bits, pack: impl FnOnce(&dyn GroupwiseMatrix) -> T) -> T {
        match &self.weight {
            Weight::Int4(matrix) if matrix.can_stay() => {
                matrix.unpack(cpu);
                return pack(&Reordered { matrix: &**matrix, order: self.order });
            }
            Weight::Mxfp4(matrix) => return pack(&Reordered { matrix, order: self.order }),
            _ => (),
        }
        let floats = self.weight.floats(cpu);
        pack(&Reordered { matrix: &Rounded { matrix: floats.view(), bits }, order: self.order })
    }

    /// The numbers of the weight as they are packed; for products in f32, bf16 is widened.
    fn numbers(&self, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Floats<'_>, ModelError> {
        if arithmetic == Arithmetic::Int8 {
            self.check_inputs()?;
        }
        let mut floats = self.weight.floats(cpu);
        if self.order != RowOrder::AsStored {
            floats = floats.reordered(self.order.outputs(self.weight.rows()), |row| self.order.stored(row));
        }
        Ok(match (arithmetic, floats.dtype) {
            (Arithmetic::F32, Dtype::Bf16) => {
                let widened = encode(Dtype::F32, &decode(Dtype::Bf16, &floats.bytes));
                floats.stored(Dtype::F32, widened)
            }
            _ => floats,
        })
    }

    fn check_inputs(&self) -> Result<(), ModelError> {
        match self.weight.cols() {
            inputs if inputs > INPUTS_MAX => Err(ModelError::TooWideForInt8 { tensor: self.name.clone(), inputs }),
            _ => Ok(()),
        }
    }
}

/// A matrix with its outputs reordered.
struct Reordered<'a> {
    matrix: &'a dyn GroupwiseMatrix,
    order: RowOrder,
}

impl GroupwiseMatrix for Reordered<'_> {
    fn outputs(&self) -> usize {
        self.order.outputs(self.matrix.outputs())
    }

    fn inputs(&self) -> usize {
        self.matrix.inputs()
    }

    fn bits(&self) -> Bits {
        self.matrix.bits()
    }

    fn group(&self) -> usize {
        self.matrix.group()
    }

    fn scale_dtype(&self) -> Dtype {
        self.matrix.scale_dtype()
    }

    fn is_e2m1(&self) -> bool {
        self.matrix.is_e2m1()
    }

    fn read(&self, output: usize, row: &mut GroupwiseRow) {
        self.matrix.read(self.order.stored(output), row);
    }
}

/// Packed activations, whose memory is reused.
pub(crate) enum Activations {
    Float(FloatActivations),
    Int8 {
        rows: Int8Activations,
        /// The numbers before they are quantized.
        exact: FloatActivations,
    },
    Groupwise {
        rows: GroupwiseActivations,
        /// The numbers before they are rounded.
        exact: FloatActivations,
    },
}

impl Activations {
    pub(crate) fn new(arithmetic: Arithmetic) -> Self {
        match arithmetic {
            Arithmetic::F32 => Self::Float(FloatActivations::for_weights(Dtype::F32)),
            Arithmetic::Bf16 => Self::Float(FloatActivations::for_weights(Dtype::Bf16)),
            Arithmetic::Int8 => Self::Int8 { rows: Int8Activations::default(), exact: FloatActivations::rows_apart() },
            Arithmetic::Groupwise(_) => Self::Groupwise { rows: GroupwiseActivations::default(), exact: FloatActivations::rows_apart() },
        }
    }

    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Float(tiles) => tiles.rows(),
            Self::Int8 { rows, .. } => rows.rows(),
            Self::Groupwise { rows, .. } => rows.rows(),
        }
    }

    /// The rows as they were packed in f32 or bf16.
    pub(crate) fn to_rows(&self) -> Vec<f32> {
        let Self::Float(activations) = self else { panic!("{ONE_ARITHMETIC}") };
        activations.to_rows()
    }

    /// Packs the rows that `write` writes.
    pub(crate) fn fill(&mut self, cpu: &Cpu, write: impl FnOnce(&mut FloatActivations)) {
        match self {
            Self::Float(tiles) => write(tiles),
            Self::Int8 { rows, exact } => {
                write(exact);
                rows.copy_from_tiles(cpu, exact);
            }
            Self::Groupwise { rows, exact } => {
                write(exact);
                rows.copy_from_tiles(cpu, exact);
            }
        }
    }

    fn float(&mut self) -> &mut FloatActivations {
        let Self::Float(activations) = self else { panic!("{ONE_ARITHMETIC}") };
        activations
    }

    fn int8(&mut self) -> &mut Int8Activations {
        let Self::Int8 { rows, .. } = self else { panic!("{ONE_ARITHMETIC}") };
        rows
    }

    fn groupwise(&mut self) -> &mut GroupwiseActivations {
        let Self::Groupwise { rows, .. } = self else { panic!("{ONE_ARITHMETIC}") };
        rows
    }

    /// Packs every row of `cols` numbers as it is.
    pub(crate) fn copy_from(&mut self, cpu: &Cpu, x: &[f32], cols: usize) {
        match self {
            Self::Float(tiles) => tiles.copy_from(cpu, x, cols),
            Self::Int8 { rows, .. } => rows.copy_from(cpu, x, cols),
            Self::Groupwise { rows, .. } => rows.copy_from(cpu, x, cols),
        }
    }

    /// Packs the norm of every row of `x`, which has as many numbers as the norm has weights.
    pub(crate) fn norm_from(&mut self, cpu: &Cpu, x: &[f32], norm: &Norm) {
        match (self, norm.centered()) {
            (Self::Float(tiles), None) => elementwise::rms_norm_into(cpu, x, &norm.weight, norm.epsilon(), tiles),
            (Self::Float(tiles), Some(norm)) => layer_norm_into(cpu, x, norm, tiles),
            (Self::Int8 { rows, .. }, None) => rows.rms_norm_from(cpu, x, &norm.weight, norm.epsilon()),
            (Self::Int8 { rows, exact }, Some(norm)) => {
                layer_norm_into(cpu, x, norm, exact);
                rows.copy_from_tiles(cpu, exact);
            }
            (Self::Groupwise { rows, .. }, None) => rows.rms_norm_from(cpu, x, &norm.weight, norm.epsilon()),
            (Self::Groupwise { rows, exact }, Some(norm)) => {
                layer_norm_into(cpu, x, norm, exact);
                rows.copy_from_tiles(cpu, exact);
            }
        }
    }
}

/// `y = x wᵀ + bias` for each of the products. All weights and activations of a model have one arithmetic.
pub(crate) fn project<const N: usize>(cpu: &Cpu, x: &Activations, products: [Product<'_, Projection, Activations>; N]) {
    match x {
        Activations::Float(x) => float::matmul(cpu, x, products.map(|product| product.map(Projection::float, Activations::float))),
        Activations::Int8 { rows: x, .. } => int8::matmul(cpu, x, products.map(|product| product.map(Projection::int8, Activations::int8))),
        Activations::Groupwise { rows: x, .. } => {
            groupwise::matmul(cpu, x, products.map(|product| product.map(Projection::groupwise, Activations::groupwise)));
        }
    }
}

const ONE_ARITHMETIC: &str = "a model's weights and activations have one arithmetic";
