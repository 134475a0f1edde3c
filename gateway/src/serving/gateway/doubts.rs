//! Uncertain findings of the classifier, in prompts and in answers, go to a model of the cluster, bypassing everything meant for clients:
//! routing, safety checks, quotas, usage, stores and the response cache.

use super::{Gateway, ServedModel};
use crate::{
    generation::{guarded::ModerationVerdict, piece::Unchecked},
    requests::{error::ApiError, options::Options},
    safety::{
        self,
        audit::Audit,
        moderator::{ModerationError, Moderator, Tops},
    },
    serving::{answer::Moderation, backend::Submission},
};
use futures_util::FutureExt;
use std::{
    cmp::Reverse,
    panic::AssertUnwindSafe,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tidemill_cluster::{Failure, NewRequest, Outcome, Rejection, RequestEvent};
use tidemill_proto::{
    block::Token,
    sampling::{Sampling, StopRule},
    tokens::Tokens,
};
use tidemill_safety::{
    category::Finding,
    faults::Fate,
    judge::{Doubt, packed},
    pii::redact::masked,
};
use tokio::task::JoinSet;

/// The number of likeliest tokens that are searched for the moderator's words.
const TOP: u32 = 20;

/// The side of a text, as a label of metrics.
#[derive(Clone, Copy, Debug)]
enum Side {
    Prompt,
    Answer,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Prompt => "input",
            Self::Answer => "output",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Answer => "answer",
        }
    }
}

/// The outcome of a moderation.
#[derive(Debug)]
enum Moderated {
    Passes,
    /// The finding, with the text that holds it.
    Harmful(Finding, String),
    Unchecked(ModerationError),
}

/// Moderates uncertain findings in one answer's choices, one of each at a time. Dropping it cancels running checks.
#[derive(Debug)]
struct Moderations {
    gateway: Arc<Gateway>,
    moderator: Arc<Moderator>,
    /// Separate tasks: a client that reads slowly must not occupy the moderator's turns, nor look like a slow moderator.
    asked: JoinSet<(usize, ModerationVerdict)>,
}

impl Moderation for Moderations {
    fn ask(&mut self, choice: usize, doubt: Doubt) {
        let (gateway, moderator) = (Arc::clone(&self.gateway), Arc::clone(&self.moderator));
        self.asked.spawn(async move {
            let moderated = AssertUnwindSafe(gateway.outcome(Side::Answer, &moderator, vec![doubt])).catch_unwind().await;
            let ruling = match moderated {
                Ok(Moderated::Passes) => ModerationVerdict::Harmless,
                Ok(Moderated::Harmful(finding, _)) => ModerationVerdict::Harmful(finding),
                Ok(Moderated::Unchecked(error)) => ModerationVerdict::Unchecked(Unchecked::new(&error.told())),
                Err(_) => ModerationVerdict::Unchecked(Unchecked::new("it panicked: please report this as a bug")),
            };
            (choice, ruling)
        });
    }

