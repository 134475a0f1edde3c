//! A GGUF file as a directory in Hugging Face's layout.

use crate::{
    GgufError,
    blocks::BlockType,
    config::Config,
    file::{Gguf, Tensor},
    tokenizer::Tokenizer,
};
use half::bf16;
use rayon::prelude::*;
use safetensors::{Dtype, View};
use serde_json::{Value, json};
use std::{
    borrow::Cow,
    fs,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// Changes whenever the same file would give another directory than before.
pub const FORM: u32 = 1;

/// Numbers that one thread expands at a time, at least: whole rows.
const NUMBERS_AT_A_TIME: usize = 1 << 16;

/// Writes the directory `to`, which must not exist. `progress` gets (bytes of weights written, bytes in all).
///
/// All of it is written beside it first, and then renamed: either all is there, or nothing is.
pub fn write(file: &Gguf, to: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), GgufError> {
    let config = Config::read(file)?;
    let vocab = config.json["vocab_size"].as_u64().unwrap_or_default() as usize;
    let tokenizer = Tokenizer::read(file, vocab)?;
    let weights = Weights::new(file, &config)?;
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
        // Another process may have been as far.
        let renamed = fs::rename(&draft, to);
        if to.join("config.json").is_file() { Ok(()) } else { renamed.map_err(|source| GgufError::Write { path: to.to_owned(), source }) }
    });
    // Gone already where it was renamed.
    let _ = fs::remove_dir_all(&draft);
    written
}

fn write_all(to: &Path, texts: &[(&str, Value)], weights: &Weights<'_>, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), GgufError> {
    let failed = |source| GgufError::Write { path: to.to_owned(), source };
    fs::create_dir_all(to).map_err(failed)?;
    for (name, value) in texts {
        fs::write(to.join(name), serde_json::to_vec_pretty(value).expect("texts and numbers serialize")).map_err(failed)?;
    }
    let done = AtomicU64::new(0);
    let total = weights.named.iter().map(|(_, weight)| weight.data_len() as u64).sum();
    let views = weights.named.iter().map(|(name, weight)| (name.as_str(), Counted { weight, done: &done, total, progress }));
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors")).map_err(|error| failed(std::io::Error::other(error)))
}

/// All tensors by their Hugging Face names.
struct Weights<'a> {
    named: Vec<(String, Weight<'a>)>,
}

/// One tensor, expanded when it is written.
struct Weight<'a> {
    bytes: &'a [u8],
    tensor: &'a Tensor,
    dtype: Dtype,
    rows: Rows,
    /// Taken from each number.
    minus: f32,
}

#[derive(Clone, Copy)]
enum Rows {
    InOrder,
    /// Those of each head alternate between its halves: first half first, then the second.
    Alternating {
        head_dim: usize,
    },
}

impl<'a> Weights<'a> {
    fn new(file: &'a Gguf, config: &Config) -> Result<Self, GgufError> {
        let family = config.family;
        let mut named = Vec::new();
        for tensor in file.tensors() {
            if tensor.name == "rope_freqs.weight" {
                // Part of the settings.
                continue;
            }
            let problem = |problem: String| GgufError::Tensor { path: file.path().to_owned(), tensor: tensor.name.clone(), problem };
            let name = family
                .tensor(&tensor.name)
                .ok_or_else(|| problem(format!("the architecture {} has no such tensor here, so it would be left out", family.name)))?;
            if tensor.shape.is_empty() || tensor.shape.len() > 2 {
                return Err(problem(format!("it has {} dimensions, where one or two are expected", tensor.shape.len())));
            }
            let heads = match name.rsplit('.').nth(1) {
                Some("q_proj") if family.interleaved => Some(config.heads),
                Some("k_proj") if family.interleaved => Some(config.kv_heads),
                _ => None,
            };
            let rows = match heads {
                None => Rows::InOrder,
                Some(heads) => {
                    let (all, heads) = (tensor.shape[0], heads as usize);
                    if !all.is_multiple_of(2 * heads) {
                        return Err(problem(format!("its {all} rows are not of {heads} heads")));
                    }
                    Rows::Alternating { head_dim: all / heads }
                }
            };
            let dtype = match tensor.kind {
                BlockType::F32 => Dtype::F32,
                BlockType::F16 => Dtype::F16,
                _ => Dtype::BF16,
            };
            let minus = if family.norms_plus_one && name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            named.push((name, Weight { bytes: file.bytes(tensor), tensor, dtype, rows, minus }));
        }
        Ok(Self { named })
    }
}

impl Weight<'_> {
    fn columns(&self) -> usize {
        // A vector of heads' biases has rows of one number.
        match self.rows {
            Rows::Alternating { .. } if self.tensor.shape.len() == 1 => 1,
            _ => *self.tensor.shape.last().expect("one dimension at least"),
        }
    }

    fn number_bytes(&self) -> usize {
        if self.dtype == Dtype::F32 { 4 } else { 2 }
    }

    /// The row of the file that comes at `row`.
    fn source(&self, row: usize) -> usize {
        match self.rows {
            Rows::InOrder => row,
            Rows::Alternating { head_dim } => {
                let (head, at) = (row / head_dim, row % head_dim);
                head * head_dim + 2 * (at % (head_dim / 2)) + at / (head_dim / 2)
            }
        }
    }

    fn expanded(&self) -> Vec<u8> {
        let (columns, number_bytes, kind) = (self.columns(), self.number_bytes(), self.tensor.kind);
        let row_bytes = columns / kind.numbers() * kind.bytes();
        let mut to = vec![0; self.data_len()];
        let rows = (NUMBERS_AT_A_TIME / columns.max(1)).max(1);
        to.par_chunks_mut(rows * columns * number_bytes).enumerate().for_each(|(piece, to)| {
            let mut numbers = vec![0.0; columns];
            for (i, to) in to.chunks_exact_mut(columns * number_bytes).enumerate() {
                let from = &self.bytes[self.source(piece * rows + i) * row_bytes..][..row_bytes];
                if kind.is_plain() && self.minus == 0.0 {
                    to.copy_from_slice(from);
                    continue;
                }
                kind.expand(from, &mut numbers);
                for (number, to) in numbers.iter().zip(to.chunks_exact_mut(number_bytes)) {
                    let number = number - self.minus;
                    match self.dtype {
                        Dtype::F32 => to.copy_from_slice(&number.to_le_bytes()),
                        Dtype::F16 => to.copy_from_slice(&half::f16::from_f32(number).to_le_bytes()),
                        _ => to.copy_from_slice(&bf16::from_f32(number).to_le_bytes()),
                    }
                }
            }
        });
        to
    }

    fn data_len(&self) -> usize {
        self.tensor.shape.iter().product::<usize>() * self.number_bytes()
    }
}

/// A weight that tells when it is written.
struct Counted<'a> {
    weight: &'a Weight<'a>,
    done: &'a AtomicU64,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl View for Counted<'_> {
    fn dtype(&self) -> Dtype {
        self.weight.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.weight.tensor.shape
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
