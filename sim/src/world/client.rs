//! A worker's pool client: a model of production's client and its tasks, which run while the engine computes. The checks of copied blocks
//! are production's.
//!
//! ```text
//!   node  connect ──► Hello ──► Welcome; again after a failure, at the earliest after a second
//!   put   PutStart ──► PutStarted   bytes ──► PutEnded                  a batch at a time for each put
//!   get   Get ──► Found, or bytes at once   bytes ──► released          as blocks arrive
//! ```

use super::{
    PoolIndex, Process, Timer, Transfer, WorkerIndex,
    bytes::{Bytes, checksum},
    engine::Input,
    io::{self, Io, Received},
    network::{CLIENT, ConnId},
};
use crate::faults::mutation::Mutation;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};
use tidemill_engine::job::JobId;
use tidemill_kvpool::{
    client::{Arrival, FetchId, Part, Source},
    core::validate::{Copied, Invalid, validate},
};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint},
    message::{self, Misses, Moved, PoolNode},
    pool::{
        BlockFormat, CallId, Direction, Found, FromPool, LeaseId, Lineage, Reservation, Room, SlotRef, Tier, ToPool, Transport, Via,
        Written,
    },
};

pub(crate) struct PoolClient {
    worker: WorkerIndex,
    layout: LayoutFingerprint,
    block_bytes: u64,
    /// The most blocks that may wait for a put at best effort.
    offers_max: usize,
    nodes: BTreeMap<PoolIndex, Node>,
    calls: BTreeMap<CallId, Call>,
    calls_begun: u64,
    fetches: BTreeMap<FetchId, Vec<CallId>>,
    offers: VecDeque<Offer>,
    /// Whether a put at best effort is in progress.
    offering: bool,
    moved: message::Transfer,
    misses: Misses,
}

#[derive(Clone, Copy)]
enum Node {
    Connecting(ConnId),
    Connected(ConnId, usize),
    Failed(Duration),
}

struct Call {
    pool: PoolIndex,
    started: Duration,
    /// The message that waits for the connection.
    unsent: Option<ToPool>,
    what: What,
}

enum What {
    Match { job: JobId },
    Get { fetch: FetchId, first: usize, keys: Vec<BlockKey>, open: BTreeSet<u32> },
    Put(Put),
}

struct Put {
    /// The job to notify of the outcome; `None` for a put at best effort.
    job: Option<JobId>,
    blocks: Vec<(BlockKey, Bytes)>,
    refused: usize,
    /// The slots reserved for the put.
    reserved: Vec<SlotRef>,
}

struct Offer {
    node: PoolNode,
    lineage: Lineage,
    block: (BlockKey, Bytes),
}

/// The most blocks of a put at best effort.
const OFFER_BLOCKS: usize = 32;
/// The time after which a node that does not answer counts as gone, as in production.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The wait before another attempt to reach a node, as in production.
const RETRY: Duration = Duration::from_secs(1);

impl PoolClient {
    pub(crate) fn new(worker: WorkerIndex, layout: LayoutFingerprint, block_bytes: u64, offers_max: usize) -> Self {
        Self {
            worker,
            layout,
            block_bytes,
            offers_max,
            nodes: BTreeMap::new(),
            calls: BTreeMap::new(),
            calls_begun: 0,
            fetches: BTreeMap::new(),
            offers: VecDeque::new(),
            offering: false,
            moved: message::Transfer::default(),
            misses: Misses::default(),
        }
    }

    /// Asks a node for the number of leading blocks that it holds.
    pub(crate) fn ask(&mut self, io: &mut Io, job: JobId, node: PoolNode, keys: Vec<BlockKey>) -> Vec<Input> {
        if keys.is_empty() {
            return vec![Input::Matched { job, held: Ok(0) }];
        }
        self.begin(io, node, ANSWER_MAX, What::Match { job }, |call| ToPool::Match { call, keys }).1
    }

    pub(crate) fn fetch(&mut self, io: &mut Io, fetch: FetchId, parts: Vec<Part>) -> Vec<Input> {
        let (mut first, mut inputs) = (0, Vec::new());
        for Part { node, keys, wait } in parts {
            let open = (0..keys.len() as u32).collect();
            let what = What::Get { fetch, first, keys: keys.clone(), open };
            first += keys.len();
            let via = if io.is_near(self.worker, io::pool_at(node.addr)) { Via::Slots } else { Via::Streams };
            let get = |call| ToPool::Get { call, keys, wait_ms: wait.as_millis() as u64, via };
            let (call, failed) = self.begin(io, node, wait + ANSWER_MAX, what, get);
            inputs.extend(failed);
            if self.calls.contains_key(&call) {
                self.fetches.entry(fetch).or_default().push(call);
            }
        }
        inputs
    }

