//! Links between real endpoints: only members of the cluster are accepted, and a worker registers again after its coordinator is gone.

use quinn::crypto::rustls::QuicClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};
use tidemill_net::{
    identity::{self, Identity},
    link::{Connection, Endpoint, Receiver, Sender},
    uplink::{HEARTBEAT, LinkEvent, Uplink},
};
use tidemill_proto::{
    frame::{Preamble, Version},
    ids::{Epoch, LinkId, RequestId},
    message::{Host, PrefillOutcome, Register, Report, RoleInfo, ToCoordinator, ToWorker, WorkerEvent},
};
use tokio::time::timeout;

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);
const PATIENCE: Duration = Duration::from_secs(20);

/// A worker's first link to its first coordinator.
const FIRST: LinkId = LinkId { coordinator: 0, session: 0 };

fn member() -> (tempfile::TempDir, Identity) {
    let dir = tempfile::tempdir().unwrap();
    identity::create(dir.path()).unwrap();
    let identity = Identity::load(dir.path()).unwrap();
    (dir, identity)
}

fn register() -> Register {
    Register { name: "kvpool-0".into(), host: Host("here".into()), pid: 1, model: None, role: RoleInfo::Kvpool { addr: ANY_PORT } }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_gets_no_stream() {
    let (_home, ours) = member();
    let (_elsewhere, theirs) = member();
    let server = Endpoint::bind(ANY_PORT, &ours).unwrap();
    let addr = server.local_addr();
    let accepting = tokio::spawn(async move { server.listen().accept().await.is_some() });
    let stranger = Endpoint::bind_client(ANY_PORT, &theirs).unwrap();
    let connected = timeout(PATIENCE, stranger.connect(addr)).await.unwrap();
    assert!(connected.is_err(), "a certificate of another CA is refused");
    assert!(!accepting.is_finished(), "the server never saw a member");
    accepting.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_dies_in_its_handshake_holds_up_nobody() {
    let (_home, identity) = member();
    let server = Endpoint::bind(ANY_PORT, &identity).unwrap();
    let addr = server.local_addr();
    let mut listener = server.listen();
    let accepting = tokio::spawn(async move { listener.accept().await.is_some() });
    // Only its first datagram arrives.
    let path = tokio::net::UdpSocket::bind(ANY_PORT).await.unwrap();
    let silent = Endpoint::bind_client(ANY_PORT, &identity).unwrap();
    let path_addr = path.local_addr().unwrap();
    let connecting = tokio::spawn(async move { silent.connect(path_addr).await.is_ok() });
    let mut datagram = [0; 2000];
    let (bytes, _) = path.recv_from(&mut datagram).await.unwrap();
    path.send_to(&datagram[..bytes], addr).await.unwrap();

    let member = Endpoint::bind_client(ANY_PORT, &identity).unwrap();
    let connected = timeout(Duration::from_secs(3), member.connect(addr)).await;
    assert!(connected.is_ok_and(|c| c.is_ok()), "the next one is not held up");
    assert!(accepting.await.unwrap());
    connecting.abort();
}

/// Runs a client's part on a runtime of its own, and then drops that as a kill would: without a farewell.
fn dies_after<T: Send + 'static>(part: impl Future<Output = T> + Send + 'static) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let kept = runtime.block_on(part);
        runtime.shutdown_background();
        // Values whose drop would send a farewell are never dropped.
        std::mem::forget(kept);
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_killed_is_noticed_long_before_its_silence() {
    let (_home, identity) = member();
    let server = Endpoint::bind(ANY_PORT, &identity).unwrap();
    let (addr, home) = (server.local_addr(), _home.path().to_owned());
    let (die, dying) = tokio::sync::oneshot::channel::<()>();
    let client = dies_after(async move {
        let endpoint = Endpoint::bind_client(ANY_PORT, &Identity::load(&home).unwrap()).unwrap();
        let connection = endpoint.connect(addr).await.unwrap();
        dying.await.unwrap();
        (endpoint, connection)
    });
    let mut listener = server.listen();
    let connection = timeout(PATIENCE, listener.accept()).await.unwrap().unwrap();
    // A stranger without the secret cannot end a connection.
    let mut stranger = tokio::net::TcpStream::connect(addr).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stranger, &[7; 32]).await.unwrap();
    drop(stranger);
    assert!(timeout(Duration::from_millis(500), connection.closed()).await.is_err(), "the link lives on");

    die.send(()).unwrap();
    let noticed = timeout(tidemill_net::link::IDLE_MAX / 2, connection.closed()).await;
    assert!(noticed.is_ok_and(|reason| reason.contains("gone")), "by its kernel, not by its silence");
    client.join().unwrap();
}

