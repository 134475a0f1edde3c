//! The directory under clients that lose, delay and repeat their messages, stop without notice, and sleep for any time, beside an arena and
//! a disk of which only the last writer of each slot is remembered. The disk answers at any time, or never, fails, and writes wrong bytes;
//! so does a bucket, whose packs come and go. Clients with rails write at their own pace: writes that they have begun in time may land at
//! any time until the clients are fenced. Checked after every step:
//!
//! - a reader is only ever handed a slot that holds the block it asked for, and the slot stays so as long as its lease runs
//! - the events add up to the directory's content
//! - every get is answered in full, once, by its deadline
//! - after a restart, the blocks on disk are found again, and never with another block's bytes
//! - the books balance; and when all clients are gone and the published bound has passed, nothing is held

use proptest::{prelude::*, sample::Index};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};
use tidemill_kvpool::core::{
    directory::{Action, ClientId, Directory, DiskBlock, DiskFault, DramUsage, FetchFault, Fetched, Limits, Loaded},
    eviction::Policy,
    objects::{catalog::PackedBlock, pack::Record},
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    message::PoolEvent,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, Room, SlotRef, Tier, Via, Written},
};

const SLOTS: u32 = 6;
const DISK_SLOTS: u32 = 5;
/// The content that a failed write leaves behind.
const TORN: BlockKey = BlockKey([0xff; 16]);
const LIMITS: Limits = Limits { put_deadline: Duration::from_millis(3000), lease: Duration::from_millis(4000) };

#[derive(Clone, Debug)]
enum Op {
    PutStart {
        client: usize,
        chain: u8,
        first: u8,
        blocks: u8,
        room: Room,
    },
    /// The writer copies its bytes into one slot, unless it sees that its deadline has passed.
    Write(Index),
    /// A `put_end` for one written slot: sent in time, late, or again.
    PutEnd(Index),
    Revoke(Index),
    ReceiveStart(Index),
    ReceiveFailed(Index),
    Match {
        client: usize,
        chain: u8,
        blocks: u8,
    },
    Get {
        client: usize,
        chain: u8,
        blocks: u8,
        wait_ms: u64,
    },
    Cancel(Index),
    /// A release of any lease ever handed out.
    Release(Index),
    Forget {
        slot: u32,
        generation: u64,
    },
    Gone(usize),
    /// The client writes remotely from now on.
    OpenRails(usize),
    /// One of the clients that were to be fenced is fenced.
    Fenced(Index),
    /// The disk carries out one of its actions.
    Disk(Index, Disk),
    /// The directory receives one of the disk's answers; or that and all after it, several loads at once.
    Answer(Index, bool),
    /// A pack appears in the bucket.
    PackAdded {
        chain: u8,
        first: u8,
        blocks: u8,
    },
    /// A pack leaves the bucket.
    PackGone(Index),
    /// The bucket carries out one of its actions.
    Bucket(Index, Result<(), FetchFault>),
    /// Blocks that are worth it are written to the bucket.
    Flush,
    Restart,
    Sleep(u64),
}

#[derive(Clone, Copy, Debug)]
enum Disk {
    Works,
    /// The disk reports a write, but wrote other bytes.
    Tears,
    Fails,
}

