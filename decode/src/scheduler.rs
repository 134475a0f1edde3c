//! Continuous batching at token granularity: jobs, fetched blocks and drawn tokens in; step plans and actions out.
//!
//! - **Admission.** A sequence holds device blocks for all its tokens or none. It takes what the device's prefix cache has,
//!   fetches what the pool has or will have, and computes the rest.
//! - **A step** is at most `step_tokens` tokens: first one for each sequence that is decoding, then chunks of tails, oldest
//!   sequence first. So neither tails nor local prefill stall running sequences.
//! - **Preemption** forgets the youngest sequence's blocks and puts it back at the front of the queue.
//!
//! Time is an argument (since the worker started); results of actions come back as calls.

use crate::sequence::{Phase, Sequence};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};
use tidemill_engine::{
    device::DeviceBlocks,
    fetching::{Fetches, Fetching},
};
use tidemill_kvpool::admission::{Arrival, FetchId, Part, parts};
use tidemill_proto::step::{Draw, SegmentResult};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, LayoutFingerprint, Token},
    frame::FRAME_BYTES_MAX,
    ids::{LinkId, SequenceId},
    message::{Blocks, Counters, DecodeJob, Finish, PoolNode, SequenceToken, WorkerEvent},
    pool::Lineage,
};

/// Bounds of one worker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sequences that hold device blocks at once.
    pub sequences_max: usize,
    /// Sequences that wait for room; one more is returned to its coordinator.
    pub waiting_max: usize,
    /// Tokens of one step.
    pub step_tokens: usize,
    /// Longest sequence that the model allows.
    pub context_tokens: usize,
}

/// What the shell has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Get these blocks from the pool; answer each, numbered through all parts, with [`Scheduler::fetched`].
    Fetch { fetch: FetchId, parts: Vec<Part> },
    /// Nobody wants the rest of this fetch.
    CancelFetch { fetch: FetchId },
    /// Put this device block's bytes, as they are now, into the pool. Best effort.
    Publish { node: PoolNode, lineage: Lineage, key: BlockKey, block: u32 },
    /// Tell a coordinator.
    Send { link: LinkId, event: WorkerEvent },
}

/// What one step computes.
#[derive(Debug, Default)]
pub struct Plan {
    pub rows: Vec<Row>,
}

