//! Pipeline stages: a model whose layers are in several processes, each with the KV of its own layers.
//!
//! **The split.** Each stage has consecutive layers. The first one, the head, also has the embedding and the projection to logits: what comes
//! back from the last stage are the rows with logits, of `hidden` numbers each, where logits would be as many as the vocabulary has. A step's
//! rows travel in batches, so that a stage computes one while the next stage computes the one before. Each row's numbers are those of a model
//! in one process, handed on in f32.
//!
//! **Blocks.** A block has the same bytes as without stages, `[layer][K, V][kv head]`, of which a stage has one range. Blocks of the pool go
//! by way of the head, which passes each stage its part.

use super::{
    chunk,
    forward::{Chunk, LogitRows},
    ranked::{RankedExecutor, RankedModel},
};
use crate::{
    config::ModelConfig,
    error::ModelError,
    executor::{BlockBytes, Executor, ExecutorError},
};
use std::{collections::HashSet, ops::Range};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvShape, LayoutFingerprint},
    stage::{BATCH_BYTES_MAX, BATCH_ROWS, BATCH_TABLE_MAX, Batch, Bytes, Hello, Stage, StageChunk},
    step::{Segment, SegmentResult, StateBlocks},
};

/// Refuses what cannot be split over stages.
pub(super) fn check(config: &ModelConfig, stage: Stage) -> Result<(), ModelError> {
    if stage == Stage::WHOLE {
        return Ok(());
    }
    let refuse = |problem: String| Err(ModelError::Stages { stages: stage.count, problem });
    if config.recurrent.is_some() {
        return refuse("layers that keep a state are not split yet".into());
    }
    if config.layers < stage.count as usize {
        return refuse(format!("it has only {} layers", config.layers));
    }
    Ok(())
}

/// The stages after the head, as the head sees them.
pub trait LaterStages: Send {
    /// The number of these stages.
    fn count(&self) -> usize;

    /// Sends a batch into the first of these stages. No more batches than [`IN_FLIGHT_PER_STAGE`] for each stage are on their way.
    fn send(&mut self, batch: Batch) -> Result<(), ExecutorError>;

    /// Waits for the oldest batch that was sent, and returns its wanted rows as the last stage left them.
    fn receive(&mut self) -> Result<Vec<f32>, ExecutorError>;

    /// Gives each stage its part of a block; `bytes` are those of all of them.
    fn write_block(&mut self, block: u32, bytes: &[u8]) -> Result<(), ExecutorError>;

    /// Fills `bytes` with the parts that all of these stages have of a block.
    fn read_block(&mut self, block: u32, bytes: &mut [u8]) -> Result<(), ExecutorError>;
}

/// The most batches on their way, for each stage after the head: one that it computes, and one that waits.
pub const IN_FLIGHT_PER_STAGE: usize = 2;

/// The layers of one stage and their KV blocks, before the number of blocks is known.
pub struct StageModel {
    model: RankedModel,
}

impl StageModel {
    pub fn new(model: RankedModel) -> Self {
        Self { model }
    }

    /// The facts that a stage must have in common with the head.
    pub fn hello(&self, stage: Stage) -> Hello {
        Hello { stage, layout: self.model.first().layout(), shape: self.model.whole_kv_shape }
    }

    /// The shape of this stage's part of a block.
    pub fn kv_shape(&self) -> KvShape {
        self.model.kv_shape()
    }

    /// Bytes of memory that this stage's part takes on all ranks.
    pub fn block_memory(&self) -> usize {
        self.model.block_memory()
    }

    /// Whether weights that the file has in 4 bits were dequantized as they were loaded.
    pub fn dequantizes_4_bits(&self) -> bool {
        self.model.dequantizes_4_bits()
    }

    /// The head's executor, with room for `blocks` KV blocks on each stage.
    pub fn into_head(self, blocks: usize, later: Box<dyn LaterStages>) -> StagedExecutor {
        let (kv_shape, hidden) = (self.model.whole_kv_shape, self.model.first().config().hidden);
        let block = vec![0; kv_shape.block_bytes()];
        StagedExecutor { own: RankedExecutor::new(self.model, blocks), later, kv_shape, hidden, block }
    }

    /// A later stage's layers, without blocks until it [begins](StageExecutor::begin).
    pub fn into_later(self) -> StageExecutor {
        StageExecutor { part: vec![0; self.model.kv_shape().block_bytes()], blocks: 0, own: RankedExecutor::new(self.model, 0) }
    }
}

