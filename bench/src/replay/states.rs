//! Runs a trace through the pool's directory for a model whose layers keep states, once for each rule that selects the block ends whose
//! state is kept.
//!
//! A prompt is reused up to the last end within its known blocks whose whole state is present, and the rest is computed and put as workers
//! do: K and V block by block, a state as its parts after the block that it follows. No time passes and no bytes move. Blocks are the
//! pool's own of 16 tokens, and [`chains`](super::chains) determines which of them two requests share.

use super::{
    Capacity,
    chains::{Chain, Chains},
    pool::{DECODE, LIMITS, NOW, PREFILL, WAIT, reserved},
    trace::{Request, TRACE_BLOCK_TOKENS},
};
use anyhow::{Context, ensure};
use serde::Serialize;
use std::{collections::HashSet, time::Duration};
use tidemill_engine::states::StateRule;
use tidemill_kvpool::core::{
    directory::{Action, ClientId, Directory},
    eviction::Policy,
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, BlockKey, Tenant},
    ids::RequestId,
    message::PoolEvent,
    pool::{CallId, LeaseId, Lineage, Room, Via, Written},
};
use tidemill_sim::shape::{SHAPES, Shape};

/// The rule that selects the block ends whose state is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ends {
    /// No state is needed: the model has only K and V.
    Stateless,
    /// The last full block of each prompt and of each answer.
    OfTexts,
    /// The ends of texts, and every n-th block of a sequence.
    Every(usize),
}

/// The result of one rule on a trace.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    ends: String,
    /// The share of all prompt tokens that were not computed again.
    reused: f64,
    states_put: u64,
    kv_gb_put: f64,
    state_gb_put: f64,
    /// The states' share of the blocks that the pool holds at the end.
    state_share_held: f64,
}

/// The shape with this name, which must have recurrent layers.
pub fn recurrent(name: &str) -> anyhow::Result<Shape> {
    let shape = Shape::find(name).filter(|shape| shape.recurrent.is_some());
    let names = SHAPES.iter().filter(|shape| shape.recurrent.is_some()).map(|shape| shape.name).collect::<Vec<_>>().join(", ");
    shape.with_context(|| format!("--states: the shapes with states are {names}"))
}

/// The number of blocks of a sequence's state.
pub fn state_blocks(shape: &Shape) -> usize {
    shape.state_bytes().div_ceil(shape.block_bytes()) as usize
}

/// The rules to compare, with states after each `every` blocks, or as many as workers choose by default.
pub fn rules(shape: &Shape, every: Option<usize>) -> [Ends; 4] {
    let every = StateRule::new(state_blocks(shape), every).every;
    [Ends::Stateless, Ends::OfTexts, Ends::Every(every), Ends::Every(1)]
}

/// Replays the trace through a pool of `capacity` blocks under one rule.
pub fn replay(requests: &[Request], capacity: Capacity, policy: Policy, shape: &Shape, ends: Ends) -> anyhow::Result<Outcome> {
    let parts = state_blocks(shape);
    let (slots, parts_kept) = match capacity {
        Capacity::Blocks(blocks) => (u64::from(blocks) * TRACE_BLOCK_TOKENS / BLOCK_TOKENS as u64, parts),
        // Nothing is evicted, so a part stands for the whole state.
        Capacity::Unlimited => (blocks_of_all(requests, ends), 1),
    };
    let slots = u32::try_from(slots).context("--capacity: the directory has no numbers for so many blocks of 16 tokens")?;
    ensure!(slots as usize > parts_kept, "--capacity: not even one state fits");
    let mut pool = Pool::new(slots, policy, ends, parts_kept);
    let mut chains = Chains::default();
    requests.iter().for_each(|request| pool.serve(&chains.next(request)));
    let gb = |blocks: u64| (blocks * shape.block_bytes()) as f64 / 1e9;
    let tokens: u64 = requests.iter().map(|request| request.input_tokens).sum();
    let state_parts_held = pool.held.intersection(&pool.state_keys).count();
    let kv_held = (pool.held.len() - state_parts_held) as f64;
    let states_held = state_parts_held as f64 * parts as f64 / parts_kept as f64;
    Ok(Outcome {
        ends: ends.name(),
        reused: (pool.blocks_reused * BLOCK_TOKENS as u64) as f64 / tokens as f64,
        states_put: pool.states_put,
        kv_gb_put: gb(pool.kv_put),
        state_gb_put: gb(pool.states_put * parts as u64),
        state_share_held: states_held / (states_held + kv_held),
    })
}

/// The header of [`Outcome::line`].
pub fn header() -> String {
    format!("{:<28} {:>8} {:>12} {:>12} {:>12} {:>16}", "states kept", "reused", "states put", "K, V: GB", "states: GB", "states of held")
}