fn op() -> impl Strategy<Value = Op> {
    let (client, chain, blocks) = (0usize..3, 0u8..3, 1u8..5);
    let index = any::<Index>;
    prop_oneof![
        6 => (client.clone(), chain.clone(), 0u8..3, blocks.clone(), prop_oneof![4 => Just(Room::Made), 1 => Just(Room::Spare)])
            .prop_map(|(client, chain, first, blocks, room)| Op::PutStart { client, chain, first, blocks, room }),
        8 => index().prop_map(Op::Write),
        8 => index().prop_map(Op::PutEnd),
        1 => index().prop_map(Op::Revoke),
        2 => index().prop_map(Op::ReceiveStart),
        1 => index().prop_map(Op::ReceiveFailed),
        2 => (client.clone(), chain.clone(), blocks.clone()).prop_map(|(client, chain, blocks)| Op::Match { client, chain, blocks }),
        6 => (client.clone(), chain, blocks, prop_oneof![Just(0u64), 1u64..6000])
            .prop_map(|(client, chain, blocks, wait_ms)| Op::Get { client, chain, blocks, wait_ms }),
        1 => index().prop_map(Op::Cancel),
        4 => index().prop_map(Op::Release),
        2 => (0..SLOTS, 1u64..6).prop_map(|(slot, generation)| Op::Forget { slot, generation }),
        2 => client.clone().prop_map(Op::Gone),
        2 => client.prop_map(Op::OpenRails),
        3 => index().prop_map(Op::Fenced),
        10 => (index(), prop_oneof![30 => Just(Disk::Works), 3 => Just(Disk::Tears), 1 => Just(Disk::Fails)])
            .prop_map(|(index, how)| Op::Disk(index, how)),
        10 => (index(), any::<bool>()).prop_map(|(index, together)| Op::Answer(index, together)),
        2 => (0u8..3, 0u8..3, 1u8..5).prop_map(|(chain, first, blocks)| Op::PackAdded { chain, first, blocks }),
        1 => index().prop_map(Op::PackGone),
        4 => (index(), prop_oneof![6 => Just(Ok(())), 1 => Just(Err(FetchFault::Corrupt)), 1 => Just(Err(FetchFault::Missed))])
            .prop_map(|(index, outcome)| Op::Bucket(index, outcome)),
        1 => Just(Op::Flush),
        1 => Just(Op::Restart),
        3 => prop_oneof![4 => 0u64..50, 2 => 0u64..2000, 1 => 0u64..20_000].prop_map(Op::Sleep),
    ]
}

struct Put {
    client: ClientId,
    key: BlockKey,
    at: SlotRef,
    deadline: Duration,
    written: bool,
    /// Whether the writer has rails and began in time: the bytes may land now or later.
    begun: bool,
    /// Whether the node writes this slot for the client.
    receiving: bool,
}

struct Asked {
    keys: Vec<BlockKey>,
    /// Keys that were on disk or in the bucket only, so that they may fail to arrive before the deadline.
    far: BTreeSet<BlockKey>,
    unanswered: BTreeSet<u32>,
    /// The time until which the get waits for blocks that are not held.
    wait: Duration,
    /// The time until which the get must be answered.
    deadline: Duration,
}

struct Reading {
    client: ClientId,
    lease: LeaseId,
    until: Duration,
    blocks: Vec<(BlockKey, SlotRef)>,
}

/// An action for the disk.
#[derive(Clone, Copy)]
enum Io {
    Store { disk: u32, from: SlotRef, block: DiskBlock },
    Load { disk: u32, to: SlotRef, checksum: u64, until: Duration },
}

#[derive(Clone, Copy)]
struct Setup {
    policy: Policy,
    has_disk: bool,
    has_objects: bool,
    /// The share in percent. Each chain belongs to one tenant.
    tenant_share: u8,
}

struct World {
    setup: Setup,
    directory: Directory,
    now: Duration,
    clients: [ClientId; 3],
    next: u64,
    /// The block that was last written to each slot.
    arena: HashMap<u32, BlockKey>,
    puts: Vec<Put>,
    asked: HashMap<(ClientId, CallId), Asked>,
    readings: Vec<Reading>,
    leases: Vec<(ClientId, LeaseId)>,
    told: BTreeMap<BlockKey, Tier>,
    told_next: u64,
    /// The generations, set as by the shell before a writer is told to write.
    generations: HashMap<u32, u64>,
    /// The block that was last written to each disk slot.
    platter: HashMap<u32, BlockKey>,
    /// The block that the disk's index has for each slot.
    index: BTreeMap<u32, DiskBlock>,
    remote: BTreeSet<ClientId>,
    to_fence: Vec<ClientId>,
    asked_of_disk: Vec<Io>,
    unheard: Vec<(Io, Result<(), DiskFault>)>,
    asked_of_bucket: Vec<(PackedBlock, SlotRef, Duration)>,
    /// Keys of blocks that were ever fetched: a reader that waits for one of these may be told that it does not come.
    ever_fetched: BTreeSet<BlockKey>,
}

