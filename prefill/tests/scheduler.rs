//! The prefill scheduler under random jobs, matches, fetch results, puts and cancels: every job ends exactly once, having put
//! every block that the pool did not hold, and no device block is lost.

use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};
use tidemill_engine::{
    job::{Action, Delivery, JobId},
    order::PASSED_MAX,
    role::Role,
    states::StateRule,
};
use tidemill_kvpool::client::{Arrival, FetchId, Source};
use tidemill_prefill::scheduler::{Limits, Scheduler};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint},
    ids::{LinkId, RequestId},
    message::{PoolNode, PrefillJob, PrefillOutcome, Run, WorkerEvent},
    urgency::Urgency,
};

#[path = "../../engine/tests/support/states.rs"]
mod states;

use states::States;

const LINK: LinkId = LinkId { coordinator: 0, session: 0 };

fn node(port: u16) -> PoolNode {
    PoolNode { addr: ([127, 0, 0, 1], port).into(), near: true }
}

const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);
const DEVICE_BLOCKS: u32 = 12;
const LIMITS: Limits = Limits { admitted_max: 3, jobs_max: 8, step_tokens: 40, putting_max: 20, vocab: 100 };

#[derive(Clone, Debug)]
enum Event {
    Admit {
        blocks: u32,
        salt: u8,
        /// The number of leading blocks that a node other than home is said to hold.
        elsewhere: u32,
        urgency: Urgency,
    },
    /// Answers the oldest open question: a match, a fetched block or a put. `well`: whether it succeeds.
    Answer {
        well: bool,
    },
    Step,
    Cancel(usize),
    /// The pool loses its newest block.
    Lose,
}

fn urgency() -> impl Strategy<Value = Urgency> {
    let due = prop_oneof![Just(None), (0u64..50).prop_map(Some)];
    (due, 0u8..3, 0u64..3, 1u32..4).prop_map(|(due_ms, priority, group, weight)| Urgency {
        due_ms,
        tpot_ms: None,
        priority,
        group,
        weight: weight as f32,
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1u32..14, 0u8..3, 0u32..8, urgency())
            .prop_map(|(blocks, salt, elsewhere, urgency)| Event::Admit { blocks, salt, elsewhere, urgency }),
        8 => prop::bool::weighted(0.9).prop_map(|well| Event::Answer { well }),
        5 => Just(Event::Step),
        1 => (0usize..20).prop_map(Event::Cancel),
        1 => Just(Event::Lose),
    ]
}

#[derive(Debug)]
enum Question {
    Match { job: JobId, keys: Vec<BlockKey> },
    Fetch { fetch: FetchId, keys: Vec<(PoolNode, BlockKey)>, next: usize },
    Put { job: JobId, keys: Vec<BlockKey> },
}

/// The first tokens of every job.
fn tokens_of(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i % 90).collect()
}

struct World {
    scheduler: Scheduler,
    now: Duration,
    questions: VecDeque<Question>,
    /// The blocks that the home node holds.
    pool: BTreeSet<BlockKey>,
    lost: bool,
    jobs: BTreeMap<RequestId, PrefillJob>,
    live: BTreeSet<RequestId>,
    admitted: u64,
    passed: BTreeMap<RequestId, Passed>,
    /// Whether all questions are answered at once.
    prompt: bool,
    states: States,
}

/// The work on other jobs that was done before a job's own.
struct Passed {
    job: JobId,
    /// The number of jobs that were present when it came.
    older: usize,
    /// The number of tokens of the jobs that were present when it came, and of its own.
    before: usize,
    /// The number of tokens computed since then for jobs that came later.
    later: usize,
}

impl World {
    fn new() -> Self {
        Self::with_states(StateRule::default())
    }

    fn with_states(states: StateRule) -> Self {
        Self {
            scheduler: Scheduler::new(LAYOUT, DEVICE_BLOCKS, LIMITS).with_states(states),
            states: States::new(states),
            now: Duration::ZERO,
            questions: VecDeque::new(),
            pool: BTreeSet::new(),
            lost: false,
            jobs: BTreeMap::new(),
            live: BTreeSet::new(),
            admitted: 0,
            passed: BTreeMap::new(),
            prompt: false,
        }
    }

