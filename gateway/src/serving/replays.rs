//! The shell around [`Recordings`]: answers that are made in tasks of their own, so that they outlive their clients' connections, and
//! listeners whose connections receive the frames.

use crate::{
    base::owner::Erasing,
    cache::replay::{Append, Counts, Digest, Limits, Lookup, Read, Recordings, Seat},
    metrics,
    requests::error::ApiError,
};
use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use serde::Deserialize;
use std::{
    convert::Infallible,
    sync::{Arc, Once, OnceLock, Weak},
    time::{Duration, Instant},
};
use tokio::{
    sync::{Notify, watch},
    time,
};

/// The interval at which expired recordings are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The silence after which a comment is sent, so that a dead client is noticed while no tokens are generated.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// An empty comment: connections write their own.
const SILENCE: &[u8] = b":\n\n";

/// All recordings of this gateway.
#[derive(Debug)]
pub struct Replays {
    recordings: Mutex<Recordings<Arc<Signal>, Bytes>>,
    began: Instant,
    sweeping: Once,
}

/// The signals between a recording's maker and its listeners.
#[derive(Debug)]
pub(crate) struct Signal {
    /// Notified when there are frames to read.
    more: watch::Sender<()>,
    /// Notified when a listener has read, or left.
    read: Notify,
    /// Notified when no listener has returned.
    give_up: Notify,
    /// The response's head, before the first frame.
    head: OnceLock<Head>,
}

#[derive(Debug)]
struct Head {
    status: StatusCode,
    headers: HeaderMap,
}

impl Head {
    fn is_stream(&self) -> bool {
        self.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
    }
}

impl Replays {
    pub fn new(limits: Limits) -> Self {
        Self { recordings: Mutex::new(Recordings::new(limits)), began: Instant::now(), sweeping: Once::new() }
    }

    pub fn counts(&self) -> Counts {
        self.recordings.lock().counts()
    }

    /// Forgets, or counts, all recordings of a tenant.
    pub(crate) fn erase(&self, tenant: &Digest, erasing: Erasing) -> u64 {
        let mut recordings = self.recordings.lock();
        if erasing == Erasing::Remove { recordings.forget(tenant) } else { recordings.held(tenant) }
    }

    pub(crate) fn has(&self, key: &Digest) -> bool {
        self.recordings.lock().has(key)
    }

    pub(crate) fn repeats(&self, key: &Digest) -> bool {
        self.recordings.lock().repeats(key)
    }

    pub(crate) fn ask(
        self: &Arc<Self>,
        tenant: Digest,
        key: Digest,
        body: Digest,
        after: Option<u64>,
    ) -> (Lookup<Arc<Signal>>, Arc<Signal>) {
        self.sweeping.call_once(|| {
            tokio::spawn(sweep(Arc::downgrade(self)));
        });
        let fresh = Arc::new(Signal { more: watch::Sender::new(()), read: Notify::new(), give_up: Notify::new(), head: OnceLock::new() });
        let asked = self.recordings.lock().ask(tenant, key, body, after, || Arc::clone(&fresh));
        let signal = if let Lookup::Joined { tag, .. } = &asked { Arc::clone(tag) } else { fresh };
        (asked, signal)
    }

    pub(crate) fn find(&self, name: &Digest, after: Option<u64>) -> Option<(Seat, Arc<Signal>)> {
        match self.recordings.lock().find(name, after)? {
            Lookup::Joined { seat, tag, .. } => Some((seat, tag)),
            _ => None,
        }
    }

