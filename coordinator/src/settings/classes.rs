//! Service classes in the file.

use serde::{Deserialize, Serialize};
use tidemill_cluster::class::{Class, OnMiss};
use tidemill_net::config::{ConfigError, invalid};

/// One service class.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassFlags {
    /// Name in metrics and `/cluster`: letters, digits, `-`, `_`, `.`
    pub name: String,
    /// Value of a request's `service_tier` that chooses the class; one class must have `default` [default: the name]
    pub service_tier: Option<String>,
    /// Limit of the time to the first token, in milliseconds [default: no limit]
    pub ttft_ms: Option<f64>,
    /// Limit of the mean time of each further token, in milliseconds [default: no limit]
    pub tpot_ms: Option<f64>,
    /// Priority from 0 to 255. A higher one goes first everywhere, and takes places and device blocks of lower ones that run: these go on
    /// later [default: 1]
    pub priority: Option<u8>,
    /// Worth of one request that keeps its limits [default: 1]
    pub weight: Option<f32>,
    /// Answer to a request whose limits are predicted to be missed: `reject` (429 with Retry-After), `queue` (wait until it harms no other
    /// request, at most `queue_wait_s`) or `late` (serve as soon as there is room) [default: late]
    pub on_miss: Option<String>,
}

impl ClassFlags {
    pub(super) fn check(self) -> Result<Class, ConfigError> {
        let on_miss = match self.on_miss.as_deref() {
            Some("reject") => OnMiss::Reject,
            Some("queue") => OnMiss::Queue,
            Some("late") | None => OnMiss::Late,
            Some(other) => return Err(invalid("class.on_miss", other, "must be reject, queue or late")),
        };
        Ok(Class {
            service_tier: self.service_tier.unwrap_or_else(|| self.name.clone()),
            name: self.name,
            ttft_ms: self.ttft_ms,
            tpot_ms: self.tpot_ms,
            priority: self.priority.unwrap_or(1),
            weight: self.weight.unwrap_or(1.0),
            on_miss,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Flags, tests::flags};

    #[test]
    fn classes_come_from_the_file() {
        let file = "
            [[class]]
            name = 'chat'
            service_tier = 'default'
            ttft_ms = 500
            tpot_ms = 50
            on_miss = 'reject'
            [[class]]
            name = 'night'
            priority = 0
            ";
        let given = |file: &str| Flags { class: toml::from_str::<Flags>(file).unwrap().class, ..flags() };
        let classes = given(file).check().unwrap().cluster.classes;
        let class = |tier| classes.by_tier(tier).map(|id| classes.get(id));
        assert_eq!(class(None).map(|class| (class.ttft_ms, class.on_miss)), Some((Some(500.0), OnMiss::Reject)));
        assert_eq!(class(Some("night")).map(|class| (class.ttft_ms, class.priority)), Some((None, 0)));
        assert_eq!(class(Some("priority")), None);
        for (from, to, words) in [("'reject'", "'never'", "never"), ("'default'", "'gold'", "default"), ("500", "-1.0", "ttft_ms")] {
            let error = given(&file.replace(from, to)).check().unwrap_err().to_string();
            assert!(error.contains("class") && error.contains(words), "{error}");
        }
        assert!(toml::from_str::<Flags>(&file.replace("tpot_ms", "tpot")).is_err());
    }
}
