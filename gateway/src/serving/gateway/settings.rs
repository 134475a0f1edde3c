//! The settings of a gateway.

use crate::{
    base::{memories, origins::Origins, registry::Registry},
    batches::Batches,
    cache::{replay, response_cache, semantic},
    context::Strategy,
    dialog::thinking::ThoughtBudgets,
    features::{feedback::Feedback, grammars::Grammars, server_tools::ServerTools, summarizer},
    operators::Operators,
    routing::Router,
    safety::{Safety, audit::Audit, pii::Pii},
    serving::{encoder::EncoderSettings, examples::ExampleSettings, recall::RecallSettings, regions::Regions},
    store::Store,
    tenants::Tenants,
    traces::Traces,
};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tidemill_cluster::class::Classes;
use tidemill_tenancy::sink::Sink;

#[derive(Debug)]
pub struct GatewaySettings {
    pub requests: RequestSettings,
    pub classes: Classes,
    pub registry: Arc<dyn Registry>,
    pub store: Arc<dyn Store>,
    /// The data directory, if there is one.
    pub data: Option<PathBuf>,
    /// Files and batches, if there is a data directory.
    pub batches: Option<Arc<Batches>>,
    /// Grammars for the same models in the same order.
    pub grammars: Grammars,
    pub tenants: Arc<Tenants>,
    /// The tools that run on the server, if any.
    pub server_tools: Option<Arc<ServerTools>>,
    /// The safety checks; `None` if prompts and answers are not checked.
    pub safety: Option<Safety>,
    /// The audit log, if there is one.
    pub audit: Option<Arc<Audit>>,
    /// The sign-in of operators; without it, reaching their port is enough. It needs the audit log.
    pub operators: Option<Arc<Operators>>,
    /// The recording of feedback, if it is on.
    pub feedback: Option<Arc<Feedback>>,
    /// The senders of events to Kafka.
    pub kafka: Vec<Sink>,
    /// This region and the ways to others, if this is one of several.
    pub regions: Option<Arc<Regions>>,
    /// The recording of traces, if it is on.
    pub traces: Option<Arc<Traces>>,
    /// The maximum number of requests that are being read or answered, not counting streams. A tenant may have half of them.
    pub requests_max: usize,
}

/// The settings that are plain values, as an operator states them.
#[derive(Debug)]
pub struct RequestSettings {
    /// Rules that choose the model; without them, the model that the request names.
    pub router: Option<Router>,
    /// Examples with which `auto` compares requests; `None` if it goes by form alone.
    pub examples: Option<ExampleSettings>,
    /// The treatment of personal data; `None` to leave it unchanged.
    pub pii: Option<Pii>,
    /// The strategy for stored conversations that are too long, unless a chat specifies one.
    pub context: Strategy,
    pub summaries: summarizer::Settings,
    /// The ranking of old messages and facts by their meaning; `None` to rank them by their words alone.
    pub recall: Option<RecallSettings>,
    /// Limits on the facts remembered of users; `None` if none are remembered.
    pub memories: Option<memories::Limits>,
    /// The ages at which what is stored is deleted, besides files and batches, whose ages are among their limits.
    pub ages: Ages,
    /// Limits on answers that are kept for repeated requests.
    pub replay: replay::Limits,
    /// Limits on answers that are kept for equal requests; `None` if none are kept.
    pub response_cache: Option<response_cache::Limits>,
    /// Limits on answers that are kept for similar questions; `None` if none are kept.
    pub semantic_cache: Option<SemanticSettings>,
    /// The longest time of any request.
    pub request_timeout: Duration,
    pub body_bytes_max: usize,
    /// The maximum size of all request bodies that are arriving or being worked on.
    pub bodies_bytes_max: u64,
    /// The time within which a request's body must have arrived, and the longest silence in an upload.
    pub body_timeout: Duration,
    /// Whether a `max_tokens` that does not fit after the prompt is refused. Otherwise it is reduced to the room.
    pub max_tokens_must_fit: bool,
    /// The most tokens of thought for each effort that a client may ask for.
    pub thought_budgets: ThoughtBudgets,
    /// The names under which the ports are reached, besides addresses and `localhost`, while no key protects them.
    pub hosts: Vec<String>,
    /// The origins whose pages may use the gateway.
    pub cors: Origins,
}

/// The ages at which what is stored of a kind is deleted; `None` keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ages {
    /// Since the last addition.
    pub responses: Option<Duration>,
    /// Since the last addition.
    pub conversations: Option<Duration>,
    pub memories: Option<Duration>,
    /// Since the opinion's last change.
    pub opinions: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SemanticSettings {
    pub limits: semantic::Limits,
    /// The model whose embeddings say how similar questions are.
    pub encoder: EncoderSettings,
}
