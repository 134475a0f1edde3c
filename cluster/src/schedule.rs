//! Where a sequence goes: one pure decision over a snapshot. No clock, no state, so a simulator runs this very code.
//!
//! A decision answers two questions together: who decodes, and who computes the prompt's missing blocks (a prefill worker, or
//! the decode worker itself: the *tail*). `policy` names the ways to answer; each is a small file. They share `plan`, which
//! spells one answer out: what is read where, awaited, computed, and how long it takes.
//!
//! - `goodput`: the joint choice with the greatest expected goodput
//! - `least_ttft`: the least busy decode worker, then the prefill worker that is free first
//! - `random`, `load_balancing`, `local_cache`, `global_cache`: those that the Mooncake paper compares (FAST'25, Figure 5)
//! - `colocated`, `disaggregated`: no prefill worker ever; always one

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
    /// In the order of their epochs.
    pub pools: Vec<PoolCandidate<'a>>,
    /// Who holds the sequence's leading blocks.
    pub blocks: &'a Leading,
    pub block_bytes: u64,
    pub cost: &'a CostModel,
    pub classes: &'a Classes,
    pub now: Duration,
    /// Longest sequence that some decode worker can hold, candidate or not; `None` without one.
    pub context_tokens: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
pub struct PrefillCandidate<'a> {
    pub worker: Epoch,
    pub host: &'a Host,
    /// Until it could begin another job.
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
    /// Lengths of those sequences, added up.
    pub tokens: u64,
    /// Those of the sequences that have drawn a token.
    pub decoding: u32,
    /// The sequences by class, with the prompt tokens that it computes itself before their first tokens.
    pub classes: &'a [ClassLoad; CLASSES_MAX],
    pub device_blocks: u32,
    /// Longest sequence that the model and those blocks allow.
    pub context_tokens: u32,
    /// Sequences that it asks for at a time.
    pub work_max: u32,
    /// Leading blocks of the sequence that it holds in its own memory.
    pub cached_blocks: u32,
    pub cost: &'a StepCost,
}

#[derive(Clone, Copy, Debug)]
pub struct PoolCandidate<'a> {
    pub node: Epoch,
    pub host: &'a Host,
    /// It is about to end: its blocks can be read, but it takes no new ones.
    pub draining: bool,
    /// Blocks it could store without evicting any,
    pub free_blocks: u64,
    /// and without evicting any that is in use.
    pub room_blocks: u64,
    pub object: ObjectSpeed,
}

/// How fast a pool node reads blocks from object storage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ObjectSpeed {
    /// To the first byte.
    pub latency_ms: f64,
    /// 0: it reads nothing at the moment.
    pub bytes_per_ms: f64,
}

impl ObjectSpeed {
    /// Milliseconds to read so many bytes.
    fn read_ms(self, bytes: f64) -> f64 {
        if self.bytes_per_ms > 0.0 { self.latency_ms + bytes / self.bytes_per_ms } else { f64::INFINITY }
    }
}

/// The needs of the sequence to place.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Prompt and tokens generated before.
    pub tokens: u32,
    /// The longest it can become. A worker that cannot hold that would end it early, where another would not.
    pub tokens_max: u64,
    /// The decode worker must compute all of it, since it needs every position's logits, or reads texts as a whole.
    pub local_only: bool,
    /// Another sequence of the same request already has a prefill job: (pool node, leading blocks in common).
    pub joins: Option<(Epoch, u32)>,
    pub class: ClassId,
    /// Serve it even if its class rejects.
    pub probe: bool,
    /// Until its first token is due; `None`: it has no limit, or has had its first token.
    pub due_ms: Option<f64>,
    /// Differs between requests: a policy's only source of chance.
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Place(Placement),
    /// No room now: wait for some.
    Queue,
    /// There is room, and to take it would cost others more than this sequence gains: wait for a quieter time.
    Hold,
    /// Its class is not to be served late, and it would be. In about this time it would not.
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
    /// Leading blocks that pool nodes hold.
    pub read: Vec<SourceRun>,
    /// Takes the sequence's new blocks.
    pub home: Option<Epoch>,
    /// Computes the blocks between those read and `expected_blocks`. `None`: there are none, or a job for them runs already.
    pub prefill: Option<Epoch>,
    /// Leading blocks to read, or to await at `home`. The rest is the tail.
    pub expected_blocks: u32,
    /// Prefill worker's own time for this job.
    pub prefill_ms: f64,
    pub ttft_ms: f64,
    /// Time of a decode step with this sequence in the batch.
    pub tpot_ms: f64,
    /// The chance that the sequence keeps its limits, as far as its policy knows.
    pub chance: f64,
    /// The best of what was compared, the chosen one first. Only the `goodput` policy says.
    pub considered: Vec<Considered>,
}

/// One way to serve a sequence, as it was judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Considered {
    pub decode: Epoch,
    pub prefill: Option<Epoch>,
    pub ttft_ms: f64,
    pub tpot_ms: f64,
    /// The chance that the sequence keeps its limits.
    pub chance: f64,
    /// What others would lose, in requests of weight 1.
    pub harm: f64,
}

pub fn schedule(policy: &Policy, snapshot: &Snapshot, demand: &Demand) -> Decision {
    if let Some(context) = snapshot.context_tokens.filter(|&context| u64::from(context) < demand.tokens_max) {
        return Decision::TooLong { context };
    }
    let planner = Planner::new(policy, snapshot, demand);
    policy.name.decide(&planner)
}

/// The prefill worker that could begin first.
pub fn choose_prefill<'a>(candidates: &[PrefillCandidate<'a>]) -> Option<PrefillCandidate<'a>> {
    candidates.iter().copied().min_by(|a, b| a.queue_ms.total_cmp(&b.queue_ms).then(a.worker.cmp(&b.worker)))
}
