//! Continuous batching at token granularity: the sequences that hold device blocks, and the work of the next step.
//!
//! - **Admission.** In order ([`order`]): limits first, then short tails; shares between groups; no sequence starves.
//!   A sequence holds device blocks for all its tokens or none. It takes what the device's prefix cache has, fetches what the pool has or
//!   will have, and computes the rest.
//! - **A step** has at most `step_tokens` tokens: first one for each sequence that decodes, then chunks of tails, in order, as many as fit
//!   into the time that the tightest limit of the decoding sequences leaves (`step_limit_ms`). So neither tails nor local prefill
//!   stall them.
//! - **Speculation** (`drafting`, [`speculation`](crate::speculation)) gives decoding sequences more rows of a step, as long as that pays
//!   off. It takes no block that another sequence may need, and wrong drafts leave nothing behind: a sequence's computed tokens end before
//!   them, and the next step overwrites them.
//! - **Preemption** takes the blocks of the youngest sequence of the lowest priority and puts it back at the front of its priority's queue:
//!   for the next token of another sequence, and for a sequence of a higher priority that finds no room.

mod drafting;
mod integrity;
mod role;

use crate::{
    limits::Limits,
    sequence::Sequence,
    speculation::{Drafter, Speculation, draft_model::DraftModel, rows::RowCost, trial::Trials},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    time::Duration,
};
use tidemill_engine::{
    budget::{self, Candidate, Room},
    job::{Action, Delivery, JobId, ScheduledChunk},
    order::{self, Owed, PASSED_MAX, Rank, Standing},
    pace::{Pace, StepWork},
    residency::{FetchedBlocks, Residency},
    shares::{self, Shares},
    states::StateRule,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, LayoutFingerprint},
    ids::{LinkId, SequenceId},
    message::{Counters, DecodeJob, Finish, Provenance, SequenceToken, WorkerEvent},
    pool::Lineage,
    step::SegmentResult,
    thought::ThoughtLimit,
};

#[derive(Debug)]
pub struct Scheduler {
    layout: LayoutFingerprint,
    limits: Limits,
    residency: Residency,
    sequences: HashMap<JobId, Sequence>,
    sequences_seen: u64,
    /// The sequences without blocks.
    waiting: Vec<JobId>,
    /// The sequences with blocks, in the order in which they got them.
    admitted: Vec<JobId>,
    shares: Shares,
    owed: Owed,
    pace: Pace,
    /// The settings of speculation; if `None`, each step draws one token of a sequence.
    speculation: Option<Speculation>,
    /// The draft model, if there is one.
    draft_model: Option<DraftModel>,
    row_cost: RowCost,
    trials: Trials,
    /// The time that steps left over under the tightest limit, while it was too short for a block of a prompt; and the number of these
    /// steps.
    saved_ms: f64,
    steps_saved: u32,
    /// The step in progress, and the time at which it began.
    step: (StepWork, Duration),
    counters: Counters,
}

/// The target time of a step with prompts and without a limit, which bounds the wait of an urgent newcomer for its turn. In shorter steps,
/// decoding would take a larger share of the time from prompts.
pub const STEP_MS: f64 = 200.0;
/// The target time as a multiple of the plain time of the decoding sequences, if that is longer.
const STRETCH: f64 = 4.0;
/// The share of a limit that a step is planned to take.
const MARGIN: f64 = 0.9;
/// The most steps for which prompts wait for time that limits leave; then they continue nevertheless.
const STEPS_SAVED_MAX: u32 = 8;

const LIVE: &str = "a listed sequence lives";

/// The outcome of a step.
#[derive(Default)]
struct Outcome {
    /// The step's chunks, without wrong drafts.
    computed: Vec<ScheduledChunk>,
    /// The events that coordinators get before the tokens.
    events: Vec<(LinkId, WorkerEvent)>,
    tokens: BTreeMap<LinkId, Vec<SequenceToken>>,
    finished: Vec<(JobId, Finish)>,
    /// Whether the step verified guesses.
    has_guesses: bool,
}

