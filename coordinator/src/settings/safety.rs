//! The settings of safety checks: `[safety]`.

use super::{
    bounds::within,
    models::{ModelSettings, one_or_several},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tidemill_gateway::safety::{Safety, moderator};
use tidemill_net::config::{ConfigError, invalid};
use tidemill_safety::{
    category::{Category, Threshold, Thresholds, Unknown},
    classifier::Classifier,
    disclaimers::Disclaimer,
    faults::WhenDown,
    guard::{Guard, built_in_classifier},
    judge::{PLACE, PROMPT},
    patterns::Patterns,
};

const DEADLINE_MS: u64 = 1000;
const DEADLINE_MS_MAX: u64 = 60_000;
const OPEN_FOR_S: u64 = 300;
/// A day.
const OPEN_FOR_S_MAX: u64 = 24 * 3600;
const AT_ONCE: usize = 8;
const AT_ONCE_MAX: usize = 1024;
const WAITING: usize = 256;
const WAITING_MAX: usize = 65_536;
const PROMPT_BYTES_MAX: usize = 64 << 10;
const DISCLAIMERS_MAX: usize = 64;
const DISCLAIMER_BYTES_MAX: usize = 4096;

/// Safety checks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SafetyFlags {
    /// Whether prompts and answers are checked [default: true]
    pub enabled: Option<bool>,
    /// Files with patterns besides the built-in list [default: none]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_several")]
    pub patterns: Vec<String>,
    /// `built-in`, `none`, or a file that `tidemill safety train` wrote [default: built-in]
    pub classifier: Option<String>,
    /// Thresholds of prompts by category, such as `{ dangerous = "BLOCK_MEDIUM_AND_ABOVE" }` [default: BLOCK_HIGH_AND_ABOVE]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub input: BTreeMap<String, String>,
    /// Thresholds of answers by category [default: BLOCK_MEDIUM_AND_ABOVE]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub output: BTreeMap<String, String>,
    /// Model that judges what the classifier is not sure of: a section [default: none]
    pub judge: Option<JudgeFlags>,
    /// Texts that are said after some answers: `[[safety.disclaimer]]` sections [default: none]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disclaimer: Vec<DisclaimerFlags>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeFlags {
    /// Model of this cluster, by its own name
    pub model: String,
    /// File with its prompt, in which `{text}` stands for the text [default: built in, safety/lists/judge.txt]
    pub prompt: Option<String>,
    /// Word that it says of harmless texts [default: safe]
    pub safe: Option<String>,
    /// Word that it says of harmful texts [default: unsafe]
    pub r#unsafe: Option<String>,
    /// Whether it reads answers, too: what the classifier is not sure of waits for it [default: false]
    pub answers: Option<bool>,
    /// Milliseconds for one prompt, or one passage of an answer, with the time in line [default: 1000]
    pub deadline_ms: Option<u64>,
    /// Fate of doubtful texts while the model does not answer: `closed` refuses them, `open` lets them pass [default: closed]
    pub when_down: Option<String>,
    /// Seconds after the first failure in a row for which they pass [default: 300]
    pub open_for_s: Option<u64>,
    /// Most prompts and passages that are judged at a time [default: 8]
    pub at_once: Option<usize>,
    /// Most prompts and passages that wait for that [default: 256]
    pub waiting_max: Option<usize>,
}

/// A disclaimer that is appended to some answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DisclaimerFlags {
    /// Name in metrics
    pub name: String,
    /// Lines of a pattern list: an answer that matches one gets the text
    pub patterns: Vec<String>,
    /// Text at the answer's end
    pub text: String,
}

pub(super) fn parse_safety(text: &str) -> Result<SafetyFlags, String> {
    match text {
        "on" | "true" => Ok(SafetyFlags::default()),
        "off" | "false" => Ok(SafetyFlags { enabled: Some(false), ..SafetyFlags::default() }),
        _ => Err("must be on or off".into()),
    }
}

