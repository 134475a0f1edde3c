//! A dialog in the shape that its chat template expects: OpenAI's messages, with an empty text in place of missing content, and calls'
//! arguments as objects, or as text if the template adds them to text.

use super::{
    Dialog, Message, ToolCall, ToolChoice,
    mended::mended,
    thinking::{EFFORT, SWITCHES},
};
use crate::text::{
    template::{ChatInput, ChatTemplate, TemplateError, json, takes::Takes},
    tool::Tool,
};
use minijinja::{Value, value::Serde};
use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::SystemTime,
};

/// The field for arguments that are not an object, where an object is needed. Clients of `/v1/messages` get them under the same name.
pub(crate) const OTHER_ARGUMENTS: &str = "arguments";
/// Signs of templates that refuse ids of calls that are not nine letters and digits (Mistral's).
const SHORT_ID_SIGNS: [&str; 2] = ["length != 9", "length == 9"];

pub(super) fn render(dialog: &Dialog, template: &ChatTemplate, now: SystemTime) -> Result<String, TemplateError> {
    let with = |takes: &Takes| {
        let mended = mended(&dialog.messages, takes, dialog.continues);
        rendered(dialog, mended.as_ref().unwrap_or(&dialog.messages), takes, template, now)
    };
    let takes = template.takes();
    with(takes).or_else(|refused| match refused.is_refusal() {
        // The template was only tried with short dialogs: this one may differ.
        true => with(&takes.least()).map_err(|_| refused),
        false => Err(refused),
    })
}

fn rendered(
    dialog: &Dialog,
    messages: &[Message],
    takes: &Takes,
    template: &ChatTemplate,
    now: SystemTime,
) -> Result<String, TemplateError> {
    let knows_developers = template.mentions("developer");
    let id = if SHORT_ID_SIGNS.iter().any(|sign| template.mentions(sign)) { short_id } else { str::to_owned };
    let messages = messages.iter().map(|message| message_value(message, knows_developers, takes, id));
    let tools = match dialog.tool_choice {
        ToolChoice::None => None,
        _ => Some(dialog.tools.iter().map(tool_value).collect()).filter(|tools: &Vec<_>| !tools.is_empty()),
    };
    let input = ChatInput { messages: messages.collect(), tools, add_generation_prompt: !dialog.continues, kwargs: kwargs(dialog) };
    template.render(input, now)
}

/// Makes an id of nine letters and digits; different ids stay different.
fn short_id(id: &str) -> String {
    const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    let hash = hasher.finish();
    (0..9).map(|place| char::from(ALPHABET[(hash / 36u64.pow(place) % 36) as usize])).collect()
}

fn message_value(message: &Message, knows_developers: bool, takes: &Takes, id: fn(&str) -> String) -> Value {
    let role = match message.role.as_str() {
        "developer" if !knows_developers => "system",
        role => role,
    };
    let content = message.content.as_deref().unwrap_or_default();
    let is_none = content.is_empty() && !message.tool_calls.is_empty() && takes.none_beside_calls;
    let mut fields = vec![("role", Value::from(role)), ("content", if is_none { Value::from(()) } else { Value::from(content) })];
    if let Some(reasoning) = &message.reasoning {
        // Templates use one of these names.
        fields.extend(["reasoning_content", "reasoning", "thinking"].map(|name| (name, Value::from(reasoning.as_str()))));
    }
    if !message.tool_calls.is_empty() {
        fields.push(("tool_calls", message.tool_calls.iter().map(|call| call_value(call, takes, id)).collect()));
    }
    fields.extend(message.tool_call_id.as_deref().map(|call| ("tool_call_id", Value::from(id(call)))));
    fields.extend(message.name.as_deref().map(|name| ("name", Value::from(name))));
    Value::from_pairs(fields.into_iter().chain(message.others.iter().map(|(name, value)| (name.as_str(), value.clone()))))
}

fn call_value(call: &ToolCall, takes: &Takes, id: fn(&str) -> String) -> Value {
    let taken = |arguments: &serde_json::Value| match arguments {
        serde_json::Value::Object(_) => true,
        serde_json::Value::String(_) => takes.text_arguments,
        _ => takes.other_arguments,
    };
    let arguments = match &call.arguments {
        serde_json::Value::String(text) if takes.arguments_as_text => Value::from(text.as_str()),
        arguments if takes.arguments_as_text => Value::from(json::dumps(arguments)),
        arguments if taken(arguments) => Value::from(Serde(arguments)),
        other => Value::from_pairs([(OTHER_ARGUMENTS, Value::from(Serde(other)))]),
    };
    let function = [("name", Value::from(call.name.as_str())), ("arguments", arguments)];
    Value::from_pairs([("id", Value::from(id(&call.id))), ("type", Value::from("function")), ("function", Value::from_pairs(function))])
}

/// Writes a tool, always with these fields in this order, so that the same tools give the same prompt in any protocol.
fn tool_value(tool: &Tool) -> Value {
    let description = tool.description.as_deref().map(|description| ("description", Value::from(description)));
    let parameters = tool.parameters.as_ref().map(|parameters| ("parameters", Value::from(Serde(parameters))));
    let function = [("name", Value::from(tool.name.as_str()))].into_iter().chain(description).chain(parameters);
    Value::from_pairs([("type", Value::from("function")), ("function", Value::from_pairs(function))])
}

