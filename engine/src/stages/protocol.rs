//! The decisions of both sides of a stage's link, without clock or socket. The simulation of faults drives the same code.

use tidemill_proto::stage::{FromStage, Hello, ToStage};

/// A stage's answer to a head's greeting. `is_taken`: whether the stage computes for another head.
pub fn greeting(ours: &Hello, theirs: &Hello, is_taken: bool, blocks_max: u32) -> FromStage {
    match mismatch(ours, theirs) {
        Some(reason) => FromStage::Refused { reason },
        None if is_taken => FromStage::Busy { reason: "it computes for another head".into() },
        None => FromStage::Ready { blocks_max },
    }
}

/// The reason why a stage cannot be the head's, if they differ.
fn mismatch(ours: &Hello, theirs: &Hello) -> Option<String> {
    if ours.stage != theirs.stage {
        let (here, there) = (ours.stage, theirs.stage);
        return Some(format!(
            "this is {here}, and the head wants {there}: `stage` gives a process its place, `stages` tells the head all others"
        ));
    }
    if ours.shape != theirs.shape {
        let (here, there) = (ours.shape, theirs.shape);
        return Some(format!("its blocks are {here:?}, the head's {there:?}: start both with one checkpoint and one `kv_dtype`"));
    }
    (ours.layout != theirs.layout).then(|| {
        "its weights or arithmetic differ from the head's: start both with one checkpoint, one version of Tidemill, one `quantize`, and `isa` \
         amx on all machines or on none"
            .to_owned()
    })
}

/// The number of blocks with which a head begins, if its first message after the greeting does so and the stage has room for them.
pub fn blocks_to_begin_with(message: &ToStage, blocks_max: usize) -> Option<usize> {
    match message {
        ToStage::Begin { blocks } if *blocks as usize <= blocks_max => Some(*blocks as usize),
        _ => None,
    }
}

/// A stage's part of a block on its way to the head.
#[derive(Debug)]
pub struct Part {
    bytes: Vec<u8>,
    len: usize,
}

impl Part {
    /// Expects a part of `len` bytes.
    pub fn new(len: usize) -> Self {
        Self { bytes: Vec::with_capacity(len), len }
    }

    /// Takes the stage's next answer. The error says why the link cannot go on.
    pub fn add(&mut self, answer: FromStage) -> Result<(), String> {
        match answer {
            FromStage::Part(bytes) if !bytes.0.is_empty() => self.bytes.extend_from_slice(&bytes.0),
            _ => return Err("it answered a read with something else".into()),
        }
        match self.bytes.len() > self.len {
            true => Err(format!("its part of a block has {} bytes, not {}", self.bytes.len(), self.len)),
            false => Ok(()),
        }
    }

    pub fn is_whole(&self) -> bool {
        self.bytes.len() == self.len
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::{
        block::{KvDtype, KvShape, LayoutFingerprint},
        stage::{Bytes, Stage},
    };

    fn hello() -> Hello {
        let shape = KvShape { layers: 4, kv_heads: 2, head_dim: 64, dtype: KvDtype::Bf16, latent: None };
        Hello { stage: Stage { index: 1, count: 3 }, layout: LayoutFingerprint([1; 16]), shape }
    }

    #[test]
    fn a_head_that_differs_is_told_in_what() {
        let ours = hello();
        let in_8_bits = KvShape { dtype: KvDtype::Int8, ..ours.shape };
        for (theirs, words) in [
            (Hello { stage: Stage { index: 1, count: 2 }, ..ours.clone() }, "stage 2 of 3, and the head wants stage 2 of 2"),
            (Hello { shape: in_8_bits, ..ours.clone() }, "Int8"),
            (Hello { layout: LayoutFingerprint([2; 16]), ..ours.clone() }, "one checkpoint, one version"),
        ] {
            // A head that can never be this stage's is not told to wait.
            let FromStage::Refused { reason } = greeting(&ours, &theirs, true, 7) else { panic!("it is refused") };
            assert!(reason.contains(words), "{reason}");
        }
        assert_eq!(greeting(&ours, &ours, false, 7), FromStage::Ready { blocks_max: 7 });
        assert!(matches!(greeting(&ours, &ours, true, 7), FromStage::Busy { .. }));
    }

    #[test]
    fn a_head_begins_within_the_room_of_the_stage() {
        assert_eq!(blocks_to_begin_with(&ToStage::Begin { blocks: 8 }, 8), Some(8));
        assert_eq!(blocks_to_begin_with(&ToStage::Begin { blocks: 9 }, 8), None);
        assert_eq!(blocks_to_begin_with(&ToStage::Read { block: 0 }, 8), None);
    }

    #[test]
    fn a_part_is_whole_when_all_its_bytes_are_there() {
        let piece = |len: usize| FromStage::Part(Bytes(vec![3; len]));
        let mut part = Part::new(5);
        part.add(piece(3)).unwrap();
        assert!(!part.is_whole());
        part.add(piece(2)).unwrap();
        assert!(part.is_whole());
        assert!(part.add(piece(1)).unwrap_err().contains("6 bytes, not 5"));
        assert!(Part::new(5).add(piece(0)).is_err());
        assert!(Part::new(5).add(FromStage::Rows(Bytes(vec![0; 5]))).is_err());
    }
}
