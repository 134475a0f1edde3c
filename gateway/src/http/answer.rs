//! From the cluster's token ids back to text: one [`Answer`] per HTTP request, one `Choice` per sequence.
//!
//! Streaming and whole answers read the same deltas, so a client gets the same text either way. Dropping the answer (the
//! client left, or an error ended it) frees everything the request holds in the cluster.

use super::{
    errors::ApiError,
    openai::{PromptTokensDetails, StopReason, TidemillUsage, Usage},
    parse::Options,
};
use crate::{
    backend::Submission,
    metrics::{self, Objectives, RequestOutcome},
    text::{
        TextModel,
        detokenizer::Detokenizer,
        stop::{StopMatcher, Verdict},
    },
};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::{Outcome, RequestEvent};
use tidemill_proto::{block::Token, sampling::TokenLogprob};

/// What one choice gained.
#[derive(Debug, Default)]
pub struct Delta {
    pub index: u32,
    pub text: String,
    pub tokens: Vec<Token>,
    pub logprobs: Vec<Logprob>,
    /// One entry per prompt token, once, before the first token.
    pub prompt_logprobs: Option<Vec<Option<TokenLogprob>>>,
    pub finish: Option<Finish>,
}

#[derive(Debug)]
pub struct Logprob {
    pub token: Token,
    pub logprob: TokenLogprob,
    /// Characters of generated text before this token.
    pub offset: usize,
}

#[derive(Clone, Debug)]
pub struct Finish {
    pub reason: &'static str,
    pub stop_reason: Option<StopReason>,
}

/// A request that runs in the cluster.
#[derive(Debug)]
pub struct Answer {
    submission: Submission,
    objectives: Arc<Objectives>,
    /// When the request came in.
    arrived: Instant,
    /// Choice `j` of prompt `i` is at `i * choices_per_prompt + j`.
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    open: usize,
    ready: VecDeque<Delta>,
    usage: Usage,
    /// Counted when the answer is dropped.
    outcome: RequestOutcome,
}

impl Answer {
    /// `hidden`: a token is generated only because the cluster generates at least one; nobody asked for it.
    pub fn new(
        submission: Submission,
        prompts: &[Vec<Token>],
        options: &Options,
        hidden: bool,
        model: &TextModel,
        objectives: Arc<Objectives>,
    ) -> Self {
        let choices_per_prompt = options.choices as usize;
        let choice = |prompt: &Vec<Token>| Choice {
            detokenizer: Detokenizer::new(Arc::clone(&model.tokenizer), prompt, options.skip_special),
            stops: StopMatcher::new(options.stops.clone(), options.include_stop),
            stop_tokens: options.stop_tokens.clone(),
            eos_tokens: options.eos_tokens.clone(),
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            hidden,
            tokens: 0,
            characters: 0,
            closed: false,
            first: None,
            last: None,
        };
        let choices: Vec<_> = prompts.iter().flat_map(|prompt| (0..choices_per_prompt).map(move |_| prompt)).map(choice).collect();
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        Self {
            submission,
            objectives,
            arrived: options.arrived,
            open: choices.len(),
            choices,
            choices_per_prompt,
            ready: VecDeque::new(),
            usage: Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() },
            outcome: RequestOutcome::Cancelled,
        }
    }

    /// How many, over all prompts.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Totals so far; complete after the last delta.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The next delta of any choice; `None` after the last. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<Delta>, ApiError> {
        loop {
            if let Some(delta) = self.ready.pop_front() {
                return Ok(Some(delta));
            }
            if self.open == 0 {
                self.outcome = RequestOutcome::Ok;
                return Ok(None);
            }
            let Some((prompt, event)) = self.submission.next().await else {
                self.outcome = RequestOutcome::Failed;
                return Err(ApiError::internal("the answer was produced faster than it was read, and was cut"));
            };
            if let Err(error) = self.take(prompt, event) {
                self.outcome = error.outcome();
                return Err(error);
            }
        }
    }

    fn take(&mut self, prompt: usize, event: RequestEvent) -> Result<(), ApiError> {
        match event {
            RequestEvent::PromptLogprobs(logprobs) => {
                let index = prompt * self.choices_per_prompt;
                self.ready.push_back(Delta { index: index as u32, prompt_logprobs: Some(logprobs), ..Delta::default() });
            }
            RequestEvent::Token { choice, token, logprob } => self.token(prompt, choice, token, logprob),
            RequestEvent::Finished { choice, outcome, usage } => {
                let index = prompt * self.choices_per_prompt + choice as usize;
                let finish = match outcome {
                    // A stop string ended the choice before its worker did.
                    _ if self.choices[index].closed => return Ok(()),
                    Outcome::Failed(failure) => return Err(failure.into()),
                    Outcome::Stop(token) => self.choices[index].stopped_by(token),
                    Outcome::Length => Finish { reason: "length", stop_reason: None },
                };
                let (text, finish) = self.choices[index].finish(finish);
                self.close(index, usage);
                self.ready.push_back(Delta { index: index as u32, text, finish: Some(finish), ..Delta::default() });
            }
        }
        Ok(())
    }

    fn token(&mut self, prompt: usize, choice: u32, token: Token, logprob: Option<TokenLogprob>) {
        let index = prompt * self.choices_per_prompt + choice as usize;
        let state = &mut self.choices[index];
        if state.closed {
            return;
        }
        let now = Instant::now();
        match state.last.replace(now) {
            Some(last) => metrics::observe_itl(now - last),
            None => {
                state.first = Some(now);
                metrics::observe_ttft(now - self.arrived);
            }
        }
        if state.hidden {
            return;
        }
        self.usage.completion_tokens += 1;
        self.usage.total_tokens += 1;
        let offset = state.characters;
        let verdict = state.push(token);
        let logprobs = logprob.map(|logprob| Logprob { token, logprob, offset }).into_iter().collect();
        let mut delta = Delta { index: index as u32, tokens: vec![token], logprobs, ..Delta::default() };
        match verdict {
            Verdict::Continue(text) => delta.text = text,
            Verdict::Stopped { text, stop } => {
                delta.text = text;
                delta.finish = Some(Finish { reason: "stop", stop_reason: Some(StopReason::Text(stop)) });
                let usage = self.submission.end_choice(prompt, choice);
                self.close(index, usage);
            }
        }
        self.ready.push_back(delta);
    }

    fn close(&mut self, index: usize, usage: tidemill_cluster::ChoiceUsage) {
        let choice = &mut self.choices[index];
        choice.closed = true;
        self.open -= 1;
        if let (Some(first), Some(last)) = (choice.first, choice.last) {
            let tpot = (choice.tokens > 1).then(|| (last - first) / (choice.tokens - 1));
            self.objectives.observe(first - self.arrived, tpot);
            usage.predicted_ttft_ms.into_iter().for_each(metrics::observe_predicted_ttft);
        }
        if self.open == 0 {
            metrics::observe_e2e(self.arrived.elapsed());
        }
        let first_of_prompt = index.is_multiple_of(self.choices_per_prompt);
        let tidemill = self.usage.tidemill.get_or_insert_default();
        // Further choices of a prompt find its KV where the first one put it: only the first says where it came from.
        if first_of_prompt {
            tidemill.tokens.add(&usage.provenance.tokens);
            self.usage.prompt_tokens_details = PromptTokensDetails { cached_tokens: tidemill.tokens.cached() };
        }
        add(tidemill, usage);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        metrics::count_request(self.outcome);
    }
}

