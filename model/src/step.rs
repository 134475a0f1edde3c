//! A step's segments as the model computes them: chunks through the layers, then logits to tokens and scores.

use crate::{
    forward::{Chunk, LogitRows},
    sampler::{SamplerScratch, sample, token_logprob},
};
use tidemill_proto::step::{Draw, Segment, SegmentResult, Wanted};

/// The segment's way through the layers.
pub(crate) fn chunk<'a>(segment: &Segment<'a>) -> Chunk<'a> {
    let logits = match segment.wanted {
        Wanted::Nothing => LogitRows::None,
        Wanted::Token(_) => LogitRows::Last,
        Wanted::Scores { .. } => LogitRows::All,
    };
    Chunk { tokens: segment.tokens, start: segment.start, blocks: segment.blocks, logits }
}

/// Takes in row `i` of the segment's logits. Rows come in ascending order; penalties and cuts change `row`.
pub(crate) fn take_logits(segment: &Segment<'_>, i: usize, row: &mut [f32], scratch: &mut SamplerScratch, result: &mut SegmentResult) {
    let draw = match segment.wanted {
        Wanted::Nothing => None,
        Wanted::Token(draw) => Some(draw),
        Wanted::Scores { targets, top, token } => {
            result.scores.extend(targets.get(i).map(|&target| token_logprob(row, target, top)));
            token
        }
    };
    if let Some(Draw { sampling, history, index, banned }) = draw.filter(|_| i + 1 == segment.logit_rows()) {
        result.drawn = Some(sample(row, sampling, history, index, banned, scratch));
    }
}
