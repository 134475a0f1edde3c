//! Models that are split over tensor-parallel ranks: any number of ranks gives the same tokens, log-probabilities and blocks as none, cold
//! and from blocks that another number of ranks has computed.

use crate::fixtures::{FP8, INT4, family_tests, fixture, kv_dtypes, prompt_of, restored, with_all_kv_heads};
use std::path::Path;
use tidemill_kernels::Dtype;
use tidemill_model::{BlockBytes, CpuExecutor, Executor, LoadOptions, Model, ModelError, Quantization, RankedExecutor, RankedModel};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    sampling::{Sampling, TokenLogprob},
    step::{Draw, History, Segment, SegmentResult, StateBlocks, Wanted},
};

pub(crate) const BLOCKS: usize = 24;
pub(crate) const PROMPT: usize = 100;
const ANSWER: usize = 10;

pub(crate) fn options(kv_dtype: KvDtype, quantize: Option<Quantization>) -> LoadOptions {
    LoadOptions { kv_dtype, quantize, threads: 2, isa: None }
}

/// The model on this many ranks; 0: not split.
pub(crate) fn executor(dir: &Path, options: &LoadOptions, ranks: usize) -> Box<dyn Executor> {
    match ranks {
        0 => Box::new(CpuExecutor::new(Model::load(dir, options, &mut |_, _| {}).unwrap(), BLOCKS)),
        _ => Box::new(RankedExecutor::new(RankedModel::load(dir, options, ranks, &mut |_, _| {}).unwrap(), BLOCKS)),
    }
}

/// Everything that a run leaves: tokens, log-probabilities, scores of the prompt, an embedding, and the bytes of full blocks.
#[derive(PartialEq)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<Token>,
    logprobs: Vec<Option<TokenLogprob>>,
    scores: Vec<TokenLogprob>,
    embedding: Vec<f32>,
    pub(crate) blocks: Vec<Vec<u8>>,
}

/// The blocks of both sequences, not in order.
fn tables() -> [Vec<u32>; 2] {
    let all: Vec<u32> = (0..BLOCKS as u32).map(|i| i * 7 % BLOCKS as u32).collect();
    [all[..BLOCKS / 2].to_vec(), all[BLOCKS / 2..].to_vec()]
}

/// Two sequences in one batch, a greedy and a seeded one, in chunks; `cached` has the bytes of the first blocks of both, which are not
/// computed again.
pub(crate) fn run(executor: &mut dyn Executor, prompt: &[Token], chunk: usize, cached: &[Vec<u8>]) -> Outcome {
    let greedy = Sampling { temperature: 0.0, logprobs: Some(2), ..Sampling::default() };
    let seeded = Sampling { seed: 7, temperature: 0.9, top_p: 0.9, logprobs: Some(1), ..Sampling::default() };
    let (samplings, tables) = ([greedy, seeded], tables());
    for (nth, bytes) in cached.iter().enumerate() {
        for table in &tables {
            let filled = executor.write_block(table[nth], &mut |to| {
                to.copy_from_slice(bytes);
                true
            });
            assert!(filled.unwrap());
        }
    }
    let mut outcome = Outcome { tokens: Vec::new(), logprobs: Vec::new(), scores: Vec::new(), embedding: Vec::new(), blocks: Vec::new() };
    let mut sequences = [prompt.to_vec(), prompt.to_vec()];
    let mut computed = cached.len() * BLOCK_TOKENS;
    while sequences[0].len() < prompt.len() + ANSWER {
        let end = sequences[0].len().min(computed + chunk);
        let is_last = end == sequences[0].len();
        let histories = sequences.each_ref().map(|tokens| History::new(&tokens[..prompt.len()]).followed_by(&tokens[prompt.len()..]));
        let index = (sequences[0].len() - prompt.len()) as u64;
        let segment = |nth: usize| {
            let draw = Draw { sampling: &samplings[nth], history: &histories[nth], index, banned: &[], allowed: None };
            Segment {
                tokens: &sequences[nth][computed..end],
                start: computed,
                blocks: &tables[nth],
                state: StateBlocks::default(),
                wanted: if is_last { Wanted::Token(draw) } else { Wanted::Nothing },
            }
        };
        let results = executor.step(&[segment(0), segment(1)]).unwrap();
        computed = end;
        for (sequence, SegmentResult { drawn, .. }) in sequences.iter_mut().zip(results) {
            for (token, logprob) in drawn {
                sequence.push(token);
                outcome.tokens.push(token);
                outcome.logprobs.push(logprob);
            }
        }
    }
    let BlockBytes::Ready(blocks) = executor.read_blocks(&tables[0][..PROMPT / BLOCK_TOKENS]).unwrap() else { panic!("a CPU's are here") };
    outcome.blocks = blocks;
    let whole = |wanted| Segment { tokens: &prompt[..20], start: 0, blocks: &tables[1], state: StateBlocks::default(), wanted };
    let scores = Wanted::Scores { targets: &prompt[1..20], top: 2, token: None };
    // Beside the next row of the other sequence.
    let history = History::new(&sequences[0]);
    let wanted = Wanted::Token(Draw { sampling: &samplings[0], history: &history, index: 0, banned: &[], allowed: None });
    let next = Segment { tokens: &sequences[0][computed..], start: computed, blocks: &tables[0], state: StateBlocks::default(), wanted };
    let results = executor.step(&[next, whole(scores)]).unwrap();
    for SegmentResult { drawn, scores, .. } in results {
        outcome.tokens.extend(drawn.iter().map(|(token, _)| *token));
        outcome.scores.extend(scores);
    }
    let embedding = executor.step(&[whole(Wanted::Embedding { second_text: 20 })]).unwrap().remove(0).embedding;
    outcome.embedding = embedding.expect("a decoder has one");
    outcome
}

