//! Items of a response's or conversation's history: as clients send them, as stored, and as turns of a dialog.

use crate::{
    base::json,
    dialog::{Message, ToolCall},
    requests::{custom, error::ApiError},
    store::Item,
    text::tokenizer::Tokenizer,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// The name of the tool that `local_shell_call` calls.
const LOCAL_SHELL: &str = "local_shell";
/// The maximum number of items in one request.
pub(crate) const ITEMS_MAX: usize = 4096;

/// The content of an item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ItemContent {
    Message {
        role: String,
        text: String,
    },
    Thought(String),
    Call(ToolCall),
    Returned {
        call_id: String,
        text: String,
    },
    /// A stored item, named by its id.
    Reference(String),
    /// An item that is not shown to the model, such as a call of a tool that ran elsewhere.
    Nothing,
}

/// A client's item, parsed.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) said: ItemContent,
    /// The item as it will be stored, except for its id.
    body: Map<String, Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Fields {
    r#type: Option<String>,
    id: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    summary: Option<Vec<Part>>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<Value>,
    input: Option<String>,
    action: Option<Value>,
    output: Option<Content>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of content parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

/// Reads an item. `param` is its field, for errors.
pub(crate) fn understand(param: &str, item: Value) -> Result<Sent, ApiError> {
    let Value::Object(mut body) = item else {
        return Err(ApiError::invalid(param, format!("`{param}` must be an object")));
    };
    let fields: Fields =
        serde_json::from_value(Value::Object(body.clone())).map_err(|error| ApiError::invalid(param, format!("`{param}`: {error}")))?;
    let needed = |name: &str, value: Option<String>| {
        value.ok_or_else(|| ApiError::invalid(format!("{param}.{name}"), format!("`{param}` needs `{name}`")))
    };
    // OpenAI lets clients omit a message's type.
    let kind = fields.r#type.unwrap_or_else(|| "message".to_owned());
    let said = match kind.as_str() {
        "message" => {
            let role = needed("role", fields.role)?;
            if !["user", "assistant", "system", "developer"].contains(&role.as_str()) {
                let message = format!("`{param}.role` is `{role}`: it must be `user`, `assistant`, `system` or `developer`");
                return Err(ApiError::invalid(format!("{param}.role"), message));
            }
            let content = match fields.content {
                // Only an assistant's message may be empty.
                None if role == "assistant" => {
                    body.insert("content".into(), "".into());
                    Content::Text(String::new())
                }
                content => content.ok_or_else(|| ApiError::invalid(format!("{param}.content"), format!("`{param}` needs `content`")))?,
            };
            let text = text(&format!("{param}.content"), content)?;
            complete_content(&mut body, &role);
            ItemContent::Message { role, text }
        }
        "reasoning" => {
            let content = match fields.content {
                Some(content) => text(&format!("{param}.content"), content)?,
                None => String::new(),
            };
            let summary = text(&format!("{param}.summary"), Content::Parts(fields.summary.unwrap_or_default()))?;
            ItemContent::Thought(if content.is_empty() { summary } else { content })
        }
        "function_call" => {
            let (call_id, name) = (needed("call_id", fields.call_id)?, needed("name", fields.name)?);
            ItemContent::Call(match fields.arguments {
                None | Some(Value::Null) => ToolCall::new(call_id, name, ""),
                Some(Value::String(text)) => ToolCall::new(call_id, name, &text),
                Some(arguments) => ToolCall { id: call_id, name, arguments },
            })
        }
        "custom_tool_call" => {
            let (id, name) = (needed("call_id", fields.call_id)?, needed("name", fields.name)?);
            ItemContent::Call(ToolCall { id, name, arguments: custom::arguments(fields.input.unwrap_or_default()) })
        }
        "local_shell_call" => {
            let id = needed("call_id", fields.call_id.or(fields.id))?;
            ItemContent::Call(ToolCall { id, name: LOCAL_SHELL.into(), arguments: fields.action.unwrap_or_else(|| json!({})) })
        }
        "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" => {
            let output = fields.output.unwrap_or_else(|| Content::Text(String::new()));
            ItemContent::Returned {
                call_id: needed("call_id", fields.call_id.or(fields.id))?,
                text: text(&format!("{param}.output"), output)?,
            }
        }
        // Their results are part of the answer that followed.
        "web_search_call" | "file_search_call" | "code_interpreter_call" | "image_generation_call" | "mcp_call" | "mcp_list_tools" => {
            ItemContent::Nothing
        }
        "item_reference" => ItemContent::Reference(needed("id", fields.id)?),
        other => {
            let message = format!("`{param}` is of type `{other}`: items are messages, reasoning, function calls and their outputs");
            return Err(ApiError::invalid(format!("{param}.type"), message));
        }
    };
    body.remove("id");
    body.insert("type".into(), kind.into());
    body.entry("status").or_insert_with(|| "completed".into());
    Ok(Sent { said, body })
}

/// Reads a stored item.
pub(crate) fn recall(item: &Item) -> Result<(Value, ItemContent), ApiError> {
    let broken = |reason: String| ApiError::internal(format!("the stored item `{}` cannot be read: {reason}", item.id));
    let value: Value = json::from_slice(item.body.as_bytes()).map_err(|error| broken(error.to_string()))?;
    let sent = understand("item", value.clone()).map_err(|error| broken(error.message().to_owned()))?;
    Ok((value, sent.said))
}

impl ItemContent {
    /// The text that makes up most of a tokenizer's work.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Message { text, .. } | Self::Thought(text) | Self::Returned { text, .. } => text,
            Self::Call(call) => &call.name,
            Self::Reference(_) | Self::Nothing => "",
        }
    }

    /// Counts the tokens of the text, without those that a template puts around it.
    pub(crate) fn tokens(&self, tokenizer: &Tokenizer) -> u32 {
        let tokens = |text: &str| tokenizer.encode(text, false).map_or(0, |tokens| tokens.len() as u32);
        match self {
            Self::Message { text, .. } | Self::Thought(text) | Self::Returned { text, .. } => tokens(text),
            Self::Call(call) => tokens(&call.name) + tokens(&call.arguments.to_string()),
            Self::Reference(_) | Self::Nothing => 0,
        }
    }
}

