//! A model directory's files, which anyone may have written: of each kind, no more bytes are read than any published model has. What is made of
//! a file is bounded by its bytes, so this bounds that, too.

use std::{
    fs::File,
    io::{self, ErrorKind, Read},
    path::Path,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_never_ends_is_refused() {
        let error = read_at_most(Path::new("/dev/zero"), 1 << 16).unwrap_err();
        assert_eq!(error.to_string(), "it has more than the 65536 bytes that are read");
        assert!(read_at_most(Path::new("/dev/null"), 0).unwrap().is_empty());
    }
}
