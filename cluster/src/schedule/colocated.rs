//! No disaggregation: the decode worker that answers soonest computes the whole prompt in chunks beside its batch.

use super::plan::{Plan, Planner, Pooling};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Plan> {
    let plans = planner.roomy().map(|decode| planner.plan(decode, None, Pooling::Shared));
    plans.min_by(|a, b| a.placement.ttft_ms.total_cmp(&b.placement.ttft_ms))
}
