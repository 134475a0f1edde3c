//! The whole cluster in virtual time: one queue of events, and the processes that handle them.
//!
//! - [`World`]: builds the processes and delivers events
//! - `coordinator`; `engine`: a prefill or decode worker; `group`: its later stages; `client`: its pool client; `pool`: a pool node, `disk`: its disk
//! - `uplink`: workers' and pool nodes' links to coordinators
//! - `reader`: clients of the front door
//! - `io`: time, messages and bytes on links; `network`: connections; `process`: the life of a process, and its clock; `bytes`: the
//!   contents of blocks
//! - `oracle`: a decode worker's draft model
//! - `scaling`: workers started and ended by autoscaling
//! - `event`: the events; `blueprint`: the making of processes; `trouble`: the faults that may happen to them
//!
//! ```text
//!   asks ──► Cluster ⇄ engines (prefill, decode) ⇄ pool nodes ──► Cluster        every arrow takes its time on a link
//! ```
//!
//! Two drivers run it: [`World::run`] studies scheduling, and [`faults`](crate::faults) makes everything fail that can.

mod blueprint;
pub(crate) mod bytes;
mod client;
mod coordinator;
pub(crate) mod disk;
mod engine;
mod event;
mod group;
pub(crate) mod io;
pub(crate) mod neighbour;
pub(crate) mod network;
mod oracle;
mod pool;
pub(crate) mod process;
pub(crate) mod reader;
mod scaling;
#[cfg(test)]
mod tests;
mod trouble;
mod uplink;

use crate::{
    faults::plan::Trouble,
    outcome::{Answer, End, LoadPoint},
    random::mix,
    settings::{InvalidSetting, Settings},
    workload::Ask,
};
use blueprint::{Blueprint, WAITING_MAX};
use coordinator::Coordinator;
use disk::Disk;
use engine::Worker;
use event::{Event, Timer, Transfer};
use group::StageNode;
use io::{Faulty, Io, Packet};
use network::{CLIENT, ConnId, SERVER};
use pool::PoolNode;
pub use process::Process;
use process::State;
use reader::{Manners, Reader};
use scaling::Scaling;
use std::time::Duration;
use tidemill_kvpool::core::directory::Limits;
use tidemill_proto::{block::LayoutFingerprint, pool::Via};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CoordinatorIndex(pub usize);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerIndex(pub usize);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PoolIndex(pub usize);

/// A later stage of a worker.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StageIndex(pub usize);

/// A call of the coordinator, for observers that time it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Call {
    /// A new request, with the decision about its placement if there is room.
    Submit,
    WorkerEvent,
    Tick,
}

/// An observer that is notified when the coordinator computes. It does not affect the world.
pub trait Watch {
    fn begins(&mut self, _: Call) {}
    fn ended(&mut self, _: Call) {}
}

/// An observer that does nothing.
pub struct Unwatched;

impl Watch for Unwatched {}

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The answers by request, in order of arrival.
    pub answers: Vec<Answer>,
    pub load: Vec<LoadPoint>,
    pub virtual_time: Duration,
    pub events: u64,
    /// A hash of all events and their times: equal for equal runs.
    pub digest: u64,
    pub network_bytes: f64,
    /// The number of links that the coordinator closed. It should be 0, since nothing fails here.
    pub closed: u64,
    /// The number of prefill jobs that failed.
    pub warnings: u64,
}

pub struct World {
    pub(crate) io: Io,
    blueprint: Blueprint,
    pub(crate) coordinators: Vec<Coordinator>,
    pub(crate) workers: Vec<Box<dyn Worker>>,
    pub(crate) pools: Vec<PoolNode>,
    stages: Vec<StageNode>,
    pub(crate) asks: Vec<Ask>,
    /// The clients, by ask.
    pub(crate) readers: Vec<Reader>,
    pub(crate) answers: Vec<Answer>,
    open: usize,
    load: Vec<LoadPoint>,
    /// The state of autoscaling; `None` if all workers run all the time.
    scaling: Option<Scaling>,
    pub(crate) plan: Vec<Trouble>,
    pub(crate) events: u64,
    digest: u64,
    /// The number of links closed by coordinators that are gone.
    closed: u64,
    /// The number of warnings of coordinators that are gone.
    warnings: u64,
}

