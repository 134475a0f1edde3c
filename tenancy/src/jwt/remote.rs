//! A provider's keys from its URL, or from the URL that its discovery document names. A thread fetches them periodically, and when a token
//! names an unknown key, but then at most every few seconds. The last fetched keys stay valid while the provider is unreachable: for a stated
//! time, or without an end.

use super::signed::{JwksError, Keyring, Keys, parse};
use crate::{
    retry,
    web::{Client, Target, TargetError},
};
use parking_lot::{Mutex, RwLock};
use serde::Deserialize;
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// The least time between fetches caused by unknown keys.
const ASKED_EVERY: Duration = Duration::from_secs(10);
/// The longest time that a request waits for a fetch, which is longer than a fetch takes.
const WAIT_MAX: Duration = Duration::from_secs(12);
/// The most requests that wait for a fetch: anybody can make up a token.
const WAITING_MAX: usize = 256;
/// The maximum size of a key set, larger than any real one.
const BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The keys, or the discovery document that names their URL.
    pub target: Target,
    /// The issuer of the discovery document, if it is one.
    pub issuer: Option<String>,
    /// The age from which keys are fetched again.
    pub max_age: Duration,
    /// The age from which keys are not used any more; `None` keeps them while the provider is unreachable.
    pub keep: Option<Duration>,
}

impl Settings {
    /// Keys at a known URL, which stay good while the provider is unreachable.
    pub fn keys(target: Target, max_age: Duration) -> Self {
        Self { target, issuer: None, max_age, keep: None }
    }

    /// Keys of the provider with this issuer, by its discovery document (OpenID Connect Discovery 1.0, 4).
    pub fn discovered(issuer: &str, ca: Option<PathBuf>, max_age: Duration, keep: Duration) -> Self {
        let url = format!("{}/.well-known/openid-configuration", issuer.trim_end_matches('/'));
        Self { target: Target { url, ca }, issuer: Some(issuer.to_owned()), max_age, keep: Some(keep) }
    }
}

/// A provider's discovery document, as far as it is used here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Document {
    pub issuer: String,
    pub jwks_uri: String,
    /// The endpoints for people who sign in. A provider of machines' tokens alone has none.
    pub authorization_endpoint: Option<String>,
    pub token_endpoint: Option<String>,
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
    document: RwLock<Option<Arc<Document>>>,
    keep: Option<Duration>,
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
    /// The time of the last fetch that succeeded.
    fetched: Option<Duration>,
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
        if good {
            self.fetched = Some(now);
        }
    }

    /// Whether the keys are too old to be used, or were never fetched.
    fn is_stale(&self, now: Duration, keep: Duration) -> bool {
        self.fetched.is_none_or(|fetched| now >= fetched + keep)
    }
}

impl Remote {
    pub(super) fn start(settings: Settings, keyring: Arc<Keyring>) -> Result<Self, TargetError> {
        let client = settings.target.client()?;
        let schedule = Schedule { max_age: settings.max_age, tried: None, fetched: None, failures: 0 };
        let shared = Arc::new(Shared {
            // The first request waits for the first fetch.
            state: Mutex::new(State { schedule, pending: true }),
            ended: watch::Sender::new(0),
            failed: AtomicU64::new(0),
            began: Instant::now(),
            document: RwLock::default(),
            keep: settings.keep,
        });
        let (asks, asked) = mpsc::sync_channel(1);
        let fetcher = Fetcher { client, target: settings.target, issuer: settings.issuer, keyring, shared: Arc::clone(&shared) };
        std::thread::Builder::new().name("jwks".into()).spawn(move || fetcher.run(&asked)).expect("the system has room for a thread");
        Ok(Self { asks, shared })
    }

