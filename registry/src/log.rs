//! The log as raft reads it: in memory, with the same contents as the disk.
//!
//! ```text
//!   base            snapshot                 last
//!    ├── entries ──────┼────── entries ────────┤        a follower behind the base gets the snapshot,
//!    (index, term      the state, encoded               one behind the snapshot only the entries that it lacks
//!     known only)
//! ```

use crate::disk::Found;
use prost::Message as _;
use raft::{
    Error, GetEntriesContext, RaftState, Storage, StorageError,
    eraftpb::{ConfState, Entry, HardState, Snapshot},
};
use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) hard_state: HardState,
    pub(crate) conf: ConfState,
    pub(crate) snapshot: Snapshot,
    /// Index and term of the entry before the first.
    base: (u64, u64),
    entries: VecDeque<Entry>,
}

/// Whether these are voters and learners that raft accepts: each of them once, and not in the middle of a change.
pub(crate) fn is_group(conf: &ConfState) -> bool {
    let is_changing = !conf.voters_outgoing.is_empty() || !conf.learners_next.is_empty() || conf.auto_leave;
    let mut ids: Vec<_> = conf.voters.iter().chain(&conf.learners).collect();
    ids.sort_unstable();
    !is_changing && !conf.voters.is_empty() && *ids[0] != 0 && ids.windows(2).all(|pair| pair[0] < pair[1])
}

impl Log {
    /// Builds the log from the disk's contents. The error names the part that is broken.
    pub(crate) fn read(found: &Found) -> Result<Self, String> {
        let broken = |what: &str, error: prost::DecodeError| format!("{what} is broken: {error}");
        let snapshot = found.snapshot.as_deref().map_or(Ok(Snapshot::default()), Snapshot::decode);
        let snapshot = snapshot.map_err(|error| broken("the snapshot", error))?;
        let hard_state = found.hard_state.as_deref().map_or(Ok(HardState::default()), HardState::decode);
        let hard_state = hard_state.map_err(|error| broken("the hard state", error))?;
        let mut log = Self { hard_state, ..Self::default() };
        let meta = snapshot.get_metadata();
        log.base = (meta.index, meta.term);
        log.conf = meta.get_conf_state().clone();
        let of_snapshot = meta.index;
        if of_snapshot > 0 && !is_group(&log.conf) {
            return Err("the snapshot's group is none".into());
        }
        log.snapshot = snapshot;
        for (place, bytes) in found.entries.iter().enumerate() {
            let entry = Entry::decode(&bytes[..]).map_err(|error| broken("an entry", error))?;
            if place == 0 && entry.index <= of_snapshot {
                log.base = (entry.index, entry.term);
            } else if entry.index == log.last() + 1 {
                log.entries.push_back(entry);
            } else {
                return Err(format!("entry {} follows entry {}", entry.index, log.last()));
            }
        }
        // Raft puts the hard state's term into its answers, and panics if it is zero.
        let latest = log.entries.iter().map(|entry| entry.term).fold(log.base.1, u64::max);
        if log.hard_state.term < latest {
            return Err(format!("an entry of term {latest} does not go together with a hard state of term {}", log.hard_state.term));
        }
        if log.last() < of_snapshot || !(of_snapshot..=log.last()).contains(&log.hard_state.commit) {
            let commit = log.hard_state.commit;
            return Err(format!("snapshot {of_snapshot}, commit {commit} and last entry {} do not go together", log.last()));
        }
        Ok(log)
    }

    pub(crate) fn last(&self) -> u64 {
        self.base.0 + self.entries.len() as u64
    }

    /// The index of the first entry that is kept.
    pub(crate) fn first(&self) -> u64 {
        self.base.0 + 1
    }

    pub(crate) fn get(&self, index: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(index.checked_sub(self.first())?).ok()?)
    }

    pub(crate) fn term_of(&self, index: u64) -> Option<u64> {
        if index == self.base.0 { Some(self.base.1) } else { self.get(index).map(|entry| entry.term) }
    }

    /// Appends entries, replacing all from the first of these on.
    pub(crate) fn append(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first() else { return };
        let kept = first.index.checked_sub(self.first()).expect("raft appends after what is compacted");
        self.entries.truncate(usize::try_from(kept).expect("a log fits memory"));
        assert_eq!(first.index, self.last() + 1, "raft appends without gaps");
        self.entries.extend(entries.iter().cloned());
    }

    /// Replaces everything by a leader's snapshot.
    pub(crate) fn restore(&mut self, snapshot: Snapshot) {
        let meta = snapshot.get_metadata();
        self.base = (meta.index, meta.term);
        self.conf = meta.get_conf_state().clone();
        self.entries.clear();
        self.hard_state.commit = self.hard_state.commit.max(meta.index);
        self.snapshot = snapshot;
    }

    /// Replaces the snapshot by a new one of the state at `index`, and keeps `kept` of the entries before it.
    pub(crate) fn compact(&mut self, index: u64, data: Vec<u8>, kept: u64) {
        let term = self.term_of(index).expect("what is applied is in the log");
        let meta = self.snapshot.mut_metadata();
        (meta.index, meta.term) = (index, term);
        *meta.mut_conf_state() = self.conf.clone();
        self.snapshot.data = data;
        let base = index.saturating_sub(kept).max(self.base.0);
        self.base = (base, self.term_of(base).expect("between base and index"));
        let behind = self.entries.partition_point(|entry| entry.index <= base);
        self.entries.drain(..behind);
    }

    /// The index of the entry of which only the term is kept.
    pub(crate) fn base(&self) -> u64 {
        self.base.0
    }
}

impl Storage for Log {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState { hard_state: self.hard_state.clone(), conf_state: self.conf.clone() })
    }

    fn entries(&self, low: u64, high: u64, max_size: impl Into<Option<u64>>, _: GetEntriesContext) -> raft::Result<Vec<Entry>> {
        if low < self.first() {
            return Err(Error::Store(StorageError::Compacted));
        }
        if high > self.last() + 1 {
            return Err(Error::Store(StorageError::Unavailable));
        }
        let (max, mut bytes) = (max_size.into().unwrap_or(u64::MAX), 0u64);
        let mut taken = Vec::new();
        for entry in (low..high).filter_map(|index| self.get(index)) {
            bytes = bytes.saturating_add(entry.encoded_len() as u64);
            if bytes > max && !taken.is_empty() {
                break;
            }
            taken.push(entry.clone());
        }
        Ok(taken)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        let missing = if index < self.base.0 { StorageError::Compacted } else { StorageError::Unavailable };
        self.term_of(index).ok_or(Error::Store(missing))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.first())
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, request_index: u64, _to: u64) -> raft::Result<Snapshot> {
        if self.snapshot.get_metadata().index < request_index {
            return Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable));
        }
        Ok(self.snapshot.clone())
    }
}
