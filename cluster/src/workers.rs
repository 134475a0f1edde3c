//! What workers tell the cluster, and what follows when one is gone.

use crate::{
    Action, Cluster, Failure, Outcome, Refusal, RequestEvent,
    request::{Job, Place, Running, Sequence},
    schedule,
};
use std::time::Instant;
use tidemill_proto::{
    ids::{Epoch, RequestId, SequenceId},
    message::{Finish, PrefillOutcome, Provenance, Register, Report, Role, SequenceToken, ToWorker, WorkerEvent},
};

/// Prefill workers that are given one job before its waiters compute the blocks themselves.
const PREFILL_ATTEMPTS_MAX: usize = 3;

impl Cluster {
    /// Takes a worker in, or says what to change about it.
    pub fn register(&mut self, now: Instant, register: Register) -> Result<Epoch, Refusal> {
        let role = register.role.role();
        let epoch = self.registry.register(now, register)?;
        if role == Role::Kvpool {
            self.index.add_node(epoch);
        }
        self.admit(now);
        Ok(epoch)
    }

    /// Applies what a registered worker says. Words of a worker that is gone, or about what it no longer has, are void.
    pub fn worker_event(&mut self, now: Instant, epoch: Epoch, event: WorkerEvent) {
        let Some(worker) = self.registry.get_mut(epoch) else { return };
        worker.heard = now;
        match event {
            WorkerEvent::Heartbeat(report) => self.heartbeat(epoch, *report),
            WorkerEvent::Tokens(tokens) => tokens.into_iter().for_each(|token| self.token(now, epoch, token)),
            WorkerEvent::Finished { sequence, reason, provenance } => self.finished(now, epoch, sequence, reason, provenance),
            WorkerEvent::PromptLogprobs { sequence, logprobs } => {
                if let Some((request, choice, _)) = self.running_at(epoch, sequence) {
                    let state = &mut self.requests.get_mut(&request).expect("a running sequence has a request").sequences[choice];
                    if !std::mem::replace(&mut state.prompt_logprobs_seen, true) {
                        self.actions.push_back(Action::Client { request, event: RequestEvent::PromptLogprobs(logprobs) });
                    }
                }
            }
            WorkerEvent::Prefilled { request, outcome } => self.prefilled(now, epoch, request, &outcome),
            WorkerEvent::PoolEvents { from, events } => {
                if let Err(gap) = self.index.apply(epoch, from, &events) {
                    self.actions.push_back(Action::Close { worker: epoch, reason: gap.to_string() });
                    self.worker_down(now, epoch);
                }
            }
            WorkerEvent::Leaving => {
                worker.draining = true;
                if worker.role.role() == Role::Kvpool {
                    let message = ToWorker::Peers(self.registry.peers(epoch));
                    self.actions.push_back(Action::Send { worker: epoch, message });
                }
            }
        }
        self.admit(now);
    }

    /// The worker's link is down: everything it had goes elsewhere.
    pub fn worker_down(&mut self, now: Instant, epoch: Epoch) {
        let Some(worker) = self.registry.remove(epoch) else { return };
        match worker.role.role() {
            Role::Decode => self.decode_down(now, epoch),
            Role::Prefill => {
                for request in worker.prefill.requests() {
                    self.reassign(now, request, epoch);
                }
            }
            Role::Kvpool => self.pool_down(now, epoch),
        }
        self.admit(now);
    }

    fn decode_down(&mut self, now: Instant, epoch: Epoch) {
        // From the youngest: each goes to the front of the queue, so the oldest ends up first.
        let lost: Vec<_> = self.running().filter(|(_, _, running)| running.worker == epoch).collect();
        for (request, choice, _) in lost.into_iter().rev() {
            self.rescues += 1;
            self.requests.get_mut(&request).expect("a running sequence has a request").sequences[choice].usage.rescues += 1;
            self.rescue(now, request, choice);
        }
    }

    /// Nobody can read from or write to the node: what was expected from it is computed. Those who read from it find out by
    /// themselves.
    fn pool_down(&mut self, now: Instant, epoch: Epoch) {
        self.index.remove_node(epoch);
        let jobs: Vec<_> =
            self.requests.iter().filter(|(_, r)| r.job.as_ref().is_some_and(|job| job.home == epoch)).map(|(id, _)| *id).collect();
        for request in jobs {
            let state = self.requests.get_mut(&request).expect("it was just there");
            let job = state.job.take().expect("it was just there");
            state.cancelled_at.push(job.worker);
            self.cancel_prefill(now, request, &job);
        }
        let waiting: Vec<_> = self.running().filter(|(_, _, running)| running.waits && running.home == Some(epoch)).collect();
        for (request, choice, _) in waiting {
            self.stop_waiting(request, choice);
        }
    }

    fn heartbeat(&mut self, epoch: Epoch, mut report: Report) {
        report.steps.truncate(Report::STEPS_MAX);
        let worker = self.registry.get_mut(epoch).expect("the caller looked it up");
        let cost = match worker.role.role() {
            Role::Prefill => Some(&mut self.cost.prefill),
            Role::Decode => Some(&mut self.cost.decode),
            Role::Kvpool => None,
        };
        if let Some(cost) = cost {
            report.steps.iter().for_each(|step| cost.observe(step));
        }
        self.cost.observe_transfer(&worker.report.counters.transfer, &report.counters.transfer);
        worker.report = report;
    }

