//! Speculation changes no token, no end and no block, regardless of the proposals. The decode scheduler runs around a model whose tokens
//! are a hash of their whole context *as it stands in device blocks*, so that any remains of a wrong guess show.

use proptest::prelude::*;
use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};
use tidemill_decode::{
    limits::Limits,
    scheduler::Scheduler,
    speculation::{Proposer, Speculation, draft_model::DraftBounds, ngram::Ngram},
};
use tidemill_engine::{
    job::{Action, JobId, ScheduledChunk},
    role::{MaskState, Role},
};
use tidemill_kvpool::client::{Arrival, Source};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Token},
    ids::{LinkId, RequestId, SequenceId},
    message::{DecodeJob, Finish, PoolNode, WorkerEvent},
    sampling::{Sampling, StopRule, TokenLogprob},
    step::{Segment, SegmentResult, Wanted},
    thought::{ReaderState, ThoughtLimit, ThoughtReader},
    urgency::Urgency,
};

const LINK: LinkId = LinkId { coordinator: 0, session: 0 };
const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);
const LIMITS: Limits =
    Limits { sequences_max: 4, waiting_max: 60, step_tokens: 24, context_tokens: 140, vocab: VOCAB as usize, reads_whole: false };
const VOCAB: u32 = 64;
/// A stop token, which the model draws now and then.
const END: Token = 7;
/// The number of blocks, little more than the longest sequence needs.
const BLOCKS: u32 = 12;

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The contents of a position, from those of the previous position and its token.
fn follow(state: u64, token: Token) -> u64 {
    mix(state ^ mix(u64::from(token) + 1))
}

/// Token number `index` of an answer, after a position.
fn next_token(state: u64, index: u64, banned: &[Token]) -> Token {
    let token = (mix(state) ^ mix(index)) as Token % VOCAB;
    if banned.contains(&token) { token + 1 } else { token }
}

/// The hashes of a sequence's positions.
fn states(tokens: &[Token]) -> Vec<u64> {
    let chain = tokens.iter().scan(0, |state, &token| {
        *state = follow(*state, token);
        Some(*state)
    });
    chain.collect()
}

/// A proposer that knows the model, and is wrong at `WRONG` of 16 places, chosen by a hash.
#[derive(Debug)]
struct Oracle<const WRONG: u64>;

/// The end of prompts, which answers never contain, so that the oracle can tell them apart.
const MARK: Token = 0;

impl<const WRONG: u64> Proposer for Oracle<WRONG> {
    fn propose(&mut self, tokens: &[Token], most: usize, proposal: &mut Vec<Token>) -> usize {
        let mut state = states(tokens).last().copied().unwrap_or_default();
        let prompt = tokens.iter().position(|&token| token == MARK).unwrap_or_default() + 1;
        for place in tokens.len()..tokens.len() + most {
            let token = shifted(next_token(state, (place - prompt) as u64, &[]));
            let proposed = if mix(state ^ 99) % 16 < WRONG { token % (VOCAB - 1) + 1 } else { token };
            proposal.push(proposed);
            state = follow(state, token);
        }
        8
    }
}

/// The token, or another one in place of the mark.
fn shifted(token: Token) -> Token {
    if token == MARK { MARK + 1 } else { token }
}

const PROPOSERS: [fn() -> Box<dyn Proposer>; 5] =
    [|| Box::new(Oracle::<0>), || Box::new(Oracle::<3>), || Box::new(Oracle::<8>), || Box::new(Oracle::<16>), Ngram::boxed];

/// A draft model whose guesses are wrong at `wrong` of 16 places, with memory of its own.
#[derive(Clone, Copy, Debug)]
struct Draft {
    wrong: u64,
    blocks: u32,
    /// The time of its step, relative to ten milliseconds for a step of the large model.
    step: Duration,
}

impl Draft {
    const BOUNDS: DraftBounds = DraftBounds { blocks: 0, vocab: VOCAB as usize, context_tokens: 130, step_tokens: 40 };
}

/// A bug planted into the large model's executor.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Bug {
    /// Every row draws, whether the token before it was drawn or not.
    RejectedTokenPublished,
}

