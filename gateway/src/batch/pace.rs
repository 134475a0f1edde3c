//! The order and pace of a batch's requests. A bounded number run at a time; one that is refused (its tenant's quota is used up, or load is
//! shed) goes back to the front of the queue, and the batch rests, with fewer at a time afterwards. Each good answer lets one more run
//! again (additive increase, multiplicative decrease, as in TCP), so that a batch uses the capacity that others leave without probing for
//! it constantly.

use super::input::Line;
use std::{collections::VecDeque, time::Duration};

/// The number of server failures that a request survives.
const FAILURES_MAX: u32 = 3;
/// The rest if the refusal names none.
const REST: Duration = Duration::from_secs(2);
const REST_MIN: Duration = Duration::from_millis(100);
/// The longest rest: after it a request is tried again even if the refusal named a longer one, since quotas are raised and clusters grow.
const REST_MAX: Duration = Duration::from_secs(60);

/// A request that runs, or will run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub line: Line,
    failures: u32,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Run(Task),
    /// No request may run before this time.
    Rest(Duration),
    /// Wait until a running request has ended.
    Wait,
}

/// The end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The HTTP status.
    pub status: u16,
    pub retry_after: Option<Duration>,
}

#[derive(Debug)]
pub struct Pace {
    at_once_max: usize,
    at_once: usize,
    waiting: VecDeque<Task>,
    running: usize,
    rests_until: Duration,
}

impl Pace {
    pub fn new(at_once_max: usize, lines: impl IntoIterator<Item = Line>) -> Self {
        let at_once_max = at_once_max.max(1);
        let waiting = lines.into_iter().map(|line| Task { line, failures: 0 }).collect();
        Self { at_once_max, at_once: at_once_max, waiting, running: 0, rests_until: Duration::ZERO }
    }

    /// Returns the next step. `now` is the time since any fixed moment.
    pub fn next(&mut self, now: Duration) -> Step {
        if self.running >= self.at_once || self.waiting.is_empty() {
            return Step::Wait;
        }
        if now < self.rests_until {
            return Step::Rest(self.rests_until);
        }
        self.running += 1;
        Step::Run(self.waiting.pop_front().expect("it is not empty"))
    }

    /// Handles the end of a request's attempt. Returns whether this was its answer; otherwise it will run again.
    pub fn ended(&mut self, now: Duration, task: Task, attempt: Attempt) -> bool {
        self.running -= 1;
        let Task { line, failures } = task;
        let (rest, failures) = match attempt.status {
            429 | 503 => (attempt.retry_after.unwrap_or(REST), failures),
            500.. if failures + 1 < FAILURES_MAX => (REST * (failures + 1), failures + 1),
            _ => {
                self.at_once = (self.at_once + 1).min(self.at_once_max);
                return true;
            }
        };
        self.at_once = (self.at_once / 2).max(1);
        self.rests_until = self.rests_until.max(now + rest.clamp(REST_MIN, REST_MAX));
        self.waiting.push_front(Task { line, failures });
        false
    }

    /// Returns a request that was not run after all, since the batch ends.
    pub fn dropped(&mut self, task: Task) {
        self.running -= 1;
        self.waiting.push_front(task);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn lines(count: u64) -> Vec<Line> {
        (1..=count).map(|number| Line { number, offset: 0, bytes: 1, custom_id: number.to_string() }).collect()
    }

    fn run(pace: &mut Pace, now: Duration) -> Task {
        match pace.next(now) {
            Step::Run(task) => task,
            other => panic!("{other:?}"),
        }
    }

    const OK: Attempt = Attempt { status: 200, retry_after: None };

    fn later(ms: u64) -> Attempt {
        Attempt { status: 429, retry_after: Some(Duration::from_millis(ms)) }
    }

    #[test]
    fn so_many_run_at_once() {
        let mut pace = Pace::new(2, lines(3));
        let now = Duration::ZERO;
        let first = run(&mut pace, now);
        run(&mut pace, now);
        assert_eq!(pace.next(now), Step::Wait);
        assert!(pace.ended(now, first, OK));
        assert_eq!(run(&mut pace, now).line.number, 3);
        assert_eq!(pace.next(now), Step::Wait);
    }

    #[test]
    fn later_is_no_answer_and_slows_the_batch_down() {
        let mut pace = Pace::new(4, lines(8));
        let ms = Duration::from_millis;
        let tasks: Vec<_> = (0..4).map(|_| run(&mut pace, ms(0))).collect();
        for task in tasks {
            assert!(!pace.ended(ms(10), task, later(3000)));
        }
        assert_eq!(pace.next(ms(11)), Step::Rest(ms(3010)));
        let task = run(&mut pace, ms(3010));
        assert_eq!(pace.next(ms(3010)), Step::Wait, "one at a time");
        assert!(pace.ended(ms(3020), task, OK));
        run(&mut pace, ms(3020));
        run(&mut pace, ms(3020));
        assert_eq!(pace.next(ms(3020)), Step::Wait, "then two");
    }

    #[test]
    fn a_rest_has_its_bounds() {
        for (said, rests) in [(0, REST_MIN), (3_600_000, REST_MAX)] {
            let mut pace = Pace::new(1, lines(1));
            let task = run(&mut pace, Duration::ZERO);
            pace.ended(Duration::ZERO, task, later(said));
            assert_eq!(pace.next(Duration::ZERO), Step::Rest(rests));
        }
    }

    #[test]
    fn failures_of_the_server_are_got_over_and_those_of_the_client_are_not() {
        let mut pace = Pace::new(1, lines(1));
        let mut now = Duration::ZERO;
        let failed = Attempt { status: 500, retry_after: None };
        for left in (0..FAILURES_MAX).rev() {
            let task = run(&mut pace, now);
            assert_eq!(pace.ended(now, task, failed), left == 0);
            now += REST_MAX;
        }
        let mut pace = Pace::new(1, lines(1));
        let task = run(&mut pace, now);
        assert!(pace.ended(now, task, Attempt { status: 400, retry_after: None }));
    }

    proptest! {
        /// For any outcomes of the attempts, each request is answered once, and never more run than allowed.
        #[test]
        fn each_request_has_one_answer(at_once in 1..6_usize, outcomes in prop::collection::vec(0..4_u8, 0..200)) {
            let mut pace = Pace::new(at_once, lines(12));
            let (mut now, mut running, mut answers) = (Duration::ZERO, Vec::new(), BTreeMap::new());
            let mut outcomes = outcomes.into_iter();
            while answers.len() < 12 {
                match pace.next(now) {
                    Step::Run(task) => running.push(task),
                    Step::Rest(until) => {
                        prop_assert!(until > now);
                        now = until;
                    }
                    Step::Wait => {
                        prop_assert!(!running.is_empty(), "nothing could end this wait");
                        let task = running.remove(0);
                        let attempt = match outcomes.next().unwrap_or(0) {
                            1 => later(500),
                            2 => Attempt { status: 500, retry_after: None },
                            3 => Attempt { status: 503, retry_after: None },
                            _ => OK,
                        };
                        let number = task.line.number;
                        if pace.ended(now, task, attempt) {
                            prop_assert!(answers.insert(number, ()).is_none());
                        }
                    }
                }
                prop_assert!(running.len() <= at_once);
            }
        }
    }
}