    fn apply(&mut self, event: &Event) {
        self.now += Duration::from_millis(1);
        match *event {
            Event::Admit { blocks, salt, elsewhere, urgency } => {
                // Request ids are reused, while their old jobs' questions may still be open.
                let request = RequestId(self.admitted % 5);
                self.admitted += 1;
                if self.live.contains(&request) {
                    return;
                }
                let tokens = tokens_of(blocks as usize * BLOCK_TOKENS + 5).into();
                let read = vec![Run { node: node(2), blocks: elsewhere }, Run { node: node(1), blocks: 2 }];
                let job = PrefillJob { request, tokens, blocks, salt: vec![salt], read, home: node(1), deadline_ms: 1_000_000, urgency };
                self.live.insert(request);
                self.jobs.insert(request, job.clone());
                self.scheduler.admit(LINK, job, self.now);
            }
            Event::Answer { well } => self.answer(well),
            Event::Step => {
                let chunks = self.scheduler.plan(self.now);
                self.observe();
                assert!(chunks.iter().map(|chunk| chunk.len).sum::<usize>() <= LIMITS.step_tokens);
                for chunk in &chunks {
                    assert!(chunk.len > 0, "a chunk has something to compute");
                    let segment = self.scheduler.segment(chunk);
                    assert_eq!((segment.start, segment.tokens.len()), (chunk.start, chunk.len));
                    assert!(segment.blocks.len() * BLOCK_TOKENS >= chunk.start + chunk.len, "the block table covers the chunk");
                    self.states.read(segment.state, &tokens_of(chunk.start));
                }
                for chunk in &chunks {
                    let segment = self.scheduler.segment(chunk);
                    let written = &segment.blocks[chunk.start / BLOCK_TOKENS..(chunk.start + chunk.len).div_ceil(BLOCK_TOKENS)];
                    self.states.write(segment.state, written, &tokens_of(chunk.start + chunk.len));
                }
                for chunk in &chunks {
                    self.passed.values_mut().filter(|passed| passed.job < chunk.job).for_each(|passed| passed.later += chunk.len);
                }
                self.scheduler.stepped(&chunks, Vec::new(), self.now);
            }
            Event::Cancel(which) => {
                let request = RequestId(which as u64 % 5);
                self.scheduler.cancel(request);
                self.live.remove(&request);
                self.passed.remove(&request);
            }
            Event::Lose => {
                self.pool.pop_last();
                self.lost = true;
            }
        }
        self.observe();
        self.scheduler.check_integrity();
    }

    fn answer(&mut self, well: bool) {
        match self.questions.pop_front() {
            None => {}
            Some(Question::Match { job, keys }) => {
                let held = keys.iter().take_while(|k| self.pool.contains(k)).count();
                self.scheduler.matched(job, if well { Ok(held) } else { Err("out of reach".into()) });
            }
            Some(Question::Fetch { fetch, keys, next }) => {
                let (at, key) = keys[next];
                // The other node also loses a block now and then.
                let there = well && (at == node(2) || self.pool.contains(&key));
                self.lost |= !there;
                if next + 1 < keys.len() {
                    self.questions.push_back(Question::Fetch { fetch, keys, next: next + 1 });
                }
                let arrival = there.then_some(Arrival { origin: RequestId(999), source: Source::Dram });
                if let Some(block) = self.scheduler.destination(fetch, next).filter(|_| there) {
                    let names = self.names();
                    self.states.fetched(&names, key, block);
                }
                self.scheduler.fetched(fetch, next, arrival, self.now);
            }
            Some(Question::Put { job, keys }) => {
                let blocks = keys.len();
                if well {
                    self.pool.extend(keys);
                }
                self.scheduler.put_done(job, blocks, if well { Ok(()) } else { Err("full".into()) }, self.now);
            }
        }
    }

    /// The expected contents of the blocks of all jobs' states.
    fn names(&self) -> BTreeMap<BlockKey, (u64, usize)> {
        let names = |job: &PrefillJob| self.states.names(&LAYOUT, &job.salt, &job.tokens);
        self.jobs.values().flat_map(names).collect()
    }

    /// Answers everything, so that only the order decides which jobs wait.
    fn answer_all(&mut self) {
        while !self.questions.is_empty() {
            self.apply(&Event::Answer { well: true });
        }
    }

    /// Checks the bounds that hold if all answers come at once, regardless of arrivals: the oldest job gets a ninth of all tokens, and is
    /// passed over a limited number of times when room is given out; then the next one is the oldest.
    fn check_passed(&self, passed: &Passed) {
        let longest = DEVICE_BLOCKS as usize * BLOCK_TOKENS;
        let bound = 8 * (passed.before + 2 * longest) + (passed.older + 1) * PASSED_MAX as usize * longest;
        assert!(
            !self.prompt || passed.later <= bound,
            "{} tokens passed job {:?} with {} older ones and {} tokens before it",
            passed.later,
            passed.job,
            passed.older,
            passed.before
        );
    }

