//! The making of a gateway, and its settings.

use super::{Gateway, Generating, ServedModel, Shared, VIEWERS_MAX, intake::ANSWER_BYTES_MAX};
use crate::{
    base::{
        memories,
        origins::Origins,
        registry::Registry,
        shares::{Pool, Shares},
        stamp::unix_seconds,
    },
    batches::Batches,
    cache::{replay, response_cache, semantic},
    context::Strategy,
    features::{
        feedback::Feedback,
        grammars::Grammars,
        server_tools::ServerTools,
        summarizer::{self, Summarizer},
    },
    metrics::Objectives,
    requests::{body::Bodies, computing::Computing},
    rollout::running::Rollouts,
    routing::Router,
    safety::{Safety, audit::Audit, pii::Pii},
    serving::{
        backend::{Cache, Similar},
        replays::Replays,
    },
    store::Store,
    tenants::Tenants,
};
use parking_lot::RwLock;
use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};
use tidemill_cluster::class::Classes;
use tokio::sync::Semaphore;

/// The most bytes of stored items that are sent at a time, to all clients together.
const ANSWERS_BYTES_MAX: u64 = 256 << 20;
/// The most files that are uploaded at a time.
const UPLOADS_MAX: u64 = 16;

#[derive(Debug)]
pub struct GatewaySettings {
    pub generating: Generating,
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

impl Gateway {
    /// Makes a gateway of `models`, at least one, with distinct names. The handle is bound to the first. `aliases`: each with the model that
    /// it stands for.
    pub fn new(models: Vec<ServedModel>, aliases: BTreeMap<String, String>, settings: GatewaySettings) -> Self {
        let shared = Shared {
            models: models.into_iter().map(Arc::new).collect(),
            aliases: RwLock::new(Arc::new(aliases)),
            rollouts: Rollouts::default(),
            summarizer: Summarizer::new(settings.summaries.clone()),
            running: Arc::default(),
            replays: Arc::new(Replays::new(settings.replay)),
            response_cache: settings.response_cache.map(|limits| Arc::new(Cache::new(limits))),
            similar: settings.semantic_cache.as_ref().map(|settings| Arc::new(Similar::new(settings.limits))),
            created: unix_seconds(),
            objectives: Arc::new(Objectives::new(settings.classes.clone())),
            recent: Arc::default(),
            viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
            bodies: Bodies::new(settings.body_bytes_max, settings.bodies_bytes_max),
            requests: Pool::new(Shares::new(settings.requests_max as u64, (settings.requests_max as u64).div_ceil(2))),
            answers: Pool::new(Shares::new(ANSWERS_BYTES_MAX, ANSWER_BYTES_MAX)),
            uploads: Pool::new(Shares::quarters(UPLOADS_MAX, 0)),
            computing: Computing::start(),
            leaving: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            settings,
        };
        Self {
            model: Arc::clone(shared.models.first().expect("a gateway serves a model")),
            shared: Arc::new(shared),
            caller: None,
            routed: None,
        }
    }
}
