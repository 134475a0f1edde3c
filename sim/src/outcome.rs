//! The outcome of each request, and the load over time.

use crate::settings::Class;
use serde::Serialize;
use std::time::Duration;
use tidemill_proto::message::TokensBySource;

/// One request of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub class: usize,
    pub at: Duration,
    pub input_tokens: u32,
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
    pub tokens: u32,
    /// The longest time between two tokens.
    pub gap_max: Duration,
    pub end: End,
    /// The time at which the client learned of its end.
    pub ended: Duration,
    pub predicted_ttft_ms: Option<f64>,
    pub sources: TokensBySource,
    pub prefilled_elsewhere: bool,
    pub rescues: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Complete,
    /// The request was not accepted at all.
    Rejected(String),
    Failed(String),
    /// The run ended before the request did.
    Open,
}

/// The load at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LoadPoint {
    pub s: f64,
    /// The number of requests that wait for a place.
    pub waiting: u32,
    /// The number of prompt tokens that prefill workers have and have not computed, on average.
    pub prefill_tokens: f64,
    /// The time of those tokens relative to the tightest TTFT limit, on average over prefill workers.
    pub prefill_load: f64,
    /// The number of sequences that decode workers hold, on average.
    pub decode_sequences: f64,
    /// The last step's time relative to the tightest TPOT limit, on average over decode workers.
    pub decode_load: f64,
    /// The share of decode workers' device blocks in use, on average.
    pub decode_blocks: f64,
    /// The workers that occupy devices, including those that are starting or draining.
    pub workers: Workers,
}

/// Numbers by role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Workers {
    pub prefill: u32,
    pub decode: u32,
}

impl Workers {
    pub(crate) fn of_mut(&mut self, decodes: bool) -> &mut u32 {
        if decodes { &mut self.decode } else { &mut self.prefill }
    }
}

impl Answer {
    pub fn ttft_ms(&self) -> Option<f64> {
        Some(millis(self.first_token? - self.at))
    }

    /// Time per token after the first; `None` for a single token.
    pub fn tpot_ms(&self) -> Option<f64> {
        let (first, last) = (self.first_token?, self.last_token?);
        (self.tokens > 1).then(|| millis(last - first) / f64::from(self.tokens - 1))
    }

    /// Whether the answer is complete and within both limits.
    pub fn is_good(&self, class: &Class) -> bool {
        let within = |ms: Option<f64>, limit: Option<f64>| ms.zip(limit).is_none_or(|(ms, limit)| ms <= limit);
        self.end == End::Complete && within(self.ttft_ms(), class.ttft_ms) && within(self.tpot_ms(), class.tpot_ms)
    }
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
