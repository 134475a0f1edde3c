//! Stored responses, conversations, and facts about users. Each is a [`Record`] with the ordered items of its history.
//!
//! Items are stored once, however many histories name them. A record keeps the ids of its whole history, so that the next turn
//! loads it in one fetch, without a walk along a chain of responses; and an item goes when the last history that names it does.
//!
//! - [`memory`]: until this process ends
//! - [`sqlite`]: a file in the data directory
//! - [`postgres`]: a database that several coordinators share
//!
//! Every call names an [`Owner`], who sees nothing of others. Tenants [share](crate::base::room) the room: one that wants more than its share
//! loses its own oldest records, or is refused, and no other's.

#[cfg(test)]
mod contract;
pub mod memory;
pub mod postgres;
pub mod sqlite;

pub use crate::base::owner::{Owner, tenant_of};
use crate::metrics;
use futures_util::future::BoxFuture;
use std::{fmt, ops::Range, time::Duration};

/// Use cases, each all or nothing. `now` is in Unix seconds.
pub trait Store: fmt::Debug + Send + Sync {
    /// A new record, with those items of its history that are not stored yet.
    fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Stored<'_, ()>;
    /// A record, with a part of its items.
    fn load(&self, owner: &Owner, id: &str, part: Part) -> Stored<'_, Record>;
    /// Some of a record's items.
    fn page(&self, owner: &Owner, id: &str, part: Part, page: Page) -> Stored<'_, ItemPage>;
    /// Some of an owner's records, in the order in which they were put, without their items.
    fn list(&self, owner: &Owner, kind: Kind, page: Page) -> Stored<'_, RecordPage>;
    /// Stored items by their ids, in that order.
    fn find(&self, owner: &Owner, ids: &[String]) -> Stored<'_, Vec<Item>>;
    /// Another body for a record.
    fn update(&self, owner: &Owner, id: &str, body: String, now: u64) -> Stored<'_, ()>;
    /// Another end of a record's history.
    fn append(&self, owner: &Owner, id: &str, addition: Addition, now: u64) -> Stored<'_, ()>;
    /// Keeps what tells of the beginning of a record's history, in place of what was kept before.
    fn summarize(&self, owner: &Owner, id: &str, summary: Summary) -> Stored<'_, ()>;
    /// Takes an item out of a record's history.
    fn remove(&self, owner: &Owner, id: &str, item: &str) -> Stored<'_, ()>;
    fn delete(&self, owner: &Owner, id: &str) -> Stored<'_, ()>;
    /// Deletes what is older than [`Limits::age`]. Returns how many records those were.
    fn expire(&self, now: u64) -> Stored<'_, u64>;
}

pub type Stored<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Bounds of a store.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Records that nothing was added to for this long go.
    pub age: Duration,
    /// Over this, the records that nothing was added to for the longest time go first, of a tenant that has more than its share.
    pub bytes: u64,
    /// Bytes of the items in one history.
    pub history_bytes: u64,
}

/// Items in one history. A context holds fewer long before.
pub const HISTORY_ITEMS_MAX: usize = 16_384;

/// The most bytes of items on one page: one more is put on it only if it is the first.
pub const PAGE_BYTES_MAX: u64 = 2 << 20;

/// The bytes that a record takes beside its texts, about, and an item.
const RECORD_OVERHEAD: u64 = 256;
const ITEM_OVERHEAD: u64 = 128;

/// The prefix of messages' ids. Other items are parts of an answer besides its text, and outputs of calls.
const MESSAGE: &str = "msg_";

/// A message, a call, its output, or a thought: a JSON object with its `id` in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Item {
    pub id: String,
    pub body: String,
    /// Tokens of its text, without a template's marks. 0: they were not counted.
    pub tokens: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    #[default]
    Response,
    Conversation,
    /// A fact about a user. It has no age, and makes no room for others.
    Memory,
}

/// The time of the last use of a record that does not age.
const ALWAYS: u64 = i64::MAX as u64;

impl Kind {
    fn used(self, now: u64) -> u64 {
        if self == Self::Memory { ALWAYS } else { now }
    }
}

#[derive(Clone, Debug, Default)]
pub struct NewRecord {
    pub id: String,
    pub kind: Kind,
    /// A JSON object, without the items.
    pub body: String,
    /// Stored items that its history begins with.
    pub earlier: Vec<String>,
    /// The items that follow. One that is stored already (by its id) is not stored again.
    pub items: Vec<Item>,
    /// The number of `items`, at the end, that are the record's output.
    pub outputs: usize,
    /// A conversation whose history also gets `items`, and its new body.
    pub conversation: Option<(String, Option<Rewrite>)>,
}

/// A change to a history.
#[derive(Clone, Debug, Default)]
pub struct Addition {
    /// First the history loses its end.
    pub cut: Option<Cut>,
    pub items: Vec<Item>,
    pub body: Option<Rewrite>,
}

