//! A model that is split over tensor-parallel ranks: groups of threads of this process, each with its own part of the weights and of every
//! block.
//!
//! A block has the same bytes as with any other number of ranks, `[layer][K, V][kv head]`; of each layer's K and V, a rank has a range. So
//! what one worker has published, another reads that is split otherwise, or not at all. (In the order `[kv head][layer][K, V]` a rank would
//! have one range of the whole block, but a layer's heads would lie apart: decode attention over long contexts took 3 to 10 % longer.) Every
//! head reads all of a latent, so of a model with latents each rank has a copy of the block.

use super::{
    chunk,
    forward::Chunk,
    model::{LoadOptions, Loaded, Model, load_parts},
    ranks::Exchange,
    results,
};
use crate::{
    error::ModelError,
    executor::{BlockBytes, Executor, ExecutorError},
    sampler::SamplerScratch,
};
use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};
use tidemill_kernels::cpu::{groups::Groups, kv::KvMemory};
use tidemill_proto::{
    block::{KvShape, LayoutFingerprint},
    stage::Stage,
    step::{Segment, SegmentResult, Wanted},
};

/// A loaded model, split over ranks.
pub struct RankedModel {
    groups: Groups,
    exchange: Arc<Exchange>,
    ranks: Vec<Model>,
    /// The shape of a block of all ranks, with this stage's layers.
    kv_shape: KvShape,
    /// The shape of a block with all layers.
    pub(super) whole_kv_shape: KvShape,
}

impl RankedModel {
    /// Loads a Hugging Face directory on `ranks` ranks, which have even shares of the options' threads: at least one each.
    pub fn load(dir: &Path, options: &LoadOptions, ranks: usize, progress: &mut dyn FnMut(u64, u64)) -> Result<RankedModel, ModelError> {
        Self::load_stage(dir, options, ranks, Stage::WHOLE, progress)
    }

