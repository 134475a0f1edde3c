//! A prefill or decode worker: the production scheduler, driven as its engine's thread drives it, on a modelled device.
//!
//! ```text
//!   inbox ──► [ scheduler ──plan──► device: busy until the step's end ──stepped──► scheduler ] ──► coordinators, pool client
//! ```
//!
//! A worker in stages is their head. Its engine waits for their rows, and for their parts of blocks that it publishes; when one is lost, it
//! hands its work back and ends.

use super::{
    EXIT, Event, Process, Timer, WorkerIndex,
    bytes::{self, Bytes, Memory},
    client::PoolClient,
    group::{Group, Told},
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
    block::{BLOCK_TOKENS, BlockKey},
    ids::LinkId,
    message::{Blocks, PoolNode, Report, ToWorker, WorkerEvent},
    pool::{CallId, FromPool, LeaseId, Lineage, Written},
    stage::{FromStage, StageChunk},
    step::{Segment, SegmentResult},
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
    /// Tries again to reach a stage.
    fn meet(&mut self, io: &mut Io, stage: usize);
    fn stage_answered(&mut self, io: &mut Io, conn: ConnId, answer: FromStage);
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
    /// The later stages, if there are any.
    group: Option<Group>,
    /// Actions that wait for blocks from the stages.
    acting: VecDeque<Action>,
    /// The put whose blocks the stages were asked for.
    reading: Option<Put>,
    /// The step that begins when nothing is being read.
    planned: Option<(Vec<ScheduledChunk>, Duration)>,
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
    /// The rows for the later stages, if there are any.
    batch: Option<(Vec<StageChunk>, Vec<u64>)>,
}

/// Blocks to put into the pool, with the head's own contents.
struct Put {
    node: PoolNode,
    lineage: Lineage,
    blocks: Vec<(BlockKey, Bytes)>,
    delivery: Delivery,
}

/// The parts of an engine.
pub(crate) struct Parts<R> {
    pub(crate) index: WorkerIndex,
    pub(crate) role: R,
    pub(crate) device: Device,
    pub(crate) memory: Memory,
    pub(crate) oracle: Option<Oracle>,
    pub(crate) group: Option<Group>,
    pub(crate) client: PoolClient,
    pub(crate) uplink: Uplink,
    pub(crate) vocab: u32,
    pub(crate) block_bytes: u64,
    pub(crate) jobs_max: usize,
}

impl<R: Role + Checked> Engine<R> {
    pub(crate) fn new(parts: Parts<R>) -> Self {
        let Parts { index, role, device, memory, oracle, group, client, uplink, vocab, block_bytes, jobs_max } = parts;
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
            group,
            acting: VecDeque::new(),
            reading: None,
            planned: None,
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
        while self.is_free() {
            while let Some(input) = self.inbox.pop_front() {
                self.apply(io, input);
                if !self.is_free() {
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
            match () {
                () if chunks.is_empty() => {}
                () if self.reading.is_some() => self.planned = Some((chunks, drafting)),
                () => self.begin(io, chunks, drafting),
            }
        }
    }

    /// Whether the engine's thread has nothing to wait for.
    fn is_free(&self) -> bool {
        self.step.is_none() && self.reading.is_none() && self.planned.is_none() && !self.drained
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
                    self.group.iter_mut().for_each(|group| group.write(io, block, bytes));
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
        let mut batch = self.group.as_ref().map(|_| (Vec::new(), Vec::new()));
        for chunk in &chunks {
            let (segment, decode_rows) = (self.role.segment(chunk), self.role.decode_rows(chunk));
            work.add(chunk, decode_rows, segment.logit_rows());
            let states = self.memory.states(segment.tokens, segment.start, segment.blocks);
            if let Some((chunks, rows)) = &mut batch {
                chunks.push(stage_chunk(&segment));
                rows.extend_from_slice(&states);
            }
            let result = bytes::result(&segment, &states, self.vocab);
            work.drawn += if decode_rows > 0 { result.drawn.len() as u64 } else { 0 };
            self.oracle.iter_mut().for_each(|oracle| oracle.see(chunk.job, &segment));
            results.push(result);
        }
        let took = self.device.step(&work);
        io.timer(Process::Worker(self.index), drafting + took, Timer::Step);
        self.step = Some(Step { chunks, results, work, took, drafting, batch });
    }

    fn act(&mut self, io: &mut Io) {
        self.acting.extend(self.role.residency_mut().take_actions());
        while self.reading.is_none()
            && let Some(action) = self.acting.pop_front()
        {
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
                    let ids = blocks.iter().map(|(_, block)| *block).collect();
                    let blocks = blocks.into_iter().map(|(key, block)| (key, self.memory.read(block))).collect();
                    let put = Put { node, lineage, blocks, delivery };
                    match &mut self.group {
                        None => self.put(io, put),
                        Some(group) => {
                            self.reading = Some(put);
                            let told = group.read(io, ids);
                            self.told(io, told);
                        }
                    }
                }
                Action::Constrain { .. } => unreachable!("simulated requests have no grammars"),
                Action::Send { link, event } => self.uplink.send(io, link, event),
            }
        }
    }

