//! What may be asked and answered here: `tidemill-safety`'s cascade with this server's thresholds, and its counters.

use crate::generation::{Finish, StopReason, guarded::Guarded};
use metrics::{counter, histogram};
use std::{sync::Arc, time::Instant};
use tidemill_safety::{
    category::{Category, Finding, Threshold, Thresholds},
    guard::Guard,
};

#[derive(Clone, Debug)]
pub struct Safety {
    pub guard: Arc<Guard>,
    pub input: Thresholds,
    pub output: Thresholds,
}

impl Safety {
    /// The first finding in a prompt's texts. A request may be stricter than the server, never less strict.
    pub fn check_input<'a>(&self, texts: impl IntoIterator<Item = &'a str>, stricter: &[(Category, Threshold)]) -> Result<(), Finding> {
        let (started, thresholds) = (Instant::now(), tightened(self.input, stricter));
        let found = texts.into_iter().find_map(|text| self.guard.check(text, &thresholds));
        histogram!("tidemill_safety_input_seconds").record(started.elapsed());
        found.inspect(|finding| count("input", finding)).map_or(Ok(()), Err)
    }

    /// Whether a text may be put into a prompt that its client did not write it into. Nothing is refused, and so nothing counted.
    pub fn accepts(&self, text: &str, stricter: &[(Category, Threshold)]) -> bool {
        self.guard.check(text, &tightened(self.input, stricter)).is_none()
    }

    pub fn guarded(&self, stricter: &[(Category, Threshold)]) -> Guarded {
        Guarded { guard: Arc::clone(&self.guard), thresholds: tightened(self.output, stricter) }
    }
}

/// Counts a choice that safety checks ended.
pub fn count_cut(finish: &Finish) {
    if let Some(StopReason::Violation(finding)) = &finish.stop_reason {
        count("output", finding);
    }
}

fn count(side: &'static str, finding: &Finding) {
    counter!("tidemill_safety_blocks_total", "side" => side, "category" => finding.category.name(), "stage" => finding.stage.name())
        .increment(1);
}

fn tightened(mut thresholds: Thresholds, stricter: &[(Category, Threshold)]) -> Thresholds {
    stricter.iter().for_each(|(category, threshold)| thresholds.tighten(*category, *threshold));
    thresholds
}
