//! The state of one request and of each of its choices.

use crate::{ChoiceUsage, NewRequest, Origin, Outcome, class::Classes, schedule::SourceRun};
use std::time::Duration;
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, Token},
    ids::{Epoch, SequenceId},
    message::{PrefillOutcome, Provenance, TokensBySource},
    sampling::StopRule,
    tokens::Tokens,
    urgency::Urgency,
};

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) new: NewRequest,
    pub(crate) submitted: Duration,
    /// The tenant: a digest of the salt's tenant part.
    pub(crate) tenant: u64,
    pub(crate) sequences: Vec<Sequence>,
    /// The prefill job. All sequences of a request wait for the same keys, so there is at most one.
    pub(crate) prefill: Option<PendingPrefill>,
    /// The time when the last prefill job was done, and the pool node that has its blocks, as long as sequences may still fetch them.
    pub(crate) handed_over: Option<(Duration, Epoch)>,
    /// Prefill workers that may still answer a cancelled job of this request. Answers name the request and not the job, so these workers
    /// get no further job of it.
    pub(crate) cancelled_at: Vec<Epoch>,
    pub(crate) prefill_worker: Option<String>,
    pub(crate) prefill_ms: f64,
    /// The workers that must serve the request, if it is a probe.
    pub(crate) pin: Option<Pin>,
}

/// The workers that a probe tests. Without a prefill worker, the decode worker computes the whole prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pin {
    pub(crate) decode: Epoch,
    pub(crate) prefill: Option<Epoch>,
}

/// A prefill job under way, with all the data that a different worker needs to take it over.
#[derive(Debug)]
pub(crate) struct PendingPrefill {
    pub(crate) worker: Epoch,
    /// The leading blocks that exist.
    pub(crate) read: Vec<SourceRun>,
    /// The node that stores the computed blocks.
    pub(crate) home: Epoch,
    pub(crate) tokens: Tokens,
    /// The salt of its blocks' keys.
    pub(crate) salt: Vec<u8>,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) predicted_ms: f64,
    /// Workers at which it failed.
    pub(crate) tried: Vec<Epoch>,
    pub(crate) urgency: Urgency,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(super) place: Place,
    pub(crate) generated: Vec<Token>,
    /// The block keys of prompt and generated tokens, hashed when first needed.
    hashed: Option<Hashed>,
    /// The number of workers that were lost with it.
    pub(crate) losses: u32,
    /// The number of times in a row that workers sent it back without a new token.
    pub(crate) returns: u32,
    /// Time in the queue since its last token, without the current wait.
    pub(crate) waited: Duration,
    /// The number of later sequences that were placed first.
    pub(crate) overtaken: u32,
    /// The times at which the first and the last token were drawn.
    pub(crate) first_token: Option<Duration>,
    pub(crate) last_token: Option<Duration>,
    /// The prediction of its only decode worker; `None` if it had several.
    pub(crate) predicted_tpot_ms: Option<f64>,
    pub(crate) prompt_logprobs_seen: bool,
    /// The prompt's sources, as accounted by the first worker that admitted the sequence and then sent it back.
    pub(crate) first_sources: Option<TokensBySource>,
    pub(crate) usage: ChoiceUsage,
}

#[derive(Debug)]
struct Hashed {
    origin: Origin,
    /// The request's salt in that era.
    salt: Vec<u8>,
    chain: Chain,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
    /// Until `not_before`, a worker that sent it back gets time to find room.
    Queued {
        since: Duration,
        not_before: Duration,
    },
    Running(Running),
    Done,
}

/// A sequence at a decode worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Running {
    pub(crate) worker: Epoch,
    /// The pool node at which it waits for blocks, if it waits.
    pub(crate) home: Option<Epoch>,
    /// Planned sources of the expected blocks, generated tokens included.
    pub(crate) planned: TokensBySource,
    /// Whether it may still wait for blocks.
    pub(crate) waits: bool,
    pub(crate) since: Duration,
    /// Predicted time from `since` to its first token, unless a token was drawn before.
    pub(crate) predicted_ttft_ms: Option<f64>,
}

impl Sequence {
    pub(crate) fn queued(id: SequenceId, now: Duration) -> Self {
        Self {
            id,
            place: Place::Queued { since: now, not_before: now },
            generated: Vec::new(),
            hashed: None,
            losses: 0,
            returns: 0,
            waited: Duration::ZERO,
            overtaken: 0,
            first_token: None,
            last_token: None,
            predicted_tpot_ms: None,
            prompt_logprobs_seen: false,
            first_sources: None,
            usage: ChoiceUsage::default(),
        }
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    pub(crate) fn running(&self) -> Option<Running> {
        match self.place {
            Place::Running(running) => Some(running),
            Place::Queued { .. } | Place::Done => None,
        }
    }

    pub(crate) fn is_queued(&self) -> bool {
        matches!(self.place, Place::Queued { .. })
    }

    /// Whether it may still wait for blocks at this pool node.
    pub(crate) fn waits_at(&self, home: Epoch) -> bool {
        self.running().is_some_and(|running| running.waits && running.home == Some(home))
    }

    /// Ends its wait for blocks.
    pub(crate) fn stop_waiting(&mut self) {
        if let Place::Running(running) = &mut self.place {
            running.waits = false;
        }
    }

    /// Mean time per token after the first.
    pub(crate) fn tpot_ms(&self) -> Option<f64> {
        let between = self.last_token?.saturating_sub(self.first_token?);
        let tokens = self.generated.len().checked_sub(1).filter(|&tokens| tokens > 0)?;
        Some(between.as_secs_f64() * 1e3 / tokens as f64)
    }

    /// Whether it had a place before.
    pub(crate) fn is_resumed(&self) -> bool {
        self.usage.predicted_ttft_ms.is_some()
    }

    /// Notes that a worker had room for it: its waits are counted from zero again.
    pub(crate) fn is_kept(&mut self) {
        (self.returns, self.waited) = (0, Duration::ZERO);
    }

    /// Keys of its full blocks that have been hashed.
    pub(crate) fn keys(&self) -> &[BlockKey] {
        self.hashed.as_ref().map_or(&[], |hashed| hashed.chain.keys())
    }

    /// The salt of these keys.
    pub(crate) fn salt(&self) -> &[u8] {
        self.hashed.as_ref().map_or(&[], |hashed| &hashed.salt)
    }
}

impl Request {
    /// Prompt and generated tokens. The prompt is copied only for a sequence that has generated some.
    pub(crate) fn tokens_of(&self, choice: usize) -> Tokens {
        let generated = &self.sequences[choice].generated;
        if generated.is_empty() { self.new.prompt.clone() } else { [&self.new.prompt, &generated[..]].concat().into() }
    }

