//! Bounds on the requests to the server, and a measure of its speed.

use std::time::Duration;

/// Limits on the rate and cost of requests.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limits {
    /// Requests per second, at least 1. After a quiet second, this many may come at once.
    pub requests_per_s: u32,
    /// Dollars for a thousand requests that write or list.
    pub usd_per_1000_writes: f64,
    /// Dollars for a thousand requests that read.
    pub usd_per_1000_reads: f64,
    /// Dollars per day; `None` if only the rate limits requests.
    pub usd_per_day: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// A read of blocks that a reader waits for.
    Read,
    /// A read of an index, which no reader waits for: it leaves half of each second's requests to reads of blocks.
    ReadIndex,
    WriteOrList,
    /// A deletion, which costs nothing.
    Delete,
}

/// The reason why a request is not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    #[error("this second's requests are used up")]
    Rate,
    #[error("today's dollars are used up")]
    Spent,
    #[error("the server failed a moment ago")]
    Broken,
}

/// The requests that may be made now. Times are since the start of 1970: days are counted in UTC.
#[derive(Debug)]
pub struct Budget {
    limits: Limits,
    tokens: f64,
    at: Duration,
    day: u64,
    spent_usd: f64,
}

impl Budget {
    pub fn new(limits: Limits, now: Duration) -> Self {
        Self { limits, tokens: limits.requests_per_s.into(), at: now, day: day(now), spent_usd: 0.0 }
    }

    /// Takes one request out of the budget.
    pub fn take(&mut self, request: Request, now: Duration) -> Result<(), Refused> {
        let (rate, passed) = (f64::from(self.limits.requests_per_s), now.saturating_sub(self.at));
        self.tokens = (self.tokens + passed.as_secs_f64() * rate).min(rate);
        self.at = self.at.max(now);
        if day(now) > self.day {
            (self.day, self.spent_usd) = (day(now), 0.0);
        }
        let kept = if request == Request::Read { 0.0 } else { (rate / 2.0).floor() };
        if self.tokens < 1.0 + kept {
            return Err(Refused::Rate);
        }
        let usd = self.price(request);
        if self.limits.usd_per_day.is_some_and(|most| self.spent_usd + usd > most) {
            return Err(Refused::Spent);
        }
        self.tokens -= 1.0;
        self.spent_usd += usd;
        Ok(())
    }

    /// Dollars spent since the day began, or since the process started.
    pub fn spent_usd(&self) -> f64 {
        self.spent_usd
    }

    fn price(&self, request: Request) -> f64 {
        let per_1000 = match request {
            Request::Read | Request::ReadIndex => self.limits.usd_per_1000_reads,
            Request::WriteOrList => self.limits.usd_per_1000_writes,
            Request::Delete => 0.0,
        };
        per_1000 / 1000.0
    }
}

fn day(now: Duration) -> u64 {
    now.as_secs() / (24 * 3600)
}

/// A circuit breaker: stops requests to a server that fails, for longer each time.
#[derive(Debug, Default)]
pub struct Breaker {
    /// Failures since the last success.
    failures: u32,
    closed_at: Duration,
}

/// The number of failures in a row after which requests stop.
const FAILURES: u32 = 3;
/// The first pause in requests.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause in requests.
const PAUSE_MAX: Duration = Duration::from_secs(60);

impl Breaker {
    pub fn is_open(&self, now: Duration) -> bool {
        now < self.closed_at
    }

    /// Records that a request succeeded.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Records that a request failed, or was not answered in time. Returns `true` if requests stop from now on.
    pub fn failed(&mut self, now: Duration) -> bool {
        let was_open = self.is_open(now);
        self.failures = self.failures.saturating_add(1);
        let Some(times) = self.failures.checked_sub(FAILURES).filter(|_| !was_open) else { return false };
        self.closed_at = now + PAUSE_MIN.saturating_mul(1 << times.min(16)).min(PAUSE_MAX);
        true
    }
}

/// The measured speed of reads: a moving average.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReadSpeed {
    /// The time from the request to the first byte.
    pub latency_ms: f64,
    pub bytes_per_ms: f64,
    /// The number of reads that were measured.
    measured: u32,
}

/// The weight of a new measurement, after the first few.
const WEIGHT: f64 = 0.2;

