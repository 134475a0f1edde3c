//! Chunked prefill: jobs, fetched blocks and finished puts in; chunks and actions out.
//!
//! ```text
//!            pool answers        room on the device             all computed      all put
//!   Matching ───────────► Waiting ─────► Fetching ─► Computing ─────────► Putting ───────► done
//! ```
//!
//! *Matching* asks the job's home node about the blocks that are not to be read elsewhere; what it lacks of them is put there.
//!
//! Jobs are computed in the order in which they came; a chunk is filled up with the next job's tokens. Each block is put as
//! soon as it is final, while the next chunk computes. Blocks stay on the device as its prefix cache.
//!
//! A slow pool slows prefill down instead of filling memory: while `putting_max` blocks are on their way, nothing is computed.

use std::{collections::BTreeMap, time::Duration};
use tidemill_engine::{
    device::DeviceBlocks,
    fetching::{Fetches, Fetching},
};
use tidemill_kvpool::admission::{Arrival, FetchId, Part, parts};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Tenant, Token},
    ids::{LinkId, RequestId},
    message::{Blocks, Counters, PoolNode, PrefillJob, PrefillOutcome, Run, WorkerEvent},
    pool::Lineage,
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
    /// Tokens of one chunk.
    pub step_tokens: usize,
    /// Blocks on their way into pools.
    pub putting_max: usize,
}

/// One job at one worker, in order of arrival. A request may come back; its old job's late answers are not the new one's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct JobId(u64);

/// What the shell has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Ask a node how many of the first of these blocks it holds; answer with [`Scheduler::matched`].
    Match { job: JobId, node: PoolNode, keys: Vec<BlockKey> },
    /// Get these blocks as far as they are there; answer each, numbered through all parts, with [`Scheduler::fetched`].
    Fetch { fetch: FetchId, parts: Vec<Part> },
    /// Nobody wants the rest of this fetch.
    CancelFetch { fetch: FetchId },
    /// Put device blocks' bytes, as they are now, into the pool; answer with [`Scheduler::put`], in every case.
    Put { job: JobId, node: PoolNode, lineage: Lineage, blocks: Vec<(BlockKey, u32)> },
    /// Tell a coordinator.
    Send { link: LinkId, event: WorkerEvent },
}

/// A run of one job's tokens: `len` tokens from position `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    pub job: JobId,
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
    order: PrefillJob,
    keys: Vec<BlockKey>,
    phase: Phase,
    /// Where each block can be read; those that are nowhere are put.
    sources: Vec<Option<PoolNode>>,
    /// Leading blocks of which those that are nowhere have been put, or are on their way.
    handed_over: usize,
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

impl Job {
    fn tokens(&self) -> usize {
        self.keys.len() * BLOCK_TOKENS
    }

    /// Where the job's block `number` stands.
    fn lineage(&self, number: usize) -> Lineage {
        Lineage {
            origin: self.order.request,
            tenant: Tenant::of_salt(&self.order.salt),
            parent: number.checked_sub(1).map(|before| self.keys[before]),
            position: number as u32,
        }
    }

    /// Whether no block has to be put any more.
    fn is_put(&self) -> bool {
        self.putting == 0 && self.sources[self.handed_over..].iter().all(Option::is_some)
    }

