//! One decoder, whose families differ in data: from a Hugging Face directory and paged KV to logits, and from logits to
//! tokens.
//!
//! - `config`: `config.json`, checked; `family`: what distinguishes the families; `generation`: end-of-sequence ids
//! - `rope`: rotary frequencies
//! - `weights`: safetensors files, mapped and checked; their digest
//! - [`model`]: loading, and what a loaded model tells about itself; `load_engine` (feature `shell`): by a worker's settings
//! - `projection`: weights and activations in f32 or in 8-bit integers
//! - [`forward`]: a batch of chunks through the layers, to logits
//! - [`sampler`]: a row of logits to a token; `penalties`: what came before weighs in; `rng`: the draws
//!
//! What a row of logits is depends on its sequence alone, bit for bit (see `tidemill_kernels`), and what is sampled from it
//! on that row, the sequence and (seed, index). Files are not trusted: whatever they hold, loading ends in a model or in an
//! error that names the file, the tensor or the field.

mod config;
mod error;
mod family;
pub mod forward;
mod generation;
#[cfg(feature = "shell")]
mod load_engine;
pub mod model;
mod penalties;
mod projection;
mod rng;
mod rope;
pub mod sampler;
mod weights;

pub use config::ModelConfig;
pub use error::ModelError;
pub use forward::{Chunk, LogitRows, Logits};
#[cfg(feature = "shell")]
pub use load_engine::{EngineError, load_engine};
pub use model::{LoadOptions, Model};
pub use penalties::History;
pub use projection::Quantization;
pub use sampler::{SamplerScratch, sample, token_logprob};
pub use tidemill_kernels::{Isa, KvMemory};
