//! The division of a node's memory among the layouts of its blocks: which layout owns which extent, and who may take one from whom.
//!
//! ```text
//!   extents      │    0    │    1    │    2    │    3    │   equal parts of the memory, each owned by one layout
//!   layout A     │ 0 │ 1 │ 2 │ 3 │ …                         slots of its block size from the beginning of the memory on
//!   layout B     │   0   │   1   │   2   │   3   │ …         likewise
//! ```
//!
//! A slot is its layout's to use exactly if the layout owns every extent that the slot touches. So a layout that owns everything wastes
//! nothing, a slot's place never depends on who owns what, and blocks may be larger than extents. What is lost is less than a slot at
//! each end of a run of extents.
//!
//! No bytes and no blocks: [`layouts`](super::layouts) knows what is in the slots.

use std::{collections::BTreeMap, ops::Range};

/// The number of a layout at this node. Numbers are not used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayoutNumber(pub u16);

/// A layout's claim to memory while it has clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Its part where several layouts want more than there is, relative to the others' weights. At least 1.
    pub weight: u32,
    /// The percentage of the memory that no other layout takes from it.
    pub floor_percent: u8,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 1, floor_percent: 0 }
    }
}

/// The owners of all extents.
#[derive(Debug)]
pub struct Division {
    capacity_bytes: u64,
    extent_bytes: u64,
    owners: Vec<Option<LayoutNumber>>,
    layouts: BTreeMap<LayoutNumber, Layout>,
}

#[derive(Debug)]
struct Layout {
    /// The distance from one slot to the next.
    stride: u64,
    slots: u32,
    share: Share,
    /// Whether it has clients. One that has none has no claim to anything.
    in_use: bool,
    extents: usize,
}

impl Division {
    /// A division of this much memory, none of which is owned. `extent_bytes` is not 0.
    pub fn new(capacity_bytes: u64, extent_bytes: u64) -> Self {
        let count = capacity_bytes.div_ceil(extent_bytes) as usize;
        Self { capacity_bytes, extent_bytes, owners: vec![None; count], layouts: BTreeMap::new() }
    }

    /// Adds a layout that owns nothing.
    pub(super) fn add(&mut self, number: LayoutNumber, stride: u64, slots: u32, share: Share) {
        let earlier = self.layouts.insert(number, Layout { stride, slots, share, in_use: false, extents: 0 });
        assert!(earlier.is_none(), "a number is one layout's");
    }

    /// Removes a layout. Its extents have no owner then.
    pub(super) fn remove(&mut self, number: LayoutNumber) {
        self.layouts.remove(&number);
        self.owners.iter_mut().filter(|owner| **owner == Some(number)).for_each(|owner| *owner = None);
    }

    pub(super) fn set_in_use(&mut self, number: LayoutNumber, in_use: bool) {
        self.layout_mut(number).in_use = in_use;
    }

    pub fn is_in_use(&self, number: LayoutNumber) -> bool {
        self.layout(number).in_use
    }

    pub fn extents(&self) -> usize {
        self.owners.len()
    }

    /// The number of extents that a layout owns.
    pub fn owned(&self, number: LayoutNumber) -> usize {
        self.layout(number).extents
    }

    pub(super) fn has_unowned(&self) -> bool {
        self.layouts.values().map(|layout| layout.extents).sum::<usize>() < self.extents()
    }

    pub(super) fn owner(&self, extent: usize) -> Option<LayoutNumber> {
        self.owners[extent]
    }

    /// The number of extents that no other layout takes from this one: enough for a slot, if it has a floor at all.
    pub fn floor(&self, number: LayoutNumber) -> usize {
        let Layout { stride, share, in_use, .. } = self.layout(number);
        if !*in_use || share.floor_percent == 0 {
            return 0;
        }
        let one_slot = stride.div_ceil(self.extent_bytes) as usize;
        (self.extents() * usize::from(share.floor_percent) / 100).max(one_slot)
    }

    /// Other layouts that own more than their floor, those first that are furthest above their share.
    pub(super) fn above_floor(&self, taker: LayoutNumber) -> Vec<LayoutNumber> {
        let others = self.layouts.keys().copied().filter(|&other| other != taker && self.owned(other) > self.floor(other));
        let mut others: Vec<_> = others.collect();
        others.sort_by(|&a, &b| self.excess(b, 0).total_cmp(&self.excess(a, 0)).then(a.cmp(&b)));
        others
    }

    /// Whether `taker` has the better claim to an extent: the other stays at least as far above its share as the taker comes, or the taker
    /// lacks what is its floor.
    pub(super) fn has_better_claim(&self, taker: LayoutNumber, other: LayoutNumber) -> bool {
        self.is_below_floor(taker) || self.excess(other, -1) >= self.excess(taker, 1)
    }

    pub(super) fn is_below_floor(&self, number: LayoutNumber) -> bool {
        self.owned(number) < self.floor(number)
    }

    /// Extents by weight, after a change of their number. A layout without clients has more than any other.
    fn excess(&self, number: LayoutNumber, change: isize) -> f64 {
        let Layout { share, in_use, extents, .. } = self.layout(number);
        if *in_use { extents.saturating_add_signed(change) as f64 / f64::from(share.weight) } else { f64::INFINITY }
    }

