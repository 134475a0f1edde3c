//! The container: metadata by key, and tensors in mapped files.

use crate::{GgufError, blocks::BlockType, reader::Reader};
use memmap2::Mmap;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

const MAGIC: &[u8; 4] = b"GGUF";
/// The alignment if `general.alignment` is absent.
const ALIGNMENT: u64 = 32;
const DIMENSIONS_MAX: u32 = 4;
/// The deepest nesting of arrays; none is known in practice.
const DEPTH_MAX: u32 = 2;
/// The most parts; a model of a trillion parameters has some hundreds.
const PARTS_MAX: u64 = 4096;
/// The most tensors of all parts; a model of a trillion parameters has some thousands.
const TENSORS_MAX: usize = 1 << 17;
/// The most keys; files have some dozens.
const KEYS_MAX: usize = 1 << 16;

/// A value of the metadata. Texts and lists stay in the mapped file.
#[derive(Clone, Debug)]
pub enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    List(List<'a>),
}

/// The entries of a list, each of which was read once when the file was opened.
#[derive(Clone, Debug)]
pub struct List<'a> {
    reader: Reader<'a>,
    kind: u32,
    count: usize,
    depth: u32,
}

impl<'a> Iterator for List<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.count = self.count.checked_sub(1)?;
        value(&mut self.reader, self.kind, self.depth).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.count, Some(self.count))
    }
}

impl ExactSizeIterator for List<'_> {}

/// The place of a value in the first part: its kind and where it begins.
#[derive(Clone, Copy)]
struct Stored {
    kind: u32,
    at: usize,
}

/// A tensor: rows of `columns` numbers.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// The shape as in Hugging Face's files: numbers of the last dimension are adjacent.
    pub shape: Vec<usize>,
    pub kind: BlockType,
    part: usize,
    range: Range<usize>,
}

/// The files of a model, mapped.
pub struct Gguf {
    path: PathBuf,
    metadata: BTreeMap<String, Stored>,
    tensors: Vec<Tensor>,
    parts: Vec<(PathBuf, Mmap)>,
}

