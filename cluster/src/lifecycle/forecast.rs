//! A forecast of the wait for a request that has not been submitted.

use crate::{
    Cluster, candidates,
    class::ClassId,
    schedule::{self, Decision, Demand},
};
use std::time::Duration;

/// The predicted wait for one more request to a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// The number of sequences that wait already.
    pub waiting: usize,
    /// The predicted time to first token: infinite if there is no room now and no estimate; `None` if no worker could serve the request.
    pub ttft_ms: Option<f64>,
}

impl Cluster {
    /// Forecasts the wait for a prompt of `tokens` uncached tokens.
    pub fn forecast(&mut self, now: Duration, tokens: u32, class: ClassId) -> Forecast {
        let waiting = self.requests.waiting();
        Forecast { waiting, ttft_ms: self.ttft_forecast_ms(now, waiting, tokens, class) }
    }

    fn ttft_forecast_ms(&mut self, now: Duration, waiting: usize, tokens: u32, class: ClassId) -> Option<f64> {
        self.context_tokens?;
        self.reorder(now);
        let queued_ms = |places: usize| self.pace.wait_ms(places).unwrap_or(f64::INFINITY);
        if waiting > 0 {
            return Some(queued_ms(waiting + 1));
        }
        let blocks = self.index.leading(&[]);
        let demand = Demand {
            tokens,
            tokens_max: u64::from(tokens) + 1,
            local_only: false,
            joins: None,
            class,
            // The forecast needs the lateness itself, not a refusal.
            probe: true,
            due_ms: self.settings.classes.get(class).ttft_ms,
            seed: 0,
        };
        let books = self.books();
        let snapshot = self.snapshot(candidates::few(&books, &self.shortlist, &[], &blocks, 0, now), &blocks, now);
        match schedule::schedule(&self.settings.policy, &snapshot, &demand) {
            Decision::Place(placement) => Some(placement.ttft_ms),
            Decision::Queue | Decision::Hold | Decision::Reject { .. } => Some(queued_ms(1)),
            Decision::TooLong { .. } => None,
        }
    }
}
