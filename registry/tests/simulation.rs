//! Groups of replicas over a network and disks that fail, in virtual time. One seed replays one run.
//!
//! Checked after every step: one leader per term; entries of the same index and term are the same in every log; an index has at most one
//! committed entry; an epoch belongs to one worker. At the end, when faults have stopped: every acknowledged change is present everywhere,
//! and the group is whole again.
//!
//! `TIDEMILL_SEEDS=10000` runs more seeds than a test should, `TIDEMILL_SEED=N` one.

use std::collections::{BTreeMap, BTreeSet};
use tidemill_proto::{
    ids::{Epoch, Instance},
    message::Role,
};
use tidemill_registry::{
    command::{Command, NewMember, Outcome, Refusal, ReplicaId},
    disk::{Found, Write},
    replica::{Action, Part, Replica, Settings, Ticket},
    state::State,
};

/// Pseudo-random numbers that are the same in every run (SplitMix64, Steele et al. 2014).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

/// The state that survives a crash.
#[derive(Default)]
struct Disk {
    id: u64,
    boot: u64,
    hard_state: Option<Vec<u8>>,
    snapshot: Option<Vec<u8>>,
    entries: BTreeMap<u64, Vec<u8>>,
}

impl Disk {
    fn write(&mut self, writes: Vec<Write>) {
        for write in writes {
            match write {
                Write::HardState(bytes) => self.hard_state = Some(bytes),
                Write::Entries { from, entries } => {
                    self.entries.split_off(&from);
                    self.entries.extend((from..).zip(entries));
                }
                Write::Snapshot { bytes, entries_from } => {
                    self.snapshot = Some(bytes);
                    self.entries = self.entries.split_off(&entries_from);
                }
            }
        }
    }

    fn start(&mut self) -> Found {
        self.boot += 1;
        Found {
            id: ReplicaId(self.id),
            boot: self.boot,
            hard_state: self.hard_state.clone(),
            snapshot: self.snapshot.clone(),
            entries: self.entries.values().cloned().collect(),
        }
    }
}

struct Node {
    disk: Disk,
    peers: Vec<String>,
    /// `None` while it is down.
    replica: Option<Replica>,
    asked: BTreeMap<Ticket, Command>,
    /// Entries up to this index have been compared.
    compared: u64,
}

#[derive(Clone, Copy)]
struct Faults {
    lost: u64,
    doubled: u64,
    delay: u64,
    /// Rate per thousand writes.
    crash_at_write: u64,
    /// Rate per thousand ticks.
    crash: u64,
    cut: u64,
    wipe: u64,
}

const NONE: Faults = Faults { lost: 0, doubled: 0, delay: 1, crash_at_write: 0, crash: 0, cut: 0, wipe: 0 };
const MANY: Faults = Faults { lost: 5, doubled: 5, delay: 4, crash_at_write: 4, crash: 4, cut: 10, wipe: 3 };

struct World {
    numbers: Numbers,
    faults: Faults,
    now: u64,
    nodes: BTreeMap<String, Node>,
    /// Messages under way: time of arrival, sender, receiver, bytes.
    flying: Vec<(u64, String, String, Vec<u8>)>,
    /// Pairs of sender and receiver whose messages are lost.
    cut: BTreeSet<(String, String)>,
    leaders: BTreeMap<u64, u64>,
    logs: BTreeMap<(u64, u64), Vec<u8>>,
    committed: BTreeMap<u64, (u64, Vec<u8>)>,
    acknowledged: Vec<(Command, Outcome)>,
    unconfirmed: usize,
    next_key: u64,
    wiped: usize,
    crashes: usize,
    /// Whether replicas send only truthful messages.
    honest: bool,
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("c{n}")).collect()
}

impl World {
    fn new(seed: u64, count: usize, faults: Faults) -> Self {
        let mut world = Self {
            numbers: Numbers(seed),
            faults,
            now: 0,
            nodes: BTreeMap::new(),
            flying: Vec::new(),
            cut: BTreeSet::new(),
            leaders: BTreeMap::new(),
            logs: BTreeMap::new(),
            committed: BTreeMap::new(),
            acknowledged: Vec::new(),
            unconfirmed: 0,
            next_key: 0,
            wiped: 0,
            crashes: 0,
            honest: true,
        };
        for name in names(count) {
            let peers = names(count).into_iter().filter(|peer| *peer != name).collect();
            world.add(&name, peers);
        }
        world
    }

