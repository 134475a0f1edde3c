//! One sequence on its way through a decode worker: its tokens, and its coordinator's view of it.
//!
//! A rescued or preempted sequence is a new one whose prompt happens to be longer: it takes the same path.

use crate::{
    speculation::{Drafter, Guess, draft_model::Wish},
    thinking::Thinking,
};
use std::time::Duration;
use tidemill_engine::{
    job::JobId,
    residency::{FetchedBlocks, JobKv},
    role::MaskState,
    states::StateRule,
};
use tidemill_kvpool::client::{Arrival, Source};
use tidemill_proto::{
    block::{BLOCK_TOKENS, LayoutFingerprint, Token},
    ids::{LinkId, SequenceId},
    message::{DecodeJob, Embeds, Finish, PoolNode, Provenance, Run, SequenceToken, TokensBySource},
    sampling::TokenLogprob,
    step::{Allowed, Draw, History, Mask, Segment, Unknown, Wanted},
    thought::ThoughtLimit,
};

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) link: LinkId,
    /// The job; `job.tokens` grows with every token drawn.
    pub(crate) job: DecodeJob,
    pub(crate) kv: JobKv,
    /// The sequence's number in order of arrival.
    pub(crate) number: u64,
    /// The number of later sequences that got device blocks first, since the last sequence that could no longer be passed.
    pub(crate) passed: u32,
    /// Whether its grammar is being compiled.
    pub(crate) awaits_grammar: bool,
    /// The mask of its next token.
    pub(crate) mask: MaskState,
    history: History,
    /// Its thought; `None` if that has no limit.
    thinking: Option<Thinking>,
    /// The proposals for its next tokens; `None` if this worker does not speculate.
    drafter: Option<Drafter>,
    /// The last token, and those drafted after it, of the step in progress; empty if nothing is drafted.
    row: Vec<Token>,
    /// The number of leading blocks that need not be put into the pool: they came from it, or have been put.
    pub(crate) published: usize,
    /// Whether the model reads it as a whole, in one step, so that its blocks are of no use to others.
    pub(crate) is_whole: bool,
    /// The log-probabilities of the prompt so far, if requested.
    prompt_logprobs: Vec<Option<TokenLogprob>>,
    pub(crate) arrived: Duration,
    /// The time at which all blocks that were worth fetching had arrived.
    ready: Option<Duration>,
    first_token: Option<Duration>,
    pub(crate) provenance: Provenance,
}

impl Sequence {
    pub(crate) fn new(link: LinkId, job: DecodeJob, number: u64, layout: &LayoutFingerprint, is_whole: bool, now: Duration) -> Self {
        let (prompt, generated) = job.tokens.split_at(job.prompt_tokens as usize);
        let mut history = History::new(prompt);
        for &token in generated {
            history.push(token);
        }
        Self {
            link,
            // The chain has no blocks if the text is read as a whole: none is found or published under a key.
            kv: JobKv::new(Self::job_id(job.sequence), job.request, layout, &job.salt, if is_whole { &[] } else { &job.tokens }),
            number,
            passed: 0,
            awaits_grammar: job.constraint.is_some(),
            mask: MaskState::InTime,
            history,
            thinking: None,
            drafter: None,
            row: Vec::new(),
            published: 0,
            is_whole,
            prompt_logprobs: Vec::new(),
            arrived: now,
            ready: None,
            first_token: None,
            provenance: Provenance::default(),
            job,
        }
    }

    /// Guesses its next tokens from now on.
    pub(crate) fn with_drafter(mut self, drafter: Option<Drafter>) -> Self {
        self.drafter = drafter;
        self
    }

    /// Limits its thought, if there is a limit, in a vocabulary of `vocab` tokens.
    pub(crate) fn with_limited_thought(mut self, limit: Option<ThoughtLimit>, vocab: usize) -> Self {
        let generated = &self.job.tokens[self.job.prompt_tokens as usize..];
        self.thinking = limit.map(|limit| Thinking::new(limit, generated, vocab));
        self
    }

    /// The job of a sequence, whose number names it, as a worker has a sequence only once.
    pub(crate) fn job_id(sequence: SequenceId) -> JobId {
        JobId(sequence.0)
    }

    /// The number of tokens without KV. One means that the next step draws the next token.
    pub(crate) fn remaining(&self) -> usize {
        self.job.tokens.len() - self.kv.computed()
    }

    /// The number of tokens that the next chunk may have: it ends where a state is to be kept, or to be available when the answer ends.
    pub(crate) fn chunk(&self, states: StateRule) -> usize {
        states.cut(self.kv.computed(), self.remaining(), &[self.prompt_end(), (self.job.tokens.len() - 1) / BLOCK_TOKENS])
    }