impl Gguf {
    /// Opens a file, and those beside it if it is the first of several (`…-00001-of-00003.gguf`).
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let map = map(path)?;
        let Part { metadata, tensors } = part(&map, 0).map_err(|problem| GgufError::Malformed { path: path.to_owned(), problem })?;
        let mut all = Self { path: path.to_owned(), metadata, tensors, parts: vec![(path.to_owned(), map)] };
        let count = all.number("split.count")?.unwrap_or(1);
        if count > PARTS_MAX {
            return Err(all.malformed(format!("split.count is {count}, more than the {PARTS_MAX} parts that are read")));
        }
        if all.number("split.no")?.unwrap_or(0) != 0 {
            return Err(all.malformed("it is not the first of its parts: name the one that ends with -00001-of-….gguf".into()));
        }
        for index in 1..count {
            let beside = all.beside(index, count)?;
            let map = self::map(&beside)?;
            let part = part(&map, index as usize).map_err(|problem| GgufError::Malformed { path: beside.clone(), problem })?;
            all.tensors.extend(part.tensors);
            all.parts.push((beside, map));
            if all.tensors.len() > TENSORS_MAX {
                return Err(all.malformed(format!("its parts have more than the {TENSORS_MAX} tensors that are read")));
            }
        }
        let mut names = HashSet::new();
        if let Some(twice) = all.tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
            return Err(all.malformed(format!("tensor {} is there twice", twice.name)));
        }
        Ok(all)
    }

    /// The path of another part.
    fn beside(&self, index: u64, count: u64) -> Result<PathBuf, GgufError> {
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match name.strip_suffix(&format!("-00001-of-{count:05}.gguf")) {
            Some(stem) => Ok(self.path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", index + 1))),
            None => Err(self.malformed(format!("it is one of {count} parts, but its name does not end with -00001-of-{count:05}.gguf"))),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files, the first of which is [`path`](Self::path).
    pub fn parts(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|(path, _)| path.as_path())
    }

    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The stored bytes of a tensor.
    pub fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.parts[tensor.part].1[tensor.range.clone()]
    }

    pub fn has(&self, key: &str) -> bool {
        self.metadata.contains_key(key)
    }

    pub fn number(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.read(key, "a number from 0 up", |value| match value {
            Value::Unsigned(n) => Some(n),
            Value::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        })
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.read(key, "a number", |value| match value {
            Value::Float(x) => Some(x),
            Value::Unsigned(n) => Some(n as f64),
            Value::Signed(n) => Some(n as f64),
            _ => None,
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.read(key, "a flag", |value| if let Value::Bool(flag) = value { Some(flag) } else { None })
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.read(key, "a text", |value| if let Value::Text(text) = value { Some(text) } else { None })
    }

    pub fn list(&self, key: &str) -> Result<Option<List<'_>>, GgufError> {
        self.read(key, "a list", |value| if let Value::List(list) = value { Some(list) } else { None })
    }

    fn read<'a, T>(&'a self, key: &str, kind: &str, read: impl Fn(Value<'a>) -> Option<T>) -> Result<Option<T>, GgufError> {
        let Some(&Stored { kind: stored, at }) = self.metadata.get(key) else { return Ok(None) };
        let value = value(&mut Reader::new(&self.parts[0].1).at(at), stored, 0).map_err(|problem| self.malformed(problem))?;
        read(value).map(Some).ok_or_else(|| self.malformed(format!("{key} is not {kind}")))
    }

    pub(crate) fn malformed(&self, problem: String) -> GgufError {
        GgufError::Malformed { path: self.path.clone(), problem }
    }

    pub(crate) fn unsupported(&self, problem: String) -> GgufError {
        GgufError::Unsupported { path: self.path.clone(), problem }
    }
}

fn map(path: &Path) -> Result<Mmap, GgufError> {
    let read = |source| GgufError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    // SAFETY: the file is only read; as for every model file, an operator must not change it while it is in use.
    unsafe { Mmap::map(&file) }.map_err(read)
}

struct Part {
    metadata: BTreeMap<String, Stored>,
    tensors: Vec<Tensor>,
}

/// Reads a part's header. Every range lies within `bytes`.
fn part(bytes: &[u8], index: usize) -> Result<Part, String> {
    let mut reader = Reader::new(bytes);
    if reader.take(4).ok() != Some(MAGIC) {
        return Err("it does not begin with GGUF".into());
    }
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        let other_end = if version.swap_bytes() <= 3 { " (it is for machines of the other byte order)" } else { "" };
        return Err(format!("its version is {version}; 2 and 3 are supported{other_end}"));
    }
    // A tensor's entry has at least a name's length, dimensions, a kind and an offset; a key's, two lengths and a kind.
    let tensors = at_most(TENSORS_MAX, reader.count(24, "tensors")?, "tensors")?;
    let keys = at_most(KEYS_MAX, reader.count(12, "keys")?, "keys")?;
    let (mut metadata, mut alignment) = (BTreeMap::new(), ALIGNMENT);
    for _ in 0..keys {
        let key = reader.string()?;
        let stored = Stored { kind: reader.u32()?, at: reader.position() };
        let value = value(&mut reader, stored.kind, 0).map_err(|problem| format!("{key}: {problem}"))?;
        if key == "general.alignment" {
            alignment = match value {
                Value::Unsigned(n) if n.is_power_of_two() && n <= 1 << 20 => n,
                other => return Err(format!("general.alignment is {other:?}")),
            };
        }
        if metadata.insert(key.to_owned(), stored).is_some() {
            return Err(format!("{key} is there twice"));
        }
    }
    let entries = (0..tensors).map(|_| Entry::read(&mut reader)).collect::<Result<Vec<_>, _>>()?;
    let data = (reader.position() as u64).next_multiple_of(alignment);
    let tensors = entries.into_iter().map(|entry| entry.place(index, data, bytes.len())).collect::<Result<Vec<_>, _>>()?;
    // Each lies within the file. If they shared bytes, a small file could be unpacked to any number of large weights.
    let claimed = tensors.iter().try_fold(0usize, |all, tensor| all.checked_add(tensor.range.len()));
    if claimed.is_none_or(|claimed| claimed > bytes.len()) {
        return Err(format!("its tensors share bytes: together they have more than its {}", bytes.len()));
    }
    Ok(Part { metadata, tensors })
}

