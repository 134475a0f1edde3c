//! One job on its way through a prefill worker.

use std::{ops::Range, time::Duration};
use tidemill_engine::{job::JobId, residency::JobKv, states::StateRule};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, LayoutFingerprint},
    ids::LinkId,
    message::{PoolNode, PrefillJob, PrefillOutcome, Run},
    step::{Segment, Wanted},
};

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) link: LinkId,
    pub(crate) order: PrefillJob,
    pub(crate) kv: JobKv,
    /// Whether its home node has reported which blocks it holds.
    matched: bool,
    /// The node at which each block can be read; blocks without one are put.
    sources: Vec<Option<PoolNode>>,
    /// The number of leading blocks whose puts have been started where needed.
    handed_over: usize,
    /// The number of blocks in flight to the pool.
    pub(crate) putting: usize,
    /// The number of tokens that did not need to be computed, once known.
    cached: Option<usize>,
    /// The number of later jobs that got device blocks first, since the last job that could no longer be passed.
    pub(crate) passed: u32,
    /// Whether it keeps its device blocks, as it had been passed too often before it got them.
    pub(crate) stays: bool,
    pub(crate) arrived: Duration,
    /// The time at which it first got device blocks.
    admitted: Option<Duration>,
}

impl Job {
    pub(crate) fn new(id: JobId, link: LinkId, order: PrefillJob, layout: &LayoutFingerprint, now: Duration) -> Self {
        let covered = &order.tokens[..order.blocks as usize * BLOCK_TOKENS];
        let kv = JobKv::new(id, order.request, layout, &order.salt, covered);
        let blocks = kv.keys().len();
        // Only home is asked which blocks it holds; for other nodes to be read, the coordinator is trusted.
        let elsewhere = Run::nodes(&order.read, blocks).into_iter().map(|node| (node != order.home).then_some(node));
        let mut sources: Vec<_> = elsewhere.collect();
        sources.resize(blocks, None);
        Self {
            link,
            order,
            kv,
            matched: false,
            sources,
            handed_over: 0,
            putting: 0,
            cached: None,
            passed: 0,
            stays: false,
            arrived: now,
            admitted: None,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.kv.keys().len() * BLOCK_TOKENS
    }

    /// The keys of the blocks that home is asked about.
    pub(crate) fn keys_at_home(&self) -> Vec<BlockKey> {
        self.kv.keys().iter().zip(&self.sources).filter(|(_, source)| source.is_none()).map(|(key, _)| *key).collect()
    }

    /// Notes that home holds this many of the first blocks that it was asked about.
    pub(crate) fn matched(&mut self, held: usize) {
        let home = self.order.home;
        self.sources.iter_mut().filter(|source| source.is_none()).take(held).for_each(|source| *source = Some(home));
        self.matched = true;
    }

    /// Whether it can be admitted once there is room.
    pub(crate) fn is_waiting(&self) -> bool {
        self.matched && !self.kv.is_admitted()
    }

    /// The nodes of the leading blocks that can be read. If layers keep states, up to an end that should have one: that of the runs, or the
    /// last one that this job has kept.
    pub(crate) fn readable(&self, states: StateRule) -> Vec<PoolNode> {
        let mut nodes: Vec<PoolNode> = self.sources.iter().map_while(|source| *source).collect();
        if states.blocks > 0 {
            let runs = self.order.read.iter().map(|run| run.blocks as usize).sum::<usize>();
            let ends = [runs, self.kv.kept_at(), states.last_end(nodes.len())];
            nodes.truncate(ends.into_iter().filter(|end| *end <= nodes.len()).max().unwrap_or(0));
        }
        nodes
    }

    /// The number of tokens that a chunk may have now.
    pub(crate) fn chunk(&self, states: StateRule) -> usize {
        states.cut(self.kv.computed(), self.remaining(), &[self.kv.keys().len()])
    }

    /// Whether the current state is to be put, and is not yet.
    pub(crate) fn keeps_state(&self, states: StateRule) -> bool {
        let is_kept = self.kv.kept_at() == self.kv.computed_blocks();
        self.kv.is_ready() && !is_kept && states.keeps(self.kv.computed(), &[self.kv.keys().len()])
    }

    /// Notes that the blocks from `number` on did not come: they are computed and put again.
    pub(crate) fn lose_from(&mut self, number: usize) {
        self.sources[number..].fill(None);
        self.handed_over = self.handed_over.min(number);
    }

    /// Notes that it got its device blocks.
    pub(crate) fn note_admitted(&mut self, now: Duration) {
        self.admitted.get_or_insert(now);
    }

    /// Notes that all available blocks are on the device. The first time, returns the number of tokens that need not be computed.
    pub(crate) fn note_ready(&mut self) -> Option<usize> {
        let is_new = self.cached.is_none();
        let cached = *self.cached.get_or_insert(self.kv.computed());
        is_new.then_some(cached)
    }

    /// Notes that it lost its device blocks. The blocks that it has put are at home, or still on the device.
    pub(crate) fn note_preempted(&mut self) {
        let home = self.order.home;
        self.sources[..self.handed_over].iter_mut().for_each(|source| *source = source.or(Some(home)));
    }

    /// The number of tokens to compute now.
    pub(crate) fn remaining(&self) -> usize {
        if self.kv.is_ready() { self.tokens() - self.kv.computed() } else { 0 }
    }

    /// The number of tokens that are still to be computed, as far as known.
    pub(crate) fn tokens_left(&self) -> usize {
        if self.kv.is_ready() { self.remaining() } else { self.tokens_queued() }
    }

    /// The number of tokens that this job has computed here, or will.
    pub(crate) fn tokens_new(&self) -> usize {
        let known = || self.sources.iter().take_while(|source| source.is_some()).count() * BLOCK_TOKENS;
        self.tokens() - self.cached.unwrap_or_else(known)
    }

    /// The number of tokens that are not on the device and, as far as known, nowhere else.
    pub(crate) fn tokens_queued(&self) -> usize {
        let readable = self.sources.iter().take_while(|source| source.is_some()).count();
        self.tokens().saturating_sub(self.kv.computed().max(readable * BLOCK_TOKENS))
    }

    /// Starts the next run of at most `blocks_max` computed blocks that are to be put; `None` if there are none.
    pub(crate) fn next_put(&mut self, blocks_max: usize) -> Option<Range<usize>> {
        let ready = if self.kv.is_ready() { self.kv.computed_blocks() } else { 0 };
        let nowhere = |number: &usize| self.sources[*number].is_none();
        let Some(first) = (self.handed_over..ready).find(nowhere) else {
            self.handed_over = self.handed_over.max(ready);
            return None;
        };
        let run = (first..ready).take(blocks_max).take_while(nowhere).count();
        self.handed_over = first + run;
        self.putting += run;
        Some(first..self.handed_over)
    }

    /// Whether all its blocks, and the state at their end, are computed and in the pool.
    pub(crate) fn is_done(&self, states: StateRule) -> bool {
        let is_put = self.putting == 0 && self.sources[self.handed_over..].iter().all(Option::is_some);
        self.kv.is_ready() && self.remaining() == 0 && is_put && !self.keeps_state(states)
    }

    pub(crate) fn done(&self, now: Duration) -> PrefillOutcome {
        let (cached, admitted) = (self.cached.unwrap_or(0), self.admitted.unwrap_or(now));
        PrefillOutcome::Done {
            cached_tokens: cached as u32,
            computed_tokens: (self.kv.computed() - cached) as u32,
            queue_ms: (admitted - self.arrived).as_secs_f64() * 1e3,
            compute_ms: (now - admitted).as_secs_f64() * 1e3,
        }
    }

    pub(crate) fn segment(&self, start: usize, len: usize) -> Segment<'_> {
        let (tokens, state) = (&self.order.tokens[start..start + len], self.kv.state(start + len));
        Segment { tokens, start, blocks: self.kv.table(), state, wanted: Wanted::Nothing }
    }

    /// Checks the invariants of a job between calls. For tests.
    pub(crate) fn check_integrity(&self, states: StateRule) {
        let table = if self.kv.is_admitted() { self.kv.keys().len() } else { 0 };
        assert_eq!(self.kv.table().len(), table, "device blocks for all of its blocks, or none");
        assert_eq!(self.sources.len(), self.kv.keys().len());
        assert!(self.matched || !self.kv.is_admitted(), "its home node is asked first");
        assert!(self.handed_over <= self.kv.keys().len());
        assert!(!self.is_done(states), "a done job is forgotten at once");
    }
}
