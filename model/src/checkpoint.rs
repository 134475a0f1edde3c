//! Weights as Hugging Face stores them: one safetensors file, or several with an index. Files are mapped; the tensors
//! taken from them are checked against the configuration and remembered for the digest.

use crate::{
    error::ModelError,
    json::{LFS_POINTER, read_json_of},
    mxfp4::EXPONENT_MAX,
};
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::{
    Dtype as FileDtype, SafeTensorError, SafeTensors,
    tensor::{Metadata, TensorInfo},
};
use serde::Deserialize;
use std::{
    collections::HashMap,
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};
use tidemill_kernels::{
    Dtype, Matrix,
    dtype::{decode, is_e4m3_nan},
};
use tidemill_proto::files::INDEX_BYTES_MAX;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Mistral's own layout: all weights in one file under other names. Some repositories have it beside the other files, or alone.
const CONSOLIDATED: &str = "consolidated.safetensors";
/// Hub checkpoints of a trillion parameters have some hundreds of files.
const FILES_MAX: usize = 4096;
/// The longest header. One of 100,000 tensors in a single file has some 12 MB.
const HEADER_BYTES_MAX: u64 = 32 << 20;

/// Bytes of a mapped file.
#[derive(Clone)]
pub(crate) struct Mapped {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl Mapped {
    pub(crate) fn get(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }

    /// A part of these bytes.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.range.len(), "a part of them");
        Self { map: self.map.clone(), range: self.range.start + range.start..self.range.start + range.end }
    }

    /// Bytes in memory.
    #[cfg(test)]
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut map = memmap2::MmapMut::map_anon(bytes.len()).expect("memory");
        map.copy_from_slice(bytes);
        Self { map: Arc::new(map.make_read_only().expect("a map")), range: 0..bytes.len() }
    }
}

/// A matrix in a mapped file.
#[derive(Clone)]
pub(crate) struct WeightMatrix {
    bytes: Mapped,
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl WeightMatrix {
    pub(crate) fn view(&self) -> Matrix<'_> {
        Matrix::new(self.bytes(), self.dtype, self.rows, self.cols)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get()
    }

    pub(crate) fn rows_of(&self, rows: Range<usize>) -> Self {
        let size = self.cols * self.dtype.bytes();
        Self { bytes: self.bytes.part(rows.start * size..rows.end * size), dtype: self.dtype, rows: rows.len(), cols: self.cols }
    }
}

/// The open files of a checkpoint.
pub(crate) struct Checkpoint {
    files: Vec<TensorFile>,
    /// The file that holds each tensor; `None` for a single file.
    index: Option<HashMap<String, usize>>,
    /// The path that the error about a missing tensor names.
    looked_in: PathBuf,
    taken: Vec<Taken>,
}

struct TensorFile {
    path: PathBuf,
    map: Arc<Mmap>,
    metadata: Metadata,
    /// The offset at which tensor bytes begin.
    data: usize,
}

/// A tensor that is part of the model.
struct Taken {
    name: String,
    path: PathBuf,
    bytes: Mapped,
    numbers: Numbers,
    shape: Vec<usize>,
}

