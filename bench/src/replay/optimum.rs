//! The best possible cache, which knows the future: Belady's MIN for prefixes.
//!
//! After each request it keeps those blocks, of its own and the request's, that are needed again soonest. Unlike a pool, it need not
//! accept blocks that it will not keep. Between two uses of a block lies an interval; keeping the block takes a slot for that interval and
//! yields one hit. The task is to choose as many intervals as possible such that no more overlap than there are slots. Wherever too many
//! overlap, dropping the one that ends last is optimal (Carlisle and Lloyd, *On the k-coloring of intervals*, 1995; Belady's rule,
//! 1966). So the number of hits is optimal among all caches, even those that count hits without a block's predecessors. This cache has
//! no such hits: a block is needed again no later than its successors, and among equals the one further down the chain is dropped. Hit
//! tokens are nearly optimal: only a prompt's last, partly filled block counts for less than the others.

use super::{Hits, trace::Request};
use std::collections::{BTreeSet, HashMap};

/// The next use of a block, as (request, place in the chain, id).
type Need = (usize, usize, u64);

/// The hits of a cache of `slots` blocks over the requests' prompts.
pub fn hits(requests: &[Request], slots: usize) -> Hits {
    let next_uses = next_uses(requests);
    let mut kept: BTreeSet<Need> = BTreeSet::new();
    let mut hits = Hits::default();
    for (now, (request, next_uses)) in requests.iter().zip(next_uses).enumerate() {
        let held = |&(place, &id): &(usize, &u64)| kept.contains(&(now, place, id));
        hits.add(request, request.blocks.iter().enumerate().take_while(held).count());
        // Blocks due now come first, and they are this request's; the others are due later.
        while kept.first().is_some_and(|need| need.0 == now) {
            kept.pop_first();
        }
        for (place, (&id, next)) in request.blocks.iter().zip(next_uses).enumerate() {
            kept.extend(next.map(|next| (next, place, id)));
        }
        while kept.len() > slots {
            kept.pop_last();
        }
    }
    hits
}

/// For each block of each request, the request that uses it next.
fn next_uses(requests: &[Request]) -> Vec<Vec<Option<usize>>> {
    let mut next: HashMap<u64, usize> = HashMap::new();
    let backwards = requests.iter().enumerate().rev();
    let mut uses: Vec<_> = backwards.map(|(now, request)| request.blocks.iter().map(|&id| next.insert(id, now)).collect()).collect();
    uses.reverse();
    uses
}
