//! Sums over a sliding window. Time is cut into slots; entries of a slot count until all of the slot is older than the window, so no window
//! of that length, wherever it starts, ever holds more than the sum.

use std::{collections::VecDeque, time::Duration};

#[derive(Debug)]
pub(crate) struct Window {
    slot: Duration,
    /// The number of slots in the window.
    slots: u64,
    kept: VecDeque<Slot>,
    requests: u64,
    tokens: u64,
}

#[derive(Debug)]
struct Slot {
    number: u64,
    requests: u64,
    tokens: u64,
}

/// The number of a slot, by which an entry can be found.
pub(crate) type SlotNumber = u64;

impl Window {
    pub(crate) fn minute() -> Self {
        Self::new(Duration::from_secs(1), 60)
    }

    pub(crate) fn day() -> Self {
        Self::new(Duration::from_secs(15 * 60), 96)
    }

    fn new(slot: Duration, slots: u64) -> Self {
        Self { slot, slots, kept: VecDeque::new(), requests: 0, tokens: 0 }
    }

    fn number(&self, now: Duration) -> SlotNumber {
        (now.as_millis() / self.slot.as_millis()) as u64
    }

    /// Drops slots that are older than the window. `now` never falls.
    pub(crate) fn advance(&mut self, now: Duration) {
        let current = self.number(now);
        while let Some(oldest) = self.kept.front().filter(|oldest| oldest.number + self.slots < current) {
            self.requests -= oldest.requests;
            self.tokens -= oldest.tokens;
            self.kept.pop_front();
        }
    }

    pub(crate) fn add(&mut self, now: Duration, tokens: u64) -> SlotNumber {
        let number = self.number(now);
        if self.kept.back().is_none_or(|newest| newest.number < number) {
            self.kept.push_back(Slot { number, requests: 0, tokens: 0 });
        }
        let newest = self.kept.back_mut().expect("there is one");
        newest.requests += 1;
        newest.tokens += tokens;
        self.requests += 1;
        self.tokens += tokens;
        newest.number
    }

    /// Corrects an entry from `was` tokens to `is`. With `gone`, its request is removed as well.
    pub(crate) fn correct(&mut self, number: SlotNumber, was: u64, is: u64, gone: bool) {
        let Ok(at) = self.kept.binary_search_by_key(&number, |slot| slot.number) else { return };
        let slot = &mut self.kept[at];
        slot.tokens = slot.tokens - was + is;
        self.tokens = self.tokens - was + is;
        slot.requests -= u64::from(gone);
        self.requests -= u64::from(gone);
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests == 0 && self.tokens == 0
    }

    /// Time until this many of the current requests and tokens no longer count.
    pub(crate) fn until_freed(&self, now: Duration, requests: u64, tokens: u64) -> Duration {
        let mut freed = (0, 0);
        for slot in &self.kept {
            freed = (freed.0 + slot.requests, freed.1 + slot.tokens);
            if freed.0 >= requests && freed.1 >= tokens {
                return self.end(slot).saturating_sub(now);
            }
        }
        Duration::ZERO
    }

    /// Time until nothing counts any more.
    pub(crate) fn until_empty(&self, now: Duration) -> Duration {
        self.kept.back().map_or(Duration::ZERO, |newest| self.end(newest).saturating_sub(now))
    }

    fn end(&self, slot: &Slot) -> Duration {
        let slots = u32::try_from(self.slots + 1).expect("a window has a hundred slots or so");
        Duration::from_millis((u128::from(slot.number) * self.slot.as_millis()) as u64) + self.slot * slots
    }

    pub(crate) fn check_integrity(&self) {
        assert_eq!(self.requests, self.kept.iter().map(|slot| slot.requests).sum::<u64>());
        assert_eq!(self.tokens, self.kept.iter().map(|slot| slot.tokens).sum::<u64>());
        assert!(self.kept.iter().zip(self.kept.iter().skip(1)).all(|(a, b)| a.number < b.number));
        assert!(self.kept.len() as u64 <= self.slots + 1);
    }
}
