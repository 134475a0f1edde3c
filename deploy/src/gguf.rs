//! Models in GGUF files. Each is unpacked once into a directory in Hugging Face's layout, which every process reads, and kept.

use anyhow::Context;
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::UNIX_EPOCH,
};
use tidemill_gguf::{
    directory::{self, FORM},
    file::Gguf,
};
use tidemill_proto::files::gguf_of;

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

/// The GGUF file that `--model` means, by the file's extension or its content, or as the only one in a directory.
pub fn meant(model: &str) -> io::Result<Option<PathBuf>> {
    let path = Path::new(model);
    if has_extension(path) && !path.is_dir() { Ok(Some(path.to_owned())) } else { gguf_of(path) }
}

fn has_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The name by which clients know a file's model: the file's name without its extension, and without its number if it is one of several.
pub fn name(file: &Path) -> String {
    let stem = if has_extension(file) { file.file_stem() } else { file.file_name() };
    let stem = stem.unwrap_or_default().to_string_lossy();
    let number = |part: &str| part.len() == 5 && part.bytes().all(|byte| byte.is_ascii_digit());
    match stem.rsplit_once("-of-").and_then(|(rest, count)| Some((rest.rsplit_once('-')?, count))) {
        Some(((name, index), count)) if number(index) && number(count) => name.to_owned(),
        _ => stem.into_owned(),
    }
}

/// The directory of a file, under `models`. It is written, in place of an earlier one, if the file has changed since.
pub fn resolve(file: &Path, models: &Path) -> anyhow::Result<PathBuf> {
    let gguf = Gguf::open(file)?;
    let absolute = fs::canonicalize(file).with_context(|| format!("reading {} failed", file.display()))?;
    let of_file = format!("gguf--{}--{}-", name(file), short(&blake3::hash(absolute.as_os_str().as_encoded_bytes())));
    let dir = models.join(format!("{of_file}{}", state(&gguf)?));
    if !dir.is_dir() {
        fs::create_dir_all(models).with_context(|| format!("creating {} failed", models.display()))?;
        remove_all(models, &of_file)?;
        write(&gguf, &dir)?;
    }
    Ok(dir)
}

/// A hash that differs whenever the directory's contents would.
fn state(gguf: &Gguf) -> anyhow::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&FORM.to_le_bytes());
    for path in gguf.parts() {
        let reading = || format!("reading {} failed", path.display());
        let metadata = fs::metadata(path).with_context(reading)?;
        let changed = metadata.modified().with_context(reading)?.duration_since(UNIX_EPOCH).unwrap_or_default();
        hasher.update(&metadata.len().to_le_bytes());
        hasher.update(&changed.as_nanos().to_le_bytes());
    }
    Ok(short(&hasher.finalize()))
}

fn short(hash: &blake3::Hash) -> String {
    hash.to_hex()[..12].to_owned()
}

/// Removes the directories whose names start with `prefix`, and unfinished ones that a killed process has left behind.
fn remove_all(models: &Path, prefix: &str) -> anyhow::Result<()> {
    let reading = || format!("reading {} failed", models.display());
    for entry in fs::read_dir(models).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.trim_start_matches('.').starts_with(prefix) {
            fs::remove_dir_all(&path).with_context(|| format!("removing {} failed", path.display()))?;
        }
    }
    Ok(())
}

/// Bytes between two updates of the progress.
const SHOWN_EVERY: u64 = 64 << 20;

fn write(gguf: &Gguf, dir: &Path) -> anyhow::Result<()> {
    let shown = AtomicU64::new(0);
    let progress = |done: u64, all: u64| {
        if done == all || done >= shown.load(Relaxed) + SHOWN_EVERY {
            shown.store(done, Relaxed);
            eprint!("\rtidemill: unpacking into {}, {} of {} MiB  ", dir.display(), done >> 20, all >> 20);
        }
    };
    let written = directory::write(gguf, dir, &progress);
    eprintln!();
    Ok(written?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_as_its_file() {
        for (file, expected) in [
            ("/m/Qwen-7B-Q4_K_M.gguf", "Qwen-7B-Q4_K_M"),
            ("big-00001-of-00012.gguf", "big"),
            ("a-1-of-2.gguf", "a-1-of-2"),
            ("qwen2.5", "qwen2.5"),
        ] {
            assert_eq!(name(Path::new(file)), expected);
        }
        let meant = |model| meant(model).unwrap();
        assert!(meant("x.GGUF").is_some() && meant("org/model-gguf").is_none());
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../gguf/tests/fixtures/llama3.gguf");
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("sha256-0123");
        fs::copy(fixtures, &blob).unwrap();
        assert_eq!(meant(blob.to_str().unwrap()), Some(blob.clone()), "by its content");
        assert_eq!(meant(dir.path().to_str().unwrap()), Some(blob), "the only one in its directory");
    }

    #[test]
    fn a_file_that_changed_is_unpacked_again_in_place_of_what_was() {
        let temporary = tempfile::tempdir().unwrap();
        let (file, models) = (temporary.path().join("tiny.gguf"), temporary.path().join("models"));
        fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../gguf/tests/fixtures/llama3.gguf"), &file).unwrap();
        let first = resolve(&file, &models).unwrap();
        let written = fs::metadata(first.join("config.json")).unwrap().modified().unwrap();
        assert_eq!(resolve(&file, &models).unwrap(), first);
        assert_eq!(fs::metadata(first.join("config.json")).unwrap().modified().unwrap(), written, "once is enough");
        fs::create_dir(models.join(format!(".{}.17", first.file_name().unwrap().to_str().unwrap()))).unwrap();
        fs::OpenOptions::new().append(true).open(&file).unwrap().set_len(400_000).unwrap();
        let second = resolve(&file, &models).unwrap();
        assert!(second != first && second.join("model.safetensors").is_file());
        assert_eq!(fs::read_dir(&models).unwrap().count(), 1, "the one before is gone, and what was left of a draft");
    }
}
