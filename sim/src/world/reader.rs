//! Clients of the front door: they send a request and read its answer, and may read slowly, leave, or retry at a different coordinator.

use super::{Call, CoordinatorIndex, Event, Process, State, TICK, Watch, World};
use crate::{outcome::End, workload};
use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};
use tidemill_cluster::{Failure, NewRequest, Outcome, Rejection, RequestEvent, class::ClassId};
use tidemill_proto::{
    block::Token,
    ids::RequestId,
    sampling::{Sampling, StopRule},
};

/// The behaviour of a client.
#[derive(Clone, Debug)]
pub(crate) struct Manners {
    /// The coordinator of the first attempt; retries go to the following coordinators.
    pub(crate) coordinator: usize,
    pub(crate) choices: u32,
    /// The most attempts.
    pub(crate) attempts: u32,
    /// The time after its arrival at which the client leaves, if it does.
    pub(crate) leaves: Option<Duration>,
    /// The time that reading an event takes; `None` if events are read at once.
    pub(crate) reads_every: Option<Duration>,
    pub(crate) timeout: Option<Duration>,
}

impl Default for Manners {
    fn default() -> Self {
        Self { coordinator: 0, choices: 1, attempts: 1, leaves: None, reads_every: None, timeout: None }
    }
}

pub(crate) struct Reader {
    pub(crate) manners: Manners,
    coordinators: usize,
    attempt: u32,
    /// The client's request in progress, if any.
    at: Option<(CoordinatorIndex, RequestId)>,
    /// The correct answer; empty in worlds that do not check answers.
    expected: Vec<Token>,
    /// By choice, the number of tokens read in this attempt, and whether the choice has ended.
    choices: Vec<(u32, bool)>,
    /// The events that are not read yet.
    queue: VecDeque<RequestEvent>,
}

/// The time from a broken connection to the next attempt.
const AGAIN: Duration = Duration::from_millis(300);
/// The number of unread events at which a coordinator drops a client. Production's limit is higher, and its answers are longer.
const QUEUE_MAX: usize = 24;

impl Reader {
    pub(crate) fn new(manners: Manners, coordinators: usize) -> Self {
        Self { manners, coordinators, attempt: 0, at: None, expected: Vec::new(), choices: Vec::new(), queue: VecDeque::new() }
    }

    fn coordinator(&self) -> CoordinatorIndex {
        CoordinatorIndex((self.manners.coordinator + self.attempt as usize) % self.coordinators)
    }
}

impl World {
    pub(super) fn arrive(&mut self, number: usize, watch: &mut dyn Watch) {
        if self.answers[number].end != End::Open {
            return;
        }
        let index = self.readers[number].coordinator();
        let process = Process::Coordinator(index);
        match self.io.life(process).state {
            State::Running => {}
            State::Paused => return self.io.life_mut(process).deferred.push_back(Event::Arrive(number)),
            State::Down => return self.broken(number),
        }
        self.io.enter(process);
        let (ask, manners) = (&self.asks[number], &self.readers[number].manners);
        let (vocab, choices) = (self.blueprint.shape.vocab, manners.choices);
        let request = NewRequest {
            prompt: ask.prompt(vocab),
            salt: Vec::new(),
            class: ClassId(ask.class as u8),
            sampling: Sampling { seed: number as u64, ..Sampling::default() },
            stop: StopRule { max_tokens: ask.output_tokens, ..StopRule::default() },
            choices,
            constraint: None,
            thought: None,
            prompt_logprobs: None,
            embeds: None,
            timeout: manners.timeout.unwrap_or(self.blueprint.timeout),
        };
        if let Some(faulty) = &mut self.io.faulty
            && self.readers[number].expected.is_empty()
        {
            self.readers[number].expected = faulty.truth.answer(&super::LAYOUT, &request.prompt, ask.output_tokens, vocab);
        }
        watch.begins(Call::Submit);
        let submitted = self.coordinators[index.0].submit(&mut self.io, number, request);
        watch.ended(Call::Submit);
        self.io.note(|| format!("request {number} at {process}: {submitted:?}"));
        match submitted {
            Ok(id) => {
                let reader = &mut self.readers[number];
                (reader.at, reader.choices) = (Some((index, id)), vec![(0, false); choices as usize]);
                self.answers[number].tokens = 0;
            }
            Err(rejection) => {
                if matches!(rejection, Rejection::TooLong { .. } | Rejection::TooManyChoices { .. } | Rejection::Late { .. }) {
                    self.io.violated(|| format!("request {number} is refused without reason: {rejection}"));
                }
                self.end(number, End::Rejected(rejection.to_string()));
            }
        }
        self.perform(index);
    }

