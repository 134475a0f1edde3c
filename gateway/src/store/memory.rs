//! A store that ends with its process.

use super::{
    ALWAYS, Addition, HISTORY_ITEMS_MAX, ITEM_OVERHEAD, Item, ItemPage, Kind, Limits, NewRecord, Owner, Page, Part, RECORD_OVERHEAD,
    Record, RecordPage, Rewrite, Store, StoreError, Stored, Summary, Totals, note_evicted, page_of,
};
use crate::base::room::Shares;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future,
};

#[derive(Debug)]
pub struct Memory {
    limits: Limits,
    state: Mutex<State>,
}

/// A record's or an item's key.
type Key = (Owner, String);

#[derive(Debug, Default)]
struct State {
    records: HashMap<Key, Kept>,
    items: HashMap<Key, Used>,
    /// Records by age, the oldest first.
    order: BTreeSet<(u64, u64, Key)>,
    /// The same records by tenant, then by age.
    order_of: BTreeSet<(String, u64, u64, Key)>,
    /// Records of each owner and kind, in the order in which they were added.
    listed: BTreeMap<(Owner, Kind, u64), String>,
    /// The number of records added so far: orders those of one second.
    puts: u64,
    /// The size of each tenant's records.
    bytes: Shares<String>,
    /// The size of each tenant's records that are never evicted.
    lasting: Shares<String>,
}

#[derive(Debug)]
struct Kept {
    kind: Kind,
    body: String,
    /// Ids of items.
    history: Vec<String>,
    outputs: usize,
    /// The summary, and the number of items that it covers.
    summary: Option<(usize, String)>,
    used: u64,
    put: u64,
}

impl Kept {
    fn bytes(&self) -> u64 {
        RECORD_OVERHEAD + (self.body.len() + self.summary.as_ref().map_or(0, |(_, summary)| summary.len())) as u64
    }

    /// Drops the summary if it covers items from `place` on, which are about to go.
    fn cut(&mut self, place: usize) {
        self.summary.take_if(|(items, _)| *items > place);
    }
}

#[derive(Debug)]
struct Used {
    body: String,
    tokens: u32,
    /// The number of places in histories that name the item.
    places: usize,
}

impl Used {
    fn bytes(&self) -> u64 {
        ITEM_OVERHEAD + self.body.len() as u64
    }
}

impl Memory {
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: Mutex::default() }
    }
}

