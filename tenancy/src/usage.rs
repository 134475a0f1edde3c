//! What was used: one [`Event`] per request that ran.
//!
//! - [`price`]: what it costs; [`report`]: events added up

pub mod price;
pub mod report;

use serde::{Deserialize, Serialize};

/// A request that has ended, however it did. Written once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// The answer's `x-request-id`. Another attempt has another.
    pub id: String,
    /// When it was taken, in Unix milliseconds.
    pub at_ms: u64,
    /// Empty: nobody needed a key.
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
    /// Among the output's.
    pub reasoning_tokens: u64,
    /// Where the prompt's KV came from, as far as that was known at the end.
    pub source: Source,
    pub queue_ms: f64,
    /// `None`: there was no token.
    pub ttft_ms: Option<f64>,
    pub total_ms: f64,
    pub outcome: String,
    /// In millionths.
    pub cost_micros: u64,
}

/// Prompt tokens by where their KV was.
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
    /// As quotas count.
    pub fn tokens(&self) -> u64 {
        self.prompt_tokens + self.output_tokens
    }
}
