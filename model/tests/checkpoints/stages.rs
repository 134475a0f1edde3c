//! Models whose layers are in several stages: any number of stages gives the same tokens, log-probabilities and blocks as one process, cold
//! and from blocks that another number of stages has computed, also with ranks in each stage.

use crate::{
    fixtures::{fixture, prompt_of, restored},
    ranks::{BLOCKS, PROMPT, executor, options, run},
};
use std::{collections::VecDeque, path::Path};
use tidemill_kernels::Dtype;
use tidemill_model::{
    Executor, ExecutorError, IN_FLIGHT_PER_STAGE, LaterStages, LoadOptions, ModelError, Quantization, RankedModel, StageError,
    StageExecutor, StageModel,
};
use tidemill_proto::{
    block::{KvDtype, Token},
    stage::{Batch, Bytes, Stage, StageChunk},
};

/// Stages that compute at once, in this process.
struct Here {
    stages: Vec<StageExecutor>,
    done: VecDeque<Bytes>,
    /// The bytes that each stage has of a block.
    parts: Vec<usize>,
}

impl LaterStages for Here {
    fn count(&self) -> usize {
        self.stages.len()
    }

    fn send(&mut self, mut batch: Batch) -> Result<(), ExecutorError> {
        for stage in &mut self.stages {
            batch.rows = stage.step(&batch).expect("the head asks for what can be done");
        }
        self.done.push_back(batch.rows);
        assert!(self.done.len() <= IN_FLIGHT_PER_STAGE * self.stages.len(), "no more batches on their way than there may be");
        Ok(())
    }

    fn receive(&mut self) -> Result<Vec<f32>, ExecutorError> {
        Ok(self.done.pop_front().expect("a batch that was sent").numbers().expect("numbers"))
    }

    fn write_block(&mut self, block: u32, mut bytes: &[u8]) -> Result<(), ExecutorError> {
        for (stage, part) in self.stages.iter_mut().zip(&self.parts) {
            let (own, others) = bytes.split_at(*part);
            // In two pieces, as large blocks are sent.
            stage.write(block, 0, &own[..100]).unwrap();
            stage.write(block, 100, &own[100..]).unwrap();
            bytes = others;
        }
        Ok(())
    }

    fn read_block(&mut self, block: u32, mut bytes: &mut [u8]) -> Result<(), ExecutorError> {
        for (stage, part) in self.stages.iter_mut().zip(&self.parts) {
            let (own, others) = bytes.split_at_mut(*part);
            own.copy_from_slice(stage.read(block).unwrap());
            bytes = others;
        }
        Ok(())
    }
}

fn load(dir: &Path, options: &LoadOptions, ranks: usize, stage: Stage) -> StageModel {
    StageModel::new(RankedModel::load_stage(dir, options, ranks, stage, &mut |_, _| {}).unwrap())
}

fn begun(stage: StageModel, blocks: usize) -> StageExecutor {
    let mut stage = stage.into_later();
    stage.begin(blocks);
    stage
}

/// The model in this many stages, each on this many ranks.
fn staged(dir: &Path, options: &LoadOptions, count: u32, ranks: usize) -> Box<dyn Executor> {
    let later: Vec<_> = (1..count).map(|index| load(dir, options, ranks, Stage { index, count })).collect();
    let parts = later.iter().map(|stage| stage.kv_shape().block_bytes()).collect();
    let stages = later.into_iter().map(|stage| begun(stage, BLOCKS)).collect();
    let head = load(dir, options, ranks, Stage { index: 0, count });
    Box::new(head.into_head(BLOCKS, Box::new(Here { stages, done: VecDeque::new(), parts })))
}

/// Checks that stages give the whole model's bits, cold and from the whole model's blocks.
fn assert_same(name: &str, dir: &Path, options: &LoadOptions, cases: &[(u32, usize)]) {
    let prompt: Vec<Token> = prompt_of("llama3", PROMPT).into_iter().map(|token| token % 200).collect();
    let mut whole = executor(dir, options, 0);
    let expected = run(&mut *whole, &prompt, PROMPT, &[]);
    for &(stages, ranks) in cases {
        let name = format!("{name} in {stages} stages of {ranks} ranks");
        let mut split = staged(dir, options, stages, ranks);
        assert!(split.layout() == whole.layout() && split.kv_shape() == whole.kv_shape(), "{name}: its blocks are any other's");
        assert!(split.verifies_drafts());
        for chunk in [PROMPT, 33] {
            let cold = run(&mut *split, &prompt, chunk, &[]);
            assert!(cold.tokens == expected.tokens, "{name} in chunks of {chunk}: {:?}, not {:?}", cold.tokens, expected.tokens);
            assert!(cold.blocks == expected.blocks, "{name}: blocks differ");
            assert!(cold == expected, "{name} in chunks of {chunk}");
        }
        assert!(run(&mut *split, &prompt, PROMPT, &expected.blocks[..4]) == expected, "{name}, cached");
    }
}

