//! Weights of projections, and what they multiply, in the arithmetic that a model was loaded for.

use crate::{error::ModelError, weights::WeightMatrix};
use tidemill_kernels::{
    Cpu, Tiles, Weights, elementwise,
    int8::{self, INPUTS_MAX, Int8Output, Int8Product, Int8Rows, Int8Weights},
    matmul,
};

/// Arithmetic of all projections other than f32 with weights as they are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Quantization {
    /// Weights with a scale for each output and activations with a scale for each row, both in 8-bit integers. The embedding that
    /// tokens are looked up in stays as it is, even where the head shares it.
    Int8,
}

/// Packed weights.
pub(crate) enum Projection {
    Float(Weights),
    Int8(Int8Weights),
}

/// A projection as the file has it.
pub(crate) struct Linear {
    pub(crate) name: String,
    pub(crate) weight: WeightMatrix,
    pub(crate) bias: Option<Vec<f32>>,
}

impl Linear {
    pub(crate) fn pack(&self, cpu: &Cpu, quantize: Option<Quantization>) -> Result<Projection, ModelError> {
        match quantize {
            None => Ok(Projection::Float(Weights::new(cpu, self.weight.view(), self.bias.as_deref()))),
            Some(Quantization::Int8) => {
                self.check_inputs()?;
                Ok(Projection::Int8(Int8Weights::new(cpu, self.weight.view(), self.bias.as_deref())))
            }
        }
    }

    /// `self` as the gate of `up`.
    pub(crate) fn pack_gated(&self, up: &Linear, cpu: &Cpu, quantize: Option<Quantization>) -> Result<Projection, ModelError> {
        let parts = [self, up].map(|linear| (linear.weight.view(), linear.bias.as_deref()));
        match quantize {
            None if self.weight.dtype() != up.weight.dtype() => {
                Err(ModelError::MixedDtypes { tensor: self.name.clone(), other: up.name.clone() })
            }
            None => Ok(Projection::Float(Weights::gated(cpu, parts[0], parts[1]))),
            Some(Quantization::Int8) => {
                self.check_inputs()?;
                Ok(Projection::Int8(Int8Weights::gated(cpu, parts[0], parts[1])))
            }
        }
    }

    fn check_inputs(&self) -> Result<(), ModelError> {
        match self.weight.view().cols() {
            inputs if inputs > INPUTS_MAX => Err(ModelError::TooWideForInt8 { tensor: self.name.clone(), inputs }),
            _ => Ok(()),
        }
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

impl Default for Activations {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Activations {
    pub(crate) fn new(quantize: Option<Quantization>) -> Self {
        match quantize {
            None => Self::Float(Tiles::default()),
            Some(Quantization::Int8) => Self::Int8 { rows: Int8Rows::default(), exact: Tiles::default() },
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
        Activations::Float(x) => matmul::matmul(cpu, x, products.map(Product::into_float)),
        Activations::Int8 { rows: x, .. } => int8::matmul(cpu, x, products.map(Product::into_int8)),
    }
}

const ONE_ARITHMETIC: &str = "weights and activations of a model are of one arithmetic";

impl<'a> Product<'a> {
    fn into_float(self) -> matmul::Product<'a> {
        let Projection::Float(weights) = self.weights else { panic!("{ONE_ARITHMETIC}") };
        let to = match self.to {
            Output::Set(y) => matmul::Output::Set(y),
            Output::Add(y) => matmul::Output::Add(y),
            Output::SiluMul(Activations::Float(y)) => matmul::Output::SiluMul(y),
            Output::SiluMul(Activations::Int8 { .. }) => panic!("{ONE_ARITHMETIC}"),
        };
        matmul::Product { weights, to }
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