/// A job of a test.
#[derive(Clone, Debug)]
struct Ask {
    /// The index of one of a few prompts, so that blocks are shared, and the length of its part.
    prompt: u32,
    len: usize,
    max_tokens: u32,
    min_tokens: u32,
    logprobs: bool,
    scored: bool,
    priority: u8,
    thought: Option<Thought>,
}

/// A limited thought; if it is `open`, the prompt has begun it.
#[derive(Clone, Copy, Debug)]
struct Thought {
    tokens_max: u32,
    open: bool,
}

/// The token that begins a thought: as the first of an answer, or after a header.
const THOUGHT: Token = 9;
const THOUGHT_END: Token = 10;
const HEADER: Token = 11;
/// The only header that may follow once a limit is reached.
const FINAL: Token = 12;

impl Thought {
    fn limit(self) -> ThoughtLimit {
        let state = |is_thought, otherwise, steps, ending| ReaderState { is_thought, otherwise, steps, ending };
        let states = vec![
            state(false, 2, vec![(THOUGHT, 1), (HEADER, 3)], vec![]),
            state(true, 1, vec![(THOUGHT_END, 2)], vec![THOUGHT_END]),
            state(false, 2, vec![(HEADER, 3)], vec![]),
            state(false, 2, vec![(THOUGHT, 1), (HEADER, 3)], vec![FINAL]),
        ];
        ThoughtLimit { tokens_max: self.tokens_max, start: self.open.into(), reader: ThoughtReader { states }.into() }
    }

    /// The only token that may follow, found in the answer so far.
    fn only(self, answer: &[Token]) -> Option<Token> {
        let (mut thinks, mut thought) = (self.open, 0);
        for (i, &token) in answer.iter().enumerate() {
            let may_begin = i == 0 || answer[i - 1] == HEADER;
            match token {
                THOUGHT_END => thinks = false,
                _ if thinks => thought += 1,
                THOUGHT => thinks = may_begin,
                _ => {}
            }
        }
        let after_header = answer.last() == Some(&HEADER) && !thinks;
        (thought >= self.tokens_max && (thinks || after_header)).then_some(if thinks { THOUGHT_END } else { FINAL })
    }
}

fn ask() -> impl Strategy<Value = Ask> {
    let thought = (0u32..20, prop::bool::weighted(0.8)).prop_map(|(tokens_max, open)| Thought { tokens_max, open });
    let rest = (any::<bool>(), prop::bool::weighted(0.2), 0u8..2, prop::option::of(thought));
    (0u32..3, 1usize..100, 1u32..60, prop_oneof![3 => Just(0u32), 1 => 0u32..30], rest).prop_map(
        |(prompt, len, max_tokens, min_tokens, (logprobs, scored, priority, thought))| Ask {
            prompt,
            len,
            max_tokens,
            min_tokens: min_tokens.min(max_tokens),
            logprobs,
            scored,
            priority,
            thought,
        },
    )
}

impl Ask {
    fn prompt(&self) -> Vec<Token> {
        let tokens = (1..self.len as u32).map(|i| 1 + mix(u64::from(i / 5 * 8 + self.prompt)) as u32 % (VOCAB - 1));
        tokens.chain([MARK]).collect()
    }

    fn job(&self, number: u64) -> DecodeJob {
        let tokens = self.prompt();
        DecodeJob {
            request: RequestId(number),
            sequence: SequenceId(number),
            prompt_tokens: tokens.len() as u32,
            tokens: tokens.into(),
            salt: Vec::new(),
            read: Vec::new(),
            home: Some(PoolNode { addr: ([127, 0, 0, 1], 1).into(), near: true }),
            hot_blocks: 0,
            expected_blocks: 0,
            wait_ms: 0,
            sampling: Sampling { logprobs: self.logprobs.then_some(1), ..Sampling::default() },
            stop: StopRule { max_tokens: self.max_tokens, min_tokens: self.min_tokens, stop_tokens: vec![END] },
            constraint: None,
            urgency: Urgency { priority: self.priority, ..Urgency::default() },
            prompt_logprobs: self.scored.then_some(0),
            embeds: None,
        }
    }

