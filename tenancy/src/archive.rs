//! The archive of a coordinator's backup: a tar file that says what it is at its beginning, and what all of it should be at its end.
//!
//! ```text
//! manifest.json   whose backup it is, of when, in which format
//! …               files, by their paths in a data directory
//! sums.json       size and digest (BLAKE3) of each file before it
//! ```
//!
//! Both sides work as a stream: a file of any size takes a small buffer.

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

/// The format that this version writes and reads.
pub const FORMAT: u32 = 1;
/// The file with the records of the registry, to be made again by the coordinator that finds it in its data directory.
pub const RECORDS: &str = "records.json";
/// The file, beside the usage log, with the orders to erase that were carried out.
pub const ERASED: &str = "erasures.json";
const MANIFEST: &str = "manifest.json";
const SUMS: &str = "sums.json";
/// The largest manifest, and the largest list of sums: some 400,000 files.
const JSON_BYTES_MAX: u64 = 64 << 20;
const BUFFER_BYTES: usize = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    /// The version of the program that wrote it.
    pub version: String,
    /// The name of the coordinator.
    pub coordinator: String,
    /// The number of coordinators that agreed on the records.
    pub coordinators: usize,
    /// The time at which it was taken, in Unix seconds.
    pub taken: u64,
    /// The stores that are elsewhere, and are not in it.
    pub left_out: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    blake3: String,
}

/// The reason why an archive is not used.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("this is no backup of Tidemill: it does not begin with a manifest")]
    NotOurs,
    #[error("this backup has format {found}, and this version reads format {FORMAT}: restore it with version {version}, which wrote it")]
    Format { found: u32, version: String },
    #[error("this backup is damaged, so nothing of it is used: {0}. Take another copy of it, or an earlier backup")]
    Damaged(String),
    #[error("{0}")]
    File(#[from] io::Error),
}

/// Writes an archive.
pub struct Writer<W: Write> {
    tar: tar::Builder<W>,
    sums: BTreeMap<String, Sum>,
    taken: u64,
}

impl<W: Write> Writer<W> {
    pub fn new(to: W, manifest: &Manifest) -> io::Result<Self> {
        let mut writer = Self { tar: tar::Builder::new(to), sums: BTreeMap::new(), taken: manifest.taken };
        let manifest = serde_json::to_vec(manifest)?;
        writer.append(MANIFEST, manifest.len() as u64, &manifest[..])?;
        Ok(writer)
    }

    /// Adds a file, as long as it is now: one that is only appended to may grow meanwhile.
    pub fn file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        self.append(name, bytes, file)
    }

    /// Writes the sums, and the end. Without it the archive is not whole.
    pub fn finish(mut self) -> io::Result<W> {
        let sums = serde_json::to_vec(&self.sums)?;
        self.append(SUMS, sums.len() as u64, &sums[..])?;
        self.tar.into_inner()
    }

    fn append(&mut self, name: &str, bytes: u64, from: impl Read) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(bytes);
        header.set_mode(0o600);
        header.set_mtime(self.taken);
        let mut hashing = Hashing::new(from.take(bytes));
        self.tar.append_data(&mut header, name, &mut hashing)?;
        let sum = hashing.sum();
        if sum.bytes != bytes {
            return Err(io::Error::other(format!("{name} has become shorter while it was read")));
        }
        self.sums.insert(name.to_owned(), sum);
        Ok(())
    }
}

/// Reads a whole archive, and checks it. `place` says where a file's bytes go. Before the end nothing may be used.
pub fn read<W: Write>(from: impl Read, mut place: impl FnMut(&str) -> io::Result<W>) -> Result<Manifest, ArchiveError> {
    let mut tar = tar::Archive::new(from);
    let (mut manifest, mut found) = (None, BTreeMap::new());
    for entry in tar.entries()? {
        let Entry { name, bytes, content } = Entry::of(entry, manifest.is_some())?;
        let mut content = Hashing::new(content);
        let Some(manifest) = &manifest else {
            manifest = Some(read_manifest(&name, &mut content)?);
            found.insert(name, content.sum());
            continue;
        };
        if name == SUMS {
            let sums = json(&mut content).map_err(|error| damaged(format!("its sums cannot be read: {error}")))?;
            compare(&sums, &found)?;
            return Ok(Manifest::clone(manifest));
        }
        check_name(&name)?;
        let mut to = place(&name)?;
        copy(&name, &mut content, &mut to)?;
        to.flush()?;
        if content.bytes < bytes {
            return Err(damaged(format!("it ends too early, in the middle of {name}")));
        }
        if found.insert(name.clone(), content.sum()).is_some() {
            return Err(damaged(format!("it has {name} twice")));
        }
    }
    Err(if manifest.is_some() { damaged("it ends too early".into()) } else { ArchiveError::NotOurs })
}

/// An entry of a tar file.
struct Entry<R> {
    name: String,
    bytes: u64,
    content: R,
}

impl<'a, R: 'a + Read> Entry<tar::Entry<'a, R>> {
    fn of(entry: io::Result<tar::Entry<'a, R>>, is_ours: bool) -> Result<Self, ArchiveError> {
        // A file that is no tar file at all fails here as well.
        let broken = |problem: String| if is_ours { damaged(problem) } else { ArchiveError::NotOurs };
        let content = entry.map_err(|error| broken(error.to_string()))?;
        let name = String::from_utf8(content.path_bytes().into_owned()).map_err(|_| broken("the name of a file is no text".into()))?;
        let bytes = content.size();
        match content.header().entry_type() {
            tar::EntryType::Regular => Ok(Self { name, bytes, content }),
            other => Err(broken(format!("{name} is no file, but {other:?}"))),
        }
    }
}

