//! A checkpoint whole and on tensor-parallel ranks, by turns: `--checkpoint DIR --ranks N`.

use super::{Bench, Host, report::Row};
use anyhow::Context;
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tidemill_model::{CpuExecutor, Executor, LoadOptions, Model, Quantization, RankedExecutor, RankedModel};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    step::{Segment, StateBlocks, Wanted},
};

const PROMPT: usize = 512;
const SEQUENCES: [usize; 3] = [1, 8, 16];
const SEQUENCES_MAX: usize = 16;
const BLOCKS_EACH: usize = PROMPT / BLOCK_TOKENS + 1;
const TURNS_MIN: usize = 3;

/// Measures a prompt of 512 tokens, and decode steps of 1, 8 and 16 sequences after as many, each with the same threads in all.
pub(super) fn measure_checkpoint(bench: &mut Bench<Host>, dir: &Path, quantize: &str, ranks: usize) -> anyhow::Result<()> {
    let name = dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
    bench.begins("loading", &name);
    let (threads, isa) = (bench.machine.cpu.threads(), Some(bench.machine.cpu.isa()));
    let quantize = Quantization::of_name(quantize).context("--quantize")?;
    let options = LoadOptions { kv_dtype: KvDtype::Bf16, quantize, threads, isa };
    let blocks = SEQUENCES_MAX * BLOCKS_EACH;
    let whole = CpuExecutor::new(Model::load(dir, &options, &mut |_, _| {})?, blocks);
    let split = RankedExecutor::new(RankedModel::load(dir, &options, ranks, &mut |_, _| {})?, blocks);
    let vocab = whole.vocab() as Token;
    let mut executors: [Box<dyn Executor>; 2] = [Box::new(whole), Box::new(split)];

    let tables: Vec<Vec<u32>> =
        (0..SEQUENCES_MAX).map(|i| (i * BLOCKS_EACH..(i + 1) * BLOCKS_EACH).map(|block| block as u32).collect()).collect();
    let prompts: Vec<Vec<Token>> =
        (0..SEQUENCES_MAX as Token).map(|i| (0..=PROMPT as Token).map(|at| (i * 7919 + at * 37) % vocab).collect()).collect();
    let segment = |i: usize, tokens: std::ops::Range<usize>, wanted| {
        let (start, tokens) = (tokens.start, &prompts[i][tokens]);
        Segment { tokens, start, blocks: &tables[i], state: StateBlocks::default(), wanted }
    };
    let prompt = |i| segment(i, 0..PROMPT, Wanted::Nothing);
    // Any wish that needs logits.
    let next = |i| segment(i, PROMPT..PROMPT + 1, Wanted::Embedding { second_text: 1 });
    for executor in &mut executors {
        (0..SEQUENCES_MAX).try_for_each(|i| executor.step(&[prompt(i)]).map(drop))?;
    }
    let decode = SEQUENCES.map(|count| ("decode", format!("batch {count} after {PROMPT}"), (0..count).map(next).collect::<Vec<_>>()));
    for (phase, shape, step) in [("prefill", format!("{PROMPT} tokens"), vec![prompt(0)])].into_iter().chain(decode) {
        if !bench.wants(phase, &shape) {
            continue;
        }
        bench.begins(phase, &shape);
        let mut best = [Duration::MAX; 2];
        let (begun, mut turns) = (Instant::now(), 0);
        while turns < TURNS_MIN || begun.elapsed().as_secs_f64() < bench.seconds {
            for (executor, best) in executors.iter_mut().zip(&mut best) {
                let turn = Instant::now();
                executor.step(&step)?;
                *best = turn.elapsed().min(*best);
            }
            turns += 1;
        }
        let rows: usize = step.iter().map(|segment| segment.tokens.len()).sum();
        let [whole, split] = best.map(|least| rows as f64 / least.as_secs_f64());
        bench.rows.push(Row::without_limit(phase, format!("{name}, {shape}, whole"), whole, "tokens/s"));
        bench.rows.push(Row::without_limit(phase, format!("{name}, {shape}, on {ranks} ranks"), split, "tokens/s"));
    }
    Ok(())
}
