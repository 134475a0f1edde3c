//! Compiled kernels on disk: compiling takes seconds, loading milliseconds.

use super::{
    CudaError,
    compile::{self, Arch, COMMON, Heads, Source},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// A folder of machine code. Processes may share it: files appear whole, under a name that commits to everything that decides their
/// contents.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// Creates the folder if it is missing.
    pub fn open(folder: &Path) -> Result<Self, CudaError> {
        fs::create_dir_all(folder).map_err(|source| CudaError::Cache { path: folder.to_owned(), source })?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// The folder, for other data about a device that may be recomputed.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Machine code of `source`: from the folder, or compiled and stored there.
    pub fn load(&self, source: &Source, arch: Arch, heads: Heads) -> Result<Vec<u8>, CudaError> {
        let path = self.folder.join(name(source, arch, heads, compile::version()?));
        match fs::read(&path) {
            Ok(bytes) => {
                if let Some(cubin) = verified(&bytes) {
                    return Ok(cubin.to_vec());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(CudaError::Cache { path, source }),
        }
        let cubin = compile::compile(source, arch, heads)?.cubin;
        store(&path, &cubin).map_err(|source| CudaError::Cache { path, source })?;
        Ok(cubin)
    }
}

fn name(source: &Source, arch: Arch, heads: Heads, version: (i32, i32)) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("tidemill kernel cache v1");
    for part in [source.text, COMMON, &compile::options(source, arch, heads).join(" "), &format!("{version:?}")] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    format!("{}-{arch}-{}.cubin", source.file.trim_end_matches(".cu"), &hasher.finalize().to_hex()[..32])
}

const HASH_BYTES: usize = 32;

/// Verifies a file, which is the hash of the code followed by the code.
fn verified(file: &[u8]) -> Option<&[u8]> {
    let (hash, cubin) = file.split_at_checked(HASH_BYTES)?;
    (blake3::hash(cubin).as_bytes() == hash).then_some(cubin)
}

fn store(path: &Path, cubin: &[u8]) -> io::Result<()> {
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    fs::write(&partial, [blake3::hash(cubin).as_bytes(), cubin].concat())?;
    fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvStorage;

    #[test]
    fn a_name_commits_to_source_device_heads_and_compiler() {
        let name_of = |arch, head_dim, version| name(&compile::ATTENTION_DECODE, arch, Heads::bf16(head_dim), version);
        let names = [
            name_of(Arch::SM_80, 128, (13, 0)),
            name_of(Arch::SM_90A, 128, (13, 0)),
            name_of(Arch::SM_80, 64, (13, 0)),
            name_of(Arch::SM_80, 128, (13, 1)),
            name(&compile::ATTENTION_DECODE, Arch::SM_80, Heads { dim: 128, kv: KvStorage::Int8 }, (13, 0)),
            name(&compile::ATTENTION_PREFILL, Arch::SM_80, Heads::bf16(128), (13, 0)),
        ];
        assert!(names.iter().enumerate().all(|(i, name)| !names[..i].contains(name)));
        let [one, other] = [64, 128].map(|dim| name(&compile::SAMPLE, Arch::SM_80, Heads::bf16(dim), (13, 0)));
        assert_eq!(one, other);
    }

    #[test]
    fn what_is_damaged_is_not_taken() {
        let folder = std::env::temp_dir().join(format!("tidemill-kernel-cache-{}", std::process::id()));
        let cache = KernelCache::open(&folder).unwrap();
        let path = cache.folder.join("x.cubin");
        store(&path, b"machine code").unwrap();
        let mut bytes = fs::read(&path).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(verified(&bytes), Some(&b"machine code"[..]));
        bytes[40] ^= 1;
        assert!(verified(&bytes).is_none() && verified(&bytes[..20]).is_none());
    }
}