impl Store for Memory {
    fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Stored<'_, ()> {
        answer(self.state.lock().put(owner, record, now, self.limits))
    }

    fn load(&self, owner: &Owner, id: &str, part: Part) -> Stored<'_, Record> {
        let state = self.state.lock();
        answer(state.record(owner, id).map(|kept| {
            let items = part.range(kept.history.len(), kept.outputs).map(|place| state.item(owner, &kept.history[place]));
            let summary = kept.summary.as_ref().map(|(_, summary)| summary.clone());
            Record { summary, items: items.collect(), ..state.without_items(owner, id, kept) }
        }))
    }

    fn page(&self, owner: &Owner, id: &str, part: Part, page: Page) -> Stored<'_, ItemPage> {
        let state = self.state.lock();
        answer(state.record(owner, id).and_then(|kept| {
            let ids = &kept.history[part.range(kept.history.len(), kept.outputs)];
            let places = page.places(ids.iter().map(String::as_str), ids.len());
            let (mut places, has_more) = places.ok_or_else(|| StoreError::NotFound(page.after.clone().unwrap_or_default()))?;
            let listed = places.len();
            let size = |place: &usize| state.items[&(owner.clone(), ids[*place].clone())].body.len() as u64;
            places.truncate(page_of(places.iter().map(size)));
            let has_more = has_more || places.len() < listed;
            Ok(ItemPage { items: places.into_iter().map(|place| state.item(owner, &ids[place])).collect(), has_more })
        }))
    }

    fn list(&self, owner: &Owner, kind: Kind, page: Page) -> Stored<'_, RecordPage> {
        let state = self.state.lock();
        let ids: Vec<_> = state.listed.range((owner.clone(), kind, 0)..=(owner.clone(), kind, u64::MAX)).map(|(_, id)| id).collect();
        let places = page.places(ids.iter().map(|id| id.as_str()), ids.len());
        answer(places.ok_or_else(|| StoreError::NotFound(page.after.clone().unwrap_or_default())).map(|(places, has_more)| {
            let record = |place: usize| state.without_items(owner, ids[place], &state.records[&(owner.clone(), ids[place].clone())]);
            RecordPage { records: places.into_iter().map(record).collect(), has_more }
        }))
    }

    fn find(&self, owner: &Owner, ids: &[String]) -> Stored<'_, Vec<Item>> {
        let state = self.state.lock();
        let find = |id: &String| match state.items.get(&(owner.clone(), id.clone())) {
            Some(used) => Ok(Item { id: id.clone(), body: used.body.clone(), tokens: used.tokens }),
            None => Err(StoreError::NotFound(id.clone())),
        };
        answer(ids.iter().map(find).collect())
    }

    fn update(&self, owner: &Owner, id: &str, body: String, now: u64) -> Stored<'_, ()> {
        answer(self.state.lock().change(owner, id, now, |kept| kept.body = body))
    }

    fn append(&self, owner: &Owner, id: &str, addition: Addition, now: u64) -> Stored<'_, ()> {
        let mut state = self.state.lock();
        let appended = state.append(owner, id, addition, now, self.limits);
        if appended.is_ok() {
            state.make_room(owner, self.limits.bytes);
        }
        answer(appended)
    }

    fn summarize(&self, owner: &Owner, id: &str, summary: Summary) -> Stored<'_, ()> {
        answer(self.state.lock().summarize(owner, id, summary))
    }

    fn remove(&self, owner: &Owner, id: &str, item: &str) -> Stored<'_, ()> {
        answer(self.state.lock().remove(owner, id, item))
    }

    fn delete(&self, owner: &Owner, id: &str) -> Stored<'_, ()> {
        answer(self.state.lock().delete(&(owner.clone(), id.to_owned())))
    }

    fn expire(&self, now: u64) -> Stored<'_, u64> {
        let mut state = self.state.lock();
        let limit = now.saturating_sub(self.limits.age.as_secs());
        let mut expired = 0;
        while let Some((_, _, key)) = state.order.first().filter(|(used, ..)| *used < limit).cloned() {
            state.delete(&key).expect("what is ordered is stored");
            expired += 1;
        }
        answer(Ok(expired))
    }
}

fn answer<'a, T: Send + 'a>(result: Result<T, StoreError>) -> Stored<'a, T> {
    Box::pin(future::ready(result))
}

impl State {
    fn record(&self, owner: &Owner, id: &str) -> Result<&Kept, StoreError> {
        self.records.get(&(owner.clone(), id.to_owned())).ok_or_else(|| StoreError::NotFound(id.to_owned()))
    }

    fn item(&self, owner: &Owner, id: &str) -> Item {
        let used = &self.items[&(owner.clone(), id.to_owned())];
        Item { id: id.to_owned(), body: used.body.clone(), tokens: used.tokens }
    }

    fn without_items(&self, owner: &Owner, id: &str, kept: &Kept) -> Record {
        let totals = if kept.kind == Kind::Conversation { self.totals(owner, &kept.history) } else { Totals::default() };
        Record { id: id.to_owned(), body: kept.body.clone(), updated: kept.used, totals, summary: None, items: Vec::new() }
    }

    fn totals(&self, owner: &Owner, history: &[String]) -> Totals {
        let add = |Totals { messages, tokens }: Totals, item: Item| Totals {
            messages: messages + u64::from(item.is_message()),
            tokens: tokens + u64::from(item.tokens),
        };
        history.iter().map(|id| self.item(owner, id)).fold(Totals::default(), add)
    }

    /// The size of the items that a history names, each once, including new ones. Fails with `TooLarge` if it has too many places.
    fn history_bytes(&self, owner: &Owner, id: &str, history: &[String], new: &[Item], limits: Limits) -> Result<u64, StoreError> {
        let new: HashMap<&str, u64> = new.iter().map(|item| (item.id.as_str(), item.body.len() as u64)).collect();
        let size = |id: &String| match self.items.get(&(owner.clone(), id.clone())) {
            Some(used) => used.body.len() as u64,
            None => new[id.as_str()],
        };
        if history.iter().map(size).sum::<u64>() > limits.history_bytes {
            return Err(StoreError::TooLarge { id: id.to_owned(), max: limits.history_bytes });
        }
        Ok(history.iter().collect::<BTreeSet<_>>().into_iter().map(|id| size(id) + ITEM_OVERHEAD).sum())
    }

