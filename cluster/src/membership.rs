//! Who is in the cluster: workers by epoch, what they last said, and what this coordinator has given them.
//!
//! ```text
//!   registered ──Leaving──► draining ──┐
//!       └───── link down, or silent ───┴──► gone (its epoch is never used again)
//! ```

use crate::schedule::{DecodeCandidate, PoolCandidate, PrefillCandidate};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    time::{Duration, Instant},
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, LayoutFingerprint},
    ids::{Epoch, RequestId},
    message::{Blocks, EngineInfo, Host, ModelIdentity, Peer, PoolNode, Register, Report, Role, RoleInfo, TierBlocks},
};

/// Workers at a time. A bound on what misbehaving members can make this process remember.
const WORKERS_MAX: usize = 4096;
/// Bytes of the names of a worker and its host that are kept.
const NAME_BYTES_MAX: usize = 256;
/// Before its first client a pool node knows no block size, and holds nothing that could be pushed out.
const EVERYTHING_FITS: u64 = u64::MAX;

#[derive(Debug)]
pub struct Registry {
    /// By which the front door makes tokens of text.
    model: ModelIdentity,
    workers: BTreeMap<Epoch, Worker>,
    next_epoch: u64,
}

#[derive(Debug)]
pub struct Worker {
    pub name: String,
    pub host: Host,
    pub pid: u32,
    pub role: RoleInfo,
    pub heard: Instant,
    pub report: Report,
    /// Gets nothing new.
    pub draining: bool,
    pub decode: DecodeLoad,
    pub prefill: PrefillLoad,
}

/// Sequences that a decode worker was given and that have not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeLoad {
    pub sequences: u32,
    /// Their lengths, added up.
    pub tokens: u64,
    /// Tokens that the worker computes itself before those sequences' first tokens.
    pub tail_tokens: u64,
}

/// Jobs that a prefill worker was given and that have not ended, in the order given.
#[derive(Clone, Debug, Default)]
pub struct PrefillLoad {
    jobs: VecDeque<(RequestId, f64)>,
    /// Since when the first of them is being computed.
    head_since: Option<Instant>,
}

/// Why a registration is refused; the text is for the operator of that worker.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "its model, KV dtype or block layout (fingerprint {theirs}) is not the one that `{other}` serves ({ours}): \
         all engines of a cluster run the same model with the same settings, and compute alike \
         (`--isa avx512bf16` on processors with AMX, where others have none)"
    )]
    Layout { theirs: LayoutFingerprint, ours: LayoutFingerprint, other: String },
    #[error("its model is not the one that this coordinator's `--model` names: {0}")]
    Model(String),
    #[error("it has no KV blocks or no context: give it more device memory")]
    Empty,
    #[error("the cluster has {WORKERS_MAX} workers already")]
    Full,
}

impl Registry {
    /// `first_epoch` differs between coordinator processes, so that epochs do too.
    pub fn new(first_epoch: u64, model: ModelIdentity) -> Self {
        Self { model, workers: BTreeMap::new(), next_epoch: first_epoch }
    }

    pub fn register(&mut self, now: Instant, register: Register) -> Result<Epoch, Refusal> {
        if self.workers.len() >= WORKERS_MAX {
            return Err(Refusal::Full);
        }
        if let Some(engine) = engine_info(&register.role) {
            if engine.device_blocks == 0 || engine.context_tokens == 0 {
                return Err(Refusal::Empty);
            }
            if let Some(difference) = self.model.difference(&engine.model) {
                return Err(Refusal::Model(difference));
            }
            if let Some((other, info)) = self.first_engine().filter(|(_, info)| info.layout != engine.layout) {
                return Err(Refusal::Layout { theirs: engine.layout, ours: info.layout, other: other.name.clone() });
            }
        }
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        let worker = Worker {
            name: bounded(register.name),
            host: Host(bounded(register.host.0)),
            pid: register.pid,
            role: register.role,
            heard: now,
            report: Report::default(),
            draining: false,
            decode: DecodeLoad::default(),
            prefill: PrefillLoad::default(),
        };
        self.workers.insert(epoch, worker);
        Ok(epoch)
    }

