//! The model on this machine's cores.
//!
//! - [`model`]: loading, and the properties of a loaded model
//! - `projection`: packed weights and activations, in f32, bf16 or 8-bit integers
//! - `key_offset`: the constant that is subtracted from keys before they are stored in 8 bits
//! - [`forward`]: a batch of chunks through the layers, to logits; `band`: the rows that go through them together;
//!   `short_conv`, `delta_rule`: layers that keep a state; `conv_inputs`: the inputs of their convolutions; `states`: that state, in
//!   blocks; `dense`: feed-forward layers; `experts`: those of experts; `router`: the choice of experts for each row; `loads`: the rows of each
//!   expert, spread over ranks; `latent`: attention over a compressed latent
//! - `ranks`: how a model is split over tensor-parallel ranks, and their exchange; [`ranked`]: a model that is split;
//!   `gathers`: the exchange alone, for measuring
//! - `stages`: how a model's layers are spread over processes

mod band;
mod conv_inputs;
mod delta_rule;
mod dense;
mod experts;
pub mod forward;
mod gathers;
mod key_offset;
mod latent;
mod loads;
pub mod model;
pub(crate) mod projection;
pub mod ranked;
mod ranks;
mod router;
mod short_conv;
mod stages;
mod states;

pub use gathers::Gathers;
pub use projection::Quantization;
pub use ranked::{RankedExecutor, RankedModel};
pub use stages::{IN_FLIGHT_PER_STAGE, LaterStages, StageError, StageExecutor, StageModel, StagedExecutor};

use crate::{
    executor::{BlockBytes, Executor, ExecutorError},
    sampler::SamplerScratch,
    step::take_logits,
};
use forward::{Chunk, LogitRows, Logits};
use model::Model;
use tidemill_kernels::cpu::kv::KvMemory;
use tidemill_proto::{
    block::{KvShape, LayoutFingerprint},
    step::{Segment, SegmentResult, Wanted},
};

/// A model and its KV blocks in this process's memory.
pub struct CpuExecutor {
    model: Model,
    kv: KvMemory,
    scratch: SamplerScratch,
}

impl CpuExecutor {
    /// Creates an executor with memory for `blocks` KV blocks.
    pub fn new(model: Model, blocks: usize) -> Self {
        let kv = model.new_kv(blocks);
        Self { model, kv, scratch: SamplerScratch::new() }
    }
}

impl Executor for CpuExecutor {
    fn device_name(&self) -> &str {
        "CPU"
    }

    fn vocab(&self) -> usize {
        self.model.config().vocab()
    }

    fn context_tokens(&self) -> usize {
        self.model.config().context_tokens()
    }

    /// Only without states: one that includes a wrong guess cannot be rolled back.
    fn verifies_drafts(&self) -> bool {
        self.state_blocks() == 0
    }

    fn kv_shape(&self) -> KvShape {
        self.model.kv_shape()
    }

    fn state_blocks(&self) -> usize {
        self.model.state_blocks()
    }

    fn expert_rows(&self) -> Vec<u64> {
        self.model.expert_rows()
    }

    fn layout(&self) -> LayoutFingerprint {
        self.model.layout()
    }

    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let chunks: Vec<_> = segments.iter().map(chunk).collect();
        Ok(results(segments, self.model.forward(&chunks, &mut self.kv), &mut self.scratch))
    }

    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError> {
        Ok(fill(self.kv.block_mut(block)))
    }

    fn block_memory(&mut self) -> Option<&mut [u8]> {
        Some(self.kv.bytes_mut())
    }

    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError> {
        Ok(BlockBytes::Ready(blocks.iter().map(|&block| self.kv.block(block).to_vec()).collect()))
    }
}

/// The results that segments want of their logits.
fn results(segments: &[Segment<'_>], mut logits: Logits<'_>, scratch: &mut SamplerScratch) -> Vec<SegmentResult> {
    let mut first = 0;
    let finish = |segment: &Segment<'_>| {
        let mut result = SegmentResult::default();
        if let Wanted::Embedding { .. } = segment.wanted {
            result.embedding = Some(logits.hidden(first).to_vec());
        }
        for i in 0..segment.logit_rows() {
            take_logits(segment, i, logits.row_mut(first + i), scratch, &mut result);
        }
        first += segment.logit_rows();
        result
    };
    segments.iter().map(finish).collect()
}

/// The chunk of rows that the layers compute for a segment.
fn chunk<'a>(segment: &Segment<'a>) -> Chunk<'a> {
    let logits = match segment.wanted {
        Wanted::Nothing => LogitRows::None,
        Wanted::Token(_) => LogitRows::Last,
        Wanted::Verified(_) | Wanted::Scores { .. } => LogitRows::All,
        Wanted::Embedding { .. } => LogitRows::LastHidden,
    };
    Chunk { tokens: segment.tokens, start: segment.start, blocks: segment.blocks, state: segment.state, logits }
}
