//! The usage log as files: segments in a directory, appended to by a thread of its own, one process at a time.
//!
//! A process that dies loses nothing that was acknowledged. Segments are synced to the disk at most so often, so that a machine that
//! loses its power loses at most that much; with no time between, every group of events is synced before it is acknowledged.
//!
//! A disk that fails holds no request up: events wait in memory, up to a bound, and are written when it works again.

use crate::usage::{Event, log};
use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
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

/// Events that wait to be written: about 30 MB of them.
const WAITING_MAX: usize = 65_536;
/// Events written at once.
const GROUP_MAX: usize = 1024;
/// An answer is not held back for longer.
const WRITTEN_MAX: Duration = Duration::from_millis(250);
/// Between two attempts at a disk that has failed.
const RETRY_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Between two syncs, at most; zero: every group is synced before it is acknowledged.
    pub sync_every: Duration,
    /// A segment that has as many is closed, and another begun.
    pub segment_bytes: u64,
}

#[derive(Debug)]
pub struct Meter {
    /// `None` at the end only.
    events: Option<SyncSender<Entry>>,
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
struct Entry {
    event: Event,
    written: oneshot::Sender<()>,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot use {path} for the usage log: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{0} is another process's usage log: each coordinator needs a data directory of its own")]
    Taken(PathBuf),
    #[error("{path}: {source}")]
    NotOurs { path: PathBuf, source: log::NotOurs },
}

impl Meter {
    /// Opens the log in `dir`, cuts a torn end off, and hands over what was written to since `since`, roughly in its order.
    pub fn open(dir: &Path, settings: Settings, since: SystemTime, mut earlier: impl FnMut(Event)) -> Result<Self, OpenError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::File { path, source }
        };
        if !dir.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))?;
        }
        let path = dir.join("lock");
        let lock = open(&path).map_err(failed(&path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => OpenError::Taken(dir.to_owned()),
            TryLockError::Error(source) => OpenError::File { path, source },
        })?;
        let mut numbers = segments(dir).map_err(failed(dir))?;
        numbers.sort_unstable();
        let last = numbers.last().copied().unwrap_or(1);
        let mut size = 0;
        for number in numbers {
            let path = dir.join(log::segment_name(number));
            let changed = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).map_err(failed(&path))?;
            if number != last && changed < since {
                continue;
            }
            let mut bytes = Vec::new();
            open(&path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(failed(&path))?;
            let segment = log::read(&bytes).map_err(|source| OpenError::NotOurs { path: path.clone(), source })?;
            if number == last {
                let torn = bytes.len() - segment.whole_bytes;
                if torn > 0 {
                    tracing::warn!(path = %path.display(), torn, "the usage log was torn: its last write was never acknowledged, and is cut off");
                }
                size = segment.whole_bytes as u64;
            }
            segment.events.into_iter().for_each(&mut earlier);
        }
        let path = dir.join(log::segment_name(last));
        let mut writer =
            Writer { dir: dir.to_owned(), file: open(&path).map_err(failed(&path))?, number: last, size, settings, dirty: None };
        writer.cut().map_err(failed(&path))?;

        let state = Arc::new(State::default());
        let (events, waiting) = mpsc::sync_channel(WAITING_MAX);
        let (shared, path) = (Arc::clone(&state), dir.to_owned());
        let thread = std::thread::Builder::new().name("usage".into()).spawn(move || {
            writer.run(&waiting, &shared);
            drop(lock);
        });
        Ok(Self { events: Some(events), state, thread: Some(thread.map_err(failed(&path))?) })
    }

    /// Hands an event over: from here on it is written, whatever becomes of the caller. What is returned waits until it is, for a moment
    /// at most; not at all while the disk fails.
    pub fn write(&self, event: Event) -> impl Future<Output = ()> + Send + use<> {
        let (written, done) = oneshot::channel();
        let sent = self.events.as_ref().expect("taken at the end only").try_send(Entry { event, written });
        if sent.is_err() && self.state.lost.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!("the usage log cannot be written, and too many events wait: usage is lost from now on");
        }
        let waits = sent.is_ok() && !self.state.failing.load(Ordering::Relaxed);
        async move {
            if waits {
                let _ = tokio::time::timeout(WRITTEN_MAX, done).await;
            }
        }
    }

    /// Events that there was no room for.
    pub fn lost(&self) -> u64 {
        self.state.lost.load(Ordering::Relaxed)
    }

    /// The disk does not take what is written.
    pub fn is_failing(&self) -> bool {
        self.state.failing.load(Ordering::Relaxed)
    }
}

