//! Queued sequences get their places: match existing blocks, have the rest computed, give the sequence to a decode worker.

use crate::{
    Cluster, Failure, Outcome, candidates,
    load::NewShare,
    membership::Membership,
    requests::{ChoiceId, PendingPrefill, Place, Running, common_prefix},
    schedule::{self, Decision, Demand, Placement, Snapshot, SourceRun},
};
use std::time::Duration;
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey},
    ids::Epoch,
    message::{DecodeJob, Run, ToWorker, TokensBySource},
    sampling::Sampling,
    tokens::Tokens,
    urgency::Urgency,
};

/// A prefill job gets this many times its predicted duration, and the grace below, before its waiters give up on it.
const PREFILL_PATIENCE: f64 = 8.0;
const PREFILL_GRACE_MS: f64 = 30_000.0;

impl Cluster {
    /// Places sequences from the head of the queue on, while there is room. A resting sequence lets others pass; one that fits
    /// no worker any more ends, since it would block the queue until its deadline.
    pub(crate) fn place_queued(&mut self, now: Duration) {
        let mut position = 0;
        while let Some(sequence) = self.requests.queued(position) {
            let at = self.requests.locate(sequence).expect("a queued sequence has a request");
            match self.requests.choice(at).1.place() {
                Place::Queued { not_before, .. } if not_before > now => position += 1,
                _ => match self.decide(now, at) {
                    Decision::Place(placement) => self.place(now, at, &placement),
                    Decision::TooLong { context } => {
                        let tokens = self.requests.choice(at).0.tokens_max();
                        self.finish(now, at, Outcome::Failed(Failure::TooLong { tokens, context }));
                    }
                    Decision::Reject { retry_after_ms } => self.finish(now, at, Outcome::Failed(Failure::Late { retry_after_ms })),
                    Decision::Hold => position += 1,
                    Decision::Queue => return,
                },
            }
        }
    }

    pub(super) fn decide(&mut self, now: Duration, at: ChoiceId) -> Decision {
        if let Some((layout, _)) = self.membership.layout() {
            self.requests.get_mut(at.0).expect("a queued sequence has a request").hash(at.1, layout);
        }
        let (request, sequence) = self.requests.choice(at);
        let keys = sequence.keys();
        let demand = Demand {
            tokens: request.len_of(at.1),
            tokens_max: request.tokens_max(),
            local_only: request.prompt_logprobs(at.1).is_some(),
            joins: request.prefill.as_ref().map(|job| (job.home, common_prefix(&job.keys, keys) as u32)),
            class: request.new.class,
            due_ms: request.due(at.1, &self.settings.classes).map(|due| due.as_secs_f64() * 1e3 - now.as_secs_f64() * 1e3),
            seed: at.0.0,
        };
        let mut snapshot = self.snapshot(now, keys);
        snapshot.prefill.retain(|candidate| !request.cancelled_at.contains(&candidate.worker));
        schedule::schedule(&self.settings.policy, &snapshot, &demand)
    }

