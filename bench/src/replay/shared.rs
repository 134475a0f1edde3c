//! Two models in one pool node, each with a trace of its own and blocks of its own size, beside two nodes of half the memory.

use super::{
    Hits,
    pool::{LIMITS, Turn},
    trace::Request,
};
use serde::Serialize;
use std::time::Duration;
use tidemill_kvpool::core::{
    directory::Directory,
    division::{Division, LayoutNumber, Share},
    eviction::Policy,
    layouts::Layouts,
};

/// The hit rates of one model.
#[derive(Debug, Serialize)]
pub struct Row {
    pub model: &'static str,
    pub block_units: u64,
    pub shared: f64,
    pub halves: f64,
    /// The model's part of the shared memory at the end, in percent.
    pub memory_percent: f64,
}

/// The models' block sizes, in units: one is half as large again as the other.
const BLOCK_UNITS: [u64; 2] = [2, 3];
/// The parts that the shared memory is divided into.
const EXTENTS: u64 = 64;
/// The percentage of the memory that each model keeps in any case: a quarter of its share.
const FLOOR_PERCENT: u8 = 12;

/// Replays both traces by their times. The memory is `capacity` blocks of the first model.
pub fn compare(traces: [&[Request]; 2], capacity: u32, policy: Policy) -> Vec<Row> {
    let units = u64::from(capacity) * BLOCK_UNITS[0];
    let (shared, parts) = replay(&traces, units, policy);
    let halves = [0, 1].map(|n| {
        let alone: [&[Request]; 2] = std::array::from_fn(|other| if other == n { traces[n] } else { &[] });
        replay(&alone, units / 2, policy).0[n]
    });
    let row = |n: usize| Row {
        model: ["first", "second"][n],
        block_units: BLOCK_UNITS[n],
        shared: shared[n].prefix_token_hit_rate(),
        halves: halves[n].prefix_token_hit_rate(),
        memory_percent: 100.0 * parts[n],
    };
    vec![row(0), row(1)]
}

/// Hits of each model, and its part of the memory in the end. A model without requests does not exist.
fn replay(traces: &[&[Request]; 2], units: u64, policy: Policy) -> ([Hits; 2], [f64; 2]) {
    let mut layouts = Layouts::new(Division::new(units, (units / EXTENTS).max(1)));
    let numbers = [LayoutNumber(1), LayoutNumber(2)];
    let present: Vec<usize> = (0..2).filter(|&n| !traces[n].is_empty()).collect();
    for &n in &present {
        let slots = (units / BLOCK_UNITS[n]) as u32;
        let share = Share { weight: 1, floor_percent: FLOOR_PERCENT };
        layouts.add(numbers[n], BLOCK_UNITS[n], slots, share, Directory::new(slots, LIMITS, policy.build(slots)));
        layouts.set_in_use(numbers[n], true);
    }
    let mut order: Vec<(Duration, usize, &Request)> = Vec::new();
    for &n in &present {
        order.extend(
            traces[n].iter().zip(0..).map(|(request, place)| (Duration::from_millis(1 + request.timestamp.unwrap_or(place)), n, request)),
        );
    }
    order.sort_by_key(|(at, n, _)| (*at, *n));
    let mut hits = [Hits::default(); 2];
    for (number, (at, n, request)) in (1..).zip(order) {
        let mut turn = Turn::new(number, request, at);
        let leading = turn.get(layouts.directory(numbers[n]));
        let wanted = layouts.directory(numbers[n]).to_write(turn.missing());
        // No reader is late here.
        drop(layouts.make_room(numbers[n], wanted, at));
        turn.put(layouts.directory(numbers[n]));
        hits[n].add(request, leading);
    }
    let parts = std::array::from_fn(|n| {
        let owned = if present.contains(&n) { layouts.division().owned(numbers[n]) } else { 0 };
        owned as f64 / layouts.division().extents() as f64
    });
    (hits, parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(at: u64, first: u64, blocks: u64) -> Request {
        Request { timestamp: Some(at), input_tokens: 512 * blocks, blocks: (first..first + blocks).collect(), ..Request::default() }
    }

    #[test]
    fn a_model_that_needs_more_than_half_gets_what_the_other_does_not_use() {
        // 60 blocks over and over, which half of 100 do not hold; and few of the other's.
        let busy: Vec<Request> = (0..500).map(|n| request(n * 1000, n % 6 * 10, 10)).collect();
        let quiet: Vec<Request> = (0..500).map(|n| request(n * 1000, 0, 4)).collect();
        let rows = compare([&busy, &quiet], 100, Policy::Lru);
        assert!(rows[0].shared > 0.9 && rows[0].halves < 0.2, "{rows:?}");
        assert!(rows[1].shared > 0.9 && rows[1].halves > 0.9, "{rows:?}");
    }
}