impl SafetyFlags {
    /// Returns `None` if they are switched off.
    pub(super) fn check(self, models: &[ModelSettings]) -> Result<(Option<Safety>, Option<moderator::Settings>), ConfigError> {
        if self.enabled == Some(false) {
            return Ok((None, None));
        }
        let lists = self.patterns.iter().map(|path| read("safety.patterns", path)).collect::<Result<Vec<_>, _>>()?;
        let patterns = Patterns::with(&lists).map_err(|error| invalid("safety.patterns", self.patterns.join(", "), error.to_string()))?;
        let classifier = match self.classifier.as_deref() {
            None | Some("built-in") => Some(built_in_classifier()),
            Some("none") => None,
            Some(path) => {
                let classifier = Classifier::read(&read("safety.classifier", path)?);
                Some(classifier.map_err(|error| invalid("safety.classifier", path, error.to_string()))?)
            }
        };
        if let Some(judge) = self.judge.as_ref().filter(|_| classifier.is_none()) {
            let reason = "it is asked about what the classifier is not sure of, and there is none (safety.classifier)";
            return Err(invalid("safety.judge.model", &judge.model, reason));
        }
        let safety = Safety {
            guard: Arc::new(Guard { patterns, classifier }),
            input: thresholds("safety.input", Thresholds::INPUT, &self.input)?,
            output: thresholds("safety.output", Thresholds::OUTPUT, &self.output)?,
            moderator: None,
            disclaimers: disclaimers(self.disclaimer)?,
        };
        Ok((Some(safety), self.judge.map(|judge| judge.check(models)).transpose()?))
    }
}

impl JudgeFlags {
    fn check(self, models: &[ModelSettings]) -> Result<moderator::Settings, ConfigError> {
        if !models.iter().any(|model| model.name == self.model) {
            let names = models.iter().map(|model| format!("`{}`", model.name)).collect::<Vec<_>>().join(", ");
            return Err(invalid("safety.judge.model", &self.model, format!("must be a model of this cluster: {names}")));
        }
        let prompt = match &self.prompt {
            None => PROMPT.to_owned(),
            Some(path) => {
                let prompt = read("safety.judge.prompt", path)?;
                if prompt.matches(PLACE).count() != 1 || prompt.len() > PROMPT_BYTES_MAX {
                    let reason = format!("must have one `{PLACE}`, where the text stands, and {PROMPT_BYTES_MAX} bytes at most");
                    return Err(invalid("safety.judge.prompt", path, reason));
                }
                prompt
            }
        };
        let open_for_s = within("safety.judge.open_for_s", self.open_for_s.unwrap_or(OPEN_FOR_S), 1..=OPEN_FOR_S_MAX)?;
        let when_down = match self.when_down.as_deref() {
            None | Some("closed") => WhenDown::Closed,
            Some("open") => WhenDown::Open(Duration::from_secs(open_for_s)),
            Some(other) => return Err(invalid("safety.judge.when_down", other, "must be closed or open")),
        };
        if self.open_for_s.is_some() && when_down == WhenDown::Closed {
            return Err(invalid("safety.judge.open_for_s", open_for_s, "nothing passes unless when_down = \"open\""));
        }
        let word = |key, word: Option<String>, usual: &str| match word.as_deref().map_or(usual, str::trim) {
            "" => Err(invalid(key, "", "must be a word")),
            word => Ok(word.to_owned()),
        };
        let deadline_ms = within("safety.judge.deadline_ms", self.deadline_ms.unwrap_or(DEADLINE_MS), 1..=DEADLINE_MS_MAX)?;
        Ok(moderator::Settings {
            prompt,
            safe: word("safety.judge.safe", self.safe, "safe")?,
            unsafe_: word("safety.judge.unsafe", self.r#unsafe, "unsafe")?,
            answers: self.answers.unwrap_or(false),
            deadline: Duration::from_millis(deadline_ms),
            when_down,
            at_once: within("safety.judge.at_once", self.at_once.unwrap_or(AT_ONCE), 1..=AT_ONCE_MAX)?,
            waiting_max: within("safety.judge.waiting_max", self.waiting_max.unwrap_or(WAITING), 0..=WAITING_MAX)?,
            model: self.model,
        })
    }
}

fn disclaimers(given: Vec<DisclaimerFlags>) -> Result<Arc<[Disclaimer]>, ConfigError> {
    if given.len() > DISCLAIMERS_MAX {
        return Err(invalid("safety.disclaimer", given.len(), format!("there may be {DISCLAIMERS_MAX} at most")));
    }
    let mut disclaimers: Vec<Disclaimer> = Vec::new();
    for DisclaimerFlags { name, patterns, text } in given {
        if disclaimers.iter().any(|other| other.name == name) {
            return Err(invalid("safety.disclaimer.name", name, "there are two disclaimers of this name"));
        }
        let text = text.trim().to_owned();
        if patterns.is_empty() {
            return Err(invalid("safety.disclaimer.patterns", name, "there must be one at least, or no answer would get it"));
        }
        if !(1..=DISCLAIMER_BYTES_MAX).contains(&text.len()) {
            return Err(invalid("safety.disclaimer.text", name, format!("must have 1 to {DISCLAIMER_BYTES_MAX} bytes")));
        }
        let disclaimer = Disclaimer::new(name.clone(), &patterns, text);
        disclaimers.push(disclaimer.map_err(|error| invalid("safety.disclaimer.patterns", name, error.to_string()))?);
    }
    Ok(disclaimers.into())
}

fn thresholds(key: &'static str, mut thresholds: Thresholds, given: &BTreeMap<String, String>) -> Result<Thresholds, ConfigError> {
    for (category, threshold) in given {
        let category: Category = category.parse().map_err(|error: Unknown| invalid(key, category, error.to_string()))?;
        let threshold: Threshold = threshold.parse().map_err(|error: Unknown| invalid(key, threshold, error.to_string()))?;
        if category == Category::Csam && threshold == Threshold::Off {
            return Err(invalid(key, "csam", "cannot be switched off"));
        }
        thresholds.set(category, threshold);
    }
    Ok(thresholds)
}

fn read(key: &'static str, path: &str) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| invalid(key, path, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<(Option<Safety>, Option<moderator::Settings>), String> {
        let flags: SafetyFlags = toml::from_str(text).map_err(|error| error.to_string())?;
        let models = ["chat", "guard"].map(|name| ModelSettings { name: name.into(), dir: name.into() });
        flags.check(&models).map_err(|error| error.to_string())
    }

