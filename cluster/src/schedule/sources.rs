//! Sources of a sequence's blocks, and the destination of new ones.
//!
//! - **Reading**, per block: DRAM before NVMe before object storage, near before far, staying nodes before draining ones; among equals, the
//!   fewest runs, since each is a round trip.
//! - **Home**, for new blocks: a near node if there is one, with room if possible, then the node that most blocks are read from, so that a
//!   chain stays together.

use super::PoolCandidate;
use crate::index::{Holder, Leading};
use tidemill_proto::{ids::Epoch, message::Host, pool::Tier};

/// Consecutive blocks that are read from one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRun {
    pub node: Epoch,
    /// Whether the node is on the reader's host.
    pub near: bool,
    pub blocks: u32,
}

/// The rank of a block's copy: the least is the best.
type Rank = (Tier, Far, Draining);
type Far = bool;
type Draining = bool;

/// Consecutive blocks with the same holders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held<'a> {
    pub(super) holders: &'a [Holder],
    pub(super) blocks: u32,
}

/// The first `blocks_max` leading blocks, as far as pool nodes hold them. Every plan of a decision iterates over these few stretches rather
/// than over the blocks.
pub(super) fn held(leading: &Leading, blocks_max: u32) -> Vec<Held<'_>> {
    let mut left = blocks_max;
    let cut = leading.readable().map(|(blocks, holders)| {
        let blocks = blocks.min(left);
        left -= blocks;
        Held { holders, blocks }
    });
    cut.take_while(|held| held.blocks > 0).collect()
}

/// The candidate with this epoch. `pools` are in order of epochs.
pub(super) fn find<'p, 'a>(pools: &'p [PoolCandidate<'a>], node: Epoch) -> Option<&'p PoolCandidate<'a>> {
    pools.binary_search_by_key(&node, |pool| pool.node).ok().map(|at| &pools[at])
}

/// Splits stretches of blocks into runs, one per source. Ends before a block that no candidate holds, or none on the host `only`.
pub(super) fn choose_runs(held: &[Held<'_>], pools: &[PoolCandidate<'_>], reader: &Host, only: Option<&Host>) -> Vec<SourceRun> {
    let rank = |holder: &Holder| -> Option<Rank> {
        let pool = find(pools, holder.node).filter(|pool| only.is_none_or(|host| pool.host == host))?;
        Some((holder.tier, pool.host != reader, pool.draining))
    };
    // For each stretch, the nodes with the best copies.
    let best = held.iter().map_while(|held| {
        let mut best: Option<(Rank, Vec<Epoch>)> = None;
        for (rank, node) in held.holders.iter().filter_map(|holder| Some((rank(holder)?, holder.node))) {
            match &mut best {
                Some((least, nodes)) if rank == *least => nodes.push(node),
                Some((least, _)) if rank > *least => {}
                _ => best = Some((rank, vec![node])),
            }
        }
        best
    });
    let best: Vec<(Rank, Vec<Epoch>)> = best.collect();
    let mut runs: Vec<SourceRun> = Vec::new();
    let mut at = 0;
    while let Some(((_, far, _), nodes)) = best.get(at) {
        // Taking the node whose run reaches furthest at each step gives the fewest runs.
        let reach = |node: Epoch| best[at..].iter().take_while(|(_, nodes)| nodes.contains(&node)).count();
        let furthest = nodes.iter().map(|&node| (reach(node), node)).max_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        let (reach, node) = furthest.expect("some node has the best copy");
        runs.push(SourceRun { node, near: !far, blocks: held[at..at + reach].iter().map(|held| held.blocks).sum() });
        at += reach;
    }
    runs
}

/// The node for `new_blocks` blocks of a sequence that reads `runs`.
pub(super) fn choose_home(pools: &[PoolCandidate<'_>], reader: &Host, runs: &[SourceRun], new_blocks: u64) -> Option<Epoch> {
    let merit = |pool: &PoolCandidate<'_>| {
        let read: u32 = runs.iter().filter(|run| run.node == pool.node).map(|run| run.blocks).sum();
        let has_room = pool.room_blocks >= new_blocks;
        (pool.host == reader, has_room, read, pool.free_blocks)
    };
    let taking = pools.iter().filter(|pool| !pool.draining);
    taking.max_by(|a, b| merit(a).cmp(&merit(b)).then(b.node.cmp(&a.node))).map(|pool| pool.node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ObjectSpeed;

    /// Rows of `nodes | blocks | runs home`. A node is its host, with `!` if it drains, and its free blocks. A block lists its holders:
    /// nodes by their index, with `n` for NVMe. The reader is on host `a`. Runs are `node×blocks`.
    #[test]
    fn blocks_are_read_where_it_is_best_and_new_ones_go_near() {
        let table = "
            a9            | 0 0 0         | 0×3 home 0
            a9 b9         | 01 01 1       | 0×2 1×1 home 0
            b9 a9         | 0 01 1        | 0×1 1×2 home 1
            a9 b9         | 0n1 0n        | 1×1 0×1 home 0
            a9 b9         | 0n 0n1n 0     | 0×3 home 0
            b9 b9 b9      | 01 012 12     | 1×3 home 1
            b9 b9 b9      | 0 01 12 2     | 0×2 2×2 home 0
            b9 b8         | 1 1           | 1×2 home 1
            b8 b9         | -             | home 1
            a!9 a9        | 01 0          | 1×1 0×1 home 1
            a!9 b9        | 0 01          | 0×2 home 1
            a!9           | 0             | 0×1 home -
            a9            | 0 - 0         | 0×1 home 0
            a2 b9         | 0             | 0×1 home 0
            a2 a9         | 0             | 0×1 home 1
            -             | -             | home -
            ";
        let here = Host("a".into());
        for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let items = |cell: &'static str| cell.split_whitespace();
            let [nodes, blocks, expected] = cells[..] else { panic!("row `{row}`") };
            let hosts: Vec<Host> = items(nodes).filter(|item| *item != "-").map(|item| Host(item[..1].into())).collect();
            let pool = |(n, (host, item)): (usize, (_, &str))| {
                let free = item.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
                PoolCandidate {
                    node: Epoch(n as u64),
                    host,
                    draining: item.contains('!'),
                    free_blocks: free,
                    room_blocks: free,
                    object: ObjectSpeed::default(),
                }
            };
            let pools: Vec<_> = hosts.iter().zip(items(nodes)).enumerate().map(pool).collect();
            let holders = |item: &str| -> Vec<Holder> {
                let digits = item.char_indices().filter(|(_, c)| c.is_ascii_digit());
                let tier = |at: usize| if item[at + 1..].starts_with('n') { Tier::Nvme } else { Tier::Dram };
                digits.map(|(at, c)| Holder { node: Epoch(u64::from(c.to_digit(10).unwrap())), tier: tier(at) }).collect()
            };
            let leading: Leading = items(blocks).map(holders).collect();
            let runs = choose_runs(&held(&leading, u32::MAX), &pools, &here, None);
            let home = choose_home(&pools, &here, &runs, 5).map_or("-".to_owned(), |node| node.to_string());
            let mut got: Vec<String> = runs.iter().map(|run| format!("{}×{}", run.node, run.blocks)).collect();
            got.push(format!("home {home}"));
            assert_eq!(got.join(" "), expected, "{row}");
            assert!(runs.iter().all(|run| run.near == (*pools[run.node.0 as usize].host == here)));
        }
    }
}