impl World {
    fn new(setup: Setup) -> Self {
        Self {
            setup,
            directory: directory(setup),
            now: Duration::from_secs(1),
            clients: [ClientId(1), ClientId(2), ClientId(3)],
            next: 4,
            arena: HashMap::new(),
            puts: Vec::new(),
            asked: HashMap::new(),
            readings: Vec::new(),
            leases: Vec::new(),
            told: BTreeMap::new(),
            told_next: 0,
            generations: HashMap::new(),
            platter: HashMap::new(),
            index: BTreeMap::new(),
            remote: BTreeSet::new(),
            to_fence: Vec::new(),
            asked_of_disk: Vec::new(),
            unheard: Vec::new(),
            asked_of_bucket: Vec::new(),
            ever_fetched: BTreeSet::new(),
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::PutStart { client, chain, first, blocks, room } => {
                let client = self.clients[client];
                let keys = keys(chain, first..first + blocks);
                let before = self.directory.usage();
                let answers = self.directory.put_start(client, lineage(chain, first), room, &keys, self.now);
                assert_eq!(answers.len(), keys.len());
                if room == Room::Spare && !self.directory.has_disk() {
                    assert_eq!(self.directory.usage().cached, before.cached, "what is offered pushes nothing out");
                }
                for (answer, key) in answers.into_iter().zip(keys) {
                    if let Reservation::Write(at) = answer {
                        self.generations.insert(at.slot, at.generation);
                        let deadline = self.now + LIMITS.put_deadline;
                        self.puts.push(Put { client, key, at, deadline, written: false, begun: false, receiving: false });
                    }
                }
            }
            Op::Write(index) => {
                let now = self.now;
                if let Some(put) = pick(&mut self.puts, index).filter(|put| now < put.deadline || put.begun) {
                    put.begun |= self.remote.contains(&put.client) && !put.receiving;
                    put.written = true;
                    self.arena.insert(put.at.slot, put.key);
                }
            }
            Op::PutEnd(index) => {
                if let Some(put) = pick(&mut self.puts, index).filter(|put| put.written) {
                    self.directory.put_end(put.client, &[Written { at: put.at, checksum: checksum(put.key) }], self.now);
                    // A client that sends `put_end` writes no more.
                    put.deadline = Duration::ZERO;
                    put.begun = false;
                }
            }
            Op::Revoke(index) => {
                if let Some(put) = pick(&mut self.puts, index) {
                    self.directory.put_revoke(put.client, &[put.at], self.now);
                    // The client writes no more, but a write of the node itself continues to its deadline.
                    if !put.receiving {
                        put.deadline = Duration::ZERO;
                    }
                    put.begun = false;
                }
            }
            Op::ReceiveStart(index) => {
                if let Some(put) = pick(&mut self.puts, index)
                    && let Some(deadline) = self.directory.receive_start(put.client, put.at, self.now)
                {
                    assert!(self.now < deadline && deadline <= put.deadline);
                    put.receiving = true;
                }
            }
            Op::ReceiveFailed(index) => {
                if let Some(put) = pick(&mut self.puts, index).filter(|put| put.receiving) {
                    put.deadline = Duration::ZERO;
                    self.directory.receive_failed(put.client, put.at, self.now);
                }
            }
            Op::Match { client, chain, blocks } => {
                let keys = keys(chain, 0..blocks);
                let matched = self.directory.match_prefix(self.clients[client], &keys, self.now);
                self.settle();
                let held = keys.iter().take_while(|key| self.told.get(key).is_some_and(|tier| *tier != Tier::Object)).count();
                assert_eq!(matched, held, "match and events agree");
            }
            Op::Get { client, chain, blocks, wait_ms } => {
                let (client, call) = (self.clients[client], CallId(self.next));
                self.next += 1;
                let keys = keys(chain, 0..blocks);
                let wait = Duration::from_millis(wait_ms);
                let unanswered = (0..keys.len() as u32).collect();
                let is_far = |key: &&BlockKey| self.told.get(key).is_some_and(|tier| *tier != Tier::Dram);
                let far: BTreeSet<BlockKey> = keys.iter().filter(is_far).copied().collect();
                let longest = if far.is_empty() { wait } else { wait.max(Limits::LOAD) };
                // Blocks that were not held may be fetched for another reader meanwhile.
                let deadline = self.now + if self.setup.has_objects { wait + Limits::LOAD } else { longest };
                self.asked.insert((client, call), Asked { keys: keys.clone(), far, unanswered, wait: self.now + wait, deadline });
                self.directory.get(client, call, &keys, wait, Via::Slots, self.now);
            }
            Op::Cancel(index) => {
                let mut calls: Vec<_> = self.asked.keys().copied().collect();
                calls.sort();
                if let Some(&mut (client, call)) = pick(&mut calls, index) {
                    self.directory.cancel_get(client, call);
                    self.asked.remove(&(client, call));
                }
            }
            Op::Release(index) => {
                if let Some(&mut (client, lease)) = pick(&mut self.leases, index) {
                    self.directory.release(client, lease);
                    self.readings.retain(|reading| (reading.client, reading.lease) != (client, lease));
                }
            }
            Op::Forget { slot, generation } => self.directory.forget(SlotRef { slot, generation }, self.now),
            Op::Gone(client) => self.client_gone(client),
            Op::OpenRails(client) => {
                self.directory.writes_remotely(self.clients[client]);
                self.remote.insert(self.clients[client]);
            }
            Op::Fenced(index) => {
                if !self.to_fence.is_empty() {
                    let client = self.to_fence.remove(index.index(self.to_fence.len()));
                    self.close_rails(client);
                    self.directory.fenced(client, self.now);
                }
            }
            Op::Disk(index, how) => {
                if !self.asked_of_disk.is_empty() {
                    let io = self.asked_of_disk.remove(index.index(self.asked_of_disk.len()));
                    let outcome = self.disk(io, how);
                    self.unheard.push((io, outcome));
                }
            }
            Op::Answer(index, together) => {
                if !self.unheard.is_empty() {
                    let first = index.index(self.unheard.len());
                    let last = if together { self.unheard.len() } else { first + 1 };
                    let heard = self.unheard.drain(first..last).collect();
                    self.answer(heard);
                }
            }
            Op::PackAdded { chain, first, blocks } => {
                self.next += 1;
                let records = keys(chain, first..first + blocks).into_iter().zip(first..).map(|(key, n)| record(key, lineage(chain, n)));
                self.directory.pack_added(self.next.to_string(), 1, 0, records.collect());
            }
            Op::PackGone(index) => {
                let mut packs = self.directory.catalog().map_or(Vec::new(), |catalog| catalog.missing(|_| false));
                if let Some(pack) = pick(&mut packs, index) {
                    self.directory.pack_gone(*pack);
                }
            }
            Op::Bucket(index, outcome) => {
                if !self.asked_of_bucket.is_empty() {
                    let asked = self.asked_of_bucket.remove(index.index(self.asked_of_bucket.len()));
                    self.fetched(asked, outcome);
                }
            }
            Op::Flush => {
                let blocks = self.directory.take_wanted(3);
                for block in &blocks {
                    let before = block.lineage.parent;
                    let follows = before.is_none_or(|before| {
                        blocks.iter().any(|other| other.key == before) || self.directory.catalog().unwrap().holds(&before)
                    });
                    assert!(follows, "a chain is written from its beginning");
                }
                self.next += 1;
                let records = blocks.iter().map(|block| record(block.key, block.lineage)).collect();
                self.directory.pack_added(self.next.to_string(), 1, 0, records);
            }
            Op::Restart => self.restart(),
            Op::Sleep(ms) => {
                self.now += Duration::from_millis(ms);
                self.directory.tick(self.now);
            }
        }
        self.settle();
        self.check();
    }

