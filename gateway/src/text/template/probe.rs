//! The forms of messages that a template accepts, of those that not every template does: detected once, by rendering some.
//!
//! Only a template's code shows what it refuses, and some silently drop what they do not know. So each form of a dialog is tried with texts
//! that occur nowhere else, and counts as accepted if all of them appear in the result.

use super::{ChatInput, ChatTemplate, takes::Takes};
use minijinja::Value;
use serde_json::{Value as Json, json};
use std::time::SystemTime;

/// Texts to look for.
const SYSTEM: &str = "Probesystem";
const LATER: &str = "Probelater";
const LAST: &str = "Probelast";
const USER: &str = "Probeuser";
const SECOND: &str = "Probesecond";
const ANSWER: &str = "Probeanswer";
const AGAIN: &str = "Probeagain";
const CALLED: &str = "probe_called";
const VALUE: &str = "Probevalue";
const RETURNED: &str = "Probereturned";
/// Nine letters and digits: templates with short ids check them.
const ID: &str = "probecall";

impl Takes {
    pub(super) fn found(template: &ChatTemplate) -> Self {
        let object = json!({"key": VALUE});
        let said = |role: &str, text: &str| json!({"role": role, "content": text});
        let shows = |messages: &[Json], texts: &[&str]| shows(template, messages, texts);
        let (system, user, second) = (said("system", SYSTEM), said("user", USER), said("user", SECOND));
        let answer = said("assistant", ANSWER);
        let returned = json!({"role": "tool", "content": RETURNED, "tool_call_id": ID, "name": CALLED});

        // Contents beside calls, and forms of arguments: the first combination that shows the call completely.
        let ways = [(json!(""), false), (json!(""), true), (Json::Null, false), (Json::Null, true)];
        let called = |(content, as_text): &(Json, bool), arguments: &Json| {
            let arguments = if *as_text && !arguments.is_string() { json!(arguments.to_string()) } else { arguments.clone() };
            [user.clone(), calling(content, &arguments), returned.clone()]
        };
        let way = ways.iter().find(|way| shows(&called(way, &object), &[CALLED, VALUE]) && !prints_python(template, &called(way, &object)));
        let way = way.unwrap_or(&ways[0]);
        let [user_1, call, result] = called(way, &object);
        let makes_calls = shows(&called(way, &object), &[CALLED]);
        let takes = |arguments: &Json, text: &str| !makes_calls || shows(&called(way, arguments), &[CALLED, text]);

        let renders = |messages: &[Json]| rendered(template, messages).is_some();
        let twice = {
            let mut call = call.clone();
            let another = call["tool_calls"][0].clone();
            call["tool_calls"].as_array_mut().into_iter().for_each(|calls| calls.push(another.clone()));
            call
        };
        let calls = renders(&[user_1.clone(), call.clone(), result.clone(), answer.clone(), second.clone()]);
        let several = renders(&[user_1.clone(), twice, result.clone(), result.clone(), answer.clone(), second.clone()]);

        let leading = shows(&[system.clone(), user.clone()], &[SYSTEM, USER]);
        let later = [system, user.clone(), said("system", LATER), answer.clone(), second.clone(), said("system", LAST)];
        Self {
            arguments_as_text: way.1,
            text_arguments: takes(&json!(format!("{{\"key\": \"{VALUE}")), VALUE),
            other_arguments: takes(&json!([VALUE]), VALUE) && takes(&json!(17), "17"),
            none_beside_calls: way.0.is_null(),
            system: leading,
            later_systems: leading && shows(&later, &[SYSTEM, USER, LATER, ANSWER, SECOND, LAST]),
            users_in_row: shows(&[user.clone(), second.clone()], &[USER, SECOND]),
            assistants_in_row: shows(
                &[user.clone(), answer.clone(), said("assistant", AGAIN), second.clone()],
                &[USER, ANSWER, AGAIN, SECOND],
            ),
            user_after_result: shows(&[user_1.clone(), call.clone(), result.clone(), second.clone()], &[USER, SECOND]),
            user_before_result: shows(&[user_1, call, second.clone(), result], &[USER, SECOND]),
            silent_answer: shows(&[user, said("assistant", ""), second], &[USER, SECOND]),
            calls,
            several_calls: !calls || several,
        }
    }
}

fn calling(content: &Json, arguments: &Json) -> Json {
    let call = json!({"id": ID, "type": "function", "function": {"name": CALLED, "arguments": arguments}});
    json!({"role": "assistant", "content": content, "tool_calls": [call]})
}

fn rendered(template: &ChatTemplate, messages: &[Json]) -> Option<String> {
    let messages = messages.iter().map(|message| Value::from(minijinja::value::Serde(message))).collect();
    template.render(ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() }, SystemTime::UNIX_EPOCH).ok()
}

fn shows(template: &ChatTemplate, messages: &[Json], texts: &[&str]) -> bool {
    rendered(template, messages).is_some_and(|prompt| texts.iter().all(|text| prompt.contains(text)))
}

/// Whether arguments are rendered as Python prints objects, in which no model writes calls.
fn prints_python(template: &ChatTemplate, messages: &[Json]) -> bool {
    rendered(template, messages).is_some_and(|prompt| prompt.contains("{'key'"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::config::ModelConfig;

    fn takes(source: &str) -> Takes {
        ChatTemplate::new(source.into(), &ModelConfig::default()).unwrap().takes.clone()
    }

    #[test]
    fn a_template_that_takes_everything_needs_nothing() {
        let chatml = "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}";
        assert_eq!(takes(chatml), Takes::default());
    }

    #[test]
    fn what_is_refused_or_dropped_is_noticed() {
        let alternating = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
        let found = takes(alternating);
        assert!(!found.system && !found.later_systems && !found.users_in_row && !found.assistants_in_row && !found.calls);
        let one =
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}{% endfor %}";
        assert_eq!(takes(one), Takes { several_calls: false, ..Takes::default() });
        let dropping = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(takes(dropping), Takes { later_systems: false, ..Takes::default() });
    }

    #[test]
    fn arguments_are_text_where_they_are_added_to_text() {
        let adding = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}";
        assert_eq!(takes(adding), Takes { arguments_as_text: true, ..Takes::default() });
        let printing = adding.replace(" + ", " }}{{ ");
        assert!(takes(&printing).arguments_as_text, "Python's way to print an object is no JSON");
        let walking = adding.replace(
            "c.function.name + c.function.arguments",
            "c.function.name }}{% for k, v in c.function.arguments|items %}{{ k ~ v }}{% endfor %}{{ ''",
        );
        assert_eq!(takes(&walking), Takes { text_arguments: false, other_arguments: false, ..Takes::default() });
    }

    #[test]
    fn calls_that_show_only_beside_none_are_found() {
        let asking = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(takes(asking), Takes { none_beside_calls: true, ..Takes::default() });
    }
}
