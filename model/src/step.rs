//! From a segment's logits to its result, the same on every backend.

use crate::sampler::{SamplerScratch, sample, token_logprob};
use tidemill_proto::{
    block::Token,
    step::{Allowed, Draw, Segment, SegmentResult, Wanted},
};

/// Adds the result of row `i` of the segment's logits. Rows come in ascending order; `row` is changed by penalties and truncation.
pub(crate) fn take_logits(segment: &Segment<'_>, i: usize, row: &mut [f32], scratch: &mut SamplerScratch, result: &mut SegmentResult) {
    let draw = match segment.wanted {
        Wanted::Nothing | Wanted::Embedding { .. } => None,
        Wanted::Token(draw) => Some((draw, &[][..])),
        Wanted::Verified(draw) => confirmed(segment, i, result).map(|drafted| (draw, drafted)),
        Wanted::Scores { targets, top, token } => {
            result.scores.extend(targets.get(i).map(|&target| token_logprob(row, target, top)));
            token.filter(|_| i + 1 == segment.logit_rows()).map(|draw| (draw, &[][..]))
        }
    };
    if let Some((draw, before)) = draw {
        draw_after(draw, before, row, scratch, result);
    }
}

/// The drafted tokens before row `i`, if each of them is the token that was drawn in its place; only then is the row part of the sequence.
fn confirmed<'a>(segment: &Segment<'a>, i: usize, result: &SegmentResult) -> Option<&'a [Token]> {
    let drafted = &segment.tokens[1..=i];
    let is_drawn = result.drawn.len() == i && result.drawn.iter().zip(drafted).all(|((drawn, _), token)| drawn == token);
    is_drawn.then_some(drafted)
}

/// Draws the token after those that the same step has drawn `before`, exactly as a step of its own would.
fn draw_after(draw: Draw<'_>, before: &[Token], row: &mut [f32], scratch: &mut SamplerScratch, result: &mut SegmentResult) {
    let Draw { sampling, history, index, banned, allowed } = draw;
    let longer = (!before.is_empty() && sampling.penalizes()).then(|| history.followed_by(before));
    match allowed.map(|allowed| Allowed::wait_after(allowed, before)).transpose() {
        Ok(allowed) => {
            let (history, index) = (longer.as_ref().unwrap_or(history), index + before.len() as u64);
            result.drawn.push(sample(row, sampling, history, index, banned, allowed, scratch));
        }
        Err(reason) => result.withhold(reason),
    }
}
