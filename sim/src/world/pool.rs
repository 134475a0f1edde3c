//! A pool node: the production directory and announcer, and a model of its shell: sessions, slots and the disk's threads.

use super::{
    PoolIndex, Process, Timer, Transfer,
    bytes::{Bytes, checksum},
    disk::{Disk, DiskJob, checked},
    io::{Io, Received},
    neighbour::{EVERY, Neighbour, STUDIED},
    network::ConnId,
    uplink::{Heard, Uplink},
};
use crate::faults::mutation::Mutation;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tidemill_kvpool::core::{
    announce::Announcer,
    directory::{Action, ClientId, Directory, DiskFault, Loaded},
    layouts::Layouts,
};
use tidemill_proto::{
    message::{Blocks, Report, TierBlocks, ToWorker, WorkerEvent},
    pool::{ArenaInfo, CallId, Found, FromPool, LeaseId, Reservation, SlotRef, ToPool, Via, Written, slot_stride},
};

pub(crate) struct PoolNode {
    index: PoolIndex,
    layouts: Layouts,
    /// Another model's clients, if the node has some.
    neighbour: Option<Neighbour>,
    pub(crate) uplink: Uplink,
    announcer: Announcer,
    pub(crate) arena: usize,
    pub(crate) disk: Option<Disk>,
    slots: u32,
    block_bytes: u64,
    put_deadline: Duration,
    /// Clients, by connection.
    sessions: BTreeSet<ConnId>,
    /// Slots that clients' streams are filling, with their deadlines.
    receiving: BTreeMap<(ConnId, SlotRef), Duration>,
}

/// The dimensions of a node.
#[derive(Clone, Copy)]
pub(crate) struct PoolShape {
    pub(crate) slots: u32,
    pub(crate) block_bytes: u64,
    pub(crate) put_deadline: Duration,
}

impl PoolNode {
    pub(crate) fn new(
        io: &mut Io,
        index: PoolIndex,
        (layouts, neighbour): (Layouts, Option<Neighbour>),
        shape: PoolShape,
        uplink: Uplink,
        coordinators: usize,
        disk: Option<Disk>,
    ) -> Self {
        let PoolShape { slots, block_bytes, put_deadline } = shape;
        let arena = io.add_arena(slots);
        let announcer = Announcer::new(coordinators);
        let (sessions, receiving) = (BTreeSet::new(), BTreeMap::new());
        let mut node =
            Self { index, layouts, neighbour, uplink, announcer, arena, disk, slots, block_bytes, put_deadline, sessions, receiving };
        node.recover();
        node
    }

    /// The directory of the studied layout.
    pub(crate) fn directory(&mut self) -> &mut Directory {
        self.layouts.directory(STUDIED)
    }

    pub(crate) fn known(&self) -> &Directory {
        self.layouts.get(STUDIED).expect("every node has it")
    }

    /// Takes memory for this many blocks from the neighbour, as far as it may.
    fn make_room(&mut self, io: &Io, wanted: usize) {
        // Nothing is kept of the neighbour's blocks but their places.
        drop(self.layouts.make_room(STUDIED, wanted, io.here));
    }

