//! The environment of every process: time, messages to other processes, and bytes on links.

use super::{
    CoordinatorIndex, Event, PoolIndex, Process, StageIndex, Timer, Transfer, WorkerIndex,
    bytes::{Arena, Bytes, Truth, checksum},
    network::{CLIENT, CONNECT_MAX, ConnId, IDLE_MAX, Network, SERVER},
    process::{Life, State},
};
use crate::{
    faults::mutation::Mutation,
    flows::{Deadline, Flows, LinkIndex},
    queue::Queue,
    random::{Random, mix},
    settings::NetworkSettings,
};
use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    time::Duration,
};
use tidemill_kvpool::core::validate::Copied;
use tidemill_proto::{
    ids::Epoch,
    message::{ToCoordinator, ToWorker, WorkerEvent},
    pool::{Found, FromPool, SlotRef, ToPool},
    stage::{FromStage, ToStage},
};

/// A message on a connection.
#[derive(Debug)]
pub(crate) enum Packet {
    ToCoordinator(Box<ToCoordinator>),
    ToWorker(Box<ToWorker>),
    ToPool(Box<ToPool>),
    FromPool(Box<FromPool>),
    ToStage(Box<ToStage>),
    FromStage(Box<FromStage>),
    /// A clean end by the other side.
    End,
}

/// A block as a reader has copied it, not yet validated.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) found: Found,
    pub(crate) copied: Copied,
    pub(crate) bytes: Bytes,
}

pub(crate) struct Io {
    /// The world's time.
    pub(crate) now: Duration,
    /// The time by the clock of the acting process.
    pub(crate) here: Duration,
    pub(crate) queue: Queue<Event>,
    pub(crate) network: Network,
    /// The state of fault injection; `None` in a world without faults, in which nothing is checked.
    pub(crate) faulty: Option<Faulty>,
    /// The states of coordinators, workers, pool nodes and stages.
    lives: [Vec<Life>; 4],
    flows: Flows<Transfer>,
    hosts: Vec<Nic>,
    /// The buses, by worker.
    buses: Vec<Bus>,
    /// The host of each pool node.
    pools: Vec<usize>,
    arenas: Vec<Arena>,
    latency: Duration,
    local_latency: Duration,
    nic_bytes_per_s: f64,
}

/// Fault injection, and the records with which rules are checked.
pub(crate) struct Faulty {
    pub(crate) random: Random,
    pub(crate) truth: Truth,
    pub(crate) planted: Option<Mutation>,
    /// Descriptions of the rules that were broken.
    pub(crate) violations: Vec<String>,
    /// Published slots: blocks must be published before they are acknowledged.
    pub(crate) published: HashSet<(usize, SlotRef)>,
    /// Every epoch that any coordinator has assigned.
    pub(crate) epochs: HashSet<Epoch>,
    /// The epoch assigned on each connection.
    pub(crate) granted: HashMap<ConnId, Epoch>,
    /// The events of the run as text, if requested.
    pub(crate) trace: Option<Vec<String>>,
}

#[derive(Debug)]
struct Nic {
    out: LinkIndex,
    into: LinkIndex,
}

/// The path between a worker's devices and its host's memory and network.
#[derive(Debug)]
struct Bus {
    host: usize,
    out: LinkIndex,
    into: LinkIndex,
}

impl Packet {
    /// A hash of enough of the message to distinguish two runs.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Packet::ToCoordinator(message) => match &**message {
                ToCoordinator::Event { epoch, event: WorkerEvent::Tokens(tokens) } => {
                    tokens.iter().fold(epoch.0, |digest, token| mix(digest ^ u64::from(token.token)))
                }
                ToCoordinator::Event { event: WorkerEvent::PoolEvents { from, events }, .. } => mix(*from ^ (events.len() as u64) << 32),
                ToCoordinator::Event { .. } | ToCoordinator::Register { .. } => 1,
            },
            Packet::ToWorker(message) => match &**message {
                ToWorker::Prefill(job) => mix(job.request.0 ^ u64::from(job.blocks) << 48),
                ToWorker::Decode(job) => mix(job.sequence.0 ^ u64::from(job.expected_blocks) << 48),
                _ => 2,
            },
            Packet::ToPool(_) => 3,
            Packet::FromPool(_) => 4,
            Packet::End => 5,
            Packet::ToStage(_) => 6,
            Packet::FromStage(_) => 7,
        }
    }
}

