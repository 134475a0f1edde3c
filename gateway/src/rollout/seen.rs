//! The figures of a rollout's two models: counts and latencies of the last minute, few enough for coordinators to exchange.

use super::{record::Summary, votes::Votes};
use serde::{Deserialize, Serialize};
use std::{collections::VecDeque, time::Duration};

/// One of the two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    From,
    To,
}

/// The end of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ended {
    pub failed: bool,
    /// Whether it kept its class's limits.
    pub kept: bool,
    pub ttft: Option<Duration>,
    pub tpot: Option<Duration>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    pub requests: u64,
    pub failed: u64,
    /// The number of successful requests within their class's limits.
    pub kept: u64,
    pub ttft: Histogram,
    pub tpot: Histogram,
    pub votes: Votes,
}

/// Latencies in buckets whose bounds grow by a tenth each: a percentile is accurate to 5 %.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Histogram(Vec<(u8, u32)>);

/// Requests that `to` answered unseen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shadows {
    /// Greedy or seeded requests with the same answer.
    pub same: u64,
    /// Greedy or seeded requests with a different answer.
    pub differs: u64,
    /// Randomly sampled requests, whose answers need not be equal.
    pub drawn: u64,
    pub failed: u64,
    /// Shadows that were not tried: there were too many at a time, or the model was overloaded.
    pub dropped: u64,
    /// The total length of `from`'s compared answers, in characters.
    pub from_chars: u64,
    pub to_chars: u64,
}

/// All figures of a rollout, for both models, summed over coordinators.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Seen {
    pub from: Counts,
    pub to: Counts,
    /// The number of requests to `to` since the step started.
    pub step_requests: u64,
    /// Since the rollout started.
    pub shadows: Shadows,
}

/// The report of one coordinator to the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub id: String,
    pub step: usize,
    pub at_ms: u64,
    pub seen: Seen,
}

/// The end of the first bucket in milliseconds.
const FIRST_MS: f64 = 0.5;
const GROWTH: f64 = 1.1;
/// The number of buckets; the last one starts after an hour.
const BUCKETS: usize = 180;

impl Histogram {
    pub fn add(&mut self, time: Duration) {
        let ms = time.as_secs_f64() * 1e3;
        let bucket = if ms <= FIRST_MS { 0.0 } else { (ms / FIRST_MS).ln() / GROWTH.ln() };
        self.put((bucket.ceil() as usize).min(BUCKETS - 1) as u8, 1);
    }

    fn put(&mut self, bucket: u8, count: u32) {
        match self.0.binary_search_by_key(&bucket, |(bucket, _)| *bucket) {
            Ok(place) => self.0[place].1 = self.0[place].1.saturating_add(count),
            Err(place) => self.0.insert(place, (bucket, count)),
        }
    }

    fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|(bucket, count)| self.put(*bucket, *count));
    }

    /// The 95th percentile, rounded to the middle of a bucket.
    pub fn p95_ms(&self) -> Option<f64> {
        let total: u64 = self.0.iter().map(|(_, count)| u64::from(*count)).sum();
        let wanted = (total * 95).div_ceil(100);
        let mut seen = 0;
        let (bucket, _) = self.0.iter().find(|(_, count)| {
            seen += u64::from(*count);
            seen >= wanted
        })?;
        Some(FIRST_MS * GROWTH.powf(f64::from(*bucket) - 0.5))
    }
}

impl Counts {
    pub fn add(&mut self, ended: &Ended) {
        self.requests += 1;
        self.failed += u64::from(ended.failed);
        self.kept += u64::from(!ended.failed && ended.kept);
        ended.ttft.into_iter().for_each(|time| self.ttft.add(time));
        ended.tpot.into_iter().for_each(|time| self.tpot.add(time));
    }

    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.failed += other.failed;
        self.kept += other.kept;
        self.ttft.merge(&other.ttft);
        self.tpot.merge(&other.tpot);
        self.votes.merge(&other.votes);
    }

    /// The summary, given the counts of the rollout's other model.
    fn summary(&self, other: &Self) -> Summary {
        let share = |part: u64, of: u64, else_: f64| if of == 0 { else_ } else { part as f64 / of as f64 };
        let (up, down) = self.votes.counted(&other.votes);
        let votes = up + down;
        Summary {
            requests: self.requests,
            error_rate: share(self.failed, self.requests, 0.0),
            goodput: share(self.kept, self.requests - self.failed, 1.0),
            ttft_p95_ms: self.ttft.p95_ms(),
            tpot_p95_ms: self.tpot.p95_ms(),
            thumbs_down: share(down, votes, 0.0),
            votes,
        }
    }
}

impl Shadows {
    pub fn merge(&mut self, other: &Self) {
        self.same += other.same;
        self.differs += other.differs;
        self.drawn += other.drawn;
        self.failed += other.failed;
        self.dropped += other.dropped;
        self.from_chars += other.from_chars;
        self.to_chars += other.to_chars;
    }