/// Features of a world beyond those that studies of scheduling need.
pub(crate) struct Extras {
    pub(crate) coordinators: usize,
    /// The number of disk slots of each pool node; 0: it has no disk.
    pub(crate) disk_slots: u32,
    /// Whether pool nodes keep another model's blocks, too.
    pub(crate) neighbour: bool,
    /// The clients' behaviour, by ask.
    pub(crate) manners: Vec<Manners>,
    pub(crate) faulty: Option<Faulty>,
    /// The limits of pool nodes.
    pub(crate) limits: Limits,
    /// The number of later stages of each worker; workers beyond have none.
    pub(crate) stages: Vec<usize>,
    /// The most sequences that wait at a decode worker.
    pub(crate) waiting_max: usize,
}

/// The interval of a coordinator's ticks, as in production.
const TICK: Duration = Duration::from_millis(50);
const POOL_TICK: Duration = Duration::from_millis(100);
const HEARTBEAT: Duration = Duration::from_secs(1);
const HEARTBEAT_DEAD: Duration = Duration::from_secs(5);
pub(crate) const POOL_LIMITS: Limits = Limits { put_deadline: Duration::from_secs(10), lease: Duration::from_secs(10) };
/// The time of the first request, before which every process registers.
const START: Duration = Duration::from_secs(2);
const SAMPLE: Duration = Duration::from_secs(1);
/// The layout of all engines; any value will do.
pub(crate) const LAYOUT: LayoutFingerprint = LayoutFingerprint([1; 16]);
/// The time from announcing its leave to a process's end.
const EXIT: Duration = Duration::from_millis(500);

impl World {
    /// A cluster that is running, and clients that will send `asks`.
    pub fn new(settings: &Settings, asks: Vec<Ask>, seed: u64) -> Result<Self, InvalidSetting> {
        let manners = vec![Manners::default(); asks.len()];
        let extras = Extras {
            coordinators: 1,
            disk_slots: 0,
            neighbour: false,
            manners,
            faulty: None,
            limits: POOL_LIMITS,
            stages: Vec::new(),
            waiting_max: WAITING_MAX,
        };
        let mut world = Self::with(settings, asks, seed, extras)?;
        // Every process registers before anything else happens.
        while world.io.queue.next_at().is_some_and(|at| at < START / 2) {
            world.step(&mut Unwatched);
        }
        match world.refusal() {
            Some(refusal) => Err(InvalidSetting::new("cluster", refusal)),
            None => Ok(world),
        }
    }

    pub(crate) fn with(settings: &Settings, asks: Vec<Ask>, seed: u64, extras: Extras) -> Result<Self, InvalidSetting> {
        let Extras { coordinators, disk_slots, neighbour, manners, faulty, limits, stages, waiting_max } = extras;
        let blueprint = Blueprint {
            neighbour,
            stages: blueprint::numbered(&stages),
            ..Blueprint::new(settings, seed, disk_slots, (limits, waiting_max))?
        };
        let mut io = Io::new(&settings.network);
        io.faulty = faulty;
        let mut answers: Vec<Answer> = asks.iter().map(Answer::of).collect();
        answers.iter_mut().for_each(|answer| answer.at += START);
        let readers = manners.into_iter().map(|manners| Reader::new(manners, coordinators)).collect();
        let mut world = Self {
            io,
            blueprint,
            coordinators: Vec::new(),
            workers: Vec::new(),
            pools: Vec::new(),
            stages: Vec::new(),
            open: asks.len(),
            answers,
            readers,
            asks,
            load: Vec::new(),
            scaling: None,
            plan: Vec::new(),
            events: 0,
            digest: 0,
            closed: 0,
            warnings: 0,
        };
        world.begin_scaling();
        world.start(coordinators);
        Ok(world)
    }

