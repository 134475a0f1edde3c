//! The block with the fewest expected hits for the room it takes leaves first.
//!
//! A kept block saves computation when it is used again, and costs its slot until then. Traffic has patterns in both: few blocks of a
//! conversation's first turn are ever used again, most of a fourth turn are; hardly any user asks again within seconds of an answer, many
//! after a minute or two, few after ten. So the policy sorts blocks into classes, and counts for each class how long blocks take to come
//! back, even if they had left by then (it remembers them as ghosts). From these counts `reuse_times` derives, for each class and age, the
//! expected hits per slot and time over the best horizon. With nothing counted yet, this is least recently used.
//!
//! A class is how often a block was used, up to four times (a shared prefix, a long conversation: worth keeping), and whether its
//! chain ended with it. Within a class and age, the blocks of the oldest operation leave first, from the end of the chain: later
//! blocks cost more to compute, but save nothing without those before them.
//!
//! With states of recurrent layers, a chain can only be used up to its last state. If that has left, the whole chain is computed again, and
//! its next turn needs the state at the new end with all blocks before it. So new blocks that follow blocks which had left count as used as
//! often as those. Otherwise the end would leave long before the rest, which is worth nothing alone.
//!
//! Time is counted in blocks that came in, so nothing depends on a clock, and ages are relative to the number of slots. Uses in quick
//! succession, as when prefill and decode fetch the same prompt, count as one.
//!
//! Sources: hit density and its online estimate are from LHD (Beckmann, Chen, Cidon: *LHD: improving cache hit rate by maximizing hit
//! density*, NSDI '18, §3); the best horizon makes it a Gittins index (Gittins, *Bandit processes and dynamic allocation indices*, 1979);
//! counting uses in quick succession as one is from LRU-K's correlated references (O'Neil, O'Neil, Weikum, SIGMOD '93).

mod reuse_times;

use super::{EvictionPolicy, Use, ghosts::Ghosts};
use reuse_times::{AGES, Cell, ReuseTimes};
use std::{cmp::Reverse, collections::BTreeSet};
use tidemill_proto::block::BlockKey;

/// The hit-density policy. Every operation is O(log n). An eviction scans cells from the one where the last eviction found a candidate,
/// unless a block was added to an earlier cell or a window ended.
#[derive(Debug)]
pub struct HitDensity {
    /// The candidates of each class in the order in which they leave.
    queues: [BTreeSet<Rank>; CLASSES],
    /// The entries by slot; `None` for empty slots.
    entries: Vec<Option<Entry>>,
    ghosts: Ghosts<History>,
    times: ReuseTimes,
    /// The first place in the order of cells that may hold a candidate: those before it, which are worth less, hold none.
    empty_before: usize,
    clock: Clock,
    /// The latest operation and the window in which it began: its blocks are equally old.
    latest: (u64, u64),
    /// The latest operation that brought a block, and how often that block was used.
    latest_came: (u64, u8),
    /// Whether any block of a state ever came.
    has_states: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: BlockKey,
    history: History,
    last: Use,
    /// The number of blocks that had come in by its last use.
    last_came: u64,
    pinned: bool,
}

/// The history of a block, whether it is here or has left.
#[derive(Clone, Copy, Debug)]
struct History {
    uses: u8,
    class: usize,
    /// The window of the block's last use.
    window: u64,
}

/// The order of candidates: (window and operation of the last use, place in its chain, slot).
type Rank = (u64, u64, Reverse<u32>, u32);

/// The largest count of uses that is distinguished.
const USES_MAX: u8 = 4;

/// The number of classes: by uses and by whether the chain ended there; see [`ReuseTimes`] for their order.
const CLASSES: usize = 2 * USES_MAX as usize;

/// The number of windows in the time in which as many blocks come in as there are slots.
const WINDOWS_PER_TURNOVER: u64 = 8;

/// Uses count as one if no more than this fraction of the slots was filled in between.
const AT_ONCE_PER_TURNOVER: u64 = 256;

/// The number of remembered blocks per slot: as far back as ages are distinguished.
const GHOSTS_PER_SLOT: usize = AGES / WINDOWS_PER_TURNOVER as usize;

/// Counts blocks that came in, and windows of a fixed number of them.
#[derive(Clone, Copy, Debug)]
struct Clock {
    slots: u64,
    came: u64,
    window: u64,
    /// The number of blocks that came in during this window.
    came_in_window: u64,
}

impl Clock {
    /// Counts a block that came in. Returns whether a window ended.
    fn advance(&mut self) -> bool {
        self.came += 1;
        self.came_in_window += 1;
        let ended = self.came_in_window >= (self.slots / WINDOWS_PER_TURNOVER).max(1);
        if ended {
            self.window += 1;
            self.came_in_window = 0;
        }
        ended
    }
}

impl History {
    fn new(uses: u8, tail: bool, window: u64) -> Self {
        Self { uses, class: 2 * usize::from(uses - 1) + usize::from(!tail), window }
    }
}

impl Entry {
    fn rank(&self, slot: u32) -> Rank {
        (self.history.window, self.last.at, Reverse(self.last.place), slot)
    }
}