    fn add(&mut self, name: &str, peers: Vec<String>) {
        let disk = Disk { id: self.numbers.next() | 1, ..Disk::default() };
        self.nodes.insert(name.into(), Node { disk, peers, replica: None, asked: BTreeMap::new(), compared: 0 });
        self.start(name);
    }

    fn start(&mut self, name: &str) {
        let (seed, group) = (self.numbers.next(), self.numbers.next());
        let node = self.nodes.get_mut(name).unwrap();
        let settings = Settings { name: name.into(), peers: node.peers.clone(), seed, group, first_epoch: group >> 1 };
        node.replica = Some(Replica::open(settings, &node.disk.start()).unwrap());
        node.compared = 0;
        self.carry_out(name);
    }

    fn crash(&mut self, name: &str) {
        let node = self.nodes.get_mut(name).unwrap();
        node.replica = None;
        node.asked.clear();
        self.crashes += 1;
    }

    /// A crash that also loses the disk.
    fn wipe(&mut self, name: &str) {
        self.crash(name);
        let id = self.numbers.next() | 1;
        self.nodes.get_mut(name).unwrap().disk = Disk { id, ..Disk::default() };
        self.wiped += 1;
    }

    /// Performs the actions of a replica until there are none, or it crashes.
    fn carry_out(&mut self, name: &str) {
        loop {
            let node = self.nodes.get_mut(name).unwrap();
            let Some(action) = node.replica.as_mut().and_then(Replica::poll) else { break };
            match action {
                Action::Write(writes) => {
                    let (before, after) = (self.numbers.below(1000), self.numbers.below(1000));
                    if before < self.faults.crash_at_write {
                        return self.crash(name);
                    }
                    node.disk.write(writes);
                    if after < self.faults.crash_at_write {
                        return self.crash(name);
                    }
                    node.replica.as_mut().unwrap().written();
                }
                Action::Send { to, bytes } => self.send(name, to, bytes),
                Action::Done { ticket, outcome } => {
                    let command = node.asked.remove(&ticket).expect("it was asked for");
                    match outcome {
                        Ok(outcome) => self.acknowledge(command, outcome),
                        Err(_) => self.unconfirmed += 1,
                    }
                }
                Action::Changed => {}
                Action::Warn(said) | Action::Halted(said) => assert!(!self.honest, "{said}"),
            }
        }
        self.check(name);
    }

    fn send(&mut self, from: &str, to: String, bytes: Vec<u8>) {
        if self.numbers.percent(self.faults.lost) || self.cut.contains(&(from.to_owned(), to.clone())) {
            return;
        }
        let copies = if self.numbers.percent(self.faults.doubled) { 2 } else { 1 };
        for _ in 0..copies {
            let at = self.now + 1 + self.numbers.below(self.faults.delay);
            self.flying.push((at, from.to_owned(), to.clone(), bytes.clone()));
        }
    }

    fn acknowledge(&mut self, command: Command, outcome: Outcome) {
        if !self.honest {
            return;
        }
        if let (Command::Put { expected: Some(expected), key, .. }, Outcome::Put(_)) = (&command, &outcome) {
            let same = |(other, done): &(Command, Outcome)| matches!((other, done), (Command::Put { expected: Some(other), key: of, .. }, Outcome::Put(_)) if other == expected && of == key);
            assert!(!self.acknowledged.iter().any(same), "two changes followed revision {expected} of {key}");
        }
        self.acknowledged.push((command, outcome));
    }

    fn check(&mut self, name: &str) {
        let node = self.nodes.get_mut(name).unwrap();
        let Some(replica) = node.replica.as_ref().filter(|_| self.honest) else { return };
        replica.check_integrity();
        let status = replica.status();
        if status.part == Part::Leader {
            let leader = *self.leaders.entry(status.term).or_insert(status.id);
            assert_eq!(leader, status.id, "two leaders in term {}", status.term);
        }
        for (index, term, bytes) in replica.entries() {
            // Committed entries do not change, so they are compared once.
            if index <= node.compared {
                continue;
            }
            let known = self.logs.entry((index, term)).or_insert_with(|| bytes.to_vec());
            assert_eq!(known, bytes, "two entries {index} of term {term}");
            if index <= status.committed {
                let known = self.committed.entry(index).or_insert_with(|| (term, bytes.to_vec()));
                assert_eq!((known.0, &known.1[..]), (term, bytes), "two committed entries {index}");
            }
        }
        node.compared = status.committed.min(status.last);
    }

