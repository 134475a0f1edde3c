//! A policy's memory of blocks that left, so that it recognizes them when they come back.

use std::collections::{BTreeMap, HashMap};
use tidemill_proto::block::BlockKey;

/// The last `max` blocks that left, with a note on each. Every operation is O(log n).
#[derive(Debug)]
pub(super) struct Ghosts<T> {
    max: usize,
    by_key: HashMap<BlockKey, (u64, T)>,
    by_age: BTreeMap<u64, BlockKey>,
    next: u64,
}

impl<T> Ghosts<T> {
    pub(super) fn new(max: usize) -> Self {
        Self { max, by_key: HashMap::new(), by_age: BTreeMap::new(), next: 0 }
    }

    /// Remembers a block. If there are more than `max` then, the one that left first is forgotten.
    pub(super) fn add(&mut self, key: BlockKey, note: T) {
        self.take(&key);
        self.by_age.insert(self.next, key);
        self.by_key.insert(key, (self.next, note));
        self.next += 1;
        if self.by_key.len() > self.max
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.by_key.remove(&oldest);
        }
    }

    /// Changes how many are remembered; those that left first are forgotten.
    pub(super) fn set_max(&mut self, max: usize) {
        self.max = max;
        while self.by_key.len() > max
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.by_key.remove(&oldest);
        }
    }

    pub(super) fn take(&mut self, key: &BlockKey) -> Option<T> {
        let (age, note) = self.by_key.remove(key)?;
        self.by_age.remove(&age);
        Some(note)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_remembered_once() {
        let mut ghosts = Ghosts::new(2);
        for (n, note) in [(1, 'a'), (2, 'b'), (1, 'c'), (3, 'd')] {
            ghosts.add(BlockKey([n; 16]), note);
        }
        assert_eq!([2, 1, 1, 3].map(|n| ghosts.take(&BlockKey([n; 16]))), [None, Some('c'), None, Some('d')]);
        assert!(ghosts.by_age.is_empty());
    }
}
