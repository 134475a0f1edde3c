//! The delay before the next attempt after a failure.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// The delay after `failures` consecutive failures: doubled each time, up to a minute.
pub fn rest(failures: u32) -> Duration {
    FIRST.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_to_a_minute() {
        let seconds = |failures| rest(failures).as_secs();
        assert_eq!([1, 2, 3, 6, 7, u32::MAX].map(seconds), [1, 2, 4, 32, 60, 60]);
    }
}
