//! The end of a choice: reported by its worker, by a deadline, or by its client. The request is removed with its last choice.

use crate::{
    ChoiceUsage, Cluster, Failure, Outcome, RequestEvent,
    requests::{ChoiceId, Place},
};
use std::time::Duration;
use tidemill_proto::{
    ids::{Epoch, RequestId, SequenceId},
    message::{Finish, Provenance, ToWorker},
};

/// The minimum length of an answer for its time per token to teach the cost model.
const TPOT_TOKENS_MIN: u32 = 8;

impl Cluster {
    /// Ends one choice, or all, without a further event to the client.
    pub fn cancel(&mut self, now: Duration, request: RequestId, choice: Option<u32>) {
        self.give_up(now, request, choice);
        self.place_queued(now);
    }

    /// Ends all of a client's requests, without further events. Their places are given away only once all are free: otherwise the client's
    /// own waiting requests would get them first, and end next.
    pub fn cancel_all(&mut self, now: Duration, requests: &[RequestId]) {
        requests.iter().for_each(|&request| self.give_up(now, request, None));
        self.place_queued(now);
    }

    fn give_up(&mut self, now: Duration, request: RequestId, choice: Option<u32>) {
        let Some(state) = self.requests.get(request) else { return };
        let choices = match choice {
            Some(choice) => choice as usize..(choice as usize + 1).min(state.sequences.len()),
            None => 0..state.sequences.len(),
        };
        for choice in choices {
            self.withdraw((request, choice));
            self.leave((request, choice));
        }
        self.forget_if_done(now, request);
    }

    /// Whether any choice of the request has not ended.
    pub fn is_active(&self, request: RequestId) -> bool {
        self.requests.get(request).is_some()
    }

    /// A choice's usage so far, for a choice that the gateway is about to end.
    pub fn usage(&self, request: RequestId, choice: u32) -> Option<ChoiceUsage> {
        let request = self.requests.get(request)?;
        let sequence = request.sequences.get(choice as usize)?;
        let mut usage = request.usage(choice as usize);
        if let Some(running) = sequence.running() {
            usage.provenance.tokens = sequence.first_sources.unwrap_or_else(|| request.planned(&running));
        }
        Some(usage)
    }

    /// Handles a decode worker's last event of a sequence.
    pub(crate) fn finished(&mut self, now: Duration, worker: Epoch, sequence: SequenceId, reason: Finish, provenance: Provenance) {
        let Some(at) = self.requests.running_at(worker, sequence) else { return };
        let request = self.requests.get_mut(at.0).expect("a running sequence has a request");
        let outcome = match reason {
            Finish::Returned => {
                request.account_of_returned(at.1, &provenance.tokens);
                return self.take_back(now, at);
            }
            Finish::Stop { token } => Outcome::Stop(token),
            Finish::Length => Outcome::Length,
            Finish::Failed { reason } => Outcome::Failed(Failure::Worker(reason)),
        };
        request.account(at.1, provenance);
        self.pace.observe(now);
        self.finish(now, at, outcome);
    }

    /// Ends requests that are older than their timeout.
    pub(crate) fn end_overdue(&mut self, now: Duration) {
        let overdue = self.requests.iter().filter(|(_, request)| request.remaining(now).is_zero());
        for (id, timeout) in overdue.map(|(id, request)| (id, request.new.timeout)).collect::<Vec<_>>() {
            self.fail_request(now, id, &Failure::Timeout(timeout.as_secs()));
        }
    }

    /// Ends sequences that have waited too long for a place.
    pub(crate) fn end_waiting(&mut self, now: Duration) {
        let limit = self.settings.queue_wait_max;
        let too_long = self.requests.queue().filter_map(|sequence| {
            let at = self.requests.locate(sequence)?;
            let sequence = self.requests.choice(at).1;
            let Place::Queued { since, .. } = sequence.place() else { return None };
            (sequence.waited + now.saturating_sub(since) >= limit).then_some(at)
        });
        for at in too_long.collect::<Vec<_>>() {
            self.finish(now, at, Outcome::Failed(Failure::QueueTimeout(limit.as_secs())));
        }
    }

    pub(crate) fn fail_request(&mut self, now: Duration, id: RequestId, failure: &Failure) {
        let choices = self.requests.get(id).map_or(0, |request| request.sequences.len());
        for choice in 0..choices {
            self.withdraw((id, choice));
            self.finish(now, (id, choice), Outcome::Failed(failure.clone()));
        }
    }

    /// Ends a choice and reports the outcome to its client.
    pub(crate) fn finish(&mut self, now: Duration, at: ChoiceId, outcome: Outcome) {
        // The request is removed with its last choice; a loop over its choices may still reach this point.
        let Some(request) = self.requests.get(at.0) else { return };
        if request.sequences[at.1].place() == Place::Done {
            return;
        }
        let usage = request.usage(at.1);
        self.conclude(at, &outcome);
        self.end(at);
        self.tell(at.0, RequestEvent::Finished { choice: at.1 as u32, outcome, usage });
        self.forget_if_done(now, at.0);
    }

    /// Ends a choice that its client or the gateway has abandoned.
    fn leave(&mut self, at: ChoiceId) {
        if self.requests.get(at.0).is_some_and(|request| request.sequences[at.1].place() != Place::Done) {
            let sequence = self.requests.choice(at).1;
            self.decisions.end(sequence.id, "left", sequence.generated.len() as u32, sequence.tpot_ms());
            self.end(at);
        }
    }

    /// Learns from a choice that ends.
    fn conclude(&mut self, at: ChoiceId, outcome: &Outcome) {
        let sequence = self.requests.choice(at).1;
        let drawn = sequence.generated.len() as u32;
        let tpot_ms = sequence.tpot_ms();
        let word = match outcome {
            Outcome::Stop(_) => "stop",
            Outcome::Length => "length",
            Outcome::Failed(_) => "failed",
        };
        self.decisions.end(sequence.id, word, drawn, tpot_ms);
        if matches!(outcome, Outcome::Stop(_) | Outcome::Length) {
            self.cost.observe_output(drawn);
            // A few tokens say little, and tokens from two workers say nothing about either.
            if let (Some(predicted), Some(actual), true) = (sequence.predicted_tpot_ms, tpot_ms, drawn >= TPOT_TOKENS_MIN) {
                self.cost.tpot.observe(predicted, actual);
            }
        }
    }

    /// Cancels a choice at its worker.
    fn withdraw(&mut self, at: ChoiceId) {
        let Some(sequence) = self.requests.get(at.0).map(|request| &request.sequences[at.1]) else { return };
        if let Some(running) = sequence.running() {
            let message = ToWorker::CancelSequence { sequence: sequence.id };
            self.send(running.worker, message);
        }
    }

    fn end(&mut self, at: ChoiceId) {
        self.unsettled = true;
        self.load.end_sequence(self.requests.choice(at).1.id);
        self.requests.end(at);
    }

    fn forget_if_done(&mut self, now: Duration, id: RequestId) {
        if let Some(request) = self.requests.remove_if_done(id) {
            self.fairness.end(request.tenant);
            if let Some(job) = request.prefill {
                self.cancel_prefill(now, id, &job);
            }
        }
    }
}
