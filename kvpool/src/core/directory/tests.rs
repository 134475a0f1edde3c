use super::*;
use crate::core::eviction::lru::Lru;
use tidemill_proto::{block::Tenant, ids::RequestId};

const LIMITS: Limits = Limits { put_deadline: Duration::from_secs(5), lease: Duration::from_secs(10) };
const WRITER: ClientId = ClientId(1);
const READER: ClientId = ClientId(2);
const ORIGIN: RequestId = RequestId(7);
const LINEAGE: Lineage = Lineage { origin: ORIGIN, tenant: Tenant(0), parent: None, position: 0 };
const NOW: Duration = Duration::from_secs(100);

fn directory(slots: u32) -> Directory {
    Directory::new(slots, LIMITS, Box::new(Lru::new(slots)))
}

fn key(n: u8) -> BlockKey {
    BlockKey([n; 16])
}

fn keys(range: std::ops::Range<u8>) -> Vec<BlockKey> {
    range.map(key).collect()
}

fn stored(n: u8) -> PoolEvent {
    PoolEvent::Stored { key: key(n), tier: Tier::Dram }
}

fn written(at: SlotRef) -> Written {
    Written { at, checksum: u64::from(at.slot) + 1000 }
}

fn reserve(directory: &mut Directory, range: std::ops::Range<u8>) -> Vec<Written> {
    let lineage = Lineage { parent: range.start.checked_sub(1).map(key), position: range.start.into(), ..LINEAGE };
    let answers = directory.put_start(WRITER, lineage, Room::Made, &keys(range), NOW);
    let slots = answers.iter().map(|answer| match answer {
        Reservation::Write(at) => written(*at),
        other => panic!("{other:?}"),
    });
    slots.collect()
}

fn store(directory: &mut Directory, range: std::ops::Range<u8>) -> Vec<Written> {
    let blocks = reserve(directory, range);
    assert_eq!(directory.put_end(WRITER, &blocks, NOW), blocks.len());
    directory.check_integrity();
    blocks
}

fn get(directory: &mut Directory, call: u64, keys: &[BlockKey], wait: Duration) {
    directory.get(READER, CallId(call), keys, wait, Via::Slots, NOW);
    directory.check_integrity();
}

fn actions(directory: &mut Directory) -> Vec<Action> {
    std::iter::from_fn(|| directory.poll_action()).collect()
}