fn add(total: &mut TidemillUsage, usage: tidemill_cluster::ChoiceUsage) {
    let provenance = usage.provenance;
    for (total, ms) in [
        (&mut total.queue_ms, usage.queue_ms + provenance.queue_ms),
        (&mut total.fetch_ms, provenance.fetch_ms),
        (&mut total.prefill_ms, usage.prefill_ms),
        (&mut total.transfer_ms, provenance.transfer_ms),
        (&mut total.tail_ms, provenance.tail_ms),
        (&mut total.decode_ms, provenance.decode_ms),
    ] {
        *total = total.max(ms);
    }
    if total.decode_worker.is_empty() {
        total.decode_worker = usage.decode_worker;
    }
    total.prefill_worker = total.prefill_worker.take().or(usage.prefill_worker);
    total.preemptions += provenance.preemptions;
    total.rescues += usage.rescues;
}

/// One choice being turned into text.
#[derive(Debug)]
struct Choice {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    stop_tokens: Vec<Token>,
    eos_tokens: Vec<Token>,
    include_stop: bool,
    min_tokens: u32,
    hidden: bool,
    tokens: u32,
    /// Of generated text, whether sent or held back.
    characters: usize,
    closed: bool,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Choice {
    fn push(&mut self, token: Token) -> Verdict {
        self.tokens += 1;
        if self.stop_tokens.contains(&token) && !self.include_stop {
            return Verdict::Continue(String::new());
        }
        let text = self.detokenizer.push(token);
        self.characters += text.chars().count();
        self.stops.push(&text, self.tokens > self.min_tokens)
    }

    /// The rest of the text. It may hold a stop string's last character.
    fn finish(&mut self, finish: Finish) -> (String, Finish) {
        if self.hidden {
            return (String::new(), Finish { reason: "length", stop_reason: None });
        }
        let rest = self.detokenizer.finish();
        match self.stops.push(&rest, self.tokens > self.min_tokens) {
            Verdict::Continue(text) => (text + &self.stops.finish(), finish),
            Verdict::Stopped { text, stop } => (text, Finish { reason: "stop", stop_reason: Some(StopReason::Text(stop)) }),
        }
    }

    fn stopped_by(&self, token: Token) -> Finish {
        let by_client = !self.eos_tokens.contains(&token);
        Finish { reason: "stop", stop_reason: by_client.then_some(StopReason::Token(token)) }
    }
}

/// How long a stream's first event may take before the status line goes out without it. Until then an error still has
/// its own status.
const FIRST_EVENT_MAX: Duration = Duration::from_secs(5);

impl Answer {
    /// Waits a moment for the first delta, so that a request that fails early fails with a status. It stays in line.
    pub async fn settle(&mut self) -> Result<(), ApiError> {
        match tokio::time::timeout(FIRST_EVENT_MAX, self.next()).await {
            Ok(Ok(Some(delta))) => self.ready.push_front(delta),
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(error)) => return Err(error),
        }
        Ok(())
    }
}