    /// Handles a lost connection to the coordinator: the client retries at the next one, if it has attempts left.
    pub(super) fn broken(&mut self, number: usize) {
        let reader = &mut self.readers[number];
        reader.at = None;
        reader.queue.clear();
        reader.attempt += 1;
        if self.answers[number].end != End::Open {
            return;
        }
        if reader.attempt < reader.manners.attempts {
            self.io.after(AGAIN, Event::Arrive(number));
        } else {
            self.end(number, End::Failed("its coordinator is gone".into()));
        }
    }

    /// The clients with a request at a coordinator.
    pub(super) fn readers_at(&self, coordinator: CoordinatorIndex) -> Vec<usize> {
        let is_there = |number: &usize| self.readers[*number].at.is_some_and(|(at, _)| at == coordinator);
        (0..self.readers.len()).filter(is_there).collect()
    }

    pub(super) fn leave(&mut self, number: usize) {
        if self.answers[number].end != End::Open {
            return;
        }
        if let Some((index, _)) = self.readers[number].at {
            let life = self.io.life_mut(Process::Coordinator(index));
            if life.state == State::Paused {
                return life.deferred.push_back(Event::Leave(number));
            }
        }
        self.io.note(|| format!("the client of request {number} leaves"));
        self.end(number, End::Failed("its client left".into()));
        self.give_up(number);
    }

    /// Cancels a client's request.
    fn give_up(&mut self, number: usize) {
        self.readers[number].queue.clear();
        if let Some((index, id)) = self.readers[number].at.take() {
            self.io.enter(Process::Coordinator(index));
            let here = self.io.here;
            self.coordinators[index.0].requests.remove(&id);
            self.coordinators[index.0].cluster.cancel(here, id, None);
            self.perform(index);
        }
    }

    /// Carries out a coordinator's actions.
    pub(super) fn perform(&mut self, index: CoordinatorIndex) {
        loop {
            let heard = self.coordinators[index.0].perform(&mut self.io);
            if heard.is_empty() {
                return;
            }
            // The core forgets a request before its last events are delivered.
            let requests: BTreeSet<RequestId> = heard.iter().map(|(request, _)| *request).collect();
            for (request, event) in heard {
                self.hear(index, request, event);
            }
            let coordinator = &mut self.coordinators[index.0];
            for request in requests.into_iter().filter(|request| !coordinator.cluster.is_active(*request)) {
                coordinator.requests.remove(&request);
            }
        }
    }

    /// Delivers an event of a request to its client.
    fn hear(&mut self, index: CoordinatorIndex, request: RequestId, event: RequestEvent) {
        let Some(taken) = self.coordinators[index.0].requests.get(&request).copied() else { return };
        let number = taken.ask;
        self.check_failure(index, request, &event);
        let Some(every) = self.readers[number].manners.reads_every else { return self.take(number, event) };
        let queue = &mut self.readers[number].queue;
        queue.push_back(event);
        if queue.len() == 1 {
            self.io.after(every, Event::Read(number));
        } else if queue.len() > QUEUE_MAX {
            self.io.note(|| format!("the client of request {number} does not keep up"));
            self.end(number, End::Failed("it does not keep up".into()));
            self.give_up(number);
        }
    }

    /// Lets a slow client read its next event.
    pub(super) fn read(&mut self, number: usize) {
        let Some(event) = self.readers[number].queue.pop_front() else { return };
        self.take(number, event);
        if let (Some(every), false) = (self.readers[number].manners.reads_every, self.readers[number].queue.is_empty()) {
            self.io.after(every, Event::Read(number));
        }
    }

