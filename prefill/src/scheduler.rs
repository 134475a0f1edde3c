//! Chunked prefill: jobs, fetched blocks and finished puts in; chunks and actions out.
//!
//! ```text
//!            pool answers        room on the device             all computed      all put
//!   Matching ───────────► Waiting ─────► Fetching ─► Computing ─────────► Putting ───────► done
//! ```
//!
//! Jobs are computed in the order in which they came; a chunk is filled up with the next job's tokens. Each block is put as
//! soon as it is final, while the next chunk computes. Blocks stay on the device as its prefix cache.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};
use tidemill_kvpool::{
    admission::{Arrival, FetchId, Fetching},
    device::DeviceBlocks,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Token},
    ids::{LinkId, RequestId},
    message::{Blocks, Counters, PoolAddr, PrefillJob, PrefillOutcome, WorkerEvent},
};

/// Bounds of one worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Jobs that hold device blocks at once.
    pub admitted_max: usize,
    /// Jobs altogether; one more fails at once.
    pub jobs_max: usize,
    /// Tokens of one chunk.
    pub step_tokens: usize,
}

/// What the shell has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Ask the pool how many leading blocks it holds; answer with [`Scheduler::matched`].
    Match { request: RequestId, pool: PoolAddr, keys: Vec<BlockKey> },
    /// Get `keys` from the pool as far as they are there; answer each with [`Scheduler::fetched`].
    Fetch { fetch: FetchId, pool: PoolAddr, keys: Vec<BlockKey> },
    /// Nobody wants the rest of this fetch.
    CancelFetch { fetch: FetchId },
    /// Put device blocks' bytes, as they are now, into the pool; answer with [`Scheduler::put`].
    Put { request: RequestId, pool: PoolAddr, blocks: Vec<(BlockKey, u32)> },
    /// Tell a coordinator.
    Send { link: LinkId, event: WorkerEvent },
}

/// A run of one job's tokens: `len` tokens from position `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    pub request: RequestId,
    pub start: usize,
    pub len: usize,
}

#[derive(Debug)]
enum Phase {
    Matching,
    Waiting,
    Fetching(Fetching),
    Computing,
    Putting,
}

