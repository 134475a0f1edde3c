//! The state that all handlers share, and the way of a request into the cluster. `route`: which model that is;
//! `doubts`: a model's opinion of what it asks; `questions`: whether a similar question's answer will do; `shadows`: what a rollout's new
//! model would answer; `summaries`: how long conversations are summarized.

mod doubts;
mod questions;
pub mod route;
mod shadows;
mod summaries;

use crate::{
    base::{
        json, memories,
        origins::Origins,
        registry::Registry,
        shares::{Party, Pool, Share, Shares},
        stamp::unix_seconds,
    },
    batch::life::Sender,
    batches::Batches,
    cache::{replay, response_cache, semantic},
    context::Strategy,
    dialog::{
        Dialog, ToolChoice,
        prompt::{DialogError, DialogPrompt},
    },
    features::{
        feedback::{self, Answered, Feedback},
        grammars::{Grammars, Hearing},
        server_tools::ServerTools,
        summarizer::{self, Summarizer},
    },
    generation::personal::Personal,
    metrics::{Objectives, recent::Recent},
    requests::{
        body::{Bodies, Whole},
        computing::{self, Computing},
        error::ApiError,
        generate::GenerateRequest,
        options::{Constrained, FORM_OF_CALLS, Options},
        parse,
        structured::{Asked, unjudged},
    },
    rollout::{routed::Routed, running::Rollouts},
    routing::Router,
    safety::{self, Blocks, Safety, audit::Audit, pii::Pii},
    serving::{
        answer::{Answer, Books, Reader},
        backend::{Backend, Cache, Caches, Similar, Submission},
        replays::Replays,
        running::RunningResponses,
    },
    store::{Owner, Store},
    tenants::{
        Caller, Tenants,
        metered::{Metered, Wanted},
    },
    text::{
        TextModel,
        output::OutputRules,
        sewn::Sewn,
        tools::grammar::{AnswerRules, Forced, Refused},
    },
};
use axum::{Router as Routes, body::Body};
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};
use tidemill_cluster::{
    ClusterView, NewRequest, Rejection,
    class::{ClassId, Classes},
};
use tidemill_grammar::{GrammarError, helper::handle::AskError, lark, schema::Terms};
use tidemill_proto::{
    block::Token,
    grammar::Grammar,
    message::{Embeds, ModelKind, Role},
    sampling::{Sampling, StopRule},
    tokens::Tokens,
};
use tidemill_safety::{
    category::{Category, Threshold},
    judge::Doubt,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Between looks for stored responses that are too old.
const EXPIRE_EVERY: Duration = Duration::from_secs(600);

/// The most bytes of stored items that are sent at a time, to all clients together.
const ANSWERS_BYTES_MAX: u64 = 256 << 20;
/// The most bytes of stored items that are sent to one client at a time.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// The most files that are uploaded at a time.
const UPLOADS_MAX: u64 = 16;

/// The most viewers that watch the cluster at a time, each with a stream of its own.
pub const VIEWERS_MAX: usize = 16;

/// Between looks at what tenants do to this cluster,
const TENDED_EVERY: Duration = Duration::from_millis(500);
/// each so many of them also at what others have changed.
const REFRESHED_EACH: u64 = 2;

/// The generating endpoints' routes, each with its quota taken: what clients, batches and shadows are answered through.
pub type Generating = fn(&Arc<Gateway>) -> Routes<Arc<Gateway>>;

#[derive(Debug)]
pub struct GatewaySettings {
    pub generating: Generating,
    pub classes: Classes,
    /// Other names, each with the model that it stands for.
    pub aliases: BTreeMap<String, String>,
    /// Rules for which model answers. `None`: the one that is asked for.
    pub router: Option<Router>,
    pub registry: Arc<dyn Registry>,
    pub store: Arc<dyn Store>,
    /// `None`: there is no data directory.
    pub batches: Option<Arc<Batches>>,
    /// Of the same models in the same order.
    pub grammars: Grammars,
    pub tenants: Arc<Tenants>,
    /// `None`: no tools run here.
    pub server_tools: Option<Arc<ServerTools>>,
    /// `None`: everything may be asked and answered.
    pub safety: Option<Safety>,
    /// `None`: nothing is done about what identifies people.
    pub pii: Option<Pii>,
    /// What is done about stored conversations that are too long, where a chat does not say.
    pub context: Strategy,
    pub summaries: summarizer::Settings,
    /// Of what is remembered of users. `None`: nothing is.
    pub memories: Option<memories::Limits>,
    /// `None`: blocks are not recorded.
    pub audit: Option<Arc<Audit>>,
    /// `None`: none is taken.
    pub feedback: Option<Arc<Feedback>>,
    /// Of answers that are kept for repeated requests.
    pub replay: replay::Limits,
    /// Of answers that are kept for whoever asks the same. `None`: none are.
    pub response_cache: Option<response_cache::Limits>,
    /// Of answers that are kept for whoever asks nearly the same. `None`: none are.
    pub semantic_cache: Option<SemanticSettings>,
    /// No request lives longer.
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
    /// The model that says how alike questions are. `None`: their words do.
    pub model: Option<String>,
}

/// A model that clients can ask for.
#[derive(Debug)]
pub struct ServedModel {
    /// In the API.
    pub name: String,
    pub text: TextModel,
    pub backend: Arc<dyn Backend>,
}

/// The front door, turned to one of the models, and to one request's sender: [`select`](Self::select) turns it to another model.
#[derive(Clone, Debug)]
pub struct Gateway {
    model: Arc<ServedModel>,
    shared: Arc<Shared>,
    /// `None`: nobody asks, or an operator.
    caller: Option<Arc<Caller>>,
    /// Of a request that there was something to choose for.
    routed: Option<Arc<Routed>>,
}

/// What all models have in common.
#[derive(Debug)]
struct Shared {
    generating: Generating,
    /// At least one, each with another name.
    models: Vec<Arc<ServedModel>>,
    /// Other names, each with the model that it stands for.
    aliases: RwLock<Arc<BTreeMap<String, String>>>,
    router: Option<Router>,
    rollouts: Rollouts,
    registry: Arc<dyn Registry>,
    store: Arc<dyn Store>,
    batches: Option<Arc<Batches>>,
    grammars: Grammars,
    tenants: Arc<Tenants>,
    safety: Option<Safety>,
    server_tools: Option<Arc<ServerTools>>,
    pii: Option<Pii>,
    context: Strategy,
    summarizer: Summarizer,
    memories: Option<memories::Limits>,
    audit: Option<Arc<Audit>>,
    feedback: Option<Arc<Feedback>>,
    running: Arc<RunningResponses>,
    replays: Arc<Replays>,
    response_cache: Option<Arc<Cache>>,
    similar: Option<Arc<Similar>>,
    /// The model that says how alike questions are.
    likeness_model: Option<String>,
    created: u64,
    objectives: Arc<Objectives>,
    recent: Arc<Recent>,
    /// Permits to watch the cluster.
    viewers: Arc<Semaphore>,
    request_timeout: Duration,
    bodies: Bodies,
    /// Shares of the requests that are read or answered.
    requests: Pool,
    /// Shares of the bytes of stored items that are being sent.
    answers: Pool,
    /// Shares of the files that are being uploaded.
    uploads: Pool,
    max_tokens_must_fit: bool,
    hosts: Vec<String>,
    cors: Origins,
    computing: Computing,
    /// Whether this process says that it will end soon, although it still takes requests.
    leaving: AtomicBool,
    draining: AtomicBool,
}

/// What an answer is started with, besides its prompts and the client's options.
#[derive(Debug)]
pub struct Start<'a> {
    /// The field with the prompts, for errors.
    pub param: &'static str,
    /// The response's id; empty for an answer that no client knows by one.
    pub id: &'a str,
    /// Makes an answer's length from the tokens that it may have, where the client gives none.
    pub max_tokens_default: fn(u32) -> u32,
    /// The number of likeliest tokens to report for each of the prompt's.
    pub prompt_logprobs: Option<u32>,
    /// The question, if the answer is kept for feedback.
    pub question: Option<Vec<Value>>,
}