    fn observe(&mut self) {
        for action in self.scheduler.residency_mut().take_actions() {
            match action {
                Action::Constrain { .. } => panic!("prefill draws nothing"),
                Action::Match { job, keys, .. } => {
                    let before = self.live.iter().map(|request| self.jobs[request].blocks as usize * BLOCK_TOKENS).sum();
                    let request = *self.live.iter().find(|request| !self.passed.contains_key(request)).expect("the newest one");
                    self.passed.insert(request, Passed { job, older: self.passed.len(), before, later: 0 });
                    self.questions.push_back(Question::Match { job, keys });
                }
                Action::Fetch { fetch, parts } => {
                    let keys = parts.into_iter().flat_map(|part| part.keys.into_iter().map(move |key| (part.node, key))).collect();
                    self.questions.push_back(Question::Fetch { fetch, keys, next: 0 });
                }
                Action::CancelFetch { fetch } => {
                    self.questions.retain(|q| !matches!(q, Question::Fetch { fetch: f, .. } if *f == fetch));
                }
                Action::Put { delivery: Delivery::BestEffort, .. } => panic!("prefill wants to know how each put went"),
                Action::Put { delivery: Delivery::Acknowledged(job), blocks, .. } => {
                    let names = self.names();
                    blocks.iter().for_each(|(key, block)| self.states.put(&names, *key, *block));
                    let keys = blocks.into_iter().map(|(key, _)| key).collect();
                    self.questions.push_back(Question::Put { job, keys });
                }
                Action::Send { event: WorkerEvent::Prefilled { request, outcome }, .. } => {
                    assert!(self.live.remove(&request), "a job ends once");
                    let passed = self.passed.remove(&request);
                    let PrefillOutcome::Done { cached_tokens, computed_tokens, .. } = outcome else { continue };
                    let job = &self.jobs[&request];
                    assert_eq!(cached_tokens + computed_tokens, job.blocks * BLOCK_TOKENS as u32);
                    let chain = Chain::new(&LAYOUT, &job.salt, &job.tokens);
                    let at_home = chain.keys()[..job.blocks as usize].iter().skip(job.read[0].blocks as usize);
                    let last = at_home.clone().last();
                    let state = last.into_iter().flat_map(|key| key.state_parts(self.states.rule.blocks));
                    let all_there = at_home.copied().chain(state).all(|k| self.pool.contains(&k));
                    assert!(self.lost || all_there, "a job is done when all its blocks, and its last state, are in the pool");
                    self.check_passed(&passed.expect("it was admitted"));
                }
                Action::Send { event, .. } => panic!("unexpected {event:?}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_job_ends_once_and_no_block_is_lost(
        events in prop::collection::vec(event(), 1..120),
        states in prop_oneof![Just(StateRule::default()), (1usize..4, 1usize..5).prop_map(|(blocks, every)| StateRule { blocks, every })],
    ) {
        let mut world = World::with_states(states);
        for event in &events {
            world.apply(event);
        }
        for _ in 0..10_000 {
            if world.live.is_empty() {
                break;
            }
            world.apply(&Event::Answer { well: true });
            world.apply(&Event::Step);
        }
        prop_assert!(world.live.is_empty(), "jobs that never end: {:?}", world.live);
        prop_assert_eq!(world.scheduler.residency().blocks(1).used, 0, "blocks leak");
    }

    /// Runs one job without a limit among an endless stream of urgent ones.
    #[test]
    fn no_job_starves_whatever_comes_after_it(
        blocks in 1u32..12,
        others in prop::collection::vec((1u32..12, 3u8..8, urgency()), 1..30),
    ) {
        let mut world = World { prompt: true, ..World::new() };
        let urgency = Urgency::default();
        world.apply(&Event::Admit { blocks, salt: 0, elsewhere: 0, urgency });
        let first = world.jobs[&RequestId(0)].request;
        for (i, (blocks, salt, urgency)) in others.iter().cycle().take(10_000).enumerate() {
            if !world.live.contains(&first) {
                return Ok(());
            }
            // Each prompt is a new one, no part of which is cached.
            let (salt, urgency) = (salt.wrapping_mul(i as u8 | 1).max(1), Urgency { priority: urgency.priority + 1, ..*urgency });
            while world.live.len() < 5 {
                world.apply(&Event::Admit { blocks: *blocks, salt, elsewhere: 0, urgency });
            }
            world.pool.clear();
            world.lost = true;
            world.answer_all();
            world.apply(&Event::Step);
            world.answer_all();
        }
        prop_assert!(false, "it never ends");
    }
}