    fn take(&mut self, number: usize, event: RequestEvent) {
        let (now, answer, reader) = (self.io.now, &mut self.answers[number], &mut self.readers[number]);
        match event {
            RequestEvent::Token { choice, token, .. } => {
                let (tokens, done) = &mut reader.choices[choice as usize];
                let place = *tokens;
                let wanted = if self.io.faulty.is_some() {
                    reader.expected.get(place as usize).copied()
                } else {
                    Some(workload::token(number as u64, place, self.blueprint.shape.vocab))
                };
                if wanted != Some(token) || *done {
                    assert!(self.io.faulty.is_some(), "request {number} gets its own tokens, in order");
                    self.io.violated(|| format!("request {number} gets {token} as token {place} of choice {choice}, not {wanted:?}"));
                }
                *tokens += 1;
                answer.tokens += u32::from(choice == 0);
                answer.first_token.get_or_insert(now);
                answer.gap_max = answer.last_token.map_or(Duration::ZERO, |last| answer.gap_max.max(now - last));
                answer.last_token = Some(now);
            }
            RequestEvent::Finished { choice, outcome, usage } => {
                answer.predicted_ttft_ms = usage.predicted_ttft_ms;
                answer.sources = usage.provenance.tokens;
                answer.prefilled_elsewhere = usage.prefill_worker.is_some();
                answer.rescues = usage.rescues;
                let (tokens, done) = &mut reader.choices[choice as usize];
                let (drawn, was_done) = (*tokens, std::mem::replace(done, true));
                let all_done = reader.choices.iter().all(|(_, done)| *done);
                let end = match outcome {
                    Outcome::Stop(_) | Outcome::Length => {
                        if self.io.faulty.is_some() && drawn != self.asks[number].output_tokens {
                            let wanted = self.asks[number].output_tokens;
                            self.io.violated(|| format!("request {number} ends with {drawn} tokens of {wanted}"));
                        }
                        End::Complete
                    }
                    Outcome::Failed(failure) => End::Failed(failure.to_string()),
                };
                self.io.note(|| format!("request {number}, choice {choice}: {end:?} after {drawn} tokens"));
                if was_done {
                    self.io.violated(|| format!("choice {choice} of request {number} ends twice"));
                }
                if all_done {
                    self.readers[number].at = None;
                    self.end(number, end);
                }
            }
            RequestEvent::PromptLogprobs(_) | RequestEvent::Embedding(_) | RequestEvent::Sources(_) | RequestEvent::Waiting { .. } => {}
        }
    }

    fn end(&mut self, number: usize, end: End) {
        let answer = &mut self.answers[number];
        assert_eq!(answer.end, End::Open, "request {number} ends once");
        (answer.end, answer.ended) = (end, self.io.now);
        self.open -= 1;
    }

    /// Checks that a request fails only for one of a few reasons, and that the reason is true.
    fn check_failure(&mut self, index: CoordinatorIndex, request: RequestId, event: &RequestEvent) {
        let RequestEvent::Finished { outcome: Outcome::Failed(failure), .. } = event else { return };
        let Some(taken) = self.coordinators[index.0].requests.get(&request).copied() else { return };
        let lived = self.io.here.saturating_sub(taken.at);
        let is_true = match failure {
            Failure::Timeout(_) => lived >= taken.timeout,
            Failure::QueueTimeout(s) => lived >= Duration::from_secs(*s),
            Failure::Losses(_) | Failure::Displaced { .. } => true,
            Failure::Late { .. } | Failure::TooLong { .. } | Failure::Worker(_) => false,
        };
        if !is_true && self.io.faulty.is_some() {
            self.io.violated(|| format!("request {} fails after {lived:?} without reason: {failure}", taken.ask));
        }
    }

    /// Checks that no request has exceeded its deadline.
    pub(super) fn check_deadlines(&mut self, index: CoordinatorIndex) {
        if self.io.faulty.is_none() {
            return;
        }
        let here = self.io.here;
        let coordinator = &self.coordinators[index.0];
        let overdue = coordinator.requests.values().find(|taken| here.saturating_sub(taken.at) > taken.timeout + TICK);
        if let Some(taken) = overdue.copied() {
            self.io.violated(|| format!("request {} lives longer than {:?}", taken.ask, taken.timeout));
        }
    }
}
