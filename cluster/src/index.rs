//! The prefix index: which nodes hold which blocks, as pool nodes and engines report in numbered events.
//!
//! Soft state. It may undercount and lag, but correctness never depends on it, since a decode worker computes any block that it does not
//! find. Blocks of pool nodes can be read by any worker; an engine's own only spare that engine work. A key commits to its model's layout,
//! so blocks of several models never collide.
//!
//! - `blocks`: the memory; `holders`: a block's holders, packed
//! - [`leading`]: the result of a lookup; [`frequency`]: which blocks are read often

mod blocks;
pub mod frequency;
mod holders;
pub mod leading;

pub use leading::{Holder, Leading};

use blocks::Blocks;
use holders::{Copy, Holders, Place, SLOTS_MAX, Spills};
use std::collections::BTreeMap;
use tidemill_proto::{
    block::BlockKey,
    ids::Epoch,
    message::{CacheEvent, PoolEvent},
};

/// The maximum number of blocks remembered per node. Further ones are left out: an undercount.
const BLOCKS_MAX: usize = 1 << 24;
/// Entries that [`PrefixIndex::sweep`] looks at in one call: about 100 µs.
const SWEEP: usize = 1 << 15;

#[derive(Debug, Default)]
pub struct PrefixIndex {
    nodes: BTreeMap<Epoch, Node>,
    /// The node of each slot; `None` if the slot is free or its copies are void.
    slots: Vec<Option<Epoch>>,
    free_slots: Vec<u16>,
    blocks: Blocks,
    spills: Spills,
    sweeper: Sweeper,
}

#[derive(Debug)]
struct Node {
    slot: u16,
    blocks: usize,
    /// The number of the next event; unknown until the first one arrives.
    next: Option<u64>,
}

/// Drops void copies little by little: the loss of a node must not hold up lookups.
#[derive(Debug, Default)]
struct Sweeper {
    /// The next entry to look at.
    at: usize,
    /// Slots that were void when this round started; they are free when it ends.
    sweeping: Vec<u16>,
    /// Slots that became void during this round.
    void: Vec<u16>,
}

/// A gap in a node's events. The node must describe itself from empty again, so its link has to be closed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("events {expected}..{from} of the worker's blocks are missing: it must register again")]
pub struct Gap {
    pub expected: u64,
    pub from: u64,
}

enum Change {
    Store(BlockKey, Place),
    Evict(BlockKey),
    Clear,
}

impl PrefixIndex {
    /// Adds a pool node or an engine.
    pub fn add_node(&mut self, node: Epoch) {
        let slot = self.take_slot(node);
        self.nodes.insert(node, Node { slot, blocks: 0, next: None });
    }

    pub fn remove_node(&mut self, node: Epoch) {
        if let Some(Node { slot, blocks, .. }) = self.nodes.remove(&node) {
            self.give_up_slot(slot, blocks);
        }
    }

    /// Applies a pool node's events, the first of which has number `from`. Events of an unknown node are ignored.
    pub fn apply(&mut self, node: Epoch, from: u64, events: &[PoolEvent]) -> Result<(), Gap> {
        let changes = events.iter().map(|event| match *event {
            PoolEvent::Stored { key, tier } | PoolEvent::Moved { key, tier } => Change::Store(key, Place::Pool(tier)),
            PoolEvent::Evicted(key) => Change::Evict(key),
            PoolEvent::Cleared => Change::Clear,
        });
        self.change(node, from, changes)
    }

    /// Applies events of an engine's own blocks, the first of which has number `from`.
    pub fn apply_cache(&mut self, engine: Epoch, from: u64, events: &[CacheEvent]) -> Result<(), Gap> {
        let changes = events.iter().map(|event| match *event {
            CacheEvent::Stored(key) => Change::Store(key, Place::Device),
            CacheEvent::Evicted(key) => Change::Evict(key),
            CacheEvent::Cleared => Change::Clear,
        });
        self.change(engine, from, changes)
    }

