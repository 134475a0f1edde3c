//! The disk: log, hard state and snapshot in one SQLite file, in which a group of writes is a transaction.
//!
//! The log is written ahead (WAL) and synced with every transaction (`synchronous=FULL`): losing a vote or an acknowledgement in a power
//! failure would break raft's promises. Only one process at a time can use the file: it holds the lock from opening to end.

use crate::{
    command::ReplicaId,
    disk::{Found, Write},
};
use rusqlite::{Connection, OptionalExtension, params};
use std::{
    fs::{DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// The version of the tables below.
const SCHEMA_VERSION: i64 = 1;
const SCHEMA: &str = "
    CREATE TABLE entries (number INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
    CREATE TABLE values_ (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    PRAGMA user_version = 1;";

#[derive(Debug)]
pub struct Sqlite {
    connection: Connection,
}

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot make {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot open {path}: {source} (another process may have it open: each coordinator needs a data directory of its own)")]
    Database { path: PathBuf, source: rusqlite::Error },
    #[error("{path} was written by another version (schema {found}, not {SCHEMA_VERSION}): move it away to join the group anew")]
    Version { path: PathBuf, found: i64 },
}

impl Sqlite {
    /// Opens or creates the file at `path`, readable by this user only. Without a path it works in memory, as if the disk were lost at the
    /// end. `fresh` is the id for a new storage.
    pub fn open(path: Option<&Path>, fresh: ReplicaId) -> Result<(Self, Found), FileError> {
        let shown = path.map_or_else(|| PathBuf::from(":memory:"), Path::to_owned);
        if let Some(path) = path {
            let file = |source| FileError::File { path: path.to_owned(), source };
            if let Some(dir) = path.parent().filter(|dir| !dir.is_dir()) {
                DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file)?;
            }
            // SQLite gives its other files the same permissions.
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path).map_err(file)?;
        }
        let database = |source| FileError::Database { path: shown.clone(), source };
        let connection = Connection::open(&shown).map_err(database)?;
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE").map_err(database)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(database)?;
        connection.pragma_update(None, "synchronous", "FULL").map_err(database)?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(database)?;
        match version {
            0 => connection.execute_batch(&format!("BEGIN; {SCHEMA} COMMIT;")).map_err(database)?,
            SCHEMA_VERSION => {}
            found => return Err(FileError::Version { path: shown, found }),
        }
        let mut disk = Self { connection };
        let found = disk.start(fresh).map_err(database)?;
        Ok((disk, found))
    }

    fn start(&mut self, fresh: ReplicaId) -> rusqlite::Result<Found> {
        let number = |bytes: Option<Vec<u8>>| Some(u64::from_le_bytes(bytes?.try_into().ok()?));
        let id = number(self.get("id")?).map_or(fresh, ReplicaId);
        let boot = number(self.get("boot")?).unwrap_or(0) + 1;
        let transaction = self.connection.transaction()?;
        for (name, number) in [("id", id.0), ("boot", boot)] {
            transaction.execute("INSERT OR REPLACE INTO values_ VALUES (?, ?)", params![name, &number.to_le_bytes()[..]])?;
        }
        transaction.commit()?;
        let mut select = self.connection.prepare("SELECT bytes FROM entries ORDER BY number")?;
        let entries = select.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<Vec<Vec<u8>>>>()?;
        Ok(Found { id, boot, hard_state: self.get("hard_state")?, snapshot: self.get("snapshot")?, entries })
    }

    fn get(&self, name: &str) -> rusqlite::Result<Option<Vec<u8>>> {
        self.connection.query_row("SELECT value FROM values_ WHERE name = ?", [name], |row| row.get(0)).optional()
    }

    /// Performs all writes or none, durable on return.
    pub fn write(&mut self, writes: &[Write]) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        let put = |name: &str, value: &[u8]| {
            let mut insert = transaction.prepare_cached("INSERT OR REPLACE INTO values_ VALUES (?, ?)")?;
            insert.execute(params![name, value])
        };
        for write in writes {
            match write {
                Write::HardState(bytes) => drop(put("hard_state", bytes)?),
                Write::Entries { from, entries } => {
                    transaction.prepare_cached("DELETE FROM entries WHERE number >= ?")?.execute([*from as i64])?;
                    let mut insert = transaction.prepare_cached("INSERT INTO entries VALUES (?, ?)")?;
                    for (number, bytes) in (*from..).zip(entries) {
                        insert.execute(params![number as i64, bytes])?;
                    }
                }
                Write::Snapshot { bytes, entries_from } => {
                    put("snapshot", bytes)?;
                    transaction.prepare_cached("DELETE FROM entries WHERE number < ?")?.execute([*entries_from as i64])?;
                }
            }
        }
        transaction.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found_again_and_the_id_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/registry.sqlite");
        let (mut disk, found) = Sqlite::open(Some(&path), ReplicaId(5)).unwrap();
        assert_eq!(found, Found { id: ReplicaId(5), boot: 1, hard_state: None, snapshot: None, entries: vec![] });
        assert!(matches!(Sqlite::open(Some(&path), ReplicaId(6)), Err(FileError::Database { .. })), "one process at a time");
        let entries = |from: u64, bytes: &[u8]| Write::Entries { from, entries: bytes.iter().map(|byte| vec![*byte]).collect() };
        disk.write(&[Write::HardState(vec![1]), entries(1, &[1, 2, 3, 4])]).unwrap();
        disk.write(&[entries(3, &[33]), Write::Snapshot { bytes: vec![9], entries_from: 2 }, Write::HardState(vec![2])]).unwrap();
        drop(disk);
        let (_disk, found) = Sqlite::open(Some(&path), ReplicaId(7)).unwrap();
        let (hard_state, snapshot) = (Some(vec![2]), Some(vec![9]));
        assert_eq!(found, Found { id: ReplicaId(5), boot: 2, hard_state, snapshot, entries: vec![vec![2], vec![33]] });
    }

    #[test]
    fn a_file_of_another_version_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registry.sqlite");
        Connection::open(&path).unwrap().pragma_update(None, "user_version", 9).unwrap();
        assert!(matches!(Sqlite::open(Some(&path), ReplicaId(1)), Err(FileError::Version { found: 9, .. })));
    }
}
