//! Traces: a request as spans, one for the request itself, one for each answer of a model, and one for each phase of an answer's choices.
//!
//! A trace is complete once its last holder drops it, and only then is it decided whether it goes to the collector: traces of requests that
//! failed or missed their limits do, those that their callers trace if callers are trusted, and a share of the rest. Nothing is recorded
//! while no collector is set.
//!
//! - [`names`]: attributes; [`parent`]: the caller's trace; [`span`]: spans and their attributes
//! - [`collector`]: the thread that sends traces, as OTLP over HTTP; [`queue`]: those that wait for it

pub mod collector;
pub mod names;
pub mod parent;
pub mod queue;
pub mod span;

use crate::base::shares::Party;
use collector::Collector;
use parent::Parent;
use parking_lot::Mutex;
use span::{Attributes, EndedTrace, Kind, Span, SpanId};
use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};

/// The maximum number of spans in one trace. A request may have thousands of choices; further spans are left out and counted.
const SPANS_MAX: usize = 512;

#[derive(Debug)]
pub struct Traces {
    collector: Collector,
    sampling: Sampling,
}

/// The traces that are kept besides those of requests that failed or missed their limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The share of other traces that is kept, from 0 to 1.
    pub share: f64,
    /// Whether a trace is kept because its caller traces it. Untrusted callers could crowd out other traces this way.
    pub callers: bool,
}

/// A trace that is being recorded.
#[derive(Debug)]
pub struct Trace {
    traces: Arc<Traces>,
    id: u128,
    root: SpanId,
    parent: Option<Parent>,
    began: Instant,
    began_at: SystemTime,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    name: String,
    /// The party whose place in the queue the trace takes.
    party: Party,
    attributes: Attributes,
    failed: Option<String>,
    /// Whether the trace is kept regardless of the share.
    is_notable: bool,
    spans: Vec<Span>,
    left_out: u32,
}

impl Traces {
    pub fn new(collector: Collector, sampling: Sampling) -> Self {
        Self { collector, sampling }
    }

    /// Starts the trace of a request, as a part of its caller's trace if `traceparent` names one. It counts as this server's own until it
    /// [belongs to a party](Trace::belongs_to).
    pub fn begin(self: &Arc<Self>, name: String, traceparent: Option<&str>) -> Arc<Trace> {
        let parent = traceparent.and_then(Parent::parse);
        Arc::new(Trace {
            traces: Arc::clone(self),
            id: parent.map_or_else(rand::random, |parent| parent.trace),
            root: SpanId::random(),
            parent,
            began: Instant::now(),
            began_at: SystemTime::now(),
            state: Mutex::new(State {
                name,
                party: Party::Server,
                attributes: Attributes::default(),
                failed: None,
                is_notable: self.sampling.callers && parent.is_some_and(|parent| parent.is_sampled),
                spans: Vec::new(),
                left_out: 0,
            }),
        })
    }

    /// Whether the share includes a trace, decided by its id: all processes that see a part of it decide alike.
    fn includes(&self, id: u128) -> bool {
        // The lower bits are random in every version of the standard.
        ((id as u64 >> 11) as f64) < self.sampling.share * (1u64 << 53) as f64
    }
}

impl Trace {
    /// Sets an attribute of the whole request.
    pub fn set(&self, name: &'static str, value: impl Into<span::Value>) {
        self.state.lock().attributes.set(name, value);
    }

    /// Counts the trace to a party's share of those that wait to be sent.
    pub fn belongs_to(&self, party: Party) {
        self.state.lock().party = party;
    }

    /// Marks the request as failed.
    pub fn fail(&self, error: &str) {
        let mut state = self.state.lock();
        state.failed = Some(error.to_owned());
        state.is_notable = true;
    }

    /// Keeps the trace regardless of the share.
    pub fn keep(&self) {
        self.state.lock().is_notable = true;
    }

