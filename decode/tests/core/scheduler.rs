//! The decode scheduler under random jobs, fetch results, preemption, cancels and drains: every sequence ends exactly once,
//! in order, and no block is lost. No clock, no thread: a failing seed replays.

use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};
use tidemill_decode::{limits::Limits, scheduler::Scheduler};
use tidemill_engine::{
    job::{Action, Delivery, JobId},
    order::PASSED_MAX,
    role::{MaskState, Role},
    states::StateRule,
};
use tidemill_kvpool::client::{Arrival, FetchId, Source};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, LayoutFingerprint, Token},
    grammar::{Constraint, Grammar},
    ids::{LinkId, RequestId, SequenceId},
    message::{DecodeJob, Embeds, Finish, PoolNode, Run, WorkerEvent},
    sampling::{Sampling, StopRule, TokenLogprob},
    step::{SegmentResult, Wanted},
    urgency::Urgency,
};

#[path = "../../../engine/tests/support/states.rs"]
mod states;

use states::States;

const LINK: LinkId = LinkId { coordinator: 0, session: 0 };

fn node(port: u16) -> PoolNode {
    PoolNode { addr: ([127, 0, 0, 1], port).into(), near: true }
}

const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);
const VOCAB: usize = 100;
const DEVICE_BLOCKS: u32 = 12;
const LIMITS: Limits = Limits { sequences_max: 4, waiting_max: 6, step_tokens: 20, context_tokens: 150, vocab: VOCAB, reads_whole: false };

#[derive(Clone, Debug)]
enum Event {
    Admit {
        prompt: usize,
        expected: u32,
        max_tokens: u32,
        /// The number of leading blocks that are to be read at a node other than home, and whether there is a home.
        elsewhere: u32,
        home: bool,
        scored: bool,
        embeds: bool,
        urgency: Urgency,
        constrained: bool,
    },
    /// Answers whether the oldest grammar is compiled.
    Constrained {
        good: bool,
    },
    /// Answers the oldest open fetch's next block, with an arrival or a miss.
    Answer {
        there: bool,
    },
    /// Whether each mask of a job is known before a step, or late.
    Masked {
        job: usize,
        mask: MaskState,
    },
    Step,
    Cancel(usize),
    StopWaiting(usize),
    LinkDown,
}

/// The options of a request besides plain tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wish {
    Nothing,
    Scores,
    Embedding,
    Constrained,
}

fn wish() -> impl Strategy<Value = Wish> {
    prop_oneof![5 => Just(Wish::Nothing), 2 => Just(Wish::Scores), 1 => Just(Wish::Embedding), 3 => Just(Wish::Constrained)]
}

fn urgency() -> impl Strategy<Value = Urgency> {
    let due = prop_oneof![Just(None), (0u64..50).prop_map(Some)];
    let tpot = prop_oneof![Just(None), (0.1f32..5.0).prop_map(Some)];
    (due, tpot, 0u8..3, 0u64..3, 1u32..4).prop_map(|(due_ms, tpot_ms, priority, group, weight)| Urgency {
        due_ms,
        tpot_ms,
        priority,
        group,
        weight: weight as f32,
    })
}

fn mask() -> impl Strategy<Value = MaskState> {
    prop_oneof![Just(MaskState::InTime), Just(MaskState::Known), Just(MaskState::Awaited)]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1usize..120, 0u32..10, 1u32..40, 0u32..6, any::<bool>(), wish(), urgency()).prop_map(
            |(prompt, expected, max_tokens, elsewhere, home, wish, urgency)| Event::Admit {
                prompt,
                expected,
                max_tokens,
                elsewhere,
                home,
                scored: wish == Wish::Scores,
                embeds: wish == Wish::Embedding,
                constrained: wish == Wish::Constrained,
                urgency,
            },
        ),
        3 => prop::bool::weighted(0.9).prop_map(|good| Event::Constrained { good }),
        6 => prop::bool::weighted(0.85).prop_map(|there| Event::Answer { there }),
        3 => (0usize..20, mask()).prop_map(|(job, mask)| Event::Masked { job, mask }),
        8 => Just(Event::Step),
        1 => (0usize..20).prop_map(Event::Cancel),
        1 => (0usize..20).prop_map(Event::StopWaiting),
        1 => Just(Event::LinkDown),
    ]
}

