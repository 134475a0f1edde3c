//! Two choices one after the other: the decode worker with the least work before a new sequence's first token; then the prefill
//! worker that is free first, unless the decode worker would finish the missing suffix before that one could begin.

use super::{
    choose_prefill,
    plan::{Plan, Planner, Pooling},
};

pub(super) fn choose(planner: &Planner<'_>) -> Option<Plan> {
    let decode = planner.least_busy()?;
    let local = planner.plan(decode, None, Pooling::Shared);
    let Some(prefill) = choose_prefill(&planner.snapshot.prefill) else { return Some(local) };
    let remote = planner.plan(decode, Some(&prefill), Pooling::Shared);
    Some(if planner.stays_local(&local, &remote) { local } else { remote })
}