impl Default for ReadSpeed {
    /// The typical speed of a store in the same region, until it has been measured.
    fn default() -> Self {
        Self { latency_ms: 50.0, bytes_per_ms: 1e5, measured: 0 }
    }
}

impl ReadSpeed {
    /// Records that a read of `bytes` took `first` to its first byte and `all` to its last.
    pub fn observe(&mut self, bytes: u64, first: Duration, all: Duration) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        self.measured = self.measured.saturating_add(1);
        let weight = WEIGHT.max(1.0 / f64::from(self.measured));
        self.latency_ms += weight * (ms(first) - self.latency_ms);
        // Shorter times are below the precision of the clock.
        let body_ms = ms(all.saturating_sub(first)).max(0.01);
        if bytes > 0 {
            self.bytes_per_ms += weight * (bytes as f64 / body_ms - self.bytes_per_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { requests_per_s: 10, usd_per_1000_writes: 5.0, usd_per_1000_reads: 0.5, usd_per_day: Some(0.05) };

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_second_has_so_many_requests_and_half_are_kept_for_readers() {
        let mut budget = Budget::new(Limits { usd_per_day: None, ..LIMITS }, at(0));
        let mut granted = |request, now| (0..100).take_while(|_| budget.take(request, now).is_ok()).count();
        assert_eq!(granted(Request::WriteOrList, at(0)), 5);
        assert_eq!(granted(Request::Read, at(0)), 5);
        assert_eq!(granted(Request::Read, at(500)), 5);
        assert_eq!(granted(Request::Read, at(400)), 0, "a clock that goes back gives nothing");
        assert_eq!(granted(Request::Read, at(60_000)), 10);
    }

    #[test]
    fn a_day_has_so_many_dollars() {
        let mut budget = Budget::new(LIMITS, at(0));
        let mut asked = 0;
        let refused = loop {
            asked += 1;
            if let Err(refused) = budget.take(Request::WriteOrList, at(asked * 1000)) {
                break refused;
            }
        };
        assert_eq!((refused, asked), (Refused::Spent, 11));
        assert_eq!(budget.take(Request::Delete, at(20_000)), Ok(()));
        assert_eq!(budget.take(Request::WriteOrList, at(24 * 3600 * 1000)), Ok(()));
    }

    proptest! {
        #[test]
        fn no_bound_is_passed_whatever_is_asked_when(asked in prop::collection::vec((0u64..400, 0u8..4), 1..300)) {
            let (mut budget, mut now, mut granted, mut usd) = (Budget::new(LIMITS, at(0)), 0, Vec::new(), 0.0);
            for (pause, request) in asked {
                now += pause;
                let request = [Request::Read, Request::ReadIndex, Request::WriteOrList, Request::Delete][usize::from(request)];
                if budget.take(request, at(now)).is_ok() {
                    granted.push(now);
                    usd += budget.price(request);
                }
            }
            prop_assert!(usd <= 0.05 + 1e-9);
            for (n, start) in granted.iter().enumerate() {
                let within = granted[n..].iter().take_while(|&&time| time < start + 1000).count();
                prop_assert!(within <= 20, "a second's burst and a second's rate");
            }
        }
    }

    #[test]
    fn a_server_that_fails_is_left_alone_for_longer_each_time() {
        let mut breaker = Breaker::default();
        assert!(!breaker.failed(at(0)) && !breaker.failed(at(0)) && !breaker.is_open(at(0)));
        assert!(breaker.failed(at(0)) && breaker.is_open(at(999)) && !breaker.is_open(at(1000)));
        assert!(breaker.failed(at(1000)) && breaker.is_open(at(2999)) && !breaker.is_open(at(3000)));
        for n in 1..50 {
            breaker.failed(at(n * 1_000_000));
        }
        assert!(!breaker.is_open(at(49 * 1_000_000 + 60_000)));
        breaker.succeeded();
        assert!(!breaker.failed(at(60_000_000)));
    }

    #[test]
    fn speed_follows_what_is_measured() {
        let mut speed = ReadSpeed::default();
        for _ in 0..60 {
            speed.observe(2_000_000, at(10), at(30));
        }
        assert!((speed.latency_ms - 10.0).abs() < 0.1 && (speed.bytes_per_ms - 1e5).abs() < 100.0, "{speed:?}");
        speed.observe(1, at(10), at(10));
        assert!(speed.bytes_per_ms.is_finite());
    }
}
