//! The store as its clients use it, by whatever route. Calls wait in a [`line`](crate::base::line) in which tiers and their tenants take
//! turns, so that a flood of calls delays its own sender. Items that are loaded count towards their reader's share before they are read,
//! for as long as they are kept.

use super::{
    Addition, Erasing, Held, Item, ItemPage, Kind, NewRecord, Owner, PAGE_BYTES_MAX, Page, Part, Record, RecordPage, Size, Store,
    StoreError, Stored, Summary, Whose,
};
use crate::base::{
    line::{Begun, LARGE_BYTES, Line, Stage},
    shares::{Party, Pool, Share},
};
use parking_lot::Mutex;
use std::{fmt, ops::Deref, path::PathBuf, sync::Arc, time::Duration};
use tokio::{sync::oneshot, time};

/// The maximum number of waiting calls of all parties.
const WAITING_MAX: u64 = 1024;
/// The time after which a call that waits for its turn is given up.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// The maximum number of attempts to load a history, whose size is known after the first, and which may grow meanwhile.
const ATTEMPTS_MAX: usize = 3;

/// A store with the line of those that wait for it, and the room for items that were loaded from it.
#[derive(Debug)]
pub struct SharedStore {
    store: Arc<dyn Store>,
    queue: Arc<Queue>,
    /// The bytes of loaded items that are kept, and the most that one party may keep.
    loaded: Pool,
    most: u64,
}

/// A store as one party uses it.
#[derive(Debug)]
pub struct Access<'a> {
    shared: &'a SharedStore,
    party: Party,
}

/// Something that was loaded, whose bytes count until it is dropped.
#[derive(Debug)]
pub struct Loaded<T> {
    value: T,
    share: Share,
}

impl<T> Loaded<T> {
    pub fn into_parts(self) -> (T, Share) {
        (self.value, self.share)
    }
}

impl<T> Deref for Loaded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl SharedStore {
    /// Shares a store. Of the room for loaded items, a party may have `most`; a larger record is still loaded, by itself.
    pub fn new(store: Arc<dyn Store>, loaded: Pool, most: u64) -> Self {
        let waiting = Waiting { line: Line::new(store.calls_at_a_time(), WAITING_MAX), running: 0, at_a_time: store.calls_at_a_time() };
        Self { store, queue: Arc::new(Queue(Mutex::new(waiting))), loaded, most }
    }

    /// The store itself, for work of this server's own.
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub fn access(&self, party: Party) -> Access<'_> {
        Access { shared: self, party }
    }
}

