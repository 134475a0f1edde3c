//! Quotas on a Redis or Valkey server, which all coordinators share.
//!
//! ```text
//!   reserve ─── one script, one round trip, or `None` after a few milliseconds: the caller decides by itself
//!   charge, settle, cancel ──► backlog ──► server, in the background; again when it did not arrive
//! ```
//!
//! The scripts (`shared/*.lua`) keep the windows of [`crate::window`], by the server's clock. A running request holds a lease in the
//! concurrency of its scopes, which its coordinator renews: when the coordinator dies, the place is free again seconds later. All keys of a
//! tenant have the same hash tag, so that in a cluster they are on one node.
//!
//! - [`server`]: addresses and connections; `backlog`: what the server has yet to be told

mod backlog;
pub mod server;
#[cfg(test)]
pub(crate) mod testing;

use crate::{
    breaker::Breaker,
    calendar::Period,
    limits::Limits,
    quota::{Kind, Refusal, Scope, Spent, Standing, Use, Used},
};
use backlog::{Backlog, Entry, What};
use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::{RedisError, Script, ScriptInvocation};
use server::{Connection, Server};
use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::Notify,
    task::AbortHandle,
    time::{sleep, timeout},
};

/// The time after which a request no longer waits, unless settings say otherwise: with the timer's granularity of one millisecond, and the time to wake up, 5 ms.
pub const WAIT_MAX: Duration = Duration::from_micros(3500);
const LEASE: Duration = Duration::from_secs(15);
/// The number of renewals in the time of a lease.
const RENEWALS: u32 = 3;
/// The time for which a reservation or charge is refused that comes after its settlement. What a stopped server has not read yet, it reads
/// when it goes on, as it does what was sent after that.
const LATE_MAX: Duration = Duration::from_secs(60);
/// The number of calls at a time in the background. More would keep requests waiting behind them.
const AT_ONCE: usize = 16;
/// Numbers that Lua can count with.
const NUMBER_MAX: u64 = 1 << 53;
/// The limits of a scope, in the order in which scripts take and name them.
const KINDS: [Kind; 6] =
    [Kind::Requests, Kind::Tokens, Kind::TokensPerDay, Kind::Concurrent, Kind::Spend(Period::Day), Kind::Spend(Period::Month)];

#[derive(Clone, Debug)]
pub struct Settings {
    pub server: Server,
    /// The beginning of all keys.
    pub prefix: String,
    /// The time after which a reservation is given up.
    pub wait: Duration,
    /// The time after which a running request that is not renewed no longer counts.
    pub lease: Duration,
}

impl Settings {
    pub fn new(server: Server, prefix: String) -> Self {
        Self { server, prefix, wait: WAIT_MAX, lease: LEASE }
    }
}

/// A request as its quota sees it.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub tenant: &'a str,
    pub scopes: &'a [(Scope, Limits)],
    /// The most that it uses.
    pub most: Use,
    /// The time after which the request counts as lost.
    pub lasts: Duration,
}

/// A reservation that the server knows, or will know of.
#[derive(Debug)]
pub struct Lease(Arc<Placed>);

/// A reservation's names on the server.
#[derive(Debug)]
struct Placed {
    number: u64,
    id: String,
    keys: Vec<String>,
    deadline: Instant,
}

/// Counts of decisions and failures so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Whether the server decides.
    pub is_used: bool,
    /// The number of requests decided by the server.
    pub by_server: u64,
    /// The number of requests that this coordinator decided, since the server did not answer.
    pub by_share: u64,
    pub failures: Failures,
    /// The number of entries that the server has yet to be told.
    pub behind: u64,
    /// The number of entries that were given up.
    pub lost: u64,
}

/// Failed calls by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// No answer in time.
    pub slow: u64,
    /// No connection.
    pub gone: u64,
    /// An answer that says no.
    pub refused: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Slow,
    Gone,
    Refused,
}

type Decided = Result<(Lease, Standing), (Refusal, Standing)>;

#[derive(Debug)]
pub struct SharedQuota {
    inner: Arc<Inner>,
    task: AbortHandle,
}

