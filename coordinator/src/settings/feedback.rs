//! The settings of users' feedback on answers.

use super::bounds::{bytes, within};
use serde::{Deserialize, Serialize};
use std::{path::Path, str::FromStr, sync::Arc, time::Duration};
use tidemill_gateway::features::feedback::FeedbackSettings;
use tidemill_net::config::ConfigError;
use tidemill_safety::pii::find::Finder;

/// `on` or `off` as a flag, or a section `[feedback]`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FeedbackFlags {
    /// Whether feedback is taken, and answers are remembered for it [default: true]
    pub enabled: Option<bool>,
    /// Seconds for which an answer is remembered after it began [default: 3600]
    pub keep_s: Option<u64>,
    /// Size of all remembered questions and answers: over this, the oldest go [default: 64MiB]
    pub bytes_max: Option<String>,
}

impl FromStr for FeedbackFlags {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "on" | "true" => Ok(Self::default()),
            "off" | "false" => Ok(Self { enabled: Some(false), ..Self::default() }),
            _ => Err("must be on or off"),
        }
    }
}

/// The longest time to keep an answer: a week.
const KEEP_S_MAX: u64 = 7 * 24 * 3600;

impl FeedbackFlags {
    /// Returns `None` if it is switched off.
    pub(super) fn check(self, data: Option<&Path>, finder: &Arc<Finder>) -> Result<Option<FeedbackSettings>, ConfigError> {
        if self.enabled == Some(false) {
            return Ok(None);
        }
        Ok(Some(FeedbackSettings {
            file: data.map(|data| data.join("feedback.sqlite")),
            keep: Duration::from_secs(within("feedback.keep_s", self.keep_s.unwrap_or(3600), 1..=KEEP_S_MAX)?),
            bytes_max: bytes("feedback.bytes_max", self.bytes_max, "64MiB", "0")?,
            finder: Arc::clone(finder),
        }))
    }
}
