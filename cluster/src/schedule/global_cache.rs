//! Mooncake's KVCache-centric scheduling (FAST'25, Algorithm 1): a prefill worker whose own prefix is much shorter than the best one
//! anywhere fetches the latter; the others compute. The least sum of queue, transfer and computation wins.

use super::{
    Placement,
    plan::{Planner, Pooling},
};

/// The ratio of the best prefix anywhere to the worker's own from which a transfer pays. The paper mentions a threshold without a number.
const BALANCING_THRESHOLD: f64 = 1.5;

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let decode = planner.least_busy()?;
    let best = planner.held_anywhere();
    let plans = planner.snapshot.prefill.iter().map(|worker| {
        let own = planner.held_at(worker.host).max(worker.cached_blocks);
        let transfer = f64::from(best) > BALANCING_THRESHOLD * f64::from(own);
        planner.plan(decode, Some(worker), Pooling::AtPrefill { transfer })
    });
    let first = plans.min_by(|a, b| a.ttft_ms.total_cmp(&b.ttft_ms));
    Some(first.unwrap_or_else(|| planner.plan(decode, None, Pooling::Shared)))
}
