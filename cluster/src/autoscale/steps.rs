//! From needed to wanted workers: up at once, down slowly.

use serde::{Deserialize, Serialize};
use std::{collections::VecDeque, time::Duration};

/// The fewest and the most workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Range {
    pub floor: u32,
    pub ceiling: u32,
}

impl Range {
    fn clamp(self, workers: u32) -> u32 {
        workers.clamp(self.floor, self.ceiling)
    }
}

/// The wanted number of one role's workers. It rises to the needed number at once, and falls by at most a quarter at a time: when fewer
/// have been enough for the duration of the cooldown, and no sooner than that after the last change. Fewer are enough if they will still
/// be at the end of what is foreseen, so a number is not given up to be needed again at once.
#[derive(Clone, Debug)]
pub struct Steps {
    range: Range,
    cooldown: Duration,
    wanted: u32,
    changed: Duration,
    /// The time of the first look.
    began: Option<Duration>,
    /// The numbers that were enough at each look of the last cooldown, without those that a later one equals or exceeds: the first is the
    /// largest.
    enough: VecDeque<(Duration, u32)>,
}

/// The inverse of the largest share that is given up at a time.
const STEP: u32 = 4;

impl Steps {
    /// The state before the first look. The range's floor is no higher than its ceiling.
    pub fn new(range: Range, cooldown: Duration) -> Self {
        assert!(range.floor <= range.ceiling, "the floor is no higher than the ceiling: {range:?}");
        Self { range, cooldown, wanted: range.floor, changed: Duration::ZERO, began: None, enough: VecDeque::new() }
    }

    /// The wanted number, or `None` before the first look.
    pub fn wanted(&self) -> Option<u32> {
        self.began.map(|_| self.wanted)
    }

    /// Takes account of the number of workers that is needed soon, the number that is enough for longer, and the existing number.
    pub fn look(&mut self, now: Duration, needed: u32, enough: u32, there: u32) {
        let began = *self.began.get_or_insert(now);
        let (mut needed, mut enough) = (self.range.clamp(needed), self.range.clamp(enough.max(needed)));
        if now.saturating_sub(began) < self.cooldown {
            // A coordinator that has just started knows little, and the existing workers may well be needed.
            needed = needed.max(self.range.clamp(there));
            enough = enough.max(needed);
        }
        while self.enough.back().is_some_and(|(_, earlier)| *earlier <= enough) {
            self.enough.pop_back();
        }
        self.enough.push_back((now, enough));
        while self.enough.front().is_some_and(|(at, _)| now.saturating_sub(*at) > self.cooldown) {
            self.enough.pop_front();
        }
        if needed > self.wanted {
            (self.wanted, self.changed) = (needed, now);
            return;
        }
        let enough = self.enough.front().map_or(enough, |(_, most)| *most);
        let watched = now.saturating_sub(began) >= self.cooldown && now.saturating_sub(self.changed) >= self.cooldown;
        if watched && enough < self.wanted {
            let least = self.wanted - (self.wanted / STEP).max(1);
            (self.wanted, self.changed) = (enough.max(least), now);
        }
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert_eq!(self.wanted, self.range.clamp(self.wanted), "between floor and ceiling: {self:?}");
        assert!(self.enough.iter().is_sorted_by(|a, b| a.0 < b.0 && a.1 > b.1), "{self:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVERY: Duration = Duration::from_secs(5);
    const COOLDOWN: Duration = Duration::from_secs(60);

    fn steps(floor: u32, ceiling: u32) -> Steps {
        Steps::new(Range { floor, ceiling }, COOLDOWN)
    }

    /// The wanted numbers after each look.
    fn run(steps: &mut Steps, needed: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let look = |(number, needed): (u32, u32)| {
            let there = steps.wanted;
            steps.look(EVERY * number, needed, needed, there);
            steps.check_integrity();
            steps.wanted
        };
        (0..).zip(needed).map(look).collect()
    }

    #[test]
    fn up_at_once_and_down_by_a_quarter_after_each_cooldown() {
        let mut steps = steps(1, 16);
        let needed = std::iter::repeat_n(16, 1).chain(std::iter::repeat_n(1, 200));
        let wanted = run(&mut steps, needed);
        let mut seen: Vec<u32> = wanted.clone();
        seen.dedup();
        assert_eq!(seen, [16, 12, 9, 7, 6, 5, 4, 3, 2, 1]);
        let first_fall = wanted.iter().position(|&wanted| wanted == 12).unwrap();
        assert!(EVERY * first_fall as u32 > COOLDOWN, "look {first_fall}");
        assert!(EVERY * wanted.iter().position(|&wanted| wanted == 1).unwrap() as u32 >= COOLDOWN * 9);
    }

    #[test]
    fn one_that_has_just_started_keeps_those_that_are_there() {
        let mut steps = steps(1, 8);
        steps.look(Duration::from_secs(100), 1, 1, 6);
        assert_eq!(steps.wanted(), Some(6));
        steps.look(Duration::from_secs(130), 1, 1, 6);
        assert_eq!(steps.wanted(), Some(6));
    }

    #[test]
    fn what_goes_up_and_down_within_a_cooldown_moves_nothing() {
        let wanted = run(&mut steps(1, 16), (0..500).map(|look| [5, 6, 7, 5][look % 4]));
        assert!(wanted[4..].iter().all(|&wanted| wanted == 7), "{wanted:?}");
    }

    #[test]
    fn none_is_given_up_that_may_be_needed_before_it_could_be_replaced() {
        let mut steps = steps(1, 16);
        for look in 0..100 {
            steps.look(EVERY * look, 4, 6, 8);
        }
        assert_eq!(steps.wanted(), Some(6), "four would do now, and six for longer");
    }

    proptest! {
        #[test]
        fn never_outside_its_range_never_a_larger_step_and_never_less_than_needed(
            floor in 0_u32..4, more in 0_u32..12, needed in proptest::collection::vec(0_u32..20, 1..200),
        ) {
            let mut steps = steps(floor, floor + more);
            let mut before = steps.wanted;
            for (number, needed) in (0..).zip(needed) {
                steps.look(EVERY * number, needed, needed, before);
                steps.check_integrity();
                let wanted = steps.wanted;
                prop_assert!((floor..=floor + more).contains(&wanted));
                prop_assert!(wanted >= needed.clamp(floor, floor + more));
                prop_assert!(before - wanted.min(before) <= (before / STEP).max(1));
                before = wanted;
            }
        }

        #[test]
        fn a_constant_need_is_met_and_stays(needed in 0_u32..20, first in 0_u32..20) {
            let mut steps = steps(1, 16);
            let wanted = run(&mut steps, [first].into_iter().chain(std::iter::repeat_n(needed, 400)));
            let target = needed.clamp(1, 16);
            prop_assert_eq!(*wanted.last().unwrap(), target);
            // From the first number on, all changes have one direction.
            prop_assert!(wanted[1..].is_sorted_by(|a, b| if first > needed { a >= b } else { a <= b }), "{:?}", wanted);
        }
    }
}