struct Inner {
    settings: Settings,
    /// Distinguishes this process's reservations from all others'.
    instance: u64,
    next: AtomicU64,
    began: Instant,
    breaker: Mutex<Breaker>,
    /// The connection on which requests wait; `None` while there is none.
    connection: Mutex<Option<Connection>>,
    backlog: Mutex<Backlog>,
    running: Mutex<HashMap<u64, Arc<Placed>>>,
    counts: Mutex<Counts>,
    /// Whether the log says who decides.
    is_said: AtomicBool,
    /// Wakes the background task.
    wake: Notify,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("server", &self.settings.server).field("counts", &self.counts()).finish_non_exhaustive()
    }
}

struct Scripts {
    reserve: Script,
    charge: Script,
    settle: Script,
    renew: Script,
}

static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| {
    let script = |own: &str| Script::new(&[include_str!("shared/window.lua"), own].concat());
    Scripts {
        reserve: script(include_str!("shared/reserve.lua")),
        charge: script(include_str!("shared/charge.lua")),
        settle: script(include_str!("shared/settle.lua")),
        renew: script(include_str!("shared/renew.lua")),
    }
});

impl SharedQuota {
    /// Starts connecting, in a task of the current runtime. The server need not be there yet.
    pub fn start(settings: Settings, instance: u64) -> Self {
        let inner = Arc::new(Inner {
            settings,
            instance,
            next: AtomicU64::new(0),
            began: Instant::now(),
            breaker: Mutex::default(),
            connection: Mutex::default(),
            backlog: Mutex::default(),
            running: Mutex::default(),
            counts: Mutex::default(),
            is_said: AtomicBool::new(false),
            wake: Notify::new(),
        });
        let task = tokio::spawn(Arc::clone(&inner).tend()).abort_handle();
        Self { inner, task }
    }

    /// Whether the server decides now.
    pub fn is_used(&self) -> bool {
        self.inner.breaker.lock().is_closed()
    }

    /// Lets the server decide on a request. `None` if it does not answer, or has not lately: then the caller decides.
    pub async fn reserve(&self, request: Request<'_>) -> Option<Decided> {
        let inner = &self.inner;
        let Some(mut connection) = inner.open_connection() else {
            inner.counts.lock().by_share += 1;
            return None;
        };
        // Until there is an answer, the server may have taken the reservation: also if this future is dropped.
        let mut unsure = Unsure { inner, placed: Some(inner.place(&request)) };
        let placed = unsure.placed.as_ref().expect("it has just been placed");
        let mut call = call(&SCRIPTS.reserve, placed);
        numbers(&mut call, request.most).arg(ms(inner.settings.lease)).arg(ms(request.lasts));
        for (_, limits) in request.scopes {
            for kind in KINDS {
                call.arg(limits.of(kind).map_or(-1, |limit| limit.min(NUMBER_MAX) as i64));
            }
        }
        let failure = match timeout(inner.settings.wait, call.invoke_async::<Vec<i64>>(&mut connection)).await {
            Ok(Ok(answer)) => match decided(&answer, request.scopes) {
                Some(decision) => {
                    let placed = unsure.placed.take().expect("it is taken once");
                    inner.counts.lock().by_server += 1;
                    return Some(match decision {
                        Ok(standing) => Ok((inner.runs(placed), standing)),
                        Err(refused) => Err(refused),
                    });
                }
                None => Failure::Refused,
            },
            Ok(Err(error)) => {
                tracing::debug!(%error, "a reservation failed");
                Failure::of(&error)
            }
            Err(_) => Failure::Slow,
        };
        inner.failed(failure);
        inner.counts.lock().by_share += 1;
        None
    }

    /// Notes a request that this coordinator let pass by itself.
    pub fn charge(&self, request: Request<'_>) -> Lease {
        let placed = self.inner.place(&request);
        self.inner.tell(Arc::clone(&placed), What::Charge { most: request.most, at: Instant::now() });
        self.inner.runs(placed)
    }

    /// Settles a request that has ended, and what it has used.
    pub fn settle(&self, lease: Lease, used: Use) {
        self.inner.ended(lease, What::Settle { used });
    }

    /// Cancels the reservation of a request that was not accepted after all.
    pub fn cancel(&self, lease: Lease) {
        self.inner.ended(lease, What::Cancel);
    }