    fn is_busy(&self) -> bool {
        !self.asked.is_empty()
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(usize, ModerationVerdict)> {
        match self.asked.poll_join_next(context) {
            Poll::Ready(Some(ruled)) => Poll::Ready(ruled.expect("a panic was caught, and nobody ends a task but with all of them")),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Gateway {
    /// The moderator of this request's answer; `None` if the answer is not moderated, as that of a shadow, which is not shown.
    pub(crate) fn moderation(&self) -> Option<Box<dyn Moderation>> {
        let moderator = self.safety()?.moderator_of_answers().filter(|_| !self.is_shadow())?;
        Some(Box::new(Moderations { moderator: Arc::clone(moderator), gateway: Arc::new(self.clone()), asked: JoinSet::new() }))
    }

    /// Moderates the findings collected in `options` while the prompt was made. `param` is the field with the prompt, for errors.
    pub async fn moderate_prompt(&self, param: &str, options: &mut Options) -> Result<(), ApiError> {
        self.moderate(param, std::mem::take(&mut options.doubts)).await
    }

    /// Refuses text that the moderator finds harmful, and text that could not be moderated, unless the operator lets it pass for a while.
    pub async fn moderate(&self, param: &str, doubts: Vec<Doubt>) -> Result<(), ApiError> {
        let Some(moderator) = self.safety().and_then(|safety| safety.moderator.as_ref()).filter(|_| !doubts.is_empty()) else {
            return Ok(());
        };
        match self.outcome(Side::Prompt, moderator, packed(doubts)).await {
            Moderated::Passes => Ok(()),
            Moderated::Harmful(finding, text) => {
                safety::metrics::count_block(Side::Prompt.name(), &finding);
                let blocked = |audit: &Audit| audit.blocked(Side::Prompt.name(), self.tenant(), &self.model.name, finding, &text);
                Err(ApiError::content_filter(param, finding, self.audit().map(blocked)))
            }
            Moderated::Unchecked(error) => Err(ApiError::unchecked(param, &error.told())),
        }
    }

    /// Moderates uncertain findings. Logs each that passes or is refused unchecked.
    async fn outcome(&self, side: Side, moderator: &Arc<Moderator>, doubts: Vec<Doubt>) -> Moderated {
        let doubts: Arc<[Doubt]> = doubts.into();
        let started = Instant::now();
        let (error, fate) = match moderator.scores(&doubts, self.ask_moderator(moderator, &doubts)).await {
            Ok(scores) => {
                safety::metrics::observe_moderator(side.name(), started.elapsed());
                let found = doubts.iter().zip(scores).find_map(|(doubt, score)| Some((doubt.settle(score)?, &doubt.text)));
                return found.map_or(Moderated::Passes, |(finding, text)| Moderated::Harmful(finding, text.clone()));
            }
            Err(error) => error,
        };
        let (text, side, reason, detail) = (side.text(), side.name(), error.name(), error.to_string());
        let (tenant, model) = (self.tenant(), moderator.model());
        let categories = doubts.iter().flat_map(Doubt::categories).map(|category| category.name()).collect::<Vec<_>>().join(", ");
        let (consequence, count, moderated): (_, fn(_, _), _) = match fate {
            Fate::Passes => ("letting it pass", safety::metrics::count_bypass, Moderated::Passes),
            Fate::Refused => ("refusing it", safety::metrics::count_unchecked, Moderated::Unchecked(error)),
        };
        tracing::warn!(tenant, model, categories, reason, detail, "the last safety check of an uncertain {text} failed; {consequence}");
        count(side, reason);
        moderated
    }

    /// Returns the likeliest first tokens after the moderator's prompt for each finding.
    async fn ask_moderator(&self, moderator: &Arc<Moderator>, doubts: &Arc<[Doubt]>) -> Tops {
        let served = self.served(moderator.model()).ok_or(ModerationError::NoWorker)?;
        let finder = self.pii().filter(|pii| pii.input).map(|pii| Arc::clone(&pii.finder));
        let (worker, moderator, doubts) = (Arc::clone(&served), Arc::clone(moderator), Arc::clone(doubts));
        let limit = moderator.deadline();
        let made = self.compute(move || {
            let prompt = |doubt: &Doubt| {
                let hidden = finder.as_ref().map(|finder| masked(finder, &doubt.text));
                moderator.prompt(&worker.text, hidden.as_deref().unwrap_or(&doubt.text)).map(Tokens::from)
            };
            doubts.iter().map(prompt).collect::<Result<Vec<_>, _>>().map_err(|error| ApiError::internal(error.to_string()))
        });
        let prompts = made.await.map_err(|error| ModerationError::Failed(error.message().to_owned()))?;
        self.first_tokens(&served, &prompts, limit).await
    }

    /// Generates one token for each prompt. They have the caller's salt: other tenants must not find its text in the cache.
    async fn first_tokens(&self, served: &ServedModel, prompts: &[Tokens], limit: Duration) -> Tops {
        let first = self.classes().iter().min_by_key(|(_, class)| Reverse(class.priority));
        let class = first.map(|(id, _)| id).unwrap_or_default();
        let request = |prompt: &Tokens| NewRequest {
            prompt: prompt.clone(),
            salt: self.salt(&[]),
            class,
            sampling: Sampling { temperature: 0.0, logprobs: Some(TOP), ..Sampling::default() },
            stop: StopRule { max_tokens: 1, min_tokens: 0, stop_tokens: Vec::new() },
            constraint: None,
            thought: None,
            choices: 1,
            prompt_logprobs: None,
            embeds: None,
            timeout: limit,
        };
        let mut submission = Submission::new(Arc::clone(&served.backend), prompts.iter().map(request).collect())?;
        let mut heard: Vec<Option<Vec<(Token, f32)>>> = vec![None; prompts.len()];
        while heard.contains(&None) {
            match submission.next().await {
                Some((place, RequestEvent::Token { logprob: Some(logprob), .. })) => heard[place] = Some(logprob.top),
                Some((_, RequestEvent::Finished { outcome: Outcome::Failed(failure), .. })) => return Err(failure.into()),
                Some(_) => {}
                None => return Err(ModerationError::Failed("it has ended without a word".into())),
            }
        }
        Ok(heard.into_iter().flatten().collect())
    }
}

impl From<Rejection> for ModerationError {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::NoWorker | Rejection::NoThoughtLimits => Self::NoWorker,
            Rejection::Full { .. } | Rejection::Late { .. } => Self::Busy,
            Rejection::TooManyChoices { .. } | Rejection::TooLong { .. } => Self::Failed(rejection.to_string()),
        }
    }
}

impl From<Failure> for ModerationError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::QueueTimeout(_) | Failure::Timeout(_) | Failure::Late { .. } | Failure::Displaced { .. } => Self::Overdue,
            Failure::TooLong { .. } | Failure::Losses(_) | Failure::Worker(_) => Self::Failed(failure.to_string()),
        }
    }
}
