//! Client connections: their number is bounded, in all and per address; Nagle's delay is off; and none stays idle indefinitely, whether its
//! client sends nothing or reads nothing. HTTP/1.1 or HTTP/2; over TLS, if there is a certificate (`tls`).
//!
//! - `guests`: the connections, and what each waits for; `io`: the detection of that; `unread`: streams that are not read

mod guests;
mod io;
mod tls;
mod unread;

pub use io::Peer;
pub use tls::{Tls, TlsError};

use crate::{
    base::shares::{Party, Refused, Shares},
    metrics,
};
use axum::Router;
use guests::{Guests, Progress, Stage};
use hyper::rt::{Read, Write};
use hyper_util::{
    rt::TokioIo,
    server::{
        conn::auto,
        graceful::{GracefulShutdown, Watcher},
    },
    service::TowerToHyperService,
};
use io::{Routes, Watch, Watched};
use parking_lot::Mutex;
use socket2::SockRef;
use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
    task::JoinSet,
    time,
};
use unread::Streams;

/// The maximum size of a request's head, and the size of a connection's read buffer.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// The maximum number of concurrent requests on one HTTP/2 connection.
const STREAMS_MAX: u32 = 100;
/// The number of unread bytes of one HTTP/2 request, and of unsent bytes of one answer.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// The flow-control window of all requests of a connection together: the bytes that a connection may hold here.
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
/// The interval at which slow clients are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The time after which a client that reads nothing is cut off: by the kernel (`TCP_USER_TIMEOUT`: the connection breaks), or by this
/// server, if it is one stream of several.
const WRITE_STALL_MAX: Duration = Duration::from_secs(75);
/// The pause after an accept that failed, most likely for want of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The maximum number of refused clients that are answered at a time. The others only see their connection closed.
const TOLD_MAX: usize = 64;
/// The time that a refused client has to read its answer.
const TOLD_FOR: Duration = Duration::from_secs(1);
/// The minimum share of an address: browsers and clients keep several connections.
const ADDRESS_LEAST: u64 = 64;

/// Limits on the connections of a port.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub connections: usize,
    /// The maximum number of connections from one address; `None` for a quarter of all.
    pub per_address: Option<usize>,
    /// The time that a connection may be idle between two requests.
    pub idle_max: Duration,
}

impl Limits {
    fn shares(self) -> Shares<Party> {
        let all = self.connections as u64;
        match self.per_address {
            None => Shares::quarters(all, ADDRESS_LEAST),
            Some(each) => Shares::new(all, each as u64),
        }
    }
}

/// Serves until `stop`, then lets running requests finish within `drain`. Returns `false` if some were cut off.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()>,
    drain: Duration,
) -> bool {
    let http = protocols();
    let connections = GracefulShutdown::new();
    let (door, told) = (Arc::new(Door::new(limits)), Arc::new(Semaphore::new(TOLD_MAX)));
    let router = TowerToHyperService::new(router);
    let mut tasks = JoinSet::new();
    let accept = async {
        loop {
            let (stream, peer) = accept(&listener).await;
            while tasks.try_join_next().is_some() {}
            let Some(guest) = door.enter(peer).await else {
                if let (None, Ok(permit)) = (&tls, Arc::clone(&told).try_acquire_owned()) {
                    tasks.spawn(async move {
                        tell_full(stream).await;
                        drop(permit);
                    });
                }
                continue;
            };
            let routes = Routes { router: router.clone(), peer: Peer(peer), watch: guest.watch() };
            let connection = Connection { http: http.clone(), tls: tls.clone(), watcher: connections.watcher(), routes };
            tasks.spawn(async move {
                let served = tokio::select! {
                    served = connection.serve(stream) => served,
                    () = guest.closed() => Err("its client took too long, or others needed its place".to_owned()),
                };
                if let Err(error) = served {
                    tracing::debug!(error, "client connection ended");
                }
            });
        }
    };
    tokio::select! {
        () = accept => {}
        () = door.sweep() => {}
        () = stop => {}
    }
    drop(listener);
    let drained = async {
        tokio::select! {
            () = connections.shutdown() => {}
            () = door.sweep() => {}
        }
    };
    time::timeout(drain, drained).await.is_ok()
}

/// HTTP/1.1 and HTTP/2, distinguished by a connection's first bytes.
fn protocols() -> auto::Builder<Streams> {
    let mut http = auto::Builder::new(Streams { unread_max: WRITE_STALL_MAX });
    // The sweep knows better what a connection waits for.
    http.http1().header_read_timeout(None).max_buf_size(HEAD_BYTES_MAX);
    http.http2()
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(STREAM_WINDOW_BYTES as usize);
    http
}

/// A connection that has a place.
struct Connection {
    http: auto::Builder<Streams>,
    tls: Option<Arc<Tls>>,
    watcher: Watcher,
    routes: Routes,
}

