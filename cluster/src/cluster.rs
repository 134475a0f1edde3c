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
//! A sequence lives like this; each arrow is one function here or in `admission`. New, returned and rescued sequences take the same way:
//!
//! ```text
//!   submit ──► Queued ──place──► Running ──finish──► Done
//!                 ▲                 │
//!                 └────requeue──────┘   worker lost, or returned it
//! ```

use crate::{
    Failure, NewRequest, Outcome, Rejection, RequestEvent, Usage,
    cost::CostModel,
    index::{PrefixIndex, frequency::Heat},
    membership::Registry,
    request::{Job, Place, Request, Sequence},
    schedule::{self, Ask, Decision, Policy},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};
use tidemill_proto::{
    ids::{Epoch, RequestId, SequenceId},
    message::{ModelIdentity, Provenance, ToWorker},
};

/// Workers that a sequence is lost with before its client hears of it.
pub(crate) const LOSSES_MAX: u32 = 12;
/// How long a returned sequence rests before it is offered again: doubled each time in a row, up to the maximum.
const RETURN_REST: Duration = Duration::from_millis(25);
const RETURN_REST_MAX: Duration = Duration::from_secs(2);
/// Sequences fetch what a prefill worker put within this time, or find it gone.
pub(crate) const HANDOVER_MAX: Duration = Duration::from_secs(1);

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
    pub(crate) settings: ClusterSettings,
    pub(crate) registry: Registry,
    pub(crate) index: PrefixIndex,
    pub(crate) heat: Heat,
    pub(crate) cost: CostModel,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    /// Request and choice of every sequence that has not ended.
    pub(crate) sequences: BTreeMap<SequenceId, (RequestId, usize)>,
    /// Sequences without a place, rescued ones first.
    pub(crate) queue: VecDeque<SequenceId>,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) next_id: u64,
    pub(crate) rescues: u64,
}

impl Cluster {
    /// `model`: the front door's.
    pub fn new(settings: ClusterSettings, model: ModelIdentity) -> Self {
        Self {
            registry: Registry::new(settings.id_base + 1, model),
            index: PrefixIndex::default(),
            heat: Heat::default(),
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

    /// Refuses what no retry would get through: more choices at a time than the queue could take even if it were empty.
    pub fn check_choices(&self, choices: usize) -> Result<(), Rejection> {
        let limit = self.settings.policy.queue_max;
        if choices <= limit { Ok(()) } else { Err(Rejection::TooManyChoices { choices, limit }) }
    }

    /// Takes a request. Its events follow as [`Action::Client`], one `Finished` per choice, unless it is cancelled.
    pub fn submit(&mut self, now: Instant, new: NewRequest) -> Result<RequestId, Rejection> {
        debug_assert!(!new.prompt.is_empty() && new.choices > 0 && new.stop.max_tokens > 0, "the front door checks");
        let context = self.registry.context_tokens().ok_or(Rejection::NoWorker)?;
        let tokens = new.prompt.len() as u64 + u64::from(new.stop.max_tokens);
        if tokens > context.into() {
            return Err(Rejection::TooLong { tokens, context });
        }
        let ask = Ask { tokens: new.prompt.len() as u32, tokens_max: tokens, local_only: true, joins: None };
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
                losses: 0,
                returns: 0,
                waited: Duration::ZERO,
                prompt_logprobs_seen: false,
                first_account: None,
                usage: Usage::default(),
            })
            .collect();
        for (choice, sequence) in sequences.iter().enumerate() {
            self.sequences.insert(sequence.id, (id, choice));
            self.queue.push_back(sequence.id);
        }
        let request = Request {
            new,
            submitted: now,
            sequences,
            job: None,
            handed_over: None,
            cancelled_at: Vec::new(),
            prefill_worker: None,
            prefill_ms: 0.0,
        };
        self.requests.insert(id, request);
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
            usage.provenance.tokens = sequence.first_account.unwrap_or_else(|| request.planned(running));
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
        let settled = |request: &Request| request.handed_over.filter(|(at, _)| now.saturating_duration_since(*at) >= HANDOVER_MAX);
        let settled: Vec<_> = self.requests.iter().filter_map(|(id, request)| Some((*id, settled(request)?.1))).collect();
        for (request, pool) in settled {
            // Everything was in the pool, long enough to be fetched: what is missing there was evicted, and comes no more.
            self.requests.get_mut(&request).expect("just listed").handed_over = None;
            self.stop_waiting_for(request, pool);
        }
        for sequence in self.queue.clone() {
            let (request, choice) = self.sequences[&sequence];
            let Sequence { place, waited, .. } = &self.requests[&request].sequences[choice];
            let Place::Queued { since, .. } = *place else { continue };
            if *waited + now.saturating_duration_since(since) >= self.settings.queue_wait_max {
                let failure = Failure::QueueTimeout(self.settings.queue_wait_max.as_secs());
                self.finish(now, request, choice, Outcome::Failed(failure));
            }
        }
        self.admit(now);
    }

