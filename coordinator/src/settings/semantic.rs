//! The settings of answers to similar questions.

use super::{
    bounds::{positive, within},
    encoder::encoder,
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
/// The maximum number of a tenant's answers. A question is compared with all of them at worst: 65,536 take milliseconds.
const TENANT_ANSWERS_MAX: usize = 1 << 16;

/// Answers that are reused for nearly equal questions, for tenants that opted in.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SemanticFlags {
    /// Whether there is a semantic cache [default: true, where there is such a section]
    pub enabled: Option<bool>,
    /// Served model whose embeddings say how similar questions are, such as all-MiniLM-L6-v2 [default: none, and no semantic cache]
    pub model: Option<String>,
    /// Least similarity of a hit, from 0.5 to 1; the default is measured for all-MiniLM-L6-v2 [default: 0.9]
    pub threshold: Option<f32>,
    /// Milliseconds that a request waits at most for the embedding of its question [default: 100]
    pub wait_ms: Option<u64>,
    /// Seconds for which an answer is given again [default: 3600]
    pub keep_s: Option<u64>,
    /// Size of all questions, with their embeddings, and answers [default: 64MiB]
    pub bytes_max: Option<String>,
    /// Most answers at a time [default: 16384]
    pub answers_max: Option<usize>,
    /// Most answers of one tenant at a time [default: 4096]
    pub tenant_answers_max: Option<usize>,
}

/// Whether there is a semantic cache.
#[derive(Clone, Debug, PartialEq)]
pub enum SemanticCache {
    Off,
    /// It is asked for, and no model is named that could say how similar questions are.
    NoModel,
    On(SemanticSettings),
}

impl SemanticFlags {
    pub(super) fn check(self, models: &[ModelSettings], aliases: &BTreeMap<String, String>) -> Result<SemanticCache, ConfigError> {
        let threshold = match self.threshold {
            None => THRESHOLD,
            Some(threshold @ 0.5..=1.0) => threshold,
            Some(wrong) => return Err(invalid("semantic_cache.threshold", wrong, "must be from 0.5 to 1")),
        };
        let encoder = encoder(("semantic_cache.model", self.model), ("semantic_cache.wait_ms", self.wait_ms), models, aliases)?;
        let bytes = self.bytes_max.unwrap_or_else(|| "64MiB".into());
        let limits = Limits {
            bytes: match parse_bytes(&bytes).map_err(|reason| invalid("semantic_cache.bytes_max", &bytes, reason))? {
                0 => return Err(invalid("semantic_cache.bytes_max", &bytes, "must be at least 1: `enabled = false` switches it off")),
                bytes => bytes,
            },
            answers: within("semantic_cache.answers_max", self.answers_max.unwrap_or(16_384), 1..=ANSWERS_MAX)?,
            tenant_answers: within("semantic_cache.tenant_answers_max", self.tenant_answers_max.unwrap_or(4096), 1..=TENANT_ANSWERS_MAX)?,
            keep: Duration::from_secs(positive("semantic_cache.keep_s", self.keep_s.unwrap_or(3600))?),
            threshold,
        };
        Ok(match (self.enabled, encoder) {
            (Some(false), _) => SemanticCache::Off,
            (_, None) => SemanticCache::NoModel,
            (_, Some(encoder)) => SemanticCache::On(SemanticSettings { limits, encoder }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(file: &str) -> Result<SemanticCache, String> {
        let flags: SemanticFlags = toml::from_str(file).map_err(|error| error.to_string())?;
        let models = [ModelSettings { name: "embed".into(), dir: "/m/embed".into() }];
        flags.check(&models, &BTreeMap::new()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_with_a_model_switches_it_on() {
        let Ok(SemanticCache::On(SemanticSettings { limits, encoder })) = of("model = 'embed'") else { panic!("it is on") };
        assert_eq!((limits.threshold, limits.bytes, limits.keep.as_secs()), (THRESHOLD, 64 << 20, 3600));
        assert_eq!((limits.answers, limits.tenant_answers), (16_384, 4096));
        assert_eq!((encoder.model.as_str(), encoder.wait.as_millis()), ("embed", 100));
        assert_eq!(of(""), Ok(SemanticCache::NoModel));
        assert_eq!(of("model = 'embed'\nenabled = false"), Ok(SemanticCache::Off));
    }

    #[test]
    fn an_error_names_its_key() {
        for (file, key) in [
            ("threshold = 0.4", "semantic_cache.threshold"),
            ("threshold = nan", "semantic_cache.threshold"),
            ("model = 'other'", "semantic_cache.model"),
            ("wait_ms = 0", "semantic_cache.wait_ms"),
            ("bytes_max = '1KB'", "semantic_cache.bytes_max"),
            ("bytes_max = '0'", "semantic_cache.bytes_max"),
            ("answers_max = 0", "semantic_cache.answers_max"),
            ("tenant_answers_max = 0", "semantic_cache.tenant_answers_max"),
            ("keep_s = 0", "semantic_cache.keep_s"),
            ("ttl = 1", "ttl"),
        ] {
            let error = of(file).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