    /// Runs until every request has ended.
    pub fn run(mut self, watch: &mut dyn Watch) -> Run {
        while self.open > 0 && self.step(watch) {}
        self.finish()
    }

    /// Handles the next event. `false` if there is none.
    pub fn step(&mut self, watch: &mut dyn Watch) -> bool {
        let Some((at, event)) = self.io.queue.pop() else { return false };
        self.io.now = at;
        self.events += 1;
        self.digest = mix(self.digest ^ mix(at.as_nanos() as u64) ^ event.fingerprint());
        self.handle(event, watch);
        true
    }

    /// The results so far.
    pub fn finish(self) -> Run {
        let of = |gone: u64, of: fn(&Coordinator) -> u64| gone + self.coordinators.iter().map(of).sum::<u64>();
        Run {
            virtual_time: self.io.now,
            events: self.events,
            digest: self.digest,
            network_bytes: self.io.network_bytes(),
            closed: of(self.closed, |coordinator| coordinator.closed),
            warnings: of(self.warnings, |coordinator| coordinator.warnings),
            answers: self.answers,
            load: self.load,
        }
    }

    /// Sets the faults, and the rate errors of clocks.
    pub(crate) fn set_plan(&mut self, plan: Vec<Trouble>, clocks: &[(Process, i32)]) {
        for (number, trouble) in plan.iter().enumerate() {
            self.io.queue.push(trouble.at, Event::Trouble(number));
        }
        for &(process, ppm) in clocks {
            self.io.life_mut(process).clock.change(Duration::ZERO, ppm, Duration::ZERO);
        }
        self.plan = plan;
    }

    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    fn start(&mut self, coordinators: usize) {
        let cluster = &self.blueprint.settings.cluster;
        let hosts = self.blueprint.workers.len().div_ceil(cluster.instances_per_host.max(1) as usize);
        for _ in 0..coordinators {
            let index = self.io.add_coordinator();
            let coordinator = self.blueprint.coordinator(index, (index.0 as u64) << 32);
            self.coordinators.push(coordinator);
            self.start_coordinator(index);
        }
        for _ in 0..hosts {
            let index = self.io.add_host();
            let disk = (self.blueprint.disk_slots > 0).then(|| Disk::new(self.blueprint.disk_slots));
            let pool = self.blueprint.pool_node(&mut self.io, index, coordinators, disk);
            self.pools.push(pool);
            self.start_pool(index);
        }
        for number in 0..self.blueprint.stages.iter().flatten().count() {
            let index = self.io.add_stage();
            debug_assert_eq!(index.0, number);
            self.stages.push(self.blueprint.stage(index));
        }
        for number in 0..self.blueprint.workers.len() {
            let (host, bus) = (self.blueprint.workers[number].host, self.blueprint.bus(number));
            let index = self.io.add_worker(host, bus);
            let worker = self.blueprint.worker(&self.io, index, coordinators);
            self.workers.push(worker);
            if self.runs_at_first(index) {
                // Heartbeats of many workers are spread over time.
                self.start_worker(index, HEARTBEAT.mul_f64((number as f64 * 0.618) % 1.0));
            } else {
                self.io.life_mut(Process::Worker(index)).state = State::Down;
            }
        }
        for (number, ask) in self.asks.iter().enumerate() {
            self.io.queue.push(START + ask.at, Event::Arrive(number));
            if let Some(after) = self.readers[number].manners.leaves {
                self.io.queue.push(START + ask.at + after, Event::Leave(number));
            }
        }
        self.io.queue.push(START, Event::Sample);
    }

    fn start_coordinator(&mut self, index: CoordinatorIndex) {
        self.io.timer(Process::Coordinator(index), TICK, Timer::Tick);
    }

    fn start_pool(&mut self, index: PoolIndex) {
        self.pools[index.0].start(&mut self.io);
        self.io.timer(Process::Pool(index), HEARTBEAT, Timer::Heartbeat);
        self.io.timer(Process::Pool(index), POOL_TICK, Timer::Tick);
    }

