//! A store in one SQLite file, or in SQLite's memory, written by a thread of its own.
//!
//! The log is written ahead (WAL) and synced at checkpoints: a crash of the process loses no data, a power failure may lose the last
//! moments. Only one process at a time can use the file: it holds the lock from opening to end.

use super::{
    ALWAYS, AT_A_TIME, Addition, Erasing, Held, ITEM_OVERHEAD, Item, ItemPage, Kind, Limits, NewRecord, Owner, Page, Part, RECORD_OVERHEAD,
    Record, RecordPage, Rewrite, Size, Store, StoreError, Stored, Summary, Totals, Whose, note_evicted, on_one_page,
};
use crate::base::room::Shares;
use rusqlite::{
    Connection, OptionalExtension, Row, ToSql, Transaction, TransactionBehavior,
    backup::{Backup, StepResult},
    params,
    types::{ToSqlOutput, Value},
};
use std::{
    collections::BTreeMap,
    fs::{DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, SyncSender, TryRecvError, TrySendError},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// SQLite's name for a database without a file.
const IN_MEMORY: &str = ":memory:";
/// The maximum number of waiting calls. Further ones are refused.
const QUEUE_MAX: usize = 256;
/// The time after which a call fails because the disk does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// The time limit of a copy.
const COPY_MAX: Duration = Duration::from_secs(600);
/// The number of pages that are copied between others' calls: 4 MiB.
const COPY_PAGES: i32 = 1024;
/// The version of the tables below.
const SCHEMA_VERSION: i64 = 5;

/// The tables. `history` is a JSON list of items' numbers, along which SQLite joins (`json_each`). `uses` counts the places that name an
/// item, apart from the bodies, so that a turn of a long conversation only rewrites small rows.
const SCHEMA: &str = "
    CREATE TABLE records (
        number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL,
        body TEXT NOT NULL, history TEXT NOT NULL, outputs INTEGER NOT NULL,
        kind INTEGER NOT NULL DEFAULT 0, messages INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0,
        summary TEXT, summarized INTEGER NOT NULL DEFAULT 0, UNIQUE (owner, id));
    CREATE INDEX records_by_age ON records (used, number);
    CREATE INDEX records_by_kind ON records (owner, kind, number);
    CREATE TABLE items (
        number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL, tokens INTEGER NOT NULL DEFAULT 0,
        UNIQUE (owner, id));
    CREATE TABLE uses (item INTEGER PRIMARY KEY, places INTEGER NOT NULL);
    PRAGMA user_version = 3;";

/// The tenant of an owner, as a SQL expression.
macro_rules! tenant_of {
    ($owner:literal) => {
        concat!("substr(", $owner, ", 1, instr(", $owner, " || '/', '/') - 1)")
    };
}

/// Converts version 3, which had no tenants. Triggers update the size of each tenant's records, so that no write goes uncounted.
fn to_version_4() -> String {
    let record = |row: &str| {
        format!("({RECORD_OVERHEAD} + octet_length({row}.body) + octet_length({row}.history) + coalesce(octet_length({row}.summary), 0))")
    };
    let item = |row: &str| format!("({ITEM_OVERHEAD} + octet_length({row}.body))");
    let count = |name: &str, when: &str, row: &str, by: String| {
        let tenant = format!("substr({row}.owner, 1, instr({row}.owner || '/', '/') - 1)");
        format!(
            "CREATE TRIGGER {name} AFTER {when} BEGIN
                 INSERT OR IGNORE INTO shares VALUES ({tenant}, 0);
                 UPDATE shares SET bytes = bytes + {by} WHERE tenant = {tenant};
             END;"
        )
    };
    let triggers = [
        count("record_comes", "INSERT ON records", "new", record("new")),
        count("record_goes", "DELETE ON records", "old", format!("-{}", record("old"))),
        count("record_changes", "UPDATE OF body, history, summary ON records", "new", format!("{} - {}", record("new"), record("old"))),
        count("item_comes", "INSERT ON items", "new", item("new")),
        count("item_goes", "DELETE ON items", "old", format!("-{}", item("old"))),
    ];
    format!(
        "CREATE TABLE shares (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
         INSERT INTO shares SELECT {tenant}, sum(bytes) FROM (
             SELECT owner, {record} AS bytes FROM records UNION ALL SELECT owner, {item} FROM items) AS held GROUP BY 1;
         CREATE INDEX records_by_tenant ON records ({tenant}, used, number);
         {triggers}
         PRAGMA user_version = 4;",
        tenant = tenant_of!("owner"),
        record = record("records"),
        item = item("items"),
        triggers = triggers.concat(),
    )
}

/// Converts version 1, which had no kinds and no counts: its items stay uncounted.
const TO_VERSION_2: &str = "
    ALTER TABLE records ADD COLUMN kind INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE records ADD COLUMN messages INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE records ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE items ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
    UPDATE records SET kind = 1, messages = (
        SELECT count(*) FROM json_each(history) AS place JOIN items ON items.number = place.value WHERE items.id GLOB 'msg_*')
    WHERE id GLOB 'conv_*';
    CREATE INDEX records_by_kind ON records (owner, kind, number);
    PRAGMA user_version = 2;";

/// Converts version 2, which had no summaries.
const TO_VERSION_3: &str = "
    ALTER TABLE records ADD COLUMN summary TEXT;
    ALTER TABLE records ADD COLUMN summarized INTEGER NOT NULL DEFAULT 0;
    PRAGMA user_version = 3;";

/// Converts version 4, which did not know when a fact was stored but by its body, and had one age for all kinds.
const TO_VERSION_5: &str = "
    ALTER TABLE records ADD COLUMN created INTEGER NOT NULL DEFAULT 0;
    UPDATE records SET created = coalesce(CASE WHEN json_valid(body) THEN json_extract(body, '$.created_at') END, unixepoch()) WHERE kind = 2;
    DROP INDEX records_by_age;
    CREATE INDEX records_by_kind_and_age ON records (kind, used, number);
    CREATE INDEX memories_by_age ON records (created, number) WHERE kind = 2;
    PRAGMA user_version = 5;";

#[derive(Debug)]
pub struct Sqlite {
    /// The queue to the thread; `None` only while the store is dropped.
    calls: Option<SyncSender<Call>>,
    thread: Option<JoinHandle<()>>,
}

/// The reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot make {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot open {path}: {source} (another process may have it open: each coordinator needs a data directory of its own)")]
    Database { path: PathBuf, source: rusqlite::Error },
    #[error("{path} was written by another version (schema {found}, not {SCHEMA_VERSION}): move it away to begin anew")]
    Version { path: PathBuf, found: i64 },
}

