//! A prefill or decode worker: the production scheduler, driven as its engine's thread drives it, on a modelled device.
//!
//! ```text
//!   inbox ──► [ scheduler ──plan──► device: busy until the step's end ──stepped──► scheduler ] ──► coordinators, pool client
//! ```

use super::{
    Process, Timer, WorkerIndex,
    bytes::{Bytes, Memory},
    client::PoolClient,
    io::{Io, Received},
    network::ConnId,
    oracle::Oracle,
    uplink::{Heard, Uplink, tells_down},
};
use crate::{
    hardware::{Device, Work},
    outcome,
};
use std::{collections::VecDeque, time::Duration};
use tidemill_engine::{
    announcing::Announcer,
    job::{Action, Delivery, JobId, ScheduledChunk},
    role::{Load, Role},
};
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::{
    ids::LinkId,
    message::{Blocks, Report, ToWorker, WorkerEvent},
    pool::{CallId, FromPool, LeaseId, Written},
    step::SegmentResult,
};

/// An input of an engine.
#[derive(Debug)]
pub(crate) enum Input {
    Up(LinkId),
    Down(LinkId),
    Message(LinkId, Box<ToWorker>),
    Matched { job: JobId, held: Result<usize, String> },
    Fetched { fetch: FetchId, index: usize, arrival: Option<Arrival>, bytes: Bytes },
    PutDone { job: JobId, blocks: usize, outcome: Result<(), String> },
    Drain,
}

/// A scheduler whose consistency tests can check.
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
    fn start(&mut self, io: &mut Io);
    fn uplink(&mut self) -> &mut Uplink;
    fn connected(&mut self, io: &mut Io, conn: ConnId, established: bool);
    fn heard(&mut self, io: &mut Io, conn: ConnId, message: Box<ToWorker>);
    fn pool_answered(&mut self, io: &mut Io, conn: ConnId, message: FromPool);
    /// Handles the arrival of a get's blocks, with a lease if this process has read them itself.
    fn received(&mut self, io: &mut Io, conn: ConnId, call: CallId, blocks: (Vec<Received>, Option<LeaseId>), started: Duration);
    /// Handles the end of this process's writes of a put's blocks into their slots.
    fn written(&mut self, io: &mut Io, conn: ConnId, arena: usize, call: CallId, blocks: Vec<(Written, Bytes)>);
    /// Handles the end of a connection.
    fn ended(&mut self, io: &mut Io, conn: ConnId);
    fn overdue(&mut self, io: &mut Io, call: CallId);
    /// Handles the end of the device's step.
    fn stepped(&mut self, io: &mut Io);
    /// Sends a heartbeat with the worker's report.
    fn heartbeat(&mut self, io: &mut Io);
    /// Returns all work to the coordinators.
    fn drain(&mut self, io: &mut Io);
    fn load(&self) -> WorkerLoad;
    fn check(&self, io: &mut Io);
    /// A description of the worker's activity and of the resources that it holds, or `None` if it is idle and holds nothing.
    fn busy(&self) -> Option<String>;
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerLoad {
    pub(crate) decodes: bool,
    pub(crate) load: Load,
    /// The predicted time of the prompt tokens that are not computed yet.
    pub(crate) queue_ms: f64,
    pub(crate) last_step_ms: f64,
    pub(crate) blocks: Blocks,
}

pub(crate) struct Engine<R> {
    index: WorkerIndex,
    role: R,
    device: Device,
    memory: Memory,
    /// The draft model, if there is one.
    oracle: Option<Oracle>,
    client: PoolClient,
    uplink: Uplink,
    announcer: Announcer,
    vocab: u32,
    block_bytes: u64,
    /// The most jobs that the engine should ever have.
    jobs_max: usize,
    inbox: VecDeque<Input>,
    step: Option<Step>,
    last_step: Duration,
    report: Report,
    /// Whether the engine has returned its work, and accepts no more.
    drained: bool,
}

/// The step in progress on the device.
struct Step {
    chunks: Vec<ScheduledChunk>,
    results: Vec<SegmentResult>,
    work: Work,
    took: Duration,
    /// The draft model's time before the step.
    drafting: Duration,
}

/// The parts of an engine.
pub(crate) struct Parts<R> {
    pub(crate) index: WorkerIndex,
    pub(crate) role: R,
    pub(crate) device: Device,
    pub(crate) memory: Memory,
    pub(crate) oracle: Option<Oracle>,
    pub(crate) client: PoolClient,
    pub(crate) uplink: Uplink,
    pub(crate) vocab: u32,
    pub(crate) block_bytes: u64,
    pub(crate) jobs_max: usize,
}

