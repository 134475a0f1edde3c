//! The queue of summaries to make: one conversation after the other, each by one worker at a time, and not again soon after a failure.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

/// The wait before a failed summary is tried again, if the conversation continues.
pub const RETRY_AFTER: Duration = Duration::from_secs(60);
/// The maximum number of failures that are remembered. Beyond this, the oldest is dropped, and tried again sooner.
const FAILURES_MAX: usize = 1024;

/// A queue of jobs `J` for conversations `K`.
#[derive(Debug)]
pub struct Summing<K, J> {
    waiting_max: usize,
    waiting: VecDeque<(K, J)>,
    running: BTreeSet<K>,
    /// Conversations with the number of items whose summary failed, and the time of the failure.
    failures: VecDeque<(K, usize, Duration)>,
}

impl<K: Ord + Clone, J> Summing<K, J> {
    pub fn new(waiting_max: usize) -> Self {
        Self { waiting_max, waiting: VecDeque::new(), running: BTreeSet::new(), failures: VecDeque::new() }
    }

    /// Adds a job, or replaces one that waits for the same conversation. Returns `false` if too many wait.
    pub fn push(&mut self, key: K, job: J) -> bool {
        if let Some((_, waiting)) = self.waiting.iter_mut().find(|(other, _)| *other == key) {
            *waiting = job;
            return true;
        }
        let room = self.waiting.len() < self.waiting_max;
        if room {
            self.waiting.push_back((key, job));
        }
        room
    }

    /// Takes the next job whose conversation is not being summarized already.
    pub fn take(&mut self) -> Option<(K, J)> {
        let place = self.waiting.iter().position(|(key, _)| !self.running.contains(key))?;
        let (key, job) = self.waiting.remove(place)?;
        self.running.insert(key.clone());
        Some((key, job))
    }

    /// Notes the end of a job. `failed` is the number of items whose summary failed, if it did.
    pub fn ended(&mut self, now: Duration, key: &K, failed: Option<usize>) {
        self.running.remove(key);
        self.failures.retain(|(other, _, at)| other != key && now < *at + RETRY_AFTER);
        if let Some(items) = failed {
            if self.failures.len() == FAILURES_MAX {
                self.failures.pop_front();
            }
            self.failures.push_back((key.clone(), items, now));
        }
    }

    /// Whether summarizing this many items failed a short while ago.
    pub fn has_failed(&self, now: Duration, key: &K, items: usize) -> bool {
        self.failures.iter().any(|(other, failed, at)| other == key && *failed == items && now < *at + RETRY_AFTER)
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1000);

    #[test]
    fn a_conversation_is_summarized_by_one_at_a_time_and_waits_once() {
        let mut summing = Summing::new(2);
        assert!(summing.push("a", 1) && summing.push("b", 2));
        assert!(summing.push("a", 3), "the newer wish takes the older one's place");
        assert!(!summing.push("c", 4), "there is no room");
        assert_eq!(summing.take(), Some(("a", 3)));
        assert!(summing.push("a", 5));
        assert_eq!((summing.take(), summing.take()), (Some(("b", 2)), None));
        summing.ended(NOW, &"a", None);
        assert_eq!((summing.take(), summing.waiting()), (Some(("a", 5)), 0));
    }

    #[test]
    fn what_failed_rests() {
        let mut summing: Summing<_, ()> = Summing::new(2);
        summing.ended(NOW, &"a", Some(7));
        let failed = |summing: &Summing<_, _>, after, items| summing.has_failed(NOW + Duration::from_secs(after), &"a", items);
        assert!(failed(&summing, 0, 7) && failed(&summing, 59, 7));
        assert!(!failed(&summing, 60, 7) && !failed(&summing, 0, 8) && !summing.has_failed(NOW, &"b", 7));
        summing.ended(NOW, &"a", None);
        assert!(!failed(&summing, 0, 7));
        for n in 0..2000 {
            summing.ended(NOW, &"b", Some(n));
        }
        assert_eq!(summing.failures.len(), 1, "one of each conversation");
    }
}
