//! JSON files of a checkpoint.

use crate::error::ModelError;
use serde::de::DeserializeOwned;
use std::{fs, path::Path};

/// The largest JSON file that is read. Real ones are below 100 kB; an index of thousands of tensors is a few MB.
const JSON_BYTES_MAX: u64 = 64 << 20;

pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let bytes = fs::metadata(path).map_err(io)?.len();
    if bytes > JSON_BYTES_MAX {
        let problem = format!("{bytes} bytes are more than the {JSON_BYTES_MAX} that are read");
        return Err(ModelError::Config { path: path.to_owned(), problem });
    }
    let bytes = fs::read(path).map_err(io)?;
    if bytes.starts_with(LFS_POINTER) {
        return Err(ModelError::LfsPointer { path: path.to_owned() });
    }
    serde_json::from_slice(&bytes).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

/// The beginning of the pointer file that a clone without Git LFS has in place of a large file.
pub(crate) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
