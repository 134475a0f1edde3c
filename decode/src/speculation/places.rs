//! The draft model's keys and values: a few blocks of its own, some of which each drafting sequence has.
//!
//! ```text
//!   free blocks ──► place of a sequence ──► left behind when it ends or is preempted ──► taken over by one that begins alike
//!        ▲                 │ not used for two rounds                     │ oldest first        (its next turn, itself resumed)
//!        └─────────────────┴─────────────────────────────────────────────┘ for others that want blocks
//! ```

use std::collections::{HashMap, VecDeque};
use tidemill_engine::job::JobId;
use tidemill_proto::block::{BLOCK_TOKENS, Token};

/// The keys and values of some tokens.
#[derive(Debug, Default)]
pub(crate) struct Place {
    /// The tokens whose keys and values the blocks have.
    pub(crate) tokens: Vec<Token>,
    pub(crate) blocks: Vec<u32>,
    /// The round that used it last.
    used: u64,
}

#[derive(Debug)]
pub(crate) struct Places {
    total: usize,
    free: Vec<u32>,
    owned: HashMap<JobId, Place>,
    /// Places that no longer belong to a sequence, the oldest first.
    left: VecDeque<Place>,
}

impl Places {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { total: blocks as usize, free: (0..blocks).rev().collect(), owned: HashMap::new(), left: VecDeque::new() }
    }

    pub(crate) fn get(&self, job: JobId) -> Option<&Place> {
        self.owned.get(&job)
    }

    pub(crate) fn get_mut(&mut self, job: JobId) -> Option<&mut Place> {
        self.owned.get_mut(&job)
    }

    /// The number of a sequence's first tokens in a place that it owns or could take over.
    pub(crate) fn held(&self, job: JobId, tokens: &[Token]) -> usize {
        match self.owned.get(&job) {
            Some(place) => shared(&place.tokens, tokens),
            None => self.nearest(tokens).map_or(0, |(_, held)| held),
        }
    }

    /// Takes a place with room for `len` tokens for a sequence, which keeps only the beginning that it shares with `tokens`. Returns `None`
    /// if other sequences use the blocks.
    pub(crate) fn take(&mut self, job: JobId, tokens: &[Token], len: usize, round: u64) -> Option<&Place> {
        let needed = len.div_ceil(BLOCK_TOKENS);
        if needed > self.total {
            return None;
        }
        if !self.owned.contains_key(&job) {
            let place = self.nearest(tokens).and_then(|(index, _)| self.left.remove(index)).unwrap_or_default();
            self.owned.insert(job, place);
        }
        let place = self.owned.get_mut(&job).expect("it was given one");
        place.used = round;
        place.tokens.truncate(shared(&place.tokens, tokens));
        while self.owned[&job].blocks.len() < needed {
            let Some(block) = self.free_block(round) else {
                self.leave(job);
                return None;
            };
            self.owned.get_mut(&job).expect("it was given one").blocks.push(block);
        }
        self.owned.get(&job)
    }

    /// Notes that the sequence ended, or lost its own blocks. The place is left to the first sequence that needs it.
    pub(crate) fn leave(&mut self, job: JobId) {
        if let Some(place) = self.owned.remove(&job) {
            if place.tokens.is_empty() {
                self.free.extend(place.blocks);
            } else {
                self.left.push_back(place);
            }
        }
    }

    /// The left place with the longest beginning in common with these tokens, at least a block.
    fn nearest(&self, tokens: &[Token]) -> Option<(usize, usize)> {
        let held = self.left.iter().map(|place| shared(&place.tokens, tokens)).enumerate();
        held.max_by_key(|(_, held)| *held).filter(|(_, held)| *held >= BLOCK_TOKENS)
    }

    fn free_block(&mut self, round: u64) -> Option<u32> {
        if let Some(block) = self.free.pop() {
            return Some(block);
        }
        let blocks = match self.left.pop_front() {
            Some(place) => place.blocks,
            None => {
                let idle = self.owned.iter().filter(|(_, place)| place.used + 1 < round);
                let (&job, _) = idle.min_by_key(|(job, place)| (place.used, **job))?;
                self.owned.remove(&job)?.blocks
            }
        };
        self.free.extend(blocks);
        self.free.pop()
    }

    /// Checks that each block is in one place, and that only these jobs own one. For tests.
    pub(crate) fn check_integrity(&self, lives: impl Fn(JobId) -> bool) {
        assert!(self.owned.keys().all(|job| lives(*job)), "a place is of a sequence that is gone");
        let mut seen = vec![false; self.total];
        let places = || self.owned.values().chain(&self.left);
        for &block in self.free.iter().chain(places().flat_map(|place| &place.blocks)) {
            assert!(!std::mem::replace(&mut seen[block as usize], true), "block {block} is in two places");
        }
        assert!(seen.into_iter().all(|seen| seen), "a block of the draft model is lost");
        assert!(places().all(|place| place.tokens.len() <= place.blocks.len() * BLOCK_TOKENS), "more tokens than room");
    }
}

/// The number of tokens that both begin with, without the last of `tokens`: that one is always computed, as its row gives the first guess.
fn shared(held: &[Token], tokens: &[Token]) -> usize {
    held.iter().zip(&tokens[..tokens.len().saturating_sub(1)]).take_while(|(held, token)| held == token).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(places: &mut Places, job: u64, tokens: &[Token], round: u64) -> bool {
        let taken = places.take(JobId(job), tokens, tokens.len(), round).is_some();
        if let Some(place) = places.get_mut(JobId(job)) {
            place.tokens = tokens.to_vec();
        }
        places.check_integrity(|_| true);
        taken
    }

    #[test]
    fn what_one_leaves_serves_the_next_that_begins_alike() {
        let mut places = Places::new(8);
        let tokens: Vec<Token> = (0..50).collect();
        assert!(fill(&mut places, 1, &tokens, 1));
        assert_eq!(places.held(JobId(2), &tokens), 0, "it is in use");
        places.leave(JobId(1));
        assert_eq!((places.held(JobId(2), &tokens), places.held(JobId(2), &tokens[..30])), (49, 29));
        assert_eq!(places.held(JobId(2), &[9; 40]), 0);
        let place = places.take(JobId(2), &tokens[..30], 60, 2).unwrap();
        assert_eq!((place.tokens.len(), place.blocks.len()), (29, 4));
    }

    #[test]
    fn blocks_come_from_whoever_needs_them_least() {
        let mut places = Places::new(4);
        assert!(fill(&mut places, 1, &[1; 32], 1) && fill(&mut places, 2, &[2; 32], 1));
        assert!(!fill(&mut places, 3, &[3; 16], 2), "both draft");
        places.leave(JobId(2));
        assert!(fill(&mut places, 3, &[3; 16], 2), "one is left behind");
        assert!(!fill(&mut places, 4, &[4; 33], 2), "one block is free, and it needs three");
        assert!(fill(&mut places, 4, &[4; 48], 9), "nobody has drafted for long");
        assert!(!fill(&mut places, 5, &[5; 80], 99), "never");
        for job in 1..6 {
            places.leave(JobId(job));
        }
        places.check_integrity(|_| false);
    }
}
