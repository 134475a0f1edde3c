//! All layouts of a node: a directory for each, and the memory that moves between them. A directory knows nothing of the others; here it
//! loses and gains slots.
//!
//! **Who gives.** A layout without a free slot takes an extent
//!
//! 1. from a layout that stays at least as far above its share as the taker comes, the one that is furthest above first; one without
//!    clients has no share;
//! 2. else from one whose blocks in that extent were all last used long before any of the taker's own: they are worth less by age.
//!
//! Nothing is taken below a floor, and no extent in which a slot is leased, being written, or withheld from a late writer. Of the extents
//! that may be taken, one with blocks that were used longest ago is, since worth is compared by age; among similar ones, one beside the
//! taker's own, where fewer bytes are lost at the edges. (Hit density counts time in blocks that came in, which are not comparable
//! between layouts.)

use super::{
    directory::Directory,
    division::{Division, LayoutNumber, Share},
};
use std::{collections::BTreeMap, ops::Range, time::Duration};
use tidemill_proto::pool::SlotRef;

/// Directories by layout, and the division of memory among them.
pub struct Layouts {
    division: Division,
    directories: BTreeMap<LayoutNumber, Directory>,
    /// Layouts for which there was nothing to take, until when they do not look again.
    resting: BTreeMap<LayoutNumber, Duration>,
    /// The extent at which the next look begins.
    cursor: usize,
}

/// Slots that a layout has lost, with the generations that tell its late readers so. Set these before anything else is done.
#[derive(Debug, PartialEq, Eq)]
pub struct Withdrawn {
    pub layout: LayoutNumber,
    pub slots: Vec<SlotRef>,
}

/// The most extents that are compared to take one.
const LOOK_MAX: usize = 64;
/// The time for which a layout that found nothing to take does not look again.
const REST: Duration = Duration::from_millis(200);
/// The least age of another layout's extent, as a multiple of that of the taker's oldest block.
const OLDER: u64 = 2;
/// The age below which no extent is old, however fast the taker's blocks come and go.
const OLD: Duration = Duration::from_secs(10);

impl Layouts {
    pub fn new(division: Division) -> Self {
        Self { division, directories: BTreeMap::new(), resting: BTreeMap::new(), cursor: 0 }
    }

    /// Adds a layout with a new directory of this many slots, `stride` bytes apart, of which it may use none but those that no other layout
    /// has. It has no clients.
    pub fn add(&mut self, number: LayoutNumber, stride: u64, slots: u32, share: Share, directory: Directory) {
        self.division.add(number, stride, slots, share);
        self.directories.insert(number, directory.divided(number));
        self.take_unowned(number);
    }

    /// Removes a layout with all its blocks. `None`, and nothing is removed, if a slot of it is in use: leased, being written or withheld.
    /// Its clients are gone then; one that still reads what it was handed sees by the generation that this is gone.
    #[must_use = "readers of the lost slots would not notice"]
    pub fn remove(&mut self, number: LayoutNumber) -> Option<Withdrawn> {
        let mut all = self.division.slots_in(number, 0..self.division.extents());
        if !all.all(|slot| self.directories[&number].can_lose(slot)) {
            return None;
        }
        self.resting.remove(&number);
        self.division.remove(number);
        let slots = self.directories.remove(&number)?.end();
        Some(Withdrawn { layout: number, slots })
    }

    /// Whether [`make_room`](Self::make_room) may find anything: there are other layouts, or memory that a removed one has left.
    pub fn has_more(&self) -> bool {
        self.directories.len() > 1 || self.division.has_unowned()
    }

    /// Records whether a layout has clients. One that has none keeps its blocks until others need the memory.
    pub fn set_in_use(&mut self, number: LayoutNumber, in_use: bool) {
        self.division.set_in_use(number, in_use);
    }

    pub fn division(&self) -> &Division {
        &self.division
    }

    /// The directory of a layout that was added and not removed.
    pub fn directory(&mut self, number: LayoutNumber) -> &mut Directory {
        self.directories.get_mut(&number).expect("only layouts that were added are used")
    }

    pub fn get(&self, number: LayoutNumber) -> Option<&Directory> {
        self.directories.get(&number)
    }

    /// Whether a slot is the layout's to use now.
    pub fn may_use(&self, number: LayoutNumber, slot: u32) -> bool {
        self.division.may_use(number, slot)
    }

    /// Takes memory for this layout until it has `wanted` free slots, and its floor, as far as there is any to take.
    #[must_use = "readers of the lost slots would not notice"]
    pub fn make_room(&mut self, number: LayoutNumber, wanted: usize, now: Duration) -> Vec<Withdrawn> {
        let mut withdrawn = Vec::new();
        self.take_unowned(number);
        if !self.has_more() {
            return withdrawn;
        }
        while (self.directories[&number].usage().free < wanted || self.division.is_below_floor(number))
            && self.resting.get(&number).is_none_or(|until| *until <= now)
        {
            let Some((from, span)) = self.choose(number, now) else {
                self.resting.insert(number, now + REST);
                break;
            };
            withdrawn.push(self.transfer(span, from, number));
        }
        withdrawn
    }

