//! A GGUF file as a directory in Hugging Face's layout.

use crate::{
    GgufError,
    config::Config,
    file::Gguf,
    tokenizer::Tokenizer,
    weights::{self, Weight},
};
use safetensors::{Dtype, View};
use serde_json::{Value, json};
use std::{
    borrow::Cow,
    fs,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// The version of the conversion, which changes whenever the same file would give a different directory.
pub const FORM: u32 = 2;

/// Writes the directory `to`, which must not exist. `progress` gets (bytes of weights written, bytes in all).
///
/// The directory is written beside `to` first, and then renamed, so that it is either complete or absent.
pub fn write(file: &Gguf, to: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), GgufError> {
    let config = Config::read(file)?;
    let vocab = config.json["vocab_size"].as_u64().unwrap_or_default() as usize;
    let tokenizer = Tokenizer::read(file, vocab)?;
    let weights = weights::all(file, &config)?;
    let ends = tokenizer.ends()?;
    let mut config_json = config.json.clone();
    config_json["eos_token_id"] = json!(ends);
    let texts = [
        ("config.json", config_json),
        ("generation_config.json", json!({"eos_token_id": ends})),
        ("tokenizer.json", tokenizer.json()?),
        ("tokenizer_config.json", tokenizer.config(config.context_tokens)?),
    ];

    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let draft = to.with_file_name(format!(".{name}.{}", std::process::id()));
    let written = write_all(&draft, &texts, &weights, progress).and_then(|()| {
        // Another process may have finished first.
        let renamed = fs::rename(&draft, to);
        if to.join("config.json").is_file() { Ok(()) } else { renamed.map_err(|source| GgufError::Write { path: to.to_owned(), source }) }
    });
    // After a successful rename, the draft is already gone.
    let _ = fs::remove_dir_all(&draft);
    written
}

fn write_all(
    to: &Path,
    texts: &[(&str, Value)],
    weights: &[(String, Weight<'_>)],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), GgufError> {
    let failed = |source| GgufError::Write { path: to.to_owned(), source };
    fs::create_dir_all(to).map_err(failed)?;
    for (name, value) in texts {
        fs::write(to.join(name), serde_json::to_vec_pretty(value).expect("texts and numbers serialize")).map_err(failed)?;
    }
    let done = AtomicU64::new(0);
    let total = weights.iter().map(|(_, weight)| weight.data_len() as u64).sum();
    let views = weights.iter().map(|(name, weight)| (name.as_str(), Counted { weight, done: &done, total, progress }));
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors")).map_err(|error| failed(std::io::Error::other(error)))
}

/// A weight that reports when it is written.
struct Counted<'a> {
    weight: &'a Weight<'a>,
    done: &'a AtomicU64,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl View for Counted<'_> {
    fn dtype(&self) -> Dtype {
        self.weight.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.weight.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.weight.expanded();
        let done = self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed) + bytes.len() as u64;
        (self.progress)(done, self.total);
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.weight.data_len()
    }
}
