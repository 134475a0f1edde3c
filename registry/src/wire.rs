//! Messages between coordinators about the registry.

use crate::command::ReplicaId;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wire {
    /// A question from a replica without a group: is there one?
    Hello { id: ReplicaId },
    /// The answer to replica `to`. The id keeps an answer to a lost replica from being taken as one to its successor.
    Welcome { to: ReplicaId, id: ReplicaId, group: Option<u64> },
    /// A request to the leader: accept me as a member, or let me vote.
    Join { id: ReplicaId },
    /// A message of raft.
    Raft { group: u64, bytes: Vec<u8> },
}