fn damaged(problem: String) -> ArchiveError {
    ArchiveError::Damaged(problem)
}

fn read_manifest(name: &str, content: &mut impl Read) -> Result<Manifest, ArchiveError> {
    if name != MANIFEST {
        return Err(ArchiveError::NotOurs);
    }
    #[derive(Deserialize)]
    struct Format {
        format: u32,
        version: String,
    }
    let manifest: serde_json::Value = json(content).map_err(|error| damaged(format!("its manifest cannot be read: {error}")))?;
    let Format { format, version } = Format::deserialize(&manifest).map_err(|_| ArchiveError::NotOurs)?;
    if format != FORMAT {
        return Err(ArchiveError::Format { found: format, version });
    }
    serde_json::from_value(manifest).map_err(|error| damaged(format!("its manifest cannot be read: {error}")))
}

fn json<T: serde::de::DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut text = Vec::new();
    from.take(JSON_BYTES_MAX).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Refuses names that lead out of the directory.
fn check_name(name: &str) -> Result<(), ArchiveError> {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
    if name.split('/').all(is_plain) { Ok(()) } else { Err(damaged(format!("a file cannot have the name {name:?}"))) }
}

/// Copies a file. An error of the archive is told from one of the disk.
fn copy(name: &str, from: &mut impl Read, to: &mut impl Write) -> Result<(), ArchiveError> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => to.write_all(&buffer[..read])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(damaged(format!("{name} cannot be read: {error}"))),
        }
    }
}

fn compare(sums: &BTreeMap<String, Sum>, found: &BTreeMap<String, Sum>) -> Result<(), ArchiveError> {
    let differs = sums.iter().find(|(name, sum)| found.get(*name) != Some(sum)).map(|(name, _)| name);
    match differs.or_else(|| found.keys().find(|name| !sums.contains_key(*name))) {
        Some(name) => Err(damaged(format!("{name} is not what was written"))),
        None => Ok(()),
    }
}

/// A reader that hashes what it reads.
struct Hashing<R> {
    from: R,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<R> Hashing<R> {
    fn new(from: R) -> Self {
        Self { from, hasher: blake3::Hasher::new(), bytes: 0 }
    }

    fn sum(&self) -> Sum {
        Sum { bytes: self.bytes, blake3: self.hasher.finalize().to_hex().to_string() }
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        self.bytes += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest { format: FORMAT, version: "0.1.0".into(), coordinator: "c0".into(), coordinators: 1, taken: 5, left_out: Vec::new() }
    }

    const FILES: [(&str, usize); 3] = [("responses.sqlite", 3000), ("usage/000000000001.sqlite", 512), ("batches/files/a", 0)];

    fn archive(manifest: &Manifest) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(Vec::new(), manifest).unwrap();
        for (number, (name, bytes)) in FILES.into_iter().enumerate() {
            let path = dir.path().join(number.to_string());
            std::fs::write(&path, vec![number as u8 + 1; bytes]).unwrap();
            writer.file(name, &path).unwrap();
        }
        writer.finish().unwrap()
    }

    /// The outcome, and the sizes of the files that were read.
    fn read_all(bytes: &[u8]) -> (Result<Manifest, ArchiveError>, Vec<String>) {
        let mut names = Vec::new();
        let outcome = read(bytes, |name| {
            names.push(name.to_owned());
            Ok(io::sink())
        });
        (outcome, names)
    }

    #[test]
    fn what_was_written_is_read() {
        let (outcome, names) = read_all(&archive(&manifest()));
        assert_eq!(outcome.unwrap(), manifest());
        assert_eq!(names, FILES.map(|(name, _)| name));
    }

    #[test]
    fn a_cut_archive_is_refused_wherever_it_was_cut() {
        let whole = archive(&manifest());
        // The end of a tar file is two empty blocks, which the sums make unnecessary.
        let needed = whole.len() - 1024;
        for length in (0..needed - 512).step_by(101) {
            assert!(read_all(&whole[..length]).0.is_err(), "{length} of {}", whole.len());
        }
        let cut = read_all(&whole[..2048]).0.unwrap_err().to_string();
        assert!(cut.contains("ends too early"), "{cut}");
    }

    #[test]
    fn no_flipped_bit_of_a_file_goes_unnoticed() {
        let whole = archive(&manifest());
        let original = read_all(&whole).1;
        for place in (0..whole.len() - 1024).step_by(7) {
            let mut flipped = whole.clone();
            flipped[place] ^= 1 << (place % 8);
            let (outcome, names) = read_all(&flipped);
            // A bit of the padding between files belongs to none.
            assert!(outcome.is_err() || (names == original && outcome.unwrap() == manifest()), "byte {place}");
        }
        let mut flipped = whole;
        flipped[2600] ^= 1;
        let error = read_all(&flipped).0.unwrap_err().to_string();
        assert!(error.contains("responses.sqlite is not what was written"), "{error}");
    }

    #[test]
    fn another_format_and_another_file_are_named() {
        let error = read_all(&archive(&Manifest { format: 2, version: "9.1.0".into(), ..manifest() })).0.unwrap_err().to_string();
        assert!(error.contains("format 2") && error.contains("version 9.1.0"), "{error}");
        for other in [&b"SQLite format 3\0"[..], &[0; 4096], &[7; 4096], b""] {
            assert!(matches!(read_all(other).0, Err(ArchiveError::NotOurs)), "{other:?}");
        }
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_refused() {
        for name in ["../a", "/etc/passwd", "a//b", "a/./b", "", "a/..", "a\\b"] {
            assert!(check_name(name).is_err(), "{name}");
        }
        assert!(check_name("usage/000000000001.sqlite").is_ok());
    }
}
