//! A Redis server of the tests' own. `make setup-test` installs it.

use super::{
    Settings,
    server::{Address, ServerKind},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const BEGINS_WITHIN: Duration = Duration::from_secs(60);
/// Long enough for tests of what is decided, on a machine with other work.
const PATIENT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(crate) struct RedisServer {
    dir: tempfile::TempDir,
    args: Vec<String>,
    process: Option<Child>,
}

impl RedisServer {
    /// A server on a socket, which remembers what it has answered.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut server = Self { dir: tempfile::tempdir().unwrap(), args, process: None };
        server.go_on();
        server
    }

    /// A server with a certificate for `localhost`, at this port.
    pub(crate) fn start_with_tls(port: u16) -> Self {
        let mut server = Self { dir: tempfile::tempdir().unwrap(), args: Vec::new(), process: None };
        certify(server.dir.path());
        let port = port.to_string();
        server.args = ["--tls-port", &port, "--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-auth-clients", "no"]
            .map(str::to_owned)
            .into();
        server.go_on();
        server
    }

    /// A sentinel at this port, which watches one server.
    pub(crate) fn start_sentinel(port: &str, monitor: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("sentinel.conf"), format!("port {port}\nunixsocket r.sock\nsentinel {monitor}\n")).unwrap();
        let mut server = Self { dir, args: vec!["sentinel.conf".into(), "--sentinel".into()], process: None };
        server.go_on();
        server
    }

    /// Starts the server, for the first time or again.
    pub(crate) fn go_on(&mut self) {
        let mut command = Command::new("redis-server");
        let is_sentinel = self.args.iter().any(|arg| arg == "--sentinel");
        if !is_sentinel {
            command.args(["--port", "0", "--unixsocket", "r.sock", "--save", "", "--appendonly", "yes", "--appendfsync", "always"]);
        }
        command.current_dir(self.dir.path()).args(&self.args).stdin(Stdio::null()).stdout(Stdio::null());
        let process = command.spawn().unwrap_or_else(|error| panic!("redis-server cannot be run ({error}): `make setup-test` installs it"));
        self.process = Some(process);
        let deadline = Instant::now() + BEGINS_WITHIN;
        let client = redis::Client::open(self.url()).unwrap();
        while client.get_connection().and_then(|mut connection| redis::cmd("PING").query::<String>(&mut connection)).is_err() {
            assert!(Instant::now() < deadline, "the server does not begin");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a signal, such as `STOP` or `CONT`.
    pub(crate) fn signal(&self, signal: &str) {
        let id = self.process.as_ref().expect("it runs").id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &id]).status().unwrap().success());
    }

    /// Ends the server at once.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis+unix://{}", self.dir.path().join("r.sock").display())
    }

    pub(crate) fn authority(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Settings with which every answer is waited for.
    pub(crate) fn settings(&self) -> Settings {
        settings(&[&self.url()], ServerKind::Single, None)
    }

    pub(crate) fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) fn settings(urls: &[&str], kind: ServerKind, ca: Option<PathBuf>) -> Settings {
    let address = Address { urls: urls.iter().map(|&url| url.to_owned()).collect(), kind, ca, plain: false };
    Settings { wait: PATIENT, ..Settings::new(address.check().unwrap(), "tide".into()) }
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// An authority, and a certificate of it for `localhost`.
fn certify(dir: &Path) {
    let (ca_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let certificate = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &Issuer::new(ca, &ca_key)).unwrap();
    for (name, pem) in [("ca.pem", ca_pem), ("server.pem", certificate.pem()), ("server.key", key.serialize_pem())] {
        fs::write(dir.join(name), pem).unwrap();
    }
}
