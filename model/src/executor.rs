//! A model on one backend, with the KV blocks it computes on: what an engine drives.
//!
//! All backends read a checkpoint's description and files alike. What they make of the weights, how they compute a step
//! and what the bytes of a block are is their own business, so their layout fingerprints differ and their blocks never
//! meet.

use crate::cuda::{DeviceCopy, PendingBlocks, PinnedBlock, Pinner};
use tidemill_kernels::cuda::CudaError;
use tidemill_proto::{
    block::{KvShape, LayoutFingerprint},
    step::{Segment, SegmentResult},
};

/// A loaded model with its device blocks.
///
/// After an error nothing computed so far may be used, and the executor cannot go on.
pub trait Executor: Send {
    /// For people: `CPU`, or the GPU's name.
    fn device_name(&self) -> &str;

    /// Tokens in the vocabulary.
    fn vocab(&self) -> usize;

    /// Longest sequence that the model allows, in tokens.
    fn context_tokens(&self) -> usize;

    /// Whether a segment must be a whole sequence, and the blocks mean nothing after a step: such a model computes embeddings alone.
    fn reads_whole(&self) -> bool {
        false
    }

    /// Whether a row has the same bits beside other rows of its sequence as in a step of its own, so that drafted tokens can be verified
    /// without changing an answer.
    fn verifies_drafts(&self) -> bool {
        false
    }

    /// Shape of a block, on this backend.
    fn kv_shape(&self) -> KvShape;

    /// Blocks that a sequence's state takes, where layers keep one; 0: none does.
    fn state_blocks(&self) -> usize {
        0
    }

    /// Rows that went through each expert so far, by its number, in all layers together; empty where they are not counted.
    fn expert_rows(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Commits to everything that decides the bytes of a KV block, besides its tokens.
    fn layout(&self) -> LayoutFingerprint;

    /// Computes all segments: writes their K and V, and returns what is wanted of each, in order.
    ///
    /// # Panics
    /// On a broken contract: a token outside the vocabulary, an empty segment, one beyond the model's context or its
    /// block table, or an unknown block.
    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError>;

    /// Lets `fill` write the bytes of a block that no step uses yet. Returns its answer: whether the bytes are good. If
    /// they are not, the block means nothing.
    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError>;

    /// The memory that [`write_block`](Self::write_block) hands out parts of, where it is ordinary memory: all of it, so that it can be
    /// made known to a network device. It stays where it is as long as this executor lives.
    fn block_memory(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// What copies blocks to the device by itself, from memory that it has pinned, if this backend has such a thing.
    fn device_copies(&mut self) -> Option<&mut dyn DeviceCopies> {
        None
    }

    /// The bytes that these blocks hold now, whatever later steps do to them.
    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError>;
}

/// Copies that a device makes while the host, and the device's other parts, do something else.
pub trait DeviceCopies {
    /// Pins memory for this many blocks that are read at once. Reads of more take memory as they come, which takes time.
    fn reserve_reads(&mut self, blocks: usize) -> Result<(), ExecutorError>;

    /// Pins memory that blocks will come from. It works on any thread, as long as it lives.
    fn pinner(&self) -> Pinner;

    /// Begins to copy a block that no step uses yet. A step that uses it waits for the copy, as does a later read or write of it: so its
    /// owner may give it up, and another may take it, while the copy is under way.
    ///
    /// # Safety
    /// `from` is the device's address of as many bytes as a block has, in memory that [`pinner`](Self::pinner) has pinned, and that stays
    /// pinned until the copy has ended. Who writes these bytes meanwhile makes the block meaningless, and nothing worse.
    unsafe fn copy_block(&mut self, block: u32, from: u64) -> Result<DeviceCopy, ExecutorError>;
}

/// A backend failed. The CPU's never does.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Any backend's executor: which one is decided when the model is loaded.
pub type Runner = Box<dyn Executor>;

/// Bytes of blocks, on their way into ordinary memory.
pub enum BlockBytes {
    Ready(Vec<Vec<u8>>),
    /// A device is copying them.
    Pending(PendingBlocks),
}

impl BlockBytes {
    /// Waits for the copy, for milliseconds at most.
    pub fn wait(self) -> Result<Vec<HostBlock>, ExecutorError> {
        match self {
            Self::Ready(blocks) => Ok(blocks.into_iter().map(HostBlock::Owned).collect()),
            Self::Pending(blocks) => Ok(blocks.wait()?.into_iter().map(HostBlock::Pinned).collect()),
        }
    }
}

/// A block's bytes on the host.
pub enum HostBlock {
    Owned(Vec<u8>),
    /// Where a device has put them. Dropped soon, this spares the next read an allocation.
    Pinned(PinnedBlock),
}

impl AsRef<[u8]> for HostBlock {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Pinned(block) => block.as_ref(),
        }
    }
}

const _: fn() = || {
    // A loaded model moves to the engine's own thread.
    fn assert_send<T: Send>() {}
    assert_send::<(Runner, BlockBytes, HostBlock, DeviceCopy)>();
};
