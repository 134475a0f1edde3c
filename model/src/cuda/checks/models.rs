//! Whole models on the GPU: tiny checkpoints with references (`model/tests/fixtures`). Every token is judged by the logits that the CPU
//! computes for the same sequence.
//!
//! GPU and CPU round differently, and the logits of random models lie close together, so the GPU's greedy tokens need not be the
//! reference's. But each must be the CPU's likeliest or nearly so, and most must be the likeliest.

use crate::{
    cpu::{
        forward::{Chunk, LogitRows},
        model::{LoadOptions, Model},
    },
    cuda::{CudaExecutor, CudaOptions, KvBytes},
    error::ModelError,
    executor::{Executor, ExecutorError},
    json::read_json,
    sampler::token_logprob,
};
use serde::Deserialize;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tidemill_kernels::cuda::checks::Checks;
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, LayoutFingerprint, Token},
    sampling::Sampling,
    step::{Allowed, Draw, History, Mask, Segment, StateBlocks, Wanted},
};

/// The allowed difference between GPU and CPU.
#[derive(Clone, Copy)]
struct Tolerance {
    /// The largest distance of a drawn token's logit from the likeliest one's, and of log-probabilities.
    gap_max: f64,
    /// The largest mean distance of log-probabilities.
    mean_max: f64,
    /// The share of tokens that may differ from the CPU's likeliest.
    others_max: f64,
}

/// Logits of these models are within ±8; in bf16 they differ by up to 0.16, and 0.016 on average, on the CPU
/// (`model/tests/checkpoints/bf16.rs`), and two of them are compared.
const BF16: Tolerance = Tolerance { gap_max: 0.4, mean_max: 0.05, others_max: 0.1 };
/// Weights in FP8 are exact on both, but before every product with them the GPU rounds activations to 3 bits of mantissa, by
/// up to 2^-4 of each, where the CPU rounds them to 7. Logits are within ±4 here. In PyTorch, such activations alone change
/// log-probabilities by 0.02 to 0.06 on average, and by up to 0.26.
const FP8: Tolerance = Tolerance { gap_max: 0.5, mean_max: 0.1, others_max: 0.25 };
/// With K and V in 8 bits, a number that both round differently may become a different integer. Rounding to integers alone changes logits
/// by up to 0.27 on the CPU, and by 0.024 on average (`model/tests/checkpoints/int8.rs`).
const BF16_WITH_INT8_KV: Tolerance = Tolerance { gap_max: 0.5, mean_max: 0.07, others_max: 0.15 };
const FP8_WITH_INT8_KV: Tolerance = Tolerance { gap_max: 0.8, mean_max: 0.13, others_max: 0.25 };
/// With experts, the slightest rounding may change a row's choice, and its logits then differ by any amount. Few rows do: log-probabilities
/// differ by up to 0.045 on average, and by up to 0.085 with K and V in 8 bits.
const EXPERTS: Tolerance = Tolerance { gap_max: 4.0, mean_max: 0.15, others_max: 0.25 };
const GENERATED: usize = 48;
/// Tokens per step, few enough for prompts to take several steps and to mix with other sequences' tokens.
const CHUNK_TOKENS: usize = 96;

#[derive(Deserialize)]
struct Reference {
    /// Empty for checkpoints with a reference of a different kind, such as a perplexity.
    #[serde(default)]
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    ids: Vec<Token>,
    greedy: Vec<Token>,
}

/// The reason why checkpoints could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("{folder} holds no checkpoint with a reference.json")]
    NoCheckpoints { folder: PathBuf },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

/// Checks every checkpoint of `folder` on one device. One that cannot be checked counts as a failed check.
pub fn all(folder: &Path, cache: &Path, checks: &mut Checks) -> Result<(), CheckError> {
    on_several(folder, cache, [1, 1], checks)
}