    fn start_worker(&mut self, index: WorkerIndex, first_heartbeat: Duration) {
        self.workers[index.0].start(&mut self.io);
        self.io.timer(Process::Worker(index), first_heartbeat, Timer::Heartbeat);
    }

    /// The reason why a process was refused, if any was.
    fn refusal(&mut self) -> Option<String> {
        let pools = self.pools.iter().filter_map(|pool| pool.uplink.refused.clone());
        pools.chain(self.workers.iter_mut().filter_map(|worker| worker.uplink().refused.clone())).next()
    }

    fn handle(&mut self, event: Event, watch: &mut dyn Watch) {
        if let Some((process, incarnation)) = event.process(&self.io) {
            let life = self.io.life_mut(process);
            if life.incarnation != incarnation || life.state == State::Down {
                return;
            }
            if life.state == State::Paused {
                life.deferred.push_back(event);
                return;
            }
        }
        match event {
            Event::Arrive(number) => self.arrive(number, watch),
            Event::Leave(number) => self.leave(number),
            Event::Read(number) => self.read(number),
            Event::Packet { conn, to, number, packet } => self.packet(conn, to, number, packet, watch),
            Event::Header { .. } => self.header(event),
            Event::Blocks { .. } => self.blocks(event),
            Event::Handshake { conn, until } => self.io.shake_hands(conn, until),
            Event::Connected { conn, established } => {
                self.enter(conn, CLIENT);
                match self.io.network.end(conn, CLIENT).process {
                    Process::Worker(worker) => self.workers[worker.0].connected(&mut self.io, conn, established),
                    Process::Pool(pool) => self.pools[pool.0].uplink.connected(&mut self.io, conn, established),
                    Process::Coordinator(_) | Process::Stage(_) => unreachable!("coordinators and stages connect to nobody"),
                }
            }
            Event::Ended { conn, at } => self.ended(conn, at),
            Event::Silence { conn, at, since } => {
                if self.io.network.end(conn, at).silent == Some(since) {
                    self.ended(conn, at);
                }
            }
            Event::Resumed { conn, to } => {
                while let Some(packet) = self.io.network.next(conn, to) {
                    self.deliver(conn, to, packet, watch);
                }
                if !self.holds_up(conn, to) {
                    for event in std::mem::take(&mut self.io.network.end_mut(conn, to).stalled) {
                        self.handle(event, watch);
                    }
                }
            }
            Event::TransferDue(deadline) => {
                if let Some(transfer) = self.io.transferred(deadline) {
                    self.handle(Event::Transferred(transfer), watch);
                }
            }
            Event::Transferred(transfer) => self.transferred(transfer),
            Event::Timer { process, timer, .. } => {
                self.io.enter(process);
                self.timer(process, timer, watch);
            }
            Event::Sample => {
                self.scale();
                self.sample();
                self.io.after(SAMPLE, Event::Sample);
            }
            Event::Started(worker) => self.started(worker),
            Event::Supervised(worker) => self.restart(Process::Worker(worker)),
            Event::Trouble(number) => self.trouble(number),
        }
    }

    /// Runs the process at an end of a connection.
    fn enter(&mut self, conn: ConnId, end: usize) {
        let process = self.io.network.end(conn, end).process;
        self.io.enter(process);
    }

    fn holds_up(&self, conn: ConnId, to: usize) -> bool {
        self.io.network.is_cut(conn, to)
    }

    fn packet(&mut self, conn: ConnId, to: usize, number: u64, packet: Packet, watch: &mut dyn Watch) {
        let is_cut = self.io.network.is_cut(conn, to);
        let end = self.io.network.end_mut(conn, to);
        if !is_cut && end.taken == number {
            end.taken += 1;
            self.deliver(conn, to, packet, watch);
        } else {
            end.held.insert(number, packet);
        }
        while let Some(packet) = self.io.network.next(conn, to) {
            self.deliver(conn, to, packet, watch);
        }
    }

