//! The settings of long conversations, and of facts remembered between them.

use super::{
    bounds::{bytes, positive, within},
    encoder::encoder,
    models::ModelSettings,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};
use tidemill_gateway::{base::memories, context::Strategy, features::summarizer, serving::recall::RecallSettings, vectors::kept};
use tidemill_net::config::{ConfigError, invalid};

/// More facts would fill a small context window.
const FACTS_MAX: usize = 1000;
/// The longest deadline: an hour.
const DEADLINE_S_MAX: u64 = 3600;
const WAITING_MAX: usize = 65_536;
const AT_ONCE_MAX: usize = 64;
/// The least room for embeddings: some thousand.
const VECTORS_BYTES_MIN: &str = "1MiB";

/// The treatment of conversations that are too long.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ContextFlags {
    /// Strategy for long stored conversations whose chats name none: `none`, `slide`, `steps` or `summary` [default: steps]
    pub strategy: Option<String>,
    /// Served model that summarizes [default: the one that the conversation is had with]
    pub summary_model: Option<String>,
    /// Seconds after which a summary is given up; the conversation goes on without it [default: 120]
    pub summary_deadline_s: Option<u64>,
    /// Most conversations that wait to be summarized; one that finds no room asks again at its next turn [default: 256]
    pub summaries_waiting_max: Option<usize>,
    /// Most summaries that are made at a time [default: 2]
    pub summaries_at_once: Option<usize>,
    /// Served model whose embeddings rank old messages and facts beside their words, such as all-MiniLM-L6-v2 [default: none, words alone]
    pub model: Option<String>,
    /// Milliseconds that a request waits at most for the embedding of its question [default: 100]
    pub wait_ms: Option<u64>,
    /// Size of all embeddings of old messages and facts that are kept [default: 32MiB]
    pub vectors_bytes_max: Option<String>,
    /// Seconds after its last use for which an embedding is kept [default: 86400]
    pub vectors_keep_s: Option<u64>,
}

/// The treatment of conversations that are too long, checked.
#[derive(Clone, Debug)]
pub(super) struct ContextSettings {
    pub(super) strategy: Strategy,
    pub(super) summaries: summarizer::Settings,
    pub(super) recall: Option<RecallSettings>,
}

/// Facts remembered of users from one conversation to the next.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryFlags {
    /// Whether facts are remembered [default: true, where there is such a section]
    pub enabled: Option<bool>,
    /// Most facts about one user [default: 64]
    pub facts_max: Option<usize>,
    /// Size of all facts about one user [default: 16KiB]
    pub bytes_max: Option<String>,
}

impl ContextFlags {
    pub(super) fn check(self, models: &[ModelSettings], aliases: &BTreeMap<String, String>) -> Result<ContextSettings, ConfigError> {
        let strategy = match self.strategy.as_deref() {
            None | Some("steps") => Strategy::Steps,
            Some("none") => Strategy::None,
            Some("slide") => Strategy::Slide,
            Some("summary") => Strategy::Summary,
            Some(other) => return Err(invalid("context.strategy", other, "must be none, slide, steps or summary")),
        };
        let served = |model: &String| aliases.contains_key(model) || models.iter().any(|served| served.name == *model);
        if let Some(model) = self.summary_model.as_ref().filter(|model| !served(model)) {
            return Err(invalid("context.summary_model", model, "must name a served model"));
        }
        let usual = summarizer::Settings::default();
        let deadline =
            self.summary_deadline_s.map_or(Ok(usual.deadline.as_secs()), |s| within("context.summary_deadline_s", s, 1..=DEADLINE_S_MAX));
        let waiting = self.summaries_waiting_max.unwrap_or(usual.waiting_max);
        let at_once = self.summaries_at_once.unwrap_or(usual.at_once);
        let summaries = summarizer::Settings {
            model: self.summary_model,
            deadline: Duration::from_secs(deadline?),
            waiting_max: within("context.summaries_waiting_max", waiting, 1..=WAITING_MAX)?,
            at_once: within("context.summaries_at_once", at_once, 1..=AT_ONCE_MAX)?,
        };
        let limits = kept::Limits {
            bytes: bytes("context.vectors_bytes_max", self.vectors_bytes_max, "32MiB", VECTORS_BYTES_MIN)?,
            keep: Duration::from_secs(positive("context.vectors_keep_s", self.vectors_keep_s.unwrap_or(86_400))?),
        };
        let encoder = encoder(("context.model", self.model), ("context.wait_ms", self.wait_ms), models, aliases)?;
        Ok(ContextSettings { strategy, summaries, recall: encoder.map(|encoder| RecallSettings { encoder, limits }) })
    }
}

impl MemoryFlags {
    /// Returns `None` if no facts are remembered.
    pub(super) fn check(self) -> Result<Option<memories::Limits>, ConfigError> {
        let limits = memories::Limits {
            facts: within("memory.facts_max", self.facts_max.unwrap_or(64), 1..=FACTS_MAX)?,
            bytes: bytes("memory.bytes_max", self.bytes_max, "16KiB", "1")? as usize,
        };
        Ok((self.enabled != Some(false)).then_some(limits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(file: &str) -> Result<ContextSettings, String> {
        let flags: ContextFlags = toml::from_str(file).map_err(|error| error.to_string())?;
        let models = [ModelSettings { name: "big".into(), dir: "/m/big".into() }];
        flags.check(&models, &[("gpt-5".to_owned(), "big".to_owned())].into()).map_err(|error| error.to_string())
    }

    fn memory(file: &str) -> Result<Option<memories::Limits>, String> {
        toml::from_str::<MemoryFlags>(file).map_err(|error| error.to_string())?.check().map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_filled_in() {
        let ContextSettings { strategy, summaries, recall } = context("").unwrap();
        assert_eq!((strategy, summaries.model, summaries.deadline.as_secs(), recall), (Strategy::Steps, None, 120, None));
        let RecallSettings { encoder, limits } = context("model = 'big'").unwrap().recall.unwrap();
        assert_eq!((encoder.model.as_str(), encoder.wait.as_millis()), ("big", 100));
        assert_eq!((limits.bytes, limits.keep.as_secs()), (32 << 20, 86_400));
        let ContextSettings { strategy, summaries, .. } =
            context("strategy = 'summary'\nsummary_model = 'gpt-5'\nsummaries_at_once = 1").unwrap();
        assert_eq!((strategy, summaries.model.as_deref(), summaries.at_once), (Strategy::Summary, Some("gpt-5"), 1));
        assert_eq!(memory(""), Ok(Some(memories::Limits { facts: 64, bytes: 16 << 10 })));
        assert_eq!(memory("enabled = false"), Ok(None));
    }

    #[test]
    fn an_error_names_its_key() {
        for (file, key) in [
            ("strategy = 'all'", "context.strategy"),
            ("summary_model = 'small'", "context.summary_model"),
            ("summary_deadline_s = 0", "context.summary_deadline_s"),
            ("summaries_waiting_max = 0", "context.summaries_waiting_max"),
            ("summaries_at_once = 65", "context.summaries_at_once"),
            ("model = 'small'", "context.model"),
            ("wait_ms = 0", "context.wait_ms"),
            ("vectors_bytes_max = '1KiB'", "context.vectors_bytes_max"),
            ("vectors_keep_s = 0", "context.vectors_keep_s"),
            ("unknown = 1", "unknown"),
        ] {
            let error = context(file).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
        for (file, key) in
            [("facts_max = 0", "memory.facts_max"), ("bytes_max = '1KB'", "memory.bytes_max"), ("bytes_max = '0'", "memory.bytes_max")]
        {
            let error = memory(file).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}