/// Checks every checkpoint of `folder` on as many devices as the first number says, with blocks handed over to an executor on as many as
/// the second one says.
pub fn on_several(folder: &Path, cache: &Path, ranks: [usize; 2], checks: &mut Checks) -> Result<(), CheckError> {
    let entries = fs::read_dir(folder).map_err(|source| ModelError::Io { path: folder.to_owned(), source })?;
    let mut dirs: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    dirs.retain(|dir| dir.join("reference.json").is_file());
    dirs.sort();
    if dirs.is_empty() {
        return Err(CheckError::NoCheckpoints { folder: folder.to_owned() });
    }
    for dir in dirs {
        let name = dir.display().to_string();
        let mut layout = |kv_dtype| match checkpoint(&dir, kv_dtype, cache, ranks, checks) {
            Ok(layout) => layout,
            Err(error) => {
                checks.failed("checkpoint", format!("{name} with {} K and V", kv_dtype.name()), &error);
                None
            }
        };
        let layouts = layout(KvDtype::Bf16).zip(layout(KvDtype::Int8));
        checks.same("layouts told apart", name, &[layouts.is_none_or(|(bf16, int8)| bf16 != int8)], &[true], 0.0);
    }
    Ok(())
}

/// Compares with the CPU, with K and V of the same type. Returns the layout, unless there is nothing to check.
fn checkpoint(
    dir: &Path,
    kv_dtype: KvDtype,
    cache: &Path,
    ranks: [usize; 2],
    checks: &mut Checks,
) -> Result<Option<LayoutFingerprint>, CheckError> {
    let name = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let family = if kv_dtype == KvDtype::Bf16 { name } else { format!("{name} with {} K and V", kv_dtype.name()) };
    let path = dir.join("reference.json");
    let reference: Reference = read_json(&path)?;
    let prompts: Vec<&Prompt> = reference.prompts.iter().filter(|prompt| !prompt.greedy.is_empty()).collect();
    if prompts.is_empty() {
        checks.left_out.push(format!("{family}: its reference has no prompts"));
        return Ok(None);
    }
    let load = |ranks| {
        let options = CudaOptions {
            kernel_cache: cache.to_owned(),
            step_tokens: CHUNK_TOKENS + prompts.len(),
            sequences_max: prompts.len(),
            kv: KvBytes::Exactly(64 << 20),
            kv_dtype,
            ranks,
        };
        CudaExecutor::load(dir, &options, &mut |_, _| {})
    };
    let (mut executor, mut receiver) = match (load(ranks[0]), load(ranks[1])) {
        (Err(error @ ModelError::NotOnDevice { .. }), _) | (_, Err(error @ ModelError::NotOnDevice { .. })) => {
            checks.left_out.push(format!("{family}: {error}"));
            return Ok(None);
        }
        (executor, receiver) => (executor?, receiver?),
    };
    checks.same("layouts on any number of devices", family.clone(), &[executor.layout() == receiver.layout()], &[true], 0.0);
    let mut judge = Judge::new(dir, kv_dtype)?;
    let tolerance = match (executor.multiplies_fp8(), kv_dtype) {
        (false, KvDtype::Int8) => BF16_WITH_INT8_KV,
        (false, _) => BF16,
        (true, KvDtype::Int8) => FP8_WITH_INT8_KV,
        (true, _) => FP8,
    };
    let tolerance = if executor.on.config.experts.is_some() { EXPERTS } else { tolerance };
    let Tolerance { gap_max, others_max, .. } = tolerance;
    let ids: Vec<&[Token]> = prompts.iter().map(|prompt| &prompt.ids[..]).collect();
    let mut together = Sequences::new(&ids);
    together.generate(&mut executor, GENERATED)?;
    let verdict = judge.of(&together);
    checks.near_zero("greedy tokens: gap to the likeliest", format!("{family} together"), verdict.gap_max, gap_max);
    checks.near_zero("greedy tokens: others than the CPU's", format!("{family} together"), verdict.others, others_max);
    let as_transformers = prompts.iter().zip(&together.all).filter(|(p, s)| p.greedy.starts_with(s.generated())).count();
    checks.notes.push(format!("{family}: {as_transformers} of {} prompts go on as with transformers, in f32", prompts.len()));

    // Hand-over: the full blocks of every prompt go to different places in the memory of another executor.
    let mut handed = Sequences::new(&ids);
    handed.all.iter_mut().for_each(|sequence| sequence.blocks.reverse());
    let (mut sent, mut arrived): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
    for (from, to) in together.all.iter().zip(&mut handed.all) {
        let full = (from.prompt_tokens - 1) / BLOCK_TOKENS;
        let bytes = executor.read_blocks(&from.blocks[..full])?.wait()?;
        for (bytes, &block) in bytes.iter().zip(&to.blocks) {
            receiver.write_block(block, &mut |memory| {
                memory.copy_from_slice(bytes.as_ref());
                true
            })?;
        }
        receiver.read_blocks(&to.blocks[..full])?.wait()?.iter().for_each(|bytes| arrived.extend(bytes.as_ref()));
        bytes.iter().for_each(|bytes| sent.extend(bytes.as_ref()));
        to.computed = full * BLOCK_TOKENS;
    }
    checks.same("blocks handed over", family.clone(), &arrived, &sent, 0.0);
    handed.generate(&mut receiver, GENERATED)?;
    let verdict = judge.of(&handed);
    checks.near_zero("greedy tokens: gap to the likeliest", format!("{family} handed over"), verdict.gap_max, gap_max);
    checks.near_zero("greedy tokens: others than the CPU's", format!("{family} handed over"), verdict.others, others_max);

    let longest = ids.iter().max_by_key(|ids| ids.len());
    let longest = longest.ok_or_else(|| ModelError::Config { path, problem: "it has no prompts".into() })?;
    scores(&mut executor, &mut judge, &family, longest, tolerance, checks)?;
    edited(&mut executor, &mut judge, &family, longest, tolerance, checks)?;
    penalized(&mut executor, &family, longest, checks)?;
    Ok(Some(executor.layout()))
}

