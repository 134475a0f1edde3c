//! Several layouts of different block sizes in one memory, under clients that stop without notice, write late and read late, come and go.
//! The memory is modelled unit by unit with the last writer of each, and with its places for generations, as the shell sets them. One seed
//! determines everything. Checked after every step:
//!
//! - a reader is only ever handed slots of its own layout that hold the block it asked for, and they stay so as long as its lease runs
//! - a reader that comes after its lease, or after its connection ended, sees by the generation if anything else was written there, also
//!   where the layout itself is gone
//! - no layout with clients loses memory below its floor
//! - each directory's events add up to its content, and the books balance
//!
//! Bugs are planted where this shell joins the core, and each is found.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};
use tidemill_kvpool::core::{
    directory::{Action, ClientId, Directory, Limits, Loaded},
    division::{Division, LayoutNumber, Share},
    eviction::Policy,
    layouts::Layouts,
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    message::PoolEvent,
    pool::{CallId, LeaseId, Lineage, Reservation, Room, SlotRef, Tier, Via, Written},
};

/// The memory, in units.
const UNITS: u64 = 96;
const EXTENT_UNITS: u64 = 8;
const LIMITS: Limits = Limits { put_deadline: Duration::from_millis(3000), lease: Duration::from_millis(4000) };
/// Slots of each layout on its disk, if it has one.
const DISK_SLOTS: u32 = 6;

/// A bug of the shell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Planted {
    /// A get is answered by the directory of another layout.
    OtherLayout,
    /// Readers' leases are ended when another layout needs memory, though they still read.
    TakeLeased,
    /// Slots that a layout lost keep the generation that their late readers expect.
    KeepGenerations,
    /// Slots of a layout that is removed keep it.
    KeepRemoved,
    /// A layout whose clients are there counts as one without clients.
    Undercut,
}

struct World {
    random: u64,
    planted: Option<Planted>,
    policy: Policy,
    has_disk: bool,
    layouts: Layouts,
    parts: Vec<Part>,
    now: Duration,
    next: u64,
    /// The last writer of each unit: layout, slot, block.
    memory: Vec<Option<(usize, u32, BlockKey)>>,
    /// The generation in each unit's place.
    generations: Vec<u64>,
    floors_held: u64,
    moves: u64,
    removals: u64,
}

/// A layout, and what the model knows of it.
struct Part {
    /// `None` while it is removed. It has another number each time.
    number: Option<LayoutNumber>,
    stride: u64,
    clients: Vec<ClientId>,
    puts: Vec<Put>,
    readings: Vec<Reading>,
    asked: BTreeMap<(ClientId, CallId), Vec<BlockKey>>,
    told: BTreeSet<BlockKey>,
    disk: BTreeMap<u32, BlockKey>,
}

struct Put {
    client: ClientId,
    key: BlockKey,
    at: SlotRef,
    deadline: Duration,
    written: bool,
}

struct Reading {
    client: ClientId,
    lease: LeaseId,
    until: Duration,
    blocks: Vec<(BlockKey, SlotRef)>,
}

impl Put {
    /// Whether the writer sees that it must not write any more. It may look at the clock just before its deadline, and write within the
    /// quarantine.
    fn is_late(&self, now: Duration) -> bool {
        now >= self.deadline + Limits::QUARANTINE / 2
    }
}

impl World {
    fn new(seed: u64, planted: Option<Planted>) -> Self {
        let mut world = Self {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            planted,
            policy: Policy::default(),
            has_disk: false,
            layouts: Layouts::new(Division::new(UNITS, EXTENT_UNITS)),
            parts: Vec::new(),
            now: Duration::from_secs(1),
            next: 10,
            memory: vec![None; UNITS as usize],
            generations: vec![0; UNITS as usize],
            floors_held: 0,
            moves: 0,
            removals: 0,
        };
        world.policy = Policy::ALL[world.below(4) as usize];
        world.has_disk = world.below(3) == 0;
        // One smaller than an extent, one that does not divide it, one larger.
        for (n, stride) in [2, 3, 11].into_iter().enumerate() {
            world.parts.push(Part {
                number: None,
                stride,
                clients: Vec::new(),
                puts: Vec::new(),
                readings: Vec::new(),
                asked: BTreeMap::new(),
                told: BTreeSet::new(),
                disk: BTreeMap::new(),
            });
            world.add(n);
        }
        for n in 0..3 {
            (0..1 + world.below(2)).for_each(|_| world.join(n));
        }
        world
    }

