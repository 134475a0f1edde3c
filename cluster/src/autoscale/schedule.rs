//! Least numbers of workers for hours of the week that are known to be busy. Times are in UTC.

use std::time::Duration;

/// A least number of workers in the same hours of some days.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The days on which it begins, from Monday to Sunday.
    pub days: [bool; 7],
    /// Minutes after midnight. An end that is no later than the beginning is on the next day.
    pub from: u32,
    pub to: u32,
    pub prefill: u32,
    pub decode: u32,
}

pub const DAY_MINUTES: u32 = 24 * 60;

impl Schedule {
    /// Whether it holds at a time, which is given since 1970.
    pub fn holds(&self, unix: Duration) -> bool {
        let minutes = unix.as_secs() / 60;
        let (day, minute) = (minutes / u64::from(DAY_MINUTES), (minutes % u64::from(DAY_MINUTES)) as u32);
        // 1 January 1970 was a Thursday.
        let begins = |day: u64| self.days[((day + 3) % 7) as usize];
        if self.from < self.to {
            begins(day) && (self.from..self.to).contains(&minute)
        } else {
            (begins(day) && minute >= self.from) || (day > 0 && begins(day - 1) && minute < self.to)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time on 1 June 2026, a Monday, or days after it.
    fn at(days: u64, hour: u64, minute: u64) -> Duration {
        Duration::from_secs(1_780_272_000 + days * 86_400 + hour * 3600 + minute * 60)
    }

    #[test]
    fn working_hours_are_not_nights_nor_weekends() {
        let days = [true, true, true, true, true, false, false];
        let schedule = Schedule { days, from: 8 * 60, to: 20 * 60 + 30, prefill: 1, decode: 2 };
        for (time, holds) in [
            (at(0, 7, 59), false),
            (at(0, 8, 0), true),
            (at(4, 20, 29), true),
            (at(4, 20, 30), false),
            (at(5, 12, 0), false),
            (at(6, 12, 0), false),
            (at(7, 12, 0), true),
        ] {
            assert_eq!(schedule.holds(time), holds, "{time:?}");
        }
    }

    #[test]
    fn a_night_belongs_to_the_day_on_which_it_begins() {
        let days = [false, false, false, false, true, false, false];
        let schedule = Schedule { days, from: 22 * 60, to: 2 * 60, prefill: 1, decode: 2 };
        assert!(schedule.holds(at(4, 23, 0)) && schedule.holds(at(5, 1, 59)));
        assert!(!schedule.holds(at(4, 1, 0)) && !schedule.holds(at(5, 2, 0)) && !schedule.holds(at(5, 23, 0)));
        let whole = Schedule { days: [true; 7], from: 0, to: 0, ..schedule };
        assert!((0..7).all(|day| whole.holds(at(day, 0, 0)) && whole.holds(at(day, 23, 59))));
    }
}
