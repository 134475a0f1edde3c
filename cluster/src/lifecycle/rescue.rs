//! Rescue: a sequence whose worker crashed, or sent it back, is resumed on another worker from the tokens it has. (A client's own
//! reconnection to an answer is the gateway's: `http/replay.rs`.)

use crate::{Cluster, Failure, Outcome, requests::ChoiceId};
use std::time::Duration;
use tidemill_proto::{
    ids::Epoch,
    message::{Provenance, ToWorker},
};

/// The number of workers a sequence may be lost with before its client gets an error.
pub(crate) const LOSSES_MAX: u32 = 12;
/// The time a returned sequence rests before it is offered again: doubled each time in a row, up to the maximum.
const RETURN_REST: Duration = Duration::from_millis(25);
const RETURN_REST_MAX: Duration = Duration::from_secs(2);

impl Cluster {
    /// Rescues the sequences of a lost decode worker. One that `has_left` handed back all that it had: the rest were sent to it while it said
    /// good-bye, and it never began them.
    pub(crate) fn decode_worker_down(&mut self, now: Duration, worker: Epoch, has_left: bool) {
        self.running_at(worker).into_iter().rev().for_each(|at| if has_left { self.take_back(now, at) } else { self.rescue_lost(now, at) });
    }

    /// Moves the sequences of a distrusted decode worker elsewhere.
    pub(crate) fn leave_decode_worker(&mut self, now: Duration, worker: Epoch) {
        self.running_at(worker).into_iter().rev().for_each(|at| self.start_over(now, at));
    }

    /// The sequences of a worker, in ascending order. Callers rescue the last one first: each goes to the front of the queue, so the oldest
    /// ends up first.
    fn running_at(&self, worker: Epoch) -> Vec<ChoiceId> {
        self.requests.running().filter(|(_, running)| running.worker == worker).map(|(at, _)| at).collect()
    }

    /// Moves a sequence elsewhere, though its worker still has it.
    pub(super) fn start_over(&mut self, now: Duration, at: ChoiceId) {
        let sequence = self.requests.choice(at).1;
        if let Some(running) = sequence.running() {
            let sequence = sequence.id;
            self.send(running.worker, ToWorker::CancelSequence { sequence });
            self.rescue_lost(now, at);
        }
    }

    fn rescue_lost(&mut self, now: Duration, at: ChoiceId) {
        self.rescues += 1;
        self.requests.choice_mut(at).usage.rescues += 1;
        self.rescue(now, at);
    }

    /// Requeues a running sequence whose worker is lost, or no longer trusted.
    pub(super) fn rescue(&mut self, now: Duration, at: ChoiceId) {
        let sequence = self.requests.choice_mut(at);
        sequence.losses += 1;
        sequence.is_kept();
        self.put_back(now, at, Duration::ZERO);
    }

    /// Requeues a sequence for which a worker had no room. This does not count as a loss, and the sequence waits for room no longer than
    /// any other.
    pub(super) fn take_back(&mut self, now: Duration, at: ChoiceId) {
        let sequence = self.requests.choice_mut(at);
        sequence.returns += 1;
        let rest = RETURN_REST.saturating_mul(1 << sequence.returns.min(16)).min(RETURN_REST_MAX);
        self.put_back(now, at, rest);
    }

    fn put_back(&mut self, now: Duration, at: ChoiceId, rest: Duration) {
        let (id, choice) = at;
        let request = self.requests.get_mut(id).expect("a running sequence has a request");
        let ended = request.ended_by_tokens(choice);
        if let (Some(_), Some(running)) = (&ended, request.sequences[choice].running()) {
            request.account(choice, Provenance { tokens: request.planned(&running), ..Provenance::default() });
        }
        let (sequence, losses) = (request.sequences[choice].id, request.sequences[choice].losses);
        self.unsettled = true;
        request.sequences[choice].predicted_tpot_ms = None;
        self.load.end_sequence(sequence);
        self.requests.put_back(at, now, now + rest);
        if let Some(outcome) = ended {
            self.finish(now, at, outcome);
        } else if losses >= LOSSES_MAX {
            self.finish(now, at, Outcome::Failed(Failure::Losses(LOSSES_MAX)));
        }
    }
}
