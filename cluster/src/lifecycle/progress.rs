//! Tokens of running sequences.

use crate::{Cluster, RequestEvent, Warning};
use std::time::Duration;
use tidemill_proto::{
    ids::{Epoch, SequenceId},
    message::{SequenceToken, ToWorker, TokensBySource},
    sampling::TokenLogprob,
};

impl Cluster {
    pub(crate) fn token(&mut self, now: Duration, worker: Epoch, SequenceToken { sequence, index, token, logprob }: SequenceToken) {
        let Some(at) = self.requests.running_at(worker, sequence) else { return };
        let state = self.requests.choice_mut(at);
        let expected = state.generated.len() as u32;
        if index < expected {
            return; // Drawn again after a preemption; the client has it already.
        }
        if index > expected {
            self.warn(Warning::SkippedToken { worker, sequence, index, expected });
            self.send(worker, ToWorker::CancelSequence { sequence });
            return self.rescue(now, at);
        }
        state.generated.push(token);
        state.last_token = Some(now);
        let first = state.first_token.is_none();
        state.first_token.get_or_insert(now);
        let predicted = state.running().and_then(|running| Some((running.predicted_ttft_ms?, running.since)));
        state.is_kept();
        state.stop_waiting();
        if first {
            if let Some((predicted_ms, since)) = predicted {
                let class = self.requests.choice(at).0.new.class;
                self.cost.observe_ttft(class, predicted_ms, now.saturating_sub(since).as_secs_f64() * 1e3);
            }
            let ttft = now.saturating_sub(self.requests.choice(at).0.submitted);
            self.decisions.first_token(sequence, ttft);
        }
        let tenant = self.requests.choice(at).0.tenant;
        self.fairness.charge_drawn(tenant);
        self.load.grow_sequence(sequence);
        self.tell(at.0, RequestEvent::Token { choice: at.1 as u32, token, logprob });
    }

    pub(crate) fn embedding(&mut self, worker: Epoch, sequence: SequenceId, values: Vec<f32>) {
        let Some(at) = self.requests.running_at(worker, sequence) else { return };
        self.tell(at.0, RequestEvent::Embedding(values));
    }

    /// Reports the sources of the prompt's KV, for the first place of the first choice only: later ones find the KV where that one put it.
    pub(crate) fn sources(&mut self, worker: Epoch, sequence: SequenceId, tokens: TokensBySource) {
        let Some(at) = self.requests.running_at(worker, sequence) else { return };
        let (request, state) = self.requests.choice(at);
        if at.1 == 0 && state.generated.is_empty() {
            let tokens = request.of_prompt(&tokens);
            self.tell(at.0, RequestEvent::Sources(tokens));
        }
    }

    pub(crate) fn prompt_logprobs(&mut self, worker: Epoch, sequence: SequenceId, logprobs: Vec<Option<TokenLogprob>>) {
        let Some(at) = self.requests.running_at(worker, sequence) else { return };
        if !std::mem::replace(&mut self.requests.choice_mut(at).prompt_logprobs_seen, true) {
            self.tell(at.0, RequestEvent::PromptLogprobs(logprobs));
        }
    }
}
