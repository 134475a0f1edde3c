//! Encoders: from a text's tokens to one row of numbers, an embedding or a classifier's logits.
//!
//! An encoder reads a text as a whole: each row also attends to those after it, so nothing of a prefix can be reused, and there is no KV to
//! keep. A step's blocks only hold a layer's keys and values until the next layer's replace them.
//!
//! - `family`: the differences between families, one row each; `config`: `config.json` and the pooling, checked
//! - `weights`: loading; `forward`: a batch of texts through the layers
//!
//! As with decoders, a text's numbers depend on that text alone, bit for bit: not on the batch, the threads or the instruction set (AMX's
//! order in bf16 aside).

mod config;
mod family;
mod forward;
mod weights;

pub use forward::Text;
pub use weights::{Encoder, EncoderOptions};

use crate::executor::{BlockBytes, Executor, ExecutorError};
use tidemill_kernels::cpu::kv::KvMemory;
use tidemill_proto::{
    block::{KvShape, LayoutFingerprint},
    step::{Segment, SegmentResult, Wanted},
};

/// An encoder with the working memory of its steps.
pub struct EncoderExecutor {
    encoder: Encoder,
    kv: KvMemory,
}

impl EncoderExecutor {
    /// Creates an executor with memory for `blocks` blocks of tokens at once.
    pub fn new(encoder: Encoder, blocks: usize) -> Self {
        let kv = encoder.new_kv(blocks);
        Self { encoder, kv }
    }
}

fn text<'a>(segment: &Segment<'a>) -> Text<'a> {
    let Wanted::Embedding { second_text } = segment.wanted else { panic!("an encoder draws no tokens") };
    assert_eq!(segment.start, 0, "an encoder reads a text as a whole");
    Text { tokens: segment.tokens, blocks: segment.blocks, second: second_text }
}

impl Executor for EncoderExecutor {
    fn device_name(&self) -> &str {
        "CPU"
    }

    fn vocab(&self) -> usize {
        self.encoder.vocab()
    }

    fn context_tokens(&self) -> usize {
        self.encoder.context_tokens()
    }

    fn reads_whole(&self) -> bool {
        true
    }

    fn kv_shape(&self) -> KvShape {
        self.encoder.kv_shape()
    }

    fn layout(&self) -> LayoutFingerprint {
        self.encoder.layout()
    }

    /// # Panics
    /// As for every executor, and on a segment that is not a whole text to be embedded.
    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let texts: Vec<_> = segments.iter().map(text).collect();
        let rows = self.encoder.encode(&texts, &mut self.kv);
        let width = rows.len() / texts.len().max(1);
        let result = |row: &[f32]| SegmentResult { embedding: Some(row.to_vec()), ..SegmentResult::default() };
        Ok(rows.chunks_exact(width.max(1)).map(result).collect())
    }

    fn write_block(&mut self, _: u32, _: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError> {
        // Blocks have no meaning between steps.
        Ok(false)
    }

    fn read_blocks(&mut self, _: &[u32]) -> Result<BlockBytes, ExecutorError> {
        Ok(BlockBytes::Ready(Vec::new()))
    }
}
