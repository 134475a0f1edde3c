//! What a request is to the cluster, from the front door's call to the last choice's end.

use crate::schedule::SourceRun;
use std::time::{Duration, Instant};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Token},
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

/// Why a request is not taken at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("no decode worker is part of the cluster right now; try again later")]
    NoWorker,
    #[error("the cluster is full; try again later")]
    Full { retry_after_ms: u64 },
    #[error("this request needs {tokens} tokens of context, and the longest sequence this cluster can hold is {context}")]
    TooLong { tokens: u64, context: u32 },
    #[error(
        "{choices} choices, over all prompts, are more than the {limit} that may wait in this cluster (`queue_max`): ask for fewer at a time"
    )]
    TooManyChoices { choices: usize, limit: usize },
}

/// Where a choice's prompt came from and where its time went.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// The decode worker's own account; planned numbers where the front door ended the choice itself.
    pub provenance: Provenance,
    /// Waiting in this coordinator for a place.
    pub queue_ms: f64,
    /// That, and from its first place to its first token, as the scheduler expected it. `None`: it had no place.
    pub predicted_ttft_ms: Option<f64>,
    /// The prefill worker's queue and computation for this request.
    pub prefill_ms: f64,
    pub decode_worker: String,
    pub prefill_worker: Option<String>,
    /// Times the choice went on at another worker.
    pub rescues: u32,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) new: NewRequest,
    pub(crate) submitted: Instant,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) job: Option<Job>,
    /// When the last prefill job was done, and the pool node it put its blocks into, while sequences may still fetch them.
    pub(crate) handed_over: Option<(Instant, Epoch)>,
    /// Prefill workers that may still answer a job of this request that was cancelled. Answers name the request, not the
    /// job, so these get no other job of it.
    pub(crate) cancelled_at: Vec<Epoch>,
    pub(crate) prefill_worker: Option<String>,
    pub(crate) prefill_ms: f64,
}

/// A prefill job on its way. All sequences of a request wait for the same keys, so there is at most one.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) worker: Epoch,
    /// Leading blocks that exist.
    pub(crate) read: Vec<SourceRun>,
    /// Takes what is computed.
    pub(crate) home: Epoch,
    /// Kept to give the job to another worker.
    pub(crate) tokens: Vec<Token>,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) predicted_ms: f64,
    /// Workers that failed it.
    pub(crate) tried: Vec<Epoch>,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) place: Place,
    pub(crate) generated: Vec<Token>,
    /// Block keys of prompt and generated tokens, hashed when first needed.
    pub(crate) chain: Option<(LayoutFingerprint, Chain)>,
    /// Workers that it was lost with.
    pub(crate) losses: u32,
    /// Times in a row that a worker sent it back before another token.
    pub(crate) returns: u32,
    /// For a place, since its last token, before the wait that it may be in now.
    pub(crate) waited: Duration,
    pub(crate) prompt_logprobs_seen: bool,
    /// What the first worker that admitted it said of its prompt's origin, and then sent it back.
    pub(crate) first_account: Option<TokensBySource>,
    pub(crate) usage: Usage,
}

impl Sequence {
    /// A worker had room for it: from now on it waits anew.
    pub(crate) fn is_kept(&mut self) {
        (self.returns, self.waited) = (0, Duration::ZERO);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
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
pub(crate) struct Running {
    pub(crate) worker: Epoch,
    /// The pool node that it waits at, if it waits.
    pub(crate) home: Option<Epoch>,
    /// Where expected blocks' tokens should come from, the prompt's and others.
    pub(crate) planned: TokensBySource,
    /// Computed by the worker itself before the first token; 0 from then on.
    pub(crate) tail_tokens: u64,
    /// May still wait for blocks.
    pub(crate) waits: bool,
}

impl Request {
    pub(crate) fn tokens_of(&self, choice: usize) -> Vec<Token> {
        [&self.new.prompt[..], &self.sequences[choice].generated].concat()
    }

    pub(crate) fn len_of(&self, choice: usize) -> u32 {
        (self.new.prompt.len() + self.sequences[choice].generated.len()) as u32
    }

    /// The longest it can become.
    pub(crate) fn tokens_max(&self) -> u64 {
        self.new.prompt.len() as u64 + u64::from(self.new.stop.max_tokens)
    }

    /// Whether the tokens so far already end the choice: its worker died between the last token and its last word.
    pub(crate) fn ended_by_tokens(&self, choice: usize) -> Option<Outcome> {
        let StopRule { max_tokens, stop_tokens, .. } = &self.new.stop;
        let generated = &self.sequences[choice].generated;
        match generated.last() {
            Some(last) if stop_tokens.contains(last) => Some(Outcome::Stop(*last)),
            _ if generated.len() >= *max_tokens as usize => Some(Outcome::Length),
            _ => None,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.place == Place::Done)
    }

    /// Provenance as planned, for a choice that ends before its worker's own account.
    pub(crate) fn planned(&self, running: &Running) -> TokensBySource {
        self.of_prompt(&running.planned)
    }

    /// Takes a worker's account of a choice. That of the prompt's origin counts from whoever admitted it first.
    pub(crate) fn account(&mut self, choice: usize, provenance: Provenance) {
        let tokens = self.of_prompt(&provenance.tokens);
        let sequence = &mut self.sequences[choice];
        sequence.usage.provenance = Provenance { tokens: sequence.first_account.unwrap_or(tokens), ..provenance };
    }

    /// Takes the account of a worker that sends a choice back. It has nothing to say if it never admitted it.
    pub(crate) fn account_of_returned(&mut self, choice: usize, tokens: &TokensBySource) {
        if *tokens != TokensBySource::default() {
            let tokens = self.of_prompt(tokens);
            self.sequences[choice].first_account.get_or_insert(tokens);
        }
    }

    /// An account over the prompt's tokens alone. To a rescued sequence's worker, tokens generated before look like prompt;
    /// and what a peer says need not add up. Only full blocks are ever fetched, so the rest was computed by the worker.
    fn of_prompt(&self, tokens: &TokensBySource) -> TokensBySource {
        let prompt = self.new.prompt.len() as u64;
        let mut fetched = prompt - prompt % BLOCK_TOKENS as u64;
        let mut local = prompt;
        let mut take = |tokens: u64| {
            let taken = tokens.min(fetched);
            fetched -= taken;
            local -= taken;
            taken
        };
        let TokensBySource { hbm, dram, nvme, remote, prefill, local: _ } = *tokens;
        let [hbm, dram, nvme, remote, prefill] = [hbm, dram, nvme, remote, prefill].map(&mut take);
        TokensBySource { hbm, dram, nvme, remote, prefill, local }
    }

    pub(crate) fn record_prefill(&mut self, outcome: &PrefillOutcome) {
        if let PrefillOutcome::Done { queue_ms, compute_ms, .. } = outcome {
            self.prefill_ms = queue_ms + compute_ms;
        }
    }
}

/// Leading elements that `a` and `b` have in common.
pub(crate) fn common_prefix(a: &[BlockKey], b: &[BlockKey]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
