//! The coordinator's core: what clients ask and workers tell goes in, messages come out, time is an argument.
//!
//! ```text
//!             submit / cancel                       poll_action
//!   front door ──────────────►┌─────────┐──► Send(worker, message) · Close(worker)
//!                             │ Cluster │
//!      workers ──────────────►└─────────┘──► Client(request, event)
//!       register / worker_event / worker_down / tick
//! ```
//!
//! A sequence lives like this; each arrow is one function below. New, returned and rescued sequences take the same way:
//!
//! ```text
//!   submit ──► Queued ──place──► Running ──finish──► Done
//!                 ▲                 │
//!                 └────requeue──────┘   worker lost, or returned it
//! ```

mod request;
#[cfg(test)]
mod tests;
mod view;
mod worker;

pub use request::{Failure, NewRequest, Outcome, Rejection, RequestEvent, Usage};
pub use view::{ClusterView, MemberView};

use crate::{
    cost::CostModel,
    prefix_index::PrefixIndex,
    registry::{Registry, Worker},
    schedule::{self, Ask, Decision, Placement, Policy, PoolCandidate, Snapshot},
};
use request::{Job, Place, Request, Running, Sequence, common_prefix};
use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain},
    ids::{Epoch, RequestId, SequenceId},
    message::{DecodeJob, PoolAddr, PrefillJob, ToWorker},
    sampling::Sampling,
};

/// Times a sequence is given to a worker before its client hears of it.
const ATTEMPTS_MAX: u32 = 12;
/// How long a returned sequence rests before it is offered again: doubled per attempt, up to the maximum.
const RETURN_REST: Duration = Duration::from_millis(25);
const RETURN_REST_MAX: Duration = Duration::from_secs(2);
/// A job gets this many times its predicted duration, and the grace below, before its waiters give up on it.
const PREFILL_PATIENCE: f64 = 8.0;
const PREFILL_GRACE_MS: f64 = 30_000.0;

#[derive(Clone, Debug)]
pub struct ClusterSettings {
    /// Added to all ids and epochs. Drawn at random into the high 32 bits, so that two coordinators never collide.
    pub id_base: u64,
    pub policy: Policy,
    /// Longest wait for a place.
    pub queue_wait_max: Duration,
    /// A worker that says nothing for this long is dead.
    pub heartbeat_dead: Duration,
}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Send {
        worker: Epoch,
        message: ToWorker,
    },
    /// End the link; the worker is forgotten already and may register again.
    Close {
        worker: Epoch,
        reason: String,
    },
    Client {
        request: RequestId,
        event: RequestEvent,
    },
}

#[derive(Debug)]
pub struct Cluster {
    settings: ClusterSettings,
    registry: Registry,
    index: PrefixIndex,
    cost: CostModel,
    requests: BTreeMap<RequestId, Request>,
    /// Request and choice of every sequence that has not ended.
    sequences: BTreeMap<SequenceId, (RequestId, usize)>,
    /// Sequences without a place, rescued ones first.
    queue: VecDeque<SequenceId>,
    actions: VecDeque<Action>,
    next_id: u64,
    rescues: u64,
}

impl Cluster {
    pub fn new(settings: ClusterSettings) -> Self {
        Self {
            registry: Registry::new(settings.id_base + 1),
            index: PrefixIndex::default(),
            cost: CostModel::default(),
            requests: BTreeMap::new(),
            sequences: BTreeMap::new(),
            queue: VecDeque::new(),
            actions: VecDeque::new(),
            next_id: settings.id_base + 1,
            rescues: 0,
            settings,
        }
    }

    /// The next thing to do. Call until `None` after every other call.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Longest sequence the cluster can hold now; `None` without a decode worker.
    pub fn context_tokens(&self) -> Option<u32> {
        self.registry.context_tokens()
    }

