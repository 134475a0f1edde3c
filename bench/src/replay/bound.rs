//! An upper bound for policies that know only the information that a pool has.
//!
//! Each use of a block falls into a class by the information available at that time: how often the block was used, whether the chain ended
//! with it, how much of the prompt was new. Consider a policy that keeps the blocks of each class for a fixed time after each use, that
//! knows the best times for this very trace, and that keeps to its capacity only on average. It does no worse than any policy that must
//! learn the times, always keeps to its capacity, and needs a block's predecessors for a hit. Its hit tokens are at most
//!
//! ```text
//!   min over λ ≥ 0 of   λ · capacity  +  Σ over classes of  max over times τ of  ( tokens hit within τ  −  λ · slots taken for τ )
//! ```
//!
//! (Lagrangian duality: λ is the cost of a slot for the time of one request.) Finer classes reveal more of the future; one class per
//! request reveals all of it.

use super::trace::{Request, TRACE_BLOCK_TOKENS};
use std::collections::HashMap;

/// A classification of uses, and the bound that it gives.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Bound {
    pub classes_by: &'static str,
    pub classes: usize,
    pub prefix_token_hit_rate: f64,
}

/// The information that a pool has when a block is used.
struct Sight {
    request: u32,
    /// The number of uses so far, including this one.
    uses: u32,
    ends_chain: bool,
    /// The number of blocks of the prompt.
    blocks: u32,
    /// The number of those blocks that were never seen before.
    new: u32,
    /// The number of requests since the previous use.
    since: u32,
}

/// One use of a block, and its next use.
struct Use {
    sight: Sight,
    /// Requests until the next use, or to the end of the trace.
    gap: u64,
    /// Tokens that the next use would hit; 0 if there is none.
    tokens: u64,
}

type Classes = (&'static str, fn(&Sight) -> [u32; 5]);

/// The classifications. Lengths and times are rounded to powers of two.
const CLASSES: [Classes; 6] = [
    ("age only", |_| [0; 5]),
    ("uses", |s| [s.uses.min(8), 0, 0, 0, 0]),
    ("uses, end of chain, prompt length", |s| [s.uses.min(8), s.ends_chain.into(), s.blocks.ilog2(), 0, 0]),
    ("uses, end of chain, known and new part of the prompt", |s| {
        [s.uses.min(8), s.ends_chain.into(), log(s.blocks - s.new), log(s.new), 0]
    }),
    ("the same, and time since the last use", |s| [s.uses.min(8), s.ends_chain.into(), log(s.blocks - s.new), log(s.new), log(s.since)]),
    ("the request itself", |s| [s.request, 0, 0, 0, 0]),
];

fn log(n: u32) -> u32 {
    n.checked_ilog2().map_or(0, |log| log + 1)
}

/// One bound per classification, for a pool of `capacity` blocks.
pub fn bounds(requests: &[Request], capacity: u64) -> Vec<Bound> {
    let uses = uses(requests);
    let tokens: u64 = requests.iter().map(|request| request.input_tokens).sum();
    let bound = |(classes_by, class): Classes| {
        let mut sorted: HashMap<[u32; 5], Vec<&Use>> = HashMap::new();
        uses.iter().for_each(|used| sorted.entry(class(&used.sight)).or_default().push(used));
        let curves: Vec<Curve> = sorted.into_values().map(curve).collect();
        let hits = dual(&curves, (capacity * requests.len() as u64) as f64);
        Bound { classes_by, classes: curves.len(), prefix_token_hit_rate: hits / tokens as f64 }
    };
    CLASSES.map(bound).into()
}

fn uses(requests: &[Request]) -> Vec<Use> {
    let end = requests.len() as u64;
    let mut uses: Vec<Use> = Vec::new();
    // The latest use of each block, and the number of its uses.
    let mut latest: HashMap<u64, (usize, u32)> = HashMap::new();
    for (now, request) in (0u32..).zip(requests) {
        let new = request.blocks.iter().filter(|id| !latest.contains_key(id)).count() as u32;
        for (place, id) in request.blocks.iter().enumerate() {
            let (mut count, mut since) = (1, 0);
            if let Some(&(before, earlier)) = latest.get(id) {
                let before = &mut uses[before];
                since = now - before.sight.request;
                before.gap = u64::from(since);
                before.tokens =
                    (request.input_tokens - (place as u64 * TRACE_BLOCK_TOKENS).min(request.input_tokens)).min(TRACE_BLOCK_TOKENS);
                count += earlier;
            }
            latest.insert(*id, (uses.len(), count));
            let blocks = request.blocks.len() as u32;
            let sight = Sight { request: now, uses: count, ends_chain: place as u32 + 1 == blocks, blocks, new, since };
            uses.push(Use { sight, gap: end - u64::from(now), tokens: 0 });
        }
    }
    uses
}

/// The gain and cost of keeping a class's blocks for a time: (tokens hit, slots taken, in slots × requests), for each time that makes a
/// difference.
type Curve = Vec<(f64, f64)>;

fn curve(mut uses: Vec<&Use>) -> Curve {
    uses.sort_by_key(|used| used.gap);
    let mut curve = vec![(0.0, 0.0)];
    let (mut hit, mut taken) = (0, 0);
    for (gone, used) in uses.iter().enumerate() {
        hit += used.tokens;
        taken += used.gap;
        // Blocks that are used again later hold their slots for the whole time.
        let others = (uses.len() - gone - 1) as u64 * used.gap;
        curve.push((hit as f64, (taken + others) as f64));
    }
    curve
}

/// The minimum over the cost of a slot. The function is convex, so a ternary search finds it.
fn dual(curves: &[Curve], capacity: f64) -> f64 {
    let value = |price: f64| {
        let best = |curve: &Curve| curve.iter().map(|(hit, taken)| hit - price * taken).fold(0.0, f64::max);
        price * capacity + curves.iter().map(best).sum::<f64>()
    };
    // A slot for one request is never worth more than the tokens of a block.
    let (mut low, mut high) = (0.0, TRACE_BLOCK_TOKENS as f64);
    for _ in 0..SEARCH_STEPS {
        let (a, b) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
        if value(a) < value(b) { high = b } else { low = a }
    }
    value((low + high) / 2.0)
}

/// Steps of the search, each of which makes the interval a third smaller.
const SEARCH_STEPS: usize = 60;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(blocks: &[u64]) -> Request {
        Request { input_tokens: TRACE_BLOCK_TOKENS * blocks.len() as u64, blocks: blocks.to_vec(), ..Request::default() }
    }

    #[test]
    fn with_room_for_all_every_repetition_is_a_hit() {
        let requests = [request(&[1, 2]), request(&[1, 3]), request(&[1, 2])];
        for bound in bounds(&requests, 100) {
            assert!((bound.prefix_token_hit_rate - 0.5).abs() < 1e-6, "{bound:?}");
        }
    }

    #[test]
    fn knowing_more_never_brings_less() {
        // Half of the blocks are used again at once, the others never.
        let requests: Vec<_> = (0..200).map(|n| if n % 4 < 2 { request(&[n / 4]) } else { request(&[1000 + n]) }).collect();
        let rates: Vec<f64> = bounds(&requests, 1).iter().map(|bound| bound.prefix_token_hit_rate).collect();
        assert!(rates.iter().all(|rate| rates[0] - 1e-9 <= *rate && *rate <= rates[5] + 1e-9), "{rates:?}");
        assert!((rates[5] - 0.25).abs() < 1e-6, "a slot is enough for who knows the future: {rates:?}");
    }
}