    /// The answer and its end, computed without a scheduler.
    fn truth(&self) -> (Vec<Token>, Finish) {
        let (mut tokens, prompt) = (self.prompt(), self.len.max(1));
        loop {
            let index = (tokens.len() - prompt) as u32;
            let banned: &[Token] = if index < self.min_tokens { &[END] } else { &[] };
            let state = *states(&tokens).last().expect("a prompt has tokens");
            let only = self.thought.and_then(|thought| thought.only(&tokens[prompt..]));
            let token = only.unwrap_or_else(|| shifted(next_token(state, u64::from(index), banned)));
            tokens.push(token);
            let done = index + 1 >= self.max_tokens || tokens.len() >= LIMITS.context_tokens;
            if token == END || done {
                let finish = if token == END { Finish::Stop { token } } else { Finish::Length };
                return (tokens.split_off(prompt), finish);
            }
        }
    }
}

/// The events that coordinators got for a sequence.
#[derive(Debug, Default, PartialEq)]
struct Told {
    tokens: Vec<Token>,
    logprobs: Vec<Option<f32>>,
    scored: usize,
    finish: Option<Finish>,
    drafted: u64,
    accepted: u64,
}

struct World {
    scheduler: Scheduler,
    memory: Vec<[u64; BLOCK_TOKENS]>,
    now: Duration,
    told: BTreeMap<SequenceId, Told>,
    /// The contents of each block of the right answers.
    blocks: HashMap<BlockKey, [u64; BLOCK_TOKENS]>,
    /// The blocks that were put.
    pool: HashMap<BlockKey, [u64; BLOCK_TOKENS]>,
    most_rows: usize,
    draft: Option<Draft>,
    draft_memory: Vec<[u64; BLOCK_TOKENS]>,
    draft_steps: usize,
    draft_tokens: usize,
    /// The lengths of prompts.
    prompts: Vec<usize>,
    bug: Option<Bug>,
    /// The seed of masks that come late, as those of grammars may; 0 if none does.
    lateness: u64,
}

impl World {
    fn new(blocks: u32, speculation: Option<Speculation>) -> Self {
        Self {
            draft: None,
            draft_memory: Vec::new(),
            draft_steps: 0,
            draft_tokens: 0,
            prompts: Vec::new(),
            bug: None,
            lateness: 0,
            scheduler: Scheduler::new(LAYOUT, blocks, LIMITS).with_speculation(speculation),
            memory: vec![[0; BLOCK_TOKENS]; blocks as usize],
            now: Duration::ZERO,
            told: BTreeMap::new(),
            blocks: HashMap::new(),
            pool: HashMap::new(),
            most_rows: 0,
        }
    }

    fn with_draft(blocks: u32, speculation: Speculation, draft: Draft) -> Self {
        let bounds = DraftBounds { blocks: draft.blocks, ..Draft::BOUNDS };
        Self {
            draft: Some(draft),
            draft_memory: vec![[0; BLOCK_TOKENS]; draft.blocks as usize],
            ..Self::new(blocks, Some(Speculation { draft_model: Some(bounds), ..speculation }))
        }
    }

    /// Runs the draft model's steps until it has nothing more to guess.
    fn guess(&mut self) {
        let Some(draft) = self.draft else { return };
        for _ in 0..40 {
            let chunks = self.scheduler.guess(self.now);
            if chunks.is_empty() {
                return;
            }
            assert!(chunks.iter().map(|chunk| chunk.len).sum::<usize>() <= Draft::BOUNDS.step_tokens);
            let results = chunks.iter().map(|chunk| self.guess_one(chunk, draft)).collect();
            self.draft_steps += 1;
            self.now += draft.step;
            self.scheduler.guessed(results, self.now);
            self.scheduler.check_integrity();
        }
        panic!("a round does not end");
    }

    fn guess_one(&mut self, chunk: &ScheduledChunk, draft: Draft) -> SegmentResult {
        let segment = self.scheduler.guess_segment(chunk);
        assert_eq!((segment.start, segment.tokens.len()), (chunk.start, chunk.len));
        let mut result = Self::compute_in(&mut self.draft_memory, &segment, None);
        self.draft_tokens += chunk.len;
        // The draft model knows the model, whose draws depend on their index.
        let place = segment.start + chunk.len;
        let end = place - 1;
        let state = self.draft_memory[segment.blocks[end / BLOCK_TOKENS] as usize][end % BLOCK_TOKENS];
        for (token, logprob) in &mut result.drawn {
            let right = shifted(next_token(state, (place - self.prompts[chunk.job.0 as usize]) as u64, &[]));
            let is_wrong = mix(state ^ 98) % 16 < draft.wrong;
            *token = if is_wrong { right % (VOCAB - 1) + 1 } else { right };
            *logprob = Some(TokenLogprob { logprob: if is_wrong { -1.5 } else { -0.01 }, top: Vec::new() });
        }
        result
    }

