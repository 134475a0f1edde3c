//! The records of an answer: usage, recent choices, a rollout's figures, the text that feedback may be about.

use crate::{
    features::feedback::Feedback,
    generation::piece::Piece,
    metrics::{
        Objectives, RequestOutcome,
        recent::{FinishedRequest, Recent},
        usage::TidemillUsage,
    },
    rollout::{routed::Routed, running::Seat, seen::Ended as RequestEnded, shadow::Tap},
    safety::Blocks,
    serving::answer::traced::Traced,
    tenants::metered::Metered,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::ChoiceUsage;

/// The destinations of an answer's records: metrics, usage, the audit log, a rollout's figures.
#[derive(Debug)]
pub struct Books {
    pub objectives: Arc<Objectives>,
    pub recent: Arc<Recent>,
    pub metered: Metered,
    /// The answer's part of its request's trace, if traces are recorded.
    pub traced: Option<Traced>,
    /// The audit log of blocks, if there is one.
    pub blocks: Option<Blocks>,
    /// The route, if the model was chosen by one.
    pub routed: Option<Arc<Routed>>,
    /// The shadow traffic's observer, if there is one.
    pub tap: Option<Tap>,
}

impl Books {
    /// The request's seat in a rollout.
    pub(super) fn seat(&self) -> Option<&Seat> {
        self.routed.as_ref()?.seat.as_ref()
    }

    /// Reports the request's end to the rollout. Clients' own mistakes do not count against a model; a client that leaves before the first
    /// token (not `has_begun`) has waited in vain, which does.
    pub(super) fn count_in_rollout(&self, outcome: RequestOutcome, has_begun: bool, seen: &RequestEnded) {
        let Some(seat) = self.seat() else { return };
        match outcome {
            RequestOutcome::Ok => seat.ended(seen),
            RequestOutcome::Cancelled if has_begun => {}
            RequestOutcome::Failed | RequestOutcome::Rejected | RequestOutcome::Cancelled => {
                seat.ended(&RequestEnded { failed: true, ..RequestEnded::default() })
            }
            RequestOutcome::Invalid => {}
        }
    }
}

/// An answer's text, kept for feedback.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) feedback: Arc<Feedback>,
    pub(super) id: String,
    pub(super) text: String,
}

impl Remembered {
    pub(super) fn hear(&mut self, piece: &Piece) {
        self.text += &piece.text;
        if piece.finish.is_some() {
            self.feedback.complete(&self.id, &self.text);
        }
    }
}

/// Describes one choice that has ended.
pub(super) fn finished(usage: &ChoiceUsage, completion_tokens: u32, ttft: Duration, tpot: Option<Duration>) -> FinishedRequest {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let mut path = TidemillUsage { tokens: usage.provenance.tokens, ..TidemillUsage::default() };
    add(&mut path, usage.clone());
    FinishedRequest {
        at: Instant::now(),
        prompt_tokens: path.tokens.total(),
        completion_tokens,
        ttft_ms: ms(ttft),
        tpot_ms: tpot.map(ms),
        ttft_predicted_ms: usage.predicted_ttft_ms,
        path,
    }
}

/// Adds a choice's usage. The slowest choice counts in each phase.
pub(super) fn add(total: &mut TidemillUsage, usage: ChoiceUsage) {
    let provenance = usage.provenance;
    for (total, ms) in [
        (&mut total.queue_ms, usage.queue_ms + provenance.queue_ms),
        (&mut total.fetch_ms, provenance.fetch_ms),
        (&mut total.prefill_ms, usage.prefill_ms),
        (&mut total.transfer_ms, provenance.transfer_ms),
        (&mut total.tail_ms, provenance.tail_ms),
        (&mut total.decode_ms, provenance.decode_ms),
    ] {
        *total = total.max(ms);
    }
    if total.decode_worker.is_empty() {
        total.decode_worker = usage.decode_worker;
    }
    total.prefill_worker = total.prefill_worker.take().or(usage.prefill_worker);
    total.preemptions += provenance.preemptions;
    total.rescues += usage.rescues;
    total.tokens_drafted += provenance.drafted;
    total.tokens_accepted += provenance.accepted;
}
