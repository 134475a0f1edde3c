//! A running request's events as deltas of its choices: one [`Answer`] per HTTP request, one [`Pipeline`] per choice.
//!
//! Streams and whole answers read the same deltas, so a client gets the same text either way. Dropping the answer (the client
//! left, or an error ended it) frees everything the request holds in the cluster.
//!
//! - `delta`: the parts of an answer; `reader`: from tokens to text; `moderation`: the moderator's interface; `books`: the answer's
//!   records, and `traced`: its spans

mod books;
mod delta;
mod moderation;
mod reader;
mod traced;

pub use books::Books;
pub use delta::{Delta, News, Ran, Waiting};
pub use moderation::Moderation;
pub use reader::Reader;
pub use traced::Traced;

use crate::{
    features::feedback::Feedback,
    generation::{
        Pipeline,
        guarded::ModerationVerdict,
        piece::{Ended, Finish, Piece},
    },
    metrics::{
        self, RequestOutcome,
        usage::{FromCache, PromptTokensDetails, SimilarQuestion, Usage},
    },
    requests::{error::ApiError, options::Options},
    rollout::{running::Seat, seen::Ended as RequestEnded, shadow::Tap},
    safety,
    serving::backend::{SimilarTo, Submission},
};
use books::Remembered;
use futures_util::FutureExt;
use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::{ChoiceUsage, Outcome, RequestEvent, class::ClassId};
use tidemill_proto::{block::Token, sampling::TokenLogprob, tokens::Tokens};

/// The time that a stream's first event may take before the status line is sent without it. Until then an error still has its own status.
const FIRST_EVENT_MAX: Duration = Duration::from_secs(5);

/// The answer of a request that runs in the cluster.
#[derive(Debug)]
pub struct Answer {
    submission: Submission,
    books: Books,
    class: ClassId,
    /// The time at which the request arrived.
    arrived: Instant,
    /// All choices: choice `j` of prompt `i` is at `i * choices_per_prompt + j`.
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    /// Whether each choice's only token is generated just because the cluster generates at least one. It is not shown.
    hidden: bool,
    open: usize,
    ready: VecDeque<News>,
    /// The first place in the queue that the cluster reported.
    waited: Option<Waiting>,
    usage: Usage,
    /// The slowest choice's times, and whether all choices kept their class's limits.
    seen: RequestEnded,
    /// The outcome, which is counted when the answer is dropped.
    outcome: RequestOutcome,
    /// The first choice's text, if users may give feedback on it.
    remembered: Option<Remembered>,
    /// The moderator of uncertain findings, if there is one.
    moderation: Option<Box<dyn Moderation>>,
}

#[derive(Debug)]
struct Choice {
    pipeline: Pipeline,
    /// Whether no more tokens will come. The last piece may still wait for the moderator.
    closed: bool,
    /// The cluster's usage, until it has been sent.
    usage: Option<ChoiceUsage>,
    /// Whether the moderator is checking an uncertain finding of this choice.
    asked: bool,
    tokens: u32,
    first: Option<Instant>,
    last: Option<Instant>,
}

/// An event that an answer waits for.
#[derive(Debug)]
enum Step {
    /// An event with its prompt's index; `None` if no more events can come.
    Event(Option<(usize, RequestEvent)>),
    /// The verdict on a choice's uncertain finding.
    Verdict(usize, ModerationVerdict),
}

