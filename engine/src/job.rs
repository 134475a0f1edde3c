//! What a scheduler and its engine say to each other: jobs, scheduled chunks and actions.

use tidemill_kvpool::client::{FetchId, Part};
use tidemill_proto::{
    block::{BlockKey, Token},
    grammar::Constraint,
    ids::LinkId,
    message::{PoolNode, WorkerEvent},
    pool::Lineage,
};

/// One job at one worker. A role chooses the numbers and never gives one to two jobs at a time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct JobId(pub u64);

/// Part of a step: `len` tokens of one job, from position `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScheduledChunk {
    pub job: JobId,
    pub start: usize,
    pub len: usize,
}

/// What an engine does for its scheduler.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Ask a node how many of the first of these blocks it holds. Answered by [`Role::matched`](crate::role::Role::matched).
    Match { job: JobId, node: PoolNode, keys: Vec<BlockKey> },
    /// Get these blocks from the pool. Each is answered by [`Role::fetched`](crate::role::Role::fetched), with its place among the keys of
    /// all parts.
    Fetch { fetch: FetchId, parts: Vec<Part> },
    /// Drop what this fetch has not delivered yet.
    CancelFetch { fetch: FetchId },
    /// Put device blocks, with the bytes they hold now, into the pool. They follow each other in a chain; `lineage` is the first one's.
    Put { node: PoolNode, lineage: Lineage, blocks: Vec<(BlockKey, u32)>, delivery: Delivery },
    /// Compile a job's grammar, and go through the tokens generated before. Answered by [`Role::constrained`](crate::role::Role::constrained).
    /// From then on the engine tells every draw of the job what is allowed.
    Constrain { job: JobId, group: u64, constraint: Constraint, generated: Vec<Token> },
    /// Tell a coordinator.
    Send { link: LinkId, event: WorkerEvent },
}

/// What an engine owes to a put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Delivery {
    /// Skip the blocks when the pool does not keep up; no answer.
    BestEffort,
    /// Tell this job how the put ended, in every case, by [`Role::put_done`](crate::role::Role::put_done).
    Acknowledged(JobId),
}
