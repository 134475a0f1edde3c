//! Mooncake's cache-aware scheduling without transfer: the prefill worker whose queue and computation end first, where the computation
//! leaves out the blocks that its own host holds (FAST'25, Algorithm 1, its first branch).

use super::{
    Placement,
    plan::{Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let decode = planner.least_busy()?;
    let timed =
        planner.snapshot.prefill.iter().map(|worker| (worker, worker.queue_ms + planner.prefill_ms(worker, planner.held_at(worker.host))));
    let first = timed.min_by(|(a, a_ms), (b, b_ms)| a_ms.total_cmp(b_ms).then(a.worker.cmp(&b.worker)));
    Some(planner.plan(decode, first.map(|(worker, _)| worker), Pooling::AtPrefill { transfer: false }))
}
