//! The state that a replica must find again after a crash.
//!
//! To a disk it is opaque bytes. A group of writes becomes durable as a whole or not at all.

use crate::command::ReplicaId;

/// The contents of a disk as read at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Drawn once, when the storage was created.
    pub id: ReplicaId,
    /// The number of starts with this storage, including this one.
    pub boot: u64,
    pub hard_state: Option<Vec<u8>>,
    pub snapshot: Option<Vec<u8>>,
    /// The entries, in order and without gaps.
    pub entries: Vec<Vec<u8>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Replaces the last one.
    HardState(Vec<u8>),
    /// Replaces all entries from `from` on.
    Entries { from: u64, entries: Vec<Vec<u8>> },
    /// Replaces the last snapshot, and all entries before `entries_from`.
    Snapshot { bytes: Vec<u8>, entries_from: u64 },
}
