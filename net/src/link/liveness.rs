//! Immediate detection that a peer's process is gone.
//!
//! A process that is killed sends no farewell, and QUIC notices only its silence, after [`IDLE_MAX`](super::IDLE_MAX). Its kernel, though,
//! closes its TCP connections at once. So each QUIC connection has an idle TCP connection beside it, at the same address and port: when
//! that ends, the QUIC connection does. The two are matched, and protected from third parties, by a secret that only the two ends of the
//! QUIC connection can derive (RFC 8446, section 7.5): the only bytes that are ever sent.
//!
//! The loss of a host, a paused process, and a path that lets only UDP through are still noticed by silence.

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use std::{collections::HashMap, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout, timeout_at},
};

/// The secret that only the two ends of a connection know.
type Secret = [u8; 32];

/// The time that QUIC gets to report an orderly end, which may arrive after TCP's.
const GRACE: Duration = Duration::from_millis(30);
/// The time for which TCP outlives an orderly end, so that the reason reaches a peer first that is slow to read it. A process that is killed
/// has no say in it, so its end is noticed as soon as before.
const LINGER: Duration = Duration::from_millis(500);
/// The time within which a TCP connection must arrive and send its secret.
const INTRODUCED_MAX: Duration = Duration::from_secs(5);
/// The interval at which to look for the QUIC connection of a TCP connection: the handshake ends a moment later at this end.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The maximum number of TCP connections that have not sent their secret; further ones wait.
const STRANGERS_MAX: usize = 256;
/// The keep-alive interval: devices on the path forget connections that are silent for long.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// QUIC's close code for an end that TCP has reported.
const GONE: u32 = 2;

/// The accepting end: connections whose TCP connection has not arrived yet.
#[derive(Debug)]
pub(super) struct Liveness {
    expected: Arc<Mutex<HashMap<Secret, quinn::Connection>>>,
    accepting: JoinHandle<()>,
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Liveness {
    /// Listens on the address's TCP port. Must be called inside a tokio runtime.
    pub(super) fn listen(addr: SocketAddr) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let expected = Arc::default();
        let accepting = tokio::spawn(accept(TcpListener::from_std(listener)?, Arc::clone(&expected)));
        Ok(Self { expected, accepting })
    }

    /// Expects the TCP connection of an accepted QUIC connection, which may never arrive.
    pub(super) fn expect(&self, connection: &quinn::Connection) {
        let Some(secret) = secret(connection) else { return };
        self.expected.lock().insert(secret, connection.clone());
        let expected = Arc::clone(&self.expected);
        tokio::spawn(async move {
            sleep(INTRODUCED_MAX).await;
            expected.lock().remove(&secret);
        });
    }
}

/// The connecting end: opens the TCP connection beside this QUIC connection, and watches it.
pub(super) async fn attend(connection: quinn::Connection) {
    let Some(secret) = secret(&connection) else { return };
    let peer = connection.remote_address();
    let introduced = timeout(INTRODUCED_MAX, async {
        let mut stream = TcpStream::connect(peer).await?;
        stream.write_all(&secret).await?;
        io::Result::Ok(stream)
    });
    match introduced.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(stream) => watch(stream, connection).await,
        Err(error) => tracing::debug!(%peer, %error, "no TCP beside this link: a crash of the peer is noticed by its silence"),
    }
}

async fn accept(listener: TcpListener, expected: Arc<Mutex<HashMap<Secret, quinn::Connection>>>) {
    let mut strangers = JoinSet::new();
    let mut watching = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if strangers.len() < STRANGERS_MAX => match accepted {
                Ok((stream, _)) => drop(strangers.spawn(introduce(stream, Arc::clone(&expected)))),
                // Most likely for want of file descriptors.
                Err(_) => sleep(LOOK_EVERY).await,
            },
            Some(introduced) = strangers.join_next() => if let Ok(Some((stream, connection))) = introduced {
                watching.spawn(watch(stream, connection));
            },
            Some(_) = watching.join_next() => {}
        }
    }
}

/// Finds the QUIC connection that a TCP connection belongs to.
async fn introduce(
    mut stream: TcpStream,
    expected: Arc<Mutex<HashMap<Secret, quinn::Connection>>>,
) -> Option<(TcpStream, quinn::Connection)> {
    let deadline = Instant::now() + INTRODUCED_MAX;
    let mut secret = [0; 32];
    timeout_at(deadline, stream.read_exact(&mut secret)).await.ok()?.ok()?;
    while Instant::now() < deadline {
        let found = expected.lock().remove(&secret);
        if let Some(connection) = found {
            return Some((stream, connection));
        }
        sleep(LOOK_EVERY).await;
    }
    None
}

/// Ends the QUIC connection when its TCP connection ends.
async fn watch(mut stream: TcpStream, connection: quinn::Connection) {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    if let Err(error) = SockRef::from(&stream).set_tcp_keepalive(&keepalive) {
        tracing::debug!(%error, "no keep-alive beside a link");
    }
    let peer = connection.remote_address();
    tokio::select! {
        read = stream.read_u8() => if read.is_ok() {
            tracing::warn!(%peer, "bytes where there should be none: this peer's crash will be noticed by its silence");
            return;
        },
        _ = connection.closed() => return sleep(LINGER).await,
    }
    if timeout(GRACE, connection.closed()).await.is_err() {
        tracing::info!(%peer, "the peer's process is gone");
        connection.close(GONE.into(), b"your process is gone");
    }
}

fn secret(connection: &quinn::Connection) -> Option<Secret> {
    let mut secret = [0; 32];
    connection.export_keying_material(&mut secret, b"tidemill liveness", b"").ok().map(|()| secret)
}
