//! A fixed split: a prefill worker computes every missing full block, whatever its queue; decode workers only decode.

use super::{
    Placement, choose_prefill,
    plan::{Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let decode = planner.least_busy()?;
    Some(planner.plan(decode, choose_prefill(&planner.snapshot.prefill).as_ref(), Pooling::Shared))
}
