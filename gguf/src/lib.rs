//! GGUF files (version 2 and 3, of one part or several), as directories in Hugging Face's layout, which all other crates read.
//!
//! - [`mod@file`]: the container: metadata, and the places of tensors
//! - [`blocks`]: quantized blocks to floats
//! - `family`: an architecture's tensors and settings by their Hugging Face names
//! - `config`: metadata to `config.json` and `generation_config.json`
//! - `tokenizer`: metadata to `tokenizer.json` and `tokenizer_config.json`; `pieces`: SentencePiece's scores to merges
//! - `weights`: tensors, reordered, split into experts or merged
//! - [`directory`]: the whole directory, written
//!
//! Weights in blocks are expanded to bf16, except GPT-OSS's experts in MXFP4. F32, F16 and BF16 are kept.
//!
//! The format: github.com/ggml-org/ggml, docs/gguf.md.

pub mod blocks;
mod config;
pub mod directory;
mod family;
pub mod file;
mod pieces;
mod reader;
mod tokenizer;
mod weights;

use std::{io, path::PathBuf};

/// The reason why a GGUF file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("reading {path} failed: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("writing {path} failed: {source}")]
    Write { path: PathBuf, source: io::Error },
    #[error("{path} is not a usable GGUF file: {problem}")]
    Malformed { path: PathBuf, problem: String },
    #[error("{path}: tensor {tensor}: {problem}")]
    Tensor { path: PathBuf, tensor: String, problem: String },
    #[error("{path}: {problem}")]
    Unsupported { path: PathBuf, problem: String },
}
