//! Records of the slots' content: values by number, of which number 0 is the manifest and `1 + n` the block in slot `n`.
//!
//! - [`file`]: a file of equal records; the default
//! - `rocks`: RocksDB, with the feature `rocksdb`
//!
//! Both keep the same promises, which [`tests`] holds them to. Every record has a checksum of its own, which covers its number: what is torn,
//! lost, flipped or misplaced counts as absent. Nothing is synced. One process has them open at a time, whichever store it uses, by a lock
//! on the file `records`. A store that is opened removes what the other one left, since that describes slots as they were.

mod file;
#[cfg(feature = "rocksdb")]
mod rocks;
#[cfg(test)]
mod tests;

use super::RecordStore;
use file::FileRecords;
#[cfg(feature = "rocksdb")]
use rocks::RocksRecords;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};
use tidemill_proto::frame;
use twox_hash::XxHash3_64;

/// The name of the file of records, which is also what is locked, whichever store has them.
const FILE: &str = "records";
/// The name of RocksDB's directory.
const ROCKS: &str = "records.rocksdb";
const CHECKSUM_BYTES: usize = 8;

/// A disk's records, open in one process at a time.
#[derive(Debug)]
pub(super) struct Records(Store);

#[derive(Debug)]
enum Store {
    File(FileRecords),
    #[cfg(feature = "rocksdb")]
    Rocks(RocksRecords),
}

impl Records {
    /// Opens the records in `dir`, or creates an empty store. `WouldBlock` if another process has them open.
    pub(super) fn open(dir: &Path, store: RecordStore) -> io::Result<Self> {
        let file = locked(&dir.join(FILE))?;
        match store {
            RecordStore::File => {
                remove_dir(&dir.join(ROCKS))?;
                Ok(Self(Store::File(FileRecords::new(file))))
            }
            #[cfg(feature = "rocksdb")]
            RecordStore::RocksDb => {
                file.set_len(0)?;
                Ok(Self(Store::Rocks(RocksRecords::open(dir.join(ROCKS), file)?)))
            }
        }
    }

    /// A record's value, or `None` if nothing readable was written there.
    pub(super) fn read<T: DeserializeOwned>(&self, number: u64) -> Option<T> {
        match &self.0 {
            Store::File(file) => file.read(number),
            #[cfg(feature = "rocksdb")]
            Store::Rocks(rocks) => rocks.read(number),
        }
    }

    /// All records that can be read, from number `first` on, with their numbers, in their order.
    pub(super) fn read_from<T: DeserializeOwned + 'static>(&self, first: u64) -> Box<dyn Iterator<Item = (u64, T)> + '_> {
        match &self.0 {
            Store::File(file) => Box::new(file.read_from(first)),
            #[cfg(feature = "rocksdb")]
            Store::Rocks(rocks) => Box::new(rocks.read_from(first)),
        }
    }

    /// Writes records over what was there.
    pub(super) fn write<T: Serialize>(&self, records: impl IntoIterator<Item = (u64, T)>) -> io::Result<()> {
        match &self.0 {
            Store::File(file) => records.into_iter().try_for_each(|(number, value)| file.write(number, &value)),
            #[cfg(feature = "rocksdb")]
            Store::Rocks(rocks) => rocks.write(records),
        }
    }

    pub(super) fn erase(&self, number: u64) -> io::Result<()> {
        match &self.0 {
            Store::File(file) => file.erase(number),
            #[cfg(feature = "rocksdb")]
            Store::Rocks(rocks) => rocks.erase(number),
        }
    }

    pub(super) fn clear(&self) -> io::Result<()> {
        match &self.0 {
            Store::File(file) => file.clear(),
            #[cfg(feature = "rocksdb")]
            Store::Rocks(rocks) => rocks.clear(),
        }
    }
}

/// The file of records, empty if there is none, and no other process's.
fn locked(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(io::Error::new(io::ErrorKind::WouldBlock, "another process uses it")),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn remove_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A value's bytes.
fn encode<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    Ok(frame::encode(value).map_err(io::Error::other)?.split_off(frame::HEADER_BYTES))
}

/// The checksum of a record, seeded with its number, so that a record in the wrong place is not accepted.
fn checksum(number: u64, bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(number, bytes)
}
