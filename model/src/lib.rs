//! One decoder for all model families, whose differences are data: from a Hugging Face directory and paged KV to
//! logits, and from logits to tokens.
//!
//! - `config`: `config.json`, checked; `family`: the differences; `generation`: end-of-sequence ids; `json`: reading
//!   such files
//! - `quantization`: the quantization of weights in `config.json`; `weight`: a projection's weight, plain or quantized
//! - `int4`, `mxfp4`: matrices in 4 bits; `stacked`: the projections of all experts in one tensor
//! - `latent`: the settings of latent attention; `recurrent`: those of layers that keep a state
//! - `rope`: rotary frequencies; `norm`: a norm's weights
//! - `checkpoint`: safetensors files, mapped and checked; their digest; `tensors`: the place of each tensor in the
//!   model
//! - `fingerprint`, `kv`: the inputs of a KV block's bytes, and its shape in the kernels' terms
//! - [`executor`]: a model on some backend with its KV blocks, as engines drive it
//! - [`cpu`], [`cuda`]: the backends; [`echo`]: a backend without a model, for measuring everything around it
//! - [`encoder`]: models that read a text as a whole, for embeddings and classes
//! - [`sampler`]: a row of logits to a token; `penalties`; `rng`: the draws; `step`: from a segment's logits to its
//!   result
//!
//! A row of logits depends on its sequence alone, bit for bit on a CPU (see `tidemill_kernels`); the token drawn from it depends on that
//! row, the sequence and (seed, index). Files are not trusted: whatever their contents, loading ends in a model or in an error that names
//! the file, the tensor or the field.

mod checkpoint;
mod config;
pub mod cpu;
pub mod cuda;
pub mod echo;
pub mod encoder;
mod error;
pub mod executor;
mod family;
mod fingerprint;
mod generation;
mod int4;
mod json;
mod kv;
mod latent;
mod mxfp4;
mod norm;
mod penalties;
mod quantization;
mod recurrent;
mod rng;
mod rope;
pub mod sampler;
mod stacked;
mod step;
mod tensors;
mod weight;

pub use config::ModelConfig;
pub use cpu::{
    CpuExecutor, Gathers, IN_FLIGHT_PER_STAGE, LaterStages, Quantization, RankedExecutor, RankedModel, StageError, StageExecutor,
    StageModel, StagedExecutor,
    forward::{Chunk, LogitRows, Logits},
    model::{LoadOptions, Model},
};
pub use cuda::CudaExecutor;
pub use echo::EchoExecutor;
pub use encoder::{Encoder, EncoderExecutor, EncoderOptions};
pub use error::ModelError;
pub use executor::{BlockBytes, DeviceCopies, Executor, ExecutorError, HostBlock, Runner};
pub use json::{read_json, read_json_of};
pub use sampler::{SamplerScratch, sample, token_logprob};
pub use tidemill_kernels::{Isa, cpu::kv::KvMemory, cuda::CudaError};