    /// Loads the layers of one stage on `ranks` ranks.
    pub fn load_stage(
        dir: &Path,
        options: &LoadOptions,
        ranks: usize,
        stage: Stage,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<RankedModel, ModelError> {
        Self::load_with(dir, options, Exchange::new(ranks), stage, progress)
    }

    fn load_with(
        dir: &Path,
        options: &LoadOptions,
        exchange: Arc<Exchange>,
        stage: Stage,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<RankedModel, ModelError> {
        let places = exchange.ranks();
        let is_split = places.len() > 1;
        let (groups, cpus) = Groups::new(options.isa, places.len(), (options.threads / places.len()).max(1))?;
        let cpus = cpus.into_iter().zip(places.into_iter().map(|rank| is_split.then_some(rank))).collect();
        let Loaded { parts, kv_shape, whole_kv_shape } = load_parts(dir, options, stage, cpus, progress)?;
        Ok(RankedModel { groups, exchange, ranks: parts, kv_shape, whole_kv_shape })
    }

    /// The shape of a block of all ranks, with this stage's layers.
    pub fn kv_shape(&self) -> KvShape {
        self.kv_shape
    }

    /// Bytes of memory that a block takes on all ranks together: its own, or of a latent a copy for each rank.
    pub fn block_memory(&self) -> usize {
        self.ranks.iter().map(|model| model.kv_shape().block_bytes()).sum()
    }

    /// Whether weights that the file has in 4 bits were dequantized as they were loaded.
    pub fn dequantizes_4_bits(&self) -> bool {
        self.first().dequantizes_4_bits()
    }

    pub(super) fn first(&self) -> &Model {
        self.ranks.first().expect("at least one rank")
    }
}

/// A split model and its KV blocks, of which each rank has its heads.
pub struct RankedExecutor {
    groups: Groups,
    exchange: Arc<Exchange>,
    ranks: Vec<RankState>,
    kv_shape: KvShape,
    scratch: SamplerScratch,
    /// A block on its way to the ranks.
    block: Vec<u8>,
}

struct RankState {
    model: Model,
    kv: KvMemory,
    place: Place,
}

/// A rank's place in a block.
struct Place {
    /// Bytes of all heads' K or V in one layer; half of a latent's.
    row: usize,
    /// The rank's bytes of these.
    own: Range<usize>,
}

impl Place {
    /// Whether the rank has all of a block, as all other ranks do then.
    fn is_whole(&self) -> bool {
        self.own.len() == self.row
    }

    /// Copies the rank's part of `block` to `part`.
    fn take(&self, block: &[u8], part: &mut [u8]) {
        for (row, part) in block.chunks_exact(self.row).zip(part.chunks_exact_mut(self.own.len())) {
            part.copy_from_slice(&row[self.own.clone()]);
        }
    }

    /// Copies `part` to its place in `block`.
    fn put(&self, part: &[u8], block: &mut [u8]) {
        for (row, part) in block.chunks_exact_mut(self.row).zip(part.chunks_exact(self.own.len())) {
            row[self.own.clone()].copy_from_slice(part);
        }
    }
}

impl RankedExecutor {
    /// Creates an executor with memory for `blocks` KV blocks.
    pub fn new(model: RankedModel, blocks: usize) -> Self {
        let RankedModel { groups, exchange, ranks, kv_shape, .. } = model;
        let row = kv_shape.layer_bytes() / 2;
        let mut end = 0;
        let state = |model: Model| {
            let own = model.kv_shape().layer_bytes() / 2;
            let start = if own == row { 0 } else { end };
            end = start + own;
            RankState { kv: model.new_kv(blocks), model, place: Place { row, own: start..end } }
        };
        let ranks: Vec<_> = ranks.into_iter().map(state).collect();
        assert_eq!(end, row, "a block is the ranks' parts");
        Self { groups, exchange, ranks, kv_shape, scratch: SamplerScratch::new(), block: vec![0; kv_shape.block_bytes()] }
    }

    /// Replaces the memory by one for `blocks` KV blocks.
    pub(super) fn set_blocks(&mut self, blocks: usize) {
        self.ranks.iter_mut().for_each(|RankState { model, kv, .. }| *kv = model.new_kv(blocks));
    }

    pub(super) fn first(&self) -> &Model {
        &self.ranks.first().expect("at least one rank").model
    }

    /// Runs the chunks on all ranks; `input` has their rows if another stage comes before this one.
    pub(super) fn compute(&mut self, chunks: &[Chunk<'_>], input: Option<&[f32]>) -> Result<(), ExecutorError> {
        self.on_all_ranks(|model, kv| model.compute(chunks, input, kv))
    }

    /// Computes the logits of rows that went through all stages, and what segments want of them.
    pub(super) fn finish(&mut self, segments: &[Segment<'_>], rows: &[f32]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let wants_hidden = segments.iter().any(|segment| matches!(segment.wanted, Wanted::Embedding { .. }));
        self.on_all_ranks(|model, _| model.finish(rows, wants_hidden))?;
        Ok(self.results(segments))
    }

    fn results(&mut self, segments: &[Segment<'_>]) -> Vec<SegmentResult> {
        let first = &mut self.ranks.first_mut().expect("at least one rank").model;
        results(segments, first.logits(), &mut self.scratch)
    }

    /// Copies the ranks' parts of a block to `bytes`.
    pub(super) fn read_block(&self, block: u32, bytes: &mut [u8]) {
        for RankState { kv, place, .. } in &self.ranks {
            place.put(kv.block(block), bytes);
            if place.is_whole() {
                return;
            }
        }
    }

    /// Runs `task` on all ranks at the same time. After a failure, the ranks are in different places and cannot go on.
    fn on_all_ranks(&mut self, task: impl Fn(&mut Model, &mut KvMemory) + Sync) -> Result<(), ExecutorError> {
        let exchange = &self.exchange;
        let mut ranks: Vec<_> = self.ranks.iter_mut().enumerate().collect();
        self.groups.run(&mut ranks, |(index, RankState { model, kv, .. })| {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(model, kv))) {
                exchange.fail(*index, &*panic);
            }
        });
        match self.exchange.failure() {
            None => Ok(()),
            Some((rank, message)) => Err(ExecutorError::Rank { rank, ranks: self.ranks.len(), message }),
        }
    }
}

impl Executor for RankedExecutor {
    fn device_name(&self) -> &str {
        "CPU"
    }

    fn vocab(&self) -> usize {
        self.first().config().vocab()
    }

    fn context_tokens(&self) -> usize {
        self.first().config().context_tokens()
    }

    /// A row has the same bits in any step, and models with states, which cannot be rolled back, are not split.
    fn verifies_drafts(&self) -> bool {
        true
    }

    fn kv_shape(&self) -> KvShape {
        self.kv_shape
    }

    /// Ranks share the experts, and their counts.
    fn expert_rows(&self) -> Vec<u64> {
        self.first().expert_rows()
    }

    fn layout(&self) -> LayoutFingerprint {
        self.first().layout()
    }

    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let chunks: Vec<_> = segments.iter().map(chunk).collect();
        self.compute(&chunks, None)?;
        Ok(self.results(segments))
    }

    /// The bytes go by way of a buffer, from which each rank copies its own: its threads touch its memory first.
    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError> {
        if !fill(&mut self.block) {
            return Ok(false);
        }
        let bytes = &self.block;
        self.groups.run(&mut self.ranks, |RankState { kv, place, .. }| place.take(bytes, kv.block_mut(block)));
        Ok(true)
    }

    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError> {
        let whole = |&block: &u32| {
            let mut bytes = vec![0; self.kv_shape.block_bytes()];
            self.read_block(block, &mut bytes);
            bytes
        };
        Ok(BlockBytes::Ready(blocks.iter().map(whole).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuExecutor, ranks::Planted};
    use std::path::PathBuf;
    use tidemill_proto::{
        block::{BLOCK_TOKENS, KvDtype, Token},
        sampling::Sampling,
        step::{Draw, History, StateBlocks},
    };

    fn fixture() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama3")
    }

    fn options() -> LoadOptions {
        LoadOptions { kv_dtype: KvDtype::Bf16, quantize: None, threads: 2, isa: None }
    }

    fn ranked(planted: Planted) -> RankedExecutor {
        let model = RankedModel::load_with(&fixture(), &options(), Exchange::with_bug(2, planted), Stage::WHOLE, &mut |_, _| {}).unwrap();
        RankedExecutor::new(model, BLOCKS)
    }

    /// The first tokens of a greedy answer to a prompt of 40 tokens, and the bytes of its first two blocks.
    fn answer(executor: &mut dyn Executor) -> Result<(Vec<Token>, Vec<Vec<u8>>), ExecutorError> {
        let prompt: Vec<Token> = (0..40).map(|i| 3 + i * 7 % 200).collect();
        let (mut tokens, mut computed, sampling) = (prompt.clone(), 0, Sampling { temperature: 0.0, ..Sampling::default() });
        let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
        while tokens.len() < prompt.len() + 12 {
            let history = History::new(&tokens);
            let draw = Draw { sampling: &sampling, history: &history, index: 0, banned: &[], allowed: None };
            let (state, wanted) = (StateBlocks::default(), Wanted::Token(draw));
            let results = executor.step(&[Segment { tokens: &tokens[computed..], start: computed, blocks: &blocks, state, wanted }])?;
            computed = tokens.len();
            tokens.push(results[0].drawn[0].0);
        }
        let BlockBytes::Ready(bytes) = executor.read_blocks(&[0, 1])? else { unreachable!("ordinary memory") };
        Ok((tokens.split_off(prompt.len()), bytes))
    }

    const BLOCKS: usize = 64 / BLOCK_TOKENS;

    /// Whether the answer of two ranks is another than the whole model's, or fails.
    fn failed(planted: Planted) -> bool {
        let whole = Model::load(&fixture(), &options(), &mut |_, _| {}).unwrap();
        let expected = answer(&mut CpuExecutor::new(whole, BLOCKS)).unwrap();
        answer(&mut ranked(planted)).map_or(true, |found| found != expected)
    }

    #[test]
    fn planted_bugs_in_the_exchange_are_found_and_none_is_found_without() {
        assert!(!failed(Planted::Nothing));
        assert!(failed(Planted::NoBarrier));
        assert!(failed(Planted::WrongPlaces));
    }

    #[test]
    fn a_rank_that_fails_ends_its_group_and_is_named() {
        let mut executor = ranked(Planted::Panic);
        let error = answer(&mut executor).unwrap_err().to_string();
        assert!(error.contains("rank 1 of 2 failed") && error.contains("the planted panic"), "{error}");
        assert!(answer(&mut executor).is_err(), "it stays so");
    }
}