impl Connection {
    async fn serve(self, stream: TcpStream) -> Result<(), String> {
        match self.tls.clone() {
            None => self.speak(TokioIo::new(stream)).await,
            Some(tls) => {
                let stream = tls.accept(stream).await.map_err(|error| error.to_string())?;
                self.speak(TokioIo::new(stream)).await
            }
        }
    }

    async fn speak<S: Read + Write + Unpin + 'static>(self, stream: S) -> Result<(), String> {
        let stream = Watched::new(stream, self.routes.watch.clone());
        // The builder has to outlive its connection.
        let served = self.http.serve_connection(stream, self.routes).into_owned();
        self.watcher.watch(served).await.map_err(|error| error.to_string())
    }
}

/// The places for connections of one port.
#[derive(Debug)]
struct Door {
    guests: Mutex<Guests<Arc<Notify>>>,
    /// Notified when a place becomes free.
    free: Notify,
    began: Instant,
}

impl Door {
    fn new(limits: Limits) -> Self {
        Self { guests: Mutex::new(Guests::new(limits.shares(), limits.idle_max)), free: Notify::new(), began: Instant::now() }
    }

    /// Takes a place for a connection; a waiting connection may give way for it. Returns `None` if its address has its share and all of
    /// these connections are busy. While all places are taken by addresses within their shares, this waits, and clients wait in the
    /// kernel's backlog.
    async fn enter(self: &Arc<Self>, peer: IpAddr) -> Option<Guest> {
        let party = Party::of_address(peer);
        loop {
            let closer = Arc::new(Notify::new());
            let entered = self.guests.lock().enter(self.began.elapsed(), &party, Arc::clone(&closer));
            let refused = match entered {
                Ok((number, progress)) => return Some(Guest { door: Arc::clone(self), number, progress, closer }),
                Err(refused) => refused,
            };
            let free = self.free.notified();
            let gives_way = self.guests.lock().last_resort((refused == Refused::Own).then_some(&party));
            match gives_way {
                Some(closer) => {
                    metrics::count_closed("displaced");
                    closer.notify_one();
                }
                None if refused == Refused::Own => {
                    metrics::count_share_refusal("connections", refused);
                    return None;
                }
                None => {}
            }
            free.await;
        }
    }

    /// Background loop: closes connections whose clients take too long. Never returns.
    async fn sweep(&self) {
        loop {
            time::sleep(SWEEP_EVERY).await;
            let overdue = self.guests.lock().overdue(self.began.elapsed());
            for (stage, closer) in overdue {
                metrics::count_closed(if stage == Stage::Head { "head" } else { "idle" });
                closer.notify_one();
            }
            // A connection that was busy may give way by now.
            self.free.notify_one();
        }
    }
}

/// A connection's place, until it is dropped.
#[derive(Debug)]
struct Guest {
    door: Arc<Door>,
    number: u64,
    progress: Arc<Progress>,
    closer: Arc<Notify>,
}

impl Guest {
    fn watch(&self) -> Watch {
        Watch::new(Arc::clone(&self.progress), self.door.began)
    }

    /// Resolves when the connection must end. A request that has arrived in the meantime is answered first.
    async fn closed(&self) {
        loop {
            self.closer.notified().await;
            if self.progress.get().0 != Stage::Busy {
                return;
            }
            self.door.free.notify_one();
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.door.guests.lock().leave(self.number);
        self.door.free.notify_one();
    }
}

/// Tells a client that its address has reached its maximum number of connections.
async fn tell_full(mut stream: TcpStream) {
    const BODY: &str = "{\"error\":{\"message\":\"There are as many connections from your address as there may be. Please try again when one \
                        has ended.\",\"type\":\"rate_limit_error\",\"param\":null,\"code\":\"too_many_connections\"}}";
    let answer = format!(
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: 1\r\nconnection: \
         close\r\n\r\n{BODY}",
        BODY.len()
    );
    let told = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        // Input that is unread when a connection is closed takes the answer with it.
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = time::timeout(TOLD_FOR, told).await;
}

async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%peer, %error, "could not turn Nagle's delay off");
                }
                if let Err(error) = SockRef::from(&stream).set_tcp_user_timeout(Some(WRITE_STALL_MAX)) {
                    tracing::debug!(%peer, %error, "could not set a client's write timeout");
                }
                return (stream, peer.ip());
            }
            Err(error) => {
                tracing::warn!(%error, "could not accept a client");
                time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_reads_nothing_cannot_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (_client, (stream, _)) = tokio::join!(client, accept(&listener));
        assert_eq!(SockRef::from(&stream).tcp_user_timeout().unwrap(), Some(WRITE_STALL_MAX));
    }
}
