//! Sends traces to a collector as OTLP over HTTP, from a thread of its own.
//!
//! No request waits for it: a trace that finds the queue full, or that the collector does not accept, is lost and counted.

use super::{
    queue::{Near, queue},
    span::{Attributes, EndedTrace, Kind, Span, Value},
};
use crate::{base::shares::Party, metrics};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    resource::v1::Resource,
    trace::v1::{self as otlp, ResourceSpans, ScopeSpans, Status, span::SpanKind, status::StatusCode},
};
use prost_otlp::Message;
use std::{
    io,
    path::PathBuf,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tidemill_tenancy::web::{Client, Target, TargetError, read_token};

/// The maximum number of traces that wait to be sent.
const QUEUE_MAX: u64 = 1024;
/// The maximum number of traces in one request to the collector.
const BATCH_MAX: usize = 128;
/// The time for which the first trace of a request waits for others.
const BATCH_WAIT: Duration = Duration::from_secs(1);
/// The time limit for the collector to answer.
const SEND_MAX: Duration = Duration::from_secs(5);
/// The maximum length that is read of its answer.
const ANSWER_BYTES_MAX: u64 = 4 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The collector's URL, for example `http://127.0.0.1:4318/v1/traces`.
    pub target: Target,
    /// A file with a token that is sent as `Authorization: Bearer`; read before each request.
    pub token: Option<PathBuf>,
    /// The name of this process among all senders.
    pub instance: String,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("starting the thread that sends traces failed: {0}")]
    Thread(#[from] io::Error),
}

/// The sending end of the queue.
#[derive(Debug)]
pub struct Collector(Near<EndedTrace>);

impl Collector {
    /// Starts the thread. It ends with this handle, after it has sent the queued traces.
    pub fn start(settings: Settings) -> Result<Self, StartError> {
        let client = settings.target.client_without_redirects(SEND_MAX)?;
        let (near, far) = queue(QUEUE_MAX);
        let mut sending = Sending { client, settings, is_failing: false };
        thread::Builder::new().name("traces".into()).spawn(move || {
            while let Some(batch) = far.next(BATCH_MAX, BATCH_WAIT) {
                sending.send(&batch);
            }
        })?;
        Ok(Self(near))
    }

    /// Queues a trace of this party.
    pub fn send(&self, party: Party, trace: EndedTrace) {
        if let Err(refused) = self.0.push(party, trace) {
            metrics::count_traces("lost", 1);
            metrics::count_share_refusal("traces", refused);
        }
    }

    /// A collector that keeps the traces that it is given.
    #[cfg(test)]
    pub fn held() -> (Self, Held) {
        let (near, far) = queue(4 * QUEUE_MAX);
        (Self(near), Held(far))
    }
}

/// The traces of a test's collector.
#[cfg(test)]
pub struct Held(super::queue::Far<EndedTrace>);

#[cfg(test)]
impl Held {
    pub fn taken(&self) -> Vec<EndedTrace> {
        self.0.taken()
    }
}

struct Sending {
    client: Client,
    settings: Settings,
    is_failing: bool,
}

impl Sending {
    fn send(&mut self, batch: &[EndedTrace]) {
        let sent = self.post(&export(&self.settings.instance, batch).encode_to_vec());
        metrics::count_traces(if sent.is_ok() { "sent" } else { "lost" }, batch.len() as u64);
        match &sent {
            Ok(()) if self.is_failing => tracing::info!(url = self.settings.target.url, "the collector takes traces again"),
            Err(error) if !self.is_failing => {
                tracing::warn!(
                    url = self.settings.target.url,
                    error,
                    "sending traces failed: they are lost until the collector takes some again"
                );
            }
            _ => {}
        }
        self.is_failing = sent.is_err();
    }

    fn post(&self, body: &[u8]) -> Result<(), String> {
        let token =
            self.settings.token.as_deref().map(read_token).transpose().map_err(|error| format!("reading the token failed: {error}"))?;
        match self.client.post(token.as_deref(), "application/x-protobuf", body, ANSWER_BYTES_MAX)? {
            (200..300, _) => Ok(()),
            (status, text) => Err(format!("status {status}: {text}")),
        }
    }
}

