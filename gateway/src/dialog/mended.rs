//! Messages in an order that a template refuses, or of which it would drop some, rearranged into one that it accepts. A dialog with the
//! same beginning must give a prompt with the same beginning at every turn, so nothing moves across an answer.
//!
//! - A system message in a place where the template does not accept it becomes a part of the user's turn that follows it before the next
//!   answer, or else of the one before it, or else a turn of the user. Those at the beginning are joined into one.
//! - Consecutive turns of one role are joined.
//! - A user's text beside a tool's result becomes a part of that result.
//! - An answer without text and calls is left out.
//! - An answer with several calls becomes several answers of one call each, with its result.
//! - If a template has no calls at all, they are text of the answer, and their results are a turn of the user.
//!
//! Parts are joined by an empty line.

use super::Message;
use crate::text::template::{json, takes::Takes};
use std::borrow::Cow;

const JOIN: &str = "\n\n";

/// Rearranges messages for the template; `None` if it accepts them as they are.
pub(super) fn mended(messages: &[Message], takes: &Takes, continues: bool) -> Option<Vec<Message>> {
    let original = messages;
    let messages: Cow<'_, [Message]> = match (takes.calls, takes.several_calls) {
        (false, _) if has_calls(messages, 1) => messages.iter().map(spoken).collect(),
        (true, false) if has_calls(messages, 2) => one_call_each(messages).into(),
        _ => Cow::Borrowed(messages),
    };
    let last = messages.len().saturating_sub(1);
    let kept =
        messages.iter().enumerate().filter(|(place, message)| takes.silent_answer || !is_silent(message) || continues && *place == last);
    let kept: Vec<_> = kept.map(|(_, message)| message.clone()).collect();
    let leading = kept.iter().take_while(|message| is_system(message)).count();
    let mut out = Vec::with_capacity(kept.len());
    let mut rest = &kept[..];
    if takes.system {
        let (systems, others) = kept.split_at(leading);
        match systems {
            [first, _, ..] if !takes.later_systems => out.push(joined(first, systems)),
            systems => out.extend_from_slice(systems),
        }
        rest = others;
    }
    for run in rest.chunk_by(|a, b| is_answer(a) == is_answer(b)) {
        if is_answer(&run[0]) { answers(run, takes, &mut out) } else { asked(run, takes, &mut out) }
    }
    (out != original).then_some(out)
}

/// Whether an answer has at least `least` calls, or an output follows.
fn has_calls(messages: &[Message], least: usize) -> bool {
    messages.iter().any(|message| message.tool_calls.len() >= least || least == 1 && is_result(message))
}

/// Writes a call as text, as a model without a notation of its own would, and its output as the user's text.
fn spoken(message: &Message) -> Message {
    if is_result(message) {
        return Message { role: "user".into(), tool_call_id: None, name: None, ..message.clone() };
    }
    if message.tool_calls.is_empty() {
        return message.clone();
    }
    let calls = message.tool_calls.iter().map(|call| json::dumps(&serde_json::json!({"name": call.name, "arguments": call.arguments})));
    let parts: Vec<_> = message.content.iter().filter(|text| !text.is_empty()).cloned().chain(calls).collect();
    Message { content: Some(parts.join("\n")), tool_calls: Vec::new(), ..message.clone() }
}

fn one_call_each(messages: &[Message]) -> Vec<Message> {
    let mut out = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let Some((message, after)) = rest.split_first() {
        rest = after;
        if message.tool_calls.len() < 2 {
            out.push(message.clone());
            continue;
        }
        let end = rest.iter().position(|message| !is_result(message)).unwrap_or(rest.len());
        let (mut results, after): (Vec<_>, _) = (rest[..end].iter().collect(), &rest[end..]);
        rest = after;
        for (place, call) in message.tool_calls.iter().enumerate() {
            let said = if place == 0 { message.clone() } else { Message { role: message.role.clone(), ..Message::default() } };
            out.push(Message { tool_calls: vec![call.clone()], ..said });
            let returned = results.iter().position(|result| result.tool_call_id.as_deref() == Some(&call.id));
            out.extend(returned.map(|place| results.remove(place).clone()));
        }
        out.extend(results.into_iter().cloned());
    }
    out
}

fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

fn is_result(message: &Message) -> bool {
    matches!(message.role.as_str(), "tool" | "function")
}

fn is_answer(message: &Message) -> bool {
    message.role == "assistant"
}

fn is_silent(message: &Message) -> bool {
    let nothing = |text: &Option<String>| text.as_deref().is_none_or(str::is_empty);
    is_answer(message) && message.tool_calls.is_empty() && nothing(&message.content) && nothing(&message.reasoning)
}

fn answers(run: &[Message], takes: &Takes, out: &mut Vec<Message>) {
    for same in run.chunk_by(|a, b| a.tool_calls.is_empty() && b.tool_calls.is_empty()) {
        match same {
            [first, _, ..] if !takes.assistants_in_row => out.push(joined(first, same)),
            same => out.extend_from_slice(same),
        }
    }
}

/// Rearranges the turns between two answers: the user's, tools', and the system's.
fn asked(run: &[Message], takes: &Takes, out: &mut Vec<Message>) {
    let is_word = |message: &Message| message.role == "user" || is_system(message) && !takes.later_systems;
    let (first, last) = (run.iter().position(is_result), run.iter().rposition(is_result));
    if let (Some(first), Some(last)) = (first, last) {
        let before = run[..last].iter().any(is_word) && !takes.user_before_result;
        let after = run[first..].iter().any(is_word) && !takes.user_after_result;
        if before || after {
            let words = run.iter().filter(|message| is_word(message));
            let parts: Vec<_> = [&run[last]].into_iter().chain(words).cloned().collect();
            let others = run[..last].iter().chain(&run[last + 1..]).filter(|message| !is_word(message)).cloned();
            let results: Vec<_> = others.collect();
            out.extend(results);
            out.push(joined(&run[last], &parts));
            return;
        }
    }
    for same in run.chunk_by(|a, b| is_result(a) == is_result(b)) {
        if is_result(&same[0]) {
            out.extend_from_slice(same);
        } else if !takes.users_in_row && same.len() > 1 {
            out.push(as_user(same));
        } else if takes.later_systems || !same.iter().any(is_system) {
            out.extend_from_slice(same);
        } else {
            systems_to_users(same, out);
        }
    }
}

fn systems_to_users(turns: &[Message], out: &mut Vec<Message>) {
    let mut groups: Vec<&[Message]> = turns.chunk_by(|a, _| is_system(a)).collect();
    // System messages after the user's last turn are added to it.
    if let [.., _, last] = &groups[..]
        && last.iter().all(is_system)
    {
        let end = groups.len() - 2;
        let from = turns.len() - groups[end].len() - last.len();
        groups.truncate(end);
        groups.push(&turns[from..]);
    }
    out.extend(groups.into_iter().map(as_user));
}

/// The user's turn among them, with the contents of the others.
fn as_user(turns: &[Message]) -> Message {
    match turns.iter().find(|message| message.role == "user") {
        Some(user) => joined(user, turns),
        None => joined(&Message { role: "user".into(), name: None, ..turns[0].clone() }, turns),
    }
}

