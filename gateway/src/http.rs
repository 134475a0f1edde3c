//! The front door: OpenAI's API over HTTP. Text stops here; behind it there are token ids.
//!
//! - [`chat`], [`completions`]: the generating endpoints; [`openai`]: their bodies; [`parse`]: bodies checked
//! - [`answer`]: token ids back to text; [`sse`]: as a stream
//! - [`errors`]: OpenAI's error object; [`server`]: connections

pub mod answer;
pub mod chat;
pub mod completions;
pub mod errors;
pub mod openai;
pub mod parse;
pub mod server;
pub mod sse;

use crate::{
    backend::{Backend, Submission},
    metrics::{self, Objectives},
    text::TextModel,
};
use answer::Answer;
use axum::{
    Json, Router,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use errors::ApiError;
use openai::{Model, ModelList};
use parse::Options;
use std::{
    num::NonZero,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tidemill_cluster::NewRequest;
use tidemill_proto::{
    block::Token,
    sampling::{Sampling, StopRule},
};
use tokio::sync::Semaphore;

/// A client has this long to send a request's body.
const BODY_READ_MAX: Duration = Duration::from_secs(60);
/// What JSON says instead of minus infinity, as in vLLM.
const LOGPROB_MIN: f32 = -9999.0;

/// What all handlers share.
#[derive(Debug)]
pub struct FrontDoor {
    backend: Arc<dyn Backend>,
    text: TextModel,
    model_name: String,
    created: u64,
    objectives: Arc<Objectives>,
    request_timeout: Duration,
    body_bytes_max: usize,
    /// Renderings and tokenizations at a time: as many as there are cores.
    computing: Semaphore,
    draining: AtomicBool,
}

impl FrontDoor {
    pub fn new(
        backend: Arc<dyn Backend>,
        text: TextModel,
        model_name: String,
        objectives: Objectives,
        request_timeout: Duration,
        body_bytes_max: usize,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            backend,
            text,
            model_name,
            created: unix_seconds(),
            objectives: Arc::new(objectives),
            request_timeout,
            body_bytes_max,
            computing: Semaphore::new(cores),
            draining: AtomicBool::new(false),
        }
    }

    pub fn router(self: Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat::chat))
            .route("/v1/completions", post(completions::completions))
            .route("/v1/models", get(models))
            .route("/v1/models/{*id}", get(model))
            .route("/health", get(|| async { StatusCode::OK }))
            .route("/ready", get(ready))
            .route("/metrics", get(render_metrics))
            .route("/cluster", get(cluster))
            .fallback(|method: Method, uri: Uri| async move { ApiError::no_route(method.as_str(), uri.path()) })
            .method_not_allowed_fallback(
                |method: Method, uri: Uri| async move { ApiError::method_not_allowed(method.as_str(), uri.path()) },
            )
            .with_state(self)
    }

    /// From now on nothing new is taken.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    fn text(&self) -> &TextModel {
        &self.text
    }

    fn model_name(&self) -> &str {
        &self.model_name
    }

    async fn read(&self, body: Body) -> Result<Vec<u8>, ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::draining());
        }
        let read = tokio::time::timeout(BODY_READ_MAX, parse::read(body, self.body_bytes_max)).await;
        read.unwrap_or_else(|_| Err(ApiError::too_slow(BODY_READ_MAX)))
    }

    /// Runs what takes longer than a moment beside the event loop.
    async fn compute<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T, ApiError> + Send + 'static) -> Result<T, ApiError> {
        let _permit = self.computing.acquire().await.expect("the semaphore is never closed");
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read: please report this as a bug")))
    }

    /// Counts a request that fails before it runs; one that runs is counted by its [`Answer`].
    async fn counted<T>(&self, start: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        start.await.inspect_err(|error| metrics::count_request(error.outcome()))
    }

    fn check_model(&self, model: Option<&str>) -> Result<(), ApiError> {
        match model {
            Some(model) if model != self.model_name => Err(ApiError::model_not_found(model, &self.model_name)),
            Some(_) | None => Ok(()),
        }
    }

    /// Longest sequence that could run now.
    fn context_tokens(&self) -> Result<u32, ApiError> {
        self.backend.context_tokens().ok_or_else(|| tidemill_cluster::Rejection::NoWorker.into())
    }

    /// Refuses text that cannot fit, without tokenizing it.
    fn check_text_length(&self, param: &str, text: &str) -> Result<(), ApiError> {
        let context = self.backend.context_tokens().unwrap_or(self.text.config.context_tokens);
        if text.len() > self.text.tokenizer.text_bytes_max(context as usize) {
            return Err(ApiError::context_length(param, context, u64::from(context) + 1, 0));
        }
        Ok(())
    }

    /// Gives all prompts to the cluster. `max_tokens` of 0 (scoring only) generates one token that nobody sees.
    fn start(
        &self,
        param: &str,
        prompts: Vec<Vec<Token>>,
        options: &mut Options,
        max_tokens: u32,
        prompt_logprobs: Option<u32>,
    ) -> Result<Answer, ApiError> {
        let context = self.context_tokens()?;
        if prompts.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid(param, format!("`{param}` is empty: at least one token is needed")));
        }
        let hidden = max_tokens == 0;
        let generated = max_tokens.max(1);
        if options.min_tokens > generated {
            let message = format!("`min_tokens` is {}: it must be at most `max_tokens`, which is {max_tokens}", options.min_tokens);
            return Err(ApiError::invalid("min_tokens", message));
        }
        let too_long = prompts.iter().find(|prompt| prompt.len() as u64 + u64::from(generated) > context.into());
        if let Some(prompt) = too_long {
            return Err(ApiError::context_length(param, context, prompt.len() as u64, generated.into()));
        }
        // Not only ids that a client sent: a tokenizer may have tokens that the model has no embedding for.
        let vocab_size = self.text.config.identity.vocab_size;
        if let Some(token) = prompts.iter().flatten().find(|&&token| token >= vocab_size) {
            let message = format!("`{param}`: {token} is not a token id of this model ({vocab_size} tokens)");
            return Err(ApiError::invalid(param, message));
        }
        let request = |prompt: &Vec<Token>| NewRequest {
            prompt: prompt.clone().into(),
            salt: options.salt.clone(),
            sampling: Sampling { logprobs: options.sampling.logprobs.filter(|_| !hidden), ..options.sampling.clone() },
            stop: StopRule { max_tokens: generated, min_tokens: options.min_tokens, stop_tokens: options.stop_tokens.clone() },
            choices: options.choices,
            prompt_logprobs,
            timeout: self.request_timeout,
        };
        let submission = Submission::new(Arc::clone(&self.backend), prompts.iter().map(request).collect())?;
        Ok(Answer::new(submission, &prompts, options, hidden, &self.text, Arc::clone(&self.objectives)))
    }

    fn draw_id(&self, kind: &str) -> String {
        format!("{kind}-{:032x}", rand::random::<u128>())
    }

    fn model(&self) -> Model {
        Model {
            id: self.model_name.clone(),
            object: "model",
            created: self.created,
            owned_by: "tidemill",
            root: self.model_name.clone(),
            max_model_len: self.backend.context_tokens().unwrap_or(self.text.config.context_tokens),
        }
    }
}

async fn models(State(front): State<Arc<FrontDoor>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![front.model()] })
}

async fn model(State(front): State<Arc<FrontDoor>>, id: Result<Path<String>, PathRejection>) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::malformed(rejection.body_text()))?;
    front.check_model(Some(&id))?;
    Ok(Json(front.model()))
}

/// Ready when a request would succeed.
async fn ready(State(front): State<Arc<FrontDoor>>) -> Result<StatusCode, ApiError> {
    if front.draining.load(Ordering::Relaxed) {
        return Err(ApiError::draining());
    }
    front.context_tokens().map(|_| StatusCode::OK)
}

async fn render_metrics(State(front): State<Arc<FrontDoor>>) -> Response {
    let text = metrics::render(&front.backend.view());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn cluster(State(front): State<Arc<FrontDoor>>) -> Response {
    Json(front.backend.view()).into_response()
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// JSON has no infinity.
fn json_logprob(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOGPROB_MIN) } else { LOGPROB_MIN }
}