/// The world around a scheduler: the knowledge of a shell, a pool and a coordinator.
struct World {
    scheduler: Scheduler,
    now: Duration,
    /// Open fetches with the blocks that are not answered yet.
    fetches: VecDeque<(FetchId, VecDeque<(usize, BlockKey)>)>,
    /// Jobs whose grammars are being compiled.
    constraining: VecDeque<JobId>,
    /// Jobs whose masks are late.
    awaiting: BTreeSet<usize>,
    jobs: Vec<DecodeJob>,
    live: BTreeSet<SequenceId>,
    tokens: BTreeMap<SequenceId, u32>,
    scores: BTreeMap<SequenceId, usize>,
    /// For each sequence without a token yet: the number of prompt tokens present when it came, its own included, and the number of later
    /// prompts' tokens computed since.
    passed: BTreeMap<SequenceId, (usize, usize)>,
    embedded: BTreeSet<SequenceId>,
    /// The tokens of each job, those drawn included.
    all_tokens: Vec<Vec<Token>>,
    states: States,
}

impl World {
    fn new() -> Self {
        Self::with_states(StateRule::default())
    }

    fn with_states(states: StateRule) -> Self {
        Self {
            scheduler: Scheduler::new(LAYOUT, DEVICE_BLOCKS, LIMITS).with_states(states),
            all_tokens: Vec::new(),
            states: States::new(states),
            now: Duration::ZERO,
            fetches: VecDeque::new(),
            constraining: VecDeque::new(),
            awaiting: BTreeSet::new(),
            jobs: Vec::new(),
            live: BTreeSet::new(),
            tokens: BTreeMap::new(),
            scores: BTreeMap::new(),
            passed: BTreeMap::new(),
            embedded: BTreeSet::new(),
        }
    }

    fn apply(&mut self, event: &Event) {
        self.now += Duration::from_millis(1);
        match *event {
            Event::Admit { prompt, expected, max_tokens, elsewhere, home, scored, embeds, urgency, constrained } => {
                let id = SequenceId(self.jobs.len() as u64);
                let job = DecodeJob {
                    request: RequestId(id.0),
                    sequence: id,
                    // Few distinct prompts, so that prefixes are shared.
                    tokens: (0..prompt as u32).map(|i| (i / 7 * 3) % VOCAB as u32).collect(),
                    prompt_tokens: prompt as u32,
                    salt: vec![(id.0 % 2) as u8],
                    read: vec![Run { node: node(2), blocks: elsewhere }],
                    home: home.then(|| node(1)),
                    hot_blocks: elsewhere / 2,
                    expected_blocks: expected,
                    wait_ms: 100,
                    sampling: Sampling::default(),
                    stop: StopRule { max_tokens, min_tokens: 0, stop_tokens: vec![7] },
                    constraint: constrained.then(|| Constraint {
                        grammar: Grammar::Regex("a*".into()),
                        end_tokens: vec![7],
                        ends_late: false,
                    }),
                    urgency,
                    prompt_logprobs: scored.then_some(2),
                    embeds: embeds.then_some(Embeds { second_text: prompt as u32 }),
                };
                self.live.insert(id);
                let others: usize = self.live.iter().filter_map(|live| Some(self.jobs.get(live.0 as usize)?.tokens.len())).sum();
                self.passed.insert(id, (others + prompt, 0));
                self.all_tokens.push(job.tokens.to_vec());
                self.jobs.push(job.clone());
                self.scheduler.admit(LINK, job, self.now);
            }
            Event::Answer { there } => {
                if let Some((fetch, mut open)) = self.fetches.pop_front()
                    && let Some((index, key)) = open.pop_back()
                {
                    self.fetches.push_back((fetch, open));
                    if let Some(block) = self.scheduler.destination(fetch, index).filter(|_| there) {
                        let job = self.scheduler.residency().fetching_job(fetch).expect("it has a destination");
                        let names = self.names(job.0 as usize);
                        self.states.fetched(&names, key, block);
                    }
                    let arrival = there.then_some(Arrival { origin: RequestId(999), source: Source::Dram });
                    self.scheduler.fetched(fetch, index, arrival, self.now);
                }
            }
            Event::Constrained { good } => {
                if let Some(job) = self.constraining.pop_front() {
                    let outcome = if good { Ok(()) } else { Err("no".to_owned()) };
                    // An answer to an earlier job of the same sequence, with different tokens, changes nothing.
                    assert!(!self.scheduler.constrained(job, 3, Ok(())));
                    self.scheduler.constrained(job, 0, outcome);
                    assert!(!self.scheduler.constrained(job, 0, Ok(())), "answered once");
                }
            }
            Event::Masked { job, mask } => {
                self.scheduler.masked(JobId(job as u64), mask);
                if mask == MaskState::Awaited && self.live.contains(&SequenceId(job as u64)) {
                    self.awaiting.insert(job);
                } else {
                    self.awaiting.remove(&job);
                }
            }
            Event::Step => self.step(),
            Event::Cancel(which) => {
                let id = SequenceId(which as u64);
                self.scheduler.cancel(id);
                self.live.remove(&id);
            }
            Event::StopWaiting(which) => self.scheduler.stop_waiting(SequenceId(which as u64)),
            Event::LinkDown => {
                self.scheduler.link_down(LINK);
                self.live.clear();
            }
        }
        self.observe();
        self.scheduler.check_integrity();
    }