    /// The extents that `taker` needs for the first of its slots that begins in this extent, if it lacks any of them.
    pub(super) fn span(&self, taker: LayoutNumber, extent: usize) -> Option<Range<usize>> {
        let Layout { stride, slots, .. } = self.layout(taker);
        let slot = (extent as u64 * self.extent_bytes).div_ceil(*stride);
        let span = self.extents_of(*stride, u32::try_from(slot).ok().filter(|slot| slot < slots)?);
        span.clone().any(|extent| self.owners[extent] != Some(taker)).then_some(span)
    }

    /// The layout's slots that touch these extents.
    pub(super) fn slots_in(&self, number: LayoutNumber, extents: Range<usize>) -> Range<u32> {
        let Layout { stride, slots, .. } = self.layout(number);
        let slot = |at: u64| at.min(u64::from(*slots)) as u32;
        let (first, end) = (extents.start as u64 * self.extent_bytes, (extents.end as u64 * self.extent_bytes).min(self.capacity_bytes));
        slot(first / stride)..slot(end.div_ceil(*stride))
    }

    /// Whether the layout owns all extents that this slot of its own touches.
    pub(super) fn may_use(&self, number: LayoutNumber, slot: u32) -> bool {
        self.extents_of(self.layout(number).stride, slot).all(|extent| self.owners[extent] == Some(number))
    }

    fn extents_of(&self, stride: u64, slot: u32) -> Range<usize> {
        let (first, end) = (u64::from(slot) * stride, (u64::from(slot) + 1) * stride);
        (first / self.extent_bytes) as usize..end.div_ceil(self.extent_bytes) as usize
    }

    /// Gives an extent to a layout.
    pub(super) fn give(&mut self, extent: usize, to: LayoutNumber) {
        if let Some(from) = self.owners[extent].replace(to) {
            self.layout_mut(from).extents -= 1;
        }
        self.layout_mut(to).extents += 1;
    }

    fn layout(&self, number: LayoutNumber) -> &Layout {
        self.layouts.get(&number).expect("only layouts that were added are asked about")
    }

    fn layout_mut(&mut self, number: LayoutNumber) -> &mut Layout {
        self.layouts.get_mut(&number).expect("only layouts that were added are changed")
    }

    /// Panics if the books do not balance.
    pub(super) fn check_integrity(&self) {
        for (&number, layout) in &self.layouts {
            let owned = self.owners.iter().filter(|owner| **owner == Some(number)).count();
            assert_eq!(owned, layout.extents, "extents of {number:?} are miscounted");
        }
        assert!(self.owners.iter().flatten().all(|owner| self.layouts.contains_key(owner)), "an extent's owner is gone");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LayoutNumber = LayoutNumber(1);
    const B: LayoutNumber = LayoutNumber(2);

    /// Memory of 10 extents of 100 bytes, all of it A's. A's slots have 30 bytes, B's the given number.
    fn division(b: u64) -> Division {
        let mut division = Division::new(1000, 100);
        division.add(A, 30, 33, Share { weight: 3, floor_percent: 20 });
        division.add(B, b, (1000 / b) as u32, Share { weight: 1, floor_percent: 10 });
        (0..10).for_each(|extent| division.give(extent, A));
        [A, B].into_iter().for_each(|layout| division.set_in_use(layout, true));
        division.check_integrity();
        division
    }

    #[test]
    fn a_layout_that_owns_everything_wastes_nothing() {
        let division = division(70);
        assert!((0..33).all(|slot| division.may_use(A, slot)));
        assert_eq!(division.slots_in(A, 0..10), 0..33);
        assert!(!(0..14).any(|slot| division.may_use(B, slot)));
    }

    #[test]
    fn slots_at_the_edge_of_an_extent_are_whose_both_sides_are() {
        let mut division = division(70);
        division.give(3, B);
        let of = |division: &Division, number, slots: Range<u32>| slots.filter(|&slot| division.may_use(number, slot)).collect::<Vec<_>>();
        assert_eq!(division.slots_in(A, 3..4), 10..14, "from 300 to 420");
        assert_eq!(of(&division, A, 9..15), [9, 14]);
        assert_eq!(of(&division, B, 0..14), [0u32; 0], "slot 4 is from 280 on, slot 5 to 420");
        division.give(4, B);
        assert_eq!(of(&division, B, 0..14), [5, 6]);
        division.check_integrity();
    }

    #[test]
    fn a_span_is_what_a_slot_takes() {
        for (bytes, spans) in [
            (20, [Some(0..1), Some(1..2), Some(9..10)]),
            (70, [Some(0..1), Some(1..3), Some(9..10)]),
            (350, [Some(0..4), Some(3..7), None]),
        ] {
            let division = division(bytes);
            assert_eq!([0, 1, 9].map(|extent| division.span(B, extent)), spans, "{bytes}");
            assert_eq!(division.span(A, 0), None, "it has them");
        }
    }

    #[test]
    fn shares_are_by_weight_and_floors_hold_only_with_clients() {
        let mut division = division(20);
        assert_eq!((division.floor(A), division.floor(B)), (2, 1));
        assert!(division.is_below_floor(B) && division.has_better_claim(B, A));
        let mut given = 0;
        while division.has_better_claim(B, A) {
            division.give(given, B);
            given += 1;
        }
        assert_eq!(given, 2, "3 to 1 of 10 are 7.5 and 2.5");
        assert!(!division.has_better_claim(A, B));
        division.set_in_use(B, false);
        assert_eq!(division.floor(B), 0);
        assert!(division.has_better_claim(A, B));
        assert_eq!(division.above_floor(A), [B]);
    }
}
