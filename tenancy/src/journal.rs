//! A log in SQLite: entries in the order of their numbers, appended by a thread of its own, of one process at a time, and read by any.
//!
//! A log is a directory of files, each named after the number of its first entry. A group of entries is one transaction, written ahead
//! (WAL), so that a process that dies loses no acknowledged entry. Transactions are synced to disk at most once per interval, so that a
//! power failure loses at most that much (`synchronous=NORMAL`, and a checkpoint); with an interval of zero, each is synced before it is
//! acknowledged (`synchronous=FULL`).
//!
//! A failing disk holds up no request: entries wait in memory, up to a bound, and are written when it works again.
//!
//! - `removal`: entries that go because of their age, and entries that get other contents

mod removal;

pub use removal::{expired, remove, rewrite};

use crate::{audit::Line, usage::Event};
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    marker::PhantomData,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::sync::oneshot;

/// The maximum number of entries that wait to be written: about 30 MB of usage events.
const WAITING_MAX: usize = 65_536;
/// The maximum number of entries of a transaction.
const GROUP_MAX: usize = 1024;
/// The longest time that an answer is held back.
const WRITTEN_MAX: Duration = Duration::from_millis(250);
/// The pause between two attempts on a disk that has failed.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// The number of entries that are read at once.
const PAGE: usize = 500;
/// The longest wait for another connection, which reads or removes entries.
const BUSY_MAX: Duration = Duration::from_secs(5);
/// The pause between two attempts to begin the write-ahead log anew, while another connection does the same.
const CHECKPOINT_EVERY: Duration = Duration::from_millis(20);
/// `at` is when the entry was written, in Unix seconds; `bytes` the size of the contents of all entries of the log up to this one.
const SCHEMA: &str =
    "CREATE TABLE entries (number INTEGER PRIMARY KEY, at INTEGER NOT NULL, bytes INTEGER NOT NULL, content BLOB NOT NULL);";

/// An entry of a log.
pub trait Entry: Sized + Send + 'static {
    /// The name of the log.
    const NAME: &'static str;
    /// The mark of the log's files, by which they are told from other files of SQLite (`PRAGMA application_id`).
    const FILE_ID: i32;

    fn encode(&self) -> String;
    /// Decodes what was encoded; `None` if it is invalid.
    fn decode(content: &[u8]) -> Option<Self>;
}

impl Entry for Event {
    const NAME: &'static str = "usage";
    const FILE_ID: i32 = i32::from_be_bytes(*b"TMus");

    fn encode(&self) -> String {
        serde_json::to_string(self).expect("an event is made of texts and numbers")
    }

    fn decode(content: &[u8]) -> Option<Self> {
        serde_json::from_slice(content).ok()
    }
}

impl Entry for Line {
    const NAME: &'static str = "audit";
    const FILE_ID: i32 = i32::from_be_bytes(*b"TMau");

    fn encode(&self) -> String {
        self.0.clone()
    }

    /// Decodes anything: the chain tells whether it was changed.
    fn decode(content: &[u8]) -> Option<Self> {
        Some(Self(String::from_utf8_lossy(content).into_owned()))
    }
}

/// A place in a log: after an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The number of the entry; 0 at the beginning of the log.
    pub number: u64,
    /// The size of all entries up to it.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The longest time between two syncs; with zero, every transaction is synced before it is acknowledged.
    pub sync_every: Duration,
    /// The size of entries from which a file is closed, and a new one started.
    pub segment_bytes: u64,
}

