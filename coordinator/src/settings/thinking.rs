//! The setting `thought_budgets`: the tokens of thought that an effort is worth.

use std::collections::BTreeMap;
use tidemill_gateway::{dialog::thinking::ThoughtBudgets, requests::thinking::EFFORTS_OF_THOUGHT};
use tidemill_net::config::{ConfigError, invalid};

/// Parses `low=1024,high=8192` as a map.
pub(super) fn parse_thought_budgets(text: &str) -> Result<BTreeMap<String, u32>, String> {
    let pair = |pair: &str| {
        let (effort, tokens) = pair.split_once('=').ok_or_else(|| format!("`{pair}` is not EFFORT=TOKENS"))?;
        let tokens = tokens.trim().parse().map_err(|_| format!("`{pair}`: `{}` is not a number of tokens", tokens.trim()))?;
        Ok((effort.trim().to_owned(), tokens))
    };
    text.split(',').map(pair).collect()
}

/// Adds an operator's budgets to the defaults.
pub(super) fn check_thought_budgets(given: Option<BTreeMap<String, u32>>) -> Result<ThoughtBudgets, ConfigError> {
    let mut budgets = ThoughtBudgets::default();
    for (effort, tokens) in given.unwrap_or_default() {
        if !EFFORTS_OF_THOUGHT.contains(&effort.as_str()) {
            return Err(invalid("thought_budgets", effort, format!("must be one of the efforts {}", EFFORTS_OF_THOUGHT.join(", "))));
        }
        budgets.0.insert(effort, tokens);
    }
    Ok(budgets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operators_budgets_replace_the_defaults_of_their_efforts() {
        let budgets = check_thought_budgets(parse_thought_budgets("low=100, max = 5000").ok()).unwrap();
        let of = |effort: &str| budgets.0.get(effort).copied();
        assert_eq!((of("low"), of("medium"), of("max"), of("xhigh")), (Some(100), Some(8192), Some(5000), None));
        assert!(parse_thought_budgets("low").unwrap_err().contains("EFFORT=TOKENS"));
        assert!(parse_thought_budgets("low=-1").unwrap_err().contains("number of tokens"));
        let refused = check_thought_budgets(parse_thought_budgets("none=1").ok()).unwrap_err().to_string();
        assert!(refused.contains("`thought_budgets`") && refused.contains("minimal"), "{refused}");
    }
}