impl HitDensity {
    /// A policy for slots `0..slots`, none of which is a candidate.
    pub fn new(slots: u32) -> Self {
        Self {
            queues: std::array::from_fn(|_| BTreeSet::new()),
            entries: vec![None; slots as usize],
            ghosts: Ghosts::new(GHOSTS_PER_SLOT * slots as usize),
            times: ReuseTimes::new(CLASSES),
            empty_before: 0,
            clock: Clock { slots: u64::from(slots), came: 0, window: 0, came_in_window: 0 },
            latest: (0, 0),
            latest_came: (0, 1),
            has_states: false,
        }
    }

    fn entry(&mut self, slot: u32) -> &mut Entry {
        self.entries[slot as usize].as_mut().unwrap_or_else(|| panic!("slot {slot} holds nothing"))
    }

    /// The uses with which a new block starts: where there are states, those of the block before it that came back in the same operation.
    fn uses_of_new(&self, used: Use) -> u8 {
        match self.latest_came {
            (at, uses) if self.has_states && at == used.at => uses,
            _ => 1,
        }
    }

    /// Records that a block with this history is used again.
    fn reuse(&mut self, history: History, used: Use) -> History {
        self.times.reused(history.class, history.window);
        self.start(USES_MAX.min(history.uses + 1), used)
    }

    fn start(&mut self, uses: u8, used: Use) -> History {
        if used.at != self.latest.0 {
            self.latest = (used.at, self.clock.window);
        }
        let history = History::new(uses, used.tail, self.latest.1);
        self.times.used(history.class, history.window);
        history
    }

    /// Makes `slot`, with this entry, a candidate.
    fn enqueue(&mut self, slot: u32, entry: &Entry) {
        let History { class, window, .. } = entry.history;
        let age = (AGES - 1).min((self.clock.window - window) as usize);
        self.empty_before = self.empty_before.min(self.times.place(Cell { class, age }));
        self.queues[class].insert(entry.rank(slot));
    }

    /// The place of the least valuable cell with a candidate, and its first candidate to leave.
    fn first(&self) -> Option<(usize, Cell, Rank)> {
        let mut cells = self.times.cells().iter().enumerate().skip(self.empty_before);
        cells.find_map(|(place, &cell)| Some((place, cell, self.first_of(cell)?)))
    }

    /// The first candidate of `cell` to leave.
    fn first_of(&self, cell: Cell) -> Option<Rank> {
        let latest = self.clock.window.checked_sub(cell.age as u64)?;
        // The last age includes all older blocks.
        let earliest = if cell.age + 1 == AGES { 0 } else { latest };
        let from = (earliest, 0, Reverse(u32::MAX), 0);
        self.queues[cell.class].range(from..).next().filter(|rank| rank.0 <= latest).copied()
    }
}

impl EvictionPolicy for HitDensity {
    fn insert(&mut self, slot: u32, key: &BlockKey, used: Use) {
        if self.clock.advance() {
            self.times.next_window();
            self.empty_before = 0;
        }
        let history = match self.ghosts.take(key) {
            Some(history) if self.times.remembers(history.window) => self.reuse(history, used),
            _ => self.start(self.uses_of_new(used), used),
        };
        self.latest_came = (used.at, history.uses);
        self.has_states |= used.state;
        let entry = Entry { key: *key, history, last: used, last_came: self.clock.came, pinned: false };
        let earlier = self.entries[slot as usize].replace(entry);
        assert!(earlier.is_none_or(|earlier| earlier.pinned), "slot {slot} is a candidate already");
        if let Some(Entry { history, .. }) = earlier {
            self.times.forget(history.class, history.window);
        }
        self.enqueue(slot, &entry);
    }

    fn pin(&mut self, slot: u32) {
        let entry = self.entry(slot);
        assert!(!entry.pinned, "slot {slot} is no candidate");
        entry.pinned = true;
        let (class, rank) = (entry.history.class, entry.rank(slot));
        self.queues[class].remove(&rank);
    }

    fn unpin(&mut self, slot: u32, used: Use) {
        let mut entry = *self.entry(slot);
        assert!(entry.pinned, "slot {slot} is a candidate already");
        let at_once = self.clock.came - entry.last_came <= self.clock.slots / AT_ONCE_PER_TURNOVER;
        entry.history = if used.at == entry.last.at || at_once {
            self.times.forget(entry.history.class, entry.history.window);
            self.start(entry.history.uses, used)
        } else {
            self.reuse(entry.history, used)
        };
        (entry.last, entry.last_came, entry.pinned) = (used, self.clock.came, false);
        self.entries[slot as usize] = Some(entry);
        self.enqueue(slot, &entry);
    }

    fn evict(&mut self) -> Option<u32> {
        let (place, Cell { class, .. }, rank) = self.first()?;
        self.empty_before = place;
        self.queues[class].remove(&rank);
        let (.., slot) = rank;
        let entry = self.entries[slot as usize].take().expect("queues list slots that hold something");
        self.ghosts.add(entry.key, entry.history);
        Some(slot)
    }

