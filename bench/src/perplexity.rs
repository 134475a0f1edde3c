//! `tidemill-bench perplexity`: the quality of a model's predictions of a text, which shows the cost of fewer bits.
//!
//! The text is cut into windows that overlap by half. A token counts once, in the first window that contains it, so it is predicted from at
//! least half a window before it, except for those of the first half. (As in Hugging Face's "Perplexity of fixed-length models", with a
//! stride of half the length.)

use crate::record;
use anyhow::{Context, anyhow, ensure};
use indicatif::ProgressIterator;
use serde::Serialize;
use std::{fs, ops::Range, path::PathBuf};
use tidemill_model::{Chunk, KvMemory, LoadOptions, LogitRows, Model, Quantization, token_logprob};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    step::StateBlocks,
};
use tokenizers::Tokenizer;

/// Measure how well a model predicts a text: lower is better. Compare only results of the same text and window.
#[derive(Clone, Debug, clap::Args)]
pub struct PerplexityArgs {
    /// Hugging Face model directory.
    #[arg(long)]
    pub model: PathBuf,
    /// A file of UTF-8 text.
    #[arg(long)]
    pub text: PathBuf,
    /// Arithmetic of projections.
    #[arg(long, default_value = "none", value_parser = ["none", "int8", "int4", "dequantize"])]
    pub quantize: String,
    /// Type of stored K and V.
    #[arg(long, default_value = KvDtype::Bf16.name(), value_parser = KvDtype::ALL.map(KvDtype::name))]
    pub kv_dtype: String,
    /// Tokens per window.
    #[arg(long, default_value_t = 512)]
    pub window: usize,
    /// Threads that compute (default: all cores).
    #[arg(long)]
    pub threads: Option<usize>,
    /// Write the result to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The result and its settings.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub model: PathBuf,
    pub quantize: String,
    pub kv_dtype: String,
    pub window: usize,
    /// Number of predicted tokens.
    pub tokens: usize,
    /// Mean negative log-probability of a token, and the standard error of that mean, in nats.
    pub mean: f64,
    pub error: f64,
    /// `exp(mean)`.
    pub perplexity: f64,
}

/// Prints one line.
pub fn run(args: &PerplexityArgs) -> anyhow::Result<()> {
    let report = measure(args)?;
    println!(
        "perplexity {:.4} (± {:.4}) of {} tokens, windows of {}, weights {}, K and V {}",
        report.perplexity,
        report.perplexity * report.error,
        report.tokens,
        report.window,
        if report.quantize == "none" { "as stored" } else { &report.quantize },
        report.kv_dtype
    );
    record::write(args.json.as_ref(), "perplexity", &report)
}

pub fn measure(args: &PerplexityArgs) -> anyhow::Result<Report> {
    let text = fs::read_to_string(&args.text).with_context(|| format!("cannot read {}", args.text.display()))?;
    let path = args.model.join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    let encoding = tokenizer.encode_fast(text, true).map_err(|error| anyhow!("the tokenizer refuses {}: {error}", args.text.display()))?;
    let tokens: &[Token] = encoding.get_ids();

    ensure!(args.threads != Some(0), "--threads must be at least 1");
    let options = LoadOptions {
        kv_dtype: KvDtype::ALL.into_iter().find(|dtype| dtype.name() == args.kv_dtype).context("--kv-dtype")?,
        quantize: Quantization::of_name(&args.quantize).context("--quantize")?,
        threads: args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        isa: None,
    };
    let mut model = Model::load(&args.model, &options, &mut |_, _| {})?;
    let context_tokens = model.config().context_tokens();
    ensure!(
        (2..=context_tokens).contains(&args.window),
        "--window {} must be from 2 to the model's context, {context_tokens}",
        args.window
    );
    ensure!(tokens.len() >= 2, "{} has {} tokens: at least 2 are needed to predict one", args.text.display(), tokens.len());
    let vocab = model.config().vocab();
    ensure!(tokens.iter().all(|&token| (token as usize) < vocab), "the tokenizer is not the model's, which knows {vocab} tokens");

    let mut kv = model.new_kv(args.window.div_ceil(BLOCK_TOKENS) + model.state_blocks());
    let mut losses = Vec::with_capacity(tokens.len());
    for window in windows(tokens.len(), args.window).into_iter().progress() {
        predict(&mut model, &mut kv, tokens, &window, &mut losses);
    }
    let (mean, error) = mean_and_error(&losses);
    Ok(Report {
        model: args.model.clone(),
        quantize: args.quantize.clone(),
        kv_dtype: args.kv_dtype.clone(),
        window: args.window,
        tokens: losses.len(),
        mean,
        error,
        perplexity: mean.exp(),
    })
}

/// Tokens that are computed together, and the range of those that count, each of which has a predecessor.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Window {
    tokens: Range<usize>,
    counted: Range<usize>,
}

/// The windows of a text of `len` tokens, at least 2, of `size` tokens each, at least 2.
fn windows(len: usize, size: usize) -> Vec<Window> {
    let mut windows = vec![Window { tokens: 0..size.min(len), counted: 1..size.min(len) }];
    let mut done = size.min(len);
    while done < len {
        let end = (done + size / 2).min(len);
        windows.push(Window { tokens: end.saturating_sub(size)..end, counted: done..end });
        done = end;
    }
    windows
}