fn at_most(max: usize, count: usize, things: &str) -> Result<usize, String> {
    if count > max { Err(format!("it has {count} {things}, more than the {max} that are read")) } else { Ok(count) }
}

struct Entry {
    name: String,
    shape: Vec<usize>,
    kind: u32,
    offset: u64,
}

impl Entry {
    fn read(reader: &mut Reader<'_>) -> Result<Self, String> {
        let name = reader.string()?.to_owned();
        let dimensions = reader.u32()?;
        if dimensions > DIMENSIONS_MAX {
            return Err(format!("tensor {name} has {dimensions} dimensions, more than {DIMENSIONS_MAX}"));
        }
        let mut shape = (0..dimensions)
            .map(|_| reader.u64().and_then(|n| usize::try_from(n).map_err(|_| format!("tensor {name} is too large"))))
            .collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        Ok(Self { name, shape, kind: reader.u32()?, offset: reader.u64()? })
    }

    fn place(self, part: usize, data: u64, file_bytes: usize) -> Result<Tensor, String> {
        let Self { name, shape, kind, offset } = self;
        let kind = BlockType::of(kind).map_err(|problem| format!("tensor {name}: {problem}"))?;
        if shape.contains(&0) {
            return Err(format!("tensor {name} is empty"));
        }
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(kind.numbers()) {
            return Err(format!("tensor {name} has rows of {columns} numbers, which are no whole blocks of {}", kind.numbers()));
        }
        let numbers = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let bytes = numbers.and_then(|numbers| (numbers / kind.numbers()).checked_mul(kind.bytes()));
        let range = bytes.and_then(|bytes| {
            let start = usize::try_from(data.checked_add(offset)?).ok()?;
            Some(start..start.checked_add(bytes)?)
        });
        match range {
            Some(range) if range.end <= file_bytes => Ok(Tensor { name, shape, kind, part, range }),
            _ => Err(format!("it is cut off: tensor {name} goes beyond its {file_bytes} bytes; download it again")),
        }
    }
}

/// Reads a value, and all entries of a list.
fn value<'a>(reader: &mut Reader<'a>, kind: u32, depth: u32) -> Result<Value<'a>, String> {
    Ok(match kind {
        0 => Value::Unsigned(reader.array::<1>()?[0].into()),
        1 => Value::Signed(i8::from_le_bytes(reader.array()?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(reader.array()?).into()),
        3 => Value::Signed(i16::from_le_bytes(reader.array()?).into()),
        4 => Value::Unsigned(reader.u32()?.into()),
        5 => Value::Signed(i32::from_le_bytes(reader.array()?).into()),
        6 => Value::Float(f32::from_le_bytes(reader.array()?).into()),
        7 => Value::Bool(reader.array::<1>()?[0] != 0),
        8 => Value::Text(reader.string()?),
        9 if depth < DEPTH_MAX => {
            let kind = reader.u32()?;
            let count = reader.count(bytes_at_least(kind), "entries of a list")?;
            let list = List { reader: reader.clone(), kind, count, depth: depth + 1 };
            (0..count).try_for_each(|_| value(reader, kind, depth + 1).map(drop))?;
            Value::List(list)
        }
        10 => Value::Unsigned(reader.u64()?),
        11 => Value::Signed(i64::from_le_bytes(reader.array()?)),
        12 => Value::Float(f64::from_le_bytes(reader.array()?)),
        other => return Err(format!("values of kind {other} are not known here")),
    })
}

/// The fewest bytes that a value of this kind takes.
fn bytes_at_least(kind: u32) -> usize {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        9 => 12,
        _ => 8,
    }
}

/// Tensors by name.
pub(crate) fn by_name(tensors: &[Tensor]) -> HashMap<&str, &Tensor> {
    tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}
