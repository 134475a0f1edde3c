//! A PostgreSQL server of the tests' own, on a socket in a temporary directory. `make setup-test` installs it.

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use std::{
    fs,
    net::TcpListener,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use tokio_postgres::NoTls;

/// The user `nobody`: the server refuses to run as root.
const NOBODY: u32 = 65_534;
/// A user whose connections over TCP need a password.
const WITH_PASSWORD: &str = "tide_by_password";
const BEGINS_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Server {
    dir: tempfile::TempDir,
    /// The TCP port on this machine's own address, besides its socket.
    port: Option<u16>,
    has_tls: bool,
    process: Mutex<Option<Child>>,
    databases: AtomicU32,
}

impl Server {
    /// The server shared by all concurrent tests. It ends with the last of them.
    pub(super) async fn shared() -> Arc<Self> {
        static SHARED: tokio::sync::Mutex<Weak<Server>> = tokio::sync::Mutex::const_new(Weak::new());
        let mut shared = SHARED.lock().await;
        match shared.upgrade() {
            Some(server) => server,
            None => {
                let server = Arc::new(Self::start().await);
                *shared = Arc::downgrade(&server);
                server
            }
        }
    }

    pub(super) async fn start() -> Self {
        Self::start_at(None, false).await
    }

    /// Starts a server that is reached over TCP, with a certificate for `localhost` or without one.
    pub(super) async fn start_over_tcp(has_tls: bool) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self::start_at(Some(free), has_tls).await
    }

    async fn start_at(port: Option<u16>, has_tls: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        if is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        if has_tls {
            certify(dir.path());
        }
        let server = Self { dir, port, has_tls, process: Mutex::default(), databases: AtomicU32::new(0) };
        let made = server.command("initdb").args(["--auth", "trust", "--username", "tide", "--no-sync", "-D"]).arg(server.data()).output();
        let made = made.unwrap_or_else(|error| panic!("initdb cannot be run ({error}): `make setup-test` installs postgresql"));
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let rules = server.data().join("pg_hba.conf");
        let trusting = fs::read_to_string(&rules).unwrap();
        fs::write(&rules, format!("host all {WITH_PASSWORD} all scram-sha-256\n{trusting}")).unwrap();
        server.go_on().await;
        server
    }

    /// Starts the server, for the first time or again.
    pub(super) async fn go_on(&self) {
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).arg("-k").arg(self.dir.path()).args(["-c", "fsync=off"]);
        match self.port {
            Some(port) => command.args(["-c", "listen_addresses=127.0.0.1", "-p", &port.to_string()]),
            None => command.args(["-c", "listen_addresses="]),
        };
        if self.has_tls {
            for (setting, file) in [("ssl_cert_file", "server.pem"), ("ssl_key_file", "server.key")] {
                command.arg("-c").arg(format!("{setting}={}", self.dir.path().join(file).display()));
            }
            command.args(["-c", "ssl=on"]);
        }
        *self.process.lock().unwrap() = Some(command.stderr(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + BEGINS_WITHIN;
        while let Err(error) = tokio_postgres::connect(&self.address("postgres"), NoTls).await.map(drop) {
            assert!(Instant::now() < deadline, "the server does not begin: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Stops the server at once, like a crash of the machine.
    pub(super) fn stop(&self) {
        if let Some(mut process) = self.process.lock().unwrap().take() {
            let stopped = self.command("pg_ctl").args(["stop", "-m", "immediate", "-D"]).arg(self.data()).output();
            assert!(stopped.is_ok_and(|stopped| stopped.status.success()), "the server does not end");
            process.wait().unwrap();
        }
    }

    /// The address of a new, empty database.
    pub(super) async fn database(&self) -> String {
        let name = format!("tide_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        let (client, connection) = tokio_postgres::connect(&self.address("postgres"), NoTls).await.unwrap();
        let connection = tokio::spawn(connection);
        client.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        drop(client);
        connection.await.unwrap().unwrap();
        self.address(&name)
    }

    fn address(&self, database: &str) -> String {
        let port = self.port.map_or(String::new(), |port| format!("&port={port}"));
        format!("postgres:///{database}?host={}&user=tide{port}", self.dir.path().display())
    }

    /// The address of a new, empty database over TCP, at this name of the machine.
    pub(super) async fn database_over_tcp(&self, host: &str) -> String {
        let own = self.database().await;
        let name = own.strip_prefix("postgres:///").and_then(|rest| rest.split_once('?')).expect("it is ours").0;
        format!("postgres://tide@{host}:{}/{name}", self.port.expect("it listens"))
    }

    /// The address over TCP of a new database, whose owner needs a password.
    pub(super) async fn database_with_password(&self, host: &str) -> String {
        let (client, connection) = tokio_postgres::connect(&self.address("postgres"), NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute(&format!("CREATE USER {WITH_PASSWORD} SUPERUSER PASSWORD 'secret'")).await.unwrap();
        self.database_over_tcp(host).await.replace("tide@", &format!("{WITH_PASSWORD}:secret@"))
    }

    /// The file of the authority that issued its certificate.
    pub(super) fn authority(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(program(name));
        command.current_dir(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// An authority, and a certificate of it for `localhost`.
fn certify(dir: &Path) {
    let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let certificate = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &Issuer::new(ca, &ca_key)).unwrap();
    for (name, pem) in [("ca.pem", ca_pem), ("server.pem", certificate.pem()), ("server.key", key.serialize_pem())] {
        let path = dir.join(name);
        fs::write(&path, pem).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        if is_root() {
            chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }
}

/// Whether this process runs as root.
fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&Path::new("/proc/self").metadata().unwrap()) == 0
}

/// Finds a program: Debian keeps each version's programs in a directory of their own.
fn program(name: &str) -> PathBuf {
    let versions = Path::new("/usr/lib/postgresql").read_dir().into_iter().flatten().flatten();
    let mut found: Vec<_> = versions.map(|version| version.path().join("bin").join(name)).filter(|path| path.is_file()).collect();
    found.sort();
    found.pop().unwrap_or_else(|| name.into())
}
