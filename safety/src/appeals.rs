//! Blocks that can be appealed against, and their outcomes: a review queue, built from the audit log's events.
//!
//! ```text
//!   blocked ──appeal──► open ──► upheld | overturned (a golden case: it must pass from now on)
//! ```

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The number of blocks that are remembered. Beyond this, the oldest without an appeal go first.
const CASES_MAX: usize = 10_000;

/// An event of the audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    Block { appeal_id: String, block: Block },
    Appeal { appeal_id: String, reason: String },
    Decision { appeal_id: String, decision: Decision, note: String },
}

/// A prompt or an answer that was blocked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// `input` or `output`.
    pub side: String,
    pub tenant: Option<String>,
    pub model: String,
    pub category: String,
    pub stage: String,
    pub score: f32,
    /// The text, without personal data, and truncated.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    Upheld,
    Overturned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Without an appeal.
    Blocked,
    Open,
    Upheld,
    Overturned,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    pub appeal_id: String,
    /// The time of the block in Unix seconds.
    pub at: u64,
    pub state: State,
    #[serde(flatten)]
    pub block: Block,
    pub reason: Option<String>,
    pub note: Option<String>,
}

/// The reason why an event is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("there is no block with this appeal id here, or it is too old")]
    Unknown,
    #[error("there was an appeal against this already")]
    Appealed,
    #[error("there is no appeal against this, or it was decided already")]
    NotOpen,
}

#[derive(Debug, Default)]
pub struct Cases {
    cases: BTreeMap<String, Case>,
    /// The ids in the order of their blocks.
    order: BTreeMap<u64, String>,
    blocks: u64,
}

impl Cases {
    /// Applies an event of an audit log. Events of other kinds do not concern cases.
    pub fn replay(&mut self, at: u64, event: &Value) {
        if let Ok(event) = serde_json::from_value(event.clone()) {
            // Events that were rejected then were not logged.
            let _ = self.apply(at, event);
        }
    }

    /// Checks whether an event would be accepted.
    pub fn check(&self, event: &Event) -> Result<(), Refused> {
        let state = |id: &String| self.cases.get(id).map(|case| case.state).ok_or(Refused::Unknown);
        match event {
            Event::Block { .. } => Ok(()),
            Event::Appeal { appeal_id, .. } => match state(appeal_id)? {
                State::Blocked => Ok(()),
                State::Open | State::Upheld | State::Overturned => Err(Refused::Appealed),
            },
            Event::Decision { appeal_id, .. } => match state(appeal_id)? {
                State::Open => Ok(()),
                State::Blocked | State::Upheld | State::Overturned => Err(Refused::NotOpen),
            },
        }
    }

    pub fn apply(&mut self, at: u64, event: Event) -> Result<(), Refused> {
        self.check(&event)?;
        match event {
            Event::Block { appeal_id, block } => {
                self.blocks += 1;
                self.order.insert(self.blocks, appeal_id.clone());
                let case = Case { appeal_id: appeal_id.clone(), at, state: State::Blocked, block, reason: None, note: None };
                self.cases.insert(appeal_id, case);
                self.forget();
            }
            Event::Appeal { appeal_id, reason } => {
                if let Some(case) = self.cases.get_mut(&appeal_id) {
                    (case.state, case.reason) = (State::Open, Some(reason));
                }
            }
            Event::Decision { appeal_id, decision, note } => {
                if let Some(case) = self.cases.get_mut(&appeal_id) {
                    let state = match decision {
                        Decision::Upheld => State::Upheld,
                        Decision::Overturned => State::Overturned,
                    };
                    (case.state, case.note) = (state, Some(note));
                }
            }
        }
        Ok(())
    }

    pub fn get(&self, id: &str) -> Option<&Case> {
        self.cases.get(id)
    }

    /// The cases, the newest first.
    pub fn iter(&self) -> impl Iterator<Item = &Case> {
        self.order.values().rev().filter_map(|id| self.cases.get(id))
    }

    fn forget(&mut self) {
        if self.cases.len() > CASES_MAX {
            let quiet = |id: &String| self.cases.get(id).is_none_or(|case| case.state == State::Blocked);
            let goes = self.order.iter().find(|(_, id)| quiet(id)).or_else(|| self.order.first_key_value()).map(|(place, _)| *place);
            if let Some(id) = goes.and_then(|place| self.order.remove(&place)) {
                self.cases.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(id: &str) -> Event {
        let block = Block {
            side: "input".into(),
            tenant: None,
            model: "tiny".into(),
            category: "hate".into(),
            stage: "patterns".into(),
            score: 1.0,
            text: "…".into(),
        };
        Event::Block { appeal_id: id.into(), block }
    }

    fn appeal(id: &str) -> Event {
        Event::Appeal { appeal_id: id.into(), reason: "it is a quote".into() }
    }

    fn decision(id: &str) -> Event {
        Event::Decision { appeal_id: id.into(), decision: Decision::Overturned, note: "it is".into() }
    }

    #[test]
    fn a_block_is_appealed_against_once_and_decided_once() {
        let mut cases = Cases::default();
        cases.apply(1, block("a")).unwrap();
        assert_eq!(cases.apply(2, appeal("b")), Err(Refused::Unknown));
        assert_eq!(cases.apply(2, decision("a")), Err(Refused::NotOpen));
        cases.apply(2, appeal("a")).unwrap();
        assert_eq!(cases.apply(3, appeal("a")), Err(Refused::Appealed));
        cases.apply(3, decision("a")).unwrap();
        assert_eq!(cases.apply(4, decision("a")), Err(Refused::NotOpen));
        let case = cases.get("a").unwrap();
        assert_eq!((case.state, case.at, case.reason.as_deref()), (State::Overturned, 1, Some("it is a quote")));
    }

    #[test]
    fn a_log_gives_the_same_cases_again() {
        let mut cases = Cases::default();
        for event in [block("a"), block("b"), appeal("b")] {
            cases.replay(7, &serde_json::to_value(event).unwrap());
        }
        cases.replay(8, &serde_json::json!({"kind": "retired", "through": 1}));
        assert_eq!(
            cases.iter().map(|case| (case.appeal_id.as_str(), case.state)).collect::<Vec<_>>(),
            [("b", State::Open), ("a", State::Blocked)]
        );
    }

    #[test]
    fn those_that_nobody_appealed_against_go_first() {
        let mut cases = Cases::default();
        cases.apply(0, block("kept")).unwrap();
        cases.apply(0, appeal("kept")).unwrap();
        (0..=CASES_MAX).for_each(|n| cases.apply(1, block(&n.to_string())).unwrap());
        assert!(cases.get("kept").is_some() && cases.get("0").is_none() && cases.get("1").is_none() && cases.get("2").is_some());
        assert_eq!(cases.iter().count(), CASES_MAX);
    }
}
