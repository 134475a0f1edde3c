//! The scheduler's candidates: members joined with their load.

use crate::{
    class::Classes,
    cost::CostModel,
    index::Leading,
    load::{DecodeLoad, Load},
    membership::{Member, Membership, sequence_tokens_max},
    schedule::{DecodeCandidate, ObjectSpeed, Policy, PoolCandidate, PrefillCandidate},
    shortlist::{BEST_MAX, Shortlist, Standing},
};
use std::{cmp::Reverse, time::Duration};
use tidemill_proto::{
    ids::Epoch,
    message::{Blocks, EngineInfo, Objects, Peer, Role, RoleInfo, TierBlocks},
};

/// The length of prompt by which workers are compared.
const TYPICAL_TOKENS: u64 = 1024;
/// A pool node knows no block size before its first client, and holds no blocks that could be pushed out.
const EVERYTHING_FITS: u64 = u64::MAX;

/// The state from which candidates are built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Books<'a> {
    pub(crate) membership: &'a Membership,
    pub(crate) load: &'a Load,
    pub(crate) cost: &'a CostModel,
}

/// The candidates for one decision.
pub(crate) struct Candidates<'a> {
    pub(crate) prefill: Vec<PrefillCandidate<'a>>,
    pub(crate) decode: Vec<DecodeCandidate<'a>>,
    /// Pool nodes, in order of epochs.
    pub(crate) pools: Vec<PoolCandidate<'a>>,
}

/// A prefill worker that takes new work, with room in its queue. `blocks` tells which nodes hold the leading blocks of the sequence.
pub(crate) fn prefill<'a>(books: &Books<'a>, worker: Epoch, blocks: &Leading, now: Duration) -> Option<PrefillCandidate<'a>> {
    let member = books.membership.get(worker).filter(|member| !member.draining)?;
    let RoleInfo::Prefill(info) = &member.role else { return None };
    let queue = &books.load.get(worker)?.prefill;
    (queue.len() < info.work_max as usize).then_some(PrefillCandidate {
        worker,
        host: &member.host,
        queue_ms: queue.wait_ms(now),
        queue,
        cached_blocks: blocks.cached_by(worker),
        cost: books.cost.steps(worker, Role::Prefill),
    })
}

/// A decode worker that takes new work.
pub(crate) fn decode<'a>(books: &Books<'a>, worker: Epoch, blocks: &Leading) -> Option<DecodeCandidate<'a>> {
    let member = books.membership.get(worker).filter(|member| !member.draining)?;
    let info = member.decode_info()?;
    let load = books.load.get(worker)?;
    let DecodeLoad { decoding, ref classes, .. } = load.decode;
    let (sequences, tokens) = load.whole(TYPICAL_TOKENS);
    let EngineInfo { device_blocks, work_max, .. } = *info;
    Some(DecodeCandidate {
        worker,
        host: &member.host,
        sequences,
        tokens,
        decoding,
        classes,
        device_blocks,
        context_tokens: sequence_tokens_max(info),
        work_max,
        cached_blocks: blocks.cached_by(worker),
        cost: books.cost.steps(worker, Role::Decode),
    })
}

/// A pool node, draining or not: its blocks can be read in either case.
pub(crate) fn pool<'a>(books: &Books<'a>, node: Epoch) -> Option<PoolCandidate<'a>> {
    let member = books.membership.get(node).filter(|member| member.role() == Role::Kvpool)?;
    let report = &books.load.get(node)?.report;
    let Blocks { total, free, cached, .. } = report.blocks.dram;
    let (free_blocks, room_blocks) = if total == 0 { (EVERYTHING_FITS, EVERYTHING_FITS) } else { (free, free.saturating_add(cached)) };
    let Objects { latency_ms, bytes_per_ms, left_alone, .. } = report.counters.objects;
    let object = if left_alone == 0 { ObjectSpeed { latency_ms, bytes_per_ms } } else { ObjectSpeed::default() };
    Some(PoolCandidate { node, host: &member.host, draining: member.draining, free_blocks, room_blocks, object })
}