impl Answer {
    pub fn new(submission: Submission, prompts: &[Tokens], options: &Options, hidden: bool, reader: &Reader<'_>, books: Books) -> Self {
        let choices_per_prompt = options.choices as usize;
        let choice = |(prompt, choice): (&Tokens, u32)| Choice {
            pipeline: reader.pipeline(prompt, options, choice),
            closed: false,
            usage: None,
            asked: false,
            tokens: 0,
            first: None,
            last: None,
        };
        let choices = prompts.iter().flat_map(|prompt| (0..options.choices).map(move |choice| (prompt, choice)));
        let choices: Vec<_> = choices.map(choice).collect();
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        Self {
            submission,
            books,
            class: options.class,
            arrived: options.arrived,
            open: choices.len(),
            choices,
            choices_per_prompt,
            hidden,
            ready: VecDeque::new(),
            waited: None,
            usage: Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() },
            seen: RequestEnded { kept: true, ..RequestEnded::default() },
            outcome: RequestOutcome::Cancelled,
            remembered: None,
            moderation: None,
        }
    }

    /// Sets the moderator of its uncertain findings.
    pub fn moderated_by(mut self, moderation: Option<Box<dyn Moderation>>) -> Self {
        self.moderation = moderation;
        self
    }

    /// Keeps the answer's text under this id, for feedback.
    pub fn remember(&mut self, feedback: Arc<Feedback>, id: &str) {
        self.remembered = Some(Remembered { feedback, id: id.to_owned(), text: String::new() });
    }

    /// Continues `earlier`: for a client, both are one answer.
    pub fn go_on_from(&mut self, earlier: &mut Self) {
        self.remembered = earlier.remembered.take();
        self.waited = earlier.waited;
    }

    /// Counts the choices of all prompts together.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Returns the usage so far; complete after the last delta.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The place at which the request started to wait; `None` if it did not have to.
    pub fn waited(&self) -> Option<Waiting> {
        self.waited
    }

    /// The cached response of a similar question that this answer repeats, if it does.
    pub fn similar_to(&self) -> Option<&SimilarTo> {
        self.submission.similar_to()
    }

    /// Returns the next delta of any choice; `None` after the last. Cancel safe.
    pub async fn next_delta(&mut self) -> Result<Option<Delta>, ApiError> {
        loop {
            match self.next().await? {
                Some(News::Delta(delta)) => return Ok(Some(delta)),
                Some(News::Waiting(_)) => {}
                None => return Ok(None),
            }
        }
    }

    /// Returns the next event of any choice; `None` after the last delta. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<News>, ApiError> {
        loop {
            if self.open == 0 && matches!(self.outcome, RequestOutcome::Cancelled) {
                // Before the last delta is sent: an answer that a client has in full is counted.
                self.outcome = RequestOutcome::Ok;
                self.books.tap.take().into_iter().for_each(Tap::end);
                self.settle_usage().await;
            }
            if let Some(news) = self.ready.pop_front() {
                return Ok(Some(news));
            }
            if self.open == 0 {
                return Ok(None);
            }
            let error = match self.step().await {
                Step::Event(Some((prompt, event))) => self.take(prompt, event).err(),
                Step::Event(None) => Some(ApiError::internal("the answer was produced faster than it was read, and was cut")),
                Step::Verdict(index, ruling) => {
                    self.settle_doubt(index, ruling);
                    None
                }
            };
            if let Some(error) = error {
                self.outcome = error.outcome();
                self.settle_usage().await;
                return Err(error);
            }
        }
    }

    /// Waits for the next event. Tokens are taken while the moderator is busy: their text waits in its choice, within limits. Cancel safe.
    async fn step(&mut self) -> Step {
        let Some(moderation) = self.moderation.as_mut().filter(|moderation| moderation.is_busy()) else {
            return Step::Event(self.submission.next().await);
        };
        let more_comes = self.choices.iter().any(|choice| !choice.closed);
        tokio::select! {
            (index, ruling) = poll_fn(|context| moderation.poll_next(context)) => Step::Verdict(index, ruling),
            event = self.submission.next(), if more_comes => Step::Event(event),
        }
    }

    /// Settles the quota and counts the usage, once: no more will be used, whether or not all choices have ended. Cancel safe.
    pub async fn settle_usage(&mut self) {
        let first = self.choices.iter().filter_map(|choice| choice.first).min();
        self.books.metered.settle(self.outcome, &self.usage, first.map(|first| first - self.arrived)).await;
    }

    /// Waits a moment for the first delta, so that a request that fails early gets an error status. The delta stays queued.
    pub async fn settle(&mut self) -> Result<(), ApiError> {
        match tokio::time::timeout(FIRST_EVENT_MAX, self.next_delta()).await {
            Ok(Ok(Some(delta))) => self.ready.push_front(News::Delta(delta)),
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(error)) => return Err(error),
        }
        Ok(())
    }

    fn take(&mut self, prompt: usize, event: RequestEvent) -> Result<(), ApiError> {
        match event {
            RequestEvent::Waiting { choice: _, position, estimate_ms } => {
                let waiting = Waiting { position, estimate_ms };
                self.waited.get_or_insert(waiting);
                self.ready.push_back(News::Waiting(waiting));
            }
            RequestEvent::PromptLogprobs(logprobs) => {
                let index = (prompt * self.choices_per_prompt) as u32;
                self.ready.push_back(News::Delta(Delta { index, prompt_logprobs: Some(logprobs), ..Delta::default() }));
            }
            RequestEvent::Sources(tokens) if self.choices.len() == self.choices_per_prompt => {
                self.usage.prompt_tokens_details = PromptTokensDetails { cached_tokens: tokens.cached() };
            }
            // With several prompts, the totals are only known at the end. Embeddings do not belong to answers.
            RequestEvent::Sources(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Token { choice, token, logprob } => self.token(prompt, choice, token, logprob),
            RequestEvent::Finished { choice, outcome, usage } => {
                let index = prompt * self.choices_per_prompt + choice as usize;
                let ended = match outcome {
                    // The gateway ended the choice before its worker did.
                    _ if self.choices[index].closed => return Ok(()),
                    Outcome::Failed(failure) => return Err(failure.into()),
                    Outcome::Stop(token) => Ended::StopToken(token),
                    Outcome::Length => Ended::Length,
                };
                let piece = match self.hidden {
                    true => Piece { finish: Some(Finish::LENGTH), ..Piece::default() },
                    false => self.choices[index].pipeline.finish(ended),
                };
                self.end(index, usage);
                self.pass(index, piece);
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
                self.books.seat().into_iter().for_each(Seat::first_token);
                if self.books.objectives.classes().get(self.class).ttft_ms.is_some() {
                    self.books.metered.observe_ttft(now, now - self.arrived);
                }
            }
        }
        if self.hidden {
            return;
        }
        state.tokens += 1;
        self.usage.completion_tokens += 1;
        self.usage.total_tokens += 1;
        let piece = state.pipeline.push(token, logprob);
        let has_ended = state.pipeline.has_ended();
        self.usage.completion_tokens_details.reasoning_tokens += piece.reasoning_tokens;
        if has_ended {
            let usage = self.submission.end_choice(prompt, choice);
            self.end(index, usage);
        }
        self.pass(index, piece);
    }

    /// Applies the moderator's verdict to the text held back for it.
    fn settle_doubt(&mut self, index: usize, ruling: ModerationVerdict) {
        let choice = &mut self.choices[index];
        choice.asked = false;
        let pieces = choice.pipeline.settle(ruling);
        if choice.pipeline.has_ended() && !choice.closed {
            let usage = self.submission.end_choice(index / self.choices_per_prompt, (index % self.choices_per_prompt) as u32);
            self.end(index, usage);
        }
        pieces.into_iter().for_each(|piece| self.pass(index, piece));
    }

    /// Ends a choice: no more of its tokens are wanted.
    fn end(&mut self, index: usize, usage: ChoiceUsage) {
        let choice = &mut self.choices[index];
        choice.closed = true;
        choice.usage = Some(usage);
    }

    /// Takes a choice's next piece; the last one closes it.
    fn pass(&mut self, index: usize, mut piece: Piece) {
        if let Some(finish) = &mut piece.finish {
            safety::note_cut(finish, self.books.blocks.as_ref());
            self.close(index);
        }
        self.give(index, piece);
        let Some(moderation) = &mut self.moderation else { return };
        let choice = &mut self.choices[index];
        if let Some(doubt) = choice.pipeline.doubt().filter(|_| !choice.asked) {
            moderation.ask(index, doubt.clone());
            choice.asked = true;
        }
    }

    fn give(&mut self, index: usize, piece: Piece) {
        if index == 0 {
            self.remembered.iter_mut().for_each(|remembered| remembered.hear(&piece));
            self.books.tap.iter_mut().for_each(|tap| tap.hear(&piece));
        }
        self.ready.extend(piece.parts().map(|piece| News::Delta(Delta { index: index as u32, piece, ..Delta::default() })));
    }

    fn close(&mut self, index: usize) {
        let choice = &mut self.choices[index];
        let usage = choice.usage.take().expect("a choice ends before its last piece goes out");
        self.books.traced.iter().for_each(|traced| traced.choice(index, &usage, choice.first.zip(choice.last)));
        self.open -= 1;
        if let (Some(first), Some(last)) = (choice.first, choice.last) {
            let tpot = (choice.tokens > 1).then(|| (last - first) / (choice.tokens - 1));
            let ttft = first - self.arrived;
            let kept = self.books.objectives.observe(self.class, ttft, tpot);
            self.seen = RequestEnded {
                kept: kept && self.seen.kept,
                ttft: self.seen.ttft.max(Some(ttft)),
                tpot: self.seen.tpot.max(tpot),
                failed: false,
            };
            usage.predicted_ttft_ms.into_iter().for_each(metrics::observe_predicted_ttft);
            self.books.recent.push(books::finished(&usage, choice.tokens, first - self.arrived, tpot));
        }
        if self.open == 0 {
            metrics::observe_e2e(self.arrived.elapsed());
        }
        let tidemill = self.usage.tidemill.get_or_insert_default();
        let similar = self.submission.similar_to();
        tidemill.response_cache = match similar {
            Some(_) => FromCache::Similar,
            None if self.submission.is_cached() => FromCache::Equal,
            None => FromCache::No,
        };
        tidemill.similar_to =
            similar.map(|similar| SimilarQuestion { response: similar.response.to_string(), similarity: similar.similarity });
        tidemill.route = self.books.routed.as_ref().map(|routed| routed.told.clone());
        // Later choices of a prompt find its KV where the first one put it: only the first tells the sources of the KV.
        if index.is_multiple_of(self.choices_per_prompt) {
            tidemill.tokens.add(&usage.provenance.tokens);
            self.usage.prompt_tokens_details = PromptTokensDetails { cached_tokens: tidemill.tokens.cached() };
        }
        books::add(tidemill, usage);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        metrics::count_request(self.outcome);
        self.books.traced.iter().for_each(|traced| traced.end(self.outcome, self.seen.kept, &self.usage));
        self.books.count_in_rollout(self.outcome, self.choices.iter().any(|choice| choice.first.is_some()), &self.seen);
        // If the usage is not settled yet, the client has left, and this does not wait.
        let _ = self.settle_usage().now_or_never();
        metrics::count_tokens(self.usage.prompt_tokens, self.usage.completion_tokens);
    }
}
