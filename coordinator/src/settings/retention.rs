//! The ages at which what is stored is deleted, by its kind.

use super::bounds::within;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tidemill_gateway::serving::gateway::settings::Ages;
use tidemill_net::config::ConfigError;

/// The longest age: a hundred years.
pub(super) const DAYS_MAX: u64 = 36_500;

/// The ages at which what is stored is deleted, by its kind. 0 keeps it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetentionFlags {
    /// Days since its last addition after which a response is deleted [default: `store_days`]
    pub responses_days: Option<u64>,
    /// Days since its last addition after which a conversation is deleted [default: `store_days`]
    pub conversations_days: Option<u64>,
    /// Days after which a remembered fact is deleted, however often it is used [default: 0]
    pub memories_days: Option<u64>,
    /// Days after which a file is deleted that no running batch reads [default: `batch_days`]
    pub files_days: Option<u64>,
    /// Days since its end after which a batch is deleted [default: `batch_days`]
    pub batches_days: Option<u64>,
    /// Days since its last change after which a user's opinion is deleted, with its question and answer [default: 0]
    pub feedback_days: Option<u64>,
}

/// All ages; `None` keeps what there is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Retention {
    pub(super) ages: Ages,
    pub(super) files: Option<Duration>,
    pub(super) batches: Option<Duration>,
}

impl RetentionFlags {
    /// `store_days` and `batch_days` are the ages of kinds that have none of their own.
    pub(super) fn check(self, store_days: u64, batch_days: u64) -> Result<Retention, ConfigError> {
        let age = |key, days: Option<u64>, default| {
            let days = within(key, days.unwrap_or(default), 0..=DAYS_MAX)?;
            Ok((days > 0).then(|| Duration::from_secs(days * 24 * 3600)))
        };
        Ok(Retention {
            ages: Ages {
                responses: age("retention.responses_days", self.responses_days, store_days)?,
                conversations: age("retention.conversations_days", self.conversations_days, store_days)?,
                memories: age("retention.memories_days", self.memories_days, 0)?,
                opinions: age("retention.feedback_days", self.feedback_days, 0)?,
            },
            files: age("retention.files_days", self.files_days, batch_days)?,
            batches: age("retention.batches_days", self.batches_days, batch_days)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_age_and_zero_keeps() {
        let check = |file: &str| {
            let flags: RetentionFlags = toml::from_str(file).map_err(|error| error.to_string())?;
            flags.check(30, 20).map_err(|error| error.to_string())
        };
        let days = |days: u64| Some(Duration::from_secs(days * 24 * 3600));
        let ages = Ages { responses: days(30), conversations: days(30), memories: None, opinions: None };
        assert_eq!(check(""), Ok(Retention { ages, files: days(20), batches: days(20) }));
        let ages = Ages { responses: days(7), conversations: None, memories: days(90), opinions: days(1) };
        let file = "responses_days = 7\nconversations_days = 0\nmemories_days = 90\nfeedback_days = 1\nfiles_days = 2\nbatches_days = 0";
        assert_eq!(check(file), Ok(Retention { ages, files: days(2), batches: None }));
        for (file, words) in [("files_days = 40000", "retention.files_days"), ("answers_days = 1", "answers_days")] {
            let error = check(file).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
    }
}