impl Drop for Meter {
    /// Writes what waits, unless the disk fails.
    fn drop(&mut self) {
        self.state.ending.store(true, Ordering::Relaxed);
        self.events = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Writer {
    dir: PathBuf,
    file: File,
    number: u64,
    /// Bytes of whole records: the next one begins here.
    size: u64,
    settings: Settings,
    /// Since when something is written and not synced.
    dirty: Option<Instant>,
}

impl Writer {
    fn run(&mut self, waiting: &Receiver<Entry>, state: &State) {
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
                    group.iter().for_each(|entry| log::write(&mut bytes, &entry.event));
                    if !self.persist(&bytes, state) {
                        return;
                    }
                    for entry in group {
                        // Whoever waited may have gone.
                        let _ = entry.written.send(());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    if let Err(error) = self.file.sync_data() {
                        tracing::warn!(%error, "the usage log cannot be synced");
                    }
                    return;
                }
            }
            if self.dirty.is_some_and(|since| since.elapsed() >= self.settings.sync_every) {
                if let Err(error) = self.file.sync_data() {
                    tracing::warn!(%error, "the usage log cannot be synced");
                }
                self.dirty = None;
            }
        }
    }

    /// Writes, for as long as it takes. `false`: the process ends before it could.
    fn persist(&mut self, bytes: &[u8], state: &State) -> bool {
        while let Err(error) = self.append(bytes) {
            if !state.failing.swap(true, Ordering::Relaxed) {
                tracing::error!(%error, dir = %self.dir.display(), "the usage log cannot be written: events wait in memory");
            }
            if state.ending.load(Ordering::Relaxed) {
                tracing::error!("the usage log could not be written to the end: the last events are lost");
                return false;
            }
            std::thread::sleep(RETRY_EVERY);
        }
        if state.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the usage log is written again");
        }
        true
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.size > log::HEADER.len() as u64 && self.size + bytes.len() as u64 > self.settings.segment_bytes {
            self.rotate()?;
        }
        let written =
            self.file.write_all(bytes).and_then(|()| if self.settings.sync_every.is_zero() { self.file.sync_data() } else { Ok(()) });
        if let Err(error) = written {
            // What was written of it is not known: the next attempt begins where this one did.
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
        let file = open(&self.dir.join(log::segment_name(self.number + 1)))?;
        (self.file, self.number, self.size) = (file, self.number + 1, 0);
        self.cut()
    }

    /// Ends the file after its last whole record.
    fn cut(&mut self) -> io::Result<()> {
        self.file.set_len(self.size)?;
        self.file.seek(SeekFrom::Start(self.size))?;
        if self.size == 0 {
            self.file.write_all(log::HEADER)?;
            self.size = log::HEADER.len() as u64;
            // The segment itself outlives a loss of power, too.
            self.file.sync_all()?;
            File::open(&self.dir)?.sync_all()?;
        }
        Ok(())
    }
}

/// Made if it is not there, readable by this user only.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// The numbers of a directory's segments.
pub(crate) fn segments(dir: &Path) -> io::Result<Vec<u64>> {
    let names = std::fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_str().and_then(log::segment_number)));
    names.filter_map(Result::transpose).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{future::Future, pin::pin, task::Poll};

    const SETTINGS: Settings = Settings { sync_every: Duration::from_millis(20), segment_bytes: 2000 };

    fn event(id: usize) -> Event {
        Event { id: format!("req_{id}"), prompt_tokens: 1, ..Event::default() }
    }

    fn open_at(dir: &Path, settings: Settings) -> (Meter, Vec<String>) {
        let mut ids = Vec::new();
        let meter = Meter::open(dir, settings, SystemTime::UNIX_EPOCH, |event| ids.push(event.id)).unwrap();
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
            // As a killed process leaves it: nobody has said goodbye.
            let copy = tempfile::tempdir().unwrap();
            for number in segments(dir.path()).unwrap() {
                let name = log::segment_name(number);
                std::fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
            }
            assert!(segments(copy.path()).unwrap().len() > 3, "segments are bounded");
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
        let path = dir.path().join(log::segment_name(1));
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

    #[test]
    fn a_log_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let (_meter, _) = open_at(dir.path(), SETTINGS);
        let second = Meter::open(dir.path(), SETTINGS, SystemTime::UNIX_EPOCH, drop);
        assert!(matches!(second, Err(OpenError::Taken(_))));
    }

    #[tokio::test]
    async fn a_failing_disk_holds_nobody_up_and_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (meter, _) = open_at(dir.path(), SETTINGS);
        meter.write(event(0)).await;
        // Rotation needs a new file, and finds a directory in its place.
        std::fs::create_dir(dir.path().join(log::segment_name(2))).unwrap();
        let mut id = 1;
        while !meter.is_failing() {
            meter.write(event(id)).await;
            id += 1;
            assert!(id < 100, "the second segment is never begun");
        }
        let mut immediately = pin!(meter.write(event(id)));
        let ready = std::future::poll_fn(|context| Poll::Ready(immediately.as_mut().poll(context).is_ready())).await;
        assert!(ready, "no request waits for a disk that has failed");
        std::fs::remove_dir(dir.path().join(log::segment_name(2))).unwrap();
        while meter.is_failing() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        meter.write(event(id + 1)).await;
        assert_eq!(meter.lost(), 0);
        drop(meter);
        assert_eq!(open_at(dir.path(), SETTINGS).1, ids(0..id + 2));
    }
}
