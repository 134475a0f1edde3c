//! The order of pieces of work that wait for a thread, or for the store. Pure: threads and waiting are left to the shell.
//!
//! Tiers take turns, so that a thousand keys of one do not outnumber the few tenants of another. Within a tier, the party with the fewest
//! running pieces goes first, and among several the one whose last start, or else arrival, is longest ago. Two places are kept
//! free, so that only the senders of long work wait for it: no party runs on every thread, and large pieces do not take every thread.

use crate::base::shares::{Holder, Party, Refused, Shares};
use std::collections::{BTreeMap, VecDeque};

/// The input size from which a piece counts as large: any work on it takes a while.
pub const LARGE_BYTES: usize = 64 << 10;
/// The maximum total input of large pieces that run at a time. Parsed input takes many times its size in memory.
const WORKED_ON_BYTES_MAX: usize = 16 << 20;

/// The stage of its request at which a piece runs.
#[derive(Clone, Copy, Debug)]
pub enum Stage {
    First,
    /// A piece that continues with results of the request's earlier pieces, which stay in memory until it ends.
    Later,
}

/// A piece of work in line.
#[derive(Debug)]
struct Piece<J> {
    id: u64,
    bytes: usize,
    job: J,
}

#[derive(Debug)]
struct Standing<J> {
    waiting: VecDeque<Piece<J>>,
    running: usize,
    /// The number of starts of all parties when this party's last piece started, or when the party came.
    started: u64,
}

#[derive(Debug)]
pub(crate) struct Line<J> {
    threads: usize,
    parties: BTreeMap<Party, Standing<J>>,
    /// The number of all starts when a piece of this tier started last, by the order in which tiers are shed.
    tiers: BTreeMap<u8, u64>,
    places: Shares<Party>,
    running_large: usize,
    running_bytes: usize,
    ids: u64,
    starts: u64,
}

/// A piece that has started, for [`Line::done`].
#[derive(Debug)]
pub(crate) struct Begun {
    party: Party,
    bytes: usize,
}

impl<J> Line<J> {
    /// Creates an empty line for this many threads, at least two, in which at most `waiting_max` pieces of all parties wait.
    pub(crate) fn new(threads: usize, waiting_max: u64) -> Self {
        let places = Shares::quarters(waiting_max, 0);
        Self { threads, parties: BTreeMap::new(), tiers: BTreeMap::new(), places, running_large: 0, running_bytes: 0, ids: 0, starts: 0 }
    }

    #[cfg(test)]
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Adds a piece whose input has this many bytes (0 if unknown). Returns its id for [`withdraw`](Self::withdraw). Later stages go before
    /// the party's first ones.
    pub(crate) fn enter(&mut self, party: &Party, stage: Stage, bytes: usize, job: J) -> Result<u64, Refused> {
        self.places.take(party, 1)?;
        self.ids += 1;
        let standing = self.parties.entry(party.clone());
        let standing = standing.or_insert_with(|| Standing { waiting: VecDeque::new(), running: 0, started: self.starts });
        let piece = Piece { id: self.ids, bytes, job };
        match stage {
            Stage::First => standing.waiting.push_back(piece),
            Stage::Later => standing.waiting.push_front(piece),
        }
        Ok(self.ids)
    }

    pub(crate) fn has_waiting(&self) -> bool {
        self.places.used() > 0
    }

    /// Takes the next piece for a free thread.
    pub(crate) fn next(&mut self) -> Option<(Begun, J)> {
        let may = |piece: &Piece<J>| {
            let is_large = piece.bytes > LARGE_BYTES;
            let fits = self.running_bytes == 0 || self.running_bytes + piece.bytes <= WORKED_ON_BYTES_MAX;
            !is_large || (fits && self.running_large + 1 < self.threads)
        };
        let turns =
            self.parties.iter().filter(|(_, standing)| standing.running + 1 < self.threads && standing.waiting.front().is_some_and(may));
        let tier_started = |party: &Party| self.tiers.get(&party.shed()).copied();
        let next = turns.min_by_key(|(party, standing)| (tier_started(party), standing.running, standing.started));
        let party = next.map(|(party, _)| party.clone())?;
        let standing = self.parties.get_mut(&party)?;
        let Piece { bytes, job, .. } = standing.waiting.pop_front()?;
        self.starts += 1;
        (standing.running, standing.started) = (standing.running + 1, self.starts);
        self.tiers.insert(party.shed(), self.starts);
        self.places.give(&party, 1);
        self.running_large += usize::from(bytes > LARGE_BYTES);
        self.running_bytes += if bytes > LARGE_BYTES { bytes } else { 0 };
        Some((Begun { party, bytes }, job))
    }