/// A message like `like`, with the contents of all.
fn joined(like: &Message, parts: &[Message]) -> Message {
    let text = |of: fn(&Message) -> Option<&String>| {
        let texts: Vec<_> = parts.iter().filter_map(of).map(String::as_str).collect();
        (!texts.is_empty()).then(|| texts.join(JOIN))
    };
    Message { content: text(|part| part.content.as_ref()), reasoning: text(|part| part.reasoning.as_ref()), ..like.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(turns: &str) -> Vec<Message> {
        turns
            .split_whitespace()
            .map(|turn| {
                let (role, content) = turn.split_once(':').unwrap();
                let role = match role {
                    "s" => "system",
                    "u" => "user",
                    "a" => "assistant",
                    "t" => "tool",
                    other => other,
                };
                Message { role: role.into(), content: Some(content.into()), ..Message::default() }
            })
            .collect()
    }

    fn mend(turns: &str, takes: &Takes) -> String {
        let given = messages(turns);
        let mended = mended(&given, takes, false).unwrap_or(given);
        let turn = |message: &Message| format!("{}:{}", &message.role[..1], message.content.as_deref().unwrap_or("-").replace(JOIN, "+"));
        mended.iter().map(turn).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_is_taken_stays() {
        for turns in ["u:1", "s:1 s:2 u:3 s:4 u:5 u:6 a:7 a:8 t:9 u:10"] {
            assert_eq!(mended(&messages(turns), &Takes::default(), false), None);
        }
    }

    #[test]
    fn systems_become_parts_of_the_users_turns() {
        let takes = Takes { later_systems: false, ..Takes::default() };
        for (given, expected) in [
            ("s:1 u:2 a:3 u:4", "s:1 u:2 a:3 u:4"),
            ("s:1 s:2 u:3", "s:1+2 u:3"),
            ("s:1 u:2 s:3", "s:1 u:2+3"),
            ("s:1 u:2 s:3 a:4", "s:1 u:2+3 a:4"),
            ("u:1 s:2 u:3 a:4 s:5 u:6", "u:1 u:2+3 a:4 u:5+6"),
            ("u:1 s:2 s:3 u:4 s:5 s:6", "u:1 u:2+3+4+5+6"),
            ("u:1 a:2 s:3 a:4", "u:1 a:2 u:3 a:4"),
            ("u:1 a:2 t:3 s:4", "u:1 a:2 t:3 u:4"),
            ("u:1 a:2 s:3 t:4", "u:1 a:2 u:3 t:4"),
        ] {
            assert_eq!(mend(given, &takes), expected, "{given}");
        }
        assert_eq!(mend("s:1 u:2 a:3 s:4 u:5", &Takes { system: false, ..takes }), "u:1+2 a:3 u:4+5");
    }

    #[test]
    fn the_beginning_of_a_dialog_stays_the_same() {
        let takes = Takes::default().least();
        let whole = "s:1 u:2 s:3 a:4 t:5 u:6 s:7 a:8 a:9 u:10 u:11 a:12 s:13 u:14";
        let of_whole = mend(whole, &takes);
        assert_eq!(of_whole, "s:1 u:2+3 a:4 t:5+6+7 a:8+9 u:10+11 a:12 u:13+14");
        for begun in ["s:1 u:2 s:3", "s:1 u:2 s:3 a:4 t:5 u:6 s:7", "s:1 u:2 s:3 a:4 t:5 u:6 s:7 a:8 a:9 u:10 u:11"] {
            assert!(of_whole.starts_with(&mend(begun, &takes)), "{begun}");
        }
    }

    #[test]
    fn calls_that_a_template_does_not_know() {
        let call = |id: &str| super::super::ToolCall::new(id, "f", "{\"a\": 1}");
        let mut given = messages("u:1 a:2 t:3 t:4 u:5");
        given[1].tool_calls = vec![call("x"), call("y")];
        given[2].tool_call_id = Some("y".into());
        given[3].tool_call_id = Some("x".into());
        let told = |takes: &Takes| {
            let mended = mended(&given, takes, false).unwrap();
            let turn = |message: &Message| {
                format!("{}:{}:{}", &message.role[..1], message.content.as_deref().unwrap_or("-"), message.tool_calls.len())
            };
            mended.iter().map(turn).collect::<Vec<_>>()
        };
        assert_eq!(told(&Takes { several_calls: false, ..Takes::default() }), ["u:1:0", "a:2:1", "t:4:0", "a:-:1", "t:3:0", "u:5:0"]);
        let spoken = r#"{"name": "f", "arguments": {"a": 1}}"#;
        let answer = format!("a:2\n{spoken}\n{spoken}:0");
        assert_eq!(told(&Takes { calls: false, ..Takes::default() }), ["u:1:0", answer.as_str(), "u:3:0", "u:4:0", "u:5:0"]);
    }

    #[test]
    fn words_beside_results_and_empty_answers() {
        let takes = Takes { user_after_result: false, user_before_result: false, silent_answer: false, ..Takes::default() };
        assert_eq!(mend("u:1 a:2 u:3 t:4 u:5 t:6 u:7", &takes), "u:1 a:2 t:4 t:6+3+5+7");
        assert_eq!(mend("u:1 a: u:2", &Takes { users_in_row: false, ..takes }), "u:1+2");
    }
}
