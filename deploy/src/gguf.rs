//! Models as GGUF files, which every process reads as a directory in Hugging Face's layout: unpacked once, and kept.

use anyhow::Context;
use std::{
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};
use tidemill_gguf::{
    directory::{self, FORM},
    file::Gguf,
};

/// Writes a directory with a GGUF file's settings, tokenizer and weights.
///
/// Quantized weights become bf16, so it can be several times as large as the file.
#[derive(Clone, Debug, clap::Args)]
pub struct UnpackArgs {
    /// The file, or the first of its parts.
    pub file: PathBuf,
    /// Directory to write, which must not exist.
    pub dir: PathBuf,
}

pub fn unpack(args: &UnpackArgs) -> anyhow::Result<()> {
    let UnpackArgs { file, dir } = args;
    anyhow::ensure!(!dir.exists(), "{} exists already: name a directory that does not", dir.display());
    write(&Gguf::open(file)?, dir)
}

/// Whether `--model` names a GGUF file.
pub fn is_one(model: &str) -> bool {
    Path::new(model).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// What clients call such a model: the file's name without its ending, and without its number if it is one of several.
pub fn name(file: &Path) -> String {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let number = |part: &str| part.len() == 5 && part.bytes().all(|byte| byte.is_ascii_digit());
    match stem.rsplit_once("-of-").and_then(|(rest, count)| Some((rest.rsplit_once('-')?, count))) {
        Some(((name, index), count)) if number(index) && number(count) => name.to_owned(),
        _ => stem.into_owned(),
    }
}

/// The directory of a file, under `models`: written unless that has been done since the file last changed.
pub fn resolve(file: &Path, models: &Path) -> anyhow::Result<PathBuf> {
    let gguf = Gguf::open(file)?;
    let dir = models.join(format!("gguf--{}--{}", name(file), state(&gguf)?));
    if !dir.is_dir() {
        fs::create_dir_all(models).with_context(|| format!("creating {} failed", models.display()))?;
        write(&gguf, &dir)?;
    }
    Ok(dir)
}

/// Differs whenever the directory would.
fn state(gguf: &Gguf) -> anyhow::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&FORM.to_le_bytes());
    for path in gguf.parts() {
        let reading = || format!("reading {} failed", path.display());
        let metadata = fs::metadata(path).with_context(reading)?;
        let changed = metadata.modified().with_context(reading)?.duration_since(UNIX_EPOCH).unwrap_or_default();
        hasher.update(fs::canonicalize(path).with_context(reading)?.as_os_str().as_encoded_bytes());
        hasher.update(&metadata.len().to_le_bytes());
        hasher.update(&changed.as_nanos().to_le_bytes());
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

fn write(gguf: &Gguf, dir: &Path) -> anyhow::Result<()> {
    let progress = |done: u64, all: u64| eprint!("\rtidemill: unpacking into {}, {} of {} MiB  ", dir.display(), done >> 20, all >> 20);
    let written = directory::write(gguf, dir, &progress);
    eprintln!();
    Ok(written?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_as_its_file() {
        for (file, expected) in
            [("/m/Qwen-7B-Q4_K_M.gguf", "Qwen-7B-Q4_K_M"), ("big-00001-of-00012.gguf", "big"), ("a-1-of-2.gguf", "a-1-of-2")]
        {
            assert_eq!(name(Path::new(file)), expected);
        }
        assert!(is_one("x.GGUF") && !is_one("org/model-gguf"));
    }
}