impl Start<'_> {
    /// An answer as long as may be, which no client knows by an id.
    pub fn of(param: &'static str) -> Self {
        Self { param, id: "", max_tokens_default: std::convert::identity, prompt_logprobs: None, question: None }
    }
}

impl Gateway {
    /// `models`: at least one, each with another name. Turned to the first.
    pub fn new(models: Vec<ServedModel>, settings: GatewaySettings) -> Self {
        let models: Vec<_> = models.into_iter().map(Arc::new).collect();
        let shared = Shared {
            generating: settings.generating,
            models,
            aliases: RwLock::new(Arc::new(settings.aliases)),
            router: settings.router,
            rollouts: Rollouts::default(),
            registry: settings.registry,
            store: settings.store,
            batches: settings.batches,
            grammars: settings.grammars,
            tenants: settings.tenants,
            safety: settings.safety,
            server_tools: settings.server_tools,
            pii: settings.pii,
            context: settings.context,
            summarizer: Summarizer::new(settings.summaries),
            memories: settings.memories,
            audit: settings.audit,
            feedback: settings.feedback,
            running: Arc::default(),
            replays: Arc::new(Replays::new(settings.replay)),
            response_cache: settings.response_cache.map(|limits| Arc::new(Cache::new(limits))),
            similar: settings.semantic_cache.as_ref().map(|settings| Arc::new(Similar::new(settings.limits))),
            likeness_model: settings.semantic_cache.and_then(|settings| settings.model),
            created: unix_seconds(),
            objectives: Arc::new(Objectives::new(settings.classes)),
            recent: Arc::default(),
            viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
            request_timeout: settings.request_timeout,
            bodies: Bodies::new(settings.body_bytes_max, settings.bodies_bytes_max),
            requests: Pool::new(Shares::new(settings.requests_max as u64, (settings.requests_max as u64).div_ceil(2))),
            answers: Pool::new(Shares::new(ANSWERS_BYTES_MAX, ANSWER_BYTES_MAX)),
            uploads: Pool::new(Shares::quarters(UPLOADS_MAX, 0)),
            max_tokens_must_fit: settings.max_tokens_must_fit,
            hosts: settings.hosts,
            cors: settings.cors,
            computing: Computing::start(),
            leaving: AtomicBool::new(false),
            draining: AtomicBool::new(false),
        };
        Self {
            model: Arc::clone(shared.models.first().expect("a gateway serves a model")),
            shared: Arc::new(shared),
            caller: None,
            routed: None,
        }
    }

