//! A prefill or decode worker: the production scheduler, driven as its engine's thread drives it, on a modelled device.
//!
//! ```text
//!   inbox ──► [ scheduler ──plan──► device: busy until the step's end ──stepped──► scheduler ] ──► coordinator, pool client
//! ```

use super::{Event, PoolIndex, WorkerIndex, client::PoolClient, io::Io};
use crate::{
    hardware::{Device, Work},
    outcome, workload,
};
use std::{collections::VecDeque, time::Duration};
use tidemill_engine::{
    announcing::Announcer,
    job::{Action, Delivery, JobId, ScheduledChunk},
    role::{Load, Role},
};
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::{
    ids::{Epoch, LinkId},
    message::{Blocks, Report, ToWorker},
    pool::{CallId, Found, FromPool},
    step::{SegmentResult, Wanted},
};

/// What arrives at an engine.
#[derive(Debug)]
pub(crate) enum Input {
    Message(Box<ToWorker>),
    Matched { job: JobId, held: Result<usize, String> },
    Fetched { fetch: FetchId, index: usize, arrival: Option<Arrival> },
    PutDone { job: JobId, blocks: usize, outcome: Result<(), String> },
}

/// A scheduler whose books tests can check.
pub(crate) trait Checked {
    fn check(&self);
}

impl Checked for tidemill_prefill::scheduler::Scheduler {
    fn check(&self) {
        self.check_integrity();
    }
}

impl Checked for tidemill_decode::scheduler::Scheduler {
    fn check(&self) {
        self.check_integrity();
    }
}

/// A worker of either role.
pub(crate) trait Worker {
    fn epoch(&self) -> Epoch;
    fn receive(&mut self, io: &mut Io, message: Box<ToWorker>);
    fn pool_answered(&mut self, io: &mut Io, pool: PoolIndex, message: FromPool);
    /// Blocks of a get are here.
    fn received(&mut self, io: &mut Io, from: PoolIndex, call: CallId, blocks: &[Found], valid: &[bool], started: Duration);
    /// The step that the device computed is done.
    fn stepped(&mut self, io: &mut Io);
    /// Its report since the last one.
    fn report(&mut self) -> Report;
    fn load(&self) -> WorkerLoad;
    fn check(&self);
    /// Whether it has nothing to do and holds nothing for anybody.
    fn is_idle(&self) -> bool;
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerLoad {
    pub(crate) decodes: bool,
    pub(crate) load: Load,
    /// Predicted time of the prompt tokens that are not computed yet.
    pub(crate) queue_ms: f64,
    pub(crate) last_step_ms: f64,
    pub(crate) blocks: Blocks,
}

pub(crate) struct Engine<R> {
    index: WorkerIndex,
    epoch: Epoch,
    role: R,
    device: Device,
    client: PoolClient,
    announcer: Announcer,
    vocab: u32,
    block_bytes: u64,
    inbox: VecDeque<Input>,
    step: Option<Step>,
    last_step: Duration,
    report: Report,
}

/// Under way on the device.
struct Step {
    chunks: Vec<ScheduledChunk>,
    results: Vec<SegmentResult>,
    work: Work,
    took: Duration,
}

/// A worker has one coordinator here.
const LINK: LinkId = LinkId { coordinator: 0, session: 0 };

impl<R: Role + Checked> Engine<R> {
    pub(crate) fn new(index: WorkerIndex, epoch: Epoch, role: R, device: Device, client: PoolClient, vocab: u32, block_bytes: u64) -> Self {
        let mut announcer = Announcer::default();
        announcer.up(LINK);
        Self {
            index,
            epoch,
            role,
            device,
            client,
            announcer,
            vocab,
            block_bytes,
            inbox: VecDeque::new(),
            step: None,
            last_step: Duration::ZERO,
            report: Report::default(),
        }
    }

    /// Takes in what has arrived and starts the next step, unless the device is busy.
    fn drive(&mut self, io: &mut Io) {
        while self.step.is_none() {
            while let Some(input) = self.inbox.pop_front() {
                self.apply(io, input);
            }
            let chunks = self.role.plan(io.now);
            self.act(io);
            for (_, event) in self.announcer.announce(self.role.residency_mut(), !chunks.is_empty(), io.now) {
                io.tell_coordinator(self.epoch, event);
            }
            if chunks.is_empty() && self.inbox.is_empty() {
                return;
            }
            if !chunks.is_empty() {
                self.start(io, chunks);
            }
        }
    }

