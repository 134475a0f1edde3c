//! Each worker's sequences and jobs from this coordinator, and its last report.
//!
//! Soft state: never replicated, and gone with the worker. Sequences and prefill jobs enter and leave the books here and
//! nowhere else, so the scheduler's sums cannot drift from reality.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use tidemill_proto::{
    ids::{Epoch, RequestId, SequenceId},
    message::Report,
};

#[derive(Debug, Default)]
pub struct Load {
    workers: BTreeMap<Epoch, WorkerLoad>,
    shares: BTreeMap<SequenceId, Share>,
}

#[derive(Debug)]
pub struct WorkerLoad {
    /// When it last said anything.
    pub heard: Duration,
    pub report: Report,
    pub decode: DecodeLoad,
    pub prefill: PrefillQueue,
}

/// Sequences at a decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeLoad {
    pub sequences: u32,
    /// Their lengths, added up.
    pub tokens: u64,
    /// Tokens that the worker computes itself before those sequences' first tokens.
    pub tail_tokens: u64,
}

/// Jobs at a prefill worker, in the order given.
#[derive(Clone, Debug, Default)]
pub struct PrefillQueue {
    jobs: VecDeque<(RequestId, f64)>,
    /// Since when the first of them is being computed.
    head_since: Option<Duration>,
}

/// One sequence's part of its worker's load.
#[derive(Clone, Copy, Debug)]
struct Share {
    worker: Epoch,
    tokens: u64,
    tail_tokens: u64,
}

impl Load {
    pub fn add_worker(&mut self, now: Duration, worker: Epoch) {
        let load = WorkerLoad { heard: now, report: Report::default(), decode: DecodeLoad::default(), prefill: PrefillQueue::default() };
        self.workers.insert(worker, load);
    }

    /// Forgets a worker and everything it had. Returns the requests of its prefill jobs, in the order given.
    pub fn remove_worker(&mut self, worker: Epoch) -> Vec<RequestId> {
        self.shares.retain(|_, share| share.worker != worker);
        self.workers.remove(&worker).map_or(Vec::new(), |load| load.prefill.requests().collect())
    }

    pub fn workers(&self) -> impl Iterator<Item = Epoch> {
        self.workers.keys().copied()
    }

    pub fn get(&self, worker: Epoch) -> Option<&WorkerLoad> {
        self.workers.get(&worker)
    }

    pub fn heard(&mut self, now: Duration, worker: Epoch) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.heard = now;
        }
    }

    /// Keeps a worker's report; returns the one before.
    pub fn reported(&mut self, worker: Epoch, report: Report) -> Option<Report> {
        self.workers.get_mut(&worker).map(|load| std::mem::replace(&mut load.report, report))
    }

    /// Workers that have said nothing for `silence`.
    pub fn silent(&self, now: Duration, silence: Duration) -> Vec<Epoch> {
        let silent = |load: &WorkerLoad| now.saturating_sub(load.heard) >= silence;
        self.workers.iter().filter(|(_, load)| silent(load)).map(|(worker, _)| *worker).collect()
    }

    /// A sequence of `tokens` tokens goes to a decode worker, which computes `tail_tokens` of them.
    pub fn start_sequence(&mut self, worker: Epoch, sequence: SequenceId, tokens: u64, tail_tokens: u64) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.decode.sequences += 1;
            load.decode.tokens += tokens;
            load.decode.tail_tokens += tail_tokens;
            self.shares.insert(sequence, Share { worker, tokens, tail_tokens });
        }
    }

    /// A sequence grew by a token; its tail is computed.
    pub fn grow_sequence(&mut self, sequence: SequenceId) {
        if let Some(share) = self.shares.get_mut(&sequence)
            && let Some(load) = self.workers.get_mut(&share.worker)
        {
            load.decode.tokens += 1;
            load.decode.tail_tokens -= share.tail_tokens;
            share.tokens += 1;
            share.tail_tokens = 0;
        }
    }

    /// A sequence is at its worker no longer. Nothing happens if the worker is gone.
    pub fn end_sequence(&mut self, sequence: SequenceId) {
        if let Some(share) = self.shares.remove(&sequence)
            && let Some(load) = self.workers.get_mut(&share.worker)
        {
            load.decode.sequences -= 1;
            load.decode.tokens -= share.tokens;
            load.decode.tail_tokens -= share.tail_tokens;
        }
    }

    /// A request's prefill job goes to a worker. `ms`: its predicted time.
    pub fn start_job(&mut self, now: Duration, worker: Epoch, request: RequestId, ms: f64) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.prefill.push(now, request, ms);
        }
    }

    /// A request's prefill job is at a worker no longer. Nothing happens if the worker is gone.
    pub fn end_job(&mut self, now: Duration, worker: Epoch, request: RequestId) {
        if let Some(load) = self.workers.get_mut(&worker) {
            load.prefill.remove(now, request);
        }
    }

    /// Panics if the books do not balance. Tests call it after every step.
    pub fn check_integrity(&self) {
        let mut sums: BTreeMap<Epoch, DecodeLoad> = self.workers.keys().map(|worker| (*worker, DecodeLoad::default())).collect();
        for (sequence, share) in &self.shares {
            let sum = sums.get_mut(&share.worker).unwrap_or_else(|| panic!("sequence {sequence} runs at a worker that is gone"));
            sum.sequences += 1;
            sum.tokens += share.tokens;
            sum.tail_tokens += share.tail_tokens;
            assert!(share.tail_tokens <= share.tokens, "sequence {sequence} has a longer tail than itself");
        }
        for (worker, load) in &self.workers {
            assert_eq!(load.decode, sums[worker], "load of worker {worker}");
            load.prefill.check_integrity();
        }
    }
}