    /// Turned to the model that a client names. Where there is one model, it need not.
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

    /// Turned to whoever sent a request.
    pub fn for_caller(&self, caller: Arc<Caller>) -> Arc<Self> {
        Arc::new(Self { caller: Some(caller), ..self.clone() })
    }

    /// Turned to the same caller, in a request that it did not make itself: one more round of an answer.
    pub fn for_round(&self, round: u32) -> Arc<Self> {
        let caller = self.caller.as_deref().map(|caller| Arc::new(caller.in_round(round)));
        Arc::new(Self { caller, ..self.clone() })
    }

    /// `None`: none run here.
    pub fn server_tools(&self) -> Option<&Arc<ServerTools>> {
        self.shared.server_tools.as_ref()
    }

    /// Keeps connections to servers of tools, until [`ServerTools::end`].
    pub async fn tend_server_tools(&self) {
        match self.server_tools() {
            Some(tools) => tools.tend().await,
            None => std::future::pending().await,
        }
    }

    pub fn is_shadow(&self) -> bool {
        self.caller.as_ref().is_some_and(|caller| caller.is_shadow())
    }

    /// Turned to each model in turn, in the operator's order.
    pub fn models(&self) -> impl Iterator<Item = Self> {
        self.shared.models.iter().map(|model| Self { model: Arc::clone(model), ..self.clone() })
    }

    /// Says from now on that it is not ready, and still takes requests: balancers send some until they have noticed.
    pub fn announce_end(&self) {
        self.shared.leaving.store(true, Ordering::Relaxed);
    }

    /// From now on nothing new is taken.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }

    /// Ready when a request would succeed, of one model at least: those of a model without workers say so themselves.
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

    pub fn classes(&self) -> &Classes {
        self.shared.objectives.classes()
    }

    pub fn model_name(&self) -> &str {
        &self.model.name
    }

    /// When this process began to serve its models, in Unix seconds.
    pub fn created(&self) -> u64 {
        self.shared.created
    }