fn kwargs(dialog: &Dialog) -> BTreeMap<String, Value> {
    let effort = dialog.reasoning.effort.as_deref();
    let mut kwargs = BTreeMap::new();
    kwargs.extend(effort.map(|effort| (EFFORT.to_owned(), Value::from(effort))));
    // Seed-OSS tells its models.
    kwargs.extend(dialog.reasoning.budget.map(|budget| ("thinking_budget".to_owned(), Value::from(budget))));
    let thinks = dialog.reasoning.thinks();
    kwargs.extend(thinks.into_iter().flat_map(|thinks| SWITCHES.map(|name| (name.to_owned(), Value::from(thinks)))));
    kwargs.extend(dialog.template_kwargs.iter().map(|(name, value)| (name.clone(), value.clone())));
    kwargs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dialog::thinking::ReasoningWish, text::config::ModelConfig};
    use serde_json::json;

    /// Writes the dialog as JSON for the template.
    fn given(dialog: &Dialog, extra_text: &str) -> serde_json::Value {
        let source = "{{ {'messages': messages, 'tools': tools, 'prompt': add_generation_prompt, 'effort': reasoning_effort, \
                      'thinks': enable_thinking} | tojson }}";
        let template = ChatTemplate::new(format!("{source}{{# {extra_text} #}}"), &ModelConfig::default()).unwrap();
        serde_json::from_str(&render(dialog, &template, SystemTime::UNIX_EPOCH).unwrap()).unwrap()
    }

    fn calling() -> Dialog {
        let call = ToolCall::new("call_1", "look", r#"{"z": 1.0, "a": {"y": [], "b": null}}"#);
        let assistant = Message { role: "assistant".into(), reasoning: Some("hm".into()), tool_calls: vec![call], ..Message::default() };
        let answer = Message { role: "tool".into(), content: Some("2".into()), tool_call_id: Some("call_1".into()), ..Message::default() };
        let parameters = json!({"type": "object", "properties": {"z": {}, "a": {}}});
        let tool = Tool { name: "look".into(), parameters: Some(parameters), ..Tool::default() };
        Dialog { messages: vec![assistant, answer], tools: vec![tool], ..Dialog::default() }
    }

    #[test]
    fn templates_get_arguments_as_objects_in_their_own_order() {
        let given = given(&calling(), "");
        assert_eq!(
            given["messages"].to_string(),
            json!([
                {"role": "assistant", "content": "", "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm", "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {
                        "name": "look", "arguments": {"z": 1.0, "a": {"y": [], "b": null}}}}]},
                {"role": "tool", "content": "2", "tool_call_id": "call_1"},
            ])
            .to_string()
        );
        let tool =
            json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}]);
        assert_eq!(given["tools"].to_string(), tool.to_string());
    }

    #[test]
    fn tools_that_must_not_be_called_are_not_told() {
        assert_eq!(given(&Dialog { tool_choice: ToolChoice::None, ..calling() }, "")["tools"], json!(null));
        assert_eq!(given(&Dialog { tools: vec![], ..calling() }, "")["tools"], json!(null));
    }

    #[test]
    fn efforts_reach_the_template_and_kwargs_win() {
        let wish = |effort: Option<&str>, enable_thinking| {
            let reasoning = ReasoningWish { effort: effort.map(str::to_owned), enable_thinking, ..ReasoningWish::default() };
            let given = given(&Dialog { reasoning, ..calling() }, "");
            (given["effort"].clone(), given["thinks"].clone())
        };
        assert_eq!(wish(None, None), (json!(null), json!(null)));
        assert_eq!(wish(Some("low"), None), (json!("low"), json!(true)));
        assert_eq!(wish(Some("none"), None), (json!("none"), json!(false)));
        assert_eq!(wish(Some("high"), Some(false)), (json!("high"), json!(false)));
        let reasoning = ReasoningWish { effort: Some("low".into()), ..ReasoningWish::default() };
        let template_kwargs = [("enable_thinking".to_owned(), Value::from(false))].into();
        assert_eq!(given(&Dialog { reasoning, template_kwargs, ..calling() }, "")["thinks"], json!(false));
    }

    #[test]
    fn a_developer_is_the_system_where_the_template_knows_none() {
        let message = Message { role: "developer".into(), content: Some("x".into()), ..Message::default() };
        let dialog = Dialog { messages: vec![message], ..Dialog::default() };
        assert_eq!(given(&dialog, "")["messages"][0]["role"], json!("system"));
        assert_eq!(given(&dialog, "developer")["messages"][0]["role"], json!("developer"));
    }

    #[test]
    fn ids_are_short_where_the_template_wants_them_so() {
        let ids = |extra| {
            let given = given(&calling(), extra);
            let [call, answer] = [&given["messages"][0]["tool_calls"][0]["id"], &given["messages"][1]["tool_call_id"]];
            assert_eq!(call, answer);
            call.as_str().unwrap().to_owned()
        };
        assert_eq!(ids(""), "call_1");
        let short = ids("x.id|length != 9");
        assert!(short.len() == 9 && short.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{short}");
        assert_eq!(short_id("abcDEF123"), "abcDEF123");
    }
}