/// Checks that each number of ranks gives the whole model's bits, cold and from the whole model's blocks.
fn assert_same(name: &str, dir: &Path, options: &LoadOptions, degrees: &[usize]) {
    let prompt: Vec<Token> = prompt_of("llama3", PROMPT).into_iter().map(|token| token % 200).collect();
    let mut whole = executor(dir, options, 0);
    let expected = run(&mut *whole, &prompt, PROMPT, &[]);
    for &ranks in degrees {
        let mut split = executor(dir, options, ranks);
        assert!(split.layout() == whole.layout() && split.kv_shape() == whole.kv_shape(), "{name}: its blocks are any other's");
        assert!(split.verifies_drafts());
        for chunk in [PROMPT, 33] {
            let cold = run(&mut *split, &prompt, chunk, &[]);
            assert!(
                cold.tokens == expected.tokens,
                "{name} on {ranks} ranks in chunks of {chunk}: {:?}, not {:?}",
                cold.tokens,
                expected.tokens
            );
            assert!(cold.blocks == expected.blocks, "{name} on {ranks} ranks: blocks differ");
            assert!(cold == expected, "{name} on {ranks} ranks in chunks of {chunk}");
        }
        assert!(run(&mut *split, &prompt, PROMPT, &expected.blocks[..4]) == expected, "{name} on {ranks} ranks, cached");
    }
}

fn any_number_of_ranks_gives_the_same_bits_for_each_family(family: &str) {
    // Bf16 as it is, and 8 bits everywhere.
    for (kv_dtype, quantize) in kv_dtypes(family).skip(2).zip([None, Some(Quantization::Int8)]) {
        let name = format!("{family}, {kv_dtype:?}, {quantize:?}");
        assert_same(&name, &fixture(family), &options(kv_dtype, quantize), &[2]);
    }
}

// Two ranks cannot split a single KV head, nor layers that keep a state.
family_tests! { any_number_of_ranks_gives_the_same_bits_for_each_family: in_f32 in_bf16 with_experts }

#[test]
fn one_two_and_four_ranks_give_the_same_bits_in_each_arithmetic() {
    let in_bf16 = restored("llama", |_| Dtype::Bf16);
    for (dtype, dir) in [("f32", fixture("llama")), ("bf16", in_bf16.path().to_owned())] {
        for quantize in [None, Some(Quantization::Int8), Some(Quantization::Int4)] {
            assert_same(&format!("{dtype}, {quantize:?}"), &dir, &options(KvDtype::Bf16, quantize), &[1, 2, 4]);
        }
    }
}

fn experts_on_one_two_and_four_ranks_give_the_same_bits_in_each_arithmetic(family: &str) {
    let split_by_four = |dtype| {
        let dir = restored(family, |_| dtype);
        if family.starts_with("deepseek") { dir } else { with_all_kv_heads(dir) }
    };
    let (in_bf16, in_f32) = (split_by_four(Dtype::Bf16), split_by_four(Dtype::F32));
    for (dir, quantize) in [(&in_f32, None), (&in_bf16, None), (&in_bf16, Some(Quantization::Int8)), (&in_bf16, Some(Quantization::Int4))] {
        assert_same(&format!("{family}, {quantize:?}"), dir.path(), &options(KvDtype::Bf16, quantize), &[1, 2, 4]);
    }
}

