//! The prefill scheduler under random jobs, matches, fetch results, puts and cancels: every job ends exactly once, having put
//! every block that the pool did not hold, and no device block is lost.

use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};
use tidemill_engine::{
    job::{Action, Delivery, JobId},
    role::Role,
};
use tidemill_kvpool::client::{Arrival, FetchId, Source};
use tidemill_prefill::scheduler::{Limits, Scheduler};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint},
    ids::{LinkId, RequestId},
    message::{PoolNode, PrefillJob, PrefillOutcome, Run, WorkerEvent},
    urgency::Urgency,
};

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
        /// Leading blocks that another node than the home is said to hold.
        elsewhere: u32,
    },
    /// Answer the oldest open question: match, fetched block or put. `well` says how.
    Answer {
        well: bool,
    },
    Step,
    Cancel(usize),
    /// The pool loses its newest block.
    Lose,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1u32..14, 0u8..3, 0u32..8).prop_map(|(blocks, salt, elsewhere)| Event::Admit { blocks, salt, elsewhere }),
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

struct World {
    scheduler: Scheduler,
    now: Duration,
    questions: VecDeque<Question>,
    /// What the home node holds.
    pool: BTreeSet<BlockKey>,
    lost: bool,
    jobs: BTreeMap<RequestId, PrefillJob>,
    live: BTreeSet<RequestId>,
    admitted: u64,
}

impl World {
    fn new() -> Self {
        Self {
            scheduler: Scheduler::new(LAYOUT, DEVICE_BLOCKS, LIMITS),
            now: Duration::ZERO,
            questions: VecDeque::new(),
            pool: BTreeSet::new(),
            lost: false,
            jobs: BTreeMap::new(),
            live: BTreeSet::new(),
            admitted: 0,
        }
    }

    fn apply(&mut self, event: &Event) {
        self.now += Duration::from_millis(1);
        match *event {
            Event::Admit { blocks, salt, elsewhere } => {
                // Request ids come back, while their old jobs' questions may still be open.
                let request = RequestId(self.admitted % 5);
                self.admitted += 1;
                if self.live.contains(&request) {
                    return;
                }
                let tokens = (0..blocks * BLOCK_TOKENS as u32 + 5).map(|i| i % 90).collect();
                let read = vec![Run { node: node(2), blocks: elsewhere }, Run { node: node(1), blocks: 2 }];
                let job = PrefillJob {
                    request,
                    tokens,
                    blocks,
                    salt: vec![salt],
                    read,
                    home: node(1),
                    deadline_ms: 1_000_000,
                    urgency: Urgency::default(),
                };
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
                }
                self.scheduler.stepped(&chunks, Vec::new(), self.now);
            }
            Event::Cancel(which) => {
                let request = RequestId(which as u64 % 5);
                self.scheduler.cancel(request);
                self.live.remove(&request);
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
                // The other node loses a block now and then, too.
                let there = well && (at == node(2) || self.pool.contains(&key));
                self.lost |= !there;
                if next + 1 < keys.len() {
                    self.questions.push_back(Question::Fetch { fetch, keys, next: next + 1 });
                }
                let arrival = there.then_some(Arrival { origin: RequestId(999), source: Source::Dram });
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

    fn observe(&mut self) {
        for action in self.scheduler.residency_mut().take_actions() {
            match action {
                Action::Match { job, keys, .. } => self.questions.push_back(Question::Match { job, keys }),
                Action::Fetch { fetch, parts } => {
                    let keys = parts.into_iter().flat_map(|part| part.keys.into_iter().map(move |key| (part.node, key))).collect();
                    self.questions.push_back(Question::Fetch { fetch, keys, next: 0 });
                }
                Action::CancelFetch { fetch } => {
                    self.questions.retain(|q| !matches!(q, Question::Fetch { fetch: f, .. } if *f == fetch));
                }
                Action::Put { delivery: Delivery::BestEffort, .. } => panic!("prefill wants to know how each put went"),
                Action::Put { delivery: Delivery::Acknowledged(job), blocks, .. } => {
                    let keys = blocks.into_iter().map(|(key, _)| key).collect();
                    self.questions.push_back(Question::Put { job, keys });
                }
                Action::Send { event: WorkerEvent::Prefilled { request, outcome }, .. } => {
                    assert!(self.live.remove(&request), "a job ends once");
                    let PrefillOutcome::Done { cached_tokens, computed_tokens, .. } = outcome else { continue };
                    let job = &self.jobs[&request];
                    assert_eq!(cached_tokens + computed_tokens, job.blocks * BLOCK_TOKENS as u32);
                    let chain = Chain::new(&LAYOUT, &job.salt, &job.tokens);
                    let at_home = chain.keys()[..job.blocks as usize].iter().skip(job.read[0].blocks as usize);
                    let all_there = at_home.into_iter().all(|k| self.pool.contains(k));
                    assert!(self.lost || all_there, "a job is done when all its blocks are in the pool");
                }
                Action::Send { event, .. } => panic!("unexpected {event:?}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_job_ends_once_and_no_block_is_lost(events in prop::collection::vec(event(), 1..120)) {
        let mut world = World::new();
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
}
