//! Changes to the registry, and their outcomes.

use serde::{Deserialize, Serialize};
use std::fmt;
use tidemill_proto::{
    frame::{self, FrameError, HEADER_BYTES},
    ids::{Epoch, Instance},
    message::Role,
};

/// The version of commands and of the state. A coordinator that meets a newer one stops its registry instead of guessing the meaning.
pub const STATE_VERSION: u16 = 1;

/// The storage of one coordinator. A coordinator that lost its storage returns with a new id: it may have made promises, in votes and
/// acknowledgements, of which it no longer knows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct ReplicaId(pub u64);

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// The number of a record's last change, counted over all records.
pub type Revision = u64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Adds a worker that is not known yet. A known one keeps its epoch.
    Register(NewMember),
    /// Removes a worker that has been away for long.
    Forget {
        epoch: Epoch,
    },
    /// Writes a record. With `expected`, only if that was the last change; 0 for a record that must not exist.
    Put {
        kind: String,
        key: String,
        value: Vec<u8>,
        expected: Option<Revision>,
    },
    Delete {
        kind: String,
        key: String,
        expected: Option<Revision>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewMember {
    pub instance: Instance,
    pub name: String,
    pub role: Role,
}

/// The outcome of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Registered(Epoch),
    Forgotten,
    Put(Revision),
    Deleted,
    Refused(Refusal),
}

/// The reason why a command had no effect. It is the same at all replicas.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    #[error("the registry has {MEMBERS_MAX} workers already")]
    MembersFull,
    #[error("there is no such record")]
    NoRecord,
    #[error("its last change is {found}, and not {expected}: read it again")]
    Revision { found: Revision, expected: Revision },
    #[error("the registry has {RECORDS_MAX} records, or {RECORD_BYTES_MAX} bytes of them, already: delete some")]
    RecordsFull,
    #[error(
        "a kind has 1 to {KIND_BYTES_MAX} bytes, a key 1 to {KEY_BYTES_MAX}, a value at most {VALUE_BYTES_MAX}, a name {NAME_BYTES_MAX}"
    )]
    Size,
    #[error("it was proposed too long ago")]
    Expired,
    #[error("it was proposed by a coordinator that is not in the group")]
    Stranger,
}

pub const MEMBERS_MAX: usize = 4096;
pub const NAME_BYTES_MAX: usize = 256;
pub const RECORDS_MAX: usize = 10_000;
pub const KIND_BYTES_MAX: usize = 32;
pub const KEY_BYTES_MAX: usize = 256;
pub const VALUE_BYTES_MAX: usize = 64 << 10;
/// The maximum size of all records. With the members it stays below the largest frame, so that a snapshot is one message.
pub const RECORD_BYTES_MAX: usize = 2 << 20;

/// A command as it stands in the log, with its proposer, so that a command proposed twice is performed once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    pub proposer: ReplicaId,
    /// The number of the proposer's current start.
    pub boot: u64,
    /// The number of the proposal since that start.
    pub number: u64,
    pub command: Command,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Unreadable {
    #[error("it was written by a newer version ({found}; this one knows {STATE_VERSION}): upgrade this coordinator")]
    Newer { found: u16 },
    #[error("it is not whole: {0}")]
    Malformed(String),
}

impl From<FrameError> for Unreadable {
    fn from(error: FrameError) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// Encodes a value, preceded by the version.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, Unreadable> {
    let frame = frame::encode(value)?;
    Ok([&STATE_VERSION.to_le_bytes()[..], &frame[HEADER_BYTES..]].concat())
}

pub(crate) fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, Unreadable> {
    let (version, payload) = bytes.split_first_chunk().ok_or_else(|| Unreadable::Malformed("it has no version".into()))?;
    match u16::from_le_bytes(*version) {
        found if found > STATE_VERSION => Err(Unreadable::Newer { found }),
        _ => Ok(frame::decode(payload)?),
    }
}
