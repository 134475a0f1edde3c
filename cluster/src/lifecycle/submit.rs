//! A request comes in: admission, then the queue.

use crate::{
    Cluster, NewRequest, Rejection,
    admission::{self, Occupancy},
    candidates,
    requests::{Request, Sequence},
    schedule::Decision,
};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};
use tidemill_proto::ids::{RequestId, SequenceId};

impl Cluster {
    /// Refuses more choices at a time than even an empty queue could take: no retry would help.
    pub fn check_choices(&self, choices: usize) -> Result<(), Rejection> {
        admission::check_choices(&self.settings.admission, choices)
    }

    /// Takes a request. Its events follow as [`Action::Client`](crate::Action::Client), one `Finished` per choice, unless it is
    /// cancelled.
    pub fn submit(&mut self, now: Duration, new: NewRequest) -> Result<RequestId, Rejection> {
        debug_assert!(!new.prompt.is_empty() && new.choices > 0 && new.stop.max_tokens > 0, "the gateway checks");
        let occupancy = Occupancy {
            context_tokens: self.membership.context_tokens(),
            waiting: self.requests.waiting(),
            decode: &candidates::decode(&self.membership, &self.load, &self.cost),
            cost: &self.cost,
        };
        admission::admit(&self.settings.admission, &occupancy, new.tokens_max(), new.choices as usize)?;
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
        };
        let alone = self.requests.waiting() == 0;
        self.requests.insert(id, request);
        if alone && let Decision::Reject { retry_after_ms } = self.decide(now, (id, 0)) {
            self.withdraw_new(id);
            return Err(Rejection::Late { retry_after_ms });
        }
        self.place_queued(now);
        Ok(id)
    }

    /// Forgets a request that nobody has heard of yet.
    fn withdraw_new(&mut self, id: RequestId) {
        let choices = self.requests.get(id).map_or(0, |request| request.sequences.len());
        (0..choices).for_each(|choice| self.requests.end((id, choice)));
        self.requests.remove_if_done(id);
    }

    fn draw_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

/// Until there are tenants, those who share a salt are one.
fn tenant(salt: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    salt.hash(&mut hasher);
    hasher.finish()
}
