//! A PostgreSQL server of the tests' own, on a socket in a temporary directory. `make setup-test` installs it.

use std::{
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use tokio_postgres::NoTls;

/// The server refuses to run as root: then it runs as nobody.
const NOBODY: u32 = 65_534;
const BEGINS_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Server {
    dir: tempfile::TempDir,
    process: Mutex<Option<Child>>,
    databases: AtomicU32,
}

impl Server {
    /// One for all tests that run at a time. It ends with the last of them.
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
        let dir = tempfile::tempdir().unwrap();
        if is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let server = Self { dir, process: Mutex::default(), databases: AtomicU32::new(0) };
        let made = server.command("initdb").args(["--auth", "trust", "--username", "tide", "--no-sync", "-D"]).arg(server.data()).output();
        let made = made.unwrap_or_else(|error| panic!("initdb cannot be run ({error}): `make setup-test` installs postgresql"));
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        server.go_on().await;
        server
    }

    /// Starts it, for the first time or again.
    pub(super) async fn go_on(&self) {
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).arg("-k").arg(self.dir.path()).args(["-c", "listen_addresses=", "-c", "fsync=off"]);
        *self.process.lock().unwrap() = Some(command.stderr(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + BEGINS_WITHIN;
        while let Err(error) = tokio_postgres::connect(&self.address("postgres"), NoTls).await.map(drop) {
            assert!(Instant::now() < deadline, "the server does not begin: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// At once, as a machine that fails.
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
        format!("postgres:///{database}?host={}&user=tide", self.dir.path().display())
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

/// Whether this process is root's.
fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&Path::new("/proc/self").metadata().unwrap()) == 0
}

/// Debian keeps each version's programs apart.
fn program(name: &str) -> PathBuf {
    let versions = Path::new("/usr/lib/postgresql").read_dir().into_iter().flatten().flatten();
    let mut found: Vec<_> = versions.map(|version| version.path().join("bin").join(name)).filter(|path| path.is_file()).collect();
    found.sort();
    found.pop().unwrap_or_else(|| name.into())
}