/// Connects as another release, which offers these versions.
async fn other_release(
    home: &Path,
    addr: SocketAddr,
    offers: &[&str],
) -> Result<(quinn::Endpoint, quinn::Connection), quinn::ConnectionError> {
    let pem = |file: &str| std::fs::read(home.join(file)).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&pem("ca.pem")).unwrap()).unwrap();
    let chain = CertificateDer::pem_slice_iter(&pem("node.pem")).collect::<Result<Vec<_>, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_slice(&pem("node.key")).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
    let mut tls = builder.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
    tls.alpn_protocols = offers.iter().map(|name| name.as_bytes().to_vec()).collect();
    let mut endpoint = quinn::Endpoint::client(ANY_PORT).unwrap();
    endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap())));
    let connection = endpoint.connect(addr, identity::SERVER_NAME).unwrap().await?;
    Ok((endpoint, connection))
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_speak_the_newest_version_that_both_know() {
    let (home, identity) = member();
    let server = Endpoint::bind(ANY_PORT, &identity).unwrap();
    let addr = server.local_addr();
    let mut listener = server.listen();
    for (offers, agreed) in
        [(&["tidemill/14"][..], Version::OLDEST), (&["tidemill/99", "tidemill/16", "tidemill/15", "tidemill/14"], Version::NEWEST)]
    {
        let both = async { tokio::join!(other_release(home.path(), addr, offers), listener.accept()) };
        let (other, link) = timeout(PATIENCE, both).await.unwrap();
        let ((_endpoint, other), link) = (other.unwrap(), link.unwrap());
        assert_eq!(link.version(), agreed);
        let mut opened = Vec::new();
        for version in [agreed.to_string().parse().unwrap(), 99] {
            let (mut send, _) = other.open_bi().await.unwrap();
            send.write_all(&[b"TIDE", &[version, 0, 1, 0][..]].concat()).await.unwrap();
            opened.push(timeout(PATIENCE, link.accept::<ToWorker, ToCoordinator>(Preamble::Control)).await.unwrap().is_ok());
        }
        assert_eq!(opened, [true, false], "streams are of the link's version");
    }

    let accepting = tokio::spawn(async move { listener.accept().await.is_some() });
    for offers in [&["tidemill/99"][..], &[]] {
        let refused = timeout(PATIENCE, other_release(home.path(), addr, offers)).await.unwrap();
        assert!(
            refused.is_err_and(|error| error.to_string().contains("protocol")),
            "a distant release, and those that offered no versions"
        );
    }
    assert!(!accepting.is_finished());
    accepting.abort();
}

/// Accepts a worker and gives it `epoch`.
async fn accept(server: &Endpoint, epoch: u64) -> (Sender<ToWorker>, Receiver<ToCoordinator>) {
    let connection = timeout(PATIENCE, server.listen().accept()).await.unwrap().unwrap();
    let (mut sender, mut receiver) = connection.accept::<ToWorker, ToCoordinator>(Preamble::Control).await.unwrap();
    assert!(matches!(receiver.recv().await.unwrap(), Some(ToCoordinator::Register { register: sent, .. }) if sent == register()));
    sender.send(&ToWorker::Registered { epoch: Epoch(epoch) }).await.unwrap();
    (sender, receiver)
}

async fn next_event(receiver: &mut Receiver<ToCoordinator>) -> (Epoch, WorkerEvent) {
    match timeout(PATIENCE, receiver.recv()).await.unwrap().unwrap().unwrap() {
        ToCoordinator::Event { epoch, event } => (epoch, event),
        other => panic!("{other:?}"),
    }
}