/// All candidates.
pub(crate) fn all<'a>(books: &Books<'a>, blocks: &Leading, now: Duration) -> Candidates<'a> {
    let members = || books.membership.iter().map(|(epoch, _)| epoch);
    Candidates {
        prefill: members().filter_map(|worker| prefill(books, worker, blocks, now)).collect(),
        decode: members().filter_map(|worker| decode(books, worker, blocks)).collect(),
        pools: members().filter_map(|node| pool(books, node)).collect(),
    }
}

/// The candidates worth comparing for a sequence: the least busy workers, those near the pool nodes `holders` (which have its leading
/// blocks), and those with most of these blocks on their own devices.
pub(crate) fn few<'a>(
    books: &Books<'a>,
    shortlist: &Shortlist,
    holders: &[Epoch],
    blocks: &Leading,
    seed: u64,
    now: Duration,
) -> Candidates<'a> {
    let neighbours: Vec<Epoch> =
        holders.iter().filter_map(|holder| books.membership.get(*holder)).flat_map(|member| shortlist.on_host(&member.host)).collect();
    let mut found = Candidates { prefill: Vec::new(), decode: Vec::new(), pools: Vec::new() };
    let add_decode = |found: &mut Candidates<'a>, worker| {
        if !found.decode.iter().any(|known| known.worker == worker) {
            found.decode.extend(decode(books, worker, blocks));
        }
    };
    let add_prefill = |found: &mut Candidates<'a>, worker| {
        if !found.prefill.iter().any(|known| known.worker == worker) {
            found.prefill.extend(prefill(books, worker, blocks, now));
        }
    };
    shortlist.decode().take(BEST_MAX).for_each(|worker| add_decode(&mut found, worker));
    shortlist.prefill().into_iter().for_each(|order| order.take(BEST_MAX).for_each(|worker| add_prefill(&mut found, worker)));
    for worker in most_cached(blocks, seed) {
        add_decode(&mut found, worker);
        add_prefill(&mut found, worker);
    }
    // Starts at a different neighbour for each request: the blocks of a popular prompt are everywhere.
    let first = if neighbours.is_empty() { 0 } else { (seed % neighbours.len() as u64) as usize };
    let (decode_max, prefill_max) = (found.decode.len() + BEST_MAX, found.prefill.len() + BEST_MAX);
    for &worker in neighbours[first..].iter().chain(&neighbours[..first]) {
        if found.decode.len() < decode_max {
            add_decode(&mut found, worker);
        }
        if found.prefill.len() < prefill_max {
            add_prefill(&mut found, worker);
        }
    }
    let mut nodes: Vec<Epoch> = holders.to_vec();
    let hosts = found.decode.iter().map(|worker| worker.host).chain(found.prefill.iter().map(|worker| worker.host));
    nodes.extend(hosts.flat_map(|host| shortlist.on_host(host)).chain(shortlist.strangers(seed)));
    nodes.sort_unstable();
    nodes.dedup();
    found.pools = nodes.into_iter().filter_map(|node| pool(books, node)).collect();
    found
}

/// Engines with the most leading blocks on their own devices. Ties are broken differently for each request, so that one popular prompt does
/// not send all requests to the same few engines.
fn most_cached(blocks: &Leading, seed: u64) -> Vec<Epoch> {
    let mut cached: Vec<(Reverse<u32>, u64, Epoch)> =
        blocks.cached().map(|(engine, own)| (Reverse(own), (engine.0 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15), engine)).collect();
    if cached.len() > BEST_MAX {
        cached.select_nth_unstable(BEST_MAX);
        cached.truncate(BEST_MAX);
    }
    cached.into_iter().map(|(.., engine)| engine).collect()
}