    /// The shell's part in an action for the disk, at any later time.
    fn disk(&mut self, io: Io, how: Disk) -> Result<(), DiskFault> {
        if matches!(how, Disk::Fails) {
            return Err(DiskFault::Io);
        }
        match io {
            Io::Store { disk, from, block } => {
                if self.generations[&from.slot] != from.generation {
                    return Err(DiskFault::Late);
                }
                assert_eq!(self.arena[&from.slot], block.key, "a store copies another block");
                self.platter.insert(disk, if matches!(how, Disk::Tears) { TORN } else { block.key });
                self.index.insert(disk, block);
            }
            Io::Load { disk, to, checksum: expected, until } => {
                let read = self.platter[&disk];
                if self.now >= until {
                    return Err(DiskFault::Late);
                }
                if checksum(read) != expected {
                    return Err(DiskFault::Corrupt);
                }
                self.arena.insert(to.slot, read);
            }
        }
        Ok(())
    }

    /// The shell's part in fetching a block from the bucket.
    fn fetched(&mut self, (block, to, until): (PackedBlock, SlotRef, Duration), outcome: Result<(), FetchFault>) {
        let outcome = if self.now < until { outcome } else { Err(FetchFault::Missed) };
        if outcome.is_ok() {
            self.arena.insert(to.slot, block.record.key);
        }
        self.directory.fetched(&[Fetched { block, to, outcome }], self.now);
    }

    fn answer(&mut self, ended: Vec<(Io, Result<(), DiskFault>)>) {
        let mut loads = Vec::new();
        for (io, outcome) in ended {
            match io {
                Io::Store { disk, .. } => self.directory.stored(disk, outcome, self.now),
                Io::Load { disk, to, .. } => loads.push(Loaded { disk, to, outcome }),
            }
        }
        self.directory.loaded(&loads, self.now);
    }

