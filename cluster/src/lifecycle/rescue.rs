//! Rescue: a sequence whose worker crashed, or sent it back, is resumed elsewhere, from the tokens it has. (A client's own reconnection to an
//! answer is the gateway's: `http/replay.rs`.)

use crate::{Cluster, Failure, Outcome, requests::ChoiceId};
use std::time::Duration;
use tidemill_proto::{
    ids::Epoch,
    message::{Provenance, ToWorker},
};

/// Workers that a sequence is lost with before its client hears of it.
pub(crate) const LOSSES_MAX: u32 = 12;
/// How long a returned sequence rests before it is offered again: doubled each time in a row, up to the maximum.
const RETURN_REST: Duration = Duration::from_millis(25);
const RETURN_REST_MAX: Duration = Duration::from_secs(2);

impl Cluster {
    /// A decode worker is gone: its sequences go elsewhere.
    pub(crate) fn decode_worker_down(&mut self, now: Duration, worker: Epoch) {
        self.running_at(worker).into_iter().rev().for_each(|at| self.rescue_lost(now, at));
    }

    /// A decode worker is not to be trusted any more: its sequences go elsewhere.
    pub(crate) fn leave_decode_worker(&mut self, now: Duration, worker: Epoch) {
        self.running_at(worker).into_iter().rev().for_each(|at| self.start_over(now, at));
    }

    /// The sequences of a worker. From the last on, each goes to the front of the queue, so the oldest ends up first.
    fn running_at(&self, worker: Epoch) -> Vec<ChoiceId> {
        self.requests.running().filter(|(_, running)| running.worker == worker).map(|(at, _)| at).collect()
    }

    /// A sequence goes elsewhere, though its worker still has it.
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

    /// The worker of a running sequence is lost, or no longer to be trusted with it.
    pub(super) fn rescue(&mut self, now: Duration, at: ChoiceId) {
        let sequence = self.requests.choice_mut(at);
        sequence.losses += 1;
        sequence.is_kept();
        self.put_back(now, at, Duration::ZERO);
    }

    /// A worker had no room for it. That is no loss: it waits for room no longer than any other sequence.
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