    /// Requests a fetch because of an unknown key, and returns a future that waits for it. Returns `None` if there was one a moment ago, or
    /// many wait for it.
    pub(super) fn ask(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.shared.ended.receiver_count() >= WAITING_MAX {
            return None;
        }
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

    /// The last fetched discovery document.
    pub(super) fn document(&self) -> Option<Arc<Document>> {
        self.shared.document.read().clone()
    }

    /// Whether the keys may not be used any more, if there is an end to that. With such an end, keys that were never fetched are stale, too.
    pub(super) fn is_stale(&self) -> bool {
        let now = self.shared.began.elapsed();
        self.shared.keep.is_some_and(|keep| self.shared.state.lock().schedule.is_stale(now, keep))
    }

    /// The number of fetches that have ended, and of those that failed.
    pub(super) fn fetches(&self) -> (u64, u64) {
        (*self.shared.ended.borrow(), self.shared.failed.load(Ordering::Relaxed))
    }
}

struct Fetcher {
    client: Client,
    target: Target,
    /// The issuer, if the target is its discovery document.
    issuer: Option<String>,
    keyring: Arc<Keyring>,
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
                tracing::warn!(url = self.target.url, %error, "the identity provider's keys cannot be fetched: they stay as they are");
            }
            let good = fetched.is_ok();
            // The keys come first: they are good as soon as they count as fetched.
            if let Ok(keys) = fetched {
                self.keyring.replace(keys);
            }
            {
                let mut state = self.shared.state.lock();
                state.schedule.ended(self.shared.began.elapsed(), good);
                state.pending = false;
            }
            self.shared.ended.send_modify(|ended| *ended += 1);
        }
    }

    fn fetch(&self) -> Result<Keys, JwksError> {
        let Some(issuer) = &self.issuer else { return parse(&self.get(&self.target.url)?, &self.target.url) };
        let url = &self.target.url;
        let document: Document =
            serde_json::from_slice(&self.get(url)?).map_err(|source| JwksError::Document { url: url.clone(), source })?;
        if document.issuer != *issuer {
            return Err(JwksError::Issuer { url: url.clone(), found: document.issuer, issuer: issuer.clone() });
        }
        let endpoints = [Some(&document.jwks_uri), document.authorization_endpoint.as_ref(), document.token_endpoint.as_ref()];
        for url in endpoints.into_iter().flatten() {
            Target { url: url.clone(), ca: None }.check()?;
        }
        let keys = parse(&self.get(&document.jwks_uri)?, &document.jwks_uri)?;
        *self.shared.document.write() = Some(Arc::new(document));
        Ok(keys)
    }

    fn get(&self, url: &str) -> Result<Vec<u8>, JwksError> {
        self.client.get(url, BYTES_MAX).map_err(|source| JwksError::Fetch { url: url.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_fetched_by_age_and_sooner_after_failures() {
        let s = Duration::from_secs;
        let mut schedule = Schedule { max_age: s(3600), tried: None, fetched: None, failures: 0 };
        assert_eq!((schedule.next(), schedule.allows(s(0))), (s(0), true));
        schedule.ended(s(5), false);
        assert_eq!(schedule.next(), s(6));
        schedule.ended(s(6), false);
        assert_eq!(schedule.next(), s(8));
        schedule.ended(s(8), true);
        assert_eq!(schedule.next(), s(3608));
        assert_eq!([17, 18].map(|now| schedule.allows(s(now))), [false, true], "whatever tokens come");
    }

    #[test]
    fn few_wait_for_a_provider_however_many_tokens_name_keys_that_it_might_have() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Target { url: format!("http://{}/", silent.local_addr().unwrap()), ca: None };
        let remote = Remote::start(Settings::keys(target, Duration::from_secs(3600)), Arc::default()).unwrap();
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| remote.ask().unwrap()).collect();
        assert!(remote.ask().is_none());
        waiting.pop();
        assert!(remote.ask().is_some(), "a client has left");
    }

    #[test]
    fn keys_that_were_not_fetched_for_too_long_are_stale() {
        let s = Duration::from_secs;
        let mut schedule = Schedule { max_age: s(60), tried: None, fetched: None, failures: 0 };
        assert!(schedule.is_stale(s(0), s(600)), "there are none yet");
        schedule.ended(s(5), true);
        schedule.ended(s(65), false);
        assert_eq!([604, 605].map(|now| schedule.is_stale(s(now), s(600))), [false, true], "a failure does not renew them");
    }
}