    fn snapshot(&self, now: Duration, keys: &[BlockKey]) -> Snapshot<'_> {
        Snapshot {
            prefill: candidates::prefill(&self.membership, &self.load, &self.cost, now),
            decode: candidates::decode(&self.membership, &self.load, &self.cost),
            pools: candidates::pools(&self.membership, &self.load),
            blocks: self.index.leading(keys),
            block_bytes: self.membership.layout().map_or(0, |(_, bytes)| bytes),
            cost: &self.cost,
            classes: &self.settings.classes,
            now,
            context_tokens: self.membership.context_tokens(),
        }
    }

    /// Gives a sequence to its decode worker, and its missing blocks to a prefill worker.
    pub(super) fn place(&mut self, now: Duration, at: ChoiceId, placement: &Placement) {
        let urgency = self.urgency(now, at, placement.chance);
        let (request, sequence) = self.requests.choice(at);
        let tokens = request.tokens_of(at.1);
        let patience_ms = PREFILL_GRACE_MS + PREFILL_PATIENCE * placement.ttft_ms;
        let patience_ms = patience_ms.min(request.remaining(now).as_millis() as f64) as u64;
        // Without a prefill job, an expected block that is gone is a miss at once.
        let awaited = placement.prefill.is_some() || request.prefill.is_some();
        let blocks = placement.expected_blocks as usize;
        let prefill = placement.prefill.zip(placement.home).map(|(worker, home)| PendingPrefill {
            worker,
            home,
            read: placement.read.clone(),
            tokens: tokens.prefix(blocks * BLOCK_TOKENS),
            keys: sequence.keys()[..blocks].to_vec(),
            predicted_ms: placement.prefill_ms,
            urgency,
            tried: Vec::new(),
        });
        self.book(now, at, placement, awaited);
        let job = self.decode_job(at, tokens, placement, urgency, if awaited { patience_ms } else { 0 });
        self.send(placement.decode, ToWorker::Decode(job));
        if let Some(prefill) = prefill {
            self.start_prefill(now, at.0, prefill, patience_ms);
        }
    }

    /// Moves a sequence from the queue to its decode worker's books.
    fn book(&mut self, now: Duration, at: ChoiceId, placement: &Placement, awaited: bool) {
        let (request, sequence) = self.requests.choice(at);
        let tokens = u64::from(request.len_of(at.1));
        let tail_tokens = tokens - u64::from(placement.expected_blocks) * BLOCK_TOKENS as u64;
        let waited = match sequence.place() {
            Place::Queued { since, .. } => now.saturating_sub(since),
            Place::Running(_) | Place::Done => Duration::ZERO,
        };
        let running = Running {
            worker: placement.decode,
            home: placement.home,
            planned: planned(&placement.read, placement.expected_blocks),
            waits: awaited && placement.expected_blocks > 0,
        };
        self.load.start_sequence(placement.decode, sequence.id, NewShare { tokens, tail_tokens, class: request.new.class });
        self.requests.start(at, running);
        let worker = self.membership.get(placement.decode).expect("the scheduler places at live workers");
        let sequence = self.requests.choice_mut(at);
        sequence.waited += waited;
        sequence.usage.queue_ms += waited.as_secs_f64() * 1e3;
        sequence.usage.predicted_ttft_ms.get_or_insert(sequence.usage.queue_ms + placement.ttft_ms);
        sequence.usage.decode_worker = worker.name.clone();
    }

    /// What workers order their work by. `chance`: of keeping the limits.
    fn urgency(&self, now: Duration, at: ChoiceId, chance: f64) -> Urgency {
        let request = self.requests.choice(at).0;
        let class = self.settings.classes.get(request.new.class);
        let due = request.due(at.1, &self.settings.classes).filter(|_| chance >= schedule::GIVE_UP);
        Urgency {
            due_ms: due.map(|due| due.saturating_sub(now).as_millis() as u64),
            tpot_ms: class.tpot_ms.map(|limit| limit as f32),
            priority: class.priority,
            group: request.tenant,
            weight: 1.0,
        }
    }

    fn decode_job(&mut self, at: ChoiceId, tokens: Tokens, placement: &Placement, urgency: Urgency, wait_ms: u64) -> DecodeJob {
        let (request, sequence) = self.requests.choice(at);
        let home = placement.home.and_then(|node| self.membership.pool_node(node, placement.decode));
        let threshold = self.settings.policy.replicate_after.filter(|_| home.is_some_and(|home| home.near));
        DecodeJob {
            request: at.0,
            sequence: sequence.id,
            tokens,
            prompt_tokens: request.new.prompt.len() as u32,
            salt: request.new.salt.clone(),
            read: runs(&self.membership, &placement.read, placement.decode),
            home,
            expected_blocks: placement.expected_blocks,
            wait_ms,
            hot_blocks: self.frequency.hot_blocks(&placement.read, sequence.keys(), threshold),
            sampling: Sampling { seed: request.new.sampling.seed.wrapping_add(at.1 as u64), ..request.new.sampling.clone() },
            stop: request.new.stop.clone(),
            constraint: request.new.constraint.clone(),
            urgency,
            prompt_logprobs: request.prompt_logprobs(at.1),
        }
    }
}

/// The runs for this reader, up to the first whose node is gone.
pub(super) fn runs(membership: &Membership, runs: &[SourceRun], reader: Epoch) -> Vec<Run> {
    runs.iter().map_while(|run| Some(Run { node: membership.pool_node(run.node, reader)?, blocks: run.blocks })).collect()
}

/// Sources of the expected blocks if all goes well. Blocks in NVMe will have been in DRAM by then.
fn planned(read: &[SourceRun], expected_blocks: u32) -> TokensBySource {
    let tokens = |blocks: u32| u64::from(blocks) * BLOCK_TOKENS as u64;
    let found = |near| tokens(read.iter().filter(|run| run.near == near).map(|run| run.blocks).sum());
    let (dram, remote) = (found(true), found(false));
    TokensBySource { dram, remote, prefill: tokens(expected_blocks) - dram - remote, ..TokensBySource::default() }
}
