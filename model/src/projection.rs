//! Weights of projections, and what they multiply, in the arithmetic that a model was loaded for.

use crate::{error::ModelError, tensors::Linear, weights::Checkpoint};
use std::borrow::Cow;
use tidemill_kernels::{
    Cpu, Dtype, Matrix,
    cpu::{
        elementwise,
        gemm::{
            float::{self, Tiles, Weights},
            int8::{self, INPUTS_MAX, Int8Output, Int8Product, Int8Rows, Int8Weights},
        },
    },
    dtype::{decode, encode},
};

/// Arithmetic of all projections other than what their stored weights ask for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Quantization {
    /// Weights with a scale for each output and activations with a scale for each row, both in 8-bit integers. The embedding that
    /// tokens are looked up in stays as it is, even where the head shares it.
    Int8,
}

/// How all projections of a model multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arithmetic {
    /// In f32, weights as they are stored, but for bf16: that is widened.
    F32,
    /// Weights and activations in bf16, sums in f32.
    Bf16,
    Int8,
}

impl Arithmetic {
    /// bf16 if all matrices of the checkpoint are: one that mixes them with others would lose what it is precise in.
    pub(crate) fn of(checkpoint: &Checkpoint, quantize: Option<Quantization>) -> Self {
        match quantize {
            Some(Quantization::Int8) => Self::Int8,
            None if checkpoint.matrices_are_bf16() => Self::Bf16,
            None => Self::F32,
        }
    }
}

/// Packed weights.
pub(crate) enum Projection {
    Float(Weights),
    Int8(Int8Weights),
}

impl Projection {
    /// What one pass over the weights reads.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Float(weights) => weights.as_bytes().len(),
            Self::Int8(weights) => weights.as_bytes().len(),
        }
    }
}

impl Linear {
    pub(crate) fn pack(&self, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Projection, ModelError> {
        match arithmetic {
            Arithmetic::F32 => Ok(Projection::Float(Weights::new(cpu, self.widened().view(), self.bias.as_deref()))),
            Arithmetic::Bf16 => Ok(Projection::Float(Weights::new(cpu, self.weight.view(), self.bias.as_deref()))),
            Arithmetic::Int8 => {
                self.check_inputs()?;
                Ok(Projection::Int8(Int8Weights::new(cpu, self.weight.view(), self.bias.as_deref())))
            }
        }
    }

    /// `self` as the gate of `up`.
    pub(crate) fn pack_gated(&self, up: &Linear, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Projection, ModelError> {
        let parts = [self, up].map(|linear| (linear.weight.view(), linear.bias.as_deref()));
        match arithmetic {
            Arithmetic::F32 => {
                let (gate, up_weight) = (self.widened(), up.widened());
                if gate.dtype != up_weight.dtype {
                    return Err(ModelError::MixedDtypes { tensor: self.name.clone(), other: up.name.clone() });
                }
                Ok(Projection::Float(Weights::gated(cpu, (gate.view(), parts[0].1), (up_weight.view(), parts[1].1))))
            }
            Arithmetic::Bf16 => Ok(Projection::Float(Weights::gated(cpu, parts[0], parts[1]))),
            Arithmetic::Int8 => {
                self.check_inputs()?;
                Ok(Projection::Int8(Int8Weights::gated(cpu, parts[0], parts[1])))
            }
        }
    }

    /// The weight, in f32 if it is bf16.
    fn widened(&self) -> Widened<'_> {
        let view = self.weight.view();
        let (dtype, bytes) = match view.dtype() {
            Dtype::Bf16 => (Dtype::F32, Cow::Owned(encode(Dtype::F32, &decode(Dtype::Bf16, self.weight.bytes())))),
            dtype => (dtype, Cow::Borrowed(self.weight.bytes())),
        };
        Widened { bytes, dtype, rows: view.rows(), cols: view.cols() }
    }

    fn check_inputs(&self) -> Result<(), ModelError> {
        match self.weight.view().cols() {
            inputs if inputs > INPUTS_MAX => Err(ModelError::TooWideForInt8 { tensor: self.name.clone(), inputs }),
            _ => Ok(()),
        }
    }
}

/// A matrix that products in f32 can use.
struct Widened<'a> {
    bytes: Cow<'a, [u8]>,
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl Widened<'_> {
    fn view(&self) -> Matrix<'_> {
        Matrix::new(&self.bytes, self.dtype, self.rows, self.cols)
    }
}