    /// Whether the current state is to be kept for others, and is not yet.
    pub(crate) fn keeps_state(&self, states: StateRule) -> bool {
        self.kv.kept_at() != self.kv.computed_blocks() && states.keeps(self.kv.computed(), &[self.prompt_end()])
    }

    /// The number of full blocks of the prompt without its last token, after which the prompt can be resumed.
    fn prompt_end(&self) -> usize {
        (self.job.prompt_tokens as usize - 1) / BLOCK_TOKENS
    }

    /// Whether a step may compute it.
    pub(crate) fn is_ready(&self) -> bool {
        self.kv.is_ready() && !self.awaits_grammar && self.mask != MaskState::Awaited
    }

    /// Whether the next step only needs the token drawn last.
    pub(crate) fn is_decoding(&self) -> bool {
        self.is_ready() && self.remaining() == 1
    }

    /// Whether its next token is due by its TPOT, as its client has had one.
    pub(crate) fn is_streaming(&self) -> bool {
        self.first_token.is_some()
    }

    /// The number of tokens to compute here before the next one is drawn, as far as known: those for which no block is expected.
    pub(crate) fn tail(&self) -> usize {
        let expected = if self.kv.is_ready() { 0 } else { self.blocks_expected() * BLOCK_TOKENS };
        self.job.tokens.len() - self.kv.computed().max(expected)
    }

    /// The number of leading blocks that may come from a cache. The last token is always computed, as its logits are needed.
    pub(crate) fn reusable_blocks(&self) -> usize {
        if self.is_scoring() || self.is_whole { 0 } else { (self.job.tokens.len() - 1) / BLOCK_TOKENS }
    }

    fn blocks_expected(&self) -> usize {
        self.reusable_blocks().min(self.job.expected_blocks as usize)
    }

    /// The nodes of the leading blocks that are worth fetching: those of the runs as far as they go, then home.
    pub(crate) fn fetchable(&self) -> Vec<PoolNode> {
        let expected = self.blocks_expected();
        let mut nodes = Run::nodes(&self.job.read, expected);
        if let Some(home) = self.job.home {
            nodes.resize(expected, home);
        }
        nodes
    }

    pub(crate) fn blocks_needed(&self) -> usize {
        self.job.tokens.len().div_ceil(BLOCK_TOKENS)
    }

    /// Whether log-probabilities of the prompt are still missing, which need the logits of all its positions.
    fn is_scoring(&self) -> bool {
        self.job.prompt_logprobs.is_some()
    }

    /// Guesses up to `most` of its next tokens, if sequences have at most `longest` tokens. Returns the probability that each is drawn if
    /// those before it are.
    pub(crate) fn propose(&mut self, most: usize, longest: usize) -> Vec<f64> {
        let most = self.guessable(most, longest);
        let (tokens, ends) = (&self.job.tokens, &self.job.stop.stop_tokens);
        let drafter = self.drafter.as_mut();
        drafter.map_or_else(Vec::new, |drafter| {
            drafter.propose(tokens, most, ends);
            drafter.chances()
        })
    }