impl Io {
    pub(crate) fn new(settings: &NetworkSettings) -> Self {
        let micros = |us: f64| Duration::from_secs_f64(us.max(0.0) / 1e6);
        Self {
            now: Duration::ZERO,
            here: Duration::ZERO,
            queue: Queue::default(),
            network: Network::default(),
            faulty: None,
            lives: Default::default(),
            flows: Flows::default(),
            hosts: Vec::new(),
            buses: Vec::new(),
            pools: Vec::new(),
            arenas: Vec::new(),
            latency: micros(settings.latency_us),
            local_latency: micros(settings.local_latency_us),
            nic_bytes_per_s: settings.nic_gb_per_s * 1e9,
        }
    }

    pub(crate) fn add_coordinator(&mut self) -> CoordinatorIndex {
        self.lives[0].push(Life::default());
        CoordinatorIndex(self.lives[0].len() - 1)
    }

    /// Adds a host with a pool node.
    pub(crate) fn add_host(&mut self) -> PoolIndex {
        let (out, into) = (self.flows.add_link(self.nic_bytes_per_s), self.flows.add_link(self.nic_bytes_per_s));
        self.hosts.push(Nic { out, into });
        self.pools.push(self.hosts.len() - 1);
        self.lives[2].push(Life::default());
        PoolIndex(self.pools.len() - 1)
    }

    pub(crate) fn add_worker(&mut self, host: usize, bus_bytes_per_s: f64) -> WorkerIndex {
        let (out, into) = (self.flows.add_link(bus_bytes_per_s), self.flows.add_link(bus_bytes_per_s));
        self.buses.push(Bus { host, out, into });
        self.lives[1].push(Life::default());
        WorkerIndex(self.buses.len() - 1)
    }

    pub(crate) fn add_stage(&mut self) -> StageIndex {
        self.lives[3].push(Life::default());
        StageIndex(self.lives[3].len() - 1)
    }

    pub(crate) fn life(&self, process: Process) -> &Life {
        let (kind, number) = place(process);
        &self.lives[kind][number]
    }

    pub(crate) fn life_mut(&mut self, process: Process) -> &mut Life {
        let (kind, number) = place(process);
        &mut self.lives[kind][number]
    }

    /// Sets the acting process, whose clock determines `here`.
    pub(crate) fn enter(&mut self, process: Process) {
        self.here = self.life(process).clock.at(self.now);
    }

    /// Sends the headers of a put on streams. The bytes follow them.
    pub(crate) fn stream(&mut self, put: Transfer) {
        let conn = put.connection();
        let delay = self.delay_on(conn);
        self.after(delay, Event::Header { conn, put });
    }

    pub(crate) fn after(&mut self, delay: Duration, event: Event) {
        self.queue.push(self.now + delay, event);
    }

    /// Schedules a timer of a process, which is void if the process ends before.
    pub(crate) fn timer(&mut self, process: Process, delay: Duration, timer: Timer) {
        let incarnation = self.life(process).incarnation;
        self.after(delay, Event::Timer { process, incarnation, timer });
    }

    pub(crate) fn add_arena(&mut self, slots: u32) -> usize {
        self.arenas.push(Arena::new(slots, self.faulty.is_some()));
        self.arenas.len() - 1
    }

    pub(crate) fn arena(&mut self, arena: usize) -> &mut Arena {
        &mut self.arenas[arena]
    }

    /// The result of a reader's copy of a slot, whose bytes were `before` when the copy started.
    pub(crate) fn copy(&self, arena: usize, found: Found, before: Bytes) -> Received {
        let arena = &self.arenas[arena];
        let after = arena.read(found.at.slot);
        // If the slot changed during the copy, the bytes are a mixture.
        let bytes = if before == after { after } else { after.map(|block| block.map(|word| mix(word ^ before.map_or(0, |b| b[0])))) };
        let copied = Copied {
            checksum: if self.faulty.is_some() { checksum(bytes) } else { found.checksum },
            generation_after: arena.generation(found.at.slot),
        };
        Received { found, copied, bytes }
    }

    /// Starts to connect, which fails after [`CONNECT_MAX`], as in production.
    pub(crate) fn connect(&mut self, client: Process, server: Process) -> ConnId {
        let conn = self.network.connect((client, self.life(client).incarnation), server);
        let delay = self.delay(client, server);
        self.after(2 * delay, Event::Handshake { conn, until: self.now + CONNECT_MAX });
        conn
    }