enum Call {
    Work(Box<dyn FnOnce(&Database) + Send>),
    Copy { to: PathBuf, answer: oneshot::Sender<Outcome<()>> },
}

type Outcome<T> = Result<T, StoreError>;

impl Sqlite {
    /// Opens or creates the file at `path`, readable by this user only.
    pub fn open(path: &Path, limits: Limits) -> Result<Self, OpenError> {
        let file = |source| OpenError::File { path: path.to_owned(), source };
        if let Some(dir) = path.parent().filter(|dir| !dir.is_dir()) {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file)?;
        }
        // SQLite gives its other files the same permissions.
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path).map_err(file)?;
        Self::start(path, limits)
    }

    /// Makes a store that ends with its process.
    pub fn in_memory(limits: Limits) -> Result<Self, OpenError> {
        Self::start(Path::new(IN_MEMORY), limits)
    }

    fn start(path: &Path, limits: Limits) -> Result<Self, OpenError> {
        let file = |source| OpenError::File { path: path.to_owned(), source };
        let database = Database::open(path, limits)?;
        let (calls, called) = mpsc::sync_channel::<Call>(QUEUE_MAX);
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || serve(&database, &called));
        Ok(Self { calls: Some(calls), thread: Some(thread.map_err(file)?) })
    }

    fn call<T: Send + 'static>(&self, work: impl FnOnce(&Database) -> Outcome<T> + Send + 'static) -> Stored<'_, T> {
        let (answer, answered) = oneshot::channel();
        let work = Box::new(move |database: &Database| {
            // The caller may have gone; its call is done.
            let _ = answer.send(work(database));
        });
        self.answer(Call::Work(work), answered, ANSWER_MAX)
    }

    fn answer<T: Send + 'static>(&self, call: Call, answered: oneshot::Receiver<Outcome<T>>, within: Duration) -> Stored<'_, T> {
        let sent = self.calls.as_ref().expect("taken at the end only").try_send(call).map_err(|error| match error {
            TrySendError::Full(_) => StoreError::Busy,
            TrySendError::Disconnected(_) => StoreError::Failed("its thread has ended".into()),
        });
        Box::pin(async move {
            sent?;
            match tokio::time::timeout(within, answered).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => Err(StoreError::Failed("its thread has ended".into())),
                Err(_) => Err(StoreError::Failed(format!("no answer within {} s", within.as_secs()))),
            }
        })
    }
}

