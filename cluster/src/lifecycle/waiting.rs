//! Events for waiting clients: their position in the queue, and an estimate of the wait.

use crate::{
    Cluster, RequestEvent,
    requests::{ChoiceId, Sequence, order::Turn},
};
use std::time::Duration;
use tidemill_proto::ids::RequestId;

/// The longest silence towards a waiting client.
pub(crate) const WAITING_TOLD_EVERY: Duration = Duration::from_secs(1);

impl Cluster {
    /// Reports their position to all waiting clients.
    pub(crate) fn tell_waiting(&mut self, now: Duration) {
        for (ahead, at) in self.in_order(now).into_iter().enumerate() {
            self.tell_place(at, ahead);
        }
    }

    /// Reports the position of choices that wait, for requests that have just come in (the oldest first). There may be as many as the queue
    /// holds, so the queue is ordered once for all of them.
    pub(super) fn tell_waiting_of(&mut self, now: Duration, new: &[RequestId]) {
        let waits = |id: &RequestId| self.requests.get(*id).is_some_and(|request| request.sequences.iter().any(Sequence::is_queued));
        if !new.iter().any(waits) {
            return;
        }
        let order = self.in_order(now).into_iter().enumerate();
        let mut places: Vec<(ChoiceId, usize)> =
            order.filter(|(_, (id, _))| new.binary_search(id).is_ok()).map(|(ahead, at)| (at, ahead)).collect();
        places.sort_unstable();
        for (at, ahead) in places {
            self.tell_place(at, ahead);
        }
    }

    /// The waiting sequences, the next one first.
    fn in_order(&self, now: Duration) -> Vec<ChoiceId> {
        let mut turns: Vec<(ChoiceId, Turn)> = self.turns(now).collect();
        turns.sort_unstable_by(|(_, a), (_, b)| a.compare(b, false));
        turns.into_iter().map(|(at, _)| at).collect()
    }

    /// The number of waiting sequences that go before this one.
    pub(super) fn ahead_of(&self, now: Duration, at: ChoiceId) -> usize {
        let Some((_, own)) = self.turns(now).find(|(other, _)| *other == at) else { return 0 };
        self.turns(now).filter(|(_, turn)| turn.compare(&own, false).is_lt()).count()
    }

    fn tell_place(&mut self, (request, choice): ChoiceId, ahead: usize) {
        let estimate_ms = self.pace.wait_ms(ahead + 1).map(|ms| ms as u64);
        self.tell(request, RequestEvent::Waiting { choice: choice as u32, position: ahead as u32 + 1, estimate_ms });
    }
}
