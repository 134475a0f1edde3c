//! States of recurrent layers: the block ends that have one, and the place of a job's own on the device.
//!
//! A state is kept after some blocks only, as a run of ordinary blocks. So a prefix can be used up to the last end whose complete state is
//! there, and a step's chunk ends where a state is to be kept. A job has two states of its own: the running one, and that of the last block
//! end, as decode learns only afterwards that an answer has ended.

use tidemill_proto::{block::BLOCK_TOKENS, step::StateBlocks};

/// The rule by which the states of a model are kept. The default is that of a model without any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateRule {
    /// The number of blocks of a state; 0 if the model keeps none.
    pub blocks: usize,
    /// The number of blocks of a sequence from one kept state to the next.
    pub every: usize,
}

impl Default for StateRule {
    fn default() -> Self {
        Self { blocks: 0, every: EVERY_MIN }
    }
}

/// The smallest default interval of kept states.
const EVERY_MIN: usize = 32;
/// By default, states take at most one block for this many blocks of keys and values.
const SHARE: usize = 4;

impl StateRule {
    /// The rule for states of this many blocks. `every`: the operator's choice.
    pub fn new(blocks: usize, every: Option<usize>) -> Self {
        Self { blocks, every: every.unwrap_or(EVERY_MIN.max(SHARE * blocks)) }
    }

    /// The blocks that a job may need beside those of its tokens: two states of its own, and the one that it continues from, which other
    /// jobs may find.
    pub fn of_job(&self) -> usize {
        3 * self.blocks
    }

    /// Those of these blocks that are its own.
    pub(crate) fn private(&self) -> usize {
        2 * self.blocks
    }

    /// The number of the `remaining` tokens from position `start` that a chunk may have, so that it ends where a state is kept, or at one
    /// of `ends`, in blocks.
    pub fn cut(&self, start: usize, remaining: usize, ends: &[usize]) -> usize {
        if self.blocks == 0 {
            return remaining;
        }
        let next = (start / BLOCK_TOKENS / self.every + 1) * self.every;
        let next = ends.iter().copied().filter(|end| end * BLOCK_TOKENS > start).fold(next, usize::min);
        remaining.min(next * BLOCK_TOKENS - start)
    }

    /// Whether the state after this many tokens is kept: by the rule, or because it is at one of `ends`, in blocks.
    pub fn keeps(&self, tokens: usize, ends: &[usize]) -> bool {
        let end = tokens / BLOCK_TOKENS;
        self.blocks > 0 && tokens > 0 && tokens.is_multiple_of(BLOCK_TOKENS) && (end.is_multiple_of(self.every) || ends.contains(&end))
    }

    /// The last end by the rule within this many blocks.
    pub fn last_end(&self, blocks: usize) -> usize {
        blocks / self.every * self.every
    }
}

/// The place of the state after a job's computed tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Place {
    /// Before the first token, where it is zeros.
    #[default]
    Start,
    /// In blocks that other jobs may find and read.
    Shared,
    End,
    Running,
}

/// A job's state on the device.
#[derive(Debug, Default)]
pub(crate) struct JobState {
    place: Place,
    /// Findable blocks, while the state continues from them.
    shared: Vec<u32>,
    /// Private blocks of the state at the last block end.
    end: Vec<u32>,
    /// Private blocks of the state after other tokens.
    running: Vec<u32>,
    /// The number of blocks after which `end` has the state; 0 if it has none.
    end_at: usize,
    /// The number of blocks after which a state was last kept by this job, or came from the pool.
    kept_at: usize,
}

impl JobState {
    /// Takes a job's blocks: `shared` with the state to continue from, or none, and private ones.
    pub(crate) fn begin(&mut self, shared: Vec<u32>, mut private: Vec<u32>) {
        self.place = if shared.is_empty() { Place::Start } else { Place::Shared };
        self.shared = shared;
        self.running = private.split_off(private.len() / 2);
        self.end = private;
    }

    /// Gives up all blocks.
    pub(crate) fn give_up(&mut self) -> [Vec<u32>; 3] {
        let Self { shared, end, running, kept_at, .. } = std::mem::take(self);
        self.kept_at = kept_at;
        [shared, end, running]
    }