#[test]
fn any_number_of_stages_gives_the_same_bits_for_each_family() {
    // Plain; with biases and K offsets in 8 bits; with windows, two rotations and factors; with logits capped; latents; experts.
    for family in ["llama3", "qwen2", "gemma3", "gemma2", "cohere2", "deepseek-v3", "qwen3-moe", "gpt-oss"] {
        assert_same(&format!("{family} in bf16"), &fixture(family), &options(KvDtype::Bf16, None), &[(2, 1), (3, 1)]);
    }
    for family in ["llama3", "qwen2", "gemma3"] {
        assert_same(&format!("{family} in 8 bits"), &fixture(family), &options(KvDtype::Int8, Some(Quantization::Int8)), &[(2, 1), (3, 1)]);
    }
}

#[test]
fn stages_may_have_ranks() {
    let in_bf16 = restored("llama", |_| Dtype::Bf16);
    for kv_dtype in [KvDtype::Bf16, KvDtype::Int8] {
        assert_same("llama", in_bf16.path(), &options(kv_dtype, None), &[(2, 2), (3, 4)]);
    }
    for (family, cases) in [("qwen3-moe", &[(2, 2)][..]), ("gpt-oss", &[(2, 2)]), ("deepseek-v3", &[(2, 2), (3, 4)])] {
        assert_same(family, &fixture(family), &options(KvDtype::Bf16, None), cases);
    }
}

#[test]
fn what_one_number_of_stages_prefilled_another_decodes() {
    let (dir, options) = (fixture("llama"), options(KvDtype::Bf16, None));
    let prompt: Vec<Token> = (0..PROMPT as u32).map(|i| i * 37 % 200).collect();
    let expected = run(&mut *executor(&dir, &options, 0), &prompt, PROMPT, &[]);
    for (prefill, decode) in [(2, 3), (3, 2)] {
        let prefilled = run(&mut *staged(&dir, &options, prefill, 1), &prompt, 64, &[]).blocks;
        assert!(run(&mut *staged(&dir, &options, decode, 1), &prompt, PROMPT, &prefilled) == expected, "{prefill} to {decode}");
        assert!(run(&mut *executor(&dir, &options, 0), &prompt, PROMPT, &prefilled) == expected, "{prefill} to a whole model");
    }
}

#[test]
fn a_stage_refuses_what_cannot_be_done_and_goes_on() {
    let (dir, options) = (fixture("llama3"), options(KvDtype::Bf16, None));
    let mut stage = begun(load(&dir, &options, 1, Stage { index: 1, count: 2 }), 4);
    let chunk = || StageChunk { tokens: vec![1; 20], start: 0, blocks: vec![0, 1], wanted: 1 };
    let batch = |chunks: Vec<StageChunk>| {
        let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
        Batch { chunks, rows: Bytes::of_numbers(&vec![0.5; rows * 64]) }
    };
    let expected = stage.step(&batch(vec![chunk()])).unwrap();
    assert_eq!(expected.numbers().unwrap().len(), 64, "the row that is wanted");
    let cases = [
        (batch(vec![]), "0 rows"),
        (batch(vec![StageChunk { tokens: vec![], ..chunk() }]), "0 rows from position 0"),
        (batch(vec![StageChunk { start: u32::MAX, ..chunk() }]), "in a context of"),
        (batch(vec![StageChunk { blocks: vec![0], ..chunk() }]), "a table of 1 blocks up to position 20"),
        (batch(vec![StageChunk { blocks: vec![0, 4], ..chunk() }]), "no block 4"),
        (batch(vec![StageChunk { wanted: 2, ..chunk() }]), "2 of 20 rows"),
        (batch(vec![chunk(), StageChunk { blocks: vec![2, 1], ..chunk() }]), "block 1 is written twice"),
        (Batch { rows: Bytes(vec![0; 20 * 64 * 4 - 1]), ..batch(vec![chunk()]) }, "bytes for 20 rows of 64"),
        (Batch { rows: Bytes::of_numbers(&[0.5; 64]), ..batch(vec![chunk()]) }, "bytes for 20 rows of 64"),
    ];
    for (wrong, words) in cases {
        let Err(StageError::Request(reason)) = stage.step(&wrong) else { panic!("{words}: it is not refused") };
        assert!(reason.contains(words), "{reason}");
    }
    for (block, at, bytes) in [(4, 0, 1), (0, usize::MAX, 1), (0, 0, 1 << 20)] {
        assert!(matches!(stage.write(block, at, &vec![0; bytes]), Err(StageError::Request(_))), "{block}, {at}, {bytes}");
    }
    assert!(matches!(stage.read(4), Err(StageError::Request(_))));
    assert!(stage.step(&batch(vec![chunk()])).unwrap() == expected);
}

#[test]
fn what_cannot_be_split_over_stages_is_refused_with_the_reason() {
    for (family, count, words) in [("llama3", 4, "it has only 3 layers"), ("lfm2", 2, "layers that keep a state")] {
        let load = RankedModel::load_stage(&fixture(family), &options(KvDtype::Bf16, None), 1, Stage { index: 1, count }, &mut |_, _| {});
        let Err(error @ ModelError::Stages { .. }) = load else { panic!("{family}: it is not refused") };
        let error = error.to_string();
        assert!(error.contains(words) && error.contains(&format!("{count} stages")), "{error}");
    }
}