    fn change(&mut self, node: Epoch, from: u64, changes: impl ExactSizeIterator<Item = Change>) -> Result<(), Gap> {
        let Some(state) = self.nodes.get_mut(&node) else { return Ok(()) };
        if let Some(expected) = state.next.filter(|&next| next != from) {
            state.next = None;
            self.clear(node);
            return Err(Gap { expected, from });
        }
        state.next = Some(from.wrapping_add(changes.len() as u64));
        for change in changes {
            match change {
                Change::Store(key, place) => self.store(&key, node, place),
                Change::Evict(key) => self.evict(&key, node),
                Change::Clear => self.clear(node),
            }
        }
        Ok(())
    }

    /// Finds the holders of the leading blocks of `keys`, up to the first block that has none.
    pub fn leading(&self, keys: &[BlockKey]) -> Leading {
        let mut leading = Leading::default();
        let (mut number, mut last) = (0_u32, None::<Holders>);
        // Slots of engines that have every block so far, in order.
        let mut everywhere: Vec<u16> = Vec::new();
        let mut cached: Vec<(Epoch, u32)> = Vec::new();
        self.blocks.visit_leading(keys, |entry| {
            if last.is_some_and(|last| last.same(entry.holders, &self.spills)) {
                leading.extend_last();
            } else {
                let valid = |copy: &Copy| self.slots[usize::from(copy.slot())].is_some();
                let mut copies = entry.holders.iter(&self.spills).filter(valid).peekable();
                if copies.peek().is_none() {
                    return false;
                }
                let mut engines = Vec::new();
                let holders = copies.filter_map(|copy| {
                    let node = self.slots[usize::from(copy.slot())]?;
                    match copy.place() {
                        Place::Pool(tier) => Some(Holder { node, tier }),
                        Place::Device => {
                            engines.push(copy.slot());
                            None
                        }
                    }
                });
                leading.push(1, holders);
                if number == 0 {
                    everywhere = engines;
                } else if everywhere != engines {
                    everywhere.retain(|slot| {
                        let goes_on = engines.binary_search(slot).is_ok();
                        if !goes_on && let Some(engine) = self.slots[usize::from(*slot)] {
                            cached.push((engine, number));
                        }
                        goes_on
                    });
                }
                last = Some(entry.holders);
            }
            number += 1;
            true
        });
        cached.extend(everywhere.into_iter().filter_map(|slot| Some((self.slots[usize::from(slot)]?, number))));
        leading.set_cached(cached);
        leading
    }

    /// Finds the usable leading blocks for a model with layers that keep states. They end at the last block after which a node that holds
    /// it also has the whole state, of `parts` blocks; likewise for an engine's own blocks. If `parts` is 0, all leading blocks are usable.
    pub fn usable(&self, keys: &[BlockKey], parts: usize) -> Leading {
        let leading = self.leading(keys);
        if parts == 0 {
            return leading;
        }
        let readable: u32 = leading.readable().map(|(blocks, _)| blocks).sum();
        let mut engines: Vec<(Epoch, u32)> = leading.cached().collect();
        let (mut cached, mut pool) = (Vec::new(), None);
        let most = engines.iter().map(|(_, blocks)| *blocks).fold(readable, u32::max);
        for end in (1..=most).rev() {
            if engines.is_empty() && (pool.is_some() || readable == 0) {
                break;
            }
            let key = keys[end as usize - 1];
            let Some(holders) = self.holders_of_state(key, parts) else { continue };
            engines.retain(|(engine, blocks)| {
                let has = *blocks >= end && holders.contains(&(*engine, true));
                cached.extend(has.then_some((*engine, end)));
                !has
            });
            if pool.is_none() && end <= readable {
                let nodes: Vec<Epoch> = holders.iter().filter(|(_, is_engine)| !is_engine).map(|(node, _)| *node).collect();
                let holds_block = |node: &Epoch| self.holders_of(&key).any(|holder| holder == (*node, false));
                pool = Some(nodes).filter(|nodes| nodes.iter().any(holds_block)).map(|nodes| (end, nodes));
            }
        }
        let (end, nodes) = pool.unwrap_or_default();
        let mut usable = leading.up_to(end, &nodes);
        usable.set_cached(cached);
        usable
    }

    /// The nodes and engines that hold all blocks of the state after a block; `None` if there are none.
    fn holders_of_state(&self, key: BlockKey, parts: usize) -> Option<Vec<(Epoch, bool)>> {
        let mut parts = key.state_parts(parts);
        let mut holders: Vec<(Epoch, bool)> = self.holders_of(&parts.next()?).collect();
        while !holders.is_empty()
            && let Some(part) = parts.next()
        {
            holders.retain(|holder| self.holders_of(&part).any(|other| other == *holder));
        }
        (!holders.is_empty()).then_some(holders)
    }

