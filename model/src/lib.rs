//! One decoder, whose families differ in data: from a Hugging Face directory and paged KV to logits, and from logits to
//! tokens.
//!
//! - `config`: `config.json`, checked; `family`: what distinguishes the families; `generation`: end-of-sequence ids
//! - `rope`: rotary frequencies
//! - `weights`: safetensors files, mapped and checked; their digest; `tensors`: what of them is where in the model
//! - [`model`]: loading, and what a loaded model tells about itself
//! - [`runner`]: a model on the device where it runs, with its KV blocks; `step`: what an engine asks of it
//! - `projection`: weights and activations in f32 or in 8-bit integers
//! - [`forward`]: a batch of chunks through the layers, to logits
//! - [`cuda`]: the same on a GPU
//! - [`sampler`]: a row of logits to a token; `penalties`: what came before weighs in; `rng`: the draws
//!
//! What a row of logits is depends on its sequence alone, bit for bit (see `tidemill_kernels`), and what is sampled from it
//! on that row, the sequence and (seed, index). Files are not trusted: whatever they hold, loading ends in a model or in an
//! error that names the file, the tensor or the field.

mod checkpoint;
mod config;
pub mod cpu;
pub mod cuda;
mod error;
pub mod executor;
mod family;
mod fingerprint;
mod generation;
mod json;
mod kv;
mod penalties;
mod rng;
mod rope;
pub mod sampler;
mod step;
mod tensors;

pub use config::ModelConfig;
pub use cpu::{
    CpuExecutor, Quantization,
    forward::{Chunk, LogitRows, Logits},
    model::{LoadOptions, Model},
};
pub use cuda::CudaExecutor;
pub use error::ModelError;
pub use executor::{BlockBytes, Executor, ExecutorError, Runner};
pub use json::read_json;
pub use sampler::{SamplerScratch, sample, token_logprob};
pub use tidemill_kernels::{Isa, cpu::kv::KvMemory, cuda::CudaError};