    /// Takes a request. Its events follow as [`Action::Client`], one `Finished` per choice, unless it is cancelled.
    pub fn submit(&mut self, now: Instant, new: NewRequest) -> Result<RequestId, Rejection> {
        debug_assert!(!new.prompt.is_empty() && new.choices > 0 && new.stop.max_tokens > 0, "the front door checks");
        let context = self.registry.context_tokens().ok_or(Rejection::NoWorker)?;
        let tokens = new.prompt.len() as u64 + u64::from(new.stop.max_tokens);
        if tokens > context.into() {
            return Err(Rejection::TooLong { tokens, context });
        }
        let ask = Ask { tokens: new.prompt.len() as u32, local_only: true, joins: None };
        let waiting = self.queue.len() + new.choices as usize - 1;
        if let Decision::Reject { retry_after_ms } = schedule::schedule(&self.settings.policy, &self.snapshot(now, &[], waiting), &ask) {
            return Err(Rejection::Full { retry_after_ms });
        }
        let id = RequestId(self.draw_id());
        let place = Place::Queued { since: now, not_before: now };
        let sequences: Vec<Sequence> = (0..new.choices)
            .map(|_| Sequence {
                id: SequenceId(self.draw_id()),
                place,
                generated: Vec::new(),
                chain: None,
                attempts: 0,
                prompt_logprobs_seen: false,
                usage: Usage::default(),
            })
            .collect();
        for (choice, sequence) in sequences.iter().enumerate() {
            self.sequences.insert(sequence.id, (id, choice));
            self.queue.push_back(sequence.id);
        }
        self.requests.insert(id, Request { new, submitted: now, sequences, job: None, prefill_worker: None, prefill_ms: 0.0 });
        self.admit(now);
        Ok(id)
    }

    /// Ends one choice, or all, without another word to the client.
    pub fn cancel(&mut self, now: Instant, request: RequestId, choice: Option<u32>) {
        let Some(state) = self.requests.get(&request) else { return };
        let choices = match choice {
            Some(choice) => choice as usize..(choice as usize + 1).min(state.sequences.len()),
            None => 0..state.sequences.len(),
        };
        for choice in choices {
            self.withdraw(request, choice);
        }
        self.forget_if_done(now, request);
        self.admit(now);
    }

    /// Whether some choice of the request has not ended.
    pub fn is_active(&self, request: RequestId) -> bool {
        self.requests.contains_key(&request)
    }

    /// What is known of a choice's cost so far, for one that the front door is about to end.
    pub fn usage(&self, request: RequestId, choice: u32) -> Option<Usage> {
        let request = self.requests.get(&request)?;
        let sequence = request.sequences.get(choice as usize)?;
        let mut usage = self.complete_usage(request, sequence);
        if let Place::Running(running) = &sequence.place {
            usage.provenance.tokens = request.planned(running);
        }
        Some(usage)
    }

    /// Lets time pass: dead workers, deadlines, and whoever waits for room.
    pub fn tick(&mut self, now: Instant) {
        for worker in self.registry.silent(now, self.settings.heartbeat_dead) {
            let reason = format!("silent for {:?}", self.settings.heartbeat_dead);
            self.actions.push_back(Action::Close { worker, reason });
            self.worker_down(now, worker);
        }
        let overdue = |request: &Request| now.saturating_duration_since(request.submitted) >= request.new.timeout;
        let late: Vec<_> = self.requests.iter().filter(|(_, request)| overdue(request)).map(|(id, r)| (*id, r.new.timeout)).collect();
        for (request, timeout) in late {
            self.fail_request(now, request, &Failure::Timeout(timeout.as_secs()));
        }
        for sequence in self.queue.clone() {
            let (request, choice) = self.sequences[&sequence];
            let Place::Queued { since, .. } = self.requests[&request].sequences[choice].place else { continue };
            if now.saturating_duration_since(since) >= self.settings.queue_wait_max {
                let failure = Failure::QueueTimeout(self.settings.queue_wait_max.as_secs());
                self.finish(now, request, choice, Outcome::Failed(failure));
            }
        }
        self.admit(now);
    }