/// The position of a member on the shortlist.
pub(crate) fn standing(books: &Books<'_>, worker: Epoch, policy: &Policy, classes: &Classes, now: Duration) -> Standing {
    let (Some(member), Some(load)) = (books.membership.get(worker), books.load.get(worker)) else { return Standing::Out };
    let micros = |ms: f64| (ms * 1e3) as u64;
    match &member.role {
        _ if member.draining => Standing::Out,
        RoleInfo::Kvpool { .. } => Standing::Pool,
        RoleInfo::Decode(info) => {
            let (tail_tokens, (sequences, tokens)) = (load.decode.tail_tokens, load.whole(TYPICAL_TOKENS));
            let cost = books.cost.steps(worker, Role::Decode);
            let tails_ms = if tail_tokens == 0 { 0.0 } else { cost.prefill_ms(tail_tokens, 0) };
            let wait_ms = tails_ms + cost.step_ms(u64::from(sequences) + 1, tokens + TYPICAL_TOKENS);
            // It has room for the first class as long as that class alone does not fill it.
            let yielding = classes.yielding_to_first().map(|id| load.decode.classes[usize::from(id.0)].sequences).sum::<u32>();
            let most = policy.decode_sequences_max.map_or(info.work_max, |most| most.min(info.work_max));
            let is_full = sequences - yielding >= most;
            if is_full { Standing::Out } else { Standing::Decode(micros(wait_ms)) }
        }
        RoleInfo::Prefill(info) => {
            let queue = &load.prefill;
            let own_ms = books.cost.steps(worker, Role::Prefill).prefill_ms(TYPICAL_TOKENS, 0);
            match queue.len() {
                0 => Standing::IdlePrefill(micros(own_ms)),
                jobs if jobs >= info.work_max as usize => Standing::Out,
                _ => Standing::BusyPrefill(now.as_micros() as u64 + micros(queue.wait_ms(now) + own_ms)),
            }
        }
    }
}

/// Pool nodes that may take over the blocks of `leaving`: near ones first, then by free blocks.
pub(crate) fn peers(membership: &Membership, load: &Load, leaving: Epoch) -> Vec<Peer> {
    let peer = |(epoch, _): (Epoch, &Member)| {
        let TierBlocks { dram, nvme, .. } = load.get(epoch)?.report.blocks;
        // Blocks arrive in DRAM, and older ones make room by moving to the disk.
        let free_blocks = if dram.total == 0 { EVERYTHING_FITS } else { dram.free.saturating_add(nvme.free) };
        Some(Peer { node: membership.pool_node(epoch, leaving)?, free_blocks })
    };
    let mut peers: Vec<Peer> = membership.taking_work().filter(|(epoch, _)| *epoch != leaving).filter_map(peer).collect();
    peers.sort_by_key(|peer| (!peer.node.near, Reverse(peer.free_blocks), peer.node.addr));
    peers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::tests::{engine, model, register_at};
    use tidemill_proto::message::Report;

    #[test]
    fn a_pool_node_is_near_on_its_own_host_and_leaves_to_the_others() {
        let (mut membership, mut load) = (Membership::new(0, model()), Load::default());
        let pool = |port: u16| RoleInfo::Kvpool { addr: ([127, 0, 0, 1], port).into() };
        let ports = [("a", 1), ("b", 2), ("a", 3), ("a", 4)];
        let nodes = ports.map(|(host, port)| {
            let epoch = membership.take(register_at(host, "k", pool(port))).unwrap();
            load.add_worker(Duration::ZERO, epoch);
            epoch
        });
        let decode = membership.take(register_at("b", "d", RoleInfo::Decode(engine(1)))).unwrap();
        assert_eq!(nodes.map(|node| membership.pool_node(node, decode).unwrap().near), [false, true, false, false]);
        assert_eq!(membership.pool_node(decode, nodes[0]), None);
        let blocks = TierBlocks {
            dram: Blocks { total: 10, free: 2, ..Blocks::default() },
            nvme: Blocks { total: 9, free: 7, ..Blocks::default() },
            ..TierBlocks::default()
        };
        load.reported(nodes[1], Report { blocks, ..Report::default() });
        membership.drain(nodes[3]);
        let peers = peers(&membership, &load, nodes[0]);
        let peers: Vec<_> = peers.iter().map(|peer| (peer.node.addr.port(), peer.node.near, peer.free_blocks)).collect();
        assert_eq!(peers, [(3, true, u64::MAX), (2, false, 9)], "those that stay, near ones first; an untouched one takes everything");
    }
}
