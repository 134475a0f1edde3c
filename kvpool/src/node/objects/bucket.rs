//! Requests to the server: each within a deadline and the [bounds](crate::core::objects::budget), and counted.

use crate::{
    client::counters::Lane,
    core::objects::{
        budget::{Breaker, Budget, ReadSpeed, Refused, Request},
        catalog::PACKS_MAX,
        pack::Kind,
    },
    settings::{self, ObjectPlace},
};
use futures_util::{StreamExt, TryStreamExt};
use object_store::{
    ClientOptions, GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore, ObjectStoreExt, RetryConfig, aws::AmazonS3Builder,
    local::LocalFileSystem, path::Path,
};
use parking_lot::Mutex;
use std::{
    fmt, io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};
use tidemill_proto::message;
use tokio::time::timeout;

/// A folder of packs on a server.
pub(in crate::node) struct Bucket {
    store: Arc<dyn ObjectStore>,
    folder: Path,
    state: Mutex<State>,
    counters: Counters,
}

struct State {
    budget: Budget,
    reads: Breaker,
    /// The breaker of writes, apart from that of reads: a bucket that is full or read-only can still be read.
    writes: Breaker,
    speed: ReadSpeed,
}

/// The bucket's counters since the process started.
#[derive(Debug, Default)]
struct Counters {
    stored: Lane,
    loaded: Lane,
    reads: AtomicU64,
    writes: AtomicU64,
    deletes: AtomicU64,
    errors: AtomicU64,
    late: AtomicU64,
    corrupt: AtomicU64,
    refused: AtomicU64,
}

/// A pack that a listing names.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) written_s: u64,
}

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the object is not there")]
    Gone,
    #[error("no answer within {0:?}")]
    Late(Duration),
    #[error("the answer has other bytes than were asked for")]
    Other,
    #[error(transparent)]
    Server(object_store::Error),
}

/// The suffix of a pack's name.
const SUFFIX: &str = ".pack";
const NAME_MAX: usize = 128;
/// The number of objects that one listing request returns.
const LISTED_PER_REQUEST: usize = 1000;
/// The longest time for listing, for writing a pack and for deleting one.
const PATIENCE: Duration = Duration::from_secs(60);
const CONNECT_MAX: Duration = Duration::from_secs(2);