impl<R: Role + Checked> Engine<R> {
    pub(crate) fn new(parts: Parts<R>) -> Self {
        let Parts { index, role, device, memory, oracle, client, uplink, vocab, block_bytes, jobs_max } = parts;
        Self {
            index,
            role,
            device,
            memory,
            oracle,
            client,
            uplink,
            announcer: Announcer::default(),
            vocab,
            block_bytes,
            jobs_max,
            inbox: VecDeque::new(),
            step: None,
            last_step: Duration::ZERO,
            report: Report::default(),
            drained: false,
        }
    }

    fn take(&mut self, io: &mut Io, inputs: impl IntoIterator<Item = Input>) {
        self.inbox.extend(inputs);
        self.drive(io);
    }

    /// Applies the inputs that have arrived and starts the next step, unless the device is busy.
    fn drive(&mut self, io: &mut Io) {
        while self.step.is_none() && !self.drained {
            while let Some(input) = self.inbox.pop_front() {
                self.apply(io, input);
                if self.drained {
                    return;
                }
            }
            let drafting = self.guess(io);
            let chunks = self.role.plan(io.here + drafting);
            self.act(io);
            for (link, event) in self.announcer.announce(self.role.residency_mut(), !chunks.is_empty(), io.here) {
                self.uplink.send(io, link, event);
            }
            if chunks.is_empty() && self.inbox.is_empty() {
                return;
            }
            if !chunks.is_empty() {
                self.begin(io, chunks, drafting);
            }
        }
    }

    fn apply(&mut self, io: &mut Io, input: Input) {
        match input {
            Input::Up(link) => self.announcer.up(link),
            Input::Down(link) => {
                self.announcer.down(link);
                if tells_down(io) {
                    self.role.link_down(link);
                }
            }
            Input::Message(link, message) => {
                let refused = self.role.accept(link, *message, io.here);
                debug_assert!(refused.is_none(), "a coordinator sends each role its own messages: {refused:?}");
            }
            Input::Matched { job, held } => self.role.matched(job, held),
            Input::Fetched { fetch, index, arrival, bytes } => {
                if let Some(block) = arrival.and_then(|_| self.role.destination(fetch, index)) {
                    self.memory.write(block, bytes);
                }
                self.role.fetched(fetch, index, arrival, io.here);
            }
            Input::PutDone { job, blocks, outcome } => self.role.put_done(job, blocks, outcome, io.here),
            Input::Drain => {
                self.role.hand_back("this worker is shutting down");
                self.drained = true;
            }
        }
        self.act(io);
        if self.drained {
            self.uplink.leave(io);
        }
    }

    /// Runs the draft model, if there is one. Returns the time that this takes.
    fn guess(&mut self, io: &Io) -> Duration {
        self.oracle.as_mut().map_or(Duration::ZERO, |oracle| oracle.guess(&mut self.role, &mut self.device, io.here))
    }

    /// Begins a step before which the draft model takes `drafting`.
    fn begin(&mut self, io: &mut Io, chunks: Vec<ScheduledChunk>, drafting: Duration) {
        let (mut work, mut results) = (Work::default(), Vec::with_capacity(chunks.len()));
        for chunk in &chunks {
            let (segment, decode_rows) = (self.role.segment(chunk), self.role.decode_rows(chunk));
            work.add(chunk, decode_rows, segment.logit_rows());
            let result = self.memory.compute(&segment, self.vocab);
            work.drawn += if decode_rows > 0 { result.drawn.len() as u64 } else { 0 };
            self.oracle.iter_mut().for_each(|oracle| oracle.see(chunk.job, &segment));
            results.push(result);
        }
        let took = self.device.step(&work);
        io.timer(Process::Worker(self.index), drafting + took, Timer::Step);
        self.step = Some(Step { chunks, results, work, took, drafting });
    }

    fn act(&mut self, io: &mut Io) {
        for action in self.role.residency_mut().take_actions() {
            match action {
                Action::Match { job, node, keys } => {
                    let inputs = self.client.ask(io, job, node, keys);
                    self.inbox.extend(inputs);
                }
                Action::Fetch { fetch, parts } => {
                    let inputs = self.client.fetch(io, fetch, parts);
                    self.inbox.extend(inputs);
                }
                Action::CancelFetch { fetch } => self.client.cancel_fetch(io, fetch),
                Action::Put { node, lineage, blocks, delivery } => {
                    let blocks: Vec<_> = blocks.into_iter().map(|(key, block)| (key, self.memory.read(block))).collect();
                    for (key, bytes) in &blocks {
                        if io.faulty.as_ref().is_some_and(|faulty| faulty.truth.contradicts(key, *bytes)) {
                            io.violated(|| format!("worker-{} puts wrong bytes for block {key:?}", self.index.0));
                        }
                    }
                    match delivery {
                        Delivery::BestEffort => self.client.offer(io, node, lineage, blocks),
                        Delivery::Acknowledged(job) => {
                            let inputs = self.client.put(io, job, node, lineage, blocks);
                            self.inbox.extend(inputs);
                        }
                    }
                }
                Action::Constrain { .. } => unreachable!("simulated requests have no grammars"),
                Action::Send { link, event } => self.uplink.send(io, link, event),
            }
        }
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
}

impl<R: Role + Checked> Worker for Engine<R> {
    fn start(&mut self, io: &mut Io) {
        self.uplink.start(io);
    }

