//! Errors of a model directory.

use std::path::PathBuf;

/// The reason why a model directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot read {path}: {source} (a model directory has config.json, tokenizer.json and *.safetensors)")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{0}")]
    Packed(String),
    #[error("{path}: {reason}")]
    Invalid { path: PathBuf, reason: String },
}
