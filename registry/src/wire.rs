//! What coordinators tell each other about the registry.

use crate::command::ReplicaId;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wire {
    /// From a replica that belongs to no group: is there one?
    Hello { id: ReplicaId },
    /// The answer to replica `to`, so that an answer to one that is lost since is none to its successor.
    Welcome { to: ReplicaId, id: ReplicaId, group: Option<u64> },
    /// To whoever leads: take me in, or make me vote.
    Join { id: ReplicaId },
    /// A message of raft.
    Raft { group: u64, bytes: Vec<u8> },
}