    /// Other names of models, each with the model that it stands for.
    pub fn aliases(&self) -> Arc<BTreeMap<String, String>> {
        Arc::clone(&self.shared.aliases.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on these are all.
    pub fn set_aliases(&self, aliases: BTreeMap<String, String>) {
        *self.shared.aliases.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(aliases);
    }

    pub fn rollouts(&self) -> &Rollouts {
        &self.shared.rollouts
    }

    /// Looks after rollouts, for ever.
    pub async fn tend_rollouts(&self) {
        self.shared.rollouts.tend(self.registry()).await;
    }

    pub fn registry(&self) -> &dyn Registry {
        &*self.shared.registry
    }

    /// Where responses and conversations are.
    pub fn store(&self) -> &dyn Store {
        &*self.shared.store
    }

    /// Where clients' files and batches are, if they are kept.
    pub fn batches(&self) -> Result<&Arc<Batches>, ApiError> {
        self.shared.batches.as_ref().ok_or_else(ApiError::no_data_directory)
    }

    /// Runs clients' batches, for ever.
    pub async fn run_batches(self: Arc<Self>) {
        match &self.shared.batches {
            Some(batches) => Arc::clone(batches).run(self.generating(), Arc::clone(self.tenants()), self.request_timeout()).await,
            None => std::future::pending().await,
        }
    }

    /// The routes of the generating endpoints, as a service.
    fn generating(self: &Arc<Self>) -> TowerToHyperService<Routes> {
        TowerToHyperService::new((self.shared.generating)(self).with_state(Arc::clone(self)))
    }

    /// Batches run no more, and what ran of them has nothing to do with this process's end.
    pub fn stop_batches(&self) {
        if let Some(batches) = &self.shared.batches {
            batches.stop();
        }
    }

    /// What is done about stored conversations that are too long, where a chat does not say.
    pub fn context(&self) -> Strategy {
        self.shared.context
    }

    /// `None`: nothing is remembered of users.
    pub fn memories(&self) -> Option<memories::Limits> {
        self.shared.memories
    }

    /// `None`: it is switched off.
    pub fn safety(&self) -> Option<&Safety> {
        self.shared.safety.as_ref()
    }

    pub fn audit(&self) -> Option<&Audit> {
        self.shared.audit.as_deref()
    }

    pub fn feedback(&self) -> Option<&Arc<Feedback>> {
        self.shared.feedback.as_ref()
    }

    /// What is asked in a body, if anybody may have an opinion of its answer.
    pub fn asked(&self, body: &Map<String, Value>) -> Option<Vec<Value>> {
        self.feedback().map(|_| feedback::asked(body))
    }

    /// Remembers an answer, for what its user may think of it.
    fn remember(&self, answer: &mut Answer, id: &str, asked: Option<Vec<Value>>) {
        if let (Some(feedback), Some(question)) = (self.feedback(), asked) {
            let (owner, model) = (self.owner(), self.model.name.clone());
            feedback.remember(id, Answered { owner, model, question, answer: String::new() });
            answer.remember(Arc::clone(feedback), id);
        }
    }

    /// Lets old records of the audit log go, for ever.
    pub async fn expire_audit(&self) {
        match self.audit() {
            Some(audit) => audit.expire().await,
            None => std::future::pending().await,
        }
    }

    pub fn pii(&self) -> Option<&Pii> {
        self.shared.pii.as_ref()
    }

    /// Refuses a prompt's text that must not be answered. What it returns has to be [settled](Self::settle_doubts) before that.
    #[must_use = "doubts have to be settled"]
    pub fn check_input<'a>(
        &self,
        param: &str,
        texts: impl IntoIterator<Item = &'a str>,
        stricter: &[(Category, Threshold)],
    ) -> Result<Vec<Doubt>, ApiError> {
        let Some(safety) = self.safety() else { return Ok(Vec::new()) };
        safety.check_input(texts, stricter).map_err(|(finding, text)| {
            let blocked = |audit: &Audit| audit.blocked("input", self.tenant(), &self.model.name, finding, text);
            ApiError::content_filter(param, finding, self.audit().map(blocked))
        })
    }

    /// Whether a text may be put into a prompt that its client did not write it into.
    pub fn accepts(&self, text: &str, options: &Options) -> bool {
        self.safety().is_none_or(|safety| safety.accepts(text, &options.safety))
    }

    /// Responses that are being streamed.
    pub fn running(&self) -> &Arc<RunningResponses> {
        &self.shared.running
    }

    /// Answers that repeated requests find.
    pub fn replays(&self) -> &Arc<Replays> {
        &self.shared.replays
    }

    /// The owner of everything that a request stores, and the only one whose things it may see.
    pub fn owner(&self) -> Owner {
        self.caller.as_ref().map_or_else(Owner::default, |caller| caller.owner())
    }

    /// Who asks, for what is asked in its name later.
    pub fn sender(&self) -> Sender {
        self.caller.as_ref().map_or_else(Sender::default, |caller| caller.sender())
    }

    pub fn request_timeout(&self) -> Duration {
        self.shared.request_timeout
    }

    /// Whoever asks.
    pub fn tenant(&self) -> Option<&str> {
        self.caller.as_ref()?.tenant()
    }

    pub fn tenants(&self) -> &Arc<Tenants> {
        &self.shared.tenants
    }

    /// A request's wishes, as far as its sender may have them.
    pub fn options(&self, arrived: Instant, mut request: GenerateRequest) -> Result<Options, ApiError> {
        let asked = request.service_tier.as_deref();
        // What nobody has is an error, whoever asks.
        if self.classes().by_tier(asked).is_some()
            && let Some(tier) = self.service_tier(asked)
        {
            request.service_tier = Some(tier.to_owned());
        }
        let mut options = Options::check(arrived, request, self.text(), self.classes())?;
        options.salt = self.salt(&options.salt);
        options.max_tokens_shrinks = !self.shared.max_tokens_must_fit;
        Ok(options)
    }

    /// The service tier of a request that asks for `asked`. `None`: what it asks for.
    fn service_tier<'a>(&'a self, asked: Option<&'a str>) -> Option<&'a str> {
        let caller = self.caller.as_ref()?;
        match caller.in_background {
            true => Some(&self.classes().background().service_tier),
            false => caller.tier().map(|tier| tier.service_tier(asked)),
        }
    }

    /// Separates cached blocks: a tenant's from all others', and within it those with another `cache_salt`. Nothing that a client sends
    /// can take the tenant's place.
    fn salt(&self, cache_salt: &[u8]) -> Vec<u8> {
        let tenant = self.tenant().map(|tenant| blake3::derive_key("tidemill tenant salt v1", tenant.as_bytes()));
        tenant.iter().flatten().chain(cache_salt).copied().collect()
    }

    /// Takes a request's quota.
    fn reserve(&self, arrived: Instant, class: ClassId, prompts: &[Tokens], answer_tokens: u64) -> Result<Metered, ApiError> {
        let caller = self.caller.as_ref().ok_or_else(|| ApiError::internal("nobody asks for this: please report this as a bug"))?;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let class = &self.classes().get(class).name;
        self.shared.tenants.reserve(caller, Wanted { arrived, model: &self.model.name, class, prompt_tokens, answer_tokens })
    }

    /// Lets time pass for tenants: what others have changed, what was lost, and whether there is too much to do. For ever.
    pub async fn tend_tenants(&self) {
        let mut interval = tokio::time::interval(TENDED_EVERY);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for tick in 0_u64.. {
            interval.tick().await;
            let tenants = self.tenants();
            if tenants.sheds() {
                tenants.observe_load(kv_used(&self.view()));
            }
            if tick % REFRESHED_EACH == 0 {
                let worker = Arc::clone(tenants);
                // A panic there was logged.
                let _ = tokio::task::spawn_blocking(move || worker.refresh()).await;
                tenants.sweep();
            }
        }
    }

    /// Deletes stored responses that are too old, for ever.
    pub async fn expire_stored(&self) {
        loop {
            match self.store().expire(unix_seconds()).await {
                Ok(0) => {}
                Ok(expired) => tracing::info!(expired, "old responses and conversations were deleted"),
                Err(error) => tracing::warn!(%error, "old responses and conversations cannot be deleted"),
            }
            tokio::time::sleep(EXPIRE_EVERY).await;
        }
    }

    /// Everything, of all models.
    pub fn view(&self) -> ClusterView {
        self.model.backend.view()
    }

    /// The last choices that ended.
    pub fn recent(&self) -> &Recent {
        &self.shared.recent
    }

    /// Share of choices that met the objectives; `None` before the first ended.
    pub fn goodput(&self) -> Option<f64> {
        self.shared.objectives.share_met()
    }

    /// `None`: there are as many viewers as there may be.
    pub fn admit_viewer(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.shared.viewers).try_acquire_owned().ok()
    }

