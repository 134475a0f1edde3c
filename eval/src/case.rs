//! Golden cases: prompts, each with checks of its answer. A file has one case per line, as JSON:
//!
//! ```text
//!   {"id":"sum-1","tags":["arithmetic"],"prompt":"What is 17 + 25?","checks":[{"contains":"42"}]}
//! ```

use crate::check::{Check, Compiled, WrongCheck};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The most cases of a set.
pub const CASES_MAX: usize = 100_000;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The name of the case in results, over all of its runs.
    pub id: String,
    /// Tags, by which results are also grouped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The user's message, unless `messages` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Whole messages, as in a chat request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Value>,
    /// Further fields of the chat request, such as `tools` or `response_format`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub request: Map<String, Value>,
    pub checks: Vec<Check>,
    /// The origin of the case, and the reason why it is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WrongCase {
    #[error("line {line}: {reason}")]
    Json { line: usize, reason: String },
    #[error("line {line}: case `{id}` needs either `prompt` or `messages`")]
    Prompt { line: usize, id: String },
    #[error("line {line}: a case needs an `id`, and `checks`")]
    Empty { line: usize },
    #[error("line {line}: there is another case `{id}`")]
    Twice { line: usize, id: String },
    #[error("line {line}: case `{id}`: {wrong}")]
    Check { line: usize, id: String, wrong: WrongCheck },
    #[error("there are more than {CASES_MAX} cases")]
    TooMany,
}

/// A case whose checks are compiled.
#[derive(Debug)]
pub struct Ready {
    pub case: Case,
    pub checks: Vec<Compiled>,
}

impl Case {
    /// The messages of its chat request.
    pub fn messages(&self) -> Vec<Value> {
        match &self.prompt {
            Some(prompt) => vec![json!({"role": "user", "content": prompt})],
            None => self.messages.clone(),
        }
    }

    /// The conversation as a text, for a judge.
    pub fn question(&self) -> String {
        match (&self.prompt, &self.messages[..]) {
            (Some(prompt), _) => prompt.clone(),
            (None, messages) => messages.iter().map(said).collect::<Vec<_>>().join("\n"),
        }
    }

    /// Whether a model is asked at all.
    pub fn wants_an_answer(&self) -> bool {
        self.checks.iter().any(|check| !matches!(check, Check::Allowed(_)))
    }
}

fn said(message: &Value) -> String {
    let text = message["content"].as_str().map_or_else(|| message["content"].to_string(), str::to_owned);
    format!("{}: {text}", message["role"].as_str().unwrap_or("user"))
}

/// Reads cases, and checks that each can be used. Empty lines are skipped.
pub fn read(text: &str) -> Result<Vec<Ready>, WrongCase> {
    let mut ids = BTreeSet::new();
    let mut ready = Vec::new();
    for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
        let case: Case = serde_json::from_str(text).map_err(|error| WrongCase::Json { line, reason: error.to_string() })?;
        if case.id.trim().is_empty() || case.checks.is_empty() {
            return Err(WrongCase::Empty { line });
        }
        let id = || case.id.clone();
        if case.prompt.is_some() != case.messages.is_empty() {
            return Err(WrongCase::Prompt { line, id: id() });
        }
        if !ids.insert(id()) {
            return Err(WrongCase::Twice { line, id: id() });
        }
        let checks = case.checks.iter().map(Check::compile).collect::<Result<_, _>>();
        let checks = checks.map_err(|wrong| WrongCase::Check { line, id: id(), wrong })?;
        ready.push(Ready { case, checks });
        if ready.len() > CASES_MAX {
            return Err(WrongCase::TooMany);
        }
    }
    Ok(ready)
}

/// A case as a line of a file.
pub fn line(case: &Case) -> String {
    serde_json::to_string(case).expect("a case is made of texts and numbers") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_read_as_they_are_written() {
        let text = r#"{"id":"a","tags":["x"],"prompt":"Say 42.","request":{"max_tokens":9},"checks":[{"contains":"42"},{"judge":{"min":0.5}}]}

{"id":"b","messages":[{"role":"system","content":"Be short."},{"role":"user","content":"Hm?"}],"checks":[{"allowed":"output"}],"note":"why"}
"#;
        let ready = read(text).unwrap();
        assert_eq!(ready.iter().map(|ready| line(&ready.case)).collect::<String>(), text.replace("\n\n", "\n"));
        assert_eq!(ready[0].case.messages(), [json!({"role": "user", "content": "Say 42."})]);
        assert_eq!(ready[1].case.question(), "system: Be short.\nuser: Hm?");
        assert!(ready[0].case.wants_an_answer() && !ready[1].case.wants_an_answer());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, words) in [
            (r#"{"id":"a","prompt":"p","checks":[{"says":"x"}]}"#, "line 1"),
            (r#"{"id":"a","checks":[{"contains":"x"}]}"#, "either `prompt` or `messages`"),
            (r#"{"id":"a","prompt":"p","messages":[{}],"checks":[{"contains":"x"}]}"#, "either"),
            (r#"{"id":"a","prompt":"p","checks":[]}"#, "needs an `id`, and `checks`"),
            (r#"{"id":"a","prompt":"p","checks":[{"regex":"("}]}"#, "case `a`"),
            (r#"{"id":"a","prompt":"p","checks":[{"judge":{"min":7}}]}"#, "from 0 to 1"),
            (r#"{"id":"a","prompt":"p","checks":[{"schema":{"type":7}}]}"#, "schema"),
            (
                "{\"id\":\"a\",\"prompt\":\"p\",\"checks\":[{\"contains\":\"x\"}]}\n{\"id\":\"a\",\"prompt\":\"p\",\"checks\":[{\"contains\":\"x\"}]}",
                "line 2: there is another",
            ),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
