//! The settings of personal data.

use super::models::one_or_several;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, sync::Arc};
use tidemill_gateway::safety::pii::Pii;
use tidemill_net::config::{ConfigError, invalid};
use tidemill_safety::pii::{Kind, find::Finder};

/// The treatment of personal data.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PiiFlags {
    /// Treatment of personal data in prompts: `off`, or `redact`: models see placeholders such as `[EMAIL_1]`, and clients get back what these
    /// stand for [default: off]
    pub input: Option<String>,
    /// Treatment of personal data in answers: `off`, or `redact`: `[EMAIL]` takes its place [default: off]
    pub output: Option<String>,
    /// Kinds that are looked for: `email`, `phone`, `card`, `iban`, `ssn`, `ip`, `name` [default: all]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_several")]
    pub kinds: Vec<String>,
    /// File with people's names, one a line [default: none, no names are found]
    pub names: Option<PathBuf>,
}

impl PiiFlags {
    /// Returns the treatment of prompts and answers, and the finder, which logs use as well.
    pub(super) fn check(self) -> Result<(Option<Pii>, Arc<Finder>), ConfigError> {
        let redacts = |key, mode: Option<&str>| match mode.unwrap_or("off") {
            "off" => Ok(false),
            "redact" => Ok(true),
            other => Err(invalid(key, other, "must be off or redact")),
        };
        let (input, output) = (redacts("pii.input", self.input.as_deref())?, redacts("pii.output", self.output.as_deref())?);
        let kind = |name: &String| name.parse::<Kind>().map_err(|error| invalid("pii.kinds", name, error.to_string()));
        let kinds = self.kinds.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
        let mut finder = Finder::new(if kinds.is_empty() { &Kind::ALL } else { &kinds });
        if let Some(path) = &self.names {
            let wrong = |reason: String| invalid("pii.names", path.display(), reason);
            let list = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
            finder = finder.with_names(&list).map_err(|error| wrong(error.to_string()))?;
        }
        let finder = Arc::new(finder);
        Ok(((input || output).then(|| Pii { finder: Arc::clone(&finder), input, output }), finder))
    }
}