/// A cut: of the `of` items that a history must still have, the first `keep` stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub keep: usize,
    pub of: usize,
}

/// A summary of the first items of a history. It is kept as long as all of these are there: it goes with the first that does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub body: String,
    pub items: usize,
    /// The id of the last of them: another one, and the history has changed meanwhile.
    pub last: String,
}

impl Summary {
    /// Checks that the items which it covers are still those of the history.
    fn check<'a>(&self, id: &str, place: impl FnOnce(usize) -> Option<&'a str>) -> Result<(), StoreError> {
        let last = self.items.checked_sub(1).and_then(place);
        if last == Some(self.last.as_str()) { Ok(()) } else { Err(StoreError::Changed(id.to_owned())) }
    }
}

/// A new body, unless the body was changed meanwhile: that change stays then.
#[derive(Clone, Debug)]
pub struct Rewrite {
    pub from: String,
    pub to: String,
}

/// A stored record, with the items asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub id: String,
    pub body: String,
    /// The time of the last addition or change, in Unix seconds; far in the future for a record that does not age.
    pub updated: u64,
    pub totals: Totals,
    /// The summary of the beginning of its history. Lists do not show it.
    pub summary: Option<String>,
    pub items: Vec<Item>,
}

/// Counts over a conversation's history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub messages: u64,
    pub tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Nothing,
    /// Everything before the output.
    Input,
    Output,
    All,
}

#[derive(Clone, Debug)]
pub struct Page {
    /// The page begins behind this item or record.
    pub after: Option<String>,
    pub limit: usize,
    /// The latest first.
    pub descending: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemPage {
    pub items: Vec<Item>,
    pub has_more: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPage {
    pub records: Vec<Record>,
    pub has_more: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Never stored, deleted, or gone because of its age or for want of room.
    #[error("`{0}` is not stored here (any more)")]
    NotFound(String),
    #[error("`{id}` would have more than {HISTORY_ITEMS_MAX} items: begin a new conversation")]
    TooLong { id: String },
    #[error("`{id}` would have more than {max} bytes: begin a new conversation")]
    TooLarge { id: String, max: u64 },
    #[error("there is no room for more of your tenant: delete some of what it has stored")]
    Full,
    #[error("`{0}` was changed meanwhile: look at it again")]
    Changed(String),
    #[error("the store has too much to do: try again")]
    Busy,
    #[error("the store has failed: {0}")]
    Failed(String),
}

/// Says that records of a tenant have made room for others.
fn note_evicted(tenant: &str, records: u64) {
    if records > 0 {
        metrics::note_evicted("records", tenant, records);
    }
}

/// Returns how many items of these sizes a page has: all that fit, and one at least.
fn page_of(sizes: impl IntoIterator<Item = u64>) -> usize {
    let mut sum: u64 = 0;
    let fits = |size: &u64| {
        sum = sum.saturating_add(*size);
        sum <= PAGE_BYTES_MAX
    };
    sizes.into_iter().take_while(fits).count().max(1)
}

impl Addition {
    pub fn of(items: Vec<Item>) -> Self {
        Self { items, ..Self::default() }
    }
}

impl Cut {
    /// Takes the end off a history, and returns it. `None`: it has another length by now.
    fn take<T>(self, history: &mut Vec<T>) -> Option<Vec<T>> {
        (history.len() == self.of && self.keep <= self.of).then(|| history.split_off(self.keep))
    }
}

impl Item {
    fn is_message(&self) -> bool {
        self.id.starts_with(MESSAGE)
    }
}

impl Part {
    /// The places of this part in a history of `items` items, the last `outputs` of which are output.
    fn range(self, items: usize, outputs: usize) -> Range<usize> {
        let input = items.saturating_sub(outputs);
        match self {
            Self::Nothing => 0..0,
            Self::Input => 0..input,
            Self::Output => input..items,
            Self::All => 0..items,
        }
    }
}

impl Page {
    /// The places of this page in `ids`, in the order wanted, and whether more follow. `None`: `after` is not among them.
    fn places<'a>(&self, mut ids: impl Iterator<Item = &'a str>, count: usize) -> Option<(Vec<usize>, bool)> {
        let after = match &self.after {
            Some(after) => Some(ids.position(|id| id == after)?),
            None => None,
        };
        let rest: Box<dyn Iterator<Item = usize>> = match (self.descending, after) {
            (false, after) => Box::new(after.map_or(0, |after| after + 1)..count),
            (true, after) => Box::new((0..after.unwrap_or(count)).rev()),
        };
        let mut places: Vec<_> = rest.take(self.limit.saturating_add(1)).collect();
        let has_more = places.len() > self.limit;
        places.truncate(self.limit);
        Some((places, has_more))
    }
}