/// Handles calls until the store is dropped.
fn serve(database: &Database, called: &Receiver<Call>) {
    while let Ok(call) = called.recv() {
        match call {
            Call::Work(work) => work(database),
            Call::Copy { to, answer } => {
                let copied = copy(database, &to, called, &answer);
                let _ = answer.send(copied);
            }
        }
    }
}

/// Copies everything to a new file, some pages at a time. Other calls are handled in between, and the copy has what they wrote.
fn copy(database: &Database, to: &Path, called: &Receiver<Call>, answer: &oneshot::Sender<Outcome<()>>) -> Outcome<()> {
    let until = Instant::now() + COPY_MAX;
    let mut to = Connection::open(to)?;
    let backup = Backup::new(&database.connection, &mut to)?;
    loop {
        if backup.step(COPY_PAGES)? == StepResult::Done {
            return Ok(());
        }
        if answer.is_closed() || Instant::now() >= until {
            return Err(StoreError::Failed(format!(
                "a copy was given up: it takes longer than {} s, or is not wanted",
                COPY_MAX.as_secs()
            )));
        }
        for _ in 0..QUEUE_MAX {
            match called.try_recv() {
                Ok(Call::Work(work)) => work(database),
                Ok(Call::Copy { answer, .. }) => drop(answer.send(Err(StoreError::Busy))),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(StoreError::Failed("its process ends".into())),
            }
        }
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was already answered.
            let _ = thread.join();
        }
    }
}

impl Store for Sqlite {
    fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Stored<'_, ()> {
        let owner = owner.clone();
        self.call(move |database| database.write(Some(&owner), |writing| writing.put(&owner, record, now)))
    }

    fn load_within(&self, owner: &Owner, id: &str, part: Part, bytes_max: u64) -> Stored<'_, Record> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |database| {
            let (record, history, outputs) = database.record(&owner, &id)?;
            let numbers = &history[part.range(history.len(), outputs)];
            size(&database.connection, numbers)?.check(bytes_max)?;
            Ok(Record { items: database.items(numbers)?, ..record })
        })
    }

    fn page(&self, owner: &Owner, id: &str, part: Part, page: Page) -> Stored<'_, ItemPage> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |database| {
            let (_, history, outputs) = database.record(&owner, &id)?;
            let numbers = &history[part.range(history.len(), outputs)];
            let ids = if page.after.is_some() { database.ids(numbers)? } else { Vec::new() };
            let places = page.places(ids.iter().map(String::as_str), numbers.len());
            let (places, has_more) = places.ok_or_else(|| StoreError::NotFound(page.after.clone().unwrap_or_default()))?;
            let numbers: Vec<_> = places.into_iter().map(|place| numbers[place]).collect();
            let items = database.first_items(&numbers)?;
            Ok(ItemPage { has_more: has_more || items.len() < numbers.len(), items })
        })
    }

    fn list(&self, owner: &Owner, kind: Kind, page: Page) -> Stored<'_, RecordPage> {
        let owner = owner.clone();
        self.call(move |database| database.list(&owner, kind, &page))
    }

    fn find_within(&self, owner: &Owner, ids: &[String], bytes_max: u64) -> Stored<'_, Vec<Item>> {
        let (owner, ids) = (owner.clone(), ids.to_vec());
        self.call(move |database| {
            let numbers = numbers_of(&database.connection, &owner, &ids)?;
            let size = size(&database.connection, &numbers)?;
            size.check_history("the input", numbers.len(), database.limits)?;
            size.check(bytes_max)?;
            database.items(&numbers)
        })
    }

    fn update(&self, owner: &Owner, id: &str, body: String, now: u64) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |database| {
            database.write(Some(&owner), |writing| {
                let changed = writing.transaction.execute(
                    "UPDATE records SET body = ?3, used = CASE kind WHEN ?5 THEN used ELSE ?4 END WHERE owner = ?1 AND id = ?2",
                    params![owner.0, id, body, now, Kind::Memory],
                )?;
                if changed == 1 { Ok(()) } else { Err(StoreError::NotFound(id)) }
            })
        })
    }

    fn append(&self, owner: &Owner, id: &str, addition: Addition, now: u64) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |database| {
            database.write(Some(&owner), |writing| {
                let numbers = writing.insert_items(&owner, &addition.items)?;
                writing.append(&owner, &id, &numbers, &addition, now)
            })
        })
    }

    fn summarize(&self, owner: &Owner, id: &str, summary: Summary) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |database| database.write(Some(&owner), |writing| writing.summarize(&owner, &id, &summary)))
    }

    fn remove(&self, owner: &Owner, id: &str, item: &str) -> Stored<'_, ()> {
        let (owner, id, item) = (owner.clone(), id.to_owned(), item.to_owned());
        self.call(move |database| database.write(None, |writing| writing.remove(&owner, &id, &item)))
    }

    fn delete(&self, owner: &Owner, id: &str) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |database| {
            database.write(None, |writing| {
                let number =
                    writing
                        .transaction
                        .query_row("SELECT number FROM records WHERE owner = ?1 AND id = ?2", params![owner.0, id], |row| row.get(0));
                writing.delete(number.optional()?.ok_or(StoreError::NotFound(id))?)
            })
        })
    }

    fn expire(&self, kind: Kind, before: u64) -> Stored<'_, u64> {
        self.call(move |database| database.write(None, |writing| writing.delete_older(kind, before)))
    }

    fn erase(&self, whose: &Whose, erasing: Erasing) -> Stored<'_, Held> {
        let whose = whose.clone();
        Box::pin(async move {
            let mut held = Held::default();
            loop {
                let whose = whose.clone();
                // Others' calls come between.
                let some =
                    self.call(move |database| if erasing == Erasing::Remove { database.erase(&whose) } else { database.held(&whose) });
                let some = some.await?;
                held = held.plus(some);
                if erasing == Erasing::Count || some == Held::default() {
                    return Ok(held);
                }
            }
        })
    }

    fn copy(&self, to: PathBuf) -> Stored<'_, bool> {
        let (answer, answered) = oneshot::channel();
        let copied = self.answer(Call::Copy { to, answer }, answered, COPY_MAX);
        Box::pin(async move { copied.await.map(|()| true) })
    }

    /// One that its thread works on, and the next.
    fn calls_at_a_time(&self) -> usize {
        2
    }

    fn owners(&self, whose: &Whose, after: Option<String>, limit: usize) -> Stored<'_, Vec<Owner>> {
        let [name, from, to] = owners(whose);
        self.call(move |database| {
            let select = format!("SELECT DISTINCT owner FROM records WHERE {OF_OWNERS} AND owner > ?4 ORDER BY owner LIMIT ?5");
            let mut select = database.connection.prepare_cached(&select)?;
            let found = select.query_map(params![name, from, to, after.unwrap_or_default(), limit as i64], |row| row.get(0).map(Owner))?;
            Ok(found.collect::<Result<_, _>>()?)
        })
    }
}