    /// The holders of a block, each with whether the copy is an engine's own.
    fn holders_of(&self, key: &BlockKey) -> impl Iterator<Item = (Epoch, bool)> {
        let found = self.blocks.find(key).map(|number| self.blocks.entry(number).holders);
        let copies = found.into_iter().flat_map(|holders| holders.iter(&self.spills));
        copies.filter_map(|copy| Some((self.slots[usize::from(copy.slot())]?, copy.place() == Place::Device)))
    }

    /// The number of blocks known at a node.
    pub fn len(&self, node: Epoch) -> usize {
        self.nodes.get(&node).map_or(0, |node| node.blocks)
    }

    /// The number of blocks that have a holder.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes taken from the allocator.
    pub fn bytes(&self) -> usize {
        self.blocks.bytes() + self.spills.bytes()
    }

    pub fn nodes(&self) -> impl Iterator<Item = Epoch> {
        self.nodes.keys().copied()
    }

    /// Drops some of the copies whose nodes are gone. To be called periodically.
    pub fn sweep(&mut self) {
        let sweeper = &mut self.sweeper;
        if sweeper.sweeping.is_empty() {
            sweeper.sweeping = std::mem::take(&mut sweeper.void);
            sweeper.at = 0;
        }
        if sweeper.sweeping.is_empty() {
            return;
        }
        let until = (sweeper.at + SWEEP).min(self.blocks.numbers());
        for number in std::mem::replace(&mut sweeper.at, until)..until {
            if self.blocks.entry(number).holders.is_empty() {
                continue;
            }
            let holders = self.blocks.holders_mut(number);
            let slots = &self.slots;
            holders.retain(&mut self.spills, |copy| slots[usize::from(copy.slot())].is_some());
            if holders.is_empty() {
                self.blocks.free(number);
            }
        }
        if until == self.blocks.numbers() {
            self.free_slots.append(&mut self.sweeper.sweeping);
        }
    }

    fn store(&mut self, key: &BlockKey, node: Epoch, place: Place) {
        let Some(&Node { slot, blocks, .. }) = self.nodes.get(&node) else { return };
        let number = if blocks < BLOCKS_MAX { self.blocks.find_or_insert(key) } else { self.held(key, slot) };
        if let (Some(number), Some(state)) = (number, self.nodes.get_mut(&node)) {
            let fresh = self.blocks.holders_mut(number).insert(&mut self.spills, Copy::new(state.slot, place));
            state.blocks += usize::from(fresh);
        }
    }

    fn held(&self, key: &BlockKey, slot: u16) -> Option<usize> {
        let holds = |number: &usize| self.blocks.entry(*number).holders.iter(&self.spills).any(|copy| copy.slot() == slot);
        self.blocks.find(key).filter(holds)
    }

    fn evict(&mut self, key: &BlockKey, node: Epoch) {
        let (Some(state), Some(number)) = (self.nodes.get_mut(&node), self.blocks.find(key)) else { return };
        let holders = self.blocks.holders_mut(number);
        if holders.remove(&mut self.spills, state.slot) {
            state.blocks -= 1;
        }
        if holders.is_empty() {
            self.blocks.free(number);
        }
    }

    /// Forgets a node's blocks.
    fn clear(&mut self, node: Epoch) {
        if self.nodes.get(&node).is_none_or(|state| state.blocks == 0) {
            return;
        }
        let slot = self.take_slot(node);
        let state = self.nodes.get_mut(&node).expect("just found");
        let (before, blocks) = (std::mem::replace(&mut state.slot, slot), std::mem::take(&mut state.blocks));
        self.give_up_slot(before, blocks);
    }

