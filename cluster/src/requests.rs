//! All requests that have not ended, and the queue of sequences that wait for a place.
//!
//! A sequence changes its [`Place`] here and nowhere else, so queue, index and places cannot disagree:
//!
//! ```text
//!   insert ──► Queued ──start──► Running ──end──► Done
//!                ▲ └──────────────┼──────end──────▲
//!                └────put_back────┘
//! ```

pub(crate) mod order;
mod state;

pub(crate) use state::{PendingPrefill, Pin, Place, Request, Running, Sequence, common_prefix};

use crate::class::Classes;
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use tidemill_proto::ids::{Epoch, RequestId, SequenceId};

/// A choice, by its request and its index among that request's choices.
pub(crate) type ChoiceId = (RequestId, usize);

#[derive(Debug, Default)]
pub(crate) struct Requests {
    requests: BTreeMap<RequestId, Request>,
    /// The request and choice of every sequence that has not ended.
    sequences: BTreeMap<SequenceId, ChoiceId>,
    /// Sequences without a place; those that had one before come first.
    queue: VecDeque<SequenceId>,
}

impl Requests {
    pub(crate) fn insert(&mut self, id: RequestId, request: Request) {
        for (choice, sequence) in request.sequences.iter().enumerate() {
            self.sequences.insert(sequence.id, (id, choice));
            self.queue.push_back(sequence.id);
        }
        self.requests.insert(id, request);
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&Request> {
        self.requests.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        self.requests.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestId, &Request)> {
        self.requests.iter().map(|(id, request)| (*id, request))
    }

    /// A choice of a request that has not ended.
    pub(crate) fn choice(&self, (id, choice): ChoiceId) -> (&Request, &Sequence) {
        let request = &self.requests[&id];
        (request, &request.sequences[choice])
    }

    pub(crate) fn choice_mut(&mut self, (id, choice): ChoiceId) -> &mut Sequence {
        &mut self.requests.get_mut(&id).expect("a sequence that has not ended has a request").sequences[choice]
    }

    /// The request and choice of a sequence that has not ended.
    pub(crate) fn locate(&self, sequence: SequenceId) -> Option<ChoiceId> {
        self.sequences.get(&sequence).copied()
    }

    /// The choice of a sequence, if it runs at this worker.
    pub(crate) fn running_at(&self, worker: Epoch, sequence: SequenceId) -> Option<ChoiceId> {
        let at = self.locate(sequence)?;
        self.choice(at).1.running().filter(|running| running.worker == worker).map(|_| at)
    }

    /// All running sequences, from the oldest.
    pub(crate) fn running(&self) -> impl Iterator<Item = (ChoiceId, Running)> {
        self.sequences.values().filter_map(|&at| Some((at, self.choice(at).1.running()?)))
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn running_count(&self) -> usize {
        self.sequences.len() - self.queue.len()
    }

    /// The queue in order of arrival, after the sequences that went back to it.
    pub(crate) fn queue(&self) -> impl Iterator<Item = SequenceId> {
        self.queue.iter().copied()
    }

    /// Moves a sequence from the queue to a decode worker.
    pub(crate) fn start(&mut self, at: ChoiceId, running: Running) {
        let sequence = self.choice_mut(at);
        debug_assert!(matches!(sequence.place, Place::Queued { .. }), "only a queued sequence starts");
        sequence.place = Place::Running(running);
        let id = sequence.id;
        self.queue.retain(|queued| *queued != id);
    }

    /// Counts an overtaking for each waiting sequence that came before this one and has no lower priority.
    pub(crate) fn note_overtaken(&mut self, by: SequenceId, classes: &Classes) {
        let Some((request, _)) = self.locate(by).map(|at| self.choice(at)) else { return };
        let priority = classes.get(request.new.class).priority;
        let before: Vec<_> = self.queue.iter().take_while(|sequence| **sequence != by).map(|sequence| self.sequences[sequence]).collect();
        for at in before {
            if classes.get(self.choice(at).0.new.class).priority >= priority {
                self.choice_mut(at).overtaken += 1;
            }
        }
    }

    /// Moves a sequence from its decode worker to the front of the queue.
    pub(crate) fn put_back(&mut self, at: ChoiceId, since: Duration, not_before: Duration) {
        let sequence = self.choice_mut(at);
        debug_assert!(sequence.running().is_some(), "only a running sequence goes back");
        sequence.place = Place::Queued { since, not_before };
        let id = sequence.id;
        self.queue.push_front(id);
    }

    /// Ends a sequence, whether it was queued or running.
    pub(crate) fn end(&mut self, at: ChoiceId) {
        let sequence = self.choice_mut(at);
        sequence.place = Place::Done;
        let id = sequence.id;
        self.queue.retain(|queued| *queued != id);
        self.sequences.remove(&id);
    }

    /// Removes and returns a request whose choices have all ended.
    pub(crate) fn remove_if_done(&mut self, id: RequestId) -> Option<Request> {
        let done = self.requests.get(&id).is_some_and(Request::is_done);
        done.then(|| self.requests.remove(&id)).flatten()
    }

    /// Panics if the state is inconsistent. Tests call it after every step.
    pub(crate) fn check_integrity(&self) {
        let (mut queued, mut live) = (0, 0);
        for (id, request) in &self.requests {
            assert!(!request.is_done(), "request {id} is done and still remembered");
            for (choice, sequence) in request.sequences.iter().enumerate() {
                let known = self.sequences.get(&sequence.id);
                match sequence.place {
                    Place::Done => assert_eq!(known, None, "sequence {} is done and still known", sequence.id),
                    Place::Queued { .. } => {
                        assert_eq!(self.queue.iter().filter(|queued| **queued == sequence.id).count(), 1, "queued once");
                        queued += 1;
                    }
                    Place::Running(_) => {}
                }
                if sequence.place != Place::Done {
                    assert_eq!(known, Some(&(*id, choice)));
                    live += 1;
                }
            }
        }
        assert_eq!((queued, live), (self.queue.len(), self.sequences.len()), "queued and live sequences");
    }
}
