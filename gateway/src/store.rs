//! Stored responses, conversations, and facts about users. Each is a [`Record`] with the ordered items of its history.
//!
//! Items are stored once, in however many histories they occur. A record keeps the ids of its whole history, so that the next turn loads it
//! in one fetch, without a walk along a chain of responses; and an item is deleted with the last history that names it.
//!
//! - [`access`]: a store as one party uses it, in turns with others
//! - [`sqlite`]: a file in the data directory; without one, until this process ends
//! - [`postgres`]: a database that several coordinators share
//!
//! Every call names an [`Owner`], which sees no data of others. Tenants [share](crate::base::room) the room: one that wants more than its
//! share loses its own oldest records, or is refused, and no other tenant's records go.

pub mod access;
#[cfg(test)]
mod contract;
pub mod postgres;
pub mod sqlite;

pub use crate::base::owner::{Erasing, Owner, Whose, tenant_of};
use crate::{base::shares::Refused, metrics};
use futures_util::future::BoxFuture;
use std::{fmt, ops::Range, path::PathBuf};

/// A store. Each call takes effect completely or not at all. `now` is in Unix seconds.
pub trait Store: fmt::Debug + Send + Sync {
    /// Adds a record, with those items of its history that are not stored yet.
    fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Stored<'_, ()>;
    /// Loads a record, with a part of its items, unless these have more than `bytes_max`: then the error tells their size.
    fn load_within(&self, owner: &Owner, id: &str, part: Part, bytes_max: u64) -> Stored<'_, Record>;
    /// Loads a page of a record's items.
    fn page(&self, owner: &Owner, id: &str, part: Part, page: Page) -> Stored<'_, ItemPage>;
    /// Lists a page of an owner's records, in the order in which they were added, without their items. The page may have fewer than its
    /// limit.
    fn list(&self, owner: &Owner, kind: Kind, page: Page) -> Stored<'_, RecordPage>;
    /// Loads items by their ids, in that order, unless they have more than `bytes_max`, as [`load_within`](Self::load_within). No more are
    /// found than a history may have.
    fn find_within(&self, owner: &Owner, ids: &[String], bytes_max: u64) -> Stored<'_, Vec<Item>>;
    /// Replaces a record's body.
    fn update(&self, owner: &Owner, id: &str, body: String, now: u64) -> Stored<'_, ()>;
    /// Changes the end of a record's history.
    fn append(&self, owner: &Owner, id: &str, addition: Addition, now: u64) -> Stored<'_, ()>;
    /// Stores a summary of the beginning of a record's history, replacing an earlier one.
    fn summarize(&self, owner: &Owner, id: &str, summary: Summary) -> Stored<'_, ()>;
    /// Removes an item from a record's history.
    fn remove(&self, owner: &Owner, id: &str, item: &str) -> Stored<'_, ()>;
    fn delete(&self, owner: &Owner, id: &str) -> Stored<'_, ()>;
    /// Deletes some records of a kind, the oldest first: those without additions since `before`, facts that were stored before. Returns
    /// their number, at most `AT_A_TIME`; 0 if there are none (any more).
    fn expire(&self, kind: Kind, before: u64) -> Stored<'_, u64>;
    /// Removes all records of these owners, with their items, a bounded number at a time; or counts them.
    fn erase(&self, whose: &Whose, erasing: Erasing) -> Stored<'_, Held>;
    /// Copies everything to a new file, while it is used. Returns `false` if it is stored elsewhere, where backups are made by other means.
    fn copy(&self, to: PathBuf) -> Stored<'_, bool>;
    /// Lists owners of records, among these, in the order of their names after `after`.
    fn owners(&self, whose: &Whose, after: Option<String>, limit: usize) -> Stored<'_, Vec<Owner>>;
    /// The number of calls, at least two, that may run or be about to at a time.
    fn calls_at_a_time(&self) -> usize;
    /// Whether other coordinators use the same records.
    fn is_shared(&self) -> bool {
        false
    }
}

/// The size of items that were not loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub bytes: u64,
    /// The tokens that a model would be given of them: past reasoning does not count.
    pub tokens: u64,
}

impl Size {
    /// Fails if a history of this size and this many items may not be.
    fn check_history(self, id: &str, items: usize, limits: Limits) -> Result<(), StoreError> {
        let (id, max) = (id.to_owned(), limits.history_bytes);
        match self.bytes > max {
            _ if items > HISTORY_ITEMS_MAX => Err(StoreError::TooLong { id }),
            true => Err(StoreError::TooLarge { id, max }),
            false => Ok(()),
        }
    }

    /// Fails if this is more than may be loaded.
    fn check(self, bytes_max: u64) -> Result<(), StoreError> {
        if self.bytes > bytes_max { Err(StoreError::Larger(self)) } else { Ok(()) }
    }
}

/// Numbers of records by their kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub responses: u64,
    pub conversations: u64,
    pub memories: u64,
}

impl Held {
    /// Counts records of a kind, as the stores number them.
    fn add(&mut self, kind: i64, records: u64) {
        let count = match kind {
            0 => &mut self.responses,
            1 => &mut self.conversations,
            _ => &mut self.memories,
        };
        *count += records;
    }

    fn plus(self, other: Self) -> Self {
        Self {
            responses: self.responses + other.responses,
            conversations: self.conversations + other.conversations,
            memories: self.memories + other.memories,
        }
    }
}

/// The number of records that are erased, or deleted because of their age, in one transaction.
const AT_A_TIME: i64 = 100;

