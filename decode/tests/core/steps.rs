//! The sequences in a decode worker's steps, and the amount of prompt computed beside the decoding ones, in virtual time.

use std::time::Duration;
use tidemill_decode::{limits::Limits, scheduler::Scheduler};
use tidemill_engine::{job::Action, role::Role};
use tidemill_proto::{
    block::LayoutFingerprint,
    ids::{LinkId, RequestId, SequenceId},
    message::{DecodeJob, Embeds, Finish, WorkerEvent},
    sampling::{Sampling, StopRule},
    step::{SegmentResult, Wanted},
    urgency::Urgency,
};

const LINK: LinkId = LinkId { coordinator: 0, session: 0 };
const LIMITS: Limits = Limits { sequences_max: 8, waiting_max: 8, step_tokens: 512, context_tokens: 4096, vocab: 100, reads_whole: false };

/// A machine whose steps take 10 ms for decoding, and a millisecond for each token of a prompt.
struct Machine {
    scheduler: Scheduler,
    now: Duration,
    sequences: u64,
}

impl Machine {
    fn new() -> Self {
        Self::with(LIMITS)
    }

    fn with(limits: Limits) -> Self {
        Self { scheduler: Scheduler::new(LayoutFingerprint([1; 16]), 1024, limits), now: Duration::ZERO, sequences: 0 }
    }

    fn admit(&mut self, prompt: usize, urgency: Urgency) {
        self.admit_as(prompt, urgency, None);
    }

    fn admit_as(&mut self, prompt: usize, urgency: Urgency, embeds: Option<Embeds>) {
        let id = self.sequences;
        self.sequences += 1;
        let job = DecodeJob {
            request: RequestId(id),
            sequence: SequenceId(id),
            tokens: (0..prompt as u32).map(|i| (i + id as u32 * 31) % 90).collect(),
            prompt_tokens: prompt as u32,
            salt: vec![id as u8],
            read: Vec::new(),
            home: None,
            hot_blocks: 0,
            expected_blocks: 0,
            wait_ms: 0,
            sampling: Sampling::default(),
            stop: StopRule { max_tokens: 1000, ..StopRule::default() },
            constraint: None,
            urgency,
            prompt_logprobs: None,
            embeds,
        };
        self.scheduler.admit(LINK, job, self.now);
    }

    /// The number of tokens of each sequence in the next step, by its number.
    fn step(&mut self) -> Vec<(u64, usize)> {
        let chunks = self.scheduler.plan(self.now);
        let drawn = |chunk| match self.scheduler.segment(chunk).wanted {
            Wanted::Token(_) => SegmentResult { drawn: vec![(1, None)], ..SegmentResult::default() },
            _ => SegmentResult::default(),
        };
        let results = chunks.iter().map(drawn).collect();
        let rows = chunks.iter().filter(|chunk| chunk.len == 1).count();
        let prompts: usize = chunks.iter().map(|chunk| chunk.len).filter(|len| *len > 1).sum();
        self.now += Duration::from_millis(if rows > 0 { 10 } else { 0 } + prompts as u64);
        self.scheduler.stepped(&chunks, results, self.now);
        self.scheduler.residency_mut().take_actions();
        self.scheduler.check_integrity();
        chunks.iter().map(|chunk| (chunk.job.0, chunk.len)).collect()
    }
}

/// Checks, for decoding sequences with these limits in ms (`-`: none), the tokens of a long prompt in each of the steps after it came.
fn check(limits: &str, expected: &str) {
    let mut machine = Machine::new();
    let limits: Vec<&str> = limits.split_whitespace().collect();
    for limit in &limits {
        machine.admit(40, Urgency { tpot_ms: limit.parse().ok(), ..Urgency::default() });
    }
    for _ in 0..50 {
        machine.step();
    }
    machine.admit(3000, Urgency::default());
    let prompt = limits.len() as u64;
    let steps = (0..10).map(|_| machine.step().into_iter().find(|(job, _)| *job == prompt).map_or(0, |(_, tokens)| tokens).to_string());
    assert_eq!(steps.collect::<Vec<_>>().join(" "), expected, "limits {limits:?}");
}

#[test]
fn the_tightest_limit_of_those_that_decode_sizes_a_prompts_chunk() {
    check("-", "192 192 192 192 192 192 192 192 192 192");
    check("- 100", "80 80 80 80 80 80 80 80 80 80");
    check("100 50", "32 32 32 32 32 32 32 32 32 32");
    // Ten milliseconds of 14.4 go to decoding: a block's time is saved over four steps.
    check("16", "0 0 0 16 0 0 0 16 0 0");
    // There is no time to save, and the prompt continues nevertheless.
    check("10", "0 0 0 0 0 0 0 0 16 0");
}

#[test]
fn a_short_prompt_passes_a_long_one_and_does_not_wait_for_its_tokens() {
    let mut machine = Machine::new();
    machine.admit(40, Urgency::default());
    for _ in 0..50 {
        machine.step();
    }
    machine.admit(3000, Urgency::default());
    machine.step();
    machine.admit(64, Urgency::default());
    assert_eq!(machine.step(), [(0, 1), (2, 64)]);
    assert_eq!(machine.step(), [(0, 1), (2, 1), (1, 192)]);
}