    pub(crate) fn cancel_fetch(&mut self, io: &mut Io, fetch: FetchId) {
        for call in self.fetches.remove(&fetch).unwrap_or_default() {
            let Some(Call { pool, unsent: None, .. }) = self.calls.remove(&call) else { continue };
            if let Some((conn, _)) = self.connected_to(pool) {
                io.call_pool(conn, ToPool::CancelGet { call });
            }
        }
    }

    /// Puts blocks, and notifies the job of the outcome.
    pub(crate) fn put(&mut self, io: &mut Io, job: JobId, node: PoolNode, lineage: Lineage, blocks: Vec<(BlockKey, Bytes)>) -> Vec<Input> {
        self.start_put(io, Some(job), node, lineage, blocks)
    }

    /// Queues blocks for puts at best effort, as far as there is room.
    pub(crate) fn offer(&mut self, io: &mut Io, node: PoolNode, first: Lineage, blocks: Vec<(BlockKey, Bytes)>) {
        let room = self.offers_max.saturating_sub(self.offers.len());
        let keys: Vec<BlockKey> = blocks.iter().map(|(key, _)| *key).collect();
        let offers = blocks.into_iter().zip(first.of_each(&keys)).take(room);
        self.offers.extend(offers.map(|(block, lineage)| Offer { node, lineage, block }));
        self.next_offer(io);
    }

    pub(crate) fn connected(&mut self, io: &mut Io, conn: ConnId, established: bool) -> Vec<Input> {
        let Some(pool) = self.node_at(conn) else { return Vec::new() };
        if !established {
            return self.lose(io, pool);
        }
        io.call_pool(conn, ToPool::Hello(BlockFormat::whole(self.layout, self.block_bytes).into()));
        Vec::new()
    }

    /// Handles the end of a connection, which ends all calls on it.
    pub(crate) fn ended(&mut self, io: &mut Io, conn: ConnId) -> Vec<Input> {
        self.node_at(conn).map_or_else(Vec::new, |pool| self.lose(io, pool))
    }

    /// Handles a node's answer. Returns inputs for the engine.
    pub(crate) fn answered(&mut self, io: &mut Io, conn: ConnId, message: FromPool) -> Vec<Input> {
        let Some(pool) = self.node_at(conn) else { return Vec::new() };
        match message {
            FromPool::Welcome { arena } => {
                self.nodes.insert(pool, Node::Connected(conn, arena.fd as usize));
                for call in self.calls.values_mut().filter(|call| call.pool == pool) {
                    if let Some(message) = call.unsent.take() {
                        io.call_pool(conn, message);
                    }
                }
                Vec::new()
            }
            FromPool::RailsOpened { .. } | FromPool::RailsClosed => unreachable!("no simulated client asks for RDMA"),
            FromPool::Matched { call, blocks } => match self.calls.remove(&call) {
                Some(Call { what: What::Match { job }, .. }) => vec![Input::Matched { job, held: Ok(blocks as usize) }],
                _ => Vec::new(),
            },
            FromPool::Found { call, lease, blocks } => {
                let Some(arena) = self.calls.get(&call).and_then(|_| self.connected_to(pool)).map(|(_, arena)| arena) else {
                    // The call has ended.
                    io.call_pool(conn, ToPool::Release { lease });
                    return Vec::new();
                };
                let bytes = self.block_bytes * blocks.len() as u64;
                let blocks = blocks.into_iter().map(|found| (found, io.arena(arena).read(found.at.slot))).collect();
                let transfer = Transfer::Get { conn, arena, call, lease, blocks, via: Via::Slots, started: io.now };
                io.transfer(transfer, bytes);
                Vec::new()
            }
            FromPool::Missed { call, indexes } => {
                self.misses.absent += indexes.len() as u64;
                self.arrive(call, indexes.into_iter().map(|index| (index, None)).collect())
            }
            FromPool::PutStarted { call, deadline_ms, answers } => {
                self.put_started(io, conn, call, Duration::from_millis(deadline_ms), &answers)
            }
            FromPool::PutEnded { call, refused, .. } => {
                if let Some(Call { what: What::Put(put), .. }) = self.calls.get_mut(&call) {
                    put.refused += refused as usize;
                }
                self.end_put(io, conn, call)
            }
            FromPool::Refused { .. } => Vec::new(),
        }
    }

