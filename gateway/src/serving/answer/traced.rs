//! An answer as spans: its own, and for each choice one for each phase.
//!
//! Workers report the duration of each phase, not its start. Phases follow one another, so each starts here where the previous one ended;
//! decoding is between the first token and the last, as they arrived at the gateway.

use crate::{
    metrics::{RequestOutcome, usage::Usage},
    traces::{
        Trace,
        names::{self, Operation},
        span::{Attributes, Kind, Span, SpanId},
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::ChoiceUsage;

/// The part of a trace that an answer writes.
#[derive(Debug)]
pub struct Traced {
    trace: Arc<Trace>,
    id: SpanId,
    operation: Operation,
    model: String,
    class: String,
    began: Instant,
}

impl Traced {
    /// Starts an answer.
    pub fn new(trace: Arc<Trace>, operation: Operation, model: &str, class: &str) -> Self {
        Self { trace, id: SpanId::random(), operation, model: model.to_owned(), class: class.to_owned(), began: Instant::now() }
    }

    /// Records a choice that has ended. `tokens` are the times of its first and last token, if there were any.
    pub(super) fn choice(&self, index: usize, usage: &ChoiceUsage, tokens: Option<(Instant, Instant)>) {
        let from = &usage.provenance;
        let before_decode = [
            ("queue", usage.queue_ms, None),
            ("prefill", usage.prefill_ms, usage.prefill_worker.as_ref()),
            ("transfer", (from.transfer_ms - usage.prefill_ms).max(0.0), Some(&usage.decode_worker)),
            ("fetch", from.fetch_ms, Some(&usage.decode_worker)),
            ("decode queue", from.queue_ms, Some(&usage.decode_worker)),
            ("tail", from.tail_ms, Some(&usage.decode_worker)),
        ];
        let last_end = tokens.map(|(first, _)| first);
        let mut at = self.began;
        for (name, ms, worker) in before_decode {
            // Durations come from workers and may be invalid.
            let took = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
            let end = last_end.map_or(at + took, |last| (at + took).min(last));
            if !took.is_zero() {
                self.phase(index, name, (at, end), worker.map(String::as_str), Attributes::default());
            }
            at = end;
        }
        if let Some(tokens) = tokens {
            let attributes = Attributes::default()
                .with(names::PREEMPTIONS, from.preemptions)
                .with(names::RESCUES, usage.rescues)
                .with(names::TOKENS_DRAFTED, from.drafted)
                .with(names::TOKENS_ACCEPTED, from.accepted)
                .with(names::TOKENS_HBM, from.tokens.hbm)
                .with(names::TOKENS_DRAM, from.tokens.dram)
                .with(names::TOKENS_NVME, from.tokens.nvme)
                .with(names::TOKENS_OBJECT, from.tokens.object)
                .with(names::TOKENS_REMOTE, from.tokens.remote);
            let attributes = usage.predicted_ttft_ms.into_iter().fold(attributes, |all, ms| all.with(names::TTFT_PREDICTED_MS, ms));
            self.phase(index, "decode", tokens, Some(&usage.decode_worker), attributes);
        }
    }

    fn phase(&self, index: usize, name: &str, (from, to): (Instant, Instant), worker: Option<&str>, mut attributes: Attributes) {
        attributes.set(names::CHOICE, index as u64);
        worker.into_iter().for_each(|worker| attributes.set(names::WORKER, worker));
        let kind = Kind::Internal;
        self.trace.add(Span { id: SpanId::random(), parent: Some(self.id), name: name.into(), kind, from, to, attributes, failed: None });
    }

    /// Records the answer's end. `kept` tells whether all choices kept their class's limits.
    pub(super) fn end(&self, outcome: RequestOutcome, kept: bool, usage: &Usage) {
        if !kept {
            self.trace.keep();
        }
        let attributes = Attributes::default()
            .with(names::OUTPUT_TOKENS, usage.completion_tokens)
            .with(names::CACHED_TOKENS, usage.prompt_tokens_details.cached_tokens)
            .with(names::LIMITS_KEPT, kept);
        self.finish(outcome, usage, attributes);
    }

    /// Records the end of texts that were read without an answer in tokens, for which there are no limits.
    pub fn end_reading(&self, outcome: RequestOutcome, usage: &Usage) {
        self.finish(outcome, usage, Attributes::default());
    }

    fn finish(&self, outcome: RequestOutcome, usage: &Usage, attributes: Attributes) {
        let failed = matches!(outcome, RequestOutcome::Failed | RequestOutcome::Rejected).then(|| outcome.name().to_owned());
        failed.iter().for_each(|error| self.trace.fail(error));
        self.trace.add(Span {
            id: self.id,
            parent: None,
            name: format!("{} {}", self.operation.name(), self.model),
            kind: Kind::Internal,
            from: self.began,
            to: Instant::now(),
            attributes: attributes
                .with(names::OPERATION, self.operation.name())
                .with(names::PROVIDER, "tidemill")
                .with(names::REQUEST_MODEL, &*self.model)
                .with(names::CLASS, &*self.class)
                .with(names::INPUT_TOKENS, usage.prompt_tokens),
            failed,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traces::{Sampling, Traces, collector::Collector};
    use tidemill_proto::message::Provenance;

    #[test]
    fn phases_follow_one_another_up_to_the_first_token() {
        let (collector, held) = Collector::held();
        let trace = Arc::new(Traces::new(collector, Sampling { share: 1.0, callers: false })).begin("POST /v1/completions".into(), None);
        let traced = Traced::new(Arc::clone(&trace), Operation::TextCompletion, "m", "standard");
        let ms = |ms| traced.began + Duration::from_millis(ms);
        let usage = ChoiceUsage {
            provenance: Provenance { transfer_ms: 30.0, tail_ms: 1e9, queue_ms: f64::NAN, ..Provenance::default() },
            queue_ms: 10.0,
            prefill_ms: 20.0,
            prefill_worker: Some("prefill-0".into()),
            decode_worker: "decode-0".into(),
            ..ChoiceUsage::default()
        };
        traced.choice(0, &usage, Some((ms(50), ms(90))));
        traced.end(RequestOutcome::Ok, true, &Usage::default());
        let began = traced.began;
        drop((traced, trace));
        let ended = held.taken().remove(0);
        let spans: Vec<_> =
            ended.spans[1..].iter().map(|span| (&*span.name, (span.from - began).as_millis(), (span.to - began).as_millis())).collect();
        assert_eq!(spans[..5], [("queue", 0, 10), ("prefill", 10, 30), ("transfer", 30, 40), ("tail", 40, 50), ("decode", 50, 90)]);
        let answer = ended.spans.last().unwrap();
        assert_eq!((&*answer.name, answer.parent), ("text_completion m", Some(ended.spans[0].id)));
        assert_eq!(answer.attributes.get(names::OPERATION), Some(&"text_completion".into()));
        assert!(ended.spans[1..6].iter().all(|span| span.parent == Some(answer.id)));
    }

    #[test]
    fn a_failed_answer_and_one_that_missed_its_limits_are_kept() {
        for (outcome, kept, is_there) in [
            (RequestOutcome::Ok, true, false),
            (RequestOutcome::Ok, false, true),
            (RequestOutcome::Failed, true, true),
            (RequestOutcome::Cancelled, true, false),
        ] {
            let (collector, held) = Collector::held();
            let trace = Arc::new(Traces::new(collector, Sampling { share: 0.0, callers: false })).begin(String::new(), None);
            Traced::new(trace, Operation::Chat, "m", "standard").end(outcome, kept, &Usage::default());
            assert_eq!(held.taken().len(), usize::from(is_there), "{outcome:?}, {kept}");
        }
    }
}