/// Sequences under penalties, drawn by the device and then by the CPU's sampler from the device's logits, which it gets if
/// log-probabilities are wanted. Rows change places from step to step.
fn penalized(executor: &mut CudaExecutor, family: &str, ids: &[Token], checks: &mut Checks) -> Result<(), ExecutorError> {
    const STEPS: usize = 12;
    let neutral = Sampling { temperature: 0.0, seed: 7, ..Default::default() };
    let bystander = neutral.clone();
    let repeating = Sampling { repetition_penalty: 1.4, ..neutral.clone() };
    let drawing = Sampling { temperature: 0.8, frequency_penalty: 0.9, presence_penalty: 0.4, ..neutral.clone() };
    let edited = Sampling { repetition_penalty: 1.1, frequency_penalty: 0.5, logit_bias: vec![(9, 3.0), (11, -3.0)], ..neutral };
    let samplings = [bystander, repeating, drawing, edited];
    let prompts: Vec<&[Token]> = (0..samplings.len()).map(|i| &ids[..ids.len().min(CHUNK_TOKENS / 4 - i)]).collect();
    let mut sequences = Sequences::new(&prompts);
    let mut histories: Vec<History> = prompts.iter().map(|prompt| History::new(prompt)).collect();
    let (mut by_device, mut by_cpu) = (Vec::new(), Vec::new());
    for index in 0..STEPS {
        let order: Vec<usize> = (0..samplings.len()).map(|i| (i + index) % samplings.len()).collect();
        let mut draw = |logprobs| {
            let samplings: Vec<Sampling> = samplings.iter().map(|sampling| Sampling { logprobs, ..sampling.clone() }).collect();
            let segments = order.iter().map(|&i| {
                let Sequence { tokens, blocks, computed, .. } = &sequences.all[i];
                let (sampling, history, banned) = (&samplings[i], &histories[i], if i == 3 { &[5, 6][..] } else { &[] });
                let draw = Draw { sampling, history, index: index as u64, banned, allowed: None };
                Segment {
                    tokens: &tokens[*computed..],
                    start: *computed,
                    blocks,
                    state: StateBlocks::default(),
                    wanted: Wanted::Token(draw),
                }
            });
            let results = executor.step(&segments.collect::<Vec<_>>())?;
            Ok::<_, ExecutorError>(results.into_iter().map(|result| result.drawn.first().map(|(token, _)| *token)).collect::<Vec<_>>())
        };
        let (device, cpu) = (draw(None)?, draw(Some(0))?);
        for (&i, token) in order.iter().zip(cpu.iter().flatten()) {
            let sequence = &mut sequences.all[i];
            sequence.computed = sequence.tokens.len();
            sequence.tokens.push(*token);
            histories[i].push(*token);
        }
        by_device.extend(device);
        by_cpu.extend(cpu);
    }
    checks.same("tokens under penalties, as the CPU draws them", family.to_owned(), &by_device, &by_cpu, 0.0);
    Ok(())
}

