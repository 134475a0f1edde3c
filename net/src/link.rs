//! QUIC endpoints with mTLS, and streams that carry frames.
//!
//! - `liveness`: a TCP connection beside each link, which ends at once with the peer's process
//! - `socket`: the UDP socket, with buffers sized for bulk data and sends sized for the kernel
//! - `tuning`: windows, datagram sizes and other settings of every connection

mod liveness;
mod socket;
mod tuning;

use crate::identity::{self, CertName, Identity, IdentityError, PeerRole, SERVER_NAME};
use liveness::Liveness;
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use rustls::pki_types::CertificateDer;
use serde::{Serialize, de::DeserializeOwned};
use socket::BulkSocket;
use std::{collections::BTreeSet, io, marker::PhantomData, net::SocketAddr, sync::Arc, time::Duration};
use tidemill_proto::frame::{self, FrameError, HEADER_BYTES, Preamble, Version};
use tokio::{sync::watch, task::JoinSet};
use tuning::DATAGRAM_BYTES_MAX;

/// The time after which a silent peer counts as gone. Equal to the time after which a worker without heartbeats is dead.
pub const IDLE_MAX: Duration = Duration::from_secs(5);
/// The maximum number of concurrent handshakes; further peers wait.
const HANDSHAKES_MAX: usize = 64;
/// The number of ports to try for one that is free for both UDP and TCP.
const PORTS_TRIED: u32 = 8;
/// The deadline for connecting and for opening a stream.
pub const CONNECT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot listen on {addr}: {source}")]
    Bind { addr: SocketAddr, source: io::Error },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("cannot connect to {addr}: {reason}")]
    Connect { addr: SocketAddr, reason: String },
    #[error("cannot connect to {addr}: {}", versions())]
    Version { addr: SocketAddr },
    #[error("link to {peer} broke: {reason}")]
    Broken { peer: SocketAddr, reason: String },
    #[error("{peer} is {name}, and not {wanted}: a certificate for another role or name (`tidemill certs` makes them)")]
    Role { peer: SocketAddr, name: CertName, wanted: String },
    #[error("peer {peer}: {source}")]
    Frame { peer: SocketAddr, source: FrameError },
}

/// A bound UDP socket that connects and, unless bound as a client, accepts. Clones share it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    quic: quinn::Endpoint,
    /// The serials of revoked certificates.
    denied: watch::Sender<Denied>,
    /// The certificate that new links present.
    _current: Arc<identity::Current>,
    /// Set for an accepting endpoint, unless its TCP port was taken.
    liveness: Option<Arc<Liveness>>,
}

/// The revoked certificates, as of some version of the list.
#[derive(Debug, Default)]
struct Denied {
    log: u64,
    version: u64,
    serials: BTreeSet<String>,
}

/// Accepts peers at an endpoint. Handshakes run concurrently, so a peer that dies during its handshake delays no other.
#[derive(Debug)]
pub struct Listener {
    endpoint: Endpoint,
    handshakes: JoinSet<Option<Connection>>,
}

impl Listener {
    /// Returns the next peer that completes its handshake, or `None` once the endpoint is closed. Failed handshakes are skipped.
    pub async fn accept(&mut self) -> Option<Connection> {
        loop {
            tokio::select! {
                incoming = self.endpoint.quic.accept(), if self.handshakes.len() < HANDSHAKES_MAX => {
                    self.handshakes.spawn(handshake(incoming?, self.endpoint.clone()));
                }
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(connection)) = done {
                        return Some(connection);
                    }
                }
            }
        }
    }
}

async fn handshake(incoming: quinn::Incoming, endpoint: Endpoint) -> Option<Connection> {
    let peer = incoming.remote_address();
    match tokio::time::timeout(CONNECT_MAX, incoming).await {
        Ok(Ok(connection)) => {
            match endpoint.admit(connection) {
                Ok(connection) => {
                    endpoint.liveness.iter().for_each(|liveness| liveness.expect(&connection.quic));
                    return Some(connection);
                }
                Err(reason) => tracing::warn!(%peer, reason, "refused a connection"),
            }
            return None;
        }
        Ok(Err(error)) if has_other_versions(&error) => tracing::warn!(%peer, error = versions(), "refused a connection"),
        Ok(Err(error)) => tracing::warn!(%peer, %error, "refused a connection"),
        Err(_) => tracing::warn!(%peer, "a handshake took longer than {CONNECT_MAX:?}"),
    }
    None
}

/// A connection to one peer. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    quic: quinn::Connection,
    name: Arc<CertName>,
    version: Version,
}

