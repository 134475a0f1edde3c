//! Nodes without clients that share one bucket: blocks written by one are found by the others, and any fault of the bucket is a miss in
//! time.

use super::{bucket::Bucket, *};
use crate::{
    arena::Arena,
    core::{
        directory::{ClientId, Directory, Limits, Place},
        division::Share,
        eviction::Policy,
        objects::budget,
        validate::validate,
    },
    node::{shared::Shared, store::Tiers},
    settings::ObjectPlace,
    transport::rdma::DeviceNames,
};
use futures_util::TryStreamExt;
use object_store::{
    ObjectStore, ObjectStoreExt,
    memory::InMemory,
    path::Path,
    throttle::{ThrottleConfig, ThrottledStore},
};
use std::{ops::Range, time::Instant};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint, Tenant},
    ids::RequestId,
    message::PoolEvent,
    pool::{CallId, Lineage, Reservation, Room, Tier, Via, Written},
};

const KIND: Kind = Kind { layout: LayoutFingerprint([4; 16]), block_bytes: 1000 };
const WRITER: ClientId = ClientId(1);
const READER: ClientId = ClientId(2);
const SLOTS: u64 = 32;
const ALL: Range<u8> = 0..12;

/// The parts of a node that involve the bucket.
struct Rig {
    store: Arc<Store>,
    tier: Arc<ObjectTier>,
    runtime: Runtime,
}

fn settings() -> settings::Objects {
    settings::Objects {
        place: ObjectPlace::Directory("/".into()),
        capacity_bytes: 1 << 20,
        pack_bytes: 1 << 20,
        uses_min: 2,
        flush: Duration::from_secs(3600),
        refresh: Duration::from_secs(3600),
        deadline: Duration::from_millis(300),
        limits: budget::Limits { requests_per_s: 100, usd_per_1000_writes: 0.005, usd_per_1000_reads: 0.0004, usd_per_day: None },
        secret: None,
    }
}

impl Rig {
    fn new(objects: Arc<dyn ObjectStore>, settings: settings::Objects) -> Self {
        let bucket = Bucket::new(objects, Path::from("kv"), &settings, KIND);
        let unstarted = ObjectTier::with_bucket(settings, KIND, bucket).unwrap();
        let tier = Arc::clone(&unstarted.tier);
        let limits = Limits { put_deadline: Duration::from_secs(10), lease: Duration::from_secs(10) };
        let directory = Directory::new(SLOTS as u32, limits, Policy::default().build(SLOTS as u32));
        let directory = directory.with_objects(tier.uses_min(), tier.deadline());
        let arena = Arena::create(SLOTS * 1024, KIND.block_bytes, [0; 16]).unwrap();
        let shared = Shared::new(Arc::clone(arena.memory()), DeviceNames::All);
        let tiers = Tiers { objects: Some(Arc::clone(&tier)), ..Tiers::default() };
        let store = Store::new(&shared, (KIND.layout, Share::default()), arena, directory, tiers, Arc::default()).unwrap();
        unstarted.start(&store);
        Self { store, tier, runtime: Builder::new_current_thread().enable_all().build().unwrap() }
    }

    /// Puts a chain of blocks, and reads them once more, so that they are worth writing.
    fn fill(&self, blocks: Range<u8>) {
        let keys = keys(blocks.clone());
        let lineage = Lineage { origin: RequestId(1), tenant: Tenant(1), parent: None, position: 0 };
        let answers = self.store.apply(|directory, now| directory.put_start(WRITER, lineage, Room::Made, &keys, now));
        let written = answers.iter().zip(blocks).map(|(answer, n)| {
            let Reservation::Write(at) = *answer else { panic!("block {n}: {answer:?}") };
            self.store.arena().set_generation(at.slot, at.generation);
            Written { at, checksum: self.store.arena().write_block(at.slot, &bytes(n)) }
        });
        let written: Vec<Written> = written.collect();
        self.store.apply(|directory, now| directory.put_end(WRITER, &written, now));
        self.store.apply(|directory, now| directory.get(WRITER, CallId(1), &keys, Duration::ZERO, Via::Slots, now));
        self.store.apply(|directory, now| directory.client_gone(WRITER, now));
    }

    fn flush(&self) {
        self.runtime.block_on(Arc::clone(&self.tier).flush(Arc::clone(&self.store)));
    }

    /// Refreshes the catalog now.
    fn refresh(&self) {
        self.runtime.block_on(async { self.tier.keeper.lock().await.look(&self.tier, &self.store).await });
    }

    fn known(&self) -> usize {
        self.store.apply(|directory, _| directory.catalog().unwrap().keys().len())
    }

