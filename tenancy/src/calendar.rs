//! The calendar's days and months, in UTC, by which budgets are counted.

use serde::{Deserialize, Serialize};
use std::time::Duration;
use time::{Date, Month, OffsetDateTime};

/// A length of time that begins anew at midnight, or on the first of a month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Period {
    Day,
    Month,
}

const DAY_S: u64 = 24 * 3600;
const EPOCH_YEAR: u64 = 1970;

impl Period {
    pub const ALL: [Self; 2] = [Self::Day, Self::Month];

    pub fn name(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
        }
    }

    /// The number of the period with the time `at`, since the Unix epoch: of the day, or of the month, the first of which is 0.
    pub fn number(self, at: Duration) -> u64 {
        let days = at.as_secs() / DAY_S;
        match self {
            Self::Day => days,
            Self::Month => {
                let date = i64::try_from(at.as_secs()).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
                // Beyond the year 9999 all months are one.
                let (year, month) = date.map_or((10_000, 1), |date| (date.year().unsigned_abs().into(), u64::from(u8::from(date.month()))));
                (year - EPOCH_YEAR) * 12 + month - 1
            }
        }
    }

    /// The time at which the period of this number ends, and the next one begins, since the Unix epoch.
    pub fn end(self, number: u64) -> Duration {
        match self {
            Self::Day => Duration::from_secs((number + 1).saturating_mul(DAY_S)),
            Self::Month => {
                let (year, month) = (EPOCH_YEAR + (number + 1) / 12, (number + 1) % 12 + 1);
                let month = u8::try_from(month).ok().and_then(|month| Month::try_from(month).ok());
                let first = month.zip(i32::try_from(year).ok()).and_then(|(month, year)| Date::from_calendar_date(year, month, 1).ok());
                let seconds = first.map_or(i64::MAX, |first| first.midnight().assume_utc().unix_timestamp());
                Duration::from_secs(seconds.unsigned_abs())
            }
        }
    }

    /// The time that is left of the period with the time `now`.
    pub fn left(self, now: Duration) -> Duration {
        self.end(self.number(now)).saturating_sub(now)
    }
}

/// A time as people and programs write it: `2026-12-01T00:00:00Z`; empty beyond the year 9999.
pub fn written(at: Duration) -> String {
    let at = i64::try_from(at.as_secs()).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    at.map_or(String::new(), |at| {
        let (date, time) = (at.date(), at.time());
        format!("{date}T{:02}:{:02}:{:02}Z", time.hour(), time.minute(), time.second())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_begin_at_midnight_and_on_the_first() {
        for (seconds, day, month, ends) in [
            (0, 0, 0, "1970-02-01T00:00:00Z"),
            (86_399, 0, 0, "1970-02-01T00:00:00Z"),
            (951_782_400, 11_016, 361, "2000-03-01T00:00:00Z"),
            (1_735_689_599, 20_088, 659, "2025-01-01T00:00:00Z"),
            (1_735_689_600, 20_089, 660, "2025-02-01T00:00:00Z"),
        ] {
            let at = Duration::from_secs(seconds);
            assert_eq!((Period::Day.number(at), Period::Month.number(at)), (day, month), "{seconds}");
            assert_eq!(written(Period::Month.end(month)), ends);
            for period in Period::ALL {
                let end = period.end(period.number(at));
                assert!(at < end && period.number(end) == period.number(at) + 1, "{seconds} {period:?}");
                assert_eq!(period.left(at), end - at);
            }
        }
        let far = Duration::from_secs(u64::MAX);
        assert!(Period::Month.end(Period::Month.number(far)) > Duration::from_secs(1 << 40), "and there is no panic");
    }
}
