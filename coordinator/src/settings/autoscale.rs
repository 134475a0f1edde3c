//! Settings of the number of workers that each model may want.

use serde::{Deserialize, Serialize};
use std::{
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tidemill_cluster::autoscale::{
    AutoscaleSettings,
    schedule::{DAY_MINUTES, Schedule},
    steps::Range,
};
use tidemill_net::config::{ConfigError, invalid};

/// Numbers of workers: `prefill=1..4,decode=1..4` as a flag, or a section `[autoscale]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoscaleFlags {
    /// Fewest and most prefill workers of each model, such as 1..4; 0..0 for none
    pub prefill: String,
    /// Fewest and most decode workers of each model, such as 1..4; with 0..4 the last one goes, too, and the next request waits for one
    pub decode: String,
    /// Workers of each role beyond those that are needed, for what comes suddenly [default: 0]
    pub warm: Option<u32>,
    /// Seconds over which the load is averaged; it is looked at six times in them [default: 30]
    pub window_s: Option<u64>,
    /// Seconds from a worker's start until it serves, which is how far ahead the load is predicted [default: 60]
    pub start_s: Option<u64>,
    /// Seconds for which fewer workers must have been enough before one is given up; then at most a quarter of them [default: 300]
    pub cooldown_s: Option<u64>,
    /// Fewest workers in hours of the week, in UTC, such as { days = "mon-fri", hours = "08:00-20:00", prefill = 2, decode = 4 } [default:
    /// none]
    #[serde(default)]
    pub schedules: Vec<ScheduleFlags>,
}

/// Fewest workers in some hours of some days.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleFlags {
    /// Days on which the hours begin, such as mon-fri or sat [default: all]
    pub days: Option<String>,
    /// Hours such as 08:00-20:00, or 22:00-06:00 to the next day
    pub hours: String,
    /// Fewest prefill workers [default: 0]
    #[serde(default)]
    pub prefill: u32,
    /// Fewest decode workers [default: 0]
    #[serde(default)]
    pub decode: u32,
}

/// As many members as a cluster has.
const WORKERS_MAX: u32 = 4096;
const START_S_MAX: u64 = 3600;
const COOLDOWN_S_MAX: u64 = 24 * 3600;
/// Workers report every second, and half of that is soon enough to look.
const WINDOW_S_MIN: u64 = 3;
const WINDOW_S_MAX: u64 = 3600;

impl FromStr for AutoscaleFlags {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut flags = Self::default();
        for part in text.split(',') {
            let (key, value) = part.trim().split_once('=').ok_or_else(|| format!("`{part}`: write prefill=1..4,decode=1..4"))?;
            let number = || value.parse::<u64>().map_err(|error| format!("`{key}={value}`: {error}"));
            match key {
                "prefill" => value.clone_into(&mut flags.prefill),
                "decode" => value.clone_into(&mut flags.decode),
                "warm" => flags.warm = Some(number()?.try_into().map_err(|_| format!("`{key}={value}`: too many"))?),
                "window_s" => flags.window_s = Some(number()?),
                "start_s" => flags.start_s = Some(number()?),
                "cooldown_s" => flags.cooldown_s = Some(number()?),
                _ => return Err(format!("`{key}` is none of prefill, decode, warm, window_s, start_s and cooldown_s")),
            }
        }
        Ok(flags)
    }
}

impl AutoscaleFlags {
    /// `queue_wait_max` is how long a request waits for a worker.
    pub fn check(self, queue_wait_max: Duration) -> Result<AutoscaleSettings, ConfigError> {
        let within = |key: &'static str, value: u64, least: u64, most: u64| match value {
            value if (least..=most).contains(&value) => Ok(Duration::from_secs(value)),
            value => Err(invalid(key, value, format!("must be from {least} to {most}"))),
        };
        let decode = range("autoscale.decode", &self.decode, 1)?;
        let start = within("autoscale.start_s", self.start_s.unwrap_or(60), 0, START_S_MAX)?;
        if decode.floor == 0 && queue_wait_max <= start {
            let reason = format!(
                "requests would give up before a worker serves: `queue_wait_s` ({}) must be more than `autoscale.start_s` ({})",
                queue_wait_max.as_secs(),
                start.as_secs()
            );
            return Err(invalid("autoscale.decode", &self.decode, reason));
        }
        Ok(AutoscaleSettings {
            prefill: range("autoscale.prefill", &self.prefill, 0)?,
            decode,
            warm: match self.warm.unwrap_or(0) {
                warm @ 0..=WORKERS_MAX => warm,
                warm => return Err(invalid("autoscale.warm", warm, format!("must be from 0 to {WORKERS_MAX}"))),
            },
            window: within("autoscale.window_s", self.window_s.unwrap_or(30), WINDOW_S_MIN, WINDOW_S_MAX)?,
            start,
            cooldown: within("autoscale.cooldown_s", self.cooldown_s.unwrap_or(300), 1, COOLDOWN_S_MAX)?,
            schedules: self.schedules.into_iter().map(ScheduleFlags::check).collect::<Result<_, _>>()?,
            // The cluster's clock starts within moments.
            clock_zero: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        })
    }
}