impl Bucket {
    /// Opens the bucket. Packs of other kinds of blocks are in other folders, so that models can share a bucket.
    pub(in crate::node) fn open(settings: &settings::Objects, kind: Kind) -> io::Result<Self> {
        let (store, prefix): (Arc<dyn ObjectStore>, Path) = match &settings.place {
            ObjectPlace::Directory(dir) => {
                (Arc::new(LocalFileSystem::new()), Path::from_absolute_path(dir).map_err(|error| io::Error::other(error.to_string()))?)
            }
            ObjectPlace::S3 { bucket, prefix, endpoint } => {
                let options = ClientOptions::new().with_connect_timeout(CONNECT_MAX).with_timeout(PATIENCE);
                // One try: a second one would take longer than its readers should wait.
                let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
                let mut builder =
                    AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry).with_client_options(options.clone());
                if let Some(endpoint) = endpoint {
                    let options = options.with_allow_http(endpoint.starts_with("http://"));
                    builder = builder.with_endpoint(endpoint).with_client_options(options);
                }
                (Arc::new(builder.build().map_err(io::Error::other)?), Path::from(prefix.as_str()))
            }
        };
        Ok(Self::new(store, prefix, settings, kind))
    }

    pub(super) fn new(store: Arc<dyn ObjectStore>, prefix: Path, settings: &settings::Objects, kind: Kind) -> Self {
        let folder = prefix.join(format!("{}-{}", kind.layout, kind.block_bytes));
        let state = State {
            budget: Budget::new(settings.limits, wall_clock()),
            reads: Breaker::default(),
            writes: Breaker::default(),
            speed: ReadSpeed::default(),
        };
        Self { store, folder, state: Mutex::new(state), counters: Counters::default() }
    }

    /// Reads a part of a pack that a reader waits for.
    pub(super) async fn read(&self, name: &str, range: Range<u64>, patience: Duration) -> Result<Vec<u8>, Failure> {
        let started = Instant::now();
        let bytes = self.get(Request::Read, name, range, patience).await?;
        self.counters.loaded.moved(bytes.len(), started.elapsed());
        Ok(bytes)
    }

    /// Reads a pack's index.
    pub(super) async fn read_index(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, Failure> {
        self.get(Request::ReadIndex, name, range, PATIENCE).await
    }

    async fn get(&self, request: Request, name: &str, range: Range<u64>, patience: Duration) -> Result<Vec<u8>, Failure> {
        self.asked(request, |state| &mut state.reads)?;
        self.counters.reads.fetch_add(1, Relaxed);
        let (started, path, length) = (Instant::now(), self.path(name), range.end - range.start);
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let answered = async {
            let answer = self.store.get_opts(&path, options).await?;
            let first = started.elapsed();
            Ok((body(answer, length).await?, first))
        };
        let (bytes, first) = self.ended(answered, patience, |state| &mut state.reads).await?;
        let bytes = bytes.ok_or_else(|| {
            self.counters.errors.fetch_add(1, Relaxed);
            Failure::Other
        })?;
        self.state.lock().speed.observe(length, first, started.elapsed());
        Ok(bytes)
    }

    pub(super) async fn write(&self, name: &str, bytes: Vec<u8>) -> Result<(), Failure> {
        self.asked(Request::WriteOrList, |state| &mut state.writes)?;
        self.counters.writes.fetch_add(1, Relaxed);
        let (started, path, length) = (Instant::now(), self.path(name), bytes.len());
        self.ended(async { self.store.put(&path, bytes.into()).await }, PATIENCE, |state| &mut state.writes).await?;
        self.counters.stored.moved(length, started.elapsed());
        Ok(())
    }

    pub(super) async fn delete(&self, name: &str) -> Result<(), Failure> {
        self.asked(Request::Delete, |state| &mut state.writes)?;
        self.counters.deletes.fetch_add(1, Relaxed);
        let path = self.path(name);
        self.ended(async { self.store.delete(&path).await }, PATIENCE, |state| &mut state.writes).await
    }

    /// The packs in the bucket, at most [`PACKS_MAX`].
    pub(super) async fn list(&self) -> Result<Vec<Listed>, Failure> {
        self.asked(Request::WriteOrList, |state| &mut state.reads)?;
        self.counters.writes.fetch_add(1, Relaxed);
        let listing = async {
            let mut packs = Vec::new();
            let mut objects = self.store.list(Some(&self.folder)).take(PACKS_MAX).enumerate();
            while let Some((n, object)) = objects.next().await {
                let object = object?;
                if n > 0 && n % LISTED_PER_REQUEST == 0 {
                    self.counters.writes.fetch_add(1, Relaxed);
                    if self.asked(Request::WriteOrList, |state| &mut state.reads).is_err() {
                        return Ok(None);
                    }
                }
                packs.extend(object.location.filename().filter(|name| is_name(name)).map(|name| Listed {
                    name: name.to_owned(),
                    bytes: object.size,
                    written_s: object.last_modified.timestamp().try_into().unwrap_or(0),
                }));
            }
            Ok(Some(packs))
        };
        let listed = self.ended(listing, PATIENCE, |state| &mut state.reads).await?;
        listed.ok_or(Failure::Refused(Refused::Rate))
    }

    /// Takes a request out of the budget, unless the breaker is open.
    fn asked(&self, request: Request, breaker: impl Fn(&mut State) -> &mut Breaker) -> Result<(), Refused> {
        let (state, now) = (&mut *self.state.lock(), wall_clock());
        let answer = if breaker(state).is_open(now) { Err(Refused::Broken) } else { state.budget.take(request, now) };
        if answer.is_err() {
            self.counters.refused.fetch_add(1, Relaxed);
        }
        answer
    }

    /// Waits for an answer, and reports to the breaker whether the server works.
    async fn ended<T>(
        &self,
        answer: impl Future<Output = object_store::Result<T>>,
        patience: Duration,
        breaker: impl Fn(&mut State) -> &mut Breaker,
    ) -> Result<T, Failure> {
        let failure = match timeout(patience, answer).await {
            Ok(Ok(answer)) => {
                breaker(&mut self.state.lock()).succeeded();
                return Ok(answer);
            }
            // The server works, though the object is not there.
            Ok(Err(object_store::Error::NotFound { .. })) => {
                breaker(&mut self.state.lock()).succeeded();
                return Err(Failure::Gone);
            }
            Ok(Err(error)) => {
                self.counters.errors.fetch_add(1, Relaxed);
                Failure::Server(error)
            }
            Err(_) => {
                self.counters.late.fetch_add(1, Relaxed);
                Failure::Late(patience)
            }
        };
        if breaker(&mut self.state.lock()).failed(wall_clock()) {
            tracing::warn!(%failure, "object storage fails: it is left alone for a while");
        }
        Err(failure)
    }

    pub(super) fn found_corrupt(&self, blocks: usize) {
        self.counters.corrupt.fetch_add(blocks as u64, Relaxed);
    }

    pub(super) fn counters(&self) -> message::Objects {
        let Counters { stored, loaded, reads, writes, deletes, errors, late, corrupt, refused } = &self.counters;
        let [reads, writes, deletes, errors, late, corrupt, refused] =
            [reads, writes, deletes, errors, late, corrupt, refused].map(|counter| counter.load(Relaxed));
        let State { budget, reads: breaker, speed, .. } = &*self.state.lock();
        message::Objects {
            stored: stored.snapshot(),
            loaded: loaded.snapshot(),
            reads,
            writes,
            deletes,
            errors,
            late,
            corrupt,
            refused,
            left_alone: breaker.is_open(wall_clock()).into(),
            spent_usd: budget.spent_usd(),
            latency_ms: speed.latency_ms,
            bytes_per_ms: speed.bytes_per_ms,
        }
    }

    fn path(&self, name: &str) -> Path {
        self.folder.clone().join(name)
    }
}

