//! Placement of queued sequences: find existing blocks, have the rest computed, give the sequence to a decode worker.

use crate::{
    Cluster, Failure, Outcome,
    candidates::{self, Candidates},
    class::OnMiss,
    load::NewShare,
    membership::Membership,
    requests::{
        ChoiceId, PendingPrefill, Place, Running, common_prefix,
        order::{OVERDUE_EVERY, Turn},
    },
    schedule::{self, Decision, Demand, Placement, Policy, PolicyName, SourceRun, blocks_fetchable},
    shortlist::BEST_MAX,
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
/// The number of consecutive sequences without room after which the rest is left for the next occasion: it would hardly find room either,
/// and each attempt has a cost.
const TRIES_MAX: usize = 4;
/// After this many consecutive refusals one request is served all the same. The cost model learns only from requests that are served: one
/// that is too pessimistic to accept any would never improve.
const PROBE_AFTER: u32 = 32;
/// The number of pool nodes with the prompt's blocks whose neighbours become candidates: a popular prompt is everywhere.
const HOLDERS_MAX: usize = 16;

impl Cluster {
    /// Places waiting sequences in order while there is room. A sequence that does not fit lets others pass, unless it has been overtaken
    /// often enough. A sequence that no worker can hold any more ends now, rather than at its deadline.
    ///
    /// Does nothing unless an event since the last call may have made room.
    pub(crate) fn place_queued(&mut self, now: Duration) {
        if !self.unsettled {
            return;
        }
        let mut turns: Vec<(ChoiceId, Turn)> = self.turns(now).filter(|(_, turn)| !turn.rests).collect();
        let mut misfits = 0;
        let overdue_first = |places: u64| places % OVERDUE_EVERY == OVERDUE_EVERY - 1;
        while misfits < TRIES_MAX
            && let Some(next) = (0..turns.len()).min_by(|&a, &b| turns[a].1.compare(&turns[b].1, overdue_first(self.places)))
        {
            let (at, turn) = turns.swap_remove(next);
            // The end of one choice may have ended the others of its request.
            if self.requests.get(at.0).is_none_or(|request| !request.sequences[at.1].is_queued()) {
                continue;
            }
            misfits += 1;
            match self.decide(now, at) {
                Decision::Place(placement) => {
                    misfits = 0;
                    self.places += 1;
                    self.note_taken(at);
                    self.place(now, at, &placement);
                    let served = self.fairness.served(turn.tenant);
                    turns.iter_mut().filter(|(_, other)| other.tenant == turn.tenant).for_each(|(_, other)| other.served = served);
                }
                Decision::TooLong { context } => {
                    let tokens = self.requests.choice(at).0.tokens_max();
                    self.finish(now, at, Outcome::Failed(Failure::TooLong { tokens, context }));
                }
                Decision::Reject { retry_after_ms } => {
                    self.refused_in_a_row += 1;
                    self.finish(now, at, Outcome::Failed(Failure::Late { retry_after_ms }));
                }
                // A held sequence does not block those behind it.
                Decision::Hold => {}
                Decision::Queue if turn.resumed => break,
                Decision::Queue if turn.is_overdue() => turns.retain(|(_, other)| other.priority > turn.priority),
                Decision::Queue => {}
            }
        }
        self.unsettled = false;
    }

    /// Notes that a sequence got a place. For a class that rejects, this ends a run of refusals.
    fn note_taken(&mut self, at: ChoiceId) {
        let class = self.requests.get(at.0).map(|request| self.settings.classes.get(request.new.class));
        if class.is_some_and(|class| class.on_miss == OnMiss::Reject) {
            self.refused_in_a_row = 0;
        }
    }

    /// The waiting sequences, with the keys of their order.
    pub(super) fn turns(&self, now: Duration) -> impl Iterator<Item = (ChoiceId, Turn)> {
        self.requests.queue().enumerate().map(move |(arrival, id)| {
            let at = self.requests.locate(id).expect("a queued sequence has a request");
            let (request, sequence) = self.requests.choice(at);
            let (since, not_before) = match sequence.place() {
                Place::Queued { since, not_before } => (since, not_before),
                Place::Running(_) | Place::Done => (now, now),
            };
            let due = request.due(at.1, &self.settings.classes);
            let turn = Turn {
                rests: not_before > now,
                resumed: sequence.is_resumed(),
                priority: self.settings.classes.get(request.new.class).priority,
                overtaken: sequence.overtaken,
                waited: sequence.waited + now.saturating_sub(since),
                tenant: request.tenant,
                served: self.fairness.served(request.tenant),
                due,
                late: due.is_some_and(|due| due < now),
                arrival,
            };
            (at, turn)
        })
    }

    pub(super) fn decide(&mut self, now: Duration, at: ChoiceId) -> Decision {
        if let Some(origin) = self.origin() {
            self.requests.get_mut(at.0).expect("a queued sequence has a request").hash(at.1, origin);
        }
        self.reorder(now);
        let (request, sequence) = self.requests.choice(at);
        if request.new.needs_thought_limits() && self.membership.lack_thought_limits() {
            // It waits for a worker of its kind, and does not block others.
            return Decision::Hold;
        }
        let keys = sequence.keys();
        // A probe's workers are given, so the policy does not choose.
        let pinned = request.pin.map(|pin| {
            let name = if pin.prefill.is_some() { PolicyName::Disaggregated } else { PolicyName::Colocated };
            Policy { name, ..self.settings.policy.clone() }
        });
        let policy = pinned.as_ref().unwrap_or(&self.settings.policy);
        let demand = Demand {
            tokens: request.len_of(at.1),
            tokens_max: request.tokens_max(),
            local_only: self.membership.reads_whole() || request.prompt_logprobs(at.1).is_some(),
            joins: request.prefill.as_ref().map(|job| (job.home, self.joined_blocks(&job.keys, keys))),
            class: request.new.class,
            probe: self.refused_in_a_row >= PROBE_AFTER,
            due_ms: request.due(at.1, &self.settings.classes).map(|due| due.as_secs_f64() * 1e3 - now.as_secs_f64() * 1e3),
            seed: at.0.0,
        };
        let blocks = match self.membership.state_blocks() {
            0 => self.index.leading(keys),
            // A state beyond the blocks that can be fetched is of no use.
            parts => self.index.usable(&keys[..keys.len().min(blocks_fetchable(demand.tokens) as usize)], parts),
        };
        let books = self.books();
        let decide = |candidates: Candidates<'_>| {
            let mut snapshot = self.snapshot(candidates, &blocks, now);
            snapshot.prefill.retain(|candidate| !request.cancelled_at.contains(&candidate.worker));
            if request.new.needs_thought_limits() {
                snapshot.decode.retain(|candidate| self.keeps_thought_limits(candidate.worker));
            }
            if let Some(pin) = request.pin {
                snapshot.prefill.retain(|candidate| pin.prefill == Some(candidate.worker));
                snapshot.decode.retain(|candidate| pin.decode == candidate.worker);
            }
            schedule::schedule(policy, &snapshot, &demand)
        };
        if request.pin.is_some() {
            return match decide(candidates::all(&books, &blocks, now)) {
                // It waits for one given worker, and does not block others.
                Decision::Queue => Decision::Hold,
                decision => decision,
            };
        }
        if policy.name.compares_all() {
            return decide(candidates::all(&books, &blocks, now));
        }
        // The home of a sibling's job may be missing from the shortlist.
        let mut holders: Vec<Epoch> = demand.joins.iter().map(|(home, _)| *home).collect();
        for holder in blocks.readable().flat_map(|(_, holders)| holders) {
            if holders.len() < HOLDERS_MAX && !holders.contains(&holder.node) {
                holders.push(holder.node);
            }
        }
        match decide(candidates::few(&books, &self.shortlist, &holders, &blocks, demand.seed, now)) {
            // None of these has room for a sequence of this length, but other workers may.
            Decision::Queue if self.shortlist.decode().nth(BEST_MAX).is_some() => decide(candidates::all(&books, &blocks, now)),
            decision => decision,
        }
    }

    fn keeps_thought_limits(&self, worker: Epoch) -> bool {
        self.membership.get(worker).is_some_and(|member| member.version.keeps_thought_limits())
    }

    /// The number of blocks of a sibling's prefill job that a sequence with these keys can use. If layers keep states, it is all of them or
    /// none, since only the end of the job is sure to have a state.
    fn joined_blocks(&self, job: &[BlockKey], keys: &[BlockKey]) -> u32 {
        let common = common_prefix(job, keys);
        if common < job.len() && self.membership.state_blocks() > 0 { 0 } else { common as u32 }
    }

    /// Gives a sequence to its decode worker, and its missing blocks to a prefill worker.
    pub(super) fn place(&mut self, now: Duration, at: ChoiceId, placement: &Placement) {
        let urgency = self.urgency(now, at, placement.chance);
        let (tenant, computed) = (self.requests.choice(at).0.tenant, self.requests.choice(at).0.len_of(at.1));
        self.fairness.charge_prompt(tenant, computed);
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
            salt: sequence.salt().to_vec(),
            keys: sequence.keys()[..blocks].to_vec(),
            predicted_ms: placement.prefill_ms,
            urgency,
            tried: Vec::new(),
        });
        self.decisions.push(now, at, sequence.id, request, &self.settings, placement);
        self.requests.note_overtaken(sequence.id, &self.settings.classes);
        self.book(now, at, placement, awaited);
        let job = self.decode_job(at, tokens, placement, urgency, if awaited { patience_ms } else { 0 });
        let thought = self.requests.choice(at).0.new.thought.clone();
        let message = match thought.filter(|_| self.keeps_thought_limits(placement.decode)) {
            Some(limit) => ToWorker::DecodeLimited { job, limit },
            None => ToWorker::Decode(job),
        };
        self.send(placement.decode, message);
        if let Some(prefill) = prefill {
            self.start_prefill(now, at.0, prefill, patience_ms);
        }
    }

    /// Moves a sequence from the queue to its decode worker.
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
            since: now,
            predicted_ttft_ms: sequence.generated.is_empty().then_some(placement.ttft_ms),
        };
        self.load.start_sequence(placement.decode, sequence.id, NewShare { tokens, tail_tokens, class: request.new.class });
        self.requests.start(at, running);
        let worker = self.membership.get(placement.decode).expect("the scheduler places at live workers");
        let sequence = self.requests.choice_mut(at);
        sequence.waited += waited;
        sequence.predicted_tpot_ms = (!sequence.is_resumed()).then_some(placement.tpot_ms);
        sequence.usage.queue_ms += waited.as_secs_f64() * 1e3;
        sequence.usage.predicted_ttft_ms.get_or_insert(sequence.usage.queue_ms + placement.ttft_ms);
        sequence.usage.decode_worker = worker.name.clone();
    }

    /// The urgency by which workers order their work. `chance` is that of keeping the limits.
    fn urgency(&self, now: Duration, at: ChoiceId, chance: f64) -> Urgency {
        let request = self.requests.choice(at).0;
        let class = self.settings.classes.get(request.new.class);
        let due = request.due(at.1, &self.settings.classes).filter(|_| chance >= schedule::GIVE_UP);
        let due_ms = due.map(|due| due.saturating_sub(now).as_millis() as u64);
        Urgency {
            // A client that has received tokens waits for the next one.
            due_ms: if request.sequences[at.1].generated.is_empty() { due_ms } else { Some(0) },
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
            salt: sequence.salt().to_vec(),
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
            embeds: request.new.embeds,
        }
    }
}

/// The runs as this reader is to read them, up to the first whose node is gone.
pub(super) fn runs(membership: &Membership, runs: &[SourceRun], reader: Epoch) -> Vec<Run> {
    runs.iter().map_while(|run| Some(Run { node: membership.pool_node(run.node, reader)?, blocks: run.blocks })).collect()
}

/// The sources of the expected blocks if all goes well. Blocks on NVMe will have moved to DRAM by then.
fn planned(read: &[SourceRun], expected_blocks: u32) -> TokensBySource {
    let tokens = |blocks: u32| u64::from(blocks) * BLOCK_TOKENS as u64;
    let found = |near| tokens(read.iter().filter(|run| run.near == near).map(|run| run.blocks).sum());
    let (dram, remote) = (found(true), found(false));
    TokensBySource { dram, remote, prefill: tokens(expected_blocks) - dram - remote, ..TokensBySource::default() }
}
