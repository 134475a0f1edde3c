//! Chunked prefill: the jobs that hold device blocks, the work of the next step, and the blocks that go into the pool.
//!
//! ```text
//!            home answers        room on the device             all computed        all put
//!   matching ───────────► waiting ─────► fetching ─► computing ─────────► putting ───────► done
//! ```
//!
//! - **Matching** asks the job's home node about the blocks that are not to be read elsewhere; those that it lacks are put there.
//! - **Order** ([`order`]): limits first, then short prompts; shares between groups; no job starves. It decides which jobs
//!   get device blocks and whose tokens a step computes.
//! - **A step** is short ([`STEP_MS`]), so that a chunk of a long prompt yields to a short one that has just come. Tokens of the next jobs
//!   fill it up.
//! - **Preemption.** If device blocks or places run out, the last job in order gives up its own. The blocks that it has computed stay
//!   findable on the device as long as there is room, and in the pool.
//! - **Putting** starts as soon as a block is full, while the next step computes. Blocks stay on the device as its prefix cache.
//! - **Back-pressure.** A slow pool slows prefill down instead of filling memory: while `putting_max` blocks are in flight, nothing
//!   is computed.

mod integrity;
mod role;

use crate::job::Job;
use std::{collections::BTreeMap, time::Duration};
use tidemill_engine::{
    budget::{self, Candidate, Room},
    job::{Action, Delivery, JobId, ScheduledChunk},
    order::{self, Owed, PASSED_MAX, Rank, Standing},
    pace::{Pace, StepWork},
    residency::Residency,
    shares::{self, Shares},
    states::StateRule,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, LayoutFingerprint},
    ids::{LinkId, RequestId},
    message::{Counters, PrefillJob, PrefillOutcome, WorkerEvent},
};

/// The target time of a step, which bounds the wait of an urgent newcomer for its turn. Shorter steps cost more per token.
pub const STEP_MS: f64 = 100.0;
/// The most blocks of one put.
const PUT_BLOCKS: usize = 32;

/// Bounds of one worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most jobs that hold device blocks at once.
    pub admitted_max: usize,
    /// The most jobs altogether; one more fails at once.
    pub jobs_max: usize,
    /// The most tokens of one step.
    pub step_tokens: usize,
    /// The most blocks in flight to pools.
    pub putting_max: usize,
    /// The number of tokens in the model's vocabulary.
    pub vocab: usize,
}

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    residency: Residency,
    /// The jobs, numbered in order of arrival: a request may come back, and late answers to its old job are not the new one's.
    jobs: BTreeMap<JobId, Job>,
    jobs_seen: u64,
    /// The number of blocks in flight to pools, including those of jobs that are gone.
    putting: usize,
    shares: Shares,
    owed: Owed,
    pace: Pace,
    /// The step in progress, and the time at which it began.
    step: (StepWork, Duration),
    counters: Counters,
}