    pub(crate) fn len_of(&self, choice: usize) -> u32 {
        (self.new.prompt.len() + self.sequences[choice].generated.len()) as u32
    }

    /// The longest that a sequence can become.
    pub(crate) fn tokens_max(&self) -> u64 {
        self.new.tokens_max()
    }

    /// The number of likeliest tokens to report with the prompt's log-probabilities, if the choice is the first and has not reported them.
    pub(crate) fn prompt_logprobs(&self, choice: usize) -> Option<u32> {
        self.new.prompt_logprobs.filter(|_| choice == 0 && !self.sequences[choice].prompt_logprobs_seen)
    }

    /// Brings a choice's block keys up to its tokens, under this layout and in this era.
    pub(crate) fn hash(&mut self, choice: usize, origin: Origin) {
        let full = self.len_of(choice) as usize / BLOCK_TOKENS;
        let known = self.sequences[choice].hashed.as_ref().filter(|known| known.origin == origin);
        if known.is_some_and(|known| known.chain.keys().len() == full) {
            return;
        }
        let tokens = self.tokens_of(choice);
        match &mut self.sequences[choice].hashed {
            Some(known) if known.origin == origin => known.chain.extend_to(&tokens),
            hashed => {
                let salt = origin.era.salt(&self.new.salt);
                let chain = Chain::new(&origin.layout, &salt, &tokens);
                *hashed = Some(Hashed { origin, salt, chain });
            }
        }
    }

    /// The outcome of a choice whose tokens already end it: its worker was lost between the last token and its last event.
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

    /// The time at which a choice's first token is due; `None` without a limit, or if it has been drawn.
    pub(crate) fn due(&self, choice: usize, classes: &Classes) -> Option<Duration> {
        let limit_ms = classes.get(self.new.class).ttft_ms.filter(|_| self.sequences[choice].generated.is_empty())?;
        Some(self.submitted + Duration::from_secs_f64(limit_ms / 1e3))
    }

    /// The time left until the timeout.
    pub(crate) fn remaining(&self, now: Duration) -> Duration {
        self.new.timeout.saturating_sub(now.saturating_sub(self.submitted))
    }

    /// A choice's usage so far.
    pub(crate) fn usage(&self, choice: usize) -> ChoiceUsage {
        let usage = self.sequences[choice].usage.clone();
        // The blocks may come, and a short answer end, before the worker's report does.
        let is_unreported = self.prefill.is_some() && usage.provenance.tokens.prefill > 0;
        let prefill_ms = if is_unreported { usage.provenance.transfer_ms } else { self.prefill_ms };
        ChoiceUsage { prefill_ms, prefill_worker: self.prefill_worker.clone(), ..usage }
    }

    /// The prompt's sources as planned, for a choice that ends before its worker accounts for it.
    pub(crate) fn planned(&self, running: &Running) -> TokensBySource {
        self.of_prompt(&running.planned)
    }

    /// Stores a worker's account of a choice. The prompt's sources are those of the first worker that admitted it.
    pub(crate) fn account(&mut self, choice: usize, provenance: Provenance) {
        let tokens = self.of_prompt(&provenance.tokens);
        let sequence = &mut self.sequences[choice];
        sequence.usage.provenance = Provenance { tokens: sequence.first_sources.unwrap_or(tokens), ..provenance };
    }

    /// Stores the account of a worker that sends a choice back. It is empty if that worker never admitted it.
    pub(crate) fn account_of_returned(&mut self, choice: usize, tokens: &TokensBySource) {
        if *tokens != TokensBySource::default() {
            let tokens = self.of_prompt(tokens);
            self.sequences[choice].first_sources.get_or_insert(tokens);
        }
    }

    /// Reduces an account to the prompt's tokens. For a rescued sequence's worker, tokens generated before are part of the prompt; and a
    /// peer's numbers need not add up. Only full blocks are ever fetched, so the worker computed the rest.
    pub(crate) fn of_prompt(&self, tokens: &TokensBySource) -> TokensBySource {
        let prompt = self.new.prompt.len() as u64;
        let mut fetched = prompt - prompt % BLOCK_TOKENS as u64;
        let mut local = prompt;
        let mut take = |tokens: u64| {
            let taken = tokens.min(fetched);
            fetched -= taken;
            local -= taken;
            taken
        };
        let TokensBySource { hbm, dram, nvme, object, remote, prefill, local: _ } = *tokens;
        let [hbm, dram, nvme, object, remote, prefill] = [hbm, dram, nvme, object, remote, prefill].map(&mut take);
        TokensBySource { hbm, dram, nvme, object, remote, prefill, local }
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
