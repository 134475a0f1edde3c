//! One sequence on its way through a decode worker.
//!
//! ```text
//!             admit                 all blocks here
//!   Waiting ────────► Fetching ──────────────────────► Running ──► finished
//!      ▲  └──────────────────(nothing to fetch)──────────▲ │
//!      └───────────── preempted: blocks forgotten ─────────┘
//! ```
//!
//! A resumed sequence is a new one whose prompt happens to be longer: it takes the same path.

use std::time::Duration;
use tidemill_engine::fetching::Fetching;
use tidemill_kvpool::admission::{Arrival, Source};
use tidemill_proto::step::{Draw, History};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Chain, LayoutFingerprint, Tenant, Token},
    ids::LinkId,
    message::{DecodeJob, PoolNode, Provenance, Run, TokensBySource},
    pool::Lineage,
    sampling::TokenLogprob,
};

#[derive(Debug)]
pub(crate) enum Phase {
    Waiting,
    Fetching(Fetching),
    Running,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) home: LinkId,
    /// `job.tokens` grows with every token drawn.
    pub(crate) job: DecodeJob,
    pub(crate) chain: Chain,
    pub(crate) tenant: Tenant,
    pub(crate) history: History,
    pub(crate) phase: Phase,
    /// Device blocks that cover `job.tokens`; empty while waiting.
    pub(crate) blocks: Vec<u32>,
    /// Tokens whose KV is in `blocks`.
    pub(crate) computed: usize,
    /// Leading blocks that need not be put into the pool: they came from it, or have been put.
    pub(crate) published: usize,
    /// Log-probabilities of the prompt so far, if asked for.
    pub(crate) prompt_logprobs: Vec<Option<TokenLogprob>>,
    pub(crate) times: Times,
    pub(crate) provenance: Provenance,
}

/// Moments of a sequence's life, as durations since the worker started.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) arrived: Duration,
    /// All blocks that were worth fetching are here.
    pub(crate) ready: Option<Duration>,
    pub(crate) first_token: Option<Duration>,
}

impl Sequence {
    pub(crate) fn new(home: LinkId, job: DecodeJob, layout: &LayoutFingerprint, now: Duration) -> Self {
        let mut history = History::new(&job.tokens[..job.prompt_tokens as usize]);
        for &token in &job.tokens[job.prompt_tokens as usize..] {
            history.push(token);
        }
        Self {
            home,
            chain: Chain::new(layout, &job.salt, &job.tokens),
            tenant: Tenant::of_salt(&job.salt),
            history,
            phase: Phase::Waiting,
            blocks: Vec::new(),
            computed: 0,
            published: 0,
            prompt_logprobs: Vec::new(),
            times: Times { arrived: now, ready: None, first_token: None },
            provenance: Provenance::default(),
            job,
        }
    }

    /// Where the sequence's block `number` stands.
    pub(crate) fn lineage(&self, number: usize) -> Lineage {
        Lineage {
            origin: self.job.request,
            tenant: self.tenant,
            parent: number.checked_sub(1).map(|before| self.chain.keys()[before]),
            position: number as u32,
        }
    }

    /// Tokens without KV. One means that the next step draws the next token.
    pub(crate) fn remaining(&self) -> usize {
        self.job.tokens.len() - self.computed
    }

    /// Leading blocks that may come from a cache: the last token is always computed, its logits are needed.
    pub(crate) fn reusable_blocks(&self) -> usize {
        if self.is_scoring() { 0 } else { (self.job.tokens.len() - 1) / BLOCK_TOKENS }
    }

    /// The leading blocks that are worth asking for, and where: as far as runs go there, then at home.
    pub(crate) fn fetchable(&self) -> Vec<(PoolNode, BlockKey)> {
        let expected = self.reusable_blocks().min(self.job.expected_blocks as usize);
        let mut nodes = Run::nodes(&self.job.read, expected);
        if let Some(home) = self.job.home {
            nodes.resize(expected, home);
        }
        nodes.into_iter().zip(self.chain.keys().iter().copied()).collect()
    }

    pub(crate) fn blocks_needed(&self) -> usize {
        self.job.tokens.len().div_ceil(BLOCK_TOKENS)
    }

    /// Number of the next token to be drawn.
    pub(crate) fn generated(&self) -> u32 {
        self.job.tokens.len() as u32 - self.job.prompt_tokens
    }

    /// Whether log-probabilities of the prompt are still owed: they need the logits of all its positions.
    pub(crate) fn is_scoring(&self) -> bool {
        self.job.prompt_logprobs.is_some()
    }

    pub(crate) fn draw(&self) -> Draw<'_> {
        let index = self.generated();
        let banned = if index < self.job.stop.min_tokens { &self.job.stop.stop_tokens[..] } else { &[] };
        Draw { sampling: &self.job.sampling, history: &self.history, index: u64::from(index), banned }
    }

    /// Accounts for the prompt's tokens: the first `hbm` blocks were on this device, the next ones were `fetched`, the rest is computed.
    pub(crate) fn settle_provenance(&mut self, hbm: usize, fetched: &[Arrival]) {
        let prompt = u64::from(self.job.prompt_tokens);
        let tokens = |blocks: usize| (blocks * BLOCK_TOKENS) as u64;
        let mut by_source = TokensBySource { hbm: tokens(hbm).min(prompt), ..Default::default() };
        for arrival in fetched {
            // A rescued sequence's blocks go on beyond its prompt.
            let share = tokens(1).min(prompt - by_source.total());
            let counter = match arrival.source {
                _ if arrival.origin == self.job.request => &mut by_source.prefill,
                Source::Dram => &mut by_source.dram,
                Source::Nvme => &mut by_source.nvme,
                Source::Remote => &mut by_source.remote,
            };
            *counter += share;
        }
        by_source.local = prompt - by_source.total();
        self.provenance.tokens = by_source;
    }

    /// Keys of `blocks[range]`.
    pub(crate) fn keys(&self, range: std::ops::Range<usize>) -> &[BlockKey] {
        &self.chain.keys()[range]
    }

    pub(crate) fn push(&mut self, token: Token) {
        self.job.tokens.push(token);
        self.history.push(token);
        self.chain.extend_to(&self.job.tokens);
    }
}