impl Scheduler {
    pub fn new(layout: LayoutFingerprint, device_blocks: u32, limits: Limits) -> Self {
        Self {
            layout,
            limits,
            residency: Residency::new(device_blocks),
            sequences: HashMap::new(),
            sequences_seen: 0,
            waiting: Vec::new(),
            admitted: Vec::new(),
            shares: Shares::default(),
            owed: Owed::default(),
            pace: Pace::default(),
            speculation: None,
            draft_model: None,
            row_cost: RowCost::default(),
            trials: Trials::default(),
            saved_ms: 0.0,
            steps_saved: 0,
            step: (StepWork::default(), Duration::ZERO),
            counters: Counters::default(),
        }
    }

    /// Guesses tokens of the sequences that come from now on.
    #[must_use]
    pub fn with_speculation(mut self, speculation: Option<Speculation>) -> Self {
        self.draft_model = speculation.and_then(|speculation| Some(DraftModel::new(speculation.draft_model?, self.limits.vocab)));
        self.speculation = speculation;
        self
    }

    /// Sets the rule by which states are kept, for a model whose layers keep any.
    #[must_use]
    pub fn with_states(mut self, states: StateRule) -> Self {
        self.residency.keep_states(states);
        self
    }

    /// Accepts a sequence from a coordinator. One that cannot run here is answered at once.
    pub fn admit(&mut self, link: LinkId, job: DecodeJob, now: Duration) {
        self.admit_limited(link, job, None, now);
    }

    /// Like [`admit`](Self::admit), with a limit on the sequence's thought.
    pub fn admit_limited(&mut self, link: LinkId, job: DecodeJob, thought: Option<ThoughtLimit>, now: Duration) {
        let id = Sequence::job_id(job.sequence);
        let is_full = self.sequences.len() >= self.limits.sequences_max.saturating_add(self.limits.waiting_max);
        let is_full = is_full && !self.return_one_below(job.urgency.priority);
        let refusal = match self.limits.unfit(&job, thought.as_ref(), self.residency.device_blocks()) {
            Some(reason) => Finish::Failed { reason },
            None if is_full || self.sequences.contains_key(&id) => Finish::Returned,
            None => {
                if let Some(constraint) = job.constraint.clone() {
                    let generated = job.tokens[job.prompt_tokens as usize..].to_vec();
                    self.residency.act(Action::Constrain { job: id, group: job.urgency.group, constraint, generated });
                }
                self.shares.enter(&job.urgency);
                let sequence = Sequence::new(link, job, self.sequences_seen, &self.layout, self.limits.reads_whole, now);
                let confidence = self.draft_model.as_ref().map(DraftModel::confidence).unwrap_or_default();
                let drafter = self.speculation.as_ref().map(|speculation| Drafter::new(speculation, confidence));
                self.sequences.insert(id, sequence.with_drafter(drafter).with_limited_thought(thought, self.limits.vocab));
                self.sequences_seen += 1;
                self.waiting.push(id);
                return;
            }
        };
        self.send_finished(link, job.sequence, refusal, Provenance::default());
    }

    /// Returns the youngest waiting sequence of the lowest priority to its coordinator, if its priority is lower than `priority`.
    fn return_one_below(&mut self, priority: u8) -> bool {
        let lowest = self.waiting.iter().min_by_key(|id| (self.sequences[id].job.urgency.priority, Reverse(self.sequences[id].number)));
        let Some(&id) = lowest.filter(|id| self.sequences[id].job.urgency.priority < priority) else { return false };
        self.end(id, Finish::Returned);
        true
    }

    /// Cancels a sequence whose client went away, or which the coordinator wants elsewhere.
    pub fn cancel(&mut self, sequence: SequenceId) {
        self.forget(Sequence::job_id(sequence));
    }

    /// Notes that no worker computes this sequence's missing blocks any more: takes those that are in the pool now, and computes the rest.
    pub fn stop_waiting(&mut self, sequence: SequenceId) {
        if let Some(state) = self.sequences.get_mut(&Sequence::job_id(sequence)) {
            state.job.wait_ms = 0;
            self.residency.fetch_without_waiting(&mut state.kv);
        }
    }

