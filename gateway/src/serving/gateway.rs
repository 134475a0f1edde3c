//! A handle to all parts of the gateway: its models and their shared state. Every handler gets one, bound to a model and a caller.
//!
//! - [`settings`] and `making`: its construction; `jobs`: background tasks
//! - one request's path: `intake`: its body and its sender's shares; [`route`]: the model that answers; `prompt`: its prompt; [`start`]:
//!   the start of its answer, with `doubts`: a model's verdict on uncertain findings; `questions`: whether the answer to a similar question
//!   is acceptable; [`encoding`]: texts on their way through an encoder; `weighed`: a request's meaning, for its
//!   route
//! - `probing`: a token through every model, and [`probed`] its result; `resetting`: the end of what is cached for one
//! - [`erasing`]: erasure of a tenant's or a user's data; `retention`: deletion of what is too old
//! - `shadows`: answers of a rollout's new model; `summaries`: summaries of long conversations

mod doubts;
pub mod encoding;
pub mod erasing;
mod intake;
mod jobs;
mod making;
pub mod probed;
mod probing;
pub mod prompt;
mod questions;
mod resetting;
mod retention;
pub mod route;
pub mod settings;
mod shadows;
pub mod start;
mod summaries;
mod weighed;

use crate::{
    base::{memories, origins::Origins, registry::Registry, shares::Pool},
    batch::life::Sender,
    batches::Batches,
    context::Strategy,
    features::{feedback::Feedback, server_tools::ServerTools, summarizer::Summarizer},
    metrics::{Objectives, recent::Recent},
    operators::Operators,
    requests::{body::Bodies, computing::Computing, error::ApiError},
    rollout::{routed::Routed, running::Rollouts},
    routing::meaning::Meaning,
    safety::{Safety, audit::Audit, pii::Pii},
    serving::{
        backend::{Backend, Cache, Similar},
        encoder::Encoder,
        examples::RouteExamples,
        recall::Recall,
        regions::Regions,
        replays::Replays,
        running::RunningResponses,
    },
    store::{
        Owner,
        access::{Access, SharedStore},
    },
    tenants::{Caller, Tenants},
    text::TextModel,
    traces::Traces,
};
use axum::Router as Routes;
use parking_lot::RwLock;
use probed::LastProbe;
use settings::GatewaySettings;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tidemill_cluster::{ClusterView, Rejection, class::Classes};
use tidemill_proto::message::ModelKind;
use tidemill_tenancy::tier::Tier;
use tokio::sync::Semaphore;

/// The maximum number of concurrent viewers of the cluster, each with a stream of its own.
pub const VIEWERS_MAX: usize = 16;

/// The generating endpoints' routes, each with its quota taken: they serve clients, batches and shadows.
pub type Generating = fn(&Arc<Gateway>) -> Routes<Arc<Gateway>>;

/// A model that clients can request.
#[derive(Debug)]
pub struct ServedModel {
    /// The name in the API.
    pub name: String,
    pub text: TextModel,
    pub backend: Arc<dyn Backend>,
}

impl ServedModel {
    /// The longest sequence that can run now, or else that the model allows.
    fn context_tokens_max(&self) -> u32 {
        self.backend.context_tokens().unwrap_or(self.text.config.context_tokens)
    }
}

/// A handle to the gateway, bound to one model and one caller: [`select`](Self::select) binds it to a different model.
#[derive(Clone, Debug)]
pub struct Gateway {
    model: Arc<ServedModel>,
    shared: Arc<Shared>,
    /// The sender of the request; `None` for an operator, or the gateway itself.
    caller: Option<Arc<Caller>>,
    /// The route, for a request whose model was chosen by one.
    routed: Option<Arc<Routed>>,
    /// The side on which `auto`'s examples see the request, before a route is chosen.
    meaning: Meaning,
}