#[derive(Debug)]
pub struct Journal<E> {
    /// `None` only while it is dropped.
    entries: Option<SyncSender<Waiting<E>>>,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct State {
    failing: AtomicBool,
    ending: AtomicBool,
    lost: AtomicU64,
}

#[derive(Debug)]
struct Waiting<E> {
    entry: E,
    written: oneshot::Sender<()>,
}

/// The error of an entry for which there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log is not written: its disk fails, and too many entries wait")]
pub struct Full;

/// The reason why a log cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("cannot use {path} for the {log} log: {source}")]
    File { log: &'static str, path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{path} is another process's {log} log: each coordinator needs a data directory of its own")]
    Taken { log: &'static str, path: PathBuf },
    #[error("{path} is no {log} log of this version")]
    NotOurs { log: &'static str, path: PathBuf },
    #[error("{path} is in the {log} log's format from before SQLite: move it away, and read it with the version that wrote it")]
    Former { log: &'static str, path: PathBuf },
}

impl JournalError {
    fn file<E: Entry, S: Into<Box<dyn std::error::Error + Send + Sync>>>(path: &Path) -> impl Fn(S) -> Self {
        move |source| Self::File { log: E::NAME, path: path.to_owned(), source: source.into() }
    }

    fn database<E: Entry>(path: &Path) -> impl Fn(rusqlite::Error) -> Self {
        move |source| match source.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => Self::NotOurs { log: E::NAME, path: path.to_owned() },
            _ => Self::file::<E, _>(path)(source),
        }
    }
}

impl<E: Entry> Journal<E> {
    /// Opens the log in `dir`, and hands over the entries written since `since`, in order.
    pub fn open(dir: &Path, settings: Settings, since: SystemTime, mut earlier: impl FnMut(E)) -> Result<Self, JournalError> {
        if !dir.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(JournalError::file::<E, _>(dir))?;
        }
        let lock = lock::<E>(&dir.join("lock"))?;
        let firsts = files::<E>(dir)?;
        let first = firsts.last().copied().unwrap_or(1);
        let writer = Writer::<E>::open(dir, settings, first)?;
        for first in firsts {
            let path = dir.join(name(first));
            let changed = path.metadata().and_then(|metadata| metadata.modified()).map_err(JournalError::file::<E, _>(&path))?;
            if first == writer.first || changed >= since {
                rows(&path, 0, unix_seconds(since), &mut |_, entry| {
                    earlier(entry);
                    true
                })?;
            }
        }

        let state = Arc::new(State::default());
        let (entries, waiting) = mpsc::sync_channel(WAITING_MAX);
        let shared = Arc::clone(&state);
        let thread = std::thread::Builder::new().name(E::NAME.into()).spawn(move || {
            writer.run(&waiting, &shared);
            drop(lock);
        });
        Ok(Self { entries: Some(entries), state, thread: Some(thread.map_err(JournalError::file::<E, _>(dir))?) })
    }

    /// Hands an entry over: from here on it will be written even if the caller is gone. The returned future waits for that, but only
    /// briefly, and not at all while the disk fails.
    pub fn write(&self, entry: E) -> impl Future<Output = ()> + Send + use<E> {
        let offered = self.offer(entry);
        let waits = !self.is_failing();
        async move {
            if let (Ok(written), true) = (offered, waits) {
                let _ = tokio::time::timeout(WRITTEN_MAX, written).await;
            }
        }
    }

    /// Hands an entry over. The returned receiver is notified once the entry is written, no matter how long that takes.
    pub fn offer(&self, entry: E) -> Result<oneshot::Receiver<()>, Full> {
        let (written, done) = oneshot::channel();
        match self.entries.as_ref().expect("taken at the end only").try_send(Waiting { entry, written }) {
            Ok(()) => Ok(done),
            Err(_) => {
                if self.state.lost.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::error!("could not write the {} log, and its queue is full: further entries are lost", E::NAME);
                }
                Err(Full)
            }
        }
    }
}

impl<E> Journal<E> {
    /// The number of entries for which there was no room.
    pub fn lost(&self) -> u64 {
        self.state.lost.load(Ordering::Relaxed)
    }