/// The head of a model in stages: its own layers, and the way to the others.
pub struct StagedExecutor {
    own: RankedExecutor,
    later: Box<dyn LaterStages>,
    /// The shape of a whole block.
    kv_shape: KvShape,
    hidden: usize,
    /// A block on its way to the stages.
    block: Vec<u8>,
}

impl StagedExecutor {
    /// The bytes of a block that are this stage's; the others follow.
    fn own_bytes(&self) -> usize {
        self.own.kv_shape().block_bytes()
    }

    /// Sends the chunks through all layers, and returns the rows with logits.
    fn compute(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<f32>, ExecutorError> {
        let in_flight_max = IN_FLIGHT_PER_STAGE * self.later.count();
        let (mut in_flight, mut rows) = (0, Vec::new());
        for batch in batches(chunks, self.hidden) {
            self.own.compute(&batch, None)?;
            if in_flight == in_flight_max {
                rows.extend(self.later.receive()?);
                in_flight -= 1;
            }
            let rows = Bytes::of_numbers(self.own.first().rows());
            self.later.send(Batch { chunks: batch.iter().map(to_stage).collect(), rows })?;
            in_flight += 1;
        }
        for _ in 0..in_flight {
            rows.extend(self.later.receive()?);
        }
        Ok(rows)
    }
}

impl Executor for StagedExecutor {
    fn device_name(&self) -> &str {
        "CPU"
    }

    fn vocab(&self) -> usize {
        self.own.vocab()
    }

    fn context_tokens(&self) -> usize {
        self.own.context_tokens()
    }

    fn verifies_drafts(&self) -> bool {
        self.own.verifies_drafts()
    }

    fn kv_shape(&self) -> KvShape {
        self.kv_shape
    }

    /// Only the rows of the head's layers: the other stages keep no count.
    fn expert_rows(&self) -> Vec<u64> {
        self.own.expert_rows()
    }

    fn layout(&self) -> LayoutFingerprint {
        self.own.layout()
    }

    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let chunks: Vec<_> = segments.iter().map(chunk).collect();
        let rows = self.compute(&chunks)?;
        self.own.finish(segments, &rows)
    }

    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError> {
        if !fill(&mut self.block) {
            return Ok(false);
        }
        let (own, others) = self.block.split_at(self.own_bytes());
        self.own.write_block(block, &mut |to| {
            to.copy_from_slice(own);
            true
        })?;
        self.later.write_block(block, others)?;
        Ok(true)
    }

    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError> {
        let own_bytes = self.own_bytes();
        let whole = |&block: &u32| {
            let mut bytes = vec![0; self.kv_shape.block_bytes()];
            let (own, others) = bytes.split_at_mut(own_bytes);
            self.own.read_block(block, own);
            self.later.read_block(block, others)?;
            Ok(bytes)
        };
        Ok(BlockBytes::Ready(blocks.iter().map(whole).collect::<Result<_, ExecutorError>>()?))
    }
}

/// Cuts chunks into batches, in order. A chunk may be cut anywhere: its rows' bits do not depend on the rows beside them.
fn batches<'a>(chunks: &[Chunk<'a>], hidden: usize) -> Vec<Vec<Chunk<'a>>> {
    let rows_max = (BATCH_BYTES_MAX / (hidden * size_of::<f32>())).clamp(1, BATCH_ROWS);
    let mut batches = vec![Vec::new()];
    let (mut rows, mut ids) = (0, 0);
    for chunk in chunks {
        let table = (chunk.start + chunk.tokens.len()).div_ceil(BLOCK_TOKENS);
        let mut first = 0;
        while first < chunk.tokens.len() {
            if rows == rows_max || (rows > 0 && ids + table > BATCH_TABLE_MAX) {
                batches.push(Vec::new());
                (rows, ids) = (0, 0);
            }
            let end = chunk.tokens.len().min(first + rows_max - rows);
            let logits = match chunk.logits {
                LogitRows::All => LogitRows::All,
                at_the_end if end == chunk.tokens.len() => at_the_end,
                _ => LogitRows::None,
            };
            let piece = Chunk { tokens: &chunk.tokens[first..end], start: chunk.start + first, logits, ..*chunk };
            batches.last_mut().expect("one to begin with").push(piece);
            (rows, ids, first) = (rows + end - first, ids + table, end);
        }
    }
    batches
}

/// A chunk as the later stages are told of it.
fn to_stage(chunk: &Chunk<'_>) -> StageChunk {
    let Chunk { tokens, start, blocks, logits, .. } = *chunk;
    let table = (start + tokens.len()).div_ceil(BLOCK_TOKENS);
    let wanted = match logits {
        LogitRows::None => 0,
        LogitRows::Last | LogitRows::LastHidden => 1,
        LogitRows::All => tokens.len() as u32,
    };
    StageChunk { tokens: tokens.to_vec(), start: start as u32, blocks: blocks[..table].to_vec(), wanted }
}

