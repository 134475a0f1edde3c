//! A model on one backend, with its KV blocks: the interface that an engine drives.
//!
//! All backends read a checkpoint's description and files alike. Each has its own packing of weights, computation of a step and bytes of a
//! block, so their layout fingerprints differ and their blocks never meet.

use crate::cuda::{DeviceCopy, PendingBlocks, PinnedBlock, Pinner};
use tidemill_kernels::cuda::CudaError;
use tidemill_proto::{
    block::{KvShape, LayoutFingerprint},
    stage::Stage,
    step::{Segment, SegmentResult},
};

/// A loaded model with its device blocks.
///
/// After an error, nothing computed so far may be used, and the executor cannot continue.
pub trait Executor: Send {
    /// The name of the device for operators: `CPU`, or the GPU's name.
    fn device_name(&self) -> &str;

    /// Tokens in the vocabulary.
    fn vocab(&self) -> usize;

    /// The longest sequence that the model allows, in tokens.
    fn context_tokens(&self) -> usize;

    /// Whether a segment must be a whole sequence, and blocks have no meaning after a step. Such a model only computes embeddings.
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

    /// Blocks of a sequence's state; 0 if no layer keeps one.
    fn state_blocks(&self) -> usize {
        0
    }

    /// The number of rows that went through each expert so far, by its number, summed over all layers; empty if they are not counted.
    fn expert_rows(&self) -> Vec<u64> {
        Vec::new()
    }

    /// A commitment to everything that decides the bytes of a KV block, besides its tokens.
    fn layout(&self) -> LayoutFingerprint;

    /// Computes all segments: writes their K and V, and returns the requested results of each, in order.
    ///
    /// # Panics
    /// On a broken contract: a token outside the vocabulary, an empty segment, one beyond the model's context or its
    /// block table, or an unknown block.
    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError>;

    /// Calls `fill` to write the bytes of a block that no step uses yet. Returns the result of `fill`, which tells whether the bytes are
    /// good. If they are not, the block's contents are meaningless.
    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError>;

    /// The whole memory from which [`write_block`](Self::write_block) hands out parts, if it is ordinary memory, so that it can be
    /// registered with a network device. It does not move as long as this executor lives.
    fn block_memory(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// The copies that this backend's device makes by itself from pinned memory, if it has such copies.
    fn device_copies(&mut self) -> Option<&mut dyn DeviceCopies> {
        None
    }

    /// The current bytes of these blocks, unaffected by later steps.
    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError>;
}

/// Copies that a device makes while the host and the device's other units do something else.
pub trait DeviceCopies {
    /// Pins memory for reading this many blocks at once. Reading more pins memory on demand, which takes time.
    fn reserve_reads(&mut self, blocks: usize) -> Result<(), ExecutorError>;

    /// A handle that pins the memory which blocks will come from. It works on any thread, as long as it lives.
    fn pinner(&self) -> Pinner;

    /// Starts to copy into a block that no step uses yet. A step that uses the block waits for the copy, as does a later read or write of
    /// it: so its owner may give it up, and another may take it, while the copy is in flight.
    ///
    /// # Safety
    /// `from` is the device's address of as many bytes as a block has, in memory that [`pinner`](Self::pinner) has pinned, and that stays
    /// pinned until the copy has ended. Writing these bytes meanwhile makes the block's contents meaningless, and has no other effect.
    unsafe fn copy_block(&mut self, block: u32, from: u64) -> Result<DeviceCopy, ExecutorError>;
}

/// The failure of a backend. The CPU's fails only as a group, of ranks or of stages.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("rank {rank} of {ranks} failed, and with it all: {message}")]
    Rank { rank: usize, ranks: usize, message: String },
    #[error("{stage} failed, and with it all: {message}")]
    Stage { stage: Stage, message: String },
}

/// An executor of any backend, which is chosen when the model is loaded.
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
    /// The pinned memory that a device copied them to. Dropping it soon saves the next read an allocation.
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