    fn step(&mut self) {
        self.now += 1;
        let mut due: Vec<_> = Vec::new();
        let now = self.now;
        self.flying.retain(|message| {
            let arrives = message.0 <= now;
            if arrives {
                due.push(message.clone());
            }
            !arrives
        });
        while !due.is_empty() {
            let (_, from, to, bytes) = due.swap_remove(self.numbers.below(due.len() as u64) as usize);
            if let Some(replica) = self.nodes.get_mut(&to).and_then(|node| node.replica.as_mut()) {
                // Messages for a lost storage reach its successor, which refuses them.
                let _ = replica.message(&from, &bytes);
                self.carry_out(&to);
            }
        }
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            // Clocks differ.
            let ticks = self.numbers.percent(95);
            let Some(replica) = self.nodes.get_mut(&name).unwrap().replica.as_mut().filter(|_| ticks) else { continue };
            replica.tick();
            self.carry_out(&name);
        }
    }

    fn misbehave(&mut self) {
        let names: Vec<_> = self.nodes.keys().cloned().collect();
        let one = names[self.numbers.below(names.len() as u64) as usize].clone();
        if self.numbers.below(1000) < self.faults.cut {
            self.cut.clear();
            if self.numbers.percent(60) {
                // All links of one node, or only those of one direction.
                let (inward, outward) = (self.numbers.percent(70), self.numbers.percent(70));
                for other in &names {
                    self.cut.extend(outward.then(|| (one.clone(), other.clone())));
                    self.cut.extend(inward.then(|| (other.clone(), one.clone())));
                }
            }
        }
        if self.numbers.below(1000) < self.faults.crash {
            self.crash(&one);
        }
        if self.numbers.below(1000) < self.faults.wipe && self.whole() {
            self.wipe(&one);
        }
        for name in names {
            if self.nodes[&name].replica.is_none() && self.numbers.percent(5) {
                self.start(&name);
            }
        }
    }

    /// Whether every coordinator votes and knows all voters.
    fn whole(&self) -> bool {
        self.nodes.values().all(|node| {
            node.replica.as_ref().is_some_and(|replica| {
                let status = replica.status();
                status.voters.iter().eq(self.nodes.keys()) && status.learners.is_empty() && status.leader.is_some()
            })
        })
    }

    /// Sends a random command to a random coordinator.
    fn ask(&mut self) {
        let names: Vec<_> = self.nodes.keys().cloned().collect();
        let name = &names[self.numbers.below(names.len() as u64) as usize];
        let kind = self.numbers.below(4);
        self.next_key += 1;
        let record =
            |key: String, value: u64, expected| Command::Put { kind: "test".into(), key, value: value.to_le_bytes().into(), expected };
        let node = self.nodes.get_mut(name).unwrap();
        let Some(replica) = &mut node.replica else { return };
        let command = match kind {
            0 => {
                let instance = Instance(self.numbers.below(40));
                Command::Register(NewMember { instance, name: "w".into(), role: Role::Decode })
            }
            1 => {
                let found = replica.state().and_then(|state| state.record("test", "counter")).map_or(0, |record| record.revision);
                record("counter".into(), self.next_key, Some(found))
            }
            _ => record(format!("k{}", self.next_key), self.next_key, None),
        };
        if let Ok(ticket) = replica.propose(command.clone(), 60) {
            node.asked.insert(ticket, command);
            self.carry_out(&name.clone());
        }
    }

    fn until(&mut self, ticks: u64, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..ticks {
            if done(self) {
                return;
            }
            self.step();
        }
        let all: Vec<_> = self.nodes.iter().map(|(name, node)| (name, node.replica.as_ref().map(Replica::status))).collect();
        panic!("{what} did not come about within {ticks} ticks: {all:#?}");
    }

    fn state(&self, name: &str) -> &State {
        self.nodes[name].replica.as_ref().and_then(Replica::state).expect("it is in the group")
    }

    /// Stops the faults: the group must become whole, agree, and have everything that it acknowledged.
    fn settle(&mut self) {
        self.faults = NONE;
        self.cut.clear();
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            if self.nodes[&name].replica.is_none() {
                self.start(&name);
            }
        }
        self.until(600, "a whole group", Self::whole);
        self.until(200, "the end of all proposals", |world| world.nodes.values().all(|node| node.asked.is_empty()));
        self.until(100, "the same state everywhere", |world| {
            let first = world.state(world.nodes.keys().next().unwrap());
            world.nodes.keys().all(|name| world.state(name) == first)
        });
        let state = self.state(self.nodes.keys().next().unwrap());
        let mut epochs: BTreeMap<Instance, Epoch> = BTreeMap::new();
        for (command, outcome) in &self.acknowledged {
            match (command, outcome) {
                (Command::Put { key, value, expected: None, .. }, Outcome::Put(revision)) => {
                    let record = state.record("test", key).unwrap_or_else(|| panic!("{key} was acknowledged and is lost"));
                    assert_eq!((&record.value, record.revision), (value, *revision));
                }
                (Command::Put { expected: Some(expected), .. }, Outcome::Put(revision)) => assert!(expected < revision),
                (Command::Put { .. }, Outcome::Refused(Refusal::Revision { found, expected })) => assert_ne!(found, expected),
                (Command::Register(member), Outcome::Registered(epoch)) => {
                    assert_eq!(*epochs.entry(member.instance).or_insert(*epoch), *epoch, "a worker has one epoch");
                    assert_eq!(state.member(member.instance).map(|member| member.epoch), Some(*epoch));
                }
                other => panic!("{other:?}"),
            }
        }
        let distinct: BTreeSet<_> = epochs.values().collect();
        assert_eq!(distinct.len(), epochs.len(), "an epoch is one worker's");
    }
}

