//! Records in one file of equal places, written in place.
//!
//! ```text
//!   record 0: the manifest      record 1 + n: slot n's block      each RECORD_BYTES long:
//!   ┌────────────┬───────────────────┬─────────┬──────────────────────────────────────┐
//!   │ length u16 │ value, as a frame │ zeroes  │ XXH3 of all before and of its number │
//!   └────────────┴───────────────────┴─────────┴──────────────────────────────────────┘
//! ```
//!
//! Nothing is synced and nothing is logged. A torn, lost or foreign record fails its checksum and counts as absent, which is all that a
//! cache needs: a record is only a claim, and a load checks the block's bytes against it. A log or a tree would only protect data that may
//! be lost.

use super::{CHECKSUM_BYTES, encode};
use serde::{Serialize, de::DeserializeOwned};
use std::{fs::File, io, os::unix::fs::FileExt};
use tidemill_proto::frame;

/// The size of a record: room for a slot's key, checksum and lineage, and a divisor of any page or sector, so that one write tears at most
/// one record.
const RECORD_BYTES: usize = 128;
const LENGTH_BYTES: usize = 2;
const VALUE_BYTES_MAX: usize = RECORD_BYTES - LENGTH_BYTES - CHECKSUM_BYTES;
/// The number of records read at a time when all are read.
const RECORDS_PER_READ: usize = 4096;

/// A file of records, which the caller has locked.
#[derive(Debug)]
pub(super) struct FileRecords(File);

impl FileRecords {
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }

    /// A record's value, or `None` if nothing readable was written there.
    pub(super) fn read<T: DeserializeOwned>(&self, number: u64) -> Option<T> {
        let mut record = [0; RECORD_BYTES];
        self.0.read_exact_at(&mut record, offset(number)).ok()?;
        decode(number, &record)
    }

    /// All records that can be read, from number `first` on, with their numbers.
    pub(super) fn read_from<T: DeserializeOwned>(&self, first: u64) -> impl Iterator<Item = (u64, T)> {
        let batches = (first..).step_by(RECORDS_PER_READ).map_while(|start| {
            let mut batch = vec![0; RECORDS_PER_READ * RECORD_BYTES];
            let read = read_up_to(&self.0, &mut batch, offset(start)).ok().filter(|&read| read > 0)?;
            batch.truncate(read);
            Some((start, batch))
        });
        batches.flat_map(|(start, batch)| {
            let numbered = (start..).zip(batch.chunks_exact(RECORD_BYTES));
            numbered.filter_map(|(number, record)| Some((number, decode(number, record.try_into().ok()?)?))).collect::<Vec<_>>()
        })
    }

    pub(super) fn write<T: Serialize>(&self, number: u64, value: &T) -> io::Result<()> {
        let value = encode(value)?;
        assert!(value.len() <= VALUE_BYTES_MAX, "a value of {} bytes fits no record", value.len());
        let mut record = [0; RECORD_BYTES];
        record[..LENGTH_BYTES].copy_from_slice(&(value.len() as u16).to_le_bytes());
        record[LENGTH_BYTES..][..value.len()].copy_from_slice(&value);
        let checksum = checksum(number, &record);
        record[RECORD_BYTES - CHECKSUM_BYTES..].copy_from_slice(&checksum.to_le_bytes());
        self.0.write_all_at(&record, offset(number))
    }

    pub(super) fn erase(&self, number: u64) -> io::Result<()> {
        self.0.write_all_at(&[0; RECORD_BYTES], offset(number))
    }

    pub(super) fn clear(&self) -> io::Result<()> {
        self.0.set_len(0)
    }
}

fn offset(number: u64) -> u64 {
    number * RECORD_BYTES as u64
}

fn checksum(number: u64, record: &[u8; RECORD_BYTES]) -> u64 {
    super::checksum(number, &record[..RECORD_BYTES - CHECKSUM_BYTES])
}

fn decode<T: DeserializeOwned>(number: u64, record: &[u8; RECORD_BYTES]) -> Option<T> {
    let stored = record.last_chunk::<CHECKSUM_BYTES>().expect("a record is longer than its checksum");
    if u64::from_le_bytes(*stored) != checksum(number, record) {
        return None;
    }
    let length = u16::from_le_bytes([record[0], record[1]]) as usize;
    frame::decode(record[LENGTH_BYTES..].get(..length)?).ok()
}

/// Fills the buffer as far as the file reaches.
fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