    pub fn remove(&mut self, epoch: Epoch) -> Option<Worker> {
        self.workers.remove(&epoch)
    }

    pub fn get(&self, epoch: Epoch) -> Option<&Worker> {
        self.workers.get(&epoch)
    }

    pub fn get_mut(&mut self, epoch: Epoch) -> Option<&mut Worker> {
        self.workers.get_mut(&epoch)
    }

    pub fn iter(&self) -> impl Iterator<Item = (Epoch, &Worker)> {
        self.workers.iter().map(|(epoch, worker)| (*epoch, worker))
    }

    /// Workers that said nothing for `silence`.
    pub fn silent(&self, now: Instant, silence: Duration) -> Vec<Epoch> {
        self.iter().filter(|(_, worker)| now.saturating_duration_since(worker.heard) >= silence).map(|(epoch, _)| epoch).collect()
    }

    /// What every engine of the cluster agrees on; the first that registered decides.
    pub fn layout(&self) -> Option<(LayoutFingerprint, u64)> {
        self.first_engine().map(|(_, info)| (info.layout, info.block_bytes))
    }

    /// Longest sequence that some decode worker can hold.
    pub fn context_tokens(&self) -> Option<u32> {
        self.taking_work().filter_map(|(_, worker)| worker.decode_info()).map(sequence_tokens_max).max()
    }

    pub fn prefill_candidates(&self, now: Instant) -> Vec<PrefillCandidate> {
        let candidate = |(epoch, worker): (Epoch, &Worker)| match &worker.role {
            RoleInfo::Prefill(info) if worker.prefill.jobs.len() < info.work_max as usize => {
                Some(PrefillCandidate { worker: epoch, queue_ms: worker.prefill.queue_ms(now) })
            }
            _ => None,
        };
        self.taking_work().filter_map(candidate).collect()
    }

    pub fn decode_candidates(&self) -> Vec<DecodeCandidate<'_>> {
        fn candidate((epoch, worker): (Epoch, &Worker)) -> Option<DecodeCandidate<'_>> {
            let DecodeLoad { sequences, tokens, tail_tokens } = worker.decode;
            let info = worker.decode_info()?;
            let EngineInfo { device_blocks, work_max, .. } = *info;
            let context_tokens = sequence_tokens_max(info);
            Some(DecodeCandidate {
                worker: epoch,
                host: &worker.host,
                sequences,
                tokens,
                tail_tokens,
                device_blocks,
                context_tokens,
                work_max,
            })
        }
        self.taking_work().filter_map(candidate).collect()
    }

    pub fn pool_candidates(&self) -> Vec<PoolCandidate<'_>> {
        let pools = self.workers.iter().filter(|(_, worker)| worker.role.role() == Role::Kvpool);
        pools
            .map(|(&node, worker)| {
                let Blocks { total, free, cached, .. } = worker.report.blocks.dram;
                let (free_blocks, room_blocks) =
                    if total == 0 { (EVERYTHING_FITS, EVERYTHING_FITS) } else { (free, free.saturating_add(cached)) };
                PoolCandidate { node, host: &worker.host, draining: worker.draining, free_blocks, room_blocks }
            })
            .collect()
    }

    /// A pool node as `worker` is to reach it.
    pub fn pool_node(&self, node: Epoch, worker: Epoch) -> Option<PoolNode> {
        let (node, worker) = (self.get(node)?, self.get(worker)?);
        Some(PoolNode { addr: node.pool_addr()?, near: node.host == worker.host })
    }

    /// The pool nodes that may take over what `leaving` holds: near ones first, and then those with most room.
    pub fn peers(&self, leaving: Epoch) -> Vec<Peer> {
        let others = self.taking_work().filter(|(epoch, _)| *epoch != leaving);
        let peer = |(epoch, worker): (Epoch, &Worker)| {
            let TierBlocks { dram, nvme, .. } = worker.report.blocks;
            // What comes goes through DRAM, and what has to leave it for that goes on to the disk.
            let free_blocks = if dram.total == 0 { EVERYTHING_FITS } else { dram.free.saturating_add(nvme.free) };
            Some(Peer { node: self.pool_node(epoch, leaving)?, free_blocks })
        };
        let mut peers: Vec<Peer> = others.filter_map(peer).collect();
        peers.sort_by_key(|peer| (!peer.node.near, Reverse(peer.free_blocks), peer.node.addr));
        peers
    }

    fn taking_work(&self) -> impl Iterator<Item = (Epoch, &Worker)> {
        self.iter().filter(|(_, worker)| !worker.draining)
    }

    fn first_engine(&self) -> Option<(&Worker, &EngineInfo)> {
        self.workers.values().find_map(|worker| Some((worker, engine_info(&worker.role)?)))
    }
}

