//! Continuous batching at token granularity: which sequences hold device blocks, and what the next step computes.
//!
//! - **Admission.** First come, first served. A sequence holds device blocks for all its tokens or none. It takes what the device's
//!   prefix cache has, fetches what the pool has or will have, and computes the rest.
//! - **A step** has at most `step_tokens` tokens: first one for each sequence that decodes, then chunks of tails, oldest sequence
//!   first. So neither tails nor local prefill stall sequences that decode.
//! - **Preemption** takes the youngest sequence's blocks and puts it back at the front of the queue.

mod integrity;
mod role;

use crate::{limits::Limits, sequence::Sequence};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};
use tidemill_engine::{
    job::{Action, Delivery, JobId, ScheduledChunk},
    residency::{FetchedBlocks, Residency},
};
use tidemill_proto::{
    block::LayoutFingerprint,
    ids::{LinkId, SequenceId},
    message::{Counters, DecodeJob, Finish, Provenance, SequenceToken, WorkerEvent},
    pool::Lineage,
    step::SegmentResult,
};

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    residency: Residency,
    sequences: HashMap<JobId, Sequence>,
    /// Hold no blocks; next to be admitted first.
    waiting: VecDeque<JobId>,
    /// Hold blocks; oldest first, the last is preempted first.
    admitted: Vec<JobId>,
    counters: Counters,
}