    /// Makes a recording: runs the request to its end, with or without listeners. `stream` is the prefix of its events' ids.
    pub(crate) fn record(self: &Arc<Self>, id: u64, signal: &Arc<Signal>, stream: String, scope: Digest, request: Request, next: Next) {
        let mut making = Making { replays: Arc::clone(self), id, signal: Arc::clone(signal), stream, scope, whole: false };
        let signal = Arc::clone(signal);
        tokio::spawn(async move {
            tokio::select! {
                () = making.run(request, next) => {}
                () = signal.give_up.notified() => {}
            }
        });
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

async fn sweep(replays: Weak<Replays>) {
    loop {
        time::sleep(SWEEP_EVERY).await;
        let Some(replays) = replays.upgrade() else { return };
        let (given_up, counts) = {
            let mut recordings = replays.recordings.lock();
            (recordings.expire(replays.now()), recordings.counts())
        };
        given_up.iter().for_each(|signal| signal.give_up.notify_one());
        metrics::show_replays(&counts);
    }
}

/// The task that makes a recording. When it ends, for any reason, it ends the recording.
struct Making {
    replays: Arc<Replays>,
    id: u64,
    signal: Arc<Signal>,
    stream: String,
    scope: Digest,
    whole: bool,
}

impl Making {
    async fn run(&mut self, request: Request, next: Next) {
        let (parts, body) = next.run(request).await.into_parts();
        let good = parts.status.is_success();
        let mut headers = parts.headers;
        headers.remove(header::CONTENT_LENGTH);
        let head = Head { status: parts.status, headers };
        let streams = head.is_stream();
        // Only this task sets it, once.
        let _ = self.signal.head.set(head);
        self.signal.more.send_replace(());
        let mut failed = false;
        let mut named = false;
        let mut frames = body.into_data_stream();
        while let Some(frame) = frames.next().await {
            let Ok(frame) = frame else { return };
            if &frame[..] == SILENCE {
                continue;
            }
            let event = streams && !frame.starts_with(b":");
            if good && !named && (event || !streams) {
                named = true;
                if let Some(name) = name_of(&frame) {
                    self.replays.recordings.lock().name(self.id, digest(&[&self.scope, name.as_bytes()]));
                }
            }
            failed |= event && breaks_off(&frame);
            self.append(frame, event).await;
        }
        self.whole = good && !failed;
    }

    async fn append(&self, frame: Bytes, event: bool) {
        loop {
            {
                let mut recordings = self.replays.recordings.lock();
                let sent = match event {
                    true => [format!("id: {}:{}\n", self.stream, recordings.next_event(self.id)).as_bytes(), &frame].concat().into(),
                    false => frame.clone(),
                };
                let bytes = sent.len() as u64;
                if recordings.append(self.id, sent, bytes, event) == Append::Taken {
                    break;
                }
            }
            // Listeners that do not read are cut off by their connections, and a request without listeners is given up.
            self.signal.read.notified().await;
        }
        self.signal.more.send_replace(());
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.replays.recordings.lock().end(self.replays.now(), self.id, self.whole);
        self.signal.more.send_replace(());
    }
}

/// Whether an event reports that the answer failed: a repeat should not get it.
fn breaks_off(event: &[u8]) -> bool {
    [&b"data: {\"error\":"[..], b"event: error\n", b"event: response.failed\n"].iter().any(|start| event.starts_with(start))
}

/// Finds the answer's id, in its first event or in itself.
fn name_of(frame: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        id: Option<String>,
        /// The response in an event of the Responses API.
        response: Option<Inner>,
        /// The message in an event of the Messages API.
        message: Option<Inner>,
    }
    #[derive(Deserialize)]
    struct Inner {
        id: Option<String>,
    }
    let start = frame.windows(6).position(|window| window == b"data: ").filter(|_| !frame.starts_with(b"{")).map_or(0, |at| at + 6);
    let named: Named = serde_json::from_slice(&frame[start..]).ok()?;
    named.id.or_else(|| named.response.or(named.message)?.id)
}

/// A client's connection to a recording, until it is dropped.
pub(crate) struct Listener {
    replays: Arc<Replays>,
    seat: Seat,
    signal: Arc<Signal>,
    more: watch::Receiver<()>,
}

impl Listener {
    pub(crate) fn new(replays: &Arc<Replays>, seat: Seat, signal: Arc<Signal>) -> Self {
        let more = signal.more.subscribe();
        Self { replays: Arc::clone(replays), seat, signal, more }
    }

    /// Responds with the recorded answer.
    pub(crate) async fn respond(mut self) -> Response {
        // It is set before the first frame; an end without it means that the maker failed.
        let first = self.next().await;
        let Some(head) = self.signal.head.get() else {
            return ApiError::internal("the answer that this request waited for broke off: repeat it").into_response();
        };
        let (status, headers, streams) = (head.status, head.headers.clone(), head.is_stream());
        let body = if streams {
            let frames = stream::unfold((self, first), |(mut listener, first)| async move {
                let frame = match first {
                    Some(frame) => frame,
                    None => listener.next_or_silence().await?,
                };
                Some((Ok::<_, Infallible>(frame), (listener, None)))
            });
            Body::from_stream(frames)
        } else {
            let mut whole = first.map_or(Vec::new(), Vec::from);
            while let Some(frame) = self.next().await {
                whole.extend_from_slice(&frame);
            }
            Body::from(whole)
        };
        let mut response = (status, body).into_response();
        *response.headers_mut() = headers;
        if streams {
            // Proxies must not hold events back.
            response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        }
        response
    }

    /// Returns the next frame; `None` after the last. Cancel safe.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            self.more.borrow_and_update();
            let read = self.replays.recordings.lock().read(self.seat);
            match read {
                Read::Frame(frame) => {
                    self.signal.read.notify_one();
                    return Some(frame);
                }
                Read::End => return None,
                Read::Wait => self.more.changed().await.ok()?,
            }
        }
    }

    async fn next_or_silence(&mut self) -> Option<Bytes> {
        time::timeout(KEEP_ALIVE, self.next()).await.unwrap_or(Some(Bytes::from_static(SILENCE)))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.replays.recordings.lock().leave(self.replays.now(), self.seat);
        self.signal.read.notify_one();
    }
}

/// Digests parts so that different lists of parts never have the same bytes.
/// The digest of a tenant, to whose share its recordings count.
pub(crate) fn tenant_digest(tenant: Option<&str>) -> Digest {
    digest(&[tenant.unwrap_or_default().as_bytes()])
}

pub(crate) fn digest(parts: &[&[u8]]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_known_by_its_id() {
        for (frame, name) in [
            ("data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"id\":3}]}\n\n", Some("chatcmpl-1")),
            ("event: response.created\ndata: {\"response\":{\"id\":\"resp_1\"},\"type\":\"response.created\"}\n\n", Some("resp_1")),
            ("event: message_start\ndata: {\"message\":{\"id\":\"msg_1\"},\"type\":\"message_start\"}\n\n", Some("msg_1")),
            ("{\"id\":\"cmpl-1\",\"text\":\"data: \"}", Some("cmpl-1")),
            ("{\"object\":\"list\"}", None),
            ("data: [DONE]\n\n", None),
        ] {
            assert_eq!(name_of(frame.as_bytes()).as_deref(), name, "{frame}");
        }
    }

    #[test]
    fn a_failure_is_known_by_its_event() {
        assert!(breaks_off(b"data: {\"error\":{\"message\":\"x\"}}\n\n"));
        assert!(breaks_off(b"event: error\ndata: {}\n\n"));
        assert!(breaks_off(b"event: response.failed\ndata: {}\n\n"));
        assert!(!breaks_off(b"data: {\"id\":\"x\"}\n\n"));
    }
}
