//! Two choices in a row: the decode worker with the least work before a new sequence's first token; then the prefill worker that is free
//! first, unless the decode worker would finish the missing suffix before that one could start.

use super::{
    Placement, choose_prefill,
    plan::{Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Placement> {
    let decode = planner.least_busy()?;
    let at = planner.at(decode, Pooling::Shared, None);
    let local = at.local();
    let Some(prefill) = choose_prefill(&planner.snapshot.prefill).filter(|_| at.can_hand_over()) else { return Some(at.plan(local, None)) };
    let remote = at.remote(&prefill, prefill.queue_ms, planner.prefill_ms(&prefill, at.found));
    let stays = planner.stays_local(at.found, local.ttft_ms - planner.step_ms(decode), remote.begin_ms);
    Some(if stays { at.plan(local, None) } else { at.plan(remote, Some(&prefill)) })
}
