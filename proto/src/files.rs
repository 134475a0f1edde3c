//! A model directory's files, which anyone may have written: of each kind, no more bytes are read than any published model has. What is made of
//! a file is bounded by its bytes, so this bounds that, too.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::{Path, PathBuf},
};

/// The largest file of settings. Published ones have up to 100 kB, and `tokenizer_config.json` up to 1.2 MB. A value of two bytes becomes one of
/// eighty.
pub const SETTINGS_BYTES_MAX: u64 = 4 << 20;
/// The largest `tokenizer.json`. Gemma's has 33 MB.
pub const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
/// The largest index of weights. One of 100,000 tensors has 9 MB.
pub const INDEX_BYTES_MAX: u64 = 32 << 20;

/// Reads a file; an error if it has more than so many bytes.
pub fn read_at_most(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it has more than the {bytes_max} bytes that are read")));
    }
    Ok(bytes)
}

/// The GGUF file that a path means: the path itself, under any name, or the only one in a directory without `config.json`. Of a file in
/// several parts, the first. An error if the directory has several.
pub fn gguf_of(path: &Path) -> io::Result<Option<PathBuf>> {
    if !path.is_dir() {
        return Ok(is_gguf(path).then(|| path.to_owned()));
    }
    if path.join("config.json").exists() {
        return Ok(None);
    }
    let entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
    let mut files: Vec<PathBuf> =
        entries.into_iter().map(|entry| entry.path()).filter(|file| stands_alone(file) && is_gguf(file)).collect();
    files.sort_unstable();
    match &files[..] {
        [] => Ok(None),
        [only] => Ok(Some(only.clone())),
        several => {
            let names: Vec<_> = several.iter().filter_map(|file| file.file_name()).map(|name| name.to_string_lossy()).collect();
            let message = format!("{} has several GGUF files: name one of {}", path.display(), names.join(", "));
            Err(io::Error::new(ErrorKind::InvalidInput, message))
        }
    }
}

/// Why a directory cannot be read as it is, if it is a GGUF file or means one: most programs read unpacked ones only.
pub fn packed(path: &Path) -> Option<String> {
    let file = match gguf_of(path) {
        Ok(file) => file?,
        Err(several) => return Some(several.to_string()),
    };
    Some(format!("{} is a GGUF file: give it to `tidemill up`, or unpack it with `tidemill unpack` and name the directory", file.display()))
}

/// Whether a file begins as GGUF does.
fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    // A pipe would wait for its writer.
    path.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
}

/// Whether a file may be a model's by its name, rather than a later part of one, or the part of one that sees pictures.
fn stands_alone(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let part = name.rsplit_once("-of-").and_then(|(rest, _)| rest.rsplit_once('-')).and_then(|(_, number)| number.parse::<u32>().ok());
    !name.starts_with("mmproj") && part.is_none_or(|number| number == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gguf_file_is_known_by_its_content_and_a_directory_with_one_means_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let meant = || gguf_of(dir.path()).map_err(|error| error.to_string());
        write("README.gguf", b"a text");
        assert_eq!((meant(), packed(dir.path())), (Ok(None), None));
        let first = write("big-00001-of-00002.gguf", b"GGUF...");
        write("big-00002-of-00002.gguf", b"GGUF...");
        write("mmproj-big.gguf", b"GGUF...");
        assert_eq!(meant(), Ok(Some(first)));
        assert!(packed(dir.path()).unwrap().contains("tidemill unpack"));
        let blob = write("sha256-0123", b"GGUF...");
        assert_eq!(gguf_of(&blob).unwrap(), Some(blob));
        assert!(meant().unwrap_err().ends_with("has several GGUF files: name one of big-00001-of-00002.gguf, sha256-0123"));
        write("config.json", b"{}");
        assert_eq!(meant(), Ok(None), "it is a directory in Hugging Face's layout");
        assert_eq!(gguf_of(Path::new("org/name")).unwrap(), None);
    }

    #[test]
    fn a_file_that_never_ends_is_refused() {
        let error = read_at_most(Path::new("/dev/zero"), 1 << 16).unwrap_err();
        assert_eq!(error.to_string(), "it has more than the 65536 bytes that are read");
        assert!(read_at_most(Path::new("/dev/null"), 0).unwrap().is_empty());
    }
}
