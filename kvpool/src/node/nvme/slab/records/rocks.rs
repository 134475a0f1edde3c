//! Records in RocksDB: as many bytes as records have, in the order of their numbers, compressed.
//!
//! ```text
//!   key: the number, big-endian      value: the value, as a frame │ XXH3 of it and of the number
//! ```
//!
//! Writes go to its log, which is not synced: what a process wrote is there after it was killed, and what a machine lost is a miss, as with
//! the file. RocksDB checks its own blocks on every read. A block that is broken hides the records in it, and no others; but RocksDB would
//! stop at it whenever it merges files, and take no more writes. So after a scan that met one, what can be read is copied to a new database.
//! A database that does not open is replaced by an empty one.

use super::{CHECKSUM_BYTES, checksum, encode, remove_dir};
use parking_lot::{RwLock, RwLockReadGuard};
use rocksdb::{BlockBasedOptions, Cache, DB, DBCompressionType, DBRecoveryMode, ErrorKind, LogLevel, Options, ReadOptions, WriteBatch};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::{self, DirBuilder, File},
    io,
    iter::from_fn,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};
use tidemill_proto::frame;

/// A database of records. The caller has locked the file of records.
pub(super) struct RocksRecords {
    /// `None` after it could not be replaced: nothing can be read or written then.
    db: RwLock<Option<DB>>,
    path: PathBuf,
    /// Whether a scan met records that cannot be read.
    damaged: AtomicBool,
    _lock: File,
}

/// Memory for what was written and is in no file yet.
const WRITE_BUFFER_BYTES: usize = 8 << 20;
/// Memory for blocks and indexes that were read. Records are read once, in their order.
const CACHE_BYTES: usize = 4 << 20;
/// The most bytes of its log.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// The number of records that are read at a time when all are read.
const RECORDS_PER_READ: usize = 4096;
/// Numbers that are skipped where a record cannot be read, at first and at most: some part of one of RocksDB's blocks, and of its files.
const SKIPPED: std::ops::RangeInclusive<u64> = 16..=4096;

type Batch = Vec<(u64, Vec<u8>)>;

impl RocksRecords {
    /// Opens the database, or creates an empty one.
    pub(super) fn open(path: PathBuf, lock: File) -> io::Result<Self> {
        // The rest of a replacement that was not finished.
        remove_dir(&beside(&path))?;
        let db = match open(&path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                tracing::error!(%error, "the disk's records cannot be read: its blocks are forgotten");
                remove_dir(&path)?;
                open(&path)?
            }
            opened => opened?,
        };
        Ok(Self { db: RwLock::new(Some(db)), path, damaged: AtomicBool::new(false), _lock: lock })
    }

    pub(super) fn read<T: DeserializeOwned>(&self, number: u64) -> Option<T> {
        let db = self.db.read();
        let value = db.as_ref()?.get_pinned(key(number)).ok()??;
        decode(number, &value)
    }

    pub(super) fn read_from<T: DeserializeOwned>(&self, first: u64) -> impl Iterator<Item = (u64, T)> {
        self.batches(first).flat_map(|batch| {
            let decoded = batch.into_iter().filter_map(|(number, value)| Some((number, decode(number, &value)?)));
            decoded.collect::<Vec<_>>()
        })
    }

    /// All records from a number on. After the last one, if any could not be read, they are copied to a new database.
    fn batches(&self, first: u64) -> impl Iterator<Item = Batch> {
        let mut next = Some(first);
        from_fn(move || {
            let (batch, rest) = self.batch(next?);
            next = rest;
            if next.is_none() && self.damaged.swap(false, Relaxed) {
                self.mend();
            }
            Some(batch)
        })
    }

    /// The records from a number on, as far as a batch goes, and where the next one begins, unless there is none.
    fn batch(&self, from: u64) -> (Batch, Option<u64>) {
        let db = self.db.read();
        let Some(db) = &*db else { return (Batch::new(), None) };
        let mut options = ReadOptions::default();
        options.set_verify_checksums(true);
        options.fill_cache(false);
        let (mut batch, mut next, mut skipped) = (Batch::with_capacity(RECORDS_PER_READ), from, *SKIPPED.start());
        let mut records = db.raw_iterator_opt(options);
        records.seek(key(next));
        while batch.len() < RECORDS_PER_READ {
            if let Some((key, value)) = records.item() {
                // Keys of another length are not this store's.
                let Ok(bytes) = key.try_into() else {
                    records.next();
                    continue;
                };
                let number = u64::from_be_bytes(bytes);
                batch.push((number, value.to_vec()));
                (next, skipped) = (number.saturating_add(1), *SKIPPED.start());
                records.next();
                continue;
            }
            if records.status().is_ok() {
                return (batch, None);
            }
            self.damaged.store(true, Relaxed);
            let Some(beyond) = next.checked_add(skipped) else { return (batch, None) };
            (next, skipped) = (beyond, (skipped * 2).min(*SKIPPED.end()));
            records.seek(key(next));
        }
        (batch, Some(next))
    }

    /// Replaces the database by one of all records that can be read.
    fn mend(&self) {
        tracing::error!("some of the disk's records cannot be read: their blocks are forgotten");
        if let Err(error) = self.replace(true) {
            tracing::error!(%error, "the disk's records cannot be copied");
        }
    }

    pub(super) fn write<T: Serialize>(&self, records: impl IntoIterator<Item = (u64, T)>) -> io::Result<()> {
        let mut batch = WriteBatch::default();
        for (number, value) in records {
            let mut value = encode(&value)?;
            value.extend(checksum(number, &value).to_le_bytes());
            batch.put(key(number), value);
        }
        with(&self.db.read(), |db| db.write(batch))
    }

    pub(super) fn erase(&self, number: u64) -> io::Result<()> {
        with(&self.db.read(), |db| db.delete(key(number)))
    }

    pub(super) fn clear(&self) -> io::Result<()> {
        self.replace(false)
    }

    /// Replaces the database by a new one, with the readable records or with none.
    fn replace(&self, copy: bool) -> io::Result<()> {
        let new_path = beside(&self.path);
        remove_dir(&new_path)?;
        let new = open(&new_path)?;
        if copy {
            let mut next = Some(0);
            while let Some(from) = next {
                let records;
                (records, next) = self.batch(from);
                let mut batch = WriteBatch::default();
                records.into_iter().for_each(|(number, value)| batch.put(key(number), value));
                new.write(batch).map_err(failed)?;
            }
            self.damaged.store(false, Relaxed);
        }
        drop(new);
        let db = &mut *self.db.write();
        drop(db.take());
        remove_dir(&self.path)?;
        fs::rename(&new_path, &self.path)?;
        *db = Some(open(&self.path)?);
        Ok(())
    }
}