    /// Refuses a record of this size if there would be no room for it even after evicting all other evictable records of its tenant.
    fn check_room(&self, owner: &Owner, bytes: u64, limits: Limits) -> Result<(), StoreError> {
        let tenant = owner.tenant().to_owned();
        let others = self.bytes.total() - self.bytes.held(&tenant);
        let least = self.lasting.held(&tenant) + bytes;
        let is_over = others > 0 && others + least > limits.bytes && least > self.bytes.share(limits.bytes, &tenant);
        if is_over { Err(StoreError::Full) } else { Ok(()) }
    }

    fn put(&mut self, owner: &Owner, record: NewRecord, now: u64, limits: Limits) -> Result<(), StoreError> {
        let NewRecord { id, kind, body, earlier, items, outputs, conversation } = record;
        if let Some(missing) = earlier.iter().find(|item| !self.items.contains_key(&(owner.clone(), (*item).clone()))) {
            return Err(StoreError::NotFound(missing.clone()));
        }
        if earlier.len() + items.len() > HISTORY_ITEMS_MAX {
            return Err(StoreError::TooLong { id });
        }
        let key = (owner.clone(), id);
        if self.records.contains_key(&key) {
            return Err(StoreError::Failed(format!("`{}` is stored already", key.1)));
        }
        let history: Vec<_> = earlier.into_iter().chain(items.iter().map(|item| item.id.clone())).collect();
        let bytes = self.history_bytes(owner, &key.1, &history, &items, limits)?;
        self.check_room(owner, RECORD_OVERHEAD + body.len() as u64 + bytes, limits)?;
        if let Some((conversation, body)) = conversation {
            self.append(owner, &conversation, Addition { body, ..Addition::of(items.clone()) }, now, limits)?;
        }
        self.insert(owner, items);
        self.use_items(owner, &history);
        self.puts += 1;
        let used = kind.used(now);
        let kept = Kept { kind, body, history, outputs, summary: None, used, put: self.puts };
        self.hold(owner, &kept);
        self.order(used, self.puts, &key);
        self.listed.insert((owner.clone(), kind, self.puts), key.1.clone());
        self.records.insert(key, kept);
        self.make_room(owner, limits.bytes);
        Ok(())
    }

    fn hold(&mut self, owner: &Owner, kept: &Kept) {
        let tenant = owner.tenant().to_owned();
        self.bytes.add(&tenant, kept.bytes());
        if kept.kind == Kind::Memory {
            self.lasting.add(&tenant, kept.bytes());
        }
    }

    fn let_go(&mut self, owner: &Owner, kind: Kind, bytes: u64) {
        let tenant = owner.tenant().to_owned();
        self.bytes.take(&tenant, bytes);
        if kind == Kind::Memory {
            self.lasting.take(&tenant, bytes);
        }
    }

    fn order(&mut self, used: u64, put: u64, key: &Key) {
        self.order.insert((used, put, key.clone()));
        self.order_of.insert((key.0.tenant().to_owned(), used, put, key.clone()));
    }

    fn unorder(&mut self, used: u64, put: u64, key: &Key) {
        self.order.remove(&(used, put, key.clone()));
        self.order_of.remove(&(key.0.tenant().to_owned(), used, put, key.clone()));
    }

    fn insert(&mut self, owner: &Owner, items: Vec<Item>) {
        for Item { id, body, tokens } in items {
            self.items.entry((owner.clone(), id)).or_insert_with(|| {
                let used = Used { body, tokens, places: 0 };
                self.bytes.add(&owner.tenant().to_owned(), used.bytes());
                used
            });
        }
    }

    fn use_items(&mut self, owner: &Owner, history: &[String]) {
        for id in history {
            self.items.get_mut(&(owner.clone(), id.clone())).expect("a history names stored items").places += 1;
        }
    }

    fn give_up(&mut self, owner: &Owner, history: &[String]) {
        for id in history {
            let key = (owner.clone(), id.clone());
            let item = self.items.get_mut(&key).expect("a history names stored items");
            item.places -= 1;
            if item.places == 0 {
                let bytes = item.bytes();
                self.items.remove(&key);
                self.bytes.take(&owner.tenant().to_owned(), bytes);
            }
        }
    }

    fn change(&mut self, owner: &Owner, id: &str, now: u64, change: impl FnOnce(&mut Kept)) -> Result<(), StoreError> {
        let key = (owner.clone(), id.to_owned());
        let mut kept = self.records.remove(&key).ok_or_else(|| StoreError::NotFound(id.to_owned()))?;
        self.let_go(owner, kept.kind, kept.bytes());
        self.unorder(kept.used, kept.put, &key);
        change(&mut kept);
        kept.used = kept.kind.used(now);
        self.hold(owner, &kept);
        self.order(kept.used, kept.put, &key);
        self.records.insert(key, kept);
        Ok(())
    }

