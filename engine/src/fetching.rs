//! A fetch under way: which of its blocks are here, and which still matter.
//!
//! Blocks arrive in any order. KV is computed in order from the first block that is missing, so a miss makes all blocks after it
//! useless.

use std::time::Duration;
use tidemill_kvpool::client::{Arrival, FetchId};

/// A fetch of consecutive blocks of one job.
#[derive(Debug)]
pub(crate) struct Fetching {
    pub(crate) id: FetchId,
    /// Number of the first block in the job's chain.
    pub(crate) first: usize,
    pub(crate) started: Duration,
    arrived: Vec<Option<Arrival>>,
    /// Blocks asked for, counted from `first`, in the order of the fetch's keys.
    asked: Vec<usize>,
    /// Counted from `first`: blocks from here on are useless, since an earlier one is missing.
    cutoff: usize,
}

impl Fetching {
    pub(crate) fn new(id: FetchId, first: usize, blocks: usize, now: Duration) -> Self {
        Self { id, first, started: now, arrived: vec![None; blocks], asked: (0..blocks).collect(), cutoff: blocks }
    }

    /// The number in the chain of the block behind the fetch's key `index`, unless it is useless or a duplicate.
    pub(crate) fn wanted(&self, index: usize) -> Option<usize> {
        let place = self.asked[index];
        (place < self.cutoff && self.arrived[place].is_none()).then_some(self.first + place)
    }

    /// The fetch's key `index` is here. Returns its block's number, as [`wanted`](Self::wanted) does.
    pub(crate) fn arrive(&mut self, index: usize, arrival: Arrival) -> Option<usize> {
        let number = self.wanted(index)?;
        self.arrived[number - self.first] = Some(arrival);
        Some(number)
    }

    /// The fetch's key `index` will not come.
    pub(crate) fn miss(&mut self, index: usize) {
        self.cutoff = self.cutoff.min(self.asked[index]);
    }

    /// Continues as fetch `id`, for the blocks that are missing. Returns their numbers in the chain.
    pub(crate) fn restart(&mut self, id: FetchId) -> impl Iterator<Item = usize> {
        self.id = id;
        self.asked = (0..self.cutoff).filter(|&place| self.arrived[place].is_none()).collect();
        self.asked.iter().map(|place| self.first + place)
    }

    /// Whether every block that still matters is here.
    pub(crate) fn is_done(&self) -> bool {
        self.arrived[..self.cutoff].iter().all(Option::is_some)
    }

    /// Whether a miss made some blocks useless.
    pub(crate) fn is_cut(&self) -> bool {
        self.cutoff < self.arrived.len()
    }

    /// Of a finished fetch: the blocks that count, in order.
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

    #[test]
    fn blocks_arrive_in_any_order() {
        let mut fetching = Fetching::new(FetchId(0), 3, 3, Duration::ZERO);
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
        let mut fetching = Fetching::new(FetchId(0), 0, 4, Duration::ZERO);
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
        let mut fetching = Fetching::new(FetchId(0), 5, 4, Duration::ZERO);
        fetching.arrive(0, HERE);
        fetching.arrive(2, HERE);
        assert_eq!(fetching.restart(FetchId(1)).collect::<Vec<_>>(), [6, 8]);
        assert_eq!(fetching.arrive(0, HERE), Some(6), "keys are counted anew");
        fetching.miss(1);
        assert!(fetching.is_done());
        assert_eq!(fetching.arrivals().len(), 3);
    }
}
