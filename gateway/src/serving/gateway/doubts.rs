//! Uncertain findings of the classifier, in prompts and in answers, go to a model of the cluster, past everything that is for clients:
//! routing, safety checks, quotas, usage, stores and the response cache.

use super::{Gateway, ServedModel};
use crate::{
    generation::{guarded::Ruling, piece::Unchecked},
    requests::{error::ApiError, options::Options},
    safety::{
        self,
        audit::Audit,
        judge::{Judge, Tops, Unsettled},
    },
    serving::{answer::Judging, backend::Submission},
};
use futures_util::FutureExt;
use metrics::{counter, histogram};
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

/// Likeliest tokens that the judge's words are looked for among.
const TOP: u32 = 20;

/// The side that a text is on: labels of metrics.
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
enum Settled {
    Passes,
    /// With the text that it was found in.
    Harmful(Finding, String),
    Unchecked(Unsettled),
}

/// Settles the doubts of one answer's choices, one of each at a time. Dropping it ends whatever is asked.
#[derive(Debug)]
struct Asked {
    gateway: Arc<Gateway>,
    judge: Arc<Judge>,
    /// By tasks of their own: a client that reads slowly must not keep the judge's turns, nor look like a slow judge.
    asked: JoinSet<(usize, Ruling)>,
}

impl Judging for Asked {
    fn ask(&mut self, choice: usize, doubt: Doubt) {
        let (gateway, judge) = (Arc::clone(&self.gateway), Arc::clone(&self.judge));
        self.asked.spawn(async move {
            let settled = AssertUnwindSafe(gateway.settled(Side::Answer, &judge, vec![doubt])).catch_unwind().await;
            let ruling = match settled {
                Ok(Settled::Passes) => Ruling::Harmless,
                Ok(Settled::Harmful(finding, _)) => Ruling::Harmful(finding),
                Ok(Settled::Unchecked(unsettled)) => Ruling::Unchecked(Unchecked::new(&unsettled.told())),
                Err(_) => Ruling::Unchecked(Unchecked::new("it panicked: please report this as a bug")),
            };
            (choice, ruling)
        });
    }

