//! Submission of a request: admission, then the queue.

use crate::{
    Cluster, Failure, NewRequest, Rejection,
    admission::{self, Newcomer, Occupancy, Waiting},
    class::OnMiss,
    requests::ChoiceId,
    requests::{Pin, Request, Sequence},
    schedule::Decision,
};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};
use tidemill_proto::{
    block::tenant_part,
    ids::{RequestId, SequenceId},
};

impl Cluster {
    /// Refuses more choices at once than even an empty queue could take: a retry would not help.
    pub fn check_choices(&self, choices: usize) -> Result<(), Rejection> {
        admission::check_choices(&self.settings.admission, choices)
    }

    /// Accepts a request. Its events follow as [`Action::Client`](crate::Action::Client), one `Finished` per choice, unless it is
    /// cancelled.
    pub fn submit(&mut self, now: Duration, new: NewRequest) -> Result<RequestId, Rejection> {
        self.submit_at(now, new, None)
    }

    /// Accepts all of a client's requests, or none. They are placed in a single pass over the queue: there may be as many as the queue
    /// holds.
    pub fn submit_all(&mut self, now: Duration, all: Vec<NewRequest>) -> Result<Vec<RequestId>, Rejection> {
        let mut taken = Vec::with_capacity(all.len());
        for new in all {
            match self.enter(now, new, None) {
                Ok(id) => taken.push(id),
                Err(rejection) => {
                    taken.into_iter().for_each(|id| self.withdraw_new(id));
                    return Err(rejection);
                }
            }
        }
        self.settle(now, &taken);
        Ok(taken)
    }

    /// Accepts a request. With a pin, it is a probe.
    pub(crate) fn submit_at(&mut self, now: Duration, new: NewRequest, pin: Option<Pin>) -> Result<RequestId, Rejection> {
        let id = self.enter(now, new, pin)?;
        self.settle(now, &[id]);
        Ok(id)
    }

    /// Places the new requests, and reports their position to clients of those that wait.
    fn settle(&mut self, now: Duration, new: &[RequestId]) {
        self.unsettled = true;
        self.place_queued(now);
        self.tell_waiting_of(now, new);
    }

    /// Puts a request into the queue, without an event to its client.
    fn enter(&mut self, now: Duration, new: NewRequest, pin: Option<Pin>) -> Result<RequestId, Rejection> {
        debug_assert!(!new.prompt.is_empty() && new.choices > 0 && new.stop.max_tokens > 0, "the gateway checks");
        let occupancy = Occupancy { context_tokens: self.context_tokens(now), waiting: self.requests.waiting(), pace: &self.pace };
        let admitted = admission::admit(&self.settings.admission, &occupancy, new.tokens_max(), new.choices as usize);
        let retry_after_ms = admission::retry_after_ms(&occupancy, occupancy.waiting);
        let admitted = admitted.and_then(|()| match new.needs_thought_limits() && self.membership.lack_thought_limits() {
            true => Err(Rejection::NoThoughtLimits),
            false => Ok(()),
        });
        let displaced = match admitted {
            Ok(()) => Vec::new(),
            Err(full @ Rejection::Full { .. }) if pin.is_none() => self.displaced_by(&new).ok_or(full)?,
            Err(rejection) => return Err(rejection),
        };
        let id = RequestId(self.draw_id());
        let sequences = (0..new.choices).map(|_| Sequence::queued(SequenceId(self.draw_id()), now)).collect();
        let tenant = tenant(&new.salt);
        let request = Request {
            new,
            tenant,
            submitted: now,
            sequences,
            prefill: None,
            handed_over: None,
            cancelled_at: Vec::new(),
            prefill_worker: None,
            prefill_ms: 0.0,
            pin,
        };
        self.fairness.begin(tenant);
        self.requests.insert(id, request);
        if let Some(retry_after_ms) = self.would_be_late(now, (id, 0)) {
            self.refused_in_a_row += 1;
            self.withdraw_new(id);
            return Err(Rejection::Late { retry_after_ms });
        }
        for displaced in displaced {
            self.fail_request(now, displaced, &Failure::Displaced { retry_after_ms });
        }
        Ok(id)
    }

    /// The requests that give way in a full queue. Their clients have received no events but their positions in it.
    fn displaced_by(&self, new: &NewRequest) -> Option<Vec<RequestId>> {
        let priority = |request: &NewRequest| self.settings.classes.get(request.class).priority;
        let mut of_tenants: HashMap<u64, usize> = HashMap::new();
        let mut waiting = Vec::new();
        for (id, request) in self.requests.iter() {
            let queued = request.sequences.iter().filter(|sequence| sequence.is_queued()).count();
            if queued == 0 {
                continue;
            }
            *of_tenants.entry(request.tenant).or_default() += queued;
            let is_new = request.sequences.iter().all(|sequence| sequence.is_queued() && !sequence.is_resumed());
            if is_new && request.pin.is_none() {
                waiting.push(Waiting { id, tenant: request.tenant, priority: priority(&request.new), sequences: queued });
            }
        }
        let newcomer = Newcomer { tenant: tenant(&new.salt), priority: priority(new), choices: new.choices as usize };
        admission::displaced(&self.settings.admission, of_tenants, waiting, newcomer)
    }

    /// Time after which to retry, for a new sequence that would be late and whose class rejects late ones.
    fn would_be_late(&mut self, now: Duration, at: ChoiceId) -> Option<u64> {
        let request = self.requests.choice(at).0;
        let class = self.settings.classes.get(request.new.class);
        if class.on_miss != OnMiss::Reject || request.pin.is_some() {
            return None;
        }
        let limit_ms = class.ttft_ms;
        let ahead = self.ahead_of(now, at);
        if ahead == 0 {
            let Decision::Reject { retry_after_ms } = self.decide(now, at) else { return None };
            return Some(retry_after_ms);
        }
        let late_ms = self.pace.wait_ms(ahead + 1)? - limit_ms?;
        (late_ms > 0.0).then_some(late_ms as u64)
    }

    /// Removes a request for which no event has been sent.
    fn withdraw_new(&mut self, id: RequestId) {
        let choices = self.requests.get(id).map_or(0, |request| request.sequences.len());
        (0..choices).for_each(|choice| self.requests.end((id, choice)));
        if let Some(request) = self.requests.remove_if_done(id) {
            self.fairness.end(request.tenant);
        }
    }

    fn draw_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

/// A tenant: all requests whose salts share a [`tenant_part`].
fn tenant(salt: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tenant_part(salt).hash(&mut hasher);
    hasher.finish()
}
