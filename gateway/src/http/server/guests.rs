//! All connections: the number per address, and which of them only wait for their clients. These give way when there is no place left, the
//! oldest first, so that connections which send nothing, or half a head, keep no other client out.

use crate::base::shares::{Party, Refused, Shares};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// The time within which a request's head must be complete: a client has it ready when it connects.
pub(super) const HEAD_MAX: Duration = Duration::from_secs(10);
/// The event that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The rest of a request's head. A new connection starts here.
    Head,
    /// The end of this server's work on a request, its answer included.
    Busy,
    /// The start of the next request.
    Idle,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Head, Self::Busy, Self::Idle];
}

/// A connection's stage, and the time at which it started.
#[derive(Debug)]
pub(super) struct Progress(AtomicU64);

impl Progress {
    fn new(now: Duration) -> Self {
        let progress = Self(AtomicU64::new(0));
        progress.set(Stage::Head, now);
        progress
    }

    pub(super) fn set(&self, stage: Stage, now: Duration) {
        self.0.store((now.as_millis() as u64) << 2 | stage as u64, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> (Stage, Duration) {
        let packed = self.0.load(Ordering::Relaxed);
        (Stage::ALL[(packed & 3) as usize % 3], Duration::from_millis(packed >> 2))
    }
}

/// The connections of one port. `C` is a handle that closes one.
#[derive(Debug)]
pub(super) struct Guests<C> {
    places: Shares<Party>,
    all: BTreeMap<u64, Guest<C>>,
    numbers: u64,
    /// The time that a connection may be idle between two requests.
    idle_max: Duration,
}

#[derive(Debug)]
struct Guest<C> {
    party: Party,
    progress: Arc<Progress>,
    closer: C,
}

impl<C: Clone> Guests<C> {
    pub(super) fn new(places: Shares<Party>, idle_max: Duration) -> Self {
        Self { places, all: BTreeMap::new(), numbers: 0, idle_max }
    }

    /// Adds a connection and returns its number and progress.
    pub(super) fn enter(&mut self, now: Duration, party: &Party, closer: C) -> Result<(u64, Arc<Progress>), Refused> {
        self.places.take(party, 1)?;
        self.numbers += 1;
        let progress = Arc::new(Progress::new(now));
        self.all.insert(self.numbers, Guest { party: party.clone(), progress: Arc::clone(&progress), closer });
        Ok((self.numbers, progress))
    }

    pub(super) fn leave(&mut self, number: u64) {
        if let Some(Guest { party, .. }) = self.all.remove(&number) {
            self.places.give(&party, 1);
        }
    }

    /// Picks the connection that gives way: the one that has waited longest for a head, else the one that has waited longest for its next
    /// request. With `of`, only connections of this party are considered.
    pub(super) fn last_resort(&self, of: Option<&Party>) -> Option<C> {
        let waiting = self.all.values().filter(|guest| of.is_none_or(|of| guest.party == *of)).filter_map(|guest| {
            let (stage, since) = guest.progress.get();
            (stage != Stage::Busy).then_some((stage == Stage::Idle, since, guest))
        });
        waiting.min_by_key(|(is_idle, since, _)| (*is_idle, *since)).map(|(.., guest)| guest.closer.clone())
    }

    /// Lists the connections whose clients take too long, with the stage that they are in.
    pub(super) fn overdue(&self, now: Duration) -> Vec<(Stage, C)> {
        let late = self.all.values().filter_map(|guest| {
            let (stage, since) = guest.progress.get();
            let limit = match stage {
                Stage::Head => HEAD_MAX,
                Stage::Idle => self.idle_max,
                Stage::Busy => return None,
            };
            (now.saturating_sub(since) > limit).then(|| (stage, guest.closer.clone()))
        });
        late.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn address(last: u8) -> Party {
        Party::of_address([10, 0, 0, last].into())
    }

    #[test]
    fn half_heads_and_idle_connections_are_overdue_at_their_own_times() {
        let mut guests = Guests::new(Shares::quarters(100, 64), at(75));
        let progress: Vec<_> = ["half", "busy", "idle"].map(|name| guests.enter(at(0), &address(1), name).unwrap().1).into();
        progress[1].set(Stage::Busy, at(1));
        progress[2].set(Stage::Idle, at(5));
        assert_eq!(guests.overdue(at(10)), []);
        assert_eq!(guests.overdue(at(11)), [(Stage::Head, "half")]);
        progress[0].set(Stage::Busy, at(11));
        assert_eq!(guests.overdue(at(80)), []);
        assert_eq!(guests.overdue(at(81)), [(Stage::Idle, "idle")]);
        progress[2].set(Stage::Head, at(81));
        assert_eq!(guests.overdue(at(92)), [(Stage::Head, "idle")], "its next head has begun, and must end");
    }

    #[test]
    fn the_oldest_half_head_gives_way_then_the_longest_idle_one_and_never_a_busy_one() {
        let mut guests = Guests::new(Shares::new(4, 4), at(75));
        let mut enter = |now, last, name| guests.enter(at(now), &address(last), name).unwrap();
        let (_, idle) = enter(0, 1, "idle");
        let (_, busy) = enter(0, 1, "busy");
        let (old, _) = enter(1, 2, "old");
        enter(2, 1, "new");
        idle.set(Stage::Idle, at(0));
        busy.set(Stage::Busy, at(0));
        assert_eq!(guests.last_resort(None), Some("old"));
        assert_eq!(guests.last_resort(Some(&address(1))), Some("new"));
        assert_eq!(guests.enter(at(3), &address(3), "more").unwrap_err(), Refused::Total);
        guests.leave(old);
        let (more, _) = guests.enter(at(3), &address(3), "more").unwrap();
        guests.leave(more);
        idle.set(Stage::Busy, at(4));
        assert_eq!(guests.last_resort(Some(&address(2))), None);
    }

    #[test]
    fn one_address_cannot_have_every_connection() {
        let mut guests = Guests::new(Shares::quarters(400, 0), at(75));
        (0..100).for_each(|_| drop(guests.enter(at(0), &address(1), ()).unwrap()));
        assert_eq!(guests.enter(at(0), &address(1), ()).unwrap_err(), Refused::Own);
        assert!(guests.enter(at(0), &address(2), ()).is_ok());
    }
}
