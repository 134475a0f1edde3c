//! Admission, the one mechanism: match what exists, have the rest computed, give the sequence to a decode worker.
//! New, returned and rescued sequences all come through here.

use crate::{
    Action, Cluster, Failure, Outcome,
    membership::Registry,
    request::{Job, Place, Running, common_prefix},
    schedule::{self, Ask, Decision, Placement, Snapshot, SourceRun},
};
use std::time::Instant;
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain},
    ids::{Epoch, RequestId},
    message::{DecodeJob, PrefillJob, Run, ToWorker, TokensBySource},
    sampling::Sampling,
};

/// A job gets this many times its predicted duration, and the grace below, before its waiters give up on it.
const PREFILL_PATIENCE: f64 = 8.0;
const PREFILL_GRACE_MS: f64 = 30_000.0;

impl Cluster {
    /// Places whoever waits, first come first served. A resting sequence lets others pass; one that fits no worker any
    /// more ends, since it would be in everybody's way until its deadline.
    pub(crate) fn admit(&mut self, now: Instant) {
        let mut next = 0;
        while let Some(&id) = self.queue.get(next) {
            let (request, choice) = self.sequences[&id];
            match self.requests[&request].sequences[choice].place {
                Place::Queued { not_before, .. } if not_before > now => next += 1,
                _ => match self.decide(now, request, choice) {
                    Decision::Place(placement) => {
                        self.queue.remove(next);
                        self.place(now, request, choice, &placement);
                    }
                    Decision::TooLong { context } => {
                        let tokens = self.requests[&request].tokens_max();
                        self.finish(now, request, choice, Outcome::Failed(Failure::TooLong { tokens, context }));
                    }
                    Decision::Queue | Decision::Reject { .. } => return,
                },
            }
        }
    }

    fn decide(&mut self, now: Instant, id: RequestId, choice: usize) -> Decision {
        self.hash(id, choice);
        let request = &self.requests[&id];
        let sequence = &request.sequences[choice];
        let keys = sequence.chain.as_ref().map_or(&[][..], |(_, chain)| chain.keys());
        let ask = Ask {
            tokens: request.len_of(choice),
            tokens_max: request.tokens_max(),
            local_only: request.new.prompt_logprobs.is_some() && choice == 0 && !sequence.prompt_logprobs_seen,
            joins: request.job.as_ref().map(|job| (job.home, common_prefix(&job.keys, keys) as u32)),
        };
        let mut snapshot = self.snapshot(now, keys, 0);
        snapshot.prefill.retain(|candidate| !request.cancelled_at.contains(&candidate.worker));
        schedule::schedule(&self.settings.policy, &snapshot, &ask)
    }

