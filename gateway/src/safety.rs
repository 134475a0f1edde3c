//! What may be asked and answered here: `tidemill-safety`'s cascade with this server's thresholds, and its counters.

use crate::{
    audit::Audit,
    generation::{Finish, StopReason, Violation, guarded::Guarded},
};
use metrics::{counter, histogram};
use std::{sync::Arc, time::Instant};
use tidemill_safety::{
    category::{Category, Finding, Threshold, Thresholds},
    guard::Guard,
};

/// More is not shown to reviewers.
const EXCERPT_BYTES_MAX: usize = 2048;

#[derive(Clone, Debug)]
pub struct Safety {
    pub guard: Arc<Guard>,
    pub input: Thresholds,
    pub output: Thresholds,
}

impl Safety {
    /// The first finding in a prompt's texts, with its text. A request may be stricter than the server, never less strict.
    pub fn check_input<'a>(
        &self,
        texts: impl IntoIterator<Item = &'a str>,
        stricter: &[(Category, Threshold)],
    ) -> Result<(), (Finding, &'a str)> {
        let (started, thresholds) = (Instant::now(), tightened(self.input, stricter));
        let found = texts.into_iter().find_map(|text| Some((self.guard.check(text, &thresholds)?, text)));
        histogram!("tidemill_safety_input_seconds").record(started.elapsed());
        let excerpt = |(finding, text)| (finding, self.excerpt(text, &thresholds));
        found.inspect(|(finding, _)| count("input", finding)).map(excerpt).map_or(Ok(()), Err)
    }

    /// What a reviewer must see of a text with a finding: it is somewhere in this part.
    fn excerpt<'a>(&self, mut text: &'a str, thresholds: &Thresholds) -> &'a str {
        while text.len() > EXCERPT_BYTES_MAX {
            let middle = text.floor_char_boundary(text.len() / 2);
            let (left, right) = text.split_at(middle);
            text = match [left, right].into_iter().find(|half| self.guard.check(half, thresholds).is_some()) {
                Some(half) => half,
                // It lies across.
                None => {
                    let start = text.floor_char_boundary(middle - EXCERPT_BYTES_MAX / 2);
                    &text[start..text.floor_char_boundary(middle + EXCERPT_BYTES_MAX / 2)]
                }
            };
        }
        text
    }

    /// Whether a text may be put into a prompt that its client did not write it into. Nothing is refused, and so nothing counted.
    pub fn accepts(&self, text: &str, stricter: &[(Category, Threshold)]) -> bool {
        self.guard.check(text, &tightened(self.input, stricter)).is_none()
    }

    pub fn guarded(&self, stricter: &[(Category, Threshold)]) -> Guarded {
        Guarded { guard: Arc::clone(&self.guard), thresholds: tightened(self.output, stricter) }
    }
}

/// Who answers for blocks.
#[derive(Debug)]
pub struct Blocks {
    pub audit: Arc<Audit>,
    pub tenant: Option<String>,
    pub model: String,
}

/// Counts a choice that safety checks ended, and records it.
pub fn note_cut(finish: &mut Finish, blocks: Option<&Blocks>) {
    if let Some(StopReason::Violation(Violation { finding, appeal_id, text })) = &mut finish.stop_reason {
        count("output", finding);
        *appeal_id = blocks.map(|Blocks { audit, tenant, model }| audit.blocked("output", tenant.as_deref(), model, *finding, text));
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
