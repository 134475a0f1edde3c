//! A circuit breaker: whether a server is asked, or rather left alone. A pure machine: time is an argument.
//!
//! One failure opens it, so that each server that stops answering is waited for once. It closes when a try, of which no request waits,
//! succeeds. Rests between tries grow; they begin anew only after the breaker has been closed for a while, so that a server that is just
//! too slow is not asked all the time.

use std::time::Duration;

const REST_FIRST: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);
/// The time without failure after which earlier ones are forgotten.
const STEADY_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub struct Breaker {
    is_closed: bool,
    failures: u32,
    changed: Duration,
    next_try: Duration,
}

impl Breaker {
    /// Whether the server may be asked. A new breaker is open: its first try is due at once.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Notes a failure. Returns whether it opened the breaker: of requests that fail at the same time, only the first does.
    pub fn failed(&mut self, now: Duration) -> bool {
        if !self.is_closed {
            return false;
        }
        if now.saturating_sub(self.changed) >= STEADY_AFTER {
            self.failures = 0;
        }
        self.is_closed = false;
        self.rest(now);
        true
    }

    /// Time until the next try; `None` while it is closed.
    pub fn until_try(&self, now: Duration) -> Option<Duration> {
        (!self.is_closed).then(|| self.next_try.saturating_sub(now))
    }

    /// Notes the end of a try. Success closes the breaker.
    pub fn tried(&mut self, now: Duration, succeeded: bool) {
        self.is_closed = succeeded;
        if succeeded {
            self.changed = now;
        } else {
            self.rest(now);
        }
    }

    fn rest(&mut self, now: Duration) {
        self.next_try = now + REST_FIRST.saturating_mul(1 << self.failures.min(16)).min(REST_MAX);
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn one_failure_opens_it_and_one_try_closes_it() {
        let mut breaker = Breaker::default();
        assert_eq!((breaker.is_closed(), breaker.until_try(ms(0))), (false, Some(ms(0))));
        breaker.tried(ms(0), true);
        assert_eq!((breaker.is_closed(), breaker.until_try(ms(0))), (true, None));
        assert!(breaker.failed(ms(50)) && !breaker.failed(ms(51)), "the first of several opens it");
        assert_eq!((breaker.is_closed(), breaker.until_try(ms(100))), (false, Some(ms(50))));
        breaker.tried(ms(150), true);
        assert!(breaker.is_closed());
    }

    #[test]
    fn rests_grow_and_begin_anew_after_a_steady_while() {
        let mut breaker = Breaker::default();
        let rest = |breaker: &mut Breaker, at| {
            breaker.tried(ms(at), false);
            breaker.until_try(ms(at)).unwrap().as_millis()
        };
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(|at| rest(&mut breaker, at)), [100, 200, 400, 800, 1600, 2000, 2000]);
        // A server that answers tries, and is too slow for requests.
        breaker.tried(ms(10), true);
        assert!(breaker.failed(ms(20)));
        assert_eq!(breaker.until_try(ms(20)), Some(ms(2000)));
        breaker.tried(ms(3000), true);
        assert!(breaker.failed(ms(13_000)));
        assert_eq!(breaker.until_try(ms(13_000)), Some(ms(100)));
    }
}
