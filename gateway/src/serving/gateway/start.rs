//! The start of an answer: options within their sender's rights, a quota, and the cluster or a cache.

use super::{Gateway, erasing};
use crate::{
    dialog::Dialog,
    features::feedback::{self, Answered},
    generation::personal::Personal,
    requests::{error::ApiError, generate::GenerateRequest, options::Options},
    safety::{self, Blocks},
    serving::{
        answer::{Answer, Books, Reader, Traced},
        backend::{Caches, Submission},
    },
    tenants::metered::{Metered, QuotaRequest},
    traces::names::Operation,
};
use serde_json::{Map, Value};
use std::{sync::Arc, time::Instant};
use tidemill_cluster::{NewRequest, Rejection, class::ClassId};
use tidemill_proto::{
    message::{Embeds, ModelKind},
    sampling::{Sampling, StopRule},
    tokens::Tokens,
};

/// The terms of an answer's start, besides its prompts and the client's options.
#[derive(Debug)]
pub struct Start<'a> {
    /// The field with the prompts, for errors.
    pub param: &'static str,
    /// The kind of the answer, for its trace.
    pub operation: Operation,
    /// The response's id; empty for an answer without one that clients know.
    pub id: &'a str,
    /// Derives an answer's length from the available room, if the client gives none.
    pub max_tokens_default: fn(u32) -> u32,
    /// The number of likeliest tokens to report for each of the prompt's.
    pub prompt_logprobs: Option<u32>,
    /// The question, if the answer is kept for feedback.
    pub question: Option<Vec<Value>>,
}

impl Start<'_> {
    /// The terms of an answer of any length to a dialog, without an id that clients know.
    pub fn of(param: &'static str) -> Self {
        Self {
            param,
            operation: Operation::Chat,
            id: "",
            max_tokens_default: std::convert::identity,
            prompt_logprobs: None,
            question: None,
        }
    }
}

/// A request that has its quota.
struct Admitted {
    metered: Metered,
    /// The longest sequence that could run when it was admitted.
    context: u32,
    /// The maximum length of an answer; with 0 (scoring only) one hidden token is generated.
    max_tokens: u32,
}

impl Admitted {
    /// The maximum length of the answer to a prompt: one that [shrinks](Options::max_tokens_shrinks) is reduced to the room after it.
    fn answer_tokens(&self, prompt: &Tokens, options: &Options) -> u32 {
        answer_tokens(self.context, self.max_tokens, prompt, options)
    }
}

fn answer_tokens(context: u32, max_tokens: u32, prompt: &Tokens, options: &Options) -> u32 {
    match options.max_tokens_shrinks {
        true => max_tokens.min(context.saturating_sub(prompt.len() as u32)).max(1),
        false => max_tokens.max(1),
    }
}

impl Gateway {
    /// Checks a request's options, within its sender's rights.
    pub fn options(&self, arrived: Instant, mut request: GenerateRequest) -> Result<Options, ApiError> {
        let asked = request.service_tier.as_deref();
        // An unknown tier is an error for every sender.
        if self.classes().by_tier(asked).is_some()
            && let Some(tier) = self.service_tier(asked)
        {
            request.service_tier = Some(tier.to_owned());
        }
        let mut options = Options::check(arrived, request, self.text(), self.classes())?;
        options.salt = self.salt(&options.salt);
        options.max_tokens_shrinks = !self.shared.settings.requests.max_tokens_must_fit;
        Ok(options)
    }

    /// The service tier of a request that asks for `asked`; `None` for that one.
    pub(super) fn service_tier<'a>(&'a self, asked: Option<&'a str>) -> Option<&'a str> {
        let caller = self.caller.as_ref()?;
        match caller.in_background {
            true => Some(&self.classes().background().service_tier),
            false => caller.tier().map(|tier| tier.service_tier(asked)),
        }
    }

    /// The salt of cached blocks: it separates a tenant from all others, and within a tenant requests with different `cache_salt`s. A
    /// client cannot forge the tenant's part.
    pub(super) fn salt(&self, cache_salt: &[u8]) -> Vec<u8> {
        let is_shed_first = self.tier().is_some_and(|tier| tier.is_shed_first());
        let tenant = self.tenant().map(|tenant| erasing::salt(tenant, self.tenants().erased(tenant), is_shed_first));
        tenant.iter().flatten().chain(cache_salt).copied().collect()
    }

    /// Makes a dialog's prompt and starts the answer.
    pub async fn start_dialog(self: &Arc<Self>, dialog: Dialog, mut options: Options, start: Start<'_>) -> Result<Answer, ApiError> {
        let (worker, param) = (Arc::clone(self), start.param);
        let prepare = move || {
            let prompt = Tokens::from(worker.prompt(param, &dialog, None, &mut options)?);
            worker.check_constraint(&mut options)?;
            Ok((prompt, options))
        };
        let (prompt, mut options) = self.compute_on(0, prepare).await?;
        self.start(&[prompt], &mut options, start).await
    }

