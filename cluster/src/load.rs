//! Each worker's sequences and jobs from this coordinator, its last report, and the number of other coordinators' sequences derived from
//! it.
//!
//! Soft state: never replicated, and gone with the worker. Sequences and prefill jobs are added and removed here and nowhere else, so the
//! scheduler's sums cannot drift from reality.

mod prefill_queue;

pub use prefill_queue::{PrefillQueue, QueuedJob};

use crate::class::{CLASSES_MAX, ClassId};
use std::{collections::BTreeMap, time::Duration};
use tidemill_proto::{
    ids::{Epoch, RequestId, SequenceId},
    message::Report,
};

/// The number of tokens that a decode worker's sequences gain before its position in the orders is updated.
const TOKENS_PER_TOUCH: u64 = 64;

#[derive(Debug, Default)]
pub struct Load {
    workers: BTreeMap<Epoch, WorkerLoad>,
    shares: BTreeMap<SequenceId, Share>,
    /// Workers whose position in an order may have changed.
    touched: Vec<Epoch>,
    /// Whether other coordinators also place sequences at these workers.
    shared: bool,
}

#[derive(Debug)]
pub struct WorkerLoad {
    /// The time of its last message.
    pub heard: Duration,
    pub report: Report,
    /// The number of reports that it has sent.
    pub reports: u64,
    pub decode: DecodeLoad,
    /// The number of sequences that other coordinators have at this decode worker, as of its last report.
    pub others: u32,
    pub prefill: PrefillQueue,
    touched: bool,
}

/// The sequences at a decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeLoad {
    pub sequences: u32,
    /// The sum of their lengths.
    pub tokens: u64,
    /// Tokens that the worker computes itself before these sequences' first tokens.
    pub tail_tokens: u64,
    /// The number of sequences that have drawn a token.
    pub decoding: u32,
    pub classes: [ClassLoad; CLASSES_MAX],
}

/// The sequences of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassLoad {
    pub sequences: u32,
    pub tokens: u64,
    pub tail_tokens: u64,
}

/// A sequence that goes to a decode worker.
#[derive(Clone, Copy, Debug)]
pub struct NewShare {
    pub tokens: u64,
    /// The number of these tokens that the worker computes itself.
    pub tail_tokens: u64,
    pub class: ClassId,
}

/// One sequence's part of its worker's load.
#[derive(Clone, Copy, Debug)]
struct Share {
    worker: Epoch,
    tokens: u64,
    tail_tokens: u64,
    class: ClassId,
    decoding: bool,
}

impl DecodeLoad {
    fn add(&mut self, share: &Share) {
        self.sequences += 1;
        self.tokens += share.tokens;
        self.tail_tokens += share.tail_tokens;
        self.decoding += u32::from(share.decoding);
        let class = &mut self.classes[place(share.class)];
        class.sequences += 1;
        class.tokens += share.tokens;
        class.tail_tokens += share.tail_tokens;
    }

    fn remove(&mut self, share: &Share) {
        self.sequences -= 1;
        self.tokens -= share.tokens;
        self.tail_tokens -= share.tail_tokens;
        self.decoding -= u32::from(share.decoding);
        let class = &mut self.classes[place(share.class)];
        class.sequences -= 1;
        class.tokens -= share.tokens;
        class.tail_tokens -= share.tail_tokens;
    }
}

fn place(class: ClassId) -> usize {
    usize::from(class.0).min(CLASSES_MAX - 1)
}

impl Load {
    pub fn add_worker(&mut self, now: Duration, worker: Epoch) {
        let load = WorkerLoad {
            heard: now,
            report: Report::default(),
            reports: 0,
            decode: DecodeLoad::default(),
            others: 0,
            prefill: PrefillQueue::default(),
            touched: false,
        };
        self.workers.insert(worker, load);
        self.touch(worker);
    }

