//! `GET /admin/backup`: what this coordinator keeps, as an [archive], for operators, while it serves requests.
//!
//! First everything is copied to a directory of its own: each store as of one moment, all of them within the time that the copies take.
//! Then the copies are sent as fast as they are read, and removed.
//!
//! The registry's file is not among them: a copy of it would break promises that it does not remember. Its records are, so that a
//! coordinator that was alone can make them again.

use crate::{base::registry::CACHE_RESET, requests::error::ApiError, serving::gateway::Gateway};
use axum::{
    body::{Body, Bytes},
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use rusqlite::{Connection, OpenFlags};
use serde_json::json;
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_tenancy::{
    archive::{self, Manifest},
    keeper,
    records::Change,
};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
};

/// The directory of the copies in the data directory.
const COPIES: &str = "backup";
/// The records that outlive their registry. Others are about workers, or made anew by themselves.
const KINDS: [&str; 4] = ["alias", CACHE_RESET, "denied", "rollout"];
const PART_BYTES: usize = 256 << 10;
/// The number of parts that wait to be read.
const PARTS_AHEAD: usize = 4;
/// The time for which a part waits to be read: then its reader is taken for gone.
const READ_MAX: Duration = Duration::from_secs(120);
/// The time limit for all of it, as copies take room on the disk.
const BACKUP_MAX: Duration = Duration::from_secs(4 * 3600);
/// The longest wait for a store that another connection writes.
const BUSY_MAX: Duration = Duration::from_secs(30);

pub async fn backup(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    let Some(data) = gateway.data().map(Path::to_owned) else {
        return Err(ApiError::conflict("this coordinator keeps nothing that could be backed up: it runs without --data"));
    };
    let Some(permit) = gateway.only_backup() else {
        return Err(ApiError::conflict("another backup of this coordinator is being written: try again when it has ended"));
    };
    gateway.tenants().check_known()?;
    let failed = |error: io::Error| ApiError::internal(format!("nothing was backed up: {error}"));
    let copies = blocking(move || Copies::begin(data, permit)).await.map_err(failed)?;
    let is_here = gateway.store().copy(copies.dir.join("responses.sqlite")).await.map_err(|error| ApiError::of_store("backup", error))?;
    let left_out = if is_here { Vec::new() } else { vec!["responses and conversations: they are in PostgreSQL".to_owned()] };
    let manifest = manifest(&gateway, left_out);
    let worker = Arc::clone(&gateway);
    let copies = blocking(move || copies.fill(&worker)).await.map_err(failed)?;
    let (to, parts) = mpsc::channel(PARTS_AHEAD);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let parts =
            Parts { to: to.clone(), runtime: runtime.clone(), part: Vec::with_capacity(PART_BYTES), until: Instant::now() + BACKUP_MAX };
        if let Err(error) = copies.send(&manifest, parts) {
            tracing::error!(%error, "a backup broke off");
            let _ = runtime.block_on(to.send_timeout(Err(error), READ_MAX));
        }
    });
    let parts = stream::unfold(parts, |mut parts| async move { Some((parts.recv().await?, parts)) });
    let headers =
        [(header::CONTENT_TYPE, "application/x-tar"), (header::CONTENT_DISPOSITION, "attachment; filename=\"tidemill-backup.tar\"")];
    Ok((headers, Body::from_stream(parts)).into_response())
}

fn manifest(gateway: &Gateway, left_out: Vec<String>) -> Manifest {
    let view = gateway.registry().view();
    Manifest {
        format: archive::FORMAT,
        version: env!("CARGO_PKG_VERSION").into(),
        coordinator: view.coordinator,
        coordinators: (view.voters.len() + view.learners.len()).max(1),
        taken: crate::base::stamp::unix_seconds(),
        left_out,
    }
}

