//! The client that attacks: requests and bare connections from addresses of its own, and the answers that it gets.

use super::{
    cluster::Cluster,
    keepsakes::{Ids, Kept},
};
use anyhow::Context;
use bytes::Bytes;
use futures_util::future::join_all;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use reqwest::{Method, Response, header::HeaderMap};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{Instant, sleep_until, timeout},
};

/// The time for which the attacker waits for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// The bytes of an answer's text that a finding quotes.
const EXCERPT_BYTES: usize = 200;
const FINDINGS_MAX: usize = 10;
/// The characters by which findings are compared: those that begin alike count as one.
const LIKE_CHARS: usize = 40;
/// The statuses that any request may get: the attacker's quota or share is used up, or the cluster is busy.
const ALWAYS: [u16; 2] = [429, 503];

#[derive(Clone)]
pub struct Attacker {
    pub key: String,
    /// Keys of other tenants of its tier.
    pub more_keys: Arc<[String]>,
    /// The key of a tenant that pays, for an attack that sees what that one gets.
    paying: String,
    pub model: String,
    /// The ids of objects that belong to other tenants.
    pub others: Arc<Ids>,
    /// An answer that is kept for the repetition of another tenant's request.
    pub kept: Kept,
    door: SocketAddr,
    url: String,
    http: reqwest::Client,
    until: Instant,
    /// The statuses that this attack deserves.
    deserves: &'static [u16],
    seen: Arc<Mutex<Seen>>,
}

/// The keys that an attack has.
pub struct Keys {
    pub own: String,
    pub more: Arc<[String]>,
    pub paying: String,
}

/// An answer to the attacker.
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub fn id(&self) -> Option<String> {
        Some(self.json()["id"].as_str()?.to_owned())
    }
}

/// The answers that the attacker got, and the findings among them.
#[derive(Debug, Default)]
pub struct Seen {
    /// Status codes, and other ends of requests.
    pub answers: BTreeMap<String, u64>,
    /// Answers that the attacker should not have got.
    pub findings: Vec<String>,
}

impl Attacker {
    pub fn new(
        cluster: &Cluster,
        keys: Keys,
        others: Arc<Ids>,
        kept: Kept,
        deserves: &'static [u16],
        until: Instant,
    ) -> anyhow::Result<Self> {
        let url = cluster.url().to_owned();
        let door = url.strip_prefix("http://").context("the front door speaks plain HTTP")?.parse()?;
        let http = reqwest::Client::builder().no_proxy().local_address(Some(address(0).into())).timeout(PATIENCE).build()?;
        let (Keys { own, more, paying }, model) = (keys, cluster.model.clone());
        Ok(Self { key: own, more_keys: more, paying, model, others, kept, door, url, http, until, deserves, seen: Arc::default() })
    }

    pub fn seen(&self) -> Arc<Mutex<Seen>> {
        Arc::clone(&self.seen)
    }

    /// The same client with another key of its tier.
    pub fn with_key(&self, key: &str) -> Self {
        Self { key: key.to_owned(), ..self.clone() }
    }

    /// A client of a tenant that pays. Its answers are not the attacker's.
    pub fn paying(&self) -> Self {
        Self { key: self.paying.clone(), seen: Arc::default(), ..self.clone() }
    }

    pub fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Waits for the attack's end.
    pub async fn linger(&self) {
        sleep_until(self.until).await;
    }