    fn admit(&mut self, ask: &Ask) {
        self.prompts.push(ask.prompt().len());
        let number = self.told.len() as u64;
        self.told.insert(SequenceId(number), Told::default());
        let all = [ask.prompt(), ask.truth().0].concat();
        let states = states(&all);
        let (full, _) = states.as_chunks::<BLOCK_TOKENS>();
        self.blocks.extend(Chain::new(&LAYOUT, b"", &all).keys().iter().copied().zip(full.iter().copied()));
        self.scheduler.admit_limited(LINK, ask.job(number), ask.thought.map(Thought::limit), self.now);
    }

    /// Writes a segment's positions and draws as the sampler does: row after row, as long as the drafted token is the drawn one.
    fn compute(memory: &mut [[u64; BLOCK_TOKENS]], segment: &Segment<'_>, bug: Option<Bug>) -> SegmentResult {
        let result = Self::compute_in(memory, segment, bug);
        if let Wanted::Token(draw) | Wanted::Verified(draw) = segment.wanted {
            let generated: u32 = draw.history.tokens().map(|(_, generated)| generated).sum();
            assert_eq!(u64::from(generated), draw.index, "penalties know all tokens before");
        }
        result
    }

    fn compute_in(memory: &mut [[u64; BLOCK_TOKENS]], segment: &Segment<'_>, bug: Option<Bug>) -> SegmentResult {
        let place = |position: usize| (segment.blocks[position / BLOCK_TOKENS] as usize, position % BLOCK_TOKENS);
        let mut state = segment.start.checked_sub(1).map_or(0, |before| memory[place(before).0][place(before).1]);
        let mut at_rows = Vec::new();
        for (position, &token) in (segment.start..).zip(segment.tokens) {
            state = follow(state, token);
            let (block, at) = place(position);
            memory[block][at] = state;
            at_rows.push(state);
        }
        let mut result = SegmentResult::default();
        let (draw, rows) = match segment.wanted {
            Wanted::Nothing | Wanted::Embedding { .. } => return result,
            Wanted::Token(draw) => (draw, at_rows.len() - 1..at_rows.len()),
            Wanted::Verified(draw) => (draw, 0..at_rows.len()),
            Wanted::Scores { targets, token, .. } => {
                result.scores = targets.iter().map(|_| TokenLogprob { logprob: -1.0, top: Vec::new() }).collect();
                let Some(draw) = token else { return result };
                (draw, at_rows.len() - 1..at_rows.len())
            }
        };
        assert!(rows.len() == 1 || draw.allowed.is_none(), "nothing is drafted where only some tokens may be drawn");
        let only = draw.allowed.map(|allowed| allowed.wait().expect("it is known").tokens().collect::<Vec<_>>());
        for (i, row) in rows.enumerate() {
            if i > 0 && result.drawn[i - 1].0 != segment.tokens[row] && bug != Some(Bug::RejectedTokenPublished) {
                break;
            }
            let free = shifted(next_token(at_rows[row], draw.index + i as u64, draw.banned));
            let token = only.as_ref().map_or(free, |only| only[0]);
            let logprob = draw.sampling.logprobs.map(|_| TokenLogprob { logprob: at_rows[row] as f32, top: Vec::new() });
            result.drawn.push((token, logprob));
        }
        result
    }

    /// Delays masks at random: some sequences sit out the next step or get no drafts in it.
    fn mask(&mut self) {
        if self.lateness == 0 {
            return;
        }
        for number in 0..self.told.len() as u64 {
            let state = match self.random_lateness(number) % 4 {
                0 => MaskState::Awaited,
                1 => MaskState::Known,
                _ => MaskState::InTime,
            };
            self.scheduler.masked(JobId(number), state);
        }
    }

    /// Makes the mask of one of a segment's rows late at random: no token is drawn from there on.
    fn withhold(&mut self, job: JobId, result: &mut SegmentResult) {
        if self.lateness > 0 && self.random_lateness(job.0).is_multiple_of(3) && !result.drawn.is_empty() {
            let row = self.random_lateness(job.0) as usize % result.drawn.len();
            result.drawn.truncate(row);
            result.is_late = true;
        }
    }