const LIVE: &str = "a listed job lives";

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        let residency = Residency::new(device_blocks);
        Self {
            layout,
            limits,
            residency,
            jobs: BTreeMap::new(),
            jobs_seen: 0,
            putting: 0,
            shares: Shares::default(),
            owed: Owed::default(),
            pace: Pace::default(),
            step: (StepWork::default(), Duration::ZERO),
            counters: Counters::default(),
        }
    }

    /// Sets the rule by which states are kept, for a model whose layers keep any.
    pub fn with_states(mut self, states: StateRule) -> Self {
        self.residency.keep_states(states);
        self
    }

    /// Accepts a job from a coordinator. One that cannot run is answered at once.
    pub fn admit(&mut self, link: LinkId, order: PrefillJob, now: Duration) {
        if let Some(reason) = self.unfit(&order) {
            return self.send_outcome(link, order.request, PrefillOutcome::Failed { reason });
        }
        let id = JobId(self.jobs_seen);
        self.jobs_seen += 1;
        let job = Job::new(id, link, order, &self.layout, now);
        self.residency.act(Action::Match { job: id, node: job.order.home, keys: job.keys_at_home() });
        self.shares.enter(&job.order.urgency);
        self.jobs.insert(id, job);
    }

    /// Cancels this request's job, which is no longer wanted.
    pub fn cancel(&mut self, request: RequestId) {
        self.forget_where(|job| job.order.request == request);
    }

    fn fail_late(&mut self, now: Duration) {
        for id in self.jobs_where(|job| now > job.arrived + Duration::from_millis(job.order.deadline_ms)) {
            self.fail(id, "deadline passed".into());
        }
    }

    /// Admits waiting jobs in order, as far as there is room. A job without room lets others pass, until it has been passed too often.
    fn admit_waiting(&mut self, ranks: &BTreeMap<JobId, Rank>, now: Duration) {
        let mut waiting = self.jobs_where(Job::is_waiting);
        let overdue = waiting.first().copied().filter(|oldest| self.jobs[oldest].passed >= PASSED_MAX);
        waiting.sort_by_key(|id| (overdue != Some(*id), ranks[id]));
        for id in waiting {
            let is_overdue = overdue == Some(id);
            if self.admit_one(id, now) || self.preempt_for(id, ranks, now) {
                // The job may have ended already, if nothing was left to do.
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.stays = job.passed >= PASSED_MAX;
                }
                for (other, job) in self.jobs.iter_mut().filter(|(_, job)| job.is_waiting()) {
                    job.passed = order::passed(job.passed, *other < id, is_overdue);
                }
            } else if is_overdue {
                break;
            }
        }
    }

    fn admit_one(&mut self, id: JobId, now: Duration) -> bool {
        let is_full = self.running() >= self.limits.admitted_max;
        let job = self.jobs.get_mut(&id).expect(LIVE);
        let blocks = job.kv.keys().len();
        if is_full || !self.residency.admit(&mut job.kv, blocks, blocks, 0) {
            return false;
        }
        job.note_admitted(now);
        let nodes = job.readable(self.residency.states());
        if !self.residency.fetch(&mut job.kv, &nodes, None, Duration::ZERO, now) {
            self.start(id, now);
        }
        true
    }

    /// Takes device blocks from jobs that come after this one, the last one first, until there is room for it. Jobs that are putting their
    /// computed blocks keep theirs, as they are done soon.
    fn preempt_for(&mut self, id: JobId, ranks: &BTreeMap<JobId, Rank>, now: Duration) -> bool {
        let mut victims = self.jobs_where(|job| job.kv.is_admitted() && job.tokens_left() > 0 && !job.stays);
        victims.retain(|victim| ranks[victim] > ranks[&id]);
        victims.sort_by_key(|victim| ranks[victim]);
        let blocks = |id: &JobId| self.jobs[id].kv.keys().len() + self.residency.states().of_job();
        let free = self.residency.blocks(0);
        let room = (free.free + free.cached) as usize + victims.iter().map(blocks).sum::<usize>();
        if room < blocks(&id) {
            return false;
        }
        while let Some(victim) = victims.pop() {
            let job = self.jobs.get_mut(&victim).expect(LIVE);
            self.residency.release(&mut job.kv);
            job.note_preempted();
            self.counters.preemptions += 1;
            if self.admit_one(id, now) {
                return true;
            }
        }
        false
    }

    /// The rank of every job.
    fn ranks(&self, now: Duration) -> BTreeMap<JobId, Rank> {
        let over = self.shares.over();
        let rank = |(&id, job): (&JobId, &Job)| {
            let (urgency, tokens, new, left) = (&job.order.urgency, job.tokens(), job.tokens_new(), job.tokens_left());
            let (work, left) = (self.pace.prompt(tokens - new, new), self.pace.prompt(tokens - left, left));
            let standing = Standing { arrived: job.arrived, work, left, over_share: over.contains(&shares::share(urgency)) };
            (id, Rank::new(urgency, standing, id.0, now))
        };
        self.jobs.iter().map(rank).collect()
    }

    /// Starts a job: all available blocks are on the device; the rest, if any, is computed.
    fn start(&mut self, id: JobId, now: Duration) {
        let job = self.jobs.get_mut(&id).expect(LIVE);
        self.counters.prefill_cached_tokens += job.note_ready().unwrap_or(0) as u64;
        self.put_state(id);
        self.finish_if_done(id, now);
    }

    /// Starts to put a job's state into the pool, if it is to be there: at once, as the next chunk may overwrite it.
    fn put_state(&mut self, id: JobId) {
        let states = self.residency.states();
        if let Some(job) = self.jobs.get_mut(&id).filter(|job| job.keeps_state(states)) {
            let blocks = self.residency.keep_state(&mut job.kv, Some((job.order.home, Delivery::Acknowledged(id))));
            job.putting += blocks;
            self.putting += blocks;
        }
    }

    /// Schedules the next step; an empty one while there is no room to put its blocks.
    fn schedule(&mut self, ranks: &BTreeMap<JobId, Rank>, now: Duration) -> Vec<ScheduledChunk> {
        let tokens = if self.putting < self.limits.putting_max { self.limits.step_tokens } else { 0 };
        let candidate = |(&id, job): (&JobId, &Job)| {
            let (start, remaining) = (job.kv.computed(), job.chunk(self.residency.states()));
            (remaining > 0).then(|| Candidate { job: id, rank: ranks[&id], number: id.0, start, remaining, is_whole: false })
        };
        let candidates = self.jobs.iter().filter_map(candidate).collect();
        let chunks = budget::give_out(Room { tokens, ms: STEP_MS }, candidates, &self.pace, &mut self.owed);
        self.step = (budget::work(0, &chunks), now);
        chunks
    }

    /// Starts to put full blocks into the pool, those of the oldest job first, until `putting_max` are in flight.
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
        if let Some(job) = self.jobs.get(&id).filter(|job| job.is_done(self.residency.states())) {
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
        self.shares.leave(&job.order.urgency);
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

    /// The number of jobs that hold device blocks.
    fn running(&self) -> usize {
        self.jobs.values().filter(|job| job.kv.is_admitted()).count()
    }

    fn send_outcome(&mut self, link: LinkId, request: RequestId, outcome: PrefillOutcome) {
        self.residency.act(Action::Send { link, event: WorkerEvent::Prefilled { request, outcome } });
    }

    /// The reason why a job cannot run here.
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