    /// Kills the node, whatever it is doing, and starts it again.
    fn restart(&mut self) {
        let ids = self.next..self.next + 3;
        self.clients = [ClientId(ids.start), ClientId(ids.start + 1), ClientId(ids.start + 2)];
        self.next = ids.end;
        self.directory = directory(self.setup);
        self.asked_of_disk.clear();
        self.unheard.clear();
        self.asked_of_bucket.clear();
        self.ever_fetched.clear();
        self.remote.clear();
        self.to_fence.clear();
        (self.arena, self.generations) = Default::default();
        (self.puts, self.asked, self.readings, self.leases) = Default::default();
        (self.told, self.told_next) = Default::default();
        for useless in self.directory.recover(self.index.clone()) {
            self.index.remove(&useless);
        }
        self.settle();
        assert!(self.index.values().all(|block| self.told.contains_key(&block.key)), "what is on disk is found again");
    }

    /// Closes a client's rails: nothing that it has begun lands any more. Slots that it still has reserved may be written otherwise, until
    /// the deadline.
    fn close_rails(&mut self, client: ClientId) {
        if self.remote.remove(&client) {
            self.puts.iter_mut().filter(|put| put.client == client).for_each(|put| put.begun = false);
        }
    }

    /// Ends a client; another one connects in its place. Its writes may continue until their deadline.
    fn client_gone(&mut self, index: usize) {
        let gone = std::mem::replace(&mut self.clients[index], ClientId(self.next));
        self.next += 1;
        self.close_rails(gone);
        self.directory.client_gone(gone, self.now);
        self.asked.retain(|&(client, _), _| client != gone);
        self.readings.retain(|reading| reading.client != gone);
    }

    /// Performs the directory's actions.
    fn settle(&mut self) {
        let events = self.directory.take_events();
        assert_eq!(events.from, self.told_next);
        self.told_next = events.next();
        for event in events.events {
            match event {
                PoolEvent::Stored { key, tier } => assert_eq!(self.told.insert(key, tier), None, "stored twice"),
                PoolEvent::Moved { key, tier } => {
                    let before = self.told.insert(key, tier);
                    assert!(before.is_some_and(|before| before != tier), "moved from {before:?} to {tier:?}");
                }
                PoolEvent::Evicted(key) => assert!(self.told.remove(&key).is_some(), "evicted what was not stored"),
                PoolEvent::Cleared => panic!("a directory never starts over"),
            }
        }
        while let Some(action) = self.directory.poll_action() {
            match action {
                Action::Found { client, call, lease, blocks, .. } => self.found(client, call, lease, &blocks),
                Action::Store { disk, from, block } => self.asked_of_disk.push(Io::Store { disk, from, block }),
                Action::Load { disk, to, checksum, until } => {
                    self.generations.insert(to.slot, to.generation);
                    self.asked_of_disk.push(Io::Load { disk, to, checksum, until });
                }
                Action::Fetch { block, to, until } => {
                    self.generations.insert(to.slot, to.generation);
                    self.ever_fetched.insert(block.record.key);
                    self.asked_of_bucket.push((block, to, until));
                }
                Action::Erase { disk } => drop(self.index.remove(&disk)),
                Action::GiveUpDisk => {
                    self.asked_of_disk.clear();
                    self.unheard.clear();
                }
                Action::Fence { client } => {
                    assert!(self.remote.contains(&client) && !self.to_fence.contains(&client), "fenced for nothing, or twice");
                    self.to_fence.push(client);
                }
                Action::Missed { client, call, indexes, .. } => {
                    let asked = self.asked.get_mut(&(client, call)).expect("answers go to who asked");
                    let (far, ever_fetched) = (&asked.far, &self.ever_fetched);
                    let failed = |&index: &u32| [far, ever_fetched].iter().any(|keys| keys.contains(&asked.keys[index as usize]));
                    assert!(self.now >= asked.wait || indexes.iter().all(failed), "missed before the deadline");
                    assert!(indexes.iter().all(|index| asked.unanswered.remove(index)), "answered twice");
                }
            }
        }
        self.asked.retain(|_, asked| !asked.unanswered.is_empty());
    }

