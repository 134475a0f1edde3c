//! The directory under clients that lose, delay and repeat their messages, stop without a word, and sleep for any time,
//! beside an arena of which only the last writer of each slot is remembered. Checked after every step:
//!
//! - a reader is only ever handed a slot that holds the block it asked for, and as long as its lease runs, the slot stays so
//! - what the events tell is what the directory holds
//! - every get is answered in full, once, by its deadline
//! - the books balance; and when all clients are gone and the published bound has passed, nothing is held

use proptest::{prelude::*, sample::Index};
use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};
use tidemill_kvpool::{
    directory::{Action, ClientId, Directory, Limits, Usage},
    eviction::Policy,
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    message::PoolEvent,
    pool::{CallId, Found, LeaseId, Lineage, Reservation, SlotRef, Via, Written},
};

const SLOTS: u32 = 6;
const LIMITS: Limits = Limits { put_deadline: Duration::from_millis(3000), lease: Duration::from_millis(4000) };

#[derive(Clone, Debug)]
enum Op {
    PutStart {
        client: usize,
        chain: u8,
        first: u8,
        blocks: u8,
    },
    /// The writer copies its bytes into one slot, unless it sees that its time is up.
    Write(Index),
    /// For one slot that was written: sent in time, late, or again.
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
    /// For any lease ever handed out.
    Release(Index),
    Forget {
        slot: u32,
        generation: u64,
    },
    Gone(usize),
    Sleep(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let (client, chain, blocks) = (0usize..3, 0u8..3, 1u8..5);
    let index = any::<Index>;
    prop_oneof![
        6 => (client.clone(), chain.clone(), 0u8..3, blocks.clone())
            .prop_map(|(client, chain, first, blocks)| Op::PutStart { client, chain, first, blocks }),
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
        2 => client.prop_map(Op::Gone),
        3 => prop_oneof![4 => 0u64..50, 2 => 0u64..2000, 1 => 0u64..20_000].prop_map(Op::Sleep),
    ]
}

struct Put {
    client: ClientId,
    key: BlockKey,
    at: SlotRef,
    deadline: Duration,
    written: bool,
    /// The node writes this one for the client.
    receiving: bool,
}

struct Asked {
    keys: Vec<BlockKey>,
    unanswered: BTreeSet<u32>,
    deadline: Duration,
}

struct Reading {
    client: ClientId,
    lease: LeaseId,
    until: Duration,
    blocks: Vec<(BlockKey, SlotRef)>,
}

struct World {
    directory: Directory,
    now: Duration,
    clients: [ClientId; 3],
    next: u64,
    /// What was written to each slot last.
    arena: HashMap<u32, BlockKey>,
    puts: Vec<Put>,
    asked: HashMap<(ClientId, CallId), Asked>,
    readings: Vec<Reading>,
    leases: Vec<(ClientId, LeaseId)>,
    told: BTreeSet<BlockKey>,
    told_next: u64,
}

impl World {
    fn new(policy: Policy) -> Self {
        Self {
            directory: Directory::new(SLOTS, LIMITS, policy.build(SLOTS)),
            now: Duration::from_secs(1),
            clients: [ClientId(1), ClientId(2), ClientId(3)],
            next: 4,
            arena: HashMap::new(),
            puts: Vec::new(),
            asked: HashMap::new(),
            readings: Vec::new(),
            leases: Vec::new(),
            told: BTreeSet::new(),
            told_next: 0,
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::PutStart { client, chain, first, blocks } => {
                let client = self.clients[client];
                let keys = keys(chain, first..first + blocks);
                let answers = self.directory.put_start(client, lineage(chain, first), &keys, self.now);
                assert_eq!(answers.len(), keys.len());
                for (answer, key) in answers.into_iter().zip(keys) {
                    if let Reservation::Write(at) = answer {
                        let deadline = self.now + LIMITS.put_deadline;
                        self.puts.push(Put { client, key, at, deadline, written: false, receiving: false });
                    }
                }
            }
            Op::Write(index) => {
                let now = self.now;
                if let Some(put) = pick(&mut self.puts, index).filter(|put| now < put.deadline) {
                    put.written = true;
                    self.arena.insert(put.at.slot, put.key);
                }
            }
            Op::PutEnd(index) => {
                if let Some(put) = pick(&mut self.puts, index).filter(|put| put.written) {
                    self.directory.put_end(put.client, &[Written { at: put.at, checksum: checksum(put.key) }], self.now);
                    // Whoever says that it is done writes no more.
                    put.deadline = Duration::ZERO;
                }
            }
            Op::Revoke(index) => {
                if let Some(put) = pick(&mut self.puts, index) {
                    self.directory.put_revoke(put.client, &[put.at], self.now);
                    // The client writes no more, but where the node is writing, it goes on to its deadline.
                    if !put.receiving {
                        put.deadline = Duration::ZERO;
                    }
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
                let held = keys.iter().take_while(|key| self.told.contains(key)).count();
                assert_eq!(matched, held, "match and events agree");
            }
            Op::Get { client, chain, blocks, wait_ms } => {
                let (client, call) = (self.clients[client], CallId(self.next));
                self.next += 1;
                let keys = keys(chain, 0..blocks);
                let wait = Duration::from_millis(wait_ms);
                let unanswered = (0..keys.len() as u32).collect();
                self.asked.insert((client, call), Asked { keys: keys.clone(), unanswered, deadline: self.now + wait });
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
            Op::Sleep(ms) => {
                self.now += Duration::from_millis(ms);
                self.directory.tick(self.now);
            }
        }
        self.settle();
        self.check();
    }

    /// A client stops; another one connects in its place. Its writes may go on until their deadline.
    fn client_gone(&mut self, index: usize) {
        let gone = std::mem::replace(&mut self.clients[index], ClientId(self.next));
        self.next += 1;
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
                PoolEvent::Stored { key, .. } => assert!(self.told.insert(key), "stored twice"),
                PoolEvent::Evicted(key) => assert!(self.told.remove(&key), "evicted what was not stored"),
                other => panic!("a directory with one tier never says {other:?}"),
            }
        }
        while let Some(action) = self.directory.poll_action() {
            match action {
                Action::Found { client, call, lease, blocks, .. } => self.found(client, call, lease, &blocks),
                Action::Missed { client, call, indexes, .. } => {
                    let asked = self.asked.get_mut(&(client, call)).expect("answers go to who asked");
                    assert!(self.now >= asked.deadline, "missed before the deadline");
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
        let held: BTreeSet<BlockKey> = self.directory.snapshot().map(stored).collect();
        assert_eq!(held, self.told, "events and directory disagree");
    }

    fn end(mut self) {
        (0..3).for_each(|client| self.client_gone(client));
        self.now += LIMITS.reclaim_max();
        self.directory.tick(self.now);
        self.settle();
        self.check();
        let Usage { free, cached, reserved, leased, quarantined } = self.directory.usage();
        assert_eq!((reserved, leased, quarantined), (0, 0, 0), "something leaked");
        assert_eq!(free + cached, SLOTS as usize);
    }
}

fn keys(chain: u8, range: std::ops::Range<u8>) -> Vec<BlockKey> {
    range.map(|n| BlockKey([chain * 16 + n; 16])).collect()
}

fn lineage(chain: u8, first: u8) -> Lineage {
    let parent = first.checked_sub(1).map(|before| keys(chain, before..first)[0]);
    Lineage { origin: RequestId(u64::from(chain)), tenant: Tenant(u64::from(chain)), parent, position: u32::from(first) }
}

fn checksum(key: BlockKey) -> u64 {
    u64::from(key.0[0]) + 1
}

fn stored(event: PoolEvent) -> BlockKey {
    match event {
        PoolEvent::Stored { key, .. } => key,
        other => panic!("{other:?}"),
    }
}

/// One of the latest: what happens long after is what sleeping is for.
fn pick<T>(from: &mut [T], index: Index) -> Option<&mut T> {
    let latest = from.len().saturating_sub(12);
    let from = &mut from[latest..];
    (!from.is_empty()).then(|| index.get_mut(from))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_interleaving_breaks_the_directory(policy in prop::sample::select(&Policy::ALL[..]), ops in prop::collection::vec(op(), 1..300)) {
        let mut world = World::new(policy);
        ops.into_iter().for_each(|op| world.step(op));
        world.end();
    }
}
