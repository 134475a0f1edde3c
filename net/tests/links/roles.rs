//! Certificates with roles and names: which roles and names a holder may use, renewal without interruption, and revocation.

use std::{
    io::{self, Write},
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    sync::{Arc, Mutex},
    time::Duration,
};
use tidemill_net::{
    identity::{Identity, PeerRole, issue},
    link::{Connection, Endpoint, LinkError},
};
use tokio::time::{sleep, timeout};

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);
const PATIENCE: Duration = Duration::from_secs(20);

struct Authority(tempfile::TempDir);

impl Authority {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        issue::create_ca(dir.path()).unwrap();
        Self(dir)
    }

    fn identity(&self, name: &str) -> Identity {
        Identity::load(&issue::issue(self.0.path(), name, 1).unwrap().0).unwrap()
    }
}

/// Both ends of a link.
async fn link(server: &Endpoint, client: &Endpoint) -> (Connection, Connection) {
    let mut listener = server.listen();
    let (accepted, connected) = tokio::join!(timeout(PATIENCE, listener.accept()), client.connect(server.local_addr()));
    (accepted.unwrap().unwrap(), connected.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_end_knows_what_the_other_may_act_as() {
    let authority = Authority::new();
    let server = Endpoint::bind(ANY_PORT, &authority.identity("coordinator/c1")).unwrap();
    let client = Endpoint::bind_client(ANY_PORT, &authority.identity("decode/d1")).unwrap();
    let (accepted, connected) = link(&server, &client).await;
    assert_eq!(accepted.name().to_string(), "tidemill://decode/d1");
    assert_eq!(connected.name().to_string(), "tidemill://coordinator/c1");
    connected.expect(&[PeerRole::Coordinator]).unwrap();
    accepted.expect(&[PeerRole::Prefill, PeerRole::Decode]).unwrap();
    accepted.expect_name(PeerRole::Decode, "d1").unwrap();
    let wrong = accepted.expect_name(PeerRole::Decode, "d2").unwrap_err();
    assert!(matches!(&wrong, LinkError::Role { .. }) && wrong.to_string().contains("decode/d2"), "{wrong}");
    let reason = timeout(PATIENCE, connected.closed()).await.unwrap();
    assert!(reason.contains("decode/d2"), "the peer is told: {reason}");

    let (accepted, _connected) = link(&server, &client).await;
    assert!(accepted.expect(&[PeerRole::Coordinator, PeerRole::Kvpool]).is_err(), "a worker's key makes no coordinator and no pool node");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_without_a_role_is_nobodys() {
    let authority = Authority::new();
    let dir = issue::issue(authority.0.path(), "decode/d1", 1).unwrap().0;
    // A certificate of the same CA, as an older version issued them.
    let pem = std::fs::read_to_string(authority.0.path().join("ca.key")).unwrap();
    let ca_key = rcgen::KeyPair::from_pem(&pem).unwrap();
    let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
    ca.distinguished_name.push(rcgen::DnType::CommonName, "Tidemill cluster CA");
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["tidemill".to_owned()]).unwrap();
    let cert = params.signed_by(&key, &rcgen::Issuer::new(ca, &ca_key)).unwrap();
    std::fs::write(dir.join("node.pem"), cert.pem()).unwrap();
    std::fs::write(dir.join("node.key"), key.serialize_pem()).unwrap();
    let error = Identity::load(&dir).unwrap_err().to_string();
    assert!(error.contains("no role") && error.contains("tidemill certs"), "{error}");
}

/// The log of this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Keeps what is logged until the guard is dropped.
    fn kept() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let kept = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || kept.clone()).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    async fn says(&self, text: &str) {
        let wait = async {
            while !String::from_utf8_lossy(&self.0.lock().unwrap()).contains(text) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("nothing that is logged says `{text}`"));
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// All tasks are on this thread, whose log is kept.
#[tokio::test]
async fn a_renewed_certificate_is_taken_up_by_a_running_process_and_links_go_on() {
    let (log, _keeping) = Log::kept();
    let authority = Authority::new();
    let server = Endpoint::bind(ANY_PORT, &authority.identity("coordinator/c1")).unwrap();
    let client = Endpoint::bind_client(ANY_PORT, &authority.identity("kvpool/k1")).unwrap();
    let (first, connected) = link(&server, &client).await;
    let (_, renewed) = issue::issue(authority.0.path(), "kvpool/k1", 1).unwrap();
    assert_ne!(renewed.serial, first.name().serial);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let (accepted, _connected) = link(&server, &client).await;
        if accepted.name().serial == renewed.serial {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "the new certificate is not taken up");
        sleep(Duration::from_millis(200)).await;
    }
    assert!(timeout(Duration::from_millis(50), connected.closed()).await.is_err(), "the first link goes on");

    // A certificate with a different name is not picked up.
    let other = issue::issue(authority.0.path(), "kvpool/k2", 1).unwrap().0;
    for file in ["node.key", "node.pem"] {
        std::fs::copy(other.join(file), authority.0.path().join("kvpool/k1").join(file)).unwrap();
    }
    // SIGHUP has the files read at once, by all endpoints of this process.
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
    log.says("not taken").await;
    let (accepted, _connected) = link(&server, &client).await;
    assert_eq!(accepted.name().name, "k1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_certificate_loses_its_links_and_gets_no_new_ones() {
    let authority = Authority::new();
    let server = Endpoint::bind(ANY_PORT, &authority.identity("coordinator/c1")).unwrap();
    let client = Endpoint::bind_client(ANY_PORT, &authority.identity("decode/d1")).unwrap();
    let other = Endpoint::bind_client(ANY_PORT, &authority.identity("decode/d2")).unwrap();
    let (accepted, connected) = link(&server, &client).await;
    let (kept, of_server) = link(&server, &other).await;
    let serial = accepted.name().serial.clone();
    server.deny(1, 5, vec![serial.clone()]);
    // An older list is ignored.
    server.deny(1, 4, Vec::new());
    let reason = timeout(PATIENCE, connected.closed()).await.unwrap();
    assert!(reason.contains("revoked") && reason.contains(&serial), "{reason}");
    assert!(timeout(Duration::from_millis(50), kept.closed()).await.is_err(), "the other's link goes on");
    let mut listener = server.listen();
    let accepting = tokio::spawn(async move { listener.accept().await });
    // The handshake is done before the server can check.
    if let Ok(connection) = client.connect(server.local_addr()).await {
        timeout(PATIENCE, connection.closed()).await.unwrap();
    }
    assert!(!accepting.is_finished());
    accepting.abort();
    server.deny(1, 6, Vec::new());
    link(&server, &client).await;
    // A connecting end checks as well.
    client.deny(1, 1, vec![of_server.name().serial.clone()]);
    assert!(client.connect(server.local_addr()).await.is_err());
}

#[test]
fn certificates_and_keys_are_for_their_user_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("new");
    issue::create_ca(&ca).unwrap();
    let issued = issue::issue(&ca, "kvpool/k1", 1).unwrap().0;
    for (folder, files) in [(&ca, &["ca.pem", "ca.key"][..]), (&issued, &["ca.pem", "node.pem", "node.key"])] {
        assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700, "{}", folder.display());
        for file in files {
            assert_eq!(folder.join(file).metadata().unwrap().mode() & 0o777, 0o600, "{file}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_made_anew_revokes_at_once_and_takes_nothing_back() {
    let authority = Authority::new();
    let server = Endpoint::bind(ANY_PORT, &authority.identity("coordinator/c1")).unwrap();
    let client = Endpoint::bind_client(ANY_PORT, &authority.identity("decode/d1")).unwrap();
    let other = Endpoint::bind_client(ANY_PORT, &authority.identity("decode/d2")).unwrap();
    let (first, first_connected) = link(&server, &client).await;
    let (second, second_connected) = link(&server, &other).await;
    server.deny(7, 1000, vec![first.name().serial.clone()]);
    timeout(PATIENCE, first_connected.closed()).await.unwrap();
    // Its versions count from the start.
    server.deny(8, 3, vec![second.name().serial.clone()]);
    let reason = timeout(PATIENCE, second_connected.closed()).await.unwrap();
    assert!(reason.contains("revoked"), "{reason}");
    let mut listener = server.listen();
    let accepting = tokio::spawn(async move { listener.accept().await });
    if let Ok(connection) = client.connect(server.local_addr()).await {
        timeout(PATIENCE, connection.closed()).await.unwrap();
    }
    assert!(!accepting.is_finished(), "what the last log had revoked stays revoked");
    accepting.abort();
}
