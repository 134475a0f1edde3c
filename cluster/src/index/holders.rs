//! The holders of a block in eight bytes: up to four holders in place, more of them in a separate arena.
//!
//! A holder is a [`Copy`] of 16 bits: the slot of its node and the tier. The slots of a block's holders ascend, so equal
//! sets have equal bits, or equal parts of the arena.

use tidemill_proto::pool::Tier;

/// The number of slots that a [`Copy`] can name. The largest is left out, so that no copy looks like [`SPILLED`], and one for the copy that
/// is never 0.
pub(super) const SLOTS_MAX: usize = (1 << 14) - 2;
const INLINE: usize = 4;
/// A marker in the last element: the others then encode the place of the holders in [`Spills`].
const SPILLED: u16 = u16::MAX;

/// The place of a node's copy of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Pool(Tier),
    /// An engine's own device, which no other node can read.
    Device,
}

/// A node's copy of a block: never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Copy(u16);

impl Copy {
    pub(super) fn new(slot: u16, place: Place) -> Self {
        debug_assert!(usize::from(slot) < SLOTS_MAX);
        let code = match place {
            Place::Pool(Tier::Dram) => 0,
            Place::Pool(Tier::Nvme) => 1,
            Place::Pool(Tier::Object) => 2,
            Place::Device => 3,
        };
        Self((slot + 1) << 2 | code)
    }

    pub(super) fn slot(self) -> u16 {
        (self.0 >> 2) - 1
    }

    pub(super) fn place(self) -> Place {
        match self.0 & 3 {
            0 => Place::Pool(Tier::Dram),
            1 => Place::Pool(Tier::Nvme),
            2 => Place::Pool(Tier::Object),
            _ => Place::Device,
        }
    }
}

/// The holders of one block. A copy of this value is valid only until the set changes: a part of the arena belongs to one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Holders([u16; INLINE]);

/// The holders of blocks that have more than [`INLINE`].
#[derive(Debug, Default)]
pub(super) struct Spills {
    /// Sets of plain numbers, so that they compare as memory does.
    sets: Vec<Vec<u16>>,
    free: Vec<u32>,
}

impl Holders {
    pub(super) fn is_empty(self) -> bool {
        self.0[0] == 0 && self.0[INLINE - 1] != SPILLED
    }

    fn spilled(self) -> Option<usize> {
        (self.0[INLINE - 1] == SPILLED).then(|| usize::from(self.0[0]) | usize::from(self.0[1]) << 16)
    }

    /// Adds or moves a node's copy. Returns whether the node had none.
    pub(super) fn insert(&mut self, spills: &mut Spills, copy: Copy) -> bool {
        if let Some(at) = self.spilled() {
            let set = &mut spills.sets[at];
            return match set.binary_search_by_key(&copy.slot(), |known| Copy(*known).slot()) {
                Ok(known) => {
                    set[known] = copy.0;
                    false
                }
                Err(place) => {
                    set.insert(place, copy.0);
                    true
                }
            };
        }
        let mut copies = [Copy(0); INLINE + 1];
        let count = self.inline().count();
        copies.iter_mut().zip(self.inline()).for_each(|(to, from)| *to = from);
        if let Some(known) = copies[..count].iter_mut().find(|known| known.slot() == copy.slot()) {
            *known = copy;
            *self = Self::packed(&copies[..count]);
            return false;
        }
        copies[count] = copy;
        copies[..=count].sort_unstable();
        *self = if count < INLINE { Self::packed(&copies[..=count]) } else { spills.hold(&copies) };
        true
    }

    /// Removes a node's copy. Returns whether it had one.
    pub(super) fn remove(&mut self, spills: &mut Spills, slot: u16) -> bool {
        self.retain(spills, |copy| copy.slot() != slot)
    }