/// A bidirectional stream of a known kind that a peer opened.
#[derive(Debug)]
pub struct Incoming {
    kind: Preamble,
    send: SendHalf,
    recv: quinn::RecvStream,
    connection: Connection,
}

/// The sending half of a stream, reset if it is dropped before it is finished: quinn would finish it, and what was given up, often just
/// before its connection is closed with the reason, would look like an orderly end.
#[derive(Debug)]
struct SendHalf {
    stream: quinn::SendStream,
    is_finished: bool,
}

impl SendHalf {
    fn new(stream: quinn::SendStream) -> Self {
        Self { stream, is_finished: false }
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        // A reset would discard what a finished stream has not delivered yet.
        if !self.is_finished {
            // An error says that the peer stopped the stream, or that the connection has ended.
            let _ = self.stream.reset(GIVEN_UP.into());
        }
    }
}

/// The sending half of a stream of `M`. A stream that is not finished breaks for the peer when this is dropped.
#[derive(Debug)]
pub struct Sender<M> {
    half: SendHalf,
    connection: Connection,
    kind: PhantomData<fn(M)>,
}

/// The receiving half of a stream of `M`.
#[derive(Debug)]
pub struct Receiver<M> {
    stream: quinn::RecvStream,
    connection: Connection,
    payload: Vec<u8>,
    kind: PhantomData<fn() -> M>,
}