    /// Gets blocks. Returns how many of them came, with the right bytes, and the time until the last one came or was missed.
    fn get(&self, blocks: Range<u8>) -> (usize, Duration) {
        let (keys, started) = (keys(blocks.clone()), Instant::now());
        self.store.apply(|directory, now| directory.get(READER, CallId(1), &keys, Duration::ZERO, Via::Slots, now));
        while self.store.apply(|directory, now| {
            directory.tick(now);
            directory.check_integrity();
            directory.usage().reserved > 0
        }) {
            assert!(started.elapsed() < Duration::from_secs(30), "a fetch never ends");
            std::thread::sleep(Duration::from_millis(2));
        }
        let took = started.elapsed();
        let held = self.store.apply(|directory, now| {
            directory.client_gone(READER, now);
            directory.hottest()
        });
        for held in &held {
            let Place::Dram(found) = held.place else { panic!("there is no disk") };
            let (copy, copied) = self.store.arena().read_block(found.at.slot);
            assert_eq!((validate(copied, &found), copy), (Ok(()), bytes(held.key.0[0])));
        }
        (held.iter().filter(|held| keys.contains(&held.key)).count(), took)
    }
}

fn key(n: u8) -> BlockKey {
    BlockKey([n; 16])
}

fn keys(blocks: Range<u8>) -> Vec<BlockKey> {
    blocks.map(key).collect()
}

fn bytes(n: u8) -> Vec<u8> {
    (0..KIND.block_bytes).map(|at| (at as u8).wrapping_mul(n + 3) ^ (at >> 8) as u8).collect()
}

fn packs(objects: &dyn ObjectStore) -> Vec<Path> {
    let runtime = Builder::new_current_thread().build().unwrap();
    let packs = runtime.block_on(objects.list(None).map_ok(|object| object.location).try_collect::<Vec<_>>());
    packs.unwrap()
}

/// Changes every pack of a bucket.
fn change(objects: &dyn ObjectStore, change: impl Fn(&mut Vec<u8>)) {
    let runtime = Builder::new_current_thread().build().unwrap();
    for path in packs(objects) {
        let mut object = runtime.block_on(async { objects.get(&path).await.unwrap().bytes().await }).unwrap().to_vec();
        change(&mut object);
        runtime.block_on(objects.put(&path, object.into())).unwrap();
    }
}

/// A bucket with one pack that holds all blocks.
fn written() -> Arc<InMemory> {
    let objects = Arc::new(InMemory::new());
    let node = Rig::new(Arc::clone(&objects) as _, settings());
    node.fill(ALL);
    node.flush();
    assert_eq!(packs(&*objects).len(), 1);
    objects
}

#[test]
fn what_one_node_writes_another_finds_and_tells() {
    let objects = written();
    let other = Rig::new(Arc::clone(&objects) as _, settings());
    other.refresh();
    let told: Vec<PoolEvent> = other.store.apply(|directory, _| directory.take_events().events);
    assert!(keys(ALL).into_iter().all(|key| told.contains(&PoolEvent::Stored { key, tier: Tier::Object })), "{told:?}");
    assert_eq!(other.get(ALL).0, ALL.len());
    let counters = other.tier.counters();
    assert_eq!((counters.loaded.transfers, counters.reads, counters.errors), (1, 2, 0), "neighbours come in one read");
    let told: Vec<PoolEvent> = other.store.apply(|directory, _| directory.take_events().events);
    assert!(keys(ALL).into_iter().all(|key| told.contains(&PoolEvent::Moved { key, tier: Tier::Dram })), "{told:?}");
    other.flush();
    assert_eq!(packs(&*objects).len(), 1, "nothing is written twice");
    let of_other_secret = Rig::new(objects, settings::Objects { secret: Some(settings::HiddenBytes::new(vec![1; 16])), ..settings() });
    of_other_secret.refresh();
    assert_eq!((of_other_secret.known(), of_other_secret.tier.counters().corrupt), (0, 1));
}

#[test]
fn what_is_used_once_is_not_written() {
    let objects = Arc::new(InMemory::new());
    let node = Rig::new(Arc::clone(&objects) as _, settings::Objects { uses_min: 3, ..settings() });
    node.fill(ALL);
    node.flush();
    assert!(packs(&*objects).is_empty());
}