    fn deliver(&mut self, conn: ConnId, to: usize, packet: Packet, watch: &mut dyn Watch) {
        let end = self.io.network.end(conn, to);
        if !end.open {
            return;
        }
        let process = end.process;
        self.io.enter(process);
        match (process, packet) {
            (_, Packet::End) => self.ended(conn, to),
            (Process::Coordinator(index), Packet::ToCoordinator(message)) => {
                let is_stale = self.io.is_stale(conn, &message);
                watch.begins(Call::WorkerEvent);
                self.coordinators[index.0].receive(&mut self.io, conn, *message);
                watch.ended(Call::WorkerEvent);
                if is_stale && self.io.network.end(conn, to).open {
                    self.io.violated(|| format!("{process} takes what is said under an epoch that is gone"));
                }
                self.perform(index);
            }
            (Process::Worker(worker), Packet::ToWorker(message)) => self.workers[worker.0].heard(&mut self.io, conn, message),
            (Process::Worker(worker), Packet::FromPool(message)) => self.workers[worker.0].pool_answered(&mut self.io, conn, *message),
            (Process::Pool(pool), Packet::ToWorker(message)) => self.pools[pool.0].heard(&mut self.io, conn, message),
            (Process::Pool(pool), Packet::ToPool(message)) => self.pools[pool.0].handle(&mut self.io, conn, *message),
            (Process::Worker(worker), Packet::FromStage(message)) => self.workers[worker.0].stage_answered(&mut self.io, conn, *message),
            (Process::Stage(stage), Packet::ToStage(message)) => self.stages[stage.0].handle(&mut self.io, conn, *message),
            (process, packet) => unreachable!("{process} gets {packet:?}"),
        }
    }

    /// Ends a connection for one end.
    fn ended(&mut self, conn: ConnId, at: usize) {
        let end = self.io.network.end(conn, at);
        if !end.open {
            return;
        }
        let process = end.process;
        self.io.enter(process);
        self.io.close(conn, at, false);
        self.io.note(|| format!("{process} loses a connection"));
        match process {
            Process::Coordinator(index) => {
                self.coordinators[index.0].ended(&mut self.io, conn);
                self.perform(index);
            }
            Process::Worker(worker) => self.workers[worker.0].ended(&mut self.io, conn),
            Process::Pool(pool) => self.pools[pool.0].ended(&mut self.io, conn),
            Process::Stage(stage) => self.stages[stage.0].ended(&self.io, conn),
        }
    }

    fn transferred(&mut self, transfer: Transfer) {
        let (conn, end) = (transfer.connection(), transfer.end());
        self.enter(conn, end);
        let (worker, pool) = (worker_of(&self.io, conn), pool_of(&self.io, conn));
        match transfer {
            Transfer::Get { arena, call, lease, blocks, via: Via::Slots, started, .. } => {
                let blocks = blocks.into_iter().map(|(found, before)| self.io.copy(arena, found, before)).collect();
                self.workers[worker.0].received(&mut self.io, conn, call, (blocks, Some(lease)), started);
            }
            Transfer::Get { call, lease, blocks, via: Via::Streams, started, .. } => {
                if self.io.network.end(conn, SERVER).open {
                    let blocks = self.pools[pool.0].copies(&self.io, blocks);
                    self.pools[pool.0].sent(&mut self.io, conn, lease);
                    self.io.after(Duration::ZERO, Event::Blocks { conn, call, blocks, started });
                }
            }
            Transfer::Put { arena, call, blocks, via: Via::Slots, .. } => {
                self.workers[worker.0].written(&mut self.io, conn, arena, call, blocks);
            }
            Transfer::Put { call, ref blocks, via: Via::Streams, .. } => {
                if !self.io.network.end(conn, CLIENT).open {
                    return;
                }
                if self.holds_up(conn, SERVER) {
                    self.io.network.end_mut(conn, SERVER).stalled.push(Event::Transferred(transfer));
                } else {
                    self.pools[pool.0].streamed(&mut self.io, conn, call, blocks);
                }
            }
        }
    }