    fn put_started(&mut self, io: &mut Io, conn: ConnId, call: CallId, deadline: Duration, answers: &[Reservation]) -> Vec<Input> {
        let slots: Vec<SlotRef> = answers.iter().filter_map(slot).collect();
        let Some(Call { started, what: What::Put(put), pool, .. }) = self.calls.get_mut(&call) else {
            io.call_pool(conn, ToPool::PutRevoke { blocks: slots });
            return Vec::new();
        };
        let Some(Node::Connected(_, arena)) = self.nodes.get(pool).copied() else { return Vec::new() };
        put.refused += answers.iter().filter(|answer| **answer == Reservation::Full).count();
        put.reserved.clone_from(&slots);
        if slots.is_empty() {
            return self.end_put(io, conn, call);
        }
        let until = *started + deadline;
        if io.here >= until {
            put.refused += slots.len();
            io.call_pool(conn, ToPool::PutRevoke { blocks: slots });
            return self.end_put(io, conn, call);
        }
        let wanted = put.blocks.iter().zip(answers).filter_map(|((_, bytes), answer)| Some((slot(answer)?, *bytes)));
        let blocks: Vec<_> = wanted.map(|(at, bytes)| (Written { at, checksum: checksum(bytes) }, bytes)).collect();
        let via = if io.is_near(self.worker, *pool) { Via::Slots } else { Via::Streams };
        let acknowledged = put.job.filter(|_| io.has(Mutation::AckBeforePublish));
        let bytes = self.block_bytes * blocks.len() as u64;
        let put = Transfer::Put { conn, arena, call, blocks, via };
        match via {
            Via::Slots => io.transfer(put, bytes),
            Via::Streams => io.stream(put),
        }
        if acknowledged.is_some() {
            return self.end_put(io, conn, call);
        }
        Vec::new()
    }

    /// Writes the bytes of a put into their slots, which this process can access itself.
    pub(crate) fn written(&mut self, io: &mut Io, conn: ConnId, arena: usize, call: CallId, blocks: Vec<(Written, Bytes)>) {
        for (written, bytes) in &blocks {
            io.arena(arena).write(written.at.slot, *bytes);
        }
        let blocks = blocks.into_iter().map(|(written, _)| written).collect();
        io.call_pool(conn, ToPool::PutEnd { call, blocks });
    }

    /// Handles the arrival of a get's blocks, with a lease if this process has read them from their slots.
    pub(crate) fn received(
        &mut self,
        io: &mut Io,
        conn: ConnId,
        call: CallId,
        (blocks, lease): (Vec<Received>, Option<LeaseId>),
        started: Duration,
    ) -> Vec<Input> {
        if let Some(lease) = lease.filter(|_| !io.has(Mutation::DropLease)) {
            io.call_pool(conn, ToPool::Release { lease });
        }
        let Some(Call { what: What::Get { keys, .. }, pool, .. }) = self.calls.get(&call) else { return Vec::new() };
        let (near, mut arrivals) = (io.is_near(self.worker, *pool), Vec::with_capacity(blocks.len()));
        let count = blocks.len();
        for Received { found, mut copied, bytes } in blocks {
            if io.has(Mutation::SkipChecksum) {
                copied = Copied { checksum: found.checksum, ..copied };
            }
            let key = keys[found.index as usize];
            let arrival = match validate(copied, &found) {
                Ok(()) => {
                    if io.faulty.as_ref().is_some_and(|faulty| faulty.truth.contradicts(&key, bytes)) {
                        io.violated(|| format!("worker-{} takes wrong bytes for block {key:?} from {:?}", self.worker.0, found.at));
                    }
                    Some((arrival(&found, near), bytes))
                }
                Err(invalid) => {
                    io.note(|| format!("worker-{} gets a block that is {invalid:?}", self.worker.0));
                    self.misses.stale += 1;
                    if invalid == Invalid::Corrupt {
                        io.call_pool(conn, ToPool::Suspect { block: found.at });
                    }
                    None
                }
            };
            arrivals.push((found.index, arrival));
        }
        self.count(near, Direction::Get, count, io.now - started);
        self.arrive(call, arrivals)
    }