/// Runs `scenario` for many seeds, and names a seed that fails.
fn seeds(scenario: impl Fn(u64) + std::panic::RefUnwindSafe) {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    if let Some(seed) = number("TIDEMILL_SEED") {
        return scenario(seed);
    }
    for seed in 0..number("TIDEMILL_SEEDS").unwrap_or(150) {
        if let Err(panic) = std::panic::catch_unwind(|| scenario(seed)) {
            eprintln!("TIDEMILL_SEED={seed} replays this");
            std::panic::resume_unwind(panic);
        }
    }
}

fn under_faults(seed: u64, count: usize) -> World {
    let mut world = World::new(seed, count, MANY);
    for _ in 0..800 {
        world.step();
        world.misbehave();
        if world.numbers.percent(30) {
            world.ask();
        }
    }
    world.settle();
    world
}

#[test]
fn three_coordinators_lose_nothing_that_they_acknowledged() {
    seeds(|seed| drop(under_faults(seed, 3)));
}

#[test]
fn five_coordinators_lose_nothing_that_they_acknowledged() {
    seeds(|seed| drop(under_faults(seed ^ 0x5555_0000, 5)));
}

/// A run that tests little would also pass.
#[test]
fn the_faults_happen_and_work_is_done_meanwhile() {
    let worlds: Vec<_> = (0..20).map(|seed| under_faults(seed, 3)).collect();
    let sum = |of: fn(&World) -> usize| worlds.iter().map(of).sum::<usize>();
    let (acknowledged, crashes, wiped) = (sum(|w| w.acknowledged.len()), sum(|w| w.crashes), sum(|w| w.wiped));
    let elections = sum(|w| w.leaders.len());
    eprintln!("20 runs: {acknowledged} acknowledged, {crashes} crashes, {wiped} wiped, {elections} leaders");
    assert!(acknowledged > 1000 && crashes > 60 && wiped > 5 && elections > 60);
}

#[test]
fn one_seed_is_one_run() {
    let run = |seed| {
        let world = under_faults(seed, 3);
        (world.acknowledged, world.leaders, world.committed, world.crashes)
    };
    assert_eq!(run(11), run(11));
}

#[test]
fn a_coordinator_alone_needs_nobody() {
    let mut world = World::new(1, 1, NONE);
    world.until(3, "a group of one", World::whole);
    for _ in 0..3000 {
        world.step();
        world.ask();
        if world.numbers.below(500) == 0 {
            world.crash("c0");
            world.start("c0");
        }
    }
    world.settle();
    assert!(world.acknowledged.len() > 2000, "{}", world.acknowledged.len());
}