    /// The number of shadows that were tried.
    pub fn ran(&self) -> u64 {
        self.same + self.differs + self.drawn + self.failed
    }
}

impl Seen {
    /// The summaries of `from` and of `to`.
    pub fn summaries(&self) -> (Summary, Summary) {
        (self.from.summary(&self.to), self.to.summary(&self.from))
    }

    pub fn merge(&mut self, other: &Self) {
        self.from.merge(&other.from);
        self.to.merge(&other.to);
        self.step_requests += other.step_requests;
        self.shadows.merge(&other.shadows);
    }
}

/// Counts of the last seconds, in slots that are dropped one by one.
#[derive(Clone, Debug)]
pub struct Window {
    slot: Duration,
    /// The slots, the newest last, each with its number.
    slots: VecDeque<(u64, Counts)>,
}

const SLOTS: u32 = 12;

impl Window {
    pub fn new(length: Duration) -> Self {
        Self { slot: length / SLOTS, slots: VecDeque::new() }
    }

    fn number(&self, now: Duration) -> u64 {
        (now.as_nanos() / self.slot.as_nanos().max(1)) as u64
    }

    /// The counts of the current slot.
    pub fn now(&mut self, now: Duration) -> &mut Counts {
        let number = self.number(now);
        self.forget(number);
        if self.slots.back().is_none_or(|(last, _)| *last < number) {
            self.slots.push_back((number, Counts::default()));
        }
        &mut self.slots.back_mut().expect("there is one").1
    }

    fn forget(&mut self, number: u64) {
        while self.slots.front().is_some_and(|(first, _)| first + u64::from(SLOTS) <= number) {
            self.slots.pop_front();
        }
    }

    pub fn sum(&mut self, now: Duration) -> Counts {
        self.forget(self.number(now));
        let mut sum = Counts::default();
        self.slots.iter().for_each(|(_, counts)| sum.merge(counts));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::{super::votes::Voter, *};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_percentile_is_right_to_five_percent(times in prop::collection::vec(1.0_f64..1e6, 1..300)) {
            let mut histogram = Histogram::default();
            times.iter().for_each(|ms| histogram.add(Duration::from_secs_f64(ms / 1e3)));
            let mut sorted = times.clone();
            sorted.sort_by(f64::total_cmp);
            let exact = sorted[(times.len() * 95).div_ceil(100) - 1];
            let got = histogram.p95_ms().unwrap();
            prop_assert!((got / exact - 1.0).abs() < 0.055, "{got} for {exact}");
        }

        #[test]
        fn what_coordinators_add_up_is_what_one_would_have_seen(times in prop::collection::vec((0.1_f64..1e5, any::<bool>()), 0..100)) {
            let mut parts = [Counts::default(), Counts::default()];
            let mut whole = Counts::default();
            for (number, (ms, failed)) in times.iter().enumerate() {
                let ended = Ended { failed: *failed, kept: true, ttft: Some(Duration::from_secs_f64(ms / 1e3)), tpot: None };
                parts[number % 2].add(&ended);
                whole.add(&ended);
            }
            let [mut sum, other] = parts;
            sum.merge(&other);
            prop_assert_eq!(sum, whole);
        }
    }

    #[test]
    fn a_window_forgets() {
        let mut window = Window::new(Duration::from_secs(60));
        let at = Duration::from_secs;
        (0..60).for_each(|second| window.now(at(second)).add(&Ended::default()));
        assert_eq!(window.sum(at(59)).requests, 60);
        assert_eq!(window.sum(at(60)).requests, 55, "a slot is five seconds");
        assert_eq!(window.sum(at(200)).requests, 0);
        assert_eq!(window.sum(at(1)).requests, 0, "a clock that goes back is no reason to fail");
        assert!(window.slots.is_empty());
    }

    #[test]
    fn nothing_seen_is_nothing_wrong() {
        let (summary, _) = Seen::default().summaries();
        assert_eq!((summary.error_rate, summary.goodput, summary.ttft_p95_ms, summary.thumbs_down), (0.0, 1.0, None, 0.0));
    }

    #[test]
    fn what_is_told_is_short() {
        let mut counts = Counts::default();
        for ms in 0..100_000 {
            counts.add(&Ended { ttft: Some(Duration::from_millis(ms * 7)), tpot: Some(Duration::from_millis(ms)), ..Ended::default() });
        }
        for tenant in 0..1000 {
            counts.votes.add(Voter::Tenant(Some(&tenant.to_string())), 100_000, 100_000);
        }
        let seen = Seen { from: counts.clone(), to: counts, ..Seen::default() };
        assert!(serde_json::to_vec(&seen).unwrap().len() < 8 << 10);
    }
}
