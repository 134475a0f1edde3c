//! A queue in which groups take turns, so that a group with many items waits only for its own.

use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};

pub(crate) struct Turns<T> {
    waiting: Mutex<Waiting<T>>,
    changed: Condvar,
}

struct Waiting<T> {
    /// The groups with waiting items.
    groups: BTreeMap<u64, VecDeque<T>>,
    /// The group whose turn was last.
    last: u64,
    is_closed: bool,
}

impl<T> Turns<T> {
    pub(crate) fn new() -> Self {
        Self { waiting: Mutex::new(Waiting { groups: BTreeMap::new(), last: u64::MAX, is_closed: false }), changed: Condvar::new() }
    }

    pub(crate) fn put(&self, group: u64, item: T) {
        self.waiting.lock().groups.entry(group).or_default().push_back(item);
        self.changed.notify_one();
    }

    /// The next item, once there is one; `None` if the queue is closed and empty.
    pub(crate) fn take(&self) -> Option<T> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(item) = waiting.next() {
                return Some(item);
            }
            if waiting.is_closed {
                return None;
            }
            self.changed.wait(&mut waiting);
        }
    }

    pub(crate) fn close(&self) {
        self.waiting.lock().is_closed = true;
        self.changed.notify_all();
    }
}

impl<T> Waiting<T> {
    /// The oldest item of the group after the last one, in a circle.
    fn next(&mut self) -> Option<T> {
        let after = self.last.checked_add(1).and_then(|next| self.groups.range(next..).next());
        let group = *after.or_else(|| self.groups.first_key_value())?.0;
        self.last = group;
        let items = self.groups.get_mut(&group)?;
        let item = items.pop_front();
        if items.is_empty() {
            self.groups.remove(&group);
        }
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread};

    #[test]
    fn groups_take_turns_and_each_keeps_its_order() {
        let turns = Turns::new();
        (0..5).for_each(|n| turns.put(7, ("flood", n)));
        assert_eq!(turns.take(), Some(("flood", 0)));
        turns.put(u64::MAX, ("quiet", 0));
        turns.put(0, ("other", 0));
        turns.put(0, ("other", 1));
        turns.close();
        let order: Vec<_> = std::iter::from_fn(|| turns.take()).collect();
        let expected = [("quiet", 0), ("other", 0), ("flood", 1), ("other", 1), ("flood", 2), ("flood", 3), ("flood", 4)];
        assert_eq!(order, expected);
        assert!(turns.waiting.lock().groups.is_empty());
    }

    #[test]
    fn whoever_takes_waits_until_there_is_something_or_the_end() {
        let turns = Arc::new(Turns::new());
        let taking = Arc::clone(&turns);
        let taker = thread::spawn(move || std::iter::from_fn(|| taking.take()).collect::<Vec<u32>>());
        (0..3).for_each(|n| turns.put(n, n as u32));
        turns.close();
        let mut taken = taker.join().unwrap();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
    }
}
