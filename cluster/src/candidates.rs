//! The scheduler's candidates: members joined with their load.

use crate::{
    cost::CostModel,
    load::{DecodeLoad, Load},
    membership::{Member, Membership, sequence_tokens_max},
    schedule::{DecodeCandidate, PoolCandidate, PrefillCandidate},
};
use std::{cmp::Reverse, time::Duration};
use tidemill_proto::{
    ids::Epoch,
    message::{Blocks, EngineInfo, Peer, Role, RoleInfo, TierBlocks},
};

/// Before its first client a pool node knows no block size, and holds nothing that could be pushed out.
const EVERYTHING_FITS: u64 = u64::MAX;

pub(crate) fn prefill<'a>(membership: &'a Membership, load: &'a Load, cost: &'a CostModel, now: Duration) -> Vec<PrefillCandidate<'a>> {
    let candidate = |(worker, member): (Epoch, &'a Member)| match &member.role {
        RoleInfo::Prefill(info) => {
            let queue = &load.get(worker)?.prefill;
            let (host, queue_ms) = (&member.host, queue.wait_ms(now));
            (queue.len() < info.work_max as usize).then_some(PrefillCandidate {
                worker,
                host,
                queue_ms,
                queue,
                cached_blocks: 0,
                cost: cost.steps(worker, Role::Prefill),
            })
        }
        RoleInfo::Decode(_) | RoleInfo::Kvpool { .. } => None,
    };
    membership.taking_work().filter_map(candidate).collect()
}

pub(crate) fn decode<'a>(membership: &'a Membership, load: &Load, cost: &'a CostModel) -> Vec<DecodeCandidate<'a>> {
    let candidate = |(worker, member): (Epoch, &'a Member)| {
        let info = member.decode_info()?;
        let DecodeLoad { sequences, tokens, tail_tokens, decoding, classes } = load.get(worker)?.decode;
        let EngineInfo { device_blocks, work_max, .. } = *info;
        let context_tokens = sequence_tokens_max(info);
        Some(DecodeCandidate {
            worker,
            host: &member.host,
            sequences,
            tokens,
            tail_tokens,
            decoding,
            classes,
            device_blocks,
            context_tokens,
            work_max,
            cached_blocks: 0,
            cost: cost.steps(worker, Role::Decode),
        })
    };
    membership.taking_work().filter_map(candidate).collect()
}

/// Draining nodes too: their blocks can be read.
pub(crate) fn pools<'a>(membership: &'a Membership, load: &Load) -> Vec<PoolCandidate<'a>> {
    let candidate = |(node, member): (Epoch, &'a Member)| {
        let Blocks { total, free, cached, .. } = load.get(node)?.report.blocks.dram;
        let (free_blocks, room_blocks) = if total == 0 { (EVERYTHING_FITS, EVERYTHING_FITS) } else { (free, free.saturating_add(cached)) };
        Some(PoolCandidate { node, host: &member.host, draining: member.draining, free_blocks, room_blocks })
    };
    membership.iter().filter(|(_, member)| member.role() == Role::Kvpool).filter_map(candidate).collect()
}

/// Pool nodes that may take over the blocks of `leaving`: near ones first, then by room.
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
            let epoch = membership.register(register_at(host, "k", pool(port))).unwrap();
            load.add_worker(Duration::ZERO, epoch);
            epoch
        });
        let decode = membership.register(register_at("b", "d", RoleInfo::Decode(engine(1)))).unwrap();
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