    fn step(&mut self) {
        let chunks = self.scheduler.plan(self.now);
        self.observe();
        let total: usize = chunks.iter().map(|chunk| chunk.len).sum();
        assert!(total <= LIMITS.step_tokens, "a step of {total} tokens");
        for chunk in chunks.iter().filter(|chunk| chunk.start < self.jobs[chunk.job.0 as usize].prompt_tokens as usize) {
            let older = self.passed.range_mut(..SequenceId(chunk.job.0));
            older.for_each(|(_, (_, later))| *later += chunk.len);
        }
        let results: Vec<SegmentResult> = chunks
            .iter()
            .map(|chunk| {
                let segment = self.scheduler.segment(chunk);
                assert_eq!((segment.start, segment.tokens.len()), (chunk.start, chunk.len));
                assert!(segment.blocks.len() * BLOCK_TOKENS >= chunk.start + chunk.len, "the block table covers the chunk");
                self.states.read(segment.state, &self.all_tokens[chunk.job.0 as usize][..chunk.start]);
                let (scores, draws) = match segment.wanted {
                    Wanted::Nothing | Wanted::Embedding { .. } => (vec![], false),
                    Wanted::Token(_) | Wanted::Verified(_) => (vec![], true),
                    Wanted::Scores { targets, token, .. } => {
                        (targets.iter().map(|_| TokenLogprob { logprob: -1.0, top: vec![] }).collect(), token.is_some())
                    }
                };
                assert!(!self.constraining.contains(&chunk.job), "nothing is computed before its grammar is there");
                assert!(!self.awaiting.contains(&(chunk.job.0 as usize)), "nothing is computed for a mask that is late");
                let draw = match segment.wanted {
                    Wanted::Token(draw) | Wanted::Scores { token: Some(draw), .. } => Some(draw),
                    _ => None,
                };
                let is_constrained = draw.is_some_and(|draw| draw.allowed.is_some());
                let must_be = self.jobs[chunk.job.0 as usize].constraint.is_some();
                assert_eq!(is_constrained, draws && must_be, "no token of a constrained job is drawn without its grammar");
                let fault = (is_constrained && chunk.start % 17 == 3).then(|| "dead end".to_owned());
                // A state cannot be computed again, so there no row is late.
                let is_late =
                    is_constrained && fault.is_none() && self.states.rule.blocks == 0 && self.scheduler.counters().steps.is_multiple_of(3);
                let drawn =
                    (draws && fault.is_none() && !is_late).then(|| ((chunk.start as u32 * 31) % VOCAB as u32, None)).into_iter().collect();
                let embedding = matches!(segment.wanted, Wanted::Embedding { .. }).then(|| vec![chunk.start as f32]);
                SegmentResult { scores, drawn, fault, is_late, embedding }
            })
            .collect();
        for chunk in &chunks {
            let segment = self.scheduler.segment(chunk);
            let end = chunk.start + chunk.len;
            let written = &segment.blocks[chunk.start / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS)];
            self.states.write(segment.state, written, &self.all_tokens[chunk.job.0 as usize][..end]);
        }
        for (chunk, result) in chunks.iter().zip(&results) {
            self.all_tokens[chunk.job.0 as usize].extend(result.drawn.iter().map(|(token, _)| *token));
        }
        self.scheduler.stepped(&chunks, results, self.now);
    }

    /// The expected contents of the blocks of a job's states, by key.
    fn names(&self, job: usize) -> BTreeMap<BlockKey, (u64, usize)> {
        self.states.names(&LAYOUT, &self.jobs[job].salt, &self.all_tokens[job])
    }

    fn observe(&mut self) {
        for action in self.scheduler.residency_mut().take_actions() {
            match action {
                Action::Fetch { fetch, parts } => {
                    let keys = parts.iter().flat_map(|part| part.keys.iter().copied()).enumerate().collect();
                    assert!(parts.iter().all(|part| part.node == node(1) || part.wait.is_zero()), "waits are for home");
                    self.fetches.push_back((fetch, keys));
                }
                Action::CancelFetch { fetch } => self.fetches.retain(|(f, _)| *f != fetch),
                Action::Put { node: at, delivery, lineage, blocks } => {
                    // A block that came from elsewhere keeps its origin, which is no job here.
                    if let Some(job) = self.jobs.get(lineage.origin.0 as usize) {
                        let names = self.names(job.sequence.0 as usize);
                        blocks.iter().for_each(|(key, block)| self.states.put(&names, *key, *block));
                    }
                    assert_eq!(at, node(1), "blocks are published at home");
                    assert_eq!(delivery, Delivery::BestEffort);
                }
                Action::Constrain { job, generated, .. } => {
                    assert!(generated.is_empty() && self.jobs[job.0 as usize].constraint.is_some());
                    self.constraining.push_back(job);
                }
                Action::Match { .. } => panic!("a decode job says what is where"),
                Action::Send { event: WorkerEvent::Tokens(tokens), .. } => {
                    for token in tokens {
                        assert!(self.live.contains(&token.sequence), "a token of a sequence that ended");
                        let next = self.tokens.entry(token.sequence).or_default();
                        assert_eq!(token.index, *next, "tokens come in order, none twice");
                        *next += 1;
                    }
                }
                Action::Send { event: WorkerEvent::PromptLogprobs { sequence, logprobs }, .. } => {
                    self.scores.insert(sequence, logprobs.len());
                }
                Action::Send { event: WorkerEvent::Embedding { sequence, .. }, .. } => {
                    assert!(
                        self.jobs[sequence.0 as usize].embeds.is_some() && self.embedded.insert(sequence),
                        "an embedding that was asked for, once"
                    );
                }
                Action::Send { event: WorkerEvent::Sources { sequence, tokens }, .. } => {
                    assert_eq!(
                        tokens.total(),
                        u64::from(self.jobs[sequence.0 as usize].prompt_tokens),
                        "every prompt token comes from somewhere"
                    );
                    assert!(!self.tokens.contains_key(&sequence), "before the first token");
                }
                Action::Send { event: WorkerEvent::Finished { sequence, reason, provenance }, .. } => {
                    assert!(self.live.remove(&sequence), "a sequence ends once");
                    let job = &self.jobs[sequence.0 as usize];
                    let tokens = self.tokens.get(&sequence).copied().unwrap_or(0);
                    match reason {
                        Finish::Stop { token } => assert_eq!(token, 7),
                        Finish::Length if job.embeds.is_some() => assert!(self.embedded.contains(&sequence) && tokens == 0),
                        Finish::Length => {
                            let total = (job.prompt_tokens + tokens) as usize;
                            let longest = LIMITS.context_tokens.min(self.scheduler.residency().device_blocks() * BLOCK_TOKENS);
                            assert!(tokens == job.stop.max_tokens || total == longest, "{total} tokens");
                        }
                        Finish::Failed { .. } | Finish::Returned => continue,
                    }
                    assert_eq!(provenance.tokens.total(), u64::from(job.prompt_tokens), "every prompt token came from somewhere");
                    if job.prompt_logprobs.is_some() {
                        assert_eq!(self.scores.get(&sequence), Some(&(job.prompt_tokens as usize)), "every prompt token was scored");
                    }
                }
                Action::Send { event, .. } => panic!("unexpected {event:?}"),
            }
        }
    }

    /// Runs to the end: all requests are answered, and steps continue.
    fn drain(&mut self) {
        for _ in 0..10_000 {
            if self.live.is_empty() {
                break;
            }
            self.apply(&Event::Answer { there: true });
            self.apply(&Event::Constrained { good: true });
            for job in self.awaiting.clone() {
                self.apply(&Event::Masked { job, mask: MaskState::Known });
            }
            self.apply(&Event::Step);
        }
        assert!(self.live.is_empty(), "sequences that never end: {:?}", self.live);
        let blocks = self.scheduler.residency().blocks(1);
        assert_eq!(blocks.used, 0, "blocks leak");
        assert_eq!(blocks.free + blocks.cached, u64::from(DEVICE_BLOCKS));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_ends_once_and_no_block_is_lost(
        events in prop::collection::vec(event(), 1..120),
        states in prop_oneof![Just(StateRule::default()), (1usize..3, 1usize..5).prop_map(|(blocks, every)| StateRule { blocks, every })],
    ) {
        let mut world = World::with_states(states);
        for event in &events {
            world.apply(event);
        }
        world.drain();
    }

    #[test]
    fn draining_returns_everything(events in prop::collection::vec(event(), 1..60)) {
        let mut world = World::new();
        for event in &events {
            world.apply(event);
        }
        world.scheduler.hand_back("end");
        world.observe();
        prop_assert!(world.live.is_empty());
        prop_assert_eq!(world.scheduler.residency().blocks(1).used, 0);
    }

    /// Runs one sequence without a limit among an endless stream of urgent ones.
    #[test]
    fn no_sequence_starves_whatever_comes_after_it(
        prompt in 1usize..120,
        others in prop::collection::vec((1usize..120, 1u32..10, urgency()), 1..30),
    ) {
        let mut world = World::new();
        let admit = |prompt, max_tokens, urgency| {
            Event::Admit { prompt, expected: 0, max_tokens, elsewhere: 0, home: false, scored: true, embeds: false, urgency, constrained: false }
        };
        world.apply(&admit(prompt, 1, Urgency::default()));
        let first = SequenceId(0);
        for (prompt, max_tokens, urgency) in others.iter().cycle().take(10_000) {
            if world.tokens.contains_key(&first) {
                let (before, later) = world.passed[&first];
                let bound = 8 * (before + 2 * LIMITS.context_tokens) + PASSED_MAX as usize * LIMITS.context_tokens;
                prop_assert!(later <= bound, "{later} tokens passed a sequence with {before} before it");
                return Ok(());
            }
            while world.live.len() < 8 {
                world.apply(&admit(*prompt, *max_tokens, Urgency { priority: urgency.priority + 1, ..*urgency }));
            }
            world.apply(&Event::Step);
        }
        prop_assert!(false, "it never gets a token");
    }
}
