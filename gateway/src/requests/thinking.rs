//! The fields by which clients say how much a model may think, checked.

use crate::{
    dialog::thinking::NO_EFFORT,
    requests::{error::ApiError, parse::in_range},
};
use serde::Deserialize;

/// Efforts that are worth a thought.
pub const EFFORTS_OF_THOUGHT: [&str; 6] = ["minimal", "low", "medium", "high", "xhigh", "max"];
/// Another word for no effort.
const OFF: &str = "off";
/// The least budget of `/v1/messages`, as in Anthropic's API.
const MESSAGES_BUDGET_MIN: i64 = 1024;

/// Checks an effort. `param` is its field.
pub fn effort(param: &str, effort: Option<String>) -> Result<Option<String>, ApiError> {
    match effort {
        Some(effort) if effort == OFF => Ok(Some(NO_EFFORT.into())),
        Some(effort) if effort != NO_EFFORT && !EFFORTS_OF_THOUGHT.contains(&effort.as_str()) => {
            let message = format!("`{param}` is `{effort}`: it must be one of `{NO_EFFORT}`, `{}`", EFFORTS_OF_THOUGHT.join("`, `"));
            Err(ApiError::invalid(param, message))
        }
        effort => Ok(effort),
    }
}

/// Checks vLLM's `thinking_token_budget`.
pub fn token_budget(budget: Option<i64>) -> Result<Option<u32>, ApiError> {
    let check = |budget| in_range("thinking_token_budget", budget, 0..=i64::from(u32::MAX)).map(|budget| budget as u32);
    budget.map(check).transpose()
}

/// The field `thinking` of `/v1/messages`.
#[derive(Debug, Deserialize)]
pub struct Thinking {
    r#type: String,
    #[serde(default)]
    budget_tokens: Option<i64>,
}

impl Thinking {
    /// Returns whether the model thinks, and its budget.
    pub fn check(&self) -> Result<(bool, Option<u32>), ApiError> {
        let param = "thinking.budget_tokens";
        match (self.r#type.as_str(), self.budget_tokens) {
            ("enabled", Some(budget)) => {
                let budget = in_range(param, budget, MESSAGES_BUDGET_MIN..=i64::from(u32::MAX))?;
                Ok((true, Some(budget as u32)))
            }
            ("enabled", None) => {
                let message = format!("`{param}` is missing: thinking of type `enabled` needs a budget, type `adaptive` needs none");
                Err(ApiError::invalid(param, message))
            }
            ("adaptive" | "disabled", Some(_)) => {
                Err(ApiError::invalid(param, format!("`{param}` is for thinking of type `enabled`, not `{}`", self.r#type)))
            }
            ("adaptive", None) => Ok((true, None)),
            ("disabled", None) => Ok((false, None)),
            (other, _) => {
                let message = format!("`thinking.type` is `{other}`: it must be one of `enabled`, `adaptive`, `disabled`");
                Err(ApiError::invalid("thinking.type", message))
            }
        }
    }
}

/// Refuses a budget of `/v1/messages` that leaves no room for an answer, as Anthropic's API does.
pub fn leaves_room(budget: Option<u32>, max_tokens: u32) -> Result<(), ApiError> {
    match budget {
        Some(budget) if budget >= max_tokens => Err(ApiError::invalid(
            "thinking.budget_tokens",
            format!("`thinking.budget_tokens` is {budget}: it must be less than `max_tokens`, which is {max_tokens}"),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn error<T: std::fmt::Debug>(refused: Result<T, ApiError>) -> (Value, String) {
        let body = refused.unwrap_err().body();
        (body["error"]["param"].clone(), body["error"]["message"].as_str().unwrap().to_owned())
    }

    #[test]
    fn efforts_are_those_of_openai() {
        assert_eq!(effort("x", Some("off".into())).unwrap().as_deref(), Some("none"));
        assert_eq!(effort("x", Some("max".into())).unwrap().as_deref(), Some("max"));
        assert_eq!(effort("x", None).unwrap(), None);
        let (param, message) = error(effort("reasoning.effort", Some("much".into())));
        assert_eq!(param, "reasoning.effort");
        assert!(message.starts_with("`reasoning.effort` is `much`") && message.contains("`minimal`"), "{message}");
    }

    #[test]
    fn a_budget_is_no_negative_number() {
        assert_eq!(token_budget(Some(0)).unwrap(), Some(0));
        assert_eq!(error(token_budget(Some(-1))).0, "thinking_token_budget");
        assert_eq!(error(token_budget(Some(1 << 40))).0, "thinking_token_budget");
    }

    #[test]
    fn thinking_is_that_of_anthropic() {
        let check = |body: Value| serde_json::from_value::<Thinking>(body).unwrap().check();
        assert_eq!(check(json!({"type": "enabled", "budget_tokens": 1024})).unwrap(), (true, Some(1024)));
        assert_eq!(check(json!({"type": "adaptive"})).unwrap(), (true, None));
        assert_eq!(check(json!({"type": "disabled"})).unwrap(), (false, None));
        for (body, field, rule) in [
            (json!({"type": "enabled"}), "thinking.budget_tokens", "is missing"),
            (json!({"type": "enabled", "budget_tokens": 1023}), "thinking.budget_tokens", "1024"),
            (json!({"type": "enabled", "budget_tokens": -5}), "thinking.budget_tokens", "1024"),
            (json!({"type": "adaptive", "budget_tokens": 2000}), "thinking.budget_tokens", "`enabled`"),
            (json!({"type": "on"}), "thinking.type", "`disabled`"),
        ] {
            let (param, message) = error(check(body));
            assert!(param == field && message.contains(rule), "{param} {message}");
        }
        assert!(leaves_room(Some(1024), 1025).is_ok() && leaves_room(None, 1).is_ok());
        assert!(error(leaves_room(Some(1024), 1024)).1.contains("less than `max_tokens`, which is 1024"));
    }
}