impl Outcome {
    pub fn line(&self) -> String {
        let Self { ends, reused, states_put, kv_gb_put, state_gb_put, state_share_held } = self;
        format!("{ends:<28} {reused:>8.4} {states_put:>12} {kv_gb_put:>12.0} {state_gb_put:>12.0} {state_share_held:>16.3}")
    }
}

impl Ends {
    fn name(self) -> String {
        match self {
            Self::Stateless => "none needed".into(),
            Self::OfTexts => "ends of texts".into(),
            Self::Every(1) => "every block".into(),
            Self::Every(n) => format!("ends of texts, every {n}"),
        }
    }

    /// The blocks within `from..=to` after which a state is kept, if a text ends after `to`.
    fn within(self, from: usize, to: usize) -> Vec<usize> {
        let every = match self {
            Self::Stateless => return Vec::new(),
            Self::OfTexts => usize::MAX,
            Self::Every(n) => n,
        };
        (from.max(1)..=to).filter(|&end| end == to || end.is_multiple_of(every)).collect()
    }
}

/// An upper bound on the number of distinct blocks and states, each of one part, of all requests.
fn blocks_of_all(requests: &[Request], ends: Ends) -> u64 {
    let mut chains = Chains::default();
    let of_each = requests.iter().map(|request| {
        let chain = chains.next(request);
        let states = ends.within(0, chain.prompt_blocks).len() + ends.within(chain.prompt_blocks, chain.keys.len()).len();
        (chain.keys, states as u64)
    });
    let (mut keys, mut states) = (HashSet::new(), 0);
    of_each.for_each(|(chain, of_request)| {
        keys.extend(chain);
        states += of_request;
    });
    let states = if ends == Ends::Every(1) { keys.len() as u64 } else { states };
    keys.len() as u64 + states + 1
}

/// A pool node's directory, with the state of its only clients.
struct Pool {
    directory: Directory,
    ends: Ends,
    /// The number of blocks of a state.
    parts: usize,
    /// The blocks that the directory holds, according to its events.
    held: HashSet<BlockKey>,
    /// The names of all parts of states that were put.
    state_keys: HashSet<BlockKey>,
    /// Leases with which the current request protects blocks from eviction.
    leases: Vec<(ClientId, LeaseId)>,
    requests: u64,
    blocks_reused: u64,
    kv_put: u64,
    states_put: u64,
}

impl Pool {
    fn new(slots: u32, policy: Policy, ends: Ends, parts: usize) -> Self {
        Self {
            directory: Directory::new(slots, LIMITS, policy.build(slots)),
            ends,
            parts,
            held: HashSet::new(),
            state_keys: HashSet::new(),
            leases: Vec::new(),
            requests: 0,
            blocks_reused: 0,
            kv_put: 0,
            states_put: 0,
        }
    }

    fn serve(&mut self, chain: &Chain) {
        self.requests += 1;
        let call = CallId(self.requests);
        let Chain { keys, prompt_blocks, usable_blocks, .. } = chain;
        let prompt = &keys[..*prompt_blocks];
        let used = self.usable(&prompt[..*usable_blocks]);
        self.blocks_reused += used as u64;

        let mut awaited = prompt.to_vec();
        let is_stateless = self.ends == Ends::Stateless;
        awaited.extend(prompt.last().filter(|_| !is_stateless).into_iter().flat_map(|last| self.state_after(*last)));
        self.directory.get(DECODE, call, &awaited, WAIT, Via::Slots, NOW);
        if used > 0 && !is_stateless {
            let state: Vec<BlockKey> = self.state_after(prompt[used - 1]).collect();
            self.directory.get(PREFILL, call, &state, Duration::ZERO, Via::Slots, NOW);
        }
        self.take_leases();

        // Blocks that are held without a state after them are computed again, and putting them again has no effect.
        self.put(keys, used, *prompt_blocks);
        // If the prompt is larger than the pool, the rest never arrives.
        self.directory.cancel_get(DECODE, call);
        self.put(keys, *prompt_blocks, keys.len());
        for (client, lease) in std::mem::take(&mut self.leases) {
            self.directory.release(client, lease);
        }
        self.note_events();
    }

    /// The number of leading blocks that are held; if states are needed, up to the last one with a state.
    fn usable(&self, keys: &[BlockKey]) -> usize {
        let leading = keys.iter().take_while(|key| self.held.contains(key)).count();
        match self.ends {
            Ends::Stateless => leading,
            _ => (1..=leading).rev().find(|end| self.has_state(keys[end - 1])).unwrap_or(0),
        }
    }

    /// Puts a request's blocks `from..to`, the last of which ends a text, and their states, in order.
    fn put(&mut self, keys: &[BlockKey], from: usize, to: usize) {
        let mut start = from;
        for end in self.ends.within(from + 1, to) {
            self.kv_put += self.put_run(keys, start, &keys[start..end]);
            start = end;
            if !self.has_state(keys[end - 1]) {
                let state: Vec<BlockKey> = self.state_after(keys[end - 1]).collect();
                self.state_keys.extend(&state);
                self.put_run(keys, end, &state);
                self.states_put += 1;
            }
        }
        self.kv_put += self.put_run(keys, start, &keys[start..to]);
    }

