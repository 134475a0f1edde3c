//! The order in which a worker takes its work.
//!
//! Higher priorities go first. Among equals, groups that have had more than their share yield ([`shares`](crate::shares)). Then:
//!
//! 1. Jobs that can still be on time, by due time. On one machine whose jobs can be interrupted, that order meets all limits if any order
//!    does (Liu and Layland, 1973). The work that a job still needs ([`pace`](crate::pace)) decides whether it can: a long prompt is late
//!    long before its due time.
//! 2. Late ones, the most delayed first, in proportion to the time that they were allowed. They no longer make other jobs late.
//!
//! A job without a limit is allowed some time plus a multiple of its own work, so a short prompt passes a long one, and waits grow in
//! proportion to the requested work.
//!
//! **No job starves**, regardless of its rank: of the prompt tokens computed past the oldest job, it is owed a fixed share ([`Owed`]), and
//! the oldest waiting job gets device blocks once it has been passed [`PASSED_MAX`] times. Only the oldest: in an overload, all jobs have
//! been passed often, and nothing would be left of the order.

use crate::job::JobId;
use std::{
    cmp::{Ordering, Reverse},
    time::Duration,
};
use tidemill_proto::{block::BLOCK_TOKENS, urgency::Urgency};

/// The number of later jobs that may get device blocks before the oldest waiting one. After that, no job passes it.
pub const PASSED_MAX: u32 = 32;

/// The new count of a waiting job when another one got device blocks: it counts if that one came later (`is_older`), and restarts after a
/// job that could no longer be passed.
pub fn passed(times: u32, is_older: bool, after_overdue: bool) -> u32 {
    match (is_older, after_overdue) {
        (true, _) => times + 1,
        (false, true) => 0,
        (false, false) => times,
    }
}

/// The time that a job without a limit is allowed, in addition to a multiple of its own work.
const GRACE: Duration = Duration::from_millis(200);
/// The multiple of its own work that a job without a limit is allowed.
const STRETCH: f64 = 10.0;
/// The number of tokens computed past the oldest job for which it is owed one token.
const OWED_SHARE: usize = 8;

/// The data besides a job's urgency that decides its rank.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    pub arrived: Duration,
    /// The time that all its work takes here.
    pub work: Duration,
    /// The time that the rest of its work takes.
    pub left: Duration,
    /// Whether its group has had more than its share.
    pub over_share: bool,
}

/// A job's position in the order: the least goes first.
#[derive(Clone, Copy, Debug)]
pub struct Rank {
    priority: Reverse<u8>,
    over_share: bool,
    when: When,
    /// The job's number in order of arrival.
    number: u64,
}

#[derive(Clone, Copy, Debug)]
enum When {
    OnTime {
        due: Duration,
    },
    Late {
        /// The time since arrival, relative to the time allowed.
        stretch: f64,
    },
}

