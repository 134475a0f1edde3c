//! The treatment of a text whose last check fails, because the moderation model is down, slow or broken.
//!
//! *Closed*: the text is refused. *Open*: it passes, but only for a limited time after the first of consecutive failures; after that it is
//! refused as well, until a check succeeds. Texts that may be about children are always refused.
//!
//! ```text
//!   a check fails ──► asked ──┬─ fails again, 3 in a row ──► resting: one check is tried every 2 s
//!            ▲                └─ succeeds: failures are reset            │
//!            └───────────────────────────────────────────────────────────┘
//! ```

use crate::{category::Category, judge::Doubt};
use std::time::Duration;

/// The number of consecutive failures after which the model rests: a dead one must not cost every request its deadline.
const FAILURES_MAX: u32 = 3;
/// The pause between attempts while the model rests.
const REST: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenDown {
    Closed,
    /// Open for this long after the first of consecutive failures.
    Open(Duration),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Passes,
    Refused,
}

/// The consecutive failures of one model. Times are since any fixed moment.
#[derive(Clone, Debug)]
pub struct Faults {
    when_down: WhenDown,
    /// `None` if the last check succeeded.
    row: Option<Row>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    since: Duration,
    failures: u32,
    /// While the model rests: the time of the next attempt.
    again: Duration,
}

impl Faults {
    pub fn new(when_down: WhenDown) -> Self {
        Self { when_down, row: None }
    }

    /// Whether the model is asked now. If not, [`Faults::fate`] decides.
    pub fn asks(&mut self, now: Duration) -> bool {
        match self.row.as_mut().filter(|row| row.failures >= FAILURES_MAX) {
            None => true,
            Some(row) if now >= row.again => {
                // Other requests wait for the outcome of this one. If there is none, the next attempt follows after another rest.
                row.again = now + REST;
                true
            }
            Some(_) => false,
        }
    }

    pub fn succeeded(&mut self) {
        self.row = None;
    }

    pub fn failed(&mut self, now: Duration) {
        let row = self.row_at(now);
        row.failures = row.failures.saturating_add(1);
        row.again = now + REST;
    }

    /// Counts a check that could not be tried for want of room: a failure in the row, but no reason to rest.
    pub fn crowded(&mut self, now: Duration) {
        self.row_at(now);
    }

    fn row_at(&mut self, now: Duration) -> &mut Row {
        self.row.get_or_insert(Row { since: now, failures: 0, again: now })
    }

    /// Decides about a text whose doubts could not be settled.
    pub fn fate(&self, now: Duration, doubts: &[Doubt]) -> Fate {
        let of_children = doubts.iter().flat_map(Doubt::categories).any(|category| category == Category::Csam);
        match (self.when_down, self.row) {
            (WhenDown::Open(window), Some(row)) if !of_children && now.saturating_sub(row.since) < window => Fate::Passes,
            _ => Fate::Refused,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Suspicion;
    use proptest::prelude::*;

    const WINDOW: Duration = Duration::from_secs(300);

    fn doubt(category: Category) -> [Doubt; 1] {
        [Doubt { text: String::new(), suspicions: vec![Suspicion { category, score: 0.6, limit: 0.95 }] }]
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1000 + seconds)
    }

    #[test]
    fn closed_refuses_from_the_first_failure_on() {
        let mut faults = Faults::new(WhenDown::Closed);
        faults.failed(at(0));
        assert_eq!(faults.fate(at(0), &doubt(Category::Hate)), Fate::Refused);
    }

    #[test]
    fn open_passes_for_its_window_and_a_success_opens_a_new_one() {
        let mut faults = Faults::new(WhenDown::Open(WINDOW));
        let hate = doubt(Category::Hate);
        faults.failed(at(0));
        faults.failed(at(200));
        let passes = [at(0), at(299), at(300), at(900)].map(|now| faults.fate(now, &hate) == Fate::Passes);
        assert_eq!(passes, [true, true, false, false]);
        faults.failed(at(900));
        assert_eq!(faults.fate(at(900), &hate), Fate::Refused, "further failures open nothing");
        faults.succeeded();
        faults.failed(at(901));
        assert_eq!(faults.fate(at(901), &hate), Fate::Passes);
    }

    #[test]
    fn what_may_be_about_children_never_passes() {
        let mut faults = Faults::new(WhenDown::Open(WINDOW));
        faults.failed(at(0));
        let mut both = doubt(Category::Hate).to_vec();
        both.extend(doubt(Category::Csam));
        assert_eq!([doubt(Category::Csam).to_vec(), both].map(|doubts| faults.fate(at(0), &doubts)), [Fate::Refused; 2]);
    }

    #[test]
    fn a_dead_model_is_asked_now_and_then() {
        let mut faults = Faults::new(WhenDown::Closed);
        for _ in 0..FAILURES_MAX {
            assert!(faults.asks(at(0)));
            faults.failed(at(0));
        }
        assert_eq!([at(0), at(1), at(2), at(2), at(3), at(4)].map(|now| faults.asks(now)), [false, false, true, false, false, true]);
        faults.succeeded();
        assert!(faults.asks(at(4)) && faults.asks(at(4)));
    }

    #[test]
    fn a_crowd_is_a_failure_but_the_model_need_not_rest() {
        let mut faults = Faults::new(WhenDown::Open(WINDOW));
        (0..9).for_each(|_| faults.crowded(at(0)));
        assert!(faults.asks(at(0)));
        assert_eq!([at(0), at(300)].map(|now| faults.fate(now, &doubt(Category::Hate))), [Fate::Passes, Fate::Refused]);
    }

    proptest! {
        /// In any sequence of events: no text passes after a window without a success, or under `Closed`; and one attempt is made per rest.
        #[test]
        fn an_open_door_is_bounded(
            open in any::<bool>(),
            steps in prop::collection::vec((0u64..5, 0u8..5, any::<bool>()), 1..200),
        ) {
            let window = Duration::from_secs(20);
            let mut faults = Faults::new(if open { WhenDown::Open(window) } else { WhenDown::Closed });
            let (mut now, mut first_failure, mut last_asked) = (at(0), None, at(0));
            for (passed, answer, of_children) in steps {
                now += Duration::from_secs(passed);
                let asks = faults.asks(now);
                prop_assert!(asks || now < last_asked + REST, "nobody is asked for too long");
                if asks {
                    last_asked = now;
                    match answer {
                        0 => {
                            faults.succeeded();
                            first_failure = None;
                            continue;
                        }
                        // Its client has left: no outcome is reported.
                        1 => continue,
                        answer => {
                            if answer == 2 { faults.crowded(now) } else { faults.failed(now) }
                            first_failure = first_failure.or(Some(now));
                        }
                    }
                }
                let fate = faults.fate(now, &doubt(if of_children { Category::Csam } else { Category::Hate }));
                let may_pass = open && !of_children && first_failure.is_some_and(|first| now < first + window);
                prop_assert_eq!(fate == Fate::Passes, may_pass);
            }
        }
    }
}