/// Greedy tokens under a grammar's mask, a bias and bans, drawn by prefill and by decode.
fn edited(
    executor: &mut CudaExecutor,
    judge: &mut Judge,
    family: &str,
    ids: &[Token],
    tolerance: Tolerance,
    checks: &mut Checks,
) -> Result<(), ExecutorError> {
    let ids = &ids[..ids.len().min(CHUNK_TOKENS)];
    let (last, blocks): (usize, Vec<u32>) = (ids.len() - 1, (0..ids.len().div_ceil(BLOCK_TOKENS) as u32).collect());
    let logits = judge.logits(ids).pop().expect("a row for each token");
    let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary") as Token;
    let mut few = Mask::none(logits.len());
    (0..logits.len() as Token).filter(|token| token % 7 == 3 && *token != likeliest).for_each(|token| few.allow(token));
    let mut only = Mask::none(logits.len());
    only.allow(5);
    let (biased, banned) = ([(9, 100.0), (11, -100.0)], [likeliest]);
    /// The name of a case; its mask, bias and bans.
    type Case<'a> = (&'a str, Option<&'a Mask>, &'a [(Token, f32)], &'a [Token]);
    let cases: [Case<'_>; 5] = [
        ("a mask", Some(&few), &[], &[]),
        ("a bias", None, &biased, &[]),
        ("a ban", None, &[], &banned),
        ("a mask, a bias and a ban", Some(&few), &biased, &banned),
        ("a mask of banned tokens only", Some(&only), &[], &[5]),
    ];
    let history = History::default();
    for (what, mask, bias, banned) in cases {
        let sampling = Sampling { temperature: 0.0, logit_bias: bias.to_vec(), ..Default::default() };
        let mut expected = logits.clone();
        bias.iter().for_each(|&(token, bias)| expected[token as usize] += bias);
        let possible = |token: Token| mask.is_none_or(|mask| mask.allows(token)) && (what.ends_with("only") || !banned.contains(&token));
        let best =
            (0..logits.len() as Token).filter(|&token| possible(token)).map(|token| expected[token as usize]).fold(f32::MIN, f32::max);
        for start in [0, last] {
            let draw = Draw { sampling: &sampling, history: &history, index: 0, banned, allowed: mask.map(|mask| mask as &dyn Allowed) };
            let segment =
                Segment { tokens: &ids[start..], start, blocks: &blocks, state: StateBlocks::default(), wanted: Wanted::Token(draw) };
            let drawn = executor.step(&[segment])?.remove(0).drawn;
            let gap = drawn.first().map_or(f64::INFINITY, |&(token, _)| {
                if possible(token) { f64::from(best - expected[token as usize]) } else { f64::INFINITY }
            });
            let way = if start == 0 { "prefill" } else { "decode" };
            checks.near_zero("edited logits: gap to the likeliest", format!("{family}, {what}, {way}"), gap, tolerance.gap_max);
        }
    }
    Ok(())
}

/// Log-probabilities of a prompt's tokens.
fn scores(
    executor: &mut CudaExecutor,
    judge: &mut Judge,
    family: &str,
    ids: &[Token],
    tolerance: Tolerance,
    checks: &mut Checks,
) -> Result<(), ExecutorError> {
    let ids = &ids[..ids.len().min(CHUNK_TOKENS)];
    let blocks: Vec<u32> = (0..ids.len().div_ceil(BLOCK_TOKENS) as u32).collect();
    let wanted = Wanted::Scores { targets: &ids[1..], top: 1, token: None };
    let results = executor.step(&[Segment { tokens: ids, start: 0, blocks: &blocks, state: StateBlocks::default(), wanted }])?;
    let logits = judge.logits(ids);
    let expected = logits.iter().zip(&ids[1..]).map(|(row, &id)| f64::from(token_logprob(row, id, 0).logprob));
    let scored = results[0].scores.iter().map(|score| f64::from(score.logprob));
    let differences: Vec<f64> = scored.zip(expected).map(|(a, b)| (a - b).abs()).collect();
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    let largest = differences.into_iter().fold(0.0, f64::max);
    checks.near_zero("log-probabilities: largest difference", family.to_owned(), largest, tolerance.gap_max);
    checks.near_zero("log-probabilities: mean difference", family.to_owned(), mean, tolerance.mean_max);
    let products = if executor.multiplies_fp8() { "FP8" } else { "bf16" };
    checks.notes.push(format!("{family}: products in {products}, log-probabilities differ by {mean:.3} on average, {largest:.3} at most"));
    Ok(())
}