    /// Puts blocks that follow the request's first `position` ones. Returns the number of blocks that were not there yet.
    fn put_run(&mut self, keys: &[BlockKey], position: usize, run: &[BlockKey]) -> u64 {
        let parent = position.checked_sub(1).map(|last| keys[last]);
        let lineage = Lineage { origin: RequestId(self.requests), tenant: Tenant(0), parent, position: position as u32 };
        let answers = self.directory.put_start(PREFILL, lineage, Room::Made, run, NOW);
        let written: Vec<Written> = answers.into_iter().filter_map(reserved).collect();
        self.directory.put_end(PREFILL, &written, NOW);
        self.take_leases();
        self.note_events();
        written.len() as u64
    }

    fn has_state(&self, key: BlockKey) -> bool {
        self.state_after(key).all(|part| self.held.contains(&part))
    }

    /// The keys of the parts of the state after a block.
    fn state_after(&self, key: BlockKey) -> impl Iterator<Item = BlockKey> + use<> {
        key.state_parts(self.parts)
    }

    /// Takes the leases on blocks that are handed over to the clients.
    fn take_leases(&mut self) {
        while let Some(action) = self.directory.poll_action() {
            if let Action::Found { client, lease, .. } = action {
                self.leases.push((client, lease));
            }
        }
    }

    fn note_events(&mut self) {
        for event in self.directory.take_events().events {
            match event {
                PoolEvent::Stored { key, .. } => drop(self.held.insert(key)),
                PoolEvent::Evicted(key) => drop(self.held.remove(&key)),
                PoolEvent::Moved { .. } | PoolEvent::Cleared => (),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chat of three turns, and a prompt that diverges from the first turn's prompt after 512 tokens.
    fn chat() -> Vec<Request> {
        let request = |at: u64, input_tokens: u64, blocks: &[u64]| Request {
            timestamp: Some(at),
            output_tokens: Some(101),
            input_tokens,
            blocks: blocks.to_vec(),
        };
        vec![request(0, 1100, &[1, 2, 3]), request(1, 1400, &[1, 2, 4]), request(2, 1700, &[1, 2, 7, 5]), request(3, 1000, &[1, 6])]
    }

    fn outcome(capacity: Capacity, ends: Ends) -> Outcome {
        replay(&chat(), capacity, Policy::Lru, &recurrent("lfm2-1.2b").unwrap(), ends).unwrap()
    }

    fn reused_blocks(capacity: Capacity, ends: Ends) -> f64 {
        (outcome(capacity, ends).reused * 5200.0 / 16.0).round()
    }

    #[test]
    fn a_prompt_is_used_up_to_its_last_state() {
        // The answers end after 75 and 93 blocks; the last prompt shares 32.
        let all = 75.0 + 93.0 + 32.0;
        for capacity in [Capacity::Unlimited, Capacity::Blocks(1000)] {
            assert_eq!(reused_blocks(capacity, Ends::Stateless), all);
            assert_eq!(reused_blocks(capacity, Ends::Every(1)), all);
            assert_eq!(reused_blocks(capacity, Ends::Every(32)), all);
            assert_eq!(reused_blocks(capacity, Ends::Every(20)), 75.0 + 93.0 + 20.0);
            assert_eq!(reused_blocks(capacity, Ends::OfTexts), 75.0 + 93.0, "no text ends where the last prompt leaves the first");
        }
    }

    #[test]
    fn states_are_counted_as_their_blocks() {
        let of_texts = outcome(Capacity::Unlimited, Ends::OfTexts);
        assert_eq!(of_texts.states_put, 8);
        let shape = recurrent("qwen3-next-80b-a3b").unwrap();
        assert_eq!(state_blocks(&shape), 201);
        let large = replay(&chat(), Capacity::Unlimited, Policy::Lru, &shape, Ends::OfTexts).unwrap();
        assert_eq!(large.states_put, 8);
        assert!((large.state_gb_put - 8.0 * 201.0 * 393_216.0 / 1e9).abs() < 1e-9);
        let limited = replay(&chat(), Capacity::Blocks(100), Policy::Lru, &shape, Ends::OfTexts).unwrap();
        assert!((limited.state_share_held - large.state_share_held).abs() < 1e-9, "all of it fits");
        assert!(replay(&chat(), Capacity::Blocks(6), Policy::Lru, &shape, Ends::OfTexts).is_err());
    }

    #[test]
    fn rules_have_the_workers_default() {
        let every = |name: &str| rules(&recurrent(name).unwrap(), None)[2];
        assert_eq!((every("lfm2-1.2b"), every("qwen3-next-80b-a3b")), (Ends::Every(32), Ends::Every(804)));
        assert!(recurrent("deepseek-v3").unwrap_err().to_string().contains("lfm2-1.2b"));
    }
}