/// A later stage's layers with their part of each KV block. It computes for another process, so whatever it is given is checked.
pub struct StageExecutor {
    own: RankedExecutor,
    blocks: usize,
    /// This stage's part of a block, on its way to the layers' memory.
    part: Vec<u8>,
}

/// The reason why a stage could not do what the head asked for.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The request makes no sense. The stage is as before.
    #[error("the head asked for what cannot be done: {0}")]
    Request(String),
    /// The stage cannot go on.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

impl StageExecutor {
    /// Makes room for this many blocks, whose contents are meaningless.
    pub fn begin(&mut self, blocks: usize) {
        self.own.set_blocks(blocks);
        self.blocks = blocks;
    }

    /// Runs a batch through this stage's layers. Returns the rows for the next stage, or from the last one the wanted rows.
    pub fn step(&mut self, batch: &Batch) -> Result<Bytes, StageError> {
        let rows = self.check(batch)?;
        let chunks: Vec<_> = batch.chunks.iter().map(from_stage).collect();
        self.own.compute(&chunks, Some(&rows))?;
        Ok(Bytes::of_numbers(self.own.first().rows()))
    }

    /// Sets bytes of this stage's part of a block, from byte `at` on.
    pub fn write(&mut self, block: u32, at: usize, bytes: &[u8]) -> Result<(), StageError> {
        self.check_block(block)?;
        let len = self.part.len();
        let Some(place) = at.checked_add(bytes.len()).and_then(|end| self.part.get_mut(at..end)) else {
            return Err(StageError::Request(format!("{} bytes from {at} on are not within a part of {len}", bytes.len())));
        };
        place.copy_from_slice(bytes);
        if at + bytes.len() == len {
            let part = &self.part;
            self.own.write_block(block, &mut |to| {
                to.copy_from_slice(part);
                true
            })?;
        }
        Ok(())
    }

    /// This stage's part of a block.
    pub fn read(&mut self, block: u32) -> Result<&[u8], StageError> {
        self.check_block(block)?;
        self.own.read_block(block, &mut self.part);
        Ok(&self.part)
    }

    fn check_block(&self, block: u32) -> Result<(), StageError> {
        match (block as usize) < self.blocks {
            true => Ok(()),
            false => Err(StageError::Request(format!("there is no block {block}: there are {}", self.blocks))),
        }
    }

    /// Checks everything that computing relies on, and returns the rows' numbers.
    fn check(&self, Batch { chunks, rows }: &Batch) -> Result<Vec<f32>, StageError> {
        let request = |reason: String| Err(StageError::Request(reason));
        let context = self.own.context_tokens();
        let mut written = HashSet::new();
        for StageChunk { tokens, start, blocks, wanted } in chunks {
            let (start, len) = (*start as usize, tokens.len());
            if len == 0 || start + len > context {
                return request(format!("{len} rows from position {start} on, in a context of {context}"));
            }
            if blocks.len() != (start + len).div_ceil(BLOCK_TOKENS) {
                return request(format!("a table of {} blocks up to position {}", blocks.len(), start + len));
            }
            blocks.iter().try_for_each(|&block| self.check_block(block))?;
            if ![0, 1, len].contains(&(*wanted as usize)) {
                return request(format!("{wanted} of {len} rows"));
            }
            if let Some(twice) = blocks[written_blocks(start, len)].iter().find(|block| !written.insert(**block)) {
                return request(format!("block {twice} is written twice"));
            }
        }
        let (count, hidden) = (chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>(), self.own.first().config().hidden);
        match rows.numbers() {
            Some(numbers) if count > 0 && numbers.len() == count * hidden => Ok(numbers),
            _ => request(format!("{} bytes for {count} rows of {hidden} numbers", rows.0.len())),
        }
    }
}

/// The places in a sequence's table of the blocks that rows are written to.
fn written_blocks(start: usize, rows: usize) -> Range<usize> {
    start / BLOCK_TOKENS..(start + rows).div_ceil(BLOCK_TOKENS)
}

fn from_stage(StageChunk { tokens, start, blocks, wanted }: &StageChunk) -> Chunk<'_> {
    let logits = match *wanted as usize {
        0 => LogitRows::None,
        wanted if wanted == tokens.len() => LogitRows::All,
        _ => LogitRows::Last,
    };
    Chunk { tokens, start: *start as usize, blocks, state: StateBlocks::default(), logits }
}
