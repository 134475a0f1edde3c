//! The numbered stream of changes, for coordinators.

use std::collections::VecDeque;
use tidemill_proto::{block::BlockKey, message::PoolEvent, pool::Tier};

/// Events that have not been taken yet. When too many pile up, the oldest are dropped; the taker sees that from the numbers and sends a
/// snapshot instead.
#[derive(Debug)]
pub(super) struct EventLog {
    events: VecDeque<PoolEvent>,
    /// Number of the first of `events`.
    first: u64,
}

/// Consecutive events.
#[derive(Debug, PartialEq, Eq)]
pub struct Events {
    /// Number of the first one. If it is larger than the number that was due, events were lost.
    pub from: u64,
    pub events: Vec<PoolEvent>,
}

impl Events {
    /// Number of the next event.
    pub fn next(&self) -> u64 {
        self.from + self.events.len() as u64
    }
}

/// The most pending events: a few seconds of a busy node.
const PENDING_MAX: usize = 1 << 17;

impl EventLog {
    pub(super) fn new() -> Self {
        Self { events: VecDeque::new(), first: 0 }
    }

    pub(super) fn stored(&mut self, key: BlockKey, tier: Tier) {
        self.push(PoolEvent::Stored { key, tier });
    }

    pub(super) fn moved(&mut self, key: BlockKey, tier: Tier) {
        self.push(PoolEvent::Moved { key, tier });
    }

    pub(super) fn evicted(&mut self, key: BlockKey) {
        self.push(PoolEvent::Evicted(key));
    }

    fn push(&mut self, event: PoolEvent) {
        if self.events.len() == PENDING_MAX {
            self.events.pop_front();
            self.first += 1;
        }
        self.events.push_back(event);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(super) fn take(&mut self) -> Events {
        let taken = Events { from: self.first, events: std::mem::take(&mut self.events).into() };
        self.first = taken.next();
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_run_on_and_show_what_was_dropped() {
        let mut log = EventLog::new();
        log.stored(BlockKey([1; 16]), Tier::Dram);
        log.evicted(BlockKey([1; 16]));
        let first = log.take();
        assert_eq!((first.from, first.events.len(), first.next()), (0, 2, 2));
        for _ in 0..PENDING_MAX + 3 {
            log.moved(BlockKey([2; 16]), Tier::Nvme);
        }
        let second = log.take();
        assert_eq!((second.from, second.events.len()), (2 + 3, PENDING_MAX));
        assert!(log.is_empty());
        assert_eq!(log.take().from, second.next());
    }
}