#[derive(Debug)]
struct Job {
    home: LinkId,
    job: PrefillJob,
    keys: Vec<BlockKey>,
    phase: Phase,
    /// Leading blocks that the pool holds.
    held: usize,
    /// Device blocks of all `keys`; empty until admitted.
    blocks: Vec<u32>,
    /// Tokens whose KV is on the device.
    computed: usize,
    /// Tokens that did not need to be computed.
    cached: usize,
    /// Blocks on their way into the pool.
    putting: usize,
    arrived: Duration,
    admitted: Duration,
}

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    device: DeviceBlocks,
    jobs: HashMap<RequestId, Job>,
    /// Order of arrival.
    order: BTreeMap<u64, RequestId>,
    jobs_seen: u64,
    fetches: HashMap<FetchId, RequestId>,
    fetches_started: u64,
    actions: Vec<Action>,
    counters: Counters,
}

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        Self {
            layout,
            limits,
            device: DeviceBlocks::new(device_blocks),
            jobs: HashMap::new(),
            order: BTreeMap::new(),
            jobs_seen: 0,
            fetches: HashMap::new(),
            fetches_started: 0,
            actions: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// What the shell has to do since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// A coordinator hands over a job. One that cannot run is answered at once.
    pub fn admit(&mut self, home: LinkId, job: PrefillJob, vocab: usize, now: Duration) {
        let request = job.request;
        if let Some(reason) = self.unfit(&job, vocab) {
            return self.send_outcome(home, request, PrefillOutcome::Failed { reason });
        }
        let covered = &job.tokens[..job.blocks as usize * BLOCK_TOKENS];
        let keys = Chain::new(&self.layout, &job.salt, covered).keys().to_vec();
        self.actions.push(Action::Match { request, pool: job.pool, keys: keys.clone() });
        self.order.insert(self.jobs_seen, request);
        self.jobs_seen += 1;
        let state = Job {
            home,
            job,
            keys,
            phase: Phase::Matching,
            held: 0,
            blocks: Vec::new(),
            computed: 0,
            cached: 0,
            putting: 0,
            arrived: now,
            admitted: now,
        };
        self.jobs.insert(request, state);
    }

    /// The pool holds this many leading blocks of a job; an error ends the job.
    pub fn matched(&mut self, request: RequestId, held: Result<usize, String>) {
        let Some(state) = self.jobs.get_mut(&request) else { return };
        match held {
            Ok(held) => {
                state.held = held.min(state.keys.len());
                state.phase = Phase::Waiting;
            }
            Err(reason) => self.fail(request, reason),
        }
    }

    /// One result of a fetch. The answer is the device block that the bytes belong into; `None` if nobody wants them.
    pub fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>) -> Option<u32> {
        let &request = self.fetches.get(&fetch)?;
        let state = self.jobs.get_mut(&request).expect("a fetch belongs to a live job");
        let Phase::Fetching(fetching) = &mut state.phase else { unreachable!("a listed fetch is under way") };
        let block = match arrival {
            None => {
                fetching.miss(index);
                None
            }
            Some(arrival) => Some(state.blocks[fetching.arrive(index, arrival)?]),
        };
        if fetching.is_done() {
            if fetching.is_cut() {
                self.actions.push(Action::CancelFetch { fetch });
            }
            self.fetches.remove(&fetch);
            let first = fetching.first;
            let ready = first + fetching.arrivals().len();
            for number in first..ready {
                self.device.publish(state.blocks[number], state.keys[number]);
            }
            // What the pool lost meanwhile is put again when it has been computed again.
            state.held = ready;
            self.compute_from(request, ready);
        }
        block
    }

    /// Blocks of a job were put, or could not be.
    pub fn put(&mut self, request: RequestId, blocks: usize, outcome: Result<(), String>, now: Duration) {
        let Some(state) = self.jobs.get_mut(&request) else { return };
        state.putting = state.putting.saturating_sub(blocks);
        match outcome {
            Err(reason) => self.fail(request, reason),
            Ok(()) => self.finish_if_done(request, now),
        }
    }

    /// Nobody wants this job any more.
    pub fn cancel(&mut self, request: RequestId) {
        let Some(state) = self.jobs.remove(&request) else { return };
        if let Phase::Fetching(fetching) = &state.phase {
            self.fetches.remove(&fetching.id);
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
        }
        self.device.release(&state.blocks);
        self.order.retain(|_, r| *r != request);
    }

    /// A coordinator is gone, and all it asked for with it.
    pub fn cancel_link(&mut self, home: LinkId) {
        let gone: Vec<_> = self.jobs.iter().filter(|(_, j)| j.home == home).map(|(&r, _)| r).collect();
        gone.into_iter().for_each(|request| self.cancel(request));
    }

    /// This worker drains: its jobs go to others.
    pub fn fail_all(&mut self, reason: &str) {
        let all: Vec<_> = self.order.values().copied().collect();
        all.into_iter().for_each(|request| self.fail(request, reason.to_owned()));
    }

    /// Admits what fits and says what to compute next; empty if there is nothing to compute.
    pub fn plan(&mut self, now: Duration) -> Vec<Row> {
        self.expire(now);
        self.admit_waiting(now);
        let mut budget = self.limits.step_tokens;
        let mut rows = Vec::new();
        for &request in self.order.values() {
            let state = &self.jobs[&request];
            if matches!(state.phase, Phase::Computing) && budget > 0 {
                let len = (state.keys.len() * BLOCK_TOKENS - state.computed).min(budget);
                rows.push(Row { request, start: state.computed, len });
                budget -= len;
            }
        }
        rows
    }

    /// A row's tokens and the block table that covers them.
    pub fn row(&self, row: &Row) -> (&[Token], &[u32]) {
        let state = &self.jobs[&row.request];
        (&state.job.tokens[row.start..row.start + row.len], &state.blocks)
    }

    /// The step that computed `rows` is done.
    pub fn stepped(&mut self, rows: &[Row], now: Duration) {
        self.counters.steps += 1;
        for row in rows {
            let state = self.jobs.get_mut(&row.request).expect("a planned job lives until its step is done");
            assert_eq!(state.computed, row.start, "a job's rows are computed in order");
            let first = state.computed / BLOCK_TOKENS;
            state.computed += row.len;
            self.counters.prefill_computed_tokens += row.len as u64;
            let full = first..state.computed / BLOCK_TOKENS;
            for number in full.clone() {
                self.device.publish(state.blocks[number], state.keys[number]);
            }
            self.put_blocks(row.request, full);
            self.finish_if_done(row.request, now);
        }
    }

    pub fn waiting(&self) -> usize {
        self.jobs.values().filter(|j| j.blocks.is_empty()).count()
    }

    pub fn running(&self) -> usize {
        self.jobs.len() - self.waiting()
    }

    /// Tokens that are not computed yet.
    pub fn tokens_queued(&self) -> u64 {
        self.jobs.values().map(|j| (j.keys.len() * BLOCK_TOKENS - j.computed.max(j.held * BLOCK_TOKENS)) as u64).sum()
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Device blocks by state.
    pub fn blocks(&self, bytes_per_block: u64) -> Blocks {
        self.device.report(bytes_per_block)
    }

    /// Checks everything that is believed between calls. For tests.
    pub fn check_integrity(&self) {
        self.device.check_integrity();
        let mut held = 0;
        for (request, state) in &self.jobs {
            let admitted = !matches!(state.phase, Phase::Matching | Phase::Waiting);
            assert_eq!(state.blocks.len(), if admitted { state.keys.len() } else { 0 });
            if let Phase::Fetching(fetching) = &state.phase {
                assert_eq!(self.fetches.get(&fetching.id), Some(request));
            }
            if matches!(state.phase, Phase::Putting) {
                assert!(state.putting > 0 && state.computed == state.keys.len() * BLOCK_TOKENS);
            }
            held += state.blocks.len();
        }
        assert_eq!(self.order.len(), self.jobs.len());
        assert_eq!(self.fetches.len(), self.jobs.values().filter(|j| matches!(j.phase, Phase::Fetching(_))).count());
        assert!(self.device.used() <= held && (held > 0 || self.device.used() == 0), "no block is in use without a job that holds it");
    }

    /// Why a job cannot run here.
    fn unfit(&self, job: &PrefillJob, vocab: usize) -> Option<String> {
        let (blocks, tokens) = (job.blocks as usize, job.tokens.len());
        if blocks == 0 || blocks.saturating_mul(BLOCK_TOKENS) > tokens {
            return Some(format!("job asks for {blocks} blocks of {tokens} tokens"));
        }
        if let Some(token) = job.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Some(format!("token {token} is not in the model's vocabulary of {vocab}"));
        }
        if blocks > self.device.total() {
            return Some(format!("{blocks} blocks do not fit this worker's device memory of {}", self.device.total()));
        }
        if self.jobs.len() >= self.limits.jobs_max {
            return Some(format!("{} jobs are queued here already", self.jobs.len()));
        }
        self.jobs.contains_key(&job.request).then(|| "this request's job is here already".into())
    }

    fn expire(&mut self, now: Duration) {
        let late = |j: &Job| now > j.arrived + Duration::from_millis(j.job.deadline_ms);
        let expired: Vec<_> = self.jobs.iter().filter(|(_, j)| late(j)).map(|(&r, _)| r).collect();
        expired.into_iter().for_each(|request| self.fail(request, "deadline passed".into()));
    }

    fn admit_waiting(&mut self, now: Duration) {
        let waiting = |j: &Job| matches!(j.phase, Phase::Waiting);
        let candidates: Vec<_> = self.order.values().copied().filter(|r| waiting(&self.jobs[r])).collect();
        for request in candidates {
            if self.running() >= self.limits.admitted_max {
                return;
            }
            let state = self.jobs.get_mut(&request).expect("listed jobs live");
            let mut blocks = self.device.match_prefix(&state.keys);
            let hbm = blocks.len();
            let Some(fresh) = self.device.allocate(state.keys.len() - hbm) else {
                self.device.release(&blocks);
                return;
            };
            blocks.extend(fresh);
            state.blocks = blocks;
            state.admitted = now;
            if state.held > hbm {
                let fetch = FetchId(self.fetches_started);
                self.fetches_started += 1;
                self.fetches.insert(fetch, request);
                state.phase = Phase::Fetching(Fetching::new(fetch, hbm, state.held - hbm, now));
                self.actions.push(Action::Fetch { fetch, pool: state.job.pool, keys: state.keys[hbm..state.held].to_vec() });
            } else {
                let missing_in_pool = state.held..hbm;
                self.put_blocks(request, missing_in_pool);
                self.compute_from(request, hbm);
                self.finish_if_done(request, now);
            }
        }
    }

    /// All that could be had is on the device: blocks from number `ready` on are computed.
    fn compute_from(&mut self, request: RequestId, ready: usize) {
        let state = self.jobs.get_mut(&request).expect("caller knows it");
        state.computed = ready * BLOCK_TOKENS;
        state.cached = state.computed;
        self.counters.prefill_cached_tokens += state.cached as u64;
        state.phase = Phase::Computing;
    }

    fn put_blocks(&mut self, request: RequestId, numbers: std::ops::Range<usize>) {
        if numbers.is_empty() {
            return;
        }
        let state = self.jobs.get_mut(&request).expect("caller knows it");
        state.putting += numbers.len();
        let blocks = numbers.map(|n| (state.keys[n], state.blocks[n])).collect();
        self.actions.push(Action::Put { request, pool: state.job.pool, blocks });
    }

    fn finish_if_done(&mut self, request: RequestId, now: Duration) {
        let state = self.jobs.get_mut(&request).expect("caller knows it");
        if !matches!(state.phase, Phase::Computing | Phase::Putting) || state.computed < state.keys.len() * BLOCK_TOKENS {
            return;
        }
        state.phase = Phase::Putting;
        if state.putting > 0 {
            return;
        }
        let outcome = PrefillOutcome::Done {
            cached_tokens: state.cached as u32,
            computed_tokens: (state.computed - state.cached) as u32,
            queue_ms: (state.admitted - state.arrived).as_secs_f64() * 1e3,
            compute_ms: (now - state.admitted).as_secs_f64() * 1e3,
        };
        let home = state.home;
        self.cancel(request);
        self.send_outcome(home, request, outcome);
    }

    fn fail(&mut self, request: RequestId, reason: String) {
        if let Some(state) = self.jobs.get(&request) {
            let home = state.home;
            self.cancel(request);
            self.send_outcome(home, request, PrefillOutcome::Failed { reason });
        }
    }

    fn send_outcome(&mut self, link: LinkId, request: RequestId, outcome: PrefillOutcome) {
        self.actions.push(Action::Send { link, event: WorkerEvent::Prefilled { request, outcome } });
    }
}
