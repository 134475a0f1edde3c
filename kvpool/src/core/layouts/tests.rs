use super::*;
use crate::core::{
    directory::{Action, ClientId, Limits},
    eviction::Policy,
};
use tidemill_proto::{
    block::{BlockKey, Tenant},
    ids::RequestId,
    pool::{CallId, Lineage, Reservation, Room, Via, Written},
};

const A: LayoutNumber = LayoutNumber(1);
const B: LayoutNumber = LayoutNumber(2);
const LIMITS: Limits = Limits { put_deadline: Duration::from_secs(10), lease: Duration::from_secs(10) };

/// Memory of 16 extents, each with room for four blocks of A or two of B. Both have clients, and floors of an eighth.
fn layouts() -> Layouts {
    let mut layouts = Layouts::new(Division::new(64, 4));
    for (number, stride) in [(A, 1), (B, 2)] {
        let slots = 64 / stride as u32;
        let directory = Directory::new(slots, LIMITS, Policy::Lru.build(slots));
        layouts.add(number, stride, slots, Share { weight: 1, floor_percent: 13 }, directory);
        layouts.set_in_use(number, true);
    }
    layouts
}

fn key(layout: LayoutNumber, n: u16) -> BlockKey {
    let mut key = [layout.0 as u8; 16];
    key[..2].copy_from_slice(&n.to_le_bytes());
    BlockKey(key)
}

/// Puts a block. Returns whether there was room.
fn put(layouts: &mut Layouts, layout: LayoutNumber, n: u16, at_s: u64) -> bool {
    let (key, now) = (key(layout, n), Duration::from_secs(at_s));
    let wanted = layouts.directory(layout).to_write(&[key]);
    let _ = layouts.make_room(layout, wanted, now);
    let directory = layouts.directory(layout);
    let lineage = Lineage { origin: RequestId(u64::from(n)), tenant: Tenant(0), parent: None, position: 0 };
    match directory.put_start(ClientId(1), lineage, Room::Made, &[key], now)[..] {
        [Reservation::Write(at)] => directory.put_end(ClientId(1), &[Written { at, checksum: 0 }], now) == 1,
        [Reservation::Full] => false,
        ref other => panic!("{other:?}"),
    }
}

fn owned(layouts: &Layouts) -> [usize; 2] {
    [A, B].map(|layout| layouts.division().owned(layout))
}

#[test]
fn the_first_layout_has_everything_and_the_second_takes_its_share_as_it_needs_it() {
    let mut layouts = layouts();
    assert_eq!(owned(&layouts), [16, 0]);
    assert_eq!(layouts.directory(A).slots(), 64);
    (0..64).for_each(|n| assert!(put(&mut layouts, A, n, 1)));
    assert!(put(&mut layouts, B, 0, 2));
    assert_eq!(owned(&layouts), [14, 2], "its floor");
    (1..40).for_each(|n| assert!(put(&mut layouts, B, n, 2)));
    assert_eq!(owned(&layouts), [8, 8]);
    assert_eq!((layouts.directory(A).slots(), layouts.directory(B).slots()), (32, 16));
    layouts.check_integrity();
    (64..200).for_each(|n| assert!(put(&mut layouts, A, n, 3)));
    assert_eq!(owned(&layouts), [8, 8], "both want more than there is");
}

#[test]
fn what_was_not_used_for_long_goes_to_a_layout_that_needs_more_down_to_its_floor() {
    let mut layouts = layouts();
    (0..40).for_each(|n| assert!(put(&mut layouts, B, n, 1)));
    (0..400).for_each(|n| assert!(put(&mut layouts, A, n, 1000 + u64::from(n))));
    assert_eq!(owned(&layouts), [14, 2]);
    (100..110).for_each(|n| assert!(put(&mut layouts, B, n, 1500)));
    assert_eq!(owned(&layouts)[1], 7, "and comes back at once, as its share is larger");
    layouts.check_integrity();
}