impl Endpoint {
    /// Binds `addr` (port 0 picks one). Must be called inside a tokio runtime.
    pub fn bind(addr: SocketAddr, identity: &Identity) -> Result<Self, LinkError> {
        let current = identity.current();
        let tls = QuicServerConfig::try_from(identity.server(Arc::clone(&current))?).map_err(|e| IdentityError::Mismatch(e.to_string()))?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls));
        server.transport_config(Arc::new(tuning::transport(DATAGRAM_BYTES_MAX)));
        // A port that is free for UDP may be taken for TCP.
        let attempts = if addr.port() == 0 { PORTS_TRIED } else { 1 };
        for attempt in 1..=attempts {
            let endpoint = Self::new(addr, identity, Arc::clone(&current), Some(server.clone()), DATAGRAM_BYTES_MAX)?;
            match Liveness::listen(endpoint.local_addr()) {
                Ok(liveness) => return Ok(Self { liveness: Some(Arc::new(liveness)), ..endpoint }),
                Err(error) if attempt == attempts => {
                    let addr = endpoint.local_addr();
                    tracing::warn!(%addr, %error, "cannot listen at the same TCP port: peers' crashes are noticed by their silence");
                    return Ok(endpoint);
                }
                Err(_) => {}
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Binds `addr` for connecting only. Incoming connections are not answered.
    pub fn bind_client(addr: SocketAddr, identity: &Identity) -> Result<Self, LinkError> {
        Self::bind_client_limited(addr, identity, DATAGRAM_BYTES_MAX)
    }

    /// Like [`Self::bind_client`], with datagrams of at most `datagram_bytes_max` of UDP payload in both directions (at least 1,200,
    /// which QUIC requires; the peer learns the limit). Path MTU discovery chooses a size within it.
    pub fn bind_client_limited(addr: SocketAddr, identity: &Identity, datagram_bytes_max: u16) -> Result<Self, LinkError> {
        Self::new(addr, identity, identity.current(), None, datagram_bytes_max.clamp(tuning::DATAGRAM_BYTES_MIN, DATAGRAM_BYTES_MAX))
    }

    fn new(
        addr: SocketAddr,
        identity: &Identity,
        current: Arc<identity::Current>,
        server: Option<quinn::ServerConfig>,
        datagram_bytes_max: u16,
    ) -> Result<Self, LinkError> {
        let tls = QuicClientConfig::try_from(identity.client(Arc::clone(&current))?).map_err(|e| IdentityError::Mismatch(e.to_string()))?;
        let mut client = quinn::ClientConfig::new(Arc::new(tls));
        client.transport_config(Arc::new(tuning::transport(datagram_bytes_max)));
        let failed = |source| LinkError::Bind { addr, source };
        let socket = BulkSocket::bind(addr, datagram_bytes_max).map_err(failed)?;
        let config = tuning::endpoint(datagram_bytes_max);
        let endpoint = quinn::Endpoint::new_with_abstract_socket(config, server, Arc::new(socket), Arc::new(quinn::TokioRuntime));
        let mut endpoint = endpoint.map_err(failed)?;
        endpoint.set_default_client_config(client);
        tokio::spawn(identity::follow(Arc::downgrade(&current)));
        Ok(Self { quic: endpoint, denied: watch::Sender::default(), _current: current, liveness: None })
    }

    /// Revokes the certificates with these serials (hexadecimal): their links end, and new ones are refused. A `version` of the same `log`
    /// that is older than the last one is ignored. A log that was created anew counts its versions from the start, and certificates revoked
    /// by the previous one stay revoked.
    pub fn deny(&self, log: u64, version: u64, serials: Vec<String>) {
        self.denied.send_if_modified(|denied| {
            let is_same = denied.log == log;
            if is_same && version < denied.version {
                return false;
            }
            let earlier = if is_same { BTreeSet::new() } else { std::mem::take(&mut denied.serials) };
            *denied = Denied { log, version, serials: serials.into_iter().chain(earlier).collect() };
            true
        });
    }

    /// Accepts a connection whose handshake is done, or returns the reason (which the peer is told) if its certificate is invalid or
    /// revoked, or if it speaks no version of the protocol that this release speaks.
    fn admit(&self, quic: quinn::Connection) -> Result<Connection, String> {
        let admitted = || {
            let certificates = quic.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
            let name = CertName::of(certificates.as_deref().and_then(|chain| chain.first()).ok_or("it has no certificate")?)?;
            let mut denied = self.denied.subscribe();
            if denied.borrow_and_update().serials.contains(&name.serial) {
                return Err(revoked(&name));
            }
            let data = quic.handshake_data().and_then(|any| any.downcast::<HandshakeData>().ok());
            let offered = data.and_then(|data| data.protocol).ok_or("it names no version of the protocol")?;
            let version = Version::named(&offered).ok_or("it speaks another version of the protocol")?;
            Ok((Arc::new(name), version, denied))
        };
        let (name, version, mut denied) = admitted().inspect_err(|reason| quic.close(REFUSED.into(), reason.as_bytes()))?;
        let connection = Connection { quic, name, version };
        let (quic, name) = (connection.quic.clone(), Arc::clone(&connection.name));
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = quic.closed() => return,
                    changed = denied.changed() => match changed {
                        Ok(()) if denied.borrow_and_update().serials.contains(&name.serial) => quic.close(REFUSED.into(), revoked(&name).as_bytes()),
                        Ok(()) => {}
                        Err(_) => return,
                    },
                }
            }
        });
        Ok(connection)
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.quic.local_addr().expect("a bound socket has an address")
    }

    /// Starts to accept peers.
    pub fn listen(&self) -> Listener {
        Listener { endpoint: self.clone(), handshakes: JoinSet::new() }
    }

    pub async fn connect(&self, addr: SocketAddr) -> Result<Connection, LinkError> {
        let failed = |reason: String| LinkError::Connect { addr, reason };
        let connecting = self.quic.connect(addr, SERVER_NAME).map_err(|e| failed(e.to_string()))?;
        match tokio::time::timeout(CONNECT_MAX, connecting).await {
            Ok(Ok(connection)) => {
                let connection = self.admit(connection).map_err(failed)?;
                tokio::spawn(liveness::attend(connection.quic.clone()));
                Ok(connection)
            }
            Ok(Err(error)) if has_other_versions(&error) => Err(LinkError::Version { addr }),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed(format!("no answer within {CONNECT_MAX:?}"))),
        }
    }

    /// Closes all connections and waits, up to a bound, until the peers have been told.
    pub async fn close(&self) {
        self.quic.close(ORDERLY.into(), b"closed");
        let _ = tokio::time::timeout(Duration::from_secs(1), self.quic.wait_idle()).await;
    }
}

impl Connection {
    /// The role and name in the peer's certificate.
    pub fn name(&self) -> &CertName {
        &self.name
    }

    /// The version of the protocol on which both ends agreed.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Checks that the peer may act in one of `roles`; otherwise ends the connection with that reason.
    pub fn expect(&self, roles: &[PeerRole]) -> Result<(), LinkError> {
        let wanted = || roles.iter().map(PeerRole::to_string).collect::<Vec<_>>().join(" or ");
        if roles.iter().any(|role| self.name.role.is(*role)) { Ok(()) } else { Err(self.mistaken(wanted())) }
    }

    /// Checks that the peer may act as `role` under `name`; otherwise ends the connection with that reason.
    pub fn expect_name(&self, role: PeerRole, name: &str) -> Result<(), LinkError> {
        if self.name.is(role, Some(name)) { Ok(()) } else { Err(self.mistaken(format!("{role}/{name}"))) }
    }

