//! The contents of blocks. A position holds a hash of all tokens up to it, chained from the previous position as stored in its block, and
//! the next token is a function of the last position. So a block that is lost, mixed up or altered changes the answer. Worlds for studies
//! of scheduling keep no bytes.

use crate::{random::mix, workload};
use std::collections::HashMap;
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Token},
    step::{Segment, SegmentResult, Wanted},
};

/// The bytes of a block: a number for each position.
pub(crate) type Block = [u64; BLOCK_TOKENS];

/// The bytes of a block in transit; `None` in worlds that keep none.
pub(crate) type Bytes = Option<Block>;

/// An engine's device blocks.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// The contents of the blocks; empty in worlds that keep no bytes.
    blocks: Vec<Block>,
}

/// A pool node's slots. Processes on its host can access them even after the node is gone.
#[derive(Debug)]
pub(crate) struct Arena {
    generations: Vec<u64>,
    blocks: Vec<Block>,
}

/// The correct contents of each block, derived from the clients' prompts and the answers that they should get.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    blocks: HashMap<BlockKey, Block>,
}

pub(crate) fn checksum(bytes: Bytes) -> u64 {
    bytes.map_or(0, |block| block.iter().fold(1, |sum, word| mix(sum ^ word)))
}

fn follow(state: u64, token: Token) -> u64 {
    mix(state ^ mix(u64::from(token) + 1))
}

fn next_token(state: u64, vocab: u32) -> Token {
    (mix(state) % u64::from(vocab)) as Token
}

impl Memory {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { blocks: vec![[0; BLOCK_TOKENS]; blocks] }
    }

    pub(crate) fn read(&self, block: u32) -> Bytes {
        self.blocks.get(block as usize).copied()
    }

    pub(crate) fn write(&mut self, block: u32, bytes: Bytes) {
        if let (Some(to), Some(bytes)) = (self.blocks.get_mut(block as usize), bytes) {
            *to = bytes;
        }
    }

    /// Stores what these tokens' positions hold, and returns it; nothing without contents.
    pub(crate) fn states(&mut self, tokens: &[Token], start: usize, blocks: &[u32]) -> Vec<u64> {
        if self.blocks.is_empty() {
            return Vec::new();
        }
        let place = |position: usize| (blocks[position / BLOCK_TOKENS] as usize, position % BLOCK_TOKENS);
        let mut state = start.checked_sub(1).map(place).map_or(0, |(block, at)| self.blocks[block][at]);
        let keep = |(position, &token): (usize, &Token)| {
            state = follow(state, token);
            let (block, at) = place(position);
            self.blocks[block][at] = state;
            state
        };
        (start..).zip(tokens).map(keep).collect()
    }
}

/// The rows that a segment's result needs, the last ones.
pub(crate) fn wanted_rows(segment: &Segment<'_>) -> usize {
    match segment.wanted {
        Wanted::Token(_) => 1,
        Wanted::Verified(_) => segment.tokens.len(),
        Wanted::Nothing | Wanted::Embedding { .. } | Wanted::Scores { .. } => 0,
    }
}

/// The result of a segment from the states of its rows, or of its wanted rows alone. Without contents, tokens are a function of seed and
/// number alone.
pub(crate) fn result(segment: &Segment<'_>, states: &[u64], vocab: u32) -> SegmentResult {
    let drawn = match segment.wanted {
        Wanted::Token(draw) if states.is_empty() => vec![(workload::token(draw.sampling.seed, draw.index as u32, vocab), None)],
        Wanted::Token(_) => vec![(next_token(states[states.len() - 1], vocab), None)],
        Wanted::Verified(draw) => {
            let token = |row: usize| match states.get(row) {
                Some(state) => next_token(*state, vocab),
                None => workload::token(draw.sampling.seed, draw.index as u32 + row as u32, vocab),
            };
            // A row counts if all drafted tokens up to its own were drawn.
            let right = segment.tokens[1..].iter().enumerate().take_while(|(row, drafted)| token(*row) == **drafted).count();
            (0..=right).map(|row| (token(row), None)).collect()
        }
        Wanted::Nothing | Wanted::Embedding { .. } | Wanted::Scores { .. } => Vec::new(),
    };
    SegmentResult { drawn, ..SegmentResult::default() }
}

impl Arena {
    pub(crate) fn new(slots: u32, keeps_bytes: bool) -> Self {
        Self { generations: vec![0; slots as usize], blocks: vec![[0; BLOCK_TOKENS]; if keeps_bytes { slots as usize } else { 0 }] }
    }

    pub(crate) fn set_generation(&mut self, slot: u32, generation: u64) {
        self.generations[slot as usize] = generation;
    }

    pub(crate) fn generation(&self, slot: u32) -> u64 {
        self.generations[slot as usize]
    }

    pub(crate) fn read(&self, slot: u32) -> Bytes {
        self.blocks.get(slot as usize).copied()
    }

    pub(crate) fn write(&mut self, slot: u32, bytes: Bytes) {
        if let (Some(to), Some(bytes)) = (self.blocks.get_mut(slot as usize), bytes) {
            *to = bytes;
        }
    }

    /// Flips one bit of a slot.
    pub(crate) fn flip(&mut self, slot: u32, bit: u32) {
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            flip(block, bit);
        }
    }
}

pub(crate) fn flip(block: &mut Block, bit: u32) {
    block[bit as usize / 64 % BLOCK_TOKENS] ^= 1 << (bit % 64);
}

impl Truth {
    /// The correct answer to a prompt. Records the contents of all its blocks.
    pub(crate) fn answer(&mut self, layout: &LayoutFingerprint, prompt: &[Token], tokens: u32, vocab: u32) -> Vec<Token> {
        let mut all = prompt.to_vec();
        let mut states: Vec<u64> = Vec::with_capacity(prompt.len() + tokens as usize);
        for position in 0..prompt.len() + tokens as usize {
            if position >= prompt.len() {
                all.push(next_token(states[position - 1], vocab));
            }
            states.push(follow(states.last().copied().unwrap_or(0), all[position]));
        }
        let (blocks, _) = states.as_chunks::<BLOCK_TOKENS>();
        self.blocks.extend(Chain::new(layout, b"", &all).keys().iter().copied().zip(blocks.iter().copied()));
        all.split_off(prompt.len())
    }

    /// Whether these bytes differ from the correct contents of the key's block.
    pub(crate) fn contradicts(&self, key: &BlockKey, bytes: Bytes) -> bool {
        bytes.is_some_and(|bytes| self.blocks.get(key).is_some_and(|truth| *truth != bytes))
    }
}
