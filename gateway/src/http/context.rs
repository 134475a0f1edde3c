//! A dialog fitted into the model's window: the system prompt and the newest turns stay.

use super::{
    errors::ApiError,
    parse::{Options, in_range},
};
use crate::{
    context::{self, Limits, Strategy},
    dialog::{Dialog, Message},
    gateway::Gateway,
};
use serde::{Deserialize, Serialize};

/// The share of the window that a prompt may have before turns are left out.
const WINDOW_SHARE: f64 = 0.75;
/// Tokens that a template puts around a message, where it cannot be asked.
const MARKS: u64 = 8;
/// Attempts to fit a prompt whose parts take more tokens together than by themselves.
const ATTEMPTS_MAX: usize = 4;

/// `context` in a chat's body.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected `none`, `slide`, `steps`, or an object with `strategy`, `turns_max` and `window_share`")]
pub enum ContextField {
    Strategy(Strategy),
    Wish(ContextWish),
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContextWish {
    strategy: Option<Strategy>,
    turns_max: Option<usize>,
    window_share: Option<f64>,
}

/// In `usage.tidemill`: what the model was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ContextUsage {
    pub strategy: Strategy,
    /// Of the whole dialog: from a user's message up to the next.
    pub turns: usize,
    pub turns_left_out: usize,
    pub tokens_left_out: u64,
}

/// Tokens of each turn, and its messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub tokens: u64,
    pub messages: u64,
}

/// `context`, checked. Without one, `usual` is done.
pub fn wanted(field: Option<ContextField>, usual: Strategy) -> Result<(Strategy, ContextWish), ApiError> {
    let wish = match field {
        None => ContextWish::default(),
        Some(ContextField::Strategy(strategy)) => ContextWish { strategy: Some(strategy), ..ContextWish::default() },
        Some(ContextField::Wish(wish)) => wish,
    };
    wish.turns_max.map(|turns| in_range("context.turns_max", turns, 1..)).transpose()?;
    wish.window_share.map(|share| in_range("context.window_share", share, 0.05..=1.0)).transpose()?;
    // Who sets a limit wants it kept.
    let set = wish.turns_max.is_some() || wish.window_share.is_some();
    Ok((wish.strategy.unwrap_or(if set { Strategy::Steps } else { usual }), wish))
}

/// Leaves out what does not fit. `costs`: of each turn, as far as they are known (else they are counted).
pub fn fit(
    gateway: &Gateway,
    param: &str,
    mut dialog: Dialog,
    costs: Option<Vec<Cost>>,
    (strategy, wish): (Strategy, ContextWish),
    options: &Options,
) -> Result<(Dialog, Option<ContextUsage>), ApiError> {
    if strategy == Strategy::None {
        return Ok((dialog, None));
    }
    let fixed = dialog.messages.iter().position(|message| !instructs(message)).unwrap_or(dialog.messages.len());
    let said = dialog.messages.split_off(fixed);
    let starts: Vec<_> = starts(&said).collect();
    let marks = marks(gateway, &dialog);
    let costs = costs.filter(|costs| costs.len() == starts.len()).unwrap_or_else(|| counted(gateway, &said, &starts));
    let costs: Vec<_> = costs.iter().map(|cost| cost.tokens + cost.messages * marks).collect();
    let window = u64::from(gateway.context_tokens()?);
    let answer = u64::from(options.max_tokens.unwrap_or(1));
    let own: u64 = dialog.messages.iter().map(|message| tokens(gateway, message) + marks).sum();
    let share = (window as f64 * wish.window_share.unwrap_or(WINDOW_SHARE)) as u64;
    let mut limits = Limits { turns: wish.turns_max.unwrap_or(usize::MAX), tokens: share.saturating_sub(own) };
    let total: u64 = costs.iter().sum();
    let instructions = std::mem::take(&mut dialog.messages);
    for attempt in 1.. {
        let left_out = context::left_out(strategy, limits, &costs);
        let from = starts.get(left_out).copied().unwrap_or(0);
        dialog.messages = instructions.iter().chain(&said[from..]).cloned().collect();
        let usage =
            ContextUsage { strategy, turns: costs.len(), turns_left_out: left_out, tokens_left_out: costs[..left_out].iter().sum() };
        let given = total - usage.tokens_left_out;
        let last = attempt == ATTEMPTS_MAX || left_out + 1 >= costs.len();
        // Counted by parts, it is a rough guess of what tools take, and exact to a few tokens otherwise: far from the edge that is enough.
        if last || (dialog.tools.is_empty() && own + given + answer <= window / 2) {
            return Ok((dialog, Some(usage)));
        }
        let exact = gateway.prompt_only(param, &dialog)?.len() as u64;
        if exact + answer <= window {
            return Ok((dialog, Some(usage)));
        }
        limits.tokens = given.min(limits.tokens).saturating_sub(exact + answer - window);
    }
    unreachable!("the last attempt returns")
}