impl Worker {
    pub fn pool_addr(&self) -> Option<SocketAddr> {
        match &self.role {
            RoleInfo::Kvpool { addr } => Some(*addr),
            RoleInfo::Prefill(_) | RoleInfo::Decode(_) => None,
        }
    }

    fn decode_info(&self) -> Option<&EngineInfo> {
        match &self.role {
            RoleInfo::Decode(info) => Some(info),
            RoleInfo::Prefill(_) | RoleInfo::Kvpool { .. } => None,
        }
    }
}

impl PrefillLoad {
    pub fn push(&mut self, now: Instant, request: RequestId, ms: f64) {
        if self.jobs.is_empty() {
            self.head_since = Some(now);
        }
        self.jobs.push_back((request, ms));
    }

    pub fn remove(&mut self, now: Instant, request: RequestId) {
        if self.jobs.front().is_some_and(|(head, _)| *head == request) {
            self.head_since = Some(now);
        }
        self.jobs.retain(|(job, _)| *job != request);
    }

    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.jobs.iter().map(|(request, _)| *request)
    }

    /// Predicted time until another job could begin. A head that takes longer than predicted counts as almost done.
    fn queue_ms(&self, now: Instant) -> f64 {
        let total: f64 = self.jobs.iter().map(|(_, ms)| ms).sum();
        let head_ms = self.jobs.front().map_or(0.0, |(_, ms)| *ms);
        let elapsed_ms = self.head_since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64() * 1e3);
        total - head_ms.min(elapsed_ms)
    }
}

fn engine_info(role: &RoleInfo) -> Option<&EngineInfo> {
    match role {
        RoleInfo::Prefill(info) | RoleInfo::Decode(info) => Some(info),
        RoleInfo::Kvpool { .. } => None,
    }
}

fn sequence_tokens_max(info: &EngineInfo) -> u32 {
    info.context_tokens.min(info.device_blocks.saturating_mul(BLOCK_TOKENS as u32))
}

