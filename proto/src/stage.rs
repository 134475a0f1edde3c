//! Messages between the stages of a worker: the head, which its coordinators know and which has the first layers, and the processes that
//! hold the later ones.
//!
//! ```text
//!   head: Hello ──►   ◄── Ready; or Busy or Refused, and the end
//!         Begin ──►
//!         Step  ──►   ◄── Rows
//!         Write ──►
//!         Read  ──►   ◄── Part, until the stage's part of the block is whole
//! ```
//!
//! A stage answers in the order of the requests. What it cannot do ends the link, with the reason.

use crate::block::{KvShape, LayoutFingerprint, Token};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, SeqAccess, Visitor},
};
use std::{fmt, ops::Range, str::FromStr};

/// The most rows of a batch. Enough for a matrix product to be worth reading the weights, and few enough that stages work side by side.
pub const BATCH_ROWS: usize = 64;
/// The most bytes of a batch's rows, unless one row alone has more.
pub const BATCH_BYTES_MAX: usize = 2 << 20;
/// The most block ids in a batch's tables, unless one table alone has more.
pub const BATCH_TABLE_MAX: usize = 1 << 19;
/// The most bytes of a block in one message.
pub const PART_BYTES_MAX: usize = 4 << 20;

/// The place of a stage among those of its worker. The first one is the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stage {
    pub index: u32,
    pub count: u32,
}

impl Stage {
    /// The only stage of a worker whose layers are all in one process.
    pub const WHOLE: Stage = Stage { index: 0, count: 1 };

    /// Whether this is the head, which looks up embeddings and computes logits.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// The layers of this stage, out of `layers`. Stages have nearly equally many.
    pub fn layers(self, layers: usize) -> Range<usize> {
        let start = |index: u32| layers * index as usize / self.count as usize;
        start(self.index)..start(self.index + 1)
    }
}

/// Stages are counted from 1: the head is `1/3`.
impl FromStr for Stage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(nth, of)| Some((nth.parse::<u32>().ok()?, of.parse::<u32>().ok()?)));
        match numbers {
            Some((nth, count)) if nth >= 1 && nth <= count => Ok(Self { index: nth - 1, count }),
            _ => Err(format!("`{text}` is not a stage: write 2/3 for the second of three")),
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} of {}", self.index + 1, self.count)
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToStage {
    Hello(Hello),
    /// Makes room for this many blocks, whose contents are meaningless.
    Begin {
        blocks: u32,
    },
    Step(Batch),
    /// Bytes of this stage's part of a block, from byte `at` of that part on.
    Write {
        block: u32,
        at: u32,
        bytes: Bytes,
    },
    /// A request for this stage's part of a block.
    Read {
        block: u32,
    },
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FromStage {
    /// The stage takes part, with room for this many blocks at most.
    Ready {
        blocks_max: u32,
    },
    /// The stage belongs to another head now, which may be gone soon.
    Busy {
        reason: String,
    },
    /// The stage cannot be this worker's.
    Refused {
        reason: String,
    },
    /// The rows of a step after this stage's layers: all of them, or from the last stage those that are wanted. `[rows, hidden]` in f32.
    Rows(Bytes),
    Part(Bytes),
}

/// The worker that a stage is to take part in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The place of the stage that is addressed.
    pub stage: Stage,
    /// The commitment to weights, settings and arithmetic. All stages have that of the whole model.
    pub layout: LayoutFingerprint,
    /// The shape of a whole block.
    pub shape: KvShape,
}

/// Rows of one step on their way through the layers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Batch {
    pub chunks: Vec<StageChunk>,
    /// The residual stream of all chunks' rows, in order: `[rows, hidden]` in f32.
    pub rows: Bytes,
}

/// Consecutive rows of one sequence.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StageChunk {
    pub tokens: Vec<Token>,
    /// The position of the first token.
    pub start: u32,
    /// The block table, up to the last token's block.
    pub blocks: Vec<u32>,
    /// The number of rows, the last ones, that are wanted from the last stage: none, one, or all.
    pub wanted: u32,
}

/// Bytes that are encoded as one piece.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Numbers as little-endian bytes.
    pub fn of_numbers(numbers: &[f32]) -> Self {
        let mut bytes = vec![0; size_of_val(numbers)];
        bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
        Self(bytes)
    }

    /// The numbers that these bytes are; `None` if their length is not that of whole numbers.
    pub fn numbers(&self) -> Option<Vec<f32>> {
        let (numbers, rest) = self.0.as_chunks();
        rest.is_empty().then(|| numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(BytesVisitor).map(Self)
    }
}

struct BytesVisitor;

impl<'de> Visitor<'de> for BytesVisitor {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
        Ok(bytes)
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        Ok(bytes.to_vec())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u8>, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = seq.next_element()? {
            bytes.push(byte);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{self, HEADER_BYTES};

    #[test]
    fn stages_have_all_layers_and_nearly_equally_many() {
        for (layers, count) in [(1, 1), (2, 2), (7, 3), (80, 3), (61, 16)] {
            let stages = (0..count).map(|index| Stage { index, count }.layers(layers));
            let lengths: Vec<_> = stages.clone().map(|layers| layers.len()).collect();
            assert_eq!(stages.flatten().collect::<Vec<_>>(), (0..layers).collect::<Vec<_>>());
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1, "{lengths:?}");
        }
    }

    #[test]
    fn a_stage_is_read_as_it_is_counted() {
        assert_eq!("2/3".parse(), Ok(Stage { index: 1, count: 3 }));
        assert_eq!(Stage { index: 1, count: 3 }.to_string(), "stage 2 of 3");
        for wrong in ["", "2", "0/3", "4/3", "a/b", "-1/2", "1/2/3"] {
            assert!(wrong.parse::<Stage>().unwrap_err().contains("2/3"), "{wrong}");
        }
    }

    #[test]
    fn rows_and_blocks_fit_a_frame_and_come_back() {
        let rows = Bytes::of_numbers(&[1.5, -0.0, f32::MIN_POSITIVE]);
        assert_eq!(rows.numbers().unwrap(), [1.5, -0.0, f32::MIN_POSITIVE]);
        assert_eq!(Bytes(vec![0; 3]).numbers(), None);
        let chunk = StageChunk { tokens: vec![u32::MAX; BATCH_ROWS], start: 7, blocks: vec![u32::MAX; BATCH_TABLE_MAX], wanted: 1 };
        let step = ToStage::Step(Batch { chunks: vec![chunk], rows: Bytes(vec![7; BATCH_BYTES_MAX]) });
        for message in [step, ToStage::Write { block: 1, at: 2, bytes: Bytes(vec![1; PART_BYTES_MAX]) }] {
            let bytes = frame::encode(&message).unwrap();
            assert_eq!(frame::decode::<ToStage>(&bytes[HEADER_BYTES..]).unwrap(), message);
        }
    }
}