fn instructs(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// The places at which turns begin: with what a user says. What comes before the first belongs to it.
fn starts(messages: &[Message]) -> impl Iterator<Item = usize> {
    let mut user_spoke = false;
    messages.iter().enumerate().filter_map(move |(place, message)| {
        let user = message.role == "user";
        let begins = place == 0 || (user && user_spoke);
        user_spoke |= user;
        begins.then_some(place)
    })
}

fn counted(gateway: &Gateway, said: &[Message], starts: &[usize]) -> Vec<Cost> {
    let ends = starts.iter().skip(1).copied().chain([said.len()]);
    let cost = |(start, end): (&usize, usize)| Cost {
        tokens: said[*start..end].iter().map(|message| tokens(gateway, message)).sum(),
        messages: (end - start) as u64,
    };
    starts.iter().zip(ends).map(cost).collect()
}

fn tokens(gateway: &Gateway, message: &Message) -> u64 {
    let count = |text: &str| gateway.text().tokenizer.encode(text, false).map_or(0, |tokens| tokens.len() as u64);
    let calls = message.tool_calls.iter().map(|call| count(&call.name) + count(&call.arguments.to_string()));
    message.content.as_deref().map_or(0, count) + calls.sum::<u64>()
}

/// Tokens that the template puts around a message.
fn marks(gateway: &Gateway, dialog: &Dialog) -> u64 {
    let said = |role: &str| Message { role: role.into(), content: Some("a".into()), ..Message::default() };
    let rendered = |messages: Vec<Message>| {
        let probe = Dialog { messages, template_kwargs: dialog.template_kwargs.clone(), ..Dialog::default() };
        gateway.prompt_only("messages", &probe).map(|prompt| prompt.len() as u64)
    };
    let letter = gateway.text().tokenizer.encode("a", false).map_or(1, |tokens| tokens.len() as u64);
    match (rendered(vec![said("user")]), rendered(vec![said("user"), said("assistant"), said("user")])) {
        (Ok(one), Ok(three)) => three.saturating_sub(one).div_ceil(2).saturating_sub(letter),
        _ => MARKS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_begin_with_what_a_user_says() {
        let of = |roles: &str| {
            let message = |role: &str| Message { role: role.into(), ..Message::default() };
            starts(&roles.split_whitespace().map(message).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(of("user assistant user assistant tool assistant user"), [0, 2, 6]);
        assert_eq!(of("assistant user assistant user"), [0, 3]);
        assert_eq!(of("user user"), [0, 1]);
        assert!(of("").is_empty());
    }

    #[test]
    fn who_sets_a_limit_wants_it_kept() {
        let strategy = |json: &str, usual| wanted(serde_json::from_str(json).unwrap(), usual).map(|(strategy, _)| strategy).ok();
        assert_eq!(strategy("null", Strategy::None), Some(Strategy::None));
        assert_eq!(strategy("null", Strategy::Steps), Some(Strategy::Steps));
        assert_eq!(strategy(r#""none""#, Strategy::Steps), Some(Strategy::None));
        assert_eq!(strategy(r#"{"turns_max": 10}"#, Strategy::None), Some(Strategy::Steps));
        assert_eq!(strategy(r#"{"turns_max": 0}"#, Strategy::None), None);
        assert_eq!(strategy(r#"{"window_share": 1.5}"#, Strategy::None), None);
        assert!(serde_json::from_str::<ContextField>(r#""all""#).is_err());
    }
}