family_tests! { experts_on_one_two_and_four_ranks_give_the_same_bits_in_each_arithmetic: with_experts }

#[test]
fn ranks_count_each_row_of_an_expert_once() {
    let prompt: Vec<Token> = (0..PROMPT as u32).map(|i| i * 37 % 200).collect();
    let counts = [0, 2].map(|ranks| {
        let mut executor = executor(&fixture("qwen3-moe"), &options(KvDtype::Bf16, None), ranks);
        run(&mut *executor, &prompt, PROMPT, &[]);
        executor.expert_rows()
    });
    assert!(counts[0].iter().sum::<u64>() > 0 && counts[0] == counts[1], "{counts:?}");
}

#[test]
fn quantized_checkpoints_are_split_by_rows() {
    for name in FP8.into_iter().chain(INT4).chain(["gpt-oss-mxfp4"]) {
        assert_same(name, &fixture(name), &options(KvDtype::Bf16, None), &[2]);
    }
}

#[test]
fn what_one_number_of_ranks_prefilled_another_decodes() {
    let dir = restored("llama", |_| Dtype::Bf16);
    let prompt: Vec<Token> = (0..PROMPT as u32).map(|i| i * 37 % 200).collect();
    for kv_dtype in [KvDtype::Bf16, KvDtype::Int8, KvDtype::F32] {
        let options = options(kv_dtype, None);
        let mut decode = executor(dir.path(), &options, 2);
        let expected = run(&mut *decode, &prompt, PROMPT, &[]);
        for ranks in [4, 1, 0] {
            let prefilled = run(&mut *executor(dir.path(), &options, ranks), &prompt, 64, &[]).blocks;
            let mut decode = executor(dir.path(), &options, 2);
            assert!(run(&mut *decode, &prompt, PROMPT, &prefilled) == expected, "{kv_dtype:?}: prefilled on {ranks} ranks");
        }
    }
}

#[test]
fn a_latent_that_four_ranks_prefilled_two_decode() {
    let (dir, options) = (fixture("deepseek-v3"), options(KvDtype::Bf16, None));
    let model = RankedModel::load(&dir, &options, 4, &mut |_, _| {}).unwrap();
    assert_eq!(model.block_memory(), 4 * model.kv_shape().block_bytes(), "each rank has a copy");
    let prompt: Vec<Token> = (0..PROMPT as u32).map(|i| i * 37 % 200).collect();
    let prefilled = run(&mut RankedExecutor::new(model, BLOCKS), &prompt, 64, &[]);
    assert!(run(&mut *executor(&dir, &options, 2), &prompt, PROMPT, &prefilled.blocks) == prefilled);
}

#[test]
fn a_block_whose_bytes_are_bad_changes_nothing() {
    let mut executor = executor(&fixture("llama3"), &options(KvDtype::Bf16, None), 2);
    let bytes = |executor: &mut dyn Executor| {
        let BlockBytes::Ready(bytes) = executor.read_blocks(&[3]).unwrap() else { panic!("a CPU's are here") };
        bytes
    };
    let before = bytes(&mut *executor);
    let bad = executor.write_block(3, &mut |to| {
        to.fill(7);
        false
    });
    assert!(!bad.unwrap());
    assert_eq!(bytes(&mut *executor), before);
}

#[test]
fn what_cannot_be_split_is_refused_with_the_reason() {
    for (family, ranks, words) in [
        ("llama3", 3, "4 query heads share 2 KV heads"),
        ("mistral", 2, "4 query heads share 1 KV heads"),
        ("deepseek-v3", 3, "equally many of its 4 heads"),
        ("qwen3-moe", 4, "4 query heads share 2 KV heads"),
        ("lfm2", 2, "layers that keep a state"),
    ] {
        let load = RankedModel::load(&fixture(family), &options(KvDtype::Bf16, None), ranks, &mut |_, _| {});
        let Err(error @ ModelError::Ranks { .. }) = load else { panic!("{family}: it is not refused") };
        let error = error.to_string();
        assert!(error.contains(words) && error.contains(&format!("{ranks} ranks")) && error.contains("--tensor-parallel"), "{error}");
    }
}