/// The records of a user, or of a tenant and all its users, as a SQL condition: `/` is followed by `0`.
const OF_OWNERS: &str = "(owner = ?1 OR (owner >= ?2 AND owner < ?3))";

/// The parameters of [`OF_OWNERS`].
fn owners(whose: &Whose) -> [String; 3] {
    let name = whose.name();
    match whose.user {
        Some(_) => [name, String::new(), String::new()],
        None => [name.clone(), format!("{name}/"), format!("{name}0")],
    }
}

/// The oldest records of a kind from before `?1`, along the index of its times, which SQLite would not choose by itself where there are two.
/// The kind is a literal: one index has facts only.
pub(super) fn older(kind: Kind) -> String {
    let index = if kind == Kind::Memory { "memories_by_age" } else { "records_by_kind_and_age" };
    let (kind, time) = (kind as i64, kind.aged_by());
    format!("SELECT number FROM records INDEXED BY {index} WHERE kind = {kind} AND {time} < ?1 ORDER BY {time}, number LIMIT ?2")
}

#[derive(Debug)]
struct Database {
    connection: Connection,
    limits: Limits,
}

impl Database {
    fn open(path: &Path, limits: Limits) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Database { path: path.to_owned(), source };
        let prepare = || {
            let connection = Connection::open(path)?;
            connection.busy_timeout(Duration::from_secs(1))?;
            connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
            connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
            let to_version_4 = to_version_4();
            let missing: &[&str] = match version {
                0 => &[SCHEMA, &to_version_4, TO_VERSION_5],
                1 => &[TO_VERSION_2, TO_VERSION_3, &to_version_4, TO_VERSION_5],
                2 => &[TO_VERSION_3, &to_version_4, TO_VERSION_5],
                3 => &[&to_version_4, TO_VERSION_5],
                4 => &[TO_VERSION_5],
                _ => &[],
            };
            if !missing.is_empty() {
                connection.execute_batch(&format!("BEGIN EXCLUSIVE; {} COMMIT;", missing.concat()))?;
            }
            Ok((connection, version))
        };
        match prepare().map_err(failed)? {
            (connection, 0..=SCHEMA_VERSION) => Ok(Self { connection, limits }),
            (_, found) => Err(OpenError::Version { path: path.to_owned(), found }),
        }
    }

    /// Performs all of `work`, or nothing. Then deletes the oldest records, if there are too many: those of `newcomer`'s tenant, if it has
    /// more than its share. Without a `newcomer`, there was no addition.
    fn write<T>(&self, newcomer: Option<&Owner>, work: impl FnOnce(&Writing<'_>) -> Outcome<T>) -> Outcome<T> {
        let transaction = Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)?;
        let writing = Writing { transaction, limits: self.limits };
        let done = work(&writing)?;
        let evicted = newcomer.map_or(Ok(BTreeMap::new()), |newcomer| writing.make_room(newcomer))?;
        writing.transaction.commit()?;
        evicted.iter().for_each(|(tenant, records)| note_evicted(tenant, *records));
        Ok(done)
    }

    fn held(&self, whose: &Whose) -> Outcome<Held> {
        let mut held = Held::default();
        let mut select = self.connection.prepare(&format!("SELECT kind, count(*) FROM records WHERE {OF_OWNERS} GROUP BY kind"))?;
        let mut rows = select.query(owners(whose))?;
        while let Some(row) = rows.next()? {
            held.add(row.get(0)?, row.get(1)?);
        }
        Ok(held)
    }

    /// Deletes some records of these owners, and overwrites what they were. Returns none if there are none left.
    fn erase(&self, whose: &Whose) -> Outcome<Held> {
        self.connection.pragma_update(None, "secure_delete", "ON")?;
        let erased = self.write(None, |writing| writing.erase(whose));
        self.connection.pragma_update(None, "secure_delete", "OFF")?;
        if matches!(erased, Ok(none) if none == Held::default()) {
            // Deleted rows are in the write-ahead log, too, until it is begun anew.
            self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
        }
        erased
    }

    /// Returns a record without its items, their numbers, and the number of outputs among them.
    fn record(&self, owner: &Owner, id: &str) -> Outcome<(Record, Vec<i64>, usize)> {
        let mut select = self.connection.prepare_cached(
            "SELECT id, body, used, messages, tokens, summary, history, outputs FROM records WHERE owner = ?1 AND id = ?2",
        )?;
        let row = select.query_row(params![owner.0, id], |row| Ok((record(row)?, row.get::<_, String>(6)?, row.get(7)?))).optional()?;
        let (record, history, outputs) = row.ok_or_else(|| StoreError::NotFound(id.to_owned()))?;
        Ok((record, numbers(&history)?, outputs))
    }

    fn list(&self, owner: &Owner, kind: Kind, page: &Page) -> Outcome<RecordPage> {
        let after = match &page.after {
            Some(after) => {
                let mut select = self.connection.prepare_cached("SELECT number FROM records WHERE owner = ?1 AND id = ?2 AND kind = ?3")?;
                let number = select.query_row(params![owner.0, after, kind], |row| row.get(0)).optional()?;
                number.ok_or_else(|| StoreError::NotFound(after.clone()))?
            }
            None if page.descending => i64::MAX,
            None => i64::MIN,
        };
        let (beyond, order) = if page.descending { ("<", "DESC") } else { (">", "ASC") };
        let select = |columns: &str| {
            self.connection.prepare_cached(&format!(
                "SELECT {columns} FROM records WHERE owner = ?1 AND kind = ?2 AND number {beyond} ?3 ORDER BY number {order} LIMIT ?4",
            ))
        };
        let mut sizes = select("octet_length(body)")?;
        let sizes = sizes.query_map(params![owner.0, kind, after, page.limit.saturating_add(1) as i64], |row| row.get(0))?;
        let sizes = sizes.collect::<Result<Vec<u64>, _>>()?;
        let (count, fitting) = (sizes.len(), on_one_page(sizes).min(page.limit));
        let mut select = select("id, body, used, messages, tokens, NULL")?;
        let records = select.query_map(params![owner.0, kind, after, fitting as i64], record)?.collect::<Result<Vec<_>, _>>()?;
        Ok(RecordPage { records, has_more: count > fitting })
    }

    fn items(&self, numbers: &[i64]) -> Outcome<Vec<Item>> {
        let mut select = self.connection.prepare_cached(
            "SELECT items.id, items.body, items.tokens FROM json_each(?1) AS place JOIN items ON items.number = place.value
             ORDER BY place.key",
        )?;
        let items = select.query_map([list(numbers)], item)?.collect::<Result<Vec<_>, _>>()?;
        whole(numbers, items)
    }

    /// Returns the first of these items, as many as fit on a page.
    fn first_items(&self, numbers: &[i64]) -> Outcome<Vec<Item>> {
        let mut sizes = self.connection.prepare_cached(
            "SELECT octet_length(items.body) FROM json_each(?1) AS place JOIN items ON items.number = place.value ORDER BY place.key",
        )?;
        let sizes = sizes.query_map([list(numbers)], |row| row.get(0))?.collect::<Result<Vec<u64>, _>>()?;
        self.items(&numbers[..on_one_page(sizes)])
    }

    fn ids(&self, numbers: &[i64]) -> Outcome<Vec<String>> {
        let mut select = self
            .connection
            .prepare_cached("SELECT items.id FROM json_each(?1) AS place JOIN items ON items.number = place.value ORDER BY place.key")?;
        let ids = select.query_map([list(numbers)], |row| row.get(0))?.collect::<Result<Vec<_>, _>>()?;
        whole(numbers, ids)
    }
}

