//! What a replica must find again after a crash.
//!
//! All of it is opaque bytes to a disk. A group of writes is durable whole, or none of it is.

use crate::command::ReplicaId;

/// As read at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Drawn when the storage was made, never again.
    pub id: ReplicaId,
    /// Counts the starts with this storage: this one is higher than any before.
    pub boot: u64,
    pub hard_state: Option<Vec<u8>>,
    pub snapshot: Option<Vec<u8>>,
    /// In order, without gaps.
    pub entries: Vec<Vec<u8>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// In place of the last one.
    HardState(Vec<u8>),
    /// In place of all entries from `from` on.
    Entries { from: u64, entries: Vec<Vec<u8>> },
    /// In place of the last one, and of all entries before `entries_from`.
    Snapshot { bytes: Vec<u8>, entries_from: u64 },
}
