//! Usage: one [`Event`] per request that ran.
//!
//! - [`price`]: the price of tokens; [`report`]: sums of events; [`spend`]: what was spent today and this month

pub mod price;
pub mod report;
pub mod spend;

use crate::quota::Use;
use serde::{Deserialize, Serialize};

/// A request that has ended in any way. Written once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// The answer's `x-request-id`. A retry has a different one.
    pub id: String,
    /// The time at which the request was accepted, in Unix milliseconds.
    pub at_ms: u64,
    /// The tenant; empty if no key was needed.
    pub tenant: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    pub model: String,
    pub class: String,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Tokens of reasoning, which are among the output's.
    pub reasoning_tokens: u64,
    /// The sources of the prompt's KV, as far as known at the end.
    pub source: Source,
    pub queue_ms: f64,
    /// `None` without a token.
    pub ttft_ms: Option<f64>,
    pub total_ms: f64,
    pub outcome: String,
    /// The cost in millionths of the currency.
    pub cost_micros: u64,
}

/// Prompt tokens by the source of their KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    pub hbm: u64,
    pub dram: u64,
    pub nvme: u64,
    /// Events of earlier versions lack it.
    #[serde(default)]
    pub object: u64,
    pub remote: u64,
    pub prefill: u64,
    pub local: u64,
}

impl Event {
    /// The use that quotas count.
    pub fn used(&self) -> Use {
        Use { tokens: self.prompt_tokens + self.output_tokens, cost_micros: self.cost_micros }
    }
}