    pub(crate) fn snapshot(&self, now: Instant, keys: &[BlockKey], waiting: usize) -> Snapshot<'_> {
        Snapshot {
            prefill: self.registry.prefill_candidates(now),
            decode: self.registry.decode_candidates(),
            pools: self.registry.pool_candidates(),
            blocks: self.index.leading(keys),
            block_bytes: self.registry.layout().map_or(0, |(_, bytes)| bytes),
            waiting,
            cost: &self.cost,
        }
    }

    /// Brings the sequence's block keys up to its tokens, under the layout the cluster has now.
    fn hash(&mut self, id: RequestId, choice: usize) {
        let Some((layout, _)) = self.registry.layout() else { return };
        let request = self.requests.get_mut(&id).expect("a queued sequence has a request");
        let tokens = request.tokens_of(choice);
        let salt = &request.new.salt;
        match &mut request.sequences[choice].chain {
            Some((known, chain)) if *known == layout => chain.extend_to(&tokens),
            chain => *chain = Some((layout, Chain::new(&layout, salt, &tokens))),
        }
    }

    /// Gives a sequence to its decode worker, and its missing blocks to a prefill worker.
    fn place(&mut self, now: Instant, id: RequestId, choice: usize, placement: &Placement) {
        let request = self.requests.get_mut(&id).expect("a queued sequence has a request");
        let tokens = request.tokens_of(choice);
        let home = placement.home.and_then(|node| self.registry.pool_node(node, placement.decode));
        let age = now.saturating_duration_since(request.submitted);
        let remaining_ms = request.new.timeout.saturating_sub(age).as_millis() as u64;
        let patience_ms = (PREFILL_GRACE_MS + PREFILL_PATIENCE * placement.ttft_ms).min(remaining_ms as f64) as u64;

        // Somebody is computing them; without a job, a block that is not there any more is a miss at once.
        let awaited = placement.prefill.is_some() || request.job.is_some();
        let sequence = &mut request.sequences[choice];
        let tail_tokens = tokens.len() as u64 - u64::from(placement.expected_blocks) * BLOCK_TOKENS as u64;
        if let Place::Queued { since, .. } = sequence.place {
            let waited = now.saturating_duration_since(since);
            sequence.waited += waited;
            sequence.usage.queue_ms += waited.as_secs_f64() * 1e3;
        }
        sequence.usage.predicted_ttft_ms.get_or_insert(sequence.usage.queue_ms + placement.ttft_ms);
        sequence.place = Place::Running(Running {
            worker: placement.decode,
            home: placement.home,
            planned: planned(&placement.read, placement.expected_blocks),
            tail_tokens,
            waits: awaited && placement.expected_blocks > 0,
        });
        let keys = sequence.chain.as_ref().map_or(&[][..], |(_, chain)| chain.keys());
        let threshold = self.settings.policy.replicate_after.filter(|_| home.is_some_and(|home| home.near));
        let hot_blocks = self.heat.hot_blocks(&placement.read, keys, threshold);
        let worker = self.registry.get_mut(placement.decode).expect("the scheduler places at live workers");
        worker.decode.sequences += 1;
        worker.decode.tokens += tokens.len() as u64;
        worker.decode.tail_tokens += tail_tokens;
        sequence.usage.decode_worker = worker.name.clone();

        let job = DecodeJob {
            request: id,
            sequence: sequence.id,
            prompt_tokens: request.new.prompt.len() as u32,
            salt: request.new.salt.clone(),
            read: runs(&self.registry, &placement.read, placement.decode),
            home,
            expected_blocks: placement.expected_blocks,
            wait_ms: if awaited { patience_ms } else { 0 },
            hot_blocks,
            sampling: Sampling { seed: request.new.sampling.seed.wrapping_add(choice as u64), ..request.new.sampling.clone() },
            stop: request.new.stop.clone(),
            prompt_logprobs: request.new.prompt_logprobs.filter(|_| choice == 0 && !sequence.prompt_logprobs_seen),
            tokens: tokens.clone(),
        };
        self.actions.push_back(Action::Send { worker: placement.decode, message: ToWorker::Decode(job) });

        if let (Some(worker), Some(home)) = (placement.prefill, placement.home) {
            let (_, chain) = sequence.chain.as_ref().expect("a sequence is hashed before blocks of it are expected");
            let blocks = placement.expected_blocks as usize;
            let keys = chain.keys()[..blocks].to_vec();
            let mut tokens = tokens;
            tokens.truncate(blocks * BLOCK_TOKENS);
            let read = placement.read.clone();
            let job = Job { worker, home, read, tokens, keys, predicted_ms: placement.prefill_ms, tried: Vec::new() };
            self.send_prefill(now, id, job, patience_ms);
        }
    }

    pub(crate) fn send_prefill(&mut self, now: Instant, id: RequestId, job: Job, deadline_ms: u64) {
        let request = self.requests.get_mut(&id).expect("jobs belong to requests");
        let home = self.registry.pool_node(job.home, job.worker).expect("the scheduler chooses live pool nodes");
        let read = runs(&self.registry, &job.read, job.worker);
        let worker = self.registry.get_mut(job.worker).expect("the scheduler chooses live workers");
        worker.prefill.push(now, id, job.predicted_ms);
        request.prefill_worker = Some(worker.name.clone());
        let message = ToWorker::Prefill(PrefillJob {
            request: id,
            tokens: job.tokens.clone(),
            blocks: job.keys.len() as u32,
            salt: request.new.salt.clone(),
            read,
            home,
            deadline_ms,
        });
        self.actions.push_back(Action::Send { worker: job.worker, message });
        request.job = Some(job);
    }
}

/// Runs as `reader` is to read them, as far as their nodes are still there.
fn runs(registry: &Registry, runs: &[SourceRun], reader: Epoch) -> Vec<Run> {
    runs.iter().map_while(|run| Some(Run { node: registry.pool_node(run.node, reader)?, blocks: run.blocks })).collect()
}

/// Where the tokens of expected blocks come from, if all goes well. What is in NVMe will have been in DRAM by then.
fn planned(read: &[SourceRun], expected_blocks: u32) -> TokensBySource {
    let tokens = |blocks: u32| u64::from(blocks) * BLOCK_TOKENS as u64;
    let found = |near| tokens(read.iter().filter(|run| run.near == near).map(|run| run.blocks).sum());
    let (dram, remote) = (found(true), found(false));
    TokensBySource { dram, remote, prefill: tokens(expected_blocks) - dram - remote, ..TokensBySource::default() }
}
