//! Chunked prefill: which jobs hold device blocks, what the next step computes, and which blocks go into the pool.
//!
//! ```text
//!            home answers        room on the device             all computed        all put
//!   matching ───────────► waiting ─────► fetching ─► computing ─────────► putting ───────► done
//! ```
//!
//! - **Matching** asks the job's home node about the blocks that are not to be read elsewhere; those that it lacks are put there.
//! - **A step** computes jobs in the order in which they came; the next job's tokens fill up its chunk.
//! - **Putting** starts as soon as a block is full, while the next step computes. Blocks stay on the device as its prefix cache.
//! - **Back-pressure.** A slow pool slows prefill down instead of filling memory: while `putting_max` blocks are on their way, nothing
//!   is computed.

mod integrity;
mod role;

use crate::job::Job;
use std::{collections::BTreeMap, time::Duration};
use tidemill_engine::{
    job::{Action, Delivery, JobId, ScheduledChunk},
    residency::Residency,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, LayoutFingerprint},
    ids::{LinkId, RequestId},
    message::{Counters, PrefillJob, PrefillOutcome, WorkerEvent},
};

/// Blocks of one put.
const PUT_BLOCKS: usize = 32;

/// Bounds of one worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Jobs that hold device blocks at once.
    pub admitted_max: usize,
    /// Jobs altogether; one more fails at once.
    pub jobs_max: usize,
    /// Tokens of one step.
    pub step_tokens: usize,
    /// Blocks on their way into pools.
    pub putting_max: usize,
    /// Tokens in the model's vocabulary.
    pub vocab: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    residency: Residency,
    /// Numbered in order of arrival: a request may come back, and late answers of its old job are not the new one's.
    jobs: BTreeMap<JobId, Job>,
    jobs_seen: u64,
    /// Blocks on their way into pools, those of jobs that are gone included.
    putting: usize,
    counters: Counters,
}

const LIVE: &str = "a listed job lives";

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        let residency = Residency::new(device_blocks);
        Self { layout, limits, residency, jobs: BTreeMap::new(), jobs_seen: 0, putting: 0, counters: Counters::default() }
    }

    /// A coordinator hands over a job. One that cannot run is answered at once.
    pub fn admit(&mut self, link: LinkId, order: PrefillJob, now: Duration) {
        if let Some(reason) = self.unfit(&order) {
            return self.send_outcome(link, order.request, PrefillOutcome::Failed { reason });
        }
        let id = JobId(self.jobs_seen);
        self.jobs_seen += 1;
        let job = Job::new(id, link, order, &self.layout, now);
        self.residency.act(Action::Match { job: id, node: job.order.home, keys: job.keys_at_home() });
        self.jobs.insert(id, job);
    }

    /// Nobody wants this request's job any more.
    pub fn cancel(&mut self, request: RequestId) {
        self.forget_where(|job| job.order.request == request);
    }

    fn fail_late(&mut self, now: Duration) {
        for id in self.jobs_where(|job| now > job.arrived + Duration::from_millis(job.order.deadline_ms)) {
            self.fail(id, "deadline passed".into());
        }
    }

    /// First come, first served, as far as there is room.
    fn admit_waiting(&mut self, now: Duration) {
        for id in self.jobs_where(Job::is_waiting) {
            let is_full = self.running() >= self.limits.admitted_max;
            let job = self.jobs.get_mut(&id).expect(LIVE);
            let blocks = job.kv.keys().len();
            if is_full || !self.residency.admit(&mut job.kv, blocks, blocks, 0) {
                break;
            }
            job.admitted = now;
            let nodes = job.readable();
            if !self.residency.fetch(&mut job.kv, &nodes, None, Duration::ZERO, now) {
                self.start(id, now);
            }
        }
    }

    /// All blocks that could be had are on the device; the rest, if there is one, is computed.
    fn start(&mut self, id: JobId, now: Duration) {
        let job = self.jobs.get_mut(&id).expect(LIVE);
        self.counters.prefill_cached_tokens += job.note_ready() as u64;
        self.finish_if_done(id, now);
    }

    /// Oldest job first.
    fn schedule(&self) -> Vec<ScheduledChunk> {
        let mut budget = if self.putting < self.limits.putting_max { self.limits.step_tokens } else { 0 };
        let mut chunks = Vec::new();
        for (&id, job) in &self.jobs {
            let len = job.remaining().min(budget);
            if len > 0 {
                chunks.push(ScheduledChunk { job: id, start: job.kv.computed(), len });
                budget -= len;
            }
        }
        chunks
    }

    /// Sends full blocks on their way into the pool, oldest job first, until `putting_max` are.
    fn put_full_blocks(&mut self) {
        for (&id, job) in &mut self.jobs {
            while self.putting < self.limits.putting_max
                && let Some(numbers) = job.next_put(PUT_BLOCKS)
            {
                self.putting += numbers.len();
                self.residency.put(&job.kv, numbers, job.order.home, Delivery::Acknowledged(id));
            }
        }
    }

    fn finish_if_done(&mut self, id: JobId, now: Duration) {
        if let Some(job) = self.jobs.get(&id).filter(|job| job.is_done()) {
            let outcome = job.done(now);
            self.end(id, outcome);
        }
    }

    fn fail(&mut self, id: JobId, reason: String) {
        self.end(id, PrefillOutcome::Failed { reason });
    }

    fn end(&mut self, id: JobId, outcome: PrefillOutcome) {
        if let Some(job) = self.forget(id) {
            self.send_outcome(job.link, job.order.request, outcome);
        }
    }

    fn forget(&mut self, id: JobId) -> Option<Job> {
        let mut job = self.jobs.remove(&id)?;
        self.residency.release(&mut job.kv);
        Some(job)
    }

    fn forget_where(&mut self, gone: impl Fn(&Job) -> bool) {
        for id in self.jobs_where(gone) {
            self.forget(id);
        }
    }

    fn jobs_where(&self, wanted: impl Fn(&Job) -> bool) -> Vec<JobId> {
        self.jobs.iter().filter(|(_, job)| wanted(job)).map(|(&id, _)| id).collect()
    }

    /// Jobs that hold device blocks.
    fn running(&self) -> usize {
        self.jobs.values().filter(|job| job.kv.is_admitted()).count()
    }

    fn send_outcome(&mut self, link: LinkId, request: RequestId, outcome: PrefillOutcome) {
        self.residency.act(Action::Send { link, event: WorkerEvent::Prefilled { request, outcome } });
    }

    /// Why a job cannot run here.
    fn unfit(&self, order: &PrefillJob) -> Option<String> {
        let (blocks, tokens, device_blocks) = (order.blocks as usize, order.tokens.len(), self.residency.device_blocks());
        if blocks == 0 || blocks.saturating_mul(BLOCK_TOKENS) > tokens {
            return Some(format!("job asks for {blocks} blocks of {tokens} tokens"));
        }
        if let Some(token) = order.tokens.iter().find(|&&token| token as usize >= self.limits.vocab) {
            return Some(format!("token {token} is not in the model's vocabulary of {}", self.limits.vocab));
        }
        if let Some(fault) = order.urgency.fault() {
            return Some(fault);
        }
        if blocks > device_blocks {
            return Some(format!("{blocks} blocks do not fit this worker's device memory of {device_blocks}"));
        }
        if self.jobs.len() >= self.limits.jobs_max {
            return Some(format!("{} jobs are queued here already", self.jobs.len()));
        }
        let twice = self.jobs.values().any(|job| job.order.request == order.request);
        twice.then(|| "this request's job is here already".into())
    }
}
