//! Readers that wait for blocks.

use super::{ClientId, timers::TimerId};
use crate::core::eviction::Use;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};
use tidemill_proto::{
    block::BlockKey,
    pool::{CallId, Via},
};

/// Unfinished gets of all clients, by client and by awaited key.
#[derive(Debug, Default)]
pub(super) struct Waits {
    clients: HashMap<ClientId, ClientWaits>,
    by_key: HashMap<BlockKey, BTreeSet<Waiter>>,
}

#[derive(Debug, Default)]
struct ClientWaits {
    gets: BTreeMap<CallId, Get>,
    /// Awaited keys of all its gets.
    keys: usize,
}

/// The parameters of one get.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) via: Via,
    /// Number of the get's operation.
    pub(super) operation: u64,
    /// The number of blocks in the get.
    pub(super) blocks: usize,
    /// The time until which it waits for blocks that are not held yet.
    pub(super) until: Duration,
}

/// A get and the blocks it still waits for.
#[derive(Debug)]
pub(super) struct Get {
    pub(super) asked: Asked,
    pub(super) timer: TimerId,
    /// The awaited keys, by place in the get's keys.
    pub(super) waiting: BTreeMap<u32, BlockKey>,
}

/// One block of one get.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Waiter {
    pub(super) client: ClientId,
    pub(super) call: CallId,
    pub(super) index: u32,
}

/// A reader whose block is there. `done` is set if its get waits for nothing else: it was the get's timer.
#[derive(Debug)]
pub(super) struct Woken {
    pub(super) waiter: Waiter,
    pub(super) via: Via,
    pub(super) used: Use,
    pub(super) done: Option<TimerId>,
}

/// The most keys that one client may wait for at a time.
pub(super) const WAITS_MAX: usize = 1 << 18;

impl Waits {
    /// The number of further keys that the client may wait for.
    pub(super) fn room(&self, client: ClientId) -> usize {
        WAITS_MAX - self.clients.get(&client).map_or(0, |waits| waits.keys)
    }

    pub(super) fn add(&mut self, client: ClientId, call: CallId, get: Get) {
        for (&index, &key) in &get.waiting {
            self.by_key.entry(key).or_default().insert(Waiter { client, call, index });
        }
        let waits = self.clients.entry(client).or_default();
        waits.keys += get.waiting.len();
        let earlier = waits.gets.insert(call, get);
        assert!(earlier.is_none(), "a call number is in use twice");
    }

    /// Removes and returns all waiters for `key`.
    pub(super) fn wake(&mut self, key: BlockKey) -> Vec<Woken> {
        let waiters = self.by_key.remove(&key).unwrap_or_default();
        waiters.into_iter().map(|waiter| self.woken(waiter)).collect()
    }

    fn woken(&mut self, waiter: Waiter) -> Woken {
        let waits = self.clients.get_mut(&waiter.client).expect("by_key lists living gets");
        let get = waits.gets.get_mut(&waiter.call).expect("by_key lists living gets");
        get.waiting.remove(&waiter.index);
        waits.keys -= 1;
        let (Asked { via, operation, blocks, .. }, done) = (get.asked, get.waiting.is_empty().then_some(get.timer));
        let used = Use::in_chain(operation, waiter.index, blocks);
        if done.is_some() {
            waits.gets.remove(&waiter.call);
            if waits.gets.is_empty() {
                self.clients.remove(&waiter.client);
            }
        }
        Woken { waiter, via, used, done }
    }

    /// Ends one get; `None` if there is none.
    pub(super) fn end(&mut self, client: ClientId, call: CallId) -> Option<Get> {
        let waits = self.clients.get_mut(&client)?;
        let get = waits.gets.remove(&call)?;
        waits.keys -= get.waiting.len();
        if waits.gets.is_empty() {
            self.clients.remove(&client);
        }
        for (&index, key) in &get.waiting {
            let waiters = self.by_key.get_mut(key).expect("a waiting get is listed under its keys");
            waiters.remove(&Waiter { client, call, index });
            if waiters.is_empty() {
                self.by_key.remove(key);
            }
        }
        Some(get)
    }

    /// Ends all gets of a client.
    pub(super) fn end_client(&mut self, client: ClientId) -> Vec<Get> {
        let calls: Vec<CallId> = self.clients.get(&client).map_or(Vec::new(), |waits| waits.gets.keys().copied().collect());
        calls.into_iter().filter_map(|call| self.end(client, call)).collect()
    }

    pub(super) fn is_awaited(&self, key: &BlockKey) -> bool {
        self.by_key.contains_key(key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ClientId, CallId, &Get)> {
        self.clients.iter().flat_map(|(&client, waits)| waits.gets.iter().map(move |(&call, get)| (client, call, get)))
    }

    pub(super) fn check_integrity(&self) {
        let mut listed = 0;
        for (&client, waits) in &self.clients {
            assert!(!waits.gets.is_empty(), "a client without gets is listed");
            let keys: usize = waits.gets.values().map(|get| get.waiting.len()).sum();
            assert_eq!(keys, waits.keys, "awaited keys are miscounted");
            assert!(keys <= WAITS_MAX, "a client waits for too many keys");
            for (&call, get) in &waits.gets {
                assert!(!get.waiting.is_empty(), "a get that waits for nothing is listed");
                for (&index, key) in &get.waiting {
                    assert!(self.by_key[key].contains(&Waiter { client, call, index }), "a get is not listed under its key");
                    listed += 1;
                }
            }
        }
        assert_eq!(listed, self.by_key.values().map(BTreeSet::len).sum::<usize>(), "a waiter has no get");
        assert!(self.by_key.values().all(|waiters| !waiters.is_empty()), "a key without waiters is listed");
    }
}