impl std::fmt::Debug for RocksRecords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RocksRecords").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The place of a database that is to replace this one.
fn beside(path: &Path) -> PathBuf {
    path.with_extension("rocksdb.new")
}

fn open(path: &Path) -> io::Result<DB> {
    // RocksDB's own files can be read by anybody who can reach them.
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(&Cache::new_lru_cache(CACHE_BYTES));
    table.set_cache_index_and_filter_blocks(true);
    let mut options = Options::default();
    options.create_if_missing(true);
    options.set_block_based_table_factory(&table);
    options.set_compression_type(DBCompressionType::Lz4);
    options.set_write_buffer_size(WRITE_BUFFER_BYTES);
    options.set_max_total_wal_size(LOG_BYTES_MAX);
    options.set_wal_recovery_mode(DBRecoveryMode::SkipAnyCorruptedRecord);
    options.set_max_background_jobs(2);
    // Its log, beyond the errors that it returns, is kept in small files.
    options.set_log_level(LogLevel::Error);
    options.set_max_log_file_size(1 << 20);
    options.set_keep_log_file_num(2);
    options.set_stats_dump_period_sec(0);
    DB::open(&options, path).map_err(failed)
}

/// Calls `what` with the database, if there is one.
fn with<T>(db: &RwLockReadGuard<'_, Option<DB>>, what: impl FnOnce(&DB) -> Result<T, rocksdb::Error>) -> io::Result<T> {
    let db = db.as_ref().ok_or_else(|| io::Error::other("it could not be replaced"))?;
    what(db).map_err(failed)
}

fn failed(error: rocksdb::Error) -> io::Error {
    let is_broken = matches!(error.kind(), ErrorKind::Corruption | ErrorKind::NotSupported | ErrorKind::InvalidArgument);
    io::Error::new(if is_broken { io::ErrorKind::InvalidData } else { io::ErrorKind::Other }, error)
}

fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

fn decode<T: DeserializeOwned>(number: u64, record: &[u8]) -> Option<T> {
    let (value, stored) = record.split_last_chunk::<CHECKSUM_BYTES>()?;
    if u64::from_le_bytes(*stored) != checksum(number, value) {
        return None;
    }
    frame::decode(value).ok()
}
