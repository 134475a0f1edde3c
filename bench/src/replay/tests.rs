//! The replay compared with an independent simulation, on random traffic.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

/// Requests that continue an earlier one after some of its blocks, or start afresh.
fn traces() -> impl Strategy<Value = Vec<Request>> {
    let step = (any::<prop::sample::Index>(), 0usize..6, 1usize..5, prop_oneof![Just(0u64), 0u64..TRACE_BLOCK_TOKENS]);
    prop::collection::vec(step, 1..60).prop_map(|steps| {
        let mut requests: Vec<Request> = Vec::new();
        let mut next_id = 0;
        for (index, shared, fresh, unfilled) in steps {
            let earlier = if requests.is_empty() { Vec::new() } else { index.get(&requests).blocks.clone() };
            let mut blocks = earlier[..shared.min(earlier.len())].to_vec();
            blocks.extend(next_id..next_id + fresh as u64);
            next_id += fresh as u64;
            requests.push(Request { input_tokens: TRACE_BLOCK_TOKENS * blocks.len() as u64 - unfilled, blocks, ..Request::default() });
        }
        requests
    })
}

/// A naive LRU: a list with the next block to evict at the front.
fn naive_lru(requests: &[Request], slots: usize) -> Hits {
    let mut list: VecDeque<u64> = VecDeque::new();
    let mut hits = Hits::default();
    for request in requests {
        hits.add(request, request.blocks.iter().take_while(|id| list.contains(id)).count());
        list.retain(|id| !request.blocks.contains(id));
        list.extend(request.blocks.iter().rev());
        while list.len() > slots {
            list.pop_front();
        }
    }
    hits
}

proptest! {
    /// Every request fits (at most 5 + 4 blocks).
    #[test]
    fn lru_in_the_directory_is_lru(requests in traces(), slots in 9u32..40) {
        let replayed = replay(&requests, Capacity::Blocks(slots), Decider::Policy(Policy::Lru));
        prop_assert_eq!(replayed, naive_lru(&requests, slots as usize));
    }

    #[test]
    fn no_policy_beats_the_optimum_and_none_matters_without_a_limit(requests in traces(), slots in 1u32..40) {
        let optimum = replay(&requests, Capacity::Blocks(slots), Decider::Optimum);
        let unlimited = replay(&requests, Capacity::Unlimited, Decider::Optimum);
        prop_assert!(optimum.prefix_blocks <= unlimited.prefix_blocks);
        for policy in Policy::ALL.map(Decider::Policy) {
            let limited = replay(&requests, Capacity::Blocks(slots), policy);
            prop_assert!(limited.prefix_blocks <= optimum.prefix_blocks, "{:?}: {:?}, optimum {:?}", policy, limited, optimum);
            prop_assert_eq!(replay(&requests, Capacity::Unlimited, policy), unlimited);
        }
    }
}

#[test]
fn the_optimum_keeps_what_is_needed_soonest() {
    let request = |blocks: &[u64]| Request {
        input_tokens: TRACE_BLOCK_TOKENS * blocks.len() as u64 - 12,
        blocks: blocks.to_vec(),
        ..Request::default()
    };
    let requests = [&[1, 2][..], &[3, 4], &[1, 2], &[3, 4], &[1, 9]].map(request);
    let hits = |slots| optimum::hits(&requests, slots).prefix_blocks;
    assert_eq!([1, 2, 3, 4].map(hits), [2, 3, 4, 5], "1 and 2 first, then 3, then 4");
    let all = optimum::hits(&requests, 4);
    assert_eq!((all.blocks, all.tokens, all.prefix_tokens), (10, 5 * 1012, 2 * 1012 + 512));
}

#[test]
fn choices_are_read_by_name() {
    assert_eq!("optimum".parse::<Choice>().unwrap(), Choice::One(Decider::Optimum));
    assert_eq!("all".parse::<Choice>().unwrap().deciders().len(), Policy::ALL.len() + 1);
    let error = "belady".parse::<Choice>().unwrap_err().to_string();
    assert!(error.contains("lru") && error.contains("optimum"), "{error}");
    assert_eq!("30000".parse::<Capacity>().unwrap(), Capacity::Blocks(30_000));
    assert_eq!("unlimited".parse::<Capacity>().unwrap(), Capacity::Unlimited);
    assert!(["0", "-1", "many"].iter().all(|text| text.parse::<Capacity>().is_err()));
}