    pub fn counts(&self) -> Counts {
        self.inner.counts()
    }

    /// Waits until the server has been told everything, or `longest`.
    pub async fn flush(&self, longest: Duration) {
        let told = async {
            while !self.inner.backlog.lock().is_told() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = timeout(longest, told).await;
    }
}

impl Drop for SharedQuota {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A reservation of which it is not known whether the server has taken it.
struct Unsure<'a> {
    inner: &'a Inner,
    placed: Option<Arc<Placed>>,
}

impl Drop for Unsure<'_> {
    fn drop(&mut self) {
        if let Some(placed) = self.placed.take() {
            self.inner.tell(placed, What::Cancel);
        }
    }
}

impl Inner {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The connection, if the server may be asked.
    fn open_connection(&self) -> Option<Connection> {
        if !self.breaker.lock().is_closed() {
            return None;
        }
        self.connection.lock().clone()
    }

    fn place(&self, request: &Request<'_>) -> Arc<Placed> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:x}-{number:x}", self.instance);
        let place = format!("{}:{{{}}}", self.settings.prefix, digest(request.tenant));
        let mut keys = vec![format!("{place}:r:{id}")];
        for (scope, _) in request.scopes {
            let scope = match scope {
                Scope::Tenant(_) => "t".to_owned(),
                Scope::Key(key) => format!("k:{}", digest(key)),
                Scope::Model(_, model) => format!("m:{}", digest(model)),
            };
            keys.extend([format!("{place}:w:{scope}"), format!("{place}:c:{scope}")]);
        }
        Arc::new(Placed { number, id, keys, deadline: Instant::now() + request.lasts })
    }

    fn runs(&self, placed: Arc<Placed>) -> Lease {
        self.running.lock().insert(placed.number, Arc::clone(&placed));
        Lease(placed)
    }

    fn ended(&self, Lease(placed): Lease, what: What) {
        self.running.lock().remove(&placed.number);
        self.tell(placed, what);
    }

    fn tell(&self, placed: Arc<Placed>, what: What) {
        self.backlog.lock().push(placed, what);
        self.wake.notify_one();
    }

    fn counts(&self) -> Counts {
        let counts = *self.counts.lock();
        let backlog = self.backlog.lock();
        Counts { is_used: self.breaker.lock().is_closed(), behind: backlog.len() as u64, lost: backlog.lost(), ..counts }
    }

    fn failed(&self, failure: Failure) {
        self.count(failure);
        if self.breaker.lock().failed(self.now()) {
            tracing::warn!(server = %self.settings.server, ?failure, "the quota server fails: quotas are this coordinator's share now");
            // Calls that were sent may still be on their way: no more go there.
            self.connection.lock().take();
            self.wake.notify_one();
        }
    }

    fn count(&self, failure: Failure) {
        let failures = &mut self.counts.lock().failures;
        match failure {
            Failure::Slow => failures.slow += 1,
            Failure::Gone => failures.gone += 1,
            Failure::Refused => failures.refused += 1,
        }
    }

    /// Background loop: connects, tells the server what it has to know, and renews leases. Never returns.
    async fn tend(self: Arc<Self>) {
        loop {
            let connection = self.reconnect().await;
            self.keep_told(&connection).await;
        }
    }

    /// Tries the server until it knows everything and may be asked. Returns the connection for the background.
    async fn reconnect(&self) -> Connection {
        loop {
            let rest = self.breaker.lock().until_try(self.now()).unwrap_or_default();
            sleep(rest).await;
            match self.try_all().await {
                Ok((first, background)) => {
                    *self.connection.lock() = Some(first);
                    self.breaker.lock().tried(self.now(), true);
                    tracing::info!(server = %self.settings.server, "the quota server answers: quotas are shared");
                    return background;
                }
                Err(failure) => {
                    self.count(failure);
                    self.breaker.lock().tried(self.now(), false);
                    if !self.is_said.swap(true, Ordering::Relaxed) {
                        let server = &self.settings.server;
                        tracing::warn!(%server, ?failure, "the quota server cannot be reached: quotas are this coordinator's share");
                    }
                }
            }
        }
    }

