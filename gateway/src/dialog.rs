//! A conversation in any protocol: its messages, the tools that may be called, the requested reasoning. Endpoints translate their bodies
//! into a [`Dialog`]; the model's chat template turns it into a prompt. [`thinking`]: that reasoning, and its limit; `written`: the parts that clients and tools write; `mended`: orders
//! of turns that a template refuses, rearranged into one that it accepts.

mod mended;
pub mod prompt;
pub(crate) mod render;
pub mod thinking;
mod written;

use crate::{base::json::each_string, text::tool::Tool};
use minijinja::Value;
use std::collections::BTreeMap;
use thinking::ReasoningWish;

#[derive(Clone, Debug, Default)]
pub struct Dialog {
    pub messages: Vec<Message>,
    pub tools: Vec<Tool>,
    pub tool_choice: ToolChoice,
    /// Whether an answer may have more than one call.
    pub parallel: bool,
    pub reasoning: ReasoningWish,
    /// Variables for the template; they override those that follow from the fields above.
    pub template_kwargs: BTreeMap<String, Value>,
    /// Whether the prompt ends in the middle of the last message, which the model continues.
    pub continues: bool,
}

/// One turn of any role.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant`, or `tool`.
    pub role: String,
    pub content: Option<String>,
    /// An assistant's reasoning before its answer.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    pub tool_call_id: Option<String>,
    pub name: Option<String>,
    /// Further fields, for the template only.
    pub others: BTreeMap<String, Value>,
}

/// A call that an assistant made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// The arguments: an object, or a different value if the model or the client wrote one (a string for text that is not JSON).
    pub arguments: serde_json::Value,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model does not see its tools.
    None,
    #[default]
    Auto,
    /// At least one call, and no text.
    Required,
    /// A call of this tool.
    Named(String),
}

impl Dialog {
    /// Visits all text that a participant wrote: messages, arguments of calls, and their outputs.
    pub fn each_text(&mut self, mut act: impl FnMut(&mut String)) {
        for message in &mut self.messages {
            message.content.iter_mut().chain(&mut message.reasoning).for_each(&mut act);
            message.tool_calls.iter_mut().for_each(|call| each_string(&mut call.arguments, &mut act));
        }
    }
}

impl ToolCall {
    /// Makes a call of `arguments` as clients send them: JSON as text, or nothing for no arguments.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: &str) -> Self {
        Self { id: id.into(), name: name.into(), arguments: understood(arguments) }
    }
}

/// Reads arguments leniently: some clients encode an object twice, and some send `null` for no arguments.
fn understood(arguments: &str) -> serde_json::Value {
    use serde_json::Value;
    let none = || Value::Object(serde_json::Map::new());
    if arguments.trim().is_empty() {
        return none();
    }
    match serde_json::from_str(arguments) {
        Err(_) => arguments.into(),
        Ok(Value::Null) => none(),
        Ok(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(inner @ Value::Object(_)) => inner,
            _ => text.into(),
        },
        Ok(value) => value,
    }
}