    /// Admits waiting sequences in order, as far as there is room, for which lower priorities are preempted. A sequence without room lets
    /// others of its priority pass, unless its client has had a token or it has been passed too often.
    fn admit_waiting(&mut self, ranks: &HashMap<JobId, Rank>, now: Duration) {
        let oldest = self.waiting.iter().copied().min_by_key(|id| self.sequences[id].number);
        let overdue = oldest.filter(|id| self.sequences[id].passed >= PASSED_MAX);
        let is_next = |id, state: &Sequence| state.is_streaming() || overdue == Some(id);
        let mut waiting = self.waiting.clone();
        waiting.sort_by_key(|id| {
            let state = &self.sequences[id];
            (overdue != Some(*id), Reverse(state.job.urgency.priority), !state.is_streaming(), ranks[id])
        });
        let mut priority_min = 0;
        for id in waiting {
            let priority = self.sequences[&id].job.urgency.priority;
            if priority < priority_min {
                return;
            }
            if self.admit_one(id, now) {
                let number = self.sequences[&id].number;
                for other in &self.waiting {
                    let other = self.sequences.get_mut(other).expect(LIVE);
                    other.passed = order::passed(other.passed, other.number < number, overdue == Some(id));
                }
            } else if is_next(id, &self.sequences[&id]) || self.admitted.len() >= self.limits.sequences_max {
                return;
            } else {
                priority_min = priority;
            }
        }
    }

    fn admit_one(&mut self, id: JobId, now: Duration) -> bool {
        while !self.take_room(id) {
            let Some(victim) = self.yields_to(id) else { return false };
            self.preempt(victim);
        }
        let state = self.sequences.get_mut(&id).expect(LIVE);
        self.waiting.retain(|&waiting| waiting != id);
        self.admitted.push(id);
        state.note_admitted(now);
        let (nodes, wait) = (state.fetchable(), Duration::from_millis(state.job.wait_ms));
        if !self.residency.fetch(&mut state.kv, &nodes, state.job.home, wait, now) {
            let nothing = FetchedBlocks { first: state.kv.computed_blocks(), arrivals: Vec::new() };
            self.start(id, &nothing, now);
        }
        true
    }

    fn take_room(&mut self, id: JobId) -> bool {
        // Room for each sequence to grow by one block keeps a full device from admitting sequences that it would preempt at once.
        let headroom = self.admitted.len();
        let state = self.sequences.get_mut(&id).expect(LIVE);
        let (reusable, needed) = (state.reusable_blocks(), state.blocks_needed());
        headroom < self.limits.sequences_max && self.residency.admit(&mut state.kv, reusable, needed, headroom)
    }

    /// The youngest sequence of the lowest priority with blocks, if its priority is lower than this sequence's, and all such sequences hold
    /// enough. A sequence that has been passed too often keeps its blocks.
    fn yields_to(&self, id: JobId) -> Option<JobId> {
        let priority = |id: &JobId| self.sequences[id].job.urgency.priority;
        let own = priority(&id);
        let lower =
            || self.admitted.iter().copied().filter(|admitted| priority(admitted) < own && self.sequences[admitted].passed < PASSED_MAX);
        let held: usize = lower().map(|id| self.sequences[&id].kv.blocks_held()).sum();
        let stay = self.admitted.len() - lower().count();
        let needed = self.sequences[&id].blocks_needed() + self.residency.states().of_job() + stay;
        lower().rev().min_by_key(priority).filter(|_| stay < self.limits.sequences_max && needed <= held + self.residency.free_blocks())
    }

    /// The rank of every sequence that waits for device blocks or has a tail to compute.
    fn ranks(&self, now: Duration) -> HashMap<JobId, Rank> {
        let over = self.shares.over();
        let rank = |(&id, state): (&JobId, &Sequence)| {
            let (urgency, tail, tokens) = (&state.job.urgency, state.tail(), state.job.tokens.len());
            let left = self.pace.prompt(tokens - tail, tail);
            let standing = Standing { arrived: state.arrived, work: left, left, over_share: over.contains(&shares::share(urgency)) };
            (id, Rank::new(urgency, standing, state.number, now))
        };
        self.sequences.iter().filter(|(_, state)| !state.is_decoding()).map(rank).collect()
    }

    /// Starts a sequence: all available blocks are on the device; the rest is computed.
    fn start(&mut self, id: JobId, fetched: &FetchedBlocks, now: Duration) {
        let state = self.sequences.get_mut(&id).expect(LIVE);
        if let Some(tokens) = state.note_ready(fetched, now).copied() {
            self.counters.tokens.add(&tokens);
            let event = WorkerEvent::Sources { sequence: state.job.sequence, tokens };
            self.residency.act(Action::Send { link: state.link, event });
        }
    }