    /// Tells the server what it has to know, until it fails here or for a request.
    async fn keep_told(&self, connection: &Connection) {
        self.is_said.store(true, Ordering::Relaxed);
        let (mut renewed, each) = (Instant::now(), self.settings.lease / RENEWALS);
        while self.breaker.lock().is_closed() {
            if self.backlog.lock().waiting() == 0 {
                let _ = timeout(each.saturating_sub(renewed.elapsed()), self.wake.notified()).await;
            }
            let mut done = self.tell_some(connection).await;
            if done.is_ok() && renewed.elapsed() >= each {
                renewed = Instant::now();
                done = self.renew(connection).await;
            }
            if let Err(failure) = done {
                self.failed(failure);
            }
        }
    }

    /// Connects twice, for requests and for the background, and brings the server up to date.
    async fn try_all(&self) -> Result<(Connection, Connection), Failure> {
        let connect = async || {
            self.settings.server.connect().await.map_err(|error| {
                tracing::debug!(%error, "no connection to the quota server");
                Failure::of(&error)
            })
        };
        let within = |connecting| timeout(server::ANSWER_MAX * 3, connecting);
        let mut first = within(connect()).await.map_err(|_| Failure::Slow)??;
        let background = within(connect()).await.map_err(|_| Failure::Slow)??;
        // The first call brings the script; the second has to be as fast as a request's.
        let probe = Request { tenant: "", scopes: &[], most: Use::default(), lasts: Duration::from_secs(1) };
        for wait in [server::ANSWER_MAX, self.settings.wait] {
            let placed = self.place(&probe);
            let mut call = call(&SCRIPTS.reserve, &placed);
            numbers(&mut call, probe.most).arg(0).arg(1000);
            let answer = timeout(wait, call.invoke_async::<Vec<i64>>(&mut first)).await.map_err(|_| Failure::Slow)?;
            answer.map_err(|error| {
                tracing::debug!(%error, "the quota server refused a call");
                Failure::of(&error)
            })?;
        }
        // The rest may follow: while this coordinator decides, more keeps coming.
        while self.backlog.lock().waiting() > AT_ONCE {
            self.tell_some(&background).await?;
        }
        self.renew(&background).await?;
        Ok((first, background))
    }

    /// Sends some of the backlog. What did not arrive stays in it.
    async fn tell_some(&self, connection: &Connection) -> Result<(), Failure> {
        let entries = Unsent { backlog: &self.backlog, entries: self.backlog.lock().take(AT_ONCE) };
        let sent = join_all(entries.entries.iter().map(|entry| {
            let mut connection = connection.clone();
            async move {
                let invocation = told(entry, self.settings.lease);
                timeout(server::ANSWER_MAX, invocation.invoke_async::<i64>(&mut connection)).await
            }
        }));
        let sent = sent.await;
        let (mut failure, mut unsent) = (Ok(()), Vec::new());
        for (entry, sent) in entries.taken().into_iter().zip(sent) {
            match sent {
                Ok(Ok(_)) => self.backlog.lock().arrived(entry),
                // The script itself failed; other refusals pass.
                Ok(Err(error)) if matches!(error.code(), Some("ERR" | "WRONGTYPE")) => {
                    tracing::warn!(%error, "the quota server refuses a script");
                    failure = Err(Failure::Refused);
                    self.backlog.lock().refused(entry);
                }
                Ok(Err(error)) => {
                    failure = Err(Failure::of(&error));
                    unsent.push(entry);
                }
                Err(_) => {
                    failure = Err(Failure::Slow);
                    unsent.push(entry);
                }
            }
        }
        self.backlog.lock().put_back(unsent);
        failure
    }

    /// Renews the leases of all running requests, but those that are lost.
    async fn renew(&self, connection: &Connection) -> Result<(), Failure> {
        let now = Instant::now();
        let running: Vec<_> = {
            let mut running = self.running.lock();
            running.retain(|_, placed| placed.deadline > now);
            running.values().cloned().collect()
        };
        for some in running.chunks(AT_ONCE) {
            let renewed = join_all(some.iter().map(|placed| {
                let mut connection = connection.clone();
                async move {
                    let mut call = call(&SCRIPTS.renew, placed);
                    call.arg(ms(self.settings.lease));
                    timeout(server::ANSWER_MAX, call.invoke_async::<i64>(&mut connection)).await
                }
            }));
            for renewed in renewed.await {
                renewed.map_err(|_| Failure::Slow)?.map_err(|error| Failure::of(&error))?;
            }
        }
        Ok(())
    }
}