    /// Fails a call that was not answered in time.
    pub(crate) fn overdue(&mut self, io: &mut Io, call: CallId) -> Vec<Input> {
        self.calls.remove(&call).map_or_else(Vec::new, |ended| self.fail(io, call, ended))
    }

    /// The counters for reports.
    pub(crate) fn counters(&self) -> (message::Transfer, Misses) {
        (self.moved, self.misses)
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.calls.is_empty() && self.offers.is_empty()
    }

    /// The number of calls in progress and of waiting blocks.
    pub(crate) fn under_way(&self) -> (usize, usize) {
        (self.calls.len(), self.offers.len())
    }

    fn arrive(&mut self, call: CallId, results: Vec<(u32, Option<(Arrival, Bytes)>)>) -> Vec<Input> {
        let Some(Call { what: What::Get { fetch, first, open, .. }, .. }) = self.calls.get_mut(&call) else { return Vec::new() };
        let (fetch, first) = (*fetch, *first);
        let mut inputs = Vec::with_capacity(results.len());
        for (index, result) in results {
            if open.remove(&index) {
                let (arrival, bytes) = result.map_or((None, None), |(arrival, bytes)| (Some(arrival), bytes));
                inputs.push(Input::Fetched { fetch, index: first + index as usize, arrival, bytes });
            }
        }
        if open.is_empty() {
            self.calls.remove(&call);
            self.end_part(fetch, call);
        }
        inputs
    }

    fn end_part(&mut self, fetch: FetchId, call: CallId) {
        if let Some(calls) = self.fetches.get_mut(&fetch) {
            calls.retain(|other| *other != call);
            if calls.is_empty() {
                self.fetches.remove(&fetch);
            }
        }
    }

    fn start_put(
        &mut self,
        io: &mut Io,
        job: Option<JobId>,
        node: PoolNode,
        lineage: Lineage,
        blocks: Vec<(BlockKey, Bytes)>,
    ) -> Vec<Input> {
        let keys = blocks.iter().map(|(key, _)| *key).collect();
        let put = Put { job, blocks, refused: 0, reserved: Vec::new() };
        self.begin(io, node, 2 * ANSWER_MAX, What::Put(put), |call| ToPool::PutStart { call, lineage, room: Room::Made, keys }).1
    }

    fn end_put(&mut self, io: &mut Io, conn: ConnId, call: CallId) -> Vec<Input> {
        let arena = self.node_at(conn).and_then(|pool| self.connected_to(pool)).map(|(_, arena)| arena);
        let Some(Call { what: What::Put(put), pool, started, .. }) = self.calls.remove(&call) else { return Vec::new() };
        let Put { job, blocks, refused, reserved } = put;
        let took = io.here.saturating_sub(started);
        self.count(io.is_near(self.worker, pool), Direction::Put, blocks.len() - refused, took);
        let Some(job) = job else {
            self.offering = false;
            return self.next_offer(io);
        };
        if refused == 0
            && let (Some(faulty), Some(arena)) = (&mut io.faulty, arena)
            && let Some(at) = reserved.iter().find(|at| !faulty.published.contains(&(arena, **at)))
        {
            faulty.violations.push(format!("worker-{}: a put is acknowledged, and {at:?} is not published", self.worker.0));
        }
        let outcome = if refused == 0 { Ok(()) } else { Err(format!("pool node {} has no room for {refused} blocks", io::address(pool))) };
        vec![Input::PutDone { job, blocks: blocks.len(), outcome }]
    }

    /// Puts the next run of consecutive offered blocks.
    fn next_offer(&mut self, io: &mut Io) -> Vec<Input> {
        if self.offering {
            return Vec::new();
        }
        let Some(Offer { node, lineage, block }) = self.offers.pop_front() else { return Vec::new() };
        let mut blocks = vec![block];
        while blocks.len() < OFFER_BLOCKS
            && let Some(next) =
                self.offers.pop_front_if(|next| (next.node, next.lineage.parent) == (node, blocks.last().map(|(key, _)| *key)))
        {
            blocks.push(next.block);
        }
        self.offering = true;
        self.start_put(io, None, node, lineage, blocks)
    }

