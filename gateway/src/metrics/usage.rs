//! Token counts, times and sources of an answer, as the APIs show them.

use crate::context::{Strategy, summary::State};
use serde::{Serialize, Serializer};
use tidemill_proto::message::TokensBySource;

#[derive(Clone, Debug, Default, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
    /// Complete with the last choice; `null` in running totals.
    pub tidemill: Option<TidemillUsage>,
}

impl Usage {
    /// Adds a later round's usage.
    pub fn add(&mut self, later: &Usage) {
        self.prompt_tokens += later.prompt_tokens;
        self.completion_tokens += later.completion_tokens;
        self.total_tokens += later.total_tokens;
        self.prompt_tokens_details.cached_tokens += later.prompt_tokens_details.cached_tokens;
        self.completion_tokens_details.reasoning_tokens += later.completion_tokens_details.reasoning_tokens;
        self.tidemill = match (self.tidemill.take(), later.tidemill.clone()) {
            (Some(earlier), Some(later)) => Some(earlier.then(later)),
            (earlier, later) => later.or(earlier),
        };
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct CompletionTokensDetails {
    pub reasoning_tokens: u64,
}

/// Sources of the prompt's KV, and time by phase. With several choices, the slowest counts in each phase.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TidemillUsage {
    /// They add up to `prompt_tokens`, unless the answer is that of a similar question.
    pub tokens: TokensBySource,
    pub queue_ms: f64,
    pub fetch_ms: f64,
    pub prefill_ms: f64,
    pub transfer_ms: f64,
    pub tail_ms: f64,
    pub decode_ms: f64,
    pub decode_worker: String,
    pub prefill_worker: Option<String>,
    pub preemptions: u32,
    pub rescues: u32,
    /// Drafted tokens of all choices (guessed and computed ahead by the decode worker), and those of them that were confirmed.
    pub tokens_drafted: u64,
    pub tokens_accepted: u64,
    /// Whether the whole answer was cached. For an equal request, `tokens` has the sources of the KV at the time of computation; for a
    /// similar question, they are all 0.
    pub response_cache: FromCache,
    /// The similar question whose answer was reused, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub similar_to: Option<SimilarQuestion>,
    /// The model that answered, if the route chose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<RouteUsage>,
    /// The parts of the dialog that were left out, if that was allowed, and those that were added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<ContextUsage>,
}

/// `false`, `true` (the answer of an equal request), or `"semantic"` (that of a similar question).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FromCache {
    #[default]
    No,
    Equal,
    Similar,
}

impl Serialize for FromCache {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::No => serializer.serialize_bool(false),
            Self::Equal => serializer.serialize_bool(true),
            Self::Similar => serializer.serialize_str("semantic"),
        }
    }
}

/// The similar question whose answer was reused.
#[derive(Clone, Debug, Serialize)]
pub struct SimilarQuestion {
    /// The id of the response that was computed for it.
    pub response: String,
    /// The similarity, from 0 to 1.
    pub similarity: f32,
}

impl TidemillUsage {
    /// Adds the usage of a later answer.
    fn then(self, later: Self) -> Self {
        let mut tokens = self.tokens;
        tokens.add(&later.tokens);
        Self {
            tokens,
            queue_ms: self.queue_ms + later.queue_ms,
            fetch_ms: self.fetch_ms + later.fetch_ms,
            prefill_ms: self.prefill_ms + later.prefill_ms,
            transfer_ms: self.transfer_ms + later.transfer_ms,
            tail_ms: self.tail_ms + later.tail_ms,
            decode_ms: self.decode_ms + later.decode_ms,
            preemptions: self.preemptions + later.preemptions,
            rescues: self.rescues + later.rescues,
            tokens_drafted: self.tokens_drafted + later.tokens_drafted,
            tokens_accepted: self.tokens_accepted + later.tokens_accepted,
            response_cache: if self.response_cache == later.response_cache { later.response_cache } else { FromCache::No },
            ..later
        }
    }
}

/// The model that answered, and the reason.
#[derive(Clone, Debug, Serialize)]
pub struct RouteUsage {
    /// The model name in the request.
    pub asked: Option<String>,
    pub model: String,
    pub why: String,
}

/// In `usage.tidemill`: the parts of the dialog that were left out, and their replacement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ContextUsage {
    pub strategy: Strategy,
    /// Turns of the whole dialog: each from a user's message up to the next.
    pub turns: usize,
    pub turns_left_out: usize,
    pub tokens_left_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<SummaryUsage>,
    /// Retrieved old messages, by their ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retrieved: Option<RetrievedUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryUsage>,
    /// The ranking of old messages and facts, if there was one, and an encoder reads them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranked: Option<RankedUsage>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankedUsage {
    pub by: RankedBy,
    /// The number of texts.
    pub texts: usize,
    /// The number of those whose vectors were there.
    pub vectors: usize,
    /// The reason why the question was not read, if it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RankedBy {
    Words,
    /// By words and vectors.
    Both,
}

impl RankedBy {
    pub fn name(self) -> &'static str {
        match self {
            Self::Words => "words",
            Self::Both => "both",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SummaryUsage {
    pub state: State,
    /// The number of turns that the summary covers.
    pub turns: usize,
    pub tokens: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RetrievedUsage {
    pub messages: Vec<String>,
    pub tokens: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    pub facts: usize,
    /// The number of those that were chosen by what was said last, if not all fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub facts_chosen: Option<usize>,
    pub facts_left_out: usize,
    pub tokens: u64,
    /// The reason why there are none, if the store does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
