//! Admission's waiting half: which of the blocks that a sequence asked the pool for are here.
//!
//! Every engine admits the same way: *match what exists, fetch it, compute the rest.* Blocks arrive in any order; the first
//! one that is missing ends what the fetch is good for, since KV is computed in order from there.

use std::time::Duration;
use tidemill_proto::ids::RequestId;

/// Names one fetch; results of a fetch that was given up are recognized and dropped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FetchId(pub u64);

/// Where a fetched block was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Dram,
    Nvme,
    Remote,
}

/// One fetched block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// The request whose job computed it: the asking one, or an earlier one.
    pub origin: RequestId,
    pub source: Source,
}

/// A fetch under way for a run of a sequence's blocks.
#[derive(Debug)]
pub struct Fetching {
    pub id: FetchId,
    /// The run's first block, by its place in the sequence.
    pub first: usize,
    pub started: Duration,
    arrived: Vec<Option<Arrival>>,
    /// Blocks from here on are not worth waiting for: one before them is missing.
    cutoff: usize,
}

impl Fetching {
    pub fn new(id: FetchId, first: usize, blocks: usize, now: Duration) -> Self {
        Self { id, first, started: now, arrived: vec![None; blocks], cutoff: blocks }
    }

    /// Block `index` of the run is here. Its place in the sequence, if it is wanted (not beyond the cutoff, not seen before).
    pub fn arrive(&mut self, index: usize, arrival: Arrival) -> Option<usize> {
        if index >= self.cutoff || self.arrived[index].is_some() {
            return None;
        }
        self.arrived[index] = Some(arrival);
        Some(self.first + index)
    }

    /// Block `index` of the run will not come.
    pub fn miss(&mut self, index: usize) {
        self.cutoff = self.cutoff.min(index);
    }

    /// Settles for the leading run that is here by now.
    pub fn settle(&mut self) {
        self.cutoff = self.arrived[..self.cutoff].iter().take_while(|a| a.is_some()).count();
    }

    /// Every block that still matters is here.
    pub fn is_done(&self) -> bool {
        self.arrived[..self.cutoff].iter().all(Option::is_some)
    }

    /// Some blocks were given up: the rest of the fetch is of no use.
    pub fn is_cut(&self) -> bool {
        self.cutoff < self.arrived.len()
    }

    /// The blocks of the finished run, in order.
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.arrived[..self.cutoff].iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn settling_keeps_what_leads() {
        let mut fetching = Fetching::new(FetchId(0), 0, 4, Duration::ZERO);
        fetching.arrive(0, HERE);
        fetching.arrive(2, HERE);
        fetching.settle();
        assert!(fetching.is_done());
        assert_eq!(fetching.arrivals().len(), 1);
    }
}
