//! The placement of a sequence: one pure decision over a snapshot. No clock, no state, so a simulator runs this very code.
//!
//! A decision answers two questions together: which worker decodes, and which one computes the prompt's missing blocks (a prefill worker,
//! or the decode worker itself: the *tail*). `policy` names the ways to answer; each is a small file. They share `plan`, which works one
//! answer out: the blocks that are read, awaited and computed, and the time it takes.
//!
//! - `goodput`: the joint choice with the greatest expected goodput
//! - `least_ttft`: the least busy decode worker, then the prefill worker that is free first
//! - `random`, `load_balancing`, `local_cache`, `global_cache`: the policies that the Mooncake paper compares (FAST'25, Figure 5)
//! - `colocated`, `disaggregated`: never a prefill worker; always one

mod plan;
mod policy;
mod sources;

mod colocated;
mod disaggregated;
mod global_cache;
mod goodput;
mod least_ttft;
mod load_balancing;
mod local_cache;
mod random;

#[cfg(test)]
mod tests;

pub use goodput::GIVE_UP;
pub use plan::blocks_fetchable;
pub use policy::{Policy, PolicyName, UnknownPolicy};
pub use sources::SourceRun;

use crate::{
    class::{CLASSES_MAX, ClassId, Classes},
    cost::{CostModel, StepCost},
    index::Leading,
    load::{ClassLoad, PrefillQueue},
};
use plan::Planner;
use std::time::Duration;
use tidemill_proto::{ids::Epoch, message::Host};

/// The cluster as it is now.
#[derive(Clone, Debug)]
pub struct Snapshot<'a> {
    pub prefill: Vec<PrefillCandidate<'a>>,
    pub decode: Vec<DecodeCandidate<'a>>,
    /// Pool nodes, in order of epochs.
    pub pools: Vec<PoolCandidate<'a>>,
    /// The holders of the sequence's leading blocks.
    pub blocks: &'a Leading,
    pub block_bytes: u64,
    pub cost: &'a CostModel,
    pub classes: &'a Classes,
    pub now: Duration,
    /// The longest sequence that any decode worker can hold, candidate or not; `None` without one.
    pub context_tokens: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
pub struct PrefillCandidate<'a> {
    pub worker: Epoch,
    pub host: &'a Host,
    /// The time until it could start a new job.
    pub queue_ms: f64,
    pub queue: &'a PrefillQueue,
    /// Leading blocks of the sequence that it holds in its own memory.
    pub cached_blocks: u32,
    pub cost: &'a StepCost,
}

#[derive(Clone, Copy, Debug)]
pub struct DecodeCandidate<'a> {
    pub worker: Epoch,
    pub host: &'a Host,
    pub sequences: u32,
    /// The sum of those sequences' lengths.
    pub tokens: u64,
    /// The number of these sequences that have drawn a token.
    pub decoding: u32,
    /// The sequences by class, with the prompt tokens that the worker computes itself before their first tokens.
    pub classes: &'a [ClassLoad; CLASSES_MAX],
    pub device_blocks: u32,
    /// The longest sequence that the model and those blocks allow.
    pub context_tokens: u32,
    /// The maximum number of sequences to give it at a time.
    pub work_max: u32,
    /// Leading blocks of the sequence that it holds in its own memory.
    pub cached_blocks: u32,
    pub cost: &'a StepCost,
}

#[derive(Clone, Copy, Debug)]
pub struct PoolCandidate<'a> {
    pub node: Epoch,
    pub host: &'a Host,
    /// Whether it is about to end: its blocks can be read, but it takes no new ones.
    pub draining: bool,
    /// Blocks that it could store without evicting any.
    pub free_blocks: u64,
    /// Blocks that it could store without evicting any that is in use.
    pub room_blocks: u64,
    pub object: ObjectSpeed,
}

/// The speed at which a pool node reads blocks from object storage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ObjectSpeed {
    /// The time to the first byte.
    pub latency_ms: f64,
    /// The bandwidth; 0 if it does not read from there at the moment.
    pub bytes_per_ms: f64,
}

impl ObjectSpeed {
    /// The time to read this many bytes, in milliseconds.
    fn read_ms(self, bytes: f64) -> f64 {
        if self.bytes_per_ms > 0.0 { self.latency_ms + bytes / self.bytes_per_ms } else { f64::INFINITY }
    }
}

/// The needs of the sequence to place.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// The length of the prompt and of tokens generated before.
    pub tokens: u32,
    /// The longest possible length. A worker that cannot hold so many tokens would end it early, where a larger one would not.
    pub tokens_max: u64,
    /// Whether the decode worker must compute all of it, since every position's logits are needed, or the model reads texts as a whole.
    pub local_only: bool,
    /// The prefill job of a sibling (a sequence of the same request), if there is one: its pool node, and the leading blocks in common.
    pub joins: Option<(Epoch, u32)>,
    pub class: ClassId,
    /// Whether to serve it even if its class rejects.
    pub probe: bool,
    /// The time until its first token is due; `None` without a limit, or after the first token.
    pub due_ms: Option<f64>,
    /// A number that differs between requests: a policy's only source of randomness.
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Place(Placement),
    /// There is no room now: wait for it.
    Queue,
    /// There is room, but taking it would cost other requests more than this one gains: wait for a quieter time.
    Hold,
    /// It would be late, and its class rejects late requests. After about `retry_after_ms` it would be in time.
    Reject {
        retry_after_ms: u64,
    },
    /// No decode worker could hold it even alone. The largest holds `context` tokens.
    TooLong {
        context: u32,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub decode: Epoch,
    /// The leading blocks to read from pool nodes.
    pub read: Vec<SourceRun>,
    /// The node that stores the sequence's new blocks.
    pub home: Option<Epoch>,
    /// The worker that computes the blocks between those read and `expected_blocks`; `None` if there are none, or a job for them already
    /// runs.
    pub prefill: Option<Epoch>,
    /// The number of leading blocks to read, or to await at `home`. The rest is the tail.
    pub expected_blocks: u32,
    /// The prefill worker's computation time for this job.
    pub prefill_ms: f64,
    pub ttft_ms: f64,
    /// The time of a decode step with this sequence in the batch.
    pub tpot_ms: f64,
    /// The probability that the sequence keeps its limits, as far as its policy predicts it.
    pub chance: f64,
    /// The best of the compared choices, the chosen one first. Only the `goodput` policy fills it.
    pub considered: Vec<Considered>,
}

/// One way to serve a sequence, with its predictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Considered {
    pub decode: Epoch,
    pub prefill: Option<Epoch>,
    pub ttft_ms: f64,
    pub tpot_ms: f64,
    /// The probability that the sequence keeps its limits.
    pub chance: f64,
    /// The loss of other requests, in requests of weight 1.
    pub harm: f64,
}

pub fn schedule(policy: &Policy, snapshot: &Snapshot, demand: &Demand) -> Decision {
    if let Some(context) = snapshot.context_tokens.filter(|&context| u64::from(context) < demand.tokens_max) {
        return Decision::TooLong { context };
    }
    let planner = Planner::new(policy, snapshot, demand);
    policy.name.decide(&planner)
}

/// The prefill worker that could start first.
pub fn choose_prefill<'a>(candidates: &[PrefillCandidate<'a>]) -> Option<PrefillCandidate<'a>> {
    candidates.iter().copied().min_by(|a, b| a.queue_ms.total_cmp(&b.queue_ms).then(a.worker.cmp(&b.worker)))
}
