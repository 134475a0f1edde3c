//! Named barriers: PTX's `barrier.sync` and `barrier.arrive` with a number of threads. Some of a block's warps meet there; warps that only
//! arrive continue at once.

use super::shared::Shared;
use crate::fault::{Fault, Kind};

/// The number of a block's named barriers.
pub(crate) const COUNT: usize = 16;

/// A block's named barriers.
pub(crate) struct Barriers {
    all: [Barrier; COUNT],
    /// Warps whose barrier is complete.
    released: Vec<usize>,
}

#[derive(Clone, Default)]
struct Barrier {
    /// The number of threads that complete the barrier.
    expected: u32,
    arrived: u32,
    warps: Vec<usize>,
    /// The warps that wait for completion.
    waiting: Vec<usize>,
    /// The merged clocks that the warps had on arrival.
    clock: Vec<u32>,
}

impl Barriers {
    pub(crate) fn new() -> Self {
        Self { all: std::array::from_fn(|_| Barrier::default()), released: Vec::new() }
    }

    /// Resets the barriers for the next block.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }

    /// Arrives with a warp, which waits for the others if `waits`. Returns whether it continues.
    pub(crate) fn arrive(&mut self, id: u32, threads: u32, warp: usize, waits: bool, shared: &mut Shared) -> Result<bool, Fault> {
        let wrong = |what: String| Err(Fault::new(Kind::Divergence, what));
        let Some(barrier) = self.all.get_mut(id as usize) else { return wrong(format!("warp {warp} names barrier {id} of {COUNT}")) };
        if threads == 0 || !threads.is_multiple_of(32) {
            return wrong(format!("warp {warp} names barrier {id} for {threads} threads, which are no whole warps"));
        }
        if barrier.warps.is_empty() {
            barrier.expected = threads;
        }
        if barrier.expected != threads {
            let expected = barrier.expected;
            return wrong(format!("warp {warp} comes to barrier {id} for {threads} threads, where others wait for {expected}"));
        }
        if barrier.warps.contains(&warp) {
            return wrong(format!("warp {warp} comes to barrier {id} again before it is complete"));
        }
        let clock = shared.clock(warp);
        barrier.clock.resize(clock.len(), 0);
        barrier.clock.iter_mut().zip(clock).for_each(|(all, own)| *all = (*all).max(own));
        barrier.arrived += 32;
        barrier.warps.push(warp);
        if waits {
            barrier.waiting.push(warp);
        }
        if barrier.arrived < threads {
            return Ok(!waits);
        }
        let Barrier { waiting, clock, .. } = std::mem::take(barrier);
        waiting.iter().for_each(|&warp| shared.learn(warp, &clock));
        self.released.extend(waiting.into_iter().filter(|&other| other != warp));
        Ok(true)
    }

    /// The warps released since the last call.
    pub(crate) fn released(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.released)
    }

    /// Barriers at which warps wait, for a message.
    pub(crate) fn pending(&self) -> String {
        let pending = self.all.iter().enumerate().filter(|(_, barrier)| !barrier.waiting.is_empty());
        let text =
            pending.map(|(id, b)| format!("warps {:?} wait at barrier {id}, {} of {} threads came", b.waiting, b.arrived, b.expected));
        text.collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_holds_who_waits_until_all_came() {
        let (mut barriers, mut shared) = (Barriers::new(), Shared::new(&[(0x410, 0x420)], 3));
        assert!(!barriers.arrive(3, 96, 0, true, &mut shared).unwrap());
        assert!(barriers.arrive(3, 96, 1, false, &mut shared).unwrap());
        assert!(barriers.released().is_empty() && barriers.pending().contains("64 of 96"));
        assert!(barriers.arrive(3, 96, 2, true, &mut shared).unwrap());
        assert_eq!(barriers.released(), [0]);
        assert!(barriers.pending().is_empty());
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let (mut barriers, mut shared) = (Barriers::new(), Shared::new(&[(0x410, 0x420)], 3));
        barriers.arrive(3, 96, 0, false, &mut shared).unwrap();
        for (id, threads, warp) in [(3, 64, 1), (3, 96, 0), (16, 32, 0), (4, 33, 0)] {
            assert_eq!(barriers.arrive(id, threads, warp, true, &mut shared).unwrap_err().kind, Kind::Divergence);
        }
    }
}
