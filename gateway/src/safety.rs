//! Safety checks of prompts and answers: `tidemill-safety`'s cascade with this server's thresholds. `moderator`: its last stage.

pub mod audit;
pub(crate) mod metrics;
pub mod moderator;
pub mod pii;

use crate::{
    generation::{
        disclaimed::Disclaimed,
        guarded::Guarded,
        piece::{Finish, StopReason, Violation},
    },
    safety::audit::Audit,
};
use moderator::Moderator;
use std::{sync::Arc, time::Instant};
use tidemill_safety::{
    category::{Category, Finding, Threshold, Thresholds},
    disclaimers::Disclaimer,
    guard::Guard,
    judge::Doubt,
};

/// The maximum length of a text that reviewers see.
const EXCERPT_BYTES_MAX: usize = 2048;

#[derive(Clone, Debug)]
pub struct Safety {
    pub guard: Arc<Guard>,
    pub input: Thresholds,
    pub output: Thresholds,
    /// The moderator of uncertain findings; without one, they pass.
    pub moderator: Option<Arc<Moderator>>,
    pub disclaimers: Arc<[Disclaimer]>,
}

impl Safety {
    /// Returns the first finding in a prompt's texts, with its text; without one, the uncertain findings that are left to the moderator. A
    /// request may be stricter than the server, never less strict.
    pub fn check_input<'a>(
        &self,
        texts: impl IntoIterator<Item = &'a str>,
        stricter: &[(Category, Threshold)],
    ) -> Result<Vec<Doubt>, (Finding, &'a str)> {
        let (started, thresholds) = (Instant::now(), tightened(self.input, stricter));
        let mut doubts = Vec::new();
        let found = texts.into_iter().find_map(|text| {
            let (finding, is_doubtful) = self.guard.examine(text, &thresholds);
            if is_doubtful && self.moderator.is_some() {
                doubts.extend(self.guard.doubts(text, &thresholds));
            }
            Some((finding?, text))
        });
        metrics::observe_input(started.elapsed());
        let excerpt = |(finding, text)| (finding, self.excerpt(text, &thresholds));
        found.inspect(|(finding, _)| metrics::count_block("input", finding)).map(excerpt).map_or(Ok(doubts), Err)
    }

    /// Cuts a text to the part that holds its finding, for a reviewer.
    fn excerpt<'a>(&self, mut text: &'a str, thresholds: &Thresholds) -> &'a str {
        while text.len() > EXCERPT_BYTES_MAX {
            let middle = text.floor_char_boundary(text.len() / 2);
            let (left, right) = text.split_at(middle);
            text = match [left, right].into_iter().find(|half| self.guard.check(half, thresholds).is_some()) {
                Some(half) => half,
                // The finding lies across the middle.
                None => {
                    let start = text.floor_char_boundary(middle - EXCERPT_BYTES_MAX / 2);
                    &text[start..text.floor_char_boundary(middle + EXCERPT_BYTES_MAX / 2)]
                }
            };
        }
        text
    }

    /// Whether a text may be put into a prompt that its client did not write it into: not if the moderator would have to see it. Nothing is
    /// refused here, so nothing is counted.
    pub fn accepts(&self, text: &str, stricter: &[(Category, Threshold)]) -> bool {
        let thresholds = tightened(self.input, stricter);
        let (finding, is_doubtful) = self.guard.examine(text, &thresholds);
        finding.is_none() && !(is_doubtful && self.moderator.is_some() && !self.guard.doubts(text, &thresholds).is_empty())
    }

    /// Creates the moderation of an answer. `asks` tells whether uncertain findings in it are moderated.
    pub fn guarded(&self, stricter: &[(Category, Threshold)], asks: bool) -> Guarded {
        Guarded { guard: Arc::clone(&self.guard), thresholds: tightened(self.output, stricter), asks }
    }

    /// The moderator of answers, if answers are moderated.
    pub fn moderator_of_answers(&self) -> Option<&Arc<Moderator>> {
        self.moderator.as_ref().filter(|moderator| moderator.reads_answers())
    }
}

/// The disclaimers of an answer, if there are any. An answer in a requested format has none: it would break the format.
pub fn disclaimed(safety: Option<&Safety>, has_form: bool) -> Option<Disclaimed> {
    let disclaimers = safety.map(|safety| &safety.disclaimers).filter(|disclaimers| !disclaimers.is_empty() && !has_form)?;
    Some(Disclaimed { disclaimers: Arc::clone(disclaimers), count: metrics::count_disclaimer })
}

/// The audit log, with the tenant and model under which blocks are recorded.
#[derive(Debug)]
pub struct Blocks {
    pub audit: Arc<Audit>,
    pub tenant: Option<String>,
    pub model: String,
}

/// Counts a choice that safety checks ended, and records it.
pub fn note_cut(finish: &mut Finish, blocks: Option<&Blocks>) {
    if let Some(StopReason::Violation(Violation { finding, appeal_id, text })) = &mut finish.stop_reason {
        metrics::count_block("output", finding);
        *appeal_id = blocks.map(|Blocks { audit, tenant, model }| audit.blocked("output", tenant.as_deref(), model, *finding, text));
    }
}

fn tightened(mut thresholds: Thresholds, stricter: &[(Category, Threshold)]) -> Thresholds {
    stricter.iter().for_each(|(category, threshold)| thresholds.tighten(*category, *threshold));
    thresholds
}