    /// The request to the draft model for guesses; `None` if none are wanted, or the proposer's own are as good.
    pub(crate) fn wish(&self, most: usize, longest: usize) -> Option<Wish<'_>> {
        let most = self.guessable(most, longest);
        let drafter = self.drafter.as_ref().filter(|drafter| most > 0 && drafter.wants_guesses())?;
        let generated = self.generated() as usize;
        Some(Wish {
            job: Self::job_id(self.job.sequence),
            tokens: &self.job.tokens,
            most,
            ends: &self.job.stop.stop_tokens,
            confidence: drafter.confidence(),
            generated,
            left: (self.job.stop.max_tokens as usize).saturating_sub(generated),
        })
    }

    /// Takes the draft model's guesses of its next tokens.
    pub(crate) fn take_guesses(&mut self, guesses: Vec<Guess>) {
        if let Some(drafter) = &mut self.drafter {
            drafter.take_guesses(guesses);
        }
    }

    /// The number of its next tokens that can be guessed, up to `most`: only tokens that would be drawn under the same rules as the next
    /// one, and none after the sequence's end.
    fn guessable(&self, most: usize, longest: usize) -> usize {
        let (generated, tokens) = (self.generated(), &self.job.tokens);
        let stop = &self.job.stop;
        let banned = if generated < stop.min_tokens { stop.min_tokens - generated } else { u32::MAX };
        let left = banned.min(stop.max_tokens.saturating_sub(generated)) as usize;
        let most = most.min(left.min(longest.saturating_sub(tokens.len())).saturating_sub(1));
        // Scores and embeddings of a prompt include its last row, so nothing is drafted until they are computed. The masks after drafted
        // tokens are computed in the step, which waits for them.
        if self.is_scoring() || self.job.embeds.is_some() || self.mask != MaskState::InTime { 0 } else { most }
    }

    /// Drafts the first `len` guessed tokens for verification by the next step.
    pub(crate) fn draft(&mut self, len: usize) {
        let last = self.job.tokens.last();
        if let (Some(drafter), Some(last)) = (self.drafter.as_ref().filter(|_| len > 0), last) {
            let drafted = drafter.draft(len);
            let len = self.thinking.as_ref().map_or(len, |thinking| thinking.verifiable(&drafted));
            self.row.push(*last);
            self.row.extend(&drafted[..len]);
        }
    }

    /// The number of tokens drafted for the step in progress.
    pub(crate) fn drafted(&self) -> usize {
        self.row.len().saturating_sub(1)
    }

    /// The segment of `len` tokens from position `start` in a step.
    pub(crate) fn segment(&self, start: usize, len: usize) -> Segment<'_> {
        if self.drafted() > 0 {
            let state = self.kv.state(start + len);
            return Segment { tokens: &self.row, start, blocks: self.kv.table(), state, wanted: Wanted::Verified(self.draw()) };
        }
        let end = start + len;
        let draw = (end == self.job.tokens.len()).then(|| self.draw());
        if let Some(Embeds { second_text }) = self.job.embeds {
            let wanted = draw.map_or(Wanted::Nothing, |_| Wanted::Embedding { second_text: second_text as usize });
            return Segment { tokens: &self.job.tokens[start..end], start, blocks: self.kv.table(), state: self.kv.state(end), wanted };
        }
        let wanted = match self.job.prompt_logprobs {
            Some(top) => {
                let last = (end + 1).min(self.job.prompt_tokens as usize);
                Wanted::Scores { targets: &self.job.tokens[(start + 1).min(last)..last], top, token: draw }
            }
            None => draw.map_or(Wanted::Nothing, Wanted::Token),
        };
        Segment { tokens: &self.job.tokens[start..end], start, blocks: self.kv.table(), state: self.kv.state(end), wanted }
    }

    fn draw(&self) -> Draw<'_> {
        let index = self.generated();
        let banned = if index < self.job.stop.min_tokens { &self.job.stop.stop_tokens[..] } else { &[] };
        // The engine has the grammar, and combines the two.
        let allowed = match &self.job.constraint {
            Some(_) => Some(&Unknown as &dyn Allowed),
            None => self.required().map(|mask| mask as &dyn Allowed),
        };
        Draw { sampling: &self.job.sampling, history: &self.history, index: u64::from(index), banned, allowed }
    }

    /// The tokens of which one must be drawn next, by the limit on its thought.
    pub(crate) fn required(&self) -> Option<&Mask> {
        self.thinking.as_ref()?.required()
    }

    /// The index of the next token to be drawn.
    pub(crate) fn generated(&self) -> u32 {
        self.job.tokens.len() as u32 - self.job.prompt_tokens
    }

    /// Adds the scores of a step. Returns the prompt's log-probabilities when they are `complete`.
    pub(crate) fn push_scores(&mut self, scores: Vec<TokenLogprob>, complete: bool) -> Option<Vec<Option<TokenLogprob>>> {
        if !self.is_scoring() {
            return None;
        }
        if self.prompt_logprobs.is_empty() {
            self.prompt_logprobs.push(None);
        }
        self.prompt_logprobs.extend(scores.into_iter().map(Some));
        complete.then(|| {
            self.job.prompt_logprobs = None;
            std::mem::take(&mut self.prompt_logprobs)
        })
    }

    /// Applies the result of a step that computed the positions before `end`. If that is the whole prompt, an embedding job is done.
    pub(crate) fn finish_embedding(&self, end: usize, embedding: Option<Vec<f32>>) -> Option<(Option<Vec<f32>>, Finish)> {
        if self.job.embeds.is_none() || end < self.job.tokens.len() {
            return None;
        }
        let unable =
            || Finish::Failed { reason: "this worker's device gives no hidden states: embeddings are computed by CPU workers".into() };
        let finish = if embedding.is_some() { Finish::Length } else { unable() };
        Some((embedding, finish))
    }

    /// Compares guesses with the tokens that a step drew. Returns the outcomes of the draft model's guesses, by class.
    pub(crate) fn learn(&mut self, drawn: &[(Token, Option<TokenLogprob>)]) -> Vec<(usize, bool)> {
        let Some(drafter) = &mut self.drafter else { return Vec::new() };
        let drawn: Vec<Token> = drawn.iter().map(|(token, _)| *token).collect();
        drafter.learn(&drawn)
    }

    /// Adds the tokens that a step drew, up to the sequence's last one, if sequences have at most `longest` tokens.
    pub(crate) fn push_drawn(
        &mut self,
        drawn: Vec<(Token, Option<TokenLogprob>)>,
        longest: usize,
        now: Duration,
    ) -> (Vec<SequenceToken>, Option<Finish>) {
        self.row.clear();
        let mut tokens = Vec::with_capacity(drawn.len());
        for (token, logprob) in drawn {
            tokens.push(self.push_token(token, logprob, now));
            if let Some(reason) = self.finish(longest) {
                return (tokens, Some(reason));
            }
        }
        (tokens, None)
    }

    /// Adds the next token.
    fn push_token(&mut self, token: Token, logprob: Option<TokenLogprob>, now: Duration) -> SequenceToken {
        let index = self.generated();
        self.job.tokens.push(token);
        self.history.push(token);
        self.thinking.iter_mut().for_each(|thinking| thinking.push(token));
        self.kv.extend_to(&self.job.tokens);
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.provenance.tail_ms = millis(now - self.ready.unwrap_or(now));
        }
        SequenceToken { sequence: self.job.sequence, index, token, logprob }
    }

    /// The reason why the sequence ends with the token drawn last, if sequences have at most `longest` tokens; `None` if it continues.
    fn finish(&self, longest: usize) -> Option<Finish> {
        let token = *self.job.tokens.last()?;
        if self.job.stop.stop_tokens.contains(&token) {
            Some(Finish::Stop { token })
        } else {
            let is_long = self.generated() >= self.job.stop.max_tokens || self.job.tokens.len() >= longest;
            is_long.then_some(Finish::Length)
        }
    }

    /// Notes that it got its device blocks.
    pub(crate) fn note_admitted(&mut self, now: Duration) {
        if self.ready.is_none() {
            self.provenance.queue_ms = millis(now - self.arrived);
        }
    }

    /// Notes that a block came, after waiting for it for this long.
    pub(crate) fn note_arrival(&mut self, arrival: Arrival, waited: Duration) {
        if arrival.origin == self.job.request {
            self.provenance.transfer_ms = millis(waited);
        } else {
            self.provenance.fetch_ms = millis(waited);
        }
    }

    /// Notes that all available blocks have arrived: `fetched` from the pool, and those before them on this device. The first time, returns
    /// the sources of the prompt's tokens.
    pub(crate) fn note_ready(&mut self, fetched: &FetchedBlocks, now: Duration) -> Option<&TokensBySource> {
        self.published = self.published.max(fetched.first + fetched.arrivals.len());
        if self.ready.is_some() {
            return None;
        }
        self.ready = Some(now);
        self.provenance.tokens = self.tokens_by_source(fetched);
        Some(&self.provenance.tokens)
    }

    /// Counts the prompt's tokens by source; the rest of the prompt is computed here.
    fn tokens_by_source(&self, fetched: &FetchedBlocks) -> TokensBySource {
        let prompt = u64::from(self.job.prompt_tokens);
        let tokens = |blocks: usize| (blocks * BLOCK_TOKENS) as u64;
        let mut by_source = TokensBySource { hbm: tokens(fetched.first).min(prompt), ..Default::default() };
        for arrival in &fetched.arrivals {
            // A rescued sequence's blocks extend beyond its prompt.
            let share = tokens(1).min(prompt - by_source.total());
            let counter = match arrival.source {
                _ if arrival.origin == self.job.request => &mut by_source.prefill,
                Source::Dram => &mut by_source.dram,
                Source::Nvme => &mut by_source.nvme,
                Source::Object => &mut by_source.object,
                Source::Remote => &mut by_source.remote,
            };
            *counter += share;
        }
        by_source.local = prompt - by_source.total();
        by_source
    }

    /// Notes that it lost its device blocks and starts over.
    pub(crate) fn note_preempted(&mut self, states: StateRule) {
        self.provenance.preemptions += 1;
        if self.ready.is_some() {
            // Its blocks are in the pool by now, or never will be.
            let reusable = if states.blocks > 0 { self.kv.kept_at() } else { usize::MAX };
            self.job.expected_blocks = self.reusable_blocks().min(reusable) as u32;
            self.job.wait_ms = 0;
        }
        self.prompt_logprobs.clear();
    }

    pub(crate) fn note_finished(&mut self, now: Duration) {
        self.provenance.decode_ms = millis(now - self.first_token.unwrap_or(now));
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