impl ScheduleFlags {
    fn check(self) -> Result<Schedule, ConfigError> {
        let days = self.days.as_deref().map_or(Some([true; 7]), days);
        let days = days
            .ok_or_else(|| invalid("autoscale.schedules.days", self.days.unwrap_or_default(), "must be a day or two, such as mon-fri"))?;
        let hours = self.hours.split_once('-').and_then(|(from, to)| Some((minutes(from)?, minutes(to)?)));
        let (from, to) =
            hours.ok_or_else(|| invalid("autoscale.schedules.hours", &self.hours, "must be two times of day, such as 08:00-20:00"))?;
        for (key, workers) in [("autoscale.schedules.prefill", self.prefill), ("autoscale.schedules.decode", self.decode)] {
            if workers > WORKERS_MAX {
                return Err(invalid(key, workers, format!("must be from 0 to {WORKERS_MAX}")));
            }
        }
        Ok(Schedule { days, from, to: to % DAY_MINUTES, prefill: self.prefill, decode: self.decode })
    }
}

const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

/// The days from one to another; from Saturday to Monday are three.
fn days(text: &str) -> Option<[bool; 7]> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let day = |name: &str| DAYS.iter().position(|day| *day == name.trim());
    let (mut day_now, last) = (day(first)?, day(last)?);
    let mut days = [false; 7];
    days[day_now] = true;
    while day_now != last {
        day_now = (day_now + 1) % 7;
        days[day_now] = true;
    }
    Some(days)
}

/// The minutes after midnight of `08:30`; `24:00` is the end of a day.
fn minutes(text: &str) -> Option<u32> {
    let (hour, minute) = text.trim().split_once(':')?;
    let (hour, minute) = (hour.parse::<u32>().ok()?, minute.parse::<u32>().ok()?);
    (minute < 60 && hour * 60 + minute <= DAY_MINUTES).then_some(hour * 60 + minute)
}

/// `most_min` is the least that the larger number may be.
fn range(key: &'static str, text: &str, most_min: u32) -> Result<Range, ConfigError> {
    let bounds =
        text.split_once("..").and_then(|(floor, ceiling)| Some((floor.trim().parse::<u32>().ok()?, ceiling.trim().parse::<u32>().ok()?)));
    let (floor, ceiling) = bounds.ok_or_else(|| invalid(key, text, "must be the fewest and the most workers, such as 1..4"))?;
    if ceiling < floor.max(most_min) || ceiling > WORKERS_MAX {
        return Err(invalid(key, text, format!("must be two numbers up to {WORKERS_MAX}, the larger one last and at least {most_min}")));
    }
    Ok(Range { floor, ceiling })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(60);

    #[test]
    fn schedules_have_days_and_hours() {
        let check = |text: &str| {
            let flags: AutoscaleFlags = toml::from_str(&format!("prefill = '0..4'\ndecode = '1..8'\nschedules = [{text}]")).unwrap();
            flags.check(WAIT).map(|settings| settings.schedules).map_err(|error| error.to_string())
        };
        let weekdays = [true, true, true, true, true, false, false];
        let expected = Schedule { days: weekdays, from: 480, to: 1230, prefill: 0, decode: 4 };
        assert_eq!(check("{ days = 'mon-fri', hours = '08:00-20:30', decode = 4 }").unwrap(), [expected]);
        let all = check("{ hours = '22:00-24:00', prefill = 1 }, { days = 'sat-mon', hours = '00:00-24:00', prefill = 1 }").unwrap();
        assert_eq!((all[0].days, all[0].from, all[0].to), ([true; 7], 1320, 0));
        assert_eq!((all[1].days, all[1].from, all[1].to), ([true, false, false, false, false, true, true], 0, 0));
        for (text, words) in [
            ("{ hours = '8-20' }", "08:00-20:00"),
            ("{ hours = '08:60-20:00' }", "08:00-20:00"),
            ("{ hours = '08:00-25:00' }", "08:00-20:00"),
            ("{ days = 'weekend', hours = '08:00-20:00' }", "mon-fri"),
            ("{ hours = '08:00-20:00', decode = 5000 }", "4096"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(words) && error.contains("autoscale.schedules"), "{text}: {error}");
        }
    }

    #[test]
    fn a_flag_says_what_a_section_says_and_an_error_names_its_key() {
        let flags: AutoscaleFlags = "prefill=0..4, decode=2..8,warm=1,cooldown_s=60".parse().unwrap();
        let section = toml::from_str("prefill = '0..4'\ndecode = '2..8'\nwarm = 1\ncooldown_s = 60").unwrap();
        assert_eq!(flags, section);
        let settings = flags.check(WAIT).unwrap();
        assert_eq!((settings.prefill, settings.decode), (Range { floor: 0, ceiling: 4 }, Range { floor: 2, ceiling: 8 }));
        assert_eq!((settings.warm, settings.window, settings.cooldown), (1, Duration::from_secs(30), Duration::from_secs(60)));
        for (text, words) in [
            ("4", "prefill=1..4"),
            ("prefil=1..4", "`prefil` is none of"),
            ("prefill=1..4", "autoscale.decode"),
            ("prefill=1..4,decode=0..0", "autoscale.decode"),
            ("prefill=1..4,decode=0..4,start_s=60", "queue_wait_s"),
            ("prefill=4..1,decode=1..4", "autoscale.prefill"),
            ("prefill=1,decode=1..4", "such as 1..4"),
            ("prefill=1..9999,decode=1..4", "4096"),
            ("prefill=1..4,decode=1..4,cooldown_s=0", "autoscale.cooldown_s"),
            ("prefill=1..4,decode=1..4,window_s=2", "autoscale.window_s"),
            ("prefill=1..4,decode=1..4,start_s=x", "start_s=x"),
        ] {
            let error = text.parse::<AutoscaleFlags>().and_then(|flags| flags.check(WAIT).map_err(|error| error.to_string())).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
