//! Admission's waiting half: which of the blocks that a sequence asked the pool for are here.
//!
//! Every engine admits the same way: *match what exists, fetch it, compute the rest.* Blocks arrive in any order; the first
//! one that is missing ends what the fetch is good for, since KV is computed in order from there.

use std::{collections::HashMap, time::Duration};
use tidemill_proto::{block::BlockKey, ids::RequestId, message::PoolNode};

/// How many blocks a queue may hold: what fits into `bytes`, at least one and at most `blocks_max`.
pub fn blocks_within(bytes: usize, block_bytes: usize, blocks_max: usize) -> usize {
    (bytes / block_bytes.max(1)).clamp(1, blocks_max)
}

/// Names one fetch; results of a fetch that was given up are recognized and dropped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FetchId(pub u64);

/// Fetches under way, and for whom.
#[derive(Debug)]
pub struct Fetches<O> {
    owners: HashMap<FetchId, O>,
    begun: u64,
}

impl<O> Default for Fetches<O> {
    fn default() -> Self {
        Self { owners: HashMap::new(), begun: 0 }
    }
}

impl<O: Copy> Fetches<O> {
    pub fn begin(&mut self, owner: O) -> FetchId {
        let id = FetchId(self.begun);
        self.begun += 1;
        self.owners.insert(id, owner);
        id
    }

    /// `None`: it has ended.
    pub fn owner(&self, id: FetchId) -> Option<O> {
        self.owners.get(&id).copied()
    }

    pub fn end(&mut self, id: FetchId) {
        self.owners.remove(&id);
    }

    pub fn len(&self) -> usize {
        self.owners.len()
    }

    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }
}

/// The part of a fetch that one node answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    pub node: PoolNode,
    pub keys: Vec<BlockKey>,
    /// How long the node may wait for a block to come.
    pub wait: Duration,
}

/// Splits a fetch where the node changes. Only at `home` is anything waited for: elsewhere, what is not there does not come.
pub fn parts(blocks: impl IntoIterator<Item = (PoolNode, BlockKey)>, home: Option<PoolNode>, wait: Duration) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (node, key) in blocks {
        match parts.last_mut() {
            Some(part) if part.node == node => part.keys.push(key),
            _ => parts.push(Part { node, keys: vec![key], wait: if Some(node) == home { wait } else { Duration::ZERO } }),
        }
    }
    parts
}

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
    /// The run's blocks that were asked for, in the order of the fetch's keys.
    asked: Vec<usize>,
    /// Blocks from here on are not worth waiting for: one before them is missing.
    cutoff: usize,
}

impl Fetching {
    pub fn new(id: FetchId, first: usize, blocks: usize, now: Duration) -> Self {
        Self { id, first, started: now, arrived: vec![None; blocks], asked: (0..blocks).collect(), cutoff: blocks }
    }

    /// The fetch's key `index` is here. Its block's place in the sequence, if it is wanted (not beyond the cutoff, not seen before).
    pub fn arrive(&mut self, index: usize, arrival: Arrival) -> Option<usize> {
        let place = self.asked[index];
        if place >= self.cutoff || self.arrived[place].is_some() {
            return None;
        }
        self.arrived[place] = Some(arrival);
        Some(self.first + place)
    }

    /// The fetch's key `index` will not come.
    pub fn miss(&mut self, index: usize) {
        self.cutoff = self.cutoff.min(self.asked[index]);
    }

    /// Goes on as another fetch, for what is missing. The blocks to ask for, by their places in the sequence.
    pub fn restart(&mut self, id: FetchId) -> impl Iterator<Item = usize> {
        self.id = id;
        self.asked = (0..self.cutoff).filter(|&place| self.arrived[place].is_none()).collect();
        self.asked.iter().map(|place| self.first + place)
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
    fn queues_are_bounded_in_blocks_and_bytes() {
        assert_eq!([1 << 10, 1 << 20, 1 << 30].map(|block_bytes| blocks_within(64 << 20, block_bytes, 256)), [256, 64, 1]);
    }

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
    fn a_fetch_is_split_where_the_node_changes() {
        let node = |port: u16| PoolNode { addr: ([127, 0, 0, 1], port).into(), near: true };
        let key = |n: u8| BlockKey([n; 16]);
        let wait = Duration::from_secs(1);
        let blocks = [(1, 0), (1, 1), (2, 2), (1, 3)].map(|(port, n)| (node(port), key(n)));
        let part = |port, keys: &[u8], wait| Part { node: node(port), keys: keys.iter().map(|&n| key(n)).collect(), wait };
        let expected = [part(1, &[0, 1], wait), part(2, &[2], Duration::ZERO), part(1, &[3], wait)];
        assert_eq!(parts(blocks, Some(node(1)), wait), expected);
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
