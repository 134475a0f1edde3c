//! The settings of a gateway.

use crate::{
    base::{memories, origins::Origins, registry::Registry},
    batches::Batches,
    cache::{replay, response_cache, semantic},
    context::Strategy,
    features::{feedback::Feedback, grammars::Grammars, server_tools::ServerTools, summarizer},
    routing::Router,
    safety::{Safety, audit::Audit, pii::Pii},
    store::Store,
    tenants::Tenants,
    traces::Traces,
};
use std::{sync::Arc, time::Duration};
use tidemill_cluster::class::Classes;

#[derive(Debug)]
pub struct GatewaySettings {
    pub classes: Classes,
    /// Rules for which model answers. `None`: the one that the request names.
    pub router: Option<Router>,
    pub registry: Arc<dyn Registry>,
    pub store: Arc<dyn Store>,
    /// `None`: there is no data directory.
    pub batches: Option<Arc<Batches>>,
    /// Grammars for the same models in the same order.
    pub grammars: Grammars,
    pub tenants: Arc<Tenants>,
    /// `None`: no tools run here.
    pub server_tools: Option<Arc<ServerTools>>,
    /// `None`: prompts and answers are not checked.
    pub safety: Option<Safety>,
    /// `None`: personal data is left as it is.
    pub pii: Option<Pii>,
    /// The strategy for stored conversations that are too long, unless a chat names one.
    pub context: Strategy,
    pub summaries: summarizer::Settings,
    /// Bounds of what is remembered of users. `None`: nothing is.
    pub memories: Option<memories::Limits>,
    /// `None`: blocks are not recorded.
    pub audit: Option<Arc<Audit>>,
    /// `None`: no feedback is taken.
    pub feedback: Option<Arc<Feedback>>,
    /// `None`: no traces are recorded.
    pub traces: Option<Arc<Traces>>,
    /// Bounds of answers that are kept for repeated requests.
    pub replay: replay::Limits,
    /// Bounds of answers that are kept for equal requests. `None`: none are.
    pub response_cache: Option<response_cache::Limits>,
    /// Bounds of answers that are kept for similar questions. `None`: none are.
    pub semantic_cache: Option<SemanticSettings>,
    /// The longest time of any request.
    pub request_timeout: Duration,
    pub body_bytes_max: usize,
    /// The most bytes of request bodies that are on their way or being worked on.
    pub bodies_bytes_max: u64,
    /// The most requests that are read or answered at a time, streams not counted. A tenant may have half of them.
    pub requests_max: usize,
    /// Whether a `max_tokens` that does not fit after the prompt is refused. Otherwise it becomes what fits.
    pub max_tokens_must_fit: bool,
    /// Names that the ports are reached by, besides addresses and `localhost`, while no key protects them.
    pub hosts: Vec<String>,
    /// The origins whose pages may use the front door.
    pub cors: Origins,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SemanticSettings {
    pub limits: semantic::Limits,
    /// The model that measures how similar questions are. `None`: their words are compared.
    pub model: Option<String>,
}
