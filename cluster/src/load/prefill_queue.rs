//! The jobs at one prefill worker, in the order in which it computes them: by priority, then by the time they are due.

use crate::class::ClassId;
use std::{cmp::Reverse, time::Duration};
use tidemill_proto::ids::RequestId;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueuedJob {
    pub request: RequestId,
    pub class: ClassId,
    pub priority: u8,
    /// The time by which its request's first token is due, if there is a limit.
    pub due: Option<Duration>,
    /// The predicted time to compute the rest of it.
    pub ms: f64,
}

#[derive(Clone, Debug, Default)]
pub struct PrefillQueue {
    /// The jobs, the most urgent first.
    jobs: Vec<QueuedJob>,
    /// The time at which the computation of the first job started.
    head_since: Duration,
}

/// The sort key: the least goes first, and equal ones in order of arrival.
type Rank = (Reverse<u8>, Duration);

impl QueuedJob {
    fn rank(&self) -> Rank {
        rank(self.priority, self.due)
    }
}

fn rank(priority: u8, due: Option<Duration>) -> Rank {
    (Reverse(priority), due.unwrap_or(Duration::MAX))
}

impl PrefillQueue {
    pub fn push(&mut self, now: Duration, job: QueuedJob) {
        self.settle(now);
        let at = self.jobs.partition_point(|other| other.rank() <= job.rank());
        self.jobs.insert(at, job);
    }

    pub fn remove(&mut self, now: Duration, request: RequestId) {
        self.settle(now);
        self.jobs.retain(|job| job.request != request);
    }

    /// Subtracts the time computed so far from the first job, before the order changes.
    fn settle(&mut self, now: Duration) {
        if let Some(head) = self.jobs.first_mut() {
            let elapsed_ms = now.saturating_sub(self.head_since).as_secs_f64() * 1e3;
            head.ms = (head.ms - elapsed_ms).max(0.0);
        }
        self.head_since = now;
    }

    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.jobs.iter().map(|job| job.request)
    }

    /// The predicted time until the queue is empty. A first job that takes longer than predicted counts as almost done.
    pub fn wait_ms(&self, now: Duration) -> f64 {
        self.jobs.iter().map(|job| job.ms).sum::<f64>() - self.elapsed_ms(now)
    }

    /// Predicted time of the jobs that wait for others.
    pub fn behind_head_ms(&self) -> f64 {
        self.jobs.iter().skip(1).map(|job| job.ms).sum()
    }

    /// The predicted time until a job of this urgency would start.
    pub fn ahead_ms(&self, now: Duration, priority: u8, due: Option<Duration>) -> f64 {
        let ahead = self.jobs.partition_point(|job| job.rank() <= rank(priority, due));
        let elapsed_ms = if ahead > 0 { self.elapsed_ms(now) } else { 0.0 };
        self.jobs[..ahead].iter().map(|job| job.ms).sum::<f64>() - elapsed_ms
    }

    /// The jobs that would run after one of this urgency, each with the predicted time until it is done.
    pub fn behind(&self, now: Duration, priority: u8, due: Option<Duration>) -> impl Iterator<Item = (&QueuedJob, f64)> {
        let ahead = self.jobs.partition_point(|job| job.rank() <= rank(priority, due));
        let mut done_ms = self.jobs[..ahead].iter().map(|job| job.ms).sum::<f64>() - self.elapsed_ms(now);
        self.jobs[ahead..].iter().map(move |job| {
            done_ms += job.ms;
            (job, done_ms)
        })
    }

    /// The time that the first job has had, at most its predicted time.
    fn elapsed_ms(&self, now: Duration) -> f64 {
        let head_ms = self.jobs.first().map_or(0.0, |job| job.ms);
        head_ms.min(now.saturating_sub(self.head_since).as_secs_f64() * 1e3)
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert!(self.jobs.is_sorted_by_key(QueuedJob::rank), "the most urgent job comes first");
        assert!(self.jobs.iter().all(|job| job.ms.is_finite() && job.ms >= 0.0), "a job takes some time");
        for request in self.requests() {
            assert_eq!(self.requests().filter(|other| *other == request).count(), 1, "request {request} has one job at a worker");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(request: u64, ms: f64, priority: u8, due_ms: Option<u64>) -> QueuedJob {
        QueuedJob { request: RequestId(request), class: ClassId::default(), priority, due: due_ms.map(Duration::from_millis), ms }
    }

    #[test]
    fn a_prefill_queue_shrinks_as_its_head_is_computed() {
        let (mut queue, start) = (PrefillQueue::default(), Duration::ZERO);
        queue.push(start, job(1, 100.0, 0, None));
        queue.push(start, job(2, 50.0, 0, None));
        queue.check_integrity();
        assert_eq!((queue.wait_ms(start), queue.behind_head_ms()), (150.0, 50.0));
        assert_eq!(queue.wait_ms(start + Duration::from_millis(40)), 110.0);
        assert_eq!(queue.wait_ms(start + Duration::from_secs(9)), 50.0);
        queue.remove(start + Duration::from_millis(90), RequestId(1));
        queue.check_integrity();
        assert_eq!(queue.wait_ms(start + Duration::from_millis(100)), 40.0);
    }

    #[test]
    fn urgent_jobs_wait_for_more_urgent_ones_only() {
        let (mut queue, now) = (PrefillQueue::default(), Duration::ZERO);
        queue.push(now, job(1, 100.0, 1, Some(900)));
        queue.push(now, job(2, 30.0, 1, Some(300)));
        queue.push(now, job(3, 500.0, 0, None));
        queue.push(now, job(4, 7.0, 2, None));
        queue.check_integrity();
        assert_eq!(queue.requests().map(|request| request.0).collect::<Vec<_>>(), [4, 2, 1, 3]);
        let ahead = |priority, due_ms: Option<u64>| queue.ahead_ms(now, priority, due_ms.map(Duration::from_millis));
        let waits = [ahead(2, Some(10)), ahead(2, None), ahead(1, Some(500)), ahead(1, None), ahead(0, Some(1)), ahead(0, None)];
        assert_eq!(waits, [0.0, 7.0, 37.0, 137.0, 137.0, 637.0]);
        let behind: Vec<_> = queue.behind(now, 1, Some(Duration::from_millis(500))).map(|(job, ms)| (job.request.0, ms)).collect();
        assert_eq!(behind, [(1, 137.0), (3, 637.0)]);
        // A job that is interrupted keeps its progress.
        let later = now + Duration::from_millis(5);
        queue.push(later, job(5, 10.0, 3, None));
        assert_eq!(queue.ahead_ms(later, 2, None), 12.0);
    }
}