/// The state that all models share.
#[derive(Debug)]
struct Shared {
    generating: Generating,
    settings: GatewaySettings,
    /// The models: at least one, with distinct names.
    models: Vec<Arc<ServedModel>>,
    /// Aliases, each with its model.
    aliases: RwLock<Arc<BTreeMap<String, String>>>,
    rollouts: Rollouts,
    summarizer: Summarizer,
    running: Arc<RunningResponses>,
    replays: Arc<Replays>,
    response_cache: Option<Arc<Cache>>,
    similar: Option<Arc<Similar>>,
    /// The model that reads questions for the cache of similar ones.
    encoder: Option<Arc<Encoder>>,
    /// The vectors of old messages and facts, if these are ranked by their meaning, too.
    recall: Option<Arc<Recall>>,
    /// The examples with which `auto` compares requests, if there are any.
    examples: Option<Arc<RouteExamples>>,
    created: u64,
    objectives: Arc<Objectives>,
    recent: Arc<Recent>,
    /// Permits to watch the cluster.
    viewers: Arc<Semaphore>,
    bodies: Bodies,
    /// Shares of the requests that are being read or answered.
    requests: Pool,
    store: SharedStore,
    /// Shares of the bytes of stored items that are kept for a while: loaded, or being sent.
    answers: Pool,
    /// Shares of the files that are being uploaded.
    uploads: Pool,
    computing: Computing,
    /// Whether this process announces that it will end soon, although it still accepts requests.
    leaving: AtomicBool,
    /// Held while something is erased, so that each counts what it removed.
    erasing: tokio::sync::Mutex<()>,
    draining: AtomicBool,
    /// The last run of a probe through every model.
    probed: LastProbe,
    /// The permit to write a backup.
    backup: Arc<Semaphore>,
}

impl Gateway {
    /// Binds the handle to the model that a client names. With a single model, no name is needed.
    pub fn select(&self, name: Option<&str>) -> Result<Arc<Self>, ApiError> {
        let models = &self.shared.models;
        let aliases = self.aliases();
        let name = name.map(|name| aliases.get(name).map_or(name, String::as_str));
        let names = || models.iter().map(|model| format!("`{}`", model.name)).collect::<Vec<_>>().join(", ");
        let model = match (name, &models[..]) {
            (None, [only]) => only,
            (None, _) => return Err(ApiError::invalid("model", format!("`model` is missing: this cluster serves {}", names()))),
            (Some(name), _) => models.iter().find(|model| model.name == name).ok_or_else(|| ApiError::model_not_found(name, &names()))?,
        };
        Ok(Arc::new(Self { model: Arc::clone(model), ..self.clone() }))
    }

    /// Binds the handle to the sender of a request.
    pub fn for_caller(&self, caller: Arc<Caller>) -> Arc<Self> {
        Arc::new(Self { caller: Some(caller), ..self.clone() })
    }

    /// Binds the handle to a request that the caller did not make itself: a further round of an answer.
    pub fn for_round(&self, round: u32) -> Arc<Self> {
        let caller = self.caller.as_deref().map(|caller| Arc::new(caller.in_round(round)));
        Arc::new(Self { caller, ..self.clone() })
    }

    /// The tools that run on the server, if any.
    pub fn server_tools(&self) -> Option<&Arc<ServerTools>> {
        self.shared.settings.server_tools.as_ref()
    }

    pub fn is_shadow(&self) -> bool {
        self.caller.as_ref().is_some_and(|caller| caller.is_shadow())
    }

    /// Handles for each model in turn, in the operator's order.
    pub fn models(&self) -> impl Iterator<Item = Self> {
        self.shared.models.iter().map(|model| Self { model: Arc::clone(model), ..self.clone() })
    }

    /// Reports this process as not ready from now on, while it still accepts requests: load balancers send some until they notice.
    pub fn announce_end(&self) {
        self.shared.leaving.store(true, Ordering::Relaxed);
    }

    /// Stops accepting new requests.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }

