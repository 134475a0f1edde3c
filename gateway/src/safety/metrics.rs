//! The safety checks' part of `/metrics`; `crate::metrics` describes it.

use metrics::{counter, histogram};
use std::time::Duration;
use tidemill_safety::{category::Finding, pii::Kind};

pub(super) fn observe_input(time: Duration) {
    histogram!("tidemill_safety_input_seconds").record(time);
}

pub(crate) fn count_block(side: &'static str, finding: &Finding) {
    counter!("tidemill_safety_blocks_total", "side" => side, "category" => finding.category.name(), "stage" => finding.stage.name())
        .increment(1);
}

pub(crate) fn observe_moderator(side: &'static str, time: Duration) {
    histogram!("tidemill_safety_model_seconds", "side" => side).record(time);
}

/// Counts a text that passed although the moderator could not see it.
pub(crate) fn count_bypass(side: &'static str, reason: &'static str) {
    counter!("tidemill_safety_bypasses_total", "side" => side, "reason" => reason).increment(1);
}

/// Counts a text that was refused because the moderator could not see it.
pub(crate) fn count_unchecked(side: &'static str, reason: &'static str) {
    counter!("tidemill_safety_unchecked_total", "side" => side, "reason" => reason).increment(1);
}

pub(super) fn count_disclaimer(name: &str) {
    counter!("tidemill_safety_disclaimers_total", "name" => name.to_owned()).increment(1);
}

pub(super) fn count_audit_lost() {
    counter!("tidemill_audit_lost_total").increment(1);
}

pub(super) fn observe_pii_input(time: Duration) {
    histogram!("tidemill_pii_input_seconds").record(time);
}

pub(super) fn count_redactions(side: &'static str, kind: Kind, redactions: u64) {
    counter!("tidemill_pii_redactions_total", "side" => side, "kind" => kind.name()).increment(redactions);
}
