//! Turns at a number of places. A single tenant never has all of them, so other tenants' questions need not wait for its own to end.

use parking_lot::{Condvar, Mutex};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

#[derive(Debug)]
pub(crate) struct Turns {
    places: usize,
    held: Mutex<Held>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Held {
    all: usize,
    /// The number of turns that each tenant holds.
    tenants: HashMap<String, usize>,
}

impl Turns {
    /// Creates this many places, at least two.
    pub(crate) fn new(places: usize) -> Self {
        Self { places: places.max(2), held: Mutex::default(), freed: Condvar::new() }
    }

    /// Takes a turn, which lasts until it is dropped. Returns `None` if none was free in time.
    pub(crate) fn take(&self, tenant: &str, patience: Duration) -> Option<Turn<'_>> {
        let until = Instant::now() + patience;
        let mut held = self.held.lock();
        while held.all >= self.places || held.tenants.get(tenant).is_some_and(|&own| own + 1 >= self.places) {
            let left = until.checked_duration_since(Instant::now())?;
            self.freed.wait_for(&mut held, left);
        }
        held.all += 1;
        *held.tenants.entry(tenant.to_owned()).or_default() += 1;
        Some(Turn { turns: self, tenant: tenant.to_owned() })
    }
}

#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    tenant: String,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut held = self.turns.held.lock();
        held.all -= 1;
        if let Some(own) = held.tenants.get_mut(&self.tenant) {
            *own -= 1;
            if *own == 0 {
                held.tenants.remove(&self.tenant);
            }
        }
        // Which waiter may continue depends on its tenant.
        self.turns.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    const SOON: Duration = Duration::from_millis(20);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn one_tenant_never_has_all_places() {
        let turns = Turns::new(3);
        let first = turns.take("flood", SOON).unwrap();
        let _second = turns.take("flood", SOON).unwrap();
        assert!(turns.take("flood", SOON).is_none());
        let other = turns.take("quiet", SOON).unwrap();
        assert!(turns.take("third", SOON).is_none(), "there are three places");
        drop(first);
        assert!(turns.take("third", SOON).is_some());
        drop(other);
        assert!(turns.take("flood", SOON).is_some());
    }

    #[test]
    fn whoever_waits_goes_on_when_a_place_is_free() {
        let turns = Turns::new(2);
        let held = turns.take("a", SOON).unwrap();
        let (went_on, goes_on) = mpsc::channel();
        thread::scope(|scope| {
            let turns = &turns;
            scope.spawn(move || went_on.send(turns.take("a", LATE).is_some()));
            assert!(goes_on.recv_timeout(SOON).is_err(), "it waits");
            drop(held);
            assert!(goes_on.recv_timeout(LATE).unwrap());
        });
        let held = turns.held.lock();
        assert_eq!((held.all, held.tenants.len()), (0, 0));
    }
}