    /// Adds a span that has ended, below the request's own unless it specifies a parent.
    pub fn add(&self, mut span: Span) {
        span.parent.get_or_insert(self.root);
        let mut state = self.state.lock();
        // One place is reserved for the root.
        if state.spans.len() + 1 < SPANS_MAX {
            state.spans.push(span);
        } else {
            state.left_out += 1;
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if !state.is_notable && !self.traces.includes(self.id) {
            return;
        }
        let mut attributes = std::mem::take(&mut state.attributes);
        if state.left_out > 0 {
            attributes.set(names::SPANS_LEFT_OUT, i64::from(state.left_out));
        }
        let root = Span {
            id: self.root,
            parent: self.parent.map(|parent| parent.span),
            name: std::mem::take(&mut state.name),
            kind: Kind::Server,
            from: self.began,
            to: Instant::now(),
            attributes,
            failed: state.failed.take(),
        };
        let spans = std::iter::once(root).chain(std::mem::take(&mut state.spans)).collect();
        let ended = EndedTrace { id: self.id, began_at: self.began_at, began: self.began, spans };
        self.traces.collector.send(state.party.clone(), ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn traces(share: f64) -> (Arc<Traces>, collector::Held) {
        let (collector, held) = Collector::held();
        (Arc::new(Traces::new(collector, Sampling { share, callers: true })), held)
    }

    fn span(name: &str, at: Instant) -> Span {
        let attributes = Attributes::default();
        Span { id: SpanId::random(), parent: None, name: name.into(), kind: Kind::Internal, from: at, to: at, attributes, failed: None }
    }

    #[test]
    fn a_trace_ends_with_its_last_holder() {
        let (traces, held) = traces(1.0);
        let trace = traces.begin("POST /v1/completions".into(), None);
        let holder = Arc::clone(&trace);
        drop(trace);
        assert!(held.taken().is_empty());
        holder.add(span("decode", holder.began + Duration::from_millis(5)));
        drop(holder);
        let [ended] = &held.taken()[..] else { panic!("one trace ended") };
        assert_eq!(ended.spans.iter().map(|span| &*span.name).collect::<Vec<_>>(), ["POST /v1/completions", "decode"]);
        assert_eq!(ended.spans[1].parent, Some(ended.spans[0].id));
    }

    #[test]
    fn errors_and_callers_traces_are_kept_and_a_share_of_the_rest() {
        let (none, held) = traces(0.0);
        drop(none.begin("quiet".into(), None));
        drop(none.begin("not sampled".into(), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")));
        assert!(held.taken().is_empty());
        none.begin("failed".into(), None).fail("no worker");
        none.begin("late".into(), None).keep();
        drop(none.begin("sampled".into(), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")));
        let names: Vec<_> = held.taken().into_iter().map(|ended| ended.spans[0].name.clone()).collect();
        assert_eq!(names, ["failed", "late", "sampled"]);
        let (collector, held) = Collector::held();
        let wary = Arc::new(Traces::new(collector, Sampling { share: 0.0, callers: false }));
        drop(wary.begin("sampled".into(), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")));
        assert!(held.taken().is_empty(), "a caller decides only where callers are trusted");
        let (some, held) = traces(0.25);
        (0..2000).for_each(|_| drop(some.begin(String::new(), None)));
        let kept = held.taken().len();
        assert!((400..600).contains(&kept), "{kept} of 2,000");
    }

    #[test]
    fn a_callers_trace_is_gone_on_with() {
        let (traces, held) = traces(0.0);
        drop(traces.begin("asked".into(), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")));
        let ended = held.taken().remove(0);
        assert_eq!(format!("{:032x}", ended.id), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(ended.spans[0].parent, Some(SpanId::from_bits(0xb7ad_6b71_6920_3331)));
    }

    #[test]
    fn what_is_too_much_is_left_out_and_counted() {
        let (traces, held) = traces(1.0);
        let trace = traces.begin("many".into(), None);
        (0..SPANS_MAX + 9).for_each(|_| trace.add(span("decode", trace.began)));
        drop(trace);
        let ended = held.taken().remove(0);
        assert_eq!(ended.spans.len(), SPANS_MAX);
        assert_eq!(ended.spans[0].attributes.get(names::SPANS_LEFT_OUT), Some(&span::Value::Int(10)));
    }
}
