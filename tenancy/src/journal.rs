//! A log in files: segments in a directory, appended to by a thread of its own, one process at a time.
//!
//! A process that dies loses no acknowledged entry. Segments are synced to disk at most once per interval, so that a power failure loses at
//! most that much; with an interval of zero, every group of entries is synced before it is acknowledged.
//!
//! A failing disk holds up no request: entries wait in memory, up to a bound, and are written when it works again.

use crate::segment::{self, Entry};
use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    marker::PhantomData,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};
use tokio::sync::oneshot;

/// The maximum number of entries that wait to be written: about 30 MB of usage events.
const WAITING_MAX: usize = 65_536;
/// The maximum number of entries written at once.
const GROUP_MAX: usize = 1024;
/// The longest time that an answer is held back.
const WRITTEN_MAX: Duration = Duration::from_millis(250);
/// The pause between two attempts on a disk that has failed.
const RETRY_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The longest time between two syncs; with zero, every group is synced before it is acknowledged.
    pub sync_every: Duration,
    /// The size from which a segment is closed, and a new one started.
    pub segment_bytes: u64,
    /// The age from which a segment is closed, as is one of a different process; `None` if age does not matter.
    pub segment_age: Option<Duration>,
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

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot use {path} for the {log}: {source}")]
    File { log: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is another process's {log}: each coordinator needs a data directory of its own")]
    Taken { log: &'static str, path: PathBuf },
    #[error("{path}: {source}")]
    NotOurs { path: PathBuf, source: segment::NotOurs },
}

impl<E: Entry> Journal<E> {
    /// Opens the log in `dir`, cuts off a torn end, and hands over the entries written since `since`, roughly in order.
    pub fn open(dir: &Path, settings: Settings, since: SystemTime, mut earlier: impl FnMut(E)) -> Result<Self, OpenError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::File { log: E::LOG, path, source }
        };
        if !dir.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))?;
        }
        let path = dir.join("lock");
        let lock = open(&path).map_err(failed(&path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => OpenError::Taken { log: E::LOG, path: dir.to_owned() },
            TryLockError::Error(source) => OpenError::File { log: E::LOG, path, source },
        })?;
        let numbers = segments::<E>(dir).map_err(failed(dir))?;
        let last = numbers.last().copied().unwrap_or(1);
        let mut size = 0;
        for number in numbers {
            let path = dir.join(segment::name::<E>(number));
            let changed = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).map_err(failed(&path))?;
            if number != last && changed < since {
                continue;
            }
            let mut bytes = Vec::new();
            open(&path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(failed(&path))?;
            let segment = segment::read(&bytes).map_err(|source| OpenError::NotOurs { path: path.clone(), source })?;
            if number == last {
                let torn = bytes.len() - segment.whole_bytes;
                if torn > 0 {
                    let (log, path) = (E::LOG, path.display());
                    tracing::warn!(%path, torn, "the {log} was torn: its last write was never acknowledged, and is cut off");
                }
                size = segment.whole_bytes as u64;
            }
            segment.entries.into_iter().for_each(&mut earlier);
        }
        let path = dir.join(segment::name::<E>(last));
        let file = open(&path).map_err(failed(&path))?;
        let mut writer = Writer::<E> {
            dir: dir.to_owned(),
            file,
            number: last,
            size,
            settings,
            // Its contents were written by an earlier process.
            begun: (size <= E::HEADER.len() as u64).then(Instant::now),
            dirty: None,
            entries: PhantomData,
        };
        writer.cut().map_err(failed(&path))?;

        let state = Arc::new(State::default());
        let (entries, waiting) = mpsc::sync_channel(WAITING_MAX);
        let (shared, path) = (Arc::clone(&state), dir.to_owned());
        let name = E::SUFFIX.trim_start_matches('.').to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            writer.run(&waiting, &shared);
            drop(lock);
        });
        Ok(Self { entries: Some(entries), state, thread: Some(thread.map_err(failed(&path))?) })
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
                    tracing::error!("could not write the {}, and its queue is full: further entries are lost", E::LOG);
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
    file: File,
    number: u64,
    /// The size of all whole records, where the next one starts.
    size: u64,
    settings: Settings,
    /// The time at which this process started the segment; `None` if an earlier one did.
    begun: Option<Instant>,
    /// The time of the first write since the last sync.
    dirty: Option<Instant>,
    entries: PhantomData<E>,
}