    /// Keeps the copies for which `keep` holds. Returns whether any were removed.
    pub(super) fn retain(&mut self, spills: &mut Spills, keep: impl Fn(Copy) -> bool) -> bool {
        if let Some(at) = self.spilled() {
            let set = &mut spills.sets[at];
            let before = set.len();
            set.retain(|copy| keep(Copy(*copy)));
            let changed = set.len() < before;
            if set.len() <= INLINE {
                *self = Self::default();
                self.0.iter_mut().zip(&*set).for_each(|(to, copy)| *to = *copy);
                spills.release(at);
            }
            return changed;
        }
        let mut kept = Self::default();
        for (to, copy) in kept.0.iter_mut().zip(self.inline().filter(|copy| keep(*copy))) {
            *to = copy.0;
        }
        std::mem::replace(self, kept) != kept
    }

    /// The copies, from the lowest slot.
    pub(super) fn iter(self, spills: &Spills) -> impl Iterator<Item = Copy> {
        let spilled: &[u16] = self.spilled().map_or(&[], |at| &spills.sets[at]);
        let inline = if self.spilled().is_some() { Self::default() } else { self };
        inline.inline().chain(spilled.iter().copied().map(Copy))
    }

    /// Whether both sets hold the same copies.
    pub(super) fn same(self, other: Self, spills: &Spills) -> bool {
        match (self.spilled(), other.spilled()) {
            (Some(a), Some(b)) => a == b || spills.sets[a] == spills.sets[b],
            _ => self == other,
        }
    }

    fn inline(self) -> impl Iterator<Item = Copy> {
        self.0.into_iter().take_while(|code| *code != 0).map(Copy)
    }

    fn packed(copies: &[Copy]) -> Self {
        let mut holders = Self::default();
        holders.0.iter_mut().zip(copies).for_each(|(to, copy)| *to = copy.0);
        holders
    }
}

impl Spills {
    fn hold(&mut self, copies: &[Copy]) -> Holders {
        let at = self.free.pop().unwrap_or_else(|| {
            self.sets.push(Vec::new());
            (self.sets.len() - 1) as u32
        });
        self.sets[at as usize].extend(copies.iter().map(|copy| copy.0));
        Holders([at as u16, (at >> 16) as u16, 0, SPILLED])
    }

    fn release(&mut self, at: usize) {
        self.sets[at] = Vec::new();
        self.free.push(at as u32);
    }

    pub(super) fn bytes(&self) -> usize {
        let sets: usize = self.sets.iter().map(|set| set.capacity() * size_of::<u16>()).sum();
        sets + self.sets.capacity() * size_of::<Vec<u16>>() + self.free.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// After any sequence of insertions and removals, the set equals that of a map, and equal sets have equal representations.
        #[test]
        fn a_packed_set_is_a_set(ops in prop::collection::vec((0u16..12, 0u8..5), 0..200)) {
            let mut spills = Spills::default();
            let (mut holders, mut expected) = (Holders::default(), BTreeMap::new());
            for (slot, what) in ops {
                let place = [Place::Pool(Tier::Dram), Place::Pool(Tier::Nvme), Place::Pool(Tier::Object), Place::Device].get(usize::from(what)).copied();
                match place {
                    Some(place) => {
                        let fresh = holders.insert(&mut spills, Copy::new(slot, place));
                        prop_assert_eq!(fresh, expected.insert(slot, place).is_none());
                    }
                    None => prop_assert_eq!(holders.remove(&mut spills, slot), expected.remove(&slot).is_some()),
                }
                let got: Vec<_> = holders.iter(&spills).map(|copy| (copy.slot(), copy.place())).collect();
                prop_assert_eq!(got, expected.iter().map(|(slot, place)| (*slot, *place)).collect::<Vec<_>>());
                prop_assert_eq!(holders.is_empty(), expected.is_empty());
                let mut rebuilt = Holders::default();
                for (slot, place) in expected.iter().rev() {
                    rebuilt.insert(&mut spills, Copy::new(*slot, *place));
                }
                prop_assert!(rebuilt.same(holders, &spills));
                rebuilt.retain(&mut spills, |_| false);
            }
            prop_assert_eq!(spills.sets.len() - spills.free.len(), usize::from(expected.len() > INLINE));
        }
    }
}
