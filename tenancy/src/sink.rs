//! Events for external collectors: a thread follows a log and sends new entries, in order. Its position is on disk, so each entry arrives
//! at least once across crashes; a collector recognizes a repeated one by its id.
//!
//! No request waits for it: entries are held by their log, and its disk is the only bound. A collector that is slow, down, or refuses is
//! tried again with growing delays, and no entry is skipped.
//!
//! - [`http`]: events posted to an endpoint
//! - [`kafka`]: messages of a Kafka topic

pub mod http;
pub mod kafka;

use crate::{
    audit::Line,
    journal::{self, Entry, JournalError, Position},
    retry,
    usage::Event,
};
use serde::Deserialize;
use std::{
    fmt,
    fs::File,
    io::{self, Write},
    marker::PhantomData,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// The maximum number of entries that are sent at once.
const ENTRIES_MAX: usize = 500;
/// The size of entries from which no more are sent at once.
const BYTES_MAX: u64 = 1 << 20;
/// The interval at which the log is checked for new entries.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// An entry of a log, as a collector gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The id of the entry: the same whenever it is sent again.
    pub id: String,
    /// The tenant whose event it is; empty if it is no tenant's.
    pub tenant: String,
    /// A JSON object.
    pub json: String,
}

/// A log whose entries are sent.
pub trait Source: Send + 'static {
    /// Reads the entries after a position, in order, until `each` returns `false`.
    fn read(&self, after: Position, each: &mut dyn FnMut(Position, Message) -> bool) -> Result<(), String>;
    /// The end of the log.
    fn end(&self) -> Result<Position, String>;
    /// Learns that all entries up to a position have arrived, and that this is on disk.
    fn arrived(&self, _through: Position) {}
}

/// The place that entries are sent to.
pub trait Collector: Send + 'static {
    /// Sends entries, and waits until they have all arrived, or for a bounded time. After an error, some may have.
    fn send(&mut self, messages: &[Message]) -> Result<(), String>;
    /// The name of the place, for the log.
    fn target(&self) -> String;
}

/// The journal in a directory as a source.
pub struct Journaled<E> {
    dir: PathBuf,
    /// The name of the coordinator, in ids of entries that have none of their own.
    coordinator: String,
    entries: PhantomData<E>,
}

impl<E> fmt::Debug for Journaled<E> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Journaled").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// An entry of a journal that can be sent.
pub trait Sendable: Entry {
    /// `number` is the entry's in the journal of this coordinator.
    fn message(self, number: u64, coordinator: &str) -> Message;
}

impl Sendable for Event {
    fn message(self, _: u64, _: &str) -> Message {
        Message { json: self.encode(), id: self.id, tenant: self.tenant }
    }
}

impl Sendable for Line {
    fn message(self, number: u64, coordinator: &str) -> Message {
        #[derive(Default, Deserialize)]
        struct Of {
            #[serde(default)]
            event: Tenant,
        }
        #[derive(Default, Deserialize)]
        struct Tenant {
            #[serde(default)]
            tenant: Option<String>,
        }
        // An appeal and a decision name their block, and the block its tenant.
        let of: Of = serde_json::from_str(&self.0).unwrap_or_default();
        Message { id: format!("audit_{coordinator}_{number}"), tenant: of.event.tenant.unwrap_or_default(), json: self.0 }
    }
}

impl<E: Sendable> Journaled<E> {
    pub fn new(dir: &Path, coordinator: &str) -> Self {
        Self { dir: dir.to_owned(), coordinator: coordinator.to_owned(), entries: PhantomData }
    }
}

impl<E: Sendable> Source for Journaled<E> {
    fn read(&self, after: Position, each: &mut dyn FnMut(Position, Message) -> bool) -> Result<(), String> {
        let read = journal::read::<E>(&self.dir, after.number, |position, entry| {
            each(position, entry.message(position.number, &self.coordinator))
        });
        read.map_err(|error: JournalError| error.to_string())
    }

    fn end(&self) -> Result<Position, String> {
        journal::end::<E>(&self.dir).map_err(|error| error.to_string())
    }
}

#[derive(Debug)]
pub struct Sink {
    log: &'static str,
    state: Arc<State>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    ending: AtomicBool,
    sent: AtomicU64,
    failed: AtomicU64,
    failing: AtomicBool,
    behind: AtomicU64,
    behind_bytes: AtomicU64,
}

/// Counters of a sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub events: u64,
    /// The number of failed attempts.
    pub failed: u64,
    /// Whether the last attempt failed.
    pub is_failing: bool,
    /// The number of entries that have not arrived.
    pub behind: u64,
    /// The number of bytes of the log that have not arrived.
    pub behind_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("{path} does not say how far events were sent: {source} (remove it to send all of them again)")]