    /// All blocks that the job refers to.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u32> {
        self.shared.iter().chain(&self.end).chain(&self.running).copied()
    }

    /// The blocks for a chunk up to position `end`.
    pub(crate) fn of_chunk(&self, end: usize) -> StateBlocks<'_> {
        let from = match self.place {
            Place::Start => None,
            _ => Some(self.current()),
        };
        StateBlocks { from, to: if end.is_multiple_of(BLOCK_TOKENS) { &self.end } else { &self.running } }
    }

    /// The blocks of the current state; empty before the first token.
    pub(crate) fn current(&self) -> &[u32] {
        match self.place {
            Place::Start => &[],
            Place::Shared => &self.shared,
            Place::End => &self.end,
            Place::Running => &self.running,
        }
    }

    /// Notes that a chunk up to position `end` is computed. Returns the blocks that are no longer needed.
    pub(crate) fn advance(&mut self, end: usize) -> Vec<u32> {
        if end.is_multiple_of(BLOCK_TOKENS) {
            (self.place, self.end_at) = (Place::End, end / BLOCK_TOKENS);
        } else {
            self.place = Place::Running;
        }
        std::mem::take(&mut self.shared)
    }

    /// The destination of a fetched state.
    pub(crate) fn fetched_to(&self) -> &[u32] {
        &self.end
    }

    /// Notes that the state after `at` blocks came from the pool. Returns the blocks that are no longer needed.
    pub(crate) fn arrived(&mut self, at: usize) -> Vec<u32> {
        (self.place, self.end_at, self.kept_at) = (Place::End, at, at);
        std::mem::take(&mut self.shared)
    }

    /// The private blocks with the state at the last block end, and the number of blocks before that end.
    pub(crate) fn last_end(&self) -> Option<(usize, &[u32])> {
        (self.end_at > 0).then_some((self.end_at, &self.end))
    }

    /// Whether the current state is in private blocks at a block end.
    pub(crate) fn is_at_private_end(&self) -> bool {
        self.place == Place::End
    }

    /// Shares the blocks at the block end from now on; the job gets `fresh` ones in their place.
    pub(crate) fn share(&mut self, fresh: Vec<u32>) {
        assert!(self.is_at_private_end() && self.shared.is_empty(), "a state is shared where it ends");
        (self.place, self.end_at) = (Place::Shared, 0);
        self.shared = std::mem::replace(&mut self.end, fresh);
    }

    pub(crate) fn kept_at(&self) -> usize {
        self.kept_at
    }

    pub(crate) fn note_kept(&mut self, at: usize) {
        self.kept_at = at;
    }

    /// Asserts the invariants that hold between calls. For tests.
    pub(crate) fn check_integrity(&self, rule: StateRule, computed: usize, is_admitted: bool) {
        let own = if is_admitted { rule.blocks } else { 0 };
        assert_eq!([self.end.len(), self.running.len()], [own; 2], "two states of its own");
        assert_eq!(self.place == Place::Shared, !self.shared.is_empty());
        if rule.blocks > 0 && is_admitted {
            assert_eq!(self.place == Place::Start, computed == 0, "a state is zeros before the first token, and nowhere else");
            assert!(self.place == Place::Running || computed.is_multiple_of(BLOCK_TOKENS));
            assert!(self.end_at * BLOCK_TOKENS <= computed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_where_states_are_kept() {
        let rule = StateRule { blocks: 1, every: 4 };
        assert_eq!([0, 10, 63, 64].map(|start| rule.cut(start, 1000, &[6])), [64, 54, 1, 32]);
        assert_eq!((rule.cut(96, 1000, &[6]), rule.cut(0, 5, &[6])), (32, 5));
        let kept: Vec<usize> = (0..200).filter(|tokens| rule.keeps(*tokens, &[6])).collect();
        assert_eq!(kept, [64, 96, 128, 192]);
        assert_eq!(StateRule::default().cut(0, 1000, &[6]), 1000, "without states, nothing is cut");
        assert!(!StateRule::default().keeps(96, &[6]));
    }

    #[test]
    fn states_take_a_limited_share_of_the_blocks() {
        assert_eq!(StateRule::new(1, None).every, 32);
        assert_eq!(StateRule::new(190, None).every, 760);
        assert_eq!(StateRule::new(190, Some(8)).every, 8);
    }
}
