//! The prefill job of a request: sent, done, failed, cancelled; and the sequences that wait for its blocks.

use super::place::runs;
use crate::{
    Cluster, Warning, candidates,
    load::QueuedJob,
    requests::{ChoiceId, PendingPrefill},
    schedule,
};
use std::time::Duration;
use tidemill_proto::{
    ids::{Epoch, RequestId},
    message::{PrefillJob, PrefillOutcome, ToWorker},
    urgency::Urgency,
};

/// The number of prefill workers that are tried for one job before its waiters compute the blocks themselves.
const ATTEMPTS_MAX: usize = 3;
/// The time after a job's end within which sequences fetch its blocks, or find them gone.
pub(crate) const HANDOVER_MAX: Duration = Duration::from_secs(1);

impl Cluster {
    pub(super) fn start_prefill(&mut self, now: Duration, id: RequestId, job: PendingPrefill, deadline_ms: u64) {
        let request = self.requests.get_mut(id).expect("jobs belong to requests");
        let home = self.membership.pool_node(job.home, job.worker).expect("the scheduler chooses live pool nodes");
        let worker = self.membership.get(job.worker).expect("the scheduler chooses live workers");
        let message = PrefillJob {
            request: id,
            tokens: job.tokens.clone(),
            blocks: job.keys.len() as u32,
            salt: job.salt.clone(),
            read: runs(&self.membership, &job.read, job.worker),
            home,
            deadline_ms,
            urgency: job.urgency,
        };
        request.prefill_worker = Some(worker.name.clone());
        let Urgency { due_ms, priority, .. } = job.urgency;
        let due = due_ms.map(|ms| now + Duration::from_millis(ms));
        let queued = QueuedJob { request: id, class: request.new.class, priority, due, ms: job.predicted_ms };
        self.load.start_job(now, job.worker, queued);
        self.autoscaler.iter_mut().for_each(|scaler| scaler.job(queued.ms));
        let worker = job.worker;
        request.prefill = Some(job);
        self.send(worker, ToWorker::Prefill(message));
    }

    pub(crate) fn prefilled(&mut self, now: Duration, worker: Epoch, id: RequestId, outcome: &PrefillOutcome) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let Some(job) = request.prefill.take_if(|job| job.worker == worker) else { return };
        self.load.end_job(now, worker, id);
        match outcome {
            PrefillOutcome::Done { .. } => {
                request.record_prefill(outcome);
                request.handed_over = Some((now, job.home));
            }
            PrefillOutcome::Failed { reason } => {
                let warning = Warning::PrefillFailed { request: id, worker, reason: reason.clone() };
                self.warn(warning);
                self.reassign(now, id, job);
            }
        }
    }

    /// Moves the jobs of a lost prefill worker to others.
    pub(crate) fn prefill_worker_down(&mut self, now: Duration, requests: &[RequestId]) {
        for &id in requests {
            if let Some(job) = self.requests.get_mut(id).and_then(|request| request.prefill.take()) {
                self.reassign(now, id, job);
            }
        }
    }

    /// Takes the jobs of a distrusted prefill worker away. The blocks that it has published are not trusted either, so sequences that wait
    /// for them start over.
    pub(crate) fn leave_prefill_worker(&mut self, now: Duration, worker: Epoch) {
        let held: Vec<RequestId> = self.load.get(worker).map_or(Vec::new(), |load| load.prefill.requests().collect());
        for id in held {
            let request = self.requests.get_mut(id).expect("jobs belong to requests");
            let Some(job) = request.prefill.take() else { continue };
            request.cancelled_at.push(worker);
            self.cancel_prefill(now, id, &job);
            for choice in self.waiting_at(id, job.home) {
                self.start_over(now, (id, choice));
            }
        }
    }

    /// Gives a job to another prefill worker. If there is none, its sequences stop waiting.
    fn reassign(&mut self, now: Duration, id: RequestId, mut job: PendingPrefill) {
        job.tried.push(job.worker);
        let request = self.requests.get(id).expect("jobs belong to requests");
        let mut candidates = candidates::all(&self.books(), &self.index.usable(&job.keys, self.membership.state_blocks()), now).prefill;
        candidates.retain(|candidate| !job.tried.contains(&candidate.worker) && !request.cancelled_at.contains(&candidate.worker));
        match schedule::choose_prefill(&candidates).map(|next| next.worker) {
            Some(worker) if job.tried.len() < ATTEMPTS_MAX && self.membership.get(job.home).is_some() => {
                let deadline_ms = request.remaining(now).as_millis() as u64;
                self.start_prefill(now, id, PendingPrefill { worker, ..job }, deadline_ms);
            }
            _ => self.stop_waiting_for(id, job.home),
        }
    }

    /// Cancels a job that its request has given up.
    pub(super) fn cancel_prefill(&mut self, now: Duration, id: RequestId, job: &PendingPrefill) {
        if self.load.get(job.worker).is_some() {
            self.load.end_job(now, job.worker, id);
            self.send(job.worker, ToWorker::CancelPrefill { request: id });
        }
    }

    /// Handles the loss of a pool node: decode workers compute the blocks that they expected there. Readers notice the loss themselves.
    pub(crate) fn pool_node_down(&mut self, now: Duration, node: Epoch) {
        let lost = self.requests.iter().filter(|(_, request)| request.prefill.as_ref().is_some_and(|job| job.home == node));
        for id in lost.map(|(id, _)| id).collect::<Vec<_>>() {
            let request = self.requests.get_mut(id).expect("just listed");
            let job = request.prefill.take().expect("just listed");
            request.cancelled_at.push(job.worker);
            self.cancel_prefill(now, id, &job);
        }
        let waiting = self.requests.running().filter(|(_, running)| running.waits && running.home == Some(node));
        for at in waiting.map(|(at, _)| at).collect::<Vec<_>>() {
            self.stop_waiting(at);
        }
    }

    /// Ends the wait for a finished job's blocks after the time it takes to fetch them: blocks that are still missing were evicted, and
    /// will not come.
    pub(crate) fn end_handovers(&mut self, now: Duration) {
        let over = |at: Duration| now.saturating_sub(at) >= HANDOVER_MAX;
        let settled = self.requests.iter().filter_map(|(id, request)| Some((id, request.handed_over.filter(|(at, _)| over(*at))?.1)));
        for (id, home) in settled.collect::<Vec<_>>() {
            self.requests.get_mut(id).expect("just listed").handed_over = None;
            self.stop_waiting_for(id, home);
        }
    }

    /// Ends the wait of a request's sequences for blocks at that pool node.
    fn stop_waiting_for(&mut self, id: RequestId, home: Epoch) {
        for choice in self.waiting_at(id, home) {
            self.stop_waiting((id, choice));
        }
    }

    /// The choices of a request that wait for blocks at that pool node.
    fn waiting_at(&self, id: RequestId, home: Epoch) -> Vec<usize> {
        let sequences = &self.requests.get(id).expect("jobs belong to requests").sequences;
        (0..sequences.len()).filter(|&choice| sequences[choice].waits_at(home)).collect()
    }

    fn stop_waiting(&mut self, at: ChoiceId) {
        let sequence = self.requests.choice_mut(at);
        if let Some(running) = sequence.running() {
            sequence.stop_waiting();
            let message = ToWorker::StopWaiting { sequence: sequence.id };
            self.send(running.worker, message);
        }
    }
}
