//! A worker's way to pool nodes: a model of the pool client and its tasks, which go on while the engine computes.
//!
//! ```text
//!   put   PutStart ──► PutStarted   bytes ──► PutEnded                  a batch at a time for each put
//!   get   Get ──► Found, or bytes at once   bytes ──► released          as blocks come
//! ```

use super::{
    PoolIndex, Transfer, WorkerIndex,
    engine::Input,
    io::{self, Io},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use tidemill_engine::job::JobId;
use tidemill_kvpool::client::{Arrival, FetchId, Part, Source};
use tidemill_proto::{
    block::BlockKey,
    message::{self, Misses, Moved, PoolNode},
    pool::{CallId, Direction, Found, FromPool, Lineage, Reservation, Room, SlotRef, Tier, ToPool, Transport, Via, Written},
};

#[derive(Debug)]
pub(crate) struct PoolClient {
    worker: WorkerIndex,
    block_bytes: u64,
    /// Blocks that may wait to be put at best effort.
    offers_max: usize,
    calls: BTreeMap<(PoolIndex, CallId), Call>,
    calls_begun: u64,
    fetches: BTreeMap<FetchId, Vec<(PoolIndex, CallId)>>,
    offers: VecDeque<Offer>,
    /// One put at best effort is under way.
    offering: bool,
    moved: message::Transfer,
    misses: Misses,
}

#[derive(Debug)]
enum Call {
    Match { job: JobId },
    Get { fetch: FetchId, first: usize, left: usize },
    Put(Put),
}

#[derive(Debug)]
struct Put {
    /// Wants to know how it ended; `None`: nobody does.
    job: Option<JobId>,
    blocks: usize,
    refused: usize,
    started: Duration,
}

#[derive(Debug)]
struct Offer {
    node: PoolNode,
    lineage: Lineage,
    key: BlockKey,
}

/// Blocks of one put at best effort.
const OFFER_BLOCKS: usize = 32;

impl PoolClient {
    pub(crate) fn new(worker: WorkerIndex, block_bytes: u64, offers_max: usize) -> Self {
        Self {
            worker,
            block_bytes,
            offers_max,
            calls: BTreeMap::new(),
            calls_begun: 0,
            fetches: BTreeMap::new(),
            offers: VecDeque::new(),
            offering: false,
            moved: message::Transfer::default(),
            misses: Misses::default(),
        }
    }

    /// Asks a node how many leading blocks it holds. Answers at once if none are asked about.
    pub(crate) fn ask(&mut self, io: &mut Io, job: JobId, node: PoolNode, keys: Vec<BlockKey>) -> Option<Input> {
        if keys.is_empty() {
            return Some(Input::Matched { job, held: Ok(0) });
        }
        let (pool, call) = self.begin(node, Call::Match { job });
        io.call_pool(self.worker, pool, ToPool::Match { call, keys });
        None
    }

    pub(crate) fn fetch(&mut self, io: &mut Io, fetch: FetchId, parts: Vec<Part>) {
        let mut first = 0;
        for Part { node, keys, wait } in parts {
            let left = keys.len();
            let (pool, call) = self.begin(node, Call::Get { fetch, first, left });
            first += left;
            self.fetches.entry(fetch).or_default().push((pool, call));
            let via = if io.is_near(self.worker, pool) { Via::Slots } else { Via::Streams };
            io.call_pool(self.worker, pool, ToPool::Get { call, keys, wait_ms: wait.as_millis() as u64, via });
        }
    }

    pub(crate) fn cancel_fetch(&mut self, io: &mut Io, fetch: FetchId) {
        for (pool, call) in self.fetches.remove(&fetch).unwrap_or_default() {
            if self.calls.remove(&(pool, call)).is_some() {
                io.call_pool(self.worker, pool, ToPool::CancelGet { call });
            }
        }
    }

    /// Puts blocks and tells the job how it went.
    pub(crate) fn put(&mut self, io: &mut Io, job: JobId, node: PoolNode, lineage: Lineage, keys: Vec<BlockKey>) {
        self.start_put(io, Some(job), node, lineage, keys);
    }

    /// Puts blocks as far as the queue has room.
    pub(crate) fn offer(&mut self, io: &mut Io, node: PoolNode, first: Lineage, keys: &[BlockKey]) {
        let room = self.offers_max.saturating_sub(self.offers.len());
        let offers = keys.iter().zip(first.of_each(keys)).take(room);
        self.offers.extend(offers.map(|(&key, lineage)| Offer { node, lineage, key }));
        self.next_offer(io);
    }

    /// A node's answer. Returns what the engine hears of it.
    pub(crate) fn answered(&mut self, io: &mut Io, pool: PoolIndex, message: FromPool) -> Vec<Input> {
        match message {
            FromPool::Matched { call, blocks } => match self.calls.remove(&(pool, call)) {
                Some(Call::Match { job }) => vec![Input::Matched { job, held: Ok(blocks as usize) }],
                _ => Vec::new(),
            },
            FromPool::Found { call, lease, blocks } => {
                let bytes = self.block_bytes * blocks.len() as u64;
                io.transfer(Transfer::Get { pool, worker: self.worker, call, lease, blocks, started: io.now }, bytes);
                Vec::new()
            }
            FromPool::Missed { call, indexes } => {
                self.misses.absent += indexes.len() as u64;
                self.arrive(pool, call, &indexes.into_iter().map(|index| (index, None)).collect::<Vec<_>>())
            }
            FromPool::PutStarted { call, answers, .. } => {
                let Some(Call::Put(put)) = self.calls.get_mut(&(pool, call)) else { return Vec::new() };
                put.refused += answers.iter().filter(|answer| **answer == Reservation::Full).count();
                let slots: Vec<SlotRef> = answers.iter().filter_map(slot).collect();
                if slots.is_empty() {
                    return self.end_put(io, pool, call);
                }
                let written: Vec<Written> = slots.into_iter().map(|at| Written { at, checksum: 0 }).collect();
                let bytes = self.block_bytes * written.len() as u64;
                io.transfer(Transfer::Put { pool, worker: self.worker, call, written }, bytes);
                Vec::new()
            }
            FromPool::PutEnded { call, refused, .. } => {
                if let Some(Call::Put(put)) = self.calls.get_mut(&(pool, call)) {
                    put.refused += refused as usize;
                }
                self.end_put(io, pool, call)
            }
            FromPool::Welcome { .. } | FromPool::Refused { .. } => Vec::new(),
        }
    }

    /// Blocks of a get are here, valid or not.
    pub(crate) fn received(
        &mut self,
        io: &Io,
        pool: PoolIndex,
        call: CallId,
        blocks: &[Found],
        valid: &[bool],
        started: Duration,
    ) -> Vec<Input> {
        let near = io.is_near(self.worker, pool);
        self.count(near, Direction::Get, blocks.len(), io.now - started);
        self.misses.stale += valid.iter().filter(|valid| !**valid).count() as u64;
        let arrivals: Vec<_> = blocks.iter().zip(valid).map(|(found, &valid)| (found.index, valid.then(|| arrival(found, near)))).collect();
        self.arrive(pool, call, &arrivals)
    }

    /// The counts so far, as reports carry them.
    pub(crate) fn counters(&self) -> (message::Transfer, Misses) {
        (self.moved, self.misses)
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.calls.is_empty() && self.offers.is_empty()
    }

    fn arrive(&mut self, pool: PoolIndex, call: CallId, results: &[(u32, Option<Arrival>)]) -> Vec<Input> {
        let Some(Call::Get { fetch, first, left }) = self.calls.get_mut(&(pool, call)) else { return Vec::new() };
        let (fetch, first) = (*fetch, *first);
        *left -= results.len();
        if *left == 0 {
            self.calls.remove(&(pool, call));
            if let Some(calls) = self.fetches.get_mut(&fetch) {
                calls.retain(|other| *other != (pool, call));
                if calls.is_empty() {
                    self.fetches.remove(&fetch);
                }
            }
        }
        results.iter().map(|&(index, arrival)| Input::Fetched { fetch, index: first + index as usize, arrival }).collect()
    }

    fn start_put(&mut self, io: &mut Io, job: Option<JobId>, node: PoolNode, lineage: Lineage, keys: Vec<BlockKey>) {
        let put = Put { job, blocks: keys.len(), refused: 0, started: io.now };
        let (pool, call) = self.begin(node, Call::Put(put));
        io.call_pool(self.worker, pool, ToPool::PutStart { call, lineage, room: Room::Made, keys });
    }

    fn end_put(&mut self, io: &mut Io, pool: PoolIndex, call: CallId) -> Vec<Input> {
        let Some(Call::Put(Put { job, blocks, refused, started })) = self.calls.remove(&(pool, call)) else { return Vec::new() };
        self.count(io.is_near(self.worker, pool), Direction::Put, blocks - refused, io.now - started);
        let Some(job) = job else {
            self.offering = false;
            self.next_offer(io);
            return Vec::new();
        };
        let outcome = if refused == 0 { Ok(()) } else { Err(format!("pool node {} has no room for {refused} blocks", io::address(pool))) };
        vec![Input::PutDone { job, blocks, outcome }]
    }

    /// The next run of offered blocks that follow each other.
    fn next_offer(&mut self, io: &mut Io) {
        if self.offering {
            return;
        }
        let Some(Offer { node, lineage, key }) = self.offers.pop_front() else { return };
        let mut keys = vec![key];
        while keys.len() < OFFER_BLOCKS
            && let Some(next) = self.offers.pop_front_if(|next| (next.node, next.lineage.parent) == (node, keys.last().copied()))
        {
            keys.push(next.key);
        }
        self.offering = true;
        self.start_put(io, None, node, lineage, keys);
    }

    fn begin(&mut self, node: PoolNode, call: Call) -> (PoolIndex, CallId) {
        let (pool, id) = (io::pool_at(node.addr), CallId(self.calls_begun));
        self.calls_begun += 1;
        self.calls.insert((pool, id), call);
        (pool, id)
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
    match answer {
        Reservation::Write(at) => Some(*at),
        Reservation::Held | Reservation::InFlight | Reservation::Full => None,
    }
}

fn arrival(found: &Found, near: bool) -> Arrival {
    let source = match (near, found.tier) {
        (false, _) => Source::Remote,
        (true, Tier::Dram) => Source::Dram,
        (true, Tier::Nvme) => Source::Nvme,
    };
    Arrival { origin: found.origin, source }
}