    fn random_lateness(&mut self, job: u64) -> u64 {
        self.lateness = mix(self.lateness ^ job).max(1);
        self.lateness
    }

    fn step(&mut self) {
        self.mask();
        self.guess();
        let chunks = self.scheduler.plan(self.now);
        self.observe();
        if chunks.is_empty() {
            self.now += Duration::from_millis(1);
            return;
        }
        let rows: usize = chunks.iter().map(|chunk| chunk.len).sum();
        assert!(rows <= LIMITS.step_tokens, "{rows} rows");
        let decoding: usize = chunks.iter().map(|chunk| self.scheduler.decode_rows(chunk)).sum();
        let mut results = Vec::new();
        for chunk in &chunks {
            let segment = self.scheduler.segment(chunk);
            assert_eq!((segment.start, segment.tokens.len()), (chunk.start, chunk.len));
            if let Wanted::Verified(_) = segment.wanted {
                self.most_rows = self.most_rows.max(chunk.len);
                assert_eq!(self.scheduler.decode_rows(chunk), chunk.len);
            }
            let mut result = Self::compute(&mut self.memory, &segment, self.bug);
            self.withhold(chunk.job, &mut result);
            results.push(result);
        }
        // A row costs a twentieth of a step.
        self.now += Duration::from_micros(10_000 + 500 * decoding as u64 + 200 * (rows - decoding) as u64);
        self.scheduler.stepped(&chunks, results, self.now);
        self.observe();
        self.scheduler.check_integrity();
    }

    /// Applies actions. A block that was put can be fetched.
    fn observe(&mut self) {
        let mut fetches = Vec::new();
        for action in self.scheduler.residency_mut().take_actions() {
            match action {
                Action::Fetch { fetch, parts } => {
                    fetches.extend(parts.into_iter().flat_map(|part| part.keys).enumerate().map(|(index, key)| (fetch, index, key)));
                }
                Action::Put { blocks, .. } => {
                    for (key, block) in blocks {
                        assert_eq!(self.memory[block as usize], self.blocks[&key], "a published block holds the tokens of its key");
                        self.pool.insert(key, self.memory[block as usize]);
                    }
                }
                Action::Send { event: WorkerEvent::Tokens(tokens), .. } => {
                    for token in tokens {
                        let told = self.told.get_mut(&token.sequence).expect("a sequence that was admitted");
                        assert!(told.finish.is_none(), "a token after the end");
                        assert_eq!(token.index as usize, told.tokens.len(), "tokens come in order");
                        told.tokens.push(token.token);
                        told.logprobs.push(token.logprob.map(|logprob| logprob.logprob));
                    }
                }
                Action::Send { event: WorkerEvent::PromptLogprobs { sequence, logprobs }, .. } => {
                    self.told.get_mut(&sequence).expect("admitted").scored = logprobs.len();
                }
                Action::Send { event: WorkerEvent::Finished { sequence, reason, provenance }, .. } => {
                    let told = self.told.get_mut(&sequence).expect("admitted");
                    (told.drafted, told.accepted) = (provenance.drafted, provenance.accepted);
                    assert_eq!(told.finish.replace(reason), None, "it ends once");
                }
                _ => {}
            }
        }
        for (fetch, index, key) in fetches {
            let bytes = self.pool.get(&key);
            if let (Some(bytes), Some(block)) = (bytes, self.scheduler.destination(fetch, index)) {
                self.memory[block as usize] = *bytes;
            }
            let arrival = bytes.map(|_| Arrival { origin: RequestId(999), source: Source::Dram });
            self.scheduler.fetched(fetch, index, arrival, self.now);
        }
    }

    fn run(&mut self) -> usize {
        for step in 0..20_000 {
            if self.told.values().all(|told| told.finish.is_some()) {
                assert_eq!(self.scheduler.residency().blocks(1).used, 0, "blocks leak");
                return step;
            }
            self.step();
        }
        panic!("it does not end");
    }