    /// Adds a layout that is not there.
    fn add(&mut self, n: usize) {
        self.next += 1;
        let (number, stride) = (LayoutNumber(self.next as u16), self.parts[n].stride);
        let slots = (UNITS / stride) as u32;
        let mut directory = Directory::new(slots, LIMITS, self.policy.build(slots));
        if self.has_disk {
            directory = directory.with_disk(DISK_SLOTS, self.policy.build(DISK_SLOTS));
        }
        let share = Share { weight: 1 + self.below(3) as u32, floor_percent: [0, 10, 30][self.below(3) as usize] };
        self.layouts.add(number, stride, slots, share, directory);
        self.parts[n].number = Some(number);
    }

    /// Removes a layout if it has no clients and nothing of it is in use. Its late readers stay.
    fn remove(&mut self, n: usize) {
        let Some(number) = self.parts[n].number.filter(|_| self.parts[n].clients.is_empty()) else { return };
        let Some(withdrawn) = self.layouts.remove(number) else { return };
        if self.planted != Some(Planted::KeepRemoved) {
            withdrawn.slots.iter().for_each(|at| self.set_generation(n, *at));
        }
        let (now, part) = (self.now, &mut self.parts[n]);
        assert!(part.puts.iter().all(|put| put.is_late(now)), "a slot in which somebody may write is gone");
        part.number = None;
        part.puts.clear();
        part.told.clear();
        part.disk.clear();
        self.removals += 1;
    }