/// The copies of all stores, removed at the end.
struct Copies {
    data: PathBuf,
    dir: PathBuf,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Copies {
    fn drop(&mut self) {
        // A directory that is left is removed by the next backup.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Copies {
    /// Makes the directory anew: a process that died may have left it.
    fn begin(data: PathBuf, permit: OwnedSemaphorePermit) -> io::Result<Self> {
        let dir = data.join(COPIES);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => private_dir(&dir)?,
        }
        Ok(Self { data, dir, _permit: permit })
    }

    /// Copies everything but the responses. Blocks.
    fn fill(self, gateway: &Gateway) -> io::Result<Self> {
        self.copy_tenants(gateway)?;
        self.copy_log("usage")?;
        self.copy_log("audit")?;
        self.copy_database(Path::new("feedback.sqlite"))?;
        self.copy_file(Path::new("revoked.json"))?;
        self.link_batches()?;
        let records = gateway.registry().records(None, None).into_iter().filter(|record| KINDS.contains(&record.kind.as_str()));
        let records: Vec<_> = records.map(|record| json!({"kind": record.kind, "key": record.key, "value": record.value})).collect();
        fs::write(self.dir.join(archive::RECORDS), serde_json::to_vec(&records)?)?;
        Ok(self)
    }

    /// Writes tenants and keys to a file, wherever they are kept.
    fn copy_tenants(&self, gateway: &Gateway) -> io::Result<()> {
        let tenants = gateway.tenants();
        let changes = tenants.all_tenants().into_iter().map(Change::Tenant).chain(tenants.all_keys().into_iter().map(Change::Key));
        let changes: Vec<Change> = changes.collect();
        let keeper = keeper::sqlite::Sqlite::open(&self.dir.join("tenants.sqlite")).map_err(io::Error::other)?;
        keeper.apply_all(&changes).map_err(io::Error::other)
    }

    /// Copies the files of a log, and what is kept beside them.
    fn copy_log(&self, name: &str) -> io::Result<()> {
        let from = self.data.join(name);
        if !from.is_dir() {
            return Ok(());
        }
        private_dir(&self.dir.join(name))?;
        for entry in fs::read_dir(from)? {
            let path = Path::new(name).join(entry?.file_name());
            match path.extension().and_then(std::ffi::OsStr::to_str) {
                Some("sqlite") => self.copy_database(&path)?,
                // Orders to erase that were carried out are carried out again on what was restored.
                Some("json") if !path.ends_with(archive::ERASED) => self.copy_file(&path)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Copies a database that other connections use, as of one moment. Nothing is left in it of what was deleted.
    fn copy_database(&self, name: &Path) -> io::Result<()> {
        let from = self.data.join(name);
        if !from.is_file() {
            return Ok(());
        }
        let copy = || {
            let database = Connection::open_with_flags(&from, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
            database.busy_timeout(BUSY_MAX)?;
            database.execute("VACUUM INTO ?1", [self.dir.join(name).to_string_lossy()])
        };
        copy().map(drop).map_err(|error| io::Error::other(format!("{}: {error}", from.display())))
    }

    /// Copies a small file that is replaced as a whole.
    fn copy_file(&self, name: &Path) -> io::Result<()> {
        match fs::copy(self.data.join(name), self.dir.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Gives the files of batches another name: records are replaced as a whole, and the rest is only appended to. Records come first, so
    /// that none tells of more than there is.
    fn link_batches(&self) -> io::Result<()> {
        for folder in ["batches/files", "batches/batches"] {
            let (from, to) = (self.data.join(folder), self.dir.join(folder));
            if !from.is_dir() {
                continue;
            }
            private_dir(&to)?;
            let is_record = |name: &PathBuf| name.extension().is_some_and(|end| end == "json");
            let link = |wanted: bool| {
                for entry in fs::read_dir(&from)? {
                    let name = PathBuf::from(entry?.file_name());
                    let is_unfinished = name.extension().is_some_and(|end| end == "tmp");
                    if is_unfinished || is_record(&name) != wanted {
                        continue;
                    }
                    match fs::hard_link(from.join(&name), to.join(&name)) {
                        // It was deleted meanwhile.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        linked => linked?,
                    }
                }
                io::Result::Ok(())
            };
            link(true)?;
            link(false)?;
        }
        Ok(())
    }

    /// Writes the archive. Blocks.
    fn send(self, manifest: &Manifest, to: Parts) -> io::Result<()> {
        let mut writer = archive::Writer::new(to, manifest)?;
        let mut names = Vec::new();
        list(&self.dir, Path::new(""), &mut names)?;
        names.sort_unstable();
        for name in names {
            let text = name.to_str().ok_or_else(|| io::Error::other(format!("{} is no text", name.display())))?;
            writer.file(text, &self.dir.join(&name))?;
        }
        writer.finish()?.flush()
    }
}

/// Does what blocks on a thread for it.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// The names of all files under `dir`, which is two levels deep.
fn list(dir: &Path, under: &Path, names: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir.join(under))? {
        let entry = entry?;
        let name = under.join(entry.file_name());
        if entry.file_type()?.is_dir() { list(dir, &name, names)? } else { names.push(name) }
    }
    Ok(())
}

fn private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// A writer whose bytes are an answer's body. It waits for its reader, with a deadline.
struct Parts {
    to: mpsc::Sender<io::Result<Bytes>>,
    runtime: Handle,
    part: Vec<u8>,
    until: Instant,
}

impl Write for Parts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.part.extend_from_slice(bytes);
        if self.part.len() >= PART_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if Instant::now() >= self.until {
            return Err(io::Error::other(format!("it is not read within {} s", BACKUP_MAX.as_secs())));
        }
        let part = std::mem::replace(&mut self.part, Vec::with_capacity(PART_BYTES));
        let sent = self.runtime.block_on(self.to.send_timeout(Ok(part.into()), READ_MAX));
        sent.map_err(|_| io::Error::other("its reader is gone, or too slow"))
    }
}