    fn apply(&mut self, io: &mut Io, input: Input) {
        match input {
            Input::Message(message) => {
                let refused = self.role.accept(LINK, *message, io.now);
                debug_assert!(refused.is_none(), "a coordinator sends each role its own messages: {refused:?}");
            }
            Input::Matched { job, held } => self.role.matched(job, held),
            Input::Fetched { fetch, index, arrival } => drop(self.role.fetched(fetch, index, arrival, io.now)),
            Input::PutDone { job, blocks, outcome } => self.role.put_done(job, blocks, outcome, io.now),
        }
        self.act(io);
    }

    fn start(&mut self, io: &mut Io, chunks: Vec<ScheduledChunk>) {
        let (mut work, mut results) = (Work::default(), Vec::with_capacity(chunks.len()));
        for chunk in &chunks {
            let segment = self.role.segment(chunk);
            work.add(chunk, R::DECODES, segment.logit_rows());
            let drawn = match segment.wanted {
                Wanted::Token(draw) => Some((workload::token(draw.sampling.seed, draw.index as u32, self.vocab), None)),
                Wanted::Nothing | Wanted::Embedding | Wanted::Scores { .. } => None,
            };
            results.push(SegmentResult { scores: Vec::new(), drawn, ..SegmentResult::default() });
        }
        let took = self.device.step(&work);
        io.after(took, Event::StepDone { worker: self.index });
        self.step = Some(Step { chunks, results, work, took });
    }

    fn act(&mut self, io: &mut Io) {
        for action in self.role.residency_mut().take_actions() {
            match action {
                Action::Match { job, node, keys } => self.inbox.extend(self.client.ask(io, job, node, keys)),
                Action::Fetch { fetch, parts } => self.client.fetch(io, fetch, parts),
                Action::CancelFetch { fetch } => self.client.cancel_fetch(io, fetch),
                Action::Put { node, lineage, blocks, delivery } => {
                    let keys: Vec<_> = blocks.into_iter().map(|(key, _)| key).collect();
                    match delivery {
                        Delivery::BestEffort => self.client.offer(io, node, lineage, &keys),
                        Delivery::Acknowledged(job) => self.client.put(io, job, node, lineage, keys),
                    }
                }
                Action::Constrain { .. } => unreachable!("simulated requests have no grammars"),
                Action::Send { link: _, event } => io.tell_coordinator(self.epoch, event),
            }
        }
    }
}

impl<R: Role + Checked> Worker for Engine<R> {
    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn receive(&mut self, io: &mut Io, message: Box<ToWorker>) {
        self.inbox.push_back(Input::Message(message));
        self.drive(io);
    }

    fn pool_answered(&mut self, io: &mut Io, pool: PoolIndex, message: FromPool) {
        let inputs = self.client.answered(io, pool, message);
        self.inbox.extend(inputs);
        self.drive(io);
    }

    fn received(&mut self, io: &mut Io, from: PoolIndex, call: CallId, blocks: &[Found], valid: &[bool], started: Duration) {
        let inputs = self.client.received(io, from, call, blocks, valid, started);
        self.inbox.extend(inputs);
        self.drive(io);
    }

    fn stepped(&mut self, io: &mut Io) {
        let Step { chunks, results, work, took } = self.step.take().expect("a step that ends has begun");
        self.last_step = took;
        self.role.stepped(&chunks, results, io.now);
        self.report.push_step(work.sample(took));
        self.act(io);
        self.drive(io);
    }

    fn report(&mut self) -> Report {
        let load = self.role.load();
        self.report.waiting = load.waiting as u32;
        self.report.running = load.running as u32;
        self.report.tokens_queued = load.tokens_queued;
        self.report.blocks.hbm = self.role.residency().blocks(self.block_bytes);
        self.report.counters = self.role.counters().clone();
        (self.report.counters.transfer, self.report.counters.misses) = self.client.counters();
        let steps = std::mem::take(&mut self.report.steps);
        Report { steps, ..self.report.clone() }
    }

    fn load(&self) -> WorkerLoad {
        let load = self.role.load();
        let tokens = load.tokens_queued;
        let queue = Work { prefill_tokens: tokens, prefill_context: 0, kv_tokens: tokens, ..Work::default() };
        WorkerLoad {
            decodes: R::DECODES,
            load,
            queue_ms: if tokens == 0 { 0.0 } else { outcome::millis(self.device.speed.step(&queue)) },
            last_step_ms: if load.running == 0 { 0.0 } else { outcome::millis(self.last_step) },
            blocks: self.role.residency().blocks(self.block_bytes),
        }
    }

    fn check(&self) {
        self.role.check();
    }

    fn is_idle(&self) -> bool {
        let load = self.role.load();
        self.step.is_none()
            && self.inbox.is_empty()
            && self.client.is_quiet()
            && (load.waiting, load.running) == (0, 0)
            && self.role.residency().blocks(self.block_bytes).used == 0
    }
}