    /// The extents to take next, and their owner.
    fn choose(&mut self, taker: LayoutNumber, now: Duration) -> Option<(LayoutNumber, Range<usize>)> {
        let others = self.division.above_floor(taker);
        let (weaker, stronger): (Vec<_>, Vec<_>) = others.into_iter().partition(|&other| self.division.has_better_claim(taker, other));
        for other in weaker {
            if let Some((_, span)) = self.least(taker, other) {
                return Some((other, span));
            }
        }
        // Operations are numbered by time.
        let age = |at: u64| (now.as_micros() as u64).saturating_sub(at);
        let oldest = age(self.directories[&taker].oldest_use()?);
        let spans = stronger.into_iter().filter_map(|other| Some((other, self.least(taker, other)?)));
        let (other, (used, span)) = spans.max_by_key(|&(other, (used, _))| (age(used), other))?;
        (age(used) > oldest.saturating_mul(OLDER).max(OLD.as_micros() as u64)).then_some((other, span))
    }

    /// The extents of `other`, with the last use of any block there, that cost it least. `None` if none can be taken.
    fn least(&mut self, taker: LayoutNumber, other: LayoutNumber) -> Option<(u64, Range<usize>)> {
        let count = self.division.extents();
        let first = self.cursor;
        self.cursor = (first + LOOK_MAX / 2) % count;
        let from = (0..count).map(|n| (first + n) % count);
        let spans = from.filter_map(|extent| self.takable(taker, other, extent));
        let mut spans: Vec<(u64, Range<usize>)> = spans.take(LOOK_MAX).collect();
        spans.sort_by_key(|(used, span)| (*used, span.start));
        spans.truncate(spans.len().div_ceil(4));
        let is_near = |span: &Range<usize>| {
            let owns = |extent: usize| extent < count && self.division.owner(extent) == Some(taker);
            owns(span.end) || span.start.checked_sub(1).is_some_and(owns)
        };
        let best = spans.iter().position(|(_, span)| is_near(span)).unwrap_or(0);
        (!spans.is_empty()).then(|| spans.swap_remove(best))
    }

    /// The span that `taker` needs from this extent on, with the last use of a block there, if all that it lacks can be taken from `other`.
    fn takable(&self, taker: LayoutNumber, other: LayoutNumber, extent: usize) -> Option<(u64, Range<usize>)> {
        let span = self.division.span(taker, extent)?;
        let (mut taken, mut used) = (0, 0);
        for extent in span.clone().filter(|&extent| self.division.owner(extent) != Some(taker)) {
            if self.division.owner(extent) != Some(other) {
                return None;
            }
            taken += 1;
            let directory = &self.directories[&other];
            for slot in self.division.slots_in(other, extent..extent + 1) {
                used = used.max(directory.last_use(slot)?);
            }
        }
        (self.division.owned(other) - taken >= self.division.floor(other)).then_some((used, span))
    }

    fn transfer(&mut self, span: Range<usize>, from: LayoutNumber, to: LayoutNumber) -> Withdrawn {
        let mut slots = Vec::new();
        for extent in span.clone().filter(|&extent| self.division.owner(extent) == Some(from)).collect::<Vec<_>>() {
            let lost = self.division.slots_in(from, extent..extent + 1);
            slots.extend(self.directory(from).lose_slots(lost));
            self.division.give(extent, to);
        }
        self.gain(to, span);
        Withdrawn { layout: from, slots }
    }

    fn take_unowned(&mut self, number: LayoutNumber) {
        if !self.division.has_unowned() {
            return;
        }
        let unowned: Vec<usize> = (0..self.division.extents()).filter(|&extent| self.division.owner(extent).is_none()).collect();
        unowned.iter().for_each(|&extent| self.division.give(extent, number));
        for run in unowned.chunk_by(|before, after| after - before == 1) {
            self.gain(number, run[0]..run[run.len() - 1] + 1);
        }
    }

    /// Adds the slots that a layout may use now that it has these extents.
    fn gain(&mut self, number: LayoutNumber, extents: Range<usize>) {
        let slots = self.division.slots_in(number, extents);
        let gained: Vec<u32> = slots.filter(|&slot| self.division.may_use(number, slot)).collect();
        self.directory(number).gain_slots(gained);
    }

    /// Panics if the books do not balance. For tests; takes time proportional to the slots.
    pub fn check_integrity(&self) {
        self.division.check_integrity();
        for (&number, directory) in &self.directories {
            directory.check_integrity();
            for slot in self.division.slots_in(number, 0..self.division.extents()) {
                assert_eq!(directory.has_slot(slot), self.division.may_use(number, slot), "slot {slot} of {number:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests;
