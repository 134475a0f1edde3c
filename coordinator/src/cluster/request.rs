//! What a request is to the cluster, from the front door's call to the last choice's end.

use std::time::{Duration, Instant};
use tidemill_proto::{
    block::{BlockKey, Chain, LayoutFingerprint, Token},
    ids::{Epoch, SequenceId},
    message::{PrefillOutcome, Provenance, TokensBySource},
    sampling::{Sampling, StopRule, TokenLogprob},
};

/// One prompt as the front door hands it over: text is gone, defaults are filled in, ranges are checked.
#[derive(Clone, Debug)]
pub struct NewRequest {
    pub prompt: Vec<Token>,
    /// Tenant's cache salt.
    pub salt: Vec<u8>,
    /// Of the first choice; choice `j` draws with `seed + j`.
    pub sampling: Sampling,
    pub stop: StopRule,
    pub choices: u32,
    /// Report the prompt's log-probabilities (with the first choice), with this many likeliest tokens each.
    pub prompt_logprobs: Option<u32>,
    /// No request lives longer.
    pub timeout: Duration,
}

/// What the front door hears about a request.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestEvent {
    /// One entry per prompt token, the first `None`. Before the first token.
    PromptLogprobs(Vec<Option<TokenLogprob>>),
    Token {
        choice: u32,
        token: Token,
        logprob: Option<TokenLogprob>,
    },
    /// A choice's last word.
    Finished {
        choice: u32,
        outcome: Outcome,
        usage: Usage,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Drew this stop token, which was reported as a token, too.
    Stop(Token),
    /// `max_tokens`, or the model's context.
    Length,
    Failed(Failure),
}

/// Why a request got no (complete) answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the request took longer than its limit of {0} s")]
    Timeout(u64),
    #[error("no worker had room within {0} s; try again later")]
    QueueTimeout(u64),
    #[error("the request was given to {0} workers and none could finish it")]
    Attempts(u32),
    #[error("{0}")]
    Worker(String),
}

/// Why a request is not taken at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("no decode worker is part of the cluster right now; try again later")]
    NoWorker,
    #[error("the cluster is full; try again later")]
    Full { retry_after_ms: u64 },
    #[error("this request needs {tokens} tokens of context, and the longest sequence this cluster can hold is {context}")]
    TooLong { tokens: u64, context: u32 },
}

/// Where a choice's prompt came from and where its time went.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// The decode worker's own account; planned numbers where the front door ended the choice itself.
    pub provenance: Provenance,
    /// Waiting in this coordinator for a place.
    pub queue_ms: f64,
    /// The prefill worker's queue and computation for this request.
    pub prefill_ms: f64,
    pub decode_worker: String,
    pub prefill_worker: Option<String>,
    /// Times the choice went on at another worker.
    pub rescues: u32,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) new: NewRequest,
    pub(super) submitted: Instant,
    pub(super) sequences: Vec<Sequence>,
    pub(super) job: Option<Job>,
    pub(super) prefill_worker: Option<String>,
    pub(super) prefill_ms: f64,
}

/// A prefill job on its way. All sequences of a request wait for the same keys, so there is at most one.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) worker: Epoch,
    pub(super) pool: Epoch,
    /// Kept to give the job to another worker.
    pub(super) tokens: Vec<Token>,
    pub(super) keys: Vec<BlockKey>,
    pub(super) predicted_ms: f64,
    /// Workers that failed it.
    pub(super) tried: Vec<Epoch>,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) place: Place,
    pub(super) generated: Vec<Token>,
    /// Block keys of prompt and generated tokens, hashed when first needed.
    pub(super) chain: Option<(LayoutFingerprint, Chain)>,
    /// Times it was given to a worker.
    pub(super) attempts: u32,
    pub(super) prompt_logprobs_seen: bool,
    pub(super) usage: Usage,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    /// `not_before`: a worker that sent it back gets a moment to find room.
    Queued {
        since: Instant,
        not_before: Instant,
    },
    Running(Running),
    Done,
}

/// A sequence at a decode worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Running {
    pub(super) worker: Epoch,
    pub(super) pool: Option<Epoch>,
    pub(super) found_blocks: u32,
    pub(super) expected_blocks: u32,
    /// Computed by the worker itself before the first token; 0 from then on.
    pub(super) tail_tokens: u64,
    /// May still wait for blocks.
    pub(super) waits: bool,
}

impl Request {
    pub(super) fn tokens_of(&self, choice: usize) -> Vec<Token> {
        [&self.new.prompt[..], &self.sequences[choice].generated].concat()
    }

    pub(super) fn len_of(&self, choice: usize) -> u32 {
        (self.new.prompt.len() + self.sequences[choice].generated.len()) as u32
    }

    /// Whether the tokens so far already end the choice: its worker died between the last token and its last word.
    pub(super) fn ended_by_tokens(&self, choice: usize) -> Option<Outcome> {
        let StopRule { max_tokens, stop_tokens, .. } = &self.new.stop;
        let generated = &self.sequences[choice].generated;
        match generated.last() {
            Some(last) if stop_tokens.contains(last) => Some(Outcome::Stop(*last)),
            _ if generated.len() >= *max_tokens as usize => Some(Outcome::Length),
            _ => None,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.place == Place::Done)
    }

    /// Provenance as planned, for a choice that ends before its worker's own account.
    pub(super) fn planned(&self, running: &Running) -> TokensBySource {
        let block = tidemill_proto::block::BLOCK_TOKENS as u64;
        let found = u64::from(running.found_blocks) * block;
        let expected = u64::from(running.expected_blocks) * block;
        let prefill = expected.saturating_sub(found);
        let prompt = self.new.prompt.len() as u64;
        TokensBySource { dram: found, prefill, local: prompt.saturating_sub(found + prefill), ..TokensBySource::default() }
    }

    pub(super) fn record_prefill(&mut self, outcome: &PrefillOutcome) {
        if let PrefillOutcome::Done { queue_ms, compute_ms, .. } = outcome {
            self.prefill_ms = queue_ms + compute_ms;
        }
    }
}

/// Leading elements that `a` and `b` have in common.
pub(super) fn common_prefix(a: &[BlockKey], b: &[BlockKey]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