#[test]
fn blocks_in_steady_use_stay_whatever_floods_by() {
    let mut layouts = layouts();
    (0..8).for_each(|n| assert!(put(&mut layouts, B, n, 1)));
    let before = owned(&layouts)[1];
    for n in 0..2000 {
        let now = 10 + u64::from(n) / 10;
        assert!(put(&mut layouts, A, n, now));
        if n % 50 == 0 {
            let keys: Vec<BlockKey> = (0..8).map(|n| key(B, n)).collect();
            layouts.directory(B).get(ClientId(2), CallId(u64::from(n)), &keys, Duration::ZERO, Via::Slots, Duration::from_secs(now));
            layouts.directory(B).client_gone(ClientId(2), Duration::from_secs(now));
        }
    }
    assert_eq!(owned(&layouts)[1], before);
    assert_eq!(layouts.directory(B).match_prefix(ClientId(2), &(0..8).map(|n| key(B, n)).collect::<Vec<_>>(), Duration::from_secs(300)), 8);
}

#[test]
fn what_is_leased_or_being_written_is_not_taken() {
    let mut layouts = layouts();
    let now = Duration::from_secs(1);
    (0..32).for_each(|n| assert!(put(&mut layouts, A, n, 1)));
    let keys: Vec<BlockKey> = (0..32).map(|n| key(A, n)).collect();
    layouts.directory(A).get(ClientId(2), CallId(1), &keys, Duration::ZERO, Via::Slots, now);
    let lineage = Lineage { origin: RequestId(9), tenant: Tenant(0), parent: None, position: 0 };
    let more: Vec<BlockKey> = (32..64).map(|n| key(A, n)).collect();
    layouts.directory(A).put_start(ClientId(2), lineage, Room::Made, &more, now);
    assert_eq!(layouts.make_room(B, 4, now), []);
    assert_eq!(layouts.directory(B).slots(), 0);
    layouts.directory(A).client_gone(ClientId(2), now);
    assert_eq!(
        layouts.make_room(B, 4, now + REST).len(),
        2,
        "two extents of A's leased blocks; the others are withheld from a late writer"
    );
    layouts.check_integrity();
}

#[test]
fn a_layout_without_clients_gives_everything_and_can_be_removed() {
    let mut layouts = layouts();
    (0..64).for_each(|n| assert!(put(&mut layouts, A, n, 1)));
    layouts.set_in_use(A, false);
    (0..32).for_each(|n| assert!(put(&mut layouts, B, n, 1)));
    assert_eq!(owned(&layouts), [0, 16]);
    assert_eq!(layouts.remove(A), Some(Withdrawn { layout: A, slots: Vec::new() }), "it has none left");
    assert!(!layouts.has_more());
    layouts.check_integrity();
    assert!((0..32).all(|n| layouts.directory(B).checksum_of(n)));
}

#[test]
fn what_a_removed_layout_leaves_is_taken_by_the_next_that_does_anything() {
    let mut layouts = layouts();
    layouts.set_in_use(A, false);
    assert!(layouts.remove(A).is_some() && layouts.has_more());
    assert_eq!(layouts.make_room(B, 0, Duration::from_secs(1)), []);
    assert_eq!((layouts.directory(B).slots(), layouts.has_more()), (32, false));
    layouts.check_integrity();
}

#[test]
fn a_removed_layout_says_of_every_slot_that_it_is_gone() {
    let mut layouts = layouts();
    let now = Duration::from_secs(1);
    assert!(put(&mut layouts, A, 0, 1) && put(&mut layouts, B, 0, 1));
    layouts.directory(A).get(ClientId(2), CallId(1), &[key(A, 0)], Duration::ZERO, Via::Slots, now);
    let handed = found(layouts.directory(A));
    layouts.set_in_use(A, false);
    assert_eq!(layouts.remove(A), None, "a block is leased");
    layouts.directory(A).client_gone(ClientId(2), now);
    let had = layouts.directory(A).slots();
    let Withdrawn { layout, slots } = layouts.remove(A).expect("nothing of it is in use");
    assert_eq!((layout, slots.len()), (A, had), "those that B has taken had been withdrawn before");
    let now_there = slots.iter().find(|at| at.slot == handed.slot).expect("the leased block was not taken");
    assert!(now_there.generation > handed.generation, "{now_there:?} {handed:?}");
    layouts.check_integrity();
}

fn found(directory: &mut Directory) -> SlotRef {
    let action = std::iter::from_fn(|| directory.poll_action()).find_map(|action| match action {
        Action::Found { blocks, .. } => Some(blocks[0].at),
        _ => None,
    });
    action.expect("the block is there")
}

impl Directory {
    fn checksum_of(&mut self, n: u16) -> bool {
        self.match_prefix(ClientId(3), &[key(B, n)], Duration::from_secs(1)) == 1
    }
}