    /// Gives every sequence a block for its next token; the youngest of the lowest priority make room.
    fn grow(&mut self) {
        for id in self.admitted.clone() {
            while self.admitted.contains(&id) {
                let state = self.sequences.get_mut(&id).expect(LIVE);
                if state.kv.table().len() >= state.blocks_needed() || self.residency.grow(&mut state.kv) {
                    break;
                }
                let priority = |id: &JobId| self.sequences[id].job.urgency.priority;
                let victim = self.admitted.iter().copied().rev().min_by_key(priority).expect("at least the one that grows");
                self.preempt(victim);
            }
        }
    }

    fn preempt(&mut self, id: JobId) {
        let state = self.sequences.get_mut(&id).expect(LIVE);
        self.residency.release(&mut state.kv);
        state.note_preempted(self.residency.states());
        self.leave_draft_model(id);
        self.counters.preemptions += 1;
        self.admitted.retain(|&admitted| admitted != id);
        self.waiting.push(id);
    }

    /// Schedules one token of each sequence that decodes, with those drafted after it, then chunks of prompts.
    fn schedule(&mut self, ranks: &HashMap<JobId, Rank>, now: Duration) -> Vec<ScheduledChunk> {
        let limit_ms = self.step_limit_ms() - self.guessing_ms();
        self.draft(limit_ms);
        let states = || self.admitted.iter().map(|id| (*id, &self.sequences[id])).filter(|(_, state)| state.is_ready());
        let rows = states().filter(|(_, state)| state.is_decoding());
        let row = |(job, state): (JobId, &Sequence)| ScheduledChunk { job, start: state.kv.computed(), len: 1 + state.drafted() };
        let mut chunks: Vec<_> = rows.map(row).collect();
        let decoding = chunks.len();
        let rows = chunks.iter().map(|chunk| chunk.len).sum();
        let tails = states().filter(|(_, state)| !state.is_decoding());
        let candidate = |(job, state): (JobId, &Sequence)| {
            let (number, start, remaining) = (state.number, state.kv.computed(), state.chunk(self.residency.states()));
            Candidate { job, rank: ranks[&job], number, start, remaining, is_whole: state.is_whole }
        };
        let tails: Vec<_> = tails.map(candidate).collect();
        if let Some(ms) = self.tail_ms(rows, limit_ms, !tails.is_empty()) {
            let room = Room { tokens: self.limits.step_tokens.saturating_sub(rows), ms };
            chunks.extend(budget::give_out(room, tails, &self.pace, &mut self.owed));
        }
        self.step = (budget::work(rows, &chunks[decoding..]), now);
        chunks
    }

    /// The bound on the next step's time: the tightest limit of the decoding sequences, or the extent to which their plain step may be
    /// stretched.
    fn step_limit_ms(&self) -> f64 {
        let decoding = || self.admitted.iter().map(|id| &self.sequences[id]).filter(|state| state.is_decoding());
        let tightest = decoding().filter_map(|state| state.job.urgency.tpot_ms).min_by(f32::total_cmp);
        match (tightest, self.pace.plain_ms(decoding().count())) {
            (Some(limit), _) => MARGIN * f64::from(limit),
            (None, plain) => STEP_MS.max(STRETCH * plain.unwrap_or(0.0)),
        }
    }

    /// The time for prompts in a step with this many rows. If it is less than a block of them takes, `None`: they wait until enough is
    /// saved. Limits are averages, so a step may be longer by as much as earlier ones were shorter.
    fn tail_ms(&mut self, rows: usize, limit_ms: f64, wanted: bool) -> Option<f64> {
        let left_ms = (limit_ms - self.pace.plain_ms(rows).unwrap_or(0.0)).max(0.0);
        let block_ms = self.pace.token_ms(0).unwrap_or(0.0) * BLOCK_TOKENS as f64;
        let waits = wanted && rows > 0 && self.saved_ms + left_ms < block_ms && self.steps_saved < STEPS_SAVED_MAX;
        if waits {
            self.saved_ms += left_ms;
            self.steps_saved += 1;
            return None;
        }
        (self.saved_ms, self.steps_saved) = (0.0, 0);
        Some(left_ms)
    }

