//! A request comes in: admission, then the queue.

use crate::{
    Cluster, NewRequest, Rejection,
    admission::{self, Occupancy},
    candidates,
    requests::{Request, Sequence},
};
use std::time::Duration;
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
        let request = Request {
            new,
            submitted: now,
            sequences,
            prefill: None,
            handed_over: None,
            cancelled_at: Vec::new(),
            prefill_worker: None,
            prefill_ms: 0.0,
        };
        self.requests.insert(id, request);
        self.place_queued(now);
        Ok(id)
    }

    fn draw_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}
