//! The joint choice over every decode worker with room and every prefill worker, or none: least predicted TTFT.

use super::plan::{Plan, Planner, Pooling};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Plan> {
    let plans = planner.roomy().flat_map(|decode| {
        let local = planner.plan(decode, None, Pooling::Shared);
        let remote = planner.snapshot.prefill.iter().map(|prefill| planner.plan(decode, Some(prefill), Pooling::Shared));
        let best = remote.min_by(|a, b| a.placement.ttft_ms.total_cmp(&b.placement.ttft_ms));
        match best {
            Some(remote) if !planner.stays_local(&local, &remote) => Some(remote),
            _ => Some(local),
        }
    });
    plans.min_by(|a, b| a.placement.ttft_ms.total_cmp(&b.placement.ttft_ms))
}
