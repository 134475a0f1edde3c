//! A request as its client sees it: its parameters, events, usage and failures.

use crate::class::ClassId;
use std::time::Duration;
use tidemill_proto::{
    block::Token,
    grammar::Constraint,
    message::{Embeds, Provenance, TokensBySource},
    sampling::{Sampling, StopRule, TokenLogprob},
    thought::ThoughtLimit,
    tokens::Tokens,
};

/// One prompt, as token ids. The gateway has filled in defaults and checked ranges.
#[derive(Clone, Debug)]
pub struct NewRequest {
    pub prompt: Tokens,
    /// The tenant's cache salt.
    pub salt: Vec<u8>,
    pub class: ClassId,
    /// The sampling of the first choice; choice `j` draws with `seed + j`.
    pub sampling: Sampling,
    pub stop: StopRule,
    /// The constraint on every choice.
    pub constraint: Option<Constraint>,
    /// The limit on every choice's thought.
    pub thought: Option<ThoughtLimit>,
    pub choices: u32,
    /// Report the prompt's log-probabilities (with the first choice), with this many of the likeliest tokens at each position.
    pub prompt_logprobs: Option<u32>,
    /// Report the prompt's embedding, and generate nothing.
    pub embeds: Option<Embeds>,
    /// The maximum lifetime of the request.
    pub timeout: Duration,
}

impl NewRequest {
    /// A request for the embedding of a prompt, which generates no tokens.
    pub fn embedding(prompt: Tokens, embeds: Embeds, salt: Vec<u8>, class: ClassId, timeout: Duration) -> Self {
        Self {
            prompt,
            salt,
            class,
            sampling: Sampling::default(),
            stop: StopRule { max_tokens: 1, ..StopRule::default() },
            constraint: None,
            thought: None,
            choices: 1,
            prompt_logprobs: None,
            embeds: Some(embeds),
            timeout,
        }
    }

    /// Whether only a worker that keeps limits on thoughts can answer it. Where no thought is wanted at all, the prompt has said so as well,
    /// as far as the template can, and a worker of an earlier release has nothing but that.
    pub fn needs_thought_limits(&self) -> bool {
        self.thought.as_ref().is_some_and(|limit| limit.tokens_max > 0)
    }

    /// The maximum length of a sequence of this request.
    pub fn tokens_max(&self) -> u64 {
        let generated = if self.embeds.is_some() { 0 } else { self.stop.max_tokens };
        self.prompt.len() as u64 + u64::from(generated)
    }
}

/// An event of a request, for its client.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// A choice waits for a place. Sent at submission if it has to wait, and every second after that. `position` counts from 1;
    /// `estimate_ms` is the remaining time, at the recent pace.
    Waiting {
        choice: u32,
        position: u32,
        estimate_ms: Option<u64>,
    },
    /// One entry per prompt token, the first of which is `None`. Sent before the first token.
    PromptLogprobs(Vec<Option<TokenLogprob>>),
    /// The prompt's embedding.
    Embedding(Vec<f32>),
    /// The sources of the first choice's prompt, as reported by its decode worker. Sent before the first token.
    Sources(TokensBySource),
    Token {
        choice: u32,
        token: Token,
        logprob: Option<TokenLogprob>,
    },
    /// The last event of a choice.
    Finished {
        choice: u32,
        outcome: Outcome,
        usage: ChoiceUsage,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Drew this stop token, which was reported as a token as well.
    Stop(Token),
    /// Reached `max_tokens`, or the model's context.
    Length,
    Failed(Failure),
}

/// The reason why a request got no complete answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the request took longer than its limit of {0} s")]
    Timeout(u64),
    #[error("no worker had room within {0} s; try again later")]
    QueueTimeout(u64),
    #[error("the request waited, and can no longer be answered within the limits of its service class; try again in {} s", retry_after_ms.div_ceil(1000))]
    Late { retry_after_ms: u64 },
    #[error("the request waited in a full queue, and gave way to others; try again in {} s", retry_after_ms.div_ceil(1000))]
    Displaced { retry_after_ms: u64 },
    #[error("the request was lost with {0} workers")]
    Losses(u32),
    #[error(
        "the request may need {tokens} tokens of context, and of the decode workers left the largest holds {context}; \
         ask for fewer tokens, or try again later"
    )]
    TooLong { tokens: u64, context: u32 },
    #[error("{0}")]
    Worker(String),
}

/// The reason why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("no decode worker is part of the cluster right now; try again later")]
    NoWorker,
    #[error(
        "no decode worker here keeps a limit on thoughts, as all run an earlier release: ask without one, or try again when they are upgraded"
    )]
    NoThoughtLimits,
    #[error("the cluster is full; try again later")]
    Full { retry_after_ms: u64 },
    #[error("this request would not be answered within the limits of its service class; try again in {} s", retry_after_ms.div_ceil(1000))]
    Late { retry_after_ms: u64 },
    #[error("this request needs {tokens} tokens of context, and the longest sequence this cluster can hold is {context}")]
    TooLong { tokens: u64, context: u32 },
    #[error(
        "{choices} choices, over all prompts, are more than the {limit} that may wait in this cluster (`queue_max`): ask for fewer at a time"
    )]
    TooManyChoices { choices: usize, limit: usize },
}

/// The sources of a choice's prompt, and its time by phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceUsage {
    /// As accounted by its decode worker; as planned if the gateway ended the choice.
    pub provenance: Provenance,
    /// Time spent waiting for a place.
    pub queue_ms: f64,
    /// The scheduler's prediction at its first place, queueing included; `None` if it never had a place.
    pub predicted_ttft_ms: Option<f64>,
    /// Time in the prefill worker's queue and computation for this request; as long as the worker has not reported it, the time that the
    /// decode worker waited for the blocks.
    pub prefill_ms: f64,
    pub decode_worker: String,
    pub prefill_worker: Option<String>,
    /// The number of times the choice was resumed on a different worker.
    pub rescues: u32,
}