    fn check(&self, asks: &[Ask]) {
        let (mut drafted, mut accepted, mut generated) = (0, 0, 0);
        for (told, ask) in self.told.values().zip(asks) {
            let (tokens, finish) = ask.truth();
            assert_eq!(told.tokens, tokens, "{ask:?}");
            assert_eq!(told.finish, Some(finish));
            assert_eq!(told.scored, if ask.scored { ask.prompt().len() } else { 0 });
            let all = [ask.prompt(), tokens.clone()].concat();
            let states = states(&all);
            let logprob = |i: usize| ask.logprobs.then_some(states[ask.len.max(1) + i - 1] as f32);
            assert_eq!(told.logprobs, (0..tokens.len()).map(logprob).collect::<Vec<_>>());
            assert!(told.accepted <= told.drafted && told.accepted < tokens.len() as u64);
            (drafted, accepted, generated) = (drafted + told.drafted, accepted + told.accepted, generated + tokens.len() as u64);
        }
        let counters = self.scheduler.counters();
        let sum = |places: &[u64]| places.iter().sum::<u64>();
        assert_eq!((sum(&counters.tokens_drafted), sum(&counters.tokens_accepted)), (drafted, accepted));
        assert_eq!(counters.tokens_generated, generated);
    }
}

fn speculation(proposer: usize, draft_tokens_max: usize, rows_max: usize) -> Speculation {
    Speculation { proposer: PROPOSERS[proposer], draft_model: None, draft_tokens_max, draft_tokens_min: 0, rows_max }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn answers_ends_and_blocks_are_those_without(
        asks in prop::collection::vec(ask(), 1..9),
        proposer in 0..PROPOSERS.len(),
        draft_tokens_max in 1usize..12,
        rows_max in 1usize..30,
        late in 0usize..30,
        lateness in prop_oneof![Just(0), any::<u64>()],
    ) {
        let mut world = World::new(BLOCKS, Some(speculation(proposer, draft_tokens_max, rows_max)));
        world.lateness = lateness;
        let (first, others) = asks.split_at(asks.len().div_ceil(2));
        first.iter().for_each(|ask| world.admit(ask));
        (0..late).for_each(|_| world.step());
        others.iter().for_each(|ask| world.admit(ask));
        world.run();
        world.check(&asks);
        prop_assert!(world.most_rows <= 1 + draft_tokens_max && world.most_rows <= rows_max.max(1));
    }
}

/// The answer of a worker that takes the sequence over after its first `kept` tokens.
fn taken_over(ask: &Ask, kept: usize) -> Vec<Token> {
    let mut world = World::new(64, Some(speculation(0, 8, 16)));
    world.admit(&ask.clone());
    world.scheduler.cancel(SequenceId(0));
    let mut job = ask.job(0);
    let answer = ask.truth().0;
    answer[..kept].iter().for_each(|&token| job.tokens.push(token));
    world.told.insert(SequenceId(0), Told { tokens: answer[..kept].to_vec(), ..Told::default() });
    world.scheduler.admit_limited(LINK, job, ask.thought.map(Thought::limit), world.now);
    world.run();
    world.told.remove(&SequenceId(0)).expect("it was told").tokens
}

#[test]
fn a_worker_that_takes_over_ends_the_thought_at_the_same_token() {
    let ends = |tokens_max| {
        let ask = Ask { max_tokens: 40, min_tokens: 40, thought: Some(Thought { tokens_max, open: true }), ..long(1) };
        let answer = ask.truth().0;
        let end = answer.iter().position(|&token| token == THOUGHT_END).expect("a thought ends");
        assert!(end <= tokens_max as usize, "{answer:?}");
        for kept in 0..answer.len() {
            assert_eq!(taken_over(&ask, kept), answer, "taken over after {kept} tokens");
        }
        end
    };
    assert_eq!([0, 1, 3].map(ends), [0, 1, 3], "the limit ends it");
    assert!(ends(20) < 20, "the model ends it");
}

#[test]
fn a_limit_with_a_broken_table_fails_its_sequence_alone() {
    let mut world = World::new(64, None);
    let mut limit = Thought { tokens_max: 3, open: true }.limit();
    limit.start = 4;
    world.told.insert(SequenceId(0), Told::default());
    world.scheduler.admit_limited(LINK, long(0).job(0), Some(limit), world.now);
    world.observe();
    assert!(matches!(&world.told[&SequenceId(0)].finish, Some(Finish::Failed { reason }) if reason.contains("limit on its thought")));
}

