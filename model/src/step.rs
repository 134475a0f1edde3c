//! From a segment's logits to what the step returns for it, the same on every backend.

use crate::sampler::{SamplerScratch, sample, token_logprob};
use tidemill_proto::step::{Allowed, Draw, Segment, SegmentResult, Wanted};

/// Takes in row `i` of the segment's logits. Rows come in ascending order; penalties and cuts change `row`.
pub(crate) fn take_logits(segment: &Segment<'_>, i: usize, row: &mut [f32], scratch: &mut SamplerScratch, result: &mut SegmentResult) {
    let draw = match segment.wanted {
        Wanted::Nothing | Wanted::Embedding { .. } => None,
        Wanted::Token(draw) => Some(draw),
        Wanted::Scores { targets, top, token } => {
            result.scores.extend(targets.get(i).map(|&target| token_logprob(row, target, top)));
            token
        }
    };
    if let Some(Draw { sampling, history, index, banned, allowed }) = draw.filter(|_| i + 1 == segment.logit_rows()) {
        match allowed.map(Allowed::wait).transpose() {
            Ok(allowed) => result.drawn = Some(sample(row, sampling, history, index, banned, allowed, scratch)),
            Err(reason) => result.fault = Some(reason.to_owned()),
        }
    }
}