impl Rank {
    /// The rank of a job. `number` counts jobs in the order in which they came.
    pub fn new(urgency: &Urgency, standing: Standing, number: u64, now: Duration) -> Self {
        let Standing { arrived, work, left, over_share } = standing;
        let allowed = urgency.due_ms.map_or_else(|| GRACE + work.mul_f64(STRETCH), Duration::from_millis);
        let due = arrived.saturating_add(allowed);
        let when = if now + left <= due {
            When::OnTime { due }
        } else {
            let waited = now.saturating_sub(arrived);
            When::Late { stretch: waited.as_secs_f64() / allowed.as_secs_f64().max(1e-3) }
        };
        Self { priority: Reverse(urgency.priority), over_share, when, number }
    }
}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        let when = match (&self.when, &other.when) {
            (When::OnTime { due: a }, When::OnTime { due: b }) => a.cmp(b),
            (When::OnTime { .. }, When::Late { .. }) => Ordering::Less,
            (When::Late { .. }, When::OnTime { .. }) => Ordering::Greater,
            (When::Late { stretch: a }, When::Late { stretch: b }) => b.total_cmp(a),
        };
        let over_all = (self.priority, self.over_share).cmp(&(other.priority, other.over_share));
        over_all.then(when).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rank {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Rank {}

/// The tokens that the oldest job is owed for those computed past it.
#[derive(Clone, Debug, Default)]
pub struct Owed {
    to: Option<JobId>,
    /// Tokens computed past it and not made up for.
    passed: usize,
}

impl Owed {
    /// The tokens that the oldest job gets before all others in the next step: whole blocks, as fewer are not worth a place.
    pub fn tokens(&self, oldest: JobId) -> usize {
        if self.to == Some(oldest) { self.passed / OWED_SHARE / BLOCK_TOKENS * BLOCK_TOKENS } else { 0 }
    }

    /// Notes that a step computes this many tokens of the oldest job, and of other jobs.
    pub fn note(&mut self, oldest: JobId, own: usize, others: usize) {
        if self.to != Some(oldest) {
            *self = Self { to: Some(oldest), passed: 0 };
        }
        self.passed = (self.passed + others).saturating_sub(own.saturating_mul(OWED_SHARE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks rows of `name: priority due|- arrived work left share|over`, in milliseconds, in the order of arrival; then the order at
    /// 1,000 ms.
    fn check(jobs: &str, expected: &str) {
        let ms = |cell: &str| Duration::from_millis(cell.parse().unwrap());
        let mut ranked: Vec<(Rank, &str)> = Vec::new();
        for (number, row) in (0..).zip(jobs.lines().map(str::trim).filter(|row| !row.is_empty())) {
            let cells: Vec<&str> = row.split_whitespace().collect();
            let [name, priority, due, arrived, work, left, share] = cells[..] else { panic!("row `{row}`") };
            let urgency = Urgency { priority: priority.parse().unwrap(), due_ms: due.parse().ok(), ..Urgency::default() };
            let standing = Standing { arrived: ms(arrived), work: ms(work), left: ms(left), over_share: share == "over" };
            ranked.push((Rank::new(&urgency, standing, number, ms("1000")), name.trim_end_matches(':')));
        }
        ranked.sort_unstable_by_key(|(rank, _)| *rank);
        assert_eq!(ranked.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(" "), expected, "{jobs}");
    }

    #[test]
    fn limits_decide_and_late_jobs_yield() {
        check(
            "
            relaxed: 0 5000 900 100 100 share
            tight:   0 300  900 100 100 share
            hopeless: 0 300 100 100 100 share
            too-long: 0 2000 900 5000 5000 share
            half-done: 0 2500 900 5000 1000 share
            ",
            "tight half-done relaxed hopeless too-long",
        );
    }

    #[test]
    fn without_limits_short_prompts_pass_long_ones_and_equals_keep_their_order() {
        check(
            "
            long:    0 - 100 2500 2000 share
            long-2:  0 - 200 2500 2500 share
            short:   0 - 900 50 50 share
            short-2: 0 - 950 50 50 share
            ",
            "short short-2 long long-2",
        );
        check(
            "
            waited-in-vain: 0 - 0 10 10 share
            less-so:        0 - 400 10 10 share
            new:            0 - 1000 10 10 share
            ",
            "new waited-in-vain less-so",
        );
    }

    #[test]
    fn priority_comes_first_and_a_group_over_its_share_yields() {
        check(
            "
            batch:    0 -   100 10 10 share
            flood:    1 300 990 10 10 over
            fair:     1 900 990 10 10 share
            premium:  2 -   999 900 900 over
            ",
            "premium fair flood batch",
        );
    }

    #[test]
    fn the_oldest_is_owed_a_share_of_what_passes_it() {
        let (mut owed, oldest) = (Owed::default(), JobId(1));
        owed.note(oldest, 0, 100);
        assert_eq!(owed.tokens(oldest), 0, "less than a block");
        owed.note(oldest, 0, 200);
        assert_eq!(owed.tokens(oldest), 32);
        owed.note(oldest, 32, 0);
        assert_eq!(owed.tokens(oldest), 0);
        owed.note(oldest, 0, 1000);
        assert_eq!(owed.tokens(JobId(2)), 0, "another one is the oldest now");
        owed.note(JobId(2), 0, 128);
        assert_eq!((owed.tokens(oldest), owed.tokens(JobId(2))), (0, 16));
    }
}