impl<E: Entry> Writer<E> {
    fn run(&mut self, waiting: &Receiver<Waiting<E>>, state: &State) {
        let mut bytes = Vec::new();
        loop {
            let first = match self.dirty {
                None => waiting.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(since) => waiting.recv_timeout(self.settings.sync_every.saturating_sub(since.elapsed())),
            };
            match first {
                Ok(first) => {
                    let group: Vec<_> = std::iter::once(first).chain(waiting.try_iter()).take(GROUP_MAX).collect();
                    bytes.clear();
                    group.iter().for_each(|waiting| segment::write(&mut bytes, &waiting.entry));
                    if !self.persist(&bytes, state) {
                        return;
                    }
                    for waiting in group {
                        // The caller may have gone.
                        let _ = waiting.written.send(());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    if let Err(error) = self.file.sync_data() {
                        tracing::warn!(%error, "the {} cannot be synced", E::LOG);
                    }
                    return;
                }
            }
            if self.dirty.is_some_and(|since| since.elapsed() >= self.settings.sync_every) {
                if let Err(error) = self.file.sync_data() {
                    tracing::warn!(%error, "the {} cannot be synced", E::LOG);
                }
                self.dirty = None;
            }
        }
    }

    /// Writes, and retries until it succeeds. Returns `false` if the process ends first.
    fn persist(&mut self, bytes: &[u8], state: &State) -> bool {
        while let Err(error) = self.append(bytes) {
            if !state.failing.swap(true, Ordering::Relaxed) {
                tracing::error!(%error, dir = %self.dir.display(), "the {} cannot be written: entries wait in memory", E::LOG);
            }
            if state.ending.load(Ordering::Relaxed) {
                tracing::error!("the {} could not be written to the end: the last entries are lost", E::LOG);
                return false;
            }
            std::thread::sleep(RETRY_EVERY);
        }
        if state.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the {} is written again", E::LOG);
        }
        true
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let is_full = self.size + bytes.len() as u64 > self.settings.segment_bytes;
        let is_old = self.settings.segment_age.is_some_and(|age| self.begun.is_none_or(|begun| begun.elapsed() >= age));
        if self.size > E::HEADER.len() as u64 && (is_full || is_old) {
            self.rotate()?;
        }
        let written =
            self.file.write_all(bytes).and_then(|()| if self.settings.sync_every.is_zero() { self.file.sync_data() } else { Ok(()) });
        if let Err(error) = written {
            // It is unknown how much was written: the next attempt starts from the same place.
            self.cut()?;
            return Err(error);
        }
        self.size += bytes.len() as u64;
        if !self.settings.sync_every.is_zero() {
            self.dirty.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        self.dirty = None;
        let file = open(&self.dir.join(segment::name::<E>(self.number + 1)))?;
        (self.file, self.number, self.size, self.begun) = (file, self.number + 1, 0, Some(Instant::now()));
        self.cut()
    }

    /// Truncates the file after its last whole record.
    fn cut(&mut self) -> io::Result<()> {
        self.file.set_len(self.size)?;
        self.file.seek(SeekFrom::Start(self.size))?;
        if self.size == 0 {
            self.file.write_all(E::HEADER)?;
            self.size = E::HEADER.len() as u64;
            // The new file itself must also survive a power failure.
            self.file.sync_all()?;
            File::open(&self.dir)?.sync_all()?;
        }
        Ok(())
    }
}

/// Opens or creates a file, readable by this user only.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// The numbers of a directory's segments, in ascending order.
pub fn segments<E: Entry>(dir: &Path) -> io::Result<Vec<u64>> {
    let names = std::fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_str().and_then(segment::number::<E>)));
    let mut numbers = names.filter_map(Result::transpose).collect::<io::Result<Vec<_>>>()?;
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::Event;
    use std::{future::Future, pin::pin, task::Poll};

    const SETTINGS: Settings = Settings { sync_every: Duration::from_millis(20), segment_bytes: 2000, segment_age: None };

    fn event(id: usize) -> Event {
        Event { id: format!("req_{id}"), prompt_tokens: 1, ..Event::default() }
    }

    fn open_at(dir: &Path, settings: Settings) -> (Journal<Event>, Vec<String>) {
        let mut ids = Vec::new();
        let meter = Journal::<Event>::open(dir, settings, SystemTime::UNIX_EPOCH, |event: Event| ids.push(event.id)).unwrap();
        (meter, ids)
    }

    fn ids(range: std::ops::Range<usize>) -> Vec<String> {
        range.map(|id| event(id).id).collect()
    }

    #[tokio::test]
    async fn what_was_acknowledged_is_there_and_once() {
        for sync_every in [Duration::ZERO, SETTINGS.sync_every] {
            let dir = tempfile::tempdir().unwrap();
            let settings = Settings { sync_every, ..SETTINGS };
            let (meter, earlier) = open_at(dir.path(), settings);
            assert!(earlier.is_empty());
            for id in 0..50 {
                meter.write(event(id)).await;
            }
            // The state that a killed process leaves: without an orderly end.
            let copy = tempfile::tempdir().unwrap();
            for number in segments::<Event>(dir.path()).unwrap() {
                let name = segment::name::<Event>(number);
                std::fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
            }
            assert!(segments::<Event>(copy.path()).unwrap().len() > 3, "segments are bounded");
            let (again, earlier) = open_at(copy.path(), settings);
            assert_eq!(earlier, ids(0..50));
            again.write(event(50)).await;
            drop(again);
            assert_eq!(open_at(copy.path(), settings).1, ids(0..51));
        }
    }

    #[tokio::test]
    async fn a_torn_end_is_cut_and_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let whole = Settings { segment_bytes: 1 << 20, ..SETTINGS };
        let (meter, _) = open_at(dir.path(), whole);
        for id in 0..3 {
            meter.write(event(id)).await;
        }
        drop(meter);
        let path = dir.path().join(segment::name::<Event>(1));
        let bytes = std::fs::read(&path).unwrap();
        for torn in [1, 13, 40] {
            std::fs::write(&path, &bytes[..bytes.len() - torn]).unwrap();
            let (meter, earlier) = open_at(dir.path(), whole);
            assert_eq!(earlier, ids(0..2));
            meter.write(event(2)).await;
            drop(meter);
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }

    #[tokio::test]
    async fn a_segment_ends_by_age_and_with_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let count = || segments::<Event>(dir.path()).unwrap().len();
        let day = Settings { segment_age: Some(Duration::from_secs(86_400)), segment_bytes: 1 << 20, ..SETTINGS };
        for process in 1..4 {
            let (meter, _) = open_at(dir.path(), day);
            meter.write(event(0)).await;
            meter.write(event(1)).await;
            assert_eq!(count(), process);
        }
        let (meter, _) = open_at(dir.path(), Settings { segment_age: Some(Duration::ZERO), ..day });
        meter.write(event(2)).await;
        meter.write(event(3)).await;
        assert_eq!(count(), 5);
    }

    #[test]
    fn a_log_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let (_meter, _) = open_at(dir.path(), SETTINGS);
        let second = Journal::<Event>::open(dir.path(), SETTINGS, SystemTime::UNIX_EPOCH, drop);
        assert!(matches!(second, Err(OpenError::Taken { .. })));
    }

    #[tokio::test]
    async fn a_failing_disk_holds_nobody_up_and_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (meter, _) = open_at(dir.path(), SETTINGS);
        meter.write(event(0)).await;
        // Rotation needs a new file, and finds a directory in its place.
        std::fs::create_dir(dir.path().join(segment::name::<Event>(2))).unwrap();
        let mut id = 1;
        while !meter.is_failing() {
            meter.write(event(id)).await;
            id += 1;
            assert!(id < 100, "the second segment is never begun");
        }
        let mut immediately = pin!(meter.write(event(id)));
        let ready = std::future::poll_fn(|context| Poll::Ready(immediately.as_mut().poll(context).is_ready())).await;
        assert!(ready, "no request waits for a disk that has failed");
        std::fs::remove_dir(dir.path().join(segment::name::<Event>(2))).unwrap();
        while meter.is_failing() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        meter.write(event(id + 1)).await;
        assert_eq!(meter.lost(), 0);
        drop(meter);
        assert_eq!(open_at(dir.path(), SETTINGS).1, ids(0..id + 2));
    }
}
