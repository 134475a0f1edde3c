//! JSON files of a checkpoint.

use crate::error::ModelError;
use serde::de::DeserializeOwned;
use std::path::Path;
use tidemill_proto::files::{SETTINGS_BYTES_MAX, read_at_most};

/// Reads a file of settings.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    read_json_of(path, SETTINGS_BYTES_MAX)
}

/// Reads a file of at most so many bytes.
pub fn read_json_of<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<T, ModelError> {
    let bytes = read_at_most(path, bytes_max).map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
    if bytes.starts_with(LFS_POINTER) {
        return Err(ModelError::LfsPointer { path: path.to_owned() });
    }
    serde_json::from_slice(&bytes).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

/// The beginning of the pointer file that a clone without Git LFS has in place of a large file.
pub(crate) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