/// Adds the negative log-probability of each token that counts to `losses`.
fn predict(model: &mut Model, kv: &mut KvMemory, tokens: &[Token], window: &Window, losses: &mut Vec<f64>) {
    let blocks: Vec<u32> = (0..kv.blocks() as u32).collect();
    let (blocks, state) = blocks.split_at(kv.blocks() - model.state_blocks());
    // The row before a token predicts it.
    let rows = window.counted.start - 1..window.counted.end - 1;
    let chunks = cut(window.tokens.start..rows.start, ROWS_PER_CHUNK).map(|range| (range, LogitRows::None));
    for (range, logits) in chunks.chain(cut(rows, LOGITS_PER_CHUNK).map(|range| (range, LogitRows::All))) {
        let start = range.start - window.tokens.start;
        let state = StateBlocks::in_place(start, state);
        let chunk = Chunk { tokens: &tokens[range.clone()], start, blocks, state, logits };
        let logits = model.forward(&[chunk], kv);
        losses.extend((0..logits.rows()).map(|i| -f64::from(token_logprob(logits.row(i), tokens[range.start + i + 1], 0).logprob)));
    }
}

/// Cuts `range` into pieces of at most `size`.
fn cut(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..(start + size).min(end))
}

const ROWS_PER_CHUNK: usize = 512;
/// The rows of a chunk with logits: those of a large vocabulary take half a megabyte per row.
const LOGITS_PER_CHUNK: usize = 64;

fn mean_and_error(numbers: &[f64]) -> (f64, f64) {
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    (mean, (variance / count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_token_but_the_first_counts_once_after_half_a_window() {
        for (len, size) in [(2, 2), (2, 512), (512, 512), (513, 512), (1000, 64), (17, 3), (100, 7)] {
            let mut next = 1;
            for window in windows(len, size) {
                assert_eq!(window.counted.start, next);
                assert!(window.tokens.len() <= size && window.tokens.end == window.counted.end && window.tokens.start < next);
                assert!(window.tokens.start == 0 || next - window.tokens.start >= size / 2, "{window:?} of {len} in {size}");
                next = window.counted.end;
            }
            assert_eq!(next, len);
        }
    }

    #[derive(serde::Deserialize)]
    struct Reference {
        window: usize,
        loss: f64,
        tokens: usize,
    }

    #[test]
    fn a_trained_model_predicts_as_transformers_says_and_fewer_bits_cost_it_next_to_nothing() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/prose");
        let reference: Reference = serde_json::from_str(&fs::read_to_string(dir.join("reference.json")).unwrap()).unwrap();
        for (quantize, kv_dtype, tolerance) in [("none", "bf16", 1e-3), ("int8", "bf16", 3e-3), ("int8", "int8", 3e-3)] {
            let args = PerplexityArgs {
                model: dir.clone(),
                text: dir.join("held-out.txt"),
                quantize: quantize.into(),
                kv_dtype: kv_dtype.into(),
                window: reference.window,
                threads: None,
                json: None,
            };
            let report = measure(&args).unwrap();
            assert_eq!(report.tokens, reference.tokens);
            let off = (report.mean - reference.loss).abs();
            assert!(off < tolerance, "weights {quantize}, K and V {kv_dtype}: {} where f32 has {}", report.mean, reference.loss);
        }
    }

    #[test]
    fn perplexity_is_that_of_the_logits_and_fewer_bits_change_it_a_little() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama");
        let text = tempfile::NamedTempFile::new().unwrap();
        fs::write(text.path(), "The tide fills the pool, and the pool drives the wheel. ".repeat(6)).unwrap();
        let with = |quantize: &str, kv_dtype: &str, window| {
            let args = PerplexityArgs {
                model: dir.clone(),
                text: text.path().to_owned(),
                quantize: quantize.into(),
                kv_dtype: kv_dtype.into(),
                window,
                threads: Some(1),
                json: None,
            };
            measure(&args).unwrap()
        };
        let exact = with("none", "f32", 512);
        assert_eq!(exact.tokens, with("none", "f32", 32).tokens);

        let options = LoadOptions { kv_dtype: KvDtype::F32, quantize: None, threads: 1, isa: None };
        let mut model = Model::load(&dir, &options, &mut |_, _| {}).unwrap();
        let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
        let tokens = tokenizer.encode_fast(fs::read_to_string(text.path()).unwrap(), true).unwrap().get_ids().to_vec();
        assert_eq!(exact.tokens, tokens.len() - 1);
        let blocks: Vec<u32> = (0..tokens.len().div_ceil(BLOCK_TOKENS) as u32).collect();
        let mut kv = model.new_kv(blocks.len());
        let logits = model.forward(
            &[Chunk { tokens: &tokens, start: 0, blocks: &blocks, state: StateBlocks::default(), logits: LogitRows::All }],
            &mut kv,
        );
        let loss = |i: usize| {
            let row: Vec<f64> = logits.row(i).iter().map(|x| f64::from(*x)).collect();
            row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[tokens[i + 1] as usize]
        };
        let mean = (0..tokens.len() - 1).map(loss).sum::<f64>() / (tokens.len() - 1) as f64;
        assert!((exact.mean - mean).abs() < 1e-5, "{} is not {mean}", exact.mean);

        let int8 = with("int8", "int8", 512);
        assert!((int8.mean - exact.mean).abs() < 0.1 && int8.mean != exact.mean, "{} is not near {}", int8.mean, exact.mean);
    }
}
