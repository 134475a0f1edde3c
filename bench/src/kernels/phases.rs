//! Prefill and decode of whole models, with random weights in real shapes.

use super::{
    Bench, best_seconds,
    ceilings::Reading,
    limits::{Ceilings, Rows, Weights, batch},
    ops::{MODELS, SOME_NUMBER, WITH_EXPERTS},
    report::Row,
};
use crate::model::{
    make_weights,
    shapes::{self, Shape},
    weights::Dtype,
};
use anyhow::Context;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tidemill_model::{Chunk, KvMemory, LoadOptions, LogitRows, Model, Quantization};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    step::StateBlocks,
};

/// The tokens to compute.
#[derive(Clone, Copy)]
pub(super) enum Phase {
    /// A prompt of `tokens`, in a worker's chunks, without logits.
    Prefill { tokens: usize },
    /// One token for each of `sequences`, after `context` others.
    Decode { sequences: usize, context: usize },
}

const PHASES: [Phase; 6] = [
    Phase::Prefill { tokens: 512 },
    Phase::Prefill { tokens: 2048 },
    Phase::Decode { sequences: 1, context: 512 },
    Phase::Decode { sequences: 8, context: 512 },
    Phase::Decode { sequences: 16, context: 512 },
    Phase::Decode { sequences: 32, context: 512 },
];
/// The tokens of a prefill chunk.
const CHUNK_TOKENS: usize = 512;

/// Measures all phases. `models`: a directory that keeps the checkpoints; without it they are temporary.
pub(super) fn measure(bench: &mut Bench, models: Option<&Path>) -> anyhow::Result<()> {
    let temporary = tempfile::tempdir().context("cannot make a directory for models")?;
    let models = models.unwrap_or(temporary.path());
    let shapes = MODELS.into_iter().chain([WITH_EXPERTS]).take(if bench.quick { 1 } else { usize::MAX });
    for (label, name) in shapes {
        let mut shape = shapes::by_name(name).expect("the shapes are in the table").clone();
        if bench.quick {
            shape.layers = 2;
        }
        for weights in Weights::ALL {
            let wanted: Vec<Phase> = PHASES.into_iter().filter(|phase| bench.wants(phase.name(), &phase.shape(label, weights))).collect();
            if wanted.is_empty() {
                continue;
            }
            bench.begins("loading", &format!("{label} {}", weights.name()));
            let dir = checkpoint_of(label, &shape, models)?;
            let quantize = weights.quantization();
            let options =
                LoadOptions { kv_dtype: KvDtype::Bf16, quantize, threads: bench.machine.cpu.threads(), isa: Some(bench.machine.cpu.isa()) };
            let mut model = Model::load(&dir, &options, &mut |_, _| {})?;
            for phase in wanted {
                bench.begins(phase.name(), &phase.shape(label, weights));
                let (seconds, bytes) = phase.seconds(&mut model, bench.seconds, &bench.machine.reading);
                let limit = Ceilings { bytes, ..bench.ceilings }.seconds(&batch(&shape, weights, &phase.rows()));
                let tokens = phase.tokens() as f64;
                bench.rows.push(Row::new(phase.name(), phase.shape(label, weights), tokens / seconds, tokens / limit, "tokens/s"));
            }
        }
    }
    Ok(())
}

/// The checkpoint of a shape with random weights under `models`, which is made if it is not there yet.
pub(super) fn checkpoint_of(label: &str, shape: &Shape, models: &Path) -> anyhow::Result<PathBuf> {
    let dir = models.join(format!("{label}-{}-layers", shape.layers));
    if !dir.join("model.safetensors").exists() {
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        make_weights(shape, &dir, Dtype::Bf16, 0)?;
    }
    Ok(dir)
}