    /// Attempts to complete a handshake.
    pub(crate) fn shake_hands(&mut self, conn: ConnId, until: Duration) {
        let ends = &self.network.connections[conn.0].ends;
        let (client, server, wanted) = (ends[CLIENT].process, ends[SERVER].process, ends[CLIENT].open);
        if !wanted {
            return;
        }
        let is_reachable = !self.network.is_cut(conn, CLIENT) && !self.network.is_cut(conn, SERVER);
        if is_reachable && [client, server].iter().all(|process| self.life(*process).state == State::Running) {
            let incarnation = self.life(server).incarnation;
            let end = self.network.end_mut(conn, SERVER);
            (end.open, end.incarnation) = (true, incarnation);
            self.after(Duration::ZERO, Event::Connected { conn, established: true });
        } else if self.now >= until {
            self.network.end_mut(conn, CLIENT).open = false;
            self.after(Duration::ZERO, Event::Connected { conn, established: false });
        } else {
            self.after(HANDSHAKE_AGAIN, Event::Handshake { conn, until });
        }
    }

    /// Sends a message to the end `to`.
    pub(crate) fn send(&mut self, conn: ConnId, to: usize, packet: Packet) {
        if !self.network.end(conn, 1 - to).open {
            return;
        }
        let delay = self.delay_on(conn);
        let end = self.network.end_mut(conn, to);
        let number = end.sent;
        end.sent += 1;
        self.after(delay, Event::Packet { conn, to, number, packet });
    }

    pub(crate) fn tell_coordinator(&mut self, conn: ConnId, message: ToCoordinator) {
        self.send(conn, SERVER, Packet::ToCoordinator(Box::new(message)));
    }

    pub(crate) fn tell_worker(&mut self, conn: ConnId, message: ToWorker) {
        self.send(conn, CLIENT, Packet::ToWorker(Box::new(message)));
    }

    pub(crate) fn call_pool(&mut self, conn: ConnId, message: ToPool) {
        self.send(conn, SERVER, Packet::ToPool(Box::new(message)));
    }

    pub(crate) fn answer(&mut self, conn: ConnId, message: FromPool) {
        self.send(conn, CLIENT, Packet::FromPool(Box::new(message)));
    }

    /// Closes one end. The other one is notified at once or, if the path is broken or `silently` is set, notices by the silence.
    pub(crate) fn close(&mut self, conn: ConnId, end: usize, silently: bool) {
        if !std::mem::replace(&mut self.network.end_mut(conn, end).open, false) {
            return;
        }
        if !silently && !self.network.is_cut(conn, 1 - end) {
            let delay = self.delay_on(conn);
            self.after(delay, Event::Ended { conn, at: 1 - end });
        }
        self.review();
    }

    /// Updates the ends that receive nothing, after a change of processes, paths or connections.
    pub(crate) fn review(&mut self) {
        if self.faulty.is_none() {
            return;
        }
        for number in 0..self.network.connections.len() {
            for end in [CLIENT, SERVER] {
                let (conn, other) = (ConnId(number), self.network.end(ConnId(number), 1 - end));
                let life = self.life(other.process);
                let is_running = life.state == State::Running && life.incarnation == other.incarnation;
                let is_silent = !other.open || !is_running || self.network.is_cut(conn, end);
                let this = self.network.end(conn, end);
                if !this.open || (end == CLIENT && other.incarnation == u32::MAX) {
                    continue;
                }
                match (this.silent, is_silent) {
                    (None, true) => {
                        self.network.end_mut(conn, end).silent = Some(self.now);
                        self.after(IDLE_MAX, Event::Silence { conn, at: end, since: self.now });
                    }
                    (Some(_), false) => {
                        self.network.end_mut(conn, end).silent = None;
                        self.after(Duration::ZERO, Event::Resumed { conn, to: end });
                    }
                    _ => {}
                }
            }
        }
    }

    pub(crate) fn is_near(&self, worker: WorkerIndex, pool: PoolIndex) -> bool {
        self.buses[worker.0].host == self.pools[pool.0]
    }

    fn delay(&self, a: Process, b: Process) -> Duration {
        match (a, b) {
            (Process::Worker(worker), Process::Pool(pool)) if self.is_near(worker, pool) => self.local_latency,
            _ => self.latency,
        }
    }