impl Access<'_> {
    pub async fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Result<(), StoreError> {
        let owner = owner.clone();
        self.call(0, move |store| store.put(&owner, record, now)).await
    }

    pub async fn load(&self, owner: &Owner, id: &str, part: Part) -> Result<Loaded<Record>, StoreError> {
        self.load_for(owner, id, part, u64::MAX).await
    }

    /// Loads a record for a prompt of at most so many tokens: one that has more is refused by its size.
    pub async fn load_for(&self, owner: &Owner, id: &str, part: Part, tokens_max: u64) -> Result<Loaded<Record>, StoreError> {
        let load = |bytes_max| {
            let (owner, id) = (owner.clone(), id.to_owned());
            self.call(bytes_max, move |store| store.load_within(&owner, &id, part, bytes_max))
        };
        let bytes = |record: &Record| record.items.iter().map(|item| item.body.len() as u64).sum();
        self.within_share(tokens_max, load, bytes).await
    }

    /// Loads items by their ids, in that order.
    pub async fn find(&self, owner: &Owner, ids: &[String]) -> Result<Loaded<Vec<Item>>, StoreError> {
        let find = |bytes_max| {
            let (owner, ids) = (owner.clone(), ids.to_vec());
            self.call(bytes_max, move |store| store.find_within(&owner, &ids, bytes_max))
        };
        let bytes = |items: &Vec<Item>| items.iter().map(|item| item.body.len() as u64).sum();
        self.within_share(u64::MAX, find, bytes).await
    }

    pub async fn page(&self, owner: &Owner, id: &str, part: Part, page: Page) -> Result<ItemPage, StoreError> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(PAGE_BYTES_MAX, move |store| store.page(&owner, &id, part, page)).await
    }

    pub async fn list(&self, owner: &Owner, kind: Kind, page: Page) -> Result<RecordPage, StoreError> {
        let owner = owner.clone();
        self.call(0, move |store| store.list(&owner, kind, page)).await
    }

    pub async fn update(&self, owner: &Owner, id: &str, body: String, now: u64) -> Result<(), StoreError> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(0, move |store| store.update(&owner, &id, body, now)).await
    }

    pub async fn append(&self, owner: &Owner, id: &str, addition: Addition, now: u64) -> Result<(), StoreError> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(0, move |store| store.append(&owner, &id, addition, now)).await
    }

    pub async fn summarize(&self, owner: &Owner, id: &str, summary: Summary) -> Result<(), StoreError> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(0, move |store| store.summarize(&owner, &id, summary)).await
    }

    pub async fn remove(&self, owner: &Owner, id: &str, item: &str) -> Result<(), StoreError> {
        let (owner, id, item) = (owner.clone(), id.to_owned(), item.to_owned());
        self.call(0, move |store| store.remove(&owner, &id, &item)).await
    }

    pub async fn delete(&self, owner: &Owner, id: &str) -> Result<(), StoreError> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(0, move |store| store.delete(&owner, &id)).await
    }

    pub async fn erase(&self, whose: &Whose, erasing: Erasing) -> Result<Held, StoreError> {
        let whose = whose.clone();
        self.call(0, move |store| store.erase(&whose, erasing)).await
    }

    pub async fn copy(&self, to: PathBuf) -> Result<bool, StoreError> {
        self.call(0, move |store| store.copy(to)).await
    }

    pub async fn owners(&self, whose: &Whose, after: Option<String>, limit: usize) -> Result<Vec<Owner>, StoreError> {
        let whose = whose.clone();
        self.call(0, move |store| store.owners(&whose, after, limit)).await
    }

    /// Loads something: at once if it is small, and otherwise when its size is known and within the party's share.
    async fn within_share<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        tokens_max: u64,
        load: impl Fn(u64) -> F,
        bytes: impl Fn(&T) -> u64,
    ) -> Result<Loaded<T>, StoreError> {
        let mut share = self.shared.loaded.take(self.party.clone(), 0).map_err(StoreError::OverShare)?;
        let mut bytes_max = LARGE_BYTES as u64;
        for _ in 0..ATTEMPTS_MAX {
            match load(bytes_max).await {
                Ok(value) => {
                    self.grow(&mut share, bytes(&value))?;
                    return Ok(Loaded { value, share });
                }
                Err(StoreError::Larger(Size { tokens, .. })) if tokens > tokens_max => {
                    return Err(StoreError::OverContext { tokens, max: tokens_max });
                }
                Err(StoreError::Larger(Size { bytes, .. })) => {
                    self.grow(&mut share, bytes)?;
                    bytes_max = bytes;
                }
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::Busy)
    }

    fn grow(&self, share: &mut Share, bytes: u64) -> Result<(), StoreError> {
        share.grow_to(bytes.min(self.shared.most)).map_err(StoreError::OverShare)
    }

    /// Waits for the party's turn, and makes a call that reads at most about this many bytes. The call keeps its turn to its end, even if
    /// its caller leaves.
    async fn call<T: Send + 'static>(
        &self,
        bytes: u64,
        call: impl for<'s> FnOnce(&'s dyn Store) -> Stored<'s, T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let turn = self.shared.queue.enter(&self.party, bytes as usize)?;
        let turn = time::timeout(WAIT_MAX, turn).await.ok().and_then(Result::ok).ok_or(StoreError::Busy)?;
        let store = Arc::clone(&self.shared.store);
        let called = tokio::spawn(async move {
            let _turn = turn;
            call(&*store).await
        });
        called.await.unwrap_or_else(|_| Err(StoreError::Failed("a call was cut off".into())))
    }
}

/// The calls that wait for a store.
struct Queue(Mutex<Waiting>);

struct Waiting {
    line: Line<oneshot::Sender<Turn>>,
    running: usize,
    at_a_time: usize,
}

/// A turn at the store, which ends when this is dropped.
struct Turn {
    queue: Arc<Queue>,
    begun: Option<Begun>,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

impl Queue {
    fn enter(self: &Arc<Self>, party: &Party, bytes: usize) -> Result<oneshot::Receiver<Turn>, StoreError> {
        let (told, turn) = oneshot::channel();
        self.0.lock().line.enter(party, Stage::First, bytes, told).map_err(StoreError::OverShare)?;
        self.begin();
        Ok(turn)
    }

    /// Begins as many turns as there may be.
    fn begin(self: &Arc<Self>) {
        loop {
            let next = self.0.lock().next();
            let Some((begun, told)) = next else { return };
            let given = told.send(Turn { queue: Arc::clone(self), begun: Some(begun) });
            // A caller that has left has no use for its turn.
            if let Some(begun) = given.err().and_then(|mut turn| turn.begun.take()) {
                self.0.lock().done(begun);
            }
        }
    }
}

impl Waiting {
    fn next(&mut self) -> Option<(Begun, oneshot::Sender<Turn>)> {
        let next = if self.running < self.at_a_time { self.line.next() } else { None };
        self.running += usize::from(next.is_some());
        next
    }