/// A new, unique name.
pub(super) fn new_name() -> String {
    format!("{:012}-{:016x}{SUFFIX}", wall_clock().as_secs(), rand::random::<u64>())
}

/// Whether this is a valid name of a pack. The server's listing is not trusted.
fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    name.len() <= NAME_MAX && name.strip_suffix(SUFFIX).is_some_and(|stem| !stem.is_empty() && stem.chars().all(plain))
}

/// The body of an answer, or `None` if its length differs. Reads no more than `length` bytes.
async fn body(answer: GetResult, length: u64) -> object_store::Result<Option<Vec<u8>>> {
    if answer.range.end.saturating_sub(answer.range.start) != length {
        return Ok(None);
    }
    if let GetResultPayload::File(..) = answer.payload {
        let bytes = answer.bytes().await?;
        return Ok((bytes.len() as u64 == length).then(|| bytes.into()));
    }
    let (mut bytes, mut parts) = (Vec::with_capacity(length as usize), answer.into_stream());
    while let Some(part) = parts.try_next().await? {
        if (bytes.len() + part.len()) as u64 > length {
            return Ok(None);
        }
        bytes.extend_from_slice(&part);
    }
    Ok((bytes.len() as u64 == length).then_some(bytes))
}

/// The time since the start of 1970.
pub(super) fn wall_clock() -> Duration {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("store", &self.store).field("folder", &self.folder).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_packs_are_names() {
        assert!(is_name(&new_name()) && is_name("a-B0.pack"));
        for other in ["", ".pack", "a", "a.pack#1", "../a.pack", "a/b.pack", "é.pack", &format!("{}.pack", "a".repeat(NAME_MAX))] {
            assert!(!is_name(other), "{other}");
        }
    }
}
