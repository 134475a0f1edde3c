//! Usage events for an external collector: a thread follows the usage log and posts new events, in order. Its position is on disk, so each
//! event arrives at least once across crashes; the collector recognizes a repeated event by its id.
//!
//! No request waits for it: events are held by the log, and its disk is the only bound. An endpoint that is slow, down, or refuses is tried
//! again with growing delays, and no event is skipped.

use crate::{
    journal::segments,
    retry,
    segment::{self, Entry},
    usage::Event,
    web::{self, Target, TargetError},
};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use ureq::Agent;

/// The maximum number of events in one request.
const EVENTS_MAX: usize = 500;
/// The number of bytes of the log that are read for a request.
const BYTES_MAX: u64 = 1 << 20;
/// The interval at which the log is checked for new events.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const CURSOR: &str = "sink.json";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub target: Target,
    /// The file of the bearer token, read before each request.
    pub token: Option<PathBuf>,
    /// The name of the sender: several coordinators may send to one endpoint.
    pub source: String,
}

/// The position up to which events have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cursor {
    segment: u64,
    offset: u64,
}

#[derive(Debug)]
pub struct Sink {
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
}

/// Counters of the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub events: u64,
    /// The number of failed requests.
    pub failed: u64,
    /// Whether the last request failed.
    pub is_failing: bool,
    /// The number of bytes of the log that have not arrived.
    pub behind_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("{path} does not say how far usage events were sent: {source} (remove it to send all of them again)")]
    Cursor { path: PathBuf, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
enum PostError {
    #[error(transparent)]
    Http(#[from] ureq::Error),
    #[error("the token cannot be read: {0}")]
    Token(io::Error),
}

impl Sink {
    /// Starts the thread. `dir` is the usage log's.
    pub fn start(dir: &Path, settings: Settings) -> Result<Self, StartError> {
        let path = dir.join(CURSOR);
        let cursor = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| StartError::Cursor { path: path.clone(), source: error.into() })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Cursor::default(),
            Err(source) => return Err(StartError::Cursor { path, source }),
        };
        let state = Arc::new(State::default());
        let client = settings.target.client()?;
        let follower = Follower { dir: dir.to_owned(), client, settings, state: Arc::clone(&state) };
        let thread = thread::Builder::new().name("usage-sink".into()).spawn(move || follower.run(cursor));
        Ok(Self { state, thread: thread.expect("the system has room for a thread") })
    }

    pub fn counts(&self) -> Counts {
        let State { sent, failed, failing, behind, .. } = &*self.state;
        Counts {
            events: sent.load(Ordering::Relaxed),
            failed: failed.load(Ordering::Relaxed),
            is_failing: failing.load(Ordering::Relaxed),
            behind_bytes: behind.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Sink {
    /// Does not wait: the remaining events are sent after the next start.
    fn drop(&mut self) {
        self.state.ending.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
    }
}

struct Follower {
    dir: PathBuf,
    client: Agent,
    settings: Settings,
    state: Arc<State>,
}

#[derive(Serialize)]
struct Body<'a> {
    source: &'a str,
    events: &'a [Event],
}

impl Follower {
    fn run(&self, mut cursor: Cursor) {
        let mut failures = 0;
        while !self.state.ending.load(Ordering::Relaxed) {
            let rest = match self.step(cursor) {
                Ok(next) if next == cursor => LOOK_EVERY,
                Ok(next) => {
                    cursor = next;
                    if self.state.failing.swap(false, Ordering::Relaxed) {
                        tracing::info!(url = self.settings.target.url, "usage events arrive again");
                    }
                    failures = 0;
                    Duration::ZERO
                }
                Err(error) => {
                    self.state.failed.fetch_add(1, Ordering::Relaxed);
                    self.state.failing.store(true, Ordering::Relaxed);
                    failures += 1;
                    let rest = retry::rest(failures);
                    tracing::warn!(
                        url = self.settings.target.url,
                        error,
                        "usage events do not arrive: they wait in the log, and are sent in {rest:?}"
                    );
                    rest
                }
            };
            if !rest.is_zero() {
                thread::park_timeout(rest);
            }
        }
    }

    /// Sends the next events, if there are any. Returns the position up to which events have arrived.
    fn step(&self, cursor: Cursor) -> Result<Cursor, String> {
        let of_log = |error: io::Error| format!("the usage log: {error}");
        let (events, next) = read(&self.dir, cursor).map_err(of_log)?;
        self.state.behind.store(behind(&self.dir, cursor).map_err(of_log)?, Ordering::Relaxed);
        if !events.is_empty() {
            self.post(&events).map_err(|error| error.to_string())?;
            self.state.sent.fetch_add(events.len() as u64, Ordering::Relaxed);
        }
        if next != cursor {
            self.save(next).map_err(|error| format!("{CURSOR}: {error}"))?;
        }
        Ok(next)
    }

    fn post(&self, events: &[Event]) -> Result<(), PostError> {
        let body = serde_json::to_vec(&Body { source: &self.settings.source, events }).expect("events are made of texts and numbers");
        let mut request = self.client.post(&self.settings.target.url).header("content-type", "application/json");
        if let Some(path) = &self.settings.token {
            let token = web::read_token(path).map_err(PostError::Token)?;
            request = request.header("authorization", format!("Bearer {token}"));
        }
        request.send(&body[..])?;
        Ok(())
    }

    fn save(&self, cursor: Cursor) -> io::Result<()> {
        let path = self.dir.join(CURSOR);
        let beside = path.with_extension("tmp");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(&serde_json::to_vec(&cursor)?)?;
        file.sync_data()?;
        std::fs::rename(beside, path)
    }
}

/// The events after `cursor`, and the position of the next ones. Without new events, the list is empty and the position the same.
fn read(dir: &Path, cursor: Cursor) -> io::Result<(Vec<Event>, Cursor)> {
    // Before reading: a segment that has a successor now will not grow any more.
    let later = segments::<Event>(dir)?.into_iter().filter(|&number| number > cursor.segment).min();
    let after = later.map_or(cursor, |segment| Cursor { segment, offset: 0 });
    let mut bytes = Vec::new();
    let offset = cursor.offset.max(Event::HEADER.len() as u64);
    match File::open(dir.join(segment::name::<Event>(cursor.segment))) {
        Ok(mut file) => {
            file.seek(SeekFrom::Start(offset))?;
            file.take(BYTES_MAX).read_to_end(&mut bytes)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), after)),
        Err(error) => return Err(error),
    }
    let (mut events, mut taken) = (Vec::new(), 0);
    while events.len() < EVENTS_MAX
        && let Some((event, length)) = segment::record(&bytes[taken..])
    {
        events.push(event);
        taken += length;
    }
    if !events.is_empty() {
        return Ok((events, Cursor { segment: cursor.segment, offset: offset + taken as u64 }));
    }
    // Bytes after the last whole record of a closed segment were never acknowledged.
    Ok((events, after))
}