    /// Runs the attack again and again, `at_once` times concurrently, until the end.
    pub async fn each(&self, at_once: usize, attack: impl AsyncFn(u64)) {
        let next = AtomicU64::new(0);
        let one_by_one = || async {
            // It runs at least once, as its preparation may have taken all the time.
            loop {
                attack(next.fetch_add(1, Ordering::Relaxed)).await;
                if self.is_over() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        };
        join_all((0..at_once).map(|_| one_by_one())).await;
    }

    /// Posts the bodies in turn, again and again, `at_once` concurrently, until the end.
    pub async fn post_each(&self, at_once: usize, bodies: Vec<(&'static str, Bytes)>) {
        self.each(at_once, async |n| {
            let (path, body) = bodies[n as usize % bodies.len()].clone();
            self.post(path, body).await;
        })
        .await;
    }

    pub async fn get(&self, path: &str) -> Option<Answer> {
        self.ask(Method::GET, path, Bytes::new(), &[]).await
    }

    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Option<Answer> {
        self.ask(Method::POST, path, body.into(), &[]).await
    }

    pub async fn post_json(&self, path: &str, body: &Value) -> Option<Answer> {
        self.post(path, body.to_string()).await
    }

    /// Uploads a file for batches.
    pub async fn upload(&self, file: &str) -> Option<Answer> {
        let form = form(file);
        self.ask(Method::POST, "/v1/files", form.into(), &[("content-type", FORM_TYPE)]).await
    }

    pub async fn ask(&self, method: Method, path: &str, body: Bytes, headers: &[(&str, &str)]) -> Option<Answer> {
        let response = self.send(method, path, body, headers).await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        match response.bytes().await {
            Ok(body) => {
                if !self.may_see(status) {
                    let text = String::from_utf8_lossy(&body[..body.len().min(EXCERPT_BYTES)]).into_owned();
                    self.find(&format!("{status} at {path}: {text}"));
                }
                Some(Answer { status, headers, body })
            }
            Err(error) => {
                self.count(if error.is_timeout() { "no end" } else { "broken off" });
                None
            }
        }
    }

    /// An answer whose body is not read yet.
    pub async fn send(&self, method: Method, path: &str, body: Bytes, headers: &[(&str, &str)]) -> Option<Response> {
        let mut request = self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.key).body(body);
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let unanswered = Unanswered(self);
        let sent = request.send().await;
        std::mem::forget(unanswered);
        match sent {
            Ok(response) => {
                self.count(response.status().as_str());
                Some(response)
            }
            Err(error) => {
                self.count(if error.is_timeout() { "no answer" } else { "closed" });
                None
            }
        }
    }

    /// A bare connection from the attacker's `n`th address.
    pub async fn connect_from(&self, n: u8) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((address(n), 0).into())?;
        timeout(PATIENCE, socket.connect(self.door)).await?
    }

    pub async fn connect(&self) -> io::Result<TcpStream> {
        self.connect_from(0).await
    }

    /// Opens a connection and sends `bytes` on it; `None` if it was closed before.
    pub async fn say(&self, bytes: &[u8]) -> Option<TcpStream> {
        let mut stream = self.connect().await.ok()?;
        match timeout(PATIENCE, stream.write_all(bytes)).await {
            Ok(Ok(())) => Some(stream),
            _ => {
                // A refusal may have come before everything was sent.
                self.hear(&mut stream, Duration::from_secs(1)).await;
                None
            }
        }
    }

    /// Reads up to one answer's head, and counts its status.
    pub async fn hear(&self, stream: &mut TcpStream, within: Duration) -> Option<u16> {
        let mut head = [0; 4096];
        let read = match timeout(within, stream.read(&mut head)).await {
            Err(_) => {
                self.count("no answer");
                return None;
            }
            Ok(Err(_) | Ok(0)) => {
                self.count("closed");
                return None;
            }
            Ok(Ok(read)) => read,
        };
        let text = String::from_utf8_lossy(&head[..read]);
        let status: Option<u16> = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        match status {
            Some(status) => {
                self.count(&status.to_string());
                if !self.may_see(status) {
                    self.find(&text.chars().take(EXCERPT_BYTES).collect::<String>());
                }
            }
            None => self.count("not HTTP"),
        }
        status
    }

    /// A request's head, up to the place of further header lines.
    pub fn head(&self, method: &str, path: &str) -> String {
        let (door, key) = (self.door, &self.key);
        format!("{method} {path} HTTP/1.1\r\nhost: {door}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n")
    }

    pub fn count(&self, what: &str) {
        *self.lock().answers.entry(what.to_owned()).or_default() += 1;
    }

    /// Records something that the attacker should not have got, in one line; of findings that begin alike, only the first.
    pub fn find(&self, what: &str) {
        let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
        let beginning = |finding: &str| finding.chars().take(LIKE_CHARS).collect::<String>();
        let mut seen = self.lock();
        let is_known = seen.findings.iter().any(|known| beginning(known) == beginning(&what));
        if !is_known && seen.findings.len() < FINDINGS_MAX {
            seen.findings.push(what);
        }
    }

    fn may_see(&self, status: u16) -> bool {
        ALWAYS.contains(&status) || self.deserves.contains(&status)
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request without an answer, which the attack's end drops.
struct Unanswered<'a>(&'a Attacker);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.count("left at the end");
    }
}

pub const FORM_TYPE: &str = "multipart/form-data; boundary=b";

/// A form with a file for batches.
pub fn form(file: &str) -> String {
    format!(
        "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; name=\"file\"; \
         filename=\"a.jsonl\"\r\n\r\n{file}\r\n--b--\r\n"
    )
}

/// The attacker's `n`th address. All other clients use 127.0.0.1.
fn address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 1, n + 1)
}

/// Raises the limit of open files, for this process and those that it starts, to the maximum.
pub fn allow_files() -> anyhow::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("cannot raise the limit of open files")
}