    /// Places whoever waits, first come first served. A resting sequence lets others pass.
    fn admit(&mut self, now: Instant) {
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
            local_only: request.new.prompt_logprobs.is_some() && choice == 0 && !sequence.prompt_logprobs_seen,
            joins: request.job.as_ref().map(|job| (job.pool, common_prefix(&job.keys, keys) as u32)),
        };
        schedule::schedule(&self.settings.policy, &self.snapshot(now, keys, 0), &ask)
    }

    fn snapshot(&self, now: Instant, keys: &[BlockKey], waiting: usize) -> Snapshot<'_> {
        let pool = |(node, _, worker): (Epoch, PoolAddr, &Worker)| PoolCandidate {
            node,
            leading_blocks: self.index.leading(node, keys) as u32,
            free_blocks: worker.report.blocks.free,
        };
        Snapshot {
            prefill: self.registry.prefill_candidates(now),
            decode: self.registry.decode_candidates(),
            pools: self.registry.pools().map(pool).collect(),
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
        let pool = placement.pool.and_then(|node| self.registry.get(node)?.pool_addr());
        let age = now.saturating_duration_since(request.submitted);
        let remaining_ms = request.new.timeout.saturating_sub(age).as_millis() as u64;
        let patience_ms = (PREFILL_GRACE_MS + PREFILL_PATIENCE * placement.ttft_ms).min(remaining_ms as f64) as u64;

        // Somebody is computing them; without a job, a block that is not there any more is a miss at once.
        let awaited = placement.prefill.is_some() || request.job.is_some();
        let sequence = &mut request.sequences[choice];
        let tail_tokens = tokens.len() as u64 - u64::from(placement.expected_blocks) * BLOCK_TOKENS as u64;
        if let Place::Queued { since, .. } = sequence.place {
            sequence.usage.queue_ms += now.saturating_duration_since(since).as_secs_f64() * 1e3;
        }
        sequence.attempts += 1;
        sequence.place = Place::Running(Running {
            worker: placement.decode,
            pool: placement.pool,
            found_blocks: placement.found_blocks,
            expected_blocks: placement.expected_blocks,
            tail_tokens,
            waits: awaited && placement.expected_blocks > 0,
        });
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
            pool,
            expected_blocks: placement.expected_blocks,
            wait_ms: if awaited { patience_ms } else { 0 },
            sampling: Sampling { seed: request.new.sampling.seed.wrapping_add(choice as u64), ..request.new.sampling.clone() },
            stop: request.new.stop.clone(),
            prompt_logprobs: request.new.prompt_logprobs.filter(|_| choice == 0 && !sequence.prompt_logprobs_seen),
            tokens: tokens.clone(),
        };
        self.actions.push_back(Action::Send { worker: placement.decode, message: ToWorker::Decode(job) });

        if let (Some(worker), Some(pool)) = (placement.prefill, placement.pool) {
            let (_, chain) = sequence.chain.as_ref().expect("a sequence is hashed before blocks of it are expected");
            let blocks = placement.expected_blocks as usize;
            let keys = chain.keys()[..blocks].to_vec();
            let mut tokens = tokens;
            tokens.truncate(blocks * BLOCK_TOKENS);
            let job = Job { worker, pool, tokens, keys, predicted_ms: placement.prefill_ms, tried: Vec::new() };
            self.send_prefill(now, id, job, patience_ms);
        }
    }

    fn send_prefill(&mut self, now: Instant, id: RequestId, job: Job, deadline_ms: u64) {
        let request = self.requests.get_mut(&id).expect("jobs belong to requests");
        let worker = self.registry.get_mut(job.worker).expect("the scheduler chooses live workers");
        worker.prefill.push(now, id, job.predicted_ms);
        request.prefill_worker = Some(worker.name.clone());
        let pool = self.registry.get(job.pool).and_then(|node| node.pool_addr()).expect("the scheduler chooses live pool nodes");
        let message = ToWorker::Prefill(PrefillJob {
            request: id,
            tokens: job.tokens.clone(),
            blocks: job.keys.len() as u32,
            salt: request.new.salt.clone(),
            pool,
            deadline_ms,
        });
        self.actions.push_back(Action::Send { worker: job.worker, message });
        request.job = Some(job);
    }

    /// Takes a sequence from its place without a word to the client.
    fn withdraw(&mut self, id: RequestId, choice: usize) {
        let sequence = &self.requests[&id].sequences[choice];
        match sequence.place {
            Place::Done => return,
            Place::Queued { .. } => {
                let id = sequence.id;
                self.queue.retain(|queued| *queued != id);
            }
            Place::Running(running) => {
                let message = ToWorker::CancelSequence { sequence: sequence.id };
                self.actions.push_back(Action::Send { worker: running.worker, message });
                self.release(id, choice);
            }
        }
        self.end(id, choice);
    }

    /// Ends a choice and tells its client why. The request is forgotten with its last choice.
    fn finish(&mut self, now: Instant, id: RequestId, choice: usize, outcome: Outcome) {
        let request = &self.requests[&id];
        let sequence = &request.sequences[choice];
        let usage = self.complete_usage(request, sequence);
        match sequence.place {
            Place::Done => return,
            Place::Queued { .. } => {
                let id = sequence.id;
                self.queue.retain(|queued| *queued != id);
            }
            Place::Running(_) => self.release(id, choice),
        }
        self.end(id, choice);
        self.actions.push_back(Action::Client { request: id, event: RequestEvent::Finished { choice: choice as u32, outcome, usage } });
        self.forget_if_done(now, id);
    }

    fn fail_request(&mut self, now: Instant, id: RequestId, failure: &Failure) {
        let sequences = self.requests[&id].sequences.iter().map(|sequence| (sequence.id, sequence.place)).collect::<Vec<_>>();
        for (choice, (sequence, place)) in sequences.into_iter().enumerate() {
            if let Place::Running(running) = place {
                self.actions.push_back(Action::Send { worker: running.worker, message: ToWorker::CancelSequence { sequence } });
            }
            self.finish(now, id, choice, Outcome::Failed(failure.clone()));
        }
    }

    /// Puts a running sequence back into the queue: it goes on elsewhere from the tokens it has.
    fn requeue(&mut self, now: Instant, id: RequestId, choice: usize, rest: Duration) {
        self.release(id, choice);
        let request = self.requests.get_mut(&id).expect("a running sequence has a request");
        request.sequences[choice].place = Place::Queued { since: now, not_before: now + rest };
        let sequence = &request.sequences[choice];
        self.queue.push_front(sequence.id);
        if let Some(outcome) = request.ended_by_tokens(choice) {
            self.finish(now, id, choice, outcome);
        } else if sequence.attempts >= ATTEMPTS_MAX {
            self.finish(now, id, choice, Outcome::Failed(Failure::Attempts(ATTEMPTS_MAX)));
        }
    }

    /// Takes a running sequence off its worker's account.
    fn release(&mut self, id: RequestId, choice: usize) {
        let request = &self.requests[&id];
        let Place::Running(running) = request.sequences[choice].place else { return };
        let tokens = u64::from(request.len_of(choice));
        if let Some(worker) = self.registry.get_mut(running.worker) {
            worker.decode.sequences -= 1;
            worker.decode.tokens -= tokens;
            worker.decode.tail_tokens -= running.tail_tokens;
        }
    }

    fn end(&mut self, id: RequestId, choice: usize) {
        let sequence = &mut self.requests.get_mut(&id).expect("an ending sequence has a request").sequences[choice];
        sequence.place = Place::Done;
        self.sequences.remove(&sequence.id);
    }

    fn forget_if_done(&mut self, now: Instant, id: RequestId) {
        if self.requests.get(&id).is_some_and(Request::is_done) {
            let request = self.requests.remove(&id).expect("it was just there");
            if let Some(job) = request.job {
                self.cancel_prefill(now, id, &job);
            }
        }
    }

    fn cancel_prefill(&mut self, now: Instant, id: RequestId, job: &Job) {
        if let Some(worker) = self.registry.get_mut(job.worker) {
            worker.prefill.remove(now, id);
            self.actions.push_back(Action::Send { worker: job.worker, message: ToWorker::CancelPrefill { request: id } });
        }
    }

    fn complete_usage(&self, request: &Request, sequence: &Sequence) -> Usage {
        Usage { prefill_ms: request.prefill_ms, prefill_worker: request.prefill_worker.clone(), ..sequence.usage.clone() }
    }

    fn draw_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}