/// Measures the phases of the checkpoint in `dir`.
pub(super) fn measure_checkpoint(bench: &mut Bench, dir: &Path, quantize: &str) -> anyhow::Result<()> {
    let name = dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
    let label = format!("{name}, --quantize {quantize}");
    bench.begins("loading", &label);
    let options = LoadOptions {
        kv_dtype: KvDtype::Bf16,
        quantize: Quantization::of_name(quantize).context("--quantize")?,
        threads: bench.machine.cpu.threads(),
        isa: Some(bench.machine.cpu.isa()),
    };
    let mut model = Model::load(dir, &options, &mut |_, _| {})?;
    for phase in PHASES {
        let shape = phase.rows_text(&label);
        if !bench.wants(phase.name(), &shape) {
            continue;
        }
        bench.begins(phase.name(), &shape);
        let (seconds, bandwidth) = phase.seconds(&mut model, bench.seconds, &bench.machine.reading);
        let rate = phase.tokens() as f64 / seconds;
        bench.rows.push(match phase {
            Phase::Decode { sequences: 1, context } => {
                let kv = (context + 1) as f64 / BLOCK_TOKENS as f64 * model.kv_shape().block_bytes() as f64;
                Row::new(phase.name(), shape, rate, bandwidth / (model.row_bytes() as f64 + kv), "tokens/s")
            }
            Phase::Decode { .. } | Phase::Prefill { .. } => Row::without_limit(phase.name(), shape, rate, "tokens/s"),
        });
    }
    Ok(())
}

impl Phase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Phase::Prefill { .. } => "prefill",
            Phase::Decode { .. } => "decode",
        }
    }

    pub(super) fn shape(self, label: &str, weights: Weights) -> String {
        self.rows_text(&format!("{label} {}", weights.name()))
    }

    fn rows_text(self, model: &str) -> String {
        match self {
            Phase::Prefill { tokens } => format!("{model}, {tokens} tokens"),
            Phase::Decode { sequences, context } => format!("{model}, batch {sequences} after {context}"),
        }
    }

    /// The number of computed tokens.
    pub(super) fn tokens(self) -> usize {
        match self {
            Phase::Prefill { tokens } => tokens,
            Phase::Decode { sequences, .. } => sequences,
        }
    }

    /// The least rows to compute: prefill's limit reads the weights once, regardless of the chunks.
    pub(super) fn rows(self) -> Vec<Rows> {
        match self {
            Phase::Prefill { tokens } => vec![Rows { start: 0, rows: tokens, logits: false }],
            Phase::Decode { sequences, context } => vec![Rows { start: context, rows: 1, logits: true }; sequences],
        }
    }

    /// Measures the phase; returns the same as [`best_seconds`].
    fn seconds(self, model: &mut Model, at_least: f64, reading: &Reading) -> (f64, f64) {
        let vocab = model.config().vocab();
        let token = |i: usize| (i * 7919 % vocab) as Token;
        match self {
            Phase::Prefill { tokens } => {
                let tokens: Vec<Token> = (0..tokens).map(token).collect();
                let blocks: Vec<u32> = (0..tokens.len().div_ceil(BLOCK_TOKENS) as u32).collect();
                let (mut kv, state) = filled(model, blocks.len(), 1);
                best_seconds(at_least, reading, || {
                    for (i, tokens) in tokens.chunks(CHUNK_TOKENS).enumerate() {
                        let start = i * CHUNK_TOKENS;
                        let state = StateBlocks::in_place(start, &state);
                        model.forward(&[Chunk { tokens, start, blocks: &blocks, state, logits: LogitRows::None }], &mut kv);
                    }
                })
            }
            Phase::Decode { sequences, context } => {
                let tokens: Vec<Token> = (0..sequences).map(token).collect();
                let each = (context + 1).div_ceil(BLOCK_TOKENS);
                let blocks: Vec<u32> = (0..(sequences * each) as u32).collect();
                let (mut kv, states) = filled(model, blocks.len(), sequences);
                let state = |nth: usize| StateBlocks::in_place(context, &states[nth * model.state_blocks()..][..model.state_blocks()]);
                let chunks: Vec<Chunk<'_>> = tokens
                    .chunks(1)
                    .zip(blocks.chunks(each))
                    .enumerate()
                    .map(|(nth, (tokens, blocks))| Chunk { tokens, start: context, blocks, state: state(nth), logits: LogitRows::Last })
                    .collect();
                best_seconds(at_least, reading, || _ = model.forward(&chunks, &mut kv))
            }
        }
    }
}

/// Memory with all pages present, for `blocks` blocks, and the blocks of `states` states after these.
fn filled(model: &Model, blocks: usize, states: usize) -> (KvMemory, Vec<u32>) {
    let all = (blocks + states * model.state_blocks()) as u32;
    let mut kv = model.new_kv(all as usize);
    (0..all).for_each(|id| kv.block_mut(id).fill(SOME_NUMBER));
    (kv, (blocks as u32..all).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_computes_its_tokens() {
        for phase in PHASES {
            assert_eq!(phase.rows().iter().map(|rows| rows.rows).sum::<usize>(), phase.tokens());
        }
    }
}