/// A run of one sequence's tokens: `len` tokens from position `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    pub sequence: SequenceId,
    pub start: usize,
    pub len: usize,
    pub logits: RowLogits,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowLogits {
    /// Only KV: the sequence's end is not reached.
    None,
    /// The last position's, to draw a token.
    Draw,
    /// Every position's, to score the prompt; `draw` says whether the last one draws a token, too.
    Score { top: u32, draw: bool },
}

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    device: DeviceBlocks,
    sequences: HashMap<SequenceId, Sequence>,
    /// Hold no blocks; next to be admitted first.
    waiting: VecDeque<SequenceId>,
    /// Hold blocks; oldest first, the last is preempted first.
    admitted: Vec<SequenceId>,
    fetches: Fetches<SequenceId>,
    actions: Vec<Action>,
    counters: Counters,
}

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        Self {
            layout,
            limits,
            device: DeviceBlocks::new(device_blocks),
            sequences: HashMap::new(),
            waiting: VecDeque::new(),
            admitted: Vec::new(),
            fetches: Fetches::default(),
            actions: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// What the shell has to do since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// A coordinator hands over a sequence. A job that cannot run is answered at once.
    pub fn admit(&mut self, home: LinkId, job: DecodeJob, vocab: usize, now: Duration) {
        let sequence = job.sequence;
        let refusal = if let Some(reason) = self.unfit(&job, vocab) {
            Some(Finish::Failed { reason })
        } else if self.sequences.len() >= self.limits.sequences_max.saturating_add(self.limits.waiting_max)
            || self.sequences.contains_key(&sequence)
        {
            Some(Finish::Returned)
        } else {
            None
        };
        match refusal {
            Some(reason) => self.send(home, WorkerEvent::Finished { sequence, reason, provenance: Default::default() }),
            None => {
                self.sequences.insert(sequence, Sequence::new(home, job, &self.layout, now));
                self.waiting.push_back(sequence);
            }
        }
    }

    /// The client went away, or the coordinator wants the sequence elsewhere.
    pub fn cancel(&mut self, sequence: SequenceId) {
        if self.sequences.contains_key(&sequence) {
            self.forget_blocks(sequence);
            self.waiting.retain(|&s| s != sequence);
            self.sequences.remove(&sequence);
        }
    }

    /// A coordinator is gone, and all it asked for with it.
    pub fn cancel_link(&mut self, home: LinkId) {
        for sequence in self.sequences_where(|s| s.home == home) {
            self.cancel(sequence);
        }
    }

    /// This worker drains: every sequence goes on elsewhere, from the tokens that its coordinator has.
    pub fn return_all(&mut self) {
        for sequence in self.sequences_where(|_| true) {
            let Sequence { home, provenance, .. } = self.sequences[&sequence];
            self.cancel(sequence);
            self.send(home, WorkerEvent::Finished { sequence, reason: Finish::Returned, provenance });
        }
    }

    /// Nobody computes this sequence's missing blocks any more: take what is in the pool now, compute the rest.
    pub fn stop_waiting(&mut self, sequence: SequenceId) {
        let Some(state) = self.sequences.get_mut(&sequence) else { return };
        state.job.wait_ms = 0;
        let blocks = state.fetchable();
        if let Phase::Fetching(fetching) = &mut state.phase {
            self.fetches.end(fetching.id);
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
            let fetch = self.fetches.begin(sequence);
            let missing = fetching.restart(fetch).map(|block| blocks[block]);
            self.actions.push(Action::Fetch { fetch, parts: parts(missing, None, Duration::ZERO) });
        }
    }

    /// One result of a fetch. The answer is the device block that the bytes belong into; `None` if nobody wants them.
    pub fn fetched(&mut self, fetch: FetchId, index: usize, arrival: Option<Arrival>, now: Duration) -> Option<u32> {
        let sequence = self.fetches.owner(fetch)?;
        let state = self.sequences.get_mut(&sequence).expect("a fetch belongs to a live sequence");
        let Phase::Fetching(fetching) = &mut state.phase else { unreachable!("a listed fetch is under way") };
        let block = match arrival {
            None => {
                fetching.miss(index);
                None
            }
            Some(arrival) => {
                let number = fetching.arrive(index, arrival)?;
                let waited = millis(now - fetching.started);
                if arrival.origin == state.job.request {
                    state.provenance.transfer_ms = waited;
                } else {
                    state.provenance.fetch_ms = waited;
                }
                Some(state.blocks[number])
            }
        };
        self.finish_fetch_if_done(sequence, now);
        block
    }

    /// Admits what fits and says what to compute next; empty if there is nothing to compute.
    pub fn plan(&mut self, now: Duration) -> Plan {
        self.admit_waiting(now);
        self.grow();
        let mut budget = self.limits.step_tokens;
        let mut rows = Vec::new();
        for decoding in [true, false] {
            for &sequence in &self.admitted {
                let state = &self.sequences[&sequence];
                if !matches!(state.phase, Phase::Running) || (state.remaining() == 1) != decoding || budget == 0 {
                    continue;
                }
                let len = state.remaining().min(budget);
                let draw = len == state.remaining();
                let logits = match state.job.prompt_logprobs {
                    Some(top) => RowLogits::Score { top, draw },
                    None if draw => RowLogits::Draw,
                    None => RowLogits::None,
                };
                rows.push(Row { sequence, start: state.computed, len, logits });
                budget -= len;
            }
        }
        Plan { rows }
    }

    /// A row's tokens and the block table that covers them.
    pub fn row(&self, row: &Row) -> (&[Token], &[u32]) {
        let state = &self.sequences[&row.sequence];
        (&state.job.tokens[row.start..row.start + row.len], &state.blocks)
    }

    /// The prompt's tokens that follow a row's positions: what a scoring row scores.
    pub fn row_targets(&self, row: &Row) -> &[Token] {
        let state = &self.sequences[&row.sequence];
        let end = (row.start + row.len + 1).min(state.job.prompt_tokens as usize);
        &state.job.tokens[(row.start + 1).min(end)..end]
    }

    /// What the sampler needs for a row that draws.
    pub fn draw(&self, row: &Row) -> Draw<'_> {
        self.sequences[&row.sequence].draw()
    }

    /// The step of `plan` is done, with one result per row.
    pub fn stepped(&mut self, plan: &Plan, results: Vec<SegmentResult>, now: Duration) {
        assert_eq!(plan.rows.len(), results.len(), "one result per row");
        self.counters.steps += 1;
        let mut tokens: BTreeMap<LinkId, Vec<SequenceToken>> = BTreeMap::new();
        let mut finished = Vec::new();
        for (row, result) in plan.rows.iter().zip(results) {
            self.advance(row);
            let state = self.sequences.get_mut(&row.sequence).expect("a planned sequence lives until its step is done");
            if matches!(row.logits, RowLogits::Score { .. }) {
                if state.prompt_logprobs.is_empty() {
                    state.prompt_logprobs.push(None);
                }
                state.prompt_logprobs.extend(result.scores.into_iter().map(Some));
            }
            let Some((token, logprob)) = result.drawn else { continue };
            let home = state.home;
            if state.is_scoring() {
                state.job.prompt_logprobs = None;
                let logprobs = std::mem::take(&mut state.prompt_logprobs);
                self.actions.push(Action::Send { link: home, event: WorkerEvent::PromptLogprobs { sequence: row.sequence, logprobs } });
            }
            let index = state.generated();
            state.push(token);
            if state.times.first_token.is_none() {
                state.times.first_token = Some(now);
                state.provenance.tail_ms = millis(now - state.times.ready.unwrap_or(now));
            }
            self.counters.tokens_generated += 1;
            tokens.entry(home).or_default().push(SequenceToken { sequence: row.sequence, index, token, logprob });
            let reason = if state.job.stop.stop_tokens.contains(&token) {
                Finish::Stop { token }
            } else if index + 1 >= state.job.stop.max_tokens || state.job.tokens.len() >= self.longest() {
                Finish::Length
            } else {
                continue;
            };
            finished.push((row.sequence, reason));
        }
        for (link, tokens) in tokens {
            self.send(link, WorkerEvent::Tokens(tokens));
        }
        for (sequence, reason) in finished {
            let state = self.sequences.get_mut(&sequence).expect("finished in this step");
            state.provenance.decode_ms = millis(now - state.times.first_token.unwrap_or(now));
            let (home, provenance) = (state.home, state.provenance);
            self.cancel(sequence);
            self.send(home, WorkerEvent::Finished { sequence, reason, provenance });
        }
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn running(&self) -> usize {
        self.admitted.len()
    }

    /// Tokens that have no KV yet and are not drawn by decoding.
    pub fn tokens_queued(&self) -> u64 {
        self.sequences.values().map(|s| s.remaining().saturating_sub(1) as u64).sum()
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
        for (id, state) in &self.sequences {
            let listed = (self.waiting.contains(id), self.admitted.contains(id));
            match &state.phase {
                Phase::Waiting => assert!(listed == (true, false) && state.blocks.is_empty() && state.computed == 0),
                Phase::Fetching(fetching) => {
                    assert_eq!(self.fetches.owner(fetching.id), Some(*id));
                    assert!(!fetching.is_done(), "a done fetch is finished at once");
                    assert_eq!(listed, (false, true));
                }
                Phase::Running => assert_eq!(listed, (false, true)),
            }
            if !matches!(state.phase, Phase::Waiting) {
                assert!(state.blocks.len() >= state.blocks_needed() - 1, "only the newest token may still lack its block");
            }
            assert!(state.computed < state.job.tokens.len(), "a live sequence has a token to compute");
            held += state.blocks.len();
        }
        assert_eq!(self.waiting.len() + self.admitted.len(), self.sequences.len());
        assert_eq!(self.fetches.len(), self.sequences.values().filter(|s| matches!(s.phase, Phase::Fetching(_))).count());
        assert!(self.device.used() <= held, "no block is in use without a sequence that holds it");
        assert!(held > 0 || self.device.used() == 0);
    }

    /// Why a job can never run here.
    fn unfit(&self, job: &DecodeJob, vocab: usize) -> Option<String> {
        let (len, prompt) = (job.tokens.len(), job.prompt_tokens as usize);
        if prompt == 0 || prompt > len {
            return Some(format!("job has {len} tokens and calls {prompt} of them its prompt"));
        }
        if let Some(token) = job.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Some(format!("token {token} is not in the model's vocabulary of {vocab}"));
        }
        // A sequence's scores are one message; a token's logprob takes 5 bytes at most, one of the likeliest 10.
        let scores_bytes = job.prompt_logprobs.map_or(0, |top| prompt.saturating_mul(16 + 10 * top as usize));
        if scores_bytes > FRAME_BYTES_MAX {
            return Some(format!(
                "log-probabilities of {prompt} prompt tokens take about {scores_bytes} bytes, {FRAME_BYTES_MAX} is the most"
            ));
        }
        if let Some(fault) = job.sampling.fault() {
            return Some(fault);
        }
        (len >= self.longest()).then(|| {
            format!(
                "{len} tokens leave no room to generate: this worker's limit is {} (model context {}, device memory {} blocks of {BLOCK_TOKENS})",
                self.longest(),
                self.limits.context_tokens,
                self.device.total()
            )
        })
    }

    /// Longest sequence that this worker can hold.
    fn longest(&self) -> usize {
        self.limits.context_tokens.min(self.device.total() * BLOCK_TOKENS)
    }

    fn admit_waiting(&mut self, now: Duration) {
        while let Some(&sequence) = self.waiting.front() {
            if self.admitted.len() >= self.limits.sequences_max {
                return;
            }
            let state = &self.sequences[&sequence];
            let mut blocks = self.device.match_prefix(state.keys(0..state.reusable_blocks()));
            let hbm = blocks.len();
            let missing = state.blocks_needed() - hbm;
            // Room to grow by one block each keeps a full device from admitting what it would preempt at once.
            let headroom = self.admitted.len();
            let fits = self.device.free_blocks() >= missing + headroom;
            let Some(fresh) = fits.then(|| self.device.allocate(missing)).flatten() else {
                self.device.release(&blocks);
                return;
            };
            blocks.extend(fresh);
            self.waiting.pop_front();
            self.admitted.push(sequence);
            self.place(sequence, blocks, hbm, now);
        }
    }

    /// A sequence got its blocks, the first `hbm` of them with their bytes: fetch, or run.
    fn place(&mut self, sequence: SequenceId, blocks: Vec<u32>, hbm: usize, now: Duration) {
        let state = self.sequences.get_mut(&sequence).expect("admitted sequences live");
        if state.times.ready.is_none() {
            state.provenance.queue_ms = millis(now - state.times.arrived);
        }
        state.blocks = blocks;
        state.computed = hbm * BLOCK_TOKENS;
        let blocks = state.fetchable();
        if blocks.len() > hbm {
            let fetch = self.fetches.begin(sequence);
            state.phase = Phase::Fetching(Fetching::new(fetch, hbm, blocks.len() - hbm, now));
            let parts = parts(blocks.into_iter().skip(hbm), state.job.home, Duration::from_millis(state.job.wait_ms));
            self.actions.push(Action::Fetch { fetch, parts });
        } else {
            self.run(sequence, hbm, &[], now);
        }
    }

    fn finish_fetch_if_done(&mut self, sequence: SequenceId, now: Duration) {
        let state = self.sequences.get_mut(&sequence).expect("caller knows it");
        let Phase::Fetching(fetching) = &state.phase else { return };
        if !fetching.is_done() {
            return;
        }
        if fetching.is_cut() {
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
        }
        self.fetches.end(fetching.id);
        let (hbm, arrivals) = (fetching.first, fetching.arrivals());
        let ready = hbm + arrivals.len();
        state.computed = ready * BLOCK_TOKENS;
        for block in hbm..ready {
            self.device.publish(state.blocks[block], state.chain.keys()[block]);
        }
        self.replicate(sequence, hbm, &arrivals);
        self.run(sequence, hbm, &arrivals, now);
    }

    /// Publishes hot blocks that came from elsewhere at home, too. They are still whose they were.
    fn replicate(&mut self, sequence: SequenceId, first: usize, arrivals: &[Arrival]) {
        let state = &self.sequences[&sequence];
        let Some(home) = state.job.home else { return };
        let fetched = state.fetchable().into_iter().enumerate().skip(first).zip(arrivals);
        for ((block, (node, key)), arrival) in fetched.take_while(|((block, _), _)| *block < state.job.hot_blocks as usize) {
            if node != home {
                let lineage = Lineage { origin: arrival.origin, ..state.lineage(block) };
                self.actions.push(Action::Publish { node: home, lineage, key, block: state.blocks[block] });
            }
        }
    }

    /// All that could be had is on the device; the rest is computed.
    fn run(&mut self, sequence: SequenceId, hbm: usize, arrivals: &[Arrival], now: Duration) {
        let state = self.sequences.get_mut(&sequence).expect("caller knows it");
        state.phase = Phase::Running;
        state.published = state.published.max(hbm + arrivals.len());
        if state.times.ready.is_none() {
            state.times.ready = Some(now);
            state.settle_provenance(hbm, arrivals);
            self.counters.tokens.add(&state.provenance.tokens);
        }
    }

    /// Every running sequence that decodes gets a block for its next token; the youngest make room.
    fn grow(&mut self) {
        let mut i = 0;
        while let Some(&sequence) = self.admitted.get(i) {
            let state = self.sequences.get_mut(&sequence).expect("admitted sequences live");
            if state.blocks.len() >= state.blocks_needed() {
                i += 1;
            } else if let Some(block) = self.device.allocate(1) {
                state.blocks.extend(block);
                i += 1;
            } else {
                let youngest = *self.admitted.last().expect("at least the one that grows");
                self.preempt(youngest);
            }
        }
    }

    /// Forgets a sequence's blocks; it comes back through admission, first in line.
    fn preempt(&mut self, sequence: SequenceId) {
        self.forget_blocks(sequence);
        let state = self.sequences.get_mut(&sequence).expect("caller knows it");
        state.provenance.preemptions += 1;
        if state.times.ready.is_some() {
            // What it had is in the pool by now, or never will be.
            state.job.expected_blocks = state.reusable_blocks() as u32;
            state.job.wait_ms = 0;
        }
        state.prompt_logprobs.clear();
        self.counters.preemptions += 1;
        self.waiting.push_front(sequence);
    }

    fn forget_blocks(&mut self, sequence: SequenceId) {
        let state = self.sequences.get_mut(&sequence).expect("caller knows it");
        if let Phase::Fetching(fetching) = &state.phase {
            self.fetches.end(fetching.id);
            self.actions.push(Action::CancelFetch { fetch: fetching.id });
        }
        state.phase = Phase::Waiting;
        state.computed = 0;
        self.device.release(&std::mem::take(&mut state.blocks));
        self.admitted.retain(|&s| s != sequence);
    }

    /// A row's KV is computed: blocks that became full can be found from now on, here and in the pool.
    fn advance(&mut self, row: &Row) {
        let state = self.sequences.get_mut(&row.sequence).expect("a planned sequence lives until its step is done");
        assert_eq!(state.computed, row.start, "a sequence's rows are computed in order");
        let first = state.computed / BLOCK_TOKENS;
        state.computed += row.len;
        for number in first..state.computed / BLOCK_TOKENS {
            let (block, key) = (state.blocks[number], state.chain.keys()[number]);
            self.device.publish(block, key);
            if let Some(home) = state.job.home
                && number >= state.published
            {
                state.published = number + 1;
                self.actions.push(Action::Publish { node: home, lineage: state.lineage(number), key, block });
            }
        }
    }

    fn sequences_where(&self, wanted: impl Fn(&Sequence) -> bool) -> Vec<SequenceId> {
        let mut ids: Vec<_> = self.sequences.iter().filter(|(_, s)| wanted(s)).map(|(&id, _)| id).collect();
        ids.sort();
        ids
    }

    fn send(&mut self, link: LinkId, event: WorkerEvent) {
        self.actions.push(Action::Send { link, event });
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