    /// Takes a sequence from its place without a word to the client.
    pub(crate) fn withdraw(&mut self, id: RequestId, choice: usize) {
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
    pub(crate) fn finish(&mut self, now: Instant, id: RequestId, choice: usize, outcome: Outcome) {
        // With its last choice the request went; whoever goes through its choices may still come by.
        let Some(request) = self.requests.get(&id) else { return };
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

    pub(crate) fn fail_request(&mut self, now: Instant, id: RequestId, failure: &Failure) {
        let sequences = self.requests[&id].sequences.iter().map(|sequence| (sequence.id, sequence.place)).collect::<Vec<_>>();
        for (choice, (sequence, place)) in sequences.into_iter().enumerate() {
            if let Place::Running(running) = place {
                self.actions.push_back(Action::Send { worker: running.worker, message: ToWorker::CancelSequence { sequence } });
            }
            self.finish(now, id, choice, Outcome::Failed(failure.clone()));
        }
    }

    /// The worker of a running sequence is lost, or no longer to be trusted with it.
    pub(crate) fn rescue(&mut self, now: Instant, id: RequestId, choice: usize) {
        let sequence = &mut self.requests.get_mut(&id).expect("a running sequence has a request").sequences[choice];
        sequence.losses += 1;
        sequence.is_kept();
        self.requeue(now, id, choice, Duration::ZERO);
    }

    /// A worker had no room for it: no fault of the sequence, which waits for some no longer than any other.
    pub(crate) fn take_back(&mut self, now: Instant, id: RequestId, choice: usize) {
        let sequence = &mut self.requests.get_mut(&id).expect("a running sequence has a request").sequences[choice];
        sequence.returns += 1;
        let rest = RETURN_REST.saturating_mul(1 << sequence.returns.min(16)).min(RETURN_REST_MAX);
        self.requeue(now, id, choice, rest);
    }

    /// Puts a running sequence back into the queue: it goes on elsewhere from the tokens it has.
    pub(crate) fn requeue(&mut self, now: Instant, id: RequestId, choice: usize, rest: Duration) {
        self.release(id, choice);
        let request = self.requests.get_mut(&id).expect("a running sequence has a request");
        if let (Some(_), Place::Running(running)) = (request.ended_by_tokens(choice), request.sequences[choice].place) {
            request.account(choice, Provenance { tokens: request.planned(&running), ..Provenance::default() });
        }
        request.sequences[choice].place = Place::Queued { since: now, not_before: now + rest };
        let sequence = &request.sequences[choice];
        self.queue.push_front(sequence.id);
        if let Some(outcome) = request.ended_by_tokens(choice) {
            self.finish(now, id, choice, outcome);
        } else if sequence.losses >= LOSSES_MAX {
            self.finish(now, id, choice, Outcome::Failed(Failure::Losses(LOSSES_MAX)));
        }
    }

    /// Takes a running sequence off its worker's account.
    pub(crate) fn release(&mut self, id: RequestId, choice: usize) {
        let request = &self.requests[&id];
        let Place::Running(running) = request.sequences[choice].place else { return };
        let tokens = u64::from(request.len_of(choice));
        if let Some(worker) = self.registry.get_mut(running.worker) {
            worker.decode.sequences -= 1;
            worker.decode.tokens -= tokens;
            worker.decode.tail_tokens -= running.tail_tokens;
        }
    }

    pub(crate) fn end(&mut self, id: RequestId, choice: usize) {
        let sequence = &mut self.requests.get_mut(&id).expect("an ending sequence has a request").sequences[choice];
        sequence.place = Place::Done;
        self.sequences.remove(&sequence.id);
    }

    pub(crate) fn forget_if_done(&mut self, now: Instant, id: RequestId) {
        if self.requests.get(&id).is_some_and(Request::is_done) {
            let request = self.requests.remove(&id).expect("it was just there");
            if let Some(job) = request.job {
                self.cancel_prefill(now, id, &job);
            }
        }
    }

    pub(crate) fn cancel_prefill(&mut self, now: Instant, id: RequestId, job: &Job) {
        if let Some(worker) = self.registry.get_mut(job.worker) {
            worker.prefill.remove(now, id);
            self.actions.push_back(Action::Send { worker: job.worker, message: ToWorker::CancelPrefill { request: id } });
        }
    }

    pub(crate) fn complete_usage(&self, request: &Request, sequence: &Sequence) -> Usage {
        Usage { prefill_ms: request.prefill_ms, prefill_worker: request.prefill_worker.clone(), ..sequence.usage.clone() }
    }

    pub(crate) fn draw_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}