    /// Whether the disk fails to take entries.
    pub fn is_failing(&self) -> bool {
        self.state.failing.load(Ordering::Relaxed)
    }
}

impl<E> Drop for Journal<E> {
    /// Writes the waiting entries, unless the disk fails.
    fn drop(&mut self) {
        self.state.ending.store(true, Ordering::Relaxed);
        self.entries = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Writer<E> {
    dir: PathBuf,
    settings: Settings,
    /// The current file.
    database: Connection,
    /// The number of the file's first entry.
    first: u64,
    /// The size of the entries before the file.
    before: u64,
    end: Position,
    /// The time of the first transaction since the last sync.
    dirty: Option<Instant>,
    entries: PhantomData<E>,
}

impl<E: Entry> Writer<E> {
    fn open(dir: &Path, settings: Settings, first: u64) -> Result<Self, JournalError> {
        let path = dir.join(name(first));
        let database = create::<E>(&path, settings.sync_every)?;
        let mut end = end::<E>(dir)?;
        end.number = end.number.max(first - 1);
        let before = "SELECT bytes - length(content) FROM entries ORDER BY number LIMIT 1";
        let before = database.query_row(before, [], |row| row.get(0)).optional().map_err(JournalError::database::<E>(&path))?;
        let before = before.unwrap_or(end.bytes);
        Ok(Self { dir: dir.to_owned(), settings, database, first, before, end, dirty: None, entries: PhantomData })
    }

    fn run(mut self, waiting: &Receiver<Waiting<E>>, state: &State) {
        loop {
            let first = match self.dirty {
                None => waiting.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(since) => waiting.recv_timeout(self.settings.sync_every.saturating_sub(since.elapsed())),
            };
            match first {
                Ok(first) => {
                    let group: Vec<_> = std::iter::once(first).chain(waiting.try_iter()).take(GROUP_MAX).collect();
                    let contents: Vec<_> = group.iter().map(|waiting| waiting.entry.encode()).collect();
                    if !self.persist(&contents, state) {
                        return;
                    }
                    for waiting in group {
                        // The caller may have gone.
                        let _ = waiting.written.send(());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.dirty.is_some_and(|since| since.elapsed() >= self.settings.sync_every) {
                self.sync();
            }
        }
        self.sync();
        close(self.database);
    }

    /// Writes, and retries until it succeeds. Returns `false` if the process ends first.
    fn persist(&mut self, contents: &[String], state: &State) -> bool {
        while let Err(error) = self.append(contents) {
            if !state.failing.swap(true, Ordering::Relaxed) {
                tracing::error!(%error, "the {} log cannot be written: entries wait in memory", E::NAME);
            }
            if state.ending.load(Ordering::Relaxed) {
                tracing::error!("the {} log could not be written to the end: the last entries are lost", E::NAME);
                return false;
            }
            std::thread::sleep(RETRY_EVERY);
        }
        if state.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the {} log is written again", E::NAME);
        }
        true
    }

    fn append(&mut self, contents: &[String]) -> Result<(), JournalError> {
        let bytes: u64 = contents.iter().map(|content| content.len() as u64).sum();
        let is_full = self.end.bytes - self.before + bytes > self.settings.segment_bytes;
        if is_full && self.end.number >= self.first {
            self.rotate()?;
        }
        self.end = insert(&mut self.database, self.end, contents).map_err(JournalError::database::<E>(&self.dir.join(name(self.first))))?;
        if !self.settings.sync_every.is_zero() {
            self.dirty.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    fn rotate(&mut self) -> Result<(), JournalError> {
        let first = self.end.number + 1;
        let database = create::<E>(&self.dir.join(name(first)), self.settings.sync_every)?;
        self.sync();
        close(std::mem::replace(&mut self.database, database));
        (self.first, self.before, self.dirty) = (first, self.end.bytes, None);
        Ok(())
    }

    /// A checkpoint syncs both the write-ahead log and the file.
    fn sync(&mut self) {
        self.dirty = None;
        let synced = self.database.query_row("PRAGMA wal_checkpoint", [], |row| Ok(row.get::<_, i64>(1)? == row.get::<_, i64>(2)?));
        match synced {
            Ok(true) => {}
            // A reader is at an earlier state.
            Ok(false) => self.dirty = Some(Instant::now()),
            Err(error) => tracing::warn!(%error, "the {} log cannot be synced", E::NAME),
        }
    }
}

/// Appends entries in one transaction. Returns the new end.
fn insert(database: &mut Connection, mut end: Position, contents: &[String]) -> rusqlite::Result<Position> {
    let at = unix_seconds(SystemTime::now());
    let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut insert = transaction.prepare_cached("INSERT INTO entries VALUES (?, ?, ?, ?)")?;
    for content in contents {
        end = Position { number: end.number + 1, bytes: end.bytes + content.len() as u64 };
        insert.execute(params![end.number, at, end.bytes, content])?;
    }
    drop(insert);
    transaction.commit()?;
    Ok(end)
}

/// Closes a file so that it is whole by itself, without a write-ahead log beside it.
fn close(database: Connection) {
    // A reader that is still there prevents it; then the write-ahead log stays.
    let _ = database.pragma_update(None, "journal_mode", "DELETE");
}

/// Takes the lock of a log until the returned file is dropped.
fn lock<E: Entry>(path: &Path) -> Result<File, JournalError> {
    let file = private(path).map_err(JournalError::file::<E, _>(path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JournalError::Taken { log: E::NAME, path: path.parent().unwrap_or(path).to_owned() }),
        Err(TryLockError::Error(source)) => Err(JournalError::file::<E, _>(path)(source)),
    }
}

/// Opens or creates a file, readable by this user only. SQLite gives its other files the same permissions.
fn private(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Opens a file to write, and makes its table if it is new.
fn create<E: Entry>(path: &Path, sync_every: Duration) -> Result<Connection, JournalError> {
    private(path).map_err(JournalError::file::<E, _>(path))?;
    let open = || {
        let database = Connection::open(path)?;
        database.busy_timeout(BUSY_MAX)?;
        Ok(database)
    };
    let database = open().map_err(JournalError::database::<E>(path))?;
    let is_new = !has_entries::<E>(&database, path)?;
    let prepare = || {
        database.pragma_update(None, "journal_mode", "WAL")?;
        database.pragma_update(None, "synchronous", if sync_every.is_zero() { "FULL" } else { "NORMAL" })?;
        if is_new {
            database.execute_batch(&format!("BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {}; COMMIT;", E::FILE_ID))?;
        }
        Ok(())
    };
    prepare().map_err(JournalError::database::<E>(path))?;
    Ok(database)
}

/// Opens a file of the log to read or to remove entries. `None` if its first transaction is still missing.
fn open<E: Entry>(path: &Path, flags: OpenFlags) -> Result<Option<Connection>, JournalError> {
    let failed = JournalError::database::<E>(path);
    let database = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX).map_err(&failed)?;
    database.busy_timeout(BUSY_MAX).map_err(&failed)?;
    Ok(has_entries::<E>(&database, path)?.then_some(database))
}

/// Whether the file has the log's table. A file of anything else is refused.
fn has_entries<E: Entry>(database: &Connection, path: &Path) -> Result<bool, JournalError> {
    let number = |sql| database.query_row(sql, [], |row| row.get::<_, i32>(0)).map_err(JournalError::database::<E>(path));
    match number("PRAGMA application_id")? {
        id if id == E::FILE_ID => Ok(true),
        0 if number("SELECT count(*) FROM sqlite_schema")? == 0 => Ok(false),
        _ => Err(JournalError::NotOurs { log: E::NAME, path: path.to_owned() }),
    }
}

fn name(first: u64) -> String {
    format!("{first:012}.sqlite")
}

/// The numbers of the first entries of a log's files, in ascending order.
pub fn files<E: Entry>(dir: &Path) -> Result<Vec<u64>, JournalError> {
    let failed = JournalError::file::<E, _>(dir);
    let mut firsts = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(&failed)? {
        let path = entry.map_err(&failed)?.path();
        let part = |part: Option<&std::ffi::OsStr>| part.and_then(std::ffi::OsStr::to_str).unwrap_or_default().to_owned();
        match (part(path.file_stem()).parse::<u64>(), part(path.extension())) {
            (Ok(first), end) if end == "sqlite" && first > 0 => firsts.push(first),
            (Ok(_), end) if end == E::NAME => return Err(JournalError::Former { log: E::NAME, path }),
            _ => {}
        }
    }
    firsts.sort_unstable();
    Ok(firsts)
}

/// Hands over the entries after the number `after`, in order, until `each` returns `false`.
pub fn read<E: Entry>(dir: &Path, after: u64, mut each: impl FnMut(Position, E) -> bool) -> Result<(), JournalError> {
    let firsts = files::<E>(dir)?;
    let begin = firsts.partition_point(|&first| first - 1 <= after).saturating_sub(1);
    for &first in &firsts[begin..] {
        if !rows(&dir.join(name(first)), after, 0, &mut each)? {
            break;
        }
    }
    Ok(())
}

/// Hands over a file's entries after the number `after` that were written since `since`. Returns whether `each` wants more.
fn rows<E: Entry>(path: &Path, after: u64, since: u64, each: &mut impl FnMut(Position, E) -> bool) -> Result<bool, JournalError> {
    let failed = JournalError::database::<E>(path);
    let Some(database) = open::<E>(path, OpenFlags::SQLITE_OPEN_READ_ONLY)? else { return Ok(true) };
    let select = "SELECT number, bytes, content FROM entries WHERE number > ? AND at >= ? ORDER BY number LIMIT ?";
    let mut select = database.prepare(select).map_err(&failed)?;
    let mut last = after;
    loop {
        // A page at a time: while a read goes on, the writer cannot sync, and `each` may take its time.
        let rows = select.query_map(params![last, since, PAGE], entry).and_then(Iterator::collect::<rusqlite::Result<Vec<_>>>);
        let rows = rows.map_err(&failed)?;
        if rows.is_empty() {
            return Ok(true);
        }
        for (position, entry) in rows {
            last = position.number;
            let entry = entry.ok_or_else(|| JournalError::file::<E, _>(path)(format!("entry {last} is damaged")))?;
            if !each(position, entry) {
                return Ok(false);
            }
        }
    }
}

/// Reads a row of number, bytes and content.
fn entry<E: Entry>(row: &rusqlite::Row<'_>) -> rusqlite::Result<(Position, Option<E>)> {
    let content = row.get_ref(2)?.as_bytes().ok();
    Ok((Position { number: row.get(0)?, bytes: row.get(1)? }, content.and_then(E::decode)))
}

/// The number of the last entry before all those that may have been written since `since`.
pub fn before<E: Entry>(dir: &Path, since: SystemTime) -> Result<u64, JournalError> {
    let mut number = 0;
    for first in files::<E>(dir)? {
        let path = dir.join(name(first));
        let changed = path.metadata().and_then(|metadata| metadata.modified()).map_err(JournalError::file::<E, _>(&path))?;
        number = first - 1;
        if changed >= since {
            break;
        }
    }
    Ok(number)
}

/// The end of a log.
pub fn end<E: Entry>(dir: &Path) -> Result<Position, JournalError> {
    for first in files::<E>(dir)?.into_iter().rev() {
        let path = dir.join(name(first));
        let Some(database) = open::<E>(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)? else { continue };
        let last = "SELECT number, bytes FROM entries ORDER BY number DESC LIMIT 1";
        let last = database.query_row(last, [], |row| Ok(Position { number: row.get(0)?, bytes: row.get(1)? })).optional();
        if let Some(end) = last.map_err(JournalError::database::<E>(&path))? {
            return Ok(end);
        }
    }
    Ok(Position::default())
}

fn unix_seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{future::Future, pin::pin, task::Poll};

    pub(super) const SETTINGS: Settings = Settings { sync_every: Duration::from_millis(20), segment_bytes: 2000 };

    pub(super) fn event(id: usize) -> Event {
        Event { id: format!("req_{id}"), prompt_tokens: 1, ..Event::default() }
    }

    /// Writes an entry, however long the disk takes: [`Journal::write`] waits only briefly.
    async fn written(meter: &Journal<Event>, event: Event) {
        meter.offer(event).expect("there is room").await.expect("it is written");
    }

    pub(super) fn open_at(dir: &Path, settings: Settings) -> (Journal<Event>, Vec<String>) {
        let mut ids = Vec::new();
        let meter = Journal::<Event>::open(dir, settings, UNIX_EPOCH, |event: Event| ids.push(event.id)).unwrap();
        (meter, ids)
    }

    pub(super) fn ids(range: std::ops::Range<usize>) -> Vec<String> {
        range.map(|id| event(id).id).collect()
    }

    pub(super) fn read_after(dir: &Path, after: u64) -> Vec<String> {
        let mut ids = Vec::new();
        read(dir, after, |_, event: Event| {
            ids.push(event.id);
            true
        })
        .unwrap();
        ids
    }

    /// The state that a killed process leaves, without an orderly end.
    fn copy_of(dir: &Path) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        copy
    }

    #[tokio::test]
    async fn what_was_acknowledged_is_there_and_once() {
        for sync_every in [Duration::ZERO, SETTINGS.sync_every] {
            let dir = tempfile::tempdir().unwrap();
            let settings = Settings { sync_every, ..SETTINGS };
            let (meter, earlier) = open_at(dir.path(), settings);
            assert!(earlier.is_empty());
            for id in 0..50 {
                written(&meter, event(id)).await;
            }
            let copy = copy_of(dir.path());
            assert!(files::<Event>(copy.path()).unwrap().len() > 3, "files are bounded");
            assert_eq!(read_after(copy.path(), 0), ids(0..50), "and can be read beside their process");
            let (again, earlier) = open_at(copy.path(), settings);
            assert_eq!(earlier, ids(0..50));
            written(&again, event(50)).await;
            drop(again);
            assert_eq!(open_at(copy.path(), settings).1, ids(0..51));
        }
    }

    #[tokio::test]
    async fn a_torn_end_is_cut_and_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let whole = Settings { segment_bytes: 1 << 20, ..SETTINGS };
        let (meter, _) = open_at(dir.path(), Settings { sync_every: Duration::from_secs(3600), ..whole });
        for id in 0..3 {
            written(&meter, event(id)).await;
        }
        for torn in [1, 13, 40] {
            let copy = copy_of(dir.path());
            let ahead = File::options().write(true).open(copy.path().join(name(1) + "-wal")).unwrap();
            ahead.set_len(ahead.metadata().unwrap().len() - torn).unwrap();
            let (meter, earlier) = open_at(copy.path(), whole);
            assert_eq!(earlier, ids(0..2));
            written(&meter, event(2)).await;
            drop(meter);
            assert_eq!(read_after(copy.path(), 0), ids(0..3));
        }
    }

    #[tokio::test]
    async fn a_log_is_read_from_any_place_whichever_files_are_left() {
        let dir = tempfile::tempdir().unwrap();
        let (meter, _) = open_at(dir.path(), Settings { segment_bytes: 1, ..SETTINGS });
        for id in 0..4 {
            written(&meter, event(id)).await;
        }
        assert_eq!(files::<Event>(dir.path()).unwrap(), [1, 2, 3, 4]);
        for after in 0..5 {
            assert_eq!(read_after(dir.path(), after), ids(after as usize..4));
        }
        let mut places = Vec::new();
        read(dir.path(), 1, |position, event: Event| {
            places.push((position.number, event.id));
            places.len() < 2
        })
        .unwrap();
        assert_eq!(places, [(2, event(1).id), (3, event(2).id)], "no more than was wanted");
        let all = end::<Event>(dir.path()).unwrap();
        assert_eq!((all.number, all.bytes), (4, 4 * event(0).encode().len() as u64));
        for first in [1, 2] {
            assert!(!dir.path().join(name(first) + "-wal").exists(), "a closed file is whole by itself");
            std::fs::remove_file(dir.path().join(name(first))).unwrap();
        }
        assert_eq!(read_after(dir.path(), 0), ids(2..4));
        // A crash came between the creation of the next file and its first entry.
        drop(meter);
        File::create(dir.path().join(name(5))).unwrap();
        assert_eq!(end::<Event>(dir.path()).unwrap(), all);
        let (meter, _) = open_at(dir.path(), SETTINGS);
        written(&meter, event(4)).await;
        assert_eq!(read_after(dir.path(), 3), ids(3..5));
    }

    #[test]
    fn other_files_are_refused_and_named() {
        let error = |prepare: &dyn Fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            prepare(dir.path());
            Journal::<Event>::open(dir.path(), SETTINGS, UNIX_EPOCH, drop).unwrap_err().to_string()
        };
        let text = |dir: &Path| {
            std::fs::write(dir.join(name(1)), "something else, and longer than the head of a file of SQLite: ".repeat(9)).unwrap()
        };
        let audit = |dir: &Path| drop(create::<Line>(&dir.join(name(1)), Duration::ZERO).unwrap());
        for other in [&text as &dyn Fn(&Path), &audit] {
            let error = error(other);
            assert!(error.ends_with("000000000001.sqlite is no usage log of this version"), "{error}");
        }
        let former = error(&|dir| std::fs::write(dir.join("0000000001.usage"), b"tidemill usage 1\n").unwrap());
        assert!(former.contains("0000000001.usage is in the usage log's format from before SQLite: move it away"), "{former}");
        let damaged = error(&|dir| {
            let mut database = create::<Event>(&dir.join(name(1)), Duration::ZERO).unwrap();
            insert(&mut database, Position::default(), &["{".to_owned()]).unwrap();
        });
        assert!(damaged.contains("entry 1 is damaged"), "{damaged}");
    }

    #[test]
    fn a_log_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let (_meter, _) = open_at(dir.path(), SETTINGS);
        let second = Journal::<Event>::open(dir.path(), SETTINGS, UNIX_EPOCH, drop);
        assert!(matches!(second, Err(JournalError::Taken { .. })));
    }

    #[tokio::test]
    async fn a_failing_disk_holds_nobody_up_and_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (meter, _) = open_at(dir.path(), Settings { segment_bytes: 1, ..SETTINGS });
        // Each entry needs a new file, and the fourth finds a directory in its place.
        std::fs::create_dir(dir.path().join(name(4))).unwrap();
        let mut id = 0;
        while !meter.is_failing() {
            meter.write(event(id)).await;
            id += 1;
            assert!(id < 100, "the fourth file is never begun");
        }
        let mut immediately = pin!(meter.write(event(id)));
        let ready = std::future::poll_fn(|context| Poll::Ready(immediately.as_mut().poll(context).is_ready())).await;
        assert!(ready, "no request waits for a disk that has failed");
        std::fs::remove_dir(dir.path().join(name(4))).unwrap();
        while meter.is_failing() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        written(&meter, event(id + 1)).await;
        assert_eq!(meter.lost(), 0);
        drop(meter);
        assert_eq!(open_at(dir.path(), SETTINGS).1, ids(0..id + 2));
    }
}
