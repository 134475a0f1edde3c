//! The content of a request's body, in any protocol: extracted on first use, and leniently. A body's errors are reported by its endpoint.

use super::{complexity::Signals, language};
use serde_json::{Map, Value};
use std::cell::OnceCell;

/// The length of text that is examined; more is only counted.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// The number of bytes that a token id counts as.
const TOKEN_BYTES: u64 = 4;

#[derive(Debug)]
pub struct BodyText<'a> {
    body: &'a Map<String, Value>,
    content: OnceCell<Content>,
    language: OnceCell<Option<&'static str>>,
}

#[derive(Debug, Default, PartialEq)]
pub struct Content {
    /// The beginning of all text.
    pub text: String,
    /// The beginning of the last message.
    pub last: String,
    /// The length of all text in bytes.
    pub bytes: u64,
    pub turns: usize,
    pub tools: usize,
    /// The user that the client names.
    pub user: Option<String>,
    pub metadata: Map<String, Value>,
}

impl<'a> BodyText<'a> {
    pub fn of(body: &'a Map<String, Value>) -> Self {
        Self { body, content: OnceCell::new(), language: OnceCell::new() }
    }

    pub fn content(&self) -> &Content {
        self.content.get_or_init(|| Content::read(self.body))
    }

    /// The language of the last message, by its ISO 639-3 code.
    pub fn language(&self) -> Option<&'static str> {
        *self.language.get_or_init(|| language::of(&self.content().last))
    }

    pub fn signals(&self) -> Signals {
        let Content { text, bytes, turns, tools, .. } = self.content();
        Signals::of(text, *bytes, *tools, *turns)
    }
}

impl Content {
    /// Reads the fields of chat, completions, responses and messages together.
    fn read(body: &Map<String, Value>) -> Self {
        let tools = body.get("tools").and_then(Value::as_array).map_or(0, Vec::len);
        let mut content = Self { tools, ..Self::default() };
        for name in ["system", "instructions"] {
            body.get(name).into_iter().for_each(|field| content.hear(field));
        }
        for field in ["messages", "prompt", "input"].into_iter().filter_map(|name| body.get(name)) {
            match field {
                // Token ids.
                Value::Array(ids) if !ids.is_empty() && ids.iter().all(Value::is_u64) => {
                    content.bytes += ids.len() as u64 * TOKEN_BYTES;
                    content.turns += 1;
                }
                Value::Array(items) => items.iter().for_each(|item| content.turn(item)),
                Value::Null => {}
                field => content.turn(field),
            }
        }
        let metadata = body.get("metadata").and_then(Value::as_object);
        let names = [body.get("user"), body.get("safety_identifier"), metadata.and_then(|metadata| metadata.get("user_id"))];
        let user = names.into_iter().flatten().find_map(Value::as_str);
        content.user = user.filter(|user| !user.is_empty()).map(str::to_owned);
        content.metadata = metadata.cloned().unwrap_or_default();
        content
    }

    fn turn(&mut self, item: &Value) {
        self.turns += 1;
        self.last.clear();
        self.hear(item);
    }

    /// All text in a message, an item, or a part of one.
    fn hear(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.take(text),
            Value::Array(parts) => parts.iter().for_each(|part| self.hear(part)),
            Value::Object(fields) => {
                for name in ["content", "text", "output", "arguments"] {
                    fields.get(name).into_iter().for_each(|field| self.hear(field));
                }
            }
            Value::Number(_) => self.bytes += TOKEN_BYTES,
            Value::Null | Value::Bool(_) => {}
        }
    }

    fn take(&mut self, text: &str) {
        self.bytes += text.len() as u64;
        for kept in [&mut self.text, &mut self.last] {
            let room = text.floor_char_boundary(TEXT_BYTES_MAX.saturating_sub(kept.len()));
            kept.push_str(&text[..room]);
            kept.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_protocol_says_the_same() {
        let said = |body: Value| Content::read(body.as_object().unwrap());
        let chat = said(json!({
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "user": "jane", "tools": [{"type": "function"}],
        }));
        assert_eq!((chat.text.as_str(), chat.last.as_str(), chat.turns, chat.tools), ("Be kind.\nHello\n", "Hello\n", 2, 1));
        assert_eq!((chat.bytes, chat.user.as_deref()), (13, Some("jane")));
        let messages = said(json!({
            "system": [{"type": "text", "text": "Be kind."}], "messages": [{"role": "user", "content": "Hello"}], "metadata": {"user_id": "jane"},
        }));
        assert_eq!((messages.text, messages.last, messages.turns, messages.user), (chat.text, chat.last, 1, chat.user));
        let responses = said(json!({
            "instructions": "Be kind.", "safety_identifier": "jane",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                {"type": "function_call_output", "output": "42"}],
        }));
        assert_eq!((responses.text.as_str(), responses.turns, responses.user.as_deref()), ("Be kind.\nHello\n42\n", 2, Some("jane")));
        assert_eq!(said(json!({"prompt": "Hello"})).bytes, 5);
        assert_eq!(said(json!({"prompt": ["Hello", "you"]})).turns, 2);
        assert_eq!((said(json!({"prompt": [1, 2, 3]})).bytes, said(json!({"prompt": [[1, 2], [3]]})).bytes), (12, 12));
    }

    #[test]
    fn long_text_is_counted_and_not_kept() {
        let body = json!({"prompt": "é".repeat(TEXT_BYTES_MAX)});
        let content = Content::read(body.as_object().unwrap());
        assert_eq!(content.bytes, 2 * TEXT_BYTES_MAX as u64);
        assert!(content.text.len() <= TEXT_BYTES_MAX + 1);
    }
}
