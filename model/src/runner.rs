//! A model where it runs, with the KV blocks that it works on: what an engine drives.
//!
//! The description of a model and its files are read alike for every device; what becomes of the weights, what a step does and what a
//! block looks like is the backend's own. Nothing but keys tells their blocks apart, so their layout fingerprints differ.

use crate::{
    config::ModelConfig,
    cuda::{CudaRunner, PendingBlocks},
    model::Model,
    sampler::SamplerScratch,
    step::{chunk, take_logits},
};
use tidemill_kernels::{cpu::kv::KvMemory, cuda::CudaError};
use tidemill_proto::{
    block::{KvShape, LayoutFingerprint},
    step::{Segment, SegmentResult},
};

pub enum Runner {
    Cpu(Box<CpuRunner>),
    Cuda(Box<CudaRunner>),
}

/// On this machine's cores.
pub struct CpuRunner {
    model: Model,
    kv: KvMemory,
    scratch: SamplerScratch,
}

/// Bytes of blocks, on their way into memory that anybody may read.
pub enum BlockBytes {
    Ready(Vec<Vec<u8>>),
    /// A device copies them.
    Pending(PendingBlocks),
}

impl BlockBytes {
    /// Waits for them, for milliseconds at most.
    pub fn wait(self) -> Result<Vec<Vec<u8>>, CudaError> {
        match self {
            Self::Ready(blocks) => Ok(blocks),
            Self::Pending(blocks) => blocks.wait(),
        }
    }
}

impl Runner {
    /// With memory for `blocks` KV blocks.
    pub fn on_cpu(model: Model, blocks: usize) -> Self {
        let kv = model.new_kv(blocks);
        Self::Cpu(Box::new(CpuRunner { model, kv, scratch: SamplerScratch::new() }))
    }

    pub fn config(&self) -> &ModelConfig {
        match self {
            Self::Cpu(cpu) => cpu.model.config(),
            Self::Cuda(cuda) => cuda.config(),
        }
    }

    pub fn kv_shape(&self) -> KvShape {
        match self {
            Self::Cpu(cpu) => cpu.model.kv_shape(),
            Self::Cuda(cuda) => cuda.kv_shape(),
        }
    }

    /// Commits to everything that decides the bytes of a KV block, besides its tokens.
    pub fn layout(&self) -> LayoutFingerprint {
        match self {
            Self::Cpu(cpu) => cpu.model.layout(),
            Self::Cuda(cuda) => cuda.layout(),
        }
    }

    /// Computes all segments: writes their K and V, and returns what is wanted of each, in order. After an error nothing that was
    /// computed may be used, and nothing more can be.
    ///
    /// # Panics
    /// On a broken contract: a token outside the vocabulary, an empty segment, one beyond the model's context or its block table, or
    /// a block that there is not.
    pub fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, CudaError> {
        match self {
            Self::Cpu(cpu) => Ok(cpu.step(segments)),
            Self::Cuda(cuda) => cuda.step(segments),
        }
    }

    /// Fills a block that no step uses yet.
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) -> Result<(), CudaError> {
        match self {
            Self::Cpu(cpu) => cpu.kv.block_mut(block).copy_from_slice(bytes),
            Self::Cuda(cuda) => cuda.write_block(block, bytes)?,
        }
        Ok(())
    }

    /// What these blocks hold now, whatever later steps do to them.
    pub fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, CudaError> {
        match self {
            Self::Cpu(cpu) => Ok(BlockBytes::Ready(blocks.iter().map(|&block| cpu.kv.block(block).to_vec()).collect())),
            Self::Cuda(cuda) => Ok(BlockBytes::Pending(cuda.read_blocks(blocks)?)),
        }
    }
}

impl CpuRunner {
    fn step(&mut self, segments: &[Segment<'_>]) -> Vec<SegmentResult> {
        let chunks: Vec<_> = segments.iter().map(chunk).collect();
        let mut logits = self.model.forward(&chunks, &mut self.kv);
        let mut first = 0;
        let finish = |segment: &Segment<'_>| {
            let mut result = SegmentResult::default();
            for i in 0..segment.logit_rows() {
                take_logits(segment, i, logits.row_mut(first + i), &mut self.scratch, &mut result);
            }
            first += segment.logit_rows();
            result
        };
        segments.iter().map(finish).collect()
    }
}

const _: fn() = || {
    // A loaded model moves to the engine's own thread.
    fn assert_send<T: Send>() {}
    assert_send::<(Runner, BlockBytes)>();
};