fn record(row: &Row<'_>) -> rusqlite::Result<Record> {
    let totals = Totals { messages: row.get(3)?, tokens: row.get(4)? };
    Ok(Record { id: row.get(0)?, body: row.get(1)?, updated: row.get(2)?, totals, summary: row.get(5)?, items: Vec::new() })
}

fn item(row: &Row<'_>) -> rusqlite::Result<Item> {
    Ok(Item { id: row.get(0)?, body: row.get(1)?, tokens: row.get(2)? })
}

impl ToSql for Kind {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Owned(Value::Integer(*self as i64)))
    }
}

/// Checks that all items were found: a history that lacks one must not pass for a whole one.
fn whole<T>(numbers: &[i64], found: Vec<T>) -> Outcome<Vec<T>> {
    if found.len() == numbers.len() { Ok(found) } else { Err(StoreError::Failed("a history names an item that is not there".into())) }
}

fn list(numbers: &[i64]) -> String {
    serde_json::to_string(numbers).expect("numbers are JSON")
}

fn numbers(list: &str) -> Outcome<Vec<i64>> {
    serde_json::from_str(list).map_err(|error| StoreError::Failed(format!("a history cannot be read: {error}")))
}

/// The numbers of stored items.
fn numbers_of(connection: &Connection, owner: &Owner, ids: &[String]) -> Outcome<Vec<i64>> {
    let mut select = connection.prepare_cached("SELECT number FROM items WHERE owner = ?1 AND id = ?2")?;
    let number = |id: &String| {
        let number = select.query_row(params![owner.0, id], |row| row.get(0)).optional()?;
        number.ok_or_else(|| StoreError::NotFound(id.clone()))
    };
    ids.iter().map(number).collect()
}

