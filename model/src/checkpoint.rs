//! Weights as Hugging Face stores them: one safetensors file, or several with an index. Files are mapped; the tensors
//! taken from them are checked against the configuration and remembered for the digest.

use crate::{error::ModelError, json::read_json};
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::{Dtype as FileDtype, SafeTensorError, SafeTensors, tensor::Metadata};
use serde::Deserialize;
use std::{
    collections::HashMap,
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};
use tidemill_kernels::{Dtype, Matrix, dtype::decode};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Hub checkpoints of a trillion parameters have some hundreds of files.
const FILES_MAX: usize = 4096;

/// A matrix in a mapped file.
#[derive(Clone)]
pub(crate) struct WeightMatrix {
    map: Arc<Mmap>,
    range: Range<usize>,
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl WeightMatrix {
    pub(crate) fn view(&self) -> Matrix<'_> {
        Matrix::new(self.bytes(), self.dtype, self.rows, self.cols)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

/// The open files of a checkpoint.
pub(crate) struct Checkpoint {
    files: Vec<TensorFile>,
    /// Which file holds a tensor; `None` for a single file.
    index: Option<HashMap<String, usize>>,
    /// Named in the error about a missing tensor.
    looked_in: PathBuf,
    taken: Vec<Taken>,
}

struct TensorFile {
    path: PathBuf,
    map: Arc<Mmap>,
    metadata: Metadata,
    /// Where tensor bytes begin.
    data: usize,
}

/// A tensor that is part of the model.
struct Taken {
    name: String,
    map: Arc<Mmap>,
    range: Range<usize>,
    dtype: Dtype,
    shape: Vec<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Checkpoint {
    pub(crate) fn open(dir: &Path) -> Result<Self, ModelError> {
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        if index.exists() {
            return Self::open_sharded(dir, index);
        }
        if !single.exists() {
            return Err(ModelError::NoWeights { dir: dir.to_owned() });
        }
        Ok(Self { files: vec![TensorFile::open(single.clone())?], index: None, looked_in: single, taken: Vec::new() })
    }

    fn open_sharded(dir: &Path, path: PathBuf) -> Result<Self, ModelError> {
        let weight_map = read_json::<Index>(&path)?.weight_map;
        let mut names: Vec<&String> = weight_map.values().collect();
        names.sort_unstable();
        names.dedup();
        let problem = |problem| ModelError::Config { path: path.clone(), problem };
        if names.len() > FILES_MAX {
            return Err(problem(format!("{} files are more than the {FILES_MAX} that a checkpoint may have", names.len())));
        }
        if let Some(name) = names.iter().find(|name| Path::new(name).file_name().is_none_or(|file| file != name.as_str())) {
            return Err(problem(format!("{name:?} is not the name of a file beside it")));
        }
        let numbers: HashMap<&String, usize> = names.iter().enumerate().map(|(i, name)| (*name, i)).collect();
        let index = weight_map.iter().map(|(tensor, file)| (tensor.clone(), numbers[file])).collect();
        let files = names.into_iter().map(|name| TensorFile::open(dir.join(name))).collect::<Result<_, _>>()?;
        Ok(Self { files, index: Some(index), looked_in: path, taken: Vec::new() })
    }

    /// Whether every matrix in the files is stored as bf16.
    pub(crate) fn matrices_are_bf16(&self) -> bool {
        let tensors = self.files.iter().flat_map(|file| file.metadata.tensors().into_values());
        tensors.into_iter().filter(|tensor| tensor.shape.len() == 2).all(|tensor| tensor.dtype == FileDtype::BF16)
    }

    /// Takes the matrix `name`, which must be `[rows, cols]`.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<WeightMatrix, ModelError> {
        let taken = self.take(name, &[rows, cols])?;
        Ok(WeightMatrix { map: taken.map.clone(), range: taken.range.clone(), dtype: taken.dtype, rows, cols })
    }

    /// Takes the vector `name` of `len` numbers, widened to f32.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let taken = self.take(name, &[len])?;
        Ok(decode(taken.dtype, &taken.map[taken.range.clone()]))
    }

    /// Refuses a tensor of one layer more than the configuration counts: the model would compute something, but not
    /// what it was trained for.
    pub(crate) fn must_not_have(&self, name: &str) -> Result<(), ModelError> {
        match self.files.iter().find(|file| file.metadata.info(name).is_some()) {
            Some(file) => Err(ModelError::SurplusLayer { tensor: name.to_owned(), path: file.path.clone() }),
            None => Ok(()),
        }
    }

    fn take(&mut self, name: &str, expected: &[usize]) -> Result<&Taken, ModelError> {
        let missing = |path: &Path| ModelError::MissingTensor { tensor: name.to_owned(), path: path.to_owned() };
        let file = match &self.index {
            None => &self.files[0],
            Some(index) => &self.files[*index.get(name).ok_or_else(|| missing(&self.looked_in))?],
        };
        let info = file.metadata.info(name).ok_or_else(|| missing(&file.path))?;
        if info.shape != expected {
            let (tensor, path) = (name.to_owned(), file.path.clone());
            return Err(ModelError::Shape { tensor, path, found: info.shape.clone(), expected: expected.to_vec() });
        }
        let dtype = match info.dtype {
            FileDtype::F32 => Dtype::F32,
            FileDtype::F16 => Dtype::F16,
            FileDtype::BF16 => Dtype::Bf16,
            other => return Err(ModelError::Dtype { tensor: name.to_owned(), path: file.path.clone(), found: format!("{other:?}") }),
        };
        // The header was checked: the file holds exactly these bytes.
        let range = file.data + info.data_offsets.0..file.data + info.data_offsets.1;
        let name = name.to_owned();
        self.taken.push(Taken { name, map: file.map.clone(), range, dtype, shape: expected.to_vec() });
        Ok(self.taken.last().expect("just pushed"))
    }

    /// BLAKE3 over all tensors taken, in order: names, dtypes, shapes and bytes. Reads every byte once, and so brings
    /// the files into memory; `progress` gets (bytes done, bytes in all).
    pub(crate) fn digest(&self, progress: &mut dyn FnMut(u64, u64)) -> [u8; 32] {
        let total = self.taken.iter().map(|taken| taken.range.len() as u64).sum();
        let mut done = 0;
        let mut hasher = blake3::Hasher::new_derive_key("tidemill weights v1");
        for taken in &self.taken {
            let header = (&taken.name, format!("{:?}", taken.dtype), &taken.shape);
            hasher.update(&serde_json::to_vec(&header).expect("strings and numbers serialize"));
            for piece in taken.map[taken.range.clone()].chunks(PIECE_BYTES) {
                hasher.update(piece);
                done += piece.len() as u64;
                progress(done, total);
            }
        }
        *hasher.finalize().as_bytes()
    }

    /// Frees the memory that holds the files: the weights have been copied, and later look-ups read again from disk.
    pub(crate) fn release(&self) {
        for file in &self.files {
            // SAFETY: the map is read-only, so its pages hold the file's content and can be read again. Only advice: if
            // it fails, pages stay until the system needs them.
            let _ = unsafe { file.map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

/// Bytes hashed between two reports of progress: some milliseconds.
const PIECE_BYTES: usize = 32 << 20;

impl TensorFile {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        // SAFETY: the map is read-only and private to this process. Changing a checkpoint's file under a running server
        // breaks the promise that a checkpoint is immutable; every program that maps weights relies on it.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        match SafeTensors::read_metadata(&map) {
            Ok((header_bytes, metadata)) => Ok(Self { path, map: Arc::new(map), metadata, data: LENGTH_BYTES + header_bytes }),
            Err(error) => Err(ModelError::Safetensors { problem: problem(&map, error), path }),
        }
    }
}

/// Bytes of the length that begins the header.
const LENGTH_BYTES: usize = 8;

/// What is wrong with a file: if it ends early, the first tensor that is cut off.
fn problem(file: &[u8], error: SafeTensorError) -> String {
    let cut = || {
        let header_bytes = usize::try_from(u64::from_le_bytes(*file.first_chunk::<LENGTH_BYTES>()?)).ok()?;
        let end = LENGTH_BYTES.checked_add(header_bytes)?;
        let metadata: Metadata = serde_json::from_slice(file.get(LENGTH_BYTES..end)?).ok()?;
        let present = file.len() - end;
        let needed = metadata.data_len();
        let tensor =
            metadata.offset_keys().into_iter().find(|name| metadata.info(name).is_some_and(|info| info.data_offsets.1 > present))?;
        Some(format!("it is cut off within tensor {tensor} ({present} bytes of tensors where its header speaks of {needed})"))
    };
    match error {
        SafeTensorError::MetadataIncompleteBuffer => cut().unwrap_or_else(|| "it has bytes after its last tensor".into()),
        error => error.to_string(),
    }
}
