//! A pool node: the production directory, and a model of its shell.

use super::{PoolIndex, Transfer, WorkerIndex, io::Io};
use std::time::Duration;
use tidemill_kvpool::core::directory::{Action, ClientId, Directory};
use tidemill_proto::{
    ids::Epoch,
    message::{Blocks, Report, TierBlocks, WorkerEvent},
    pool::{CallId, Found, FromPool, LeaseId, ToPool, Via, Written},
};

pub(crate) struct PoolNode {
    index: PoolIndex,
    pub(crate) epoch: Epoch,
    pub(crate) directory: Directory,
    slots: u32,
    block_bytes: u64,
    put_deadline: Duration,
}

impl PoolNode {
    pub(crate) fn new(index: PoolIndex, epoch: Epoch, directory: Directory, slots: u32, block_bytes: u64, put_deadline: Duration) -> Self {
        Self { index, epoch, directory, slots, block_bytes, put_deadline }
    }

    /// A client's message.
    pub(crate) fn handle(&mut self, io: &mut Io, worker: WorkerIndex, message: ToPool) {
        let (client, now) = (ClientId(worker.0 as u64), io.now);
        let answer = match message {
            ToPool::PutStart { call, lineage, room, keys } => {
                let answers = self.directory.put_start(client, lineage, room, &keys, now);
                Some(FromPool::PutStarted { call, deadline_ms: self.put_deadline.as_millis() as u64, answers })
            }
            ToPool::PutEnd { call, blocks } => Some(self.put_end(client, call, &blocks, now)),
            ToPool::Match { call, keys } => {
                let blocks = self.directory.match_prefix(client, &keys, now) as u32;
                Some(FromPool::Matched { call, blocks })
            }
            ToPool::Get { call, keys, wait_ms, via } => {
                self.directory.get(client, call, &keys, Duration::from_millis(wait_ms), via, now);
                None
            }
            ToPool::CancelGet { call } => {
                self.directory.cancel_get(client, call);
                None
            }
            ToPool::Release { lease } => {
                self.directory.release(client, lease);
                None
            }
            ToPool::PutRevoke { blocks } => {
                self.directory.put_revoke(client, &blocks, now);
                None
            }
            ToPool::Hello(_) | ToPool::Suspect { .. } => None,
        };
        if let Some(answer) = answer {
            io.answer_worker(self.index, worker, answer);
        }
        self.act(io);
    }

    /// The bytes of a put are in their slots.
    pub(crate) fn written(&mut self, io: &mut Io, worker: WorkerIndex, call: CallId, written: &[Written]) {
        let answer = self.put_end(ClientId(worker.0 as u64), call, written, io.now);
        io.answer_worker(self.index, worker, answer);
        self.act(io);
    }

    /// The bytes of a get have been read. Returns, for each block, whether they are what was published.
    pub(crate) fn read(&mut self, io: &mut Io, worker: WorkerIndex, lease: LeaseId, blocks: &[Found]) -> Vec<bool> {
        let valid = blocks.iter().map(|found| self.directory.checksum(found.at).is_some()).collect();
        self.directory.release(ClientId(worker.0 as u64), lease);
        self.act(io);
        valid
    }

    pub(crate) fn tick(&mut self, io: &mut Io) {
        self.directory.tick(io.now);
        self.act(io);
    }

    pub(crate) fn report(&self) -> Report {
        let usage = self.directory.usage();
        let dram = Blocks {
            total: u64::from(self.slots),
            free: usage.free as u64,
            cached: usage.cached as u64,
            used: (usage.reserved + usage.leased + usage.quarantined) as u64,
            bytes_per_block: self.block_bytes,
        };
        Report { blocks: TierBlocks { dram, ..TierBlocks::default() }, ..Report::default() }
    }

    fn put_end(&mut self, client: ClientId, call: CallId, blocks: &[Written], now: Duration) -> FromPool {
        let published = self.directory.put_end(client, blocks, now) as u32;
        FromPool::PutEnded { call, published, refused: blocks.len() as u32 - published }
    }

    fn act(&mut self, io: &mut Io) {
        while let Some(action) = self.directory.poll_action() {
            match action {
                Action::Found { client, call, via, lease, blocks } => {
                    let (worker, bytes) = (WorkerIndex(client.0 as usize), self.block_bytes * blocks.len() as u64);
                    match via {
                        // The reader copies by itself.
                        Via::Slots => io.answer_worker(self.index, worker, FromPool::Found { call, lease, blocks }),
                        Via::Streams => {
                            io.transfer(Transfer::Get { pool: self.index, worker, call, lease, blocks, started: io.now }, bytes)
                        }
                    }
                }
                Action::Missed { client, call, indexes } => {
                    io.answer_worker(self.index, WorkerIndex(client.0 as usize), FromPool::Missed { call, indexes });
                }
                Action::Store { .. } | Action::Load { .. } | Action::Erase { .. } | Action::GiveUpDisk => {
                    unreachable!("simulated pool nodes have no disk")
                }
            }
        }
        if self.directory.has_events() {
            let events = self.directory.take_events();
            io.tell_coordinator(self.epoch, WorkerEvent::PoolEvents { from: events.from, events: events.events });
        }
    }
}