    /// The neighbour's turn.
    pub(super) fn other_layout(&mut self, io: &mut Io) {
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.act(io, self.arena, &mut self.layouts);
            io.timer(Process::Pool(self.index), EVERY, Timer::OtherLayout);
        }
        self.act(io);
    }

    fn recover(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        for useless in self.layouts.directory(STUDIED).recover(disk.records()) {
            disk.erase(useless);
        }
    }

    pub(crate) fn start(&mut self, io: &mut Io) {
        self.uplink.start(io);
        if self.neighbour.is_some() {
            io.timer(Process::Pool(self.index), EVERY, Timer::OtherLayout);
        }
        self.act(io);
    }

    /// Handles a client's message.
    pub(crate) fn handle(&mut self, io: &mut Io, conn: ConnId, message: ToPool) {
        let (client, now) = (client_of(conn), io.here);
        if !self.sessions.contains(&conn) {
            if let ToPool::Hello(_) = message {
                self.sessions.insert(conn);
                let (pid, fd, nonce) = (0, self.arena as i32, [0; 16]);
                let stride = slot_stride(self.block_bytes).expect("blocks are not that large");
                let arena = ArenaInfo { pid, fd, nonce, capacity_bytes: u64::from(self.slots) * stride, block_bytes: self.block_bytes };
                io.answer(conn, FromPool::Welcome { arena });
            }
            return;
        }
        match message {
            ToPool::PutStart { call, lineage, room, keys } => {
                let wanted = self.known().to_write(&keys);
                self.make_room(io, wanted);
                let answers = self.directory().put_start(client, lineage, room, &keys, now);
                for answer in &answers {
                    if let Reservation::Write(at) = answer {
                        io.arena(self.arena).set_generation(at.slot, at.generation);
                        if io.has(Mutation::PublishEarly) {
                            let checksum = checksum(io.arena(self.arena).read(at.slot));
                            self.directory().put_end(client, &[Written { at: *at, checksum }], now);
                        }
                    }
                }
                io.answer(conn, FromPool::PutStarted { call, deadline_ms: self.put_deadline.as_millis() as u64, answers });
            }
            ToPool::PutEnd { call, blocks } => self.put_end(io, conn, call, &blocks),
            ToPool::Match { call, keys } => {
                let blocks = self.directory().match_prefix(client, &keys, now) as u32;
                io.answer(conn, FromPool::Matched { call, blocks });
            }
            ToPool::Get { call, keys, wait_ms, via } => {
                let wanted = self.known().to_load(&keys);
                self.make_room(io, wanted);
                self.directory().get(client, call, &keys, Duration::from_millis(wait_ms), via, now);
            }
            ToPool::CancelGet { call } => self.directory().cancel_get(client, call),
            ToPool::Release { lease } => self.release(conn, lease),
            ToPool::PutRevoke { blocks } => self.directory().put_revoke(client, &blocks, now),
            ToPool::Suspect { block } => self.examine(io, block),
            ToPool::Hello(_) => {}
            ToPool::OpenRails { .. } | ToPool::CloseRail { .. } => unreachable!("no simulated client asks for RDMA"),
        }
        self.act(io);
    }

    /// Checks a block in which a reader found wrong bytes, and drops it if they are wrong.
    fn examine(&mut self, io: &mut Io, block: SlotRef) {
        let Some(expected) = self.known().checksum(block) else { return };
        let arena = io.arena(self.arena);
        if arena.generation(block.slot) == block.generation && checksum(arena.read(block.slot)) != expected {
            self.directory().forget(block, io.here);
        }
    }

    /// Starts to receive blocks on streams into their slots.
    pub(crate) fn receive_start(&mut self, io: &mut Io, conn: ConnId, put: Transfer) {
        let Transfer::Put { blocks, .. } = &put else { return };
        for at in blocks.iter().map(|(written, _)| written.at) {
            if self.sessions.contains(&conn)
                && let Some(until) = self.directory().receive_start(client_of(conn), at, io.here)
            {
                self.receiving.insert((conn, at), until);
            }
        }
        let bytes = self.block_bytes * blocks.len() as u64;
        io.transfer(put, bytes);
        self.act(io);
    }

    /// Handles blocks that have arrived on streams.
    pub(crate) fn streamed(&mut self, io: &mut Io, conn: ConnId, call: CallId, blocks: &[(Written, Bytes)]) {
        if !self.sessions.contains(&conn) {
            return;
        }
        let mut written = Vec::new();
        for &(block, bytes) in blocks {
            match self.receiving.remove(&(conn, block.at)) {
                Some(until) if io.here < until => {
                    io.arena(self.arena).write(block.at.slot, bytes);
                    written.push(block);
                }
                Some(_) => self.directory().receive_failed(client_of(conn), block.at, io.here),
                None => {}
            }
        }
        let published = self.publish(io, conn, &written);
        io.answer(conn, FromPool::PutEnded { call, published, refused: blocks.len() as u32 - published });
        self.act(io);
    }

    fn put_end(&mut self, io: &mut Io, conn: ConnId, call: CallId, blocks: &[Written]) {
        let published = self.publish(io, conn, blocks);
        io.answer(conn, FromPool::PutEnded { call, published, refused: blocks.len() as u32 - published });
    }

    fn publish(&mut self, io: &mut Io, conn: ConnId, blocks: &[Written]) -> u32 {
        let mut published = 0;
        for block in blocks {
            if self.directory().put_end(client_of(conn), std::slice::from_ref(block), io.here) == 1 {
                published += 1;
                if let Some(faulty) = &mut io.faulty {
                    faulty.published.insert((self.arena, block.at));
                }
            }
        }
        published
    }

    /// Releases the blocks of a get after they were sent on streams.
    pub(crate) fn sent(&mut self, io: &mut Io, conn: ConnId, lease: LeaseId) {
        self.release(conn, lease);
        self.act(io);
    }

    fn release(&mut self, conn: ConnId, lease: LeaseId) {
        self.directory().release(client_of(conn), lease);
        self.neighbour.iter_mut().for_each(|neighbour| neighbour.released(conn, lease));
    }

    pub(crate) fn heard(&mut self, io: &mut Io, conn: ConnId, message: Box<ToWorker>) {
        let report = self.report();
        match self.uplink.heard(io, conn, message, || report) {
            Some(Heard::Up(link)) => self.announcer.up(link),
            Some(Heard::Message(..)) | None => {}
        }
        self.act(io);
    }

    /// Handles the end of a connection.
    pub(crate) fn ended(&mut self, io: &mut Io, conn: ConnId) {
        if let Some(link) = self.uplink.ended(io, conn) {
            self.announcer.down(link);
        }
        if self.sessions.remove(&conn) {
            self.receiving.retain(|(at, _), _| *at != conn);
            self.neighbour.iter_mut().for_each(|neighbour| neighbour.client_gone(conn));
            if !io.has(Mutation::ForgetClientGone) {
                self.directory().client_gone(client_of(conn), io.here);
            }
        }
        self.act(io);
    }

    pub(crate) fn tick(&mut self, io: &mut Io) {
        self.directory().tick(io.here);
        self.act(io);
    }

    pub(crate) fn heartbeat(&mut self, io: &mut Io) {
        let report = WorkerEvent::Heartbeat(Box::new(self.report()));
        self.uplink.broadcast(io, &report);
    }

    /// Announces that the node is leaving, so that it gets no new blocks.
    pub(crate) fn leave(&mut self, io: &mut Io) {
        self.uplink.broadcast(io, &WorkerEvent::Leaving);
    }

    fn report(&self) -> Report {
        let usage = self.known().usage();
        let dram = Blocks {
            total: self.known().slots() as u64,
            free: usage.free as u64,
            cached: usage.cached as u64,
            used: (usage.reserved + usage.leased + usage.quarantined) as u64,
            bytes_per_block: self.block_bytes,
        };
        Report { blocks: TierBlocks { dram, ..TierBlocks::default() }, ..Report::default() }
    }

    /// Handles the end of a disk job.
    pub(crate) fn disk_done(&mut self, io: &mut Io, job: DiskJob) {
        let Some(disk) = self.disk.as_mut().filter(|disk| !disk.given_up) else { return };
        match job {
            DiskJob::Store { disk: slot, copied, .. } => {
                let outcome = copied.and_then(|_| disk.write(slot));
                self.layouts.directory(STUDIED).stored(slot, outcome, io.here);
            }
            DiskJob::Load { disk: slot, to, checksum: expected, until } => {
                let outcome = disk.read(slot).and_then(|bytes| {
                    if io.here >= until {
                        return Err(DiskFault::Late);
                    }
                    io.arena(self.arena).write(to.slot, bytes);
                    if checksum(bytes) == expected { Ok(()) } else { Err(DiskFault::Corrupt) }
                });
                self.layouts.directory(STUDIED).loaded(&[Loaded { disk: slot, to, outcome }], io.here);
            }
        }
        self.act(io);
    }

    fn give_to_disk(&mut self, io: &mut Io, job: DiskJob) {
        let Some(disk) = self.disk.as_mut().filter(|disk| !disk.given_up) else { return };
        if let DiskJob::Store { disk: slot, block, copied: Ok(bytes) } = &job {
            disk.begin_write(*slot, *block, *bytes);
        }
        io.timer(Process::Pool(self.index), disk.takes(), Timer::Disk(job));
    }

    fn act(&mut self, io: &mut Io) {
        while let Some(action) = self.directory().poll_action() {
            match action {
                Action::Found { client, call, via, lease, blocks } => self.found(io, conn_of(client), call, via, lease, blocks),
                Action::Missed { client, call, indexes } => io.answer(conn_of(client), FromPool::Missed { call, indexes }),
                Action::Store { disk, from, block } => {
                    let arena = io.arena(self.arena);
                    let copied = checked(arena.read(from.slot), arena.generation(from.slot), from, &block);
                    self.give_to_disk(io, DiskJob::Store { disk, block, copied });
                }
                Action::Load { disk, to, checksum, until } => {
                    io.arena(self.arena).set_generation(to.slot, to.generation);
                    self.give_to_disk(io, DiskJob::Load { disk, to, checksum, until });
                }
                Action::Fetch { .. } => unreachable!("no simulated node has object storage"),
                Action::Erase { disk: slot } => self.disk.iter_mut().for_each(|disk| disk.erase(slot)),
                Action::GiveUpDisk => {
                    io.note(|| format!("pool-{} gives its disk up", self.index.0));
                    self.disk.iter_mut().for_each(|disk| disk.given_up = true);
                }
                Action::Fence { .. } => unreachable!("no simulated client writes by RDMA"),
            }
        }
        if self.directory().has_events() || self.announcer.is_behind() {
            for (link, event) in self.announcer.announce(Some(self.layouts.directory(STUDIED))).messages {
                self.uplink.send(io, link, event);
            }
        }
    }

    fn found(&mut self, io: &mut Io, conn: ConnId, call: CallId, via: Via, lease: LeaseId, blocks: Vec<Found>) {
        self.neighbour.iter_mut().for_each(|neighbour| neighbour.leased(io, conn, lease, &blocks));
        match via {
            // The reader copies the blocks itself.
            Via::Slots => io.answer(conn, FromPool::Found { call, lease, blocks }),
            Via::Streams => {
                let bytes = self.block_bytes * blocks.len() as u64;
                let arena = self.arena;
                let blocks = blocks.into_iter().map(|found| (found, io.arena(arena).read(found.at.slot))).collect();
                io.transfer(Transfer::Get { conn, arena, call, lease, blocks, via, started: io.now }, bytes);
            }
        }
    }

    /// Panics if the state is inconsistent.
    pub(crate) fn check(&self) {
        self.layouts.check_integrity();
        let stranger = self.known().clients().find(|client| !self.sessions.contains(&conn_of(*client)));
        assert_eq!(stranger, None, "pool-{}: it holds something for a client that is gone", self.index.0);
    }

    /// Copies of blocks as they are sent on streams.
    pub(crate) fn copies(&self, io: &Io, blocks: Vec<(Found, Bytes)>) -> Vec<Received> {
        blocks.into_iter().map(|(found, before)| io.copy(self.arena, found, before)).collect()
    }
}

/// The directory's client for a connection: 0 is the node itself.
pub(crate) fn client_of(conn: ConnId) -> ClientId {
    ClientId(conn.0 as u64 + 1)
}

fn conn_of(client: ClientId) -> ConnId {
    ConnId(client.0 as usize - 1)
}