    fn put(&mut self, io: &mut Io, Put { node, lineage, blocks, delivery }: Put) {
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

    /// Goes on with what the stages mean.
    fn told(&mut self, io: &mut Io, told: Option<Told>) {
        match told {
            None => {}
            Some(Told::Together) => self.uplink.start(io),
            Some(Told::Rows(rows)) => self.finish(io, &rows),
            Some(Told::Parts) => self.publish(io),
            Some(Told::Lost(reason)) => self.give_up(io, &reason),
        }
    }

    /// Ends a step with the rows that the last stage gave back.
    fn finish(&mut self, io: &mut Io, rows: &[u64]) {
        let Some(mut step) = self.step.take() else { return io.violated(|| "rows of no step".into()) };
        let mut rows = rows.iter().copied();
        for (chunk, result) in step.chunks.iter().zip(&mut step.results) {
            let segment = self.role.segment(chunk);
            let wanted: Vec<u64> = rows.by_ref().take(bytes::wanted_rows(&segment)).collect();
            if !wanted.is_empty() {
                *result = bytes::result(&segment, &wanted, self.vocab);
            }
        }
        self.complete(io, step);
    }

    /// Puts blocks whose parts are all there, and goes on.
    fn publish(&mut self, io: &mut Io) {
        let (Some(put), Some(group)) = (self.reading.take(), &self.group) else { return io.violated(|| "parts of no block".into()) };
        let whole = |(nth, (key, own)): (usize, (BlockKey, Bytes))| (key, group.whole(nth, own));
        let blocks = put.blocks.into_iter().enumerate().map(whole).collect();
        self.put(io, Put { blocks, ..put });
        self.act(io);
        if self.reading.is_none() {
            match self.planned.take() {
                Some((chunks, drafting)) => self.begin(io, chunks, drafting),
                None => self.drive(io),
            }
        }
    }

    fn complete(&mut self, io: &mut Io, Step { chunks, results, work, took, drafting, .. }: Step) {
        self.last_step = drafting + took;
        self.role.stepped(&chunks, results, io.here);
        self.report.push_step(work.sample(took, drafting));
        self.act(io);
        self.drive(io);
    }

    /// Hands all work back and ends, as a head does that has lost a stage. A supervisor starts it again.
    fn give_up(&mut self, io: &mut Io, reason: &str) {
        if self.drained {
            return;
        }
        io.note(|| format!("worker-{} ends: {reason}", self.index.0));
        (self.step, self.reading, self.planned, self.drained) = (None, None, None, true);
        self.acting.clear();
        self.inbox.clear();
        self.uplink.broadcast(io, &WorkerEvent::Leaving);
        self.role.hand_back(reason);
        for action in self.role.residency_mut().take_actions() {
            if let Action::Send { link, event } = action {
                self.uplink.send(io, link, event);
            }
        }
        self.uplink.leave(io);
        io.timer(Process::Worker(self.index), EXIT, Timer::Exit);
        io.after(EXIT + SUPERVISED_AFTER, Event::Supervised(self.index));
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
        match &mut self.group {
            // The coordinators learn of a head once its group is together.
            Some(group) => group.start(io),
            None => self.uplink.start(io),
        }
    }

    fn uplink(&mut self) -> &mut Uplink {
        &mut self.uplink
    }

    fn connected(&mut self, io: &mut Io, conn: ConnId, established: bool) {
        if self.uplink.owns(conn) {
            return self.uplink.connected(io, conn, established);
        }
        if let Some(group) = self.group.as_mut().filter(|group| group.owns(conn)) {
            return group.connected(io, conn, established);
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
        if let Some(group) = self.group.as_mut().filter(|group| group.owns(conn)) {
            let told = group.ended(io, conn);
            return self.told(io, told);
        }
        let inputs = self.client.ended(io, conn);
        self.take(io, inputs);
    }

    fn overdue(&mut self, io: &mut Io, call: CallId) {
        let inputs = self.client.overdue(io, call);
        self.take(io, inputs);
    }

    fn meet(&mut self, io: &mut Io, stage: usize) {
        if !self.drained {
            self.group.iter_mut().for_each(|group| group.meet(io, stage));
        }
    }

    fn stage_answered(&mut self, io: &mut Io, conn: ConnId, answer: FromStage) {
        if let Some(group) = self.group.as_mut().filter(|_| !self.drained) {
            let told = group.heard(io, conn, answer);
            self.told(io, told);
        }
    }

    fn stepped(&mut self, io: &mut Io) {
        // A head that has lost a stage has no step any more.
        let Some(mut step) = self.step.take() else { return };
        match step.batch.take().zip(self.group.as_mut()) {
            None => self.complete(io, step),
            Some(((chunks, rows), group)) => {
                self.step = Some(step);
                let told = group.step(io, chunks, &rows);
                self.told(io, told);
            }
        }
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
        let is_grouped = self.group.as_ref().is_none_or(Group::is_idle) && self.reading.is_none() && self.planned.is_none();
        let idle = self.step.is_none() && self.inbox.is_empty() && self.client.is_quiet() && is_grouped;
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

/// The time after which a supervisor starts a head again that has ended.
const SUPERVISED_AFTER: Duration = Duration::from_secs(1);

/// A segment as the later stages are told of it.
fn stage_chunk(segment: &Segment<'_>) -> StageChunk {
    let table = (segment.start + segment.tokens.len()).div_ceil(BLOCK_TOKENS);
    StageChunk {
        tokens: segment.tokens.to_vec(),
        start: segment.start as u32,
        blocks: segment.blocks[..table].to_vec(),
        wanted: bytes::wanted_rows(segment) as u32,
    }
}