fn behind(dir: &Path, cursor: Cursor) -> io::Result<u64> {
    let numbers = segments::<Event>(dir)?.into_iter().filter(|&number| number >= cursor.segment);
    let length = |number| std::fs::metadata(dir.join(segment::name::<Event>(number))).map(|metadata| metadata.len());
    let bytes: u64 = numbers.map(length).sum::<io::Result<u64>>()?;
    // A segment's header is not counted as outstanding.
    Ok(bytes.saturating_sub(cursor.offset.max(Event::HEADER.len() as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        journal::{self, Journal},
        web::tests::{Reply, Server, wait_until},
    };
    use std::{
        net::{SocketAddr, TcpListener},
        time::{Instant, SystemTime},
    };

    /// A few events fill a segment, so that the sink has to move on to the next ones.
    const LOG: journal::Settings = journal::Settings { sync_every: Duration::from_millis(20), segment_bytes: 2000, segment_age: None };

    fn meter(dir: &Path) -> Journal<Event> {
        Journal::open(dir, LOG, SystemTime::UNIX_EPOCH, drop).unwrap()
    }

    async fn write(meter: &Journal<Event>, ids: std::ops::Range<usize>) {
        for id in ids {
            meter.write(Event { id: format!("req_{id}"), tenant: "acme".into(), ..Event::default() }).await;
        }
    }

    fn settings(address: SocketAddr) -> Settings {
        Settings { target: Target { url: format!("http://{address}/"), ca: None }, token: None, source: "coordinator-0".into() }
    }

    /// The events' ids in order of arrival.
    fn arrived(server: &Server) -> Vec<String> {
        let asked = server.asked.lock().unwrap();
        let ids = asked.iter().flat_map(|(_, body)| {
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(body["source"], "coordinator-0");
            body["events"].as_array().unwrap().iter().map(|event| event["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        });
        ids.collect()
    }

    fn ids(range: std::ops::Range<usize>) -> Vec<String> {
        range.map(|id| format!("req_{id}")).collect()
    }

    /// The endpoint is down, then slow, then up; and the process ends in between.
    #[tokio::test]
    async fn everything_arrives_whatever_the_endpoint_does_and_nobody_waits() {
        let dir = tempfile::tempdir().unwrap();
        let log = meter(dir.path());
        // A port without a listener.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let sink = Sink::start(dir.path(), settings(address)).unwrap();
        let began = Instant::now();
        write(&log, 0..40).await;
        assert!(began.elapsed() < Duration::from_secs(20), "the log is written whoever collects it");
        wait_until(|| sink.counts().is_failing);
        // Noticed at the next attempt.
        wait_until(|| sink.counts().behind_bytes > 2000);
        assert_eq!(sink.counts().events, 0);
        // The endpoint is up, but at first too slow.
        let server = Server::at(address, Reply { after: Duration::from_secs(30), ..Reply::ok("") }, None);
        wait_until(|| server.connections.load(Ordering::Relaxed) > 0);
        write(&log, 40..50).await;
        server.set(Reply::status(503));
        drop(sink);
        let sink = Sink::start(dir.path(), settings(address)).unwrap();
        wait_until(|| sink.counts().failed > 0);
        server.asked.lock().unwrap().clear();
        server.set(Reply::ok(""));
        write(&log, 50..60).await;
        wait_until(|| sink.counts().behind_bytes == 0 && sink.counts().events >= 60);
        assert!(!sink.counts().is_failing);
        let all = arrived(&server);
        assert_eq!(all[all.len() - 60..], ids(0..60), "all, in order, and after the refusals only once");
    }

    #[tokio::test]
    async fn what_has_arrived_is_not_sent_again_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(Reply::ok(""), None);
        for (begin, end) in [(0, 20), (20, 30), (30, 30), (30, 31)] {
            let log = meter(dir.path());
            let sink = Sink::start(dir.path(), settings(server.address)).unwrap();
            write(&log, begin..end).await;
            wait_until(|| arrived(&server).len() == end);
            // Until the cursor is written.
            wait_until(|| sink.counts().behind_bytes == 0);
        }
        assert_eq!(arrived(&server), ids(0..31));
        std::fs::write(dir.path().join(CURSOR), "{").unwrap();
        assert!(matches!(Sink::start(dir.path(), settings(server.address)), Err(StartError::Cursor { .. })));
    }

    #[tokio::test]
    async fn a_token_is_sent_as_it_is_now() {
        let dir = tempfile::tempdir().unwrap();
        let (log, server, path) = (meter(dir.path()), Server::start(Reply::ok(""), None), dir.path().join("token"));
        let _sink = Sink::start(dir.path(), Settings { token: Some(path.clone()), ..settings(server.address) }).unwrap();
        let heads = || server.asked.lock().unwrap().iter().map(|(head, _)| head.to_lowercase()).collect::<Vec<_>>();
        for token in ["first", "second"] {
            std::fs::write(&path, format!("{token}\n")).unwrap();
            let before = heads().len();
            write(&log, 0..1).await;
            wait_until(|| heads().len() > before);
            assert!(heads().last().unwrap().contains(&format!("authorization: bearer {token}\r\n")), "{:?}", heads());
        }
    }

    #[test]
    fn the_torn_end_of_a_closed_segment_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let segment = |number: u64, ids: std::ops::Range<usize>, torn: usize| {
            let mut bytes = Event::HEADER.to_vec();
            ids.for_each(|id| segment::write(&mut bytes, &Event { id: format!("req_{id}"), ..Event::default() }));
            bytes.truncate(bytes.len() - torn);
            std::fs::write(dir.path().join(segment::name::<Event>(number)), bytes).unwrap();
        };
        segment(1, 0..2, 5);
        let (events, cursor) = read(dir.path(), Cursor { segment: 1, offset: 0 }).unwrap();
        assert_eq!(events.len(), 1);
        assert_eq!(read(dir.path(), cursor).unwrap(), (vec![], cursor), "it may still be written");
        segment(3, 2..3, 0);
        let (events, next) = read(dir.path(), cursor).unwrap();
        assert_eq!((events.len(), next), (0, Cursor { segment: 3, offset: 0 }));
        assert_eq!(read(dir.path(), next).unwrap().0[0].id, "req_2");
        assert_eq!(read(dir.path(), Cursor::default()).unwrap().1.segment, 1, "from the first one that is there");
    }
}
