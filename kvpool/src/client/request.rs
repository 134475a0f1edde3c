//! The parameters of a get, and the outcome for each block. Builds without the shell, for cores that decide what to fetch.

use std::time::Duration;
use tidemill_proto::{block::BlockKey, ids::RequestId, message::PoolNode};

/// The capacity of a queue in blocks: as many as fit into `bytes`, at least one and at most `blocks_max`.
pub fn blocks_within(bytes: usize, block_bytes: usize, blocks_max: usize) -> usize {
    (bytes / block_bytes.max(1)).clamp(1, blocks_max)
}

/// The identity of one fetch, by which late results of a cancelled one are recognized and dropped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FetchId(pub u64);

/// The part of a fetch that one node answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    pub node: PoolNode,
    pub keys: Vec<BlockKey>,
    /// The time that the node may wait for a block to arrive.
    pub wait: Duration,
}

/// Splits a fetch where the node changes. Only `home` waits for blocks: at other nodes, a missing block will not arrive.
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

/// The tier in which a fetched block was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Dram,
    Nvme,
    Object,
    Remote,
}

/// One fetched block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// The request whose job computed it: the current one, or an earlier one.
    pub origin: RequestId,
    pub source: Source,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_bounded_in_blocks_and_bytes() {
        assert_eq!([1 << 10, 1 << 20, 1 << 30].map(|block_bytes| blocks_within(64 << 20, block_bytes, 256)), [256, 64, 1]);
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
}
