//! Tenants and keys in one SQLite file. Several processes of a host may have it open: each sees the changes of the others.

use super::{KeepError, Keeper};
use crate::records::Change;
use parking_lot::Mutex;
use rusqlite::{Connection, params};
use std::{
    fs::{DirBuilder, OpenOptions},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    time::Duration,
};

/// The version of the table below.
const SCHEMA_VERSION: i64 = 1;
/// `kind` orders tenants before keys. `body` is the [`Change`] as JSON.
const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS records (kind INTEGER NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID;
    PRAGMA user_version = 1;";
/// The longest wait for a different process, which writes a record in milliseconds.
const BUSY_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Sqlite(Mutex<State>);

#[derive(Debug)]
struct State {
    database: Connection,
    /// SQLite's counter of other connections' changes, as last seen.
    seen: i64,
}

impl Sqlite {
    /// Opens or creates the file at `path`, readable by this user only.
    pub fn open(path: &Path) -> Result<Self, KeepError> {
        let file = |source| KeepError::File { path: path.to_owned(), source };
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty() && !dir.is_dir()) {
            DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file)?;
        }
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path).map_err(file)?;
        let database = Connection::open(path)?;
        database.busy_timeout(BUSY_MAX)?;
        database.pragma_update(None, "journal_mode", "WAL")?;
        // Keys are few, and one that was handed out must not be lost in a power failure.
        database.pragma_update(None, "synchronous", "FULL")?;
        match database.query_row("PRAGMA user_version", [], |row| row.get(0))? {
            0 => database.execute_batch(&format!("BEGIN IMMEDIATE; {SCHEMA} COMMIT;"))?,
            SCHEMA_VERSION => {}
            found => return Err(KeepError::Version { path: path.to_owned(), found, expected: SCHEMA_VERSION }),
        }
        let seen = data_version(&database)?;
        Ok(Self(Mutex::new(State { database, seen })))
    }

    /// Stores all changes or none.
    pub fn apply_all(&self, changes: &[Change]) -> Result<(), KeepError> {
        let mut state = self.0.lock();
        let transaction = state.database.transaction()?;
        changes.iter().try_for_each(|change| insert(&transaction, change))?;
        Ok(transaction.commit()?)
    }
}

impl Keeper for Sqlite {
    fn load(&self) -> Result<Vec<Change>, KeepError> {
        let state = self.0.lock();
        let mut records = state.database.prepare_cached("SELECT body FROM records ORDER BY kind, id")?;
        let bodies = records.query_map([], |row| row.get::<_, String>(0))?;
        bodies.map(|body| Ok(serde_json::from_str(&body?)?)).collect()
    }

    fn apply(&self, change: &Change) -> Result<(), KeepError> {
        insert(&self.0.lock().database, change)
    }

    fn changed(&self) -> Result<bool, KeepError> {
        let mut state = self.0.lock();
        let now = data_version(&state.database)?;
        Ok(std::mem::replace(&mut state.seen, now) != now)
    }
}

fn insert(database: &Connection, change: &Change) -> Result<(), KeepError> {
    let (kind, id) = match change {
        Change::Tenant(tenant) => (0, &tenant.id),
        Change::Key(key) => (1, &key.id),
    };
    let body = serde_json::to_string(change)?;
    database.execute("INSERT OR REPLACE INTO records (kind, id, body) VALUES (?1, ?2, ?3)", params![kind, id, body])?;
    Ok(())
}

fn data_version(database: &Connection) -> Result<i64, rusqlite::Error> {
    database.query_row("PRAGMA data_version", [], |row| row.get(0))
}
