//! Mooncake's first baseline: a random prefill worker, which uses the part of the prompt that its own host holds.

use super::{
    Placement,
    plan::{Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let workers = &planner.snapshot.prefill;
    let drawn = (!workers.is_empty()).then(|| &workers[(mixed(planner.demand.seed) % workers.len() as u64) as usize]);
    Some(planner.plan(planner.least_busy()?, drawn, Pooling::AtPrefill { transfer: false }))
}

/// SplitMix64 (Steele et al.): neighbouring seeds give unrelated numbers.
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