    fn mistaken(&self, wanted: String) -> LinkError {
        let error = LinkError::Role { peer: self.peer(), name: (*self.name).clone(), wanted };
        self.quic.close(REFUSED.into(), error.to_string().as_bytes());
        error
    }

    pub fn peer(&self) -> SocketAddr {
        self.quic.remote_address()
    }

    /// The UDP payload of the datagrams sent now. Path MTU discovery raises it while larger ones arrive, and lowers it when they stop.
    pub fn datagram_bytes(&self) -> u16 {
        self.quic.stats().path.current_mtu
    }

    /// Opens a bidirectional stream. The preamble is sent at once, so that the peer sees the stream.
    pub async fn open<Out: Serialize, In: DeserializeOwned>(&self, kind: Preamble) -> Result<(Sender<Out>, Receiver<In>), LinkError> {
        let opened = tokio::time::timeout(CONNECT_MAX, self.quic.open_bi()).await;
        let (send, recv) = opened.map_err(|_| self.broken("no stream within the deadline"))?.map_err(|e| self.broken(reason(&e)))?;
        let mut sender = self.sender(SendHalf::new(send));
        sender.write(&kind.bytes(self.version)).await?;
        Ok((sender, self.receiver(recv)))
    }

    /// Accepts the next bidirectional stream that the peer opens.
    pub async fn accept<Out: Serialize, In: DeserializeOwned>(&self, kind: Preamble) -> Result<(Sender<Out>, Receiver<In>), LinkError> {
        Ok(self.accept_one_of(&[kind]).await?.streams())
    }

    /// Accepts the next bidirectional stream that the peer opens, of one of these kinds.
    pub async fn accept_one_of(&self, kinds: &[Preamble]) -> Result<Incoming, LinkError> {
        let (send, mut recv) = self.quic.accept_bi().await.map_err(|e| self.broken(reason(&e)))?;
        let send = SendHalf::new(send);
        let mut bytes = [0; 8];
        let read = tokio::time::timeout(CONNECT_MAX, recv.read_exact(&mut bytes)).await;
        read.map_err(|_| self.broken("no preamble within the deadline"))?.map_err(|e| self.broken(e))?;
        let kind = Preamble::one_of(kinds, self.version, bytes).map_err(|source| self.malformed(source))?;
        Ok(Incoming { kind, send, recv, connection: self.clone() })
    }

    /// Opens a one-way stream for bytes.
    pub async fn open_uni(&self, kind: Preamble) -> Result<quinn::SendStream, LinkError> {
        let mut send = self.quic.open_uni().await.map_err(|e| self.broken(e))?;
        send.write_all(&kind.bytes(self.version)).await.map_err(|e| self.broken(e))?;
        Ok(send)
    }

    /// Accepts the next one-way stream that the peer opens. [`Self::check_preamble`] reads its kind separately, because its first bytes may
    /// not arrive before streams accepted after it are read and flow control admits more.
    pub async fn accept_uni(&self) -> Result<quinn::RecvStream, LinkError> {
        self.quic.accept_uni().await.map_err(|e| self.broken(e))
    }

    /// Checks that a stream is of the expected kind. The error is `Frame` if it is not, and `Broken` if it ended before its preamble.
    pub async fn check_preamble(&self, recv: &mut quinn::RecvStream, kind: Preamble) -> Result<(), LinkError> {
        let mut bytes = [0; 8];
        recv.read_exact(&mut bytes).await.map_err(|e| self.broken(e))?;
        kind.check(self.version, bytes).map_err(|source| self.malformed(source))
    }

    /// Ends the connection and sends the reason to the peer.
    pub fn close(&self, reason: &str) {
        self.quic.close(1u32.into(), reason.as_bytes());
    }

    /// Resolves with the reason when the connection has ended.
    pub async fn closed(&self) -> String {
        reason(&self.quic.closed().await)
    }

    fn broken(&self, reason: impl ToString) -> LinkError {
        LinkError::Broken { peer: self.peer(), reason: reason.to_string() }
    }

    /// The end of the connection, if it has ended or ends soon: a peer that gives up a stream most often closes the connection next, with
    /// the reason.
    async fn end_behind_a_broken_stream(&self) -> Option<quinn::ConnectionError> {
        tokio::time::timeout(CLOSE_AFTER_STREAM_MAX, self.quic.closed()).await.ok()
    }

    /// Names the end of the connection as the reason why a stream broke, or else `error`.
    fn broken_stream(&self, end: Option<quinn::ConnectionError>, error: impl ToString) -> LinkError {
        self.broken(end.map_or_else(|| error.to_string(), |lost| reason(&lost)))
    }