/// A sequence with blocks of its own.
struct Sequence {
    tokens: Vec<Token>,
    prompt_tokens: usize,
    blocks: Vec<u32>,
    computed: usize,
}

impl Sequence {
    fn generated(&self) -> &[Token] {
        &self.tokens[self.prompt_tokens..]
    }
}

struct Sequences {
    all: Vec<Sequence>,
}

impl Sequences {
    fn new(prompts: &[&[Token]]) -> Self {
        let mut next = 0;
        let all = prompts.iter().map(|ids| {
            let count = (ids.len() + GENERATED).div_ceil(BLOCK_TOKENS) as u32;
            next += count;
            Sequence { tokens: ids.to_vec(), prompt_tokens: ids.len(), blocks: (next - count..next).collect(), computed: 0 }
        });
        Self { all: all.collect() }
    }

    /// Generates greedily, as an engine does: each step draws a token of every sequence whose prompt is computed, and computes chunks of
    /// the others.
    fn generate(&mut self, executor: &mut CudaExecutor, count: usize) -> Result<(), ExecutorError> {
        let (sampling, history) = (Sampling { temperature: 0.0, ..Default::default() }, History::default());
        loop {
            let mut budget = CHUNK_TOKENS;
            let mut planned: Vec<(usize, usize)> = Vec::new();
            for (i, sequence) in self.all.iter().enumerate().filter(|(_, s)| s.generated().len() < count) {
                let remaining = sequence.tokens.len() - sequence.computed;
                let len = if remaining == 1 { 1 } else { remaining.min(budget) };
                budget -= if remaining == 1 { 0 } else { len };
                planned.extend((len > 0).then_some((i, len)));
            }
            if planned.is_empty() {
                return Ok(());
            }
            let segments: Vec<Segment<'_>> = planned
                .iter()
                .map(|&(i, len)| {
                    let Sequence { tokens, blocks, computed, .. } = &self.all[i];
                    let draw = Draw { sampling: &sampling, history: &history, index: 0, banned: &[], allowed: None };
                    let wanted = if computed + len == tokens.len() { Wanted::Token(draw) } else { Wanted::Nothing };
                    Segment { tokens: &tokens[*computed..computed + len], start: *computed, blocks, state: StateBlocks::default(), wanted }
                })
                .collect();
            let results = executor.step(&segments)?;
            for ((i, len), result) in planned.into_iter().zip(results) {
                self.all[i].computed += len;
                self.all[i].tokens.extend(result.drawn.iter().map(|(token, _)| *token));
            }
        }
    }
}

/// The CPU's view of the same sequences.
struct Judge {
    model: Model,
}

struct Verdict {
    /// The largest distance of a drawn token's logit from the likeliest one's.
    gap_max: f64,
    /// The share of the drawn tokens that were not the likeliest.
    others: f64,
}

impl Judge {
    fn new(dir: &Path, kv_dtype: KvDtype) -> Result<Self, ModelError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let options = LoadOptions { kv_dtype, quantize: None, threads, isa: None };
        Ok(Self { model: Model::load(dir, &options, &mut |_, _| {})? })
    }

    /// Logits at every position.
    fn logits(&mut self, tokens: &[Token]) -> Vec<Vec<f32>> {
        let blocks: Vec<u32> = (0..tokens.len().div_ceil(BLOCK_TOKENS) as u32).collect();
        let mut kv = self.model.new_kv(blocks.len());
        let logits = self
            .model
            .forward(&[Chunk { tokens, start: 0, blocks: &blocks, state: StateBlocks::default(), logits: LogitRows::All }], &mut kv);
        (0..logits.rows()).map(|i| logits.row(i).to_vec()).collect()
    }

    fn of(&mut self, sequences: &Sequences) -> Verdict {
        let (mut gap_max, mut others, mut drawn) = (0.0f64, 0, 0);
        for Sequence { tokens, prompt_tokens, .. } in &sequences.all {
            let logits = self.logits(&tokens[..tokens.len() - 1]);
            for (row, &token) in logits[prompt_tokens - 1..].iter().zip(&tokens[*prompt_tokens..]) {
                let likeliest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let gap = f64::from(likeliest - row[token as usize]);
                gap_max = gap_max.max(gap);
                others += usize::from(gap > 0.0);
                drawn += 1;
            }
        }
        Verdict { gap_max, others: others as f64 / drawn.max(1) as f64 }
    }
}