    fn found(&mut self, client: ClientId, call: CallId, lease: LeaseId, blocks: &[Found]) {
        let asked = self.asked.get_mut(&(client, call)).expect("answers go to who asked");
        let mut reading = Reading { client, lease, until: self.now + LIMITS.lease, blocks: Vec::new() };
        for block in blocks {
            let key = asked.keys[block.index as usize];
            assert!(asked.unanswered.remove(&block.index), "answered twice");
            assert_eq!(block.checksum, checksum(key), "another block's checksum");
            reading.blocks.push((key, block.at));
        }
        self.readings.push(reading);
        self.leases.push((client, lease));
    }

    fn check(&mut self) {
        self.directory.check_integrity();
        let now = self.now;
        self.readings.retain(|reading| now < reading.until);
        for (key, at) in self.readings.iter().flat_map(|reading| &reading.blocks) {
            assert_eq!(self.arena.get(&at.slot), Some(key), "a leased slot was written");
        }
        for asked in self.asked.values() {
            assert!(now < asked.deadline, "a get outlived its deadline");
        }
        let held: BTreeMap<BlockKey, Tier> = self.directory.snapshot().map(stored).collect();
        assert_eq!(held, self.told, "events and directory disagree");
    }

    fn end(mut self) {
        (0..3).for_each(|client| self.client_gone(client));
        std::mem::take(&mut self.to_fence).into_iter().for_each(|client| self.directory.fenced(client, self.now));
        self.now += LIMITS.reclaim_max();
        self.directory.tick(self.now);
        self.settle();
        self.check();
        let DramUsage { free, cached, reserved, leased, quarantined } = self.directory.usage();
        assert_eq!((reserved, leased, quarantined), (0, 0, 0), "something leaked");
        assert_eq!(free + cached, SLOTS as usize);
        // A disk that answers again, however late, is not kept busy by requests that are no longer needed.
        loop {
            while let Some(io) = self.asked_of_disk.pop() {
                let outcome = self.disk(io, Disk::Works);
                self.unheard.push((io, outcome));
            }
            let Some(answer) = self.unheard.pop() else { break };
            self.answer(vec![answer]);
            self.settle();
            self.check();
        }
        while let Some(asked) = self.asked_of_bucket.pop() {
            self.fetched(asked, Ok(()));
            self.settle();
            self.check();
        }
        assert!(self.directory.disk_usage().is_none_or(|disk| disk.busy == 0), "the disk is busy with nothing");
    }
}

fn directory(Setup { policy, has_disk, has_objects, tenant_share }: Setup) -> Directory {
    let mut directory = Directory::new(SLOTS, LIMITS, policy.build(SLOTS));
    if has_disk {
        directory = directory.with_disk(DISK_SLOTS, policy.build(DISK_SLOTS));
    }
    if has_objects {
        directory = directory.with_objects(2, Duration::from_secs(1));
    }
    directory.with_tenant_share(tenant_share)
}

fn keys(chain: u8, range: std::ops::Range<u8>) -> Vec<BlockKey> {
    range.map(|n| BlockKey([chain * 16 + n; 16])).collect()
}

fn lineage(chain: u8, first: u8) -> Lineage {
    let parent = first.checked_sub(1).map(|before| keys(chain, before..first)[0]);
    Lineage { origin: RequestId(u64::from(chain)), tenant: Tenant(u64::from(chain)), parent, position: u32::from(first) }
}

fn record(key: BlockKey, lineage: Lineage) -> Record {
    Record { key, checksum: checksum(key), digest: key.0, lineage }
}

fn checksum(key: BlockKey) -> u64 {
    u64::from(key.0[0]) + 1
}

fn stored(event: PoolEvent) -> (BlockKey, Tier) {
    match event {
        PoolEvent::Stored { key, tier } => (key, tier),
        other => panic!("{other:?}"),
    }
}

/// One of the latest entries; `Sleep` covers what happens long after.
fn pick<T>(from: &mut [T], index: Index) -> Option<&mut T> {
    let latest = from.len().saturating_sub(12);
    let from = &mut from[latest..];
    (!from.is_empty()).then(|| index.get_mut(from))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_interleaving_breaks_the_directory(
        policy in prop::sample::select(&Policy::ALL[..]),
        has_disk in any::<bool>(),
        has_objects in any::<bool>(),
        tenant_share in prop_oneof![Just(100u8), Just(50)],
        ops in prop::collection::vec(op(), 1..300),
    ) {
        let mut world = World::new(Setup { policy, has_disk, has_objects, tenant_share });
        ops.into_iter().for_each(|op| world.step(op));
        world.end();
    }
}