/// The format in which a tensor's numbers are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Numbers {
    Float(Dtype),
    E4m3,
    /// Packed integers.
    I32,
    /// Packed numbers of 4 bits.
    U8,
    /// Powers of two: exponents plus 127.
    E8m0,
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
            let consolidated = dir.join(CONSOLIDATED);
            return Err(match consolidated.exists() {
                true => ModelError::Consolidated { path: consolidated },
                false => ModelError::NoWeights { dir: dir.to_owned() },
            });
        }
        Ok(Self { files: vec![TensorFile::open(single.clone())?], index: None, looked_in: single, taken: Vec::new() })
    }

    fn open_sharded(dir: &Path, path: PathBuf) -> Result<Self, ModelError> {
        let weight_map = read_json_of::<Index>(&path, INDEX_BYTES_MAX)?.weight_map;
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
        let missing = names.iter().map(|name| dir.join(name)).find(|part| !part.exists());
        if let Some(part) = missing {
            return Err(ModelError::MissingPart { path: part, index: path });
        }
        for part in parts_beside(dir)?.iter().filter(|part| !names.contains(part)) {
            tracing::warn!(part, index = %path.display(), "a file beside the index is not named in it, and is not loaded");
        }
        let numbers: HashMap<&String, usize> = names.iter().enumerate().map(|(i, name)| (*name, i)).collect();
        let index = weight_map.iter().map(|(tensor, file)| (tensor.clone(), numbers[file])).collect();
        let files = names.into_iter().map(|name| TensorFile::open(dir.join(name))).collect::<Result<_, _>>()?;
        Ok(Self { files, index: Some(index), looked_in: path, taken: Vec::new() })
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_ok()
    }

    pub(crate) fn is_fp8(&self, name: &str) -> Result<bool, ModelError> {
        Ok(self.find(name)?.1.dtype == FileDtype::F8_E4M3)
    }

    /// Takes the matrix `name`, which must be `[rows, cols]`.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<WeightMatrix, ModelError> {
        let (bytes, dtype) = self.take_floats(name, &[vec![rows, cols]])?;
        Ok(WeightMatrix { bytes, dtype, rows, cols })
    }

    /// Takes the matrices `[rows, cols]` of `name`, `count` of them, as one with the rows of all.
    pub(crate) fn matrices(&mut self, name: &str, [count, rows, cols]: [usize; 3]) -> Result<WeightMatrix, ModelError> {
        let (bytes, dtype) = self.take_floats(name, &[vec![count, rows, cols]])?;
        Ok(WeightMatrix { bytes, dtype, rows: count * rows, cols })
    }

    /// Takes the FP8 matrix `name`, which must be `[rows, cols]`.
    pub(crate) fn fp8_matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Mapped, ModelError> {
        Ok(self.take(name, &[vec![rows, cols]])?.bytes.clone())
    }

    /// Takes the 32-bit integers `name`.
    pub(crate) fn integers(&mut self, name: &str, shape: Vec<usize>) -> Result<Mapped, ModelError> {
        let taken = self.take(name, &[shape])?;
        match taken.numbers {
            Numbers::I32 => Ok(taken.bytes.clone()),
            _ => {
                let (tensor, path) = (name.to_owned(), taken.path.clone());
                Err(ModelError::Tensor { tensor, path, problem: "it is not stored as I32: convert the checkpoint again".into() })
            }
        }
    }

    /// Takes the bytes `name`.
    pub(crate) fn bytes(&mut self, name: &str, shape: Vec<usize>) -> Result<Mapped, ModelError> {
        let taken = self.take(name, &[shape])?;
        match taken.numbers {
            Numbers::U8 => Ok(taken.bytes.clone()),
            _ => {
                let (tensor, path) = (name.to_owned(), taken.path.clone());
                Err(ModelError::Tensor { tensor, path, problem: "it is not stored as U8: convert the checkpoint again".into() })
            }
        }
    }

    /// Takes the scales `name` of numbers in MXFP4, stored as bytes.
    pub(crate) fn exponents(&mut self, name: &str, shape: Vec<usize>) -> Result<Mapped, ModelError> {
        let bytes = self.bytes(name, shape)?;
        self.taken.last_mut().expect("just taken").numbers = Numbers::E8m0;
        Ok(bytes)
    }

    /// Takes the tensor `name` of numbers as they are stored.
    pub(crate) fn floats(&mut self, name: &str, shape: Vec<usize>) -> Result<(Mapped, Dtype), ModelError> {
        self.take_floats(name, &[shape])
    }

    /// Takes the vector `name` of `len` numbers, widened to f32.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.scales(name, &[vec![len]])
    }

    /// Takes the tensor `name`, which must have one of these shapes, widened to f32.
    pub(crate) fn scales(&mut self, name: &str, shapes: &[Vec<usize>]) -> Result<Vec<f32>, ModelError> {
        Ok(self.numbers(name, shapes)?.0)
    }

    /// As [`scales`](Self::scales), with the type in which the numbers are stored.
    pub(crate) fn numbers(&mut self, name: &str, shapes: &[Vec<usize>]) -> Result<(Vec<f32>, Dtype), ModelError> {
        let (bytes, dtype) = self.take_floats(name, shapes)?;
        Ok((decode(dtype, bytes.get()), dtype))
    }

    /// An error about a tensor; if the tensor is missing, the error that says so.
    pub(crate) fn problem_of(&self, name: &str, problem: String) -> ModelError {
        match self.find(name) {
            Ok((file, _)) => ModelError::Tensor { tensor: name.to_owned(), path: file.path.clone(), problem },
            Err(missing) => missing,
        }
    }

    /// Refuses a tensor of one layer more than the configuration counts: the model would compute something, but not what it was trained
    /// for.
    pub(crate) fn must_not_have(&self, name: &str) -> Result<(), ModelError> {
        match self.files.iter().find(|file| file.metadata.info(name).is_some()) {
            Some(file) => Err(ModelError::SurplusLayer { tensor: name.to_owned(), path: file.path.clone() }),
            None => Ok(()),
        }
    }

    fn take_floats(&mut self, name: &str, shapes: &[Vec<usize>]) -> Result<(Mapped, Dtype), ModelError> {
        let taken = self.take(name, shapes)?;
        match taken.numbers {
            Numbers::Float(dtype) => Ok((taken.bytes.clone(), dtype)),
            Numbers::E4m3 => {
                let problem = "it is stored as F8_E4M3, but only weights of projections may be: convert the checkpoint again".into();
                Err(ModelError::Tensor { tensor: name.to_owned(), path: taken.path.clone(), problem })
            }
            other => {
                let problem = format!("it is stored as {}, where F32, F16 or BF16 is needed: convert the checkpoint again", other.name());
                Err(ModelError::Tensor { tensor: name.to_owned(), path: taken.path.clone(), problem })
            }
        }
    }

    fn find(&self, name: &str) -> Result<(&TensorFile, &TensorInfo), ModelError> {
        let missing = |path: &Path| ModelError::MissingTensor { tensor: name.to_owned(), path: path.to_owned() };
        let file = match &self.index {
            None => &self.files[0],
            Some(index) => &self.files[*index.get(name).ok_or_else(|| missing(&self.looked_in))?],
        };
        Ok((file, file.metadata.info(name).ok_or_else(|| missing(&file.path))?))
    }

    /// Takes a tensor that has one of these shapes. The error names the first of them.
    fn take(&mut self, name: &str, shapes: &[Vec<usize>]) -> Result<&Taken, ModelError> {
        let (file, info) = self.find(name)?;
        if !shapes.contains(&info.shape) {
            let (tensor, path) = (name.to_owned(), file.path.clone());
            return Err(ModelError::Shape { tensor, path, found: info.shape.clone(), expected: shapes[0].clone() });
        }
        let numbers = match info.dtype {
            FileDtype::F32 => Numbers::Float(Dtype::F32),
            FileDtype::F16 => Numbers::Float(Dtype::F16),
            FileDtype::BF16 => Numbers::Float(Dtype::Bf16),
            FileDtype::F8_E4M3 => Numbers::E4m3,
            FileDtype::I32 => Numbers::I32,
            FileDtype::U8 => Numbers::U8,
            other => return Err(ModelError::Dtype { tensor: name.to_owned(), path: file.path.clone(), found: format!("{other:?}") }),
        };
        // The header was checked: the file holds exactly these bytes.
        let range = file.data + info.data_offsets.0..file.data + info.data_offsets.1;
        let (path, bytes, shape) = (file.path.clone(), Mapped { map: file.map.clone(), range }, info.shape.clone());
        self.taken.push(Taken { name: name.to_owned(), path, bytes, numbers, shape });
        Ok(self.taken.last().expect("just pushed"))
    }

    /// BLAKE3 over all tensors taken, in order: names, dtypes, shapes and bytes. Reads every byte once, and so brings the files into
    /// memory; `progress` gets (bytes done, bytes in all). Refuses infinities and NaN.
    pub(crate) fn digest(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<[u8; 32], ModelError> {
        let total = self.taken.iter().map(|taken| taken.bytes.range.len() as u64).sum();
        let mut done = 0;
        let mut hasher = blake3::Hasher::new_derive_key("tidemill weights v1");
        for taken in &self.taken {
            let header = (&taken.name, taken.numbers.name(), &taken.shape);
            hasher.update(&serde_json::to_vec(&header).expect("strings and numbers serialize"));
            let whole = taken.bytes.get();
            for piece in whole.chunks(PIECE_BYTES) {
                if taken.numbers.any_faulty(piece) {
                    return Err(taken.faulty());
                }
                hasher.update(piece);
                done += piece.len() as u64;
                progress(done, total);
            }
        }
        Ok(*hasher.finalize().as_bytes())
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

impl Numbers {
    fn name(self) -> String {
        match self {
            Self::Float(dtype) => format!("{dtype:?}"),
            Self::E4m3 => "E4m3".into(),
            Self::I32 => "I32".into(),
            Self::U8 => "U8".into(),
            Self::E8m0 => "E8m0".into(),
        }
    }

    /// Whether the numbers include an infinity or a NaN. There is no early exit, so that the compiler vectorizes the loop.
    fn any_faulty(self, bytes: &[u8]) -> bool {
        match self {
            Self::I32 | Self::U8 => false,
            Self::E8m0 => bytes.iter().fold(false, |found, &byte| found | (byte > EXPONENT_MAX)),
            Self::E4m3 => bytes.iter().fold(false, |found, &byte| found | is_e4m3_nan(byte)),
            Self::Float(Dtype::F32) => bytes.as_chunks().0.iter().fold(false, |found, &b| found | is_faulty(u32::from_le_bytes(b), F32)),
            Self::Float(Dtype::F16) => {
                bytes.as_chunks().0.iter().fold(false, |found, &b| found | is_faulty(u16::from_le_bytes(b).into(), F16))
            }
            Self::Float(Dtype::Bf16) => {
                bytes.as_chunks().0.iter().fold(false, |found, &b| found | is_faulty(u16::from_le_bytes(b).into(), BF16))
            }
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::E4m3 | Self::U8 | Self::E8m0 => 1,
            Self::Float(Dtype::F16 | Dtype::Bf16) => 2,
            Self::I32 | Self::Float(Dtype::F32) => 4,
        }
    }
}

/// Bits of the exponent, all of which are set in infinities and NaN.
const F32: u32 = 0x7f80_0000;
const F16: u32 = 0x7c00;
const BF16: u32 = 0x7f80;

#[inline(always)]
fn is_faulty(bits: u32, exponent: u32) -> bool {
    bits & exponent == exponent
}

impl Taken {
    /// An error that names the first number that is infinite or NaN.
    fn faulty(&self) -> ModelError {
        let bytes = self.bytes.get();
        let mut each = bytes.chunks_exact(self.numbers.bytes());
        let at = each.position(|number| self.numbers.any_faulty(number)).unwrap_or_default();
        let number = &bytes[at * self.numbers.bytes()..][..self.numbers.bytes()];
        let fault = match self.numbers {
            Numbers::Float(dtype) if decode(dtype, number)[0].is_infinite() => "infinite",
            Numbers::E8m0 => "no scale of finite numbers",
            _ => "not a number",
        };
        let digits: String = number.iter().rev().map(|byte| format!("{byte:02x}")).collect();
        let problem = format!("number {at} is {fault} (0x{digits}): download or convert the checkpoint again");
        ModelError::Tensor { tensor: self.name.clone(), path: self.path.clone(), problem }
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
        if map.starts_with(LFS_POINTER) {
            return Err(ModelError::LfsPointer { path });
        }
        // The format's own bound is three times as much, and what is made of a header takes several times its bytes.
        let header_bytes = map.first_chunk::<LENGTH_BYTES>().map_or(0, |length| u64::from_le_bytes(*length));
        if header_bytes > HEADER_BYTES_MAX && header_bytes <= map.len() as u64 {
            let problem = format!("its header claims {header_bytes} bytes, more than the {HEADER_BYTES_MAX} that are read");
            return Err(ModelError::Safetensors { problem, path });
        }
        match SafeTensors::read_metadata(&map) {
            Ok((header_bytes, metadata)) => Ok(Self { path, map: Arc::new(map), metadata, data: LENGTH_BYTES + header_bytes }),
            Err(error) => Err(ModelError::Safetensors { problem: problem(&map, error), path }),
        }
    }
}

/// The names of a directory's files that look like parts of a checkpoint: `model-00001-of-00004.safetensors`.
fn parts_beside(dir: &Path) -> Result<Vec<String>, ModelError> {
    let entries = std::fs::read_dir(dir).map_err(|source| ModelError::Io { path: dir.to_owned(), source })?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_part = |name: &String| {
        let numbers =
            name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors")).and_then(|rest| rest.split_once("-of-"));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        numbers.is_some_and(|(nth, of)| is_number(nth) && is_number(of))
    };
    let mut parts: Vec<String> = names.filter(is_part).collect();
    parts.sort_unstable();
    Ok(parts)
}

/// Bytes of the length at the start of the header.
const LENGTH_BYTES: usize = 8;

/// A description of the error; if the file ends early, it names the first tensor that is cut off.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(numbers: Numbers, bytes: &[u8]) -> Taken {
        Taken { name: "w".into(), path: "m".into(), bytes: Mapped::of(bytes), numbers, shape: vec![bytes.len() / numbers.bytes()] }
    }

    #[test]
    fn a_header_is_read_up_to_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SINGLE);
        let claimed = HEADER_BYTES_MAX + 1;
        std::fs::write(&path, claimed.to_le_bytes()).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(2 * claimed).unwrap();
        let error = TensorFile::open(path).err().unwrap().to_string();
        assert!(error.contains("its header claims 33554433 bytes"), "{error}");
    }

    #[test]
    fn an_infinity_among_the_weights_is_named() {
        let f32s = |all: &[f32]| all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let halves = |all: &[u16]| all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let largest = [
            (Dtype::F32, f32s(&[f32::MAX, f32::MIN_POSITIVE])),
            (Dtype::F16, halves(&[0x7bff, 0xfbff])),
            (Dtype::Bf16, halves(&[0x7f7f, 0xff7f])),
        ];
        for (dtype, finite) in largest {
            assert!(!Numbers::Float(dtype).any_faulty(&finite), "{dtype:?}");
        }
        for (dtype, bytes, told) in [
            (Dtype::F32, f32s(&[1.0, f32::NEG_INFINITY]), "number 1 is infinite (0xff800000)"),
            (Dtype::F32, f32s(&[f32::NAN]), "number 0 is not a number (0x7fc00000)"),
            (Dtype::F16, halves(&[0, 1, 0x7c00]), "number 2 is infinite (0x7c00)"),
            (Dtype::Bf16, halves(&[0x3f80, 0xff80]), "number 1 is infinite (0xff80)"),
            (Dtype::Bf16, halves(&[0x7fc0]), "number 0 is not a number (0x7fc0)"),
        ] {
            let numbers = Numbers::Float(dtype);
            assert!(numbers.any_faulty(&bytes));
            let error = taken(numbers, &bytes).faulty().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