    /// Leading blocks that can be read somewhere.
    fn readable(&self) -> usize {
        self.sources.iter().take_while(|source| source.is_some()).count()
    }
}

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    device: DeviceBlocks,
    /// In order of arrival.
    jobs: BTreeMap<JobId, Job>,
    jobs_seen: u64,
    fetches: Fetches<JobId>,
    /// Blocks on their way into pools, of jobs that are gone, too.
    putting: usize,
    actions: Vec<Action>,
    counters: Counters,
}

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        Self {
            layout,
            limits,
            device: DeviceBlocks::new(device_blocks),
            jobs: BTreeMap::new(),
            jobs_seen: 0,
            fetches: Fetches::default(),
            putting: 0,
            actions: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// What the shell has to do since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// A coordinator hands over a job. One that cannot run is answered at once.
    pub fn admit(&mut self, home: LinkId, order: PrefillJob, vocab: usize, now: Duration) {
        if let Some(reason) = self.unfit(&order, vocab) {
            return self.send_outcome(home, order.request, PrefillOutcome::Failed { reason });
        }
        let covered = &order.tokens[..order.blocks as usize * BLOCK_TOKENS];
        let keys = Chain::new(&self.layout, &order.salt, covered).keys().to_vec();
        let job = JobId(self.jobs_seen);
        self.jobs_seen += 1;
        let elsewhere = Run::nodes(&order.read, keys.len()).into_iter().map(|node| Some(node).filter(|&node| node != order.home));
        let sources: Vec<_> = elsewhere.chain(std::iter::repeat(None)).take(keys.len()).collect();
        let at_home = keys.iter().zip(&sources).filter(|(_, source)| source.is_none()).map(|(key, _)| *key).collect();
        self.actions.push(Action::Match { job, node: order.home, keys: at_home });
        let state = Job {
            home,
            order,
            keys,
            phase: Phase::Matching,
            sources,
            handed_over: 0,
            blocks: Vec::new(),
            computed: 0,
            cached: 0,
            putting: 0,
            arrived: now,
            admitted: now,
        };
        self.jobs.insert(job, state);
    }

    /// The home node holds this many of the first blocks that it was asked about; an error ends the job.
    pub fn matched(&mut self, job: JobId, held: Result<usize, String>) {
        let Some(state) = self.jobs.get_mut(&job) else { return };
        match held {
            Ok(held) => {
                let home = state.order.home;
                state.sources.iter_mut().filter(|source| source.is_none()).take(held).for_each(|source| *source = Some(home));
                state.phase = Phase::Waiting;
            }
            Err(reason) => self.fail(job, reason),
        }
    }

    /// One result of a fetch. The answer is the device block that the bytes belong into; `None` if nobody wants them.
    pub fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<u32> {
        let job = self.fetches.owner(fetch)?;
        let state = self.jobs.get_mut(&job).expect("a fetch belongs to a live job");
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
            self.fetches.end(fetch);
            let first = fetching.first;
            let ready = first + fetching.arrivals().len();
            for number in first..ready {
                self.device.publish(state.blocks[number], state.keys[number]);
            }
            // What was lost meanwhile is put again when it has been computed again.
            state.sources[ready..].fill(None);
            self.compute_from(job, ready, now);
            self.put_what_is_ready();
        }
        block
    }

    /// Blocks of a job were put, or could not be.
    pub fn put(&mut self, job: JobId, blocks: usize, outcome: Result<(), String>, now: Duration) {
        self.putting -= blocks;
        if let Some(state) = self.jobs.get_mut(&job) {
            state.putting -= blocks;
            match outcome {
                Err(reason) => self.fail(job, reason),
                Ok(()) => self.finish_if_done(job, now),
            }
        }
        self.put_what_is_ready();
    }

    /// Nobody wants this request's job any more.
    pub fn cancel(&mut self, request: RequestId) {
        self.forget_where(|j| j.order.request == request);
    }

    /// A coordinator is gone, and all it asked for with it.
    pub fn cancel_link(&mut self, home: LinkId) {
        self.forget_where(|j| j.home == home);
    }

    /// This worker drains: its jobs go to others.
    pub fn fail_all(&mut self, reason: &str) {
        for job in self.jobs_where(|_| true) {
            self.fail(job, reason.to_owned());
        }
    }

    /// Admits what fits and says what to compute next; empty if there is nothing to compute, or no room to put it.
    pub fn plan(&mut self, now: Duration) -> Vec<Row> {
        for job in self.jobs_where(|j| now > j.arrived + Duration::from_millis(j.order.deadline_ms)) {
            self.fail(job, "deadline passed".into());
        }
        self.admit_waiting(now);
        let mut rows = Vec::new();
        if self.putting >= self.limits.putting_max {
            return rows;
        }
        let mut budget = self.limits.step_tokens;
        for (&job, state) in &self.jobs {
            if matches!(state.phase, Phase::Computing) && budget > 0 {
                let len = (state.tokens() - state.computed).min(budget);
                rows.push(Row { job, start: state.computed, len });
                budget -= len;
            }
        }
        rows
    }

    /// A row's tokens and the block table that covers them.
    pub fn row(&self, row: &Row) -> (&[Token], &[u32]) {
        let state = &self.jobs[&row.job];
        (&state.order.tokens[row.start..row.start + row.len], &state.blocks)
    }

    /// The step that computed `rows` is done.
    pub fn stepped(&mut self, rows: &[Row], now: Duration) {
        self.counters.steps += 1;
        for row in rows {
            let state = self.jobs.get_mut(&row.job).expect("a planned job lives until its step is done");
            assert_eq!(state.computed, row.start, "a job's rows are computed in order");
            let first = state.computed / BLOCK_TOKENS;
            state.computed += row.len;
            self.counters.prefill_computed_tokens += row.len as u64;
            for number in first..state.computed / BLOCK_TOKENS {
                self.device.publish(state.blocks[number], state.keys[number]);
            }
            self.finish_if_done(row.job, now);
        }
        self.put_what_is_ready();
    }

    pub fn waiting(&self) -> usize {
        self.jobs.values().filter(|j| j.blocks.is_empty()).count()
    }

    pub fn running(&self) -> usize {
        self.jobs.len() - self.waiting()
    }

    /// Tokens that are not computed yet.
    pub fn tokens_queued(&self) -> u64 {
        self.jobs.values().map(|j| j.tokens().saturating_sub(j.computed.max(j.readable() * BLOCK_TOKENS)) as u64).sum()
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
        for (job, state) in &self.jobs {
            let admitted = !matches!(state.phase, Phase::Matching | Phase::Waiting);
            assert_eq!(state.blocks.len(), if admitted { state.keys.len() } else { 0 });
            if let Phase::Fetching(fetching) = &state.phase {
                assert_eq!(self.fetches.owner(fetching.id), Some(*job));
            }
            if matches!(state.phase, Phase::Putting) {
                assert!(state.computed == state.tokens() && !state.is_put(), "a done job is forgotten at once");
            }
            held += state.blocks.len();
        }
        assert!(self.putting < self.limits.putting_max + PUT_BLOCKS);
        assert!(self.jobs.values().map(|j| j.putting).sum::<usize>() <= self.putting);
        assert_eq!(self.fetches.len(), self.jobs.values().filter(|j| matches!(j.phase, Phase::Fetching(_))).count());
        assert!(self.device.used() <= held && (held > 0 || self.device.used() == 0), "no block is in use without a job that holds it");
    }

    /// Why a job cannot run here.
    fn unfit(&self, order: &PrefillJob, vocab: usize) -> Option<String> {
        let (blocks, tokens) = (order.blocks as usize, order.tokens.len());
        if blocks == 0 || blocks.saturating_mul(BLOCK_TOKENS) > tokens {
            return Some(format!("job asks for {blocks} blocks of {tokens} tokens"));
        }
        if let Some(token) = order.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Some(format!("token {token} is not in the model's vocabulary of {vocab}"));
        }
        if blocks > self.device.total() {
            return Some(format!("{blocks} blocks do not fit this worker's device memory of {}", self.device.total()));
        }
        if self.jobs.len() >= self.limits.jobs_max {
            return Some(format!("{} jobs are queued here already", self.jobs.len()));
        }
        let twice = self.jobs.values().any(|j| j.order.request == order.request);
        twice.then(|| "this request's job is here already".into())
    }

    fn admit_waiting(&mut self, now: Duration) {
        for job in self.jobs_where(|j| matches!(j.phase, Phase::Waiting)) {
            if self.running() >= self.limits.admitted_max {
                break;
            }
            let state = self.jobs.get_mut(&job).expect("listed jobs live");
            let mut blocks = self.device.match_prefix(&state.keys);
            let hbm = blocks.len();
            let Some(fresh) = self.device.allocate(state.keys.len() - hbm) else {
                self.device.release(&blocks);
                break;
            };
            blocks.extend(fresh);
            state.blocks = blocks;
            state.admitted = now;
            let readable = state.readable();
            if readable > hbm {
                let fetch = self.fetches.begin(job);
                state.phase = Phase::Fetching(Fetching::new(fetch, hbm, readable - hbm, now));
                let blocks = state.sources.iter().flatten().zip(&state.keys).map(|(source, key)| (*source, *key));
                let parts = parts(blocks.take(readable).skip(hbm), None, Duration::ZERO);
                self.actions.push(Action::Fetch { fetch, parts });
            } else {
                self.compute_from(job, hbm, now);
            }
        }
        self.put_what_is_ready();
    }

    /// All that could be had is on the device: blocks from number `ready` on, if there are any, are computed.
    fn compute_from(&mut self, job: JobId, ready: usize, now: Duration) {
        let state = self.jobs.get_mut(&job).expect("caller knows it");
        state.computed = ready * BLOCK_TOKENS;
        state.cached = state.computed;
        self.counters.prefill_cached_tokens += state.cached as u64;
        state.phase = Phase::Computing;
        self.finish_if_done(job, now);
    }

    /// Sends final blocks on their way into the pool, oldest job first, as far as there may be more on the way.
    fn put_what_is_ready(&mut self) {
        for (&job, state) in &mut self.jobs {
            let ready = state.computed / BLOCK_TOKENS;
            while matches!(state.phase, Phase::Computing | Phase::Putting)
                && state.handed_over < ready
                && self.putting < self.limits.putting_max
            {
                let first = (state.handed_over..ready).find(|&n| state.sources[n].is_none()).unwrap_or(ready);
                let end = ready.min(first + PUT_BLOCKS);
                let numbers = first..(first..end).find(|&n| state.sources[n].is_some()).unwrap_or(end);
                state.handed_over = numbers.end;
                if !numbers.is_empty() {
                    state.putting += numbers.len();
                    self.putting += numbers.len();
                    let lineage = state.lineage(numbers.start);
                    let blocks = numbers.map(|n| (state.keys[n], state.blocks[n])).collect();
                    self.actions.push(Action::Put { job, node: state.order.home, lineage, blocks });
                }
            }
        }
    }

    fn finish_if_done(&mut self, job: JobId, now: Duration) {
        let state = self.jobs.get_mut(&job).expect("caller knows it");
        if !matches!(state.phase, Phase::Computing | Phase::Putting) || state.computed < state.tokens() {
            return;
        }
        state.phase = Phase::Putting;
        if !state.is_put() {
            return;
        }
        let outcome = PrefillOutcome::Done {
            cached_tokens: state.cached as u32,
            computed_tokens: (state.computed - state.cached) as u32,
            queue_ms: (state.admitted - state.arrived).as_secs_f64() * 1e3,
            compute_ms: (now - state.admitted).as_secs_f64() * 1e3,
        };
        self.end(job, outcome);
    }

    fn fail(&mut self, job: JobId, reason: String) {
        self.end(job, PrefillOutcome::Failed { reason });
    }

    fn end(&mut self, job: JobId, outcome: PrefillOutcome) {
        if let Some(state) = self.forget(job) {
            self.send_outcome(state.home, state.order.request, outcome);
        }
    }

    fn forget(&mut self, job: JobId) -> Option<Job> {
        let state = self.jobs.remove(&job)?;
        if let Phase::Fetching(fetching) = &state.phase {
            self.fetches.end(fetching.id);
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
        }
        self.device.release(&state.blocks);
        Some(state)
    }

    fn forget_where(&mut self, gone: impl Fn(&Job) -> bool) {
        for job in self.jobs_where(gone) {
            self.forget(job);
        }
    }

    fn jobs_where(&self, wanted: impl Fn(&Job) -> bool) -> Vec<JobId> {
        self.jobs.iter().filter(|(_, j)| wanted(j)).map(|(&id, _)| id).collect()
    }

    fn send_outcome(&mut self, link: LinkId, request: RequestId, outcome: PrefillOutcome) {
        self.actions.push(Action::Send { link, event: WorkerEvent::Prefilled { request, outcome } });
    }
}
