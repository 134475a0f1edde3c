//! `tidemill-bench model`: a Hugging Face directory with a published model's shape, random weights and a working tokenizer. Speed depends
//! on shapes, not on the weights' values, and this needs no download.

pub mod shapes;
pub mod tokenizer;
pub mod weights;

use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use shapes::Shape;
use std::{
    fs,
    path::{Path, PathBuf},
};
use weights::Dtype;

/// Make a checkpoint with random weights in the shape of a published model.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// The published model whose shape to use.
    #[arg(long, value_parser = shapes::by_name, help = format!("The published model whose shape it gets: {}", shapes::names()))]
    pub like: &'static Shape,
    /// The directory to create.
    #[arg(long)]
    pub out: PathBuf,
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    pub dtype: Dtype,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Number of layers, if not that of the published model.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub layers: Option<u32>,
}

/// Creates the directory. Existing weights are never overwritten: they may be real.
pub fn make(args: &ModelArgs) -> anyhow::Result<()> {
    let mut shape = args.like.clone();
    shape.layers = args.layers.unwrap_or(shape.layers);
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    let bytes = make_weights(&shape, &args.out, args.dtype, args.seed)?;

    let tokenizer = tokenizer::train(shape.vocab as usize)?;
    write(&args.out, "tokenizer.json", &tokenizer)?;
    write(&args.out, "tokenizer_config.json", &pretty(&tokenizer::config(shape.max_positions)))?;
    write(&args.out, "generation_config.json", &pretty(&generation_config()))?;
    println!("{}: {} with {} layers, {:.2} GB of random weights", args.out.display(), shape.name, shape.layers, bytes as f64 / 1e9);
    Ok(())
}

/// Writes only the files that an engine needs, `config.json` and weights. Returns the weights' bytes.
pub fn make_weights(shape: &Shape, out: &Path, dtype: Dtype, seed: u64) -> anyhow::Result<u64> {
    let weights = out.join("model.safetensors");
    ensure!(!weights.exists(), "{} exists: remove it, or choose another directory", weights.display());
    write(out, "config.json", &pretty(&shape.config(dtype.torch_name())))?;
    let tensors = shape.tensors();
    let bytes = tensors.iter().map(|(_, tensor)| dtype.bytes() * tensor.iter().product::<usize>()).sum::<usize>() as u64;
    let style = ProgressStyle::with_template("{elapsed} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}")?;
    let progress = ProgressBar::new(bytes).with_style(style);
    weights::write(&weights, &tensors, dtype, seed, &progress)?;
    progress.finish_and_clear();
    Ok(bytes)
}

fn write(dir: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = dir.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn generation_config() -> Value {
    json!({
        "bos_token_id": tokenizer::END_OF_TEXT,
        "eos_token_id": [tokenizer::END_OF_TURN, tokenizer::END_OF_TEXT],
        "pad_token_id": tokenizer::END_OF_TEXT,
    })
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