    /// Starts the answer to prompts: bounds the answer's length, takes the quota, moderates uncertain findings, and gives the prompts to the
    /// cluster, unless a cache has the answer. A constraint must have been [checked](Self::check_constraint).
    pub async fn start(&self, prompts: &[Tokens], options: &mut Options, start: Start<'_>) -> Result<Answer, ApiError> {
        let Start { param, operation, id, max_tokens_default, prompt_logprobs, question } = start;
        let room = self.room(prompts)?;
        let max_tokens = options.max_tokens.unwrap_or_else(|| max_tokens_default(self.answer_tokens(prompts, options.choices, room)));
        let admitted = self.admit(param, prompts, options, max_tokens).await?;
        // A moderator and an encoder work only for what has been paid for.
        self.moderate_prompt(param, options).await?;
        self.complete_question(options, id).await;
        let traced = self.traced(operation, options.class);
        let mut answer = self.submit(prompts, options, admitted, prompt_logprobs, traced)?;
        self.remember(&mut answer, id, question);
        Ok(answer)
    }

    /// The question in a body, or `None` if feedback is off.
    pub fn asked(&self, body: &Map<String, Value>) -> Option<Vec<Value>> {
        self.feedback().map(|_| feedback::asked(body))
    }

    /// Keeps the answer so that feedback can refer to it.
    fn remember(&self, answer: &mut Answer, id: &str, asked: Option<Vec<Value>>) {
        if let (Some(feedback), Some(question)) = (self.feedback(), asked) {
            let (owner, model) = (self.owner(), self.model.name.clone());
            feedback.remember(id, Answered { owner, model, question, answer: String::new() });
            answer.remember(Arc::clone(feedback), id);
        }
    }