impl Sent {
    /// The item in its stored and listed form.
    pub(crate) fn named(&self, id: String) -> Item {
        let mut body = Map::new();
        body.insert("id".into(), id.clone().into());
        body.extend(self.body.iter().map(|(name, value)| (name.clone(), value.clone())));
        Item { id, body: Value::Object(body).to_string(), tokens: 0 }
    }

    pub(crate) fn prefix(&self) -> &'static str {
        match self.said {
            ItemContent::Message { .. } | ItemContent::Reference(_) => "msg_",
            ItemContent::Thought(_) => "rs_",
            ItemContent::Call(_) => "fc_",
            ItemContent::Returned { .. } => "fco_",
            ItemContent::Nothing => "ht_",
        }
    }

    /// Makes an id that follows from the item and all before it: a client that sends its whole history each time gets each item stored
    /// once.
    pub(crate) fn chained_id(&self, before: &str) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(before.as_bytes()).update(b"\0").update(Value::Object(self.body.clone()).to_string().as_bytes());
        let digest = u128::from_le_bytes(hasher.finalize().as_bytes()[..16].try_into().expect("a digest has 32 bytes"));
        format!("{}{digest:032x}", self.prefix())
    }
}

/// Turns a message's content into a list of parts, the form in which it is listed.
fn complete_content(body: &mut Map<String, Value>, role: &str) {
    if let Some(Value::String(text)) = body.get("content") {
        let part = match role {
            "assistant" => json!({"type": "output_text", "text": text, "annotations": []}),
            _ => json!({"type": "input_text", "text": text}),
        };
        body.insert("content".into(), json!([part]));
    }
}