    /// Starts a call, which is sent now or once the node is connected. Returns the call, and inputs for the engine if it fails at once.
    fn begin(
        &mut self,
        io: &mut Io,
        node: PoolNode,
        patience: Duration,
        what: What,
        message: impl FnOnce(CallId) -> ToPool,
    ) -> (CallId, Vec<Input>) {
        let (pool, call) = (io::pool_at(node.addr), CallId(self.calls_begun));
        self.calls_begun += 1;
        let started = Call { pool, started: io.here, unsent: None, what };
        match self.nodes.get(&pool) {
            Some(Node::Failed(since)) if io.here.saturating_sub(*since) < RETRY => {
                let failed = self.fail(io, call, started);
                return (call, failed);
            }
            Some(Node::Connected(conn, _)) => {
                io.call_pool(*conn, message(call));
                self.calls.insert(call, started);
            }
            other => {
                if !matches!(other, Some(Node::Connecting(_))) {
                    let conn = io.connect(Process::Worker(self.worker), Process::Pool(pool));
                    self.nodes.insert(pool, Node::Connecting(conn));
                }
                self.calls.insert(call, Call { unsent: Some(message(call)), ..started });
            }
        }
        if io.faulty.is_some() {
            io.timer(Process::Worker(self.worker), patience, Timer::CallDue(call));
        }
        (call, Vec::new())
    }

    fn lose(&mut self, io: &mut Io, pool: PoolIndex) -> Vec<Input> {
        if let Some(Node::Connecting(conn) | Node::Connected(conn, _)) = self.nodes.insert(pool, Node::Failed(io.here)) {
            io.close(conn, CLIENT, false);
        }
        let lost: Vec<CallId> = self.calls.iter().filter(|(_, call)| call.pool == pool).map(|(id, _)| *id).collect();
        let mut inputs = Vec::new();
        for id in lost {
            if let Some(call) = self.calls.remove(&id) {
                inputs.extend(self.fail(io, id, call));
            }
        }
        inputs
    }

    /// Ends a call without an answer. Returns inputs for the engine.
    fn fail(&mut self, io: &mut Io, id: CallId, call: Call) -> Vec<Input> {
        let reason = format!("pool node {} is out of reach", io::address(call.pool));
        match call.what {
            What::Match { job } => vec![Input::Matched { job, held: Err(reason) }],
            What::Get { fetch, first, open, .. } => {
                self.misses.unreachable += open.len() as u64;
                self.end_part(fetch, id);
                if io.has(Mutation::ForgetUnreachable) {
                    return Vec::new();
                }
                open.into_iter().map(|index| Input::Fetched { fetch, index: first + index as usize, arrival: None, bytes: None }).collect()
            }
            What::Put(Put { job: Some(job), blocks, .. }) if !io.has(Mutation::ForgetPutDone) => {
                vec![Input::PutDone { job, blocks: blocks.len(), outcome: Err(reason) }]
            }
            What::Put(Put { job, .. }) => {
                if job.is_none() {
                    self.offering = false;
                    return self.next_offer(io);
                }
                Vec::new()
            }
        }
    }

    fn node_at(&self, conn: ConnId) -> Option<PoolIndex> {
        let is_at = |node: &Node| matches!(node, Node::Connecting(at) | Node::Connected(at, _) if *at == conn);
        self.nodes.iter().find(|(_, node)| is_at(node)).map(|(pool, _)| *pool)
    }

    fn connected_to(&self, pool: PoolIndex) -> Option<(ConnId, usize)> {
        match self.nodes.get(&pool) {
            Some(Node::Connected(conn, arena)) => Some((*conn, *arena)),
            _ => None,
        }
    }

    fn count(&mut self, near: bool, direction: Direction, blocks: usize, took: Duration) {
        let transport = if near { Transport::Shm } else { Transport::Quic };
        let Moved { bytes, transfers, seconds, .. } = &mut self.moved[(transport, direction)];
        *bytes += self.block_bytes * blocks as u64;
        *transfers += 1;
        *seconds += took.as_secs_f64();
    }
}

fn slot(answer: &Reservation) -> Option<SlotRef> {
    if let Reservation::Write(at) = answer { Some(*at) } else { None }
}

fn arrival(found: &Found, near: bool) -> Arrival {
    let source = match found.tier {
        _ if !near => Source::Remote,
        Tier::Dram => Source::Dram,
        Tier::Nvme => Source::Nvme,
        Tier::Object => Source::Object,
    };
    Arrival { origin: found.origin, source }
}