    fn is_busy(&self) -> bool {
        !self.asked.is_empty()
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(usize, Ruling)> {
        match self.asked.poll_join_next(context) {
            Poll::Ready(Some(ruled)) => Poll::Ready(ruled.expect("a panic was caught, and nobody ends a task but with all of them")),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Gateway {
    /// The moderator of this request's answer; `None` if it is not moderated, as a shadow's is not, which no one reads.
    pub(crate) fn judging(&self) -> Option<Box<dyn Judging>> {
        let judge = self.safety()?.judge_of_answers().filter(|_| !self.is_shadow())?;
        Some(Box::new(Asked { judge: Arc::clone(judge), gateway: Arc::new(self.clone()), asked: JoinSet::new() }))
    }

    /// Moderates the findings collected in `options` while the prompt was made. `param`: the field with the prompt, for errors.
    pub async fn settle(&self, param: &str, options: &mut Options) -> Result<(), ApiError> {
        self.settle_doubts(param, std::mem::take(&mut options.doubts)).await
    }

    /// Refuses text that the moderator finds harmful; and text that could not be moderated, unless the operator lets it pass for a while.
    pub async fn settle_doubts(&self, param: &str, doubts: Vec<Doubt>) -> Result<(), ApiError> {
        let Some(judge) = self.safety().and_then(|safety| safety.judge.as_ref()).filter(|_| !doubts.is_empty()) else { return Ok(()) };
        match self.settled(Side::Prompt, judge, packed(doubts)).await {
            Settled::Passes => Ok(()),
            Settled::Harmful(finding, text) => {
                safety::count(Side::Prompt.name(), &finding);
                let blocked = |audit: &Audit| audit.blocked(Side::Prompt.name(), self.tenant(), &self.model.name, finding, &text);
                Err(ApiError::content_filter(param, finding, self.audit().map(blocked)))
            }
            Settled::Unchecked(unsettled) => Err(ApiError::unchecked(param, &unsettled.told())),
        }
    }

    /// Moderates uncertain findings. Logs each that passes or is refused unchecked.
    async fn settled(&self, side: Side, judge: &Arc<Judge>, doubts: Vec<Doubt>) -> Settled {
        let doubts: Arc<[Doubt]> = doubts.into();
        let started = Instant::now();
        let (unsettled, fate) = match judge.scores(&doubts, self.ask_judge(judge, &doubts)).await {
            Ok(scores) => {
                histogram!("tidemill_safety_model_seconds", "side" => side.name()).record(started.elapsed());
                let found = doubts.iter().zip(scores).find_map(|(doubt, score)| Some((doubt.settle(score)?, &doubt.text)));
                return found.map_or(Settled::Passes, |(finding, text)| Settled::Harmful(finding, text.clone()));
            }
            Err(unsettled) => unsettled,
        };
        let (text, side, reason, detail) = (side.text(), side.name(), unsettled.name(), unsettled.to_string());
        let (tenant, model) = (self.tenant(), judge.model());
        let categories = doubts.iter().flat_map(Doubt::categories).map(|category| category.name()).collect::<Vec<_>>().join(", ");
        match fate {
            Fate::Passes => {
                tracing::warn!(tenant, model, categories, reason, detail, "the last safety check of an uncertain {text} failed; letting it pass");
                counter!("tidemill_safety_bypasses_total", "side" => side, "reason" => reason).increment(1);
                Settled::Passes
            }
            Fate::Refused => {
                tracing::warn!(tenant, model, categories, reason, detail, "the last safety check of an uncertain {text} failed; refusing it");
                counter!("tidemill_safety_unchecked_total", "side" => side, "reason" => reason).increment(1);
                Settled::Unchecked(unsettled)
            }
        }
    }

    /// The likeliest first tokens after the judge's prompt for each doubt.
    async fn ask_judge(&self, judge: &Arc<Judge>, doubts: &Arc<[Doubt]>) -> Tops {
        let served = self.served(judge.model()).ok_or(Unsettled::NoWorker)?;
        let finder = self.pii().filter(|pii| pii.input).map(|pii| Arc::clone(&pii.finder));
        let (worker, judge, doubts) = (Arc::clone(&served), Arc::clone(judge), Arc::clone(doubts));
        let limit = judge.deadline();
        let made = self.compute(move || {
            let prompt = |doubt: &Doubt| {
                let hidden = finder.as_ref().map(|finder| masked(finder, &doubt.text));
                judge.prompt(&worker.text, hidden.as_deref().unwrap_or(&doubt.text)).map(Tokens::from)
            };
            doubts.iter().map(prompt).collect::<Result<Vec<_>, _>>().map_err(|error| ApiError::internal(error.to_string()))
        });
        let prompts = made.await.map_err(|error| Unsettled::Failed(error.message().to_owned()))?;
        self.first_tokens(&served, &prompts, limit).await
    }

    /// With the caller's salt: what it has asked must not be found in the cache by others.
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
                None => return Err(Unsettled::Failed("it has ended without a word".into())),
            }
        }
        Ok(heard.into_iter().flatten().collect())
    }
}

impl From<Rejection> for Unsettled {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::NoWorker => Self::NoWorker,
            Rejection::Full { .. } | Rejection::Late { .. } => Self::Busy,
            Rejection::TooManyChoices { .. } | Rejection::TooLong { .. } => Self::Failed(rejection.to_string()),
        }
    }
}

impl From<Failure> for Unsettled {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::QueueTimeout(_) | Failure::Timeout(_) | Failure::Late { .. } | Failure::Displaced { .. } => Self::Overdue,
            Failure::TooLong { .. } | Failure::Losses(_) | Failure::Worker(_) => Self::Failed(failure.to_string()),
        }
    }
}
