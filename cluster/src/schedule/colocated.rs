//! No disaggregation: the decode worker that answers soonest computes the whole prompt in chunks beside its batch.

use super::{
    Placement,
    plan::{Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let plans = planner.roomy().map(|decode| planner.plan(decode, None, Pooling::Shared));
    plans.min_by(|a, b| a.ttft_ms.total_cmp(&b.ttft_ms))
}
