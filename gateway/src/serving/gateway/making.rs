//! The construction of a gateway.

use super::{
    Gateway, Generating, ServedModel, Shared, VIEWERS_MAX, intake::ANSWER_BYTES_MAX, probed::LastProbe, settings::GatewaySettings,
};
use crate::{
    base::{
        shares::{Pool, Shares},
        stamp::unix_seconds,
    },
    features::summarizer::Summarizer,
    metrics::{self, Objectives},
    requests::{body::Bodies, computing::Computing},
    rollout::running::Rollouts,
    routing::meaning::Meaning,
    serving::{
        backend::{Cache, Similar},
        encoder::Encoder,
        examples::RouteExamples,
        recall::Recall,
        replays::Replays,
    },
    store::access::SharedStore,
};
use parking_lot::RwLock;
use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
};
use tokio::sync::Semaphore;

/// The maximum size of stored items that are loaded for, or being sent to, all clients together.
const ANSWERS_BYTES_MAX: u64 = 256 << 20;
/// The maximum number of concurrent uploads.
const UPLOADS_MAX: u64 = 16;

impl Gateway {
    /// Creates a gateway of `models`: at least one, with distinct names. The handle is bound to the first. `aliases` are given with their
    /// models.
    pub fn new(models: Vec<ServedModel>, aliases: BTreeMap<String, String>, generating: Generating, settings: GatewaySettings) -> Self {
        let answers = Pool::new(Shares::new(ANSWERS_BYTES_MAX, ANSWER_BYTES_MAX));
        let shared = Shared {
            models: models.into_iter().map(Arc::new).collect(),
            aliases: RwLock::new(Arc::new(aliases)),
            rollouts: Rollouts::default(),
            summarizer: Summarizer::new(settings.requests.summaries.clone()),
            running: Arc::default(),
            replays: Arc::new(Replays::new(settings.requests.replay)),
            response_cache: settings.requests.response_cache.map(|limits| Arc::new(Cache::new(limits))),
            similar: settings.requests.semantic_cache.as_ref().map(|settings| Arc::new(Similar::new(settings.limits))),
            encoder: settings
                .requests
                .semantic_cache
                .as_ref()
                .map(|settings| Arc::new(Encoder::new(settings.encoder.clone(), metrics::observe_question_read))),
            examples: settings.requests.examples.clone().map(|settings| Arc::new(RouteExamples::new(settings))),
            recall: settings.requests.recall.clone().map(|settings| Arc::new(Recall::new(settings))),
            created: unix_seconds(),
            objectives: Arc::new(Objectives::new(settings.classes.clone())),
            recent: Arc::default(),
            viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
            bodies: Bodies::new(settings.requests.body_bytes_max, settings.requests.bodies_bytes_max, settings.requests.body_timeout),
            requests: Pool::new(Shares::new(settings.requests_max as u64, (settings.requests_max as u64).div_ceil(2))),
            store: SharedStore::new(Arc::clone(&settings.store), answers.clone(), ANSWER_BYTES_MAX),
            answers,
            uploads: Pool::new(Shares::quarters(UPLOADS_MAX, 0)),
            computing: Computing::start(),
            leaving: AtomicBool::new(false),
            erasing: tokio::sync::Mutex::default(),
            draining: AtomicBool::new(false),
            probed: LastProbe::default(),
            backup: Arc::new(Semaphore::new(1)),
            generating,
            settings,
        };
        Self {
            model: Arc::clone(shared.models.first().expect("a gateway serves a model")),
            shared: Arc::new(shared),
            caller: None,
            routed: None,
            meaning: Meaning::None,
        }
    }
}
