//! The thought that a client wants before an answer: whether there is one, and how long it may be.

use crate::text::template::ChatTemplate;
use minijinja::Value;
use std::collections::BTreeMap;

/// The effort that turns thinking off.
pub(crate) const NO_EFFORT: &str = "none";
/// The variables by which templates learn whether to think. Families differ in the name.
pub(super) const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// The variable by which a template learns the effort.
pub(super) const EFFORT: &str = "reasoning_effort";

/// The requested amount of reasoning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningWish {
    /// The effort: `none`, `minimal`, `low`, …
    pub effort: Option<String>,
    pub enable_thinking: Option<bool>,
    /// The most tokens of thought, in all rounds of the answer together.
    pub budget: Option<u32>,
    /// The tokens of thought in earlier rounds of the same answer.
    pub spent: u64,
}

impl ReasoningWish {
    /// Whether a thought is wanted; `None` if the client has no wish.
    pub(super) fn thinks(&self) -> Option<bool> {
        let by_effort = || self.effort.as_deref().map(|effort| effort != NO_EFFORT);
        self.enable_thinking.or_else(by_effort).or(self.budget.map(|budget| budget > 0))
    }

    /// The most tokens of thought in the next answer, for a template that gets these variables of the client's; `None` without a limit. A
    /// budget has precedence over the effort, whose limit holds unless the template has a word for it.
    pub fn tokens_max(&self, template: &ChatTemplate, kwargs: &BTreeMap<String, Value>, budgets: &ThoughtBudgets) -> Option<u32> {
        let by_client = SWITCHES.iter().find_map(|name| Some(kwargs.get(*name)?.is_true()));
        if !by_client.or_else(|| self.thinks()).unwrap_or(true) {
            return Some(0);
        }
        let has_words = template.mentions(EFFORT);
        let of_effort = || budgets.0.get(self.effort.as_deref().filter(|_| !has_words)?).copied();
        let most = self.budget.or_else(of_effort)?;
        Some(most.saturating_sub(u32::try_from(self.spent).unwrap_or(u32::MAX)))
    }
}

/// The most tokens of thought for each effort; an effort that is not listed has no limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThoughtBudgets(pub BTreeMap<String, u32>);

impl Default for ThoughtBudgets {
    fn default() -> Self {
        Self(
            [("minimal", 512), ("low", 1024), ("medium", 8192), ("high", 24576)].map(|(effort, tokens)| (effort.to_owned(), tokens)).into(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::config::ModelConfig;

    fn most(reasoning: ReasoningWish, kwargs: &[(&str, bool)], template: &str) -> Option<u32> {
        let template = ChatTemplate::new(template.into(), &ModelConfig::default()).unwrap();
        let kwargs = kwargs.iter().map(|&(name, value)| (name.to_owned(), Value::from(value))).collect();
        reasoning.tokens_max(&template, &kwargs, &ThoughtBudgets::default())
    }

    fn effort(effort: &str) -> ReasoningWish {
        ReasoningWish { effort: Some(effort.into()), ..ReasoningWish::default() }
    }

    #[test]
    fn an_effort_is_a_number_of_tokens_unless_the_template_has_a_word_for_it() {
        let (plain, wordy) = ("<think></think>", "{{ reasoning_effort }}");
        for (name, tokens, of_wordy) in [
            ("none", Some(0), Some(0)),
            ("minimal", Some(512), None),
            ("low", Some(1024), None),
            ("medium", Some(8192), None),
            ("high", Some(24576), None),
            ("xhigh", None, None),
            ("max", None, None),
        ] {
            assert_eq!((most(effort(name), &[], plain), most(effort(name), &[], wordy)), (tokens, of_wordy), "{name}");
        }
        assert_eq!(most(ReasoningWish::default(), &[], plain), None);
    }

    #[test]
    fn a_budget_is_exact_and_is_for_all_rounds() {
        let budget = |budget, spent| ReasoningWish { budget: Some(budget), spent, ..effort("high") };
        assert_eq!(most(budget(7, 0), &[], "{{ reasoning_effort }}"), Some(7));
        assert_eq!(most(budget(7, 5), &[], ""), Some(2));
        assert_eq!(most(budget(7, 9), &[], ""), Some(0));
        assert_eq!(most(ReasoningWish { spent: 1000, ..effort("low") }, &[], ""), Some(24));
    }

    #[test]
    fn off_is_off_however_it_is_said() {
        assert_eq!(most(ReasoningWish { enable_thinking: Some(false), ..effort("high") }, &[], ""), Some(0));
        for switch in SWITCHES {
            assert_eq!(most(effort("high"), &[(switch, false)], ""), Some(0), "{switch}");
            assert_eq!(most(effort("none"), &[(switch, true)], ""), None, "{switch} has precedence");
        }
    }
}