    fn uplink(&mut self) -> &mut Uplink {
        &mut self.uplink
    }

    fn connected(&mut self, io: &mut Io, conn: ConnId, established: bool) {
        if self.uplink.owns(conn) {
            return self.uplink.connected(io, conn, established);
        }
        let inputs = self.client.connected(io, conn, established);
        self.take(io, inputs);
    }

    fn heard(&mut self, io: &mut Io, conn: ConnId, message: Box<ToWorker>) {
        let report = if matches!(*message, ToWorker::Registered { .. }) { self.report() } else { Report::default() };
        match self.uplink.heard(io, conn, message, || report) {
            Some(Heard::Up(link)) => self.take(io, [Input::Up(link)]),
            Some(Heard::Message(link, message)) => self.take(io, [Input::Message(link, message)]),
            None => {}
        }
    }

    fn pool_answered(&mut self, io: &mut Io, conn: ConnId, message: FromPool) {
        let inputs = self.client.answered(io, conn, message);
        self.take(io, inputs);
    }

    fn received(&mut self, io: &mut Io, conn: ConnId, call: CallId, blocks: (Vec<Received>, Option<LeaseId>), started: Duration) {
        let inputs = self.client.received(io, conn, call, blocks, started);
        self.take(io, inputs);
    }

    fn written(&mut self, io: &mut Io, conn: ConnId, arena: usize, call: CallId, blocks: Vec<(Written, Bytes)>) {
        self.client.written(io, conn, arena, call, blocks);
    }

    fn ended(&mut self, io: &mut Io, conn: ConnId) {
        if self.uplink.owns(conn) {
            if let Some(link) = self.uplink.ended(io, conn) {
                self.take(io, [Input::Down(link)]);
            }
            return;
        }
        let inputs = self.client.ended(io, conn);
        self.take(io, inputs);
    }

    fn overdue(&mut self, io: &mut Io, call: CallId) {
        let inputs = self.client.overdue(io, call);
        self.take(io, inputs);
    }

    fn stepped(&mut self, io: &mut Io) {
        let Step { chunks, results, work, took, drafting } = self.step.take().expect("a step that ends has begun");
        self.last_step = drafting + took;
        self.role.stepped(&chunks, results, io.here);
        self.report.push_step(work.sample(took, drafting));
        self.act(io);
        self.drive(io);
    }

    fn heartbeat(&mut self, io: &mut Io) {
        let report = WorkerEvent::Heartbeat(Box::new(self.report()));
        self.uplink.broadcast(io, &report);
    }

    fn drain(&mut self, io: &mut Io) {
        self.uplink.broadcast(io, &WorkerEvent::Leaving);
        self.take(io, [Input::Drain]);
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

    fn check(&self, io: &mut Io) {
        self.role.check();
        let Load { waiting, running, .. } = self.role.load();
        if waiting + running > self.jobs_max {
            io.violated(|| format!("worker-{} has {} jobs, {} at most", self.index.0, waiting + running, self.jobs_max));
        }
        if waiting + running > 0 && self.inbox.is_empty() && self.uplink.up().next().is_none() {
            io.violated(|| format!("worker-{} has {} jobs, and no coordinator", self.index.0, waiting + running));
        }
    }

    fn busy(&self) -> Option<String> {
        let load = self.role.load();
        let (calls, offers) = self.client.under_way();
        let used = self.role.residency().blocks(self.block_bytes).used;
        let idle = self.step.is_none() && self.inbox.is_empty() && self.client.is_quiet();
        let none = (load.waiting, load.running, used) == (0, 0, 0);
        (!idle || !none).then(|| {
            format!(
                "worker-{}: {} jobs wait, {} run, {used} device blocks used, {calls} calls, {offers} offers, {} inputs, computing: {}",
                self.index.0,
                load.waiting,
                load.running,
                self.inbox.len(),
                self.step.is_some()
            )
        })
    }
}