fn draft() -> impl Strategy<Value = Draft> {
    let step = prop_oneof![Just(Duration::ZERO), Just(Duration::from_millis(1)), Just(Duration::from_millis(30))];
    (prop_oneof![Just(0u64), Just(4), Just(16)], 4u32..40, step).prop_map(|(wrong, blocks, step)| Draft { wrong, blocks, step })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn a_draft_model_changes_no_answer_end_or_block(
        asks in prop::collection::vec(ask(), 1..9),
        proposer in 0..PROPOSERS.len(),
        draft in draft(),
        draft_tokens_max in 1usize..12,
        least in prop::bool::ANY,
        rows_max in 1usize..30,
        late in 0usize..30,
        lateness in prop_oneof![Just(0), any::<u64>()],
    ) {
        let draft_tokens_min = if least { draft_tokens_max.min(3) } else { 0 };
        let speculation = Speculation { draft_tokens_min, ..speculation(proposer, draft_tokens_max, rows_max) };
        let mut world = World::with_draft(BLOCKS, speculation, draft);
        world.lateness = lateness;
        let (first, others) = asks.split_at(asks.len().div_ceil(2));
        first.iter().for_each(|ask| world.admit(ask));
        (0..late).for_each(|_| world.step());
        others.iter().for_each(|ask| world.admit(ask));
        world.run();
        world.check(&asks);
        prop_assert!(world.most_rows <= 1 + draft_tokens_max && world.most_rows <= rows_max.max(1));
    }
}

/// A proposer that never proposes anything.
#[derive(Debug)]
struct Silent;

impl Proposer for Silent {
    fn propose(&mut self, _: &[Token], _: usize, _: &mut Vec<Token>) -> usize {
        0
    }
}

fn by_model() -> Speculation {
    Speculation { proposer: || Box::new(Silent), ..speculation(0, 8, 32) }
}

fn drafted(asks: &[Ask], draft: Draft) -> World {
    let mut world = World::with_draft(64, by_model(), draft);
    asks.iter().for_each(|ask| world.admit(ask));
    world.run();
    world.check(asks);
    world
}

const GOOD: Draft = Draft { wrong: 0, blocks: 64, step: Duration::from_millis(1) };

#[test]
fn a_draft_model_that_knows_the_model_is_right_at_every_place() {
    // The draft model's memory follows the sequence through guesses that were not verified, and from one sequence to the next.
    let asks: Vec<Ask> = (0..3).map(long).collect();
    let world = drafted(&asks, GOOD);
    let counters = world.scheduler.counters();
    let sum = |places: &[u64]| places.iter().sum::<u64>();
    assert!(sum(&counters.tokens_drafted) > 150 && counters.tokens_drafted == counters.tokens_accepted, "{counters:?}");
    let half = drafted(&asks, Draft { wrong: 8, ..GOOD });
    let counters = half.scheduler.counters();
    assert!(sum(&counters.tokens_accepted) > 30, "{counters:?}");
}

/// The time of an answer at a worker that has given one before, relative to the time without a draft model.
fn share_of_time(draft: Draft) -> f64 {
    let second = |mut world: World| {
        world.admit(&long(0));
        world.run();
        let before = world.now;
        world.admit(&long(1));
        world.run();
        world.check(&[long(0), long(1)]);
        (world.now - before).as_secs_f64()
    };
    second(World::with_draft(64, by_model(), draft)) / second(World::new(64, None))
}

#[test]
fn a_draft_model_saves_time_or_takes_next_to_none() {
    let good = share_of_time(GOOD);
    assert!(good < 0.5, "{good}");
    let half = share_of_time(Draft { wrong: 4, ..GOOD });
    assert!(half < 0.9, "{half}");
    // The speed is never below 0.97 of that without a draft model.
    for (wrong, ms) in [(16, 1), (16, 10), (0, 10), (0, 30), (8, 6)] {
        let share = share_of_time(Draft { wrong, step: Duration::from_millis(ms), ..GOOD });
        assert!(share < 1.03, "{wrong} of 16 wrong, {ms} ms a step: {share}");
    }
}