/// Priority 1 with a limit that is never reached.
fn important() -> Urgency {
    Urgency { priority: 1, ..Urgency::default() }
}

#[test]
fn a_higher_priority_takes_a_place_at_once_and_an_equal_one_waits() {
    let mut machine = Machine::new();
    (0..8).for_each(|_| machine.admit(40, Urgency::default()));
    while machine.step().iter().any(|(_, len)| *len > 1) {}
    machine.admit(40, Urgency::default());
    let numbers = |step: Vec<(u64, usize)>| step.into_iter().map(|(number, _)| number).collect::<Vec<_>>();
    assert_eq!(numbers(machine.step()), [0, 1, 2, 3, 4, 5, 6, 7], "all places are taken");
    machine.admit(40, important());
    assert_eq!(numbers(machine.step()), [0, 1, 2, 3, 4, 5, 6, 9], "the youngest gave up its place");
    machine.scheduler.cancel(SequenceId(9));
    assert_eq!(numbers(machine.step()), [0, 1, 2, 3, 4, 5, 6, 7], "and goes on before one that has not begun");
}

#[test]
fn blocks_are_given_up_only_if_that_is_enough() {
    let mut machine = Machine { scheduler: Scheduler::new(LayoutFingerprint([1; 16]), 16, LIMITS), now: Duration::ZERO, sequences: 0 };
    machine.admit(100, important());
    machine.admit(60, Urgency::default());
    machine.step();
    machine.admit(160, important());
    assert!(machine.step().iter().any(|(number, _)| *number == 1), "what the low one holds would not do, so it keeps it");
    machine.admit(70, important());
    let step = machine.step();
    assert!(step.iter().any(|(number, _)| *number == 3) && step.iter().all(|(number, _)| *number != 1), "{step:?}");
}

#[test]
fn a_full_worker_returns_the_lowest_that_waits() {
    let mut machine = Machine::new();
    (0..16).for_each(|_| machine.admit(40, Urgency::default()));
    let mut returned = |urgency| {
        machine.admit(40, urgency);
        let actions = machine.scheduler.residency_mut().take_actions();
        actions
            .into_iter()
            .filter_map(|action| match action {
                Action::Send { event: WorkerEvent::Finished { sequence, reason: Finish::Returned, .. }, .. } => Some(sequence.0),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(returned(Urgency::default()), [16], "no room for one more of the same");
    assert_eq!(returned(important()), [15], "the youngest makes room for a higher one");
}

/// The reasons of the refusals that a scheduler sends to its coordinator.
fn refusals(scheduler: &mut Scheduler) -> Vec<String> {
    let reason = |action| match action {
        Action::Send { event: WorkerEvent::Finished { reason: Finish::Failed { reason }, .. }, .. } => Some(reason),
        _ => None,
    };
    scheduler.residency_mut().take_actions().into_iter().filter_map(reason).collect()
}

#[test]
fn an_encoder_reads_each_text_in_one_step_and_keeps_nothing_of_it() {
    let mut machine = Machine::with(Limits { reads_whole: true, ..LIMITS });
    let one = |tokens: u32| Some(Embeds { second_text: tokens });
    for tokens in [300, 300, 100, 512, 1] {
        machine.admit_as(tokens as usize, Urgency::default(), one(tokens));
    }
    let mut seen = Vec::new();
    for _ in 0..20 {
        let chunks = machine.scheduler.plan(machine.now);
        assert!(chunks.iter().all(|chunk| chunk.start == 0), "texts are not cut: {chunks:?}");
        assert!(chunks.iter().map(|chunk| chunk.len).sum::<usize>() <= LIMITS.step_tokens);
        let embedded = |_| SegmentResult { embedding: Some(vec![1.0]), ..SegmentResult::default() };
        let results = chunks.iter().map(embedded).collect();
        machine.now += Duration::from_millis(100);
        machine.scheduler.stepped(&chunks, results, machine.now);
        for action in machine.scheduler.residency_mut().take_actions() {
            assert!(matches!(action, Action::Send { .. }), "nothing is fetched or put: {action:?}");
        }
        machine.scheduler.check_integrity();
        seen.extend(chunks.into_iter().map(|chunk| (chunk.job.0, chunk.len)));
    }
    seen.sort_unstable();
    assert_eq!(seen, [(0, 300), (1, 300), (2, 100), (3, 512), (4, 1)]);
    assert_eq!(machine.scheduler.residency().blocks(1).cached, 0);
    machine.admit(40, Urgency::default());
    machine.admit_as(513, Urgency::default(), one(513));
    machine.admit_as(40, Urgency::default(), one(41));
    let refused = refusals(&mut machine.scheduler);
    for (reason, expected) in refused.iter().zip(["is an encoder", "513 tokens are more than the 512", "begins at 41"]) {
        assert!(reason.contains(expected), "{reason}");
    }
    assert_eq!(refused.len(), 3);
}