#[test]
fn nobody_founds_a_group_while_somebody_may_know_one() {
    let mut world = World::new(2, 3, NONE);
    world.crash("c1");
    for _ in 0..200 {
        world.step();
    }
    assert!(world.nodes.values().all(|node| node.replica.as_ref().is_none_or(|replica| replica.state().is_none())));
    world.start("c1");
    world.until(200, "a group", World::whole);
    let group = world.state("c0").group();
    // The founder returns with an empty disk, and finds only one other replica: together they are no majority that knows the group.
    world.crash("c2");
    world.wipe("c0");
    world.start("c0");
    for _ in 0..200 {
        world.step();
    }
    assert!(world.nodes["c0"].replica.as_ref().unwrap().state().is_none());
    world.start("c2");
    world.until(300, "a whole group", World::whole);
    assert_eq!(world.state("c0").group(), group, "it joined the group that there was");
}

#[test]
fn one_coordinator_grows_to_three_and_a_lost_one_is_taken_out() {
    let mut world = World::new(3, 1, NONE);
    for _ in 0..1500 {
        world.step();
        world.ask();
    }
    world.crash("c0");
    world.nodes.get_mut("c0").unwrap().peers = vec!["c1".into(), "c2".into()];
    world.start("c0");
    world.add("c1", vec!["c0".into(), "c2".into()]);
    world.add("c2", vec!["c0".into(), "c1".into()]);
    world.until(300, "a group of three", World::whole);
    world.settle();

    world.crash("c2");
    let lost = world.nodes.remove("c2").unwrap();
    let leads = |world: &World| {
        world
            .nodes
            .iter()
            .find(|(_, node)| node.replica.as_ref().is_some_and(|r| r.status().part == Part::Leader))
            .map(|(name, _)| name.clone())
    };
    world.until(100, "a leader", |world| leads(world).is_some());
    let leader = leads(&world).unwrap();
    world.nodes.get_mut(&leader).unwrap().replica.as_mut().unwrap().remove("c2").unwrap();
    world.carry_out(&leader);
    world.until(100, "a group of two", World::whole);
    // It returns in its old state, and does not disturb them.
    world.nodes.insert("c2".into(), lost);
    let term = world.nodes[&leader].replica.as_ref().unwrap().status().term;
    world.start("c2");
    for _ in 0..300 {
        world.step();
    }
    assert_eq!(world.nodes[&leader].replica.as_ref().unwrap().status().term, term);
}

#[test]
fn a_minority_knows_what_it_knew_and_confirms_nothing() {
    let mut world = World::new(4, 3, NONE);
    world.until(200, "a group", World::whole);
    for _ in 0..50 {
        world.step();
        world.ask();
    }
    world.settle();
    let before = world.state("c0").clone();
    world.crash("c1");
    world.crash("c2");
    let node = world.nodes.get_mut("c0").unwrap();
    let command = Command::Put { kind: "test".into(), key: "late".into(), value: Vec::new(), expected: None };
    let ticket = node.replica.as_mut().unwrap().propose(command.clone(), 60).unwrap();
    node.asked.insert(ticket, command);
    world.carry_out("c0");
    let unconfirmed = world.unconfirmed;
    world.until(70, "the proposal's end", |world| world.unconfirmed > unconfirmed);
    assert_eq!(*world.state("c0"), before);
    world.settle();
}

#[test]
fn whatever_a_peer_sends_nothing_breaks() {
    let mut world = World::new(5, 3, NONE);
    world.until(200, "a group", World::whole);
    world.honest = false;
    let mut sent: Vec<(String, String, Vec<u8>)> = Vec::new();
    for _ in 0..300 {
        world.step();
        world.ask();
        sent.extend(world.flying.iter().map(|(_, from, to, bytes)| (from.clone(), to.clone(), bytes.clone())));
        for _ in 0..5 {
            let (from, to, mut bytes) = sent[world.numbers.below(sent.len() as u64) as usize].clone();
            for _ in 0..=world.numbers.below(3) {
                let place = world.numbers.below(bytes.len() as u64) as usize;
                bytes[place] = world.numbers.next() as u8;
            }
            if let Some(replica) = world.nodes.get_mut(&to).unwrap().replica.as_mut() {
                let _ = replica.message(&from, &bytes);
                // Its actions may be nonsense now, so they are dropped; it is enough that it survives.
                while let Some(action) = replica.poll() {
                    if let Action::Write(_) = action {
                        replica.written();
                    }
                }
            }
        }
    }
}
