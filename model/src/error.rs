//! Errors of loading a checkpoint, with their remedies.

use std::{io, path::PathBuf};
use tidemill_kernels::{KernelError, cuda::CudaError};

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot read {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} has invalid contents: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: {problem}")]
    Config { path: PathBuf, problem: String },
    #[error("{path}: architecture {found:?} is not supported; the nearest that is: {nearest}; supported are {supported}")]
    Architecture { path: PathBuf, found: String, nearest: String, supported: String },
    #[error("{dir} has neither model.safetensors nor model.safetensors.index.json: convert other weight formats to safetensors first")]
    NoWeights { dir: PathBuf },
    #[error(
        "{path} is in the layout of Mistral's own loader, which is not supported: download the model.safetensors files of the same model, or \
         convert it with transformers"
    )]
    Consolidated { path: PathBuf },
    #[error("{path} is a Git LFS pointer instead of the file that it stands for: run git lfs pull there, or download the file again")]
    LfsPointer { path: PathBuf },
    #[error("{path} is missing, although {index} names it: the download is incomplete, so fetch this file too")]
    MissingPart { path: PathBuf, index: PathBuf },
    #[error("{0}")]
    Packed(String),
    #[error("{path} is not a valid safetensors file: {problem}; download or convert it again")]
    Safetensors { path: PathBuf, problem: String },
    #[error("tensor {tensor} is missing: {path} does not have it; the checkpoint is incomplete or of another architecture")]
    MissingTensor { tensor: String, path: PathBuf },
    #[error("{path} has {tensor}, of one layer more than num_hidden_layers in config.json: the two do not belong together")]
    SurplusLayer { tensor: String, path: PathBuf },
    #[error("tensor {tensor} in {path} has shape {found:?}, but config.json asks for {expected:?}: the two do not belong together")]
    Shape { tensor: String, path: PathBuf, found: Vec<usize>, expected: Vec<usize> },
    #[error(
        "tensor {tensor} in {path} is stored as {found}: only F32, F16 and BF16 weights are supported, F8_E4M3 with scales, and 4 bits \
         in I32 or U8, so use an unquantized checkpoint or one in these"
    )]
    Dtype { tensor: String, path: PathBuf, found: String },
    #[error("tensor {tensor} in {path}: {problem}")]
    Tensor { tensor: String, path: PathBuf, problem: String },
    #[error("{module} has a weight in 4 bits, but quantization_config lists it as not quantized: convert the checkpoint again")]
    ListedInt4 { module: String },
    #[error("tensors {tensor} and {other} are stored in different types: convert the checkpoint to one type")]
    MixedDtypes { tensor: String, other: String },
    #[error(
        "tensor {tensor} has {inputs} inputs, more than the {max} whose products 32 bits hold: load the model without --quantize int8",
        max = tidemill_kernels::cpu::gemm::int8::INPUTS_MAX
    )]
    TooWideForInt8 { tensor: String, inputs: usize },
    #[error(
        "heads of {head_dim} dimensions are more than the {max} whose products with K in 8 bits 32 bits hold: load the model without \
         --kv-dtype int8",
        max = tidemill_kernels::cpu::kv::INT8_HEAD_DIM_MAX
    )]
    TooWideForInt8Kv { head_dim: usize },
    #[error("a latent in 8 bits is not supported: load the model without --kv-dtype int8")]
    LatentInInt8,
    #[error("the model cannot be split over {ranks} ranks: {problem}; choose a different --tensor-parallel, or leave it out")]
    Ranks { ranks: usize, problem: String },
    #[error("the model cannot be split over {stages} stages: {problem}; choose fewer stages, or leave them out")]
    Stages { stages: u32, problem: String },
    #[error("the GPU's kernels cannot run this: {problem}; run on the CPU (--device cpu)")]
    NotOnDevice { problem: String },
    #[error(
        "{blocks} KV blocks of {block_bytes} bytes are left to this worker on the GPU, where {taken} bytes are taken by its weights and \
         buffers and {free} are free: set --kv-memory, a larger --device-share or a smaller --step-tokens, or use a larger GPU"
    )]
    NoRoom { blocks: usize, block_bytes: usize, free: usize, taken: usize },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