/// Gives up a stream the way a session does whose function returns early: its halves are dropped, and then the connection is closed.
async fn give_up<T>(streams: T, connection: &Connection) {
    drop(streams);
    // The end of the stream reaches the peer before that of the connection.
    tokio::time::sleep(Duration::from_millis(100)).await;
    connection.close("it asked for a cake");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reason_of_an_end_reaches_a_peer_that_reads_or_writes() {
    let (_home, identity) = member();
    let server = Endpoint::bind(ANY_PORT, &identity).unwrap();
    let (addr, mut listener) = (server.local_addr(), server.listen());
    let client = Endpoint::bind_client(ANY_PORT, &identity).unwrap();
    let heartbeat = ToCoordinator::Event { epoch: Epoch(1), event: WorkerEvent::Heartbeat(Box::default()) };
    for (kind, accepted) in [(Preamble::Control, true), (Preamble::Pool, false)] {
        for writes in [false, true] {
            let (connecting, accepting) = tokio::join!(client.connect(addr), listener.accept());
            let (connection, accepting) = (connecting.unwrap(), accepting.unwrap());
            let serving = tokio::spawn(async move {
                let streams = timeout(PATIENCE, accepting.accept::<ToWorker, ToCoordinator>(Preamble::Control)).await.unwrap();
                assert_eq!(streams.is_ok(), accepted);
                give_up(streams, &accepting).await;
            });
            let (mut sender, mut receiver) = connection.open::<ToCoordinator, ToWorker>(kind).await.unwrap();
            let ended = async {
                match writes {
                    true => loop {
                        if let Err(error) = sender.send(&heartbeat).await {
                            break error;
                        }
                    },
                    false => receiver.recv().await.expect_err("a stream that is given up has no orderly end"),
                }
            };
            let error = timeout(PATIENCE, ended).await.unwrap().to_string();
            assert!(error.contains("it asked for a cake"), "{error}");
            serving.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_registers_heartbeats_and_registers_again() {
    let (_home, identity) = member();
    let server = Endpoint::bind(ANY_PORT, &identity).unwrap();
    let endpoint = Endpoint::bind_client(ANY_PORT, &identity).unwrap();
    let (uplink, mut events) = Uplink::start(&endpoint, &[server.local_addr()], register(), (HEARTBEAT, Arc::new(Report::default)));

    let (mut sender, mut receiver) = accept(&server, 1).await;
    assert!(matches!(events.recv().await, Some((FIRST, LinkEvent::Up))));
    assert_eq!(next_event(&mut receiver).await, (Epoch(1), WorkerEvent::Release(env!("CARGO_PKG_VERSION").into())));
    assert_eq!(next_event(&mut receiver).await, (Epoch(1), WorkerEvent::Heartbeat(Box::default())));
    sender.send(&ToWorker::CancelPrefill { request: RequestId(5) }).await.unwrap();
    let Some((FIRST, LinkEvent::Message(message))) = events.recv().await else { panic!("no message") };
    assert_eq!(*message, ToWorker::CancelPrefill { request: RequestId(5) });

    drop((sender, receiver));
    assert!(matches!(timeout(PATIENCE, events.recv()).await.unwrap(), Some((FIRST, LinkEvent::Down))));
    let (_sender, mut receiver) = accept(&server, 2).await;
    let Some((second, LinkEvent::Up)) = timeout(PATIENCE, events.recv()).await.unwrap() else { panic!("no new link") };
    assert_eq!(next_event(&mut receiver).await.0, Epoch(2), "a new registration is a new epoch");

    let prefilled =
        |request| WorkerEvent::Prefilled { request: RequestId(request), outcome: PrefillOutcome::Failed { reason: "test".into() } };
    assert!(uplink.send(FIRST, prefilled(1)) && uplink.send(second, prefilled(2)));
    uplink.broadcast(&WorkerEvent::Leaving);
    let closing = tokio::spawn(uplink.close());
    loop {
        match next_event(&mut receiver).await.1 {
            WorkerEvent::Heartbeat(_) | WorkerEvent::Release(_) => {}
            event if event == prefilled(2) => {}
            event => break assert_eq!(event, WorkerEvent::Leaving, "what the first link was to carry ended with it"),
        }
    }
    assert_eq!(timeout(PATIENCE, receiver.recv()).await.unwrap().unwrap(), None, "what was queued is sent, then the stream ends");
    closing.await.unwrap();
}