#[test]
fn a_server_that_is_slow_costs_no_more_than_the_deadline_and_is_left_alone() {
    let objects = written();
    let slow = ThrottleConfig { wait_get_per_call: Duration::from_millis(50), ..ThrottleConfig::default() };
    let slow = Arc::new(ThrottledStore::new(objects, slow));
    let node = Rig::new(Arc::clone(&slow) as _, settings());
    node.refresh();
    assert_eq!(node.get(0..2).0, 2, "slow, and fast enough");
    slow.config_mut(|config| config.wait_get_per_call = Duration::from_secs(3600));
    for n in 2..5 {
        let (came, took) = node.get(n..n + 1);
        assert!(came == 0 && took < Duration::from_secs(2), "{took:?}");
    }
    let counters = node.tier.counters();
    assert_eq!((counters.late, counters.left_alone), (3, 1));
    let (came, took) = node.get(5..6);
    assert!(came == 0 && took < Duration::from_millis(250), "at once: {took:?}");
    slow.config_mut(|config| config.wait_get_per_call = Duration::ZERO);
    let since = Instant::now();
    while node.tier.counters().left_alone == 1 {
        assert!(since.elapsed() < Duration::from_secs(30), "left alone for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(node.get(2..12).0, 10, "tried again after a while");
}

#[test]
fn changed_bytes_and_cut_packs_are_misses() {
    let objects = written();
    change(&*objects, |object| object[3 * 1000 + 17] ^= 4);
    let node = Rig::new(Arc::clone(&objects) as _, settings());
    node.refresh();
    assert_eq!(node.get(ALL).0, ALL.len() - 1);
    assert_eq!((node.tier.counters().corrupt, node.known()), (1, ALL.len() - 1), "counted, and forgotten");
    for (what, lie) in [
        ("a changed index", Box::new(|object: &mut Vec<u8>| object[12 * 1000 + 90] ^= 1) as Box<dyn Fn(&mut Vec<u8>)>),
        ("a cut pack", Box::new(|object| object.truncate(object.len() - 1))),
        ("an empty pack", Box::new(Vec::clear)),
        ("noise", Box::new(|object| object.iter_mut().for_each(|byte| *byte = 0x5a))),
    ] {
        let objects = written();
        change(&*objects, lie);
        let node = Rig::new(objects, settings());
        node.refresh();
        assert_eq!((node.known(), node.tier.counters().corrupt), (0, 1), "{what}");
    }
    // Packs are truncated after a node has learned their content.
    let objects = written();
    let node = Rig::new(Arc::clone(&objects) as _, settings());
    node.refresh();
    change(&*objects, |object| object.truncate(5500));
    let (came, took) = node.get(ALL);
    assert!(came == 0 && took < Duration::from_secs(1), "{took:?}");
    assert_eq!(node.get(0..5).0, 5, "what is left of it is right");
}

#[test]
fn a_pack_that_is_gone_is_a_miss_and_forgotten() {
    let objects = written();
    let node = Rig::new(Arc::clone(&objects) as _, settings());
    node.refresh();
    let runtime = Builder::new_current_thread().build().unwrap();
    packs(&*objects).iter().for_each(|pack| runtime.block_on(objects.delete(pack)).unwrap());
    assert_eq!((node.get(0..2).0, node.known()), (0, 0));
    let told = node.store.apply(|directory, _| directory.take_events().events);
    assert!(keys(ALL).into_iter().all(|key| told.contains(&PoolEvent::Evicted(key))));
}

#[test]
fn a_full_bucket_makes_room_and_one_that_is_too_small_takes_nothing() {
    let objects = Arc::new(InMemory::new());
    let one = settings::Objects { capacity_bytes: 7000, ..settings() };
    let node = Rig::new(Arc::clone(&objects) as _, one);
    node.fill(0..6);
    node.flush();
    let first = packs(&*objects);
    assert_eq!((first.len(), node.known()), (1, 6));
    node.fill(12..18);
    node.flush();
    assert!(packs(&*objects).len() == 1 && packs(&*objects) != first, "the older one has left");
    assert!(node.store.apply(|directory, _| directory.catalog().unwrap().holds(&key(12))));
    let small = Rig::new(Arc::new(InMemory::new()), settings::Objects { capacity_bytes: 100, ..settings() });
    small.fill(0..6);
    small.flush();
    assert_eq!(small.known(), 0);
}

#[test]
fn bounds_hold_and_what_is_beyond_them_is_a_miss_at_once() {
    let objects = written();
    let limits = budget::Limits { usd_per_day: Some(0.0), ..settings().limits };
    let node = Rig::new(Arc::clone(&objects) as _, settings::Objects { limits, ..settings() });
    node.refresh();
    node.fill(0..6);
    node.flush();
    assert_eq!((node.known(), packs(&*objects).len()), (0, 1), "neither listed nor written");
    assert!(node.tier.counters().refused >= 2 && node.tier.counters().spent_usd == 0.0);
    let limits = budget::Limits { requests_per_s: 2, ..settings().limits };
    let node = Rig::new(objects, settings::Objects { limits, ..settings() });
    let since = Instant::now();
    while node.known() < ALL.len() {
        assert!(since.elapsed() < Duration::from_secs(30), "what is refused is never listed");
        node.refresh();
        std::thread::sleep(Duration::from_millis(10));
    }
    // These are not neighbours, so each takes a separate read.
    let started = Instant::now();
    let came: usize = (0..12).step_by(2).map(|n| node.get(n..n + 1).0).sum();
    assert!(came <= 3 && started.elapsed() < Duration::from_secs(1), "{came}");
}