impl PrefillQueue {
    fn push(&mut self, now: Duration, request: RequestId, ms: f64) {
        if self.jobs.is_empty() {
            self.head_since = Some(now);
        }
        self.jobs.push_back((request, ms));
    }

    fn remove(&mut self, now: Duration, request: RequestId) {
        if self.jobs.front().is_some_and(|(head, _)| *head == request) {
            self.head_since = Some(now);
        }
        self.jobs.retain(|(job, _)| *job != request);
    }

    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.jobs.iter().map(|(request, _)| *request)
    }

    /// Predicted time until another job could begin. A head that takes longer than predicted counts as almost done.
    pub fn wait_ms(&self, now: Duration) -> f64 {
        let total: f64 = self.jobs.iter().map(|(_, ms)| ms).sum();
        let head_ms = self.jobs.front().map_or(0.0, |(_, ms)| *ms);
        let elapsed_ms = self.head_since.map_or(0.0, |since| now.saturating_sub(since).as_secs_f64() * 1e3);
        total - head_ms.min(elapsed_ms)
    }

    fn check_integrity(&self) {
        assert!(self.jobs.is_empty() || self.head_since.is_some(), "somebody computes the first job");
        for request in self.requests() {
            assert_eq!(self.requests().filter(|other| *other == request).count(), 1, "request {request} has one job at a worker");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_queue_shrinks_as_its_head_is_computed() {
        let (mut queue, start) = (PrefillQueue::default(), Duration::ZERO);
        queue.push(start, RequestId(1), 100.0);
        queue.push(start, RequestId(2), 50.0);
        queue.check_integrity();
        assert_eq!(queue.wait_ms(start), 150.0);
        assert_eq!(queue.wait_ms(start + Duration::from_millis(40)), 110.0);
        assert_eq!(queue.wait_ms(start + Duration::from_secs(9)), 50.0);
        queue.remove(start + Duration::from_millis(90), RequestId(1));
        queue.check_integrity();
        assert_eq!(queue.wait_ms(start + Duration::from_millis(100)), 40.0);
    }

    #[test]
    fn a_sequence_leaves_with_all_that_it_brought() {
        let (mut load, worker) = (Load::default(), Epoch(1));
        load.add_worker(Duration::ZERO, worker);
        load.start_sequence(worker, SequenceId(1), 40, 8);
        load.start_sequence(worker, SequenceId(2), 10, 10);
        load.grow_sequence(SequenceId(1));
        load.check_integrity();
        assert_eq!(load.get(worker).unwrap().decode, DecodeLoad { sequences: 2, tokens: 51, tail_tokens: 10 });
        load.end_sequence(SequenceId(1));
        load.end_sequence(SequenceId(1));
        load.check_integrity();
        assert_eq!(load.get(worker).unwrap().decode, DecodeLoad { sequences: 1, tokens: 10, tail_tokens: 10 });
        load.remove_worker(worker);
        load.end_sequence(SequenceId(2));
        load.check_integrity();
    }
}