    fn header(&mut self, event: Event) {
        let Event::Header { conn, .. } = event else { return };
        if self.holds_up(conn, SERVER) {
            return self.io.network.end_mut(conn, SERVER).stalled.push(event);
        }
        let Event::Header { put, .. } = event else { return };
        self.enter(conn, SERVER);
        let pool = pool_of(&self.io, conn);
        self.pools[pool.0].receive_start(&mut self.io, conn, put);
    }

    fn blocks(&mut self, event: Event) {
        let Event::Blocks { conn, .. } = event else { return };
        if self.holds_up(conn, CLIENT) {
            return self.io.network.end_mut(conn, CLIENT).stalled.push(event);
        }
        let Event::Blocks { call, blocks, started, .. } = event else { return };
        if self.io.network.end(conn, CLIENT).open {
            self.enter(conn, CLIENT);
            let worker = worker_of(&self.io, conn);
            self.workers[worker.0].received(&mut self.io, conn, call, (blocks, None), started);
        }
    }

    fn timer(&mut self, process: Process, timer: Timer, watch: &mut dyn Watch) {
        match (process, timer) {
            (Process::Coordinator(index), Timer::Tick) => {
                let here = self.io.here;
                watch.begins(Call::Tick);
                self.coordinators[index.0].cluster.tick(here);
                watch.ended(Call::Tick);
                self.perform(index);
                self.check_deadlines(index);
                self.io.timer(process, TICK, Timer::Tick);
            }
            (Process::Pool(pool), Timer::Tick) => {
                self.pools[pool.0].tick(&mut self.io);
                self.io.timer(process, POOL_TICK, Timer::Tick);
            }
            (Process::Worker(worker), Timer::Heartbeat) => {
                self.workers[worker.0].heartbeat(&mut self.io);
                self.io.timer(process, HEARTBEAT, Timer::Heartbeat);
            }
            (Process::Pool(pool), Timer::Heartbeat) => {
                self.pools[pool.0].heartbeat(&mut self.io);
                self.io.timer(process, HEARTBEAT, Timer::Heartbeat);
            }
            (Process::Worker(worker), Timer::Step) => self.workers[worker.0].stepped(&mut self.io),
            (Process::Worker(worker), Timer::Connect(coordinator)) => self.workers[worker.0].uplink().connect(&mut self.io, coordinator),
            (Process::Pool(pool), Timer::Connect(coordinator)) => self.pools[pool.0].uplink.connect(&mut self.io, coordinator),
            (Process::Worker(worker), Timer::Meet(stage)) => self.workers[worker.0].meet(&mut self.io, stage),
            (Process::Stage(stage), Timer::Stage(conn)) => self.stages[stage.0].stepped(&mut self.io, conn),
            (Process::Worker(worker), Timer::CallDue(call)) => self.workers[worker.0].overdue(&mut self.io, call),
            (Process::Pool(pool), Timer::Disk(job)) => self.pools[pool.0].disk_done(&mut self.io, job),
            (Process::Pool(pool), Timer::OtherLayout) => self.pools[pool.0].other_layout(&mut self.io),
            (process, Timer::Exit) => self.crash(process, false),
            (process, timer) => unreachable!("{process} waits for {timer:?}"),
        }
    }

    fn sample(&mut self) {
        let runs = |number: usize| self.io.life(Process::Worker(WorkerIndex(number))).state != State::Down;
        let loads: Vec<_> = self.workers.iter().enumerate().filter(|(number, _)| runs(*number)).map(|(_, worker)| worker.load()).collect();
        let mean = |decodes: bool, of: &dyn Fn(&engine::WorkerLoad) -> f64| {
            let values: Vec<f64> = loads.iter().filter(|load| load.decodes == decodes).map(of).collect();
            if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
        };
        let has_prefill = loads.iter().any(|load| !load.decodes);
        self.load.push(LoadPoint {
            s: (self.io.now - START).as_secs_f64(),
            waiting: self
                .coordinators
                .iter()
                .map(|coordinator| coordinator.requests.len())
                .sum::<usize>()
                .saturating_sub(loads.iter().filter(|load| load.decodes).map(|load| load.load.waiting + load.load.running).sum())
                as u32,
            prefill_tokens: mean(!has_prefill, &|load| load.load.tokens_queued as f64),
            prefill_load: mean(!has_prefill, &|load| load.queue_ms / self.blueprint.ttft_limit_ms),
            decode_sequences: mean(true, &|load| (load.load.waiting + load.load.running) as f64),
            decode_load: mean(true, &|load| load.last_step_ms / self.blueprint.tpot_limit_ms),
            workers: self.held_workers(),
            decode_blocks: mean(true, &|load| load.blocks.used as f64 / load.blocks.total.max(1) as f64),
        });
    }