/// The size of items, whose bodies are not read for that.
fn size(connection: &Connection, numbers: &[i64]) -> Outcome<Size> {
    if numbers.is_empty() {
        return Ok(Size::default());
    }
    let mut select = connection.prepare_cached(
        "SELECT sum(octet_length(items.body)), coalesce(sum(items.tokens) FILTER (WHERE items.id NOT GLOB 'rs_*'), 0)
         FROM json_each(?1) AS place JOIN items ON items.number = place.value",
    )?;
    Ok(select.query_row([list(numbers)], |row| Ok(Size { bytes: row.get::<_, Option<u64>>(0)?.unwrap_or(0), tokens: row.get(1)? }))?)
}

/// A transaction, which is rolled back unless it is committed.
struct Writing<'a> {
    transaction: Transaction<'a>,
    limits: Limits,
}

impl Writing<'_> {
    fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Outcome<()> {
        let NewRecord { id, kind, body, earlier, items, outputs, conversation } = record;
        let mut history = numbers_of(&self.transaction, owner, &earlier)?;
        let new = self.insert_items(owner, &items)?;
        history.extend(&new);
        if let Some((conversation, body)) = conversation {
            self.append(owner, &conversation, &new, &Addition { body, ..Addition::default() }, now)?;
        }
        size(&self.transaction, &history)?.check_history(&id, history.len(), self.limits)?;
        let history = list(&history);
        self.transaction.execute(
            "INSERT INTO records (owner, id, used, body, history, outputs, kind, created) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![owner.0, id, kind.used(now), body, history, outputs, kind, now],
        )?;
        if kind == Kind::Conversation {
            self.count(self.transaction.last_insert_rowid())?;
        }
        self.use_items(&history)
    }

    fn insert_items(&self, owner: &Owner, items: &[Item]) -> Outcome<Vec<i64>> {
        let mut insert =
            self.transaction.prepare_cached("INSERT OR IGNORE INTO items (owner, id, body, tokens) VALUES (?1, ?2, ?3, ?4)")?;
        for item in items {
            insert.execute(params![owner.0, item.id, item.body, item.tokens])?;
        }
        numbers_of(&self.transaction, owner, &items.iter().map(|item| item.id.clone()).collect::<Vec<_>>())
    }

    fn use_items(&self, history: &str) -> Outcome<()> {
        self.transaction.execute(
            "INSERT INTO uses (item, places) SELECT value, count(*) FROM json_each(?1) WHERE true GROUP BY value
             ON CONFLICT (item) DO UPDATE SET places = places + excluded.places",
            [history],
        )?;
        Ok(())
    }

    /// Uncounts a history's places, and deletes the items that no other history names.
    fn give_up(&self, history: &str) -> Outcome<()> {
        self.transaction.execute(
            "UPDATE uses SET places = uses.places - given.places
             FROM (SELECT value AS item, count(*) AS places FROM json_each(?1) GROUP BY value) AS given WHERE uses.item = given.item",
            [history],
        )?;
        self.transaction.execute(
            "DELETE FROM items WHERE number IN (SELECT uses.item FROM json_each(?1) AS place JOIN uses ON uses.item = place.value WHERE uses.places = 0)",
            [history],
        )?;
        self.transaction.execute("DELETE FROM uses WHERE places = 0 AND item IN (SELECT value FROM json_each(?1))", [history])?;
        Ok(())
    }

    /// Returns a record's number and those of its items.
    fn history(&self, owner: &Owner, id: &str) -> Outcome<(i64, Vec<i64>)> {
        let mut select = self.transaction.prepare_cached("SELECT number, history FROM records WHERE owner = ?1 AND id = ?2")?;
        let row = select.query_row(params![owner.0, id], |row| Ok((row.get(0)?, row.get::<_, String>(1)?))).optional()?;
        let (number, history) = row.ok_or_else(|| StoreError::NotFound(id.to_owned()))?;
        Ok((number, numbers(&history)?))
    }

    /// Appends to a record's history. `items` are the numbers of the addition's items.
    fn append(&self, owner: &Owner, id: &str, items: &[i64], addition: &Addition, now: u64) -> Outcome<()> {
        let (number, mut history) = self.history(owner, id)?;
        let gone = match addition.cut {
            Some(cut) => cut.take(&mut history).ok_or_else(|| StoreError::Changed(id.to_owned()))?,
            None => Vec::new(),
        };
        self.forget_summary(number, history.len())?;
        history.extend(items);
        size(&self.transaction, &history)?.check_history(id, history.len(), self.limits)?;
        self.use_items(&list(items))?;
        self.transaction.execute("UPDATE records SET history = ?2, used = ?3 WHERE number = ?1", params![number, list(&history), now])?;
        self.count(number)?;
        if let Some(Rewrite { from, to }) = &addition.body {
            self.transaction.execute("UPDATE records SET body = ?3 WHERE number = ?1 AND body = ?2", params![number, from, to])?;
        }
        self.give_up(&list(&gone))
    }

    fn remove(&self, owner: &Owner, id: &str, item: &str) -> Outcome<()> {
        let (record, history) = self.history(owner, id)?;
        let number = numbers_of(&self.transaction, owner, &[item.to_owned()])?[0];
        let first = history.iter().position(|&place| place == number).ok_or_else(|| StoreError::NotFound(item.to_owned()))?;
        self.forget_summary(record, first)?;
        let (gone, left): (Vec<_>, Vec<_>) = history.into_iter().partition(|&place| place == number);
        self.transaction.execute("UPDATE records SET history = ?2 WHERE number = ?1", params![record, list(&left)])?;
        self.count(record)?;
        self.give_up(&list(&gone))
    }

    fn summarize(&self, owner: &Owner, id: &str, summary: &Summary) -> Outcome<()> {
        let (number, history) = self.history(owner, id)?;
        let last = summary.items.checked_sub(1).and_then(|last| history.get(last));
        let last: Option<String> = match last {
            Some(last) => self.transaction.query_row("SELECT id FROM items WHERE number = ?1", [last], |row| row.get(0)).optional()?,
            None => None,
        };
        summary.check(id, |_| last.as_deref())?;
        self.transaction
            .execute("UPDATE records SET summary = ?2, summarized = ?3 WHERE number = ?1", params![number, summary.body, summary.items])?;
        Ok(())
    }

    /// Deletes the summary if it covers items beyond this place of the history: they are about to go.
    fn forget_summary(&self, record: i64, place: usize) -> Outcome<()> {
        self.transaction
            .execute("UPDATE records SET summary = NULL, summarized = 0 WHERE number = ?1 AND summarized > ?2", params![record, place])?;
        Ok(())
    }

    /// Updates a conversation's totals.
    fn count(&self, record: i64) -> Outcome<()> {
        self.transaction.execute(
            "UPDATE records SET messages = counted.messages, tokens = counted.tokens FROM (
                 SELECT count(*) FILTER (WHERE items.id GLOB 'msg_*') AS messages, coalesce(sum(items.tokens), 0) AS tokens
                 FROM records AS conversation, json_each(conversation.history) AS place JOIN items ON items.number = place.value
                 WHERE conversation.number = ?1) AS counted
             WHERE records.number = ?1",
            [record],
        )?;
        Ok(())
    }

    fn delete(&self, number: i64) -> Outcome<()> {
        let history: String =
            self.transaction.query_row("DELETE FROM records WHERE number = ?1 RETURNING history", [number], |row| row.get(0))?;
        self.give_up(&history)
    }

    fn erase(&self, whose: &Whose) -> Outcome<Held> {
        let select = format!("SELECT number, kind FROM records WHERE {OF_OWNERS} LIMIT {AT_A_TIME}");
        let mut select = self.transaction.prepare_cached(&select)?;
        let found = select.query_map(owners(whose), |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<Vec<(i64, i64)>, _>>()?;
        let mut erased = Held::default();
        for (number, kind) in found {
            self.delete(number)?;
            erased.add(kind, 1);
        }
        Ok(erased)
    }

    fn delete_older(&self, kind: Kind, before: u64) -> Outcome<u64> {
        let mut select = self.transaction.prepare_cached(&older(kind))?;
        let found = select.query_map(params![before, AT_A_TIME], |row| row.get(0))?.collect::<Result<Vec<_>, _>>()?;
        found.iter().try_for_each(|&number| self.delete(number))?;
        Ok(found.len() as u64)
    }

    /// Deletes the oldest records while there are too many. The newest of the newcomer's stays, regardless of its size; but if there are
    /// other tenants, it must then fit into a share. Returns the number of records deleted for each tenant.
    fn make_room(&self, newcomer: &Owner) -> Outcome<BTreeMap<String, u64>> {
        let (newcomer, mut evicted) = (newcomer.tenant().to_owned(), BTreeMap::new());
        while self.bytes()? > self.limits.bytes {
            let shares = self.shares()?;
            // The file is larger than the counted sizes.
            let room = shares.total().min(self.limits.bytes);
            let mut losers = shares.losers(room, &newcomer, 0);
            if losers.is_empty() {
                losers.push(newcomer.clone());
            }
            let mut oldest = None;
            for loser in losers {
                oldest = self.oldest_of(&loser, loser == newcomer)?.map(|number| (number, loser));
                if oldest.is_some() {
                    break;
                }
            }
            let Some((number, loser)) = oldest else {
                let held = shares.held(&newcomer);
                let is_over = held < shares.total() && held > shares.share(room, &newcomer);
                return if is_over { Err(StoreError::Full) } else { Ok(evicted) };
            };
            self.delete(number)?;
            *evicted.entry(loser).or_default() += 1;
        }
        Ok(evicted)
    }

    /// The size of each tenant's records.
    fn shares(&self) -> Outcome<Shares<String>> {
        let mut select = self.transaction.prepare_cached("SELECT tenant, bytes FROM shares WHERE bytes > 0")?;
        let mut shares = Shares::default();
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            shares.add(&row.get(0)?, row.get(1)?);
        }
        Ok(shares)
    }

    /// Returns a tenant's oldest record, not counting those that never expire.
    fn oldest_of(&self, tenant: &str, but_the_newest: bool) -> Outcome<Option<i64>> {
        let mut select = self.transaction.prepare_cached(concat!(
            "SELECT number FROM records WHERE ",
            tenant_of!("owner"),
            " = ?1 AND used < ?2 ORDER BY used, number LIMIT 2"
        ))?;
        let numbers = select.query_map(params![tenant, ALWAYS], |row| row.get(0))?.collect::<Result<Vec<_>, _>>()?;
        Ok(numbers.first().copied().filter(|_| !but_the_newest || numbers.len() == 2))
    }

    /// Returns the size in use, without free pages, which are reused before the file grows.
    fn bytes(&self) -> Outcome<u64> {
        let pragma = |name: &str| self.transaction.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, u64>(0));
        let pages = pragma("page_count")?.saturating_sub(pragma("freelist_count")?);
        Ok(pages * pragma("page_size")?)
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Failed(error.to_string())
    }
}
