//! What waiting clients hear: their place in the queue, and how long it may take.

use crate::{
    Cluster, RequestEvent,
    requests::{ChoiceId, order::Turn},
};
use std::time::Duration;
use tidemill_proto::ids::RequestId;

/// Longest silence towards a client that waits.
pub(crate) const WAITING_TOLD_EVERY: Duration = Duration::from_secs(1);

impl Cluster {
    /// Tells every client that waits.
    pub(crate) fn tell_waiting(&mut self, now: Duration) {
        let mut turns: Vec<(ChoiceId, Turn)> = self.turns(now).collect();
        turns.sort_unstable_by(|(_, a), (_, b)| a.compare(b, false));
        for (ahead, (at, _)) in turns.into_iter().enumerate() {
            self.tell_place(at, ahead);
        }
    }

    /// Tells the client of a request that has just come in, of those choices that wait.
    pub(super) fn tell_waiting_of(&mut self, now: Duration, id: RequestId) {
        let choices = self.requests.get(id).map_or(0, |request| request.sequences.len());
        for at in (0..choices).map(|choice| (id, choice)) {
            if self.requests.get(id).is_some_and(|request| request.sequences[at.1].is_queued()) {
                let ahead = self.ahead_of(now, at);
                self.tell_place(at, ahead);
            }
        }
    }

    /// Waiting sequences whose turn comes before this one's.
    pub(super) fn ahead_of(&self, now: Duration, at: ChoiceId) -> usize {
        let Some((_, own)) = self.turns(now).find(|(other, _)| *other == at) else { return 0 };
        self.turns(now).filter(|(_, turn)| turn.compare(&own, false).is_lt()).count()
    }

    fn tell_place(&mut self, (request, choice): ChoiceId, ahead: usize) {
        let estimate_ms = self.pace.wait_ms(ahead + 1).map(|ms| ms as u64);
        self.tell(request, RequestEvent::Waiting { choice: choice as u32, position: ahead as u32 + 1, estimate_ms });
    }
}