    /// Removes a worker with all its work. Returns the requests of its prefill jobs, in the order of its queue.
    pub fn remove_worker(&mut self, worker: Epoch) -> Vec<RequestId> {
        self.shares.retain(|_, share| share.worker != worker);
        self.workers.remove(&worker).map_or(Vec::new(), |load| load.prefill.requests().collect())
    }

    pub fn workers(&self) -> impl Iterator<Item = Epoch> {
        self.workers.keys().copied()
    }

    /// Marks a worker whose position in an order may have changed.
    pub fn touch(&mut self, worker: Epoch) {
        if let Some(load) = self.workers.get_mut(&worker)
            && !std::mem::replace(&mut load.touched, true)
        {
            self.touched.push(worker);
        }
    }

    /// The workers that were touched since the last call and still exist.
    pub fn take_touched(&mut self) -> Vec<Epoch> {
        let mut touched = std::mem::take(&mut self.touched);
        touched.retain(|worker| self.workers.get_mut(worker).is_some_and(|load| std::mem::replace(&mut load.touched, false)));
        touched
    }

    pub fn get(&self, worker: Epoch) -> Option<&WorkerLoad> {
        self.workers.get(&worker)
    }

    pub fn heard(&mut self, now: Duration, worker: Epoch) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.heard = now;
        }
    }

    /// From now on, sequences that workers report beyond this coordinator's own count as those of other coordinators.
    pub fn share(&mut self) {
        self.shared = true;
    }

    /// Keeps a worker's report, and returns the previous one.
    pub fn reported(&mut self, worker: Epoch, report: Report) -> Option<Report> {
        self.touch(worker);
        let load = self.workers.get_mut(&worker)?;
        if self.shared {
            load.others = (report.running.saturating_add(report.waiting)).saturating_sub(load.decode.sequences);
        }
        load.reports += 1;
        Some(std::mem::replace(&mut load.report, report))
    }

    /// Workers that have been silent for `silence`.
    pub fn silent(&self, now: Duration, silence: Duration) -> Vec<Epoch> {
        let silent = |load: &WorkerLoad| now.saturating_sub(load.heard) >= silence;
        self.workers.iter().filter(|(_, load)| silent(load)).map(|(worker, _)| *worker).collect()
    }

    pub fn start_sequence(&mut self, worker: Epoch, sequence: SequenceId, new: NewShare) {
        if let Some(load) = self.workers.get_mut(&worker) {
            let NewShare { tokens, tail_tokens, class } = new;
            let share = Share { worker, tokens, tail_tokens, class, decoding: false };
            load.decode.add(&share);
            self.shares.insert(sequence, share);
            self.touch(worker);
        }
    }

    /// Counts a token of a sequence, whose tail is computed by now.
    pub fn grow_sequence(&mut self, sequence: SequenceId) {
        if let Some(share) = self.shares.get_mut(&sequence)
            && let Some(load) = self.workers.get_mut(&share.worker)
        {
            load.decode.remove(share);
            share.tokens += 1;
            share.tail_tokens = 0;
            let first = !std::mem::replace(&mut share.decoding, true);
            load.decode.add(share);
            // A single token changes no order.
            let worker = share.worker;
            if first || load.decode.tokens.is_multiple_of(TOKENS_PER_TOUCH) {
                self.touch(worker);
            }
        }
    }

    /// Removes a sequence from its worker. Does nothing if the worker is gone.
    pub fn end_sequence(&mut self, sequence: SequenceId) {
        if let Some(share) = self.shares.remove(&sequence)
            && let Some(load) = self.workers.get_mut(&share.worker)
        {
            load.decode.remove(&share);
            self.touch(share.worker);
        }
    }

    /// Adds a request's prefill job to a worker.
    pub fn start_job(&mut self, now: Duration, worker: Epoch, job: QueuedJob) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.prefill.push(now, job);
            self.touch(worker);
        }
    }

    /// Removes a request's prefill job from a worker. Does nothing if the worker is gone.
    pub fn end_job(&mut self, now: Duration, worker: Epoch, request: RequestId) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.prefill.remove(now, request);
            self.touch(worker);
        }
    }

    /// Panics if the sums are wrong. Tests call it after every step.
    pub fn check_integrity(&self) {
        let mut sums: BTreeMap<Epoch, DecodeLoad> = self.workers.keys().map(|worker| (*worker, DecodeLoad::default())).collect();
        for (sequence, share) in &self.shares {
            let sum = sums.get_mut(&share.worker).unwrap_or_else(|| panic!("sequence {sequence} runs at a worker that is gone"));
            sum.add(share);
            assert!(!share.decoding || share.tail_tokens == 0, "sequence {sequence} decodes before its tail is computed");
            assert!(share.tail_tokens <= share.tokens, "sequence {sequence} has a longer tail than itself");
        }
        for (worker, load) in &self.workers {
            assert_eq!(load.decode, sums[worker], "load of worker {worker}");
            load.prefill.check_integrity();
        }
    }
}

