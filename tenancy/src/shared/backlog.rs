//! Entries that the quota server has yet to be told: bounded, in order. Each entry may be sent again, since the scripts do nothing the second time.

use super::Placed;
use crate::quota::Use;
use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Instant,
};

/// The most entries. Beyond it the oldest are given up, and counted.
const ENTRIES_MAX: usize = 1 << 16;
/// The number of times that the server may refuse an entry.
const REFUSALS_MAX: u8 = 5;
/// The number of entries that are looked at for each that may be taken.
const LOOKED_AT: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) placed: Arc<Placed>,
    pub(super) what: What,
    refusals: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// This coordinator let the request pass by itself.
    Charge {
        most: Use,
        at: Instant,
    },
    Settle {
        used: Use,
    },
    Cancel,
}

#[derive(Debug, Default)]
pub(super) struct Backlog {
    entries: VecDeque<Entry>,
    /// The number of entries that were taken, and of which it is not known yet whether they arrived.
    sending: usize,
    lost: u64,
}

impl Backlog {
    pub(super) fn push(&mut self, placed: Arc<Placed>, what: What) {
        self.entries.push_back(Entry { placed, what, refusals: 0 });
        while self.entries.len() > ENTRIES_MAX {
            self.entries.pop_front();
            self.lost += 1;
        }
    }

    /// Takes the first entries, at most `most`, no two of them of the same reservation: those have to arrive one after the other.
    pub(super) fn take(&mut self, most: usize) -> Vec<Entry> {
        let mut seen = HashSet::new();
        let looked_at = self.entries.iter().take(most * LOOKED_AT).enumerate();
        let first = looked_at.filter(|(_, entry)| seen.insert(entry.placed.number)).map(|(at, _)| at).take(most);
        let first: Vec<usize> = first.collect();
        let mut taken: Vec<Entry> = first.into_iter().rev().filter_map(|at| self.entries.remove(at)).collect();
        taken.reverse();
        self.sending += taken.len();
        taken
    }

    /// Puts back entries that were taken and did not arrive, before all others.
    pub(super) fn put_back(&mut self, entries: Vec<Entry>) {
        self.sending -= entries.len();
        entries.into_iter().rev().for_each(|entry| self.entries.push_front(entry));
    }

    /// Forgets an entry that was taken and arrived.
    pub(super) fn arrived(&mut self, _entry: Entry) {
        self.sending -= 1;
    }

    /// Puts back an entry that the server refused, unless it has done so often.
    pub(super) fn refused(&mut self, mut entry: Entry) {
        self.sending -= 1;
        entry.refusals += 1;
        if entry.refusals < REFUSALS_MAX {
            self.entries.push_front(entry);
        } else {
            self.lost += 1;
        }
    }

    /// The number of entries that wait to be taken.
    pub(super) fn waiting(&self) -> usize {
        self.entries.len()
    }

    /// Whether all entries have arrived, or were given up.
    pub(super) fn is_told(&self) -> bool {
        self.entries.is_empty() && self.sending == 0
    }

    /// The number of entries of which it is not known that they arrived.
    pub(super) fn len(&self) -> usize {
        self.entries.len() + self.sending
    }

    /// The number of entries that were given up.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(number: u64) -> Arc<Placed> {
        Arc::new(Placed { number, id: number.to_string(), keys: Vec::new(), deadline: Instant::now() })
    }

    #[test]
    fn entries_of_one_reservation_go_one_after_the_other() {
        let mut backlog = Backlog::default();
        for (number, what) in
            [(1, What::Cancel), (2, What::Settle { used: Use::default() }), (1, What::Settle { used: Use::default() }), (3, What::Cancel)]
        {
            backlog.push(placed(number), what);
        }
        let first = backlog.take(16);
        assert_eq!(first.iter().map(|entry| entry.placed.number).collect::<Vec<_>>(), [1, 2, 3]);
        backlog.put_back(first);
        let mut arrive = |most| {
            let entries = backlog.take(most);
            entries.into_iter().map(|entry| (entry.placed.number, backlog.arrived(entry)).0).collect::<Vec<_>>()
        };
        assert_eq!([2, 16, 16].map(&mut arrive), [vec![1, 2], vec![3, 1], vec![]]);
        assert_eq!((backlog.len(), backlog.lost()), (0, 0));
    }

    #[test]
    fn it_is_bounded_and_counts_what_it_gives_up() {
        let mut backlog = Backlog::default();
        let one = placed(1);
        (0..ENTRIES_MAX + 3).for_each(|_| backlog.push(Arc::clone(&one), What::Cancel));
        assert_eq!((backlog.len(), backlog.lost()), (ENTRIES_MAX, 3));
        let mut backlog = Backlog::default();
        backlog.push(one, What::Cancel);
        let mut refusals = 0;
        while let Some(entry) = backlog.take(1).pop() {
            backlog.refused(entry);
            refusals += 1;
        }
        assert_eq!((refusals, backlog.lost()), (usize::from(REFUSALS_MAX), 1));
    }
}
