//! A fetch in progress: the blocks that have arrived, and those that still matter.
//!
//! Blocks arrive in any order. KV is computed in order from the first missing block on, so a miss makes all blocks after it useless.

use std::time::Duration;
use tidemill_kvpool::client::{Arrival, FetchId};
use tidemill_proto::message::PoolNode;

/// A fetch of consecutive blocks of one job.
#[derive(Debug)]
pub(crate) struct Fetching {
    pub(crate) id: FetchId,
    /// The number of the first block in the job's chain.
    pub(crate) first: usize,
    pub(crate) started: Duration,
    /// The node of each block of the job's chain, up to the end of the fetched blocks.
    nodes: Vec<PoolNode>,
    /// The fetched blocks, followed by the blocks of the state at their end.
    arrived: Vec<Option<Arrival>>,
    /// The requested blocks, counted from `first`, in the order of the fetch's keys.
    asked: Vec<usize>,
    /// The number, counted from `first`, from which on blocks are useless, as an earlier one is missing.
    cutoff: usize,
    /// The number of earlier ends that may still be tried if the state is missing.
    tries: u32,
}

/// The most earlier ends whose states are tried after the expected one, as each takes a round trip.
const TRIES_MAX: u32 = 4;

impl Fetching {
    /// A fetch of the blocks from number `first` on, as far as `nodes` go, and then of the `parts` blocks of the state there.
    pub(crate) fn new(id: FetchId, first: usize, nodes: Vec<PoolNode>, parts: usize, now: Duration) -> Self {
        let blocks = nodes.len() - first + parts;
        let asked = (0..blocks).collect();
        Self { id, first, started: now, nodes, arrived: vec![None; blocks], asked, cutoff: blocks, tries: TRIES_MAX }
    }

    /// One more than the number of the last fetched block of the chain. Blocks of the state are numbered from here on.
    pub(crate) fn end(&self) -> usize {
        self.nodes.len()
    }

    /// The node of the block with this number.
    pub(crate) fn node(&self, number: usize) -> PoolNode {
        self.nodes[number.min(self.end() - 1)]
    }

    /// Continues as fetch `id`, for the `parts` blocks of the state at an earlier `end`, up to which all blocks have arrived.
    pub(crate) fn shorten(&mut self, id: FetchId, end: usize, parts: usize) -> std::ops::Range<usize> {
        let blocks = end - self.first;
        self.id = id;
        self.nodes.truncate(end);
        self.arrived.truncate(blocks);
        self.arrived.resize(blocks + parts, None);
        self.asked = (blocks..blocks + parts).collect();
        self.cutoff = blocks + parts;
        self.tries -= 1;
        end..end + parts
    }

    pub(crate) fn may_shorten(&self) -> bool {
        self.tries > 0
    }

    /// The number in the chain of the block of the fetch's key `index`, unless it is useless or a duplicate.
    pub(crate) fn wanted(&self, index: usize) -> Option<usize> {
        let place = self.asked[index];
        (place < self.cutoff && self.arrived[place].is_none()).then_some(self.first + place)
    }

    /// Notes that the fetch's key `index` has arrived. Returns its block's number, as [`wanted`](Self::wanted) does.
    pub(crate) fn arrive(&mut self, index: usize, arrival: Arrival) -> Option<usize> {
        let number = self.wanted(index)?;
        self.arrived[number - self.first] = Some(arrival);
        Some(number)
    }

    /// Notes that the fetch's key `index` will not arrive.
    pub(crate) fn miss(&mut self, index: usize) {
        self.cutoff = self.cutoff.min(self.asked[index]);
    }

    /// Continues as fetch `id`, for the blocks that are missing. Returns their numbers in the chain.
    pub(crate) fn restart(&mut self, id: FetchId) -> impl Iterator<Item = usize> {
        self.id = id;
        self.asked = (0..self.cutoff).filter(|&place| self.arrived[place].is_none()).collect();
        self.asked.iter().map(|place| self.first + place)
    }

    /// Whether every block that still matters has arrived.
    pub(crate) fn is_done(&self) -> bool {
        self.arrived[..self.cutoff].iter().all(Option::is_some)
    }

    /// Whether a miss made some blocks useless.
    pub(crate) fn is_cut(&self) -> bool {
        self.cutoff < self.arrived.len()
    }

    /// The blocks of a finished fetch that count, in order.
    pub(crate) fn arrivals(&self) -> Vec<Arrival> {
        self.arrived[..self.cutoff].iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_kvpool::client::Source;
    use tidemill_proto::ids::RequestId;

    const HERE: Arrival = Arrival { origin: RequestId(1), source: Source::Dram };

    fn fetching(first: usize, end: usize) -> Fetching {
        let node = PoolNode { addr: ([127, 0, 0, 1], 1).into(), near: true };
        Fetching::new(FetchId(0), first, vec![node; end], 0, Duration::ZERO)
    }

    #[test]
    fn blocks_arrive_in_any_order() {
        let mut fetching = fetching(3, 6);
        assert_eq!(fetching.arrive(2, HERE), Some(5));
        assert_eq!(fetching.arrive(2, HERE), None, "duplicates are dropped");
        assert_eq!(fetching.arrive(0, HERE), Some(3));
        assert!(!fetching.is_done());
        assert_eq!(fetching.arrive(1, HERE), Some(4));
        assert!(fetching.is_done() && !fetching.is_cut());
        assert_eq!(fetching.arrivals().len(), 3);
    }

    #[test]
    fn a_missing_block_ends_the_run_before_it() {
        let mut fetching = fetching(0, 4);
        fetching.arrive(3, HERE);
        fetching.miss(1);
        assert!(!fetching.is_done(), "block 0 still matters");
        assert_eq!(fetching.arrive(2, HERE), None);
        fetching.arrive(0, HERE);
        assert!(fetching.is_done() && fetching.is_cut());
        assert_eq!(fetching.arrivals().len(), 1);
    }

    #[test]
    fn a_restart_asks_for_what_is_missing() {
        let mut fetching = fetching(5, 9);
        fetching.arrive(0, HERE);
        fetching.arrive(2, HERE);
        assert_eq!(fetching.restart(FetchId(1)).collect::<Vec<_>>(), [6, 8]);
        assert_eq!(fetching.arrive(0, HERE), Some(6), "keys are counted anew");
        fetching.miss(1);
        assert!(fetching.is_done());
        assert_eq!(fetching.arrivals().len(), 3);
    }
}