/// The request that carries `batch`.
fn export(instance: &str, batch: &[EndedTrace]) -> ExportTraceServiceRequest {
    let resource = Attributes::default()
        .with("service.name", "tidemill")
        .with("service.instance.id", instance)
        .with("service.version", env!("CARGO_PKG_VERSION"));
    let spans = batch.iter().flat_map(|trace| trace.spans.iter().map(|span| written(trace, span))).collect();
    let scope = InstrumentationScope { name: "tidemill-gateway".into(), ..InstrumentationScope::default() };
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes: attributes(&resource), ..Resource::default() }),
            scope_spans: vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }],
            ..ResourceSpans::default()
        }],
    }
}

fn written(trace: &EndedTrace, span: &Span) -> otlp::Span {
    let nanos = |at: Instant| unix_nanos(trace.began_at + at.saturating_duration_since(trace.began));
    let kind = match span.kind {
        Kind::Server => SpanKind::Server,
        Kind::Internal => SpanKind::Internal,
    };
    let failed = |error: &String| Status { message: error.clone(), code: StatusCode::Error.into() };
    otlp::Span {
        trace_id: trace.id.to_be_bytes().to_vec(),
        span_id: span.id.to_bits().to_be_bytes().to_vec(),
        parent_span_id: span.parent.map(|parent| parent.to_bits().to_be_bytes().to_vec()).unwrap_or_default(),
        name: span.name.clone(),
        kind: kind.into(),
        start_time_unix_nano: nanos(span.from),
        end_time_unix_nano: nanos(span.to.max(span.from)),
        attributes: attributes(&span.attributes),
        status: span.failed.as_ref().map(failed),
        ..otlp::Span::default()
    }
}

fn unix_nanos(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

fn attributes(attributes: &Attributes) -> Vec<KeyValue> {
    let value = |value: &Value| match value {
        Value::Text(text) => any_value::Value::StringValue(text.clone()),
        Value::Int(number) => any_value::Value::IntValue(*number),
        Value::Float(number) => any_value::Value::DoubleValue(*number),
        Value::Bool(bit) => any_value::Value::BoolValue(*bit),
    };
    let written = |(key, given): (&str, &Value)| KeyValue {
        key: key.into(),
        value: Some(AnyValue { value: Some(value(given)) }),
        ..KeyValue::default()
    };
    attributes.iter().map(written).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traces::span::SpanId;

    #[test]
    fn spans_are_written_with_ids_times_and_statuses() {
        let began = Instant::now();
        let span = |id, parent: Option<u64>, from: u64, to: u64| Span {
            id: SpanId::from_bits(id),
            parent: parent.map(SpanId::from_bits),
            name: "decode".into(),
            kind: Kind::Internal,
            from: began + Duration::from_millis(from),
            to: began + Duration::from_millis(to),
            attributes: Attributes::default().with("tidemill.rescues", 2u32).with("tidemill.worker", "decode-0"),
            failed: parent.map(|_| "lost".into()),
        };
        let began_at = UNIX_EPOCH + Duration::from_secs(1_000);
        let trace = EndedTrace { id: 0xab, began_at, began, spans: vec![span(1, None, 0, 9), span(2, Some(1), 3, 2)] };
        let bytes = export("c1", &[trace]).encode_to_vec();
        let read = ExportTraceServiceRequest::decode(&bytes[..]).unwrap();
        let [root, child] = &read.resource_spans[0].scope_spans[0].spans[..] else { panic!("there are two spans") };
        assert_eq!(root.trace_id, 0xabu128.to_be_bytes());
        assert_eq!((root.start_time_unix_nano, root.end_time_unix_nano), (1_000_000_000_000, 1_000_009_000_000));
        assert!(root.parent_span_id.is_empty() && root.status.is_none());
        assert_eq!(child.parent_span_id, 1u64.to_be_bytes());
        assert_eq!(child.end_time_unix_nano, child.start_time_unix_nano, "no span ends before it begins");
        assert_eq!(child.status.as_ref().map(|status| (status.code, &*status.message)), Some((StatusCode::Error.into(), "lost")));
        assert_eq!(child.attributes.len(), 2);
    }
}