pub struct CursorError {
    path: PathBuf,
    source: io::Error,
}

impl Sink {
    /// Starts the thread. `log` names the log, and `cursor` is the file of the position.
    pub fn start(log: &'static str, cursor: PathBuf, source: impl Source, collector: impl Collector) -> Result<Self, CursorError> {
        let from = match std::fs::read(&cursor) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| CursorError { path: cursor.clone(), source: error.into() })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Position::default(),
            Err(source) => return Err(CursorError { path: cursor, source }),
        };
        let state = Arc::new(State::default());
        let mut follower = Follower { log, cursor, source, collector, state: Arc::clone(&state) };
        let thread = thread::Builder::new().name(format!("{log}-sink")).spawn(move || follower.run(from));
        Ok(Self { log, state, thread: thread.expect("the system has room for a thread") })
    }

    /// The name of the log.
    pub fn log(&self) -> &'static str {
        self.log
    }

    pub fn counts(&self) -> Counts {
        let State { sent, failed, failing, behind, behind_bytes, .. } = &*self.state;
        Counts {
            events: sent.load(Ordering::Relaxed),
            failed: failed.load(Ordering::Relaxed),
            is_failing: failing.load(Ordering::Relaxed),
            behind: behind.load(Ordering::Relaxed),
            behind_bytes: behind_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Sink {
    /// Does not wait: the remaining entries are sent after the next start.
    fn drop(&mut self) {
        self.state.ending.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
    }
}

struct Follower<S, C> {
    log: &'static str,
    cursor: PathBuf,
    source: S,
    collector: C,
    state: Arc<State>,
}

impl<S: Source, C: Collector> Follower<S, C> {
    fn run(&mut self, mut cursor: Position) {
        let mut failures = 0;
        while !self.state.ending.load(Ordering::Relaxed) {
            let rest = match self.step(cursor) {
                Ok(next) if next == cursor => LOOK_EVERY,
                Ok(next) => {
                    cursor = next;
                    if self.state.failing.swap(false, Ordering::Relaxed) {
                        tracing::info!(to = self.collector.target(), "{} events arrive again", self.log);
                    }
                    failures = 0;
                    Duration::ZERO
                }
                Err(error) => {
                    self.state.failed.fetch_add(1, Ordering::Relaxed);
                    self.state.failing.store(true, Ordering::Relaxed);
                    failures += 1;
                    let rest = retry::rest(failures);
                    let to = self.collector.target();
                    tracing::warn!(to, error, "{} events do not arrive: they wait in the log, and are sent in {rest:?}", self.log);
                    rest
                }
            };
            if !rest.is_zero() {
                thread::park_timeout(rest);
            }
        }
    }

    /// Sends the next entries, if there are any. Returns the position up to which entries have arrived.
    fn step(&mut self, cursor: Position) -> Result<Position, String> {
        let (mut messages, mut next) = (Vec::new(), cursor);
        self.source.read(cursor, &mut |position, message| {
            messages.push(message);
            next = position;
            messages.len() < ENTRIES_MAX && next.bytes.saturating_sub(cursor.bytes) < BYTES_MAX
        })?;
        let end = self.source.end()?;
        self.state.behind.store(end.number.saturating_sub(cursor.number), Ordering::Relaxed);
        self.state.behind_bytes.store(end.bytes.saturating_sub(cursor.bytes), Ordering::Relaxed);
        if !messages.is_empty() {
            self.collector.send(&messages)?;
            self.state.sent.fetch_add(messages.len() as u64, Ordering::Relaxed);
        }
        if next != cursor {
            save(&self.cursor, next).map_err(|error| format!("{}: {error}", self.cursor.display()))?;
            self.source.arrived(next);
        }
        Ok(next)
    }
}

fn save(path: &Path, cursor: Position) -> io::Result<()> {
    let beside = path.with_extension("tmp");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(&serde_json::to_vec(&cursor)?)?;
    file.sync_data()?;
    std::fs::rename(beside, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audit_record_is_keyed_by_its_tenant_and_has_a_number_of_its_own() {
        let message = |event: &str| Line(format!(r#"{{"seq":7,"at":1,"prev":"00","event":{event}}}"#)).message(7, "c0");
        let block = message(r#"{"kind":"block","tenant":"acme","text":"…"}"#);
        assert_eq!((block.id.as_str(), block.tenant.as_str()), ("audit_c0_7", "acme"));
        for other in [r#"{"kind":"retired","through":3}"#, r#"{"kind":"block","tenant":null}"#, "7"] {
            assert_eq!(message(other).tenant, "", "{other}");
        }
        assert!(block.json.starts_with(r#"{"seq":7,"#), "the record itself, so that its digest can be checked");
    }
}