/// Rows that projections multiply; the memory is kept from use to use.
pub(crate) enum Activations {
    Float(Tiles),
    Int8 {
        rows: Int8Rows,
        /// Room for numbers that others compute, before they are quantized.
        exact: Tiles,
    },
}

impl Activations {
    pub(crate) fn new(arithmetic: Arithmetic) -> Self {
        match arithmetic {
            Arithmetic::F32 => Self::Float(Tiles::for_weights(Dtype::F32)),
            Arithmetic::Bf16 => Self::Float(Tiles::for_weights(Dtype::Bf16)),
            Arithmetic::Int8 => Self::Int8 { rows: Int8Rows::default(), exact: Tiles::rows_apart() },
        }
    }

    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Float(tiles) => tiles.rows(),
            Self::Int8 { rows, .. } => rows.rows(),
        }
    }

    /// What `write` makes.
    pub(crate) fn fill(&mut self, cpu: &Cpu, write: impl FnOnce(&mut Tiles)) {
        match self {
            Self::Float(tiles) => write(tiles),
            Self::Int8 { rows, exact } => {
                write(exact);
                rows.copy_from_tiles(cpu, exact);
            }
        }
    }

    /// The root mean square norm of every row of `weight.len()` numbers.
    pub(crate) fn rms_norm_from(&mut self, cpu: &Cpu, x: &[f32], weight: &[f32], epsilon: f32) {
        match self {
            Self::Float(tiles) => elementwise::rms_norm_into(cpu, x, weight, epsilon, tiles),
            Self::Int8 { rows, .. } => rows.rms_norm_from(cpu, x, weight, epsilon),
        }
    }
}

/// One projection of several that share their activations.
pub(crate) struct Product<'a> {
    pub(crate) weights: &'a Projection,
    pub(crate) to: Output<'a>,
}

/// What becomes of the result, which is `[rows, outputs]`.
pub(crate) enum Output<'a> {
    Set(&'a mut [f32]),
    /// Added to what is there.
    Add(&'a mut [f32]),
    /// `silu(gate) * up`, as activations for the next projection.
    SiluMul(&'a mut Activations),
}

/// `y = x wᵀ + bias` for each of the products. A model's weights and activations are all of one arithmetic.
pub(crate) fn project<const N: usize>(cpu: &Cpu, x: &Activations, products: [Product<'_>; N]) {
    match x {
        Activations::Float(x) => float::matmul(cpu, x, products.map(Product::into_float)),
        Activations::Int8 { rows: x, .. } => int8::matmul(cpu, x, products.map(Product::into_int8)),
    }
}

const ONE_ARITHMETIC: &str = "weights and activations of a model are of one arithmetic";

impl<'a> Product<'a> {
    fn into_float(self) -> float::Product<'a> {
        let Projection::Float(weights) = self.weights else { panic!("{ONE_ARITHMETIC}") };
        let to = match self.to {
            Output::Set(y) => float::Output::Set(y),
            Output::Add(y) => float::Output::Add(y),
            Output::SiluMul(Activations::Float(y)) => float::Output::SiluMul(y),
            Output::SiluMul(Activations::Int8 { .. }) => panic!("{ONE_ARITHMETIC}"),
        };
        float::Product { weights, to }
    }

    fn into_int8(self) -> Int8Product<'a> {
        let Projection::Int8(weights) = self.weights else { panic!("{ONE_ARITHMETIC}") };
        let to = match self.to {
            Output::Set(y) => Int8Output::Set(y),
            Output::Add(y) => Int8Output::Add(y),
            Output::SiluMul(Activations::Int8 { rows: y, .. }) => Int8Output::SiluMul(y),
            Output::SiluMul(Activations::Float(_)) => panic!("{ONE_ARITHMETIC}"),
        };
        Int8Product { weights, to }
    }
}
