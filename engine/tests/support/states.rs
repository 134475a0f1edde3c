//! The contents of a device's blocks of states, with which schedulers' tests compare the reads of each step.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};
use tidemill_engine::states::StateRule;
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Token},
    step::StateBlocks,
};

/// The contents of a part of the state after some tokens: a digest of these, and the part's number.
type Content = (u64, usize);

#[derive(Debug)]
pub(crate) struct States {
    pub(crate) rule: StateRule,
    device: BTreeMap<u32, Content>,
}

impl States {
    pub(crate) fn new(rule: StateRule) -> Self {
        Self { rule, device: BTreeMap::new() }
    }

    /// The contents of the blocks that hold states after full blocks of these tokens, by their keys.
    pub(crate) fn names(&self, layout: &LayoutFingerprint, salt: &[u8], tokens: &[Token]) -> BTreeMap<BlockKey, Content> {
        let chain = Chain::new(layout, salt, tokens);
        let ends = chain.keys().iter().zip(1..);
        let parts = ends.flat_map(|(key, end)| {
            key.state_parts(self.rule.blocks).enumerate().map(move |(part, name)| (name, (digest(&tokens[..end * BLOCK_TOKENS]), part)))
        });
        parts.collect()
    }

    /// Checks that a device block put into the pool has the contents of its key.
    pub(crate) fn put(&self, names: &BTreeMap<BlockKey, Content>, key: BlockKey, block: u32) {
        if let Some(content) = names.get(&key) {
            assert_eq!(self.device.get(&block), Some(content), "block {block} is put as what it is");
        }
    }

    /// Notes that a device block has the bytes that the pool had under a key.
    pub(crate) fn fetched(&mut self, names: &BTreeMap<BlockKey, Content>, key: BlockKey, block: u32) {
        match names.get(&key) {
            Some(content) => self.device.insert(block, *content),
            None => self.device.remove(&block),
        };
    }

    /// Checks that a step reads the state after the tokens before it.
    pub(crate) fn read(&self, state: StateBlocks<'_>, before: &[Token]) {
        assert_eq!(state.to.len(), self.rule.blocks);
        if self.rule.blocks == 0 {
            return;
        }
        assert_eq!(state.from.is_none(), before.is_empty(), "a state is zeros before the first token, and nowhere else");
        for (part, block) in state.from.unwrap_or_default().iter().enumerate() {
            assert_eq!(self.device.get(block), Some(&(digest(before), part)), "block {block} has the state after {} tokens", before.len());
        }
    }

    /// Notes that a step has written keys and values into some blocks, and the state after `tokens`.
    pub(crate) fn write(&mut self, state: StateBlocks<'_>, blocks: &[u32], tokens: &[Token]) {
        for block in blocks {
            self.device.remove(block);
        }
        for (part, block) in state.to.iter().enumerate() {
            self.device.insert(*block, (digest(tokens), part));
        }
    }
}

fn digest(tokens: &[Token]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}
