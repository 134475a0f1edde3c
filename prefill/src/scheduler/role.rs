//! The scheduler as seen by its engine.

use super::Scheduler;
use std::time::Duration;
use tidemill_engine::{
    job::{JobId, ScheduledChunk},
    residency::{JobKv, Residency},
    role::{Load, Role},
};
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::{
    ids::LinkId,
    message::{Counters, ToWorker},
    step::{Segment, SegmentResult},
};

impl Role for Scheduler {
    const DECODES: bool = false;

    fn accept(&mut self, link: LinkId, message: ToWorker, now: Duration) -> Option<ToWorker> {
        match message {
            ToWorker::Prefill(order) => self.admit(link, order, now),
            ToWorker::CancelPrefill { request } => self.cancel(request),
            other => return Some(other),
        }
        None
    }

    fn link_down(&mut self, link: LinkId) {
        self.forget_where(|job| job.link == link);
    }

    /// Notes the blocks that home holds. An error ends the job.
    fn matched(&mut self, id: JobId, held: Result<usize, String>) {
        match (self.jobs.get_mut(&id), held) {
            (Some(job), Ok(held)) => job.matched(held),
            (_, Err(reason)) => self.fail(id, reason),
            (None, _) => {}
        }
    }

    fn kv(&self, job: JobId) -> Option<&JobKv> {
        Some(&self.jobs.get(&job)?.kv)
    }

    fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<u32> {
        let id = self.residency.fetching_job(fetch)?;
        let job = self.jobs.get_mut(&id).expect("a fetch belongs to a live job");
        let fetched = self.residency.fetched(&mut job.kv, index, arrival, now)?;
        if fetched.finished.is_some() {
            job.lose_from(job.kv.computed_blocks());
            self.start(id, now);
            self.put_full_blocks();
        }
        fetched.block
    }

    fn put_done(&mut self, id: JobId, blocks: usize, outcome: Result<(), String>, now: Duration) {
        self.putting -= blocks;
        if let Some(job) = self.jobs.get_mut(&id) {
            job.putting -= blocks;
            match outcome {
                Err(reason) => self.fail(id, reason),
                Ok(()) => self.finish_if_done(id, now),
            }
        }
        self.put_full_blocks();
    }

    /// Plans a step; an empty one while there is no room to put its blocks.
    fn plan(&mut self, now: Duration) -> Vec<ScheduledChunk> {
        self.fail_late(now);
        let ranks = self.ranks(now);
        self.admit_waiting(&ranks, now);
        self.put_full_blocks();
        self.schedule(&ranks, now)
    }

    fn segment(&self, chunk: &ScheduledChunk) -> Segment<'_> {
        self.jobs[&chunk.job].segment(chunk.start, chunk.len)
    }

    fn stepped(&mut self, chunks: &[ScheduledChunk], _: Vec<SegmentResult>, now: Duration) {
        self.counters.steps += 1;
        let (work, planned) = self.step;
        self.pace.observe(&work, now.saturating_sub(planned));
        for chunk in chunks {
            let job = self.jobs.get_mut(&chunk.job).expect("a planned job lives until its step is done");
            self.residency.advance(&mut job.kv, chunk);
            self.shares.serve(&job.order.urgency, chunk.len);
            self.counters.prefill_computed_tokens += chunk.len as u64;
            self.put_state(chunk.job);
            self.finish_if_done(chunk.job, now);
        }
        self.put_full_blocks();
    }

    fn hand_back(&mut self, reason: &str) {
        for id in self.jobs_where(|_| true) {
            self.fail(id, reason.to_owned());
        }
    }

    fn residency(&self) -> &Residency {
        &self.residency
    }

    fn residency_mut(&mut self) -> &mut Residency {
        &mut self.residency
    }

    fn load(&self) -> Load {
        let running = self.running();
        let tokens_queued = self.jobs.values().map(|job| job.tokens_queued() as u64).sum();
        Load { waiting: self.jobs.len() - running, running, tokens_queued }
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}
