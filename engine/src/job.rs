//! The interface between a scheduler and its engine: jobs, scheduled chunks and actions.

use tidemill_kvpool::client::{FetchId, Part};
use tidemill_proto::{
    block::{BlockKey, Token},
    grammar::Constraint,
    ids::LinkId,
    message::{PoolNode, WorkerEvent},
    pool::Lineage,
};

/// The number of a job at one worker. A role chooses the numbers and never gives one number to two jobs at a time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct JobId(pub u64);

/// Part of a step: `len` tokens of one job, from position `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScheduledChunk {
    pub job: JobId,
    pub start: usize,
    pub len: usize,
}

/// An action that an engine performs for its scheduler.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Asks a node how many of the first of these blocks it holds. Answered by [`Role::matched`](crate::role::Role::matched).
    Match { job: JobId, node: PoolNode, keys: Vec<BlockKey> },
    /// Gets these blocks from the pool. Each is answered by [`Role::fetched`](crate::role::Role::fetched), with its index among the keys of
    /// all parts.
    Fetch { fetch: FetchId, parts: Vec<Part> },
    /// Drops the blocks that this fetch has not delivered yet.
    CancelFetch { fetch: FetchId },
    /// Puts device blocks, with their current bytes, into the pool. They are consecutive blocks of a chain; `lineage` is the first one's.
    Put { node: PoolNode, lineage: Lineage, blocks: Vec<(BlockKey, u32)>, delivery: Delivery },
    /// Compiles a job's grammar, and applies the tokens generated before. Answered by
    /// [`Role::constrained`](crate::role::Role::constrained). From then on, the engine passes the allowed tokens to every draw of the job.
    Constrain { job: JobId, group: u64, constraint: Constraint, generated: Vec<Token> },
    /// Sends an event to a coordinator.
    Send { link: LinkId, event: WorkerEvent },
}

/// The guarantee that an engine gives for a put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Delivery {
    /// The blocks are skipped if the pool does not keep up; there is no answer.
    BestEffort,
    /// This job learns the outcome of the put, in every case, by [`Role::put_done`](crate::role::Role::put_done).
    Acknowledged(JobId),
}
