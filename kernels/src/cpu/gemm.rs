//! Matrix products: activations times weights, both packed in the order in which the kernels read them.
//!
//! - [`float`]: f32, f16 and bf16 weights; [`int8`]: 8-bit integers with a scale per output; [`groupwise`]: 4- and 8-bit integers
//!   with a scale per group of inputs. Each packs its own activations and weights
//! - `micro_kernel`: a tile of rows times a panel of 32 columns; `panel`: what a panel holds, per number type
//! - `packing`: the assignment of outputs to panels; `tiling`: that of rows to tiles
//! - `dot`: sums of 8-bit products for 16 outputs at a time, per instruction set; `sources`: rows to quantize; `epilogue`: storing
//!   the product's numbers
//! - `amx`: products on matrix tiles; `prefetch`: requesting weights from memory ahead of their use; `scratch`: each
//!   thread's sums

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod amx;
mod dot;
mod epilogue;
pub mod float;
pub mod groupwise;
pub mod int8;
pub(crate) mod micro_kernel;
pub(crate) mod packing;
pub(crate) mod panel;
pub(crate) mod prefetch;
pub(crate) mod scratch;
mod sources;
pub(crate) mod tiling;

use crate::cpu::activation::Activation;

/// One product of several that share their activations. `W`: packed weights; `A`: packed activations.
pub struct Product<'a, W, A> {
    pub weights: &'a W,
    pub output: Output<'a, A>,
}

/// The destination of the result `y`, `[rows, outputs]`.
pub enum Output<'a, A> {
    Set(&'a mut [f32]),
    /// Adds `y` to the present numbers.
    Add(&'a mut [f32]),
    /// `up` gated by `activation(gate)` from gated weights, `activation(y)` from others, packed as activations for the next product.
    Activated(Activation, &'a mut A),
    /// The same numbers as they are, `[rows, outputs]`, to be packed together with others.
    ActivatedNumbers(Activation, &'a mut [f32]),
}

impl<'a, W, A> Product<'a, W, A> {
    /// The same product on the operands that `weights` and `activations` extract from these.
    pub fn map<W2, A2>(
        self,
        weights: impl FnOnce(&'a W) -> &'a W2,
        activations: impl FnOnce(&'a mut A) -> &'a mut A2,
    ) -> Product<'a, W2, A2> {
        let output = match self.output {
            Output::Set(y) => Output::Set(y),
            Output::Add(y) => Output::Add(y),
            Output::Activated(activation, y) => Output::Activated(activation, activations(y)),
            Output::ActivatedNumbers(activation, y) => Output::ActivatedNumbers(activation, y),
        };
        Product { weights: weights(self.weights), output }
    }
}

/// The product that task `index` belongs to, and the task's index within it. Tasks are numbered consecutively, `tasks(product)` for each
/// product.
fn locate<P>(products: &[P], tasks: impl Fn(&P) -> usize, mut index: usize) -> (&P, usize) {
    for product in products {
        let count = tasks(product);
        if index < count {
            return (product, index);
        }
        index -= count;
    }
    unreachable!("a task of one of the products")
}