    #[test]
    fn a_judge_is_closed_unless_the_file_says_otherwise() {
        let judge = |text: &str| checked(text).unwrap().1;
        assert!(judge("").is_none() && judge("enabled = false\n[judge]\nmodel = 'guard'").is_none());
        let closed = judge("[judge]\nmodel = 'guard'").unwrap();
        assert_eq!((closed.when_down, closed.deadline, closed.safe.as_str()), (WhenDown::Closed, Duration::from_secs(1), "safe"));
        assert!(!closed.answers && judge("[judge]\nmodel = 'guard'\nanswers = true").unwrap().answers);
        let open = judge("[judge]\nmodel = 'guard'\nwhen_down = 'open'\nunsafe = 'bad'").unwrap();
        assert_eq!((open.when_down, open.unsafe_.as_str()), (WhenDown::Open(Duration::from_secs(300)), "bad"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let disclaimer = "[[disclaimer]]\nname = 'medical'\npatterns = ['side effects']\ntext = 'Ask a doctor.'\n";
        assert_eq!(checked(disclaimer).unwrap().0.unwrap().disclaimers.len(), 1);
        for (text, words) in [
            ("[judge]\nmodel = 'judge'", "`chat`, `guard`"),
            ("classifier = 'none'\n[judge]\nmodel = 'guard'", "safety.classifier"),
            ("[judge]\nmodel = 'guard'\nwhen_down = 'ajar'", "closed or open"),
            ("[judge]\nmodel = 'guard'\nopen_for_s = 9", "when_down"),
            ("[judge]\nmodel = 'guard'\nwhen_down = 'open'\nopen_for_s = 0", "from 1"),
            ("[judge]\nmodel = 'guard'\ndeadline_ms = 0", "deadline_ms"),
            ("[judge]\nmodel = 'guard'\nsafe = ' '", "safety.judge.safe"),
            ("[judge]\nmodel = 'guard'\nprompt = '/does/not/exist'", "safety.judge.prompt"),
            (&format!("{disclaimer}{disclaimer}"), "two disclaimers"),
            (&disclaimer.replace("side effects", "re: a.*b"), "line 1"),
            (&disclaimer.replace("['side effects']", "[]"), "patterns"),
            (&disclaimer.replace("Ask a doctor.", ""), "text"),
            ("input = { csam = 'BLOCK_NONE' }", "cannot be switched off"),
        ] {
            let error = checked(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