    fn take_slot(&mut self, node: Epoch) -> u16 {
        while self.free_slots.is_empty() && self.slots.len() == SLOTS_MAX {
            // Members are far fewer than slots: many have come and gone since the last sweep.
            self.sweep();
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u16
        });
        self.slots[usize::from(slot)] = Some(node);
        slot
    }

    fn give_up_slot(&mut self, slot: u16, blocks: usize) {
        self.slots[usize::from(slot)] = None;
        let pile = if blocks == 0 { &mut self.free_slots } else { &mut self.sweeper.void };
        pile.push(slot);
    }

    /// Panics if the state is inconsistent. Tests call it after every step.
    pub fn check_integrity(&self) {
        self.blocks.check_integrity();
        let mut counted: BTreeMap<Epoch, usize> = self.nodes.keys().map(|node| (*node, 0)).collect();
        for number in 0..self.blocks.numbers() {
            let copies: Vec<Copy> = self.blocks.entry(number).holders.iter(&self.spills).collect();
            assert!(copies.is_sorted_by_key(|copy| copy.slot()) && copies.windows(2).all(|pair| pair[0].slot() != pair[1].slot()));
            for copy in copies {
                match self.slots[usize::from(copy.slot())] {
                    Some(node) => *counted.get_mut(&node).expect("only known nodes hold blocks") += 1,
                    None => assert!(
                        self.sweeper.void.contains(&copy.slot()) || self.sweeper.sweeping.contains(&copy.slot()),
                        "void copies will be swept"
                    ),
                }
            }
        }
        for (node, state) in &self.nodes {
            assert_eq!(counted[node], state.blocks, "blocks of {node}");
            assert_eq!(self.slots[usize::from(state.slot)], Some(*node));
        }
        let slots = self.nodes.len() + self.free_slots.len() + self.sweeper.void.len() + self.sweeper.sweeping.len();
        assert_eq!(slots, self.slots.len(), "a slot has a node, is swept, or is free");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, HashMap};
    use tidemill_proto::pool::Tier;

    const NODE: Epoch = Epoch(1);
    const OTHER: Epoch = Epoch(2);
    const ENGINE: Epoch = Epoch(3);

    fn key(n: u8) -> BlockKey {
        BlockKey([n; 16])
    }

    fn stored(n: u8, tier: Tier) -> PoolEvent {
        PoolEvent::Stored { key: key(n), tier }
    }

    fn index() -> PrefixIndex {
        let mut index = PrefixIndex::default();
        [NODE, OTHER, ENGINE].into_iter().for_each(|node| index.add_node(node));
        index
    }

    /// Runs as `blocks×holders`, holders by epoch, `n` for NVMe; then engines' own leading blocks.
    fn describe(leading: &Leading) -> String {
        let holder = |holder: &Holder| format!("{}{}", holder.node, if holder.tier == Tier::Nvme { "n" } else { "" });
        let run = |(blocks, holders): (u32, &[Holder])| format!("{blocks}×{}", holders.iter().map(holder).collect::<Vec<_>>().join(","));
        let runs = leading.runs().map(run).collect::<Vec<_>>().join(" ");
        let cached = leading.cached().map(|(engine, blocks)| format!(" {engine}:{blocks}")).collect::<String>();
        runs + &cached
    }

    #[test]
    fn a_run_goes_on_as_long_as_anyone_holds_the_next_block() {
        let mut index = index();
        index.apply(NODE, 7, &[stored(0, Tier::Dram), stored(1, Tier::Nvme), stored(3, Tier::Dram)]).unwrap();
        index.apply(OTHER, 0, &[stored(1, Tier::Dram)]).unwrap();
        index.check_integrity();
        let keys = [0, 1, 2, 3].map(key);
        assert_eq!(describe(&index.leading(&keys)), "1×1 1×1n,2");
        index.apply(NODE, 10, &[PoolEvent::Moved { key: key(1), tier: Tier::Dram }, PoolEvent::Evicted(key(0))]).unwrap();
        index.check_integrity();
        assert_eq!(describe(&index.leading(&keys)), "");
        assert_eq!(describe(&index.leading(&keys[1..])), "1×1,2");
    }

    #[test]
    fn with_states_a_prefix_counts_up_to_the_last_end_that_has_a_whole_one() {
        let mut index = index();
        let keys = [0, 1, 2, 3].map(key);
        let state = |end: usize, part: u32| PoolEvent::Stored { key: keys[end - 1].state_part(part), tier: Tier::Dram };
        let mut numbers = [0, 0];
        let mut store = |index: &mut PrefixIndex, node: Epoch, event: PoolEvent| {
            let number = &mut numbers[usize::from(node == OTHER)];
            index.apply(node, *number, &[event]).unwrap();
            *number += 1;
        };
        (0..4).for_each(|n| store(&mut index, NODE, stored(n, Tier::Dram)));
        store(&mut index, OTHER, stored(2, Tier::Dram));
        assert_eq!(describe(&index.usable(&keys, 0)), "2×1 1×1,2 1×1");
        assert_eq!(describe(&index.usable(&keys, 2)), "", "no state at all");
        store(&mut index, NODE, state(3, 0));
        assert_eq!(describe(&index.usable(&keys, 2)), "", "half a state is none");
        assert_eq!(describe(&index.usable(&keys, 1)), "2×1 1×1", "of one part it is whole, where it is");
        store(&mut index, OTHER, state(3, 1));
        assert_eq!(describe(&index.usable(&keys, 2)), "", "halves at two nodes are no whole");
        store(&mut index, NODE, state(2, 0));
        store(&mut index, NODE, state(2, 1));
        assert_eq!(describe(&index.usable(&keys, 2)), "1×1 1×1");
        store(&mut index, OTHER, state(3, 0));
        assert_eq!(describe(&index.usable(&keys, 2)), "2×1 1×2", "the last block is read where its state is");

        let own = [keys[0], keys[1], keys[2], keys[1].state_part(0), keys[1].state_part(1), keys[2].state_part(0)];
        index.apply_cache(ENGINE, 0, &own.map(CacheEvent::Stored)).unwrap();
        assert_eq!(describe(&index.usable(&keys, 2)), "2×1 1×2 3:2", "an engine's own likewise");
        index.check_integrity();
    }

    #[test]
    fn an_engine_counts_for_the_leading_blocks_that_it_has_itself() {
        let mut index = index();
        let keys = [0, 1, 2, 3].map(key);
        index.apply(NODE, 0, &[0, 1, 2].map(|n| stored(n, Tier::Dram))).unwrap();
        index.apply_cache(ENGINE, 0, &[0, 1, 3].map(|n| CacheEvent::Stored(key(n)))).unwrap();
        assert_eq!(describe(&index.leading(&keys)), "2×1 1×1 1× 3:2", "its own blocks are nobody's to read");
        let leading = index.leading(&keys);
        assert_eq!((leading.blocks(), leading.cached_by(ENGINE), leading.cached_by(NODE)), (4, 2, 0));
        index.apply_cache(ENGINE, 3, &[CacheEvent::Evicted(key(0)), CacheEvent::Stored(key(2))]).unwrap();
        assert_eq!(describe(&index.leading(&keys)), "1×1 2×1 1×", "what it lacks at the beginning is no use");
        index.apply_cache(ENGINE, 5, &[CacheEvent::Cleared]).unwrap();
        index.check_integrity();
        assert_eq!(describe(&index.leading(&keys)), "1×1 2×1", "void, and not swept yet");
        (0..3).for_each(|_| index.sweep());
        index.check_integrity();
        assert_eq!((describe(&index.leading(&keys)), index.blocks()), ("3×1".into(), 3));
    }

    #[test]
    fn a_gap_forgets_the_node_until_it_registers_again() {
        let mut index = index();
        index.apply(NODE, 0, &[stored(0, Tier::Dram)]).unwrap();
        index.apply(OTHER, 0, &[stored(0, Tier::Dram)]).unwrap();
        assert_eq!(index.apply(NODE, 2, &[stored(1, Tier::Dram)]), Err(Gap { expected: 1, from: 2 }));
        assert_eq!((index.len(NODE), index.len(OTHER)), (0, 1));
        index.remove_node(OTHER);
        index.check_integrity();
        assert_eq!(index.leading(&[key(0)]).blocks(), 0);
    }

    #[test]
    fn cleared_voids_what_was_said() {
        let mut index = index();
        index.apply(NODE, 0, &[stored(0, Tier::Dram), PoolEvent::Cleared, stored(1, Tier::Dram), stored(1, Tier::Nvme)]).unwrap();
        index.check_integrity();
        assert_eq!((index.leading(&[key(0)]).blocks(), index.leading(&[key(1)]).blocks(), index.len(NODE)), (0, 1, 1));
    }

    /// Keys that share table parts and tags, as some of millions of blocks do.
    fn crowded(n: u8) -> BlockKey {
        let mut key = [0; 16];
        (key[0], key[4], key[15]) = (n % 2, n % 3, n);
        BlockKey(key)
    }

    #[derive(Clone, Debug)]
    enum Op {
        Store(u64, u8, Option<Tier>),
        Evict(u64, u8),
        Clear(u64),
        Leave(u64),
        Sweep,
    }

    fn op() -> impl Strategy<Value = Op> {
        let tier = || prop_oneof![Just(None), Just(Some(Tier::Dram)), Just(Some(Tier::Nvme))];
        prop_oneof![
            8 => (0u64..8, 0u8..40, tier()).prop_map(|(node, n, tier)| Op::Store(node, n, tier)),
            4 => (0u64..8, 0u8..40).prop_map(|(node, n)| Op::Evict(node, n)),
            1 => (0u64..8).prop_map(Op::Clear),
            1 => (0u64..8).prop_map(Op::Leave),
            2 => Just(Op::Sweep),
        ]
    }

    proptest! {
        /// After any sequence of events, a lookup finds what a plain map would.
        #[test]
        fn it_is_a_map_from_blocks_to_holders(ops in prop::collection::vec(op(), 0..300), keys in prop::collection::vec(0u8..40, 1..30)) {
            let mut index = PrefixIndex::default();
            let mut plain: HashMap<BlockKey, BTreeMap<Epoch, Option<Tier>>> = HashMap::new();
            let mut next = BTreeMap::new();
            (0..8).for_each(|node| index.add_node(Epoch(node)));
            for op in ops {
                let mut tell = |node: u64, store: Option<(u8, Option<Tier>)>, evict: Option<u8>| {
                    let from = next.entry(node).or_insert(0);
                    let told = match (store, evict) {
                        (Some((n, Some(tier))), _) => index.apply(Epoch(node), *from, &[PoolEvent::Stored { key: crowded(n), tier }]),
                        (Some((n, None)), _) => index.apply_cache(Epoch(node), *from, &[CacheEvent::Stored(crowded(n))]),
                        (None, Some(n)) => index.apply(Epoch(node), *from, &[PoolEvent::Evicted(crowded(n))]),
                        (None, None) => index.apply(Epoch(node), *from, &[PoolEvent::Cleared]),
                    };
                    told.unwrap();
                    *from += 1;
                };
                match op {
                    Op::Store(node, n, tier) => {
                        tell(node, Some((n, tier)), None);
                        plain.entry(crowded(n)).or_default().insert(Epoch(node), tier);
                    }
                    Op::Evict(node, n) => {
                        tell(node, None, Some(n));
                        plain.entry(crowded(n)).or_default().remove(&Epoch(node));
                    }
                    Op::Clear(node) => {
                        tell(node, None, None);
                        plain.values_mut().for_each(|holders| _ = holders.remove(&Epoch(node)));
                    }
                    Op::Leave(node) => {
                        index.remove_node(Epoch(node));
                        index.add_node(Epoch(node));
                        next.remove(&node);
                        plain.values_mut().for_each(|holders| _ = holders.remove(&Epoch(node)));
                    }
                    Op::Sweep => index.sweep(),
                }
                index.check_integrity();
            }
            let keys: Vec<BlockKey> = keys.into_iter().map(crowded).collect();
            let leading = index.leading(&keys);
            let held: Vec<_> = keys.iter().map_while(|key| plain.get(key).filter(|holders| !holders.is_empty())).collect();
            let expected = held.iter().map(|holders| {
                let readable = holders.iter().filter_map(|(node, tier)| Some(Holder { node: *node, tier: (*tier)? }));
                let mut readable: Vec<_> = readable.collect();
                readable.sort_unstable_by_key(|holder| holder.node);
                readable
            });
            let got = leading.runs().flat_map(|(blocks, holders)| std::iter::repeat_n(holders, blocks as usize)).map(|holders| {
                let mut holders = holders.to_vec();
                holders.sort_unstable_by_key(|holder| holder.node);
                holders
            });
            prop_assert_eq!(got.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
            for node in (0..8).map(Epoch) {
                let own = held.iter().take_while(|holders| holders.get(&node) == Some(&None)).count();
                prop_assert_eq!(leading.cached_by(node) as usize, own);
            }
        }
    }
}