const LIVE: &str = "a listed sequence lives";

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        Self {
            layout,
            limits,
            residency: Residency::new(device_blocks),
            sequences: HashMap::new(),
            waiting: VecDeque::new(),
            admitted: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// A coordinator hands over a sequence. One that cannot run here is answered at once.
    pub fn admit(&mut self, link: LinkId, job: DecodeJob, now: Duration) {
        let id = Sequence::job_id(job.sequence);
        let is_full = self.sequences.len() >= self.limits.sequences_max.saturating_add(self.limits.waiting_max);
        let refusal = match self.limits.unfit(&job, self.residency.device_blocks()) {
            Some(reason) => Finish::Failed { reason },
            None if is_full || self.sequences.contains_key(&id) => Finish::Returned,
            None => {
                self.sequences.insert(id, Sequence::new(link, job, &self.layout, now));
                self.waiting.push_back(id);
                return;
            }
        };
        self.send_finished(link, job.sequence, refusal, Provenance::default());
    }

    /// The client went away, or the coordinator wants the sequence elsewhere.
    pub fn cancel(&mut self, sequence: SequenceId) {
        self.forget(Sequence::job_id(sequence));
    }

    /// Nobody computes this sequence's missing blocks any more: take what is in the pool now, compute the rest.
    pub fn stop_waiting(&mut self, sequence: SequenceId) {
        if let Some(state) = self.sequences.get_mut(&Sequence::job_id(sequence)) {
            state.job.wait_ms = 0;
            let nodes = state.fetchable();
            self.residency.fetch_without_waiting(&mut state.kv, &nodes);
        }
    }

    /// First in the queue first, as far as there is room.
    fn admit_waiting(&mut self, now: Duration) {
        while let Some(&id) = self.waiting.front() {
            // Room to grow by one block each keeps a full device from admitting what it would preempt at once.
            let headroom = self.admitted.len();
            let state = self.sequences.get_mut(&id).expect(LIVE);
            let (reusable, needed) = (state.reusable_blocks(), state.blocks_needed());
            if headroom >= self.limits.sequences_max || !self.residency.admit(&mut state.kv, reusable, needed, headroom) {
                return;
            }
            self.waiting.pop_front();
            self.admitted.push(id);
            state.note_admitted(now);
            let (nodes, wait) = (state.fetchable(), Duration::from_millis(state.job.wait_ms));
            if !self.residency.fetch(&mut state.kv, &nodes, state.job.home, wait, now) {
                let nothing = FetchedBlocks { first: state.kv.computed_blocks(), arrivals: Vec::new() };
                self.start(id, &nothing, now);
            }
        }
    }

    /// All blocks that could be had are on the device; the rest is computed.
    fn start(&mut self, id: JobId, fetched: &FetchedBlocks, now: Duration) {
        let state = self.sequences.get_mut(&id).expect(LIVE);
        if let Some(tokens) = state.note_ready(fetched, now) {
            self.counters.tokens.add(tokens);
        }
    }

    /// Every sequence gets a block for its next token; the youngest make room.
    fn grow(&mut self) {
        let mut i = 0;
        while let Some(&id) = self.admitted.get(i) {
            let state = self.sequences.get_mut(&id).expect(LIVE);
            if state.kv.table().len() >= state.blocks_needed() || self.residency.grow(&mut state.kv) {
                i += 1;
            } else {
                let youngest = *self.admitted.last().expect("at least the one that grows");
                self.preempt(youngest);
            }
        }
    }

    fn preempt(&mut self, id: JobId) {
        let state = self.sequences.get_mut(&id).expect(LIVE);
        self.residency.release(&mut state.kv);
        state.note_preempted();
        self.counters.preemptions += 1;
        self.admitted.retain(|&admitted| admitted != id);
        self.waiting.push_front(id);
    }

    /// One token of each sequence that decodes, then chunks of what others still compute.
    fn schedule(&self) -> Vec<ScheduledChunk> {
        let mut budget = self.limits.step_tokens;
        let mut chunks = Vec::new();
        for decoding in [true, false] {
            for &job in &self.admitted {
                let state = &self.sequences[&job];
                let len = state.remaining().min(budget);
                if state.kv.is_ready() && (state.remaining() == 1) == decoding && len > 0 {
                    chunks.push(ScheduledChunk { job, start: state.kv.computed(), len });
                    budget -= len;
                }
            }
        }
        chunks
    }

    /// Streams the tokens that a step drew, in one message for each coordinator, and ends sequences with their last token.
    fn deliver(&mut self, chunks: &[ScheduledChunk], results: Vec<SegmentResult>, now: Duration) {
        let mut tokens: BTreeMap<LinkId, Vec<SequenceToken>> = BTreeMap::new();
        let mut finished = Vec::new();
        let longest = self.limits.longest(self.residency.device_blocks());
        for (chunk, SegmentResult { scores, drawn }) in chunks.iter().zip(results) {
            let state = self.sequences.get_mut(&chunk.job).expect(LIVE);
            if let Some(logprobs) = state.push_scores(scores, drawn.is_some()) {
                let event = WorkerEvent::PromptLogprobs { sequence: state.job.sequence, logprobs };
                self.residency.act(Action::Send { link: state.link, event });
            }
            if let Some((token, logprob)) = drawn {
                tokens.entry(state.link).or_default().push(state.push_token(token, logprob, now));
                self.counters.tokens_generated += 1;
                finished.extend(state.finish(longest).map(|reason| (chunk.job, reason)));
            }
        }
        for (link, tokens) in tokens {
            self.residency.act(Action::Send { link, event: WorkerEvent::Tokens(tokens) });
        }
        for (id, reason) in finished {
            self.sequences.get_mut(&id).expect(LIVE).note_finished(now);
            self.end(id, reason);
        }
    }

    /// A chunk is computed: publishes the blocks that it filled at home.
    fn advance(&mut self, chunk: &ScheduledChunk) {
        let state = self.sequences.get_mut(&chunk.job).expect("a planned sequence lives until its step is done");
        let full = self.residency.advance(&mut state.kv, chunk);
        let fresh = full.start.max(state.published)..full.end;
        if let Some(home) = state.job.home
            && !fresh.is_empty()
        {
            state.published = fresh.end;
            self.residency.put(&state.kv, fresh, home, Delivery::BestEffort);
        }
    }

    /// Publishes hot blocks that came from elsewhere at home, too. They keep their origin.
    fn replicate(&mut self, id: JobId, fetched: &FetchedBlocks) {
        let state = &self.sequences[&id];
        let Some(node) = state.job.home else { return };
        let sources = state.fetchable();
        for (number, arrival) in (fetched.first..state.job.hot_blocks as usize).zip(&fetched.arrivals) {
            if sources[number] != node {
                let lineage = Lineage { origin: arrival.origin, ..state.kv.lineage(number) };
                let blocks = state.kv.blocks(number..number + 1);
                self.residency.act(Action::Put { node, lineage, blocks, delivery: Delivery::BestEffort });
            }
        }
    }

    fn end(&mut self, id: JobId, reason: Finish) {
        if let Some(Sequence { link, job, provenance, .. }) = self.forget(id) {
            self.send_finished(link, job.sequence, reason, provenance);
        }
    }

    fn forget(&mut self, id: JobId) -> Option<Sequence> {
        let mut state = self.sequences.remove(&id)?;
        self.residency.release(&mut state.kv);
        self.waiting.retain(|&waiting| waiting != id);
        self.admitted.retain(|&admitted| admitted != id);
        Some(state)
    }

    fn sequences_where(&self, wanted: impl Fn(&Sequence) -> bool) -> Vec<JobId> {
        let mut ids: Vec<_> = self.sequences.iter().filter(|(_, state)| wanted(state)).map(|(&id, _)| id).collect();
        ids.sort();
        ids
    }

    fn send_finished(&mut self, link: LinkId, sequence: SequenceId, reason: Finish, provenance: Provenance) {
        self.residency.act(Action::Send { link, event: WorkerEvent::Finished { sequence, reason, provenance } });
    }
}
