//! A rollout's part of `/metrics`; `crate::metrics` describes it.

use super::record::{Rollout, Summary};
use metrics::{counter, gauge};

pub(super) fn count_rollback(rollout: &Rollout) {
    counter!("tidemill_rollbacks_total", "from" => rollout.from.clone(), "to" => rollout.to.clone()).increment(1);
}

/// Resets the metrics of a rollout that is over and deleted.
pub(super) fn hide_rollout(rollout: &Rollout) {
    let labels = [("from", rollout.from.clone()), ("to", rollout.to.clone())];
    gauge!("tidemill_rollout_share", &labels).set(0.0);
    gauge!("tidemill_rollout_state", &labels).set(0.0);
}

/// Sets a rollout's metrics: its `share` at this gateway, and the figures of both models.
pub(super) fn show_rollout(rollout: &Rollout, share: f64, sides: &[(&'static str, Summary)]) {
    let labels = || [("from", rollout.from.clone()), ("to", rollout.to.clone())];
    gauge!("tidemill_rollout_share", &labels()).set(share);
    gauge!("tidemill_rollout_state", &labels()).set(rollout.state.number());
    for (side, summary) in sides {
        let labels = || [("from", rollout.from.clone()), ("to", rollout.to.clone()), ("side", (*side).to_owned())];
        gauge!("tidemill_rollout_requests", &labels()).set(summary.requests as f64);
        gauge!("tidemill_rollout_error_ratio", &labels()).set(summary.error_rate);
        gauge!("tidemill_rollout_goodput_ratio", &labels()).set(summary.goodput);
        if let Some(ms) = summary.ttft_p95_ms {
            gauge!("tidemill_rollout_ttft_p95_seconds", &labels()).set(ms / 1e3);
        }
        if let Some(ms) = summary.tpot_p95_ms {
            gauge!("tidemill_rollout_tpot_p95_seconds", &labels()).set(ms / 1e3);
        }
    }
}
