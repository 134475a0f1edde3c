//! A draft model in a world without bytes: its guesses are right with a given probability, and its steps take a given share of the model's.

use crate::{
    hardware::{Device, Work},
    random::Random,
    settings::Speculation,
    workload,
};
use std::{collections::HashMap, time::Duration};
use tidemill_decode::speculation::{self, Proposer, draft_model::DraftBounds};
use tidemill_engine::{
    job::{JobId, ScheduledChunk},
    role::Role,
};
use tidemill_proto::{
    block::Token,
    step::{Segment, SegmentResult, Wanted},
};

#[derive(Debug)]
pub(crate) struct Oracle {
    settings: Speculation,
    vocab: u32,
    random: Random,
    /// The streams of the sequences that decode.
    streams: HashMap<JobId, Stream>,
}

/// A sequence's tokens, as a function of the seed and the number of the token.
#[derive(Clone, Copy, Debug)]
struct Stream {
    seed: u64,
    /// The position of the token with number 0.
    first: usize,
}

/// A proposer without proposals: nothing repeats itself in a simulated answer.
#[derive(Debug)]
struct Silent;

impl Proposer for Silent {
    fn propose(&mut self, _tokens: &[Token], _most: usize, _proposal: &mut Vec<Token>) -> usize {
        0
    }
}

/// The settings of a decode worker whose draft model is an oracle with this many blocks.
pub(crate) fn speculation(settings: &Speculation, vocab: u32, context_tokens: usize, blocks: u32) -> speculation::Speculation {
    let vocab = vocab as usize;
    speculation::Speculation {
        proposer: || Box::new(Silent),
        draft_model: Some(DraftBounds { blocks, vocab, context_tokens, step_tokens: settings.step_tokens }),
        draft_tokens_max: settings.tokens_max,
        draft_tokens_min: 0,
        rows_max: settings.rows_max,
    }
}

impl Oracle {
    pub(crate) fn new(settings: Speculation, vocab: u32, seed: u64) -> Self {
        Self { settings, vocab, random: Random::new(seed), streams: HashMap::new() }
    }

    /// Takes note of a segment of the model's step, from which a sequence's next tokens follow.
    pub(crate) fn see(&mut self, job: JobId, segment: &Segment<'_>) {
        let (draw, at) = match segment.wanted {
            Wanted::Token(draw) => (draw, segment.start + segment.tokens.len()),
            Wanted::Verified(draw) => (draw, segment.start + 1),
            Wanted::Nothing | Wanted::Scores { .. } | Wanted::Embedding { .. } => return,
        };
        self.streams.insert(job, Stream { seed: draw.sampling.seed, first: at - draw.index as usize });
    }

    /// Makes the guesses of a worker's next step. Returns the time that they take, beginning at `now`.
    pub(crate) fn guess<R: Role>(&mut self, role: &mut R, device: &mut Device, now: Duration) -> Duration {
        self.streams.retain(|&job, _| role.kv(job).is_some());
        let mut took = Duration::ZERO;
        loop {
            let chunks = role.guess(now + took);
            if chunks.is_empty() {
                return took;
            }
            let mut work = Work::default();
            let mut results = Vec::with_capacity(chunks.len());
            for chunk in &chunks {
                let segment = role.guess_segment(chunk);
                work.add(chunk, usize::from(chunk.len == 1), segment.logit_rows());
                results.push(self.guess_one(chunk, &segment));
            }
            took += device.step(&work).mul_f64(self.settings.step_share);
            role.guessed(results, now + took);
        }
    }

    fn guess_one(&mut self, chunk: &ScheduledChunk, segment: &Segment<'_>) -> SegmentResult {
        let Wanted::Token(_) = segment.wanted else { return SegmentResult::default() };
        let next = segment.start + segment.tokens.len();
        let known = self.streams.get(&chunk.job).filter(|stream| stream.first <= next);
        let right = known.map(|stream| workload::token(stream.seed, (next - stream.first) as u32, self.vocab));
        let is_right = self.random.unit() < self.settings.right;
        let token = right.map_or(0, |token| if is_right { token } else { (token + 1) % self.vocab });
        SegmentResult { drawn: vec![(token, None)], ..SegmentResult::default() }
    }
}
