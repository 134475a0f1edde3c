//! Traces that wait to be sent. Each party has a share of the places, and one that has used up its own loses its oldest trace for a new one.
//! So a flood of one party's traces crowds out no other's.

use crate::base::shares::{Party, Refused, Shares};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// Items in the order in which they arrived, each with its party.
#[derive(Debug)]
struct Line<T> {
    shares: Shares<Party>,
    waiting: VecDeque<(Party, T)>,
}

impl<T> Line<T> {
    fn new(places: u64) -> Self {
        Self { shares: Shares::quarters(places, 1), waiting: VecDeque::new() }
    }

    /// Adds an item. An error gives the reason why one was lost: the party's oldest, or, if it has none here, the new one.
    fn push(&mut self, party: Party, thing: T) -> Result<(), Refused> {
        let taken = self.shares.take(&party, 1);
        if taken.is_err() {
            let Some(oldest) = self.waiting.iter().position(|(of, _)| *of == party) else { return taken };
            // The new item takes the place of the oldest, so the shares do not change.
            self.waiting.remove(oldest);
        }
        self.waiting.push_back((party, thing));
        taken
    }

    /// Takes the first items, at most `most`.
    fn take(&mut self, most: usize) -> Vec<T> {
        let taken = self.waiting.drain(..most.min(self.waiting.len()));
        let shares = &mut self.shares;
        let give_back = |(party, thing)| {
            shares.give(&party, 1);
            thing
        };
        taken.map(give_back).collect()
    }
}

#[derive(Debug)]
struct State<T> {
    line: Line<T>,
    is_closed: bool,
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

/// Makes a queue with this many places.
pub fn queue<T>(places: u64) -> (Near<T>, Far<T>) {
    let shared = Arc::new(Shared { state: Mutex::new(State { line: Line::new(places), is_closed: false }), changed: Condvar::new() });
    (Near(Arc::clone(&shared)), Far(shared))
}

/// The sending end. Dropping it closes the queue.
#[derive(Debug)]
pub struct Near<T>(Arc<Shared<T>>);

impl<T> Near<T> {
    /// Adds an item without waiting. An error gives the reason why one was lost: the party's oldest, or, if it has none here, the new one.
    pub fn push(&self, party: Party, thing: T) -> Result<(), Refused> {
        let pushed = self.0.state.lock().line.push(party, thing);
        self.0.changed.notify_one();
        pushed
    }
}

impl<T> Drop for Near<T> {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = true;
        self.0.changed.notify_one();
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct Far<T>(Arc<Shared<T>>);

impl<T> Far<T> {
    /// Waits for up to `most` items, and no longer than `wait` once there is one. `None` if the queue is closed and empty.
    pub fn next(&self, most: usize, wait: Duration) -> Option<Vec<T>> {
        let mut state = self.0.state.lock();
        while state.line.waiting.is_empty() {
            if state.is_closed {
                return None;
            }
            self.0.changed.wait(&mut state);
        }
        let until = Instant::now() + wait;
        while state.line.waiting.len() < most && !state.is_closed {
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        Some(state.line.take(most))
    }

    /// Takes all queued items.
    #[cfg(test)]
    pub fn taken(&self) -> Vec<T> {
        self.0.state.lock().line.take(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn party(name: &str) -> Party {
        Party::Tenant { name: name.into(), shed: 0 }
    }

    #[test]
    fn a_party_beyond_its_share_loses_its_own_oldest() {
        let (near, far) = queue(16);
        assert_eq!(near.push(party("quiet"), 100), Ok(()));
        let lost = (0..50).filter(|&number| near.push(party("flood"), number) == Err(Refused::Own)).count();
        assert_eq!(lost, 46, "a quarter is four");
        assert_eq!(near.push(party("quiet"), 101), Ok(()));
        assert_eq!(far.taken(), [100, 46, 47, 48, 49, 101]);
        assert_eq!((near.push(party("flood"), 50), far.taken()), (Ok(()), vec![50]), "what was sent leaves its place");
    }

    #[test]
    fn a_queue_that_others_have_filled_loses_what_is_new() {
        let (near, far) = queue(4);
        assert!(["a", "b", "c", "d"].iter().all(|name| near.push(party(name), *name).is_ok()));
        assert_eq!(near.push(party("e"), "e"), Err(Refused::Total));
        assert_eq!(near.push(party("a"), "again"), Err(Refused::Own));
        assert_eq!(far.taken(), ["b", "c", "d", "again"]);
    }

    #[test]
    fn what_is_queued_is_taken_before_the_end() {
        let (near, far) = queue(400);
        let taking = thread::spawn(move || std::iter::from_fn(|| far.next(64, Duration::from_millis(5))).flatten().collect::<Vec<_>>());
        (0..100).for_each(|number| near.push(Party::Server, number).unwrap());
        drop(near);
        assert_eq!(taking.join().unwrap(), (0..100).collect::<Vec<_>>());
    }
}