    fn delay_on(&mut self, conn: ConnId) -> Duration {
        let ends = &self.network.connections[conn.0].ends;
        let delay = self.delay(ends[CLIENT].process, ends[SERVER].process);
        match &mut self.faulty {
            // Most delays are short; now and then a datagram is lost and sent again.
            Some(faulty) => {
                delay.mul_f64(1.0 + faulty.random.exponential(1.0)) + if faulty.random.unit() < LOST { LOSS } else { Duration::ZERO }
            }
            None => delay,
        }
    }

    /// Starts the transfer of bytes over links.
    pub(crate) fn transfer(&mut self, transfer: Transfer, bytes: u64) {
        let ends = &self.network.connections[transfer.connection().0].ends;
        let (Process::Worker(worker), Process::Pool(pool)) = (ends[CLIENT].process, ends[SERVER].process) else {
            unreachable!("workers fetch from pool nodes")
        };
        let (bus, nic) = (&self.buses[worker.0], &self.hosts[self.pools[pool.0]]);
        let near = self.is_near(worker, pool);
        let links = match (&transfer, near) {
            (Transfer::Get { .. }, true) => vec![bus.into],
            (Transfer::Put { .. }, true) => vec![bus.out],
            (Transfer::Get { .. }, false) => vec![nic.out, self.hosts[bus.host].into, bus.into],
            (Transfer::Put { .. }, false) => vec![bus.out, self.hosts[bus.host].out, nic.into],
        };
        let deadlines = self.flows.start(self.now, links, bytes, transfer);
        self.await_all(deadlines);
    }

    /// Applies a flow's deadline. Returns the transfer that has ended, if the deadline still holds.
    pub(crate) fn transferred(&mut self, deadline: Deadline) -> Option<Transfer> {
        let (transfer, deadlines) = self.flows.end(self.now, deadline)?;
        self.await_all(deadlines);
        Some(transfer)
    }

    /// The number of bytes that hosts have sent over the network.
    pub(crate) fn network_bytes(&self) -> f64 {
        self.hosts.iter().map(|nic| self.flows.bytes(nic.out)).sum()
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.flows.is_idle()
    }

    fn await_all(&mut self, deadlines: Vec<Deadline>) {
        for deadline in deadlines {
            self.queue.push(deadline.at, Event::TransferDue(deadline));
        }
    }

    /// Whether this bug is planted.
    pub(crate) fn has(&self, mutation: Mutation) -> bool {
        self.faulty.as_ref().is_some_and(|faulty| faulty.planted == Some(mutation))
    }

    /// Whether a worker's message has a different epoch than the one assigned on this connection.
    pub(crate) fn is_stale(&self, conn: ConnId, message: &ToCoordinator) -> bool {
        let (Some(faulty), ToCoordinator::Event { epoch, .. }) = (&self.faulty, message) else { return false };
        faulty.granted.get(&conn) != Some(epoch)
    }

    /// Records the violation of a rule.
    pub(crate) fn violated(&mut self, rule: impl FnOnce() -> String) {
        if let Some(faulty) = &mut self.faulty {
            faulty.violations.push(rule());
        }
    }

    /// Adds a line to the trace, if it was requested.
    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = self.faulty.as_mut().and_then(|faulty| faulty.trace.as_mut()) {
            trace.push(format!("{:>10.4}  {}", now.as_secs_f64(), line()));
        }
    }
}

/// The interval between attempts to reach a process that does not answer.
const HANDSHAKE_AGAIN: Duration = Duration::from_millis(200);
/// The share of messages that are lost once in transit.
const LOST: f64 = 0.01;
/// The additional delay of a lost message.
const LOSS: Duration = Duration::from_millis(30);

fn place(process: Process) -> (usize, usize) {
    match process {
        Process::Coordinator(index) => (0, index.0),
        Process::Worker(index) => (1, index.0),
        Process::Pool(index) => (2, index.0),
        Process::Stage(index) => (3, index.0),
    }
}

/// The address of a pool node, made from its number.
pub(crate) fn address(PoolIndex(pool): PoolIndex) -> SocketAddr {
    let [_, a, b, c] = (pool as u32).to_be_bytes();
    ([10, a, b, c], 1).into()
}

pub(crate) fn pool_at(address: SocketAddr) -> PoolIndex {
    let SocketAddr::V4(v4) = address else { unreachable!("pool nodes register the addresses above") };
    let [_, a, b, c] = v4.ip().octets();
    PoolIndex(u32::from_be_bytes([0, a, b, c]) as usize)
}
