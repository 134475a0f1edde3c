//! The settings of the audit log of blocked texts.

use super::bounds::{bytes, within};
use serde::{Deserialize, Serialize};
use std::{path::Path, str::FromStr, sync::Arc, time::Duration};
use tidemill_gateway::safety::audit::AuditSettings;
use tidemill_net::config::{ConfigError, invalid};
use tidemill_safety::pii::find::Finder;

/// The audit log: a number of days as a flag, or a section `[audit]`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditFlags {
    /// Days for which records are kept; 0: no audit log
    pub days: u64,
    /// Size of the log: over this, the oldest records go earlier [default: 1GiB]
    pub bytes_max: Option<String>,
}

/// A hundred years.
const DAYS_MAX: u64 = 36_500;

impl FromStr for AuditFlags {
    type Err = std::num::ParseIntError;

    fn from_str(days: &str) -> Result<Self, Self::Err> {
        Ok(Self { days: days.parse()?, bytes_max: None })
    }
}

impl AuditFlags {
    /// Returns `None` if it is switched off.
    pub(super) fn check(self, data: Option<&Path>, finder: &Arc<Finder>) -> Result<Option<AuditSettings>, ConfigError> {
        if self.days == 0 {
            return Ok(None);
        }
        within("audit.days", self.days, 0..=DAYS_MAX)?;
        let data = data.ok_or_else(|| invalid("audit.days", self.days, "the log needs a directory: say which with --data"))?;
        Ok(Some(AuditSettings {
            dir: data.join("audit"),
            keep: Duration::from_secs(self.days * 24 * 3600),
            bytes_max: bytes("audit.bytes_max", self.bytes_max, "1GiB", "0")?,
            finder: Arc::clone(finder),
        }))
    }
}