    /// Longest sequence that could run now.
    pub fn context_tokens(&self) -> Result<u32, ApiError> {
        self.model.backend.context_tokens().ok_or_else(|| Rejection::NoWorker.into())
    }

    /// Longest sequence that can run now, or that the model allows.
    pub fn context_tokens_max(&self) -> u32 {
        self.model.backend.context_tokens().unwrap_or(self.model.text.config.context_tokens)
    }

    /// The party whose share a request counts to: its tenant, or its address while no key is needed.
    pub fn party(&self) -> Party {
        self.caller.as_ref().map_or(Party::Server, |caller| caller.party())
    }

    pub async fn read(&self, body: Body) -> Result<Whole, ApiError> {
        self.check_draining()?;
        let whole = self.shared.bodies.read(self.party(), body).await?;
        // A shorter body cannot hold that many.
        if whole.len() <= json::VALUES_MAX {
            return Ok(whole);
        }
        let count = move || if json::has_too_many_values(&whole) { Err(ApiError::too_many_values(json::VALUES_MAX)) } else { Ok(whole) };
        self.compute_body(0, count).await
    }

    /// Reads a body as `T`.
    pub async fn read_json<T: DeserializeOwned + Send + 'static>(&self, body: Body) -> Result<T, ApiError> {
        let body = self.read(body).await?;
        self.compute_body(body.len(), move || parse::json(&body)).await
    }

    /// Works on a request beside the event loop, which only moves bytes: however short it is, a schema in it may take a second. `bytes` is
    /// the size of the work's input.
    pub async fn compute_body<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.shared.computing.run(self.party(), bytes, work).await
    }

    /// Works on a small input, or one that was counted before, beside the event loop.
    pub async fn compute<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T, ApiError> + Send + 'static) -> Result<T, ApiError> {
        self.compute_body(0, work).await
    }

    /// Takes a place for a request from its tenant's share, or its address's while no key is needed.
    pub fn admit_request(&self, caller: &Caller) -> Result<Share, ApiError> {
        self.shared.requests.take(caller.party(), 1).map_err(|refused| computing::refusal("requests", refused))
    }

    /// Takes a place for a file that is uploaded.
    pub fn admit_upload(&self) -> Result<Share, ApiError> {
        self.shared.uploads.take(self.party(), 1).map_err(|refused| computing::refusal("uploads", refused))
    }

    /// Takes room for stored items that are sent to a client.
    pub fn admit_answer(&self, bytes: usize) -> Result<Share, ApiError> {
        // One answer that is more than a share is sent all the same, by itself.
        let amount = (bytes as u64).min(ANSWER_BYTES_MAX);
        self.shared.answers.take(self.party(), amount).map_err(|refused| computing::refusal("answers", refused))
    }

    /// Names that the ports are reached by, besides addresses and `localhost`.
    pub fn hosts(&self) -> &[String] {
        &self.shared.hosts
    }

    /// The origins whose pages may use the front door.
    pub fn cors(&self) -> &Origins {
        &self.shared.cors
    }

    /// Refuses a grammar that does not compile, or takes too much, so that it fails before the request is taken. Blocks for milliseconds,
    /// or a second at worst: see [`compute`](Self::compute).
    pub fn check_constraint(&self, options: &mut Options) -> Result<(), ApiError> {
        let Some(Constrained { constraint, param, has_passed }) = &mut options.constraint else { return Ok(()) };
        if constraint.end_tokens.is_empty() {
            let message = format!("`{param}`: this model names no end-of-sequence token, so its answer could not end");
            return Err(ApiError::invalid(*param, message));
        }
        self.hearing().grammar(&constraint.grammar).map_err(|error| unjudged(param, &error))?;
        *has_passed = true;
        Ok(())
    }

    /// For one request's questions about what its answer shall follow. They block.
    pub fn hearing(&self) -> Hearing<'_> {
        let models = &self.shared.models;
        let model = models.iter().position(|model| Arc::ptr_eq(model, &self.model)).expect("a gateway is turned to one of its models");
        let spent = self.caller.as_ref().map(|caller| &*caller.grammars_spent);
        self.shared.grammars.hearing(self.tenant(), model, spent)
    }

    /// Refuses text that cannot fit, without tokenizing it.
    pub fn check_text_length(&self, param: &str, text: &str) -> Result<(), ApiError> {
        let context = self.context_tokens_max();
        if text.len() > self.model.text.tokenizer.text_bytes_max(context as usize) {
            return Err(ApiError::context_length(param, context, u64::from(context) + 1, 0));
        }
        Ok(())
    }

    /// A dialog as a prompt; `options` learn how its answer is read. `param`: the field with its messages, for errors. Takes a
    /// while: see [`compute`](Self::compute).
    pub fn prompt(&self, param: &str, dialog: &Dialog, options: &mut Options) -> Result<Vec<Token>, ApiError> {
        if self.safety().is_some() {
            let shown = dialog.shown_to_the_model();
            options.doubts.extend(self.check_input(param, shown.iter().map(AsRef::as_ref), &options.safety)?);
        }
        let hidden = self.pii().and_then(|pii| pii.hide_dialog(dialog, options));
        let DialogPrompt { prompt, output } = self.render(param, hidden.as_ref().unwrap_or(dialog))?;
        options.rules.output = output;
        options.inquiry = self.question(hidden.as_ref().unwrap_or(dialog), options);
        self.force(dialog, options)?;
        self.encode_rendered(param, &prompt)
    }

    /// The prompt alone, of a dialog that nobody answers.
    pub fn prompt_only(&self, param: &str, dialog: &Dialog) -> Result<Vec<Token>, ApiError> {
        self.encode_rendered(param, &self.render(param, dialog)?.prompt)
    }

    fn render(&self, param: &str, dialog: &Dialog) -> Result<DialogPrompt, ApiError> {
        // Each message takes a token at least, and a template may be tried on all of them several times.
        let (messages, context) = (dialog.messages.len() as u64, self.context_tokens_max());
        if messages > u64::from(context) {
            return Err(ApiError::context_length(param, context, messages, 0));
        }
        dialog.prompt(self.text(), SystemTime::now()).map_err(|error| match error {
            DialogError::NoTools | DialogError::NoSuchTool(_) => ApiError::invalid("tool_choice", error.to_string()),
            DialogError::ToolName(_) | DialogError::TooManyTools(_) | DialogError::ToolTwice(_) | DialogError::Parameters(_) => {
                ApiError::invalid("tools", error.to_string())
            }
            DialogError::NoTemplate | DialogError::Template(_) | DialogError::NoSeam => ApiError::invalid(param, error.to_string()),
        })
    }

    fn encode_rendered(&self, param: &str, prompt: &Sewn) -> Result<Vec<Token>, ApiError> {
        self.check_text_length(param, &prompt.text)?;
        computing::checkpoint()?;
        // The template has written BOS where the model wants it.
        self.text().tokenizer.encode_sewn(prompt).map_err(|e| ApiError::invalid(param, e.to_string()))
    }

    /// A grammar, where calls must come or keep to their schemas, and where what the client asked for comes after a thought.
    fn force(&self, dialog: &Dialog, options: &mut Options) -> Result<(), ApiError> {
        let OutputRules { thought, calls, .. } = &options.rules.output;
        let thought = thought.as_ref().filter(|thought| thought.wanted);
        let answer = options.constraint.as_ref().map(|asked| lark::part(&asked.constraint.grammar));
        let calls = calls.as_ref().and_then(|calls| {
            let forced = match &dialog.tool_choice {
                ToolChoice::Required => Forced::Any,
                ToolChoice::Named(name) => Forced::Named(name),
                _ if answer.is_some() || dialog.tools.iter().any(|tool| tool.strict) => Forced::Nothing,
                _ => return None,
            };
            Some((calls, forced))
        });
        if calls.is_none() && (thought.is_none() || answer.is_none()) {
            return Ok(());
        }
        let rules = AnswerRules { tokenizer: &self.text().tokenizer, thought, calls, answer: answer.as_deref() };
        let mut hearing = self.hearing();
        let mut unavailable = None;
        let prepare = &mut |schema: &Value, strict| {
            if unavailable.is_some() {
                return Err(GrammarError::Invalid("it was not checked".into()));
            }
            hearing.part(schema, Terms { strict, ..Terms::default() }).map_err(|error| match error {
                AskError::Refused(error) => error,
                // Not the schema's fault: no looser one may take its place.
                AskError::Unavailable(error) => {
                    unavailable = Some(ApiError::grammar_unjudged(FORM_OF_CALLS, &error.to_string()));
                    GrammarError::Invalid("it was not checked".into())
                }
            })
        };
        let grammar = rules.lark(prepare);
        if let Some(error) = unavailable {
            return Err(error);
        }
        let grammar = grammar.map_err(|Refused { tool, error }| refused_tool(tool, &error))?;
        // What the client asked for is a part of it, if there is such a thing.
        let param = options.constraint.as_ref().map_or(FORM_OF_CALLS, |asked| asked.param);
        options.constrain(Asked { grammar: Grammar::Lark(grammar.into()), param }, self.text());
        Ok(())
    }

    /// Makes a dialog's prompt and starts the answer.
    pub async fn start_dialog(self: &Arc<Self>, dialog: Dialog, mut options: Options, start: Start<'_>) -> Result<Answer, ApiError> {
        let (worker, param) = (Arc::clone(self), start.param);
        let prepare = move || {
            let prompt = Tokens::from(worker.prompt(param, &dialog, &mut options)?);
            worker.check_constraint(&mut options)?;
            Ok((prompt, options))
        };
        let (prompt, mut options) = self.compute(prepare).await?;
        self.start(&[prompt], &mut options, start).await
    }

    /// Starts the answer to prompts: settles what the safety checks left open, bounds the answer's length, and gives the prompts to the
    /// cluster, unless a cache has the answer. A constraint must have been [checked](Self::check_constraint).
    pub async fn start(&self, prompts: &[Tokens], options: &mut Options, start: Start<'_>) -> Result<Answer, ApiError> {
        let Start { param, id, max_tokens_default, prompt_logprobs, question } = start;
        self.settle(param, options).await?;
        let room = self.room(prompts)?;
        let max_tokens = options.max_tokens.unwrap_or_else(|| max_tokens_default(self.answer_tokens(prompts, options.choices, room)));
        self.complete_question(options, id).await;
        let mut answer = self.submit(param, prompts, options, max_tokens, prompt_logprobs)?;
        self.remember(&mut answer, id, question);
        Ok(answer)
    }

    /// Tokens that fit after the longest prompt.
    fn room(&self, prompts: &[Tokens]) -> Result<u32, ApiError> {
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0) as u32;
        Ok(self.context_tokens()?.saturating_sub(longest).max(1))
    }

    /// Tokens that an answer may have whose length the client leaves open: all that fit, or what its quota makes of them.
    fn answer_tokens(&self, prompts: &[Tokens], choices: u32, room: u32) -> u32 {
        let Some(caller) = &self.caller else { return room };
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let choices = prompts.len() as u64 * u64::from(choices);
        self.shared.tenants.answer_tokens(caller, &self.model.name, room, prompt_tokens, choices)
    }

    /// Gives all prompts to the cluster. With `max_tokens` 0 (scoring only) one hidden token is generated. A `max_tokens` that
    /// [shrinks](Options::max_tokens_shrinks) becomes, for each prompt, what fits after it.
    fn submit(
        &self,
        param: &str,
        prompts: &[Tokens],
        options: &Options,
        max_tokens: u32,
        prompt_logprobs: Option<u32>,
    ) -> Result<Answer, ApiError> {
        if !options.doubts.is_empty() {
            return Err(ApiError::internal("a doubt was not settled: please report this as a bug"));
        }
        if options.constraint.as_ref().is_some_and(|constrained| !constrained.has_passed) {
            return Err(ApiError::internal("a grammar was not checked: please report this as a bug"));
        }
        let hidden = max_tokens == 0;
        let min_tokens = options.rules.min_tokens;
        self.check_prompts(param, prompts, if options.max_tokens_shrinks { 1 } else { max_tokens.max(1) })?;
        let context = self.context_tokens()?;
        let generated = |prompt: &Tokens| match options.max_tokens_shrinks {
            true => max_tokens.min(context.saturating_sub(prompt.len() as u32)).max(1),
            false => max_tokens.max(1),
        };
        if let Some(most) = prompts.iter().map(generated).find(|&most| min_tokens > most) {
            let message = format!("`min_tokens` is {min_tokens}: the answer can have at most {most} tokens, by `max_tokens` and what fits");
            return Err(ApiError::invalid("min_tokens", message));
        }
        let request = |prompt: &Tokens| NewRequest {
            prompt: prompt.clone(),
            salt: options.salt.clone(),
            class: options.class,
            sampling: Sampling { logprobs: options.sampling.logprobs.filter(|_| !hidden), ..options.sampling.clone() },
            stop: StopRule { max_tokens: generated(prompt), min_tokens, stop_tokens: options.rules.stop_tokens.clone() },
            constraint: options.constraint.as_ref().map(|constrained| constrained.constraint.clone()),
            choices: options.choices,
            prompt_logprobs,
            embeds: None,
            timeout: self.shared.request_timeout,
        };
        let choices = prompts.len() as u64 * u64::from(options.choices);
        let answer_tokens = u64::from(options.choices) * prompts.iter().map(|prompt| u64::from(generated(prompt))).sum::<u64>();
        let mut metered = self.reserve(options.arrived, options.class, prompts, answer_tokens)?;
        let backend = Arc::clone(&self.model.backend);
        let caches =
            Caches { equal: self.shared.response_cache.as_ref(), similar: self.shared.similar.as_ref().zip(options.inquiry.as_ref()) };
        let submission = match prompts {
            [prompt] if options.repeatable => Submission::repeatable(backend, &caches, request(prompt)),
            _ => Submission::new(backend, prompts.iter().map(request).collect()),
        };
        let submission = submission.inspect_err(|_| {
            metered.cancel();
            self.shared.objectives.reject(options.class, choices);
            self.routed.iter().for_each(|routed| routed.failed());
        })?;
        let tap = self.tap(options.repeatable).or_else(|| self.caller.as_ref().and_then(|caller| caller.take_tap()));
        let judging = self.judging();
        Ok(Answer::new(
            submission,
            prompts,
            options,
            hidden,
            &Reader {
                model: &self.model.text,
                guarded: self.safety().map(|safety| safety.guarded(&options.safety, judging.is_some())),
                personal: self.pii().map_or_else(Personal::default, |pii| pii.personal(options)),
                disclaimed: safety::disclaimed(self.safety(), options.has_form()),
            },
            Books {
                objectives: Arc::clone(&self.shared.objectives),
                recent: Arc::clone(&self.shared.recent),
                metered,
                blocks: self.shared.audit.clone().map(|audit| Blocks {
                    audit,
                    tenant: self.tenant().map(str::to_owned),
                    model: self.model.name.clone(),
                }),
                routed: self.routed.clone(),
                tap,
            },
        )
        .judged_by(judging))
    }

    /// Gives all texts to the cluster to be embedded or classified.
    pub fn start_embeddings(&self, param: &str, texts: &[EmbeddedText]) -> Result<(Submission, Metered), ApiError> {
        let prompts: Vec<Tokens> = texts.iter().map(|text| text.tokens.clone()).collect();
        self.check_prompts(param, &prompts, 0)?;
        let class = self.classes().by_tier(self.service_tier(None)).unwrap_or_default();
        let request = |EmbeddedText { tokens, second_text }: &EmbeddedText| {
            let embeds = Embeds { second_text: *second_text };
            NewRequest::embedding(tokens.clone(), embeds, self.salt(&[]), class, self.shared.request_timeout)
        };
        let mut metered = self.reserve(Instant::now(), class, &prompts, 0)?;
        let submission = Submission::new(Arc::clone(&self.model.backend), texts.iter().map(request).collect());
        Ok((submission.inspect_err(|_| metered.cancel())?, metered))
    }

    fn check_prompts(&self, param: &str, prompts: &[Tokens], generated: u32) -> Result<(), ApiError> {
        if generated > 0 && self.model.text.config.identity.kind != ModelKind::Decoder {
            let message = format!("`{}` reads texts and writes none: use /v1/embeddings, /v1/rerank or /v1/classify", self.model_name());
            return Err(ApiError::invalid("model", message));
        }
        let context = self.context_tokens()?;
        if prompts.iter().any(|prompt| prompt.is_empty()) {
            return Err(ApiError::invalid(param, format!("`{param}` is empty: at least one token is needed")));
        }
        let too_long = prompts.iter().find(|prompt| prompt.len() as u64 + u64::from(generated) > context.into());
        if let Some(prompt) = too_long {
            let prompt_fits = prompt.len() < context as usize;
            return Err(ApiError::context_length(
                if prompt_fits { "max_tokens" } else { param },
                context,
                prompt.len() as u64,
                generated.into(),
            ));
        }
        // Ids that a client sent, and tokenizers' own: some have tokens without an embedding in the model.
        let vocab_size = self.model.text.config.identity.vocab_size;
        if let Some(token) = prompts.iter().flat_map(|prompt| prompt.iter()).find(|&&token| token >= vocab_size) {
            let message = format!("`{param}`: {token} is not a token id of this model ({vocab_size} tokens)");
            return Err(ApiError::invalid(param, message));
        }
        Ok(())
    }

    pub fn check_draining(&self) -> Result<(), ApiError> {
        if self.shared.draining.load(Ordering::Relaxed) { Err(ApiError::draining()) } else { Ok(()) }
    }
}

/// One text, or two that are compared, to be embedded or classified.
pub struct EmbeddedText {
    pub tokens: Tokens,
    /// Where the second text begins; the number of tokens if there is none.
    pub second_text: u32,
}

impl From<Tokens> for EmbeddedText {
    fn from(tokens: Tokens) -> Self {
        Self { second_text: tokens.len() as u32, tokens }
    }
}

/// The share of the decode workers' blocks that sequences use.
fn kv_used(cluster: &ClusterView) -> Option<f64> {
    let workers = cluster.members.iter().filter(|member| member.role == Role::Decode).map(|member| member.report.blocks.hbm);
    let (used, total) = workers.fold((0, 0), |(used, total), blocks| (used + blocks.used, total + blocks.total));
    (total > 0).then(|| used as f64 / total as f64)
}

fn refused_tool(tool: usize, error: &GrammarError) -> ApiError {
    let param = format!("tools[{tool}].function.parameters{}", error.path().unwrap_or_default());
    ApiError::invalid(&*param, format!("`{param}`: {error}"))
}