fn found(directory: &mut Directory) -> (LeaseId, Vec<Found>) {
    match actions(directory).as_slice() {
        [Action::Found { lease, blocks, .. }] => (*lease, blocks.clone()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_slots_of_a_remote_writer_that_is_late_are_nobodys_until_it_is_fenced() {
    let mut directory = directory(3);
    directory.writes_remotely(WRITER);
    let blocks = reserve(&mut directory, 0..2);
    let late = NOW + LIMITS.put_deadline;
    directory.tick(late);
    directory.check_integrity();
    assert_eq!(actions(&mut directory), [Action::Fence { client: WRITER }], "once for both");
    // However long the fence takes, the slots are not reused, and their writer cannot publish them.
    directory.tick(late + 100 * LIMITS.put_deadline);
    assert_eq!((directory.usage().quarantined, directory.usage().free), (2, 1));
    assert_eq!(directory.put_end(WRITER, &blocks, late), 0);
    directory.client_gone(WRITER, late);
    assert_eq!(directory.usage().quarantined, 2);
    directory.fenced(WRITER, late);
    directory.check_integrity();
    assert_eq!(directory.usage().free, 3);
    // A writer on this host is trusted to keep to the clock.
    reserve(&mut directory, 0..1);
    directory.tick(NOW + LIMITS.put_deadline + late + Limits::QUARANTINE);
    directory.check_integrity();
    assert_eq!((actions(&mut directory), directory.usage().free), (vec![], 3));
}

#[test]
fn what_was_put_is_got_with_its_checksum_and_origin() {
    let mut directory = directory(4);
    let blocks = store(&mut directory, 0..3);
    get(&mut directory, 1, &keys(0..3), Duration::ZERO);
    let (lease, found) = found(&mut directory);
    let expected = (0u32..).zip(&blocks).map(|(index, block)| Found {
        index,
        at: block.at,
        checksum: block.checksum,
        origin: ORIGIN,
        tier: Tier::Dram,
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
    assert_eq!(directory.usage(), DramUsage { free: 1, leased: 3, ..DramUsage::default() });
    directory.release(READER, lease);
    assert_eq!(directory.usage(), DramUsage { free: 1, cached: 3, ..DramUsage::default() });
    directory.check_integrity();
}

#[test]
fn a_key_is_found_only_after_put_end() {
    let mut directory = directory(4);
    let blocks = reserve(&mut directory, 0..2);
    assert_eq!(directory.match_prefix(READER, &keys(0..2), NOW), 0);
    get(&mut directory, 1, &keys(0..2), Duration::ZERO);
    assert_eq!(actions(&mut directory), [Action::Missed { client: READER, call: CallId(1), indexes: vec![0, 1] }]);
    directory.put_end(WRITER, &blocks[..1], NOW);
    assert_eq!(directory.match_prefix(READER, &keys(0..2), NOW), 1);
}

#[test]
fn a_reader_may_ask_before_the_writer_reserves() {
    let mut directory = directory(4);
    get(&mut directory, 1, &keys(0..3), Duration::from_secs(1));
    assert_eq!(actions(&mut directory), []);
    let blocks = store(&mut directory, 1..3);
    let (_, first) = found(&mut directory);
    assert_eq!(first.iter().map(|block| (block.index, block.at)).collect::<Vec<_>>(), [(1, blocks[0].at), (2, blocks[1].at)]);
    store(&mut directory, 0..1);
    assert_eq!(found(&mut directory).1[0].index, 0);
    directory.tick(NOW + Duration::from_secs(2));
    assert_eq!(actions(&mut directory), [], "a satisfied get has nothing left to miss");
}

#[test]
fn a_wait_ends_at_its_deadline() {
    let mut directory = directory(4);
    get(&mut directory, 1, &keys(0..2), Duration::from_secs(1));
    store(&mut directory, 1..2);
    found(&mut directory);
    directory.tick(NOW + Duration::from_millis(999));
    assert_eq!(actions(&mut directory), []);
    directory.tick(NOW + Duration::from_secs(1));
    let [Action::Missed { indexes, .. }] = &actions(&mut directory)[..] else { panic!() };
    assert_eq!(indexes, &[0]);
    directory.check_integrity();
}

#[test]
fn nothing_is_written_twice() {
    let mut directory = directory(4);
    store(&mut directory, 0..1);
    reserve(&mut directory, 1..2);
    let answers = directory.put_start(READER, LINEAGE, Room::Made, &[key(0), key(1), key(2), key(2)], NOW);
    assert!(matches!(answers[..], [Reservation::Held, Reservation::InFlight, Reservation::Write(_), Reservation::InFlight]));
    directory.check_integrity();
}

#[test]
fn a_full_node_evicts_the_end_of_the_oldest_chain_and_never_what_is_leased() {
    let mut directory = directory(4);
    store(&mut directory, 0..4);
    get(&mut directory, 1, &keys(0..1), Duration::ZERO);
    let (lease, _) = found(&mut directory);
    let answers = directory.put_start(WRITER, LINEAGE, Room::Made, &keys(10..14), NOW);
    assert_eq!(answers[3], Reservation::Full);
    assert_eq!(directory.take_events().events[4..], [3, 2, 1].map(|n| PoolEvent::Evicted(key(n))));
    directory.release(READER, lease);
    assert!(matches!(directory.put_start(WRITER, LINEAGE, Room::Made, &keys(13..14), NOW)[..], [Reservation::Write(_)]));
    directory.check_integrity();
}

#[test]
fn a_put_does_not_evict_its_own_prefix() {
    let mut directory = directory(3);
    store(&mut directory, 0..2);
    store(&mut directory, 10..11);
    let answers = directory.put_start(WRITER, LINEAGE, Room::Made, &keys(0..3), NOW);
    assert!(matches!(answers[..], [Reservation::Held, Reservation::Held, Reservation::Write(_)]));
    assert_eq!(directory.match_prefix(READER, &[key(10)], NOW), 0, "the other chain made room");
}

#[test]
fn a_late_writer_is_fenced() {
    let mut directory = directory(1);
    let late = reserve(&mut directory, 0..1);
    let after = NOW + LIMITS.put_deadline;
    assert_eq!(directory.put_end(WRITER, &late, after), 0, "the deadline has passed");
    assert_eq!(directory.put_start(WRITER, LINEAGE, Room::Made, &keys(0..1), after), [Reservation::Full], "it may still be writing");
    let after = after + Limits::QUARANTINE;
    let answers = directory.put_start(READER, LINEAGE, Room::Made, &keys(0..1), after);
    let [Reservation::Write(at)] = answers[..] else { panic!("{answers:?}") };
    assert_eq!((at.slot, at.generation), (late[0].at.slot, late[0].at.generation + 1));
    assert_eq!(directory.put_end(WRITER, &late, after), 0);
    assert_eq!(directory.put_end(WRITER, &[written(at)], after), 0, "reserved by another client");
    assert_eq!(directory.put_end(READER, &[written(at)], after), 1);
    assert_eq!(directory.put_end(READER, &[written(at)], after), 0, "published already");
    directory.check_integrity();
}

#[test]
fn what_a_vanished_client_held_comes_back() {
    let mut directory = directory(4);
    store(&mut directory, 0..2);
    directory.put_start(READER, LINEAGE, Room::Made, &keys(10..12), NOW);
    get(&mut directory, 1, &keys(0..3), Duration::from_secs(60));
    directory.client_gone(READER, NOW);
    directory.check_integrity();
    assert_eq!(directory.usage(), DramUsage { cached: 2, quarantined: 2, ..DramUsage::default() });
    reserve(&mut directory, 10..11);
    directory.check_integrity();
    directory.tick(NOW + LIMITS.reclaim_max());
    assert_eq!(directory.usage(), DramUsage { free: 3, cached: 1, ..DramUsage::default() });
    directory.check_integrity();
}

#[test]
fn a_revoked_slot_is_reused_at_once_unless_the_node_is_writing_it() {
    let mut directory = directory(2);
    let blocks = reserve(&mut directory, 0..2);
    assert_eq!(directory.receive_start(WRITER, blocks[1].at, NOW), Some(NOW + LIMITS.put_deadline));
    assert_eq!(directory.receive_start(WRITER, blocks[1].at, NOW), None, "one at a time");
    directory.put_revoke(WRITER, &[blocks[0].at, blocks[1].at, blocks[0].at], NOW);
    assert_eq!(directory.usage(), DramUsage { free: 1, reserved: 1, ..DramUsage::default() });
    directory.receive_failed(WRITER, blocks[1].at, NOW);
    assert_eq!(directory.usage().free, 2);
    directory.check_integrity();
}

#[test]
fn leases_expire_and_ending_them_late_is_harmless() {
    let mut directory = directory(1);
    store(&mut directory, 0..1);
    get(&mut directory, 1, &keys(0..1), Duration::ZERO);
    let (lease, _) = found(&mut directory);
    directory.tick(NOW + LIMITS.lease);
    assert_eq!(directory.usage().cached, 1);
    directory.release(READER, lease);
    directory.check_integrity();
}

#[test]
fn a_corrupt_block_is_forgotten_and_can_be_put_again() {
    let mut directory = directory(2);
    let blocks = store(&mut directory, 0..1);
    get(&mut directory, 1, &keys(0..1), Duration::ZERO);
    let (lease, _) = found(&mut directory);
    directory.forget(blocks[0].at, NOW);
    assert_eq!(directory.match_prefix(READER, &keys(0..1), NOW), 0);
    assert_eq!(directory.usage(), DramUsage { free: 1, quarantined: 1, ..DramUsage::default() });
    directory.release(READER, lease);
    directory.check_integrity();
    store(&mut directory, 0..1);
    directory.tick(NOW + LIMITS.reclaim_max());
    assert_eq!(directory.usage(), DramUsage { free: 1, cached: 1, ..DramUsage::default() });
}

#[test]
fn a_client_cannot_wait_for_everything() {
    let mut directory = directory(1);
    let many: Vec<BlockKey> = (0..=waits::WAITS_MAX as u128).map(|n| BlockKey(n.to_le_bytes())).collect();
    directory.get(READER, CallId(1), &many, Duration::from_secs(1), Via::Slots, NOW);
    let [Action::Missed { indexes, .. }] = &actions(&mut directory)[..] else { panic!() };
    assert_eq!(indexes.len(), many.len());
    directory.check_integrity();
}

#[test]
fn what_comes_and_goes_is_told() {
    let mut directory = directory(1);
    store(&mut directory, 0..1);
    store(&mut directory, 1..2);
    assert!(directory.has_events());
    let told = directory.take_events();
    assert_eq!(told.from, 0);
    assert_eq!(told.events, [stored(0), PoolEvent::Evicted(key(0)), stored(1)]);
    assert_eq!(directory.snapshot().collect::<Vec<_>>(), [stored(1)]);
}

fn of_tenant(tenant: u64, position: u32) -> Lineage {
    Lineage { tenant: Tenant(tenant), position, ..LINEAGE }
}

#[test]
fn a_tenant_that_has_its_share_makes_room_of_its_own() {
    let mut directory = directory(4).with_tenant_share(50);
    let mut put = |tenant, range: std::ops::Range<u8>| {
        let answers = directory.put_start(WRITER, of_tenant(tenant, 0), Room::Made, &keys(range), NOW);
        let slots = answers.iter().filter_map(|answer| if let Reservation::Write(at) = answer { Some(written(*at)) } else { None });
        directory.put_end(WRITER, &slots.collect::<Vec<_>>(), NOW);
        directory.check_integrity();
        answers
    };
    put(1, 0..1);
    put(2, 10..12);
    assert_eq!(put(2, 12..15)[2], Reservation::Full, "two slots, and both are being written");
    assert_eq!(put(2, 20..21).len(), 1);
    assert_eq!(directory.match_prefix(READER, &keys(0..1), NOW), 1, "the other tenant's block stays");
    assert_eq!(directory.usage().free, 1, "and a free slot is no reason to take more");
}

#[test]
fn a_tenant_that_is_alone_has_everything_until_the_next_one_comes() {
    let mut directory = directory(4).with_tenant_share(50);
    let mut put = |tenant, range: std::ops::Range<u8>| {
        for n in range {
            let answers = directory.put_start(WRITER, of_tenant(tenant, 0), Room::Made, &[key(n)], NOW);
            let [Reservation::Write(at)] = answers[..] else { panic!("{answers:?}") };
            directory.put_end(WRITER, &[written(at)], NOW);
            directory.check_integrity();
        }
        [0..10, 10..20, 20..30].map(|keys| keys.filter(|&n| directory.use_of(&key(n)).is_some()).count())
    };
    assert_eq!(put(1, 0..4), [4, 0, 0]);
    assert_eq!(put(2, 10..15), [2, 2, 0], "it takes what the first one has beyond its share, and then only its own");
    assert_eq!(put(1, 4..6), [2, 2, 0], "as the first one does now");
}

#[test]
fn blocks_of_one_request_are_one_use_however_many_puts_they_come_in() {
    let mut directory = directory(4);
    for n in 0..4 {
        let parent = (n > 0).then(|| key(n - 1));
        let answers = directory.put_start(WRITER, Lineage { parent, position: u32::from(n), ..LINEAGE }, Room::Made, &[key(n)], NOW);
        let [Reservation::Write(at)] = answers[..] else { panic!("{answers:?}") };
        directory.put_end(WRITER, &[written(at)], NOW);
    }
    directory.take_events();
    reserve(&mut directory, 10..12);
    assert_eq!(directory.take_events().events, [PoolEvent::Evicted(key(3)), PoolEvent::Evicted(key(2))]);
}

#[test]
fn parts_of_a_state_are_known_however_many_puts_they_come_in() {
    let mut directory = directory(8);
    store(&mut directory, 0..3);
    let parts: Vec<BlockKey> = key(2).state_parts(3).collect();
    assert!(directory.use_of(&key(2)).is_some_and(|(_, used)| used.tail), "nothing came after it yet");
    for (n, (parent, run)) in [(key(2), &parts[..2]), (parts[1], &parts[2..])].into_iter().enumerate() {
        let lineage = Lineage { parent: Some(parent), position: 3 + 2 * n as u32, ..LINEAGE };
        let answers = directory.put_start(WRITER, lineage, Room::Made, run, NOW);
        let slots = answers.iter().map(|answer| if let Reservation::Write(at) = answer { written(*at) } else { panic!("{answer:?}") });
        directory.put_end(WRITER, &slots.collect::<Vec<_>>(), NOW);
        directory.check_integrity();
    }
    get(&mut directory, 1, &[keys(0..3), parts.clone()].concat(), Duration::ZERO);
    let (lease, _) = found(&mut directory);
    directory.release(READER, lease);
    directory.check_integrity();
    let of_state = |key: &BlockKey| directory.use_of(key).map(|(_, used)| used.state);
    assert!(keys(0..3).iter().all(|key| of_state(key) == Some(false)));
    assert!(parts.iter().all(|part| of_state(part) == Some(true)));
    let ends = |key: &BlockKey| directory.use_of(key).is_some_and(|(_, used)| used.tail);
    assert!(!keys(0..3).iter().chain(&parts).any(ends), "neither a state nor the block before it ends a chain");
}

#[test]
fn a_block_with_a_state_after_it_is_no_end() {
    let mut directory = directory(8);
    store(&mut directory, 0..3);
    let lineage = Lineage { parent: Some(key(2)), position: 3, ..LINEAGE };
    directory.put_start(WRITER, lineage, Room::Made, &[key(2).state_part(0)], NOW);
    directory.check_integrity();
    assert!(directory.use_of(&key(2)).is_some_and(|(_, used)| !used.tail));
    assert_eq!(directory.use_of(&key(1)).map(|(_, used)| used.state), Some(false));
}

#[test]
fn states_on_disk_are_known_after_a_restart() {
    let mut directory = with_disk(8, 8);
    let parts: Vec<BlockKey> = key(0).state_parts(2).collect();
    let block = |key, parent, position| DiskBlock { key, checksum: 1, lineage: Lineage { parent, position, ..LINEAGE } };
    let left =
        [block(parts[1], Some(parts[0]), 2), block(parts[0], Some(key(0)), 1), block(key(0), None, 0), block(key(1), Some(key(0)), 1)];
    assert!(directory.recover((0..).zip(left)).is_empty());
    let is_state = |key: &BlockKey| directory.disk.as_ref().is_some_and(|disk| disk.is_state(key));
    assert_eq!([parts[0], parts[1], key(0), key(1)].map(|key| is_state(&key)), [true, true, false, false]);
    get(&mut directory, 1, &parts, Duration::ZERO);
    assert!(parts.iter().all(|part| directory.use_of(part).is_some_and(|(_, used)| used.state)), "in DRAM, too");
}

fn with_disk(slots: u32, disk: u32) -> Directory {
    directory(slots).with_disk(disk, Box::new(Lru::new(disk)))
}

/// The disk and DRAM slots of the requested stores.
fn stores(directory: &mut Directory) -> Vec<(u32, SlotRef)> {
    let store = |action| if let Action::Store { disk, from, .. } = action { (disk, from) } else { panic!("{action:?}") };
    actions(directory).into_iter().map(store).collect()
}

fn the_load(directory: &mut Directory) -> (u32, SlotRef) {
    match actions(directory)[..] {
        [Action::Load { disk, to, .. }] => (disk, to),
        ref other => panic!("{other:?}"),
    }
}

/// A directory with chain 0..8 in eight slots, of which the last two blocks are copied to disk.
fn demoted() -> Directory {
    let mut directory = with_disk(8, 8);
    store(&mut directory, 0..8);
    for (disk, _) in stores(&mut directory) {
        directory.stored(disk, Ok(()), NOW);
        directory.check_integrity();
    }
    directory.take_events();
    directory
}

#[test]
fn nothing_is_copied_to_disk_while_there_is_room() {
    let mut directory = with_disk(8, 8);
    store(&mut directory, 0..7);
    assert_eq!(actions(&mut directory), []);
    reserve(&mut directory, 20..21);
    assert_eq!(stores(&mut directory).len(), 2, "the last free slot is gone");
    directory.check_integrity();
}

#[test]
fn what_is_copied_to_disk_before_memory_is_full_leaves_for_free() {
    let mut directory = demoted();
    assert_eq!(directory.disk_usage(), Some(DiskUsage { free: 6, cached: 2, busy: 0 }));
    assert_eq!(directory.usage().cached, 8, "it is still in memory, too");
    reserve(&mut directory, 20..22);
    assert_eq!(
        directory.take_events().events,
        [6, 7].map(|n| PoolEvent::Moved { key: key(n), tier: Tier::Nvme }).into_iter().rev().collect::<Vec<_>>()
    );
    assert_eq!(directory.match_prefix(READER, &keys(0..8), NOW), 8);
    directory.check_integrity();
}

#[test]
fn what_is_offered_takes_only_what_is_free_or_on_disk() {
    let mut directory = demoted();
    let answers = directory.put_start(WRITER, LINEAGE, Room::Spare, &keys(20..24), NOW);
    assert!(matches!(answers[..], [Reservation::Write(_), Reservation::Write(_), Reservation::Full, Reservation::Full]));
    // (No lookup in between, since matched blocks would stay in memory.)
    for (disk, _) in stores(&mut directory) {
        directory.stored(disk, Ok(()), NOW);
    }
    let blocks = [&keys(0..8)[..], &keys(22..23)].concat();
    let answers = directory.put_start(WRITER, LINEAGE, Room::Spare, &blocks, NOW);
    assert_eq!(answers[..8], [Reservation::Held; 8]);
    assert!(matches!(answers[8], Reservation::Write(_)), "the disk has made room, also in memory that holds what is offered again");
    assert_eq!(directory.match_prefix(READER, &keys(0..8), NOW), 8);
    directory.check_integrity();
}

#[test]
fn a_block_on_disk_is_loaded_once_for_all_who_want_it() {
    let mut directory = demoted();
    reserve(&mut directory, 20..22);
    actions(&mut directory);
    directory.take_events();
    get(&mut directory, 1, &keys(7..8), Duration::ZERO);
    directory.get(WRITER, CallId(1), &keys(7..8), Duration::from_secs(60), Via::Streams, NOW);
    let (disk, to) = the_load(&mut directory);
    assert_eq!(directory.loaded(&[Loaded { disk, to, outcome: Ok(()) }], NOW), 1);
    directory.check_integrity();
    let found: Vec<_> = actions(&mut directory)
        .into_iter()
        .filter_map(
            |action| if let Action::Found { client, blocks, .. } = action { Some((client, blocks[0].at, blocks[0].tier)) } else { None },
        )
        .collect();
    assert_eq!(found, [(WRITER, to, Tier::Nvme), (READER, to, Tier::Nvme)]);
    assert!(directory.take_events().events.contains(&PoolEvent::Moved { key: key(7), tier: Tier::Dram }));
}

#[test]
fn a_load_that_finds_other_bytes_is_a_miss_and_forgets_the_block() {
    let mut directory = demoted();
    reserve(&mut directory, 20..22);
    actions(&mut directory);
    directory.take_events();
    get(&mut directory, 1, &keys(7..8), Duration::from_secs(60));
    let (disk, to) = the_load(&mut directory);
    assert_eq!(directory.loaded(&[Loaded { disk, to, outcome: Err(DiskFault::Corrupt) }], NOW), 0);
    assert_eq!(
        actions(&mut directory)[..2],
        [Action::Erase { disk }, Action::Missed { client: READER, call: CallId(1), indexes: vec![0] }],
        "at once: nobody is about to bring what was held"
    );
    assert!(directory.take_events().events.contains(&PoolEvent::Evicted(key(7))));
    directory.check_integrity();
}

#[test]
fn a_disk_that_hangs_is_given_up_after_the_first_load_that_it_does_not_answer() {
    let mut directory = demoted();
    reserve(&mut directory, 20..22);
    actions(&mut directory);
    get(&mut directory, 1, &keys(7..8), Duration::ZERO);
    let (disk, to) = the_load(&mut directory);
    directory.tick(NOW + Limits::LOAD);
    let [Action::Missed { indexes, .. }, Action::GiveUpDisk] = &actions(&mut directory)[..] else { panic!() };
    assert_eq!(indexes, &[0]);
    assert_eq!(directory.loaded(&[Loaded { disk, to, outcome: Ok(()) }], NOW + Limits::LOAD), 0, "whatever it says later");
    directory.check_integrity();
    directory.tick(NOW + LIMITS.reclaim_max());
    assert_eq!(directory.usage().quarantined, 0);
    assert_eq!(directory.disk_usage(), None);
}

#[test]
fn what_is_read_while_it_is_copied_to_disk_stays_in_memory() {
    let mut directory = with_disk(8, 8);
    store(&mut directory, 0..8);
    let stores = stores(&mut directory);
    get(&mut directory, 1, &keys(7..8), Duration::ZERO);
    let (lease, _) = found(&mut directory);
    directory.release(READER, lease);
    for (disk, _) in stores {
        directory.stored(disk, Ok(()), NOW);
    }
    directory.check_integrity();
    directory.take_events();
    reserve(&mut directory, 20..21);
    assert_eq!(directory.take_events().events, [PoolEvent::Moved { key: key(6), tier: Tier::Nvme }]);
}

#[test]
fn a_disk_smaller_than_what_should_be_clean_is_not_written_to_without_end() {
    for policy in [crate::core::eviction::Policy::Lru, crate::core::eviction::Policy::HitDensity] {
        for disk in [1, 3, 8] {
            let mut directory = Directory::new(64, LIMITS, policy.build(64)).with_disk(disk, policy.build(disk));
            store(&mut directory, 0..64);
            let mut written = 0;
            while let asked = stores(&mut directory)
                && !asked.is_empty()
                && written < 1000
            {
                for (disk, _) in asked {
                    written += 1;
                    directory.stored(disk, Ok(()), NOW);
                    directory.check_integrity();
                }
            }
            assert!(written <= 64, "{policy}: {written} writes to {disk} disk slots, and no client asked for anything");
            // New blocks take the clean slots, and blocks that only the disk has make room for them there.
            store(&mut directory, 100..101);
            let again = stores(&mut directory);
            assert_eq!(again.len(), 1);
            directory.stored(again[0].0, Ok(()), NOW);
            directory.check_integrity();
            assert_eq!(stores(&mut directory), []);
        }
    }
}
