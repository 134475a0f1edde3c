//! Properties of every policy.

use super::*;
use proptest::{prelude::*, sample::Index};
use std::collections::BTreeSet;

const SLOTS: u32 = 8;

#[derive(Clone, Debug)]
enum Op {
    /// Inserts any of a few keys, so that blocks come back after they left.
    Insert(u8),
    Pin(Index),
    /// Unpins by a new operation, or by the one that last used the block.
    Unpin(Index, bool),
    Evict,
    Remove(Index),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u8..24).prop_map(Op::Insert),
        3 => any::<Index>().prop_map(Op::Pin),
        3 => (any::<Index>(), any::<bool>()).prop_map(|(index, again)| Op::Unpin(index, again)),
        3 => Just(Op::Evict),
        1 => any::<Index>().prop_map(Op::Remove),
    ]
}

fn pick(from: &BTreeSet<u32>, index: Index) -> Option<u32> {
    (!from.is_empty()).then(|| *index.get(&from.iter().copied().collect::<Vec<_>>()))
}

proptest! {
    /// Only candidates leave, each once, as long as there are any.
    #[test]
    fn candidates_leave_and_nothing_else(policy in prop::sample::select(&Policy::ALL[..]), ops in prop::collection::vec(op(), 1..300)) {
        let mut policy = policy.build(SLOTS);
        let (mut candidates, mut pinned) = (BTreeSet::new(), BTreeSet::new());
        let mut last = [Use::in_chain(0, 0, 1); SLOTS as usize];
        for (at, op) in (1..).zip(ops) {
            match op {
                Op::Insert(n) => {
                    if let Some(slot) = (0..SLOTS).find(|slot| !candidates.contains(slot) && !pinned.contains(slot)) {
                        last[slot as usize] = Use::in_chain(at, u32::from(n % 4), 4);
                        policy.insert(slot, &BlockKey([n; 16]), last[slot as usize]);
                        candidates.insert(slot);
                    }
                }
                Op::Pin(index) => {
                    if let Some(slot) = pick(&candidates, index) {
                        policy.pin(slot);
                        candidates.remove(&slot);
                        pinned.insert(slot);
                    }
                }
                Op::Unpin(index, again) => {
                    if let Some(slot) = pick(&pinned, index) {
                        if again {
                            last[slot as usize].at = at;
                        }
                        policy.unpin(slot, last[slot as usize]);
                        pinned.remove(&slot);
                        candidates.insert(slot);
                    }
                }
                Op::Evict => match policy.evict() {
                    Some(slot) => prop_assert!(candidates.remove(&slot), "slot {} is no candidate", slot),
                    None => prop_assert!(candidates.is_empty()),
                },
                Op::Remove(index) => {
                    if let Some(slot) = pick(&candidates, index) {
                        policy.remove(slot);
                        candidates.remove(&slot);
                    }
                }
            }
            for slot in 0..SLOTS {
                prop_assert_eq!(policy.is_candidate(slot), candidates.contains(&slot));
            }
        }
    }

    /// A chain leaves from its end, since a block without those before it can never be matched.
    #[test]
    fn a_chain_that_was_used_as_one_leaves_from_its_end(policy in prop::sample::select(&Policy::ALL[..]), blocks in 1u32..9, uses in 0u64..6) {
        let mut policy = policy.build(SLOTS);
        for at in 0..=uses {
            for (slot, used) in (0..).zip(Use::of_chain(at, blocks as usize)) {
                if at == 0 {
                    policy.insert(slot, &BlockKey([slot as u8; 16]), used);
                } else {
                    policy.pin(slot);
                    policy.unpin(slot, used);
                }
            }
        }
        let order: Vec<u32> = std::iter::from_fn(|| policy.evict()).collect();
        prop_assert_eq!(order, (0..blocks).rev().collect::<Vec<_>>());
    }
}

#[test]
fn names_are_read_back_and_others_are_refused_with_the_choice() {
    for policy in Policy::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    let error = "fifo".parse::<Policy>().unwrap_err().to_string();
    assert!(error.contains("fifo") && error.contains("lru, lfu, s3fifo, hit-density"), "{error}");
}
