//! Prefill and decode steps of a whole model with random weights, as a worker computes them: by the model's own executor, with the host's
//! part of each step in the time.

use super::gpu::{Gpu, RUNS, WARM_UPS};
use crate::{
    kernels::{
        Bench,
        limits::{Weights, batch},
        ops::numbers,
        phases::{Phase, checkpoint_of},
        report::Row,
    },
    model::shapes::Shape,
};
use anyhow::Context;
use half::bf16;
use std::{path::Path, time::Instant};
use tidemill_model::{
    Executor, ExecutorError,
    cuda::{CudaExecutor, CudaOptions, KvBytes},
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    sampling::Sampling as DrawSettings,
    step::{Draw, History, Segment, StateBlocks, Wanted},
};

const WEIGHTS: Weights = Weights::Bf16;

const PHASES: [Phase; 5] = [
    Phase::Decode { sequences: 1, context: 4095 },
    Phase::Decode { sequences: 16, context: 4095 },
    Phase::Decode { sequences: 64, context: 4095 },
    Phase::Decode { sequences: 256, context: 2047 },
    Phase::Prefill { tokens: 8192 },
];
const QUICK_PHASES: [Phase; 2] = [Phase::Decode { sequences: 2, context: 31 }, Phase::Prefill { tokens: 32 }];
/// The share of the device's memory for weights and KV, which is a worker's default.
const MEMORY_SHARE: f32 = 0.9;

/// Measures all phases. `models`: a directory that keeps the checkpoint; without it it is temporary.
pub(super) fn measure(bench: &mut Bench<Gpu>, label: &str, shape: &Shape, models: Option<&Path>, cache: &Path) -> anyhow::Result<()> {
    let phases: &[Phase] = if bench.quick { &QUICK_PHASES } else { &PHASES };
    let wanted: Vec<Phase> = phases.iter().copied().filter(|phase| bench.wants(phase.name(), &phase.shape(label, WEIGHTS))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let temporary = tempfile::tempdir().context("cannot make a directory for the model")?;
    bench.begins("loading", label);
    let dir = checkpoint_of(label, shape, models.unwrap_or(temporary.path()))?;
    let options = CudaOptions {
        kernel_cache: cache.to_owned(),
        step_tokens: wanted.iter().map(|phase| phase.tokens()).max().unwrap_or(1),
        sequences_max: wanted.iter().map(|phase| phase.rows().len()).max().unwrap_or(1),
        kv: KvBytes::UpToShare(MEMORY_SHARE),
        kv_dtype: KvDtype::Bf16,
        ranks: 1,
    };
    let mut model = match CudaExecutor::load(&dir, &options, &mut |_, _| {}) {
        Ok(model) => model,
        Err(error) => {
            bench.leave_out("prefill and decode", label, &error);
            return Ok(());
        }
    };
    let runs = if bench.quick { 1 } else { RUNS };
    for phase in wanted {
        let text = phase.shape(label, WEIGHTS);
        bench.begins(phase.name(), &text);
        let Some(seconds) = seconds(&mut model, phase, runs)? else {
            bench.leave_out(phase.name(), &text, &format!("its KV needs more than the device's {} blocks", model.blocks()));
            continue;
        };
        let (tokens, limit) = (phase.tokens() as f64, bench.ceilings.seconds(&batch(shape, WEIGHTS, &phase.rows())));
        bench.keep(phase.name(), &text, Ok(Row::new(phase.name(), text.clone(), tokens / seconds, tokens / limit, "tokens/s")))?;
    }
    Ok(())
}

/// Writes numbers of a usual size to `blocks`: zeros would take less power, and so less time, than K and V of tokens.
fn fill(model: &mut CudaExecutor, blocks: &[u32]) -> Result<(), ExecutorError> {
    let bytes: Vec<u8> = numbers(model.kv_shape().block_bytes() / 2).into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
    for &block in blocks {
        model.write_block(block, &mut |memory| {
            memory.copy_from_slice(&bytes);
            true
        })?;
    }
    Ok(())
}

/// The median time of a step; `None` if the device has no room for the phase's KV.
fn seconds(model: &mut CudaExecutor, phase: Phase, runs: usize) -> anyhow::Result<Option<f64>> {
    let (sequences, start, each, wants_token) = match phase {
        Phase::Prefill { tokens } => (1, 0, tokens, false),
        Phase::Decode { sequences, context } => (sequences, context, 1, true),
    };
    let tokens: Vec<Token> = (0..sequences * each).map(|i| (i * 7919 % model.vocab()) as Token).collect();
    let table = (start + each).div_ceil(BLOCK_TOKENS);
    if sequences * table > model.blocks() {
        return Ok(None);
    }
    let blocks: Vec<u32> = (0..(sequences * table) as u32).collect();
    fill(model, &blocks)?;
    let (sampling, history) = (DrawSettings::default(), History::default());
    let draw = Draw { sampling: &sampling, history: &history, index: 0, banned: &[], allowed: None };
    let wanted = if wants_token { Wanted::Token(draw) } else { Wanted::Nothing };
    let segments: Vec<Segment<'_>> = tokens
        .chunks(each)
        .zip(blocks.chunks(table))
        .map(|(tokens, blocks)| Segment { tokens, start, blocks, state: StateBlocks::default(), wanted })
        .collect();
    let mut times = Vec::new();
    for run in 0..WARM_UPS + runs {
        let started = Instant::now();
        model.step(&segments)?;
        if run >= WARM_UPS {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(Some(times[times.len() / 2]))
}