    /// Panics if any process's books do not balance. Tests call it.
    pub fn check_integrity(&mut self) {
        let runs = |io: &Io, process| io.life(process).state != State::Down;
        for coordinator in &self.coordinators {
            if runs(&self.io, Process::Coordinator(coordinator.index)) {
                coordinator.check();
            }
        }
        for (number, worker) in self.workers.iter().enumerate() {
            if runs(&self.io, Process::Worker(WorkerIndex(number))) {
                worker.check(&mut self.io);
            }
        }
        for (number, pool) in self.pools.iter().enumerate() {
            if runs(&self.io, Process::Pool(PoolIndex(number))) {
                pool.check();
            }
        }
    }

    /// Whether no process computes, moves or holds anything for a request. Tests ask when all requests have ended.
    pub fn is_idle(&self) -> bool {
        self.open == 0 && self.io.is_quiet() && self.busy().is_empty()
    }

    /// The work that processes do, or the state that they hold, for requests.
    pub(crate) fn busy(&self) -> Vec<String> {
        // Messages to a process that has ended cause no work.
        let runs = |number: usize| self.io.life(Process::Worker(WorkerIndex(number))).state != State::Down;
        let running = self.workers.iter().enumerate().filter(|(number, _)| runs(*number));
        let mut busy: Vec<String> = running.filter_map(|(_, worker)| worker.busy()).collect();
        for (number, pool) in self.pools.iter().enumerate() {
            let usage = pool.known().usage();
            // A block with wrong bytes is quarantined for as long as a reader may hold it.
            let quarantined = if self.io.faulty.is_some() { 0 } else { usage.quarantined };
            if (usage.reserved, usage.leased, quarantined) != (0, 0, 0) {
                busy.push(format!("pool-{number}: {usage:?}"));
            }
        }
        busy.extend(self.stages.iter().filter_map(StageNode::busy));
        for coordinator in &self.coordinators {
            let view = coordinator.cluster.view(self.io.here);
            if view.requests > 0 {
                busy.push(format!(
                    "coordinator-{}: {} requests, {} sequences wait, {} run",
                    coordinator.index.0, view.requests, view.sequences_waiting, view.sequences_running
                ));
            }
        }
        busy
    }

    pub fn now(&self) -> Duration {
        self.io.now
    }

    /// The state of each request by now.
    pub fn answers(&self) -> &[Answer] {
        &self.answers
    }

    /// The number of requests that have not ended.
    pub fn open(&self) -> usize {
        self.open
    }
}

fn worker_of(io: &Io, conn: ConnId) -> WorkerIndex {
    let Process::Worker(worker) = io.network.end(conn, CLIENT).process else { unreachable!("workers fetch from pool nodes") };
    worker
}

fn pool_of(io: &Io, conn: ConnId) -> PoolIndex {
    let Process::Pool(pool) = io.network.end(conn, SERVER).process else { unreachable!("workers fetch from pool nodes") };
    pool
}

impl Answer {
    fn of(ask: &Ask) -> Self {
        Self {
            class: ask.class,
            at: ask.at,
            input_tokens: ask.input_tokens,
            first_token: None,
            last_token: None,
            tokens: 0,
            gap_max: Duration::ZERO,
            end: End::Open,
            ended: Duration::ZERO,
            predicted_ttft_ms: None,
            sources: Default::default(),
            prefilled_elsewhere: false,
            rescues: 0,
        }
    }
}