pub type Stored<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Limits of a store.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The size above which records are deleted, those without additions for the longest time first, of a tenant that has more than its
    /// share.
    pub bytes: u64,
    /// The maximum size of the items in one history.
    pub history_bytes: u64,
}

/// The maximum number of items in one history. A context is full long before.
pub const HISTORY_ITEMS_MAX: usize = 16_384;

/// The maximum size of what is on one page.
pub const PAGE_BYTES_MAX: u64 = 2 << 20;

/// The approximate size of a record besides its texts, and of an item.
const RECORD_OVERHEAD: u64 = 256;
const ITEM_OVERHEAD: u64 = 128;

/// A message, a call, its output, or reasoning: a JSON object that contains its `id`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Item {
    pub id: String,
    pub body: String,
    /// The tokens of its text, without a template's marks; 0 if they were not counted.
    pub tokens: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    #[default]
    Response,
    Conversation,
    /// A fact about a user. It ages from when it was stored, however often it is used, and is not evicted.
    Memory,
}

/// The time of last use of a record that is not evicted.
const ALWAYS: u64 = i64::MAX as u64;

impl Kind {
    fn used(self, now: u64) -> u64 {
        if self == Self::Memory { ALWAYS } else { now }
    }

    /// The column of the time from which a record of this kind ages.
    fn aged_by(self) -> &'static str {
        if self == Self::Memory { "created" } else { "used" }
    }
}

#[derive(Clone, Debug, Default)]
pub struct NewRecord {
    pub id: String,
    pub kind: Kind,
    /// A JSON object, without the items.
    pub body: String,
    /// Ids of stored items at the beginning of its history.
    pub earlier: Vec<String>,
    /// The items that follow. One that is already stored (by its id) is not stored again.
    pub items: Vec<Item>,
    /// The number of `items`, at the end, that are the record's output.
    pub outputs: usize,
    /// A conversation to whose history `items` are added as well, and its new body.
    pub conversation: Option<(String, Option<Rewrite>)>,
}

/// A change to a history.
#[derive(Clone, Debug, Default)]
pub struct Addition {
    /// The end of the history that is removed first.
    pub cut: Option<Cut>,
    pub items: Vec<Item>,
    pub body: Option<Rewrite>,
}

/// A cut: of the `of` items that the history must still have, the first `keep` stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub keep: usize,
    pub of: usize,
}

/// A summary of the first items of a history. It is kept as long as all of these are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub body: String,
    pub items: usize,
    /// The id of the last of them: a different one means that the history has changed.
    pub last: String,
}

impl Summary {
    /// Checks that the covered items are still those of the history.
    fn check<'a>(&self, id: &str, place: impl FnOnce(usize) -> Option<&'a str>) -> Result<(), StoreError> {
        let last = self.items.checked_sub(1).and_then(place);
        if last == Some(self.last.as_str()) { Ok(()) } else { Err(StoreError::Changed(id.to_owned())) }
    }
}

/// A new body, unless the body was changed in the meantime: then that change stays.
#[derive(Clone, Debug)]
pub struct Rewrite {
    pub from: String,
    pub to: String,
}

/// A stored record, with the requested items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub id: String,
    pub body: String,
    /// The time of the last addition or change, in Unix seconds; far in the future for a fact.
    pub updated: u64,
    pub totals: Totals,
    /// The summary of the beginning of its history. Lists do not include it.
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
    /// The page starts after this item or record.
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
    /// Never stored, deleted, expired, or evicted.
    #[error("`{0}` is not stored here (any more)")]
    NotFound(String),
    #[error("`{id}` would have more than {HISTORY_ITEMS_MAX} items: begin a new conversation")]
    TooLong { id: String },
    #[error("`{id}` would have more than {max} bytes: begin a new conversation")]
    TooLarge { id: String, max: u64 },
    #[error("it has {} bytes, more than were to be loaded", .0.bytes)]
    Larger(Size),
    /// Its text does not fit into the prompt for which it was loaded.
    #[error("its messages have {tokens} tokens, and the model takes {max}")]
    OverContext { tokens: u64, max: u64 },
    #[error("your tenant reads as much of what is stored as it may at a time: try again")]
    OverShare(Refused),
    #[error("there is no room for more of your tenant: delete some of what it has stored")]
    Full,
    #[error("`{0}` was changed meanwhile: look at it again")]
    Changed(String),
    #[error("the store has too much to do: try again")]
    Busy,
    #[error("the store has failed: {0}")]
    Failed(String),
}

/// Reports records of a tenant that made room for others.
fn note_evicted(tenant: &str, records: u64) {
    if records > 0 {
        metrics::note_evicted("records", tenant, records);
    }
}

impl Addition {
    pub fn of(items: Vec<Item>) -> Self {
        Self { items, ..Self::default() }
    }
}

impl Cut {
    /// Removes the end of a history, and returns it; `None` if the history has a different length by now.
    fn take<T>(self, history: &mut Vec<T>) -> Option<Vec<T>> {
        (history.len() == self.of && self.keep <= self.of).then(|| history.split_off(self.keep))
    }
}

impl Part {
    /// The range of this part in a history of `items` items, of which the last `outputs` are output.
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

/// The number of the first rows of these sizes that fit on a page: a larger one is only put on it if it is the first.
fn on_one_page(sizes: impl IntoIterator<Item = u64>) -> usize {
    let mut bytes = 0;
    let fits = |(place, size): &(usize, u64)| {
        bytes += size;
        *place == 0 || bytes <= PAGE_BYTES_MAX
    };
    sizes.into_iter().enumerate().take_while(fits).count()
}

impl Page {
    /// The indices of this page in `ids`, in the requested order, and whether more follow; `None` if `after` is not among them.
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
