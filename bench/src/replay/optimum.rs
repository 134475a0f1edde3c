//! What no policy can beat: a cache that knows the future, Belady's MIN for prefixes.
//!
//! After each request it keeps, of the blocks that it held and those of the request, the ones that are needed again
//! soonest; unlike a pool it need not take what it will not keep. Between two uses of a block lies an interval in which
//! keeping it takes a slot and brings one hit. As many intervals as possible are to be chosen so that never more than there
//! are slots overlap, and dropping the one that ends last wherever there are too many is an optimal choice (Carlisle and
//! Lloyd, *On the k-coloring of intervals*, 1995; Belady's rule, 1966). So the number of hits is optimal among all caches,
//! even those that count hits without the blocks before them. This one never has such: a block is needed again no later
//! than those after it in its chain, and of equals the one further down the chain is dropped. Hit tokens are as good as
//! optimal: only a prompt's last, partly filled block counts for less than the others.

use super::{Hits, trace::Request};
use std::collections::{BTreeSet, HashMap};

/// When a block is needed next, its place in the chain, its id.
type Need = (usize, usize, u64);

/// What a cache of so many blocks finds of the requests' prompts.
pub fn hits(requests: &[Request], slots: usize) -> Hits {
    let next_uses = next_uses(requests);
    let mut kept: BTreeSet<Need> = BTreeSet::new();
    let mut hits = Hits::default();
    for (now, (request, next_uses)) in requests.iter().zip(next_uses).enumerate() {
        let held = |&(place, &id): &(usize, &u64)| kept.contains(&(now, place, id));
        hits.add(request, request.blocks.iter().enumerate().take_while(held).count());
        // What is not needed now is needed later: the first ones are this request's.
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