    fn malformed(&self, source: FrameError) -> LinkError {
        LinkError::Frame { peer: self.peer(), source }
    }

    fn sender<M>(&self, half: SendHalf) -> Sender<M> {
        Sender { half, connection: self.clone(), kind: PhantomData }
    }

    fn receiver<M>(&self, stream: quinn::RecvStream) -> Receiver<M> {
        Receiver { stream, connection: self.clone(), payload: Vec::new(), kind: PhantomData }
    }
}

impl Incoming {
    pub fn kind(&self) -> Preamble {
        self.kind
    }

    /// Returns the two halves, once the kind of the stream has determined their messages.
    pub fn streams<Out: Serialize, In: DeserializeOwned>(self) -> (Sender<Out>, Receiver<In>) {
        (self.connection.sender(self.send), self.connection.receiver(self.recv))
    }
}

impl<M: Serialize> Sender<M> {
    pub async fn send(&mut self, message: &M) -> Result<(), LinkError> {
        let bytes = frame::encode(message).map_err(|source| self.connection.malformed(source))?;
        self.write(&bytes).await
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        match self.half.stream.write_all(bytes).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.connection.broken_stream(self.connection.end_behind_a_broken_stream().await, error)),
        }
    }

    /// Finishes the stream and waits, up to the idle timeout, until the peer has received everything.
    pub async fn finish(mut self) {
        self.half.is_finished = true;
        if self.half.stream.finish().is_ok() {
            let _ = self.half.stream.stopped().await;
        }
    }
}

impl<M: DeserializeOwned> Receiver<M> {
    /// Receives the next message, or `None` when the peer finished the stream or closed its endpoint. Not cancel safe: own the receiver in
    /// one task.
    pub async fn recv(&mut self) -> Result<Option<M>, LinkError> {
        let mut header = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut header).await {
            Ok(()) => {}
            Err(quinn::ReadExactError::FinishedEarly(0)) => return Ok(None),
            Err(error) => {
                return match self.connection.end_behind_a_broken_stream().await {
                    Some(lost) if is_orderly(&lost) => Ok(None),
                    end => Err(self.connection.broken_stream(end, error)),
                };
            }
        }
        let bytes = frame::payload_bytes(header).map_err(|source| self.connection.malformed(source))?;
        self.payload.resize(bytes, 0);
        if let Err(error) = self.stream.read_exact(&mut self.payload).await {
            return Err(self.connection.broken_stream(self.connection.end_behind_a_broken_stream().await, error));
        }
        let message = frame::decode(&self.payload).map_err(|source| self.connection.malformed(source))?;
        Ok(Some(message))
    }
}

/// Whether a handshake failed because the ends have no version of the protocol in common.
fn has_other_versions(error: &quinn::ConnectionError) -> bool {
    let code = match error {
        quinn::ConnectionError::TransportError(error) => error.code,
        quinn::ConnectionError::ConnectionClosed(close) => close.error_code,
        _ => return false,
    };
    code == quinn::TransportErrorCode::crypto(NO_APPLICATION_PROTOCOL)
}

fn versions() -> String {
    let spoken: Vec<String> = Version::all().map(|version| version.to_string()).collect();
    format!("it speaks other versions of the protocol than {}: upgrade by one release at a time", spoken.join(" and "))
}

/// TLS's alert for ends that have no application protocol in common (RFC 7301, section 3.2).
const NO_APPLICATION_PROTOCOL: u8 = 120;

fn reason(lost: &quinn::ConnectionError) -> String {
    match lost {
        quinn::ConnectionError::LocallyClosed => "the peer's process is gone, or this one has ended the link".into(),
        lost => lost.to_string(),
    }
}

fn revoked(name: &CertName) -> String {
    format!("the certificate {} of {name} is revoked", name.serial)
}

/// The close code towards a peer whose certificate is not accepted.
const REFUSED: u32 = 3;

/// The code of a stream that was given up before it was finished.
const GIVEN_UP: u32 = 1;

/// The most time by which the end of a connection follows that of a stream whose end it explains.
const CLOSE_AFTER_STREAM_MAX: Duration = Duration::from_secs(1);

/// The close code of an orderly end.
const ORDERLY: u32 = 0;

fn is_orderly(lost: &quinn::ConnectionError) -> bool {
    matches!(lost, quinn::ConnectionError::ApplicationClosed(close) if close.error_code == ORDERLY.into())
}