    fn done(&mut self, begun: Begun) {
        self.line.done(begun);
        self.running -= 1;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.queue.0.lock().done(begun);
            self.queue.begin();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Limits, sqlite::Sqlite},
        *,
    };
    use crate::base::shares::{Refused, Shares};

    fn party(name: &str) -> Party {
        Party::Tenant { name: name.into(), shed: 0 }
    }

    fn owner() -> Owner {
        Owner("acme".into())
    }

    /// A store with room for 600 KiB of loaded items, of which one party may have 200.
    async fn shared(conversations: &[(&str, usize, u32)]) -> SharedStore {
        let sqlite = Sqlite::in_memory(Limits { bytes: 64 << 20, history_bytes: 1 << 20 }).unwrap();
        for (id, bytes, tokens) in conversations {
            let item = Item { id: format!("msg_{id}"), body: format!("\"{}\"", "x".repeat(*bytes)), tokens: *tokens };
            let thought = Item { id: format!("rs_{id}"), body: "\"hm\"".into(), tokens: 1000 };
            let items = vec![item, thought];
            let record = NewRecord { id: (*id).into(), kind: Kind::Conversation, body: "{}".into(), items, ..NewRecord::default() };
            sqlite.put(&owner(), record, 0).await.unwrap();
        }
        SharedStore::new(Arc::new(sqlite), Pool::new(Shares::new(600 << 10, 200 << 10)), 200 << 10)
    }

    #[tokio::test]
    async fn what_is_loaded_counts_before_it_is_read_until_it_is_dropped() {
        let shared = shared(&[("small", 1000, 5), ("large", 150 << 10, 900), ("huge", 900 << 10, 900)]).await;
        let (acme, other) = (shared.access(party("acme")), shared.access(party("other")));
        let load = async |id: &str| acme.load(&owner(), id, Part::All).await;
        let large = load("large").await.unwrap();
        assert_eq!(shared.loaded.used(), large.items.iter().map(|item| item.body.len() as u64).sum::<u64>());
        assert_eq!(load("large").await.map(drop).unwrap_err(), StoreError::OverShare(Refused::Own));
        assert_eq!(load("small").await.unwrap().items.len(), 2);
        assert_eq!(other.load(&owner(), "large", Part::All).await.unwrap().items.len(), 2, "others have room");
        assert_eq!(load("large").await.map(drop).unwrap_err(), StoreError::OverShare(Refused::Own));
        drop(large);
        assert_eq!(shared.loaded.used(), 0);
        assert_eq!(load("huge").await.unwrap().items[0].body.len(), (900 << 10) + 2, "by itself it may be larger than a share");
    }

    #[tokio::test]
    async fn a_prompt_that_cannot_fit_is_refused_by_its_size() {
        let shared = shared(&[("conv_1", 100 << 10, 900)]).await;
        let load = async |tokens_max| shared.access(party("acme")).load_for(&owner(), "conv_1", Part::All, tokens_max).await.map(drop);
        assert_eq!(load(899).await, Err(StoreError::OverContext { tokens: 900, max: 899 }));
        assert_eq!(load(900).await, Ok(()), "past reasoning is not shown to the model");
    }

    #[tokio::test]
    async fn one_item_that_is_named_often_counts_as_often() {
        let shared = shared(&[("a", 100 << 10, 1)]).await;
        let find =
            async |times: usize| shared.access(party("acme")).find(&owner(), &vec!["msg_a".into(); times]).await.map(|found| found.len());
        assert_eq!(find(1).await, Ok(1));
        assert_eq!(find(5).await, Ok(5), "by itself it may be more than a share");
        assert!(matches!(find(11).await, Err(StoreError::TooLarge { .. })), "no history could have them");
        assert!(matches!(find(20_000).await, Err(StoreError::TooLong { .. })));
    }

    #[tokio::test]
    async fn turns_go_around_and_those_who_left_are_passed_by() {
        let waiting = Waiting { line: Line::new(2, 100), running: 0, at_a_time: 2 };
        let queue = Arc::new(Queue(Mutex::new(waiting)));
        let mut flood: Vec<_> = (0..20).map(|_| queue.enter(&party("flood"), 0).unwrap()).collect();
        let mut quiet = queue.enter(&party("quiet"), 0).unwrap();
        let turn = quiet.try_recv().expect("a party has at most one turn of two");
        let first = flood.remove(0).try_recv().unwrap();
        assert!(flood[0].try_recv().is_err());
        flood.truncate(1);
        drop((first, turn));
        drop(flood[0].try_recv().unwrap());
        assert_eq!(queue.0.lock().running, 0);
        assert!(queue.enter(&party("flood"), 0).unwrap().try_recv().is_ok(), "nothing waits any more");
        let waiting: Vec<_> = (0..100).map_while(|_| queue.enter(&party("flood"), 1).ok()).collect();
        assert!(waiting.len() < 60, "its places are bounded: {}", waiting.len());
    }
}
