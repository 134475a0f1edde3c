//! Mooncake's second baseline: the prefill worker with the shortest queue, which uses the part of the prompt that its own host holds.

use super::{
    Placement, choose_prefill,
    plan::{Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let decode = planner.least_busy()?;
    Some(planner.plan(decode, choose_prefill(&planner.snapshot.prefill).as_ref(), Pooling::AtPrefill { transfer: false }))
}
