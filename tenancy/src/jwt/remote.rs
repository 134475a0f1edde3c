//! A provider's keys from its URL. A thread fetches them periodically, and when a token names an unknown key, but then at most every few
//! seconds. The last fetched keys stay valid while the provider is unreachable.

use super::{JwksError, Keys, Known, parse};
use crate::{
    retry,
    web::{Target, TargetError},
};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;
use ureq::Agent;

/// The least time between fetches caused by unknown keys.
const ASKED_EVERY: Duration = Duration::from_secs(10);
/// The longest time that a request waits for a fetch, which is longer than a fetch takes.
const WAIT_MAX: Duration = Duration::from_secs(12);
/// The maximum size of a key set, larger than any real one.
const BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub target: Target,
    /// The age from which keys are fetched again.
    pub max_age: Duration,
}

#[derive(Debug)]
pub(super) struct Remote {
    /// Wakes the thread. Dropping it ends the thread.
    asks: SyncSender<()>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// The number of fetches that have ended.
    ended: watch::Sender<u64>,
    failed: AtomicU64,
    began: Instant,
}

#[derive(Debug)]
struct State {
    schedule: Schedule,
    /// Whether a fetch runs or is about to.
    pending: bool,
}

/// The times of fetches.
#[derive(Debug)]
struct Schedule {
    max_age: Duration,
    tried: Option<Duration>,
    /// The current number of consecutive failures.
    failures: u32,
}

impl Schedule {
    /// The time of the next periodic fetch.
    fn next(&self) -> Duration {
        let rest = if self.failures > 0 { retry::rest(self.failures) } else { self.max_age };
        self.tried.map_or(Duration::ZERO, |tried| tried + rest)
    }

    /// Whether an unknown key may cause a fetch now.
    fn allows(&self, now: Duration) -> bool {
        self.tried.is_none_or(|tried| now >= tried + ASKED_EVERY)
    }

    fn ended(&mut self, now: Duration, good: bool) {
        self.tried = Some(now);
        self.failures = if good { 0 } else { self.failures.saturating_add(1) };
    }
}

impl Remote {
    pub(super) fn start(settings: Settings, known: Arc<Known>) -> Result<Self, TargetError> {
        let client = settings.target.client()?;
        let schedule = Schedule { max_age: settings.max_age, tried: None, failures: 0 };
        let shared = Arc::new(Shared {
            // The first request waits for the first fetch.
            state: Mutex::new(State { schedule, pending: true }),
            ended: watch::Sender::new(0),
            failed: AtomicU64::new(0),
            began: Instant::now(),
        });
        let (asks, asked) = mpsc::sync_channel(1);
        let fetcher = Fetcher { client, url: settings.target.url, known, shared: Arc::clone(&shared) };
        std::thread::Builder::new().name("jwks".into()).spawn(move || fetcher.run(&asked)).expect("the system has room for a thread");
        Ok(Self { asks, shared })
    }

    /// Requests a fetch because of an unknown key, and returns a future that waits for it. Returns `None` if there was one a moment ago.
    pub(super) fn ask(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let mut ended = {
            let mut state = self.shared.state.lock();
            if !state.pending {
                if !state.schedule.allows(self.shared.began.elapsed()) {
                    return None;
                }
                state.pending = true;
                // If the channel is full, the thread wakes up anyway.
                let _ = self.asks.try_send(());
            }
            self.shared.ended.subscribe()
        };
        Some(async move {
            let _ = tokio::time::timeout(WAIT_MAX, ended.changed()).await;
        })
    }

    /// The number of fetches that have ended, and of those that failed.
    pub(super) fn fetches(&self) -> (u64, u64) {
        (*self.shared.ended.borrow(), self.shared.failed.load(Ordering::Relaxed))
    }
}

struct Fetcher {
    client: Agent,
    url: String,
    known: Arc<Known>,
    shared: Arc<Shared>,
}

impl Fetcher {
    fn run(&self, asked: &Receiver<()>) {
        loop {
            let due = {
                let state = self.shared.state.lock();
                if state.pending { Duration::ZERO } else { state.schedule.next().saturating_sub(self.shared.began.elapsed()) }
            };
            if !due.is_zero() && asked.recv_timeout(due) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
            self.shared.state.lock().pending = true;
            let fetched = self.fetch();
            if let Err(error) = &fetched {
                self.shared.failed.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(url = self.url, %error, "the identity provider's keys cannot be fetched: they stay as they are");
            }
            {
                let mut state = self.shared.state.lock();
                state.schedule.ended(self.shared.began.elapsed(), fetched.is_ok());
                state.pending = false;
            }
            if let Ok(keys) = fetched {
                self.known.replace(keys);
            }
            self.shared.ended.send_modify(|ended| *ended += 1);
        }
    }

    fn fetch(&self) -> Result<Keys, JwksError> {
        let failed = |source| JwksError::Fetch { url: self.url.clone(), source };
        let mut answer = self.client.get(&self.url).call().map_err(failed)?;
        let bytes = answer.body_mut().with_config().limit(BYTES_MAX).read_to_vec().map_err(failed)?;
        parse(&bytes, &self.url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_fetched_by_age_and_sooner_after_failures() {
        let s = Duration::from_secs;
        let mut schedule = Schedule { max_age: s(3600), tried: None, failures: 0 };
        assert_eq!((schedule.next(), schedule.allows(s(0))), (s(0), true));
        schedule.ended(s(5), false);
        assert_eq!(schedule.next(), s(6));
        schedule.ended(s(6), false);
        assert_eq!(schedule.next(), s(8));
        schedule.ended(s(8), true);
        assert_eq!(schedule.next(), s(3608));
        assert_eq!([17, 18].map(|now| schedule.allows(s(now))), [false, true], "whatever tokens come");
    }
}
