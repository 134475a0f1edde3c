//! Settings of the number of workers that each model may want.

use serde::{Deserialize, Serialize};
use std::{str::FromStr, time::Duration};
use tidemill_cluster::autoscale::{AutoscaleSettings, steps::Range};
use tidemill_net::config::{ConfigError, invalid};

/// Numbers of workers: `prefill=1..4,decode=1..4` as a flag, or a section `[autoscale]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoscaleFlags {
    /// Fewest and most prefill workers of each model, such as 1..4; 0..0 for none
    pub prefill: String,
    /// Fewest and most decode workers of each model, such as 1..4; at least 1
    pub decode: String,
    /// Workers of each role beyond those that are needed, for what comes suddenly [default: 0]
    pub warm: Option<u32>,
    /// Seconds over which the load is averaged; it is looked at six times in them [default: 30]
    pub window_s: Option<u64>,
    /// Seconds from a worker's start until it serves, which is how far ahead the load is predicted [default: 60]
    pub start_s: Option<u64>,
    /// Seconds for which fewer workers must have been enough before one is given up; then at most a quarter of them [default: 300]
    pub cooldown_s: Option<u64>,
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
    pub fn check(self) -> Result<AutoscaleSettings, ConfigError> {
        let within = |key: &'static str, value: u64, least: u64, most: u64| match value {
            value if (least..=most).contains(&value) => Ok(Duration::from_secs(value)),
            value => Err(invalid(key, value, format!("must be from {least} to {most}"))),
        };
        Ok(AutoscaleSettings {
            prefill: range("autoscale.prefill", &self.prefill, 0)?,
            decode: range("autoscale.decode", &self.decode, 1)?,
            warm: match self.warm.unwrap_or(0) {
                warm @ 0..=WORKERS_MAX => warm,
                warm => return Err(invalid("autoscale.warm", warm, format!("must be from 0 to {WORKERS_MAX}"))),
            },
            window: within("autoscale.window_s", self.window_s.unwrap_or(30), WINDOW_S_MIN, WINDOW_S_MAX)?,
            start: within("autoscale.start_s", self.start_s.unwrap_or(60), 0, START_S_MAX)?,
            cooldown: within("autoscale.cooldown_s", self.cooldown_s.unwrap_or(300), 1, COOLDOWN_S_MAX)?,
        })
    }
}

fn range(key: &'static str, text: &str, least: u32) -> Result<Range, ConfigError> {
    let bounds =
        text.split_once("..").and_then(|(floor, ceiling)| Some((floor.trim().parse::<u32>().ok()?, ceiling.trim().parse::<u32>().ok()?)));
    let (floor, ceiling) = bounds.ok_or_else(|| invalid(key, text, "must be the fewest and the most workers, such as 1..4"))?;
    if floor < least || ceiling < floor || ceiling > WORKERS_MAX {
        return Err(invalid(key, text, format!("must be two numbers from {least} to {WORKERS_MAX}, the larger one last")));
    }
    Ok(Range { floor, ceiling })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_says_what_a_section_says_and_an_error_names_its_key() {
        let flags: AutoscaleFlags = "prefill=0..4, decode=2..8,warm=1,cooldown_s=60".parse().unwrap();
        let section = toml::from_str("prefill = '0..4'\ndecode = '2..8'\nwarm = 1\ncooldown_s = 60").unwrap();
        assert_eq!(flags, section);
        let settings = flags.check().unwrap();
        assert_eq!((settings.prefill, settings.decode), (Range { floor: 0, ceiling: 4 }, Range { floor: 2, ceiling: 8 }));
        assert_eq!((settings.warm, settings.window, settings.cooldown), (1, Duration::from_secs(30), Duration::from_secs(60)));
        for (text, words) in [
            ("4", "prefill=1..4"),
            ("prefil=1..4", "`prefil` is none of"),
            ("prefill=1..4", "autoscale.decode"),
            ("prefill=1..4,decode=0..4", "autoscale.decode"),
            ("prefill=4..1,decode=1..4", "autoscale.prefill"),
            ("prefill=1,decode=1..4", "such as 1..4"),
            ("prefill=1..9999,decode=1..4", "4096"),
            ("prefill=1..4,decode=1..4,cooldown_s=0", "autoscale.cooldown_s"),
            ("prefill=1..4,decode=1..4,window_s=2", "autoscale.window_s"),
            ("prefill=1..4,decode=1..4,start_s=x", "start_s=x"),
        ] {
            let error = text.parse::<AutoscaleFlags>().and_then(|flags| flags.check().map_err(|error| error.to_string())).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