    /// Applies the tokens and scores of a step.
    fn take_in(&mut self, chunks: &[ScheduledChunk], results: Vec<SegmentResult>, now: Duration) -> Outcome {
        let mut outcome = Outcome::default();
        let longest = self.limits.longest(self.residency.device_blocks());
        for (chunk, SegmentResult { scores, drawn, fault, is_late, embedding }) in chunks.iter().zip(results) {
            let state = self.sequences.get_mut(&chunk.job).expect(LIVE);
            let (job, link, sequence, drafted) = (chunk.job, state.link, state.job.sequence, state.drafted());
            if let Some((values, finish)) = state.finish_embedding(chunk.start + chunk.len, embedding) {
                outcome.events.extend(values.map(|values| (link, WorkerEvent::Embedding { sequence, values })));
                outcome.finished.push((job, finish));
                outcome.computed.push(*chunk);
                continue;
            }
            if let Some(logprobs) = state.push_scores(scores, !drawn.is_empty()) {
                outcome.events.push((link, WorkerEvent::PromptLogprobs { sequence, logprobs }));
            }
            let outcomes = state.learn(&drawn);
            let (tokens, finish) = state.push_drawn(drawn, longest, now);
            for (class, is_drawn) in outcomes {
                self.draft_model.iter_mut().for_each(|model| model.note(class, is_drawn));
            }
            self.counters.tokens_generated += tokens.len() as u64;
            let accepted = tokens.len().saturating_sub(1);
            outcome.has_guesses |= drafted > 0;
            count_places(&mut self.counters.tokens_drafted, drafted);
            count_places(&mut self.counters.tokens_accepted, accepted);
            state.provenance.drafted += drafted as u64;
            state.provenance.accepted += accepted as u64;
            // A drafted row counts if it follows the sequence's tokens: that of the last token, and one for each confirmed token. A row
            // whose mask was late is computed again, with the same bits.
            let len = if drafted == 0 { chunk.len - usize::from(is_late) } else { tokens.len() + usize::from(fault.is_some()) };
            outcome.computed.push(ScheduledChunk { len, ..*chunk });
            outcome.tokens.entry(link).or_default().extend(tokens);
            outcome.finished.extend(finish.or(fault.map(|reason| Finish::Failed { reason })).map(|reason| (job, reason)));
        }
        outcome
    }

    /// Notifies coordinators, each with one message of tokens, and ends sequences with their last token.
    fn tell(&mut self, Outcome { events, tokens, finished, .. }: Outcome, now: Duration) {
        let tokens = tokens.into_iter().filter(|(_, tokens)| !tokens.is_empty());
        for (link, event) in events.into_iter().chain(tokens.map(|(link, tokens)| (link, WorkerEvent::Tokens(tokens)))) {
            self.residency.act(Action::Send { link, event });
        }
        for (id, reason) in finished {
            let state = self.sequences.get_mut(&id).expect(LIVE);
            state.note_finished(now);
            // The client's next turn starts from here.
            self.residency.keep_last_state(&mut state.kv, state.job.home.map(|home| (home, Delivery::BestEffort)));
            self.end(id, reason);
        }
    }

    /// Notes that a chunk is computed, and publishes the blocks that it filled at home.
    fn advance(&mut self, chunk: &ScheduledChunk) {
        let state = self.sequences.get_mut(&chunk.job).expect("a planned sequence lives until its step is done");
        let full = self.residency.advance(&mut state.kv, chunk);
        let fresh = full.start.max(state.published)..full.end;
        if let Some(home) = state.job.home
            && !fresh.is_empty()
            && !state.is_whole
        {
            state.published = fresh.end;
            self.residency.put(&state.kv, fresh, home, Delivery::BestEffort);
        }
        if state.keeps_state(self.residency.states()) {
            self.residency.keep_state(&mut state.kv, state.job.home.map(|home| (home, Delivery::BestEffort)));
        }
    }

    /// Also publishes hot blocks that came from elsewhere at home. They keep their origin.
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
        self.leave_draft_model(id);
        self.shares.leave(&state.job.urgency);
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

/// Adds one to each of the first `len` counts.
fn count_places(counts: &mut Vec<u64>, len: usize) {
    counts.resize(counts.len().max(len), 0);
    counts[..len].iter_mut().for_each(|count| *count += 1);
}
