//! Deadlines in order of time.

use std::{collections::BTreeMap, time::Duration};

/// Entries that fall due at a time. Adding, cancelling and taking one costs O(log n).
#[derive(Debug)]
pub(super) struct Timers<T> {
    due: BTreeMap<TimerId, T>,
    next: u64,
}

/// A time, and a number that distinguishes entries with equal times.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct TimerId(Duration, u64);

impl<T> Timers<T> {
    pub(super) fn new() -> Self {
        Self { due: BTreeMap::new(), next: 0 }
    }

    pub(super) fn add(&mut self, at: Duration, due: T) -> TimerId {
        let id = TimerId(at, self.next);
        self.next += 1;
        self.due.insert(id, due);
        id
    }

    pub(super) fn cancel(&mut self, id: TimerId) {
        self.due.remove(&id);
    }

    /// Removes and returns the earliest entry, if it is due.
    pub(super) fn pop(&mut self, now: Duration) -> Option<T> {
        let first = self.due.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    pub(super) fn get(&self, id: TimerId) -> Option<&T> {
        self.due.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.due.values()
    }
}

impl TimerId {
    pub(super) fn at(self) -> Duration {
        self.0
    }
}