/// Joins a content's parts by line breaks, as in chat: templates expect text.
fn text(param: &str, content: Content) -> Result<String, ApiError> {
    let parts = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(parts) => parts,
    };
    let text = |part: Part| match (part.r#type.as_str(), part.text, part.refusal) {
        ("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text", Some(text), _) => Ok(text),
        ("refusal", _, Some(refusal)) => Ok(refusal),
        ("input_image" | "image_url" | "image", ..) => Err(ApiError::no_images(param)),
        (known @ ("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" | "refusal"), ..) => {
            Err(ApiError::invalid(param, format!("a content part of type `{known}` needs its text")))
        }
        (other, ..) => Err(ApiError::invalid(param, format!("content parts of type `{other}` are not supported: this model reads text"))),
    };
    Ok(parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Groups items into turns. Reasoning, text and calls of one answer are items of their own; to a template they are one message.
pub(crate) fn turns(said: impl IntoIterator<Item = ItemContent>) -> Vec<Message> {
    let mut turns: Vec<Message> = Vec::new();
    let mut names = HashMap::new();
    for said in said {
        match said {
            ItemContent::Message { role, text } if role == "assistant" => {
                let turn = assistant(&mut turns, |turn| turn.content.is_none() && turn.tool_calls.is_empty());
                turn.content = Some(text);
            }
            ItemContent::Message { role, text } => turns.push(Message { role, content: Some(text), ..Message::default() }),
            ItemContent::Thought(text) if text.is_empty() => {}
            ItemContent::Thought(text) => {
                let turn = assistant(&mut turns, |turn| turn.reasoning.is_none() && turn.content.is_none() && turn.tool_calls.is_empty());
                turn.reasoning = Some(text);
            }
            ItemContent::Call(call) => {
                names.insert(call.id.clone(), call.name.clone());
                assistant(&mut turns, |_| true).tool_calls.push(call);
            }
            ItemContent::Returned { call_id, text } => turns.push(Message {
                role: "tool".into(),
                content: Some(text),
                name: names.get(&call_id).cloned(),
                tool_call_id: Some(call_id),
                ..Message::default()
            }),
            ItemContent::Nothing => {}
            ItemContent::Reference(_) => debug_assert!(false, "references were looked up"),
        }
    }
    turns
}

/// Returns the assistant's current turn, if it has room, or a new one.
fn assistant(turns: &mut Vec<Message>, room: impl FnOnce(&Message) -> bool) -> &mut Message {
    if !turns.last().is_some_and(|turn| turn.role == "assistant" && room(turn)) {
        turns.push(Message { role: "assistant".into(), ..Message::default() });
    }
    turns.last_mut().expect("there is one now")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(item: Value) -> Sent {
        understand("input[0]", item).unwrap()
    }

    fn error(item: Value) -> (String, String) {
        let body = understand("input[3]", item).unwrap_err().body();
        let text = |name: &str| body["error"][name].as_str().unwrap().to_owned();
        (text("param"), text("message"))
    }

    #[test]
    fn one_answers_items_are_one_turn() {
        let items = [
            json!({"role": "user", "content": "weather?"}),
            json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "look"}]}),
            json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Moment.", "annotations": []}]}),
            json!({"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{\"city\": \"Kyoto\"}"}),
            json!({"type": "function_call", "call_id": "c2", "name": "tell", "arguments": ""}),
            json!({"type": "function_call_output", "call_id": "c1", "output": "sun"}),
            json!({"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]}),
            json!({"role": "assistant", "content": "Sunny."}),
            json!({"role": "assistant", "content": "At noon."}),
        ];
        let turns = turns(items.map(|item| sent(item).said));
        let roles: Vec<_> = turns.iter().map(|turn| turn.role.as_str()).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant", "assistant"]);
        let answer = &turns[1];
        assert_eq!((answer.reasoning.as_deref(), answer.content.as_deref()), (Some("look"), Some("Moment.")));
        assert_eq!(answer.tool_calls, [ToolCall::new("c1", "look", "{\"city\":\"Kyoto\"}"), ToolCall::new("c2", "tell", "{}")]);
        assert_eq!((turns[3].name.as_deref(), turns[3].content.as_deref()), (Some("tell"), Some("noon")));
    }

    #[test]
    fn calls_of_tools_that_are_no_functions_are_calls_or_nothing() {
        let items = [
            json!({"role": "user", "content": "fix it"}),
            json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}),
            json!({"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}),
            json!({"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}),
            json!({"type": "local_shell_call", "id": "lsh_1", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}}),
            json!({"type": "local_shell_call_output", "id": "c2", "output": "a b"}),
        ];
        let turns = turns(items.map(|item| sent(item).said));
        let told: Vec<_> = turns.iter().map(|turn| (turn.role.as_str(), turn.content.as_deref(), turn.name.as_deref())).collect();
        assert_eq!(
            told,
            [
                ("user", Some("fix it"), None),
                ("assistant", None, None),
                ("tool", Some("done"), Some("apply_patch")),
                ("assistant", None, None),
                ("tool", Some("a b"), Some("local_shell")),
            ]
        );
        assert_eq!(turns[1].tool_calls[0].arguments, json!({"input": "*** Begin"}));
        assert_eq!(turns[3].tool_calls[0].arguments, json!({"type": "exec", "command": ["ls"]}));
    }

    #[test]
    fn an_item_stored_says_the_same_again() {
        for item in [
            json!({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}),
            json!({"role": "developer", "content": "terse"}),
            json!({"role": "assistant", "content": null}),
            json!({"type": "function_call", "id": "theirs", "call_id": "c", "name": "f", "arguments": "{}"}),
            json!({"type": "function_call_output", "call_id": "c", "output": "x"}),
            json!({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}),
            json!({"type": "web_search_call", "action": {}}),
            json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}),
        ] {
            let sent = sent(item);
            let stored = sent.named("msg_1".into());
            let (listed, said) = recall(&stored).unwrap();
            assert_eq!(said, sent.said);
            assert_eq!((&listed["id"], &listed["status"]), (&json!("msg_1"), &json!("completed")));
            assert!(!listed["content"].is_string(), "{listed}");
        }
    }

    #[test]
    fn ids_follow_from_an_item_and_what_came_before() {
        let (yes, no) = (sent(json!({"role": "user", "content": "yes"})), sent(json!({"role": "user", "content": "no"})));
        let first = yes.chained_id("");
        assert_eq!(first, sent(json!({"role": "user", "content": "yes", "id": "theirs"})).chained_id(""));
        assert!(first.starts_with("msg_") && first != no.chained_id("") && first != yes.chained_id(&first));
    }

    #[test]
    fn an_error_says_where_it_is() {
        for (item, param, word) in [
            (json!("x"), "input[3]", "object"),
            (json!({"role": "user"}), "input[3].content", "content"),
            (json!({"role": "robot", "content": "x"}), "input[3].role", "robot"),
            (json!({"role": "user", "content": 3}), "input[3]", "content parts"),
            (json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}), "input[3].content", "image input is not"),
            (json!({"role": "user", "content": [{"type": "input_text"}]}), "input[3].content", "needs its text"),
            (json!({"type": "function_call", "name": "f"}), "input[3].call_id", "call_id"),
            (json!({"type": "computer_call"}), "input[3].type", "computer_call"),
        ] {
            let (at, message) = error(item);
            assert_eq!(at, param, "{message}");
            assert!(message.contains(word), "{message}");
        }
    }
}
