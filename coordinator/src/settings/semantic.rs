//! The settings of answers to similar questions.

use super::{
    bounds::{positive, within},
    models::ModelSettings,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};
use tidemill_gateway::{
    cache::semantic::{Limits, THRESHOLD},
    serving::gateway::settings::SemanticSettings,
};
use tidemill_net::config::{ConfigError, invalid, parse_bytes};

const ANSWERS_MAX: usize = 1 << 20;

/// Answers that are reused for nearly equal questions, for tenants that opted in.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SemanticFlags {
    /// Whether there is a semantic cache [default: true, where there is such a section]
    pub enabled: Option<bool>,
    /// Least similarity of a hit, from 0.5 to 1; a `model` needs a threshold of its own [default: 0.64]
    pub threshold: Option<f32>,
    /// Seconds for which an answer is given again [default: 3600]
    pub keep_s: Option<u64>,
    /// Size of all questions and answers [default: 64MiB]
    pub bytes_max: Option<String>,
    /// Most answers at a time [default: 16384]
    pub answers_max: Option<usize>,
    /// Served model whose embeddings say how similar questions are [default: none, their words do]
    pub model: Option<String>,
}

impl SemanticFlags {
    /// Returns `None` if it is off.
    pub(super) fn check(
        self,
        models: &[ModelSettings],
        aliases: &BTreeMap<String, String>,
    ) -> Result<Option<SemanticSettings>, ConfigError> {
        let threshold = match (self.threshold, &self.model) {
            (Some(threshold @ 0.5..=1.0), _) => threshold,
            (Some(wrong), _) => return Err(invalid("semantic_cache.threshold", wrong, "must be from 0.5 to 1")),
            (None, None) => THRESHOLD,
            (None, Some(model)) => {
                let reason = "needs semantic_cache.threshold: the default one is of another measure";
                return Err(invalid("semantic_cache.model", model, reason));
            }
        };
        let served = |model: &&String| aliases.contains_key(*model) || models.iter().any(|served| served.name == **model);
        if let Some(model) = self.model.as_ref().filter(|model| !served(model)) {
            return Err(invalid("semantic_cache.model", model, "must name a served model"));
        }
        let bytes = self.bytes_max.unwrap_or_else(|| "64MiB".into());
        let limits = Limits {
            bytes: match parse_bytes(&bytes).map_err(|reason| invalid("semantic_cache.bytes_max", &bytes, reason))? {
                0 => return Err(invalid("semantic_cache.bytes_max", &bytes, "must be at least 1: `enabled = false` switches it off")),
                bytes => bytes,
            },
            answers: within("semantic_cache.answers_max", self.answers_max.unwrap_or(16_384), 1..=ANSWERS_MAX)?,
            keep: Duration::from_secs(positive("semantic_cache.keep_s", self.keep_s.unwrap_or(3600))?),
            threshold,
        };
        Ok((self.enabled != Some(false)).then_some(SemanticSettings { limits, model: self.model }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(file: &str) -> Result<Option<SemanticSettings>, String> {
        let flags: SemanticFlags = toml::from_str(file).map_err(|error| error.to_string())?;
        let models = [ModelSettings { name: "embed".into(), dir: "/m/embed".into() }];
        flags.check(&models, &BTreeMap::new()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_switches_it_on() {
        let limits = of("").unwrap().unwrap().limits;
        assert_eq!((limits.threshold, limits.bytes, limits.answers, limits.keep.as_secs()), (THRESHOLD, 64 << 20, 16_384, 3600));
        assert_eq!(of("enabled = false"), Ok(None));
        assert_eq!(of("model = 'embed'\nthreshold = 0.9").unwrap().unwrap().model.as_deref(), Some("embed"));
    }

    #[test]
    fn an_error_names_its_key() {
        for (file, key) in [
            ("threshold = 0.4", "semantic_cache.threshold"),
            ("threshold = nan", "semantic_cache.threshold"),
            ("model = 'embed'", "semantic_cache.threshold"),
            ("model = 'other'\nthreshold = 0.9", "semantic_cache.model"),
            ("bytes_max = '1KB'", "semantic_cache.bytes_max"),
            ("bytes_max = '0'", "semantic_cache.bytes_max"),
            ("answers_max = 0", "semantic_cache.answers_max"),
            ("keep_s = 0", "semantic_cache.keep_s"),
            ("ttl = 1", "ttl"),
        ] {
            let error = of(file).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