impl WorkerLoad {
    /// The number of sequences at this decode worker and the sum of their lengths. Those of other coordinators count as long as this
    /// coordinator's own, or as typical.
    pub fn whole(&self, typical_tokens: u64) -> (u32, u64) {
        let DecodeLoad { sequences, tokens, .. } = self.decode;
        let each = if sequences == 0 { typical_tokens } else { tokens / u64::from(sequences) };
        (sequences.saturating_add(self.others), tokens.saturating_add(each.saturating_mul(self.others.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_report_says_beyond_ones_own_sequences_is_others() {
        let (mut load, worker) = (Load::default(), Epoch(1));
        load.add_worker(Duration::ZERO, worker);
        load.start_sequence(worker, SequenceId(1), NewShare { tokens: 40, tail_tokens: 0, class: ClassId(0) });
        let report = || Report { running: 3, waiting: 1, ..Report::default() };
        load.reported(worker, report());
        assert_eq!(load.get(worker).unwrap().whole(1000), (1, 40), "alone, whatever a report says");
        load.share();
        load.reported(worker, report());
        assert_eq!(load.get(worker).unwrap().whole(1000), (4, 160));
        load.end_sequence(SequenceId(1));
        assert_eq!(load.get(worker).unwrap().whole(1000), (3, 3000));
        load.reported(worker, Report::default());
        assert_eq!(load.get(worker).unwrap().whole(1000), (0, 0));
        assert_eq!(load.get(worker).unwrap().reports, 3);
        load.check_integrity();
    }

    #[test]
    fn a_sequence_leaves_with_all_that_it_brought() {
        let classes = |first, third| {
            let mut classes = [ClassLoad::default(); CLASSES_MAX];
            (classes[0], classes[2]) = (first, third);
            classes
        };
        let class = |sequences, tokens, tail_tokens| ClassLoad { sequences, tokens, tail_tokens };
        let (mut load, worker) = (Load::default(), Epoch(1));
        load.add_worker(Duration::ZERO, worker);
        let share = |tokens, tail_tokens, class| NewShare { tokens, tail_tokens, class: ClassId(class) };
        load.start_sequence(worker, SequenceId(1), share(40, 8, 0));
        load.start_sequence(worker, SequenceId(2), share(10, 10, 2));
        load.grow_sequence(SequenceId(1));
        load.check_integrity();
        assert_eq!(
            load.get(worker).unwrap().decode,
            DecodeLoad { sequences: 2, tokens: 51, tail_tokens: 10, decoding: 1, classes: classes(class(1, 41, 0), class(1, 10, 10)) }
        );
        load.end_sequence(SequenceId(1));
        load.end_sequence(SequenceId(1));
        load.check_integrity();
        assert_eq!(
            load.get(worker).unwrap().decode,
            DecodeLoad { sequences: 1, tokens: 10, tail_tokens: 10, decoding: 0, classes: classes(ClassLoad::default(), class(1, 10, 10)) }
        );
        load.remove_worker(worker);
        load.end_sequence(SequenceId(2));
        load.check_integrity();
    }
}