    /// Notes that a piece has ended and its thread is free.
    pub(crate) fn done(&mut self, Begun { party, bytes }: Begun) {
        self.running_large -= usize::from(bytes > LARGE_BYTES);
        self.running_bytes -= if bytes > LARGE_BYTES { bytes } else { 0 };
        if let Some(standing) = self.parties.get_mut(&party) {
            standing.running -= 1;
        }
        self.forget_if_gone(&party);
    }

    /// Removes a piece whose sender has left, if it has not started.
    pub(crate) fn withdraw(&mut self, party: &Party, id: u64) -> Option<J> {
        let standing = self.parties.get_mut(party)?;
        let at = standing.waiting.iter().position(|piece| piece.id == id)?;
        let piece = standing.waiting.remove(at)?;
        self.places.give(party, 1);
        self.forget_if_gone(party);
        Some(piece.job)
    }

    fn forget_if_gone(&mut self, party: &Party) {
        if self.parties.get(party).is_some_and(|standing| standing.running == 0 && standing.waiting.is_empty()) {
            self.parties.remove(party);
        }
    }

    /// Panics if the state is inconsistent. Tests call it after every step.
    #[cfg(test)]
    fn check_integrity(&self) {
        let waiting: usize = self.parties.values().map(|standing| standing.waiting.len()).sum();
        assert_eq!(self.places.used(), waiting as u64);
        let running: usize = self.parties.values().map(|standing| standing.running).sum();
        assert!(running <= self.threads && self.running_large < self.threads.max(1) && self.running_large <= running);
        assert!(self.parties.values().all(|standing| standing.running < self.threads));
        assert!(self.parties.values().all(|standing| standing.running > 0 || !standing.waiting.is_empty()));
        assert!(self.running_large > 0 || self.running_bytes == 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WAITING_MAX: u64 = 4096;

    fn party(name: &str) -> Party {
        Party::Tenant { name: name.into(), shed: 0 }
    }

    #[test]
    fn a_flood_leaves_a_thread_to_others_and_they_go_first() {
        let mut line = Line::new(3, WAITING_MAX);
        let (flood, quiet) = (party("flood"), party("quiet"));
        (0..100).for_each(|n| assert!(line.enter(&flood, Stage::First, 0, n).is_ok()));
        let first: Vec<_> = std::iter::from_fn(|| line.next()).collect();
        assert_eq!(first.iter().map(|(_, job)| *job).collect::<Vec<_>>(), [0, 1], "one thread is kept free");
        line.enter(&quiet, Stage::First, 0, 1000).unwrap();
        let (begun, job) = line.next().unwrap();
        assert_eq!(job, 1000);
        line.enter(&quiet, Stage::First, 0, 1001).unwrap();
        line.done(first.into_iter().next().unwrap().0);
        assert_eq!(line.next().unwrap().1, 2, "each has one running, and the flood's last start is longer ago");
        line.done(begun);
        assert_eq!(line.next().unwrap().1, 1001, "the flood has two running");
        line.check_integrity();
    }

    #[test]
    fn keys_that_keep_coming_delay_neither_another_tier_nor_the_last_name() {
        let free = |key: u32| Party::Tenant { name: format!("free-{key:04}").into(), shed: 1 };
        let last = Party::Tenant { name: "z".into(), shed: 1 };
        let mut line = Line::new(2, WAITING_MAX);
        (0..1000).for_each(|key| assert!(line.enter(&free(key), Stage::First, 0, "free").is_ok()));
        line.enter(&last, Stage::First, 0, "last").unwrap();
        line.enter(&party("premium"), Stage::First, 0, "premium").unwrap();
        let mut order = Vec::new();
        for step in 0..1100 {
            let (begun, job) = line.next().unwrap();
            order.push(job);
            line.done(begun);
            // Its name comes before all that wait.
            line.enter(&free(step % 3), Stage::First, 0, "free").unwrap();
        }
        assert!(order[..2].contains(&"premium"), "a tier's turn comes after one of each other");
        assert!(order[..1003].contains(&"last"), "those that came before it, and no others");
    }

    #[test]
    fn large_pieces_of_many_parties_leave_a_thread_to_small_ones() {
        let mut line = Line::new(3, WAITING_MAX);
        for name in ["a", "b", "c", "d"] {
            line.enter(&party(name), Stage::First, 1 << 20, name).unwrap();
        }
        assert_eq!(std::iter::from_fn(|| line.next()).count(), 2);
        line.enter(&party("small"), Stage::First, 100, "small").unwrap();
        assert_eq!(line.next().unwrap().1, "small");
    }

    #[test]
    fn what_is_worked_on_has_so_many_bytes_unless_it_is_one_piece() {
        let mut line = Line::new(4, WAITING_MAX);
        for name in ["a", "b"] {
            line.enter(&party(name), Stage::First, WORKED_ON_BYTES_MAX, name).unwrap();
        }
        let (begun, _) = line.next().unwrap();
        assert!(line.next().is_none());
        line.done(begun);
        assert!(line.next().is_some());
    }

    #[test]
    fn a_request_that_has_begun_goes_on_before_others_of_its_party_begin() {
        let mut line = Line::new(2, WAITING_MAX);
        for (stage, job) in [(Stage::First, 0), (Stage::First, 1), (Stage::First, 2), (Stage::Later, 3)] {
            line.enter(&party("a"), stage, 0, job).unwrap();
        }
        let begin_and_end = || {
            let (begun, job) = line.next()?;
            line.done(begun);
            Some(job)
        };
        let order: Vec<_> = std::iter::from_fn(begin_and_end).collect();
        assert_eq!(order, [3, 0, 1, 2]);
        line.check_integrity();
    }

    #[test]
    fn a_party_that_fills_its_places_is_told_so_and_others_still_come_in() {
        let mut line = Line::new(2, WAITING_MAX);
        let refused =
            (0..).map_while(|n| line.enter(&party("flood"), Stage::First, 0, n).err().map_or(Some(None), |refused| Some(Some(refused))));
        assert_eq!(refused.flatten().next(), Some(Refused::Own));
        assert!(line.enter(&party("quiet"), Stage::First, 0, 0).is_ok());
    }

    proptest! {
        #[test]
        fn the_books_balance_and_everything_ends(steps in prop::collection::vec((0..4_u8, 0..4_u8, 0..3_usize), 1..200)) {
            let mut line = Line::new(3, WAITING_MAX);
            let (mut begun, mut entered) = (Vec::new(), Vec::new());
            for (step, of, size) in steps {
                let of = party(&of.to_string());
                match step {
                    0 | 1 => entered.push((of.clone(), line.enter(&of, Stage::First, size * WORKED_ON_BYTES_MAX / 2, ()).unwrap())),
                    // A thread asks when it is free.
                    2 if begun.len() < line.threads() => begun.extend(line.next().map(|(begun, ())| begun)),
                    2 => {}
                    _ if begun.is_empty() => {
                        if let Some((of, id)) = entered.pop() {
                            let _ = line.withdraw(&of, id);
                        }
                    }
                    _ => line.done(begun.remove(0)),
                }
                line.check_integrity();
            }
            loop {
                let next = if begun.len() < line.threads() { line.next() } else { None };
                begun.extend(next.map(|(begun, ())| begun));
                let Some(done) = begun.pop() else { break };
                line.done(done);
                line.check_integrity();
            }
            prop_assert!(line.parties.is_empty());
        }
    }
}