    fn append(&mut self, owner: &Owner, id: &str, addition: Addition, now: u64, limits: Limits) -> Result<(), StoreError> {
        let Addition { cut, items, body } = addition;
        let mut history = self.record(owner, id)?.history.clone();
        let gone = match cut {
            Some(cut) => cut.take(&mut history).ok_or_else(|| StoreError::Changed(id.to_owned()))?,
            None => Vec::new(),
        };
        if history.len() + items.len() > HISTORY_ITEMS_MAX {
            return Err(StoreError::TooLong { id: id.to_owned() });
        }
        let ids: Vec<_> = items.iter().map(|item| item.id.clone()).collect();
        history.extend_from_slice(&ids);
        let bytes = self.history_bytes(owner, id, &history, &items, limits)?;
        self.check_room(owner, self.record(owner, id)?.bytes() + bytes, limits)?;
        self.insert(owner, items);
        self.use_items(owner, &ids);
        self.change(owner, id, now, |kept| {
            kept.cut(history.len() - ids.len());
            kept.history = history;
            if let Some(Rewrite { to, .. }) = body.filter(|rewrite| rewrite.from == kept.body) {
                kept.body = to;
            }
        })?;
        self.give_up(owner, &gone);
        Ok(())
    }

    fn remove(&mut self, owner: &Owner, id: &str, item: &str) -> Result<(), StoreError> {
        let kept = self.records.get_mut(&(owner.clone(), id.to_owned())).ok_or_else(|| StoreError::NotFound(id.to_owned()))?;
        let Some(first) = kept.history.iter().position(|place| place == item) else {
            return Err(StoreError::NotFound(item.to_owned()));
        };
        let (gone, left): (Vec<_>, Vec<_>) = std::mem::take(&mut kept.history).into_iter().partition(|place| place == item);
        kept.history = left;
        let before = kept.bytes();
        kept.cut(first);
        let cut = before - kept.bytes();
        self.bytes.take(&owner.tenant().to_owned(), cut);
        self.give_up(owner, &gone);
        Ok(())
    }

    fn summarize(&mut self, owner: &Owner, id: &str, summary: Summary) -> Result<(), StoreError> {
        let kept = self.records.get_mut(&(owner.clone(), id.to_owned())).ok_or_else(|| StoreError::NotFound(id.to_owned()))?;
        summary.check(id, |place| kept.history.get(place).map(String::as_str))?;
        let (tenant, before) = (owner.tenant().to_owned(), kept.bytes());
        kept.summary = Some((summary.items, summary.body));
        let after = kept.bytes();
        self.bytes.take(&tenant, before);
        self.bytes.add(&tenant, after);
        Ok(())
    }

    fn delete(&mut self, key: &Key) -> Result<(), StoreError> {
        let kept = self.records.remove(key).ok_or_else(|| StoreError::NotFound(key.1.clone()))?;
        self.unorder(kept.used, kept.put, key);
        self.listed.remove(&(key.0.clone(), kept.kind, kept.put));
        self.let_go(&key.0, kept.kind, kept.bytes());
        self.give_up(&key.0, &kept.history);
        Ok(())
    }

    /// Evicts records until they fit. The newest record of `owner`'s tenant stays, regardless of its size.
    fn make_room(&mut self, owner: &Owner, bytes_max: u64) {
        let newcomer = owner.tenant().to_owned();
        while self.bytes.total() > bytes_max {
            // The new record is already counted.
            let losers = self.bytes.losers(bytes_max, &newcomer, 0);
            let Some((tenant, key)) = losers.iter().find_map(|loser| Some((loser, self.oldest(loser, *loser == newcomer)?))) else {
                return;
            };
            self.delete(&key).expect("what is ordered is stored");
            note_evicted(tenant, 1);
        }
    }

    fn oldest(&self, tenant: &str, but_the_newest: bool) -> Option<Key> {
        let all = (tenant.to_owned(), 0, 0, Key::default())..(tenant.to_owned(), ALWAYS, 0, Key::default());
        let mut oldest = self.order_of.range(all).map(|(.., key)| key);
        let key = oldest.next()?;
        (!but_the_newest || oldest.next().is_some()).then(|| key.clone())
    }
}