    fn remove(&mut self, slot: u32) {
        self.pin(slot);
        let Entry { history, .. } = self.entries[slot as usize].take().expect("a candidate holds something");
        self.times.forget(history.class, history.window);
    }

    fn resize(&mut self, slots: u32) {
        self.clock.slots = u64::from(slots);
        self.ghosts.set_max(GHOSTS_PER_SLOT * slots as usize);
    }

    fn is_candidate(&self, slot: u32) -> bool {
        self.entries[slot as usize].is_some_and(|entry| !entry.pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u64) -> BlockKey {
        let mut key = BlockKey([0; 16]);
        key.0[..8].copy_from_slice(&n.to_le_bytes());
        key
    }

    /// A cache of single blocks, with the policy in charge.
    struct Cache {
        policy: HitDensity,
        held: std::collections::HashMap<u64, u32>,
        free: Vec<u32>,
        operations: u64,
    }

    impl Cache {
        fn new(slots: u32) -> Self {
            Self { policy: HitDensity::new(slots), held: Default::default(), free: (0..slots).collect(), operations: 0 }
        }

        /// Uses a block. Returns whether it was in the cache.
        fn ask(&mut self, block: u64) -> bool {
            self.operations += 1;
            let used = Use::in_chain(self.operations, 0, 2);
            if let Some(&slot) = self.held.get(&block) {
                self.policy.pin(slot);
                self.policy.unpin(slot, used);
                return true;
            }
            let slot = self.free.pop().unwrap_or_else(|| {
                let slot = self.policy.evict().expect("all are candidates");
                self.held.retain(|_, held| *held != slot);
                slot
            });
            self.policy.insert(slot, &key(block), used);
            self.held.insert(block, slot);
            false
        }
    }

    #[test]
    fn with_nothing_learnt_the_oldest_leaves_first_from_the_end_of_its_chain() {
        let mut policy = HitDensity::new(64);
        for (slot, used) in (0..).zip(Use::of_chain(1, 4)) {
            policy.insert(slot, &key(slot.into()), Use { tail: false, ..used });
        }
        policy.insert(4, &key(4), Use { tail: false, ..Use::in_chain(2, 0, 1) });
        policy.pin(1);
        policy.unpin(1, Use { tail: false, ..Use::in_chain(3, 0, 1) });
        let order: Vec<u32> = std::iter::from_fn(|| policy.evict()).collect();
        assert_eq!(order, [3, 2, 0, 4, 1]);
    }

    #[test]
    fn blocks_that_come_back_are_kept_through_a_flood_of_others() {
        let (slots, kept) = (100, 50);
        let mut cache = Cache::new(slots);
        let mut flood = 1000;
        let mut hits = 0;
        for round in 0..60 {
            let hit = (0..kept).filter(|&block| cache.ask(block)).count();
            hits += if round >= 30 { hit } else { 0 };
            // More blocks than fit beside the kept ones: least recently used would never hit.
            for _ in 0..2 * slots {
                cache.ask(flood);
                flood += 1;
            }
        }
        assert!(hits as u64 > 30 * kept * 9 / 10, "{hits} hits of {}", 30 * kept);
    }

    #[test]
    fn no_candidate_is_where_an_eviction_does_not_look() {
        let slots = 40u32;
        let mut policy = HitDensity::new(slots);
        let mut random = 1u64;
        for at in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (slot, block) = ((random >> 33) as u32 % slots, (random >> 40) % 100);
            match policy.entries[slot as usize] {
                None => policy.insert(slot, &key(block), Use::in_chain(at, 0, 2)),
                Some(Entry { pinned: false, .. }) => policy.pin(slot),
                Some(Entry { pinned: true, .. }) => policy.unpin(slot, Use::in_chain(at, 0, 2)),
            }
            assert!(policy.times.cells()[..policy.empty_before].iter().all(|&cell| policy.first_of(cell).is_none()));
            if random >> 62 == 0 {
                policy.evict();
            }
        }
    }

    #[test]
    fn with_states_what_follows_a_block_that_had_left_is_used_as_often() {
        for (states, uses) in [(false, 1), (true, 2)] {
            let mut policy = HitDensity::new(64);
            policy.insert(0, &key(0), Use::in_chain(1, 0, 2));
            policy.insert(1, &key(1), Use::in_chain(1, 1, 2).of_block(1, states));
            while policy.evict().is_some() {}
            for (slot, block) in [(0, 0), (1, 2), (2, 3)] {
                policy.insert(slot, &key(block), Use::in_chain(2, slot, 3));
            }
            policy.insert(3, &key(4), Use::in_chain(3, 0, 2));
            assert_eq!([0, 1, 2, 3].map(|slot| policy.entry(slot).history.uses), [2, uses, uses, 1], "states: {states}");
        }
    }

    #[test]
    fn uses_at_once_count_as_one() {
        let mut policy = HitDensity::new(1024);
        policy.insert(0, &key(0), Use::in_chain(1, 0, 2));
        for at in 2..9 {
            policy.pin(0);
            policy.unpin(0, Use::in_chain(at, 0, 2));
        }
        assert_eq!(policy.entry(0).history.uses, 1);
    }
}