    /// A random number below `n` (xorshift64*).
    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }

    fn pick<T>(&mut self, from: &[T]) -> Option<usize> {
        (!from.is_empty()).then(|| self.below(from.len() as u64) as usize)
    }

    fn step(&mut self) {
        let n = self.below(3) as usize;
        match self.below(100) {
            0..30 => self.put(n),
            30..50 => self.write_and_end(n),
            50..68 => self.get(n),
            68..80 => self.release(n),
            80..84 => self.leave(n),
            84..88 => self.join((0..3).find(|&n| self.parts[n].number.is_none()).unwrap_or(n)),
            88..91 => self.forget(n),
            91..93 => {
                while !self.parts[n].clients.is_empty() {
                    self.leave(n);
                }
            }
            _ => {
                let ms = [20, 20, 200, 5000][self.below(4) as usize];
                self.now += Duration::from_millis(ms);
                let now = self.now;
                self.there().into_iter().for_each(|n| self.directory(n).tick(now));
            }
        }
        for n in self.there() {
            self.settle(n);
            if self.parts[n].clients.is_empty() && self.below(4) == 0 {
                self.remove(n);
            }
        }
        self.check();
    }

    /// The layouts that are not removed.
    fn there(&self) -> Vec<usize> {
        (0..3).filter(|&n| self.parts[n].number.is_some()).collect()
    }

    fn number(&self, n: usize) -> LayoutNumber {
        self.parts[n].number.expect("it is not removed")
    }

    fn directory(&mut self, n: usize) -> &mut Directory {
        self.layouts.directory(self.number(n))
    }

    /// Takes memory from other layouts, as the shell does before it asks for slots.
    fn make_room(&mut self, n: usize, wanted: usize) {
        if self.planted == Some(Planted::TakeLeased) {
            for other in self.there().into_iter().filter(|&other| other != n) {
                let leases: Vec<_> = self.parts[other].readings.iter().map(|reading| (reading.client, reading.lease)).collect();
                leases.into_iter().for_each(|(client, lease)| self.directory(other).release(client, lease));
            }
        }
        let victim = self.parts[(n + 1) % 3].number.filter(|_| self.planted == Some(Planted::Undercut));
        let was_in_use = victim.is_some_and(|victim| self.layouts.division().is_in_use(victim));
        victim.into_iter().for_each(|victim| self.layouts.set_in_use(victim, false));
        let others: Vec<LayoutNumber> = self.there().into_iter().filter(|&other| other != n).map(|other| self.number(other)).collect();
        let before: Vec<usize> = others.iter().map(|&number| self.layouts.division().owned(number)).collect();
        let withdrawn = self.layouts.make_room(self.number(n), wanted, self.now);
        victim.into_iter().for_each(|victim| self.layouts.set_in_use(victim, was_in_use));
        self.moves += withdrawn.len() as u64;
        for withdrawn in withdrawn {
            let other = self.parts.iter().position(|part| part.number == Some(withdrawn.layout)).unwrap();
            if self.planted != Some(Planted::KeepGenerations) {
                withdrawn.slots.iter().for_each(|at| self.set_generation(other, *at));
            }
        }
        for (number, before) in others.into_iter().zip(before) {
            let division = self.layouts.division();
            let floor = division.floor(number);
            assert!(division.owned(number) >= floor.min(before), "{number:?} was left less than its floor of {floor}");
            self.floors_held += u64::from(floor > 0 && division.owned(number) == floor);
        }
    }

    fn set_generation(&mut self, n: usize, at: SlotRef) {
        let place = u64::from(at.slot) * self.parts[n].stride;
        self.generations[place as usize] = at.generation;
    }

    fn units(&self, n: usize, slot: u32) -> std::ops::Range<usize> {
        let stride = self.parts[n].stride as usize;
        slot as usize * stride..(slot as usize + 1) * stride
    }

    fn write(&mut self, n: usize, slot: u32, key: BlockKey) {
        let units = self.units(n, slot);
        self.memory[units].fill(Some((n, slot, key)));
    }

    fn holds(&self, n: usize, slot: u32, key: &BlockKey) -> bool {
        self.memory[self.units(n, slot)].iter().all(|unit| *unit == Some((n, slot, *key)))
    }

    fn put(&mut self, n: usize) {
        let Some(client) = self.pick(&self.parts[n].clients.clone()).map(|place| self.parts[n].clients[place]) else { return };
        let (chain, blocks) = (self.below(6) as u8, 1 + self.below(6) as u8);
        let keys = keys(n, chain, blocks);
        let wanted = self.directory(n).to_write(&keys);
        self.make_room(n, wanted);
        let now = self.now;
        let lineage = Lineage { origin: RequestId(u64::from(chain)), tenant: Tenant(u64::from(chain) % 2), parent: None, position: 0 };
        let answers = self.directory(n).put_start(client, lineage, Room::Made, &keys, now);
        for (answer, key) in answers.into_iter().zip(keys) {
            if let Reservation::Write(at) = answer {
                self.set_generation(n, at);
                self.parts[n].puts.push(Put { client, key, at, deadline: now + LIMITS.put_deadline, written: false });
            }
        }
    }

    /// A writer fills a slot unless it sees that it is late, and mostly says so.
    fn write_and_end(&mut self, n: usize) {
        for _ in 0..3 {
            let Some(place) = self.pick(&self.parts[n].puts.iter().map(|_| ()).collect::<Vec<_>>()) else { return };
            let put = &self.parts[n].puts[place];
            let &Put { client, key, at, .. } = put;
            if !put.is_late(self.now) {
                self.write(n, at.slot, key);
                self.parts[n].puts[place].written = true;
            }
            if self.parts[n].puts[place].written && self.below(5) > 0 {
                let now = self.now;
                self.directory(n).put_end(client, &[Written { at, checksum: checksum(key) }], now);
                self.parts[n].puts.swap_remove(place);
            }
        }
    }

    fn get(&mut self, n: usize) {
        let Some(client) = self.pick(&self.parts[n].clients.clone()).map(|place| self.parts[n].clients[place]) else { return };
        let (chain, blocks) = (self.below(6) as u8, 1 + self.below(6) as u8);
        let keys = keys(n, chain, blocks);
        let wanted = self.directory(n).to_load(&keys);
        self.make_room(n, wanted);
        self.next += 1;
        let (call, now) = (CallId(self.next), self.now);
        self.parts[n].asked.insert((client, call), keys.clone());
        let asked_of = if self.planted == Some(Planted::OtherLayout) && self.below(8) == 0 { (n + 1) % 3 } else { n };
        if asked_of != n && self.parts[asked_of].number.is_some() {
            // The keys of another layout are other keys: this is a shell that mixes up whose directory and keys these are.
            let keys = self::keys(asked_of, chain, blocks);
            self.directory(asked_of).get(client, call, &keys, Duration::ZERO, Via::Slots, now);
            while let Some(action) = self.directory(asked_of).poll_action() {
                self.act(n, action);
            }
            return;
        }
        let wait = Duration::from_millis(self.below(2) * 1000);
        self.directory(n).get(client, call, &keys, wait, Via::Slots, now);
    }

    fn release(&mut self, n: usize) {
        let Some(place) = self.pick(&self.parts[n].readings.iter().map(|_| ()).collect::<Vec<_>>()) else { return };
        let Reading { client, lease, .. } = self.parts[n].readings.swap_remove(place);
        if self.parts[n].number.is_some() {
            self.directory(n).release(client, lease);
        }
    }

    fn join(&mut self, n: usize) {
        if self.parts[n].number.is_none() {
            self.add(n);
        }
        self.next += 1;
        let client = ClientId(self.next);
        self.parts[n].clients.push(client);
        self.layouts.set_in_use(self.number(n), true);
        self.make_room(n, 0);
    }

    fn leave(&mut self, n: usize) {
        let Some(place) = self.pick(&self.parts[n].clients.clone()) else { return };
        let client = self.parts[n].clients.swap_remove(place);
        let now = self.now;
        self.directory(n).client_gone(client, now);
        let part = &mut self.parts[n];
        // It may be in the middle of a copy, which nothing protects now.
        part.readings.iter_mut().filter(|reading| reading.client == client).for_each(|reading| reading.until = reading.until.min(now));
        part.asked.retain(|(of, _), _| *of != client);
        let in_use = !part.clients.is_empty();
        self.layouts.set_in_use(self.number(n), in_use);
    }

    fn forget(&mut self, n: usize) {
        let Some(place) = self.pick(&self.parts[n].readings.iter().map(|_| ()).collect::<Vec<_>>()) else { return };
        let now = self.now;
        let first = self.parts[n].readings[place].blocks.first().copied();
        if let Some((_, at)) = first.filter(|_| self.parts[n].number.is_some()) {
            self.directory(n).forget(at, now);
        }
    }

    fn settle(&mut self, n: usize) {
        while let Some(action) = self.directory(n).poll_action() {
            self.act(n, action);
        }
        for event in self.directory(n).take_events().events {
            let told = &mut self.parts[n].told;
            match event {
                PoolEvent::Stored { key, .. } => assert!(told.insert(key), "stored twice"),
                PoolEvent::Moved { key, .. } => assert!(told.contains(&key), "moved from nowhere"),
                PoolEvent::Evicted(key) => assert!(told.remove(&key), "evicted what was not stored"),
                PoolEvent::Cleared => panic!("a directory never starts over"),
            }
        }
    }

    /// The shell's part in an action. The disk works at once.
    fn act(&mut self, n: usize, action: Action) {
        let now = self.now;
        match action {
            Action::Found { client, call, lease, blocks, .. } => {
                let keys = self.parts[n].asked[&(client, call)].clone();
                let mut reading = Reading { client, lease, until: now + LIMITS.lease, blocks: Vec::new() };
                for block in &blocks {
                    let key = keys[block.index as usize];
                    assert_eq!(block.checksum, checksum(key), "another block's checksum");
                    assert!(self.holds(n, block.at.slot, &key), "slot {} of layout {n} holds something else", block.at.slot);
                    reading.blocks.push((key, block.at));
                }
                self.parts[n].readings.push(reading);
            }
            Action::Missed { .. } => {}
            Action::Store { disk, from, block } => {
                assert!(self.holds(n, from.slot, &block.key), "a store copies another block");
                self.parts[n].disk.insert(disk, block.key);
                self.directory(n).stored(disk, Ok(()), now);
            }
            Action::Load { disk, to, checksum: expected, .. } => {
                let key = self.parts[n].disk[&disk];
                assert_eq!(checksum(key), expected);
                self.set_generation(n, to);
                self.write(n, to.slot, key);
                self.directory(n).loaded(&[Loaded { disk, to, outcome: Ok(()) }], now);
            }
            Action::Erase { .. } | Action::GiveUpDisk | Action::Fetch { .. } | Action::Fence { .. } => panic!("{action:?}"),
        }
    }

    fn check(&mut self) {
        self.layouts.check_integrity();
        for n in 0..3 {
            let part = &self.parts[n];
            for reading in &part.readings {
                for (key, at) in &reading.blocks {
                    let place = self.units(n, at.slot).start;
                    let is_valid = self.generations[place] == at.generation;
                    let holds = self.holds(n, at.slot, key);
                    assert!(holds || self.now >= reading.until, "a leased slot was written");
                    assert!(holds || !is_valid, "a late reader takes another block's bytes for its own");
                }
            }
            if let Some(number) = part.number {
                let held: BTreeSet<BlockKey> = self.layouts.get(number).unwrap().snapshot().map(stored).collect();
                assert_eq!(held, part.told, "events and directory disagree");
            }
        }
        let (now, lease) = (self.now, LIMITS.lease);
        // Readers that come very late give up in the end.
        self.parts.iter_mut().for_each(|part| part.readings.retain(|reading| now < reading.until + lease));
    }

    /// All clients leave, and everything that they held comes free. Then one layout gets all of the memory.
    fn end(mut self) -> [u64; 3] {
        for n in 0..3 {
            while !self.parts[n].clients.is_empty() {
                self.leave(n);
            }
        }
        self.now += LIMITS.reclaim_max() + Duration::from_secs(1);
        for n in self.there() {
            let now = self.now;
            self.directory(n).tick(now);
            self.settle(n);
        }
        self.check();
        self.parts.iter_mut().for_each(|part| part.puts.clear());
        self.join(1);
        let all = (UNITS / self.parts[1].stride) as usize;
        self.make_room(1, all);
        self.settle(1);
        assert_eq!(self.directory(1).slots(), all, "a layout without clients gives everything");
        for gone in self.there().into_iter().filter(|&n| n != 1) {
            self.remove(gone);
        }
        assert_eq!(self.there(), [1], "nothing of the others is in use");
        self.check();
        [self.moves, self.floors_held, self.removals]
    }
}

