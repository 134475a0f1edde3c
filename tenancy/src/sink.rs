//! Usage events for an external collector: a thread follows the usage log and posts new events, in order. Its position is on disk, so each
//! event arrives at least once across crashes; the collector recognizes a repeated event by its id.
//!
//! No request waits for it: events are held by the log, and its disk is the only bound. An endpoint that is slow, down, or refuses is tried
//! again with growing delays, and no event is skipped.

use crate::{
    journal::{self, JournalError, Position},
    retry,
    usage::Event,
    web::{self, Target, TargetError},
};
use serde::Serialize;
use std::{
    fs::File,
    io::{self, Write},
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
/// The size of events that ends a request.
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
            Err(error) if error.kind() == io::ErrorKind::NotFound => Position::default(),
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
    fn run(&self, mut cursor: Position) {
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
    fn step(&self, cursor: Position) -> Result<Position, String> {
        let of_log = |error: JournalError| error.to_string();
        let (mut events, mut next) = (Vec::new(), cursor);
        let take = |position: Position, event| {
            events.push(event);
            next = position;
            events.len() < EVENTS_MAX && next.bytes.saturating_sub(cursor.bytes) < BYTES_MAX
        };
        journal::read::<Event>(&self.dir, cursor.number, take).map_err(of_log)?;
        let end = journal::end::<Event>(&self.dir).map_err(of_log)?;
        self.state.behind.store(end.bytes.saturating_sub(cursor.bytes), Ordering::Relaxed);
        if !events.is_empty() {
            self.post(&events).map_err(|error| error.to_string())?;
            self.state.sent.fetch_add(events.len() as u64, Ordering::Relaxed);
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

    fn save(&self, cursor: Position) -> io::Result<()> {
        let path = self.dir.join(CURSOR);
        let beside = path.with_extension("tmp");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(&serde_json::to_vec(&cursor)?)?;
        file.sync_data()?;
        std::fs::rename(beside, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        journal::Journal,
        web::tests::{Reply, Server, wait_until},
    };
    use std::{
        net::{SocketAddr, TcpListener},
        time::{Instant, SystemTime},
    };

    /// A few events fill a file, so that the sink has to move on to the next ones.
    const LOG: journal::Settings = journal::Settings { sync_every: Duration::from_millis(20), segment_bytes: 2000 };

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
}