/// Entries that are being sent. If that is given up, they are still to be sent.
struct Unsent<'a> {
    backlog: &'a Mutex<Backlog>,
    entries: Vec<Entry>,
}

impl Unsent<'_> {
    fn taken(mut self) -> Vec<Entry> {
        std::mem::take(&mut self.entries)
    }
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        self.backlog.lock().put_back(std::mem::take(&mut self.entries));
    }
}

impl Failure {
    fn of(error: &RedisError) -> Self {
        if error.is_timeout() {
            Self::Slow
        } else if error.is_io_error() || error.is_connection_dropped() || error.is_connection_refusal() {
            Self::Gone
        } else {
            Self::Refused
        }
    }
}

/// A call with a reservation's keys, and its id as the first argument.
fn call<'a>(script: &'a Script, placed: &Placed) -> ScriptInvocation<'a> {
    let mut call = script.prepare_invoke();
    placed.keys.iter().for_each(|key| {
        call.key(key);
    });
    call.arg(&placed.id);
    call
}

/// Adds what a request uses as the next two arguments.
fn numbers<'a, 'b>(call: &'a mut ScriptInvocation<'b>, used: Use) -> &'a mut ScriptInvocation<'b> {
    call.arg(used.tokens.min(NUMBER_MAX)).arg(used.cost_micros.min(NUMBER_MAX))
}

fn told(entry: &Entry, lease: Duration) -> ScriptInvocation<'static> {
    let Entry { placed, what, .. } = entry;
    match *what {
        What::Charge { most, at } => {
            let mut call = call(&SCRIPTS.charge, placed);
            // The settlement, which follows, has to find it.
            let lasts = placed.deadline.saturating_duration_since(Instant::now()).max(LATE_MAX);
            numbers(&mut call, most).arg(ms(lease)).arg(ms(lasts)).arg(ms(at.elapsed()));
            call
        }
        What::Settle { used } => {
            let mut call = call(&SCRIPTS.settle, placed);
            numbers(&mut call, used).arg(0).arg(ms(LATE_MAX));
            call
        }
        What::Cancel => {
            let mut call = call(&SCRIPTS.settle, placed);
            numbers(&mut call, Use::default()).arg(1).arg(ms(LATE_MAX));
            call
        }
    }
}

/// Reads the answer of the script `reserve`; `None` if it is none, or the reservation was cancelled before it came.
fn decided(answer: &[i64], scopes: &[(Scope, Limits)]) -> Option<Result<Standing, (Refusal, Standing)>> {
    let number = |value: &i64| u64::try_from(*value).unwrap_or(0);
    let standing = |rest: &[i64]| {
        let used = rest.chunks_exact(5).map(|row| Used {
            requests: number(&row[0]),
            tokens: number(&row[1]),
            reset: Duration::from_millis(number(&row[2])),
            spent: Spent { day_micros: number(&row[3]), month_micros: number(&row[4]) },
        });
        Standing::of(scopes.iter().zip(used))
    };
    match answer {
        [1, rest @ ..] => Some(Ok(standing(rest))),
        [0, scope, kind, used, needed, retry, rest @ ..] => {
            let (scope, limits) = scopes.get(usize::try_from(scope - 1).ok()?)?;
            let kind = *KINDS.get(usize::try_from(kind - 1).ok()?)?;
            let (scope, limit, needed) = (scope.kind(), limits.of(kind)?, number(needed));
            let refusal = match u64::try_from(*retry) {
                Ok(ms) => Refusal::Wait { scope, kind, limit, used: number(used), needed, retry: Duration::from_millis(ms) },
                Err(_) => Refusal::Never { scope, kind, limit, needed },
            };
            Some(Err((refusal, standing(rest))))
        }
        _ => None,
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).min(NUMBER_MAX)
}

/// Names come from tokens of others and may contain anything.
fn digest(name: &str) -> String {
    blake3::hash(name.as_bytes()).to_hex()[..24].to_owned()
}

#[cfg(test)]
mod tests;