    fn token(&mut self, now: Instant, epoch: Epoch, SequenceToken { sequence, index, token, logprob }: SequenceToken) {
        let Some((request, choice, _)) = self.running_at(epoch, sequence) else { return };
        let state = &mut self.requests.get_mut(&request).expect("a running sequence has a request").sequences[choice];
        let expected = state.generated.len() as u32;
        if index < expected {
            return; // Drawn again after a preemption; the client has it.
        }
        if index > expected {
            tracing::error!(%epoch, %sequence, index, expected, "worker skipped a token: the sequence goes elsewhere");
            let message = ToWorker::CancelSequence { sequence };
            self.actions.push_back(Action::Send { worker: epoch, message });
            return self.rescue(now, request, choice);
        }
        state.generated.push(token);
        state.is_kept();
        if let Place::Running(running) = &mut state.place {
            let worker = self.registry.get_mut(epoch).expect("a running sequence's worker is registered");
            worker.decode.tokens += 1;
            worker.decode.tail_tokens -= std::mem::take(&mut running.tail_tokens);
            running.waits = false;
        }
        self.actions.push_back(Action::Client { request, event: RequestEvent::Token { choice: choice as u32, token, logprob } });
    }

    fn finished(&mut self, now: Instant, epoch: Epoch, sequence: SequenceId, reason: Finish, provenance: Provenance) {
        let Some((request, choice, _)) = self.running_at(epoch, sequence) else { return };
        let state = self.requests.get_mut(&request).expect("a running sequence has a request");
        let outcome = match reason {
            Finish::Returned => {
                state.account_of_returned(choice, &provenance.tokens);
                return self.take_back(now, request, choice);
            }
            Finish::Stop { token } => Outcome::Stop(token),
            Finish::Length => Outcome::Length,
            Finish::Failed { reason } => Outcome::Failed(Failure::Worker(reason)),
        };
        state.account(choice, provenance);
        self.finish(now, request, choice, outcome);
    }

    fn prefilled(&mut self, now: Instant, epoch: Epoch, id: RequestId, outcome: &PrefillOutcome) {
        let Some(request) = self.requests.get_mut(&id).filter(|r| r.job.as_ref().is_some_and(|job| job.worker == epoch)) else { return };
        match outcome {
            PrefillOutcome::Done { .. } => {
                request.record_prefill(outcome);
                let job = request.job.take().expect("its worker was just compared");
                request.handed_over = Some((now, job.home));
                self.registry.get_mut(epoch).expect("a job's worker is registered").prefill.remove(now, id);
            }
            PrefillOutcome::Failed { reason } => {
                tracing::warn!(request = %id, %epoch, reason, "prefill job failed");
                self.registry.get_mut(epoch).expect("a job's worker is registered").prefill.remove(now, id);
                self.reassign(now, id, epoch);
            }
        }
    }

    /// Gives a job that `failed` will not finish to another prefill worker; without one, nobody waits for it any more.
    fn reassign(&mut self, now: Instant, id: RequestId, failed: Epoch) {
        let Some(mut job) = self.requests.get_mut(&id).and_then(|request| request.job.take()) else { return };
        job.tried.push(failed);
        let mut candidates = self.registry.prefill_candidates(now);
        let cancelled_at = &self.requests[&id].cancelled_at;
        candidates.retain(|candidate| !job.tried.contains(&candidate.worker) && !cancelled_at.contains(&candidate.worker));
        match schedule::choose_prefill(&candidates) {
            Some(next) if job.tried.len() < PREFILL_ATTEMPTS_MAX && self.registry.get(job.home).is_some() => {
                let request = &self.requests[&id];
                let age = now.saturating_duration_since(request.submitted);
                let remaining_ms = request.new.timeout.saturating_sub(age).as_millis() as u64;
                self.send_prefill(now, id, Job { worker: next.worker, ..job }, remaining_ms);
            }
            _ => self.stop_waiting_for(id, job.home),
        }
    }

    /// Nobody computes blocks of this request into that pool node any more.
    pub(crate) fn stop_waiting_for(&mut self, id: RequestId, home: Epoch) {
        let waiting = |(choice, sequence): (usize, &Sequence)| {
            matches!(sequence.place, Place::Running(running) if running.waits && running.home == Some(home)).then_some(choice)
        };
        let waiting: Vec<_> = self.requests[&id].sequences.iter().enumerate().filter_map(waiting).collect();
        for choice in waiting {
            self.stop_waiting(id, choice);
        }
    }

    fn stop_waiting(&mut self, id: RequestId, choice: usize) {
        let sequence = &mut self.requests.get_mut(&id).expect("a running sequence has a request").sequences[choice];
        if let Place::Running(running) = &mut sequence.place {
            running.waits = false;
            let message = ToWorker::StopWaiting { sequence: sequence.id };
            self.actions.push_back(Action::Send { worker: running.worker, message });
        }
    }

    fn running(&self) -> impl Iterator<Item = (RequestId, usize, Running)> {
        self.requests.iter().flat_map(|(id, request)| {
            request.sequences.iter().enumerate().filter_map(|(choice, sequence)| match sequence.place {
                Place::Running(running) => Some((*id, choice, running)),
                Place::Queued { .. } | Place::Done => None,
            })
        })
    }

    /// The sequence, if it is at this worker.
    fn running_at(&self, epoch: Epoch, sequence: SequenceId) -> Option<(RequestId, usize, Running)> {
        let (request, choice) = *self.sequences.get(&sequence)?;
        match self.requests[&request].sequences[choice].place {
            Place::Running(running) if running.worker == epoch => Some((request, choice, running)),
            Place::Running(_) | Place::Queued { .. } | Place::Done => None,
        }
    }
}