#[test]
fn who_finds_no_place_guesses_nothing_and_who_ends_leaves_its_own() {
    let asks: Vec<Ask> = (0..4).map(|number| long(number % 3)).collect();
    let world = drafted(&asks, Draft { blocks: 9, ..GOOD });
    let drafting = world.told.values().filter(|told| told.drafted > 0).count();
    assert!(drafting >= 1, "one has room");
    assert_eq!(drafted(&asks, Draft { blocks: 1, ..GOOD }).draft_steps, 0, "nobody has");
    // A sequence is cancelled while it drafts.
    let mut world = World::with_draft(64, by_model(), GOOD);
    world.admit(&asks[0]);
    (0..12).for_each(|_| world.step());
    world.scheduler.cancel(SequenceId(0));
    world.scheduler.check_integrity();
    assert!(world.draft_steps > 0);
}

#[test]
fn a_prompt_is_caught_up_once_and_in_parts() {
    let ask = Ask { len: 98, ..long(0) };
    let ask = [Ask { max_tokens: 30, min_tokens: 30, ..ask.clone() }, Ask { max_tokens: 20, min_tokens: 20, ..ask }];
    let mut world = World::with_draft(64, Speculation { draft_tokens_min: 2, ..by_model() }, GOOD);
    world.admit(&ask[0]);
    world.run();
    let alone = world.draft_tokens;
    assert!((98..98 + 80).contains(&alone), "{alone} tokens computed");
    // The same prompt again can use the place that the first one left.
    world.admit(&ask[1]);
    world.run();
    world.check(&ask);
    assert!(world.draft_tokens - alone < 60, "{} tokens computed", world.draft_tokens - alone);
}

#[test]
fn a_rejected_token_that_is_published_is_found() {
    let found = std::panic::catch_unwind(|| {
        let mut world = World::with_draft(64, Speculation { draft_tokens_min: 2, ..by_model() }, Draft { wrong: 8, ..GOOD });
        world.bug = Some(Bug::RejectedTokenPublished);
        world.admit(&long(0));
        world.run();
        world.check(&[long(0)]);
    });
    assert!(found.is_err());
}

fn long(number: u32) -> Ask {
    Ask { prompt: number, len: 20, max_tokens: 100, min_tokens: 100, logprobs: false, scored: false, priority: 0, thought: None }
}

/// The number of steps until these are answered on a device with room for all.
fn steps(asks: &[Ask], speculation: Option<Speculation>) -> (usize, World) {
    let mut world = World::new(64, speculation);
    asks.iter().for_each(|ask| world.admit(ask));
    let steps = world.run();
    world.check(asks);
    (steps, world)
}

#[test]
fn a_proposer_that_is_right_saves_steps_and_one_that_is_wrong_costs_next_to_nothing() {
    let ask = [long(0)];
    let (alone, _) = steps(&ask, None);
    let (right, _) = steps(&ask, Some(speculation(0, 8, 32)));
    assert!(right * 4 < alone, "{right} steps in place of {alone}");
    let (wrong, world) = steps(&ask, Some(speculation(3, 8, 32)));
    let counters = world.scheduler.counters();
    let drafted: u64 = counters.tokens_drafted.iter().sum();
    assert!(wrong == alone && drafted < 80 && counters.tokens_accepted.is_empty(), "{drafted} tokens in vain");
}

#[test]
fn a_step_with_no_rows_to_spare_drafts_nothing() {
    for (rows_max, most) in [(4, 0), (5, 2), (24, 6)] {
        let mut world = World::new(64, Some(speculation(0, 8, rows_max)));
        (0..4).for_each(|number| world.admit(&long(number % 3)));
        // These steps last until all four decode.
        (0..8).for_each(|_| world.step());
        world.most_rows = 0;
        (0..6).for_each(|_| world.step());
        assert!(if most < 3 { world.most_rows == most } else { world.most_rows >= 3 }, "{} of {rows_max} rows", world.most_rows);
    }
}

#[test]
fn drafts_take_no_block_that_another_sequence_needs() {
    for proposer in 0..PROPOSERS.len() {
        let asks: Vec<Ask> = (0..4).map(|number| Ask { max_tokens: 20, min_tokens: 20, ..long(number % 3) }).collect();
        let mut world = World::new(BLOCKS, Some(speculation(proposer, 8, 24)));
        asks.iter().for_each(|ask| world.admit(ask));
        world.run();
        world.check(&asks);
        assert_eq!(world.scheduler.counters().preemptions, 0, "four sequences of three blocks fit");
    }
}