    /// Whether a request would succeed for at least one model: a model without workers reports that itself.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.check_draining()?;
        if self.shared.leaving.load(Ordering::Relaxed) {
            return Err(ApiError::draining());
        }
        self.tenants().check_known()?;
        if self.models().any(|model| model.context_tokens().is_ok()) { Ok(()) } else { Err(Rejection::NoWorker.into()) }
    }

    pub fn text(&self) -> &TextModel {
        &self.model.text
    }

    /// Whether the model writes answers.
    pub fn writes(&self) -> bool {
        self.text().config.identity.kind == ModelKind::Decoder
    }

    pub fn classes(&self) -> &Classes {
        self.shared.objectives.classes()
    }

    pub fn model_name(&self) -> &str {
        &self.model.name
    }

    /// The time at which this process started to serve its models, in Unix seconds.
    pub fn created(&self) -> u64 {
        self.shared.created
    }

    /// Aliases of models, each with its model.
    pub fn aliases(&self) -> Arc<BTreeMap<String, String>> {
        Arc::clone(&self.shared.aliases.read())
    }

    /// Replaces all aliases.
    pub fn set_aliases(&self, aliases: BTreeMap<String, String>) {
        *self.shared.aliases.write() = Arc::new(aliases);
    }

    pub fn rollouts(&self) -> &Rollouts {
        &self.shared.rollouts
    }

    pub fn registry(&self) -> &dyn Registry {
        &*self.shared.settings.registry
    }

    /// The store of responses and conversations, in turns with others.
    pub fn store(&self) -> Access<'_> {
        self.shared.store.access(self.party())
    }

    /// The directory in which all stores are that are files of this coordinator's own.
    pub fn data(&self) -> Option<&Path> {
        self.shared.settings.data.as_deref()
    }

    /// The store of clients' files and batches, if they are kept.
    pub fn batches(&self) -> Result<&Arc<Batches>, ApiError> {
        self.shared.settings.batches.as_ref().ok_or_else(ApiError::no_data_directory)
    }

    /// The strategy for stored conversations that are too long, unless a chat specifies one.
    pub fn context(&self) -> Strategy {
        self.shared.settings.requests.context
    }

    /// Limits on the facts remembered of users; `None` if none are remembered.
    pub fn memories(&self) -> Option<memories::Limits> {
        self.shared.settings.requests.memories
    }

    /// The safety checks, unless they are switched off.
    pub fn safety(&self) -> Option<&Safety> {
        self.shared.settings.safety.as_ref()
    }

    /// The recorder of traces, if there is one.
    pub fn traces(&self) -> Option<&Arc<Traces>> {
        self.shared.settings.traces.as_ref()
    }

    pub fn audit(&self) -> Option<&Audit> {
        self.shared.settings.audit.as_deref()
    }

    /// This region and the ways to others, if there are any.
    pub fn regions(&self) -> Option<&Arc<Regions>> {
        self.shared.settings.regions.as_ref()
    }

    /// The sign-in of operators, if they have to.
    pub fn operators(&self) -> Option<&Arc<Operators>> {
        self.shared.settings.operators.as_ref()
    }

    pub fn feedback(&self) -> Option<&Arc<Feedback>> {
        self.shared.settings.feedback.as_ref()
    }

    pub fn pii(&self) -> Option<&Pii> {
        self.shared.settings.requests.pii.as_ref()
    }

    /// Responses that are being streamed.
    pub fn running(&self) -> &Arc<RunningResponses> {
        &self.shared.running
    }

    /// Recordings of answers, for repeated requests.
    pub fn replays(&self) -> &Arc<Replays> {
        &self.shared.replays
    }

    /// The owner of all data that a request stores, and the only owner whose data it may see.
    pub fn owner(&self) -> Owner {
        self.caller.as_ref().map_or_else(Owner::default, |caller| caller.owner())
    }

    /// Identifies the caller for later requests in its name.
    pub fn sender(&self) -> Sender {
        self.caller.as_ref().map_or_else(Sender::default, |caller| caller.sender())
    }

    pub fn request_timeout(&self) -> Duration {
        self.shared.settings.requests.request_timeout
    }

    /// The caller's tenant.
    pub fn tenant(&self) -> Option<&str> {
        self.caller.as_ref()?.tenant()
    }

    /// The tier of the caller's tenant; `None` if no key is needed.
    pub fn tier(&self) -> Option<&Tier> {
        self.caller.as_ref()?.tier().map(|tier| &**tier)
    }

    /// Whether the caller's ratings count in rollouts. Keys of the tier that is shed first cost nothing: their holders could have as many
    /// votes as they like.
    pub fn counts_in_rollouts(&self) -> bool {
        self.tier().is_none_or(|tier| !tier.is_shed_first())
    }

    pub fn tenants(&self) -> &Arc<Tenants> {
        &self.shared.settings.tenants
    }

    /// The state of the cluster, with all models.
    pub fn view(&self) -> ClusterView {
        self.model.backend.view()
    }

    /// The last choices that ended.
    pub fn recent(&self) -> &Recent {
        &self.shared.recent
    }

    /// The share of choices that met the objectives; `None` before the first one has ended.
    pub fn goodput(&self) -> Option<f64> {
        self.shared.objectives.share_met()
    }

    /// The names under which the ports are reached, besides addresses and `localhost`.
    pub fn hosts(&self) -> &[String] {
        &self.shared.settings.requests.hosts
    }

    /// The origins whose pages may use the gateway.
    pub fn cors(&self) -> &Origins {
        &self.shared.settings.requests.cors
    }

    pub fn check_draining(&self) -> Result<(), ApiError> {
        if self.shared.draining.load(Ordering::Relaxed) { Err(ApiError::draining()) } else { Ok(()) }
    }
}