/// Keys of one layout: no two layouts have one in common.
fn keys(n: usize, chain: u8, blocks: u8) -> Vec<BlockKey> {
    (0..blocks).map(|block| BlockKey([(n as u8 + 1) << 6 | chain << 3 | block; 16])).collect()
}

fn checksum(key: BlockKey) -> u64 {
    u64::from(key.0[0]) + 1
}

fn stored(event: PoolEvent) -> BlockKey {
    match event {
        PoolEvent::Stored { key, tier: Tier::Dram | Tier::Nvme } => key,
        other => panic!("{other:?}"),
    }
}

fn run(seed: u64, planted: Option<Planted>) -> [u64; 3] {
    let mut world = World::new(seed, planted);
    (0..250).for_each(|_| world.step());
    world.end()
}

#[test]
fn no_layout_reads_or_starves_another() {
    let [mut moves, mut floors, mut removals] = [0; 3];
    for seed in 0..3000 {
        let result = catch_unwind(|| run(seed, None));
        let [moved, held, removed] = result.unwrap_or_else(|_| panic!("seed {seed}"));
        moves += moved;
        floors += held;
        removals += removed;
    }
    // This only means something if memory changes hands often, layouts are down to their floors, and go while others are busy.
    assert!(moves > 3000 * 10 && floors > 3000 && removals > 3000 * 4, "{moves} moves, at floors {floors} times, {removals} removals");
}

#[test]
fn planted_bugs_are_found() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let bugs = [
        (Planted::OtherLayout, &["holds something else", "another block's checksum"][..]),
        (Planted::TakeLeased, &["a leased slot was written"]),
        (Planted::KeepGenerations, &["a late reader takes another block's bytes for its own"]),
        (Planted::KeepRemoved, &["a late reader takes another block's bytes for its own"]),
        (Planted::Undercut, &["was left less than its floor"]),
    ];
    let found = bugs.map(|(planted, words)| {
        let first = (0..200).find_map(|seed| Some((seed, catch_unwind(AssertUnwindSafe(|| run(seed, Some(planted)))).err()?)));
        (
            planted,
            words,
            first.map(|(seed, panic)| {
                (seed, panic.downcast::<String>().map(|text| *text).unwrap_or_else(|panic| (*panic.downcast::<&str>().unwrap()).to_owned()))
            }),
        )
    });
    std::panic::set_hook(usual);
    for (planted, words, first) in found {
        let (seed, text) = first.unwrap_or_else(|| panic!("{planted:?} is not found"));
        println!("{planted:?}: seed {seed}: {text}");
        assert!(words.iter().any(|word| text.contains(word)), "{planted:?}, seed {seed}: {text}");
    }
}