    /// Tokens that fit after the longest prompt.
    fn room(&self, prompts: &[Tokens]) -> Result<u32, ApiError> {
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0) as u32;
        Ok(self.context_tokens()?.saturating_sub(longest).max(1))
    }

    /// The length of an answer for which the client gives none: all that fits, or the part of it that its quota leaves.
    fn answer_tokens(&self, prompts: &[Tokens], choices: u32, room: u32) -> u32 {
        let Some(caller) = &self.caller else { return room };
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let choices = prompts.len() as u64 * u64::from(choices);
        self.shared.settings.tenants.answer_tokens(caller, &self.model.name, room, prompt_tokens, choices)
    }

    /// Checks that the prompts and their answers fit, and takes their quota.
    async fn admit(&self, param: &str, prompts: &[Tokens], options: &Options, max_tokens: u32) -> Result<Admitted, ApiError> {
        let min_tokens = options.rules.min_tokens;
        self.check_prompts(param, prompts, if options.max_tokens_shrinks { 1 } else { max_tokens.max(1) })?;
        let context = self.context_tokens()?;
        let generated = |prompt: &Tokens| answer_tokens(context, max_tokens, prompt, options);
        if let Some(most) = prompts.iter().map(generated).find(|&most| min_tokens > most) {
            let message = format!("`min_tokens` is {min_tokens}: the answer can have at most {most} tokens, by `max_tokens` and what fits");
            return Err(ApiError::invalid("min_tokens", message));
        }
        let answer_tokens = u64::from(options.choices) * prompts.iter().map(|prompt| u64::from(generated(prompt))).sum::<u64>();
        let metered = self.reserve(options.arrived, options.class, prompts, answer_tokens).await?;
        Ok(Admitted { metered, context, max_tokens })
    }

    /// Submits all prompts to the cluster.
    fn submit(
        &self,
        prompts: &[Tokens],
        options: &Options,
        admitted: Admitted,
        prompt_logprobs: Option<u32>,
        traced: Option<Traced>,
    ) -> Result<Answer, ApiError> {
        if !options.doubts.is_empty() {
            return Err(ApiError::internal("a doubt was not settled: please report this as a bug"));
        }
        if options.constraint.as_ref().is_some_and(|constrained| !constrained.has_passed) {
            return Err(ApiError::internal("a grammar was not checked: please report this as a bug"));
        }
        let hidden = admitted.max_tokens == 0;
        let request = |prompt: &Tokens| NewRequest {
            prompt: prompt.clone(),
            salt: options.salt.clone(),
            class: options.class,
            sampling: Sampling { logprobs: options.sampling.logprobs.filter(|_| !hidden), ..options.sampling.clone() },
            stop: StopRule {
                max_tokens: admitted.answer_tokens(prompt, options),
                min_tokens: options.rules.min_tokens,
                stop_tokens: options.rules.stop_tokens.clone(),
            },
            constraint: options.constraint.as_ref().map(|constrained| constrained.constraint.clone()),
            thought: options.thought.clone(),
            choices: options.choices,
            prompt_logprobs,
            embeds: None,
            timeout: self.shared.settings.requests.request_timeout,
        };
        let choices = prompts.len() as u64 * u64::from(options.choices);
        let backend = Arc::clone(&self.model.backend);
        let caches =
            Caches { equal: self.shared.response_cache.as_ref(), similar: self.shared.similar.as_ref().zip(options.inquiry.as_ref()) };
        let submission = match prompts {
            [prompt] if options.repeatable => Submission::repeatable(backend, &caches, request(prompt)),
            _ => Submission::new(backend, prompts.iter().map(request).collect()),
        };
        let mut metered = admitted.metered;
        let submission = submission.inspect_err(|_| {
            metered.cancel();
            self.shared.objectives.reject(options.class, choices);
            self.routed.iter().for_each(|routed| routed.failed());
        })?;
        let tap = self.tap(options.repeatable).or_else(|| self.caller.as_ref().and_then(|caller| caller.take_tap()));
        let moderation = self.moderation();
        Ok(Answer::new(
            submission,
            prompts,
            options,
            hidden,
            &Reader {
                model: &self.model.text,
                guarded: self.safety().map(|safety| safety.guarded(&options.safety, moderation.is_some())),
                personal: self.pii().map_or_else(Personal::default, |pii| pii.personal(options)),
                disclaimed: safety::disclaimed(self.safety(), options.has_form()),
            },
            Books {
                objectives: Arc::clone(&self.shared.objectives),
                recent: Arc::clone(&self.shared.recent),
                metered,
                traced,
                blocks: self.shared.settings.audit.clone().map(|audit| Blocks {
                    audit,
                    tenant: self.tenant().map(str::to_owned),
                    model: self.model.name.clone(),
                }),
                routed: self.routed.clone(),
                tap,
            },
        )
        .moderated_by(moderation))
    }

    /// The part of the request's trace that an answer writes.
    fn traced(&self, operation: Operation, class: ClassId) -> Option<Traced> {
        let trace = self.caller.as_ref()?.trace.clone()?;
        Some(Traced::new(trace, operation, &self.model.name, &self.classes().get(class).name))
    }

    /// Reserves a request's quota.
    async fn reserve(&self, arrived: Instant, class: ClassId, prompts: &[Tokens], answer_tokens: u64) -> Result<Metered, ApiError> {
        let caller = self.caller.as_ref().ok_or_else(|| ApiError::internal("a request has no sender: please report this as a bug"))?;
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let class = &self.classes().get(class).name;
        let wanted = QuotaRequest { arrived, model: &self.model.name, class, prompt_tokens, answer_tokens };
        self.shared.settings.tenants.reserve(caller, wanted).await
    }

    /// Submits all texts to the cluster to be embedded or classified.
    pub async fn start_embeddings(
        &self,
        param: &str,
        operation: Operation,
        texts: &[EmbeddedText],
    ) -> Result<(Submission, Metered, Option<Traced>), ApiError> {
        let prompts: Vec<Tokens> = texts.iter().map(|text| text.tokens.clone()).collect();
        self.check_prompts(param, &prompts, 0)?;
        let class = self.classes().by_tier(self.service_tier(None)).unwrap_or_default();
        let request = |EmbeddedText { tokens, second_text }: &EmbeddedText| {
            let embeds = Embeds { second_text: *second_text };
            NewRequest::embedding(tokens.clone(), embeds, self.salt(&[]), class, self.shared.settings.requests.request_timeout)
        };
        let mut metered = self.reserve(Instant::now(), class, &prompts, 0).await?;
        let traced = self.traced(operation, class);
        let submission = Submission::new(Arc::clone(&self.model.backend), texts.iter().map(request).collect());
        Ok((submission.inspect_err(|_| metered.cancel())?, metered, traced))
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
        // Clients' ids, and also tokenizers' own: some have tokens without an embedding in the model.
        let vocab_size = self.model.text.config.identity.vocab_size;
        if let Some(token) = prompts.iter().flat_map(|prompt| prompt.iter()).find(|&&token| token >= vocab_size) {
            let message = format!("`{param}`: {token} is not a token id of this model ({vocab_size} tokens)");
            return Err(ApiError::invalid(param, message));
        }
        Ok(())
    }

    /// The longest sequence that could run now.
    pub fn context_tokens(&self) -> Result<u32, ApiError> {
        self.model.backend.context_tokens().ok_or_else(|| Rejection::NoWorker.into())
    }

    /// The longest sequence that can run now, or else that the model allows.
    pub fn context_tokens_max(&self) -> u32 {
        self.model.context_tokens_max()
    }

    /// The longest sequence of any model, for what is loaded before its model is known.
    pub fn largest_context(&self) -> u64 {
        self.shared.models.iter().map(|model| u64::from(model.context_tokens_max())).max().unwrap_or(0)
    }
}

/// One text, or two that are compared, to be embedded or classified.
pub struct EmbeddedText {
    pub tokens: Tokens,
    /// The position of the second text; the number of tokens if there is none.
    pub second_text: u32,
}

impl From<Tokens> for EmbeddedText {
    fn from(tokens: Tokens) -> Self {
        Self { second_text: tokens.len() as u32, tokens }
    }
}