fn bounded(mut name: String) -> String {
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    name
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn model() -> ModelIdentity {
        ModelIdentity {
            model_type: "llama".into(),
            vocab_size: 512,
            hidden_size: 64,
            num_hidden_layers: 2,
            tokenizer_digest: Some([1; 16]),
        }
    }

    pub(crate) fn engine(layout: u8) -> EngineInfo {
        EngineInfo {
            model: model(),
            layout: LayoutFingerprint([layout; 16]),
            block_bytes: 4096,
            device_blocks: 64,
            context_tokens: 2048,
            work_max: 64,
        }
    }

    pub(crate) fn register(name: &str, role: RoleInfo) -> Register {
        register_at("here", name, role)
    }

    pub(crate) fn register_at(host: &str, name: &str, role: RoleInfo) -> Register {
        Register { name: name.into(), host: Host(host.into()), pid: 1, role }
    }

    #[test]
    fn the_first_engine_sets_the_layout_until_it_is_gone() {
        let (mut registry, now) = (Registry::new(7, model()), Instant::now());
        let first = registry.register(now, register("decode-0", RoleInfo::Decode(engine(1)))).unwrap();
        let other = || register("prefill-0", RoleInfo::Prefill(engine(2)));
        let refusal = registry.register(now, other()).unwrap_err();
        assert!(refusal.to_string().contains("decode-0"), "{refusal}");
        registry.remove(first);
        let second = registry.register(now, other()).unwrap();
        assert_ne!(first, second, "an epoch is never used again");
    }

    #[test]
    fn an_engine_of_another_model_is_refused_with_what_differs() {
        let (mut registry, now) = (Registry::new(0, model()), Instant::now());
        let mut with = |model| registry.register(now, register("d", RoleInfo::Decode(EngineInfo { model, ..engine(1) })));
        let others = [
            (ModelIdentity { vocab_size: 513, ..model() }, "vocab_size is 513, not 512"),
            (ModelIdentity { num_hidden_layers: 3, ..model() }, "num_hidden_layers"),
            (ModelIdentity { model_type: "qwen2".into(), ..model() }, "model_type"),
            (ModelIdentity { tokenizer_digest: Some([2; 16]), ..model() }, "tokenizer.json"),
        ];
        for (other, words) in others {
            let refusal = with(other).unwrap_err().to_string();
            assert!(refusal.contains(words), "{refusal}");
        }
        with(ModelIdentity { tokenizer_digest: None, ..model() }).expect("a worker needs no tokenizer");
    }

    #[test]
    fn a_pool_node_is_near_on_its_own_host_and_leaves_to_the_others() {
        let (mut registry, now) = (Registry::new(0, model()), Instant::now());
        let pool = |port: u16| RoleInfo::Kvpool { addr: ([127, 0, 0, 1], port).into() };
        let ports = [("a", 1), ("b", 2), ("a", 3), ("a", 4)];
        let nodes = ports.map(|(host, port)| registry.register(now, register_at(host, "k", pool(port))).unwrap());
        let decode = registry.register(now, register_at("b", "d", RoleInfo::Decode(engine(1)))).unwrap();
        assert_eq!(nodes.map(|node| registry.pool_node(node, decode).unwrap().near), [false, true, false, false]);
        assert_eq!(registry.pool_node(decode, nodes[0]), None);
        registry.get_mut(nodes[1]).unwrap().report.blocks = TierBlocks {
            dram: Blocks { total: 10, free: 2, ..Blocks::default() },
            nvme: Blocks { total: 9, free: 7, ..Blocks::default() },
            ..TierBlocks::default()
        };
        registry.get_mut(nodes[3]).unwrap().draining = true;
        let peers: Vec<_> = registry.peers(nodes[0]).iter().map(|peer| (peer.node.addr.port(), peer.node.near, peer.free_blocks)).collect();
        assert_eq!(peers, [(3, true, u64::MAX), (2, false, 9)], "those that stay, near ones first; an untouched one takes everything");
    }

    #[test]
    fn context_is_bounded_by_device_blocks() {
        let (mut registry, now) = (Registry::new(0, model()), Instant::now());
        assert_eq!(registry.context_tokens(), None);
        let epoch = registry.register(now, register("decode-0", RoleInfo::Decode(engine(1)))).unwrap();
        assert_eq!(registry.context_tokens(), Some(64 * 16));
        registry.get_mut(epoch).unwrap().draining = true;
        assert_eq!(registry.context_tokens(), None, "a draining worker takes nothing new");
    }

    #[test]
    fn a_prefill_queue_shrinks_as_its_head_is_computed() {
        let (mut load, start) = (PrefillLoad::default(), Instant::now());
        load.push(start, RequestId(1), 100.0);
        load.push(start, RequestId(2), 50.0);
        assert_eq!(load.queue_ms(start), 150.0);
        assert_eq!(load.queue_ms(start + Duration::from_millis(40)), 110.0);
        assert_eq!(load.queue_ms(start + Duration::from_secs(9)), 50.0);
        load.remove(start + Duration::from_millis(90), RequestId(1));
        assert_eq!(load.queue_ms(start + Duration::from_millis(100)), 40.0);
    }
}
